"""One mailbox at run time: the puts that wait in it, its readers, and the rows that each has.

Owns the state of a mailbox, of its readers, and of each put of which a row was handed out or waits
for a time. The rules: a set of rows is a mask, so that a batch costs about what a message costs; a
put that simply waits has nothing but its row in the tables. Source: docs/design.md, Queues and the
checkpoint.

A put is the messages of one batch in one mailbox: one row of the tables (MessageRow), under the
number of its first message (`base`). Its messages are its rows, and a set of them is a mask: an
integer whose lowest bit is the first row.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from hashlib import blake2b
from typing import Any, Final

import msgspec
import numpy as np

from malamute_protocol.commands import Level, OpenInbox
from malamute_py.broker.limits import BrokerSettings
from malamute_py.broker.links.link import Link, Owner, Receiver
from malamute_py.broker.log.bodies import Body
from malamute_py.broker.structures.bitmaps import bits_of_rows
from malamute_py.broker.structures.sorted_values import Ordered
from malamute_py.changelog.records import MailboxSet
from malamute_py.changelog.settings import MailboxSettings
from malamute_py.changelog.tables import MessageRow

DRAFT, CREATING, STANDING = range(3)
"""How far the creation of a mailbox is: no step has created it; a bundle that was handed to the
journal creates it; the log has it. A temporary mailbox, which is in no log, stands at once. That a
mailbox is being removed is another thing (`removing`)."""


class PutProgress(msgspec.Struct):
    """One put of which a row was handed out, is on its way out, or waits for a time."""

    before: int
    """Attempts that the tables count; those since the broker's start are in `tried`, `retried`."""
    held: int = 0
    """Rows that a reader holds, or that are on their way out."""
    delayed: int = 0
    """Rows that wait for a time."""
    tried: int = 0
    """Rows that were handed out once or more often."""
    retried: dict[int, int] | None = None
    """Count of hand-outs -> rows, for rows that were handed out more than once."""
    times: dict[int, int] | None = None
    """Time -> rows that wait for it."""
    expiries: Any = None
    """Time at which each row expires, as a column, once the times of many rows were compared."""

    def attempt(self, free: int) -> tuple[int, int]:
        """Return the number of the next attempt at the first free rows, and which rows have it.

        A MAIL tells one number for all of its rows, so it takes the longest beginning of the free
        rows with equally many attempts. free: rows that may be handed out, one at least.
        """
        first = free & -free  # The lowest bit that is set: the first free row.
        times = 0
        if not self.tried & first:
            same = free & ~self.tried
        else:
            times, same = 1, free & self.tried
            # Rows that are in `tried` and not in `retried` were handed out one time.
            for count, rows in (self.retried or {}).items():
                if rows & first:
                    times, same = count, free & rows
                    break
                same &= ~rows
        others = free & ~same
        if others:
            # Rows after the first one with another number wait, so that all go out in order: the
            # subtraction sets all bits below that row.
            same &= (others & -others) - 1
        return self.before + times + 1, same

    def delivered(self, mask: int) -> None:
        """Count one more hand-out of rows, which MAIL tells as attempts.

        The first of a row is in `tried` alone, later ones in `retried`, too.
        """
        again = self.tried & mask
        self.tried |= mask
        if not again:
            return
        retried = self.retried or {}
        moved: dict[int, int] = {}
        rest = again
        for count, rows in retried.items():
            here = rows & again
            rest &= ~here
            # Rows of `here` go from this count to the next, and may join others that are there.
            for number, some in ((count, rows & ~again), (count + 1, here)):
                if some:
                    moved[number] = moved.get(number, 0) | some
        if rest:  # rows that were handed out once before, and are in `tried` alone
            moved[2] = moved.get(2, 0) | rest
        self.retried = moved

    def delay(self, mask: int, at_ms: int) -> int:
        """Make rows wait for a time; returns the first time of any row, for the timer."""
        self.delayed |= mask
        if self.times is None:
            self.times = {}
        self.times[at_ms] = self.times.get(at_ms, 0) | mask
        return min(self.times)

    def undelay(self, mask: int) -> int:
        """End the waiting of rows; returns the first time that is left, for the timer, or 0."""
        self.delayed &= ~mask
        if self.times is None:
            return 0
        kept = {at_ms: rows & ~mask for at_ms, rows in self.times.items() if rows & ~mask}
        self.times = kept or None
        return min(kept, default=0)


FEW_ROWS: Final = 64
"""Rows of a put that are looked at one by one; the times of more are compared as a column."""
NO_READERS: OrderedDict[Inbox, None] = OrderedDict()
"""Readers of every mailbox that never had one; always empty. Most mailboxes never have one."""


class Temporary:
    """Facts that only a temporary mailbox has."""

    __slots__ = ("logged_next", "lost_reported", "memory_next", "session")

    def __init__(self, session: bytes, logged_next: int, memory_next: int) -> None:
        self.session = session
        self.logged_next = logged_next
        """The next message number in the log when the mailbox was made: replies to requests with
        lower numbers may have been lost with an earlier mailbox (Mailboxes.answers_lost)."""
        self.memory_next = memory_next
        """The next message number in memory, likewise."""
        self.lost_reported: set[int] = set()
        """Batches of earlier requests whose requester was told that their answers are lost."""


class Mailbox:
    """One mailbox at run time.

    It only keeps counts and queues: Messages and Inboxes change them as messages change state.
    """

    __slots__ = (
        "able",
        "by_priority",
        "bytes",
        "coming",
        "coming_bytes",
        "created_by",
        "created_ms",
        "delayed",
        "expired_unreported",
        "full_reported",
        "held",
        "level",
        "memory",
        "messages",
        "name",
        "number",
        "order",
        "pending",
        "progress",
        "readers",
        "ready",
        "removing",
        "report_expired_at_ms",
        "resource",
        "returning",
        "rows",
        "settings",
        "state",
        "temporary",
    )

    def __init__(
        self, number: int, name: str, rows: Any, settings: MailboxSettings, by: str, at_ms: int
    ) -> None:
        self.number = number
        self.name = name
        self.rows = rows
        """(mailbox, number of a put) -> row: in the tables of the log, or in those in memory."""
        self.created_by = by
        self.created_ms = at_ms
        self.state = DRAFT
        self.temporary: Temporary | None = None
        """None: the mailbox is not bound to a session."""
        self.removing = False
        """Whether a put is refused because the mailbox is being removed or has ended."""
        self.messages = 0
        self.bytes = 0
        """Bytes of the puts of which a row is left."""
        self.coming = 0
        """Messages that steps on their way will put."""
        self.coming_bytes = 0
        self.held = 0
        """Messages that readers hold, or that are on their way out."""
        self.delayed = 0
        """Messages that wait for a time."""
        self.pending = 0
        """Steps on their way that need the mailbox."""
        self.full_reported = False
        """Whether the event mailbox_full was told, and the mailbox has had no room since."""
        self.expired_unreported = 0
        """Expired messages that no event has reported yet."""
        self.report_expired_at_ms = 0
        """Time from which on the next event may report them."""
        self.order: Ordered[int] = Ordered()
        """Numbers of the puts in the mailbox."""
        self.ready: Ordered[int] = Ordered()
        """Puts of priority 0 with a row that may be delivered."""
        self.by_priority: dict[int, Ordered[int]] | None = None
        """Priority -> puts with a row that may be delivered, for priorities other than 0."""
        self.progress: dict[int, PutProgress] = {}
        """Number of a put -> what its rows went through; a put that simply waits is not here."""
        self.readers: dict[Inbox, None] = {}
        self.able = NO_READERS
        """Readers that may be given something, in the order of their turns."""
        self.returning = 0
        """Readers that have ended and whose rows are not free yet; others wait for these rows."""
        self.apply_settings(settings)

    def apply_settings(self, settings: MailboxSettings) -> None:
        """Use these settings from now on: new ones, or those before, as the log refused these."""
        self.settings = settings
        self.memory = settings.memory
        self.resource = "mail_memory_bytes" if settings.memory else "mail_bytes"
        """Name of the sender's quota that bytes in the mailbox count towards."""
        self.level = int(Level[settings.level.upper()])

    def bounds(self, limits: BrokerSettings) -> tuple[int, int]:
        """Return the most messages and bytes that it may hold: its own bounds, else the broker's.

        Asked by each put that may be refused, and by `Messages._ease`. limits: those of this
        moment, since a running broker takes up changed ones.
        """
        has = self.settings
        return (
            has.max_messages or limits.mailbox_messages_max,
            has.max_bytes or limits.mailbox_bytes_max,
        )

    def creation(self) -> MailboxSet:
        """Return the change that creates the mailbox, or gives it the settings that it has now."""
        return MailboxSet(self.number, self.name, self.settings, self.created_by, self.created_ms)

    # --- what waits -----------------------------------------------------------------------------

    def push(self, base: int, priority: int) -> None:
        """Note that a put (its number is `base`) has a row that may be delivered: it waits."""
        if not priority:
            self.ready.add(base)
            return
        if self.by_priority is None:
            self.by_priority = {}
        waiting = self.by_priority.get(priority)
        if waiting is None:
            waiting = self.by_priority[priority] = Ordered()
        waiting.add(base)

    def pull(self, base: int, priority: int) -> None:
        """Note that a put has no row left that may be delivered: no turn looks at it again."""
        if not priority:
            self.ready.discard(base)
        elif self.by_priority is not None:
            waiting = self.by_priority.get(priority)
            if waiting is not None:
                waiting.discard(base)
                if not waiting:
                    del self.by_priority[priority]

    @property
    def waits(self) -> bool:
        """Whether a row may be delivered."""
        return bool(self.ready) or bool(self.by_priority)

    def head(self) -> int:
        """Return the number of the put that is delivered first; there must be one."""
        if self.by_priority:
            highest = max(self.by_priority)  # It may be below 0, the priority of `ready`.
            if highest > 0 or not self.ready:
                return self.by_priority[highest].first
        return self.ready.first

    def oldest_ms(self) -> int:
        """Return when the oldest message was put that waits for no time, for operators; 0: none.

        One that a reader holds counts where it is the oldest of all; where the oldest waits for a
        time, only messages that may be delivered are looked for.
        """
        if not self.order:
            return 0
        row: MessageRow = self.rows[self.number, self.order.first]
        known = self.progress.get(row.base)
        if known is not None and not row.left & ~known.delayed:
            queues = [self.ready, *(self.by_priority or {}).values()]
            bases = [queue.first for queue in queues if queue]
            if not bases:
                return 0
            row = self.rows[self.number, min(bases)]
        return row.at_ms

    def progress_of(self, row: MessageRow) -> PutProgress:
        """Return the progress of a put, which is made when the put has simply waited so far.

        row: the put in the tables, whose counts of attempts the progress begins with.
        """
        progress = self.progress.get(row.base)
        if progress is None:
            progress = self.progress[row.base] = PutProgress(row.attempts)
            if row.rare is not None:
                for times, rows in row.rare.tries:
                    mask = int.from_bytes(rows, "little")
                    progress.tried |= mask
                    if times > 1:
                        progress.retried = {**(progress.retried or {}), times: mask}
        return progress

    def free(self, row: MessageRow) -> int:
        """Return the rows of a put that no reader holds and that wait for no time."""
        progress = self.progress.get(row.base)
        return row.left if progress is None else row.left & ~(progress.held | progress.delayed)


def expired(mailbox: Mailbox, row: MessageRow, now_ms: int) -> tuple[int, int]:
    """Return the rows of a put that have expired, and when the next row expires (0: none does).

    Called by the timer of expiries, and before rows are given to a reader. row: a put of which a
    row expires.
    """
    rare = row.rare
    if rare is None or not rare.expiries:  # All rows expire at the same time.
        if row.expires_at_ms <= now_ms:
            return row.left, 0
        return 0, row.expires_at_ms
    if len(rare.expiries) > FEW_ROWS:
        return _expired_of_many(mailbox, row, rare.expiries, now_ms)
    mask = following = 0
    left = row.left
    for place, at_ms in enumerate(rare.expiries):
        if not at_ms or not left >> place & 1:  # The row never expires, or has left the mailbox.
            continue
        if at_ms <= now_ms:
            mask |= 1 << place
        elif not following or at_ms < following:
            following = at_ms
    return mask, following


def _expired_of_many(
    mailbox: Mailbox, row: MessageRow, expiries: list[int], now_ms: int
) -> tuple[int, int]:
    """Return the rows that expired as a mask, and when the next one does; 0: none will.

    For `expired`, of a put of many rows. expiries: the time of each row, 0: it never expires. They
    are kept as an array for the next call: each of 65,536 rows may have its own.
    """
    progress = mailbox.progress_of(row)
    times = progress.expiries
    if times is None:
        times = progress.expiries = np.array(expiries, np.int64)
    later = times > now_ms
    over = (times != 0) & ~later
    return bits_of_rows(over) & row.left, int(times[later].min()) if later.any() else 0


def temporary_name(link: Link) -> str:
    """Return the name of the temporary mailbox of a link's session: `~` and a digest.

    The session itself is told to no other client, which could take the link over with it.
    """
    if link.holder.startswith("~"):  # That digest is the name of a link without an identity.
        return link.holder
    return f"~{blake2b(link.session, digest_size=16).hexdigest()}"


class Handout:
    """Rows of one put that were given to a reader and wait for their bodies."""

    __slots__ = ("attempts", "body", "failed", "mask", "missing", "row")

    def __init__(self, row: MessageRow, mask: int, attempts: int) -> None:
        self.row = row
        self.mask = mask
        self.attempts = attempts
        """Number of this attempt at the rows, as MAIL tells it."""
        self.body: Body | None = None
        self.missing = False
        """Whether the read of the body has ended without one."""
        self.failed = ""
        """Reason why that read failed; empty: the body is lost."""


class Inbox(Receiver):
    """One reader of a mailbox."""

    __slots__ = (
        "held",
        "mailbox",
        "outstanding",
        "pipe",
        "pipe_bytes",
        "started",
    )

    def __init__(self, owner: Owner, link: Link, command: OpenInbox, mailbox: Mailbox) -> None:
        super().__init__(
            owner, link, command.subscription, command.credit_records, command.credit_bytes
        )
        self.mailbox = mailbox
        self.held: dict[int, int] = {}
        """Number of a put -> its rows that the reader was given and has not acknowledged."""
        self.outstanding = 0
        """Messages that the reader was given and has not acknowledged."""
        self.pipe: deque[Handout] = deque()
        """Hand-outs that wait for bodies, in the order of their delivery."""
        self.pipe_bytes = 0
        """Bytes of the puts of these hand-outs."""
        self.started = False
        """Whether the reader was told that it is open; it is given nothing before."""

    @property
    def wants(self) -> bool:
        """Whether the reader may be given a message, by its credit and the room of its link."""
        if not self.started or self.link.room <= 0:
            return False
        if self.outstanding:
            return self.left_records > 0 and self.left_bytes > 0
        # A reader with nothing to acknowledge gets a message larger than its credit: it could not
        # get on otherwise. Either kind of credit shows that it wants one.
        return self.left_records > 0 or self.left_bytes > 0
