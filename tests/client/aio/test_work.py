"""Workers in asyncio against the real broker: handlers as tasks, and handlers in threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import malamute_py as malamute
from malamute_py.embedded import EmbeddedBroker
from tests.client.test_queues_against_a_broker import bodies
from tests.waiting import WAIT_MS, WAIT_S

pytestmark = pytest.mark.slow


async def test_a_handler_that_cancels_its_own_task_ends_its_request_and_no_worker() -> None:
    """run() ended without a word, and all later requests waited until their time was over."""
    async with EmbeddedBroker() as broker, broker.connect() as client:

        @client.serve("work", concurrency=1)
        async def work(request: malamute.Request) -> bytes:
            task = asyncio.current_task()
            assert task is not None
            if request.body != b"good":
                task.cancel()
            if request.body == b"waits":
                await asyncio.sleep(0)
            return b"done"

        running = asyncio.create_task(client.run())
        for _ in range(3):
            with pytest.raises(malamute.RequestFailed, match="CancelledError"):
                await client.request("work", b"waits", timeout_ms=10_000)
            assert (await client.request("work", b"returns", timeout_ms=10_000)).body == b"done"
            assert (await client.request("work", b"good", timeout_ms=10_000)).body == b"done"
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_handler_that_lets_a_cancellation_of_its_own_out_ends_its_request(
    broker: EmbeddedBroker,
) -> None:
    async with broker.connect(identity="ann") as ann, broker.connect(identity="bob") as bob:

        async def handle(request: Any) -> bytes:
            if request.body == b"cancel":
                raise asyncio.CancelledError("a task of the handler's own")
            return b"fine"

        worker = bob.worker("svc", concurrency=1)
        running = asyncio.create_task(worker.run(handle))
        for _ in range(3):
            with pytest.raises(malamute.RequestFailed, match="CancelledError"):
                await ann.request("svc", b"cancel", timeout_ms=WAIT_MS)
        assert (await ann.request("svc", b"q", timeout_ms=WAIT_MS)).body == b"fine"
        await worker.close()
        await running


async def test_as_many_handlers_run_in_threads_as_the_offer_says(broker: EmbeddedBroker) -> None:
    count = 48  # more than the event loop has threads
    together = threading.Barrier(count)
    async with broker.connect(identity="ann") as ann, broker.connect(identity="bob") as bob:

        def handle(_request: Any) -> bytes:
            together.wait(WAIT_S / 2)
            return b"all of us"

        worker = bob.worker("svc", concurrency=count)
        running = asyncio.create_task(worker.run(handle))
        asked = [ann.request("svc", b"q", timeout_ms=WAIT_MS) for _ in range(count)]
        replies = await asyncio.gather(*asked)
        assert bodies(replies) == [b"all of us"] * count
        await worker.close()
        await running


async def test_as_many_handlers_wait_for_each_other_as_the_offer_says(
    broker: EmbeddedBroker,
) -> None:
    count = 48
    here = 0
    all_here = asyncio.Event()
    async with broker.connect(identity="ann") as ann, broker.connect(identity="bob") as bob:

        async def handle(_request: Any) -> bytes:
            nonlocal here
            here += 1
            if here == count:
                all_here.set()
            await all_here.wait()
            return b"all of us"

        worker = bob.worker("svc", concurrency=count)
        running = asyncio.create_task(worker.run(handle))
        # Together, so that all come as one batch, which wakes one of those who wait for requests.
        asked = [ann.request("svc", b"q", timeout_ms=WAIT_MS) for _ in range(count)]
        replies = await asyncio.gather(*asked)
        assert bodies(replies) == [b"all of us"] * count
        await worker.close()
        await running


async def test_a_handler_in_a_thread_holds_up_nobody(broker: EmbeddedBroker) -> None:
    async with broker.connect(identity="ann") as ann, broker.connect(identity="bob") as bob:
        begun, go = threading.Event(), threading.Event()

        def handle(request: Any) -> bytes:
            begun.set()
            assert go.wait(WAIT_S)
            return b"done"

        async with bob.worker("svc") as worker:
            running = asyncio.create_task(worker.run(handle))
            asking = asyncio.create_task(ann.request("svc", b"q"))
            await asyncio.to_thread(begun.wait, WAIT_S)
            await bob.broker_info()
            go.set()
            assert (await asking).body == b"done"
        await running


async def test_a_run_that_is_cancelled_counts_no_attempt(broker: EmbeddedBroker) -> None:
    seen: asyncio.Queue[int] = asyncio.Queue()

    async def handle(request: malamute.Request) -> None:
        seen.put_nowait(request.attempts)
        await asyncio.Event().wait()

    async with broker.connect(identity="ann") as ann, broker.connect(identity="bob") as bob:
        await ann.submit("svc", b"q")
        for _ in range(7):
            async with bob.worker("svc", settings={"attempts_max": 3}) as worker:
                running = asyncio.create_task(worker.run(handle))
                assert await asyncio.wait_for(seen.get(), WAIT_S) == 1
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
