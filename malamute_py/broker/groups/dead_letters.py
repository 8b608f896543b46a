"""Dead letters of groups: records that are no longer tried lie in a mailbox, with where they were.

Owns the step by which a record leaves its group for a mailbox: it is buried. The rules: the copy is
put and the record is done in one step, so that a dead letter is neither lost nor there twice; a
mailbox that is full, or that cannot take dead letters, lets the record wait, and no member gets it
meanwhile. `entry` is what the log has of the attempts of some records: their range, how many
attempts, and how the last one ended. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from malamute_protocol.content import Content
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.extract import copy_rows, copy_whole, extractable
from malamute_protocol.stamp import append_time_of
from malamute_py.broker.context import Shard
from malamute_py.broker.groups.group import Group
from malamute_py.broker.groups.holdings import Picked
from malamute_py.broker.groups.progress import Progress
from malamute_py.broker.log.steps import Applying, Effect, Part, Steps
from malamute_py.broker.log.stream import StampedBatch
from malamute_py.broker.mail.puts import Puts
from malamute_py.broker.structures.bitmaps import low_bit, lowest, ones, places_of, rows_of_bits
from malamute_py.changelog.records import GroupDone, Origin, Tries

PAUSE_MS: Final = 1_000
"""Pause before a dead letter that its mailbox or the log did not take is put again."""

Back: TypeAlias = Callable[[Group, Picked, int], None]
"""Lets withheld records of a group wait again after so many ms: GroupReader.back()."""


class DeadLetters:
    """Records on their way into the dead-letter mailboxes of their groups.

    The reader of a group has `without` sort them out before it hands rows out.
    """

    def __init__(self, shard: Shard, steps: Steps, puts: Puts, progress: Progress) -> None:
        self.shard = shard
        self.progress = progress
        self._steps = steps
        self._puts = puts

    def without(self, group: Group, batch: StampedBatch, bits: int, back: Back) -> int:
        """Bury those waiting rows of a batch that are dead letters; returns the other rows.

        Called before rows are handed out, since attempts may have been used up, or attempts_max
        lowered, while they waited.
        """
        for entry, rows in group.dying_of(batch.base, bits):
            bits ^= rows
            self._bury(group, batch, entry, rows, back)
        return bits

    def _bury(self, group: Group, batch: StampedBatch, entry: Tries, rows: int, back: Back) -> None:
        """Put rows of one batch into the dead-letter mailbox, in halves if they do not fit.

        entry: how their attempts ended.
        """
        picked, count = group.withhold(batch.base, rows), rows.bit_count()
        burying = _Burying(self, group, picked, back, count, batch.base + low_bit(rows), entry)
        try:
            part = self._part(group, batch, entry, rows)
        except BrokerRefused as error:
            if error.code != "limit" or count == 1:
                burying.wait_again(error.code, error.reason)
                return
            # More than an empty mailbox takes at once: they wait again, and each half is tried.
            group.back(picked, late=False)
            some = lowest(rows, count // 2)
            self._bury(group, batch, entry, some, back)
            self._bury(group, batch, entry, rows ^ some, back)
            return
        burying.add_change(part)
        part.effects.append(burying)
        self._steps.take([part])

    def name_of(self, number: int) -> str:
        """Return the name of a mailbox, for an event; "": it is gone."""
        mailbox = self._puts.mailboxes.by_number.get(number)
        return "" if mailbox is None else mailbox.name

    def _part(self, group: Group, batch: StampedBatch, entry: Tries, rows: int) -> Part:
        """Return the part that puts copies of rows into the mailbox.

        The mailbox that the settings name comes first, then the group's own. Raises BrokerRefused.
        """
        _, _, attempts, why = entry
        settings = self.shard.settings
        # Steps.check() refuses clients' mail for these two reasons; this mail is the broker's own.
        if self._steps.pressed:
            raise BrokerRefused("wait", "the log waits for its checkpoint")
        if self._steps.unsettled_bytes > settings.unsynced_bytes_max:
            raise BrokerRefused("wait", "too much waits for the disk")
        frame, offsets, letters = _copy(batch, rows)
        stream, expiries = group.stream, batch.content.expiries
        # Rows of the batch that are in the copy.
        copied = [offset - batch.base for offset in offsets]
        origin = Origin(
            stream.number, stream.name, group.name, self.shard.epoch, attempts, offsets,
            group.slots_at(offsets), append_time_of(batch.stamp),
            [] if expiries is None else expiries[copied].tolist(),
        )  # fmt: skip
        names = dict.fromkeys((group.dead_letters, group.default_dead_letters))
        for name in names:
            try:
                part = self._puts.put(
                    name, sender="", content=Content(frame), frame=frame, why=why,
                    asked_by=group.row.by, origin=origin, rows=letters,
                )  # fmt: skip
            except BrokerRefused as error:
                # The mailbox that the settings name may be unable to take dead letters, or only so
                # many at once: then fewer are tried.
                fewer = error.code == "limit" and letters.bit_count() > 1
                if fewer or error.code == "wait" or name == group.default_dead_letters:
                    raise
                continue
            if not part.memory:
                return part
            # A mailbox in memory takes no part in a step that is logged.
        raise BrokerRefused("cross_ring", "the mailbox is in memory only")


def _copy(batch: StampedBatch, rows: int) -> tuple[Any, list[int], int]:
    """Copy rows of a batch for a mailbox: (frame, offsets in it, which of its rows are meant).

    A batch that cannot be cut is copied whole; others are without the rows that are not meant.
    """
    content = batch.content
    if not extractable(content):
        return copy_whole(content), list(range(batch.base, batch.next)), rows
    offsets = [batch.base + row for row in places_of(rows)]
    frame = copy_rows(content, rows_of_bits(rows, batch.next - batch.base))
    return frame, offsets, ones(len(offsets))


class _Burying(Effect):
    """Effect of burying: records whose copies go into a mailbox, withheld until the log answers."""

    letters: DeadLetters
    group: Group
    picked: Picked
    back: Back
    count: int
    first: int
    """Least offset of the records, for the event."""
    entry: Tries

    def add_change(self, part: Part) -> None:
        """Have the part that puts the copies say, too, that the records are done."""
        group = self.group
        stream = group.stream
        ranges = group.holdings.ranges(self.picked, logged=group.row.next)
        done = GroupDone(stream.number, group.name, ranges, self.letters.shard.epoch)
        if stream.ring.memory:
            # The group is in memory, and its changes are not logged: the tables take them directly,
            # before any other effect looks at them.
            part.effects.insert(0, Applying(self.letters.shard.queues, [done]))
        else:
            part.changes = [*part.changes, done]

    def appended(self, part: Part, end_lsn: int) -> None:
        """Count the dead letters as acknowledged, since the log has taken them."""
        group, shard = self.group, self.letters.shard
        _, _, attempts, why = self.entry
        group.acknowledged(self.picked)
        group.moved_ms = shard.now_ms
        group.refusing = False
        group.holdings.tidy()
        shard.counters["group_records_dead"] += self.count
        shard.counters["dead_letters"] += self.count
        shard.event(
            "record_dead", "warning", stream=group.stream.name, group=group.name,
            offset=self.first, count=self.count, attempts=attempts, why=why,
            mailbox=self.letters.name_of(part.place),
        )  # fmt: skip
        if group.has_unlogged:
            self.letters.progress.flush_later(group)
        # No record comes back, but the group gets a turn: its window may have room again.
        self.back(group, [], 0)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Let the records wait again, since no dead-letter mailbox took their copies."""
        self.wait_again(code, reason)

    def wait_again(self, code: str, reason: str) -> None:
        """Let the records wait for PAUSE_MS, then try again; tell the operator the first time."""
        group, shard = self.group, self.letters.shard
        if not group.refusing:
            group.refusing = True
            shard.event(
                "dead_letter_refused", "warning", stream=group.stream.name,
                group=group.name, mailbox=group.dead_letters, code=code, reason=reason,
            )  # fmt: skip
        self.back(group, self.picked, PAUSE_MS)
