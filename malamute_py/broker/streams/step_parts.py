"""Step parts: what a batch does to its stream while it is a part of a step.

A step is commands that happen together or not at all; a part is what one of them adds. An effect of
a part is called when the step is taken, and when the log has it or refuses it. Owns the effects of
a batch: the body kind that a stream's first batch settles, and the records that a cursor of the
same step may move to. Source: docs/design.md (Promises).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from malamute_py.broker.log.steps import Effect, Part
from malamute_py.broker.log.stream import Stream


def unsettle(stream: Stream, *_: Any) -> None:
    """Go back to the body kind that the log has, mostly none: it refused that of a first batch."""
    stream.settle(stream.settings)


class Settling(Effect):
    """The body kind of a stream whose first batch is a part of a step."""

    settle_kind: Callable[[Stream, int], None]
    """Publishing.settle_kind."""
    stream: Stream
    kind: int

    def taken(self, part: Part) -> None:
        """Settle the body kind once the step is taken: batches after it are held to the kind."""
        self.settle_kind(self.stream, self.kind)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Go back to the body kind that the log has, since it refused the step."""
        unsettle(self.stream)


class Coming(Effect):
    """Records of a step on their way to a stream."""

    part_appended: Callable[[Part, int], None]
    """Publishing.part_appended."""
    stream: Stream
    count: int

    def taken(self, part: Part) -> None:
        """Count the records as coming, so that a cursor in the same step may move to them."""
        self.stream.coming += self.count

    def appended(self, part: Part, end_lsn: int) -> None:
        """Let the batch take effect in its stream, as one that was published alone does."""
        self.part_appended(part, end_lsn)
        self.stream.coming -= self.count

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """End the count of the records as coming: the journal refused the step."""
        self.stream.coming -= self.count
