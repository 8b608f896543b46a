"""Portions: records that one read or one look at the hot window brings a subscription.

Owns the gathering of deliveries until they are sent together. The rule: a portion has a bounded
number of frames. Source: docs/design.md, Flow control.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from malamute_protocol.gather import Gathering, rows_of
from malamute_protocol.stamp import Stamp
from malamute_py.broker.batches.encoding import Encoding
from malamute_py.broker.batches.rows import Mask
from malamute_py.broker.log.stream import StampedBatch
from malamute_py.broker.subscriptions.live import Delivery
from malamute_py.broker.subscriptions.subscription import Subscription

PORTION_FRAMES_MAX = 256
READ_ROWS_MAX = 4_096
"""Rows of one gathered batch; as many as one read of the journal gathers."""
GATHERED_ROWS_MAX = 32
"""Rows of a batch that join those of neighbouring batches; each is taken alone, which is slower
than by column."""
TURN_BATCHES_MAX = 512
"""Batches of the hot window that one turn looks at, selected or not."""


class Portion:
    """Records that one turn gives to one subscription, gathered into few DELIVERs."""

    def __init__(self, delivery: Delivery, sub: Subscription, rows_bytes_max: int) -> None:
        """rows_bytes_max: weight at which one gathered batch is full."""
        self._delivery = delivery
        self._sub = sub
        self._rows_bytes_max = rows_bytes_max
        self._frames: list[Any] = []
        self._run: Any = None
        self._run_from = self._run_to = 0
        self._records = self._bytes = self._next = 0
        self._gathering = Gathering(sub.stream.number)
        self.given = 0
        """Bytes of all deliveries."""

    @property
    def open(self) -> bool:
        """Whether credit and room are left for one more batch."""
        sub, size = self._sub, self._bytes + self._gathering.bytes
        return sub.left_records > self._records and sub.left_bytes > size and sub.link.room > size

    def whole(self, frames: tuple[Any, ...], next: int, records: int, size: int) -> None:
        """Add a batch of which every row goes out."""
        self._close_run()
        self._close_rows()
        self._frames.extend(frames)
        self._count(next, records, size)
        if len(self._frames) >= PORTION_FRAMES_MAX:
            self.flush()

    def stored(self, data: Any, position: int, size: int, next: int, records: int) -> None:
        """Add a stored batch of which every row goes out; neighbours leave as one frame."""
        if self._run is not data or self._run_to != position:
            self._close_run()
            self._close_rows()
            self._run, self._run_from = data, position
        self._run_to = position + size
        self._count(next, records, size)

    def _count(self, next: int, records: int, size: int) -> None:
        """Count what the next DELIVER has, and up to which offset it goes."""
        self._next = next
        self._records += records
        self._bytes += size
        self.given += size

    def _close_run(self) -> None:
        """Make one frame of the neighbouring stored batches."""
        if self._run is not None:
            self._frames.append(memoryview(self._run)[self._run_from : self._run_to])
            self._run = None

    def part(self, encoding: Encoding, next: int) -> None:
        """Add a batch of which some rows go out."""
        self.flush()
        self.given += encoding.bytes
        self._delivery.put(
            self._sub, next, list(encoding.frames), encoding.rows, encoding.count, encoding.bytes
        )

    def rows(self, batch: StampedBatch, next: int, mask: Mask) -> None:
        """Add a batch of which few rows go out, together with those of its neighbours."""
        self._close_run()
        stamp = Stamp.unpack(batch.stamp, verify=False)
        rows = rows_of(stamp, batch.content, np.flatnonzero(mask))
        gathering = self._gathering
        if (
            len(gathering) >= READ_ROWS_MAX
            or gathering.bytes + gathering.weight_of(rows) > self._rows_bytes_max
            or not gathering.takes(rows[-1].offset, stamp.epoch)
        ):
            self._close_rows()
        gathering.add(rows, stamp.epoch, stamp.lsn)
        # The weight of the rows is known when the gathered batch is made.
        self._count(next, len(rows), 0)

    def _close_rows(self) -> None:
        """Make one derived batch of the rows that were gathered."""
        found = self._gathering.take()
        if found is not None:
            self._frames += (found.stamp, found.content)
            self._count(self._next, 0, len(found.stamp) + len(found.content))

    def flush(self) -> None:
        """Send the deliveries that have gathered."""
        self._close_run()
        self._close_rows()
        if self._frames:
            self._delivery.put(
                self._sub, self._next, self._frames, None, self._records, self._bytes
            )
            self._frames = []
            self._records = self._bytes = 0
