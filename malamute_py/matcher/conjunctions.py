"""Conjunctions of facts, each filed under its rarest fact, then under its next.

Owns which sets of facts are contained in the set of facts that hold of a header. The rule: a
conjunction sits in the bucket of its rarest fact until that bucket has grown beyond BUCKET_MAX;
then the bucket is split by each member's next fact. A look-up so visits only conjunctions that
share their rare facts with the header, however many there are. A plain hit count over all criteria,
as in the Malamute whitepaper, touches every subscription that shares any criterion (docs/design.md,
Matching: 187 us for ten criteria at 100,000).
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


class Conjunctions:
    """All conjunctions of one index."""

    def __init__(self) -> None:
        self._root = _FactNode()
        self._root.children = {}
        self._codes: dict[HeldFact, Code] = {}
        """Codes of the facts that conjunctions ask for."""
        self._new_code = count()
        self._crowd: dict[Code, int] = {}
        """Fact -> in how many conjunctions it occurs."""
        self._order: dict[tuple[int, frozenset[HeldFact]], tuple[Code, ...]] = {}
        """The filing order of each number when it was added; discard() needs it again."""

    def __len__(self) -> int:
        return len(self._order)

    def add(self, number: int, facts: frozenset[HeldFact]) -> None:
        """File the number under the facts, all of which must hold."""
        assert facts
        codes = {fact: self._code(fact) for fact in facts}
        crowd = self._crowd
        # Coarse ranks (powers of 16), then names, keep the order alike for alike conjunctions. They
        # share their path, field after field, and a header follows one value of each field instead
        # of every permutation.
        filed = sorted(codes, key=lambda f: (crowd[codes[f]].bit_length() // 4, _name(f)))
        order = tuple([codes[fact] for fact in filed])
        for code in order:
            crowd[code] += 1
        self._order[number, facts] = order
        self._insert(self._root, (number, order), 0)

    def _code(self, fact: HeldFact) -> Code:
        """Return the number of a fact, which gets one when it is new."""
        code = self._codes.get(fact)
        if code is None:
            code = self._codes[fact] = next(self._new_code)
            self._crowd[code] = 0
        return code

    def discard(self, number: int, facts: frozenset[HeldFact]) -> None:
        """Take the number out from under these facts."""
        order = self._order.pop((number, facts))
        for fact in facts:
            code = self._codes[fact]
            self._crowd[code] -= 1
            if not self._crowd[code]:
                del self._crowd[code], self._codes[fact]
        self._remove((number, order))

    def lookup(self, facts: Iterable[HeldFact], found: list[int], wide: list[BitMap]) -> None:
        """Append the numbers, or bitmaps of numbers, of conjunctions all of whose facts hold."""
        codes = self._codes
        held = frozenset([codes[fact] for fact in facts if fact in codes])
        if held:
            self._collect(held, found, wide)

    def classes(self, headers: Iterable[Fields]) -> list[tuple[BitMap, list[int]]]:
        """Group many headers: (numbers, places of the headers of whose fields just these hold).

        Two groups may have the same numbers. Only the fields that some conjunction asks for are
        compared, so that a field which differs in each header, a sequence or a time, costs one
        look.
        """
        codes = self._codes
        alike: dict[tuple[Code, ...], list[int]] = {}
        for place, fields in enumerate(headers):
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
                # By place: only members whose facts hold are to cost more than the comparison.
                bucket = node.bucket.items()
                found.extend([member[0] for member, rest in bucket if contained(rest)])
            children = node.children
            if children:
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
                if len(node.done) <= _WIDE // 2:
                    node.wide = None
        else:
            assert node.bucket is not None
            del node.bucket[member]
        # Prune empty nodes; a split node with no children left may be a bucket again.
        for at in range(depth, 0, -1):
            node = way[at]
            if node.done or node.bucket or node.children:
                break
            above = way[at - 1].children
            assert above is not None
            del above[order[at - 1]]
            if not above and at - 1 > 0:
                way[at - 1].children = None


def _name(fact: HeldFact) -> tuple[int, str]:
    """Return the key by which facts of equal rarity are sorted."""
    if isinstance(fact, int):
        return (0, str(fact))
    return (1, fact) if isinstance(fact, str) else (2, "\0".join(fact))
