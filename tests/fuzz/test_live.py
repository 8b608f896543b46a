"""The live fuzzer at a broker's process: a bounded run, and planted bugs are found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fuzz.inside import ERRORS
from tests.fuzz.live import run
from tests.fuzz.messages import read_steps

pytestmark = [pytest.mark.system, pytest.mark.slow]


def planted(bug: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.planted", bug)


@pytest.mark.alone
def test_20_000_hostile_messages_end_no_broker_and_cost_the_canary_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, messages=20_000, seed=1)
    assert found["faults"] == []
    assert found["messages"] >= 20_000
    assert found["answers"] > 2_000, "the links were open, and what was sent was answered"
    assert found["canary"]["published"] == found["canary"]["received"] > 0


def erred(faults: list[str]) -> bool:
    """Whether the broker ended, or reports an error of its own."""
    signs = ("the broker ended", *ERRORS)
    return any(sign in fault for fault in faults for sign in signs)


def test_an_error_of_the_broker_is_found(tmp_path: Path) -> None:
    program = planted("codes_unchecked")
    # What the peers send follows from the answers, so that no seed alone is sure to find it.
    assert any(
        erred(run(tmp_path / str(seed), messages=6_000, seed=seed, program=program)["faults"])
        for seed in range(5)
    )


def test_a_record_is_sent_again_as_it_was(tmp_path: Path) -> None:
    record = tmp_path / "record"
    found = run(tmp_path / "first", messages=600, record=record)
    again = run(tmp_path / "again", messages=0, steps=read_steps(record))
    assert again["messages"] == found["messages"]
    assert found["faults"] == again["faults"] == []


def test_a_lost_delivery_is_found(tmp_path: Path) -> None:
    found = run(tmp_path, messages=4_000, program=planted("delivery_dropped"), patience_s=5)
    assert any("records" in fault or "did not come" in fault for fault in found["faults"])


def test_connections_that_stay_are_found(tmp_path: Path) -> None:
    found = run(tmp_path, messages=1_500, program=planted("sockets_kept"), patience_s=5)
    assert any(fault.startswith("sockets were") for fault in found["faults"])
