"""A short run over a broker that is killed, frozen and cut off; and over brokers with bugs."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from malamute_py.promises.history import read_events
from malamute_py.promises.run import JUMPING, Run, RunFindings

pytestmark = [pytest.mark.system, pytest.mark.slow]
SEEDS = (7, 8, 9, 10)


async def run(
    directory: Path,
    bug: str = "",
    *,
    disturbances: int = 6,
    patience_s: float = 60.0,
    seed: int = 7,
) -> RunFindings:
    logging.getLogger("malamute").setLevel(logging.CRITICAL)
    one = Run(
        journal=directory / "journal", seed=seed, disturbances=disturbances, patience_s=patience_s
    )
    program = (sys.executable, "-m", "tests.planted", bug) if bug else JUMPING
    return await one.embedded(directory / "broker", program)


async def test_a_broker_keeps_its_promises_while_it_is_disturbed(tmp_path: Path) -> None:
    found = await run(tmp_path)
    assert found.faults == []
    assert sum(found.disturbances.values()) == 6
    kinds = ("record", "mail", "request", "step", "call")
    assert min(found.counts[f"{kind}_confirmed"] for kind in kinds) > 6
    assert sum(1 for _ in read_events(tmp_path / "journal")) > 100


@pytest.mark.parametrize(
    ("bug", "says", "patience_s"),
    [
        ("write_skipped", "confirmed and not in the log|does not start again", 5.0),
        ("record_doubled", "more than once", 5.0),
        ("confirmed_early", "records confirmed and not in the log", 5.0),
        # Its work comes again after its lease.
        ("completion_unlogged", "work .* came again after it was confirmed to be done", 15.0),
    ],
)
async def test_a_planted_bug_is_found(
    bug: str, says: str, patience_s: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    places = {seed: tmp_path_factory.mktemp(bug) for seed in SEEDS}
    told: list[str] = []
    for seed in SEEDS:
        # Each disturbance shows what it meets: a fault by its own name may take another run.
        found = await run(places[seed], bug, disturbances=8, patience_s=patience_s, seed=seed)
        told += found.faults
        if any(re.search(says, fault) for fault in found.faults):
            return
    pytest.fail(f"{bug} was not found by its name: {told}")
