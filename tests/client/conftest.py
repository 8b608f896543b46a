"""Fixtures of tests of clients: a broker in this process, and a client of either shell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from malamute_py.embedded import EmbeddedBroker
from tests.client.shells import FAST, SHELLS, AsyncShell, Connect, SyncShell
from tests.ports import Port


@pytest.fixture
async def broker() -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker() as embedded:
        yield embedded


@pytest.fixture
def identity() -> str:
    """Name that the shell's client connects with; a file that needs one overrides this."""
    return ""


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.kind)
async def shell(
    request: pytest.FixtureRequest, broker: EmbeddedBroker, identity: str
) -> AsyncIterator[Any]:
    made: AsyncShell | SyncShell = request.param()
    await made.connect(broker.endpoint, context=broker.context, identity=identity, **FAST)
    yield made
    await made.do("close", flush_ms=0)


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.kind)
async def connect(request: pytest.FixtureRequest, broker: EmbeddedBroker) -> AsyncIterator[Connect]:
    """Makes clients of one kind; the argument is the identity."""
    made: list[Any] = []

    async def another(identity: str = "", **options: Any) -> Any:
        shell = request.param()
        made.append(shell)
        await shell.connect(
            broker.endpoint, context=broker.context, identity=identity, **{**FAST, **options}
        )
        return shell

    yield another
    for shell in made:
        await shell.do("close", flush_ms=0)


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An address that a broker can leave and come back to."""
    with Port() as port:
        yield port.endpoint
