"""The client's half of the protocol, without sockets, clock or randomness.

Owns the link's state, heartbeats, retries, requests, and what has to be restored after a
reconnect; publishing.py and reading.py own their parts. The rule: messages and the time
go in, messages, events and the time of the next wake come out; a shell does the rest.
Source: SPEC.md, sections 2, 4 and 8.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from malamute_protocol.commands import (
    Bye,
    Command,
    Confirm,
    Cover,
    Deliver,
    Ended,
    Gap,
    Hello,
    Kick,
    Mode,
    OpenProducer,
    Ping,
    Pong,
    Publish,
    Refused,
    RemoveStream,
    Result,
    Rewound,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Welcome,
)
from malamute_protocol.errors import (
    ConnectionLost,
    MalamuteError,
    ProtocolError,
    RemoteProtocolError,
    RequestRejected,
)
from malamute_protocol.framing import NUMBERS, decode_message, encode_message
from malamute_protocol.link import Link, Side
from malamute_protocol.version import VERSIONS
from malamute_py.client.publishing import Publisher, Unconfirmed
from malamute_py.client.reading import Reading, Request
from malamute_py.client.settings import ClientSettings

_FINAL_CODES: Final = frozenset(
    {"unauthenticated", "forbidden", "version", "fenced", "kicked", "bad_name"}
)
"""Codes that trying again cannot cure."""
_NOT_REPEATED: Final = (RemoveStream, Kick)
"""Requests that may mean something else the second time: they fail with their link."""
_MESSAGE_BYTES: Final = 1 << 20
"""Where a message is closed and the next begun: bounds what one burst holds back."""
_JITTER: Final = 0.5


class State(enum.Enum):
    """Where the link is."""

    WAITING = "waiting"
    """Between two attempts."""
    CONNECTING = "connecting"
    """HELLO is under way."""
    LINKED = "linked"
    CLOSED = "closed"
    """For good: by close(), or by what cannot be cured."""


class Connect(msgspec.Struct, frozen=True, gc=False):
    """To the shell: drop the socket, if any, and connect a new one to this endpoint."""

    endpoint: str


class Disconnect(msgspec.Struct, frozen=True, gc=False):
    """To the shell: send what is left, then close the socket."""


class Linked(msgspec.Struct, frozen=True, gc=False):
    """Event: a link is open."""

    welcome: Welcome
    first: bool


class Unlinked(msgspec.Struct, frozen=True, gc=False):
    """Event: an attempt failed or the link was lost; another attempt follows."""

    code: str
    reason: str
    retry_at_ms: int
    was_linked: bool


class Closed(msgspec.Struct, frozen=True, gc=False):
    """Event: the session is over; `error` says why unless close() was called."""

    error: MalamuteError | None


class Published(msgspec.Struct, frozen=True, gc=False):
    """Event: a batch was confirmed, or failed for good."""

    batch: Unconfirmed
    outcome: Confirm | MalamuteError


class Answered(msgspec.Struct, frozen=True, gc=False):
    """Event: a request was answered, refused, or lost with its link."""

    token: Any
    outcome: Mapping[str, Any] | MalamuteError


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """Event: a subscription was accepted, has something to take, or ended."""

    reading: Reading


Event: TypeAlias = Linked | Unlinked | Closed | Published | Answered | Arrived


class _Asked(msgspec.Struct, gc=False):
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
        self.state = State.WAITING
        self.id = random(16)
        self.welcome: Welcome | None = None
        self.publisher = Publisher(settings, self._next_request)
        self.readings: dict[int, Reading] = {}
        self.error: MalamuteError | None = None
        self.links = 0
        """Links opened so far: one more than the reconnects."""
        self._random = random
        self._requests: dict[int, _Asked] = {}
        self._request = 0
        self._subscription = 0
        self._attempt = 0
        self._retry_at_ms = now_ms
        self._deadline_ms = now_ms
        self._heard_ms = now_ms
        self._sent_ms = now_ms
        self._now_ms = now_ms
        self._link = Link(Side.CLIENT)
        self._transport: Connect | Disconnect | None = None
        self._commands: list[Command] = []
        """To be sent before anything else, in order."""
        self._credit_due: dict[Reading, None] = {}
        self._again: dict[Reading, int] = {}
        """Resumed subscriptions that the broker put off, and when to try again."""
        self._events: list[Event] = []
        self._arrived: dict[Reading, None] = {}
        self.wake(now_ms)

    # --- the link ----------------------------------------------------------------------

    def wake(self, now_ms: int) -> None:
        """Do what is due: an attempt, a heartbeat, giving up. Receive what has come before."""
        self._now_ms = now_ms
        if self.state is State.WAITING and now_ms >= self._retry_at_ms:
            endpoint = self.settings.endpoints[self._attempt % len(self.settings.endpoints)]
            self._attempt += 1
            self.state = State.CONNECTING
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
                )
            ]
        elif self.state is State.CONNECTING and now_ms >= self._deadline_ms:
            self.lost("silent", "no answer to HELLO within the time of one attempt", now_ms)
        elif self.state is State.LINKED:
            assert self.welcome is not None
            if now_ms - self._heard_ms >= self.welcome.expiry_ms:
                self.lost("silent", "the broker was not heard within the expiry time", now_ms)
                self._commands = [Bye("silent", "you were not heard within the expiry time")]
            elif now_ms - self._sent_ms >= self._heartbeat_ms:
                self._commands.append(Ping())
                # Not only when it leaves: a socket that takes nothing must gather no PINGs.
                self._sent_ms = now_ms
            for reading, at_ms in list(self._again.items()):
                if now_ms >= at_ms:
                    del self._again[reading]
                    self._commands.append(reading.subscribe())

    @property
    def _heartbeat_ms(self) -> int:
        assert self.welcome is not None
        return self.settings.heartbeat_ms or self.welcome.heartbeat_ms

    def _talking(self) -> bool:
        return self.state is State.LINKED or self.state is State.CONNECTING

    def next_wake(self) -> int | None:
        """When wake() and take_outgoing() are to be called at the latest; None: no need."""
        if self.state is State.WAITING:
            return self._retry_at_ms
        if self.state is State.CONNECTING:
            return self._deadline_ms
        if self.state is State.CLOSED:
            return None
        assert self.welcome is not None
        at = min(
            self._heard_ms + self.welcome.expiry_ms,
            self._sent_ms + self._heartbeat_ms,
            *self._again.values(),
        )
        publishing = self.publisher.next_wake()
        return at if publishing is None else min(at, publishing)

    def lost(
        self, code: str, reason: str, now_ms: int, *, final: bool = False, retry_ms: int = 0
    ) -> None:
        """The transport or the link failed; final: trying again cannot cure it."""
        self._now_ms = now_ms
        if self.state is State.CLOSED or (self.state is State.WAITING and not final):
            return
        was_linked = self.state is State.LINKED
        if final:
            ended = code == "closed"
            self._close(ConnectionLost(reason) if ended else RequestRejected(code, reason))
            return
        if was_linked:
            self._attempt = 0
        pause_ms = min(
            self.settings.retry_max_ms,
            self.settings.retry_min_ms << min(20, max(0, self._attempt - 1)),
        )
        fraction = int.from_bytes(self._random(2), "little") / 65536
        pause_ms = max(int(pause_ms * (1 - _JITTER * fraction)), retry_ms)
        self.state = State.WAITING
        self._retry_at_ms = now_ms + pause_ms
        self._transport = Disconnect()
        self._commands = []
        self._credit_due.clear()
        self._again.clear()
        self.publisher.link_down()
        for reading in list(self.readings.values()):
            reading.active = False
            if reading.ending:
                self._end(reading)
        for number, asked in list(self._requests.items()):
            if asked.sent and isinstance(asked.command, _NOT_REPEATED):
                del self._requests[number]
                error = ConnectionLost(f"the link was lost before the answer: {reason}")
                self._events.append(Answered(asked.token, error))
        self._events.append(Unlinked(code, reason, self._retry_at_ms, was_linked))

    def close(self) -> None:
        """End the session in order; what is unconfirmed fails with ConnectionLost."""
        if self.state is not State.CLOSED:
            if self.state is State.LINKED:
                self._commands.append(Bye())
            self._close(None)

    def abandon(self, error: Exception) -> None:
        """End at once because of a defect of our own: nobody is left waiting for ever."""
        if self.state is not State.CLOSED:
            self._close(RequestRejected("internal", f"the client failed: {error!r}"))

    def _close(self, error: MalamuteError | None) -> None:
        self.state = State.CLOSED
        self.error = error
        self._transport = Disconnect()
        if error is not None:
            self._commands = []
        cause = error or ConnectionLost("the client is closed")
        self.publisher.fail_all(cause)
        for reading in list(self.readings.values()):
            if error is not None:
                reading.fail(error)
            self._end(reading)
        for asked in self._requests.values():
            self._events.append(Answered(asked.token, cause))
        self._requests.clear()
        self._events.append(Closed(error))

    # --- what the caller asks for ----------------------------------------------------------

    def request(self, make: Callable[[int], Command], token: Any) -> None:
        """Send the command that `make(request number)` gives; ANSWERED comes with the token.

        It is sent again after a reconnect, unless repeating it could do harm.
        Raises what ended the session.
        """
        self._raise_if_closed()
        number = self._next_request()
        self._requests[number] = _Asked(make(number), token, False)

    def subscribe(self, request: Request) -> Reading:
        """Begin a subscription. Raises what ended the session."""
        self._raise_if_closed()
        self._subscription += 1
        reading = self.readings[self._subscription] = Reading(self._subscription, request)
        if self.state is State.LINKED:
            self._commands.append(reading.subscribe())
        return reading

    def unsubscribe(self, reading: Reading) -> None:
        """End a subscription; what it has not consumed is dropped."""
        reading.discard()
        if reading.ended or reading.ending or reading.number not in self.readings:
            return
        reading.ending = True
        if self.state is State.LINKED:
            self._commands.append(Unsubscribe(reading.number))
        else:
            self._end(reading)

    def consumed(self, reading: Reading) -> bool:
        """Something was taken from the reading; True: CREDIT is to go out, so send soon."""
        if not reading.active or not reading.credit_due:
            return False
        self._credit_due[reading] = None
        return True

    def _raise_if_closed(self) -> None:
        if self.state is State.CLOSED:
            raise self.error or ConnectionLost("the client is closed")

    def _next_request(self) -> int:
        self._request += 1
        return self._request

    def _end(self, reading: Reading) -> None:
        reading.ended = True
        self.readings.pop(reading.number, None)
        self._credit_due.pop(reading, None)
        self._again.pop(reading, None)
        self._arrived[reading] = None

    # --- out -------------------------------------------------------------------------------

    def take_transport(self) -> Connect | Disconnect | None:
        """What to do with the socket, once; send take_outgoing() before a Disconnect."""
        wanted, self._transport = self._transport, None
        return wanted

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        for batch, outcome in self.publisher.outcomes:
            self._events.append(Published(batch, outcome))
        self.publisher.outcomes.clear()
        if self._arrived:
            self._events.extend(map(Arrived, self._arrived))
            self._arrived.clear()
        events, self._events = self._events, []
        return events

    def take_outgoing(self, now_ms: int) -> list[list[Any]]:
        """The messages to be sent now, in order, each a list of frames."""
        message = _Messages(1 if self.welcome is None else self.welcome.message_commands_max)
        for command in self._commands:
            self._link.sent(command)
            message.put(command, None)
        self._commands.clear()
        if self.state is State.LINKED:
            for asked in self._requests.values():
                if not asked.sent:
                    asked.sent = True
                    message.put(asked.command, None)
            for reading in self._credit_due:
                if reading.active:
                    message.put(reading.credit(), None)
            self._credit_due.clear()
            self.publisher.take(now_ms, message.put)
        messages = message.finish()
        if messages:
            self._sent_ms = now_ms
        return messages

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
        self.state = State.LINKED
        self.welcome = command
        self.links += 1
        self.publisher.link_up(command)
        for asked in self._requests.values():
            asked.sent = False
        self._commands.extend(reading.subscribe() for reading in self.readings.values())
        self._events.append(Linked(command, self.links == 1))

    def _on_ping(self, command: Ping, _: Sequence[Any]) -> None:
        self._commands.append(Pong(command.token))

    def _on_pong(self, command: Pong, _: Sequence[Any]) -> None:
        pass  # having heard it is what counts

    def _on_bye(self, command: Bye, _: Sequence[Any]) -> None:
        self.lost(
            command.code,
            command.reason or "the broker ended the link",
            self._now_ms,
            final=command.code in _FINAL_CODES,
        )

    def _on_refused(self, command: Refused, _: Sequence[Any]) -> None:
        error = RequestRejected(command.code, command.reason, command.retry_ms)
        number, reference = command.command, command.reference
        if number == NUMBERS[Publish]:
            self.publisher.refused(command, self._now_ms)
        elif number == NUMBERS[Subscribe]:
            self._subscription_refused(reference, error)
        elif number == NUMBERS[OpenProducer] and self.publisher.producer_refused(
            reference, error, self._now_ms
        ):
            pass
        elif number in (0, NUMBERS[Hello]):
            self.lost(
                command.code,
                command.reason,
                self._now_ms,
                final=command.code in _FINAL_CODES,
                retry_ms=command.retry_ms,
            )
        else:
            asked = self._requests.get(reference)
            # A CREDIT or UNSUBSCRIBE may cross an ENDED: a refusal of those is no news.
            if asked is not None and NUMBERS[type(asked.command)] == number:
                del self._requests[reference]
                self._events.append(Answered(asked.token, error))

    def _subscription_refused(self, number: int, error: RequestRejected) -> None:
        reading = self.readings.get(number)
        if reading is None:
            return
        if reading.next >= 0 and error.code in ("wait", "draining") and not reading.ending:
            self._again[reading] = self._now_ms + max(error.retry_ms, self.settings.retry_min_ms)
            return
        reading.fail(error)
        self._end(reading)

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
            self._events.append(Answered(asked.token, command.value))

    def _on_confirm(self, command: Confirm, _: Sequence[Any]) -> None:
        self.publisher.confirmed(command)

    def _on_reading(self, command: Any, frames: Sequence[Any]) -> None:
        """Any command that names a subscription."""
        reading = self.readings.get(command.subscription)
        if reading is None:
            return  # it crossed our UNSUBSCRIBE
        kind = type(command)
        if reading.ending and kind is not Ended:
            return
        if kind is not Subscribed and kind is not Ended and not reading.active:
            raise RemoteProtocolError(
                "unexpected", f"{kind.__name__} for a subscription that was not accepted"
            )
        try:
            if kind is Deliver:
                reading.deliver(command, frames, self.publisher.limits)
            elif kind is Cover:
                reading.cover(command)
            elif kind is Gap:
                reading.gap(command)
            elif kind is Rewound:
                reading.rewound(command)
            elif kind is Mode:
                reading.mode(command)
            elif kind is Subscribed:
                reading.subscribed(command)
            else:
                reading.end_with(command)
                self._end(reading)
        except RemoteProtocolError as error:
            # The reader is told, and the link goes: what else is wrong on it is unknown.
            reading.fail(error)
            self._end(reading)
            raise
        self._arrived[reading] = None


_HANDLERS: Final[dict[type[Command], Callable[[Session, Any, Sequence[Any]], None]]] = {
    Welcome: Session._on_welcome,
    Ping: Session._on_ping,
    Pong: Session._on_pong,
    Bye: Session._on_bye,
    Refused: Session._on_refused,
    Result: Session._on_result,
    Confirm: Session._on_confirm,
    Subscribed: Session._on_reading,
    Ended: Session._on_reading,
    Deliver: Session._on_reading,
    Cover: Session._on_reading,
    Gap: Session._on_reading,
    Rewound: Session._on_reading,
    Mode: Session._on_reading,
}


class _Messages:
    """Commands and their frames, cut into messages within the broker's limits."""

    def __init__(self, commands_max: int) -> None:
        self._commands_max = commands_max
        self._commands: list[Command] = []
        self._frames: list[Any] = []
        self._bytes = 0
        self._messages: list[list[Any]] = []

    def put(self, command: Command, content: Any) -> None:
        """Add a command, and its content frame if it has one."""
        self._commands.append(command)
        if content is not None:
            self._frames.append(content)
            self._bytes += len(content)
        if self._bytes >= _MESSAGE_BYTES or len(self._commands) >= self._commands_max:
            self._cut()

    def finish(self) -> list[list[Any]]:
        """All messages."""
        self._cut()
        return self._messages

    def _cut(self) -> None:
        if self._commands:
            self._messages.append(encode_message(self._commands, self._frames))
            self._commands, self._frames, self._bytes = [], [], 0
