"""What a step does to a mailbox: messages that come, and rows that leave.

Owns the effects of the parts that put mail and let it go. The rules: what a part needs is reserved
when it is taken and given back when it is refused; the first put of a mailbox creates it in the
same bundle. Source: docs/design.md (The core and its shell; Queues and the checkpoint).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from malamute_protocol.commands import Level
from malamute_py.broker.mailbox import CREATING, DRAFT, STANDING, Mailbox
from malamute_py.broker.steps import Part
from malamute_py.changelog.records import Change, MailPut
from malamute_py.changelog.tables import MessageRow, rows_of

if TYPE_CHECKING:
    from malamute_py.broker.mailboxes import Mailboxes


class Putting:
    """One put on its way: what a step does to its mailbox."""

    __slots__ = ("_boxes", "count", "created", "mailbox", "part", "put", "size")

    def __init__(self, boxes: Mailboxes, mailbox: Mailbox, put: MailPut, part: Part) -> None:
        self._boxes = boxes
        self.mailbox = mailbox
        self.put = put
        self.part = part
        self.count = put.count
        self.size = put.size
        self.created = False

    def taken(self) -> None:
        """Its room is reserved."""
        self._boxes.reserve(self.mailbox, self.count, self.size)
        self._weigh(self.size)

    def _weigh(self, size: int) -> None:
        """Count bytes from when they are taken: those on their way are held as well."""
        put = self.put
        self._boxes.quotas.weigh(put.asked_by or put.sender, self.mailbox.resource, size)

    def based(self, base: int) -> None:
        """Its number is known; the first put of a mailbox creates it in the same bundle."""
        self.put.base = base
        self.created = self._boxes.create_in(self.part, self.mailbox)

    def appended(self, end_lsn: int) -> None:
        """The messages lie in the mailbox."""
        boxes, mailbox, part, put = self._boxes, self.mailbox, self.part, self.put
        boxes.unreserve(mailbox, self.count, self.size)
        base = put.base
        assert part.content is not None
        if mailbox.memory:
            boxes.apply(put)
            boxes.bodies.hold(base, boxes.stamp(part.content, base), part.frame, part.content)
        else:
            if mailbox.state != STANDING:
                boxes.stands(mailbox)
            boxes.bodies.keep(base, part.stamp, part.frame, part.content)
        boxes.arrived(mailbox, base, 0)

    def refused(self, code: str, reason: str, retry_ms: int) -> None:
        """Nothing happened."""
        mailbox = self.mailbox
        if self.created:
            self.created = False
            if mailbox.state == CREATING:
                # Else another bundle, which the journal took, has created it.
                mailbox.state = DRAFT
        self._boxes.unreserve(mailbox, self.count, self.size)
        self._weigh(-self.size)
        self._boxes.unused(mailbox)


Leaver = tuple[int, int, MessageRow]
"""Number of a put, rows of it, and its row in the tables."""


class Leaving:
    """Rows of one mailbox that are on their way out."""

    __slots__ = ("_boxes", "_retry_ms", "_then", "mailbox", "rows")

    def __init__(
        self,
        boxes: Mailboxes,
        mailbox: Mailbox,
        rows: list[Leaver],
        then: Callable[[int], None] | None = None,
        retry_ms: int = 0,
    ) -> None:
        """then: called with the end LSN. retry_ms: what expires is tried again so much later."""
        self._boxes = boxes
        self._then = then
        self._retry_ms = retry_ms
        self.mailbox = mailbox
        self.rows = rows

    def part(self, change: Change) -> Part:
        """The part of a step that lets them go; they are to be kept from readers already."""
        mailbox = self.mailbox
        if mailbox.memory:

            def gone(end_lsn: int) -> None:
                self._boxes.apply(change)
                self.appended(end_lsn)

            return Part(appended=gone, refused=self.refused, level=int(Level.NONE), memory=True)
        return Part([change], appended=self.appended, refused=self.refused, level=mailbox.level)

    def appended(self, end_lsn: int) -> None:
        """Take the messages out of the mailbox."""
        left = self._boxes.left
        mailbox = self.mailbox
        for base, mask, row in self.rows:
            left(mailbox, base, mask, row)
        if self._then is not None:
            self._then(end_lsn)

    def refused(self, code: str, reason: str, retry_ms: int) -> None:
        """Keep the messages in the mailbox."""
        boxes, mailbox = self._boxes, self.mailbox
        for base, mask, row in self.rows:
            boxes.stay(mailbox, row, mask)
            if self._retry_ms:
                at_ms = boxes.now_ms + self._retry_ms
                boxes.expiries.set((mailbox.number, base), at_ms)


def done_of(rows: Iterable[Leaver]) -> list[tuple[int, bytes]]:
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
