"""Batches of a journal segment that may hold records which a pattern matches.

Owns the conservative evaluation of a pattern over a segment's header index. The rule: the answer
contains every batch that holds a matching record, always; it contains no other for topic, prefix
and regex patterns and alternatives of these, over an exact index. Negation needs care: a batch that
holds a matching record may hold others too, so the complement of an answer is no answer. Source:
docs/design.md, Journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias

from pyroaring import BitMap

from malamute_py.matcher.combine import NONE, normalise
from malamute_py.matcher.kinds import Canonical, predicate_of
from malamute_py.matcher.topics import may_lead_to_match

KeyTest: TypeAlias = Callable[[str], bool]


class HeaderIndex(Protocol):
    """The headers of a segment and the batches that hold them, as bitmaps of batch numbers."""

    @property
    def exact(self) -> bool:
        """False: subjects() gives leading parts only, each whole or cut off at a dot.

        An empty leading part, "", may belong to any key.
        """

    def subjects(self) -> Iterable[tuple[str, BitMap]]:
        """Every key (subject or further key), or its leading parts, and the batches with it."""

    def subject(self, key: str) -> BitMap:
        """Return the holders of a record with just this key; where not exact, possible holders."""

    def field(self, name: str, value: str | None) -> BitMap | None:
        """Batches that hold a record with the field (value None: with any value).

        None: the field is not indexed, and any batch may hold it.
        """

    def everything(self) -> BitMap:
        """All batches of the segment."""


class RecordIndex(Protocol):
    """A header index that files an entry under all keys of a record together."""

    @property
    def exact(self) -> bool:
        """False: subjects are leading parts ("" may begin anything). See HeaderIndex."""

    def subjects(self) -> Iterable[tuple[tuple[str, ...], BitMap]]:
        """All keys of a record, or their leading parts, and who holds such a record."""

    def subject(self, key: str) -> BitMap:
        """Return the holders of a record with just this key; where not exact, possible holders.

        See HeaderIndex.
        """

    def field(self, name: str, value: str | None) -> BitMap:
        """Entries with a record that has the field, and, unless None, the value; as subject().

        See HeaderIndex.
        """

    def everything(self) -> BitMap:
        """All entries of the stream. See HeaderIndex."""


class ByKey:
    """A RecordIndex as candidates() wants it: by key."""

    def __init__(self, index: RecordIndex) -> None:
        self._index = index
        self.exact = index.exact
        self.field = index.field
        self.subject = index.subject
        self.everything = index.everything

    def subjects(self) -> Iterator[tuple[str, BitMap]]:
        """(keys of a record, entries that hold such a record). See HeaderIndex."""
        for keys, bitmap in self._index.subjects():
            for key in keys:
                yield key, bitmap


def candidates(wire: object, index: HeaderIndex) -> BitMap | None:
    """Return the batches that may hold a match, None for all of them; raises PatternError."""
    return _evaluate(normalise(wire), index)


def _evaluate(pattern: Canonical, index: HeaderIndex) -> BitMap | None:
    """Return the batches that may match a pattern; None: any may."""
    if pattern == NONE:
        return BitMap()
    kind = pattern[0]
    if kind in ("topic", "prefix", "regex"):
        return _by_key(pattern, index)
    if kind == "fields":
        return _by_field(pattern, index)
    if kind == "and":
        return _both([_evaluate(child, index) for child in pattern[1:]])
    if kind == "or":
        return _either([_evaluate(child, index) for child in pattern[1:]])
    if kind == "not" and index.exact:
        return _without(pattern[1], index)
    return None


def _both(parts: list[BitMap | None]) -> BitMap | None:
    """Return the batches that may match all parts. None, of a part or as the answer: any may."""
    known = [part for part in parts if part is not None]
    return BitMap.intersection(*known) if known else None


def _either(parts: list[BitMap | None]) -> BitMap | None:
    """Return the batches that may match some part. None, of a part or as the answer: any may."""
    known = [part for part in parts if part is not None]
    return BitMap.union(*known) if len(known) == len(parts) else None


def _by_key(pattern: Canonical, index: HeaderIndex) -> BitMap | None:
    """Return the batches with a subject that a pattern may match; None: any may have one."""
    if pattern[0] == "topic":
        parts = pattern[1].split(".")
        if "*" not in parts and "#" not in parts:
            return BitMap(index.subject(pattern[1]))
    test = _key_test(pattern) if index.exact else _leading_test(pattern)
    if test is None:
        return None
    found = BitMap()
    for key, batches in index.subjects():
        if test(key):
            found |= batches
    return found


def _key_test(pattern: Canonical) -> KeyTest:
    predicate = predicate_of(pattern)
    return lambda key: predicate((key,), ())


def _leading_test(pattern: Canonical) -> KeyTest | None:
    """Return a test whether a key with these leading parts, or just these, may match."""
    text: str = pattern[1]
    if pattern[0] == "topic":
        parts = tuple(text.split("."))
        return lambda key: not key or may_lead_to_match(parts, key.split("."))
    if pattern[0] == "prefix":
        return lambda key: not key or key.startswith(text) or text.startswith(f"{key}.")
    # The leading parts of a key cannot answer what an expression needs further on.
    return None


def _by_field(pattern: Canonical, index: HeaderIndex) -> BitMap | None:
    """Return the batches that may hold a record with these fields."""
    held = [index.field(c[0], c[1] if len(c) == 2 else None) for c in pattern[2]]
    return _both(held) if pattern[1] == "all" else _either(held)


def _without(inner: Canonical, index: HeaderIndex) -> BitMap | None:
    """Batches with a record that does not match inner, where keys alone decide that.

    No key of such a record matches inner, so its batch holds a key that does not.
    """
    leaves = inner[1:] if inner[0] == "or" else (inner,)
    if any(leaf[0] not in ("topic", "prefix", "regex") for leaf in leaves):
        return None
    tests = [_key_test(leaf) for leaf in leaves]
    found = BitMap()
    for key, batches in index.subjects():
        if not any(test(key) for test in tests):
            found |= batches
    return found
