"""Deadlines and leases: what happens to requests because time has passed."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_protocol.encode import encode
from tests.broker.service_world import LATER_MS, World, pair


def test_a_waiting_request_expires_at_its_deadline_and_its_requester_is_told() -> None:
    world = pair()
    world.request(1, b"a", b"b", key=b"k", timeout_ms=1_000)
    world.shell.wait(990)
    assert world.mail(1) == []
    world.shell.wait(20)
    notice = world.mail(1)[0].mail
    assert (notice.why, notice.last, notice.about) == ("expired", True, [(b"k", 0, 2)])
    assert world.replies(1) == [b"", b""]
    assert world.queued() == 0
    assert world.events("request_expired") == [{"service": "s", "count": 2}]
    assert world.counter("requests_expired") == 2
    world.offer(2)
    assert world.work(2) == []


def test_a_request_in_hand_expires_too_and_a_late_reply_is_not_held() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k", timeout_ms=1_000)
    assert world.work(2)[0].work.deadline_ms == world.shell.now_ms + 1_000
    world.shell.wait(1_010)
    assert world.refused(2, world.reply(2, [0])).code == "not_held"
    assert world.replies(1) == [b""]
    assert world.info(1)["held"] == 0


def test_a_reply_in_the_turn_of_the_deadline_wins() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k", timeout_ms=1_000)
    shell, broker = world.shell, world.shell.broker
    shell.now_ms += 1_010
    content = encode([b"yes"], subject="r")
    broker.receive(2, "", [wire.Reply(1, [0], 77, True)], [content], shell.now_ms)
    broker.tick(shell.now_ms)
    shell.run()
    assert world.replies(1) == [b"yes"]
    assert world.counter("requests_expired") == 0


def test_a_request_without_a_key_expires_in_silence() -> None:
    world = pair()
    world.request(1, b"a", timeout_ms=500)
    world.shell.wait(510)
    assert world.mail(1) == []
    assert world.queued() == 0


def test_the_services_own_timeout_holds_for_those_who_name_none() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"timeout_ms": 500}))
    world.request(1, b"a", key=b"k")
    world.shell.wait(510)
    assert world.mail(1)[0].mail.why == "expired"


def test_a_deadline_that_passed_while_the_broker_was_down_is_kept() -> None:
    world = World()
    world.client(1, "req")
    world.request(1, b"a", key=b"k", timeout_ms=500)
    world.shell.now_ms += 10_000
    world.shell.restart()
    world.client(1, "req")
    world.shell.wait(10)
    assert world.mail(1)[0].mail.why == "expired"


def test_an_expiry_that_the_log_refuses_is_tried_again() -> None:
    world = pair()
    world.request(1, b"a", key=b"k", timeout_ms=500)
    world.shell.refuse["main"] = ("full", "no room")
    world.shell.wait(510)
    assert world.queued() == 1
    del world.shell.refuse["main"]
    world.shell.wait(1_100)
    assert world.queued() == 0
    assert len(world.mail(1)) == 1


def test_many_deadlines_at_once_are_met_in_bounded_steps() -> None:
    world = pair(timers_max=10)
    for n in range(55):
        world.request(1, b"x", key=b"%d" % n, timeout_ms=500)
    world.shell.wait(510)
    assert world.queued() == 0
    assert len(world.mail(1)) == 55


def test_a_silent_worker_loses_what_it_has_when_the_lease_is_over() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000, credit=2)
    world.request(1, b"a", b"b")
    world.worker(3, "bob")
    world.offer(3)
    assert world.work(2)[0].work.lease_ms == 1_000
    world.shell.wait(990)
    assert world.work(3) == []
    world.shell.wait(20)
    assert world.events("lease_expired")[0]["count"] == 2
    assert world.work(3) == [], "not before its pause"
    world.shell.wait(LATER_MS)
    assert world.numbers(3) == [0, 1]
    assert world.refused(2, world.reply(2, [0])).code == "not_held"
    world.reply(3, [0, 1])
    assert world.queued() == 0
    assert world.counter("leases_expired") == 2


def test_renewal_keeps_what_it_names_and_nothing_else() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000, credit=3)
    world.request(1, b"a", b"b", b"c")
    world.shell.wait(800)
    world.confirmed(2, world.ack(2, [(1, 2)], WorkState.RENEWED))
    world.shell.wait(300)
    assert world.info(1)["held"] == 1
    world.shell.wait(600)
    assert world.info(1)["held"] == 1
    world.shell.wait(300)
    assert world.info(1)["held"] == 0


@pytest.mark.parametrize("how", ["received", "reply"])
def test_whatever_is_heard_of_a_request_renews_its_lease(how: str) -> None:
    world = pair()
    world.offer(2, lease_ms=1_000)
    world.request(1, b"a")
    world.shell.wait(800)
    if how == "received":
        world.ack(2, [(0, 1)], WorkState.RECEIVED)
    else:
        world.reply(2, [0], last=False)
    world.shell.wait(800)
    assert world.info(1)["held"] == 1


def test_heartbeats_renew_no_lease() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000)
    world.request(1, b"a")
    for _ in range(11):
        world.shell.send(2, wire.Ping(0))
        world.shell.wait(100)
    assert world.counter("leases_expired") == 1


def test_a_lease_that_ends_while_the_reply_is_queued_loses_to_the_reply() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000)
    world.request(1, b"a")
    broker, shell = world.shell.broker, world.shell
    shell.now_ms += 1_100
    content = encode([b"just in time"], subject="r")
    broker.receive(2, "", [wire.Reply(1, [0], 77, True)], [content], shell.now_ms)
    broker.tick(shell.now_ms)
    shell.run()
    assert world.replies(1) == [b"just in time"]
    assert world.queued() == 0
    assert world.counter("leases_expired") == 0


def test_a_reply_after_the_lease_ended_in_the_same_turn_is_refused() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000)
    world.request(1, b"a")
    broker, shell = world.shell.broker, world.shell
    shell.now_ms += 1_100
    content = encode([b"too late"], subject="r")
    broker.tick(shell.now_ms)
    broker.receive(2, "", [wire.Reply(1, [0], 77, True)], [content], shell.now_ms)
    shell.run()
    assert world.refused(2, 77).code == "not_held"
    assert world.replies(1) == []
    assert world.queued() == 1


def test_a_lease_is_kept_within_bounds() -> None:
    world = pair(lease_min_ms=100, lease_max_ms=5_000)
    world.offer(2, lease_ms=1)
    world.offer(2, lease_ms=1 << 40, number=2)
    leases = {offer.lease_ms for offer in world.service().offers}
    assert leases == {100, 5_000}


def test_a_lease_whose_end_the_log_refuses_is_tried_again() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000, credit=1)
    world.request(1, b"a")
    world.shell.refuse["main"] = ("full", "no room")
    world.shell.wait(1_010)
    del world.shell.refuse["main"]
    world.worker(3, "bob")
    world.offer(3)
    world.shell.wait(1_100)
    world.shell.wait(LATER_MS)
    assert world.numbers(3) == [0]
