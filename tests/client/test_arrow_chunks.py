"""Tables of many chunks as batches: small neighbours share a batch, large chunks are not copied."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from malamute_protocol.content import Content
from malamute_protocol.encode import encode_columns
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.limits import DEFAULT_LIMITS
from malamute_py.client.session import calls
from malamute_py.client.session.calls import arrow_contents
from tests.client.script import bodies_of


def chunked(chunks: list[Any], keys: list[Any] | None = None) -> pa.Table:
    columns: Any = {"body": pa.chunked_array(chunks)}
    if keys is not None:
        columns["key"] = pa.chunked_array(keys)
    return pa.table(columns)


def contents(table: Any, batch_bytes: int = 1_000, subject: str = "") -> list[Content]:
    made = arrow_contents(table, "body", subject, None, batch_bytes, DEFAULT_LIMITS)
    return [Content(content) for content in made]


def rows(found: list[Content]) -> list[tuple[str, bytes]]:
    listed: list[tuple[str, bytes]] = []
    for content in found:
        content.verify()
        codes = content.subject_codes
        keys = content.table.keys
        places = [0] * content.head.count if codes is None else codes.tolist()
        named = [keys[place][0] if keys[place] else "" for place in places]
        listed += zip(named, bodies_of(content), strict=True)
    return listed


@pytest.mark.moderate
async def test_a_table_of_tiny_chunks_is_published_in_few_batches(shell: Any) -> None:
    bodies = [b"%04d" % number for number in range(2_000)]
    keys = [f"k{number % 300}" for number in range(2_000)]
    table = chunked(
        [pa.array([body]) for body in bodies],
        [pa.array(keys[:999]).dictionary_encode(), pa.array(keys[999:]).dictionary_encode()],
    )
    [confirmed] = await shell.do("publish_arrow", "s", table, subject="key")
    assert (confirmed.offset, confirmed.count) == (0, 2_000)
    records = await shell.take(shell.client.subscribe("s", start="earliest"), 2_000)
    assert [(record.subject, bytes(record.body)) for record in records] == list(
        zip(keys, bodies, strict=True)
    )


def test_neighbours_fill_a_batch_and_no_more() -> None:
    table = chunked([pa.array([b"x" * 300, b"y" * 100])] * 7)
    found = contents(table)
    assert [content.head.count for content in found] == [4, 4, 4, 2]
    assert [body for _, body in rows(found)] == [b"x" * 300, b"y" * 100] * 7


def test_a_batch_of_tiny_chunks_has_no_more_records_than_it_may() -> None:
    table = chunked([pa.array([b"x"] * 40_000)] * 3)
    assert [content.head.count for content in contents(table, 1 << 20)] == [40_000] * 3


@pytest.fixture
def blobs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the blobs that were encoded."""
    seen: list[int] = []
    encode = encode_columns

    def noted(bounds: Any, blob: Any, **options: Any) -> bytes:
        seen.append(blob.address)
        return encode(bounds, blob, **options)

    monkeypatch.setattr(calls, "encode_columns", noted)
    return seen


def address(column: Any) -> int:
    found: int = column.buffers()[2].address
    return found


def test_a_large_chunk_amid_small_ones_is_not_copied(blobs: list[int]) -> None:
    large = pa.array([b"x" * 600, b"y" * 600])
    table = chunked([pa.array([b"a"]), pa.array([b"b"]), large, pa.array([b"c"]), pa.array([b"d"])])
    found = contents(table)
    assert [content.head.count for content in found] == [2, 1, 1, 2]
    assert blobs.count(address(large)) == 2
    assert b"".join(body for _, body in rows(found)) == b"ab" + b"x" * 600 + b"y" * 600 + b"cd"


def test_chunks_of_columns_that_are_not_published_do_not_count(blobs: list[int]) -> None:
    bodies = pa.array([b"1", b"2", b"3"])
    table = chunked([bodies])
    table = table.append_column("other", pa.chunked_array([pa.array([1]), pa.array([2, 3])]))
    assert [content.head.count for content in contents(table)] == [3]
    assert blobs == [address(bodies)], "nothing was put together"


KINDS = [
    pa.binary(), pa.large_string(), pa.binary_view(), pa.string_view(),
    pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int8(), pa.binary()),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_chunks_of_any_kind_of_text_come_together(kind: Any) -> None:
    # 300 names need wider numbers than each of the three dictionaries has.
    names = [f"name {number}, of more bytes than a view holds" for number in range(300)]
    chunks = [
        pa.chunked_array([pa.array(names[first : first + 100], pa.string())]).cast(kind).chunk(0)
        for first in (0, 100, 200)
    ]
    bodies = [pa.array(names[first : first + 100]) for first in (0, 100, 200)]
    [content] = contents(chunked(bodies, chunks), 1 << 20, "key")
    assert rows([content]) == [(name, name.encode()) for name in names]
    [content] = contents(chunked(chunks), 1 << 20)
    assert [body.decode() for _, body in rows([content])] == names


def test_nulls_in_a_later_chunk_are_named() -> None:
    for table in (
        chunked([pa.array([b"1"]), pa.array([None], pa.binary())]),
        chunked([pa.array([b"1"])] * 2, [pa.array(["a"]), pa.array([None], pa.string())]),
        chunked([pa.array([b"1"])] * 2, [
            pa.DictionaryArray.from_arrays(pa.array([0]), pa.array(["a", None])),
            pa.DictionaryArray.from_arrays(pa.array([1]), pa.array(["a", None])),
        ]),
    ):  # fmt: skip
        with pytest.raises(LocalProtocolError, match="has nulls"):
            contents(table, subject="key" if "key" in table.column_names else "")
