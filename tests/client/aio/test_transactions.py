"""Transactions of asyncio whose task is cancelled: the broker holds none of them."""

from __future__ import annotations

import asyncio

import pytest

from malamute_protocol.errors import LocalProtocolError
from malamute_py.client.aio.transactions import Transaction
from malamute_py.embedded import EmbeddedBroker

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("at", ["beginning", "commit"])
async def test_a_block_that_is_cancelled_is_rolled_back(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    waits = asyncio.Event()

    async def wait_for_ever(self: Transaction, timeout_ms: object) -> None:
        waits.set()
        await asyncio.Event().wait()

    async with EmbeddedBroker() as broker, broker.connect(identity="loader") as client:
        transaction = client.transaction()

        async def load() -> None:
            async with transaction:
                await transaction.publish("s", b"never seen")

        if at == "commit":
            # The chunk before the commit is not taken yet.
            monkeypatch.setattr(Transaction, "_until_taken", wait_for_ever)
        task = asyncio.create_task(load())
        await (waits.wait() if at == "commit" else asyncio.sleep(0))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.flush()
        assert await client.transactions() == []
        with pytest.raises(LocalProtocolError, match="not open"):
            await transaction.publish("s", b"too late")
