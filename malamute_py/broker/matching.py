"""Matching in slices: headers never seen before, looked at between other things.

Owns how much of a turn of the loop matching takes. The rules: what costs little is matched at
once; what is not done within the turn's share waits in a queue of jobs, each of which has a piece
of every later turn, so that 65,536 new headers against a stream full of regular expressions hold
up the records of that stream and nothing else; a job is in steps, and no step is longer than one
look of one set of expressions for one key. The core has no clock: how much a step has cost the
shell's meter says. Source: ARCHITECTURE.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.header import Header
from malamute_py.broker.shard import Shard
from malamute_py.matcher.kinds import Predicate

PIECE_SHARE: Final = 4
"""A job has this part of a turn's share before the next has its piece."""


AT_ONCE_MAX: Final = 1_024
"""Headers of a batch that are matched for one reader in one go, without expressions."""
MATCHING: Final = -1
"""In the place of the token of a reader's read: what it selects of a batch is being matched."""


Failed: TypeAlias = Callable[[Exception], None]


class Job(Protocol):
    """Work in steps."""

    def run(self, more: Callable[[], bool]) -> bool:
        """Go on until all is done (True) or `more`, asked after each step, says no."""


class Choosing:
    """Which headers one pattern selects, found in steps."""

    def __init__(self, matches: Predicate, headers: Sequence[Header]) -> None:
        self.chosen = np.zeros(len(headers), np.bool_)
        self._steps = self._all(matches, headers)

    def run(self, more: Callable[[], bool]) -> bool:
        """See Job."""
        return all(more() for _ in self._steps)

    def _all(self, matches: Predicate, headers: Sequence[Header]) -> Iterator[None]:
        for place, (keys, fields) in enumerate(headers):
            self.chosen[place] = matches(keys, fields)
            yield


class Matching:
    """The jobs of one core, and what is left of the turn for them."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.queue: Final[deque[tuple[Job, Callable[[], None], Callable[[], bool], Failed]]] = (
            deque()
        )
        """What is to be gone on with, what to call then, whether a reader still waits, and what to
        call when it raises."""
        self._meter = shard.settings.meter
        self._share = shard.settings.matching_share
        self._left = self._share
        self.sliced = self._meter is not None
        """Whether there is a meter: without one everything is matched at once."""

    def refill(self) -> None:
        """A turn of the loop begins."""
        self._left = self._share

    def run(self, job: Job) -> bool:
        """Work at a job as long as this turn's share lasts; True: it is done."""
        return self._run(job, self._left)

    def read(self, content: Content) -> bool:
        """Read a content's header table as long as this turn's share lasts; True: it is done.

        Raises BatchError: the content says that it cannot have one.
        """
        reading = content.reading(self._shard.settings.limits)
        return reading is None or self._run(reading, self._left)

    def later(
        self, job: Job, then: Callable[[], None], wanted: Callable[[], bool], failed: Failed
    ) -> None:
        """Go on with a job in later turns; `then` is called when it is done or not wanted.

        failed: called instead with what it raised.
        """
        self._shard.counters["matching_put_off"] += 1
        self.queue.append((job, then, wanted, failed))

    def work(self) -> None:
        """Give each job its piece, until the turn's share is used up."""
        piece = max(1, self._share // PIECE_SHARE)
        while self.queue and self._left > 0:
            job, then, wanted, failed = self.queue.popleft()
            try:
                done = not wanted() or self._run(job, min(piece, self._left))
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                failed(error)
                continue
            if done:
                then()
            else:
                self.queue.append((job, then, wanted, failed))

    def _run(self, job: Job, most: int) -> bool:
        meter = self._meter
        if meter is None:
            return job.run(_always)
        if most <= 0:
            return False
        begun = meter()
        done = job.run(lambda: meter() - begun < most)
        self._left -= meter() - begun
        return done


def _always() -> bool:
    return True
