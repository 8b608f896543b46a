"""Mail and requests in asyncio against the real broker: what tasks that are cancelled leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from malamute_protocol.errors import LocalProtocolError
from malamute_py.embedded import EmbeddedBroker
from tests.client.shells import FAST
from tests.waiting import WAIT_S, until_async

pytestmark = pytest.mark.slow


async def test_a_cancelled_caller_cancels_its_request(broker: EmbeddedBroker) -> None:
    async with broker.connect(identity="ann", **FAST) as ann:
        asking = asyncio.create_task(ann.request("svc", b"q", confirm="stored"))
        await asyncio.sleep(0)
        await ann.flush()
        assert (await ann.service_info("svc")).waiting == 1
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(WAIT_S):
            while (await ann.service_info("svc")).waiting:  # noqa: ASYNC110 - the broker's facts
                await asyncio.sleep(0.005)
        await until_async(lambda: not ann._session.awaited.asked)


async def test_who_was_answered_together_asks_anew_in_one_message(broker: EmbeddedBroker) -> None:
    async def echo(request: Any) -> bytes:
        return bytes(request.body)

    callers, rounds = 64, 20
    async with broker.connect() as ann, broker.connect() as bob:
        worker = bob.worker("svc", concurrency=callers)
        working = asyncio.create_task(worker.run(echo))
        sent: dict[str, int] = {"ann": 0, "bob": 0}
        for name, client in (("ann", ann), ("bob", bob)):
            await client.broker_info()
            transport = client._link.engine.transport
            assert transport is not None

            def counted(message: Any, name: str = name, send: Any = transport.send) -> bool:
                sent[name] += 1
                return bool(send(message))

            transport.send = counted  # type: ignore[method-assign]

        async def ask(caller: int) -> None:
            for number in range(rounds):
                body = b"%d %d" % (caller, number)
                assert (await ann.request("svc", body)).body == body

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*map(ask, range(callers)))
        # One a round, and a few for the beginning, heartbeats and credit; by fours at worst.
        assert max(sent.values()) <= rounds * 4 + 10
        working.cancel()


async def test_what_cannot_be_sent_behind_an_answer_is_told_at_once(
    broker: EmbeddedBroker,
) -> None:
    async def echo(request: Any) -> bytes:
        return bytes(request.body)

    async with broker.connect() as ann, broker.connect() as bob:
        worker = bob.worker("svc")
        working = asyncio.create_task(worker.run(echo))
        link = ann._link
        await ann.request("svc", b"q")
        # In the turn of the answer, so that it leaves in the call.
        asking = ann.request("svc", b"q", properties={"a": "x" * 70_000})
        told = asking.send(None)
        assert link._resting, "else this shows nothing"
        assert link._scheduled, "a step tells it, and not the next heartbeat"
        await asyncio.wait([told])
        with pytest.raises(LocalProtocolError, match="too_large"):
            asking.send(None)
        working.cancel()


async def test_a_stream_of_replies_that_is_left_cancels_its_request(
    broker: EmbeddedBroker,
) -> None:
    async with broker.connect(identity="ann", **FAST) as ann, broker.connect() as bob:
        worker = bob.worker("svc")
        replies = ann.requests("svc", b"q")
        first = asyncio.create_task(anext(replies))
        request = await worker.next()
        assert request is not None
        await request.reply(b"one", last=False)
        assert (await first).body == b"one"
        await replies.aclose()
        await ann.broker_info()
        assert await request.reply(b"two", last=False, wait=True) is None
