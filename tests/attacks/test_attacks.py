"""Each attack in its short form: bounded by rounds, judged by what is counted and not by time."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from tests.attacks import run as runner
from tests.attacks.attack import MIB, Attack
from tests.attacks.attacks import ATTACKS
from tests.attacks.run import Found, run


def planted(bug: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.planted", bug)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_no_broker_and_takes_nothing_from_the_canary(
    name: str, tmp_path: Path
) -> None:
    attack = ATTACKS[name]
    found = run(attack, tmp_path, rounds=attack.rounds, seconds=attack.seconds, quiet_s=0.2)
    print(runner.row(found))
    assert found.faults == []
    assert found.sent > 0 or name == "only-processor"
    assert found.canary["published"] == found.canary["received"] > 0


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bug", "said"),
    [
        ("bad-properties", "codes_unchecked", "_error"),
        ("reconnect-storm", "sockets_kept", "sockets were"),
        ("reconnect-storm", "turns_without_pause", "never sleeps"),
        ("only-processor", "delivery_dropped", "records"),
    ],
)
def test_what_is_planted_is_found(name: str, bug: str, said: str, tmp_path: Path) -> None:
    known = ATTACKS["hostile-contents" if bug == "codes_unchecked" else name]
    attack = msgspec.structs.replace(known, back_s=2.0, patience_s=5.0)
    found = run(
        attack, tmp_path, rounds=10 * attack.rounds, seconds=attack.seconds, quiet_s=0.2,
        program=planted(bug),
    )  # fmt: skip
    assert any(said in fault or "the broker ended" in fault for fault in found.faults)


def found(quiet_ms: float, attacked_ms: float, grown: int = 0) -> Found:
    times = {"count": 9, "p50": 1.0, "max": 99.0}
    phases = {"before": {**times, "p99": quiet_ms}, "attack": {**times, "p99": attacked_ms}}
    before = {"resident_bytes": 100 * MIB}
    return Found(
        name="x", canary={"confirms_ms": phases}, before=before, faults=[],
        peak={"resident_bytes": 100 * MIB + grown},
    )  # fmt: skip


def test_ten_times_the_quiet_p99_is_the_bound() -> None:
    at, over, shown = found(5.0, 50.0), found(5.0, 50.6), found(5.0, 500.0)
    runner._judge_latency(at, 10.0)
    runner._judge_latency(over, 10.0)
    runner._judge_latency(shown, 0.0)
    assert (at.held, over.held, shown.held) == (True, False, True)
    assert "10.1 times" in over.slow


def test_a_turn_that_the_broker_calls_long_is_one() -> None:
    at, over, shown = (found(5.0, 5.0) for _ in range(3))
    at.longest_turn_ms, over.longest_turn_ms, shown.longest_turn_ms = 100.0, 100.1, 100.1
    runner._judge_latency(at, 10.0)
    runner._judge_latency(over, 10.0)
    runner._judge_latency(shown, 0.0)
    assert (at.held, over.held, shown.held) == (True, False, True)


def test_a_canary_without_a_confirm_is_a_fault() -> None:
    silent = found(5.0, 5.0)
    del silent.canary["confirms_ms"]["attack"]
    runner._judge_latency(silent, 10.0)
    assert not silent.held


def test_memory_has_a_bound_that_names_what_an_attack_makes() -> None:
    attack = Attack("x", lambda aim: None, 1, keeps=64 * MIB)
    at, over = (found(1.0, 1.0, runner.PEAK_BYTES + grown * MIB) for grown in (64, 65))
    runner._judge_memory(attack, at)
    runner._judge_memory(attack, over)
    assert (at.held, over.held) == (True, False)


def test_each_attack_says_in_a_sentence_what_it_does() -> None:
    for attack in ATTACKS.values():
        assert attack.what.endswith("."), attack.name
        assert attack.rounds > 0
