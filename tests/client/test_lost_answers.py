"""A request whose reply cannot come any more ends by a named error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from malamute_py.client.session.letters import RequestFailed
from malamute_py.embedded import EmbeddedBroker
from tests.client.shells import FAST, SHELLS
from tests.client.test_held_or_given_back import cut, deafen, hear_again
from tests.waiting import WAIT_S


@pytest.mark.moderate
@pytest.mark.parametrize("new_shell", SHELLS, ids=lambda shell: shell.kind)
async def test_a_reply_that_was_lost_with_its_temporary_mailbox_is_told_by_name(
    tmp_path: Path, endpoint: str, new_shell: Any
) -> None:
    def start() -> EmbeddedBroker:
        return EmbeddedBroker(tmp_path, listen=[endpoint]).start()

    shell = new_shell()
    broker = await asyncio.to_thread(start)
    await shell.connect(endpoint, **FAST)
    async with broker.connect(identity="worker", **FAST) as worker_client:
        worker = worker_client.worker("svc")
        answered, waits = [
            asyncio.ensure_future(shell.do("request", "svc", body, timeout_ms=None))
            for body in (b"answered", b"waits")
        ]
        requests = {}
        for _ in range(2):
            request = await worker.next()
            assert request is not None
            requests[bytes(request.body)] = request
        # The broker has the reply, and is gone before the requester has it.
        deafen(shell.client)
        assert await requests[b"answered"].reply(b"never seen", wait=True) is not None
        await requests[b"waits"].nack(wait=True)
    await asyncio.to_thread(broker.stop)
    hear_again(shell.client)
    cut(shell.client)
    broker = await asyncio.to_thread(start)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(RequestFailed, match="lost"):
            await answered
    async with broker.connect(identity="worker", **FAST) as worker_client:
        again = await worker_client.worker("svc").next()
        assert again is not None
        await again.reply(b"seen", wait=True)
        async with asyncio.timeout(WAIT_S):
            assert bytes((await waits).body) == b"seen"
    await shell.do("close")
    await asyncio.to_thread(broker.stop)
