"""Mail and requests of threads against the real broker: what an iterator that is left leaves."""

from __future__ import annotations

import asyncio
import threading

import pytest

from malamute_py.embedded import EmbeddedBroker
from tests.waiting import WAIT_MS, WAIT_S, until_async

pytestmark = pytest.mark.slow


async def test_a_collected_iterator_of_replies_does_not_wait_for_the_clients_lock(
    broker: EmbeddedBroker,
) -> None:
    with broker.connect_sync(identity="ann") as ann, broker.connect_sync() as bob:
        worker = bob.worker("svc")
        replies = ann.requests("svc", b"q")
        answered = asyncio.create_task(asyncio.to_thread(next, replies))
        request = await asyncio.to_thread(worker.next, WAIT_MS)
        assert request is not None
        request.reply(b"one", last=False)
        assert (await answered).body == b"one"
        closing = threading.Thread(target=replies.close)
        with ann._link.lock:  # as when the collector runs amid a call
            closing.start()
            closing.join(WAIT_S)
            assert not closing.is_alive()
        ann.broker_info()
        await until_async(lambda: not ann._session.awaited.batches)
