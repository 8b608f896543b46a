"""Seeds and examples of a test that tries many: a few in `make check`, all in `make test`.

Owns the division and nothing else. The rule: what is left out of the fast form has the marker
`slow`, so that a seed has the same name and does the same in either form.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def slow(values: Iterable[Any]) -> list[Any]:
    """Values of a parameter that are tried in `make test` only."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def seeds(few: int, count: int) -> list[Any]:
    """Seeds 0 to count - 1, of which the first few are tried in `make check` as well."""
    return [*range(min(few, count)), *slow(range(few, count))]


def examples(count: int) -> int:
    """Examples of a property that has a number of its own, fewer in the profile `quick`."""
    return max(1, min(count, count * settings().max_examples // 50))
