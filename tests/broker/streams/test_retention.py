"""Retention: records that a shared ring takes are counted apart from those that bounds take."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from tests.broker.shell import Shell


def filled(**settings: Any) -> Shell:
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "invoices", settings))
    shell.publish(1, "invoices", [b"x" * 5_000] * 4, tracker=1)
    shell.publish(1, "invoices", [b"x" * 5_000] * 4, tracker=2)
    return shell


def test_records_that_other_streams_overwrite_are_counted() -> None:
    shell = filled()
    shell.broker.trimmed("main", {1: 4})
    assert shell.broker.counters["records_overwritten"] == 4
    assert shell.events_of("stream_overwritten") == []


def test_a_stream_that_loses_its_last_record_to_others_is_an_event() -> None:
    shell = filled()
    shell.broker.trimmed("main", {1: 8})
    shell.run()
    (event,) = shell.events_of("stream_overwritten")
    assert event.level == "warning"
    assert event.facts == {"stream": "invoices", "ring": "main", "offset": 8, "records": 8}


@pytest.mark.parametrize("settings", [{"max_bytes": 300}, {"max_age_ms": 50}])
def test_what_the_bounds_of_the_stream_took_is_not_counted(settings: dict[str, int]) -> None:
    shell = filled(**settings)
    shell.wait(70_000)
    shell.publish(1, "invoices", [b"x" * 5_000], tracker=3)
    shell.wait(70_000)
    assert shell.trims
    assert shell.broker.counters["records_overwritten"] == 0
