"""Fixtures: a place for a ring, on files and in memory alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journal.rings import Place, file_place, memory_place


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return file_place(tmp_path / "ring") if request.param == "file" else memory_place()
