"""A recent read serves the next reader that wants the same, and no other."""

from __future__ import annotations

from malamute_py.broker.ready import HistoryRun, ReadRange
from malamute_py.journal import MemoryStorage, Ring, RingSettings
from malamute_py.server.journaling.recent_reads import READS_MAX, RECENT_BYTES, RecentReads


def ring() -> Ring:
    settings = RingSettings(segment_bytes=65_536, ring_bytes=4 * 65_536)
    return Ring.open(MemoryStorage(), settings=settings, epoch=1)[0]


def wants(first: int, end: int, stream: int = 1) -> ReadRange:
    return ReadRange("main", stream, 7, first, end, 1 << 20, shared=True)


def run(size: int) -> tuple[HistoryRun, ...]:
    return (HistoryRun(bytes(size), ((0, size, 0, 10),)),)


def test_a_read_serves_whoever_wants_any_offset_of_it() -> None:
    one, reads = ring(), RecentReads()
    runs = run(100)
    reads.keep(one, wants(10, 100), runs, 20)
    assert reads.find(one, wants(10, 100)) == (runs, 20)
    assert reads.find(one, wants(19, 20)) == (runs, 20)


def test_it_serves_nobody_who_is_elsewhere_or_may_not_see_so_far() -> None:
    one, reads = ring(), RecentReads()
    reads.keep(one, wants(10, 100), run(100), 20)
    assert reads.find(one, wants(9, 100)) is None
    assert reads.find(one, wants(20, 100)) is None
    assert reads.find(one, wants(10, 19)) is None
    assert reads.find(one, wants(10, 100, stream=2)) is None
    assert reads.find(ring(), wants(10, 100)) is None


def test_no_more_is_kept_than_the_bound_and_the_oldest_goes_first() -> None:
    one, reads = ring(), RecentReads()
    for number in range(10):
        reads.keep(one, wants(10 * number, 1000), run(RECENT_BYTES // 4), 10 * number + 10)
    assert [reads.find(one, wants(10 * n, 1000)) is not None for n in range(10)] == (
        [False] * 6 + [True] * 4
    )
    reads.keep(one, wants(500, 1000), run(RECENT_BYTES + 1), 600)
    reads.keep(one, wants(700, 1000), (), 800)
    assert reads.find(one, wants(500, 1000)) is None
    assert reads.find(one, wants(700, 1000)) is None
    assert reads.find(one, wants(90, 1000)) is not None


def test_no_more_reads_are_kept_than_are_gone_through_for_a_question() -> None:
    one, reads = ring(), RecentReads()
    for number in range(READS_MAX + 3):
        reads.keep(one, wants(10 * number, 10_000), run(100), 10 * number + 10)
    held = [reads.find(one, wants(10 * n, 10_000)) is not None for n in range(READS_MAX + 3)]
    assert held == [False] * 3 + [True] * READS_MAX
    # What left for the count has left the sum of bytes, too.
    assert reads._bytes == 100 * READS_MAX


def test_what_nobody_shares_any_more_is_let_go() -> None:
    one, other, reads = ring(), ring(), RecentReads()
    for at, stream in ((one, 1), (one, 2), (other, 1)):
        reads.keep(at, wants(10, 100, stream=stream), run(100), 20)
    reads.forget(one, 1)
    assert reads.find(one, wants(10, 100)) is None
    assert reads.find(one, wants(10, 100, stream=2)) is not None
    assert reads.find(other, wants(10, 100)) is not None
    assert reads._bytes == 200
