"""The table of targets, and how a recording is held against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.curves import CURVES
from perf.suite.results import Limit, Run
from perf.suite.targets import OURS, TARGETS, Target, bar_of, judge, judge_all, reasons, unmeasured
from perf.suite.works import WORKS
from tests.perf.recorded import recording, runs

AT_140 = Target("t", "a target", "one-to-one/140", "records_s", 1.0, ("nats-core-*",))
LATENCY = Target("l", "latency", "latency/1000", "p50_us", 1.0, ("*-python",), less_is_better=True)


def test_every_target_is_about_a_work_and_has_one_thing_to_be_compared_with() -> None:
    works = {work.name for work in WORKS}
    for target in TARGETS:
        assert target.work in works, target.name
        assert target.other_work in {*works, ""}
        given = [target.against, target.value, target.limit, target.other_work]
        assert sum(bool(one) for one in given) == 1, target.name


def test_targets_have_names_of_their_own() -> None:
    assert len({target.name for target in TARGETS}) == len(TARGETS)


def test_ours_is_compared_with_the_best_column_that_was_measured() -> None:
    bar = bar_of(AT_140, recording())
    assert bar is not None
    assert bar.value == 4e6


def test_less_is_better_takes_the_least_of_the_others_and_never_our_own() -> None:
    results = recording()
    bar = bar_of(LATENCY, results)
    assert bar is not None
    assert bar.value == 100.0
    assert judge(LATENCY, results).reached is True


@pytest.mark.parametrize(("ratio", "reached"), [(1.2, True), (1.25, True), (1.3, False)])
def test_a_target_is_reached_by_the_medians(ratio: float, reached: bool) -> None:
    target = Target("t", "", "one-to-one/140", "records_s", ratio, ("nats-core-*",))
    assert judge(target, recording()).reached is reached


def test_a_target_without_a_figure_to_compare_with_is_not_measured() -> None:
    failed = Target("t", "", "one-to-one/140", "records_s", 5.0, ("nats-jetstream-native",))
    outcome = judge(failed, recording())
    assert outcome.reached is None
    assert outcome.ours == 5e6


def test_a_target_without_a_figure_of_ours_is_not_measured() -> None:
    results = recording()
    results.measured = [one for one in results.measured if one.column != OURS]
    assert {outcome.reached for outcome in judge_all(results)} == {None}


def test_what_is_not_measured_is_told_with_the_side_that_is_missing() -> None:
    results = recording()
    target = Target("t", "", "one-to-one/140", "records_s", 5.0, ("nats-jetstream-native",))
    assert "publish ended with status 1" in unmeasured(target, results)
    elsewhere = Target("t", "", "one-to-one/12", "records_s", 5.0, ("nats-core-native",))
    assert unmeasured(elsewhere, results) == "ours has no figure: one-to-one/12 was not run"
    nobody = Target("t", "", "one-to-one/140", "records_s", 5.0, ("redis-stream-native",))
    assert "redis" in unmeasured(nobody, results).partition("left out")[2]
    limit = Target("t", "", "one-to-one/140", "mb_s", limit="disk-reused")
    assert "disk-reused" in unmeasured(limit, results)


def test_a_share_of_a_limit_is_enough_where_it_is_less_than_the_best_column() -> None:
    results = recording()
    results.limits.append(Limit("disk-reused", "write and sync", "MB/s", [100.0]))
    target = Target(
        "t", "", "one-to-one/140", "mb_s", 1.0, ("nats-core-*",), or_limit="disk-reused",
        or_share=0.8,
    )  # fmt: skip
    bar = bar_of(target, results)
    assert bar is not None
    assert bar.value == 80.0
    results.limits[-1].runs = [1e6]
    bar = bar_of(target, results)
    assert bar is not None
    assert bar.value == pytest.approx(560.0)


def test_a_run_that_failed_has_no_part_in_a_median() -> None:
    results = recording()
    measured = results.of("one-to-one/140", OURS)
    assert measured is not None
    measured.runs = [*runs("records_s", 3e6, 1e6, 2e6), Run(10, error="it hung")]
    assert measured.median("records_s") == 2e6
    assert measured.error == "it hung"


def test_reasons_are_read_by_the_name_of_the_target(tmp_path: Path) -> None:
    path = tmp_path / "reasons.toml"
    assert reasons(path) == {}
    path.write_text('core-12 = """\nThe encoder.\n"""\n')
    assert reasons(path) == {"core-12": "The encoder."}


def test_every_reason_that_is_kept_names_a_target_or_a_curve() -> None:
    curves = {f"curve-{name}" for name in CURVES}
    assert set(reasons()) <= {target.name for target in TARGETS} | curves


def test_a_reason_stands_by_itself_for_its_neighbour_may_not_be_shown() -> None:
    for name, text in reasons().items():
        assert not text.startswith(("As at", "As above", "As against")), name
