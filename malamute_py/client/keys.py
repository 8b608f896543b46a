"""Entries of a key-value view: one value, or one change, of a key.

Owns how an entry is made of the broker's answers and of records. The rule: an entry says whether it
is a deletion; a revision is the offset of the entry's record. Source: SPEC.md, sections 4 and 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from malamute_protocol.batch import Record
from malamute_protocol.content import Content
from malamute_protocol.content_layout import LIST
from malamute_protocol.errors import LocalProtocolError, RemoteProtocolError
from malamute_protocol.keys import DELETION_FIELD, is_deletion
from malamute_protocol.pattern import Pattern, prefix, topic
from malamute_py.client.arguments import integer, text

KEY_BYTES_MAX = 255
"""Bytes of a key: it is the subject of a record."""


class KeyEntry(msgspec.Struct, frozen=True, gc=False):
    """One value of a key, or its deletion."""

    key: str
    value: bytes | list[bytes]
    """The value; a list where the stream's bodies are lists of blobs. b"" of a deletion."""
    revision: int
    """Offset of the record that set it."""
    time_ms: int
    """The broker's time at which it was set, in milliseconds since 1970."""
    fields: dict[str, str] = {}
    deleted: bool = False
    """Whether this is a deletion of the key."""


def key_of(key: Any) -> str:
    """Return a key, checked: text of 1 to KEY_BYTES_MAX bytes. Raises LocalProtocolError."""
    if not text("key", key, KEY_BYTES_MAX):  # text() returns the key itself
        raise LocalProtocolError("bad_setting", "a key has at least one byte")
    return str(key)


def revision_of(revision: Any) -> int:
    """Return a revision. Raises LocalProtocolError."""
    return integer("revision", revision, 0)


def changed_fields(fields: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Return fields that a value may have. Raises LocalProtocolError: one makes it a deletion."""
    if isinstance(fields, Mapping) and DELETION_FIELD in fields:
        raise LocalProtocolError("bad_setting", f"{DELETION_FIELD} is the field of a deletion")
    return fields


def is_elsewhere(answer: Mapping[str, Any]) -> bool:
    """Whether a RESULT of GET_KEY lacks the value, which is too large: it is read as a record."""
    return bool(answer.get("revision")) and "body" not in answer and "batch" not in answer


def entry_of_answer(key: str, answer: Mapping[str, Any]) -> KeyEntry | None:
    """Return the entry that a RESULT of GET_KEY holds; None: there is no such key.

    The answer has the value by itself or, where its body is compressed, the batch that holds it and
    its row there. Raises RemoteProtocolError: it cannot be read.
    """
    try:
        revision = int(answer["revision"])
        if not revision:
            return None
        time_ms = int(answer["time_ms"])
        batch = answer.get("batch")
        if batch is None:
            return KeyEntry(key, answer["body"], revision, time_ms, dict(answer["fields"]))
        return _entry_of_batch(key, Content(batch), int(answer["row"]), revision, time_ms)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RemoteProtocolError("malformed", f"the RESULT of GET_KEY: {error!r}") from error


def _entry_of_batch(key: str, content: Content, row: int, revision: int, time_ms: int) -> KeyEntry:
    """Return one row of a batch as an entry. Raises BatchError: the batch cannot be read.

    revision, time_ms: what the answer says of the row.
    """
    content.check()
    content.check_bodies()
    # Each distinct header, and for each row its place among them; no codes: all have the first.
    headers, codes = content.headers()
    bodies = content.bodies()
    begin, end = int(bodies.offsets[row]), int(bodies.offsets[row + 1])
    value: bytes | list[bytes]
    if content.head.body_kind == LIST:
        assert bodies.parts is not None
        # The offsets of a list are those of its parts, and these have the bounds in the blob.
        bounds = bodies.parts[begin : end + 1].tolist()
        value = [bytes(bodies.blob[low:high]) for low, high in pairwise(bounds)]
    else:
        value = bytes(bodies.blob[begin:end])
    fields = dict(headers[0 if codes is None else int(codes[row])].fields)
    return KeyEntry(key, value, revision, time_ms, fields)


def entry_of_record(record: Record) -> KeyEntry:
    """Return the entry of a record that a subscription brought: a value, or a deletion."""
    fields = dict(record.fields)
    deleted = is_deletion(fields.items())
    value: bytes | list[bytes] = b""
    if not deleted:
        lists = record.batch.content.head.body_kind == LIST
        value = list(record.parts) if lists else record.body
    return KeyEntry(record.subject, value, record.offset, record.append_time_ms, fields, deleted)


def pattern_of_key(key: str) -> Pattern:
    """Return a pattern that selects a key, and perhaps others, which the caller passes over.

    A topic would take `*` and `#` in a key for wildcards: such a key is asked for as a prefix.
    """
    return prefix(key) if "*" in key or "#" in key else topic(key)
