"""Appending: where batches go, what their stamps say, and how they are written.

Owns the end of the ring. The rule: a bundle is laid out first, its space is secured
second, written third, and becomes part of the ring only when all of it is written; an
offset is never given twice. Runs in the loop thread. Source: FORMAT.md, sections 3 to 5.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from malamute_protocol.stamp import (
    CONTROL,
    DATA,
    EPOCH_START,
    LAST_OF_BUNDLE,
    PADDING,
    SNAPSHOT,
    STAMP_BYTES,
    Stamp,
)
from malamute_py.journal.check import Found, check, content_facts, header_table
from malamute_py.journal.errors import BatchTooLarge, DiskFull, JournalFailed
from malamute_py.journal.layout import SnapshotOut, control_content, pack_file
from malamute_py.journal.marks import parse_snapshot
from malamute_py.journal.recovery import Scan
from malamute_py.journal.segment import Segment
from malamute_py.journal.space import Space
from malamute_py.journal.storage import File, Storage
from malamute_py.journal.streams import StreamTable
from malamute_py.journal.types import (
    SEGMENT_HEADER_BYTES,
    Append,
    Appended,
    AppendLike,
    Buffer,
)

SnapshotSource: TypeAlias = Callable[[], Sequence[bytes]]
_Placed: TypeAlias = list[tuple[int, int, AppendLike]]
"""(LSN, size, batch) of everything that a bundle writes, the journal's own included."""

_EMPTY_CONTENT, _EMPTY_CRC = control_content([])
_EPOCH_START: Final = Append(0, 0, 1, 0, _EMPTY_CONTENT, _EMPTY_CRC, None, EPOCH_START)
_PADDING: Final = Append(0, 0, 0, 0, b"", 0, None, PADDING)


class Appender:
    """The writing end of one ring."""

    def __init__(
        self,
        storage: Storage,
        space: Space,
        streams: StreamTable,
        epoch: int,
        scan: Scan,
        fail: Callable[[str], JournalFailed],
    ) -> None:
        """scan: where the ring ends. fail: seals the ring and returns what to raise."""
        self.end = scan.end_lsn
        """Position after the last bundle; swapped when a bundle is whole."""
        self.last_time_ms = scan.last_time_ms
        self.last_epoch = scan.epoch
        self._storage = storage
        self._space = space
        self._streams = streams
        self._epoch = epoch
        self._fail = fail
        self._segment_bytes = scan.segment_bytes
        self._raw_snapshots: list[int] = []
        """As-of positions of raw snapshots whose bundle is not whole yet."""

    def append(
        self, batches: Sequence[AppendLike], synced: int, snapshot_source: SnapshotSource
    ) -> Appended:
        """See Ring.append. synced: goes into the stamps."""
        self._check(batches)
        begin = self.end
        placed: _Placed = []
        lsn, size = begin, self._segment_bytes
        turned = 0
        bundle: Sequence[AppendLike] = batches
        if self.last_epoch != self._epoch:
            if self.last_epoch > self._epoch:
                raise ValueError(f"this ring follows epoch {self.last_epoch}: open it anew to lead")
            bundle = [_EPOCH_START, *batches]
        snapshot: Append | None = None
        for batch in bundle:
            need = STAMP_BYTES + len(batch.content)
            rest = -lsn % size
            if need > rest:
                if snapshot is None:
                    snapshot = self._snapshot_batch(begin, snapshot_source)
                lsn = self._turn(placed, lsn, rest, need, snapshot)
                turned += 1
            placed.append((lsn, need, batch))
            lsn += need
        if turned:
            self._secure(turned)
        stamps = self._stamps(placed, synced)
        self._write(placed, stamps, turned)
        self._commit(placed, begin, turned)
        if len(placed) != len(batches):
            own = (EPOCH_START, SNAPSHOT, PADDING)
            pairs = zip(stamps, placed, strict=True)
            stamps = [stamp for stamp, (_, _, batch) in pairs if batch.control_kind not in own]
        return Appended(tuple(stamps), placed[0][0], self.end)

    def _secure(self, turned: int) -> None:
        most = self._space.bundle_segments_max
        if turned > most:
            raise BatchTooLarge(
                f"a bundle over {turned} new segments, at most {most}: raise ring_bytes, or"
                " split the bundle"
            )
        try:
            self._space.need(turned)
        except OSError as error:
            # Nothing was written but zeros and names, which are done again next time: the
            # ring is as well as before, it only has no room yet.
            raise DiskFull(f"no segment could be prepared ({error}); check the disk") from error

    def _check(self, batches: Sequence[AppendLike]) -> None:
        if not batches:
            raise ValueError("a bundle has at least one batch")
        following: dict[int, int] = {}
        states = self._streams.states
        for batch in batches:
            if len(batch.content) % 8:
                raise ValueError(f"a content of {len(batch.content)} bytes is not a multiple of 8")
            if batch.control_kind != DATA:
                if batch.control_kind in (EPOCH_START, SNAPSHOT, PADDING):
                    raise ValueError("epoch starts, snapshots and padding are the journal's own")
                continue
            stream = batch.stream
            after = following.get(stream)
            if after is None:
                state = states.get(stream)
                after = 0 if state is None else state.next
            if batch.base_offset < after:
                raise ValueError(
                    f"stream {stream}: offset {batch.base_offset} would be given twice,"
                    f" the next one is {after}"
                )
            following[stream] = batch.base_offset + batch.count

    def _turn(
        self,
        placed: _Placed,
        lsn: int,
        rest: int,
        need: int,
        snapshot: Append,
    ) -> int:
        """Go on at the next segment, which begins with a snapshot; returns the position."""
        snapshot_bytes = STAMP_BYTES + len(snapshot.content)
        room = self._segment_bytes - SEGMENT_HEADER_BYTES - snapshot_bytes
        if need > room:
            raise BatchTooLarge(
                f"a batch of {need} bytes; a segment has {room} beside its header and the"
                f" snapshot of {snapshot_bytes}: use larger segments or smaller batches"
            )
        if rest >= STAMP_BYTES:
            placed.append((lsn, rest, _PADDING))
        lsn += rest + SEGMENT_HEADER_BYTES
        placed.append((lsn, snapshot_bytes, snapshot))
        return lsn + snapshot_bytes

    def _snapshot_batch(self, as_of_lsn: int, source: SnapshotSource) -> Append:
        facts = SnapshotOut(as_of_lsn, self.last_time_ms, self._streams.rows())
        bodies = [pack_file(facts), *source()]
        content, crc = control_content(bodies)
        return Append(0, 0, len(bodies), 0, content, crc, None, SNAPSHOT)

    def _stamps(self, placed: _Placed, synced: int) -> list[bytes]:
        bundle_lsn = placed[0][0]
        epoch, last_time = self._epoch, self.last_time_ms
        last = len(placed) - 1
        stamps = []
        for at, (lsn, size, batch) in enumerate(placed):
            kind = batch.control_kind
            flags = LAST_OF_BUNDLE if at == last else 0
            if kind:
                flags |= CONTROL
            time_ms = batch.append_time_ms
            if time_ms > last_time:
                last_time = time_ms
            stamps.append(
                Stamp(
                    flags,
                    lsn,
                    bundle_lsn,
                    synced,
                    epoch,
                    batch.base_offset,
                    last_time,
                    batch.stream,
                    0,
                    size,
                    batch.count,
                    kind,
                    batch.content_crc,
                ).pack()
            )
        return stamps

    def _write(self, placed: _Placed, stamps: list[bytes], turned: int) -> None:
        """One write for each segment that the bundle touches."""
        segment_bytes = self._segment_bytes
        segments = self._space.segments
        files = {s.number: s.file for s in (*segments[-1:], *list(self._space.spares)[:turned])}
        number = -1
        buffers: list[Buffer] = []
        start = 0
        try:
            for stamp, (lsn, _, batch) in zip(stamps, placed, strict=True):
                if lsn // segment_bytes != number:
                    if buffers:
                        self._write_run(files, number, start, buffers)
                    number, start = divmod(lsn, segment_bytes)
                    buffers = []
                buffers.append(stamp)
                if batch.control_kind != PADDING:
                    buffers.append(batch.content)
            self._write_run(files, number, start, buffers)
        except OSError as error:
            raise self._explained(error) from error

    def _write_run(
        self, files: dict[int, File | None], number: int, start: int, buffers: list[Buffer]
    ) -> None:
        file = files[number]
        assert file is not None
        self._storage.write(file, start, buffers)

    def _commit(self, placed: _Placed, begin: int, turned: int) -> None:
        """Everything is written: make it part of the ring."""
        space, epoch = self._space, self._epoch
        segment = space.segments[-1] if space.segments else None
        begun = space.begin(turned) if turned else []
        time_ms = self.last_time_ms
        for lsn, size, batch in placed:
            if batch.append_time_ms > time_ms:
                time_ms = batch.append_time_ms
            kind = batch.control_kind
            if kind == SNAPSHOT:
                if segment is not None:
                    segment.last_time_ms = max(segment.last_time_ms, self.last_time_ms)
                segment = begun.pop(0)
            assert segment is not None
            segment.last_epoch = epoch
            segment.last_time_ms = time_ms
            if kind:
                continue
            base = batch.base_offset
            place = (lsn - segment.base_lsn, size, base, base + batch.count)
            self._index(segment, batch.stream, place, time_ms, epoch, batch.content, batch.keys)
        self.last_time_ms = time_ms
        self.last_epoch = epoch
        self._set_end(placed[-1][0] + placed[-1][1])
        if turned:
            space.note_snapshot(self.end, begin)

    def _index(
        self,
        segment: Segment,
        stream: int,
        place: tuple[int, int, int, int],
        time_ms: int,
        epoch: int,
        content: Buffer,
        keys: Any,
    ) -> None:
        """Publish one data batch: place is (position, size, base offset, next offset)."""
        live = segment.live
        assert live is not None
        client, expires_ms = content_facts(content)
        if keys is None:
            keys = header_table(content)
        position, size, base, after = place
        live.add(stream, position, size, base, after, time_ms, client, expires_ms, keys)
        self._streams.note_batch(stream, base, after, epoch, size)

    # --- raw, for followers -------------------------------------------------------------

    def append_raw(self, lsn: int, data: Buffer) -> int:
        """See Ring.append_raw."""
        size = self._segment_bytes
        number, position = divmod(lsn, size)
        turned = 0
        if self.end % size == 0:
            turned = 1
            begins = self.end + SEGMENT_HEADER_BYTES
        else:
            begins = self.end
        if lsn != begins:
            raise ValueError(f"raw data for position {lsn}, the ring goes on at {begins}")
        founds = self._check_raw(memoryview(data), lsn, size - position)
        if turned:
            self._secure(turned)
        segments = self._space.segments
        target = self._space.spares[0] if turned else segments[-1]
        assert target.number == number
        assert target.file is not None
        try:
            self._storage.write(target.file, position, [data])
        except OSError as error:
            raise self._explained(error) from error
        if turned:
            self._space.begin(turned)
        for found in founds:
            self._take_raw(target, found, memoryview(data))
        last = founds[-1].stamp
        self.last_epoch = last.epoch
        self.last_time_ms = max(self.last_time_ms, last.append_time_ms)
        self._set_end(last.lsn + last.size)
        return self.end

    def _check_raw(self, data: memoryview, lsn: int, room: int) -> list[Found]:
        founds: list[Found] = []
        at, epoch = 0, self.last_epoch
        while at < len(data):
            # The stamp of a padding names the rest of the segment, which is not sent.
            found = check(data, lsn, at, room=room - at)
            if isinstance(found, str) or not found.content_good:
                reason = found if isinstance(found, str) else found.reason
                raise ValueError(f"raw data for position {lsn + at}: {reason}")
            if found.stamp.epoch < epoch:
                raise ValueError(f"raw data of epoch {found.stamp.epoch} after epoch {epoch}")
            epoch = found.stamp.epoch
            founds.append(found)
            if found.stamp.control_kind == PADDING:
                if at + found.stamp.stamp_bytes != len(data):
                    raise ValueError(f"raw data goes on after the padding at {lsn + at}")
                break
            at += found.stamp.size
        if not founds:
            raise ValueError("raw data without a batch")
        return founds

    def _take_raw(self, segment: Segment, found: Found, data: memoryview) -> None:
        stamp = found.stamp
        segment.last_epoch = stamp.epoch
        segment.last_time_ms = stamp.append_time_ms
        content = data[found.position + stamp.stamp_bytes : found.position + stamp.size]
        if stamp.control_kind == SNAPSHOT:
            snapshot = parse_snapshot(stamp.lsn, content)
            if snapshot is not None:
                self._raw_snapshots.append(snapshot.facts.as_of_lsn)
                for stream, row in snapshot.facts.streams.items():
                    self._streams.note_row(stream, row)
        elif stamp.control_kind == DATA:
            place = (
                stamp.lsn - segment.base_lsn,
                stamp.size,
                stamp.base_offset,
                stamp.next_offset,
            )
            time_ms = stamp.append_time_ms
            self._index(segment, stamp.stream, place, time_ms, stamp.epoch, content, None)
        if stamp.flags & LAST_OF_BUNDLE:
            # Not before its bundle is whole: half a bundle is dropped at the next opening.
            for as_of_lsn in self._raw_snapshots:
                self._space.note_snapshot(stamp.lsn + stamp.size, as_of_lsn)
            self._raw_snapshots.clear()

    def _set_end(self, end: int) -> None:
        rest = -end % self._segment_bytes
        self.end = end + rest if rest < STAMP_BYTES else end

    def _explained(self, error: OSError) -> Exception:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"the disk is full: {error}")
        return self._fail(f"a write failed ({error})")
