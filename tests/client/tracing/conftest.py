"""Traced clients of both shells, at a broker of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from malamute_py import EmbeddedBroker
from tests.client.fakes import FakeBroker
from tests.client.shells import FAST, SHELLS
from tests.client.tracing.traced_shells import Traced


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as embedded:
        yield embedded


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.kind)
async def traced(request: pytest.FixtureRequest, broker: EmbeddedBroker) -> AsyncIterator[Traced]:
    name = f"{request.node.name}"[:100].translate(str.maketrans("[]", "--"))
    made = Traced(request.param(), name)
    await made.shell.connect(broker.endpoint, context=broker.context, tracing=made.tracing)
    yield made
    await made.shell.do("close", flush_ms=0)


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.kind)
async def lonely(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Traced, FakeBroker]]:
    """A traced client whose broker has gone, and comes back when it is started."""
    fake = FakeBroker()
    made = Traced(request.param(), "lonely")
    await made.shell.connect(fake.endpoint, tracing=made.tracing, **FAST)
    fake.stop()
    yield made, fake
    await made.shell.do("close", flush_ms=0)
    fake.close()
