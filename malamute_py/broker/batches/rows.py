"""Rows of a batch that a reader selects, as masks.

Owns the masks by header, expiry and client time. The rule: None stands for all rows, so that the
usual batch costs no array. Source: SPEC.md, section 5.

A batch has each distinct header once, in its header table; a row's code is the number of its header
there. Codes that are None: all rows have the only header.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from malamute_protocol.columns import NO_TIME
from malamute_protocol.content import Content

Mask: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


def rows_of_headers(content: Content, chosen: Mask | None) -> Mask | None:
    """Mask of the rows whose header is among the chosen; None: all rows.

    For a reader whose patterns were matched with the headers. chosen: for each header of the
    batch's header table, whether the reader selects it; None: all.
    """
    if chosen is None:
        return None
    _, codes = content.headers()
    if codes is None:
        return None if chosen[0] else np.zeros(content.head.count, np.bool_)
    mask: Mask = chosen[codes]
    return mask


def narrow(mask: Mask | None, other: Mask) -> Mask:
    """Rows that are in both."""
    return other if mask is None else mask & other


def unexpired(content: Content, now_ms: int) -> Mask | None:
    """Mask of the rows that have not expired, which readers get; None: no row has expired."""
    earliest_ms = content.head.earliest_expiry_ms
    if not earliest_ms or earliest_ms > now_ms:
        return None
    expiries = content.expiries
    assert expiries is not None, "check() has compared the head with the column"
    mask: Mask = (expiries == 0) | (expiries > now_ms)
    return mask


def within_client_time(content: Content, window: tuple[int, int]) -> Mask | None:
    """Mask of the rows whose client time lies in [from, to); None: all rows.

    For a reader that asked for a range of the times that producers gave their records. window:
    (from, to). A record without such a time is in no range.
    """
    low, high = window
    times = content.client_times
    if times is None:
        return np.zeros(content.head.count, np.bool_)
    mask: Mask = (times >= low) & (times < high) & (times != NO_TIME)
    return None if mask.all() else mask
