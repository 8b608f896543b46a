"""Values of the pages: each asks the broker over the person's own link.

Owns one function for each page. The rules: a page is a bounded part of a list; what is slow or
stuck comes first; a page changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from malamute_protocol.errors import BrokerRefused, MalamuteError
from malamute_py.client.aio.client import Client
from malamute_py.client.facts import LinkFacts
from malamute_py.http import health
from malamute_py.http.console import troubles
from malamute_py.http.console.records import NEWEST, RECORDS_MAX, SUBJECTS, Look, look
from malamute_py.http.console.sessions import Session
from malamute_py.http.console.troubles import Trouble
from malamute_py.http.console.words import whole_number
from malamute_py.http.source import LISTED_MAX

ROWS_MAX: Final = 50
"""Rows of one page of a list."""
_LOOK_RECORDS: Final = 20

Query = Mapping[str, str]
Values = dict[str, Any]
Page = Callable[[Session, Query], Awaitable[Values]]
T = TypeVar("T")


async def overview(session: Session, query: Query) -> Values:
    """Things that are slow or stuck, the rates, the rings, and how much of each bound is used."""
    everything = await session.source.everything()
    broker = everything.facts.broker
    found = troubles.of_all(everything, await _links(session.client))
    return {
        "facts": broker,
        "reason": everything.facts.reason,
        "ready": health.ready(everything.facts),
        "troubles": found[: troubles.SHOWN_MAX],
        "more_troubles": max(0, len(found) - troubles.SHOWN_MAX),
        "rings": rings(broker),
        "bounds": _bounds(broker),
    }


async def streams(session: Session, query: Query) -> Values:
    """The list of streams."""
    found = await session.client.list_streams(query.get("prefix", ""), limit=LISTED_MAX + 1)
    return _listed(query, ((each, []) for each in found), len(found))


async def stream(session: Session, query: Query) -> Values:
    """One stream: facts, settings, its ring, and a look at its records."""
    name = query.get("name", "")
    facts = await session.client.stream_info(name)
    broker = (await session.source.facts()).broker
    now_ms = int(broker.get("now_ms", 0))
    shown = Look()
    fault = ""
    place = query.get("place", "")
    limit = whole_number(query.get("count", "") or str(_LOOK_RECORDS), 1, RECORDS_MAX, "How many")
    if place and not query.get("poll"):
        where = query.get("at", "") if place == "at" else place
        try:
            shown = await look(session.client, name, query.get("pattern", ""), where, limit, now_ms)
        except MalamuteError as error:
            fault = str(error)
    return {
        "facts": facts,
        "ring": next(
            (each for each in rings(broker) if each["name"] == facts.more.get("ring")), None
        ),
        "look": shown,
        "fault": fault,
        "looked": bool(place),
        "places": {NEWEST: "the newest", SUBJECTS: "the latest of each subject", "at": "from"},
        "limit": limit,
    }


# --- parts of pages ---------------------------------------------------------------------------


async def _links(client: Client) -> list[LinkFacts]:
    """The links of clients; none where the person may not see them."""
    try:
        return await client.list_links(LISTED_MAX)
    except BrokerRefused:
        return []


def rings(broker: Mapping[str, Any]) -> list[Values]:
    """Each ring with what is used of it, the fullest that refuses first."""
    refusing, core = broker.get("refusing", {}), broker.get("rings", {})
    found = []
    for name, facts in broker.get("disk", {}).items():
        used = facts["end_lsn"] - facts["start_lsn"]
        capacity = facts.get("ring_bytes", 0)
        found.append(
            {
                "name": name, "used": used, "capacity": capacity, "full": facts.get("full", ""),
                "share": min(1.0, used / capacity) if capacity else 0.0,
                "written": facts["end_lsn"], "unsynced": facts["end_lsn"] - facts["synced_lsn"],
                "refusing": name in refusing, "failed": core.get(name, {}).get("failed", ""),
            }
        )  # fmt: skip
    return sorted(found, key=lambda each: (not each["failed"], not each["refusing"], each["name"]))


def _bounds(broker: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Name, use and bound of what has a bound, the nearest to its bound first."""
    gauges, bounds = broker.get("gauges", {}), broker.get("bounds", {})
    used = {**gauges, "rings": len(broker.get("disk", {}))}
    used |= {name: broker[name] for name in ("connections", "unread_bytes") if name in broker}
    found = [(name, used[name], most) for name, most in bounds.items() if name in used and most]
    return sorted(found, key=lambda each: (-each[1] / each[2], each[0]))


def _listed(
    query: Query, entries: Iterable[tuple[T, list[Trouble]]], there: int, **more: Any
) -> Values:
    """One page of a list: what is in trouble comes first."""
    rows = list(entries)[:LISTED_MAX]
    rows.sort(key=lambda each: -max((trouble.weight for trouble in each[1]), default=0.0))
    pages = max(1, -(-len(rows) // ROWS_MAX))
    number = min(pages, whole_number(query.get("page", "") or "1", 1, LISTED_MAX, "The page"))
    return {
        "rows": rows[(number - 1) * ROWS_MAX : number * ROWS_MAX],
        "listed": len(rows),
        "unlisted": there > LISTED_MAX,
        "page": number,
        "pages": pages,
        **more,
    }
