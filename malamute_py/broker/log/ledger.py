"""The ledger of a stream: how many bytes lie in which range of offsets, and since when.

Owns the counts by which retention decides what a stream may drop. The rule: a ledger has at most
128 pieces, whatever the stream holds, so that it gets coarser and never larger. Source:
docs/design.md, Journal.
"""

from __future__ import annotations

from collections import deque

PIECES_MAX = 128
"""Pieces that a ledger has at most; beyond that neighbours are joined."""


class Ledger:
    """Pieces of a stream: the end of each, its bytes, and when its newest record came.

    The records that were recovered are one piece until split() was told how their bytes lie.
    """

    __slots__ = (
        "_piece_bytes", "_pieces", "asked_ms", "begin", "bytes", "split_asked", "unsplit",
    )  # fmt: skip

    def __init__(self, first: int, next: int, size: int) -> None:
        self._pieces: deque[list[int]] = deque()
        """[offset after the piece, its bytes, time of its newest record or 0: not known]."""
        self._piece_bytes = 1 << 16
        """Bytes from which on a piece is full, and records go into another; grows with the
        stream."""
        self.bytes = size
        self.begin = first
        """Offset at which the first piece begins: that of the stream, or before where a trim left
        some of a piece."""
        self.split_asked = False
        """Whether the index is asked how the bytes of the recovered piece lie."""
        self.unsplit = next > first
        """Whether the first piece is all that was recovered, not split yet."""
        self.asked_ms = 0
        """When the index was last asked for the age of the recovered records."""
        if next > first:
            self._pieces.append([next, size, 0])

    def keep_fine(self, bytes_max: int) -> None:
        """Keep pieces small against the bytes that retention leaves."""
        if bytes_max:
            self._piece_bytes = max(1 << 12, min(self._piece_bytes, bytes_max // 32))

    def add(self, next: int, size: int, time_ms: int) -> None:
        """Count a batch that was appended.

        next: offset after it. time_ms: its append time; 0 would stand for a recovered piece.
        """
        time_ms = time_ms or 1
        self.bytes += size
        pieces = self._pieces
        if pieces:
            last = pieces[-1]
            _, last_bytes, newest_ms = last
            if last_bytes < self._piece_bytes and newest_ms:  # 0: it was recovered.
                last[:] = next, last_bytes + size, time_ms
                return
        pieces.append([next, size, time_ms])
        if len(pieces) > PIECES_MAX:
            self._join()

    def _join(self) -> None:
        """Join neighbouring pieces into pieces of twice the size, so that fewer are kept."""
        self._piece_bytes *= 2
        joined: deque[list[int]] = deque()
        for piece in self._pieces:
            next, size, newest_ms = piece
            last = joined[-1] if joined else None
            # A recovered piece (time 0) is not joined with one whose time is known.
            if (
                last is not None
                and bool(last[2]) == bool(newest_ms)
                and last[1] + size <= self._piece_bytes
            ):
                last[:] = next, last[1] + size, newest_ms
            else:
                joined.append(piece)
        self._pieces = joined

    def split(self, splits: list[tuple[int, int]], first: int) -> None:
        """Replace the piece of all that was recovered by finer ones, as the journal's index says.

        Called once after a start, so that retention by size need not drop all that was recovered
        at once. splits: (offset after a range, its bytes), ascending. first: where they begin.
        """
        if not self.unsplit:  # A trim has taken the recovered piece meanwhile, or it is split.
            return
        self.unsplit = False
        self.begin = first
        recovered_end, recovered_bytes, _ = self._pieces.popleft()
        size = 0
        for next, part in reversed(splits):
            if next <= recovered_end:  # What came after the start has pieces already.
                self._pieces.appendleft([next, part, 0])  # 0: when it came is not known
                size += part
        self.bytes += size - recovered_bytes

    def trimmed(self, first: int) -> None:
        """Uncount the pieces before `first`, which were trimmed."""
        pieces = self._pieces
        while pieces and pieces[0][0] <= first:
            self.begin, size, _ = pieces.popleft()
            self.bytes -= size
            self.unsplit = False
        if not pieces:
            self.bytes = 0

    def bytes_before(self, offset: int) -> int:
        """Bytes before an offset, about: of the piece that it lies in, a share by offsets."""
        size, begin = 0, self.begin
        for next, part, _ in self._pieces:
            if next > offset:
                return size + part * max(0, offset - begin) // (next - begin)
            size += part
            begin = next
        return size

    @property
    def first_piece_end(self) -> int:
        """Offset after the first piece."""
        return self._pieces[0][0] if self._pieces else 0

    @property
    def recovered_end(self) -> int:
        """Offset after the records that were recovered; 0: none of them is left."""
        return next((piece[0] for piece in reversed(self._pieces) if not piece[2]), 0)

    @property
    def coarse(self) -> bool:
        """Whether the first piece was recovered, so that its age is not known."""
        return bool(self._pieces) and not self._pieces[0][2]

    def first_within(self, bytes_max: int, durable: int) -> int | None:
        """Return the least offset from which the rest is within bytes_max; None: all of it is.

        For retention by size, which trims the stream there. The newest piece stays whatever its
        size. durable: offset after the records on the disk; pieces that end after it may be lost
        yet, so they do not count: they push none out, and none of them is the newest.
        """
        left, last = self.bytes, len(self._pieces) - 1  # last: place of the newest piece
        for next, size, _ in reversed(self._pieces):
            if next <= durable:
                break
            left -= size
            last -= 1
        if left <= bytes_max:
            return None
        found: int | None = None
        for place, (next, size, _) in enumerate(self._pieces):
            if left <= bytes_max or place >= last:
                break
            left -= size
            found = next
        return found

    def first_since(self, time_ms: int) -> int | None:
        """Return the least offset whose piece has records of this time on; None: no piece is older.

        A recovered piece has no time: it counts as young.
        """
        found: int | None = None
        for next, _, newest_ms in self._pieces:
            if not newest_ms or newest_ms >= time_ms:
                break
            found = next
        return found
