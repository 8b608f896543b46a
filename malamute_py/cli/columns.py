"""Columns of lists whose figures are read from attributes, and how a person reads a figure.

Owns the cells of counts, sizes and ages. The rule: a column says by itself where its value comes
from and how it is shown, so that a list names each fact once. Source: output.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from malamute_py.cli.letters import sender_text
from malamute_py.cli.output import Cell, Column
from malamute_py.cli.values import age_text, broker_now_ms, count_text, size_text, time_text

if TYPE_CHECKING:
    from malamute_py.client.facts import GroupFacts, ServiceFacts


def counted(number: int, style: str = "") -> Cell:
    """Return a count with separators. style: of a count other than 0."""
    return Cell(number, count_text(number), style if number else "")


red: Callable[[int], Cell] = partial(counted, style="red")
"""Returns the cell of a count that should be 0."""


def dead(facts: ServiceFacts | GroupFacts) -> Cell:
    """Return how many dead letters a service or group has, and in which mailboxes they lie."""
    text = f"{count_text(facts.dead)} in {letters_of(facts)}"
    return Cell(facts.dead, text, "red" if facts.dead else "")


def letters_of(facts: ServiceFacts | GroupFacts) -> str:
    """Return the names of the mailboxes in which dead letters of a service or group lie."""
    return " and ".join(facts.dead_in) or facts.dead_letters


def sized(count: int) -> Cell:
    """Return a number of bytes with its unit."""
    return Cell(count, size_text(count))


def age(at_ms: int) -> Cell:
    """Return how long ago that was by the broker's clock; 0: it never was."""
    return Cell(at_ms, age_text(broker_now_ms() - at_ms) if at_ms else "-")


def left(until_ms: int) -> Cell:
    """Return how long it is until then by the broker's clock; 0: there is no such time."""
    return Cell(until_ms, age_text(until_ms - broker_now_ms()) if until_ms else "-")


def moment(at_ms: int) -> Cell:
    """Return a time; 0: there is none."""
    return Cell(at_ms, time_text(at_ms))


def sender(name: str) -> Cell:
    """Return the name of a client, cut where it is a session's."""
    return Cell(name, sender_text(name) or "-")


def creator(name: str) -> Cell:
    """Return the name of a client; one without an identity has none."""
    return Cell(name, sender_text(name) if name else "anonymous", "" if name else "dim")


def read(key: str, title: str, shown: Callable[[Any], Cell], **how: Any) -> Column:
    """Return the column of the attribute `key`. how: further fields of Column."""
    return Column(key, title, cell=lambda each: shown(getattr(each, key)), **how)


def figure(
    key: str, title: str, shown: Callable[[int], Cell] = counted, *, spare: bool = False
) -> Column:
    """Return the column of a figure, which is the attribute `key` of an entry."""
    return read(key, title, shown, right=True, spare=spare)
