"""Open transactions: what gathers at the client, and the steps in which it leaves.

Owns the records of one transaction that have not left, and the places of the batches that have. The
rules: records leave in chunks, each a step of its own, which the broker stages; the chunks have
their places, so that a chunk that is put off does not change the order; what is left at the commit
leaves in one step with it, and where nothing was staged before, the broker appends it at once; for
a stream with a ring of its own the broker refuses that, and gets the records staged; what is too
large for a ring leaves again in halves. No step of a transaction is merged with another. Source:
SPEC.md, section 4.11.

Words: to stage is to keep a batch aside in the log until the commit. A batch's place is its number
among those of the transaction. A step's `parts` are rows by what they must agree in (a tuple that
begins with the kind of the part, such as (PUBLISH, stream)); a part leaves as one batch.
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
        "_bytes_max", "_chunk", "_halves", "_key", "_places", "_rows_max", "_sent_last",
        "_sent_last_from", "begun", "confirm", "id", "open",
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
        """Records that gather: a step that never leaves itself."""
        self._sent_last = Step()
        """Records that left last: they leave again where the broker refuses them."""
        self._sent_last_from = 0
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
        """Add rows[at:] to the chunk, as many as fit; returns the index of the first that does not.

        Where some do not, the caller has the chunk leave by take(), and adds the rest.
        Raises as `chunk`.
        """
        chunk = self.chunk
        if self.is_full():
            return at
        room = self._bytes_max - chunk.size
        size = 0
        end = at
        for row in rows[at : at + self._rows_max - chunk.count]:
            larger = size + row.size + ROW_BYTES
            if larger > room and (size or chunk.parts):  # an empty chunk takes a row of any size
                break
            size = larger
            end += 1
        chunk.add_rows(stream, rows[at:end], size)
        return end

    def is_full(self) -> bool:
        """Whether the chunk must leave before others are added."""
        chunk = self._chunk
        return (
            chunk.size > self._bytes_max
            or chunk.count >= self._rows_max
            or len(chunk.parts) >= PARTS_MAX - 1  # one part is left for the commit
        )

    def lacks_room_for(self, content: bytes) -> bool:
        """Whether the chunk must leave before a content that came encoded can be added to it.

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
        """Return the step that opens the transaction.

        timeout_ms: after which the broker rolls it back. limits: the broker's.
        """
        self.open = self.begun = True
        self._bytes_max = min(CHUNK_BYTES, limits.batch_bytes_max // 2)
        self._rows_max = min(CHUNK_ROWS, limits.batch_records_max)
        return self._step("stored", BeginTransaction(self.id, 0, timeout_ms))

    def take(self) -> Step:
        """Return the step in which the records leave that have gathered, to be staged."""
        # `stored` is enough: the log has them in front of the commit, whose confirm covers them.
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
        """Return the step that commits once more, as the broker refused the last one.

        It stages what that one was to publish or stage.
        """
        step = self._staging(self._sent_last, self.confirm)
        return self._named(step, CommitTransaction(self.id, self._places, 0))

    def repeated(self, step: Step) -> Step:
        """Return a copy of a step under the same key, to be sent again as its answer is unknown.

        The broker takes it once, whichever of the two it gets first.
        """
        again = Step(self.confirm, step.key)
        again.parts, again.size, again.count = step.parts, step.size, step.count
        again.level, again.merge_limited = step.level, step.merge_limited
        return again

    def split(self) -> bool:
        """Split what the broker refused as too large into two; False: it is one record or none.

        `take_half` takes the halves out; later chunks are smaller from the start.
        """
        whole, self._sent_last = self._sent_last, Step()
        rows = [(place, row) for place, rows in whole.parts.items() for row in rows]
        if len(rows) < 2:
            return False
        self._places = self._sent_last_from  # the broker has none of the batches: places are free
        half_bytes = whole.size // 2
        self._bytes_max = min(self._bytes_max, half_bytes)
        first, second = Step(), Step()
        for at, (place, row) in enumerate(rows):
            # Neither half is empty: the first row is in the first, the last one in the second.
            last = at == len(rows) - 1
            half = second if last or (first.count and first.size >= half_bytes) else first
            _put_in_half(half, place, row)
        self._halves += [second, first]
        return True

    def take_half(self) -> Step | None:
        """Return the step in which the next half of what was too large leaves; None: all have."""
        if not self._halves:
            self._sent_last = Step()  # the broker has taken all: nothing leaves again
            return None
        return self._named(self._staging(self._halves.pop(), "stored"))

    def roll_back(self) -> Step:
        """Return the step that ends the transaction without effect."""
        self.open = False
        self._chunk = Step()
        self._halves.clear()
        return self._step("stored", RollBackTransaction(self.id, 0))

    def _staging(self, chunk: Step, confirm: ConfirmAt) -> Step:
        """Return a step that stages a chunk: its batches get the next places."""
        step = Step(confirm)
        self._sent_last, self._sent_last_from = chunk, self._places
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
        self._sent_last, self._sent_last_from = chunk, self._places
        return step

    def _step(self, confirm: ConfirmAt, command: Command) -> Step:
        """Return a step of one command alone."""
        return self._named(Step(confirm), command)

    def _named(self, step: Step, command: Command | None = None) -> Step:
        """Add a command to a step, and give the step a key, so that none is merged with it.

        The keys are the transaction's random key and the numbers that follow it.
        """
        if command is not None:
            place: Place = (COMMAND, command)
            step.parts[place] = [command]
        step.key = self._key
        following = int.from_bytes(self._key, "big") + 1
        beyond = 1 << 8 * len(self._key)  # after the highest number of so many bytes comes 0
        self._key = (following % beyond).to_bytes(len(self._key), "big")
        return step


def _put_in_half(half: Step, place: Place, row: Any) -> None:
    """Add a row, or a content that came encoded, of a chunk that is halved to one of the halves."""
    half.parts.setdefault(place, []).append(row)
    if isinstance(row, OutgoingRow):
        half.size += row.size + ROW_BYTES
        half.count += 1
    else:
        half.size += len(row) + STAMP_BYTES
        half.count += content_count(row)
        half.merge_limited = True  # no rows join an encoded content
