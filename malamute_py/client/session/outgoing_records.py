"""Batches of records on their way to a stream, and the lane that they leave by.

Owns what one batch is: rows that gather, a content that was encoded elsewhere, or a change of one
key on a condition. The rule: a batch that was sent keeps its bytes, producer and sequence, until
the broker says that it does not have it. Source: SPEC.md, section 8.

Words: a content is the encoded form of a batch; its head has the producer's id and epoch, and the
sequence, which is the producer's number of its first record. A token is the object at which the
caller of a record waits. `lane.owner` is the Publisher.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar, Final

import google_crc32c
import numpy as np

from malamute_protocol.commands import Confirm, Publish, UpdateKey
from malamute_protocol.content_layout import ARROW, AT, HEAD, Head
from malamute_protocol.errors import BatchTooLarge, LocalProtocolError, MalamuteError
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.session.events import Published
from malamute_py.client.session.lanes import NONE, LastingLane, OutgoingBatch
from malamute_py.client.session.outgoing import CommandSink
from malamute_py.client.session.rows import OutgoingRow, content_of, rows_of_content

UNBOUNDED: Final = 1 << 62
"""Bytes that no batch has."""
_CRC = struct.Struct("<I")
_CRC_AT: Final = AT.content_crc
_CHECKED_FROM: Final = _CRC_AT + _CRC.size
"""Position in a content from which on its CRC is of all bytes."""
_PRODUCER = struct.Struct("<QI")
"""Id and epoch, which follow each other."""
_PRODUCER_AT: Final = AT.producer_id
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_AT: Final = AT.first_sequence


def restamp(content: Any, producer_id: int, producer_epoch: int, sequence: int) -> bytearray:
    """A copy of a batch content under another producer or sequence, its CRC renewed."""
    copy = bytearray(content)
    _PRODUCER.pack_into(copy, _PRODUCER_AT, producer_id, producer_epoch)
    _SEQUENCE.pack_into(copy, _SEQUENCE_AT, sequence)
    # numpy arrays, unlike slices, may be handed to the CRC without a copy.
    checked = np.frombuffer(copy, np.uint8, offset=_CHECKED_FROM)
    _CRC.pack_into(copy, _CRC_AT, google_crc32c.value(checked))
    return copy


def check_crc(content: Any) -> None:
    """Raise LocalProtocolError `corrupt` where a caller's content is not what its CRC was made of.

    Checked before it is queued: restamp() would make the CRC right, whatever the content has become
    since.
    """
    [said] = _CRC.unpack_from(content, _CRC_AT)
    checked = np.frombuffer(content, np.uint8, offset=_CHECKED_FROM)
    if google_crc32c.value(checked) != said:
        raise LocalProtocolError("corrupt", "the content's checksum does not fit")


def stamped_as(content: Any) -> tuple[int, int, int]:
    """(producer id, producer epoch, first sequence) that a content carries."""
    producer_id, producer_epoch = _PRODUCER.unpack_from(content, _PRODUCER_AT)
    [sequence] = _SEQUENCE.unpack_from(content, _SEQUENCE_AT)
    return producer_id, producer_epoch, sequence


class OutgoingRecords(OutgoingBatch):
    """Records of one stream, from the first of them until the broker confirmed or refused all."""

    single: ClassVar[bool] = True
    """Whether each record has a token of its own."""
    keyed: ClassVar[bool] = False
    """Whether the stream must have keys: none is created for the records."""
    typed: ClassVar[bool] = False
    """Whether the stream must have a declared schema: none is created for the records."""

    __slots__ = ("numbered", "parted", "records", "sequence", "since_ms", "tokens")

    lane: StreamLane

    def __init__(self, lane: StreamLane, level: int) -> None:
        super().__init__(lane, level)
        self.tokens: Any = None
        """The callers': one a record when `single`, else one for the batch."""
        self.numbered = level != NONE and lane.owner.idempotent
        """Whether the client gives the batch producer and sequence, rather than its caller."""
        self.sequence = -1
        """Producer's number of the first record; -1: none yet."""
        self.parted = False
        """Whether it leaves in parts, since the broker refused it as too large."""
        self.since_ms = -1
        """Time at which the batch came to the head of its lane; -1: not looked at there yet."""
        self.records = 0
        """Records of the content, once there is one."""

    @property
    def count(self) -> int:
        """Number of the records, in rows or in the content."""
        return len(self.rows) or self.records

    def empty_like(self) -> OutgoingRecords:
        """Make an empty batch for the same place and terms, which part() fills."""
        alike = type(self)(self.lane, self.level)
        alike.sealed = True
        return alike

    @property
    def divisible(self) -> bool:
        """Whether the records may be sent in several batches."""
        return self.count > 1

    def reopen(self) -> None:
        """Make rows of the content again, which are encoded anew when the batch leaves.

        Called where the content is too large for its stream, so that the rows leave in parts.
        """
        rows = rows_of_content(self.content)
        self._give_tokens(rows)
        self.rows, self.content, self.sequence = rows, b"", -1
        self.packing = rows[0].packing

    def _give_tokens(self, rows: list[OutgoingRow]) -> None:
        """Give rows that were read from the content the tokens of their callers."""
        for row, token in zip(rows, self.tokens, strict=True):
            row.token = token

    def encode(self) -> None:
        """Make the content, under the next sequences of the stream, as the batch leaves first.

        Raises LocalProtocolError: it cannot be made. Raises BatchTooLarge, upon which the lane
        divides the batch: several records are more than the broker, or their stream, takes.
        """
        lane, rows = self.lane, self.rows
        if self.parted and len(rows) > 1:
            # The lane divides what is too large, down to single records.
            raise BatchTooLarge("the broker refused these records together")
        producer = lane.owner.stamp_of(lane) if self.numbered else (0, 0, 0)
        try:
            self.content = content_of(rows, lane.limits, producer)
        except BatchTooLarge:
            if len(rows) > 1:
                raise
            # One record is sent all the same, within the limits of all streams, and the broker
            # decides: the encoder also checks the bytes before a codec, and the limit of the stream
            # is about those that the codec leaves.
            self.content = content_of(rows, lane.owner.limits, producer)
        self.bytes = len(self.content) + STAMP_BYTES
        self._drop_rows()
        if self.numbered:
            self.sequence = lane.next_sequence
            lane.next_sequence += self.records

    def _number(self) -> None:
        """Give a content that its caller encoded the stream's next sequence, as it leaves first."""
        lane = self.lane
        wanted = lane.owner.stamp_of(lane)
        if stamped_as(self.content) != wanted:
            self.content = restamp(self.content, *wanted)
        self.sequence = lane.next_sequence
        lane.next_sequence += self.records

    def send(self, out: CommandSink, tracker: int) -> None:
        """Hand over PUBLISH, or UPDATE_KEY, with the content."""
        if self.sequence < 0 and self.numbered:
            self._number()
        out.put(self._command(tracker), self.content)

    def _command(self, tracker: int) -> Publish | UpdateKey:
        """Return the command that the content goes with."""
        return Publish(self.lane.place, tracker, self.level, self.keyed, self.typed)

    def settle(self, outcome: Confirm | MalamuteError) -> None:
        """Give the callers of the records their outcome."""
        if self.rows:  # it fails before it was encoded
            self._drop_rows()
        self.lane.owner.emit(Published(self.tokens, self.records, self.single, outcome))

    def _drop_rows(self) -> None:
        """Drop the rows but for their tokens: from now on the content has their bodies."""
        self.tokens = [row.token for row in self.rows]
        self.records = len(self.rows)
        self.rows = []


class OutgoingContent(OutgoingRecords):
    """Records that their caller had encoded; it has one token for all."""

    single = False

    __slots__ = ()

    def empty_like(self) -> OutgoingRecords:
        """Make an empty batch for the same place and terms, which part() fills."""
        alike = super().empty_like()
        alike.tokens = self.tokens
        return alike

    @property
    def divisible(self) -> bool:
        """Whether the records may be sent in several batches.

        Rows of an Arrow body cannot be told apart without its schema. A producer of the caller's
        own has given the batch one place in its sequence.
        """
        if self.rows:
            return len(self.rows) > 1
        if self.records == 1 or Head._make(HEAD.unpack_from(self.content)).body_kind == ARROW:
            return False
        callers_producer, _, _ = stamped_as(self.content)  # 0: none
        return self.numbered or not callers_producer

    def _give_tokens(self, rows: list[OutgoingRow]) -> None:
        """Leave the rows without tokens: the caller has one for all."""

    def _drop_rows(self) -> None:
        """Drop the rows: their bodies are in the content."""
        self.records = len(self.rows)
        self.rows = []


class OutgoingTable(OutgoingContent):
    """Records of a declared schema, which no reader of a stream made for them would know."""

    typed = True

    __slots__ = ()


class OutgoingPut(OutgoingRecords):
    """Records that set keys; no others join them, since their stream must have keys."""

    keyed = True

    __slots__ = ()


class OutgoingUpdate(OutgoingRecords):
    """One record that changes a key on a condition; no other record joins it."""

    __slots__ = ("_revision",)

    def __init__(self, lane: StreamLane, level: int, revision: int) -> None:
        """revision: what the key must have; 0: it must not be there."""
        super().__init__(lane, level)
        self.sealed = True
        self._revision = revision

    def empty_like(self) -> OutgoingUpdate:
        """Make an empty batch for the same place and terms, which part() fills."""
        return OutgoingUpdate(self.lane, self.level, self._revision)

    def _command(self, tracker: int) -> Publish | UpdateKey:
        """Return the command that the content goes with."""
        return UpdateKey(self.lane.place, tracker, self.level, self._revision)


class StreamLane(LastingLane[OutgoingRecords]):
    """The way to one stream; it stays for its sequence and its limits."""

    __slots__ = ("batch_bytes", "limits", "next_sequence", "refused_bytes", "told_bytes")

    def __init__(self, owner: Any, home: dict[Any, Any], place: Any) -> None:
        super().__init__(owner, home, place)
        self.next_sequence = 0
        self.limits = owner.limits
        """Limits of a batch of the stream, whose ring may be small."""
        self.batch_bytes = owner.batch_bytes
        """Bytes that a batch of the stream is filled to."""
        self.told_bytes: int | None = None
        """Most bytes of a batch of the stream, as the broker told. A smaller batch is refused for
        what is in it, which says nothing of others. None: it did not tell."""
        self.refused_bytes = UNBOUNDED
        """Size of the smallest batch of several records that was too large on this link, while the
        broker does not tell."""
