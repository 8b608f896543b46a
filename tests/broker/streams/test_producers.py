"""Idempotent producers: retries are in the log once."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import Level
from malamute_protocol.encode import encode
from malamute_protocol.stamp import STAMP_BYTES
from tests.broker.shell import Shell, bodies


def opened(shell: Shell, link: int, **fields: Any) -> dict[str, Any]:
    value: dict[str, Any] = shell.send(link, wire.OpenProducer(1, **fields)).last(wire.Result).value
    return value


def publish(
    shell: Shell, link: int, producer: dict[str, Any], sequence: int, body: bytes, *,
    tracker: int, count: int = 1, level: int = 0, epoch: int | None = None,
) -> None:  # fmt: skip
    content = encode(
        [body] * count, subject="s", producer_id=producer["id"],
        producer_epoch=producer["epoch"] if epoch is None else epoch, first_sequence=sequence,
    )  # fmt: skip
    shell.send(link, wire.Publish("s", tracker, level), frames=[content])


def test_a_producer_id_is_durable_before_it_is_told() -> None:
    shell = Shell(sync=False)
    peer = shell.hello(1)
    shell.send(1, wire.OpenProducer(1))
    assert not peer.of(wire.Result)
    shell.sync()
    shell.run()
    value = peer.last(wire.Result).value
    assert value["id"] == 1 << 32 | 1
    assert value == {"id": value["id"], "epoch": 0, "next": {}, "batch_bytes_max": {}}


def test_the_most_that_a_batch_of_a_small_ring_has_is_told_with_its_sequence() -> None:
    shell = Shell()
    shell.segment_bytes = (4 << 20) // shell.segments
    peer = shell.hello(1)
    producer = opened(shell, 1)
    most = peer.last(wire.Welcome).batch_bytes_max
    rings: dict[str, dict[str, Any]] = {
        "keys": {"ring_bytes": 4 << 20, "keep": "last-per-subject"},
        "small": {"ring_bytes": 3 << 20},
        "large": {"ring_bytes": 6 * most},
        "main": {},
    }
    for name, settings in rings.items():
        shell.send(1, wire.CreateStream(2, name, settings))
        assert "batch_bytes_max" not in peer.last(wire.Result).value
    large = encode([bytes(200_000)], subject="s", producer_id=producer["id"])
    for name in rings:
        shell.send(1, wire.Publish(name, 9), frames=[large])
    [refused] = peer.of(wire.Refused)
    assert refused.code == "too_large"
    value = opened(shell, 1, id=producer["id"])
    assert value["next"] == {"keys": 0, "small": 1, "large": 1, "main": 1}
    assert value["batch_bytes_max"] == {"keys": 128 << 10, "small": (1 << 20) - (100 << 10)}
    fits = encode([bytes((128 << 10) - STAMP_BYTES - 144)], subject="s", producer_id=producer["id"])
    assert len(fits) + STAMP_BYTES == 128 << 10
    shell.send(1, wire.Publish("keys", 10), frames=[fits])
    assert peer.last(wire.Confirm).tracker == 10


def test_ids_are_never_given_twice_not_even_over_restarts() -> None:
    shell = Shell()
    shell.hello(1)
    ids = [opened(shell, 1)["id"] for _ in range(3)]
    shell.restart()
    shell.hello(1)
    ids += [opened(shell, 1)["id"] for _ in range(3)]
    assert len(set(ids)) == 6


def test_a_batch_that_comes_again_is_confirmed_with_the_position_of_the_original() -> None:
    shell = Shell()
    peer = shell.hello(1)
    reader = shell.subscribe(1, 1, "s")
    producer = opened(shell, 1)
    publish(shell, 1, producer, 0, b"a", tracker=1)
    publish(shell, 1, producer, 1, b"b", tracker=2)
    publish(shell, 1, producer, 0, b"a", tracker=3)
    publish(shell, 1, producer, 1, b"b", tracker=4)
    answers = [(c.tracker, c.offset, c.duplicate) for c in peer.of(wire.Confirm)]
    assert answers == [(1, 0, False), (2, 1, False), (3, 0, True), (4, 1, True)]
    assert bodies(reader, 1) == [b"a", b"b"]


def test_a_duplicate_is_not_confirmed_before_its_original_is_synced() -> None:
    shell = Shell(sync=False)
    peer = shell.hello(1)
    shell.send(1, wire.OpenProducer(1))
    shell.sync()
    shell.run()
    producer = peer.last(wire.Result).value
    publish(shell, 1, producer, 0, b"a", tracker=1)
    publish(shell, 1, producer, 0, b"a", tracker=2)
    assert not peer.of(wire.Confirm)
    shell.sync()
    shell.run()
    assert [(c.tracker, c.level) for c in peer.of(wire.Confirm)] == [
        (1, Level.SYNCED),
        (2, Level.SYNCED),
    ]


def test_a_duplicate_in_the_same_message_waits_for_its_original() -> None:
    shell = Shell()
    peer = shell.hello(1)
    producer = opened(shell, 1)
    publish(shell, 1, producer, 0, b"a", tracker=1)
    content = encode([b"b"], subject="s", producer_id=producer["id"], first_sequence=1)
    shell.send(1, wire.Publish("s", 2), wire.Publish("s", 3), frames=[content, content])
    assert [(c.tracker, c.offset, c.duplicate) for c in peer.of(wire.Confirm)][1:] == [
        (2, 1, False),
        (3, 1, True),
    ]


def test_a_skipped_sequence_is_out_of_sequence_and_nothing_is_stored() -> None:
    shell = Shell()
    peer = shell.hello(1)
    producer = opened(shell, 1)
    publish(shell, 1, producer, 0, b"a", tracker=1)
    publish(shell, 1, producer, 2, b"c", tracker=2)
    assert peer.last(wire.Refused).code == "out_of_sequence"
    assert shell.broker.counters["records_in"] == 1


def test_a_batch_that_overlaps_the_next_sequence_is_out_of_sequence() -> None:
    shell = Shell()
    peer = shell.hello(1)
    producer = opened(shell, 1)
    publish(shell, 1, producer, 0, b"a", tracker=1, count=2)
    publish(shell, 1, producer, 1, b"a", tracker=2, count=2)
    assert peer.last(wire.Refused).code == "out_of_sequence"


def test_what_follows_a_refused_batch_is_refused_and_may_be_sent_again() -> None:
    shell = Shell()
    peer = shell.hello(1)
    producer = opened(shell, 1)
    publish(shell, 1, producer, 0, b"a", tracker=1)
    shell.refuse["main"] = ("full", "")
    contents = [
        encode([b"x"], subject="s", producer_id=producer["id"], first_sequence=n) for n in (1, 2)
    ]
    shell.send(1, wire.Publish("s", 2), wire.Publish("s", 3), frames=contents)
    assert [refused.code for refused in peer.of(wire.Refused)] == ["full", "full"]
    del shell.refuse["main"]
    shell.send(1, wire.Publish("s", 4), wire.Publish("s", 5), frames=contents)
    assert [c.offset for c in peer.of(wire.Confirm)] == [0, 1, 2]


def test_a_producer_of_another_identity_is_unknown() -> None:
    shell = Shell()
    shell.hello(1, identity="alice")
    producer = opened(shell, 1)
    thief = shell.hello(2, identity="mallory")
    publish(shell, 2, producer, 0, b"a", tracker=1)
    assert thief.last(wire.Refused).code == "unknown_producer"
    shell.send(2, wire.OpenProducer(3, id=producer["id"]))
    assert thief.last(wire.Refused).code == "unknown_producer"


def test_a_fenced_epoch_is_refused_and_the_new_one_counts_from_zero() -> None:
    shell = Shell()
    peer = shell.hello(1, identity="alice")
    old = opened(shell, 1)
    publish(shell, 1, old, 0, b"a", tracker=1)
    new = opened(shell, 1, id=old["id"], fence=True)
    assert new["epoch"] == old["epoch"] + 1
    publish(shell, 1, old, 1, b"b", tracker=2)
    assert peer.last(wire.Refused).code == "fenced"
    publish(shell, 1, new, 0, b"c", tracker=3)
    assert peer.last(wire.Confirm).offset == 1
    shell.send(1, wire.OpenProducer(9, id=old["id"], epoch=old["epoch"]))
    assert peer.last(wire.Refused).code == "fenced"


def test_two_that_fence_in_one_turn_get_an_epoch_each() -> None:
    """Two clients once got one epoch: the second one's batch was confirmed as the first one's."""
    shell = Shell()
    shell.hello(1)
    producer = opened(shell, 1)
    shell.hello(2)
    shell.hello(3)
    for link in (2, 3):
        fence = wire.OpenProducer(7, id=producer["id"], fence=True)
        shell.broker.receive(link, "", [fence], [], shell.now_ms)
    shell.run()
    first, second = (shell.peers[link].last(wire.Result).value for link in (2, 3))
    assert (first["epoch"], second["epoch"]) == (1, 2)
    publish(shell, 2, first, 0, b"first", tracker=1)
    assert shell.peers[2].last(wire.Refused).code == "fenced"
    publish(shell, 3, second, 0, b"second", tracker=1)
    assert not shell.peers[3].last(wire.Confirm).duplicate
    shell.restart()
    shell.hello(4)
    assert opened(shell, 4, id=producer["id"], epoch=2) == {**second, "next": {"s": 1}}
    assert bodies(shell.subscribe(4, 1, "s"), 1) == [b"second"]


def test_a_fence_is_told_the_epoch_that_it_made_although_another_follows() -> None:
    shell = Shell(sync=False)
    peer = shell.hello(1)
    shell.send(1, wire.OpenProducer(1))
    shell.sync()
    shell.run()
    producer = peer.last(wire.Result).value
    for request in (2, 3):
        shell.send(1, wire.OpenProducer(request, id=producer["id"], fence=True))
    shell.sync()
    shell.run()
    told = {result.request: result.value["epoch"] for result in peer.of(wire.Result)}
    assert told == {1: 0, 2: 1, 3: 2}


def test_a_fence_after_the_forgetting_of_its_producer_is_refused_by_name() -> None:
    shell = Shell(producers_max=1)
    peer = shell.hello(1)
    producer = opened(shell, 1)
    fence = wire.OpenProducer(8, id=producer["id"], fence=True)
    shell.broker.receive(1, "", [wire.OpenProducer(7), fence], [], shell.now_ms)
    shell.run()
    assert peer.last(wire.Result).request == 7
    assert (peer.last(wire.Refused).reference, peer.last(wire.Refused).code) == (
        8, "unknown_producer",
    )  # fmt: skip


@pytest.mark.parametrize("how", ["at once", "later", "restart", "snapshot"])
def test_another_batch_under_a_sequence_that_was_taken_is_refused(how: str) -> None:
    """The batch used to be confirmed as a duplicate, and was not in the log."""
    shell = Shell()
    shell.hello(1)
    producer = opened(shell, 1)
    for sequence, body in enumerate((b"a", b"b")):
        publish(shell, 1, producer, sequence, body, tracker=sequence + 1)
    if how == "later":
        publish(shell, 1, producer, 2, b"c", tracker=3, count=7)
    elif how != "at once":
        if how == "snapshot":
            shell.snapshot_now()
        shell.restart()
        shell.hello(1)
    publish(shell, 1, producer, 1, b"b", tracker=11)
    publish(shell, 1, producer, 1, b"other", tracker=12)
    peer = shell.peers[1]
    assert (peer.last(wire.Confirm).tracker, peer.last(wire.Confirm).duplicate) == (11, True)
    assert (peer.last(wire.Refused).reference, peer.last(wire.Refused).code) == (12, "conflict")
    assert shell.broker.counters["publishes_conflicting"] == 1


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_a_batch_that_comes_again_and_lies_in_damage_is_refused_by_that_name(
    place: int, snapshot: bool
) -> None:
    shell = Shell()
    shell.hello(1)
    producer = opened(shell, 1)
    for sequence, body in enumerate((b"a", b"b", b"c")):
        publish(shell, 1, producer, sequence, body, tracker=sequence + 1)
    # At the start none of the batch can be read, while later ones are there.
    shell.rings["main"] = [
        held for held in shell.rings["main"]
        if held.control_kind or (held.content.head.first_sequence != place)
    ]  # fmt: skip
    shell.restart()
    if snapshot:
        shell.snapshot_now()
        shell.restart()
    peer = shell.hello(1)
    for sequence, body in enumerate((b"a", b"b", b"c", b"d")):
        publish(shell, 1, producer, sequence, body, tracker=sequence + 11)
    publish(shell, 1, producer, place, b"other", tracker=15)
    assert [(c.tracker, c.offset, c.duplicate) for c in peer.of(wire.Confirm)] == [
        *((n + 11, n, True) for n in range(3) if n != place), (14, 3, False),
    ]  # fmt: skip
    refused = [(r.reference, r.code) for r in peer.of(wire.Refused)]
    assert refused == [(place + 11, "damaged"), (15, "damaged")]
    assert shell.broker.counters["publishes_damaged"] == 2
    assert [e.name for e in shell.events].count("publish_damaged") == 1, "said once"


def test_another_batch_is_refused_while_the_original_is_on_its_way() -> None:
    shell = Shell()
    peer = shell.hello(1)
    producer = opened(shell, 1)
    contents = [
        encode([body] * count, subject="s", producer_id=producer["id"], first_sequence=sequence)
        for body, count, sequence in ((b"a", 2, 0), (b"b", 2, 0), (b"a", 1, 1), (b"a", 2, 0))
    ]
    commands = [wire.Publish("s", tracker) for tracker in range(1, 5)]
    shell.send(1, wire.CreateStream(9, "s"))
    shell.send(1, *commands, frames=contents)
    assert [(c.tracker, c.duplicate) for c in peer.of(wire.Confirm)] == [(1, False), (4, True)]
    assert [(r.reference, r.code) for r in peer.of(wire.Refused)] == [
        (2, "conflict"), (3, "conflict"),
    ]  # fmt: skip
    assert [e.name for e in shell.events].count("publish_conflicting") == 1, "said once"


def test_a_part_of_a_batch_under_its_own_sequence_is_no_duplicate() -> None:
    shell = Shell()
    peer = shell.hello(1)
    producer = opened(shell, 1)
    publish(shell, 1, producer, 0, b"a", tracker=1, count=4)
    publish(shell, 1, producer, 2, b"a", tracker=2)
    publish(shell, 1, producer, 0, b"a", tracker=3, count=2)
    assert [r.code for r in peer.of(wire.Refused)] == ["conflict", "conflict"]


def test_what_is_older_than_the_remembered_checksums_is_taken_for_a_duplicate() -> None:
    shell = Shell(producer_batches_max=4)
    peer = shell.hello(1)
    producer = opened(shell, 1)
    for n in range(9):
        publish(shell, 1, producer, n, b"x", tracker=n + 1)
    publish(shell, 1, producer, 4, b"other", tracker=100)
    assert peer.last(wire.Confirm).tracker == 100
    publish(shell, 1, producer, 5, b"other", tracker=101)
    assert peer.last(wire.Refused).code == "conflict"


def test_a_resumed_producer_is_told_its_next_sequences() -> None:
    shell = Shell()
    shell.hello(1)
    producer = opened(shell, 1)
    publish(shell, 1, producer, 0, b"a", tracker=1, count=5)
    assert opened(shell, 1, id=producer["id"])["next"] == {"s": 5}


def test_retries_after_a_restart_are_recognised() -> None:
    shell = Shell()
    shell.hello(1)
    producer = opened(shell, 1)
    publish(shell, 1, producer, 0, b"a", tracker=1)
    publish(shell, 1, producer, 1, b"b", tracker=2)
    shell.restart()
    peer = shell.hello(1)
    publish(shell, 1, producer, 1, b"b", tracker=3)
    publish(shell, 1, producer, 2, b"c", tracker=4)
    assert [(c.offset, c.duplicate, c.epoch) for c in peer.of(wire.Confirm)] == [
        (1, True, 1),
        (2, False, 2),
    ]


def test_a_batch_that_a_power_loss_took_is_taken_again() -> None:
    shell = Shell(sync=False)
    shell.hello(1)
    shell.send(1, wire.OpenProducer(1))
    shell.sync()
    shell.run()
    producer = shell.peers[1].last(wire.Result).value
    publish(shell, 1, producer, 0, b"a", tracker=1)
    shell.sync()
    publish(shell, 1, producer, 1, b"b", tracker=2)
    shell.restart(power_loss=True)
    peer = shell.hello(1)
    publish(shell, 1, producer, 1, b"b", tracker=3, level=Level.STORED)
    confirm = peer.last(wire.Confirm)
    assert (confirm.offset, confirm.duplicate) == (1, False)


def test_when_the_table_of_producers_is_full_the_longest_unused_is_forgotten() -> None:
    shell = Shell(producers_max=10)
    peer = shell.hello(1)
    first = opened(shell, 1)
    others = [opened(shell, 1) for _ in range(9)]
    opened(shell, 1, id=first["id"])
    opened(shell, 1)
    assert shell.broker.gauges["producers"] == 10
    publish(shell, 1, first, 0, b"a", tracker=1)
    assert peer.of(wire.Confirm)
    publish(shell, 1, others[0], 0, b"a", tracker=2)
    assert peer.last(wire.Refused).code == "unknown_producer"


@pytest.mark.parametrize("restart", [False, True])
def test_producers_of_an_identity_push_out_no_producers_of_another(restart: bool) -> None:
    """10,200 OPEN_PRODUCER of one client pushed out the sequences of all the others."""
    shell = Shell(producers_max=10)
    anna = shell.hello(1, identity="anna")
    shell.hello(2, identity="bert")
    own = [opened(shell, 1) for _ in range(4)]
    for tracker, producer in enumerate(own):
        publish(shell, 1, producer, 0, b"a", tracker=tracker)
    for _ in range(100):
        opened(shell, 2)
    assert shell.broker.gauges["producers"] == 10
    if restart:
        shell.restart()
        anna = shell.hello(1, identity="anna")
    for tracker, producer in enumerate(own, 10):
        publish(shell, 1, producer, 0, b"a", tracker=tracker)
        assert (anna.last(wire.Confirm).tracker, anna.last(wire.Confirm).duplicate) == (
            tracker, True,
        )  # fmt: skip


@pytest.mark.moderate
def test_places_in_streams_of_an_identity_push_out_none_of_another() -> None:
    shell = Shell(producer_places_max=20)
    anna = shell.hello(1, identity="anna")
    bert = shell.hello(2, identity="bert")
    own = [opened(shell, 1) for _ in range(4)]
    for tracker, producer in enumerate(own):
        publish(shell, 1, producer, 0, b"a", tracker=tracker)
    for n in range(60):
        producer = opened(shell, 2)
        for tracker in (2 * n + 100, 2 * n + 101):
            # It may have to wait until the places of others of its own are free.
            publish(shell, 2, producer, 0, b"a", tracker=tracker)
        assert bert.last(wire.Confirm).tracker == 2 * n + 101
    assert shell.broker.gauges["producers"] <= 4 + 20
    for tracker, producer in enumerate(own, 10):
        publish(shell, 1, producer, 0, b"a", tracker=tracker)
        assert (anna.last(wire.Confirm).tracker, anna.last(wire.Confirm).duplicate) == (
            tracker, True,
        )  # fmt: skip


def test_a_duplicate_older_than_what_is_remembered_is_confirmed_without_a_position() -> None:
    shell = Shell(producer_batches_max=4)
    peer = shell.hello(1)
    producer = opened(shell, 1)
    for n in range(20):
        shell.now_ms += 1
        publish(shell, 1, producer, n, b"x", tracker=n + 1)
    publish(shell, 1, producer, 0, b"x", tracker=100)
    confirm = peer.last(wire.Confirm)
    assert (confirm.offset, confirm.duplicate) == (-1, True)
    publish(shell, 1, producer, 18, b"x", tracker=101)
    assert peer.last(wire.Confirm).offset == 18


def test_a_snapshot_taken_amid_an_append_is_the_state_before_it() -> None:
    shell = Shell()
    shell.hello(1)
    producer = opened(shell, 1)
    publish(shell, 1, producer, 0, b"a", tracker=1)
    before = shell.broker.snapshot()
    content = encode([b"b"], subject="s", producer_id=producer["id"], first_sequence=1)
    shell.broker.receive(
        1, "", [wire.Publish("s", 2), wire.CreateStream(3, "new")], [content], shell.now_ms
    )
    ready = shell.broker.take_ready()
    assert len(ready.appends) == 2
    assert shell.broker.snapshot() == before


def test_a_start_from_a_snapshot_and_what_follows_it_is_a_start_from_the_whole_log() -> None:
    shell = Shell()
    shell.hello(1)
    producer = opened(shell, 1)
    publish(shell, 1, producer, 0, b"a", tracker=1)
    shell.snapshot_now()
    publish(shell, 1, producer, 1, b"b", tracker=2)
    shell.send(1, wire.CreateStream(3, "new"))
    shell.restart()
    peer = shell.hello(1)
    shell.send(1, wire.StreamInfo(1, "new"))
    assert peer.last(wire.Result).value["name"] == "new"
    for sequence, body in enumerate((b"a", b"b", b"x")):
        publish(shell, 1, producer, sequence, body, tracker=10 + sequence)
    assert [(c.offset, c.duplicate) for c in peer.of(wire.Confirm)] == [
        (0, True), (1, True), (2, False),
    ]  # fmt: skip
