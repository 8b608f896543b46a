"""WORK: how the requests of a hand-out get to their worker, also when bodies are read back."""

from __future__ import annotations

import pytest

from malamute_protocol.commands import WorkState
from malamute_py.broker.ready import BodiesFound
from malamute_py.broker.services.registry import RETRY_MS
from tests.broker.service_world import pair


def test_few_rows_of_a_large_batch_are_extracted_and_many_go_as_they_came() -> None:
    world = pair()
    world.request(1, *[b"%03d" % n * 100 for n in range(100)])
    world.offer(2, credit=2)
    first = world.work(2)[0].work
    assert first.rows is None
    assert world.numbers(2) == [0, 1]
    world.credit(2, 100)
    assert world.work(2)[2].work.rows is not None
    assert world.numbers(2) == list(range(100))


def test_a_body_that_is_in_memory_no_more_is_read_back() -> None:
    world = pair(mail_hot_bytes=1)
    for n in range(5):
        world.request(1, b"%d" % n * 100)
    world.offer(2)
    assert [task.body for task in world.work(2)] == [b"%d" % n * 100 for n in range(5)]


@pytest.mark.parametrize("state", [WorkState.RELEASED, WorkState.RECEIVED])
def test_a_request_that_is_acknowledged_while_its_body_is_read_is_sent_once(state: int) -> None:
    world = pair(mail_hot_bytes=1, read=False)
    world.request(1, b"a", b"b")
    world.request(1, b"c")
    world.offer(2, credit=4)
    (base,) = (batch.base for batch in world.service().batches.values() if batch.row.put.count == 2)
    # The worker names a request that is not sent yet; released, it comes again at once.
    world.ack(2, [(base, base + 1)], state)
    for _ in range(6):
        world.shell.answer_bodies()
        world.shell.run()
    assert [(task.body, task.work.attempts) for task in world.work(2)] in (
        [(b"a", 1), (b"b", 1), (b"c", 1)],
        [(b"b", 1), (b"c", 1), (b"a", 1)],
    )
    # A hand-out of which nothing was sent used no credit.
    world.request(1, b"d")
    world.request(1, b"e")
    for _ in range(6):
        world.shell.answer_bodies()
        world.shell.run()
    assert [task.body for task in world.work(2)][3:] == [b"d"]


def test_a_request_whose_body_cannot_be_read_ends_and_its_requester_is_told() -> None:
    world = pair(mail_hot_bytes=1, read=False)
    world.request(1, b"a" * 100, key=b"k")
    world.request(1, b"b" * 100)
    world.offer(2)
    world.shell.rings["main"] = [
        held for held in world.shell.rings["main"] if held.base != 0 or held.control_kind
    ]
    world.shell.answer_bodies()
    world.shell.run()
    world.shell.answer_bodies()
    world.shell.run()
    assert world.counter("requests_lost") == 1
    assert [task.body for task in world.work(2)] == [b"b" * 100]
    assert world.mail(1)[0].mail.why == "lost"


@pytest.mark.parametrize("behind", [False, True])
def test_a_request_whose_body_could_not_be_read_is_read_again_and_that_is_no_attempt(
    behind: bool,
) -> None:
    """It ended as lost, though its body was in the log. behind: an earlier one is read longer."""
    world = pair(mail_hot_bytes=1, read=False, mail_read_bytes=16_000)
    bodies = [b"a" * 3_000, b"b" * 3_000]
    for body in bodies:
        world.request(1, body)
    world.request(1, b"z")
    world.offer(2, credit=3)
    reads = list(world.shell.bodies)
    failing = reads[1] if behind else reads[0]
    world.shell.bodies.clear()
    world.shell.broker.bodies(BodiesFound(failing.token, {}, failed="the disk does not answer"))
    world.shell.run()
    world.shell.bodies.extend(read for read in reads if read is not failing)
    for _ in range(6):
        world.shell.answer_bodies()
        world.shell.run()
    assert world.counter("requests_lost") == 0
    assert world.counter("request_reads_failed") == 1
    world.shell.wait(RETRY_MS)
    for _ in range(6):
        world.shell.answer_bodies()
        world.shell.run()
    got = [(task.body, task.work.attempts) for task in world.work(2)]
    assert sorted(got) == [(bodies[0], 1), (bodies[1], 1), (b"z", 1)]


def test_a_request_that_could_not_be_read_goes_back_once_the_log_takes_that() -> None:
    """Its worker, to which nothing was sent, held it until its lease ended, as an attempt."""
    world = pair(mail_hot_bytes=1, read=False)
    world.request(1, b"a" * 100)
    world.request(1, b"z")
    world.offer(2, credit=2)
    shell = world.shell
    (read,) = shell.bodies
    shell.bodies.clear()
    shell.refuse["main"] = ("full", "no room")
    shell.broker.bodies(BodiesFound(read.token, {}, failed="the disk does not answer"))
    shell.run()
    shell.refuse.clear()
    for _ in range(3):
        shell.wait(RETRY_MS)
        shell.answer_bodies()
        shell.run()
    got = sorted((task.body, task.work.attempts) for task in world.work(2))
    assert got == [(b"a" * 100, 1), (b"z", 1)]
    assert world.counter("leases_expired") == 0
