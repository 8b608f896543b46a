"""What a step does to a mailbox: messages that come, and rows that leave.

Owns the effects of the parts that put mail and let it go. The rules: what a part needs is reserved
when it is taken and given back when it is refused; the first put of a mailbox creates it in the
same bundle. Source: docs/design.md (The core and its shell; Queues and the checkpoint).
"""

from __future__ import annotations

from collections.abc import Sequence

from malamute_protocol.content import Content
from malamute_py.broker.log.steps import NO_TABLES, Effect, Part, Steps
from malamute_py.broker.mail.mailbox import CREATING, DRAFT, STANDING, Mailbox
from malamute_py.broker.mail.messages import Leaving, Messages
from malamute_py.changelog.records import MailPut
from malamute_py.changelog.tables import apply


class _OfMailbox(Effect):
    messages: Messages
    mailbox: Mailbox


class Putting(_OfMailbox):
    """One put on its way: what a step does to its mailbox."""

    put: MailPut
    creates: bool = False
    """Whether the part creates the mailbox."""

    def taken(self, part: Part) -> None:
        """Reserve room."""
        put = self.put
        self.messages.mailboxes.reserve(self.mailbox, put.count, put.size)
        self._weigh(put.size)

    def _weigh(self, size: int) -> None:
        """Count bytes from when they are taken: those on their way are held as well."""
        put = self.put
        self.messages.quotas.weigh(put.asked_by or put.sender, self.mailbox.resource, size)

    def based(self, part: Part) -> None:
        """Number the messages; the first put of a mailbox creates it in the same bundle."""
        mailbox = self.mailbox
        self.put.base = part.base
        # Decided only now: a bundle that is refused leaves the creation to the next one.
        if mailbox.state == DRAFT:
            mailbox.state = CREATING
            self.creates = True
            part.changes.insert(0, mailbox.creation())

    def appended(self, part: Part, end_lsn: int) -> None:
        """Lay the messages into the mailbox."""
        messages, mailbox, put = self.messages, self.mailbox, self.put
        mailboxes = messages.mailboxes
        mailboxes.unreserve(mailbox, put.count, put.size)
        base = put.base
        assert part.content is not None
        if mailbox.memory:
            apply(NO_TABLES, mailboxes.in_memory, put)
            messages.bodies.hold(base, None, part.frame, part.content)
        else:
            if mailbox.state != STANDING:
                mailboxes.stands(mailbox)
            messages.bodies.keep(base, part.stamp, part.frame, part.content)
        messages.arrived(mailbox, base, 0)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Give the room back."""
        mailbox, put = self.mailbox, self.put
        if self.creates and mailbox.state == CREATING:
            # Otherwise another bundle, which the journal accepted, has created it.
            mailbox.state = DRAFT
        self.messages.mailboxes.unreserve(mailbox, put.count, put.size)
        self._weigh(-put.size)
        self.messages.mailboxes.unused(mailbox)


class DeferredPut(Effect):
    """A put into memory as a piece of a step that is logged: it has its number once that is."""

    steps: Steps
    content: Content

    def appended(self, part: Part, end_lsn: int) -> None:
        """Give the put its content back, and its number."""
        part.content = self.content
        part.base = self.steps.memory_number(self.content.head.count)
        for effect in part.effects:
            effect.based(part)


class Reviving(Leaving):
    """Dead letters that become requests again."""

    def taken(self, part: Part) -> None:
        """Keep them from readers."""
        for _, mask, row in self.rows:
            self.messages.leaving(self.mailbox, row, mask)


class Burying(_OfMailbox):
    """Requests that become dead letters of a mailbox."""

    rows: Sequence[tuple[int, int]]
    """Number of a put, and rows of it."""
    count: int
    size: int

    def taken(self, part: Part) -> None:
        """Reserve room."""
        self.messages.mailboxes.reserve(self.mailbox, self.count, self.size)

    def appended(self, part: Part, end_lsn: int) -> None:
        """Lay them into the mailbox."""
        messages, mailbox = self.messages, self.mailbox
        mailboxes = messages.mailboxes
        mailboxes.unreserve(mailbox, self.count, self.size)
        mailboxes.stands(mailbox)
        for base, mask in self.rows:
            messages.arrived(mailbox, base, mask)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Give the room back."""
        self.messages.mailboxes.unreserve(self.mailbox, self.count, self.size)
        self.messages.mailboxes.unused(self.mailbox)
