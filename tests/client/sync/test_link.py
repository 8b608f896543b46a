"""The own thread of a client, when it fails."""

from __future__ import annotations

import asyncio

import pytest

from malamute_protocol.errors import BrokerRefused
from malamute_py.embedded import EmbeddedBroker

pytestmark = pytest.mark.slow


async def test_a_thread_that_fails_leaves_nobody_waiting(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broker.connect_sync(identity="ann") as ann:

        def fail() -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(ann._link.engine, "next_wake", fail)
        with pytest.raises(BrokerRefused, match="ZeroDivisionError"):
            await asyncio.to_thread(ann.cursor("s", "c").info)
        with pytest.raises(BrokerRefused, match="ZeroDivisionError"):
            ann.broker_info()
