"""Mail, replies and requests as their readers see them.

Owns the facts that came with a delivered batch, and the rows over it. The rule: a row costs
nothing but its own object until something is asked of it; its number is what the broker
knows it by. A row is a place in a batch, and the delivered rows may be some of the batch's.
Source: SPEC.md, sections 4.4, 4.5 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from malamute_protocol.batch import Batch, Record
from malamute_protocol.errors import MalamuteError

COMPLETED: Final = "completed"
"""Reason of a notice: the worker is done, and no (further) answer comes."""
NO_ANSWER: Final = "expired"
"""Reason of a notice: the request's time was over."""


class RequestFailed(MalamuteError):
    """A request will not be answered; `why` is the broker's word for it.

    It begins with `failed` (a worker gave it up), `died`, `lease` or `returned` (too many
    attempts, and how the last ended), `removed` (the service was), `lost` (it cannot be read
    back) or `unreadable` (its reply came and cannot be read); what is known besides follows a
    colon.
    """

    def __init__(self, why: str, service: str = "") -> None:
        """why: as the notice said it."""
        asked = f"service {service!r} did not answer the request" if service else ""
        super().__init__(f"{asked or 'the request was not answered'}: {why}")
        self.why = why
        self.service = service


class Origin(NamedTuple):
    """The record of a group that became a dead letter."""

    stream: str
    group: str
    offset: int
    attempts: int


class HandoutBatch:
    """One MAIL or WORK: its batch, and what holds for all rows of it."""

    __slots__ = ("_about", "_offsets", "about", "attempts", "batch", "command")

    def __init__(self, batch: Batch, command: Any) -> None:
        """batch: with the delivered rows. command: MAIL or WORK."""
        self.batch = batch
        self.command = command
        self.attempts: int = command.attempts
        self.about: Sequence[tuple[bytes, int, int]] = getattr(command, "about", ())
        """Requests that replies are to: runs of (key of the requests' batch, first row, count)."""
        self._about: dict[int, tuple[bytes, int]] | None = None
        """Row of a reply -> its request; None: not asked for yet."""
        self._offsets: dict[int, int] | None = None
        """Row of a dead letter -> offset of the record that it was; None: not asked for yet."""

    def about_of(self, row: int) -> tuple[bytes, int] | None:
        """Return the request that the reply in a row answers; None: the row is no reply.

        The request is named by the key of its batch and its row there; `about` has them in runs, in
        the order of the delivered rows.
        """
        if not self.about:
            return None
        if self._about is None:
            # Each run spelled out, one (key, row) a reply.
            asked = ((key, first + i) for key, first, count in self.about for i in range(count))
            self._about = dict(zip(rows_of(self.batch), asked, strict=True))
        return self._about.get(row)

    def origin_of(self, row: int) -> Origin | None:
        """Return the record of a group that the dead letter in a row was; None: it was none."""
        origin = getattr(self.command, "origin", None)
        if origin is None:
            return None
        stream, group, attempts, offsets = origin
        if self._offsets is None:
            self._offsets = dict(zip(rows_of(self.batch), offsets, strict=True))
        return Origin(stream, group, self._offsets[row], attempts)


class HandedOut:
    """Sender and attempts of what came in one delivery: a message, a request, or a batch."""

    __slots__ = ()
    _of: HandoutBatch

    @property
    def sender(self) -> str:
        """Identity of the sender; `~` and hexadecimal digits: a client without one."""
        sender: str = self._of.command.sender
        return sender

    @property
    def attempts(self) -> int:
        """Count of its hand-outs, this one included; a request's outlives the broker's restarts."""
        return self._of.attempts


def rows_of(batch: Batch) -> Iterable[int]:
    """Rows of a batch that were delivered, in order: what offset_of() and chosen() take."""
    indices = batch.indices  # None: all rows
    return range(batch.content.head.count) if indices is None else indices.tolist()


def ranges_of(batch: Batch) -> list[tuple[int, int]]:
    """Numbers or offsets of the delivered rows, as ascending ranges (first, end) without `end`."""
    # All rows came, and the broker left none out of the batch: the numbers have no gap.
    if batch.indices is None and not batch.stamp.derived:
        return [(batch.base_offset, batch.base_offset + len(batch))]
    numbers = batch.offsets
    # A range begins with the first number, and with each that does not follow on the one before.
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    firsts = numbers[np.concatenate(([0], breaks))]
    ends = numbers[np.concatenate((breaks - 1, [len(numbers) - 1]))] + 1
    return list(zip(firsts.tolist(), ends.tolist(), strict=True))


def chosen(batch: Batch, rows: Sequence[int]) -> Batch:
    """The batch with only these of its rows, given by their row numbers."""
    mask = np.zeros(batch.content.head.count, np.bool_)
    mask[list(rows)] = True
    return batch.with_rows(mask)


class Letter(HandedOut, Record, frozen=True, eq=False, gc=False):
    """A row of delivered mail: all that a Record has, and what came with it."""

    _of: HandoutBatch

    @property
    def number(self) -> int:
        """Number by which the broker knows the message; ascending in the order of acceptance."""
        return self._batch.offset_of(self._row)

    @property
    def about(self) -> tuple[bytes, int] | None:
        """A reply: (key of the request's batch, its row there); None: no reply."""
        return self._of.about_of(self._row)

    @property
    def last(self) -> bool:
        """A reply: no other follows."""
        last: bool = self._of.command.last
        return last

    @property
    def why(self) -> str:
        """A dead letter: why it came here. A notice: why there will be no answer."""
        why: str = self._of.command.why
        return why

    @property
    def origin(self) -> Origin | None:
        """A dead letter of a group: the record that it was; None: it is none."""
        return self._of.origin_of(self._row)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} number={self.number} subject={self.subject!r}>"


class Reply(Letter, frozen=True, eq=False, gc=False):
    """A worker's answer; with why="completed" and no body when it was done without one."""
