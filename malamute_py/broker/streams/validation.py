"""Validation: full checks of typed batches before they are published.

A typed batch names its Arrow schema by a number, which must be one of its stream's; a stream with
`validate = full` also has the bytes of each batch checked against that schema, which takes long.
Owns the batches that a thread of the shell is validating, and the outcomes. The rules: the loop
reads no body; a message whose batches are to be validated waits, and with it all later ones of its
link; a batch that was not validated by the schema that its stream has is refused `wait`; a stream
that does not ask for it pays nothing. Source: SPEC.md, section 5.9; ARCHITECTURE.md, Decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from malamute_protocol.commands import Command, Publish, Stage
from malamute_protocol.content_layout import (
    ARROW,
    BODY_KINDS,
    Head,
    claimed_schema,
    has_large_table,
)
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard, Verdict
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.stream import TYPED, Stream
from malamute_py.broker.ready import BatchCheck, BatchChecked
from malamute_py.changelog.settings import FULL

_LONG_TABLE_BYTES: Final = 16 << 10
"""Bytes of a header table from which on a batch takes long. Measured with 3,000 subjects in 55 KB:
4 ms until it is read and checked, 3 ms until they are indexed."""


class Waiting(NamedTuple):
    """A batch that is being validated."""

    link: Link
    frame: int
    """Identity of its frame."""
    schema: bytes


class Validation:
    """The streams whose batches are validated in full, and the batches under way."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._streams: dict[str, Stream] = {}
        """Streams that ask for it, by name."""
        self._ids: frozenset[int] = frozenset()
        """Ids of all their schemas."""
        self._waiting: dict[int, Waiting] = {}
        """Token of a check -> the batch that it is of."""
        self.checks: list[BatchCheck] = []
        """Batches that the shell is to be given."""

    @property
    def ahead_bytes(self) -> int:
        """Size of a message from which on the shell asks takes_long() before it is received.

        0, with full validation: of all. A smaller message has no header table that takes long.
        """
        return 0 if self._ids else _LONG_TABLE_BYTES

    def watch(self, stream: Stream) -> None:
        """Take note of a stream that was made, changed or removed, where it concerns validation."""
        if stream.settings.validate == FULL and not stream.removed:
            self._streams[stream.name] = stream
        elif self._streams.get(stream.name) is stream:
            del self._streams[stream.name]
        else:
            return
        every = self._streams.values()
        self._ids = frozenset(number for each in every for number in each.schemas)

    def takes_long(self, frame: Any) -> bool:
        """Whether a frame may be a content that takes a millisecond or more.

        Asked by the shell, which lets messages of other peers go first. Header tables of more than
        _LONG_TABLE_BYTES take so long, and typed batches that may have to be validated in full.
        """
        return has_large_table(frame, _LONG_TABLE_BYTES) or claimed_schema(frame) in self._ids

    def reads_first(self, frame: Any) -> bool:
        """Whether a frame may be a content that takes a while before its message can be received.

        Asked by the shell, which then lets ReadingAhead.read() have the message first. So it is
        with a large header table, which is read in steps, and with a typed batch that may have to
        be validated in full.
        """
        return has_large_table(frame) or claimed_schema(frame) in self._ids

    def validated(self, link: Link, commands: Sequence[Command], frames: Sequence[Any]) -> bool:
        """Whether all batches of a link's next message are validated that have to be.

        Called before the message is received, until it is true. The first call puts the batches on
        their way to the thread; with the last one their outcomes are in the shard's `verdicts`.
        """
        if link.verdicts is None:  # The first call for this message.
            link.verdicts = {}
            for stream, frame in self._of_full(link, commands, frames):
                self._begin(link, stream.schemas[claimed_schema(frame)], frame)
        known = {frame: verdict for frame, verdict in link.verdicts.items() if verdict is not None}
        if len(known) < len(link.verdicts):
            return False
        self._shard.verdicts, link.verdicts = known, None
        return True

    def _of_full(
        self, link: Link, commands: Sequence[Command], frames: Sequence[Any]
    ) -> Iterator[tuple[Stream, Any]]:
        """Yield (stream, frame) of the batches of a message that are to be validated in full.

        A batch that will be refused in any case is not: it would keep the thread busy.
        """
        at = 0  # Index of the command's first frame.
        for command in commands:
            if isinstance(command, Publish | Stage) and at < len(frames):
                stream = self._streams.get(command.stream)
                if (
                    stream is not None
                    and claimed_schema(frames[at]) in stream.schemas
                    and self._may_write(link, stream)
                ):
                    yield stream, frames[at]
            at += command.content_frames

    def _may_write(self, link: Link, stream: Stream) -> bool:
        """Whether a link may publish to a stream, be it under some subjects only."""
        settings, name = self._shard.settings, stream.name
        return settings.permit(link.owner, "write", name) or bool(
            settings.subjects(link.owner, name)
        )

    def _begin(self, link: Link, schema: bytes, frame: Any) -> None:
        """Have the shell check a typed batch in full; its link's message waits for the outcome."""
        assert link.verdicts is not None
        if not self._shard.settings.validates:  # There is no pyarrow here, unlike when it was set.
            link.verdicts[id(frame)] = Verdict(schema, "unsupported", CANNOT)
            return
        token = self._shard.token()
        link.verdicts[id(frame)] = None  # The outcome is awaited.
        self._waiting[token] = Waiting(link, id(frame), schema)
        self.checks.append(BatchCheck(token, frame, schema))

    def checked(self, answer: BatchChecked) -> Link:
        """Note the outcome of a batch that the thread has checked.

        Returns its link, whose next message may be ready to be received now.
        """
        link, frame, schema = self._waiting.pop(answer.token)
        if link.verdicts is not None:  # None: no message waits for the outcome.
            link.verdicts[frame] = Verdict(schema, answer.code, answer.reason)
        return link

    def misfit(self, stream: Stream, head: Head, frame: Any) -> tuple[str, str] | None:
        """Return code and reason where a batch does not fit a stream; None: it does.

        Called for batches whose body kind is not the stream's own. So it is of each batch of a
        typed stream, whose kind TYPED no batch has, and of a stream's first batch, which may be of
        any kind.
        """
        kind = BODY_KINDS[head.body_kind]
        if stream.body_kind == TYPED:
            return _other_schema(stream, head) or self._fault(stream, head, frame)
        if stream.body_kind >= 0:
            words = f"{BODY_KINDS[stream.body_kind]}, not {kind}"
            return "bad_batch", f"the stream's bodies are {words}"
        return None

    def _fault(self, stream: Stream, head: Head, frame: Any) -> tuple[str, str] | None:
        """Return code and reason where full validation refuses a batch; None: it does not.

        `wait`: it was not validated by the schema that the stream has under the batch's id, since
        the stream was changed while the batch was on its way; a retry will be.
        """
        if self._streams.get(stream.name) is not stream:
            return None
        verdict = self._shard.verdicts.get(id(frame))
        if verdict is None or verdict.schema != stream.schemas[head.schema_id]:
            return "wait", f"stream '{stream.name}' validates batches, and has not seen this one"
        return (verdict.code, verdict.reason) if verdict.code else None


def needed_setting(command: Publish | Stage) -> str:
    """Return the setting that a batch's stream must have by its command; empty: any stream does.

    Asked before a first publish makes the stream: it would have none of these settings.
    """
    if command.typed:
        return "a schema"
    return "keep" if isinstance(command, Publish) and command.keyed else ""


def check_needed(command: Publish | Stage, stream: Stream) -> None:
    """Raise BrokerRefused unless a stream has the setting that a command needs."""
    if command.typed and not stream.schemas:
        raise BrokerRefused(
            "bad_schema", f"stream '{stream.name}' has no declared schema, of which the batch is"
        )
    if isinstance(command, Publish) and command.keyed:
        stream.needed_keys()


def _other_schema(stream: Stream, head: Head) -> tuple[str, str] | None:
    """Return code and reason where a batch says that it is of none of a stream's schemas."""
    if head.body_kind != ARROW:
        return "bad_schema", (
            f"stream '{stream.name}' has a declared schema: its bodies are Arrow, not "
            f"{BODY_KINDS[head.body_kind]}"
        )
    if head.schema_id not in stream.schemas:
        known = ", ".join(map(str, stream.schemas))
        return "bad_schema", (
            f"the batch is of schema {head.schema_id}, stream '{stream.name}' has {known}"
        )
    return None


CANNOT = "validate = full needs pyarrow where the broker runs: pip install 'malamute-py[arrow]'"
"""Reason with which a broker without pyarrow refuses."""
