"""Snapshots: what each segment of a ring begins with, so that recovery need not go further back.

Owns the form of the tables of streams and producers, and of the producers' sequences, at a
segment's start. The rule: they are those before the bundle that turned the segment. The queues are
not among them: they have a checkpoint of their own. Source: docs/design.md, Journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from malamute_py.changelog.tables import Tables


class Sequence64(msgspec.Struct, array_like=True):
    """Where one producer stands in one stream."""

    producer: int
    epoch: int
    stream: int
    next: int
    runs: list[tuple[int, int, int, int]] = []
    """(first sequence, offset, append time, count) of remembered batches, oldest first. Count 0:
    what follows from this sequence on is remembered, less what damage took."""
    contents: bytes = b""
    """First sequence (u64) and CRC of the content (u32) of the newest batches, oldest first."""


PackedSequence: TypeAlias = msgspec.Raw
"""A Sequence64 as its bytes in a snapshot: kept by its owner until it changes."""


class ProducerFact(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a data batch in the journal says of its producer."""

    stream: int
    producer_id: int
    producer_epoch: int
    first_sequence: int
    count: int
    base_offset: int
    append_time_ms: int
    content_crc: int


class Snapshot(msgspec.Struct):
    """The tables and sequences as of the last bundle that the core was told of.

    The journal asks for it in the middle of a call that writes bundles, and keeps it as the
    state before that call: recovery goes on from there.
    """

    tables: Tables
    change_next: int
    """Offset of the change log up to which `tables` go."""
    sequences: list[Sequence64]


class PackedSnapshot(msgspec.Struct):
    """A Snapshot whose sequences were packed one by one: what did not change is not packed anew."""

    tables: Tables
    change_next: int
    sequences: list[PackedSequence]


_SNAPSHOT = msgspec.msgpack.Decoder(Snapshot)
_PIECE_BYTES = 1 << 20


def pack_sequence(sequence: Sequence64) -> PackedSequence:
    """Its bytes in a snapshot."""
    return msgspec.Raw(msgspec.msgpack.encode(sequence))


def encode_snapshot(snapshot: Snapshot | PackedSnapshot) -> list[bytes]:
    """The snapshot as records of at most a mebibyte each."""
    data = msgspec.msgpack.encode(snapshot)
    return [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]


def decode_snapshot(pieces: Sequence[bytes]) -> Snapshot:
    """Raises msgspec.MsgspecError when the pieces are not a snapshot."""
    return _SNAPSHOT.decode(b"".join(pieces))
