"""Time in which the broker did not run, or which its clock left out, counts for no silence."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from tests.broker.group_world import events, got, info, join, lose, publish, world
from tests.broker.links.test_replicas import hello, name
from tests.broker.service_world import World
from tests.broker.shell import Shell

HOURS_MS = 3 * 3_600_000


def skip(shell: Shell, ms: int = HOURS_MS) -> None:
    """Let time pass without the broker, then have it look at its timers."""
    shell.now_ms += ms
    shell.broker.skipped(ms, shell.now_ms)
    shell.wait(0)


def test_links_stay_and_are_asked_for_a_sign_of_life() -> None:
    shell = world()
    peer = shell.peers[1]
    shell.wait(100)
    skip(shell)
    assert not peer.closed
    assert isinstance(peer.commands[-1], wire.Ping)
    [event] = shell.events_of("time_skipped")
    assert event.facts == {"ms": HOURS_MS}
    for _ in range(20):
        shell.wait(1_000)
    assert peer.closed, "a peer that is silent from then on is given up as ever"


def test_a_worker_keeps_its_requests_for_the_rest_of_its_lease() -> None:
    world = World(heartbeat_ms=60_000)
    world.client(1)
    world.worker(2)
    world.offer(2, lease_ms=10_000)
    world.request(1, b"a", b"b")
    assert len(world.numbers(2)) == 2
    world.shell.wait(4_000)
    skip(world.shell)
    world.shell.wait(5_900)
    assert world.info(1)["held"] == 2
    assert not world.events("lease_expired")
    world.shell.wait(200)
    assert world.info(1)["held"] == 0
    assert len(world.events("lease_expired")) == 1


@pytest.mark.parametrize("kind", ["shared", "keyed", "exclusive"])
def test_a_member_keeps_its_records_for_the_rest_of_its_lease(kind: str) -> None:
    shell = world(heartbeat_ms=60_000)
    join(shell, 2, kind, settings={"lease_ms": 8_000})
    publish(shell, 3)
    join(shell, 3, kind)
    shell.wait(4_000)
    skip(shell)
    shell.wait(3_900)
    assert not events(shell, "group_lease_ended")
    assert not any(one["aside"] for one in info(shell)["members"])
    shell.wait(1_200)
    assert len(events(shell, "group_lease_ended")) == 1
    assert got(shell, 3) == [0, 1, 2]


def test_the_place_of_a_lost_holder_is_kept_for_the_rest_of_its_time() -> None:
    shell = world(heartbeat_ms=60_000)
    join(shell, 2, "exclusive", hold_ms=10_000)
    publish(shell, 2)
    join(shell, 3, "exclusive", hold_ms=10_000)
    lose(shell, 2)
    shell.wait(4_000)
    skip(shell)
    shell.wait(5_900)
    assert not got(shell, 3)
    shell.wait(200)
    assert got(shell, 3) == [0, 1]


def test_an_open_transaction_has_the_rest_of_its_time() -> None:
    shell = world(heartbeat_ms=60_000)
    shell.send(1, wire.BeginTransaction(b"t" * 16, 7, 10_000))
    shell.wait(4_000)
    skip(shell)
    shell.wait(5_900)
    assert not events(shell, "transaction_timed_out")
    shell.wait(200)
    assert len(events(shell, "transaction_timed_out")) == 1


def test_the_number_of_an_absent_replica_is_kept_for_the_rest_of_its_time() -> None:
    shell = Shell(heartbeat_ms=60_000)
    hello(shell, 1)
    lose(shell, 1)
    shell.wait(20_000)
    skip(shell)
    shell.wait(9_000)
    assert name(hello(shell, 2)) == "web-1"
    shell.wait(2_000)
    assert name(hello(shell, 3)) == "web-0"


def test_a_temporary_mailbox_waits_for_its_session_for_the_rest_of_its_time() -> None:
    shell = world()
    shell.hello(2)
    shell.send(2, wire.OpenInbox(5, "", 10, 1_000))
    lose(shell, 2)
    shell.wait(1_000)
    skip(shell)
    assert shell.broker.gauges["temporary_mailboxes"] == 1
    for _ in range(20):
        shell.wait(1_000)
    assert shell.broker.gauges["temporary_mailboxes"] == 0


def test_a_deadline_is_a_time_of_the_clock_and_is_not_put_off() -> None:
    world = World(heartbeat_ms=60_000)
    world.client(1)
    world.worker(2)
    world.request(1, b"a", timeout_ms=60_000)
    skip(world.shell)
    assert len(world.events("request_expired")) == 1
