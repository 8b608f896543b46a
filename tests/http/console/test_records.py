"""A look at the newest records of a stream, where it has to read far back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Self

import pytest

from malamute_py.http.console import records
from malamute_py.http.console.records import look

FAR = 100
"""Records between two places from which on the broker takes for ever to read them."""


class Reading:
    """Records at every fiftieth offset between two places; of a far way the first one alone."""

    def __init__(self, start: int, end: int) -> None:
        self._offsets = range(-(-start // 50) * 50, end, 50)
        self._far = end - start > FAR

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __aiter__(self) -> AsyncIterator[int]:
        for offset in self._offsets:
            yield offset
            if self._far:
                await asyncio.sleep(3_600)


class Client:
    """A client of a broker with one stream of 1,000 records."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    async def stream_info(self, name: str) -> Any:
        return SimpleNamespace(first=0, tail=1_000)

    def subscribe(self, stream: str, pattern: str, *, start: int, end: int, **_: Any) -> Reading:
        self.read.append((start, end))
        return Reading(start, end)


@pytest.mark.moderate
async def test_a_look_that_ends_early_shows_the_newest_that_it_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It showed the oldest of the last step, and had dropped the newest by then."""
    monkeypatch.setattr(records, "LOOK_S", 0.1)
    monkeypatch.setattr(records, "row", lambda offset: {"offset": offset})
    client: Any = Client()
    found = await look(client, "s", "#", "newest", 5, 0)
    assert [each["offset"] for each in found.rows] == [950]
    assert found.said == ["the look ended after 0 s: there may be more"]
    assert client.read == [(995, 1_000), (915, 995), (0, 915)], "no record is read twice"
