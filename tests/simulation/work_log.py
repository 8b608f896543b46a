"""The log of mail, services, cursors, groups and steps, as the machine wrote it.

Owns a copy of every bundle that the rings took, and the state that its changes make. The rules:
each bundle must follow the one before it and be lawful for the state at that moment; a step is one
bundle, so it is there or not; after a death the tables must be what the bundles that survived make,
and every bundle that had to survive must be among them. Source: SPEC.md, section 4.8;
docs/design.md (Promises; Queues and the checkpoint).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from malamute_py.broker.ready import CHANGE_STREAM, MAIL_STREAM, MAIN
from malamute_py.changelog import records as r
from malamute_py.changelog.applying import apply
from malamute_py.changelog.tables import Queues, Tables
from malamute_py.journal.layout import control_bodies
from tests.simulation.acts import Act
from tests.simulation.model import Violation
from tests.simulation.records import STAMP_BYTES
from tests.simulation.records import _decode_content as decode_content
from tests.simulation.work_state import State
from tests.simulation.work_tables import difference, state_of

LATE_US = 60_000
"""Time within which everything that a lost link held must wait again."""


@dataclass(slots=True)
class Batch:
    """One batch as it was appended, its stamp apart."""

    stream: int
    base: int
    count: int
    kind: int
    content: bytes


@dataclass(slots=True)
class Bundle:
    """Batches that were appended together."""

    lsn: int
    end_lsn: int
    epoch: int
    batches: list[Batch]
    promised: str = ""
    """Reason why a power loss must leave it; empty: it need not."""

    @property
    def concerns(self) -> bool:
        """Whether the tables of the queues have to read it."""
        return any(batch.stream in (CHANGE_STREAM, MAIL_STREAM) for batch in self.batches)


@dataclass(slots=True)
class RingTruth:
    """Facts that the machine notes of a ring; of ring main the model itself has the others."""

    failed: bool = False
    bundles: list[Bundle] = field(default_factory=list)
    unsure: list[list[Batch]] = field(default_factory=list)
    told_lsn: int = 0


def serials_of(content: bytes, base: int, count: int) -> list[int]:
    """Return the serial of each record; 0: it has none, as a notice."""
    crc = int.from_bytes(content[8:12], "little")
    return [row.serial for row in decode_content(content, base, count, crc)]


class WorkLog:
    """The log of one run: ring main, the rings beside it, and the state that they make."""

    def __init__(self) -> None:
        self.rings: dict[str, RingTruth] = {}
        self.logs: dict[Any, Any] = {}
        """Logs for the machine, which empties those in memory; there are none."""
        self.first_of: Callable[[int], int] = lambda stream: 0
        """The oldest record of a stream."""
        self.now_us: Callable[[], int] = lambda: 0
        self.now_ms: Callable[[], int] = lambda: 0
        """Time of the broker's clock."""
        self.kept: dict[tuple[int, str], tuple[r.Holder, int]] = {}
        """Exclusive group -> its holder when the broker began that has not joined it since, and
        until when no other may have its place."""
        self.hands: dict[int, int] = {}
        """Request -> the link that it was handed out to last, since the broker began."""
        self.ended_us: dict[int, int] = {}
        """Link -> when it ended, since the broker began."""
        self.replays = False
        """True: bundles that survived a power loss are entered once more."""
        self.rings_of: dict[str, str] = {}
        """Stream -> its ring, of streams that have one of their own."""
        self.turn_lsn = 0
        """End of the log before the turn whose messages leave now."""
        self.bundles: list[Bundle] = []
        self.unsure: list[list[Batch]] = []
        """Bundles of which a crash hides whether they were written."""
        self.state = State()
        self.queues, self.tables = Queues(), Tables()
        """The tables that the product's own `apply` makes of the whole log."""
        self.told_lsn = 0
        """Position up to which the core knows that the disk has it."""
        self.expiring: set[int] = set()
        """Serials of records with an expiry."""
        self.numbers: dict[int, int] = {}
        """Number of a message or request -> its serial, including those that a power loss took."""
        self.act_of: dict[int, Act] = {}
        """Serial -> the act that brought it."""
        self.steps: dict[tuple[str, bytes], Act] = {}
        """(sender, key) -> atomic act."""
        self.acknowledged: set[tuple[Any, ...]] = set()
        """(link, kind, place, number) whose acknowledgement was confirmed to a client."""
        self.said_done: set[tuple[str, int]] = set()
        """(place of a group, offset): a member has acknowledged the record, confirmed or not."""
        self.attempts: dict[int, int] = {}
        """Request -> attempts that a worker was told."""
        self.recoveries = 0

    # --- for the machine ------------------------------------------------------------------

    def ring(self, name: str) -> RingTruth:
        """Find or make the facts of a ring."""
        return self.rings.setdefault(name, RingTruth())

    def synced(self, ring: str, lsn: int) -> None:
        """Note that the journal says that the ring is on disk up to here."""

    def told(self, ring: str, lsn: int) -> None:
        """Note that the core was told so."""
        if ring != MAIN:
            self.ring(ring).told_lsn = max(self.ring(ring).told_lsn, lsn)
            return
        self.told_lsn = max(self.told_lsn, lsn)

    @property
    def end_lsn(self) -> int:
        """Return where the newest bundle ends."""
        return self.bundles[-1].end_lsn if self.bundles else 0

    # --- appending ------------------------------------------------------------------------

    def appended(self, bundle: Bundle) -> None:
        """Enter a bundle that the ring took, and look at its changes."""
        if bundle.lsn < self.end_lsn:
            raise Violation("reused", f"a bundle at {bundle.lsn}, the log ends at {self.end_lsn}")
        self.bundles.append(bundle)
        if self.kept:
            self._within_windows(changes_of(bundle))
        acts = self._enter(bundle)
        for act in acts:
            self._whole(act, bundle)

    # --- a stream's own ring --------------------------------------------------------------

    def appended_beside(self, ring: str, bundle: Bundle) -> None:
        """Enter records that a ring beside main took, of streams that have it for themselves."""
        truth = self.ring(ring)
        if truth.bundles and bundle.lsn < truth.bundles[-1].end_lsn:
            raise Violation("reused", f"ring {ring}: a bundle at {bundle.lsn}")
        truth.bundles.append(bundle)
        self._enter_beside(bundle)

    def _enter_beside(self, bundle: Bundle) -> None:
        state = self.state
        for batch in bundle.batches:
            if batch.kind:
                continue
            tail = state.tails.get(batch.stream, 0)
            if batch.base != tail:
                code = "hole" if batch.base > tail else "reused"
                raise Violation(code, f"stream {batch.stream}: {batch.base} follows {tail}")
            state.tails[batch.stream] = batch.base + batch.count
            self._not_done_before(batch)
            serials = serials_of(batch.content, batch.base, batch.count)
            for offset, serial in enumerate(serials, batch.base):
                if serial in state.beside:
                    raise Violation("twice", f"record {serial} is in the log twice")
                state.beside[serial] = bundle.lsn
                state.records[batch.stream, offset] = serial
                state.places[batch.stream, offset] = bundle.lsn
                for place in state.groups:
                    # The record under this offset was another one, which is lost.
                    state.gone_records.pop((*place, offset), None)

    def _not_done_before(self, batch: Batch) -> None:
        if self.replays or self.state.unordered:
            return
        for place, (next, done) in self.state.groups.items():
            if place[0] != batch.stream:
                continue
            if next > batch.base or not done.isdisjoint(
                range(batch.base, batch.base + batch.count)
            ):
                raise Violation(
                    "done_before",
                    f"group {place} is at {next}, done {sorted(done)[:5]}; {batch.base}",
                )

    def recovered_beside(
        self, ring: str, batches: list[tuple[int, int, int, Batch]], start_lsn: int, end_lsn: int,
        *, power: bool,
    ) -> None:  # fmt: skip
        """Compare another ring's log that was found with the one that was written."""
        truth = self.ring(ring)
        dropped, more = self._survived(truth, ring, batches, start_lsn, end_lsn, power=power)
        if dropped:
            self._again()
        for bundle in more:
            self.appended_beside(ring, bundle)
        for bundle in truth.bundles:
            bundle.promised = bundle.promised or "kept by a recovery"
        truth.unsure.clear()
        truth.failed = False
        truth.told_lsn = end_lsn

    # --- ring main ------------------------------------------------------------------------

    def _enter(self, bundle: Bundle) -> list[Act]:
        state = self.state
        acts: dict[int, Act] = {}
        changes = changes_of(bundle)
        copies = {
            change.base: change.origin
            for change in changes if isinstance(change, r.MailPut) and change.origin is not None
        }  # fmt: skip
        for batch in bundle.batches:
            tail = state.tails.get(batch.stream, 0)
            # A start may skip numbers of mail, so that none is ever used again.
            skipped = batch.stream == MAIL_STREAM and state.mail_epoch != bundle.epoch
            if batch.base < tail or (batch.base > tail and not skipped):
                code = "hole" if batch.base > tail else "reused"
                raise Violation(code, f"stream {batch.stream}: {batch.base} follows {tail}")
            state.tails[batch.stream] = batch.base + batch.count
            if batch.kind:
                continue
            self._not_done_before(batch)
            serials = serials_of(batch.content, batch.base, batch.count)
            if batch.stream == MAIL_STREAM:
                state.mail_epoch = bundle.epoch
                state.batches[batch.base] = batch.count
                for number, serial in enumerate(serials, batch.base):
                    if self.numbers.setdefault(number, serial) != serial:
                        raise Violation(
                            "reused", f"message {number} was record {self.numbers[number]}"
                        )
            origin = copies.get(batch.base) if batch.stream == MAIL_STREAM else None
            for row, serial in enumerate(serials):
                place = batch.stream, batch.base + row
                state.records[place], state.places[place] = serial, bundle.lsn
                if origin is not None:
                    place = origin.number, origin.offsets[row]
                    if state.records.get(place) != serial and not self.replays:
                        raise Violation("bodies", f"record {serial} is no copy of {origin}")
                    continue
                if not serial:
                    continue
                if serial not in self.act_of:
                    raise Violation("ghost", f"record {serial} was never sent")
                act = self.act_of[serial]
                if serial in state.serials and (act.holder, act.key) not in state.forgotten:
                    raise Violation("twice", f"record {serial} is in the log twice")
                state.serials[serial] = bundle.lsn
                if act.atomic:
                    acts[act.number] = act
        for change in changes:
            if isinstance(change, r.GroupDone) and not self.replays:
                self._not_lost(change, bundle.lsn)
            if isinstance(change, r.WorkReturned) and change.why == "lease" and not self.replays:
                self._by_lease(change)
            if isinstance(change, r.GroupReturned) and change.why == "lease" and not self.replays:
                self._lease_ended(change)
            if isinstance(change, r.WorkTaken):
                # Until it is shown to the new holder, no link is known to have it.
                for base, rows in change.rows:
                    for number in state._of(base, rows, lambda job: True):
                        self.hands.pop(number, None)
            state.apply(change, bundle.lsn)
            if isinstance(change, r.StepTaken):
                step = self._step_of(change)
                if step is not None:
                    acts[step.number] = step
            if isinstance(change, r.RequestRevived):
                for base, _ in change.rows:
                    for number in range(base, base + state.batches[base]):
                        if state.ends.get(number, [])[-1:] == ["revived"]:
                            self.attempts.pop(number, None)
                            self.acknowledged = {
                                one for one in self.acknowledged if one[-1] != number
                            }
            apply(self.tables, self.queues, change)
        for origin in copies.values():
            at = origin.number, origin.group
            position, done = state.groups[at]
            for offset in origin.offsets:
                if state.buried.get((*at, offset)) != bundle.lsn:
                    continue
                if offset >= position and offset not in done:
                    raise Violation("half_step", f"record {offset} of {at} is dead and not done")
        return list(acts.values())

    def _not_lost(self, change: r.GroupDone, lsn: int) -> None:
        """Check that a record that is no longer tried is done as a dead letter only.

        Its last attempt may have ended with the link of an exclusive group's holder: the holder
        comes back, and its acknowledgement may be there before the dead letter.
        """
        state = self.state
        place = change.stream, change.name
        oldest = self.first_of(change.stream)
        for offset, (times, why) in state.tries.get(place, {}).items():
            named = any(first <= offset < end for first, end in change.ranges)
            if not named or offset < oldest or not state.is_dead(times, why):
                continue
            serial = state.records.get((change.stream, offset))
            if (f"{state.streams[change.stream]}/{change.name}", offset) in self.said_done:
                continue
            if state.buried.get((*place, offset)) != lsn and serial not in self.expiring:
                raise Violation("lost", f"record {offset} of {place}: done after {times} attempts")

    def _by_lease(self, change: r.WorkReturned) -> None:
        """Check that things which a link held come back by themselves only while it is there."""
        for base, rows in change.rows:
            for number in self.state._of(base, rows, lambda job: bool(job.holder)):
                link = self.hands.get(number, -1)
                since_us = self.now_us() - self.ended_us.get(link, self.now_us())
                if since_us > LATE_US and not self.state.unordered:
                    raise Violation(
                        "late", f"request {number}: link {link} ended {since_us} us ago"
                    )

    def _lease_ended(self, change: r.GroupReturned) -> None:
        """Note that records of a group are in no hand, since their leases have ended."""

    def _step_of(self, change: r.StepTaken) -> Act | None:
        """Return the act that has this name; None: its records tell it."""
        return self.steps[change.sender, change.key]

    def _whole(self, act: Act, bundle: Bundle) -> None:
        """Check that all parts of a step happened in this bundle."""
        state = self.state
        for wish in act.wishes:
            for serial in wish.serials:
                if state.serials.get(serial) != bundle.lsn:
                    raise Violation("half_step", f"{wish.kind} of record {serial} in {act}")
            if wish.kind == "ack":
                missing = [n for n in wish.numbers if state.gone_mail.get(n) != bundle.lsn]
            elif wish.kind == "end" or (wish.kind == "reply" and wish.last):
                missing = [n for n in wish.numbers if bundle.lsn not in state.gone_jobs.get(n, ())]
            elif wish.kind == "records":
                place = self.place_of(wish.place)
                missing = [
                    n for n in wish.numbers if state.gone_records.get((*place, n)) != bundle.lsn
                ]
            elif wish.kind == "move":
                place = self.place_of(wish.place)
                missing = [] if state.moved.get(place) == bundle.lsn else list(wish.numbers)
            else:
                missing = []
            if missing:
                raise Violation("half_step", f"{wish.kind} of {missing} in {act}")

    def place_of(self, place: str) -> tuple[int, str]:
        """Return (number of the stream, name of the group or cursor)."""
        stream, _, name = place.partition("/")
        number = next((n for n, known in self.state.streams.items() if known == stream), -1)
        return number, name

    def uncertain(self, batches: list[Batch]) -> None:
        """Note a bundle whose append a crash hit: it may be there, whole, or not."""
        self.unsure.append(batches)

    def _within_windows(self, changes: list[Any]) -> None:
        """Check that no place that is kept since the broker began goes to another member."""
        for change in changes:
            if not isinstance(change, r.GroupHeld):
                continue
            kept = self.kept.pop((change.stream, change.name), None)
            if kept is None or self.now_ms() >= kept[1]:
                continue
            if change.holder is None or not is_again(
                kept[0], change.holder.identity, change.holder.session
            ):
                raise Violation("place", f"{change} at {self.now_ms()}, and it was kept: {kept}")

    # --- recovery -------------------------------------------------------------------------

    def recovered(self, batches: list[tuple[int, int, int, Batch]], start_lsn: int, end_lsn: int,
                  *, power: bool) -> None:  # fmt: skip
        """Compare the log that was found with the one that was written.

        batches: (LSN of the bundle, LSN, epoch, batch) from start_lsn to end_lsn.
        """
        self.recoveries += 1
        self.kept.clear()
        main = RingTruth(self.ring(MAIN).failed, self.bundles, self.unsure)
        dropped, more = self._survived(main, MAIN, batches, start_lsn, end_lsn, power=power)
        self.bundles = main.bundles
        if dropped:
            self._again()
        for bundle in more:
            self.appended(bundle)
        for bundle in self.bundles:
            bundle.promised = bundle.promised or "kept by a recovery"
        now_ms = self.now_ms()
        self.kept = {
            place: (holder, now_ms + holder.hold_ms)
            for place, holder in self.state.holders.items() if holder is not None
        }  # fmt: skip
        self.unsure.clear()
        self.acknowledged.clear()
        self.hands.clear()
        self.ended_us.clear()
        self.ring(MAIN).failed = False
        self.told_lsn = end_lsn
        self.attempts = {
            number: min(told, job.attempts + job.withdrawn) if power else told
            for number, told in self.attempts.items()
            if (job := self.state.jobs.get(number)) is not None
        }  # fmt: skip

    def _survived(
        self, truth: RingTruth, ring: str, batches: list[tuple[int, int, int, Batch]],
        start_lsn: int, end_lsn: int, *, power: bool,
    ) -> tuple[list[Bundle], list[Bundle]]:  # fmt: skip
        """Return (bundles that are gone, bundles that may or may not have been written)."""
        found: dict[int, tuple[int, int, list[Batch]]] = {}
        for bundle_lsn, lsn, epoch, batch in batches:
            size = lsn + STAMP_BYTES + len(batch.content)
            _, _, members = found.setdefault(bundle_lsn, (size, epoch, []))
            members.append(batch)
            found[bundle_lsn] = size, epoch, members
        survivors = [bundle for bundle in truth.bundles if bundle.lsn < end_lsn]
        dropped = truth.bundles[len(survivors) :]
        truth.bundles = survivors
        for bundle in survivors:
            if bundle.lsn < start_lsn:
                # A bundle with a missing segment shows its remaining part.
                found.pop(bundle.lsn, None)
                continue
            there = found.pop(bundle.lsn, None)
            if there is None or there[1] != bundle.epoch:
                raise Violation("lost", f"the bundle at {bundle.lsn} is gone from the middle")
            if there[2] != bundle.batches:
                code = "half_bundle" if len(there[2]) < len(bundle.batches) else "ghost"
                raise Violation(code, f"the bundle at {bundle.lsn} is another one")
        for bundle in dropped:
            if bundle.promised:
                raise Violation("lost", f"the bundle at {bundle.lsn}: {bundle.promised}")
            if not power and not truth.failed:
                raise Violation("lost", f"the bundle at {bundle.lsn}: only the process died")
        more = []
        for lsn in sorted(found):
            end, epoch, members = found[lsn]
            if members not in truth.unsure:
                half = [one for one in truth.unsure if one[: len(members)] == members]
                code = "half_bundle" if half else "ghost"
                raise Violation(code, f"ring {ring}: a bundle at {lsn}")
            more.append(Bundle(lsn, end, epoch, members))
        return dropped, more

    def _again(self) -> None:
        """Compute the state of the remaining bundles after some are gone."""
        self.state = self._new_state()
        self.queues, self.tables = Queues(), Tables()
        self.replays = True
        for bundle in self.bundles:
            self._enter(bundle)
        for truth in self.rings.values():
            for bundle in truth.bundles:
                self._enter_beside(bundle)
        self.replays = False

    def _new_state(self) -> State:
        state = self.state
        return State(
            state.slack_ms, state.attempts_max, state.messages_max, state.keys_max,
            state.unordered, group_attempts=state.group_attempts,
        )  # fmt: skip

    def compare(self, queues: Queues) -> None:
        """Compare the tables of a broker that was just started with both."""
        for name in Queues.__struct_fields__:
            mine, others = getattr(self.queues, name), getattr(queues, name)
            if name != "next_number":
                mine, others = list(mine.items()), list(others.items())
            if mine != others:
                raise Violation("tables", f"{name}: " + difference(mine, others))
        seen = state_of(queues)
        state = self.state
        for name in (
            "boxes", "services", "mail", "cursors", "groups", "holders", "tries", "keys",
        ):  # fmt: skip
            mine, others = getattr(state, name), seen[name]
            if mine != others:
                raise Violation("tables", f"{name}, by row: " + difference(mine, others))
        jobs = {
            number: (job.service, job.holder, job.received, job.attempts, job.not_before_ms)
            for number, job in state.jobs.items()
        }
        if jobs != seen["jobs"]:
            raise Violation("tables", "requests, by row: " + difference(jobs, seen["jobs"]))

    def alive(self) -> list[int]:
        """Return numbers of the batches of which rows are left."""
        return sorted({base for _, base in self.queues.messages} | set(self.queues.requests))

    def body_at(self, base: int) -> tuple[int, ...]:
        """Return the serials of a batch of the mail stream."""
        count = self.state.batches[base]
        return tuple(self.state.records[MAIL_STREAM, base + row] for row in range(count))


def place_in(bundles: list[Bundle], lsn: int) -> int:
    """Return the place of the bundle that begins at an LSN."""
    return bisect_left(bundles, lsn, key=attrgetter("lsn"))


def changes_of(bundle: Bundle) -> list[Any]:
    """Return the changes of a bundle, decoded anew."""
    return [
        r.decode_change(bytes(body))
        for batch in bundle.batches
        if batch.stream == CHANGE_STREAM and batch.kind
        for body in control_bodies(batch.content)
    ]


def is_again(holder: r.Holder, identity: str, session: bytes) -> bool:
    """Whether a client is the holder of an exclusive group that has come back."""
    return session == holder.session or (identity != "" and identity == holder.identity)
