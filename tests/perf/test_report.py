"""The report of a recording made by hand, as a person reads it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from perf.suite.plots import Drawn, short
from perf.suite.report import make, number, text
from perf.suite.results import Limit, Run, Sitting
from perf.suite.targets import OURS, reasons
from tests.perf.recorded import recording


@pytest.fixture
def words() -> str:
    return text(recording(), Drawn())


def test_the_report_tells_where_when_and_by_what_it_was_made(words: str) -> None:
    for fact in ("`python -m perf`", "`0123456789ab`", "2026-01-01", "ext4", "a processor"):
        assert fact in words


def test_a_recording_that_was_interrupted_says_so() -> None:
    results = recording()
    results.ended = ""
    assert "not complete" in text(results, Drawn())


def test_a_peer_that_was_left_out_is_told_with_its_word(words: str) -> None:
    assert "redis-server is not installed" in words


def test_each_call_that_had_a_part_in_it_is_told_with_its_time() -> None:
    results = recording()
    results.sittings = [
        Sitting("python -m perf", "2026-01-01T00:00:00", ""),
        Sitting("python -m perf --resume", "2026-01-02T00:00:00", "2026-01-02T00:10:00"),
    ]
    words = text(results, Drawn())
    assert "`python -m perf` (2026-01-01T00:00:00 until it was interrupted)" in words
    assert "`python -m perf --resume` (2026-01-02T00:00:00 to 2026-01-02T00:10:00)" in words


def test_a_call_at_a_later_commit_is_told_with_it() -> None:
    results = recording()
    results.sittings = [Sitting("python -m perf", "then", "now", commit="0123456789abcdef")]
    assert "`python -m perf` (then to now, of `0123456789ab`)" in text(results, Drawn())


def test_ours_is_held_against_what_the_machine_can_do() -> None:
    results = recording()
    results.limits.append(Limit("relay-p50", "a relay, p50", "us", [45.0]))
    assert "| a relay, p50 | 45.0 | 50.0% |" in text(results, Drawn())


def test_ours_is_not_called_synced_where_nobody_waits_for_a_sync(words: str) -> None:
    results = recording()
    results.columns[0] = msgspec.structs.replace(results.columns[0], label="malamute, synced")
    latency = text(results, Drawn()).partition("## One-way latency")[2]
    assert "| malamute |" in latency
    assert "malamute, synced" not in latency.partition("\n## ")[0]


def test_targets_stand_at_the_top_reached_or_not(words: str) -> None:
    assert words.index("## Targets") < words.index("## One to one")
    row = next(line for line in words.splitlines() if "which keeps nothing" in line)
    assert "700 MB/s" in row
    assert "| reached |" in row
    row = next(line for line in words.splitlines() if "p99" in line and "Python client" in line)
    assert "**not reached**" in row


def test_columns_are_apart_by_what_a_confirm_promises(words: str) -> None:
    synced = words.index("survives a loss of power")
    nothing = words.index("promises nothing")
    assert synced < words.index("| malamute synced, python | 5.00 M") < nothing
    assert nothing < words.index("| nats core, native | 4.00 M")


def test_runs_that_lie_apart_are_shown_to(words: str) -> None:
    assert "5.00 M (±20%)" in words
    assert "4.00 M |" in words


def test_a_failure_is_told_with_its_reason_and_has_no_figure(words: str) -> None:
    assert "| nats jetstream, native | failed |" in words
    assert "1 of 1 runs: publish ended with status 1: ... no such stream" in words


def test_ours_is_shown_as_a_multiple_of_the_others(words: str) -> None:
    assert "| nats core, native | 1.25 |" in words


def test_a_median_of_fewer_runs_than_were_made_says_so() -> None:
    results = recording()
    ours = results.of("one-to-one/140", OURS)
    assert ours is not None
    ours.runs.append(Run(10, error="it hung"))
    assert "5.00 M (±20%), 3 of 4 runs" in text(results, Drawn())


def test_how_many_records_a_run_had_stands_beside_its_figures() -> None:
    results = recording()
    ours = results.of("latency/1000", OURS)
    assert ours is not None
    ours.runs[0].count = 2_000
    words = text(results, Drawn()).partition("p99, us | records a run |")[2]
    assert "| 300 | 2,000 |" in words


def test_a_cost_that_grew_along_its_curve_is_told_and_memory_is_not() -> None:
    results = recording()
    grown = {"slope": 0.5, "tail": 0.5, "note": "", "points": [
        {"x": 1, "y": 2.0, "runs": [2.0], "note": ""},
        {"x": 1000, "y": 8.0, "runs": [8.0], "note": ""},
    ]}  # fmt: skip
    results.curves[0]["lines"] += [
        {"name": "a start", "unit": "s", **grown},
        {"name": "memory", "unit": "MiB", **grown},
    ]
    words = text(results, Drawn())
    assert "Higher at the last point than at the first: a start (4.0 times). " in words
    assert reasons()["curve-streams"] in words


def test_a_curve_whose_costs_are_flat_needs_no_reason(words: str) -> None:
    assert "Higher at the last point" not in words


def test_what_a_target_rests_on_is_told_above_them(words: str) -> None:
    head = words.partition("## Targets")[2].partition("| target |")[0]
    for fact in ("verification", "confirmed as synced", "defaults", "concurrency", "durable"):
        assert fact in head


def test_curves_are_shown_with_their_slope(words: str) -> None:
    assert "| cost, us | 2.00 at 1 | 2.20 at 1,000 | 0.02 | 0.01 |" in words


@pytest.mark.parametrize(
    ("value", "figure", "shown"),
    [
        (5.034e6, "records_s", "5.03 M"),
        (51_400.0, "records_s", "51 k"),
        (956.4, "records_s", "956"),
        (0.4512, "server_cpu_us", "0.45"),
        (0.0238, "start_s", "0.024"),
        (0.0, "server_cpu_us", "0.00"),
        (12.34, "p50_us", "12.3"),
        (703.4, "mb_s", "703"),
        (None, "mb_s", ""),
    ],
)
def test_figures_have_three_digits(value: float | None, figure: str, shown: str) -> None:
    assert number(value, figure) == shown


def test_bars_have_short_figures() -> None:
    assert [short(value) for value in (17.6e6, 999.0, 1234.0, 0.5)] == [
        "17.6 M", "999", "1.23 k", "0.5",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_plots_are_small_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        make(recording(), folder / "results.json")
    names = sorted(path.name for path in first.glob("*.svg"))
    assert names == ["curve-streams.svg", "latency.svg", "one-to-one.svg"]
    report = (first / "report.md").read_text()
    for name in names:
        assert f"({name})" in report
        assert (first / name).stat().st_size < 100_000
        assert (first / name).read_bytes() == (second / name).read_bytes()
