"""Typed streams beside a running broker: the columns of the schema, also once it has grown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from malamute_py import EmbeddedBroker
from malamute_py.mapped import open_reader

columns: Any = pa.schema  # its stubs know one form of columns at a time
OLD: pa.Schema = columns([("n", pa.int32())])
NEW: pa.Schema = columns([("n", pa.int64()), ("s", pa.string())])


def test_a_reader_of_the_files_gets_typed_columns_of_every_version(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker, broker.connect_sync() as client:
        client.create_stream("s", schema=OLD)
        client.publish_table("s", pa.table({"n": pa.array([1, 2], pa.int32())}), subject="a")
        with open_reader(tmp_path) as log, log.read("s", start="earliest") as reading:
            first = reading.next_batch(5_000)
            assert first is not None
            assert first.to_arrow().schema == OLD
            client.edit_stream("s", schema=NEW)
            client.publish_table("s", pa.table({"n": [3], "s": ["x"]}), subject="b")
            second = reading.next_batch(5_000)
            assert second is not None
            found = second.to_arrow(header=["subject"], decode=True)
            assert found.to_pylist() == [{"subject": "b", "n": 3, "s": "x"}]
        with open_reader(tmp_path) as log:
            table = log.read("s", until="tail").to_arrow()
            assert table.schema == NEW
            assert table.column("n").to_pylist() == [1, 2, 3]
            assert log.read("s", "b", until="tail").to_arrow().to_pylist() == [{"n": 3, "s": "x"}]
            assert log.read("s", "none", until="tail").to_arrow() == NEW.empty_table()
            assert log.read("s", "none", until="tail").arrow_reader().schema == NEW
