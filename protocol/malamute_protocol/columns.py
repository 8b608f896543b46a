"""Columns of a content as arrays: their types, offsets and times.

Owns what is looked for in a whole column at once.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from malamute_protocol.errors import BatchError

NO_TIME: Final = -(2**63)
"""Client time of a row that has none."""

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
I4: Final = np.dtype("<i4")
I8: Final = np.dtype("<i8")
U4: Final = np.dtype("<u4")


def check_offsets(offsets: Array, end: int, what: str, position: int) -> None:
    """Raise BatchError unless the offsets start at 0, never fall, and finish at `end`.

    what: the entries that they divide, for the error. position: of the column in the content.
    """
    if int(offsets[0]) != 0 or int(offsets[-1]) != end:
        raise BatchError("bad_batch", f"the {what} offsets do not span their data", position)
    if not bool((offsets[1:] >= offsets[:-1]).all()):
        raise BatchError("bad_batch", f"the {what} offsets fall", position)


def time_range(times: Array | None) -> tuple[int, int]:
    """Return (least, greatest) client time of the rows that have one; (0, 0) when none has.

    An encoder writes both into the head, and a check compares them with it.
    """
    if times is None or not len(times):
        return 0, 0
    low = int(times.min())
    if low == NO_TIME:  # Less than any time: where it is not the least, every row has a time.
        times = times[times != NO_TIME]
        if not len(times):
            return 0, 0
        low = int(times.min())
    return low, int(times.max())


def earliest(expiries: Array | None) -> int:
    """Return the least expiry of the rows that expire, which the head repeats; 0: none expires."""
    if expiries is None or not len(expiries):
        return 0
    low = int(expiries.min())
    if low == 0:
        expiries = expiries[expiries != 0]
        low = int(expiries.min()) if len(expiries) else 0
    return low
