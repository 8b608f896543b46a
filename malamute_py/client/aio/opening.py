"""Clients that connect() has not opened yet, for their caller has neither awaited nor entered them.

Owns the time before the client is there. The rule: a caller that is too early reads how to get it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

C = TypeVar("C", bound=AbstractAsyncContextManager[Any])


class Opening(Generic[C]):
    """Client that opens when it is awaited or entered."""

    def __init__(self, open_client: Callable[[], Awaitable[C]]) -> None:
        """open_client: makes the client, and returns it once its link is open."""
        self._open = open_client
        self._client: C | None = None

    def __await__(self) -> Generator[Any, None, C]:
        return self._open().__await__()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError: connect() was neither awaited nor entered."""
            raise AttributeError(
                f"connect() has no {name!r} until it is awaited: write `client = await "
                "connect(...)`, or `async with connect(...) as client:`"
            )

    async def __aenter__(self) -> C:
        self._client = await self._open()
        return self._client

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._client is not None
        await self._client.__aexit__(kind, error, trace)
