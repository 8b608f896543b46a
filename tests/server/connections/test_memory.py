"""Resident memory: what counts as growth."""

from __future__ import annotations

from pathlib import Path

from malamute_py.journal.mapping import FilePart
from malamute_py.server.connections.memory import Memory

SIZE = 16 << 20


def test_mapped_history_is_no_growth_until_it_has_memory_of_its_own(tmp_path: Path) -> None:
    memory = Memory(lambda _: None, lambda _, __: None)
    path = tmp_path / "segment"
    path.write_bytes(b"x" * SIZE)
    with path.open("rb") as file:
        part = FilePart(file.fileno(), 0, SIZE)
    before = memory.resident()
    part.populate()
    assert memory.resident() - before < SIZE // 2
    part.detach()
    assert memory.resident() - before > SIZE // 2
    memory.close()
