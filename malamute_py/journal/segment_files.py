"""The files of a ring's segments, as readers see them: indexes, bytes, batches.

Owns the caches of indexes and open files, and every read of a segment's bytes while the ring is
open. The rules: what cannot be read is zeros, which fail the check of their batch; the lock guards
the caches only, and is never held over a read. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from malamute_protocol.content import Content
from malamute_py.journal.chunks import Batch, Part, batches_in
from malamute_py.journal.index import Entries, LiveIndex, StoredIndex, read_index
from malamute_py.journal.layout import index_name
from malamute_py.journal.mapping import Mappings
from malamute_py.journal.segment import Segment
from malamute_py.journal.storage import File, Storage, read_around, read_file
from malamute_py.journal.streams import StreamTable
from malamute_py.journal.types import RingSettings


class SegmentFiles:
    """The indexes and bytes of one ring's segments."""

    def __init__(
        self,
        storage: Storage,
        ring: bytes,
        settings: RingSettings,
        streams: StreamTable,
        segments: Callable[[], tuple[Segment, ...]],
        rebuild: Callable[[Segment], LiveIndex],
        mappings: Mappings | None,
    ) -> None:
        """segments: returns the ring's present ones. rebuild: makes an index by reading a segment.

        mappings: those of the journal; None: everything is read by position.
        """
        self.storage = storage
        self.settings = settings
        self.streams = streams
        self.segments = segments
        self.ring = ring
        self._rebuild = rebuild
        self._mappings = mappings
        self._lock = threading.Lock()
        """Guards the two caches only; never held over a read."""
        self._indexes: OrderedDict[int, StoredIndex] = OrderedDict()
        """Number of a segment -> its index; the one that was used longest ago goes first."""
        self._index_bytes = 0
        """Size of all indexes in `_indexes`, bounded by index_memory_bytes."""
        self._files: OrderedDict[int, File] = OrderedDict()
        """Number of a segment -> its open file; the one that was used longest ago goes first."""

    # --- indexes and files ------------------------------------------------------------

    def index(self, segment: Segment) -> LiveIndex | StoredIndex:
        """Return the segment's index, from memory or its file, rebuilt when the file is damaged.

        For every read and search of a segment. Raises OSError: the segment cannot be read.
        """
        live = segment.live
        if live is not None:
            return live
        with self._lock:
            found = self._indexes.get(segment.number)
            if found is not None:
                self._indexes.move_to_end(segment.number)
                return found
        try:
            data = read_file(self.storage, index_name(segment.number))
        except OSError:
            data = None
        found = None if data is None else read_index(data, self.ring, segment.number)
        if found is None:
            try:
                rebuilt = self._rebuild(segment)
            except OSError:
                if not segment.retired:
                    raise
                # It went while we looked: there is nothing in it for any reader.
                return LiveIndex(interval_bytes=0, distinct_max=1)  # an empty index
            segment.live = rebuilt  # housekeeping then writes its file anew
            return rebuilt
        with self._lock:
            # Another thread may have loaded it meanwhile: one of the two counts.
            if self._indexes.setdefault(segment.number, found) is found:
                self._index_bytes += found.size
            while self._index_bytes > self.settings.index_memory_bytes and len(self._indexes) > 1:
                _, old = self._indexes.popitem(last=False)
                self._index_bytes -= old.size
        return found

    def forget(self, number: int) -> None:
        """Drop what is cached of a retired segment: its file may become another one's."""
        with self._lock:
            old = self._indexes.pop(number, None)
            if old is not None:
                self._index_bytes -= old.size
            self._files.pop(number, None)

    def file(self, segment: Segment) -> File:
        """Return the segment's file, opened if need be. Raises OSError."""
        held = segment.file
        if held is not None:
            return held  # still open from its writing
        with self._lock:
            cached = self._files.get(segment.number)
            if cached is not None:
                self._files.move_to_end(segment.number)
                return cached
        opened = self.storage.open(segment.name)
        with self._lock:
            self._files[segment.number] = opened
            while len(self._files) > self.settings.open_files_max:
                self._files.popitem(last=False)
        return opened

    # --- bytes and batches ------------------------------------------------------------

    def opened(self, segment: Segment) -> File | None:
        """The segment's file; None: it is retired, or the file is gone.

        Raises OSError when the file cannot be opened (too many are, say): that is no damage.
        """
        try:
            return self.file(segment)
        except OSError as error:
            if segment.retired or isinstance(error, FileNotFoundError):
                return None
            raise

    def read(self, segment: Segment, position: int, size: int) -> bytes:
        """Return bytes of a segment; unreadable pages are zeros, and so fail their batch's check.

        A retired segment, or one whose file is gone, gives zeros. Raises as opened().
        """
        file = self.opened(segment)
        return bytes(size) if file is None else read_around(self.storage, file, position, size)

    def view(self, segment: Segment, position: int, size: int) -> memoryview:
        """Return bytes of a segment, mapped where it is sealed and enough is wanted of it.

        Otherwise, and where a page cannot be read, as read().
        """
        mappings = self._mappings
        if mappings is not None and segment.file is None:
            file = self.opened(segment)
            if file is not None:
                mapped = mappings.view(self.storage, segment, file, position, size)
                if mapped is not None:
                    return mapped
        return memoryview(self.read(segment, position, size))

    def entries(self, stream: int) -> Iterator[tuple[Segment, Entries]]:
        """Yield each segment with batches of a stream, and their entries, for look-ups by time."""
        state = self.streams.states.get(stream)
        if state is None:
            return
        for segment in self.segments():
            span = segment.spans.get(stream)
            if span is not None and span.next > state.first:
                yield segment, self.index(segment).entries(stream, state.first, state.next)

    def batches(self, segment: Segment, stream: int, row: Any) -> list[tuple[Batch, memoryview]]:
        """Read and check the batches of one index entry; each comes with the bytes of all.

        Callers take a batch's content out of these bytes, in which `batch.at` counts (content_of).
        One that failed its check is in the list, without `found`: each caller decides what that
        means. row: the entry. Returns none if the segment was retired.
        """
        position, size = int(row["position"]), int(row["bytes"])
        entry = (position, size, int(row["base"]), int(row["next"]))
        view = self.view(segment, position, size)
        # A segment that was retired before the look may have been written over during the read.
        if segment.retired:
            return []
        part = Part(position, size, [entry])
        batches = batches_in(view, segment.base_lsn + position, part, stream)
        return [(batch, view) for batch in batches]

    def contents(self, segment: Segment, stream: int, row: Any) -> Iterator[tuple[Batch, Content]]:
        """Yield the good batches of one index entry with their contents, for searches and plans."""
        for batch, view in self.batches(segment, stream, row):
            if batch.found is not None:
                yield batch, content_of(batch, view)


def content_of(batch: Batch, view: memoryview) -> Content:
    """Return the content of a batch that was found in these bytes."""
    assert batch.found is not None
    begin = batch.at + batch.found.stamp.stamp_bytes
    return Content(view[begin : batch.at + batch.size])
