"""A RabbitMQ client over the stream protocol: rstream in uvloop.

Records go out by `send_batch`, publish frames of many, as its documentation says is fastest;
sub-entries of 100 were no faster (608,000/s against 605,000; read 1.60 M/s against 1.53 M),
and wait for a timer of half a second. It reads its socket 256 bytes at a time: here it is
given a buffer of 1 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import rstream
import rstream.connection
import rstream.exceptions

from perf.peers import driver
from perf.peers.checks import Check, all_done, checks_of, say_received, selected, take_all, taking
from perf.peers.driver import DriverFailed, Options, word

CLIENT = f"rstream {importlib.metadata.version('rstream')}"
BATCH = 500
"""Records of one publish frame."""
AVAILABLE_TRIES = 300
CREDIT = 50
"""Chunks that the server may send ahead."""


def _place(options: Options) -> dict[str, Any]:
    place = urllib.parse.urlsplit(options.url)
    port = urllib.parse.parse_qs(place.query)["stream"][0]
    rstream.connection.CHUNK_SIZE = 1 << 20
    return {
        "host": place.hostname,
        "port": int(port),
        "username": place.username,
        "password": place.password,
        "heartbeat": 0,
    }


class _Confirms(driver.Window):
    def take(self, status: rstream.ConfirmationStatus) -> None:
        if not status.is_confirmed:
            driver.fail("a publish was refused:", status)
        self.confirm(1)


async def publish(options: Options) -> None:
    """Send all records, and report once each is confirmed; also the role `fill`."""
    producer = rstream.Producer(**_place(options))
    await producer.start()
    await producer.create_stream(options.subject, exists_ok=True)
    confirms = _Confirms(options.window)
    given = driver.bodies(options)
    middle = driver.Middle(options)
    size = min(BATCH, options.window)
    if options.form == "single":
        size = 1
    clock = await driver.begin(CLIENT)
    for batch in _pieces(given, size):
        await confirms.room()
        confirms.send(len(batch))
        await producer.send_batch(options.subject, batch, on_publish_confirm=confirms.take)
        if middle.due(confirms.sent):
            await confirms.all()
            middle.pause(confirms.sent)
    await confirms.all()
    driver.say_published(clock, confirms.confirmed, middle, confirms.lone)
    await word()


def _pieces(given: Iterator[list[bytes]], most: int) -> Iterator[list[bytes]]:
    for burst in given:
        for at in range(0, len(burst), most):
            yield burst[at : at + most]


async def _read_stream(
    options: Options, take: Callable[[bytes], object], create: bool = True
) -> rstream.Consumer:
    """Subscribe from where `start` and `select` say; a time begins at the chunk that holds it."""
    consumer = rstream.Consumer(**_place(options))
    await consumer.start()
    if create:
        await consumer.create_stream(options.subject, exists_ok=True)
    place, offset = rstream.OffsetType.NEXT, None
    if options.select == "time":
        place, offset = rstream.OffsetType.TIMESTAMP, options.from_ns // 1_000_000
    elif options.start == "first":
        place = rstream.OffsetType.FIRST

    def hear(body: Any, _: rstream.MessageContext) -> None:
        take(body)

    await consumer.subscribe(
        options.subject,
        hear,
        offset_specification=rstream.ConsumerOffsetSpecification(place, offset),
        initial_credit=CREDIT,
    )
    return consumer


async def subscribe(options: Options) -> None:
    checks = checks_of(options)
    consumers = [await _read_stream(options, taking(check)) for check in checks]
    await take_all(checks, options, CLIENT)
    await consumers[0].delete_stream(options.subject, missing_ok=True)


async def _available(options: Options) -> None:
    """Return when the stream can be read: a server that was just started opens it last."""
    consumer = rstream.Consumer(**_place(options))
    await consumer.start()
    client = await consumer.default_client
    for _ in range(AVAILABLE_TRIES):
        with contextlib.suppress(rstream.exceptions.StreamNotAvailable):
            await client.query_leader_and_replicas(options.subject)
            return
        await asyncio.sleep(0.1)
    raise DriverFailed(f"the stream {options.subject} is not available")


async def replay(options: Options) -> None:
    """Read the stream from its start, or from a time on."""
    check = Check(options, selected(options))
    take = taking(check)
    if options.select == "time":
        # The chunk in which the time lies begins with earlier records: they are passed over.
        everything, begun = take, False

        def take(body: bytes) -> None:
            nonlocal begun
            begun = begun or int.from_bytes(body[:8], "little") >= options.first
            if begun:
                everything(body)

    await _available(options)
    clock = await driver.begin(CLIENT)
    await _read_stream(options, take, create=False)
    await all_done([check], options.idle_s)
    check.begun_ns = clock.begun_ns
    say_received([check], clock)
    await word()


async def pace(options: Options) -> None:
    producer = rstream.Producer(**_place(options))
    await producer.start()
    await producer.create_stream(options.subject, exists_ok=True)
    confirms = _Confirms(options.window)
    clock = await driver.begin(CLIENT)
    async for number in driver.ticks(options):
        body = driver.stamped(options.producer, number, options.size)
        confirms.send()
        await producer.send_batch(options.subject, [body], on_publish_confirm=confirms.take)
    await confirms.all()
    driver.say_paced(clock)
    await word()


async def listen(options: Options) -> None:
    heard, over = driver.Listen(options), asyncio.Event()
    consumer = await _read_stream(options, driver.hearing(heard, over))
    await driver.listen_to_all(heard, over, CLIENT)
    await consumer.delete_stream(options.subject, missing_ok=True)


if __name__ == "__main__":
    driver.play(
        {
            "publish": publish,
            "fill": publish,
            "subscribe": subscribe,
            "replay": replay,
            "pace": pace,
            "listen": listen,
        }
    )
