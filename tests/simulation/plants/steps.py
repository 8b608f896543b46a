"""The planted bugs of atomic steps, their confirms and their keys."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

from malamute_py.broker import atomic
from malamute_py.broker.log import steps
from malamute_py.broker.log.confirms import SYNCED
from malamute_py.broker.log.steps import Steps
from malamute_py.changelog.shares import Shares
from malamute_py.changelog.tables import Queues
from tests.simulation.machine import Machine
from tests.simulation.plants.planted import Planted, codes, replace


def _content_not_compared(stack: contextlib.ExitStack) -> None:
    replace(stack, atomic, "differ", lambda original: lambda one, other: False)


def _digest_not_kept(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def remember(self: Any, sender: str, key: bytes, row: Any) -> None:
            row.digest = 0
            original(self, sender, key, row)

        return remember

    replace(stack, Queues, "remember", make)


def _keys_forgotten(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def known(self: Any, key: Any, waiter: Any) -> Any:
            return key in self._under_way and original(self, key, waiter)

        return known

    replace(stack, Steps, "known", make)


def _ack_confirmed_at_once(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def take(self: Any, parts: Any, waiter: Any = None, *rest: Any, **named: Any) -> None:
            if waiter is not None and not any(part.content is not None for part in parts):
                waiter.size = 0
                self._confirms.confirm(waiter, SYNCED)
                waiter = None
            original(self, parts, waiter, *rest, **named)

        return take

    replace(stack, Steps, "take", make)


def _synced_when_appended(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def confirm_stored(self: Any, step: Any, later: Any) -> None:
            waiting: list[Any] = []
            original(self, step, waiting)
            for waiter in waiting:
                self._confirms.confirm(waiter, 3)

        return confirm_stored

    replace(stack, Steps, "_confirm_stored", make)


def _step_in_two_bundles(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def take(self: Any, parts: Any, *rest: Any, **named: Any) -> None:
            if len(parts) > 1 and named.get("reserved"):
                original(self, parts[:1], reserved=True)
                parts = parts[1:]
            original(self, parts, *rest, **named)

        return take

    replace(stack, steps.Steps, "take", make)
    stack.enter_context(patch.object(steps, "BUNDLE_STEPS", 1))
    # Otherwise one write would hide that they are two.
    replace(
        stack, Machine, "_neighbours", lambda original: lambda self, bundles: [[b] for b in bundles]
    )


def _newest_key_dropped(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def swap_in(self: Any, owner: str, entry: Any) -> Any:
            self.add(owner, entry)
            loser, _ = self.next_out()
            newest = next(reversed(self._owners[loser]))
            self.drop(loser, newest)
            return newest

        return swap_in

    replace(stack, Shares, "swap_in", make)


PLANTS: dict[str, Planted] = {
    "key-with-another-body": Planted(
        "work", "a key that comes again with another body is taken for a duplicate",
        _content_not_compared, codes("wrong_confirm", "wrong_duplicate"), 30, 10,
    ),
    "digest-not-kept": Planted(
        "work", "the digest of a key's content is not kept beside its number",
        _digest_not_kept, codes("wrong_confirm", "wrong_duplicate"), 30, 10,
    ),
    "keys-forgotten": Planted(
        "work", "a key that was taken is taken again",
        _keys_forgotten, codes("twice"), 40,
    ),
    "ack-before-append": Planted(
        "work", "an acknowledgement is confirmed before it is in the log",
        _ack_confirmed_at_once, codes("wrong_confirm", "early"), 20,
    ),
    "step-confirmed-before-sync": Planted(
        "work", "a step is confirmed as synced when it is appended",
        _synced_when_appended, codes("early"), 20,
    ),
    "step-in-two-bundles": Planted(
        "work", "the first part of a step has a bundle of its own",
        _step_in_two_bundles, codes("half_step"), 20,
    ),
    "newest-key-dropped": Planted(
        "work", "a window of keys that is full drops the newest instead of the oldest",
        _newest_key_dropped, codes("twice", "tables"), 20,
    ),
}  # fmt: skip
