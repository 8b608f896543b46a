"""A few power losses on real files; and a broker that syncs nothing is found."""

from __future__ import annotations

import logging
import random
import re
import subprocess
from pathlib import Path

import pytest

from tests.powerloss.powerloss import Image, reason_to_skip, run

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


def test_what_is_logged_after_a_process_was_killed_amid_a_record_is_taken_back_too(
    tmp_path: Path,
) -> None:
    image = Image(tmp_path, random.Random(1))
    file = image.root / "file"

    def write(text: str, *, sync: bool) -> None:
        code = (
            "import os, sys\n"
            "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
            "os.pwrite(fd, sys.argv[2].encode() * 4096, 0)\n"
            "if sys.argv[3]: os.fsync(fd); os.fsync(os.open(os.path.dirname(sys.argv[1]), 0))\n"
        )
        done = subprocess.run([*image.program("-c", code), str(file), text, "1" if sync else ""],
                              check=False)  # fmt: skip
        assert done.returncode == 0

    write("a", sync=True)
    with (tmp_path / "changes.log").open("ab") as log:
        log.write(b"w" + b"\xff" * 20)
    write("b", sync=False)
    image.lose()
    assert image.undone_sectors > 0
    assert b"a" in file.read_bytes()


@pytest.mark.parametrize("bug", ["sync_skipped", "directory_unsynced"])
async def test_a_broker_that_does_not_sync_is_found(bug: str, tmp_path: Path) -> None:
    program = ("-m", "tests.planted", bug)
    for seed in range(12):
        found, _ = await run(tmp_path / f"broker-{seed}", seed, 4, program, patience_s=6.0)
        # That something came late shows nothing.
        if any(re.search(LOST, fault) for fault in found.faults):
            return
    pytest.fail(f"{bug} was not found")
