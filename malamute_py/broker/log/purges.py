"""Purges: which rows of a batch were purged by subject.

Owns the marks of one stream, compiled, and the mask of the rows that they leave. The rule: a mark
takes the records before its offset whose keys match; a batch after all marks costs one comparison.
Source: SPEC.md, section 8, Removal.

A mark is a pattern, and the offset before which the records that it matches were purged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.header import Header
from malamute_py.changelog.tables import PurgeMark
from malamute_py.matcher import compile_pattern

Mask: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
Offsets: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

HEADERS_MAX = 16_384
"""Headers of which is remembered whether a mark takes them."""


class Purges:
    """The marks of one stream."""

    __slots__ = ("_known", "_matchers", "before", "marks")

    def __init__(self, marks: Sequence[PurgeMark]) -> None:
        self.marks = marks
        self._matchers = [
            (before, compile_pattern(msgspec.msgpack.decode(pattern)).matches)
            for pattern, before in marks
        ]
        self.before = max((before for before, _ in self._matchers), default=0)
        """Offset before which a record may have been purged; 0: none was."""
        self._known: dict[Header, int] = {}
        """Header -> offset before which its records are purged."""

    def left(self, content: Content, base: int, offsets: Offsets | None = None) -> Mask | None:
        """Mask of the rows of a batch that no mark takes; None: all rows.

        Called for each batch before a reader is given it. offsets: those of the rows, none before
        `base`; None: the batch is whole, so that they follow on `base`.
        """
        if base >= self.before:
            return None
        headers, codes = content.headers()
        # For each header of the batch: the offset before which its records are purged.
        ends = np.fromiter(map(self._purged_before, headers), np.int64, len(headers))
        if not (ends > base).any():
            return None
        if offsets is None:
            offsets = np.arange(base, base + content.head.count)
        # codes: each row's number in the header table; None: all rows have the only header.
        mask: Mask = offsets >= (ends[0] if codes is None else ends[codes])
        return mask

    def _purged_before(self, header: Header) -> int:
        """Return the offset before which a purge took all records of this header; 0: none did."""
        before = self._known.get(header)
        if before is None:  # The patterns of the marks are matched once for each header.
            if len(self._known) >= HEADERS_MAX:
                self._known.clear()
            before = max(
                (mark for mark, matches in self._matchers if matches(header.keys, header.fields)),
                default=0,
            )
            self._known[header] = before
        return before


NO_PURGES = Purges(())
"""Purges of a stream of which nothing was purged."""
