"""Inverted index of one segment: (stream, subject) and (stream, field) -> bitmap.

Owns the bitmaps of index entries by header, and their stored form. An entry is a run of adjacent
batches of one stream in the segment; bitmaps hold numbers of entries. A header is a record's
subject, with further keys, and its fields. The rule: a bitmap may name an entry too many, never
one too few. Beyond `distinct_headers_max` the table keeps leading subject
parts and field names only, and says so; a whole subject and a value are then looked up in
filters.py besides. Written by the loop thread, read by others: bitmaps only grow, dictionaries are
copied before they are walked. Source: FORMAT.md, section 6; docs/design.md, Journal (Finding).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from random import Random
from typing import Any, Final, TypeAlias, TypeVar

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

_T = TypeVar("_T")
_MEMO_MAX = 2048
_MEMO_TABLE_MAX = 4096
"""Headers of a table. The protocol's memo does not share larger ones; they would be held for
nothing."""
_MEMO_ENTRIES_MAX = 1 << 15
"""Keys and fields of all tables together: each comes with objects of some hundred bytes."""
_SAMPLE = 1_024
"""Subjects of a large table by which it is guessed how many leading parts they have."""
_NO_ENTRIES = BitMap()
_ANYTHING: tuple[Keys, ...] = (("",),)
"""Stands for all subjects where no leading part is kept: every subject may begin with ""."""
_UNKNOWN: tuple[tuple[str, ...], tuple[Fields, ...]] = (("",), ())
"""Stands for the headers of a batch that cannot be read."""


class StreamHeaders:
    """One stream's bitmaps of entries by header; also what a search is shown (types.HeaderIndex).

    An entry, here and below, is one of the segment's index: a run of adjacent batches.
    """

    __slots__ = ("_all", "_filters", "_multi_key", "depth", "names", "pairs", "tops")

    def __init__(self, depth: int | None, filters: EntryFilters | None = None) -> None:
        """depth: leading parts kept of each subject; None: whole subjects and values.

        filters: of the segment, where it is not None.
        """
        self.depth = depth
        self._filters = filters
        self.tops: dict[Keys, BitMap] = {}
        """Subject and further keys of a record, or their leading parts -> entries with such one."""
        self.names: dict[str, BitMap] = {}
        """Name of a field -> entries with a record that has it."""
        self.pairs: dict[tuple[str, str], BitMap] = {}
        """(name, value) of a field -> entries; empty where a depth is set."""
        self._all = BitMap()
        self._multi_key: tuple[int, list[Keys]] = (0, [])
        """(how many `tops` there were when it was made, those of more than one key)."""

    @property
    def exact(self) -> bool:
        """False: subjects are leading parts; what is left of whole ones and of values may err."""
        return self.depth is None

    def subjects(self) -> Iterable[tuple[Keys, BitMap]]:
        """(keys, entries) of each distinct subject."""
        return tuple(self.tops.copy().items())

    def subject(self, key: str) -> BitMap:
        """Return the entries with a record of exactly this key; not `exact`: or of one like it.

        For searches of one subject, in any thread.
        """
        top = key if self.depth is None else leading_parts((key,), self.depth)[0]
        found = self.tops.get((top,), _NO_ENTRIES)
        # A record with further keys is found by each of its keys.
        several = self.multi_key_subjects(top)
        if several:
            found = BitMap.union(found, *map(self.tops.__getitem__, several))
        return found if self._filters is None else self._filters.may_hold(found, key)

    def multi_key_subjects(self, key: str) -> list[Keys]:
        """Return the subjects of more than one key that have this key among them.

        A search for the key has to find these, too.
        """
        made_of, several = self._multi_key
        if made_of != len(self.tops):
            # Subjects came since the list was made; they never go.
            tops = self.tops.copy()
            several = [top for top in tops if len(top) > 1]
            self._multi_key = len(tops), several
        return [top for top in several if key in top]

    def field(self, name: str, value: str | None) -> BitMap:
        """Return the entries with a record that has a field, and its value unless None.

        An index that keeps less than whole subjects and values (`exact`) returns further entries,
        which hold one like it.
        """
        # depth 0: no header is kept; None: all are, whole; else names of fields without values.
        if self.depth == 0:
            found = self._all
        elif value is None or self.depth is not None:
            found = self.names.get(name, _NO_ENTRIES)
        else:
            found = self.pairs.get((name, value), _NO_ENTRIES)
        if value is None or self._filters is None:
            return found
        # The filters know values that the bitmaps gave up: entries without this one are left out.
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
        self._memo_entries = 0
        """Keys and fields of all tables in `_memo`, which is emptied when they are too many."""

    def restore(
        self,
        depth: int | None,
        filters: EntryFilters | None,
        streams: dict[int, StreamHeaders],
        last: int,
    ) -> None:
        """Go on from the stored index of a segment that is not full, when a ring is opened.

        For a table that is still empty. depth: leading parts kept of each subject; None: all.
        filters: not used by any other table. last: number of the entry that may still grow, which
        gets no filter: not all of its items are known.
        """
        self.depth = depth
        self.filters = filters
        self.streams = streams
        self._distinct = sum(map(len, streams.values()))
        if filters is not None:
            filters.reopen(last, self._waiting_max)

    def add(self, stream: int, ordinal: int, keys: Any) -> None:
        """Note that an entry holds records with these headers; called for each batch appended.

        ordinal: the entry's number.
        keys: a header table (`.keys`, `.fieldmaps`) or a pair (subjects, field maps);
        None: they cannot be known. Then no search excludes the entry, and the table gives up the
        leading parts of all entries.
        Equal tables are recognised by identity, as the protocol's memo shares them.
        """
        if keys is None:
            if self.depth != 0:
                self._coarsen(ordinal, to=0)
            keys = _UNKNOWN
        # The bitmaps of these headers are those of the stream's last batch, or of a batch that had
        # the same table, or else they are looked up header by header.
        last_keys, last_ordinal, resolved = self._last.get(stream, _NO_LAST)
        if last_keys is keys:
            if last_ordinal == ordinal:
                return  # the entry has all of them from the batch before
        else:
            known_keys, resolved = self._memo.get((stream, id(keys)), _NO_MEMO)
            if known_keys is not keys:
                resolved = self._resolve(stream, ordinal, keys)
        bitmaps, items = resolved
        for bitmap in bitmaps:
            bitmap.add(ordinal)
        if self.filters is not None:
            self.filters.add(ordinal, items)
        # A table too large for the memo does not come again: it would be held for nothing.
        if (stream, id(keys)) in self._memo:
            self._last[stream] = (keys, ordinal, resolved)

    def _resolve(self, stream: int, ordinal: int, keys: Any) -> _Resolved:
        """Find or make the bitmaps of a batch's headers; return them, and the items for filters.

        The caller then adds the entry to each bitmap. Where the table would hold too many headers,
        it is made coarser first. A large header table, which the protocol read in steps, has an
        outline: the names, leading parts and items that were gathered as it was read.
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
            # Without items the entry gets no filter, and so every search takes it.
            bitmaps, _ = resolved
            resolved = bitmaps, None
        # A map of 60 fields counts as 60: 32 tables of a thousand such maps took 160 MiB.
        entries = _MEMO_ENTRIES_MAX
        if size <= _MEMO_TABLE_MAX:
            entries = sum(map(len, subjects)) + sum(map(len, fieldmaps))
        if entries <= _MEMO_ENTRIES_MAX // 2:
            if len(self._memo) >= _MEMO_MAX or self._memo_entries > _MEMO_ENTRIES_MAX:
                self._memo.clear()
                self._memo_entries = 0
            self._memo_entries += entries
            # The memo holds `keys` itself, so that its id cannot become another object's.
            self._memo[stream, id(keys)] = (keys, resolved)
        return resolved

    def _make_room(self, stream: int, ordinal: int, coming: Sequence[Keys]) -> StreamHeaders:
        """Cut all subjects to so few leading parts that a large header table finds room.

        coming: subjects of the table. A sample of them decides, for to take 65,536 subjects apart
        at each depth takes half a second. Returns the stream's bitmaps, which may be new ones.
        """
        sample = _sample(coming)
        # One part fewer than the deepest subject has: with all parts nothing would be cut.
        depth = _deepest(sample) - 1 if self.depth is None else self.depth
        tops = [(stream, top) for top in sample]
        depth = _fitting_depth(tops, len(coming), depth, max(1, self._distinct_max // 2))
        if depth != self.depth:
            self._coarsen(ordinal, to=depth)
        return self.streams[stream]

    def _make_room_for(self, stream: int, ordinal: int, coming: Outline) -> StreamHeaders:
        """Do what _make_room() does for a header table that was read in steps.

        coming: its outline. leads[n - 1] are the distinct first n parts of its subjects, so that
        no sample is needed; names: those of its fields, None: too many to be gathered.
        """
        leads, most = coming.leads, self._distinct_max // 2
        if coming.names is None or len(coming.names) > most:
            depth = 0  # keeps neither subjects nor names
        else:
            depth = len(leads) if self.depth is None else min(self.depth, len(leads))
        while depth > 0 and len(leads[depth - 1]) > most:
            depth -= 1
        if depth != self.depth:
            self._coarsen(ordinal, to=depth)
        return self.streams[stream]

    def _coarsen(self, ordinal: int, to: int | None = None) -> None:
        """Keep fewer leading parts of each subject: `to`, or until the table is half full at most.

        Called when a segment has more distinct headers than its table may hold, or unknown ones.
        Values of fields are given up with the first cut. ordinal: the entry that is being noted.
        New objects take the place of the old ones: a reader keeps what it had, whole.
        """
        filters = self.filters
        if filters is None:
            # First cut: the filters get what the exact bitmaps still tell, and find it from now on.
            filters = EntryFilters(self._waiting_max)
            filters.add_all(self._items(), ordinal)
        streams, distinct = self.streams, self._distinct
        depth = LEAD_PARTS_MAX + 1 if self.depth is None else self.depth
        while depth > 0:
            # One part fewer at least each time, unless the caller names the depth.
            depth = self._shallower(streams, depth) if to is None else to
            streams = {number: _coarser(t, depth, filters) for number, t in streams.items()}
            distinct = sum(map(len, streams.values()))
            if distinct <= self._distinct_max // 2 or to is not None:
                break
        self.depth = depth
        self.filters = filters
        self.streams = streams
        self._distinct = distinct
        # They remember bitmaps of the tables that were replaced.
        self._last.clear()
        self._memo.clear()
        self._memo_entries = 0

    def _shallower(self, streams: Mapping[int, StreamHeaders], depth: int) -> int:
        """Return a lower depth at which subjects are half of what fits, as a sample of them tells.

        A table of 16,384 subjects would be rebuilt in some 20 ms for each depth that is tried.
        """
        most = self._distinct_max // 2 - sum(len(table.names) for table in streams.values())
        if most < 1:
            return 0  # Names of fields alone are too many, and depth 0 keeps none.
        tops = [(number, top) for number, table in streams.items() for top in table.tops]
        sample = _sample(tops)
        depth = min(depth, _deepest(top for _, top in sample)) - 1
        return _fitting_depth(sample, len(tops), depth, most)

    def _items(self) -> Iterator[tuple[str, BitMap]]:
        """Yield each item of an exact table, as filters store it, with the entries that hold it.

        For the filters that tell whole keys and pairs once the table gives them up.
        """
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
    """Return the subjects and field maps of what HeaderTable.add() is given as `keys`."""
    if isinstance(keys, (tuple, list)):
        subjects, fieldmaps = keys
        tops = [(top,) if isinstance(top, str) else tuple(top) for top in subjects]
        return tops, fieldmaps or ()
    return keys.keys, keys.fieldmaps


def _note(
    table: StreamHeaders,
    subjects: Sequence[Keys],
    fieldmaps: Iterable[Fields],
    outline: Outline | None,
) -> _Resolved:
    """Find or make the bitmaps of a batch's headers in a stream's table, and the filters' items.

    No entry is added to them here. outline: what was gathered of a large header table as it was
    read; None: the headers are taken apart here.
    """
    depth = table.depth
    bitmaps = [table.everything()]
    if depth is None:
        # Subjects, names and values are kept whole.
        bitmaps += [_bitmap(table.tops, top) for top in subjects]
        for fields in fieldmaps:
            for name, value in fields.items():
                bitmaps.append(_bitmap(table.names, name))
                bitmaps.append(_bitmap(table.pairs, (name, value)))
        return tuple(bitmaps), None
    if depth:
        # So many leading parts of the subjects are kept, and the fields' names.
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
        # Nothing is kept but which entries there are.
        bitmaps += [_bitmap(table.tops, top) for top in _ANYTHING]
    # The filters get what the table has given up: all keys, and all pairs.
    if outline is not None:
        return tuple(bitmaps), outline.items
    texts = [key for top in subjects for key in top]
    pairs = {pair for fields in fieldmaps for pair in fields.items()}
    return tuple(bitmaps), items_of(chain(texts, (pair_text(*pair) for pair in pairs)))


def _bitmap(table: dict[Any, BitMap], key: Any) -> BitMap:
    """Return the bitmap of a key, made empty where there is none."""
    found = table.get(key)
    if found is None:
        found = table[key] = BitMap()
    return found


def _deepest(tops: Iterable[Keys]) -> int:
    """Return the number of parts between dots of the longest key, LEAD_PARTS_MAX at most.

    For a first cut, which leaves a part fewer than this of each subject.
    """
    parts = max((key.count(".") + 1 for top in tops for key in top), default=1)
    return min(parts, LEAD_PARTS_MAX)


def _sample(items: Sequence[_T]) -> Sequence[_T]:
    """Return at most _SAMPLE of some items, at random: subjects may come in a regular order."""
    if len(items) <= _SAMPLE:
        return items
    return Random(len(items)).sample(items, _SAMPLE)


def _fitting_depth(sample: Sequence[tuple[int, Keys]], count: int, depth: int, most: int) -> int:
    """Return how many leading parts, `depth` or fewer, leave `most` subjects or fewer different.

    The sample tells, which is of `count` subjects, each with its stream's number.
    """
    sample_most = most
    if len(sample) < count:
        # So many of the sample would differ if `most` of all did, and by chance a few more. Where
        # the sample errs, a further depth is tried.
        sample_most = min(most, int(-most * math.expm1(-len(sample) / most)) + _SAMPLE // 50)
    while depth > 0 and len({(n, leading_parts(top, depth)) for n, top in sample}) > sample_most:
        depth -= 1
    return depth


def _coarser(table: StreamHeaders, depth: int, filters: EntryFilters) -> StreamHeaders:
    """Return a stream's index with only `depth` leading parts of each subject.

    What whole subjects and values told, the filters of the segment tell from then on.
    """
    new = StreamHeaders(depth, filters)
    new.everything().update(table.everything())
    if not depth:
        # Every entry may have any subject and any field: everything() remains.
        new.tops = {top: BitMap(new.everything()) for top in _ANYTHING}
        return new
    same = defaultdict[Keys, list[BitMap]](list)
    for top, bitmap in table.tops.items():
        same[leading_parts(top, depth)].append(bitmap)
    new.tops = {top: BitMap.union(*bitmaps) for top, bitmaps in same.items()}
    new.names = {name: BitMap(bitmap) for name, bitmap in table.names.items()}
    return new


# --- stored form -------------------------------------------------------------------------


class StoredHeaders(msgspec.Struct, array_like=True):
    """One stream of a segment's index file: its StreamHeaders, each bitmap serialized."""

    everything: bytes
    tops: list[tuple[list[str], bytes]]
    names: list[tuple[str, bytes]]
    pairs: list[tuple[str, str, bytes]]


def pack_headers(table: HeaderTable) -> tuple[int | None, dict[int, bytes]]:
    """Return what the index file keeps of a segment's headers: (depth, stream -> MessagePack).

    Of a stream these are its bitmaps: of all its entries, and by subject, field name, field value.
    """
    packed = {}
    for number, headers in table.streams.items():
        stored = StoredHeaders(
            headers.everything().serialize(),
            [(list(top), bitmap.serialize()) for top, bitmap in headers.tops.items()],
            [(name, bitmap.serialize()) for name, bitmap in headers.names.items()],
            [(*pair, bitmap.serialize()) for pair, bitmap in headers.pairs.items()],
        )
        packed[number] = msgspec.msgpack.encode(stored)
    return table.depth, packed


def unpack_headers(depth: int | None, packed: bytes, filters: EntryFilters | None) -> StreamHeaders:
    """Return one stream's bitmaps out of the index file, as pack_headers() stored them.

    depth: leading parts kept of each subject; None: whole subjects. filters: those of the segment,
    which there are where a depth is set.
    """
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
