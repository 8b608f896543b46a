"""Reasons that make a broker not live or not ready, and those that are only warnings."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_py.health.facts import Facts
from malamute_py.health.readiness import live, ready

GOOD: dict[str, Any] = {
    "gauges": {"links": 1},
    "connections": 2,
    "bounds": {"links": 10, "connections": 10},
    "rings": {"main": {"failed": ""}, "own": {"failed": ""}},
    "disk": {"main": {"unprepared": ""}},
    "disk_free_bytes": 1 << 40,
    "refusing": {},
    "checkpoint": {"lost": False, "failing": False, "pressed": False},
    "damage": [],
}


def refusal(ms_ago: int) -> dict[str, Any]:
    return {"code": "disk_full", "ms_ago": ms_ago}


def test_a_broker_with_nothing_amiss_is_ready_without_a_word() -> None:
    verdict = ready(Facts(GOOD))
    assert verdict.holds
    assert verdict.reasons == verdict.warnings == []


@pytest.mark.parametrize(
    ("amiss", "check", "words"),
    [
        ({"gauges": {"links": 10}}, "links", "10 links"),
        ({"connections": 10}, "links", "10 connections"),
        ({"checkpoint": {"failing": True}}, "checkpoint", "failed"),
        ({"checkpoint": {"pressed": True}}, "checkpoint", "wait for the tables"),
        ({"rings": {"own": {"failed": "a sync failed"}}}, "ring", "ring own failed"),
        (
            {"rings": {"stream-1": {"failed": "disk_full", "stream": "ledger"}}},
            "ring",
            "ring ledger (own) failed",
        ),
        ({"refusing": {"main": refusal(29_999)}}, "ring", "ring main refuses appends: disk_full"),
        ({"disk": {"main": {"unprepared": "disk_full"}}}, "disk", "no new segment: disk_full"),
        ({"disk_free_bytes": 1 << 20}, "disk", "1048576 bytes are free"),
    ],
)
def test_what_keeps_clients_from_their_work_is_named(
    amiss: dict[str, Any], check: str, words: str
) -> None:
    verdict = ready(Facts({**GOOD, **amiss}))
    assert not verdict.holds
    ((named, reason),) = verdict.reasons
    assert named == check
    assert words in reason


@pytest.mark.parametrize(
    ("amiss", "words"),
    [
        ({"refusing": {"own": refusal(0)}}, "ring own refuses"),
        ({"checkpoint": {"lost": True, "reason": "queues.db is gone"}}, "queues.db is gone"),
        ({"damage": ["a", "b"]}, "2 things"),
    ],
)
def test_what_concerns_a_part_is_a_warning(amiss: dict[str, Any], words: str) -> None:
    verdict = ready(Facts({**GOOD, **amiss}))
    assert verdict.holds
    ((_, reason),) = verdict.warnings
    assert words in reason


def test_a_refusal_that_lies_back_keeps_nobody_away_who_would_try_again() -> None:
    assert ready(Facts({**GOOD, "refusing": {"main": refusal(30_000)}})).holds


def test_a_broker_that_does_not_answer_is_not_ready_and_after_a_while_does_not_live() -> None:
    silent = Facts({}, "no link", silent_s=29.9)
    assert ready(silent).reasons == [("broker", "no link")]
    assert live(silent).holds
    verdict = live(Facts({}, "no link", silent_s=30))
    assert not verdict.holds
    assert verdict.reasons == [("broker", "silent for 30 s: no link")]
