r"""Regular expressions, many of them compiled into one automaton (RE2 sets).

Owns what a regular expression means (RE2 syntax, found anywhere in the key, no backtracking) and
how much one may cost. The rules: time is linear in the key's length times the size of the compiled
programs, and both are bounded; an answer is never silently wrong: a set whose automaton ran out of
memory answers like one without a match (RE2's set.cc; the Python binding drops the reason), so each
set holds the empty expression as a witness, and where that is missing its members are tried one by
one. New expressions wait in a small overlay and move to ever larger sets, as one large set would
have to be rebuilt, in one stall, for each of them.

The bound is for the worst case. An automaton that meets ever new states costs up to 17 ns for each
byte of the key and each instruction of all programs (google-re2 1.1, measured with keys and
expressions made for it): 17 expressions like `([ab]{0,30}a){0,30}c` took 100 ms for one new key of
255 bytes. Repetition, counted or written out, is what makes so many states, so an expression full
of it is counted as REPEATED_WEIGHT times as large as it is: its weight. All such expressions of one
index
together take 10 to 16 ms at worst for such a key, and one alone takes 1 ms. Usual expressions
(anchored, 16 instructions) took 30 us for 30,000 instructions together. Source: RE2's set.cc and
dfa.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import re2

from malamute_protocol.pattern import PatternError, check_regex
from malamute_py.matcher.kinds import Canonical, Fields, Keys, PatternKind, Predicate, Table

PROGRAM_MAX: Final = 2_000
"""Instructions of one compiled expression, weighted: `[a-z]+(eur|usd)` has about 20."""
PATTERN_MAX: Final = 8_000
"""Instructions of all expressions that one pattern combines."""
PROGRAMS_MAX: Final = 30_000
"""Instructions of all expressions in one index: about 1,900 usual ones. SPEC.md, section 7."""
REPEATED_WEIGHT: Final = 8
"""Factor by which an instruction counts in an expression that repeats a lot."""
QUANTIFIERS_MAX: Final = 32
"""Number of `?`, `*`, `+` and empty alternatives beyond which an expression counts as one that
repeats a lot."""
SET_COUNT_MAX: Final = 512
SET_PROGRAM_MAX: Final = 2_000
"""Bounds of one set. An add, which may build a set, so stalls the loop for a few ms (11 with sets
of 1,024 and 50,000), and one look for one key of 255 bytes takes 6 ms at worst: between two sets
the broker's loop may turn to others."""
SET_MEMORY_BYTES: Final = 8 << 20
"""Memory that the automaton of one set may take; it starts small and grows as keys need it."""
EXPRESSION_MEMORY_BYTES: Final = 1 << 20
OVERLAY_MAX: Final = 16
"""Expressions tried one by one before they are put into a set; each costs about 2 us."""


def _options(memory_bytes: int) -> Any:
    """Return options of RE2: a bound of memory, and no lines on standard error."""
    options = re2.Options()
    options.max_mem = memory_bytes
    options.log_errors = False
    return options


def _compile(expression: str) -> Any:
    """Compile an expression. Raises PatternError: it is none, or compiles to too much."""
    try:
        compiled = re2.compile(expression.encode(), _options(EXPRESSION_MEMORY_BYTES))
    except re2.error as error:
        detail = error.args[0] if error.args else b""
        reason = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
        raise PatternError(
            "bad_pattern",
            f"regular expression {expression[:80]!r}: {reason} (RE2 syntax: no look-around, "
            "no back-references)",
        ) from None
    weight = _weight(expression, compiled)
    if weight > PROGRAM_MAX:
        times = weight // compiled.programsize
        counted = f", counted {times} times since it repeats so much" if times > 1 else ""
        raise PatternError(
            "bad_pattern",
            f"regular expression {expression[:80]!r} compiles to {compiled.programsize} "
            f"instructions{counted}, at most {PROGRAM_MAX}: use smaller repetition counts",
        )
    return compiled


# Finds what repeats: a counted repetition {low,rest}, or a quantifier. An empty alternative is one;
# the `?` after an opening parenthesis is none, and is told by `flags`.
_TOKENS: Final = re.compile(
    r"""
    \\Q.*?(?:\\E|$) | \\. | \[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]])*\]  # no quantifier is in these
    | \{(?P<low>\d+)(?P<rest>,\d*)?\}
    | (?P<quantifier>\(\?(?P<flags>[\w:<-])? | [?*+] | \|(?=[|)]|$) | \((?=\|))
    """,
    re.VERBOSE | re.DOTALL,
)


def _repeats(expression: str) -> bool:
    """Whether an expression repeats so much that keys may lead it to ever new states."""
    quantifiers = 0
    for token in _TOKENS.finditer(expression):
        if token["low"] is not None:
            # {3,5}: low 3, rest ",5"; without a bound above, as in {3,}, low alone tells.
            most = token["rest"].lstrip(",") if token["rest"] else ""
            if int(most or token["low"]) > 1:
                return True
        elif token["quantifier"] is not None and token["flags"] is None:  # no `(?` of a group
            quantifiers += 1
    return quantifiers > QUANTIFIERS_MAX


def _weight(expression: str, compiled: Any) -> int:
    """Return what an expression counts towards the bounds."""
    size: int = compiled.programsize
    return size * REPEATED_WEIGHT if _repeats(expression) else size


_COMBINED: Final = frozenset({"and", "or", "not"})
"""Names of the kinds whose parts are patterns."""


def weight_of(canonical: Canonical) -> int:
    """Return what the expressions in a pattern count, each as often as it occurs in it."""
    if canonical[0] == RegexKind.name:
        return _weight(canonical[1], _compile(canonical[1]))
    if canonical[0] not in _COMBINED:
        return 0  # A field may have the name `regex`.
    return sum(weight_of(part) for part in canonical[1:])


def check_weight(canonical: Canonical) -> int:
    """Return what the expressions of a pattern count; PatternError: too much for one pattern."""
    weight = weight_of(canonical)
    if weight > PATTERN_MAX:
        raise PatternError(
            "bad_pattern",
            f"the regular expressions of the pattern count {weight} instructions, at most "
            f"{PATTERN_MAX}: use fewer or simpler ones",
        )
    return weight


class _Set:
    """Expressions compiled into one automaton; discarded members stay until the set is rebuilt."""

    __slots__ = ("alive", "automaton", "members", "singly", "weight")

    def __init__(self, members: list[tuple[int, str, int]]) -> None:
        """Compile expressions together. members: (number of the pattern, expression, weight)."""
        self.members: list[tuple[int, str, int] | None] = list(members)
        """(number, expression, weight), None where discarded."""
        self.alive = len(members)
        """How many members were not discarded."""
        self.weight = sum(weight for _, _, weight in members)
        """Weight of all members, discarded ones, too."""
        self.singly: list[Any] | None = None
        """Each expression compiled alone, once that was needed."""
        automaton = re2.Set.SearchSet(_options(SET_MEMORY_BYTES))
        automaton.Add(b"")  # The witness: its hit is number 0, those of the members follow.
        for _, expression, _ in members:
            automaton.Add(expression.encode())
        try:
            automaton.Compile()
            self.automaton = automaton
        except re2.error:
            # Together they are too large, although each is allowed: slower, but right.
            self.automaton = None

    def living(self) -> list[tuple[int, str, int]]:
        """Return the members that were not discarded."""
        return [member for member in self.members if member is not None]

    def lookup(self, key: bytes, found: list[int]) -> None:
        """Append the patterns of this set whose expression is found in a key.

        The witness matches every key: an automaton without any hit ran out of memory. Then, and
        where there is no automaton, each expression is tried by itself.
        """
        hits = () if self.automaton is None else self.automaton.Match(key)
        if hits:
            members = [self.members[hit - 1] for hit in hits if hit]  # 0 is the witness.
        else:
            if self.singly is None:
                # member[1]: its expression.
                self.singly = [member and _compile(member[1]) for member in self.members]
            alone = zip(self.members, self.singly, strict=True)
            members = [each for each, compiled in alone if each and compiled.search(key)]
        found.extend([member[0] for member in members if member is not None])  # its number


class RegexTable:
    """The overlay of new expressions, and sets of growing size."""

    def __init__(self) -> None:
        self.programs_max = PROGRAMS_MAX
        self._overlay: dict[int, tuple[Any, str, int]] = {}
        """New expressions, which are tried one by one until they move into a set: number ->
        (compiled, expression, weight)."""
        self._sets: list[_Set] = []
        """The largest first."""
        self._where: dict[int, tuple[_Set, int]] = {}
        """Number of an expression that is in a set -> the set, and its place there."""
        self._total_weight = 0
        """Weight of all expressions."""

    def __len__(self) -> int:
        return len(self._overlay) + len(self._where)

    def add(self, number: int, canonical: Canonical) -> None:
        """Take up an expression; raises PatternError when all together would be too large."""
        expression: str = canonical[1]
        compiled = _compile(expression)
        weight = _weight(expression, compiled)
        if self._total_weight + weight > self.programs_max:
            raise PatternError(
                "limit",
                f"there are {len(self)} regular expressions of {self._total_weight} instructions "
                f"in all and this one counts {weight}; the limit is {self.programs_max}: use topic "
                "or prefix patterns, or several streams or services",
            )
        self._total_weight += weight
        self._overlay[number] = (compiled, expression, weight)
        if len(self._overlay) > OVERLAY_MAX:
            self._settle()

    def discard(self, number: int, canonical: Canonical) -> None:
        """Forget an expression; a set is rebuilt when half of it is gone."""
        overlaid = self._overlay.pop(number, None)
        if overlaid is not None:
            _, _, weight = overlaid
            self._total_weight -= weight
            return
        group, at = self._where.pop(number)
        member = group.members[at]
        assert member is not None
        _, _, weight = member
        self._total_weight -= weight
        group.members[at] = None
        group.alive -= 1
        if group.alive * 2 <= len(group.members):
            self._sets.remove(group)
            if group.alive:
                self._place(group.living())

    def lookup(self, keys: Keys, fields: Fields, found: list[int]) -> None:
        """Append the numbers of all expressions that are found in a key: of sets, and new ones."""
        if not self._overlay and not self._sets:
            return
        for key in keys:
            encoded = key.encode()
            for group in self._sets:
                group.lookup(encoded, found)
            for number, (compiled, _, _) in self._overlay.items():
                if compiled.search(encoded):
                    found.append(number)

    def steps(self, keys: Keys, found: list[int]) -> Iterator[None]:
        """Do the work of lookup() in steps of one set or expression and one key, for Index.steps().

        Expressions may come and go between the steps; those that are there throughout are found.
        """
        for key in keys:
            encoded = key.encode()
            # Sets and overlay are copied together: between two steps an expression may move from
            # the overlay into a set.
            groups, overlay = list(self._sets), list(self._overlay.items())
            for group in groups:
                group.lookup(encoded, found)
                yield
            for number, (compiled, _, _) in overlay:
                if compiled.search(encoded):
                    found.append(number)
                yield

    def _settle(self) -> None:
        """Move the overlay into a set, with every smaller set that still fits; it was full."""
        members = [(n, text, weight) for n, (_, text, weight) in self._overlay.items()]
        self._overlay.clear()
        self._place(members)

    def _place(self, members: list[tuple[int, str, int]]) -> None:
        """Put expressions into a set, together with those of smaller sets, which it replaces.

        members: (number, expression, weight).
        """
        # Only sets that are not larger are taken in, so that each set at least doubles: an
        # expression is compiled anew about log2(SET_COUNT_MAX / OVERLAY_MAX) times in its life.
        total = sum(weight for _, _, weight in members)
        while self._sets and self._sets[-1].alive <= len(members):
            smallest = self._sets[-1]
            if (
                smallest.alive + len(members) > SET_COUNT_MAX
                or smallest.weight + total > SET_PROGRAM_MAX
            ):
                break
            self._sets.pop()
            members = smallest.living() + members
            total += smallest.weight
        group = _Set(members)
        self._sets.append(group)
        self._sets.sort(key=lambda each: -each.alive)
        for at, (number, _, _) in enumerate(members):
            self._where[number] = (group, at)


class RegexKind(PatternKind):
    """["regex", expression]"""

    name = "regex"

    def check(self, wire: Sequence[Any]) -> Sequence[Any]:
        """Check the wire form as validate() of the protocol does; RE2 is asked by predicate()."""
        return check_regex(wire)

    def predicate(self, canonical: Canonical) -> Predicate:
        """Compile the expression alone, with RE2."""
        compiled = _compile(canonical[1])
        return lambda keys, fields: any(compiled.search(key.encode()) for key in keys)

    def table(self) -> Table:
        """Return a table of sets and an overlay."""
        return RegexTable()
