"""Writes the golden vectors beside this file: `python -m vectors.generate`.

Owns the vectors' content. The rule: expected values are the inputs, written here by hand or made
from them, never read back by our own reader; other readers (tests/protocol/independent_reader.py,
tests/interop/node) check both. Source: SPEC.md, section 18.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import msgpack
import numpy as np

from malamute_protocol.columns import NO_TIME
from malamute_protocol.content import Content
from malamute_protocol.encode import encode, encode_arrow, encode_lists
from malamute_protocol.extract import extract
from malamute_protocol.gather import Row, gather_rows
from malamute_protocol.header import Header
from malamute_protocol.stamp import Stamp, message_id, row_bitmap
from vectors.examples import BAD_PATTERNS, PATTERNS
from vectors.messages import Vector, messages, plain

HERE = Path(__file__).parent

ABOUT = {
    "format": (
        "Every vector has a `name`. An invalid one has `error`, the code with which a reader "
        "refuses it. Bytes are hexadecimal strings in the places that are named so, and "
        '{"hex": "..."} within values; integers beyond 2^53 are {"int": "..."}. `lenient`: a '
        "reader whose MessagePack library hides the difference may accept it."
    ),
    "messages": (
        "`frames` of one ZeroMQ message; `commands`: number, name, fields by name (defaults "
        "filled in), and the places in `frames` of the content frames that each owns."
    ),
    "stamps": "`hex` of one stamp; `stamp`: its fields.",
    "contents": (
        "`hex` of one content as a producer sends it; `head`: some of its head; `records`: what "
        "it holds. `codec` is named where the body cannot be read without it. `taking`: the code "
        "with which a broker refuses to take it from a client, though readers read it."
    ),
    "deliveries": (
        "`frames` and `rows` (hex or null) of one DELIVER; `records`: the delivered records, with "
        "offset, append time and message id."
    ),
    "bitmaps": "`hex` of a row bitmap for `count` records; `rows`: those selected.",
    "patterns": "`pattern` on the wire; `headers` with what it says of each.",
    "names": "`text` as the name of a stream, mailbox or service.",
    "message_ids": "`hex` of the id of (`append_time_ms`, `offset`); in ascending order.",
}


# --- stamps -------------------------------------------------------------------------------


STAMP = Stamp(1, 4096, 3840, 1024, 7, 100, 1_700_000_000_000, 12, 0, 256, 10, 0, 0xDEADBEEF)


def resealed(data: bytes) -> bytes:
    """Return a stamp or content that a vector has changed, with a CRC that fits the change."""
    return data[:8] + struct.pack("<I", google_crc32c.value(data[12:])) + data[12:]


def patched(data: bytes, position: int, form: str, value: int) -> bytes:
    """Return the bytes with one number replaced. form: of the number, as struct has it."""
    changed = bytearray(data)
    struct.pack_into(form, changed, position, value)
    return bytes(changed)


def stamps() -> Iterator[Vector]:
    """List stamps at the ends of their ranges, then broken ones."""
    extreme = Stamp(
        7,
        2**64 - 8,
        2**63,
        2**64 - 16,
        2**64 - 1,
        2**63 - 1,
        -(2**63),
        2**32 - 1,
        2**32 - 1,
        2**32 - 8,
        65536,
        6,
        2**32 - 1,
    )
    grown = resealed(patched(STAMP.pack() + bytes(8), 6, "<H", 104))
    for name, stamp in (("a common stamp", STAMP), ("numbers at their ends", extreme)):
        yield {"name": name, "hex": stamp.pack().hex(), "stamp": plain(stamp._asdict())}
    yield {
        "name": "a stamp that has grown by 8 bytes",
        "hex": grown.hex(),
        "stamp": plain(STAMP._replace(stamp_bytes=104)._asdict()),
    }
    good = STAMP.pack()
    for name, data, error in (
        ("cut by one byte", good[:-1], "bad_batch"),
        ("another magic", b"MLB2" + good[4:], "bad_batch"),
        ("version 2", resealed(patched(good, 4, "<H", 2)), "bad_batch"),
        ("88 bytes long", resealed(patched(good, 6, "<H", 88)), "bad_batch"),
        ("a flipped bit in the offset", patched(good, 48, "<Q", 101), "corrupt"),
        ("a flipped bit in the CRC", patched(good, 8, "<I", 1), "corrupt"),
        ("an unknown flag", resealed(patched(good, 12, "<I", 9)), "bad_batch"),
        ("a size below its own", resealed(patched(good, 72, "<I", 88)), "bad_batch"),
        ("a size not of eights", resealed(patched(good, 72, "<I", 257)), "bad_batch"),
    ):
        yield {"name": name, "hex": data.hex(), "error": error}


# --- contents -----------------------------------------------------------------------------


def record(
    parts: list[bytes] | bytes,
    keys: list[str],
    fields: dict[str, str] | None = None,
    client_time_ms: int | None = None,
    expires_at_ms: int | None = None,
    properties: dict[str, Any] | None = None,
) -> Vector:
    """Return a record as a vector lists it, for readers of the vector to compare with."""
    return {
        "keys": keys,
        "fields": fields or {},
        "client_time_ms": plain(client_time_ms),
        "expires_at_ms": plain(expires_at_ms),
        "properties": plain(properties or {}),
        "parts": [part.hex() for part in ([parts] if isinstance(parts, bytes) else parts)],
    }


FULL_ROWS: list[tuple[Any, ...]] = [
    (b"one", ["forex.eur"], {"currency": "EUR", "urgent": ""}, 5, None, {"trace": b"\x01\x02"}),
    (b"", ["forex.usd", "usd"], None, None, 99, None),
    (b"three", ["forex.eur"], {"currency": "EUR", "urgent": ""}, -7, 50, {"n": 1.5, "s": "ü"}),
    (b"4" * 20, ["trade"], {"market": "tokyo"}, 2**40, None, {"trace": b"\x01\x02"}),
    (b"\x00\xff", ["forex.usd", "usd"], {"currency": "USD"}, 0, 2**40, {"a": None, "b": True}),
]
FULL = encode(
    [row[0] for row in FULL_ROWS],
    subject=[row[1][0] if len(row[1]) == 1 else tuple(row[1]) for row in FULL_ROWS],
    fields=[row[2] for row in FULL_ROWS],
    client_time_ms=[row[3] for row in FULL_ROWS],
    expires_at_ms=[row[4] or 0 for row in FULL_ROWS],
    properties=[row[5] for row in FULL_ROWS],
    producer_id=2**40 + 1,
    producer_epoch=3,
    first_sequence=2**33,
)
SIMPLE = encode([b"%d" % n for n in range(10)], subject="count")


def changed(data: bytes, position: int, form: str, value: int) -> bytes:
    """Return the content with one number replaced, and a CRC that fits: nothing else is wrong."""
    return resealed(patched(data, position, form, value))


def sections(*parts: bytes) -> bytes:
    """Join parts, each padded to 8."""
    return b"".join(part + bytes(-len(part) % 8) for part in parts)


def by_hand(head: dict[int, tuple[str, int]], *parts: bytes) -> bytes:
    """Return a content that encode() would not make, of its head's numbers and its sections.

    head: position -> (form, value) of each number that is not 0.
    """
    body = sections(*parts)
    data = bytearray(b"MLC1" + struct.pack("<HH", 1, 128) + bytes(120) + body)
    struct.pack_into("<I", data, 12, len(data))
    for position, (form, value) in head.items():
        struct.pack_into(form, data, position, value)
    return resealed(bytes(data))


def contents() -> Iterator[Vector]:
    """List every form of every section, then everything that can be wrong with a content."""

    def good(name: str, data: bytes, records: list[Vector], **more: Any) -> Vector:
        """Return the vector of a content that a reader has to take, with what it reads in it."""
        head = Content(data).head
        named = ("count", "codec", "body_kind", "flags", "producer_id", "first_sequence")
        return {
            "name": name,
            "hex": data.hex(),
            "head": {field: plain(getattr(head, field)) for field in named},
            "records": records,
            **more,
        }

    yield good(
        "one subject, short bodies", SIMPLE, [record(b"%d" % n, ["count"]) for n in range(10)]
    )
    yield good("one empty record without a subject", encode([b""]), [record(b"", [""])])
    yield good("every column", FULL, [record(*row) for row in FULL_ROWS])
    yield good(
        "properties as a dictionary, fields that are constant",
        encode(
            [b"a", b"b", b"c", b"d"],
            subject="s",
            keys=["second", "third"],
            fields={"x": "1"},
            properties=[{"p": 1}, None, {"p": 1}, {"p": 1}],
        ),
        [
            record(
                b"abcd"[n : n + 1],
                ["s", "second", "third"],
                {"x": "1"},
                properties=None if n == 1 else {"p": 1},
            )
            for n in range(4)
        ],
    )
    ends = {"big": 2**63 - 1, "less": -(2**63)}
    yield good(
        "properties that are constant, no client time in any row",
        encode(
            [b"a", b"b"], properties={"big": 2**63 - 1, "less": -(2**63)}, client_time_ms=[None] * 2
        ),
        [record(b, [""], properties=ends) for b in (b"a", b"b")],
    )
    lists = [[b"a", b"", b"ccc"], [], [b"d"]]
    yield good(
        "lists of blobs",
        encode_lists(lists, subject="l"),
        [record(parts, ["l"]) for parts in lists],
    )
    for codec in ("gzip", "snappy", "lz4", "zstd"):
        bodies = [b"compress me " * 10, b"", b"x"]
        yield good(
            f"body under {codec}",
            encode(bodies, subject="z", codec=codec),
            [record(body, ["z"]) for body in bodies],
            codec=codec,
        )
    arrow = encode_arrow(b"ARROWISH" * 4, 3, subject="typed", schema_id=5)
    yield {
        "name": "an Arrow body is not looked into",
        "hex": arrow.hex(),
        "head": {"count": 3, "body_kind": 2},
    }
    grown = bytearray(SIMPLE[:128] + b"FUTURE.." + SIMPLE[128:])
    struct.pack_into("<H", grown, 6, 136)
    struct.pack_into("<I", grown, 12, len(grown))
    yield good(
        "a head that has grown by 8 bytes",
        resealed(bytes(grown)),
        [record(b"%d" % n, ["count"]) for n in range(10)],
    )
    blob = struct.pack("<3i", 0, 1, 2) + b"ab"
    numbered = [record(b"%d" % n, ["count"]) for n in range(10)]
    for name, stored in (
        ("a schema id without an Arrow body", changed(SIMPLE, 36, "<I", 7)),
        ("the first reserved byte", changed(SIMPLE, 112, "B", 1)),
        ("the last reserved byte", changed(SIMPLE, 127, "B", 1)),
    ):
        yield good(f"{name}, which a reader ignores", stored, numbered, taking="unsupported")
    counts = {16: ("<I", 2), 84: ("<I", 3), 22: ("<H", 128), 100: ("<I", 14), 104: ("<I", 14)}
    subjects = msgpack.packb(["unused", "b", ["a"]])
    yield good(
        "a table with an entry that no row uses, and a list of one key",
        by_hand(counts | {80: ("<I", len(subjects))}, subjects, struct.pack("<2i", 2, 1), blob),
        [record(b"a", ["a"]), record(b"b", ["b"])],
    )

    def bad(name: str, data: bytes, error: str = "bad_batch") -> Vector:
        """Return the vector of a content that a reader has to refuse, with the error's code."""
        return {"name": name, "hex": data.hex(), "error": error}

    yield bad("no bytes", b"")
    yield bad("a head cut by one byte", SIMPLE[:127])
    yield bad("cut by 8 bytes", SIMPLE[:-8])
    yield bad("8 bytes too many", SIMPLE + bytes(8))
    yield bad("another magic", changed(SIMPLE, 0, "<I", 0x31424C4D))
    yield bad("version 2", changed(SIMPLE, 4, "<H", 2))
    yield bad("a head of 120 bytes", changed(SIMPLE, 6, "<H", 120))
    yield bad("a head beyond the end", changed(SIMPLE, 6, "<H", 1024))
    yield bad("a flipped bit in a body", patched(SIMPLE, len(SIMPLE) - 9, "B", 0x7F), "corrupt")
    yield bad("a flipped bit in the padding", patched(SIMPLE, len(SIMPLE) - 1, "B", 1), "corrupt")
    yield bad("a flipped bit in the head", patched(SIMPLE, 24, "<Q", 1), "corrupt")
    yield bad(
        "no records",
        by_hand(
            {84: ("<I", 1), 80: ("<I", 2), 100: ("<I", 4), 104: ("<I", 4)}, b"\x91\xa0", bytes(4)
        ),
    )
    yield bad("more records than rows", changed(SIMPLE, 16, "<I", 11))
    yield bad("65537 records", changed(SIMPLE, 16, "<I", 65537), "too_large")
    yield bad("codec 5", changed(SIMPLE, 20, "B", 5))
    yield bad("body kind 3", changed(SIMPLE, 21, "B", 3))
    yield bad("an unknown flag", changed(SIMPLE, 22, "<H", 1024), "unsupported")
    yield bad("transaction control", changed(SIMPLE, 22, "<H", 64), "unsupported")
    yield bad("a transaction id", changed(SIMPLE, 48, "<Q", 5), "unsupported")
    rows = np.ones(10, np.bool_)
    derived = extract(stamp_for(SIMPLE, 0), Content(SIMPLE), rows)[1]
    yield bad("offset deltas from a producer", derived)
    yield bad("append times from a producer", encode([b"a"], append_times_ms=np.array([5])))
    yield bad("two forms of properties", changed(SIMPLE, 22, "<H", 12))
    yield bad("a flag without its column", changed(SIMPLE, 22, "<H", 1))
    yield bad("a count of parts without lists", changed(SIMPLE, 108, "<I", 1))
    yield bad(
        "a body larger than the batch may be", changed(SIMPLE, 104, "<I", 2**32 - 1), "too_large"
    )
    yield bad("two sizes of a body without codec", changed(SIMPLE, 104, "<I", 8))
    yield bad("sections beyond the end", changed(SIMPLE, 80, "<I", 2**31))
    yield bad("another count of subjects", changed(SIMPLE, 84, "<I", 2))
    yield bad("field maps counted but absent", changed(SIMPLE, 92, "<I", 1))
    at = Content(SIMPLE).sections.body
    yield bad("body offsets that fall", changed(SIMPLE, at + 8, "<i", 5))
    yield bad("body offsets that begin above 0", changed(SIMPLE, at, "<i", 1))
    yield bad("body offsets that end short", changed(SIMPLE, at + 40, "<i", 9))
    yield bad("body offsets beyond the blob", changed(SIMPLE, at + 40, "<i", 2**31 - 1))
    yield bad("a body offset below 0", changed(SIMPLE, at + 4, "<i", -1))
    places = Content(FULL).sections
    yield bad("a subject code beyond the table", changed(FULL, places.subject_codes, "<i", 9))
    yield bad("a subject code of -1", changed(FULL, places.subject_codes, "<i", -1))
    yield bad("a field code beyond the table", changed(FULL, places.field_codes, "<i", 9))
    yield bad("a field code of -2", changed(FULL, places.field_codes, "<i", -2))
    yield bad("a least client time that is not the column's", changed(FULL, 64, "<q", 0))
    yield bad("an earliest expiry that is not the column's", changed(FULL, 56, "<q", 0))
    yield bad("a client time in the head without a column", changed(SIMPLE, 72, "<q", 1))

    def with_subjects(packed: bytes, count: int) -> bytes:
        """Return a content of one record with these bytes as its table of subjects."""
        one = struct.pack("<2i", 0, 1) + b"x"
        return by_hand(
            {
                16: ("<I", 1),
                80: ("<I", len(packed)),
                84: ("<I", count),
                100: ("<I", 9),
                104: ("<I", 9),
            },
            packed,
            one,
        )

    # Each case after this is wrong for one reason only.
    Content(with_subjects(b"\x91\xa1s", 1)).check()
    yield bad("subjects that are no array", with_subjects(b"\xa1s", 1))
    yield bad("a subject that is a number", with_subjects(b"\x91\x01", 1))
    yield bad("a subject that is bin", with_subjects(b"\x91\xc4\x01s", 1))
    no_utf8 = bad("a subject that is not UTF-8", with_subjects(b"\x91\xa1\xff", 1))
    yield no_utf8 | {"lenient": True}
    yield bad("an entry without a key", with_subjects(b"\x91\x90", 1))
    yield bad("no subject at all", with_subjects(b"\x90", 0))
    yield bad("bytes behind the subjects", with_subjects(b"\x91\xa1s\x00", 1))
    yield bad("a subject of 256 bytes", with_subjects(msgpack.packb(["x" * 256]), 1), "too_large")
    yield bad("a record of 17 keys", with_subjects(msgpack.packb([["k"] * 17]), 1), "too_large")


# --- deliveries ---------------------------------------------------------------------------


def stamp_for(data: bytes, base_offset: int, **changes: Any) -> Stamp:
    """Return a stamp that fits a content, as a broker would write it for a delivery."""
    view = Content(data)
    return STAMP._replace(
        base_offset=base_offset,
        size=96 + len(data),
        count=len(view),
        content_crc=view.head.content_crc,
        **changes,
    )


def deliveries() -> Iterator[Vector]:
    """List frames cut in each way that is allowed, rows, derived batches; then wrong ones."""

    def delivered(base: int, rows: list[int] | None = None) -> list[Vector]:
        """Return these rows of FULL, or all, as records that a reader gets from offset base on."""
        numbers = range(len(FULL_ROWS)) if rows is None else rows
        return [
            record(*FULL_ROWS[n])
            | {
                "offset": base + n,
                "append_time_ms": STAMP.append_time_ms,
                "id": message_id(STAMP.append_time_ms, base + n).hex(),
            }
            for n in numbers
        ]

    def good(
        name: str, frames: list[bytes], records: list[Vector], rows: bytes | None = None
    ) -> Vector:
        """Return the vector of a delivery that a reader has to take. rows: its row bitmap."""
        return {
            "name": name,
            "frames": [frame.hex() for frame in frames],
            "rows": None if rows is None else rows.hex(),
            "records": records,
        }

    def bad(name: str, frames: list[bytes], error: str, rows: bytes | None = None) -> Vector:
        """Return the vector of a delivery that a reader has to refuse, with the error's code."""
        return {
            "name": name,
            "frames": [frame.hex() for frame in frames],
            "rows": None if rows is None else rows.hex(),
            "error": error,
        }

    first, second = stamp_for(FULL, 100).pack(), stamp_for(FULL, 105).pack()
    yield good("live: stamp and content", [first, FULL], delivered(100))
    yield good("a batch in one frame", [first + FULL], delivered(100))
    yield good(
        "a run of two batches", [first + FULL + second + FULL], delivered(100) + delivered(105)
    )
    yield good(
        "a run, then a live batch", [first + FULL, second, FULL], delivered(100) + delivered(105)
    )
    yield good(
        "a run that ends with a stamp",
        [first + FULL + second, FULL],
        delivered(100) + delivered(105),
    )
    yield good("some rows", [first, FULL], delivered(100, [0, 3]), b"\x09")
    yield good("no rows", [first, FULL], [], b"\x00")
    mask = np.array([False, True, True, False, True])
    derived = extract(stamp_for(FULL, 100), Content(FULL), mask)
    yield good("a derived batch", list(derived), delivered(100, [1, 2, 4]))
    yield good("rows of a derived batch", list(derived), delivered(100, [1, 4]), b"\x05")
    rows = [
        Row(Header(("a",)), 100, 7, NO_TIME, b"one"),
        Row(Header(("a",), (("f", "1"),)), 1 << 20, 9, 5, b""),
        Row(Header(("b", "c")), (1 << 20) + 1, 9, NO_TIME, b"three"),
    ]
    gathered = [
        record(row.body, list(row.header.keys), dict(row.header.fields), time)
        | {
            "offset": row.offset,
            "append_time_ms": row.append_time_ms,
            "id": message_id(row.append_time_ms, row.offset).hex(),
        }
        for row, time in zip(rows, (None, 5, None), strict=True)
    ]
    yield good("rows gathered from several batches", list(gather_rows(rows, 7, 3, 4096)), gathered)
    yield bad("a stamp without its content", [first], "bad_batch")
    yield bad("a content without its stamp", [FULL], "bad_batch")
    yield bad("a boundary within a content", [first + FULL[:64], FULL[64:]], "bad_batch")
    yield bad("a boundary within a stamp", [first[:48], first[48:] + FULL], "bad_batch")
    yield bad("a cut content", [first + FULL[:-8]], "bad_batch")
    yield bad("the stamp of another content", [stamp_for(SIMPLE, 100).pack(), FULL], "bad_batch")
    yield bad(
        "a stamp with another CRC of the content",
        [stamp_for(FULL, 100)._replace(content_crc=1).pack(), FULL],
        "corrupt",
    )
    yield bad(
        "a stamp that counts otherwise",
        [stamp_for(FULL, 100)._replace(count=4).pack(), FULL],
        "bad_batch",
    )
    yield bad("rows for two batches", [first + FULL + second + FULL], "malformed", b"\x1f")
    yield bad("rows of another length", [first, FULL], "malformed", b"\x1f\x00")
    yield bad("a row beyond the last", [first, FULL], "malformed", b"\x20")
    falling = bytearray(derived[1])
    places = Content(bytes(falling)).sections
    struct.pack_into("<I", falling, places.deltas + 4, 1)
    damaged = resealed(bytes(falling))
    crc = struct.unpack_from("<I", damaged, 8)[0]
    again = Stamp.unpack(derived[0])._replace(content_crc=crc).pack()
    yield bad("offset deltas that do not rise", [again, damaged], "bad_batch")
    plain_stamp = Stamp.unpack(derived[0])._replace(flags=1).pack()
    yield bad(
        "offset deltas under a stamp that is not derived", [plain_stamp, derived[1]], "bad_batch"
    )
    derived_stamp = stamp_for(FULL, 100)._replace(flags=3).pack()
    yield bad("a derived stamp before a content without deltas", [derived_stamp, FULL], "bad_batch")


# --- the small ones ------------------------------------------------------------------------


def bitmaps() -> Iterator[Vector]:
    """List bitmaps of delivered rows, then wrong ones."""
    for count, rows in ((1, [0]), (8, [0, 7]), (9, [8]), (16, []), (20, [0, 1, 9, 19])):
        mask = [row in rows for row in range(count)]
        yield {
            "name": f"{len(rows)} of {count}",
            "count": count,
            "hex": row_bitmap(mask).hex(),
            "rows": rows,
        }
    yield {"name": "too short", "count": 9, "hex": "ff", "error": "malformed"}
    yield {"name": "too long", "count": 8, "hex": "ff00", "error": "malformed"}
    yield {"name": "a bit beyond the last row", "count": 4, "hex": "10", "error": "malformed"}


def patterns() -> Iterator[Vector]:
    """List patterns with their verdicts on headers, the whitepaper's examples first."""
    for pattern, headers, matching in PATTERNS:
        shown_headers = []
        for place, header in enumerate(headers):
            keys = [""] if isinstance(header, dict) else header
            shown_headers.append(
                {
                    "keys": [keys] if isinstance(keys, str) else keys,
                    "fields": header if isinstance(header, dict) else {},
                    "matches": place in matching,
                }
            )
        yield {"name": json.dumps(pattern), "pattern": pattern, "headers": shown_headers}
    for name, pattern, error in BAD_PATTERNS:
        yield {"name": name, "pattern": pattern, "error": error}


def names() -> Iterator[Vector]:
    """List names of streams, mailboxes and services that are allowed, then refused ones."""
    for text in ("flights", "a.b-c_d:1@host+x=y", "0", "_x", "x" * 255):
        yield {"name": f"{text[:20]}, {len(text)} long", "text": text}
    for text in ("", "x" * 256, "~tmp", "a~", "a{eu}", "a b", "a/b", "é", ".a", "-a", "a\n", "a*"):
        yield {"name": f"refused: {text[:20]!r}", "text": text, "error": "bad_name"}


def message_ids() -> Iterator[Vector]:
    """List message ids, in ascending order."""
    for time, offset in ((0, 0), (0, 1), (1, 0), (1_700_000_000_000, 2**40), (2**62, 2**64 - 1)):
        yield {
            "name": f"{time}, {offset}",
            "append_time_ms": plain(time),
            "offset": plain(offset),
            "hex": message_id(time, offset).hex(),
        }


KINDS: dict[str, Callable[[], Iterator[Vector]]] = {
    "messages": messages,
    "stamps": stamps,
    "contents": contents,
    "deliveries": deliveries,
    "bitmaps": bitmaps,
    "patterns": patterns,
    "names": names,
    "message_ids": message_ids,
}


def files() -> dict[str, Any]:
    """Return file name -> what its JSON holds, for main() and for the test that compares them."""
    made: dict[str, Any] = {
        f"{kind}.json": {"kind": kind, "about": ABOUT[kind], "vectors": list(make())}
        for kind, make in KINDS.items()
    }
    counts = {kind: len(made[f"{kind}.json"]["vectors"]) for kind in KINDS}
    made["index.json"] = {
        "protocol": 1,
        "about": ABOUT,
        "files": {kind: f"{kind}.json" for kind in KINDS},
        "counts": counts,
    }
    return made


def main() -> None:
    """Write all files anew, after the format or the examples have changed."""
    for name, value in files().items():
        (HERE / name).write_text(json.dumps(value, indent=1, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
