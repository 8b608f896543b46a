"""Protocol versions and feature bits.

Owns the choice of a version both sides speak and the meaning of the bits in HELLO and
WELCOME. The rule: a bit, once released, keeps its meaning; unknown bits are ignored.
Source: SPEC.md, section 10.
"""

from __future__ import annotations

import enum
from typing import Final

VERSIONS: Final = (1, 1)
"""Lowest and highest protocol version that this code speaks."""


class Feature(enum.IntFlag):
    """Parts of the protocol that a broker serves, or a client wants; others are `unsupported`."""

    MAIL = 1
    SERVICES = 2
    CURSORS = 4
    """Cursors and groups."""
    ATOMIC = 8
    TRANSACTIONS = 16
    """Open transactions."""
    REPLICATED = 32
    """Reserved: the confirm level."""
    PLACEMENT = 64
    """Reserved: `moved` and `not_leader` are understood, with the placement map."""
    TYPED = 128
    """Streams with a declared Arrow schema."""
    REMOVAL = 256
    """TRIM and PURGE_SUBJECTS."""
    KEYS = 512
    """Streams that keep the last record of each subject."""


def negotiate(ours: tuple[int, int], theirs: tuple[int, int]) -> int | None:
    """Return the highest version within both ranges; None when they have none in common.

    ours, theirs: (lowest, highest). A broker answers HELLO by it.
    """
    (our_lowest, our_highest), (their_lowest, their_highest) = ours, theirs
    highest = min(our_highest, their_highest)
    return highest if highest >= max(our_lowest, their_lowest) else None
