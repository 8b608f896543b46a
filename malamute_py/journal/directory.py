"""A data directory: its identity, its epoch, its lock, its rings.

Owns the files above the rings. The rule: the epoch rises durably before any ring is
opened, one process at a time has the directory, and what is not ours is left alone and
named. Source: FORMAT.md, section 1; DESIGN.md, section 6 (Positions).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from malamute_py.journal.appending import SnapshotSource
from malamute_py.journal.errors import JournalCorrupt, JournalError
from malamute_py.journal.layout import LOCK_FILE, RING_FILE, pack_file, unpack_file
from malamute_py.journal.ring import Ring
from malamute_py.journal.storage import (
    FileStorage,
    MemoryStorage,
    Storage,
    read_file,
    replace_file,
)
from malamute_py.journal.types import Recovery, RingSettings, Unknown

IDENTITY_FILE = "journal"
EPOCH_FILE = "epoch"
RINGS = "rings"
FAILED = "failed"
_NAME_BYTES_MAX = 200
_OURS = frozenset([IDENTITY_FILE, EPOCH_FILE, LOCK_FILE])
_BESIDE = frozenset(
    [
        *("queues", "queues.tmp", "queues.lock", "queues.db", "queues.db-wal", "queues.db-shm"),
        *("queues.db-journal", "queues.db.tmp", "queues.db.tmp-journal"),
    ]
)
"""Of the broker's tables, which live in the directory, too; they are not the journal's."""


class Identity(msgspec.Struct, array_like=True):
    """The file `journal`."""

    uuid: bytes


class Epoch(msgspec.Struct, array_like=True):
    """The file `epoch`."""

    uuid: bytes
    epoch: int
    openings: int
    """How often the directory was opened; unlike the epoch, never given from outside."""


class Journal:
    """An open data directory. One thread opens and closes; see Ring for the rest."""

    def __init__(
        self, storage: Storage, identity: Identity, epoch: Epoch, release: Callable[[], None]
    ) -> None:
        """Use open()."""
        self.uuid = identity.uuid
        self.epoch = epoch.epoch
        self.openings = epoch.openings
        self.storage = storage
        self.rings: dict[str, Ring] = {}
        """The open ones, by name."""
        self.unknown: tuple[Unknown, ...] = ()
        """Files and directories that were left alone."""
        self.exposure = storage.exposure() if isinstance(storage, FileStorage) else ""
        """Who besides the owner may change the directory; "" when nobody may."""
        self._release = release
        self._entropy: Callable[[int], bytes] = os.urandom

    @classmethod
    def open(
        cls,
        where: str | Path | Storage,
        *,
        epoch: int | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> Journal:
        """Take the directory, made when it is new; its rings are opened one by one.

        epoch: None for one more than the last; else above it. entropy: makes the uuids.
        Raises JournalLocked, StorageRefused, JournalCorrupt, DiskFull, OSError, ValueError.
        """
        storage = FileStorage(where) if isinstance(where, (str, Path)) else where
        lock = storage.lock(LOCK_FILE)
        try:
            identity = read_identity(storage)
            if identity is None:
                if storage.child(RINGS).children():
                    raise JournalCorrupt(
                        IDENTITY_FILE,
                        f"{storage.describe()} holds rings but not this file: restore it from a"
                        " backup, or move the directory away to begin a new journal",
                    )
                identity = Identity(entropy(16))
                replace_file(storage, IDENTITY_FILE, pack_file(identity))
            last = read_epoch(storage, identity, given=epoch is not None)
            new = last.epoch + 1 if epoch is None else epoch
            if new <= last.epoch:
                raise ValueError(f"epoch {new} must be above {last.epoch}, the last one")
            raised = Epoch(identity.uuid, new, last.openings + 1)
            replace_file(storage, EPOCH_FILE, pack_file(raised))
            journal = cls(storage, identity, raised, lock.release)
            journal._entropy = entropy
            journal.unknown = unknown_entries(storage)
        except BaseException:
            lock.release()
            raise
        return journal

    def names(self) -> list[str]:
        """Names of the rings that are there, open or not."""
        return ring_names(self.storage)

    def ring(
        self,
        name: str,
        settings: RingSettings | None = None,
        snapshot: SnapshotSource | None = None,
        *,
        held: bool = False,
    ) -> tuple[Ring, Recovery]:
        """Open a ring, made when it is new. Raises what Ring.open() raises.

        held: see Ring.open.
        """
        assert name not in self.rings, f"the ring {name} is open already"
        ring, recovery = Ring.open(
            self.storage.child(RINGS).child(directory_name(name)),
            settings=settings or RingSettings(),
            epoch=self.epoch,
            snapshot=snapshot,
            marks=self.storage.child(FAILED),
            failed_name=directory_name(name),
            entropy=self._entropy,
            held=held,
        )
        self.rings[name] = ring
        return ring, recovery

    def memory_ring(
        self,
        name: str,
        settings: RingSettings | None = None,
        snapshot: SnapshotSource | None = None,
    ) -> tuple[Ring, Recovery]:
        """A ring in memory: the same in every way, and gone with the process."""
        assert name not in self.rings, f"the ring {name} is open already"
        ring, recovery = Ring.open(
            MemoryStorage(name),
            settings=settings or RingSettings(),
            epoch=self.epoch,
            snapshot=snapshot,
            entropy=self._entropy,
        )
        self.rings[name] = ring
        return ring, recovery

    def close(self) -> None:
        """Close every ring and let go of the directory.

        Raises the first JournalFailed, after everything else was closed.
        """
        first: Exception | None = None
        for ring in self.rings.values():
            try:
                ring.close()
            except (JournalError, OSError) as error:
                first = first or error
        self.rings.clear()
        self._release()
        if first is not None:
            raise first


def directory_name(name: str) -> str:
    """The directory of a ring: its name, with what a file system might not bear as %XX."""
    quoted = quote(name, safe="")
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if not quoted or len(quoted) > _NAME_BYTES_MAX:
        raise ValueError(f"a ring's name must have 1 to {_NAME_BYTES_MAX} bytes when quoted")
    return quoted


def ring_names(storage: Storage) -> list[str]:
    """Names of the rings in a data directory."""
    if RINGS not in storage.children():
        return []
    rings = storage.child(RINGS)
    return [
        unquote(directory)
        for directory in rings.children()
        if is_directory_name(directory) and RING_FILE in rings.child(directory).names()
    ]


def is_directory_name(directory: str) -> bool:
    """True for what directory_name() makes of some ring's name: one part of a path, never `..`."""
    try:
        return directory_name(unquote(directory)) == directory
    except (ValueError, UnicodeDecodeError):
        return False


def unknown_entries(storage: Storage) -> tuple[Unknown, ...]:
    """What a data directory holds beside its own."""
    temporary = {f"{name}.tmp" for name in _OURS}
    found = [name for name in storage.names() if name not in _OURS | temporary | _BESIDE]
    found += [f"{name}/" for name in storage.children() if name not in (RINGS, FAILED)]
    if RINGS in storage.children():
        rings = storage.child(RINGS)
        known = {directory_name(name) for name in ring_names(storage)}
        found += [f"{RINGS}/{name}/" for name in rings.children() if name not in known]
        found += [f"{RINGS}/{name}" for name in rings.names()]
    return tuple(Unknown(name, "not ours; it was left alone") for name in found)


def read_identity(storage: Storage) -> Identity | None:
    """The directory's identity; None in a new one. Raises JournalCorrupt."""
    data = read_file(storage, IDENTITY_FILE)
    if data is None:
        return None
    identity: Identity | None = unpack_file(data, Identity)
    if identity is None:
        raise JournalCorrupt(
            IDENTITY_FILE,
            f"the identity of {storage.describe()} is damaged: restore this file from a backup",
        )
    return identity


def read_epoch(storage: Storage, identity: Identity, *, given: bool = False) -> Epoch:
    """The last epoch and count of openings. Raises JournalCorrupt.

    A lost epoch is not guessed: one too low would make positions of two lives look alike.
    given: the caller knows a higher one, which each ring holds against its batches.
    """
    data = read_file(storage, EPOCH_FILE)
    if data is None:
        if not given and RINGS in storage.children() and ring_names(storage):
            raise JournalCorrupt(
                EPOCH_FILE,
                f"missing in {storage.describe()}: restore it, or give an epoch above every"
                " one used before",
            )
        return Epoch(identity.uuid, 0, 0)
    epoch: Epoch | None = unpack_file(data, Epoch)
    if epoch is None or epoch.uuid != identity.uuid:
        raise JournalCorrupt(
            EPOCH_FILE,
            f"damaged, or another directory's, in {storage.describe()}: restore it from a backup",
        )
    return epoch
