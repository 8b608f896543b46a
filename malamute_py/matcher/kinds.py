"""The interface of a kind of pattern, the table of kinds, and canonical patterns.

Owns the interface by which kinds plug in; the built-in kinds use it and nothing else. The rule: a
pattern is first checked (malamute_protocol.pattern), then canonicalised to a hashable tuple, and
two patterns are the same exactly when these tuples are equal. To add a kind, subclass PatternKind,
give `name`, `check`, `canonical` and `predicate`, and call register_kind; that is enough to be
correct, at the cost of one call of the predicate for each pattern and each new header. A `table`
makes it fast. Source: docs/design.md, Matching.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from malamute_protocol.pattern import Pattern, PatternError, register_check
from malamute_protocol.pattern import unregister_check as _unregister_check

Keys: TypeAlias = tuple[str, ...]
"""A record's subject and its further keys; a pattern on the subject matches if any matches."""

Fields: TypeAlias = tuple[tuple[str, str], ...]
"""A record's fields as (name, value), each name once, sorted by name."""

Canonical: TypeAlias = tuple[Any, ...]
"""A pattern in canonical form: the wire form with tuples for lists."""

Predicate: TypeAlias = Callable[[Keys, Fields], bool]
"""Whether one pattern matches one header."""


class Leaf(NamedTuple):
    """The fact that a header matches a pattern of a kind that has a table of its own."""

    canonical: Canonical


Fact: TypeAlias = "Leaf | str | tuple[str, str]"
"""A statement about a header: a leaf matches, a field is present, a field has a value."""


class Filing(NamedTuple):
    """The conjunctions under which the index files a pattern: it is a candidate once one holds.

    A conjunction is a set of facts that must all hold. exact: every candidate matches; otherwise
    the predicate decides. The conjunctions must cover the pattern: no header matches it without one
    of them holding.
    """

    conjunctions: tuple[frozenset[Fact], ...]
    exact: bool


class Table(Protocol):
    """The patterns of one kind in one index, found by header."""

    def add(self, number: int, canonical: Canonical) -> None:
        """Take up a pattern under its number; raises PatternError and takes up nothing."""

    def discard(self, number: int, canonical: Canonical) -> None:
        """Forget the pattern that was added under this number."""

    def lookup(self, keys: Keys, fields: Fields, found: list[int]) -> None:
        """Append the numbers of all patterns that match; a number may appear twice."""


class PatternKind(ABC):
    """One kind of pattern: its form, its canonical form, its predicate, its place in the index."""

    name: str

    @abstractmethod
    def check(self, wire: Sequence[Any]) -> Sequence[Any]:
        """Raise PatternError unless wire, [name, ...], is well formed; return nested patterns."""

    @abstractmethod
    def predicate(self, canonical: Canonical) -> Predicate:
        """Compile the pattern on its own; raises PatternError if that cannot be done."""

    def canonical(self, wire: Pattern) -> Canonical:
        """Return the one form of all patterns that mean the same; wire has passed the check."""
        return (self.name, *wire[1:])

    def filing(self, canonical: Canonical) -> Filing:
        """Tell where the index files the pattern: by default in the kind's own table."""
        return Filing((frozenset((Leaf(canonical),)),), exact=True)

    def table(self) -> Table:
        """Make a table for one index: by default one that tries every pattern in turn."""
        return ScanTable(self)


class ScanTable:
    """The table of a kind that has none of its own: it tries every pattern."""

    def __init__(self, kind: PatternKind) -> None:
        self._kind = kind
        self._predicates: dict[int, Predicate] = {}

    def add(self, number: int, canonical: Canonical) -> None:
        """Compile a pattern, which the index takes up, and keep it."""
        self._predicates[number] = self._kind.predicate(canonical)

    def discard(self, number: int, canonical: Canonical) -> None:
        """Forget the pattern."""
        del self._predicates[number]

    def lookup(self, keys: Keys, fields: Fields, found: list[int]) -> None:
        """Append the numbers of the patterns that match, found by trying each of them."""
        found.extend(n for n, predicate in self._predicates.items() if predicate(keys, fields))


_KINDS: dict[str, PatternKind] = {}


def install(kind: PatternKind) -> None:
    """Put a kind into the table, with the check that the protocol has for it."""
    _KINDS[kind.name] = kind


def register_kind(kind: PatternKind) -> None:
    """Make a program's own kind of pattern known; raises ValueError if the name is taken."""
    register_check(kind.name, kind.check)
    install(kind)


def unregister_kind(kind: PatternKind) -> None:
    """Forget a kind that register_kind made known; no index may hold a pattern of it."""
    _unregister_check(kind.name)
    del _KINDS[kind.name]


def kind_of(canonical: Canonical) -> PatternKind:
    """Return the kind of a canonical pattern."""
    return _KINDS[canonical[0]]


def canonicalise(wire: Pattern) -> Canonical:
    """Return the canonical form of a pattern that has passed validate().

    Raises PatternError: no kind of this name is known here.
    """
    kind = _KINDS.get(wire[0])
    if kind is None:
        raise PatternError("unknown_pattern_kind", f"this broker has no pattern kind '{wire[0]}'")
    return kind.canonical(wire)


def predicate_of(canonical: Canonical) -> Predicate:
    """Compile a canonical pattern on its own."""
    return kind_of(canonical).predicate(canonical)


def to_wire(canonical: Canonical) -> Pattern:
    """Return the wire form of a canonical pattern."""
    return [to_wire(item) if isinstance(item, tuple) else item for item in canonical]
