"""The driver of our own broker: the public asyncio API, credit and bounds at their defaults.

python -m perf.peers.malamute.python_driver role=publish url=tcp://... subject=s count=...

Bulk is window.publish_many() with lists of bodies and batches(), the bodies of a batch checked with
numpy as they lie; single is publish() by `window` tasks and `async for` over records. A confirm of
another level than the one asked for fails the run, and so does a gap or a lost link: subscriptions
are strict.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import zmq

import malamute_py as malamute
from malamute_protocol.batch import Batch
from malamute_py import ConfirmAt
from malamute_py.form import another_than_asked, running_form
from perf.peers import driver
from perf.peers.checks import Check, checks_of, say_received
from perf.peers.driver import DriverFailed, Options, say, word

SOFTWARE = "malamute_py, asyncio in uvloop" if driver.has_fast_loop() else "malamute_py, asyncio"
LOOKED_AT_RECORDS = 256
LOOKED_AT_BYTES = 64 << 10
"""Size from which on a batch is checked by itself; large bodies are not copied for the check."""
WORKER_CONCURRENCY = 256
"""Requests that a worker holds at once; 16 by default. Subscribers of peers have no such bound."""
CHUNK = 65_536
"""Bodies handed over in one call."""
SINGLE_TASKS = 64
MAIL_TASKS = 1_000
LINK_SUBSCRIPTIONS = 1_000
"""Subscriptions that the broker allows one client by default (streams.link_subscriptions_max)."""
PAUSE_S = 0.05


class Asked(Options, frozen=True):
    """Further arguments of this driver."""

    confirm: ConfirmAt = "synced"
    window: int = 0
    queue: int = 0
    """1: a mailbox takes the stream's place, and its reader acknowledges."""
    first: int = 0
    """For a replay by time: the number of the first record due."""
    expected: int = 0
    """For a replay by records: how many, from the first on."""


class Levels:
    """Confirms by level; each must have the level that was asked for."""

    def __init__(self, asked: Asked) -> None:
        self.level = asked.confirm
        self.confirmed = 0
        self.lone = driver.Lone(asked.window)

    def add(self, confirmations: Iterable[Any]) -> None:
        for confirmation in confirmations:
            if confirmation.level != self.level:
                raise DriverFailed(f"asked for {self.level}, confirmed {confirmation.level}")
            self.confirmed += confirmation.count

    def add_one(self, confirmation: Any) -> None:
        if confirmation.level != self.level:
            raise DriverFailed(f"asked for {self.level}, confirmed {confirmation.level}")
        self.lone.confirmed()
        self.confirmed += 1


def made(asked: Asked) -> list[list[bytes]]:
    """Make all bodies before the clock starts; the collector leaves them alone."""
    chunks = list(_chunks(asked))
    gc.collect()
    gc.freeze()
    return chunks


def _chunks(asked: Asked) -> Iterator[list[bytes]]:
    for first in range(0, asked.count, CHUNK):
        count = min(CHUNK, asked.count - first)
        block = np.full((count, asked.size), ord("x"), np.uint8)
        numbers = np.arange(first, first + count, dtype="<i8")
        numbers |= asked.producer << driver.PRODUCER_SHIFT
        block[:, :8] = numbers.view(np.uint8).reshape(count, 8)
        yield block.reshape(-1).view(f"V{asked.size}").tolist()


def ready() -> None:
    gc.collect()
    gc.freeze()
    say(ready=True, client=f"{SOFTWARE}, {running_form()}")


def unbroken(*clients: malamute.Client) -> None:
    if any(client.reconnects for client in clients):
        raise DriverFailed("a link was lost amid the run")


# --- publishing ------------------------------------------------------------------------------


async def publish(asked: Asked) -> None:
    """Send all records, and report once each is confirmed at the level that was asked for."""
    chunks = made(asked)
    names = None
    if asked.subjects > 1 or asked.rare:
        subjects = driver.Subjects(asked)
        names = [subjects.of_burst(n * CHUNK, len(chunk)) for n, chunk in enumerate(chunks)]
    levels = Levels(asked)
    async with malamute.connect(asked.url) as client:
        # The first confirmed publish opens the producer id, once in its life.
        await client.publish(f"{asked.subject}.before", b"-")
        ready()
        await word()
        clock = driver.Clock()
        if asked.form == "bulk":
            middle = await _publish_bulk(client, asked, chunks, names, levels)
        else:
            middle = {}
            await _publish_single(client, asked, chunks, levels)
        if asked.confirm == "none":
            # Nothing was promised: the run is over when the broker reports that it has all records.
            await _arrived(client, asked)
        if levels.confirmed != asked.count:
            raise DriverFailed(f"published {asked.count}, confirmed {levels.confirmed}")
        unbroken(client)
        say(
            begun_ns=clock.begun_ns,
            ended_ns=time.monotonic_ns(),
            confirmed=levels.confirmed,
            cpu_s=clock.cpu_s(),
            **middle,
            **driver.percentiles_of(levels.lone),
        )
        await word()


async def _arrived(client: malamute.Client, asked: Asked) -> None:
    """Return when the stream holds the records of all its producers."""
    deadline = time.monotonic() + asked.idle_s
    while (await client.stream_info(asked.subject)).tail < asked.count * asked.producers:
        if time.monotonic() > deadline:
            raise DriverFailed(f"the broker has not got all {asked.count} records")


async def _publish_bulk(
    client: malamute.Client,
    asked: Asked,
    chunks: list[list[bytes]],
    names: list[list[str]] | None,
    levels: Levels,
) -> dict[str, int]:
    """Publish all; of a fill return the number at its middle and the time between its halves."""
    middle: dict[str, int] = {}
    halves = len(chunks) // 2 if asked.role == "fill" else 0
    async with client.publisher(asked.subject, confirm=asked.confirm) as window:
        for number, chunk in enumerate(chunks):
            if halves and number == halves:
                # All of the first half has its append time before, all of the second after it.
                await window.wait()
                await asyncio.sleep(PAUSE_S)
                middle = {"middle": number * CHUNK, "middle_ns": time.time_ns()}
                await asyncio.sleep(PAUSE_S)
            if names is None:
                await window.publish_many(chunk, subject=asked.subject)
            else:
                await window.publish_many(chunk, subjects=names[number])
    levels.add(window.confirmations)
    return middle


async def _publish_single(
    client: malamute.Client, asked: Asked, chunks: list[list[bytes]], levels: Levels
) -> None:
    bodies = iter([body for chunk in chunks for body in chunk])

    async def work() -> None:
        for body in bodies:
            levels.lone.sent()
            confirmation = await client.publish(
                asked.subject, body, subject=asked.subject, confirm=asked.confirm
            )
            levels.add_one(confirmation)

    await asyncio.gather(*(work() for _ in range(asked.window or SINGLE_TASKS)))


async def pace(asked: Asked) -> None:
    """Send a record at each tick, whose body says when it left."""
    levels = Levels(asked)
    async with malamute.connect(asked.url) as client:
        await client.publish(f"{asked.subject}.before", b"-")
        ready()
        await word()
        clock = driver.Clock()
        waiting: set[asyncio.Future[Any]] = set()

        def confirmed(future: asyncio.Future[Any]) -> None:
            waiting.discard(future)
            levels.add_one(future.result())

        async for number in driver.ticks(asked):
            body = driver.stamped(0, number, asked.size)
            future = client.publish_nowait(
                asked.subject, body, subject=asked.subject, confirm=asked.confirm
            )
            waiting.add(future)
            future.add_done_callback(confirmed)
            if number % 64 == 0:
                # A sender that is late does not sleep; the link must still have its turn.
                await asyncio.sleep(0)
        sent_ns = time.monotonic_ns()
        await client.flush(30_000)
        if levels.confirmed != asked.count:
            raise DriverFailed(f"published {asked.count}, confirmed {levels.confirmed}")
        unbroken(client)
        say(begun_ns=clock.begun_ns, ended_ns=sent_ns, cpu_s=clock.cpu_s())
        await word()


# --- subscribing -----------------------------------------------------------------------------


def look(check: Check, batch: Batch) -> bool:
    """Check a batch's bodies as they lie; of a part of a batch, the rows that were delivered.

    Small batches are gathered first, as the drivers of peers gather their records.
    """
    large = len(batch) >= LOOKED_AT_RECORDS or len(batch) * check.size >= LOOKED_AT_BYTES
    if batch.rows is None and large:
        # Small batches and parts of some may wait to be checked together: they came before.
        check.close()
        return check.block(batch.content.bodies().blob, len(batch))
    return check.burst(batch.bodies())


@contextlib.asynccontextmanager
async def clients(asked: Asked, count: int) -> Any:
    """Connect so many clients, each with a link of its own, in this process."""
    # A context has 1,023 sockets by default; a client may take two.
    zmq.Context.instance().set(zmq.MAX_SOCKETS, max(1_023, 4 * count))
    opened: list[malamute.Client] = []
    try:
        for _ in range(count):
            opened += [await malamute.connect(asked.url, timeout_ms=60_000)]
        yield opened
    finally:
        for client in opened:
            client.abort()


async def subscribe(asked: Asked) -> None:
    """Take all records as they come, with each of `subscribers` clients; then remove the stream."""
    if asked.subjects > 1:
        await subscribe_to_patterns(asked)
        return
    checks = checks_of(asked)
    async with clients(asked, asked.subscribers) as opened:
        subscriptions = [
            client.subscribe(asked.subject, start="earliest", strict=True, create=True)
            for client in opened
        ]
        for subscription in subscriptions:
            await subscription.accepted()
        ready()
        await word()
        clock = driver.Clock()
        form = _take_batches if asked.form == "bulk" else _take_records
        await asyncio.gather(
            *(
                form(subscription, check)
                for subscription, check in zip(subscriptions, checks, strict=True)
            )
        )
        unbroken(*opened)
        info = await opened[0].stream_info(asked.subject)
        say_received(checks, clock, disk_bytes=info.bytes)
        await word()
        await opened[0].remove_stream(asked.subject)


async def _take_batches(subscription: Any, check: Check) -> None:
    async for batch in subscription.batches():
        if look(check, batch):
            return


async def _take_records(subscription: Any, check: Check) -> None:
    async for record in subscription:
        if check.add(record.body):
            return


async def subscribe_to_patterns(asked: Asked) -> None:
    """Make one subscription for each pattern, on as few links as the broker's bound allows."""
    check = Check(asked)
    patterns = driver.Subjects(asked).patterns
    links = -(-len(patterns) // LINK_SUBSCRIPTIONS)
    done = asyncio.Event()
    async with clients(asked, links) as opened:
        subscriptions = [
            opened[number // LINK_SUBSCRIPTIONS].subscribe(
                asked.subject, pattern, start="earliest", strict=True, create=True
            )
            for number, pattern in enumerate(patterns)
        ]
        for subscription in subscriptions:
            await subscription.accepted()
        ready()
        await word()
        clock = driver.Clock()

        async def take(subscription: Any) -> None:
            async for batch in subscription.batches():
                if look(check, batch):
                    done.set()

        tasks = [asyncio.create_task(take(subscription)) for subscription in subscriptions]
        finished = asyncio.create_task(done.wait())
        # A task that ends before that has failed: its exception is raised here.
        ended, _ = await asyncio.wait([finished, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        for task in tasks:
            task.cancel()
        unbroken(*opened)
        info = await opened[0].stream_info(asked.subject)
        say_received([check], clock, disk_bytes=info.bytes)
        await word()
        await opened[0].remove_stream(asked.subject)


async def listen(asked: Asked) -> None:
    """Take the records of `pace`, and report how late each came."""
    listening = driver.Listen(asked)
    async with malamute.connect(asked.url) as client:
        subscription = client.subscribe(asked.subject, start="earliest", strict=True, create=True)
        await subscription.accepted()
        ready()
        await word()
        clock = driver.Clock()
        async for record in subscription:
            if listening.add(record.body):
                break
        unbroken(client)
        listening.tell(clock)
        await word()
        await client.remove_stream(asked.subject)


async def replay(asked: Asked) -> None:
    """Read what is stored: all, a rare subject, from a time on, or the first records one by one."""
    start: Any = "earliest"
    pattern, expected = "#", None
    if asked.select == "rare":
        pattern = driver.Subjects(asked).rare
        expected = driver.rare_places(asked.count, asked.rare, asked.seed)
    elif asked.select == "time":
        start = malamute.AtTime(asked.from_ns // 1_000_000)
        expected = np.arange(asked.first, asked.count, dtype=np.int64)
    if asked.select == "records":
        await replay_records(asked)
        return
    # Whatever its subject, a replayed record has its place in the one order of the stream.
    check = Check(Asked(role=asked.role, url="", size=asked.size, count=asked.count), expected)
    async with malamute.connect(asked.url) as client:
        ready()
        await word()
        clock = driver.Clock()
        reading = client.subscribe(asked.subject, pattern, start=start, until="tail", strict=True)
        async for batch in reading.batches():
            look(check, batch)
        unbroken(client)
        say_received([check], clock)
        await word()


async def replay_records(asked: Asked) -> None:
    """Read the first records one by one."""
    check = Check(Asked(role=asked.role, url="", size=asked.size, count=asked.expected))
    async with malamute.connect(asked.url) as client:
        ready()
        await word()
        clock = driver.Clock()
        reading = client.subscribe(asked.subject, start="earliest", end=asked.expected, strict=True)
        async for record in reading:
            if check.add(record.body):
                break
        unbroken(client)
        say_received([check], clock)
        await word()


# --- services ----------------------------------------------------------------------------------


async def respond(asked: Asked) -> None:
    """Answer requests by `workers` clients, until the parent says that it is over."""

    async def echo(request: Any) -> bytes:
        return b"re:" + bytes(request.body)

    async with contextlib.AsyncExitStack() as stack:
        workers = []
        for _ in range(asked.workers):
            client = await stack.enter_async_context(malamute.connect(asked.url))
            working = client.worker(asked.subject, concurrency=WORKER_CONCURRENCY)
            worker = await stack.enter_async_context(working)
            await worker.accepted()
            workers.append(worker)
        ready()
        clock = driver.Clock()
        tasks = [asyncio.create_task(worker.run(echo)) for worker in workers]
        stop = asyncio.create_task(word())
        ended, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        cpu_s = clock.cpu_s()
        for task in tasks:
            task.cancel()
        say(cpu_s=cpu_s)
        await word()


async def request(asked: Asked) -> None:
    """Ask by `flight` callers, each of which waits for its reply; none may be left in the queue."""
    requests = driver.Requests(asked)
    async with malamute.connect(asked.url) as client:
        ready()
        await word()
        clock = driver.Clock()
        numbers = iter(range(asked.count))

        async def ask() -> None:
            for number in numbers:
                await requests.turn()
                sent_ns = time.monotonic_ns()
                reply = await client.request(asked.subject, requests.bodies[number])
                requests.answered(number, bytes(reply.body), sent_ns)

        await asyncio.gather(*(ask() for _ in range(asked.flight)))
        requests.tell(clock)
        info = await client.service_info(asked.subject)
        if info.waiting + info.held:
            raise DriverFailed(f"{info.waiting + info.held} requests are still in the queue")
        unbroken(client)
        await word()


# --- mail and steps ----------------------------------------------------------------------------


async def send(asked: Asked) -> None:
    """Put all messages into a mailbox, and report once each is confirmed."""
    bodies = [body for chunk in made(asked) for body in chunk]
    levels = Levels(asked)
    async with malamute.connect(asked.url) as client:
        ready()
        await word()
        clock = driver.Clock()
        if asked.form == "bulk":
            for first in range(0, asked.count, MAIL_TASKS):
                some = bodies[first : first + MAIL_TASKS]
                levels.add(await client.send_many(asked.subject, some, confirm=asked.confirm))
        else:
            left = iter(bodies)

            async def work() -> None:
                for body in left:
                    levels.lone.sent()
                    levels.add_one(await client.send(asked.subject, body, confirm=asked.confirm))

            await asyncio.gather(*(work() for _ in range(asked.window or MAIL_TASKS)))
        if levels.confirmed != asked.count:
            raise DriverFailed(f"sent {asked.count}, confirmed {levels.confirmed}")
        unbroken(client)
        driver.say_published(clock, levels.confirmed, lone=levels.lone)
        await word()


async def appended(client: malamute.Client) -> int:
    """Return bytes ever appended to ring main: messages, and their changes."""
    facts = await client.broker_info()
    return int(facts.more["rings"]["main"]["end_lsn"])


async def read(asked: Asked) -> None:
    """Read a mailbox to its end; over when the broker has every acknowledgement."""
    check = Check(asked)
    async with malamute.connect(asked.url) as client:
        async with client.inbox(asked.subject) as inbox:
            await inbox.accepted()
            before = await appended(client)
            ready()
            await word()
            clock = driver.Clock()
            async for mail in inbox:
                if check.add(bytes(mail.body)):
                    await mail.ack()
                    break
        check.close()
        ended_ns = time.monotonic_ns()
        left = (await client.mailbox_info(asked.subject)).messages
        if left:
            raise DriverFailed(f"{left} messages are still in the mailbox")
        check.ended_ns = ended_ns
        unbroken(client)
        say_received([check], clock, disk_bytes=await appended(client) - before)
        await word()


async def steps(asked: Asked) -> None:
    """Make atomic steps of four parts by `flight` tasks; each place must hold each step once."""
    count = asked.count
    first, second, box, service = (f"{asked.subject}.{part}" for part in ("a", "b", "box", "ask"))
    bodies = [body for chunk in made(asked) for body in chunk]
    levels = Levels(asked)
    async with malamute.connect(asked.url) as client:
        await client.create_stream(first)
        await client.create_stream(second)
        ready()
        await word()
        left = iter(bodies)

        async def work() -> None:
            for body in left:
                async with client.atomic(confirm=asked.confirm) as step:
                    step.publish(first, body)
                    step.publish(second, body)
                    step.send(box, body)
                    step.request(service, body)
                levels.add_one(step.confirmation)

        clock = driver.Clock()
        await asyncio.gather(*(work() for _ in range(asked.flight)))
        ended_ns, cpu_s = time.monotonic_ns(), clock.cpu_s()
        if levels.confirmed != count:
            raise DriverFailed(f"{count} steps, {levels.confirmed} confirmed")
        # The figures are reported before the steps are read again, which would take the broker's
        # processor time. The exit status reports a fault found then.
        say(begun_ns=clock.begun_ns, ended_ns=ended_ns, confirmed=count, cpu_s=cpu_s)
        await word()
        orders = await _four_places(client, first, second, box, service, count)
        if any(order != orders[0] for order in orders) or sorted(orders[0]) != sorted(bodies):
            raise DriverFailed(f"the four places do not hold the same {count} steps")
        unbroken(client)


async def _four_places(
    client: malamute.Client, first: str, second: str, box: str, service: str, count: int
) -> list[list[bytes]]:
    """Return the bodies of two streams, a mailbox and a service's queue, each in its order."""
    orders: list[list[bytes]] = []
    for stream in (first, second):
        records = client.subscribe(stream, start="earliest", until="tail")
        orders.append([bytes(record.body) async for record in records])
    mails: list[bytes] = []
    async with client.inbox(box) as inbox:
        async for mail in inbox:
            mails.append(bytes(mail.body))
            if len(mails) == count:
                await mail.ack()
                break
    asked: list[bytes] = []
    async with client.worker(service, concurrency=1024) as worker:
        async for request in worker:
            asked.append(bytes(request.body))
            await request.complete()
            if len(asked) == count:
                break
    return [*orders, mails, asked]


PARTS = {
    "publish": publish,
    "fill": publish,
    "pace": pace,
    "subscribe": subscribe,
    "listen": listen,
    "replay": replay,
    "respond": respond,
    "request": request,
    "steps": steps,
}
QUEUE_PARTS = {"publish": send, "subscribe": read}


def main() -> None:
    if wrong := another_than_asked(running_form()):
        raise SystemExit(wrong)
    given = dict(word.partition("=")[::2] for word in sys.argv[1:])
    known = {name: given[name] for name in Asked.__struct_fields__ if name in given}
    asked = msgspec.convert(known, Asked, strict=False)
    part = (QUEUE_PARTS if asked.queue else PARTS).get(asked.role)
    if part is None:
        raise SystemExit(f"no role {asked.role!r}; there are {', '.join(PARTS)}")
    driver.run(part(asked))


if __name__ == "__main__":
    main()
