"""Rows of several batches of a log that are handed out as one batch of their own.

Owns when such a batch is full. The rule: a search for a rare subject gives few batches of many rows
instead of a batch for each row, and the caller does not wait long for the first of them. Source:
FORMAT.md, section 8.
"""

from __future__ import annotations

from typing import Final

from malamute_protocol.batch import Batch
from malamute_protocol.content import Content
from malamute_protocol.gather import Gathering, Row
from malamute_protocol.stamp import Stamp
from malamute_py.journal.gathering import ROWS_MAX

_BYTES_MAX: Final = 1 << 20
"""Bytes of a batch of gathered rows, about."""
_WITHIN_MAX: Final = 64 << 20
"""Bytes of the log over which rows are gathered: the caller waits for the first of them."""


class GatheredRows:
    """The rows that one reading has gathered and not handed out yet."""

    def __init__(self, stream: int) -> None:
        """stream: its number in the files."""
        self._rows = Gathering(stream)
        self._first_lsn = self._last_lsn = 0
        """Positions in the ring of the batches that the first and the last row lay in."""

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._rows)

    @property
    def full(self) -> bool:
        """Whether the rows are to become a batch before more are gathered."""
        return (
            len(self._rows) >= ROWS_MAX
            or self._rows.bytes >= _BYTES_MAX
            or self._last_lsn - self._first_lsn >= _WITHIN_MAX
        )

    def takes(self, offset: int, epoch: int) -> bool:
        """Whether rows up to an offset, of an epoch, can be of one batch with those gathered."""
        return self._rows.takes(offset, epoch)

    def add(self, rows: list[Row], epoch: int, lsn: int) -> None:
        """Add rows of one batch, which fit by takes(). epoch, lsn: of that batch."""
        if not len(self._rows):
            self._first_lsn = lsn
        self._last_lsn = lsn
        self._rows.add(rows, epoch, lsn)

    def batch(self) -> Batch | None:
        """Return the rows as one derived batch, and begin anew; None: there are none."""
        found = self._rows.take()
        return None if found is None else Batch(Stamp.unpack(found.stamp), Content(found.content))
