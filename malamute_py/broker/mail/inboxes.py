"""Inboxes: the readers of mailboxes, delivery, and acknowledgement.

Owns OPEN_INBOX, MAIL and ACK_MAIL. The rules: a message has one reader at a time, and gets another
only when that reader has given it back or has ended; a reader gets messages in the order of the
mailbox, and messages that came back before newer ones; credit is exact, except that a reader with
nothing outstanding may always be given one message; one turn delivers a bounded number of puts.
Source: docs/design.md, Flow control; SPEC.md, sections 4.8 and 8.

A put is the messages of one batch in a mailbox, one MessageRow; its messages are its rows, and a
mask is a set of them. A hand-out is rows that a reader was given; it waits in the reader's `pipe`
for its bodies where they are on the disk. An effect is called when its part is taken into a step,
and when the log has the step (`appended`) or refuses it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from malamute_protocol.commands import AckMail, Command, Ended, Mail, OpenInbox, Subscribed
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.bodies import Body
from malamute_py.broker.log.steps import Effect, Part, Steps, Then
from malamute_py.broker.mail.mailbox import (
    NO_READERS,
    STANDING,
    Handout,
    Inbox,
    Mailbox,
    expired,
    temporary_name,
)
from malamute_py.broker.mail.messages import Messages, RowsOfPut, done_of
from malamute_py.broker.mail.telling import (
    ALWAYS_NAMED,
    about_of,
    named_rows,
    origin_of,
    same_why,
    why_of,
)
from malamute_py.broker.structures.bitmaps import bits_of_rows, lowest
from malamute_py.changelog.records import MailAgain, MailDone
from malamute_py.changelog.settings import MailboxSettings, queue_settings
from malamute_py.changelog.tables import MessageRow

OPEN_INBOX: Final = 41
"""Number of the command OPEN_INBOX, by which a refusal names it."""
TURN_PUTS: Final = 128
"""Puts that one mailbox delivers at most before another has its turn."""
STEP_PUTS: Final = 1_024
"""Puts that one call of `deliver` hands out, or frees after readers have ended, at most."""
RETURN_PUTS: Final = 512
"""Puts among these that are freed at most: other mailboxes do not wait for one lost link."""


class Inboxes:
    """The readers of all mailboxes of one core.

    The broker has `deliver` called in each turn; a reader's link calls `resume` and `end`.
    """

    def __init__(self, shard: Shard, links: Links, steps: Steps, messages: Messages) -> None:
        self._shard = shard
        self._links = links
        self._steps = steps
        self._messages = messages
        self._mailboxes = messages.mailboxes
        self._bodies = messages.bodies
        self.count = 0
        """Open inboxes."""
        self.returning: Final[deque[Inbox]] = deque()
        """Readers that have ended and still hold messages."""
        self._extract_bytes_min = shard.settings.extract_bytes_min
        self._extract_share = shard.settings.extract_share
        self._puts_max = shard.settings.inbox_puts_max
        """Batches of which one inbox may hold something."""

    @property
    def gauges(self) -> dict[str, int]:
        """Counts for the metrics."""
        return {"inboxes": self.count}

    def handlers(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """Handlers of the commands that are no parts of steps."""
        return {OpenInbox: self.open}

    def in_memory(self, link: Link, number: int) -> bool:
        """Whether a link's inbox of a number is in memory only.

        Its ACK_MAIL without a tracker may be taken after the requests that it came with.
        """
        inbox = link.receivers.get(number)
        return isinstance(inbox, Inbox) and inbox.mailbox.memory

    # --- opening --------------------------------------------------------------------------------

    def open(self, link: Link, command: OpenInbox) -> None:
        """Open an inbox for an OPEN_INBOX; the first use of a mailbox creates it.

        It is started, and delivers, once the log has the mailbox. Raises BrokerRefused.
        """
        mailbox = self._mailbox(link, command)
        inbox = Inbox(self, link, command, mailbox)
        link.receivers[inbox.number] = inbox
        self.count += 1
        self._shard.quotas.add(link.quota_owner, "subscriptions")
        if mailbox.able is NO_READERS:  # One object that all mailboxes without readers share.
            mailbox.able = OrderedDict()
        mailbox.readers[inbox] = None
        self._shard.counters["inboxes_opened"] += 1
        if mailbox.state == STANDING:
            self._start(inbox)
            return
        opening = Then(partial(self._start, inbox), partial(self._not_opened, inbox))
        self._mailboxes.create(mailbox, opening)

    def _mailbox(self, link: Link, command: OpenInbox) -> Mailbox:
        """Return the mailbox that an OPEN_INBOX names, made if need be.

        A command without a name means the mailbox of the client's identity; without either, the
        temporary mailbox of its session.
        Raises BrokerRefused: by the bounds of readers, the permissions, or the creation.
        """
        settings = self._shard.settings
        self._links.check_number(link, command.subscription)
        if self.count >= settings.subscriptions_max:
            reason = f"at most {settings.subscriptions_max} inboxes in all"
            raise self._shard.quotas.limit_told_to(link.owner, "inboxes", reason)
        self._shard.quotas.check(link.quota_owner, "subscriptions")
        name = command.mailbox or link.identity
        if not name or name.startswith("~"):
            own = temporary_name(link)
            if name not in ("", "~", own):
                raise BrokerRefused("forbidden", "a temporary mailbox is its session's own")
            mailbox = self._mailboxes.get(self._mailboxes.temporary(link))
            assert mailbox is not None
            return mailbox
        # The mailbox of its own identity is a client's without any permission.
        if not link.owns(name) and not settings.permit(link.owner, "receive", name):
            raise BrokerRefused("forbidden", f"you may not read mailbox '{name}'")
        if not link.owns(name):
            self._mailboxes.check_creation(name, link.owner)
        known = self._mailboxes.get(name)
        if known is None and command.settings:
            wanted = queue_settings(
                MailboxSettings, {**settings.default_of("mailbox", name), **command.settings},
                settings.settings_bytes_max, over=None,
            )  # fmt: skip
            return self._mailboxes.use(name, link.owner, wanted)
        return self._mailboxes.use(name, link.owner)

    def _not_opened(self, inbox: Inbox, code: str, reason: str, retry_ms: int) -> None:
        """Refuse an OPEN_INBOX, since the log refused the creation of its mailbox."""
        if not inbox.ended:
            self._links.refuse(inbox.link, OPEN_INBOX, inbox.number, code, reason, retry_ms)
            self._drop(inbox)
            self._mailboxes.forget_unused(inbox.mailbox)

    def _start(self, inbox: Inbox, _: int = 0) -> None:
        """Say that an inbox is open, as its mailbox stands, and deliver. _: LSN of its creation."""
        if inbox.ended:
            return
        inbox.started = True
        steps = self._steps
        # SUBSCRIBED tells a position: of an inbox, the number that the next message will get.
        next = steps.memory_next if inbox.mailbox.memory else steps.mail_next
        self._links.say(
            inbox.link,
            Subscribed(inbox.number, b"", self._shard.epoch, next, next, next),
        )
        self.resume(inbox)

    # --- ends -----------------------------------------------------------------------------------

    def end(self, inbox: Inbox, code: str) -> None:
        """End a reader, as its client or the broker wants: send ENDED, free what it holds."""
        self._links.say(inbox.link, Ended(inbox.number, next=0, code=code))
        self._drop(inbox)
        self._mailboxes.forget_unused(inbox.mailbox)

    def link_ended(self, link: Link, inboxes: list[Inbox]) -> None:
        """Free the messages that the readers of a link hold, which has ended."""
        for inbox in inboxes:
            self._drop(inbox)

    def _drop(self, inbox: Inbox) -> None:
        """Take an inbox out of its mailbox, and have what it holds returned in portions.

        Called when a reader ends, for whatever reason. `deliver` returns the portions.
        """
        inbox.leave()
        inbox.started = False
        self.count -= 1
        self._shard.quotas.add(inbox.link.quota_owner, "subscriptions", -1)
        inbox.pipe.clear()
        mailbox = inbox.mailbox
        mailbox.readers.pop(inbox, None)
        mailbox.able.pop(inbox, None)
        if inbox.held:
            mailbox.returning += 1
            self.returning.append(inbox)

    def resume(self, inbox: Inbox) -> None:
        """Give a reader a turn if it may be given a message now: its credit or room has grown."""
        if inbox.wants:
            mailbox = inbox.mailbox
            mailbox.able[inbox] = None
            if mailbox.waits:
                self._messages.runnable[mailbox] = None

    # --- delivery -------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Free what ended readers held, then let mailboxes deliver, each in its turn.

        Called once a turn of the broker; a count of puts, and then time, bound the work of a call.
        """
        returns_left = RETURN_PUTS
        while self.returning and returns_left > 0:
            returns_left = self._return_held(self.returning[0], returns_left)
        # Deliveries may use up what the returns have left of their part.
        budget = STEP_PUTS - RETURN_PUTS + returns_left
        runnable = self._messages.runnable
        more = self._shard.share()  # tells whether mail has time left in this turn
        while runnable and budget > 0:
            mailbox, _ = runnable.popitem(last=False)
            if mailbox.returning:
                # Messages that come back go before newer ones; `_return_held` wakes the mailbox.
                continue
            budget -= self._turn(mailbox)
            self._messages.wake(mailbox)
            if not more():
                return

    def _return_held(self, inbox: Inbox, budget: int) -> int:
        """Let a portion of what an ended reader holds wait again; returns the budget left.

        budget: puts that may be freed.
        """
        mailbox, held = inbox.mailbox, inbox.held
        release = self._messages.release
        rows = mailbox.rows
        count = 0
        while held and budget > 0:
            base, mask = held.popitem()
            release(mailbox, rows[mailbox.number, base], mask)
            count += mask.bit_count()
            budget -= 1
        self._shard.counters["mail_redelivered"] += count
        if not held:
            self.returning.popleft()
            mailbox.returning -= 1
            self._shard.event(
                "mail_redelivered", mailbox=mailbox.name, link=inbox.link.number,
                identity=inbox.link.identity, count=inbox.outstanding,
            )  # fmt: skip
            self._messages.wake(mailbox)
        return budget

    def _turn(self, mailbox: Mailbox) -> int:
        """Hand puts to the readers of a mailbox, in turn; returns how many puts were looked at.

        The turn of a mailbox that has messages and readers for them, of TURN_PUTS at most.
        """
        able = mailbox.able
        rows, number = mailbox.rows, mailbox.number
        done = 0
        while able and done < TURN_PUTS and mailbox.waits:
            inbox = next(iter(able))
            if not inbox.wants:
                del able[inbox]
                continue
            row = rows[number, mailbox.head()]
            done += 1
            try:
                given = self._give(mailbox, inbox, row)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                self._links.fail(inbox.link, "MAIL", error, OPEN_INBOX, inbox.number)
                given = False
            if not given:
                del able[inbox]  # `resume` puts it back when it has credit again.
            elif len(able) > 1:
                able.move_to_end(inbox)
        return max(done, 1)  # A turn without puts uses up budget, too: `deliver` comes to an end.

    def _give(self, mailbox: Mailbox, inbox: Inbox, row: MessageRow) -> bool:
        """Hand a reader rows of the first put, or pass over a put that has no free ones.

        False: the reader may be given none of it now. While bodies of earlier hand-outs are read
        back, further ones wait after them in the reader's `pipe`, which is bounded. The rows are
        the first free ones that one MAIL can carry: of one attempt, of one reason, within the
        credit. row: the put.
        """
        base = row.base
        progress = mailbox.progress.get(base)
        # `free` loses the rows that have expired; `every` keeps them: a put of which `every` is
        # given has nothing left that waits.
        free = every = (
            row.left if progress is None else row.left & ~(progress.held | progress.delayed)
        )
        if row.expires_at_ms and row.expires_at_ms <= self._shard.now_ms:
            over, _ = expired(mailbox, row, self._shard.now_ms)
            free &= ~over
            if not free:
                # The timer removes it; until then no reader gets it.
                self._messages.expire_soon(mailbox, row)
        if not free:  # The put waits no more: the next one is the first.
            mailbox.pull(base, row.priority)
            return True
        if progress is None:
            progress = mailbox.progress_of(row)
        attempts, mask = progress.attempt(free)
        if row.rare is not None and row.rare.why:
            mask = same_why(row.rare, mask)
        held = inbox.held
        if len(held) >= self._puts_max and base not in held:  # Each put held takes memory.
            return False
        count = mask.bit_count()
        if count > inbox.left_records:
            # One row is allowed whatever the credit: `wants` has seen to that.
            count = max(inbox.left_records, 1)
            mask = lowest(mask, count)
        if row.rare is not None and count > ALWAYS_NAMED:
            mask = named_rows(row.rare, mask, row.count)
            count = mask.bit_count()
        body = self._bodies.get(base)
        size = row.size
        if size > inbox.left_bytes:
            fitting = self._fitting(inbox, row, mask, body)
            if not fitting:
                return False
            if fitting != mask:
                mask, count = fitting, fitting.bit_count()
        if inbox.pipe:
            settings = self._shard.settings
            if (
                len(inbox.pipe) >= settings.inbox_reads
                or inbox.pipe_bytes + size > settings.inbox_read_bytes
            ):
                return False
        # From here on the reader holds the rows.
        if mask == every:
            mailbox.pull(base, row.priority)
        progress.held |= mask
        progress.delivered(mask)
        mailbox.held += count
        held[base] = held.get(base, 0) | mask
        inbox.outstanding += count
        inbox.left_records -= count
        if body is not None and not inbox.pipe:
            self._send(inbox, row, mask, count, attempts, body)
            return True
        # Until the body is here the bytes of the whole put are reserved; `_flush` corrects that.
        inbox.left_bytes -= size
        inbox.pipe_bytes += size
        handout = Handout(row, mask, attempts)
        handout.body = body
        inbox.pipe.append(handout)
        if body is None:
            self._fetch(inbox, handout)
        return True

    def _fitting(self, inbox: Inbox, row: MessageRow, mask: int, body: Body | None) -> int:
        """Return the first rows of a mask that fit into the reader's credit in bytes; 0: none do.

        Called for a put that is larger as a whole. A reader with nothing outstanding gets one row,
        however large. body: the batch; None: it is not in memory, so that no row is cut out of it.
        """
        if body is not None and inbox.left_bytes > 0:
            # A guess from the mean size of a row, proved by extracting the rows, and halved until
            # they fit.
            count = min(mask.bit_count(), inbox.left_bytes * row.count // row.size)
            while count:
                some = lowest(mask, count)
                frames = body.extracted(some)
                if frames is None:
                    break
                if sum(map(len, frames)) <= inbox.left_bytes:
                    return some
                count //= 2
        return 0 if inbox.outstanding else mask & -mask  # mask & -mask: the first row alone

    def _fetch(self, inbox: Inbox, handout: Handout) -> None:
        """Have the body of a hand-out's put read back; an error in taking it ends the link."""
        row = handout.row
        read = partial(self._read, inbox, handout)
        self._bodies.want(
            row.base, row.size,
            self._links.contained(inbox.link, "MAIL", read, OPEN_INBOX, inbox.number),
        )  # fmt: skip

    def _read(self, inbox: Inbox, handout: Handout, body: Body | None) -> None:
        """Take the body that a hand-out waits for; None: it is lost, or could not be read."""
        if not inbox.ended:
            handout.missing = body is None
            handout.failed = self._bodies.failed
            handout.body = body
            self._flush(inbox)

    def _flush(self, inbox: Inbox) -> None:
        """Send the hand-outs that have their bodies, in order, up to the first that has not.

        Called when a body that a hand-out of the reader waits for was read, or is lost.
        """
        pipe = inbox.pipe
        mailbox = inbox.mailbox
        now_ms = self._shard.now_ms
        while pipe and (pipe[0].body is not None or pipe[0].missing):
            handout = pipe.popleft()
            row, mask = handout.row, handout.mask
            # The hand-out had reserved the size of the whole put; `_send` takes what it sends.
            inbox.pipe_bytes -= row.size
            inbox.left_bytes += row.size
            if handout.body is None:
                self._unreadable(inbox, handout)
                continue
            if row.expires_at_ms and row.expires_at_ms <= now_ms:
                # Rows that expired during the read go back, and the timer removes them.
                over, _ = expired(mailbox, row, now_ms)
                over &= mask
                if over:
                    self._forget_unsent(inbox, row, over)
                    self._messages.release(mailbox, row, over)
                    mask &= ~over
                    if not mask:
                        continue
            self._send(inbox, row, mask, mask.bit_count(), handout.attempts, handout.body)
        self.resume(inbox)

    def _forget_unsent(self, inbox: Inbox, row: MessageRow, mask: int) -> None:
        """Take back rows that a reader was to be given and was not sent.

        Its credit has the sizes of their puts back already (_flush).
        """
        count = mask.bit_count()
        kept = inbox.held[row.base] & ~mask
        if kept:
            inbox.held[row.base] = kept
        else:
            del inbox.held[row.base]
        inbox.outstanding -= count
        inbox.left_records += count

    def _unreadable(self, inbox: Inbox, handout: Handout) -> None:
        """Delay a hand-out whose bodies could not be read; remove one whose bodies are lost.

        Called with a hand-out whose read has ended without a body.
        """
        row, mask = handout.row, handout.mask
        mailbox, messages = inbox.mailbox, self._messages
        self._forget_unsent(inbox, row, mask)
        failed = handout.failed
        if not failed:
            messages.lost(mailbox, row, mask)
            return
        self._shard.counters["mail_reads_failed"] += 1
        self._shard.event(
            "mail_read_failed", "error", mailbox=mailbox.name, number=row.base, reason=failed
        )
        messages.postpone(mailbox, row, mask, messages.much_later_ms)

    def _send(
        self, inbox: Inbox, row: MessageRow, mask: int, count: int, attempts: int, body: Body
    ) -> None:
        """Add a MAIL with rows of a put to the outbox of a reader's link.

        mask, count: the rows, and how many they are. attempts: hand-outs of them, this one
        included.
        """
        rows: bytes | None = None
        frames, size = body.frames, body.size
        if count != row.count:
            # Few rows of a large batch are cut out of it; otherwise the whole batch leaves, with a
            # bitmap of the rows (`marked`). Where the credit does not take that, they are cut out
            # after all.
            frames, marked, size = body.rows(mask, self._extract_bytes_min, self._extract_share)
            cut = body.extracted(mask) if marked and size > inbox.left_bytes else None
            if cut is not None:
                frames, marked, size = cut, False, sum(map(len, cut))
            if marked:
                rows = mask.to_bytes((row.count + 7) // 8, "little")
        link = inbox.link
        out = link.out
        if not out:
            self._links.dirty.append(link)
        rare = row.rare
        if rare is None:
            out.append(Mail(inbox.number, row.sender, attempts, len(frames), rows))
        else:
            out.append(
                Mail(
                    inbox.number, row.sender, attempts, len(frames), rows,
                    about_of(rare.about, mask, row.count), rare.last, why_of(rare, mask),
                    origin_of(rare, mask),
                )
            )  # fmt: skip
        link.frames += frames
        # The bytes use up the reader's credit, and the room of its link: what it may have unread.
        inbox.left_bytes -= size
        link.room -= size
        link.delivered_bytes += size
        if link.room < link.ask_below:
            self._links.ask_if_little_room(link)
        counters = self._shard.counters
        counters["mail_out"] += count
        counters["mail_deliveries"] += 1

    # --- acknowledgement ------------------------------------------------------------------------

    def prepare_ack(self, link: Link, command: AckMail, frame: Any = None) -> Part:
        """Return the part that an ACK_MAIL becomes. Raises BrokerRefused: nothing was done.

        With an `again_ms` below 0 the messages are done and leave their mailbox; with any other the
        reader gives them back, and they are delivered again after so many milliseconds. The reader
        has its credit back once the step takes the part, before the log has it.
        """
        inbox = link.receivers.get(command.subscription)
        if not isinstance(inbox, Inbox):
            raise BrokerRefused(
                "unknown_subscription", f"no inbox {command.subscription} on this link"
            )
        rows = self._held_rows(inbox, command)
        mailbox = inbox.mailbox
        number, named = mailbox.number, done_of(rows)
        if command.again_ms < 0:
            return self._messages.part(mailbox, MailDone(number, named), _Ack(self, inbox, rows))
        not_before_ms = self._shard.now_ms + command.again_ms if command.again_ms else 0
        change = MailAgain(number, named, not_before_ms, command.again_ms)
        return self._messages.part(mailbox, change, _Again(self, inbox, rows, not_before_ms))

    def _held_rows(self, inbox: Inbox, command: AckMail) -> list[RowsOfPut]:
        """Return the rows that an ACK_MAIL names by ranges of numbers (first, after the last).

        The walk goes from put to put: `place` is the index of the range at hand, `at` the number in
        it from which on rows are still to be found. Rows that were not sent yet cannot be
        acknowledged. Raises BrokerRefused `not_held`: the reader does not hold all of them.
        """
        held, mailbox = inbox.held, inbox.mailbox
        rows, number = mailbox.rows, mailbox.number
        unsent: dict[int, int] = {}
        for handout in inbox.pipe:
            base = handout.row.base
            unsent[base] = unsent.get(base, 0) | handout.mask
        found: list[RowsOfPut] = []
        ranges = command.ranges
        place = at = 0
        while place < len(ranges):
            at = max(at, ranges[place][0])
            base = at  # Mostly a range begins where a put does: that costs no search.
            has = held.get(at, 0)
            if not has:
                base = mailbox.order.floor(at) or 0
                has = held.get(base, 0)
            if not has:
                raise BrokerRefused("not_held", f"message {at} is not in this inbox's hands")
            row = rows[number, base]
            end = base + row.count
            # All ranges of one batch together: each range alone would go through all rows.
            last = bisect_left(ranges, (end,), place + 1)
            mask = _rows_between(ranges, place, last, at, base, row.count) if at < end else 0
            stop = min(ranges[last - 1][1], end)
            if unsent:
                has &= ~unsent.get(base, 0)
            if not mask or mask & ~has:
                raise BrokerRefused(
                    "not_held", f"of messages {at} to {stop} not all are in this inbox's hands"
                )
            found.append((base, mask, row))
            # A range that ends beyond this put goes on in the next one.
            place, at = (last, 0) if ranges[last - 1][1] <= end else (last - 1, end)
        return found


class _Ack(Effect):
    """Rows that a reader has acknowledged, on their way out of the mailbox."""

    inboxes: Inboxes
    inbox: Inbox
    rows: list[RowsOfPut]

    def taken(self, part: Part) -> None:
        """Take the rows from the reader, which may be given others before the log has this.

        The mailbox still counts them as held: no other reader gets them meanwhile.
        """
        inbox = self.inbox
        held = inbox.held
        for base, mask, _ in self.rows:
            kept = held[base] & ~mask
            if kept:
                held[base] = kept
            else:
                del held[base]
            inbox.outstanding -= mask.bit_count()
        self.inboxes.resume(inbox)

    def appended(self, part: Part, end_lsn: int) -> None:
        """Remove the messages from the mailbox, and count them as acknowledged."""
        mailbox = self.inbox.mailbox
        gone = self.inboxes._messages.gone
        count = 0
        for base, mask, row in self.rows:
            gone(mailbox, base, mask, row)
            count += mask.bit_count()
        self.inboxes._shard.counters["mail_acknowledged"] += count

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Give the rows back to the reader, as the log refused, or to others if it has ended."""
        inbox = self.inbox
        for base, mask, row in self.rows:
            if inbox.ended:
                self.inboxes._messages.release(inbox.mailbox, row, mask)
            else:
                inbox.held[base] = inbox.held.get(base, 0) | mask
                inbox.outstanding += mask.bit_count()


class _Again(_Ack):
    """Rows that a reader has given back: they wait again, at once or from a time on."""

    not_before_ms: int

    def appended(self, part: Part, end_lsn: int) -> None:
        """Let the messages be delivered again, at once or at the time that the reader asked for."""
        messages, mailbox = self.inboxes._messages, self.inbox.mailbox
        for _, mask, row in self.rows:
            self.inboxes._shard.counters["mail_again"] += mask.bit_count()
            if self.not_before_ms > messages.now_ms:
                messages.postpone(mailbox, row, mask, self.not_before_ms)
            else:
                messages.release(mailbox, row, mask)


def _rows_between(
    ranges: Sequence[tuple[int, int]], place: int, last: int, at: int, base: int, count: int
) -> int:
    """Return the rows of a batch that ranges[place:last] name from the number `at` on, as a mask.

    base, count: number of the batch's first message, and how many it has.
    """
    if last == place + 1:
        # The bits below `stop`, without those below `at`.
        stop = min(ranges[place][1] - base, count)
        return ((1 << stop) - 1) >> (at - base) << (at - base)
    # Of many ranges each adds 1 at its beginning and takes 1 away at its end: the rows where the
    # running sum is above 0 are named.
    bounds = np.array(ranges[place:last], np.int64) - base
    np.clip(bounds, at - base, count, out=bounds)
    steps = np.zeros(count + 1, np.int8)
    # Two ranges may touch, so their beginnings and ends are counted separately.
    steps[bounds[:, 0]] += 1
    steps[bounds[:, 1]] -= 1
    return bits_of_rows(np.cumsum(steps[:-1], dtype=np.int8) > 0)
