"""Administration of mailboxes: their facts, pages of them, settings, purge and removal.

Owns the commands about mailboxes that a RESULT answers. The rules: a list is bounded and paged; a
purge or a removal goes over the mailbox in bounded pieces, each a step of its own, and is answered
when the last is durable; a message that a reader holds is never taken from it. Source: SPEC.md,
section 4.4; docs/design.md, Safety.

A put is the messages of one batch in one mailbox: one row of the tables, under the number of its
first message. Its messages are its rows, and a set of them is a mask (a bitmap).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec

from malamute_protocol.commands import (
    Command,
    EditMailbox,
    MailboxInfo,
    PeekMail,
    PurgeMail,
    RemoveMailbox,
)
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answer, Answers
from malamute_py.broker.log.pages import Pages
from malamute_py.broker.log.steps import Steps, Then
from malamute_py.broker.mail.mailbox import STANDING, Mailbox, temporary_name
from malamute_py.broker.mail.messages import Leaving, Messages, RowsOfPut, done_of
from malamute_py.broker.mail.peeking import Peeking
from malamute_py.broker.structures.fair_queue import FairQueue
from malamute_py.changelog.records import MailboxRemoved, MailDone
from malamute_py.changelog.settings import MailboxSettings, queue_settings

PIECE_PUTS: Final = 2_048
"""Puts that one step removes from a mailbox that is being emptied, at most."""
PIECE_ROWS: Final = 8 << 20
"""Rows of these puts, about: the log names each row by a bit, and a step has 8 MiB."""
TOLD_TO: Final = ("receive", "purge", "manage_queues")
"""Actions of which each gives the facts of a mailbox."""


class Emptying(msgspec.Struct, eq=False):
    """A mailbox that is being emptied, piece by piece."""

    mailbox: Mailbox
    upto: int | None = None
    """Number after which nothing is removed; None: the mailbox is emptied whole."""
    answer: Answer | None = None
    """None: the mailbox is temporary and has ended."""
    at: int = -1
    """Number of the last put that was looked at; -1: none, the walk begins at the first put."""
    count: int = 0
    """Messages removed so far."""
    end_lsn: int = 0
    """Where ring main has the last piece: the answer waits until that is durable."""

    @property
    def why(self) -> str:
        """Reason for the removal of the messages, as the log has it."""
        return "removed" if self.answer is None else "purged"


class MailboxAdmin:
    """Handlers of the commands about mailboxes that a RESULT answers.

    What takes long is done in pieces: the handler queues it, and `work` goes on with it each turn.
    """

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        messages: Messages,
        answers: Answers,
        pages: Pages,
    ) -> None:
        self._shard = shard
        self._links = links
        self._steps = steps
        self._messages = messages
        self._mailboxes = messages.mailboxes
        self._bodies = messages.bodies
        self._answers = answers
        self._pages = pages
        self._jobs: Final[deque[Emptying]] = deque()
        self._peeks: Final[FairQueue[Link, Peeking]] = FairQueue()
        """PEEK_MAILs that wait, by link."""
        self._peeking = False
        """Whether a PEEK_MAIL is under way."""
        self._described: Final[deque[Peeking]] = deque()
        """The PEEK_MAIL under way, once its bodies have come."""
        self.queues: Final = (self._jobs, self._peeks.waiting, self._described)
        """Queues that are all empty while the administration has nothing to do."""

    def handlers(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """Handlers of the commands, by which the broker calls them."""
        return {
            PeekMail: self.peek,
            PurgeMail: self.purge,
            MailboxInfo: self.info,
            EditMailbox: self.edit,
            RemoveMailbox: self.remove,
        }

    # --- answering ------------------------------------------------------------------------------

    def _allowed(self, link: Link, action: str, name: str) -> bool:
        """Whether a link may do this to a mailbox; it may always receive from its own."""
        if action == "receive" and (link.owns(name) or name == temporary_name(link)):
            return True
        return self._shard.settings.permit(link.owner, action, name)

    def _action_for_facts(self, link: Link, name: str) -> str:
        """Return an action that a link is allowed and that gives it the facts of a mailbox.

        `receive` if it is allowed none: the check of that action then refuses the command.
        """
        return next((each for each in TOLD_TO if self._allowed(link, each, name)), "receive")

    def _mailbox(self, link: Link, command: Any, action: str) -> Mailbox:
        """Return the mailbox of a command.

        Raises BrokerRefused: the link may not do this (`action`), or there is no such mailbox.
        """
        name = command.mailbox
        if not self._allowed(link, action, name):
            did = "read" if action == "receive" else action.partition("_")[0]
            raise BrokerRefused("forbidden", f"you may not {did} mailbox '{name}'")
        mailbox = self._mailboxes.get(name)
        if mailbox is None or mailbox.state != STANDING:
            raise BrokerRefused("unknown_mailbox", f"there is no mailbox '{name}'")
        return mailbox

    # --- facts ----------------------------------------------------------------------------------

    def info(self, link: Link, command: MailboxInfo) -> None:
        """Answer with the facts about one mailbox, or (`PREFIX*`) with a page of mailboxes.

        Raises BrokerRefused.
        """
        if not command.mailbox.endswith("*"):
            mailbox = self._mailbox(link, command, self._action_for_facts(link, command.mailbox))
            self._answers.result(link, command, self.facts(mailbox))
            return
        prefix = command.mailbox[:-1]
        self._pages.begin(
            link, command, "entries", command.after,
            partial(self._mailboxes.names_after, prefix), partial(self._listed, link, prefix),
        )  # fmt: skip

    def _listed(self, link: Link, prefix: str, name: str) -> dict[str, Any] | None:
        """Return what a page of MAILBOX_INFO tells a link of a mailbox; None: nothing.

        A page has mailboxes that the log has, also such as are being emptied or removed. Temporary
        ones, which stand without the log, are told of where the prefix asks for them by `~`.
        """
        mailbox = self._mailboxes.get(name)
        if mailbox is None or mailbox.state != STANDING:
            return None
        if mailbox.temporary and not prefix.startswith("~"):
            return None
        told = any(self._allowed(link, each, name) for each in TOLD_TO)
        return self.facts(mailbox) if told else None

    def facts(self, mailbox: Mailbox) -> dict[str, Any]:
        """Return the facts about a mailbox that a RESULT has."""
        settings = mailbox.settings
        # What is still read back from the disk is in no reader's hand: a client that waits for the
        # mailbox to have nothing left for it counts on that. (`pipe`: hand-outs without bodies.)
        coming = sum(each.mask.bit_count() for inbox in mailbox.readers for each in inbox.pipe)
        return {
            "name": mailbox.name,
            "number": mailbox.number,
            "messages": mailbox.messages,
            "bytes": mailbox.bytes,
            "oldest_ms": mailbox.oldest_ms(),
            "readers": len(mailbox.readers),
            "held": mailbox.held - coming,
            "delayed": mailbox.delayed,
            "memory": mailbox.memory,
            "temporary": mailbox.temporary is not None,
            "settings": {name: getattr(settings, name) for name in settings.__struct_fields__},
            "created_ms": mailbox.created_ms,
            "by": mailbox.created_by,
        }

    # --- settings -------------------------------------------------------------------------------

    def edit(self, link: Link, command: EditMailbox) -> None:
        """Create a mailbox or change its settings, for an EDIT_MAILBOX; answered when durable.

        Raises BrokerRefused: the link lacks the permission manage_queues or, for a mailbox that
        there is not, create_mailbox, too (check_creation); a mailbox cannot have the settings; or
        there are as many mailboxes as there may be (`use`, whose draft is forgotten unless a step
        needs it).
        """
        name = command.mailbox
        settings = self._shard.settings
        if not settings.permit(link.owner, "manage_queues", name):
            raise BrokerRefused("forbidden", f"you may not manage mailbox '{name}'")
        mailbox = self._mailboxes.get(name)
        defaults = settings.default_of("mailbox", name)
        if mailbox is not None and mailbox.temporary:
            raise BrokerRefused("bad_name", "a temporary mailbox has no settings")
        wanted = queue_settings(
            MailboxSettings,
            command.settings if mailbox else {**defaults, **command.settings},
            settings.settings_bytes_max,
            over=mailbox.settings if mailbox is not None else None,
            defaults=defaults if command.replace else None,
        )
        if mailbox is None:
            self._mailboxes.check_creation(name, link.owner)
            mailbox = self._mailboxes.use(name, link.owner, wanted)
        elif mailbox.removing:
            raise BrokerRefused("wait", f"mailbox '{name}' is being removed")
        elif wanted.memory != mailbox.settings.memory:
            raise BrokerRefused(
                "bad_setting", "memory cannot be changed: messages lie where they lie"
            )
        # Before the log has them: another step on its way may create the mailbox, and must create
        # it with the same settings. `_not_edited` takes them back.
        mailbox.apply_settings(wanted)
        answer = Answer(self._answers, link, command, partial(self.facts, mailbox))
        edited = partial(self._edited, mailbox, link.identity)
        editing = Then(edited, partial(self._not_edited, mailbox, wanted))
        self._mailboxes.create(mailbox, editing, answer)

    def _edited(self, mailbox: Mailbox, by: str, _: int) -> None:
        """Report changed settings, which the log has now."""
        self._shard.event("mailbox_edited", mailbox=mailbox.name, by=by)

    def _not_edited(self, mailbox: Mailbox, wanted: MailboxSettings, *_: Any) -> None:
        """Go back to the settings that the tables have, since the log refused the wanted ones."""
        kept = self._shard.queues.mailboxes.get(mailbox.number)
        if kept is not None and mailbox.settings is wanted:
            # By the log: the settings before these may have been refused as well.
            mailbox.apply_settings(kept.settings)

    # --- emptying -------------------------------------------------------------------------------

    def purge(self, link: Link, command: PurgeMail) -> None:
        """Remove all messages that no reader holds, for a PURGE_MAIL; answered when durable.

        Messages that come later than the command stay.
        """
        mailbox = self._mailbox(link, command, "purge")
        _check_repeats_name(command)
        self._links.count_query(link)
        upto = mailbox.order.last if mailbox.order else -1
        self._jobs.append(Emptying(mailbox, upto, Answer(self._answers, link, command)))

    def _purged(self, job: Emptying, answer: Answer) -> None:
        """Answer a PURGE_MAIL whose last piece is in the log, once that is durable."""
        link, mailbox = answer.link, job.mailbox
        link.queries -= 1
        self._shard.counters["mail_purged"] += job.count
        self._shard.event("mailbox_purged", mailbox=mailbox.name, count=job.count, by=link.identity)
        answer.value = partial(dict, count=job.count, held=mailbox.held)
        answer.after(job.end_lsn)

    def remove(self, link: Link, command: RemoveMailbox) -> None:
        """Begin to remove a mailbox that has no readers, with its messages, for a REMOVE_MAILBOX.

        From now on the mailbox takes no message; `work` empties it piece by piece. Raises
        BrokerRefused.
        """
        mailbox = self._mailbox(link, command, "manage_queues")
        _check_repeats_name(command)
        name = mailbox.name
        if mailbox.readers:
            raise BrokerRefused("in_use", f"mailbox '{name}' has {len(mailbox.readers)} readers")
        if mailbox.removing:
            raise BrokerRefused("wait", f"mailbox '{name}' is being removed")
        if mailbox.temporary:
            raise BrokerRefused("bad_name", "a temporary mailbox ends with its session")
        mailbox.removing = True
        answer = Answer(self._answers, link, command)
        self._jobs.append(Emptying(mailbox, upto=None, answer=answer))

    def _removed(self, job: Emptying, answer: Answer, lsn: int) -> None:
        """Forget a mailbox whose removal is in the log, and answer the REMOVE_MAILBOX."""
        mailbox = job.mailbox
        self._mailboxes.forget(mailbox)
        self._shard.counters["mailboxes_removed"] += 1
        self._shard.event(
            "mailbox_removed", mailbox=mailbox.name, number=mailbox.number, count=job.count,
            by=answer.link.identity,
        )  # fmt: skip
        answer.value = partial(dict, count=job.count)
        answer.after(lsn)

    def _ended(self, job: Emptying) -> None:
        """Forget a temporary mailbox that has ended, and count its unread messages."""
        self._mailboxes.forget(job.mailbox)
        self._shard.counters["temporary_mailboxes_ended"] += 1
        self._shard.counters["mail_unread"] += job.count

    def _done(self, job: Emptying) -> None:
        """Finish a job that finds nothing more to remove.

        A temporary mailbox, which has no answer, is forgotten; a purge is answered; a removal goes
        into the log and is answered then.
        """
        answer = job.answer
        if answer is None:
            self._ended(job)
        elif job.upto is not None:
            self._purged(job, answer)
        else:
            change = MailboxRemoved(job.mailbox.number, self._shard.now_ms)
            removed = partial(self._removed, job, answer), partial(self._not_emptied, job, answer)
            self._steps.propose(change, Then(*removed))

    def _not_emptied(self, job: Emptying, answer: Answer, *why: Any) -> None:
        """Answer a purge or removal that the log refused. why: code, reason and time to wait."""
        if job.upto is None:  # A removal.
            job.mailbox.removing = False
        else:
            answer.link.queries -= 1  # PURGE_MAIL counted itself.
        answer.refuse(*why)

    def _piece_removed(self, job: Emptying, lsn: int) -> None:
        """Go on with a job, since the log has the removal of its piece."""
        job.end_lsn = lsn
        self._jobs.appendleft(job)

    def _piece_refused(self, job: Emptying, *why: Any) -> None:
        """End a job, since the log refused the removal of its piece."""
        assert job.answer is not None, "what is in memory only is not refused"
        self._not_emptied(job, job.answer, *why)

    @property
    def runnable(self) -> bool:
        """Whether `work` has something to do."""
        return (
            bool(self._jobs)
            or bool(self._mailboxes.ended)
            or bool(self._described)
            or (bool(self._peeks.waiting) and not self._peeking)
        )

    def work(self) -> None:
        """Begin a PEEK_MAIL or go on with it, and empty a mailbox by a piece.

        Called once a turn of the broker, so that long commands share it with all else.
        """
        if self._peeks and not self._peeking:
            self._peek_once()
        if self._described:
            self._describe(self._described[0])
        jobs, ended = self._jobs, self._mailboxes.ended
        while ended:  # Temporary mailboxes whose session has ended: emptied without an answer.
            jobs.append(Emptying(ended.popleft()))
        if jobs:
            self._empty(jobs.popleft())

    def _empty(self, job: Emptying) -> None:
        """Remove one piece of a mailbox; the next follows when the log has this one."""
        mailbox, before = job.mailbox, job.at
        rows = self._piece(job)
        if not rows and job.at != before:
            self._jobs.append(job)  # Readers hold all of the piece; the next one has its turn.
            return
        if not rows:
            whole = job.upto is None
            if whole and (mailbox.order or mailbox.pending or mailbox.returning):
                # The mailbox is not empty yet: a reader that ended still holds messages, or a step
                # that was taken before the removal puts some. The job looks again from the
                # beginning after other jobs have had their turn.
                job.at = -1
                self._jobs.append(job)
            else:
                self._done(job)
            return
        for _, mask, row in rows:
            self._messages.leaving(mailbox, row, mask)
            job.count += mask.bit_count()
        change = MailDone(mailbox.number, done_of(rows), job.why)
        leaving = Leaving(self._messages, mailbox, rows)
        go_on = Then(partial(self._piece_removed, job), partial(self._piece_refused, job))
        self._steps.take([self._messages.part(mailbox, change, leaving, go_on)])

    def _piece(self, job: Emptying) -> list[RowsOfPut]:
        """Return rows of the next puts that no reader holds; the job goes on after these puts.

        A piece has PIECE_PUTS puts at most, and ends with the first that makes it more than
        PIECE_ROWS rows. Each element is (number of the put, its rows as a mask, its row in the
        tables).
        """
        mailbox = job.mailbox
        rows: list[RowsOfPut] = []
        table, number, progress = mailbox.rows, mailbox.number, mailbox.progress
        named = 0  # rows that the change in the log names, each by a bit
        for base in islice(mailbox.order.after(job.at), PIECE_PUTS):
            if (job.upto is not None and base > job.upto) or named > PIECE_ROWS:
                break
            job.at = base
            row = table[number, base]
            named += row.count
            known = progress.get(base)  # None: no row of the put was handed out.
            mask = row.left if known is None else row.left & ~known.held
            if mask:
                rows.append((base, mask, row))
        return rows

    # --- looking into one -----------------------------------------------------------------------

    def peek(self, link: Link, command: PeekMail) -> None:
        """Queue a PEEK_MAIL, which describes messages; answered when their bodies were read."""
        mailbox = self._mailbox(link, command, "receive")
        if mailbox.temporary and mailbox.name != temporary_name(link):
            raise BrokerRefused("forbidden", "a temporary mailbox is its session's own")
        self._links.count_query(link)  # One more command of the link that is not answered yet.
        peeking = Peeking(
            self._shard, self._links, self._bodies, self._answers, link, command, mailbox,
            self._described.append,
        )  # fmt: skip
        self._peeks.add(link, peeking)

    def _describe(self, peeking: Peeking) -> None:
        """Go on with the answer of the PEEK_MAIL under way; then the next one may begin.

        An error ends the link that asked.
        """
        goes_on = False
        try:
            goes_on = peeking.go_on()
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            peeking.link.queries -= 1
            self._links.fail(peeking.link, "PEEK_MAIL", error)
        finally:
            if not goes_on:
                self._described.popleft()
                self._peeking = False

    def _peek_once(self) -> None:
        """Begin one PEEK_MAIL; each link has its turn, and one is under way at a time.

        A PEEK_MAIL reads up to peek_bytes_max and takes bodies apart: all of them at once would
        stop the loop and hold so many bytes each.
        """
        peeking = self._peeks.take()
        self._peeking = True
        try:
            peeking.begin()
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._peeking = False
            self._links.fail(peeking.link, "PEEK_MAIL", error)


def _check_repeats_name(command: PurgeMail | RemoveMailbox) -> None:
    """Raise BrokerRefused unless a command repeats the name of its mailbox."""
    if command.confirm != command.mailbox:
        raise BrokerRefused(
            "bad_name",
            f"confirm repeats the name: '{command.mailbox}' is not '{command.confirm}'",
        )
