"""A RabbitMQ client over AMQP: pika in uvloop.

Of the AMQP clients pika was the fastest (140 B: 83,000/s published and 102,000/s consumed;
py-amqp 70,000 and 71,000, aiormq, which aio-pika stands on, 60,000 and 38,000).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import pika  # type: ignore[import-untyped]
from pika.adapters.asyncio_connection import AsyncioConnection  # type: ignore[import-untyped]
from pika.channel import Channel  # type: ignore[import-untyped]
from pika.spec import PERSISTENT_DELIVERY_MODE, TRANSIENT_DELIVERY_MODE, Basic  # type: ignore[import-untyped]

from perf.peers import driver
from perf.peers.checks import checks_of, take_all, taking
from perf.peers.driver import DriverFailed, Options, Subjects, word

CLIENT = f"pika {importlib.metadata.version('pika')}"
PREFETCH = 2000
ACK_EVERY = 500
"""Deliveries that one acknowledgement covers, unless the work is a queue of single messages."""
TURN = 200
"""Publishes between two turns of the event loop."""


class Amqp:
    """One connection with one channel; calls with callbacks become calls to await."""

    def __init__(self, connection: AsyncioConnection, channel: Channel) -> None:
        self.connection = connection
        self.channel = channel

    @classmethod
    async def connect(cls, options: Options) -> Amqp:
        """Open a connection with one channel, whose end fails the run."""
        place = urllib.parse.urlsplit(options.url)
        opened: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        parameters = pika.ConnectionParameters(
            host=place.hostname,
            port=place.port,
            credentials=pika.PlainCredentials(place.username or "", place.password or ""),
            heartbeat=0,
        )
        connection = AsyncioConnection(
            parameters,
            on_open_callback=lambda made: made.channel(on_open_callback=opened.set_result),
            on_open_error_callback=lambda _, error: driver.fail("no connection:", error),
            custom_ioloop=asyncio.get_running_loop(),
        )
        channel = await opened
        channel.add_on_close_callback(lambda _, why: driver.fail("the channel was closed:", why))
        return cls(connection, channel)

    async def call(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Await a method that tells its end by a callback."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        method(*given, **named, callback=done.set_result)
        return await done


def _quorum(options: Options) -> bool:
    return options.mode == "quorum"


def queue_of(options: Options, number: int = 0) -> str:
    return f"{options.subject}.{os.getpid()}.{number}"


async def declare_exchange(amqp: Amqp, options: Options) -> None:
    kind = "topic" if options.subjects > 1 else "fanout"
    await amqp.call(
        amqp.channel.exchange_declare, options.subject, exchange_type=kind, durable=True
    )


async def declare_queue(amqp: Amqp, options: Options, queue: str) -> None:
    """Make a queue of the mode's kind and bind it to the exchange, once for each subject."""
    if _quorum(options):
        await amqp.call(
            amqp.channel.queue_declare,
            queue,
            durable=True,
            arguments={"x-queue-type": "quorum"},
        )
    else:
        await amqp.call(amqp.channel.queue_declare, queue, exclusive=True, auto_delete=True)
    subjects = Subjects(options)
    for pattern in subjects.patterns if subjects.many else [subjects.one]:
        await amqp.call(
            amqp.channel.queue_bind, queue, exchange=options.subject, routing_key=pattern
        )


async def consume(
    amqp: Amqp, options: Options, queue: str, take: Callable[[bytes], object]
) -> None:
    """Give every body to `take`; a quorum queue's deliveries are acknowledged.

    Many by one acknowledgement; each by its own when the work is a queue of messages.
    """
    channel = amqp.channel
    if not _quorum(options):

        def hear(_: Channel, __: Basic.Deliver, ___: object, body: bytes) -> None:
            take(body)

        await amqp.call(channel.basic_consume, queue, hear, auto_ack=True)
        return
    await amqp.call(channel.basic_qos, prefetch_count=PREFETCH)
    every = 1 if options.queue else ACK_EVERY
    loop = asyncio.get_running_loop()
    unacked = latest = 0
    waking: asyncio.TimerHandle | None = None

    def ack() -> None:
        """Acknowledge deliveries: by a full ACK_EVERY, or the rest a little later."""
        nonlocal unacked, waking
        if waking is not None:
            waking.cancel()
            waking = None
        unacked = 0
        channel.basic_ack(latest, multiple=True)

    def hear_and_ack(_: Channel, deliver: Basic.Deliver, __: object, body: bytes) -> None:
        nonlocal unacked, latest, waking
        take(body)
        latest = deliver.delivery_tag
        unacked += 1
        if unacked >= every:
            ack()
        elif waking is None:
            waking = loop.call_later(0.05, ack)  # should no full ACK_EVERY come soon

    await amqp.call(channel.basic_consume, queue, hear_and_ack)


class _Confirms(driver.Window):
    """Publisher confirms, counted."""

    async def open(self, amqp: Amqp) -> None:
        await amqp.call(amqp.channel.confirm_delivery, self._take)

    def _take(self, frame: Any) -> None:
        if isinstance(frame.method, Basic.Nack):
            driver.fail("a publish was refused:", frame)
        if frame.method.multiple:
            self.confirm(frame.method.delivery_tag - self.confirmed)
        else:
            self.confirm(1)


def _properties(options: Options) -> pika.BasicProperties:
    mode = PERSISTENT_DELIVERY_MODE if _quorum(options) else TRANSIENT_DELIVERY_MODE
    return pika.BasicProperties(delivery_mode=mode)


async def publish(options: Options) -> None:
    """Send all records: confirmed in a quorum queue, else over by a round trip."""
    amqp = await Amqp.connect(options)
    await declare_exchange(amqp, options)
    confirms = _Confirms(options.window)
    if _quorum(options):
        await confirms.open(amqp)
    given = driver.bodies(options)
    subjects = Subjects(options)
    properties = _properties(options)
    publish, exchange = amqp.channel.basic_publish, options.subject
    clock = await driver.begin(CLIENT)
    for burst in given:
        names = subjects.of_burst(confirms.sent, len(burst))
        for subject, body in zip(names, burst, strict=True):
            if _quorum(options) and confirms.full:
                await confirms.room()
            confirms.send()
            publish(exchange, subject, body, properties)
            if not confirms.sent % TURN:
                await asyncio.sleep(0)
    if _quorum(options):
        await confirms.all()
    else:
        # A round trip on the channel comes after all that went before.
        await declare_exchange(amqp, options)
        confirms.confirmed = confirms.sent
    driver.say_published(clock, confirms.confirmed, lone=confirms.lone)
    await word()


async def subscribe(options: Options) -> None:
    checks = checks_of(options)
    opened = []
    for number, check in enumerate(checks):
        amqp = await Amqp.connect(options)
        opened.append(amqp)
        await declare_exchange(amqp, options)
        await declare_queue(amqp, options, queue_of(options, number))
        await consume(amqp, options, queue_of(options, number), taking(check))
    await take_all(checks, options, CLIENT)
    await _remove(opened[0], options, len(opened))


async def _remove(amqp: Amqp, options: Options, queues: int) -> None:
    if _quorum(options):
        for number in range(queues):
            await amqp.call(amqp.channel.queue_delete, queue_of(options, number))
    await amqp.call(amqp.channel.exchange_delete, options.subject)


async def request(options: Options) -> None:
    """Keep `flight` requests out by direct reply-to; a body's number says whose reply it is."""
    amqp = await Amqp.connect(options)
    channel = amqp.channel
    requests = driver.Requests(options)
    properties = pika.BasicProperties(reply_to="amq.rabbitmq.reply-to")
    sent_ns = [0] * options.count
    numbers = iter(range(options.count))
    over = asyncio.Event()

    loop = asyncio.get_running_loop()

    def send(number: int) -> None:
        sent_ns[number] = time.monotonic_ns()
        channel.basic_publish("", options.subject, requests.bodies[number], properties)

    def send_next() -> None:
        number = next(numbers, None)
        if number is not None:
            requests.at_its_turn(loop, send, number)

    def hear(_: Channel, __: Basic.Deliver, ___: object, body: bytes) -> None:
        number = int.from_bytes(body[3:11], "little")  # behind the "re:" of a reply
        try:
            requests.answered(number, body, sent_ns[number])
        except (DriverFailed, IndexError) as error:
            driver.fail("a reply that is wrong:", error)
        if len(requests.latencies) == options.count:
            over.set()
        send_next()

    await amqp.call(channel.basic_consume, "amq.rabbitmq.reply-to", hear, auto_ack=True)
    clock = await driver.begin(CLIENT)
    for _ in range(options.flight):
        send_next()
    await over.wait()
    requests.tell(clock)
    await word()


async def respond(options: Options) -> None:
    opened = []
    for _ in range(options.workers):
        amqp = await Amqp.connect(options)
        opened.append(amqp)
        await amqp.call(amqp.channel.queue_declare, options.subject, auto_delete=True)

        def echo(channel: Channel, _: object, asked: pika.BasicProperties, body: bytes) -> None:
            channel.basic_publish("", asked.reply_to, b"re:" + body)

        await amqp.call(amqp.channel.basic_consume, options.subject, echo, auto_ack=True)
    await driver.work_until_told(CLIENT)


async def pace(options: Options) -> None:
    """Send a record at each tick, whose body says when it left."""
    amqp = await Amqp.connect(options)
    await declare_exchange(amqp, options)
    confirms = _Confirms(options.window)
    if _quorum(options):
        await confirms.open(amqp)
    properties = _properties(options)
    clock = await driver.begin(CLIENT)
    async for number in driver.ticks(options):
        body = driver.stamped(options.producer, number, options.size)
        confirms.send()
        amqp.channel.basic_publish(options.subject, options.subject, body, properties)
    if _quorum(options):
        await confirms.all()
    driver.say_paced(clock)
    await word()


async def listen(options: Options) -> None:
    amqp = await Amqp.connect(options)
    await declare_exchange(amqp, options)
    await declare_queue(amqp, options, queue_of(options))
    heard, over = driver.Listen(options), asyncio.Event()
    await consume(amqp, options, queue_of(options), driver.hearing(heard, over))
    await driver.listen_to_all(heard, over, CLIENT)
    await _remove(amqp, options, 1)


if __name__ == "__main__":
    driver.play(
        {
            "publish": publish,
            "subscribe": subscribe,
            "request": request,
            "respond": respond,
            "pace": pace,
            "listen": listen,
        }
    )
