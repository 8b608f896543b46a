"""Requeueing: REQUEUE_GROUP, by which the records of dead letters come again.

Owns the way of dead letters back into their group. The rules: a dead letter leaves its mailbox in
the step that lets its record wait again; one whose record the stream has no longer stays where it
is; a long list is done in portions, one a turn. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from malamute_protocol.commands import RequeueGroup
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.groups.administration import GroupAdministration
from malamute_py.broker.groups.group import Group
from malamute_py.broker.groups.reader import GroupReader
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.answers import Answer, Answers
from malamute_py.broker.log.steps import Part, Steps, Then
from malamute_py.broker.mail.mailbox import Mailbox
from malamute_py.broker.mail.messages import RowsOfPut
from malamute_py.broker.mail.puts import LetterSearch, Puts
from malamute_py.broker.structures.bitmaps import places_of
from malamute_py.broker.structures.timers import Timers
from malamute_py.changelog.records import Change, GroupDone, GroupRevived, Range, rows_of
from malamute_py.changelog.tables import Rare

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

        Raises BrokerRefused.
        """
        if len(command.numbers) > NUMBERS_MAX:
            raise BrokerRefused("too_large", f"at most {NUMBERS_MAX} numbers at once")
        group = self._administration.find(link, command.stream, command.group, "admin groups of")
        # Either may have letters: the default takes those that the mailbox of the settings refuses.
        places = list(dict.fromkeys((group.dead_letters, group.default_dead_letters)))
        answer = Answer(self._answers, link, command)
        self._revive(_Job(group, LetterSearch(places, command.numbers), answer), 0)

    def _revive(self, job: _Job, lsn: int) -> None:
        """Let a portion of dead letters come again, or answer when all have.

        lsn: end in the log of the portion before, after which the answer is sent.
        """
        group = job.group
        if group.gone:
            job.answer.refuse("unknown_group", f"group '{group.name}' was removed")
            return
        found = self._puts.next_letters(job.search, job.is_mine)
        if found is not None:
            mailbox, letters = found
            rows = self._there(job, letters)
            if rows:
                self._take(job, mailbox, rows)
            else:
                self._timers.set(self._shard.now_ms, partial(self._revive, job, lsn))
        elif job.count:
            job.answer.value = partial(dict, count=job.count, gone=job.gone)
            job.answer.after(lsn)
        elif job.gone:
            job.answer.refuse(
                "retention", f"'{group.stream.name}' has none of these {job.gone} records any more"
            )
        else:
            job.answer.refuse("unknown_request", "no such dead letter")

    def _there(self, job: _Job, letters: list[RowsOfPut]) -> list[RowsOfPut]:
        """Return the dead letters whose records the stream still has; count the others."""
        stream = job.group.stream
        rows: list[RowsOfPut] = []
        for base, mask, row in letters:
            assert row.rare is not None
            origin = row.rare.origin
            assert origin is not None
            first = stream.first_to_read(self._shard.now_ms)
            end = stream.position_end(origin.epoch)
            keyless = job.group.slots is not None and not origin.slots
            kept = 0
            for place in places_of(mask):
                if first <= origin.offsets[place] < end and not keyless:
                    kept |= 1 << place
            job.gone += (mask ^ kept).bit_count()
            if kept:
                rows.append((base, kept, row))
        return rows

    def _take(self, job: _Job, mailbox: Mailbox, rows: list[RowsOfPut]) -> None:
        """Log that the records of some dead letters wait again, and that the letters are gone."""
        group = job.group
        again: dict[int, int] = {}
        for _, mask, row in rows:
            assert row.rare is not None
            origin = row.rare.origin
            assert origin is not None
            for place in places_of(mask):
                again[origin.offsets[place]] = origin.slots[place] if origin.slots else 0
        changes: list[Change] = []
        number, name, epoch = group.stream.number, group.name, self._shard.epoch
        low = group.holdings.low
        if low > group.row.next:
            # The log knows records before the position as done by the position alone, which now
            # moves back to the first of these: it is told of those since its last position.
            changes.append(GroupDone(number, name, [(group.row.next, low)], epoch))
        named = [(base, rows_of(mask)) for base, mask, _ in rows]
        ranges: list[Range] = [(offset, offset + 1) for offset in sorted(again)]
        changes.append(GroupRevived(number, name, mailbox.number, named, ranges, epoch))
        reopening = Then(partial(self._reopen, job, again), job.answer.refuse)
        effects = [self._puts.reviving(mailbox, rows), reopening]
        self._steps.take([Part(changes, effects=effects, level=mailbox.level)])

    def _reopen(self, job: _Job, again: dict[int, int], lsn: int) -> None:
        """Let records wait again that the tables have as not done."""
        group = job.group
        for offset, slot in again.items():
            group.reopen(offset, slot)
        job.count += len(again)
        self._shard.counters["group_records_requeued"] += len(again)
        self._reader.wake(group)
        self._timers.set(self._shard.now_ms, partial(self._revive, job, lsn))


class _Job(msgspec.Struct, eq=False):
    """One REQUEUE_GROUP that is being done."""

    group: Group
    search: LetterSearch
    answer: Answer
    count: int = 0
    gone: int = 0
    """Dead letters whose records the stream has no longer."""

    def is_mine(self, rare: Rare) -> bool:
        """Whether a message is a dead letter of the group."""
        group, origin = self.group, rare.origin
        return (
            origin is not None
            and (origin.number, origin.group) == (group.stream.number, group.name)
        )  # fmt: skip
