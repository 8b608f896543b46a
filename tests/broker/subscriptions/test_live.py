"""Delivery: credit, live and on demand, groups and their encodings."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_py.broker.log.stream import headers_memory
from tests.broker.shell import Shell, bodies, offsets


def modes(peer: Any, subscription: int) -> list[tuple[bool, int]]:
    return [(m.live, m.offset) for m in peer.of(wire.Mode) if m.subscription == subscription]


# --- credit -------------------------------------------------------------------------------


def test_without_credit_nothing_is_delivered() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", records=0, size=0)
    shell.publish(1, "s", [b"x"])
    assert not peer.of(wire.Deliver)


def test_a_delivery_may_overdraw_credit_by_one_batch() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", records=3)
    for n in range(4):
        shell.publish(1, "s", [b"x"] * 2, tracker=n + 1)
    assert offsets(peer, 1) == [0, 1, 2, 3]


@pytest.mark.parametrize("hot", [True, False])
def test_credit_bounds_what_is_served_from_memory_and_from_history(hot: bool) -> None:
    shell = Shell()
    shell.hello(1)
    for n in range(9):
        shell.publish(1, "s", [b"x"] * 2, tracker=n + 1)
    if not hot:
        shell.evict()
    peer = shell.subscribe(1, 1, "s", records=5)
    assert offsets(peer, 1) == [0, 1, 2, 3, 4, 5]
    shell.subscribe(1, 2, "s", size=600)
    assert len(bodies(peer, 2)) == 6


def test_credit_in_bytes_bounds_too() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", size=3_000)
    for n in range(9):
        shell.publish(1, "s", [bytes(1_000)], tracker=n + 1)
    assert len(bodies(peer, 1)) == 3


def test_credit_is_cumulative_and_never_falls() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", records=2)
    for n in range(10):
        shell.publish(1, "s", [b"x"], tracker=n + 1)
    shell.send(1, wire.Credit(1, 1, 1))
    shell.send(1, wire.Credit(1, 4, 1 << 50))
    assert len(bodies(peer, 1)) == 4
    shell.send(1, wire.Credit(1, 4, 1 << 50))
    assert len(bodies(peer, 1)) == 4


def test_a_live_subscription_without_credit_goes_on_demand_and_back_and_loses_nothing() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", start=[1], records=2)
    for n in range(6):
        shell.publish(1, "s", [str(n).encode()], tracker=n + 1)
    assert modes(peer, 1) == [(True, 0), (False, 2)]
    shell.send(1, wire.Credit(1, 100, 1 << 50))
    assert modes(peer, 1) == [(True, 0), (False, 2), (True, 6)]
    shell.publish(1, "s", [b"6"], tracker=9)
    assert bodies(peer, 1) == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]


def test_a_subscription_without_credit_stays_live_while_nothing_matches() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", ["topic", "a"], start=[1], records=1)
    shell.publish(1, "s", [b"x"], tracker=1, subject="a")
    for n in range(5):
        shell.publish(1, "s", [b"x"], tracker=2 + n, subject="b")
    assert modes(peer, 1) == [(True, 0)]
    shell.publish(1, "s", [b"x"], tracker=9, subject="a")
    assert modes(peer, 1) == [(True, 0), (False, 6)]


def test_a_reader_too_slow_for_the_hot_window_reads_it_all_from_the_journal() -> None:
    shell = Shell(hot_bytes=50_000)
    shell.hello(1)
    shell.hello(2)
    slow = shell.subscribe(2, 1, "s", records=5)
    for n in range(100):
        shell.publish(1, "s", [bytes([n]) * 1_000], tracker=n + 1)
    assert shell.broker.gauges["hot_bytes"] <= 50_000
    assert shell.broker.counters["reads"] == 0
    for credit in range(10, 200, 7):
        shell.send(2, wire.Credit(1, credit, 1 << 50))
    assert [body[0] for body in bodies(slow, 1)] == list(range(100))
    assert shell.broker.counters["reads"] > 0


# --- covers -------------------------------------------------------------------------------


def test_an_empty_cover_comes_with_the_heartbeat_when_the_position_moved() -> None:
    shell = Shell(heartbeat_ms=100)
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", ["topic", "rare"], start=[1])
    shell.publish(1, "s", [b"x"] * 3)
    assert not peer.of(wire.Cover)
    shell.wait(100)
    assert peer.of(wire.Cover) == [wire.Cover(1, 0, 3)]
    shell.send(1, wire.Pong(0))
    shell.wait(100)
    assert len(peer.of(wire.Cover)) == 1
    shell.publish(1, "s", [b"y"], tracker=2, subject="rare")
    assert peer.last(wire.Deliver).from_ == 3


def test_a_delivery_covers_what_was_skipped_before_it() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", ["topic", "rare"], start=[1])
    shell.publish(1, "s", [b"x"] * 7, tracker=1)
    shell.publish(1, "s", [b"y"], tracker=2, subject="rare")
    deliver = peer.last(wire.Deliver)
    assert (deliver.from_, deliver.next) == (0, 8)


def test_a_gap_is_preceded_by_a_cover_of_what_lies_before_it() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", ["topic", "a"], records=1)
    shell.publish(1, "s", [b"x"], tracker=1, subject="a")
    shell.publish(1, "s", [b"x"] * 3, tracker=2, subject="b")
    shell.publish(1, "s", [b"x"] * 3, tracker=3, subject="a")
    shell.publish(1, "s", [b"y"], tracker=4, subject="a")
    shell.firsts[1] = 7
    shell.broker.trimmed("main", {1: 7})
    shell.send(1, wire.Credit(1, 100, 1 << 50))
    assert peer.last(wire.Cover) == wire.Cover(1, 1, 4)
    gap = peer.last(wire.Gap)
    assert (gap.from_, gap.to, gap.code) == (4, 7, "retention")
    assert bodies(peer, 1) == [b"x", b"y"]


def test_a_gap_that_the_reader_finds_is_told_in_its_place() -> None:
    from malamute_py.broker import HistoryRead, HistoryRun

    shell = Shell(read=False)
    shell.hello(1)
    for n in range(4):
        shell.publish(1, "s", [str(n).encode()], tracker=n + 1)
    shell.evict()
    peer = shell.subscribe(1, 1, "s")
    (read,) = shell.reads
    whole = shell._read(read)
    (run,) = whole.runs
    runs = (HistoryRun(run.data, run.spans[:1]), HistoryRun(run.data, run.spans[3:]))
    shell.reads.clear()
    shell.broker.history(HistoryRead(read.token, runs, 4, ((1, 3, "damaged", "bad checksum"),)))
    shell.run()
    assert bodies(peer, 1) == [b"0", b"3"]
    gap = peer.last(wire.Gap)
    assert (gap.from_, gap.to, gap.code, gap.reason) == (1, 3, "damaged", "bad checksum")


# --- encodings ----------------------------------------------------------------------------


def test_subscribers_who_take_all_share_the_very_frame_that_came() -> None:
    shell = Shell()
    shell.hello(1)
    for link in (2, 3, 4):
        shell.hello(link)
        shell.subscribe(link, 1, "s", start=[1])
    shell.readies.clear()
    from malamute_protocol.encode import encode

    content = encode([b"x"] * 100, subject="s")
    shell.send(1, wire.Publish("s", 1), frames=[content])
    sent = [
        send for ready in shell.readies for send in ready.sends if send.link != 1 and send.frames
    ]
    assert len(sent) == 3
    for send in sent:
        assert send.frames[1] is content
        assert send.frames[0] is sent[0].frames[0]


def test_few_rows_of_a_large_batch_are_extracted_once_for_all_who_select_them() -> None:
    shell = Shell()
    shell.hello(1)
    for link in (2, 3):
        shell.hello(link)
        shell.subscribe(link, 1, "s", ["topic", "rare"], start=[1])
    shell.readies.clear()
    subjects = ["common"] * 199 + ["rare"]
    shell.publish(1, "s", [bytes(100)] * 200, subject=subjects)
    sent = [
        send for ready in shell.readies for send in ready.sends if send.link != 1 and send.frames
    ]
    assert len(sent[0].frames[1]) < 1_000
    assert sent[0].frames[1] is sent[1].frames[1]
    assert shell.peers[2].last(wire.Deliver).rows is None
    assert offsets(shell.peers[2], 1) == [199]


def test_one_who_asks_for_whole_batches_gets_rows_of_the_batch_as_it_was() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", ["topic", "rare"], start=[1], whole=True)
    shell.publish(1, "s", [bytes(100)] * 200, subject=["common"] * 199 + ["rare"])
    deliver = peer.last(wire.Deliver)
    assert deliver.rows == bytes(24) + b"\x80"
    assert offsets(peer, 1) == [199]


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_batches_are_never_taken_apart(codec: str) -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", ["topic", "rare"], start=[1])
    shell.publish(1, "s", [bytes(100)] * 200, subject=["common"] * 199 + ["rare"], codec=codec)
    assert peer.last(wire.Deliver).rows is not None
    assert offsets(peer, 1) == [199]


def test_a_replay_of_whole_batches_goes_out_as_one_frame() -> None:
    shell = Shell()
    shell.hello(1)
    for n in range(50):
        shell.publish(1, "s", [b"x"] * 3, tracker=n + 1)
    shell.evict()
    peer = shell.subscribe(1, 1, "s")
    (deliver,) = peer.of(wire.Deliver)
    assert (deliver.from_, deliver.next, deliver.frames, deliver.rows) == (0, 150, 1, None)


def test_subscriptions_with_overlapping_patterns_each_get_their_own_rows() -> None:
    shell = Shell()
    shell.hello(1)
    patterns = [["topic", "a.#"], ["topic", "#.z"], ["topic", "b.z"], ["all"], ["prefix", "c"]]
    for number, pattern in enumerate(patterns):
        shell.subscribe(1, number, "s", pattern, start=[1])
    subjects = ["a.y", "a.z", "b.y", "b.z", "c", "a.z"]
    peer = shell.publish(1, "s", [str(n).encode() for n in range(6)], subject=subjects)
    got = [offsets(peer, number) for number in range(5)]
    assert got == [[0, 1, 5], [1, 3, 5], [3], [0, 1, 2, 3, 4, 5], [4]]


def test_many_selections_of_one_batch_each_get_their_own_rows() -> None:
    shell = Shell()
    shell.hello(1)
    for number in range(20):
        shell.subscribe(1, number, "s", ["topic", f"w.{number}.*"], start=[1])
    shell.subscribe(1, 20, "s", ["topic", "*.3.*"], start=[1], whole=True)
    shell.subscribe(1, 21, "s", ["topic", "w.#"], start=[1])
    shell.subscribe(1, 22, "s", ["or", ["topic", "w.1.x"], ["topic", "w.2.x"]], start=[1])
    shell.subscribe(1, 23, "s", ["all"], start=[1])
    subjects = [f"w.{row % 19}.x" for row in range(100)]
    peer = shell.publish(1, "s", [bytes(100)] * 100, subject=subjects)
    for number in range(20):
        assert offsets(peer, number) == [row for row in range(100) if row % 19 == number]
    assert offsets(peer, 20) == offsets(peer, 3)
    assert offsets(peer, 21) == offsets(peer, 23) == list(range(100))
    assert offsets(peer, 22) == sorted(offsets(peer, 1) + offsets(peer, 2))
    deliveries = {m.subscription: m for m in peer.of(wire.Deliver)}
    assert deliveries[20].rows is not None
    assert deliveries[3].rows is None


def test_the_same_header_table_with_other_codes_is_another_selection() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", ["fields", "all", [["k"]]], start=[1])
    shell.publish(1, "s", [b"0", b"1"], tracker=1, fields={"k": "v"})
    shell.publish(1, "s", [b"2", b"3"], tracker=2, fields=[{"k": "v"}, None])
    assert offsets(peer, 1) == [0, 1, 2]


# --- fairness and bounds ------------------------------------------------------------------


def test_one_subscription_has_one_read_under_way_and_all_together_are_bounded() -> None:
    shell = Shell(read=False, reads_max=3, quantum_bytes=500)
    shell.hello(1)
    for n in range(20):
        shell.publish(1, "s", [bytes(400)], tracker=n + 1)
    shell.evict()
    for number in range(10):
        shell.subscribe(1, number, "s")
    assert len(shell.reads) == 3
    assert shell.broker.gauges["reads_under_way"] == 3
    for _ in range(1000):
        if not shell.reads:
            break
        shell.answer_reads()
        shell.run()
        assert len(shell.reads) <= 3
    assert all(len(bodies(shell.peers[1], number)) == 20 for number in range(10))


def test_subscriptions_on_demand_take_turns() -> None:
    shell = Shell(quantum_bytes=1_000, step_bytes=3_000)
    shell.hello(1)
    for n in range(50):
        shell.publish(1, "s", [bytes(900)], tracker=n + 1)
    shell.readies.clear()
    shell.send(
        1,
        *(wire.Subscribe(number, "s", ["all"], [0], 1000, 1 << 30) for number in range(6)),
    )
    order = [
        command.subscription
        for ready in shell.readies
        for send in ready.sends
        for command in send.commands
        if type(command) is wire.Deliver
    ]
    assert order[:12] == [0, 1, 2, 3, 4, 5] * 2
    most = max(
        sum(type(c) is wire.Deliver for send in ready.sends for c in send.commands)
        for ready in shell.readies
    )
    assert most <= 4


def test_what_was_read_for_a_link_that_blocked_meanwhile_is_dropped_and_read_again() -> None:
    shell = Shell(read=False)
    shell.hello(1)
    shell.hello(2)
    for n in range(5):
        shell.publish(1, "s", [b"x"], tracker=n + 1)
    shell.evict()
    peer = shell.subscribe(2, 1, "s")
    shell.broker.blocked(2)
    shell.answer_reads()
    shell.run()
    assert not shell.reads
    shell.broker.writable(2)
    shell.run()
    shell.answer_reads()
    shell.run()
    assert len(bodies(peer, 1)) == 5


def test_a_read_that_fails_ends_the_subscription_by_name_and_says_so() -> None:
    from malamute_py.broker import ReadFailed

    shell = Shell(read=False)
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    shell.evict()
    peer = shell.subscribe(1, 1, "s")
    shell.broker.history(ReadFailed(shell.reads.pop().token, "damaged", "EIO"))
    shell.run()
    assert peer.last(wire.Ended) == wire.Ended(1, 0, "damaged")
    assert [event.name for event in shell.events if event.level == "error"] == ["read_failed"]


def test_a_reader_that_never_gets_on_is_not_asked_for_ever() -> None:
    from malamute_py.broker import HistoryRead

    shell = Shell(read=False)
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    shell.evict()
    peer = shell.subscribe(1, 1, "s")
    for _ in range(10):
        for read in shell.reads:
            shell.reads = []
            shell.broker.history(HistoryRead(read.token, (), 0))
        shell.run()
    assert peer.last(wire.Ended).code == "internal"


def test_answers_that_no_reader_waits_for_are_dropped() -> None:
    from malamute_py.broker import HistoryRead, IndexAnswer

    shell = Shell(read=False)
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    shell.evict()
    shell.subscribe(1, 1, "s")
    (read,) = shell.reads
    shell.send(1, wire.Unsubscribe(1))
    shell.answer_reads()
    shell.broker.history(HistoryRead(read.token, (), 0))
    shell.broker.answered(IndexAnswer(12345, None))
    shell.broker.synced("no such ring", 5, shell.now_ms)
    shell.broker.trimmed("main", {99: 5})
    shell.run()
    assert shell.broker.gauges["reads_under_way"] == 0


def test_a_batch_costs_nothing_to_subscriptions_that_do_not_match() -> None:
    shell = Shell()
    shell.hello(1)
    for number in range(200):
        shell.subscribe(1, number, "s", ["topic", f"other.{number}"], start=[1])
    said = len(shell.peers[1].commands)
    shell.publish(1, "s", [b"x"])
    assert len(shell.peers[1].commands) == said + 1


def test_the_time_from_an_append_to_its_live_delivery_is_measured_and_no_replay() -> None:
    shell = Shell(sync=False)
    shell.hello(1)
    shell.publish(1, "s", [b"old"])
    shell.sync()
    shell.run()
    shell.subscribe(1, 1, "s")
    shell.subscribe(1, 2, "s", start=[1], visibility=1)
    shell.publish(1, "s", [b"new"], tracker=2)
    shell.now_ms += 20
    shell.sync()
    shell.run()
    measured = shell.broker.latencies["delivery"]
    assert sum(measured["counts"]) == 2
    assert measured["sum_s"] == 0.02


# --- more than is given at once ------------------------------------------------------------


class Stepwise(Shell):
    """A broker that notes what its shell had to send at once."""

    def __init__(self, **settings: Any) -> None:
        self.rounds: list[list[int]] = []
        """The links of the deliveries that each Ready had to send."""
        super().__init__(**settings)

    def _do(self, ready: Any) -> None:
        self.rounds.append(
            [s.link for s in ready.sends for one in s.commands if isinstance(one, wire.Deliver)]
        )
        super()._do(ready)


def publish_together(shell: Shell, stream: str, count: int) -> None:
    """Publish batches of one record each, in one message."""
    commands = [wire.Publish(stream, at + 1) for at in range(count)]
    frames = [encode([b"%d" % at], subject="s") for at in range(count)]
    shell.send(2, *commands, frames=frames)


@pytest.mark.parametrize(("links", "most"), [(1, 128), (10, 200), (50, 408)])
def test_what_many_subscriptions_are_given_in_a_turn_is_bounded(links: int, most: int) -> None:
    """64 for each link that gets something, the publisher's too, up to 200; 8 where many do."""
    shell = Stepwise(fan_out_max=50)
    for link in range(2, 3 + links):
        shell.hello(link)
    for at in range(100):
        shell.subscribe(3 + at % links, at, "s")
    shell.rounds.clear()
    publish_together(shell, "s", 30)
    assert max(map(len, shell.rounds)) <= most
    assert sum(map(len, shell.rounds)) == 3_000
    for at in range(100):
        assert bodies(shell.peers[3 + at % links], at) == [b"%d" % one for one in range(30)]
    assert not shell.broker.counters["fell_behind"]
    assert not shell.broker.gauges["late_bytes"]


def test_a_subscription_that_lags_and_comes_back_amid_a_batch_gets_it_once() -> None:
    """It has read the batch on demand before its turn among those that are given it live."""
    shell = Stepwise(fan_out_max=1)
    for link in (2, 3, 4, 5):
        shell.hello(link)
    for at in range(4):
        shell.subscribe(3, at, "s")
    peer = shell.subscribe(4, 9, "s", records=1)
    shell.subscribe(5, 9, "s")
    publish_together(shell, "s", 1)
    commands = [wire.Publish("s", at + 1) for at in range(3)]
    frames = [encode([b"n%d" % at], subject="s") for at in range(3)]
    shell.broker.receive(2, "", commands, frames, shell.now_ms)
    for turn in range(30):
        shell._do(shell.broker.take_ready())
        shell.sync()
        shell.broker.tick(shell.now_ms)
        if turn == 1:
            shell.broker.receive(4, "", [wire.Credit(9, 1 << 40, 1 << 50)], [], shell.now_ms)
    shell.run()
    assert bodies(peer, 9) == [b"0", b"n0", b"n1", b"n2"]
    for at in range(4):
        assert bodies(shell.peers[3], at) == [b"0", b"n0", b"n1", b"n2"]


def test_streams_with_many_subscriptions_have_their_turns_by_turns() -> None:
    shell = Stepwise(fan_out_max=50)
    for link in (2, 3, 4):
        shell.hello(link)
    for at in range(100):
        shell.subscribe(4, at, "s")
    peer = shell.subscribe(3, 1, "t")
    shell.rounds.clear()
    commands = [wire.Publish("s", at + 1) for at in range(20)] + [wire.Publish("t", 99)]
    shell.send(2, *commands, frames=[encode([b"x"], subject="s")] * 21)
    links = [link for links in shell.rounds for link in links]
    assert links.count(4) == 2_000
    assert links.index(3) <= 200, "the other stream has its turn after one of the large one"
    assert bodies(peer, 1) == [b"x"]


def test_what_waits_to_be_given_is_bounded_and_nothing_is_lost() -> None:
    shell = Shell(fan_out_max=10, matching_bytes_max=3_000)
    for link in (2, 3):
        shell.hello(link)
    for at in range(20):
        shell.subscribe(3, at, "s")
    publish_together(shell, "s", 50)
    assert shell.broker.counters["matching_overtaken"] >= 1
    for at in range(20):
        assert bodies(shell.peers[3], at) == [b"%d" % one for one in range(50)]
    assert not shell.broker.gauges["late_bytes"]
    publish_together(shell, "s", 1)
    assert bodies(shell.peers[3], 7)[-1] == b"0"


def test_a_subscription_that_ends_while_its_batches_wait_gets_no_more_of_them() -> None:
    shell = Stepwise(fan_out_max=1)
    for link in (2, 3):
        shell.hello(link)
    peer = shell.subscribe(3, 1, "s")
    shell.subscribe(3, 2, "s")
    commands = [wire.Publish("s", at + 1) for at in range(9)]
    shell.broker.receive(2, "", commands, [encode([b"x"], subject="s")] * 9, shell.now_ms)
    shell._do(shell.broker.take_ready())
    shell.send(3, wire.Unsubscribe(1))
    (ended,) = [end for end in peer.of(wire.Ended) if end.subscription == 1]
    assert ended.next == len(bodies(peer, 1))
    assert len(bodies(peer, 1)) < 9
    assert len(bodies(peer, 2)) == 9


def test_one_batch_alone_waits_however_large_it_is() -> None:
    shell = Shell(fan_out_max=10, matching_bytes_max=100)
    for link in (2, 3):
        shell.hello(link)
    for at in range(30):
        shell.subscribe(3, at, "s")
    publish_together(shell, "s", 1)
    assert not shell.broker.counters["fell_behind"]
    assert bodies(shell.peers[3], 29) == [b"0"]


def test_all_that_waits_is_given_before_the_broker_ends() -> None:
    shell = Shell(fan_out_max=10)
    for link in (2, 3):
        shell.hello(link)
    for at in range(100):
        shell.subscribe(3, at, "s")
    commands = [wire.Publish("s", at + 1) for at in range(5)]
    frames = [encode([b"x"], subject="s")] * 5
    shell.broker.receive(2, "", commands, frames, shell.now_ms)
    shell._do(shell.broker.take_ready())
    assert len(bodies(shell.peers[3], 99)) < 5
    shell.broker.drain(shell.now_ms)
    shell._do(shell.broker.take_ready())
    assert [len(bodies(shell.peers[3], at)) for at in range(100)] == [5] * 100


def test_subscriptions_without_credit_count_as_they_are_looked_at() -> None:
    shell = Stepwise(fan_out_max=20)
    for link in (2, 3, 4):
        shell.hello(link)
    for at in range(300):
        shell.subscribe(3, at, "s", records=1)
    shell.subscribe(4, 1, "s")
    publish_together(shell, "s", 1)  # They have no credit left.
    shell.rounds.clear()
    publish_together(shell, "s", 40)
    # One batch costs 1 and an eighth of 301 looks; the bound is 80 where two links get something.
    assert max(links.count(4) for links in shell.rounds) < 10
    assert bodies(shell.peers[4], 1)[1:] == [b"%d" % at for at in range(40)]


# --- the hot window --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 6, 20])
def test_header_tables_count_in_the_hot_window_as_what_they_take(size: int) -> None:
    """100 MiB of field maps stayed in memory, which counted as 16."""
    data = encode(
        [b""] * 300, subject=[f"s.{at}" for at in range(300)],
        fields=[{f"field{n}": f"{at:0{size}}" for n in range(40)} for at in range(300)],
    )  # fmt: skip
    tracemalloc.start()
    try:
        content = Content(data)
        headers, _ = content.headers()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(headers) == 300
    assert 0.4 * taken < headers_memory(content) < 2.5 * taken
