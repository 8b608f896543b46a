"""Copies of newest records: how one lies in the hidden stream of a ring with keys.

Owns the number of that stream and the form of a copy: which rows of a batch count, then the batch,
as the stream had it or of some of its rows. The rule: a row that does not count says nothing about
its subject, for a newer record may lie before the copy. Source: malamute_py/journal/FORMAT.md,
section 15.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack, unpack_from

MOVED_STREAM = 0xFFFF_FFFD
"""The stream number of copies of newest records whose segment is given up, in the ring of a stream
with keys: hidden. A record of it holds a whole batch as the stream had it, or some of its rows."""


def pack_copy(batch: bytes, rows: Sequence[int]) -> bytes:
    """Return a copy, to be appended before the batch's segment goes.

    rows: those that count; empty: all of them.
    """
    head = pack(f"<I{len(rows)}I", len(rows), *rows)
    padding = bytes(-len(head) % 8)  # A batch begins at a multiple of 8.
    return head + padding + batch


def unpack_copy(copy: bytes) -> tuple[bytes, Sequence[int]]:
    """Return the batch of a copy, and the rows that count; none: all of them."""
    (count,) = unpack_from("<I", copy)
    head_bytes = 4 + 4 * count
    batch_at = head_bytes + -head_bytes % 8  # after the padding
    return copy[batch_at:], unpack_from(f"<{count}I", copy, offset=4)
