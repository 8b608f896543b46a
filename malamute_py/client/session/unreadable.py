"""Batches as a delivery brings them, and those among them that cannot be read.

Owns the one place in which a client finds that a batch cannot be read: for its readers that is
damage with a name, not an error in their program. The rule: the credit that such a batch took, in
records and in bytes, is given back as that of any other; a batch that was damaged on its way ends
the link instead, and comes again. A derived batch is one that the broker made of rows of others: it
does not tell all of its offsets where it is damaged. Source: SPEC.md, sections 5.2 to 5.6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from malamute_protocol.batch import Batch, Stamp, iter_batches, lone_batch, rows_from_bitmap
from malamute_protocol.errors import BatchError, RemoteProtocolError
from malamute_protocol.limits import Limits
from malamute_py.client.session.acknowledgements import Range, ranges_of_numbers


class Unreadable(NamedTuple):
    """A batch that came as it is stored, and that no consumer can read."""

    stamp: Stamp
    reason: str
    rows: Any
    """The bitmap of its delivery; None: all rows."""
    readable_before: int
    """Readable batches of its delivery that lie before it."""

    @property
    def records(self) -> int:
        """Records of credit that it took."""
        if self.rows is None:
            return self.stamp.count
        return int.from_bytes(self.rows, "little").bit_count()  # a bit is set for each row

    @property
    def size(self) -> int:
        """Bytes of credit that it took."""
        return self.stamp.size

    def end(self, until: int) -> int:
        """Return the offset after its records; until: where the cover ends or the next batch is.

        The stamp of a derived batch does not tell how far its offsets reach.
        """
        return until if self.stamp.derived else min(self.stamp.next_offset, until)

    @property
    def ranges(self) -> list[Range]:
        """Numbers of what was delivered of it; none when it is derived: they cannot be told."""
        stamp, rows = self.stamp, self.rows
        if stamp.derived:
            return []
        bitmap_bytes = (stamp.count + 7) // 8
        if rows is None or len(rows) != bitmap_bytes:  # all rows, or the damage is in their count
            return [(stamp.base_offset, stamp.next_offset)]
        numbers = np.flatnonzero(rows_from_bitmap(rows, stamp.count)) + stamp.base_offset
        return ranges_of_numbers(numbers.tolist())


_NONE: Final[list[Unreadable]] = []


def taken_in(
    frames: Sequence[Any], rows: Any, limits: Limits
) -> tuple[list[Batch], list[Unreadable]]:
    """(batches of a delivery that have rows, those that cannot be read), for any receiver.

    rows: the bitmap of its only batch; None: all rows of all batches.
    Raises BatchError: no batches as they are stored, or damaged on their way.
    """
    try:
        # Most deliveries are one sound batch; None: it has several.
        lone = lone_batch(frames, rows, limits)
    except BatchError:
        lone = None  # iter_batches() finds the same again, and tells which batch it is
    if lone is not None and not lone.content.head.codec:
        # lone_batch() has checked its bodies: only those that a codec packed are left to check.
        return ([lone] if len(lone) else []), _NONE
    batches: list[Batch] = []
    unreadable: list[Unreadable] = []

    def note(stamp: Stamp, error: BatchError) -> None:
        """Note a batch that cannot be read, with the count of readable ones before it."""
        unreadable.append(Unreadable(stamp, error.reason, rows, len(batches)))

    found: Iterable[Batch] = (lone,) if lone is not None else iter_batches(
        frames, rows, limits=limits, unreadable=note
    )  # fmt: skip
    for batch in found:
        if not len(batch):
            continue
        try:
            batch.content.check_bodies()
        except BatchError as error:
            if error.code != "unsupported":
                note(batch.stamp, error)
                continue
            # A codec that this client has no package for is no damage: the program is told when it
            # asks for a body.
        batches.append(batch)
    return batches, unreadable


def one_taken_in(command: Any, frames: Sequence[Any], limits: Limits) -> Batch | Unreadable:
    """Return the one batch that a MAIL or WORK brings to an inbox or an offer, readable or not.

    Raises RemoteProtocolError (BatchError among them): not one batch, no rows, or unreadable in a
    form whose numbers cannot be told.
    """
    batches, unreadable = taken_in(frames, command.rows, limits)
    if len(batches) == 1 and not unreadable:
        return batches[0]
    name = type(command).__name__
    if not batches and not unreadable:
        raise RemoteProtocolError("malformed", f"{name} without rows")
    if batches or len(unreadable) != 1:
        count = len(batches) + len(unreadable)
        raise RemoteProtocolError("malformed", f"{name} with {count} batches where one is to be")
    [found] = unreadable
    if found.stamp.derived:
        raise RemoteProtocolError("bad_batch", f"{name} with {found.reason}")
    return found
