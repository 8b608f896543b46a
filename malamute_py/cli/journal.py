"""`malamute journal ...`: look into the files of a broker.

Owns the words for findings and the exit codes: 1 when anything is damaged. The rules:
nothing is changed; a directory that a broker has open is refused politely, since what is
looked into would change meanwhile, by all but `read`, which is made for that. Source:
FORMAT.md, sections 8 and 10.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_py.cli import output
from malamute_py.cli.commands import group, say
from malamute_py.cli.failures import FAILED, INTERRUPTED, LOST, USAGE, CommandFailed
from malamute_py.cli.linking import uninterrupted
from malamute_py.cli.output import Cell, Column
from malamute_py.cli.parameters import Pattern
from malamute_py.cli.progress import Progress
from malamute_py.cli.records import RecordWriter, as_object, body_of
from malamute_py.cli.subscribe import check_kind, start_point, tell_notice
from malamute_py.cli.typed import as_json
from malamute_py.cli.values import (
    count_text,
    duration_ms,
    is_offset,
    iso_text,
    size_text,
    time_ms,
    time_text,
)

if TYPE_CHECKING:
    from malamute_protocol.batch import Batch
    from malamute_py.changelog.settings import StreamSettings
    from malamute_py.client.session.subscription import Notice
    from malamute_py.journal.inspect import Dumped, RingStat

app = group("journal")

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The broker's data directory.", show_default=False)
]
_BAD: Final = frozenset({"damaged", "missing", "unknown", "restorable"})
"""Kinds of findings that end `verify` with exit code 1."""
_STYLES: Final = {
    "ok": "green", "damaged": "bold red", "missing": "bold red", "unknown": "red",
    "restorable": "yellow", "dropped": "yellow", "index": "yellow",
}  # fmt: skip


def _check_stopped(directory: Path) -> None:
    """Raise CommandFailed unless it is the data directory of a broker that does not run."""
    from malamute_py.journal.directory import IDENTITY_FILE, RINGS
    from malamute_py.journal.inspect import in_use
    from malamute_py.journal.storage import FileStorage

    if not directory.is_dir():
        raise CommandFailed(f"{directory}: there is no such directory; name a broker's --data")
    from malamute_py.journal.directory import EPOCH_FILE

    # Any of them is enough: a damaged directory may lack the others.
    ours = [IDENTITY_FILE, EPOCH_FILE, RINGS]
    if not any((directory / name).exists() for name in ours):
        raise CommandFailed(f"{directory}: holds no journal; name the directory of --data")
    if in_use(FileStorage(directory, read_only=True)):
        raise CommandFailed(
            f"{directory}: a broker has it open; stop the broker first, or ask it:"
            " `malamute stream ls`, `malamute stream peek NAME`; `malamute journal read` reads"
            " records beside it"
        )


# --- stat ----------------------------------------------------------------------------------


@app.command(
    "stat",
    epilog="""\b
Examples:
  malamute journal stat malamute-data""",
)
def stat(directory: Directory, as_json: output.Json = False) -> int:
    """Show what a data directory holds, by ring and stream."""
    from malamute_py.journal.inspect import stat as read

    _check_stopped(directory)
    found = read(directory)
    names = stream_names(directory)
    if as_json:
        import msgspec

        table = msgspec.to_builtins(found, str_keys=True)
        for ring in table["rings"]:
            for facts in ring["streams"].values():
                for key in ("first_time_ms", "last_time_ms"):
                    # The journal has 0 where a stream has no record, which is also a time.
                    facts[key] = facts[key] or None
        table["stream_names"] = {str(number): name for number, name in names.items()}
        output.print_json(table)
    else:
        _stat(found.rings, names, {
            "directory": found.directory, "uuid": found.uuid, "epoch": found.epoch,
            "openings": found.openings, "unknown files": list(found.unknown),
        })  # fmt: skip
    damaged = sum(ring.damages for ring in found.rings)
    if damaged or found.unknown:
        say(f"something is wrong; see: malamute journal verify {directory}")
        return FAILED
    return 0


def _stat(rings: tuple[RingStat, ...], names: dict[int, str], facts: dict[str, Any]) -> None:
    """Print the rings of a data directory and the streams in them."""
    if output.on_terminal():
        output.facts(facts, as_json=False)
    output.listing(
        [
            Column("ring", "Ring", style="cyan"),
            Column("segments", "Segments", right=True),
            Column("bytes", "On disk", right=True),
            Column("start", "From position", right=True, spare=True),
            Column("end", "To position", right=True),
            Column("epoch", "Epoch", right=True, spare=True),
            Column("clean", "Closed"),
            Column("damages", "Damaged", right=True),
            Column("dropped", "Dropped", right=True),
        ],
        [
            (
                ring.name, ring.segments, Cell(ring.bytes_on_disk, size_text(ring.bytes_on_disk)),
                Cell(ring.start_lsn, count_text(ring.start_lsn)),
                Cell(ring.end_lsn, count_text(ring.end_lsn)), ring.epoch,
                Cell(ring.clean, "in order" if ring.clean else "by a crash",
                     "" if ring.clean else "yellow"),
                Cell(ring.damages, str(ring.damages), "bold red" if ring.damages else ""),
                Cell(ring.dropped, str(ring.dropped), "yellow" if ring.dropped else ""),
            )
            for ring in rings
        ],
        as_json=False,
        empty="no rings",
        mark="ring",
    )  # fmt: skip
    output.listing(
        [
            Column("ring", "Ring", style="cyan", spare=True),
            Column("number", "Number", right=True, spare=True),
            Column("stream", "Stream", style="cyan"),
            Column("records", "Records", right=True),
            Column("first", "First", right=True, spare=True),
            Column("next", "Next", right=True),
            Column("bytes", "Bytes", right=True),
            Column("first_time", "Oldest", whole=True, spare=True),
            Column("last_time", "Newest", whole=True),
        ],
        [
            (
                ring.name, number, names.get(number, ""),
                Cell(facts.next - facts.first, count_text(facts.next - facts.first)),
                Cell(facts.first, count_text(facts.first)),
                Cell(facts.next, count_text(facts.next)),
                Cell(facts.bytes, size_text(facts.bytes)),
                _time(facts.first_time_ms), _time(facts.last_time_ms),
            )
            for ring in rings
            for number, facts in sorted(ring.streams.items())
            if number
        ],
        as_json=False,
        empty="no streams",
        mark="stream",
    )  # fmt: skip


def _time(at_ms: int) -> Cell:
    """Return the append time of a record; at_ms 0: there is none."""
    return Cell(iso_text(at_ms) if at_ms else None, time_text(at_ms)[:19])


def stream_names(directory: Path) -> dict[int, str]:
    """Return names by number, from the change log in ring main; damaged records are left out."""
    return {number: name for number, (name, _) in _names_and_settings(directory).items()}


def _names_and_settings(directory: Path) -> dict[int, tuple[str, StreamSettings]]:
    """Return name and newest settings by stream number, from the change log in ring main.

    Its records are read from old to new: a snapshot has all streams of its time, then changes come.
    Damaged ones are left out, so that records can be told by name even of a damaged log.
    """
    import msgspec

    from malamute_protocol.errors import BatchError
    from malamute_py.changelog.records import StreamCreated, StreamEdited, decode_change
    from malamute_py.changelog.snapshots import decode_snapshot
    from malamute_py.journal import JournalError
    from malamute_py.journal.inspect import dump as read
    from malamute_py.journal.layout import control_bodies

    found: dict[int, tuple[str, StreamSettings]] = {}
    try:
        for dumped in read(directory, "main"):
            if dumped.kind not in ("change", "snapshot") or dumped.stamp is None:
                continue
            try:
                bodies = control_bodies(dumped.content)
                if dumped.kind == "snapshot":
                    # The first body is the journal's own record, and the snapshot follows.
                    rows = decode_snapshot(bodies[1:]).tables.streams
                    found |= {number: (row.name, row.settings) for number, row in rows.items()}
                    continue
                for change in map(decode_change, bodies):
                    if isinstance(change, StreamCreated):
                        found[change.number] = change.name, change.settings
                    elif isinstance(change, StreamEdited) and change.number in found:
                        name, _ = found[change.number]
                        found[change.number] = name, change.settings
            except (BatchError, msgspec.MsgspecError, TypeError):
                continue
    except (JournalError, OSError):
        return found
    return found


# --- verify --------------------------------------------------------------------------------


@app.command(
    "verify",
    epilog="""\b
Examples:
  malamute journal verify malamute-data
  malamute journal verify malamute-data --ring main --json""",
)
def verify(
    directory: Directory,
    ring: Annotated[str | None, typer.Option(metavar="NAME", help="One ring only.")] = None,
    as_json: output.Json = False,
) -> int:
    """Read every batch again and say what is missing or damaged.

    Exit codes: 0 all is well; 1 something is missing, damaged or not ours.
    """
    from malamute_py.journal.inspect import verify as verify_rings
    from malamute_py.store.checking import findings as findings_of_tables

    _check_stopped(directory)
    found = []
    # verify_rings() yields how far it is between its findings.
    with Progress("verifying", total=1) as progress:
        for finding in verify_rings(directory, ring):
            if finding.kind == "progress":
                progress.title(f"verifying {finding.ring}")
                progress.update(
                    finding.done, f"{finding.done} of {finding.total} segments",
                    total=finding.total,
                )  # fmt: skip
            else:
                found.append(finding)
        if ring is None:  # The tables of the checkpoint belong to no ring.
            found += findings_of_tables(directory)
    if ring is not None and not any(finding.ring == ring for finding in found):
        raise CommandFailed(
            f"{directory}: there is no ring {ring}; see: malamute journal stat", FAILED
        )
    bad = [finding for finding in found if finding.kind in _BAD]
    output.listing(
        [Column("ring", "Ring", style="cyan"), Column("kind", "Finding"), Column("message", "")],
        [
            (
                Cell(finding.ring, finding.ring or "-"),
                Cell(finding.kind, finding.kind, _STYLES.get(finding.kind, "")),
                finding.message,
            )
            for finding in found
        ],
        as_json=as_json,
        empty="nothing to verify: no rings",
    )
    if bad:
        say(
            f"{directory}: {count_text(len(bad), 'finding')} of damage; whatever else is there can"
            " still be read: `malamute journal repair DIR NEW` makes a sound copy of it, and"
            " `malamute journal dump` prints records"
        )
        return FAILED
    return 0


# --- repair ----------------------------------------------------------------------------------


@app.command(
    "repair",
    epilog="""\b
Examples:
  malamute journal repair malamute-data repaired
  malamute broker --data repaired               unless the exit code was 1
  malamute journal repair malamute-data repaired --json | jq .lost""",
)
def repair(
    directory: Directory,
    target: Annotated[
        Path, typer.Argument(metavar="NEW", help="The directory to be made.", show_default=False)
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Losses as JSON; the default in a pipe.")
    ] = False,
) -> int:
    """Make a sound copy of a damaged data directory.

    The copy has all that can be read.
    Exit codes: 0 nothing was lost; 5 records were lost, and are told by stream and offsets;
    1 nothing could be made.
    """
    from malamute_py.store.mending import mend

    _check_stopped(directory)
    with Progress("repairing") as progress:
        mended = mend(directory, target, progress=progress.bytes)
    names = stream_names(target)  # Of the copy, which has no damage.
    lost = [
        {
            "ring": each.ring, "stream": names.get(each.stream, str(each.stream)),
            "from": each.from_offset, "to": each.to_offset, "exact": each.exact,
        }
        for each in mended.lost
    ]  # fmt: skip
    if as_json or not output.on_terminal():
        import msgspec

        output.print_json({**msgspec.to_builtins(mended), "lost": lost, "whole": mended.whole})
    else:
        output.facts(
            {
                "directory": str(target), "epoch": mended.epoch, "rings": mended.rings,
                "bytes": mended.bytes, "batches": mended.batches,
                "filled_bytes": mended.filled_bytes, "changes_lost": mended.changes_lost,
                "queues": mended.queues, "queues_lost": mended.queues_lost,
                "restored": mended.restored,
            },
            as_json=False,
        )  # fmt: skip
        output.listing(
            [
                Column("ring", "Ring", style="cyan"), Column("stream", "Stream", style="cyan"),
                Column("from", "Lost from", right=True), Column("to", "to", right=True),
            ],
            [
                (
                    each["ring"], each["stream"], each["from"],
                    Cell(each["to"], str(each["to"]) if each["exact"] else "an unknown offset"),
                )
                for each in lost
            ],
            as_json=False,
            empty="no records of streams were lost",
        )  # fmt: skip
    if not mended.whole:  # Something that the broker had is not in the copy.
        say(f"{target} is sound, and lacks what is told above; start it with malamute broker")
        return LOST
    return 0


# --- read ----------------------------------------------------------------------------------


@app.command(
    "read",
    epilog="""\b
Examples:
  malamute journal read malamute-data orders > bodies.txt
  malamute journal read malamute-data orders 'eu.*' --start now-1h --json
  malamute journal read malamute-data orders --start latest --follow""",
)
def read(
    directory: Directory,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream.")],
    pattern: Pattern = "#",
    start: Annotated[
        str,
        typer.Option(
            metavar="POINT",
            help="earliest, latest, an OFFSET, message ID or TIME; after:ID leaves it out.",
        ),
    ] = "earliest",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")
    ] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="End after so many records.")
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option("--timeout", metavar="DURATION", help="End when none comes for so long."),
    ] = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="Only what no power loss can take back.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="End at a gap (exit code 1).")] = False,
    bodies_only: Annotated[
        bool, typer.Option("--bodies-only", help="Only bodies, on a terminal too.")
    ] = False,
    with_fields: Annotated[
        bool, typer.Option("--fields", help="Fields too; in a pipe: subject, fields, body.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> int:
    """Print records of a stream from the files, of a running broker too; it is not asked.

    Exit codes: 0 everything was read; 1 something is damaged, said on standard error.
    """
    from malamute_py.client.session.subscription import GapNotice, cut
    from malamute_py.journal import open_reader

    check_kind(pattern)
    timeout_ms = None if wait is None else duration_ms(wait)
    writer = RecordWriter(as_json=as_json, bodies_only=bodies_only, with_fields=with_fields)
    damaged = False

    def tell(notice: Notice) -> None:
        """Print a notice, and remember damage for the exit code."""
        nonlocal damaged
        damaged |= isinstance(notice, GapNotice) and notice.code == "damaged"
        tell_notice(notice)

    with open_reader(directory) as log:
        reading = log.read(
            stream, pattern, start=start_point(start), until="" if follow else "tail",
            visibility="durable" if durable else "live", copy=True, strict=strict, on_notice=tell,
        )  # fmt: skip
        try:
            while count is None or writer.count < count:
                batch = reading.next_batch(timeout_ms)
                if batch is None:
                    break
                left = len(batch) if count is None else min(len(batch), count - writer.count)
                with uninterrupted():  # Ctrl-C waits, so that no line is half written.
                    writer.write(batch if left == len(batch) else cut(batch, 0, left))
        except KeyboardInterrupt:
            return INTERRUPTED
    return FAILED if damaged else 0


# --- dump ----------------------------------------------------------------------------------


@app.command(
    "dump",
    epilog="""\b
Examples:
  malamute journal dump malamute-data --stream orders > orders.jsonl
  malamute journal dump malamute-data --stream orders --bodies-only
  malamute journal dump malamute-data --batches --from 0 --to 1000000""",
)
def dump(
    directory: Directory,
    ring: Annotated[str | None, typer.Option(metavar="NAME", help="One ring only.")] = None,
    stream: Annotated[
        str | None, typer.Option(metavar="NAME|NUMBER", help="Records of one stream only.")
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="OFFSET|TIME", help="First; with --batches a position."),
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="OFFSET|TIME", help="End, not included.")
    ] = None,
    batches: Annotated[
        bool, typer.Option("--batches", help="A line a batch, control batches too, no bodies.")
    ] = False,
    bodies_only: Annotated[bool, typer.Option("--bodies-only", help="Only bodies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines; the default.")] = False,
) -> int:
    """Print the records in the files as JSON lines, or bodies.

    Exit codes: 0 everything was read; 1 something is missing or damaged, said on standard error.
    """
    from malamute_py.journal.inspect import all_names
    from malamute_py.journal.storage import FileStorage

    if bodies_only and (as_json or batches):
        raise CommandFailed("--bodies-only goes with neither --json nor --batches", USAGE)
    if not batches and stream is None and any(map(_given_as_offset, (begin, end))):
        raise CommandFailed("offsets count within one stream: name it with --stream", USAGE)
    _check_stopped(directory)
    rings = all_names(FileStorage(directory, read_only=True))
    if ring is not None and ring not in rings:
        raise CommandFailed(
            f"{directory}: there is no ring {ring}; there are: {', '.join(rings) or 'none'}"
        )
    chosen = [ring] if ring is not None else rings
    if batches:
        return _dump_batches(directory, chosen, begin, end)
    return _dump_records(directory, chosen, stream, begin, end, bodies_only)


def _given_as_offset(text: str | None) -> bool:
    return text is not None and is_offset(text)


def _dump_batches(directory: Path, rings: list[str], begin: str | None, end: str | None) -> int:
    """Print the batches of rings between two positions, a JSON line each; the exit code."""
    from malamute_py.journal.inspect import dump as read

    if not all(text is None or is_offset(text) for text in (begin, end)):
        raise CommandFailed("--batches takes positions, in bytes, for --from and --to", USAGE)
    faults = 0
    for ring in rings:
        for dumped in read(directory, ring, int(begin or 0), int(end) if end else None):
            faults += bool(dumped.fault)
            stamp = dumped.stamp
            line: dict[str, Any] = {
                "ring": ring, "position": dumped.lsn, "size": dumped.size, "kind": dumped.kind,
            }  # fmt: skip
            if dumped.fault:
                line["fault"] = dumped.fault
            if stamp is not None:
                line |= {
                    "stream": stamp.stream, "offset": stamp.base_offset, "count": stamp.count,
                    "epoch": stamp.epoch, "time": iso_text(stamp.append_time_ms),
                    "bundle": stamp.bundle_lsn, "synced": stamp.synced_lsn,
                }  # fmt: skip
            output.print_json(line, compact=True)
    return _tell_faults(directory, faults)


def _dump_records(
    directory: Path,
    rings: list[str],
    stream: str | None,
    begin: str | None,
    end: str | None,
    bodies_only: bool,
) -> int:
    """Print the records of rings, of one stream or all, as JSON lines or bodies; the exit code.

    begin, end: offsets or times, as typed. Damaged places are told and skipped; they make the exit
    code 1.
    """
    from malamute_protocol.schema import Schemas
    from malamute_py.changelog.settings import versions
    from malamute_py.journal.inspect import dump as read

    streams = _names_and_settings(directory)
    names = {number: name for number, (name, _) in streams.items()}
    schemas = {
        number: Schemas(versions(settings).items())
        for number, (_, settings) in streams.items()
        if settings.schema
    }
    number = None if stream is None else _number(stream, names)
    within = _FileRange(begin, end)
    faults = 0
    out = sys.stdout.buffer
    for ring in rings:
        for dumped in read(directory, ring):
            if dumped.fault:
                faults += 1
                say(f"{ring} at position {dumped.lsn}: {dumped.fault}; {dumped.size} bytes skipped")
                continue
            for batch in _data_batch(dumped, number):  # One or none.
                name = names.get(batch.stamp.stream, str(batch.stamp.stream))
                # Rows of a typed stream are printed by the schema that they were written with.
                batch.schemas = schemas.get(batch.stamp.stream)
                lines = []
                for record in batch.records():
                    if not within.has(record.offset, record.append_time_ms):
                        continue
                    if bodies_only:
                        lines.append(body_of(record))
                    else:
                        lines.append(as_json({"stream": name, **as_object(record)}))
                if lines:
                    out.write(b"\n".join(lines) + b"\n")
    out.flush()
    return _tell_faults(directory, faults)


def _data_batch(dumped: Dumped, number: int | None) -> Iterator[Batch]:
    """Yield the batch, if it has records of the stream; nothing otherwise.

    number: of the stream; None: any.
    """
    from malamute_protocol.batch import Batch
    from malamute_protocol.content import Content

    stamp = dumped.stamp
    if dumped.kind == "data" and stamp is not None and number in (None, stamp.stream):
        yield Batch(stamp, Content(dumped.content))


class _FileRange:
    """A range of offsets and times as typed, read once: `now` is one moment for all records."""

    def __init__(self, begin: str | None, end: str | None) -> None:
        """Parse both ends. Raises CommandFailed."""
        self._first_offset, self._first_ms = _limit(begin, -math.inf)
        self._end_offset, self._end_ms = _limit(end, math.inf)

    def has(self, offset: int, at_ms: int) -> bool:
        """Whether a record lies in the range."""
        return (
            self._first_offset <= offset < self._end_offset
            and self._first_ms <= at_ms < self._end_ms
        )


def _limit(text: str | None, none: float) -> tuple[float, float]:
    """Return one end of a range as an offset and a time.

    none: stands for the one that was not given: an infinity, which bounds nothing.
    """
    if text is None:
        return none, none
    return (int(text), none) if is_offset(text) else (none, time_ms(text))


def _number(stream: str, names: dict[int, str]) -> int:
    """Return the number of a stream that is given by name or number. Raises CommandFailed."""
    for number, name in names.items():
        if name == stream:
            return number
    if stream.isascii() and stream.isdigit():
        return int(stream)
    known = ", ".join(sorted(names.values())[:10]) or "none"
    raise CommandFailed(f"there is no stream {stream} in the files; there are: {known}")


def _tell_faults(directory: Path, faults: int) -> int:
    """Tell how many places are damaged, if any are; return the exit code."""
    if faults:
        say(f"{directory}: {count_text(faults, 'damaged place')}")
        return FAILED
    return 0
