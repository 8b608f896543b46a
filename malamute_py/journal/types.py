"""Plain data that passes in and out of the journal.

Owns the types that callers build and receive. The rule: none of them has behaviour beyond a sum,
and none is shared and changed afterwards. The shapes mirror the contract of core and shell
attribute by attribute, so that neither imports the other. Source: FORMAT.md; docs/design.md,
Journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
from pyroaring import BitMap

Buffer: TypeAlias = Any
"""Bytes, or anything else with the buffer protocol, one byte an item."""

SEGMENT_HEADER_BYTES = 4096
"""At the start of each segment file; also the least distance of ring end and first batch."""


UNINDEXED_FROM: Final = 0xFFFF_FF00
"""Streams of this number or above have no header index: they are read by offset, by append
time, and in order. For many small batches of which no reader asks for a subject."""

NO_KEYS: Final[tuple[tuple[str, ...], tuple[dict[str, str], ...]]] = ((), ())
"""`keys` of a batch for a stream without header index: there is nothing to look at. On any
other stream it counts as None."""


class RingSettings(msgspec.Struct, frozen=True):
    """How a ring is laid out and kept. Only `segment_bytes` is fixed for the ring's life."""

    segment_bytes: int = 64 << 20
    ring_bytes: int = 1 << 30
    """Disk space of all segments together, the spare one included; at least 3 segments."""
    full: Literal["overwrite", "refuse"] = "overwrite"
    index_interval_bytes: int = 16 << 10
    """Adjacent batches of one stream share an index entry up to this many bytes."""
    distinct_headers_max: int = 16_384
    """Distinct headers indexed exactly in one segment; beyond it: leading subject parts, and
    filters of whole subjects and values."""
    pin_bytes_max: int = 1 << 30
    """Pins hold recycling back, on extra disk space, up to this; then the oldest breaks."""
    epochs_max: int = 64
    """(epoch, first offset) pairs kept for each stream."""
    index_memory_bytes: int = 32 << 20
    """Indexes of sealed segments kept in memory."""
    open_files_max: int = 32
    """Sealed segments kept open for reading."""

    def check(self) -> RingSettings:
        """Return itself, for an opening. Raises ValueError naming the setting that cannot be."""
        if self.segment_bytes % SEGMENT_HEADER_BYTES or self.segment_bytes < 65_536:
            raise ValueError(
                f"segment_bytes = {self.segment_bytes}: use a multiple of 4096, 65536 or more"
            )
        if self.segment_bytes >= 1 << 32:
            raise ValueError(f"segment_bytes = {self.segment_bytes}: use less than 4 GiB")
        if self.ring_bytes < 3 * self.segment_bytes:
            raise ValueError(
                f"ring_bytes = {self.ring_bytes}: use at least three segments of"
                f" {self.segment_bytes} bytes, or smaller segments"
            )
        if self.full not in ("overwrite", "refuse"):
            raise ValueError(f"full = {self.full!r}: use 'overwrite' or 'refuse'")
        if self.index_interval_bytes < 0 or self.distinct_headers_max < 1 or self.epochs_max < 2:
            raise ValueError("index_interval_bytes, distinct_headers_max or epochs_max too small")
        return self


class AppendLike(Protocol):
    """Properties of a batch that `append` reads; Append and the core's own type both have them."""

    @property
    def stream(self) -> int: ...  # noqa: D102
    @property
    def base_offset(self) -> int: ...  # noqa: D102
    @property
    def count(self) -> int: ...  # noqa: D102
    @property
    def append_time_ms(self) -> int: ...  # noqa: D102
    @property
    def content(self) -> Buffer: ...  # noqa: D102
    @property
    def content_crc(self) -> int: ...  # noqa: D102
    @property
    def keys(self) -> Any: ...  # noqa: D102
    @property
    def control_kind(self) -> int: ...  # noqa: D102


class Append(msgspec.Struct, frozen=True, gc=False):
    """One batch to be appended."""

    stream: int
    base_offset: int
    count: int
    append_time_ms: int
    content: Buffer
    """The producer's content bytes, verified, a multiple of 8 long."""
    content_crc: int
    keys: Any = None
    """The content's header table (`.keys`, `.fieldmaps`) or a pair of both, or NO_KEYS; None:
    it is read."""
    control_kind: int = 0


class Appended(msgspec.Struct, frozen=True, gc=False):
    """A bundle as it was written."""

    stamps: tuple[bytes, ...]
    """One for each batch given, in order."""
    lsn: int
    """Where the bundle begins."""
    end_lsn: int
    """The bundle is durable when the ring is synced up to here."""


class EpochStart(NamedTuple):
    """From this offset on the stream's records were appended in this epoch."""

    epoch: int
    first_offset: int


class StreamFacts(msgspec.Struct, frozen=True):
    """Facts about one stream in a ring."""

    first: int
    """Offset of the oldest record kept; equal to `next` when there is none."""
    next: int
    bytes: int
    """Size of the batches in the ring's files, stamps included."""
    first_time_ms: int
    """Append time of the oldest batch; 0 when there is none."""
    last_time_ms: int
    """Append time of the newest batch; 0 when there is none."""
    epochs: tuple[EpochStart, ...]


class Run(msgspec.Struct, frozen=True, gc=False):
    """Whole batches of one stream, back to back, with offsets that follow on one another."""

    data: Buffer
    spans: tuple[tuple[int, int, int, int], ...]
    """(position in data, size, base offset, count) of each batch."""
    next: int = 0
    """Not 0: one derived batch of rows gathered from several, the last before this offset."""


class Gap(NamedTuple):
    """Offsets that the ring once had, or should have, and does not serve."""

    from_offset: int
    to_offset: int
    code: str
    """`retention` or `damaged`."""
    reason: str


class History(msgspec.Struct, frozen=True, gc=False):
    """Answer to a read: everything before `next` was read, skipped, or is in `gaps`."""

    runs: tuple[Run, ...]
    next: int
    gaps: tuple[Gap, ...] = ()


class Split(NamedTuple):
    """A part of a plan."""

    from_offset: int
    to_offset: int
    bytes: int
    """Size of the batches in the range that may match."""


class Plan(msgspec.Struct, frozen=True):
    """How far a bounded read would come, cut into parts of about equal size."""

    end: int
    splits: tuple[Split, ...]
    bytes: int
    gaps: tuple[Gap, ...] = ()
    begin: int = 0
    """Offset at which the records begin that `bytes` counts: a batch may begin before the plan."""
    unbroken: tuple[tuple[int, int], ...] = ()
    """Parts [from, to) of which every record is there and none has expired, as far as the index
    knows; none where the plan was not asked for them."""


class HeaderIndex(Protocol):
    """The inverted index of one stream in one segment, as a search sees it.

    Bitmaps hold numbers of index entries. They may be the index's own: combine them
    with whole-bitmap operations, never change them, keep none.
    """

    @property
    def exact(self) -> bool:
        """False: subjects are leading parts ("" may begin anything)."""

    def subjects(self) -> Iterable[tuple[tuple[str, ...], BitMap]]:
        """(keys of a record, entries that hold such a record)."""

    def subject(self, key: str) -> BitMap:
        """Entries that hold a record with exactly this key; that may, where not exact."""

    def field(self, name: str, value: str | None) -> BitMap:
        """Entries with a record that has the field, and, unless None, the value; as subject()."""

    def everything(self) -> BitMap:
        """All entries of the stream."""


Candidates: TypeAlias = Callable[[HeaderIndex], BitMap]
"""Which entries may hold a match; a superset is right, a subset loses records."""


class ChosenRows(Protocol):
    """The rows of a content of which the header is wanted, ascending."""

    @property
    def selection(self) -> bytes:
        """Name of the choice: equal exactly for choices of the same rows of every content."""

    def __call__(self, content: Any, /) -> Any:
        """Return them; None: the batch is to leave whole. Raises BatchError."""

    def of(self, table: Any, codes: Any, /) -> Any:
        """Return them by a header table and each row's subject code, which is a place in it.

        For a batch that was searched before: of it only these two are read again, not the content.
        """


class Control(msgspec.Struct, frozen=True, gc=False):
    """A control batch as recovery found it."""

    kind: int
    lsn: int
    epoch: int
    stream: int
    base_offset: int
    count: int
    append_time_ms: int
    content: bytes


class Produced(msgspec.Struct, frozen=True, gc=False):
    """Facts about a producer that one data batch of it holds."""

    lsn: int
    stream: int
    producer_id: int
    producer_epoch: int
    first_sequence: int
    count: int
    base_offset: int
    append_time_ms: int
    content_crc: int


class Damage(NamedTuple):
    """A part of the ring that was durable and cannot be read any more."""

    from_lsn: int
    to_lsn: int
    segment: int
    reason: str


class Dropped(NamedTuple):
    """An unconfirmed tail that was cut off."""

    from_lsn: int
    to_lsn: int
    reason: str


class Finding(NamedTuple):
    """Something that verify() found; `progress` findings say only how far it came."""

    ring: str
    kind: str
    """`progress`, `damaged`, `missing`, `dropped`, `unknown`, `restorable` (the next start makes
    it anew from another copy of its facts), `index`, `locked` or `ok`."""
    message: str
    done: int = 0
    """Segments read, of `total`."""
    total: int = 0


class Unknown(NamedTuple):
    """A file that was left alone."""

    file: str
    reason: str


class RingEvent(NamedTuple):
    """Something worth a log line: a stable name and facts."""

    name: str
    facts: dict[str, Any]


class Recovery(msgspec.Struct, frozen=True):
    """Findings and repairs of the opening of a ring."""

    end_lsn: int
    epoch: int
    """Epoch of the last batch kept; 0 in an empty ring."""
    clean: bool
    """The ring was closed in order and ends where it was closed."""
    last_append_time_ms: int
    snapshot: tuple[bytes, ...]
    """The caller's state in the newest snapshot; empty when there is no snapshot."""
    snapshot_lsn: int
    """The snapshot is the state before this position; `controls` and `produced` go on from it."""
    controls: tuple[Control, ...]
    produced: tuple[Produced, ...]
    damages: tuple[Damage, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    rewritten: tuple[str, ...] = ()
    """Segment files written anew after a failed sync."""
    unreadable_state: bool = False
    """True when no snapshot could be read although the ring once had one: state is partial."""
    restored: tuple[Unknown, ...] = ()
    """Files that were missing, damaged or cut off, and were made anew from another copy of
    their facts."""
    skipped: dict[int, tuple[int, int]] = {}
    """Stream -> offsets [from, to) left out, as damage may have held records with them."""
    doubtful_bytes: int = 0
    """Bytes of damage that may have held control batches after the last that was found."""
    doubtful_to: int = 0
    """Position where that damage ends; 0: there is none."""
    unseen_next: int = 0
    """Where a stream goes on that exists and of which the recovery found nothing, since damage may
    have held its records; 0: there is no such damage, and the stream begins at 0."""
