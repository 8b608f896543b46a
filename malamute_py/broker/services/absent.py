"""Absent holders: the requests that a worker held when it lost a link.

Owns what an absent holder may still end: its answer may have been on its way. The requests wait for
any worker again meanwhile. A batch is named by its base, its first number. The rules: an entry
goes when its batch leaves the queue, so that the queue bounds all of them; of one batch as many
holders are remembered as it has rows, ABSENT_MIN at least, and the oldest is forgotten first.
Source: SPEC.md, section 4.5.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

ABSENT_MIN: Final = 2
"""Absent holders that are remembered of each batch, also if it has fewer rows."""


class AbsentHolder:
    """Requests of one service that one holder held, by all its lost links."""

    __slots__ = ("bases", "rows")

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        """Base of a batch -> the rows of it that the holder had."""
        self.bases: list[int] = []
        """Keys of `rows`, ascending."""

    def rows_at(self, number: int) -> tuple[int, int]:
        """Return (base, rows) of the last batch that begins at or before a request's number.

        Asked for a request that a late answer names. rows: those that the holder had; 0: it had
        nothing that begins so early. The caller checks that the number lies in the batch.
        """
        at = bisect_right(self.bases, number) - 1
        base = self.bases[at] if at >= 0 else -1
        return base, self.rows.get(base, 0)


class AbsentHolders:
    """Absent holders of one service: noted as links end, and asked when an answer comes late."""

    __slots__ = ("by_base", "by_holder")

    def __init__(self) -> None:
        self.by_holder: dict[str, AbsentHolder] = {}
        """Holder -> what it held by all its lost links."""
        self.by_base: dict[int, list[str]] = {}
        """Base of a batch -> the holders that had rows of it, the newest last."""

    def remember(self, holder: str, had: Sequence[tuple[int, int, int]]) -> None:
        """Note what a holder had when its link was lost.

        had: (base of a batch, rows held, number of rows of the batch), ascending. Of each batch the
        newest holders are kept: as many as it has rows, at least ABSENT_MIN.
        """
        if not had:
            return
        known = self.by_holder.get(holder)
        if known is None:
            known = self.by_holder[holder] = AbsentHolder()
        bases, rows = known.bases, known.rows
        first_base, _, _ = had[0]
        ordered = not bases or bases[-1] < first_base  # All of `had` comes after what is known.
        for base, some, _ in had:
            if base not in rows:
                bases.append(base)
                self.by_base.setdefault(base, []).append(holder)
            rows[base] = rows.get(base, 0) | some
        if not ordered:
            bases.sort()
        for base, _, count in had:
            holders = self.by_base[base]
            if len(holders) > max(ABSENT_MIN, count):
                self._forget(holders[0], base)  # The one that was noted first.

    def forget(self, base: int) -> None:
        """Forget who had rows of a batch: it has left the queue."""
        for holder in tuple(self.by_base.get(base, ())):
            self._forget(holder, base)

    def _forget(self, holder: str, base: int) -> None:
        """Forget that a holder had rows of a batch, in `by_holder` and in `by_base`."""
        known, holders = self.by_holder[holder], self.by_base[base]
        del known.rows[base]
        del known.bases[bisect_left(known.bases, base)]
        if not known.rows:
            del self.by_holder[holder]
        holders.remove(holder)
        if not holders:
            del self.by_base[base]
