"""Bodies: a bounded window in memory; older batches are read back, once for all callers."""

from __future__ import annotations

from typing import Any

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.stamp import STAMP_BYTES, Stamp
from malamute_py.broker.context import Shard
from malamute_py.broker.limits import BrokerSettings
from malamute_py.broker.log.bodies import OVERHEAD, READ_NUMBERS, Bodies, Body
from malamute_py.broker.log.stream import HEADER_OVERHEAD
from malamute_py.broker.ready import BodiesFound

MANY = 1 << 40
LONE_OVERHEAD = OVERHEAD + HEADER_OVERHEAD
"""Bytes of a batch of one subject beside its own."""


def bodies_of(**settings: Any) -> Bodies:
    return Bodies(Shard(BrokerSettings(**settings), b"u" * 16, 1, bytes))


def batch(base: int, bodies: list[bytes]) -> tuple[bytes, bytes, Content]:
    frame = encode(bodies, subject="s")
    content = Content(frame)
    stamp = Stamp(
        1, 0, 0, 0, 1, base, 5, 9, 0, STAMP_BYTES + len(frame), len(bodies), 0,
        content.head.content_crc,
    ).pack()  # fmt: skip
    return stamp, frame, content


def test_the_newest_stay_in_memory_and_the_oldest_leave() -> None:
    size = STAMP_BYTES + len(batch(0, [bytes(100)])[1]) + LONE_OVERHEAD
    bodies = bodies_of(mail_hot_bytes=3 * size)
    for base in range(10):
        bodies.keep(base, *batch(base, [bytes(100)]))
    assert [base for base in range(10) if bodies.get(base)] == [7, 8, 9]
    assert bodies.hot_bytes == 3 * size
    for base in range(10):
        bodies.drop(base)
    assert bodies.hot_bytes == 0


def test_a_batch_weighs_its_header_tables_too() -> None:
    """Decoded, a table of 1,000 subjects takes several times the bytes of the batch."""
    frame = encode([b""] * 1_000, subject=[f"s{number}" for number in range(1_000)])
    stamp, _, _ = batch(0, [b""])
    bodies = bodies_of(mail_hot_bytes=2 * 1_000 * HEADER_OVERHEAD)
    for base in range(3):
        bodies.keep(base, stamp, frame, Content(frame))
    assert [base for base in range(3) if bodies.get(base)] == [2]
    bodies.drop(2)
    assert bodies.hot_bytes == 0


def test_a_batch_that_was_read_back_is_kept_whatever_its_size() -> None:
    """A reader that takes it in portions had it read from the disk for each of them."""
    stamp, frame, _ = batch(7, [bytes(100)])
    bodies = bodies_of(mail_hot_bytes=8)
    for base in (7, 8):
        bodies.want(base, 300, lambda body: None)
        (read,) = bodies.begin_reads()
        bodies.found(BodiesFound(read.token, {base: stamp + frame}))
        assert bodies.get(base) is not None
    assert bodies.get(7) is None


def test_one_batch_is_kept_whatever_its_size() -> None:
    bodies = bodies_of(mail_hot_bytes=1)
    bodies.keep(0, *batch(0, [bytes(100)]))
    bodies.keep(1, *batch(1, [bytes(100)]))
    assert bodies.get(0) is None
    assert bodies.get(1) is not None


def test_a_batch_in_memory_only_stays_until_it_is_dropped() -> None:
    bodies = bodies_of(mail_hot_bytes=1)
    for base in range(5):
        bodies.hold(base, *batch(base, [bytes(100)]))
    assert all(bodies.get(base) for base in range(5))
    for base in range(5):
        bodies.drop(base)
    assert bodies.kept_bytes == 0


def test_one_read_serves_all_callers_that_want_the_same_batch() -> None:
    bodies = bodies_of()
    found: list[tuple[str, Body | None]] = []
    bodies.want(7, 300, lambda body: found.append(("a", body)))
    bodies.want(7, 300, lambda body: found.append(("b", body)))
    (read,) = bodies.begin_reads()
    assert read.numbers == (7,)
    bodies.want(7, 300, lambda body: found.append(("c", body)))
    assert bodies.begin_reads() == []
    stamp, frame, _ = batch(7, [b"x", b"y"])
    bodies.found(BodiesFound(read.token, {7: stamp + frame}))
    assert [who for who, _ in found] == ["a", "b", "c"]
    body = found[0][1]
    assert body is not None
    assert body.frames == (stamp + frame,)
    assert [bytes(body.stamp), bytes(body.frame)] == [stamp, frame]
    assert body.size == len(stamp + frame)
    assert bodies.gauges["mail_reads_under_way"] == 0


def test_a_batch_that_was_read_back_stays_in_memory_for_a_while() -> None:
    stamp, frame, _ = batch(7, [bytes(100)])
    size = len(stamp + frame) + LONE_OVERHEAD
    bodies = bodies_of(mail_hot_bytes=8 * 2 * size)
    for base in range(3):
        bodies.want(base, 300, lambda body: None)
        (read,) = bodies.begin_reads()
        bodies.found(BodiesFound(read.token, {base: stamp + frame}))
    assert [base for base in range(3) if bodies.get(base)] == [1, 2]
    assert bodies.gauges["mail_hot_bytes"] == 2 * size
    bodies.drop(1)
    bodies.drop(2)
    assert bodies.gauges["mail_hot_bytes"] == 0


def test_a_batch_that_was_dropped_while_it_was_read_is_not_kept() -> None:
    stamp, frame, _ = batch(7, [b"x"])
    bodies = bodies_of()
    found: list[Body | None] = []
    bodies.want(7, 300, found.append)
    (read,) = bodies.begin_reads()
    bodies.drop(7)
    bodies.found(BodiesFound(read.token, {7: stamp + frame}))
    assert found[0] is not None
    assert bodies.get(7) is None


def test_a_batch_in_memory_is_passed_on_at_once() -> None:
    bodies = bodies_of()
    kept = bodies.keep(3, *batch(3, [b"x"]))
    found: list[Body | None] = []
    bodies.want(3, 300, found.append)
    assert found == [kept]
    assert bodies.begin_reads() == []


def test_reads_are_bounded_in_count_numbers_and_bytes_and_keep_their_order() -> None:
    bodies = bodies_of(mail_reads_max=2, mail_read_bytes=MANY)
    order: list[int] = []
    for base in range(3 * READ_NUMBERS):
        bodies.want(base, 10, lambda body, base=base: order.append(base))  # type: ignore[misc]
    first, second = bodies.begin_reads()
    assert first.numbers == tuple(range(READ_NUMBERS))
    assert bodies.begin_reads() == []
    bodies.found(BodiesFound(second.token, {}))
    (third,) = bodies.begin_reads()
    assert third.numbers == tuple(range(2 * READ_NUMBERS, 3 * READ_NUMBERS))
    bodies.found(BodiesFound(first.token, {}))
    bodies.found(BodiesFound(third.token, {}))
    assert sorted(order) == list(range(3 * READ_NUMBERS))


def test_a_large_batch_is_read_alone() -> None:
    bodies = bodies_of(mail_reads_max=4, mail_read_bytes=1_000)
    for base in range(3):
        bodies.want(base, 5_000, lambda body: None)
    (read,) = bodies.begin_reads()
    assert read.numbers == (0,)
    assert bodies.begin_reads() == []
    bodies.found(BodiesFound(read.token, {}))
    assert [read.numbers for read in bodies.begin_reads()] == [(1,)]


def test_the_reason_of_a_failed_read_is_known_during_the_calls_that_wait_for_it() -> None:
    bodies = bodies_of()
    seen: list[tuple[Body | None, str]] = []
    bodies.want(1, 10, lambda body: seen.append((body, bodies.failed)))
    (read,) = bodies.begin_reads()
    bodies.found(BodiesFound(read.token, {}, "no disk"))
    bodies.want(2, 10, lambda body: seen.append((body, bodies.failed)))
    (read,) = bodies.begin_reads()
    bodies.found(BodiesFound(read.token, {}))
    assert seen == [(None, "no disk"), (None, "")]


def test_an_answer_that_no_caller_waits_for_is_dropped() -> None:
    bodies_of().found(BodiesFound(99, {}))


def test_few_rows_are_extracted_and_many_are_marked() -> None:
    bodies = bodies_of()
    body = bodies.keep(0, *batch(0, [bytes([row]) * 1_000 for row in range(20)]))
    frames, marked, size = body.rows(0b1001, 500, 0.25)
    assert not marked
    assert size == sum(map(len, frames)) < 4_000
    content = Content(frames[1])
    assert content.offset_deltas is not None
    assert content.offset_deltas.tolist() == [0, 3]
    assert body.rows((1 << 10) - 1, 500, 0.25) == (body.frames, True, body.size)
    assert body.rows(1, 1 << 20, 0.25)[1], "a small batch goes whole"
