"""Known batches: a search takes rows out of a large batch without reading all of it again.

Owns the checksums of a batch's blocks (8 KiB each), taken when the batch was read whole and its
checksum was good, and where the rows lie that the last selections (a pattern, with bounds of client
time) found in it. The rules: a row is taken only if
all blocks that were read for it, or its body alone where its place was remembered, had their
checksum good at that moment; a batch is known by its place and its stamp, so that another batch
that lies there later is never taken for it; what is not known, or does not fit, is read whole, by
which its damage is named. Kept in memory and bounded there, for all rings of the process. Source:
FORMAT.md, section 8.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeAlias

import google_crc32c
import numpy as np

from malamute_protocol.columns import I4, I8, NO_TIME
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError
from malamute_protocol.gather import Row, gatherable
from malamute_protocol.header import HeaderTable
from malamute_protocol.stamp import Stamp
from malamute_py.journal.check import CRC_FROM

KNOWN_FROM: Final = 64 << 10
"""Size of a batch from which on it is known: a smaller one is read whole as fast."""
KNOWN_BYTES_MAX: Final = 32 << 20
"""Bytes that what is known may take, about: enough for some 25 GiB of batches of 1 MiB, or 12 GiB
of which four selections found a row in 1,000 of 140 bytes."""
SELECTIONS_MAX: Final = 4
"""Selections whose rows of one batch are remembered: the ones that were noted last."""
_BLOCK_BYTES: Final = 8 << 10
_BYTES_A_BATCH: Final = 600
"""Bytes of what is known of one batch beside its checksums and its header table, about."""
_TABLE_FACTOR: Final = 8
"""Bytes of a header table in memory for each of its bytes in a batch, about."""
_BYTES_A_SELECTION: Final = 150
"""Bytes of what one selection found in a batch beside the rows, about."""
_FOUND: Final = struct.Struct("<IqqIII")
"""A row that was found: its place among the batch's rows, the number of its header in the table,
its client time; of its body the position in the blob, the size and the checksum."""

Read: TypeAlias = Callable[[int, int], bytes]
"""(position in a segment, size) -> a copy of these bytes, shorter or empty if they are unreadable.
Raises OSError."""
Choose: TypeAlias = Callable[[HeaderTable, Any, Any], Any]
"""(table, each row's subject code, each row's client time or None) -> the wanted rows, ascending;
None: the batch is to be read whole."""


class KnownBatch:
    """One large batch of rows that consist of a header, a client time and a blob."""

    __slots__ = ("_blob", "_body", "_codes", "_crcs", "_fields", "_lead", "_times", "_width",
                 "found", "held", "size", "stamp", "table", "weight")  # fmt: skip

    def __init__(self, stamp: Stamp, lead: bytes, content: Content, crcs: array[int]) -> None:
        """lead: the stamp as it lies on disk, compared before rows are taken.

        crcs[i]: checksum of the content before block i; the last one is of all of it.
        """
        sections = content.sections  # where each column begins in the content; -1: there is none
        self.stamp = stamp
        self.size = stamp.size
        self.table = content.table
        self.weight = 0
        """Bytes that this object takes, about."""
        self.held = True
        """False once it was forgotten."""
        self.found: dict[Hashable, bytes] = {}
        """Selection -> the rows that it found, each as _FOUND. Changed by KnownBatches alone."""
        self._lead = lead
        self._codes, self._fields = sections.subject_codes, sections.field_codes
        self._times = sections.client_time
        self._body = sections.body
        # The body is the offsets of all bodies and of their end, then the blob.
        self._blob = sections.body + I4.itemsize * (content.head.count + 1)
        widths = np.diff(content.bodies().offsets)
        self._width = int(widths[0]) if bool((widths == widths[0]).all()) else -1
        """Bytes of each body; -1: they differ."""
        self._crcs = crcs

    def rows(
        self,
        read: Read,
        at: int,
        choose: Choose,
        remember: Callable[[bytes], None] | None = None,
    ) -> list[Row] | None:
        """Return the chosen rows, by the batch's columns and their bodies; None: read it whole.

        For a search by a selection that is new to this batch. at: position of the batch in its
        segment. remember: is given these rows, each as _FOUND.
        Raises OSError: a page cannot be read.
        """
        stamp, count = self.stamp, self.stamp.count
        if read(at, len(self._lead)) != self._lead:
            return None  # another batch lies here by now
        # Where all bodies have one width, their offsets are not read: the places tell them.
        stop = self._blob if self._width < 0 else self._body
        first, columns = self._read_checked(read, at, self._codes, stop)
        if not columns:
            return None  # damaged
        codes = np.frombuffer(columns, I4, count, self._codes - first)
        times = None
        if self._times >= 0:
            times = np.frombuffer(columns, I8, count, self._times - first)
        places = choose(self.table, codes, times)
        if places is None:
            return None  # too many to be taken out one by one
        if self._width < 0:
            bounds = np.frombuffer(columns, I4, count + 1, self._body - first)
            begins, ends = bounds[places].tolist(), bounds[places + 1].tolist()
        else:
            begins = (places * self._width).tolist()
            ends = [begin + self._width for begin in begins]
        # One number for subject and field map together, as HeaderTable.headers() takes it.
        wide = len(self.table.fieldmaps) + 1
        # Without a column of field codes all rows have the only field map (1), or none (0).
        fields: Any = int(wide > 1)
        if self._fields >= 0:
            fields = np.frombuffer(columns, I4, count, self._fields - first)[places] + 1
        pairs = (codes[places] * np.int64(wide) + fields).tolist()
        headers = self.table.headers(pairs)
        told = [NO_TIME] * len(places) if times is None else times[places].tolist()
        bodies = self._bodies(read, at, begins, ends)
        if bodies is None:
            return None
        numbers = places.tolist()
        if remember is not None:
            crcs = map(google_crc32c.value, bodies)
            found = map(_FOUND.pack, numbers, pairs, told, begins, map(len, bodies), crcs)
            remember(b"".join(found))
        base, appended = stamp.base_offset, stamp.append_time_ms
        return [
            Row(header, base + place, appended, time, body)
            for place, header, time, body in zip(numbers, headers, told, bodies, strict=True)
        ]

    def found_by(self, read: Read, at: int, selection: Hashable) -> list[Row] | None:
        """Return the rows that a selection found before, each body read by itself and checked.

        at: position of the batch in its segment. None: the selection is not remembered, or what
        lies there is not what it found. Raises OSError.
        """
        packed = self.found.get(selection)
        if packed is None or read(at, len(self._lead)) != self._lead:
            return None
        places = list(_FOUND.iter_unpack(packed))
        headers = self.table.headers([header for _, header, *_ in places])
        blob = at + self.stamp.stamp_bytes + self._blob
        rows: list[Row] = []
        crc_of = google_crc32c.value
        base, appended = self.stamp.base_offset, self.stamp.append_time_ms
        for header, (place, _, time, begin, size, crc) in zip(headers, places, strict=True):
            body = read(blob + begin, size)
            if crc_of(body) != crc:
                return None
            rows.append(Row(header, base + place, appended, time, body))
        return rows

    def _bodies(
        self, read: Read, at: int, begins: list[int], ends: list[int]
    ) -> list[bytes] | None:
        """Return bodies by their bounds in the blob; None: the blocks of one are not good.

        Of each body the blocks that it touches are read and checked.
        """
        # As _read_checked() for each, without the calls, which are half of the time of a row.
        crcs, extend, found = self._crcs, google_crc32c.extend, []
        covered = at + self.stamp.stamp_bytes + CRC_FROM
        size = self.size - self.stamp.stamp_bytes - CRC_FROM
        blob = self._blob - CRC_FROM
        for begin, end in zip(begins, ends, strict=True):
            low = (blob + begin) // _BLOCK_BYTES
            high = (blob + end + _BLOCK_BYTES - 1) // _BLOCK_BYTES
            first = low * _BLOCK_BYTES
            data = read(covered + first, min(high * _BLOCK_BYTES, size) - first)
            # The checksum before these blocks, carried on over them, is the one after them.
            if extend(crcs[low], data) != crcs[high]:
                return None
            found.append(data[blob + begin - first : blob + end - first])
        return found

    def _read_checked(self, read: Read, at: int, begin: int, end: int) -> tuple[int, bytes]:
        """Read the blocks that hold [begin, end) of the content, and check them.

        Returns (position in the content of the first byte, the bytes; none: they are not good).
        """
        low, high = (begin - CRC_FROM) // _BLOCK_BYTES, -(-(end - CRC_FROM) // _BLOCK_BYTES)
        first = CRC_FROM + low * _BLOCK_BYTES
        stop = min(CRC_FROM + high * _BLOCK_BYTES, self.size - self.stamp.stamp_bytes)
        data = read(at + self.stamp.stamp_bytes + first, stop - first)
        # The checksum before these blocks, carried on over them, is the one after them.
        if google_crc32c.extend(self._crcs[low], data) != self._crcs[high]:
            return first, b""
        return first, data


class KnownBatches:
    """Batches of any ring, those that were asked for last. Used from any thread."""

    def __init__(self, bytes_max: int = KNOWN_BYTES_MAX) -> None:
        """bytes_max: beyond it the batch that was not asked for the longest is forgotten."""
        self._bytes_max = bytes_max
        self._bytes = 0
        self._held: OrderedDict[tuple[bytes, int], KnownBatch] = OrderedDict()
        self._table: HeaderTable | None = None
        """Table of the batch that was noted last, which is counted with the first that has it."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, ring: bytes, lsn: int, size: int) -> KnownBatch | None:
        """Return the known batch of this size at a position of a ring; None: it is not known.

        For each index entry that a search is to read.
        """
        if size < KNOWN_FROM:
            return None
        key = ring, lsn
        with self._lock:
            found = self._held.get(key)
            if found is None or found.size != size:
                return None
            self._held.move_to_end(key)  # it is forgotten last
            return found

    def note(self, ring: bytes, stamp: Stamp, data: Any, at: int) -> None:
        """Note a batch that was read whole and found good, if it is large and its rows are plain.

        Called where few of its rows were wanted. Its blocks get checksums, so that later searches
        read some of them. data: bytes, with the batch at `at`.
        """
        if stamp.size < KNOWN_FROM:
            return
        begin, end = at + stamp.stamp_bytes, at + stamp.size
        try:
            content = Content(memoryview(data)[begin:end])
            if not gatherable(content) or content.subject_codes is None:
                return
            content.check_codes()
            content.bodies()
        except BatchError:
            return  # The reader that takes it apart tells what is wrong with it.
        covered = np.frombuffer(data, np.uint8, end - begin - CRC_FROM, begin + CRC_FROM)
        crc, crcs = 0, array("I", (0,))
        for first in range(0, len(covered), _BLOCK_BYTES):
            crc = google_crc32c.extend(crc, covered[first : first + _BLOCK_BYTES])
            crcs.append(crc)
        if crc != stamp.content_crc:
            return  # overwritten since it was found good
        known = KnownBatch(stamp, bytes(data[at:begin]), content, crcs)
        known.weight = _BYTES_A_BATCH + crcs.itemsize * len(crcs)
        head, key = content.head, (ring, stamp.lsn)
        with self._lock:
            # A table that batches share one after the other counts once.
            if known.table is not self._table:
                known.weight += _TABLE_FACTOR * (head.subjects_bytes + head.fieldmaps_bytes)
                self._table = known.table
            old = self._held.pop(key, None)
            self._held[key] = known
            self._bytes += known.weight
            if old is not None:
                self._forget(old)
            self._bound()

    def remember(self, batch: KnownBatch, selection: Hashable, found: bytes) -> None:
        """Note the rows that a selection found in a batch, each as _FOUND.

        The batch keeps those of its last SELECTIONS_MAX selections.
        """
        with self._lock:
            if not batch.held:
                return  # forgotten meanwhile: its weight counts no more
            before = batch.found.pop(selection, None)
            if before is None and len(batch.found) >= SELECTIONS_MAX:
                # The selection that was noted longest ago is forgotten.
                before = batch.found.pop(next(iter(batch.found)))
            batch.found[selection] = found
            more = len(found) + _BYTES_A_SELECTION
            if before is not None:
                more -= len(before) + _BYTES_A_SELECTION
            batch.weight += more
            self._bytes += more
            self._bound()

    def _bound(self) -> None:
        """Forget batches until what is known is within its bound. The caller has the lock."""
        while self._bytes > self._bytes_max:
            _, asked_for_longest_ago = self._held.popitem(last=False)
            self._forget(asked_for_longest_ago)

    def _forget(self, batch: KnownBatch) -> None:
        """Take a batch that left the table out of the count of bytes. The caller has the lock."""
        batch.held = False
        self._bytes -= batch.weight


KNOWN: Final = KnownBatches()
"""Batches that searches of this process have read whole."""
