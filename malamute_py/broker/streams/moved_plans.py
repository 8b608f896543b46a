"""Plans of what has moved: the part of a bounded read that lies in copies of newest records.

PLAN_READ asks how much a reader such as Spark would read, and for ranges of offsets of about equal
bytes (splits) that it can share among its tasks. In a stream with keys, newest records whose
segment was given up have moved: they lie in copies, and their offsets before the stream's first
one. Owns the splits and counts of these records; the journal plans the rest. The rules: one
question looks at a bounded number of subjects; a plan that ends early says so, and is asked again.
Source: SPEC.md, PLAN_READ.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from malamute_protocol.commands import PlanRead
from malamute_py.broker.log.newest import Keys
from malamute_py.matcher import asks_subjects_only, compile_pattern

LOOKED_AT = 4_000
"""Subjects that one plan compares with a pattern, to count those that it selects."""
LOOKED_AT_SLOWLY = 100
"""Subjects that one plan compares with a pattern for which one subject may take long."""
PIECES = 2_000
"""Pieces that one plan looks at, about, where it compares nothing."""
PIECE_MAX = 512
"""Records that are added to a plan at once, at most."""
_NO_CAP = 1 << 62
"""In place of a cap that a command leaves at 0."""


class MovedPart(NamedTuple):
    """The part of a plan over records that have moved."""

    to: int
    """Offset before which everything that has moved is in the plan."""
    splits: list[list[int]]
    """[first offset, end, bytes] of each split, in their order."""
    records: int
    bytes: int
    ended: bool
    """Whether a cap, or the bound of one question, ended the plan here."""


class _Cutter:
    """Cuts records into splits, in the order of their offsets."""

    def __init__(self, start: int, command: PlanRead) -> None:
        self.to = start
        """Offset before which records were added."""
        self.splits: list[list[int]] = []
        self.records = self.bytes = 0
        self._split_start = start
        self._split_size = 0
        self._split_bytes = command.split_bytes if command.split_bytes > 0 else _NO_CAP
        self._bytes_max = command.bytes_max if command.bytes_max > 0 else _NO_CAP
        self._records_max = command.records_max if command.records_max > 0 else _NO_CAP

    @property
    def left(self) -> int:
        """Records that the command's cap of records still admits."""
        return self._records_max - self.records

    @property
    def full(self) -> bool:
        """Whether a cap of the command is reached: of records, or of bytes."""
        return self.left <= 0 or self.bytes >= self._bytes_max

    def add(self, after: int, records: int, size: int) -> None:
        """Add `records` selected records of `size` bytes in all, which end before `after`."""
        self.to = after
        self.records += records
        self.bytes += size
        self._split_size += size
        if self._split_size >= self._split_bytes:
            self.cut(after)

    def cut(self, to: int) -> None:
        """End the present split at an offset; what is added from now on is of the next one."""
        if to > self._split_start:
            self.splits.append([self._split_start, to, self._split_size])
        self.to = self._split_start = to
        self._split_size = 0


def plan_moved(keys: Keys, start: int, end: int, command: PlanRead) -> MovedPart:
    """Plan the records of [start, end) that have moved, for a PLAN_READ.

    Subjects are compared with the pattern only where a cap of records asks for it, since that takes
    long; otherwise all records count, and the plan is only larger than need be. The index of keys
    knows neither fields nor client times: records that a pattern may select by these count, too.
    """
    cutter = _Cutter(start, command)
    if command.records_max > 0 and command.pattern != ["all"]:
        whole = _take_selected(keys, start, end, command, cutter)
    else:
        whole = _take_all(keys, start, end, command, cutter)
    # The last split reaches to the end of the range, or to where the plan stopped.
    cutter.cut(end if whole else cutter.to)
    return MovedPart(cutter.to, cutter.splits, cutter.records, cutter.bytes, not whole)


def _take_all(keys: Keys, start: int, end: int, command: PlanRead, cutter: _Cutter) -> bool:
    """Add all records that have moved to the plan; False: a cap of the command ended that early.

    Records are added by pieces, each with the average size. A piece is small enough that splits and
    caps can be kept to, and large enough that there are not too many.
    """
    average = keys.average
    piece = PIECE_MAX
    for size in (command.split_bytes, command.bytes_max):
        if size > 0:
            piece = min(piece, max(1, size // (2 * average)))
    piece = max(piece, keys.moved_count // PIECES)
    for run in _runs(keys, start, end, piece):
        some = run[: cutter.left]
        cutter.add(some[-1] + 1, len(some), len(some) * average)
        if cutter.full:
            return False
    return True


def _take_selected(keys: Keys, start: int, end: int, command: PlanRead, cutter: _Cutter) -> bool:
    """Add records that have moved and that the pattern may select to the plan.

    False: a cap of the command, or the number of subjects that are looked at, ended that early.
    """
    compiled = compile_pattern(command.pattern)
    subject_decides = asks_subjects_only(command.pattern)
    left = LOOKED_AT_SLOWLY if compiled.slow else LOOKED_AT
    for run in _runs(keys, start, end, PIECE_MAX):
        for offset in run:
            if not left:
                return False
            left -= 1
            # Only subjects are in memory: a pattern on fields may select any record.
            selected = not subject_decides or compiled.matches((keys.moved_subject(offset),), ())
            size = keys.size_of_moved(offset) if selected else 0
            cutter.add(offset + 1, int(selected), size)
            if cutter.full:
                return False
    return True


def _runs(keys: Keys, start: int, end: int, most: int) -> Iterator[list[int]]:
    """Yield the offsets in [start, end) of records that have moved, ascending, in pieces.

    most: of one piece: splits and caps of a plan, which take whole pieces, are exact enough then.
    """
    for run in keys.moved_runs(start):
        stop = len(run) if run[-1] < end else bisect_left(run, end)
        for first in range(0, stop, most):
            yield run[first : min(stop, first + most)]
        if stop < len(run):  # The rest of this run, and all later ones, lie after the end.
            return


def fewer(splits: list[list[int]], most: int) -> list[list[int]]:
    """Join neighbouring splits [begin, end, bytes] until a plan has no more than `most`."""
    while len(splits) > most:
        joined: list[list[int]] = []
        for at in range(0, len(splits), 2):
            begin, end, size = splits[at]
            if at + 1 < len(splits):  # Of an odd number, the last one stays alone.
                _, end, more = splits[at + 1]
                size += more
            joined.append([begin, end, size])
        splits = joined
    return splits
