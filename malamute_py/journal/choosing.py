"""Choosing what a search reads of a segment: whole entries of its index, or rare rows alone.

Owns that choice for every reader of a ring, in the broker and beside it. An entry is a run of
adjacent batches of one stream (index.py); a spot is the place of one rare row (spots.py). The rule:
what is chosen has all matches; a rare row that has a spot is chosen by itself, and its batch is
left alone unless the batch may hold a match without a spot. Source: FORMAT.md, sections 6 and 8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from malamute_protocol.columns import NO_TIME
from malamute_protocol.gather import BYTES_A_ROW, weight_of
from malamute_protocol.header import Header
from malamute_py.journal.index import Entries, LiveIndex, StoredIndex
from malamute_py.journal.spots import SPOT, Matches, Spots, Unspotted
from malamute_py.journal.types import UNINDEXED_FROM, Candidates, HeaderIndex


class WantedSpots(NamedTuple):
    """Rows that a reader wants of some entries, when their rare rows have spots."""

    whole: list[bool]
    """For each entry, whether it must be read whole: it may hold a match without a spot."""
    spots: Spots
    """The wanted rows of all other entries, by offset."""
    codes: Any
    """Place in `headers` of each spot's header."""
    headers: list[Header]


def wanted_spots(
    index: LiveIndex | StoredIndex,
    stream: int,
    entries: Entries,
    search: Candidates,
    matches: Matches,
    client_time: tuple[int, int] | None,
    from_offset: int,
    end_offset: int,
) -> WantedSpots | None:
    """Return the wanted rare rows in [from_offset, end_offset); None: no usable spots are known.

    For reads and plans that say exactly which headers they want. entries: those of one segment that
    hold these offsets. search: finds the entries that may hold a match. matches: whether one header
    is wanted. client_time: [least, most) of a record's client time.
    """
    headers, spots = index.headers(stream), index.spots(stream)
    rows = entries.rows
    if spots is None or not headers.exact or stream >= UNINDEXED_FROM or not len(rows):
        return None
    if bool((rows["base"][1:] != rows["next"][:-1]).any()) or int(rows["base"][0]) > from_offset:
        return None  # an index with holes: who reads by entries names them
    # Entries are read whole only for rows that have no spot.
    unspotted = Unspotted(headers, spots.spotted)
    chosen = choose(index, stream, entries, search, client_time, unspotted)
    found = spots.by_header(matches)
    wanted = np.concatenate([part for _, part in found]) if found else np.empty(0, SPOT)
    # For each spot the place of its header in `found`.
    codes = np.repeat(np.arange(len(found)), [len(part) for _, part in found])
    offsets = wanted["offset"]
    kept = (offsets >= from_offset) & (offsets < min(end_offset, int(rows["next"][-1])))
    if client_time is not None:
        low, high = client_time
        times = wanted["client_time"]
        kept &= (times >= low) & (times < high) & (times != NO_TIME)
    if True in chosen:
        # Whole entries bring these rows, too.
        whole = np.asarray(chosen, np.bool_)
        entry_of = np.searchsorted(rows["next"], offsets, "right")
        kept &= ~whole[np.minimum(entry_of, len(rows) - 1)]
    order = np.argsort(offsets[kept], kind="stable")
    return WantedSpots(
        chosen, wanted[kept][order], codes[kept][order], [header for header, _ in found]
    )


def weights_of(rare: WantedSpots, rows: Any) -> Any:
    """Return the bytes that are wanted of each entry: all, or its rare rows with their headers.

    For plans. rows: the entries of which `rare` was made.
    """
    weights = np.where(rare.whole, rows["bytes"], 0).astype(np.int64)
    spots = rare.spots
    if len(spots):
        texts = np.array([weight_of(header) for header in rare.headers], np.int64)
        # A row costs its body, its part of the columns, and the texts of its header.
        costs = spots["bytes"].astype(np.int64) + BYTES_A_ROW + texts[rare.codes]
        np.add.at(weights, np.searchsorted(rows["next"], spots["offset"], "right"), costs)
    return weights


def choose(
    index: LiveIndex | StoredIndex,
    stream: int,
    entries: Entries,
    search: Candidates | None,
    client_time: tuple[int, int] | None,
    headers: HeaderIndex | None = None,
) -> list[bool]:
    """Return for each of a stream's entries in one segment whether it may hold a match.

    For reads, searches and plans, which leave the other entries unread. search: returns the entries
    that may match, given an inverted index of headers; None: every header is wanted. client_time:
    [least, most) of a record's client time. headers: the inverted index that is searched in place
    of the stream's.
    """
    mask = np.ones(len(entries.ordinals), np.bool_)
    if search is not None and stream < UNINDEXED_FROM and len(mask):
        headers = headers or index.headers(stream)
        bitmap = search(headers)
        if not bitmap:
            return [False] * len(mask)
        if bitmap is not headers.everything():  # which excludes nothing
            held = np.fromiter(bitmap, np.uint32, len(bitmap))
            mask &= np.isin(entries.ordinals, held, assume_unique=True)
    if client_time is not None:
        low, high = client_time
        mask &= (entries.rows["client_max"] >= low) & (entries.rows["client_min"] < high)
    chosen: list[bool] = mask.tolist()
    return chosen
