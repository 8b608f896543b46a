"""Returns: requests that a worker held go to another, until their attempts are used up."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from tests.broker.service_world import LATER_MS, letters, pair


def test_a_voluntary_return_counts_too() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 2}))
    world.offer(2)
    world.request(1, b"a")
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    assert letters(world, 1)[0].mail.why == "returned: handed out 2 times"


def test_the_pause_doubles_with_each_attempt_up_to_its_bound() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {
        "attempts_max": 9, "backoff_ms": 100, "backoff_max_ms": 300,
    }))  # fmt: skip
    world.request(1, b"a")
    pauses = []
    for link in range(10, 15):
        world.worker(link)
        world.offer(link, credit=1, lease_ms=100)
        assert world.numbers(link) == [0]
        world.shell.wait(110)
        waited = 0
        while world.info(1)["delayed"]:
            world.shell.wait(10)
            waited += 10
        pauses.append(waited)
    assert [round(pause, -2) for pause in pauses] == [100, 200, 300, 300, 300]


@pytest.mark.parametrize("starts", [1, 2])
def test_a_pause_that_was_noted_while_the_clock_was_a_day_ahead_is_no_day_longer(
    starts: int,
) -> None:
    """Leases end when the clock leaps; then the broker dies, and the clock is right again."""
    world, day_ms = pair(), 86_400_000
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 9, "backoff_ms": 2_000}))
    world.request(1, b"a")
    world.offer(2, credit=1, lease_ms=1_000)
    assert world.numbers(2) == [0]
    world.shell.wait(day_ms)
    world.shell.now_ms -= day_ms
    # Times in the log never fall: after the first start they say nothing about a clock.
    for _ in range(starts):
        world.shell.restart()
    world.worker(10)
    world.offer(10, credit=1, lease_ms=1_000)
    assert world.numbers(10) == [], "the pause goes on"
    world.shell.wait(2_100)
    assert world.numbers(10) == [0]


@pytest.mark.parametrize("how", ["lost", "bye", "silent", "kicked"])
def test_what_a_worker_had_in_hand_goes_to_another_when_its_link_ends(how: str) -> None:
    world = pair()
    world.offer(2)
    world.request(1, *[b"x"] * 4, key=b"k")
    world.worker(3, "bob")
    world.offer(3)
    world.reply(2, [1])
    if how == "lost":
        world.drop(2)
    elif how == "bye":
        world.shell.send(2, wire.Bye())
    elif how == "kicked":
        world.shell.send(1, wire.Kick(8, 2))
    else:
        for _ in range(16):
            for link in (1, 3):
                world.shell.send(link, wire.Ping(0))
            world.shell.wait(1_000)
    world.shell.wait(LATER_MS)
    assert world.numbers(3) == [0, 2, 3]
    assert world.work(3)[0].work.attempts == 2
    assert world.events("worker_died")[0]["count"] == 3
    world.reply(3, [0, 2, 3])
    assert world.queued() == 0
    assert sorted(world.replies(1)) == [b"re: %d" % n for n in range(4)]


def test_a_worker_that_dies_with_very_much_in_hand_is_cleared_in_portions() -> None:
    world = pair(timers_max=10)
    world.offer(2)
    for n in range(95):
        world.request(1, b"%d" % n)
    world.drop(2)
    assert world.info(1)["waiting"] == 95
    assert world.events("worker_died")[0]["count"] == 95
    returns = [
        batch for ready in world.shell.readies[-20:] for one in ready.appends
        for batch in one.batches
    ]  # fmt: skip
    assert len(returns) >= 9, "a portion a step"
    world.worker(3, "bob")
    world.offer(3)
    assert world.numbers(3) == list(range(95))


def test_what_is_still_to_be_returned_can_be_cancelled_and_expires() -> None:
    world = pair(timers_max=1)
    world.offer(2)
    for n in range(5):
        world.request(1, b"x", key=b"%d" % n, timeout_ms=1_000)
    shell, broker = world.shell, world.shell.broker
    broker.link_lost(2, shell.now_ms)
    broker.receive(1, "", [wire.CancelRequest(7, "s", b"4")], [], shell.now_ms)
    shell.run()
    assert world.shell.peers[1].last(wire.Result).value == {"count": 1}
    assert world.info(1)["waiting"] == 4
    shell.wait(1_010)
    assert world.queued() == 0
    assert len(world.mail(1)) == 4


def test_a_withdrawn_offer_gives_back_what_it_had_at_once() -> None:
    world = pair()
    world.offer(2, credit=2)
    world.request(1, b"a", b"b", b"c")
    world.offer(2, number=2)
    world.shell.send(2, wire.Unsubscribe(1))
    assert world.shell.peers[2].last(wire.Ended).code == "cancelled"
    assert world.numbers(2, 2) == [2, 0, 1]
    assert world.refused(2, world.reply(2, [0], number=1)).code == "unknown_subscription"
    world.reply(2, [0, 1, 2], number=2)
    assert world.queued() == 0


def test_what_a_withdrawn_offer_had_not_begun_costs_no_attempt() -> None:
    world = pair(attempts_max=3)
    world.request(1, b"a", b"b", key=b"k")
    for _ in range(10):
        world.offer(2)
        assert [task.work.attempts for task in world.work(2)] == [1, 1]
        world.shell.send(2, wire.Unsubscribe(1))
        world.shell.peers[2].work.clear()
    assert world.info(1)["attempts"] == [[0, 2]]
    assert world.counter("requests_dead") == 0


def test_what_a_withdrawn_offer_had_begun_was_an_attempt() -> None:
    world = pair(attempts_max=3)
    world.request(1, b"a", b"b", key=b"k")
    for attempt in (1, 2, 3):
        world.offer(2)
        assert [task.work.attempts for task in world.work(2)] == [attempt, 1]
        world.ack(2, [(0, 1)], WorkState.RECEIVED)
        world.shell.send(2, wire.Unsubscribe(1))
        world.shell.peers[2].work.clear()
    (notice,) = world.mail(1)
    assert notice.mail.why == "returned: handed out 3 times"
    assert [tuple(run) for run in notice.mail.about] == [(b"k", 0, 1)]
    world.shell.restart()
    world.client(1)
    assert world.info(1)["attempts"] == [[0, 1]], "as the log has it"


def test_a_worker_that_stops_costs_its_requests_no_attempt() -> None:
    world = pair(attempts_max=3)
    world.request(1, b"a", b"b", key=b"k")
    for _ in range(10):
        world.offer(2)
        assert [task.work.attempts for task in world.work(2)] == [1, 1]
        world.ack(2, [(0, 1)], WorkState.RECEIVED)
        world.ack(2, [(0, 2)], WorkState.RELEASED)
        world.shell.send(2, wire.Unsubscribe(1))
        world.shell.peers[2].work.clear()
    assert world.info(1)["attempts"] == [[0, 2]]
    assert world.counter("requests_dead") == 0
    world.shell.restart()
    world.client(1)
    assert world.info(1)["attempts"] == [[0, 2]], "as the log has it"


def test_a_released_request_waits_for_no_pause_and_another_worker_has_it() -> None:
    world = pair(attempts_max=3)
    world.worker(3, "ben")
    world.request(1, b"a")
    world.offer(2, credit=1)
    world.offer(3, credit=1)
    world.ack(2, [(0, 1)], WorkState.RELEASED)
    assert [task.work.attempts for task in world.work(3)] == [1]


def test_a_dead_letter_repeats_what_the_worker_said_when_it_gave_the_request_back() -> None:
    world = pair(attempts_max=2)
    world.request(1, b"a", key=b"k")
    world.offer(2, credit=10)
    world.ack(2, [(0, 1)], WorkState.RETURNED, reason="no database")
    world.ack(2, [(0, 1)], WorkState.RETURNED, reason="still none")
    (notice,) = world.mail(1)
    assert notice.mail.why == "returned: handed out 2 times, at last: still none"


def test_what_was_begun_may_be_said_in_the_message_that_ends_the_offer() -> None:
    world = pair(attempts_max=1)
    world.request(1, b"a", b"b", key=b"k")
    world.offer(2)
    began = wire.AckWork(1, [(0, 1)], WorkState.RECEIVED)
    world.shell.send(2, began, wire.Unsubscribe(1))
    assert [letter.mail.why for letter in world.mail(1)] == ["returned: handed out 1 times"]
    assert world.info(1)["attempts"] == [[0, 1]]


def test_what_a_lone_worker_gives_back_again_and_again_waits_longer_each_time() -> None:
    world = pair(backoff_ms=100)
    world.request(1, b"a")
    world.offer(2)
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    assert world.numbers(2) == [0, 0], "once at once"
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    assert world.info(1)["delayed"] == 1
    world.shell.wait(120)
    assert world.numbers(2) == [0, 0, 0]
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    world.shell.wait(120)
    assert world.numbers(2) == [0, 0, 0]
    world.shell.wait(100)
    assert world.numbers(2) == [0, 0, 0, 0]
    world.ack(2, [(0, 1)], WorkState.RETURNED, again_ms=10)
    world.shell.wait(20)
    assert len(world.numbers(2)) == 5, "a worker that says when is believed"


def test_requests_of_many_attempts_become_dead_letters_once_when_the_bound_is_lowered() -> None:
    world = pair(attempts_max=9)
    world.request(1, b"a", b"b", key=b"k")
    for rounds in range(4):
        world.offer(2)
        world.ack(2, [(0, 2 if rounds < 3 else 1)], WorkState.RECEIVED)
        world.shell.send(2, wire.Unsubscribe(1))
    world.offer(2)
    assert world.info(1)["attempts"] == [[4, 1], [5, 1]]
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 2}))
    world.drop(2)
    assert world.counter("requests_dead") == 2
    assert world.queued() == 0
    assert [event["count"] for event in world.events("request_dead")] == [2]


def test_a_return_that_the_log_refuses_is_tried_again() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b")
    world.shell.refuse["main"] = ("full", "no room")
    world.drop(2)
    assert world.queued() == 2
    del world.shell.refuse["main"]
    world.worker(3, "bob")
    world.offer(3)
    world.shell.wait(2_000)
    world.shell.wait(LATER_MS)
    assert world.numbers(3) == [0, 1]


def test_very_much_that_the_log_refused_is_tried_again_without_a_pause_between() -> None:
    world = pair(timers_max=2)
    world.offer(2)
    for _ in range(30):
        world.request(1, b"x")
    world.shell.refuse["main"] = ("full", "no room")
    world.drop(2)
    world.shell.wait(1_500)
    del world.shell.refuse["main"]
    world.worker(3, "bob")
    world.offer(3)
    world.shell.wait(1_100)
    world.shell.wait(1_100)
    assert sorted(world.numbers(3)) == list(range(30))


def test_one_refusal_after_the_other_puts_nothing_off_for_ever() -> None:
    world = pair()
    world.worker(3, "bob")
    for link in (2, 3):
        world.offer(link, credit=1)
        world.request(1, b"x")
    world.shell.refuse["main"] = ("full", "no room")
    world.drop(2)
    world.shell.wait(600)
    world.drop(3)
    del world.shell.refuse["main"]
    world.worker(4, "cat")
    world.offer(4)
    world.shell.wait(450)
    world.shell.wait(LATER_MS)
    assert sorted(world.numbers(4)) == [0, 1]
