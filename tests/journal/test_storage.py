"""The storages: what they promise, and what they refuse."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from malamute_py.journal import (
    DiskFull,
    FileStorage,
    JournalLocked,
    MemoryStorage,
    Storage,
    StorageRefused,
)
from malamute_py.journal.storage import file_system_of, read_file, replace_file

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:40 / /mnt/share rw - nfs4 server:/x rw
41 22 0:41 / /mnt/my\\040disk rw - xfs /dev/sdb rw
42 40 0:42 / /mnt/share/local rw - ext4 /dev/sdc rw
43 22 0:43 / /mnt/büro rw - nfs4 server:/y rw
"""


@pytest.fixture(params=["file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return FileStorage(tmp_path) if request.param == "file" else MemoryStorage()


def test_a_new_file_has_its_size_and_reads_as_zeros(storage: Storage) -> None:
    file = storage.create("a", 10_000)
    assert file.size == 10_000
    assert storage.read(file, 0, 20_000) == bytes(10_000)
    assert storage.names() == ["a"]


def test_buffers_are_written_back_to_back(storage: Storage) -> None:
    file = storage.create("a", 10_000)
    buffers = [b"%d," % n for n in range(2000)]  # beyond the most that one system call takes
    storage.write(file, 100, buffers)
    whole = b"".join(buffers)
    assert storage.read(storage.open("a"), 100, len(whole)) == whole
    storage.sync(file)


def test_an_open_file_stays_the_same_file_whatever_becomes_of_its_name(storage: Storage) -> None:
    file = storage.create("a", 8)
    storage.write(file, 0, [b"original"])
    storage.rename("a", "b")
    storage.create("a", 8)
    assert storage.read(file, 0, 8) == b"original"
    storage.remove("b")
    storage.remove("never was")
    assert storage.read(file, 0, 8) == b"original"
    with pytest.raises(FileNotFoundError):
        storage.open("b")


def test_a_small_file_is_replaced_whole(storage: Storage) -> None:
    assert read_file(storage, "x") is None
    replace_file(storage, "x", b"one")
    replace_file(storage, "x", b"two, longer")
    assert read_file(storage, "x") == b"two, longer"
    assert storage.names() == ["x"]


def test_directories_nest_and_do_not_count_as_files(storage: Storage) -> None:
    child = storage.child("inner")
    replace_file(child, "x", b"1")
    assert storage.children() == ["inner"]
    assert storage.names() == []
    assert read_file(storage.child("inner"), "x") == b"1"


def test_a_directory_goes_once_it_is_empty(storage: Storage) -> None:
    storage.remove_child("never was")
    child = storage.child("inner")
    replace_file(child, "x", b"1")
    storage.remove_child("inner")
    assert storage.children() == ["inner"]
    child.remove("x")
    storage.remove_child("inner")
    assert storage.children() == []


def test_a_lock_is_held_once_and_names_its_holder(tmp_path: Path) -> None:
    lock = FileStorage(tmp_path).lock("lock")
    with pytest.raises(JournalLocked, match=rf"in use by process {os.getpid()}: stop that broker"):
        FileStorage(tmp_path).lock("lock")
    lock.release()
    FileStorage(tmp_path).lock("lock").release()


def test_a_lock_whose_file_was_removed_is_held_all_the_same(tmp_path: Path) -> None:
    lock = FileStorage(tmp_path).lock("lock")
    (tmp_path / "lock").unlink()
    with pytest.raises(JournalLocked, match="in use by a process whose lock file was removed"):
        FileStorage(tmp_path).lock("lock")
    lock.release()
    FileStorage(tmp_path).lock("lock").release()


@pytest.mark.parametrize(
    ("number", "held"),
    [
        (errno.EWOULDBLOCK, True),
        (errno.EACCES, True),
        (errno.ENOLCK, False),
        (errno.EOPNOTSUPP, False),
        (errno.ENOSYS, False),
        (errno.EIO, False),
    ],
)
def test_a_file_that_cannot_be_locked_is_no_lock_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, held: bool
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    storage = FileStorage(tmp_path)
    (tmp_path / "lock").write_text("17\n")
    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        if held:
            with pytest.raises(JournalLocked, match="in use by process 17: stop that broker"):
                storage.lock("lock")
        else:
            why = rf"{tmp_path}/lock cannot be locked \({os.strerror(number)}\).*a local disk"
            with pytest.raises(StorageRefused, match=why):
                storage.lock("lock")
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "lock").read_text() == "17\n"


def test_a_lock_in_memory_is_held_once(storage: Storage) -> None:
    lock = storage.lock("lock")
    with pytest.raises(JournalLocked):
        storage.lock("lock")
    lock.release()
    storage.lock("lock")


def test_a_file_that_the_disk_cannot_hold_is_refused_and_not_left_behind(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    with pytest.raises(DiskFull, match=r"are free.*lower ring_bytes"):
        storage.create("huge", storage.free_bytes() + (1 << 40))
    assert storage.names() == []


def test_what_cannot_fit_does_not_fill_the_disk_even_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FileStorage(tmp_path)
    allocated: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, size: allocated.append(size))
    with pytest.raises(DiskFull, match=r"lower ring_bytes.*journal\.segment_bytes"):
        storage.create("huge", storage.free_bytes() + (1 << 40))
    assert allocated == []
    storage.create("small", 4096)
    assert allocated == [4096]


def test_what_a_quota_refuses_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, at: int, size: int) -> None:
        os.ftruncate(fd, size)
        raise OSError(errno.EDQUOT, "quota")

    storage = FileStorage(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DiskFull):
        storage.create("small", 4096)
    assert storage.names() == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib", "ext4"),
        ("/mnt/share/data", "nfs4"),
        ("/mnt/share/local/data", "ext4"),
        ("/mnt/sharedata", "ext4"),
        ("/mnt/my disk/data", "xfs"),
        ("/mnt/büro/data", "nfs4"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


def test_a_network_file_system_is_refused_with_the_reason(tmp_path: Path) -> None:
    mounts = f"40 22 0:40 / {tmp_path} rw - nfs4 server:/x rw\n"
    with pytest.raises(StorageRefused, match=r"network file system \(nfs4\).*local disk"):
        FileStorage(tmp_path / "data", mountinfo=mounts)
    assert not (tmp_path / "data").exists()


def test_a_storage_for_reading_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileStorage(tmp_path / "missing", read_only=True)
    replace_file(FileStorage(tmp_path), "x", b"1")
    storage = FileStorage(tmp_path, read_only=True)
    assert read_file(storage, "x") == b"1"
    for change in (
        lambda: storage.create("y", 1),
        lambda: storage.remove("x"),
        lambda: storage.rename("x", "y"),
        lambda: storage.write(storage.open("x"), 0, [b"2"]),
    ):
        with pytest.raises(OSError, match=r"reading only|Bad file descriptor"):
            change()
    assert read_file(storage, "x") == b"1"
