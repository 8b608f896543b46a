"""Questions of the driver to the broker before anything is read.

Owns the questions (where does a read begin, how far does a batch reach, how is it cut) and
the partitions made of the answers. The rule: the broker plans from its index, so that
matching records, not offsets, are counted. Source: SPEC.md, PLAN_READ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import msgspec
from pyspark.sql.datasource import InputPartition

from malamute_py.client.facts import ReadPlan, Split
from malamute_py.client.position import AtTime, Position, StartPoint
from pyspark_malamute.errors import OptionError
from pyspark_malamute.links import Broker
from pyspark_malamute.loss import fail_or_log_gone, fail_or_log_rewound
from pyspark_malamute.offsets import StreamOffset
from pyspark_malamute.options import Place, SourceOptions


class Range(InputPartition):
    """Offsets [start, end) of one stream: what one task reads."""

    def __init__(
        self,
        name: str,
        stream: str,
        epoch: int,
        start: int,
        end: int,
        *,
        first: int = 0,
        size: int = 0,
        reached_broker: bool = False,
        counted: bool = False,
    ) -> None:
        """name: of the stream. stream: its UUID, hexadecimal. epoch: in which the plan was made.

        first: the stream's first offset when the plan was made. size: bytes of the journal, at
        most. reached_broker: tasks of this query have reached the broker before, so that a broker
        that is away is waited for. counted: the plan says that a read would bring every record of
        it, of which only the number is wanted: nothing is read.
        """
        self.name = name
        self.stream = stream
        self.epoch = epoch
        self.start = start
        self.end = end
        self.first = first
        self.size = size
        self.reached_broker = reached_broker
        self.counted = counted


class Ranges(InputPartition):
    """Small ranges of several streams that one task reads, one after the other."""

    def __init__(self, ranges: list[Range]) -> None:
        self.ranges = ranges


class Spot(msgspec.Struct, frozen=True):
    """An offset of a stream, and what the stream was like when it was asked for."""

    stream: str
    """UUID of the stream, hexadecimal."""
    epoch: int
    first: int
    """Offset of the oldest record."""
    tail: int
    """Offset after the newest record."""
    offset: int


def locate(broker: Broker, options: SourceOptions, place: Place, option: str) -> Spot:
    """Ask the broker for the offset of a place that an option names.

    option: name of the option, for errors; of an earliest or latest place or a time there are none.
    Raises OptionError: there is no such place. Raises DataLoss: there was.
    """
    start: StartPoint
    match place.kind:
        case "earliest":
            start = "earliest"
        case "time":
            start = AtTime(place.value)
        case _:
            start = "latest"  # of an offset, only the stream's bounds are asked for
    # One record of everything: only where it begins is of interest.
    found = broker.ask(
        "find an offset",
        lambda client: client.plan_read(options.stream, ["all"], start=start, records_max=1),
        options,
    )
    offset = found.from_offset
    if place.kind == "offset":
        offset = place.value
        if offset > found.tail:
            raise OptionError(option, f"{offset} is beyond the stream's end, {found.tail}")
        if offset < found.first and option == "startingOffsets":
            # Raises, unless the query accepts the loss: it then begins with what there is.
            fail_or_log_gone(options, offset, found.first, found.trimmed, "retention")
            offset = found.first
    return Spot(found.stream.hex(), found.epoch, found.first, found.tail, offset)


def locate_start(broker: Broker, options: SourceOptions, default: str) -> Spot:
    """Where a new query begins in its stream. Raises as locate().

    default: kind of the place where no option says one, `earliest` or `latest`.
    """
    place = options.starting.of(options.stream) or Place(default)
    by_time = place.kind == "time"
    spot = locate(broker, options, place, "startingTimestamp" if by_time else "startingOffsets")
    if by_time and spot.offset >= spot.tail and options.starting_strategy == "error":
        raise OptionError(
            "startingTimestamp",
            f"no record of stream '{options.stream}' was appended at or after it; give an earlier "
            "time, or set startingOffsetsByTimestampStrategy to latest",
        )
    return spot


def ask_plan(
    broker: Broker,
    options: SourceOptions,
    start: int,
    epoch: int,
    *,
    end: int | None = None,
    records_max: int = 0,
    bytes_max: int = 0,
    split_bytes: int = 0,
) -> ReadPlan:
    """Ask for a plan: up to where a batch reaches from an offset on, and how it is split.

    epoch: in which `start` was a position. end: nothing at or beyond it is planned. records_max,
    bytes_max: caps of the batch; 0: none. split_bytes: about how large each split is; 0: as the
    options say. Raises SourceUnavailable.
    """
    return broker.ask(
        "plan a read",
        lambda client: client.plan_read(
            options.stream,
            options.pattern,
            # Without the uuid: a recreated stream is refused in our own words.
            start=Position(b"", epoch, start),
            end=end,
            records_max=records_max,
            bytes_max=bytes_max,
            split_bytes=split_bytes or options.task_bytes,
            client_time=options.client_time,
        ),
        options,
    )


def joined(plan: ReadPlan, more: ReadPlan, split_bytes: int) -> ReadPlan:
    """One plan of two, the second of which begins where the first ends.

    One answer of the broker may end before the caps of a micro-batch are reached. A split is a
    range of offsets for one task, with its bytes that may match.

    split_bytes: where the two meet, splits that come to no more become one; one without bytes
    stays apart, since it needs no task.
    """
    before, after = list(plan.splits), list(more.splits)
    if before and after:
        last, first = before[-1], after[0]
        if last.bytes and first.bytes and last.bytes + first.bytes <= split_bytes:
            before.pop()
            after[0] = Split(last.from_offset, first.to_offset, last.bytes + first.bytes)
    return msgspec.structs.replace(
        more,
        from_offset=plan.from_offset,
        splits=before + after,
        records=plan.records + more.records,
        bytes=plan.bytes + more.bytes,
        unbroken=[*plan.unbroken, *more.unbroken],
    )


def check_plan(
    broker: Broker, options: SourceOptions, plan: ReadPlan, start: int, epoch: int
) -> None:
    """Judge what the plan from a position lacks, because the log no longer has it.

    Asked of each plan, so that no loss is silent. start, epoch: the position; an epoch of 0:
    nothing was ever read there, see NEVER_READ. Raises DataLoss, unless the options accept the
    loss.
    """
    if plan.rewound:
        fail_or_log_rewound(options, start, plan.from_offset)
    elif plan.first > start and epoch:
        code = "retention"
        if plan.epoch != epoch:
            # The broker began anew: a stream in memory lost its records then.
            facts = broker.ask(
                "ask about the stream",
                lambda client: client.stream_info(options.stream),
                options,
            )
            code = "lost" if facts.settings.get("memory") else code
        fail_or_log_gone(options, start, min(plan.first, plan.to_offset), plan.trimmed, code)


def ranges(
    broker: Broker,
    options: SourceOptions,
    plan: ReadPlan,
    start: int,
    end: int,
    *,
    reached_broker: bool = False,
) -> list[Range]:
    """The ranges that tasks read of a plan, within [start, end).

    They are the plan's splits, cut further where minPartitions or maxRecordsPerPartition ask for
    more. reached_broker: see Range.
    """
    if options.is_alone and len(plan.splits) < options.min_partitions and plan.bytes:
        # By the bytes that may match; the batches that are looked through may have more.
        finer = -(-sum(split.bytes for split in plan.splits) // options.min_partitions)
        plan = ask_plan(broker, options, start, plan.epoch, end=end, split_bytes=finer)
    # (first, end, bytes) of each range. A split without bytes has nothing that may match.
    pieces = [
        (max(split.from_offset, start), min(split.to_offset, end), split.bytes)
        for split in plan.splits
        if split.bytes and split.to_offset > start and split.from_offset < end
    ]
    if options.rows_per_partition:
        pieces = [
            (first, stop, size)
            for begin, after, size in pieces
            for first, stop in _cut_by_records(broker, options, plan.epoch, begin, after)
        ]
    unbroken = plan.unbroken if options.counts_only else []
    # Of a read that only counts, `unbroken` are parts of which every record is selected: their
    # number is known without a read. A range lies in one of them, or outside of all.
    pieces = [
        (first, stop, size)
        for begin, after, size in pieces
        for first, stop in _cut_at(unbroken, begin, after)
    ]
    name, stream = options.stream, plan.stream.hex()
    return [
        Range(
            name,
            stream,
            plan.epoch,
            low,
            high,
            first=plan.first,
            size=size,
            reached_broker=reached_broker,
            counted=any(begin <= low and high <= after for begin, after in unbroken),
        )
        for low, high, size in pieces
    ]


def grouped(parts: list[Range], options: SourceOptions) -> list[InputPartition]:
    """Tasks: the ranges of several streams together up to splitBytes, each range else alone.

    A task costs Spark 15 to 73 ms, far more than a few records of each of 200 streams do. Where a
    row tells how many records a range has, one task has all ranges that the plan has counted.
    """
    counted = [part for part in parts if part.counted] if options.counts_by_range else []
    if counted:
        rest = [part for part in parts if not part.counted]
        return [Ranges(counted), *grouped(rest, options)]
    # One stream has its splits by size already; other options ask for tasks of their own.
    if options.stream or options.rows_per_partition or len(parts) <= options.min_partitions:
        return list(parts)
    groups: list[list[Range]] = []
    left = 0  # bytes for which the last group has room
    for part in parts:
        if groups and part.size <= left:
            groups[-1].append(part)
            left -= part.size
        else:
            groups.append([part])
            left = options.task_bytes - part.size
    if len(groups) < options.min_partitions:  # Together they would be too few tasks.
        return list(parts)
    return [group[0] if len(group) == 1 else Ranges(group) for group in groups]


def stored(parts: list[InputPartition]) -> list[list[list[Any]]]:
    """Tasks as they stand in a checkpoint: of each, [name of the stream, start, end] of its ranges.

    A sink knows rows that come again by their task. Planned anew, a batch may be cut elsewhere:
    its caps are not known any more, other options may hold, and the index has coarser entries.
    """
    return [[[each.name, each.start, each.end] for each in ranges_of(part)] for part in parts]


def restored(
    tasks: list[list[list[Any]]],
    stop: Mapping[str, StreamOffset],
    firsts: Mapping[str, int],
    *,
    reached_broker: bool = False,
) -> list[InputPartition]:
    """Tasks of a batch from a checkpoint, each at its place, by which a sink knows its rows.

    tasks: the ranges of each: stream, first offset, end. stop: position at the end of the batch in
    each stream that is there: ranges of other streams are left out. firsts: offset with which each
    stream begins now. reached_broker: see Range.
    """
    found: list[InputPartition] = []
    for task in tasks:
        ranges = [
            Range(
                name,
                stop[name].stream,
                stop[name].epoch,
                start,
                end,
                first=firsts.get(name, 0),
                reached_broker=reached_broker,
            )
            for name, start, end in task
            if name in stop
        ]
        # A task without ranges stays, so that those after it keep their places.
        found.append(ranges[0] if len(ranges) == 1 else Ranges(ranges))
    return found


def ranges_of(part: InputPartition) -> list[Range]:
    """The ranges of a task, in the order in which it reads them."""
    if isinstance(part, Ranges):
        return part.ranges
    # Where a batch has no task, Spark makes one of its own, without a range.
    return [part] if isinstance(part, Range) else []


def _cut_at(parts: list[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """[start, end) cut at the edges of parts, so that no piece lies half in one of them."""
    edges = {edge for part in parts for edge in part if start < edge < end}
    return pairwise(sorted({start, *edges, end}))


def _cut_by_records(
    broker: Broker, options: SourceOptions, epoch: int, start: int, end: int
) -> Iterator[tuple[int, int]]:
    """[start, end) in pieces of at most rows_per_partition selected records, as the broker counts.

    For option maxRecordsPerPartition. Pieces without any are left out.
    """
    most = options.rows_per_partition
    while start < end:
        plan = ask_plan(broker, options, start, epoch, end=end, records_max=most)
        # A plan that gets no further would be asked for again and again.
        stop = plan.to_offset if start < plan.to_offset else end
        if plan.records:
            yield start, min(stop, end)
        start = stop
