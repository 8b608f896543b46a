"""A NATS client: nats-py in uvloop, core and JetStream.

JetStream is written to with plain publishes that name one inbox for all acknowledgements, at
most `window` of them out: 259,000 records/s of 140 B, where the client's `publish_async`, with
a future, a token and a timer for each, reaches 87,000. It is read through a push consumer
without acks and with flow control: 360,000/s; an ordered consumer 298,000, pulling by `fetch`,
which makes a task for each record, 83,000. The client's limits on what is pending are lifted,
so that nothing is dropped.

nats-core, the faster client of the same authors, needs Python 3.13.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import importlib.metadata
import time
from collections.abc import Awaitable, Callable, Iterator

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError, NotFoundError

from perf.peers import driver
from perf.peers.checks import Check, all_done, checks_of, say_received, selected, take_all
from perf.peers.driver import Options, Subjects, word

CLIENT = f"nats-py {importlib.metadata.version('nats-py')}"
PENDING_BYTES = 8 << 20
Callback = Callable[[Msg], Awaitable[None]]


async def _fail(error: Exception) -> None:
    """End the process: errors of callbacks would end in the client's log, and the run go on."""
    driver.fail(f"{CLIENT}: {error!r}")


async def connect(options: Options) -> Client:
    return await nats.connect(
        options.url,
        error_cb=_fail,
        allow_reconnect=False,
        pending_size=PENDING_BYTES,
        skip_subject_validation=True,
    )


def stream_of(options: Options) -> str:
    return options.subject.replace(".", "_")


async def make_stream(client: Client, options: Options) -> None:
    """Make the stream, unless the other side was faster."""
    if options.mode == "core":
        return
    context = client.jetstream()
    with contextlib.suppress(BadRequestError):
        await context.add_stream(
            StreamConfig(
                name=stream_of(options),
                subjects=[options.subject, f"{options.subject}.>"],
                storage=StorageType.FILE,
            )
        )
    # Two makers at once: the loser hears of an overlap before the stream can be found.
    for _ in range(50):
        with contextlib.suppress(NotFoundError):
            await context.stream_info(stream_of(options))
            return
        await asyncio.sleep(0.1)
    raise driver.DriverFailed(f"there is no stream {stream_of(options)}")


async def remove_stream(client: Client, options: Options) -> None:
    if options.mode != "core":
        await client.jetstream().delete_stream(stream_of(options))


async def subscribe_to(client: Client, options: Options, subject: str, callback: Callback) -> None:
    """Subscribe without limits; in JetStream from where `start` and `select` say."""
    if options.mode == "core":
        await client.subscribe(subject, cb=callback, pending_msgs_limit=0, pending_bytes_limit=0)
        return
    deliver, since = DeliverPolicy.NEW, None
    if options.select == "time":
        deliver = DeliverPolicy.BY_START_TIME
        since = dt.datetime.fromtimestamp(options.from_ns / 1e9, dt.UTC)
    elif options.start == "first":
        deliver = DeliverPolicy.ALL
    await client.jetstream().subscribe(
        subject,
        cb=callback,
        stream=stream_of(options),
        config=ConsumerConfig(
            ack_policy=AckPolicy.NONE,
            deliver_policy=deliver,
            opt_start_time=since,
            flow_control=True,
            idle_heartbeat=5.0,
        ),
        manual_ack=True,
        pending_msgs_limit=0,
        pending_bytes_limit=0,
    )


async def _send_core(client: Client, options: Options, given: Iterator[list[bytes]]) -> int:
    """Send all bodies, which core NATS does not acknowledge; returns how many."""
    subjects, sent = Subjects(options), 0
    publish = client.publish
    for burst in given:
        if subjects.many:
            for subject, body in zip(subjects.of_burst(sent, len(burst)), burst, strict=True):
                await publish(subject, body)
        else:
            subject = subjects.one
            for body in burst:
                await publish(subject, body)
        sent += len(burst)
        await asyncio.sleep(0)
    await client.flush(60)
    return sent


class _Acks(driver.Window):
    """One inbox for the acknowledgements of all records."""

    def __init__(self, client: Client, options: Options) -> None:
        super().__init__(options.window)
        self.client = client
        self.inbox = client.new_inbox()

    async def open(self) -> None:
        await self.client.subscribe(
            self.inbox, cb=self._take, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def _take(self, message: Msg) -> None:
        if b'"error"' in message.data or message.headers:
            raise driver.DriverFailed(f"refused: {message.data!r} {message.headers}")
        self.confirm(1)


async def _send_stream(
    client: Client,
    options: Options,
    given: Iterator[list[bytes]],
    acks: _Acks,
    middle: driver.Middle,
) -> int:
    """Send all bodies to JetStream, with room for more acknowledgements; returns the confirmed."""
    subjects = Subjects(options)
    publish, inbox = client.publish, acks.inbox
    for burst in given:
        names = subjects.of_burst(acks.sent, len(burst))
        for subject, body in zip(names, burst, strict=True):
            if acks.full:
                await acks.room()
            acks.send()
            await publish(subject, body, inbox)
        if middle.due(acks.sent):
            await acks.all()
            middle.pause(acks.sent)
    await acks.all()
    return acks.confirmed


async def publish(options: Options) -> None:
    """Send all records, and report how many were confirmed; also the role `fill`."""
    client = await connect(options)
    await make_stream(client, options)
    acks = _Acks(client, options)
    if options.mode != "core":
        await acks.open()
    given = driver.bodies(options)
    middle = driver.Middle(options)
    clock = await driver.begin(CLIENT)
    if options.mode == "core":
        confirmed = await _send_core(client, options, given)
    else:
        confirmed = await _send_stream(client, options, given, acks, middle)
    driver.say_published(clock, confirmed, middle, acks.lone)
    await word()
    await client.close()


async def subscribe(options: Options) -> None:
    """Take all records as they come, with each of `subscribers` clients; then remove the stream."""
    checks = checks_of(options)
    clients = []
    for check in checks:
        client = await connect(options)
        await make_stream(client, options)
        clients.append(client)

        async def take(message: Msg, check: Check = check) -> None:
            check.add(message.data)

        subjects = Subjects(options)
        for pattern in subjects.patterns if subjects.many else [subjects.one]:
            await subscribe_to(client, options, pattern, take)
        await client.flush()
    await take_all(checks, options, CLIENT)
    await remove_stream(clients[0], options)
    for client in clients:
        await client.close()


async def replay(options: Options) -> None:
    """Read the stream from its start; the server selects a subject of it."""
    client = await connect(options)
    subjects = Subjects(options)
    check = Check(options, selected(options))
    clock = await driver.begin(CLIENT)

    async def take(message: Msg) -> None:
        check.add(message.data)

    subject = subjects.rare if options.select == "rare" else f"{options.subject}.>"
    if not subjects.many:
        subject = subjects.one
    await subscribe_to(client, options, subject, take)
    await all_done([check], options.idle_s)
    check.begun_ns = clock.begun_ns
    say_received([check], clock)
    await word()
    await client.close()


async def request(options: Options) -> None:
    """Ask by `flight` callers, each of which waits for its reply."""
    client = await connect(options)
    requests = driver.Requests(options)
    clock = await driver.begin(CLIENT)
    numbers = iter(range(options.count))

    async def work() -> None:
        for number in numbers:
            await requests.turn()
            sent = time.monotonic_ns()
            reply = await client.request(options.subject, requests.bodies[number], timeout=30)
            requests.answered(number, reply.data, sent)

    await asyncio.gather(*(work() for _ in range(options.flight)))
    requests.tell(clock)
    await word()
    await client.close()


async def respond(options: Options) -> None:
    """Answer requests by `workers` clients, until the parent says that it is over."""
    clients = []
    for _ in range(options.workers):
        client = await connect(options)
        clients.append(client)

        async def echo(message: Msg, client: Client = client) -> None:
            await client.publish(message.reply, b"re:" + message.data)

        await client.subscribe(
            options.subject,
            queue="workers",
            cb=echo,
            pending_msgs_limit=0,
            pending_bytes_limit=0,
        )
        await client.flush()
    await driver.work_until_told(CLIENT)
    for client in clients:
        await client.close()


async def pace(options: Options) -> None:
    """Send a record at each tick, whose body says when it left."""
    client = await connect(options)
    await make_stream(client, options)
    acks = _Acks(client, options)
    reply = ""
    if options.mode != "core":
        await acks.open()
        reply = acks.inbox
    clock = await driver.begin(CLIENT)
    async for number in driver.ticks(options):
        body = driver.stamped(options.producer, number, options.size)
        acks.send()
        await client.publish(options.subject, body, reply)
    if reply:
        await acks.all()
    await client.flush(60)
    driver.say_paced(clock)
    await word()
    await client.close()


async def listen(options: Options) -> None:
    """Take the records of `pace`, and report how late each came."""
    client = await connect(options)
    await make_stream(client, options)
    heard = driver.Listen(options)
    over = asyncio.Event()

    async def take(message: Msg) -> None:
        if heard.add(message.data):
            over.set()

    await subscribe_to(client, options, options.subject, take)
    await client.flush()
    await driver.listen_to_all(heard, over, CLIENT)
    await remove_stream(client, options)
    await client.close()


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
