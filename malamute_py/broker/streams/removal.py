"""Removal: records that a caller has removed from a stream.

TRIM removes all records before an offset, PURGE_SUBJECTS those of some subjects, by a mark that
hides them from readers. A ring is visible up to an LSN, a position in it, when no power loss can
take back what lies before. Owns both commands, and the moment at which each takes effect. The
rules: a removal takes effect when ring main is visible up to it, so that no crash brings back a
record that was seen to be gone; only records that no power loss can take back are removed, since
the offset of any other may be given again; removed records are gone even where a cursor pins them.
Source: SPEC.md, section 8, Removal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from malamute_protocol.commands import PurgeSubjects, Trim
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.purges import Purges
from malamute_py.broker.log.ring import Settlement
from malamute_py.broker.log.steps import Effect, Part
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.retention import Retention
from malamute_py.changelog.records import StreamPurged, StreamTrimmed
from malamute_py.changelog.tables import PurgeMark, with_purge
from malamute_py.matcher import compile_pattern

PURGES_MAX: Final = 16
"""Purges of a stream that hide records, at most: a reader of old records asks each of them about
every header that is new to it."""
PURGE_BYTES_MAX: Final = 1_024
"""Size of a purge's pattern at most: the table of streams lies at each segment's start."""
_OF_SUBJECTS: Final = frozenset({"all", "topic", "prefix", "regex", "and", "or", "not"})


class Removal:
    """Removes records of streams for callers."""

    def __init__(
        self,
        shard: Shard,
        catalogue: Catalogue,
        retention: Retention,
        when_visible: Callable[[int, Settlement], None],
        trimmed: Callable[[str, Mapping[int, int]], None],
    ) -> None:
        """when_visible: has a function called once ring main is visible up to an LSN.

        trimmed: Broker.trimmed, which drops what lies before an offset.
        """
        self._shard = shard
        self._catalogue = catalogue
        self._retention = retention
        self._when_visible = when_visible
        self._trimmed = trimmed
        self._coming: Counter[Stream] = Counter()
        """Purges of each stream on their way into the log."""
        for stream in catalogue:
            # The journal may not have noted the trim before the broker was killed.
            retention.trim(stream, stream.first)

    def prepare_trim(self, link: Link, command: Trim, frame: Any = None) -> Part:
        """Return the part of a step that removes the records before an offset, for TRIM.

        frame: TRIM has none. Raises BrokerRefused: the link may not, or the offset is none before
        which may be trimmed.
        """
        stream, before = self._stream(link, command.stream), command.before
        self._check_position(stream, command)
        change = StreamTrimmed(stream.number, before, self._shard.now_ms, link.owner)
        return Part([change], effects=[_Trimming(self, stream, before, link.owner)])

    def prepare_purge(self, link: Link, command: PurgeSubjects, frame: Any = None) -> Part:
        """Return the part of a step that removes records of some subjects, for PURGE_SUBJECTS.

        The purge is a mark, a pattern with the offset before which it holds: readers are not given
        the records that it matches. frame: PURGE_SUBJECTS has none. Raises BrokerRefused: the link
        may not, the offset or the pattern will not do, or too many marks hide records already.
        """
        stream, before = self._stream(link, command.stream), command.before
        self._check_position(stream, command)
        compiled = compile_pattern(command.pattern)
        if not _is_of_subjects(command.pattern):
            raise BrokerRefused("bad_pattern", "a purge is by subject: no pattern on fields")
        pattern = msgspec.msgpack.encode(compiled.wire)
        if compiled.slow or len(pattern) > PURGE_BYTES_MAX:
            raise BrokerRefused(
                "bad_pattern",
                f"a purge has no costly expression, and at most {PURGE_BYTES_MAX} bytes",
            )
        # Marks whose records are all dropped end with the next purge, and the same pattern's mark
        # is replaced by it.
        left = [each for each, end in stream.row.purges if end > stream.first and each != pattern]
        if len(left) + self._coming[stream] >= PURGES_MAX:
            raise BrokerRefused(
                "limit",
                f"{PURGES_MAX} purges of stream '{stream.name}' still hide records: trim it, wait"
                " until these are dropped, or purge by fewer patterns",
            )
        change = StreamPurged(
            stream.number, pattern, before, stream.first, self._shard.now_ms, link.owner
        )
        purging = _Purging(self, self._coming, stream, (pattern, before), link.owner)
        return Part([change], effects=[purging])

    def _check_position(self, stream: Stream, command: Trim | PurgeSubjects) -> None:
        """Raise BrokerRefused unless records may be removed before the command's offset.

        A caller may name the stream's uuid and the epoch in which it learnt the offset: then
        nothing is removed from a later stream of the name, or by an offset that was given again.
        """
        before = command.before
        if stream.keys is not None:
            raise BrokerRefused(
                "unsupported",
                f"stream '{stream.name}' keeps the newest record of each subject: "
                "delete keys instead",
            )
        if command.uuid and command.uuid != stream.uuid:
            raise BrokerRefused("conflict", f"stream '{stream.name}' is not the one of this uuid")
        if before > stream.next:
            raise BrokerRefused("bad_start", f"the stream ends at {stream.next}")
        if command.epoch and before > stream.position_end(command.epoch):
            raise BrokerRefused(
                "conflict", f"the log was rewound: {before} is no position of epoch {command.epoch}"
            )
        self._check_durable(stream, before)

    def _stream(self, link: Link, name: str) -> Stream:
        """Return the stream of this name. Raises BrokerRefused unless the link may trim it."""
        return self._catalogue.find(link.owner, name, "trim", "remove records of stream")

    def _check_durable(self, stream: Stream, before: int) -> None:
        """Raise BrokerRefused `wait` where the removal could be durable before the records are.

        The removal is in ring main, which has the records of its own streams before it. A ring of
        the stream's own is synced apart.
        """
        if before > stream.visible_next and stream.settings.ring_bytes:
            raise BrokerRefused("wait", "records before this offset are not on the disk yet")

    def _trim(self, stream: Stream, before: int, by: str, failure: tuple[str, str] | None) -> None:
        """Let a trim take effect, since ring main is durable up to it.

        before: the first offset that stays. by: owner that the event names. failure: code and
        reason where the trim is not durable, and so has no effect.
        """
        if failure is not None or stream.removed:
            return
        records = before - stream.first
        if records <= 0:
            return
        self._retention.trim(stream, before)
        self._trimmed(stream.ring.name, {stream.number: before})
        self._shard.counters["records_trimmed"] += records
        self._shard.event(
            "stream_trimmed", stream=stream.name, before=before, records=records, by=by
        )

    def _purge(
        self, stream: Stream, mark: PurgeMark, by: str, failure: tuple[str, str] | None
    ) -> None:
        """Let a purge take effect, since ring main is durable up to it.

        mark: its pattern and the offset before which it holds. by: owner that the event names.
        failure: code and reason where the purge is not durable, and so has no effect.
        """
        if failure is not None or stream.removed:
            return
        # Marks that hide no record after `first` any more are dropped.
        stream.purges = Purges(with_purge(stream.purges.marks, mark, stream.first))
        self._shard.counters["purges_by_subject"] += 1
        pattern, before = mark
        self._shard.event(
            "stream_purged", stream=stream.name, pattern=msgspec.msgpack.decode(pattern),
            before=before, by=by,
        )  # fmt: skip

    def trim_appended(self, stream: Stream, before: int, by: str, end_lsn: int) -> None:
        """Have a trim that the log has take effect once it is durable."""
        self._when_visible(end_lsn, partial(self._trim, stream, before, by))

    def purge_appended(self, stream: Stream, mark: PurgeMark, by: str, end_lsn: int) -> None:
        """Have a purge that the log has take effect once it is durable."""
        self._when_visible(end_lsn, partial(self._purge, stream, mark, by))


def _is_of_subjects(pattern: Any) -> bool:
    """Whether a sound pattern, as it is on the wire, looks at nothing but subjects.

    A purge has to match by subject alone.
    """
    kind, *arguments = pattern
    inner = arguments if kind in ("and", "or", "not") else ()
    return kind in _OF_SUBJECTS and all(map(_is_of_subjects, inner))


class _Trimming(Effect):
    """A trim on its way into the log."""

    removal: Removal
    stream: Stream
    before: int
    by: str

    def appended(self, part: Part, end_lsn: int) -> None:
        """Trim the stream once the change, which the log has, is durable."""
        self.removal.trim_appended(self.stream, self.before, self.by, end_lsn)


class _Purging(Effect):
    """A purge on its way into the log."""

    removal: Removal
    coming: Counter[Stream]
    stream: Stream
    mark: PurgeMark
    by: str

    def taken(self, part: Part) -> None:
        """Count a purge on its way for the stream, which bounds how many marks it may get."""
        self.coming[self.stream] += 1

    def appended(self, part: Part, end_lsn: int) -> None:
        """Purge the stream once the change is durable."""
        self._uncount()
        self.removal.purge_appended(self.stream, self.mark, self.by, end_lsn)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """End the count of a purge that the journal refused."""
        self._uncount()

    def _uncount(self) -> None:
        """Count the purge no longer among those on their way into the log, which are bounded."""
        self.coming[self.stream] -= 1
        if self.coming[self.stream] <= 0:
            del self.coming[self.stream]
