"""A second reader of the protocol, written from SPEC.md with msgpack and struct only.

Owns its own understanding of every byte: it shares no code with malamute_protocol, its
own CRC included, and takes the commands' fields from the tables of SPEC.md itself. Where
the two readers differ over a vector, the spec is not clear enough.
"""

from __future__ import annotations

import re
import struct
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa

SPEC = (Path(__file__).parents[2] / "protocol" / "SPEC.md").read_text()


class Refused(Exception):
    """The bytes are not what they should be; the code says how."""

    def __init__(self, code: str, reason: str = "") -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


def need(condition: bool, reason: str, code: str = "bad_batch") -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise Refused(code, reason)


def crc32c(data: bytes) -> int:
    """CRC-32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    return table


_TABLE = _table()


def unpack(data: bytes, code: str) -> Any:
    """Return one MessagePack value that fills the bytes, without extension types."""

    def refuse(*_: Any) -> None:
        raise Refused(code, "an extension type")

    try:
        value = msgpack.unpackb(data, ext_hook=refuse, strict_map_key=False)
    except Refused:
        raise
    except Exception as error:
        raise Refused(code, repr(error)) from error
    need(not _has_timestamp(value), "a timestamp", code)
    return value


def _has_timestamp(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return any(map(_has_timestamp, value))
    return isinstance(value, msgpack.Timestamp)


# --- messages ------------------------------------------------------------------------


def commands_of_spec() -> dict[int, tuple[str, list[tuple[str, str, str]]]]:
    """Return number -> (name, [(field, type, default)]) from SPEC.md's tables."""
    found = {}
    for block in re.split(r"^#### (?=\d)", SPEC, flags=re.MULTILINE)[1:]:
        number, name = block.split("\n", 1)[0].split()
        block = re.split(r"^#", block, maxsplit=1, flags=re.MULTILINE)[0]
        table = re.findall(r"^\| (\w+) \| ([^|]+) \| *([^|]*?) *\| [^|]+ \|$", block, re.MULTILINE)
        found[int(number)] = name, [row for row in table if row[0] != "Field"]
    return found


COMMANDS = commands_of_spec()
OWN_ONE = {"PUBLISH", "UPDATE_KEY", "SEND", "REQUEST", "REPLY", "STAGE"}
OWN_FRAMES = {"DELIVER", "MAIL", "WORK"}
DEFAULTS: dict[str, Any] = {
    "nil": None,
    "true": True,
    "false": False,
    "{}": {},
    "[]": [],
    '""': "",
    'b""': b"",
}


def _fits(kind: str, value: Any) -> bool:
    if kind.endswith(" or nil"):
        return value is None or _fits(kind.removesuffix(" or nil"), value)
    if kind == "[int, int]":
        return type(value) is list and len(value) == 2 and all(type(x) is int for x in value)
    if kind == "[int, int, bin]":
        return type(value) is list and list(map(type, value)) == [int, int, bytes]
    if kind.startswith("[["):
        # Runs of several parts: each element has the types inside the inner brackets.
        inner = kind[2:-2].split(", ")
        return type(value) is list and all(
            type(item) is list and len(item) == len(inner) and all(map(_fits, inner, item))
            for item in value
        )
    if kind == "[str, str, int, [int]]":
        parts = ("str", "str", "int", "[int]")
        return type(value) is list and len(value) == 4 and all(map(_fits, parts, value))
    if kind == "[int]":
        return type(value) is list and all(type(x) is int for x in value)
    types = {"int": int, "str": str, "bin": bytes, "bool": bool, "map": dict, "array": list}
    return type(value) is types[kind]


# Bounds of single fields in section 11: the greatest length, or the least and greatest value.
LENGTHS = {
    "SEND.key": 128,
    "REQUEST.key": 128,
    "ATOMIC.key": 128,
    "CANCEL_REQUEST.key": 128,
    "BEGIN_TRANSACTION.transaction": 128,
    "STAGE.transaction": 128,
    "COMMIT_TRANSACTION.transaction": 128,
    "ROLL_BACK_TRANSACTION.transaction": 128,
    "LIST_TRANSACTIONS.after": 128,
    "END_TRANSACTION.transaction": 128,
    "AWAIT_TRANSACTION.transaction": 128,
    "ACK_WORK.reason": 1024,
    "ACK_MAIL.ranges": 65536,
    "ACK_WORK.ranges": 65536,
    "ACK_RECORDS.ranges": 65536,
    "REPLY.requests": 65536,
    "REQUEUE.numbers": 65536,
    "MAIL.about": 65536,
}
VALUES = {
    "SEND.priority": (-128, 127),
    "SEND.deliver_at_ms": (0, 1 << 53),
    "REQUEST.timeout_ms": (0, 1 << 53),
    "OFFER.lease_ms": (0, 1 << 53),
    "JOIN_GROUP.hold_ms": (0, 1 << 53),
    "ACK_WORK.again_ms": (0, 1 << 53),
    "ACK_MAIL.again_ms": (-1, 1 << 53),
    "ACK_RECORDS.again_ms": (-1, 1 << 53),
    "ACK_WORK.state": (1, 5),
    "MOVE_CURSOR.next": (0, 1 << 64),
    "MOVE_CURSOR.from": (-1, 1 << 64),
    "TRIM.before": (0, 1 << 64),
    "PURGE_SUBJECTS.before": (0, 1 << 64),
    "ATOMIC.count": (1, 1 << 64),
    "BEGIN_TRANSACTION.timeout_ms": (0, 1 << 53),
    "STAGE.place": (0, 1 << 53),
    "COMMIT_TRANSACTION.count": (0, 1 << 53),
}
PARTS = {
    "PUBLISH", "SEND", "REQUEST", "REPLY", "ACK_MAIL", "ACK_WORK", "ACK_RECORDS", "MOVE_CURSOR",
    "TRIM", "PURGE_SUBJECTS", "BEGIN_TRANSACTION", "STAGE", "COMMIT_TRANSACTION",
    "ROLL_BACK_TRANSACTION",
}  # fmt: skip


def _check_bounds(name: str, fields: dict[str, Any]) -> None:
    """Check the bounds of section 11 for single fields, and of section 4.8 for ranges."""
    for field, value in fields.items():
        place = f"{name}.{field}"
        need(len(value) <= LENGTHS[place] if place in LENGTHS else True, place, "too_large")
        low, high = VALUES.get(place, (None, None))
        need(low is None or high is None or low <= value <= high, place, "malformed")
    if "ranges" not in fields:
        return
    behind = 0
    for first, end in fields["ranges"]:
        need(behind <= first < end, "ranges", "malformed")
        behind = end
    numbers = sum(end - first for first, end in fields["ranges"])
    need(1 <= numbers <= 1 << 20, "ranges", "malformed")


def _check_step(commands: list[dict[str, Any]], place: int) -> None:
    """Check the parts of the step at this place, section 4.8."""
    count = commands[place]["fields"]["count"]
    parts = commands[place + 1 : place + 1 + count]
    need(len(parts) == count, "parts that are missing", "malformed")
    for part in parts:
        need(part["name"] in PARTS and part["fields"]["tracker"] == 0, "a part", "malformed")
        need(part["name"] != "ACK_WORK" or part["fields"]["state"] >= 3, "a state", "malformed")


def _depth_and_keys(value: Any) -> int:
    if isinstance(value, dict):
        need(all(type(key) is str for key in value), "a key that is no string", "malformed")
        value = list(value.values())
    return 1 + max(map(_depth_and_keys, value), default=0) if isinstance(value, list) else 0


def _default(text: str) -> Any:
    text = text.strip("`")
    if text in DEFAULTS:
        return DEFAULTS[text]
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def read_message(frames: list[bytes]) -> list[dict[str, Any]]:
    """Return a message's commands, each as number, name, fields and its frames' places."""
    need(bool(frames), "no frames", "malformed")
    array = unpack(frames[0], "malformed")
    need(isinstance(array, list) and bool(array), "no array of commands", "malformed")
    need(len(array) <= 4096, "too many commands", "too_large")
    position, commands = 1, []
    for item in array:
        need(isinstance(item, list) and bool(item), "a command is no array", "malformed")
        number, *values = item
        need(type(number) is int and number in COMMANDS, f"command {number!r}", "malformed")
        name, table = COMMANDS[number]
        fields: dict[str, Any] = {}
        for place, (field, kind, default) in enumerate(table):
            if place < len(values):
                need(_fits(kind, values[place]), f"{name}.{field}", "malformed")
                need(_depth_and_keys(values[place]) <= 33, "nesting", "malformed")
                fields[field] = values[place]
            else:
                need(default != "", f"{name} lacks {field}", "malformed")
                fields[field] = _default(default)
        _check_bounds(name, fields)
        owned = 1 if name in OWN_ONE else fields["frames"] if name in OWN_FRAMES else 0
        need(0 <= owned <= len(frames) - position, "content frames", "malformed")
        places = list(range(position, position + owned))
        position += owned
        commands.append({"number": number, "name": name, "fields": fields, "frames": places})
    need(position == len(frames), "frames are left", "malformed")
    for place, command in enumerate(commands):
        if command["name"] == "ATOMIC":
            _check_step(commands, place)
    return commands


# --- batches ---------------------------------------------------------------------------

STAMP_FIELDS = """
    flags lsn bundle_lsn synced_lsn epoch base_offset append_time_ms stream origin size count
    control_kind 0 content_crc 0
""".split()  # noqa: SIM905 - twenty quoted names would hide which follows which


def read_stamp(data: bytes) -> dict[str, int]:
    """The stamp at the beginning of the bytes."""
    need(len(data) >= 96, "cut short")
    magic, version, length, crc = struct.unpack_from("<4sHHI", data)
    need(magic == b"MLB1" and version == 1, "no stamp")
    need(96 <= length <= 1024 and length % 8 == 0 and length <= len(data), "its length")
    need(crc32c(data[12:length]) == crc, "checksum", "corrupt")
    stamp = dict(zip(STAMP_FIELDS, struct.unpack_from("<I5Qq4IHHIQ", data, 12), strict=True))
    del stamp["0"]
    need(stamp["flags"] < 8 and stamp["size"] >= length and stamp["size"] % 8 == 0, "flags, size")
    return stamp | {"stamp_bytes": length}


HEAD_FIELDS = """
    content_bytes count codec body_kind flags producer_id producer_epoch schema_id first_sequence
    transaction_id earliest_expiry_ms client_time_min_ms client_time_max_ms subjects_bytes
    subjects_count fieldmaps_bytes fieldmaps_count properties_bytes body_bytes body_raw_bytes
    parts_count
""".split()  # noqa: SIM905


def _monotonic(offsets: tuple[int, ...], end: int) -> None:
    need(offsets[0] == 0 and offsets[-1] == end, "offsets do not span")
    need(all(a <= b for a, b in pairwise(offsets)), "offsets fall")


def _decompress(codec: int, stored: bytes, size: int) -> bytes:
    if codec == 1:
        return zlib.decompress(stored, wbits=31)
    if codec == 0:
        return stored
    name: Any = ("", "", "snappy", "lz4", "zstd")[codec]
    raw: bytes = pa.decompress(stored, decompressed_size=size, codec=name, asbytes=True)
    return raw


def read_content(
    data: bytes, derived: bool = False
) -> tuple[dict[str, int], list[dict[str, Any]] | None]:
    """(head, records; None for an Arrow body)."""
    need(len(data) >= 128, "cut short")
    magic, version, head_bytes, crc = struct.unpack_from("<4sHHI", data)
    need(magic == b"MLC1" and version == 1, "no content")
    need(128 <= head_bytes <= 1024 and head_bytes % 8 == 0, "its head's length")
    values = struct.unpack_from("<IIBBHQIIQQqqq8I", data, 12)
    h = dict(zip(HEAD_FIELDS, values, strict=True))
    need(h["content_bytes"] == len(data), "another size")
    need(crc32c(data[12:]) == crc, "checksum", "corrupt")
    n = h["count"]
    need(n <= 65536 and h["body_raw_bytes"] <= 16 << 20, "too much", "too_large")
    need(n > 0 and h["codec"] < 5 and h["body_kind"] < 3, "count, codec, kind")
    need(h["flags"] < 1024, "unknown flags", "unsupported")
    need(bool(h["flags"] & 32) == derived, "offset deltas")
    need(derived or not h["flags"] & 512, "append times")
    need(not h["flags"] & 64, "transaction control", "unsupported")
    need(not h["transaction_id"], "a transaction id", "unsupported")
    need((h["flags"] & 28).bit_count() <= 1, "forms of properties")
    need(h["body_kind"] == 1 or h["parts_count"] == 0, "parts without lists")
    position = head_bytes

    def take(size: int) -> bytes:
        nonlocal position
        need(position + size <= len(data), "a section beyond the end")
        piece = data[position : position + size]
        position += -(-size // 8) * 8
        return piece

    def column(flag: int, letter: str) -> tuple[int, ...] | None:
        if not h["flags"] & flag:
            return None
        return struct.unpack(f"<{n}{letter}", take(n * struct.calcsize(letter)))

    subjects = take(h["subjects_bytes"])
    fieldmaps = take(h["fieldmaps_bytes"])
    subject_codes = column(128, "i") or (0,) * n
    need((h["fieldmaps_count"] > 0) == bool(fieldmaps), "field maps")
    field_codes = column(256, "i") or (0 if fieldmaps else -1,) * n
    times, expiries = column(1, "q"), column(2, "q")
    properties = take(h["properties_bytes"]) if h["flags"] & 28 else b""
    deltas, appended = column(32, "I"), column(512, "q")
    stored = take(h["body_bytes"])
    need(position == len(data), "the sections do not fill the content")

    keys = [[e] if isinstance(e, str) else e for e in _array(subjects)]
    maps = _array(fieldmaps) if fieldmaps else []
    need(len(keys) == h["subjects_count"] and len(maps) == h["fieldmaps_count"], "counts")
    for entry in keys:
        need(isinstance(entry, list) and bool(entry), "an entry")
        need(all(isinstance(key, str) for key in entry), "a key")
        need(len(entry) <= 16 and all(len(k.encode()) <= 255 for k in entry), "keys", "too_large")
    for entry in maps:
        need(isinstance(entry, dict), "a field map")
        need(all(isinstance(x, str) for pair in entry.items() for x in pair), "a field")
    need(all(0 <= code < len(keys) for code in subject_codes), "a subject code")
    need(all(-1 <= code < len(maps) for code in field_codes), "a field code")
    present = [time for time in times or () if time != -(2**63)]
    need(h["client_time_min_ms"] == min(present, default=0), "least client time")
    need(h["client_time_max_ms"] == max(present, default=0), "greatest client time")
    need(h["earliest_expiry_ms"] == min(filter(None, expiries or ()), default=0), "expiry")
    if deltas:
        need(all(a < b for a, b in pairwise(deltas)), "deltas")
    if h["body_kind"] == 2:
        return h, None
    parts = _parts(h, _decompress(h["codec"], stored, h["body_raw_bytes"]))
    maps_of_rows = _properties(h["flags"], properties, n)
    records = [
        {
            "keys": keys[subject_codes[row]],
            "fields": maps[field_codes[row]] if field_codes[row] >= 0 else {},
            "client_time_ms": times[row] if times and times[row] != -(2**63) else None,
            "expires_at_ms": (expiries[row] if expiries else 0) or None,
            "properties": maps_of_rows[row],
            "parts": [part.hex() for part in parts[row]],
            "delta": deltas[row] if deltas else row,
            "appended": appended[row] if appended else None,
        }
        for row in range(n)
    ]
    return h, records


def _array(data: bytes) -> list[Any]:
    value = unpack(data, "bad_batch")
    need(isinstance(value, list), "no array")
    result: list[Any] = value
    return result


def _parts(h: dict[str, int], body: bytes) -> list[list[bytes]]:
    n, m = h["count"], h["parts_count"]
    need(len(body) == h["body_raw_bytes"], "the body's size")
    heads = 4 * (n + 1) + (4 * (m + 1) if h["body_kind"] == 1 else 0)
    need(heads <= len(body), "no room for offsets")
    offsets = struct.unpack_from(f"<{n + 1}i", body)
    blob = body[heads:]
    if h["body_kind"] == 0:
        _monotonic(offsets, len(blob))
        return [[blob[offsets[row] : offsets[row + 1]]] for row in range(n)]
    bounds = struct.unpack_from(f"<{m + 1}i", body, 4 * (n + 1))
    _monotonic(offsets, m)
    _monotonic(bounds, len(blob))
    pieces = [blob[bounds[j] : bounds[j + 1]] for j in range(m)]
    return [pieces[offsets[row] : offsets[row + 1]] for row in range(n)]


def _properties(flags: int, data: bytes, n: int) -> list[dict[str, Any]]:
    if flags & 4:
        return [unpack(data, "bad_batch")] * n
    if flags & 8:
        codes = struct.unpack_from(f"<{n}i", data)
        maps = _array(data[4 * n :])
        return [maps[code] if code >= 0 else {} for code in codes]
    if flags & 16:
        offsets = struct.unpack_from(f"<{n + 1}i", data)
        blob = data[4 * (n + 1) :]
        _monotonic(offsets, len(blob))
        slices = [blob[offsets[row] : offsets[row + 1]] for row in range(n)]
        return [unpack(piece, "bad_batch") if piece else {} for piece in slices]
    return [{}] * n


def read_bitmap(data: bytes, count: int) -> list[int]:
    """The rows that a bitmap selects."""
    need(len(data) == (count + 7) // 8, "its length", "malformed")
    rows = [bit for bit in range(len(data) * 8) if data[bit // 8] >> bit % 8 & 1]
    need(all(row < count for row in rows), "a row beyond the last", "malformed")
    return rows


def read_delivery(frames: list[bytes], rows: bytes | None) -> list[dict[str, Any]]:
    """The delivered records with offset, append time and id."""
    batches: list[tuple[dict[str, int], list[dict[str, Any]]]] = []
    stamp = None
    for frame in frames:
        while frame:
            if stamp is None:
                stamp = read_stamp(frame)
                frame = frame[stamp["stamp_bytes"] :]
                continue
            size = stamp["size"] - stamp["stamp_bytes"]
            need(size <= len(frame), "a content crosses its frame")
            head, records = read_content(frame[:size], bool(stamp["flags"] & 2))
            assert records is not None
            crc = struct.unpack_from("<I", frame, 8)[0]
            need(stamp["content_crc"] == crc, "another content", "corrupt")
            need(stamp["count"] == head["count"], "another count")
            batches.append((stamp, records))
            frame, stamp = frame[size:], None
    need(stamp is None, "a stamp without content")
    need(rows is None or len(batches) == 1, "rows for several", "malformed")
    delivered = []
    for stamp, records in batches:
        chosen = range(len(records)) if rows is None else read_bitmap(rows, len(records))
        for row in chosen:
            record = dict(records[row])
            offset = stamp["base_offset"] + record.pop("delta")
            time = record.pop("appended")
            if time is None:
                time = stamp["append_time_ms"]
            identifier = struct.pack(">qQ", time, offset).hex()
            delivered.append(record | {"offset": offset, "append_time_ms": time, "id": identifier})
    return delivered
