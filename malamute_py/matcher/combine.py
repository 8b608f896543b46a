"""The pattern that matches everything, and combinations of patterns by and, or, not.

Owns how combinations are brought to one form and where the index looks for them. The rule: a
combination that is not itself a negation always has a conjunction to be filed under; `positive`
brings every pattern to that form or to the negation of one, so that no pattern has to be tried on
each header merely because there is a `not` in it.

Words: a fact is true or not of a header, a conjunction is facts that must all hold. The index files
a pattern under conjunctions, of which one holds for each header that the pattern matches; where the
reverse is not so (the filing is not exact), the pattern's predicate decides. A kind's methods are
called for each new pattern: canonical() brings it to one form, filing() or table() give it its
place in the index, and predicate() makes its test of one header.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from malamute_protocol.pattern import Pattern, check_all, check_many, check_not, validate
from malamute_py.matcher.expressions import check_weight
from malamute_py.matcher.kinds import (
    Canonical,
    Fact,
    Fields,
    Filing,
    Keys,
    PatternKind,
    Predicate,
    Table,
    canonicalise,
    kind_of,
    predicate_of,
    to_wire,
)

ALL: Canonical = ("all",)
NONE: Canonical = ("not", ALL)


def _sorted(children: set[Canonical]) -> tuple[Canonical, ...]:
    """Return the parts in one order, so that patterns of the same parts become equal."""
    # By repr, as patterns of different shape do not compare.
    return tuple(sorted(children, key=repr))


def conjoin(children: Sequence[Canonical]) -> Canonical:
    """Make the canonical `and` of canonical patterns: flat, in one order, each part once.

    What matches everything adds nothing to it, what matches nothing decides it.
    """
    flat: set[Canonical] = set()
    for child in children:
        flat.update(child[1:] if child[0] == "and" else (child,))
    flat.discard(ALL)
    if NONE in flat:
        return NONE
    if len(flat) < 2:
        return flat.pop() if flat else ALL
    return ("and", *_sorted(flat))


def disjoin(children: Sequence[Canonical]) -> Canonical:
    """Make the canonical `or` of canonical patterns: flat, in one order, each part once.

    What matches nothing adds nothing to it, what matches everything decides it.
    """
    flat: set[Canonical] = set()
    for child in children:
        flat.update(child[1:] if child[0] == "or" else (child,))
    flat.discard(NONE)
    if ALL in flat:
        return ALL
    if len(flat) < 2:
        return flat.pop() if flat else NONE
    return ("or", *_sorted(flat))


def negate(child: Canonical) -> Canonical:
    """Make the canonical `not` of a canonical pattern."""
    if child[0] != "not":
        return ("not", child)
    inner: Canonical = child[1]
    return inner


def positive(canonical: Canonical) -> tuple[bool, Canonical]:
    """Move negation out as far as it goes: (negated, a pattern that is not a negation).

    By De Morgan's laws: `not a or b` is `not (a and not b)`, and `not a and not b` is
    `not (a or b)`. An `and` with a plain child stays as it is, negations inside: the index files it
    under that child.
    """
    if canonical[0] == "not":
        negated, inner = positive(canonical[1])
        return not negated, inner
    if canonical[0] not in ("and", "or"):
        return False, canonical
    children = [positive(child) for child in canonical[1:]]
    plain = [child for negated, child in children if not negated]
    opposites = [child for negated, child in children if negated]
    """For each negated child the pattern of which it is the negation."""
    all_negated = False
    """Whether the answer is the negation of `result`."""
    if canonical[0] == "or":
        if opposites:
            all_negated, result = True, conjoin(opposites + [negate(child) for child in plain])
        else:
            result = disjoin(plain)
    elif plain:
        result = conjoin(plain + [negate(child) for child in opposites])
    else:
        all_negated, result = True, disjoin(opposites)
    # Simplifying may have left nothing but negations, as in (everything or x) and not y.
    if result[0] == "not" or (result[0] == "and" and all(c[0] == "not" for c in result[1:])):
        negated_again, result = positive(result)
        all_negated = all_negated != negated_again  # a negation of a negation is none
    return all_negated, result


def normalise(wire: object) -> Canonical:
    """Check a pattern in wire form and bring it to its canonical form; raises PatternError.

    Patterns that are equal in that form share a number in the index, and mean the same.
    """
    negated, inner = positive(canonicalise(validate(wire)))
    return negate(inner) if negated else inner


class CompiledPattern(NamedTuple):
    """One pattern, ready to be asked about single headers."""

    canonical: Canonical
    matches: Predicate
    slow: bool
    """Whether one header may cost so much that it has to be matched in steps."""

    @property
    def wire(self) -> Pattern:
        """Return the canonical wire form."""
        return to_wire(self.canonical)


def compile_pattern(wire: object) -> CompiledPattern:
    """Check and compile one pattern; raises PatternError with a code that may be sent.

    For readers that ask about single headers, without an index, and for checks of a pattern.
    """
    canonical = normalise(wire)
    weight = check_weight(canonical)
    # Only regular expressions have a weight, and only they may take long.
    return CompiledPattern(canonical, predicate_of(canonical), slow=weight > 0)


_ONLY_SUBJECTS: Final = frozenset({"all", "topic", "prefix", "regex"})
_COMBINED: Final = frozenset({"and", "or", "not"})


def asks_subjects_only(pattern: list[Any]) -> bool:
    """Whether a pattern, in wire form and checked, asks for nothing but subjects and keys."""
    kind, *rest = pattern
    if kind in _COMBINED:
        return all(map(asks_subjects_only, rest))
    return kind in _ONLY_SUBJECTS


class AllTable:
    """Holds one number at most, as all patterns that match everything are the same pattern."""

    def __init__(self) -> None:
        self._number = -1

    def add(self, number: int, canonical: Canonical) -> None:
        """Keep the number of the pattern, which the index takes up."""
        self._number = number

    def discard(self, number: int, canonical: Canonical) -> None:
        """Forget the number: no caller has the pattern any more."""
        self._number = -1

    def lookup(self, keys: Keys, fields: Fields, found: list[int]) -> None:
        """Append the number, whatever the header is."""
        if self._number >= 0:
            found.append(self._number)


class AllKind(PatternKind):
    """["all"]"""

    name = "all"

    def check(self, wire: Sequence[Any]) -> Sequence[Any]:
        """Check the wire form as validate() of the protocol does for this kind."""
        return check_all(wire)

    def predicate(self, canonical: Canonical) -> Predicate:
        """Return a predicate that is always true."""
        return lambda keys, fields: True

    def table(self) -> Table:
        """Return a table of one number."""
        return AllTable()


class AndKind(PatternKind):
    """["and", pattern, ...]"""

    name = "and"

    def check(self, wire: Sequence[Any]) -> Sequence[Any]:
        """Check the wire form as validate() of the protocol does for this kind."""
        return check_many(wire)

    def canonical(self, wire: list[Any]) -> Canonical:
        """Flatten nested `and`, sort the parts, and keep each once."""
        return conjoin([canonicalise(child) for child in wire[1:]])

    def predicate(self, canonical: Canonical) -> Predicate:
        """Return a predicate that asks all parts."""
        children = tuple(predicate_of(child) for child in canonical[1:])
        return lambda keys, fields: all(child(keys, fields) for child in children)

    def filing(self, canonical: Canonical) -> Filing:
        """File under the facts of all children that are conjunctions; the predicate does the rest.

        Without such a child, file under the conjunctions of the child that has the fewest.
        """
        facts: set[Fact] = set()
        exact = True  # until a child is left to the predicate
        wider: list[Filing] = []  # of children that have alternatives
        for child in canonical[1:]:
            if child[0] == "not":
                exact = False
                continue
            filing = kind_of(child).filing(child)
            if len(filing.conjunctions) == 1:
                facts |= filing.conjunctions[0]
                exact = exact and filing.exact
            else:
                wider.append(filing)
                exact = False
        if facts:
            return Filing((frozenset(facts),), exact)
        assert wider, "positive() leaves a child that is not a negation"
        return Filing(min(wider, key=lambda f: len(f.conjunctions)).conjunctions, exact=False)


class OrKind(PatternKind):
    """["or", pattern, ...]"""

    name = "or"

    def check(self, wire: Sequence[Any]) -> Sequence[Any]:
        """Check the wire form as validate() of the protocol does for this kind."""
        return check_many(wire)

    def canonical(self, wire: list[Any]) -> Canonical:
        """Flatten nested `or`, sort the parts, and keep each once."""
        return disjoin([canonicalise(child) for child in wire[1:]])

    def predicate(self, canonical: Canonical) -> Predicate:
        """Return a predicate that asks until a part matches."""
        children = tuple(predicate_of(child) for child in canonical[1:])
        return lambda keys, fields: any(child(keys, fields) for child in children)

    def filing(self, canonical: Canonical) -> Filing:
        """File under every conjunction of every child."""
        filings = [kind_of(child).filing(child) for child in canonical[1:]]
        conjunctions = {conjunction for filing in filings for conjunction in filing.conjunctions}
        return Filing(tuple(conjunctions), all(filing.exact for filing in filings))


class NotKind(PatternKind):
    """["not", pattern]"""

    name = "not"

    def check(self, wire: Sequence[Any]) -> Sequence[Any]:
        """Check the wire form as validate() of the protocol does for this kind."""
        return check_not(wire)

    def canonical(self, wire: list[Any]) -> Canonical:
        """Drop a `not` of a `not`."""
        return negate(canonicalise(wire[1]))

    def predicate(self, canonical: Canonical) -> Predicate:
        """Return the opposite predicate."""
        child = predicate_of(canonical[1])
        return lambda keys, fields: not child(keys, fields)

    def filing(self, canonical: Canonical) -> Filing:
        """File nowhere: the index files the opposite and takes the complement."""
        raise AssertionError("a negation is not filed")
