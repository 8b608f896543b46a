"""Portions: records that one read or one look at the hot window brings a subscription.

Owns the gathering of deliveries until they are sent together. Batches of which every row goes out
share a DELIVER; few rows of several batches are put into one batch (gathered); more rows of a batch
leave by themselves. The rule: a portion has a bounded number of frames. Source: docs/design.md,
Flow control.
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
"""Frames of one DELIVER from which on it is sent."""
READ_ROWS_MAX = 4_096
"""Rows of one gathered batch; as many as one read of the journal gathers."""
GATHERED_ROWS_MAX = 32
"""Rows of a batch that join those of neighbouring batches; each is taken alone, which is slower
than by column."""
TURN_BATCHES_MAX = 512
"""Batches of the hot window that one turn looks at, selected or not."""


class Portion:
    """Records that one turn gives to one subscription, gathered into few DELIVERs.

    The turn adds batch after batch, each in the way that suits it, and calls `flush` at its end.
    """

    def __init__(self, delivery: Delivery, sub: Subscription, rows_bytes_max: int) -> None:
        """rows_bytes_max: weight at which one gathered batch is full."""
        self._delivery = delivery
        self._sub = sub
        self._rows_bytes_max = rows_bytes_max
        self._frames: list[Any] = []
        """Frames of the next DELIVER."""
        self._run: Any = None
        """Bytes that the journal has read, of which neighbouring batches wait to be one frame."""
        self._run_from = self._run_to = 0
        """Positions in these bytes between which those batches lie."""
        self._records = self._bytes = 0
        """Records and bytes of the next DELIVER."""
        self._next = 0
        """Offset up to which it will cover."""
        self._gathering = Gathering(sub.stream.number)
        """Rows that wait to be put into one derived batch."""
        self.given = 0
        """Bytes of all deliveries."""

    @property
    def takes_more(self) -> bool:
        """Whether credit and room are left for one more batch: else the turn ends."""
        sub, size = self._sub, self._bytes + self._gathering.bytes
        return sub.left_records > self._records and sub.left_bytes > size and sub.link.room > size

    def add_whole(self, frames: tuple[Any, ...], next: int, records: int, size: int) -> None:
        """Add a batch of the hot window of which every row goes out, by its stamp and content.

        next: offset after the batch. records, size: what it takes off the credit.
        """
        self._close_run()
        self._close_rows()
        self._frames.extend(frames)
        self._count(next, records, size)
        if len(self._frames) >= PORTION_FRAMES_MAX:
            self.flush()

    def add_stored(self, data: Any, position: int, size: int, next: int, records: int) -> None:
        """Add a batch that the journal has read and of which every row goes out.

        data, position, size: where it lies in what was read. Batches that are neighbours there
        leave as one frame, without being looked at.
        """
        if self._run is not data or self._run_to != position:
            self._close_run()
            self._close_rows()
            if len(self._frames) >= PORTION_FRAMES_MAX:
                self.flush()
            self._run, self._run_from = data, position
        self._run_to = position + size
        self._count(next, records, size)

    def _count(self, next: int, records: int, size: int) -> None:
        """Count what was added to the next DELIVER, and that this one covers up to `next`."""
        self._next = next
        self._records += records
        self._bytes += size
        self.given += size

    def _close_run(self) -> None:
        """Make one frame of the stored batches that are neighbours, if some wait for that.

        Called before anything else is added, so that all goes out in order.
        """
        if self._run is not None:
            self._frames.append(memoryview(self._run)[self._run_from : self._run_to])
            self._run = None

    def send_part(self, encoding: Encoding, next: int) -> None:
        """Send a batch of which some rows go out, after what was added before it.

        It has a DELIVER of its own, which may name the rows by a bitmap.
        """
        self.flush()
        self.given += encoding.bytes
        self._delivery.put(
            self._sub, next, list(encoding.frames), encoding.rows, encoding.count, encoding.bytes
        )

    def add_rows(self, batch: StampedBatch, next: int, mask: Mask) -> None:
        """Add the few rows of a batch that go out, to leave in one batch with those of neighbours.

        mask: these rows.
        """
        self._close_run()
        stamp = Stamp.unpack(batch.stamp, verify=False)
        rows = rows_of(stamp, batch.content, np.flatnonzero(mask))
        gathering = self._gathering
        if (
            len(gathering) >= READ_ROWS_MAX
            or gathering.bytes + gathering.weight_of(rows) > self._rows_bytes_max
            or not gathering.takes(rows[-1].offset, stamp.epoch)
        ):
            self._close_rows()  # The gathered batch is full, or cannot have rows of this one.
        gathering.add(rows, stamp.epoch, stamp.lsn)
        # The bytes of the rows are known when the gathered batch is made.
        self._count(next, len(rows), size=0)

    def _close_rows(self) -> None:
        """Make one derived batch of the rows that were gathered, if there are some; else nothing.

        Called before anything else is added, so that all goes out in order, and when it is full.
        """
        found = self._gathering.take()
        if found is not None:
            self._frames += (found.stamp, found.content)
            # Its records were counted when they were added.
            self._count(self._next, records=0, size=len(found.stamp) + len(found.content))

    def flush(self) -> None:
        """Send all that was added and is not sent yet, as one DELIVER."""
        self._close_run()
        self._close_rows()
        if self._frames:
            # None: all rows of the frames.
            self._delivery.put(
                self._sub, self._next, self._frames, None, self._records, self._bytes
            )
            self._frames = []
            self._records = self._bytes = 0
