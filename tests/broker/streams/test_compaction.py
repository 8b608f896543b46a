"""Compaction: newest records keep value and offset while the ring of their stream comes round."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.broker.ready import AppendBundle, IndexAnswer, IndexFailure
from malamute_py.changelog.copies import MOVED_STREAM
from tests.broker.streams.keyed import (
    PLACES,
    World,
    moved,
    restarted,
    result,
    table,
    turned,
)


@pytest.mark.moderate
def test_segments_without_a_newest_record_are_given_up_as_the_ring_fills() -> None:
    world = World()
    for n in range(400):
        assert isinstance(world.put("a", b"%d" % n * 50), wire.Confirm)
    stream = world.stream("s")
    assert stream.first > 100
    assert world.get("a")["body"] == b"399" * 50


def test_a_power_loss_that_takes_back_what_replaced_a_record_leaves_the_record() -> None:
    """The simulator's scenario `keys` found it with seed 7713323: the segment was given up."""
    world = World()
    world.put("a", b"old")
    stream = world.stream("s")
    assert stream.keys is not None
    for _ in range(1_000):
        if stream.ring.end_lsn + 2_000 > stream.keys.room.look_lsn:
            break
        world.put("busy", b"x" * 900)
    assert 0 < stream.ring.end_lsn < stream.keys.room.look_lsn
    world.auto_sync = False
    for key in ("a", "busy", "busy"):
        world.tracker += 1
        content = world.content(key, b"x" * 900, sequence=world.sequence)
        peer = world.send(1, wire.Publish("s", world.tracker, wire.Level.STORED), frames=[content])
        assert peer.last(wire.Confirm).tracker == world.tracker
        world.sequence += 1
    world.restart(power_loss=True)
    world.hello(1)
    assert world.get("a")["body"] == b"old"


@pytest.mark.moderate
@PLACES
def test_newest_records_keep_value_and_offset_while_the_ring_comes_round(place: Any) -> None:
    world = World()
    moved(world)
    place(world)
    for number in range(10):
        found = world.get(f"k{number}")
        assert (found["body"], found["revision"]) == (b"%d" % number, number + 1)
    assert world.get("gone") == {"revision": 0, "deleted": 11}
    assert world.keys(["prefix", "k"]) == {f"k{n}": n + 1 for n in range(10)}
    refused = world.update("k3", b"x", 99)
    assert refused.revision == 4
    assert world.update("k3", b"other", 4).offset == world.stream("s").next - 1
    assert world.get("k3")["body"] == b"other"


@pytest.mark.moderate
@PLACES
@pytest.mark.parametrize("start", [[0], [2, 1], [6]])
def test_a_reader_gets_newest_records_that_have_moved_in_the_order_of_offsets(
    start: list[Any], place: Any
) -> None:
    world = World()
    moved(world)
    place(world)
    peer = world.subscribe(1, 5, "s", ["prefix", "k"], start)
    assert peer.received[5] == [(n + 1, b"%d" % n) for n in range(10)]
    assert not peer.of(wire.Gap)
    peer = world.subscribe(1, 6, "s", start=start)
    got = [offset for offset, _ in peer.received[6]]
    assert got[:11] == list(range(1, 12))
    assert got[-1] == world.stream("s").next - 1
    world.put("k1", b"new")
    assert peer.received[5][-1] == (world.stream("s").next - 1, b"new")


@PLACES
def test_a_start_by_a_time_before_all_that_has_not_moved_gives_what_has(place: Any) -> None:
    world = World()
    moved(world)
    place(world)
    for number, start in enumerate(([3, 0], [4, 0]), 5):
        peer = world.subscribe(1, number, "s", ["prefix", "k"], start)
        assert peer.received[number] == [(n + 1, b"%d" % n) for n in range(10)]
    tail = world.stream("s").next
    world.now_ms += 1_000
    world.put("k0", b"new")
    peer = world.subscribe(1, 7, "s", start=[3, world.now_ms])
    assert peer.received[7] == [(tail, b"new")]


@pytest.mark.moderate
def test_a_reader_that_lags_gets_what_has_moved_and_no_gap() -> None:
    world = World()
    world.put("a", b"1")
    peer = world.subscribe(1, 5, "s", records=1)
    for number in range(10):
        world.put(f"k{number}", b"%d" % number)
    turned(world)
    world.send(1, wire.Credit(5, 1 << 40, 1 << 50))
    got = dict(peer.received[5])
    assert [got[n + 2] for n in range(10)] == [b"%d" % n for n in range(10)]
    assert not peer.of(wire.Gap)


def test_a_reader_gets_no_gap_for_records_that_move_while_the_journal_reads_them() -> None:
    world = World()
    for number in range(10):
        world.put(f"k{number}", b"%d" % number)
    world.evict()
    world.auto_read = False
    peer = world.subscribe(1, 5, "s")
    (read,) = world.reads
    answer = world._read(read)
    world.reads.clear()
    turned(world)
    assert world.stream("s").first > 10
    world.broker.history(answer)
    world.auto_read = True
    world.run()
    got = dict(peer.received[5])
    assert [got[n + 1] for n in range(10)] == [b"%d" % n for n in range(10)]
    assert not peer.of(wire.Gap)


@pytest.mark.moderate
def test_a_value_that_moves_while_the_journal_looks_for_it_is_answered() -> None:
    world = World()
    world.put("a", b"value")
    for _ in range(2):  # from its segment into a copy, then from this copy into another
        world.evict()
        world.auto_ask = False
        world.send(1, wire.GetKey(77, "s", "a"))
        (query,) = world.queries
        world.queries.clear()
        world.auto_ask = True
        turned(world)
        world.broker.answered(IndexAnswer(query.token, world._answer(query)))
        world.run()
        assert result(world.peers[1])["body"] == b"value"


def test_a_cursor_before_records_that_have_moved_stays_there() -> None:
    world = World()
    world.put("a", b"1")
    world.send(1, wire.MoveCursor("s", "c", 1, 77))
    turned(world)
    restarted(world)
    peer = world.subscribe(1, 5, "s", start=[7, "c"])
    assert peer.received[5][0] == (1, b"1")


@pytest.mark.moderate
def test_a_record_that_was_replaced_before_a_restart_does_not_come_back() -> None:
    world = World(deleted_keys_ms=1)
    moved(world)
    world.put("k5", deletion=True)
    world.now_ms += 1_000
    turned(world)
    assert "k5" not in world.stream("s").keys  # type: ignore[operator]
    restarted(world)
    assert world.get("k5") == {"revision": 0}


def test_a_codec_batch_moves_whole_and_its_replaced_rows_do_not_come_back() -> None:
    world = World(deleted_keys_ms=1)
    content = encode([b"x" * 100, b"y" * 100], **table("a", "b"), codec="zstd")
    world.send(1, wire.Publish("s", 900), frames=[content])
    world.put("a", deletion=True)
    world.now_ms += 1_000
    turned(world)
    restarted(world)
    assert world.get("a") == {"revision": 0}
    assert world.get("b")["row"] == 1
    peer = world.subscribe(1, 5, "s", ["topic", "b"])
    assert [offset for offset, _ in peer.received[5]] == [2]


def test_rows_of_large_batches_move_alone() -> None:
    world = World()
    subjects = [f"k{n}" for n in range(20)]
    content = encode([b"%d" % n * 20 for n in range(20)], **table(*subjects))
    world.send(1, wire.Publish("s", 900), frames=[content])
    for subject in subjects[::2]:
        world.put(subject, b"new")
    turned(world)
    restarted(world)
    for number in range(20):
        body = b"new" if number % 2 == 0 else b"%d" % number * 20
        assert world.get(f"k{number}")["body"] == body


def test_a_record_replaced_while_its_copy_is_made_is_not_copied() -> None:
    world = World()
    world.put("a", b"old")
    world.auto_ask = False
    while not any(query.kind == "copies" for query in world.queries):
        world.put("busy", b"x" * 200)
        if world.queries and world.queries[0].kind != "copies":
            world.answer_queries()
            world.run()
    asked = list(world.queries)
    answers = [world._answer(query) for query in asked]
    world.queries.clear()
    world.put("a", b"new")
    for query, answer in zip(asked, answers, strict=True):
        world.broker.answered(IndexAnswer(query.token, answer))
    world.auto_ask = True
    world.run()
    turned(world)
    restarted(world)
    assert world.get("a")["body"] == b"new"


def test_a_publish_behind_copies_that_no_segment_holds_is_refused_wait() -> None:
    world = World()
    world.put("a", b"value")
    world.auto_ask = False
    while not any(query.kind == "copies" for query in world.queries):
        world.answer_queries()
        world.run()
        world.put("busy", b"x" * 900)

    def judge(bundle: AppendBundle) -> tuple[str, str] | None:
        copies = bundle.batches[0].stream == MOVED_STREAM
        return ("too_large", "a batch of 5 MB; a segment has 4") if copies else None

    world.judge = judge
    (query,) = world.queries
    world.queries.clear()
    world.broker.answered(IndexAnswer(query.token, world._answer(query)))
    refused = world.put("busy", b"x" * 900)
    assert (refused.code, refused.retry_ms > 0) == ("wait", True)
    assert isinstance(world.put("busy", b"x" * 900), wire.Confirm)
    world.judge = None
    world.auto_ask = True
    turned(world)
    assert world.get("a")["body"] == b"value"


def test_a_ring_full_of_newest_records_refuses_by_name_and_loses_none() -> None:
    world = World()
    kept = 0
    while isinstance(answer := world.put(f"k{kept}", b"%d" % kept * 40), wire.Confirm):
        kept += 1
    assert answer.code == "full"
    assert kept > 50
    restarted(world)
    for number in range(kept):
        assert world.get(f"k{number}")["body"] == b"%d" % number * 40


def test_a_full_ring_takes_deletions_and_has_room_once_their_time_is_over() -> None:
    world = World(deleted_keys_ms=1_000)
    kept = 0
    while isinstance(world.put(f"k{kept}", b"x" * 100), wire.Confirm):
        kept += 1
    for number in range(10):
        assert isinstance(world.put(f"k{number}", deletion=True), wire.Confirm)
    assert world.put("new", b"x" * 2_000).code == "full"
    world.now_ms += 2_000
    turned(world)
    assert isinstance(world.put("new", b"x" * 2_000), wire.Confirm)


def test_a_batch_that_no_segment_can_hold_a_copy_of_is_refused() -> None:
    world = World()
    assert world.put("a", b"x" * 40_000).code == "too_large"


@pytest.mark.parametrize("kind", ["oldest_segments", "copies"])
def test_what_the_journal_does_not_answer_is_told_once_and_asked_again(kind: str) -> None:
    world = World()
    world.put("a", b"value")
    world.auto_ask = False

    def refuse() -> bool:
        """Let the journal fail to answer questions of this kind; return whether there was one."""
        found = [query for query in world.queries if query.kind == kind]
        for query in found:
            world.queries.remove(query)
            failure = IndexFailure("journal_failed", "too many open files")
            world.broker.answered(IndexAnswer(query.token, failure))
        world.answer_queries()
        world.run()
        return bool(found)

    failures = 0
    refused: wire.Refused | None = None
    while failures < 3 or refused is None:
        failures += refuse()
        answer = world.put("busy", b"x" * 900)
        refused = answer if isinstance(answer, wire.Refused) else None
    assert refused.reason == "the ring of stream 's' cannot be looked at: too many open files"
    (event,) = world.events_of("compaction_failed")
    assert event.facts["reason"] == "too many open files"
    assert world.broker.counters["compaction_failures"] >= 3
    world.auto_ask = True
    world.answer_queries()
    world.run()
    turned(world)
    assert world.get("a")["body"] == b"value"


def test_a_fault_of_the_journal_that_is_over_is_not_named_where_a_cursor_pins() -> None:
    world = World()
    world.send(1, wire.EditCursor(90, "s", "c", {"pin": True}, [2, 0]))
    world.put("busy", b"x")
    world.auto_ask = False
    while not world.queries:
        world.put("busy", b"x" * 900)
    [query] = world.queries
    world.queries.clear()
    failure = IndexFailure("journal_failed", "too many open files")
    world.broker.answered(IndexAnswer(query.token, failure))
    world.auto_ask = True
    refused: wire.Refused | None = None
    while refused is None:
        answer = world.put("busy", b"x" * 900)
        refused = answer if isinstance(answer, wire.Refused) else None
    assert (refused.code, refused.reason) == ("full", "the ring of stream 's' gives up old records")
