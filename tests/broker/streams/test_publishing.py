"""Publishing and confirms: the batches that are taken, and when they are confirmed."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import Level
from malamute_protocol.encode import encode, encode_lists
from malamute_protocol.limits import Limits
from malamute_protocol.stamp import message_id
from malamute_py.broker import AppendBundle
from tests.broker.shell import Shell, bodies, offsets


def told(peer: Any, tracker: int) -> list[tuple[str, int]]:
    """The answer to one tracker of a producer: (confirm, level) or (refusal code, 0)."""
    answers: list[tuple[str, int]] = []
    for command in peer.commands:
        if type(command) is wire.Confirm and command.tracker == tracker:
            answers.append(("confirm", command.level))
        if type(command) is wire.Refused and command.reference == tracker:
            answers.append((command.code, 0))
    return answers


def test_offsets_of_a_stream_have_no_gaps() -> None:
    shell = Shell()
    peer = shell.hello(1)
    for tracker, count in enumerate([1, 3, 2], start=1):
        shell.publish(1, "s", [b"x"] * count, tracker=tracker)
    assert [confirm.offset for confirm in peer.of(wire.Confirm)] == [0, 1, 4]


def test_many_publishes_of_one_message_are_confirmed_in_one_message() -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    shell.readies.clear()
    content = encode([b"y"], subject="s")
    shell.send(1, *(wire.Publish("s", 10 + n) for n in range(20)), frames=[content] * 20)
    sends = [send for ready in shell.readies for send in ready.sends]
    assert [len(send.commands) for send in sends] == [20]
    bundles = [bundle for ready in shell.readies for bundle in ready.appends]
    assert len(bundles) == 20


# --- levels -------------------------------------------------------------------------------


def test_stored_is_confirmed_when_appended_and_synced_only_when_synced() -> None:
    shell = Shell(sync=False)
    peer = shell.hello(1)
    shell.publish(1, "s", [b"x"], tracker=1, level=Level.STORED)
    shell.publish(1, "s", [b"x"], tracker=2, level=Level.SYNCED)
    assert told(peer, 1) == [("confirm", Level.STORED)]
    assert told(peer, 2) == []
    shell.sync()
    shell.run()
    assert told(peer, 2) == [("confirm", Level.SYNCED)]


def test_a_sync_confirms_only_what_it_covers() -> None:
    shell = Shell(sync=False)
    peer = shell.hello(1)
    shell.publish(1, "s", [b"x"], tracker=1)
    covered = shell.ends["main"]
    shell.publish(1, "s", [b"x"], tracker=2)
    shell.broker.synced("main", covered, shell.now_ms)
    shell.run()
    assert told(peer, 1) == [("confirm", Level.SYNCED)]
    assert told(peer, 2) == []


def test_the_default_level_is_the_streams_own() -> None:
    shell = Shell(sync=False)
    peer = shell.hello(1)
    shell.send(1, wire.CreateStream(1, "quick", {"level": "stored"}))
    shell.publish(1, "quick", [b"x"], tracker=1)
    assert told(peer, 1) == [("confirm", Level.STORED)]


def test_level_none_is_never_confirmed() -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.publish(1, "s", [b"x"], tracker=0)
    shell.publish(1, "s", [b"x"], tracker=5, level=Level.NONE)
    assert not peer.of(wire.Confirm)
    assert shell.broker.counters["records_in"] == 2


def test_level_replicated_is_refused_by_name() -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.publish(1, "s", [b"x"], tracker=1, level=Level.REPLICATED)
    assert told(peer, 1) == [("unsupported", 0)]
    assert "replicated" in peer.last(wire.Refused).reason


@pytest.mark.parametrize("level", [Level.STORED, Level.SYNCED])
def test_a_stream_in_memory_promises_nothing_and_refuses_to_promise_more(level: Level) -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.send(1, wire.CreateStream(1, "ram", {"memory": True}))
    shell.publish(1, "ram", [b"x"], tracker=1)
    assert told(peer, 1) == [("confirm", Level.NONE)]
    shell.publish(1, "ram", [b"x"], tracker=2, level=level)
    assert told(peer, 2) == [("unsupported", 0)]
    assert len(shell.rings["memory"]) == 1


def test_a_confirm_states_epoch_offset_and_append_time() -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.publish(1, "s", [b"x"])
    confirm = peer.last(wire.Confirm)
    assert (confirm.epoch, confirm.offset, confirm.append_time_ms) == (1, 0, shell.now_ms)


def test_append_time_never_goes_back_when_the_clock_does() -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.publish(1, "s", [b"x"])
    shell.now_ms -= 50_000
    shell.publish(1, "s", [b"x"], tracker=2)
    times = [confirm.append_time_ms for confirm in peer.of(wire.Confirm)]
    assert times == sorted(times)


def test_append_time_goes_on_from_the_journals_newest_after_a_restart() -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    then = shell.now_ms
    shell.now_ms -= 50_000
    shell.restart()
    peer = shell.hello(1)
    shell.publish(1, "s", [b"x"])
    assert peer.last(wire.Confirm).append_time_ms == then


def test_a_confirm_states_the_append_time_that_the_journal_wrote() -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "t", [b"x"])
    then = shell.now_ms
    shell.now_ms -= 50_000
    shell.restart()
    peer = shell.hello(1)
    # Another stream of the ring has a later time, by a clock that went back since.
    shell.publish(1, "s", [b"x"])
    assert peer.last(wire.Confirm).append_time_ms == then
    info = shell.send(1, wire.StreamInfo(1, "s")).last(wire.Result).value
    assert info["last_time_ms"] == then


@pytest.mark.parametrize("settings", [{"ring_bytes": 1 << 20}, {"memory": True}, {}])
def test_a_stream_that_was_made_while_the_clock_was_ahead_knows_its_own_message_ids(
    settings: dict[str, Any],
) -> None:
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", settings))
    created = shell.now_ms
    shell.now_ms -= 50_000
    shell.restart()
    peer = shell.hello(1)
    info = shell.send(1, wire.StreamInfo(1, "s")).last(wire.Result).value
    assert (info["created_ms"], info["last_time_ms"]) == (created, 0)
    shell.publish(1, "s", [b"a", b"b", b"c"])
    shell.sync()
    time_ms = peer.last(wire.Confirm).append_time_ms
    assert time_ms >= created
    info = shell.send(1, wire.StreamInfo(2, "s")).last(wire.Result).value
    assert info["last_time_ms"] == time_ms
    shell.subscribe(1, 7, "s", start=[5, message_id(time_ms, info["first"])])
    assert not peer.of(wire.Rewound)
    assert peer.last(wire.Subscribed).next == info["first"] + 1


# --- refusals -----------------------------------------------------------------------------


def test_a_batch_whose_checksum_does_not_fit_is_refused_and_the_link_stays() -> None:
    shell = Shell()
    peer = shell.hello(1)
    content = bytearray(encode([b"x" * 100], subject="s"))
    content[-20] ^= 1
    shell.send(1, wire.Publish("s", 1), frames=[bytes(content)])
    assert told(peer, 1) == [("corrupt", 0)]
    assert not peer.closed
    shell.publish(1, "s", [b"y"], tracker=2)
    assert told(peer, 2) == [("confirm", Level.SYNCED)]


@pytest.mark.parametrize("content", [b"", b"short", bytes(200), b"\xff" * 4096])
def test_what_is_no_batch_is_refused_and_the_link_stays(content: bytes) -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.send(1, wire.Publish("s", 1), frames=[content])
    assert peer.last(wire.Refused).code in ("bad_batch", "corrupt")
    assert not peer.closed


def test_a_batch_over_the_limit_is_refused_as_too_large() -> None:
    shell = Shell(limits=Limits(batch_bytes_max=1000))
    peer = shell.hello(1)
    shell.publish(1, "s", [bytes(2000)])
    assert told(peer, 1) == [("too_large", 0)]


def test_a_batch_that_no_segment_holds_has_those_behind_it_come_again() -> None:
    """They came while the journal refused the first one, and were refused for its size."""
    shell = Shell()
    peer = shell.hello(1)
    shell.publish(1, "s", [b"first"], tracker=1)

    def judge(bundle: AppendBundle) -> tuple[str, str]:
        shell.judge = None
        later = wire.Publish("s", 3)
        shell.broker.receive(1, "", [later], [encode([b"later"], subject="s")], shell.now_ms)
        return "too_large", "no segment holds it"

    shell.judge = judge
    shell.publish(1, "s", [b"large"], tracker=2)
    assert told(peer, 2) == [("too_large", 0)]
    assert told(peer, 3) == [("wait", 0)]


def test_the_first_batch_settles_the_body_kind_and_others_are_refused() -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.publish(1, "s", [b"x"], tracker=1)
    lists = encode_lists([[b"a", b"b"]], subject="s")
    shell.send(1, wire.Publish("s", 2), frames=[lists])
    assert told(peer, 2) == [("bad_batch", 0)]
    info = shell.send(1, wire.StreamInfo(9, "s")).last(wire.Result)
    assert info.value["settings"]["body_kind"] == "blob"


def test_the_settled_body_kind_is_known_after_a_restart() -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"x"], tracker=1)
    shell.restart()
    peer = shell.hello(1)
    shell.send(1, wire.Publish("s", 2), frames=[encode_lists([[b"a"]], subject="s")])
    assert told(peer, 2) == [("bad_batch", 0)]


def test_more_unconfirmed_bytes_than_the_window_are_refused() -> None:
    shell = Shell(sync=False, window_bytes=10_000)
    peer = shell.hello(1)
    for tracker in range(1, 6):
        shell.publish(1, "s", [bytes(4000)], tracker=tracker)
    assert [told(peer, n) for n in (3, 4, 5)] == [[("window", 0)]] * 3
    shell.sync()
    shell.run()
    shell.publish(1, "s", [bytes(4000)], tracker=6)
    shell.sync()
    shell.run()
    assert told(peer, 6) == [("confirm", Level.SYNCED)]


def test_a_client_that_overran_its_window_has_a_64th_of_it_as_long_as_its_link() -> None:
    shell = Shell(sync=False, window_bytes=640_000)
    hasty, other = shell.hello(1), shell.hello(2)
    shell.publish(1, "s", [bytes(639_000)], tracker=1)
    shell.publish(1, "s", [bytes(2_000)], tracker=2)
    assert told(hasty, 2) == [("window", 0)]
    assert "640000" in hasty.last(wire.Refused).reason
    shell.sync()
    shell.run()
    for tracker in range(3, 7):
        shell.publish(1, "s", [bytes(4_000)], tracker=tracker)
        shell.publish(2, "s", [bytes(4_000)], tracker=tracker)
    assert [told(hasty, n) for n in range(3, 7)] == [[], [], [("window", 0)], [("window", 0)]]
    assert "10000" in hasty.last(wire.Refused).reason
    shell.sync()
    shell.run()
    assert [told(other, n) for n in range(3, 7)] == [[("confirm", Level.SYNCED)]] * 4
    again = shell.hello(3)
    shell.publish(3, "s", [bytes(9_000)], tracker=7)
    shell.publish(3, "s", [bytes(9_000)], tracker=8)
    shell.sync()
    shell.run()
    assert [told(again, n) for n in (7, 8)] == [[("confirm", Level.SYNCED)]] * 2


def test_one_batch_larger_than_the_window_is_taken_when_nothing_is_unconfirmed() -> None:
    shell = Shell(window_bytes=1000)
    peer = shell.hello(1)
    shell.publish(1, "s", [bytes(5000)])
    assert told(peer, 1) == [("confirm", Level.SYNCED)]


def test_publishing_beyond_the_unsynced_bound_is_refused_and_counted() -> None:
    shell = Shell(sync=False, unsynced_bytes_max=10_000)
    peer = shell.hello(1)
    for n in range(10):
        shell.publish(1, "s", [bytes(4000)], tracker=n, level=Level.NONE)
    assert {refused.code for refused in peer.of(wire.Refused)} == {"wait"}
    assert peer.last(wire.Refused).retry_ms > 0
    assert shell.broker.counters["refused_wait"] == 8
    assert shell.broker.gauges["unsettled_bytes"] <= 10_000
    shell.sync()
    shell.run()
    assert shell.broker.gauges["unsettled_bytes"] == 0


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a/b", "~x", "a{b}", "x" * 256, "a\n", ".hidden", "märkte", "\udcff"]
)
def test_a_name_that_is_not_allowed_is_refused(name: str) -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.publish(1, name, [b"x"])
    assert told(peer, 1) == [("bad_name", 0)]


def test_a_publish_without_a_tracker_that_cannot_be_taken_is_told_and_counted() -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.send(1, wire.Publish("s", 0), frames=[bytes(500)])
    (refused,) = peer.of(wire.Refused)
    assert (refused.command, refused.reference, refused.code) == (10, 0, "bad_batch")
    assert shell.broker.counters["publishes_dropped"] == 1


def test_a_forbidden_publish_without_a_tracker_is_an_event_all_the_same() -> None:
    shell = Shell(permit=lambda identity, action, name: name != "closed")
    shell.hello(1)
    shell.send(1, wire.Publish("closed", 0), frames=[encode([b"x"])])
    (event,) = [each for each in shell.events if each.name == "forbidden"]
    assert event.facts["link"] == 1


def test_without_automatic_creation_an_unknown_stream_is_refused() -> None:
    shell = Shell(auto_create=False)
    peer = shell.hello(1)
    shell.publish(1, "s", [b"x"])
    assert told(peer, 1) == [("unknown_stream", 0)]


def test_streams_beyond_the_limit_are_refused_by_its_name() -> None:
    shell = Shell(streams_max=2)
    peer = shell.hello(1)
    for tracker, name in enumerate("abc", start=1):
        shell.publish(1, name, [b"x"], tracker=tracker)
    assert [told(peer, n)[0][0] for n in (1, 2, 3)] == ["confirm", "confirm", "limit"]


def test_who_may_not_write_is_refused_and_nothing_is_created() -> None:
    shell = Shell(permit=lambda identity, action, name: action != "write")
    peer = shell.hello(1)
    shell.publish(1, "s", [b"x"])
    assert told(peer, 1) == [("forbidden", 0)]
    assert shell.broker.gauges["streams"] == 0


# --- the journal refuses ------------------------------------------------------------------


@pytest.mark.parametrize("code", ["full", "disk_full", "journal_failed"])
def test_a_refusal_of_the_journal_is_told_and_burns_no_offset(code: str) -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.hello(2)
    reader = shell.subscribe(2, 1, "s")
    shell.publish(1, "s", [b"a"], tracker=1)
    shell.refuse["main"] = (code, "no room")
    shell.publish(1, "s", [b"b", b"c"], tracker=2)
    assert told(peer, 2) == [(code, 0)]
    del shell.refuse["main"]
    shell.publish(1, "s", [b"d"], tracker=3)
    assert peer.last(wire.Confirm).offset == 1
    assert bodies(reader, 1) == [b"a", b"d"]
    assert shell.broker.gauges["unsettled_bytes"] == 0


def test_later_bundles_of_a_refused_ring_are_refused_too_and_other_rings_go_on() -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.send(1, wire.CreateStream(1, "own", {"ring_bytes": 1 << 20}))
    shell.publish(1, "s", [b"a"], tracker=1)
    shell.publish(1, "own", [b"a"], tracker=2)
    shell.refuse["main"] = ("full", "")
    content = encode([b"x"], subject="s")
    shell.send(
        1,
        wire.Publish("s", 3), wire.Publish("own", 4), wire.Publish("s", 5),
        frames=[content] * 3,
    )  # fmt: skip
    assert [told(peer, n)[0][0] for n in (3, 4, 5)] == ["full", "confirm", "full"]


def test_a_stream_whose_creation_the_journal_refuses_does_not_exist() -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.refuse["main"] = ("disk_full", "no space")
    shell.publish(1, "s", [b"x"], tracker=1)
    shell.subscribe(1, 4, "s")
    assert told(peer, 1) == [("disk_full", 0)]
    assert told(peer, 4) == [("disk_full", 0)]
    assert shell.broker.gauges["streams"] == 0
    del shell.refuse["main"]
    shell.publish(1, "s", [b"x"], tracker=2)
    assert told(peer, 2) == [("confirm", Level.SYNCED)]


def test_a_ring_that_failed_refuses_what_waits_and_what_comes() -> None:
    shell = Shell(sync=False)
    peer = shell.hello(1)
    shell.publish(1, "s", [b"x"], tracker=1)
    shell.broker.ring_failed("main", "journal_failed", "fdatasync: EIO")
    shell.run()
    assert told(peer, 1) == [("journal_failed", 0)]
    shell.publish(1, "s", [b"x"], tracker=2)
    assert told(peer, 2) == [("journal_failed", 0)]
    assert [event.name for event in shell.events if event.level == "error"] == ["ring_failed"]


# --- rings of their own ------------------------------------------------------------------


def test_a_stream_with_a_ring_of_its_own_takes_records_once_its_creation_is_synced() -> None:
    shell = Shell(sync=False)
    peer = shell.hello(1)
    shell.send(1, wire.CreateStream(1, "own", {"ring_bytes": 1 << 20}))
    assert not peer.of(wire.Result)
    shell.publish(1, "own", [b"x"], tracker=2)
    assert told(peer, 2) == [("wait", 0)]
    shell.sync()
    shell.run()
    assert peer.last(wire.Result).request == 1
    shell.publish(1, "own", [b"x"], tracker=3, level=Level.STORED)
    assert told(peer, 3) == [("confirm", Level.STORED)]
    (ring,) = [name for name in shell.ring_settings if name.startswith("stream-")]
    assert shell.ring_settings[ring] == {
        "memory": False,
        "ring_bytes": 1 << 20,
        "full": "overwrite",
        "keep": False,
    }
    assert len(shell.rings[ring]) == 1


def test_publishes_that_wait_for_a_stream_keep_their_order() -> None:
    shell = Shell()
    shell.hello(1)
    contents = [encode([f"{n}".encode()], subject="s") for n in range(5)]
    peer = shell.send(
        1,
        wire.Subscribe(1, "s", ["all"], [0], 100, 10_000),
        *(wire.Publish("s", n + 1) for n in range(5)),
        frames=contents,
    )
    assert bodies(peer, 1) == [b"0", b"1", b"2", b"3", b"4"]
    assert offsets(peer, 1) == [0, 1, 2, 3, 4]


def test_commands_that_wait_for_a_stream_are_bounded() -> None:
    shell = Shell(waiting_commands_max=3)
    peer = shell.hello(1)
    content = encode([b"x"], subject="s")
    shell.send(1, *(wire.Publish("s", n + 1) for n in range(5)), frames=[content] * 5)
    answers = [told(peer, n)[0][0] for n in range(1, 6)]
    assert answers == ["confirm", "confirm", "confirm", "wait", "wait"]


def test_creations_of_streams_that_wait_are_bounded_like_publishes() -> None:
    shell = Shell(waiting_commands_max=3)
    peer = shell.hello(1)
    shell.send(1, *(wire.CreateStream(n + 1, f"s{n // 2}") for n in range(5)))
    assert [result.request for result in peer.of(wire.Result)] == [1, 2, 3]
    assert [refused.code for refused in peer.of(wire.Refused)] == ["wait", "wait"]
