"""Fixture: brokers' shells over one data directory, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.shell import Shell


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Shell]]:
    open_ones: list[Shell] = []

    def begin(**options: Any) -> Shell:
        shell = Shell(tmp_path / "data", **options)
        open_ones.append(shell)
        return shell

    yield begin
    for shell in open_ones:
        shell.abandon()
