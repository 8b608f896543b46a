# DO NOT EDIT: made from ../aio/pages.py by `make sync-client` (tools/sync_client.py).
"""Lists of any length for threads, which the broker gives page by page.

Owns how the pages of a listing are asked for, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from malamute_py.client.arguments import integer
from malamute_py.client.facts import Facts, fact_list, place_of
from malamute_py.client.sync.link import SyncVerbs

Kind = TypeVar("Kind", bound=Facts)


class SyncPagedVerbs(SyncVerbs):
    """The way in which groups of verbs ask for lists."""

    def _pages(
        self, kind: type[Kind], make: Callable[[int, Any], Any], limit: int, *,
        listed: str = "entries", first: Any = "",
    ) -> list[Kind]:  # fmt: skip
        """Return the entries of all pages, or `limit` of them if that is not 0.

        kind: class of an entry. make: (request number, after) -> the question; `after` is what
        names the last entry of the page before. listed: key of the entries in the answer. first:
        what `after` is for the first page.
        """
        integer("limit", limit, 0)
        found: list[Kind] = []
        after = first
        while True:
            value = self._link.ask(partial(_following, make, after))
            page = fact_list(kind, value, listed)
            if page and place_of(page[-1]) == after:
                return found  # An earlier broker ignores `after`: this is its first page again.
            found += page
            if limit and len(found) >= limit:
                return found[:limit]
            if not page or not value.get("more"):
                return found
            after = place_of(page[-1])


def _following(make: Callable[[int, Any], Any], after: Any, number: int) -> Any:
    """Return the question for the page after an entry; `number` comes last, as ask() gives it."""
    return make(number, after)
