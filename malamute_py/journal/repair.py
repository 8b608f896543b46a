"""Repairs at opening: what recovery found is made fit to be written on.

Owns every write between reading a ring back and serving it. The rule: what is kept is
synced anew before any reader sees it, what cannot be understood is left as it is, and only
files that are ours and hold nothing of their own are removed. Source: FORMAT.md,
section 7.
"""

from __future__ import annotations

from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.journal.layout import REWRITE_FILE, SegmentHeader
from malamute_py.journal.recovery import Scan
from malamute_py.journal.segment import Segment
from malamute_py.journal.storage import Storage, read_around
from malamute_py.journal.types import SEGMENT_HEADER_BYTES

_STEP_BYTES = 1 << 20


def repair(scan: Scan, epoch: int, *, after_failed_sync: bool) -> tuple[str, ...]:
    """Make the ring on disk what the scan says, at an opening; returns the files written anew.

    epoch: the new one. after_failed_sync: a marker says that a sync failed, so that pages
    which read well may never reach the disk: the tail is copied to new files.
    """
    # The letters and numbers of FORMAT.md, section 7, stand for what is done: F1, F8, F11, F6, E2,
    # E1, E7.
    storage = scan.storage
    for name in scan.temporaries + scan.orphans:
        storage.remove(name)
    rewritten: list[str] = []
    for segment in scan.segments + scan.spares:
        if segment.number in scan.short:
            # Made whole before anything else is written to it: beyond its end nothing is
            # allocated, and a full disk would refuse amid an append.
            rewrite(storage, segment, scan, epoch)
            rewritten.append(segment.name)
    for segment in scan.unfinished:
        # A spare without its header: its preparation was interrupted.
        write_header(storage, segment, scan.ring, epoch, scan.segment_bytes, scan.safe_lsn)
    # Segments with batches that nothing proves to be durable.
    tail = _reaching_beyond(scan.segments, scan.safe_lsn, scan.segment_bytes)
    if after_failed_sync:
        for segment in tail + scan.spares:
            rewrite(storage, segment, scan, epoch)
            rewritten.append(segment.name)
    elif storage.persistent and not scan.clean:
        for segment in tail:
            _write_again(storage, segment, scan)
    if storage.persistent and not after_failed_sync:
        _clear_end(storage, scan)
    if scan.temporaries or scan.orphans or scan.unfinished or rewritten:
        storage.sync_directory()
    return tuple(rewritten)


def write_header(
    storage: Storage, segment: Segment, ring: bytes, epoch: int, segment_bytes: int, synced: int
) -> None:
    """Write and sync the header that makes a file this segment.

    synced: LSN before which the whole ring is durable by now, which a start relies on.
    """
    file = segment.file or storage.open(segment.name)
    header = SegmentHeader(ring, segment.number, epoch, segment_bytes, synced)
    storage.write(file, 0, [header.pack()])
    storage.sync(file)
    segment.header_lsn = synced


def rewrite(storage: Storage, segment: Segment, scan: Scan, epoch: int) -> None:
    """Copy what is kept of a segment to a new file and put that in its place.

    For a file that was cut off, or whose pages may never reach the disk after a failed sync. The
    copy has its size whole, with zeros after what is kept.
    """
    size = scan.segment_bytes
    keep = min(max(scan.end_lsn - segment.base_lsn, SEGMENT_HEADER_BYTES), size)
    data = scan.bytes_of(segment)
    file = storage.create(REWRITE_FILE, size)
    header = SegmentHeader(scan.ring, segment.number, epoch, size, scan.safe_lsn)
    storage.write(file, 0, [header.pack()])
    for position in range(SEGMENT_HEADER_BYTES, keep, _STEP_BYTES):
        storage.write(file, position, [data[position : min(position + _STEP_BYTES, keep)]])
    if storage.persistent:
        zeros = bytes(_STEP_BYTES)
        for position in range(keep, size, _STEP_BYTES):
            storage.write(file, position, [memoryview(zeros)[: min(_STEP_BYTES, size - position)]])
    storage.sync(file)
    storage.rename(REWRITE_FILE, segment.name)
    storage.sync_directory()
    segment.file = storage.open(segment.name)


def _reaching_beyond(segments: list[Segment], lsn: int, segment_bytes: int) -> list[Segment]:
    """Return the segments that end after a position, for repair().

    lsn: the scan's safe_lsn, before which all is durable. Batches in these segments may not be:
    they are written over themselves and synced, or copied to new files.
    """
    return [segment for segment in segments if segment.base_lsn + segment_bytes > lsn]


def _write_again(storage: Storage, segment: Segment, scan: Scan) -> None:
    """Write the part of a segment that is not proven durable again, as it is, and sync it.

    The process that wrote it may have died after a sync that failed without a witness;
    its pages would then be marked clean and never written. Writing the same bytes over
    themselves makes the sync mean something, and can tear nothing: old and new are equal.
    """
    file = segment.file or storage.open(segment.name)
    begin = max(scan.safe_lsn - segment.base_lsn, 0)
    stop = min(scan.end_lsn - segment.base_lsn, scan.segment_bytes)
    if stop <= begin:
        return
    data = scan.bytes_of(segment)
    for position in range(begin, stop, _STEP_BYTES):
        storage.write(file, position, [data[position : min(position + _STEP_BYTES, stop)]])
    storage.sync(file)


def _clear_end(storage: Storage, scan: Scan) -> None:
    """Wipe the stamp of a dropped batch at the ring's end, where the next one will be written.

    Every stamp begins with the same eight bytes. Were they all that a power loss kept of
    the next one, they would complete the old one: a dropped batch would be back.
    """
    last = scan.segments[-1] if scan.segments else None
    if last is None or scan.end_lsn >= last.base_lsn + scan.segment_bytes:
        return
    position = scan.end_lsn - last.base_lsn
    file = last.file or storage.open(last.name)
    if any(read_around(storage, file, position, STAMP_BYTES)):
        storage.write(file, position, [bytes(STAMP_BYTES)])
        storage.sync(file)
