"""A snapshot's manifest comes from anywhere: nothing outside the new directory is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from malamute_py.journal import RingSettings
from malamute_py.journal.directory import Journal
from malamute_py.store.snapshot import CONTENT, MANIFEST, SnapshotFailed, restore, take, verify
from tests.cli.running import run_cli
from tests.journal.rings import put

S = 65_536


@pytest.fixture
def snap(tmp_path: Path) -> Path:
    journal = Journal.open(tmp_path / "data")
    ring, _ = journal.ring("main", RingSettings(segment_bytes=S, ring_bytes=4 * S))
    put(ring, 1, b"a record")
    journal.close()
    take(tmp_path / "data", tmp_path / "snap")
    return tmp_path / "snap"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file outside, at which every hostile manifest aims."""
    path = tmp_path / "precious"
    path.write_bytes(b"of somebody else")
    return path


def change(snap: Path, edit: Any) -> None:
    manifest = json.loads((snap / MANIFEST).read_bytes())
    edit(manifest)
    (snap / MANIFEST).write_text(json.dumps(manifest))


def tree(where: Path) -> dict[str, bytes]:
    """Return everything below a directory, except what a restore may make."""
    return {
        str(path): path.read_bytes()
        for path in where.rglob("*")
        if path.is_file() and not path.is_relative_to(where / "new")
    }


def refused(snap: Path, what: str) -> None:
    new = snap.parent / "new"
    before = tree(snap.parent)
    _, wrong = verify(snap)
    assert any(what in each for each in wrong), wrong
    with pytest.raises(SnapshotFailed):
        restore(snap, new)
    assert not new.exists()
    assert tree(snap.parent) == before


@pytest.mark.moderate
@pytest.mark.parametrize(
    "name",
    [
        "{precious}", "../precious", "../../precious", "rings/../../../precious", "./journal",
        "rings//main/ring", "rings/main/../../../../precious", "rings/../main/ring", "", "/", "..",
        "rings/main/notes.txt", "rings/%2E%2E/ring/x", "failed/..", "failed/../journal", "lock",
        "rings/main/ring/x", "queues.db-wal", "rings/main", "rings/.hidden/ring", "a\x00b",
    ],
)  # fmt: skip
def test_a_name_that_is_no_file_of_a_data_directory_is_refused(
    snap: Path, precious: Path, name: str
) -> None:
    hostile = name.format(precious=precious)
    change(snap, lambda manifest: manifest["files"].update({hostile: [0, 0]}))
    refused(snap, "no file of a data directory")


@pytest.mark.moderate
def test_a_size_of_nothing_does_not_empty_a_file_outside(snap: Path, precious: Path) -> None:
    """An entry of 0 bytes made restore open, and so empty, the file that it named."""
    change(snap, lambda manifest: manifest["files"].update({str(precious): [16, 0x12345678]}))
    refused(snap, "no file of a data directory")
    assert run_cli("snapshot", "verify", str(snap)).code == 1
    assert run_cli("snapshot", "restore", str(snap), "--data", str(snap.parent / "new")).code == 1
    assert precious.read_bytes() == b"of somebody else"


@pytest.mark.moderate
@pytest.mark.parametrize("which", ["file", "ring", "rings", "content"])
def test_a_link_is_not_followed(snap: Path, precious: Path, which: str) -> None:
    content = snap / CONTENT
    place = {
        "file": content / "rings" / "main" / "ring",
        "ring": content / "rings" / "main",
        "rings": content / "rings",
        "content": content,
    }[which]
    elsewhere = snap.parent / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    refused(snap, "a symbolic link")


def test_a_fifo_is_named_and_not_waited_for(snap: Path) -> None:
    import os

    path = snap / CONTENT / "rings" / "main" / "ring"
    path.unlink()
    os.mkfifo(path)
    _, wrong = verify(snap)
    assert wrong == ["rings/main/ring: is a FIFO and no file"]


@pytest.mark.moderate
def test_a_manifest_that_is_a_link_is_not_read(snap: Path, precious: Path) -> None:
    (snap / MANIFEST).rename(snap.parent / "elsewhere.json")
    (snap / MANIFEST).symlink_to(snap.parent / "elsewhere.json")
    result = run_cli("snapshot", "restore", str(snap), "--data", str(snap.parent / "new"))
    assert result.code == 1
    assert "a symbolic link" in result.err


def test_an_honest_snapshot_is_restored_for_its_owner_alone(snap: Path) -> None:
    assert verify(snap)[1] == []
    new = snap.parent / "new"
    restore(snap, new)
    for path in (new, *new.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
