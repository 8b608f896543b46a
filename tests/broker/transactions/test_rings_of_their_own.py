"""Transactions over streams with rings of their own: once, whole, and not before the commit."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.changelog.snapshots import MARK
from tests.broker.shell import bodies
from tests.broker.transactions.test_transactions import ID, World, code, of_bodies


def apart(**settings: Any) -> World:
    """Return a world with a stream `own` that has a ring to itself, read by link 2."""
    world = World(**settings)
    own(world)
    return world


def own(world: World) -> None:
    world.shell.send(1, wire.CreateStream(1, "own", {"ring_bytes": 1 << 20}))
    world.shell.subscribe(2, 7, "own")


def restart(world: World, *, power_loss: bool = False) -> None:
    world.restart(power_loss=power_loss)
    own(world)


def seen(world: World) -> list[bytes]:
    return bodies(world.shell.peers[2], 7)


def ring_of(world: World, stream: str = "own") -> str:
    return world.shell.stream(stream).ring.name


def send_commit(world: World, count: int) -> None:
    """Hand a commit to the broker, and have nothing of it done."""
    commands = [wire.Atomic(99, 1), wire.CommitTransaction(ID, count, 0)]
    world.shell.broker.receive(1, "", commands, [], world.shell.now_ms)


def test_records_of_all_rings_come_with_the_commit_once_and_in_order() -> None:
    world = apart()
    world.begin()
    world.stage("own", [b"1", b"2"])
    world.stage("a", [b"x"])
    world.stage("own", [b"3"])
    assert (seen(world), world.seen()[0]) == ([], [])
    assert isinstance(world.commit(3), wire.Confirm)
    assert (seen(world), world.seen()[0]) == ([b"1", b"2", b"3"], [b"x"])
    assert world.gauges == (0, 0)
    assert not world.shell.broker._shard.queues.staged
    assert not world.shell.broker._arrivals._marks


def test_a_transaction_may_be_for_rings_of_their_own_alone() -> None:
    world = apart()
    world.begin()
    world.stage("own", [b"1"])
    world.commit(1)
    assert seen(world) == [b"1"]
    assert world.gauges == (0, 0)


def test_a_rollback_leaves_nothing_in_any_ring() -> None:
    world = apart()
    world.begin()
    world.stage("own", [b"1"])
    world.roll_back()
    restart(world)
    assert seen(world) == []
    assert ring_of(world) not in world.shell.rings


def test_a_ring_of_its_own_gets_nothing_before_the_commit_is_durable() -> None:
    world = apart()
    world.begin()
    world.stage("own", [b"1"])
    world.shell.auto_sync = False
    world.commit(1)
    assert seen(world) == []
    restart(world, power_loss=True)
    assert world.gauges[0] == 1
    assert seen(world) == []
    world.shell.auto_sync = True
    assert isinstance(world.commit(1), wire.Confirm)
    assert seen(world) == [b"1"]


@pytest.mark.parametrize("loss", ["", "snapshot", "power", "all but main", "all but own"])
@pytest.mark.parametrize("turns", range(1, 12))
def test_a_broker_that_dies_at_any_step_appends_each_batch_once(turns: int, loss: str) -> None:
    world = apart(commit_bytes=1)
    shell = world.shell
    world.begin()
    for body in (b"1", b"2", b"3"):
        world.stage("own", [body])
        world.stage("a", [body])
    send_commit(world, 6)
    for turn in range(turns):
        shell._do(shell.broker.take_ready())
        if turn < turns - 1:
            shell.sync()
    if loss == "snapshot":
        shell.sync()
        shell.snapshot_now()
    elif loss == "all but main":
        shell.sync("main")
    elif loss == "all but own":
        shell.sync(ring_of(world))
    restart(world, power_loss=loss not in ("", "snapshot"))
    if world.gauges[0] and not shell.broker._transactions.by_id[ID].row.committed_ms:
        world.commit(6)
    assert seen(world) == [b"1", b"2", b"3"]
    assert world.seen()[0] == [b"1", b"2", b"3"]
    assert world.gauges == (0, 0)
    assert not shell.broker._shard.queues.staged


def test_a_mark_survives_in_the_snapshot_where_the_ring_has_turned_over() -> None:
    world = apart()
    shell = world.shell
    world.begin()
    world.stage("own", [b"1"])
    send_commit(world, 1)
    shell._do(shell.broker.take_ready())
    shell.sync()
    shell._do(shell.broker.take_ready())
    ring = ring_of(world)
    assert len(shell.rings[ring]) == 1
    shell.snapshot_now()
    shell.publish(1, "own", [b"other"], tracker=90)
    # The ring has given the batch up by the time that the broker starts again.
    del shell.rings[ring][0]
    shell.snapshots[ring] = (0, shell.snapshots[ring][1])
    shell.firsts[shell.stream("own").number] = 1
    restart(world)
    assert len(shell.rings[ring]) == 1
    assert world.gauges == (0, 0)


def test_a_ring_that_refuses_is_named_and_gets_the_records_once_there_is_room() -> None:
    world = apart()
    shell = world.shell
    world.begin()
    world.stage("own", [b"1"])
    world.stage("a", [b"x"])
    shell.refuse[ring_of(world)] = ("full", "no room")
    assert isinstance(world.commit(2), wire.Confirm)
    assert (seen(world), world.seen()[0]) == ([], [b"x"])
    peer = shell.send(1, wire.AwaitTransaction(55, ID))
    shell.wait(2_000)
    refused = peer.last(wire.Refused)
    assert (refused.reference, refused.code) == (55, "put_off")
    assert "is committed" in refused.reason
    assert "full: no room" in refused.reason
    listed = shell.send(1, wire.ListTransactions(1)).last(wire.Result).value
    assert [(one["state"], one["streams"]) for one in listed["transactions"]] == [
        ("committed", ["own"])
    ]
    (put_off,) = listed["transactions"][0]["put_off"]
    since_ms = put_off.pop("since_ms")
    assert put_off == {"stream": "own", "code": "full", "reason": "no room", "records": 1}
    assert shell.now_ms - 3_000 <= since_ms < shell.now_ms - 1_000, "since the first refusal"
    assert shell.events_of("transaction_put_off")
    shell.refuse.clear()
    shell.wait(2_000)
    assert seen(world) == [b"1"]
    assert world.gauges == (0, 0)


def test_a_ring_that_refuses_holds_up_no_other_transaction() -> None:
    world = apart()
    world.begin()
    world.stage("own", [b"1"])
    world.shell.refuse[ring_of(world)] = ("full", "no room")
    world.commit(1)
    world.begin(id=b"other")
    world.stage("a", [b"x"], id=b"other")
    world.commit(1, id=b"other")
    assert world.seen()[0] == [b"x"]


def test_a_commit_is_refused_where_a_ring_has_failed_and_may_come_again() -> None:
    world = apart()
    world.begin()
    world.stage("own", [b"1"])
    world.shell.broker.ring_failed(ring_of(world), "journal_failed", "the disk is gone")
    assert code(world.commit(1)) == "journal_failed"
    assert code(world.stage("own", [b"2"])) == "journal_failed"
    restart(world)
    assert isinstance(world.commit(1), wire.Confirm)
    assert seen(world) == [b"1"]


def test_a_ring_that_fails_amid_a_commit_gets_the_rest_after_a_start() -> None:
    world = apart(commit_bytes=1)
    shell = world.shell
    world.begin()
    for body in (b"1", b"2"):
        world.stage("own", [body])
    shell.auto_sync = False
    world.commit(2)
    ring = ring_of(world)
    shell.sync()
    shell.run()
    assert len(shell.rings[ring]) == 1
    shell.broker.ring_failed(ring, "journal_failed", "the disk is gone")
    shell.auto_sync = True
    shell.run()
    shell.wait(2_000)
    assert world.gauges[0] == 1
    restart(world)
    assert seen(world) == [b"1", b"2"]
    assert world.gauges == (0, 0)


@pytest.mark.parametrize("turns", range(1, 8))
def test_records_of_a_removed_stream_end_with_its_ring(turns: int) -> None:
    world = apart(commit_bytes=1)
    shell = world.shell
    world.begin()
    world.stage("own", [b"1"])
    world.stage("own", [b"2"])
    world.stage("a", [b"x"])
    shell.auto_sync = False
    send_commit(world, 3)
    for _ in range(turns):
        shell._do(shell.broker.take_ready())
        shell.sync()
    shell.send(2, wire.RemoveStream(5, "own"))
    shell.auto_sync = True
    shell.sync()
    shell.run()
    shell.wait(2_000)
    assert world.seen()[0] == [b"x"]
    assert world.gauges == (0, 0)
    assert not shell.broker._transactions._moving._lanes
    assert not shell.broker._arrivals._marks


def test_others_publish_into_the_ring_meanwhile() -> None:
    world = apart(commit_bytes=1)
    shell = world.shell
    world.begin()
    for body in (b"1", b"2", b"3"):
        world.stage("own", [body])
    send_commit(world, 3)
    for number in range(6):
        shell._do(shell.broker.take_ready())
        shell.sync()
        shell.broker.receive(
            1, "", [wire.Publish("own", 200 + number)], [of_bodies([b"other"])], shell.now_ms
        )
    shell.run()
    assert [body for body in seen(world) if body != b"other"] == [b"1", b"2", b"3"]
    assert seen(world).count(b"other") == 6


def test_keys_are_put_by_a_transaction() -> None:
    world = World()
    shell = world.shell
    settings = {"ring_bytes": 1 << 20, "keep": "last-per-subject"}
    shell.send(1, wire.CreateStream(1, "state", settings))
    world.begin()
    world.stage("state", [b"old"])
    world.stage("state", [b"new"])
    assert isinstance(world.commit(2), wire.Confirm)
    keys = shell.stream("state").keys
    assert keys is not None
    assert keys.find("s") == (2, False)


def test_a_batch_that_a_ring_of_keys_cannot_take_is_refused_when_it_is_staged() -> None:
    world = World()
    settings = {"ring_bytes": 1 << 20, "keep": "last-per-subject"}
    world.shell.send(1, wire.CreateStream(1, "state", settings))
    world.begin()
    assert code(world.stage("state", [b"x" * 40_000])) == "too_large"


def test_a_batch_is_refused_when_it_is_staged_that_no_segment_of_its_ring_has_room_for() -> None:
    world = apart()
    world.begin()
    assert code(world.stage("own", [b"x" * (1 << 18)])) == "too_large"
    assert isinstance(world.stage("own", [b"x" * 260_000]), wire.Confirm)


def test_a_batch_of_more_keys_than_a_stream_may_have_is_refused_when_it_is_staged() -> None:
    world = World(keys_max=2)
    settings = {"ring_bytes": 1 << 20, "keep": "last-per-subject"}
    world.shell.send(1, wire.CreateStream(1, "state", settings))
    world.begin()
    frame = encode([b"v"] * 3, subject=["a", "b", "c"])
    stage = wire.Stage(ID, "state", 1, 0)
    assert code(world.step(stage, frames=[frame])) == "limit"
    frame = encode([b"v"] * 3, subject=["a", "b", "a"])
    assert isinstance(world.step(stage, frames=[frame]), wire.Confirm)


def test_a_client_cannot_forge_a_mark() -> None:
    world = apart()
    peer = world.shell.publish(1, "own", [b"1"], tracker=50, producer_id=MARK | 3)
    assert peer.last(wire.Refused).code == "unknown_producer"


def test_whoever_waits_behind_a_transaction_that_is_put_off_is_told_too() -> None:
    world = apart()
    shell = world.shell
    shell.refuse[ring_of(world)] = ("full", "no room")
    for id in (ID, b"second"):
        world.begin(id=id)
        world.stage("own", [b"1"], id=id)
        world.commit(1, id=id)
    peer = shell.send(1, wire.AwaitTransaction(55, b"second"))
    for _ in range(3):
        shell.wait(1_000)
        shell.send(1, wire.Ping())
    codes = [each.code for each in peer.commands if isinstance(each, wire.Refused)]
    assert codes == ["put_off"]
    assert len(shell.events_of("transaction_put_off")) == 1, "once for each code, not for each try"


def test_transactions_that_a_ring_puts_off_take_no_place_of_open_ones() -> None:
    world = apart(transactions_max=2)
    world.shell.refuse[ring_of(world)] = ("full", "no room")
    for id in (b"1", b"2"):
        world.begin(id=id)
        world.stage("own", [b"1"], id=id)
        world.commit(1, id=id)
    world.shell.hello(3, identity="other")
    assert isinstance(world.begin(id=b"3", link=3), wire.Confirm)


def test_a_caller_is_told_when_ring_main_fails_before_the_commit_is_durable() -> None:
    world = apart()
    shell = world.shell
    world.begin()
    world.stage("own", [b"1"])
    shell.auto_sync = False
    world.commit(1)
    peer = shell.send(1, wire.AwaitTransaction(55, ID))
    shell.broker.ring_failed("main", "journal_failed", "gone")
    shell.run()
    refused = [each for each in peer.commands if isinstance(each, wire.Refused)]
    assert [each.code for each in refused if each.reference == 55] == ["put_off"]


def test_a_ring_that_asks_for_patience_is_given_some_before_a_caller_is_told() -> None:
    world = apart()
    shell = world.shell
    shell.refuse[ring_of(world)] = ("wait", "it is being opened")
    world.begin()
    world.stage("own", [b"1"])
    world.commit(1)
    peer = shell.send(1, wire.AwaitTransaction(55, ID))
    shell.wait(3 * shell.broker._shard.settings.retry_ms)
    assert not shell.events_of("transaction_put_off")
    del shell.refuse[ring_of(world)]
    shell.wait(2 * shell.broker._shard.settings.retry_ms)
    assert [each.request for each in peer.commands if isinstance(each, wire.Result)] == [1, 55]


# --- what an operator gives up ---------------------------------------------------------------


def put_off(**settings: Any) -> World:
    """Return a world whose transaction is committed, and whose ring `own` is full."""
    world = apart(**settings)
    world.begin()
    world.stage("own", [b"1", b"2"])
    world.stage("a", [b"x"])
    world.stage("own", [b"3"])
    world.shell.refuse[ring_of(world)] = ("full", "no room")
    world.commit(3)
    return world


def ended(world: World, request: int = 70) -> Any:
    """Return the answer to END_TRANSACTION, of link 1."""
    found = [
        each
        for each in world.shell.peers[1].commands
        if (isinstance(each, wire.Result) and each.request == request)
        or (isinstance(each, wire.Refused) and each.reference == request)
    ]
    return found[0] if found else None


def give_up(world: World, request: int = 70) -> None:
    world.shell.send(1, wire.EndTransaction(request, ID, give_up=True))


def test_an_operator_who_does_not_say_give_up_is_told_what_waits_and_drops_nothing() -> None:
    world = put_off()
    world.shell.send(1, wire.EndTransaction(70, ID))
    refused = ended(world)
    assert code(refused) == "conflict"
    assert "3 records for stream own (full: no room)" in refused.reason
    world.shell.refuse.clear()
    world.shell.wait(2_000)
    assert seen(world) == [b"1", b"2", b"3"]


def test_given_up_records_never_come_and_all_who_ask_are_told() -> None:
    world = put_off()
    shell = world.shell
    ring = ring_of(world)
    give_up(world)
    peer = shell.send(1, wire.AwaitTransaction(71, ID))
    shell.wait(2_000)
    assert ended(world).value == {"given_up": {"own": 3}}
    assert world.gauges == (0, 0)
    assert world.seen()[0] == [b"x"]
    (event,) = shell.events_of("transaction_given_up")
    facts = {name: event.facts[name] for name in ("by", "identity", "stream", "records", "code")}
    assert facts == {
        "by": "writer", "identity": "writer", "stream": "own", "records": 3, "code": "full",
    }  # fmt: skip
    assert shell.broker.counters["given_up_records"] == 3
    shell.send(1, wire.AwaitTransaction(72, ID))
    told = [each for each in peer.commands if isinstance(each, wire.Refused)]
    assert [(each.reference, each.code) for each in told] == [(71, "given_up"), (72, "given_up")]
    shell.refuse.clear()
    restart(world)
    shell.wait(2_000)
    assert seen(world) == []
    assert not shell.broker._shard.queues.staged
    assert ring not in shell.rings or not shell.rings[ring]


def told_of_it(world: World, request: int) -> Any:
    """Return the answer to AWAIT_TRANSACTION, sent now by link 1."""
    world.shell.send(1, wire.AwaitTransaction(request, ID))
    return ended(world, request)


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_start_remembers_what_an_operator_gave_up(*, power_loss: bool) -> None:
    world = put_off()
    give_up(world)
    world.shell.wait(2_000)
    world.shell.refuse.clear()
    restart(world, power_loss=power_loss)
    world.shell.wait(2_000)
    assert code(told_of_it(world, 72)) == "given_up"
    assert code(world.commit(3)) == "given_up"


def test_a_start_remembers_it_while_another_ring_still_waits_for_records() -> None:
    world = apart()
    shell = world.shell
    shell.send(1, wire.CreateStream(2, "slow", {"ring_bytes": 1 << 20}))
    world.begin()
    world.stage("own", [b"1"])
    world.stage("slow", [b"s"])
    shell.refuse[ring_of(world)] = ("full", "no room")
    shell.refuse[ring_of(world, "slow")] = ("wait", "it is being opened")
    world.commit(2)
    give_up(world)
    shell.wait(2_000)
    assert ended(world).value == {"given_up": {"own": 1}}
    assert world.gauges[0] == 1, "the other ring has taken nothing yet"
    shell.refuse.clear()
    restart(world)
    shell.wait(2_000)
    assert world.gauges == (0, 0)
    assert code(told_of_it(world, 72)) == "given_up"
    restart(world)
    assert code(told_of_it(world, 73)) == "given_up"


def test_giving_up_waits_for_the_disk_and_a_power_loss_before_takes_it_back() -> None:
    world = put_off()
    shell = world.shell
    shell.auto_sync = False
    give_up(world)
    shell.wait(2_000)
    assert ended(world) is None
    shell.refuse.clear()
    restart(world, power_loss=True)
    shell.auto_sync = True
    shell.sync()
    shell.run()
    shell.wait(2_000)
    assert seen(world) == [b"1", b"2", b"3"]


def test_what_its_ring_has_is_kept_when_the_rest_is_given_up() -> None:
    world = apart(commit_bytes=1)
    shell = world.shell
    world.begin()
    for body in (b"1", b"2", b"3"):
        world.stage("own", [body])
    send_commit(world, 3)
    while not seen(world):
        shell._do(shell.broker.take_ready())
        shell.sync()
    shell.refuse[ring_of(world)] = ("full", "no room")
    shell.run()
    shell.wait(2_000)
    give_up(world)
    shell.wait(2_000)
    lost = ended(world).value["given_up"]["own"]
    assert 0 < lost < 3
    shell.refuse.clear()
    restart(world)
    shell.wait(2_000)
    assert seen(world) == [b"1", b"2", b"3"][: 3 - lost]


def test_another_transaction_that_the_ring_puts_off_is_left_alone() -> None:
    world = put_off()
    world.begin(id=b"second")
    world.stage("own", [b"4"], id=b"second")
    world.commit(1, id=b"second")
    world.shell.wait(2_000)
    give_up(world)
    world.shell.wait(2_000)
    assert ended(world).value == {"given_up": {"own": 3}}
    world.shell.refuse.clear()
    world.shell.wait(2_000)
    assert seen(world) == [b"4"]
    assert world.gauges == (0, 0)


def test_a_failed_ring_can_be_given_up_and_others_get_their_records() -> None:
    world = apart()
    world.begin()
    world.stage("own", [b"1"])
    world.stage("a", [b"x"])
    world.shell.auto_sync = False
    world.commit(2)
    world.shell.broker.ring_failed(ring_of(world), "journal_failed", "the disk is gone")
    world.shell.auto_sync = True
    world.shell.sync("main")
    world.shell.run()
    world.shell.wait(2_000)
    give_up(world)
    world.shell.wait(2_000)
    assert ended(world).value == {"given_up": {"own": 1}}
    assert world.seen()[0] == [b"x"]
    assert world.gauges == (0, 0)


def test_giving_up_is_refused_where_nothing_is_put_off() -> None:
    world = apart()
    world.begin()
    world.stage("own", [b"1"])
    give_up(world)
    assert code(ended(world)) == "conflict"
    assert isinstance(world.commit(1), wire.Confirm)
    assert seen(world) == [b"1"]


# --- publishes of others in the turn of a refused batch ----------------------------------------


def in_one_turn(world: World, stream: str = "own", after: int = 2) -> list[Any]:
    """Have the ring refuse a batch of a transaction with publishes behind it in the same turn.

    Returns their answers, as soon as there are any.
    """
    shell = world.shell
    world.begin()
    world.stage(stream, [b"large"])

    def judge(bundle: Any) -> tuple[str, str] | None:
        large = b"large" in bytes(bundle.batches[0].content)
        return ("full", "no room") if large else None

    shell.judge = judge
    send_commit(world, 1)
    while not shell.broker._publishing.queue:
        shell._do(shell.broker.take_ready())
        shell.sync()
    trackers = range(300, 300 + after)
    for tracker in trackers:
        command = wire.Publish(stream, tracker, 3)
        frame = of_bodies([b"small %d" % tracker])
        shell.broker.receive(1, "", [command], [frame], shell.now_ms)
    shell.run()
    shell.sync()
    shell.run()
    return [
        each
        for each in shell.peers[1].commands
        if getattr(each, "tracker", getattr(each, "reference", 0)) in trackers
    ]


def test_a_publish_behind_a_refused_batch_of_a_transaction_gets_an_answer_of_its_own() -> None:
    world = apart()
    answers = in_one_turn(world)
    assert [type(each) for each in answers] == [wire.Confirm, wire.Confirm]
    assert [each.offset for each in answers] == [0, 1]
    assert seen(world) == [b"small 300", b"small 301"]
    world.shell.judge = None
    world.shell.wait(2_000)
    assert seen(world) == [b"small 300", b"small 301", b"large"]
    assert world.shell.broker._publishing.unsettled_bytes == 0


def test_a_publish_for_keys_behind_a_refused_batch_is_told_to_come_again() -> None:
    world = World()
    settings = {"ring_bytes": 1 << 20, "keep": "last-per-subject"}
    world.shell.send(1, wire.CreateStream(1, "state", settings))
    answers = in_one_turn(world, "state")
    assert [each.code for each in answers] == ["wait", "wait"]
    assert all(each.retry_ms for each in answers)
    peer = world.shell.publish(1, "state", [b"small"], tracker=400)
    assert peer.last(wire.Confirm).tracker == 400
    world.shell.judge = None
    world.shell.wait(2_000)
    assert world.gauges == (0, 0)
