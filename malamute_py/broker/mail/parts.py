"""Effects on a mailbox of the parts of a step by which messages come.

Owns the effects of puts, of requests that become dead letters, and of dead letters that become
requests again. The rules: a part reserves room when it is taken and gives the room back when it is
refused; the first put of a mailbox creates it in the same bundle. Source: docs/design.md (The core
and its shell; Queues and the checkpoint).

A put is the messages of one batch in one mailbox: one row of the tables (MessageRow), under the
number of its first message (`base`). Its messages are its rows, and a set of them is a mask: an
integer whose lowest bit is the first row.

An effect is called at four moments of its part: when it is taken into a step, when it has its
number (`based`), and when the log has it (`appended`) or refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence

from malamute_protocol.content import Content
from malamute_py.broker.log.steps import NO_TABLES, Effect, Part, Steps
from malamute_py.broker.mail.mailbox import CREATING, DRAFT, STANDING, Mailbox
from malamute_py.broker.mail.messages import Leaving, Messages
from malamute_py.changelog.applying import apply
from malamute_py.changelog.records import MailPut


class _OfMailbox(Effect):
    messages: Messages
    mailbox: Mailbox


class Putting(_OfMailbox):
    """One put on its way into a mailbox."""

    put: MailPut
    weighed_later: int = 0
    """Rows that are messages, whose bytes count for the sender once they are in the mailbox; 0: all
    rows are messages, and their bytes count from the time at which the put is taken."""
    creates: bool = False
    """Whether the part creates the mailbox."""

    def taken(self, part: Part) -> None:
        """Reserve room in the mailbox, and count the bytes for the sender.

        `arrived` counts those of a group's dead letters instead, for its creator.
        """
        put = self.put
        self.messages.mailboxes.reserve(self.mailbox, put.count, put.size)
        if not self.weighed_later:
            self._weigh(put.size)

    def _weigh(self, size: int) -> None:
        """Count bytes for the sender (below 0: no more), unless the put is `weighed_later`.

        The quota that they count towards is named by `mailbox.resource`.
        """
        put = self.put
        self.messages.quotas.weigh(put.asked_by or put.sender, self.mailbox.resource, size)

    def based(self, part: Part) -> None:
        """Give the put its number; the first put of a mailbox creates it in the same bundle."""
        mailbox = self.mailbox
        self.put.base = part.base
        # Decided only now: a bundle that is refused leaves the creation to the next one.
        if mailbox.state == DRAFT:
            mailbox.state = CREATING
            self.creates = True
            part.changes.insert(0, mailbox.creation())

    def appended(self, part: Part, end_lsn: int) -> None:
        """Add the messages to the mailbox, and their batch to the bodies in memory."""
        messages, mailbox, put = self.messages, self.mailbox, self.put
        mailboxes = messages.mailboxes
        mailboxes.unreserve(mailbox, put.count, put.size)  # `arrived` counts them as stored.
        base = put.base
        assert part.content is not None
        if mailbox.memory:
            # No log has the change: it is applied here, to the tables in memory.
            apply(NO_TABLES, mailboxes.in_memory, put)
            messages.bodies.hold(base, stamp=None, frame=part.frame, content=part.content)
        else:
            if mailbox.state != STANDING:
                mailboxes.note_standing(mailbox)
            messages.bodies.keep(base, part.stamp, part.frame, part.content)
        messages.arrived(mailbox, base, self.weighed_later)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Give the room back."""
        mailbox, put = self.mailbox, self.put
        if self.creates and mailbox.state == CREATING:
            # Otherwise another bundle, which the journal accepted, has created it.
            mailbox.state = DRAFT
        self.messages.mailboxes.unreserve(mailbox, put.count, put.size)
        if not self.weighed_later:
            self._weigh(-put.size)
        self.messages.mailboxes.forget_unused(mailbox)


class DeferredPut(Effect):
    """Numbers a put into memory when the step that it belongs to is in the log.

    It is the first effect of its part: the put itself follows it, and finds content and number.
    """

    steps: Steps
    content: Content

    def appended(self, part: Part, end_lsn: int) -> None:
        """Restore the content of the put, and number it: the effects after this one put it."""
        part.content = self.content
        part.base = self.steps.memory_number(self.content.head.count)
        for effect in part.effects:
            effect.based(part)


class Reviving(Leaving):
    """Dead letters that are tried again: they become requests, or records of their group wait."""

    def taken(self, part: Part) -> None:
        """Keep the dead letters from readers until the log answers."""
        for _, mask, row in self.rows:
            self.messages.leaving(self.mailbox, row, mask)


class Burying(_OfMailbox):
    """Requests that become dead letters of a mailbox."""

    rows: Sequence[tuple[int, int]]
    """(number of a put, its rows as a mask)"""
    count: int
    size: int

    def taken(self, part: Part) -> None:
        """Reserve room."""
        self.messages.mailboxes.reserve(self.mailbox, self.count, self.size)

    def appended(self, part: Part, end_lsn: int) -> None:
        """Add the dead letters to the mailbox, where the tables have them now."""
        messages, mailbox = self.messages, self.mailbox
        mailboxes = messages.mailboxes
        mailboxes.unreserve(mailbox, self.count, self.size)
        mailboxes.note_standing(mailbox)
        for base, mask in self.rows:
            if mailbox.order.floor(base) != base:
                # The first rows that the mailbox gets of the batch; the service may keep others.
                messages.bodies.share(base)
            messages.arrived(mailbox, base, mask)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Give the room back."""
        self.messages.mailboxes.unreserve(self.mailbox, self.count, self.size)
        self.messages.mailboxes.forget_unused(self.mailbox)
