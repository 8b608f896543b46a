"""A data directory: its identity, its epoch, its lock, its rings.

Owns the files above the rings. The rule: the epoch rises durably before any ring is opened, one
process at a time has the directory, and what is not ours is left alone and named. Source:
FORMAT.md, section 1; docs/design.md, Journal (Positions).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from malamute_py.journal.appending import SnapshotSource
from malamute_py.journal.errors import (
    EpochsSpent,
    JournalCorrupt,
    JournalError,
    NewerFormat,
    is_damage,
)
from malamute_py.journal.layout import (
    BESIDE_SEGMENTS,
    FILE_VERSION,
    LOCK_FILE,
    RING_FILE,
    file_version,
    index_number,
    pack_file,
    segment_number,
    unpack_file,
)
from malamute_py.journal.manifest import Expected, Manifest
from malamute_py.journal.mapping import Mappings, why_unmapped
from malamute_py.journal.marks import read_mark
from malamute_py.journal.ring import Ring
from malamute_py.journal.storage import (
    FileStorage,
    MemoryStorage,
    Storage,
    read_file,
    read_sound,
    replace_file,
)
from malamute_py.journal.types import Recovery, RingSettings, Unknown

IDENTITY_FILE = "journal"
EPOCH_FILE = "epoch"
RINGS = "rings"
FAILED = "failed"
MANIFESTS = "manifest"
PLACE_FILE = "place"
EPOCH_MAX = (1 << 23) - 1
"""The last epoch that is given. Numbers of what is kept in memory begin at epoch << 40, and the
wire has integers below 2^63."""
_LEAP_MAX = 1 << 10
"""Epochs that a copy of a directory may be ahead of the original. Small: numbers of what is kept
in memory are counted from the epoch."""
_NAME_BYTES_MAX = 200
_OURS = frozenset([IDENTITY_FILE, EPOCH_FILE, LOCK_FILE, PLACE_FILE])
_BESIDE = frozenset(
    [
        *("queues", "queues.tmp", "queues.lock", "queues.db", "queues.db-wal", "queues.db-shm"),
        *("queues.db-journal", "queues.db.tmp", "queues.db.tmp-journal"),
    ]
)
"""Files of the broker's tables, which live in the directory, too; they are not the journal's."""


class Identity(msgspec.Struct, array_like=True):
    """The file `journal`."""

    uuid: bytes


class Epoch(msgspec.Struct, array_like=True):
    """The file `epoch`."""

    uuid: bytes
    epoch: int
    openings: int
    """Openings of the directory so far; unlike the epoch, never given by a caller."""


class Place(msgspec.Struct, array_like=True):
    """The file `place`: where the directory was when it was opened last.

    A copy takes the file along, and so finds itself elsewhere than it says.
    """

    uuid: bytes
    host: str
    device: int
    directory: int
    """Inode of the data directory."""
    identity: int
    """Inode of the file `journal`."""


def check_epoch(epoch: int, where: str) -> None:
    """Raise EpochsSpent when an epoch is beyond the last one: nothing may be written with it."""
    if epoch > EPOCH_MAX:
        raise EpochsSpent(
            f"{where} would begin epoch {epoch}, and {EPOCH_MAX} is the last one: copy what it"
            " holds into a new data directory, with malamute replay and malamute pub"
        )


class Journal:
    """An open data directory. One thread opens and closes; see Ring for the rest."""

    def __init__(
        self, storage: Storage, identity: Identity, epoch: Epoch, release: Callable[[], None]
    ) -> None:
        """Use open(). epoch: of this opening. release: lets go of the directory's lock."""
        self.uuid = identity.uuid
        self.epoch = epoch.epoch
        self.openings = epoch.openings
        self.storage = storage
        self.rings: dict[str, Ring] = {}
        """Open rings, by name."""
        self.unknown: tuple[Unknown, ...] = ()
        """Files and directories that were left alone."""
        self.exposure = storage.exposure() if isinstance(storage, FileStorage) else ""
        """Accounts besides the owner that may change the directory; "": none."""
        self.restored: tuple[Unknown, ...] = ()
        """Missing or damaged files that were made anew from another copy of their facts."""
        self.moved: tuple[str, ...] = ()
        """Properties of the place that changed (host, device, inode): the directory was copied or
        moved. The epoch has leapt then, lest the original and its copy give out the same ones."""
        self.mappings: Mappings | None = None
        """Mapped parts of the rings; None: sealed segments are read by position."""
        self.unmapped = "not asked for"
        """Why nothing is mapped; "": sealed segments are read through mappings."""
        self._release = release
        self._entropy: Callable[[int], bytes] = os.urandom

    @classmethod
    def open(
        cls,
        where: str | Path | Storage,
        *,
        epoch: int | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        mapped: bool = False,
    ) -> Journal:
        """Take the directory, made when it is new; its rings are opened one by one.

        epoch: None for one more than the last; else above it. entropy: makes the uuids.
        mapped: read sealed segments through mappings, if the system can (see `unmapped`).
        Raises JournalLocked, StorageRefused, NewerFormat, JournalCorrupt, EpochsSpent, DiskFull,
        OSError; ValueError: the epoch that was given is not above the last one.
        """
        storage = FileStorage(where) if isinstance(where, (str, Path)) else where
        lock = storage.lock(LOCK_FILE)
        try:
            # Before anything is written: to this version, files of a later one look damaged, and
            # what looks damaged is made anew below.
            check_version(storage, IDENTITY_FILE)
            identity, why = _settle_identity(storage, entropy)
            restored = [Unknown(IDENTITY_FILE, why)] if why else []
            last, why = find_epoch(storage, identity, given=epoch is not None)
            restored += [Unknown(EPOCH_FILE, why)] if why else []
            moved = _moved(storage, identity)
            # A directory that was copied leaps by a random number, so that two copies of it, which
            # go on apart, come to different epochs.
            leap = 1 + int.from_bytes(entropy(4), "little") % _LEAP_MAX if moved else 1
            new = last.epoch + leap if epoch is None else epoch
            if new <= last.epoch:
                raise ValueError(f"epoch {new} must be above {last.epoch}, the last one")
            check_epoch(new, storage.describe())
            raised = Epoch(identity.uuid, new, last.openings + 1)
            replace_file(storage, EPOCH_FILE, pack_file(raised))
            # Written after the epoch: a crash between the two makes the next opening leap again,
            # where the other order would lose the leap.
            place = _place(storage, identity)
            if place is not None and (moved or PLACE_FILE not in storage.names()):
                replace_file(storage, PLACE_FILE, pack_file(place))
            journal = cls(storage, identity, raised, lock.release)
            journal._entropy = entropy
            journal.unknown = unknown_entries(storage)
            journal.restored, journal.moved = tuple(restored), moved
            if mapped:
                journal.unmapped = why_unmapped(storage, EPOCH_FILE)
                journal.mappings = None if journal.unmapped else Mappings()
        except BaseException:
            lock.release()
            raise
        return journal

    def names(self) -> list[str]:
        """Names of the rings that are there, or should be, open or not."""
        return sorted({*ring_names(self.storage), *expected_names(self.storage)})

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
            manifests=self.storage.child(MANIFESTS),
            entropy=self._entropy,
            held=held,
            mappings=self.mappings,
        )
        self.rings[name] = ring
        return ring, recovery

    def memory_ring(
        self,
        name: str,
        settings: RingSettings | None = None,
    ) -> tuple[Ring, Recovery]:
        """A ring in memory, for streams that want it: the same, but gone with the process."""
        assert name not in self.rings, f"the ring {name} is open already"
        ring, recovery = Ring.open(
            MemoryStorage(name),
            settings=settings or RingSettings(),
            epoch=self.epoch,
            entropy=self._entropy,
        )
        self.rings[name] = ring
        return ring, recovery

    def forget(self, name: str) -> None:
        """Remove a ring's manifest, before its files are removed: no start will miss them."""
        manifests = self.storage.child(MANIFESTS)
        if directory_name(name) in manifests.names():
            manifests.remove(directory_name(name))
            manifests.sync_directory()

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
    """Names of the rings in a data directory: of the directories that hold files of one."""
    if RINGS not in storage.children():
        return []
    rings = storage.child(RINGS)
    return [
        unquote(directory)
        for directory in rings.children()
        if is_directory_name(directory) and _has_ring(rings, directory)
    ]


def _has_ring(rings: Storage, directory: str) -> bool:
    """Whether a directory that was listed just now is a ring's."""
    try:
        return is_ring(rings.child(directory))
    except FileNotFoundError:
        return False  # A running broker has removed the directory meanwhile.


def is_ring(storage: Storage) -> bool:
    """True for a directory in which a broker has begun a ring."""
    names = storage.names()
    # The file that says so may be missing: its segments tell as well.
    return RING_FILE in names or any(segment_number(name) is not None for name in names)


def expected_names(storage: Storage) -> list[str]:
    """Names of the rings that have a manifest: each of them should be there."""
    if MANIFESTS not in storage.children():
        return []
    names = storage.child(MANIFESTS).names()
    return [unquote(name) for name in names if is_directory_name(name) and not _is_unfinished(name)]


def _is_unfinished(name: str) -> bool:
    """Return True for the part of a manifest that a crash left while it was being made."""
    return name.endswith(".tmp")


def expected_of(storage: Storage, name: str) -> Expected | None:
    """Return what a ring's manifest says should be there; None when the ring has no manifest."""
    if MANIFESTS not in storage.children():
        return None
    return Manifest(storage.child(MANIFESTS), directory_name(name)).expected


_OWN_RING: Final = re.compile("stream-[0-9a-f]{32}")
"""Name of a ring that a stream has for itself: ring_name() of the broker makes it."""


def removal_rests(storage: Storage) -> list[str]:
    """Names of rings of which a removal has left some files, or the empty directory.

    A start removes them. A removal takes a ring's manifest first, then the file that makes a
    directory a ring: what has neither was being removed when the broker ended. Only a stream's own
    ring is removed: a directory of another name is its owner's.
    """
    if RINGS not in storage.children():
        return []
    rings, expected = storage.child(RINGS), expected_names(storage)
    names = [unquote(directory) for directory in rings.children() if is_directory_name(directory)]
    return [
        name
        for name in names
        if _OWN_RING.fullmatch(name)
        and name not in expected
        and _is_rest(rings.child(directory_name(name)))
    ]


def _is_rest(ring: Storage) -> bool:
    """Whether a directory has only files of a ring but no RING_FILE: a removal takes it first."""
    try:
        return not ring.children() and all(
            name in BESIDE_SEGMENTS
            or segment_number(name) is not None
            or index_number(name) is not None
            for name in ring.names()
        )
    except FileNotFoundError:  # A broker that runs has just removed it.
        return False


def is_directory_name(directory: str) -> bool:
    """True for what directory_name() makes of some ring's name: one part of a path.

    Asked of names that others may have given, in a directory or in a snapshot's manifest. It is
    never `..`, since a dot at the beginning is quoted as %2E.
    """
    try:
        return directory_name(unquote(directory)) == directory
    except (ValueError, UnicodeDecodeError):
        return False


def unknown_entries(storage: Storage) -> tuple[Unknown, ...]:
    """Return the entries of a data directory that are not the journal's, for a warning.

    Rings that are there, that should be, or that were being removed, are the journal's.
    """
    temporary = {f"{name}.tmp" for name in _OURS}
    found = [name for name in storage.names() if name not in _OURS | temporary | _BESIDE]
    known = (RINGS, FAILED, MANIFESTS)
    found += [f"{name}/" for name in storage.children() if name not in known]
    if RINGS in storage.children():
        rings = storage.child(RINGS)
        known_rings = *ring_names(storage), *expected_names(storage), *removal_rests(storage)
        ours = {directory_name(name) for name in known_rings}
        found += [f"{RINGS}/{name}/" for name in rings.children() if name not in ours]
        found += [f"{RINGS}/{name}" for name in rings.names()]
    return tuple(Unknown(name, "not ours; it was left alone") for name in found)


def check_version(storage: Storage, name: str) -> None:
    """Raise NewerFormat when a small file is of a later version; a damaged one passes.

    Called before other files are read: to this version, those of a later one look damaged. Raises
    OSError, but not for a bad sector.
    """
    data = read_sound(storage, name)
    version = None if data is None else file_version(data)
    if version is not None and version > FILE_VERSION:
        raise NewerFormat(
            f"{storage.describe()}/{name} has version {version}, and this program knows"
            f" {FILE_VERSION}: use the version of malamute-py that wrote it, or a later one"
        )


def read_identity(storage: Storage) -> Identity | None:
    """Return the directory's identity by its file; None: there is none, as in a new directory.

    Nothing else is asked, unlike in find_identity(). Raises JournalCorrupt: the file is damaged.
    """
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


def find_identity(storage: Storage) -> tuple[Identity | None, str]:
    """Return the directory's identity, and why its file has to be made anew ("": it is good).

    Where the file is missing or damaged, the file `epoch` has the identity, too. (None, ""): a new
    directory. Raises JournalCorrupt, OSError: the file is damaged, and `epoch` does not tell.
    """
    try:
        identity, what = read_identity(storage), "missing"
        if identity is not None:
            return identity, ""
    except (JournalCorrupt, OSError) as error:
        if isinstance(error, OSError) and not is_damage(error):
            raise
        what = "damaged"
    epoch = read_mark(storage, EPOCH_FILE, Epoch)
    if epoch is not None:
        return Identity(epoch.uuid), f"it was {what}; the file {EPOCH_FILE} says the same"
    if what == "missing":
        return None, ""
    return read_identity(storage), ""  # raises once more what is wrong with the file


def _settle_identity(storage: Storage, entropy: Callable[[int], bytes]) -> tuple[Identity, str]:
    """Return the directory's identity, and why its file was missing or damaged ("": it was not so).

    The file is written where it is not good; a new directory gets a new identity. Raises
    JournalCorrupt: nothing tells the identity of a directory with rings; DiskFull, OSError.
    """
    identity, why = find_identity(storage)
    new = identity is None
    if identity is None:
        if storage.child(RINGS).children():
            raise JournalCorrupt(
                IDENTITY_FILE,
                f"{storage.describe()} holds rings but not this file: restore it from a"
                " snapshot, or move the directory away to begin a new journal",
            )
        identity = Identity(entropy(16))
    if new or why:
        replace_file(storage, IDENTITY_FILE, pack_file(identity))
    return identity, why


def find_epoch(storage: Storage, identity: Identity, *, given: bool = False) -> tuple[Epoch, str]:
    """Return the last epoch, and why its file did not tell it ("": it did).

    Every opening writes its epoch into the manifest of each ring that it opens, and ring main is
    among them: the highest of these is the last one that was used. given: as of read_epoch().
    Raises JournalCorrupt, OSError: no manifest tells it.
    """
    try:
        return read_epoch(storage, identity, given=given), ""
    except (JournalCorrupt, OSError) as error:
        if isinstance(error, OSError) and not is_damage(error):
            raise
        known = [expected_of(storage, name) for name in expected_names(storage)]
        epochs = [each.epoch for each in known if each is not None]
        if not epochs:
            raise
        # One more: it may have been raised and not yet used when the broker was killed.
        highest = max(epochs) + 1
        return (
            Epoch(identity.uuid, highest, 0),
            f"it was missing or damaged; by the manifests of the rings it was {highest} at most",
        )


def _place(storage: Storage, identity: Identity) -> Place | None:
    """Return where the directory is now, by which a copy is noticed; None: it is in memory."""
    if not isinstance(storage, FileStorage):
        return None
    directory = Path(storage.describe())
    try:
        host = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        host = ""
    facts = directory.stat()
    identity_inode = (directory / IDENTITY_FILE).lstat().st_ino
    return Place(identity.uuid, host, facts.st_dev, facts.st_ino, identity_inode)


def _moved(storage: Storage, identity: Identity) -> tuple[str, ...]:
    """Return the properties of the directory's place that changed since it was opened last.

    Some did where the directory was copied or moved: its epoch then leaps. (): none, or there is
    nothing to compare.
    """
    now, before = _place(storage, identity), read_mark(storage, PLACE_FILE, Place)
    if now is None or before is None or before.uuid != identity.uuid:
        return ()
    differ = [("host", now.host != before.host), ("device", now.device != before.device)]
    inodes = now.directory != before.directory or now.identity != before.identity
    return tuple(name for name, differs in (*differ, ("inode", inodes)) if differs)


def read_epoch(storage: Storage, identity: Identity, *, given: bool = False) -> Epoch:
    """Return the last epoch and count of openings; zeros in a new directory.

    given: whether the operator names a higher epoch, which does without the file: each ring
    compares that with its batches. Raises JournalCorrupt: the file is missing or damaged. A lost
    epoch is not guessed here, since one too low would make positions of two lives look alike;
    find_epoch() asks the manifests of the rings for one that is high enough.
    """
    data = read_file(storage, EPOCH_FILE)
    if data is None:
        # Rings that are there, or that should be, were opened in an epoch.
        if not given and (ring_names(storage) or expected_names(storage)):
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
