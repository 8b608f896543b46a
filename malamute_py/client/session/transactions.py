"""Open transactions: what gathers at the client, and the steps in which it leaves.

Owns the records of one transaction that have not left, and the places of the batches that have. The
rules: records leave in chunks, each a step of its own, which the broker stages; the chunks have
their places, so that a chunk that is put off does not change the order; what is left at the commit
leaves in one step with it, and where nothing was staged before, the broker appends it at once; for
a stream with a ring of its own the broker refuses that, and gets the records staged; what is too
large for a ring leaves again in halves. No step of a transaction is merged with another. Source:
SPEC.md, section 4.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from malamute_protocol.commands import (
    BeginTransaction,
    Command,
    CommitTransaction,
    RollBackTransaction,
)
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.limits import Limits
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.session.calls import content_count
from malamute_py.client.session.rows import ROW_BYTES, OutgoingRow
from malamute_py.client.session.step import COMMAND, Place, Step, staged
from malamute_py.client.session.steps import PARTS_MAX
from malamute_py.client.words import ConfirmAt

CHUNK_BYTES: Final = 1 << 20
"""Bytes of records from which on they leave for the broker."""
CHUNK_ROWS: Final = 4096
"""Records of one chunk."""
ID_BYTES: Final = 16


class OpenTransaction:
    """One transaction of a client, from its beginning to its end."""

    __slots__ = (
        "_bytes_max", "_chunk", "_halves", "_key", "_left", "_left_from", "_places", "_rows_max",
        "begun", "confirm", "id", "open",
    )  # fmt: skip

    def __init__(self, id: bytes, key: bytes, confirm: ConfirmAt) -> None:
        """id: random, as it names the transaction among those of all clients. key: random."""
        self.id = id
        self.open = False
        """Whether records may be added."""
        self.begun = False
        """Whether it was begun, which happens once."""
        self.confirm = confirm
        self._key = key
        self._places = 0
        """Batches that were given a place."""
        self._chunk = Step()
        self._left = Step()
        """Records that left last: they leave again where the broker refuses them."""
        self._left_from = 0
        """Place of the first batch that left last."""
        self._halves: list[Step] = []
        """Records that the broker refused as too large, in smaller chunks, the first one last."""
        self._bytes_max, self._rows_max = CHUNK_BYTES, CHUNK_ROWS

    # --- records ---------------------------------------------------------------------------

    @property
    def chunk(self) -> Step:
        """Records that have not left. Raises LocalProtocolError: the transaction is over."""
        self.check_open()
        return self._chunk

    def check_open(self) -> None:
        """Raise LocalProtocolError unless records may be added."""
        if not self.open:
            raise LocalProtocolError(
                "unexpected",
                "the transaction is not open: enter its block, or call begin() first; after its "
                "end that begins another",
            )

    def add(self, stream: str, rows: Sequence[OutgoingRow], at: int = 0) -> int:
        """Add rows from a place on, as many as fit; returns the place of the first that does not.

        Where some do not, the records must leave before. Raises as `chunk`.
        """
        chunk = self.chunk
        if self.is_full():
            return at
        room = self._bytes_max - chunk.size
        size = 0
        end = at
        for row in rows[at : at + self._rows_max - chunk.count]:
            larger = size + row.size + ROW_BYTES
            if larger > room and (size or chunk.parts):
                break
            size = larger
            end += 1
        chunk.add_rows(stream, rows[at:end], size)
        return end

    def is_full(self) -> bool:
        """Whether the records must leave before others are added."""
        chunk = self._chunk
        return (
            chunk.size > self._bytes_max
            or chunk.count >= self._rows_max
            or len(chunk.parts) >= PARTS_MAX - 1
        )

    def lacks_room_for(self, content: bytes) -> bool:
        """Whether the records must leave before a content, beside which they are too many.

        Raises LocalProtocolError: the content is no batch, or as `chunk`.
        """
        chunk, count = self.chunk, content_count(content)
        return bool(chunk.parts) and (
            self.is_full()
            or chunk.size + len(content) + STAMP_BYTES > self._bytes_max
            or chunk.count + count > self._rows_max
        )

    @property
    def was_staged(self) -> bool:
        """Whether the broker has, or may have, batches of it."""
        return self._places > 0

    # --- steps -----------------------------------------------------------------------------

    def begin(self, timeout_ms: int, limits: Limits) -> Step:
        """Return the step that opens the transaction. limits: those of the broker."""
        self.open = self.begun = True
        self._bytes_max = min(CHUNK_BYTES, limits.batch_bytes_max // 2)
        self._rows_max = min(CHUNK_ROWS, limits.batch_records_max)
        return self._step("stored", BeginTransaction(self.id, 0, timeout_ms))

    def take(self) -> Step:
        """Return the step in which the records leave that have gathered."""
        # The log has stages in front of the commit, whose confirm so covers them, too.
        chunk, self._chunk = self._chunk, Step()
        return self._named(self._staging(chunk, "stored"))

    def commit(self) -> Step:
        """Return the step that commits the transaction, with the records that have not left.

        If none has left before, that step publishes them itself.
        """
        self.check_open()
        chunk, self._chunk = self._chunk, Step()
        step = self._staging(chunk, self.confirm) if self.was_staged else self._publishing(chunk)
        self.open = False
        return self._named(step, CommitTransaction(self.id, self._places, 0))

    def commit_again(self) -> Step:
        """Return the step that commits, and stages what the last one was to publish or stage."""
        step = self._staging(self._left, self.confirm)
        return self._named(step, CommitTransaction(self.id, self._places, 0))

    def repeated(self, step: Step) -> Step:
        """Return a step again, under its key: the broker takes it once, whichever of them comes."""
        again = Step(self.confirm, step.key)
        again.parts, again.size, again.count = step.parts, step.size, step.count
        again.level, again.merge_limited = step.level, step.merge_limited
        return again

    def split(self) -> bool:
        """Split what the broker refused as too large into two; False: it is one record or none.

        `take_half` takes the halves out; later chunks are smaller from the start.
        """
        left, self._left = self._left, Step()
        rows = [(place, row) for place, rows in left.parts.items() for row in rows]
        if len(rows) < 2:
            return False
        self._places = self._left_from
        self._bytes_max = min(self._bytes_max, left.size // 2)
        first, second = Step(), Step()
        for at, (place, row) in enumerate(rows):
            # Neither half is empty: the first row is in the first, the last one in the second.
            last = at == len(rows) - 1
            half = second if last or (first.count and first.size >= left.size // 2) else first
            _put_in_half(half, place, row)
        self._halves += [second, first]
        return True

    def take_half(self) -> Step | None:
        """Return the step in which the next half of what was too large leaves; None: all have."""
        if not self._halves:
            self._left = Step()
            return None
        return self._named(self._staging(self._halves.pop(), "stored"))

    def roll_back(self) -> Step:
        """Return the step that ends the transaction without effect."""
        self.open = False
        self._chunk = Step()
        self._halves.clear()
        return self._step("stored", RollBackTransaction(self.id, 0))

    def _staging(self, chunk: Step, confirm: ConfirmAt) -> Step:
        """Return a step that stages a chunk."""
        step = Step(confirm)
        self._left, self._left_from = chunk, self._places
        for place, rows in chunk.parts.items():
            step.parts[staged(place, self.id, self._places)] = rows
            self._places += 1
        step.size, step.count, step.merge_limited = chunk.size, chunk.count, chunk.merge_limited
        return step

    def _publishing(self, chunk: Step) -> Step:
        """Return a step that publishes a chunk at once, as no batch was staged before."""
        step = Step(self.confirm)
        step.parts, step.size, step.count = dict(chunk.parts), chunk.size, chunk.count
        step.merge_limited = chunk.merge_limited
        self._left, self._left_from = chunk, self._places
        return step

    def _step(self, confirm: ConfirmAt, command: Command) -> Step:
        return self._named(Step(confirm), command)

    def _named(self, step: Step, command: Command | None = None) -> Step:
        """Add a command to a step, and give the step a key, so that none is merged with it."""
        if command is not None:
            place: Place = (COMMAND, command)
            step.parts[place] = [command]
        step.key = self._key
        number = int.from_bytes(self._key, "big") + 1
        self._key = (number % (1 << 8 * len(self._key))).to_bytes(len(self._key), "big")
        return step


def _put_in_half(half: Step, place: Place, row: Any) -> None:
    """Add a row, or an encoded content, of a chunk that is halved to one of its halves."""
    half.parts.setdefault(place, []).append(row)
    if isinstance(row, OutgoingRow):
        half.size += row.size + ROW_BYTES
        half.count += 1
    else:
        half.size += len(row) + STAMP_BYTES
        half.count += content_count(row)
        half.merge_limited = True
