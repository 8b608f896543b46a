"""Delay, deadline and priority of requests, as both clients ask for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from malamute_protocol.errors import LocalProtocolError, Timeout
from malamute_py.embedded import EmbeddedBroker
from tests.waiting import WAIT_MS


@pytest.fixture
def identity() -> str:
    return "asker"


async def test_each_way_to_ask_may_name_a_delay(shell: Any, broker: EmbeddedBroker) -> None:
    minute_ms = 60_000
    await shell.do("submit", "svc", b"a", delay_ms=minute_ms, request_timeout_ms=1_000)
    step = shell.client.atomic()
    step.request("svc", b"b", delay_ms=minute_ms)
    await shell.call(step.commit)
    asking = asyncio.ensure_future(shell.do("request", "svc", b"c", delay_ms=1, timeout_ms=WAIT_MS))
    async with broker.connect() as other:
        worker = other.worker("svc")
        taken = await worker.next()
        assert taken is not None
        assert taken.body == b"c"
        await taken.reply(b"done")
        seen = await other.peek_requests("svc")
        await worker.close()
    assert (await asking).body == b"done"
    assert [(one.state, one.not_before_ms - one.at_ms) for one in seen] == [
        ("delayed", minute_ms), ("delayed", minute_ms),
    ]  # fmt: skip
    assert [one.deadline_ms and one.deadline_ms - one.not_before_ms for one in seen] == [1_000, 0]


async def test_a_request_that_no_worker_gets_in_time_ends_by_name(
    shell: Any, broker: EmbeddedBroker
) -> None:
    with pytest.raises(Timeout, match=r"within 1 ms after a delay of 1 ms|within the request's"):
        await shell.do("request", "svc", b"c", delay_ms=1, timeout_ms=1)


@pytest.mark.parametrize("delay_ms", [-1, "5", 1.5])
async def test_a_delay_that_is_none_is_refused_at_once(shell: Any, delay_ms: Any) -> None:
    with pytest.raises(LocalProtocolError, match="delay_ms"):
        await shell.do("request", "svc", b"", delay_ms=delay_ms)


@pytest.mark.moderate
async def test_each_way_to_ask_may_name_a_priority(shell: Any, broker: EmbeddedBroker) -> None:
    await shell.do("submit", "svc", b"low")
    await shell.do("submit", "svc", b"high", priority=2)
    step = shell.client.atomic()
    step.request("svc", b"higher", priority=3)
    await shell.call(step.commit)
    async with broker.connect() as other:
        seen = await other.peek_requests("svc")
        asking = asyncio.ensure_future(
            shell.do("request", "svc", b"highest", priority=9, timeout_ms=WAIT_MS)
        )
        for _ in range(WAIT_MS):
            if len(await other.peek_requests("svc")) == 4:
                break
            await asyncio.sleep(0.001)
        worker = other.worker("svc", concurrency=1)
        got = []
        for _ in range(4):
            taken = await worker.next()
            assert taken is not None
            got.append(taken.body)
            await taken.reply(b"done")
        await worker.close()
    await asking
    assert [one.priority for one in seen] == [0, 2, 3]
    assert got == [b"highest", b"higher", b"high", b"low"]


@pytest.mark.parametrize("priority", [-1, 10, "5"])
async def test_a_priority_that_is_none_is_refused_at_once(shell: Any, priority: Any) -> None:
    with pytest.raises(LocalProtocolError, match="priority"):
        await shell.do("request", "svc", b"", priority=priority)
