"""The rings of a shard as the loop sees them: append here, all else in threads.

Owns which rings are open and the way of each of the core's requests to the journal and back. The
rules: appends run in the loop, in order, and a refused bundle has the later bundles of its ring in
the same Ready refused; opening a ring, syncs, reads and housekeeping run in their threads and
answer through the queue of results; a ring that is not ready yet, or could not be opened, has its
appends refused for a while, so that nothing waits for it here; neighbouring bundles of a ring share
one write, and so one fate in a crash, which none of them can tell from its own. Source:
broker/ready.py; docs/design.md (The core and its shell; Journal).
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from malamute_protocol.stamp import Stamp
from malamute_py.broker.ready import (
    CHANGE_STREAM,
    MAIL_STREAM,
    MAIN,
    Append,
    AppendBundle,
    Appended,
    AppendRefused,
    BodiesFound,
    BodiesRead,
    HistoryRead,
    HistoryRun,
    IndexAnswer,
    IndexFailure,
    IndexQuery,
    ReadFailed,
    ReadRange,
)
from malamute_py.config import JournalSection
from malamute_py.journal import Appended as Written
from malamute_py.journal import JournalError, JournalFailed, JournalFull, Ring, RingSettings
from malamute_py.journal.directory import RINGS, Journal, directory_name
from malamute_py.journal.layout import RING_FILE
from malamute_py.journal.mapping import populate_again
from malamute_py.server.journaling.journal_threads import (
    Housekeeper,
    RingEvent,
    SyncThread,
    Trimmed,
    Worker,
)
from malamute_py.server.journaling.queries import answer_query, by_key, copies_at
from malamute_py.server.journaling.recent_reads import RecentReads
from malamute_py.server.latencies import Latencies
from malamute_py.server.result_queue import ResultQueue
from malamute_py.store.bodies import StoredBodies

_PREPARE_BYTES = 8 << 20
"""Bytes that housekeeping writes at a time, and syncs: with 2 MiB it came to 210 MB/s, and appends
overran it (measured: 366 MB/s of 1 KiB records; with 8 MiB 566, with 32 MiB 660)."""
_PREPARE_PAUSE_S = 0.002
_LEISURE_MS = 5
"""Time for which bytes that no peer waits for may be unsynced: each sync costs about as much as it
groups."""
_IDLE_S = 0.25
_KEEP_SEGMENTS = 16
"""Segments, at least, of a ring that keeps the last record of each subject."""
_RETRY_MS = 1000
_OPENING_RETRY_MS = 100
"""Time after which a refused append to a ring that is being opened may be tried again."""
_MERGE_BYTES = 4 << 20
"""Bytes of bundles that are written together; one write of 4 MiB takes about a millisecond."""
_MERGE_BATCHES = 500
"""Batches that are written together: two buffers each, within the kernel's 1024 for one write."""


def ring_settings(
    config: JournalSection, asked: dict[str, Any], batch_bytes_max: int
) -> RingSettings:
    """Return the settings to open a ring with: as asked, else as configured.

    A segment holds two of the largest batches where three such segments fit into the ring, as they
    do into ring main (config/combinations.py checks it); else it is a third of the ring.
    """
    shared_bytes = config.memory_ring_bytes if asked.get("memory") else config.ring_bytes
    ring_bytes = asked.get("ring_bytes") or shared_bytes
    # A small ring has small segments: at least eight, so that one can be prepared in time.
    segment_bytes = config.segment_bytes
    while segment_bytes > 1 << 20 and ring_bytes < 8 * segment_bytes:
        segment_bytes //= 2
    # A segment still holds the largest batch that clients are told they may send.
    segment_bytes = max(segment_bytes, min(2 * batch_bytes_max + 4095, ring_bytes // 3))
    segment_bytes = min(segment_bytes, config.segment_bytes)
    if asked.get("keep"):
        # Some segments stay free, for newest records that have to move.
        segment_bytes = max(min(segment_bytes, ring_bytes // _KEEP_SEGMENTS), 1 << 16)
    segment_bytes -= segment_bytes % 4096  # a whole number of pages; 4095 above makes up for it
    return RingSettings(
        segment_bytes=segment_bytes,
        ring_bytes=max(ring_bytes, 3 * segment_bytes),
        full="refuse" if asked.get("full") == "refuse" or asked.get("keep") else "overwrite",
        index_interval_bytes=config.index_interval_bytes,
        distinct_headers_max=config.distinct_headers_max,
        pin_bytes_max=config.pin_bytes_max,
        index_memory_bytes=config.index_memory_bytes,
        open_files_max=config.open_files_max,
    )


_Job: TypeAlias = ReadRange | IndexQuery | BodiesRead
_ONE_JOB: Final = True
_QUEUES: Final = frozenset([CHANGE_STREAM, MAIL_STREAM])


class Unready(NamedTuple):
    """A ring that takes no appends yet: it is being opened, or opening it failed."""

    settings: dict[str, Any]
    refusal: tuple[str, str, int]
    """Answer to an append: code, reason, when to try again."""
    failed: bool = False


class Change(NamedTuple):
    """A job of the opener: open a ring, or remove one."""

    name: str
    settings: dict[str, Any]


class Rings:
    """All open rings of one shard, and the threads that work for them."""

    def __init__(
        self,
        journal: Journal,
        config: JournalSection,
        results: ResultQueue,
        batch_bytes_max: int,
        *,
        snapshot: Callable[[str], Sequence[bytes]],
        noted: Callable[[int, int], None] | None = None,
        relieve: Callable[[], bool] | None = None,
        bodies: StoredBodies | None = None,
        damaged: Mapping[str, int] = MappingProxyType({}),
        rests: Iterable[str] = (),
    ) -> None:
        """journal: with the rings that a start has opened. batch_bytes_max: of a published batch.

        snapshot: returns the core's state that goes into a ring. noted: told the bounds of each
        write to ring main that concerns the queues. relieve: called when ring main has no room;
        moves its hold, True: it moved. bodies: reads bodies that the journal no longer has.
        damaged: bytes of each ring that were missing or damaged at the start. rests: removed rings
        of which files are left.
        """
        self._journal = journal
        self._config = config
        self._batch_bytes_max = batch_bytes_max
        self._results = results
        self._rings = journal.rings
        """Rings that are open; a thread opens and removes some, so that loops go over a copy."""
        self._removals = deque(rests)
        """Removed rings, whose files go one after the other."""
        self._unready: dict[str, Unready] = {}
        """Rings that are being opened, or could not be."""
        self._early_pins: dict[str, dict[str, tuple[int, int | None]]] = {}
        """Pins of rings that are being opened, each as pin() was told; set before the first
        append."""
        self._stopping = False
        self._dirty: dict[str, Ring] = {}
        """Rings with appends that no sync covers."""
        self.sync_at_ms: int | None = None
        """Latest time of the next call of sync(), for bytes that no peer waits for."""
        self.syncs_due = 0
        """Syncs that were asked for and of which the loop has no result yet."""
        self._snapshot = snapshot
        self._noted = noted
        self._relieve = relieve
        self._bodies = bodies
        self.latencies = Latencies(time.perf_counter_ns)
        self.free_bytes: int | None = None
        """Free bytes of the disk when housekeeping looked last; None: it has not looked."""
        self._syncer = SyncThread(results, (JournalError,), _explain, self._took)
        self._reader: Worker[bool] = Worker("reader", self._take_turn, results)
        self._reads: deque[_Job] = deque()
        self._recent = RecentReads()
        self._questions: deque[_Job] = deque()
        self._bodies_wanted: deque[_Job] = deque()
        self._turns = deque([self._bodies_wanted, self._reads, self._questions])
        """Jobs of the reader thread by kind, which take turns; put(_ONE_JOB) tells of each."""
        self._opener: Worker[Change] = Worker("opener", self._open_or_remove, results)
        self._housekeeper = Housekeeper(
            self._do_housekeeping, results, idle_s=_IDLE_S, pause_s=_PREPARE_PAUSE_S
        )
        self._complaints: dict[str, str] = {}
        """Ring -> why no segment could be prepared, or no file removed, as the event said."""
        self._in_memory: set[str] = set()
        """Rings whose syncs reach no disk, and are not measured."""
        self._damaged = damaged
        for name, ring in self._rings.items():
            ring.begin_with(partial(snapshot, name))

    # --- life ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads."""
        self._syncer.start()
        self._reader.start()
        self._opener.start()
        self._housekeeper.start()

    def stop_threads(self) -> None:
        """End the threads; syncs that were asked for are done first, reads and openings are not."""
        self._stopping = True
        self._reader.stop()
        self._opener.stop()
        self._syncer.stop()
        self._housekeeper.stop()
        # The next start removes the rest, which it knows by what went first.
        for name in self._removals:
            with contextlib.suppress(JournalError, OSError):
                self._remove_file(name)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each ring for BROKER_INFO and metrics, by its name.

        `full`: what a full ring does (overwrite or refuse). `unprepared`: why housekeeping could
        prepare no next segment; "": it could. `prepared_in_append_total`: segments that an append
        had to prepare itself, as housekeeping was too slow.
        """
        return {
            name: {
                "end_lsn": ring.end_lsn,
                "synced_lsn": ring.synced_lsn,
                "start_lsn": ring.start_lsn,
                "disk_bytes": ring.bytes_on_disk(),
                "ring_bytes": _whole_segments(ring.settings),
                "full": ring.settings.full,
                "unprepared": self._complaints.get(name, ""),
                "prepared_in_append_total": ring.prepared_in_append,
                "damaged_bytes": self._damaged.get(name, 0),
            }
            # A copy: the opener's thread may add and remove rings meanwhile.
            for name, ring in self._rings.copy().items()
        }

    # --- what the loop calls -----------------------------------------------------------

    def open(self, name: str, settings: dict[str, Any]) -> None:
        """Have a ring opened, or removed, by the opener's thread; meanwhile its appends wait.

        settings: as its stream asks for them; `remove` among them: the stream is gone.
        """
        if settings.get("remove"):
            self._dirty.pop(name, None)
            self._early_pins.pop(name, None)
            self._in_memory.discard(name)
            self.latencies.forget(name)
            self._opener.put(Change(name, settings))
        elif name in self._rings or name in self._unready:
            return
        elif settings.get("memory"):
            # Opened here at once: nothing touches a disk, and records that are published to it may
            # be unconfirmed.
            wanted = ring_settings(self._config, settings, self._batch_bytes_max)
            self._in_memory.add(name)
            self._journal.memory_ring(name, wanted)
        else:
            self._open(name, settings)

    def _open(self, name: str, settings: dict[str, Any]) -> None:
        """Have the opening thread open a ring; appends to it are put off meanwhile."""
        waits = ("wait", f"the ring {name} is being opened", _OPENING_RETRY_MS)
        self._unready[name] = Unready(settings, waits)
        self._opener.put(Change(name, settings))

    def append(self, bundles: list[AppendBundle]) -> Iterator[Appended | AppendRefused]:
        """Write the bundles of one Ready; yields one answer each, in order.

        The loop tells the core each answer before the next write is made, so that a snapshot that
        the journal asks for in that write has what was written before.
        """
        refused: dict[str, AppendRefused] = {}  # by ring, the first refusal
        at, count = 0, len(bundles)
        while at < count:
            name = bundles[at].ring
            earlier = refused.get(name)
            if earlier is not None:
                yield _refusal(bundles[at].token, earlier)
                at += 1
                continue
            stop = _neighbours(bundles, at)  # where the bundles end that share one write
            written = self._write(name, bundles[at:stop])
            if len(written) == 1 and isinstance(written[0], AppendRefused) and stop - at > 1:
                # Only one of the bundles may be at fault: the first one is tried alone.
                stop = at + 1
                written = self._write(name, bundles[at:stop])
            for answer in written:
                if isinstance(answer, AppendRefused):
                    refused[name] = answer
                yield answer
            at = stop

    def _write(self, name: str, bundles: list[AppendBundle]) -> list[Appended | AppendRefused]:
        """Append bundles of one ring in one write; returns an answer for each, or one refusal."""
        token = bundles[0].token  # a refusal answers the first bundle
        unready = self._unready.get(name)
        if unready is not None:
            if unready.failed:  # the append that is refused has it tried once more
                self._open(name, unready.settings)
            return [AppendRefused(token, *unready.refusal)]
        ring = self._rings.get(name)
        if ring is None:
            return [AppendRefused(token, "journal_failed", f"there is no ring {name}")]
        if self._early_pins:  # of the time while the ring was being opened
            for pin, (stream, offset) in self._early_pins.pop(name, {}).items():
                self.pin(name, pin, stream, offset)
        batches = bundles[0].batches
        if len(bundles) > 1:
            batches = tuple(batch for bundle in bundles for batch in bundle.batches)
        if not batches:
            # Bundles that log nothing, such as a reply in between to a mailbox in memory, wait for
            # what was written before.
            return [Appended(bundle.token, (), ring.end_lsn) for bundle in bundles]
        try:
            done = self._append(name, ring, batches)
        except JournalFull as error:
            # A ring that is held for the tables has room again once they have followed.
            held = ring.held_lsn is not None and ring.settings.full == "overwrite"
            return [AppendRefused(token, "wait" if held else error.code, str(error), _RETRY_MS)]
        except JournalError as error:
            retry_ms = 0 if isinstance(error, JournalFailed) else _RETRY_MS  # 0: not at all
            return [AppendRefused(token, error.code, str(error), retry_ms)]
        except OSError as error:
            return [AppendRefused(token, "disk_full", str(error), _RETRY_MS)]
        self._dirty[name] = ring  # to be synced: sync()
        if name not in self._in_memory:
            self.latencies.wrote(name, done.end_lsn, len(bundles))
        if name == MAIN and self._noted is not None and _concerns_queues(bundles):
            self._noted(done.lsn, done.end_lsn)  # the tables have to follow this part
        answers: list[Appended | AppendRefused] = []
        first = 0  # each bundle gets the stamps of its own batches
        for bundle in bundles:
            last = first + len(bundle.batches)
            answers.append(Appended(bundle.token, done.stamps[first:last], done.end_lsn))
            first = last
        return answers

    def _append(self, name: str, ring: Ring, batches: Sequence[Append]) -> Written:
        """Append to a ring; a full ring main is synced first, which may give it room."""
        try:
            return ring.append(batches)
        except JournalFull:
            if name != MAIN or self._relieve is None or not self._relieve():
                raise
        return ring.append(batches)

    def sync(self, hurries: Callable[[str], bool], now_ms: int) -> None:
        """Have synced what was appended; each sync answers once, not each call.

        hurries: whether a peer waits for a ring. Bytes that no peer waits for are synced a little
        later (see sync_at_ms), together with what comes until then.
        """
        dirty = self._dirty
        if not dirty:
            self.sync_at_ms = None  # The ring was removed before its sync was due.
            return
        if self.sync_at_ms is None:
            self.sync_at_ms = now_ms + _LEISURE_MS
        is_time = now_ms >= self.sync_at_ms
        for name in [name for name in dirty if is_time or hurries(name)]:
            self.syncs_due += self._syncer.ask(name, dirty.pop(name))
        if not dirty:
            self.sync_at_ms = None

    def _took(self, name: str, took_ns: int) -> None:
        """Note how long a sync took, if it was one to disk; the sync thread calls it."""
        if name not in self._in_memory:
            self.latencies.sync.add(took_ns)

    def sync_ended(self, name: str, lsn: int) -> None:
        """Measure the confirms that wait for this sync: the loop is about to send them.

        lsn: up to where the ring is synced; 0: the sync failed.
        """
        self.syncs_due -= 1
        self.latencies.confirmed(name, lsn)

    def syncing(self) -> bool:
        """Whether something appended is neither synced nor given up; a stop of the loop waits."""
        return any(
            ring.synced_lsn < ring.end_lsn and ring.failure is None
            for ring in self._rings.copy().values()
        )

    def read(self, wanted: ReadRange) -> None:
        """Have history read by the reader thread."""
        self._reads.append(wanted)
        self._reader.put(_ONE_JOB)

    def ask(self, query: IndexQuery) -> None:
        """Have a question to the index answered by the reader thread."""
        self._questions.append(query)
        self._reader.put(_ONE_JOB)

    def read_bodies(self, wanted: BodiesRead) -> None:
        """Have bodies read by number by the reader thread."""
        self._bodies_wanted.append(wanted)
        self._reader.put(_ONE_JOB)

    def pin(self, ring: str, name: str, stream: int, offset: int | None) -> None:
        """Have a ring keep a stream's records from an offset on, by a pin; None: no longer."""
        # Looked up first: the opener puts a ring into _rings before it takes it out of _unready.
        is_opening = ring in self._unready
        found = self._rings.get(ring)
        if found is None:
            if is_opening:
                self._early_pins.setdefault(ring, {})[name] = stream, offset
            return
        if self._early_pins:
            self._early_pins.get(ring, {}).pop(name, None)
        if offset is None:
            found.unpin(name)
        else:
            found.pin(name, stream, offset)

    def trim(self, ring: str, stream: int, offset: int) -> None:
        """Drop a stream's records before an offset."""
        found = self._rings.get(ring)
        if found is not None:
            self._results.put(Trimmed(ring, {stream: found.remove_before(stream, offset=offset)}))
            self._housekeeper.nudge()  # segments may be free now

    # --- the opening thread --------------------------------------------------------------

    def _open_or_remove(self, job: Change) -> object:
        """Open a ring with its first segment prepared, or close one whose stream is gone.

        In the opener's thread: preparing takes 100 ms for 64 MiB, which may hold up neither the
        loop nor the segments of the other rings. Returns an event for the loop, or None.
        """
        name, settings = job
        if settings.get("remove"):
            self._unready.pop(name, None)
            ring = self._rings.pop(name, None)
            if ring is not None:
                ring.detach()  # readers keep what they hold, and the files may go
            self._removals.append(name)  # housekeeping removes the files
            self._housekeeper.nudge()
            return None
        if self._stopping:
            return None  # The next start opens the ring.
        try:
            if name not in self._rings:
                wanted = ring_settings(self._config, settings, self._batch_bytes_max)
                self._journal.ring(name, wanted, partial(self._snapshot, name))
            while self._rings[name].prepare_step(_PREPARE_BYTES):
                pass
        except (JournalError, OSError, ValueError) as error:
            code = _code(error)
            refusal = (code, f"the ring {name} could not be opened: {error}", _RETRY_MS)
            self._unready[name] = Unready(settings, refusal, failed=True)  # appends are refused
            return RingEvent(name, "ring_not_opened", {"code": code, "reason": str(error)})
        self._unready.pop(name, None)
        return None

    # --- the reader thread ---------------------------------------------------------------

    def _take_turn(self, _: bool) -> object:
        """Do a read, answer a question, or look for bodies: in turn, as each may take long."""
        turns = self._turns
        turns.rotate(-1)  # the kind that came first the last time comes last
        job = next(jobs for jobs in turns if jobs).popleft()
        if self._stopping:
            return None
        try:
            return self._read_bodies(job) if isinstance(job, BodiesRead) else self._read(job)
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            return self._erred(job, error)

    def _erred(self, job: BodiesRead | ReadRange | IndexQuery, error: Exception) -> object:
        """Return the answer to a job at which the reader thread met an unforeseen error."""
        ring, stream, doing = MAIN, "mail", "bodies"
        if not isinstance(job, BodiesRead):
            ring, stream = job.ring, str(job.stream)
            doing = "read" if isinstance(job, ReadRange) else job.kind
        facts = {"stream": stream, "doing": doing, "error": error}
        self._results.put(RingEvent(ring, "read_erred", facts))
        reason = f"reading met an error of the broker's own: {type(error).__name__}"
        if isinstance(job, BodiesRead):
            return BodiesFound(job.token, {}, reason)
        if isinstance(job, ReadRange):
            return ReadFailed(job.token, "internal", reason)
        return IndexAnswer(job.token, IndexFailure("internal", reason))

    def _read_bodies(self, job: BodiesRead) -> BodiesFound:
        """Read bodies of mail and requests from ring main, and from the tables what it gave up."""
        ring, found, failed = self._rings.get(MAIN), {}, ""
        try:
            if ring is not None:
                batches = ring.read_batches(MAIL_STREAM, job.numbers)
                pairs = zip(job.numbers, batches, strict=True)
                found = {number: batch for number, batch in pairs if batch is not None}
        except (JournalError, OSError) as error:
            failed = str(error)
        missing = [number for number in job.numbers if number not in found]
        if missing and self._bodies is not None:
            stored, damages, fault = self._bodies.read(missing)
            found |= stored
            failed = fault or failed
            for number, why in damages.items():  # It is not found, and so is lost.
                facts = {"number": number, "reason": why}
                self._results.put(RingEvent(MAIN, "mail_damaged", facts))
        # A failed read of the ring does not matter where the tables had everything.
        return BodiesFound(job.token, found, failed if len(found) < len(job.numbers) else "")

    def _read(self, job: ReadRange | IndexQuery) -> object:
        """Do a read of history, or answer a question to the index (reader thread).

        A read that another reader has just made is answered from memory.
        """
        # Looked up first: the opener puts a ring into _rings before it takes it out of _unready.
        unready = self._unready.get(job.ring)
        ring = self._rings.get(job.ring)
        if isinstance(job, ReadRange):
            if ring is None:
                return ReadFailed(job.token, "journal_failed", f"the ring {job.ring} is not open")
            if job.places:
                return self._read_copies(ring, job)
            if job.shared and not job.oldest_ms:  # else what was kept may have expired since
                recent = self._recent.find(ring, job)
                if recent is not None:
                    runs, following = recent
                    # The kernel may have dropped mapped pages since: they are read again here, so
                    # that the loop never waits for the disk.
                    if all(populate_again(run.data) for run in runs):
                        return HistoryRead(job.token, runs, following)
            elif job.alone:  # no other reader would want what was kept
                self._recent.forget(ring, job.stream)
            try:
                found = ring.read(
                    job.stream, job.from_offset, job.end_offset, job.bytes_max,
                    by_key(job.candidates), job.client_time, job.matches, job.oldest_ms,
                    job.pinned, job.rows,
                )  # fmt: skip
            except (JournalError, OSError) as error:
                return ReadFailed(job.token, "journal_failed", str(error))
            runs = tuple(HistoryRun(run.data, run.spans, run.next) for run in found.runs)
            if job.shared and not found.gaps:
                self._recent.keep(ring, job, runs, found.next)
            return HistoryRead(job.token, runs, found.next, found.gaps)
        if job.wanted is not None and not job.wanted():
            # A client that asks and leaves, again and again, must not keep the others waiting.
            return IndexAnswer(job.token, IndexFailure("cancelled", "no reader waits for it"))
        if ring is None:
            code, reason = "journal_failed", f"the ring {job.ring} is not open"
            if unready is not None:  # It is being opened, or that failed.
                code, reason, _ = unready.refusal
            return IndexAnswer(job.token, IndexFailure(code, reason))
        try:
            return IndexAnswer(job.token, answer_query(ring, job))
        except (JournalError, OSError) as error:
            return IndexAnswer(job.token, IndexFailure("journal_failed", str(error)))

    def _read_copies(self, ring: Ring, job: ReadRange) -> object:
        """Read copies of newest records at their places in the ring, up to bytes_max.

        `next` of the answer: how many of the places were looked at. The core asks for the rest.
        """
        runs: list[HistoryRun] = []
        size = looked = 0
        try:
            for place, copy in zip(job.places, copies_at(ring, job.places), strict=True):
                looked += 1
                if copy is not None:  # None: it is gone, as its segment was overwritten
                    stamp = Stamp.unpack(copy, verify=False)
                    span = (0, len(copy), stamp.base_offset, stamp.count)
                    runs.append(HistoryRun(copy, (span,), place))
                    size += len(copy)
                if size >= job.bytes_max:
                    break
        except (JournalError, OSError) as error:
            return ReadFailed(job.token, "journal_failed", str(error))
        return HistoryRead(job.token, tuple(runs), looked)

    # --- the housekeeping thread -----------------------------------------------------------

    def _do_housekeeping(self) -> bool:
        """Do a piece of housekeeping for all rings; True: more is to do (housekeeping thread)."""
        more = self._remove_next_file()
        with contextlib.suppress(OSError):
            self.free_bytes = self._journal.storage.free_bytes()
        now_ms = time.time_ns() // 1_000_000
        for name, ring in self._rings.copy().items():
            try:
                more = ring.prepare_step(_PREPARE_BYTES, now_ms) or more
                self._complaints.pop(name, None)  # it went well: the next error is told anew
            except (JournalError, OSError) as error:  # the next round tries again
                if self._is_new(name, error):
                    facts = {"reason": str(error)}
                    self._results.put(RingEvent(name, "segment_not_prepared", facts))
            for event in ring.take_events():
                # Segments were given up: for each stream of them, its first offset from now on.
                first_offsets = event.facts.get("first_offsets")
                if first_offsets:
                    self._results.put(Trimmed(name, first_offsets))
                self._results.put(RingEvent(name, event.name, dict(event.facts)))
        return more

    def _remove_next_file(self) -> bool:
        """Remove one file of a ring whose stream is gone; True: call again without a long pause."""
        if not self._removals:
            return False
        name = self._removals[0]
        try:
            if not self._remove_file(name):
                self._removals.popleft()
                self._complaints.pop(name, None)
            return True
        except (JournalError, OSError) as error:
            if self._is_new(name, error):
                self._results.put(RingEvent(name, "ring_not_removed", {"reason": str(error)}))
            self._removals.rotate(-1)  # the next round tries another ring
            return False

    def _remove_file(self, name: str) -> bool:
        """Remove one file of a ring whose stream is gone, at last its directory; False: none left.

        Raises JournalError, OSError.
        """
        rings, directory = self._journal.storage.child(RINGS), directory_name(name)
        if directory not in rings.children():
            return False
        # First of all: from here on a start does not miss the ring.
        self._journal.forget(name)
        storage = rings.child(directory)
        # RING_FILE goes first: a start goes on to remove a directory without it.
        names = sorted(storage.names(), key=lambda name: name != RING_FILE)
        if names:
            storage.remove(names[0])
            storage.sync_directory()
        else:
            rings.remove_child(directory)
            rings.sync_directory()
        return bool(names)

    def _is_new(self, ring: str, error: Exception) -> bool:
        """Whether an error of a ring is to be told: once until it has gone well.

        The texts of two errors of one kind may differ by how much room is free.
        """
        known, self._complaints[ring] = self._complaints.get(ring), _code(error)
        return known != _code(error)


def _whole_segments(settings: RingSettings) -> int:
    return settings.ring_bytes - settings.ring_bytes % settings.segment_bytes


def _concerns_queues(bundles: list[AppendBundle]) -> bool:
    return any(batch.stream in _QUEUES for bundle in bundles for batch in bundle.batches)


def _neighbours(bundles: list[AppendBundle], at: int) -> int:
    """Return where the bundles of one write end: the one at `at`, and the next ones of its ring."""
    name = bundles[at].ring
    batches = size = 0
    for stop in range(at, len(bundles)):
        bundle = bundles[stop]
        if bundle.ring != name:
            return stop
        for batch in bundle.batches:
            size += len(batch.content)
        batches += len(bundle.batches)
        if stop > at and (size > _MERGE_BYTES or batches > _MERGE_BATCHES):
            return stop
    return len(bundles)


def _refusal(token: int, earlier: AppendRefused) -> AppendRefused:
    """Return the refusal of a bundle that comes after a refused one of its ring."""
    if earlier.code == "too_large":
        # The size of the refused batch says nothing of a later bundle, which comes again.
        return AppendRefused(token, "wait", f"a batch before it was refused: {earlier.reason}", 1)
    return AppendRefused(token, earlier.code, earlier.reason, earlier.retry_ms)


def _code(error: Exception) -> str:
    """Return the code that refusals and complaints tell of an error of a ring."""
    if isinstance(error, JournalError):
        return error.code
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "disk_full" if full else "journal_failed"


def _explain(error: Exception) -> tuple[str, str]:
    return _code(error), str(error)
