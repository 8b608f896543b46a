"""Alert rules, dashboard and scrape configuration in deploy/, against the metrics that there are.

What Prometheus itself says of them needs the Debian package `prometheus`, which `make test` brings
by tests/need; where it cannot be had, those tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from malamute_py import EmbeddedBroker
from malamute_py.http.table import METRICS
from tests.house.checkout import ROOT
from tests.http.running import at, until

DEPLOY = ROOT / "deploy"
KNOWN = {metric.name: metric for metric in METRICS}
ABSENT = r"malamute_(namespace|refusals)"
"""Metrics of what the broker of a test lacks: namespaces, and commands that were refused."""
OF_EVERY_SERIES = {"instance", "job", "severity"}
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed: tests/need prometheus",
)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def targets() -> Iterator[tuple[str, str, str]]:
    """(panel, expression, legend) of the dashboard."""
    board = json.loads((DEPLOY / "grafana.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


EXPRESSIONS = [(rule["alert"], rule["expr"]) for rule in rules()] + [
    (title, expression) for title, expression, _ in targets()
]


def metrics_in(expression: str) -> set[str]:
    """Names of the table, of what an expression names."""
    found: set[str] = set()
    for name in re.findall(r"malamute_\w+", expression):
        histogram = re.sub(r"_(bucket|sum|count)$", "", name)
        is_histogram = histogram in KNOWN and KNOWN[histogram].kind == "histogram"
        found.add(histogram if is_histogram else name)
    return found


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_every_metric_that_is_asked_for_is_there(where: str, expression: str) -> None:
    named = metrics_in(expression)
    assert named or expression.startswith("up"), where
    assert named <= KNOWN.keys()
    for name in named:
        if KNOWN[name].kind != "gauge":
            assert re.search(rf"(rate|increase)\({name}", expression), f"{name} only grows"


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_a_selector_names_labels_that_the_metric_has(where: str, expression: str) -> None:
    for name, selector in re.findall(r"(malamute_\w+)\{([^}]*)\}", expression):
        (known,) = metrics_in(name)
        labels = set(re.findall(r"(\w+)\s*=~?", selector))
        assert labels <= {*KNOWN[known].labels, *OF_EVERY_SERIES}, where


def test_words_name_labels_that_the_series_have() -> None:
    texts = [(rule["expr"], json.dumps(rule["annotations"])) for rule in rules()]
    texts += [(expression, legend) for _, expression, legend in targets()]
    for expression, text in texts:
        labels = set(re.findall(r"\$labels\.(\w+)|\{\{(\w+)\}\}", text))
        named = {label for pair in labels for label in pair if label}
        there = {label for name in metrics_in(expression) for label in KNOWN[name].labels}
        assert named <= there | OF_EVERY_SERIES, text


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["alert"].startswith("Malamute")
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_panels_have_numbers_of_their_own_and_lie_beside_each_other() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


# --- what fires ----------------------------------------------------------------------------------

FIRES: dict[str, dict[str, str]] = {
    "MalamuteDown": {"malamute_up": "0x100"},
    "MalamuteRingFailed": {'malamute_ring_failed{ring="main"}': "1x100"},
    "MalamuteRingRefuses": {'malamute_ring_refusing{ring="main"}': "1x100"},
    "MalamuteRingNearlyFull": {
        'malamute_ring_used_bytes{ring="own",full="refuse"}': "91x100",
        'malamute_ring_capacity_bytes{ring="own",full="refuse"}': "100x100",
    },
    "MalamuteNoSegment": {'malamute_ring_unprepared{ring="main"}': "1x100"},
    "MalamuteDiskNearlyFull": {"malamute_disk_free_bytes": "1000000x100"},
    "MalamuteCheckpointFails": {"malamute_checkpoint_failing": "1x100"},
    "MalamuteCheckpointLags": {"malamute_checkpoint_ring_use_ratio": "0.8x100"},
    "MalamuteQueuesLost": {"malamute_checkpoint_lost": "1x100"},
    "MalamuteDamageFound": {"malamute_damage_found": "2x100"},
    "MalamuteInternalError": {"malamute_internal_errors_total": "0+1x100"},
    "MalamuteGaps": {"malamute_gaps_total": "0+1x100"},
    "MalamuteStreamOverwritten": {"malamute_records_overwritten_total": "0+1x100"},
    "MalamuteDeadLetters": {"malamute_dead_letters_total": "0+1x100"},
    "MalamuteServiceStarves": {
        'malamute_service_waiting_requests{service="tax"}': "3x100",
        'malamute_service_credit_requests{service="tax"}': "0x100",
    },
    "MalamuteGroupStuck": {
        'malamute_group_lag_records{stream="s",group="g"}': "5x100",
        'malamute_group_unmoved_seconds{stream="s",group="g"}': "0+60x100",
    },
    "MalamuteCursorLags": {
        'malamute_cursor_lag_records{stream="s",cursor="c"}': "5x100",
        'malamute_cursor_unmoved_seconds{stream="s",cursor="c"}': "4000x100",
    },
    "MalamuteMailWaits": {
        'malamute_mailbox_class_oldest_message_age_seconds{class="crew"}': "90000x100"
    },
    "MalamuteLinksBlocked": {"malamute_blocked_links": "1x100"},
    "MalamuteLimitNear": {
        'malamute_limit_used{resource="links"}': "9x100",
        'malamute_limit{resource="links"}': "10x100",
    },
    "MalamuteNamespaceNearQuota": {
        'malamute_namespace_limit_used{namespace="acme",resource="streams"}': "19x100",
        'malamute_namespace_limit{namespace="acme",resource="streams"}': "20x100",
    },
    "MalamuteConfirmsSlow": {
        'malamute_confirm_duration_seconds_bucket{le="0.5"}': "0x100",
        'malamute_confirm_duration_seconds_bucket{le="1.0"}': "0+60x100",
        'malamute_confirm_duration_seconds_bucket{le="+Inf"}': "0+60x100",
    },
    "MalamuteLongTurns": {"malamute_long_turns_total": "0+1x100"},
    "MalamuteDenials": {"malamute_denied_connections_total": "0+120x100"},
}
"""Series, a value a minute, that each alert is for."""


def test_it_is_shown_of_every_alert_that_it_fires() -> None:
    assert FIRES.keys() == {rule["alert"] for rule in rules()}
    for series in FIRES.values():
        assert metrics_in(" ".join(series)) <= KNOWN.keys()


def promtool(*words: str) -> None:
    done = subprocess.run(
        ["promtool", *words], check=False, capture_output=True, text=True, cwd=DEPLOY
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.moderate
@needs_prometheus
def test_prometheus_takes_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")


@pytest.mark.slow
@needs_prometheus
def test_every_alert_fires_on_what_it_is_for_and_on_nothing_else(tmp_path: Path) -> None:
    tests = [
        {
            "interval": "1m",
            "input_series": [
                {"series": series, "values": values} for series, values in input_series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "1h",
                    "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}],
                }
            ],
        }
        for alert, input_series in FIRES.items()
    ]
    file = tmp_path / "fires.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yml")], "tests": tests}))
    promtool("test", "rules", str(file))


# --- a real Prometheus ---------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ask(port: int, path: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url) as answer:
            return json.load(answer)["data"]
    except (urllib.error.URLError, ConnectionError):
        return None


@needs_prometheus
@pytest.mark.slow
@pytest.mark.system
def test_a_real_prometheus_scrapes_a_broker_answers_the_dashboard_and_no_alert_fires(
    tmp_path: Path,
) -> None:
    (tmp_path / "alerts.yml").write_text((DEPLOY / "alerts.yml").read_text())
    with EmbeddedBroker(tmp_path / "data", tcp=True) as broker, broker.connect_sync() as client:
        client.publish("trades", b"1")
        client.send("crew.berlin", b"gate")
        client.edit_service("tax")
        client.cursor("trades", "billing").move(1)
        with client.group("trades", "reports", start="latest") as member:
            member.accepted()
        with at(broker) as http:
            host, port = http.address
            text = (DEPLOY / "prometheus.yml").read_text()
            text = text.replace("127.0.0.1:9798", f"{host}:{port}").replace("15s", "1s")
            config = tmp_path / "prometheus.yml"
            config.write_text(text)
            web = free_port()
            with (tmp_path / "log").open("wb") as log, subprocess.Popen(
                ["prometheus", f"--config.file={config}", f"--web.listen-address=127.0.0.1:{web}",
                 f"--storage.tsdb.path={tmp_path / 'series'}"],
                stdout=log, stderr=log,
            ) as process:  # fmt: skip
                try:
                    _look(web)
                finally:
                    process.terminate()


def _look(web: int) -> None:
    def scraped() -> bool:
        found = ask(web, "query", query='malamute_stream_records{stream="trades"}')
        return bool(found and found["result"] and found["result"][0]["value"][1] == "1")

    until(scraped)

    def evaluated() -> bool:
        found = ask(web, "rules")
        healths = {
            rule["health"] for group in (found or {"groups": []})["groups"]
            for rule in group["rules"]
        }  # fmt: skip
        return healths == {"ok"}

    until(evaluated)
    (target,) = ask(web, "targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert ask(web, "alerts")["alerts"] == []
    _ask_what_the_dashboard_asks(web)
    metadata = ask(web, "metadata")
    known = {metric.name: (metric.kind, metric.help) for metric in METRICS}
    told = {
        name: (facts[0]["type"], facts[0]["help"])
        for name, facts in metadata.items()
        if name.startswith("malamute_")
    }
    assert len(told) > 100
    assert told.items() <= known.items()


def _ask_what_the_dashboard_asks(web: int) -> None:
    """Fail unless Prometheus has a value for each expression, those of absent things excepted."""
    told: dict[str, int] = {}

    def answered() -> bool:
        for panel, expression, _ in targets():
            asked = expression.replace("$instance", ".*").replace("$__rate_interval", "10s")
            found = ask(web, "query", query=asked)
            assert found is not None, f"Prometheus refuses {panel}: {asked}"
            told[expression] = len(found["result"])
        empty = [expression for expression, count in told.items() if not count]
        return all(re.search(ABSENT, expression) for expression in empty)

    until(answered)
