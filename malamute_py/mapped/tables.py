"""Arrow tables of batches that are views of mapped files.

Owns which segments the views of the last table lie in. The rule: the views are right if none of
these segments was overwritten until they were used; a small batch is copied, into chunks of many
records. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from malamute_protocol.batch import Batch
from malamute_protocol.merging import is_small
from malamute_protocol.schema import Schemas
from malamute_py.mapped.batch import MappedBatch

if TYPE_CHECKING:
    import pyarrow as pa


class ArrowTables:
    """The tables that one reading makes, one after the other."""

    def __init__(self) -> None:
        self._given: dict[int, MappedBatch] = {}
        """Segment -> one batch of it, where views of the last table lie."""

    def table(
        self, batches: Iterable[Batch], decode: bool, declared: Callable[[], Schemas | None]
    ) -> pa.Table:
        """Return all batches as one table. Raises Overwritten: the ring came round meanwhile.

        decode: plain columns instead of dictionaries. declared: asked for the schema of a table of
        no batches.
        """
        import pyarrow as pa

        from malamute_protocol.merging import merged

        self._given.clear()
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

        self._given.clear()
        pieces = self._pieces(batches, decode)
        first = next(pieces, None)  # its schema is that of the reader, which is to have one at once
        if first is None:
            return pa.RecordBatchReader.from_batches(_schema(declared(), decode), iter(()))

        def all_of_them() -> Iterator[pa.RecordBatch]:
            """Yield the piece that was taken for its schema, and then the others."""
            yield first
            yield from pieces

        return pa.RecordBatchReader.from_batches(first.schema, all_of_them())

    def _pieces(self, batches: Iterable[Batch], decode: bool) -> Iterator[pa.RecordBatch]:
        """Yield each batch as an Arrow record batch, all of one schema."""
        version = 0
        for batch in batches:
            if batch.schemas is not None and not version:
                # All pieces have one schema: a version that comes later is cast to it.
                version = batch.schemas.newest
            piece = batch.to_arrow(decode=decode, schema=version)
            if isinstance(batch, MappedBatch) and not batch.copied:
                # Views: check() asks one batch of each segment whether it was overwritten.
                self._given.setdefault(id(batch.segment), batch)
            yield piece

    def check(self) -> None:
        """Raise Overwritten unless all views of the last table were right until now."""
        for batch in self._given.values():
            batch.check()

    def forget(self) -> None:
        """Have check() answer for no table, and let go of the segments."""
        self._given.clear()


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
