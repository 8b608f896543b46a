"""Properties of every batch, found by hypothesis rather than by example."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malamute_protocol.batch import (
    Batch,
    Content,
    Stamp,
    encode,
    encode_lists,
    extract,
    iter_batches,
    row_bitmap,
    rows_from_bitmap,
)
from malamute_protocol.errors import BatchError
from tests.seeds import examples

NAMES = ("offset", "keys", "fields", "parts", "client_time_ms", "expires_at_ms", "properties", "id")

texts = st.text(max_size=12)
key_lists = st.lists(texts, min_size=1, max_size=3).map(tuple)
field_maps = st.one_of(st.none(), st.dictionaries(texts, texts, max_size=3))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
property_maps = st.one_of(st.none(), st.dictionaries(texts, scalars, max_size=3))
times = st.integers(-(2**62), 2**62)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[list[bytes]], dict[str, Any]]:
    """(blobs of each record, options) of a batch in any form; one blob a record: `single`."""
    n = draw(st.integers(1, 40))

    def column(kind: st.SearchStrategy[Any]) -> Any:
        return draw(st.lists(kind, min_size=n, max_size=n))

    pool = draw(st.lists(st.one_of(texts, key_lists), min_size=1, max_size=4))
    options: dict[str, Any] = {"subject": column(st.sampled_from(pool))}
    if draw(st.booleans()):
        maps = draw(st.lists(field_maps, min_size=1, max_size=4))
        options["fields"] = column(st.sampled_from(maps))
    if draw(st.booleans()):
        options["client_time_ms"] = column(st.one_of(st.none(), times))
    if draw(st.booleans()):
        options["expires_at_ms"] = column(st.integers(0, 2**62))
    if draw(st.booleans()):
        properties = draw(st.lists(property_maps, min_size=1, max_size=4))
        options["properties"] = column(st.sampled_from(properties))
    options["codec"] = draw(st.sampled_from(["none", "none", "gzip", "snappy", "lz4", "zstd"]))
    width = draw(st.one_of(st.none(), st.integers(0, 9)))
    blob = st.binary(max_size=80) if width is None else st.binary(min_size=width, max_size=width)
    if draw(st.booleans()):
        options["single"] = True
        return [[body] for body in column(blob)], options
    return column(st.lists(blob, max_size=3)), options


def encoded(bodies: list[list[bytes]], options: dict[str, Any]) -> bytes:
    options = dict(options)
    if options.pop("single", False):
        return encode([body for (body,) in bodies], **options)
    return encode_lists(bodies, **options)


def stamp_of(content: bytes, base_offset: int = 100) -> Stamp:
    view = Content(content)
    size, count, crc = 96 + len(content), len(view), view.head.content_crc
    return Stamp(1, 0, 0, 0, 2, base_offset, 1_700_000_000_000, 1, 0, size, count, 0, crc)


def seen(batch: Batch) -> list[tuple[Any, ...]]:
    return [
        tuple(dict(v) if isinstance(v := getattr(r, n), dict) else v for n in NAMES) for r in batch
    ]


@pytest.mark.moderate
@given(rows())
def test_what_was_encoded_is_what_is_seen(case: tuple[list[list[bytes]], dict[str, Any]]) -> None:
    bodies, options = case
    content = encoded(bodies, options)
    assert len(content) % 8 == 0
    (batch,) = iter_batches([stamp_of(content).pack() + content])
    batch.verify()
    n = len(bodies)
    assert len(batch) == n
    subjects = [(s,) if isinstance(s, str) else s for s in options["subject"]]
    for row, record in enumerate(batch):
        assert record.offset == 100 + row
        assert record.keys == subjects[row]
        assert record.fields == (options.get("fields", [None] * n)[row] or {})
        assert record.parts == bodies[row]
        assert record.client_time_ms == options.get("client_time_ms", [None] * n)[row]
        assert record.expires_at_ms == (options.get("expires_at_ms", [0] * n)[row] or None)
        assert record.properties == (options.get("properties", [None] * n)[row] or {})
    headers, codes = batch.content.headers()
    row_headers = [headers[0]] * n if codes is None else [headers[i] for i in codes.tolist()]
    assert [h.keys for h in row_headers] == subjects
    assert [dict(h.fields) for h in row_headers] == [dict(r.fields) for r in batch]
    assert len(set(headers)) == len(headers)


@pytest.mark.moderate
@given(rows(), st.randoms(use_true_random=False))
def test_extracting_is_selecting_rows_and_may_be_repeated(
    case: tuple[list[list[bytes]], dict[str, Any]], random: Any
) -> None:
    bodies, options = case
    content = encoded(bodies, options | {"codec": "none"})
    stamp = stamp_of(content)
    mask = np.array([random.random() < 0.5 for _ in bodies])
    mask[random.randrange(len(bodies))] = True
    (whole,) = iter_batches([stamp.pack(), content], row_bitmap(mask))
    frames = extract(stamp, Content(content), mask)
    (derived,) = iter_batches(frames)
    derived.verify()
    assert seen(derived) == seen(whole)
    assert derived.offsets.tolist() == whole.offsets.tolist()
    assert derived.to_arrow(decode=True).equals(whole.to_arrow(decode=True))
    narrower = np.zeros(len(derived), np.bool_)
    narrower[random.randrange(len(derived))] = True
    (again,) = iter_batches(extract(derived.stamp, derived.content, narrower))
    assert seen(again) == [row for row, keep in zip(seen(derived), narrower, strict=True) if keep]


@pytest.mark.moderate
@settings(max_examples=examples(30))
@given(rows(), st.data())
def test_a_change_of_any_byte_is_caught(
    case: tuple[list[list[bytes]], dict[str, Any]], data: st.DataObject
) -> None:
    content = encoded(*case)
    stamp = stamp_of(content).pack()
    whole = stamp + content
    flips = data.draw(st.binary(min_size=8, max_size=8).filter(all))
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= flips[position % 8]
        with pytest.raises(BatchError):
            list(iter_batches([bytes(damaged)]))


@pytest.mark.moderate
@settings(max_examples=examples(30))
@given(rows())
def test_a_batch_cut_at_any_length_is_refused(
    case: tuple[list[list[bytes]], dict[str, Any]],
) -> None:
    content = encoded(*case)
    whole = stamp_of(content).pack() + content
    for length in range(1, len(whole)):
        with pytest.raises(BatchError):
            list(iter_batches([whole[:length]]))
    for length in range(len(content)):
        with pytest.raises(BatchError):
            Content(content[:length]).check()


def resealed(content: bytearray) -> bytes:
    """Return the content with a checksum that fits: damage that only validation can find."""
    content[8:12] = google_crc32c.value(bytes(content[12:])).to_bytes(4, "little")
    return bytes(content)


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(rows(), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6))
def test_damage_under_a_good_checksum_raises_batch_errors_only(
    case: tuple[list[list[bytes]], dict[str, Any]], damage: list[tuple[int, int]]
) -> None:
    content = bytearray(encoded(*case))
    for position, value in damage:
        content[position % len(content)] = value
    bad = resealed(content)
    try:
        view = Content(bad)
        view.check()
    except BatchError:
        return
    view.headers()  # what check() passed, a broker may rely on
    view.rows_of([])
    try:
        view.verify()
    except BatchError:
        return
    stamp = stamp_of(bad)
    for batch in iter_batches([stamp.pack(), bad]):
        seen(batch)
        batch.to_arrow().validate(full=True)
    if view.head.codec == 0:
        list(iter_batches(extract(stamp, view, np.ones(len(view), np.bool_))))


@given(st.binary(max_size=400))
def test_random_bytes_raise_batch_errors_only(data: bytes) -> None:
    with pytest.raises(BatchError):
        Content(data).check()
    with pytest.raises(BatchError):
        list(iter_batches([data + b"\0"]))


@pytest.mark.moderate
@settings(max_examples=examples(300))
@given(st.binary(min_size=116, max_size=500))
def test_random_bytes_behind_a_good_head_raise_batch_errors_only(data: bytes) -> None:
    data = data[: len(data) // 8 * 8 + 4]
    content = bytearray(b"MLC1\x01\x00\x80\x00\0\0\0\0" + data[: len(data) // 8 * 8 + 4])
    content[12:16] = len(content).to_bytes(4, "little")
    content[20:22] = bytes([content[20] % 5, content[21] % 3])
    content[22:24] = (int.from_bytes(content[22:24], "little") & 511).to_bytes(2, "little")
    for position in (16, 80, 84, 88, 92, 96, 100, 104, 108):
        content[position + 1 : position + 4] = b"\0\0\0"
    with suppress(BatchError):
        Content(resealed(content)).check()


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_a_row_bitmap_is_an_arrow_validity_bitmap(mask: list[bool]) -> None:
    bitmap = row_bitmap(mask)
    assert len(bitmap) == (len(mask) + 7) // 8
    assert [bool(bitmap[i // 8] >> i % 8 & 1) for i in range(len(mask))] == mask
    assert rows_from_bitmap(bitmap, len(mask)).tolist() == mask
    with pytest.raises(BatchError):
        rows_from_bitmap(bitmap + b"\0", len(mask))
    if len(mask) % 8:
        with pytest.raises(BatchError):
            rows_from_bitmap(bitmap[:-1] + b"\xff", len(mask))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_a_run_comes_apart_however_its_frames_are_cut(
    counts: list[int], data: st.DataObject
) -> None:
    pieces: list[bytes] = []
    base, bases = 0, []
    for count in counts:
        content = encode([b"x"] * count, subject="s")
        pieces += [stamp_of(content, base).pack(), content]
        bases.append(base)
        base += count
    cuts = data.draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    frames, current = [], b""
    for piece, cut in zip(pieces, cuts, strict=True):
        current += piece
        if cut:
            frames.append(current)
            current = b""
    if current:
        frames.append(current)
    # A boundary after a stamp is allowed only where the frame ends with that stamp.
    assert [b.base_offset for b in iter_batches(frames)] == bases
