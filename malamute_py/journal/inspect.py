"""Looking into a data directory of a stopped broker: stat, verify, dump.

Owns what `malamute journal` calls. The rule: nothing is ever modified, and a damaged part is named
and stepped over. stat() reads as an opening does, sealed segments by their index files; verify()
and dump() read every batch and believe no index. Source: FORMAT.md, section 10.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from malamute_protocol.stamp import CONTROL_KINDS, PADDING, STAMP_BYTES, Stamp
from malamute_py.journal.check import FoundBatch, candidates, check
from malamute_py.journal.directory import (
    EPOCH_FILE,
    FAILED,
    IDENTITY_FILE,
    RINGS,
    directory_name,
    expected_names,
    expected_of,
    find_epoch,
    find_identity,
    ring_names,
    unknown_entries,
)
from malamute_py.journal.errors import (
    JournalCorrupt,
    JournalError,
    JournalLocked,
    StorageRefused,
)
from malamute_py.journal.index import ENTRY_DTYPE, StoredIndex, read_index
from malamute_py.journal.layout import (
    FAILED_FILE,
    LOCK_FILE,
    RING_FILE,
    Failed,
    RingMeta,
    index_name,
    read_segment_header,
    segment_name,
    segment_number,
)
from malamute_py.journal.marks import find_meta, read_mark
from malamute_py.journal.recovery import MISSING, Scan
from malamute_py.journal.segment import Segment
from malamute_py.journal.storage import FileStorage, MemoryStorage, Storage, read_file
from malamute_py.journal.types import (
    SEGMENT_HEADER_BYTES,
    UNINDEXED_FROM,
    Finding,
    RingSettings,
    StreamFacts,
)


class RingStat(msgspec.Struct, frozen=True):
    """One ring, as its files say without reading every batch."""

    name: str
    uuid: str
    segment_bytes: int
    segments: int
    first_segment: int
    bytes_on_disk: int
    start_lsn: int
    end_lsn: int
    epoch: int
    clean: bool
    streams: dict[int, StreamFacts]
    damages: int
    dropped: int


class JournalStat(msgspec.Struct, frozen=True):
    """A data directory."""

    directory: str
    uuid: str
    epoch: int
    openings: int
    in_use: bool
    rings: tuple[RingStat, ...]
    unknown: tuple[str, ...]


class Dumped(NamedTuple):
    """One batch, or a place where there should be one."""

    lsn: int
    size: int
    stamp: Stamp | None
    """None: nothing valid is here; `fault` says why."""
    kind: str
    content: bytes
    """Empty for padding and for what is damaged."""
    fault: str


def stat(directory: str | Path) -> JournalStat:
    """Return the facts about a data directory, for `malamute journal stat`.

    Raises FileNotFoundError: there is nothing; JournalCorrupt: it is no data directory, or damaged.
    """
    storage = FileStorage(directory, read_only=True)
    identity, _ = find_identity(storage)
    if identity is None:
        raise JournalCorrupt("journal", f"{storage.describe()} is not a data directory")
    epoch, _ = find_epoch(storage, identity)
    rings = []
    for name in all_names(storage):
        scan = scan_ring(storage, name, trust_indexes=True).run()
        first = scan.segments[0].number if scan.segments else 0
        files = len(scan.segments) + len(scan.spares)
        rings.append(
            RingStat(
                name=name,
                uuid=scan.ring.hex(),
                segment_bytes=scan.segment_bytes,
                segments=len(scan.segments),
                first_segment=first,
                bytes_on_disk=files * scan.segment_bytes,
                start_lsn=first * scan.segment_bytes,
                end_lsn=scan.end_lsn,
                epoch=scan.epoch,
                clean=scan.clean,
                streams=_stream_facts(scan),
                damages=len(scan.damages),
                dropped=len(scan.dropped),
            )
        )
    unknown = tuple(f"{entry.file}: {entry.reason}" for entry in unknown_entries(storage))
    return JournalStat(
        directory=storage.describe(),
        uuid=identity.uuid.hex(),
        epoch=epoch.epoch,
        openings=epoch.openings,
        in_use=in_use(storage),
        rings=tuple(rings),
        unknown=unknown,
    )


def _stream_facts(scan: Scan) -> dict[int, StreamFacts]:
    """Return what a scan found of each stream, by its number, for stat()."""
    facts = {}
    for number, state in scan.streams.states.items():
        # Segments with records that are kept: others may hold only some that were removed.
        kept = [each for each in scan.segments if number in each.spans]
        kept = [each for each in kept if each.spans[number].next > state.first]
        facts[number] = StreamFacts(
            first=state.first,
            next=state.next,
            bytes=state.held_bytes - state.retired_bytes,
            first_time_ms=_first_time_ms(scan, kept[0], number, state.first) if kept else 0,
            last_time_ms=kept[-1].spans[number].last_time_ms if kept else 0,
            epochs=state.epochs,
        )
    return facts


def _first_time_ms(scan: Scan, segment: Segment, number: int, first: int) -> int:
    """Return when the oldest batch of a stream with a kept record was appended.

    number, first: the stream, and its first offset that is kept. segment: the first one with such a
    batch.
    """
    span = segment.spans[number]
    if span.first < first:
        # It begins with records that were removed, whose time the totals tell: it is read.
        meta = RingMeta(scan.ring, scan.segment_bytes)
        for dumped in _dump_segment(scan.storage, meta, segment.number):
            stamp = dumped.stamp
            if stamp is not None and stamp.stream == number and stamp.next_offset > first:
                return stamp.append_time_ms
    return span.first_time_ms


def in_use(storage: Storage) -> bool:
    """Whether a broker has the directory: it holds the lock then, which is tried and let go."""
    try:
        storage.lock(LOCK_FILE).release()
    except (FileNotFoundError, StorageRefused):
        return False  # Where nothing can be locked, no broker starts.
    except JournalLocked:
        return True
    return False


def verify(directory: str | Path, ring: str | None = None) -> Iterator[Finding]:
    """Read every batch of every ring (or one) and yield what is wrong with the data directory.

    First come findings of the directory's own files, with an empty ring; then those of each ring,
    with its progress before them. The last finding of each ring is `ok` when nothing is wrong.
    Raises FileNotFoundError: there is no such directory.
    """
    storage = FileStorage(directory, read_only=True)
    if in_use(storage):
        yield Finding("", "locked", "a broker has this directory open: what follows may change")
    try:
        identity, why = find_identity(storage)
        if why:
            yield Finding("", "restorable", f"{IDENTITY_FILE}: {why}")
        if identity is None:
            yield Finding("", "missing", f"{storage.describe()} has no file {IDENTITY_FILE}")
        else:
            _, why = find_epoch(storage, identity)
            if why:
                yield Finding("", "restorable", f"{EPOCH_FILE}: {why}")
    except (JournalCorrupt, OSError) as error:
        yield Finding("", "damaged", str(error))
    for entry in unknown_entries(storage):
        yield Finding("", "unknown", f"{entry.file}: {entry.reason}")
    for name in all_names(storage):
        if ring is None or name == ring:
            yield from _verify_ring(storage, name)


def _verify_ring(storage: Storage, name: str) -> Iterator[Finding]:
    """Yield the findings of one ring, with its progress before them, for verify().

    Every batch is read and checked, and each index file compared with what was read.
    """
    try:
        scan = scan_ring(storage, name, trust_indexes=False)
        expected = expected_of(storage, name)
        _, why = find_meta(scan.storage, expected)
    except (JournalError, OSError) as error:
        yield Finding(name, "damaged", str(error))
        return
    if why:
        yield Finding(name, "restorable", f"{RING_FILE}: {why}")
    done = total = 0
    for done, total in scan.steps():
        yield Finding(name, "progress", f"{done} of {total} segments", done, total)
    findings = [
        Finding(
            name,
            "missing" if damage.reason == MISSING else "damaged",
            f"positions {damage.from_lsn} to {damage.to_lsn}: {damage.reason}",
            done,
            total,
        )
        for damage in scan.damages
    ]
    findings += [
        Finding(name, "restorable", f"{segment_name(number)} was cut off at {size} bytes")
        for number, size in scan.short.items()
    ]
    findings += [
        Finding(
            name,
            "dropped",
            f"unconfirmed, from {tail.from_lsn} to {tail.to_lsn}: {tail.reason}",
            done,
            total,
        )
        for tail in scan.dropped
    ]
    findings += [
        Finding(name, "unknown", f"{entry.file} {entry.reason}", done, total)
        for entry in scan.unknown
    ]
    if expected is not None and expected.ring != scan.ring:
        reason = "its manifest is of another ring, or its directory is another ring's"
        findings.append(Finding(name, "damaged", reason, done, total))
    findings += _verify_indexes(scan, name)
    yield from findings
    if not findings and not why:
        yield Finding(
            name, "ok", f"{scan.batches} batches up to position {scan.end_lsn}", done, total
        )


def _verify_indexes(scan: Scan, name: str) -> list[Finding]:
    """Return what is wrong with a ring's index files: without segment, damaged, or contradicting.

    scan: has read every batch, and so made an index of each segment anew (`live`).
    """
    findings = [
        Finding(name, "index", f"{file} has no segment, or cannot be read; it will be made anew")
        for file in scan.orphans
    ]
    for segment in scan.segments:
        file = index_name(segment.number)
        data = read_file(scan.storage, file)
        live = segment.live
        if data is None or live is None:
            continue  # a segment need not have an index file
        index = read_index(data, scan.ring, segment.number)
        if index is None:
            findings.append(Finding(name, "index", f"{file} is damaged; it will be made anew"))
        elif not _agree(index, live.spans, live.table()):
            findings.append(Finding(name, "damaged", f"{file} does not agree with its segment"))
    return findings


def _agree(index: StoredIndex, spans: object, table: bytes) -> bool:
    """Whether an index file says the same as an index made anew of the segment.

    spans: the totals of the new one by stream. table: its entries, as an index file has them.
    """
    if index.spans != spans:
        return False
    # Entries may be cut otherwise, as their writer may have had another interval: then what the
    # entries of each stream cover together is compared.
    return index.table == table or _covered(index.table) == _covered(table)


def _covered(table: bytes) -> dict[int, list[int]]:
    """Return what the entries of each stream cover together; empty where entries overlap.

    That is: positions, offsets, batches and bytes, which do not depend on where entries are cut.
    """
    rows = np.frombuffer(table, ENTRY_DTYPE)
    covered = {}
    for stream in np.unique(rows["stream"]).tolist():
        mine = rows[rows["stream"] == stream]
        ends = mine["position"].astype(np.int64) + mine["bytes"]
        # Entries of one stream neither overlap in offsets nor in the file.
        if np.any(mine["next"][:-1] > mine["base"][1:]) or np.any(ends[:-1] > mine["position"][1:]):
            return {}
        sparse = stream >= UNINDEXED_FROM  # whose entries cover others' batches, too
        covered[stream] = [
            int(mine["position"][0]),
            int(ends[-1]),
            int(mine["base"][0]),
            int(mine["next"][-1]),
            int(mine["batches"].sum()),
            0 if sparse else int(mine["bytes"].astype(np.int64).sum()),
        ]
    return covered


def all_names(storage: Storage) -> list[str]:
    """Names of the rings that are there, and of those that should be."""
    return sorted({*ring_names(storage), *expected_names(storage)})


def ring_storage(storage: Storage, name: str) -> Storage:
    """Return the directory of a ring; an empty one for a ring that is missing.

    A scan of the empty one tells the segments that the ring's manifest names as missing.
    """
    if name in ring_names(storage):
        return storage.child(RINGS).child(directory_name(name))
    return MemoryStorage(f"{storage.describe()}/{RINGS}/{directory_name(name)}")


def scan_ring(storage: Storage, name: str, *, trust_indexes: bool) -> Scan:
    """Return a Scan that reads a ring as an opening would, not begun yet.

    For stat, verify, dump and repair. storage: the data directory. trust_indexes: whether segments
    with a good index file are taken from it, and not read. Raises JournalCorrupt: nothing tells the
    ring's facts; OSError.
    """
    ring = ring_storage(storage, name)
    expected = expected_of(storage, name)
    meta, _ = find_meta(ring, expected)
    if meta is None:
        raise JournalCorrupt("ring", f"missing in {ring.describe()}")
    settings = RingSettings(segment_bytes=meta.segment_bytes)
    marks, failed_name = ring, FAILED_FILE
    # A journal has the marks of its failed rings in a directory; a ring by itself has its own.
    if FAILED in storage.children():
        marks, failed_name = storage.child(FAILED), directory_name(name)
    failed = read_mark(marks, failed_name, Failed)
    return Scan(ring, meta, settings, failed=failed, expected=expected, trust_indexes=trust_indexes)


def dump(
    directory: str | Path, ring: str, from_lsn: int = 0, to_lsn: int | None = None
) -> Iterator[Dumped]:
    """Yield every batch between two positions, damaged and missing places named and stepped over.

    For `malamute journal dump`. It ends where the last segment's batches end. Raises
    FileNotFoundError: there is no directory; JournalCorrupt: it has no such ring.
    """
    storage = FileStorage(directory, read_only=True)
    if ring not in all_names(storage):
        raise JournalCorrupt(RINGS, f"there is no ring {ring} in {storage.describe()}")
    # Read once more as an opening does: what is missing, or cut off at the end of a segment, the
    # batches that are there do not tell.
    scan = scan_ring(storage, ring, trust_indexes=False).run()
    meta = RingMeta(scan.ring, scan.segment_bytes)
    lost = [(damage.from_lsn, damage.to_lsn, damage.reason) for damage in scan.damages]
    for dumped in _dump_found(scan.storage, meta, lost):
        if to_lsn is not None and dumped.lsn >= to_lsn:
            return
        if dumped.lsn >= from_lsn or (dumped.fault and dumped.lsn + dumped.size > from_lsn):
            yield dumped


def _dump_found(
    place: Storage, meta: RingMeta, lost: list[tuple[int, int, str]]
) -> Iterator[Dumped]:
    """Yield all batches by segment, and each lost range in which no batch names a fault.

    lost: (from, to, reason) of what a scan found damaged or missing.
    """
    size = meta.segment_bytes
    # Segments that there are, and those that should be.
    numbers = {number for number in map(segment_number, place.names()) if number is not None}
    numbers |= {low // size for low, _, _ in lost}
    for number in sorted(numbers):
        base = number * size
        here = [(low, high, why) for low, high, why in lost if base <= low < base + size]
        named: list[int] = []
        if segment_name(number) in place.names():
            for dumped in _dump_segment(place, meta, number):
                if dumped.fault:
                    named.append(dumped.lsn)
                yield dumped
        for low, high, reason in here:
            if not any(low <= lsn < high for lsn in named):
                yield Dumped(low, high - low, None, "damaged", b"", reason)


def _dump_segment(place: Storage, meta: RingMeta, number: int) -> Iterator[Dumped]:
    """Yield each batch of a segment as it lies there, and damaged parts by their positions.

    For dumps, and for the time of a stream's oldest batch (_first_time_ms). Batches left from the
    file's last use are none: they say other positions.
    """
    size, base = meta.segment_bytes, number * meta.segment_bytes
    try:
        data = memoryview(place.read(place.open(segment_name(number)), 0, size))
    except OSError as error:
        yield Dumped(base, size, None, "damaged", b"", str(error))
        return
    header = read_segment_header(bytes(data[:SEGMENT_HEADER_BYTES]))
    if header is None or header.ring != meta.uuid:
        reason = "the segment's header is damaged" if header is None else "of another ring"
        yield Dumped(base, SEGMENT_HEADER_BYTES, None, "damaged", b"", reason)
    position = SEGMENT_HEADER_BYTES
    while len(data) - position >= STAMP_BYTES:
        found = check(data, base, position)
        if isinstance(found, FoundBatch):
            stamp = found.stamp
            known = stamp.control_kind < len(CONTROL_KINDS)
            kind = CONTROL_KINDS[stamp.control_kind] if known else "unknown"
            begin = position + stamp.stamp_bytes
            content = b""
            if found.content_good and stamp.control_kind != PADDING:
                content = bytes(data[begin : position + stamp.size])
            yield Dumped(stamp.lsn, stamp.size, stamp, kind, content, found.reason)
            position += stamp.size
            continue
        following = next(candidates(data, base, position), None)
        if following is None:
            return  # the end of the batches, or damage up to the segment's end, which a scan tells
        yield Dumped(base + position, following - position, None, "damaged", b"", found)
        position = following
