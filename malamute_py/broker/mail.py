"""Mail: the mailboxes, their readers and their administration, as the broker has them.

Owns how the three are put together and what the broker asks of them. Source: DESIGN.md,
sections 8 and 9; SPEC.md, section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from malamute_protocol.commands import AckMail, Command, Credit, Send, Unsubscribe
from malamute_py.broker.bodies import Bodies
from malamute_py.broker.inboxes import Inboxes
from malamute_py.broker.links import Link, Links
from malamute_py.broker.mailbox_admin import COMMANDS, MailboxAdmin, Settle
from malamute_py.broker.mailboxes import Mailboxes
from malamute_py.broker.shard import Shard
from malamute_py.broker.steps import Part, Steps

__all__ = ["COMMANDS", "Mail"]


class Mail:
    """All mailboxes of one core, and whoever reads them."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        bodies: Bodies,
        when_visible: Settle,
        in_use: Callable[[Link, int], bool],
    ) -> None:
        """in_use: whether a number is another subscription's of that link."""
        self.mailboxes = Mailboxes(shard, links, steps, bodies)
        self.inboxes = Inboxes(shard, links, steps, self.mailboxes, bodies, in_use)
        self.admin = MailboxAdmin(shard, links, steps, self.mailboxes, bodies, when_visible)
        self.queues: Final = (
            *self.mailboxes.queues, *self.inboxes.queues, *self.admin.queues
        )  # fmt: skip
        """While all of them are empty, nothing can be done at once."""

    def prepares(self) -> dict[type[Command], Callable[[Link, Any, Any], Part]]:
        """What makes a part of a step of each command that is one."""
        return {Send: self.mailboxes.prepare_send, AckMail: self.inboxes.prepare_ack}

    def handlers(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """What handles the commands that are no steps."""
        return {**self.inboxes.handlers(), **self.admin.handlers()}

    @property
    def gauges(self) -> dict[str, int]:
        """How much there is."""
        return {**self.mailboxes.gauges, **self.inboxes.gauges}

    def recovered(self) -> None:
        """Take up what the tables hold; to be called once, before anything else."""
        self.mailboxes.recovered()

    # --- readers --------------------------------------------------------------------------------

    def uses(self, link: Link, number: int) -> bool:
        """Whether a number is an inbox's of that link."""
        return self.inboxes.uses(link, number)

    def in_memory(self, link: Link, number: int) -> bool:
        """Whether a number is an inbox's of that link whose mailbox is kept in memory only."""
        return self.inboxes.in_memory(link, number)

    def credit(self, link: Link, command: Credit) -> bool:
        """Raise the credit of an inbox; False: it is none."""
        return self.inboxes.credit(link, command)

    def unsubscribe(self, link: Link, command: Unsubscribe) -> bool:
        """End an inbox; False: it is none."""
        return self.inboxes.unsubscribe(link, command)

    def feed(self, link: Link) -> None:
        """A link has room again."""
        self.inboxes.feed(link)

    def link_ended(self, link: Link) -> None:
        """Take back what a link's readers hold."""
        self.inboxes.link_ended(link)

    # --- time and work --------------------------------------------------------------------------

    @property
    def hungry(self) -> bool:
        """Whether more can be done at once."""
        return self.inboxes.hungry or self.admin.hungry or self.mailboxes.drafted

    def deliver(self) -> None:
        """Do a bounded share of what can be done at once."""
        self.mailboxes.forget_drafts()
        if self.admin.hungry:
            self.admin.work()
        if self.inboxes.hungry:
            self.inboxes.deliver()

    def tick(self) -> None:
        """Time has passed."""
        self.mailboxes.tick()

    @property
    def due_ms(self) -> int | None:
        """When to be asked again at the latest."""
        return self.mailboxes.due_ms
