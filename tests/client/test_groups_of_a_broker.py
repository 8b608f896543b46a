"""Members of groups, through both shells, against the broker."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from malamute_protocol.errors import BrokerRefused, Timeout
from malamute_py import PassedOverNotice
from malamute_py.embedded import EmbeddedBroker
from tests.client.shells import FAST, SHELLS, Connect
from tests.waiting import WAIT_MS, WAIT_S

COUNT = 3000


async def filled(shell: Any, count: int = COUNT, subjects: int = 7) -> None:
    """A stream of so many records, in batches of 100."""
    for first in range(0, count, 100):
        numbers = range(first, min(first + 100, count))
        await shell.do(
            "publish_many",
            "s",
            [b"%d" % n for n in numbers],
            subjects=[f"k{n % subjects}" for n in numbers],
        )


def joined(shell: Any, **options: Any) -> Any:
    return shell.client.group("s", "readers", **{"start": "earliest", **options})


async def drained(shell: Any, member: Any, seen: list[int], all_seen: list[int], goal: int) -> None:
    """Take, and acknowledge, until the members together have seen so many."""
    while len(all_seen) < goal:
        try:
            batch = await shell.call(member.next_batch, 50)
        except Timeout:
            continue
        if batch is None:
            return
        numbers = [record.offset for record in batch]
        seen += numbers
        all_seen += numbers
        assert await shell.call(member.ack, batch)


@pytest.mark.moderate
async def test_members_share_the_records_and_each_comes_once(shell: Any) -> None:
    await filled(shell)
    members = [joined(shell, credit_records=100) for _ in range(3)]
    seen: list[list[int]] = [[] for _ in members]
    all_seen: list[int] = []
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(
            *(
                drained(shell, member, mine, all_seen, COUNT)
                for member, mine in zip(members, seen, strict=True)
            )
        )
    assert sorted(all_seen) == list(range(COUNT))
    assert all(seen)
    facts = await shell.do("group_info", "s", "readers")
    assert (facts.next, facts.lag, facts.done) == (COUNT, 0, 0)
    assert [each.held for each in facts.members] == [0, 0, 0]
    for member in members:
        await shell.call(member.close)


@pytest.mark.moderate
async def test_a_key_stays_with_its_member_and_in_order(shell: Any) -> None:
    await filled(shell)
    members = [joined(shell, kind="keyed", credit_records=200) for _ in range(3)]
    for member in members:
        await shell.call(member.accepted)
    seen: list[list[int]] = [[] for _ in members]
    all_seen: list[int] = []
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(
            *(
                drained(shell, member, mine, all_seen, COUNT)
                for member, mine in zip(members, seen, strict=True)
            )
        )
    assert sorted(all_seen) == list(range(COUNT))
    assert all(mine == sorted(mine) for mine in seen)
    # A key goes to another member only when the members change: here when they came.
    for member in members:
        await shell.call(member.close)


@pytest.mark.moderate
async def test_one_at_a_time_holds_an_exclusive_group(shell: Any) -> None:
    await filled(shell, 100)
    first, second = joined(shell, kind="exclusive"), joined(shell, kind="exclusive")
    await shell.call(second.accepted)
    batch = await shell.call(first.next_batch, WAIT_MS)
    assert batch is not None
    with pytest.raises(Timeout):
        await shell.call(second.next_batch, 50)
    await shell.call(first.close)
    again = await shell.call(second.next_batch, WAIT_MS)
    assert [record.offset for record in again][:1] == [0]
    await shell.call(second.close)


@pytest.mark.moderate
async def test_what_a_member_that_leaves_did_not_acknowledge_goes_to_another(shell: Any) -> None:
    await filled(shell, 100)
    leaver = joined(shell, ack="manual")
    batch = await shell.call(leaver.next_batch, WAIT_MS)
    offsets = [record.offset for record in batch]
    assert await shell.call(leaver.ack, next(iter(batch)))
    await shell.call(leaver.close)
    heir = joined(shell, ack="manual")
    rest = [record.offset for record in await shell.take(heir, 99)]
    assert rest[: len(offsets) - 1] == offsets[1:]
    assert await shell.call(leaver.ack, batch) is False
    await shell.call(heir.close)


async def test_records_are_done_when_the_next_is_asked_for_and_at_the_end(shell: Any) -> None:
    await filled(shell, 100)
    member = joined(shell)
    records = await shell.take(member, 100)
    assert [record.offset for record in records] == list(range(100))
    assert (await shell.do("group_info", "s", "readers")).next < 100
    if shell.kind == "asyncio":
        await member.__aexit__(None, None, None)
    else:
        await asyncio.to_thread(member.__exit__, None, None, None)
    async with asyncio.timeout(WAIT_S):
        while (await shell.do("group_info", "s", "readers")).next != 100:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_what_was_handed_over_before_an_error_is_not_done(shell: Any) -> None:
    await filled(shell, 10)
    member = joined(shell)
    await shell.take(member, 3)
    if shell.kind == "asyncio":
        await member.__aexit__(ValueError, ValueError("ours"), None)
    else:
        await asyncio.to_thread(member.__exit__, ValueError, ValueError("ours"), None)
    heir = joined(shell)
    [record] = await shell.take(heir, 1)
    assert record.offset == 2
    await shell.call(heir.close)


@pytest.mark.moderate
async def test_a_member_that_nobody_holds_any_more_has_left(shell: Any) -> None:
    await filled(shell, 10)
    await shell.take(joined(shell, ack="manual"), 3)
    gc.collect()
    heir = joined(shell, ack="manual")
    # What was dropped is noticed with the client's next turn.
    await shell.do("broker_info")
    assert [record.offset for record in await shell.take(heir, 10)] == list(range(10))
    await shell.call(heir.close)


@pytest.mark.moderate
async def test_a_record_that_is_wanted_again_comes_again(shell: Any) -> None:
    await filled(shell, 5)
    member = joined(shell, ack="manual")
    records = await shell.take(member, 5)
    assert await shell.call(member.nack, records[2])
    for record in (*records[:2], *records[3:]):
        assert await shell.call(member.ack, record)
    [again] = await shell.take(member, 1)
    assert again.offset == 2
    assert await shell.call(member.ack, again)
    assert (await shell.do("group_info", "s", "readers")).next == 5
    await shell.call(member.close)


async def test_rows_left_in_a_batch_are_there_for_the_next_batch(shell: Any) -> None:
    await shell.do("publish_many", "s", [b"%d" % n for n in range(10)])
    member = joined(shell)
    await shell.take(member, 4)
    rest = await shell.call(member.next_batch, WAIT_MS)
    assert rest.numbers == [4, 5, 6, 7, 8, 9]
    assert await shell.call(member.ack, rest)
    assert (await shell.do("group_info", "s", "readers")).next == 10
    await shell.call(member.close)


async def test_another_kind_or_pattern_than_the_groups_is_refused(shell: Any) -> None:
    await filled(shell, 5)
    member = joined(shell)
    await shell.call(member.accepted)
    for wrong in ({"kind": "keyed"}, {"pattern": "k1"}):
        with pytest.raises(BrokerRefused) as caught:
            await shell.call(joined(shell, **wrong).accepted)
        assert caught.value.code == "bad_setting"
    await shell.call(member.close)


async def test_a_step_takes_a_record_and_publishes_what_became_of_it(shell: Any) -> None:
    await filled(shell, 50)
    member = joined(shell, ack="manual")
    batch = await shell.call(member.next_batch, WAIT_MS)
    step = shell.client.atomic()
    step.ack(batch)
    step.publish_many("out", [body + b"!" for body in batch.bodies()])
    await shell.call(step.commit)
    out = await shell.take(shell.client.subscribe("out", start="earliest", until="tail"), 99)
    done = (await shell.do("group_info", "s", "readers")).next
    assert [record.body for record in out] == [b"%d!" % n for n in range(done)]
    assert done == len(batch)
    assert await shell.call(member.ack, batch) is False
    await shell.call(member.close)


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_member_goes_on_after_the_broker_was_restarted(
    kind: Any, tmp_path: Path, endpoint: str
) -> None:
    def start() -> EmbeddedBroker:
        return EmbeddedBroker(tmp_path, listen=[endpoint]).start()

    broker = await asyncio.to_thread(start)
    shell = kind()
    await shell.connect(endpoint, **FAST)
    try:
        await filled(shell, 1000)
        member = joined(shell, ack="manual", credit_records=200)
        seen: Counter[int] = Counter()
        async with asyncio.timeout(WAIT_S):
            while sum(seen.values()) < 400:
                batch = await shell.call(member.next_batch)
                seen.update(batch.numbers)
                await shell.call(member.ack, batch)
            kept = await shell.call(member.next_batch)
            await asyncio.to_thread(broker.stop)
            broker = await asyncio.to_thread(start)
            while len(seen) < 1000 - len(kept.numbers):
                batch = await shell.call(member.next_batch)
                seen.update(batch.numbers)
                await shell.call(member.ack, batch)
            # What the reader had in hand all the time was not handed over again.
            assert not set(kept.numbers) & set(seen)
            assert await shell.call(member.ack, kept)
            seen.update(kept.numbers)
            while (await shell.do("group_info", "s", "readers")).next != 1000:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert set(seen.values()) == {1}
    finally:
        await shell.do("close", flush_ms=0)
        await asyncio.to_thread(broker.stop)


@pytest.mark.moderate
@pytest.mark.parametrize("of", ["shared", "keyed", "exclusive"])
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_member_that_stands_still_over_a_restart_is_not_given_its_record_unseen(
    kind: Any, of: str, tmp_path: Path, endpoint: str
) -> None:
    def start() -> EmbeddedBroker:
        return EmbeddedBroker(tmp_path, listen=[endpoint]).start()

    broker = await asyncio.to_thread(start)
    shell, other = kind(), kind()
    await shell.connect(endpoint, **FAST)
    await other.connect(endpoint, **FAST)
    try:
        await shell.do("publish", "s", b"0")
        # A lease that ends before a busy machine has given the program its record is an attempt.
        options = {"kind": of, "settings": {"lease_ms": 400, "attempts_max": 2}}
        member = joined(shell, ack="manual", **options)
        held = await shell.call(member.next_batch, WAIT_MS)
        async with asyncio.timeout(WAIT_S):
            while not (await other.do("group_info", "s", "readers")).attempts:  # noqa: ASYNC110
                await asyncio.sleep(0)
            while not member._membership.passed_over:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.to_thread(broker.stop)
            broker = await asyncio.to_thread(start)
            # The second call is answered on a link that was there a while.
            await shell.do("group_info", "s", "readers")
            await asyncio.sleep(1.2)
            facts = await other.do("group_info", "s", "readers")
            assert (facts.attempts, facts.dead) == ([(1, 1)], 0)
            # The place of an exclusive group is kept for a while.
            assert sum(one.held for one in facts.members) == 0
            # Too late for the hand-out that it is of, and made good on the next one.
            assert await shell.call(member.ack, held) is False
            while (await other.do("group_info", "s", "readers")).next != 1:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await shell.do("publish", "s", b"1")
            held = await shell.call(member.next_batch, WAIT_MS)
            assert held.numbers == [1]
            assert await shell.call(member.ack, held)
        assert (await other.do("group_info", "s", "readers")).dead == 0
    finally:
        await shell.do("close", flush_ms=0)
        await other.do("close", flush_ms=0)
        await asyncio.to_thread(broker.stop)


@pytest.mark.moderate
async def test_a_program_whose_wait_for_records_is_over_stands_still_until_its_next_call(
    shell: Any,
) -> None:
    await shell.do("publish", "s", b"0")
    member = joined(shell, ack="manual", settings={"lease_ms": 100})
    held = await shell.call(member.next_batch, WAIT_MS)
    with pytest.raises(Timeout):
        await shell.call(member.next_batch, 0)
    if shell.kind == "asyncio":
        waiting = asyncio.create_task(member.next_batch(WAIT_MS))
        await asyncio.sleep(0)
        assert member._membership.waits
        waiting.cancel()
        await asyncio.wait([waiting])
    async with asyncio.timeout(WAIT_S):
        while not member._membership.passed_over:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert member._membership.stands_still
    with pytest.raises(Timeout):
        await shell.call(member.next_batch, 0)
    assert not member._membership.stands_still
    assert await shell.call(member.ack, held) is False
    await shell.call(member.close)


# --- attempts and dead letters --------------------------------------------------------------------


@pytest.mark.moderate
async def test_a_poison_record_becomes_a_dead_letter_and_comes_again_when_it_is_requeued(
    shell: Any,
) -> None:
    await filled(shell, 4)
    member = joined(shell, ack="manual", settings={"attempts_max": 2})
    batch = await shell.call(member.next_batch, WAIT_MS)
    records = list(batch)
    assert batch.attempts == 1
    await shell.call(member.ack, records[0])
    assert await shell.call(member.nack, records[1])
    again = await shell.call(member.next_batch, WAIT_MS)
    assert (again.attempts, again.bodies()) == (2, [b"1"])
    assert await shell.call(member.nack, again)
    assert await shell.call(member.fail, records[2], "no such flight")
    assert await shell.call(member.ack, records[3])
    letters = shell.client.inbox("s.readers.dead", ack="manual")
    poison, failed = await shell.take(letters, 2)
    await shell.call(letters.close)
    assert (poison.body, poison.why, poison.sender) == (b"1", "returned", "")
    assert poison.origin == ("s", "readers", 1, 2)
    assert (failed.body, failed.why, failed.origin.offset) == (b"2", "failed: no such flight", 2)
    facts = await shell.do("group_info", "s", "readers")
    assert (facts.dead, facts.dead_letters, facts.next) == (2, "s.readers.dead", 4)
    (seen, _) = await shell.do("peek", "s.readers.dead")
    assert (seen.origin.stream, seen.origin.group, seen.origin.offset) == ("s", "readers", 1)
    assert await shell.do("requeue_group", "s", "readers", [poison.number]) == 1
    assert (await shell.call(member.next_batch, WAIT_MS)).bodies() == [b"1"]
    assert await shell.do("requeue_group", "s", "readers") == 1
    await shell.call(member.close)


async def test_a_released_record_and_one_of_a_member_that_leaves_have_no_attempt(
    shell: Any,
) -> None:
    await filled(shell, 2)
    member = joined(shell, ack="manual", settings={"attempts_max": 1})
    first = next(iter(await shell.call(member.next_batch, WAIT_MS)))
    assert await shell.call(member.release, first)
    await shell.call(member.close)
    other = joined(shell, ack="manual")
    assert (await shell.call(other.next_batch, WAIT_MS)).attempts == 1
    assert not (await shell.do("group_info", "s", "readers")).attempts
    await shell.call(other.close)


async def test_a_loop_that_an_exception_ends_has_tried_the_record_that_it_had(
    broker: EmbeddedBroker,
) -> None:
    async with broker.connect() as client:
        await client.publish_many("s", [b"0", b"1", b"2"])

        async def divide() -> None:
            async with client.group("s", "g", settings={"attempts_max": 3}) as member:
                async for record in member:
                    1 / (1 - record.offset)

        with pytest.raises(ZeroDivisionError):
            await divide()
        async with client.group("s", "g") as member:
            batch = await member.next_batch(WAIT_MS)
            assert batch is not None
            assert (batch.attempts, batch.bodies()) == (2, [b"1"])
            assert (await client.group_info("s", "g")).attempts == [(1, 1)]


async def test_the_settings_of_a_group_can_be_changed(shell: Any) -> None:
    await filled(shell, 1)
    member = joined(shell)
    await shell.call(member.accepted)
    facts = await shell.do("edit_group", "s", "readers", attempts_max=7, dead_letters="ops")
    assert (facts.settings["attempts_max"], facts.dead_letters) == (7, "ops")
    with pytest.raises(BrokerRefused, match="attempts_max"):
        await shell.do("edit_group", "s", "readers", attempts_max=-1)
    await shell.call(member.close)


# --- administration -------------------------------------------------------------------------------


async def test_a_group_is_edited_right_after_its_first_member_was_asked_for(shell: Any) -> None:
    member = joined(shell, create=True)
    facts = await shell.do("edit_group", "s", "readers", attempts_max=3)
    assert facts.settings["attempts_max"] == 3
    await shell.call(member.close)


async def test_editing_a_group_whose_first_member_was_refused_says_what_is_missing(
    shell: Any,
) -> None:
    member = joined(shell)
    with pytest.raises(BrokerRefused) as refused:
        await shell.do("edit_group", "s", "readers", attempts_max=3)
    assert refused.value.code == "unknown_stream"
    await shell.call(member.close)


async def test_a_group_is_reset_and_a_member_that_is_at_work_is_a_hindrance_unless_told(
    shell: Any,
) -> None:
    await filled(shell, 100)
    member = joined(shell, ack="manual")
    assert await shell.call(member.ack, await shell.call(member.next_batch, WAIT_MS))
    with pytest.raises(BrokerRefused) as refused:
        await shell.do("reset_group", "s", "readers", 40)
    assert refused.value.code == "in_use"
    facts = await shell.do("reset_group", "s", "readers", 40, force=True)
    assert (facts.next, facts.more["before"], facts.members) == (40, 100, [])
    with pytest.raises(BrokerRefused, match="group_reset: the group was reset by force") as refused:
        await shell.call(member.next_batch, WAIT_MS)
    assert refused.value.code == "group_reset"
    again = joined(shell)
    assert (await shell.call(again.next_batch, WAIT_MS)).offsets.tolist() == list(range(40, 100))
    await shell.call(again.close)


@pytest.mark.moderate
@pytest.mark.parametrize("verb", [("reset_group", 0), ("remove_group",)])
async def test_a_member_that_has_left_is_no_hindrance_whatever_it_acknowledged_last(
    shell: Any, verb: tuple[Any, ...]
) -> None:
    await filled(shell, 100)
    name, *rest = verb
    for _ in range(10):
        member = joined(shell, ack="manual", kind="keyed")
        held = await shell.call(member.next_batch, WAIT_MS)
        member.ack_nowait(held)  # Its confirm waits for the disk, and the leave for the confirm.
        await shell.call(member.close)
        await shell.do(name, "s", "readers", *rest)


@pytest.mark.moderate
async def test_a_member_that_is_passed_over_says_so_when_it_waits(shell: Any) -> None:
    await shell.do("publish_many", "s", [b"0", b"1"])
    told: list[Any] = []
    member = joined(
        shell, ack="manual", credit_records=1, settings={"lease_ms": 100}, on_notice=told.append
    )
    held = await shell.call(member.next_batch, WAIT_MS)
    for _ in range(WAIT_MS):
        if (await shell.do("group_info", "s", "readers")).members[0].aside:
            break
        await asyncio.sleep(0.001)
    with pytest.raises(Timeout, match=r"passed over.*acknowledge some"):
        await shell.call(member.next_batch, 50)
    assert [type(one) for one in told] == [PassedOverNotice]
    await shell.call(member.nack, held)
    assert await shell.call(member.next_batch, WAIT_MS) is not None
    await shell.call(member.close)


@pytest.mark.moderate
async def test_a_member_that_stands_still_is_given_its_record_once(shell: Any) -> None:
    await shell.do("publish", "s", b"0")
    member = joined(shell, ack="manual", settings={"lease_ms": 100, "attempts_max": 2})
    await shell.call(member.next_batch, WAIT_MS)
    # Two leases and more, in which nothing else has the client's link do anything.
    await asyncio.sleep(0.6)
    facts = await shell.do("group_info", "s", "readers")
    assert [(one.held, one.aside) for one in facts.members] == [(0, True)]
    assert (facts.attempts, facts.dead) == ([(1, 1)], 0)
    await shell.call(member.close)


@pytest.mark.moderate
@pytest.mark.parametrize("kind", ["shared", "keyed", "exclusive"])
async def test_a_member_whose_lease_ended_before_it_asked_is_given_the_records_when_it_asks(
    shell: Any, kind: str
) -> None:
    await filled(shell, 3)
    member = joined(shell, kind=kind, ack="manual", settings={"lease_ms": 150, "attempts_max": 9})
    await shell.call(member.accepted)
    await aside(shell)
    # The link sends nothing by itself before its next heartbeat, after 5 s.
    held = await shell.call(member.next_batch, 4_000)
    assert held.numbers == [0, 1, 2]
    assert await shell.call(member.ack, held)
    facts = await shell.do("group_info", "s", "readers")
    assert (facts.next, [one.aside for one in facts.members]) == (3, [False])
    await shell.call(member.close)


@pytest.mark.moderate
async def test_a_lease_begins_anew_though_nothing_else_happens_on_the_link(
    connect: Connect,
) -> None:
    ours, watching = await connect(), await connect()
    await ours.do("publish", "s", b"0")
    began_s = monotonic()
    member = joined(ours, ack="manual", settings={"lease_ms": 600})
    await ours.call(member.next_batch, WAIT_MS)
    await aside(watching)
    # A third of the lease, at which the client renews it, and the lease.
    assert monotonic() - began_s >= 0.79
    await ours.call(member.close)


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("kind", "verb"),
    [("shared", "ack"), ("shared", "nack"), ("shared", "renew"), ("shared", "fail"),
     ("exclusive", "nack"), ("exclusive", "renew"), ("exclusive", "fail")],
)  # fmt: skip
async def test_what_is_said_too_late_of_several_records_counts_no_attempt_of_the_next_delivery(
    shell: Any, kind: str, verb: str
) -> None:
    await shell.do("publish_many", "s", [b"0", b"1", b"2"])
    member = joined(shell, kind=kind, ack="manual", settings={"lease_ms": 600, "attempts_max": 9})
    held = await shell.call(member.next_batch, WAIT_MS)
    await aside(shell)
    assert not await shell.call(getattr(member, verb), held)
    again = await shell.call(member.next_batch, WAIT_MS)
    assert (again.numbers, again.attempts) == ([0, 1, 2], 2)
    assert await shell.call(member.ack, again)
    await shell.call(member.close)


async def aside(shell: Any) -> None:
    """Wait until a member is passed over."""
    for _ in range(WAIT_MS):
        if any(one.aside for one in (await shell.do("group_info", "s", "readers")).members):
            return
        await asyncio.sleep(0.001)
    raise AssertionError("no member is passed over")


@pytest.mark.moderate
@pytest.mark.parametrize("kind", ["shared", "exclusive"])
async def test_what_went_to_another_member_when_a_lease_ended_is_not_handed_over_here(
    shell: Any, kind: Any
) -> None:
    await shell.do("publish_many", "s", [b"%d" % n for n in range(10)])
    slow = joined(shell, kind=kind, ack="manual", settings={"lease_ms": 150})
    [first] = await shell.take(slow, 1)
    await aside(shell)
    # Nobody else's lease ends, however long its acknowledgement takes.
    await shell.do("edit_group", "s", "readers", lease_ms=WAIT_MS)
    other = joined(shell, kind=kind, ack="manual")
    seen: list[int] = []
    await drained(shell, other, [], seen, 10)
    assert seen == list(range(10))
    # The rest of the batch that is being iterated, and what is in the client's queue, is others'.
    assert not await shell.call(slow.ack, first)
    with pytest.raises(Timeout):
        await shell.call(slow.next_batch, 400)
    await shell.do("publish", "s", b"next")
    await shell.call(other.close)
    [record] = await shell.take(slow, 1)
    assert record.offset == 10
    await shell.call(slow.close)


async def test_what_is_said_of_a_record_after_the_end_is_told_at_once(shell: Any) -> None:
    await shell.do("publish", "s", b"a")
    member = joined(shell)
    record = await shell.call(member.next_batch)
    await shell.do("reset_group", "s", "readers", "earliest", force=True)
    with pytest.raises(BrokerRefused, match="group_reset"):
        await shell.call(member.next_batch)
    assert not await shell.call(member.renew, record, timeout_ms=None)
    assert not await shell.call(member.ack, record, timeout_ms=None)
    await shell.do("flush")
    await shell.do("close")
    assert not await shell.call(member.renew, record, timeout_ms=None)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
async def test_a_step_that_its_program_lets_go_of_keeps_no_member_in_its_group(
    shell: Any, closed: bool
) -> None:
    await shell.do("publish_many", "s", [b"a", b"b"])
    member, step = joined(shell), shell.client.atomic()
    step.ack(await shell.call(member.next_batch))
    if closed:
        await shell.call(member.close)
    member = None
    step = None
    gc.collect()  # the sync client's thread notices with its next turn
    async with asyncio.timeout(WAIT_S):
        while (await shell.do("group_info", "s", "readers")).members:
            pass  # each answer takes a turn of the broker
    assert [record.body for record in await shell.take(joined(shell), 2)] == [b"a", b"b"]


@pytest.mark.moderate
async def test_a_step_may_be_committed_after_its_member_was_let_go_of(shell: Any) -> None:
    await shell.do("publish_many", "s", [b"a", b"b"])
    step = shell.client.atomic()
    [first] = await shell.take(joined(shell), 1)
    step.ack(first)
    gc.collect()
    await shell.call(step.commit)
    assert [record.body for record in await shell.take(joined(shell), 1)] == [b"b"]
