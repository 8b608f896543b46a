"""The table of metrics against what the broker counts, Prometheus' conventions, and the page."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.http import table
from malamute_py.http.table import METRICS, Metric
from tests.server.test_events import calls, counters, last_name, subscripts
from tools.metrics_page import PAGE, page

FAMILIES = re.compile(r"refused_|quota_")
WHOLE = re.compile(r"(?!denied_\w+_total).*_total")


def shell_counters() -> set[str]:
    """Names of counters that the shell writes out in full, but for those of DENIALS."""
    names = [node.slice for node in subscripts("server")]
    names += [node.args[0] for node in calls("server") if last_name(node.func) == "_count"]
    found = {name.value for name in names if isinstance(name, ast.Constant)}
    return {name for name in found if isinstance(name, str) and WHOLE.fullmatch(name)}


@pytest.mark.moderate
def test_every_counter_of_the_core_has_a_metric() -> None:
    assert {name for name in counters() if not FAMILIES.match(name)} == table.COUNTERS.keys()


@pytest.mark.moderate
def test_every_counter_of_the_shell_has_a_metric_or_is_an_event() -> None:
    assert table.SHELL.keys() <= shell_counters()
    assert shell_counters() - table.SHELL.keys() == {"http_ended_total"}


@pytest.mark.moderate
def test_every_gauge_and_fact_has_a_metric(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker, broker.connect_sync() as client:
        client.send("box", b"body")
        more = client.broker_info().more
    assert more["gauges"].keys() == table.GAUGES.keys()
    assert more["checkpoint"].keys() == table.CHECKPOINT.keys()
    assert more["latency"].keys() == table.LATENCIES.keys()
    # An embedded broker leaves collecting garbage to the program.
    assert {name for name in table.FACTS if name not in more} - {"epoch"} == {
        "collector_passes_total", "collector_garbage_total"
    }  # fmt: skip


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_named_as_prometheus_wants_it(metric: Metric) -> None:
    assert re.fullmatch(r"malamute_[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(ms|us|kb|mb|percent|milliseconds)(_|$)", metric.name)
    assert not re.search(r"_(sum|count|bucket)$", metric.name)
    assert metric.help.endswith(".")
    assert metric.help[0].isupper() or metric.help[0].isdigit()
    assert "|" not in metric.help


def test_a_name_is_one_metrics() -> None:
    assert [
        name for name, count in Counter(each.name for each in METRICS).items() if count > 1
    ] == []


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert text == page(text), "make metrics-page"
