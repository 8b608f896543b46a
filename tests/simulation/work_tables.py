"""The tables of the code under test, taken apart row by row.

Owns the form in which they are compared with the model's state, and how a difference is told.
Source: docs/design.md (Queues and the checkpoint).
"""

from __future__ import annotations

from typing import Any

from malamute_py.changelog.tables import Queues
from tests.simulation.model import Violation
from tests.simulation.work_state import Letter, rows_in


def state_of(queues: Queues) -> dict[str, Any]:
    """Return the tables of the code under test, taken apart row by row."""
    mail: dict[tuple[int, int], Letter] = {}
    for (box, base), row in queues.messages.items():
        rare = row.rare
        for at in rows_in(row.left):
            attempts, not_before_ms = row.attempts, row.not_before_ms
            expires_at_ms = row.expires_at_ms
            why: tuple[str, ...] = ()
            if rare is not None:
                if rare.expiries:
                    expires_at_ms = rare.expiries[at]
                for time_ms, some in rare.again:
                    if int.from_bytes(some, "little") >> at & 1:
                        not_before_ms = time_ms
                for times, some in rare.tries:
                    if int.from_bytes(some, "little") >> at & 1:
                        attempts += times
                why = tuple(
                    word for some, word in rare.why if int.from_bytes(some, "little") >> at & 1
                )[-1:]
            mail[box, base + at] = Letter(attempts, not_before_ms, expires_at_ms, row.priority, why)
    jobs: dict[int, tuple[int, str, bool, int, int]] = {}
    for number, request in queues.requests.items():
        for at in rows_in(request.left):
            holds = [hold for hold in request.holds if hold.rows >> at & 1]
            if len(holds) > 1 or bool(holds) == bool(request.waiting >> at & 1):
                raise Violation("tables", f"request {number + at}: {holds}, {request.waiting:b}")
            counts = [times for times, some in request.attempts.items() if some >> at & 1]
            delayed = [time for time, some in request.delayed.items() if some >> at & 1]
            jobs[number + at] = (
                request.put.service,
                holds[0].holder if holds else "",
                bool(holds and holds[0].received >> at & 1),
                counts[0] if counts else 0,
                delayed[0] if delayed else 0,
            )
    groups = {
        place: (row.next, frozenset(n for first, end in row.done for n in range(first, end)))
        for place, row in queues.groups.items()
    }
    tries = {
        place: {
            offset: (times, why)
            for first, end, times, why in row.tries for offset in range(first, end)
        }
        for place, row in queues.groups.items()
    }  # fmt: skip
    keys: Any = queues.keys
    return {
        "boxes": {number: row.name for number, row in queues.mailboxes.items()},
        "services": {number: row.name for number, row in queues.services.items()},
        "mail": mail,
        "jobs": jobs,
        "cursors": {place: row.next for place, row in queues.cursors.items()},
        "groups": groups,
        "holders": {place: row.holder for place, row in queues.groups.items()},
        "tries": tries,
        "keys": {place: row.base for place, row in dict(keys).items()},
    }


def difference(mine: Any, others: Any) -> str:
    """Return the first few things in which two tables differ."""
    if isinstance(mine, dict):
        mine, others = sorted(mine.items()), sorted(others.items())
    if not isinstance(mine, list):
        return f"{mine!r}, the broker has {others!r}"
    lacks = [one for one in mine if one not in others][:2]
    more = [one for one in others if one not in mine][:2]
    return f"{len(mine)} and {len(others)} rows; should be {lacks}, the broker has {more}"
