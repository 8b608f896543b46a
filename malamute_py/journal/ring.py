"""A ring: one circle of segment files that carries many streams.

Owns appending, syncing and the order of everything else. The rule: a bundle is written whole or not
at all, an offset is never given twice, and after a failed sync nothing more is taken. The threads:
`append`, `begin_with` and the trims belong to the loop thread, `sync` to the sync thread (and to
the loop where a full ring has to be relieved: a lock keeps them apart), the reads to the reader
thread, `prepare_step` and `limit_bytes` to the housekeeping thread, `hold` to any one of them;
facts (`end_lsn`, `synced_lsn`, `streams`, `take_events`) may be asked from any. Source: FORMAT.md;
docs/design.md, Journal.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from malamute_protocol.stamp import SNAPSHOT, Stamp
from malamute_py.journal.appending import Appender, SnapshotSource
from malamute_py.journal.errors import (
    DiskFull,
    JournalError,
    JournalFailed,
)
from malamute_py.journal.follow import Follower, Wanted
from malamute_py.journal.index import LiveIndex, Span
from malamute_py.journal.layout import (
    ACTIVE_FILE,
    CLOSED_FILE,
    FAILED_FILE,
    MANIFEST_FILE,
    RING_FILE,
    Active,
    Closed,
    Failed,
    RingMeta,
    pack_file,
    segment_name,
)
from malamute_py.journal.manifest import STREAMS_MAX, Manifest
from malamute_py.journal.mapping import Mappings
from malamute_py.journal.marks import find_meta, read_mark
from malamute_py.journal.planning import Planner
from malamute_py.journal.reading import Reader
from malamute_py.journal.recovery import Scan
from malamute_py.journal.repair import repair
from malamute_py.journal.searching import Searches
from malamute_py.journal.segment import Segment
from malamute_py.journal.segment_files import SegmentFiles
from malamute_py.journal.space import Space
from malamute_py.journal.storage import Storage, replace_file
from malamute_py.journal.streams import StreamState, StreamTable
from malamute_py.journal.types import (
    Appended,
    AppendLike,
    Recovery,
    RingEvent,
    RingSettings,
    StreamFacts,
    Unknown,
)


def _no_state() -> Sequence[bytes]:
    return ()


class Ring:
    """See the module. Made by open()."""

    def __init__(
        self,
        storage: Storage,
        meta: RingMeta,
        settings: RingSettings,
        epoch: int,
        scan: Scan,
        manifest: Manifest,
        mappings: Mappings | None,
    ) -> None:
        """Use open()."""
        self.uuid = meta.uuid
        self.epoch = epoch
        self.settings = settings
        self._snapshot: SnapshotSource = _no_state
        """Returns the caller's state, which each new segment begins with."""
        self._storage = storage
        self._marks = storage
        """Where a failed sync is written down; see open()."""
        self._manifest = manifest
        self._mappings = mappings
        self._failed_name = FAILED_FILE
        self._segment_bytes = meta.segment_bytes
        self._meta = meta
        self._failure: JournalFailed | None = None
        self._closed = False
        self._closed_in_order = False
        """The ring was closed in order, which is written down with the segments that there are."""
        self._marked = 0
        """Position that the file `closed` names."""
        self._syncing = threading.Lock()
        self._synced_before = -1
        """Position that was synced when housekeeping looked last."""
        self._set_up(scan)

    def _set_up(self, scan: Scan) -> None:
        """Make all parts of the ring from what a scan found."""
        self._streams: StreamTable = scan.streams
        self._synced = scan.end_lsn
        self._space = Space(
            self._storage, self.uuid, self.epoch, self.settings, self._streams, self._forget,
            lambda: self._appender.end, lambda: self._synced, self.sync, self._write_manifest,
            self._detach,
        )  # fmt: skip
        self._files = SegmentFiles(
            self._storage, self.uuid, self.settings, self._streams,
            lambda: self._space.segments, self._rebuild_index, self._mappings,
        )  # fmt: skip
        self._searches = Searches(self._files)
        self._reader = Reader(self._files, self._searches)
        # What callers ask of a part alone, they ask the part: each is described there.
        self.read, self.read_batches = self._reader.read, self._reader.read_batches
        self.closest_offset = self._searches.closest_offset
        self.closest_client_time = self._searches.closest_client_time
        self.last_per_subject = self._searches.last_per_subject
        self.plan = Planner(self._files).plan
        self.hold, self.pin, self.unpin = self._space.hold, self._space.pin, self._space.unpin
        self._appender = Appender(
            self._storage, self._space, self._streams, self.epoch, scan, self._fail
        )
        self._adopt(scan)

    # --- opening and closing ----------------------------------------------------------

    @classmethod
    def open(
        cls,
        storage: Storage,
        *,
        settings: RingSettings,
        epoch: int,
        snapshot: SnapshotSource | None = None,
        marks: Storage | None = None,
        failed_name: str = FAILED_FILE,
        manifests: Storage | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        held: bool = False,
        mappings: Mappings | None = None,
    ) -> tuple[Ring, Recovery]:
        """Open a ring, or begin one; recover it after any kind of end.

        settings: `segment_bytes` counts for a new ring only. epoch: above every epoch
        that the ring has seen. marks: where a failed sync is written down; on another
        place than the ring's own when there is one, as are manifests, where what should be there
        is written down under the same name. entropy: makes a new ring's uuid.
        held: nothing at all is retired until hold() says from where on, or that nothing is.
        mappings: those of the journal, if sealed segments are to be read through mappings.
        Raises JournalCorrupt: nothing tells the ring's facts; ValueError: the epoch is not above
        the ring's last one, or a setting cannot be; DiskFull, OSError.
        """
        if manifests is None:
            manifest = Manifest(storage, MANIFEST_FILE)
        else:
            manifest = Manifest(manifests, failed_name)
        meta, why = find_meta(storage, manifest.expected)
        if meta is None:
            settings.check()
            meta = RingMeta(entropy(16), settings.segment_bytes)
            replace_file(storage, RING_FILE, pack_file(meta))
        else:
            settings = _with_segment_bytes(settings, meta.segment_bytes).check()
            if why:  # the file was missing or damaged
                replace_file(storage, RING_FILE, pack_file(meta))
        marks = storage if marks is None else marks
        scan, rewritten = _load(storage, meta, settings, epoch, marks, failed_name, manifest)
        ring = cls(storage, meta, settings, epoch, scan, manifest, mappings)
        ring._marks, ring._failed_name = marks, failed_name
        if snapshot is not None:
            ring.begin_with(snapshot)
        if held:
            ring._space.held_lsn = ring.start_lsn
        ring._mark(clean=False)
        ring._space.write_manifest()
        # This file counts only beside the mark of an orderly close, which is gone by now. Should
        # a power loss bring the file back, it counts no more.
        with contextlib.suppress(OSError):
            storage.remove(ACTIVE_FILE)
        restored = [Unknown(RING_FILE, why)] if why else []
        return ring, _recovery(scan, rewritten, restored)

    def _adopt(self, scan: Scan) -> None:
        """Give the parts a scan's segments, spares, end and foreign files, as _set_up() ends."""
        space, size = self._space, self._segment_bytes
        space.segments = tuple(scan.segments)
        space.unknown = {unknown.file for unknown in scan.unknown}
        end = scan.end_lsn
        space.next_number = -(-end // size)  # rounded up
        oldest = space.segments[0].number if space.segments else space.next_number
        space.missing_from = scan.first_number if scan.first_number < oldest else None
        if scan.state.snapshot is not None:
            space.state_lsn = scan.state.snapshot.facts.as_of_lsn
        if end % size and (not scan.segments or scan.segments[-1].number != end // size):
            # The end lies in a file that is gone: go on with the next whole segment.
            self._appender.end = self._synced = space.next_number * size
        for segment in scan.spares:
            space.strays[segment.number] = segment
        # Those whose numbers come next are ready to be written; others wait for their turn.
        while space.next_number + len(space.spares) in space.strays:
            space.spares.append(space.strays.pop(space.next_number + len(space.spares)))
        for segment in (*scan.segments[-1:], *scan.spares):
            if segment.file is None:
                segment.file = self._storage.open(segment.name)

    def close(self) -> None:
        """Sync, and write down durably where the ring ends. Any thread; others have stopped.

        Raises JournalFailed when the ring had failed or fails now.
        """
        if self._closed:
            return
        if self._failure is not None:
            self._closed = True
            raise self._failure
        self.sync()
        try:
            self._space.save_floors()
            self._write_active()
            self._mark(clean=True)
            self._closed_in_order = True
            self._space.write_manifest()
        except (OSError, DiskFull) as error:
            self._closed = True
            raise self._fail(f"its end could not be written down ({error})") from error
        self._closed = True

    def _write_active(self) -> None:
        """Write the file `active`, which spares the next opening the walk over the last segment.

        For close(). Nothing needs the file: none is written where a walk is cheap or safer.
        """
        end, space, appender = self._appender.end, self._space, self._appender
        segment = space.segments[-1] if space.segments else None
        if (
            segment is None
            or segment.live is None
            or segment.damaged
            or not segment.base_lsn < end < segment.base_lsn + self._segment_bytes
            or appender.last_lsn < segment.base_lsn  # where its last batch lies is not known
            or not self._storage.persistent
        ):
            return
        index = segment.live.pack(
            self.uuid, segment.number, segment.last_epoch, segment.last_time_ms
        )
        active = Active(
            self.uuid, segment.number, end, appender.last_epoch, appender.last_lsn,
            self._streams.rows(), index,
        )  # fmt: skip
        with contextlib.suppress(OSError, DiskFull):
            replace_file(self._storage, ACTIVE_FILE, pack_file(active))

    def _mark(self, *, clean: bool) -> None:
        """Write the file `closed`, which proves how far the ring was synced.

        Called at an opening, at a close, and once the ring is at rest. Stamps tell that only of
        what was synced before them. clean: the ring is closed in order.
        """
        synced = self._synced
        mark = Closed(self.uuid, synced, self._appender.last_epoch, clean)
        replace_file(self._storage, CLOSED_FILE, pack_file(mark))
        self._marked = synced

    def _write_manifest(self, first: int, last: int, beyond: dict[int, int] | None = None) -> None:
        """Write down durably which segments there should be, and how far the streams came.

        first, last: numbers of the oldest and the newest one. beyond: see Manifest.write.
        """
        if not self._storage.persistent:
            return
        # The end first: a batch that comes meanwhile is in the rows and not before the end.
        end, rows = self._appender.end, None
        if len(self._streams.states) <= STREAMS_MAX:
            table = self._streams.rows().items()
            rows = {number: (after, first_offset) for number, (after, first_offset, _) in table}
        self._manifest.write(
            self.uuid, self._segment_bytes, self.epoch, first, last, end, rows,
            clean=self._closed_in_order, beyond=beyond,
        )  # fmt: skip

    # --- appending (loop thread) --------------------------------------------------------

    def begin_with(self, snapshot: SnapshotSource) -> None:
        """Have each segment from now on begin with the caller's state.

        snapshot: returns the state as of all bundles appended so far. A caller whose state is in
        the ring has one only after open().
        """
        self._snapshot = snapshot

    def append(self, batches: Sequence[AppendLike]) -> Appended:
        """Write one bundle; durable only after sync().

        batches: for any streams; atomic together. Append time never goes back: a lower
        one is raised to the last one written, and the stamp says so.
        Raises JournalFull, DiskFull, JournalCorrupt, BatchTooLarge, ValueError: nothing
        was written; JournalFailed: the ring takes nothing more.
        """
        if self._failure is not None:
            raise self._failure
        return self._appender.append(batches, self._synced, self._snapshot)

    # --- syncing (sync thread) ------------------------------------------------------------

    def sync(self) -> int:
        """Make everything appended so far durable; returns the position synced up to.

        Raises JournalFailed: the ring is sealed. A failed sync is never retried: the
        kernel may have marked the pages clean, and a second try would lie.
        """
        with self._syncing:
            return self._sync()

    def _sync(self) -> int:
        """Do what sync() does, under its lock: sync each segment with bytes that were not synced.

        Raises JournalFailed, and the ring takes nothing more.
        """
        if self._failure is not None:
            raise self._failure
        end, begin = self._appender.end, self._synced
        if end == begin:
            return end
        size = self._segment_bytes
        try:
            for segment in self._space.segments:
                # Only those that hold some of what was appended since the last sync.
                if segment.base_lsn < end and segment.base_lsn + size > begin:
                    file = segment.file
                    if file is not None and not segment.retired:
                        self._storage.sync(file)
        except (OSError, DiskFull) as error:
            raise self._fail(f"a sync failed ({error})") from error
        self._synced = end
        return end

    def _fail(self, what: str) -> JournalFailed:
        """Seal the ring after a failed write or sync; returns the error to raise, now and later.

        It is written down elsewhere than where it failed: the next opening must know of it.
        """
        reason = (
            f"{what} in the ring in {self._storage.describe()}: it is sealed at position"
            f" {self._synced}; check the disk, then restart the broker"
        )
        failure = JournalFailed(reason, self._synced)
        self._failure = failure
        mark = Failed(self.uuid, self._synced, self._appender.end, self.epoch, what)
        try:
            replace_file(self._marks, self._failed_name, pack_file(mark))
        except (OSError, JournalError) as error:
            failure = JournalFailed(
                f"{reason} (and this could not be noted: {error})", self._synced
            )
            self._failure = failure
        return failure

    @property
    def failure(self) -> JournalFailed | None:
        """Why the ring is sealed; None while it is well."""
        return self._failure

    # --- facts (any thread) -----------------------------------------------------------------

    @property
    def end_lsn(self) -> int:
        """Position after the last bundle."""
        return self._appender.end

    @property
    def synced_lsn(self) -> int:
        """Everything before this position is durable."""
        return self._synced

    @property
    def start_lsn(self) -> int:
        """Position of the oldest segment kept."""
        segments = self._space.segments
        return segments[0].base_lsn if segments else self._appender.end

    @property
    def last_append_time_ms(self) -> int:
        """Append time of the last batch; it never goes back."""
        return self._appender.last_time_ms

    @property
    def prepared_in_append(self) -> int:
        """How often append() found no segment prepared and did it itself."""
        return self._space.prepared_in_append

    @property
    def held_lsn(self) -> int | None:
        """Return the LSN from which on hold() keeps the ring; None: there is no hold."""
        return self._space.held_lsn

    @property
    def held_bytes(self) -> int:
        """Return the bytes from the caller's hold() to the end of the ring; 0 without a hold."""
        held = self._space.held_lsn
        return 0 if held is None else max(self._appender.end - held, 0)

    @property
    def capacity_bytes(self) -> int:
        """Bytes up to which held_bytes may grow before an append is refused for the hold.

        All segments but one: the one with the hold's position is kept whole, wherever that is.
        """
        return (self._space.capacity - 1) * self._segment_bytes

    def go_on(self, offsets: Mapping[int, int]) -> None:
        """Have streams of which damage left nothing go on at these offsets, in later starts too.

        Called at a start, by what ring main tells, lest an offset be given twice. A later start may
        know nothing of the damage; the manifest tells it, of as many streams as it has room for.
        Raises DiskFull, OSError.
        """
        for stream, offset in offsets.items():
            self._streams.note_next(stream, offset)
            self._streams.note_lost_beginning(stream, 0)
        known = self._manifest.expected
        if known is not None:
            room = max(0, STREAMS_MAX - len(known.beyond))
            beyond = {**known.beyond, **dict(islice(offsets.items(), room))}
            self._write_manifest(known.first, known.last, beyond)

    def next_offset(self, stream: int) -> int:
        """Offset of the stream's next record."""
        return self._streams.bounds(stream)[1]

    def oldest_segments(self, most: int) -> list[tuple[int, dict[int, int]]]:
        """Return (end LSN, {stream: offset after its last record there}) of the oldest segments.

        For the compaction of streams with keys, which copies newest records on before these
        segments go. The one that is being written is none of them. Any thread may call it.
        """
        size = self._segment_bytes
        return [
            (segment.base_lsn + size, {n: span.next for n, span in segment.spans.copy().items()})
            for segment in self._space.segments[:-1][:most]
        ]

    def first_offset(self, stream: int) -> int:
        """Offset of the oldest record kept; next_offset when there is none."""
        return self._streams.bounds(stream)[0]

    def streams(self) -> dict[int, StreamFacts]:
        """Facts of every stream that the ring has ever held."""
        # Copies: the loop thread may add streams meanwhile.
        states = self._streams.states.copy()
        spans: dict[int, list[Span]] = {number: [] for number in states}
        # By segment: looking into each segment for each stream would take streams x segments.
        for segment in self._space.segments:
            for number, span in segment.spans.copy().items():
                if number in spans:
                    spans[number].append(span)
        return {number: _facts_of(state, spans[number]) for number, state in states.items()}

    def facts(self, stream: int) -> StreamFacts:
        """Facts of one stream; of an unknown one: all zero."""
        state = self._streams.states.get(stream)
        if state is None:
            return StreamFacts(0, 0, 0, 0, 0, ())
        spans = [s.spans[stream] for s in self._space.segments if stream in s.spans]
        return _facts_of(state, spans)

    def bytes_on_disk(self) -> int:
        """Size of all segment files, with those that are prepared for appends to come."""
        space = self._space
        files = len(space.segments) + len(space.spares) + len(space.strays)
        return files * self._segment_bytes

    def take_events(self) -> list[RingEvent]:
        """Remove and return the events since the last call; each is worth a log line."""
        events, taken = self._space.events, []
        while events:
            taken.append(events.popleft())
        return taken

    # --- reading (reader thread) ----------------------------------------------------------

    def follow(
        self, from_lsn: int, to_lsn: int, wanted: Wanted | None = None
    ) -> Iterator[tuple[Stamp, memoryview]]:
        """Yield the batches in [from, to), those whose stamp is `wanted`; see Follower.read.

        For a start, which reads the changes since a checkpoint. Raises FollowLost, OSError.
        """
        follower = Follower(self._storage, self._meta)
        return follower.read(from_lsn, min(to_lsn, self.end_lsn), wanted)

    # --- keeping (loop and housekeeping threads) ---------------------------------------------

    def remove_before(
        self, stream: int, *, offset: int | None = None, time_ms: int | None = None
    ) -> int:
        """Give up a stream's records before an offset or append time; returns its first offset.

        From then on they are not served; their space is used again segment by segment.
        By offset from any thread; by time it reads (reader or housekeeping thread).
        """
        if time_ms is not None:
            before = self.closest_offset(stream, time_ms)
            offset = before if offset is None else max(offset, before)
        floor = min(offset or 0, self.next_offset(stream))
        if floor:
            self._streams.note_floor(stream, floor)
        return self.first_offset(stream)

    def limit_bytes(self, stream: int, bytes_max: int) -> int:
        """Give up a stream's oldest records beyond so many bytes; returns its first offset.

        Its newest index entry always stays. Housekeeping thread: it reads indexes.
        """
        offset = self._searches.offset_within(stream, bytes_max)
        return self.remove_before(stream, offset=offset)

    def prepare_step(self, budget_bytes: int = 1 << 20, now_ms: int | None = None) -> bool:
        """Do a small piece of allocating, zeroing, retiring, index writing (housekeeping thread).

        budget_bytes: how much to zero at most. now_ms: retires segments whose every record has
        expired. Returns True when there is more to do. Raises DiskFull, JournalCorrupt, OSError:
        try again later. Raises JournalFailed: the ring takes no more appends.
        """
        if self._failure is not None or self._closed:
            return False
        more = self._space.step(budget_bytes, now_ms)
        synced, before = self._synced, self._synced_before
        self._synced_before = synced
        if synced != self._marked and synced == before:
            # The ring is at rest: no later stamp will tell how far it was synced. The mark is
            # `clean` only where close() leaves it: here, more may follow.
            self._mark(clean=False)
        return more

    def _forget(self, number: int) -> None:
        """Drop what the reader has cached of a segment that is retired."""
        self._files.forget(number)

    def _detach(self, segment: Segment) -> bool:
        """Give what readers hold of a segment memory of its own; False: its file must stay.

        Called before the file is used again or removed.
        """
        return self._mappings is None or self._mappings.detach(segment)

    def detach(self) -> None:
        """Give what readers hold of the ring memory of its own: its files are to be removed.

        Any thread. Their space comes back at once then, and not when the last reader has read.
        """
        for segment in self._space.segments:
            self._detach(segment)

    def _rebuild_index(self, segment: Segment) -> LiveIndex:
        """Index a finished segment, whose index file is missing or bad, by reading it."""
        scan = Scan(self._storage, self._meta, self.settings)
        return scan.index_one(segment, self._files.file(segment))


def _facts_of(state: StreamState, spans: Sequence[Span]) -> StreamFacts:
    """Return a stream's facts by its totals in each segment, oldest first."""
    spans = [span for span in spans if span.next > state.first]
    return StreamFacts(
        state.first,
        state.next,
        state.held_bytes - state.retired_bytes,
        spans[0].first_time_ms if spans else 0,
        spans[-1].last_time_ms if spans else 0,
        state.epochs,
    )


def _load(
    storage: Storage,
    meta: RingMeta,
    settings: RingSettings,
    epoch: int,
    marks: Storage,
    failed_name: str,
    manifest: Manifest,
) -> tuple[Scan, tuple[str, ...]]:
    """Read a ring back and repair it, for an opening.

    marks, failed_name: where a failed sync was written down. Returns the scan, and the names of
    files written anew. Raises ValueError: the epoch is not above the ring's last one; nothing was
    repaired.
    """
    failed = read_mark(marks, failed_name, Failed)
    scan = Scan(storage, meta, settings, failed=failed, expected=manifest.expected).run()
    if epoch <= scan.epoch:
        raise ValueError(
            f"epoch {epoch} must be above {scan.epoch}, the last one in {storage.describe()}"
        )
    after_failed_sync = failed is not None and failed.ring == meta.uuid
    rewritten = repair(scan, epoch, after_failed_sync=after_failed_sync)
    if after_failed_sync:
        # All that was in doubt lies in new files, synced.
        marks.remove(failed_name)
        marks.sync_directory()
    return scan, rewritten


def _with_segment_bytes(settings: RingSettings, segment_bytes: int) -> RingSettings:
    """Return the settings with the segment size of the ring's making, which stays for its life."""
    if settings.segment_bytes == segment_bytes:
        return settings
    values = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return RingSettings(**{**values, "segment_bytes": segment_bytes})


def _recovery(scan: Scan, rewritten: tuple[str, ...], restored: Sequence[Unknown]) -> Recovery:
    """Return what the opening of a ring found, for its caller.

    rewritten: files written anew. restored: small files that were made again.
    """
    snapshot = scan.state.snapshot
    cut = [
        Unknown(segment_name(number), f"it had {size} bytes of {scan.segment_bytes}")
        for number, size in scan.short.items()
    ]
    return Recovery(
        end_lsn=scan.end_lsn,
        epoch=scan.epoch,
        clean=scan.clean,
        last_append_time_ms=scan.last_time_ms,
        snapshot=() if snapshot is None else snapshot.bodies,
        snapshot_lsn=0 if snapshot is None else snapshot.facts.as_of_lsn,
        controls=tuple(each for each in scan.state.controls if each.kind != SNAPSHOT),
        produced=tuple(scan.state.produced),
        damages=tuple(scan.damages),
        dropped=tuple(scan.dropped),
        unknown=tuple(scan.unknown),
        rewritten=rewritten,
        unreadable_state=snapshot is None and bool(scan.segments or scan.damages),
        restored=(*restored, *cut),
        skipped=scan.skipped,
        doubtful_bytes=scan.doubtful_bytes,
        doubtful_to=scan.doubtful_to,
        unseen_next=scan.streams.unseen_next,
    )
