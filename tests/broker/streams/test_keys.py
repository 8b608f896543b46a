"""Streams that keep the last record of each subject: keys, their conditions, and their room."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode, encode_lists
from malamute_protocol.framing import NUMBERS
from malamute_py.broker import BrokerSettings
from malamute_py.broker.ready import IndexAnswer, IndexFailure
from tests.broker.streams.keyed import (
    KEEP,
    PLACES,
    World,
    moved,
    restarted,
    result,
    table,
)


@pytest.mark.parametrize(
    ("stream", "code"), [("none", "unknown_stream"), ("plain", "unsupported"), ("s", "")]
)
@pytest.mark.parametrize("in_a_step", [False, True])
def test_a_keyed_publish_needs_a_stream_that_keeps_keys(
    stream: str, code: str, in_a_step: bool
) -> None:
    world = World()
    world.send(1, wire.CreateStream(3, "plain", {}))
    if stream == "plain":  # The link is known to publish to it.
        world.send(1, wire.Publish("plain", 70), frames=[encode([b"v"], subject="k")])
    publish = wire.Publish(stream, 0 if in_a_step else 71, 0, True)
    commands = [wire.Atomic(71, 1), publish] if in_a_step else [publish]
    peer = world.send(1, *commands, frames=[encode([b"v"], subject="k")])
    answer = peer.commands[-1]
    if stream == "s" and in_a_step:
        code = "cross_ring"  # Streams with keys have rings of their own.
    if code:
        assert isinstance(answer, wire.Refused)
        assert answer.code == code
        peer = world.send(1, wire.StreamInfo(72, "none"))
        assert peer.last(wire.Refused).code == "unknown_stream"
    else:
        assert isinstance(answer, wire.Confirm)


@pytest.mark.parametrize("by", ["publish", "update", "transaction"])
def test_a_record_that_expires_is_no_key(by: str) -> None:
    world = World()
    content = encode([b"v", b"w"][: 1 + (by != "update")], subject="k", expires_at_ms=1 << 50)
    command = wire.UpdateKey("s", 71) if by == "update" else wire.Publish("s", 71)
    commands: list[wire.Command] = [command]
    if by == "transaction":
        world.send(1, wire.Atomic(70, 1), wire.BeginTransaction(b"t" * 16, 0, 0))
        commands = [wire.Atomic(71, 1), wire.Stage(b"t" * 16, "s", 0, 0)]
    refused = world.send(1, *commands, frames=[content]).last(wire.Refused)
    assert (refused.reference, refused.code) == (71, "unsupported")
    assert world.keys() == {}


@pytest.mark.parametrize(
    "command",
    [wire.Publish("new", 72), wire.Publish("new", 72, 0, True), wire.UpdateKey("new", 72)],
    ids=["plain", "keyed", "update"],
)
def test_a_batch_behind_its_stream_s_creation_in_one_message_may_come_again(command: Any) -> None:
    world = World()
    frames = [encode([b"v"], subject="k")]
    peer = world.send(1, wire.CreateStream(71, "new", KEEP), command, frames=frames)
    assert peer.last(wire.Refused).code == "wait"
    peer = world.send(1, command, frames=frames)
    assert peer.last(wire.Confirm).tracker == 72


def test_a_step_behind_the_creation_of_a_stream_that_it_needs_keys_of_may_come_again() -> None:
    world = World()
    frames = [encode([b"v"], subject="k")]
    step = wire.Atomic(72, 1), wire.Publish("new", 0, 0, True)
    peer = world.send(1, wire.CreateStream(71, "new", KEEP), *step, frames=frames)
    assert peer.last(wire.Refused).code == "wait"
    # Streams with keys have rings of their own.
    assert world.send(1, *step, frames=frames).last(wire.Refused).code == "cross_ring"


@pytest.mark.parametrize("maker", [wire.CreateStream(71, "new", {}), wire.Publish("new", 71)])
def test_a_keyed_publish_behind_the_creation_of_a_stream_without_keys_is_refused(
    maker: wire.Command,
) -> None:
    world = World()
    frame = encode([b"v"], subject="k")
    frames = [frame] * (1 + isinstance(maker, wire.Publish))
    peer = world.send(1, maker, wire.Publish("new", 72, 0, True), frames=frames)
    refused = peer.last(wire.Refused)
    assert (refused.reference, refused.code) == (72, "unsupported")
    link = world.broker._links.get(1)
    assert link is not None
    assert link.unconfirmed_bytes == 0


@PLACES
def test_a_key_has_the_value_and_the_offset_of_its_newest_record(place: Any) -> None:
    world = World()
    world.put("a", b"one")
    world.put("b", b"two")
    confirm = world.put("a", b"three")
    place(world)
    found = world.get("a")
    assert (found["body"], found["revision"]) == (b"three", confirm.offset)
    assert world.get("b")["body"] == b"two"
    assert world.get("c") == {"revision": 0}


def test_the_first_record_has_offset_1_for_revision_0_says_that_there_is_no_key() -> None:
    world = World()
    assert world.put("a").offset == 1
    world.restart(power_loss=True)
    assert world.stream("s").next == 2


@PLACES
def test_an_update_needs_the_revision_that_the_key_has(place: Any) -> None:
    world = World()
    first = world.put("a", b"one").offset
    place(world)
    refused = world.update("a", b"x", first + 1)
    assert (refused.code, refused.revision) == ("conflict", first)
    second = world.update("a", b"two", first).offset
    assert world.update("a", b"x", first).revision == second
    assert world.get("a")["body"] == b"two"


def test_revision_0_creates_a_key_that_is_not_there_or_was_deleted() -> None:
    world = World()
    first = world.update("a", b"one", 0).offset
    assert world.update("a", b"x", 0).revision == first
    world.put("a", deletion=True)
    assert world.get("a")["revision"] == 0
    assert world.update("a", b"x", first).revision == 0
    assert world.update("a", b"two", 0).offset == first + 2


def test_two_updates_of_one_turn_see_each_other() -> None:
    world = World()
    first = world.put("a").offset
    contents = [world.content("a", b"x", sequence=world.sequence + n) for n in range(2)]
    commands = [wire.UpdateKey("s", 100 + n, 0, first) for n in range(2)]
    peer = world.send(1, *commands, frames=contents)
    assert peer.last(wire.Confirm).tracker == 100
    assert (peer.last(wire.Refused).reference, peer.last(wire.Refused).revision) == (101, first + 1)


def test_a_retry_of_an_update_that_happened_is_confirmed_as_a_duplicate() -> None:
    world = World()
    first = world.put("a").offset
    sequence = world.sequence
    second = world.update("a", b"two", first).offset
    world.put("a", b"three")
    again = world.update("a", b"two", first, sequence=sequence)
    assert (again.duplicate, again.offset) == (True, second)


def test_a_retry_is_recognized_after_a_restart() -> None:
    world = World()
    first = world.put("a").offset
    sequence = world.sequence
    second = world.update("a", b"two", first).offset
    world.restart()
    world.hello(1)
    again = world.update("a", b"two", first, sequence=sequence)
    assert (again.duplicate, again.offset) == (True, second)


def test_a_refused_update_takes_no_sequence() -> None:
    world = World()
    world.put("a")
    assert world.update("a", b"x", 99).code == "conflict"
    assert world.put("b").offset == 2


def test_nothing_happened_that_the_journal_refused() -> None:
    world = World()
    first = world.put("a").offset
    ring = world.stream("s").ring.name
    world.refuse[ring] = "disk_full", "no space"
    assert world.update("a", b"x", first).code == "disk_full"
    del world.refuse[ring]
    assert world.update("a", b"two", first).offset == first + 1
    assert world.get("a")["body"] == b"two"


def test_a_retry_of_an_update_that_the_journal_refuses_is_refused_as_an_update() -> None:
    world = World()
    world.refuse[world.stream("s").ring.name] = ("disk_full", "no room")
    content = world.content("a", b"v", sequence=0)
    updates = [wire.UpdateKey("s", tracker, 0, 0) for tracker in (50, 51)]
    peer = world.send(1, *updates, frames=[content, content])
    refused = [(one.command, one.reference) for one in peer.of(wire.Refused)]
    assert refused == [(NUMBERS[wire.UpdateKey], 50), (NUMBERS[wire.UpdateKey], 51)]


def test_a_value_is_told_once_no_power_loss_can_take_it_back() -> None:
    world = World()
    world.put("a", b"one")
    world.auto_sync = False
    content = world.content("a", b"two", sequence=world.sequence)
    world.send(1, wire.Publish("s", 50), frames=[content])
    peer = world.send(1, wire.GetKey(77, "s", "a"))
    before = len(peer.of(wire.Result))
    world.sync()
    world.run()
    assert peer.of(wire.Result)[before].value["body"] == b"two"


@pytest.mark.parametrize("where", ["memory", "journal"])
def test_values_that_are_asked_for_together_take_no_more_than_the_link_s_room(where: str) -> None:
    world = World(share_min_bytes=100_000, share_max_bytes=100_000)
    peer = world.publish(1, "s", [b"x" * 21_000], subject="a", tracker=900)
    if where == "memory":
        world.auto_sync = False
        world.publish(1, "s", [b"x" * 21_000], subject="a", tracker=901)
    else:
        world.evict()
        world.auto_ask = False
    world.send(1, *[wire.GetKey(100 + number, "s", "a") for number in range(50)])
    assert not [answer for answer in peer.of(wire.Result) if answer.request >= 100]
    world.auto_sync = world.auto_ask = True
    world.sync()
    world.answer_queries()
    world.run()
    assert len([answer for answer in peer.of(wire.Result) if answer.request >= 100]) == 5
    assert [refused.code for refused in peer.of(wire.Refused)] == ["wait"] * 45
    world.send(1, wire.Pong(peer.last(wire.Ping).token))
    assert len(world.get("a")["body"]) == 21_000


def test_keys_come_in_pages_by_name() -> None:
    world = World(page_max=2)
    for key in "edcba":
        world.put(key)
    world.put("c", deletion=True)
    page = result(world.send(1, wire.ListKeys(1, "s", ["all"])))
    assert ([key for key, _ in page["keys"]], page["more"]) == (["a", "b"], True)
    page = result(world.send(1, wire.ListKeys(1, "s", ["all"], after=page["after"])))
    assert ([key for key, _ in page["keys"]], page["more"]) == (["d", "e"], False)


def test_keys_are_listed_by_pattern_and_by_their_subjects_only() -> None:
    world = World()
    for key in ("a.x", "a.y", "b.x"):
        world.put(key)
    assert set(world.keys(pattern=["topic", "a.*"])) == {"a.x", "a.y"}
    refused = result(world.send(1, wire.ListKeys(1, "s", ["fields", "all", [["x"]]])))
    assert refused.code == "bad_pattern"


def test_more_keys_than_a_stream_may_have_are_refused_and_those_there_can_be_changed() -> None:
    world = World(keys_max=2)
    world.put("a")
    world.put("b")
    assert world.put("c").code == "limit"
    assert isinstance(world.put("a", b"other"), wire.Confirm)


def test_keys_take_no_more_memory_than_they_may() -> None:
    world = World(all_keys_bytes_max=600)
    world.put("a")
    world.put("b")
    assert world.put("c").code == "limit"


def memory_of_all(world: World) -> tuple[int, int]:
    """The memory of all keys as it is summed up, which is that of the streams together."""
    streams = [stream.keys for stream in world.broker._catalogue if stream.keys is not None]
    memory = world.broker._catalogue._conditions.memory
    assert memory.now == sum(keys.memory for keys in streams)
    assert memory.coming == sum(keys.coming_memory for keys in streams)
    return memory.now, memory.coming


def test_the_memory_of_all_keys_is_summed_up_as_they_come_and_go() -> None:
    world = World(deleted_keys_ms=0, keys_max=3)
    world.send(1, wire.CreateStream(8, "t", KEEP))
    for key in ("a", "b"):
        world.publish(1, "t", [b"v"], subject=key)
        world.put(key)
    four, _ = memory_of_all(world)
    ring = world.stream("s").ring.name
    world.refuse[ring] = "disk_full", "no room"
    assert world.put("c").code == "disk_full"
    assert memory_of_all(world) == (four, 0)
    del world.refuse[ring]
    world.put("a", deletion=True)
    world.wait(10)
    world.put("c")
    world.put("d")  # for which the deleted one is forgotten
    assert memory_of_all(world) == (five := four + four // 4, 0)
    world.restart()
    world.run()
    world.hello(1)
    assert memory_of_all(world) == (six := five + four // 4, 0), "the log has the deleted one"
    world.send(1, wire.RemoveStream(9, "t"))
    assert memory_of_all(world) == (six - four // 2, 0)


@pytest.mark.parametrize(
    ("settings", "taken"), [({"keys_max": 3}, 3), ({"all_keys_bytes_max": 1_200}, 4)]
)
def test_keys_of_one_turn_count_before_they_are_in_the_log(
    settings: dict[str, int], taken: int
) -> None:
    world = World(**settings)
    frames = [encode([b"v"], subject=f"k{number}") for number in range(10)]
    publishes = [wire.Publish("s", 100 + number) for number in range(10)]
    peer = world.send(1, *publishes, frames=frames)
    assert len(world.stream("s").keys or ()) == taken
    assert {refused.code for refused in peer.of(wire.Refused)} == {"wait"}
    assert world.put("other").code == "limit"


def test_newest_records_of_one_turn_take_no_more_than_half_of_the_ring() -> None:
    world = World()
    world.put("a", b"x" * 1_500)
    world.wait(1)
    half = world.segment_bytes * world.segments // 2
    frames = [encode([b"x" * 1_500], subject=f"k{number}") for number in range(30)]
    publishes = [wire.Publish("s", 100 + number) for number in range(30)]
    peer = world.send(1, *publishes, frames=frames)
    keys = world.stream("s").keys
    assert keys is not None
    assert half - 4_000 < keys.bytes <= half
    assert {refused.code for refused in peer.of(wire.Refused)} == {"wait"}
    assert world.put("other", b"x" * 1_500).code == "full"
    again = [wire.Publish("s", 200 + number) for number in range(3)]
    world.send(1, *again, frames=frames[:3])
    assert len(peer.of(wire.Refused)) == len(publishes) - (len(keys) - 1) + 1


@pytest.mark.parametrize("restart", [False, True])
def test_records_wait_until_it_is_known_how_full_the_ring_is(restart: bool) -> None:
    """A burst that met a broker just started filled the ring with newest records for good."""
    world = World()
    world.auto_ask = False
    if restart:
        assert isinstance(world.put("k"), wire.Confirm)
        world.restart()
        world.wait(1)
        world.answer_queries()  # the keys
        world.hello(1)
        world.open_producer()
    else:
        world.send(1, wire.RemoveStream(3, "s"))
        world.send(1, wire.CreateStream(4, "s", KEEP))
        world.sequence = 0
    for number in range(40):
        world.put(f"k{number}", b"x" * 2_000)
    keys = world.stream("s").keys
    assert keys is not None
    assert keys.bytes < 3_000
    assert world.peers[1].last(wire.Refused).code == "wait"
    world.answer_queries()
    world.wait(1)
    world.auto_ask = True
    assert isinstance(world.put("k", b"x"), wire.Confirm)


def test_keys_that_are_there_change_also_where_there_are_more_than_there_may_be() -> None:
    world = World(keys_max=3)
    for key in ("a", "b", "c"):
        world.put(key)
    world.settings = BrokerSettings(keys_max=2)
    restarted(world)
    assert isinstance(world.put("a", b"other"), wire.Confirm)
    assert isinstance(world.put("b", deletion=True), wire.Confirm)
    assert world.put("d").code == "limit"


def test_a_stream_without_keep_has_no_keys() -> None:
    world = World()
    world.publish(1, "plain", [b"x"])
    assert result(world.send(1, wire.GetKey(1, "plain", "s"))).code == "unsupported"
    content = encode([b"x"], subject="a")
    peer = world.send(1, wire.UpdateKey("plain", 9, 0, 0), frames=[content])
    assert peer.last(wire.Refused).code == "unsupported"


@pytest.mark.parametrize(
    "settings",
    [
        {"keep": "last-per-subject"},
        {"keep": "all", "ring_bytes": 1 << 20},
        {**KEEP, "memory": True},
        {**KEEP, "max_bytes": 1000},
        {**KEEP, "max_age_ms": 1000},
        {**KEEP, "body_kind": "arrow"},
        {**KEEP, "full": "overwrite"},
    ],
)
def test_settings_that_keep_cannot_keep_are_refused(settings: dict[str, Any]) -> None:
    world = World()
    assert result(world.send(1, wire.CreateStream(1, "t", settings))).code == "bad_setting"


def test_the_ring_of_a_stream_with_keys_is_told_as_one_that_refuses() -> None:
    world = World()
    facts = result(world.send(1, wire.StreamInfo(1, "s")))
    assert facts["settings"]["full"] == "refuse"
    again = wire.CreateStream(1, "s", {**KEEP, "full": "refuse"})
    assert result(world.send(1, again))["name"] == "s"


def test_keep_is_fixed_with_the_stream() -> None:
    world = World()
    assert result(world.send(1, wire.EditStream(1, "s", {"keep": ""}))).code == "bad_setting"


def test_an_update_of_several_records_is_refused() -> None:
    world = World()
    content = encode([b"x", b"y"], subject="a")
    peer = world.send(1, wire.UpdateKey("s", 9, 0, 0), frames=[content])
    assert peer.last(wire.Refused).code == "bad_batch"


def test_the_newest_record_of_each_subject_of_a_batch_counts() -> None:
    world = World()
    content = encode([b"1", b"2", b"3"], **table("a", "b", "a"))
    world.send(1, wire.Publish("s", 9), frames=[content])
    world.evict()
    assert world.get("a")["body"] == b"3"
    assert world.get("b")["body"] == b"2"
    assert world.keys() == {"a": 3, "b": 2}


def test_commands_wait_while_a_start_reads_the_keys() -> None:
    world = World()
    world.put("a", b"one")
    world.auto_ask = False
    world.restart()
    world.hello(1)
    assert world.get("a").code == "wait"
    assert world.put("a").code == "wait"
    world.auto_ask = True
    world.answer_queries()
    world.run()
    assert world.get("a")["body"] == b"one"


def test_keys_that_a_start_cannot_read_are_read_once_that_is_possible() -> None:
    world = World()
    moved(world)
    world.auto_ask = False
    world.restart()
    world.wait(1)
    for _ in range(2):
        (query,) = world.queries
        world.queries.clear()
        failure = IndexFailure("journal_failed", "too many open files")
        world.broker.answered(IndexAnswer(query.token, failure))
        world.run()
        assert not world.queries
        world.wait(10_000)
    world.auto_ask = True
    world.answer_queries()
    world.run()
    world.hello(1)
    assert world.get("k3")["body"] == b"3"
    assert len(world.events_of("keys_not_read")) == 1


def test_a_start_reads_keys_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("malamute_py.broker.streams.key_commands.READ_BYTES", 1)
    world = World()
    for n in range(20):
        world.put(f"k{n % 7}", b"%d" % n)
    restarted(world)
    assert world.keys() == {f"k{n % 7}": n + 1 for n in range(13, 20)}
    assert world.events_of("keys_read")[-1].facts["keys"] == 7


def test_a_list_of_blobs_and_a_codec_come_back_whole() -> None:
    world = World()
    content = encode([b"x" * 100, b"y" * 100], **table("a", "b"), codec="zstd")
    world.send(1, wire.Publish("s", 9), frames=[content])
    found = world.get("b")
    assert (found["batch"], found["row"]) == (bytes(content), 1)
    world.send(1, wire.CreateStream(1, "lists", {**KEEP, "body_kind": "list"}))
    content = encode_lists([[b"1", b"22"], [b"333"]], **table("a", "b"))
    world.send(1, wire.Publish("lists", 10), frames=[content])
    assert result(world.send(1, wire.GetKey(1, "lists", "a")))["body"] == [b"1", b"22"]


def test_a_client_that_may_not_read_or_write_is_refused() -> None:
    world = World(permit=lambda owner, action, name: owner != "bob")
    world.hello(2, identity="bob")
    assert world.get("a", link=2).code == "forbidden"
    peer = world.send(2, wire.ListKeys(1, "s", ["all"]))
    assert peer.last(wire.Refused).code == "forbidden"
    peer = world.send(2, wire.UpdateKey("s", 9, 0, 0), frames=[encode([b"x"], subject="a")])
    assert peer.last(wire.Refused).code == "forbidden"


def test_a_subscription_is_told_that_a_stream_with_keys_begins_at_1() -> None:
    world = World()
    moved(world)
    peer = world.subscribe(1, 1, "s", start=[0])
    assert (peer.last(wire.Subscribed).next, peer.last(wire.Subscribed).begin) == (1, 1)
    world.publish(1, "plain", [b"x"])
    assert world.subscribe(1, 2, "plain", start=[0]).last(wire.Subscribed).begin == 0
