"""Events and deploy/metrics.md agree: the page explains each event, and none besides."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import malamute_py

PAGE = Path(__file__).parents[2] / "deploy" / "metrics.md"
SOURCES = Path(malamute_py.__file__).parent
TOLD_BY = {"event", "_event", "_report", "RingEvent"}
"""Calls whose first argument is an event's name."""
LEVELS = {"debug", "info", "warning", "error", "critical"}


def nodes(*packages: str) -> Iterator[ast.AST]:
    for package in packages:
        for path in sorted((SOURCES / package).rglob("*.py")):
            yield from ast.walk(ast.parse(path.read_text()))


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
    return {
        word
        for node in nodes("broker")
        if isinstance(node, ast.Subscript) and last_name(node.value).endswith("counters")
        for word in words(node.slice)
    } | {
        word
        for node in nodes("broker")
        if isinstance(node, ast.Call) and last_name(node.func).lstrip("_").lower() == "counting"
        for part in ast.walk(node)
        for word in words(part)
    }


def events() -> set[str]:
    found: set[str] = set()
    for node in nodes("broker", "server", "journal"):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        last = last_name(node.func)
        place = 1 if last == "RingEvent" and len(node.args) > 2 else 0
        if last in TOLD_BY or (last in LEVELS and "log" in ast.unparse(node.func)):
            found.update(words(node.args[place]))
    return found


def tables(*heads: str) -> set[str]:
    """Return the first column of the tables with one of these heads."""
    found: set[str] = set()
    head = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("|"):
            head = head or line.split("|")[1].strip()
            name = re.match(r"\| `(\w+)` \|", line)
            if head in heads and name is not None:
                found.add(name[1])
        else:
            head = ""
    return found


def test_every_event_is_explained() -> None:
    assert tables("Event") == events()
