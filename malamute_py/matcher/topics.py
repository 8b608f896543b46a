"""Topic patterns, found through a trie over the parts of the subject.

Owns what topic patterns mean: parts are split at dots, `*` is one part, `#` is one part or
more, and a last part `*` (that is not the only one) may also be missing, so that `forex.*`
matches `forex`. The rule: a look-up costs by the subject's parts and by the patterns that
share its beginning, not by the number of patterns. For each new pattern canonical() brings it to
one form and predicate() makes its test of one header; the table has all of an index. Source:
appendix A of the Malamute whitepaper (docs/design.md, References).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from malamute_protocol.pattern import check_topic
from malamute_py.matcher.kinds import Canonical, Fields, Keys, PatternKind, Predicate, Table


def parts_match(pattern: tuple[str, ...], parts: list[str]) -> bool:
    """Whether the parts of a topic pattern match the parts of a subject."""
    ends = _ends(pattern, parts)
    last = len(pattern)
    # All of the pattern is used up, or all but a last `*`, which may be missing.
    return last in ends or (pattern[-1] == "*" and last > 1 and last - 1 in ends)


def may_lead_to_match(pattern: tuple[str, ...], parts: list[str]) -> bool:
    """Whether some subject that begins with these parts, or is them, matches the pattern."""
    return bool(_ends(pattern, parts))


def _ends(pattern: tuple[str, ...], parts: list[str]) -> set[int]:
    """How many pattern parts may be used up once all subject parts are; empty: none can match.

    All ways at once: `ends` has each number of pattern parts that the subject parts until now fit.
    """
    ends = {0}
    for part in parts:
        onward = set()
        for at in ends:
            if at and pattern[at - 1] == "#":
                onward.add(at)  # the `#` before it takes this part, too
            if at < len(pattern) and pattern[at] in ("*", "#", part):
                onward.add(at + 1)
        ends = onward
        if not ends:
            break
    return ends


class _PartNode:
    """A node of the trie, at which the patterns with one beginning divide.

    Its children are by their part: literal ones in `literals`, `*` in `star`, `#` in `hashed`.
    """

    __slots__ = ("hashed", "literals", "number", "parent", "part", "repeats", "star")

    def __init__(self, parent: _PartNode | None, part: str) -> None:
        """part: on the way from the parent to this node."""
        self.parent = parent
        self.part = part
        self.repeats = part == "#"
        """Whether a walk may stay here for any further part."""
        self.number = -1
        """The number of the pattern that ends here; -1: none does."""
        self.literals: dict[str, _PartNode] | None = None
        self.star: _PartNode | None = None
        self.hashed: _PartNode | None = None

    def descend(self, part: str) -> _PartNode:
        """Return the node one part further, made if there is none."""
        if part == "*":
            if self.star is None:
                self.star = _PartNode(self, part)
            return self.star
        if part == "#":
            if self.hashed is None:
                self.hashed = _PartNode(self, part)
            return self.hashed
        if self.literals is None:
            self.literals = {}
        node = self.literals.get(part)
        if node is None:
            node = self.literals[part] = _PartNode(self, part)
        return node

    def is_bare(self) -> bool:
        """Whether no pattern ends here or further on."""
        return self.number < 0 and not (self.literals or self.star or self.hashed)


class TopicTable:
    """Topic patterns: whole subjects in a dictionary, everything with a wildcard in a trie."""

    def __init__(self) -> None:
        self._whole: dict[str, int] = {}
        self._root = _PartNode(None, "")

    def add(self, number: int, canonical: Canonical) -> None:
        """File the pattern by its text or its parts."""
        text: str = canonical[1]
        parts = text.split(".")
        if "*" not in parts and "#" not in parts:
            self._whole[text] = number
            return
        node = self._root
        for part in parts:
            node = node.descend(part)
        node.number = number

    def discard(self, number: int, canonical: Canonical) -> None:
        """Take the pattern out, and every node that only it needed."""
        text: str = canonical[1]
        parts = text.split(".")
        if "*" not in parts and "#" not in parts:
            del self._whole[text]
            return
        node = self._root
        for part in parts:
            node = node.descend(part)
        node.number = -1
        # Up from the pattern's end, as long as no other pattern needs the node.
        while (above := node.parent) is not None and node.is_bare():
            if node.part == "*":
                above.star = None
            elif node.part == "#":
                above.hashed = None
            else:
                assert above.literals is not None
                del above.literals[node.part]
                if not above.literals:
                    above.literals = None
            node = above

    def lookup(self, keys: Keys, fields: Fields, found: list[int]) -> None:
        """Append the numbers of all patterns that match a key, found by one walk of the trie."""
        for key in keys:
            number = self._whole.get(key)
            if number is not None:
                found.append(number)
            self._walk(key.split("."), found)

    def classes(self, subjects: Sequence[str]) -> dict[tuple[int, ...], list[int]]:
        """Match many subjects: numbers of patterns -> places of the subjects that just these match.

        For the header table of a large batch. Subjects walk the trie together for as long as they
        meet the same nodes, so that a level at which no pattern names a part costs nothing.
        Subjects without a match are left out.
        """
        parts = [subject.split(".") for subject in subjects]
        # By the count of their parts: subjects of one length are through after as many steps.
        by_length: dict[int, list[int]] = {}
        for place, split in enumerate(parts):
            alike = by_length.get(len(split))
            if alike is None:
                by_length[len(split)] = [place]
            else:
                alike.append(place)
        found: dict[tuple[int, ...], list[int]] = {}
        for length, places in by_length.items():
            # Nodes that the subjects' parts until now lead to -> places of the subjects.
            states: dict[tuple[_PartNode, ...], list[int]] = {(self._root,): places}
            for depth in range(length):
                onward: dict[tuple[_PartNode, ...], list[int]] = {}
                for nodes, members in states.items():
                    _step(nodes, members, parts, depth, onward)
                states = onward
            for nodes, members in states.items():
                numbers = _numbers_at(nodes)
                if numbers:
                    found.setdefault(numbers, []).extend(members)
        if self._whole:
            self._add_whole(subjects, found)
        return found

    def _add_whole(self, subjects: Sequence[str], found: dict[tuple[int, ...], list[int]]) -> None:
        """Add the patterns without wildcards to what classes() found by the trie.

        A subject that such a pattern names moves to the class that has its number, too.
        """
        whole = self._whole
        named = {
            place: whole[subject] for place, subject in enumerate(subjects) if subject in whole
        }
        """Place of a subject -> the number of the pattern that is just this subject."""
        if not named:
            return
        unclassed = dict(named)
        """Subjects that no wildcard has matched either, once the loop is through."""
        for numbers, places in list(found.items()):
            moving = [place for place in places if place in named]
            if not moving:
                continue
            staying = [place for place in places if place not in named]
            if staying:
                found[numbers] = staying
            else:
                del found[numbers]
            for place in moving:
                key = tuple(sorted((*numbers, unclassed.pop(place))))
                found.setdefault(key, []).append(place)
        for place, number in unclassed.items():
            found.setdefault((number,), []).append(place)

    def _walk(self, parts: list[str], found: list[int]) -> None:
        """Add the numbers of all topic patterns that match a split subject."""
        here = [self._root]
        for part in parts:
            onward: list[_PartNode] = []
            push = onward.append
            # A node after `#` can be reached from before it and from itself; once is enough. Every
            # other node has one way in, so only these need the check.
            repeating: set[_PartNode] | None = None
            for node in here:
                literals = node.literals
                if literals is not None:
                    following = literals.get(part)
                    if following is not None:
                        push(following)
                if node.star is not None:
                    push(node.star)
                if node.repeats or node.hashed is not None:
                    if repeating is None:
                        repeating = set()
                    if node.repeats:
                        repeating.add(node)
                    if node.hashed is not None:
                        repeating.add(node.hashed)
            if repeating:
                onward.extend(repeating)
            if not onward:
                return
            here = onward
        for node in here:
            if node.number >= 0:
                found.append(node.number)
            # The last `*` may be missing.
            if node.star is not None and node.star.number >= 0:
                found.append(node.star.number)


def _step(
    nodes: tuple[_PartNode, ...],
    places: list[int],
    parts: list[list[str]],
    depth: int,
    onward: dict[tuple[_PartNode, ...], list[int]],
) -> None:
    """Go one part further with subjects that have met the same nodes so far.

    places: of those subjects in `parts`, which has the parts of each. depth: the part to compare.
    onward: gets the nodes that are met, with the places of the subjects that meet them.
    """
    # Wildcards lead all subjects to the same nodes; only literal parts divide them.
    common: list[_PartNode] = []
    literals: list[dict[str, _PartNode]] = []
    for node in nodes:
        if node.literals is not None:
            literals.append(node.literals)
        if node.star is not None:
            common.append(node.star)
        # A node after `#` can be reached from before it and from itself.
        if node.repeats and node not in common:
            common.append(node)
        if node.hashed is not None and node.hashed not in common:
            common.append(node.hashed)
    shared = tuple(common)
    if not literals:
        if shared:
            onward.setdefault(shared, []).extend(places)
        return
    unnamed: list[int] = []
    """Places of the subjects whose part no pattern names here."""
    by_part: dict[str, list[int]] = {}
    """Named part -> places of the subjects that have it."""
    for place in places:
        part = parts[place][depth]
        alike = by_part.get(part)
        if alike is None:
            for named in literals:
                if part in named:
                    by_part[part] = [place]
                    break
            else:
                unnamed.append(place)
        else:
            alike.append(place)
    for part, members in by_part.items():
        following = [named[part] for named in literals if part in named]
        onward.setdefault((*following, *shared), []).extend(members)
    if unnamed and shared:
        onward.setdefault(shared, []).extend(unnamed)


def _numbers_at(nodes: tuple[_PartNode, ...]) -> tuple[int, ...]:
    """Return the numbers of the patterns that end at these nodes, ascending."""
    numbers = {node.number for node in nodes}
    # The last `*` may be missing.
    numbers |= {node.star.number for node in nodes if node.star is not None}
    numbers.discard(-1)
    return tuple(sorted(numbers))


class TopicKind(PatternKind):
    """["topic", text]"""

    name = "topic"

    def check(self, wire: Sequence[Any]) -> Sequence[Any]:
        """Check the wire form as validate() of the protocol does for this kind."""
        return check_topic(wire)

    def canonical(self, wire: list[Any]) -> Canonical:
        """Bring `#`, and `#.*` whose last part may be missing, to the pattern of everything."""
        return ("all",) if wire[1] in ("#", "#.*") else ("topic", wire[1])

    def predicate(self, canonical: Canonical) -> Predicate:
        """Compare part by part; a text without wildcards as a whole."""
        text: str = canonical[1]
        pattern = tuple(text.split("."))
        if "*" not in pattern and "#" not in pattern:
            return lambda keys, fields: text in keys
        if "#" not in pattern and len(pattern) > 1:
            return _positional(pattern)
        if pattern[-1] == "#" and "*" not in pattern and "#" not in pattern[:-1]:
            return _beginning(text[:-1])  # `forex.` of `forex.#`
        return lambda keys, fields: any(parts_match(pattern, key.split(".")) for key in keys)

    def table(self) -> Table:
        """Return the table that finds topics by a trie."""
        return TopicTable()


def _beginning(start: str) -> Predicate:
    """Make the predicate of literal parts before one `#`: the text before that begins a key."""

    def beginning(keys: Keys, fields: Fields) -> bool:
        """Whether a key goes on after that beginning, which ends with a dot."""
        for key in keys:  # noqa: SIM110 - a generator would cost more than the comparison
            if key.startswith(start):
                return True
        return False

    return beginning


def _positional(pattern: tuple[str, ...]) -> Predicate:
    """Make the predicate of a pattern without `#`: literal parts at their places, `*` anything."""
    literals = tuple((at, part) for at, part in enumerate(pattern) if part != "*")
    most = len(pattern)
    least = most - 1 if pattern[-1] == "*" else most  # a last `*` may be missing

    def positional(keys: Keys, fields: Fields) -> bool:
        """Whether a key has so many parts, and the literal ones at their places."""
        for key in keys:
            parts = key.split(".")
            if least <= len(parts) <= most and all(parts[at] == part for at, part in literals):
                return True
        return False

    return positional
