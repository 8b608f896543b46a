"""Forms of the rows in the tables: a checksum, then MessagePack.

Owns the way from a row of changelog/tables.py to bytes and back. The rules: a form begins with the
row's key, so that a row is whole by itself; it is an array, to which fields may be appended with a
default; a row whose checksum is wrong is raised as damage, never used. Rows that are arrays in
changelog/tables.py are their own form; the others have one here. Bitmaps are bytes, for they may
have more bits than a number in MessagePack. Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from operator import attrgetter
from sys import intern
from typing import Any, Final, Generic, NamedTuple, TypeVar

import google_crc32c
import msgspec

from malamute_py.changelog.records import RequestPut, rows_of
from malamute_py.changelog.tables import (
    CursorRow,
    EndRow,
    GroupRow,
    Hold,
    KeyRow,
    MailboxRow,
    MessageRow,
    Rare,
    RequestRow,
    ServiceRow,
    StagedRow,
    TransactionRow,
)
from malamute_py.store.errors import StoreDamaged

K = TypeVar("K")
V = TypeVar("V")

_CRC = struct.Struct("<I")
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE_ANY = msgspec.msgpack.Decoder().decode


class _RequestForm(msgspec.Struct, array_like=True, gc=False):
    """A RequestRow as it is stored: each set of rows is a bitmap in bytes, usual ones are None."""

    put: RequestPut
    left: bytes | None
    """Bitmap of the rows that are left; None: all rows."""
    waiting: bytes | None
    """Bitmap of the rows that wait; None: all that are left."""
    holds: list[tuple[str, bytes, int, int, bytes]]
    attempts: dict[int, bytes]
    delayed: dict[int, bytes]
    pause_ms: int = 0


_REQUEST = msgspec.msgpack.Decoder(_RequestForm).decode
_RARE = msgspec.msgpack.Decoder(Rare).decode


def _int(rows: bytes) -> int:
    """Return a bitmap of rows, lowest bit first, as a number; rows_of() does the opposite."""
    return int.from_bytes(rows, "little")


def _pack_row(key: Any, row: msgspec.Struct) -> bytes:
    """Encode a row that is an array itself, with its key in it."""
    return _ENCODE(row)


def _reader(kind: type[V], key: Callable[[V], Any]) -> Callable[[Any], tuple[Any, V]]:
    """Return the function that reads rows which are arrays. key: returns a row's key."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(data: Any) -> tuple[Any, V]:
        """Return key and row out of what _pack_row() made."""
        row = decode(data)
        return key(row), row

    return read


def _pack_message(key: tuple[int, int], row: MessageRow) -> bytes:
    """Encode the messages of one put in a mailbox. left: None where all of its rows are left."""
    mailbox, _ = key
    left = None if row.left == (1 << row.count) - 1 else rows_of(row.left)
    rare = None if row.rare is None else _ENCODE(row.rare)
    return _ENCODE((
        mailbox, row.base, row.count, row.size, row.sender, row.at_ms, left,
        row.priority, row.not_before_ms, row.expires_at_ms, row.attempts, rare, row.pause_ms,
    ))  # fmt: skip


_MESSAGE_FIELDS: Final = 13
"""Fields of a stored message that this version knows."""


def _read_message(data: Any) -> tuple[tuple[int, int], MessageRow]:
    """Return key and row out of what _pack_message() made.

    A form of an earlier version lacks the last field; one of a later version may have more.
    """
    (
        mailbox, base, count, size, sender, at_ms, left,
        priority, not_before_ms, expires_at_ms, attempts, rare, *pauses,
    ) = _DECODE_ANY(data)[:_MESSAGE_FIELDS]  # fmt: skip
    # A million rows of a few senders share one string for each sender.
    row = MessageRow(
        base, count, size, intern(sender), at_ms, (1 << count) - 1 if left is None else _int(left),
        priority, not_before_ms, expires_at_ms, attempts, None if rare is None else _RARE(rare),
        *pauses,
    )  # fmt: skip
    return (mailbox, base), row


def _pack_request(key: int, row: RequestRow) -> bytes:
    """Encode a batch of requests with its holds, attempts and delays; usual values are left out."""
    every = (1 << row.put.count) - 1  # a bit for each request of the batch
    return _ENCODE((
        row.put,
        None if row.left == every else rows_of(row.left),
        None if row.waiting == row.left else rows_of(row.waiting),
        [
            (hold.holder, rows_of(hold.rows), hold.at_ms, hold.lease_ms, rows_of(hold.received))
            for hold in row.holds
        ],
        {times: rows_of(rows) for times, rows in row.attempts.items()},
        {at_ms: rows_of(rows) for at_ms, rows in row.delayed.items()},
        row.pause_ms,
    ))  # fmt: skip


def _read_request(data: Any) -> tuple[int, RequestRow]:
    """Return key and row out of what _pack_request() made, its bitmaps as numbers."""
    form = _REQUEST(data)
    put = form.put
    # Many rows of a few senders share one string for each sender.
    put.sender, put.reply_to = intern(put.sender), intern(put.reply_to)
    every = (1 << put.count) - 1  # a bit for each request of the batch
    left = every if form.left is None else _int(form.left)
    row = RequestRow(
        put,
        left,
        left if form.waiting is None else _int(form.waiting),
        [
            Hold(holder, _int(rows), at_ms, lease_ms, _int(received))
            for holder, rows, at_ms, lease_ms, received in form.holds
        ],
        {times: _int(rows) for times, rows in form.attempts.items()},
        {at_ms: _int(rows) for at_ms, rows in form.delayed.items()},
        form.pause_ms,
    )
    return put.base, row


def _pack_key(key: tuple[str, bytes], row: KeyRow) -> bytes:
    """Encode the key of a sender's command, and what it was accepted for."""
    sender, name = key
    return _ENCODE((sender, name, row.base, row.count, row.at_ms, row.use, row.digest))


_KEY_FIELDS: Final = 7
"""Fields of a stored key that this version knows."""


def _read_key(data: Any) -> tuple[tuple[str, bytes], KeyRow]:
    """Return key and row out of what _pack_key() made.

    A form of an earlier version lacks the last fields; one of a later version may have more.
    """
    sender, key, base, count, at_ms, *more = _DECODE_ANY(data)[:_KEY_FIELDS]
    return (sender, key), KeyRow(base, count, at_ms, *more)


class Form(NamedTuple, Generic[K, V]):
    """The form of one table: its name, the columns of its key, and its rows as bytes."""

    table: str
    columns: tuple[str, ...]
    values: Callable[[K], tuple[Any, ...]]
    """Return a key as values of its columns."""
    packed: Callable[[K, V], bytes]
    """Encode a row, with its key."""
    read: Callable[[Any], tuple[K, V]]
    """Return key and row out of what `packed` made."""

    def pack(self, key: K, row: V) -> bytes:
        """Return a row as the table has it: a checksum, then the form with its key in it."""
        data = self.packed(key, row)
        return _CRC.pack(google_crc32c.value(data)) + data

    def unpack(self, data: bytes) -> tuple[K, V]:
        """Return key and row out of what pack() made. Raises StoreDamaged: that is not whole."""
        if type(data) is not bytes or len(data) < _CRC.size:
            # A damaged page may hold any of SQLite's types in its place.
            raise StoreDamaged(f"a row of the table {self.table} is cut short")
        (crc,), body = _CRC.unpack_from(data), data[_CRC.size :]
        if google_crc32c.value(body) != crc:
            raise StoreDamaged(f"a row of the table {self.table} does not bear its checksum")
        try:
            return self.read(body)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise StoreDamaged(
                f"a row of the table {self.table} is of a form that this version does not know"
                f" ({error})"
            ) from error


def _single_value(key: Any) -> tuple[Any, ...]:
    """Return the value of the only column of a key."""
    return (key,)


def _values_in_order(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of a key's columns, which are in the key's order."""
    return key


def _base_first(key: tuple[int, int]) -> tuple[int, int]:
    """Return the values of a message's key (mailbox, base) in the order of its columns.

    `base` comes first there: whether a body is still wanted is asked by its number alone.
    """
    mailbox, base = key
    return base, mailbox


_NUMBER = attrgetter("number")
_STREAM_AND_NAME = attrgetter("stream", "name")

MAILBOXES: Final[Form[int, MailboxRow]] = Form(
    "mailboxes", ("number INTEGER",), _single_value, _pack_row, _reader(MailboxRow, _NUMBER)
)
SERVICES: Final[Form[int, ServiceRow]] = Form(
    "services", ("number INTEGER",), _single_value, _pack_row, _reader(ServiceRow, _NUMBER)
)
MESSAGES: Final[Form[tuple[int, int], MessageRow]] = Form(
    "messages", ("base INTEGER", "mailbox INTEGER"), _base_first, _pack_message, _read_message,
)  # fmt: skip
REQUESTS: Final[Form[int, RequestRow]] = Form(
    "requests", ("base INTEGER",), _single_value, _pack_request, _read_request
)
CURSORS: Final[Form[tuple[int, str], CursorRow]] = Form(
    "cursors", ("stream INTEGER", "name TEXT"), _values_in_order, _pack_row,
    _reader(CursorRow, _STREAM_AND_NAME),
)  # fmt: skip
GROUPS: Final[Form[tuple[int, str], GroupRow]] = Form(
    "groups", ("stream INTEGER", "name TEXT"), _values_in_order, _pack_row,
    _reader(GroupRow, _STREAM_AND_NAME),
)  # fmt: skip
KEYS: Final[Form[tuple[str, bytes], KeyRow]] = Form(
    "keys", ("sender TEXT", "key BLOB"), _values_in_order, _pack_key, _read_key
)
TRANSACTIONS: Final[Form[bytes, TransactionRow]] = Form(
    "transactions",
    ("id BLOB",),
    _single_value,
    _pack_row,
    _reader(TransactionRow, attrgetter("id")),
)
STAGED: Final[Form[int, StagedRow]] = Form(
    "staged", ("base INTEGER",), _single_value, _pack_row, _reader(StagedRow, attrgetter("base"))
)
ENDS: Final[Form[bytes, EndRow]] = Form(
    "ends", ("id BLOB",), _single_value, _pack_row, _reader(EndRow, attrgetter("id"))
)
FORMS: Final[tuple[Form[Any, Any], ...]] = (
    MAILBOXES, SERVICES, MESSAGES, REQUESTS, CURSORS, GROUPS, KEYS, TRANSACTIONS, STAGED, ENDS,
)  # fmt: skip
"""Forms of all tables, in the order of the fields of Queues."""
ADDED: Final[tuple[Form[Any, Any], ...]] = (TRANSACTIONS, STAGED, ENDS)
"""Forms of tables that databases of earlier versions lack: they had no such rows."""
