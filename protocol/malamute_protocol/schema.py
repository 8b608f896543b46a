"""Declared Arrow schemas: their columns, their ids, and the rule by which they grow.

Owns what a broker knows of a typed stream's schema. The rules: no Arrow library is needed; whatever
the bytes are, reading them raises SchemaError or works; a schema follows another only when each
value of the older one is a value of the newer one. Source: SPEC.md, section 5.9, and the files
Message.fbs and Schema.fbs of Arrow's format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import google_crc32c

from malamute_protocol.errors import ProtocolError

COLUMNS_MAX: Final = 4096
"""Columns of a schema, those within lists and structs included."""
NAME_BYTES_MAX: Final = 1024
_ENTRIES_MAX: Final = 4 * COLUMNS_MAX
_DEPTH_MAX: Final = 32
_CONTINUATION: Final = 0xFFFFFFFF
_PREFIX: Final = struct.Struct("<II")
"""An encapsulated message begins with _CONTINUATION and its size."""

_SCHEMA: Final = 1
"""Number of a schema in the union MessageHeader."""
# Numbers of the fields of Arrow's tables Message, Schema, Field and KeyValue.
_MESSAGE_TYPE, _MESSAGE_HEADER = 1, 2
_ENDIANNESS, _COLUMNS = 0, 1
_NAME, _NULLABLE, _TYPE_NUMBER, _TYPE, _DICTIONARY, _CHILDREN, _METADATA = range(7)
_KEY, _VALUE = 0, 1
_EXTENSION: Final = "ARROW:extension:name"

_UNITS: Final = ("s", "ms", "us", "ns")
_FLOATS: Final = ("halffloat", "float", "double")
_TYPES_WITHOUT_PARAMETERS: Final = {
    1: "null", 4: "binary", 5: "string", 6: "bool", 12: "list", 13: "struct", 19: "large_binary",
    20: "large_string", 21: "large_list", 22: "run_end_encoded", 23: "binary_view",
    24: "string_view", 25: "list_view", 26: "large_list_view",
}  # fmt: skip
"""Number in the union Type -> name, of the types without parameters."""
_WIDENING: Final = (
    ("int8", "int16", "int32", "int64"),
    ("uint8", "uint16", "uint32", "uint64"),
    _FLOATS,
)
WIDER: Final = {
    (narrow, wide)
    for row in _WIDENING
    for place, narrow in enumerate(row)
    for wide in row[place + 1 :]
}
"""(type, wider type): each value of the first is one of the second."""


class SchemaError(ProtocolError):
    """Bytes that claim to be a schema are none, or one that a stream cannot declare."""

    def __init__(self, reason: str) -> None:
        """reason: what is wrong."""
        super().__init__("bad_schema", reason)


class Column(NamedTuple):
    """One column of a schema."""

    name: str
    type: str
    """Arrow's name of the type, with its parameters."""
    nullable: bool
    children: tuple[Column, ...] = ()
    """Columns within a list, a map or a struct."""
    extension: str = ""
    """Name of the extension type that the column's metadata states."""

    def __str__(self) -> str:
        """Return the column as errors and people name it: name, type and what lies within."""
        inner = ", ".join(map(str, self.children))
        kind = f"{self.type}<{inner}>" if inner else self.type
        named = f"{self.name}: {kind}" + ("" if self.nullable else " not null")
        return f"{named} ({self.extension})" if self.extension else named


def schema_id(message: bytes) -> int:
    """Return the number by which contents name a schema; never 0, which stands for no schema."""
    return int(google_crc32c.value(message)) or 1


def read_schema(message: bytes) -> tuple[Column, ...]:
    """Return the columns of an encapsulated Arrow IPC schema message, which a client declares.

    Raises SchemaError.
    """
    try:
        columns = _Reading(message).columns()
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise SchemaError(f"no Arrow schema message: {error}") from error
    if not columns:
        raise SchemaError("a schema without columns")
    names = [column.name for column in columns]
    if len(set(names)) < len(names) or "" in names:
        raise SchemaError("the names of the columns differ from each other, and none is empty")
    return columns


def misfit(older: Sequence[Column], newer: Sequence[Column]) -> str:
    """Return why a schema cannot follow another, the column first; empty: it can.

    A newer schema has the older one's columns in their order, each with its type or a wider one,
    and after them further ones that are nullable. A broker asks when a stream's schema is edited.
    """
    for place, old in enumerate(older):
        if place >= len(newer):
            return f"column '{old.name}' is missing: columns are never removed"
        new = newer[place]
        if new.name != old.name:
            return f"column {place} is '{new.name}' where the stream has '{old.name}'"
        if new.nullable != old.nullable:
            words = ("not null", "nullable")
            return (
                f"column '{old.name}' is {words[new.nullable]} where the stream's is "
                f"{words[old.nullable]}"
            )
        same = old.children == new.children and old.extension == new.extension
        if not same or (new.type != old.type and (old.type, new.type) not in WIDER):
            return f"column '{old.name}' is '{new}' where the stream has '{old}'"
    for new in newer[len(older) :]:
        if not new.nullable:
            return f"the new column '{new.name}' is not null: older records have no value for it"
    return ""


class Schemas:
    """The versions of a stream's schema, oldest first."""

    __slots__ = ("arrow", "versions")

    def __init__(self, versions: Iterable[Sequence[Any]]) -> None:
        """versions: (id, schema message) of each, oldest first; at least one."""
        self.versions: dict[int, bytes] = {number: bytes(message) for number, message in versions}
        self.arrow: dict[int, Any] = {}
        """Versions as pyarrow schemas, kept by arrow.py."""

    @property
    def newest(self) -> int:
        """Id of the newest version."""
        return next(reversed(self.versions))

    def with_version(self, number: int, message: bytes) -> Schemas:
        """Return these versions and a newer one, which SCHEMA has told a reader of."""
        return Schemas([*self.versions.items(), (number, message)])


def table_field(data: Any, table: int, number: int) -> int:
    """Return the position of a field of a FlatBuffers table; 0: the table has none.

    Raises struct.error: it would lie outside of the data.
    """
    # A table begins with how far before it its layout lies: a list of 16-bit numbers, first two
    # sizes, then for each field where it lies in the table, or 0. The list may end early.
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    if vtable < 0:
        raise struct.error("a table's layout lies before the data")
    (size,) = struct.unpack_from("<H", data, vtable)
    at = 4 + 2 * number
    place = int(struct.unpack_from("<H", data, vtable + at)[0]) if at < size else 0
    return table + place if place else 0


class _Reading:
    """One pass over a schema message."""

    def __init__(self, message: bytes) -> None:
        mark, size = _PREFIX.unpack_from(message)
        if mark != _CONTINUATION or size % 8 or size != len(message) - _PREFIX.size:
            raise ValueError(f"{len(message)} bytes that are not one encapsulated message")
        self._data = message[_PREFIX.size :]
        self._left = COLUMNS_MAX
        """Columns that may still be read."""
        self._entries_left = _ENTRIES_MAX
        """Entries of lists that may still be read: many columns may name one list."""

    def columns(self) -> tuple[Column, ...]:
        """Return the columns of a schema message.

        Raises ValueError: it is none. Raises SchemaError: a stream cannot declare it.
        """
        root = self._number("<I", 0)
        if self._scalar("<B", root, _MESSAGE_TYPE) != _SCHEMA:
            raise ValueError("it holds something else")
        schema = self._target(root, _MESSAGE_HEADER)
        if not schema:
            raise ValueError("it holds nothing")
        if self._scalar("<h", schema, _ENDIANNESS):
            raise SchemaError("a big-endian schema")
        return self._columns(schema, _COLUMNS, 0)

    def _columns(self, table: int, field: int, depth: int) -> tuple[Column, ...]:
        """Return the columns that a field of a table lists; depth: as of _column()."""
        if depth > _DEPTH_MAX:
            raise SchemaError(f"columns are nested more than {_DEPTH_MAX} deep")
        return tuple(self._column(each, depth) for each in self._tables(table, field))

    def _column(self, field: int, depth: int) -> Column:
        """Return one column with those inside it.

        field: position of the column's table, which Arrow calls Field. depth: how many columns it
        lies in. Raises SchemaError.
        """
        self._left -= 1
        if self._left < 0:
            raise SchemaError(f"more than {COLUMNS_MAX} columns")
        name = self._text(field, _NAME)
        if table_field(self._data, field, _DICTIONARY):
            raise SchemaError(
                f"column '{name}' is dictionary-encoded: declare the type of its values"
            )
        extension = ""
        for entry in self._tables(field, _METADATA):
            if self._text(entry, _KEY) == _EXTENSION:
                extension = self._text(entry, _VALUE)
        return Column(
            name,
            self._type(self._scalar("<B", field, _TYPE_NUMBER), self._target(field, _TYPE), name),
            bool(self._scalar("<B", field, _NULLABLE)),
            self._columns(field, _CHILDREN, depth + 1),
            extension,
        )

    def _type(self, number: int, table: int, column: str) -> str:
        """Return a column's type as text, by the number of its type in Arrow's schema.

        table: position of the type's own table; 0: there is none. The numbers of types, those of
        the fields that of() reads, and their defaults are Schema.fbs's.
        """

        def of(field: int, default: int = 0, form: str = "<i") -> int:
            """Return the number in a field of the type's table. form: as struct has it."""
            return self._scalar(form, table, field, default) if table else default

        if number in _TYPES_WITHOUT_PARAMETERS:
            return _TYPES_WITHOUT_PARAMETERS[number]
        # Units are taken modulo their count: whatever a peer sends has a name, or is refused.
        unit = f"[{_UNITS[of(0, 1, '<h') % 4]}]"  # Of times of day and durations.
        match number:
            case 2:
                return f"{'' if of(1, 0, '<B') else 'u'}int{of(0)}"
            case 3:
                return _FLOATS[of(0, 0, "<h") % 3]
            case 7:
                return f"decimal{of(2, 128)}({of(0)}, {of(1)})"
            case 8:
                return "date64[ms]" if of(0, 1, "<h") else "date32[day]"
            case 9:
                return f"time{of(1, 32)}{unit}"
            case 10:
                zone = self._text(table, 1) if table else ""
                return f"timestamp[{_UNITS[of(0, 0, '<h') % 4]}{', tz=' if zone else ''}{zone}]"
            case 11:
                return f"interval[{of(0, 0, '<h')}]"
            case 14:
                ids = self._vector("<i", table, 1) if table else ()
                return f"union[{of(0, 0, '<h')}, {', '.join(map(str, ids))}]"
            case 15:
                return f"fixed_size_binary[{of(0)}]"
            case 16:
                return f"fixed_size_list[{of(0)}]"
            case 17:
                return "map[sorted]" if of(0, 0, "<B") else "map"
            case 18:
                return f"duration{unit}"
        raise SchemaError(f"column '{column}' has type {number}, which is not known")

    # --- FlatBuffers -------------------------------------------------------------------

    def _number(self, form: str, at: int) -> int:
        """Return the number at a position. Raises ValueError, struct.error: it is outside."""
        if at < 0:
            raise ValueError("a position before the data")
        return int(struct.unpack_from(form, self._data, at)[0])

    def _scalar(self, form: str, table: int, field: int, default: int = 0) -> int:
        """Return the number in a field of a table; `default`: the table has no such field."""
        at = table_field(self._data, table, field)
        return self._number(form, at) if at else default

    def _target(self, table: int, field: int) -> int:
        """Return the position of the table, vector or text a field points to; 0: there is none."""
        at = table_field(self._data, table, field)
        return at + self._number("<I", at) if at else 0

    def _vector(self, form: str, table: int, field: int) -> list[int]:
        """Return the numbers of a vector in a table, each of this form; none: it is absent."""
        start = self._target(table, field)
        if not start:
            return []
        count = self._number("<I", start)
        self._entries_left -= count
        if self._entries_left < 0:
            raise SchemaError(f"more than {_ENTRIES_MAX} columns and metadata")
        # The count and each entry have 4 bytes.
        return [self._number(form, start + 4 + 4 * place) for place in range(count)]

    def _tables(self, table: int, field: int) -> list[int]:
        """Return the position of each table in a vector: an entry says how far after it."""
        start = self._target(table, field)
        places = self._vector("<I", table, field)
        return [start + 4 + 4 * place + to for place, to in enumerate(places)]

    def _text(self, table: int, field: int) -> str:
        """Return a text in a table; empty: it is absent. Raises SchemaError: it is too long."""
        start = self._target(table, field)
        if not start:
            return ""
        size = self._number("<I", start)
        if size > NAME_BYTES_MAX:
            raise SchemaError(f"a name of {size} bytes, at most {NAME_BYTES_MAX}")
        text = self._data[start + 4 : start + 4 + size]
        if len(text) != size:
            raise ValueError("a name is cut short")
        return text.decode()
