"""Messages: what lies in the mailboxes, and how each message leaves.

Owns what is taken up at the start, what waits, what is held, what is due when, and the effects of
the parts by which messages leave. The rules: the tables of the change log say what there is, and
what is kept here besides is who holds a row, what waits in which order and what is due when; a
message is looked at when something happens to it, never because another moves. Source:
docs/design.md, Queues and the checkpoint; SPEC.md, section 4.8.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from malamute_protocol.commands import Level
from malamute_py.broker.context import Shard
from malamute_py.broker.log.bodies import Bodies
from malamute_py.broker.log.steps import Effect, Part, Steps, Then, changing
from malamute_py.broker.mail.mailbox import Mailbox, PutProgress, expired
from malamute_py.broker.mail.mailboxes import Mailboxes
from malamute_py.broker.structures.sorted_values import Pair, Schedule
from malamute_py.changelog.records import Change, MailDone
from malamute_py.changelog.tables import MessageRow, rows_of

DUE_STEP: Final = 1_024
"""Puts that one tick delivers late, or lets expire."""
EVENT_EVERY_MS: Final = 10_000
"""An event about the messages of a mailbox comes at most so often; their counter is exact."""
EASED: Final = 0.9
"""Below this share of its bounds a mailbox that was full is not any more."""
RowsOfPut = tuple[int, int, MessageRow]
"""Number of a put, rows of it, and its row in the tables."""


class Messages:
    """What lies in the mailboxes of one core."""

    def __init__(self, shard: Shard, steps: Steps, mailboxes: Mailboxes, bodies: Bodies) -> None:
        self._shard = shard
        self._steps = steps
        self.mailboxes = mailboxes
        self.bodies = bodies
        self.quotas = shard.quotas
        self.runnable: Final[OrderedDict[Mailbox, None]] = OrderedDict()
        """Mailboxes that may have something for a reader, in the order of their turns."""
        self.delays = Schedule()
        self.expiries = Schedule()

    @property
    def now_ms(self) -> int:
        """The time."""
        return self._shard.now_ms

    # --- start ----------------------------------------------------------------------------------

    def recovered(self) -> None:
        """Take up what the tables hold; to be called once, after the mailboxes have."""
        mailboxes = self.mailboxes
        numbers = mailboxes.by_number
        lost = 0
        for (number, base), message in self._shard.queues.messages.items():
            mailbox = numbers.get(number)
            if mailbox is None:
                lost += 1
                continue
            mailbox.order.add(base)
            count = message.left.bit_count()
            mailbox.messages += count
            mailbox.bytes += message.size
            mailboxes.messages += count
            mailboxes.stored_bytes[False] += message.size
            self.quotas.weigh(message.weighs_on, mailbox.resource, message.size)
            if message.expires_at_ms:
                self.expiries.set((number, base), message.expires_at_ms)
            rare = message.rare
            if message.not_before_ms or (rare is not None and rare.again):
                self._delay_of(mailbox, message)
            if mailbox.free(message):
                mailbox.push(base, message.priority)
        if lost:
            # What a removal had not finished with: the mailbox is gone, and nothing names them.
            self._shard.counters["mail_without_mailbox"] += lost

    def _delay_of(self, mailbox: Mailbox, row: MessageRow) -> None:
        """Rows of a put that the tables say to be delayed."""
        progress = mailbox.progress_of(row)
        for at_ms, rows in times_of(row):
            if at_ms:
                # Only a recipient asks for a pause; a sender's time stays a time.
                progress.delay(rows, self._shard.resumed(at_ms, row.pause_ms))
        if progress.times:
            mailbox.delayed += progress.delayed.bit_count()
            self.delays.set((mailbox.number, row.base), min(progress.times))

    def part(self, mailbox: Mailbox, change: Change, *effects: Effect) -> Part:
        """A step's part that changes what lies in a mailbox; in memory it takes effect at once."""
        memory = self.mailboxes.in_memory if mailbox.memory else None
        level = int(Level.NONE) if mailbox.memory else mailbox.level
        return changing([change], effects, memory=memory, level=level)

    # --- the life of a message ------------------------------------------------------------------

    def arrived(self, mailbox: Mailbox, base: int, mask: int) -> None:
        """A put (0: all of it) or more rows of one lie in a mailbox, by the tables."""
        place = mailbox.number, base
        row = mailbox.rows[place]
        count = mask.bit_count() if mask else row.count
        if not mask or mailbox.order.floor(base) != base:
            # Of a batch of dead letters, others may have come or gone in this very bundle.
            mailbox.order.add(base)
            mailbox.bytes += row.size
            self.mailboxes.stored_bytes[mailbox.memory] += row.size
            if mask:
                # A put was weighed when it was taken; requests become dead letters here.
                self.quotas.weigh(row.weighs_on, mailbox.resource, row.size)
        mailbox.messages += count
        self.mailboxes.messages += count
        self._shard.counters["mail_in"] += count
        if row.expires_at_ms:
            self.expiries.set(place, row.expires_at_ms)
        if row.not_before_ms > self._shard.now_ms:
            mailbox.progress_of(row).delay(mask or row.left, row.not_before_ms)
            mailbox.delayed += count
            self.delays.set(place, row.not_before_ms)
            return
        mailbox.push(base, row.priority)
        if mailbox.able:
            self.runnable[mailbox] = None

    def wake(self, mailbox: Mailbox) -> None:
        """A mailbox may have something for a reader."""
        if mailbox.able and mailbox.waits:
            self.runnable[mailbox] = None

    def leaving(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """Rows that were free, or delayed, are on their way out: no reader gets them."""
        progress = mailbox.progress_of(row)
        late = progress.delayed & mask
        if late:
            self._undelay(mailbox, row, progress, late)
        progress.held |= mask
        mailbox.held += mask.bit_count()
        if not row.left & ~(progress.held | progress.delayed):
            mailbox.pull(row.base, row.priority)

    def _undelay(self, mailbox: Mailbox, row: MessageRow, progress: PutProgress, mask: int) -> None:
        mailbox.delayed -= mask.bit_count()
        place = mailbox.number, row.base
        following = progress.undelay(mask)
        if following:
            self.delays.set(place, following)
        else:
            self.delays.drop(place)

    def left(self, mailbox: Mailbox, base: int, mask: int, row: MessageRow) -> None:
        """Rows that were held or leaving are gone from the tables."""
        count = mask.bit_count()
        mailbox.messages -= count
        mailbox.held -= count
        self.mailboxes.messages -= count
        place = mailbox.number, base
        if place in mailbox.rows:
            mailbox.progress[base].held &= ~mask
            return
        del mailbox.progress[base]
        mailbox.order.discard(base)
        mailbox.bytes -= row.size
        self.mailboxes.stored_bytes[mailbox.memory] -= row.size
        self.quotas.weigh(row.weighs_on, mailbox.resource, -row.size)
        self.bodies.drop(base)
        if row.expires_at_ms:
            self.expiries.drop(place)
        if mailbox.full_reported:
            self._ease(mailbox)

    def _ease(self, mailbox: Mailbox) -> None:
        count_max, bytes_max = self.mailboxes.bounds(mailbox)
        if mailbox.messages <= EASED * count_max and mailbox.bytes <= EASED * bytes_max:
            mailbox.full_reported = False

    def release(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """Rows that were held or leaving wait again."""
        progress = mailbox.progress[row.base]
        progress.held &= ~mask
        mailbox.held -= mask.bit_count()
        mailbox.push(row.base, row.priority)
        self._freed(mailbox, row)
        self.wake(mailbox)

    def _freed(self, mailbox: Mailbox, row: MessageRow) -> None:
        """Let rows wait that no reader holds any more: they may have expired meanwhile."""
        if row.expires_at_ms and row.expires_at_ms <= self._shard.now_ms:
            # Also when others of the put expire later: these rows are over now.
            self.expiries.set((mailbox.number, row.base), self._shard.now_ms)

    def stay(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """Rows that were leaving wait again, each for the time that the tables say."""
        rest = mask
        for at_ms, rows in times_of(row):
            some = rows & rest
            rest &= ~some
            if some and at_ms > self._shard.now_ms:
                self.postpone(mailbox, row, some, at_ms)
            elif some:
                self.release(mailbox, row, some)

    def expire_soon(self, mailbox: Mailbox, row: MessageRow) -> None:
        """A put has free rows that have expired: look at it, unless that is about to be done.

        Others of its rows may expire far later, and what the log refused is tried again soon.
        """
        place = mailbox.number, row.base
        due_ms, now_ms = self.expiries.time(place), self._shard.now_ms
        if due_ms is None or due_ms > self.much_later_ms:
            self.expiries.set(place, now_ms)

    def postpone(self, mailbox: Mailbox, row: MessageRow, mask: int, at_ms: int) -> None:
        """Rows that were held wait again, and not before a time."""
        progress = mailbox.progress[row.base]
        progress.held &= ~mask
        count = mask.bit_count()
        mailbox.held -= count
        mailbox.delayed += count
        self.delays.set((mailbox.number, row.base), progress.delay(mask, at_ms))
        self._freed(mailbox, row)

    @property
    def much_later_ms(self) -> int:
        """When what the log refused, or could not be read, is tried again."""
        return self._shard.now_ms + 10 * self._shard.settings.retry_ms

    def lost(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """The bodies of rows that are held are nowhere: they can only be given up, aloud."""
        count = mask.bit_count()
        self._shard.counters["mail_lost"] += count
        self._shard.event(
            "mail_lost", "error", mailbox=mailbox.name, number=row.base, count=count,
            sender=row.sender,
        )  # fmt: skip
        rows: list[RowsOfPut] = [(row.base, mask, row)]
        change = MailDone(mailbox.number, done_of(rows), "lost")
        self._steps.take([self.part(mailbox, change, Losing(self, mailbox, rows))])

    # --- time -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Deliver what is due, let expire what is over; the rest of a large number next time."""
        now_ms = self._shard.now_ms
        for _ in range(DUE_STEP):
            place = self.delays.pop_due(now_ms)
            if place is None:
                break
            self._due(place)
        over: dict[int, list[RowsOfPut]] = {}
        for _ in range(DUE_STEP):
            place = self.expiries.pop_due(now_ms)
            if place is None:
                break
            self._expire(place, over)
        for number, rows in over.items():
            self._give_up(self.mailboxes.by_number[number], rows)

    def _due(self, place: Pair) -> None:
        mailbox = self.mailboxes.by_number.get(place[0])
        if mailbox is None:
            return
        row = mailbox.rows.get(place)
        progress = mailbox.progress.get(place[1])
        if row is None or progress is None or progress.times is None:
            return
        now_ms = self._shard.now_ms
        mask = 0
        for at_ms, rows in progress.times.items():
            if at_ms <= now_ms:
                mask |= rows
        mailbox.delayed -= mask.bit_count()
        following = progress.undelay(mask)
        if following:
            self.delays.set(place, following)
        if mask & row.left & ~progress.held:
            mailbox.push(place[1], row.priority)
            self.wake(mailbox)

    def _expire(self, place: Pair, over: dict[int, list[RowsOfPut]]) -> None:
        mailbox = self.mailboxes.by_number.get(place[0])
        row = None if mailbox is None else mailbox.rows.get(place)
        if mailbox is None or row is None:
            return
        mask, following = expired(mailbox, row, self._shard.now_ms)
        if following:
            self.expiries.set(place, following)
        progress = mailbox.progress.get(place[1])
        if progress is not None:
            # What a reader holds stays with it; when it comes back it is looked at again.
            mask &= ~progress.held
        if mask:
            self.leaving(mailbox, row, mask)
            over.setdefault(place[0], []).append((place[1], mask, row))

    def _give_up(self, mailbox: Mailbox, rows: list[RowsOfPut]) -> None:
        change = MailDone(mailbox.number, done_of(rows), "expired")
        count = sum(mask.bit_count() for _, mask, _ in rows)
        told = partial(self._expired, mailbox, count), partial(self._expire_later, mailbox, rows)
        self._steps.take([self.part(mailbox, change, Leaving(self, mailbox, rows), Then(*told))])

    def _expire_later(self, mailbox: Mailbox, rows: list[RowsOfPut], *_: Any) -> None:
        for base, _mask, _row in rows:
            self.expiries.set((mailbox.number, base), self.much_later_ms)

    def _expired(self, mailbox: Mailbox, count: int, _: int) -> None:
        """Count messages that expired, and say so: at once, then now and again how many since."""
        self._shard.counters["mail_expired"] += count
        mailbox.expired_unreported += count
        now_ms = self._shard.now_ms
        if now_ms >= mailbox.report_expired_at_ms:
            self._shard.event(
                "mail_expired", mailbox=mailbox.name, count=mailbox.expired_unreported
            )
            mailbox.expired_unreported = 0
            mailbox.report_expired_at_ms = now_ms + EVENT_EVERY_MS


class Leaving(Effect):
    """Rows of one mailbox that are on their way out; readers do not get them any more."""

    messages: Messages
    mailbox: Mailbox
    rows: list[RowsOfPut]

    def appended(self, part: Part, end_lsn: int) -> None:
        """Take the messages out of the mailbox."""
        left = self.messages.left
        mailbox = self.mailbox
        for base, mask, row in self.rows:
            left(mailbox, base, mask, row)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Keep the messages in the mailbox."""
        for _, mask, row in self.rows:
            self.messages.stay(self.mailbox, row, mask)


class Losing(Leaving):
    """Rows of one mailbox that leave because their bodies are nowhere."""

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Keep them, but not at once: they would be read, found lost and refused without end."""
        for _, mask, row in self.rows:
            self.messages.postpone(self.mailbox, row, mask, self.messages.much_later_ms)


def times_of(row: MessageRow) -> list[tuple[int, int]]:
    """When the rows of a put may be delivered, by the tables: (time or 0, rows as a mask)."""
    rest = row.left
    found: list[tuple[int, int]] = []
    for at_ms, rows in () if row.rare is None else row.rare.again:
        mask = int.from_bytes(rows, "little") & rest
        rest &= ~mask
        if mask:
            found.append((at_ms, mask))
    if rest:
        found.append((row.not_before_ms, rest))
    return found


def done_of(rows: Iterable[RowsOfPut]) -> list[tuple[int, bytes]]:
    """Rows as the records of the log name them.

    A dead letter is always named: others of its batch may die into the mailbox before the record
    takes effect, and "all that are left" would be these, too.
    """
    return [
        (base, b"" if mask == row.left and not _grows(row) else rows_of(mask))
        for base, mask, row in rows
    ]


def _grows(row: MessageRow) -> bool:
    return row.rare is not None and row.rare.request is not None
