"""The change log: every durable change of the broker's tables, as plain data.

Owns the records of the log, the tables that they make, and the one function that applies
a record. The rule: `apply` sees no clock, no randomness and no link, and applying a record
again changes nothing, so every replay and every replica reaches the same tables. Numbers
of streams are given by record and never used again. Source: DESIGN.md, sections 6 and 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from malamute_protocol.errors import RequestRejected

BODY_KINDS = ("blob", "list", "arrow")
LEVELS = ("stored", "synced")
RING_BYTES_MIN = 1 << 20


class StreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one stream was asked to be. Zero means without a bound of its own."""

    memory: bool = False
    """Kept in memory only: gone when the broker ends."""
    ring_bytes: int = 0
    """A ring of its own of this size; 0: the ring that it shares with others."""
    full: str = "overwrite"
    """What a full ring of its own does: `overwrite` the oldest, or `refuse`."""
    max_bytes: int = 0
    max_age_ms: int = 0
    body_kind: str = ""
    """`blob`, `list` or `arrow`; empty until the first batch settles it."""
    schema: bytes = b""
    """Typed streams: the Arrow schema message that the bodies follow."""
    level: str = "synced"
    """What a publish of level 0 is confirmed at: `stored` or `synced`."""
    description: str = ""

    def check(self) -> None:
        """Raises RequestRejected `bad_setting`, naming the setting and what it may be."""
        for name in ("ring_bytes", "max_bytes", "max_age_ms"):
            if not 0 <= getattr(self, name) < 1 << 62:
                raise RequestRejected("bad_setting", f"{name} is a number of at least 0")
        if self.full not in ("overwrite", "refuse"):
            raise RequestRejected("bad_setting", f"full is overwrite or refuse, not '{self.full}'")
        if self.full == "refuse" and not self.ring_bytes:
            raise RequestRejected(
                "bad_setting", "full = refuse needs ring_bytes: a shared ring overwrites"
            )
        if 0 < self.ring_bytes < RING_BYTES_MIN:
            raise RequestRejected(
                "bad_setting", f"ring_bytes is at least {RING_BYTES_MIN}, or 0 to share a ring"
            )
        if self.body_kind and self.body_kind not in BODY_KINDS:
            raise RequestRejected("bad_setting", f"body_kind is one of {', '.join(BODY_KINDS)}")
        if self.level not in LEVELS:
            raise RequestRejected("bad_setting", f"level is one of {', '.join(LEVELS)}")
        if self.schema and self.body_kind != "arrow":
            raise RequestRejected("bad_setting", "a schema needs body_kind = arrow")


FIXED_SETTINGS = ("memory", "ring_bytes", "full", "schema")
"""What an edit cannot change: records lie where they lie. body_kind may be settled once."""


def settings_of(values: dict[str, Any], bytes_max: int) -> StreamSettings:
    """Settings as a client named them, over the defaults.

    Raises RequestRejected `bad_setting`: unknown, of a wrong type, out of range, too much.
    """
    try:
        settings = msgspec.convert(values, StreamSettings)
        size = len(encode_settings(settings))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise RequestRejected("bad_setting", str(error)) from error
    if size > bytes_max:
        raise RequestRejected("bad_setting", f"settings of {size} bytes, at most {bytes_max}")
    settings.check()
    return settings


def encode_settings(settings: StreamSettings) -> bytes:
    """Settings as MessagePack, those at their default left out."""
    return msgspec.msgpack.encode(settings)


# --- the records ---------------------------------------------------------------------


class StreamCreated(msgspec.Struct, frozen=True, tag_field="change", tag="stream_created"):
    """A stream exists from here on, in `ring`."""

    number: int
    name: str
    uuid: bytes
    ring: str
    settings: StreamSettings
    by: str
    at_ms: int


class StreamEdited(msgspec.Struct, frozen=True, tag_field="change", tag="stream_edited"):
    """A stream has these settings from here on."""

    number: int
    settings: StreamSettings
    at_ms: int


class StreamRemoved(msgspec.Struct, frozen=True, tag_field="change", tag="stream_removed"):
    """A stream and its records are gone; its number stays used."""

    number: int
    at_ms: int


class ProducerOpened(msgspec.Struct, frozen=True, tag_field="change", tag="producer_opened"):
    """A producer id belongs to an identity, and older epochs of it are fenced."""

    id: int
    identity: str
    epoch: int


class ProducersForgotten(
    msgspec.Struct, frozen=True, tag_field="change", tag="producers_forgotten"
):
    """The table was full: these were the longest unused."""

    ids: list[int]


Change: TypeAlias = (
    StreamCreated | StreamEdited | StreamRemoved | ProducerOpened | ProducersForgotten
)

_CHANGE: msgspec.msgpack.Decoder[Change] = msgspec.msgpack.Decoder(Change)


def encode_change(change: Change) -> bytes:
    """One record of the log: a MessagePack map."""
    return msgspec.msgpack.encode(change)


def decode_change(body: bytes) -> Change:
    """A record of the log; raises msgspec.MsgspecError when it is not one."""
    return _CHANGE.decode(body)


# --- the tables ----------------------------------------------------------------------


class StreamRow(msgspec.Struct):
    """What is durably known of one stream."""

    number: int
    name: str
    uuid: bytes
    ring: str
    settings: StreamSettings
    by: str
    created_ms: int


class ProducerRow(msgspec.Struct):
    """What is durably known of one producer."""

    id: int
    identity: str
    epoch: int


class Tables(msgspec.Struct):
    """All that the change log says."""

    streams: dict[int, StreamRow] = {}
    producers: dict[int, ProducerRow] = {}
    """In the order of their opening."""
    next_number: int = 1
    """The next stream's number; 0 is the change log itself."""
    names: dict[str, int] = {}


def apply(tables: Tables, change: Change) -> None:
    """Let one record of the log take effect."""
    if isinstance(change, StreamCreated):
        if change.number < tables.next_number:
            return
        tables.next_number = change.number + 1
        tables.streams[change.number] = StreamRow(
            change.number, change.name, change.uuid, change.ring,
            change.settings, change.by, change.at_ms,
        )  # fmt: skip
        tables.names[change.name] = change.number
    elif isinstance(change, StreamEdited):
        row = tables.streams.get(change.number)
        if row is not None:
            row.settings = change.settings
    elif isinstance(change, StreamRemoved):
        row = tables.streams.pop(change.number, None)
        if row is not None and tables.names.get(row.name) == change.number:
            del tables.names[row.name]
    elif isinstance(change, ProducerOpened):
        known = tables.producers.get(change.id)
        if known is None or known.epoch <= change.epoch:
            tables.producers[change.id] = ProducerRow(change.id, change.identity, change.epoch)
    else:
        for producer in change.ids:
            tables.producers.pop(producer, None)


# --- snapshots -----------------------------------------------------------------------


class Sequence64(msgspec.Struct, array_like=True):
    """Where one producer stands in one stream."""

    producer: int
    epoch: int
    stream: int
    next: int
    runs: list[tuple[int, int, int, int]] = []
    """(first sequence, offset, append time, count) of remembered batches, oldest first."""


class ProducerFact(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a data batch in the journal says of its producer."""

    stream: int
    producer_id: int
    producer_epoch: int
    first_sequence: int
    count: int
    base_offset: int
    append_time_ms: int


class Snapshot(msgspec.Struct):
    """The tables and sequences as of the last bundle that the core was told of.

    The journal asks for it in the middle of a call that writes bundles, and keeps it as the
    state before that call: recovery goes on from there.
    """

    tables: Tables
    change_next: int
    """Offset of the change log up to which `tables` go."""
    sequences: list[Sequence64]


_SNAPSHOT = msgspec.msgpack.Decoder(Snapshot)
_PIECE_BYTES = 1 << 20


def encode_snapshot(snapshot: Snapshot) -> list[bytes]:
    """The snapshot as records of at most a mebibyte each."""
    data = msgspec.msgpack.encode(snapshot)
    return [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]


def decode_snapshot(pieces: Sequence[bytes]) -> Snapshot:
    """Raises msgspec.MsgspecError when the pieces are not a snapshot."""
    return _SNAPSHOT.decode(b"".join(pieces))


def replay(tables: Tables, bodies: Iterable[bytes]) -> None:
    """Apply records of the log in order."""
    for body in bodies:
        apply(tables, decode_change(body))
