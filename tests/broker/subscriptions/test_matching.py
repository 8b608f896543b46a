"""Headers never seen before are matched in slices, and others go on meanwhile.

The meter counts how often it was asked: once a step. So a share of 5 is about 5 steps a turn.
"""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol import header
from malamute_protocol.encode import encode
from malamute_protocol.header import MEMO, HeaderTable
from malamute_py.broker.subscriptions import cohorts, matching, shared_window
from malamute_py.broker.subscriptions.audience import audience_of
from malamute_py.matcher import Classing, Index, index, matches
from tests.broker.shell import Shell
from tests.broker.sliced import Sliced
from tests.seeds import slow

SLOW = [["regex", f"([ab]{{0,12}}a){{0,5}}c{at}"] for at in range(17)]
"""Expressions that took 100 ms for one new subject before repetition was bounded."""


def subjects(number: int, size: int = 30) -> list[str]:
    draw = random.Random(number)
    return ["".join(draw.choices("ab", k=size)) + f"c{at % 17}" for at in range(number)]


def batch(names: Sequence[str]) -> bytes:
    return encode([b"x"] * len(names), subject=list(names))


def offsets(shell: Shell, link: int, number: int) -> list[int]:
    return [offset for offset, _ in shell.peers[link].received.get(number, [])]


def expected(pattern: Any, names: Sequence[str], base: int = 0) -> list[int]:
    return [base + at for at in _expected(json.dumps(pattern), tuple(names))]


@cache
def _expected(pattern: str, names: tuple[str, ...]) -> list[int]:
    """The answers are remembered: one by one they take long."""
    wire = json.loads(pattern)
    return [at for at, name in enumerate(names) if matches(wire, (name,), ())]


def attacked(shell: Sliced, names: Sequence[str]) -> None:
    """17 slow expressions of link 1, and a batch of new subjects of link 2 on its way."""
    for link in (1, 2, 3):
        shell.hello(link)
    shell.publish(2, "s", [b"first"])
    for number, pattern in enumerate(SLOW):
        shell.subscribe(1, number, "s", pattern, [1])
    shell.broker.receive(2, "", [wire.Publish("s", 7)], [batch(names)], shell.now_ms)


@pytest.mark.moderate
def test_a_ping_is_answered_between_two_slices_and_the_confirm_waits_for_none() -> None:
    shell = Sliced()
    names = subjects(100)
    attacked(shell, names)
    turns = answered = confirmed = 0
    while shell.turn():
        turns += 1
        if turns == 10:
            shell.broker.receive(3, "", [wire.Ping(5)], [], shell.now_ms)
        if not answered and shell.peers[3].of(wire.Pong):
            answered = turns
        if not confirmed and any(c.tracker == 7 for c in shell.peers[2].of(wire.Confirm)):
            confirmed = turns
    assert turns > 50
    assert answered <= 12
    assert confirmed <= 3
    for number, pattern in enumerate(SLOW):
        assert offsets(shell, 1, number) == expected(pattern, names, 1)
    assert shell.broker.counters["matching_put_off"] > 0


def test_other_streams_go_on_while_one_is_matched() -> None:
    shell = Sliced()
    attacked(shell, subjects(100))
    shell.turn()
    shell.broker.receive(3, "", [wire.Subscribe(1, "t", ["topic", "x.*"], [1], 99, 1 << 20)], [], 0)
    for _ in range(5):
        shell.turn()
    shell.broker.receive(
        3, "", [wire.Publish("t", 1)], [encode([b"x"], subject="x.y")], shell.now_ms
    )
    for _ in range(5):
        assert shell.turn()
    assert offsets(shell, 3, 1) == [0]
    assert audience_of(shell.stream("s")).late, "the attacked stream is not done yet"


@pytest.mark.moderate
def test_what_comes_after_a_batch_that_is_matched_keeps_its_order() -> None:
    shell = Sliced()
    names = subjects(40)
    attacked(shell, names)
    for at in range(10):
        shell.turn()
        shell.broker.receive(
            2, "", [wire.Publish("s", 100 + at)], [batch(["a" * 9 + "c3"])], shell.now_ms
        )
    shell.run()
    found = offsets(shell, 1, 3)
    assert found == sorted(found)
    assert found == [*expected(SLOW[3], names, 1), *range(41, 51)]


@pytest.mark.moderate
@pytest.mark.parametrize("start", [[0], [1], [2, 1, 0], [2, 30, 0]])
@pytest.mark.parametrize("durable", [0, 1])
def test_who_subscribes_while_a_batch_is_matched_gets_each_record_once(
    start: list[int], durable: int
) -> None:
    shell = Sliced()
    names = subjects(60)
    attacked(shell, names)
    for _ in range(8):
        shell.turn()
    assert audience_of(shell.stream("s")).late
    shell.broker.receive(
        3, "", [wire.Subscribe(1, "s", SLOW[4], start, 1 << 40, 1 << 50, visibility=durable)], [],
        shell.now_ms,
    )  # fmt: skip
    for _ in range(30):
        shell.turn()
    shell.broker.receive(2, "", [wire.Publish("s", 9)], [batch(names)], shell.now_ms)
    shell.run()
    first = {0: 0, 1: 61}[start[0]] if len(start) == 1 else start[1]
    wanted = [*expected(SLOW[4], names, 1), *expected(SLOW[4], names, 61)]
    assert offsets(shell, 3, 1) == [offset for offset in wanted if offset >= first]


@pytest.mark.moderate
def test_a_cover_never_says_more_than_was_given() -> None:
    shell = Sliced()
    names = subjects(60)
    attacked(shell, names)
    for _ in range(20):
        shell.turn()
        shell.now_ms += 4_000
        for link in (1, 2, 3):
            shell.broker.receive(link, "", [wire.Ping(1)], [], shell.now_ms)
        shell.broker.tick(shell.now_ms)
    covers = [c for c in shell.peers[1].of(wire.Cover) if c.next > 1]
    assert audience_of(shell.stream("s")).late
    assert not covers, "Peer checks that covers touch; this one that none goes ahead"
    shell.run()
    assert offsets(shell, 1, 2) == expected(SLOW[2], names, 1)


@pytest.mark.moderate
def test_a_stream_that_falls_too_far_behind_is_read_on_demand_and_loses_nothing() -> None:
    shell = Sliced(matching_bytes_max=100_000)
    names = subjects(30)
    attacked(shell, names)
    base = 31
    every = expected(SLOW[5], names, 1)
    for at in range(12):
        shell.broker.receive(2, "", [wire.Publish("s", 50 + at)], [batch(names)], shell.now_ms)
        shell.turn()
        every += expected(SLOW[5], names, base)
        base += 30
    assert shell.broker.counters["matching_overtaken"] >= 1
    assert audience_of(shell.stream("s")).late_bytes <= 100_000
    shell.run()
    assert offsets(shell, 1, 5) == every


@pytest.mark.moderate
def test_what_waits_for_matching_over_all_streams_has_a_bound_and_loses_nothing() -> None:
    shell = Sliced(hot_bytes=200_000)
    names = subjects(30)
    for link in (1, 2):
        shell.hello(link)
    for at in range(20):
        shell.publish(2, f"s{at}", [b"first"])
        shell.subscribe(1, at, f"s{at}", SLOW[5], [1])
    most = 0
    for _ in range(3):
        for at in range(20):
            # Stream s3 has most of the late bytes each time.
            for _ in range(3 if at == 3 else 1):
                publish = wire.Publish(f"s{at}", 0)
                shell.broker.receive(2, "", [publish], [batch(names)], shell.now_ms)
                shell.turn()
                held = shell.broker.gauges["late_bytes"]
                assert held == sum(
                    audience_of(shell.stream(f"s{one}")).late_bytes for one in range(20)
                )
                most = max(most, held)
    assert 150_000 < most <= 200_000
    assert shell.broker.counters["matching_overtaken"] >= 1
    shell.run()
    assert shell.broker.gauges["late_bytes"] == 0
    assert not shell.broker._delivery._late
    for at in range(20):
        rounds = 9 if at == 3 else 3
        found = [expected(SLOW[5], names, 1 + 30 * one) for one in range(rounds)]
        assert offsets(shell, 1, at) == [offset for some in found for offset in some]
        (sub,) = audience_of(shell.stream(f"s{at}")).subscriptions
        assert sub.prepared is None, "what was chosen of a batch goes with it"


def test_history_is_matched_in_slices_too() -> None:
    shell = Sliced()
    names = subjects(60)
    for link in (1, 2, 3):
        shell.hello(link)
    shell.send(2, wire.Publish("s", 7), frames=[batch(names)])
    shell.evict()
    shell.broker.receive(
        1, "", [wire.Subscribe(1, "s", SLOW[3], [0], 1 << 40, 1 << 50)], [], shell.now_ms
    )
    turns = answered = 0
    while shell.turn():
        turns += 1
        if turns == 6:
            shell.broker.receive(3, "", [wire.Ping(5)], [], shell.now_ms)
        if not answered and shell.peers[3].of(wire.Pong):
            answered = turns
    assert turns > 12
    assert answered <= 8
    assert offsets(shell, 1, 1) == expected(SLOW[3], names)


@pytest.mark.parametrize("evicted", [False, True])
def test_many_that_are_served_together_are_matched_in_slices_too(
    monkeypatch: pytest.MonkeyPatch, *, evicted: bool
) -> None:
    """2,000 subscriptions that waited for a batch of 65,536 new headers held a turn for 0.4 s."""
    monkeypatch.setattr(matching, "AT_ONCE_MAX", 10)
    monkeypatch.setattr(index, "STEP_HEADERS", 1)
    shell = Sliced(shared_read_min=8)
    names = [f"n{at}.{at % 9}" for at in range(120)]
    for link in (1, 2, 3):
        shell.hello(link)
    shell.publish(2, "s", [b"x"] * 120, subject=names)
    shell.publish(2, "s", [b"y"] * 120, subject=[f"m{name}" for name in names], tracker=2)
    if evicted:
        shell.evict()
    looked: list[int] = []
    found = Index.classes

    def noted(self: Index, headers: Sequence[Any]) -> Any:
        looked.extend([1] * len(headers))
        return found(self, headers)

    monkeypatch.setattr(Index, "classes", noted)

    def subscribe(*numbers: int) -> None:
        shell.broker.receive(
            1, "",
            [wire.Subscribe(number, "s", ["topic", f"*.{number % 9}"], [0], 1 << 40, 1 << 50,
                            gathered=True) for number in numbers],
            [], shell.now_ms,
        )  # fmt: skip

    subscribe(*range(9))
    turns = answered = most = 0
    while True:
        before = len(looked)
        if not shell.turn():
            break
        turns += 1
        most = max(most, len(looked) - before)
        if turns == 6:
            shell.broker.receive(3, "", [wire.Ping(5)], [], shell.now_ms)
            # Some subscriptions come and go while the batch is matched for the others.
            shell.broker.receive(1, "", [wire.Unsubscribe(4)], [], shell.now_ms)
            subscribe(*range(20, 29))
        if not answered and shell.peers[3].of(wire.Pong):
            answered = turns
    assert most <= 10, "headers in one turn"
    assert not shell.broker._on_demand._cohorts._ahead
    assert answered <= 8
    for number in [*range(4), *range(5, 9), *range(20, 29)]:
        wanted = [at for at in range(240) if at % 120 % 9 == number % 9]
        assert offsets(shell, 1, number) == wanted, number


@pytest.mark.moderate
def test_what_is_matched_for_many_at_a_time_is_bounded_and_goes_with_those_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,000 subscriptions that came again and again left 1.5 GiB of batches half matched."""
    monkeypatch.setattr(matching, "AT_ONCE_MAX", 10)
    monkeypatch.setattr(index, "STEP_HEADERS", 1)
    made: list[weakref.ref[Any]] = []
    begin = shared_window.Survey.__init__

    def noted(self: Any, *given: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *given)

    monkeypatch.setattr(shared_window.Survey, "__init__", noted)
    shell = Sliced()
    streams = 2 * cohorts.AHEAD_MAX
    for link in (1, 2):
        shell.hello(link)
    for at in range(streams):
        names = [f"n{row}.{row % 9}" for row in range(120)]
        shell.publish(2, f"s{at}", [b"x"] * 120, subject=names)

    def subscribe(at: int) -> None:
        for number in range(9 * at, 9 * at + 9):
            pattern = ["topic", f"*.{number % 9}"]
            shell.broker.receive(
                1, "",
                [wire.Unsubscribe(number),
                 wire.Subscribe(number, f"s{at}", pattern, [0], 1 << 40, 1 << 50, gathered=True)],
                [], shell.now_ms,
            )  # fmt: skip

    most = 0
    gc.disable()
    try:
        for _ in range(5):
            for at in range(streams):
                subscribe(at)
            for _ in range(3):
                shell.turn()
                most = max(most, sum(each() is not None for each in made))
        while shell.turn():
            pass
        left = sum(each() is not None for each in made)
    finally:
        gc.enable()
    assert len(made) > streams
    assert most <= cohorts.AHEAD_MAX + 1
    assert left <= 1
    assert not shell.broker._on_demand._cohorts._ahead
    for at in range(streams):
        for number in range(9 * at, 9 * at + 9):
            wanted = [row for row in range(120) if row % 9 == number % 9]
            assert offsets(shell, 1, number)[-len(wanted) :] == wanted


def publish_large(shell: Shell) -> None:
    """A batch of 2,400 headers, which are a large table."""
    names = [f"n{at}.{at % 9}".ljust(40, "x") for at in range(2_400)]
    for link in (1, 2):
        shell.hello(link)
    shell.publish(2, "s", [b"x"] * len(names), subject=names)


def subscribe_to_six(shell: Shell) -> None:
    """Six subscriptions from the beginning, each for one header, before their first turn."""
    for number in range(6):
        pattern = ["topic", f"n{number}.*"]
        shell.broker.receive(
            1, "", [wire.Subscribe(number, "s", pattern, [0], 1 << 40, 1 << 50)], [], shell.now_ms
        )


@pytest.mark.moderate
def test_large_tables_from_history_are_read_in_steps_for_each_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight readers of batches of 65,536 headers each read their tables in one turn: 260 ms."""
    shell = Sliced(share=1)
    publish_large(shell)
    shell.evict()
    read: list[int] = []
    extend = HeaderTable.extend

    def noted(self: HeaderTable, keys: Any, maps: Any) -> None:
        read.append(len(keys))
        extend(self, keys, maps)

    monkeypatch.setattr(HeaderTable, "extend", noted)
    subscribe_to_six(shell)
    most = 0
    while True:
        before = len(read)
        if not shell.turn():
            break
        most = max(most, len(read) - before)
    assert len(read) == 3, "the table once for all who read it then, in parts of 1,024 keys"
    assert most <= 2, "parts in one turn"
    for number in range(6):
        assert offsets(shell, 1, number) == [number]


@pytest.mark.moderate
def test_a_table_is_not_read_again_where_its_batch_left_memory_while_it_was_matched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of eight readers parsed 65,536 headers in its turn: 30 to 50 ms."""
    shell = Sliced(share=1)
    publish_large(shell)
    subscribe_to_six(shell)
    while shell.broker.counters["matching_put_off"] < 6:
        assert shell.turn()
    assert not any(offsets(shell, 1, number) for number in range(6))
    shell.evict()
    parsed: list[int] = []
    parse_table = header.parse_table

    def noted(*arguments: Any) -> HeaderTable:
        table = parse_table(*arguments)
        parsed.append(len(table.keys))
        return table

    monkeypatch.setattr(header, "parse_table", noted)
    while shell.turn():
        pass
    for number in range(6):
        assert offsets(shell, 1, number) == [number]
    assert max(parsed, default=0) <= 1, "what was extracted is checked"


@pytest.mark.parametrize("kind", ["shared", "keyed", "exclusive"])
@pytest.mark.parametrize("evicted", [False, True])
def test_a_group_s_records_are_matched_in_slices_too(kind: str, *, evicted: bool) -> None:
    shell = Sliced()
    names = subjects(60)
    for link in (1, 2, 3):
        shell.hello(link)
    shell.send(2, wire.Publish("s", 7), frames=[batch(names)])
    if evicted:
        shell.evict()
    join = wire.JoinGroup(1, "s", "g", SLOW[3], kind, [0], 1 << 40, 1 << 50)
    shell.peers[1].members.add(1)
    shell.broker.receive(1, "", [join], [], shell.now_ms)
    turns = 0
    while shell.turn():
        turns += 1
    assert turns > 12
    assert offsets(shell, 1, 1) == expected(SLOW[3], names)


def test_a_job_that_no_reader_waits_for_ends() -> None:
    shell = Sliced()
    attacked(shell, subjects(100))
    for number in range(40):
        shell.broker.receive(
            3, "", [wire.Subscribe(number, "s", SLOW[4], [0], 9, 1 << 20)], [], shell.now_ms
        )
        shell.turn()
    assert len(shell.broker._matching.queue) > 1
    for link in (1, 3):
        shell.broker.link_lost(link, shell.now_ms)
    for _ in range(20):
        shell.turn()
    assert not shell.broker._matching.queue
    assert not audience_of(shell.stream("s")).late


@pytest.mark.moderate
def test_headers_are_not_made_in_one_go_when_the_last_who_waits_for_them_leaves() -> None:
    shell = Sliced()
    shell.hello(1)
    shell.hello(2)
    shell.publish(2, "s", [b"first"])
    shell.subscribe(1, 1, "s", ["topic", "a.*"], [1])
    names = [f"{number}" for number in range(20_000)]
    shell.broker.receive(2, "", [wire.Publish("s", 7)], [batch(names)], shell.now_ms)
    while not audience_of(shell.stream("s")).late:
        shell.turn()
    (late,) = audience_of(shell.stream("s")).late
    shell.broker.receive(1, "", [wire.Unsubscribe(1)], [], shell.now_ms)
    shell.run()
    assert not audience_of(shell.stream("s")).late
    assert late.batch.content._headers is None, "they would be made in one go"


@pytest.mark.moderate
@pytest.mark.parametrize("first", [0, *slow([5, 10, 15, 20, 25])])
def test_random_subscribers_come_and_go_while_batches_are_matched(first: int) -> None:
    for seed in range(first, first + 5):
        draw = random.Random(seed)
        shell = Sliced(share=draw.choice([1, 3, 20]))
        for link in (1, 2, 3):
            shell.hello(link)
        names: list[str] = []
        known: dict[tuple[int, int], tuple[Any, int]] = {}
        for step in range(60):
            what = draw.random()
            if what < 0.35:
                some = subjects(draw.randrange(1, 12), draw.randrange(1, 30))
                shell.broker.receive(2, "", [wire.Publish("s", step + 1)], [batch(some)], 0)
                shell.turn()  # The reader's position becomes known.
                names += some
            elif what < 0.5:
                link, number, pattern = draw.choice([1, 3]), step, draw.choice(SLOW)
                start = draw.choice([[0], [2, len(names), 0]]) if names else [0]
                command = wire.Subscribe(
                    number, "s", pattern, start, 1 << 40, 1 << 50,
                    visibility=draw.randrange(2), create=True,
                )  # fmt: skip
                shell.broker.receive(link, "", [command], [], 0)
                known[link, number] = pattern, start[1] if len(start) > 1 else 0
            elif what < 0.6 and known:
                link, number = draw.choice(list(known))
                del known[link, number]
                shell.broker.receive(link, "", [wire.Unsubscribe(number)], [], 0)
            else:
                shell.turn()
        shell.run()
        for (link, number), (pattern, first) in known.items():
            wanted = [offset for offset in expected(pattern, names) if offset >= first]
            assert offsets(shell, link, number) == wanted, f"seed {seed}"


def test_classes_in_steps_are_those_of_one_go() -> None:
    index = Index()
    for pattern in (*SLOW[:5], ["topic", "a.*"], ["not", ["regex", "b+c1"]],
                    ["and", ["prefix", "a"], ["not", ["regex", "ab"]]]):  # fmt: skip
        index.add(pattern)
    headers = [((name,), ()) for name in (*subjects(300, 9), "a.b", "q")]
    job = Classing(index, lambda: headers)
    draw = random.Random(1)
    more: Callable[[], bool] = lambda: draw.random() < 0.7  # noqa: E731
    while not job.run(more):
        pass
    whole = {tuple(numbers): sorted(places) for numbers, places in index.classes(headers)}
    assert {tuple(numbers): sorted(places) for numbers, places in job.classes} == whole


@pytest.mark.moderate
def test_a_large_header_table_is_read_in_steps_of_many_turns() -> None:
    """10,000 field maps of 64 fields held the loop for 1.7 to 3.5 s before."""
    shell = Sliced(share=20)
    for link in (1, 2):
        shell.hello(link)
    shell.publish(2, "s", [b"first"])
    maps = [{f"n{at}": f"v{number}" for at in range(64)} for number in range(2_000)]
    frame = encode([b"x"] * 2_000, fields=maps)
    asked = turns = 0
    before = shell.asked()
    while not shell.broker.read_ahead(2, [], [frame], shell.now_ms):
        steps = shell.asked() - before
        assert steps <= 25
        asked += steps
        turns += 1
        shell.turn()
        before = shell.asked()
    assert turns > 4
    shell.broker.receive(2, "", [wire.Publish("s", 7)], [frame], shell.now_ms)
    while shell.turn():
        pass
    assert shell.stream("s").next == 2_001


@pytest.mark.moderate
def test_what_was_read_of_a_frame_is_used_after_the_creation_of_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = Sliced(share=20)
    shell.hello(1)
    maps = [{f"n{at}": f"v{number}" for at in range(64)} for number in range(200)]
    frame = encode([b"x"] * 200, fields=maps)
    while not shell.broker.read_ahead(1, [], [frame], shell.now_ms):
        shell.turn()

    def once_more(*_: Any) -> Any:
        raise AssertionError("the table is read a second time, in one go")

    monkeypatch.setattr(MEMO, "table", once_more)
    shell.broker.receive(1, "", [wire.Publish("new", 7)], [frame], shell.now_ms)
    while shell.turn():
        pass
    assert shell.stream("new").next == 200


def test_records_with_an_id_each_are_few_headers_and_are_gathered_over_batches() -> None:
    """Tables of the batch allow 10,000 headers; it has 100: late readers are served together."""
    shell = Shell(meter=lambda: 0, matching_share=2_000_000)
    for link in (1, 2):
        shell.hello(link)
    shell.publish(2, "s", [b"first"])
    for number in range(20):
        shell.subscribe(1, number, "s", ["topic", f"a.{number}"], [1], records=0, gathered=True)
    frames = [
        encode(
            [b"x"] * 100,
            subject=[f"a.{n}" for n in range(100)],
            fields=[{"id": f"{n}"} for n in range(100)],
        )
    ]
    for tracker in range(10):
        shell.send(2, wire.Publish("s", 7 + tracker), frames=frames)
    shell.broker.receive(
        1, "", [wire.Credit(n, 1 << 40, 1 << 50) for n in range(20)], [], shell.now_ms
    )
    shell.run()
    peer = shell.peers[1]
    assert sum(len(peer.received[number]) for number in range(20)) == 200
    assert len(peer.of(wire.Deliver)) == 20, "one for each reader, not one for each batch"


@pytest.mark.moderate
def test_no_more_history_is_read_than_is_matched() -> None:
    """280 batches that had been read for readers alone waited to be matched: 500 MiB."""
    shell = Sliced(reads_max=3)
    names = subjects(60)
    for link in (1, 2):
        shell.hello(link)
    shell.send(2, wire.Publish("s", 7), frames=[batch(names)])
    shell.evict()
    readers = [wire.Subscribe(at, "s", SLOW[at % 17], [0], 1 << 40, 1 << 50) for at in range(40)]
    shell.broker.receive(1, "", readers, [], shell.now_ms)
    most = 0
    while shell.turn():
        most = max(most, len(shell.broker._matching.queue))
    assert 3 <= most <= 2 * 3 + 3
    for at in range(40):
        assert offsets(shell, 1, at) == expected(SLOW[at % 17], names)
