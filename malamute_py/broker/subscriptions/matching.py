"""Matching in slices: headers never seen before, matched between other work.

Owns the share of a turn of the loop that matching takes. To match is to find which patterns select
a header. The rules: a few headers are matched at once; what is not done within the turn's share
waits in a queue of jobs, each of which has a piece of every later turn, so that 65,536 new headers
against a stream full of regular expressions hold up the records of that stream and no others; a job
is in steps, and no step is longer than one look of one set of expressions for one key. The core has
no clock: the shell's meter measures the steps. Source: ARCHITECTURE.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.header import TABLE_BYTES_MAX, Header, HeaderTable, Remains, TableReading
from malamute_protocol.limits import UNCHECKED
from malamute_py.broker.batches.rows import Mask
from malamute_py.broker.context import Shard, always
from malamute_py.matcher.kinds import Predicate

PIECE_SHARE: Final = 4
"""Part of a turn's share that a job has before the next job has its piece."""


AT_ONCE_MAX: Final = 1_024
"""Headers of a batch that are matched for one reader in one go, without expressions."""
MATCHING: Final = -1
"""Stands for a read's token while a reader's selection of a batch is matched."""


FREED_A_TURN: Final = 4_096
"""Entries of large header tables that are freed in a turn, which takes up to 0.5 ms."""


Failed: TypeAlias = Callable[[Exception], None]


class Job(Protocol):
    """Work that Matching does in steps, between which other work of the loop may come."""

    def run(self, more: Callable[[], bool]) -> bool:
        """Go on until all is done (True) or `more`, asked after each step, says no."""


class SharedReading:
    """The reading of a large header table, shared by all readers that need the table."""

    __slots__ = ("__weakref__", "table")

    def __init__(self, table: TableReading) -> None:
        self.table = table


class PreparedRows(NamedTuple):
    """The rows of one batch that a subscription selects, found in slices."""

    base: int
    rows: Mask
    table: HeaderTable
    """The batch's header table, kept so that it is not read again when the batch comes next."""


class Choosing:
    """The headers of a batch that one pattern selects, found in steps (a Job)."""

    def __init__(
        self,
        matches: Predicate,
        content: Content,
        number_of: Callable[[Header], int] | None = None,
        reading: SharedReading | None = None,
    ) -> None:
        """matches: of the pattern, whether it selects a header.

        number_of: its answer for each header is noted in `numbers`; None: nothing is noted.
        reading: of the header table, held here so that other readers of the batch find it.
        """
        self._reading = reading
        self.numbers: list[int] = []
        """The answer of number_of for each header."""
        self._content = content
        self._chosen = bytearray()
        # The steps do not hold this object, so that all is free once no reader waits for it.
        self._steps = self._match_all(matches, content, number_of, self._chosen, self.numbers)

    def run(self, more: Callable[[], bool]) -> bool:
        """Go on until all is done (True) or `more`, asked after each step, says no."""
        # The generator stands where it was left: the next call goes on there.
        return all(more() for _ in self._steps)

    @property
    def chosen(self) -> Mask:
        """A mask of the selected headers, once all is done."""
        return np.frombuffer(self._chosen, np.bool_)

    @property
    def rows(self) -> Mask:
        """A mask of the selected rows, once all is done."""
        _, codes = self._content.headers()
        if codes is None:  # All rows have the first header.
            return np.full(self._content.head.count, self.chosen[0])
        rows: Mask = self.chosen[codes]
        return rows

    @staticmethod
    def _match_all(
        matches: Predicate,
        content: Content,
        number_of: Callable[[Header], int] | None,
        chosen: bytearray,
        numbers: list[int],
    ) -> Iterator[None]:
        """Match one header a step; `chosen` gets whether it is selected, `numbers` its number.

        The header table, if it is large, is read in steps before.
        """
        yield from content.make_headers()
        for header in content.headers()[0]:
            chosen.append(matches(*header))
            if number_of is not None:
                numbers.append(number_of(header))
            yield


class Matching:
    """The jobs of one core, and what is left of the present turn's share for them, in time.

    A reader has its job run at once, and leaves it to later() where the share does not last.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.queue: Final[deque[tuple[Job, Callable[[], None], Callable[[], bool], Failed]]] = (
            deque()
        )
        """Each job with three functions: one to call when it is done, one that returns whether a
        reader still waits, and one to call with an error."""
        self.remains: Final = Remains()
        """Entries of large header tables that are not needed any more."""
        self._meter = shard.settings.meter
        """The shell's clock, in nanoseconds; None: there is none."""
        self._share = shard.settings.matching_share
        """Nanoseconds that matching may take of each turn."""
        self._left = self._share
        """Nanoseconds that are left of it in this turn."""
        self.sliced = self._meter is not None
        """Whether there is a meter: without one everything is matched at once."""
        self._readings: WeakValueDictionary[tuple[bytes, int], SharedReading] = (
            WeakValueDictionary()
        )
        """The readings of large header tables, by stream and the batch's first offset."""

    def refill(self) -> None:
        """Give matching its share of a new turn of the loop."""
        self._left = self._share

    def run(self, job: Job) -> bool:
        """Work at a job as long as this turn's share lasts; True: it is done."""
        return self._run(job, self._left)

    def read(self, content: Content) -> bool:
        """Read a content's header table as long as this turn's share lasts; True: it is done.

        Raises BatchError: the content cannot have such a table.
        """
        reading = content.reading(self._shard.settings.limits, remains=self.remains)
        if reading is None:  # The table is small, or was read.
            return True
        return self._run(reading, self._left)

    def reading(self, uuid: bytes, base: int, content: Content) -> SharedReading | None:
        """Have a content use the one reading of its large header table that all readers share.

        Readers may have content objects of their own over the same batch. The reading is kept only
        as long as some caller holds what is returned. None: the table is quick to read, or was
        read. uuid, base: of the stream and the batch.
        """
        own = content.reading(UNCHECKED, outlined=False, remains=self.remains)
        if own is None:
            return None
        shared = self._readings.setdefault((uuid, base), SharedReading(own))
        content.adopt(shared.table)
        return shared

    def later(
        self, job: Job, then: Callable[[], None], wanted: Callable[[], bool], failed: Failed
    ) -> None:
        """Go on with a job in later turns, since this turn's share is used up.

        then: called when the job is done, or not wanted any more: it has to look which. wanted:
        whether some reader still waits. failed: called instead with the exception of the job.
        """
        self._shard.counters["matching_put_off"] += 1
        self.queue.append((job, then, wanted, failed))

    def work(self) -> None:
        """Give jobs their pieces by turns, until the turn's share is used up; called in each turn.

        Some of the large header tables that are not needed any more are freed, too.
        """
        self.remains.free(FREED_A_TURN)
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
        """Run a job for at most this many nanoseconds of the turn's share; True: it is done."""
        meter = self._meter
        if meter is None:
            return job.run(always)
        if most <= 0:
            return False
        begun = meter()
        done = job.run(lambda: meter() - begun < most)
        self._left -= meter() - begun
        return done


def is_quick(content: Content) -> bool:
    """Whether a batch's headers are few enough to be matched in one go, if no pattern is slow."""
    head = content.head
    # A record has one header: 100 records with an id each have 100 headers, whatever the tables
    # could make.
    headers = min(head.count, head.subjects_count * max(1, head.fieldmaps_count))
    return headers <= AT_ONCE_MAX and head.subjects_bytes + head.fieldmaps_bytes <= TABLE_BYTES_MAX
