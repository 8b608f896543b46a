"""Members of each work, their order, and the count of records."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from perf.peers.malamute.server import PEER
from perf.peers.peer import ROLES, Column
from perf.suite.recording import FILL_S, Plan
from perf.suite.works import QUICK, RUN_S, WORKS, Work, selected

OTHER = Column(
    peer="other",
    mode="plain",
    client="python",
    label="other",
    persistent=False,
    synced=False,
    roles=frozenset({"publish", "subscribe"}),
    command=("other",),
    rates={140: 10_000},
)


def work(name: str) -> Work:
    return next(work for work in WORKS if work.name == name)


def test_works_have_names_of_their_own_and_ask_for_known_roles() -> None:
    assert len({work.name for work in WORKS}) == len(WORKS)
    for one in WORKS:
        assert one.roles <= ROLES, one.name


def test_sections_are_not_scattered() -> None:
    sections = [one.section for one in WORKS]
    changes = sum(a != b for a, b in pairwise(sections))
    # A section's servers are up while it lasts: coming back to one would start them again.
    assert changes <= len(set(sections)) - 1


def test_the_quick_works_exist() -> None:
    assert {one.name for one in WORKS} >= QUICK


@pytest.mark.parametrize(
    ("patterns", "count"), [(["one-to-one"], 6), (["one-to-one/1*"], 4), (["nothing"], 0)]
)
def test_works_are_selected_by_section_or_glob(patterns: list[str], count: int) -> None:
    assert len(selected(patterns)) == count
    assert selected([]) == list(WORKS)


def test_ours_plays_every_work() -> None:
    for one in WORKS:
        assert any(one.takes(column) for column in PEER.columns()), one.name


def test_a_column_takes_part_in_what_its_driver_can_do() -> None:
    assert work("one-to-one/140").takes(OTHER)
    assert not work("fan-out/100").takes(OTHER)
    assert not work("steps/512").takes(OTHER)


def test_run_one_of_all_columns_comes_before_run_two_of_any() -> None:
    columns = (*PEER.columns(), OTHER)
    plan = Plan((work("one-to-one/140"),), columns, runs=2)
    order = [(run, column.name) for _, run, column in plan.pairs()]
    names = [column.name for column in columns]
    assert order == [(run, name) for run in range(2) for name in names]


def test_counts_follow_from_what_a_column_is_known_to_do() -> None:
    plan = Plan((work("one-to-one/140"),), (OTHER,), runs=1)
    assert plan.count(work("one-to-one/140"), OTHER) == int(10_000 * RUN_S)
    half = Plan((work("one-to-one/140"),), (OTHER,), runs=1, scale=0.5)
    assert half.count(work("one-to-one/140"), OTHER) == int(5_000 * RUN_S)


def test_larger_records_are_expected_to_be_fewer() -> None:
    assert OTHER.rate(11_760) < OTHER.rate(1_120) < OTHER.rate(140) < OTHER.rate(12)
    assert OTHER.rate(140) == 10_000


def test_ours_replays_all_ten_million_and_others_what_can_be_filled_in_a_while() -> None:
    ours = next(column for column in PEER.columns() if column.synced)
    plan = Plan(WORKS, (ours, OTHER), runs=1)
    assert plan.count(work("replay/whole"), ours) == 10_000_000
    assert plan.count(work("replay/whole"), OTHER) == 10_000 * FILL_S


def test_the_time_that_it_will_take_is_told() -> None:
    plan = Plan((work("one-to-one/140"),), (OTHER,), runs=3)
    assert 3 < plan.total_s() < 30


def test_of_a_work_that_is_about_the_server_its_fastest_client_takes_part_alone() -> None:
    slow = msgspec.structs.replace(OTHER, roles=ROLES)
    fast = msgspec.structs.replace(slow, client="native", rates={140: 20_000})
    elsewhere = msgspec.structs.replace(slow, mode="stored")
    plan = Plan(WORKS, (slow, fast, elsewhere), runs=1)
    assert plan.columns_of(work("start/1000000")) == [fast, elsewhere]
    assert plan.columns_of(work("replay/whole")) == [slow, fast, elsewhere]


@pytest.mark.parametrize("name", ["fan-out/100-single", "replay/records"])
def test_peers_take_no_part_in_forms_that_are_ours_alone(name: str) -> None:
    able = msgspec.structs.replace(OTHER, roles=ROLES)
    assert not work(name).takes(able)


def test_half_of_a_rate_is_of_a_work_that_comes_before() -> None:
    names = [one.name for one in WORKS]
    for one in WORKS:
        if one.half_of:
            assert all(names.index(other) < names.index(one.name) for other in one.half_of)


def test_works_that_share_servers_come_together() -> None:
    servers = [one.servers for one in WORKS]
    changes = sum(a != b for a, b in pairwise(servers))
    assert changes == len(set(servers)) - 1
