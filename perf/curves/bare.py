"""The broker's core alone: no sockets and no disk, with a position in place of a journal.

Owns the shell that answers every bundle at once. Measurements with it show the core's own work,
processor time of one thread, at counts for which a machine of two cores has not enough clients.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from time import process_time
from typing import Any

from malamute_protocol import commands as wire
from malamute_protocol.stamp import Stamp
from malamute_py.broker import Appended, Broker, BrokerSettings, RecoveredState
from malamute_py.broker.ready import Send

NOW_MS = 1_700_000_000_000
UNBOUNDED = 1 << 60


class BareBroker:
    """A core with bounds that no measurement meets, whose messages go to no client."""

    def __init__(self, **settings: Any) -> None:
        numbers = iter(range(1, 1 << 62))
        bounds: dict[str, Any] = {
            # Its peers answer no PING: their links must not expire.
            "share_min_bytes": UNBOUNDED, "share_max_bytes": UNBOUNDED, "heartbeat_ms": 60_000,
            "links_max": 1 << 30, "subscriptions_max": 1 << 30, "streams_max": 1 << 30,
            "all_patterns_bytes_max": UNBOUNDED, "all_settings_bytes_max": UNBOUNDED,
        }  # fmt: skip
        self.core = Broker(
            BrokerSettings(**{**bounds, **settings}),
            uuid=bytes(16), epoch=1, state=RecoveredState(),
            random=lambda count: next(numbers).to_bytes(count, "big"),
        )  # fmt: skip
        self.now_ms = NOW_MS
        self.wake_at_ms: int | None = None
        self.on_send: Callable[[Send], None] | None = None
        """Callback that gets every message to a link; peers that want to answer set it."""
        self._end = 0

    def hello(self, link: int, identity: str = "") -> None:
        """Open a link."""
        self.say(link, wire.Hello((1, 1), struct.pack("<QQ", 1, link), identity=identity))

    def say(self, link: int, *commands: wire.Command, frames: Sequence[Any] = ()) -> None:
        """Give the core one message of a link, and do what it wants."""
        self.core.receive(link, "", commands, frames, self.now_ms)
        self.settle()

    def settle(self) -> None:
        """Do what the core wants until it wants nothing more."""
        core = self.core
        while True:
            ready = core.take_ready()
            if not ready:
                self.wake_at_ms = core.wake_at_ms()
                return
            for bundle in ready.appends:
                stamps = []
                for batch in bundle.batches:
                    size = 96 + len(batch.content)
                    self._end += size
                    stamps.append(
                        Stamp(
                            1, 0, 0, 0, 1, batch.base_offset, self.now_ms, batch.stream, 0, size,
                            batch.count, 0, 0,
                        ).pack()
                    )  # fmt: skip
                core.appended(Appended(bundle.token, tuple(stamps), self._end))
            if self.on_send is not None:
                for send in ready.sends:
                    self.on_send(send)
            if ready.appends:
                core.synced("main", self._end, self.now_ms)

    def publish(self, link: int, stream: str, contents: Iterable[bytes], tracker: int = 1) -> None:
        """Publish contents, a batch each, in one message."""
        frames = list(contents)
        commands = [wire.Publish(stream, tracker + n) for n in range(len(frames))]
        self.say(link, *commands, frames=frames)

    def pass_time(self, ms: int) -> None:
        """Let time pass, in one call, and have the core do what is due by then."""
        self.now_ms += ms
        self.core.tick(self.now_ms)
        self.settle()


class Clock:
    """Processor time of this process, as a context: `seconds` once it is left."""

    seconds = 0.0

    def __enter__(self) -> Clock:
        self._began = process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = process_time() - self._began
