"""One face for both shells, so that each scenario is written once.

A scenario is a coroutine over `Shell`: the asyncio client is awaited in the test's loop,
the sync client runs in a worker thread. A first link is given the time that tests have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from malamute_py.client.aio.client import connect
from malamute_py.client.sync.client import connect_sync
from tests.waiting import WAIT_MS

FAST: dict[str, Any] = {"retry_min_ms": 10, "retry_max_ms": 50}
"""Options of a client that looks for its broker again at once."""

Connect = Callable[..., Awaitable[Any]]
"""Makes clients; the argument is the identity."""


class AsyncShell:
    kind = "asyncio"

    async def connect(self, endpoint: str, **options: Any) -> Any:
        self.client = await connect(endpoint, **{"timeout_ms": WAIT_MS, **options})
        return self

    async def do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return await getattr(self.client, verb)(*arguments, **options)

    async def take(self, subscription: Any, count: int) -> list[Any]:
        """Take `count` records; fewer at the end."""
        records: list[Any] = []
        async for record in subscription:
            records.append(record)
            if len(records) == count:
                break
        return records

    async def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return await method(*arguments, **options)

    async def result(self, pending: Any) -> Any:
        return await pending


class SyncShell:
    kind = "sync"

    async def connect(self, endpoint: str, **options: Any) -> Any:
        self.client = await asyncio.to_thread(
            connect_sync, endpoint, **{"timeout_ms": WAIT_MS, **options}
        )
        return self

    async def do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, verb), *arguments, **options)

    async def take(self, subscription: Any, count: int) -> list[Any]:
        def taking() -> list[Any]:
            records: list[Any] = []
            for record in subscription:
                records.append(record)
                if len(records) == count:
                    break
            return records

        return await asyncio.to_thread(taking)

    async def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(method, *arguments, **options)

    async def result(self, pending: Any) -> Any:
        return await asyncio.to_thread(pending.result, WAIT_MS)


SHELLS = (AsyncShell, SyncShell)
