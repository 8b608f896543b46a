"""Row bitmaps of deliveries, from the numbers of their rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from malamute_protocol.stamp import row_bitmap


def bitmap_of_rows(rows: Sequence[int], count: int) -> bytes:
    mask = np.zeros(count, np.bool_)
    mask[np.asarray(rows, dtype=np.int64)] = True
    return row_bitmap(mask)
