"""Which request goes next, and to which worker."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_protocol.encode import encode
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.framing import check_command
from malamute_py.broker import Broker
from malamute_py.broker.services.dispatch import (
    OVERTAKEN_MAX,
    PREFETCH_MAX,
    PREFETCH_MS,
    SCANNED_AT_ONCE,
    SLOW_LOOK,
    SubjectQueue,
)
from malamute_py.broker.services.requests import SLOW_SUBJECTS_MAX
from malamute_py.matcher import Index
from tests.broker.service_world import World, pair


def test_requests_wait_for_a_worker_and_come_in_their_order() -> None:
    world = pair()
    for body in (b"a", b"b", b"c"):
        world.request(1, body)
    assert world.info(1)["waiting"] == 3
    world.offer(2)
    assert [task.body for task in world.work(2)] == [b"a", b"b", b"c"]
    assert world.info(1)["held"] == 3


def test_a_worker_gets_no_more_than_its_credit() -> None:
    world = pair()
    world.offer(2, credit=2)
    world.request(1, *[b"%d" % n for n in range(5)])
    assert world.numbers(2) == [0, 1]
    world.credit(2, 3)
    assert world.numbers(2) == [0, 1, 2]
    world.credit(2, 3)
    assert world.numbers(2) == [0, 1, 2], "credit is absolute"
    world.credit(2, 10)
    assert world.numbers(2) == [0, 1, 2, 3, 4]


def test_a_worker_without_credit_is_not_ready_even_with_nothing_in_hand() -> None:
    world = pair()
    world.offer(2, credit=0)
    world.request(1, b"a")
    assert world.work(2) == []


def test_one_request_beyond_the_credit_of_bytes_is_allowed_to_an_empty_hand() -> None:
    world = pair()
    world.offer(2, credit=10, size=1)
    world.request(1, b"a" * 1000)
    world.request(1, b"b" * 1000)
    assert world.numbers(2) == [0]
    world.reply(2, [0])
    assert world.numbers(2) == [0, 1]


def test_a_batch_is_shared_among_the_ready() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.offer(3)
    world.request(1, *[b"%d" % n for n in range(5)])
    assert sorted(world.numbers(2) + world.numbers(3)) == [0, 1, 2, 3, 4]
    assert {len(world.numbers(2)), len(world.numbers(3))} == {2, 3}


def test_the_worker_that_holds_the_fewest_requests_is_next() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.request(1, b"a")
    world.request(1, b"b")
    world.offer(3)
    for body in (b"c", b"d"):
        world.request(1, body)
    assert world.numbers(2) == [0, 1]
    assert world.numbers(3) == [2, 3]


def test_equals_take_turns() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.offer(3)
    for body in (b"a", b"b", b"c", b"d"):
        world.request(1, body)
    assert len(world.numbers(2)) == len(world.numbers(3)) == 2


def answer_all(world: World, wait_ms: int) -> None:
    """Let two workers answer what they hold, some time after they got it."""
    world.shell.wait(wait_ms)
    for worker in (2, 3):
        if held := world.numbers(worker)[world.done.get(worker, 0) :]:
            world.reply(worker, held)
            world.done[worker] = len(world.numbers(worker))


def test_a_worker_that_does_much_in_an_instant_gets_more_than_its_share() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.offer(3)
    for _ in range(6):
        world.request(1, *[b"q"] * 16)
        answer_all(world, 0)
    before = len(world.numbers(2)), len(world.numbers(3))
    world.request(1, *[b"x"] * 8)
    after = len(world.numbers(2)), len(world.numbers(3))
    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 8]


def test_a_lone_request_does_not_show_how_many_a_worker_does() -> None:
    world = pair()
    world.offer(2)
    for _ in range(10):
        world.request(1, b"q")
        world.reply(2, world.numbers(2)[-1:])
    assert world.service().prefetch <= PREFETCH_MS


def test_slow_work_is_shared_out_evenly_again_whatever_was_quick_before() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.offer(3)
    for wait_ms in (*[0] * 8, *[100] * 20):
        world.request(1, *[b"q"] * 8)
        answer_all(world, wait_ms)
    before = len(world.numbers(2)), len(world.numbers(3))
    world.request(1, *[b"x"] * 8)
    after = len(world.numbers(2)), len(world.numbers(3))
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 4]


def test_the_prefetch_is_what_a_worker_does_in_its_time() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    service = world.service()
    for count, took_ms, prefetch in (
        (64, 0, 2), (64, 0, 4), (2, PREFETCH_MS, 3), (64, 0, 6), (64, 0, 12), (64, 0, 24),
        (64, 0, 48), (64, PREFETCH_MS, PREFETCH_MAX), (1, 10 * PREFETCH_MS, 48),
    ):  # fmt: skip
        service.measure(count, took_ms)
        assert service.prefetch == prefetch


def test_a_pattern_takes_its_subjects_and_leaves_the_others_waiting() -> None:
    world = pair()
    world.offer(2, pattern=["topic", "air.*"])
    world.request(1, b"a", b"b", b"c", subjects=["air.port", "sea.port", "air.line"])
    assert world.numbers(2) == [0, 2]
    assert world.info(1)["waiting"] == 1
    world.worker(3, "bob")
    world.offer(3, pattern=["topic", "sea.*"])
    assert world.numbers(3) == [1]


def test_requests_that_no_worker_takes_hold_up_no_others() -> None:
    world = pair()
    for n in range(50):
        world.request(1, b"x", subject=f"lonely.{n}")
    world.offer(2, pattern=["topic", "wanted"])
    world.request(1, b"y", subject="wanted")
    assert [task.body for task in world.work(2)] == [b"y"]


@pytest.mark.moderate
def test_a_new_pattern_finds_what_waits_however_many_subjects_there_are() -> None:
    world = pair()
    for n in range(30):
        world.request(1, *[b"x"] * 100, subjects=[f"{n}.{m}" for m in range(100)])
    world.offer(2, pattern=["topic", "29.7"])
    assert [task.number for task in world.work(2)] == [2907]


def test_what_waits_longest_goes_first_over_all_subjects() -> None:
    world = pair()
    for subject in ("b", "a", "b", "c", "a"):
        world.request(1, subject.encode(), subject=subject)
    world.offer(2)
    assert world.numbers(2) == [0, 1, 2, 3, 4]


@pytest.mark.moderate
def test_a_thousand_offers_of_one_service_share_what_comes() -> None:
    world = pair()
    for number in range(1, 1001):
        world.offer(2, number=number, credit=1)
    world.request(1, *[b"x"] * 1000)
    assert all(len(world.work(2, number)) == 1 for number in range(1, 1001))


@pytest.mark.moderate
def test_a_thousand_different_patterns_each_get_their_own() -> None:
    world = pair()
    for number in range(1, 1001):
        world.offer(2, pattern=["topic", f"t.{number}"], number=number)
    for number in (1, 500, 1000):
        world.request(1, b"x", subject=f"t.{number}")
    assert [number for number in range(1, 1001) if world.work(2, number)] == [1, 500, 1000]


@pytest.mark.moderate
def test_an_offer_that_slept_while_others_did_all_the_work_gets_what_comes_next() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(3, pattern=["prefix", "t"], credit=0)
    for n in range(30):
        world.request(1, *[b"x"] * 100, subjects=[f"t.{n}.{m}" for m in range(100)])
    world.offer(2, credit=3_000)
    assert len(world.work(2)) == 3_000
    world.credit(3, 1)
    world.request(1, b"next", subject="t.next")
    assert [task.body for task in world.work(3)] == [b"next"]


def test_queues_of_subjects_do_not_gather_once_they_are_empty() -> None:
    world = pair()
    world.offer(2, credit=1 << 30)
    for n in range(40):
        world.request(1, *[b"x"] * 100, subjects=[f"{n}.{m}" for m in range(100)])
        world.ack(2, [(n * 100, n * 100 + 100)], WorkState.COMPLETED)
    assert len(world.service().by_subject) <= 1_024 + 100
    assert all(isinstance(queue, SubjectQueue) for queue in world.service().by_subject.values())


@pytest.mark.moderate
@pytest.mark.parametrize("late", [False, True])
def test_subjects_are_compared_with_expressions_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """A REQUEST of 1,024 subjects for 64 workers by expressions took one turn of 0.7 s."""
    world = World()
    world.client(1)
    world.worker(2)
    subjects = [f"{at}.{'ab'[at % 2]}" for at in range(1_024)]
    looks, most, take, match = [0], [0], Broker.take_ready, Index.match

    def taken(self: Broker) -> Any:
        most[0], looks[0] = max(most[0], looks[0]), 0
        return take(self)

    def matched(self: Index, keys: Any, fields: Any) -> Any:
        looks[0] += 1
        return match(self, keys, fields)

    def offers() -> None:
        world.offer(2, pattern=["regex", r"[0-9]+\.a"], number=1)
        world.offer(2, pattern=["regex", r"[0-9]+\.b"], number=2)

    if not late:
        offers()
    monkeypatch.setattr(Broker, "take_ready", taken)
    monkeypatch.setattr(Index, "match", matched)
    world.request(1, *[b"x"] * 1_024, subjects=subjects)
    if late:
        offers()
    assert 0 < most[0] <= 2 * SCANNED_AT_ONCE // SLOW_LOOK
    for number, kind in ((1, 0), (2, 1)):
        first = min(world.numbers(2, 1))
        held = sorted(at - first for at in world.numbers(2, number))
        assert held == [at for at in range(1_024) if at % 2 == kind][: len(held)]
        assert len(held) >= 500
    asked = wire.Request("s", 77, need_workers=True)
    many = [f"{5_000 + at}.a" for at in range(SLOW_SUBJECTS_MAX + 1)]
    world.shell.send(1, asked, frames=[encode([b"x"] * len(many), subject=many)])
    assert world.shell.peers[1].last(wire.Refused).code == "too_large"
    world.shell.send(1, asked, frames=[encode([b"x"] * 2, subject=["6000.a", "6000.c"])])
    assert world.shell.peers[1].last(wire.Refused).code == "no_workers"


# --- priorities --------------------------------------------------------------------------------


def bodies(world: World, link: int = 2) -> list[bytes]:
    return [task.body for task in world.work(link)]


def test_a_higher_priority_goes_first_and_each_in_its_order() -> None:
    world = pair()
    for body, priority in ((b"a", 0), (b"b", 1), (b"c", 9), (b"d", 1), (b"e", 0), (b"f", 9)):
        world.request(1, body, priority=priority, subject=body.decode())
    world.offer(2)
    assert bodies(world) == [b"c", b"f", b"b", b"d", b"a", b"e"]


def test_a_priority_counts_within_a_subject_as_among_all_that_a_pattern_takes() -> None:
    world = pair()
    for body, subject, priority in ((b"a", "x", 0), (b"b", "y", 0), (b"c", "x", 5), (b"d", "y", 2)):
        world.request(1, body, subject=subject, priority=priority)
    world.offer(2, pattern=["topic", "y"])
    world.worker(3)
    world.offer(3)
    assert (bodies(world, 2), bodies(world, 3)) == ([b"d", b"b"], [b"c", b"a"])


def test_a_ready_worker_gets_a_request_with_a_priority_in_the_bundle_that_logs_it() -> None:
    world = pair()
    world.offer(2)
    before = len(world.shell.rings["main"])
    world.request(1, b"a", priority=9)
    assert bodies(world) == [b"a"]
    assert len(world.shell.rings["main"]) - before == 2  # its content, and all changes


def test_a_new_request_overtakes_none_with_a_priority_that_waits() -> None:
    world = pair(hand_outs_max=1)
    for n in range(3):
        world.request(1, b"%d" % n, priority=1)
    shell, broker = world.shell, world.shell.broker
    content = encode([b"new"], subject="other")
    # The worker takes all of them; a turn hands out one of those that wait.
    for command, frames in (
        (wire.Offer(1, "s", ["all"], 10, 1 << 40, 0), []), (wire.Request("s", 9), [content]),
    ):  # fmt: skip
        broker.receive(2, "", [command], frames, shell.now_ms)
    shell.run()
    assert bodies(world) == [b"0", b"1", b"2", b"new"]
    world.request(1, b"next")
    assert bodies(world)[-1] == b"next"
    assert world.service().direct is world.service().offers


def test_what_comes_back_keeps_its_priority() -> None:
    world = pair(backoff_ms=100)
    world.request(1, b"low")
    world.request(1, b"high", priority=3)
    world.offer(2, credit=1)
    assert bodies(world) == [b"high"]
    world.request(1, b"higher", priority=4)
    world.shell.broker.link_lost(2, world.shell.now_ms)
    world.shell.run()
    world.shell.wait(200)
    world.worker(3)
    world.offer(3)
    assert bodies(world, 3) == [b"higher", b"high", b"low"]


def test_a_restart_and_a_requeue_keep_priorities() -> None:
    world = pair()
    world.ask(1, wire.EditService(1, "s", {"attempts_max": 1}))
    world.request(1, b"low")
    world.request(1, b"high", priority=3)
    world.offer(2, credit=1)
    world.ack(2, [(1, 2)], WorkState.FAILED)
    world.shell.restart()
    world.client(1)
    assert world.ask(1, wire.Requeue(2, "s", [])) == {"count": 1}
    world.worker(3)
    world.offer(3)
    assert bodies(world, 3) == [b"high", b"low"]


def test_a_priority_counts_after_a_delay_too() -> None:
    world = pair()
    world.request(1, b"low", delay_ms=100)
    world.request(1, b"high", delay_ms=100, priority=1)
    world.shell.wait(110)
    world.offer(2)
    assert bodies(world) == [b"high", b"low"]


def test_no_priority_starves_the_others() -> None:
    world = pair()
    world.request(1, b"oldest")
    world.request(1, b"second", priority=1)
    world.offer(2, credit=0)
    got: list[bytes] = []
    for n in range(3 * OVERTAKEN_MAX):
        world.request(1, b"%d" % n, priority=9)
        world.credit(2, n + 1)
        got = bodies(world)
    assert got.index(b"oldest") == OVERTAKEN_MAX
    assert got.index(b"second") == 2 * OVERTAKEN_MAX + 1
    assert len(got) == 3 * OVERTAKEN_MAX


def test_the_turn_of_a_starving_request_waits_for_enough_credit_in_bytes() -> None:
    world = pair()
    world.request(1, b"large" * 100_000)
    world.offer(2, credit=0, size=0)
    small = 0
    for n in range(OVERTAKEN_MAX + 5):
        world.request(1, b"%d" % n, priority=9)
        small += 1_000
        world.credit(2, n + 1, size=small)
    assert b"large" * 100_000 not in bodies(world)
    waits = len(bodies(world))
    # No later request takes the turn away.
    assert waits == OVERTAKEN_MAX
    world.credit(2, 1_000, size=small + 2_000_000)
    assert bodies(world)[waits] == b"large" * 100_000


@pytest.mark.moderate
def test_queues_with_priorities_do_not_gather_once_they_are_empty() -> None:
    world = pair()
    for n in range(1_200):
        world.request(1, b"a", subject=f"x.{n}", priority=1 + n % 9)
    world.offer(2, credit=2_000)
    assert len(bodies(world)) == 1_200
    service = world.service()
    assert len(service.by_subject) <= 1_024
    assert not service.prior
    (workers,) = service.by_pattern.values()
    assert not workers.unfinished or workers.first() is None


@pytest.mark.parametrize("priority", [-1, 10])
def test_a_priority_out_of_range_is_no_command(priority: int) -> None:
    with pytest.raises(LocalProtocolError, match="priority"):
        check_command(wire.Request("s", 1, priority=priority))
