"""Contents of batches whose structure is right and whose insides are hostile.

Owns an encoder of its own, apart from malamute_protocol.encode, which refuses to make what a
hostile producer sends. The rule: a content is made whole and with a fitting checksum, and then gets
a few damages at named places, most of which the checksum covers; all choices come from the given
source of random numbers. Source: SPEC.md, section 5.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Final

import google_crc32c
import msgspec
import numpy as np

from malamute_protocol.codec import compress
from malamute_protocol.content_layout import HEAD, Head

EXTREMES: Final = (
    0, 1, 2, 7, 8, 127, 128, 255, 256, 1000, 65_535, 65_536, 1 << 20, 1 << 24, 2**31 - 1, 2**31,
    2**32 - 1, 2**32, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
    -1, -2, -128, -129, -(2**31), -(2**31) - 1, -(2**53), -(2**63),
)  # fmt: skip
"""Integers at the edges of the types that the formats use."""
SUBJECTS: Final = ("", "a", "a.b", "a.c", "b", "forex.eur", "x.y.z", "k1", "k2", "é", "\x00", "#")
TABLES: Final = (
    ["a"],
    ["a", "b"],
    ["a", "b", "a"],
    ["a.b", ["b", "a"], "c"],
    [f"t{i}" for i in range(9)],
)
"""Tables of subjects that come again and again, with other codes each time."""
_FLAGS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1 << 15)
_DIFFERENT: Final = 40
_PAD: Final = tuple(bytes(n) for n in range(8))
_HEAD_TYPES: Final = dict(zip(Head._fields, "IHHIIIBBHQIIQQqqqIIIIIIII", strict=True))
_WIDTHS: Final = {"B": 8, "H": 16, "I": 32, "Q": 64, "q": 64}
_ORDER: Final = ("subjects", "fieldmaps", "subject_codes", "field_codes", "client_times",
                 "expiries", "properties", "deltas", "append_times", "body")  # fmt: skip
_BLANK: Final = {
    **dict.fromkeys(Head._fields, 0),
    "magic": 0x31434C4D, "version": 1, "head_bytes": 128, "subjects_count": 1,
}  # fmt: skip
"""The fields of a head in their order, as a content without sections has them."""
_pack = msgspec.msgpack.encode


def _deep(levels: int) -> bytes:
    return b"\x91" * levels + b"\xc0"


BAD_MESSAGEPACK: Final[tuple[bytes, ...]] = (
    b"", b"\xc1", b"\xc0", b"\x01", b"\xa1a", b"\x80", b"\x90", b"\x91\xc0", b"\x81\xa1a",
    b"\x81\x01\x02", b"\x81\xa1a\x91\x01", b"\x81\xa1a\x81\xa1b\x01", b"\x82\xa1a\x01\xa1a\x02",
    b"\x81\xa2\xff\xfe\x01", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff",
    b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x81\xa1a\xd4\x01\x00",
    b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", b"\x81\xa1a\xcf" + b"\xff" * 8,
    b"\x81\xa1a\xcb\x7f\xf8" + bytes(6), b"\x81\xc4\x01a\x01", b"\x80\x80", _deep(31), _deep(33),
    _deep(2000), b"\x81\xa1a" + _deep(2000), b"\x91\xa1a\x00", b"\x92\xa1a",
)  # fmt: skip
"""Bytes that are no MessagePack, or not the MessagePack that belongs in their place."""


@cache
def _arrow_body() -> bytes:
    """Return one encapsulated Arrow IPC message of three rows, as the body of an Arrow batch."""
    import pyarrow as pa

    batch = pa.record_batch([pa.array([1, 2, 3]), pa.array(["a", "b", None])], ["n", "t"])
    return bytes(batch.serialize().to_pybytes())


class Chance(random.Random):
    """Random numbers whose choices take half of the library's time: most of a message is choices.

    They are uneven by one part in 2**53 over the count of elements, which no test notices.
    """

    def choice(self, seq: Any) -> Any:
        """Return one of the elements."""
        return seq[int(self.random() * len(seq))]


class Contents:
    """A source of contents; one seed makes one sequence."""

    def __init__(self, chance: random.Random) -> None:
        """chance: shared with whatever else the caller makes from the same seed."""
        self.chance = chance
        self.producers: list[tuple[int, int, int]] = []
        """(id, epoch, sequence) that idempotent batches may claim; the caller fills it."""
        self._plain: dict[tuple[int, str], bytes] = {}

    def _some(self, values: Sequence[int], n: int) -> list[int]:
        """Return one of the values for each of n rows; only the first 40 are drawn anew."""
        choice = self.chance.choice
        return [choice(values) for _ in range(min(n, _DIFFERENT))]

    # --- a whole content --------------------------------------------------------------------

    def content(self) -> bytes:
        """Return any content: most are valid but for one to three damages, one in five is valid."""
        chance = self.chance
        n = chance.choice((1, 1, 1, 1, 2, 3, 8, 9, 9, 40, 130))
        if chance.random() < 0.004:
            n = chance.choice((4097, 65_535, 65_536, 65_537))
        sections, values = self._valid(n)
        if chance.random() < 0.8:
            for _ in range(chance.choice((1, 1, 1, 2, 3))):
                self._damage(sections, values, n)
        content = _assembled(sections, values)
        return content if chance.random() < 0.97 else content[:8] + bytes(4) + content[12:]

    def plain(self, bodies: int = 1, subject: str = "a") -> bytes:
        """Return a valid content of a few small records."""
        made = self._plain.get((bodies, subject))
        if made is None:
            sections, values = _of_bodies([1] * bodies, bodies)
            sections["subjects"] = _pack([subject])
            made = self._plain[bodies, subject] = _assembled(sections, values)
        return made

    def _valid(self, n: int) -> tuple[dict[str, bytes], dict[str, int]]:
        chance = self.chance
        kind = chance.choice((0, 0, 0, 0, 0, 1, 2))
        if kind == 0:
            sections, values = _of_bodies(self._some((0, 1, 5, 40), n), n)
        elif kind == 1:
            sections, values = self._of_lists(n)
        else:
            sections, values = {"body": _arrow_body()}, {"count": n, "body_kind": 2}
            values["schema_id"] = chance.choice((0, 1, 2**32 - 1))
        self._headers(sections, values, n)
        flags = values.get("flags", 0)
        if chance.random() < 0.3:
            times = self._some((5, 9, 10**12, -(2**63), -1, 2**62), n)
            told = [time for time in times if time != -(2**63)]
            sections["client_times"] = _column("q", times, n)
            values["client_time_min_ms"] = min(told, default=0)
            values["client_time_max_ms"] = max(told, default=0)
            flags |= 1
        if chance.random() < 0.25:
            expiries = self._some((0, 1, 10**15, -1, 2**62), n)
            told = [expiry for expiry in expiries if expiry]
            sections["expiries"] = _column("q", expiries, n)
            values["earliest_expiry_ms"] = min(told, default=0)
            flags |= 2
        values["flags"] = flags
        if chance.random() < 0.45:
            self._properties(sections, values, n)
        if self.producers and chance.random() < 0.25:
            number, epoch, sequence = chance.choice(self.producers)
            values["producer_id"], values["producer_epoch"] = number, epoch
            values["first_sequence"] = max(0, sequence + chance.choice((0, 0, 0, 1, -1, 5)))
        self._compress(sections, values)
        return sections, values

    def _of_lists(self, n: int) -> tuple[dict[str, bytes], dict[str, int]]:
        starts, count = _ends(self._some((0, 1, 1, 2), n), n)
        parts, size = _ends(self._some((0, 1, 3), count), count)
        values = {"count": n, "body_kind": 1, "parts_count": count}
        return {"body": starts + parts + b"p" * size}, values

    def _headers(self, sections: dict[str, bytes], values: dict[str, int], n: int) -> None:
        chance = self.chance
        flags = values.get("flags", 0)
        if chance.random() < 0.6:
            # Few tables and many codes: facts remembered by a table must not depend on codes.
            entries: list[Any] = list(chance.choice(TABLES))
        else:
            entries = [
                chance.choice(SUBJECTS) if chance.random() < 0.8 else chance.sample(SUBJECTS, 2)
                for _ in range(chance.choice((1, 1, 1, 2, 3, 5)))
            ]
        if chance.random() < 0.02:
            # Matching has to work anew for subjects that no broker has seen before.
            entries = [f"n{chance.getrandbits(40)}.{i}" for i in range(min(n, 40))]
        sections["subjects"] = _pack(entries)
        values["subjects_count"] = len(entries)
        if len(entries) > 1 or chance.random() < 0.1:
            codes = self._some(range(len(entries)), n)
            sections["subject_codes"] = _column("i", codes, n)
            flags |= 128
        if chance.random() < 0.35:
            maps = (
                [{"k": "v"}, {"f": ""}]
                if chance.random() < 0.5
                else [
                    {chance.choice("kfz"): chance.choice(("", "v", "w")) for _ in range(2)}
                    for _ in range(chance.choice((1, 2, 3)))
                ]
            )
            sections["fieldmaps"] = _pack(maps)
            values["fieldmaps_count"] = len(maps)
            if len(maps) > 1 or chance.random() < 0.3:
                codes = self._some(range(-1, len(maps)), n)
                sections["field_codes"] = _column("i", codes, n)
                flags |= 256
        values["flags"] = flags

    def _properties(self, sections: dict[str, bytes], values: dict[str, int], n: int) -> None:
        """Return properties in one of their three forms, with hostile maps half of the time."""
        chance = self.chance
        form = chance.choice((4, 8, 16))
        if form == 4:
            section = self.properties()
        elif form == 8:
            maps = [self.properties() for _ in range(chance.choice((0, 1, 2, 3)))]
            array = bytes([0x90 | len(maps)]) + b"".join(maps)
            section = _column("i", self._some(range(-1, len(maps)), n), n) + array
        else:
            few = [self.properties() if chance.random() < 0.5 else b"" for _ in range(min(n, 6))]
            pieces = (few * (n // len(few) + 1))[:n] if n <= 1000 else [*few, *[b""] * (n - 6)]
            ends = np.array([0, *accumulate(map(len, pieces))], "<i4")
            section = ends.tobytes() + b"".join(pieces)
        sections["properties"] = section
        values["flags"] = values.get("flags", 0) | form

    def properties(self) -> bytes:
        """Return the MessagePack of one map of properties, or bytes in its place that are none."""
        chance = self.chance
        draw = chance.random()
        if draw < 0.5:
            scalars = (None, True, 5, -1, 1.5, "text", b"bin", 2**64 - 1)
            return _pack({f"p{i}": chance.choice(scalars) for i in range(chance.randrange(4))})
        if draw < 0.9:
            return chance.choice(BAD_MESSAGEPACK)
        if draw < 0.95:
            return chance.randbytes(chance.choice((1, 7, 64)))
        if draw < 0.98:
            return _pack({"p": "x" * chance.choice((65_000, 65_536, 70_000))})
        return b"\xde\x10\x00" + b"\x80" * 4096

    def _compress(self, sections: dict[str, bytes], values: dict[str, int]) -> None:
        chance = self.chance
        codec = chance.choice((1, 2, 3, 4)) if chance.random() < 0.25 else 0
        raw = sections["body"]
        values["codec"], values["body_raw_bytes"] = codec, len(raw)
        if codec:
            sections["body"] = compress(codec, raw)

    # --- damages ----------------------------------------------------------------------------

    def _damage(self, sections: dict[str, bytes], values: dict[str, int], n: int) -> None:
        chance = self.chance
        draw = chance.random()
        if draw < 0.3:
            name = chance.choice(Head._fields)
            values["=" + name] = chance.choice(EXTREMES)
        elif draw < 0.4:
            values["=flags"] = values.get("flags", 0) ^ chance.choice(_FLAGS)
        elif draw < 0.6:
            self._replace_codes(sections, n)
        elif draw < 0.75:
            name = chance.choice(("subjects", "fieldmaps"))
            sections[name], count = self._hostile_table(name)
            values[f"{name}_count"] = count
        elif draw < 0.76:
            self._grow_table(sections, values)
        else:
            name = chance.choice([name for name, section in sections.items() if section])
            sections[name] = self.mutated(sections[name])

    def _replace_codes(self, sections: dict[str, bytes], n: int) -> None:
        """Replace one value of a column of integers: out of range, falling, negative."""
        chance = self.chance
        columns = [name for name in sections if name not in ("subjects", "fieldmaps")]
        name = chance.choice(columns)
        width = 8 if name in ("client_times", "expiries") else 4
        section = bytearray(sections[name])
        places = min(len(section) // width, n + 1)
        if not places:
            return
        at = chance.randrange(places) * width
        value = chance.choice((-1, -2, 1, 2, 5, n, 2**31 - 1, -(2**31)))
        struct.pack_into("<i" if width == 4 else "<q", section, at, value)
        sections[name] = bytes(section)

    def _hostile_table(self, name: str) -> tuple[bytes, int]:
        """Return (the table, how many entries the head is to say that it has)."""
        chance = self.chance
        if chance.random() < 0.3:
            return chance.choice(BAD_MESSAGEPACK), 1
        if name == "subjects":
            entries: tuple[Any, ...] = (
                [], [[]], [[""]], ["a"] * 3, ["x" * 300], [["a"] * 17], [["a", ["b"]]], [1], [None],
                [{"a": "b"}], ["a", b"b"], ["a\ud7ff"], [["a"], "a"],
            )  # fmt: skip
        else:
            entries = (
                [], [{}], [{"": ""}], [{"k": 1}], [{1: "k"}], [{"k" * 300: "v"}],
                [{"k": "v" * 1100}], [{f"k{i}": "" for i in range(70)}], ["a"], [None],
                [{"k": ["v"]}],
            )  # fmt: skip
        table = chance.choice(entries)
        return _pack(table), len(table)

    def _grow_table(self, sections: dict[str, bytes], values: dict[str, int]) -> None:
        """Return a table of many entries, whose count the head may tell or hide."""
        count = self.chance.choice((300, 5_000, 70_000))
        sections["subjects"] = b"\xdd" + count.to_bytes(4, "big") + b"\xa1a" * count
        if self.chance.random() < 0.5:
            values["subjects_count"] = count

    def mutated(self, data: bytes) -> bytes:
        """Return bytes with one of the usual damages: flips, a cut, a repeat, an insertion."""
        chance = self.chance
        if not data:
            return chance.randbytes(3)
        form = chance.randrange(5)
        at = chance.randrange(len(data))
        if form == 0:
            out = bytearray(data)
            for _ in range(chance.choice((1, 1, 2, 8))):
                out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
            return bytes(out)
        if form == 1:
            return data[:at]
        if form == 2:
            return data[:at] + data[at : at + 16] * 2 + data[at:]
        if form == 3:
            return data[:at] + chance.randbytes(chance.choice((1, 4, 8))) + data[at:]
        out = bytearray(data)
        value = chance.choice(EXTREMES) & (2**32 - 1)
        out[at : at + 4] = value.to_bytes(4, chance.choice(("little", "big")))
        return bytes(out)


def _column(kind: str, some: list[int], n: int) -> bytes:
    """Return a column of n integers that repeats some of them. kind: of struct, `i` or `q`."""
    packed = struct.pack(f"<{len(some)}{kind}", *some)
    if n <= len(some):
        return packed
    return (packed * (n // len(some) + 1))[: n * (8 if kind == "q" else 4)]


def _ends(sizes: list[int], n: int) -> tuple[bytes, int]:
    """Return (int32[n+1]: 0, and the ends of n pieces that repeat some sizes; the last end)."""
    if n <= len(sizes):
        few = [0, *accumulate(sizes)]
        return struct.pack(f"<{n + 1}i", *few), few[-1]
    ends = np.zeros(n + 1, "<i4")
    np.cumsum(np.resize(sizes, n), out=ends[1:])
    return ends.tobytes(), int(ends[-1])


def _of_bodies(sizes: list[int], n: int) -> tuple[dict[str, bytes], dict[str, int]]:
    ends, size = _ends(sizes, n)
    return {"subjects": b"\x91\xa1a", "body": ends + b"x" * size}, {"count": n}


def _assembled(sections: dict[str, bytes], values: dict[str, int]) -> bytes:
    """Return the content of these sections. values: of the head; `=` before a name forces one."""
    pieces = []
    for name in _ORDER:
        section = sections.get(name)
        if section:
            pieces += [section, _PAD[-len(section) & 7]]
    tail = b"".join(pieces)
    size = len(sections["body"])
    whole: dict[str, int] = {
        **_BLANK, "content_bytes": 128 + len(tail), "subjects_bytes": len(sections["subjects"]),
        "fieldmaps_bytes": len(sections.get("fieldmaps", b"")),
        "properties_bytes": len(sections.get("properties", b"")),
        "body_bytes": size, "body_raw_bytes": size,
    }  # fmt: skip
    whole.update((name, value) for name, value in values.items() if name[0] != "=")
    for name, value in values.items():
        if name[0] == "=":
            whole[name[1:]] = _fitted(_HEAD_TYPES[name[1:]], value)
    head = HEAD.pack(*whole.values())
    crc = google_crc32c.extend(google_crc32c.value(head[12:]), tail)
    return b"".join((head[:8], crc.to_bytes(4, "little"), head[12:], tail))


def _fitted(kind: str, value: int) -> int:
    bits = _WIDTHS[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind == "q" and value >> (bits - 1) else value
