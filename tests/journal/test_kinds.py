"""Links, sockets and the like in the place of a journal's file: named, and never opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from malamute_py.journal import FileStorage
from malamute_py.journal.directory import Journal
from malamute_py.journal.errors import NotAFile
from malamute_py.journal.layout import CLOSED_FILE, PREPARING_FILE, index_name, segment_name
from malamute_py.journal.storage import kind_of
from tests.journal.rings import S, everything, file_place, put, read_all


def link(path: Path) -> None:
    """Make a link to a file outside the journal, as large as the one that it stands for."""
    other = path.parent.parent / f"other-{path.name}"
    other.write_bytes(bytes(S))
    path.symlink_to(other)


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path has 108 bytes at most
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "a symbolic link": link,
    "a FIFO": os.mkfifo,
    "a socket": listen,
    "a directory": Path.mkdir,
}
kinds = pytest.mark.parametrize("kind", list(KINDS))


@kinds
def test_a_storage_opens_files_only(tmp_path: Path, kind: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    KINDS[kind](inside / "it")
    for storage in (FileStorage(inside), FileStorage(inside, read_only=True)):
        with pytest.raises(NotAFile, match=kind):
            storage.open("it")
        with pytest.raises(NotAFile, match=kind):
            storage.lock("it")
    assert FileStorage(inside).strangers() == ({} if kind == "a directory" else {"it": kind})


@kinds
def test_making_a_file_takes_the_name_and_goes_through_nothing(tmp_path: Path, kind: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    KINDS[kind](inside / "it")
    storage = FileStorage(inside)
    if kind == "a directory":
        with pytest.raises(NotAFile):
            storage.create("it", 8)
        return
    storage.write(storage.create("it", 8), 0, [b"8 bytes."])
    assert kind_of(inside / "it") == ""
    assert (inside / "it").read_bytes() == b"8 bytes."
    for other in tmp_path.glob("other-*"):
        assert other.read_bytes() == bytes(S), "what the link led to was written"


@kinds
def test_a_segment_that_is_no_file_is_named_and_never_written(tmp_path: Path, kind: str) -> None:
    """The broker wrote through a segment that was a link, and waited for a FIFO's other end."""
    place = file_place(tmp_path / "ring")
    ring, _ = place.open()
    while ring.end_lsn < 3 * S:
        put(ring, 1, bytes(3000))
    ring.sync()
    kept = dict(everything(ring, 1))
    path = tmp_path / "ring" / segment_name(1)
    path.unlink()
    KINDS[kind](path)
    ring, recovery = place.open()
    assert [(unknown.file, kind in unknown.reason) for unknown in recovery.unknown] == [
        (segment_name(1), True)
    ]
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(S, 2 * S)]
    (gap,) = read_all(ring, 1).gaps
    lost = range(gap.from_offset, gap.to_offset)
    assert dict(everything(ring, 1)) == {at: kept[at] for at in kept if at not in lost}
    put(ring, 1, b"goes on")
    ring.close()
    assert kind_of(path) == kind
    for other in tmp_path.glob("other-*"):
        assert other.read_bytes() == bytes(S), "what the link led to was written"


@pytest.mark.moderate
@kinds
@pytest.mark.parametrize("name", [CLOSED_FILE, PREPARING_FILE, index_name(0)])
def test_no_kind_of_a_lesser_file_keeps_a_ring_from_serving(
    tmp_path: Path, kind: str, name: str
) -> None:
    place = file_place(tmp_path / "ring")
    ring, _ = place.open()
    while ring.end_lsn < 2 * S:
        put(ring, 1, bytes(3000))
    ring.sync()
    while ring.prepare_step():
        pass
    kept = everything(ring, 1)
    path = tmp_path / "ring" / name
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    if kind == "a directory" and name == CLOSED_FILE:
        with pytest.raises(NotAFile, match="move it away"):
            place.open()
        path.rmdir()
    ring, _ = place.open()
    assert everything(ring, 1) == kept
    for other in tmp_path.glob("other-*"):
        assert other.read_bytes() == bytes(S), "what the link led to was written"


def test_a_ring_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "data")
    journal.ring("main")
    journal.close()
    rings = tmp_path / "data" / "rings"
    (rings / "main").rename(tmp_path / "elsewhere")
    (rings / "main").symlink_to(tmp_path / "elsewhere")
    journal = Journal.open(tmp_path / "data")
    assert [unknown.file for unknown in journal.unknown] == ["rings/main"]
    with pytest.raises(NotAFile, match="a symbolic link stands where a directory should be"):
        journal.ring("main")
    journal.close()


def test_what_is_new_is_its_owners_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        journal = Journal.open(tmp_path / "new" / "data")
        ring, _ = journal.ring("main")
        put(ring, 1, b"a")
        journal.close()
    finally:
        os.umask(umask)
    for path in (tmp_path / "new").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_directory_that_others_may_change_says_so(tmp_path: Path) -> None:
    assert FileStorage(tmp_path).exposure() == ""
    tmp_path.chmod(0o777)
    assert "every user of this machine may change it (mode 777)" in FileStorage(tmp_path).exposure()
    tmp_path.chmod(0o2770)
    group = tmp_path.stat().st_gid
    told = f"every user of group {group} may change it (mode 2770)"
    assert FileStorage(tmp_path).exposure() == told
    tmp_path.chmod(0o755)
    assert FileStorage(tmp_path).exposure() == ""
