"""Mail: the mailboxes, their readers and their administration, as the broker has them.

Owns how the three are put together and what the broker asks of them. Source: docs/design.md (Flow
control; Queues and the checkpoint); SPEC.md, section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from malamute_protocol.commands import AckMail, Command, Send
from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import Link, Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.bodies import Bodies
from malamute_py.broker.log.steps import Part, Steps
from malamute_py.broker.mail.administration import MailboxAdmin
from malamute_py.broker.mail.inboxes import Inboxes
from malamute_py.broker.mail.mailboxes import Mailboxes
from malamute_py.broker.mail.messages import Messages
from malamute_py.broker.mail.puts import Puts


class Mail:
    """All mailboxes of one core, and their readers."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        bodies: Bodies,
        answers: Answers,
    ) -> None:
        self.mailboxes = Mailboxes(shard, links, steps)
        self.messages = Messages(shard, steps, self.mailboxes, bodies)
        self.puts = Puts(shard, steps, self.messages)
        self.inboxes = Inboxes(shard, links, steps, self.messages)
        self.admin = MailboxAdmin(shard, links, steps, self.messages, answers)
        self._schedules: Final = (
            self.messages.delays, self.messages.expiries, self.mailboxes.endings
        )  # fmt: skip
        self._runnable: Final = (
            self.mailboxes.drafts, self.messages.runnable, self.inboxes.returning
        )  # fmt: skip
        self.queues: Final = (*self._runnable, self.mailboxes.ended, *self.admin.queues)
        """While all of them are empty, nothing can be done at once."""

    def prepares(self) -> dict[type[Command], Callable[[Link, Any, Any], Part]]:
        """What makes a part of a step of each command that is one."""
        return {Send: self.puts.prepare_send, AckMail: self.inboxes.prepare_ack}

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
        self.messages.recovered()

    # --- readers --------------------------------------------------------------------------------

    def in_memory(self, link: Link, number: int) -> bool:
        """Whether a number is an inbox's of that link whose mailbox is kept in memory only."""
        return self.inboxes.in_memory(link, number)

    def link_ended(self, link: Link) -> None:
        """A link is gone: its temporary mailbox ends, or waits for its session."""
        self.mailboxes.link_ended(link)

    # --- time and work --------------------------------------------------------------------------

    @property
    def hungry(self) -> bool:
        """Whether more can be done at once."""
        return any(self._runnable) or self.admin.hungry

    def deliver(self) -> None:
        """Do a bounded share of what can be done at once."""
        self.mailboxes.forget_drafts()
        self.admin.work()
        self.inboxes.deliver()

    def tick(self) -> None:
        """Time has passed."""
        self.messages.tick()
        self.mailboxes.end_kept()

    @property
    def due_ms(self) -> int | None:
        """When to be asked again at the latest."""
        due_ms: int | None = None
        for schedule in self._schedules:
            at_ms = schedule.due_ms
            if at_ms is not None and (due_ms is None or at_ms < due_ms):
                due_ms = at_ms
        return due_ms
