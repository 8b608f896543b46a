"""`malamute sub`: records as they come, or from any point on.

Owns the words for start points and for notices to a reader. The rules: gaps and rewinds are
reported on standard error, never silently passed over; a cursor is moved, and a group's record
acknowledged, only after it was printed; Ctrl-C ends in order and says where to go on.
"""

from __future__ import annotations

import re
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from malamute_protocol.errors import BrokerRefused, Timeout
from malamute_py.cli import complete, output
from malamute_py.cli.absent import absent, nearest
from malamute_py.cli.commands import say
from malamute_py.cli.failures import INTERRUPTED, USAGE, CommandFailed
from malamute_py.cli.linking import LAST_WAIT_MS, linked, uninterrupted
from malamute_py.cli.parameters import BodiesOnly, OneStream, Pattern, Tracing
from malamute_py.cli.records import RecordWriter
from malamute_py.cli.values import TIMES, count_text, duration_ms, is_offset, time_ms

if TYPE_CHECKING:
    from malamute_protocol.batch import Batch
    from malamute_py.client.facts import StreamFacts
    from malamute_py.client.position import Position, StartPoint
    from malamute_py.client.session.subscription import Notice
    from malamute_py.client.sync.client import SyncClient, SyncSubscription
    from malamute_py.client.words import GroupKind

EPILOG: Final = """\b
Examples:
  malamute sub orders                              what comes from now on
  malamute sub orders 'orders.*.eu' --start earliest
  malamute sub orders fields:region=eu --start now-1h --json
  malamute sub orders --until-tail > bodies.txt    all there is, then end
  malamute sub orders --cursor billing             go on where it stands
  malamute sub orders --group packers              each record to one member

Patterns: a.*.# (parts), prefix:a., regex:^a.+, fields:k=v,l (all), any:k=v,l (one), #."""

_MOVE_EVERY_S: Final = 1.0
"""Least time between two moves of a cursor while records come; a pause also brings a move."""
_IDLE_MS: Final = 100
"""Silence after which a cursor is moved at once."""
_MEMBER_CREDIT: Final = 1024
"""Records that a member of a group may hold, at most."""
_CREDIT: Final = 1 << 17
"""Records that the broker may send ahead; no more than are asked for."""
_MESSAGE_ID: Final = re.compile("[0-9a-fA-F]{32}")
_BEGINNINGS: Final = (0, 1)
"""Offsets at which a stream begins: 1 with the setting `keep`."""
_KINDS: Final = ("prefix", "regex", "fields", "any")


def sub(
    ctx: typer.Context,
    stream: OneStream,
    pattern: Pattern = "#",
    start: Annotated[
        str | None,
        typer.Option(
            metavar="POINT",
            help="earliest, latest, last (newest of each subject), an OFFSET, ID or TIME; after:ID"
            " leaves it out. Default: latest; earliest with --until-tail, a new cursor or group.",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="End after so many records.")
    ] = None,
    until_tail: Annotated[
        bool, typer.Option("--until-tail", help="End at what is the tail now.")
    ] = False,
    wait: Annotated[
        str | None,
        typer.Option("--timeout", metavar="DURATION", help="End when none comes for so long."),
    ] = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="Only records that no power loss can take back.")
    ] = False,
    cursor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Go on where this cursor stands, and move it.",
            autocompletion=complete.cursors,
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Share the stream with the members of this group.",
            autocompletion=complete.groups,
        ),
    ] = None,
    kind: Annotated[
        Literal["shared", "keyed", "exclusive"],
        typer.Option(metavar="KIND", help="Kind of the group: shared, keyed, exclusive."),
    ] = "shared",
    strict: Annotated[bool, typer.Option("--strict", help="End at a gap (exit code 1).")] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Make the stream when there is none.")
    ] = False,
    bodies_only: BodiesOnly = False,
    with_fields: Annotated[
        bool, typer.Option("--fields", help="Fields too; in a pipe: subject, fields, body.")
    ] = False,
    tracing: Tracing = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> int:
    """Subscribe to a stream and print its records."""
    check_kind(pattern)
    point = start or (
        "latest" if cursor is None and group is None and not until_tail else "earliest"
    )
    begin = start_point(point)
    timeout_ms = None if wait is None else duration_ms(wait)
    if cursor is not None and group is not None:
        raise CommandFailed("--cursor and --group exclude each other; a group has its own", USAGE)
    if group is not None and (until_tail or durable):
        raise CommandFailed("--until-tail and --durable do not go with --group", USAGE)
    writer = RecordWriter(as_json=as_json, bodies_only=bodies_only, with_fields=with_fields)
    with linked(ctx, stays=True, traces=True) as client:
        if not create:
            known(client, stream)
        # A group, a cursor or neither: three readers, which learn in their way what was printed.
        reader: _Reader
        if group is not None:
            reader = _Member(client, stream, group, kind, pattern, begin, strict, count, create)
        else:
            stands = None if cursor is None else cursor_stands(client, stream, cursor)
            records = client.subscribe(
                stream, pattern,
                start=begin if cursor is None else from_cursor(cursor, begin),
                visibility="durable" if durable else "live",
                until="tail" if until_tail else "",
                create=create, strict=strict, on_notice=tell_notice,
                credit_records=min(count or _CREDIT, _CREDIT),
            )  # fmt: skip
            reader = (
                _Plain(records)
                if cursor is None
                else _WithCursor(client, stream, cursor, stands, records)
            )
        with reader:
            # Whether all records that the reader handed over were printed: the cursor then also
            # goes past those after them that the pattern left out.
            whole = False
            try:
                try:
                    reader.accepted()
                    if output.on_terminal() and not reader.ended and not until_tail:
                        say(f"{stream}: listening{reader.how}; end with Ctrl-C")
                    whole = _print(reader, writer, count, timeout_ms)
                finally:
                    # Also when the program that reads our output went away: records that were
                    # printed are not to come again.
                    reader.printed_all(whole)
            except KeyboardInterrupt:
                if output.on_terminal():
                    say(f"{count_text(writer.count, 'record')}{reader.go_on()}")
                return INTERRUPTED
            except Timeout:
                raise Timeout(f"{stream}: no record came within {wait}") from None
    return 0


def from_cursor(name: str, otherwise: StartPoint) -> StartPoint:
    """Return the start point where a cursor stands. otherwise: that of a new cursor.

    Raises CommandFailed: `otherwise` is no one place.
    """
    from malamute_py.client.position import FromCursor, LastPerSubject

    if isinstance(otherwise, LastPerSubject):
        raise CommandFailed("--start last does not go with --cursor: it is no one place", USAGE)
    return FromCursor(name, otherwise)  # type: ignore[arg-type]  # what is left is one place


def cursor_stands(client: SyncClient, stream: str, name: str) -> int | None:
    """Return where a cursor stands, to compare at its move; None: there is no such cursor yet."""
    try:
        return client.cursor(stream, name).info().next
    except BrokerRefused as error:
        if error.code not in ("unknown_cursor", "unknown_stream"):
            raise
        return None


class _Reader(AbstractContextManager[Any]):
    """A source of records to print, which learns which of them were printed."""

    how = ""
    """Words for the line `listening`: by what the broker knows where this reader is."""

    def __init__(self, records: Any) -> None:
        self._records = records

    def __exit__(self, *error: Any) -> None:
        self._records.close()

    @property
    def ended(self) -> bool:
        """Whether no record will arrive any more."""
        ended: bool = self._records.ended
        return ended

    def accepted(self) -> None:
        """Wait until the broker accepted."""
        self._records.accepted()

    def next(self, timeout_ms: int | None) -> Batch | None:
        """Return the next records; None at the end. Raises Timeout."""
        batch: Batch | None = self._records.next_batch(timeout_ms)
        return batch

    def printed(self, batch: Batch, count: int) -> None:
        """Note that the first so many records of a batch were printed and flushed."""

    def printed_all(self, whole: bool) -> None:
        """Note that no more is printed. whole: everything handed over was printed."""

    def go_on(self) -> str:
        """Return the words of how a person goes on after Ctrl-C; empty: there is nothing to say."""
        return ""


class _Plain(_Reader):
    """A subscription: the broker keeps no position for it."""

    def go_on(self) -> str:
        place = self._records.position
        return "" if place is None else f"; go on with --start {place.next}"


class _WithCursor(_Reader):
    """A subscription whose position the broker keeps as a cursor."""

    def __init__(
        self, client: SyncClient, stream: str, name: str, stands: int | None,
        records: SyncSubscription,
    ) -> None:  # fmt: skip
        """stands: position of the cursor before the subscription began; None: there was none."""
        super().__init__(records)
        self._cursor = client.cursor(stream, name)
        self._name = name
        self._stands = stands
        self._move_to: Position | None = None
        """Position to move the cursor to, once a move is due."""
        self._since = 0.0
        """When the first record was printed past which the cursor was not moved yet."""
        self.how = f" from cursor {name}"

    def next(self, timeout_ms: int | None) -> Batch | None:
        """Return the next records; the cursor is moved when none come, and once a second."""
        if self._move_to is None:
            return super().next(timeout_ms)  # The cursor stands where it should.
        if time.monotonic() - self._since >= _MOVE_EVERY_S:
            self._move()
        try:
            return super().next(_IDLE_MS if timeout_ms is None else min(_IDLE_MS, timeout_ms))
        except Timeout:
            self._move()
            return super().next(timeout_ms)

    def printed(self, batch: Batch, count: int) -> None:
        """Note the position after the printed records; _move() tells the broker when it is due."""
        place = self._records.position
        if place is None:
            return
        if count < len(batch):  # Not after the batch, but after the last record that was printed.
            place = place._replace(next=int(batch.offsets[count - 1]) + 1)
        if self._move_to is None:
            self._since = time.monotonic()
        self._move_to = place

    def printed_all(self, whole: bool) -> None:
        """Move the cursor; records that the pattern left out count as read, too.

        When not all was printed, it stands just after the last record that was.
        """
        place = self._records.position
        # A cursor that stands there already needs no move.
        if whole and place is not None and (self._stands is None or place.next > self._stands):
            self._move_to = place
        self._move()

    def _move(self) -> None:
        """Move the cursor past the records that were printed, if a move is due.

        The broker compares where it stood (`since`). Raises CommandFailed: another client moved it.
        """
        if self._move_to is None:
            return
        place, self._move_to = self._move_to, None
        try:
            with uninterrupted():
                self._cursor.move(place, since=self._stands)
                self._stands = place.next
        except BrokerRefused as error:
            if error.code != "conflict":
                raise
            raise CommandFailed(
                f"cursor {self._name} was moved by another client meanwhile ({error.reason}): two"
                " readers of one cursor get the same records; share them with --group"
            ) from None

    def go_on(self) -> str:
        return f"; cursor {self._name} stands at {self._stands}" if self._stands is not None else ""


class _Member(_Reader):
    """A member of a group: asking for more records acknowledges those that were printed."""

    def __init__(
        self,
        client: SyncClient,
        stream: str,
        group: str,
        kind: GroupKind,
        pattern: str,
        start: StartPoint,
        strict: bool,
        count: int | None,
        create: bool,
    ) -> None:
        credit: dict[str, Any] = {}
        if count is not None:
            credit["credit_records"] = min(count, _MEMBER_CREDIT)
        self._member = client.group(
            stream, group, kind=kind, pattern=pattern, start=start, strict=strict,
            create=create, on_notice=tell_notice, ack="manual", **credit,
        )  # fmt: skip
        super().__init__(self._member)
        self._client = client
        self.how = f" as a member of {group}"

    def printed(self, batch: Batch, count: int) -> None:
        """Acknowledge records that were printed."""
        # The batch of a member knows what it holds, and can be cut to its first records.
        held: Any = batch
        self._member.ack_nowait(held if count == len(batch) else held.cut(0, count))

    def printed_all(self, whole: bool) -> None:
        """Confirm the printed records before the rest goes to other members."""
        self._client.flush(LAST_WAIT_MS)


def _print(
    reader: _Reader, writer: RecordWriter, count: int | None, timeout_ms: int | None
) -> bool:
    """Print until the reader's end, or `count` records.

    Returns False when the last batch had more records than were to be printed.
    """
    from malamute_py.client.session.subscription import cut

    while (batch := reader.next(timeout_ms)) is not None:
        left = len(batch) if count is None else min(len(batch), count - writer.count)
        with uninterrupted():  # Ctrl-C must not come between printing and noting.
            writer.write(batch if left == len(batch) else cut(batch, 0, left))
            reader.printed(batch, left)
        if count is not None and writer.count >= count:
            return left == len(batch)
    return True


def known(client: SyncClient, stream: str, following: str = "") -> StreamFacts:
    """Return facts about a stream. Raises CommandFailed, with the nearest name: there is none.

    following: the advice how it is made; empty: by publishing to it.
    """
    return absent(
        lambda: client.stream_info(stream),
        "stream",
        stream,
        lambda: [each.name for each in client.list_streams()],
        following or f"publishing to it makes it, or `malamute stream create {stream}`",
    )


def check_kind(pattern: str) -> None:
    """Warn when a topic pattern may have been meant as another kind: regexp:x, glob:x."""
    kind, colon, rest = pattern.partition(":")
    # A right kind, or a topic that only happens to have a colon.
    if not colon or kind in _KINDS or not kind.isalpha():
        return
    hint = nearest(kind.lower(), _KINDS, f"other kinds are {', '.join(_KINDS)}", f":{rest}")
    say(f"{pattern!r} is taken as a topic with a colon in it; {hint}")


def start_point(text: str) -> StartPoint:
    """Return the start point that was typed. Raises CommandFailed: it is none.

    `after:` before an offset, a message id or a time leaves out the record that it names.
    """
    from malamute_py.client.position import (
        AfterMessage,
        AtMessage,
        AtTime,
        LastPerSubject,
        Position,
    )

    lowered = text.strip().lower()
    if lowered == "earliest":
        return "earliest"
    if lowered == "latest":
        return "latest"
    if lowered == "last":
        return LastPerSubject()
    place = text.strip()
    after = lowered.startswith("after:")
    if after:
        place = place[len("after:") :].strip()
    if _MESSAGE_ID.fullmatch(place):
        return (AfterMessage if after else AtMessage)(bytes.fromhex(place))
    if is_offset(place):
        return int(place) + after  # the offset itself, or the next one
    if place.count("/") == 2 and not after:  # As str(Position) writes it, with uuid and epoch.
        return Position.parse(place)
    try:
        return AtTime(time_ms(place), inclusive=not after)
    except CommandFailed:
        raise CommandFailed(
            f"{text!r} is no place to start; write earliest, latest, last, an offset, a message id"
            f" (32 hexadecimal digits) or a time: {TIMES}; after: before one of these three leaves"
            " out what it names",
            USAGE,
        ) from None


def one_place(text: str, what: str) -> StartPoint:
    """Return the start point that was typed for what stands, or ends, at one place.

    what: begins the sentence about `last`, the newest record of each subject, which is a start of
    `sub` and no one place. Raises CommandFailed.
    """
    from malamute_py.client.position import LastPerSubject

    point = start_point(text)
    if isinstance(point, LastPerSubject):
        raise CommandFailed(
            f"{what} one place: earliest, latest, OFFSET, message ID or TIME", USAGE
        )
    return point


def tell_notice(notice: Notice) -> None:
    """Tell on standard error what a subscription could not give, and where it goes on.

    Called by the client for each notice.
    """
    from malamute_protocol.errors import CODES
    from malamute_py.client.session.subscription import BegunNotice, GapNotice, RewoundNotice

    if isinstance(notice, GapNotice):
        why = notice.reason or CODES.get(notice.code, notice.code)
        lost = count_text(notice.to_offset - notice.from_offset, "record")
        say(f"gap: offsets {notice.from_offset} to {notice.to_offset - 1} ({lost}) are gone: {why}")
    elif isinstance(notice, BegunNotice):
        say(f"the oldest record that is left has offset {notice.offset}: others were removed")
    # Back to the very beginning: the stream may also have been made anew.
    elif isinstance(notice, RewoundNotice) and notice.to_offset in _BEGINNINGS:
        say(
            f"rewound: offset {notice.from_offset} is not in the log: it never came so far, or a"
            f" power loss took its tail, or it is an earlier stream's; going on from"
            f" {notice.to_offset}"
        )
    elif isinstance(notice, RewoundNotice):
        say(
            f"rewound: the log ends at {notice.to_offset}, before offset {notice.from_offset}: it"
            " never came so far, or a power loss took its tail; going on from there"
        )
