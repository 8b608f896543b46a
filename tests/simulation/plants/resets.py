"""The planted bugs of resets, of streams that are made again, and of settings that are replaced."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import msgspec

from malamute_py.broker.cursors import cursors
from malamute_py.broker.cursors.cursors import Cursors
from malamute_py.broker.groups import administration
from malamute_py.broker.groups.groups import Groups
from malamute_py.broker.limits import BrokerSettings
from malamute_py.broker.links.links import Links
from malamute_py.broker.streams import start_positions
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.changelog import applying, settings
from malamute_py.changelog.ranges import with_done
from malamute_py.changelog.records import GroupDone, GroupSet, StreamRemoved
from tests.simulation.plants.planted import Planted, codes, replace

# --- groups that are made to stand elsewhere -------------------------------------------------


def _set_with(stack: contextlib.ExitStack, kept: str) -> None:
    """Have a group that is set again keep something of what it was."""
    original = applying._EFFECTS[GroupSet]

    def effect(tables: Any, queues: Any, change: Any) -> None:
        known = queues.groups.get((change.stream, change.name))
        original(tables, queues, change)
        if known is not None and change.why == "reset":
            setattr(queues.groups[change.stream, change.name], kept, getattr(known, kept))

    stack.enter_context(patch.dict(applying._EFFECTS, {GroupSet: effect}))


def _reset_keeps_attempts(stack: contextlib.ExitStack) -> None:
    _set_with(stack, "tries")


def _reset_keeps_done(stack: contextlib.ExitStack) -> None:
    _set_with(stack, "done")


def _reset_untold(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def set_aside(self: Any, group: Any) -> None:
            with patch.object(Links, "say", lambda *_: None):
                original(self, group)

        return set_aside

    replace(stack, Groups, "_end_members", make)


def _who_waits_forgotten(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def set_aside(self: Any, group: Any) -> None:
            self._groups.coming.pop((group.stream.number, group.name), None)
            original(self, group)

        return set_aside

    replace(stack, Groups, "_end_members", make)


def _done_beyond_the_end(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def clamp(self: Any, stream: Any, row: Any) -> Any:
            done = row.done
            changes = original(self, stream, row)
            if changes and done:
                kept = [part for part in done if part[1] > row.next]
                changes.append(GroupDone(row.stream, row.name, kept or done[-1:]))
                row.next, row.done = with_done(row.next, [], kept)
            return changes

        return clamp

    replace(stack, Groups, "_clamp", make)


# --- streams that are made again -------------------------------------------------------------


def _reader_of_any_generation(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def by_offset(
            stream: Any, tail: int, offset: int, epoch: int = 0, uuid: bytes = b""
        ) -> Any:
            return original(stream, tail, offset, epoch)

        return by_offset

    replace(stack, start_positions, "by_offset", make)


def _cursor_of_any_generation(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def prepare_move(self: Any, link: Any, command: Any, frame: Any = None) -> Any:
            return original(self, link, msgspec.structs.replace(command, uuid=b""), frame)

        return prepare_move

    replace(stack, Cursors, "prepare_move", make)


def _generation_forgotten(stack: contextlib.ExitStack) -> None:
    original = applying._EFFECTS[StreamRemoved]

    def effect(tables: Any, queues: Any, change: Any) -> None:
        original(tables, queues, change)
        tables.generations.clear()

    stack.enter_context(patch.dict(applying._EFFECTS, {StreamRemoved: effect}))


def _members_stay(stack: contextlib.ExitStack) -> None:
    replace(stack, Groups, "stream_removed", lambda original: lambda self, stream: None)


# --- settings that are replaced --------------------------------------------------------------


def _replace_merges(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def queue_settings(
            kind: Any, values: Any, bytes_max: int, over: Any, defaults: Any = None
        ) -> Any:
            return original(kind, values, bytes_max, over)

        return queue_settings

    for module in (cursors, administration, settings):
        replace(stack, module, "queue_settings", make)


def _replace_by_the_tables(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def edit(self: Any, *arguments: Any, **named: Any) -> None:
            with patch.object(BrokerSettings, "default_of", lambda *_: {}):
                original(self, *arguments, **named)

        return edit

    replace(stack, Catalogue, "edit", make)


PLANTS: dict[str, Planted] = {
    "reset-keeps-attempts": Planted(
        "resets", "a group that is reset goes on to count the attempts of before",
        _reset_keeps_attempts, codes("attempts", "lost"), 20,
    ),
    "reset-keeps-done": Planted(
        "resets", "what was done ahead of a reset group's new position does not come again",
        _reset_keeps_done, codes("lost", "start"), 20,
    ),
    "reset-untold": Planted(
        "resets", "the members of a group that is reset are not told",
        _reset_untold, codes("untold"), 10,
    ),
    "who-waits-forgotten": Planted(
        "resets", "a reset forgets the members that wait for their group to be durable",
        _who_waits_forgotten, codes("stuck"), 40,
    ),
    "done-beyond-the-end": Planted(
        "resets", "a group keeps what was done of records that a power loss took back",
        _done_beyond_the_end, codes("done_before", "lost", "start"), 60,
    ),
    "reader-of-any-generation": Planted(
        "resets", "a reader of a removed stream goes on in the one that was made again",
        _reader_of_any_generation, codes("rewound"), 20,
    ),
    "cursor-of-any-generation": Planted(
        "resets", "a cursor is moved by a position of a stream that was removed",
        _cursor_of_any_generation, codes("generation"), 20,
    ),
    "generation-forgotten": Planted(
        "resets", "a stream that is made again is of the first generation",
        _generation_forgotten, codes("generation"), 10,
    ),
    "members-stay": Planted(
        "resets", "the groups of a stream that is removed go on",
        _members_stay, codes("untold"), 10,
    ),
    "replace-merges": Planted(
        "resets", "an edit that replaces all settings leaves what it does not name",
        _replace_merges, codes("settings"), 10,
    ),
    "replace-by-the-tables": Planted(
        "resets", "an edit that replaces all settings does not know the configured defaults",
        _replace_by_the_tables, codes("settings"), 20,
    ),
}  # fmt: skip
