"""Header tables: the distinct subjects and field maps of a batch.

Owns their MessagePack form and the memo of tables seen before. The rule: a table is
parsed and validated once for equal bytes; everything handed out is immutable and
shared. Source: SPEC.md, section 5.3.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec

from malamute_protocol.errors import BatchError
from malamute_protocol.limits import DEFAULT_LIMITS, Limits

SHORT_ARRAY = 0x90
"""The upper four bits of what begins a MessagePack array of less than 16 entries."""
OVER_LENGTH = "of length <="
"""What msgspec says of an array, a map or a text that is longer than allowed."""
_MEMO_BYTES = 16 << 20
_MEMO_TABLE_BYTES = 64 << 10
_HEADERS_MAX = 1 << 17


class Header(NamedTuple):
    """What is matched of a record: its keys and its fields. Hashable; equal when they are."""

    keys: tuple[str, ...]
    """The subject, then further keys."""
    fields: tuple[tuple[str, str], ...] = ()
    """(name, value) in the order of the names; a value of "" marks mere presence."""

    @property
    def subject(self) -> str:
        """The first key."""
        return self.keys[0]


class HeaderTable:
    """The parsed table of one or many batches: equal bytes share one object."""

    __slots__ = (
        "_headers",
        "_plain",
        "_sorted",
        "arrow",
        "field_name_bytes",
        "field_value_bytes",
        "fieldmaps",
        "fields_most",
        "keys",
        "keys_most",
        "passed",
        "subject_bytes",
    )

    def __init__(self, keys: list[tuple[str, ...]], fieldmaps: list[dict[str, str]]) -> None:
        """keys: per subject entry. fieldmaps: per field entry. Not to be changed afterwards."""
        self.keys = keys
        self.fieldmaps = fieldmaps
        self._headers: dict[int, Header] = {}
        self._sorted: dict[int, tuple[tuple[str, str], ...]] = {}
        """Of a field map, what all headers with it share."""
        self.passed: Limits | None = None
        """The limits that the table was last held to, and kept."""
        self.arrow: Any = None
        """Arrow columns of the table, kept here by arrow.py once they are made."""
        self._plain: tuple[Header, ...] | None = None
        self.subject_bytes = _longest(list(chain.from_iterable(keys)))
        self.keys_most = max(map(len, keys), default=0)
        self.fields_most = max(map(len, fieldmaps), default=0)
        self.field_name_bytes = _longest(list(chain.from_iterable(fieldmaps)))
        self.field_value_bytes = _longest(
            list(chain.from_iterable(entry.values() for entry in fieldmaps))
        )

    def header(self, subject_code: int, field_code: int) -> Header:
        """The header of a pair of codes; field code -1: no fields."""
        return self.headers([subject_code * (len(self.fieldmaps) + 1) + field_code + 1])[0]

    def headers(self, pairs: list[int]) -> tuple[Header, ...]:
        """The headers of pairs, each subject code * (count of field maps + 1) + field code + 1."""
        known = self._headers
        try:
            return tuple(map(known.__getitem__, pairs))
        except KeyError:
            pass
        if len(known) + len(pairs) > _HEADERS_MAX:
            # Tables live in the memo, and a peer may pair their entries as it likes.
            known = self._headers = {}
        wide = len(self.fieldmaps) + 1
        for pair in pairs:
            if pair not in known:
                subject, field = divmod(pair, wide)
                known[pair] = Header(self.keys[subject], self._fields(field - 1) if field else ())
        return tuple(map(known.__getitem__, pairs))

    def _fields(self, code: int) -> tuple[tuple[str, str], ...]:
        """One tuple a field map: of its own, it takes most of what a header takes."""
        found = self._sorted.get(code)
        if found is None:
            found = self._sorted[code] = tuple(sorted(self.fieldmaps[code].items()))
        return found

    def plain(self) -> tuple[Header, ...]:
        """Headers of a table without field maps: one a subject entry, in order."""
        if self._plain is None:
            self._plain = tuple(Header(keys) for keys in self.keys)
        return self._plain

    def map_bytes(self) -> list[int]:
        """About how many bytes each field map takes in a column that has it for each record."""
        return [
            sum(map(len, entry)) + sum(map(len, entry.values())) + 8 * len(entry)
            for entry in self.fieldmaps
        ]

    def check(self, limits: Limits) -> None:
        """Raises BatchError `too_large` naming the first limit that the table breaks."""
        for what, size, most in (
            ("a key's bytes", self.subject_bytes, limits.subject_bytes_max),
            ("keys of a record", self.keys_most, limits.keys_max),
            ("fields of a map", self.fields_most, limits.fields_max),
            ("a field name's bytes", self.field_name_bytes, limits.field_name_bytes_max),
            ("a field value's bytes", self.field_value_bytes, limits.field_value_bytes_max),
        ):
            if size > most:
                raise BatchError("too_large", f"{what}: {size}, at most {most}")
        self.passed = limits


class HeaderMemo:
    """Bounded memo of tables by their bytes: two generations, the older is dropped whole.

    Dropping a generation keeps look-ups to one dictionary hit and needs no lock: a race
    between threads costs a second parse, never a wrong table.
    """

    def __init__(self, bytes_max: int = _MEMO_BYTES) -> None:
        """bytes_max: of table bytes held as keys, over both generations."""
        self._young: dict[tuple[bytes, bytes], HeaderTable] = {}
        self._old: dict[tuple[bytes, bytes], HeaderTable] = {}
        self._young_bytes = 0
        self._bytes_max = bytes_max

    def table(
        self, subjects: bytes, fieldmaps: bytes, limits: Limits = DEFAULT_LIMITS
    ) -> HeaderTable:
        """The table of these section bytes (b"": no field maps).

        limits: what parsing is held to. A table from the memo may have been parsed under others:
        HeaderTable.check() compares.
        Raises BatchError when they are not what SPEC.md, section 5.3, says.
        """
        key = (subjects, fieldmaps)
        found = self._young.get(key)
        if found is not None:
            return found
        found = self._old.get(key)
        if found is None:
            found = parse_table(subjects, fieldmaps, limits)
        size = len(subjects) + len(fieldmaps) + 200
        if size <= _MEMO_TABLE_BYTES:
            if self._young_bytes + size > self._bytes_max // 2:
                self._old, self._young, self._young_bytes = self._young, {}, 0
            self._young[key] = found
            self._young_bytes += size
        return found


MEMO = HeaderMemo()
"""Shared by default: a cache of pure facts, so sharing it over brokers changes nothing."""


@cache
def _decoders(headers_max: int, keys_max: int, fields_max: int) -> tuple[Any, Any]:
    """Decoders of the subjects and of the field maps, which count before they parse.

    A length that an array or a map claims is refused before an entry of it becomes an object:
    16 MiB of empty strings would take 1.3 GiB.
    """
    entries, keys, fields = (
        msgspec.Meta(max_length=n) for n in (headers_max, keys_max, fields_max)
    )
    subjects = Annotated[list[str | Annotated[list[str], keys]], entries]
    fieldmaps = Annotated[list[Annotated[dict[str, str], fields]], entries]
    return msgspec.msgpack.Decoder(subjects), msgspec.msgpack.Decoder(fieldmaps)


def parse_table(subjects: bytes, fieldmaps: bytes, limits: Limits = DEFAULT_LIMITS) -> HeaderTable:
    """Parse the two sections without the memo.

    Raises BatchError: not MessagePack of the right shape, bad UTF-8, an entry without keys;
    `too_large`: more entries, keys or fields than the limits allow, of which none was parsed.
    """
    of_subjects, of_fieldmaps = _decoders(limits.headers_max, limits.keys_max, limits.fields_max)
    entries = _decode(of_subjects, subjects, "subjects")
    maps = _decode(of_fieldmaps, fieldmaps, "field maps") if fieldmaps else []
    keys = [(entry,) if type(entry) is str else tuple(entry) for entry in entries]
    if not all(keys):
        raise BatchError("bad_batch", "the subjects table has an entry without a key")
    return HeaderTable(keys, maps)


def _decode(decoder: Any, data: bytes, what: str) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        code = "too_large" if OVER_LENGTH in str(error) else "bad_batch"
        raise BatchError(code, f"the {what} table: {error}") from error


def check_counts(table: HeaderTable, subjects_count: int, fieldmaps_count: int) -> None:
    """Raises BatchError when the head's counts are not the table's."""
    if len(table.keys) != subjects_count:
        raise BatchError(
            "bad_batch", f"{len(table.keys)} subjects where the head says {subjects_count}", 84
        )
    if len(table.fieldmaps) != fieldmaps_count:
        raise BatchError(
            "bad_batch", f"{len(table.fieldmaps)} field maps, the head says {fieldmaps_count}", 92
        )


def claimed_length(data: Any) -> int:
    """How many entries MessagePack bytes claim to have as an array; -1: they are none."""
    kind = data[0] if len(data) else 0
    if kind & 0xF0 == SHORT_ARRAY:
        return int(kind & 0x0F)
    width = {0xDC: 2, 0xDD: 4}.get(kind, 0)
    if not width or len(data) <= width:
        return -1
    return int.from_bytes(data[1 : 1 + width], "big")


def _longest(texts: Collection[str]) -> int:
    """Bytes of the longest text as UTF-8."""
    if all(map(str.isascii, texts)):
        return max(map(len, texts), default=0)
    return max(len(text.encode()) for text in texts)
