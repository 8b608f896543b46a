"""Storage: the few operations on files that the journal needs, and nothing else.

Owns the `Storage` protocol, its file and memory forms. The rule: a call returns after
the operating system took the request and raises otherwise; only `sync` makes bytes
durable, only `sync_directory` makes names durable. Source: FORMAT.md, section 2;
docs/design.md, Journal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from malamute_py.journal.errors import DiskFull, JournalLocked, NotAFile, StorageRefused, is_damage
from malamute_py.journal.mapping import FilePart, Part
from malamute_py.journal.types import Buffer

_IOV_MAX = 1024
"""Buffers that one write of the operating system takes at most."""
_LAZY_BYTES = 1 << 20
"""Size from which on a file in memory is a mapping, which the kernel fills with zeros as needed."""
_PAGE_BYTES = 4096
"""Size of the parts in which a failed read is repeated."""
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
"""New files and directories are their owner's alone: they hold what clients sent."""
_NETWORK_FILE_SYSTEMS = frozenset(
    [
        *("9p", "afs", "autofs", "beegfs", "ceph", "cifs", "coda", "fuse.davfs2", "fuse.gcsfuse"),
        *("fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "gfs", "gfs2", "glusterfs"),
        *("lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs", "virtiofs", "vboxsf"),
    ]
)
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""Errors of flock which say that another one has the lock."""
_OCTAL = re.compile(r"\\([0-7]{3})")
"""How mountinfo writes a space, tab, newline or backslash of a path."""


class File(Protocol):
    """An open file. It is closed when nothing refers to it any more, never before.

    That is what makes it safe to drop a segment while a reader is inside a read: a
    descriptor closed under a reader could be another file's by the time it is used.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102


class Lock(Protocol):
    """A lock that is held until released."""

    def release(self) -> None: ...  # noqa: D102


class Storage(Protocol):
    """A flat directory of files; names hold no separators."""

    @property
    def persistent(self) -> bool:
        """False when the content dies with the process: nothing needs zeroing or rewriting."""

    def child(self, name: str) -> Storage:
        """The directory `name` inside this one, made durably when it does not exist."""

    def children(self) -> list[str]:
        """Names of the directories inside this one."""

    def remove_child(self, name: str) -> None:
        """Remove a directory inside this one, if it is there and empty. Raises OSError."""

    def names(self) -> list[str]:
        """Names of everything in this directory that is no directory, sorted."""

    def strangers(self) -> dict[str, str]:
        """Entries that are neither files nor directories: name -> what each is.

        A link, a FIFO, a device or a socket is never opened: open() raises NotAFile.
        """

    def create(self, name: str, size: int) -> File:
        """Make a file of this size that reads as zeros, its space allocated.

        An existing file of the name is replaced. Raises DiskFull: no file is left.
        """

    def open(self, name: str) -> File:
        """Open for reading and writing. Raises FileNotFoundError, NotAFile, OSError."""

    def read(self, file: File, position: int, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end of the file. Raises OSError."""

    def map(self, file: File, position: int, size: int) -> Part | None:
        """Map a part of a file, from a whole page on; no page of it is touched.

        None: files of this storage are not mapped, or this one is shorter. Raises OSError.
        """

    def write(self, file: File, position: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers back to back. Raises DiskFull, OSError: a part may be written."""

    def sync(self, file: File) -> None:
        """Make the file's bytes durable. Raises OSError: the bytes may be lost for good."""

    def sync_directory(self) -> None:
        """Make creations, renames and removals durable."""

    def rename(self, old: str, new: str) -> None:
        """Rename over whatever has the new name; open files stay open."""

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens when there is none."""

    def lock(self, name: str) -> Lock:
        """Take the lock file. Raises JournalLocked naming the holder."""

    def free_bytes(self) -> int:
        """Space left for new files."""

    def describe(self) -> str:
        """Where this is, for messages to people."""


def replace_file(storage: Storage, name: str, data: bytes) -> None:
    """Durably replace a small file: after a crash it has the old or the new content, whole."""
    temporary = name + ".tmp"
    file = storage.create(temporary, len(data))
    storage.write(file, 0, [data])
    storage.sync(file)
    storage.rename(temporary, name)
    storage.sync_directory()


def read_around(storage: Storage, file: File, position: int, size: int) -> bytes:
    """Return a part of a file, with zeros for pages that cannot be read.

    For ordinary reads, for recovery, and for the checkpoint's reading of the log. One unreadable
    page must not take its neighbours' batches with it; zeros fail the check of the batch that lay
    there.
    """
    with contextlib.suppress(OSError):
        return storage.read(file, position, size)
    data = bytearray(size)
    at = position
    while at < position + size:
        stop = min((at // _PAGE_BYTES + 1) * _PAGE_BYTES, position + size)  # end of this page
        with contextlib.suppress(OSError):
            piece = storage.read(file, at, stop - at)
            data[at - position : at - position + len(piece)] = piece
        at = stop
    return bytes(data)


def read_file(storage: Storage, name: str) -> bytes | None:
    """A small file's content; None when there is none. Raises OSError."""
    try:
        file = storage.open(name)
    except FileNotFoundError:
        return None
    return storage.read(file, 0, file.size)


def read_sound(storage: Storage, name: str) -> bytes | None:
    """A small file's content; None when there is none, also for a bad sector or what is no file.

    For files that are proofs or shortcuts, without which a ring is as good. Raises OSError.
    """
    try:
        return read_file(storage, name)
    except OSError as error:
        if not is_damage(error):
            raise
        return None


# --- files -------------------------------------------------------------------------


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def kind_of(path: str | Path) -> str:
    """Return the kind of a path that is no regular file; "" for a file, or for nothing.

    A link in the last part of the path is not followed.
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def open_regular(path: str | Path, flags: int) -> int:
    """Open a regular file, and nothing else; returns the descriptor.

    A link is not followed, and a FIFO or a device does not hold up the caller.
    Raises NotAFile: something else has the name; OSError.
    """
    # Without O_NONBLOCK the open of a FIFO waits for a writer; on a file it means nothing.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, FILE_MODE)
    except OSError as error:
        # What Linux answers for a link, a directory, a socket or FIFO, and a device without driver.
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV):
            raise NotAFile(str(path), kind_of(path) or "no file") from error
        raise
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind):
        os.close(fd)
        raise NotAFile(str(path), _KINDS.get(stat.S_IFMT(kind), "no file"))
    return fd


class _OsFile:
    """A File of the operating system: its descriptor is closed when nothing refers to it."""

    __slots__ = ("fd", "name")

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def __del__(self) -> None:
        os.close(self.fd)


class _OsLock:
    """A Lock by flock(), held as long as its descriptors are open."""

    def __init__(self, *descriptors: int) -> None:
        """descriptors: of what is locked; a negative one stands for none."""
        self._descriptors = [fd for fd in descriptors if fd >= 0]

    def release(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class FileStorage:
    """A directory of the local file system."""

    persistent = True

    def __init__(
        self, directory: str | Path, *, read_only: bool = False, mountinfo: str | None = None
    ) -> None:
        """Make the directory if need be.

        read_only: for tools; nothing is made or changed, and writing calls fail.
        mountinfo: text in the form of /proc/self/mountinfo; None reads that file.
        Raises StorageRefused on a network file system: they acknowledge syncs they have
        not done, and two machines could open one journal.
        """
        self._directory = Path(directory).absolute()
        kind = file_system_of(self._directory, mountinfo)
        if kind in _NETWORK_FILE_SYSTEMS:
            raise StorageRefused(
                f"{self._directory} lies on a network file system ({kind}), where a confirmed"
                " record could be lost: choose a directory on a local disk"
            )
        self._read_only = read_only
        self._flags = os.O_RDONLY if read_only else os.O_RDWR
        if not self._directory.is_dir():
            if read_only:
                raise FileNotFoundError(errno.ENOENT, "no such directory", str(self._directory))
            self._directory.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
            _sync_path(self._directory.parent)

    def child(self, name: str) -> FileStorage:
        """The directory `name` inside this one, made durably when it does not exist."""
        path = self._directory / name
        if path.is_symlink():
            raise NotAFile(str(path), "a symbolic link", "a directory")
        if not path.is_dir() and not self._read_only:
            path.mkdir(DIRECTORY_MODE)
            _sync_path(self._directory)
        return FileStorage(path, read_only=self._read_only)

    def children(self) -> list[str]:
        """Names of the directories inside this one."""
        with os.scandir(self._directory) as entries:
            return sorted(each.name for each in entries if each.is_dir(follow_symlinks=False))

    def remove_child(self, name: str) -> None:
        """Remove a directory inside this one, if it is there and empty."""
        self._may_write(name)
        try:
            (self._directory / name).rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _may_write(self, name: str) -> None:
        """Raise PermissionError where the directory was opened for reading only."""
        if self._read_only:
            raise PermissionError(errno.EROFS, "opened for reading only", name)

    def names(self) -> list[str]:
        """Names of everything in this directory that is no directory, sorted."""
        with os.scandir(self._directory) as entries:
            return sorted(each.name for each in entries if not each.is_dir(follow_symlinks=False))

    def strangers(self) -> dict[str, str]:
        """Entries that are neither files nor directories: name -> what each is."""
        with os.scandir(self._directory) as entries:
            names = sorted(
                each.name
                for each in entries
                if not each.is_file(follow_symlinks=False)
                and not each.is_dir(follow_symlinks=False)
            )
        return {name: kind_of(self._directory / name) for name in names}

    def create(self, name: str, size: int) -> File:
        """Make a file of this size that reads as zeros, its space allocated.

        Raises DiskFull: no file is left.
        """
        self._may_write(name)
        path = self._directory / name
        try:
            # Never through what has the name now, which may be a link to another file.
            path.unlink(missing_ok=True)
        except IsADirectoryError as error:
            raise NotAFile(str(path), "a directory") from error
        fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        file = _OsFile(name, fd)
        if size:
            try:
                # Asked before: an allocation that must fail would fill the disk while it lasts,
                # and, tried again and again, take from others the little that is left.
                if not self._may_hold(size):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
                # posix_fallocate refuses a full disk here; a sparse file would refuse later,
                # amid an append, or kill the process when it is mapped.
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                with contextlib.suppress(OSError):
                    path.unlink()
                raise self._explained(error, name, size) from error
        return file

    def open(self, name: str) -> File:
        """Open for reading and writing. Raises FileNotFoundError, NotAFile, OSError."""
        return _OsFile(name, open_regular(self._directory / name, self._flags))

    def read(self, file: File, position: int, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end of the file. Raises OSError."""
        assert isinstance(file, _OsFile)
        data = os.pread(file.fd, size, position)
        if len(data) == size:
            return data
        # The system may give less than was asked for, as beyond 2 GiB; nothing at the file's end.
        parts = [data]
        while data and size > len(data):
            size -= len(data)
            position += len(data)
            data = os.pread(file.fd, size, position)
            parts.append(data)
        return b"".join(parts)

    def map(self, file: File, position: int, size: int) -> Part | None:
        """Map a part of a file, from a whole page on; no page of it is touched."""
        assert isinstance(file, _OsFile)
        # Beyond the end of a file a mapping is a signal.
        if position + size > file.size:
            return None
        return FilePart(file.fd, position, size)

    def write(self, file: File, position: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers back to back. Raises DiskFull, OSError: a part may be written."""
        assert isinstance(file, _OsFile)
        try:
            for first in range(0, len(buffers), _IOV_MAX):
                part = buffers[first : first + _IOV_MAX] if len(buffers) > _IOV_MAX else buffers
                total = sum(map(len, part))
                written = os.pwritev(file.fd, part, position)
                position += written
                if written != total:  # as on a disk that is nearly full
                    position = self._write_rest(file.fd, position, part, written)
        except OSError as error:
            raise self._explained(error, file.name, 0) from error

    @staticmethod
    def _write_rest(fd: int, position: int, buffers: Sequence[Buffer], done: int) -> int:
        """Write what a vectored write left, from byte `done` of the buffers on; returns the end."""
        rest = memoryview(b"".join(map(bytes, buffers)))[done:]
        while rest:
            written = os.pwrite(fd, rest, position)
            if written == 0:
                raise OSError(errno.EIO, "the operating system wrote nothing")
            position += written
            rest = rest[written:]
        return position

    def _explained(self, error: OSError, name: str, size: int) -> Exception:
        """Return a DiskFull that says what to do for an error of a full disk; else the error."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = f"needs {size} bytes, {self.free_bytes()} are free" if size else "is full"
            return DiskFull(
                f"the disk of {self._directory} {need} ({name}): free space there, or lower"
                " ring_bytes; a new ring takes three times journal.segment_bytes at least,"
                " so lower that, too"
            )
        return error

    def sync(self, file: File) -> None:
        """Make the file's bytes durable. Raises OSError: the bytes may be lost for good."""
        assert isinstance(file, _OsFile)
        os.fdatasync(file.fd)

    def sync_directory(self) -> None:
        """Make creations, renames and removals durable."""
        _sync_path(self._directory)

    def rename(self, old: str, new: str) -> None:
        """Rename over whatever has the new name; open files stay open."""
        self._may_write(old)
        try:
            (self._directory / old).replace(self._directory / new)
        except IsADirectoryError as error:
            raise NotAFile(str(self._directory / new), "a directory") from error

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens when there is none."""
        self._may_write(name)
        # A directory of this name is no file of ours: there is none, then.
        with contextlib.suppress(IsADirectoryError):
            (self._directory / name).unlink(missing_ok=True)

    def lock(self, name: str) -> Lock:
        """Take the lock file, and write this process's id into it.

        Raises JournalLocked: another one has it; StorageRefused: it cannot be locked here, so that
        nothing would keep a second broker out; OSError.
        """
        create = 0 if self._read_only else os.O_CREAT
        fd = open_regular(self._directory / name, self._flags | create)
        try:
            # flock, not lockf: it belongs to the open file, so it also keeps out a second
            # opener in the same process, and closing some other descriptor cannot drop it.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            try:
                if error.errno not in _HELD:
                    raise StorageRefused(
                        f"the file {self._directory / name} cannot be locked"
                        f" ({error.strerror}), and nothing else keeps a second broker out: choose a"
                        " directory on a local disk"
                    ) from error
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise self._locked(f"process {holder}") from error
            finally:
                os.close(fd)
        # The directory as well: the file may be removed under the broker that holds it.
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            os.close(directory)
            raise self._locked("a process whose lock file was removed") from error
        except OSError:
            # Some network file systems lock files only.
            os.close(directory)
            directory = -1
        if not self._read_only:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return _OsLock(fd, directory)

    def _locked(self, holder: str) -> JournalLocked:
        """Return the error for a directory that another one has."""
        return JournalLocked(
            str(self._directory),
            f"in use by {holder}: stop that broker, or choose another data directory",
        )

    def _may_hold(self, size: int) -> bool:
        """Whether the file system has room for a new file of so many bytes."""
        facts = os.statvfs(self._directory)
        # Some file systems of user space do not count their blocks.
        return facts.f_blocks == 0 or size <= facts.f_bavail * facts.f_frsize

    def free_bytes(self) -> int:
        """Space left for new files."""
        facts = os.statvfs(self._directory)
        return facts.f_bavail * facts.f_frsize

    def describe(self) -> str:
        """Where this is, for messages to people."""
        return str(self._directory)

    def exposure(self) -> str:
        """Return the accounts besides the owner that may change the directory; "": none.

        The start warns of them, and goes on: a volume of Kubernetes may be its group's (fsGroup).
        """
        facts = self._directory.stat()
        mode = f"(mode {facts.st_mode & 0o7777:o})"
        if facts.st_mode & stat.S_IWOTH:
            return f"every user of this machine may change it {mode}"
        if facts.st_uid != os.geteuid():
            return f"it belongs to user {facts.st_uid}, and the broker runs as {os.geteuid()}"
        if facts.st_mode & stat.S_IWGRP:
            return f"every user of group {facts.st_gid} may change it {mode}"
        return ""


def file_system_of(path: Path, mountinfo: str | None = None) -> str:
    """Return the kind of the file system that holds the path ("": it cannot be told).

    A network file system is refused by it. mountinfo: text in the form of /proc/self/mountinfo;
    None reads that file.
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(
                encoding="utf-8", errors="surrogateescape"
            )
        except OSError:
            return ""
    # The mount point with the longest name above the path counts; of equal ones the last, which
    # was mounted over the others.
    best, kind = -1, ""
    real = os.path.realpath(path)
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        # As proc(5) has it: the fifth field is the mount point, with \ooo in place of a space; the
        # kind follows the " - ".
        fields = left.split()
        if not separator or len(fields) < 5 or not right:
            continue
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), right.split()[0]
    return kind


def _sync_path(path: Path) -> None:
    """Make names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- memory ------------------------------------------------------------------------


class _MemoryFile:
    """A File of a MemoryStorage."""

    __slots__ = ("data", "name")

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        # Lazily zeroed: a bytearray of 64 MiB is filled with the interpreter lock held.
        self.data = mmap.mmap(-1, size) if size >= _LAZY_BYTES else bytearray(size)

    @property
    def size(self) -> int:
        return len(self.data)


class _MemoryLock:
    """A Lock of a MemoryStorage: its name is in a set as long as it is held."""

    def __init__(self, locks: set[str], name: str) -> None:
        self._locks, self._name = locks, name

    def release(self) -> None:
        self._locks.discard(self._name)


class MemoryStorage:
    """Storage in memory: for memory-only streams and for tests. Lost with the process."""

    persistent = False

    def __init__(self, name: str = "memory") -> None:
        """name: for messages."""
        self._name = name
        self._files: dict[str, _MemoryFile] = {}
        self._children: dict[str, MemoryStorage] = {}
        self._locks: set[str] = set()

    def child(self, name: str) -> MemoryStorage:
        """The directory `name` inside this one, made durably when it does not exist."""
        found = self._children.get(name)
        if found is None:
            found = self._children[name] = MemoryStorage(f"{self._name}/{name}")
        return found

    def children(self) -> list[str]:
        """Names of the directories inside this one."""
        return sorted(self._children)

    def remove_child(self, name: str) -> None:
        """Remove a directory inside this one, if it is there and empty."""
        found = self._children.get(name)
        if found is not None and not found._files and not found._children:
            del self._children[name]

    def names(self) -> list[str]:
        """Names of everything in this directory that is no directory, sorted."""
        return sorted(self._files.copy())

    def strangers(self) -> dict[str, str]:
        """Return nothing: in memory there are only files and directories."""
        return {}

    def create(self, name: str, size: int) -> File:
        """Make a file of this size that reads as zeros, its space allocated."""
        file = self._files[name] = _MemoryFile(name, size)
        return file

    def open(self, name: str) -> File:
        """Open for reading and writing. Raises FileNotFoundError, NotAFile, OSError."""
        file = self._files.get(name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return file

    def read(self, file: File, position: int, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end of the file. Raises OSError."""
        assert isinstance(file, _MemoryFile)
        return bytes(memoryview(file.data)[position : position + size])

    def map(self, file: File, position: int, size: int) -> Part | None:
        """Return None: what is in memory is never mapped."""
        return None

    def write(self, file: File, position: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers back to back. Raises DiskFull, OSError: a part may be written."""
        assert isinstance(file, _MemoryFile)
        data = file.data
        for buffer in buffers:
            size = len(buffer)
            assert position + size <= len(data), "the journal writes inside its files only"
            data[position : position + size] = buffer
            position += size

    def sync(self, file: File) -> None:
        """Do nothing: what is in memory is never durable."""

    def sync_directory(self) -> None:
        """Do nothing: what is in memory is never durable."""

    def rename(self, old: str, new: str) -> None:
        """Rename over whatever has the new name; open files stay open."""
        file = self._files.pop(old)
        file.name = new
        self._files[new] = file

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens when there is none."""
        self._files.pop(name, None)

    def lock(self, name: str) -> Lock:
        """Take the lock file. Raises JournalLocked naming the holder."""
        if name in self._locks:
            raise JournalLocked(self._name, "in use in this process: close the other one")
        self._locks.add(name)
        return _MemoryLock(self._locks, name)

    def free_bytes(self) -> int:
        """Space left for new files."""
        return 1 << 62

    def describe(self) -> str:
        """Where this is, for messages to people."""
        return self._name
