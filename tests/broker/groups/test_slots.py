"""Slots of keyed groups: they belong to the same members whatever members came and went before."""

from __future__ import annotations

from random import Random
from unittest.mock import Mock

import numpy as np
import pytest

from malamute_protocol.commands import JoinGroup
from malamute_py.broker.groups.member import Member
from malamute_py.broker.groups.slots import NOBODY, SLOTS, Slots
from malamute_py.broker.links.link import Link
from tests.seeds import seeds


def member(place: int) -> Member:
    link = Link(place, "", 0)
    link.session = place.to_bytes(16, "big")
    one = Member(Mock(), link, JoinGroup(1, "st", "g", ["all"], "keyed"), 0, 0)
    one.place = place
    return one


@pytest.mark.parametrize("seed", seeds(5, 20), ids="seed-{}".format)
def test_slots_belong_to_the_same_members_in_whatever_order_these_came(seed: int) -> None:
    random = Random(seed)
    everybody = [member(place) for place in range(12)]
    slots = Slots()
    present: list[Member] = []
    for _ in range(60):
        one = random.choice(everybody)
        before = slots.owner.copy()
        if one in present:
            present.remove(one)
            slots.leave([one.place], present)
            kept = before != one.place
        else:
            present.append(one)
            slots.enter(one)
            kept = slots.owner != one.place
        assert (slots.owner == before)[kept].all(), "only the slots of who came or went move"
        fresh = Slots()
        for other in random.sample(present, len(present)):
            fresh.enter(other)
        assert (slots.owner == fresh.owner).all()
    for one in list(present):
        present.remove(one)
        slots.leave([one.place], present)
    assert (slots.owner == NOBODY).all()


def test_slots_are_spread_about_evenly() -> None:
    slots = Slots()
    for place in range(8):
        slots.enter(member(place))
    shares = np.bincount(slots.owner, minlength=8)
    assert shares.sum() == SLOTS
    assert shares.min() > SLOTS / 8 / 2
