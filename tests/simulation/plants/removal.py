"""The planted bugs of trims, purges and retention."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import msgspec

from malamute_py.broker.batches import bounds
from malamute_py.broker.log.purges import NO_PURGES, Purges
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.streams.removal import Removal
from malamute_py.broker.subscriptions import cohorts, own_turns
from tests.simulation.plants.planted import Planted, codes, replace


def _trim_comes_back(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def init(self: Any, row: Any, *more: Any) -> None:
            original(self, msgspec.structs.replace(row, trimmed=0), *more)
            self.row = row

        return init

    replace(stack, Stream, "__init__", make)


def _trim_takes_one_more(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def trim(self: Any, stream: Any, before: int, *more: Any) -> None:
            original(self, stream, before + 1, *more)

        return trim

    replace(stack, Removal, "_trim", make)


def _purge_comes_back(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def init(self: Any, *more: Any) -> None:
            original(self, *more)
            self.purges = NO_PURGES

        return init

    replace(stack, Stream, "__init__", make)


def _purge_takes_later_ones(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def init(self: Any, marks: Any) -> None:
            original(self, [(pattern, before + 5) for pattern, before in marks])

        return init

    replace(stack, Purges, "__init__", make)


def _aged_delivered(stack: contextlib.ExitStack) -> None:
    def first_within_bounds(stream: Any, answer: Any, now_ms: int) -> int:
        return int(stream.first)

    for module in (bounds, cohorts, own_turns):
        stack.enter_context(patch.object(module, "first_within_bounds", first_within_bounds))


PLANTS: dict[str, Planted] = {
    "trim-comes-back": Planted(
        "removal", "a start knows only the trims that the rings have noted",
        _trim_comes_back, codes("removed", "start"), 60,
    ),
    "trim-takes-one-too-many": Planted(
        "removal", "a trim takes the record at its offset, too",
        _trim_takes_one_more, codes("too_many", "hole_called_gap", "gap_called_hole"), 20,
    ),
    "purge-comes-back": Planted(
        "removal", "a start forgets what was purged by subject",
        _purge_comes_back, codes("removed"), 40,
    ),
    "purge-takes-later-ones": Planted(
        "removal", "a purge takes records of its subjects that were published after it, too",
        _purge_takes_later_ones, codes("gap_called_hole"), 40,
    ),
    "aged-delivered": Planted(
        "removal", "records are as young when they are handed out as when they were asked for",
        _aged_delivered, codes("aged"), 60, 147,
    ),
}  # fmt: skip
