"""The model of mail, services, cursors, groups and steps: what clients and workers are told.

Owns the promises about each bundle, and what is in whose hands. The rules: each confirm names what
is in the log, for good when it was synced; each hand-out of the broker is compared with the state
at that moment; a thing is in one hand at a time. Source: SPEC.md, section 4.8; docs/design.md
(Promises; Queues and the checkpoint).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

from malamute_protocol import commands as c
from malamute_py.broker.ready import MAIL_STREAM, MAIN
from malamute_py.changelog import records as r
from tests.simulation.acts import LEVEL_SYNCED, Act
from tests.simulation.model import Violation
from tests.simulation.records import CONTENT_HEAD, STAMP_BYTES, decode_batch
from tests.simulation.work_log import Batch, Bundle, WorkLog, is_again, place_in

MEMORY_NUMBERS = 1 << 40
"""Numbers from here on belong to things that are kept in memory only."""


class WorkModel(WorkLog):
    """The model of one run: its log, and what clients and workers are told."""

    def __init__(self) -> None:
        super().__init__()
        self.subjects: dict[int, str] = {}
        """Serial -> subject."""
        self.used_twice: set[tuple[str, bytes]] = set()
        """(sender, key) of messages and requests under which another one was sent as well."""
        self.held: dict[tuple[Any, ...], tuple[int, int]] = {}
        """(kind, place, number) -> (link, subscription) that holds it."""
        self.suspects: list[tuple[tuple[int, int], str]] = []
        """((link, subscription), words): a violation if that goes on living."""
        self.leaving: set[tuple[int, int]] = set()
        """Subscriptions that their clients have given up; the broker may know it or not."""
        self.loose: set[tuple[Any, ...]] = set()
        """Things that were given back since the broker began."""
        self.blocked: set[int] = set()
        """Links that once took no more: messages to them may have been decided long before."""
        self.memory: dict[int, int] = {}
        """Number -> serial of things confirmed in memory."""
        self.delivered = self.confirmed = 0
        self.firsts: dict[tuple[int, int, int], int] = {}
        """(link, inbox, priority) -> the highest number that it was given for the first time."""
        self.given: set[int] = set()
        """Messages that were given to a reader since the broker began."""

    # --- confirms -------------------------------------------------------------------------

    def confirm(self, act: Act, command: c.Confirm, link: int) -> None:
        """Note a promise of the broker: it must be so, and stay so."""
        act.confirmed = True
        self.confirmed += 1
        if act.memory:
            if command.level != 1:
                raise Violation("wrong_confirm", f"level {command.level} for what is in memory")
            return
        for wish in act.wishes:
            for number in wish.numbers:
                if wish.kind == "ack":
                    self.acknowledged.add((link, "mail", number))
                elif wish.kind == "end" or (wish.kind == "reply" and wish.last):
                    # A link that is told late may hold it anew: it was revived meanwhile.
                    ends = self.state.gone_jobs.get(number, [])
                    if number not in self.state.jobs and self._ended_by(act, number) in ends[-1:]:
                        self.acknowledged.add((link, "job", number))
                elif wish.kind == "records":
                    self.acknowledged.add((link, "record", wish.place, number))
        wanted = act.level or LEVEL_SYNCED
        ring = self.rings_of.get(act.wishes[0].place if act.wishes else "", MAIN)
        if ring != MAIN:
            if command.level < wanted:
                raise Violation("wrong_confirm", f"level {command.level} for {act}")
            self._confirm_beside(act, command, ring)
            return
        lsns = self._bundles_of(act, command)
        self._stood_there(act)
        if command.level < wanted:
            raise Violation("wrong_confirm", f"level {command.level} for {act}")
        for lsn in lsns:
            bundle = self._at(lsn)
            if command.level == LEVEL_SYNCED:
                if bundle.end_lsn > self.told_lsn:
                    raise Violation(
                        "early", f"synced was confirmed for {act} at {bundle.end_lsn}, the disk "
                        f"has {self.told_lsn}",
                    )  # fmt: skip
                bundle.promised = bundle.promised or f"confirmed: {act}"

    def _confirm_beside(self, act: Act, command: c.Confirm, ring: str) -> None:
        state, truth = self.state, self.ring(ring)
        (wish,) = act.wishes
        lsn = state.beside.get(wish.serials[0])
        number = self.place_of(wish.place)[0]
        if lsn is None or state.records.get((number, command.offset)) != wish.serials[0]:
            raise Violation("wrong_confirm", f"offset {command.offset} for {act}")
        if command.level == LEVEL_SYNCED:
            bundle = next(bundle for bundle in truth.bundles if bundle.lsn == lsn)
            if bundle.end_lsn > truth.told_lsn:
                raise Violation("early", f"synced was confirmed for {act} in ring {ring}")
            bundle.promised = bundle.promised or f"confirmed: {act}"

    def _stood_there(self, act: Act) -> None:
        for wish in act.wishes:
            if wish.since < 0 or act.key:
                continue
            stream, name = self.place_of(wish.place)
            stood = self.state.stood.get((stream, name, wish.numbers[0]), set())
            # Everything before the oldest record is one place.
            oldest = self.first_of(stream)
            stands = {max(at, oldest) for at in stood}
            if -1 not in stood and max(wish.since, oldest) not in stands:
                raise Violation("since", f"{act}: it stood at {sorted(stood)}")

    def _on_disk(self, place: str, stream: int, offset: int) -> bool:
        """Whether the core was told that the disk has the record at an offset."""
        lsn = self.state.places[stream, offset]
        ring = self.rings_of.get(place.partition("/")[0], MAIN)
        if ring == MAIN:
            return self._at(lsn).end_lsn <= self.told_lsn
        truth = self.ring(ring)
        return truth.bundles[place_in(truth.bundles, lsn)].end_lsn <= truth.told_lsn

    def _at(self, lsn: int) -> Bundle:
        return self.bundles[place_in(self.bundles, lsn)]

    def _bundles_of(self, act: Act, command: c.Confirm) -> set[int]:
        """Return LSNs of the bundles in which the act happened; raises when it did not."""
        state = self.state
        lsns: set[int] = set()

        def found(lsn: int | None, what: str) -> None:
            if lsn is None:
                raise Violation("wrong_confirm", f"{what} of {act} did not happen")
            lsns.add(lsn)

        if act.key:
            found(state.bundle_of_key.get((act.holder, act.key)), "the key")
        for wish in act.wishes:
            for serial in wish.serials:
                found(state.serials.get(serial), f"record {serial}")
            place = self.place_of(wish.place)
            for number in wish.numbers:
                if wish.kind == "ack":
                    found(state.gone_mail.get(number), f"ack of {number}")
                elif wish.kind == "end" or (wish.kind == "reply" and wish.last):
                    found(self._ended_by(act, number), f"end of {number}")
                elif wish.kind == "records" and not act.key:
                    # A step with a key was judged when its bundle was appended. A retry may come
                    # when a power loss has taken back the record, and another has its offset.
                    position, done = state.groups.get(place, (0, frozenset()))
                    if number >= position and number not in done:
                        found(None, f"ack of record {number}")
                elif wish.kind == "back":
                    lsn = state.returned.get((*place, number), -1)
                    found(lsn if lsn >= act.since_lsn else None, f"return of record {number}")
                elif wish.kind == "move" and not act.key:
                    found(state.moves.get((*place, number)), f"move to {number}")
        first = next((wish for wish in act.wishes if wish.serials), None)
        # The number of a step or a reply that came again is not remembered.
        nameless = first is None or (command.duplicate and (act.atomic or first.kind == "reply"))
        if first is not None and not nameless:
            stream = self.place_of(first.place)[0] if first.kind == "publish" else MAIL_STREAM
            if state.records.get((stream, command.offset)) != first.serials[0]:
                code = "wrong_duplicate" if command.duplicate else "wrong_confirm"
                raise Violation(code, f"offset {command.offset} for {act}")
            named = state.places[stream, command.offset]
            if named < state.serials[first.serials[0]]:
                # The broker forgot the key before the act came again: it is in the log twice, and
                # this confirms the earlier copy.
                return {named}
        return lsns

    def _ended_by(self, act: Act, number: int) -> int | None:
        """Return the LSN of the bundle in which an act ended a request; None: it did not.

        Without a key an act is sent once, by the link that holds the request: if it ended the
        request, then nothing else did between its sending and that.
        """
        state = self.state
        since_lsn = act.since_lsn
        if act.key:
            since_lsn = state.bundle_of_key.get((act.holder, act.key), since_lsn)
        return next((lsn for lsn in state.gone_jobs.get(number, ()) if lsn >= since_lsn), None)

    def refused(self, act: Act, command: c.Refused) -> None:
        """Note that the broker says that nothing of this happened."""
        twice = (act.holder, act.key) in self.used_twice
        if act.key and not act.atomic and command.code == "conflict" and not twice:
            raise Violation("false_conflict", f"{command.reason}: {act} has a key of its own")
        if act.tries != 1 or command.code == "journal_failed":
            # A failed sync leaves the appended bundles to the next start.
            return
        state = self.state
        if act.key and (act.holder, act.key) in state.keys and not twice:
            raise Violation("refused_kept", f"{command.code} for {act}")
        for wish in act.wishes:
            if any(serial in state.serials for serial in wish.serials):
                raise Violation("refused_kept", f"{command.code} for {act}")

    def _just(self, lsn: int | None) -> bool:
        """Whether it ended in the turn whose messages leave now.

        A client may ask for something and take it back with one message.
        """
        return lsn is not None and lsn >= self.turn_lsn

    # --- deliveries -----------------------------------------------------------------------

    def _hold(self, thing: tuple[Any, ...], owner: tuple[int, int]) -> None:
        before = self.held.get(thing)
        given_back = before in self.leaving or thing in self.loose
        if before is not None and not given_back and owner[0] not in self.blocked:
            self.suspects.append((before, f"{thing} of {before} was given to {owner}"))
        self.held[thing] = owner

    def freed(self, owner: tuple[int, int] | int) -> None:
        """Note that a link has ended, or one of its subscriptions is about to."""
        if isinstance(owner, int):
            self.ended_us.setdefault(owner, self.now_us())
        self.held = {
            thing: held for thing, held in self.held.items()
            if (held[0] if isinstance(owner, int) else held) != owner
        }  # fmt: skip

    def free(self, thing: tuple[Any, ...]) -> None:
        """Note that a client is about to give this back; when the broker hears of it is unknown."""
        self.held.pop(thing, None)
        self.loose.add(thing)

    def _lease_ended(self, change: r.GroupReturned) -> None:
        place = f"{self.state.streams[change.stream]}/{change.name}"
        self.let_go(place, (n for first, end in change.ranges for n in range(first, end)))

    def let_go(self, place: str, offsets: Iterable[int]) -> None:
        """Note that records of a group are about to be in no hand."""
        keys = {thing[-1]: thing for thing in self.held if thing[:2] == ("key", place)}
        for offset in offsets:
            self.free(("record", place, offset))
            if offset in keys:
                self.free(keys[offset])

    def judge(self, alive: Iterable[int]) -> None:
        """Judge the messages of one turn, which are sent; these links live on."""
        links = set(alive)
        suspects, self.suspects = self.suspects, []
        for owner, words in suspects:
            if owner[0] in links and owner not in self.leaving and owner[0] not in self.blocked:
                raise Violation("two_hands", words)

    def left(self, owner: tuple[int, int]) -> None:
        """Note that a client gives a subscription up: others may get what it holds from now on."""
        self.leaving.add(owner)
        self.freed(owner)

    def opened(self, owner: tuple[int, int]) -> None:
        """Note that the broker says that a subscription begins: an earlier one had ended before."""
        self.leaving.discard(owner)
        self.freed(owner)

    def mail(
        self, link: int, box: str, command: c.Mail, frames: list[bytes], now_ms: int,
        single: bool,
    ) -> list[tuple[int, int]]:  # fmt: skip
        """Judge messages that go to a reader: (number, serial) of each."""
        rows = rows_of(command.rows, frames)
        state = self.state
        for number, serial in rows:
            self.delivered += 1
            if number >= MEMORY_NUMBERS:
                if serial and serial not in self.act_of:
                    raise Violation("ghost", f"message {number} is record {serial}")
                self._hold(("memory", number), (link, command.subscription))
                continue
            owner = next((b for b, name in state.boxes.items() if name == box), -1)
            letter = state.mail.get((owner, number))
            if letter is None:
                late = link in self.blocked or self._just(state.gone_mail.get(number))
                if not late or (link, "mail", number) in self.acknowledged:
                    raise Violation("after_end", f"message {number} of {box}")
                continue
            if state.records[MAIL_STREAM, number] != serial:
                raise Violation("bodies", f"message {number} shows record {serial}")
            if letter.expires_at_ms and letter.expires_at_ms <= now_ms and link not in self.blocked:
                raise Violation(
                    "expired", f"message {number} expired at {letter.expires_at_ms}, it is {now_ms}"
                )
            if letter.not_before_ms > now_ms and link not in self.blocked:
                raise Violation(
                    "expired", f"message {number} is due at {letter.not_before_ms}, not {now_ms}"
                )
            if command.attempts < letter.attempts + 1 and link not in self.blocked:
                raise Violation("attempts", f"message {number}: {command.attempts}, {letter}")
            self._hold(("mail", box, number), (link, command.subscription))
            place = link, command.subscription, letter.priority
            if number not in self.given and not letter.not_before_ms and not letter.why:
                if single and number < self.firsts.get(place, -1):
                    raise Violation("order", f"message {number} after {self.firsts[place]}")
                self.firsts[place] = max(number, self.firsts.get(place, -1))
            self.given.add(number)
        return rows

    def work(
        self, link: int, holder: str, service: str, command: c.Work, frames: list[bytes],
        selects: Callable[[int], bool],
    ) -> list[tuple[int, int]]:  # fmt: skip
        """Judge requests that go to a worker: (number, serial) of each."""
        rows = rows_of(command.rows, frames)
        state = self.state
        for number, serial in rows:
            self.delivered += 1
            job = state.jobs.get(number)
            ended = state.gone_jobs.get(number, [None])[-1]
            late = link in self.blocked or self._just(ended)
            late = late and (link, "job", number) not in self.acknowledged
            if late and (job is None or (job.holder, job.attempts) != (holder, command.attempts)):
                continue
            if job is None:
                raise Violation("after_end", f"request {number} of {service}")
            if state.services[job.service] != service:
                raise Violation("wrong_record", f"request {number} is not of {service}")
            if state.records[MAIL_STREAM, number] != serial:
                raise Violation("bodies", f"request {number} shows record {serial}")
            if job.holder != holder:
                raise Violation("two_hands", f"request {number} of {job.holder!r} to {holder}")
            if job.attempts != command.attempts:
                raise Violation(
                    "attempts", f"request {number}: {command.attempts}, {job.attempts} are logged"
                )
            told = self.attempts.get(number, 0)
            if command.attempts + job.withdrawn <= told and link not in self.blocked:
                raise Violation(
                    "attempts",
                    f"request {number}: {command.attempts}, {self.attempts[number]} was told",
                )
            if not selects(serial):
                raise Violation("not_selected", f"request {number}: {self.subjects[serial]}")
            if command.key != job.key[1]:
                raise Violation("wrong_record", f"request {number} has the key {command.key!r}")
            self.attempts[number] = command.attempts + job.withdrawn
            self.hands[number] = link
        return rows

    def record(
        self, link: int, place: str, command: c.Deliver, frames: list[bytes],
        keyed: bool, selects: Callable[[int], bool],
    ) -> list[tuple[int, int]]:  # fmt: skip
        """Judge records that go to a member of a group: (offset, serial) of each."""
        rows = rows_of(command.rows, frames)
        state = self.state
        at = self.place_of(place)
        owner = link, command.subscription
        durable = is_durable(place)
        for offset, serial in rows:
            self.delivered += 1
            if state.records.get((at[0], offset)) != serial:
                raise Violation("wrong_record", f"{place}: offset {offset} shows {serial}")
            if not selects(serial):
                raise Violation("not_selected", f"{place}: offset {offset}")
            if durable and not self._on_disk(place, at[0], offset):
                raise Violation("early", f"{place}: offset {offset} is not on the disk yet")
            position, done = state.groups.get(at, (0, frozenset()))
            if offset < position or offset in done:
                late = link in self.blocked or self._just(state.gone_records.get((*at, offset)))
                if not late or (link, "record", place, offset) in self.acknowledged:
                    raise Violation("after_end", f"{place}: offset {offset} is done")
                continue
            times, why = state.tries.get(at, {}).get(offset, (0, ""))
            told = link in self.blocked or self._just(state.returned.get((*at, offset)))
            if command.attempts != times + 1 and not told:
                raise Violation("attempts", f"{place}: offset {offset}, {times}, {command}")
            if state.is_dead(times, why) and not told:
                raise Violation("dead", f"{place}: offset {offset} comes after {times}, {why}")
            if not command.from_ <= offset < command.next:
                raise Violation("cover", f"{place}: offset {offset} in {command}")
            if keyed:
                subject = self.subjects[serial]
                for thing, held in self.held.items():
                    kind, *rest = thing
                    if kind != "key" or rest[:2] != [place, subject] or rest[2] in done:
                        continue
                    if thing in self.loose:
                        continue
                    if rest[2] >= position and held != owner:
                        self.suspects.append(
                            (held, f"{place}: {subject} is with {held}, and goes to {owner}")
                        )
                self.held["key", place, subject, offset] = owner
            self._hold(("record", place, offset), owner)
        return rows

    def exclusive(self, link: int, place: str, identity: str, session: bytes) -> None:
        """Judge that a member of an exclusive group is given records: the log has it as holder."""
        holder = self.state.holders.get(self.place_of(place))
        known = holder is not None and is_again(holder, identity, session)
        if not known and link not in self.blocked:
            raise Violation("place", f"{place}: {identity or session!r} gets records of {holder}")

    def joins(self, place: str, identity: str, session: bytes) -> None:
        """Note that a member joins: a holder that is back may leave at any time."""
        at = self.place_of(place)
        kept = self.kept.get(at)
        if kept is not None and is_again(kept[0], identity, session):
            del self.kept[at]

    # --- recovery -------------------------------------------------------------------------

    def recovered(
        self, batches: list[tuple[int, int, int, Batch]], start_lsn: int, end_lsn: int, *,
        power: bool,
    ) -> None:  # fmt: skip
        """Compare the log that was found, and forget what the dead broker has handed out."""
        super().recovered(batches, start_lsn, end_lsn, power=power)
        self.held.clear()
        self.loose.clear()
        self.given.clear()
        self.firsts.clear()

    # --- the end --------------------------------------------------------------------------

    def answered(self) -> None:
        """Check that each accepted request that is gone was answered once, unless given up."""
        state = self.state
        puts = Counter((put.key, put.row) for put in state.jobs_put.values())
        for number, put in state.jobs_put.items():
            ends = state.ends.get(number, [])
            sender, key = put.key
            told = state.lasts.get(("", key, put.row), [])
            revived = ends.count("revived")
            closed = [end for end in ends if end != "revived"]
            if len(closed) > revived + 1:
                raise Violation("ended_twice", f"request {number}: {ends}")
            if not key or put.reply_to.startswith("~"):
                continue
            if puts[put.key, put.row] > 1:
                continue  # It was taken anew when its key was forgotten.
            if len(told) > revived + 1:
                raise Violation("ended_twice", f"request {number} was answered {told}, {ends}")
            if number not in state.jobs and closed[-1] != "cancelled" and not told:
                raise Violation("lost", f"request {number} of {sender} ended {ends}, without word")


def is_durable(place: str) -> bool:
    """Whether the members of a group see only what is on the disk, as in every second group."""
    return bool(crc32(place.encode()) & 1)


def rows_of(rows: bytes | None, frames: list[bytes]) -> list[tuple[int, int]]:
    """Return (number, serial) of the rows that a delivery shows."""
    data = b"".join(frames)
    shown: list[tuple[int, int]] = []
    position = 0
    while position < len(data):
        head = CONTENT_HEAD.unpack_from(data, position + STAMP_BYTES)
        size = STAMP_BYTES + head[4]
        one = data[position : position + size]
        position += size
        batch = [(row.offset, row.serial) for row in decode_batch(one, 0).rows]
        if rows is not None:
            mask = int.from_bytes(rows, "little")
            batch = [pair for row, pair in enumerate(batch) if mask >> row & 1]
        shown += batch
    return shown
