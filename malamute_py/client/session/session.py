"""The client's half of the protocol, without sockets, clock or randomness.

Owns the link's state, heartbeats, retries, requests, and what has to be restored after a
reconnect. What is opened under a number (receiver.py) and what leaves and is confirmed
(outgoing.py) own their parts. The rule: messages and the time go in, messages, events and
the time of the next wake come out; a shell does the rest. Source: SPEC.md, sections 2, 4
and 8.

Words: a link is one connection, from HELLO to its end. `outgoing` are the senders: what gathers
calls, sends them and takes the answers. `opened` is a subscription, inbox, offer or membership, and
its number is what commands of the broker name it by. A token is the object at which a caller waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from malamute_protocol import commands as wire
from malamute_protocol.address import is_template, replica_number
from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    MalamuteError,
    ProtocolError,
    RemoteProtocolError,
    RevisionConflict,
)
from malamute_protocol.framing import NUMBERS, decode_message, reference_of
from malamute_protocol.link import Link, Side
from malamute_protocol.version import VERSIONS, Feature
from malamute_py.client.session.attempts import Attempts, LinkState
from malamute_py.client.session.events import (
    Arrived,
    Closed,
    Connect,
    Disconnect,
    Event,
    Linked,
    Unlinked,
    Warned,
    Watched,
)
from malamute_py.client.session.joined_groups import Memberships
from malamute_py.client.session.mailboxes import MailboxView, OpenedMailboxes
from malamute_py.client.session.memberships import Membership
from malamute_py.client.session.messages import OutgoingMessages
from malamute_py.client.session.offering import Offering
from malamute_py.client.session.offerings import Offerings
from malamute_py.client.session.outbox import Outbox
from malamute_py.client.session.outgoing import RETRYABLE, Outgoing, Trackers, Window
from malamute_py.client.session.pending import PendingCommands
from malamute_py.client.session.publisher import Publisher
from malamute_py.client.session.receiver import Opened
from malamute_py.client.session.receivers import Receivers
from malamute_py.client.session.requests import AwaitedReplies, PendingRequests, Replies
from malamute_py.client.session.step import Step
from malamute_py.client.session.steps import Steps
from malamute_py.client.session.subscription import SubscribeOptions, SubscriptionState
from malamute_py.client.session.suspects import BLAMED, Suspects
from malamute_py.client.settings import ClientSettings

_FINAL_CODES: Final = frozenset(
    {"unauthenticated", "forbidden", "version", "fenced", "kicked", "bad_name"}
)
"""Codes that trying again cannot cure."""
_UNPROMISED: Final = {NUMBERS[each] for each in (wire.Publish, wire.UpdateKey, wire.Send)}
_TRACKED: Final = frozenset(
    NUMBERS[command]
    for command in (
        wire.Publish, wire.UpdateKey, wire.Send, wire.Request, wire.Reply, wire.AckMail,
        wire.AckWork, wire.AckRecords, wire.MoveCursor, wire.Trim, wire.PurgeSubjects,
        wire.BeginTransaction, wire.Stage, wire.CommitTransaction, wire.RollBackTransaction,
        wire.Atomic,
    )
)  # fmt: skip
"""Commands that CONFIRM answers and whose refusal names their tracker."""
_OPENING: Final = frozenset(
    NUMBERS[command] for command in (wire.Subscribe, wire.OpenInbox, wire.Offer, wire.JoinGroup)
)
"""Commands that SUBSCRIBED answers and whose refusal names their subscription."""
_OF_RECEIVERS: Final = (
    wire.Subscribed, wire.Ended, wire.Deliver, wire.Cover, wire.Gap, wire.Rewound, wire.Mode,
    wire.Schema, wire.Mail, wire.Work,
)  # fmt: skip
"""Commands from the broker that name what was opened."""
_OF_OPENED: Final = _OPENING | {NUMBERS[wire.Credit], NUMBERS[wire.Unsubscribe]}
"""Commands whose refusal names what was opened."""
_BYE_REASON_MAX: Final = 200
"""Characters of a reason: it may quote what the broker sent."""

Kind = TypeVar("Kind", bound=Opened)


class Session:
    """One client over all its links."""

    def __init__(
        self, settings: ClientSettings, random: Callable[[int], bytes], now_ms: int
    ) -> None:
        """random: n -> n random bytes. now_ms: time of any clock that never goes back."""
        self.settings = settings
        self.state = LinkState.WAITING
        self.id = random(16)
        self.welcome: wire.Welcome | None = None
        self.trackers = Trackers()
        self.window = Window(settings.window_bytes)
        self.pending = PendingCommands(self.emit)
        self.publisher = Publisher(
            settings,
            self.pending.next_number,
            self.trackers,
            self.window,
            self.emit,
            self._others_wait,
        )
        self.outbox = Outbox(
            settings, random, self.trackers, self.window, self.emit, self._standing_now
        )
        self.attempts = Attempts(settings, random, now_ms)
        self._arrived: dict[Watched, None] = {}  # what take_events() tells as Arrived
        self.receivers = Receivers(self._arrived, settings.retry_min_ms)
        self.consumed = self.receivers.consumed
        """Note that something was taken from what was opened; True: send CREDIT soon."""
        self.awaited = AwaitedReplies(self.outbox, self.request, self.arrived, self.emit)
        self.mailboxes = OpenedMailboxes(
            self.awaited, self.trackers, self.emit, self.open, self.receivers.end, self.arrived
        )
        self.identity = "" if is_template(settings.identity) else settings.identity
        """As the newest link has it; before the first, the one asked for."""
        self.mailboxes.own = self._own_names()
        self.requests = PendingRequests(self.outbox, self.mailboxes, self.awaited, self.request)
        self.offerings = Offerings(
            self.outbox,
            self.trackers,
            self.emit,
            self.open,
            self.receivers.credit_later,
            self.arrived,
            self._broker_ms,
        )
        self.memberships = Memberships(
            self.trackers, self.emit, self.open, self.receivers.end, self.consumed, self.arrived
        )
        self.steps = Steps(settings, random, self.trackers, self.window, self.emit)
        self.outgoing: list[Outgoing] = [
            self.publisher, self.outbox, self.mailboxes, self.offerings,
            self.memberships, self.steps,
        ]  # fmt: skip
        """All that send contents or commands that are confirmed; one that the window holds back
        goes first the next time."""
        self.error: MalamuteError | None = None
        self._suspects = Suspects()
        self._deadline_ms = now_ms  # of the attempt to link that is under way
        self._heard_ms = now_ms  # when the broker was heard last
        self._sent_ms = now_ms  # when something was sent last
        self._now_ms = now_ms  # the newest time that a call has told
        self._clock_ahead_ms = 0
        """Lead of the broker's clock over the client's."""
        self._link = Link(Side.CLIENT)
        self._transport: Connect | Disconnect | None = None  # wish that the shell takes once
        self._commands: list[wire.Command] = []
        """To be sent before anything else, in order."""
        self._events: list[Event] = []
        self._messages = OutgoingMessages()
        self._handlers: dict[type[wire.Command], Callable[[Any, Sequence[Any]], None]] = {
            wire.Welcome: self._on_welcome,
            wire.Ping: self._on_ping,
            wire.Pong: self._on_pong,
            wire.Bye: self._on_bye,
            wire.Refused: self._on_refused,
            wire.Result: self._on_result,
            wire.Confirm: self._on_confirm,
        }
        for kind in _OF_RECEIVERS:
            self._handlers[kind] = self.receivers.receive
        self.wake(now_ms)

    # --- the link ----------------------------------------------------------------------

    def wake(self, now_ms: int) -> None:
        """Do what is due by time: an attempt to link, a heartbeat, giving a silent broker up.

        The senders do theirs, suspects are cleared once the link has lasted, and receivers are
        opened that the broker put off or the link began without. The shell calls receive() with
        what has come before it calls this, so that a broker that was heard is not taken for silent.
        """
        self._now_ms = now_ms
        for outgoing in self.outgoing:
            outgoing.wake(now_ms)
        if self.state is LinkState.WAITING and now_ms >= self.attempts.retry_at_ms:
            self.state = LinkState.CONNECTING
            self._deadline_ms = now_ms + self.settings.attempt_ms
            self._transport = Connect(self.attempts.next_endpoint())
            self._link = Link(Side.CLIENT)
            hello = wire.Hello(
                VERSIONS, self.id, self.settings.identity, self.settings.software,
                self.settings.heartbeat_ms, int(Feature.TYPED), self._former_number(),
            )  # fmt: skip
            self._commands = [hello]
        elif self.state is LinkState.CONNECTING and now_ms >= self._deadline_ms:
            self.lost("silent", "no answer to HELLO within the time of one attempt", now_ms)
        elif self.state is LinkState.LINKED:
            assert self.welcome is not None
            if now_ms - self._heard_ms >= self.welcome.expiry_ms:
                self.lost("silent", "the broker was not heard within the expiry time", now_ms)
                self._commands = [wire.Bye("silent", "you were not heard within the expiry time")]
            elif now_ms - self._sent_ms >= self._heartbeat_ms:
                self._commands.append(wire.Ping())
                # Not only when it leaves: a socket that takes nothing must gather no PINGs.
                self._sent_ms = now_ms
            self._suspects.wake(now_ms - self.attempts.linked_ms)
            if self.receivers.again or self.receivers.left_out:
                self._commands += self.receivers.reopenings(now_ms)

    def _former_number(self) -> int:
        """Return the number that a replica had on its last link, for HELLO to ask for; -1: none.

        The identity that was asked for is then a template such as web-{n}, of which the broker
        gives each client one number.
        """
        template = self.settings.identity
        if not self.identity or not is_template(template):
            return -1
        return replica_number(template, self.identity)

    def _own_names(self) -> frozenset[str]:
        """Return the names that mean the client's own mailbox: a temporary one, its identity."""
        return frozenset({f"~{self.id.hex()}", self.identity} - {""})

    @property
    def _heartbeat_ms(self) -> int:
        """Time without sending after which a PING leaves: as set, else as the broker asks for."""
        assert self.welcome is not None
        return self.settings.heartbeat_ms or self.welcome.heartbeat_ms

    def _talking(self) -> bool:
        """Whether a link is open, or HELLO under way: then messages of the broker count."""
        return self.state is LinkState.LINKED or self.state is LinkState.CONNECTING

    def next_wake(self) -> int | None:
        """Return by when the shell is to call wake() and take_outgoing() next; None: no need."""
        if self.state is LinkState.WAITING:
            at = self.attempts.retry_at_ms
        elif self.state is LinkState.CONNECTING:
            at = self._deadline_ms
        elif self.state is LinkState.CLOSED:
            return None
        else:  # LINKED
            assert self.welcome is not None
            at = min(
                self._heard_ms + self.welcome.expiry_ms, self._sent_ms + self._heartbeat_ms
            )  # fmt: skip
            if self.receivers.again or self.receivers.left_out:
                at = min([at, *self.receivers.reopen_times()])
        for outgoing in self.outgoing:
            wake = outgoing.next_wake()
            if wake is not None and wake < at:
                at = wake
        return at

    def lost(
        self, code: str, reason: str, now_ms: int, *, final: bool = False, retry_ms: int = 0
    ) -> None:
        """End the link: the transport or the broker failed; another attempt follows.

        code, reason: why. final: trying again cannot cure it, and the session ends. retry_ms: the
        shortest pause that the broker asked for.
        """
        self._now_ms = now_ms
        if self.state is LinkState.CLOSED or (self.state is LinkState.WAITING and not final):
            return
        was_linked = self.state is LinkState.LINKED
        if final:
            self._close(ConnectionLost(reason) if code == "closed" else BrokerRefused(code, reason))
            return
        line = self.attempts.failed(
            f"{code}: {reason}",
            now_ms,
            was_linked=was_linked,
            retry_ms=retry_ms,
            unanswered=self.unanswered,
        )
        self._log_of_link(line)
        self.state = LinkState.WAITING
        self._suspects.link_down()
        self._transport = Disconnect()
        self._commands = []
        self.trackers.clear()  # answers name what was sent on their own link alone
        self.window.link_down()
        for outgoing in self.outgoing:
            outgoing.link_down()
        self.receivers.link_down()
        self.pending.link_down(reason)  # fails those that must not be sent twice
        self._events.append(Unlinked(code, reason, self.attempts.retry_at_ms, was_linked))

    def close(self) -> None:
        """End the session, as the program asks; what is unconfirmed fails with ConnectionLost."""
        if self.state is not LinkState.CLOSED:
            if self.state is LinkState.LINKED:
                self._commands.append(wire.Bye())
            self._close(None)

    def abandon(self, error: Exception) -> None:
        """End at once because of a defect of the client: no caller is left waiting for ever."""
        if self.state is not LinkState.CLOSED:
            self._close(BrokerRefused("internal", f"the client failed: {error!r}"))

    def _close(self, error: MalamuteError | None) -> None:
        """End the session for good, and answer all that waits.

        error: what ended it. None: the program closed it; its BYE still leaves, and receivers end
        without an error.
        """
        self.state = LinkState.CLOSED
        self.error = error
        self._transport = Disconnect()
        if error is not None:
            self._commands = []
        cause = error or ConnectionLost("the client is closed")
        for outgoing in self.outgoing:
            outgoing.fail_all(cause)
        self.receivers.end_all(error)
        self.pending.fail_all(cause)
        self._events.append(Closed(error))

    def _log_of_link(self, line: str | None) -> None:
        """Have a line about the link written to the log; None: none is due."""
        if line is not None:
            self._events.append(Warned(line, link=True))

    @property
    def links(self) -> int:
        """Links opened so far: one more than the reconnects."""
        return self.attempts.links

    @property
    def unanswered(self) -> int:
        """Commands that wait to leave, or for their answers."""
        return len(self.pending.by_number) + sum(outgoing.unanswered for outgoing in self.outgoing)

    def _standing_now(self) -> str:
        """Say as standing(), for senders, which have no time at hand."""
        return self.standing(self._now_ms)

    def standing(self, now_ms: int) -> str:
        """Say whether there is a link and the broker takes what is sent, else why not."""
        return self.attempts.standing(self.state, now_ms)

    # --- what the caller asks for ----------------------------------------------------------

    def request(self, make: Callable[[int], wire.Command], token: Any) -> wire.Command:
        """Send a command that a RESULT answers, made by `make(number)`; Answered has the token.

        It is sent again after a reconnect, unless repeating it could do harm. Returns the command.
        Raises what ended the session, or LocalProtocolError: an argument is wrong.
        """
        self._raise_if_closed()
        return self.pending.add(make, token)

    def give_up(self, token: Any) -> None:
        """Drop a command whose caller has stopped waiting for the answer: it is not sent again."""
        self.pending.give_up(token)

    def subscribe(self, request: SubscribeOptions) -> SubscriptionState:
        """Begin a subscription. Raises what ended the session."""
        return self.open(lambda number: SubscriptionState(number, request))

    def open(self, make: Callable[[int], Kind]) -> Kind:
        """Open what `make(number)` gives, on this link and every later one, until it ends.

        Raises what ended the session, or LocalProtocolError: an argument is wrong.
        """
        self._raise_if_closed()
        opened, command = self.receivers.open(make)
        if self.state is LinkState.LINKED:
            self._commands.append(command)
        return opened

    def memberships_of(self, stream: str, group: str) -> list[Membership]:
        """Return this client's memberships of a group, which verbs over the group wait for."""
        return [
            opened
            for opened in self.receivers.by_number.values()
            if isinstance(opened, Membership)
            and (opened.asked.stream, opened.asked.group) == (stream, group)
        ]

    def unsubscribe(self, opened: Opened) -> None:
        """End something that was opened; what its consumer has not taken is dropped."""
        opened.discard()
        if opened.ended or opened.ending or opened.number not in self.receivers.by_number:
            return
        opened.ending = True
        if self.state is LinkState.LINKED:
            self._commands.append(wire.Unsubscribe(opened.number))
        else:
            self.receivers.end(opened)

    def drop(self, watched: Watched | Step) -> None:
        """End, in order, something that no caller holds a reference to any more."""
        if isinstance(watched, Step):
            watched.give_up()
        elif isinstance(watched, MailboxView):
            self.mailboxes.close(watched)
        elif isinstance(watched, Offering):
            self.offerings.close(watched)
        elif isinstance(watched, Replies):
            self.requests.give_up(watched)
        elif isinstance(watched, Membership):
            self.memberships.leave(watched)
        elif isinstance(watched, Opened):
            self.unsubscribe(watched)

    def arrived(self, opened: Watched) -> None:
        """Have the shell wake the consumer of something opened, by the event Arrived."""
        self._arrived[opened] = None

    def emit(self, event: Event) -> None:
        """Put an event at the end of those that the shell takes next."""
        self._events.append(event)

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent and nothing is unconfirmed, as flush() waits for."""
        return all(outgoing.idle for outgoing in self.outgoing)

    def _raise_if_closed(self) -> None:
        """Raise what ended the session, once it has ended: no call is taken any more."""
        if self.state is LinkState.CLOSED:
            raise self.error or ConnectionLost("the client is closed")

    def _broker_ms(self) -> int:
        """Return the broker's clock, about, by which requests have their deadlines."""
        return self._now_ms + self._clock_ahead_ms

    # --- out -------------------------------------------------------------------------------

    def take_transport(self) -> Connect | Disconnect | None:
        """Return once whether the shell is to open or close its socket.

        The shell sends take_outgoing() before it does what Disconnect asks for.
        """
        wanted, self._transport = self._transport, None
        return wanted

    @property
    def batch_bytes(self) -> int:
        """Bytes that a batch of a bulk call, as send_many(), is filled to."""
        return self.publisher.batch_bytes

    @property
    def has_events(self) -> bool:
        """Whether something happened that take_events() has not told."""
        return bool(self._events or self._arrived)

    def take_events(self) -> list[Event]:
        """Events since the last call, in order."""
        if self._arrived:
            self._events.extend(map(Arrived, self._arrived))
            self._arrived.clear()
        events, self._events = self._events, []
        return events

    def _others_wait(self) -> bool:
        """Whether something else waits to leave: then the publisher holds no records back."""
        return (
            any(outgoing.waits for outgoing in self.outgoing if outgoing is not self.publisher)
            or self.pending.waits
        )

    def take_outgoing(self, now_ms: int) -> list[list[Any]]:
        """The messages to be sent now, in order, each a list of frames."""
        out = self._messages
        self._put_outgoing(now_ms, out)
        messages = out.finish()
        while out.unsendable:
            # A caller that asked for what cannot be sent is told; what that sets free leaves, too.
            unsendable, out.unsendable = out.unsendable, []
            for commands, error in unsendable:
                self._blame(commands, error)
            self._put_outgoing(now_ms, out)
            messages += out.finish()
        if messages:
            self._sent_ms = now_ms
        return messages

    def _put_outgoing(self, now_ms: int, out: OutgoingMessages) -> None:
        """Put what leaves in this turn into messages: the session's own commands first.

        CREDIT, the batches of all senders and the callers' commands follow, if there is a link.
        """
        suspicious = self._suspects.suspicious and self.state is LinkState.LINKED
        out.begin(self._suspects.suspect if suspicious else None)
        for command in self._commands:
            self._link.sent(command)
            out.put(command, None)
        self._commands.clear()
        if self.state is LinkState.LINKED:
            self.receivers.take(out)
            held_back = False
            for outgoing in list(self.outgoing):
                if any(outgoing.queues) and not outgoing.take(now_ms, out):
                    # The window holds it back: it goes first in the next turn.
                    self.outgoing.remove(outgoing)
                    self.outgoing.insert(0, outgoing)
                    held_back = True
            if self.window.unmarked_bytes and self.window.wants_mark(held_back=held_back):
                # The PONG to it says that the broker has read what was sent before: room again.
                probe = self._suspects.probe()
                self.window.mark(probe)
                out.put(wire.Ping(probe), None)
            # Last, so that an answer tells of what was asked for before it.
            self.pending.take(out)

    def _blame(self, commands: list[wire.Command], error: ProtocolError | BrokerRefused) -> None:
        """Fail a command, or a step with its parts, that can never be sent, and nothing else.

        No message can carry it, or the broker ended the link for it: its caller is told as by a
        REFUSED.
        """
        command = commands[0]  # of a step ATOMIC, whose tracker the caller waits for
        number = NUMBERS[type(command)]
        if type(command) is wire.Hello:
            self._close(BrokerRefused(error.code, error.reason))
            return
        reference = reference_of(command)  # tracker, request or subscription; 0: it has none
        opened = self.receivers.by_number.get(getattr(command, "subscription", 0))
        if opened is not None and (not reference or number in _OF_OPENED):
            self.receivers.fail(opened, BrokerRefused(error.code, error.reason))
            return
        if not reference:
            self.emit(Warned(f"{type(command).__name__} cannot be sent and is dropped: {error}"))
        # Without a reference, too: records that are published without a confirm count as refused.
        self._on_refused(wire.Refused(number, reference, error.code, error.reason), ())

    # --- in --------------------------------------------------------------------------------

    def receive(self, frames: Sequence[Any], now_ms: int) -> None:
        """Take one message that the shell has read; a malformed one ends the link, raising nothing.

        Without a link, or an attempt at one, it is of a former link, and dropped.
        """
        self._now_ms = self._heard_ms = now_ms
        if not self._talking():
            return
        try:
            for command, contents in decode_message(frames):
                self._link.received(command)  # raises where the protocol does not allow it now
                handler = self._handlers.get(type(command))
                if handler is None:
                    raise RemoteProtocolError(
                        "unsupported", f"{type(command).__name__} belongs to what was not asked for"
                    )
                handler(command, contents)
                if not self._talking():
                    return  # the command ended the link: what follows in the message is void
        except ProtocolError as error:
            self.lost(error.code, f"the broker broke the protocol: {error.reason}", now_ms)
            self._commands = [wire.Bye(error.code, error.reason[:_BYE_REASON_MAX])]

    def _on_welcome(self, command: wire.Welcome, _: Sequence[Any]) -> None:
        """Take up a new link: its limits, and all that has to be opened or sent again."""
        oldest, newest = VERSIONS
        if not oldest <= command.version <= newest:
            self.lost("version", f"the broker speaks {command.version}", self._now_ms, final=True)
            return
        self.state = LinkState.LINKED
        self.welcome = command
        self._messages.bound(command.message_commands_max)
        self._log_of_link(self.attempts.succeeded(self._now_ms, self.unanswered))
        self._clock_ahead_ms = command.now_ms - self._now_ms
        self.window.bytes_max = min(self.settings.window_bytes, command.window_bytes)
        if command.identity not in ("", self.identity):
            self._renamed(command.identity)
        for outgoing in self.outgoing:
            outgoing.link_up(command)
        self.awaited.link_up(command)
        self.receivers.limits = self.publisher.limits
        self.pending.link_up()
        self._commands += self.receivers.link_up()
        self._events.append(Linked(command, self.attempts.links == 1))

    def _renamed(self, identity: str) -> None:
        """Take up an identity that differs from that of the last link; fail what is under way.

        What was sent under the former identity may have been taken, and would be taken twice.
        """
        former, self.identity = self.identity, identity
        self.mailboxes.own = self._own_names()
        if not former:
            return  # it had none: a replica gets its first
        error = ConnectionLost(
            f"another client has the identity {former!r} now, and this one is {identity!r}: what "
            "was under way may have been done, and its answer goes to the other"
        )
        self._log_of_link(f"{error}; {self.unanswered} commands are looked at")
        self.publisher.disown(error)
        self.awaited.disown(error)
        self.outbox.disown(error)
        self.steps.disown(error)

    def _on_ping(self, command: wire.Ping, _: Sequence[Any]) -> None:
        """Answer the broker's PING, ahead of all else that leaves."""
        self._commands.append(wire.Pong(command.token))

    def _on_pong(self, command: wire.Pong, _: Sequence[Any]) -> None:
        """Clear commands of suspicion that the broker understood: they left before the PING."""
        # The PING of a heartbeat has the token 0, which clears nothing.
        self._suspects.cleared(command.token)
        self.window.reached(command.token)  # room for contents that no CONFIRM answers

    def _find_blamed(self, code: str, reason: str) -> bool:
        """Fail the command for which the broker ended the link, so that it is not sent again.

        The first command that left by itself and was not understood is the one. On a link where
        commands shared messages it is unknown: on the next one each leaves by itself. Returns True
        when HELLO is at fault, and no link can be.
        """
        if self.state is LinkState.CONNECTING:
            return code != "internal"  # an error of the broker's own may pass
        commands = self._suspects.find()
        if commands is not None:
            error = BrokerRefused(code, f"{reason}; the broker ended the link for it")
            self._blame(commands, error)
        return False

    def _on_bye(self, command: wire.Bye, _: Sequence[Any]) -> None:
        """End the link that the broker has ended, and the session if the code is final.

        A code of BLAMED says that a command of this client was at fault: its caller is told, if the
        command can be found, and another attempt follows without it.
        """
        if command.code in BLAMED and self._find_blamed(command.code, command.reason):
            self.lost(command.code, command.reason, self._now_ms, final=True)
            return
        self.lost(
            command.code,
            command.reason or "the broker ended the link",
            self._now_ms,
            final=command.code in _FINAL_CODES,
        )

    def _on_refused(self, command: wire.Refused, _: Sequence[Any]) -> None:
        """Hand a refusal to what its reference names: a call, a receiver, or the link.

        The number of the refused command tells what the reference is: a tracker, the number of
        something opened, or that of a request.
        """
        error = BrokerRefused(command.code, command.reason, command.retry_ms)
        if command.revision >= 0:  # an UPDATE_KEY met a key with this revision
            error = RevisionConflict(command.reason, command.revision)
        if command.code in RETRYABLE:
            self.attempts.put_off(command.reason or command.code, self._now_ms, command.retry_ms)
        number, reference = command.command, command.reference
        if command.code == "internal" and reference:
            self._suspects.named = True  # a BYE that follows is for this command
        if number in _TRACKED:
            tracked = self.trackers.take(reference)
            if not reference and number in _UNPROMISED:
                # Of level `none`: no caller waits.
                self.publisher.unpromised_refusals += 1
            if tracked is not None:
                tracked.refused(error, self._now_ms)
        elif command.code == "internal" and number in _OF_OPENED:
            self.receivers.erred(reference, error, self._now_ms)
        elif number in _OPENING:
            self.receivers.refused(reference, error, self._now_ms)
        elif number == NUMBERS[wire.Unsubscribe]:
            self.receivers.unknown(reference)
        elif number == NUMBERS[wire.OpenProducer] and self.publisher.producer_refused(
            reference, error, self._now_ms
        ):
            pass
        elif number in (0, NUMBERS[wire.Hello]):  # 0: the link as a whole
            final = command.code in _FINAL_CODES
            if command.code in BLAMED:
                final = self._find_blamed(command.code, command.reason)
            self.lost(
                command.code, command.reason, self._now_ms, final=final, retry_ms=command.retry_ms
            )
        else:
            self.pending.refused(number, reference, error)

    def _on_result(self, command: wire.Result, _: Sequence[Any]) -> None:
        """Give the value of a RESULT to what asked for it: the publisher, or a caller."""
        try:
            if self.publisher.producer_opened(command.request, command.value):
                return
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(
                "malformed", f"the RESULT of OPEN_PRODUCER: {error!r}"
            ) from error
        self.pending.answered(command.request, command.value)

    def _on_confirm(self, command: wire.Confirm, _: Sequence[Any]) -> None:
        """Give a CONFIRM to what its tracker names; an unknown one is of what no caller awaits."""
        tracked = self.trackers.take(command.tracker)
        if tracked is not None:
            tracked.confirmed(command)
