"""What a step does to a mailbox: messages that come, and rows that leave.

Owns the effects of the parts that put mail and let it go. The rules: what a part needs is reserved
when it is taken and given back when it is refused; the first put of a mailbox creates it in the
same bundle. Source: docs/design.md (The core and its shell; Queues and the checkpoint).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from malamute_protocol.content import Content
from malamute_py.broker.log.steps import Effect, Part, Steps
from malamute_py.broker.mail.mailbox import CREATING, DRAFT, STANDING, Mailbox
from malamute_py.changelog.records import MailPut
from malamute_py.changelog.tables import MessageRow, rows_of

if TYPE_CHECKING:
    from malamute_py.broker.mail.mailboxes import Mailboxes


class _OfMailbox(Effect):
    # In quotes: compiled, an annotation is looked up where the class is made.
    boxes: "Mailboxes"  # noqa: UP037
    mailbox: Mailbox


class Putting(_OfMailbox):
    """One put on its way: what a step does to its mailbox."""

    put: MailPut
    created: bool = False

    def taken(self, part: Part) -> None:
        """Reserve room."""
        put = self.put
        self.boxes.reserve(self.mailbox, put.count, put.size)
        self._weigh(put.size)

    def _weigh(self, size: int) -> None:
        """Count bytes from when they are taken: those on their way are held as well."""
        put = self.put
        self.boxes.quotas.weigh(put.asked_by or put.sender, self.mailbox.resource, size)

    def based(self, part: Part) -> None:
        """Number the messages; the first put of a mailbox creates it in the same bundle."""
        self.put.base = part.base
        self.created = self.boxes.create_in(part, self.mailbox)

    def appended(self, part: Part, end_lsn: int) -> None:
        """Lay the messages into the mailbox."""
        boxes, mailbox, put = self.boxes, self.mailbox, self.put
        boxes.unreserve(mailbox, put.count, put.size)
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

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Give the room back."""
        mailbox, put = self.mailbox, self.put
        if self.created:
            self.created = False
            if mailbox.state == CREATING:
                # Else another bundle, which the journal took, has created it.
                mailbox.state = DRAFT
        self.boxes.unreserve(mailbox, put.count, put.size)
        self._weigh(-put.size)
        self.boxes.unused(mailbox)


Leaver = tuple[int, int, MessageRow]
"""Number of a put, rows of it, and its row in the tables."""


class Late(Effect):
    """A put into memory as a piece of a step that is logged: it has its number once that is."""

    steps: Steps
    content: Content

    def appended(self, part: Part, end_lsn: int) -> None:
        """Give the put its content back, and its number."""
        part.content = self.content
        part.base = self.steps.memory_number(self.content.head.count)
        for effect in part.effects:
            effect.based(part)


class Leaving(_OfMailbox):
    """Rows of one mailbox that are on their way out; readers do not get them any more."""

    rows: list[Leaver]

    def appended(self, part: Part, end_lsn: int) -> None:
        """Take the messages out of the mailbox."""
        left = self.boxes.left
        mailbox = self.mailbox
        for base, mask, row in self.rows:
            left(mailbox, base, mask, row)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Keep the messages in the mailbox."""
        for _, mask, row in self.rows:
            self.boxes.stay(self.mailbox, row, mask)


class Losing(Leaving):
    """Rows of one mailbox that leave because their bodies are nowhere."""

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Keep them, but not at once: they would be read, found lost and refused without end."""
        for _, mask, row in self.rows:
            self.boxes.postpone(self.mailbox, row, mask, self.boxes.much_later_ms)


class Reviving(Leaving):
    """Dead letters that become requests again."""

    def taken(self, part: Part) -> None:
        """Keep them from readers."""
        for _, mask, row in self.rows:
            self.boxes.leaving(self.mailbox, row, mask)


class Burying(_OfMailbox):
    """Requests that become dead letters of a mailbox."""

    rows: Sequence[tuple[int, int]]
    """Number of a put, and rows of it."""
    count: int
    size: int

    def taken(self, part: Part) -> None:
        """Reserve room."""
        self.boxes.reserve(self.mailbox, self.count, self.size)

    def appended(self, part: Part, end_lsn: int) -> None:
        """Lay them into the mailbox."""
        boxes, mailbox = self.boxes, self.mailbox
        boxes.unreserve(mailbox, self.count, self.size)
        if mailbox.state != STANDING:
            boxes.stands(mailbox)
        for base, mask in self.rows:
            boxes.arrived(mailbox, base, mask)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Give the room back."""
        self.boxes.unreserve(self.mailbox, self.count, self.size)
        self.boxes.unused(self.mailbox)


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
