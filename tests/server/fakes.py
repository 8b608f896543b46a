"""A core and rings that do next to nothing, so that the loop is tested by itself."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Self

import zmq

from malamute_protocol.commands import Bye, Command, Ping, Pong, Publish
from malamute_protocol.content_layout import has_large_table
from malamute_protocol.limits import Limits
from malamute_py.broker.ready import AppendBundle, Appended, AppendRefused, Event, Ready, Send
from malamute_py.config import Config
from malamute_py.server.collector import Collector
from malamute_py.server.connections.descriptors import waiting
from malamute_py.server.connections.guard import Guard
from malamute_py.server.connections.watchdog import Watchdog
from malamute_py.server.loop import Loop
from malamute_py.server.result_queue import ResultQueue
from malamute_py.server.sockets import Listener, parse_endpoint
from tests.waiting import WAIT_S

LOCAL = Config(listen=["tcp://127.0.0.1:0"])


class Lines:
    """A log that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def _write(self, level: str, event: str, facts: dict[str, Any]) -> None:
        self.lines.append((level, event, facts))

    def debug(self, event: str, **facts: Any) -> None:
        self._write("debug", event, facts)

    def info(self, event: str, **facts: Any) -> None:
        self._write("info", event, facts)

    def warning(self, event: str, **facts: Any) -> None:
        self._write("warning", event, facts)

    def error(self, event: str, **facts: Any) -> None:
        self._write("error", event, facts)

    def critical(self, event: str, **facts: Any) -> None:
        self._write("critical", event, facts)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [facts for _, name, facts in self.lines if name == event]


def nothing() -> Ready:
    return Ready([], [], [], [], [], [], [], [], [])


class EchoCore:
    """Answers PING by PONG and PUBLISH by the content it got; ends links as the real one does."""

    def __init__(self) -> None:
        self.ready = nothing()
        self.calls: list[tuple[Any, ...]] = []
        self.published: list[Any] = []
        self.failures: list[tuple[int, str, Exception]] = []
        self.turns: list[int] = [0]
        """Messages that came between one question for Ready and the next."""
        self.addresses: list[tuple[int, str]] = []
        """Links and the addresses that they came from."""
        self.unread = 0
        """How often read_ahead() says that a message is still to be read."""
        self.waits = False
        """Whether a message that is to be read waits for a thread."""

    def came_from(self, link: int, address: str, now_ms: int) -> None:
        self.addresses.append((link, address))

    ahead_bytes = 16 << 10

    def takes_long(self, frame: Any) -> bool:
        return has_large_table(frame, self.ahead_bytes)

    def reads_first(self, frame: Any) -> bool:
        return has_large_table(frame)

    def validating(self, link: int) -> bool:
        return self.waits

    def checked(self, answer: Any) -> int:
        self.waits = False
        return int(answer.token)

    def read_ahead(self, link: int, commands: Any, frames: Any, now_ms: int) -> bool:
        self.calls.append(("read ahead", link, len(frames)))
        self.unread -= 1
        return self.unread < 0

    def receive(self, link: int, identity: str, commands: Any, frames: Any, now_ms: int) -> None:
        self.turns[-1] += 1
        for command in commands:
            if isinstance(command, Ping):
                self.send(link, Pong(command.token))
            elif isinstance(command, Publish):
                self.published.append((link, tuple(frames)))
                self.send(link, command, *frames)
            else:
                self.calls.append((type(command).__name__, link, identity))

    def send(self, link: int, command: Command, *frames: Any) -> None:
        self.ready.sends.append(Send(link, [command], frames))

    def malformed(self, link: int, code: str, reason: str, now_ms: int) -> None:
        self.calls.append(("malformed", link, code))
        self.send(link, Bye(code, reason))
        self.ready.closes.append(link)

    def failed(self, link: int, doing: str, error: Exception, now_ms: int) -> None:
        self.failures.append((link, doing, error))

    def link_lost(self, link: int, now_ms: int) -> int:
        self.calls.append(("lost", link))
        self.ready.closes.append(link)
        return 0

    def blocked(self, link: int) -> None:
        self.calls.append(("blocked", link))

    def writable(self, link: int) -> None:
        self.calls.append(("writable", link))

    def skipped(self, skipped_ms: int, now_ms: int) -> None:
        self.calls.append(("skipped", skipped_ms))

    def tick(self, now_ms: int) -> None:
        self.calls.append(("tick",))

    def appended(self, answer: Appended) -> None:
        self.calls.append(("appended", answer.token))

    def append_refused(self, answer: AppendRefused) -> None:
        self.calls.append(("refused", answer.token))

    def hurries(self, ring: str) -> bool:
        return True

    def synced(self, ring: str, lsn: int, now_ms: int) -> None:
        self.calls.append(("synced", ring, lsn))

    def ring_failed(self, ring: str, code: str, reason: str) -> None:
        self.calls.append(("ring_failed", ring, code))

    def history(self, answer: Any) -> None:
        self.calls.append(("history", answer))

    def answered(self, answer: Any) -> None:
        self.calls.append(("answered", answer))

    def trimmed(self, ring: str, firsts: Any) -> None:
        self.calls.append(("trimmed", ring))

    def bodies(self, answer: Any) -> None:
        self.calls.append(("bodies", answer))

    def event(self, name: str) -> None:
        self.ready.events.append(Event(name, "info", {}))

    def drain(self, now_ms: int) -> None:
        self.calls.append(("drain",))

    def take_outgoing(self) -> Ready:
        ready, self.ready = self.ready, nothing()
        self.turns.append(0)
        return ready

    has_work = False

    def take_ready(self) -> Ready:
        return self.take_outgoing()

    def wake_at_ms(self) -> int | None:
        return None


class NoRings:
    """Rings that keep nothing, and whose reads and questions are dropped."""

    refusal = ""
    """The code that every append is answered by."""

    def open(self, name: str, settings: dict[str, Any]) -> None: ...
    def append(self, bundles: list[AppendBundle]) -> list[Appended | AppendRefused]:
        if self.refusal:
            return [AppendRefused(each.token, self.refusal, "no room") for each in bundles]
        return [Appended(each.token, (), 0) for each in bundles]

    def read(self, wanted: Any) -> None: ...
    def ask(self, query: Any) -> None: ...
    def read_bodies(self, wanted: Any) -> None: ...
    def pin(self, ring: str, name: str, stream: int, offset: int | None) -> None: ...
    def trim(self, ring: str, stream: int, offset: int) -> None: ...

    sync_at_ms: int | None = None
    syncs_due = 0

    def sync(self, hurries: Callable[[str], bool], now_ms: int) -> None: ...
    def sync_ended(self, name: str, lsn: int) -> None:
        self.syncs_due -= 1

    def syncing(self) -> bool:
        return False


class RunningLoop:
    """A loop over an EchoCore, in a thread of its own, by a clock that stands or leaps at will."""

    def __init__(self, config: Config, collector: Collector | None = None) -> None:
        self.core = EchoCore()
        self.rings = NoRings()
        self.log = Lines()
        self.counters: defaultdict[str, int] = defaultdict(int)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.results = ResultQueue()
        self.guard = Guard(
            config,
            count=self._count,
            report=lambda name, facts: self.log.warning(name, **facts),
        )
        self.watchdog = Watchdog(self.guard, config.limits.unread_share_bytes_max // 4)
        self.listeners = [
            Listener(self.context, parse_endpoint(endpoint), config, None)
            for endpoint in config.listen
        ]
        self.loop = Loop(
            config,
            core=self.core,
            rings=self.rings,
            listeners=self.listeners,
            guard=self.guard,
            results=self.results,
            limits=Limits(),
            clock=self._now_ms,
            log=self.log,
            counters=self.counters,
            meter=self.meter,
            worked=lambda: self._metered_ns,
            watchdog=self.watchdog,
            validate=lambda check: self.core.calls.append(("validate", check)),
            reloaded=lambda *_: None,
            collector=collector,
        )
        self.failure: BaseException | None = None
        self.step_ns = 0
        """Nanoseconds by which the meter goes on each time that it is asked."""
        self._metered_ns = 0
        self._stands_at_ms: int | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run)

    def _count(self, name: str) -> None:
        self.counters[name] += 1

    @property
    def endpoint(self) -> str:
        return self.listeners[0].name

    def meter(self) -> int:
        self._metered_ns += self.step_ns
        return self._metered_ns

    def spend(self, ns: int) -> None:
        """The meter goes on by so much."""
        self._metered_ns += ns

    def _now_ms(self) -> int:
        stands_at_ms = self._stands_at_ms
        return time.time_ns() // 1_000_000 if stands_at_ms is None else stands_at_ms

    def stop_the_clock(self) -> None:
        """Stop time for the loop from now on, however slow the machine is."""
        self._stands_at_ms = self._now_ms()

    def leap(self, ms: int) -> None:
        """Let so much time pass at once, on a clock that stands, and have the loop notice it."""
        self.let_pass(ms)
        self.results.wake()

    def let_pass(self, ms: int) -> None:
        """Let so much time pass at once, on a clock that stands, without a message."""
        assert self._stands_at_ms is not None
        self._stands_at_ms += ms

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.loop.turn()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.failure = error

    def __enter__(self) -> Self:
        self.watchdog.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self.results.wake()
        self._thread.join()
        self.watchdog.stop()
        for listener in self.listeners:
            listener.close(0)
        self.guard.close()
        self.results.close()
        self.context.term()

    def until(self, condition: Any, wait_s: float = WAIT_S) -> Any:
        """Wait for a state that the loop's thread brings about, and return it."""
        deadline = time.monotonic() + wait_s
        while not (found := condition()):
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.005)
        return found

    def await_libzmq(self) -> None:
        """Wait until libzmq has read what the kernel had of each connection, and passed it on."""
        connections = self.guard.connections.all()
        assert connections
        self.until(lambda: not any(waiting(each.fd, each.inode) for each in connections))
        time.sleep(0.05)  # It tells nobody of what it passed on.


class Noting:
    """Record the calls to the core of a loop that no thread drives."""

    def __init__(self) -> None:
        self.running = RunningLoop(LOCAL)
        self.calls: list[tuple[int, list[Command], list[bytes]]] = []
        self.counts: Counter[int] = Counter()
        self.running.core.receive = self._receive  # type: ignore[method-assign]

    def _receive(
        self, link: int, identity: str, commands: list[Command], frames: list[bytes], now_ms: int
    ) -> None:
        self.calls.append((link, list(commands), list(frames)))
        self.counts[link] += len(commands)

    def of(self, link: int) -> list[Command]:
        return [
            command for number, commands, _ in self.calls if number == link for command in commands
        ]

    def turns_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            self.running.loop.turn()

    def close(self) -> None:
        with self.running:
            pass
