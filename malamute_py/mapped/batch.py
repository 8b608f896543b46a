"""A batch that lies in a broker's file.

Owns the guarantee. The rules: a batch is handed out with both checksums good; what is made of it as
Python objects is made of a copy that was checked after it was made; what stays a view (its content,
and the bodies and times of to_arrow()) is right until the ring comes round, and check() tells
whether that has happened. Nothing that is computed with, as an offset or a code, stays a view: so
bytes that change give wrong values at worst, and those are told. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from malamute_protocol.batch import Batch, Record
from malamute_protocol.columns import Array
from malamute_protocol.content import Content
from malamute_protocol.content_layout import ARROW
from malamute_protocol.errors import BatchError
from malamute_protocol.extract import extract, extractable
from malamute_protocol.gather import Row, gatherable, rows_of
from malamute_protocol.stamp import Stamp
from malamute_py.journal.check import FoundBatch, check
from malamute_py.journal.gathering import ROWS_A_TAKEN, TAKEN_MAX
from malamute_py.journal.known import KNOWN
from malamute_py.mapped.errors import Overwritten
from malamute_py.mapped.segments import SegmentMap

if TYPE_CHECKING:
    import pyarrow as pa


def takes_out(content: Content, rows: Array | None) -> bool:
    """Whether to copy the delivered rows without their batch: they are few, and can be cut out."""
    if rows is None or int(np.count_nonzero(rows)) * ROWS_A_TAKEN > len(rows):
        return False
    return extractable(content)


def gathers(content: Content, rows: Array | None) -> bool:
    """Whether rows that takes_out() allows are so few that those of several batches become one."""
    return rows is not None and int(np.count_nonzero(rows)) <= TAKEN_MAX and gatherable(content)


class MappedBatch(Batch):
    """Records of one stream, as views of the broker's file; see the module for what holds."""

    def __init__(
        self, stamp: Stamp, content: Content, rows: Array | None, segment: SegmentMap
    ) -> None:
        """rows: mask of the delivered rows; None: all. segment: the mapping that has `content`."""
        super().__init__(stamp, content, rows)
        self.segment = segment
        self.told = False
        """True once Overwritten was raised for this batch."""
        self._copy: Batch | None = None

    @property
    def copied(self) -> bool:
        """Return whether a copy was made: for records(), bodies(), or Arrow of some rows."""
        return self._copy is not None

    @property
    def gives_views(self) -> bool:
        """Return whether to_arrow() gives views: not of some rows, of a typed stream, or a copy."""
        head = self.content.head
        return self.rows is None and self._copy is None and head.body_kind != ARROW

    def over(self, data: Array) -> MappedBatch:
        """Return the batch with a content that is a view of an array, for tables (tables.py).

        data: the bytes of its segment. A weak reference to the array tells when no view is left.
        """
        stamp = self.stamp
        begin = stamp.lsn - self.segment.base_lsn + stamp.stamp_bytes
        content = Content(data.data[begin : begin + len(self.content.view)])
        return MappedBatch(stamp, content, self.rows, self.segment)

    def intact(self) -> bool:
        """True when everything that was taken from the views until now was right."""
        return self.segment.intact()

    def check(self) -> None:
        """Raise Overwritten unless everything taken from the views until now was right."""
        if not self.segment.intact():
            self.told = True
            raise Overwritten(self.stamp.base_offset, self.stamp.next_offset)

    def copy(self) -> Batch:
        """Return the batch with bytes of its own, which stay what they are. Raises Overwritten."""
        if self._copy is None:
            stamp = self.stamp
            begin = stamp.lsn - self.segment.base_lsn
            data = memoryview(bytes(self.segment.view[begin : begin + stamp.size]))
            # Checked after it was made: the ring may have come round while bytes were copied.
            found = check(data, stamp.lsn, 0)
            if not isinstance(found, FoundBatch) or not found.content_good or found.stamp != stamp:
                self.told = True
                raise Overwritten(stamp.base_offset, stamp.next_offset)
            self._copy = Batch(stamp, Content(data[stamp.stamp_bytes :]), self.rows)
            self._copy.schemas = self.schemas
        return self._copy

    def taken_out(self) -> Batch:
        """The delivered rows alone, as a derived batch with bytes of its own.

        For some rows of a content that extractable() allows. Raises Overwritten, BatchError.
        """
        try:
            stamp, content = extract(self.stamp, self.content, self.rows)
        except (BatchError, IndexError, ValueError):
            self.check()  # bytes that were overwritten may look like anything: this is the reason
            raise
        self.check()
        return Batch(Stamp.unpack(stamp), Content(content))

    def taken_rows(self) -> list[Row]:
        """The delivered rows, to be gathered, with bytes of their own.

        For rows of a content that gathers() allows. The batch is known to later searches. Raises
        Overwritten: the ring has come round; BatchError: the batch is damaged.
        """
        try:
            rows = rows_of(self.stamp, self.content, self.indices)
        except (BatchError, IndexError, ValueError):
            self.check()  # bytes that were overwritten may look like anything: this is the reason
            raise
        self.check()
        # Checksums of its blocks are kept, so that the next search reads only the rows' blocks.
        segment = self.segment
        KNOWN.note(segment.ring, self.stamp, segment.view, self.stamp.lsn - segment.base_lsn)
        return rows

    def records(self) -> Iterator[Record]:
        """The delivered records, of a copy. Raises Overwritten."""
        return self.copy().records()

    def bodies(self) -> list[bytes]:
        """Bodies of the delivered records, copied.

        Raises Overwritten; TypeError when the body kind is not blob.
        """
        return self.copy().bodies()

    def to_arrow(
        self, *, decode: bool = False, header: Sequence[str] = (), schema: int = 0
    ) -> pa.RecordBatch:
        """The delivered records as an Arrow record batch, bodies and times without a copy.

        Where rows are missing, and of a typed stream, all of it is a copy. decode, header, schema:
        as of Batch.to_arrow(). Raises Overwritten, and what that raises.
        """
        if not self.gives_views:
            return self.copy().to_arrow(decode=decode, header=header, schema=schema)
        from malamute_protocol.arrow import to_arrow

        try:
            return to_arrow(self, decode=decode, unchanged=self.check)
        except (BatchError, IndexError):
            self.check()  # what was overwritten amid it may look like anything
            raise
