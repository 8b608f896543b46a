"""SIGKILL at random moments of the broker, under mail, requests, a group and atomic steps.

Proves survival of the process's death only; power loss is the simulator's subject. Clients and
workers live on and reconnect. Everything confirmed is there; nothing is accepted twice; each
request is answered once; each part of a step is where the others are.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from malamute_py.client.aio.client import Client
from malamute_py.demo.daemon import Daemon
from tests.system.patient import patient

KILLS = 20
PATIENCE_S = 60.0
SEED = int(os.environ.get("MALAMUTE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)


@dataclass
class Book:
    """Promises of the broker, and arrivals."""

    mails: int = 0
    mails_confirmed: dict[int, int] = field(default_factory=dict)
    """Mail -> number that the broker gave it."""
    mails_read: list[tuple[int, int]] = field(default_factory=list)
    """(number given by the broker, mail), in the order of arrival."""
    requests: int = 0
    requests_confirmed: set[int] = field(default_factory=set)
    worked: Counter[int] = field(default_factory=Counter)
    answers: list[tuple[int, int]] = field(default_factory=list)
    """(number given by the broker, request)."""
    steps: int = 0
    steps_confirmed: set[int] = field(default_factory=set)
    grouped: Counter[int] = field(default_factory=Counter)

    def counts(self) -> tuple[int, int, int]:
        return len(self.mails_confirmed), len(self.answers), len(self.steps_confirmed)

    def grew(self, before: tuple[int, int, int]) -> bool:
        return all(now > then for now, then in zip(self.counts(), before, strict=True))


async def keep_going(
    stopped: asyncio.Event,
    one: Callable[[int], Coroutine[None, None, None]],
    begin: Callable[[], int],
) -> None:
    """Make calls of `one`, many in flight, with ascending numbers, until stopped; then all end."""
    async with asyncio.TaskGroup() as group:
        inflight: set[asyncio.Task[None]] = set()
        while not stopped.is_set():
            number = begin()
            task = group.create_task(one(number))
            inflight.add(task)
            task.add_done_callback(inflight.discard)
            await asyncio.sleep(0 if number % 10 else 0.004)
            if len(inflight) > 100:
                await asyncio.wait(inflight, return_when=asyncio.FIRST_COMPLETED)


async def send_mail(client: Client, book: Book, stopped: asyncio.Event) -> None:
    async def one(number: int) -> None:
        confirmed = await client.send("crew", b"%d" % number)
        book.mails_confirmed[number] = confirmed.offset

    def begin() -> int:
        book.mails += 1
        return book.mails - 1

    await keep_going(stopped, one, begin)


async def read_mail(client: Client, book: Book) -> None:
    async with client.inbox("crew", ack="manual") as inbox:
        async for mail in inbox:
            book.mails_read.append((mail.number, int(mail.body)))
            await mail.ack()


async def ask(client: Client, book: Book, stopped: asyncio.Event) -> None:
    async def one(number: int) -> None:
        await client.submit("sums", b"%d" % number, reply_to="answers")
        book.requests_confirmed.add(number)

    def begin() -> int:
        book.requests += 1
        return book.requests - 1

    await keep_going(stopped, one, begin)


async def work(client: Client, book: Book) -> None:
    async with client.worker("sums", concurrency=16) as worker:
        async for request in worker:
            book.worked[int(request.body)] += 1
            await request.reply(request.body)


async def read_answers(client: Client, book: Book) -> None:
    async with client.inbox("answers", ack="manual") as inbox:
        async for mail in inbox:
            book.answers.append((mail.number, int(mail.body)))
            await mail.ack()


async def step(client: Client, book: Book, stopped: asyncio.Event) -> None:
    async def one(number: int) -> None:
        body = b"%d" % number
        async with client.atomic() as step:
            step.publish("left", body)
            step.publish("right", body)
            step.send("audit", body)
        book.steps_confirmed.add(number)

    def begin() -> int:
        book.steps += 1
        return book.steps - 1

    await keep_going(stopped, one, begin)


async def share(client: Client, book: Book) -> None:
    async with client.group("left", "readers", kind="shared", create=True) as group:
        while True:
            batch = await group.next_batch()
            if batch is None:
                return
            book.grouped.update(int(body) for body in batch.bodies())
            await group.ack(batch)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        # An Event would not do: several tasks move the counts that are waited for.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def numbers_in(client: Client, stream: str) -> list[int]:
    return [
        int(record.body)
        async for record in client.subscribe(stream, start="earliest", until="tail")
    ]


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_work_survives_twenty_kills_of_the_broker(tmp_path: Path) -> None:
    print(f"seed: MALAMUTE_TEST_SEED={SEED}")
    moments = random.Random(SEED)
    # Small segments and frequent checkpoints, so that the kills also fall on these.
    settings = [
        "limits.batch_bytes_max=1048576", "limits.record_bytes_max=524288",
        "journal.segment_bytes=2097152", "journal.ring_bytes=134217728",
        "checkpoint.interval_ms=200",
    ]  # fmt: skip
    book = Book()
    with Daemon(tmp_path, settings) as daemon:
        clients = [
            await patient(daemon.endpoint, name)
            for name in ("sender", "reader", "asker", "worker-1", "worker-2", "desk", "stepper",
                         "member-1", "member-2")
        ]  # fmt: skip
        sender, reader, asker, first, second, desk, stepper, one, two = clients
        stopped = asyncio.Event()
        writing = [
            asyncio.create_task(send_mail(sender, book, stopped)),
            asyncio.create_task(ask(asker, book, stopped)),
            asyncio.create_task(step(stepper, book, stopped)),
        ]
        reading = [
            asyncio.create_task(each)
            for each in (
                read_mail(reader, book), work(first, book), work(second, book),
                read_answers(desk, book), share(one, book), share(two, book),
            )
        ]  # fmt: skip
        for _ in range(KILLS):
            before = book.counts()
            if moments.random() < 0.8:
                await until(partial(book.grew, before))
            await asyncio.sleep(moments.uniform(0.0, 0.3))
            daemon.kill()
            await asyncio.to_thread(daemon.start)
        stopped.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*writing)
        await until(
            lambda: (
                len({mail for _, mail in book.mails_read}) == book.mails
                and len({request for _, request in book.answers}) == book.requests
                and len(book.grouped) == book.steps
            )
        )
        left, right = await numbers_in(sender, "left"), await numbers_in(sender, "right")
        audit: list[int] = []
        async with sender.inbox("audit") as inbox:
            while len(audit) < len(left):
                audit.append(int((await asyncio.wait_for(anext(inbox), PATIENCE_S)).body))
        info = await sender.service_info("sums")
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for client in clients:
            await client.close()
    # Mail: every confirmed one was read; none was accepted twice; in the order of acceptance.
    assert set(book.mails_confirmed) == set(range(book.mails))
    numbers: dict[int, set[int]] = {}
    for number, mail in book.mails_read:
        numbers.setdefault(mail, set()).add(number)
    assert all(len(each) == 1 for each in numbers.values()), "a mail was accepted twice"
    assert {mail: next(iter(each)) for mail, each in numbers.items()} == book.mails_confirmed
    firsts = list(dict.fromkeys(number for number, _ in book.mails_read))
    assert firsts == sorted(firsts)
    # Requests: each is answered by one message, however often it was handed out.
    assert book.requests_confirmed == set(range(book.requests))
    answers = dict(book.answers)
    assert Counter(answers.values()) == Counter(range(book.requests))
    assert (info.waiting, info.held) == (0, 0)
    # Steps: all three places hold the same, in the same order, once.
    assert book.steps_confirmed == set(range(book.steps))
    assert left == right == audit
    assert sorted(left) == list(range(book.steps))
    assert set(book.grouped) == set(left)
    assert min(book.mails, book.requests, book.steps) > KILLS
