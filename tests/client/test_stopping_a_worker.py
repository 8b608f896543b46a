"""A worker that stops: what it has begun comes to its end or to another worker, at no attempt."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

import malamute_py as malamute
from malamute_py.embedded import EmbeddedBroker
from tests.client.shells import Connect
from tests.waiting import WAIT_MS, WAIT_S

pytestmark = pytest.mark.slow


async def test_closing_a_worker_with_requests_in_hand_counts_no_attempt(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    await ann.do("submit", "svc", b"q")
    for _ in range(7):
        worker = bob.client.worker("svc", settings={"attempts_max": 3})
        [request] = await bob.take(worker, 1)
        assert request.attempts == 1
        await bob.call(worker.close)


async def test_a_worker_that_drains_ends_what_it_has_begun_and_passes_on_the_rest(
    connect: Connect,
) -> None:
    ann, bob, carl = await connect("ann"), await connect("bob"), await connect("carl")
    worker = bob.client.worker("svc", concurrency=2)
    await bob.call(worker.accepted)
    asking = [
        asyncio.create_task(ann.do("request", "svc", body, timeout_ms=WAIT_MS))
        for body in (b"first", b"second")
    ]
    [begun] = await bob.take(worker, 1)
    other = carl.client.worker("svc")
    await carl.call(other.accepted)
    closing = asyncio.create_task(bob.call(worker.close, drain=True))
    [passed_on] = await carl.take(other, 1)
    assert passed_on.attempts == 1
    assert passed_on.body != begun.body
    assert not closing.done()
    await bob.call(begun.reply, b"bob")
    await asyncio.wait_for(closing, WAIT_S)
    await carl.call(passed_on.reply, b"carl")
    assert {(await reply).body for reply in asking} == {b"bob", b"carl"}


async def test_a_worker_that_drains_for_too_long_releases_what_it_has_begun(
    connect: Connect,
) -> None:
    ann, bob, carl = await connect("ann"), await connect("bob"), await connect("carl")
    worker = bob.client.worker("svc")
    await ann.do("submit", "svc", b"q")
    [request] = await bob.take(worker, 1)
    await bob.call(worker.close, drain=True, drain_ms=50)
    assert request.cancelled()
    [again] = await carl.take(carl.client.worker("svc"), 1)
    assert (again.number, again.attempts) == (request.number, 1)


async def test_closing_a_client_that_drains_waits_for_a_handler_in_a_thread(
    broker: EmbeddedBroker,
) -> None:
    begun, go = threading.Event(), threading.Event()
    async with broker.connect(identity="ann") as ann, broker.connect(identity="bob") as bob:

        @bob.serve("svc")
        def handle(_request: Any) -> bytes:
            begun.set()
            assert go.wait(WAIT_S)
            return b"done"

        running = asyncio.create_task(bob.run())
        asking = asyncio.create_task(ann.request("svc", b"q", timeout_ms=WAIT_MS))
        await asyncio.to_thread(begun.wait, WAIT_S)
        closing = asyncio.create_task(bob.close(drain=True))
        await asyncio.sleep(0)
        assert not closing.done()
        go.set()
        assert (await asking).body == b"done"
        await closing
        await running


async def test_the_dead_letter_has_what_the_handler_raised_at_last(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")

    async def fails(request: Any) -> None:
        raise ValueError(f"attempt {request.attempts}")

    def fails_too(request: Any) -> None:
        raise ValueError(f"attempt {request.attempts}")

    worker = bob.client.worker("svc", settings={"attempts_max": 2, "backoff_ms": 1})
    await bob.call(worker.accepted)
    handler = fails if bob.kind == "asyncio" else fails_too
    running = asyncio.create_task(bob.call(worker.run, handler, on_error="nack", delay_ms=1))
    with pytest.raises(malamute.RequestFailed, match="at last: ValueError: attempt 2"):
        await ann.do("request", "svc", b"q", timeout_ms=WAIT_MS)
    await bob.call(worker.close)
    await running


def test_the_delay_of_what_is_given_back_doubles_with_each_attempt(broker: EmbeddedBroker) -> None:
    with broker.connect_sync() as client:
        client.submit("svc", b"q")
        with client.worker("svc", settings={"attempts_max": 1_000}) as worker:
            request = worker.next(WAIT_MS)
            assert request is not None
            delays = []
            for attempts in (1, 2, 3, 1_000):
                request._of.attempts = attempts
                delays.append(request.retry_ms(1_000))
            assert delays == [1_000, 2_000, 4_000, 600_000]
            assert (request.retry_ms(0), request.retry_ms(3_600_000)) == (0, 3_600_000)


LOGGED = """
import logging, sys
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
"""
ASYNCIO = """
import asyncio, sys
import malamute_py as malamute

async def main():
    async with malamute.connect(sys.argv[1]) as client:
        @client.serve("svc", concurrency=2)
        async def handle(request):
            print("begun", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            return b"done"
        await client.run(signals=True)
    print("ended", flush=True)

asyncio.run(main())
"""
SYNC = """
import sys
import malamute_py as malamute

with malamute.connect_sync(sys.argv[1]) as client:
    @client.serve("svc", concurrency=2)
    def handle(request):
        print("begun", flush=True)
        sys.stdin.readline()
        return b"done"
    client.run(signals=True)
print("ended", flush=True)
"""


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("program", [ASYNCIO, SYNC], ids=["asyncio", "sync"])
def test_a_signal_lets_the_handlers_of_a_program_end(program: str, number: int) -> None:
    with EmbeddedBroker(tcp=True) as broker, broker.connect_sync() as client:
        client.submit("svc", b"first", reply_to="answers")
        process = subprocess.Popen(
            [sys.executable, "-c", LOGGED + program, broker.tcp_endpoint],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert "begun\n" in lines
        process.send_signal(number)
        assert f"{signal.Signals(number).name}: the worker begins nothing more\n" in lines
        client.submit("svc", b"second", reply_to="answers")
        assert process.communicate("go\n", timeout=WAIT_S)[0].endswith("ended\n")
        assert process.returncode == 0
        facts = client.service_info("svc")
        assert (facts.waiting, facts.held) == (1, 0)
        with client.inbox("answers") as inbox:
            assert [bytes(next(iter(inbox)).body)] == [b"done"]
