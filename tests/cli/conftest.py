"""A broker in this process, and the command line run against it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.cli import linking
from tests.cli.running import Run, run_cli
from tests.waiting import WAIT_MS

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take longer to connect than a person would wait."""
    monkeypatch.setattr(linking, "CONNECT_TIMEOUT", f"{WAIT_MS}ms")


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tcp=True) as running:
        yield running


@pytest.fixture
def m(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run `malamute ...` against the broker, with contexts of its own."""
    monkeypatch.setenv("MALAMUTE_ENDPOINT", broker.tcp_endpoint)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return run_cli


@pytest.fixture
def stream(request: pytest.FixtureRequest) -> str:
    """A stream name that no other test uses."""
    return f"{request.node.originalname}-{next(_numbers)}"
