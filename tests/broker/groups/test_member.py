"""Members: the pace that they have shown, and the lot that it is worth giving them."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from malamute_protocol.commands import JoinGroup
from malamute_py.broker.groups.member import SPREAD_MIN, Member
from malamute_py.broker.links.link import Link


@pytest.fixture
def member() -> Member:
    return Member(Mock(), Link(1, "", 0), JoinGroup(1, "st", "g", ["all"], "shared"), 0, 0)


def test_a_pace_is_what_all_that_was_in_hand_took(member: Member) -> None:
    member.handed(3, 1_000, 0)
    member.handed(2, 1_004, 0)
    member.acknowledged(2, 1_005, 0)
    assert not member.pace_ms
    member.acknowledged(1, 1_008, 0)
    assert member.pace_ms == 3
    member.handed(1, 1_010, 0)
    member.acknowledged(3, 1_014, 0)
    assert member.held == 0
    assert member.pace_ms == 5 / 3


def test_a_pace_changes_little_by_little(member: Member) -> None:
    member.handed(1, 1_000, 0)
    member.acknowledged(1, 1_007, 0)
    assert member.pace_ms == 8
    member.handed(4, 2_000, 0)
    member.acknowledged(4, 2_003, 0)
    assert member.pace_ms == 4
    member.handed(1, 3_000, 0)
    member.acknowledged(1, 3_015, 0)
    assert member.pace_ms == 7


def test_what_the_broker_spent_on_deliveries_is_not_the_members_time(member: Member) -> None:
    for n in range(8):
        # Each delivery lies in the middle of a batch that took 100 ms to be handed out.
        member.handed(1, 1_000 * n, 1_000 * n)
        member.acknowledged(1, 1_000 * n + 109, 1_000 * n + 1_000)
    assert 10 <= member.pace_ms < 11
    assert member.lot(1_000) == 3


def test_records_that_are_given_back_tell_no_pace(member: Member) -> None:
    member.handed(4, 1_000, 0)
    member.count_returned(3)
    member.acknowledged(1, 1_000, 0)
    assert (member.held, member.pace_ms) == (0, 0)


def test_a_lot_is_where_dealing_and_doing_take_least(member: Member) -> None:
    assert member.lot(1_000) == 0, "nothing is known of it"
    member.pace_ms = 1
    assert member.lot(1_000) == 10
    assert member.lot(100) == 3
    assert member.lot(31) == 0
    member.held = 8
    assert member.lot(1_000) == 2
    member.held, member.pace_ms = 0, 0.001
    assert member.lot(1_000) == 1_000 // SPREAD_MIN
    member.pace_ms = 1_000
    assert member.lot(1_000) == 0
