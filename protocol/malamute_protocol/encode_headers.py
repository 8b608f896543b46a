"""The headers of records on their way into a content: from arguments to the sections before bodies.

Owns the arguments of encode() and its variants beside the bodies, and how subjects, fields, times
and properties are packed. The rule: input that Content.verify() would not pass raises
LocalProtocolError, naming what and where. Source: SPEC.md, sections 5.3 to 5.5.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypedDict

import msgspec
import numpy as np

from malamute_protocol.columns import I4, I8, Array
from malamute_protocol.content_layout import (
    PROPERTIES_COLUMN,
    PROPERTIES_CONSTANT,
    PROPERTIES_DICTIONARY,
)
from malamute_protocol.errors import BatchError, BatchTooLarge, LocalProtocolError
from malamute_protocol.header import ENCODER, MEMO, HeaderTable
from malamute_protocol.limits import UNBOUNDED, UNCHECKED, Limits
from malamute_protocol.properties import parse_properties

_PACKED_MAX: Final = 4096
"""Subjects whose section is kept: most batches have one subject, and few differ."""
_packed: dict[str, bytes] = {}
"""Subject -> packed section of a table that has it alone."""


class Options(TypedDict, total=False):
    """Arguments of encode() and its variants beside the bodies; each may be left out.

    A header has one of three forms: one value for all records, a sequence with one for each record,
    or a table of distinct values with codes (fastest for many headers).
    """

    subject: str | Sequence[str | Sequence[str]] | None
    """Subject of all records, or one for each: a str, or a sequence of str: the subject, further
    keys."""
    keys: Sequence[str]
    """Further keys of every record."""
    subject_table: Sequence[str | Sequence[str]]
    subject_codes: Sequence[int] | Array | None
    fields: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None
    field_table: Sequence[Mapping[str, str]]
    field_codes: Sequence[int] | Array | None
    """Codes into field_table; -1: no fields."""
    client_time_ms: int | Sequence[int | None] | Array | None
    expires_at_ms: int | Sequence[int] | Array | None
    """Absolute milliseconds; 0: never."""
    properties: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    property_section: tuple[int, Sequence[Any]]
    """Flag of the section's form, and its pieces as they are: see extract.py."""
    codec: str | int
    producer_id: int
    producer_epoch: int
    first_sequence: int
    transaction_id: int
    schema_id: int
    offset_deltas: Array | None
    append_times_ms: Array | None
    """Append times, for derived batches only: see extract.py."""
    limits: Limits


def pack_subjects(entries: Sequence[str | Sequence[str]]) -> bytes:
    """Pack the subjects section for distinct entries, without padding.

    entries: each a subject, or a sequence of the subject and further keys. One key is packed as a
    text, several as an array.
    """
    if len(entries) == 1 and type(entries[0]) is str:
        subject = entries[0]
        found = _packed.get(subject)
        if found is None:
            if len(_packed) >= _PACKED_MAX:
                _packed.clear()
            found = _packed[subject] = ENCODER.encode([subject])
        return found
    return ENCODER.encode(
        [entry if type(entry) is str or len(entry) != 1 else entry[0] for entry in entries]
    )


def pack_fieldmaps(maps: Sequence[Mapping[str, str]]) -> bytes:
    """Pack the field maps section for distinct maps, without padding; b"" for none."""
    return ENCODER.encode([dict(entry) for entry in maps]) if maps else b""


def subjects_of(count: int, options: Options) -> tuple[tuple[bytes, int], Array | None]:
    """Return the packed subjects and their number, and each row's code; None: one for all.

    options: a table with codes, or one subject or a sequence of them, and further keys of all
    records. Raises LocalProtocolError.
    """
    further = options.get("keys", ())
    if isinstance(further, str):
        raise LocalProtocolError("bad_batch", "keys are a sequence of texts, not one text")
    codes: Array | None = None
    try:
        if "subject_table" in options:
            table = list(options["subject_table"])
            if not table:
                raise LocalProtocolError("bad_batch", "a subject table without an entry")
            codes = _checked_codes(
                count, options.get("subject_codes"), len(table), least=0, what="subject"
            )
        else:
            subject = options.get("subject")
            if subject is None:
                table = [""]
            elif isinstance(subject, str):
                table = [subject]
            else:
                table, codes = _distinct(count, subject)
        if further:
            table = [[e, *further] if isinstance(e, str) else [*e, *further] for e in table]
        return (pack_subjects(table), len(table)), codes
    except (TypeError, ValueError) as error:
        raise LocalProtocolError("bad_batch", f"the subjects: {error}") from error


def _distinct(count: int, subjects: Any) -> tuple[list[Any], Array | None]:
    """Return the distinct subjects of the records, and each record's place among them.

    None for the places: all have the same subject. Raises LocalProtocolError: not one for each
    record.
    """
    if len(subjects) != count:
        raise LocalProtocolError("bad_batch", f"{len(subjects)} subjects for {count} records")
    try:
        index = dict.fromkeys(subjects)
    except TypeError:  # Lists of keys are not hashable.
        subjects = [entry if isinstance(entry, str) else tuple(entry) for entry in subjects]
        index = dict.fromkeys(subjects)
    # ("a",) and "a" are one entry, of which the first place counts.
    places: dict[Any, int] = {}
    codes_of = {
        entry: places.setdefault(
            entry[0] if not isinstance(entry, str) and len(entry) == 1 else entry, len(places)
        )
        for entry in index
    }
    if len(places) == 1:
        return list(places), None
    return list(places), np.fromiter(map(codes_of.__getitem__, subjects), I4, count)


def fieldmaps_of(count: int, options: Options) -> tuple[tuple[bytes, int], Array | None]:
    """Return the packed field maps and their number, and each row's code; None: one for all.

    Code -1 is a row without fields. Raises LocalProtocolError.
    """
    try:
        return _fieldmaps(count, options)
    except (TypeError, ValueError, AttributeError) as error:
        raise LocalProtocolError("bad_batch", f"the fields: {error}") from error


def _fieldmaps(count: int, options: Options) -> tuple[tuple[bytes, int], Array | None]:
    """Do the work of fieldmaps_of(). Raises TypeError and ValueError for wrong types."""
    if "field_table" in options:
        table = list(options["field_table"])
        codes = _checked_codes(
            count, options.get("field_codes"), len(table), least=-1, what="field"
        )
        if not table:
            return (b"", 0), None
        return (pack_fieldmaps(table), len(table)), codes
    fields = options.get("fields")
    if not fields:
        return (b"", 0), None
    if isinstance(fields, Mapping):
        return (pack_fieldmaps([fields]), 1), None
    # A list: to go through another sequence twice may bring other objects.
    fields = list(fields)
    if len(fields) != count:
        raise LocalProtocolError("bad_batch", f"{len(fields)} field maps for {count} records")
    # Records often share one map object: compare by identity first, by value once each.
    objects = {id(entry): entry for entry in fields}
    places: dict[tuple[tuple[str, str], ...], int] = {}
    """Sorted items of a map -> its code."""
    code_of: dict[int, int] = {}
    for identity, entry in objects.items():
        code_of[identity] = (
            places.setdefault(tuple(sorted(entry.items())), len(places)) if entry else -1
        )
    if not places:
        return (b"", 0), None
    packed = pack_fieldmaps([dict(items) for items in places])
    codes = np.fromiter(map(code_of.__getitem__, map(id, fields)), I4, count)
    if len(places) == 1 and int(codes.min()) == 0:  # All have the one map; -1 would be none.
        codes = None
    return (packed, len(places)), codes


def _checked_codes(count: int, codes: Any, entries: int, *, least: int, what: str) -> Array | None:
    """Return a caller's codes as a column, checked. Raises LocalProtocolError.

    entries: how many the table has. least: the lowest code that is allowed. what: `subject` or
    `field`, for the error.
    """
    if codes is None:
        if entries > 1:
            raise LocalProtocolError("bad_batch", f"{entries} {what} entries and no codes")
        return None
    column = np.asarray(codes)
    if column.shape != (count,):
        raise LocalProtocolError("bad_batch", f"{column.size} {what} codes for {count} records")
    if column.dtype.kind not in "iu":
        raise LocalProtocolError("bad_batch", f"{what} codes are integers, not {column.dtype}")
    outside = np.flatnonzero((column < least) | (column >= entries))
    if len(outside):
        row = int(outside[0])
        raise LocalProtocolError(
            "bad_batch", f"{what} code {int(column[row])} of record {row}: {entries} entries"
        )
    return np.ascontiguousarray(column, dtype=I4)


def check_table(
    subjects: tuple[bytes, int],
    fieldmaps: tuple[bytes, int],
    subject_codes: Array | None,
    field_codes: Array | None,
    limits: Limits,
) -> None:
    """Check the header table with its reader's rules, by reading it. Raises LocalProtocolError.

    Not under UNBOUNDED: a batch of some rows of another has a table that was checked. subjects,
    fieldmaps: (packed, number of entries) of each. The codes are for the reason, which names a
    record.
    """
    if limits is UNBOUNDED:
        return
    (packed_subjects, subjects_count), (packed_maps, maps_count) = subjects, fieldmaps
    if max(subjects_count, maps_count) > limits.headers_max:
        raise BatchTooLarge(f"more than {limits.headers_max} distinct headers")
    # Parsed without limits, since check() below names the one that is broken.
    try:
        table = MEMO.table(packed_subjects, packed_maps, UNCHECKED)
        if table.entries > limits.header_entries_max:
            most = limits.header_entries_max
            raise BatchTooLarge(f"{table.entries} keys and fields of all headers, at most {most}")
        table.check(limits)
    except BatchError as error:
        where = ""
        if error.code == "too_large":
            where = _which_record(table, subject_codes, field_codes, limits)
        raise LocalProtocolError(error.code, error.reason + where) from error


def _which_record(
    table: HeaderTable, subject_codes: Array | None, field_codes: Array | None, limits: Limits
) -> str:
    """Say which record breaks a limit of the header table, for the error only.

    Each entry is checked as a table of its own; a row that has the first bad one is named.
    """
    for rows, entries, part in (
        (subject_codes, [HeaderTable([keys], []) for keys in table.keys], "subject"),
        (field_codes, [HeaderTable([], [fields]) for fields in table.fieldmaps], "fields"),
    ):
        for code, entry in enumerate(entries):
            try:
                entry.check(limits)
            except BatchError:
                found = np.flatnonzero(rows == code) if rows is not None else [0]
                return f"; {part} of record {int(found[0]) if len(found) else 'none'}"
    return ""


def times_of(count: int, times: object, what: str, *, none: int) -> Array | None:
    """Return times as a column: one for all rows, or one each. Raises LocalProtocolError.

    none: the value that stands for no time.
    """
    if times is None:
        return None
    # Whatever the caller has: one number, a sequence with None in it, an array of any integers.
    try:
        if isinstance(times, int):
            return np.full(count, times, I8)
        if isinstance(times, Sequence):
            times = [none if time is None else time for time in times]
        column = np.atleast_1d(np.asarray(times))
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError("bad_batch", f"{what}: {error}") from error
    if column.shape != (count,):
        raise LocalProtocolError("bad_batch", f"{column.size} {what} for {count} records")
    kind = column.dtype.kind
    if kind == "O" and isinstance(times, np.ndarray):  # An array of objects: as a list.
        return times_of(count, column.tolist(), what, none=none)
    if kind not in "iu" or (kind == "u" and int(column.max()) >= 1 << 63):
        found = f"{column.dtype}" if kind != "u" else f"{int(column.max())}"
        raise LocalProtocolError("bad_batch", f"{what} are integers of 64 bits, not {found}")
    return np.ascontiguousarray(column, dtype=I8)


def properties_of(count: int, options: Options, limits: Limits) -> tuple[int, list[Any]]:
    """Return (the flag of the properties' form, the pieces of their section); 0: there are none.

    The form is one map for all records, a dictionary with a code for each record where maps repeat,
    or a column of maps. Raises LocalProtocolError.
    """
    section = options.get("property_section")
    if section is not None:  # It was taken from another content, as bytes.
        form, pieces = section
        return form, list(pieces)
    properties: Any = options.get("properties")
    if not properties:
        return 0, []
    if isinstance(properties, Mapping):
        return PROPERTIES_CONSTANT, [pack_properties(properties, limits, row=0)]
    if not isinstance(properties, Collection) or isinstance(properties, (str, bytes)):
        raise LocalProtocolError("bad_batch", "properties are a map, or one for each record")
    if len(properties) != count:
        raise LocalProtocolError("bad_batch", f"{len(properties)} properties, {count} records")
    pieces = [
        pack_properties(entry, limits, row) if entry else b""
        for row, entry in enumerate(properties)
    ]
    distinct = dict.fromkeys(pieces)
    distinct.pop(b"", None)
    if not distinct:
        return 0, []
    if len(distinct) <= count // 2:  # Where maps repeat, each is written once.
        places = dict(zip(distinct, range(len(distinct)), strict=True))
        places[b""] = -1  # The code of a record without properties.
        codes = np.fromiter(map(places.__getitem__, pieces), I4, count)
        return PROPERTIES_DICTIONARY, [codes, _array_of(list(distinct))]
    offsets = np.zeros(count + 1, I4)
    np.cumsum(np.fromiter(map(len, pieces), np.int64, count), out=offsets[1:])
    return PROPERTIES_COLUMN, [offsets, b"".join(pieces)]


def pack_properties(entry: Mapping[str, Any], limits: Limits, row: int) -> bytes:
    """Return the packed properties of one record. Raises LocalProtocolError.

    row: of the record in its batch, for the error.
    """
    try:
        packed = ENCODER.encode(dict(entry))
        parse_properties(packed)  # Raises for values that are no scalars.
    except (BatchError, TypeError, OverflowError, ValueError) as error:
        raise LocalProtocolError("bad_batch", f"properties of record {row}: {error}") from error
    if len(packed) > limits.property_bytes_max:
        raise LocalProtocolError(
            "too_large",
            f"properties of record {row}: {len(packed)} bytes, at most {limits.property_bytes_max}",
        )
    return packed


def _array_of(packed: list[bytes]) -> bytes:
    """Return a MessagePack array of entries that are MessagePack already."""
    return ENCODER.encode([msgspec.Raw(entry) for entry in packed])
