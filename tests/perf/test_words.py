"""Words between a driver and its parent, in the parts that all Python drivers share."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PREPARED = """
import asyncio
from perf.peers import driver
from perf.peers.checks import Check, take_all
options = driver.Options(role="subscribe", url="", size=16, count=3)
check = Check(options)
check.burst([driver.body(0, number, 16) for number in range(3)])
heard, over = driver.Listen(options), asyncio.Event()
for number in range(3):
    heard.add(driver.stamped(0, number, 16))
over.set()
"""


def said(call: str, words: str) -> list[dict[str, Any]]:
    told = subprocess.run(
        [sys.executable, "-c", f"{PREPARED}\n{call}"],
        input=words, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in told.stdout.splitlines()]


@pytest.mark.moderate
def test_a_driver_is_ready_before_the_word_and_tells_its_result_after_it() -> None:
    for call, result in (
        ("driver.begin('x')", set[str]()),
        ("driver.work_until_told('x')", {"cpu_s"}),
        ("take_all([check], options, 'x')", {"received", "missing", "begun_ns"}),
        ("driver.listen_to_all(heard, over, 'x')", {"received", "p50_us"}),
    ):
        ready, *rest = said(f"asyncio.run({call})", "go\nend\n")
        assert ready == {"ready": True, "client": "x"}, call
        assert [result <= set(each) for each in rest] == ([True] if result else []), call
        assert [each["received"] for each in rest if "received" in each] in ([], [3]), call


@pytest.mark.moderate
def test_a_driver_without_an_event_loop_begins_the_same_way() -> None:
    (ready,) = said("driver.begin_in_thread('x')", "go\n")
    assert ready == {"ready": True, "client": "x"}
