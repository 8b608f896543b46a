"""Parts of every Python driver: arguments, words, bodies and percentiles.

A driver is one client of a broker in a process of its own. It takes `key=value` arguments, talks
JSON lines on stdout, obeys lines on stdin: says `ready`, waits for a word, does its role, says ONE
result, waits for a word or the end of its input, and ends with status 0. Any failure is a message
on stderr and another status, never a figure.

The roles: `publish` sends all records at once, `fill` with a pause at the middle; `subscribe` takes
them as they come, `replay` when they are stored; `pace` sends one at each tick of a clock, `listen`
measures how late it comes; `request` asks, `respond` answers; `send` and `read` fill and empty a
mailbox; `steps` makes atomic steps.

Every record is checked by the consumer, in one way on all sides: its size, and the number in its
first eight bytes against the one that is due. See checks.py.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

BURST = 4096
"""Bodies that are checked in one go."""
POOL_BYTES = 1 << 30
"""Memory up to which all bodies are made before the clock starts."""
PRODUCER_SHIFT = 48
NUMBER_MASK = (1 << PRODUCER_SHIFT) - 1

Numbers = npt.NDArray[np.int64]


class DriverFailed(Exception):
    """Received data or the arguments are wrong in a way that no figure can express."""


class Options(msgspec.Struct, frozen=True):
    """The arguments of a driver; keys that are not here are ignored."""

    role: str
    url: str
    mode: str = ""
    subject: str = "perf"
    size: int = 140
    count: int = 1000
    form: str = "bulk"
    window: int = 4096
    """Records that a publisher leaves unconfirmed at most."""
    producer: int = 0
    producers: int = 1
    subscribers: int = 1
    flight: int = 64
    workers: int = 1
    rate: float = 1000.0
    start: str = "new"
    select: str = "whole"
    subjects: int = 1
    """With more than one, record i goes to subject i % subjects; each has a wildcard
    subscription."""
    rare: int = 0
    """Above 0: one record in so many goes to a subject of its own."""
    seed: int = 1
    idle_s: float = 20.0
    """Time without a record after which a consumer reports what it has."""
    from_ns: int = 0
    """With select=time: CLOCK_REALTIME in ns from which on records are wanted."""
    queue: int = 0
    """1: the work is a queue of messages, each acknowledged by its own."""
    first: int = 0
    """With select=time: number of the first of them."""
    paced: int = 0
    """1: requests are made at `rate`, each when it is due and the one before is answered."""


def options_of(argv: Sequence[str]) -> Options:
    given = dict(word.partition("=")[::2] for word in argv)
    known = {name: given[name] for name in Options.__struct_fields__ if name in given}
    return msgspec.convert(known, Options, strict=False)


def fail(*why: object) -> NoReturn:
    """End at once: an error in a library's callback would end in its log, and the run go on."""
    print(*why, file=sys.stderr, flush=True)
    os._exit(1)


# --- words ----------------------------------------------------------------------------------


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def await_word() -> None:
    """Return when the parent sends a word, or is gone."""
    sys.stdin.readline()


async def word() -> None:
    """Return when the parent sends a word; beside a running event loop."""
    await asyncio.to_thread(await_word)


Part = Callable[[Options], Awaitable[None] | None]


def play(parts: Mapping[str, Part], *, fast_loop: bool = True) -> None:
    """Play the role that the arguments name, in uvloop where it is installed and wanted."""
    options = options_of(sys.argv[1:])
    part = parts.get(options.role)
    if part is None:
        raise SystemExit(f"no role {options.role!r}; there are {', '.join(parts)}")
    if not asyncio.iscoroutinefunction(part):
        part(options)
        return

    async def playing() -> None:
        done = part(options)
        assert done is not None
        await done

    run(playing(), fast_loop=fast_loop)


def has_fast_loop() -> bool:
    return importlib.util.find_spec("uvloop") is not None


def run(coroutine: Coroutine[Any, Any, None], *, fast_loop: bool = True) -> None:
    """Run a role to its end, in uvloop where it is installed and wanted."""
    if fast_loop:
        try:
            import uvloop
        except ImportError:
            pass
        else:
            uvloop.run(coroutine)
            return
    asyncio.run(coroutine)


class Clock:
    """Wall and processor time of this process since it was made."""

    def __init__(self) -> None:
        self.begun_ns = time.monotonic_ns()
        self._cpu = time.process_time()

    def cpu_s(self) -> float:
        return time.process_time() - self._cpu


async def begin(client: str) -> Clock:
    """Say that the role is ready, wait for the word, and return the clock of the run."""
    say(ready=True, client=client)
    await word()
    return Clock()


def begin_in_thread(client: str) -> Clock:
    """Do as begin(), without an event loop."""
    say(ready=True, client=client)
    await_word()
    return Clock()


async def work_until_told(client: str) -> None:
    """Let a worker's callbacks work until the word, and report what they cost the processor."""
    clock = Clock()
    say(ready=True, client=client)
    await word()
    say(cpu_s=clock.cpu_s())
    await word()


# --- what is sent ---------------------------------------------------------------------------


def body(producer: int, number: int, size: int) -> bytes:
    """Return record `number` of a producer: eight bytes that say which, and filler."""
    return (producer << PRODUCER_SHIFT | number).to_bytes(8, "little") + b"x" * (size - 8)


def stamped(producer: int, number: int, size: int) -> bytes:
    """Return a body with the time of sending in its second eight bytes."""
    head = (producer << PRODUCER_SHIFT | number).to_bytes(8, "little")
    return head + time.monotonic_ns().to_bytes(8, "little") + b"x" * (size - 16)


def bodies(options: Options) -> Iterator[list[bytes]]:
    """Yield all bodies of a publisher, in lists of a burst; made beforehand where memory allows."""
    made = [] if options.count * (options.size + 40) > POOL_BYTES else list(_bursts(options))
    return iter(made) if made else _bursts(options)


def _bursts(options: Options) -> Iterator[list[bytes]]:
    size = options.size
    if size < 8:
        raise DriverFailed(f"a record of {size} bytes has no room for its number")
    for first in range(0, options.count, BURST):
        count = min(BURST, options.count - first)
        block = np.full((count, size), ord("x"), np.uint8)
        numbers = np.arange(first, first + count, dtype="<i8") | options.producer << PRODUCER_SHIFT
        block[:, :8] = numbers.view(np.uint8).reshape(count, 8)
        blob = block.tobytes()
        yield [blob[at : at + size] for at in range(0, count * size, size)]


# --- which subject --------------------------------------------------------------------------


def rare_places(count: int, every: int, seed: int) -> Numbers:
    """Return numbers of records for the rare subject: one at a random place of each block."""
    block = np.arange(-(-count // every), dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = block + np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    places = (block * np.uint64(every) + z % np.uint64(every)).astype(np.int64)
    return places[places < count]


class Subjects:
    """The subject of record i; `separator` and `wildcard` are the peer's."""

    def __init__(self, options: Options, separator: str = ".", wildcard: str = "*") -> None:
        base = options.subject.replace(".", separator)
        self.one = base
        self.many = options.subjects > 1 or options.rare > 0
        self.rare = f"{base}{separator}rare"
        self.names = [f"{base}{separator}{k}{separator}x" for k in range(options.subjects)]
        self.patterns = [
            f"{base}{separator}{k}{separator}{wildcard}" for k in range(options.subjects)
        ]
        self._rare = frozenset[int]()
        if options.rare:
            places = rare_places(options.count, options.rare, options.seed)
            self._rare = frozenset(places.tolist())

    def of_burst(self, first: int, count: int) -> list[str]:
        """Return the subjects of the records from `first` on."""
        if not self.many:
            return [self.one] * count
        names, rare = self.names, self._rare
        every = len(names)
        if not rare:
            return [names[i % every] for i in range(first, first + count)]
        return [self.rare if i in rare else names[i % every] for i in range(first, first + count)]


# --- latencies ------------------------------------------------------------------------------


def percentiles(nanoseconds: Sequence[int]) -> dict[str, float]:
    if not nanoseconds:
        return {"p50_us": 0.0, "p99_us": 0.0, "p999_us": 0.0}
    at = np.percentile(np.asarray(nanoseconds, np.int64), [50, 99, 99.9]) / 1000
    return {"p50_us": float(at[0]), "p99_us": float(at[1]), "p999_us": float(at[2])}


def percentiles_of(lone: Lone) -> dict[str, float]:
    """Return percentiles of a publisher's waits for confirms; {} with more than one record out."""
    return percentiles(lone.latencies) if lone.latencies else {}


class Listen:
    """One-way latencies of records that carry the time of their sending."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.latencies: list[int] = []
        self._last = -1

    def add(self, body: bytes) -> bool:
        """Take one record; True when it was the last."""
        now = time.monotonic_ns()
        number = int.from_bytes(body[:8], "little")
        if number != self._last + 1 or len(body) != self.options.size:
            raise DriverFailed(f"record {number} of {len(body)} bytes came after {self._last}")
        self._last = number
        self.latencies.append(now - int.from_bytes(body[8:16], "little"))
        return len(self.latencies) >= self.options.count

    @property
    def done(self) -> bool:
        return len(self.latencies) >= self.options.count

    def tell(self, clock: Clock) -> None:
        say(received=len(self.latencies), **percentiles(self.latencies), cpu_s=clock.cpu_s())


def hearing(heard: Listen, over: asyncio.Event) -> Callable[[bytes], object]:
    """Return a library's callback that gives each body to the listener; the last sets `over`."""

    def take(body: bytes) -> None:
        try:
            if heard.add(body):
                over.set()
        except DriverFailed as error:
            fail(error)

    return take


async def listen_to_all(heard: Listen, over: asyncio.Event, client: str) -> None:
    """Begin; then let a library's callbacks hear all records until `over`, and report them."""
    clock = await begin(client)
    await over.wait()
    heard.tell(clock)
    await word()


async def ticks(options: Options) -> AsyncIterator[int]:
    """Yield the numbers of the records at their times; a late caller goes on at once."""
    begun = time.monotonic()
    for number in range(options.count):
        wait = begun + number / options.rate - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        yield number


def ticks_of_thread(options: Options) -> Iterator[int]:
    """Yield the numbers of the records at their times, without an event loop."""
    begun = time.monotonic()
    for number in range(options.count):
        wait = begun + number / options.rate - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        yield number


class Requests:
    """Round trips: each reply is compared with its request, and timed."""

    def __init__(self, options: Options) -> None:
        self.bodies = [body for burst in _bursts(options) for body in burst]
        self.latencies: list[int] = []
        self._gap_ns = int(1e9 / options.rate) if options.paced else 0
        self._due_ns = 0

    def wait_s(self) -> float:
        """Return how long to wait before the next request; 0 where requests are not paced."""
        if not self._gap_ns:
            return 0.0
        now = time.monotonic_ns()
        self._due_ns = self._due_ns + self._gap_ns if self._due_ns else now
        return max(0, self._due_ns - now) / 1e9

    def at_its_turn(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[int], None], number: int
    ) -> None:
        """Call send(number) when the next request is due."""
        wait = self.wait_s()
        if wait:
            loop.call_later(wait, send, number)
        else:
            send(number)

    async def turn(self) -> None:
        """Return when the next request is due."""
        wait = self.wait_s()
        if wait:
            await asyncio.sleep(wait)

    def answered(self, number: int, reply: bytes, sent_ns: int) -> None:
        self.latencies.append(time.monotonic_ns() - sent_ns)
        if reply != b"re:" + self.bodies[number]:
            raise DriverFailed(f"the reply to request {number} is {reply[:40]!r}")

    def tell(self, clock: Clock) -> None:
        if len(self.latencies) != len(self.bodies):
            raise DriverFailed(f"{len(self.latencies)} replies to {len(self.bodies)} requests")
        say(
            begun_ns=clock.begun_ns,
            ended_ns=time.monotonic_ns(),
            **percentiles(self.latencies),
            cpu_s=clock.cpu_s(),
        )


class Lone:
    """Times that a publisher's records wait for confirms, where one is out at a time."""

    def __init__(self, window: int) -> None:
        self.latencies: list[int] = []
        self._kept = window == 1
        self._sent_ns = 0

    def sent(self) -> None:
        if self._kept:
            self._sent_ns = time.monotonic_ns()

    def confirmed(self) -> None:
        if self._kept:
            self.latencies.append(time.monotonic_ns() - self._sent_ns)


class Window:
    """Records that a publisher has sent and those confirmed; at most `size` are out."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = self.confirmed = 0
        self.lone = Lone(size)
        self._moved = asyncio.Event()

    @property
    def full(self) -> bool:
        return self.sent - self.confirmed >= self.size

    def send(self, count: int = 1) -> None:
        """Count so many records as sent."""
        self.lone.sent()
        self.sent += count

    def confirm(self, count: int) -> None:
        self.lone.confirmed()
        self.confirmed += count
        if self.sent - self.confirmed <= self.size // 2:
            self._moved.set()

    async def room(self) -> None:
        """Wait, when the window is full, until half of it is free again."""
        while self.full:
            self._moved.clear()
            await self._moved.wait()

    async def all(self) -> None:
        while self.confirmed < self.sent:
            self._moved.clear()
            await self._moved.wait()


class Middle:
    """The pause that a fill makes after half of its records, for a replay from a time on."""

    PAUSE_S = 0.05

    def __init__(self, options: Options) -> None:
        self.wanted = options.role == "fill"
        self.half = options.count // 2
        self.number = -1
        self.time_ns = 0

    def due(self, sent: int) -> bool:
        """Whether to pause after so many are sent; all of them must be confirmed first."""
        return self.wanted and self.number < 0 and sent >= self.half

    def pause(self, sent: int) -> None:
        self.number = sent
        time.sleep(self.PAUSE_S / 2)
        self.time_ns = time.time_ns()
        time.sleep(self.PAUSE_S / 2)


def say_published(
    clock: Clock, confirmed: int, middle: Middle | None = None, lone: Lone | None = None
) -> None:
    """Report the result of publish and fill."""
    ended_ns = time.monotonic_ns()
    facts: dict[str, float] = {}
    if middle is not None and middle.wanted:
        facts = {"middle": middle.number, "middle_ns": middle.time_ns}
    if lone is not None:
        facts |= percentiles_of(lone)
    say(
        begun_ns=clock.begun_ns,
        ended_ns=ended_ns,
        confirmed=confirmed,
        cpu_s=clock.cpu_s(),
        **facts,
    )


def say_paced(clock: Clock) -> None:
    say(begun_ns=clock.begun_ns, ended_ns=time.monotonic_ns(), cpu_s=clock.cpu_s())
