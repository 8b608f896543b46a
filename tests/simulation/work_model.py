"""The model of mail, services, cursors, groups and steps: plain sets, one row at a time.

Owns a copy of every bundle that ring main took, the state that its changes make, kept by message,
request and offset in plain dictionaries, and the promises about each bundle. The rules: nothing
here uses the tables or the bitmaps of the code under test; each hand-out of the broker is compared
with the state at that moment; after a death the tables must be what the bundles that survived make,
and every bundle that had to survive must be among them. A step is one bundle, so it is there or
not. Source: SPEC.md, section 4.8; docs/design.md (Promises; Queues and the checkpoint).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from zlib import crc32

from malamute_protocol import commands as c
from malamute_py.broker.ready import CHANGE_STREAM, MAIL_STREAM, MAIN
from malamute_py.changelog import records as r
from malamute_py.changelog.applying import apply
from malamute_py.changelog.tables import Queues, Tables
from malamute_py.journal.layout import control_bodies
from tests.simulation.model import Violation
from tests.simulation.records import CONTENT_HEAD, STAMP_BYTES, decode_batch
from tests.simulation.records import _decode_content as decode_content

LEVEL_STORED, LEVEL_SYNCED = 2, 3
SLACK_MS = 5_000
"""Delay with which a deadline may be seen: a full log puts off the end of what is over."""
LATE_US = 60_000
"""Time within which everything that a lost link held must wait again."""
OVERTAKEN_MAX = 32
"""Hand-outs in a row of requests with a priority after which another one may go."""
MEMORY_NUMBERS = 1 << 40
"""Numbers from here on belong to things that are kept in memory only."""


# --- what clients want to happen -----------------------------------------------------------


@dataclass(slots=True)
class Wish:
    """One part of an act, in the words of the model."""

    kind: str
    """send, publish, request, reply, ack, end, records, back, move; again, return, memory (no
    trace)."""
    place: str = ""
    """Mailbox, stream, service, or stream and group or cursor."""
    serials: tuple[int, ...] = ()
    """Serials of the records that it brings."""
    numbers: tuple[int, ...] = ()
    """Messages, requests or offsets that it takes away; of a move: where the cursor goes."""
    last: bool = False
    since: int = -1
    """Where the cursor of a move must stand before it; -1: anywhere."""


@dataclass(slots=True, eq=False)
class Act:
    """One command, or one atomic step, of a client."""

    number: int
    holder: str
    """Name by which the broker knows the sender."""
    wishes: list[Wish]
    key: bytes
    level: int
    atomic: bool
    memory: bool = False
    since_lsn: int = 0
    """End of the log when it was first sent: nothing before that is its doing."""
    tries: int = 0
    """How often it was sent."""
    confirmed: bool = False


# --- the state, one row at a time -------------------------------------------------------------


@dataclass(slots=True)
class Letter:
    """One message in a mailbox."""

    attempts: int = 0
    not_before_ms: int = 0
    expires_at_ms: int = 0
    priority: int = 0
    why: tuple[str, ...] = ()


@dataclass(slots=True)
class Job:
    """One request in a service queue."""

    service: int
    key: tuple[str, bytes]
    row: int
    deadline_ms: int
    reply_to: str
    holder: str = ""
    received: bool = False
    attempts: int = 0
    not_before_ms: int = 0
    priority: int = 0
    lsn: int = 0
    """LSN of the bundle that brought it, or by which it waited anew."""
    withdrawn: int = 0
    """Hand-outs that count no attempt after all."""
    subject: str = ""
    fresh: bool = True
    """True: it was never handed out."""
    spared: bool = False
    """True: it came back in a way that does not end it, whatever its attempts."""


@dataclass(slots=True)
class State:
    """The state that the changes make."""

    slack_ms: int = SLACK_MS
    attempts_max: int = 1 << 30
    messages_max: int = 1 << 60
    keys_max: int = 1 << 60
    """Bounds of the broker's settings."""
    unordered: bool = False
    """The log refused something: waiting rows that it concerned come before those never handed
    out."""
    boxes: dict[int, str] = field(default_factory=dict)
    bounds: dict[int, int] = field(default_factory=dict)
    """Mailbox -> the most messages, if it has a bound of its own."""
    services: dict[int, str] = field(default_factory=dict)
    mail: dict[tuple[int, int], Letter] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    cursors: dict[tuple[int, str], int] = field(default_factory=dict)
    groups: dict[tuple[int, str], tuple[int, frozenset[int]]] = field(default_factory=dict)
    holders: dict[tuple[int, str], r.Holder | None] = field(default_factory=dict)
    """Group -> the member that has its place, as the log has it."""
    group_attempts: int = 0
    """Bound of the attempts of each group's records; 0: they have none."""
    tries: dict[tuple[int, str], dict[int, tuple[int, str]]] = field(default_factory=dict)
    """Group -> offset -> how many attempts have ended, and why the last one did."""
    returned: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """Record of a group -> LSN of the newest bundle by which it came back."""
    buried: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """Record of a group -> LSN of the bundle that put it among the dead letters."""
    keys: dict[tuple[str, bytes], int] = field(default_factory=dict)
    """Remembered keys, the oldest first."""
    forgotten: set[tuple[str, bytes]] = field(default_factory=set)
    """Keys that were pushed out by others: acts with one of them may be taken again."""
    streams: dict[int, str] = field(default_factory=dict)
    records: dict[tuple[int, int], int] = field(default_factory=dict)
    """(stream, offset) -> serial; of the mail stream, too."""
    serials: dict[int, int] = field(default_factory=dict)
    """Serial -> LSN of the bundle that brought it."""
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    """(stream, offset) -> LSN of the bundle that brought it: a record whose key was forgotten may
    be taken again, and is then at two offsets."""
    beside: dict[int, int] = field(default_factory=dict)
    """Serial -> LSN of the bundle that brought it, of records in rings beside main."""
    tails: dict[int, int] = field(default_factory=dict)
    jobs_put: dict[int, Job] = field(default_factory=dict)
    """Every request that was ever accepted."""
    ends: dict[int, list[str]] = field(default_factory=dict)
    """Request -> how it ended, each time."""
    lasts: dict[tuple[str, bytes, int], list[str]] = field(default_factory=dict)
    """(sender, key, row) -> last replies and notices in its mailbox."""
    gone_mail: dict[int, int] = field(default_factory=dict)
    """Message -> LSN of the bundle that took it away."""
    gone_jobs: dict[int, list[int]] = field(default_factory=dict)
    """Request -> LSN of each bundle that ended it: a dead one may be revived and end again."""
    gone_records: dict[tuple[int, str, int], int] = field(default_factory=dict)
    moved: dict[tuple[int, str], int] = field(default_factory=dict)
    """Cursor -> LSN of the bundle that set it last."""
    handed: dict[tuple[int, str, int], tuple[int, int, int]] = field(default_factory=dict)
    """(service, subject, priority) -> the newest request handed out for the first time, before the
    newest bundle and in all, and that bundle."""
    prior: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    """(service, subject) -> requests that were put there with a priority."""
    overtaken: dict[tuple[int, str], int] = field(default_factory=dict)
    """(service, subject) -> requests with a priority that were handed out in a row."""
    mail_epoch: int = 0
    """Epoch in which the newest batch of the mail stream was written."""
    moves: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """(cursor, where to) -> LSN of the bundle that first did it."""
    stood: dict[tuple[int, str, int], set[int]] = field(default_factory=dict)
    """(cursor, where to) -> where it stood each time before; -1: it was not there."""
    bundle_of_key: dict[tuple[str, bytes], int] = field(default_factory=dict)

    def apply(self, change: Any, lsn: int) -> None:
        """Let one record of the log take effect, row by row."""
        getattr(self, "_" + type(change).__struct_config__.tag)(change, lsn)

    # What concerns neither of them.
    def _stream_created(self, change: r.StreamCreated, lsn: int) -> None:
        self.streams[change.number] = change.name

    def _stream_edited(self, change: Any, lsn: int) -> None:
        pass

    _stream_removed = _producer_opened = _producers_forgotten = _stream_edited

    # --- mail

    def _mailbox_set(self, change: r.MailboxSet, lsn: int) -> None:
        self.boxes[change.number] = change.name
        self.bounds[change.number] = change.settings.max_messages or self.messages_max

    def _mailbox_removed(self, change: r.MailboxRemoved, lsn: int) -> None:
        del self.boxes[change.number]

    def _mail_put(self, put: r.MailPut, lsn: int) -> None:
        bound = self.bounds[put.mailbox]
        # Answers and notices come whatever there is.
        if bound < len(self.mail) + put.count and not put.about and not put.why:
            filled = sum(box == put.mailbox for box, _ in self.mail) + put.count
            if filled > bound:
                raise Violation("limit", f"{filled} messages in {self.boxes[put.mailbox]}: {put}")
        mask = int.from_bytes(put.rows, "little") if put.rows else (1 << put.count) - 1
        for row in _rows(mask):
            if put.origin is not None:
                self._record_dead(put.origin, put.origin.offsets[row], lsn)
            expires_at_ms = put.expiries[row] if put.expiries else put.expires_at_ms
            self.mail[put.mailbox, put.base + row] = Letter(
                0, put.deliver_at_ms, expires_at_ms, put.priority, (put.why,) if put.why else ()
            )
        self._key(put.sender, put.key, put.base, lsn)
        if put.last:
            # The mailbox names the requester; keys are random, so they are enough.
            for key, first, count in put.about:
                for row in range(first, first + count):
                    if key:
                        self.lasts.setdefault(("", key, row), []).append(put.why or "reply")

    def _record_dead(self, origin: r.Origin, offset: int, lsn: int) -> None:
        place = origin.number, origin.group
        times, why = self.tries.get(place, {}).get(offset, (0, ""))
        if not self.is_dead(times, why) or times != origin.attempts:
            raise Violation("dead", f"record {offset} of {place}: {times} attempts, {origin}")
        position, done = self.groups[place]
        if offset < position or offset in done:
            raise Violation("dead", f"record {offset} of {place} is done already: {origin}")
        self.buried[(*place, offset)] = lsn

    def is_dead(self, times: int, why: str) -> bool:
        """Whether a record is no longer tried."""
        return why.startswith("failed") or 0 < self.group_attempts <= times

    def _mail_done(self, change: r.MailDone, lsn: int) -> None:
        for base, rows in change.rows:
            for number in self._numbers(base, rows, self._letters(change.mailbox, base)):
                if self.mail.pop((change.mailbox, number), None) is None:
                    raise Violation("ended_twice", f"message {number} is done ({change.why})")
                self.gone_mail[number] = lsn

    def _letters(self, box: int, base: int) -> list[int]:
        return [
            number for number in range(base, base + self.count_of(base))
            if (box, number) in self.mail
        ]  # fmt: skip

    def count_of(self, base: int) -> int:
        """Return the rows of the batch of the mail stream with this number."""
        return self.batches.get(base, 0)

    batches: dict[int, int] = field(default_factory=dict)

    def _mail_again(self, change: r.MailAgain, lsn: int) -> None:
        for base, rows in change.rows:
            for number in self._numbers(base, rows, self._letters(change.mailbox, base)):
                letter = self.mail.get((change.mailbox, number))
                if letter is None:
                    raise Violation("ended_twice", f"message {number} is wanted again, and gone")
                letter.attempts += 1
                letter.not_before_ms = change.not_before_ms

    @staticmethod
    def _numbers(base: int, rows: bytes, left: Iterable[int]) -> list[int]:
        if not rows:
            return list(left)
        mask = int.from_bytes(rows, "little")
        return [base + row for row in range(mask.bit_length()) if mask >> row & 1]

    # --- services

    def _service_set(self, change: r.ServiceSet, lsn: int) -> None:
        self.services[change.number] = change.name

    def _service_removed(self, change: r.ServiceRemoved, lsn: int) -> None:
        del self.services[change.number]

    def _request_put(self, put: r.RequestPut, lsn: int) -> None:
        for row in range(put.count):
            self.jobs[put.base + row] = self.jobs_put[put.base + row] = Job(
                put.service, (put.sender, put.key), row, put.deadline_ms, put.reply_to,
                not_before_ms=put.at_ms + put.delay_ms if put.delay_ms else 0,
                fresh=not put.delay_ms, priority=put.priority, lsn=lsn,
                subject=put.subjects[row if len(put.subjects) > 1 else 0],
            )  # fmt: skip
            if put.priority and not put.delay_ms:
                place = put.service, self.jobs[put.base + row].subject
                self.prior.setdefault(place, set()).add(put.base + row)
        self._key(put.sender, put.key, put.base, lsn)

    def _of(self, base: int, rows: bytes, wanted: Callable[[Job], bool]) -> list[int]:
        left = [
            number for number in range(base, base + self.count_of(base))
            if number in self.jobs and wanted(self.jobs[number])
        ]  # fmt: skip
        return self._numbers(base, rows, left)

    def _job(self, number: int, what: str) -> Job:
        job = self.jobs.get(number)
        if job is None:
            raise Violation("ended_twice", f"request {number} is {what}, and it is gone")
        return job

    def _work_taken(self, change: r.WorkTaken, lsn: int) -> None:
        for base, rows in change.rows:
            for number in self._of(base, rows, lambda job: not job.holder):
                job = self._job(number, "taken")
                if job.holder:
                    raise Violation(
                        "two_hands", f"request {number} of {job.holder} goes to {change.holder}"
                    )
                if job.deadline_ms and job.deadline_ms <= change.at_ms:
                    raise Violation(
                        "expired", f"request {number} of {job.deadline_ms} taken at {change.at_ms}"
                    )
                if job.not_before_ms > change.at_ms:
                    raise Violation(
                        "expired", f"request {number}, not before {job.not_before_ms}: {change}"
                    )
                lane = job.service, job.subject, job.priority
                if job.fresh:
                    self._in_order(lane, number, lsn)
                    self._by_priority(number, job, lsn, change.at_ms)
                job.fresh = False
                job.holder, job.received, job.not_before_ms = change.holder, False, 0
                job.attempts += 1
                if job.attempts > self.attempts_max and not job.spared:
                    raise Violation("attempts", f"request {number} is taken: {job}")

    def _in_order(self, lane: tuple[int, str, int], number: int, lsn: int) -> None:
        """Check that first hand-outs are in order, except within one bundle."""
        before, newest, at = self.handed.get(lane, (-1, -1, -1))
        if lsn != at:
            before, at = newest, lsn
        if number < before and not self.unordered:
            raise Violation("order", f"request {number} of {lane} after {before}")
        self.handed[lane] = before, max(newest, number), at

    def _by_priority(self, number: int, job: Job, lsn: int, now_ms: int) -> None:
        """Check that no request goes before one of its subject that waits with a higher priority.

        A request may do so once after every 32 that went before it.
        """
        place = job.service, job.subject
        self.overtaken.setdefault(place, 0)
        if not self.prior.get(place):
            self.overtaken[place] = 0
            return
        waits = [
            other for other in self.prior[place]
            if (one := self.jobs.get(other)) is not None and one.priority > job.priority
            and one.fresh and not one.holder and one.lsn < lsn
            and not 0 < one.deadline_ms <= now_ms
        ]  # fmt: skip
        if job.priority and not waits:
            self.overtaken[place] += 1
        elif waits:
            if self.overtaken[place] < OVERTAKEN_MAX and not self.unordered:
                raise Violation("order", f"request {number} of {place} before {waits}: {job}")
            self.overtaken[place] = 0

    def _work_received(self, change: r.WorkReceived, lsn: int) -> None:
        for base, rows in change.rows:
            for number in self._of(base, rows, lambda job: bool(job.holder)):
                job = self._job(number, "received")
                if not job.holder:
                    raise Violation("two_hands", f"request {number} is received, nobody has it")
                job.received = True

    def _work_returned(self, change: r.WorkReturned, lsn: int) -> None:
        for base, rows in change.rows:
            for number in self._of(base, rows, lambda job: bool(job.holder)):
                job = self._job(number, f"returned ({change.why})")
                if not job.holder:
                    raise Violation("two_hands", f"request {number} comes back from nobody")
                job.spared = job.spared or change.why in ("withdrawn", "released", "requeued")
                if change.why == "released" or (change.why == "withdrawn" and not job.received):
                    # It was not begun, or its worker stopped: that was no attempt.
                    job.attempts -= 1
                    job.withdrawn += 1
                job.holder, job.received = "", False
                job.not_before_ms = change.not_before_ms

    def _request_done(self, change: r.RequestDone, lsn: int) -> None:
        for base, rows in change.rows:
            for number in self._of(base, rows, lambda job: True):
                self._job(number, change.why)
                del self.jobs[number]
                self.gone_jobs.setdefault(number, []).append(lsn)
                self.ends.setdefault(number, []).append(change.why)

    def _request_dead(self, change: r.RequestDead, lsn: int) -> None:
        for base, rows in change.rows:
            for number in self._of(base, rows, lambda job: True):
                job = self._job(number, change.why)
                meant = change.why.partition(":")[0] in ("failed", "removed", "lost")
                if not meant and job.attempts < self.attempts_max:
                    raise Violation(
                        "dead",
                        f"request {number}: {change.why}, attempt {job.attempts} of "
                        f"{self.attempts_max}",
                    )
                del self.jobs[number]
                self.gone_jobs.setdefault(number, []).append(lsn)
                self.ends.setdefault(number, []).append("dead")
                self.mail[change.mailbox, number] = Letter(why=(change.why,))

    def _request_revived(self, change: r.RequestRevived, lsn: int) -> None:
        for base, rows in change.rows:
            for number in self._numbers(base, rows, self._letters(change.mailbox, base)):
                del self.mail[change.mailbox, number]
                put = self.jobs_put[number]
                self.jobs[number] = Job(
                    change.service, put.key, put.row, 0, put.reply_to, fresh=False,
                    priority=put.priority,
                )  # fmt: skip
                self.ends.setdefault(number, []).append("revived")

    # --- cursors, groups, keys

    def _cursor_set(self, change: r.CursorSet, lsn: int) -> None:
        place = change.stream, change.name
        self.stood.setdefault((*place, change.next), set()).add(self.cursors.get(place, -1))
        self.cursors[change.stream, change.name] = change.next
        self.moved[change.stream, change.name] = lsn
        self.moves.setdefault((change.stream, change.name, change.next), lsn)

    def _cursor_removed(self, change: r.CursorRemoved, lsn: int) -> None:
        self.cursors.pop((change.stream, change.name), None)

    def _group_set(self, change: r.GroupSet, lsn: int) -> None:
        place = change.stream, change.name
        self.groups[place] = change.next, frozenset()
        self.holders.setdefault(place, None)
        self.tries[place] = {
            offset: (times, why)
            for first, end, times, why in change.tries for offset in range(first, end)
        }  # fmt: skip

    def _group_edited(self, change: r.GroupEdited, lsn: int) -> None:
        pass

    def _group_held(self, change: r.GroupHeld, lsn: int) -> None:
        place = change.stream, change.name
        if place in self.groups:
            self.holders[place] = change.holder

    def _group_returned(self, change: r.GroupReturned, lsn: int) -> None:
        place = change.stream, change.name
        position, done = self.groups[place]
        tries = self.tries[place]
        for first, end in change.ranges:
            for offset in range(first, end):
                if offset < position or offset in done:
                    raise Violation("ended_twice", f"record {offset} of {place}: {change.why}")
                tries[offset] = tries.get(offset, (0, ""))[0] + 1, change.why
                self.returned[(*place, offset)] = lsn

    def _group_revived(self, change: r.GroupRevived, lsn: int) -> None:
        self._mail_done(r.MailDone(change.mailbox, change.rows, "revived"), lsn)
        place = change.stream, change.name
        position, done = self.groups[place]
        again = {offset for first, end in change.ranges for offset in range(first, end)}
        low = min(position, *again)
        every = (set(range(low, position)) | set(done)) - again
        for offset in again:
            self.gone_records.pop((*place, offset), None)
        while low in every:
            every.discard(low)
            low += 1
        self.groups[place] = low, frozenset(every)

    def _group_done(self, change: r.GroupDone, lsn: int) -> None:
        place = change.stream, change.name
        if place not in self.groups:
            return
        next, done = self.groups[place]
        every = set(done)
        tries = self.tries[place]
        for first, end in change.ranges:
            for offset in range(first, end):
                tries.pop(offset, None)
                self.gone_records.setdefault((*place, offset), lsn)
                if offset >= next:
                    every.add(offset)
        while next in every:
            every.discard(next)
            next += 1
        self.groups[place] = next, frozenset(every)

    def _group_removed(self, change: r.GroupRemoved, lsn: int) -> None:
        self.groups.pop((change.stream, change.name), None)
        self.tries.pop((change.stream, change.name), None)
        self.holders.pop((change.stream, change.name), None)

    def _step_taken(self, change: r.StepTaken, lsn: int) -> None:
        self._key(change.sender, change.key, -1, lsn)

    def _key(self, sender: str, key: bytes, base: int, lsn: int) -> None:
        if not key:
            return
        if (sender, key) in self.keys:
            raise Violation("twice", f"key {key!r} of {sender} was taken twice")
        self.keys[sender, key] = base
        self.forgotten.discard((sender, key))
        self.bundle_of_key[sender, key] = lsn
        if len(self.keys) > self.keys_max:
            loser = self._next_forgotten()
            del self.keys[loser]
            self.forgotten.add(loser)

    def _next_forgotten(self) -> tuple[str, bytes]:
        """Return the oldest key of the sender that has the most, of several the oldest of all."""
        senders = [_sharer(sender) for sender, _ in self.keys]
        most = max(map(senders.count, set(senders)))
        return next(key for key in self.keys if senders.count(_sharer(key[0])) == most)


def _sharer(sender: str) -> str:
    """Return in whose share a sender's keys are: all without an identity are one."""
    return "~" if sender.startswith("~") else sender


# --- the log -----------------------------------------------------------------------------------


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


class WorkModel:
    """The model of one run."""

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
        self.subjects: dict[int, str] = {}
        """Serial -> subject."""
        self.expiring: set[int] = set()
        """Serials of records with an expiry."""
        self.numbers: dict[int, int] = {}
        """Number of a message or request -> its serial, including those that a power loss took."""
        self.act_of: dict[int, Act] = {}
        """Serial -> the act that brought it."""
        self.steps: dict[tuple[str, bytes], Act] = {}
        """(sender, key) -> atomic act."""
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
        self.acknowledged: set[tuple[Any, ...]] = set()
        """(link, kind, place, number) whose acknowledgement was confirmed to a client."""
        self.attempts: dict[int, int] = {}
        """Request -> attempts that a worker was told."""
        self.memory: dict[int, int] = {}
        """Number -> serial of things confirmed in memory."""
        self.recoveries = self.delivered = self.confirmed = 0
        self.firsts: dict[tuple[int, int, int], int] = {}
        """(link, inbox, priority) -> the highest number that it was given for the first time."""
        self.given: set[int] = set()
        """Messages that were given to a reader since the broker began."""

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

    # --- a stream's own ring ------------------------------------------------------------------

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

    # --- ring main ----------------------------------------------------------------------------

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
        """Check that a record that is no longer tried is done as a dead letter only."""
        state = self.state
        place = change.stream, change.name
        oldest = self.first_of(change.stream)
        for offset, (times, why) in state.tries.get(place, {}).items():
            named = any(first <= offset < end for first, end in change.ranges)
            if not named or offset < oldest or not state.is_dead(times, why):
                continue
            serial = state.records.get((change.stream, offset))
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

    # --- confirms --------------------------------------------------------------------------

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
        return truth.bundles[_place_of(truth.bundles, lsn)].end_lsn <= truth.told_lsn

    def _at(self, lsn: int) -> Bundle:
        return self.bundles[_place_of(self.bundles, lsn)]

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

    # --- deliveries -------------------------------------------------------------------------

    def _hold(self, thing: tuple[Any, ...], owner: tuple[int, int]) -> None:
        before = self.held.get(thing)
        if before is not None and owner[0] not in self.blocked and thing not in self.loose:
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

    # --- recovery ---------------------------------------------------------------------------

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
        self.held.clear()
        self.loose.clear()
        self.given.clear()
        self.firsts.clear()
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

    # --- the end ------------------------------------------------------------------------------

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


def _place_of(bundles: list[Bundle], lsn: int) -> int:
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


def difference(mine: Any, others: Any) -> str:
    """Return the first few things in which two tables differ."""
    if isinstance(mine, dict):
        mine, others = sorted(mine.items()), sorted(others.items())
    if not isinstance(mine, list):
        return f"{mine!r}, the broker has {others!r}"
    lacks = [one for one in mine if one not in others][:2]
    more = [one for one in others if one not in mine][:2]
    return f"{len(mine)} and {len(others)} rows; should be {lacks}, the broker has {more}"


def _rows(mask: int) -> list[int]:
    return [row for row in range(mask.bit_length()) if mask >> row & 1]


def state_of(queues: Queues) -> dict[str, Any]:
    """Return the tables of the code under test, taken apart row by row."""
    mail: dict[tuple[int, int], Letter] = {}
    for (box, base), row in queues.messages.items():
        rare = row.rare
        for at in _rows(row.left):
            attempts, not_before_ms = row.attempts, row.not_before_ms
            expires_at_ms = row.expires_at_ms
            why: tuple[str, ...] = ()
            if rare is not None:
                if rare.expiries:
                    expires_at_ms = rare.expiries[at]
                for time_ms, some in rare.again:
                    if int.from_bytes(some, "little") >> at & 1:
                        not_before_ms = time_ms
                for times, some in rare.tries:
                    if int.from_bytes(some, "little") >> at & 1:
                        attempts += times
                why = tuple(
                    word for some, word in rare.why if int.from_bytes(some, "little") >> at & 1
                )[-1:]
            mail[box, base + at] = Letter(attempts, not_before_ms, expires_at_ms, row.priority, why)
    jobs: dict[int, tuple[int, str, bool, int, int]] = {}
    for number, request in queues.requests.items():
        for at in _rows(request.left):
            holds = [hold for hold in request.holds if hold.rows >> at & 1]
            if len(holds) > 1 or bool(holds) == bool(request.waiting >> at & 1):
                raise Violation("tables", f"request {number + at}: {holds}, {request.waiting:b}")
            counts = [times for times, some in request.attempts.items() if some >> at & 1]
            delayed = [time for time, some in request.delayed.items() if some >> at & 1]
            jobs[number + at] = (
                request.put.service,
                holds[0].holder if holds else "",
                bool(holds and holds[0].received >> at & 1),
                counts[0] if counts else 0,
                delayed[0] if delayed else 0,
            )
    groups = {
        place: (row.next, frozenset(n for first, end in row.done for n in range(first, end)))
        for place, row in queues.groups.items()
    }
    tries = {
        place: {
            offset: (times, why)
            for first, end, times, why in row.tries for offset in range(first, end)
        }
        for place, row in queues.groups.items()
    }  # fmt: skip
    keys: Any = queues.keys
    return {
        "boxes": {number: row.name for number, row in queues.mailboxes.items()},
        "services": {number: row.name for number, row in queues.services.items()},
        "mail": mail,
        "jobs": jobs,
        "cursors": {place: row.next for place, row in queues.cursors.items()},
        "groups": groups,
        "holders": {place: row.holder for place, row in queues.groups.items()},
        "tries": tries,
        "keys": {place: row.base for place, row in dict(keys).items()},
    }
