"""Recovery: requests and their workers after a restart of the broker."""

from __future__ import annotations

from malamute_protocol.commands import WorkState
from tests.broker.service_world import LATER_MS, World, pair


def test_a_holder_that_comes_back_after_a_restart_goes_on() -> None:
    world = World()
    world.shell.hello(1, identity="req")
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, *[b"x"] * 4, key=b"k")
    world.reply(2, [1])
    world.shell.restart()
    world.client(1, "req")
    world.worker(2, "ann")
    world.offer(2, number=9)
    assert world.work(2, 9) == [], "it has them already"
    world.confirmed(2, world.ack(2, [(0, 1)], WorkState.RENEWED, number=9))
    world.confirmed(2, world.reply(2, [0, 2, 3], number=9))
    assert sorted(world.replies(1)) == [b"re: %d" % n for n in range(4)]
    assert world.queued() == 0


def test_a_holder_that_does_not_come_back_loses_it_when_a_new_lease_is_over() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000)
    world.request(1, b"a")
    world.shell.wait(900)
    world.shell.restart()
    world.worker(3, "bob")
    world.offer(3)
    world.shell.wait(900)
    assert world.work(3) == []
    world.shell.wait(200)
    world.shell.wait(LATER_MS)
    assert world.work(3)[0].work.attempts == 2
    assert world.info(3)["workers"][0]["attempts"] == 2


def test_a_holder_that_came_back_and_dies_returns_what_it_had_before() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    world.shell.restart()
    world.worker(2, "ann")
    world.offer(2)
    world.drop(2)
    world.worker(3, "bob")
    world.offer(3)
    world.shell.wait(LATER_MS)
    assert world.numbers(3) == [0]


def test_after_an_orderly_stop_workers_still_hold_what_they_held() -> None:
    world = World()
    world.client(1, "req")
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.shell.broker.drain(world.shell.now_ms)
    world.shell.run()
    world.shell.restart()
    world.worker(3, "bob")
    world.offer(3)
    world.client(1, "req")
    world.worker(2, "ann")
    world.offer(2)
    world.confirmed(2, world.reply(2, [0]))
    assert world.replies(1) == [b"re: 0"]
    assert world.work(3) == []


def test_a_stranger_cannot_go_on_with_what_another_held_before_the_restart() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    world.shell.restart()
    world.worker(3, "bob")
    world.offer(3)
    assert world.refused(3, world.reply(3, [0])).code == "not_held"


def test_a_restart_knows_what_waits_what_is_delayed_and_how_often_it_was_tried() -> None:
    world = pair()
    world.offer(2, credit=2)
    world.request(1, b"a", b"b", b"c", b"d")
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    world.ack(2, [(1, 2)], WorkState.RETURNED, again_ms=5_000)
    world.shell.restart()
    world.worker(3, "bob")
    info = world.info(3)
    assert (info["waiting"], info["delayed"], info["held"]) == (3, 1, 0)
    world.offer(3)
    assert world.numbers(3) == [0, 2, 3], "what came back goes first"
    assert [task.work.attempts for task in world.work(3)] == [2, 1, 1]
    world.shell.wait(6_000)
    assert world.numbers(3) == [0, 2, 3, 1]
