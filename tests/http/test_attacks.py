"""All attacks on the HTTP side at once, for a short time: its bounds hold beside a canary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.http.attacks import ATTACKS, run


@pytest.mark.slow
@pytest.mark.system
def test_the_bounds_hold_under_all_attacks_at_once(tmp_path: Path) -> None:
    outcome = run(tmp_path, 3)
    assert not outcome.faults, outcome
    assert outcome.acts.keys() == {act.__name__ for act in ATTACKS}, "each was tried"
