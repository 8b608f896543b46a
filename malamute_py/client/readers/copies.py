"""Records as they are published again: what a copy keeps of each.

Owns what a copy is made of, for `malamute replay` and the console. The rule: a copy keeps subject,
further keys, fields, times, properties and body; offset and append time are the new stream's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # numpy, which a command that shows no record does not load
    from malamute_protocol.batch import Record


def blobs(record: Record) -> bytes | list[bytes] | None:
    """Return the body: bytes, or a list of its parts; None for a row of an Arrow table."""
    try:
        return record.body
    except TypeError:  # it is a list of parts, or a row of a table
        try:
            return record.parts
        except TypeError:
            return None


def keys(record: Record) -> str | tuple[str, ...]:
    """Return the subject, with the further keys where there are any."""
    found = record.keys
    return found[0] if len(found) == 1 else found


def columns(records: list[Record]) -> dict[str, Any]:
    """Return the further columns of the records as options of publish_many(), a value each.

    A column in which no record has anything is left out.
    """
    found: dict[str, Any] = {}
    fields = [record.fields for record in records]
    if any(fields):
        found["fields"] = [each or None for each in fields]
    times = [record.client_time_ms for record in records]
    if any(each is not None for each in times):
        found["client_time_ms"] = times
    expiries = [record.expires_at_ms or 0 for record in records]
    if any(expiries):
        found["expires_at_ms"] = expiries
    properties = [record.properties for record in records]
    if any(properties):
        found["properties"] = [dict(each) or None for each in properties]
    return found
