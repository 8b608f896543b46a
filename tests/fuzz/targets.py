"""Decoders as targets: input, permitted errors, and source of the seeds.

Owns the functions that both the guided fuzzer and the replay of the corpus call. The rule: whatever
the bytes are, a target returns or raises one of its named errors, which it takes itself; anything
else is a find.
"""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import struct
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import google_crc32c
import msgspec
import numpy as np

from malamute_protocol import pattern as patterns
from malamute_protocol.batch import Batch
from malamute_protocol.content import Content
from malamute_protocol.content_layout import ARROW
from malamute_protocol.encode import encode
from malamute_protocol.errors import BatchError, LocalProtocolError, RemoteProtocolError
from malamute_protocol.extract import extract, extractable
from malamute_protocol.framing import decode_message
from malamute_protocol.gather import gatherable, rows_of
from malamute_protocol.stamp import STAMP_BYTES, Stamp
from malamute_py.journal.check import candidates, check
from malamute_py.journal.index import read_index
from malamute_py.matcher import compile_pattern
from malamute_py.store.errors import StoreError
from malamute_py.store.forms import FORMS
from malamute_py.store.loading import load
from tests.fuzz.hostile import Contents

VECTORS: Final = Path(__file__).parents[2] / "protocol" / "vectors"
_FRAME_END: Final = b"\xc1\xc1"
"""Separator between frames: no MessagePack has it."""


def framing(data: bytes) -> None:
    """Read the frames of one message, as the broker's loop does."""
    with contextlib.suppress(RemoteProtocolError):
        decode_message(data.split(_FRAME_END))


def content(data: bytes) -> None:
    """Give a batch content the broker's check, the cutting of rows, and the consumer's look."""
    if len(data) >= 20:
        # A fuzzer finds no checksum: it is made to fit, and the size with it.
        made = bytearray(data)
        struct.pack_into("<I", made, 12, len(made))
        struct.pack_into("<I", made, 8, google_crc32c.value(bytes(made[12:])))
        data = bytes(made)
    as_it_is(data)


def as_it_is(data: bytes) -> None:
    """Do the work of content(), with the checksum that the bytes have."""
    try:
        read = Content(data)
        read.check()
    except BatchError:
        return
    stamp = Stamp(
        1, 0, 0, 0, 1, 0, 1, 1, 0, STAMP_BYTES + len(data), len(read), 0, read.head.content_crc
    )
    mask = np.arange(len(read)) % 3 == 0
    # A broker has checked it: its next use of the content raises nothing.
    if extractable(read):
        small_stamp, small = extract(stamp, read, mask)
        _consume(Stamp.unpack(small_stamp), Content(small), None)
    if gatherable(read):
        rows_of(stamp, read, np.flatnonzero(mask))
    read.headers()
    _consume(stamp, Content(data), None)
    _consume(stamp, Content(data), mask)
    if read.head.body_kind == ARROW:
        with contextlib.suppress(BatchError):
            rows(bytes(read.bodies().blob), len(read))


@cache
def _typed() -> Any:
    """Return rows of many types: three, as an Arrow body of hostile.py has."""
    import pyarrow as pa

    arrow: Any = pa
    columns = {
        "n": arrow.array([1, 2, 3]),
        "t": arrow.array(["a", "b", None]),
        "v": arrow.array(["short", "x" * 30, None], arrow.string_view()),
        "l": arrow.array([["a"], None, []]),
        "s": arrow.array([{"a": 1, "b": [1]}, None, {"a": None, "b": None}]),
        "m": arrow.array([[("k", 1)], None, []], arrow.map_(arrow.string(), arrow.int8())),
    }
    return arrow.RecordBatch.from_pydict(columns)


def rows(data: bytes, count: int = 3) -> None:
    """Validate Arrow rows in full, as a broker does that is asked to, and then look at them.

    By the schema of two columns that hostile contents have, and by one of many types.
    """
    from malamute_protocol.arrow_check import checked_rows

    whole = _typed().schema
    import pyarrow as pa

    for schema in (pa.schema([whole.field(0), whole.field(1)]), whole):
        with contextlib.suppress(BatchError):
            checked_rows(data, count, schema).to_pylist()


def _consume(stamp: Stamp, read: Content, mask: Any) -> None:
    """Ask all that a consumer asks of a batch, whose bodies and properties were not checked yet."""
    batch = Batch(stamp, read, mask)
    with contextlib.suppress(BatchError, TypeError, LocalProtocolError):
        batch.bodies()
    with contextlib.suppress(BatchError, TypeError, LocalProtocolError):
        for record in islice(batch, 20):
            _ = (
                record.offset,
                record.subject,
                record.fields,
                record.properties,
                record.expires_at_ms,
            )
            _ = record.body if read.head.body_kind == 0 else record.parts
    with contextlib.suppress(BatchError, TypeError, LocalProtocolError):
        batch.to_arrow()
    with contextlib.suppress(BatchError):
        batch.verify()


def segment(data: bytes) -> None:
    """Read a segment's bytes and an index's, as recovery does."""
    view = memoryview(data)
    position = 0
    for _ in range(64):
        found = check(view, 0, position)
        if isinstance(found, str) or not found.stamp.size:
            break
        position += found.stamp.size
    for place in candidates(view, 0, 0):
        check(view, 0, place)
    read_index(data, bytes(16), 1)


def checkpoint(data: bytes) -> None:
    """Read rows of the broker's tables, and a whole database of damaged pages."""
    for form in FORMS:
        unpack: Any = getattr(form, "unpack", None)
        if unpack is not None:
            with contextlib.suppress(StoreError):
                unpack(data)
            with contextlib.suppress(StoreError):
                unpack(struct.pack("<I", google_crc32c.value(data)) + data)
    if data[:15] == b"SQLite format 3":
        connection = sqlite3.connect(":memory:")
        try:
            connection.deserialize(data)
            load(connection)
        except (StoreError, sqlite3.Error):
            pass
        finally:
            connection.close()


def pattern(data: bytes) -> None:
    """Read a pattern as text and in wire form."""
    text = data.decode("utf-8", "replace")
    wires: list[Any] = []
    with contextlib.suppress(patterns.PatternError):
        wires.append(patterns.from_text(text))
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        wires.append(msgspec.msgpack.decode(data))
    for wire in wires:
        with contextlib.suppress(patterns.PatternError):
            compile_pattern(patterns.validate(wire)).matches(("a.b", "x"), (("k", "v"),))


# --- seeds ------------------------------------------------------------------------------------


def _vectors(kind: str) -> list[dict[str, Any]]:
    whole = json.loads((VECTORS / f"{kind}.json").read_text())
    found: list[dict[str, Any]] = whole["vectors"]
    return found


def _of_messages() -> Iterator[bytes]:
    for vector in _vectors("messages"):
        frames = vector.get("frames", ())
        yield _FRAME_END.join(bytes.fromhex(frame) for frame in frames)


def _of_contents() -> Iterator[bytes]:
    for vector in _vectors("contents"):
        if len(vector.get("hex", "")) < 4_096:
            yield bytes.fromhex(vector["hex"])
    source = Contents(random.Random(1))
    for _ in range(50):
        made = source.content()
        if len(made) < 2_048:
            yield made


@cache
def _logged() -> tuple[list[bytes], bytes]:
    """Return (files of a small ring, a database of tables that followed it)."""
    from malamute_py.journal import Append, MemoryStorage, Ring, RingSettings
    from malamute_py.journal.storage import read_file
    from malamute_py.store.database import Position, create

    storage = MemoryStorage()
    settings = RingSettings(segment_bytes=65_536, ring_bytes=8 * 65_536)
    ring, _ = Ring.open(storage, settings=settings, epoch=1)
    frame = encode([b"x"] * 3, subject=["a", "b", "a"])
    crc = int.from_bytes(frame[8:12], "little")
    for n in range(5):
        ring.append([Append(7, 3 * n, 3, 1, frame, crc, Content(frame).table)])
    ring.sync()
    ring.close()
    files = [read_file(storage, name) or b"" for name in storage.names()]
    connection = sqlite3.connect(":memory:", isolation_level=None)
    create(connection, Position(0, 0, 1, bytes(16), bytes(16)))
    return [file[:4_096] for file in files], connection.serialize()


def _of_rows() -> Iterator[bytes]:
    for names in (["n", "t"], ["n", "t", "v", "l", "s", "m"]):
        yield _typed().select(names).serialize().to_pybytes()
    yield b"no message"


def _of_segments() -> Iterator[bytes]:
    yield from _logged()[0]


def _of_tables() -> Iterator[bytes]:
    yield _logged()[1]
    yield b""
    yield msgspec.msgpack.encode([1, "name", {"memory": True}, 5])


def _of_patterns() -> Iterator[bytes]:
    for vector in _vectors("patterns"):
        wire = vector.get("pattern", vector.get("wire"))
        if wire is not None:
            yield msgspec.msgpack.encode(wire)
    yield from (b"a.*", b"regex:^a+$", b"fields:a=b,c", b'["and",["all"],["not",["topic","x"]]]')


class Target(NamedTuple):
    """One decoder under test."""

    read: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]


TARGETS: Final[dict[str, Target]] = {
    "framing": Target(framing, _of_messages),
    "content": Target(content, _of_contents),
    "rows": Target(rows, _of_rows),
    "segment": Target(segment, _of_segments),
    "checkpoint": Target(checkpoint, _of_tables),
    "pattern": Target(pattern, _of_patterns),
}
