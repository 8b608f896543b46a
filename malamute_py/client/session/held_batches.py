"""Records of a group as a member has them: a batch of them, of which parts can be made.

Owns the offsets by which a member knows its records. The rule: an offset that was rewound (a power
loss of the broker took its record away) is given as a number that no record has, since another
record may have the offset by now.
"""

from __future__ import annotations

from collections.abc import Container
from math import inf
from typing import Protocol, TypeAlias

from malamute_protocol.batch import Batch, Record
from malamute_py.client.session.letters import chosen, rows_of
from malamute_py.client.session.subscription import cut


class Holding(Protocol):
    """A membership, as far as its batches need it."""

    def void_since(self, uuid: bytes, epoch: int) -> float:
        """Offset from which on records of a stream and an epoch were rewound; inf: none were."""


class HeldBatch(Batch):
    """Records of a group in hand; their member knows them by it."""

    def __init__(self, batch: Batch, opened: Holding, uuid: bytes, attempts: int) -> None:
        """uuid: of the stream, which may be another one by now."""
        super().__init__(batch.stamp, batch.content, batch.rows)
        if batch.schemas is not None:
            self.schemas = batch.schemas
        self.opened = opened
        self.uuid = uuid
        self.attempts = attempts
        """Attempts of its records, this hand-out included; 1 where the group counts none."""

    @property
    def numbers(self) -> list[int]:
        """Offsets of its records, as its member knows them now."""
        listed: list[int] = self.offsets.tolist()
        return self.known(listed)

    def known(self, offsets: list[int]) -> list[int]:
        """Offsets of some of its records; of those that were rewound numbers that no record has."""
        since = self.opened.void_since(self.uuid, self.stamp.epoch)
        if since == inf:
            return offsets
        # No record has a negative offset.
        return [-1 - offset if offset >= since else offset for offset in offsets]

    def cut(self, first: int, end: int) -> HeldBatch:
        """The records [first, end), counted among those delivered."""
        return HeldBatch(cut(self, first, end), self.opened, self.uuid, self.attempts)

    def part(self, offsets: Container[int], *, inside: bool) -> HeldBatch | None:
        """Return the records whose offsets are among these (inside), or are not (else).

        None: there are none. `offsets` are those of the log, whether rewound or not.
        """
        rows = [row for row in rows_of(self) if (self.offset_of(row) in offsets) is inside]
        if len(rows) == len(self):
            return self
        if not rows:
            return None
        return HeldBatch(chosen(self, rows), self.opened, self.uuid, self.attempts)


Held: TypeAlias = HeldBatch | Record
"""Hand-out that a member acknowledges: a batch that it was given, or a record of one."""
