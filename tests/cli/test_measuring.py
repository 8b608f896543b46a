"""`malamute rtt` and `bench`: what was measured is said, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.cli.bench_report import WINDOWS, page, windows
from malamute_py.cli.failures import INTERRUPTED
from malamute_py.cli.measuring import Measure, percentile
from tests.cli.running import Run, as_user, broker_of

_LEVELS = ["question", "confirm stored", "confirm synced"]


def _is_left(broker: EmbeddedBroker) -> list[str]:
    with broker.connect_sync() as client:
        names = [each.name for each in client.list_streams()]
        names += [each.name for each in client.list_mailboxes()]
        names += [each.name for each in client.list_services()]
    return [each for each in names if each.startswith("malamute-")]


def test_a_percentile_is_a_span_that_occurred() -> None:
    spans = list(range(1, 101))
    assert [percentile(spans, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([7], 0.01) == 7


def test_what_was_not_measured_is_left_out() -> None:
    measure = Measure("reading", count=10)
    assert measure.facts() == {"what": "reading", "count": 10}
    measure.add(2_000_000)
    assert measure.facts()["p50_ms"] == 2.0
    assert "per_second" not in measure.facts()


@pytest.mark.moderate
def test_round_trips_are_measured_by_kind_and_leave_nothing(m: Run, broker: EmbeddedBroker) -> None:
    told = m("rtt", "--count", "3", "--json").ok().json
    assert [(each["what"], each["count"]) for each in told["measured"]] == [
        (what, 3) for what in _LEVELS
    ]
    assert all(0 < each["p50_ms"] <= each["p99_ms"] <= each["max_ms"] for each in told["measured"])
    assert (told["size"], told["not_measured"]) == (128, {})
    assert [row[:2] for row in m("rtt", "-n", "2").ok().rows] == [[each, "2"] for each in _LEVELS]
    assert not _is_left(broker), told.err


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["rtt", "-n", "2"], 1), (["bench", "pub", "-n", "10"], 1),
        (["bench", "sub", "-n", "10"], 1), (["bench", "request", "-n", "10"], 1),
        (["bench", "mail", "-n", "10"], 0),
    ],
)  # fmt: skip
def test_what_may_not_be_removed_is_made_for_a_measurement_only_when_told(
    words: list[str], left: int
) -> None:
    verbs = ("write", "read", "request", "work", "send", "receive", "create")
    grants = {"ann": {verb: ["*"] for verb in verbs}, "root": {"admin": True}}
    with broker_of(grants) as running:
        ann, root = as_user(running, "ann"), as_user(running, "root")

        def there() -> int:
            kinds = ("stream", "service", "mailbox")
            rows = [row for kind in kinds for row in root(kind, "ls").ok().rows]
            return len([row for row in rows if row[0] != "ann"])

        told = ann(*words)
        assert there() == 0
        if not left:
            assert "forbidden" in told.err
            return
        assert (told.code, bool(told.rows)) == ((0, True) if words[0] == "rtt" else (1, False))
        assert "which you may not remove (permission manage_" in told.err
        told = ann(*words, "--leave").ok()
        assert told.rows
        assert "is left, because it may not be removed: forbidden" in told.err
        assert there() == left


@pytest.mark.moderate
def test_a_trip_that_the_broker_refuses_is_named_as_not_measured(
    monkeypatch: pytest.MonkeyPatch, m: Run
) -> None:
    with EmbeddedBroker(tcp=True, streams__streams_max=1) as full, full.connect_sync() as client:
        client.create_stream("only")
        monkeypatch.setenv("MALAMUTE_ENDPOINT", full.tcp_endpoint)
        ended = m("rtt", "--count", "2", "--json").ok()
    assert [each["what"] for each in ended.json["measured"]] == ["question"]
    assert list(ended.json["not_measured"]) == _LEVELS[1:]
    assert "confirm synced was not measured: " in ended.err


def test_a_run_is_cut_into_windows_with_the_percentiles_of_what_ended_in_each() -> None:
    measure = Measure("confirm", count=4)
    for ended_ns, span_ns in ((1_000, 1_000), (60_000, 500), (59_500, 2_000_000 // 1_000)):
        measure.spans_ns.append(span_ns)
        measure.ended_ns.append(ended_ns)
    cut = windows(measure)
    assert len(cut) == WINDOWS
    assert [(place, each.ended) for place, each in enumerate(cut) if each.ended] == [
        (0, 1), (WINDOWS - 1, 2),
    ]  # fmt: skip
    assert cut[-1].spans_ms == {"p50": 0.0005, "p90": 0.002, "p99": 0.002, "max": 0.002}


@pytest.mark.moderate
def test_a_report_is_one_page_with_plots_and_no_script(m: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    m("bench", "mail", "--count", "40", "--tasks", "4", "--memory", "--report", str(file)).ok()
    page = file.read_text()
    assert page.count("<svg") == page.count("</svg>") == 6
    assert "confirm of one message" in page
    assert "delivery" in page
    assert "nan" not in page
    assert "<script" not in page
    assert "http" not in page
    told = m("bench", "pub", "--count", "1", "--report", str(tmp_path / "no" / "x.html"))
    assert told.code == 1


def test_a_measurement_without_single_spans_has_figures_and_no_plot() -> None:
    measure = Measure("reading", count=10, size=100)
    measure.seconds = 2.0
    assert "<svg" not in page("bench <sub>", {"bench": "sub"}, [measure])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("pub", "--batch", "10"), {"confirm of a batch": 4}),
        (("pub", "--batch", "1", "--memory"), {"confirm of one record": 33}),
        (("sub", "--batch", "10"), {"confirm of a batch": 4, "delivery": None}),
        (("sub", "--readers", "2", "--history"), {"reading": 0}),
        (("request",), {"request until its reply": 33}),
        (("mail", "--confirm", "stored"), {"confirm of one message": 33, "delivery": 33}),
    ],
)
def test_a_bench_says_what_it_measured_and_leaves_nothing(
    m: Run, broker: EmbeddedBroker, arguments: tuple[str, ...], expected: dict[str, int | None]
) -> None:
    told = m("bench", *arguments, "--count", "33", "--size", "16", "--json").ok().json
    assert (told["bench"], told["count"], told["size"]) == (arguments[0], 33, 16)
    measured: list[dict[str, Any]] = told["measured"]
    assert [each["what"] for each in measured] == list(expected)
    for each in measured:
        # A delivery is timed once a batch, and the broker may deliver several as one.
        timed = expected[each["what"]]
        assert "timed" in each if timed is None else each.get("timed", 0) == timed
        assert each["count"] == 33 * told.get("readers", 1)
        assert each["per_second"] > 0
    assert not _is_left(broker), told.err


@pytest.mark.moderate
def test_a_bench_whose_link_cannot_be_had_ends_with_3(
    m: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALAMUTE_ENDPOINT", "tcp://127.0.0.1:9")
    ended = m("--connect-timeout", "200ms", "bench", "pub")
    assert ended.code == 3
    assert "no broker answers" in ended.err


@pytest.mark.moderate
def test_a_bench_that_fails_leaves_nothing_either(m: Run, broker: EmbeddedBroker) -> None:
    ended = m("bench", "pub", "--batch", "1", "--count", "2", "--size", "100MiB")
    assert ended.code != 0
    assert ended.err.startswith("error: ")
    assert not _is_left(broker)


@pytest.mark.moderate
@pytest.mark.parametrize(
    "command", [("bench", "pub"), ("bench", "sub"), ("bench", "request"), ("rtt",)]
)
def test_ctrl_c_leaves_the_figures_until_then_and_nothing_else(
    m: Run, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    add = Measure.add
    told_once: list[bool] = []

    def interrupted(measure: Measure, span_ns: int) -> None:
        add(measure, span_ns)
        if len(measure.spans_ns) >= 20 and not told_once:
            told_once.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Measure, "add", interrupted)
    told = m(*command, "--count", "100000000", "--json")
    assert told.code == INTERRUPTED
    assert "the figures are of what was done until then" in told.err
    assert told.json["interrupted"] is True
    found = told.json["measured"]
    assert max(each["timed"] for each in found) >= 20
    for each in found:
        assert each["timed"] <= each["count"] < 1_000_000
        assert each.get("per_second", 1) > 0
    assert not _is_left(broker), told.err
