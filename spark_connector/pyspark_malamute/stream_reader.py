"""spark.readStream: offsets, admission control and tasks of a micro-batch query.

Owns what the driver's long-lived process knows of one query. The rules: offsets are those
of a checkpoint until the broker was asked about them; the caps of a batch are shared between the
streams that have something new; the tasks of a batch stand in the offset at its end, so that a
batch that is run again has the same ones; nothing here connects before Spark asks for offsets,
since the same object is pickled to the executors.
Source: PySpark's DataSourceStreamReader; spark_connector/README.md.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from malamute_py.client.facts import StreamFacts
from pyspark_malamute.cursor import QueryCursor
from pyspark_malamute.errors import StreamMissing
from pyspark_malamute.fetch import fetch_all
from pyspark_malamute.idle import IdleWait
from pyspark_malamute.links import Broker
from pyspark_malamute.loss import fail_or_log_removed
from pyspark_malamute.offsets import NEVER_READ, StreamOffset, read_offsets, to_json
from pyspark_malamute.one_stream import Caps, OneStream
from pyspark_malamute.options import Place, SourceOptions
from pyspark_malamute.planning import (
    Range,
    grouped,
    locate,
    locate_start,
    ranges_of,
    restored,
    stored,
)
from pyspark_malamute.shares import shares
from pyspark_malamute.streams import begin_with, find_streams, gone, together


class Lag(NamedTuple):
    """Records and bytes that a stream may have for a batch, by which the caps are shared.

    Each is 1 at least.
    """

    records: int
    bytes: int
    """Estimate by the average size of the stream's records."""


class MalamuteStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets and plans in one process of the driver, reads in the executors."""

    def __init__(self, options: SourceOptions) -> None:
        """Begin without a link: the broker is asked when Spark asks for offsets."""
        self._options = options
        self._broker = Broker(options)
        self._cursor = QueryCursor(self._broker, options)
        self._streams: dict[str, OneStream] = {}
        self._gone: set[str] = set()
        """Streams of the checkpoint whose removal has been reported."""
        self._reached_broker = False
        """Tasks of this query have reached the broker, so that one that is away is waited for."""
        self._targets: dict[str, int] | None = None
        """Stream -> offset at which a query with availableNow ends."""
        self._batch_s: float | None = None
        """Time at which this process last ended a batch, by monotonic()."""
        self._batches = 0
        """Batches that this process has ended, to begin each with another stream."""
        self._at: Mapping[str, StreamOffset] = {}
        """Stream -> position at which the newest batch ended."""
        self._tails: dict[str, int] = {}
        """Stream -> its end when the streams were listed last."""
        self._idle = IdleWait(options.idle_wait_ms)
        self._planned_end: dict[str, Any] = {}
        """The newest end of a batch that this process planned."""
        self._planned_tasks: list[InputPartition] = []
        """The tasks of that batch."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what an executor needs, which reads by the options and a task alone."""
        return {"options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew, as a reader in another process."""
        MalamuteStreamReader.__init__(self, state["options"])

    # --- offsets -------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the position at which a query without a checkpoint begins, as Spark keeps it."""
        broker, options = self._asked(), self._options

        def begin(name: str) -> StreamOffset:
            """Return where reading begins in one stream."""
            spot = locate_start(broker, options.of(name), "latest")
            return StreamOffset(spot.stream, spot.epoch, spot.offset)

        names = [options.stream] if options.stream else begin_with(broker, options)
        return to_json(together(begin, names), options)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the cap that Spark hands to latestOffset().

        Spark knows one at a time: further caps of the options latestOffset() takes from them.
        """
        options = self._options
        if options.rows_per_trigger:
            return ReadMaxRows(options.rows_per_trigger)
        if options.bytes_per_trigger:
            return ReadMaxBytes(options.bytes_per_trigger)
        if options.min_rows_per_trigger:
            return ReadMinRows(options.min_rows_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Have the query end at the present ends of its streams.

        Spark calls it once, as a query with trigger availableNow begins.
        """
        broker, options = self._asked(), self._options

        def end(name: str) -> int:
            """Return the present end of one stream; no error about it names an option."""
            return locate(broker, options.of(name), Place("latest"), option="").offset

        self._targets = together(end, self._names())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return where the next batch ends, with its tasks; `start` when there is nothing for it.

        Spark asks before each batch, and soon again while it gets `start`: so this waits a while.
        """
        begin = read_offsets(start, self._options)
        self._idle.begin(begin)
        end = self._next_end(begin, limit)
        # Targets are those of trigger availableNow: such a query does not wait for more.
        while end is None and self._targets is None and self._idle.pause():
            end = self._next_end(begin, limit)
        self._idle.end(None if end else begin)
        if end is None:
            return start
        found = self._planned(begin, end).values()
        self._planned_tasks = grouped([part for parts in found for part in parts], self._options)
        self._planned_end = {**to_json(end, self._options), "tasks": stored(self._planned_tasks)}
        return self._planned_end

    def commit(self, end: dict[str, Any]) -> None:
        """Take note that the batch that ended here is in Spark's sink."""
        # Spark commits a batch when it begins the next one.
        self._idle.batch_began()
        self._reached_broker = True
        self._cursor.move(read_offsets(end, self._options))

    def _next_end(
        self, begin: Mapping[str, StreamOffset], limit: ReadLimit
    ) -> dict[str, StreamOffset] | None:
        """The end of a batch from `begin`, by streams' names; None: nothing is to be read yet.

        limit: Spark's cap for this batch.
        """
        lag: dict[str, Lag] = {}
        if self._options.stream:
            begin = {self._options.stream: begin[self._options.stream]}
            # It alone shares the caps, so that any lag gives it all of them.
            lag = dict.fromkeys(begin, Lag(1, 1))
        else:
            begin, lag = self._with_news(begin)
        self._cursor.open(begin)
        self._at = begin
        if not lag or self._holds_back(begin, lag, limit):
            return None
        moved: dict[str, StreamOffset] = {}
        # Caps may leave streams out: those are asked about when the others have nothing.
        while lag and not moved:
            caps = self._caps(limit, lag)
            moved = self._ends(begin, caps)
            lag = {name: behind for name, behind in lag.items() if name not in caps}
        if not moved:
            return None
        self._batch_s = monotonic()
        self._batches += 1
        self._at = {**begin, **moved}
        return self._at

    def _ends(
        self, begin: Mapping[str, StreamOffset], caps: Mapping[str, Caps]
    ) -> dict[str, StreamOffset]:
        """Where a batch ends in the streams that have something for it.

        caps: the most that it may have of each stream that is asked about.
        """

        def next_end(name: str) -> StreamOffset | None:
            """Return where the batch ends in one stream; None: it has nothing for it."""
            # A stream that came later than the targets is not read: nothing lies before 0.
            target = None if self._targets is None else self._targets.get(name, 0)
            return self._stream(name).next_end(begin[name], caps[name], target)

        return {name: end for name, end in together(next_end, caps).items() if end is not None}

    def _with_news(
        self, begin: Mapping[str, StreamOffset]
    ) -> tuple[dict[str, StreamOffset], dict[str, Lag]]:
        """(positions in the streams that there are, lag of those to be asked about).

        A stream that was not there when the query began is read from its first record on. A query
        with availableNow asks about all, to find those that were recreated or rewound.
        """
        found = find_streams(self._asked(), self._options)
        self._gone.difference_update(found)  # made again: it may be removed again
        for name in gone(begin, found, self._options) - self._gone:
            fail_or_log_removed(self._options.of(name))
            self._gone.add(name)
        self._tails = {name: facts.tail for name, facts in found.items()}
        offsets, lag = {}, {}
        for name, facts in found.items():
            # NEVER_READ stands for the first record that there is.
            at = offsets[name] = begin.get(name, StreamOffset(facts.uuid.hex(), *NEVER_READ))
            if self._targets is not None:
                if name in self._targets:
                    lag[name] = _lag(facts, self._targets[name] - at.offset)
            elif not self._stream(name).is_still_at(at, facts.uuid.hex(), facts.tail):
                lag[name] = _lag(facts, facts.tail - at.offset)
        return offsets, lag

    def _holds_back(
        self, begin: Mapping[str, StreamOffset], lag: Mapping[str, Lag], limit: ReadLimit
    ) -> bool:
        """Whether a batch waits, since minRecordsPerTrigger are not there yet.

        It does not where it is the first one of this process, where maxTriggerDelay is over, or
        where the query is to end with what there is. limit: Spark's cap for this batch.
        """
        least = self._options.min_rows_per_trigger
        # Spark asks for all there is where a query is to end with that.
        lifted = isinstance(limit, ReadAllAvailable) and self.getDefaultReadLimit() != limit
        if not least or lifted or self._targets is not None or self._batch_s is None:
            return False
        if monotonic() - self._batch_s >= self._options.max_delay_ms / 1000:
            return False
        for name in lag:
            least -= self._stream(name).records_after(begin[name], least)
            if least <= 0:
                return False
        return True

    def _caps(self, limit: ReadLimit, lag: Mapping[str, Lag]) -> dict[str, Caps]:
        """Return the most that a batch may have of each stream; none: the stream is left out."""
        records_max = 0
        bytes_max = self._options.bytes_per_trigger
        if isinstance(limit, ReadMaxRows):
            records_max = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            bytes_max = limit.max_bytes
        else:  # All there is, or at least so many records: no cap.
            bytes_max = 0
        names = list(lag)
        # Small caps are spent on the first streams: each batch begins with another one.
        turn = self._batches % len(names)
        order = names[turn:] + names[:turn]
        records = shares(records_max, {name: lag[name].records for name in order})
        sizes = shares(bytes_max, {name: lag[name].bytes for name in order})
        return {
            name: Caps(records[name], sizes[name])
            for name in order
            if name in records and name in sizes
        }

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The streams' ends, how far this query is behind, and what retention leaves it.

        As of the newest plans, so that it costs nothing; Spark shows it as latestOffset.
        """
        plans = {name: one.plan for name, one in self._streams.items() if one.plan is not None}
        if not plans:
            return None
        tails: dict[str, StreamOffset] = {}
        # spare: of each stream, the records that retention may take before it takes unread ones.
        behind, spare = 0, []
        for name, at in self._at.items():
            plan = plans.get(name)
            tail = max(self._tails.get(name, 0), plan.tail if plan else 0, at.offset)
            done = max(at.offset, plan.to_offset if plan else 0)
            tails[name] = StreamOffset(at.stream, plan.epoch if plan else at.epoch, tail)
            behind += max(0, tail - done)
            spare += [done - plan.first] if plan else []
        facts = {
            **to_json(tails, self._options),
            "recordsLost": sum(one.lost for one in self._streams.values()),
            "recordsBehindLatest": behind,
            "recordsUntilTrimmed": min(spare, default=0),
        }
        return dict(sorted(facts.items()))

    # --- tasks ---------------------------------------------------------------------------

    def partitions(
        self, start: Mapping[str, Any], end: Mapping[str, Any]
    ) -> Sequence[InputPartition]:
        """Return the tasks of a batch, for which Spark asks once the batch begins.

        After a restart it may be a batch that the checkpoint knows of.
        """
        begin = read_offsets(start, self._options)
        stop = read_offsets(end, self._options)
        if stop == begin:
            return []
        if end == self._planned_end:  # Not a batch that the checkpoint knows of after a restart.
            for part in self._planned_tasks:
                for each in ranges_of(part):
                    # It may have become true since the tasks were planned.
                    each.reached_broker = self._reached_broker
            return self._planned_tasks
        # Asked for, even where the checkpoint has the tasks: a stream may have been recreated,
        # removed or trimmed since.
        found = self._planned(begin, stop)
        if "tasks" in end:
            there = {name: at for name, at in stop.items() if name in found}
            plans = {name: self._stream(name).plan for name in there}
            firsts = {name: plan.first for name, plan in plans.items() if plan is not None}
            return restored(end["tasks"], there, firsts, reached_broker=self._reached_broker)
        return grouped([part for parts in found.values() for part in parts], self._options)

    def _planned(
        self, begin: Mapping[str, StreamOffset], stop: Mapping[str, StreamOffset]
    ) -> dict[str, list[Range]]:
        """Return the ranges of a batch, from `begin` to `stop`, in each stream that has some."""
        changed = [name for name, at in stop.items() if at != begin.get(name)]

        def tasks(name: str) -> list[Range] | None:
            """Return the ranges to read of one stream; None: it was removed, and is left out."""
            fresh = StreamOffset(stop[name].stream, *NEVER_READ)
            try:
                return self._stream(name).tasks(
                    begin.get(name, fresh), stop[name], reached_broker=self._reached_broker
                )
            except StreamMissing:
                if self._options.stream:
                    raise
                fail_or_log_removed(self._options.of(name))
                return None

        return {
            name: parts for name, parts in together(tasks, changed).items() if parts is not None
        }

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the records of one task as Arrow record batches, in an executor."""
        return fetch_all(self._options, partition)

    # --- life ----------------------------------------------------------------------------

    def stop(self) -> None:
        """Say goodbye to the broker, when Spark ends the query."""
        self._broker.close()

    def _asked(self) -> Broker:
        """Return the broker to ask; before the first question, see to a goodbye at the end."""
        if not self._broker.asked:
            _unwind_when_terminated()
        return self._broker

    def _names(self) -> list[str]:
        """Names of the streams that there are now."""
        if self._options.stream:
            return [self._options.stream]
        return list(find_streams(self._asked(), self._options))

    def _stream(self, name: str) -> OneStream:
        """Return the object that plans one stream, made at the first use."""
        found = self._streams.get(name)
        if found is None:
            made = OneStream(self._asked(), self._options.of(name))
            found = self._streams.setdefault(name, made)  # Threads of together() may both make one.
        return found


def _lag(facts: StreamFacts, records: int) -> Lag:
    """Return the lag of a stream that has about so many records for a batch."""
    average = facts.bytes // max(1, facts.records)
    return Lag(max(1, records), max(1, records * average))


def _unwind_when_terminated() -> None:
    """Have SIGTERM raise SystemExit: Spark ends the process so, and calls stop() on the way out.

    Without this the broker would learn of the end of a query by its silence only.
    """

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if usual and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
