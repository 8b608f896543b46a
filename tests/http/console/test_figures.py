"""Figures of pages that need many things, or a broker that is started anew: with what it tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from malamute_py.client.facts import UserFacts
from malamute_py.health.facts import Facts
from malamute_py.http.console import pages
from malamute_py.http.console.events import rates
from malamute_py.http.source import LISTED_MAX


async def test_a_list_of_users_that_fit_is_whole_however_many_others_there_are() -> None:
    async def list_users(verb: str, name: str) -> list[UserFacts]:
        return [UserFacts(user=f"user-{number:04}") for number in range(LISTED_MAX + 500)]

    session: Any = SimpleNamespace(client=SimpleNamespace(list_users=list_users))
    fitting = await pages.users(session, {"prefix": "user-0007"})
    assert (fitting["listed"], fitting["unlisted"]) == (1, False)
    every = await pages.users(session, {})
    assert (every["listed"], every["unlisted"]) == (LISTED_MAX, True)


async def test_no_rates_are_told_over_a_start_of_the_broker() -> None:
    told = [
        {"now_ms": 1_000, "uptime_ms": 9_000, "epoch": 1, "counters": {"records_in": 10}},
        {"now_ms": 2_000, "uptime_ms": 500, "epoch": 2, "counters": {"records_in": 1_000}},
        {"now_ms": 3_000, "uptime_ms": 1_500, "epoch": 2, "counters": {"records_in": 1_007}},
    ]

    async def facts() -> Facts:
        return Facts(told.pop(0))

    source: Any = SimpleNamespace(facts=facts)
    event = await anext(rates(source, every_s=0.0))
    assert not told
    assert msgspec.json.decode(event.partition(b"data: ")[2])["published"] == 7.0
