"""Hand-outs: which worker gets which request, and in which order."""

from __future__ import annotations

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.service_world import LATER_MS, pair


def test_a_request_is_handed_out_in_the_bundle_that_logs_it() -> None:
    world = pair()
    world.offer(2)
    bundles = len([one for ready in world.shell.readies for one in ready.appends])
    world.request(1, b"a", b"b", key=b"k")
    appends = [one for ready in world.shell.readies for one in ready.appends][bundles:]
    assert len(appends) == 1, "content, put and hand-out share one bundle"
    assert [task.body for task in world.work(2)] == [b"a", b"b"]
    work = world.work(2)[0].work
    assert (work.key, work.attempts, work.rows) == (b"k", 1, None)


def test_bytes_of_credit_are_exact_whatever_part_of_a_batch_is_sent() -> None:
    world = pair()
    world.offer(2, credit=10, size=7_500)
    world.request(1, *[b"x" * 100] * 64)
    size = world.service().batches[0].row.put.size
    assert len(world.work(2)) == 10
    assert world.counter("work_bytes_out") <= size
    world.credit(2, 1_000, size=7_500)
    (offer,) = world.service().offers
    assert offer.left_bytes == 7_500 - world.counter("work_bytes_out")
    assert len(world.work(2)) == 10, "the batch does not fit what is left"
    world.reply(2, list(range(10)))
    assert len(world.work(2)) == 11, "one is allowed to an empty hand"
    world.credit(2, 1_000, size=1_000_000)
    assert len(world.work(2)) == 64
    assert offer.left_bytes == 1_000_000 - world.counter("work_bytes_out")


def test_rows_of_one_batch_that_waited_by_subject_leave_as_one_work() -> None:
    world = pair()
    world.request(1, *[b"x"] * 9, subjects=["a", "b", "c"] * 3)
    world.offer(2)
    assert len(world.shell.peers[2].of(wire.Work)) == 1
    assert world.numbers(2) == list(range(9))


def test_a_step_hands_out_a_bounded_number_and_the_next_goes_on() -> None:
    world = pair(hand_outs_max=3)
    for n in range(20):
        world.request(1, b"%d" % n)
    world.offer(2)
    assert world.numbers(2) == list(range(20))


def test_a_worker_that_dies_before_its_work_is_logged_leaves_it_to_others() -> None:
    world = pair()
    world.offer(2)
    shell, broker = world.shell, world.shell.broker
    content = encode([b"a"], subject="x")
    broker.receive(1, "", [wire.Request("s", 5)], [content], shell.now_ms)
    ready = broker.take_ready()
    broker.link_lost(2, shell.now_ms)
    shell._do(ready)
    shell.run()
    world.worker(3, "bob")
    world.offer(3)
    shell.wait(LATER_MS)
    assert world.numbers(3) == [0]
    assert world.service().held == 1


def test_a_hand_out_that_the_log_refuses_has_not_happened() -> None:
    world = pair()
    world.request(1, b"a", b"b")
    world.offer(2, credit=0)
    world.shell.refuse["main"] = ("full", "no room")
    world.credit(2, 5)
    assert world.work(2) == []
    row = next(iter(world.shell.broker._shard.queues.requests.values()))
    assert (row.waiting, row.holds) == (3, [])
    del world.shell.refuse["main"]
    world.shell.wait(2_000)
    assert world.numbers(2) == [0, 1]
    assert world.work(2)[0].work.attempts == 1
    world.request(1, *[b"x"] * 9)
    assert len(world.numbers(2)) == 5, "its credit is what it was"


def test_a_request_that_the_log_refuses_costs_no_worker_credit() -> None:
    world = pair()
    world.offer(2, credit=2)
    world.shell.refuse["main"] = ("full", "no room")
    assert world.refused(1, world.request(1, b"a", b"b", key=b"k")).code == "full"
    del world.shell.refuse["main"]
    world.confirmed(1, world.request(1, b"a", b"b", key=b"k"))
    assert [task.body for task in world.work(2)] == [b"a", b"b"]
    assert world.service().reserved_rows == 0


def test_requests_wait_for_the_room_of_a_link() -> None:
    world = pair()
    world.offer(2)
    broker = world.shell.broker
    world.shell.blocked.add(2)
    broker.blocked(2)
    world.request(1, b"a")
    assert world.info(1)["waiting"] == 1
    world.shell.blocked.discard(2)
    broker.writable(2)
    world.shell.run()
    assert world.numbers(2) == [0]
