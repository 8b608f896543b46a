"""Inverted index of one segment: (stream, subject) and (stream, field) -> bitmap.

Owns the bitmaps of index entries by header, and their stored form. The rule: a bitmap may name an
entry too many, never one too few. Beyond `distinct_headers_max` the table keeps leading subject
parts and field names only, and says so; a whole subject and a value are then looked up in
filters.py besides. Written by the loop thread, read by others: bitmaps only grow, dictionaries are
copied before they are walked. Source: FORMAT.md, section 6; docs/design.md, Journal (Finding).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec
from pyroaring import BitMap

from malamute_protocol.header import (
    LEAD_PARTS_MAX,
    Outline,
    items_of,
    leading_parts,
    pair_text,
)
from malamute_py.journal.filters import EntryFilters, Items

Keys: TypeAlias = tuple[str, ...]
Fields: TypeAlias = Mapping[str, str]

_MEMO_MAX = 2048
_MEMO_TABLE_MAX = 4096
"""Headers of a table. The protocol's memo does not share larger ones; they would be held for
nothing."""
_MEMO_HEADERS_MAX = 1 << 15
"""Headers of all tables together: each header comes with objects of some hundred bytes."""
_SAMPLE = 1_024
"""Subjects of a large table by which it is guessed how many leading parts they have."""
_NOBODY = BitMap()
_ANYTHING: tuple[Keys, ...] = (("",),)
_UNKNOWN: tuple[tuple[str, ...], tuple[Fields, ...]] = (("",), ())


class StreamHeaders:
    """One stream's bitmaps; also what a search is shown (types.HeaderIndex)."""

    __slots__ = ("_all", "_filters", "_several", "depth", "names", "pairs", "tops")

    def __init__(self, depth: int | None, filters: EntryFilters | None = None) -> None:
        """depth: leading parts kept of each subject; None: whole subjects and values.

        filters: of the segment, where it is not None.
        """
        self.depth = depth
        self._filters = filters
        self.tops: dict[Keys, BitMap] = {}
        self.names: dict[str, BitMap] = {}
        self.pairs: dict[tuple[str, str], BitMap] = {}
        self._all = BitMap()
        self._several: tuple[int, list[Keys]] = (0, [])
        """(of so many subjects, those with further keys): looked up apart."""

    @property
    def exact(self) -> bool:
        """False: subjects are leading parts; what is left of whole ones and of values may err."""
        return self.depth is None

    def subjects(self) -> Iterable[tuple[Keys, BitMap]]:
        """(keys, entries) of each distinct subject."""
        return tuple(self.tops.copy().items())

    def subject(self, key: str) -> BitMap:
        """Return the entries with a record of exactly this key; not `exact`: or of one like it."""
        top = key if self.depth is None else leading_parts((key,), self.depth)[0]
        found = self.tops.get((top,), _NOBODY)
        several = self.several(top)
        if several:
            found = BitMap.union(found, *map(self.tops.__getitem__, several))
        return found if self._filters is None else self._filters.may_hold(found, key)

    def several(self, key: str) -> list[Keys]:
        """The subjects that have this key and others."""
        if self._several[0] != len(self.tops):
            tops = self.tops.copy()
            self._several = len(tops), [top for top in tops if len(top) > 1]
        return [top for top in self._several[1] if key in top]

    def field(self, name: str, value: str | None) -> BitMap:
        """Return the entries with a record that has a field, and its value unless None.

        An index that keeps less than whole subjects and values (`exact`) returns further entries,
        which hold one like it.
        """
        # depth 0: no header is kept; None: all are, whole; else names of fields without values.
        if self.depth == 0:
            found = self._all
        elif value is None or self.depth is not None:
            found = self.names.get(name, _NOBODY)
        else:
            found = self.pairs.get((name, value), _NOBODY)
        if value is None or self._filters is None:
            return found
        return self._filters.may_hold(found, pair_text(name, value))

    def everything(self) -> BitMap:
        """All entries of the stream."""
        return self._all

    def __len__(self) -> int:
        """Distinct headers held."""
        return len(self.tops) + len(self.names) + len(self.pairs)


_Resolved: TypeAlias = "tuple[tuple[BitMap, ...], Items | None]"
"""Where an entry is noted that holds a header table: (bitmaps, items for its filter).

No items (None): the bitmaps hold the headers whole, or the headers cannot be known."""
_NO_LAST: Final[tuple[Any, int, _Resolved]] = (None, -1, ((), None))
_NO_MEMO: Final[tuple[Any, _Resolved]] = (None, ((), None))


class HeaderTable:
    """All streams' bitmaps of one segment, built while it is written."""

    def __init__(self, distinct_max: int) -> None:
        """distinct_max: headers of all streams together that are kept whole."""
        self.depth: int | None = None
        """Leading parts that are kept of each subject; None: subjects and values are kept whole."""
        self.streams: dict[int, StreamHeaders] = {}
        """Number of a stream -> its bitmaps."""
        self.filters: EntryFilters | None = None
        """They still find whole subjects and values once the table keeps only parts of these. None:
        it keeps all of them whole."""
        self._distinct_max = distinct_max
        self._waiting_max = distinct_max // 4
        """Headers for which entries wait before they get filters together. An entry that waits
        excludes nothing: each search for a whole subject reads it."""
        self._distinct = 0
        """Headers of all streams that the bitmaps are of."""
        self._last: dict[int, tuple[Any, int, _Resolved]] = {}
        """Number of a stream -> (header table, entry, bitmaps) of its last batch. The next batch
        mostly has the same table and lies in the same entry: then nothing is new."""
        self._memo: dict[tuple[int, int], tuple[Any, _Resolved]] = {}
        """(number of a stream, id() of a header table) -> (the table, its bitmaps): for tables that
        come again after others."""
        self._memo_headers = 0
        """Headers of all tables in `_memo`, which is emptied when they are too many."""

    def restore(
        self,
        depth: int | None,
        filters: EntryFilters | None,
        streams: dict[int, StreamHeaders],
        last: int,
    ) -> None:
        """Go on from what was stored of the segment, in a table that is still empty.

        last: the entry that may still grow. filters: not used by any other table.
        """
        self.depth = depth
        self.filters = filters
        self.streams = streams
        self._distinct = sum(map(len, streams.values()))
        if filters is not None:
            filters.reopen(last, self._waiting_max)

    def add(self, stream: int, ordinal: int, keys: Any) -> None:
        """Note that the entry holds records with these headers.

        keys: a header table (`.keys`, `.fieldmaps`) or a pair (subjects, field maps);
        None: they cannot be known. Then no search excludes the entry, and the table gives up the
        leading parts of all entries.
        Equal tables are recognised by identity, as the protocol's memo shares them.
        """
        if keys is None:
            if self.depth != 0:
                self._coarsen(ordinal, to=0)
            keys = _UNKNOWN
        last_keys, last_ordinal, resolved = self._last.get(stream, _NO_LAST)
        if last_keys is keys:
            if last_ordinal == ordinal:
                return
        else:
            known_keys, resolved = self._memo.get((stream, id(keys)), _NO_MEMO)
            if known_keys is not keys:
                resolved = self._resolve(stream, ordinal, keys)
        bitmaps, items = resolved
        for bitmap in bitmaps:
            bitmap.add(ordinal)
        if self.filters is not None:
            self.filters.add(ordinal, items)
        if (stream, id(keys)) in self._memo:
            self._last[stream] = (keys, ordinal, resolved)

    def _resolve(self, stream: int, ordinal: int, keys: Any) -> _Resolved:
        """Note the parts of a batch's headers; return their bitmaps, and the items for filters.

        A large header table, which the protocol read in steps, has an outline: the names, leading
        parts and items that were gathered as it was read.
        """
        table = self.streams.get(stream)
        if table is None:
            table = self.streams[stream] = StreamHeaders(self.depth, self.filters)
        subjects, fieldmaps = _parts(keys)
        outline: Outline | None = getattr(keys, "outline", None)
        size = len(subjects) + len(fieldmaps)
        large = (size if outline is None else len(outline.items)) > self._distinct_max
        if large and self.depth != 0:
            # Noted whole, its headers would overflow the table and be cut down again at once.
            if outline is None:
                table = self._make_room(stream, ordinal, subjects)
            else:
                table = self._make_room_for(stream, ordinal, outline)
        before = len(table)
        resolved = _note(table, subjects, fieldmaps, outline)
        self._distinct += len(table) - before
        if self._distinct > self._distinct_max and self.depth != 0:
            # Of a large table without an outline, too much after _make_room(), no part is kept.
            self._coarsen(ordinal, to=0 if large and outline is None else None)
            # The coarser table has its leading parts already, counted.
            resolved = _note(self.streams[stream], subjects, fieldmaps, outline)
        if keys is _UNKNOWN:
            bitmaps, _ = resolved
            resolved = bitmaps, None
        if size <= _MEMO_TABLE_MAX:
            if len(self._memo) >= _MEMO_MAX or self._memo_headers > _MEMO_HEADERS_MAX:
                self._memo.clear()
                self._memo_headers = 0
            self._memo_headers += size
            # The memo holds `keys` itself, so that its id cannot become another object's.
            self._memo[stream, id(keys)] = (keys, resolved)
        return resolved

    def _make_room(self, stream: int, ordinal: int, coming: Sequence[Keys]) -> StreamHeaders:
        """Keep so few leading parts that a large table's subjects find room.

        A sample of them decides: to take 65,536 subjects apart at each depth takes half a second.
        """
        sample = coming[:: max(1, len(coming) // _SAMPLE)]
        depth = _deepest(sample) - 1 if self.depth is None else self.depth
        while depth > 0:
            parts = len({leading_parts(top, depth) for top in sample})
            # Where most of the sample differ, so do most of all.
            many = parts if 2 * parts <= len(sample) else parts * len(coming) // len(sample)
            if many <= self._distinct_max // 2:
                break
            depth -= 1
        if depth != self.depth:
            self._coarsen(ordinal, to=depth)
        return self.streams[stream]

    def _make_room_for(self, stream: int, ordinal: int, coming: Outline) -> StreamHeaders:
        """Keep so few leading parts that a table which was read in steps finds room."""
        leads, most = coming.leads, self._distinct_max // 2
        if coming.names is None or len(coming.names) > most:
            depth = 0
        else:
            depth = len(leads) if self.depth is None else min(self.depth, len(leads))
        while depth > 0 and len(leads[depth - 1]) > most:
            depth -= 1
        if depth != self.depth:
            self._coarsen(ordinal, to=depth)
        return self.streams[stream]

    def _coarsen(self, ordinal: int, to: int | None = None) -> None:
        """Keep fewer leading parts: `to`, or until the table is at most half full.

        ordinal: the entry that is being noted. New objects take the place of the old ones:
        a reader keeps what it had, whole.
        """
        filters = self.filters
        if filters is None:
            # What the table gives up is still found by the filters.
            filters = EntryFilters(self._waiting_max)
            filters.add_all(self._items(), ordinal)
        depth = self.depth
        if depth is None:
            depth = _deepest(top for t in self.streams.values() for top in t.tops)
        streams = self.streams
        distinct = self._distinct
        while depth > 0:
            depth = depth - 1 if to is None else to
            streams = {number: _coarser(t, depth, filters) for number, t in self.streams.items()}
            distinct = sum(map(len, streams.values()))
            if distinct <= self._distinct_max // 2 or to is not None:
                break
        self.depth = depth
        self.filters = filters
        self.streams = streams
        self._distinct = distinct
        self._last.clear()
        self._memo.clear()
        self._memo_headers = 0

    def _items(self) -> Iterator[tuple[str, BitMap]]:
        """Yield each item of an exact table, as filters store it, with the entries that hold it."""
        for table in self.streams.values():
            for top, bitmap in table.tops.items():
                for key in top:
                    yield key, bitmap
            for pair, bitmap in table.pairs.items():
                yield pair_text(*pair), bitmap

    def stream(self, stream: int) -> StreamHeaders:
        """One stream's index; an empty one when it has nothing here."""
        return self.streams.get(stream) or StreamHeaders(self.depth)


def _parts(keys: Any) -> tuple[Sequence[Keys], Sequence[Fields]]:
    if isinstance(keys, (tuple, list)):
        tops = [(top,) if isinstance(top, str) else tuple(top) for top in keys[0]]
        return tops, keys[1] or ()
    return keys.keys, keys.fieldmaps


def _note(
    table: StreamHeaders,
    subjects: Sequence[Keys],
    fieldmaps: Iterable[Fields],
    outline: Outline | None,
) -> _Resolved:
    """Find the bitmaps of a header table. outline: what was gathered of it as it was read."""
    depth = table.depth
    bitmaps = [table.everything()]
    if depth is None:
        bitmaps += [_bitmap(table.tops, top) for top in subjects]
        for fields in fieldmaps:
            for name, value in fields.items():
                bitmaps.append(_bitmap(table.names, name))
                bitmaps.append(_bitmap(table.pairs, (name, value)))
        return tuple(bitmaps), None
    if depth:
        leads = outline.leads if outline is not None else ()
        if depth <= len(leads):
            tops = leads[depth - 1]  # the sets are of the first part, of the first two, and so on
        else:
            tops = {leading_parts(top, depth) for top in subjects}
        bitmaps += [_bitmap(table.tops, top) for top in tops]
        names = outline.names if outline is not None else None
        if names is None:
            names = set().union(*fieldmaps)
        bitmaps += [_bitmap(table.names, name) for name in names]
    else:
        bitmaps += [_bitmap(table.tops, top) for top in _ANYTHING]
    # The filters get what the table has given up: all keys, and all pairs.
    if outline is not None:
        return tuple(bitmaps), outline.items
    texts = [key for top in subjects for key in top]
    pairs = {pair for fields in fieldmaps for pair in fields.items()}
    return tuple(bitmaps), items_of(chain(texts, (pair_text(*pair) for pair in pairs)))


def _bitmap(table: dict[Any, BitMap], key: Any) -> BitMap:
    found = table.get(key)
    if found is None:
        found = table[key] = BitMap()
    return found


def _deepest(tops: Iterable[Keys]) -> int:
    """How many leading parts tell these subjects apart, as far as they are tried."""
    parts = max((key.count(".") + 1 for top in tops for key in top), default=1)
    return min(parts, LEAD_PARTS_MAX)


def _coarser(table: StreamHeaders, depth: int, filters: EntryFilters) -> StreamHeaders:
    """Return a stream's index with only `depth` leading parts of each subject.

    What whole subjects and values told, the filters of the segment tell from then on.
    """
    new = StreamHeaders(depth, filters)
    new.everything().update(table.everything())
    for top, bitmap in table.tops.items():
        _bitmap(new.tops, leading_parts(top, depth)).update(bitmap)
    if depth:
        # Without subjects there is no reason to keep names either: everything() remains.
        for name, bitmap in table.names.items():
            _bitmap(new.names, name).update(bitmap)
    return new


# --- stored form -------------------------------------------------------------------------


class StoredHeaders(msgspec.Struct, array_like=True):
    """One stream of a segment's index file."""

    everything: bytes
    tops: list[tuple[list[str], bytes]]
    names: list[tuple[str, bytes]]
    pairs: list[tuple[str, str, bytes]]


def pack_headers(table: HeaderTable) -> tuple[int | None, dict[int, bytes]]:
    """(depth, stream -> MessagePack) for the index file."""
    packed = {}
    for number, headers in table.streams.items():
        stored = StoredHeaders(
            headers.everything().serialize(),
            [(list(top), bitmap.serialize()) for top, bitmap in headers.tops.items()],
            [(name, bitmap.serialize()) for name, bitmap in headers.names.items()],
            [(n, v, bitmap.serialize()) for (n, v), bitmap in headers.pairs.items()],
        )
        packed[number] = msgspec.msgpack.encode(stored)
    return table.depth, packed


def unpack_headers(depth: int | None, packed: bytes, filters: EntryFilters | None) -> StreamHeaders:
    """One stream's index from the index file. filters: the segment's, where not exact."""
    stored = msgspec.msgpack.decode(packed, type=StoredHeaders)
    headers = StreamHeaders(depth, filters)
    headers.everything().update(BitMap.deserialize(stored.everything))
    for top, data in stored.tops:
        headers.tops[tuple(top)] = BitMap.deserialize(data)
    for name, data in stored.names:
        headers.names[name] = BitMap.deserialize(data)
    for name, value, data in stored.pairs:
        headers.pairs[name, value] = BitMap.deserialize(data)
    return headers
