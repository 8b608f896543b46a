"""Open transactions: staged batches, their commit, rollback and timeout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.version import Feature
from malamute_py.broker.limits import Quota
from malamute_py.changelog import tables
from tests.broker.shell import Peer, Shell, bodies

ID = b"load 7"


def of_bodies(values: Sequence[bytes]) -> bytes:
    return encode(values, subject="s")


class World:
    """A shell with a writer (link 1) and a reader of the streams a and b (link 2)."""

    def __init__(self, **settings: Any) -> None:
        self.shell = Shell(**settings)
        self.tracker = 0
        self.place = 0
        self.hello()

    def hello(self) -> None:
        self.shell.hello(1, identity="writer")
        self.shell.hello(2, identity="reader")
        for number, name in enumerate("ab", 1):
            self.shell.subscribe(2, number, name)

    def restart(self, *, power_loss: bool = False) -> None:
        self.shell.restart(power_loss=power_loss)
        self.hello()

    def step(self, *parts: wire.Command, frames: Sequence[bytes] = (), link: int = 1) -> Any:
        """Send parts as one step; returns the answer, None: there is none yet."""
        self.tracker += 1
        atomic = wire.Atomic(self.tracker, len(parts))
        peer = self.shell.send(link, atomic, *parts, frames=frames)
        return answer(peer, self.tracker)

    def begin(self, timeout_ms: int = 0, id: bytes = ID, link: int = 1) -> Any:
        return self.step(wire.BeginTransaction(id, 0, timeout_ms), link=link)

    def stage(
        self, stream: str, values: Sequence[bytes], id: bytes = ID, place: int = -1, link: int = 1
    ) -> Any:
        if place < 0:
            self.place += 1
            place = self.place
        return self.step(wire.Stage(id, stream, place, 0), frames=[of_bodies(values)], link=link)

    def commit(self, count: int, id: bytes = ID, link: int = 1) -> Any:
        return self.step(wire.CommitTransaction(id, count, 0), link=link)

    def roll_back(self, id: bytes = ID) -> Any:
        return self.step(wire.RollBackTransaction(id, 0))

    def seen(self) -> tuple[list[bytes], list[bytes]]:
        peer = self.shell.peers[2]
        return bodies(peer, 1), bodies(peer, 2)

    @property
    def gauges(self) -> tuple[int, int]:
        gauges = self.shell.broker.gauges
        return gauges["transactions"], gauges["staged_bytes"]


def answer(peer: Peer, tracker: int) -> Any:
    for command in peer.commands:
        if isinstance(command, wire.Confirm) and command.tracker == tracker:
            return command
        if isinstance(command, wire.Refused) and command.reference == tracker:
            return command
    return None


def code(refused: Any) -> str:
    assert isinstance(refused, wire.Refused), refused
    return refused.code


def test_the_broker_announces_transactions() -> None:
    assert Shell().hello(1).last(wire.Welcome).features & Feature.TRANSACTIONS


def test_what_is_staged_is_seen_after_the_commit_and_in_order() -> None:
    world = World()
    world.begin()
    world.stage("a", [b"1", b"2"])
    world.stage("b", [b"x"])
    world.stage("a", [b"3"])
    assert world.seen() == ([], [])
    assert isinstance(world.commit(3), wire.Confirm)
    assert world.seen() == ([b"1", b"2", b"3"], [b"x"])
    assert world.gauges == (0, 0)


def test_a_rollback_leaves_nothing() -> None:
    world = World()
    world.begin()
    world.stage("a", [b"1"])
    assert isinstance(world.roll_back(), wire.Confirm)
    assert world.seen() == ([], [])
    assert world.gauges == (0, 0)
    assert code(world.commit(1)) == "unknown_transaction"
    assert not world.shell.broker._shard.queues.staged


def test_batches_come_in_the_order_of_their_places() -> None:
    world = World()
    world.begin()
    world.stage("a", [b"second"], place=9)
    world.stage("a", [b"first"], place=3)
    world.commit(2)
    assert world.seen()[0] == [b"first", b"second"]


def test_a_whole_transaction_may_be_one_step() -> None:
    world = World()
    world.shell.publish(1, "a", [b"0"], tracker=90)
    done = world.step(
        wire.BeginTransaction(ID, 0),
        wire.Stage(ID, "a", 0, 0),
        wire.Stage(ID, "b", 1, 0),
        wire.CommitTransaction(ID, 2, 0),
        frames=[of_bodies([b"1"]), of_bodies([b"x"])],
    )
    assert isinstance(done, wire.Confirm)
    assert world.seen() == ([b"0", b"1"], [b"x"])
    assert world.gauges == (0, 0)


def test_a_step_commits_a_transaction_together_with_records_of_its_own() -> None:
    world = World()
    world.shell.publish(1, "a", [b"0"], tracker=90)
    world.begin()
    done = world.step(
        wire.Publish("a", 0), wire.CommitTransaction(ID, 0, 0), frames=[of_bodies([b"1"])]
    )
    assert isinstance(done, wire.Confirm)
    assert world.seen()[0] == [b"0", b"1"]
    assert world.gauges == (0, 0)


def test_a_step_that_fails_leaves_the_transaction_as_it_was() -> None:
    world = World()
    world.begin()
    world.stage("a", [b"1"])
    done = world.step(
        wire.Stage(ID, "a", 7, 0),
        wire.CommitTransaction(ID, 1, 0),
        frames=[of_bodies([b"2"])],
    )
    assert code(done) == "conflict"
    assert isinstance(world.commit(1), wire.Confirm)
    assert world.seen()[0] == [b"1"]


def test_the_broker_rolls_back_what_is_open_for_too_long() -> None:
    world = World()
    world.begin(timeout_ms=5_000)
    world.stage("a", [b"1"])
    world.shell.wait(4_999)
    assert world.gauges[0] == 1
    world.shell.wait(1)
    assert world.gauges == (0, 0)
    assert code(world.commit(1)) == "transaction_timed_out"
    assert world.seen() == ([], [])
    assert [
        event.facts["identity"] for event in world.shell.events_of("transaction_timed_out")
    ] == ["writer"]
    assert world.shell.broker.counters["transactions_timed_out"] == 1


def test_a_start_remembers_the_newest_ends_and_a_new_transaction_of_the_name_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "ENDS_MAX", 2)
    world = World()
    for id in (b"first", b"second", b"third"):
        world.begin(timeout_ms=5_000, id=id)
        world.shell.wait(5_000)
    world.restart()
    assert [code(world.commit(1, id=id)) for id in (b"first", b"second", b"third")] == [
        "unknown_transaction", "transaction_timed_out", "transaction_timed_out",
    ]  # fmt: skip
    world.begin(id=b"third")
    assert isinstance(world.commit(0, id=b"third"), wire.Confirm)
    assert code(world.commit(0, id=b"third")) == "unknown_transaction"


def test_each_transaction_has_a_time_of_its_own() -> None:
    world = World()
    world.begin(timeout_ms=5_000, id=b"late")
    world.begin(timeout_ms=2_000, id=b"soon")
    world.shell.wait(2_000)
    assert list(world.shell.broker._transactions.by_id) == [b"late"]
    world.shell.wait(3_000)
    assert world.gauges == (0, 0)


def test_a_transaction_is_of_the_client_that_began_it() -> None:
    world = World()
    world.begin()
    assert code(world.stage("a", [b"1"], link=2)) == "not_held"
    assert code(world.commit(0, link=2)) == "not_held"
    assert code(world.begin(link=2)) == "conflict"


def test_a_client_goes_on_after_it_lost_its_link() -> None:
    world = World()
    world.begin()
    world.stage("a", [b"1"])
    world.shell.broker.link_lost(1, world.shell.now_ms)
    world.shell.hello(3, identity="writer", session=(1).to_bytes(16, "big"))
    world.stage("a", [b"2"], link=3)
    assert isinstance(world.commit(2, link=3), wire.Confirm)
    assert world.seen()[0] == [b"1", b"2"]


def test_what_would_refuse_a_record_refuses_it_when_it_is_staged() -> None:
    def permit(owner: str, action: str, name: str) -> bool:
        return (action, name) != ("write", "b")

    world = World(permit=permit)
    world.begin()
    assert code(world.stage("b", [b"1"])) == "forbidden"
    world.shell.send(1, wire.CreateStream(1, "quick", {"memory": True}))
    assert code(world.stage("quick", [b"1"])) == "cross_ring"
    refused = world.step(wire.Stage(ID, "a", 1, 0), frames=[b"no batch"])
    assert code(refused) in ("bad_batch", "malformed")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"transaction_bytes_max": 500}, "too_large"),
        ({"transaction_batches_max": 1}, "too_large"),
        ({"staged_bytes_max": 500}, "limit"),
        ({"quota": lambda name: Quota(staged_bytes=500)}, "limit"),
    ],
)
def test_what_is_staged_is_bounded(settings: dict[str, Any], expected: str) -> None:
    world = World(**settings)
    world.begin()
    assert isinstance(world.stage("a", [b"1" * 100]), wire.Confirm)
    assert code(world.stage("a", [b"2" * 100])) == expected
    assert isinstance(world.commit(1), wire.Confirm)
    assert world.seen()[0] == [b"1" * 100]


@pytest.mark.parametrize(
    "settings", [{"transactions_max": 1}, {"quota": lambda name: Quota(transactions=1)}]
)
def test_open_transactions_are_bounded(settings: dict[str, Any]) -> None:
    world = World(**settings)
    world.begin()
    assert code(world.begin(id=b"other")) == "limit"
    world.roll_back()
    assert isinstance(world.begin(id=b"other"), wire.Confirm)


def test_a_timeout_is_bounded() -> None:
    world = World(transaction_timeout_max_ms=10_000)
    assert code(world.begin(timeout_ms=10_001)) == "limit"


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_restart_keeps_what_is_open(power_loss: bool) -> None:
    world = World()
    world.begin(timeout_ms=5_000)
    world.stage("a", [b"1"])
    world.stage("b", [b"x"])
    world.restart(power_loss=power_loss)
    assert world.gauges[0] == 1
    world.stage("a", [b"2"])
    assert isinstance(world.commit(3), wire.Confirm)
    assert world.seen() == ([b"1", b"2"], [b"x"])


def test_a_restart_keeps_the_time_of_what_is_open() -> None:
    world = World()
    world.begin(timeout_ms=5_000)
    world.shell.wait(3_000)
    world.restart()
    world.shell.wait(2_000)
    assert world.gauges == (0, 0)


def large(world: World, batches: int = 6) -> list[bytes]:
    """Stage so much that its commit takes several bundles; returns the bodies."""
    world.begin()
    values = [bytes([65 + number]) * 600_000 for number in range(batches)]
    for value in values:
        world.stage("a", [value])
    return values


def test_a_large_commit_takes_several_bundles_and_none_is_larger_than_one_batch() -> None:
    world = World()
    values = large(world)
    before = len(world.shell.readies)
    world.commit(6)
    moved = [
        sum(len(batch.content) for batch in bundle.batches)
        for ready in world.shell.readies[before:]
        for bundle in ready.appends
    ]
    assert max(moved) < 700_000
    assert len([size for size in moved if size > 500_000]) == 6
    assert world.seen()[0] == values


@pytest.mark.parametrize("bundles", range(1, 8))
def test_a_commit_that_is_amid_its_bundles_goes_on_after_a_restart(bundles: int) -> None:
    world = World()
    values = large(world)
    broker, shell = world.shell.broker, world.shell
    commands = [wire.Atomic(99, 1), wire.CommitTransaction(ID, 6, 0)]
    broker.receive(1, "", commands, [], shell.now_ms)
    for _ in range(bundles):
        shell._do(broker.take_ready())
    world.restart()
    assert world.seen()[0] == values
    assert world.gauges == (0, 0)
    assert not shell.broker._shard.queues.staged


def test_bodies_that_left_memory_are_read_back_for_the_commit() -> None:
    world = World(mail_hot_bytes=1)
    values = large(world)
    world.commit(6)
    assert world.seen()[0] == values
    assert world.shell.broker.counters["mail_reads"] > 0


def test_a_commit_that_the_log_refuses_leaves_the_transaction_open() -> None:
    world = World()
    world.begin()
    world.stage("a", [b"1"])
    world.shell.refuse["main"] = ("full", "no room")
    assert code(world.commit(1)) == "full"
    world.shell.refuse.clear()
    assert isinstance(world.commit(1), wire.Confirm)
    assert world.seen()[0] == [b"1"]


def test_a_bundle_that_the_log_refuses_comes_again() -> None:
    world = World()
    values = large(world)
    broker, shell = world.shell.broker, world.shell
    commands = [wire.Atomic(99, 1), wire.CommitTransaction(ID, 6, 0)]
    broker.receive(1, "", commands, [], shell.now_ms)
    shell._do(broker.take_ready())
    shell.refuse["main"] = ("full", "no room")
    shell.run()
    shell.refuse.clear()
    shell.wait(2_000)
    assert world.seen()[0] == values


@pytest.mark.parametrize("again", [False, True])
def test_a_commit_is_refused_where_a_stream_of_its_records_was_removed(again: bool) -> None:
    world = World()
    world.begin()
    world.stage("a", [b"1"])
    world.stage("b", [b"x"])
    world.shell.send(2, wire.RemoveStream(5, "a"))
    if again:
        world.shell.send(2, wire.CreateStream(6, "a", {}))
    answer = world.commit(2)
    assert isinstance(answer, wire.Refused)
    assert answer.code == "unknown_stream"
    assert "the stream 'a' was removed" in answer.reason
    assert world.seen()[1] == []
    assert world.gauges != (0, 0)
    assert isinstance(world.roll_back(), wire.Confirm)
    assert world.gauges == (0, 0)


def test_records_of_a_stream_that_is_removed_after_the_commit_are_dropped_with_it() -> None:
    world = World()
    large(world)
    broker, shell = world.shell.broker, world.shell
    commands = [wire.Atomic(99, 1), wire.CommitTransaction(ID, 6, 0)]
    broker.receive(1, "", commands, [], shell.now_ms)
    shell._do(broker.take_ready())
    shell.send(2, wire.RemoveStream(5, "a"))
    shell.run()
    shell.wait(2_000)
    assert world.gauges == (0, 0)


def test_a_committed_subscription_gets_only_what_no_power_loss_takes_back() -> None:
    world = World(sync=False)
    shell = world.shell
    shell.sync()
    shell.run()
    shell.subscribe(2, 7, "a", visibility=2)
    world.begin()
    world.stage("a", [b"1"])
    world.commit(1)
    assert bodies(shell.peers[2], 7) == []
    for _ in range(3):
        shell.sync()
        shell.run()
    assert bodies(shell.peers[2], 7) == [b"1"]


def test_wait_is_answered_when_all_is_in_its_streams() -> None:
    world = World()
    large(world)
    commands = [
        wire.Atomic(99, 1), wire.CommitTransaction(ID, 6, 0), wire.AwaitTransaction(55, ID)
    ]  # fmt: skip
    peer = world.shell.send(1, *commands)
    results = [one for one in peer.commands if isinstance(one, wire.Result)]
    assert [one.request for one in results] == [55]
    assert len(world.seen()[0]) == 6
    assert world.shell.broker._links.get(1).queries == 0  # type: ignore[union-attr]
    world.shell.send(1, wire.AwaitTransaction(56, ID))
    assert peer.last(wire.Result).request == 56


def test_wait_for_a_commit_that_is_appended_is_answered_when_it_is_durable() -> None:
    """A commit returned before readers got its records, if its end was appended already."""
    world = World()
    shell = world.shell
    world.begin()
    world.stage("a", [b"1"])
    shell.auto_sync = False
    world.commit(1)
    for _ in range(3):
        shell.run()
    while shell.broker._transactions.by_id:
        shell.sync()
        shell.run()
    peer = shell.send(1, wire.AwaitTransaction(55, ID))
    told = [one for one in peer.of(wire.Result) if one.request == 55]
    seen = shell.subscribe(2, 7, "a", start=[0], visibility=2)
    assert (bodies(seen, 7), told) == ([], [])
    shell.sync()
    shell.run()
    assert bodies(seen, 7) == [b"1"]
    assert peer.last(wire.Result).request == 55


def test_open_transactions_are_listed_and_ended_by_permission() -> None:
    allowed = {"admin"}

    def permit(owner: str, action: str, name: str) -> bool:
        return action != "manage_clients" or owner in allowed

    world = World(permit=permit)
    shell = world.shell
    shell.hello(3, identity="admin")
    world.begin()
    world.stage("a", [b"1"])
    others = shell.send(2, wire.ListTransactions(1)).last(wire.Result).value
    assert others["transactions"] == []
    own = shell.send(1, wire.ListTransactions(1)).last(wire.Result).value
    assert [one["transaction"] for one in own["transactions"]] == [ID]
    (found,) = shell.send(3, wire.ListTransactions(1)).last(wire.Result).value["transactions"]
    assert (found["identity"], found["state"], found["records"]) == ("writer", "open", 1)
    assert found["streams"] == ["a"]
    refused = shell.send(2, wire.EndTransaction(2, ID)).last(wire.Refused)
    assert refused.code == "forbidden"
    shell.send(3, wire.EndTransaction(3, ID))
    assert shell.peers[3].last(wire.Result).request == 3
    assert code(world.commit(1)) == "transaction_ended"
    shell.send(3, wire.EndTransaction(4, ID))
    assert shell.peers[3].last(wire.Refused).code == "unknown_transaction"
    assert world.seen() == ([], [])
