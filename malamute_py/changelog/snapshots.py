"""Snapshots that each segment of a ring begins with, so that recovery need not go further back.

Owns the form of the tables of streams and producers, and of the producers' sequences, at a
segment's start. The rule: the snapshot shows the state before the bundle that began the segment.
The queues are not part of it: they have a checkpoint of their own. Source: docs/design.md, Journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from malamute_py.changelog.tables import Tables

MARK: Final = 1 << 62
"""Producer ids from here on mark the batches of transactions in rings of streams' own (see
broker/streams/arrivals.py): no producer of a client has one."""


class Sequence64(msgspec.Struct, array_like=True):
    """The sequence numbers that the broker remembers of one producer in one stream."""

    producer: int
    epoch: int
    stream: int
    next: int
    runs: list[tuple[int, int, int, int]] = []
    """Remembered batches as (first sequence, offset, append time, count), oldest first. Count 0:
    all later sequences up to the next entry are remembered, except those that damage took."""
    contents: bytes = b""
    """First sequence (u64) and CRC of the content (u32) of the newest batches, oldest first."""


PackedSequence: TypeAlias = msgspec.Raw
"""The bytes of a Sequence64 in a snapshot; its owner keeps them until the sequence changes."""


class ProducerFact(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Facts about the producer of one data batch in the journal."""

    stream: int
    producer_id: int
    producer_epoch: int
    first_sequence: int
    count: int
    base_offset: int
    append_time_ms: int
    content_crc: int


class Snapshot(msgspec.Struct):
    """The tables and sequences after the last bundle whose write the core was told of.

    The journal asks for it in the middle of a call that writes bundles, and keeps it as the state
    before that call: recovery goes on from there.
    """

    tables: Tables
    change_next: int
    """Offset of the change log up to which `tables` has all changes."""
    sequences: list[Sequence64]


class PackedSnapshot(msgspec.Struct):
    """A Snapshot with sequences packed one by one, so that unchanged ones are not packed again."""

    tables: Tables
    change_next: int
    sequences: list[PackedSequence]


_SNAPSHOT = msgspec.msgpack.Decoder(Snapshot)
_PIECE_BYTES = 1 << 20


def pack_sequence(sequence: Sequence64) -> PackedSequence:
    """Encode a sequence as a snapshot has it."""
    return msgspec.Raw(msgspec.msgpack.encode(sequence))


def encode_snapshot(snapshot: Snapshot | PackedSnapshot) -> list[bytes]:
    """Encode the snapshot as records of at most a mebibyte each, for the start of a segment."""
    data = msgspec.msgpack.encode(snapshot)
    return [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]


def decode_snapshot(pieces: Sequence[bytes]) -> Snapshot:
    """Decode the pieces of a snapshot; raises msgspec.MsgspecError when they are none."""
    return _SNAPSHOT.decode(b"".join(pieces))
