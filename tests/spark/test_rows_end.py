"""The end of a task's rows, as PySpark's worker makes them."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.serializers import ArrowStreamSerializer

from pyspark_malamute.rows_end import end_check


def rows_of(stream: Any) -> Iterator[Any]:
    """Rows from a worker's socket, as PySpark hands them to a writer."""
    return map(_flattened, ArrowStreamSerializer().load_stream(stream))


def _flattened(batch: Any) -> Any:
    return batch


def sent(after: bytes) -> io.BufferedReader:
    made: Any = pa
    batch = made.record_batch({"body": ["a", "b"]})
    sink = io.BytesIO()
    with made.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return io.BufferedReader(io.BytesIO(sink.getvalue() + after))


@pytest.mark.parametrize(
    ("after", "whole"),
    [
        (b"\xff\xff\xff\xfc", True), (b"\xff\xff\xff\xfcmore", True),
        (b"", False), (b"\xff", False), (b"\xff\xff\xff\xff", False),
    ],
)  # fmt: skip
def test_rows_are_whole_where_spark_says_so_after_them(after: bytes, whole: bool) -> None:
    rows = rows_of(sent(after))
    ended = end_check(rows)
    assert [batch.num_rows for batch in rows] == [2]
    assert ended() is whole
    assert ended() is whole


def test_rows_of_a_connection_that_broke_are_cut_off() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as stream:
        rows = rows_of(stream)
        ended = end_check(rows)
        theirs.sendall(sent(b"").read())
        assert next(rows).num_rows == 2
        theirs.shutdown(socket.SHUT_WR)
        assert not ended()


def test_rows_that_come_from_elsewhere_are_believed() -> None:
    assert end_check(iter([1]))()
    assert end_check(row for row in [1])()
    assert end_check(map(str, [1]))()
