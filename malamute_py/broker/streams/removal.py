"""Removal: records that a caller has removed from a stream.

Owns TRIM, and the moment at which it takes effect. The rules: a removal takes effect when ring main
is visible up to it, so that no crash brings back a record that was seen to be gone; only records
that no power loss can take back are removed, since the offset of any other may be given again;
removed records are gone even where a cursor pins them. Source: SPEC.md, section 8, Removal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from malamute_protocol.commands import Trim
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import Link
from malamute_py.broker.log.ring import Settlement
from malamute_py.broker.log.steps import Effect, Part
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.retention import Retention
from malamute_py.changelog.records import StreamTrimmed


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
        """when_visible: of ring main. trimmed: Broker.trimmed, which drops what lies before."""
        self._shard = shard
        self._catalogue = catalogue
        self._retention = retention
        self._when_visible = when_visible
        self._trimmed = trimmed
        for stream in catalogue:
            # The journal may not have noted the trim before the broker was killed.
            retention.trim(stream, stream.first)

    def prepare_trim(self, link: Link, command: Trim, frame: Any = None) -> Part:
        """Return the part that removes the records before an offset. Raises BrokerRefused."""
        stream = self._stream(link, command.stream)
        before = command.before
        if stream.keys is not None:
            raise BrokerRefused(
                "unsupported", f"stream '{stream.name}' keeps the newest record of each subject"
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
        change = StreamTrimmed(stream.number, before, self._shard.now_ms, link.owner)
        return Part([change], effects=[_Trimming(self, stream, before, link.owner)])

    def _stream(self, link: Link, name: str) -> Stream:
        if not self._shard.settings.permit(link.owner, "trim", name):
            raise BrokerRefused("forbidden", f"you may not remove records of stream '{name}'")
        stream = self._catalogue.get(name)
        if stream is None:
            raise BrokerRefused("unknown_stream", f"there is no stream '{name}'")
        return stream

    def _check_durable(self, stream: Stream, before: int) -> None:
        """Raise BrokerRefused unless ring main cannot be durable before the records are."""
        if before > stream.visible_next and stream.settings.ring_bytes:
            raise BrokerRefused(
                "wait", "records before this offset are not on the disk yet",
                self._shard.settings.retry_ms,
            )  # fmt: skip

    def _trim(self, stream: Stream, before: int, by: str, failure: tuple[str, str] | None) -> None:
        """Let a trim take effect: ring main is durable up to it."""
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

    def appended(self, stream: Stream, before: int, by: str, end_lsn: int) -> None:
        """Take note that a trim is in the log."""
        self._when_visible(end_lsn, partial(self._trim, stream, before, by))


class _Trimming(Effect):
    """A trim on its way into the log."""

    removal: Removal
    stream: Stream
    before: int
    by: str

    def appended(self, part: Part, end_lsn: int) -> None:
        self.removal.appended(self.stream, self.before, self.by, end_lsn)
