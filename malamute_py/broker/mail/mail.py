"""Mail: the parts of this room put together, as the broker uses them.

Owns the order in which the parts are made and in which they work. Source: docs/design.md (Flow
control; Queues and the checkpoint); SPEC.md, section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from malamute_protocol.commands import AckMail, Command, Send
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.bodies import Bodies
from malamute_py.broker.log.pages import Pages
from malamute_py.broker.log.steps import Part, Steps
from malamute_py.broker.mail.administration import MailboxAdmin
from malamute_py.broker.mail.inboxes import Inboxes
from malamute_py.broker.mail.mailboxes import Mailboxes
from malamute_py.broker.mail.messages import Messages
from malamute_py.broker.mail.puts import Puts


class Mail:
    """The mail of one core, as the broker calls it: it passes each call on to the part for it."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        bodies: Bodies,
        answers: Answers,
        pages: Pages,
    ) -> None:
        self.mailboxes = Mailboxes(shard, links, steps)
        self.messages = Messages(shard, steps, self.mailboxes, bodies)
        self.puts = Puts(shard, steps, self.messages)
        self.inboxes = Inboxes(shard, links, steps, self.messages)
        self.admin = MailboxAdmin(shard, links, steps, self.messages, answers, pages)
        self._schedules: Final = (
            self.messages.delays, self.messages.expiries, self.mailboxes.endings
        )  # fmt: skip
        """Timers: `tick` does what is due by them."""
        self._runnable: Final = (
            self.mailboxes.drafts, self.messages.runnable, self.inboxes.returning
        )  # fmt: skip
        """Queues of work that `deliver` does."""
        self.queues: Final = (*self._runnable, self.mailboxes.ended, *self.admin.queues)
        """Queues that are all empty while mail has nothing to do at once."""

    def prepares(self) -> dict[type[Command], Callable[[Link, Any, Any], Part]]:
        """Methods that each turn a command into a part of a step, by the class of the command."""
        return {Send: self.puts.prepare_send, AckMail: self.inboxes.prepare_ack}

    def handlers(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """Handlers of the commands that are no parts of steps."""
        return {**self.inboxes.handlers(), **self.admin.handlers()}

    @property
    def gauges(self) -> dict[str, int]:
        """Counts for the metrics."""
        return {**self.mailboxes.gauges, **self.inboxes.gauges}

    def recovered(self) -> None:
        """Load the mailboxes and their messages from the tables; called once, before all else."""
        self.mailboxes.recovered()
        self.messages.recovered()

    # --- readers --------------------------------------------------------------------------------

    def in_memory(self, link: Link, number: int) -> bool:
        """Whether a link has an inbox under a number, of a mailbox in memory: see Inboxes."""
        return self.inboxes.in_memory(link, number)

    def link_ended(self, link: Link) -> None:
        """End the temporary mailbox of a link that has ended, or keep it for its session."""
        self.mailboxes.link_ended(link)

    # --- time and work --------------------------------------------------------------------------

    @property
    def runnable(self) -> bool:
        """Whether `deliver` has something to do."""
        return any(self.queues) and (any(self._runnable) or self.admin.runnable)

    def deliver(self) -> None:
        """Do a bounded share of the work that waits for nothing; called once a turn of the broker.

        Drafts go first: the commands that made them have needed them by now, or were refused.
        """
        self.mailboxes.forget_drafts()
        self.admin.work()
        self.inboxes.deliver()

    def tick(self) -> None:
        """End delays, messages and temporary mailboxes that are due; called from due_ms on."""
        self.messages.tick()
        self.mailboxes.end_kept()

    @property
    def due_ms(self) -> int | None:
        """Time at which `tick` has something to do; None: no timer is set."""
        due_ms: int | None = None
        for schedule in self._schedules:
            at_ms = schedule.due_ms
            if at_ms is not None and (due_ms is None or at_ms < due_ms):
                due_ms = at_ms
        return due_ms
