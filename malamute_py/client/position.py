"""Places in a stream: positions, start points and what a confirm tells.

Owns the client's types for them and their wire form. The rule: an offset without the
log's uuid and epoch is only good for asking; a position is good for resuming.
Source: SPEC.md, section 6.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from malamute_protocol.commands import StartKind
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.stamp import is_message_id, message_id
from malamute_py.client.arguments import column_time, integer, wrong


class Position(NamedTuple):
    """Place at which reading goes on: the next offset, and the log and epoch it was seen in."""

    stream: bytes
    """UUID of the stream, 16 bytes."""
    epoch: int
    next: int

    def __str__(self) -> str:
        """Text that `parse` reads back, fit for a file or a log line."""
        return f"{self.stream.hex()}/{self.epoch}/{self.next}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read what `str` wrote; raises LocalProtocolError `bad_start` for anything else."""
        try:
            stream, epoch, following = text.split("/")
            return cls(bytes.fromhex(stream), int(epoch), int(following))
        except ValueError as error:
            raise LocalProtocolError(
                "bad_start", f"{text!r} is not a position; it reads uuid/epoch/next"
            ) from error


class AtTime(NamedTuple):
    """Start at the first record appended at or (exclusive) after a time."""

    time: datetime | int
    """Milliseconds since 1970, or a datetime (without a zone: local time)."""
    inclusive: bool = True


class AtClientTime(NamedTuple):
    """Start at the first record whose client time is at or (exclusive) after a time."""

    time: datetime | int
    inclusive: bool = True


class AfterMessage(NamedTuple):
    """Start after the record with this message id (16 bytes)."""

    id: bytes


class AtMessage(NamedTuple):
    """Start with the record that has this message id (16 bytes)."""

    id: bytes


class LastPerSubject(NamedTuple):
    """Start with the latest record of each subject, then go on live without a gap."""


class FromCursor(NamedTuple):
    """Start where the stream's cursor of this name stands; it is not moved by that."""

    name: str
    otherwise: OtherStart | None = "earliest"
    """Start where there is no such cursor; None: that is refused `unknown_cursor`."""


OtherStart: TypeAlias = (
    Literal["earliest", "latest"]
    | int
    | datetime
    | Position
    | AtTime
    | AtClientTime
    | AfterMessage
    | AtMessage
)
"""Every start point that names a place by itself."""

StartPoint: TypeAlias = OtherStart | LastPerSubject | FromCursor | list[Any]
"""Everything that `start` may be; a list is the wire form itself."""


def milliseconds(time: datetime | int) -> int:
    """Milliseconds since 1970 of a datetime, or the number itself. Raises LocalProtocolError."""
    return column_time("time", time)


def as_datetime(time_ms: int) -> datetime:
    """Return milliseconds since 1970 as UTC; by a float of seconds some would get lost."""
    whole = datetime.fromtimestamp(time_ms // 1000, tz=UTC)
    return whole.replace(microsecond=time_ms % 1000 * 1000)


def start_on_wire(start: StartPoint) -> list[Any]:
    """Return the wire form of a start point: its kind, then what that takes (SPEC.md, section 6).

    Raises LocalProtocolError `bad_start`: it is none, or a part of it is wrong.
    """
    given: Any = start
    if hasattr(given, "__index__") and not isinstance(given, int):
        # An offset of another type, as an integer of numpy.
        try:
            given = operator.index(given)
        except TypeError:  # Each array of numpy has the method, and most cannot do it.
            raise _no_start(start) from None
        return start_on_wire(given)
    match start:
        case "earliest":
            return [int(StartKind.EARLIEST)]
        case "latest":
            return [int(StartKind.LATEST)]
        case bool():
            pass  # True is an int of Python, and no offset
        case int() if 0 <= start < 1 << 63:
            return [int(StartKind.OFFSET), start]
        case datetime():
            return [int(StartKind.TIME), milliseconds(start), True]
        case Position():
            following = integer("next of the position", start.next, 0, code="bad_start")
            epoch = integer("epoch of the position", start.epoch, 0, code="bad_start")
            uuid: Any = start.stream
            if not isinstance(uuid, bytes):
                raise wrong(
                    "stream of the position", uuid, "the stream's UUID, 16 bytes", "bad_start"
                )
            return [int(StartKind.OFFSET), following, epoch, start.stream]
        case AtTime():
            return _time_on_wire(StartKind.TIME, start)
        case AtClientTime():
            return _time_on_wire(StartKind.CLIENT_TIME, start)
        case AfterMessage() | AtMessage():
            known: Any = start.id
            if not isinstance(known, bytes) or not is_message_id(known):
                what = f"id of {type(start).__name__}"
                raise wrong(what, known, "a message id, 16 bytes", "bad_start")
            inclusive = [True] if isinstance(start, AtMessage) else []
            return [int(StartKind.AFTER_ID), known, *inclusive]
        case LastPerSubject():
            return [int(StartKind.LAST_PER_SUBJECT)]
        case FromCursor():
            otherwise = start.otherwise
            other = [] if otherwise is None else [start_on_wire(otherwise)]
            return [int(StartKind.CURSOR), start.name, *other]
        case list():
            return start  # the wire form itself, which the broker checks
        case _:
            pass
    raise _no_start(start)


def _time_on_wire(kind: StartKind, start: AtTime | AtClientTime) -> list[Any]:
    """Return a start at a time as a command has it. Raises LocalProtocolError `bad_start`."""
    inclusive: Any = start.inclusive
    if not isinstance(inclusive, bool):
        what = f"inclusive of {type(start).__name__}"
        raise wrong(what, inclusive, "True or False", "bad_start")
    try:
        time_ms = milliseconds(start.time)
    except LocalProtocolError as error:
        raise LocalProtocolError("bad_start", error.reason) from error
    return [int(kind), time_ms, inclusive]


def found_at(stream: str, start: StartPoint, answer: Mapping[str, Any]) -> Position:
    """Return the place that a RESULT of FIND_OFFSET names.

    Raises LocalProtocolError `bad_start`: the stream ends before the start point, or is another.
    """
    if answer["rewound"]:
        raise LocalProtocolError("bad_start", f"{stream!r} ends before {start!r}, or is another")
    return Position(answer["stream"], answer["epoch"], answer["offset"])


def _no_start(given: Any) -> LocalProtocolError:
    """Return the error for what is no start point, with all that are."""
    return LocalProtocolError(
        "bad_start",
        f"{given!r} is no start point; use 'earliest', 'latest', an offset, a datetime, "
        "a Position, AtTime, AtClientTime, AfterMessage, AtMessage, LastPerSubject or FromCursor",
    )


class Confirmation(msgspec.Struct, frozen=True, gc=False):
    """A record is in the log, at this place and level."""

    offset: int
    """Offset of the first record, or number of the first message or request; for a step, the offset
    of its first record. -1: not known, because nothing was promised or a step came again."""
    epoch: int
    level: str
    """The level reached: "stored", "synced"; "none" when nothing was promised."""
    append_time_ms: int
    count: int = 1
    """Records that this confirms, from `offset` on."""
    duplicate: bool = False
    """True: it was in the log already, from an earlier attempt."""

    @property
    def id(self) -> bytes:
        """Message id of the (first) record: 16 bytes that sort in the stream's order.

        Empty where the offset is not known.
        """
        return message_id(self.append_time_ms, self.offset) if self.offset >= 0 else b""

    @property
    def append_time(self) -> datetime:
        """Time at which the broker appended the record, in UTC."""
        return as_datetime(self.append_time_ms)
