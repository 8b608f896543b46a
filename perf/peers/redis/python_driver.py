"""A Redis client: hiredis-py over a socket, with which redis-py itself packs and parses.

Without redis-py's layers above it a pipeline of XADD is 2.7 times as fast (553,000 records/s
against 205,000 on a connection of redis-py and 142,000 through `Pipeline.xadd`), and XREAD twice:
the peer's best form. `form=single` is redis.asyncio as a user writes it: a pipeline of `flight`
records at a time, since one connection takes no second command before the answer to the first and
many connections would mix the order.

Streams are written by XADD with at most `window` unanswered and read by XREAD BLOCK with a large
COUNT. Pub/sub is written with CLIENT REPLY OFF, so that no unread answers are made, and ends with a
round trip. Requests go through lists, RPUSH and BLMPOP with a COUNT, which hands over many at once
where pub/sub hands over one: a call each of redis.asyncio, or in waves over a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import select
import selectors
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import hiredis

from perf.peers import driver
from perf.peers.checks import Check, checks_of, say_received, selected
from perf.peers.driver import Clock, DriverFailed, Options, Subjects, await_word, say

CLIENT = f"hiredis-py {importlib.metadata.version('hiredis')}"
READ_BYTES = 32 << 10
READ_RECORDS = 10_000
"""COUNT of an XREAD."""
HAND_OVER = 256
"""Most requests or replies that a BLMPOP takes."""

Command = tuple[bytes, ...]
# Its stubs know tuples of one element only.
pack: Callable[[Command], bytes] = cast("Any", hiredis.pack_command)


class Wire:
    """One connection: commands go out packed, replies come as hiredis makes them."""

    def __init__(self, url: str) -> None:
        place = urllib.parse.urlsplit(url)
        self.socket = socket.create_connection((place.hostname or "", place.port or 6379))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Its stubs know bytes only, and a buffer is there to spare copying into them.
        self._reader: Any = hiredis.Reader()
        self._buffer = bytearray(READ_BYTES)

    def send(self, commands: Sequence[Command]) -> None:
        self.socket.sendall(b"".join(map(pack, commands)))

    def replies(self) -> list[Any]:
        """Wait for the next bytes and return the replies that are whole."""
        got = self.socket.recv_into(self._buffer)
        if not got:
            raise DriverFailed("the server closed the connection")
        self._reader.feed(self._buffer, 0, got)
        found: list[Any] = []
        next_of = self._reader.gets
        while (reply := next_of()) is not False:
            if isinstance(reply, Exception):
                raise DriverFailed(f"refused: {reply}")
            found.append(reply)
        return found

    def replies_there(self) -> list[Any]:
        """Return the replies that have come already."""
        there, _, _ = select.select([self.socket], [], [], 0)
        return self.replies() if there else []

    def take(self, count: int) -> list[Any]:
        """Wait for exactly so many replies."""
        found: list[Any] = []
        while len(found) < count:
            found += self.replies()
        if len(found) != count:
            raise DriverFailed(f"{len(found)} replies to {count} commands")
        return found

    def ask(self, *command: bytes) -> Any:
        self.send([command])
        return self.take(1)[0]

    def close(self) -> None:
        self.socket.close()


def key_of(options: Options) -> bytes:
    return options.subject.encode()


# --- publishing -----------------------------------------------------------------------------


def _commands(
    options: Options, subjects: Subjects, first: int, burst: list[bytes]
) -> list[Command]:
    """Return XADD or PUBLISH for a burst of bodies; in a stream a varying subject is a field."""
    if options.mode == "pubsub":
        if not subjects.many:
            channel = key_of(options)
            return [(b"PUBLISH", channel, body) for body in burst]
        names = subjects.of_burst(first, len(burst))
        return [(b"PUBLISH", name.encode(), body) for name, body in zip(names, burst, strict=True)]
    key = key_of(options)
    if not subjects.many:
        return [(b"XADD", key, b"*", b"b", body) for body in burst]
    names = subjects.of_burst(first, len(burst))
    return [
        (b"XADD", key, b"*", b"b", body, b"s", name.encode())
        for name, body in zip(names, burst, strict=True)
    ]


def _pieces(given: Iterator[list[bytes]], most: int) -> Iterator[list[bytes]]:
    for burst in given:
        for at in range(0, len(burst), most):
            yield burst[at : at + most]


def _publish_silently(wire: Wire, options: Options, given: Iterator[list[bytes]]) -> int:
    subjects, sent = Subjects(options), 0
    wire.send([(b"CLIENT", b"REPLY", b"OFF")])
    for piece in _pieces(given, 512):
        wire.send(_commands(options, subjects, sent, piece))
        sent += len(piece)
    if wire.ask(b"CLIENT", b"REPLY", b"ON") != b"OK":
        raise DriverFailed("no answer after CLIENT REPLY ON")
    return sent


def _publish_one_by_one(wire: Wire, options: Options, given: Iterator[list[bytes]]) -> driver.Lone:
    subjects, lone = Subjects(options), driver.Lone(1)
    for piece in _pieces(given, 1):
        commands = _commands(options, subjects, len(lone.latencies), piece)
        lone.sent()
        wire.send(commands)
        wire.take(1)
        lone.confirmed()
    return lone


def _publish_answered(
    wire: Wire, options: Options, given: Iterator[list[bytes]], middle: driver.Middle
) -> int:
    """Send piece after piece; the answers to a piece are taken when the window is full."""
    subjects, sent, answered = Subjects(options), 0, 0
    # Small pieces keep the server busy while the next one is packed.
    for piece in _pieces(given, min(512, options.window // 2)):
        while sent + len(piece) - answered > options.window:
            answered += len(wire.replies())
        wire.send(_commands(options, subjects, sent, piece))
        sent += len(piece)
        if middle.due(sent):
            answered += len(wire.take(sent - answered))
            middle.pause(sent)
    answered += len(wire.take(sent - answered)) if sent > answered else 0
    return answered


def publish(options: Options) -> None:
    """Send all records in the form that mode and window ask for; also the role `fill`."""
    if options.form == "single" and options.window > 1:
        driver.run(_publish_single(options))
        return
    wire = Wire(options.url)
    given = driver.bodies(options)
    middle = driver.Middle(options)
    clock = driver.begin_in_thread(CLIENT)
    lone = None
    if options.window == 1:
        lone = _publish_one_by_one(wire, options, given)
        confirmed = len(lone.latencies)
    elif options.mode == "pubsub":
        confirmed = _publish_silently(wire, options, given)
    else:
        confirmed = _publish_answered(wire, options, given, middle)
    driver.say_published(clock, confirmed, middle, lone)
    await_word()
    wire.close()


async def _publish_single(options: Options) -> None:
    """Send all records as a user of redis.asyncio writes it, a pipeline of `flight` at a time."""
    import redis.asyncio

    client = redis.asyncio.Redis.from_url(
        options.url, max_connections=options.flight, decode_responses=False
    )
    await client.ping()
    given = driver.bodies(options)
    clock = await driver.begin(f"redis-py {importlib.metadata.version('redis')}")
    key, sent = key_of(options), 0
    for piece in _pieces(given, options.flight):
        pipeline = client.pipeline(transaction=False)
        for body in piece:
            if options.mode == "pubsub":
                pipeline.publish(key, body)
            else:
                pipeline.xadd(key, {b"b": body})
        sent += len(await pipeline.execute())
    driver.say_published(clock, sent)
    await driver.word()
    await client.aclose()


# --- receiving ------------------------------------------------------------------------------


class _Reader:
    """Reads a stream, XREAD after XREAD."""

    def __init__(
        self, wire: Wire, options: Options, after: bytes, take: Callable[..., bool]
    ) -> None:
        self.wire = wire
        self.key = key_of(options)
        self.after = after
        self.take = take
        self.count = b"%d" % READ_RECORDS

    def ask(self) -> None:
        """Ask for the next entries after those that came, and for as many as `count`."""
        self.wire.send(
            [
                (
                    b"XREAD",
                    b"COUNT",
                    self.count,
                    b"BLOCK",
                    b"0",
                    b"STREAMS",
                    self.key,
                    self.after,
                )
            ]
        )

    def heard(self) -> bool:
        """Take records; True when the last one came."""
        for reply in self.wire.replies():
            entries = reply[0][1]
            self.after = entries[-1][0]
            if self.take(entries):
                return True
            self.ask()
        return False


class _Listener:
    """Hears what is published."""

    def __init__(self, wire: Wire, take: Callable[[list[Any]], bool]) -> None:
        self.wire = wire
        self.take = take

    def heard(self) -> bool:
        return self.take(self.wire.replies())


def _bodies_of_entries(check: Check) -> Callable[[list[Any]], bool]:
    return lambda entries: check.burst([entry[1][1] for entry in entries])


def _bodies_of_messages(check: Check) -> Callable[[list[Any]], bool]:
    # [message, channel, body] or [pmessage, pattern, channel, body]
    return lambda messages: check.burst([message[-1] for message in messages])


def _last_id(wire: Wire, options: Options) -> bytes:
    """Return the id after which to read."""
    if options.start == "first":
        return b"0-0"
    newest = wire.ask(b"XREVRANGE", key_of(options), b"+", b"-", b"COUNT", b"1")
    return bytes(newest[0][0]) if newest else b"0-0"


def _join(wire: Wire, options: Options) -> None:
    """Subscribe to the channel, or to a pattern for each subject."""
    subjects = Subjects(options)
    if options.subjects > 1:
        wire.send([(b"PSUBSCRIBE", pattern.encode()) for pattern in subjects.patterns])
        wire.take(options.subjects)
    else:
        wire.ask(b"SUBSCRIBE", key_of(options))


def _drive(parts: Sequence[_Reader | _Listener], idle_s: float) -> None:
    """Hear all of them out; return when each has its last or nothing came for so long."""
    if len(parts) == 1:
        part = parts[0]
        while not part.heard():
            part.wire.socket.settimeout(idle_s)  # not before the first record, which may be late
        return
    left = len(parts)
    begun = False
    with selectors.DefaultSelector() as selector:
        for part in parts:
            selector.register(part.wire.socket, selectors.EVENT_READ, part)
        while left:
            ready = selector.select(idle_s if begun else None)
            if not ready:
                return
            begun = True
            for key, _ in ready:
                if key.data.heard():
                    selector.unregister(key.fileobj)
                    left -= 1


def subscribe(options: Options) -> None:
    """Take all records as they come, over `subscribers` connections."""
    checks = checks_of(options)
    parts: list[_Reader | _Listener] = []
    for check in checks:
        wire = Wire(options.url)
        if options.mode == "pubsub":
            _join(wire, options)
            parts.append(_Listener(wire, _bodies_of_messages(check)))
        else:
            reader = _Reader(wire, options, _last_id(wire, options), _bodies_of_entries(check))
            reader.ask()
            parts.append(reader)
    say(ready=True, client=CLIENT)
    await_word()
    _hear(parts, checks, options)
    await_word()
    _remove(options)


def _hear(parts: Sequence[_Reader | _Listener], checks: Sequence[Check], options: Options) -> None:
    clock = Clock()
    with contextlib.suppress(TimeoutError):
        _drive(parts, options.idle_s)
    say_received(checks, clock)


def _remove(options: Options) -> None:
    if options.mode != "pubsub":
        Wire(options.url).ask(b"UNLINK", key_of(options))


def replay(options: Options) -> None:
    """Read the stream whole, from a time on (ids begin with one), or look for a subject in it."""
    wire = Wire(options.url)
    check = Check(options, selected(options))
    rare = Subjects(options).rare.encode()
    clock = driver.begin_in_thread(CLIENT)
    after = b"0-0"
    take = _bodies_of_entries(check)
    if options.select == "time":
        after = b"%d-0" % (options.from_ns // 1_000_000)
    elif options.select == "rare":
        # Nothing on the server can look into a stream: all is read.
        left = options.count

        def take(entries: list[Any]) -> bool:
            nonlocal left
            left -= len(entries)
            # The fields of an entry: b"b", the body, b"s", the subject.
            check.burst([fields[1] for _, fields in entries if fields[3] == rare])
            return left <= 0

    reader = _Reader(wire, options, after, take)
    reader.ask()
    while not reader.heard():
        pass
    check.close()
    check.begun_ns = clock.begun_ns
    say_received([check], clock)
    await_word()


# --- requests -------------------------------------------------------------------------------


async def _request_by_callers(options: Options) -> None:
    """Make requests by `flight` callers who each await a call of their own.

    A call pushes its request and waits for its future; one task takes the replies, many at once,
    and gives each to its caller.
    """
    import redis.asyncio

    client: Any = redis.asyncio.Redis.from_url(options.url, max_connections=options.flight + 2)
    requests = driver.Requests(options)
    key = options.subject
    inbox = f"{key}:{time.monotonic_ns()}"
    head = inbox.encode() + b" "
    waiting: dict[int, asyncio.Future[bytes]] = {}
    numbers = iter(range(options.count))
    loop = asyncio.get_running_loop()

    async def take() -> None:
        while True:
            found: Any = await client.blmpop(0, 1, inbox, direction="LEFT", count=HAND_OVER)
            for reply in found[1]:
                waiting.pop(int.from_bytes(reply[3:11], "little")).set_result(reply)

    async def call(number: int) -> bytes:
        answer: asyncio.Future[bytes] = loop.create_future()
        waiting[number] = answer
        await client.rpush(key, head + requests.bodies[number])
        return await answer

    async def work() -> None:
        for number in numbers:
            await requests.turn()
            sent = time.monotonic_ns()
            requests.answered(number, await call(number), sent)

    await client.ping()
    clock = await driver.begin(f"redis-py {importlib.metadata.version('redis')}")
    taking = asyncio.create_task(take())
    await asyncio.gather(*(work() for _ in range(options.flight)))
    requests.tell(clock)
    taking.cancel()
    await driver.word()


def request(options: Options) -> None:
    """Ask by callers, or in mode `pubsub-waves` as the driver in C does.

    In that mode, over one connection, as many requests go out as there is room for, a command each,
    and after them a BLMPOP, which takes the replies that are there.
    """
    if options.mode == "pubsub":
        driver.run(_request_by_callers(options))
        return
    wire = Wire(options.url)
    requests = driver.Requests(options)
    inbox = f"{options.subject}:{time.monotonic_ns()}".encode()
    key, head = key_of(options), inbox + b" "
    wait: Command = (b"BLMPOP", b"0", b"1", inbox, b"LEFT", b"COUNT", b"%d" % options.flight)
    sent_ns: list[int] = []
    answered = 0
    clock = driver.begin_in_thread(CLIENT)
    while answered < options.count:
        commands: list[Command] = []
        while len(sent_ns) < min(options.count, answered + options.flight):
            if wait_s := requests.wait_s():
                time.sleep(wait_s)
            body = requests.bodies[len(sent_ns)]
            sent_ns.append(time.monotonic_ns())
            commands.append((b"RPUSH", key, head + body))
        wire.send([*commands, wait])
        # A length of the list for each request, then the replies.
        *_, (_, replies) = wire.take(len(commands) + 1)
        for reply in replies:
            number = int.from_bytes(reply[3:11], "little")
            requests.answered(number, reply, sent_ns[number])
        answered += len(replies)
    requests.tell(clock)
    await_word()
    wire.close()


class _Worker:
    """Takes requests from the list, many at once, and pushes the replies."""

    def __init__(self, options: Options) -> None:
        self.wire = Wire(options.url)
        # One of several workers leaves some to the others.
        most = HAND_OVER if options.workers == 1 else max(1, options.flight // options.workers)
        self.wait: Command = (
            b"BLMPOP",
            b"0",
            b"1",
            key_of(options),
            b"LEFT",
            b"COUNT",
            b"%d" % most,
        )
        self.wire.send([self.wait])

    def heard(self) -> bool:
        for reply in self.wire.replies():
            if not isinstance(reply, list):
                continue  # The length of an inbox.
            answers: dict[bytes, list[bytes]] = {}
            for value in reply[1]:
                inbox, _, body = value.partition(b" ")
                answers.setdefault(inbox, []).append(b"re:" + body)
            pushes: list[Command] = [(b"RPUSH", inbox, *found) for inbox, found in answers.items()]
            self.wire.send([*pushes, self.wait])
        return False


def respond(options: Options) -> None:
    """Answer requests over `workers` connections, until the parent says that it is over."""
    clock = Clock()
    workers = [_Worker(options) for _ in range(options.workers)]
    say(ready=True, client=CLIENT)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        for worker in workers:
            selector.register(worker.wire.socket, selectors.EVENT_READ, worker)
        while True:
            ready = selector.select()
            for key, _ in ready:
                if key.data is not None:
                    key.data.heard()
            if any(key.data is None for key, _ in ready):
                break
    await_word()
    say(cpu_s=clock.cpu_s())
    await_word()


# --- latency --------------------------------------------------------------------------------


def pace(options: Options) -> None:
    """Send a record at each tick, whose body says when it left."""
    wire = Wire(options.url)
    key = key_of(options)
    clock = driver.begin_in_thread(CLIENT)
    out = 0
    for number in driver.ticks_of_thread(options):
        # A paced requester waits for no answer before the next request; it takes answers that are
        # there.
        out -= len(wire.replies_there())
        body = driver.stamped(options.producer, number, options.size)
        if options.mode == "pubsub":
            wire.send([(b"PUBLISH", key, body)])
        else:
            wire.send([(b"XADD", key, b"*", b"b", body)])
        out += 1
    wire.take(out)
    driver.say_paced(clock)
    await_word()


def listen(options: Options) -> None:
    """Take the records of `pace`, and report how late each came."""
    wire = Wire(options.url)
    heard = driver.Listen(options)
    part: _Reader | _Listener
    if options.mode == "pubsub":
        _join(wire, options)

        def take_messages(messages: list[Any]) -> bool:
            for _kind, _channel, body in messages:
                heard.add(body)
            return heard.done

        part = _Listener(wire, take_messages)
    else:

        def take_entries(entries: list[Any]) -> bool:
            for _id, (_field, body, *_) in entries:
                heard.add(body)
            return heard.done

        part = _Reader(wire, options, _last_id(wire, options), take_entries)
        part.ask()
    clock = driver.begin_in_thread(CLIENT)
    while not part.heard():
        pass
    heard.tell(clock)
    await_word()
    _remove(options)


if __name__ == "__main__":
    driver.play(
        {
            "publish": publish,
            "fill": publish,
            "subscribe": subscribe,
            "replay": replay,
            "request": request,
            "respond": respond,
            "pace": pace,
            "listen": listen,
        }
    )
