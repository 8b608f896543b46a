"""Requeueing: REQUEUE_GROUP, by which the records of dead letters come again.

Owns the way of dead letters back into their group. The rules: a dead letter leaves its mailbox in
the step that lets its record wait again; one whose record no member would get stays where it is,
whatever removed the record, and is counted as gone; a long list is done in portions, one a turn.

A dead letter is a row of a put into the mailbox. Its `origin` has, for each row of the put, the
offset of the record and its slot; `kept` and `mask` are rows of a put. Source: SPEC.md,
section 4.8.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec
import numpy as np

from malamute_protocol.commands import RequeueGroup
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.groups.administration import GroupAdministration
from malamute_py.broker.groups.group import Group
from malamute_py.broker.groups.reader import GroupReader
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.answers import Answer, Answers
from malamute_py.broker.log.bodies import Body
from malamute_py.broker.log.steps import Part, Steps, Then
from malamute_py.broker.mail.mailbox import Mailbox
from malamute_py.broker.mail.messages import RowsOfPut
from malamute_py.broker.mail.puts import LetterSearch, Puts
from malamute_py.broker.streams.conditions import check_ready
from malamute_py.broker.structures.bitmaps import bits_of_rows, places_of
from malamute_py.broker.structures.timers import Timers
from malamute_py.changelog.records import (
    Change,
    GroupDone,
    GroupRevived,
    Origin,
    Range,
    rows_of,
)
from malamute_py.changelog.tables import MessageRow, Rare

NUMBERS_MAX: Final = 1_000
"""Numbers that one REQUEUE_GROUP names at most."""


class Requeueing:
    """The command REQUEUE_GROUP."""

    def __init__(
        self,
        shard: Shard,
        steps: Steps,
        answers: Answers,
        puts: Puts,
        reader: GroupReader,
        timers: Timers,
        administration: GroupAdministration,
    ) -> None:
        self._shard = shard
        self._steps = steps
        self._answers = answers
        self._puts = puts
        self._reader = reader
        self._timers = timers
        self._administration = administration

    def requeue(self, link: Link, command: RequeueGroup) -> None:
        """Let the records of dead letters come again; the answer follows when that is durable.

        numbers of the command: which letters; none: all of the group. Raises BrokerRefused.
        """
        if len(command.numbers) > NUMBERS_MAX:
            raise BrokerRefused("too_large", f"at most {NUMBERS_MAX} numbers at once")
        group = self._administration.find(link, command.stream, command.group, "manage groups of")
        if group.stream.keys is not None:
            check_ready(group.stream, group.stream.keys)
        # Either may have letters: the default takes those that the mailbox of the settings refuses.
        mailboxes = list(dict.fromkeys((group.dead_letters, group.default_dead_letters)))
        answer = Answer(self._answers, link, command)
        self._revive(_Job(group, LetterSearch(mailboxes, command.numbers), answer), 0)

    def _revive(self, job: _Job, lsn: int) -> None:
        """Begin the next portion of dead letters, or answer when there is none.

        lsn: end in the log of the portion before, which is durable before the answer is sent; 0:
        there was none.
        """
        group = job.group
        if group.gone:
            if self._administration.stands(group):
                # What came again before the reset may be done by the new position.
                job.answer.refuse("in_use", f"group '{group.name}' was reset meanwhile: ask again")
            else:
                job.answer.refuse("unknown_group", f"group '{group.name}' was removed")
            return
        found = self._puts.next_letters(job.search, job.is_mine)
        if found is not None:
            mailbox, letters = found
            self._sort(job, _Portion(mailbox, lsn), letters)
        elif job.count:
            job.answer.value = partial(dict, count=job.count, gone=job.gone)
            job.answer.after(lsn)
        elif job.gone:
            job.answer.refuse(
                "retention", f"'{group.stream.name}' has none of these {job.gone} records any more"
            )
        else:
            job.answer.refuse("unknown_request", "no such dead letter")

    def _sort(self, job: _Job, portion: _Portion, letters: list[RowsOfPut]) -> None:
        """Take those dead letters of a portion whose records members could still get.

        A purge by subject is a mark in the stream: only a record's header tells whether it took the
        record. So letters of records before such a mark are read first, from their mailbox.
        """
        purged_before = job.group.stream.purges.before
        doubtful: list[RowsOfPut] = []
        for base, mask, row in letters:
            origin = _origin(row)
            kept = self._within_stream(job.group, origin, mask)
            job.gone += (mask ^ kept).bit_count()
            if any(origin.offsets[place] < purged_before for place in places_of(kept)):
                doubtful.append((base, kept, row))
            elif kept:
                portion.rows.append((base, kept, row))
        portion.unread = len(doubtful)
        for letter in doubtful:
            self._puts.read(letter, partial(self._read, job, portion, letter))
        if not doubtful:
            self._take_portion(job, portion)

    def _read(self, job: _Job, portion: _Portion, letter: RowsOfPut, body: Body | None) -> None:
        """Keep the rows of a doubtful letter, now read, that no purge by subject took.

        body: the letter's content; None: it is lost, so that its rows stay and count as gone. The
        last letter that is read has the portion taken.
        """
        base, mask, row = letter
        offsets = np.array(_origin(row).offsets, np.int64)
        kept = 0
        if body is not None:
            left = job.group.stream.purges.left(body.content, int(offsets.min()), offsets)
            kept = mask if left is None else mask & bits_of_rows(left)
        job.gone += (mask ^ kept).bit_count()
        if kept:
            portion.rows.append((base, kept, row))
        portion.unread -= 1
        if not portion.unread:
            self._timers.set(self._shard.now_ms, partial(self._take_read, job, portion))

    def _take_read(self, job: _Job, portion: _Portion) -> None:
        """Take what no reader of the mailbox, or other requeue, took while letters were read."""
        mailbox = portion.mailbox
        still_free = [(self._puts.still_free(mailbox, letter), letter) for letter in portion.rows]
        portion.rows = [(base, mask, row) for mask, (base, _, row) in still_free if mask]
        self._take_portion(job, portion)

    def _take_portion(self, job: _Job, portion: _Portion) -> None:
        """Let the records of a portion come again; if there are none, take the next in a turn."""
        if portion.rows and not job.group.gone:
            self._log_return(job, portion.mailbox, portion.rows)
        else:
            self._timers.set(self._shard.now_ms, partial(self._revive, job, portion.lsn))

    def _within_stream(self, group: Group, origin: Origin, mask: int) -> int:
        """Return those rows of a put whose records readers of the stream would still get.

        They lie within its bounds and have not expired; purges by subject are not looked at.
        """
        stream, now_ms = group.stream, self._shard.now_ms
        if group.slots is not None and not origin.slots:
            # A keyed group cannot take a record back whose letter does not name its slot.
            return 0
        first, end = stream.first_to_read(now_ms), stream.position_end(origin.epoch)
        if origin.at_ms and origin.at_ms < stream.oldest_ms(now_ms):
            # Of records that are too old for the stream, readers get only those that a pin holds.
            first = max(first, stream.pinned)
        keys, expiries = stream.keys, origin.expiries
        left = 0
        for place in places_of(mask):
            offset = origin.offsets[place]
            if not first <= offset < end or (expiries and 0 < expiries[place] <= now_ms):
                continue
            # Of records before `first` only the newest of their subjects are left, and have moved.
            if keys is None or offset >= stream.first or keys.moved_from(offset, offset + 1, 1):
                left |= 1 << place
        return left

    def _log_return(self, job: _Job, mailbox: Mailbox, rows: list[RowsOfPut]) -> None:
        """Log that the records of some dead letters wait again, and that the letters are gone."""
        group = job.group
        again: dict[int, int] = {}  # Offset of each record -> its slot; 0 unless it is keyed.
        for _, mask, row in rows:
            origin = _origin(row)
            for place in places_of(mask):
                again[origin.offsets[place]] = origin.slots[place] if origin.slots else 0
        changes: list[Change] = []
        number, name, epoch = group.stream.number, group.name, self._shard.epoch
        low = group.holdings.low
        if low > group.row.next:
            # The log knows records before its position as done by the position alone, which moves
            # back to the first of these records: those since its last position are logged as done.
            changes.append(GroupDone(number, name, [(group.row.next, low)], epoch))
        named = [(base, rows_of(mask)) for base, mask, _ in rows]
        ranges: list[Range] = [(offset, offset + 1) for offset in sorted(again)]
        changes.append(GroupRevived(number, name, mailbox.number, named, ranges, epoch))
        reopening = Then(partial(self._reopen, job, again), job.answer.refuse)
        effects = [self._puts.reviving(mailbox, rows), reopening]
        self._steps.take([Part(changes, effects=effects, level=mailbox.level)])

    def _reopen(self, job: _Job, again: dict[int, int], lsn: int) -> None:
        """Let the records of a portion wait again, now that the log has it; go on with the next."""
        group = job.group
        for offset, slot in again.items():
            group.reopen(offset, slot)
        job.count += len(again)
        self._shard.counters["group_records_requeued"] += len(again)
        self._reader.wake(group)
        self._timers.set(self._shard.now_ms, partial(self._revive, job, lsn))


def _origin(row: MessageRow) -> Origin:
    """Return where the records of a put came from: every put of a group's dead letters has it."""
    assert row.rare is not None
    origin = row.rare.origin
    assert origin is not None
    return origin


class _Portion(msgspec.Struct, eq=False):
    """Dead letters of one portion that are to come again."""

    mailbox: Mailbox
    lsn: int
    """End in the log of the portion before."""
    rows: list[RowsOfPut] = []
    unread: int = 0
    """Letters that are being read."""


class _Job(msgspec.Struct, eq=False):
    """One REQUEUE_GROUP that is being done, portion by portion."""

    group: Group
    search: LetterSearch
    answer: Answer
    count: int = 0
    """Records that wait again."""
    gone: int = 0
    """Dead letters whose records the stream has no longer for readers."""

    def is_mine(self, rare: Rare) -> bool:
        """Whether a message is a dead letter of the group: others may lie in the same mailbox."""
        group, origin = self.group, rare.origin
        return (
            origin is not None
            and (origin.number, origin.group) == (group.stream.number, group.name)
        )  # fmt: skip
