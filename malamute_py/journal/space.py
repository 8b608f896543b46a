"""Space of a ring: which segments there are, and where the next one comes from.

Owns allocating, zeroing, recycling and removing segment files, pins, and the writing of
index files. The rule: a segment is retired (its streams' first offsets moved, its object
marked) before its file is touched, and nothing that the newest snapshot still needs, or
that lies at or beyond the hold, is ever retired. Steps are small and run in the
housekeeping thread; append() comes here itself only when nothing was prepared. Words: a spare is
a segment file prepared for appends to come; a snapshot is the state of the ring and of its caller,
the first batch of each segment; the hold is the position from which on a checkpoint needs all; a
pin keeps what a cursor needs. Source: FORMAT.md, sections 2 and 9.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from malamute_py.journal.errors import DiskFull, JournalCorrupt, JournalError, JournalFull
from malamute_py.journal.index import NEVER, LiveIndex
from malamute_py.journal.layout import (
    PREPARING_FILE,
    TRIMS_FILE,
    Trims,
    index_name,
    pack_file,
    segment_name,
)
from malamute_py.journal.repair import write_header
from malamute_py.journal.segment import Segment
from malamute_py.journal.storage import File, Storage, replace_file
from malamute_py.journal.streams import StreamTable
from malamute_py.journal.types import SEGMENT_HEADER_BYTES, RingEvent, RingSettings

_INDEX_TEMPORARY = "index.tmp"
_CAPACITY_FOR_TWO = 16
"""Segments of a ring that keeps two prepared ones: an eighth of it at most."""
_CALM_MS = 60_000
"""A ring that began no segment for so long gives back what it will not soon use again, one that
does gives back one in that time: removing and allocating anew takes a file system that discards
freed blocks more time than the writes between (0.6 GB/s of appends instead of 1.5)."""
_OUTRUN = 4
"""Zeroing is given up once appends came to a quarter of it: then they write large pieces."""


class _Work(NamedTuple):
    """A segment that is being zeroed."""

    file: File
    position: int
    """Zeroed up to here."""
    end_lsn: int
    """The ring's end when it was begun."""


class Space:
    """The segments of one ring.

    `segments` and each segment's attributes are swapped whole. `swapping` guards the swaps
    (short), `preparing` a preparation (long); a thread takes `preparing` before `swapping`.
    """

    def __init__(
        self,
        storage: Storage,
        ring: bytes,
        epoch: int,
        settings: RingSettings,
        streams: StreamTable,
        forget: Callable[[int], None],
        end: Callable[[], int],
        synced: Callable[[], int],
        sync: Callable[[], int],
        write_manifest: Callable[[int, int], None],
        detach: Callable[[Segment], bool],
    ) -> None:
        """settings: with the ring's own segment_bytes. forget: drop caches of a segment.

        end, synced: tell the ring's end, and up to where it is synced. sync: syncs it.
        write_manifest: is given the numbers of the oldest and the newest segment. detach: gives
        what is mapped of a segment memory of its own; False: its file must stay as it is.
        """
        self.storage = storage
        self.settings = settings
        self.segments: tuple[Segment, ...] = ()
        """Segments with batches, oldest first; swapped whole."""
        self.spares: deque[Segment] = deque()
        """Prepared segments, which append() begins in this order."""
        self.strays: dict[int, Segment] = {}
        """Number -> empty segment that a former run prepared, further ahead than the next one: each
        becomes a spare when its number has its turn."""
        self.unknown: set[str] = set()
        """Names of files that are left alone."""
        self.missing_from: int | None = None
        """Segments from this number to the oldest were missing at the opening: they are named so
        at each one, until the ring gives up what lay after them."""
        self.next_number = 0
        """Number of the first segment that append() has not begun."""
        self.state_lsn = 0
        """From here on a start needs everything: the newest snapshot of the ring's state (the first
        batch of a segment) that is durable tells the state before this position."""
        self.held_lsn: int | None = None
        """Nothing at or beyond this position is retired, for a checkpoint; swapped whole."""
        self.events: deque[RingEvent] = deque(maxlen=1000)
        self.prepared_in_append = 0
        """Segments that append() had to prepare itself."""
        self.preparing = threading.Lock()
        """Held while spares are prepared and segments retired, which takes its time."""
        self.swapping = threading.Lock()
        """Held for moments: while segments, spares or pins change, or are looked at together."""
        self._ring = ring
        self._epoch = epoch
        self._streams = streams
        self._forget = forget
        self._end = end
        self._synced = synced
        self._sync = sync
        self._write_manifest = write_manifest
        self._detach = detach
        self._snapshots: deque[tuple[int, int]] = deque()
        """(end, position whose state it tells) of snapshots that are not known to be synced."""
        self._pins: dict[str, tuple[int, int]] = {}
        """Name of a pin -> (stream, offset) from which on it keeps records."""
        self._work: _Work | None = None
        """The spare that is being zeroed, a piece each time."""
        self._leaving: Segment | None = None
        """Retired segment whose file is not yet used again or removed; kept when that failed."""
        self._written_floors: dict[int, int] = {}
        """Stream -> first offset after trims, as the file TRIMS_FILE has it."""
        self._seen_number: int | None = None
        """Value of `next_number` when housekeeping looked last."""
        self._begun_ms: int | None = None
        """Time at which housekeeping last found `next_number` changed; None: not yet."""
        self._gave_ms: int | None = None
        """Time at which an empty segment was given back last."""

    @property
    def capacity(self) -> int:
        """How many segments the ring may have."""
        return self.settings.ring_bytes // self.settings.segment_bytes

    @property
    def bundle_segments_max(self) -> int:
        """How many new segments one bundle may begin.

        With more, the ring could close on the beginning of a bundle whose snapshot is
        the newest, before a newer snapshot exists.
        """
        return max((self.capacity - 1) // 2, 1)

    def new_index(self) -> LiveIndex:
        """An empty index with the ring's bounds."""
        return LiveIndex(self.settings.index_interval_bytes, self.settings.distinct_headers_max)

    # --- for append ---------------------------------------------------------------------

    def need(self, count: int) -> None:
        """Have at least `count` spares, for a bundle that begins so many segments (loop thread).

        Mostly housekeeping has prepared them; else they are prepared here. Raises JournalFull,
        DiskFull, JournalCorrupt, JournalFailed, OSError: what was half prepared is made anew by the
        next try.
        """
        if len(self.spares) >= count:
            return
        with self.preparing:
            while len(self.spares) < count:
                before = len(self.spares)
                while self._prepare(budget_bytes=None):
                    pass
                if len(self.spares) > before:
                    self.prepared_in_append += 1
                elif self._is_held_back() or not self._make_state_durable():
                    raise JournalFull(self._why_full())

    def _make_state_durable(self) -> bool:
        """Sync if a snapshot of the ring's state is not durable yet, so that it becomes so.

        Called when the oldest segment cannot be retired: that of the last durable snapshot must
        stay, or a power loss could lose every stream's next offset. Returns False where a sync
        would change nothing. The sync thread makes this rare; no caller may count on it.
        """
        if not self._snapshots:
            return False
        snapshot_end, _ = self._snapshots[0]
        if snapshot_end <= self._synced():
            return False
        self._sync()
        return True

    def _why_full(self) -> str:
        """Say why no segment can be used again, and what to do about it, for JournalFull."""
        place = f"the ring in {self.storage.describe()}"
        if self._is_held_back():
            return (
                f"{place} is held by a checkpoint at position {self.held_lsn}, which is"
                f" {self._end() - (self.held_lsn or 0)} bytes behind its end, and the"
                f" {self.settings.ring_bytes} bytes of ring_bytes are in use: wait for the"
                " checkpoint, look why it does not go on, or raise ring_bytes"
            )
        return (
            f"{place} holds its {self.settings.ring_bytes} bytes"
            " and may not overwrite what is kept: remove old records, raise ring_bytes, or"
            " set full to overwrite"
        )

    # --- the hold -----------------------------------------------------------------------

    def hold(self, lsn: int | None) -> None:
        """Keep everything at or beyond a position, whatever it costs: a checkpoint needs it.

        Unlike a pin it never breaks and gets no extra space: when nothing else is left to
        use again, append() raises JournalFull until the hold is raised. None: nothing is
        held any more. Setting one where there was none may wait for a step of housekeeping.
        Raises ValueError: it would be lower than before, or the ring does not have it.
        """
        held = self.held_lsn
        if lsn is None:
            self.held_lsn = None
        elif held is None:
            # Housekeeping may be about to retire what is to be held from now on.
            with self.preparing:
                self._check_held(lsn)
                self.held_lsn = lsn
        else:
            if lsn < held:
                raise ValueError(f"a hold at position {held} cannot be lowered to {lsn}")
            self._check_held(lsn)
            self.held_lsn = lsn

    def _check_held(self, lsn: int) -> None:
        """Raise ValueError for a position that the ring cannot be held from."""
        end = self._end()
        start = self.segments[0].base_lsn if self.segments else end
        if not start <= lsn <= end:
            raise ValueError(
                f"position {lsn} cannot be held: the ring in {self.storage.describe()} has"
                f" {start} to {end}"
            )

    def _held(self, segment: Segment) -> bool:
        """Whether a checkpoint holds something of a segment: no part of it may go then."""
        held = self.held_lsn
        return held is not None and segment.base_lsn + self.settings.segment_bytes > held

    def _is_held_back(self) -> bool:
        """Whether the hold of a checkpoint keeps the oldest segment from being used again."""
        segments = self.segments
        return len(segments) > 1 and self._leaving is None and self._held(segments[0])

    def begin(self, count: int) -> list[Segment]:
        """Turn the first `count` spares into segments of the ring, in which appends go on.

        Called by append() after it has written into them (loop thread). Returns them.
        """
        begun = []
        with self.swapping:
            for _ in range(count):
                segment = self.spares.popleft()
                segment.live = self.new_index()
                segment.spans = segment.live.spans
                begun.append(segment)
            self.segments = (*self.segments, *begun)
            self.next_number += count
        return begun

    # --- housekeeping -------------------------------------------------------------------

    def step(self, budget_bytes: int, now_ms: int | None) -> bool:
        """Do one small piece of work, of whatever is to do (housekeeping thread); True: more is.

        budget_bytes: how much to zero at most. now_ms: retires finished segments whose every record
        has expired; None: none. Raises as Ring.prepare_step().
        """
        with self.preparing:
            self._note_begun(now_ms)
            # First what frees space: on a full disk the rest would fail before it.
            if self._retire_surplus(now_ms) or self._write_one_index():
                return True
            self._write_floors()
            before = len(self.spares)
            if not self._wants_spare():
                return False
            if self._prepare(budget_bytes) or len(self.spares) > before:
                # With a new spare there may be a surplus to give back.
                return True
            # None could be prepared. A sync helps where the last durable snapshot is in the way.
            return before == 0 and not self._is_held_back() and self._make_state_durable()

    def _wants_spare(self) -> bool:
        """Whether a spare is to be prepared: the first always, a second for large rings.

        A second one lets appends of a whole segment pass while the next is prepared; it
        must cost no stream more than a little history, and break no pin.
        """
        spares, segments = len(self.spares), self.segments
        if spares != 1:
            return spares == 0
        roomy = self.capacity >= _CAPACITY_FOR_TWO and len(segments) > 1
        return roomy and not self._pins_on(segments[0])

    def _write_one_index(self) -> bool:
        """Write the index file of one finished segment that has none; False: all have theirs.

        Only of a segment that is synced whole, which its index file proves. Index and file leave
        memory: they are loaded and opened again when they are read.
        """
        if not self.storage.persistent:
            return False
        synced, size = self._synced(), self.settings.segment_bytes
        for segment in self.segments[:-1]:
            live = segment.live
            if live is None or segment.damaged or segment.base_lsn + size > synced:
                continue
            data = live.pack(self._ring, segment.number, segment.last_epoch, segment.last_time_ms)
            file = self.storage.create(_INDEX_TEMPORARY, len(data))
            self.storage.write(file, 0, [data])
            self.storage.sync(file)
            self.storage.rename(_INDEX_TEMPORARY, index_name(segment.number))
            segment.expires_at_ms = live.expires_at_ms
            segment.live = None
            segment.file = None
            return True
        return False

    def _write_floors(self) -> None:
        """Write down the streams' first offsets that limits or removals moved, if any did.

        Without them a start would serve again what was given up and is still in the files.
        """
        states = self._streams.states.copy()
        floors = {number: state.floor for number, state in states.items() if state.floor}
        if floors == self._written_floors or not self.storage.persistent:
            return
        replace_file(self.storage, TRIMS_FILE, pack_file(Trims(self._ring, floors)))
        self._written_floors = floors

    def save_floors(self) -> None:
        """Write down the first offsets that limits and removals left, at an orderly close."""
        with self.preparing:
            self._write_floors()

    def _retire_surplus(self, now_ms: int | None) -> bool:
        """Remove the oldest segment if the ring is too large, or if nothing in it is served.

        Returns whether there may be more to do. Without a spare nothing is removed: the next one
        will rather use the segment's file again.
        """
        segments = self.segments
        if len(segments) < 2 or not self.spares or self._leaving is not None:
            return False
        oldest = segments[0]
        if self._held(oldest) or self._pins_on(oldest):
            return False
        # Larger than it may be: ring_bytes was lowered, or a pin had extra space.
        over = len(segments) + len(self.spares) > self.capacity
        if not self._free_of_state(oldest):
            # The newest durable snapshot needs it; once a newer one is durable, none does.
            return over and self._make_state_durable()
        surplus = over and self.settings.full == "overwrite"
        if not surplus and not self._empty(oldest, now_ms):
            return False
        if not over and self._unwanted(oldest) and self._soon_wanted(now_ms):
            return False  # The next spare will use its file again.
        self._retire(oldest)
        # Readers keep their bytes in memory of their own: else the file's space would come back
        # only when the last of them has read.
        self._detach(oldest)
        self._remove(oldest)
        return True

    def _remove(self, old: Segment) -> None:
        """Remove a retired segment's files; the manifest first, or a start would miss them."""
        self.write_manifest()
        self.storage.remove(index_name(old.number))
        self.storage.remove(old.name)
        # Before the sync, which may fail: there is no file any more that could be used again. What
        # a power loss brings back of it lies before the first segment of the manifest.
        self._leaving = None
        self.storage.sync_directory()

    def _note_begun(self, now_ms: int | None) -> None:
        """Note the time if appends have begun segments since the last look; see _soon_wanted()."""
        number, seen = self.next_number, self._seen_number
        if now_ms is not None and number != seen:
            # What was begun before the first look is not known to go on.
            self._begun_ms = None if seen is None else now_ms
            self._seen_number = number

    def _soon_wanted(self, now_ms: int | None) -> bool:
        """Whether an empty segment is kept, as appends will soon use its file again.

        So it is while they begin segments (_CALM_MS tells why). Not on a disk that is short of
        space, nor in memory; and once in _CALM_MS not, so that a ring shrinks under a steady load,
        too.
        """
        if now_ms is None or not self.storage.persistent:
            return False
        appending = _is_recent(self._begun_ms, now_ms)
        gave_one = _is_recent(self._gave_ms, now_ms)
        if not appending or not gave_one:
            self._gave_ms = now_ms  # The caller gives back this one.
            return False
        return self.storage.free_bytes() > self.settings.ring_bytes

    def _empty(self, segment: Segment, now_ms: int | None) -> bool:
        """Return whether nothing in a segment is served any more.

        Then every record has expired, or every stream begins after it by limits and removals.
        now_ms: None: whether records have expired is not asked.
        """
        live = segment.live
        expires = segment.expires_at_ms if live is None else live.expires_at_ms
        if now_ms is not None and 0 < expires <= now_ms and expires != NEVER:
            return True
        states, spans = self._streams.states, segment.spans.copy()
        return all(span.next <= states[number].floor for number, span in spans.items())

    # --- a new segment -----------------------------------------------------------------

    def _prepare(self, budget_bytes: int | None) -> bool:
        """Work on the next spare; True when it is not ready yet and more can be done.

        False: a spare was added, or none can be had now. Where it comes from: a file that is there
        already; a segment of which nothing is served; a new file while the ring has room; else the
        oldest segment, unless a hold, the ring's state, `refuse` or a pin forbids it.
        budget_bytes: how much to zero at most; None: append waits, nothing is zeroed.
        """
        with self.swapping:
            number = self.next_number + len(self.spares)
        if self._leaving is not None:
            # It was retired before, and an error kept its file from being used.
            return self._reuse(self._leaving, number)
        stray = self.strays.pop(number, None)
        if stray is not None:
            self.write_manifest(more=1)
            self.spares.append(stray)
            return False
        if segment_name(number) in self.unknown:
            raise JournalCorrupt(
                segment_name(number),
                "this file of unknown content stands where the ring goes on; move it away",
            )
        if self._work is not None:
            return self._make_new(number, budget_bytes)
        count = len(self.segments) + len(self.spares)
        oldest = self.segments[0] if len(self.segments) > 1 else None
        if oldest is not None and self._unwanted(oldest):
            self._retire(oldest)
            return self._reuse(oldest, number)
        if count < self.capacity:
            return self._make_new(number, budget_bytes)
        if oldest is None or self._held(oldest) or not self._free_of_state(oldest):
            # A pin on a held segment is not broken: that would gain nothing. Nor does it give
            # the hold its extra space, or a checkpoint that is stuck would fill the disk.
            return False
        if self.settings.full == "refuse" and not self._empty(oldest, None):
            return False
        if self._pins_on(oldest):
            # A pin has the ring grow beyond its size, up to a bound; then it breaks.
            extra = (count + 1) * self.settings.segment_bytes - self.settings.ring_bytes
            if extra <= self.settings.pin_bytes_max:
                try:
                    return self._make_new(number, budget_bytes)
                except DiskFull as error:
                    self._break_pin(oldest, str(error))
            else:
                self._break_pin(oldest, f"it held back more than {self.settings.pin_bytes_max}")
            return True
        self._retire(oldest)
        return self._reuse(oldest, number)

    def _unwanted(self, oldest: Segment) -> bool:
        """Whether nothing in the oldest segment is wanted, so that it is used again before others.

        So it is also while the ring has room.
        """
        if not oldest.spans or self._held(oldest) or self._pins_on(oldest):
            return False
        return self._free_of_state(oldest) and self._empty(oldest, None)

    def note_snapshot(self, end_lsn: int, as_of_lsn: int) -> None:
        """Note that the bundle which ends at end_lsn has a snapshot of the ring's state.

        as_of_lsn: the snapshot tells the state before this position. Called by append() (loop
        thread).
        """
        self._snapshots.append((end_lsn, as_of_lsn))

    def _free_of_state(self, segment: Segment) -> bool:
        """Whether a start does not need a segment for the ring's state.

        So it is when a later snapshot of the state is durable. Snapshots that have become durable
        are taken into account first.
        """
        synced, snapshots = self._synced(), self._snapshots
        while snapshots:
            end_lsn, as_of_lsn = snapshots[0]
            if end_lsn > synced:
                break
            self.state_lsn = as_of_lsn
            snapshots.popleft()
        return segment.base_lsn + self.settings.segment_bytes <= self.state_lsn

    def _make_new(self, number: int, budget_bytes: int | None) -> bool:
        """Do a share of preparing a new segment file; returns whether more is to do.

        budget_bytes: how many bytes may be zeroed now; None: append waits, nothing is zeroed.
        """
        size = self.settings.segment_bytes
        work, self._work = self._work, None
        if work is None:
            file = self.storage.create(PREPARING_FILE, size)
            work = _Work(file, SEGMENT_HEADER_BYTES, self._end())
        try:
            return self._finish(work, number, budget_bytes)
        except (JournalError, OSError):
            # The work is dropped now: the file is made anew, for a sync that failed is never
            # tried again. Until then its space is others', who may need it on a full disk.
            with contextlib.suppress(OSError):
                self.storage.remove(PREPARING_FILE)
            raise

    def _finish(self, work: _Work, number: int, budget_bytes: int | None) -> bool:
        """Zero some of a file under preparation, or make it a spare; True: more is to do.

        It gets its name last, so that a file with a segment's name is always whole.
        """
        size = self.settings.segment_bytes
        if budget_bytes is not None and self._worth_zeroing(work):
            stop = min(work.position + max(budget_bytes, SEGMENT_HEADER_BYTES), size)
            self._zero(work.file, work.position, stop)
            if stop < size:
                self._work = work._replace(position=stop)
                return True
        segment = Segment(number, size, work.file)
        self._write_header(segment)
        self.storage.rename(PREPARING_FILE, segment.name)
        self.storage.sync_directory()
        self.write_manifest(more=1)
        self.spares.append(segment)
        return False

    def _worth_zeroing(self, work: _Work) -> bool:
        """Whether the rest should be written with zeros, as only small syncs gain by it.

        Allocated blocks read as zeros; but the first write to each makes its sync convert
        an extent. Appends that write much at a time do not notice that; they do notice
        when every byte is written twice.
        """
        if not self.storage.persistent or work.position >= self.settings.segment_bytes:
            return False
        appended = self._end() - work.end_lsn
        return _OUTRUN * appended <= work.position  # position: about the bytes zeroed

    def _zero(self, file: File, position: int, stop: int) -> None:
        """Write zeros, durably, in pieces: an append's sync waits for one of them at most.

        One sync of 8 MiB took 4 ms on a disk where one of 1 MiB took 0.6, and the eight small ones
        together 1.2 times as long as the large one.
        """
        zeros = memoryview(bytes(min(stop - position, 1 << 20)))
        for begin in range(position, stop, len(zeros)):
            self.storage.write(file, begin, [zeros[: stop - begin]])
            self.storage.sync(file)

    def _reuse(self, old: Segment, number: int) -> bool:
        """Make a retired segment's file the next spare, of that number.

        False: it is one. True: the file had to be removed, and another one is to be made. After an
        error the segment stays in `_leaving`, and the next call of _prepare() tries again.
        """
        if not self._detach(old):
            # Readers hold bytes of it that have no memory of their own. A removed file stays
            # as it is until they have gone.
            self._remove(old)
            return True
        name = segment_name(number)
        file = old.file or self.storage.open(old.name)
        # Both that the old one goes and that the new one comes: the rename does both at once.
        self.write_manifest(more=1)
        self.storage.remove(index_name(old.number))
        if old.name != name:
            # Renamed before its header is changed: a crash between the two leaves an older
            # number inside than outside, which is how recovery knows it.
            self.storage.rename(old.name, name)
            old.name = name
        self.storage.sync_directory()
        segment = Segment(number, self.settings.segment_bytes, file)
        self._write_header(segment)
        self._leaving = None
        self.spares.append(segment)
        return False

    def write_manifest(self, more: int = 0) -> None:
        """Write down durably which segments there should be, for a start to notice a lost one.

        more: spares that are about to be added.
        """
        with self.swapping:
            segments = self.segments
            last = self.next_number + len(self.spares) + more - 1
        first = segments[0].number if segments else self.next_number
        self._write_manifest(first if self.missing_from is None else self.missing_from, last)

    def _write_header(self, segment: Segment) -> None:
        """Write and sync the header that makes a file, new or used before, the segment."""
        write_header(
            self.storage,
            segment,
            self._ring,
            self._epoch,
            self.settings.segment_bytes,
            self._synced(),
        )

    def _retire(self, segment: Segment) -> None:
        """Take the oldest segment out of the ring, before its file is used again or removed."""
        # First the offsets, then the list, then the mark: a reader that misses the segment,
        # or sees the mark, finds that the stream begins later, and names the gap rightly.
        moved = self._streams.retire(segment.spans.copy().items())
        with self.swapping:
            assert self.segments[0] is segment
            self.segments = self.segments[1:]
        self.missing_from = None
        segment.retired = True
        self._leaving = segment
        self._forget(segment.number)
        self.events.append(
            RingEvent("segment_retired", {"segment": segment.number, "first_offsets": moved})
        )

    # --- pins ---------------------------------------------------------------------------

    def pin(self, name: str, stream: int, offset: int) -> None:
        """Keep the stream's records from an offset on, as a cursor needs them.

        The ring grows for it. The oldest pin breaks, with an event, when it costs more than
        pin_bytes_max.
        """
        with self.swapping:
            self._pins = {**self._pins, name: (stream, offset)}

    def unpin(self, name: str) -> None:
        """Give up a pin; nothing happens when there is none."""
        with self.swapping:
            self._pins = {key: value for key, value in self._pins.items() if key != name}

    def _pins_on(self, segment: Segment) -> list[str]:
        """Return the names of the pins that want something of a segment, and so hold it back."""
        held = []
        for name, (stream, offset) in self._pins.items():
            span = segment.spans.get(stream)
            if span is not None and span.next > offset:
                held.append(name)
        return held

    def _break_pin(self, segment: Segment, reason: str) -> None:
        """Give up one pin that keeps a segment from being used again, with an event.

        Called when the ring may not grow, or cannot, for what the pin holds.
        """
        with self.swapping:
            # The one that was set first; the loop may have taken all of them off meanwhile.
            name = next(iter(self._pins_on(segment)), None)
            if name is None:
                return
            stream, offset = self._pins[name]
            self._pins = {key: value for key, value in self._pins.items() if key != name}
        facts = {"pin": name, "stream": stream, "offset": offset, "reason": reason}
        self.events.append(RingEvent("pin_broken", facts))


def _is_recent(since_ms: int | None, now_ms: int) -> bool:
    """Return whether less than _CALM_MS have passed; a time ahead of a clock set back is not."""
    return since_ms is not None and 0 <= now_ms - since_ms < _CALM_MS
