"""Fixtures: a log that is open for writing, and a reader of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from malamute_py.journal import open_reader
from malamute_py.mapped import LogReader
from tests.mapped.logs import SETTINGS, Log


@pytest.fixture
def log(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Log]:
    """A log with rings as `RING` of the test's module, or of SETTINGS, says."""
    opened = Log(tmp_path / "data", getattr(request.module, "RING", SETTINGS))
    yield opened
    opened.close()


@pytest.fixture
def reader(log: Log) -> Iterator[LogReader]:
    with open_reader(log.path) as opened:
        yield opened
