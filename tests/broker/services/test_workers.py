"""OFFER: what is accepted, and what an offer creates."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from tests.broker.service_world import INBOX, World, pair


def test_an_offer_creates_its_service_with_its_settings() -> None:
    world = pair()
    world.offer(2, service="made", settings={"attempts_max": 7})
    assert world.info(2, "made")["settings"]["attempts_max"] == 7
    assert world.events("service_created") == [{"service": "made", "by": "ann"}]
    world.shell.restart()
    world.worker(2)
    assert world.info(2, "made")["settings"]["attempts_max"] == 7


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"service": "b@d name"}, "bad_name"),
        ({"pattern": ["topic"]}, "bad_pattern"),
        ({"pattern": ["no such kind", 1]}, "unknown_pattern_kind"),
        ({"service": "t", "settings": {"nonsense": 1}}, "bad_setting"),
        ({"number": 3}, "subscription_exists"),
        ({"number": INBOX}, "subscription_exists"),
    ],
)
def test_an_offer_that_cannot_be_is_refused_by_name(fields: dict[str, Any], code: str) -> None:
    world = World()
    world.client(2)
    world.offer(2, number=3, service="other")
    peer = world.offer(2, **{"number": 4, **fields})
    refused = peer.last(wire.Refused)
    assert (refused.command, refused.code) == (51, code)
    gauges = world.shell.broker._services.gauges
    assert (gauges["offers"], gauges["services"]) == (1, 1)


def test_an_offer_needs_its_permission() -> None:
    world = World(permit=lambda identity, action, name: action != "work")
    world.worker(2)
    assert world.offer(2).last(wire.Refused).code == "forbidden"


def test_an_offer_of_a_service_that_the_log_refuses_is_refused() -> None:
    world = pair()
    world.shell.refuse["main"] = ("full", "no room")
    assert world.offer(2).last(wire.Refused).code == "full"
    del world.shell.refuse["main"]
    assert world.shell.broker._services.gauges["services"] == 0
    world.offer(2)
    assert world.shell.peers[2].last(wire.Subscribed).subscription == 1
