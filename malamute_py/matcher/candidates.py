"""Batches of a journal segment that may hold records which a pattern matches.

Owns the conservative evaluation of a pattern over a segment's header index. The rule: the answer
contains every batch that holds a matching record, always; it contains no other for topic, prefix
and regex patterns and alternatives of these, over an exact index. Negation needs care: a batch that
holds a matching record may hold others too, so the complement of an answer is no answer.

Called for reads of history, to leave batches unread. Everywhere here None as an answer stands for
every batch: the index cannot rule any out. Source: docs/design.md, Journal.
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
        """index: whose entries are asked for; all but subjects() is as it has it."""
        self._index = index
        self.exact = index.exact
        self.field = index.field
        self.subject = index.subject
        self.everything = index.everything

    def subjects(self) -> Iterator[tuple[str, BitMap]]:
        """Yield (key, entries that hold a record with it); a key may come more than once."""
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
        return _in_all([_evaluate(child, index) for child in pattern[1:]])
    if kind == "or":
        return _in_some([_evaluate(child, index) for child in pattern[1:]])
    if kind == "not" and index.exact:
        return _with_a_key_outside(pattern[1], index)
    return None  # a kind that the index knows nothing of


def _in_all(parts: list[BitMap | None]) -> BitMap | None:
    """Return the batches that may match all parts. None, of a part or as the answer: any may."""
    known = [part for part in parts if part is not None]
    return BitMap.intersection(*known) if known else None


def _in_some(parts: list[BitMap | None]) -> BitMap | None:
    """Return the batches that may match some part. None, of a part or as the answer: any may."""
    known = [part for part in parts if part is not None]
    return BitMap.union(*known) if len(known) == len(parts) else None


def _by_key(pattern: Canonical, index: HeaderIndex) -> BitMap | None:
    """Return the batches with a subject that a pattern may match; None: any may have one."""
    kind, text = pattern
    if kind == "topic":
        parts = text.split(".")
        if "*" not in parts and "#" not in parts:
            return BitMap(index.subject(text))  # one key, which the index finds by itself
    test = _key_test(pattern) if index.exact else _leading_test(pattern)
    if test is None:
        return None
    found = BitMap()
    for key, batches in index.subjects():
        if test(key):
            found |= batches
    return found


def _key_test(pattern: Canonical) -> KeyTest:
    """Return a test whether a whole key matches a topic, a prefix or an expression."""
    predicate = predicate_of(pattern)
    return lambda key: predicate((key,), ())


def _leading_test(pattern: Canonical) -> KeyTest | None:
    """Return a test whether a key with these leading parts, or just these, may match.

    No leading parts, "", may begin any key. None: there is no such test.
    """
    kind, text = pattern
    if kind == "topic":
        parts = tuple(text.split("."))
        return lambda key: not key or may_lead_to_match(parts, key.split("."))
    if kind == "prefix":
        # Either the parts have the prefix, or it goes on after them.
        return lambda key: not key or key.startswith(text) or text.startswith(f"{key}.")
    # The leading parts of a key cannot answer what an expression needs further on.
    return None


def _by_field(pattern: Canonical, index: HeaderIndex) -> BitMap | None:
    """Return the batches that may hold a record with these fields; None: any may."""
    _, mode, criteria = pattern  # a criterion is (name,) or (name, value)
    held = [index.field(name, value[0] if value else None) for name, *value in criteria]
    return _in_all(held) if mode == "all" else _in_some(held)


def _with_a_key_outside(inner: Canonical, index: HeaderIndex) -> BitMap | None:
    """Return the batches that may hold a record which does not match `inner`; None: any may.

    No key of such a record matches `inner`, so its batch holds a key that does not. Only topics,
    prefixes, expressions and alternatives of these are decided by keys.
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
