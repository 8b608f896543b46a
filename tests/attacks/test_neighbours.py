"""An attack costs the neighbours of its address time and no connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.attacks import ATTACKS
from tests.attacks.neighbours import measure


@pytest.mark.slow
def test_neighbours_of_an_attacker_stay_connected_and_are_let_in(tmp_path: Path) -> None:
    waits = measure(ATTACKS["partial-messages"], 2, tmp_path)
    assert not waits.cut
    assert waits.newcomers_s
    assert len(waits.connected_s) == len(waits.newcomers_s)
