"""The index: from a header to the numbers of all patterns that match it.

Owns the numbers of the patterns of one stream's readers, or of one service's offers. The rules: the
same pattern has one number, however often it is added; a header seen before is one dictionary
look-up; a new header costs by what it matches, not by how many patterns there are; add and discard
cost the same however many headers are remembered. scan.py gives the same answers by comparing one
pattern at a time, and the tests hold the two together.

Words: a pattern's canonical form is alike for all that mean the same. A leaf is a pattern that the
table of its kind finds (a topic, a prefix, an expression). Any other one is filed under
conjunctions, sets of facts that must all hold: a leaf matches, a field is present, a field has a
value. A check is the predicate of a pattern that does not always match when its conjunction holds.
A negation is filed as the complement of its opposite. The memo has headers that were seen before.
Source: docs/design.md, Matching.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

from pyroaring import BitMap

from malamute_protocol.pattern import Pattern, PatternError
from malamute_py.matcher.combine import normalise
from malamute_py.matcher.conjunctions import Conjunctions, HeldFact
from malamute_py.matcher.expressions import PROGRAMS_MAX, RegexTable, weight_of
from malamute_py.matcher.kinds import (
    Canonical,
    Fields,
    Keys,
    Leaf,
    Predicate,
    Table,
    kind_of,
    predicate_of,
    to_wire,
)
from malamute_py.matcher.memo import Memo
from malamute_py.matcher.topics import TopicTable

MEMO_HEADERS_MAX = 65_536
MEMO_BYTES_MAX = 64 << 20


class _Pattern:
    """One numbered pattern: one that a caller added, or a part that others are made of."""

    __slots__ = (
        "added_by_callers",
        "canonical",
        "conjunctions",
        "held_by_patterns",
        "negates",
        "number",
        "parts",
    )

    def __init__(self, number: int, canonical: Canonical) -> None:
        """number: of the pattern in this index."""
        self.number = number
        self.canonical = canonical
        self.added_by_callers = 0
        """How often add() was called for the pattern, less the calls of discard()."""
        self.held_by_patterns = 0
        """How many other patterns have this one as a part."""
        self.conjunctions: tuple[frozenset[HeldFact], ...] | None = None
        """Conjunctions that the pattern is filed under; None for a leaf, which is in its kind's
        table."""
        self.negates = -1
        """The number of the pattern whose complement this one is."""
        self.parts: list[int] = []
        """The numbers of the parts that this pattern holds."""


STEP_HEADERS: Final = 64
"""Headers that are matched in one step where no regular expression is involved."""


def _gather(
    alike: dict[bytes, tuple[BitMap, list[int]]], numbers: BitMap, places: list[int]
) -> None:
    """Put the places of headers to the others that the same patterns match.

    alike: (numbers of the patterns, places), by the bytes of the numbers, as bitmaps have no hash.
    """
    if not numbers:
        return
    value = numbers.serialize()
    known = alike.get(value)
    if known is None:
        alike[value] = (numbers, places)
    else:
        _, places_before = known
        places_before.extend(places)


class Index:
    """The patterns of one stream or service."""

    def __init__(
        self,
        *,
        memo_headers_max: int = MEMO_HEADERS_MAX,
        memo_bytes_max: int = MEMO_BYTES_MAX,
        programs_max: int = PROGRAMS_MAX,
    ) -> None:
        """memo_*: bounds of the headers that are remembered; 0 headers remembers none.

        programs_max: bound of all regular expressions together, by their weight.
        """
        self._programs_max = programs_max
        self._memo = Memo(memo_headers_max, memo_bytes_max)
        self._patterns: dict[int, _Pattern] = {}
        self._numbers: dict[Canonical, int] = {}
        """Pattern in canonical form -> its number: equal patterns share one."""
        self._next = 0
        """The least number that no pattern ever had."""
        self._free: list[int] = []
        """A heap of numbers that patterns have left."""
        self._tables: dict[str, Table] = {}
        """Kind of pattern -> the table in which its patterns are filed."""
        self._leaves_in: dict[str, int] = {}
        """Kind -> how many patterns its table has; one without any is dropped."""
        self._conjunctions = Conjunctions()
        self._leaf_facts: dict[int, int] = {}
        """Leaf -> how many conjunctions ask for it."""
        self._checks: dict[int, Predicate] = {}
        """Numbers that are filed more widely than they match -> the predicate that decides."""
        self._checked = BitMap()
        """Keys of `_checks`."""
        self._check_weights: dict[int, int] = {}
        """Pattern with a check -> weight (instructions) of the expressions in it; expressions that
        are filed as leaves count in their table."""
        self._check_weight = 0
        """Sum of these weights."""
        self._complements: dict[int, int] = {}
        """Number of a pattern -> the number of its negation."""
        self._negated = BitMap()
        """Keys of `_complements`."""
        self._negations = BitMap()
        """Values of `_complements`: a header matches those whose negated pattern it does not."""
        self._hidden = BitMap()
        """Numbers that are only parts of other patterns, and so are left out of results."""
        self._leaving: dict[int, int] = {}
        """Numbers that were discarded, and how many such changes the memo's log holds: while there
        is one, remembered headers may have the number, and no other pattern gets it."""
        self._added = 0
        """Patterns that callers have added, each counted once."""

    def __len__(self) -> int:
        """Return how many different patterns were added and not discarded."""
        return self._added

    def pattern(self, number: int) -> Pattern:
        """Return the canonical wire form of a pattern; KeyError: the number is not in use."""
        pattern = self._patterns[number]
        if not pattern.added_by_callers:  # It is a part of other patterns only.
            raise KeyError(number)
        return to_wire(pattern.canonical)

    def add(self, wire: object) -> int:
        """Take up a pattern and return its number, the same for patterns that mean the same.

        Raises PatternError: the index is as before.
        """
        canonical = normalise(wire)
        known = self._numbers.get(canonical)
        pattern = None if known is None else self._patterns[known]
        if pattern is None or not pattern.added_by_callers:
            predicate = predicate_of(canonical)
            if pattern is None:
                pattern = self._take_up(canonical, predicate)
            # Until now it was there as a part of others alone, whose numbers match() leaves out.
            self._hidden.discard(pattern.number)
            self._added += 1
            # Headers that the memo knows are compared with the pattern when they come again.
            self._note(pattern.number, predicate)
        pattern.added_by_callers += 1
        return pattern.number

    def discard(self, number: int) -> None:
        """Undo one add(), for a reader or an offer that ends; raises KeyError: not in use."""
        pattern = self._patterns[number]
        if not pattern.added_by_callers:
            raise KeyError(number)
        pattern.added_by_callers -= 1
        if pattern.added_by_callers:
            return
        self._added -= 1
        self._leaving[number] = self._leaving.get(number, 0) + 1
        self._note(number, None)
        if pattern.held_by_patterns:
            self._hidden.add(number)  # it goes on as a part of others
        else:
            self._give_up(pattern)

    def match(self, keys: Keys, fields: Fields) -> BitMap:
        """Return the numbers of all patterns that match the header; a caller must not change them.

        keys: the subject and any further keys. fields: sorted by name, each name once.
        """
        numbers = self._memo.get(keys, fields)
        if numbers is None:
            numbers = self._resolve(keys, fields)
            self._memo.put(keys, fields, numbers)
        return numbers

    def classes(self, headers: Sequence[tuple[Keys, Fields]]) -> list[tuple[BitMap, list[int]]]:
        """Match many headers: (numbers of patterns, places of the headers that just these match).

        For header tables of batches that are too large to come again: the answer is not remembered,
        and drives out nothing that is. Headers that no pattern matches are left out.
        """
        alike: dict[bytes, tuple[BitMap, list[int]]] = {}
        if not (self._tables or self._complements or self._checks or self._hidden):
            # All patterns ask for fields only.
            for bits, places in self._conjunctions.classes(fields for _, fields in headers):
                _gather(alike, bits, places)
            return list(alike.values())
        # Where all patterns are topics, headers of one key, its subject, are matched together.
        topics = self._tables.get("topic")
        other_kinds = len(self._tables) - (topics is not None)
        topics_only = not (other_kinds or len(self._conjunctions) or self._complements)
        found: dict[tuple[int, ...], list[int]] = {}
        one_by_one = list(range(len(headers)))
        if topics_only and isinstance(topics, TopicTable):
            one_by_one = [place for place, (keys, _) in enumerate(headers) if len(keys) > 1]
            if not one_by_one:
                found = topics.classes([keys[0] for keys, _ in headers])
            else:
                single = [(keys[0], at) for at, (keys, _) in enumerate(headers) if len(keys) == 1]
                for numbers, places in topics.classes([subject for subject, _ in single]).items():
                    # Places among the single subjects become places among all headers.
                    found[numbers] = [single[place][1] for place in places]
        hidden = self._hidden
        for numbers, places in found.items():
            bits = BitMap(numbers) - hidden if hidden else BitMap(numbers)
            _gather(alike, bits, places)
        for place in one_by_one:
            keys, fields = headers[place]
            _gather(alike, self._resolve(keys, fields), [place])
        return list(alike.values())

    @property
    def slow(self) -> bool:
        """Whether one header may cost so much that it is matched in steps: by expressions."""
        return "regex" in self._tables or bool(self._check_weight)

    def steps(self, keys: Keys, fields: Fields) -> Generator[None, None, BitMap]:
        """Do the work of match() in steps, between which patterns may come and go; see `slow`.

        The answer is right for patterns that are there throughout; others may or may not be in it.
        """
        numbers = self._memo.get(keys, fields)
        if numbers is not None:
            return numbers
        generation_before = self._memo.generation
        found: list[int] = []
        for table in list(self._tables.values()):
            if isinstance(table, RegexTable):
                yield from table.steps(keys, found)
            else:
                table.lookup(keys, fields, found)
        numbers = yield from self._conclude(keys, fields, found)
        # Remembered only if no pattern came or went meanwhile, which the answer may lack.
        if self._memo.generation == generation_before:
            self._memo.put(keys, fields, numbers)
        return numbers

    # --- a header never seen before --------------------------------------------------

    def _resolve(self, keys: Keys, fields: Fields) -> BitMap:
        """Return the numbers of all patterns that match a header, found without a pause."""
        found: list[int] = []
        for table in self._tables.values():
            table.lookup(keys, fields, found)
        concluding = self._conclude(keys, fields, found)
        while True:
            try:
                next(concluding)
            except StopIteration as end:  # it carries what the generator returns
                numbers: BitMap = end.value
                return numbers

    def _conclude(
        self, keys: Keys, fields: Fields, found: list[int]
    ) -> Generator[None, None, BitMap]:
        """Return the numbers of all patterns that match a header; a generator, for steps().

        found: numbers of the leaves that matched, by the tables. Conjunctions, predicates and
        negations follow from them; each predicate with expressions is a step.
        """
        if len(self._conjunctions):
            # The facts that hold: each field's value, that each field is there, and the leaves.
            facts: list[HeldFact] = [*fields]
            facts.extend([name for name, _ in fields])
            if self._leaf_facts:
                facts.extend([number for number in set(found) if number in self._leaf_facts])
            wide: list[BitMap] = []
            self._conjunctions.lookup(facts, found, wide)
            numbers = BitMap(found)
            for many in wide:
                numbers |= many
            if self._checks:
                for number in numbers & self._checked:
                    check = self._checks.get(number)
                    if check is None or not check(keys, fields):
                        numbers.discard(number)
                    if self._check_weight:
                        yield
        else:
            numbers = BitMap(found)
        if self._complements:
            # Every negation matches, except those whose opposite does.
            matched = numbers & self._negated
            numbers |= self._negations - BitMap([self._complements[n] for n in matched])
        if self._hidden:
            numbers -= self._hidden
        return numbers

    # --- filing ------------------------------------------------------------------------

    def _take_up(self, canonical: Canonical, predicate: Predicate | None = None) -> _Pattern:
        """Give a pattern that is new to the index a number, and file it.

        It is kept out of match results until add() files it for a caller of its own, as it may be
        only a part of another pattern. predicate: of the pattern, if the caller has compiled it.
        Raises PatternError: nothing was changed.
        """
        # The least free number: small numbers keep the bitmaps of results small.
        if self._free:
            number = heappop(self._free)
        else:
            number = self._next
            self._next += 1
        pattern = _Pattern(number, canonical)
        try:
            if canonical[0] == "not":
                opposite = canonical[1]
                pattern.negates = self._hold(pattern, opposite)
                self._complements[pattern.negates] = number
                self._negated.add(pattern.negates)
                self._negations.add(number)
            else:
                self._file(pattern, predicate)
        except BaseException:
            for part in pattern.parts:
                self._let_go(part)
            # The number was never in a result, so it may be used again at once.
            heappush(self._free, number)
            raise
        self._patterns[number] = pattern
        self._numbers[canonical] = number
        self._hidden.add(number)
        return pattern

    def _file(self, pattern: _Pattern, predicate: Predicate | None) -> None:
        """Put a pattern into the table of its kind, or its conjunctions into theirs.

        predicate: as of _take_up(). Raises PatternError: nothing was filed, and the caller lets go
        of the parts that the pattern holds.
        """
        canonical = pattern.canonical
        kind = kind_of(canonical)
        filing = kind.filing(canonical)
        if filing.conjunctions == (frozenset((Leaf(canonical),)),):
            # The pattern is a leaf itself: its kind has a table that finds it.
            name = kind.name
            table = self._tables.get(name)
            if table is None:
                table = kind.table()
                if isinstance(table, RegexTable):
                    table.programs_max = self._programs_max
            table.add(pattern.number, canonical)
            self._tables[name] = table
            self._leaves_in[name] = self._leaves_in.get(name, 0) + 1
            return
        conjunctions = []
        for conjunction in filing.conjunctions:
            # A leaf in a conjunction is a part, with a number of its own that stands for it.
            facts: list[HeldFact] = [
                self._hold(pattern, fact.canonical) if isinstance(fact, Leaf) else fact
                for fact in conjunction
            ]
            conjunctions.append(frozenset(facts))
        check = None if filing.exact else predicate or predicate_of(canonical)
        weight = 0 if check is None else weight_of(canonical)
        if weight and self._check_weight + weight > self._programs_max:
            raise PatternError(
                "limit",
                f"the stream's patterns that negate count {self._check_weight} instructions of "
                f"regular expressions and this one counts {weight}; the limit is "
                f"{self._programs_max}",
            )
        pattern.conjunctions = tuple(set(conjunctions))
        for facts_held in pattern.conjunctions:
            self._conjunctions.add(pattern.number, facts_held)
            for held in facts_held:
                if isinstance(held, int):
                    self._leaf_facts[held] = self._leaf_facts.get(held, 0) + 1
        if check is not None:
            self._checks[pattern.number] = check
            if weight:
                self._check_weights[pattern.number] = weight
                self._check_weight += weight
            self._checked.add(pattern.number)

    def _give_up(self, pattern: _Pattern) -> None:
        """Remove a pattern that no caller asks for and no other pattern holds.

        It is taken out of where _take_up() and _file() have put it: a complement, a leaf in the
        table of its kind, or conjunctions. Its parts are let go.
        """
        number = pattern.number
        del self._patterns[number]
        del self._numbers[pattern.canonical]
        self._hidden.discard(number)
        if pattern.negates >= 0:
            del self._complements[pattern.negates]
            self._negated.discard(pattern.negates)
            self._negations.discard(number)
        elif pattern.conjunctions is None:
            name = pattern.canonical[0]
            self._tables[name].discard(number, pattern.canonical)
            self._leaves_in[name] -= 1
            if not self._leaves_in[name]:
                del self._leaves_in[name], self._tables[name]
        else:
            for facts in pattern.conjunctions:
                self._conjunctions.discard(number, facts)
                for held in facts:
                    if isinstance(held, int):
                        self._leaf_facts[held] -= 1
                        if not self._leaf_facts[held]:
                            del self._leaf_facts[held]
            if self._checks.pop(number, None) is not None:
                self._checked.discard(number)
                self._check_weight -= self._check_weights.pop(number, 0)
        for part in pattern.parts:
            self._let_go(part)
        self._vacate(number)

    def _hold(self, holder: _Pattern, canonical: Canonical) -> int:
        """Number and file a part of a pattern, as of a conjunction or what a negation negates.

        Raises PatternError, with nothing changed.
        """
        known = self._numbers.get(canonical)
        part = self._take_up(canonical) if known is None else self._patterns[known]
        part.held_by_patterns += 1
        holder.parts.append(part.number)
        return part.number

    def _let_go(self, number: int) -> None:
        """Count one pattern less that holds this one; it goes if no caller has added it either."""
        part = self._patterns[number]
        part.held_by_patterns -= 1
        if not part.held_by_patterns and not part.added_by_callers:
            self._give_up(part)

    def _vacate(self, number: int) -> None:
        """Let the number be used again, unless a pattern has it still or the memo may know it."""
        if number not in self._patterns and number not in self._leaving:
            heappush(self._free, number)

    def _note(self, number: int, predicate: Predicate | None) -> None:
        """Tell the memo that a pattern came or, without a predicate, that it went.

        The oldest change falls out of the memo's log by that. If it was the last one in the log by
        which a number went, the number may be used again.
        """
        forgotten = self._memo.note(number, predicate)
        if forgotten is None:
            return
        self._leaving[forgotten] -= 1
        if not self._leaving[forgotten]:
            del self._leaving[forgotten]
            self._vacate(forgotten)


class Classing:
    """Headers of one batch grouped by the patterns that match them, with other work in between."""

    def __init__(
        self,
        index: Index,
        headers: Callable[[], Sequence[tuple[Keys, Fields]]],
        first: Iterable[None] = (),
    ) -> None:
        """headers: of one batch; asked for after the steps of `first`, which make them."""
        self._alike: dict[bytes, tuple[BitMap, list[int]]] = {}
        # The generator gets no reference to this object: a circle would wait for the collector.
        self.steps: Final = self._all(index, headers, first, self._alike)

    def run(self, more: Callable[[], bool]) -> bool:
        """Go on until all is done (True), or until `more`, asked after each step, says no."""
        return all(more() for _ in self.steps)

    @property
    def classes(self) -> list[tuple[BitMap, list[int]]]:
        """Return what Index.classes would return; only after run() returned True."""
        return list(self._alike.values())

    @staticmethod
    def _all(
        index: Index,
        made: Callable[[], Sequence[tuple[Keys, Fields]]],
        first: Iterable[None],
        alike: dict[bytes, tuple[BitMap, list[int]]],
    ) -> Iterator[None]:
        """Sort the headers of a batch into `alike`, the classes with the same matches, in steps.

        made: returns the headers, once the steps of `first` are done, which make them.
        """
        yield from first
        headers = made()
        if index.slow:
            for place, (keys, fields) in enumerate(headers):
                numbers = yield from index.steps(keys, fields)
                _gather(alike, numbers, [place])
                yield
            return
        for begin in range(0, len(headers), STEP_HEADERS):
            found = index.classes(headers[begin : begin + STEP_HEADERS])
            for numbers, places in found:
                _gather(alike, numbers, [begin + place for place in places])
            yield
