"""`malamute replay`: a range of a stream once more, to the terminal, a file or a stream.

Owns the range, the pace and the destination. The rules: the range is half open and its end is
settled before the first record; a copy keeps subject, fields, times and properties; gaps are
reported; the counts at the end say what was read and what was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import typer

from malamute_protocol.errors import MalamuteError
from malamute_py.cli import complete, output
from malamute_py.cli.commands import say
from malamute_py.cli.failures import INTERRUPTED, USAGE, CommandFailed
from malamute_py.cli.linking import LAST_WAIT_MS, linked
from malamute_py.cli.parameters import BodiesOnly, OneStream, Pattern, RangeFrom, RangeTo, TimesBy
from malamute_py.cli.progress import Progress
from malamute_py.cli.records import RecordWriter
from malamute_py.cli.subscribe import check_kind, known, tell_notice
from malamute_py.cli.values import (
    count_text,
    duration_text,
    is_offset,
    iso_text,
    size_text,
    time_ms,
)
from malamute_py.client.readers import copies

if TYPE_CHECKING:
    from malamute_protocol.batch import Batch, Record
    from malamute_py.client.position import StartPoint
    from malamute_py.client.sync.client import SyncClient, SyncSubscription

EPILOG: Final = """\b
Examples:
  malamute replay orders --from 2026-01-31T10:00 --to now-1h --pace 10x
  malamute replay flights '*.*.*.HNL' --to 2013-07-05 --by client
  malamute replay orders --from 1000 --to 2000 --to-stream orders-again
  malamute replay orders --output orders.jsonl

The range begins with --from and ends before --to; a bare number is an offset. A replay ends
at what was the tail when it began; `malamute sub --start` goes on with what comes."""

_FIRST_MS: Final = -(1 << 62)
_LAST_MS: Final = 1 << 62
"""Times before and after those of all records, for an end of a range that is open."""
_SLEEP_MAX_S: Final = 0.5
"""Longest sleep of a paced replay before it shows how far it is."""
_ARROW_KIND: Final = 2
"""Kind of the body of a batch whose rows are one Arrow table. Source: SPEC.md."""


def replay(
    ctx: typer.Context,
    stream: OneStream,
    pattern: Pattern = "#",
    begin: RangeFrom = None,
    end: RangeTo = None,
    by: TimesBy = "append",
    pace: Annotated[
        str, typer.Option(metavar="PACE", help="flat (out), real, or a factor: 2x, 0.5x.")
    ] = "flat",
    to_stream: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Publish into another stream.",
                     autocompletion=complete.streams),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write a file; .jsonl for JSON lines."),
    ] = None,
    bodies_only: BodiesOnly = False,
    with_fields: Annotated[bool, typer.Option("--fields", help="Fields too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines; counts as JSON.")] = False,
) -> int:  # fmt: skip
    """Replay a range of a stream."""
    if to_stream is not None and output_file is not None:
        raise CommandFailed("--to-stream and --output exclude each other; give one", USAGE)
    if to_stream == stream:
        raise CommandFailed("--to-stream is the stream itself; name another", USAGE)
    check_kind(pattern)
    factor = factor_of(pace)
    asked = StreamRange(begin, end, by == "client")
    with ExitStack() as open_parts:
        client = open_parts.enter_context(linked(ctx, stays=True))
        records = asked.subscribe(client, stream, pattern)
        with records:
            records.accepted()  # What the broker refuses is told before a file is touched.
            sink = _sink(open_parts, client, to_stream, output_file, as_json, bodies_only,
                         with_fields, by == "client")  # fmt: skip
            run = (
                Replay(records, asked.end, sink)
                if factor is None
                else PacedReplay(records, asked.end, sink, factor, by == "client")
            )
            interrupted = False
            shown = to_stream is not None or output_file is not None or not output.on_terminal()
            try:
                try:
                    run.go(f"replaying {stream}", shown)
                except KeyboardInterrupt:
                    interrupted = True
                sink.finish(LAST_WAIT_MS if interrupted else None)
            except (MalamuteError, KeyboardInterrupt):
                say(f"{count_text(sink.safe, 'record')} of {sink.count:,} written for certain")
                raise
        run.tell(
            stream,
            str(to_stream or output_file or ""),
            as_json=as_json and to_stream is not None,
            interrupted=interrupted,
        )
    return INTERRUPTED if interrupted else 0


def factor_of(text: str) -> float | None:
    """Return the factor of the pace; None: as fast as possible. Raises CommandFailed."""
    lowered = text.strip().lower()
    if lowered in ("flat", "flat-out", "max"):
        return None
    if lowered == "real":
        return 1.0
    try:
        factor = float(lowered.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e9:
        raise CommandFailed(f"--pace {text}: write flat, real, or a factor such as 2x", USAGE)
    return factor


class StreamRange:
    """A range of a stream as typed, by offsets or times; it includes its begin and not its end."""

    def __init__(self, begin: str | None, end: str | None, by_client: bool) -> None:
        """Parse both ends; None: it is open. by_client: times are those the producers gave.

        Raises CommandFailed: an end cannot be read, or lies before the begin.
        """
        self.end = 0
        """The offset before which the range ends; known after subscribe()."""
        self._by_client = by_client
        self._from_offset = int(begin) if begin and is_offset(begin) else None
        self._to_offset = int(end) if end and is_offset(end) else None
        self._from_ms = time_ms(begin) if begin and self._from_offset is None else None
        self._to_ms = time_ms(end) if end and self._to_offset is None else None
        for first, last in (
            (self._from_offset, self._to_offset),
            (self._from_ms, self._to_ms),
        ):
            if first is not None and last is not None and last < first:
                raise CommandFailed(f"--to {end} lies before --from {begin}", USAGE)

    def subscribe(self, client: SyncClient, stream: str, pattern: str) -> SyncSubscription:
        """Return a subscription to the range's records that match, and settle the range's end.

        A time of appending has an offset, since these times rise with it. Producers' times do not:
        all records from the start point to the tail are looked at, and the broker selects them.
        """
        from malamute_py.client.position import AtClientTime, AtTime

        tail = known(client, stream).tail
        start: StartPoint = "earliest"
        if self._from_offset is not None:
            start = self._from_offset
        elif self._from_ms is not None:
            start = AtClientTime(self._from_ms) if self._by_client else AtTime(self._from_ms)
        end = tail if self._to_offset is None else min(self._to_offset, tail)
        client_time = None
        if self._by_client and (self._from_ms is not None or self._to_ms is not None):
            client_time = (
                _FIRST_MS if self._from_ms is None else self._from_ms,
                _LAST_MS if self._to_ms is None else self._to_ms,
            )
        elif self._to_ms is not None:
            end = min(client.find_offset(stream, AtTime(self._to_ms)), tail)
        if isinstance(start, int):
            start = min(start, end)  # a range beyond the tail is empty
        self.end = end
        return client.subscribe(
            stream, pattern, start=start, end=end,
            client_time=client_time, create=False, on_notice=tell_notice,
        )  # fmt: skip


class Sink(Protocol):
    """The destination of records."""

    count: int
    bytes: int

    def write(self, batch: Batch) -> None:
        """Write a whole batch."""

    def flush(self) -> None:
        """Make written records visible; called once they are counted."""

    @property
    def safe(self) -> int:
        """Return how many records have arrived, whatever happens next."""

    def finish(self, timeout_ms: int | None) -> None:
        """Wait until everything written has arrived. Raises Timeout: it did not in timeout_ms."""


class RecordSink(Sink, Protocol):
    """A destination that takes a batch in parts, as a pace needs."""

    def write_records(self, records: list[Record]) -> None:
        """Write some records of one batch."""


class Writer(RecordWriter):
    """Writes text to the terminal or a file.

    It flushes when Replay has counted the records, and not before: an interrupt between the two
    would tell of fewer records than can be seen.
    """

    def _written(self) -> None:
        """Leave the flush to flush()."""

    def flush(self) -> None:
        """Hand what was written to the file or pipe."""
        self._out.flush()

    @property
    def safe(self) -> int:
        """Return how many records were written."""
        return self.count

    def finish(self, timeout_ms: int | None) -> None:
        """Do nothing: flushed text has arrived."""


def _sink(
    parts: ExitStack,
    client: SyncClient,
    to_stream: str | None,
    file: Path | None,
    as_json: bool,
    bodies_only: bool,
    with_fields: bool,
    by_client: bool,
) -> RecordSink:
    """Return the place that the records go to: a stream, a file, or the terminal.

    parts: closes the file at the end.
    """
    if to_stream is not None:
        return _ToStream(client, to_stream)
    form: dict[str, Any] = {
        "bodies_only": bodies_only, "with_fields": with_fields, "client_time": by_client,
    }  # fmt: skip
    if file is None:
        return Writer(as_json=as_json, **form)
    out = parts.enter_context(file.open("wb"))
    as_json = as_json or file.suffix in (".jsonl", ".ndjson", ".json")
    return Writer(as_json=as_json, out=out, **form)


class _ToStream:
    """Publishes copies into another stream."""

    def __init__(self, client: SyncClient, stream: str) -> None:
        self.count = 0
        self.bytes = 0
        # keep=False: confirms are counted, and not collected.
        self._window = client.publisher(stream, keep=False)

    def write(self, batch: Batch) -> None:
        """Publish copies of a batch's delivered records."""
        if batch.content.head.body_kind == _ARROW_KIND:
            self._write_arrow(batch)  # A table is copied as it is.
        else:
            self.write_records(list(batch.records()))

    def write_records(self, records: list[Record]) -> None:
        """Publish copies of some records of one batch."""
        from malamute_protocol.encode import encode_lists

        bodies: list[Any] = [copies.blobs(record) for record in records]
        subjects = [copies.keys(record) for record in records]
        columns = copies.columns(records)
        if bodies[0] is None:  # a row of a table has no blob
            raise CommandFailed(
                "a stream of Arrow tables is replayed batch by batch: leave out --pace", USAGE
            )
        if isinstance(bodies[0], list):  # All bodies of a batch are of one kind.
            self.bytes += sum(len(part) for parts in bodies for part in parts)
            self._window.publish_batch(encode_lists(bodies, subject=subjects, **columns))
        else:
            self.bytes += sum(map(len, bodies))
            self._window.publish_many(bodies, subjects=subjects, **columns)
        self.count += len(records)

    def _write_arrow(self, batch: Batch) -> None:
        """Publish a copy of a batch whose rows are an Arrow table, whole.

        Raises CommandFailed: a pattern selected some rows only.
        """
        from malamute_protocol.encode import encode_arrow

        if batch.indices is not None:  # Places of the rows that were selected; None: all.
            raise CommandFailed(
                "a pattern selects some rows of an Arrow batch, which is copied whole or not at"
                " all: replay it without a pattern",
                USAGE,
            )
        records = list(batch.records())
        message = bytes(batch.content.bodies().blob)
        self._window.publish_batch(
            encode_arrow(
                message, len(records), schema_id=batch.content.head.schema_id,
                subject=[copies.keys(record) for record in records], **copies.columns(records),
            )
        )  # fmt: skip
        self.count += len(records)
        self.bytes += len(message)

    def flush(self) -> None:
        """Do nothing: no record is held back."""

    @property
    def safe(self) -> int:
        """Return how many records the broker has confirmed."""
        return self._window.confirmed

    def finish(self, timeout_ms: int | None) -> None:
        """Wait until all records are confirmed. Raises Timeout."""
        self._window.wait(timeout_ms)


class Replay:
    """One replay, as fast as possible."""

    def __init__(self, records: SyncSubscription, end: int, sink: Sink) -> None:
        position = records.position
        self._end = end
        self._records = records
        self._sink = sink
        self._first = self.next = position.next if position is not None else 0
        """The first offset that was neither written nor passed over."""
        self._began = time.monotonic()
        self._seen: list[int] = []
        """First and last offset that was written; empty: none was."""

    def go(self, title: str, shown: bool) -> None:
        """Read to the end of the range, and write what is read.

        shown: False where the progress line would stand between the records. After an exception,
        next and the sink's counts say how far it came.
        """
        # The broker also tells how far it looked without a match, so that the progress is that
        # through the range, also where matches are rare.
        total = max(0, self._end - self._first)
        with Progress(title, total=total, shown=shown) as progress:

            def report() -> None:
                progress.update(self.next - self._first, self._detail())

            while (batch := self._records.next_batch()) is not None:
                self._write(batch, report)
                self._pass_over()
                report()
            self._pass_over()

    def _write(self, batch: Batch, report: Callable[[], None]) -> None:
        """Write one batch. report: to be called after each wait."""
        self._sink.write(batch)
        self._written(int(batch.offsets[0]), int(batch.offsets[-1]))

    def _written(self, first: int, last: int) -> None:
        """Note the first and last offset that were just written, and have the sink show them."""
        if not self._seen:
            self._seen = [first, last]
        self._seen[1] = last
        self.next = last + 1
        self._sink.flush()

    def _pass_over(self) -> None:
        """Set next to the reader's position: what lies before was written, or did not match.

        Called after each batch that was written, and at the end; not when the replay was
        interrupted, for the batch in hand is not written then.
        """
        position = self._records.position
        if position is not None:
            self.next = position.next

    def _detail(self) -> str:
        """Return how much was written and how fast, for the progress line."""
        spent = time.monotonic() - self._began
        rate = self._sink.count / spent if spent > 0 else 0.0
        return f"{self._sink.count:,} records, {rate:,.0f}/s"

    def tell(self, stream: str, target: str, *, as_json: bool, interrupted: bool) -> None:
        """Print the counts at the end: as JSON, or a line on standard error."""
        spent_ms = round((time.monotonic() - self._began) * 1000)
        sink = self._sink
        covered = max(0, self.next - self._first)
        if as_json:
            output.print_json(
                {
                    "stream": stream, "to": target, "records": sink.count, "bytes": sink.bytes,
                    "from": self._first, "next": self.next, "covered": covered,
                    "duration_ms": spent_ms, "at": iso_text(round(time.time() * 1000)),
                },
                compact=True,
            )  # fmt: skip
            return
        place = f" (offsets {self._seen[0]} to {self._seen[1]})" if self._seen else ""
        arrow = f" to {target}" if target else ""
        stopped = f"; stopped before offset {self.next}" if interrupted else ""
        say(
            f"{count_text(sink.count, 'record')} of {covered:,} in the range{place}{arrow},"
            f" {size_text(sink.bytes)} in {duration_text(spent_ms)}{stopped}"
        )


class PacedReplay(Replay):
    """A replay at a factor of the pace at which the records came."""

    def __init__(
        self,
        records: SyncSubscription,
        end: int,
        sink: RecordSink,
        factor: float,
        by_client: bool,
    ) -> None:
        super().__init__(records, end, sink)
        self._parts = sink  # The same sink, whose type says that it takes parts of a batch.
        self._factor = factor
        self._by_client = by_client
        self._origin: tuple[int, float] | None = None
        """Time of the first record in ms, and when it was written by this process's clock."""

    def _write(self, batch: Batch, report: Callable[[], None]) -> None:
        """Write one batch in groups of records, each when it is due."""
        for ready in self._paced(batch, report):
            self._parts.write_records(ready)
            self._written(ready[0].offset, ready[-1].offset)
            report()

    def _paced(self, batch: Batch, report: Callable[[], None]) -> Iterator[list[Record]]:
        """Yield the batch's records in groups that are due together, each when it is due.

        A record is due when as much time has passed since the first one as between their times,
        divided by the factor. One without a time goes with those before it.
        """
        ready: list[Record] = []
        for record in batch.records():
            at_ms = record.client_time_ms if self._by_client else record.append_time_ms
            if at_ms is not None:
                now = time.monotonic()
                if self._origin is None:
                    self._origin = (at_ms, now)
                first_ms, began = self._origin
                due = began + (at_ms - first_ms) / 1000 / self._factor
                if due > now:
                    if ready:  # Before the wait for this record.
                        yield ready
                        ready = []
                    while (left := due - time.monotonic()) > 0:
                        time.sleep(min(left, _SLEEP_MAX_S))
                        report()
            ready.append(record)
        if ready:
            yield ready

    def tell(self, stream: str, target: str, *, as_json: bool, interrupted: bool) -> None:
        """Print the counts at the end, and say when no record had a time to be paced by."""
        if not as_json and self._by_client and self._origin is None and self._sink.count:
            say("none of them has a client time, so it went flat out; leave out --by client")
        super().tell(stream, target, as_json=as_json, interrupted=interrupted)
