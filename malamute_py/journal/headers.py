"""Inverted index of one segment: (stream, subject) and (stream, field) -> bitmap.

Owns the bitmaps of index entries by header, and their stored form. The rule: a bitmap
may name an entry too many, never one too few. Beyond `distinct_headers_max` the table
keeps leading subject parts and field names only, and says so. Written by the loop
thread, read by others: bitmaps only grow, dictionaries are copied before they are
walked. Source: FORMAT.md, section 6; DESIGN.md, section 6 (Finding).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
from pyroaring import BitMap

Keys: TypeAlias = tuple[str, ...]

_MEMO_MAX = 2048
_NOBODY = BitMap()
_UNKNOWN: tuple[tuple[str, ...], tuple[Mapping[str, str], ...]] = (("",), ())


class StreamHeaders:
    """One stream's bitmaps; also what a search is shown (types.HeaderIndex)."""

    __slots__ = ("_all", "_several", "depth", "names", "pairs", "tops")

    def __init__(self, depth: int | None) -> None:
        """depth: leading parts kept of each subject; None: whole subjects and values."""
        self.depth = depth
        self.tops: dict[Keys, BitMap] = {}
        self.names: dict[str, BitMap] = {}
        self.pairs: dict[tuple[str, str], BitMap] = {}
        self._all = BitMap()
        self._several: tuple[int, list[Keys]] = (0, [])
        """(of so many subjects, those with further keys): looked up apart."""

    @property
    def exact(self) -> bool:
        """False: subjects are leading parts, and field values are not kept."""
        return self.depth is None

    def subjects(self) -> Iterable[tuple[Keys, BitMap]]:
        """(keys, entries) of each distinct subject."""
        return tuple(self.tops.copy().items())

    def subject(self, key: str) -> BitMap:
        """Entries with exactly this key; of an exact table only."""
        found = self.tops.get((key,), _NOBODY)
        several = self.several(key)
        return BitMap.union(found, *map(self.tops.__getitem__, several)) if several else found

    def several(self, key: str) -> list[Keys]:
        """The subjects that have this key and others."""
        if self._several[0] != len(self.tops):
            tops = self.tops.copy()
            self._several = len(tops), [top for top in tops if len(top) > 1]
        return [top for top in self._several[1] if key in top]

    def field(self, name: str, value: str | None) -> BitMap:
        """Entries with the field; with the value too, unless None or not exact."""
        if self.depth == 0:
            return self._all
        if value is None or self.depth is not None:
            found = self.names.get(name)
        else:
            found = self.pairs.get((name, value))
        return BitMap() if found is None else found

    def everything(self) -> BitMap:
        """All entries of the stream."""
        return self._all

    def add_entry(self, ordinal: int) -> None:
        """Count an entry among everything()."""
        self._all.add(ordinal)

    def __len__(self) -> int:
        """Distinct headers held."""
        return len(self.tops) + len(self.names) + len(self.pairs)


class HeaderTable:
    """All streams' bitmaps of one segment, built while it is written."""

    def __init__(self, distinct_max: int) -> None:
        """distinct_max: headers kept exactly."""
        self.depth: int | None = None
        self.streams: dict[int, StreamHeaders] = {}
        self._distinct_max = distinct_max
        self._distinct = 0
        self._last: dict[int, tuple[Any, int, tuple[BitMap, ...]]] = {}
        self._memo: dict[tuple[int, int], tuple[Any, tuple[BitMap, ...]]] = {}

    def restore(self, depth: int | None, streams: dict[int, StreamHeaders]) -> None:
        """Go on from what was stored of the segment, in a table that is still empty."""
        self.depth = depth
        self.streams = streams
        self._distinct = sum(map(len, streams.values()))

    def add(self, stream: int, ordinal: int, keys: Any) -> None:
        """Note that the entry holds records with these headers.

        keys: a header table (`.keys`, `.fieldmaps`) or a pair (subjects, field maps);
        None: they cannot be known, and then the table can exclude nothing any more.
        Equal tables are recognised by identity, as the protocol's memo shares them.
        """
        if keys is None:
            self._coarsen(to=0)
            keys = _UNKNOWN
        last = self._last.get(stream)
        if last is not None and last[0] is keys:
            if last[1] == ordinal:
                return
            bitmaps = last[2]
        else:
            found = self._memo.get((stream, id(keys)))
            if found is not None and found[0] is keys:
                bitmaps = found[1]
            else:
                bitmaps = self._resolve(stream, keys)
        for bitmap in bitmaps:
            bitmap.add(ordinal)
        self._last[stream] = (keys, ordinal, bitmaps)

    def _resolve(self, stream: int, keys: Any) -> tuple[BitMap, ...]:
        table = self.streams.get(stream)
        if table is None:
            table = self.streams[stream] = StreamHeaders(self.depth)
        subjects, fieldmaps = _parts(keys)
        bitmaps = self._find(table, subjects, fieldmaps)
        if self._distinct > self._distinct_max and self.depth != 0:
            self._coarsen()
            table = self.streams[stream]
            bitmaps = self._find(table, subjects, fieldmaps)
        if len(self._memo) >= _MEMO_MAX:
            self._memo.clear()
        # The memo holds `keys` itself, so that its id cannot become another object's.
        self._memo[stream, id(keys)] = (keys, bitmaps)
        return bitmaps

    def _find(
        self, table: StreamHeaders, subjects: Iterable[Any], fieldmaps: Iterable[Mapping[str, str]]
    ) -> tuple[BitMap, ...]:
        before = len(table)
        bitmaps: list[BitMap] = [table.everything()]
        depth = table.depth
        for entry in subjects:
            top: Keys = (entry,) if isinstance(entry, str) else tuple(entry)
            if depth is not None:
                top = _leading(top, depth)
            bitmaps.append(_bitmap(table.tops, top))
        for fields in fieldmaps if depth != 0 else ():
            for name, value in fields.items():
                bitmaps.append(_bitmap(table.names, name))
                if depth is None:
                    bitmaps.append(_bitmap(table.pairs, (name, value)))
        self._distinct += len(table) - before
        return tuple(bitmaps)

    def _coarsen(self, to: int | None = None) -> None:
        """Keep fewer leading parts: `to`, or until the table is at most half full.

        New objects take the place of the old ones: a reader keeps what it had, whole.
        """
        deepest = max(
            (key.count(".") + 1 for t in self.streams.values() for top in t.tops for key in top),
            default=1,
        )
        depth = deepest if self.depth is None else self.depth
        streams = self.streams
        while depth > 0:
            depth = depth - 1 if to is None else to
            streams = {number: _shortened(t, depth) for number, t in self.streams.items()}
            distinct = sum(map(len, streams.values()))
            if distinct <= self._distinct_max // 2:
                break
        self.depth = depth
        self.streams = streams
        self._distinct = distinct
        self._last.clear()
        self._memo.clear()

    def stream(self, stream: int) -> StreamHeaders:
        """One stream's index; an empty one when it has nothing here."""
        return self.streams.get(stream) or StreamHeaders(self.depth)


def _parts(keys: Any) -> tuple[Iterable[Any], Iterable[Mapping[str, str]]]:
    if isinstance(keys, (tuple, list)):
        return keys[0], keys[1] or ()
    return keys.keys, keys.fieldmaps


def _bitmap(table: dict[Any, BitMap], key: Any) -> BitMap:
    found = table.get(key)
    if found is None:
        found = table[key] = BitMap()
    return found


def _leading(top: Keys, depth: int) -> Keys:
    return tuple(dict.fromkeys(".".join(key.split(".")[:depth]) for key in top))


def _shortened(table: StreamHeaders, depth: int) -> StreamHeaders:
    new = StreamHeaders(depth)
    new.everything().update(table.everything())
    for top, bitmap in table.tops.items():
        _bitmap(new.tops, _leading(top, depth)).update(bitmap)
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


def unpack_headers(depth: int | None, packed: bytes) -> StreamHeaders:
    """One stream's index from the index file."""
    stored = msgspec.msgpack.decode(packed, type=StoredHeaders)
    headers = StreamHeaders(depth)
    headers.everything().update(BitMap.deserialize(stored.everything))
    for top, data in stored.tops:
        headers.tops[tuple(top)] = BitMap.deserialize(data)
    for name, data in stored.names:
        headers.names[name] = BitMap.deserialize(data)
    for name, value, data in stored.pairs:
        headers.pairs[name, value] = BitMap.deserialize(data)
    return headers
