"""Seeds: some hundreds in every run of the tests, and seeds that once failed for ever.

`make simulate` searches further. The rule: a failing seed says how to replay it, is mended, and
then frozen under frozen/ with the reason why it is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.seeds import slow
from tests.simulation.__main__ import main
from tests.simulation.clients_run import CUTS
from tests.simulation.run import BIASED, SCENARIOS, run_seed

FROZEN = sorted((Path(__file__).parent / "frozen").glob("*.json"))
CHUNK = 20


def check(scenario: str, seeds: range) -> None:
    for seed in seeds:
        outcome = run_seed(scenario, seed)
        assert not outcome.code, outcome.tell()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 160, CHUNK))
def test_the_ring_keeps_its_promises_under_every_fault(first: int) -> None:
    check("journal", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 240, CHUNK))
def test_the_broker_keeps_its_promises_under_every_fault(first: int) -> None:
    check("broker", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, CHUNK))
def test_what_is_removed_or_grows_old_is_gone_under_every_fault(first: int) -> None:
    check("removal", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, CHUNK))
def test_keys_are_what_their_newest_records_say_under_every_fault(first: int) -> None:
    check("keys", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, CHUNK))
def test_a_transaction_is_whole_or_nothing_under_every_fault(first: int) -> None:
    check("transactions", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, CHUNK))
def test_resets_new_generations_and_replaced_settings_hold_under_every_fault(first: int) -> None:
    check("resets", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", BIASED)
def test_a_biased_scenario_keeps_the_promises_of_the_one_it_is_of(scenario: str) -> None:
    check(scenario, range(CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, CHUNK))
def test_the_client_library_keeps_its_promises_under_every_fault(first: int) -> None:
    check("session", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, CHUNK))
def test_mail_services_groups_and_steps_keep_their_promises_under_every_fault(first: int) -> None:
    check("work", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, CHUNK))
def test_programs_over_the_client_library_get_what_they_were_promised(first: int) -> None:
    check("clients", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CUTS, CHUNK))
def test_a_link_may_be_cut_at_any_message_of_a_story(first: int) -> None:
    check("cuts", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, CHUNK))
def test_programs_with_threads_get_what_they_were_promised(first: int) -> None:
    check("threads", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(CUTS, 2 * CUTS, CHUNK))
def test_a_link_of_a_program_with_threads_may_be_cut_at_any_message(first: int) -> None:
    check("thread-cuts", range(first, first + CHUNK))


@pytest.mark.parametrize("seed", [1001, *slow([1000, 1002, 1003, 1004])])
@pytest.mark.parametrize(
    "scenario", [*(name for name in SCENARIOS if name != "thread-cuts"), *slow(["thread-cuts"])]
)
def test_a_few_seeds_pass(scenario: str, seed: int) -> None:
    check(scenario, range(seed, seed + 1))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_seed_does_the_same(scenario: str) -> None:
    for seed in range(3):
        first, second = run_seed(scenario, seed), run_seed(scenario, seed)
        assert first.trace.digest() == second.trace.digest()
        assert first.trace.count == second.trace.count > 0


@pytest.mark.slow
def test_seeds_in_several_processes_tell_what_they_tell_in_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = []
    for jobs in ("1", "2"):
        asked = ["--scenario", "journal", "--seeds", "0..12", "--plant", "truncates-too-much"]
        assert main([*asked, "--keep-going", "--jobs", jobs]) == 1
        told.append(
            [line for line in capsys.readouterr().out.splitlines() if " a second" not in line]
        )
    assert told[0] == told[1]
    assert any("replay: make simulate SEED=" in line for line in told[0])


def test_different_seeds_do_different_things() -> None:
    digests = {run_seed("journal", seed).trace.digest() for seed in range(5)}
    assert len(digests) == 5


@pytest.mark.slow
@pytest.mark.parametrize("script", FROZEN, ids=lambda path: path.stem)
def test_what_failed_once_is_as_it_was_frozen(script: Path) -> None:
    frozen: dict[str, Any] = json.loads(script.read_text(encoding="utf-8"))
    outcome = run_seed(frozen["scenario"], frozen["seed"], steps=frozen.get("steps", 0))
    assert outcome.code == frozen["expect"], f"{frozen['why']}\n{outcome.tell()}"
