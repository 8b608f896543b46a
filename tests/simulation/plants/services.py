"""The planted bugs of services: requests, hand-outs and attempts."""

from __future__ import annotations

import contextlib
from typing import Any

from malamute_py.broker.services import hand_outs, requests, returns
from malamute_py.broker.services.dispatch import Dispatch
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.services.recovery import Recovery
from malamute_py.broker.services.returns import Returns
from malamute_py.changelog.effects import requests as effects
from malamute_py.changelog.records import WorkReceived
from tests.simulation.plants.planted import Planted, codes, replace


def _work_taken_not_logged(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        return lambda service, rows, holder, at_ms, lease_ms: WorkReceived(service, rows)

    replace(stack, hand_outs, "WorkTaken", make)
    replace(stack, requests, "WorkTaken", make)


def _return_not_logged(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def returned(service: Any, rows: Any, why: str, *more: Any) -> Any:
            logged = why != "lease"
            return original(service, rows, why, *more) if logged else WorkReceived(service, rows)

        return returned

    replace(stack, returns, "WorkReturned", make)


def _attempts_not_counted(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def count(row: Any, mask: int) -> None:
            row.attempts = row.attempts or {1: mask}

        return count

    replace(stack, effects, "_count", make)


def _delay_forgotten(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def recovered(self: Any) -> None:
            for row in self._shard.queues.requests.values():
                row.delayed = {}
            original(self)

        return recovered

    replace(stack, Recovery, "recovered", make)


def _priority_ignored(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def queue_of(self: Any, subject: str, priority: int = 0, *, waits: bool = True) -> Any:
            return original(self, subject, 0, waits=waits)

        return queue_of

    replace(stack, Dispatch, "queue_of", make)


def _cancelled_waits_on(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def leave(queues: Any, base: int, rows: bytes) -> Any:
            row = queues.requests.get(base)
            waiting = 0 if row is None else row.waiting
            left = original(queues, base, rows)
            if left is not None and not left[0].left:
                left[0].waiting = waiting
            return left

        return leave

    replace(stack, effects, "_leave", make)


def _fence_forgets(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def give_back_all(self: Any, in_flight: Any, why: str) -> None:
            if why != "fenced":
                original(self, in_flight, why)

        return give_back_all

    replace(stack, Returns, "give_back_all", make)


def _one_attempt_less(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def most(self: Any, service: Any) -> int:
            return int(original(self, service)) - 1

        return most

    replace(stack, Ends, "attempts_max", make)


PLANTS: dict[str, Planted] = {
    "work-taken-not-logged": Planted(
        "work", "work is handed out without a record of it",
        _work_taken_not_logged, codes("two_hands"), 20,
    ),
    "lease-not-logged": Planted(
        "work", "the end of a lease is no record",
        _return_not_logged, codes("two_hands", "attempts", "stuck"), 60,
    ),
    "attempts-not-counted": Planted(
        "work", "a second attempt counts as the first",
        _attempts_not_counted, codes("attempts", "tables"), 40,
    ),
    "delay-forgotten": Planted(
        "work", "a start forgets until when requests are delayed",
        _delay_forgotten, codes("expired", "tables"), 60,
    ),
    "priority-ignored": Planted(
        "work", "requests with a priority wait among the others",
        _priority_ignored, codes("order"), 60,
    ),
    "cancelled-waits-on": Planted(
        "work", "a request that was cancelled is handed out",
        _cancelled_waits_on, codes("ended_twice", "after_end"), 60, 14,
    ),
    "fence-forgets": Planted(
        "fences", "what a fenced link had in hand comes back by its lease only",
        _fence_forgets, codes("late"), 20,
    ),
    "one-attempt-less": Planted(
        "work", "a request dies with one attempt left",
        _one_attempt_less, codes("dead"), 40, 22,
    ),
}  # fmt: skip
