"""One stream of a query, as the driver knows it.

Owns how far a batch reaches in one stream, and the tasks that read it. The rules: a batch ends
where the caps say, and nothing advances for records that do not match, unless they are many or
retention comes near; a position that the broker refuses ends the query by name.
Source: SPEC.md, PLAN_READ; spark_connector/README.md.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from malamute_py.client.facts import ReadPlan
from pyspark_malamute.links import Broker
from pyspark_malamute.offsets import StreamOffset, check_stream
from pyspark_malamute.options import SourceOptions
from pyspark_malamute.planning import Range, ask_plan, check_plan, joined, ranges

FAR: Final = 1 << 20
"""Offsets that did not match, after which a query advances past them with an empty batch."""


class Caps(NamedTuple):
    """Most records and bytes of a stream that a batch may have; 0: any number."""

    records: int = 0
    bytes: int = 0


class _Planned(NamedTuple):
    """A batch that was planned, and is likely the next one to be read."""

    begin: int
    end: int
    plan: ReadPlan


class OneStream:
    """Plans of one stream of a query."""

    def __init__(self, broker: Broker, options: SourceOptions) -> None:
        """options: those of the query for this stream."""
        self._broker = broker
        self._options = options
        self.plan: ReadPlan | None = None
        """The newest plan."""
        self.lost = 0
        """Records that could not be read any more when this process planned for them."""
        self._planned: _Planned | None = None
        """Start and end of the newest batch, and its plan, for tasks()."""
        self._without_match: tuple[StreamOffset, StreamOffset] | None = None
        """Nothing matches from the first of these positions up to the second."""

    def next_end(self, begin: StreamOffset, caps: Caps, target: int | None) -> StreamOffset | None:
        """Return where a batch from `begin` ends, when Spark asks; None: nothing is to be read yet.

        target: nothing at or beyond it is read; None: no bound. The broker is asked even when the
        target is reached: the stream may have been recreated or rewound.
        """
        start = self._start(begin)
        plan = self._plan_batch(begin, start, caps, target)
        if plan.rewound:  # the log ends before `begin`: an empty batch goes back to its end
            self._without_match = None
            self.lost += max(0, begin.offset - plan.from_offset)
            return begin._replace(epoch=plan.epoch, offset=plan.from_offset)
        # The broker counts records only under a cap of records: else bytes tell whether any match.
        matches = plan.records and plan.bytes
        if matches or _is_far(begin.offset, plan):
            if begin.epoch:  # not of a stream that was never read
                lost_to = min(plan.first, plan.to_offset)
                self.lost += max(0, lost_to - max(start.offset, plan.trimmed))
            self._planned = _Planned(begin.offset, plan.to_offset, plan)
            return begin._replace(epoch=plan.epoch, offset=plan.to_offset)
        # The next question begins after what was looked at.
        self._without_match = begin, StreamOffset(begin.stream, plan.epoch, plan.to_offset)
        return None

    def records_after(self, begin: StreamOffset, most: int) -> int:
        """Return how many selected records there are, up to `most`, for minRecordsPerTrigger."""
        plan = self._plan_batch(begin, self._start(begin), Caps(most), None)
        # The batch that goes back to where the log ends now is not held back.
        return most if plan.rewound else plan.records

    def is_still_at(self, begin: StreamOffset, stream: str, tail: int) -> bool:
        """Whether a stream has nothing after `begin` that was not looked at.

        stream, tail: its UUID and its end, as the list of streams has them.
        """
        return stream == begin.stream and tail == self._start(begin).offset

    def tasks(
        self, begin: StreamOffset, stop: StreamOffset, *, reached_broker: bool
    ) -> list[Range]:
        """The ranges that the tasks of a batch read.

        It is the batch that next_end() planned last, or after a restart one that the checkpoint
        knows of, which is planned anew.
        """
        if begin.offset >= stop.offset:
            return []
        options, broker = self._options, self._broker
        planned, self._planned = self._planned, None
        wanted = (begin.stream, begin.offset, stop.offset)
        if planned is not None and wanted == (
            planned.plan.stream.hex(), planned.begin, planned.end
        ):  # fmt: skip
            plan = planned.plan
        else:
            plan = ask_plan(broker, options, begin.offset, begin.epoch, end=stop.offset)
            check_stream(begin, plan.stream.hex(), options)
            check_plan(broker, options, plan, begin.offset, begin.epoch)
            self.plan = plan
        first = max(plan.from_offset, plan.first)
        return ranges(broker, options, plan, first, stop.offset, reached_broker=reached_broker)

    def _start(self, begin: StreamOffset) -> StreamOffset:
        """Return the position to plan from: after records that are known not to match.

        It has the epoch in which these were looked at. Under that of `begin`, which may have ended
        before it, the broker would take it for a position that a power loss took away.
        """
        if self._without_match is None:
            return begin
        looked_at_from, looked_at_to = self._without_match
        return looked_at_to if looked_at_from == begin else begin

    def _plan_batch(
        self, begin: StreamOffset, start: StreamOffset, caps: Caps, target: int | None
    ) -> ReadPlan:
        """A plan from `start` up to what the caps admit, which may take several questions.

        begin: where the batch begins. start: as of _start(). target: as of next_end(). Without a
        cap of records one question is enough.
        """
        plan = self._ask(begin, start, caps, target)
        while (
            plan.records < caps.records
            and not plan.rewound
            and plan.to_offset < (plan.tail if target is None else min(target, plan.tail))
            and (not caps.bytes or plan.bytes < caps.bytes)
        ):
            # A cap of 0 bytes, which is none, stays 0.
            left = Caps(caps.records - plan.records, caps.bytes and caps.bytes - plan.bytes)
            place = StreamOffset(begin.stream, plan.epoch, plan.to_offset)
            more = self._ask(begin, place, left, target)
            if more.rewound or more.to_offset <= plan.to_offset:
                break
            plan = joined(plan, more, self._options.task_bytes)
        self.plan = plan
        return plan

    def _ask(
        self, begin: StreamOffset, start: StreamOffset, caps: Caps, target: int | None
    ) -> ReadPlan:
        """A plan from `start` on for the batch that begins at `begin`, as the broker makes it.

        Raises CheckpointMismatch: the stream is another one. Raises DataLoss: it lacks records.
        """
        plan = ask_plan(
            self._broker,
            self._options,
            start.offset,
            start.epoch,
            end=target,
            records_max=caps.records,
            bytes_max=caps.bytes,
        )
        check_stream(begin, plan.stream.hex(), self._options)
        # What retention took of a stream that was never read is no loss.
        epoch = start.epoch if begin.epoch else 0
        check_plan(self._broker, self._options, plan, start.offset, epoch)
        return plan


def _is_far(offset: int, plan: ReadPlan) -> bool:
    """Whether to advance past records that do not match.

    Either they are many, or retention has begun and comes near: a position that the log
    no longer has looks like lost records after a restart.
    """
    skipped = plan.to_offset - offset
    held = plan.tail - plan.first
    # Near: the position is in the older half of the log, and the way to go is worth a batch.
    near = plan.first > 0 and offset - plan.first < held // 2 and skipped > held // 8
    return skipped >= FAR or (near and skipped > 0)
