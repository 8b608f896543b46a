"""Timers: in the order of their times, none early."""

from __future__ import annotations

from functools import partial

from malamute_py.broker.structures.timers import Timers


def test_calls_are_made_in_the_order_of_their_times_and_none_early() -> None:
    timers, made = Timers(), list[str]()
    for due_ms, name in ((30, "third"), (10, "first"), (10, "second"), (40, "fourth")):
        timers.set(due_ms, partial(made.append, name))
    timers.run(9)
    assert (timers.due_ms, made) == (10, [])
    timers.run(30)
    assert (timers.due_ms, made) == (40, ["first", "second", "third"])


def test_a_call_may_set_another_that_is_due_already_and_comes_in_the_next_run() -> None:
    timers, made = Timers(), list[str]()
    timers.set(10, lambda: timers.set(5, partial(made.append, "again")))
    timers.set(10, partial(made.append, "first"))
    timers.run(10)
    assert (timers.due_ms, made) == (5, ["first"])
    timers.run(10)
    assert (timers.due_ms, made) == (None, ["first", "again"])
