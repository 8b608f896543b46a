"""The planted bugs of streams with keys."""

from __future__ import annotations

import contextlib
from typing import Any

from malamute_py.broker.log.newest import Keys
from malamute_py.broker.streams.conditions import Conditions
from tests.simulation.plants.planted import Planted, codes, replace


def _newest_not_copied(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def before(self: Any, offset: int, copy: int, most: int, bytes_max: int) -> Any:
            found = original(self, offset, copy, most, bytes_max)
            return [one for one in found if one[1] % 5]

        return before

    replace(stack, Keys, "before", make)


def _stale_update(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def revision(self: Any, subject: str) -> int:
            offset, deletion = self.find(subject) or (0, True)
            return 0 if deletion else offset

        return revision

    replace(stack, Keys, "revision", make)


def _copies_unread(stack: contextlib.ExitStack) -> None:
    replace(stack, Keys, "enter_copies", lambda original: lambda self, rows: None)


def _unknown_room(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def check(self: Any, stream: Any, keys: Keys, rows: Any, size: int) -> None:
            if keys.room.segments:
                original(self, stream, keys, rows, size)

        return check

    replace(stack, Conditions, "_check_room", make)


PLANTS: dict[str, Planted] = {
    "newest-not-copied": Planted(
        "keys", "a segment is given up without copies of some newest records",
        _newest_not_copied, codes("key"), 40,
    ),
    "stale-update": Planted(
        "keys", "an update passes whose revision another update of the turn has replaced",
        _stale_update, codes("stale"), 20,
    ),
    "copies-unread": Planted(
        "keys", "a start does not know the newest records that have moved",
        _copies_unread, codes("key"), 40,
    ),
    "unknown-room": Planted(
        "keys", "records are taken before it is known how full the ring is",
        _unknown_room, codes("stuck"), 40,
    ),
}  # fmt: skip
