"""Mailboxes that a session reads.

Owns what has arrived of each mailbox and whose it is: a reply that a caller waits for goes
to the request, everything else to the readers of the mailbox. The rule: a session reads a
mailbox once, however many of its callers want something of it; mail that was handed over is
handed over once, also when the broker hands it out again after a reconnect; what no caller
reads is given back as soon as no request needs the mailbox. Source: SPEC.md, section 4.4.

Words: a number is that of a message; a range is (first, end), without `end`. A message is in hand
from its delivery until it is acknowledged or lent to an atomic step, which then acknowledges it. A
delivery in a queue is (the batch as it came, the rows of it that are left).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from malamute_protocol.batch import Batch
from malamute_protocol.commands import AckMail, Mail, OpenInbox, Subscribed, Unsubscribe
from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    MalamuteError,
    RemoteProtocolError,
)
from malamute_protocol.limits import Limits
from malamute_py.client.session.acknowledgements import (
    Ack,
    AckForm,
    Acknowledging,
    Acks,
    Range,
    ranges_of_numbers,
)
from malamute_py.client.session.events import Event, Settled
from malamute_py.client.session.inbox_options import InboxOptions
from malamute_py.client.session.letters import HandoutBatch, chosen, ranges_of, rows_of
from malamute_py.client.session.outgoing import CommandSink, Trackers
from malamute_py.client.session.receiver import AWAY_MAX, Opened
from malamute_py.client.session.unreadable import Unreadable, one_taken_in

DONE: Final = AckForm()
_SILENTLY: Final = AckForm(silent=True)
PARKED_BYTES_MAX: Final = 64 << 20
PARKED_RECORDS_MAX: Final = 1 << 18
"""Mail that no caller reads, kept so that the replies after it come through."""
_GIVEN_MAX: Final = 256
"""Ranges that a reader may have been given before those that are not in hand are dropped."""
_AWAY_MS: Final = 5_000
"""Time for which unread mail beyond these bounds is sent back to the broker."""


class MailboxView:
    """One reader of a mailbox: some caller's inbox."""

    __slots__ = ("_done_end", "_done_first", "_given", "_sift_at", "closed", "mailbox")

    def __init__(self, mailbox: OpenedMailbox) -> None:
        self.mailbox = mailbox
        self.closed = False
        self._given: list[Range] = []
        """Numbers that it was given; those in hand are not acknowledged."""
        self._sift_at = _GIVEN_MAX
        """Length of `_given` at which ranges are dropped of which nothing is in hand."""
        self._done_first = self._done_end = -1
        """A run of numbers that were read and are acknowledged with the next turn."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self.closed or self.mailbox.ended

    def take(self) -> tuple[HandoutBatch, Batch] | None:
        """The next messages, all of one batch; None: none yet, or this reader was closed."""
        item = None if self.closed else self.mailbox.take()
        if item is not None:
            _, left = item
            ranges = ranges_of(left)
            for view in self.mailbox.views if len(self.mailbox.views) > 1 else ():
                view.forget(ranges)  # messages come again were given to any of the readers before
            given = self._given
            given += ranges
            if len(given) > self._sift_at:  # ranges of which nothing is in hand are dropped
                in_hand = self.mailbox.in_hand
                self._given = [run for run in given if not in_hand.isdisjoint(range(*run))]
                self._sift_at = max(_GIVEN_MAX, 2 * len(self._given))
        return item

    def forget(self, ranges: list[Range]) -> None:
        """Drop numbers that come again, to whichever reader: this one gives them back no more."""
        given = self._given
        if not given:
            return
        least, after = min(first for first, _ in given), max(end for _, end in given)
        for low, high in ranges:
            if low >= after or high <= least:
                continue  # mostly: numbers that come are new
            # Of each range stays what lies before, and what lies after, the numbers that go.
            self._given = [
                (left_first, left_end)
                for first, end in self._given
                for left_first, left_end in ((first, min(end, low)), (max(first, high), end))
                if left_first < left_end
            ]

    def done(self, number: int) -> None:
        """Note that a message was read: the next turn acknowledges it with its neighbours."""
        if number == self._done_end:  # it follows on the run that gathers
            self._done_end += 1
            return
        self.collect()
        self._done_first, self._done_end = number, number + 1
        self.mailbox.has_read(self)

    def collect(self) -> None:
        """Acknowledge the run that was read, if there is one (see `done`)."""
        if self._done_first >= 0:
            self.mailbox.ack([(self._done_first, self._done_end)])
            self._done_first = self._done_end = -1

    def give_back(self) -> None:
        """Return what was given to this reader and not acknowledged, for other readers."""
        self.collect()
        for _, left in self.mailbox.queue:
            self.forget(ranges_of(left))  # What came again waits for its next reader.
        if self._given:
            self.mailbox.ack(self._given, again_ms=0)  # what is not in hand is left out


class OpenedMailbox(Opened):
    """One mailbox over all links: what waits, what is with readers, the credit given."""

    consumes = True

    def __init__(self, number: int, asked: InboxOptions, mailboxes: OpenedMailboxes) -> None:
        super().__init__(number, asked.credit_records, asked.credit_bytes)
        self.asked = asked
        self.views: dict[MailboxView, None] = {}
        self.waiting = 0
        """Requests whose replies come here and that are not answered."""
        self.for_replies = False
        """Whether replies of some request have come here, so that those of others may come, too."""
        self.queue: deque[tuple[HandoutBatch, Batch]] = deque()
        """Deliveries that no caller has taken yet, with the rows that are left of each."""
        self.in_hand: set[int] = set()
        """Numbers that were delivered and are not acknowledged."""
        self._mailboxes = mailboxes
        self._acked: set[int] = set()
        """Acknowledged by the reader; the broker has not confirmed it."""
        self._lent: set[int] = set()
        """In an atomic step that is not answered."""
        self._of_earlier_links: set[int] = set()
        """Handed over on an earlier link, and not handed out again by the broker since."""
        self._unread_records = 0
        """Messages in the queue: they lower the credit, and what is too much goes back."""
        self._unread_bytes = 0
        """Bytes of the batches in the queue, each whole while one message of it is unread."""

    # --- the readers' side -------------------------------------------------------------------

    def take(self) -> tuple[HandoutBatch, Batch] | None:
        """Take the next delivery from the queue: it counts as read, which makes room for more.

        Returns (delivery as the broker sent it, its messages that no call took as its reply);
        None: nothing waits.
        """
        if not self.queue:
            return None
        item = _, left = self.queue.popleft()
        self._unread_records -= len(left)
        self._unread_bytes -= left.stamp.size
        return item

    def ack(self, ranges: list[Range], again_ms: int = -1, token: Any = None) -> None:
        """Acknowledge messages: they were received for good, or are wanted again after a time.

        again_ms: that time; -1: for good. Numbers that are not in hand are left out. token: gets
        True when the broker has confirmed all, False when the link went before for some, which are
        acknowledged again should the broker hand them out again to this client.
        Raises, with a token, why the inbox has ended: the broker gave them to others.
        """
        if self.ended:
            # Nothing would ever be sent of them, and no caller be told.
            if token is not None:
                raise self._mailboxes.why_ended(self)
            return
        mine: list[Range] = []
        for first, end in ranges:
            if end - first == 1:
                if first in self.in_hand:
                    self.in_hand.discard(first)
                    mine.append((first, end))
            else:
                # A caller's range may be of any length: the smaller of the two is walked through.
                if end - first <= len(self.in_hand):
                    found = self.in_hand.intersection(range(first, end))
                else:
                    found = {number for number in self.in_hand if first <= number < end}
                self.in_hand -= found
                has_all = len(found) == end - first > 0
                mine += [(first, end)] if has_all else ranges_of_numbers(found)
        if again_ms < 0:
            for first, end in mine:
                self._acked.update(range(first, end))
        whole = True
        if self._of_earlier_links:
            here = self._held_on_this_link(mine, again_ms)
            whole = len(here) == sum(end - first for first, end in mine)
            mine = here
        if mine:
            form = DONE if again_ms < 0 else AckForm(0, again_ms)
            self._mailboxes.acks.add(self, form, mine, token if whole else None)
        if token is not None and not (mine and whole):
            # False: it came too late for some. Of no messages at all it is done.
            asked_for_some = any(first < end for first, end in ranges)
            self._mailboxes.told(token, None if asked_for_some else True)

    def _held_on_this_link(self, ranges: list[Range], again_ms: int) -> list[Range]:
        """Return ranges without numbers of an earlier link that have not come again on this one.

        The broker would refuse those. They are acknowledged when they come again, if they are done;
        if the program gave them back (again_ms >= 0), they are shown to it then.
        """
        here = []
        for number in (number for first, end in ranges for number in range(first, end)):
            if number not in self._of_earlier_links:
                here.append((number, number + 1))
            elif again_ms >= 0:
                self._of_earlier_links.discard(number)  # the broker hands it out again by itself
        return here

    @property
    def parks_too_much(self) -> bool:
        """Whether so much is unread that some goes back to the broker (see PARKED_BYTES_MAX)."""
        return self._unread_records > PARKED_RECORDS_MAX or self._unread_bytes > PARKED_BYTES_MAX

    def send_away(self) -> None:
        """Give the newest unread delivery back for _AWAY_MS, to let replies after it come."""
        _, left = self.queue.pop()
        self._unread_records -= len(left)
        self._unread_bytes -= left.stamp.size
        self.ack(ranges_of(left), _AWAY_MS)

    def has_read(self, view: MailboxView) -> None:
        """Have the acknowledgements of a reader collected in the next turn."""
        self._mailboxes.have_read[view] = None

    def await_fewer(self, count: int) -> None:
        """Count requests as answered or given up; after the last, unread replies are mail."""
        self.waiting -= count
        if not self.waiting and self.queue and not self.ended:
            self._mailboxes.look_at(self)

    def sort_again(self) -> None:
        """Give callers the replies among the unread mail that they have begun to wait for since."""
        queue, self.queue = self.queue, deque()
        for delivered, left in queue:
            rest: Batch | None = left
            if delivered.about:
                rest = self._mailboxes.replies.route(delivered, left, self)
            if rest is not None:
                self.queue.append((delivered, rest))
            if rest is not left:
                self._unread_records -= len(left) - (0 if rest is None else len(rest))
                if rest is None:  # a delivery counts with all its bytes while a row of it is left
                    self._unread_bytes -= left.stamp.size

    def discard(self) -> None:
        """Drop what waits: the broker gives it to others once the inbox is closed."""
        self.queue.clear()
        self._unread_records = self._unread_bytes = 0

    # --- steps -------------------------------------------------------------------------------

    def lend(self, numbers: list[int]) -> None:
        """Give messages in hand to an atomic step, which alone acknowledges them.

        Raises BrokerRefused `not_held`: nothing was lent. What the reader has since an earlier
        link is then shown to it again, should the broker hand it out to this client.
        """
        not_ours = self._of_earlier_links.intersection(numbers) - self._lent
        if not_ours or not self.in_hand.issuperset(numbers):
            self._of_earlier_links -= not_ours
            self.in_hand -= not_ours
            raise BrokerRefused(
                "not_held", "not in hand: acknowledged already, or the link was lost since"
            )
        self.in_hand.difference_update(numbers)
        self._lent.update(numbers)

    def settled(self, numbers: list[int]) -> None:
        """Take note that an atomic step with these acknowledgements was taken."""
        self._lent.difference_update(numbers)
        # Messages that came again on a later link, before the step was answered, are done, too.
        self.in_hand.difference_update(numbers)
        self._of_earlier_links.difference_update(numbers)

    def regained(self, numbers: list[int]) -> None:
        """Take numbers back from a step that was refused: those of this link are in hand again."""
        mine = self._lent.intersection(numbers)
        self._lent -= mine
        self.in_hand |= mine - self._of_earlier_links
        self._of_earlier_links.difference_update(numbers)

    def lost_to_others(self, numbers: list[int]) -> None:
        """Do nothing: an acknowledgement of each, or the link's end, tells whose they are."""

    def give_back(self, numbers: list[int]) -> None:
        """Have the broker hand out again what no program knows of: see Step.give_back_untold."""
        mine = ranges_of_numbers(number for number in numbers if number in self.in_hand)
        if mine and not self.ended:
            self.ack(mine, again_ms=0)

    # --- acknowledgements --------------------------------------------------------------------

    question = None
    """No question precedes the halves of a refused acknowledgement."""

    def ack_command(self, form: AckForm, ranges: list[Range], tracker: int) -> AckMail:
        """Return ACK_MAIL for these numbers."""
        return AckMail(self.number, ranges, tracker, 0, form.again_ms)

    def acked(self, form: AckForm, ranges: list[Range]) -> None:
        """Forget that these numbers are to be acknowledged: the broker has confirmed it."""
        if form.again_ms < 0:  # they are done, not given back
            for first, end in ranges:
                self._acked.difference_update(range(first, end))

    def not_acked(self, form: AckForm, number: int, error: MalamuteError) -> None:
        """Warn of a message whose acknowledgement was refused: another reader had it by then."""
        self._acked.discard(number)
        self._mailboxes.not_held += 1
        mailbox = self.asked.mailbox or "us"  # empty: the client's own
        self._mailboxes.warnings.add(
            "acknowledged too late", f"message {number} of {mailbox}: {error}"
        )

    def takes_default(self) -> bool:
        """Return False: an ACK_MAIL asks for no level."""
        return False

    def ack_lost(self, ack: Ack) -> bool:
        """Tell the callers (None) that it came too late; return False: it is sent no more.

        The broker hands out again what it does not know to be done, which is acknowledged then.
        """
        ack.acks.settle(ack, None)
        return False

    # --- commands to the broker --------------------------------------------------------------

    def open(self) -> OpenInbox:
        """Return OPEN_INBOX for a new link, with credit that counts from its beginning."""
        self._begin_credit()
        return OpenInbox(
            self.number,
            self.asked.mailbox,
            self._granted_records,
            self._granted_bytes,
            self.asked.settings,
        )

    def _credit_limits(self) -> tuple[int, int]:
        """Return how many records and bytes, in all, the broker may have sent on this link."""
        records, size = self._unread_records, self._unread_bytes
        if self.waiting:
            # Unread mail must not keep the replies after it from their callers.
            records = min(records, self.asked.credit_records // 2)
            size = min(size, self.asked.credit_bytes // 2)
        return (
            self._received_records + self.asked.credit_records - records,
            self._received_bytes + self.asked.credit_bytes - size,
        )

    # --- commands from the broker ------------------------------------------------------------

    def receive(self, command: Any, frames: Sequence[Any], limits: Limits) -> None:
        """Take SUBSCRIBED or MAIL. Raises RemoteProtocolError for anything else."""
        kind = type(command)
        if kind is Mail:
            self._mail(command, frames, limits)
        elif kind is Subscribed:
            self.active = self._accepted = True
            self._mailboxes.look_at(self)
        else:
            raise RemoteProtocolError("unexpected", f"{kind.__name__} for an inbox")

    def _mail(self, command: Mail, frames: Sequence[Any], limits: Limits) -> None:
        """Take in one delivery: replies go to their calls, the rest waits to be read."""
        batch = one_taken_in(command, frames, limits)
        count = batch.records if isinstance(batch, Unreadable) else len(batch)
        # about: the requests of replies; origin: the records that dead letters were.
        if command.about and sum(replies for _, _, replies in command.about) != count:
            raise RemoteProtocolError(
                "malformed", f"{count} replies about another number of requests"
            )
        if command.origin is not None:
            *_, offsets = command.origin
            if len(offsets) != count:
                raise RemoteProtocolError(
                    "malformed", f"{count} dead letters of another number of records"
                )
        self._received_records += count
        self._received_bytes += batch.stamp.size
        if isinstance(batch, Unreadable):
            self._pass_over(command, batch)
            return
        delivered = HandoutBatch(batch, command)
        left: Batch | None = batch
        if self._of_earlier_links:
            left = self._without_known(batch)
        if left is not None and command.about:
            left = self._mailboxes.replies.route(delivered, left, self)
        if left is None:
            return
        for first, end in ranges_of(left):
            self.in_hand.update(range(first, end))
        self.queue.append((delivered, left))
        self._unread_records += len(left)
        self._unread_bytes += left.stamp.size
        self._mailboxes.look_at(self)

    def _pass_over(self, command: Mail, found: Unreadable) -> None:
        """Fail the callers whose replies cannot be read; other such mail stays where it is.

        Messages that no reader can read are held by this client, unacknowledged, and named in the
        log; the mail around them is delivered.
        """
        ranges = found.ranges
        if command.about and self._mailboxes.replies.route_unreadable(command, found.reason):
            self.reply_taken(ranges, command.last)
            return
        first, _ = ranges[0]
        self._mailboxes.warnings.add(
            "messages that cannot be read, and stay where they are",
            f"{found.records} from {first} of {self.asked.mailbox or 'us'}: {found.reason}",
        )

    def _without_known(self, batch: Batch) -> Batch | None:
        """Return the rows that no reader had on an earlier link; None: there are none.

        Rows that a reader has acknowledged since are acknowledged once more; those that it has
        still are in hand again. A row that is lent is the business of its step.
        """
        rows, again = [], []
        for row in rows_of(batch):
            number = batch.offset_of(row)
            if number not in self._of_earlier_links:
                rows.append(row)
                continue
            self._of_earlier_links.discard(number)
            if number in self._acked:
                again.append(number)
            elif number not in self._lent:
                self.in_hand.add(number)  # the reader has it, and it is ours again
        if again:
            self._mailboxes.acks.add(self, DONE, ranges_of_numbers(again))
        if len(rows) == len(batch):
            return batch
        return chosen(batch, rows) if rows else None

    def reply_taken(self, ranges: list[Range], last: bool) -> None:
        """Acknowledge replies that went to their callers, for whom the broker has kept them.

        last: whether they are the last ones to their requests.
        """
        if self.in_hand:
            for first, end in ranges:
                self.in_hand.difference_update(range(first, end))
        if last:
            # Without a CONFIRM: should it be lost, the reply comes again, and its key is known.
            self._mailboxes.acks.add(self, _SILENTLY, ranges)
        else:
            for first, end in ranges:
                self._acked.update(range(first, end))
            self._mailboxes.acks.add(self, DONE, ranges)
        self._mailboxes.routed()

    def link_down(self) -> None:
        """Drop what no caller took, and note what readers have as of an earlier link."""
        super().link_down()
        for _, left in self.queue:
            for first, end in ranges_of(left):
                self.in_hand.difference_update(range(first, end))
        self.discard()
        # A step under way names what it was lent: the broker knows whether it was taken.
        away = self._of_earlier_links
        away |= self.in_hand | self._acked | self._lent
        if len(away) > AWAY_MAX:  # a bound on memory
            oldest = sorted(away)[:-AWAY_MAX]
            for numbers in (away, self.in_hand, self._acked):
                numbers.difference_update(oldest)

    def over(self) -> None:
        """Have the session forget the mailbox, which has ended."""
        self._mailboxes.over(self)


class ReplyRoute(Protocol):
    """The way of replies to the callers that wait for them (requests.AwaitedReplies)."""

    def route(self, delivered: HandoutBatch, left: Batch, inbox: OpenedMailbox) -> Batch | None:
        """Give awaited replies to their callers; return the other rows, None: there are none."""

    def route_unreadable(self, command: Mail, reason: str) -> bool:
        """Fail callers whose replies cannot be read; False, doing nothing: not all are awaited."""

    def inbox_failed(self, inbox: OpenedMailbox, error: MalamuteError) -> None:
        """Fail the callers whose replies come into an inbox that has ended."""


class OpenedMailboxes(Acknowledging):
    """All mailboxes that a session reads, and their acknowledgements."""

    def __init__(
        self,
        replies: ReplyRoute,
        trackers: Trackers,
        emit: Callable[[Event], None],
        begin: Callable[[Callable[[int], OpenedMailbox]], OpenedMailbox],
        end: Callable[[Opened], None],
        arrived: Callable[[Any], None],
    ) -> None:
        """replies: takes those that callers wait for. emit: tells the shell an event.

        begin: opens a mailbox under a number of the session. end: ends what was opened. arrived:
        has a reader look at what has come for it.
        """
        super().__init__(Acks(trackers, self.told), emit)
        self.own: frozenset[str] = frozenset()
        """Names of the client's own mailbox, which is opened without a name."""
        self.not_held = 0
        """Acknowledgements that came too late: the message was another reader's by then."""
        self.replies = replies
        self._begin = begin
        self._end = end
        self._arrived = arrived
        self._mailboxes: dict[str, OpenedMailbox] = {}
        """By the name that a caller gave; empty: the client's own mailbox."""
        self.have_read: Final[dict[MailboxView, None]] = {}
        """Readers that have something to acknowledge with the next turn."""
        self.may_hold = False
        """Acknowledgements of replies may wait one turn for the requests that follow them: for
        a shell whose callers run between two turns."""
        self.holding = False
        """Whether acknowledgements wait now: another turn is wanted soon."""
        self._routed = False
        """Replies went to their callers in this turn."""
        self._looked_at: Final[dict[OpenedMailbox, None]] = {}
        """Mailboxes in which something may be due: mail to return, or their end."""
        self.queues: Final = (self.have_read, self._looked_at, *self.acks.queues)
        """While all of them are empty, take() has nothing to do."""
        self._fatal: MalamuteError | None = None
        """Why the session has ended."""

    # --- what callers do -----------------------------------------------------------------------

    def get(self, asked: InboxOptions) -> OpenedMailbox:
        """The one inbox of a mailbox, opened by `begin` if need be. Raises the session's end."""
        mailbox = "" if asked.mailbox in self.own else asked.mailbox
        inbox = self._mailboxes.get(mailbox)
        if inbox is None:
            named = msgspec.structs.replace(asked, mailbox=mailbox)
            inbox = self._begin(lambda number: OpenedMailbox(number, named, self))
            self._mailboxes[mailbox] = inbox
        return inbox

    def own_inbox(self) -> OpenedMailbox:
        """The inbox of the client's own mailbox. Raises what ended the session."""
        return self._mailboxes.get("") or self.get(InboxOptions(""))

    def read(self, asked: InboxOptions) -> MailboxView:
        """Begin to read a mailbox. Raises what ended the session."""
        inbox = self.get(asked)
        view = MailboxView(inbox)
        inbox.views[view] = None
        if inbox.queue:
            self._arrived(view)
        return view

    def close(self, view: MailboxView) -> None:
        """Close a reader; what it did not acknowledge goes back to the broker, for others."""
        if view.closed:
            return
        view.closed = True
        inbox = view.mailbox
        del inbox.views[view]
        if not inbox.ended:
            view.give_back()
            self._looked_at[inbox] = None
        self._arrived(view)

    def look_at(self, inbox: OpenedMailbox) -> None:
        """Have take() look at a mailbox again, and its readers look for messages.

        Called when something arrived for them, or a request whose reply comes there is over. take()
        closes a mailbox that neither readers nor replies need, and makes way for replies that come
        after unread mail which takes all of the credit.
        """
        self._looked_at[inbox] = None
        for view in inbox.views:
            self._arrived(view)

    def over(self, inbox: OpenedMailbox) -> None:
        """Forget a mailbox that has ended, and fail those that wait for something of it."""
        if self._mailboxes.get(inbox.asked.mailbox) is inbox:
            del self._mailboxes[inbox.asked.mailbox]
        error = self.why_ended(inbox)
        self.acks.forget(inbox, error)
        self._looked_at.pop(inbox, None)
        for view in inbox.views:
            self._arrived(view)
        self.replies.inbox_failed(inbox, error)

    def why_ended(self, inbox: OpenedMailbox) -> MalamuteError:
        """Error for callers that still want something of an inbox that has ended."""
        return inbox.error or self._fatal or ConnectionLost("the inbox was closed")

    def routed(self) -> None:
        """Note that replies went to callers in this turn, whose next requests may follow."""
        self._routed = True

    def told(self, token: Any, outcome: Any) -> None:
        """Tell a caller what became of its acknowledgement: it gets True, False or an error.

        token: what the caller waits at. outcome: a Confirm: True; None, it came too late: False; an
        error, `not_held` as well: the error.
        """
        if not isinstance(outcome, MalamuteError):
            outcome = outcome is not None
        self.emit(Settled([(token, outcome)]))

    # --- outgoing --------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether every acknowledgement is confirmed, and no reader has one to make."""
        return super().idle and not self.have_read

    @property
    def waits(self) -> bool:
        """Whether something may leave with the next take()."""
        return super().waits or bool(self.have_read)

    def fail_all(self, error: MalamuteError) -> None:
        """Fail all acknowledgements: the session has ended."""
        self._fatal = error
        super().fail_all(error)

    def wake(self, now_ms: int) -> None:
        """Begin a turn: acknowledgements of replies wait one turn for requests that follow them.

        They do where the shell's callers run between two turns (may_hold). So both leave in one
        message, where a caller requests, gets its reply, and requests again.
        """
        self.holding = self.may_hold and self._routed and not self.holding
        self._routed = False
        super().wake(now_ms)

    def take(self, now_ms: int, out: CommandSink) -> bool:
        """Send acknowledgements, and close mailboxes that no caller reads or awaits replies in."""
        while self.have_read:
            view, _ = self.have_read.popitem()
            view.collect()
        unneeded = []
        while self._looked_at:
            inbox, _ = self._looked_at.popitem()
            if inbox.ended or inbox.ending:
                continue
            if inbox.waiting:  # callers wait for replies, which must get past unread mail
                self._make_way(inbox, out)
            elif not inbox.views and (inbox.queue or not inbox.for_replies):
                # Without unread mail, a mailbox for replies stays open for the next request.
                unneeded.append(inbox)
        if not self.holding or unneeded:
            self.acks.take(now_ms, out)
        for inbox in unneeded:
            self._close_inbox(inbox, out)
        return True

    def _make_way(self, inbox: OpenedMailbox, out: CommandSink) -> None:
        """Give credit beyond unread mail that keeps replies back; give back what is too much."""
        while inbox.parks_too_much:
            inbox.send_away()
        if inbox.active and inbox.credit_due:
            out.put(inbox.credit(), None)

    def _close_inbox(self, inbox: OpenedMailbox, out: CommandSink) -> None:
        """Close a mailbox that no caller needs: what came of it goes back to the broker."""
        inbox.discard()
        del self._mailboxes[inbox.asked.mailbox]
        if self._linked:
            inbox.ending = True
            out.put(Unsubscribe(inbox.number), None)
        else:
            self._end(inbox)  # without a link there is nothing to end at the broker
