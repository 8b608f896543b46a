"""Filters in place of names that a segment's index gave up: a Bloom filter of each entry's headers.

Owns the filters and their stored form. An entry is a run of adjacent batches of one stream in the
segment (index.py). The rule: an entry is excluded only by a filter that was made of all its items;
one without a filter may hold anything, be it that it may still grow, that its headers cannot be
read, or that an earlier version wrote it. An item is a subject key, or a field's name and value. 10
bits an item are wrong about 1 entry in 100. Memory: 1.25 bytes for each distinct item of an entry,
at most 64 KiB an entry, and 6 bytes an entry. The loop thread writes what other threads read, and
swaps it as a whole. Source: FORMAT.md, section 6.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from pyroaring import BitMap

from malamute_protocol.header import items_of

_BITS_AN_ITEM: Final = 10
_PROBES: Final = 5
"""Bits of an item. 7 would be best for 10 bits: wrong in 0.8 of 100 cases, not in 0.9."""
_FILTER_BYTES_MAX: Final = 65_535
"""Size of a filter at most: an entry of more than 52,428 items has fewer bits for each."""
_ENTRY_ITEMS_MAX: Final = 2 * 8 * _FILTER_BYTES_MAX // _BITS_AN_ITEM
"""An entry of more items has no filter: below 5 bits an item it excludes little, and costs much."""
_SLICE: Final = 1 << 16
"""Items worked on at a time, some 60 bytes each."""
_HELD_MAX: Final = 1 << 21
"""Items of all entries so far that get filters at the switch: some 30 ns and 40 bytes each."""

Items: TypeAlias = "array[int]"
"""CRC32C (u32) of each item's UTF-8."""
_Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class _View(NamedTuple):
    """The filters of entries 0 to n - 1."""

    sizes: np.ndarray[Any, np.dtype[np.uint16]]
    """Bytes of each entry's filter; 0: the entry has none."""
    begins: np.ndarray[Any, np.dtype[np.uint32]]
    bits: np.ndarray[Any, np.dtype[np.uint8]]
    """All filters, one after the other."""


class EntryFilters:
    """The filters of one segment's entries, whatever their stream."""

    def __init__(self, waiting_max: int, sizes: bytes = b"", bits: bytes = b"") -> None:
        """waiting_max: items gathered, so that many small entries get their filters in one go.

        sizes: bytes of each entry's filter. bits: all filters, one after the other; both as packed.
        Raises ValueError when the two do not fit each other.
        """
        self._waiting_max = waiting_max
        held = np.frombuffer(sizes, "<u2")
        self._view = _View(held, _begins(held), np.frombuffer(bits, np.uint8))
        """The filters that are made."""
        if int(held.sum(dtype=np.int64)) != len(bits):
            raise ValueError("filters of other sizes than those given")
        self._growing = len(held) - 1
        """Last entry that items were noted of; it may still grow."""
        self._unknown: list[int] = []
        """Entries that get no filter, as their items cannot be known or are too many."""
        self._entries: list[int] = []
        """Entries that items were gathered of, for filters that are still to be made."""
        self._items: list[Items] = []
        """Items of each entry in _entries."""
        self._room = waiting_max
        """Number of items that may still be gathered."""
        self._pairs: _Ints = np.empty(0, np.int64)
        """Items that were left when filters were made last, as their entries may still grow; each
        as entry << 32 | item."""

    def __len__(self) -> int:
        """Entries that have a filter or never will."""
        return len(self._view.sizes)

    # --- asked --------------------------------------------------------------------------

    def may_hold(self, entries: BitMap, text: str) -> BitMap:
        """Return those of some entries that may hold an item; never one too few.

        For searches of one subject or value, in any thread. text: a subject key, or the pair_text()
        of a field's name and value.
        """
        sizes, begins, bits = self._view
        # Only entries that have a filter can be excluded.
        asked = np.array(entries.to_array(), np.int64)
        asked = asked[asked < len(sizes)]
        asked = asked[sizes[asked] > 0]
        items = np.full(len(asked), items_of([text])[0], np.int64)
        held = np.ones(len(asked), np.bool_)
        for places in _places(items, begins[asked], sizes[asked]):
            # A place is the number of a bit: its byte by >> 3, the bit within it by & 7.
            held &= (bits[places >> 3] >> (places & 7).astype(np.uint8) & 1).astype(np.bool_)
        return entries - BitMap(asked[~held].astype(np.uint32))

    # --- written ------------------------------------------------------------------------

    def add(self, entry: int, items: Items | None) -> None:
        """Note items of the last entry or a later one; None: what it holds cannot be known.

        Called for each batch that is appended, once a segment's headers are not kept whole. An
        entry with more than _ENTRY_ITEMS_MAX items gets no filter: no search excludes it.
        """
        if entry > self._growing and self._room <= 0:
            # Enough is gathered, and entries before this one are complete: they get their filters.
            self.close(entry)
        self._growing = entry
        if items is None or len(items) > _ENTRY_ITEMS_MAX:
            self._unknown.append(entry)
            self._room -= 1
        else:
            self._entries.append(entry)
            self._items.append(items)
            self._room -= len(items)

    def add_all(self, held: Iterable[tuple[str, BitMap]], stop: int) -> None:
        """Make the filters of all entries so far, when a segment gives up its exact headers.

        held: each item, with the entries that hold it. stop: number of the last entry, which may
        still grow. Where that is too much for a turn of the loop, no entry gets a filter: no search
        excludes one.
        """
        known = [(text, bitmap) for text, bitmap in held if bitmap]
        counts = [len(bitmap) for _, bitmap in known]
        if sum(counts) > _HELD_MAX:
            # Entries before `stop` get filters of 0 bytes, which exclude nothing. `stop` gets none:
            # it would be made only of the items that still follow.
            self._unknown.append(stop)
            self.close(stop)
            return
        gathered = array("I")
        for (_, bitmap), count in zip(known, counts, strict=True):
            if count == 1:  # Most are of one entry, and to_array() takes ten times as long.
                gathered.append(bitmap.min())
            else:
                gathered.extend(bitmap.to_array())
        numbers = np.frombuffer(gathered, np.uint32)
        # Sorted by entry. Numbers of 16 bits are sorted by their digits, in a tenth of the time.
        small = numbers.astype(np.uint16) if stop < 1 << 16 else numbers
        order = np.argsort(small, kind="stable")
        # Each item once for each entry that holds it, in the order of `numbers`.
        items = np.array(items_of(text for text, _ in known), np.int64).repeat(counts)
        self._extend(numbers[order].astype(np.int64) << 32 | items[order], stop)

    def close(self, stop: int) -> None:
        """Give each entry before `stop` its filter: it does not grow any more."""
        self._extend(self._gathered(), stop)

    def _extend(self, pairs: _Ints, stop: int) -> None:
        """Make the filters of the entries before `stop` out of gathered pairs.

        pairs: sorted, each an entry << 32 | item. Those of `stop` and later entries stay gathered.
        """
        cut = int(np.searchsorted(pairs, stop << 32))
        self._view = _extended(self._view, pairs[:cut], stop)
        self._pairs = pairs[cut:]
        # More may wait where there is more, as each call copies all filters that there are.
        self._room = self._waiting_max + len(self._view.bits) // 64
        self._entries, self._items = [], []
        self._unknown = [entry for entry in self._unknown if entry >= stop]

    def reopen(self, entry: int, waiting_max: int) -> None:
        """Go on from what was packed, when the ring of an unfinished segment is opened.

        entry: the last one, which may still grow: its filter is dropped, and it gets none, as the
        items that it was made of are not known any more.
        """
        self._waiting_max = self._room = waiting_max
        sizes, begins, bits = self._view
        if 0 <= entry < len(sizes):
            self._view = _View(sizes[:entry], begins[:entry], bits[: int(begins[entry])])
        self._growing = entry
        self._unknown.append(entry)

    def pack(self) -> tuple[bytes, bytes]:
        """Return (size of each filter as u16, all filters), of the last entry too.

        For the index file of a segment that is finished or orderly closed.
        """
        view = _extended(self._view, self._gathered(), self._growing + 1)
        return view.sizes.tobytes(), view.bits.tobytes()

    def _gathered(self) -> _Ints:
        """Return the gathered items as entry << 32 | item, sorted, each once.

        Entries whose items are not all known are left out: a filter of some would exclude wrongly.
        """
        entries = np.array(self._entries, np.int64).repeat(list(map(len, self._items)))
        items = np.frombuffer(b"".join(self._items), np.uint32)
        pairs: _Ints = np.concatenate([self._pairs, entries << 32 | items])
        # Sorted here: numpy's unique() hashes first, which takes ten times as long.
        pairs.sort()
        pairs = pairs[np.diff(pairs, prepend=-1) != 0]  # equal neighbours count once
        return pairs[~np.isin(pairs >> 32, self._unknown)] if self._unknown else pairs


def _begins(sizes: Any) -> Any:
    """Return where each filter begins in all of them, in bytes, by the sizes of all."""
    return (np.cumsum(sizes, dtype=np.int64) - sizes).astype(np.uint32)


def _places(items: _Ints, begins: Any, sizes: Any) -> Iterator[_Ints]:
    """Yield for each probe the numbers of one bit of every item, for setting and for asking them.

    begins, sizes: bytes of the filter in which each item is. A bit's number counts from the begin
    of all filters. An item's upper 32 mixed bits are its first place, the lower ones the step to
    the next; `place * bits >> 32` scales a place of 32 bits to the filter's number of bits.
    """
    # The multipliers are of the stored form (FORMAT.md, section 6): they spread a CRC over 64 bits.
    # 0, the item of "", is mixed to 0: it shares bits with more than others do.
    mixed = items.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    place = (mixed >> np.uint64(32)).astype(np.int64)
    step = (mixed & np.uint64(0xFFFFFFFF)).astype(np.int64)
    first, bits = begins.astype(np.int64) << 3, sizes.astype(np.int64) << 3
    for _ in range(_PROBES):
        yield first + (place * bits >> 32)
        place = (place + step) & 0xFFFFFFFF


def _extended(view: _View, pairs: _Ints, stop: int) -> _View:
    """Return a view with filters also of the entries up to `stop`, made of their sorted pairs.

    pairs: each an entry << 32 | item; an entry of which there is none gets a filter of 0 bytes.
    """
    sizes, bits = [view.sizes], [view.bits]
    first, at = len(view.sizes), 0  # next entry, and place of its first pair
    while first < stop:
        # Whole entries, as many as come to a slice of pairs, and at least one: memory is bounded.
        after = int(pairs[at + _SLICE] >> 32) + 1 if at + _SLICE < len(pairs) else stop
        end = int(np.searchsorted(pairs, after << 32))
        entries, items = (pairs[at:end] >> 32) - first, pairs[at:end] & 0xFFFFFFFF
        counts = np.bincount(entries, minlength=after - first)
        size = np.minimum((counts * _BITS_AN_ITEM + 7) // 8, _FILTER_BYTES_MAX).astype("<u2")
        begins = _begins(size)
        # One byte for each bit of these filters, packed to bits once all are marked.
        marks = np.zeros(int(size.sum(dtype=np.int64)) << 3, np.bool_)
        for places in _places(items, begins[entries], size[entries]):
            marks[places] = True
        sizes.append(size)
        bits.append(np.packbits(marks, bitorder="little"))
        first, at = after, end
    held = np.concatenate(sizes)
    return _View(held, _begins(held), np.concatenate(bits))
