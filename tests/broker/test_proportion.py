"""Work of the core is in proportion to what happens, not to how much exists besides."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from random import Random

import msgspec
import pytest

from malamute_protocol import commands as wire
from malamute_py.broker.cursors.pins import LOOKS_MAX as PINS_MAX
from malamute_py.broker.cursors.pins import MARK_MS, Cursor
from malamute_py.broker.groups.member import Member
from malamute_py.broker.links.links import BEAT_SLOTS
from malamute_py.broker.log.newest import Keys
from malamute_py.broker.log.stream import NEVER
from malamute_py.broker.streams.producers import Producers
from malamute_py.broker.streams.retention import LOOKS_MAX
from malamute_py.broker.subscriptions.audience import Audience, audience_of
from malamute_py.broker.subscriptions.subscription import Subscription
from malamute_py.changelog.ranges import with_done
from malamute_py.changelog.snapshots import Sequence64
from tests.broker.shell import Shell


def standing(streams: int, producers: int) -> Producers:
    """So many producers, each of which wrote once to each of so many streams."""
    table = Producers(1)
    for id in range(1, producers + 1):
        table.opened(id, "", 0)
        producer = table.get(id)
        assert producer is not None
        for number in range(1, streams + 1):
            table.enter(producer, number).appended(0, 1, id, 1_000 + id, 7, 128)
    return table


def test_a_snapshot_packs_anew_only_the_producers_that_wrote_since_the_last_one() -> None:
    producers = standing(streams=3, producers=50)
    first = list(producers.sequences([1, 2, 3], 32))
    assert len(first) == 150
    busy = producers.get(7)
    assert busy is not None
    producers.enter(busy, 2).appended(1, 1, 900, 2_000, 7, 128)
    second = list(producers.sequences([1, 2, 3], 32))
    kept = {id(packed) for packed in first}
    changed = [packed for packed in second if id(packed) not in kept]
    assert len(second) == 150
    assert len(changed) == 1
    contents = struct.pack("<QIQI", 0, 7, 1, 7)
    now = Sequence64(7, 0, 2, 2, [(0, 7, 1_007, 1), (1, 900, 2_000, 1)], contents)
    assert bytes(changed[0]) == msgspec.msgpack.encode(now)


def test_a_key_that_is_put_does_not_ask_all_streams_how_many_keys_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = Shell()
    shell.hello(1)
    for number in range(20):
        settings = {"keep": "last-per-subject", "ring_bytes": 1 << 20}
        shell.send(1, wire.CreateStream(1, f"s{number}", settings))
    asked = []

    def getting(keys: Keys, name: str) -> object:
        asked.append(keys)
        return object.__getattribute__(keys, name)

    monkeypatch.setattr(Keys, "__getattribute__", getting)
    shell.publish(1, "s7", [b"x"], subject="a")
    monkeypatch.undo()
    assert {id(keys) for keys in asked} == {id(shell.stream("s7").keys)}


def test_the_snapshot_of_a_ring_asks_for_its_own_streams_only() -> None:
    shell = Shell()
    shell.hello(1)
    for name, settings in (("a", {}), ("b", {}), ("c", {"ring_bytes": 1 << 22})):
        shell.send(1, wire.CreateStream(1, name, settings))
    broker, own = shell.broker, shell.stream("c").ring.name
    streams = {stream.name: stream.number for stream in broker._catalogue}
    assert set(broker._catalogue.numbers_in("main")) == {streams["a"], streams["b"]}
    assert list(broker._catalogue.numbers_in(own)) == [streams["c"]]
    assert set(broker._catalogue.numbers_in("")) == set(streams.values())
    assert not broker._catalogue.numbers_in("unheard-of")


def test_a_stream_that_goes_takes_only_its_own_producers_places_along() -> None:
    producers = standing(streams=3, producers=10)
    producers.stream_removed(2)
    assert producers.places == 20
    assert list(producers.sequences([2], 32)) == []
    assert len(list(producers.sequences([1, 3], 32))) == 20
    producers.forgotten([1, 2])
    assert producers.places == 16
    producers.forgotten(range(3, 11))
    assert producers.places == 0
    assert producers._places == {}, "what left leaves nothing behind"


@pytest.mark.moderate
def test_a_subscription_that_goes_is_not_looked_for_among_all_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = Shell()
    shell.hello(1)
    for link in range(2, 202):
        shell.hello(link)
        shell.subscribe(link, 1, "s")
        shell.subscribe(link, 2, "s", ["topic", "a.b"])
    stream = shell.stream("s")
    audience = audience_of(stream)
    assert [len(audience.everyone), *map(len, audience._numbers.values())] == [200, 200]
    compared = []

    def same(one: Subscription, other: object) -> bool:
        compared.append(other)
        return one is other

    monkeypatch.setattr(Subscription, "__eq__", same)
    for link in range(201, 1, -1):
        shell.send(link, wire.Bye("closed", ""))
    assert not audience.everyone
    assert not audience._numbers
    assert len(compared) <= 200, "once each at the most, not once for each that is left"


def test_a_stream_without_patterns_has_no_index() -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    shell.subscribe(1, 1, "s")
    shell.publish(1, "s", [b"y"])
    shell.send(1, wire.StreamInfo(1, "s"))
    shell.send(1, wire.Unsubscribe(1))
    audience = audience_of(shell.stream("s"))
    assert audience.index is Audience().index, "a subscription that takes everything needs none"
    shell.subscribe(1, 2, "s", ["topic", "a.b"])
    assert (audience.patterns, len(audience.index)) == (1, 1)
    assert len(Audience().index) == 0


@pytest.mark.moderate
def test_bounds_are_applied_to_some_streams_at_a_time_and_to_all_in_each_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = Shell(streams_max=3_000)
    shell.hello(1)
    for number in range(2 * LOOKS_MAX + 10):
        shell.send(1, wire.CreateStream(number + 1, f"s{number}", {"max_bytes": 1 << 20}))
    looked: list[str] = []
    monkeypatch.setattr(
        shell.broker._retention, "_retain", lambda stream: looked.append(stream.name)
    )
    shell.wait(shell.broker._shard.settings.retention_ms)
    while shell.broker._retention._turn:
        shell.wait(1)
    counts = []
    looked.clear()
    for _ in range(shell.broker._shard.settings.retention_ms):
        before = len(looked)
        shell.wait(1)
        counts.append(len(looked) - before)
    assert max(counts) == LOOKS_MAX, "no tick looks at all of them"
    assert sorted(looked) == sorted(stream.name for stream in shell.broker._catalogue)


@pytest.mark.moderate
def test_idle_links_have_their_heartbeats_together() -> None:
    shell = Shell()
    links = 300
    beat_ms = shell.broker._shard.settings.heartbeat_ms
    for link in range(1, links + 1):
        shell.hello(link)
        shell.wait(7)
    # The first heartbeat of each comes when it comes; from then on they are in step.
    shell.wait(beat_ms)
    for peer in shell.peers.values():
        peer.commands.clear()
    until_ms = shell.now_ms + beat_ms
    turns = 0
    while (wake_ms := shell.broker._links.wake_at_ms) is not None and wake_ms <= until_ms:
        shell.wait(max(0, wake_ms - shell.now_ms))
        for link in range(1, links + 1):
            shell.send(link, wire.Pong(0))
        turns += 1
    assert turns <= BEAT_SLOTS + 2
    assert all(len(peer.of(wire.Ping)) in (1, 2) for peer in shell.peers.values())


def test_a_silent_link_ends_when_its_time_is_over_and_not_a_heartbeat_later() -> None:
    shell = Shell()
    settings = shell.broker._shard.settings
    shell.wait(13)
    shell.hello(1)
    begun_ms = shell.now_ms
    while shell.broker._links.table:
        wake_ms = shell.broker._links.wake_at_ms
        assert wake_ms is not None
        shell.wait(wake_ms - shell.now_ms)
    assert shell.now_ms - begun_ms == settings.heartbeat_ms * settings.expiry_beats


@pytest.mark.moderate
def test_the_least_of_many_pins_is_found_without_looking_at_all_of_them() -> None:
    class Counted(dict[Cursor, None]):
        walks = 0

        def __iter__(self) -> Iterator[Cursor]:
            Counted.walks += 1
            return super().__iter__()

    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"x"] * 5_000)
    stream = shell.stream("s")
    pins = {f"c{number:03}": number for number in range(200)}
    for number, name in enumerate(pins):
        shell.send(1, wire.EditCursor(number, "s", name, {"pin": True}, [2, pins[name]]))
    marks = shell.broker._cursors.pins._marks[stream]
    marks.cursors = Counted(marks.cursors)
    chance = Random(7)
    for tracker in range(2_000):
        name = chance.choice(list(pins))
        to = min(pins[name] + chance.randrange(50), 5_000)
        pins[name] = to
        shell.send(1, wire.MoveCursor("s", name, to, 10_000 + tracker))
        assert stream.pinned == min(pins.values())
    assert Counted.walks <= 10, "once in about as many moves as there are pins"
    assert len(marks._least) <= 2 * len(pins) + 65
    for number, name in enumerate(sorted(pins, key=pins.__getitem__)):
        shell.send(1, wire.RemoveCursor(20_000 + number, "s", name))
        del pins[name]
        assert stream.pinned == min(pins.values(), default=NEVER)


@pytest.mark.moderate
def test_pins_are_looked_at_some_at_a_time_and_all_in_each_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    most = 2 * PINS_MAX + 10
    for number in range(most):
        shell.send(1, wire.EditCursor(number, "s", f"c{number:05}", {"pin": True}))
    looked: list[str] = []
    pins = shell.broker._cursors.pins
    monkeypatch.setattr(pins, "_pin", lambda cursor: looked.append(cursor.name))
    shell.wait(MARK_MS)
    while pins._turn:
        shell.wait(10)
    looked.clear()
    counts = []
    for _ in range(MARK_MS // 10):
        before = len(looked)
        shell.wait(10)
        counts.append(len(looked) - before)
    assert max(counts) == PINS_MAX
    assert sorted(looked) == [f"c{number:05}" for number in range(most)]


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Member]:
    """Every look at whether a member of a group may be given something."""
    looks: list[Member] = []
    able = vars(Member)["able"].fget

    def look(member: Member) -> bool:
        looks.append(member)
        found: bool = able(member)
        return found

    monkeypatch.setattr(Member, "able", property(look))
    return looks


@pytest.mark.moderate
@pytest.mark.parametrize("kind", ["shared", "keyed"])
def test_a_record_for_a_group_is_not_shown_to_all_its_members(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = Shell()
    shell.hello(1)
    members = range(2, 302)
    for link in members:
        shell.hello(link)
        shell.send(link, wire.JoinGroup(1, "s", "g", ["all"], kind, [0], 1_000, 1 << 40))
    looks = looked_at(monkeypatch)
    for number in range(50):
        shell.publish(1, "s", [b"x"], subject=f"a.{number}")
    for link in members:
        for delivered in shell.peers[link].of(wire.Deliver):
            shell.send(link, wire.AckRecords(1, [(delivered.from_, delivered.next)], 9))
    assert shell.broker.counters["group_records_done"] == 50
    assert len(looks) <= 50 * 10


def test_an_acknowledgement_is_not_compared_with_all_that_is_done_beside() -> None:
    class Looked(int):
        looks = 0

        def __lt__(self, other: int) -> bool:
            Looked.looks += 1
            return int(self) < other

    done: list[tuple[int, int]] = [(Looked(10 * n), Looked(10 * n + 5)) for n in range(1, 1_025)]
    assert with_done(0, done, [(4_003, 4_007)])[1][398:400] == [(3_990, 3_995), (4_000, 4_007)]
    assert Looked.looks <= 15
