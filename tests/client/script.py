"""A scripted broker for one session: a virtual clock, decoded commands, no sockets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from malamute_protocol import commands as c
from malamute_protocol.batch import Content, Stamp, encode
from malamute_protocol.commands import Command
from malamute_protocol.framing import decode_message, encode_message
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.calls import make_row, subscribe_options
from malamute_py.client.session.events import Connect, Disconnect, Event, Published
from malamute_py.client.session.publisher import level_number
from malamute_py.client.session.session import Session
from malamute_py.client.session.subscription import SubscriptionState
from malamute_py.client.settings import ClientSettings
from malamute_py.client.words import ConfirmAt

STREAM_UUID = b"s" * 16
BROKER_UUID = b"b" * 16


def welcome(**changes: Any) -> c.Welcome:
    facts: dict[str, Any] = {
        "version": 1,
        "broker": BROKER_UUID,
        "epoch": 1,
        "heartbeat_ms": 1000,
        "expiry_ms": 3000,
        "window_bytes": 1 << 20,
        "record_bytes_max": 1 << 20,
        "batch_bytes_max": 1 << 20,
        "batch_records_max": 1000,
        "message_commands_max": 100,
    }
    return c.Welcome(**{**facts, **changes})


def stamped(content: bytes, base_offset: int, *, epoch: int = 1) -> list[bytes]:
    """Stamp and content as a live delivery's two frames."""
    head = Content(content).head
    stamp = Stamp(
        flags=1,
        lsn=0,
        bundle_lsn=0,
        synced_lsn=0,
        epoch=epoch,
        base_offset=base_offset,
        append_time_ms=1_700_000_000_000,
        stream=1,
        origin=0,
        size=96 + len(content),
        count=head.count,
        control_kind=0,
        content_crc=head.content_crc,
    )
    return [stamp.pack(), content]


class Script:
    """The session under test and what its broker says and hears."""

    def __init__(self, **options: Any) -> None:
        self.now_ms = 1000
        self.counter = 0
        options.setdefault("endpoints", ("tcp://one:1",))
        options.setdefault("batch_bytes", 4096)
        self.session = Session(ClientSettings(**options), self.random, self.now_ms)
        self.heard: list[tuple[Command, tuple[Any, ...]]] = []
        self.happened: list[Event] = []
        self.transport: list[Connect | Disconnect] = []
        self.step()

    def random(self, count: int) -> bytes:
        self.counter += 1
        return bytes([self.counter % 251]) * count

    def state(self) -> LinkState:
        return self.session.state

    def step(self) -> list[Command]:
        """Take out what the session wants; returns the commands of this step."""
        fresh: list[Command] = []
        while True:
            before = len(fresh)
            for message in self.session.take_outgoing(self.now_ms):
                for command, frames in decode_message(message):
                    fresh.append(command)
                    self.heard.append((command, frames))
            wanted = self.session.take_transport()
            if wanted is not None:
                self.transport.append(wanted)
            elif len(fresh) == before:
                break
        self.happened += self.session.take_events()
        return fresh

    def say(self, *commands: Command, frames: Any = ()) -> list[Command]:
        self.session.receive(encode_message(commands, list(frames)), self.now_ms)
        return self.step()

    def wait(self, milliseconds: int) -> list[Command]:
        self.now_ms += milliseconds
        self.session.wake(self.now_ms)
        return self.step()

    def open(self, **changes: Any) -> list[Command]:
        return self.say(welcome(**changes))

    def lose(self) -> None:
        self.session.lost("closed", "the cable", self.now_ms)
        self.step()

    def reconnect(self, **changes: Any) -> list[Command]:
        self.lose()
        self.wait(60_000)
        return self.open(**changes)

    # --- publishing ---

    def publish(
        self, body: bytes, stream: str = "s", confirm: ConfirmAt = "synced", *,
        keyed: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        row = make_row(
            body,
            more.get("subject", "a"),
            more.get("fields"),
            None,
            None,
            None,
            more.get("token", body),
        )
        self.session.publisher.add(stream, level_number(confirm), row, keyed=keyed)

    def publish_content(self, bodies: list[bytes], stream: str = "s", token: Any = None) -> bytes:
        content = encode(bodies, subject="a")
        level = level_number("synced")
        self.session.publisher.add_content(stream, level, content, len(bodies), token)
        return content

    def open_producer(self, number: int = 7, epoch: int = 0, **following: int) -> list[Command]:
        """Answer the OPEN_PRODUCER that was heard last."""
        asked = self.last(c.OpenProducer)
        return self.say(c.Result(asked.request, {"id": number, "epoch": epoch, "next": following}))

    def confirm(self, publish: c.Publish, offset: int, **more: Any) -> list[Command]:
        return self.say(c.Confirm(publish.tracker, 3, 1, offset, 1_700_000_000_000, **more))

    def outcomes(self) -> list[tuple[Any, Any]]:
        """(tokens, outcome) of every batch that was settled since the last call."""
        found = [
            (event.tokens, event.outcome) for event in self.happened if isinstance(event, Published)
        ]
        self.happened = [event for event in self.happened if not isinstance(event, Published)]
        return found

    def last(self, kind: type[Any]) -> Any:
        return next(command for command, _ in reversed(self.heard) if type(command) is kind)

    def contents(self) -> list[Content]:
        """Every content that was published, in order, with repeats."""
        return [Content(frames[0]) for command, frames in self.heard if type(command) is c.Publish]

    # --- reading ---

    def subscribe(self, **changes: Any) -> SubscriptionState:
        asked: dict[str, Any] = {
            "start": "earliest",
            "visibility": "live",
            "end": None,
            "until": "",
            "client_time": None,
            "create": True,
            "whole": False,
            "credit_records": 100,
            "credit_bytes": 1 << 20,
        }
        pattern = changes.pop("pattern", "#")
        reading = self.session.subscribe(subscribe_options("s", pattern, **{**asked, **changes}))
        self.step()
        return reading

    def accept(self, reading: SubscriptionState, next: int = 0, **changes: Any) -> list[Command]:
        facts: dict[str, Any] = {"epoch": 1, "first": 0, "tail": next}
        return self.say(
            c.Subscribed(reading.number, STREAM_UUID, next=next, **{**facts, **changes})
        )

    def deliver(
        self, reading: SubscriptionState, bodies: list[bytes], base: int, **more: Any
    ) -> list[Command]:
        frames = stamped(encode(bodies, subject="a"), base)
        end = more.pop("next", base + len(bodies))
        begin = more.pop("from_", base)
        return self.say(
            c.Deliver(reading.number, begin, end, len(frames), more.pop("rows", None)),
            frames=frames,
        )


def bodies_of(content: Content) -> list[bytes]:
    bodies = content.bodies()
    ends = bodies.offsets.tolist()
    return [bytes(bodies.blob[i:j]) for i, j in pairwise(ends)]
