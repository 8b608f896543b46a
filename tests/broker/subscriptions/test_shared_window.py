"""Many subscriptions of a stream that lag are served together, and each gets its own records."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_py.broker.ready import HistoryRead, HistoryRun, ReadFailed
from malamute_py.broker.subscriptions import cohorts, shared_window
from malamute_py.broker.subscriptions.audience import audience_of
from malamute_py.broker.subscriptions.shared_window import (
    SELECTOR_ROWS_MAX,
    SharedWindow,
    hot_batches,
)
from tests.broker.shell import Peer, Shell, offsets

MANY = 8


def subscribed(shell: Shell, link: int = 2, **fields: Any) -> Peer:
    """One link with MANY subscriptions of a subject each, and a last one that selects two."""
    peer = shell.hello(link)
    for number in range(MANY):
        shell.subscribe(link, number, "s", ["topic", f"w.{number}.*"], [1], gathered=True, **fields)
    either = ["or", ["topic", "w.0.*"], ["topic", "w.2.*"]]
    shell.subscribe(link, MANY, "s", either, [1], gathered=True, **fields)
    return peer


def publish(shell: Shell, batches: int, records: int = 200, first: int = 0) -> None:
    """Batches whose records go round 20 subjects."""
    for batch in range(first, first + batches):
        subjects = [f"w.{(batch * records + row) % 20}.x" for row in range(records)]
        shell.publish(1, "s", [bytes(100)] * records, subject=subjects, tracker=batch + 1)


def behind(count: int = 10, **settings: Any) -> tuple[Shell, Peer]:
    """A broker whose subscribed link must read all batches from the journal, and is to begin."""
    shell = Shell(**settings)
    shell.hello(1)
    peer = subscribed(shell)
    shell.broker.blocked(2)
    publish(shell, count)
    shell.evict()
    shell.broker.writable(2)
    shell.run()
    return shell, peer


def expected(number: int, records: int, begin: int = 0) -> list[int]:
    wanted = {0, 2} if number == MANY else {number}
    return [offset for offset in range(begin, records) if offset % 20 in wanted]


def check(peer: Peer, records: int, begin: int = 0) -> None:
    for number in range(MANY + 1):
        assert offsets(peer, number) == expected(number, records, begin), number


def test_those_whose_link_was_slow_get_the_rows_of_many_batches_in_one() -> None:
    shell = Shell()
    shell.hello(1)
    peer = subscribed(shell)
    shell.broker.blocked(2)
    publish(shell, 10)
    before = len(peer.of(wire.Deliver))
    shell.broker.writable(2)
    shell.run()
    check(peer, 2_000)
    assert len(peer.of(wire.Deliver)) - before == MANY + 1
    publish(shell, 1, first=10)
    check(peer, 2_200)


def test_history_is_read_once_for_all() -> None:
    shell, peer = behind(shared_read_min=MANY)
    check(peer, 2_000)
    assert shell.broker.counters["reads"] == 1


def test_a_start_amid_a_batch_is_kept() -> None:
    shell = Shell()
    shell.hello(1)
    publish(shell, 3)
    peer = shell.hello(2)
    shell.broker.blocked(2)
    for number in range(MANY + 1):
        pattern = (
            ["or", ["topic", "w.0.*"], ["topic", "w.2.*"]]
            if number == MANY
            else ["topic", f"w.{number}.*"]
        )
        shell.subscribe(2, number, "s", pattern, [2, 150 + number], gathered=True)
    shell.broker.writable(2)
    shell.run()
    for number in range(MANY + 1):
        assert offsets(peer, number) == expected(number, 600, 150 + number)


def test_one_who_takes_a_large_part_has_its_batches_as_they_are() -> None:
    shell = Shell()
    shell.hello(1)
    peer = subscribed(shell)
    shell.subscribe(2, 50, "s", ["topic", "w.*.x"], [1], gathered=True)
    shell.broker.blocked(2)
    publish(shell, 10)
    shell.broker.writable(2)
    shell.run()
    check(peer, 2_000)
    assert offsets(peer, 50) == list(range(2_000))
    (whole,) = [m for m in peer.of(wire.Deliver) if m.subscription == 50]
    assert whole.content_frames == 20


def test_what_cannot_be_gathered_is_given_to_each_in_its_own_turn() -> None:
    shell = Shell()
    shell.hello(1)
    peer = subscribed(shell)
    shell.broker.blocked(2)
    publish(shell, 2)
    subjects = [f"w.{row % 20}.x" for row in range(200)]
    shell.publish(1, "s", [bytes(100)] * 200, subject=subjects, tracker=3, codec="gzip")
    publish(shell, 2, first=3)
    shell.broker.writable(2)
    shell.run()
    check(peer, 1_000)


@pytest.mark.moderate
def test_a_link_that_has_much_to_read_stays_on_demand_until_it_has_read_it() -> None:
    shell = Shell(share_min_bytes=100_000, share_max_bytes=100_000)
    shell.hello(1)
    peer = subscribed(shell)
    publish(shell, 40)
    (ping,) = [ping for ping in peer.of(wire.Ping) if ping.token]
    assert offsets(peer, 3) != expected(3, 8_000)
    seen = 0
    while pings := [ping for ping in peer.of(wire.Ping) if ping.token][seen:]:
        for ping in pings:
            shell.send(2, wire.Pong(ping.token))
        seen += len(pings)
    check(peer, 8_000)
    assert audience_of(shell.stream("s")).live == MANY + 1


def test_credit_bounds_those_who_are_served_together() -> None:
    shell = Shell()
    shell.hello(1)
    peer = subscribed(shell, records=5)
    shell.broker.blocked(2)
    publish(shell, 10)
    shell.broker.writable(2)
    shell.run()
    for number in range(MANY):
        assert 0 < len(offsets(peer, number)) < 5 + 10
    for number in range(MANY + 1):
        shell.send(2, wire.Credit(number, 100_000, 1 << 50))
    check(peer, 2_000)


def test_a_stream_that_is_removed_ends_those_who_wait_for_a_read() -> None:
    shell, peer = behind(read=False, shared_read_min=2)
    assert len(shell.reads) == 1
    shell.send(1, wire.RemoveStream(9, "s"))
    assert {ended.subscription for ended in peer.of(wire.Ended)} == set(range(MANY + 1))
    shell.answer_reads()
    shell.run()
    assert shell.broker.gauges["reads_under_way"] == 0


def test_a_gap_amid_what_is_read_for_many_is_told_to_each() -> None:
    shell, peer = behind(read=False, shared_read_min=2)
    (read,) = shell.reads
    shell.reads.clear()
    (run,) = shell._read(read).runs
    spans = tuple(span for span in run.spans if span[2] < 400)
    gap = (400, 1_000, "damaged", "a bad sector")
    shell.broker.history(HistoryRead(read.token, (HistoryRun(run.data, spans),), 2_000, (gap,)))
    shell.run()
    (read,) = shell.reads
    assert read.from_offset == gap[0]
    shell.reads.clear()
    shell.broker.history(HistoryRead(read.token, (), 2_000, (gap,)))
    shell.run()
    shell.answer_reads()
    shell.run()
    gaps = peer.of(wire.Gap)
    assert {command.subscription for command in gaps} == set(range(MANY + 1))
    assert all(command.to == 1_000 for command in gaps)
    for number in range(MANY + 1):
        wanted = [o for o in expected(number, 2_000) if not gap[0] <= o < 1_000]
        assert offsets(peer, number) == wanted


def test_a_read_for_many_that_fails_ends_only_those_whose_own_read_fails() -> None:
    shell, peer = behind(read=False, shared_read_min=2)
    (read,) = shell.reads
    shell.reads.clear()
    shell.broker.history(ReadFailed(read.token, "journal_failed", "a bad disk"))
    shell.run()
    assert peer.of(wire.Ended) == []
    read = shell.reads.pop(0)
    shell.broker.history(ReadFailed(read.token, "journal_failed", "a bad disk"))
    shell.run()
    while shell.reads:
        shell.answer_reads()
        shell.run()
    (ended,) = peer.of(wire.Ended)
    assert ended.code == "journal_failed"
    for number in range(MANY + 1):
        wanted = [] if number == ended.subscription else expected(number, 2_000)
        assert offsets(peer, number) == wanted


def test_reads_for_many_that_bring_them_nowhere_end_them_by_name() -> None:
    shell, peer = behind(read=False, shared_read_min=2)
    for _ in range(3):
        (read,) = shell.reads
        shell.reads.clear()
        shell.broker.history(HistoryRead(read.token, (), read.from_offset))
        shell.run()
    assert shell.reads == []
    ended = {(ended.subscription, ended.code) for ended in peer.of(wire.Ended)}
    assert ended == {(number, "internal") for number in range(MANY + 1)}


@pytest.mark.moderate
def test_rows_of_those_who_take_most_of_what_comes_are_not_kept() -> None:
    shell = Shell(share_min_bytes=1 << 28, share_max_bytes=1 << 28)
    shell.hello(1)
    peer = subscribed(shell)
    broad = range(100, 120)
    for number in broad:
        shell.subscribe(2, number, "s", ["not", ["topic", f"never.{number}"]], [1], gathered=True)
    shell.broker.blocked(2)
    publish(shell, 10, records=2_000)
    stream = shell.stream("s")
    window = SharedWindow(stream, audience_of(stream).subscriptions)
    assert window.fill(hot_batches(stream.hot), stream.next, 1 << 30)
    assert window.rows == 20_000
    assert sum(map(len, window._picks)) <= len(broad) * SELECTOR_ROWS_MAX + 20_000
    shell.broker.writable(2)
    alone = {sub.number for sub in window.share_out(1 << 30, 1 << 30).alone}
    assert alone == set(broad)
    shell.run()
    check(peer, 20_000)
    assert all(offsets(peer, number) == list(range(20_000)) for number in broad)


@pytest.mark.moderate
@pytest.mark.parametrize("picks_max", [150, 1_500, 5_000])
def test_what_a_window_holds_for_all_is_bounded(
    picks_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_window, "PICKS_MAX", picks_max)
    monkeypatch.setattr(shared_window, "SELECTOR_ROWS_MAX", 300)
    shell = Shell()
    shell.hello(1)
    peer = subscribed(shell)
    broad = range(100, 110)
    for number in broad:
        shell.subscribe(2, number, "s", ["not", ["topic", f"never.{number}"]], [1], gathered=True)
    shell.broker.blocked(2)
    publish(shell, 20)
    stream = shell.stream("s")
    window = SharedWindow(stream, audience_of(stream).subscriptions)
    window.fill(hot_batches(stream.hot), stream.next, 1 << 30)
    assert sum(map(len, window._picks)) <= picks_max
    shell.broker.writable(2)
    shell.run()
    check(peer, 4_000)
    assert all(offsets(peer, number) == list(range(4_000)) for number in broad)


def starving(shell: Shell, *names: str) -> dict[str, int]:
    """A stream and a link of each name, with four subscriptions that need one read together."""
    links = {name: 2 + place for place, name in enumerate(names)}
    shell.hello(1)
    for name, link in links.items():
        shell.hello(link)
        for number in range(4):
            pattern = ["topic", f"w.{number}.*"]
            shell.subscribe(link, number, name, pattern, [1], gathered=True)
        shell.broker.blocked(link)
        subjects = [f"w.{row % 20}.x" for row in range(200)]
        shell.publish(1, name, [bytes(100)] * 200, subject=subjects)
    shell.evict()
    for link in links.values():
        shell.broker.writable(link)
        shell.run()
    return links


def test_those_that_ended_while_they_waited_for_a_read_hold_up_no_other() -> None:
    shell = Shell(read=False, shared_read_min=4, reads_max=2)
    links = starving(shell, "first", "second", "gone", "ended", "last")
    assert len(shell.reads) == 2
    shell.send(links["gone"], wire.Bye(""))
    shell.send(links["ended"], wire.Bye(""))
    while shell.reads:
        shell.answer_reads()
        shell.run()
    for name in ("first", "second", "last"):
        for number in range(4):
            assert offsets(shell.peers[links[name]], number) == expected(number, 200)


def test_those_without_room_when_a_read_is_free_hold_up_no_other() -> None:
    shell = Shell(read=False, shared_read_min=4, reads_max=2)
    links = starving(shell, "first", "second", "slow", "slower", "last")
    shell.broker.blocked(links["slow"])
    shell.broker.blocked(links["slower"])
    while shell.reads:
        shell.answer_reads()
        shell.run()
    assert offsets(shell.peers[links["last"]], 3) == expected(3, 200)
    shell.broker.writable(links["slow"])
    shell.broker.writable(links["slower"])
    shell.run()
    while shell.reads:
        shell.answer_reads()
        shell.run()
    for link in links.values():
        for number in range(4):
            assert offsets(shell.peers[link], number) == expected(number, 200)


def test_reads_that_bring_them_nowhere_count_only_in_a_row() -> None:
    shell, peer = behind(20, read=False, shared_read_min=2, step_bytes=60_000, quantum_bytes=30_000)
    empty = 0
    while shell.reads:
        (read,) = shell.reads
        shell.reads.clear()
        shell.broker.history(HistoryRead(read.token, (), read.from_offset))
        empty += 1
        shell.run()
        shell.answer_reads()
        shell.run()
    assert empty > 3
    check(peer, 4_000)


def test_a_gap_that_was_told_is_no_read_that_brought_them_nowhere() -> None:
    shell, peer = behind(read=False, shared_read_min=2)
    for to in (200, 400, 600, 800):
        for gaps in ((), ((to - 200, to, "damaged", ""),)):
            (read,) = shell.reads
            shell.reads.clear()
            shell.broker.history(HistoryRead(read.token, (), read.from_offset, gaps))
            shell.run()
    shell.answer_reads()
    shell.run()
    check(peer, 2_000, begin=800)


def test_those_far_ahead_do_not_wait_for_a_read_that_cannot_reach_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cohorts, "NEIGHBOURS", 500)
    shell = Shell(read=False, shared_read_min=2)
    shell.hello(1)
    publish(shell, 10)
    peer = shell.hello(2)
    shell.broker.blocked(2)
    for number in range(MANY):
        start = [2, 1_500] if number % 2 else [2, 0]
        shell.subscribe(2, number, "s", ["topic", f"w.{number}.*"], start, gathered=True)
    shell.evict()
    shell.broker.writable(2)
    shell.run()
    assert {read.from_offset for read in shell.reads} == {0, 1_500}
    while shell.reads:
        shell.answer_reads()
        shell.run()
    for number in range(MANY):
        assert offsets(peer, number) == expected(number, 2_000, 1_500 if number % 2 else 0)


def test_a_turn_ends_though_no_subscription_takes_anything_of_what_it_looks_through() -> None:
    shell = Shell(step_bytes=10_000)
    shell.hello(1)
    publish(shell, 10)
    shell.hello(2)
    shell.broker.blocked(2)
    for number in range(MANY):
        shell.subscribe(2, number, "s", ["topic", f"never.{number}"], [2, 0], gathered=True)
    shell.broker.writable(2)
    shell.broker.take_ready()
    assert {sub.position for sub in audience_of(shell.stream("s")).subscriptions} == {400}
    shell.run()
    assert audience_of(shell.stream("s")).live == MANY
