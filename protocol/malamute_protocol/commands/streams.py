"""The commands of streams: publishing, administration, removal, keys and declared schemas.

Owns the commands 10, 11, 22, 30 to 36, 70 to 76 and 85. Source: SPEC.md, section 4.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from malamute_protocol.commands.command import Command, WithContent
from malamute_protocol.commands.fields import Pattern, Settings, Start


class Publish(WithContent, tag=10, frozen=True):
    """Append one batch to a stream; owns one content frame."""

    stream: str
    tracker: int
    """The producer's number for this batch, ascending on the link; 0 with level none."""
    level: int = 0
    keyed: bool = False
    """True: only to a stream with `keep`, which this does not create."""
    typed: bool = False
    """True: only to a stream with a declared schema, which this does not create."""


class Confirm(Command, tag=11, frozen=True):
    """A published batch reached `level`; position of its first record."""

    tracker: int
    level: int
    epoch: int
    offset: int
    append_time_ms: int
    duplicate: bool = False
    """True: the batch was in the log already; the position is the original's."""


class OpenProducer(Command, tag=22, frozen=True):
    """Client gets (id 0) or resumes a producer id, bound to the identity; answered by RESULT.

    RESULT: {"id", "epoch", "next": {stream name: next sequence}}. A resume within one session keeps
    the epoch; `fence` raises it, and older epochs are refused as `fenced`.
    """

    request: int
    id: int = 0
    epoch: int = 0
    fence: bool = False


class CreateStream(Command, tag=30, frozen=True):
    """Create a stream with settings; the command with equal settings succeeds again."""

    request: int
    stream: str
    settings: Settings = {}


class EditStream(Command, tag=31, frozen=True):
    """Change settings of a stream; settings that are not named stay."""

    request: int
    stream: str
    settings: Settings
    replace: bool = False
    """True: settings that are not named go back to their defaults."""


class RemoveStream(Command, tag=32, frozen=True):
    """Remove a stream and its records; its number is never used again."""

    request: int
    stream: str


class StreamInfo(Command, tag=33, frozen=True):
    """Facts about one stream: uuid, epoch, first, tail, bytes, settings, subscriptions."""

    request: int
    stream: str


class ListStreams(Command, tag=34, frozen=True):
    """Names and short facts, in name order, starting after `after`."""

    request: int
    prefix: str = ""
    after: str = ""
    limit: int = 1000


class FindOffset(Command, tag=35, frozen=True):
    """Resolve a start position to an offset without subscribing."""

    request: int
    stream: str
    start: Start


class PlanRead(Command, tag=36, frozen=True):
    """Plan a bounded read from the index: an end under caps, and split points.

    RESULT: {"stream" (uuid), "epoch", "first", "trimmed", "tail", "from", "to",
    "splits": [[from, to, bytes], ...], "records", "bytes", "unbroken": [[from, to], ...],
    "rewound" (bool)}.
    """

    request: int
    stream: str
    pattern: Pattern
    start: Start
    records_max: int = 0
    bytes_max: int = 0
    split_bytes: int = 0
    end: int = -1
    visibility: int = 1
    client_time: tuple[int, int] | None = None


class Trim(Command, tag=70, frozen=True):
    """Remove a stream's records before an offset; answered by CONFIRM (tracker)."""

    stream: str
    before: Annotated[int, msgspec.Meta(ge=0)]
    """Offset of the first record that stays."""
    tracker: int
    level: int = 0
    uuid: bytes = b""
    """UUID of the stream that `before` is a position of; empty: not checked."""
    epoch: int = 0
    """Epoch in which `before` was a position; 0: not checked."""


class PurgeSubjects(Command, tag=71, frozen=True):
    """Remove a stream's records of some subjects before an offset; answered by CONFIRM (tracker).

    The pattern is one on subjects: topic, prefix, regex, and what combines these.
    """

    stream: str
    pattern: Pattern
    before: Annotated[int, msgspec.Meta(ge=0)]
    """Offset from which on matching records stay."""
    tracker: int
    level: int = 0
    uuid: bytes = b""
    """UUID of the stream that `before` is a position of; empty: not checked."""
    epoch: int = 0
    """Epoch in which `before` was a position; 0: not checked."""


class UpdateKey(WithContent, tag=74, frozen=True):
    """Append one record to a stream that keeps the last of each subject, on a condition.

    Owns one content frame, of one record. It takes its turn in the producer's sequence as a PUBLISH
    does.
    """

    stream: str
    tracker: int
    """The producer's number for this batch, ascending on the link; 0 with level none."""
    level: int = 0
    revision: int = 0
    """Offset that the newest record of the subject must have; 0: there must be no such key."""


class GetKey(Command, tag=75, frozen=True):
    """Newest record of one subject, answered once no power loss can take it back."""

    request: int
    stream: str
    subject: str


class ListKeys(Command, tag=76, frozen=True):
    """Keys that match a pattern, and their revisions, in the order of their names.

    RESULT: {"keys": [[subject, revision], ...], "after": name to go on after, "more"}.
    """

    request: int
    stream: str
    pattern: Pattern
    """The pattern; of a kind that asks for nothing but the subject."""
    after: str = ""
    """Keys after this one."""
    limit: int = 1000
    """At most so many entries; 0: as many as the broker allows."""


class StreamSchemas(Command, tag=85, frozen=True):
    """Ask a writer's questions about a stream: what it is, the versions of its schema.

    RESULT: {"stream": uuid, "keep" and "body_kind": its settings, "schemas": [[id, Arrow schema
    message], ...]}, oldest first; empty: it has none.
    """

    request: int
    stream: str
