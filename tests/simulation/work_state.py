"""The state that changes of the log make: plain sets, one row at a time.

Owns what mail, services, cursors, groups and keys are after each record of the log, kept by
message, request and offset in plain dictionaries. The rule: nothing here uses the tables or the
bitmaps of the code under test; a change that cannot follow the state raises Violation at once.
Source: SPEC.md, section 4.8; docs/design.md (Queues and the checkpoint).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from malamute_py.changelog import records as r
from tests.simulation.model import Violation

SLACK_MS = 5_000
"""Delay with which a deadline may be seen: a full log puts off the end of what is over."""
OVERTAKEN_MAX = 32
"""Hand-outs in a row of requests with a priority after which another one may go."""


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
    handed_ms: int = 0
    """Latest time of a broker's clock at which a request was handed out, of all its starts."""
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
        for row in rows_in(mask):
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
                queue = job.service, job.subject, job.priority
                if job.fresh:
                    self._in_order(queue, number, job, lsn)
                    self._by_priority(number, job, lsn, change.at_ms)
                job.fresh = False
                job.holder, job.received, job.not_before_ms = change.holder, False, 0
                job.attempts += 1
                if job.attempts > self.attempts_max and not job.spared:
                    raise Violation("attempts", f"request {number} is taken: {job}")
        self.handed_ms = max(self.handed_ms, change.at_ms)

    def _in_order(self, queue: tuple[int, str, int], number: int, job: Job, lsn: int) -> None:
        """Check that first hand-outs are in order, except within one bundle.

        A request whose deadline is over is passed over. It waits again when the broker dies before
        it logs the end of the request, and starts by a clock that was set back meanwhile.
        """
        before, newest, at = self.handed.get(queue, (-1, -1, -1))
        if lsn != at:
            before, at = newest, lsn
        passed_over = 0 < job.deadline_ms <= self.handed_ms
        if number < before and not passed_over and not self.unordered:
            raise Violation("order", f"request {number} of {queue} after {before}")
        self.handed[queue] = before, max(newest, number), at

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
                    raise Violation("two_hands", f"request {number} is received, no worker has it")
                job.received = True

    def _work_returned(self, change: r.WorkReturned, lsn: int) -> None:
        for base, rows in change.rows:
            for number in self._of(base, rows, lambda job: bool(job.holder)):
                job = self._job(number, f"returned ({change.why})")
                if not job.holder:
                    raise Violation(
                        "two_hands", f"request {number} comes back, and no worker had it"
                    )
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


def rows_in(mask: int) -> list[int]:
    return [row for row in range(mask.bit_length()) if mask >> row & 1]


def _sharer(sender: str) -> str:
    """Return in whose share a sender's keys are: all without an identity are one."""
    return "~" if sender.startswith("~") else sender
