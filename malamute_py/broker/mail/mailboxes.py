"""Mailboxes: which there are, how first use creates them, how temporary ones end.

Owns the table of mailboxes, their numbers and drafts, and the room that all of them take together.
The rules: the bundle of the first step that needs a mailbox creates it; a mailbox that no step
created is forgotten; mail in memory has tables of its own, changed by the same `apply`. Source:
docs/design.md, Queues and the checkpoint; SPEC.md, section 4.8.

A draft is a mailbox that was made for a command and that no step has needed yet. A step is what
happens together in the log: one command alone, or those of an ATOMIC.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from itertools import chain, takewhile
from typing import Any, Final

from malamute_protocol.address import name_fault
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.ring import EPOCH_SHIFT
from malamute_py.broker.log.steps import Effect, Steps, Then
from malamute_py.broker.mail.mailbox import (
    DRAFT,
    STANDING,
    Mailbox,
    Temporary,
    temporary_name,
)
from malamute_py.broker.structures.sorted_values import Ordered, Schedule
from malamute_py.changelog.settings import MailboxSettings, queue_settings
from malamute_py.changelog.tables import MailboxRow, Queues


class Mailboxes:
    """All mailboxes of one core: what puts, reads or manages mail finds or makes them here."""

    def __init__(self, shard: Shard, links: Links, steps: Steps) -> None:
        self._shard = shard
        self._links = links
        self._steps = steps
        self._queues = shard.queues
        self._quotas = shard.quotas
        self.in_memory = Queues()
        """Tables of the mail that is in memory only."""
        self.by_name: dict[str, Mailbox] = {}
        self.by_number: dict[int, Mailbox] = {}
        self.names: Ordered[str] = Ordered()
        self.drafts: Final[dict[str, Mailbox]] = {}
        """Mailboxes that were made for a part of which no step has been taken."""
        self._next_number = 0
        self._default: MailboxSettings | None = None
        """The broker's default settings, checked when they are first wanted: a reload of the
        configuration leaves them as they are."""
        self.stored_bytes: Final = [0, 0]
        """Bytes of mail in the log, and in memory (by Mailbox.memory); mail on its way counts."""
        self.messages = 0
        self.ended: Final[deque[Mailbox]] = deque()
        """Temporary mailboxes that have ended and must be emptied in steps."""
        self.endings = Schedule()
        """Times at which temporary mailboxes whose link was lost end, by (number, 0): a Schedule
        has pairs, and the second one of these says nothing."""
        self.temporaries = 0

    # --- facts ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def gauges(self) -> dict[str, int]:
        """Counts for the metrics."""
        return {
            "mailboxes": len(self.by_name),
            "temporary_mailboxes": self.temporaries,
            "mail_messages": self.messages,
            "mail_bytes": sum(self.stored_bytes),
        }

    def get(self, name: str) -> Mailbox | None:
        """Return the mailbox of a name, also while it is being created."""
        return self.by_name.get(name)

    def names_after(self, prefix: str, after: str) -> Iterable[str]:
        """Yield names in order that begin with `prefix` and come after `after`, for listings."""
        # Ordered.after() leaves the name itself out: the prefix may be one.
        first = [prefix] if prefix > after else []
        names = chain(first, self.names.after(max(prefix, after)))
        return takewhile(lambda name: name.startswith(prefix), names)

    def letters_in(self, mailbox: str, default: str) -> dict[str, Any]:
        """Return facts about the dead letters of a service or group, by its mailbox for them.

        default: name of the one that gets what the mailbox refuses; they may be the same.
        """
        found = [self.by_name.get(name) for name in dict.fromkeys((mailbox, default))]
        places = {box.name: box.messages for box in found if box is not None and box.messages}
        return {"dead": sum(places.values()), "dead_letters": mailbox, "dead_in": places}

    def number(self) -> int:
        """Return a number for a new mailbox or service, which share them; none is given twice."""
        number = max(self._next_number, self._queues.next_number)
        self._next_number = number + 1
        return number

    # --- start ----------------------------------------------------------------------------------

    def recovered(self) -> None:
        """Load the mailboxes from the tables; called once, before any other method."""
        for row in self._queues.mailboxes.values():
            self._recover(row)

    def _recover(self, row: MailboxRow) -> None:
        """Make a mailbox of a row of the tables, at the start."""
        settings = row.settings
        rows = (self.in_memory if settings.memory else self._queues).messages
        mailbox = Mailbox(row.number, row.name, rows, settings, row.by, row.created_ms)
        mailbox.state = STANDING
        self._enlist(mailbox)

    def _enlist(self, mailbox: Mailbox) -> None:
        """Add a mailbox to the registry; its creator's quota counts it unless it is temporary."""
        self.by_name[mailbox.name] = mailbox
        self.by_number[mailbox.number] = mailbox
        self.names.add(mailbox.name)
        if not mailbox.temporary:
            self._quotas.add(mailbox.created_by, "mailboxes")

    # --- first use ------------------------------------------------------------------------------

    def use(self, name: str, by: str, wanted: MailboxSettings | None = None) -> Mailbox:
        """Return the mailbox of a name, or a draft that the first step with it creates.

        Called for each command that puts into or reads a mailbox. by: owner on whose quota a draft
        counts. wanted: settings of a draft; None: the broker's default.
        Raises BrokerRefused: a mailbox of this name may not be created, or is being removed.
        """
        mailbox = self.by_name.get(name)
        if mailbox is None and wanted is None:
            # A command of this turn may have made the draft and then been refused: its settings do
            # not bind a caller that asks for settings.
            mailbox = self.drafts.get(name)
        if mailbox is not None:
            if mailbox.removing:
                raise BrokerRefused("wait", f"mailbox '{name}' is being removed")
            return mailbox
        if name.startswith("~"):  # A temporary mailbox is made by its session alone.
            raise BrokerRefused("unknown_mailbox", f"mailbox '{name}' has ended")
        fault = name_fault(name)
        if fault:
            raise BrokerRefused("bad_name", fault)
        settings = self._shard.settings
        if not settings.auto_create:
            raise BrokerRefused("unknown_mailbox", f"there is no mailbox '{name}'")
        if wanted is not None:
            return self.draft(name, by, wanted)
        default = settings.default_of("mailbox", name)
        if default is not settings.default_mailbox:  # The name's namespace has its own.
            made = queue_settings(MailboxSettings, default, settings.settings_bytes_max, over=None)
            return self.draft(name, by, made)
        if self._default is None:  # The broker's default is checked once and shared by all.
            self._default = queue_settings(
                MailboxSettings, settings.default_mailbox, settings.settings_bytes_max, over=None
            )
        return self.draft(name, by, self._default)

    def check_creation(self, name: str, by: str) -> None:
        """Raise BrokerRefused where the use of a name would create a mailbox, and `by` may not.

        Called before `use` for what names a mailbox itself (a put, a reader, an EDIT_MAILBOX): the
        permission is create_mailbox.
        """
        if (
            name not in self.by_name
            and not name.startswith("~")
            and not self._shard.settings.permit(by, "create_mailbox", name)
        ):
            raise BrokerRefused("forbidden", f"you may not create mailbox '{name}'")

    def draft(self, name: str, by: str, settings: MailboxSettings) -> Mailbox:
        """Make a mailbox that no step has created; it is forgotten unless a step needs it.

        Raises BrokerRefused: the broker, or the owner `by`, has as many mailboxes as it may.
        """
        most = self._shard.settings.mailboxes_max
        # A draft of the same name is replaced, so it does not count.
        if len(self.by_name) + len(self.drafts) - (name in self.drafts) >= most:
            raise self._quotas.limit_told_to(by, "mailboxes", f"at most {most} mailboxes")
        if not name.startswith("~"):
            # Drafts that other owners' refused steps have left in this turn are not this one's.
            drafts = sum(draft.created_by == by for draft in self.drafts.values())
            self._quotas.check(by, "mailboxes", 1 + drafts)
        rows = (self.in_memory if settings.memory else self._queues).messages
        mailbox = Mailbox(self.number(), name, rows, settings, by, self._shard.now_ms)
        self.drafts[name] = mailbox
        return mailbox

    def forget_drafts(self) -> None:
        """Forget the mailboxes that no step has needed, as their commands were refused.

        Called in each turn of the broker.
        """
        self.drafts.clear()

    def need(self, mailbox: Mailbox) -> None:
        """Count a step that needs a mailbox, which is kept for it, and enlist a draft."""
        mailbox.pending += 1
        if mailbox.state == DRAFT and self.drafts.pop(mailbox.name, None) is not None:
            self._enlist(mailbox)

    def create(self, mailbox: Mailbox, *effects: Effect) -> None:
        """Propose the change that creates a mailbox, or gives it other settings.

        effects: work that is done when the log has the change, or has refused it.
        """
        self.need(mailbox)
        creating = Then(partial(self._created, mailbox), partial(self._not_created, mailbox))
        self._steps.propose(mailbox.creation(), creating, *effects)

    def _created(self, mailbox: Mailbox, _: int) -> None:
        """Note that the log has a mailbox, or its changed settings, as create() asked."""
        mailbox.pending -= 1
        self.note_standing(mailbox)

    def _not_created(self, mailbox: Mailbox, *_: Any) -> None:
        """Forget a mailbox whose creation the log refused, unless it is needed."""
        mailbox.pending -= 1
        self.forget_unused(mailbox)

    def forget_unused(self, mailbox: Mailbox) -> None:
        """Forget a mailbox that no step has created and that no reader or step needs any more."""
        if mailbox.state == DRAFT and not mailbox.pending and not mailbox.readers:
            self.forget(mailbox)

    def note_standing(self, mailbox: Mailbox) -> None:
        """Note that the log has a mailbox, whatever step created it; report that the first time."""
        if mailbox.state == STANDING:
            return
        mailbox.state = STANDING
        self._shard.counters["mailboxes_created"] += 1
        self._shard.event(
            "mailbox_created", mailbox=mailbox.name, number=mailbox.number, by=mailbox.created_by
        )

    def forget(self, mailbox: Mailbox) -> None:
        """Remove a mailbox that is empty, or that no step has created, from the table."""
        self._unname(mailbox)
        known = self.by_number.pop(mailbox.number, None)
        if known is not None and not mailbox.temporary:
            self._quotas.add(mailbox.created_by, "mailboxes", -1)

    def _unname(self, mailbox: Mailbox) -> None:
        """Take the name from a mailbox that ends, so that a new one may have the name."""
        if self.by_name.get(mailbox.name) is mailbox:
            del self.by_name[mailbox.name]
            self.names.discard(mailbox.name)

    # --- temporary mailboxes ----------------------------------------------------------------------

    def temporary(self, link: Link) -> str:
        """Return the name of a session's temporary mailbox, which is made when there is none.

        It takes replies, and mail for a client without an identity. It is in memory only, so it
        stands at once: no step has to create it.
        Raises BrokerRefused `limit`: the broker has as many mailboxes as it may.
        """
        name = temporary_name(link)
        if name not in self.by_name:
            settings = self._shard.settings
            mailbox = self.draft(
                name, link.owner,
                MailboxSettings(memory=True, max_bytes=settings.temporary_bytes_max),
            )  # fmt: skip
            del self.drafts[name]
            steps = self._steps
            mailbox.temporary = Temporary(link.session, steps.mail_next, steps.memory_next)
            mailbox.state = STANDING
            self._enlist(mailbox)
            self.temporaries += 1
            self._shard.counters["temporary_mailboxes_created"] += 1
        return name

    def answers_lost(self, name: str, base: int) -> bool:
        """Whether replies to a batch of requests may have been lost with an earlier mailbox.

        The requester's temporary mailbox `name` may have ended, with replies in it, and been made
        again since the batch `base` was put. Called when a sender repeats the batch, which is then
        told of the loss; True once for each batch in the life of the present mailbox.
        """
        mailbox = self.by_name.get(name)
        temporary = None if mailbox is None else mailbox.temporary
        if temporary is None or base in temporary.lost_reported:
            return False
        # The replies to requests that came after the mailbox was made are put into it. Numbers from
        # 1 << EPOCH_SHIFT on are those of requests in memory.
        in_memory = base >= 1 << EPOCH_SHIFT
        if base >= (temporary.memory_next if in_memory else temporary.logged_next):
            return False
        temporary.lost_reported.add(base)
        return True

    def link_ended(self, link: Link) -> None:
        """End the temporary mailbox of a link after BYE; keep that of a lost link for a while.

        It is kept for the session, which may come back on another link: whether it has shows only
        when the time is over (end_kept).
        """
        if not link.session:  # no HELLO was accepted on the link
            return
        mailbox = self.by_name.get(temporary_name(link))
        if mailbox is None or mailbox.temporary is None:
            return
        if link.happened == "bye":
            self._end(mailbox)
        else:
            at_ms = self._shard.now_ms + link.expiry_ms
            self.endings.set((mailbox.number, 0), at_ms)  # 0: see `endings`

    def _end(self, mailbox: Mailbox) -> None:
        """End a temporary mailbox: it takes no message, and its messages are removed in pieces."""
        mailbox.removing = True
        self.endings.drop((mailbox.number, 0))
        self._unname(mailbox)
        self.temporaries -= 1
        self.ended.append(mailbox)

    def end_kept(self) -> None:
        """End the temporary mailboxes whose sessions did not come back in time."""
        now_ms = self._shard.now_ms
        while (due := self.endings.pop_due(now_ms)) is not None:
            number, _ = due
            mailbox = self.by_number[number]
            assert mailbox.temporary is not None
            if self._links.session(mailbox.temporary.session) is None:
                self._end(mailbox)

    # --- room -----------------------------------------------------------------------------------

    def reserve(self, mailbox: Mailbox, count: int, size: int) -> None:
        """Reserve room for a put of a step that was taken, until the log answers.

        Else steps of one turn could each find the same room.
        """
        self.need(mailbox)
        mailbox.coming += count
        mailbox.coming_bytes += size
        self.stored_bytes[mailbox.memory] += size

    def unreserve(self, mailbox: Mailbox, count: int, size: int) -> None:
        """Give back the room of a put that was refused, or is counted as stored from now on."""
        mailbox.pending -= 1
        mailbox.coming -= count
        mailbox.coming_bytes -= size
        self.stored_bytes[mailbox.memory] -= size
