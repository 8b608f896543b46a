"""An MQTT client: gmqtt in uvloop, MQTT 5.

gmqtt was the fastest of the Python clients (140 B through one broker: 107,000/s at QoS 0 and
67,000/s at QoS 1; paho-mqtt, which aiomqtt is built on, 23,000 and 5,000). A driver may give it a
store of unacknowledged messages: the one here counts, so that a publisher keeps to its window.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import os
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import gmqtt  # type: ignore[import-untyped]
from gmqtt.storage import PersistentStorage  # type: ignore[import-untyped]

from perf.peers import driver
from perf.peers.checks import Check, checks_of, take_all
from perf.peers.driver import DriverFailed, Options, Subjects, word

CLIENT = f"gmqtt {importlib.metadata.version('gmqtt')}"
TURN = 200
"""Publishes between two turns of the event loop."""
FILTERS = 200
"""Subscriptions of one packet."""
_numbers = itertools.count()


class Unacknowledged(PersistentStorage):  # type: ignore[misc]
    """Unacknowledged messages at QoS 1, as the client asks for them; wakes a waiting publisher."""

    def __init__(self) -> None:
        super().__init__()
        self.out = self.acknowledged = 0
        self.low = 0
        self.lone: driver.Lone | None = None
        self.moved = asyncio.Event()

    def push_message(self, mid: int, raw_package: bytes) -> None:
        super().push_message(mid, raw_package)
        self.out += 1

    def remove_message_by_mid(self, mid: int) -> None:
        super().remove_message_by_mid(mid)
        if self.lone is not None:
            self.lone.confirmed()
        self.out -= 1
        self.acknowledged += 1
        if self.out <= self.low:
            self.moved.set()

    async def sink_to(self, low: int) -> None:
        """Wait until no more than so many are unacknowledged."""
        self.low = low
        while self.out > low:
            self.moved.clear()
            await self.moved.wait()


class Mqtt:
    """One connected client; `take` gets each payload with its properties."""

    def __init__(self, client: gmqtt.Client, store: Unacknowledged) -> None:
        self.client = client
        self.store = store
        self._granted = 0
        self._moved = asyncio.Event()

    @classmethod
    async def connect(
        cls, options: Options, take: Callable[[bytes, dict[str, Any]], object] | None = None
    ) -> Mqtt:
        """Connect; take: is given each message's body and properties."""
        place = urllib.parse.urlsplit(options.url)
        store = Unacknowledged()
        client = gmqtt.Client(
            f"perf-{os.getpid()}-{next(_numbers)}",
            persistent_storage=store,
            receive_maximum=65535,
        )
        client.set_config({"reconnect_retries": 0})
        made = cls(client, store)

        def hear(_: object, __: str, body: bytes, ___: int, properties: dict[str, Any]) -> int:
            assert take is not None
            try:
                take(body, properties)
            except DriverFailed as error:
                driver.fail(error)
            return 0

        def granted(_: object, __: int, qos: Any, ___: object) -> None:
            if any(level >= 128 for level in qos):  # MQTT's codes of failure
                driver.fail("a subscription was refused:", qos)
            made._granted += len(qos)
            made._moved.set()

        if take is not None:
            client.on_message = hear
        client.on_subscribe = granted
        await client.connect(place.hostname, place.port, keepalive=600)
        return made

    async def subscribe(self, filters: list[str], qos: int) -> None:
        """Return when all subscriptions are granted."""
        wanted = self._granted + len(filters)
        for at in range(0, len(filters), FILTERS):
            some = filters[at : at + FILTERS]
            self.client.subscribe([gmqtt.Subscription(each, qos=qos) for each in some])
        while self._granted < wanted:
            self._moved.clear()
            await self._moved.wait()

    async def round_trip(self) -> None:
        """Return when the server has read all that was sent: it answers in order."""
        await self.subscribe([f"round-trip/{os.getpid()}"], 0)


def _qos(options: Options) -> int:
    return 1 if options.mode == "qos1" else 0


def _subjects(options: Options) -> Subjects:
    return Subjects(options, "/", "+")


async def publish(options: Options) -> None:
    """Send all records; over at QoS 1 with the last acknowledgement, at QoS 0 by a round trip."""
    mqtt = await Mqtt.connect(options)
    given = driver.bodies(options)
    subjects, qos, sent = _subjects(options), _qos(options), 0
    send, store, window = mqtt.client.publish, mqtt.store, options.window
    lone = store.lone = driver.Lone(window) if qos else None
    clock = await driver.begin(CLIENT)
    for burst in given:
        for subject, body in zip(subjects.of_burst(sent, len(burst)), burst, strict=True):
            if store.out >= window:
                await store.sink_to(window // 2)
            if lone is not None:
                lone.sent()
            send(subject, body, qos)
            sent += 1
            if not sent % TURN:
                await asyncio.sleep(0)
    if qos:
        await store.sink_to(0)
        sent = store.acknowledged
    else:
        await mqtt.round_trip()
    driver.say_published(clock, sent, lone=lone)
    await word()


async def subscribe(options: Options) -> None:
    checks = checks_of(options)
    subjects = _subjects(options)
    clients = []
    for check in checks:

        def take(body: bytes, _: object, check: Check = check) -> None:
            check.add(body)

        mqtt = await Mqtt.connect(options, take)
        clients.append(mqtt)
        filters = subjects.patterns if subjects.many else [subjects.one]
        await mqtt.subscribe(filters, _qos(options))
    await take_all(checks, options, CLIENT)


async def request(options: Options) -> None:
    """Keep `flight` requests out; each names the topic of its reply, as MQTT 5 has it."""
    requests = driver.Requests(options)
    inbox = f"{_subjects(options).one}/replies/{os.getpid()}"
    topic, qos = _subjects(options).one, _qos(options)
    sent_ns = [0] * options.count
    numbers = iter(range(options.count))
    over = asyncio.Event()

    loop = asyncio.get_running_loop()

    def send(number: int) -> None:
        sent_ns[number] = time.monotonic_ns()
        mqtt.client.publish(topic, requests.bodies[number], qos, response_topic=inbox)

    def send_next() -> None:
        number = next(numbers, None)
        if number is not None:
            requests.at_its_turn(loop, send, number)

    def take(body: bytes, _: object) -> None:
        number = int.from_bytes(body[3:11], "little")  # behind the "re:" of a reply
        if not body.startswith(b"re:") or number >= options.count:
            raise DriverFailed(f"a reply that is wrong: {body[:40]!r}")
        requests.answered(number, body, sent_ns[number])
        if len(requests.latencies) == options.count:
            over.set()
        send_next()

    mqtt = await Mqtt.connect(options, take)
    await mqtt.subscribe([inbox], qos)
    clock = await driver.begin(CLIENT)
    for _ in range(options.flight):
        send_next()
    await over.wait()
    requests.tell(clock)
    await word()


async def respond(options: Options) -> None:
    qos = _qos(options)
    workers: list[Mqtt] = []
    for number in range(options.workers):

        def echo(body: bytes, properties: dict[str, Any], number: int = number) -> None:
            inbox = properties["response_topic"][0]
            workers[number].client.publish(inbox, b"re:" + body, qos)

        workers.append(await Mqtt.connect(options, echo))
        await workers[-1].subscribe([f"$share/workers/{_subjects(options).one}"], qos)
    await driver.work_until_told(CLIENT)


async def pace(options: Options) -> None:
    mqtt = await Mqtt.connect(options)
    topic, qos = _subjects(options).one, _qos(options)
    clock = await driver.begin(CLIENT)
    async for number in driver.ticks(options):
        mqtt.client.publish(topic, driver.stamped(options.producer, number, options.size), qos)
    if qos:
        await mqtt.store.sink_to(0)
    driver.say_paced(clock)
    await word()


async def listen(options: Options) -> None:
    heard, over = driver.Listen(options), asyncio.Event()

    def take(body: bytes, _: object) -> None:
        if heard.add(body):
            over.set()

    mqtt = await Mqtt.connect(options, take)
    await mqtt.subscribe([_subjects(options).one], _qos(options))
    await driver.listen_to_all(heard, over, CLIENT)


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
