"""Conjunctions of facts, each filed under its rarest fact, then under its next.

Owns which sets of facts are contained in the set of facts that hold of a header. The rule: a
conjunction sits in the bucket of its rarest fact until that bucket has grown beyond BUCKET_MAX;
then the bucket is split by each member's next fact. A look-up so visits only conjunctions that
share their rare facts with the header, however many there are. A plain hit count over all criteria,
as in the Malamute whitepaper, touches every subscription that shares any criterion (docs/design.md,
Matching: 187 us for ten criteria at 100,000).

Words: a leaf is a pattern that a table of its kind finds, as a topic. A fact is true or not of a
header: a leaf matches, a field is present, a field has a value. A conjunction is a pattern's number
with the facts that must all hold. The nodes form a tree: an edge is a fact, and the way from the
root to a node is the facts that all conjunctions below it share.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import TypeAlias

from pyroaring import BitMap

from malamute_py.matcher.kinds import Fields

HeldFact: TypeAlias = "int | str | tuple[str, str]"
"""A fact of a header: the number of a leaf that matches, a field's name, a field and value."""

Code: TypeAlias = int
"""A number in place of a fact: Python hashes an int at once, and a tuple of texts anew each
time."""

BUCKET_MAX = 8
"""Conjunctions that a bucket holds before it is split; bounds from 4 to 32 cost about the same."""

_WIDE = 64
"""Numbers that may end at one node before they are kept as a bitmap."""

Member: TypeAlias = tuple[int, tuple[Code, ...]]
"""A pattern's number and its facts in filing order, the rarest first."""


class _FactNode:
    """Conjunctions that share the facts on the way to this node."""

    __slots__ = ("bucket", "children", "done", "wide")

    def __init__(self) -> None:
        self.done: set[int] = set()
        """Numbers of conjunctions that have no further fact: they hold."""
        self.wide: BitMap | None = None
        """The numbers in `done` as a bitmap, once they are many."""
        self.bucket: dict[Member, frozenset[Code]] | None = None
        """Members to be compared one by one, with the facts that are still to be compared."""
        self.children: dict[Code, _FactNode] | None = None
        """Next fact -> node, in place of a bucket that has been split; None: it has not been."""


class Conjunctions:
    """All conjunctions of one index."""

    def __init__(self) -> None:
        self._root = _FactNode()
        self._root.children = {}
        self._codes: dict[HeldFact, Code] = {}
        """Codes of the facts that conjunctions ask for."""
        self._new_code = count()
        self._occurrences: dict[Code, int] = {}
        """Fact -> in how many conjunctions it occurs: few make it rare."""
        self._order: dict[tuple[int, frozenset[HeldFact]], tuple[Code, ...]] = {}
        """The filing order of each number when it was added; discard() needs it again."""

    def __len__(self) -> int:
        return len(self._order)

    def add(self, number: int, facts: frozenset[HeldFact]) -> None:
        """File the number of a pattern under the facts, all of which must hold for a match."""
        assert facts
        codes = {fact: self._code(fact) for fact in facts}
        occurrences = self._occurrences
        # Rarest first, by coarse ranks (bit_length() // 4: powers of 16), then by name. So alike
        # conjunctions have one order and share their path, field after field, and a header follows
        # one value of each field instead of every permutation.
        filed = sorted(codes, key=lambda f: (occurrences[codes[f]].bit_length() // 4, _name(f)))
        order = tuple([codes[fact] for fact in filed])
        for code in order:
            occurrences[code] += 1
        self._order[number, facts] = order
        self._insert(self._root, (number, order), depth=0)

    def _code(self, fact: HeldFact) -> Code:
        """Return the number of a fact, which gets one when it is new."""
        code = self._codes.get(fact)
        if code is None:
            code = self._codes[fact] = next(self._new_code)
            self._occurrences[code] = 0
        return code

    def discard(self, number: int, facts: frozenset[HeldFact]) -> None:
        """Take the number of a pattern that goes out from under these facts."""
        order = self._order.pop((number, facts))
        for fact in facts:
            code = self._codes[fact]
            self._occurrences[code] -= 1
            if not self._occurrences[code]:
                del self._occurrences[code], self._codes[fact]
        self._remove((number, order))

    def lookup(self, facts: Iterable[HeldFact], found: list[int], wide: list[BitMap]) -> None:
        """Append the numbers of conjunctions all of whose facts hold.

        facts: all that hold of one header. found: gets numbers. wide: gets bitmaps of numbers,
        where many conjunctions end at one node.
        """
        codes = self._codes
        # A fact without a code is one that no conjunction asks for.
        held = frozenset([codes[fact] for fact in facts if fact in codes])
        if held:
            self._collect(held, found, wide)

    def classes(self, headers: Iterable[Fields]) -> list[tuple[BitMap, list[int]]]:
        """Group many headers: (numbers, places of the headers of whose fields just these hold).

        For indexes all of whose patterns ask for fields only. Two groups may have the same numbers.
        Only the fields that some conjunction asks for are compared, so that a field which differs
        in each header, a sequence or a time, costs one look.
        """
        codes = self._codes
        alike: dict[tuple[Code, ...], list[int]] = {}
        for place, fields in enumerate(headers):
            # A field gives two facts: that it has its value, and that it is there.
            asked = [codes[field] for field in fields if field in codes]
            asked += [codes[name] for name, _ in fields if name in codes]
            if asked:
                key = tuple(asked)
                places = alike.get(key)
                if places is None:
                    alike[key] = [place]
                else:
                    places.append(place)
        classes: list[tuple[BitMap, list[int]]] = []
        for key, places in alike.items():
            found: list[int] = []
            wide: list[BitMap] = []
            self._collect(frozenset(key), found, wide)
            if found or wide:
                numbers = BitMap(found)
                for many in wide:
                    numbers |= many
                classes.append((numbers, places))
        return classes

    def _collect(self, held: frozenset[Code], found: list[int], wide: list[BitMap]) -> None:
        """Do the work of lookup() for facts given by their codes.

        held: those that hold of a header. Every node is visited whose facts from the root on hold.
        """
        contained = held.issuperset
        pending = [self._root]
        while pending:
            node = pending.pop()
            if node.done:
                if node.wide is None:
                    found.extend(node.done)
                else:
                    wide.append(node.wide)
            if node.bucket:
                # member[0] is its number: unpacking the tuple would cost for members that do not
                # hold, too.
                bucket = node.bucket.items()
                found.extend([member[0] for member, rest in bucket if contained(rest)])
            children = node.children
            if children:
                # The children of all facts that hold, without a loop in Python.
                pending.extend(filter(None, map(children.get, held)))

    def _insert(self, node: _FactNode, member: Member, depth: int) -> None:
        """Put a conjunction at its node; a bucket with too many members is split.

        depth: how many of its facts, the rarest first, lie on the way to `node`. One that has no
        further facts is `done`; the others wait in the bucket for a look at the rest of theirs.
        """
        number, order = member
        while True:
            if depth == len(order):
                node.done.add(number)
                if node.wide is not None:
                    node.wide.add(number)
                elif len(node.done) > _WIDE:
                    node.wide = BitMap(node.done)
                return
            if node.children is None:
                if node.bucket is None:
                    node.bucket = {}
                node.bucket[member] = frozenset(order[depth:])
                if len(node.bucket) > BUCKET_MAX:
                    crowded, node.bucket, node.children = node.bucket, None, {}
                    for other in crowded:
                        self._insert(node, other, depth)
                return
            child = node.children.get(order[depth])
            if child is None:
                child = node.children[order[depth]] = _FactNode()
            node = child
            depth += 1

    def _remove(self, member: Member) -> None:
        """Take a conjunction from its node, and prune nodes that are empty then."""
        number, order = member
        # Its node is the last one on the way of its facts: there the way ends, or a bucket is.
        way = [self._root]
        depth = 0
        while depth < len(order) and (children := way[-1].children) is not None:
            way.append(children[order[depth]])
            depth += 1
        node = way[-1]
        if depth == len(order):
            node.done.remove(number)
            if node.wide is not None:
                node.wide.discard(number)
                # At half of the bound, so that one number to and fro does not make it each time.
                if len(node.done) <= _WIDE // 2:
                    node.wide = None
        else:
            assert node.bucket is not None
            del node.bucket[member]
        # Prune empty nodes from the last one up; a split node with no children left may be a bucket
        # again, except the root, which has children always.
        for at in range(depth, 0, -1):
            node = way[at]
            if node.done or node.bucket or node.children:
                break
            parent = way[at - 1]
            assert parent.children is not None
            del parent.children[order[at - 1]]
            if not parent.children and parent is not self._root:
                parent.children = None


def _name(fact: HeldFact) -> tuple[int, str]:
    """Return the key by which facts of equal rarity are sorted: by what they are, then by text."""
    if isinstance(fact, int):
        return (0, str(fact))
    return (1, fact) if isinstance(fact, str) else (2, "\0".join(fact))
