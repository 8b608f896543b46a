"""Rows of a batch that a pattern on subjects selects.

Owns what one pattern selects of each header table. The rules: a subject is matched once for each
table, and tables that the protocol's memo shares are one table; what is kept is bounded. Source:
SPEC.md, sections 5 and 7.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

import msgspec
import numpy as np

from malamute_protocol.columns import Array
from malamute_protocol.content import Content
from malamute_protocol.header import TABLE_BYTES_MAX, HeaderTable
from malamute_protocol.pattern import Pattern
from malamute_py.matcher.combine import asks_subjects_only, compile_pattern
from malamute_py.matcher.kinds import Predicate

SUBJECTS_MAX: Final = 4_096
"""Subjects of a table that are matched in one go."""
_SUBJECTS_KEPT: Final = 1 << 14
"""Subjects of all tables whose matches are kept, at most 9 bytes each."""


class SubjectRows:
    """Rows that one pattern selects; the pattern asks for nothing but subjects."""

    def __init__(self, matches: Predicate, selection: bytes) -> None:
        """selection: name of the pattern, equal exactly for equal patterns."""
        self.selection = selection
        self._matches = matches
        self._known: dict[int, tuple[HeaderTable, Array, Array]] = {}
        """id() of a header table -> the table, and what _chosen() returns for it."""
        self._known_subjects = 0
        """Subjects in all these tables."""

    def __call__(self, content: Content) -> Array | None:
        """Return the selected rows, ascending; None: the header table is too large.

        Raises BatchError: the content is not a batch.
        """
        head = content.head
        table_bytes = head.subjects_bytes + head.fieldmaps_bytes
        if head.subjects_count > SUBJECTS_MAX or table_bytes > TABLE_BYTES_MAX:
            return None
        table = content.table
        content.check_codes()
        codes = content.subject_codes
        if codes is None:
            chosen, _ = self._chosen(table)
            return np.arange(content.head.count) if len(chosen) and chosen[0] else _NO_ROWS
        return self.of(table, codes)

    def of(self, table: HeaderTable, codes: Array) -> Array:
        """Return the selected rows, ascending. codes: each row's subject, good ones of `table`."""
        chosen, places = self._chosen(table)
        if len(places) == 1:
            # This takes a tenth of the time of a look-up of each row's code.
            return np.flatnonzero(codes == int(places[0]))
        return np.flatnonzero(chosen[codes]) if len(places) else _NO_ROWS

    def _chosen(self, table: HeaderTable) -> tuple[Array, Array]:
        """Return the mask of a table's subjects that match, and their codes."""
        # The table is held beside what is known of it: an id is unique among the living only.
        found = self._known.get(id(table))
        if found is not None:
            return found[1:]
        matches, keys = self._matches, table.keys
        chosen = np.fromiter((matches(each, ()) for each in keys), np.bool_, len(keys))
        if self._known_subjects + len(keys) > _SUBJECTS_KEPT:
            self._known, self._known_subjects = {}, 0
        places = np.flatnonzero(chosen)
        self._known[id(table)] = (table, chosen, places)
        self._known_subjects += len(keys)
        return chosen, places


def rows_by_subject(pattern: Pattern) -> SubjectRows | None:
    """Return the rows of a checked pattern; None: it asks for fields, or one match costs much."""
    compiled = compile_pattern(pattern)
    if compiled.slow or not asks_subjects_only(compiled.wire):
        return None
    # A digest, since it is kept with each batch, and a pattern may have many kilobytes.
    digest = blake2b(msgspec.msgpack.encode(compiled.wire), digest_size=16).digest()
    return SubjectRows(compiled.matches, digest)


_NO_ROWS: Final[np.ndarray[Any, Any]] = np.empty(0, np.int64)
