"""Damaged parts of a ring that may have held anything, and what is known after them.

Owns how much of a stream may have been lost where its last batches should be: no offset that such
a part may have held is given again. A recovery notes parts and streams in the order of the log.
Source: FORMAT.md, section 7.
"""

from __future__ import annotations

CONTROLS = -1
"""Stands for the stream of control batches."""
UNSEEN = -2
"""Stands for a stream of which nothing was found."""


class Doubts:
    """Damaged parts in the order of the log, and where each stream is known for certain."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int]] = []
        """[from, to) in positions of each part."""
        self._sure: dict[int, int] = {}
        """Stream -> number of parts before its last batch."""
        self._begun: dict[int, int] = {}
        """Stream -> number of parts before its first batch."""

    def add(self, from_lsn: int, to_lsn: int) -> None:
        """Note a part that may have held anything."""
        self._parts.append((from_lsn, to_lsn))

    def note_offset_known(self, stream: int) -> None:
        """Note that a batch of the stream, or an index with it, comes after all parts so far.

        It tells the stream's next offset, whatever the damage before it may have held.
        """
        self._sure[stream] = doubts = len(self._parts)
        self._begun.setdefault(stream, doubts)

    def parts_before(self, stream: int) -> int:
        """Return how many parts come before the first batch of a stream; all, if it has none.

        Recovery asks: where there are any, what is missing at the stream's beginning may have been
        in them, and is called damage and not retired.
        """
        return self._begun.get(stream, len(self._parts))

    def bytes_after(self, stream: int, as_of_lsn: int) -> int:
        """Return the bytes of the parts after a stream's last batch: they may have held more of it.

        A recovery has the stream leave out as many offsets as these bytes can have held. as_of_lsn:
        parts before it do not count, for a snapshot or manifest tells the offsets there.
        """
        doubts = self._parts[self._sure.get(stream, 0) :]
        return sum(max(high - max(low, as_of_lsn), 0) for low, high in doubts)

    def end(self) -> int:
        """Return where the last part ends; 0: there is none."""
        return max((high for _, high in self._parts), default=0)
