"""Arrow tables of batches that are views of mapped files.

Owns which segments the views of the last table lie in. The rules: the views are right if none of
these segments was overwritten until they were used; a segment is let go of, and asked for the last
time, when nothing refers to a view of it any more; a small batch is copied, into chunks of many
records. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from malamute_protocol.batch import Batch
from malamute_protocol.columns import Array
from malamute_protocol.merging import is_small
from malamute_protocol.schema import Schemas
from malamute_py.mapped.batch import MappedBatch
from malamute_py.mapped.errors import Overwritten

if TYPE_CHECKING:
    import pyarrow as pa


class _Lent(NamedTuple):
    """A segment of which views were given out."""

    batch: MappedBatch
    """One batch of it, which is asked whether the segment was overwritten."""
    data: weakref.ref[Array]
    """The segment's bytes as an array, which the views keep, and nothing else does."""


class ArrowTables:
    """The tables that one reading makes, one after the other."""

    def __init__(self) -> None:
        self._lent: dict[int, _Lent] = {}
        """Segment (its id) -> where views of the last table lie, as long as they are in use."""
        self._overwritten: list[tuple[int, int]] = []
        """Offsets of a batch whose segment was overwritten before its last view went, if any."""

    def table(
        self, batches: Iterable[Batch], decode: bool, declared: Callable[[], Schemas | None]
    ) -> pa.Table:
        """Return all batches as one table. Raises Overwritten: the ring came round meanwhile.

        decode: plain columns instead of dictionaries. declared: asked for the schema of a table of
        no batches.
        """
        import pyarrow as pa

        from malamute_protocol.merging import merged

        self.forget()
        pieces = list(self._pieces(merged(_small_ones_copied(batches)), decode))
        schema = pieces[0].schema if pieces else _schema(declared(), decode)
        table = pa.Table.from_batches(pieces, schema)
        self.check()
        return table

    def reader(
        self, batches: Iterable[Batch], decode: bool, declared: Callable[[], Schemas | None]
    ) -> pa.RecordBatchReader:
        """Return a reader of all batches, each of which is read as it is asked for.

        decode, declared: as of table().
        """
        import pyarrow as pa

        self.forget()
        pieces = self._pieces(batches, decode)
        first = next(pieces, None)  # its schema is that of the reader, which is to have one at once
        if first is None:
            return pa.RecordBatchReader.from_batches(_schema(declared(), decode), iter(()))

        begun = [first]
        del first  # nothing here is to keep views that the caller let go of

        def all_of_them() -> Iterator[pa.RecordBatch]:
            """Yield the piece that was taken for its schema, and then the others."""
            yield begun.pop()
            yield from pieces

        return pa.RecordBatchReader.from_batches(begun[0].schema, all_of_them())

    def _pieces(self, batches: Iterable[Batch], decode: bool) -> Iterator[pa.RecordBatch]:
        """Yield each batch as an Arrow record batch, all of one schema."""
        version = 0
        for batch in batches:
            if batch.schemas is not None and not version:
                # All pieces have one schema: a version that comes later is cast to it.
                version = batch.schemas.newest
            yield self._piece(batch, decode, version)  # no name: a name would keep its views

    def _piece(self, batch: Batch, decode: bool, version: int) -> pa.RecordBatch:
        """Return a batch as an Arrow record batch, whose views are known to check().

        version: of the schema to which a typed batch is cast. Raises as Batch.to_arrow().
        """
        if not isinstance(batch, MappedBatch) or not batch.gives_views:
            return batch.to_arrow(decode=decode, schema=version)
        lent = batch.over(self._data(batch))
        try:
            return lent.to_arrow(decode=decode, schema=version)
        finally:
            batch.told = lent.told

    def _data(self, batch: MappedBatch) -> Array:
        """Return the bytes of a batch's segment as the array of which all its views are made."""
        key = id(batch.segment)  # the batch that is kept beside it keeps the segment, too
        lent = self._lent.get(key)
        data = None if lent is None else lent.data()
        if data is None:
            data = np.frombuffer(batch.segment.view, np.uint8)
            gone = partial(_let_go, self._lent, self._overwritten, batch)
            self._lent[key] = _Lent(batch, weakref.ref(data, gone))
        return data

    def check(self) -> None:
        """Raise Overwritten unless all views of the last table were right until now.

        Of views that nothing refers to any more: until the last one of their segment went.
        """
        if self._overwritten:
            raise Overwritten(*self._overwritten[0])
        for lent in list(self._lent.values()):
            lent.batch.check()

    def forget(self) -> None:
        """Have check() answer for no table, and let go of the segments."""
        self._lent.clear()
        self._overwritten.clear()


def _let_go(
    lent: dict[int, _Lent],
    overwritten: list[tuple[int, int]],
    batch: MappedBatch,
    data: weakref.ref[Array],
) -> None:
    """Let go of a segment of which no view is left, once it was asked whether they were right.

    Called by the weak reference `data`, in the thread in which the last view went.
    """
    if not batch.intact() and not overwritten:
        overwritten.append((batch.stamp.base_offset, batch.stamp.next_offset))
    key = id(batch.segment)
    known = lent.get(key)
    if known is not None and known.data is data:  # otherwise there are new views of it already
        del lent[key]


def _small_ones_copied(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield all batches, copies of those that are small: merged() makes chunks of these."""
    for batch in batches:
        if isinstance(batch, MappedBatch) and is_small(batch):
            batch = batch.copy()
        yield batch


def _schema(declared: Schemas | None, decode: bool) -> pa.Schema:
    """Return the schema of a table of no batches: the newest that the stream has declared."""
    from malamute_protocol.arrow import arrow_schema, schema_of

    if declared is None:
        return arrow_schema(decode=decode)
    schema: pa.Schema = schema_of(declared, declared.newest)
    return schema
