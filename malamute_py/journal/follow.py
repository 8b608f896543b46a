"""Following a ring by position: whole batches of a range, from files that another writes.

Owns the read by LSN range for what keeps up with a ring: a checkpoint in a process of its own, a
replica, the broker itself at its start. The rule: nothing is written and nothing locked, a range is
read only up to where its reader was told that it is synced, every batch passed over has its stamp
checked, and what is not there any more is raised by name, never left out. A segment may be retired
and its file used again under a read: its batches then bear other positions, which is how that is
known. Source: FORMAT.md, sections 3 and 8; docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Final, TypeAlias

from malamute_protocol.stamp import PADDING, STAMP_BYTES, Stamp, stamp_here
from malamute_py.journal.check import FoundBatch, candidates, check, content_fault, stamp_or_fault
from malamute_py.journal.errors import FollowLost, JournalCorrupt
from malamute_py.journal.layout import RING_FILE, RingMeta, segment_name, segment_number
from malamute_py.journal.marks import read_meta
from malamute_py.journal.storage import File, Storage, read_around
from malamute_py.journal.types import SEGMENT_HEADER_BYTES

Wanted: TypeAlias = Callable[[Stamp], bool]
"""Decision by its stamp whether a batch is given out; it is not asked about paddings."""

_PIECE_BYTES: Final = 1 << 20


class _Part:
    """The part of a range that lies in one segment, and how far it has been read."""

    def __init__(self, number: int, segment_bytes: int, at: int, stop: int) -> None:
        """number: of the segment. at, stop: positions in it between which batches are read."""
        self.number = number
        self.name = segment_name(number)
        self.base = number * segment_bytes
        self.at = at
        """Position in the segment at which the next batch begins."""
        self.stop = stop
        """Position in the segment at which the range ends; at most the segment's end."""
        self.ended = False
        """The range ends amid this segment."""
        self.epoch = 0
        """Epoch of the last good batch."""
        self.known = 0
        """Size of the batch at `at`, when its stamp is good and its content is not."""
        self.tried = -1
        """Position in the segment at which reading was tried again after a fault."""


class Follower:
    """Reads one ring's files; see the module. One thread at a time.

    For one life of the writer: when the ring is opened again, make a new one, as recovery
    may have put new files in the place of old ones.
    """

    def __init__(
        self, storage: Storage, meta: RingMeta | None = None, *, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        """storage: the ring's directory, which may be open for reading only.

        meta: the ring's fixed facts; None reads them. piece_bytes: what one read brings.
        Raises JournalCorrupt: there is no ring, or its facts are damaged; OSError.
        """
        if meta is None:
            meta = read_meta(storage)
        if meta is None:
            raise JournalCorrupt(RING_FILE, f"there is no ring in {storage.describe()}")
        self.ring = meta.uuid
        self.position = 0
        """LSN that the last read() came to: batches before it were given out or passed over."""
        self._storage = storage
        self._segment_bytes = meta.segment_bytes
        self._piece_bytes = max(piece_bytes, STAMP_BYTES)

    def read(
        self, from_lsn: int, to_lsn: int, wanted: Wanted | None = None
    ) -> Iterator[tuple[Stamp, memoryview]]:
        """Yield the batches in [from_lsn, to_lsn) in order: stamp and content, checksums good.

        from_lsn: where a batch begins, or the end of a bundle. to_lsn: at most what is
        synced; a batch that ends beyond it is not given out. wanted: None for all; the
        others are passed over by their size. A content is a view into a larger piece:
        copy what is kept. Raises FollowLost, after everything before it was given out;
        OSError.
        """
        size, lsn = self._segment_bytes, from_lsn
        self.position = from_lsn
        while lsn < to_lsn:
            number, at = divmod(lsn, size)
            # A rest of a segment that is too small for a stamp holds nothing.
            if size - at >= STAMP_BYTES:
                stop = min(to_lsn - number * size, size)
                part = _Part(number, size, max(at, SEGMENT_HEADER_BYTES), stop)
                yield from self._read_part(part, to_lsn, wanted or _everything)
                if part.ended:
                    return
            lsn = self.position = (number + 1) * size

    def _read_part(
        self, part: _Part, to_lsn: int, wanted: Wanted
    ) -> Iterator[tuple[Stamp, memoryview]]:
        """Yield the batches of one segment's part.

        What fails its check is read once more, by the name of the file, for the segment may have
        been retired and its file used again under the read. Raises FollowLost when it fails again,
        or no file has the name any more.
        """
        # Opened for each call: another file may stand under the name the next time.
        file = self._open(part, to_lsn)
        least = STAMP_BYTES  # bytes that the next read must bring to go on
        while part.stop - part.at >= STAMP_BYTES:
            begin = part.at
            want = min(max(self._piece_bytes, least), part.stop - begin)
            data = read_around(self._storage, file, begin, want)
            fault, least = yield from self._read_piece(part, data, wanted)
            self.position = part.base + part.at
            if part.ended:
                return
            if not fault and part.at == begin and len(data) < want:
                fault = "the file is too short"
            if fault:
                if part.tried == part.at:  # the same place failed twice
                    raise self._damaged(part, file, fault)
                part.tried = part.at
                file = self._open(part, to_lsn)
        part.ended = part.stop < self._segment_bytes

    def _read_piece(
        self, part: _Part, data: bytes, wanted: Wanted
    ) -> Generator[tuple[Stamp, memoryview], None, tuple[str, int]]:
        """Yield the wanted batches in `data`, which was read of a segment from `part.at` on.

        Moves `part.at` to the first batch that was not passed. Returns what is wrong with it, ""
        when nothing is, and the bytes that must be read from there on: a batch may not be in `data`
        whole.
        """
        begin, room = part.at, part.stop - part.at
        part.known = 0
        base = part.base + begin
        view, whole = memoryview(data), len(data)
        at, last = 0, whole - STAMP_BYTES
        fault, least = "", STAMP_BYTES
        # Lean on purpose: a checkpoint passes over a million small batches here.
        while at <= last:
            stamp = stamp_here(data, at, base + at)
            if stamp is None:
                found = stamp_or_fault(data, at, base + at)
                if isinstance(found, str):
                    fault = found
                    break
                stamp = found
            after = at + stamp.size
            if stamp.control_kind == PADDING:
                # To the end of the segment; where a repair filled a hole, to what follows it.
                at = min(after, room)
                continue
            if after > room:
                part.ended = True  # the batch ends beyond the range
                break
            part.epoch = stamp.epoch
            if wanted(stamp):
                if after > whole:
                    least = stamp.size  # the next read begins with it, and brings all of it
                    break
                content_at = at + stamp.stamp_bytes
                fault = content_fault(data, content_at, after, stamp)
                if fault:
                    part.known = stamp.size
                    break
                self.position = base + after
                yield stamp, view[content_at:after]
            at = after
        part.at = begin + at
        return fault, least

    # --- what is not there ---------------------------------------------------------------

    def _open(self, part: _Part, to_lsn: int) -> File:
        """Return the segment's file, opened.

        Raises FollowLost: the segment was retired, or is lost. Reading can go on at the next one
        that there is.
        """
        try:
            return self._storage.open(part.name)
        except FileNotFoundError:
            pass
        size, numbers = self._segment_bytes, map(segment_number, self._storage.names())
        later = [number * size for number in numbers if number is not None and number > part.number]
        raise FollowLost(
            self.position,
            min([to_lsn, *later]),
            "retention",
            f"{part.name} in {self._storage.describe()} was retired or is missing; hold the"
            " ring where its follower is",
        )

    def _damaged(self, part: _Part, file: File, fault: str) -> FollowLost:
        """Return the error for a fault that was met twice; it names where reading can go on."""
        return FollowLost(
            self.position,
            part.base + self._resume(part, file),
            "damaged",
            f"{part.name} at byte {part.at}: {fault}",
        )

    def _resume(self, part: _Part, file: File) -> int:
        """Return where in the segment reading goes on after a fault: at the next good batch.

        Where there is none, that is the end of the segment, or of the range.
        """
        if part.known:
            return part.at + part.known  # the stamp is good, and tells where its batch ends
        data = memoryview(read_around(self._storage, file, part.at, part.stop - part.at))
        for place in candidates(data, part.base + part.at, 0):
            found = check(data, part.base + part.at, place)
            if isinstance(found, FoundBatch) and found.stamp.epoch >= part.epoch:
                return part.at + place
        return part.stop


def _everything(_: Stamp) -> bool:
    """Want every batch."""
    return True
