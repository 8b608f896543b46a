"""Requests to services, and the caller that each reply belongs to.

Owns the requests that are not answered, by the key of their batch and their row in it. The
rule: a reply is told apart from other mail by its key alone; it goes to the waiting caller, once,
and what comes for a request that was given up is taken and dropped; a reply to a request of
an earlier process has an unknown key and stays mail. Source: SPEC.md, section 4.5.

Words: a token is the object at which a caller waits for one reply, or a Replies for several; in
`OutgoingRequests.tokens` None stands for a row that was answered, _GIVEN_UP for one whose caller
waits no longer but whose reply may come. `about` names the requests that replies are to, in runs of
(key of the requests' batch, row of the first, how many). A notice is a reply of the broker's that
says why there will be none (`why`). `last`: no other reply follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, Final, NamedTuple

from malamute_protocol.address import NAME_BYTES_MAX
from malamute_protocol.batch import Batch
from malamute_protocol.commands import CancelRequest, Confirm, Level, Request, Welcome
from malamute_protocol.errors import BrokerRefused, LocalProtocolError, MalamuteError, Timeout
from malamute_py.client.arguments import text
from malamute_py.client.session.events import Confirmed, Event, Inner, Settled
from malamute_py.client.session.inbox_options import InboxOptions
from malamute_py.client.session.lanes import OVER, QUEUED, SENT, Lane
from malamute_py.client.session.letters import (
    COMPLETED,
    NO_ANSWER,
    HandoutBatch,
    Reply,
    RequestFailed,
    chosen,
    ranges_of,
    rows_of,
)
from malamute_py.client.session.mailboxes import OpenedMailbox, OpenedMailboxes
from malamute_py.client.session.outbox import KeyedBatch, Outbox
from malamute_py.client.session.outgoing import CommandSink
from malamute_py.client.session.rows import OutgoingRow

_ENDED_MAX: Final = 4096
"""Keys of answered requests that are remembered: a reply may come a second time."""


_NOTICE_MS: Final = 60_000
"""Time for which the broker's notice is awaited after the callers' time is over."""


class Terms(NamedTuple):
    """The terms of requests that most requests leave out."""

    need_workers: bool = False
    delay_ms: int = 0
    """Time before which no worker gets them, from when the broker took them."""
    priority: int = 0


PLAIN: Final = Terms()


class _GivenUp(Inner):
    """Stands for a caller that waits no longer."""

    def answered(self, outcome: Any) -> None:
        """Drop the answer."""


_GIVEN_UP: Final = _GivenUp()
_OWN_MAILBOX: Final = ""
"""`reply_to` of most requests: the one empty string that Python keeps needs no other look."""


class Replies:
    """Several replies to one request, in the order of their arrival."""

    __slots__ = ("ended", "error", "queue")

    def __init__(self) -> None:
        self.queue: deque[Reply] = deque()
        self.ended = False
        """Whether the last reply has come."""
        self.error: MalamuteError | None = None
        """Why no last reply comes; None: it may still come."""


class OutgoingRequests(KeyedBatch):
    """Requests to one service, until each of them is answered."""

    __slots__ = (
        "awaited", "epoch", "inbox", "kind", "left", "reply_to", "terms", "timeout_ms", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        lane: Lane[Any],
        level: int,
        awaited: AwaitedReplies,
        reply_to: str,
        timeout_ms: int,
        inbox: OpenedMailbox | None,
        terms: Terms,
    ) -> None:
        """inbox: where the replies come; None: no caller here waits for them.

        awaited: the session's requests that wait for replies. reply_to: mailbox of the replies;
        empty: the client's own.
        """
        super().__init__(lane, level)
        self.one_by_one = False  # a batch leaves while the one before may still be refused
        self.awaited = awaited
        self.reply_to = reply_to
        self.timeout_ms = timeout_ms
        self.inbox = inbox
        self.terms = terms
        self.kind = level, timeout_ms, reply_to, inbox, terms
        """Terms that all requests of one batch share."""
        self.tokens: list[Any] = []
        """Callers by row, from when the batch leaves; None: the row was answered."""
        self.left = 0
        """Requests that left and are not answered."""
        self.epoch = -1
        """Epoch of the journal that has the requests, as their CONFIRM says; -1: none came."""

    def confirmed(self, confirm: Confirm) -> None:
        """Take the CONFIRM; the content is kept if a later link may have to send it again."""
        self.epoch = confirm.epoch
        self.lane.owner.confirmed(self, confirm, keep=self._may_be_lost(confirm))

    def _may_be_lost(self, confirm: Confirm) -> bool:
        """Whether requests or their replies may be lost yet, so that a later link sends them again.

        A power loss takes back what was only stored, and a temporary mailbox ends with the broker
        or a while after its link; the REQUEST that comes again by its key is queued anew, or the
        broker says what became of its reply. Without an inbox no caller here waits for replies.
        """
        if self.inbox is None or not self.left:
            return False
        return self.is_fleeting or confirm.level < Level.SYNCED

    @property
    def is_fleeting(self) -> bool:
        """Whether the replies come into a temporary mailbox, whose name begins with ~.

        The own mailbox of a client without an identity is one.
        """
        return not (self.reply_to or self.awaited.has_mailbox) or self.reply_to.startswith("~")

    @property
    def answered_otherwise(self) -> bool:
        """Whether replies settle the batch, where no caller asked for a confirm."""
        return self.inbox is not None

    def empty_like(self) -> OutgoingRequests:
        """Make an empty batch for the same place and terms, which part() fills."""
        return OutgoingRequests(
            self.lane, self.level, self.awaited, self.reply_to, self.timeout_ms, self.inbox,
            self.terms,
        )  # fmt: skip

    def send(self, out: CommandSink, tracker: int) -> None:
        """Hand over REQUEST, with the content; its CONFIRM or REFUSED comes by the tracker."""
        out.put(
            Request(
                self.lane.place,
                tracker,
                self.reply_to,
                self.timeout_ms,
                self.level,
                self.key,
                self.terms.need_workers,
                self.terms.delay_ms,
                self.terms.priority,
            ),
            self.content,
        )

    def encode(self) -> None:
        """Make the content, draw a key, and await the replies: the batch leaves first.

        Raises whatever a row raises that cannot be encoded.
        """
        super().encode()
        self.await_replies()

    def await_replies(self) -> None:
        """Await the replies under the batch's key from now on, by row; called once it has a key."""
        if self.inbox is not None and not self.tokens:
            self.tokens = [row.token for row in self.rows]
            self.left = len(self.tokens)
            self.awaited.asked[self.key] = self

    @property
    def forgotten(self) -> bool:
        """Whether nothing is to be done when its time is over: its deadline may be dropped."""
        return self.state == OVER and not self.left

    def live_rows(self) -> list[OutgoingRow]:
        """Return the rows whose callers wait for a reply."""
        if not self.tokens:
            return super().live_rows()
        waiting = zip(self.rows, self.tokens, strict=True)
        return [row for row, token in waiting if token is not None and token is not _GIVEN_UP]

    def replaced(self, parts: list[Any]) -> None:
        """Make the callers wait for the replies of the batch's parts, which leave instead of it.

        Of its requests that are in no part, as their callers gave up, no reply is awaited any more.
        """
        if self.inbox is None:
            return
        kept = 0
        for part in parts:
            assert isinstance(part, OutgoingRequests)
            kept += len(part.rows)
            for row in part.rows:
                self.awaited.batches[row.token] = part
        # Before a batch has left, give_up() has counted those.
        dropped = self.left - kept if self.tokens else 0
        self.awaited.await_no_more(self, dropped)

    def settle(self, outcome: Confirm | MalamuteError) -> None:
        """Fail the callers by an error; after a CONFIRM they go on waiting for their replies."""
        if self.inbox is None:  # they wait for the CONFIRM alone
            self.lane.owner.emit(Confirmed([row.token for row in self.rows], outcome))
        elif isinstance(outcome, MalamuteError):
            self.awaited.failed(self, outcome)

    def given_up(self) -> None:
        """Fail the callers whose time is over; wake() of the outbox calls it."""
        if self.inbox is None:
            super().given_up()
            return
        self.awaited.timed_out(self)


class AwaitedReplies:
    """The requests of a session that wait for replies, and the way of each reply to its caller.

    A mailbox hands over what comes into it (mailboxes.ReplyRoute).
    """

    def __init__(
        self,
        outbox: Outbox,
        ask: Callable[[Callable[[int], Any], Any], Any],
        arrived: Callable[[Any], None],
        emit: Callable[[Event], None],
    ) -> None:
        """ask: sends the command that the maker returns; its answer goes to the token's answered().

        arrived: has a caller that iterates look at its Replies. emit: takes the events that settle
        callers.
        """
        self.asked: dict[bytes, OutgoingRequests] = {}
        """Batches that have left and are not answered whole, by their key."""
        self.batches: dict[Any, OutgoingRequests] = {}
        """Batch in which a caller's request is, by the caller's token."""
        self.has_mailbox = False
        """The client has an identity, and so a mailbox that outlives the broker's process."""
        self._outbox = outbox
        self._ask = ask
        self._arrived = arrived
        self._emit = emit
        self._ended: dict[bytes, None] = {}
        """Keys of answered batches: a reply that comes again is known by its key, and dropped."""

    # --- replies -------------------------------------------------------------------------------

    def route(self, delivered: HandoutBatch, left: Batch, inbox: OpenedMailbox) -> Batch | None:
        """Give replies among delivered mail to the callers that wait for them.

        left: the rows of the delivery that no reader had before. Returns those that are no awaited
        replies, which are mail for readers; None: there are none.
        """
        whole = left is delivered.batch
        if whole and all(key in self.asked for key, _, _ in delivered.about):
            # Almost always: all rows are awaited replies, and need not be sorted one by one.
            self._hand_over(delivered, left, delivered.about)
            inbox.reply_taken(ranges_of(left), delivered.command.last)
            return None
        mine, others = [], []
        known = self.asked
        for row in rows_of(left):
            # Of an answered request (`_ended`) a reply may come again: _hand_over() drops it.
            key, _ = delivered.about_of(row) or (None, 0)  # None: the row is no reply
            if key is not None and (key in known or key in self._ended):
                mine.append(row)
            else:
                others.append(row)
        if not mine:
            return left
        taken = chosen(left, mine)
        # Each of these replies is a run of one request.
        named = [delivered.about_of(row) for row in mine]
        self._hand_over(delivered, taken, [(*request, 1) for request in named if request])
        inbox.reply_taken(ranges_of(taken), delivered.command.last)
        return chosen(left, others) if others else None

    def route_unreadable(self, command: Any, reason: str) -> bool:
        """Fail the requests whose replies cannot be read, as their batch is damaged.

        command: the MAIL that had them. Returns False, with nothing done, when not all of them are
        replies that this client awaits, or has had.
        """
        if not all(key in self.asked or key in self._ended for key, _, _ in command.about):
            return False
        failures = self._failures(f"unreadable: {reason}", command.about)
        self._settle_replies(command, failures, command.about)
        return True

    def _hand_over(self, delivered: HandoutBatch, batch: Batch, about: Any) -> None:
        """Give replies to their callers; a reply that says why there is no answer is an error.

        about: (key of a request's batch, its first row, how many) for the replies in order.
        """
        command = delivered.command
        # A Reply of each row, made as it is asked for.
        replies: Iterator[Any] = map(Reply, repeat(batch), rows_of(batch), repeat(delivered))
        if command.why and command.why != COMPLETED:  # notices: no reply will come
            replies = self._failures(command.why, about)
        self._settle_replies(command, replies, about)

    def _failures(self, why: str, about: Any) -> Iterator[MalamuteError]:
        """Yield an error in place of each reply: their callers get these from _settle_replies.

        why: of the MAIL, or what was wrong with it. about: (key of a batch of requests, row of the
        first, how many) for the replies in order.
        """
        for key, _, count in about:
            batch = self.asked.get(key)
            service = "" if batch is None else batch.lane.place
            for _ in range(count):
                yield _failure(why, service)

    def _settle_replies(self, command: Any, replies: Iterator[Any], about: Any) -> None:
        """Give each request that is awaited its reply, or the error in its place.

        about: the requests, as runs of (key of their batch, row of the first, how many), in the
        order of `replies`. Replies to requests that are answered or given up are dropped.
        """
        pairs: list[tuple[Any, Any]] = []
        # A notice that says why there will be no reply ends the request as a last reply does.
        last, why = command.last or command.why, command.why
        batches = self.batches
        for key, first, count in about:
            batch = self.asked.get(key)
            tokens = [] if batch is None else batch.tokens
            answered = 0
            for row in range(first, first + count):
                reply = next(replies)
                token = tokens[row] if row < len(tokens) else None
                if token is None:
                    continue
                if last:
                    tokens[row] = None
                    answered += 1
                if token is _GIVEN_UP:
                    continue
                if type(token) is Replies:
                    # `completed` only says that no other follows: it is no reply.
                    self._push(token, None if why == COMPLETED else reply, last)
                    if last:
                        del batches[token]
                else:
                    # A caller that waits for one reply gets the first.
                    pairs.append((token, reply))
                    del batches[token]
                    if not last:
                        tokens[row] = _GIVEN_UP  # what follows is of no use to it
            if batch is not None and answered:
                batch.left -= answered
                self._answered(batch, answered)
        if pairs:
            self._emit(Settled(pairs))

    def _push(self, replies: Replies, reply: Any, last: Any) -> None:
        """Add a reply, or the error in its place, to those that an iterating caller takes.

        reply: None: none, as a worker completed the request without a further one. last: true if no
        other follows.
        """
        if isinstance(reply, MalamuteError):
            replies.error = reply
        elif reply is not None:
            replies.queue.append(reply)
        if last:
            replies.ended = True
        self._arrived(replies)

    def _answered(self, batch: OutgoingRequests, count: int) -> None:
        """Count requests of a batch as answered; one that is answered whole is forgotten."""
        assert batch.inbox is not None
        batch.inbox.await_fewer(count)  # with none awaited, it may be closed
        if not batch.left:
            del self.asked[batch.key]
            self._remember(batch.key)
            self._outbox.answered(batch)

    def _remember(self, key: bytes) -> None:
        """Remember the key of an answered batch, so that a reply that comes again is known."""
        self._ended[key] = None
        if len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    # --- ends ----------------------------------------------------------------------------------

    def tell_all(self, tokens: list[Any], error: MalamuteError) -> None:
        """Give the error to those of these callers that still wait, and forget where they wait."""
        pairs = []
        for token in tokens:
            if token is None or token is _GIVEN_UP:
                continue
            self.batches.pop(token, None)
            if type(token) is Replies:
                token.error, token.ended = error, True
                self._arrived(token)
            else:
                pairs.append((token, error))
        if pairs:
            self._emit(Settled(pairs))

    def failed(self, batch: OutgoingRequests, error: MalamuteError) -> None:
        """Fail the callers of a batch: it was refused, or the session or the inbox has ended."""
        if batch.tokens:
            self.tell_all(batch.tokens, error)
            self.await_no_more(batch, batch.left)
        else:
            # It has not left: its rows have the callers, and its key is not in the tables.
            waiting = [row.token for row in batch.rows]
            self.tell_all(waiting, error)
            self.await_no_more(batch, sum(token is not None for token in waiting))

    def await_no_more(self, batch: OutgoingRequests, count: int) -> None:
        """Count requests of a batch whose replies no caller awaits any more.

        count: how many of them its inbox still counts as waiting. A batch that was sent is
        forgotten as a whole; a reply that comes is known by its key for a while, and dropped.
        """
        if batch.tokens:
            batch.tokens, batch.left = [], 0
            if self.asked.get(batch.key) is batch:
                del self.asked[batch.key]
                self._remember(batch.key)
            if batch.state == OVER:  # confirmed, and kept only to be sent again
                batch.rows, batch.content = [], b""
        assert batch.inbox is not None
        batch.inbox.await_fewer(count)

    def timed_out(self, batch: OutgoingRequests) -> None:
        """Fail the callers of a batch, whose time is over.

        The broker's notice that the requests have expired is awaited a while longer (_NOTICE_MS),
        so that it is known when it comes. Called once more after that, it forgets the batch.
        """
        delay_ms = batch.terms.delay_ms
        since = f" after a delay of {delay_ms} ms" if delay_ms else ""
        error = Timeout(
            f"no answer from service {batch.lane.place!r} within {batch.timeout_ms} ms{since}; "
            f"{self._outbox.standing()}"
        )
        if not batch.tokens:
            # It has not left yet, or is over: there is nothing to cancel.
            if batch.state == QUEUED:
                self.failed(batch, error)
            return
        waiting, batch.tokens = (
            batch.tokens,
            [None if token is None else _GIVEN_UP for token in batch.tokens],
        )
        self.tell_all(waiting, error)
        batch.thin = True
        if batch.state == QUEUED:
            # The batch waits to be sent again, since the link went or it was refused, and will not
            # be. The broker may have it.
            service, key = batch.lane.place, batch.key
            self._ask(lambda number: CancelRequest(number, service, key), _GIVEN_UP)
            self.await_no_more(batch, batch.left)
        elif _still_waits(waiting):
            self._outbox.look_again(batch, _NOTICE_MS)
        else:
            # All had given up before, and no notice has come since: it is awaited no longer.
            self.await_no_more(batch, batch.left)
            if batch.state == SENT:
                self._outbox.answered(batch)

    def inbox_failed(self, inbox: OpenedMailbox, error: MalamuteError) -> None:
        """Fail the requests whose replies come into a mailbox that can no longer be read.

        Those that have not left are in `batches` alone, those given up may be in `asked` alone.
        """
        for batch in {*self.batches.values(), *self.asked.values()}:
            if batch.inbox is inbox:
                self.failed(batch, error)
                self._outbox.answered(batch)

    def link_up(self, welcome: Welcome) -> None:
        """Send confirmed requests again that a broker may have lost, or whose replies it may have.

        Requests without a CONFIRM are sent again by their lane.
        """
        self.has_mailbox = bool(welcome.identity)
        for batch in list(self.asked.values()):
            was_confirmed_and_kept = batch.state == OVER and batch.content
            if not was_confirmed_and_kept or not _still_waits(batch.tokens):
                continue
            # The epoch rises when the log is opened again, which may have lost what was stored.
            if batch.is_fleeting or batch.epoch != welcome.epoch:
                self._outbox.send_again(batch)

    def disown(self, error: MalamuteError) -> None:
        """Fail requests that the broker has, as a new link has another identity.

        Their replies go into the mailbox of the former one. What is under way or waits to leave
        (state not OVER) is the outbox's, which fails what the broker may have.
        """
        for batch in list(self.asked.values()):
            if not batch.reply_to and batch.state == OVER:
                self.failed(batch, error)

    def cancelled(self, batch: OutgoingRequests, row: int, count: int) -> None:
        """Forget a request of a batch that its caller gave up, as CANCEL_REQUEST was answered.

        count: 1: the broker has cancelled it, and no reply comes; 0: it was over already, or the
        command was refused. Its reply may be under way then: a batch of which no caller waits is
        kept for a while, so that its key is known.
        """
        if not batch.tokens or batch.tokens[row] is not _GIVEN_UP:
            return
        if count or _still_waits(batch.tokens):
            batch.tokens[row] = None
            batch.left -= 1
            self._answered(batch, 1)
        elif not batch.until_ms:  # else timed_out() forgets it in time
            self._outbox.look_again(batch, _NOTICE_MS)


class PendingRequests:
    """The requests of a session on their way to services, and what their callers ask of them."""

    def __init__(
        self,
        outbox: Outbox,
        mailboxes: OpenedMailboxes,
        awaited: AwaitedReplies,
        ask: Callable[[Callable[[int], Any], Any], Any],
    ) -> None:
        """ask: as of AwaitedReplies. mailboxes: has the inboxes into which replies come."""
        self.services: dict[Any, Lane[KeyedBatch]] = {}
        """Lane of each service."""
        self._outbox = outbox
        self._mailboxes = mailboxes
        self._awaited = awaited
        self._ask = ask
        outbox.homes.append(self.services)

    def request(
        self,
        service: str,
        row: OutgoingRow,
        level: int,
        *,
        reply_to: str = "",
        timeout_ms: int = 0,
        key: bytes = b"",
        until_ms: int = 0,
        waits: bool = True,
        terms: Terms = PLAIN,
    ) -> None:
        """Put one request on its way; its token gets the reply.

        It joins the last batch of the service's lane if that agrees in all but the request itself.
        waits: False: its token gets the confirm, and replies stay mail. until_ms: when its
        caller gives it up; 0: never. key: the caller's own: the request then leaves alone.
        Raises LocalProtocolError `too_large`, `conflict` (the key is in use), or what ended
        the session.
        """
        outbox = self._outbox
        if reply_to is not _OWN_MAILBOX:
            text("reply_to", reply_to, NAME_BYTES_MAX)
        lane = self.services.get(service) if type(service) is str else None
        if lane is None or outbox.fatal is not None:
            lane = outbox.lane(self.services, service, "service")
        inbox: OpenedMailbox | None = None
        if waits:
            if key and key in self._awaited.asked:
                raise LocalProtocolError("conflict", "a request with this key waits already")
            inbox = (
                self._mailboxes.get(InboxOptions(reply_to))
                if reply_to
                else self._mailboxes.own_inbox()
            )
        queue = lane.queue
        last = queue[-1] if queue else None
        if (
            type(last) is not OutgoingRequests
            or key
            or last.kind != (level, timeout_ms, reply_to, inbox, terms)
            or not outbox.join(last, row, until_ms)
        ):
            outbox.check(row)
            last = OutgoingRequests(lane, level, self._awaited, reply_to, timeout_ms, inbox, terms)
            outbox.start(last, row, key, until_ms)
        if inbox is not None:
            inbox.waiting += 1  # requests that keep the inbox open
            inbox.for_replies = True
            self._awaited.batches[row.token] = last
            if key:
                last.await_replies()  # its reply may come before the batch leaves
            if inbox.queue:
                if key:
                    # Its reply may be among the mail that waits, of an earlier process's call.
                    inbox.sort_again()
                # Unread mail must not use up the credit that the reply needs.
                self._mailboxes.look_at(inbox)

    def give_up(self, token: Any) -> None:
        """Take a caller's request back, or cancel it: the caller waits no longer."""
        batch = self._awaited.batches.pop(token, None)
        if batch is None:
            return
        if batch.tokens:
            # The batch has left: the broker may have the request.
            row = batch.tokens.index(token)
            batch.tokens[row] = _GIVEN_UP
            batch.thin = True
            if batch.state == QUEUED and batch.content and not batch.doubtful:
                # It was refused: the broker has nothing to cancel, and the row is not sent again.
                self._outbox.thin_out(batch)
                return
            service, key = batch.lane.place, batch.key
            self._ask(
                lambda number: CancelRequest(number, service, key, row),
                _Cancel(self._awaited, batch, row),
            )
            return
        # The batch has not left: the row is left out when it does.
        next(row for row in batch.rows if row.token is token).token = None
        batch.thin = True
        self._awaited.await_no_more(batch, 1)
        if not batch.live_rows():
            self._outbox.withdraw(batch)


class _Cancel(Inner):
    """Token of a CANCEL_REQUEST for one row of a batch: its answer comes here."""

    def __init__(self, awaited: AwaitedReplies, batch: OutgoingRequests, row: int) -> None:
        self._awaited = awaited
        self._batch = batch
        self._row = row

    def answered(self, outcome: Any) -> None:
        """Take the value of RESULT, which has the count of cancelled requests, or an error.

        A refusal has cancelled none. Another error ended the session, and all that waited with it.
        """
        if not isinstance(outcome, MalamuteError):
            self._awaited.cancelled(self._batch, self._row, outcome.get("count", 0))
        elif isinstance(outcome, BrokerRefused):
            self._awaited.cancelled(self._batch, self._row, 0)


def _still_waits(tokens: list[Any]) -> bool:
    """Whether some caller among these still waits: neither answered nor given up."""
    return any(token is not None and token is not _GIVEN_UP for token in tokens)


def _failure(why: str, service: str) -> MalamuteError:
    """Return the error for the caller of a request that gets no reply, by the notice's `why`."""
    if why.partition(":")[0] == NO_ANSWER:
        return Timeout(f"no answer from service {service!r} within the request's time")
    return RequestFailed(why, service)
