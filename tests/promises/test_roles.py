"""The clients of a run: what is left of them when it ends before its time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from malamute_py.embedded import EmbeddedBroker
from malamute_py.promises.history import Book
from malamute_py.promises.roles import Roles


@pytest.mark.moderate
async def test_clients_that_are_closed_amid_a_run_make_no_more_calls(tmp_path: Path) -> None:
    """They went on, each call with two errors, when their broker did not start again."""
    async with EmbeddedBroker() as broker:
        before = asyncio.all_tasks()
        with Book(tmp_path / "journal") as book:
            roles = Roles(book, "run", "stored", {"context": broker.context})
            await roles.start(broker.endpoint)
            async with asyncio.timeout(60):
                while min(roles.progress().values()) < 2:  # noqa: ASYNC110 - several events
                    await asyncio.sleep(0.01)
                await roles.close()
        assert asyncio.all_tasks() <= before
