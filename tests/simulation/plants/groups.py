"""The planted bugs of groups and cursors."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import msgspec

from malamute_py.broker.cursors.cursors import Cursors
from malamute_py.broker.groups import acknowledgements, groups, progress
from malamute_py.broker.groups.dead_letters import DeadLetters, _Burying
from malamute_py.broker.groups.group import Group
from malamute_py.broker.groups.groups import Groups
from malamute_py.broker.groups.holders import Holders
from malamute_py.broker.groups.holdings import ranges_of
from malamute_py.broker.groups.returns import Returns
from malamute_py.changelog.ranges import with_tries
from tests.simulation.plants.planted import Planted, codes, replace


def _group_sees_all(stack: contextlib.ExitStack) -> None:
    stack.enter_context(patch.object(Group, "tail", property(lambda group: group.stream.next)))


def _group_done_over_a_hole(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def done(stream: int, name: str, ranges: Any, epoch: int) -> Any:
            return original(stream, name, [(ranges[0][0], ranges[-1][1])], epoch)

        return done

    for module in (acknowledgements, groups, progress):
        replace(stack, module, "GroupDone", make)


def _record_attempts_dropped(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def recovered(self: Any) -> None:
            for row in self._shard.queues.groups.values():
                row.tries = []
            original(self)

        return recovered

    replace(stack, Groups, "recovered", make)


def _holder_forgotten(stack: contextlib.ExitStack) -> None:
    replace(stack, Holders, "take_up", lambda original: lambda self, group, give_up: None)


def _holder_not_logged(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def settle(self: Any, group: Any) -> None:
            group.place_logged = True
            self._begin(group)

        return settle

    replace(stack, Holders, "settle", make)


def _record_attempts_in_memory(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def log_attempt(self: Any, group: Any, picked: Any, why: str) -> None:
            group.row.tries = with_tries(group.row.tries, ranges_of(picked), why)
            self._reader.back(group, picked, 0)

        return log_attempt

    replace(stack, Returns, "log_attempt", make)


def _dead_record_not_done(stack: contextlib.ExitStack) -> None:
    replace(stack, _Burying, "add_change", lambda original: lambda self, part: None)


def _dead_record_not_put(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def without(self: Any, group: Any, batch: Any, bits: int, back: Any) -> int:
            for _, rows in group.dying_of(batch.base, bits):
                bits ^= rows
                group.close(batch.base, rows)
                self.progress.flush_later(group)
            return bits

        return without

    replace(stack, DeadLetters, "without", make)


def _since_ignored(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def prepare_move(self: Any, link: Any, command: Any, frame: Any = None) -> Any:
            return original(self, link, msgspec.structs.replace(command, from_=-1), frame)

        return prepare_move

    replace(stack, Cursors, "prepare_move", make)


PLANTS: dict[str, Planted] = {
    "group-ignores-the-sync": Planted(
        "work", "members of a durable group see what is only appended",
        _group_sees_all, codes("early"), 60,
    ),
    "group-done-over-a-hole": Planted(
        "work", "a group's position passes over what was not acknowledged",
        _group_done_over_a_hole, codes("after_end", "stuck", "half_step"), 60, 10,
    ),
    "record-attempts-dropped": Planted(
        "work", "a start forgets the attempts of a group's records",
        _record_attempts_dropped, codes("tables", "attempts", "dead"), 60, 45,
    ),
    "holder-forgotten": Planted(
        "work", "a start forgets which member has the place of an exclusive group",
        _holder_forgotten, codes("place"), 60,
    ),
    "holder-not-logged": Planted(
        "work", "the holder of an exclusive group is given records before the log has it",
        _holder_not_logged, codes("place"), 60,
    ),
    "record-attempts-in-memory": Planted(
        "work", "an attempt that a lost link has ended is counted in memory only",
        _record_attempts_in_memory, codes("attempts", "dead"), 60, 200,
    ),
    "dead-record-not-done": Planted(
        "work", "a record is put among the dead letters, and comes to be put again",
        _dead_record_not_done, codes("half_step"), 60,
    ),
    "dead-record-not-put": Planted(
        "work", "a record whose attempts are used up is done without a dead letter",
        _dead_record_not_put, codes("lost"), 60,
    ),
    "since-ignored": Planted(
        "work", "a cursor is moved from wherever it stands",
        _since_ignored, codes("since"), 40,
    ),
}  # fmt: skip
