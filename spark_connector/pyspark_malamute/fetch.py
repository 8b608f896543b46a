"""A task's work: the records of one range, as Arrow record batches.

Owns the fetch of a range and its repetition. The rules: what was handed to Spark is never
fetched again, so a repeated question begins after it; a range is complete when its covers
reach its end, and anything less is an error; a task asks for its next ranges before it has worked
off the one before, up to a bound of bytes; a reader that stops early closes its subscriptions.
Source: SPEC.md, sections 6 and 8.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from pyspark.sql.datasource import InputPartition

from malamute_protocol.batch import Batch
from malamute_protocol.errors import ConnectionLost, Timeout
from malamute_py.client.position import Position
from malamute_py.client.session.subscription import GapNotice, Notice, RewoundNotice
from malamute_py.client.sync.client import SyncSubscription
from pyspark_malamute import links
from pyspark_malamute.columns import Columns, Gather, RecordCount, RowCount, take_in
from pyspark_malamute.errors import SourceUnavailable
from pyspark_malamute.local_log import LocalLog
from pyspark_malamute.loss import fail_or_log_lost, fail_or_log_rewound, fail_or_log_trimmed
from pyspark_malamute.offsets import StreamOffset, check_stream
from pyspark_malamute.options import SourceOptions
from pyspark_malamute.planning import Range, ranges_of
from pyspark_malamute.typed import TypedGather

LOG = logging.getLogger("pyspark_malamute")

_CREDIT_BYTES: Final = 8 << 20
"""Four replies of 1 to 2 MiB under way while one is turned into columns."""
_CREDIT_BYTES_MIN: Final = 64 << 10
_CREDIT_RECORDS: Final = 1 << 20
"""So many that the credit of bytes alone bounds what is under way."""
_AHEAD_BYTES: Final = _CREDIT_BYTES
"""Credit of the subscriptions that are open before their turn, at most."""
_AHEAD_RANGES: Final = 16
"""Ranges after the present one that may be asked for before their turn."""
_frozen_in = 0
"""Id of the process in which _spare_the_collector() has done its work."""


def fetch_all(options: SourceOptions, part: InputPartition) -> Iterator[Any]:
    """The selected records of a task, as pyarrow.RecordBatch: what the readers give to Spark.

    Raises as fetch() does. Of a range that the plan has counted, rows are made of the number alone,
    and nothing is read.
    """
    parts = []
    for each in ranges_of(part):
        if each.counted:
            rows = RecordCount(options.of(each.name)) if options.counts_by_range else RowCount()
            yield from rows.batches_of(each.end - each.start)
        else:
            parts.append(each)
    if not parts:
        return
    # Where the log is at hand, a range is asked for over the wire only when the files end.
    with (
        links.in_use(options),
        LocalLog(options) as log,
        contextlib.closing(_Pipe(options, parts, ahead=not log.is_open)) as pipe,
    ):
        for each in parts:
            yield from fetch(options, each, pipe, log)


class _Pipe:
    """Subscriptions to the ranges of a task, some of them opened before their turn.

    The records of the next ranges come while those of the one before become columns.
    """

    def __init__(self, options: SourceOptions, parts: list[Range], *, ahead: bool = True) -> None:
        """parts: in the order in which they are read. ahead: open some before their turn."""
        self._options = options
        self._ahead = ahead
        self._waiting = deque(parts)
        """Ranges whose turn has not come."""
        self._open: dict[Range, SyncSubscription] = {}

    def subscription(self, part: Range, position: int) -> SyncSubscription:
        """Return the subscription to a range from a position on; the caller closes it.

        Asked at the range's turn, and after each failure: then another one is made.
        """
        if part in self._waiting:
            self._waiting.remove(part)
        # One opened ahead begins at part.start, as `position` does before the first failure.
        opened = self._open.pop(part, None)
        return opened or _subscribe(self._options.of(part.name), part, position)

    def open_ahead(self) -> None:
        """Ask for the next ranges while one is read, as far as the bound of bytes allows."""
        if not self._ahead:
            return
        left = _AHEAD_BYTES - sum(map(_credit_bytes, self._open))
        for part in islice(self._waiting, _AHEAD_RANGES):
            if part not in self._open:
                left -= _credit_bytes(part)
                if left < 0:
                    return
                self._open[part] = _subscribe(self._options.of(part.name), part, part.start)

    def close(self) -> None:
        """Close what was opened before its turn."""
        while self._open:
            self._open.popitem()[1].close()


def fetch(
    options: SourceOptions, part: Range, pipe: _Pipe | None = None, log: LocalLog | None = None
) -> Iterator[Any]:
    """The selected records of a range, in order, as pyarrow.RecordBatch.

    pipe: the task's subscriptions; None: to this range only. log: the broker's files, where the
    task may be on its machine.
    Raises DataLoss, SourceUnavailable, CheckpointMismatch (the stream was recreated).
    """
    _spare_the_collector()
    options = options.of(part.name)
    pipe = pipe or _Pipe(options, [part])
    gather = _columns(options)
    position = part.start
    if log is not None:
        position = yield from log.read(options, part, gather)
    # Over the wire, each time round with a new subscription from where the last one came to.
    failures = 0
    progress_s = time.monotonic()
    while position < part.end:
        before = position
        taken_in = True  # False while a batch may be half in the columns
        try:
            with links.explained(options, "read"), pipe.subscription(part, position) as reading:
                _check_begin(options, reading, part, position)
                pipe.open_ahead()
                while True:
                    batch, position = _next_batch(options, reading, part, position)
                    if batch is None:
                        break
                    taken_in = False
                    yield from take_in(gather, batch)
                    taken_in = True
            if position < part.end:
                raise SourceUnavailable(
                    f"malamute source: {options.stream} [{part.start}, {part.end}) ended at "
                    f"{position} without a word; the broker's log may tell why. Run the query again"
                )
        except SourceUnavailable as error:
            if position > before:
                failures, progress_s = 0, time.monotonic()
            # The absence of a broker that was reached counts by its length, all else by times.
            if links.is_away(options, reached_broker=part.reached_broker):
                gives_up = time.monotonic() - progress_s >= options.broker_outage_ms / 1000
            else:
                failures += 1
                gives_up = failures > options.fetch_retries
            pipe.close()  # Its subscriptions are the link's, which is given up.
            links.drop(options)
            # Half of a batch is in the columns when taking it in fails: nothing may follow it.
            may_ask_again = taken_in and isinstance(error.__cause__, Timeout | ConnectionLost)
            if gives_up or not may_ask_again:
                raise
            LOG.warning("malamute source: asking again from offset %d: %s", position, error)
    yield from gather.take()


def _columns(options: SourceOptions) -> Columns:
    """Return an empty collector for the records of a range, by what of them is wanted."""
    if options.body_type == "typed":
        return TypedGather(options)
    if options.counts_by_range:
        return RecordCount(options)
    return RowCount() if options.counts_only else Gather(options)


def _subscribe(options: SourceOptions, part: Range, position: int) -> SyncSubscription:
    """Return the subscription to one range, from a position in it on."""
    return links.link(options, reached_broker=part.reached_broker).subscribe(
        options.stream,
        options.pattern,
        start=Position(bytes.fromhex(part.stream), part.epoch, position),
        end=part.end,
        visibility="durable",
        client_time=options.client_time,
        create=False,
        # Notices are taken in order below, where failOnDataLoss decides.
        on_notice=_ignore,
        credit_records=_CREDIT_RECORDS,
        credit_bytes=_credit_bytes(part),
    )


def _credit_bytes(part: Range) -> int:
    """Bytes of a range that may wait in this process: its size within bounds, where it is known."""
    return min(max(part.size, _CREDIT_BYTES_MIN), _CREDIT_BYTES) if part.size else _CREDIT_BYTES


def _ignore(_: Notice) -> None:
    """Take a notice as it comes, and do nothing: _judge_notices() has it in its turn."""


def _check_begin(
    options: SourceOptions, reading: SyncSubscription, part: Range, position: int
) -> None:
    """Wait until the broker has accepted a reading.

    Raises CheckpointMismatch: the stream of this name is not the one that was planned.
    """
    place = reading.accepted(options.request_timeout_ms)
    check_stream(StreamOffset(part.stream, part.epoch, position), place.stream.hex(), options)


def _next_batch(
    options: SourceOptions, reading: SyncSubscription, part: Range, position: int
) -> tuple[Batch | None, int]:
    """The next batch, None at the end, and the position after it.

    Raises Timeout: neither moved. Raises DataLoss.
    """
    while True:
        batch: Batch | None = None
        silence: Timeout | None = None
        try:
            batch = reading.next_batch(options.fetch_timeout_ms)
        except Timeout as error:
            silence = error
        if _judge_notices(options, reading, part):
            # What comes now has offsets of records that this range was to have: not wanted.
            return None, part.end
        place = reading.position
        before = position
        if place is not None:
            position = max(position, place.next)
        if silence is None:
            return batch, position
        # No record came in time. Where few are selected that is no fault as long as the broker
        # tells of others that it has passed over.
        if position == before:
            raise silence


def _judge_notices(options: SourceOptions, reading: SyncSubscription, part: Range) -> bool:
    """Judge what the reading told besides records; True: the log was rewound, nothing more comes.

    A gap is a loss, or what a trim has removed (code `purged`). Raises DataLoss.
    """
    for notice in reading.notices():
        if isinstance(notice, GapNotice):
            end = min(notice.to_offset, part.end)
            if notice.code == "purged":
                fail_or_log_trimmed(options, notice.from_offset, end)
            else:
                fail_or_log_lost(options, notice.from_offset, end, notice.code, notice.reason)
        elif isinstance(notice, RewoundNotice):
            fail_or_log_rewound(options, notice.from_offset, notice.to_offset)
            return True
    return False


def _spare_the_collector() -> None:
    """Once a process: take what is loaded out of the collections that Spark runs a task.

    Each worker collects all generations after every task: 31 ms with what we import.
    """
    global _frozen_in
    if _frozen_in != os.getpid():
        _frozen_in = os.getpid()
        gc.freeze()
