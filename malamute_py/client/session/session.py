"""The client's half of the protocol, without sockets, clock or randomness.

Owns the link's state, heartbeats, retries, requests, and what has to be restored after a
reconnect. What is opened under a number (receiver.py) and what leaves and is confirmed
(outgoing.py) own their parts. The rule: messages and the time go in, messages, events and
the time of the next wake come out; a shell does the rest. Source: SPEC.md, sections 2, 4
and 8.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from malamute_protocol.address import is_template, replica_number
from malamute_protocol.commands import (
    AckMail,
    AckRecords,
    AckWork,
    Atomic,
    Bye,
    Command,
    Confirm,
    Cover,
    Credit,
    Deliver,
    Ended,
    Gap,
    Hello,
    JoinGroup,
    Kick,
    Mail,
    Mode,
    MoveCursor,
    Offer,
    OpenInbox,
    OpenProducer,
    Ping,
    Pong,
    Publish,
    PurgeMail,
    Refused,
    RemoveMailbox,
    RemoveService,
    RemoveStream,
    Reply,
    Requeue,
    Result,
    Rewound,
    Send,
    Subscribe,
    Subscribed,
    Unsubscribe,
    UpdateKey,
    Welcome,
    Work,
)
from malamute_protocol.commands import Request as RequestCommand
from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    MalamuteError,
    ProtocolError,
    RemoteProtocolError,
    RevisionConflict,
)
from malamute_protocol.framing import (
    NUMBERS,
    decode_message,
    reference_of,
)
from malamute_protocol.link import Link, Side
from malamute_protocol.version import VERSIONS
from malamute_py.client.arguments import checked
from malamute_py.client.session.events import (
    Answered,
    Arrived,
    Closed,
    Confirmed,
    Connect,
    Disconnect,
    Event,
    Inner,
    Linked,
    Published,
    Settled,
    Unlinked,
    Warned,
    Watched,
)
from malamute_py.client.session.mailboxes import MailboxView, OpenedMailboxes
from malamute_py.client.session.memberships import Memberships
from malamute_py.client.session.messages import OutgoingMessages
from malamute_py.client.session.offers import Offering, Offerings
from malamute_py.client.session.outbox import Outbox
from malamute_py.client.session.outgoing import RETRYABLE, Outgoing, Trackers, Window
from malamute_py.client.session.publisher import Publisher
from malamute_py.client.session.receiver import Opened
from malamute_py.client.session.requests import PendingRequests, Replies
from malamute_py.client.session.steps import Steps
from malamute_py.client.session.subscription import SubscribeOptions, SubscriptionState
from malamute_py.client.settings import ClientSettings

__all__ = [
    "Answered",
    "Arrived",
    "Closed",
    "Confirmed",
    "Connect",
    "Disconnect",
    "Event",
    "LinkState",
    "Linked",
    "Published",
    "Session",
    "Settled",
    "Unlinked",
    "Warned",
]

_FINAL_CODES: Final = frozenset(
    {"unauthenticated", "forbidden", "version", "fenced", "kicked", "bad_name"}
)
"""Codes that trying again cannot cure."""
_NOT_REPEATED: Final = (RemoveStream, Kick, PurgeMail, RemoveMailbox, RemoveService, Requeue)
"""Requests that may mean something else the second time: they fail with their link."""
_TRACKED: Final = frozenset(
    NUMBERS[command]
    for command in (
        Publish, UpdateKey, Send, RequestCommand, Reply, AckMail, AckWork, AckRecords, MoveCursor,
        Atomic,
    )
)  # fmt: skip
"""Commands that CONFIRM answers and whose refusal names their tracker."""
_OPENING: Final = frozenset(
    NUMBERS[command] for command in (Subscribe, OpenInbox, Offer, JoinGroup)
)
"""Commands that SUBSCRIBED answers and whose refusal names their subscription."""
_BLAMED: Final = frozenset({"malformed", "too_large", "internal"})
"""Codes by which a broker ends a link for what one of the client's commands was."""
_OF_OPENED: Final = _OPENING | {NUMBERS[Credit], NUMBERS[Unsubscribe]}
"""Commands whose refusal names what was opened."""
_ASKED_AT_ONCE: Final = 200
"""Requests that wait for their answers at one time: a broker keeps 256 answers for a link."""
_JITTER: Final = 0.5
_CLEARED_MS: Final = 60_000
"""Time that a link must last on which each command leaves by itself, before commands share messages
again; and the time for which the broker's error with something that is open counts against it."""
_SHORT_LIVED: Final = 3
"""Most doublings of the first pause where links open and do not last."""
_PUT_OFF_MS: Final = 2_000
"""Time for which the reason of the last refusal is told after the repeated command was due."""
_STEADY_MS: Final = 2_000
"""A link that lived so long was good: the pause before the next attempt begins small again."""


Kind = TypeVar("Kind", bound=Opened)


class LinkState(enum.Enum):
    """State of the link."""

    WAITING = "waiting"
    """Between two attempts."""
    CONNECTING = "connecting"
    """HELLO is under way."""
    LINKED = "linked"
    CLOSED = "closed"
    """For good: by close(), or by what cannot be cured."""


class _PendingCommand(msgspec.Struct, gc=False):
    command: Command
    token: Any
    sent: bool


class Session:
    """One client over all its links."""

    def __init__(
        self, settings: ClientSettings, random: Callable[[int], bytes], now_ms: int
    ) -> None:
        """random: n -> n random bytes. now_ms: any clock that never goes back."""
        self.settings = settings
        self.state = LinkState.WAITING
        self.id = random(16)
        self.welcome: Welcome | None = None
        self.trackers = Trackers()
        self.window = Window(settings.window_bytes)
        self.publisher = Publisher(
            settings, self._next_request, self.trackers, self.window, self.tell, self._others_wait
        )
        self.outbox = Outbox(
            settings, random, self.trackers, self.window, self.tell, self._standing_now
        )
        self.mailboxes = OpenedMailboxes(
            self.trackers, self.tell, self.open, self.end, self.arrived
        )
        self.identity = "" if is_template(settings.identity) else settings.identity
        """As the newest link has it; before the first, the one asked for."""
        self.mailboxes.own = self._own()
        self.requests = PendingRequests(
            self.outbox, self.mailboxes, self.request, self.arrived, self.tell
        )
        self.offerings = Offerings(
            self.outbox,
            self.trackers,
            self.tell,
            self.open,
            self.credit_later,
            self.arrived,
            self._broker_ms,
        )
        self.memberships = Memberships(
            self.trackers, self.tell, self.open, self.end, self.consumed, self.arrived
        )
        self.steps = Steps(settings, random, self.trackers, self.window, self.tell)
        self.outgoing: list[Outgoing] = [
            self.publisher, self.outbox, self.mailboxes, self.offerings,
            self.memberships, self.steps,
        ]  # fmt: skip
        """All that send contents or commands that are confirmed; one that the window holds back
        goes first the next time."""
        self.opened: dict[int, Opened] = {}
        self.error: MalamuteError | None = None
        self.links = 0
        """Links opened so far: one more than the reconnects."""
        self._random = random
        self._requests: dict[int, _PendingCommand] = {}
        self._unsent: dict[int, _PendingCommand] = {}
        """Requests among them that wait to leave."""
        self._request = 0
        self._subscription = 0
        self._attempt = 0
        """Which endpoint is tried next."""
        self._failures = 0
        """Attempts that failed, and links that did not last, since one that did."""
        self._down_since_ms = now_ms
        """While there is no link: since when."""
        self._down_reason = ""
        """While there is no link: why the last attempt failed, or the link was lost."""
        self._put_off_reason = ""
        """Reason for which the broker put off a command the last time."""
        self._put_off_until_ms = now_ms
        """Latest time at which a command that was put off is answered again, as a rule."""
        self._linked_ms = now_ms
        self._attempts_failed = 0
        """Since the link was lost."""
        self._suspicious = False
        """The broker ended a link for a command that it did not name: each leaves by itself."""
        self._suspects: deque[tuple[int, list[Command]]] = deque()
        """Commands that left by themselves, each with the token of the PING after it."""
        self._struck: dict[Opened, int] = {}
        """Time at which the broker last met an error of its own with one of these."""
        self._named = False
        """The broker said which command it met an error with: no other is suspected."""
        self._probe = 0
        self._retry_at_ms = now_ms
        self._deadline_ms = now_ms
        self._heard_ms = now_ms
        self._sent_ms = now_ms
        self._now_ms = now_ms
        self._clock_ahead_ms = 0
        """Lead of the broker's clock over the client's."""
        self._link = Link(Side.CLIENT)
        self._transport: Connect | Disconnect | None = None
        self._commands: list[Command] = []
        """To be sent before anything else, in order."""
        self._credit_due: dict[Opened, None] = {}
        self._again: dict[Opened, int] = {}
        """Receivers whose opening the broker put off, and the time to try again."""
        self._events: list[Event] = []
        self._messages = OutgoingMessages()
        self._arrived: dict[Watched, None] = {}
        self.wake(now_ms)

    # --- the link ----------------------------------------------------------------------

    def wake(self, now_ms: int) -> None:
        """Do what is due: an attempt, a heartbeat, giving up. Receive what has come before."""
        self._now_ms = now_ms
        for outgoing in self.outgoing:
            outgoing.wake(now_ms)
        if self.state is LinkState.WAITING and now_ms >= self._retry_at_ms:
            endpoint = self.settings.endpoints[self._attempt % len(self.settings.endpoints)]
            self._attempt += 1
            self.state = LinkState.CONNECTING
            self._deadline_ms = now_ms + self.settings.attempt_ms
            self._transport = Connect(endpoint)
            self._link = Link(Side.CLIENT)
            self._commands = [
                Hello(
                    VERSIONS,
                    self.id,
                    self.settings.identity,
                    self.settings.software,
                    self.settings.heartbeat_ms,
                    number=self._number(),
                )
            ]
        elif self.state is LinkState.CONNECTING and now_ms >= self._deadline_ms:
            self.lost("silent", "no answer to HELLO within the time of one attempt", now_ms)
        elif self.state is LinkState.LINKED:
            assert self.welcome is not None
            if now_ms - self._heard_ms >= self.welcome.expiry_ms:
                self.lost("silent", "the broker was not heard within the expiry time", now_ms)
                self._commands = [Bye("silent", "you were not heard within the expiry time")]
            elif now_ms - self._sent_ms >= self._heartbeat_ms:
                self._commands.append(Ping())
                # Not only when it leaves: a socket that takes nothing must gather no PINGs.
                self._sent_ms = now_ms
            if self._suspicious and now_ms - self._linked_ms >= _CLEARED_MS:
                # What the broker took for malformed was given up, or has not come again.
                self._suspicious = bool(self._suspects)
            for opened, at_ms in list(self._again.items()):
                if now_ms >= at_ms:
                    del self._again[opened]
                    self._commands.append(opened.open())

    def _number(self) -> int:
        """Return the number of a replica that had a link; -1: it had none."""
        template = self.settings.identity
        if not self.identity or not is_template(template):
            return -1
        return replica_number(template, self.identity)

    def _own(self) -> frozenset[str]:
        """Names of the client's own mailbox."""
        return frozenset({f"~{self.id.hex()}", self.identity} - {""})

    @property
    def _heartbeat_ms(self) -> int:
        assert self.welcome is not None
        return self.settings.heartbeat_ms or self.welcome.heartbeat_ms

    def _talking(self) -> bool:
        return self.state is LinkState.LINKED or self.state is LinkState.CONNECTING

    def next_wake(self) -> int | None:
        """Latest time of the next wake() and take_outgoing(); None: no need."""
        if self.state is LinkState.WAITING:
            at = self._retry_at_ms
        elif self.state is LinkState.CONNECTING:
            at = self._deadline_ms
        elif self.state is LinkState.CLOSED:
            return None
        else:
            assert self.welcome is not None
            at = min(
                self._heard_ms + self.welcome.expiry_ms,
                self._sent_ms + self._heartbeat_ms,
                *self._again.values(),
            )
        for outgoing in self.outgoing:
            wake = outgoing.next_wake()
            if wake is not None and wake < at:
                at = wake
        return at

    def lost(
        self, code: str, reason: str, now_ms: int, *, final: bool = False, retry_ms: int = 0
    ) -> None:
        """The transport or the link failed; final: trying again cannot cure it."""
        self._now_ms = now_ms
        if self.state is LinkState.CLOSED or (self.state is LinkState.WAITING and not final):
            return
        was_linked = self.state is LinkState.LINKED
        if final:
            ended = code == "closed"
            self._close(ConnectionLost(reason) if ended else BrokerRefused(code, reason))
            return
        self._down_reason = f"{code}: {reason}"
        if was_linked:
            self._attempt = 0
            self._down_since_ms = now_ms
            self._attempts_failed = 0
            lasted = now_ms - self._linked_ms >= _STEADY_MS
            # A broker that is started again and again is there each time: soon, but no tight loop.
            self._failures = 0 if lasted else min(self._failures, _SHORT_LIVED)
        else:
            self._attempts_failed += 1
        pause_ms = min(
            self.settings.retry_max_ms, self.settings.retry_min_ms << min(20, self._failures)
        )
        self._failures += 1
        fraction = int.from_bytes(self._random(2), "little") / 65536
        pause_ms = max(int(pause_ms * (1 - _JITTER * fraction)), retry_ms)
        if was_linked:
            self._tell_of_link(
                f"the link to the broker was lost ({self._down_reason}); "
                f"commands without an answer: {self.unanswered}; trying again in {pause_ms} ms"
            )
        elif self._attempts_failed == 1 and not self.links:
            self._tell_of_link(f"no link to a broker yet ({self._down_reason}); trying again")
        self.state = LinkState.WAITING
        self._named = False
        self._suspects.clear()
        self._retry_at_ms = now_ms + pause_ms
        self._transport = Disconnect()
        self._commands = []
        self._credit_due.clear()
        self._again.clear()
        self.trackers.clear()
        self.window.link_down()
        for outgoing in self.outgoing:
            outgoing.link_down()
        for opened in list(self.opened.values()):
            opened.link_down()
            if opened.ending:
                self.end(opened)
        for number, asked in list(self._requests.items()):
            if asked.sent and isinstance(asked.command, _NOT_REPEATED):
                del self._requests[number]
                error = ConnectionLost(f"the link was lost before the answer: {reason}")
                self._answer(asked, error)
        self._events.append(Unlinked(code, reason, self._retry_at_ms, was_linked))

    def close(self) -> None:
        """End the session in order; what is unconfirmed fails with ConnectionLost."""
        if self.state is not LinkState.CLOSED:
            if self.state is LinkState.LINKED:
                self._commands.append(Bye())
            self._close(None)

    def abandon(self, error: Exception) -> None:
        """End at once because of a defect of our own: no caller is left waiting for ever."""
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
        for opened in list(self.opened.values()):
            if error is not None:
                opened.fail(error)
            self.end(opened)
        for asked in self._requests.values():
            self._answer(asked, cause)
        self._requests.clear()
        self._unsent.clear()
        self._events.append(Closed(error))

    def _tell_of_link(self, message: str) -> None:
        self._events.append(Warned(message, link=True))

    @property
    def unanswered(self) -> int:
        """Commands that wait to leave, or for their answers."""
        return len(self._requests) + sum(outgoing.unanswered for outgoing in self.outgoing)

    def _standing_now(self) -> str:
        return self.standing(self._now_ms)

    def standing(self, now_ms: int) -> str:
        """In words: whether there is a link and the broker takes what is sent, else why not."""
        if self.state is LinkState.LINKED:
            up = "the link to the broker is up"
            if now_ms > self._put_off_until_ms or not self._put_off_reason:
                return up
            return f"{up}, and the broker puts off what it is asked for: {self._put_off_reason}"
        if self.state is LinkState.CLOSED:
            return "the client is closed"
        since = "was lost" if self.links else "has been sought for"
        why = f" ({self._down_reason})" if self._down_reason else ""
        seconds = max(0, now_ms - self._down_since_ms) / 1000
        ago = f"{since} {seconds:.1f} s" + (" ago" if self.links else "")
        return f"there is no link to a broker: it {ago}{why}"

    # --- what the caller asks for ----------------------------------------------------------

    def request(self, make: Callable[[int], Command], token: Any) -> Command:
        """Send the command that `make(request number)` gives; ANSWERED comes with the token.

        It is sent again after a reconnect, unless repeating it could do harm. Returns the command.
        Raises what ended the session, or LocalProtocolError: an argument is wrong.
        """
        self._raise_if_closed()
        number = self._next_request()
        command = checked(make(number))
        self._requests[number] = self._unsent[number] = _PendingCommand(command, token, False)
        return command

    def give_up(self, token: Any) -> None:
        """Drop a command whose answer no caller waits for: it is not sent again."""
        for number, asked in self._requests.items():
            if asked.token is token:
                del self._requests[number]
                self._unsent.pop(number, None)
                return

    def subscribe(self, request: SubscribeOptions) -> SubscriptionState:
        """Begin a subscription. Raises what ended the session."""
        return self.open(lambda number: SubscriptionState(number, request))

    def open(self, make: Callable[[int], Kind]) -> Kind:
        """Open what `make(number)` gives, on this link and every later one, until it ends.

        Raises what ended the session, or LocalProtocolError: an argument is wrong.
        """
        self._raise_if_closed()
        opened = make(self._subscription + 1)
        command = checked(opened.open())
        self._subscription += 1
        self.opened[self._subscription] = opened
        if self.state is LinkState.LINKED:
            self._commands.append(command)
        return opened

    def unsubscribe(self, opened: Opened) -> None:
        """End what was opened; what it has not consumed is dropped."""
        opened.discard()
        if opened.ended or opened.ending or opened.number not in self.opened:
            return
        opened.ending = True
        if self.state is LinkState.LINKED:
            self._commands.append(Unsubscribe(opened.number))
        else:
            self.end(opened)

    def drop(self, watched: Watched) -> None:
        """End in order what no caller holds any more."""
        if isinstance(watched, MailboxView):
            self.mailboxes.close(watched)
        elif isinstance(watched, Offering):
            self.offerings.close(watched)
        elif isinstance(watched, Replies):
            self.requests.give_up(watched)
        elif isinstance(watched, Opened):
            self.unsubscribe(watched)

    def credit_later(self, opened: Opened) -> None:
        """Something of it was finished: CREDIT goes out with what is sent next, if it is due."""
        self._credit_due[opened] = None

    def consumed(self, opened: Opened) -> bool:
        """Something was taken from it; True: CREDIT is to go out, so send soon."""
        if not opened.active or not opened.credit_due:
            return False
        self._credit_due[opened] = None
        return True

    def arrived(self, opened: Watched) -> None:
        """Have the consumer look at it."""
        self._arrived[opened] = None

    def tell(self, event: Event) -> None:
        """Put an event at the end of those that the shell takes next."""
        self._events.append(event)

    @property
    def idle(self) -> bool:
        """Nothing waits to be sent and nothing is unconfirmed."""
        return all(outgoing.idle for outgoing in self.outgoing)

    def _raise_if_closed(self) -> None:
        if self.state is LinkState.CLOSED:
            raise self.error or ConnectionLost("the client is closed")

    def _broker_ms(self) -> int:
        return self._now_ms + self._clock_ahead_ms

    def _next_request(self) -> int:
        self._request += 1
        return self._request

    def end(self, opened: Opened) -> None:
        """Forget what has ended: no command goes out for it any more."""
        opened.ended = True
        self.opened.pop(opened.number, None)
        self._credit_due.pop(opened, None)
        self._again.pop(opened, None)
        self._struck.pop(opened, None)
        self._arrived[opened] = None
        opened.over()

    # --- out -------------------------------------------------------------------------------

    def take_transport(self) -> Connect | Disconnect | None:
        """The wish about the socket, once; send take_outgoing() before a Disconnect."""
        wanted, self._transport = self._transport, None
        return wanted

    @property
    def batch_bytes(self) -> int:
        """Bytes that a batch of a bulk call is filled to."""
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
        """Whether anything but records is to leave now."""
        return any(
            outgoing.waits for outgoing in self.outgoing if outgoing is not self.publisher
        ) or bool(self._unsent)

    def take_outgoing(self, now_ms: int) -> list[list[Any]]:
        """The messages to be sent now, in order, each a list of frames."""
        message = self._messages
        self._put_outgoing(now_ms, message)
        messages = message.finish()
        while message.unsendable:
            # A caller that asked for what cannot be sent is told; what that sets free leaves, too.
            unsendable, message.unsendable = message.unsendable, []
            for commands, error in unsendable:
                self._blame(commands, error)
            self._put_outgoing(now_ms, message)
            messages += message.finish()
        if messages:
            self._sent_ms = now_ms
        return messages

    def _put_outgoing(self, now_ms: int, message: OutgoingMessages) -> None:
        message.suspect = None
        if self._suspicious and self.state is LinkState.LINKED:
            message.suspect = self._suspect
        for command in self._commands:
            self._link.sent(command)
            message.put(command, None)
        self._commands.clear()
        if self.state is LinkState.LINKED:
            for opened in self._credit_due:
                if opened.active and opened.credit_due:
                    message.put(opened.credit(), None)
            self._credit_due.clear()
            held_back = False
            for outgoing in list(self.outgoing):
                if any(outgoing.queues) and not outgoing.take(now_ms, message):
                    self.outgoing.remove(outgoing)
                    self.outgoing.insert(0, outgoing)
                    held_back = True
            if self.window.unmarked_bytes and self.window.wants_mark(held_back=held_back):
                self._probe += 1
                self.window.mark(self._probe)
                message.put(Ping(self._probe), None)
            # Last, so that an answer tells of what was asked for before it.
            unsent = self._unsent
            while unsent and len(self._requests) - len(unsent) < _ASKED_AT_ONCE:
                asked = unsent.pop(next(iter(unsent)))
                asked.sent = True
                message.put(asked.command, None)

    def _suspect(self, commands: list[Command]) -> Command:
        """Send commands by themselves; returns the PING whose answer will clear them."""
        self._probe += 1
        self._suspects.append((self._probe, commands))
        return Ping(self._probe)

    def _blame(self, commands: list[Command], error: ProtocolError | BrokerRefused) -> None:
        """A command, or a step with its parts, can never be sent: it fails, and nothing else."""
        command = commands[0]
        number = NUMBERS[type(command)]
        if type(command) is Hello:
            self._close(BrokerRefused(error.code, error.reason))
            return
        reference = reference_of(command)
        opened = self.opened.get(getattr(command, "subscription", 0))
        if opened is not None and (not reference or number in _OF_OPENED):
            opened.fail(BrokerRefused(error.code, error.reason))
            self.end(opened)
            return
        if not reference:
            self.tell(Warned(f"{type(command).__name__} cannot be sent and is dropped: {error}"))
        self._on_refused(Refused(number, reference, error.code, error.reason), ())

    # --- in --------------------------------------------------------------------------------

    def receive(self, frames: Sequence[Any], now_ms: int) -> None:
        """Take in one message; a broken one costs the broker the link, never an exception."""
        self._now_ms = self._heard_ms = now_ms
        if not self._talking():
            return
        try:
            for command, contents in decode_message(frames):
                self._link.received(command)
                handler = _HANDLERS.get(type(command))
                if handler is None:
                    raise RemoteProtocolError(
                        "unsupported", f"{type(command).__name__} belongs to what was not asked for"
                    )
                handler(self, command, contents)
                if not self._talking():
                    return
        except ProtocolError as error:
            self.lost(error.code, f"the broker broke the protocol: {error.reason}", now_ms)
            self._commands = [Bye(error.code, error.reason[:200])]

    def _on_welcome(self, command: Welcome, _: Sequence[Any]) -> None:
        if not VERSIONS[0] <= command.version <= VERSIONS[1]:
            self.lost("version", f"the broker speaks {command.version}", self._now_ms, final=True)
            return
        self.state = LinkState.LINKED
        self.welcome = command
        self._messages.bound(command.message_commands_max)
        if self.links:
            seconds = (self._now_ms - self._down_since_ms) / 1000
            self._tell_of_link(
                f"the link to the broker is back after {seconds:.1f} s and "
                f"{self._attempts_failed + 1} attempts; commands that go on: {self.unanswered}"
            )
        elif self._attempts_failed:
            self._tell_of_link(f"linked to a broker after {self._attempts_failed + 1} attempts")
        self._linked_ms = self._now_ms
        self._clock_ahead_ms = command.now_ms - self._now_ms
        self.links += 1
        self.window.bytes_max = min(self.settings.window_bytes, command.window_bytes)
        if command.identity not in ("", self.identity):
            self._renamed(command.identity)
        for outgoing in self.outgoing:
            outgoing.link_up(command)
        self.requests.link_up(command)
        for asked in self._requests.values():
            asked.sent = False
        self._unsent = self._requests.copy()
        self._commands.extend(opened.open() for opened in self.opened.values())
        self._events.append(Linked(command, self.links == 1))

    def _renamed(self, identity: str) -> None:
        """The client has its first identity, or another one than on its last link.

        What it sent under the former one may have been taken, and would be taken twice.
        """
        former, self.identity = self.identity, identity
        self.mailboxes.own = self._own()
        if not former:
            return
        error = ConnectionLost(
            f"another client has the identity {former!r} now, and this one is {identity!r}: what "
            "was under way may have been done, and its answer goes to the other"
        )
        self._tell_of_link(f"{error}; {self.unanswered} commands are looked at")
        self.publisher.disown(error)
        self.requests.disown(error)
        self.outbox.disown(error)
        self.steps.disown(error)

    def _on_ping(self, command: Ping, _: Sequence[Any]) -> None:
        self._commands.append(Pong(command.token))

    def _on_pong(self, command: Pong, _: Sequence[Any]) -> None:
        # Having heard it is what counts, but where commands leave one by one: what was sent before
        # the PING was understood.
        while self._suspects and self._suspects[0][0] <= command.token:
            self._suspects.popleft()
        self.window.reached(command.token)

    def _find_blamed(self, code: str, reason: str) -> bool:
        """The broker ended the link for what one command was: find it, so that it is not repeated.

        The first command that left by itself and was not understood is the one. On a link where
        commands shared messages it is unknown: on the next one each leaves by itself. Returns True
        when HELLO is at fault, and no link can be.
        """
        if self.state is LinkState.CONNECTING:
            return code != "internal"
        if self._named:
            return False
        if not self._suspects:
            self._suspicious = True
            return False
        _, commands = self._suspects.popleft()
        self._suspicious = False
        self._blame(commands, BrokerRefused(code, f"{reason}; the broker ended the link for it"))
        return False

    def _on_bye(self, command: Bye, _: Sequence[Any]) -> None:
        if command.code in _BLAMED and self._find_blamed(command.code, command.reason):
            self.lost(command.code, command.reason, self._now_ms, final=True)
            return
        self.lost(
            command.code,
            command.reason or "the broker ended the link",
            self._now_ms,
            final=command.code in _FINAL_CODES,
        )

    def _on_refused(self, command: Refused, _: Sequence[Any]) -> None:
        error = BrokerRefused(command.code, command.reason, command.retry_ms)
        if command.revision >= 0:
            error = RevisionConflict(command.reason, command.revision)
        if command.code in RETRYABLE:
            self._put_off_reason = command.reason or command.code
            self._put_off_until_ms = self._now_ms + command.retry_ms + _PUT_OFF_MS
        number, reference = command.command, command.reference
        if command.code == "internal" and reference:
            self._named = True
        if number in _TRACKED:
            tracked = self.trackers.take(reference)
            if not reference and number == NUMBERS[Publish]:
                self.publisher.unpromised_refusals += 1
            if tracked is not None:
                tracked.refused(error, self._now_ms)
        elif command.code == "internal" and number in _OF_OPENED:
            self._erred(reference, error)
        elif number in _OPENING:
            self._opening_refused(reference, error)
        elif number == NUMBERS[OpenProducer] and self.publisher.producer_refused(
            reference, error, self._now_ms
        ):
            pass
        elif number in (0, NUMBERS[Hello]):
            final = command.code in _FINAL_CODES
            if command.code in _BLAMED:
                final = self._find_blamed(command.code, command.reason)
            self.lost(
                command.code, command.reason, self._now_ms, final=final, retry_ms=command.retry_ms
            )
        else:
            asked = self._requests.get(reference)
            # A CREDIT or UNSUBSCRIBE may cross an ENDED: a refusal of those is no news.
            if asked is not None and NUMBERS[type(asked.command)] == number:
                del self._requests[reference]
                self._answer(asked, error)

    def _erred(self, number: int, error: BrokerRefused) -> None:
        """The broker met an error of its own with what was opened under a number.

        It is opened once more, for the error may have been of that moment; the second time within
        a while it ends.
        """
        opened = self.opened.get(number)
        if opened is None:
            return
        before_ms = self._struck.pop(opened, self._now_ms - _CLEARED_MS)
        if opened.ending or self._now_ms - before_ms < _CLEARED_MS:
            opened.fail(error)
            self.end(opened)
        else:
            self._struck[opened] = self._now_ms
            # Unless the link ends, which opens everything again.
            self._again[opened] = self._now_ms + self.settings.retry_min_ms

    def _opening_refused(self, number: int, error: BrokerRefused) -> None:
        opened = self.opened.get(number)
        if opened is None:
            return
        if not opened.ending and opened.refused(error):
            self._again[opened] = self._now_ms + max(error.retry_ms, self.settings.retry_min_ms)
            return
        opened.fail(error)
        self.end(opened)

    def _on_result(self, command: Result, _: Sequence[Any]) -> None:
        try:
            if self.publisher.producer_opened(command.request, command.value):
                return
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(
                "malformed", f"the RESULT of OPEN_PRODUCER: {error!r}"
            ) from error
        asked = self._requests.pop(command.request, None)
        if asked is not None:
            self._answer(asked, command.value)

    def _answer(self, asked: _PendingCommand, outcome: Any) -> None:
        if isinstance(asked.token, Inner):
            asked.token.answered(outcome)
        else:
            self._events.append(Answered(asked.token, outcome))

    def _on_confirm(self, command: Confirm, _: Sequence[Any]) -> None:
        tracked = self.trackers.take(command.tracker)
        if tracked is not None:
            tracked.confirmed(command)

    def _on_opened(self, command: Any, frames: Sequence[Any]) -> None:
        """Any command that names what was opened."""
        opened = self.opened.get(command.subscription)
        if opened is None:
            return  # it crossed our UNSUBSCRIBE
        kind = type(command)
        if kind is Ended:
            opened.end_with(command)
            self.end(opened)
            return
        if opened.ending:
            return
        if kind is not Subscribed and not opened.active:
            raise RemoteProtocolError(
                "unexpected", f"{kind.__name__} for a subscription that was not accepted"
            )
        try:
            opened.receive(command, frames, self.publisher.limits)
        except RemoteProtocolError as error:
            # The reader is told, and the link goes: what else is wrong on it is unknown.
            opened.fail(error)
            self.end(opened)
            raise
        self._arrived[opened] = None
        if opened.consumes:
            self.consumed(opened)


_HANDLERS: Final[dict[type[Command], Callable[[Session, Any, Sequence[Any]], None]]] = {
    Welcome: Session._on_welcome,
    Ping: Session._on_ping,
    Pong: Session._on_pong,
    Bye: Session._on_bye,
    Refused: Session._on_refused,
    Result: Session._on_result,
    Confirm: Session._on_confirm,
    Subscribed: Session._on_opened,
    Ended: Session._on_opened,
    Deliver: Session._on_opened,
    Cover: Session._on_opened,
    Gap: Session._on_opened,
    Rewound: Session._on_opened,
    Mode: Session._on_opened,
    Mail: Session._on_opened,
    Work: Session._on_opened,
}
