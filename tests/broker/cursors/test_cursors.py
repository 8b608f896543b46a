"""Named cursors: moved forward by clients that know where they stand, and clamped."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.cursors.cursor_world import ME, edit, events, info, move, trim, world
from tests.broker.shell import offsets

# --- moving ----------------------------------------------------------------------------------


def test_a_cursor_that_was_moved_is_there_after_a_kill() -> None:
    shell = world()
    assert move(shell, 4).level == wire.Level.SYNCED
    shell.restart()
    shell.hello(ME)
    facts = info(shell)
    assert (facts["next"], facts["tail"], facts["lag"]) == (4, 10, 6)
    assert facts["moved_ms"] == shell.now_ms


def test_a_move_is_confirmed_at_the_level_asked_for() -> None:
    shell = world(sync=False)
    shell.sync()
    peer = shell.send(
        ME, wire.MoveCursor("s", "c", 1, 5, level=2), wire.MoveCursor("s", "c", 2, 6, level=3)
    )
    assert [(one.tracker, one.level) for one in peer.of(wire.Confirm)] == [(5, 2)]
    shell.sync()
    shell.run()
    assert [(one.tracker, one.level) for one in peer.of(wire.Confirm)] == [(5, 2), (6, 3)]
    shell.restart(power_loss=True)
    shell.hello(ME)
    assert info(shell)["next"] == 2


def test_a_cursor_moves_forward_only() -> None:
    shell = world()
    move(shell, 4)
    assert move(shell, 4) == "conflict"
    assert move(shell, 3) == "conflict"
    assert move(shell, 11) == "bad_start"
    assert move(shell, 10).level == wire.Level.SYNCED


def test_one_of_two_clients_that_read_from_the_same_place_moves_the_cursor() -> None:
    shell = world()
    move(shell, 4)
    assert move(shell, 6, from_=4).level == 3
    assert move(shell, 8, from_=4) == "conflict"
    assert info(shell)["next"] == 6


def test_moves_of_one_message_happen_in_their_order() -> None:
    shell = world()
    peer = shell.send(
        ME, wire.MoveCursor("s", "c", 2, 5), wire.MoveCursor("s", "c", 6, 6, from_=2),
        wire.MoveCursor("s", "c", 4, 7),
    )  # fmt: skip
    assert [one.tracker for one in peer.of(wire.Confirm)] == [5, 6]
    assert [one.reference for one in peer.of(wire.Refused)] == [7]


def test_force_moves_a_cursor_back() -> None:
    shell = world()
    move(shell, 8)
    assert move(shell, 2, force=True).level == 3
    assert info(shell)["next"] == 2


def test_force_and_pins_and_removal_need_an_administrator() -> None:
    allowed = {"read", "write", "create", "identity"}
    shell = world(permit=lambda identity, action, name: action in allowed)
    move(shell, 8)
    assert move(shell, 2, force=True) == "forbidden"
    assert edit(shell, pin=True).last(wire.Refused).code == "forbidden"
    assert shell.send(ME, wire.RemoveCursor(5, "s", "c")).last(wire.Refused).code == "forbidden"
    assert isinstance(edit(shell, description="mine").commands[-1], wire.Result)


def test_a_reader_takes_back_no_pin() -> None:
    allowed = {"read", "write", "create", "identity", "manage_streams"}
    shell = world(permit=lambda identity, action, name: action in allowed)
    edit(shell, pin=True)
    allowed.remove("manage_streams")
    for settings in ({"pin": False}, {"pin_bytes_max": 1}):
        assert edit(shell, **settings).last(wire.Refused).code == "forbidden"
    assert edit(shell, pin=True).last(wire.Result).value["pinned"], "nothing is changed"
    assert move(shell, 5).level == 3


def test_a_reader_takes_back_no_pin_that_is_on_its_way_into_the_log() -> None:
    managers: set[str] = {"me"}
    shell = world(
        permit=lambda identity, action, name: action != "manage_streams" or identity in managers
    )
    shell.hello(3, identity="me")
    shell.broker.receive(3, "me", [wire.EditCursor(4, "s", "c", {"pin": True}, [0])], [], 0)
    peer = edit(shell, [0], pin=False)
    assert peer.last(wire.Refused).code == "forbidden"
    assert info(shell)["pinned"]


@pytest.mark.parametrize("settings", [{"pin": False}, {"pin_bytes_max": 1}])
def test_a_reader_takes_back_no_pin_of_a_cursor_that_was_made_meanwhile(
    settings: dict[str, Any],
) -> None:
    shell = world(
        permit=lambda identity, action, name: action != "manage_streams" or identity == "me"
    )
    shell.hello(3, identity="me")
    shell.auto_ask = False
    shell.evict()
    reader = edit(shell, [3, shell.now_ms, True], **settings)
    assert shell.queries, "where the reader's cursor begins is asked for"
    shell.send(3, wire.EditCursor(4, "s", "c", {"pin": True}, [0]), identity="me")
    shell.auto_ask = True
    shell.run()
    assert reader.last(wire.Refused).code == "forbidden"
    assert info(shell)["pinned"]


def test_who_manages_a_stream_and_may_not_read_it_has_all_commands_of_its_cursors() -> None:
    allowed = {"write", "create", "manage_streams", "identity"}
    shell = world(permit=lambda identity, action, name: action in allowed)
    assert edit(shell, pin=True).last(wire.Result).value["pinned"]
    assert move(shell, 8).level == 3
    assert move(shell, 2, force=True).level == 3
    assert info(shell)["next"] == 2
    step = shell.send(ME, wire.Atomic(9, 1), wire.MoveCursor("s", "d", 4, 0))
    assert step.last(wire.Confirm).tracker == 9
    assert isinstance(shell.send(ME, wire.RemoveCursor(5, "s", "c")).commands[-1], wire.Result)


def test_a_client_that_may_not_read_a_stream_has_no_cursors_there() -> None:
    shell = world(permit=lambda identity, action, name: action in ("identity", "write", "create"))
    assert move(shell, 2) == "forbidden"
    peer = shell.send(ME, wire.CursorInfo(3, "s", "c"))
    assert peer.last(wire.Refused).code == "forbidden"
    peer = shell.send(ME, wire.CursorInfo(3, "", ""))
    assert peer.last(wire.Result).value == {"entries": [], "more": False}


def test_a_position_of_another_stream_or_a_lost_epoch_is_a_conflict() -> None:
    shell = world(sync=False)
    shell.sync()
    uuid = shell.stream("s").uuid
    assert move(shell, 2, uuid=b"another" + bytes(9)) == "conflict"
    shell.send(ME, wire.MoveCursor("s", "c", 2, 8, uuid=uuid, epoch=1))
    shell.publish(1, "s", [b"lost"] * 5)
    shell.restart(power_loss=True)
    shell.auto_sync = True
    shell.hello(1)
    shell.hello(ME)
    shell.publish(1, "s", [b"new"] * 5)
    assert move(shell, 13, epoch=1) == "conflict"
    assert move(shell, 13, epoch=2).level == 3


def test_names_and_streams_are_checked() -> None:
    shell = world()
    peer = shell.send(
        ME, wire.MoveCursor("nowhere", "c", 0, 1), wire.MoveCursor("s", "no name", 0, 2)
    )
    assert [one.code for one in peer.of(wire.Refused)] == ["unknown_stream", "bad_name"]


def test_there_are_no_more_cursors_than_the_limit() -> None:
    shell = world(cursors_max=1)
    move(shell, 1)
    peer = shell.send(ME, wire.MoveCursor("s", "d", 1, 1))
    assert peer.last(wire.Refused).code == "limit"
    assert move(shell, 2).level == 3


def test_moves_on_their_way_take_no_room_of_new_cursors() -> None:
    shell = world(cursors_max=2)
    move(shell, 1)
    peer = shell.send(
        ME, wire.MoveCursor("s", "c", 2, 1), wire.MoveCursor("s", "d", 1, 2),
        wire.MoveCursor("s", "d", 2, 3), wire.MoveCursor("s", "e", 1, 4),
    )  # fmt: skip
    assert [(one.code, one.reference) for one in peer.of(wire.Refused)] == [("limit", 4)]


def test_a_move_that_the_journal_refuses_has_not_happened() -> None:
    shell = world()
    move(shell, 2)
    shell.refuse["main"] = ("disk_full", "no space")
    assert move(shell, 5) == "disk_full"
    shell.refuse.clear()
    assert info(shell)["next"] == 2
    assert move(shell, 4, from_=2).level == 3


def test_a_step_moves_a_cursor_past_the_records_that_it_publishes() -> None:
    shell = world()
    content = encode([b"a", b"b"], subject="s")
    step = wire.Atomic(9, 2), wire.Publish("s", 0), wire.MoveCursor("s", "c", 12, 0)
    peer = shell.send(ME, *step, frames=[content])
    assert peer.last(wire.Confirm).tracker == 9
    assert info(shell)["next"] == 12
    peer = shell.send(
        ME, wire.Atomic(10, 2), wire.Publish("s", 0), wire.MoveCursor("s", "c", 15, 0),
        frames=[content],
    )  # fmt: skip
    assert peer.last(wire.Refused).code == "bad_start"
    assert (info(shell)["next"], info(shell)["tail"]) == (12, 12)


def test_a_step_whose_cursor_conflicts_does_nothing() -> None:
    shell = world()
    move(shell, 5)
    content = encode([b"a"], subject="s")
    step = wire.Atomic(9, 2), wire.Publish("s", 0), wire.MoveCursor("s", "c", 7, 0, from_=4)
    peer = shell.send(ME, *step, frames=[content])
    assert (peer.last(wire.Refused).code, peer.last(wire.Refused).reference) == ("conflict", 9)
    assert (info(shell)["next"], info(shell)["tail"]) == (5, 10)


def test_cursors_of_a_stream_in_memory_live_in_memory() -> None:
    shell = world()
    shell.send(1, wire.CreateStream(1, "m", {"memory": True}))
    shell.publish(1, "m", [b"x"] * 4)
    peer = shell.send(ME, wire.MoveCursor("m", "c", 3, 5))
    assert peer.last(wire.Confirm).level == wire.Level.NONE
    assert info(shell, stream="m")["next"] == 3
    peer = shell.send(ME, wire.MoveCursor("m", "c", 4, 6, level=3))
    assert peer.last(wire.Refused).code == "unsupported"
    peer = shell.send(ME, wire.Atomic(8, 1), wire.MoveCursor("m", "c", 4, 0))
    assert peer.last(wire.Refused).code == "cross_ring"
    shell.restart()
    peer = shell.hello(ME)
    shell.send(ME, wire.CursorInfo(3, "m", "c"))
    assert peer.last(wire.Refused).code == "unknown_cursor"


# --- creating, listing, removing ----------------------------------------------------------------


def test_a_new_cursor_begins_where_its_start_says() -> None:
    shell = world()
    assert edit(shell).last(wire.Result).value["next"] == 0
    shell.send(ME, wire.EditCursor(4, "s", "d", {}, [1]))
    assert info(shell, "d")["next"] == 10
    shell.send(ME, wire.EditCursor(4, "s", "e", {}, [3, shell.now_ms + 1]))
    assert info(shell, "e")["next"] == 10
    shell.send(ME, wire.EditCursor(4, "s", "f", {}, [6]))
    assert shell.peers[ME].last(wire.Refused).code == "bad_start"


def test_an_edit_leaves_a_cursor_where_it_stands() -> None:
    shell = world()
    move(shell, 4)
    value = edit(shell, [1], description="of the report").last(wire.Result).value
    assert (value["next"], value["settings"]["description"]) == (4, "of the report")
    shell.restart()
    shell.hello(ME)
    move(shell, 6)
    assert info(shell)["settings"]["description"] == "of the report"
    assert edit(shell, no_such=1).last(wire.Refused).code == "bad_setting"


def test_a_subscription_starts_at_a_cursor() -> None:
    shell = world()
    move(shell, 7)
    peer = shell.subscribe(ME, 1, "s", start=[7, "c"])
    assert offsets(peer, 1) == [7, 8, 9]
    shell.subscribe(ME, 2, "s", start=[7, "none"])
    assert peer.last(wire.Refused).code == "unknown_cursor"
    shell.subscribe(ME, 3, "s", start=[7, "none", [2, 8]])
    assert offsets(peer, 3) == [8, 9]
    for wrong in ([7], [7, 5], [7, "c", [6]], [7, "none", [7, "c"]], [7, "c", "x"]):
        shell.subscribe(ME, 4, "s", start=wrong)
        assert peer.last(wire.Refused).code == "bad_start"


def test_edits_of_one_message_add_up() -> None:
    for first in ({"pin": True}, {"description": "old", "pin": True}):
        shell = world()
        commands = [
            wire.EditCursor(4, "s", "c", first, [0]),
            wire.EditCursor(5, "s", "c", {"pin_bytes_max": 77}, [0]),
            wire.EditCursor(6, "s", "c", {"description": "new"}, [0]),
        ]
        shell.send(ME, *commands)
        wanted = {"pin": True, "pin_bytes_max": 77, "description": "new"}
        assert info(shell)["settings"] == wanted
        shell.restart()
        shell.hello(ME)
        assert info(shell)["settings"] == wanted


def test_a_start_without_a_bottom_is_refused() -> None:
    start: list[Any] = [0]
    for _ in range(2_000):
        start = [7, "a", start]
    peer = world().subscribe(ME, 1, "s", start=start)
    assert peer.last(wire.Refused).code == "bad_start"


def test_a_cursor_that_was_removed_is_gone_for_good() -> None:
    shell = world()
    move(shell, 4)
    shell.send(ME, wire.RemoveCursor(5, "s", "c"))
    assert shell.peers[ME].last(wire.Result).value == {}
    shell.restart()
    peer = shell.hello(ME)
    shell.send(ME, wire.CursorInfo(3, "s", "c"))
    assert peer.last(wire.Refused).code == "unknown_cursor"
    shell.send(ME, wire.RemoveCursor(5, "s", "c"))
    assert peer.last(wire.Refused).code == "unknown_cursor"


def test_cursors_go_with_their_stream() -> None:
    shell = world()
    edit(shell, pin=True)
    shell.send(ME, wire.RemoveStream(6, "s"))
    shell.publish(1, "s", [b"another"])
    peer = shell.send(ME, wire.CursorInfo(3, "s", "c"))
    assert peer.last(wire.Refused).code == "unknown_cursor"
    assert not shell.broker._shard.queues.cursors
    assert shell.pins == {}


def test_cursors_are_listed_by_pages() -> None:
    shell = world()
    shell.publish(1, "t", [b"x"] * 3)
    for stream in ("t", "s"):
        for name in ("b.2", "a", "b.1"):
            shell.send(ME, wire.MoveCursor(stream, name, 1, 1))

    def page(stream: str, cursor: str, after: str = "", limit: int = 10) -> Any:
        peer = shell.send(ME, wire.CursorInfo(3, stream, cursor, after, limit))
        value = peer.last(wire.Result).value
        return [(one["stream"], one["cursor"]) for one in value["entries"]], value["more"]

    assert page("s", "") == ([("s", "a"), ("s", "b.1"), ("s", "b.2")], False)
    assert page("s", "b.*") == ([("s", "b.1"), ("s", "b.2")], False)
    assert page("s", "b.*", limit=1) == ([("s", "b.1")], True)
    assert page("s", "*", after="s/a", limit=1) == ([("s", "b.1")], True)
    assert page("s", "*", after="b.1") == ([("s", "b.2")], False)
    assert page("", "", limit=4) == ([("s", "a"), ("s", "b.1"), ("s", "b.2"), ("t", "a")], True)
    assert page("", "", after="t/a") == ([("t", "b.1"), ("t", "b.2")], False)
    assert page("", "b.*", after="s/b.1") == ([("s", "b.2"), ("t", "b.1"), ("t", "b.2")], False)


# --- clamped -----------------------------------------------------------------------------------


def test_a_trim_clamps_the_cursors_that_it_passes_by_name() -> None:
    shell = world()
    shell.publish(1, "s", [b"x"] * 10)
    move(shell, 4)
    shell.send(ME, wire.MoveCursor("s", "ahead", 15, 1))
    trim(shell, 10)
    trim(shell, 12)
    assert events(shell, "cursor_clamped") == [
        {"stream": "s", "cursor": "c", "from": 4, "to": 10, "code": "retention"}
    ]
    assert shell.broker.counters["cursors_clamped"] == 1
    assert (info(shell)["next"], info(shell)["lag"]) == (12, 8)
    # A client that saw the cursor before or after the trim may move it.
    assert move(shell, 14, from_=4).level == 3
    assert move(shell, 15, from_=14).level == 3


def test_a_cursor_before_the_first_record_is_clamped_at_the_start() -> None:
    shell = world()
    shell.publish(1, "s", [b"x"] * 10)
    move(shell, 4)
    trim(shell, 10)
    shell.events.clear()
    shell.restart()
    shell.hello(ME)
    assert [one["to"] for one in events(shell, "cursor_clamped")] == [10]
    assert shell.broker._shard.queues.cursors[1, "c"].next == 10
    shell.events.clear()
    shell.restart()
    assert not events(shell, "cursor_clamped")


def test_a_cursor_after_the_tail_is_clamped_at_the_start() -> None:
    """A stream with a ring of its own may lose more than the log of the cursor."""
    shell = world()
    shell.send(1, wire.CreateStream(1, "own", {"ring_bytes": 1 << 20}))
    shell.publish(1, "own", [b"x"] * 3)
    shell.auto_sync = False
    shell.publish(1, "own", [b"y"] * 3, level=2)
    shell.send(ME, wire.MoveCursor("own", "c", 6, 1, level=2))
    shell.synced_to["main"] = shell.ends["main"]
    shell.restart(power_loss=True)
    shell.auto_sync = True
    shell.run()
    shell.hello(ME)
    assert info(shell, stream="own")["next"] == 3
    assert events(shell, "cursor_clamped") == [
        {"stream": "own", "cursor": "c", "from": 6, "to": 3, "code": "rewound"}
    ]


def test_a_cursor_that_was_edited_goes_back_to_where_the_epoch_of_its_edit_ended() -> None:
    """A second power loss takes what the start after the first one noted, and not the records."""
    shell = world()
    shell.send(1, wire.CreateStream(1, "own", {"ring_bytes": 1 << 20}))
    shell.publish(1, "own", [b"x"] * 3)
    shell.auto_sync = False
    shell.publish(1, "own", [b"y"] * 3, level=2)
    shell.send(ME, wire.EditCursor(4, "own", "c", {"description": "d"}, [1]))
    shell.synced_to["main"] = shell.ends["main"]
    shell.restart(power_loss=True)
    shell.run()
    shell.hello(1)
    shell.publish(1, "own", [b"new"] * 5, level=2)
    (own,) = set(shell.rings) - {"main"}
    shell.synced_to[own] = shell.ends[own]
    shell.events.clear()
    shell.restart(power_loss=True)
    shell.auto_sync = True
    shell.run()
    shell.hello(ME)
    assert info(shell, stream="own")["tail"] == 8
    assert info(shell, stream="own")["next"] == 3
    assert [one["code"] for one in events(shell, "cursor_clamped")] == ["rewound"]


def test_a_cursor_under_the_name_of_a_group_is_refused_by_name() -> None:
    shell = world()
    shell.send(ME, wire.JoinGroup(5, "s", "g", ["all"], "shared", [0]))
    for command in (wire.MoveCursor("s", "g", 1, 9, force=True), wire.EditCursor(7, "s", "g")):
        refused = shell.send(ME, command).last(wire.Refused)
        assert (refused.code, refused.command) == ("conflict", type(command).__struct_config__.tag)
        assert "is a group of stream 's'" in refused.reason
    assert move(shell, 4).level == wire.Level.SYNCED


def test_a_group_under_the_name_of_a_cursor_is_refused_by_name_and_no_cursor_moves() -> None:
    shell = world()
    move(shell, 3)
    refused = shell.send(ME, wire.JoinGroup(5, "s", "c", ["all"], "shared", [0])).last(wire.Refused)
    assert (refused.code, refused.command, refused.reference) == ("conflict", 63, 5)
    assert "'c' is a cursor of stream 's'" in refused.reason
    assert info(shell)["next"] == 3
    shell.send(ME, wire.RemoveCursor(8, "s", "c"))
    shell.send(ME, wire.JoinGroup(5, "s", "c", ["all"], "shared", [0]))
    assert shell.peers[ME].last(wire.Subscribed).subscription == 5


@pytest.mark.parametrize("first", ["cursor", "group"])
def test_a_name_that_is_on_its_way_into_the_log_is_taken(first: str) -> None:
    shell = world()
    commands = [
        wire.MoveCursor("s", "new", 1, 9),
        wire.JoinGroup(5, "s", "new", ["all"], "shared", [0]),
    ]
    peer = shell.send(ME, *(commands if first == "cursor" else commands[::-1]))
    assert [one.code for one in peer.of(wire.Refused)] == ["conflict"]
    assert bool(peer.of(wire.Confirm)) == (first == "cursor")
    assert bool(peer.of(wire.Subscribed)) == (first == "group")


def test_a_cursor_whose_start_is_looked_up_is_refused_when_a_group_takes_its_name() -> None:
    shell = world()
    shell.auto_ask = False
    shell.send(ME, wire.EditCursor(7, "s", "new", {}, [4, 0]))
    shell.auto_ask = True
    shell.send(ME, wire.JoinGroup(5, "s", "new", ["all"], "shared", [0]))
    refused = shell.peers[ME].last(wire.Refused)
    assert (refused.code, refused.reference) == ("conflict", 7)
    assert shell.peers[ME].last(wire.Subscribed).subscription == 5
