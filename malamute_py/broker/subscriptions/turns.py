"""Turns: readers of streams that are to be served, and their reads of history.

Owns the queue of readers, and the readers that wait for a read. The rules: the number of reads
under way is bounded, and none begins while many batches that were read are being matched; links
have their reads in turn, so that a link with 1,000 readers does not hold up a link with one.
Source: docs/design.md, Flow control.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from typing import Final, Generic, TypeVar

from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.ready import ReadRange
from malamute_py.broker.structures.fair_queue import FairQueue

IDLE_READS_MAX: Final = 3
"""Consecutive reads that bring a reader nowhere after which it is ended."""

JOBS_A_READ: Final = 2
"""Jobs of matching that may wait for each read that may be under way. A job holds the batch that
was read: 280 readers that were served alone held 500 MiB."""

Q = TypeVar("Q")
"""An entry of the queue: a reader, or several that are served in one turn."""
R = TypeVar("R")
"""A reader for which a read may be under way."""


class Turns(Generic[Q, R]):
    """Readers of one kind (subscriptions, groups) that wait for a turn or for a read of history.

    A turn serves a reader from memory, or begins a read for it. Where too many reads are under way,
    the reader is starved: it has its turn when one may begin.
    """

    def __init__(self, shard: Shard, jobs: Sized = ()) -> None:
        """jobs: the matching that waits, of batches that were read for these readers."""
        self._shard = shard
        self._jobs = jobs
        self.queue: Final[deque[Q]] = deque()
        self.starved: Final[FairQueue[Link | None, R]] = FairQueue()
        """Readers whose turn came while too many reads were under way, by link; None stands for
        readers of several links."""
        self.queues: Final = (self.queue, self.starved.waiting)
        """While all of them are empty, no reader can be served at once."""
        self._under_way: dict[int, R] = {}
        """Token of a read that the shell has not answered -> its reader."""
        self.reads: list[ReadRange] = []
        """Reads that the shell is to be asked for."""

    @property
    def runnable(self) -> bool:
        """Whether some reader can have its turn now."""
        return bool(self.queue) or (bool(self.starved.waiting) and self.may_read)

    @property
    def may_read(self) -> bool:
        """Whether one more read of history may be under way."""
        most = self._shard.settings.reads_max
        return len(self._under_way) < most and len(self._jobs) < JOBS_A_READ * most

    @property
    def reads_under_way(self) -> int:
        """How many reads of history the shell has not answered."""
        return len(self._under_way)

    def begin(self, reader: R) -> int:
        """Count a read as under way for a reader; returns the token that the answer will bear."""
        token = self._shard.token()
        self._under_way[token] = reader
        self._shard.counters["reads"] += 1
        return token

    def answered(self, token: int) -> R | None:
        """Return the reader that a read was under way for; None: it is a read of another kind."""
        return self._under_way.pop(token, None)
