"""One subscription: its selection of a stream, and its position there.

Owns every fact about one subscription. A live subscription takes each batch as it comes; any other
one lags, and is served on demand. The rules: `covered` is the offset that the client was told,
`position` the offset that the selection has come to, and a live subscription stands at the tail
without being touched. Source: docs/design.md, Flow control.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from malamute_protocol.commands import Subscribe
from malamute_py.broker.links.link import Link, Owner, Receiver
from malamute_py.broker.log.stream import NEVER

if TYPE_CHECKING:
    import numpy as np

    from malamute_py.broker.log.stream import Stream
    from malamute_py.broker.subscriptions.matching import PreparedRows
    from malamute_py.matcher import SubjectRows

VISIBILITIES: Final = ("live", "durable", "committed")


class Subscription(Receiver):
    """One subscription of one link: facts, which those that serve it read and change."""

    __slots__ = (
        "careful",
        "client_time",
        "durable",
        "everything",
        "gathered",
        "idle_reads",
        "live",
        "pattern",
        "pattern_bytes",
        "pattern_number",
        "plain",
        "position",
        "prepared",
        "queued",
        "reading",
        "rows",
        "started",
        "stop",
        "stream",
        "turns_alone",
        "wanted",
        "wanted_to",
        "whole",
    )

    stream: Stream

    def __init__(self, owner: Owner, link: Link, command: Subscribe) -> None:
        super().__init__(
            owner, link, command.subscription, command.credit_records, command.credit_bytes
        )
        self.pattern = command.pattern
        self.pattern_bytes = 0
        self.pattern_number = -1
        """Number of the pattern in the audience's index, which equal patterns share."""
        self.everything = False
        """Whether every header matches: no header is looked at."""
        self.client_time = command.client_time
        """Window (from, to) of the client times of records that it takes; None: of any."""
        self.whole = command.whole
        """Whether it takes whole batches with a bitmap, and neither extracted nor gathered rows."""
        self.gathered = command.gathered and not command.whole
        """Whether it takes rows of several batches in one."""
        self.durable = command.visibility != 0
        """Whether it sees only what no power loss can take back."""
        self.stop = NEVER if command.end < 0 else command.end
        """Offset at which it ends."""
        self.position = 0
        """Offset to which it has come on demand; while it is live, the position stands still."""
        self.wanted: np.ndarray[Any, np.dtype[np.int64]] | None = None
        """The only offsets wanted before `wanted_to`, ascending; for last per subject."""
        self.wanted_to = 0
        self.live = False
        """Whether it takes batches as they come; otherwise it lags, and has its turns."""
        self.started = False
        """Whether its stream and position are known, and it has not ended."""
        self.queued = False
        """Whether it waits for its turn on demand."""
        self.careful = 0
        """Number of batches that it is still to be given one by one, read without a selection: one
        of them has caused an error."""
        self.turns_alone = 0
        """Number of turns in which it is not to be in a cohort."""
        self.reading = 0
        """Token of the one read of history that is under way; 0: none."""
        self.rows: SubjectRows | None = None
        """Rows that its pattern selects, by header table; kept while it reads history."""
        self.idle_reads = 0
        """Consecutive reads that brought it nowhere."""
        self.prepared: PreparedRows | None = None
        """Rows of its next batch, found over several turns; None: there are none."""
        self.plain = False
        """Whether it takes batches as its selection group does: no window, no end, not always
        whole."""

    @property
    def tail(self) -> int:
        """Offset after the newest record that it may see."""
        return self.stream.visible_next if self.durable else self.stream.next

    @property
    def place(self) -> int:
        """Offset before which every record was delivered or not selected: the next COVER's end."""
        if self.live:
            audience, tail = self.stream.audience, self.tail
            if audience.late:
                # A late batch was not delivered, unless the subscription had read it on demand
                # before it went live: then `position` is ahead.
                tail = max(self.position, audience.late_from(self.durable, tail))
            return min(tail, self.stop)
        return self.position

    @property
    def able(self) -> bool:
        """Whether it may be given something: it has credit left, and its link room for bytes."""
        return self.started and self.left_records > 0 and self.left_bytes > 0 and self.link.room > 0

    @property
    def joins(self) -> bool:
        """Whether it may be in a cohort, which gives each member some rows in a gathered batch."""
        return (
            self.plain
            and self.gathered
            and not self.everything
            and self.wanted is None  # Otherwise its rows are named by offset, not by pattern.
            and not self.careful
            and self.stream.keys is None  # Newest records may have moved: see moved.py.
        )


SUBSCRIBE: Final = 12
"""Number of the command, for refusals."""
