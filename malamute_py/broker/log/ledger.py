"""The ledger of a stream: how many bytes lie in which range of offsets, and since when.

Owns the counts by which retention decides what a stream may drop. The rule: a ledger has at most
128 pieces, whatever the stream holds, so that it gets coarser and never larger. Source:
docs/design.md, Journal.

A piece is a range of offsets with its bytes and the time of its newest record. What a start found
in the journal is one piece without a time, until the index tells how its bytes lie.
"""

from __future__ import annotations

from collections import deque

import msgspec

PIECES_MAX = 128
"""Pieces that a ledger has at most; beyond that neighbours are joined."""


class _Piece(msgspec.Struct, eq=False, gc=False):
    """A range of offsets: it begins where the piece before it ends."""

    end: int
    """Offset after it."""
    bytes: int
    newest_ms: int
    """Time of its newest record; 0: not known, since a start found it in the journal."""


class Ledger:
    """Pieces of a stream: the end of each, its bytes, and when its newest record came.

    The records that were recovered are one piece until split() was told how their bytes lie.
    """

    __slots__ = (
        "_piece_bytes", "_pieces", "asked_ms", "begin", "bytes", "split_asked", "unsplit",
    )  # fmt: skip

    def __init__(self, first: int, next: int, size: int) -> None:
        self._pieces: deque[_Piece] = deque()
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
            self._pieces.append(_Piece(next, size, newest_ms=0))

    def keep_fine(self, bytes_max: int) -> None:
        """Keep pieces to a 32nd of the bytes that retention leaves, as it drops whole pieces.

        Called when the stream's settings take effect. bytes_max: the stream's `max_bytes`; 0: it
        has none.
        """
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
            if last.bytes < self._piece_bytes and last.newest_ms:  # 0: it was recovered.
                last.end = next
                last.bytes += size
                last.newest_ms = time_ms
                return
        pieces.append(_Piece(next, size, time_ms))
        if len(pieces) > PIECES_MAX:
            self._join()

    def _join(self) -> None:
        """Join neighbouring pieces into pieces of twice the size, as there are too many."""
        self._piece_bytes *= 2
        joined: deque[_Piece] = deque()
        for piece in self._pieces:
            last = joined[-1] if joined else None
            # A recovered piece (time 0) is not joined with one whose time is known.
            if (
                last is not None
                and bool(last.newest_ms) == bool(piece.newest_ms)
                and last.bytes + piece.bytes <= self._piece_bytes
            ):
                last.end = piece.end
                last.bytes += piece.bytes
                last.newest_ms = piece.newest_ms
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
        recovered = self._pieces.popleft()
        size = 0
        for next, part in reversed(splits):
            if next <= recovered.end:  # What came after the start has pieces already.
                self._pieces.appendleft(_Piece(next, part, newest_ms=0))
                size += part
        self.bytes += size - recovered.bytes

    def trimmed(self, first: int) -> None:
        """Uncount the pieces that end before `first`, since the journal has trimmed the stream."""
        pieces = self._pieces
        while pieces and pieces[0].end <= first:
            piece = pieces.popleft()
            self.begin = piece.end
            self.bytes -= piece.bytes
            self.unsplit = False  # The recovered piece was the first.
        if not pieces:
            self.bytes = 0

    def bytes_before(self, offset: int) -> int:
        """Bytes before an offset, about, for STREAM_INFO: a share of the piece that it lies in."""
        size, begin = 0, self.begin
        for piece in self._pieces:
            if piece.end > offset:
                return size + piece.bytes * max(0, offset - begin) // (piece.end - begin)
            size += piece.bytes
            begin = piece.end
        return size

    @property
    def first_piece_end(self) -> int:
        """Offset after the first piece."""
        return self._pieces[0].end if self._pieces else 0

    @property
    def recovered_end(self) -> int:
        """Offset after the records that were recovered; 0: none of them is left."""
        return next((piece.end for piece in reversed(self._pieces) if not piece.newest_ms), 0)

    @property
    def coarse(self) -> bool:
        """Whether the first piece was recovered, so that its age is not known."""
        return bool(self._pieces) and not self._pieces[0].newest_ms

    def first_within(self, bytes_max: int, durable: int) -> int | None:
        """Return the least offset from which the rest is within bytes_max; None: all of it is.

        For retention by size, which trims the stream there. The newest piece stays whatever its
        size. durable: offset after the records on the disk; pieces that end after it may be lost
        yet, so they do not count: they push none out, and none of them is the newest.
        """
        left, last = self.bytes, len(self._pieces) - 1  # last: place of the newest piece
        for piece in reversed(self._pieces):
            if piece.end <= durable:
                break
            left -= piece.bytes
            last -= 1
        if left <= bytes_max:
            return None
        found: int | None = None
        for place, piece in enumerate(self._pieces):
            if left <= bytes_max or place >= last:
                break
            left -= piece.bytes
            found = piece.end
        return found

    def first_since(self, time_ms: int) -> int | None:
        """Return the least offset whose piece has records of this time on; None: no piece is older.

        For retention by age. A recovered piece has no time: it counts as young.
        """
        found: int | None = None
        for piece in self._pieces:
            if not piece.newest_ms or piece.newest_ms >= time_ms:
                break
            found = piece.end
        return found
