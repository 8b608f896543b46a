"""Ends of requests: dead letters, and ends that the log refuses."""

from __future__ import annotations

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_py.broker.ready import AppendBundle
from tests.broker.service_world import LATER_MS, MANY, World, letters, logged, pair, poisoned


def test_a_request_that_kills_its_workers_becomes_a_dead_letter_with_the_reason() -> None:
    world = pair()
    poisoned(world, 3)
    (letter,) = letters(world, 1)
    assert letter.body == b"poison"
    assert letter.mail.why == "died: handed out 3 times"
    assert world.mail(1)[0].mail.about == [(b"k", 0, 1)]
    assert world.mail(1)[0].mail.why == letter.mail.why
    assert world.info(1)["waiting"] == 1, "the other of its batch waits on"
    assert world.events("request_dead")[0]["count"] == 1
    assert world.counter("requests_dead") == 1


def test_dead_letters_go_where_the_settings_say() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"dead_letters": "grave"}))
    world.offer(2)
    world.request(1, b"a")
    world.ack(2, [(0, 1)], WorkState.FAILED)
    assert [letter.body for letter in letters(world, 1, "grave")] == [b"a"]
    assert world.info(1)["dead_letters"] == "grave"


def test_a_dead_letter_that_the_log_refuses_is_kept_and_tried_again() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 1}))
    world.offer(2)
    world.request(1, b"a")
    world.shell.refuse["main"] = ("full", "no room")
    world.drop(2)
    del world.shell.refuse["main"]
    world.shell.wait(1_100)
    world.shell.wait(1_100)
    assert [letter.body for letter in letters(world, 1)] == [b"a"]
    assert world.queued() == 0


def test_a_request_of_too_many_attempts_goes_to_no_worker_while_the_log_refuses_its_end() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 1}))
    world.offer(2)
    world.request(1, b"a")
    world.worker(3)
    world.offer(3)
    refusals = [("full", "no room")]

    def judge(bundle: AppendBundle) -> tuple[str, str] | None:
        ends = any(b"request_dead" in bytes(batch.content) for batch in bundle.batches)
        return refusals.pop() if ends and refusals else None

    world.shell.judge = judge
    world.drop(2)
    assert not refusals
    world.shell.wait(1_100)
    assert world.numbers(3) == []
    assert [letter.body for letter in letters(world, 1)] == [b"a"]


def test_a_request_that_no_mailbox_of_dead_letters_takes_goes_to_no_worker_until_one_does() -> None:
    world = pair()
    world.ask(1, wire.EditMailbox(6, "s.dead", {"memory": True}))
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 1}))
    world.worker(3)
    world.offer(2)
    world.request(1, b"a", b"b")
    world.drop(2)
    world.offer(3)
    for _ in range(3):
        world.shell.wait(1_100)
    assert world.numbers(3) == []
    (event,) = world.events("dead_letter_refused")
    assert (event["service"], event["code"]) == ("s", "cross_ring")
    world.ask(1, wire.EditService(8, "s", {"dead_letters": "grave"}))
    world.shell.wait(1_100)
    assert [letter.body for letter in letters(world, 1, "grave")] == [b"a", b"b"]
    assert world.queued() == 0


def test_requests_beside_one_that_cannot_be_a_dead_letter_wait_once() -> None:
    world = pair()
    world.ask(1, wire.EditMailbox(6, "s.dead", {"memory": True}))
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 2}))
    world.offer(2, credit=1)
    world.request(1, b"a", b"b")
    world.drop(2)
    world.worker(3)
    world.offer(3)
    assert world.numbers(3) == [0, 1]
    world.drop(3)
    for _ in range(5):
        world.shell.wait(1_100)
    queues = world.service("s").by_subject.values()
    assert [queue.rows for queue in queues] == [1]


def test_a_request_that_is_to_be_a_dead_letter_goes_to_a_worker_if_it_may_again() -> None:
    world = pair()
    world.ask(1, wire.EditMailbox(6, "s.dead", {"memory": True}))
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 1}))
    world.worker(3)
    world.offer(2)
    world.request(1, b"a")
    world.drop(2)
    world.offer(3)
    world.ask(1, wire.EditService(8, "s", {"attempts_max": 2}))
    world.shell.wait(1_100)
    assert world.numbers(3) == [0]


def test_what_was_to_become_a_dead_letter_when_the_broker_died_becomes_one_after() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 1}))
    world.offer(2)
    world.request(1, b"a")
    shell, broker = world.shell, world.shell.broker
    broker.link_lost(2, shell.now_ms)
    shell._do(broker.take_ready())
    assert "RequestDead" not in logged(world)
    shell.restart()
    world.worker(3)
    world.offer(3)
    assert world.work(3) == []
    shell.wait(1_100)
    assert [letter.body for letter in letters(world, 3)] == [b"a"]


def test_rows_handed_out_before_an_end_that_the_log_refuses_are_handed_out_again() -> None:
    world = pair()
    world.request(1, b"a", key=b"k")
    shell, broker = world.shell, world.shell.broker
    command = wire.Offer(1, "s", ["all"], 10, MANY)
    broker.receive(2, "", [command], [], shell.now_ms)
    ready = broker.take_ready()
    service = world.service()
    (batch,) = service.batches.values()
    assert batch.moving == 1, "its hand-out is on its way"
    # The log may take the hand-out and refuse the end: the two can be in different bundles.
    ends = broker._services._ends.end(service, [(batch, 1)], "cancelled")
    ends.reserve()
    shell._do(ready)
    assert world.numbers(2) == []
    ends.undo("full", "no room", 0)
    shell.wait(1_100)
    shell.wait(LATER_MS)
    assert world.numbers(2) == [0]
    world.reply(2, [0])
    assert world.queued() == 0


def test_what_was_to_wait_for_years_leaves_nothing_when_it_ends() -> None:
    world = World()
    world.client(1, "desk")
    world.worker(2, "ann")
    world.offer(2, lease_ms=1_000)
    timers = world.shell.broker._services._registry.timers
    for turn in range(100):
        world.request(1, b"work", key=b"%d" % turn, timeout_ms=(1 << 52) + turn * 1_000)
        number = world.numbers(2)[-1]
        again_ms = (1 << 51) + turn * 1_000
        world.ack(2, [(number, number + 1)], WorkState.RETURNED, again_ms=again_ms)
        assert world.info(1)["delayed"] == 1
        world.ask(1, wire.CancelRequest(5, "s", b"%d" % turn, -1))
        assert world.queued() == 0
    assert world.info(1)["delayed"] == 0
    assert len(timers) == 0


def test_the_time_of_a_request_is_measured_until_its_completion_and_of_no_other_end() -> None:
    world = pair()
    world.request(1, b"a", b"b")
    world.offer(2)
    world.shell.now_ms += 7
    world.reply(2, [0])
    world.ack(2, [(0, 2)], WorkState.FAILED)
    measured = world.shell.broker.latencies["request"]
    assert sum(measured["counts"]) == 1
    assert measured["sum_s"] == 0.007
