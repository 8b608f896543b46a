"""Selection of a group: the records that it takes, and the slot of each.

Owns what is remembered of header tables, which have each distinct header of a batch once. The
rules: a batch costs by its distinct headers, not by its rows; what is remembered is bounded.
Source: docs/design.md, Speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.header import HeaderTable
from malamute_py.broker.groups.slots import SLOTS
from malamute_py.matcher import compile_pattern

if TYPE_CHECKING:
    from malamute_protocol.header import Header

TABLES_MAX: Final = 256
"""Header tables for which a group remembers the selected headers and their slots."""


class PreparedHeaders(NamedTuple):
    """The headers of one batch that a group selects, found in slices of time over several turns."""

    base: int
    """Offset of the batch's first record, by which it is known again."""
    chosen: np.ndarray[Any, np.dtype[np.bool_]]
    """Whether each distinct header is selected."""
    slots: list[int]
    """The slot of each distinct header, in a keyed group."""
    table: HeaderTable
    """The batch's header table, kept so that it is not read again when the batch comes next."""


class GroupSelection:
    """The headers that one group selects, asked for each batch that the group takes in."""

    __slots__ = ("_keyed", "_seen", "everything", "pattern", "predicate", "prepared", "slow")

    def __init__(self, pattern: Any, keyed: bool) -> None:
        """keyed: the slot of each header is found as well."""
        self.pattern = pattern
        """The pattern as the first member sent it."""
        compiled = compile_pattern(pattern)
        self.everything = compiled.canonical == ("all",) or pattern == ["topic", "#"]
        self.predicate = compiled.matches
        self.slow = compiled.slow
        """Whether one header may take long, as with regular expressions: matched in slices."""
        self._keyed = keyed
        self.prepared: PreparedHeaders | None = None
        self._seen: dict[Any, tuple[Any, Any]] = {}
        """Header table -> (headers chosen or None for all, slots of its headers)."""

    def knows(self, content: Content) -> bool:
        """Whether the headers of a batch need not be matched, since all match or were seen."""
        return self.everything or content.headers_key in self._seen

    def of_table(self, content: Content, base: int) -> tuple[Any, Any]:
        """Return the selection of a batch: (headers chosen or None for all, slots when keyed).

        Both are arrays over the distinct headers. base: offset of the batch's first record.
        `prepared` has the answer where the headers of this batch were matched in slices before;
        `_seen` has those of recent header tables.
        """
        if self.everything and not self._keyed:
            return None, None
        prepared = self.prepared
        chosen = slots = None
        if prepared is not None and prepared.base == base:
            self.prepared = None  # It serves this batch once; from here on `_seen` has it.
            count = len(prepared.chosen)
            chosen = None if prepared.chosen.all() else prepared.chosen
            if self._keyed:
                slots = np.array(prepared.slots, np.uint16)
        else:
            found = self._seen.get(content.headers_key)
            if found is not None:
                return found
            headers, _ = content.headers()
            count = len(headers)
            if not self.everything:
                predicate = self.predicate
                each = (predicate(header.keys, header.fields) for header in headers)
                chosen = np.fromiter(each, np.bool_, count)
                if chosen.all():
                    chosen = None
            if self._keyed:
                slots = np.fromiter(map(slot_of, headers), np.uint16, count)
        if count <= TABLES_MAX:  # Tables of more headers would take too much memory.
            if len(self._seen) >= TABLES_MAX:
                self._seen.clear()
            self._seen[content.headers_key] = chosen, slots
        return chosen, slots


def slot_of(header: Header) -> int:
    """The slot of a record with this header in a keyed group, by its first key, the subject."""
    return crc32(header.keys[0].encode()) % SLOTS
