"""Repair of a damaged data directory, to a copy that has everything that can be read.

Owns the making of a sound directory out of a damaged one. The rules: the original is only read;
every valid batch keeps its position, its offset and its epoch; what is lost is filled with padding,
so that the copy has no damage, and is reported by stream and offsets; no position, offset or number
is given again; the copy opens without a finding before it gets its name. Source: journal/FORMAT.md,
section 14.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from malamute_protocol.stamp import (
    CHANGE,
    CONTROL,
    DATA,
    LAST_OF_BUNDLE,
    PADDING,
    STAMP_BYTES,
    Stamp,
)
from malamute_py.changelog.snapshots import decode_snapshot
from malamute_py.journal import FileStorage, JournalError, Recovery, Ring, RingSettings
from malamute_py.journal.check import FoundBatch, check
from malamute_py.journal.directory import (
    EPOCH_FILE,
    IDENTITY_FILE,
    MANIFESTS,
    RINGS,
    Epoch,
    Journal,
    check_epoch,
    directory_name,
    find_epoch,
    find_identity,
)
from malamute_py.journal.errors import is_damage
from malamute_py.journal.inspect import all_names, scan_ring
from malamute_py.journal.layout import (
    CLOSED_FILE,
    LOCK_FILE,
    RING_FILE,
    TRIMS_FILE,
    Closed,
    RingMeta,
    SegmentHeader,
    Trims,
    pack_file,
    segment_name,
)
from malamute_py.journal.manifest import Manifest
from malamute_py.journal.marks import read_mark
from malamute_py.journal.recovery import Scan
from malamute_py.journal.storage import File, Storage, replace_file
from malamute_py.journal.types import SEGMENT_HEADER_BYTES, Damage
from malamute_py.store.checking import foreign_main
from malamute_py.store.database import DATABASE, MARK, connect, lock, position_of
from malamute_py.store.errors import StoreError
from malamute_py.store.files import PIECE_BYTES, regular, sync_all
from malamute_py.store.loading import check as check_tables
from malamute_py.store.opening import LogFacts, open_store
from malamute_py.store.reading import CHANGE_STREAM, MAIL_STREAM, Following
from malamute_py.store.rebuilding import accept, rebuild
from malamute_py.store.snapshot import MAIN, made_whole

_EPOCHS: Final = 1 << 10
"""Epochs between the original's and the copy's, as the original may have been started again
meanwhile."""
_NUMBERS_SHIFT: Final = 32
"""Numbers of mailboxes and services go on at epoch << 32 where those that were given are lost."""
_LOCK_WAIT_S: Final = 30.0

Progress = Callable[[int, str], None]
"""Callback for progress: (bytes done so far, what is being done)."""


class CannotMend(StoreError):
    """No sound directory can be made of the original; nothing is left of the attempt."""

    code = "damaged"


class Lost(msgspec.Struct, frozen=True):
    """Offsets of a stream whose records the copy lacks."""

    ring: str
    stream: int
    from_offset: int
    to_offset: int
    exact: bool = True
    """False: there were records from from_offset on, and their number is unknown."""


class Mended(msgspec.Struct, kw_only=True):
    """The result of a repair: what was saved, and what was lost."""

    directory: str
    epoch: int
    rings: list[str]
    bytes: int
    batches: int
    filled_bytes: int
    """Bytes of the rings that could not be read and were filled."""
    lost: list[Lost]
    changes_lost: int
    """Records of the change log that are lost: changes of mail, services, cursors and groups."""
    queues: str
    """Fate of the tables: "copied", "rebuilt", or "none" where there were none."""
    queues_lost: str = ""
    """Rows that the tables lack; "": none that is known."""
    dropped: list[str] = []
    """Ends of rings that were never known to be on disk, and were cut off as at any start."""
    restored: list[str] = []
    """Small files that were made anew from others that have the same facts."""

    @property
    def whole(self) -> bool:
        """Whether nothing was lost."""
        return not (self.lost or self.changes_lost or self.queues_lost)


def mend(directory: Path, target: Path, *, progress: Progress = lambda done, what: None) -> Mended:
    """Make a sound data directory of a damaged one, whose broker has stopped.

    For `malamute journal repair`. Raises CannotMend, JournalLocked, StorageRefused, StoreLocked,
    StoreError, OSError: nothing was made.
    """
    source = FileStorage(directory, read_only=True)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(FileNotFoundError):
            held.callback(source.lock(LOCK_FILE).release)
        with contextlib.suppress(FileNotFoundError):
            # The checkpoint's process of a killed broker may be at its last transaction.
            held.enter_context(lock(directory, _LOCK_WAIT_S, reading=True))
        made = held.enter_context(made_whole(target))
        try:
            mended = _mend(source, made, progress)
        except JournalError as error:
            raise CannotMend(f"{directory} cannot be repaired: {error}") from error
        sync_all(made)
        mended.directory = str(target)
        return mended


def _mend(source: FileStorage, made: Path, progress: Progress) -> Mended:
    """Write a repaired copy of a directory: identity, epoch, rings, and tables.

    made: the new directory. The copy's epoch is far higher, so that no offset is given twice.
    """
    identity, why = find_identity(source)
    if identity is None:
        raise CannotMend(f"{source.describe()} is no data directory: it has no {IDENTITY_FILE}")
    restored = [f"{IDENTITY_FILE}: {why}"] if why else []
    epoch, why = find_epoch(source, identity)
    restored += [f"{EPOCH_FILE}: {why}"] if why else []
    storage = FileStorage(made)
    # One epoch is left above it, so that the copy can be started at all.
    check_epoch(epoch.epoch + _EPOCHS + 1, "a repaired copy")
    raised = Epoch(identity.uuid, epoch.epoch + _EPOCHS, epoch.openings)
    replace_file(storage, IDENTITY_FILE, pack_file(identity))
    replace_file(storage, EPOCH_FILE, pack_file(raised))
    names = all_names(source)
    if MAIN not in names:
        raise CannotMend("ring main is missing: nothing tells what streams there were")
    foreign = foreign_main(source)
    if foreign:
        raise CannotMend(foreign)
    mended = Mended(
        directory="", epoch=raised.epoch + 1, rings=names, bytes=0, batches=0, filled_bytes=0,
        lost=[], changes_lost=0, queues="none", restored=restored,
    )  # fmt: skip
    for name in names:
        scan = scan_ring(source, name, trust_indexes=False)
        for done, total in scan.steps():
            progress(mended.bytes, f"reading ring {name}, {done} of {total} segments")
        if name == MAIN and scan.state.snapshot is None and scan.end_lsn:
            raise CannotMend(
                "no table of streams can be read in ring main, so no record can be told from"
                " another stream's: restore the newest snapshot (`malamute snapshot restore`)"
            )
        copy = _RingRepair(storage, name, scan, raised.epoch)
        for size in copy.run():
            mended.bytes += size
            progress(mended.bytes, f"ring {name}")
        mended.dropped += [
            f"ring {name}, positions {each.from_lsn} to {each.to_lsn}: {each.reason}"
            for each in scan.dropped
        ]
        mended.batches += copy.batches
        mended.filled_bytes += copy.filled
        mended.lost += copy.lost()
        mended.changes_lost += copy.changes_lost
    _open_copy(source, made, names, mended, progress)
    return mended


class _PendingStamp:
    """A stamp in the copy that may have to be changed when its neighbours are known."""

    __slots__ = ("lsn", "stamp")

    def __init__(self, lsn: int, stamp: Stamp) -> None:
        self.lsn = lsn
        self.stamp = stamp


class _RingRepair:
    """The copy of one ring: batches where they were, and padding where nothing can be read.

    A hole is a damaged or missing part; its padding is one batch. What is before and after a hole
    must be whole bundles, as recovery keeps no other: stamps next to it are changed for that.
    """

    def __init__(self, storage: Storage, name: str, scan: Scan, epoch: int) -> None:
        """storage: the new directory. scan: has read the original's ring. epoch: the copy's."""
        self.batches = self.filled = self.changes_lost = 0
        self._name = name
        self._scan = scan
        self._epoch = epoch
        self._size = scan.segment_bytes
        self._storage = storage.child(RINGS).child(directory_name(name))
        self._manifests = storage.child(MANIFESTS)
        self._files: dict[int, File] = {}
        """Number -> file of each segment of the copy."""
        self._number = -1
        self._data = bytearray()
        """The segment that is being filled, whose number is `_number`."""
        self._last: _PendingStamp | None = None
        """The batch before, when its bundle goes on."""
        self._hole: _PendingStamp | None = None
        """The padding before, until it is known what follows."""
        self._bundle: int | None = None
        """Position of the padding with which a bundle begins whose beginning is lost; None: the
        bundle being copied has its beginning."""
        self._holes = 0
        """Damaged and missing parts that were passed so far."""
        self._seen: dict[int, tuple[int, int]] = {}
        """Stream -> (next offset, holes until then)."""
        self._lost: list[Lost] = []
        """Offsets of records that no batch of the copy has."""
        self._change_next: tuple[int, int] | None = None
        """(next offset, holes until then) of the change log."""
        self._newest = 0, 0
        """(epoch, append time) of the last batch."""

    def run(self) -> Iterator[int]:
        """Write the ring into the new directory, yielding the size of each segment that is done.

        Then the file `closed` and the manifest, as an orderly close writes them.
        """
        scan, size, storage = self._scan, self._size, self._storage
        replace_file(storage, RING_FILE, pack_file(RingMeta(scan.ring, size)))
        trims = read_mark(scan.storage, TRIMS_FILE, Trims)
        if trims is not None and trims.ring == scan.ring:
            replace_file(storage, TRIMS_FILE, pack_file(trims))
        there = {segment.number: segment for segment in scan.segments}
        last = -(-scan.end_lsn // size) - 1  # the last one that has bytes before the end
        # Segments missing in front are not filled: the ring begins later. They count as a hole.
        first = min([*there, last]) if last >= 0 else 0
        self._holes = int(scan.first_number < first)
        for number in range(first, last + 1):
            self._number, base = number, number * size
            self._data = bytearray(size)
            header = SegmentHeader(scan.ring, number, self._epoch, size, base)
            self._data[:SEGMENT_HEADER_BYTES] = header.pack()
            segment = there.get(number)
            self._fill(None if segment is None else scan.bytes_of(segment), base)
            file = self._files[number] = storage.create(segment_name(number), size)
            storage.write(file, 0, [self._data])
            storage.sync(file)
            yield size
        if self._hole is not None:
            self._end_hole(LAST_OF_BUNDLE, self._hole.stamp.epoch)
        # Once more: stamps in earlier segments may have been changed since.
        for file in self._files.values():
            storage.sync(file)
        mark = Closed(scan.ring, scan.end_lsn, scan.epoch, clean=True)
        replace_file(storage, CLOSED_FILE, pack_file(mark))
        # Offsets that were given, of streams whose copied batches do not reach so far: the manifest
        # keeps them from being given again.
        states = scan.streams.states
        copied = {number: after for number, (after, _) in self._seen.items()}
        beyond = {
            number: state.next
            for number, state in states.items()
            if state.next > copied.get(number, 0)
        }
        Manifest(self._manifests, directory_name(self._name)).write(
            scan.ring, size, self._epoch, first, last, scan.end_lsn,
            {number: (state.next, state.first) for number, state in states.items()},
            clean=True, beyond=beyond,
        )  # fmt: skip

    def _fill(self, source: memoryview | None, base: int) -> None:
        """Copy the good batches of one segment to where they were; paddings fill what is damaged.

        source: the segment's bytes; None: it is missing. base: the position at which it begins.
        """
        end = min(self._scan.end_lsn, base + self._size)
        lsn = base + SEGMENT_HEADER_BYTES
        holes = _within(self._scan.damages, lsn, end) if source is not None else [(lsn, end)]
        while end - lsn >= STAMP_BYTES:
            low, high = holes[0] if holes else (end, end)  # the next one
            if low <= lsn:
                del holes[0]
                if high - lsn >= STAMP_BYTES:  # a smaller rest of a segment holds nothing
                    self._pad(lsn, high)
                lsn = max(lsn, high)
                continue
            assert source is not None
            found = check(source, base, lsn - base)
            if isinstance(found, str) or not found.content_good:
                why = found if isinstance(found, str) else found.reason
                raise CannotMend(f"position {lsn} of ring {self._name} changed meanwhile: {why}")
            position = lsn - base
            self._data[position : position + found.stamp.size] = source[
                position : position + found.stamp.size
            ]
            self._join(found)
            lsn += found.stamp.size

    def _join(self, found: FoundBatch) -> None:
        """Join a copied batch to what is before it, across a hole if there is one.

        A bundle whose beginning is lost begins with the padding. Offsets and changes that went with
        a hole are noted as lost.
        """
        stamp = found.stamp
        self.batches += 1
        begins = stamp.bundle_lsn == stamp.lsn  # whether its bundle begins with it
        if self._hole is not None:
            if begins:
                # The padding before it is a bundle by itself.
                self._end_hole(LAST_OF_BUNDLE, self._hole.stamp.epoch)
            else:
                # The remainder of a bundle begins with the padding.
                self._bundle = self._hole.lsn
                self._end_hole(0, stamp.epoch)
        if begins:
            self._bundle = None
        elif self._bundle is not None:
            stamp = stamp._replace(bundle_lsn=self._bundle)
            self._write_stamp(stamp)
        self._newest = stamp.epoch, stamp.append_time_ms
        ends = bool(stamp.flags & LAST_OF_BUNDLE)
        self._last = None if ends else _PendingStamp(stamp.lsn, stamp)
        if stamp.control_kind == DATA:
            # Offsets between this batch and the one before it are lost if a hole came between; else
            # they never had a record. -1: any hole, and a missing beginning, may have had records
            # of a stream that was not met yet.
            before, holes = self._seen.get(
                stamp.stream, (self._scan.streams.state(stamp.stream).first, -1)
            )
            if stamp.base_offset > before and holes < self._holes:
                self._lost.append(Lost(self._name, stamp.stream, before, stamp.base_offset))
            self._seen[stamp.stream] = (stamp.next_offset, self._holes)
        elif stamp.control_kind == CHANGE and stamp.stream == CHANGE_STREAM:
            before, holes = self._change_next or (stamp.base_offset, self._holes)
            if holes < self._holes:  # a hole came since the last change
                self.changes_lost += max(stamp.base_offset - before, 0)
            self._change_next = stamp.next_offset, self._holes

    def _pad(self, lsn: int, high: int) -> None:
        """Fill [lsn, high), where nothing can be read, with padding.

        What lies before it ends here, be it a bundle or another hole. What follows decides in
        _join() whether the padding is a bundle of its own or begins one.
        """
        if self._hole is not None:
            self._end_hole(LAST_OF_BUNDLE, self._hole.stamp.epoch)
        if self._last is not None:
            # The bundle before lacks its rest: its last copied batch becomes the last one.
            stamp = self._last.stamp
            self._write_stamp(stamp._replace(flags=stamp.flags | LAST_OF_BUNDLE))
            self._last = None
        epoch, time_ms = self._newest
        padding = Stamp(
            flags=CONTROL, lsn=lsn, bundle_lsn=lsn, synced_lsn=0, epoch=epoch,
            base_offset=0, append_time_ms=time_ms, stream=0, origin=0, size=high - lsn,
            count=0, control_kind=PADDING, content_crc=0,
        )  # fmt: skip
        self._hole = _PendingStamp(lsn, padding)
        self._write_stamp(padding)
        self._holes += 1
        self.filled += high - lsn
        self._bundle = None

    def _end_hole(self, flags: int, epoch: int) -> None:
        """Finish the stamp of a hole's padding, now that it is known what follows.

        flags: LAST_OF_BUNDLE: it is a bundle by itself; 0: the bundle goes on. epoch: as of the
        bundle that it belongs to.
        """
        assert self._hole is not None
        stamp = self._hole.stamp
        self._write_stamp(stamp._replace(flags=stamp.flags | flags, epoch=epoch))
        self._hole = None

    def _write_stamp(self, stamp: Stamp) -> None:
        """Write a stamp over the one at its place: into the segment in hand, or its file."""
        number, position = divmod(stamp.lsn, self._size)
        if number == self._number:
            self._data[position : position + STAMP_BYTES] = stamp.pack()
            file = self._files.get(number)
        else:
            file = self._files[number]
        if file is not None:
            self._storage.write(file, position, [stamp.pack()])

    def lost(self) -> list[Lost]:
        """Return the offsets whose records are not in the copy, by stream; after run().

        Those between copied batches were noted there; those after a stream's last one are added.
        """
        lost = self._lost.copy()
        for number, state in self._scan.streams.states.items():
            reached, _ = self._seen.get(number, (state.first, 0))
            skipped = self._scan.skipped.get(number)
            if skipped is not None:
                # How many records there were is not known: as many as the bytes may have held.
                _, after_skipped = skipped
                lost.append(Lost(self._name, number, reached, after_skipped, exact=False))
            elif reached < state.next:
                lost.append(Lost(self._name, number, reached, state.next))
        return sorted(lost, key=lambda each: (each.stream, each.from_offset))


def _within(damages: list[Damage], low: int, high: int) -> list[tuple[int, int]]:
    """Return the damaged parts in [low, high), ascending; parts that touch become one."""
    holes: list[tuple[int, int]] = []
    for damage in sorted(damages):
        begin, stop = max(damage.from_lsn, low), min(damage.to_lsn, high)
        if begin >= stop:
            continue
        if holes:
            last_begin, last_stop = holes[-1]
            if begin <= last_stop:
                holes[-1] = last_begin, max(last_stop, stop)
                continue
        holes.append((begin, stop))
    return holes


# --- the copy as a broker finds it -----------------------------------------------------------


def _open_copy(
    source: FileStorage, made: Path, names: list[str], mended: Mended, progress: Progress
) -> None:
    """Open the copy as a broker would, which makes indexes and tables: it must be sound.

    source: the original, which the tables are copied from. mended: gets what the tables lack.
    Raises CannotMend: an opening finds something in the copy.
    """
    journal = Journal.open(made)
    try:
        for name in names:
            progress(mended.bytes, f"indexing ring {name}")
            # Held, and larger than any ring: nothing is retired.
            ring, recovery = journal.ring(name, RingSettings(ring_bytes=1 << 50), held=True)
            wrong = [each.reason for each in recovery.damages]
            wrong += [each.reason for each in recovery.dropped]
            if wrong:
                raise CannotMend(f"what was made of ring {name} is not sound: {wrong[0]}")
            while ring.prepare_step():
                pass
            if name == MAIN:
                progress(mended.bytes, "tables")
                _mend_tables(Path(source.describe()), made, journal, ring, recovery, mended)
    finally:
        journal.close()


def _mend_tables(
    directory: Path, made: Path, journal: Journal, ring: Ring, recovery: Recovery, mended: Mended
) -> None:
    """Copy the tables to the repaired directory, or make them anew where that does not work.

    ring, recovery: ring main of the copy, as its opening left and found it. mended: gets what
    became of the tables.
    """
    mail = ring.next_offset(MAIL_STREAM) > 0
    if not mail and not (directory / DATABASE).exists() and not (directory / MARK).exists():
        return  # there never were tables
    log = LogFacts(journal.uuid, ring.uuid, ring.start_lsn, ring.end_lsn, mail)
    # Offset of the next change: by the newest snapshot of the ring's state, and changes after it.
    change_next = decode_snapshot(recovery.snapshot).change_next if recovery.snapshot else 0
    changes = [control for control in recovery.controls if control.kind == CHANGE]
    if changes:
        change_next = max(change_next, changes[-1].base_offset + changes[-1].count)
    with lock(made, _LOCK_WAIT_S):
        fault = _copy_tables(directory, made)
        try:
            if fault:
                raise StoreError(fault)
            connection, _ = open_store(made, log, accept_lost=True)
            with contextlib.closing(connection):
                mended.queues_lost = accept(connection, log, ring.follow, change_next)
            mended.queues = "copied"
        except (StoreError, sqlite3.Error) as error:
            mended.queues = "rebuilt"
            _rebuild(made, log, ring.follow, change_next, str(error), journal.epoch, mended)


def _rebuild(
    made: Path, log: LogFacts, follow: Following, change_next: int, fault: str, epoch: int,
    mended: Mended,
) -> None:  # fmt: skip
    """Make the tables anew from the repaired log, with losses if it lacks changes.

    change_next: offset of the next change of the log. fault: why the old tables could not be used.
    mended: gets what was lost.
    """
    try:
        rebuild(made, log, follow, change_next)
    except (StoreError, JournalError) as error:
        mended.queues_lost = f"{fault}; of the log: {error}"
        number = epoch << _NUMBERS_SHIFT  # Above all that earlier epochs gave.
        rebuild(made, log, follow, change_next, accept_lost=True, number_next=number)
    # Opened as a broker does: they must go with the log, and get the small file that says that
    # there are tables.
    connection, _ = open_store(made, log)
    connection.close()


def _copy_tables(directory: Path, made: Path) -> str:
    """Copy the tables; returns what is wrong with them, "" when nothing is.

    They are copied with their WAL and opened only at the target: SQLite writes beside what it
    reads.
    """
    names = (DATABASE, f"{DATABASE}-wal")
    try:
        for name in names:
            with (
                contextlib.suppress(FileNotFoundError),
                regular(directory / name) as data,
                (made / name).open("xb") as copy,
            ):
                shutil.copyfileobj(data, copy, PIECE_BYTES)
        with contextlib.closing(connect(made / DATABASE)) as tables:
            check_tables(tables, whole=True)
            position_of(tables)
    except (sqlite3.Error, StoreError, OSError) as error:
        # What the disk cannot read, and what is no file, is damage; nothing else is.
        if isinstance(error, OSError) and not is_damage(error):
            raise
        for name in names:
            (made / name).unlink(missing_ok=True)
        return str(error)
    return ""
