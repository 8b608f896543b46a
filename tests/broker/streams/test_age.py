"""Records past the age that their stream keeps: no reader gets any, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.gather import gather_rows, rows_of
from malamute_py.broker import HistoryRead, HistoryRun, IndexFailure
from malamute_py.broker.ready import IndexQuery
from tests.broker.shell import Shell, bodies
from tests.broker.streams.places import in_memory, on_disk, restarted

AGE_MS = 1_500


def slow_stream(
    count: int = 10, retention_ms: int = 1 << 40, many: int = 16, **options: Any
) -> Shell:
    """Two records a second, of a stream that keeps a second and a half.

    retention_ms: how often the broker looks for what may be dropped. many: readers that share.
    """
    shell = Shell(
        retention_ms=retention_ms, shared_window_min=many, shared_read_min=many, **options
    )
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", {"max_age_ms": AGE_MS}))
    for n in range(count):
        shell.publish(1, "s", [b"%d" % n], tracker=n + 1)
        shell.now_ms += 500
    return shell


PLACES = pytest.mark.parametrize("place", [in_memory, on_disk, restarted])
Place = Callable[[Shell], None]


@PLACES
def test_a_reader_at_earliest_gets_no_record_past_its_age(place: Place) -> None:
    shell = slow_stream()
    place(shell)
    peer = shell.subscribe(1, 1, "s", start=[0])
    assert bodies(peer, 1) == [b"7", b"8", b"9"]
    assert peer.last(wire.Subscribed).next == 7


@PLACES
def test_a_reader_at_an_offset_gets_a_gap_for_records_past_their_age(place: Place) -> None:
    shell = slow_stream()
    place(shell)
    peer = shell.subscribe(1, 1, "s", start=[2, 3])
    gap = peer.last(wire.Gap)
    assert (gap.from_, gap.to, gap.code) == (3, 7, "retention")
    assert bodies(peer, 1) == [b"7", b"8", b"9"]


@PLACES
def test_many_readers_together_get_no_record_past_its_age(place: Place) -> None:
    shell = slow_stream(many=2)
    place(shell)
    for number in range(1, 9):
        shell.send(1, wire.Subscribe(number, "s", ["all"], [2, 0], 1 << 40, 1 << 40, gathered=True))
    for number in range(1, 9):
        assert bodies(shell.peers[1], number) == [b"7", b"8", b"9"]


@PLACES
def test_a_reader_without_credit_gets_no_record_that_aged_meanwhile(place: Place) -> None:
    shell = slow_stream(1)
    peer = shell.subscribe(1, 1, "s", start=[0], records=1)
    for n in range(1, 10):
        shell.publish(1, "s", [b"%d" % n], tracker=n + 1)
        shell.now_ms += 500
        shell.send(1, wire.Ping(0))
    if place is restarted:
        return
    place(shell)
    shell.send(1, wire.Credit(1, 100, 1 << 40))
    assert bodies(peer, 1) == [b"0", b"7", b"8", b"9"]


@PLACES
def test_a_group_gets_no_record_past_its_age(place: Place) -> None:
    shell = slow_stream()
    place(shell)
    peer = shell.send(
        1, wire.JoinGroup(1, "s", "g", ["all"], "shared", [2, 0], 1 << 40, 1 << 40, visibility=0)
    )
    assert bodies(peer, 1) == [b"7", b"8", b"9"]


def test_a_record_that_a_member_gave_back_is_not_handed_out_past_its_age() -> None:
    shell = slow_stream(0)
    peer = shell.send(
        1, wire.JoinGroup(1, "s", "g", ["all"], "shared", [0], 1 << 40, 1 << 40, visibility=0)
    )
    shell.publish(1, "s", [b"0"], tracker=1)
    assert bodies(peer, 1) == [b"0"]
    shell.now_ms += AGE_MS + 1
    shell.send(1, wire.AckRecords(1, [(0, 1)], 2, 0, 0))
    shell.publish(1, "s", [b"1"], tracker=3)
    assert bodies(peer, 1) == [b"0", b"1"]


def test_a_group_is_told_each_aged_record_once_and_none_that_a_member_holds() -> None:
    shell = slow_stream(0)
    peer = shell.send(
        1, wire.JoinGroup(1, "s", "g", ["all"], "shared", [0], 1, 1 << 40, visibility=0)
    )
    for n in range(10):
        shell.publish(1, "s", [b"%d" % n], tracker=n + 1)
        shell.now_ms += 500
        shell.send(1, wire.Ping(0))
    assert bodies(peer, 1) == [b"0"]
    told = [(gap.from_, gap.to) for gap in peer.of(wire.Gap)]
    assert told == [(n, n + 1) for n in range(1, 6)]
    assert shell.broker.counters["group_records_lost"] == 5


@PLACES
def test_records_that_a_cursor_pins_are_kept_past_their_age(place: Place) -> None:
    shell = slow_stream(4)
    shell.send(1, wire.EditCursor(1, "s", "c", {"pin": True}, [2, 2]))
    for n in range(4, 10):
        shell.publish(1, "s", [b"%d" % n], tracker=n + 1)
        shell.now_ms += 500
        shell.send(1, wire.Ping(0))
    place(shell)
    peer = shell.subscribe(1, 1, "s", start=[0])
    assert bodies(peer, 1) == [b"%d" % n for n in range(2, 10)]


def test_the_facts_of_a_stream_say_what_it_keeps_and_what_still_takes_space() -> None:
    shell = slow_stream()
    shell.publish(1, "s", [bytes(70_000)], tracker=90)
    shell.publish(1, "s", [b"young"], tracker=91)
    shell.now_ms += AGE_MS + 1
    shell.publish(1, "s", [b"younger"], tracker=92)
    peer = shell.send(1, wire.StreamInfo(2, "s"))
    facts = peer.last(wire.Result).value
    assert facts["first"] == 12
    assert 70_000 < facts["aged_bytes"] < facts["bytes"]


@PLACES
@pytest.mark.parametrize("begun", [False, True])
def test_the_bytes_of_records_past_their_age_are_told_wherever_they_lie(
    place: Place, begun: bool
) -> None:
    shell = slow_stream()
    shell.publish(1, "s", [bytes(9_000)], tracker=90)
    shell.publish(1, "s", [bytes(500)], tracker=91)
    place(shell)
    if begun:
        shell.publish(1, "s", [bytes(700)], tracker=92)
    number = shell.stream("s").number
    before = [len(held.data) for held in shell.rings["main"] if held.stamp.stream == number]
    assert len(before) == 12 + begun
    facts = shell.send(1, wire.StreamInfo(2, "s")).last(wire.Result).value
    assert facts["first"] == 7
    assert facts["bytes"] - facts["aged_bytes"] == sum(before[7:])
    # A start gives them back at once.
    assert facts["aged_bytes"] == (0 if place is restarted else sum(before[:7]))
    shell.now_ms += AGE_MS + 1
    facts = shell.send(1, wire.StreamInfo(3, "s")).last(wire.Result).value
    assert facts["first"] == facts["tail"] == len(before)
    assert facts["aged_bytes"] == facts["bytes"] >= sum(before[7:])


@pytest.mark.parametrize("failing", ["find_time", "plan"])
def test_the_facts_of_a_stream_are_told_where_the_journal_cannot_answer(failing: str) -> None:
    """A disk error, or a ring that was being removed, ended the broker at a STREAM_INFO."""
    shell = slow_stream()
    on_disk(shell)
    answer = shell._answer

    def failed(query: IndexQuery) -> Any:
        broken = query.kind == failing
        return IndexFailure("journal_failed", "EIO") if broken else answer(query)

    shell._answer = failed  # type: ignore[method-assign]
    facts = shell.send(1, wire.StreamInfo(2, "s")).last(wire.Result).value
    assert (facts["first"], facts["tail"], facts["aged_bytes"]) == (0, 10, 0)


def test_questions_about_the_age_of_a_stream_are_bounded_and_end_with_their_link() -> None:
    shell = slow_stream(link_queries_max=3)
    on_disk(shell)
    shell.auto_ask = False
    peer = shell.send(1, *[wire.StreamInfo(number, "s") for number in range(5)])
    assert [one.code for one in peer.of(wire.Refused)] == ["wait", "wait"]
    assert all(query.wanted is not None and query.wanted() for query in shell.queries)
    shell.broker.link_lost(1, shell.now_ms)
    assert not any(query.wanted is None or query.wanted() for query in shell.queries)


def test_retention_drops_each_batch_past_its_age_where_it_is_in_memory() -> None:
    shell = slow_stream(retention_ms=100)
    shell.wait(100)
    assert shell.trims[-1][-1] == 8


@pytest.mark.parametrize("young", [0, 1])
def test_what_was_recovered_and_is_past_its_age_gives_its_space_back(young: int) -> None:
    shell = slow_stream(retention_ms=100)
    shell.restart()
    shell.hello(1)
    shell.now_ms += 10 * AGE_MS
    for number in range(young):
        shell.publish(1, "s", [b"young"], tracker=number + 1)
    shell.wait(100)
    shell.wait(100)
    assert shell.trims[-1][-1] == 10


def waiting(shell: Shell) -> None:
    """The journal answers reads when it is told to."""
    shell.evict()
    shell.auto_read = False


def answered_later(shell: Shell) -> None:
    """The journal answers what it was asked, when one more record has grown too old."""
    assert shell.reads
    shell.now_ms += 500
    shell.broker.tick(shell.now_ms)
    shell.auto_read = True
    shell.run()


def test_a_record_that_grew_too_old_while_the_journal_read_it_is_not_delivered() -> None:
    shell = slow_stream()
    waiting(shell)
    peer = shell.subscribe(1, 1, "s", start=[2, 0])
    answered_later(shell)
    assert bodies(peer, 1) == [b"8", b"9"]
    assert [(gap.to, gap.code) for gap in peer.of(wire.Gap)][-1] == (8, "retention")


def test_many_readers_together_get_no_record_that_grew_too_old_while_it_was_read() -> None:
    shell = slow_stream(many=2)
    waiting(shell)
    for number in (1, 2, 3):
        shell.send(1, wire.Subscribe(number, "s", ["all"], [2, 0], 1 << 40, 1 << 40, gathered=True))
    answered_later(shell)
    for number in (1, 2, 3):
        assert bodies(shell.peers[1], number) == [b"8", b"9"]


def test_a_group_gets_no_record_that_grew_too_old_while_it_was_read() -> None:
    shell = slow_stream()
    waiting(shell)
    peer = shell.send(
        1, wire.JoinGroup(1, "s", "g", ["all"], "shared", [2, 0], 1 << 40, 1 << 40, visibility=0)
    )
    answered_later(shell)
    assert bodies(peer, 1) == [b"8", b"9"]


def test_rows_of_several_append_times_in_one_batch_are_judged_one_by_one() -> None:
    shell = slow_stream()
    waiting(shell)
    peer = shell.subscribe(1, 1, "s", ["not", ["topic", "x"]], start=[2, 0], gathered=True)
    (read,) = shell.reads
    assert read.matches is not None, "the journal may gather rows for this reader"
    held = [one for one in shell.rings["main"] if one.stamp.stream == 1][7:]
    rows = [row for one in held for row in rows_of(one.stamp, one.content, np.arange(1))]
    stamp, content = gather_rows(rows, 1, held[0].stamp.epoch, held[0].stamp.lsn)
    data = stamp + content
    run = HistoryRun(data, ((0, len(data), 7, 3),), 10)
    shell.reads.clear()
    shell.now_ms += 500
    shell.broker.tick(shell.now_ms)
    shell.broker.history(HistoryRead(read.token, (run,), 10, ((0, 7, "retention", ""),)))
    shell.auto_read = True
    shell.run()
    assert bodies(peer, 1) == [b"8", b"9"]


@pytest.mark.parametrize("hot_bytes", [1 << 20, 0])
def test_a_record_that_grew_too_old_before_it_was_durable_is_a_gap_to_a_durable_reader(
    hot_bytes: int,
) -> None:
    shell = Shell(sync=False, hot_bytes=hot_bytes)
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", {"max_age_ms": AGE_MS}))
    shell.sync()
    peer = shell.subscribe(1, 1, "s", start=[1], visibility=1)
    shell.publish(1, "s", [b"old"], tracker=1)
    shell.now_ms += AGE_MS + 1
    shell.publish(1, "s", [b"young"], tracker=2)
    shell.sync()
    shell.run()
    assert bodies(peer, 1) == [b"young"]
    assert [(gap.from_, gap.to, gap.code) for gap in peer.of(wire.Gap)] == [(0, 1, "retention")]
