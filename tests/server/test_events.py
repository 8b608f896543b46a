"""Events and their table agree: it has each event that is told, with its levels, and no other."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import malamute_py
from malamute_py.events import EVENTS

SOURCES = Path(malamute_py.__file__).parent
TOLD_BY = {"event", "_event", "_report", "RingEvent"}
"""Calls whose first argument is an event's name."""
ORDER = ("debug", "info", "warning", "error", "critical")
LEVELS = set(ORDER)
COUNTED_BY = {"counting", "_counting", "Counting", "_count"}
"""Calls among whose arguments are names of counters."""


@cache
def told_in(package: str) -> list[ast.Call | ast.Subscript]:
    """Return calls that may tell an event or count, and subscripts of counters.

    To parse all sources takes a second.
    """
    return [
        node
        for path in sorted((SOURCES / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Call) and last_name(node.func) in TOLD_BY | LEVELS | COUNTED_BY)
        or (isinstance(node, ast.Subscript) and last_name(node.value).endswith("counters"))
    ]


def calls(*packages: str) -> Iterator[ast.Call]:
    for package in packages:
        for node in told_in(package):
            if isinstance(node, ast.Call) and node.args:
                yield node


def subscripts(package: str) -> Iterator[ast.Subscript]:
    return (node for node in told_in(package) if isinstance(node, ast.Subscript))


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name; "" for other texts."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def words(node: ast.AST) -> Iterator[str]:
    """Return texts that an expression may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from words(node.body)
        yield from words(node.orelse)


def counters() -> set[str]:
    return {word for node in subscripts("broker") for word in words(node.slice)} | {
        word
        for node in calls("broker")
        if last_name(node.func).lstrip("_").lower() == "counting"
        for part in ast.walk(node)
        for word in words(part)
    }


def levels_of(call: ast.Call) -> set[str]:
    """Return the levels that a call names; none: the table or a variable has the level."""
    last = last_name(call.func)
    if last in LEVELS:
        return {last}
    if last == "event" and len(call.args) == 1:
        return {"info"}
    return {word for argument in call.args[1:2] for word in words(argument)} & LEVELS


def told() -> dict[str, set[str]]:
    """Return the levels of each event that is told, as far as the calls name them."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in calls("broker", "server", "journal"):
        last = last_name(node.func)
        place = 1 if last == "RingEvent" and len(node.args) > 2 else 0
        if last in TOLD_BY or (last in LEVELS and "log" in ast.unparse(node.func)):
            for word in words(node.args[place]):
                found[word] |= levels_of(node)
    return found


@pytest.mark.moderate
def test_the_table_has_every_event_that_is_told_and_no_other() -> None:
    assert {event.name for event in EVENTS} == told().keys()


def test_an_event_has_one_row_with_levels_in_their_order() -> None:
    names = [event.name for event in EVENTS]
    assert len(set(names)) == len(names)
    for event in EVENTS:
        levels = event.levels.split(" ")
        assert levels == [level for level in ORDER if level in levels], event


@pytest.mark.moderate
def test_a_line_has_a_level_of_its_row() -> None:
    found = told()
    for event in EVENTS:
        assert found[event.name] <= set(event.levels.split(" ")), event


@pytest.mark.moderate
def test_an_event_of_the_journal_or_the_guard_has_one_level_which_the_table_gives() -> None:
    given = {
        word
        for node in calls("server", "journal")
        for last in [last_name(node.func)]
        if last == "RingEvent" or (last == "_report" and len(node.args) == 2)
        for word in words(node.args[1 if last == "RingEvent" and len(node.args) > 2 else 0])
    }
    assert {"segment_retired", "connection_cut"} <= given
    assert not [event for event in EVENTS if event.name in given and " " in event.levels]
