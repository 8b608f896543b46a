"""Prefix patterns, found by trying the leading text of each length in use.

The rule: a look-up costs one dictionary access for each distinct length of prefix that is
not longer than the key (at most 255), whatever the number of prefixes. For each new pattern
canonical() brings it to one form and predicate() makes its test of one header; the table has all of
an index.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Any

from malamute_protocol.pattern import check_prefix
from malamute_py.matcher.kinds import Canonical, Fields, Keys, PatternKind, Predicate, Table


class PrefixTable:
    """Prefixes by text, and how many there are of each length."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._of_length: dict[int, int] = {}
        """Length -> how many prefixes have it."""
        self._lengths: list[int] = []
        """The lengths, ascending."""

    def add(self, number: int, canonical: Canonical) -> None:
        """File the prefix by its text."""
        text: str = canonical[1]
        self._numbers[text] = number
        if self._of_length.setdefault(len(text), 0) == 0:
            insort(self._lengths, len(text))
        self._of_length[len(text)] += 1

    def discard(self, number: int, canonical: Canonical) -> None:
        """Forget the prefix, and its length with the last prefix of that length."""
        text: str = canonical[1]
        del self._numbers[text]
        self._of_length[len(text)] -= 1
        if not self._of_length[len(text)]:
            del self._of_length[len(text)]
            self._lengths.remove(len(text))

    def lookup(self, keys: Keys, fields: Fields, found: list[int]) -> None:
        """Append the numbers of all prefixes of the keys, found by every length in use."""
        numbers = self._numbers
        for key in keys:
            for length in self._lengths:  # ascending
                if length > len(key):
                    break
                number = numbers.get(key[:length])
                if number is not None:
                    found.append(number)


class PrefixKind(PatternKind):
    """["prefix", text]"""

    name = "prefix"

    def check(self, wire: Sequence[Any]) -> Sequence[Any]:
        """Check the wire form as validate() of the protocol does for this kind."""
        return check_prefix(wire)

    def canonical(self, wire: list[Any]) -> Canonical:
        """Bring the empty prefix, with which every subject begins, to `all`."""
        return ("prefix", wire[1]) if wire[1] else ("all",)

    def predicate(self, canonical: Canonical) -> Predicate:
        """Return a predicate that asks the string."""
        text: str = canonical[1]
        return lambda keys, fields: any(key.startswith(text) for key in keys)

    def table(self) -> Table:
        """Return a table by text and length."""
        return PrefixTable()
