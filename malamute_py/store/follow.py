"""The process that keeps the checkpoint of the broker that started it.

Usage: `python -m malamute_py.store.follow DIRECTORY PARENT [--accept-lost]`. DIRECTORY: the data
directory. PARENT: the broker's process id. --accept-lost: go on where changes are gone from the
log, as the setting `checkpoint.lost_changes = "accept"` asks; otherwise such an advance fails.

Owns the way from requests on standard input to advances of the checkpoint and answers on standard
output. The rules: the process never asks the broker for anything and holds nothing that the broker
needs; it ends with the broker, however that ends (the end of its input, or another parent), also in
the middle of an advance; it leaves the processor to the broker. It is a process of its own because
SQLite in a thread beside the loop would compete with it for the interpreter's lock. Source:
docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import msgspec

from malamute_protocol.errors import MalamuteError
from malamute_py.journal import FileStorage, Follower
from malamute_py.journal.directory import RINGS, directory_name
from malamute_py.journal.storage import open_regular
from malamute_py.store.checkpoint import Abandoned, Checkpoint, Done
from malamute_py.store.database import DATABASE, damaged, lock, open_database
from malamute_py.store.errors import StoreMoved
from malamute_py.store.writeback import Writeback

MAIN: Final = "main"
"""Name of the ring that is followed, as broker/ready.py has it."""
_NICE: Final = 10
_PARENT_MS: Final = 5_000
"""How often the process looks whether its parent lives, in case another process has its input's
other end."""
_LOCK_WAIT_S: Final = 30.0
_SIZE: Final = struct.Struct("<I")


class Follow(msgspec.Struct, array_like=True, tag="follow"):
    """Request: follow the log up to a position."""

    to_lsn: int
    ranges: list[tuple[int, int]]
    """Parts of the log where something for the queues may lie."""


class Began(msgspec.Struct, array_like=True, tag="began"):
    """Answer: the tables are open, and the process follows."""

    lsn: int
    pid: int


class Advanced(msgspec.Struct, array_like=True, tag="advanced"):
    """Answer: the tables have come to a position, durably."""

    done: Done
    took_ms: int


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """Answer: an advance was not made; nothing was changed."""

    code: str
    reason: str


Answer: TypeAlias = Began | Advanced | Failed
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Began | Advanced | Failed)
_REQUEST = msgspec.msgpack.Decoder(Follow)


def write_frame(stream: BinaryIO, message: msgspec.Struct) -> None:
    """Write one message, a request or an answer: its size, then MessagePack. Raises OSError."""
    data = msgspec.msgpack.encode(message)
    stream.write(_SIZE.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read one message; None: the stream ended before it, or amid it. Raises OSError."""
    head = stream.read(_SIZE.size)
    if len(head) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(head)
    data = stream.read(size)
    return data if len(data) == size else None


def read_answer(stream: BinaryIO) -> Answer | None:
    """Read the process's next answer; None when it ended. Raises OSError, msgspec.MsgspecError."""
    data = read_frame(stream)
    return None if data is None else _ANSWER.decode(data)


@contextlib.contextmanager
def following(
    directory: Path,
    *,
    accept_lost: bool,
    wait_s: float,
    make_room: Callable[[int], None] | None = None,
) -> Iterator[Checkpoint]:
    """Open the checkpoint of a data directory, with the right to write it, while the block runs.

    For this process, and for a broker that follows to its end itself. accept_lost: go on where
    changes are gone from the log. make_room: see Checkpoint. Raises StoreError: another process
    writes it, or it does not belong to the log; JournalError, OSError: there is no log to follow.
    """
    with lock(directory, wait_s):
        rings = FileStorage(directory, read_only=True).child(RINGS)
        follower = Follower(rings.child(directory_name(MAIN)))
        connection = open_database(directory / DATABASE)
        try:
            checkpoint = Checkpoint(
                connection, follower.read, accept_lost=accept_lost, make_room=make_room
            )
            if checkpoint.position.ring != follower.ring:
                raise StoreMoved(f"{DATABASE} belongs to another journal")
            yield checkpoint
        except sqlite3.Error as error:
            raise damaged(error) from error
        finally:
            connection.close()


def failed(error: Exception) -> Failed:
    """Return the answer that tells the broker of an error."""
    return Failed(str(getattr(error, "code", "failed")), str(error))


class _Input:
    """The broker's requests on standard input, read so that its end is seen at any time."""

    def __init__(self, parent_pid: int) -> None:
        """parent_pid: the broker's process id."""
        self._fd = sys.stdin.fileno()
        self._parent_pid = parent_pid
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._data = bytearray()
        self._ended = False

    def going_on(self) -> bool:
        """Whether the broker is still there; asked amid an advance, too."""
        self._read_some(wait_ms=0)
        return not self._ended

    def quiet(self) -> bool:
        """Whether the broker is there and has asked for nothing more."""
        return self.going_on() and not self._data

    def next(self) -> Follow | None:
        """Wait for a request and return the newest one; None when there will be no more."""
        while True:
            found = None
            while (message := self._message()) is not None:
                found = message  # a newer request goes further, and stands for those before it
            if found is not None:
                return _REQUEST.decode(found)
            if self._ended:
                return None
            self._read_some(wait_ms=_PARENT_MS)

    def _message(self) -> bytes | None:
        """Take the first whole message out of what was read; None: there is none yet."""
        if len(self._data) < _SIZE.size:
            return None
        end = _SIZE.size + _SIZE.unpack_from(self._data)[0]
        if len(self._data) < end:
            return None
        message = bytes(self._data[_SIZE.size : end])
        del self._data[:end]
        return message

    def _read_some(self, wait_ms: int) -> None:
        """Read what comes within a time; the end of the input, or another parent, ends it.

        A process whose parent ended gets another parent.
        """
        if self._ended:
            return
        if self._poll.poll(wait_ms):
            data = os.read(self._fd, 1 << 20)
            self._data += data
            self._ended = not data
        elif os.getppid() != self._parent_pid:
            self._ended = True


def _room(path: Path) -> Callable[[int], None]:
    """Return the function that allocates a file's space before it is written.

    A full disk is met then before the commit, and not when SQLite moves what it committed from the
    WAL. The descriptor is never closed while this process lives: that would drop SQLite's locks.
    """
    fd = open_regular(path, os.O_RDWR)

    def make(size: int) -> None:
        """Let the database file grow to a size, with its space allocated; it never shrinks."""
        have = os.fstat(fd).st_size
        if size > have:
            os.posix_fallocate(fd, have, size - have)

    return make


def _run(directory: Path, parent_pid: int, *, accept_lost: bool) -> None:
    """Follow the log as the broker asks, until the broker is gone; tidy the file in between.

    A failed advance is answered, and the next request tries again. Raises StoreError, JournalError,
    OSError: the tables cannot be opened; BrokenPipeError: the broker is gone.
    """
    requests = _Input(parent_pid)
    answers: Any = sys.stdout.buffer
    # Allocates the file's space before each commit: a disk that is full is met there, and not when
    # SQLite moves what was committed into the file.
    room = _room(directory / DATABASE)
    with following(
        directory, accept_lost=accept_lost, wait_s=_LOCK_WAIT_S, make_room=room
    ) as checkpoint:
        writeback = Writeback(directory)
        write_frame(answers, Began(checkpoint.position.lsn, os.getpid()))
        while (request := requests.next()) is not None:
            began = time.monotonic()
            try:
                going_on = requests.going_on
                with writeback.advancing():
                    done = checkpoint.advance(request.to_lsn, request.ranges, going_on=going_on)
            except Abandoned:
                return  # the broker went amid the advance
            except (MalamuteError, OSError) as error:
                write_frame(answers, failed(error))
                continue
            took_ms = round((time.monotonic() - began) * 1000)
            write_frame(answers, Advanced(done, took_ms))
            while requests.quiet() and checkpoint.tidy():
                pass


def main(arguments: list[str]) -> int:
    """Serve until the broker is gone; returns the exit code. arguments: see the module's usage."""
    directory, parent_pid, *options = arguments
    # Such signals reach both processes. The broker answers them, and ends this process in order, by
    # the end of its input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    try:
        _run(Path(directory), int(parent_pid), accept_lost="--accept-lost" in options)
    except BrokenPipeError:
        pass  # the broker is gone
    except (MalamuteError, OSError) as error:
        with contextlib.suppress(OSError):
            write_frame(sys.stdout.buffer, failed(error))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
