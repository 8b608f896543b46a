"""The scaling curves: what a slope is, how points are kept, and that each curve is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from malamute_protocol.encode import encode
from perf.curves import (
    CURVES,
    Curve,
    Point,
    brokers,
    clients,
    headers,
    journal_size,
    streams,
    subscriptions,
)
from perf.curves.bare import BareBroker
from perf.curves.curve import Gathering, figure, slope, table


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(x, y, (y,)) for x, y in pairs]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (lambda x: 7.0, 0.0),
        (lambda x: 3 * x, 1.0),
        (lambda x: 0.5 * x * x, 2.0),
        (lambda x: 100 / math.sqrt(x), -0.5),
    ],
)
def test_a_slope_is_the_exponent_of_the_power_law(of: object, expected: float) -> None:
    assert callable(of)
    found = slope(points(*((x, of(x)) for x in (1, 10, 300, 5_000))))
    assert found == pytest.approx(expected, abs=1e-9)


def test_points_that_no_logarithm_has_do_not_count() -> None:
    assert slope(points((0, 5), (1, 0), (10, 2), (1_000, 2))) == pytest.approx(0)
    assert slope(points((10, 2), (10, 3))) is None, "one x is no line"
    assert slope(points((1, 0), (10, 3))) is None
    assert slope([]) is None


def test_a_point_is_the_median_of_its_runs_and_keeps_them() -> None:
    gathered = Gathering()
    assert gathered.add("cost", "us", 10, [3.0, 1.0, 8.0]) == 3.0
    gathered.add("memory", "MiB", 10, [5.0])
    gathered.add("cost", "us", 1_000, [30.0, 10.0, 80.0])
    gathered.remark("cost", "of one thread")
    cost, memory = gathered.lines()
    assert cost.points[0] == Point(10, 3.0, (3.0, 1.0, 8.0))
    assert cost.slope == pytest.approx(0.5)
    assert cost.tail == pytest.approx(0.5)
    assert cost.note == "of one thread"
    assert (memory.slope, memory.tail) == (None, None)


def test_a_table_has_each_line_and_each_point() -> None:
    gathered = Gathering()
    for x in (1, 1_000):
        gathered.add("cost", "us", x, [0.1234])
    gathered.add("memory", "MiB", 1_000, [12_345.0])
    text = table(Curve("c", "A title", "things", gathered.lines(), "flat", "a note"))
    assert text.splitlines() == [
        "A title (right: flat)",
        "things           1   1,000  slope  last two",
        "cost, us     0.123   0.123  +0.00     +0.00",
        "memory, MiB         12,345                 ",
        "a note",
    ]
    assert [figure(value) for value in (0, 0.00123, 1.5, 123.4)] == ["0", "0.00123", "1.50", "123"]


def test_a_curve_is_plain_data() -> None:
    gathered = Gathering()
    gathered.add("cost", "us", 1, [2.0])
    curve = Curve("c", "t", "things", gathered.lines(), "flat")
    assert msgspec.json.decode(msgspec.json.encode(curve), type=Curve) == curve


def test_each_plan_has_its_points_in_order_and_begins_with_those_of_the_quick_mode() -> None:
    assert list(CURVES) == [
        "subscriptions", "clients", "streams", "headers", "groups", "backlog", "mailboxes",
        "journal",
    ]  # fmt: skip
    for name, plan in CURVES.items():
        assert plan.name == name
        assert list(plan.points) == sorted(set(plan.points)), name
        assert set(plan.quick) <= set(plan.points), name
        assert len(plan.quick) >= 2, "a slope needs two"
        assert max(plan.quick) <= sorted(plan.points)[3]


@pytest.mark.parametrize("kind", ["topic", "fields"])
def test_in_the_core_each_new_header_is_selected_by_one_of_all_subscriptions(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "KNOWN_BATCHES", 20)
    monkeypatch.setattr(subscriptions, "NEW_HEADERS", 60)
    found = subscriptions.in_core(30, 1, kind)
    assert len(found.known_us) == len(found.new_us) == 1
    assert min(*found.known_us, *found.new_us, found.subscribe_us) > 0


def test_the_bare_broker_has_done_what_it_was_told_when_it_returns() -> None:
    bare = BareBroker(heartbeat_ms=1_000)
    bare.hello(1)
    for n in range(3):
        bare.publish(1, "s", [_content(n)])
    assert bare.core.counters["records_in"] == 3
    assert bare.core.gauges["unsettled_bytes"] == 0, "synced at once"
    bare.pass_time(60_000)
    assert bare.core.gauges["links"] == 0, "nobody answered its PINGs"


def _content(number: int) -> bytes:
    return encode([b"%d" % number], subject="s")


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.alone
@pytest.mark.parametrize("name", CURVES)
def test_each_curve_is_measured_against_a_broker(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With points and counts so small that nothing is learned but that it works."""
    for module in (brokers, clients, streams, journal_size, subscriptions):
        monkeypatch.setattr(module, "BULK", 4_000, raising=False)
    monkeypatch.setattr(brokers, "LONE", 20)
    monkeypatch.setattr(streams, "LONE", 20)
    monkeypatch.setattr(streams, "SPREAD", 200)
    monkeypatch.setattr(headers, "RECORDS", 2_000)
    monkeypatch.setattr(headers, "PORTION", 500)
    monkeypatch.setattr(journal_size, "PORTION", 2_000)
    monkeypatch.setattr(journal_size, "UNSYNCED", 500)
    monkeypatch.setattr(clients, "REST_S", 0.1)
    monkeypatch.setattr(clients, "SETTLING_S", 0.1)
    said: list[str] = []
    few: Sequence[int] = (1, 3)
    curve = CURVES[name].measure(few, 1, said.append)
    assert curve.name == name
    assert len(said) >= len(few)
    assert all(point.y >= 0 for line in curve.lines for point in line.points)
    assert any(line.slope is not None for line in curve.lines)
    assert curve.expected in table(curve)
