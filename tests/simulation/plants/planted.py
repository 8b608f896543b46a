"""One planted bug: what a plant is, and what a plant does to the code under test.

Owns the form of a plant. The rule: a plant changes the code under test only while it is planted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

Plant = Callable[[contextlib.ExitStack], None]


class Planted(NamedTuple):
    """One planted bug."""

    scenario: str
    what: str
    plant: Plant
    caught_as: frozenset[str]
    seeds: int
    """Number of seeds within which it must be caught."""
    first: int = 0
    """Where the search begins: a rare one is not sought from the start in every test."""


def replace(stack: contextlib.ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put make(original) in the place of an attribute."""
    stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))


def codes(*names: str) -> frozenset[str]:
    return frozenset(names)
