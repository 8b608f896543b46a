"""Seats of clients in the scenario `resets`: where each stood, and its membership.

Owns these as data. Source: SPEC.md, sections 4.7 (Generations) and 4.8 (Groups, Cursors).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Position(NamedTuple):
    """Where a reader or a member stood."""

    uuid: bytes
    epoch: int
    next: int


@dataclass(slots=True)
class Seat:
    """One client's membership."""

    group: str = ""
    """Name of the group that it asked to join; empty: none."""
    within: bool = False
    """It was told that it is a member."""
    heard: int = 0
    """How much of what came over the link was judged."""
    held: set[int] = field(default_factory=set)
    seen: Position | None = None
    owed: str = ""
    """Code of the ENDED that it must be sent."""
    rewound: tuple[int, int] | None = None
    """REWOUND that it must be sent next."""

    def vacate(self) -> None:
        """Be in no group any more."""
        self.group, self.within, self.owed, self.rewound = "", False, "", None
        self.held = set()
