"""spark.readStream: offsets, admission control and tasks of a micro-batch query.

Owns what the driver's long-lived process knows of one query. The rules: offsets are those
of a checkpoint until the broker was asked about them; a batch ends where the caps say, and
nothing advances for records that do not match, unless they are many; nothing here connects
before Spark asks for offsets, since the same object is pickled to the executors.
Source: PySpark's DataSourceStreamReader; spark_connector/README.md.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Final, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from malamute_py.client.facts import ReadPlan
from pyspark_malamute.fetch import fetch
from pyspark_malamute.idle import IdleWait
from pyspark_malamute.links import Broker
from pyspark_malamute.offsets import StreamOffset, check_stream, read_offset, selection_of
from pyspark_malamute.options import Place, SourceOptions
from pyspark_malamute.planning import (
    Range,
    ask_plan,
    check_plan,
    joined,
    locate,
    locate_start,
    ranges,
)

LOG = logging.getLogger("pyspark_malamute")

FAR: Final = 1 << 20
"""Offsets that did not match, after which a query advances past them with an empty batch."""


class MalamuteStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets and plans in one process of the driver, reads in the executors."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._broker = Broker(options)
        self._proven = False
        """Tasks of this query have reached the broker."""
        self._target: int | None = None
        """Where a query with availableNow ends."""
        self._plan: ReadPlan | None = None
        """The newest plan; what reportLatestOffset() tells of."""
        self._planned: tuple[int, int, ReadPlan] | None = None
        """Start and end of the newest batch, and its plan, for partitions()."""
        self._batch_s: float | None = None
        """When this process last ended a batch."""
        self._idle = IdleWait(options.idle_wait_ms)
        self._empty: tuple[int, int] = (-1, -1)
        """Nothing matches from the first of these offsets up to the second."""

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MalamuteStreamReader.__init__(self, state["options"])

    # --- offsets -------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a query without a checkpoint begins."""
        spot = locate_start(self._asked(), self._options, "latest")
        offset = StreamOffset(spot.stream, spot.epoch, spot.offset, selection_of(self._options))
        return offset.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The caps of the options; Spark knows only one of them at a time."""
        options = self._options
        if options.rows_per_trigger:
            return ReadMaxRows(options.rows_per_trigger)
        if options.bytes_per_trigger:
            return ReadMaxBytes(options.bytes_per_trigger)
        if options.min_rows_per_trigger:
            return ReadMinRows(options.min_rows_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on nothing is read that was not in the stream at this moment."""
        spot = locate(self._asked(), self._options, Place("latest"), "")
        self._target = spot.offset

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Where the next batch ends; `start` itself when there is nothing for it."""
        begin = read_offset(start, self._options)
        self._idle.begin(begin)
        end = self._next_end(begin, limit)
        while end is None and self._target is None and self._idle.pause():
            end = self._next_end(begin, limit)
        self._idle.end(None if end else begin)
        return start if end is None else end.to_json()

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has begun the batch after the one that ended here; that one is in its sink."""
        self._idle.batch_began()
        self._proven = True

    def _next_end(self, begin: StreamOffset, limit: ReadLimit) -> StreamOffset | None:
        """The end of a batch from `begin`; None: nothing is to be read yet."""
        known, empty_to = self._empty
        start = max(begin.offset, empty_to) if known == begin.offset else begin.offset
        # Asked even when the target is reached: the stream may have been recreated or rewound.
        if self._holds_back(begin, start, limit):
            return None
        records_max, bytes_max = self._caps(limit)
        plan = self._plan_batch(begin, start, records_max, bytes_max)
        if plan.rewound:
            self._empty = (-1, -1)
            return begin._replace(epoch=plan.epoch, offset=plan.from_offset)
        # The broker counts records only under a cap of records.
        matches = plan.records and plan.bytes
        if matches or self._is_far(begin.offset, plan):
            self._planned = (begin.offset, plan.to_offset, plan)
            self._batch_s = monotonic()
            return begin._replace(epoch=plan.epoch, offset=plan.to_offset)
        self._empty = (begin.offset, plan.to_offset)
        return None

    def _holds_back(self, begin: StreamOffset, start: int, limit: ReadLimit) -> bool:
        """Whether there are too few records yet; the first batch of a run is made at once."""
        least = self._options.min_rows_per_trigger
        lifted = isinstance(limit, ReadAllAvailable) and self.getDefaultReadLimit() != limit
        if not least or lifted or self._target is not None or self._batch_s is None:
            return False
        if monotonic() - self._batch_s >= self._options.max_delay_ms / 1000:
            return False
        plan = self._plan_batch(begin, start, least, 0)
        return not plan.rewound and plan.records < least

    def _plan_batch(
        self, begin: StreamOffset, start: int, records_max: int, bytes_max: int
    ) -> ReadPlan:
        """A plan from `start` up to what the caps admit, which may take several questions."""
        plan = self._ask(begin, start, records_max, bytes_max)
        while (
            plan.records < records_max
            and not plan.rewound
            and plan.to_offset < (plan.tail if self._target is None else self._target)
            and (not bytes_max or plan.bytes < bytes_max)
        ):
            left = bytes_max and bytes_max - plan.bytes
            more = self._ask(begin, plan.to_offset, records_max - plan.records, left)
            if more.rewound or more.to_offset <= plan.to_offset:
                break
            plan = joined(plan, more, self._options.split_bytes)
        self._plan = plan
        return plan

    def _ask(self, begin: StreamOffset, start: int, records_max: int, bytes_max: int) -> ReadPlan:
        """A plan from `start` on for the batch after `begin`, checked."""
        broker = self._asked()
        plan = ask_plan(
            broker,
            self._options,
            start,
            begin.epoch,
            end=self._target,
            records_max=records_max,
            bytes_max=bytes_max,
        )
        check_stream(begin, plan.stream.hex(), self._options)
        check_plan(broker, self._options, plan, start, begin.epoch)
        return plan

    def _caps(self, limit: ReadLimit) -> tuple[int, int]:
        """(records, bytes) that a batch may have, 0: any number."""
        bytes_max = self._options.bytes_per_trigger
        if isinstance(limit, ReadMaxRows):
            return limit.max_rows, bytes_max
        if isinstance(limit, ReadMaxBytes):
            return 0, limit.max_bytes
        return 0, 0

    @staticmethod
    def _is_far(offset: int, plan: ReadPlan) -> bool:
        """Whether to advance past records that do not match.

        Either they are many, or retention has begun and comes near: a position that the log
        no longer has looks like lost records after a restart.
        """
        skipped = plan.to_offset - offset
        held = plan.tail - plan.first
        near = plan.first > 0 and offset - plan.first < held // 2 and skipped > held // 8
        return skipped >= FAR or (near and skipped > 0)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The stream's end, how far this query is behind it, and what retention leaves it.

        As of the newest plan, so that it costs nothing; Spark shows it as latestOffset.
        """
        plan = self._plan
        if plan is None:
            return None
        told = StreamOffset(plan.stream.hex(), plan.epoch, plan.tail, selection_of(self._options))
        facts = {
            **told.to_json(),
            "recordsBehindLatest": plan.tail - plan.to_offset,
            "recordsUntilTrimmed": plan.to_offset - plan.first,
        }
        return dict(sorted(facts.items()))

    # --- tasks ---------------------------------------------------------------------------

    def partitions(
        self, start: Mapping[str, Any], end: Mapping[str, Any]
    ) -> Sequence[InputPartition]:
        """The tasks of a batch; after a restart of one that the checkpoint knows of."""
        options = self._options
        begin, stop = read_offset(start, options), read_offset(end, options)
        if begin.offset >= stop.offset:
            return []
        broker = self._asked()
        planned, self._planned = self._planned, None
        if planned is not None and planned[:2] == (begin.offset, stop.offset):
            plan = planned[2]
        else:
            plan = ask_plan(broker, options, begin.offset, begin.epoch, end=stop.offset)
            check_stream(begin, plan.stream.hex(), options)
            check_plan(broker, options, plan, begin.offset, begin.epoch)
            self._plan = plan
        first = max(plan.from_offset, plan.first)
        return list(ranges(broker, options, plan, first, stop.offset, proven=self._proven))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The records of one task."""
        assert isinstance(partition, Range)
        return fetch(self._options, partition)

    # --- life ----------------------------------------------------------------------------

    def stop(self) -> None:
        """Say goodbye to the broker."""
        self._broker.close()

    def _asked(self) -> Broker:
        if not self._broker.asked:
            _unwind_when_terminated()
        return self._broker


def _unwind_when_terminated() -> None:
    """Have SIGTERM raise SystemExit: Spark ends the process so, and calls stop() on the way out.

    Without this the broker would learn of the end of a query by its silence only.
    """

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if usual and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
