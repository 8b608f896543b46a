"""A few power losses on real files; and a broker that syncs nothing is found."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tests.powerloss.powerloss import reason_to_skip, run

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip()),
]
LOST = "confirmed and not in the log|does not start again|came again after it was confirmed"
"""Expression that a fault matches which is a loss."""


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("malamute").setLevel(logging.CRITICAL)


async def test_what_was_confirmed_as_synced_survives_power_losses(tmp_path: Path) -> None:
    found, image = await run(tmp_path / "broker", 1, 3)
    assert found.faults == []
    assert found.disturbances == {"kill": 3}
    assert image.undone_sectors + image.undone_names > 0, "there was something to take back"
    assert min(found.counts[f"{kind}_confirmed"] for kind in ("record", "mail", "step")) > 3


@pytest.mark.parametrize("bug", ["sync_skipped", "directory_unsynced"])
async def test_a_broker_that_does_not_sync_is_found(bug: str, tmp_path: Path) -> None:
    program = ("-m", "tests.planted", bug)
    for seed in range(12):
        found, _ = await run(tmp_path / f"broker-{seed}", seed, 4, program, patience_s=6.0)
        # That something came late shows nothing.
        if any(re.search(LOST, fault) for fault in found.faults):
            return
    pytest.fail(f"{bug} was not found")
