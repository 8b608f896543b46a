"""Start positions: from the start that a client asks for to an offset.

Owns reading and resolving them, for subscriptions, groups, FIND_OFFSET and PLAN_READ. The rules: a
position is (uuid, epoch, offset); a position after the end of its epoch, or in a stream of another
uuid, is rewound: the reader is told that the log lost or replaced what it had read; records that
the log no longer has are left to the gap that the first serving finds. Source: SPEC.md, section 6;
docs/design.md, Journal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from malamute_protocol.commands import StartKind
from malamute_protocol.errors import BatchError, BrokerRefused
from malamute_protocol.stamp import parse_message_id
from malamute_py.broker.context import Asker, Shard
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import IndexFailure
from malamute_py.matcher import candidates

RETRY_MS = 100
"""Time after which a start may be asked for again that had to wait for the keys of its stream."""


class Begin(NamedTuple):
    """Offset at which delivery begins, resolved from a start."""

    next: int
    rewound_from: int | None = None
    """The position asked for, where it is rewound; None: it is not."""
    wanted: np.ndarray[Any, np.dtype[np.int64]] | None = None
    """Offsets of the only records that are wanted before `wanted_to`; None: all are."""
    wanted_to: int = 0


OnBegin: TypeAlias = Callable[[Begin | BrokerRefused], None]


def may_match(pattern: Any, index: Any) -> Any:
    """Return a mask of the batches of a segment that may match a pattern, by the segment's index.

    Questions to the journal bring this function along: its reader thread calls it, and knows no
    patterns.
    """
    found = candidates(pattern, index)  # None: the index cannot tell.
    return index.everything() if found is None else found


class Starts:
    """Resolves start positions, at once where it can, else by a question to the journal."""

    def __init__(self, shard: Shard, lost: str) -> None:
        """lost: why this run has none of the cursors that were stored; "": it has them."""
        self._shard = shard
        self._lost = lost

    def resolve(
        self, stream: Stream, start: Sequence[Any], durable: bool, pattern: Any, found: OnBegin,
        *, end: int, asker: Asker, wanted: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Call `found`, now or later, with the offset at which a reader begins, or with a refusal.

        start: as on the wire, [kind, arguments...]. durable: only what no power loss can take back
        counts. pattern: of the records that the reader wants. end: nothing at or after it is
        wanted. asker: the link that asks. wanted: returns whether the link still waits.
        """
        try:
            kind, arguments = _parse(start)
        except BrokerRefused as error:
            found(error)
            return
        if stream.keys is not None and not stream.keys.ready:
            found(BrokerRefused("wait", "the keys of the stream are being read", RETRY_MS))
            return
        tail = stream.visible_next if durable else stream.next
        if kind == StartKind.CURSOR:
            name, otherwise = arguments
            if self._lost:
                found(BrokerRefused("queues_lost", self._lost))
                return
            cursor = self._shard.queues.cursors.get((stream.number, name))
            if cursor is not None:
                next = max(cursor.next, stream.begin)
                # A cursor beyond the tail is rewound: a power loss took the records before it. It
                # is not where retention has moved it up to `first`, ahead of a durable tail.
                rewound = next > max(tail, stream.first)
                found(Begin(min(next, tail), rewound_from=next if rewound else None))
            elif otherwise is None:
                found(BrokerRefused("unknown_cursor", f"there is no cursor '{name}'"))
            else:  # The start that the reader gave for this case.
                self.resolve(
                    stream, otherwise, durable, pattern, found,
                    end=end, asker=asker, wanted=wanted,
                )  # fmt: skip
        elif kind == StartKind.EARLIEST:
            self._earliest(stream, durable, tail, found, asker, wanted)
        elif kind == StartKind.LATEST:
            found(Begin(tail))
        elif kind == StartKind.OFFSET:
            found(by_offset(stream, tail, *arguments))
        elif kind == StartKind.AFTER_ID:
            next, time_ms = arguments
            if 0 < time_ms < stream.row.created_ms:
                # The id is of a record of an earlier stream of this name.
                found(Begin(min(stream.begin, tail), rewound_from=next))
            else:
                found(Begin(next) if next <= tail else Begin(tail, rewound_from=next))
        elif kind == StartKind.LAST_PER_SUBJECT:
            self._last_per_subject(stream, tail, min(tail, end), pattern, found, asker, wanted)
        else:
            time_ms, inclusive = arguments
            self._by_time(stream, kind, durable, time_ms, inclusive, found, asker, wanted)

    def _earliest(
        self, stream: Stream, durable: bool, tail: int, found: OnBegin, asker: Asker,
        wanted: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Find the first record that the stream keeps, for a start `earliest`.

        Where a bound of age counts and the hot window does not tell, the journal is asked: it knows
        how old each record is.
        """
        now_ms = self._shard.now_ms
        first = stream.begin if stream.keys is not None else stream.first_at(now_ms)
        if not stream.settings.max_age_ms or first >= min(stream.hot_first, stream.pinned):
            found(Begin(min(first, tail)))
            return

        def kept(begin: Begin | BrokerRefused) -> None:
            """Begin at the first record that is young enough; a pinned one counts as young."""
            if isinstance(begin, Begin):
                tail = stream.visible_next if durable else stream.next
                first = max(stream.first, min(begin.next, stream.pinned))
                begin = Begin(min(first, tail))
            found(begin)

        oldest_ms, inclusive = stream.oldest_ms(now_ms), True
        self._by_time(stream, StartKind.TIME, durable, oldest_ms, inclusive, kept, asker, wanted)

    def _by_time(
        self, stream: Stream, kind: int, durable: bool, time_ms: int, inclusive: bool,
        found: OnBegin, asker: Asker, wanted: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Find where records of a time begin: at the tail, else by the journal's index.

        kind: TIME, of appending, or CLIENT_TIME, that producers set. inclusive: whether records of
        the very millisecond count.
        """
        tail = stream.visible_next if durable else stream.next
        # Append times only rise, so that the newest one tells; client times come in any order.
        late = kind == StartKind.TIME and (
            time_ms > stream.last_time_ms or (time_ms == stream.last_time_ms and not inclusive)
        )
        if late or (stream.first >= stream.next and not _has_moved(stream)):
            found(Begin(tail))
            return

        def answered(value: Any) -> None:
            """Begin at the offset that the index found for the time; None: at the former tail."""
            if isinstance(value, IndexFailure):
                found(BrokerRefused(value.code, value.reason))
                return
            # Of records that came while the journal looked, it may not have seen one of the time.
            now = stream.visible_next if durable else stream.next
            next = min(tail if value is None else int(value), now)
            if _has_moved(stream) and (kind == StartKind.CLIENT_TIME or next <= stream.first):
                # The index has no times of records that have moved, which lie before `first`: all
                # of them may be meant.
                next = min(stream.begin, now)
            found(Begin(next))

        self._shard.ask(
            stream.ring.name, stream.number,
            "find_time" if kind == StartKind.TIME else "find_client_time",
            {"time_ms": time_ms, "inclusive": inclusive}, answered, asker, wanted,
        )  # fmt: skip

    def _last_per_subject(
        self, stream: Stream, tail: int, end: int, pattern: Any, found: OnBegin, asker: Asker,
        wanted: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Find the newest record of each subject that a pattern selects, by the journal.

        The reader then gets these records alone, and from `end` on all: Begin.wanted.
        """
        first = stream.first
        if first >= end:
            # What lies before `end` is gone, but for newest records that have moved into copies.
            begin = max(min(first, tail), end) if stream.keys is None else min(stream.begin, tail)
            found(Begin(begin))
            return
        limit = self._shard.settings.last_per_subject_max

        def answered(value: Any) -> None:
            """Begin with the offsets found, each the last of its subject: only these are wanted."""
            if isinstance(value, IndexFailure):
                found(BrokerRefused(value.code, value.reason))
            elif len(value) > limit:
                found(BrokerRefused("limit", f"more than {limit} subjects match"))
            else:
                offsets = np.array(value, np.int64)
                # All records that have moved are wanted: each is its subject's newest.
                found(Begin(min(stream.begin, tail), wanted=offsets, wanted_to=end))

        self._shard.ask(
            stream.ring.name, stream.number, "last_per_subject",
            {
                "pattern": pattern, "candidates": partial(may_match, pattern),
                "from": first, "end": end, "limit": limit,
            },
            answered, asker, wanted,
        )  # fmt: skip


def _parse(start: Sequence[Any]) -> tuple[int, tuple[Any, ...]]:
    """Return the kind of a start, as on the wire, and its arguments.

    Arguments by kind: OFFSET (offset, epoch, uuid); TIME and CLIENT_TIME (milliseconds, inclusive);
    AFTER_ID (next offset, append time); CURSOR (name, another start or None); others (). Raises
    BrokerRefused `bad_start`, whose reason shows the form.
    """
    if not isinstance(start, list | tuple) or not start or type(start[0]) is not int:
        raise BrokerRefused("bad_start", "a start is an array that begins with its kind")
    kind, rest = start[0], tuple(start[1:])
    if kind in (StartKind.EARLIEST, StartKind.LATEST, StartKind.LAST_PER_SUBJECT):
        return kind, ()
    if kind == StartKind.OFFSET:
        epoch = rest[1] if len(rest) > 1 else 0
        uuid = rest[2] if len(rest) > 2 else b""
        if rest and _number(rest[0]) and _number(epoch) and isinstance(uuid, bytes | None):
            return kind, (rest[0], epoch, uuid or b"")
        raise BrokerRefused("bad_start", "[2, offset, epoch, stream uuid]")
    if kind in (StartKind.TIME, StartKind.CLIENT_TIME):
        inclusive = rest[1] if len(rest) > 1 else True
        if rest and type(rest[0]) is int and abs(rest[0]) < 1 << 63 and type(inclusive) is bool:
            return kind, (rest[0], inclusive)
        raise BrokerRefused("bad_start", f"[{kind}, milliseconds, inclusive]")
    if kind == StartKind.AFTER_ID:
        if rest and isinstance(rest[0], bytes):
            try:
                time_ms, offset = parse_message_id(rest[0])
            except BatchError as error:
                raise BrokerRefused("bad_start", error.reason) from error
            inclusive = rest[1] if len(rest) > 1 else False
            if _number(offset) and type(inclusive) is bool:
                return kind, (offset if inclusive else offset + 1, time_ms)
        raise BrokerRefused("bad_start", "[5, message id of 16 bytes, inclusive]")
    if kind == StartKind.CURSOR:
        otherwise = rest[1] if len(rest) > 1 else None
        if otherwise is not None:
            # The kind is checked before the inner start is read: starts could be nested without
            # end.
            nested = otherwise[0] if isinstance(otherwise, list | tuple) and otherwise else None
            if nested in (StartKind.LAST_PER_SUBJECT, StartKind.CURSOR):
                raise BrokerRefused("bad_start", f"no start of kind {nested} in place of a cursor")
            _parse(otherwise)
        if rest and isinstance(rest[0], str):
            return kind, (rest[0], otherwise)
        raise BrokerRefused("bad_start", "[7, cursor, another start]")
    raise BrokerRefused("bad_start", f"no start of kind {kind}")


def _has_moved(stream: Stream) -> bool:
    """Whether newest records of a stream lie in copies, before its first offset."""
    return stream.keys is not None and stream.keys.moved_count > 0


def _number(value: Any) -> bool:
    """Whether a value is an integer from 0 to 2^63: an offset or epoch."""
    return type(value) is int and 0 <= value < 1 << 63


def by_offset(stream: Stream, tail: int, offset: int, epoch: int = 0, uuid: bytes = b"") -> Begin:
    """Return where a reader goes on that stood at an offset, in an epoch of a stream.

    tail: where the stream ends for it. epoch: of the log when it learnt the offset; 0: it does not
    say. uuid: of the stream; empty: it does not say.
    """
    if uuid and uuid != stream.uuid:
        # The stream was removed, and another one has its name: the reader gets all of that.
        return Begin(min(stream.begin, tail), rewound_from=offset)
    end = stream.epoch_end(epoch, tail) if epoch else tail
    if offset > end:
        # The reader goes on where the epoch ended, gone or not: what it read after that is void.
        return Begin(end, rewound_from=offset)
    return Begin(offset)
