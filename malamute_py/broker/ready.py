"""The data that passes between the broker core and its shell.

Owns the plain data of the contract: what the core wants done (`Ready`) and what the shell answers.
The rules: the shell does the parts of a Ready in the order of its fields; every bundle of a Ready
is answered, in order, before the journal is called again for its ring and before the next Ready is
taken (a snapshot that the journal asks for in a call is the state before it); once a bundle of a
ring was refused, the later ones of that ring in the same Ready are refused too, and nothing of them
is written; the core itself withholds what depends on durability until it is told `synced`. Source:
docs/design.md, The core and its shell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from malamute_protocol.commands import Command
from malamute_py.changelog.snapshots import ProducerFact
from malamute_py.changelog.tables import Queues

if TYPE_CHECKING:
    from malamute_py.matcher import SubjectRows

Buffer: TypeAlias = Any
"""Bytes, memoryview, or a transport's frame with the buffer protocol (zmq.Frame)."""

MAIN = "main"
"""The ring of the change log and of all streams without one of their own."""
CHANGE_STREAM = 0
"""The stream number of the change log."""
MAIL_STREAM = 0xFFFF_FFFE
"""The stream number of the bodies of mail, requests and replies, in ring main: hidden, and
numbered over all mailboxes and services, so that a number names one message in the broker."""


class Append(msgspec.Struct, frozen=True, gc=False):
    """One batch to be appended to a ring.

    The journal fills in LSN, bundle LSN, synced LSN, epoch and CRC of the stamp.
    A bundle is a list of these for one ring: atomic under one sync.
    """

    stream: int
    base_offset: int
    count: int
    append_time_ms: int
    content: Buffer
    """The producer's content bytes, verified, a multiple of 8 long."""
    content_crc: int
    keys: Any
    """The header table under which the index files the batch
    (malamute_protocol.header.HeaderTable), or None (control)."""
    control_kind: int = 0


class AppendBundle(msgspec.Struct, frozen=True, gc=False):
    """An atomic list of batches for one ring; `token` comes back with the outcome.

    A bundle has no batches when its steps log nothing; it ends where the ring ends, then.
    """

    ring: str
    token: int
    batches: tuple[Append, ...]


class Appended(msgspec.Struct, frozen=True, gc=False):
    """The journal's answer to a bundle: the stamps, in order, and the LSN where it ended."""

    token: int
    stamps: tuple[bytes, ...]
    """96 bytes each, as written."""
    end_lsn: int
    """LSN up to which the ring must be synced for the bundle to be durable."""


class AppendRefused(msgspec.Struct, frozen=True, gc=False):
    """The journal's answer that it took nothing of a bundle."""

    token: int
    code: str
    """`full`, `disk_full`, `journal_failed`, or `wait` while the ring is being opened."""
    reason: str
    retry_ms: int = 0


class ReadRange(msgspec.Struct, frozen=True, gc=False):
    """A read of history that the journal is asked for, off the loop's thread."""

    ring: str
    stream: int
    token: int
    from_offset: int
    end_offset: int
    """The end of the read, exclusive."""
    bytes_max: int
    """Bytes after which the read stops; one batch is always returned when there is one."""
    candidates: Callable[[Any], Any] | None = None
    """HeaderIndex -> BitMap of batches (None: all) that may match; the journal skips the others."""
    client_time: tuple[int, int] | None = None
    matches: Callable[[Any, Any], bool] | None = None
    """Whether a header (keys, fields) is wanted, exactly: rare rows may then come gathered."""
    shared: bool = False
    """Whether others may want the same: the answer may begin before `from_offset`, and may have
    been given before. Without candidates and client time only."""
    alone: bool = False
    """Whether only one reader is left that reads everything: records that were kept to be shared
    are of no use."""
    oldest_ms: int = 0
    """Records that were appended before are past their age: they are a gap by retention."""
    pinned: int = 1 << 63
    """Offset from which on no record is, for a cursor pins them."""
    rows: SubjectRows | None = None
    """The rows of a content that `matches` wants, if they can be found by subject; few rows of a
    batch may then come gathered."""
    places: tuple[int, ...] = ()
    """Not empty: the read is of these copies in the hidden stream MOVED_STREAM, each a batch as the
    stream had it, and of nothing else."""


class HistoryRun(msgspec.Struct, frozen=True, gc=False):
    """Whole batches of one stream as the journal holds them, back to back.

    The journal skipped what cannot match between `from_offset` and the first batch, between runs,
    and after the last one up to the read's `next`.
    """

    data: Buffer
    spans: tuple[tuple[int, int, int, int], ...]
    """(position in data, size, base offset, count) of each batch."""
    next: int = 0
    """Not 0: the run is one derived batch of rows gathered from several, all of them wanted, and
    the last row lies before this offset. Of a read of `places`: the place of the copy."""


class HistoryRead(msgspec.Struct, frozen=True, gc=False):
    """Answer to ReadRange: runs, gaps, and the offset that the read came to."""

    token: int
    runs: tuple[HistoryRun, ...]
    next: int
    """Offset before which everything was read, skipped or is named in `gaps`. Of a read of
    `places`: how many of them were looked at."""
    gaps: tuple[tuple[int, int, str, str], ...] = ()
    """(from, to, code, reason) of offsets that are gone by retention, or damaged."""

    @property
    def gave_up(self) -> bool:
        """Whether records were gone, so that in a stream with keys their copies are to be read."""
        return any(code == "retention" for _, _, code, _ in self.gaps)


class ReadFailed(msgspec.Struct, frozen=True, gc=False):
    """Answer to ReadRange that could not be read; the core ends the subscription by name."""

    token: int
    code: str
    reason: str


class IndexQuery(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A question to the journal's index.

    kind, its arguments, and the value of the answer:
    `find_time` {time_ms, inclusive}: the closest offset at or after (exclusive: after) the
      time, or None when there is none.
    `find_client_time` {time_ms, inclusive}: the same by client time.
    `last_per_subject` {pattern, candidates, from, end, limit}: ascending offsets of the
      latest record of each subject among those that match, in [from, end); at most limit+1.
    `plan` {from, end, pattern, candidates, records_max, bytes_max, split_bytes, client_time,
      splits_max, purges, oldest_ms, pinned}: {"young", "to", "splits": [[from, to, bytes], ...],
      "records", "bytes", "begin"}. records_max counts records that match; `to` may lie before that
      cap is met, and is asked from again. purges: marks of what was purged. oldest_ms, pinned: as
      of ReadRange; young: offset before which all records are older; begin: offset at which the
      first batch begins that `bytes` counts.
    `batch` {offset, copy}: the whole batch that holds the offset, stamp and content, or the one in
      the copy at a place (None: there is no copy); None: it is gone.
    `keys` {from, end, bytes}: {"newest": NewestColumns, "next"}: the newest record of each subject
      among some `bytes` of batches from an offset on; it is asked again from `next`.
    `moved_keys` {from, end, bytes}: {"rows": [(subject, offset, bytes, append time of a deletion
      marker or None, offset of the copy), ...], "next"}: the same of the hidden stream of copies;
      its rows name the records by the offsets that they had.
    `copies` {offsets, places}: [(copy, offsets of its rows), ...] of the records at these offsets,
      and of those that the copies at these places hold; a record that cannot be read is in none.
      places: {place of a copy: offsets}.
    `oldest_segments` {}: {"segment_bytes", "segments" (that the ring may have), "start_lsn",
      "oldest": [[end LSN, {stream: offset after its last record there}], ...]}: some of the ring's
      segments, the oldest first, and never the one that is being written.
    An answer whose value is an IndexFailure refuses the command that asked.
    """

    ring: str
    stream: int
    token: int
    kind: str
    arguments: dict[str, Any]
    wanted: Callable[[], bool] | None = None
    """Returns whether a reader still waits for the answer (None: yes); from any thread. If not, any
    answer will do, and the work is not worth it."""


class IndexFailure(msgspec.Struct, frozen=True, gc=False):
    """Answer to a question that could not be asked: a code of the protocol and a reason."""

    code: str
    reason: str


class IndexAnswer(msgspec.Struct, frozen=True, gc=False):
    """Answer to a question; `value` depends on the kind of the question."""

    token: int
    value: Any


class BatchCheck(msgspec.Struct, frozen=True, gc=False):
    """A typed batch that the shell validates in full, off the loop's thread."""

    token: int
    content: Buffer
    schema: bytes
    """Arrow schema message."""


class BatchChecked(msgspec.Struct, frozen=True, gc=False):
    """Answer to BatchCheck: code and reason why the batch is none of the schema; "": it is one."""

    token: int
    code: str = ""
    reason: str = ""
    error: Exception | None = None
    """An error that no code foresaw: it costs the link."""


class BodiesRead(msgspec.Struct, frozen=True, gc=False):
    """Batches of the mail stream that the journal, or the checkpoint, is asked for."""

    token: int
    numbers: tuple[int, ...]
    """Number of the first message of each batch, ascending."""


class BodiesFound(msgspec.Struct, frozen=True, gc=False):
    """Answer to BodiesRead: number -> the whole batch, stamp and content.

    A number that is missing is in neither the journal nor the checkpoint; `failed` is the reason
    why reading did.
    """

    token: int
    batches: dict[int, Buffer]
    failed: str = ""


class Send(msgspec.Struct, frozen=True, gc=False):
    """One ZeroMQ message to one link: commands bundled, with their frames."""

    link: int
    commands: Sequence[Command]
    frames: Sequence[Buffer]


class Event(msgspec.Struct, frozen=True, gc=False):
    """An event worth a log line and a metric: a stable name and facts."""

    name: str
    level: str
    facts: dict[str, Any]


class Ready(msgspec.Struct, gc=False):
    """All that the core wants done now, in the order of the fields.

    Settings of a ring: {"memory": bool, "ring_bytes": int (0: as the shell is configured), "full":
    "overwrite" | "refuse"}; opening one that is open does nothing. {"remove": True}: close it and
    delete its files.
    """

    rings: list[tuple[str, dict[str, Any]]]
    """Rings to open before anything is appended to them: (name, settings)."""
    appends: list[AppendBundle]
    """Bundles to append; those of one ring stand together, in their order."""
    sends: list[Send]
    reads: list[ReadRange]
    queries: list[IndexQuery]
    bodies: list[BodiesRead]
    closes: list[int]
    """Links to forget after the sends."""
    trims: list[tuple[str, int, int]]
    """(ring, stream, offset): records before may be dropped; answered by trimmed()."""
    events: list[Event]
    pins: list[tuple[str, str, int, int | None]] = []
    """(ring, name of the pin, stream, offset): the ring keeps the stream's records from there on,
    whatever the pin of this name kept before; None: the pin is given up."""
    checks: list[BatchCheck] = []
    """Batches to validate; each is answered, in any order."""

    def __bool__(self) -> bool:
        """Whether there is anything to do besides waking."""
        return bool(
            self.appends or self.sends or self.reads or self.queries or self.bodies
            or self.closes or self.trims or self.rings or self.events or self.pins
            or self.checks
        )  # fmt: skip


class StreamFacts(msgspec.Struct, frozen=True, gc=False):
    """Facts of one stream that the journal found."""

    first: int
    next: int
    bytes: int = 0
    first_time_ms: int = 0
    last_time_ms: int = 0
    epochs: tuple[tuple[int, int], ...] = ()
    """(epoch, first offset written in it), ascending."""


class RingFacts(msgspec.Struct, frozen=True, gc=False):
    """Facts of one ring that the journal found; all of it is synced by now."""

    end_lsn: int
    snapshot: tuple[bytes, ...] = ()
    """Records of the newest snapshot."""
    changes: tuple[tuple[int, bytes], ...] = ()
    """(offset, record) of the change log since that snapshot; ring main only."""
    producers: tuple[ProducerFact, ...] = ()
    """Data batches since that snapshot that have a producer id, in order."""
    streams: dict[int, StreamFacts] = {}
    """Facts of the ring's streams by number; number 0 is the change log."""
    clean: bool = True
    """Whether the ring was closed in order: nothing that was appended can have been lost since."""
    unseen_next: int = 0
    """Offset at which a stream goes on that is not in `streams`: damage took all that the ring had
    of it."""
    doubtful_bytes: int = 0
    """Bytes of damage that may have held the newest records of the change log."""
    doubtful_to: int = 0
    """Position where that damage ends; 0: there is none."""


class RecoveredState(msgspec.Struct, frozen=True):
    """The recovered past of the broker; empty for a new data directory."""

    rings: dict[str, RingFacts] = {}
    queues: Queues = msgspec.field(default_factory=Queues)
    """The queues as the checkpoint has them; the core takes them over."""
    queue_changes: Iterable[tuple[int, bytes]] = ()
    """(offset, record) of the change log since that checkpoint; read once."""
    queues_lost: str = ""
    """Reason that there are no queues: commands that need them are refused; "": there are."""
    now_ms: int = 0
    """The time of the start; 0: it is not known, and no pause is compared with it."""
