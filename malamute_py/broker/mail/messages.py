"""Messages: their load at the start, their life in a mailbox, their timers and their end.

Owns the transitions of a message: it arrives, waits, is held, is delayed, expires, leaves. Owns the
effects of the parts by which messages leave, too. The rules: the tables of the change log say which
messages there are; beside them are kept the holder of a row, the order of delivery and the times at
which something is due; the broker looks at a message when something happens to that message only.
Source: docs/design.md, Queues and the checkpoint; SPEC.md, section 4.8.

A put is the messages of one batch in one mailbox: one row of the tables (MessageRow), under the
number of its first message (`base`). Its messages are its rows, and a set of them is a mask: an
integer whose lowest bit is the first row. An effect is called when the log has its step
(`appended`), or refuses it.
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
from malamute_py.changelog.records import Change, MailDone, rows_of
from malamute_py.changelog.tables import MessageRow

DUE_STEP: Final = 1_024
"""Delayed puts, and expiring puts, that one tick handles at most."""
EVENT_EVERY_MS: Final = 10_000
"""Least time between two events about expired messages of a mailbox; the counter is exact."""
EASED: Final = 0.9
"""Share of its bounds below which a mailbox that was full is no longer reported as full."""
RowsOfPut = tuple[int, int, MessageRow]
"""Number of a put, some of its rows, and its row in the tables."""


class Messages:
    """The messages in the mailboxes of one core.

    Effects of puts, acknowledgements and removals call it when a message changes its state.
    """

    def __init__(self, shard: Shard, steps: Steps, mailboxes: Mailboxes, bodies: Bodies) -> None:
        self._shard = shard
        self._steps = steps
        self.mailboxes = mailboxes
        self.bodies = bodies
        self.quotas = shard.quotas
        self.runnable: Final[OrderedDict[Mailbox, None]] = OrderedDict()
        """Mailboxes that may have a message for a reader, in the order of their turns."""
        self.delays = Schedule()
        """(number of a mailbox, number of a put) -> time at which a delay of its rows is over."""
        self.expiries = Schedule()
        """(number of a mailbox, number of a put) -> time at which rows of it expire next."""

    @property
    def now_ms(self) -> int:
        """The broker's time."""
        return self._shard.now_ms

    # --- start ----------------------------------------------------------------------------------

    def recovered(self) -> None:
        """Load the messages from the tables; called once, after the mailboxes were loaded.

        Each row of the tables, one a put, is counted in its mailbox and on its sender's quota, has
        its timers set, and waits for a reader unless all of it is delayed.
        """
        mailboxes = self.mailboxes
        numbers = mailboxes.by_number
        lost = 0
        for (number, base), row in self._shard.queues.messages.items():
            mailbox = numbers.get(number)
            if mailbox is None:
                lost += 1
                continue
            mailbox.order.add(base)
            count = row.left.bit_count()
            mailbox.messages += count
            mailbox.bytes += row.size
            mailboxes.messages += count
            mailboxes.stored_bytes[mailbox.memory] += row.size
            self.quotas.weigh(row.weighs_on, mailbox.resource, row.size)
            if row.expires_at_ms:
                self._shorten(row, mailbox.settings.ttl_ms)
                self.expiries.set((number, base), row.expires_at_ms)
            rare = row.rare
            if row.not_before_ms or (rare is not None and rare.again):
                self._delay_recovered(mailbox, row)
            if mailbox.free(row):
                mailbox.push(base, row.priority)
        if lost:
            # A removal was cut off: the mailbox is gone, and no command can name its messages.
            self._shard.counters["mail_without_mailbox"] += lost

    def _shorten(self, row: MessageRow, ttl_ms: int) -> None:
        """Let messages of a put live no longer than their mailbox's ttl after the broker's start.

        The clock may have been ahead when they were put. A time of expiry that a sender set stays:
        messages that expire exactly one ttl after their put are those that got the ttl.
        """
        due_ms = row.at_ms + ttl_ms
        until_ms = self._shard.trusted_end(due_ms, ttl_ms)
        if until_ms == due_ms:
            return
        rare = row.rare
        if rare is not None and rare.expiries:
            rare.expiries = [until_ms if at_ms == due_ms else at_ms for at_ms in rare.expiries]
            row.expires_at_ms = min(at_ms for at_ms in rare.expiries if at_ms)  # 0: it never does
        elif row.expires_at_ms == due_ms:
            row.expires_at_ms = until_ms

    def _delay_recovered(self, mailbox: Mailbox, row: MessageRow) -> None:
        """Delay the rows of a put that wait for a time by the tables."""
        progress = mailbox.progress_of(row)
        for at_ms, rows in times_of(row):
            if at_ms:
                # A recipient asked for a pause; a sender's time has no pause and holds as it is.
                progress.delay(rows, self._shard.trusted_end(at_ms, row.pause_ms))
        if progress.times:
            mailbox.delayed += progress.delayed.bit_count()
            self.delays.set((mailbox.number, row.base), min(progress.times))

    def part(self, mailbox: Mailbox, change: Change, *effects: Effect) -> Part:
        """Return a part of a step that changes messages of a mailbox; one in memory is not logged.

        effects: what is done at run time beside the change.
        """
        memory = self.mailboxes.in_memory if mailbox.memory else None
        level = int(Level.NONE) if mailbox.memory else mailbox.level
        return changing([change], effects, memory=memory, level=level)

    # --- the life of a message ------------------------------------------------------------------

    def arrived(self, mailbox: Mailbox, base: int, mask: int) -> None:
        """Count rows of a put that the tables have in a mailbox now, and let them wait there.

        Called when the step that put them is in the log. mask: the rows, for dead letters, whose
        batch comes in parts; 0: the whole put.
        """
        place = mailbox.number, base
        row = mailbox.rows[place]
        count = mask.bit_count() if mask else row.count
        if not mask or mailbox.order.floor(base) != base:
            # The batch is new in the mailbox: of dead letters, other rows may be there already.
            mailbox.order.add(base)
            mailbox.bytes += row.size
            self.mailboxes.stored_bytes[mailbox.memory] += row.size
            if mask:
                # The sender's quota counts a put when it is taken, and dead letters now.
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
        """Give a mailbox a turn if it has both a message and a reader that may be given it."""
        if mailbox.able and mailbox.waits:
            self.runnable[mailbox] = None

    def leaving(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """Keep free or delayed rows from readers while the log is asked to remove them.

        Called by a purge, an expiry, a loss or a revival. Such rows count as held until the log has
        the removal (`gone`), or refuses it (`stay`).
        """
        progress = mailbox.progress_of(row)
        delayed = progress.delayed & mask
        if delayed:
            self._undelay(mailbox, row, progress, delayed)
        progress.held |= mask
        mailbox.held += mask.bit_count()
        if not row.left & ~(progress.held | progress.delayed):
            mailbox.pull(row.base, row.priority)

    def _undelay(self, mailbox: Mailbox, row: MessageRow, progress: PutProgress, mask: int) -> None:
        """Count rows of a put as delayed no more, and set the timer to the next delayed row."""
        mailbox.delayed -= mask.bit_count()
        place = mailbox.number, row.base
        following = progress.undelay(mask)
        if following:
            self.delays.set(place, following)
        else:
            self.delays.drop(place)

    def gone(self, mailbox: Mailbox, base: int, mask: int, row: MessageRow) -> None:
        """Uncount rows that are gone from the tables; they were held, or on their way out.

        Called when the log has their removal. With the last row of a put goes all that is kept of
        the put. row: the put as the tables had it.
        """
        count = mask.bit_count()
        mailbox.messages -= count
        mailbox.held -= count
        self.mailboxes.messages -= count
        place = mailbox.number, base
        if place in mailbox.rows:  # Other rows of the put are left.
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
        """Have the next refusal by a mailbox that was full reported again, once it has room enough.

        Called when a put has left a mailbox of which the event mailbox_full was told. It needs more
        than room for one message: a mailbox about full would tell the event over and over.
        """
        count_max, bytes_max = mailbox.bounds(self._shard.settings)
        if mailbox.messages <= EASED * count_max and mailbox.bytes <= EASED * bytes_max:
            mailbox.full_reported = False

    def release(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """Let rows wait again that a reader held, or that were on their way out.

        Called when a reader ends or gives them back, and when the log refuses their removal. The
        timer looks at those that have expired meanwhile.
        """
        progress = mailbox.progress[row.base]
        progress.held &= ~mask
        mailbox.held -= mask.bit_count()
        mailbox.push(row.base, row.priority)
        self._expire_if_due(mailbox, row)
        self.wake(mailbox)

    def _expire_if_due(self, mailbox: Mailbox, row: MessageRow) -> None:
        """Have the timer look at a put at once whose rows have expired while they did not wait."""
        if row.expires_at_ms and row.expires_at_ms <= self._shard.now_ms:
            # Other rows of the put may expire later; these have expired.
            self.expiries.set((mailbox.number, row.base), self._shard.now_ms)

    def stay(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """Let rows wait again whose removal the log refused, each for its time by the tables."""
        rest = mask
        for at_ms, rows in times_of(row):
            some = rows & rest
            rest &= ~some
            if some and at_ms > self._shard.now_ms:
                self.postpone(mailbox, row, some, at_ms)
            elif some:
                self.release(mailbox, row, some)

    def expire_soon(self, mailbox: Mailbox, row: MessageRow) -> None:
        """Have the timer look at a put with free rows that have expired, unless it is about to.

        Called when a reader is to be given the put. The timer may be set for other rows of it,
        which expire far later; or for an expiry that the log refused, which is tried again at
        `much_later_ms` at the latest and is left to that.
        """
        place = mailbox.number, row.base
        due_ms, now_ms = self.expiries.time(place), self._shard.now_ms
        if due_ms is None or due_ms > self.much_later_ms:
            self.expiries.set(place, now_ms)

    def postpone(self, mailbox: Mailbox, row: MessageRow, mask: int, at_ms: int) -> None:
        """Let rows that were held wait for a time: a reader gave them back, or a read failed."""
        progress = mailbox.progress[row.base]
        progress.held &= ~mask
        count = mask.bit_count()
        mailbox.held -= count
        mailbox.delayed += count
        self.delays.set((mailbox.number, row.base), progress.delay(mask, at_ms))
        self._expire_if_due(mailbox, row)

    @property
    def much_later_ms(self) -> int:
        """Time at which a refused change, or a read that failed, is tried again."""
        return self._shard.now_ms + 10 * self._shard.settings.retry_ms

    def lost(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """Remove rows that a reader was to be given and whose bodies are lost; report an error."""
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
        """Free delayed rows that are due, and let rows expire; DUE_STEP puts of each at most.

        Called from the time on at which the first is due; what is left is done in the next call.
        """
        now_ms = self._shard.now_ms
        for _ in range(DUE_STEP):
            place = self.delays.pop_due(now_ms)
            if place is None:
                break
            self._due(place)
        # One step for each mailbox removes all that has expired there.
        over: dict[int, list[RowsOfPut]] = {}
        for _ in range(DUE_STEP):
            place = self.expiries.pop_due(now_ms)
            if place is None:
                break
            self._expire(place, over)
        for number, rows in over.items():
            self._remove_expired(self.mailboxes.by_number[number], rows)

    def _due(self, place: Pair) -> None:
        """Let a reader have rows whose delay is over.

        place: (number of the mailbox, number of the put), as the timer has it; either may be gone.
        """
        number, base = place
        mailbox = self.mailboxes.by_number.get(number)
        if mailbox is None:
            return
        row = mailbox.rows.get(place)
        progress = mailbox.progress.get(base)
        if row is None or progress is None or progress.times is None:
            return
        now_ms = self._shard.now_ms
        mask = 0
        for at_ms, rows in progress.times.items():
            if at_ms <= now_ms:
                mask |= rows
        self._undelay(mailbox, row, progress, mask)
        if mask & row.left & ~progress.held:
            mailbox.push(base, row.priority)
            self.wake(mailbox)

    def _expire(self, place: Pair, over: dict[int, list[RowsOfPut]]) -> None:
        """Collect the rows of one put that are past their expiry and not held, for their removal.

        place: (number of the mailbox, number of the put). over: gets the rows, by mailbox.
        """
        number, base = place
        mailbox = self.mailboxes.by_number.get(number)
        row = None if mailbox is None else mailbox.rows.get(place)
        if mailbox is None or row is None:
            return
        mask, following = expired(mailbox, row, self._shard.now_ms)
        if following:
            self.expiries.set(place, following)
        progress = mailbox.progress.get(base)
        if progress is not None:
            # A reader keeps the rows that it holds; `_expire_if_due` looks at rows that come back.
            mask &= ~progress.held
        if mask:
            self.leaving(mailbox, row, mask)  # No reader gets them while the log is asked.
            over.setdefault(number, []).append((base, mask, row))

    def _remove_expired(self, mailbox: Mailbox, rows: list[RowsOfPut]) -> None:
        """Log the end of expired messages of a mailbox; if the log refuses, look at them later."""
        change = MailDone(mailbox.number, done_of(rows), "expired")
        count = sum(mask.bit_count() for _, mask, _ in rows)
        then = Then(
            partial(self._expired, mailbox, count), partial(self._expire_later, mailbox, rows)
        )
        self._steps.take([self.part(mailbox, change, Leaving(self, mailbox, rows), then)])

    def _expire_later(self, mailbox: Mailbox, rows: list[RowsOfPut], *_: Any) -> None:
        """Try an expiry again later that the log refused; the rows wait meanwhile."""
        for base, _mask, _row in rows:
            self.expiries.set((mailbox.number, base), self.much_later_ms)

    def _expired(self, mailbox: Mailbox, count: int, _: int) -> None:
        """Count messages that expired, and report their sum once in EVENT_EVERY_MS."""
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
    """Rows of one mailbox whose removal goes to the log; `Messages.leaving` has been called."""

    messages: Messages
    mailbox: Mailbox
    rows: list[RowsOfPut]

    def appended(self, part: Part, end_lsn: int) -> None:
        """Remove the messages from the mailbox, as the log has their removal."""
        gone = self.messages.gone
        mailbox = self.mailbox
        for base, mask, row in self.rows:
            gone(mailbox, base, mask, row)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Keep the messages in the mailbox, as the log refused their removal."""
        for _, mask, row in self.rows:
            self.messages.stay(self.mailbox, row, mask)


class Losing(Leaving):
    """Rows of one mailbox that leave because their bodies are lost."""

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Delay the messages: free at once, they would be read, lost and refused without end."""
        for _, mask, row in self.rows:
            self.messages.postpone(self.mailbox, row, mask, self.messages.much_later_ms)


def times_of(row: MessageRow) -> list[tuple[int, int]]:
    """Return when rows of a put may be delivered by the tables: (time or 0, rows as a mask).

    Rows that were given back apart from the others (`again`) have times of their own.
    """
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
    """Return rows as the records of the log name them: empty for all that are left of a put.

    A dead letter is always named by its row: more requests of its batch may become dead letters
    before the record takes effect, and "all that are left" would include them.
    """
    return [
        (base, b"" if mask == row.left and not _is_dead_request(row) else rows_of(mask))
        for base, mask, row in rows
    ]


def _is_dead_request(row: MessageRow) -> bool:
    """Whether a row of the tables has requests that became dead letters; it may get more rows."""
    return row.rare is not None and row.rare.request is not None
