"""Deadlines and leases: what happens to requests because time has passed."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_protocol.encode import encode
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.service import Service
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


@pytest.mark.moderate
def test_more_requests_than_a_batch_may_have_expire_at_once_and_each_requester_is_told() -> None:
    """72,000 of one requester ended the broker at their deadline, and each that started again."""
    world = pair()
    for number in range(18):
        world.request(1, *[b""] * 4_000, key=b"%d" % number, timeout_ms=1_000)
    world.shell.wait(1_010)
    assert world.counter("requests_expired") == 72_000
    notices = {id(letter.mail): letter.mail.about for letter in world.mail(1)}.values()
    assert max(sum(count for _, _, count in about) for about in notices) == 4_096
    told = [
        (key, row)
        for about in notices
        for key, first, count in about
        for row in range(first, first + count)
    ]
    assert sorted(told) == sorted((b"%d" % key, row) for key in range(18) for row in range(4_000))


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


def raise_for(monkeypatch: pytest.MonkeyPatch, part: Any, name: str) -> list[str]:
    """Have a method of a part raise for these services; the list that is returned may change."""
    original, bad = getattr(part, name), ["s"]

    def raising(self: Any, service: Service, *rest: Any, **more: Any) -> Any:
        if service.name in bad:
            raise ZeroDivisionError
        return original(self, service, *rest, **more)

    monkeypatch.setattr(part, name, raising)
    return bad


def test_an_error_over_deadlines_of_one_service_is_tried_again_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker ended, and so did each start after it."""
    world = pair()
    world.shell.planted = True
    bad = raise_for(monkeypatch, Ends, "end")
    for name in ("s", "t"):
        world.request(1, b"a", key=name.encode(), timeout_ms=500, service=name)
    world.shell.wait(600)
    assert [facts["service"] for facts in world.events("internal_error")] == ["s"]
    assert [facts["service"] for facts in world.events("request_expired")] == ["t"]
    world.shell.wait(1_100)
    assert [facts["service"] for facts in world.events("internal_error")] == ["s", "s"]
    bad.clear()
    world.shell.wait(1_100)
    assert [facts["service"] for facts in world.events("request_expired")] == ["t", "s"]
    assert world.queued() == 0
    assert len(world.mail(1)) == 2


def test_an_error_over_leases_of_one_service_is_tried_again_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = pair()
    world.shell.planted = True
    bad = raise_for(monkeypatch, Returns, "give_back")
    for number, name in enumerate(("s", "t"), 1):
        world.offer(2, service=name, number=number, lease_ms=500)
        world.request(1, b"a", service=name)
    world.shell.wait(600)
    assert [facts["service"] for facts in world.events("internal_error")] == ["s"]
    world.shell.wait(LATER_MS)
    assert [len(world.work(2, number)) for number in (1, 2)] == [1, 2]
    bad.clear()
    world.shell.wait(1_100)
    world.shell.wait(LATER_MS)
    assert [task.work.attempts for task in world.work(2, 1)] == [1, 2]


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


# --- delays, and what is past its deadline -----------------------------------------------------


@pytest.mark.parametrize("memory", [False, True])
def test_a_delayed_request_goes_to_no_worker_before_its_time(memory: bool) -> None:
    world = pair(default_service={"memory": memory})
    world.offer(2)
    world.request(1, b"late", delay_ms=1_000)
    world.request(1, b"now")
    assert [task.body for task in world.work(2)] == [b"now"]
    assert (world.info(1)["delayed"], world.info(1)["held"]) == (1, 1)
    world.shell.wait(999)
    assert len(world.work(2)) == 1
    world.shell.wait(1)
    assert [task.body for task in world.work(2)] == [b"now", b"late"]
    assert world.info(1)["delayed"] == 0


def test_a_restart_keeps_a_delay_and_a_broker_that_was_away_for_longer_hands_out_at_once() -> None:
    world = pair()
    world.request(1, b"soon", delay_ms=1_000)
    world.request(1, b"later", delay_ms=9_000)
    world.shell.wait(600)
    world.shell.restart()
    world.client(1)
    world.worker(2)
    world.offer(2)
    assert world.work(2) == []
    world.shell.wait(399)
    assert world.work(2) == []
    world.shell.wait(1)
    assert [task.body for task in world.work(2)] == [b"soon"]
    world.shell.now_ms += 20_000
    world.shell.restart()
    world.worker(3)
    world.offer(3)
    world.shell.wait(1)
    assert [task.body for task in world.work(3)] == [b"later"]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("subject", ["x", "y"])
def test_a_request_takes_its_place_by_number_when_its_delay_ends(
    restart: bool, subject: str
) -> None:
    world = pair()
    world.request(1, b"older", subject="x")
    world.request(1, b"late", delay_ms=1_000, subject=subject)
    world.request(1, b"younger", subject="x")
    world.request(1, b"latest", delay_ms=500, subject=subject)
    world.shell.wait(1_000)
    if restart:
        world.shell.restart()
        world.client(1)
        world.worker(2)
    assert world.info(1)["delayed"] == 0
    world.offer(2)
    assert [task.body for task in world.work(2)] == [b"older", b"late", b"younger", b"latest"]


def test_what_came_back_goes_before_a_request_whose_delay_has_ended() -> None:
    world = pair()
    world.request(1, b"late", delay_ms=1_000)
    world.request(1, b"tried")
    world.request(1, b"new")
    world.offer(2, credit=1)
    world.ack(2, [(1, 2)], WorkState.RETURNED, again_ms=1_000)
    world.shell.wait(1_000)
    world.worker(3)
    world.offer(3)
    assert [task.body for task in world.work(3)] == [b"tried", b"late", b"new"]


def test_a_delay_is_as_long_as_it_was_asked_when_the_clock_was_set_back() -> None:
    world = pair()
    world.request(1, b"a", delay_ms=1_000)
    world.shell.now_ms -= 86_400_000
    world.shell.restart()
    world.worker(2)
    world.offer(2)
    world.shell.wait(1_100)
    assert [task.body for task in world.work(2)] == [b"a"]


@pytest.mark.parametrize("starts", [1, 2])
def test_a_request_that_was_put_while_the_clock_was_a_day_ahead_has_no_day_longer(
    starts: int,
) -> None:
    world, day_ms = pair(), 86_400_000
    world.shell.now_ms += 2 * day_ms
    world.shell.restart()
    world.client(1)
    world.request(1, b"a", key=b"k", timeout_ms=5_000)
    world.shell.now_ms -= day_ms
    # Times in the log never fall: after the first start they say nothing about a clock.
    for _ in range(starts):
        world.shell.restart()
    world.client(1)
    world.worker(2)
    [seen] = world.ask(1, wire.PeekRequests(9, "s"))["requests"]
    assert seen["deadline_ms"] <= world.shell.now_ms + 5_000
    world.offer(2)
    assert world.work(2)[0].work.deadline_ms == seen["deadline_ms"]
    world.shell.wait(5_100)
    assert world.queued() == 0


def test_the_time_of_a_request_begins_after_its_delay() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k", delay_ms=1_000, timeout_ms=500)
    world.shell.wait(1_000)
    assert world.work(2)[0].work.deadline_ms == world.shell.now_ms + 500
    world.shell.wait(510)
    assert world.mail(1)[0].mail.why == "expired"


def test_a_delayed_request_can_be_cancelled() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b", key=b"k", delay_ms=1_000)
    world.shell.send(1, wire.CancelRequest(7, "s", b"k", 0))
    world.shell.wait(2_000)
    assert [task.body for task in world.work(2)] == [b"b"]


def test_a_delayed_batch_that_the_log_refuses_leaves_nothing() -> None:
    world = pair()
    world.shell.refuse["main"] = ("disk_full", "no space")
    world.request(1, b"a", delay_ms=100)
    world.shell.refuse.clear()
    world.shell.wait(200)
    assert world.queued() == 0
    assert world.shell.broker._services._registry.timers.due_ms is None


def test_what_is_past_its_deadline_goes_to_no_worker_while_the_log_refuses_its_end() -> None:
    world = pair()
    world.request(1, b"over", key=b"k", timeout_ms=100)
    world.request(1, b"good", timeout_ms=60_000)
    world.shell.refuse["main"] = ("disk_full", "no space")
    world.shell.wait(200)
    world.offer(2)
    world.shell.wait(2_000)
    assert world.work(2) == []
    world.shell.refuse.clear()
    world.shell.wait(3_000)
    assert [task.body for task in world.work(2)] == [b"good"]
    assert world.mail(1)[0].mail.why == "expired"


def test_of_many_deadlines_in_one_turn_none_is_handed_out() -> None:
    world = pair(timers_max=2)
    for _ in range(10):
        world.request(1, b"x", key=b"k%d" % world.trackers, timeout_ms=100)
    shell, broker = world.shell, world.shell.broker
    shell.now_ms += 100
    broker.receive(2, "", [wire.Offer(1, "s", ["all"], 100, 1 << 40, 0)], [], shell.now_ms)
    broker.tick(shell.now_ms)
    shell.run()
    shell.wait(50)
    assert world.work(2) == []
    assert len(world.mail(1)) == 10


def test_a_body_that_is_read_back_after_the_deadline_is_not_sent() -> None:
    world = pair(mail_hot_bytes=1, read=False)
    world.request(1, b"a" * 100, key=b"k", timeout_ms=100)
    world.request(1, b"b" * 100)
    world.offer(2, credit=2)
    world.shell.refuse["main"] = ("disk_full", "no space")
    world.shell.wait(150)
    world.shell.answer_bodies()
    world.shell.run()
    assert [task.body for task in world.work(2)] == [b"b" * 100]
    world.shell.refuse.clear()
    world.shell.wait(3_000)
    assert world.counter("requests_expired") == 1
    # Nothing was sent of the first one, so its credit is there again.
    world.request(1, b"c" * 100)
    world.shell.answer_bodies()
    world.shell.run()
    assert [task.body for task in world.work(2)][1:] == [b"c" * 100]
