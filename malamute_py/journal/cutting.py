"""Cutting: a bounded read in parts of about equal size.

Owns where a plan is cut. The rule: an entry of the index is never cut. Source: SPEC.md, PLAN_READ.
"""

from __future__ import annotations

from malamute_py.journal.types import Split


class Cutter:
    """Cuts a walk over entries into splits."""

    def __init__(self, start: int, bytes_max: int) -> None:
        """start: offset of the first record. bytes_max: bound of all splits; 0: none."""
        self.position = start
        self.total = 0
        self._start = start
        self._bytes_max = bytes_max if bytes_max > 0 else 1 << 62
        self._entries: list[tuple[int, int]] = []

    def full(self) -> bool:
        """Whether what was counted has reached the bound."""
        return self.total >= self._bytes_max

    def add(self, weight: int, after: int) -> None:
        """Count an entry that ends before an offset; an entry that was counted is passed over.

        weight: its bytes; 0: nothing in it is selected.
        """
        if after <= self.position:
            return
        self.position = after
        self.total += weight
        self._entries.append((weight, after))

    def splits(self, stop: int, split_bytes: int, one_in: int) -> tuple[Split, ...]:
        """Return the splits up to `stop`, each of about `split_bytes` if any; 0: a single one.

        one_in: of so many bytes of entries about one is wanted.
        """
        most = split_bytes * one_in if split_bytes > 0 else 1 << 62
        found: list[Split] = []
        begin, size = self._start, 0
        for weight, after in self._entries:
            size += weight
            if size >= most:
                found.append(Split(begin, after, -(-size // one_in)))
                begin, size = after, 0
        if stop > begin:
            found.append(Split(begin, stop, -(-size // one_in)))
        return tuple(found)
