"""Rows of a batch that a pattern on subjects selects.

Owns what one pattern selects of each header table. The rules: a subject is matched once, however
many tables have it, as long as its verdict is kept; tables that the protocol's memo shares are one
table; what is kept is bounded.

Words: a batch has each distinct header once, in its header table, and for each row a code, the
place of its subject there. A verdict is whether the pattern matches a subject. Source: SPEC.md,
sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_SUBJECTS_KEPT: Final = 1 << 13
"""Subjects of all tables whose matches are kept, at most 9 bytes each."""
VERDICTS_MAX: Final = 4_096
"""Subjects whose verdicts are kept for tables that come later."""
VERDICT_CHARACTERS_MAX: Final = 128
"""Characters of all keys of a record up to which its verdict is kept."""


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
        self._verdicts: dict[tuple[str, ...], bool] = {}
        """Keys of a record -> whether the pattern matches them."""

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
        if codes is None:  # all rows have the table's first subject
            chosen, _ = self._chosen(table)
            return np.arange(content.head.count) if len(chosen) and chosen[0] else _NO_ROWS
        return self.of(table, codes)

    def of(self, table: HeaderTable, codes: Array) -> Array:
        """Return the selected rows, ascending; also for a known batch, of which no more is read.

        codes: of each row, checked to be in `table`.
        """
        chosen, chosen_codes = self._chosen(table)
        if len(chosen_codes) == 1:
            # This takes a tenth of the time of a look-up of each row's code.
            return np.flatnonzero(codes == int(chosen_codes[0]))
        return np.flatnonzero(chosen[codes]) if len(chosen_codes) else _NO_ROWS

    def _chosen(self, table: HeaderTable) -> tuple[Array, Array]:
        """Return the mask of a table's subjects that match, and their codes."""
        # The table is held beside what is known of it: an id is unique among the living only.
        found = self._known.get(id(table))
        if found is not None:
            _, chosen, chosen_codes = found
            return chosen, chosen_codes
        keys = table.keys
        verdicts = list(map(self._verdicts.get, keys))
        if None in verdicts:
            self._judge(keys, verdicts)
        chosen = np.array(verdicts, np.bool_)
        if self._known_subjects + len(keys) > _SUBJECTS_KEPT:
            self._known, self._known_subjects = {}, 0
        chosen_codes = np.flatnonzero(chosen)
        self._known[id(table)] = (table, chosen, chosen_codes)
        self._known_subjects += len(keys)
        return chosen, chosen_codes

    def _judge(self, keys: Sequence[tuple[str, ...]], verdicts: list[bool | None]) -> None:
        """Fill in the verdicts that are None, and keep them for later tables.

        keys: those of each subject of a table; verdicts: at the same places.
        """
        matches, kept = self._matches, self._verdicts
        if len(kept) + verdicts.count(None) > VERDICTS_MAX:
            kept.clear()
        for place, verdict in enumerate(verdicts):
            if verdict is None:
                each = keys[place]
                verdicts[place] = found = matches(each, ())
                if len(kept) < VERDICTS_MAX and sum(map(len, each)) <= VERDICT_CHARACTERS_MAX:
                    kept[each] = found


def rows_by_subject(pattern: Pattern) -> SubjectRows | None:
    """Return a finder of the rows that a checked pattern selects, for reads of history.

    None: the pattern asks for fields, or one match costs much; rows are then found by each header.
    """
    compiled = compile_pattern(pattern)
    if compiled.slow or not asks_subjects_only(compiled.wire):
        return None
    # A digest, since it is kept with each batch, and a pattern may have many kilobytes.
    digest = blake2b(msgspec.msgpack.encode(compiled.wire), digest_size=16).digest()
    return SubjectRows(compiled.matches, digest)


_NO_ROWS: Final[np.ndarray[Any, Any]] = np.empty(0, np.int64)
