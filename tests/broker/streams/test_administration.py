"""Administration: streams, facts, plans, links; retention by bytes and age."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_py.broker import IndexAnswer, IndexFailure
from tests.broker.shell import Shell, bodies, offsets


def asked(shell: Shell, command: wire.Command, link: int = 1) -> Any:
    """The answer to one command: a RESULT's value, or the code of its refusal."""
    peer = shell.send(link, command)
    for answer in reversed(peer.commands):
        if isinstance(answer, wire.Result):
            return answer.value
        if isinstance(answer, wire.Refused):
            return answer.code
    return None


# --- streams ------------------------------------------------------------------------------


def test_creating_a_stream_again_with_the_same_settings_succeeds() -> None:
    shell = Shell()
    shell.hello(1)
    first = asked(shell, wire.CreateStream(1, "s", {"max_bytes": 1000}))
    again = asked(shell, wire.CreateStream(2, "s", {"max_bytes": 1000}))
    assert first == again
    assert first["name"] == "s"


def test_creating_a_stream_again_with_other_settings_is_refused() -> None:
    shell = Shell()
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "s", {"max_bytes": 1000}))
    assert asked(shell, wire.CreateStream(2, "s", {"max_bytes": 2000})) == "stream_exists"


def test_two_creations_of_one_name_in_one_message_are_told_apart() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.send(
        1,
        wire.CreateStream(1, "s", {"max_bytes": 1}),
        wire.CreateStream(2, "s", {"max_bytes": 1}),
        wire.CreateStream(3, "s", {"max_bytes": 2}),
    )
    assert [result.request for result in peer.of(wire.Result)] == [1, 2]
    assert [(r.reference, r.code) for r in peer.of(wire.Refused)] == [(3, "stream_exists")]


@pytest.mark.parametrize(
    "settings",
    [
        {"colour": "red"},
        {"max_bytes": "many"},
        {"max_bytes": -1},
        {"full": "explode"},
        {"full": "refuse"},
        {"ring_bytes": 5},
        {"body_kind": "song"},
        {"level": "replicated"},
        {"schema": b"x", "body_kind": "blob"},
        {"former_schemas": [b"x"]},
        {"description": "x" * 100_000},
        {"max_age_ms": 1 << 80},
    ],
)
def test_a_setting_that_is_not_allowed_is_refused_by_name(settings: dict[str, Any]) -> None:
    shell = Shell()
    shell.hello(1)
    assert asked(shell, wire.CreateStream(1, "s", settings)) == "bad_setting"
    assert shell.broker.gauges["streams"] == 0


def test_a_creation_is_answered_only_when_it_is_durable() -> None:
    shell = Shell(sync=False)
    shell.hello(1)
    assert asked(shell, wire.CreateStream(1, "s")) is None
    shell.sync()
    shell.run()
    assert shell.peers[1].last(wire.Result).request == 1


def test_settings_can_be_edited_and_those_not_named_stay() -> None:
    shell = Shell()
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "s", {"max_bytes": 5, "description": "d"}))
    asked(shell, wire.EditStream(2, "s", {"max_bytes": 9}))
    settings = asked(shell, wire.StreamInfo(3, "s"))["settings"]
    assert (settings["max_bytes"], settings["description"]) == (9, "d")
    shell.restart()
    shell.hello(1)
    assert asked(shell, wire.StreamInfo(3, "s"))["settings"] == settings


@pytest.mark.parametrize("settings", [{"memory": True}, {"ring_bytes": 1 << 20}, {"nonsense": 1}])
def test_what_cannot_be_edited_is_refused(settings: dict[str, Any]) -> None:
    shell = Shell()
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "s"))
    assert asked(shell, wire.EditStream(2, "s", settings)) == "bad_setting"


def test_a_removed_stream_is_gone_and_its_number_is_never_used_again() -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"x"] * 3)
    old = asked(shell, wire.StreamInfo(1, "s"))
    assert asked(shell, wire.RemoveStream(2, "s")) == {}
    assert asked(shell, wire.StreamInfo(3, "s")) == "unknown_stream"
    shell.restart()
    shell.hello(1)
    shell.publish(1, "s", [b"y"])
    new = asked(shell, wire.StreamInfo(4, "s"))
    assert new["number"] > old["number"]
    assert new["uuid"] != old["uuid"]
    assert (new["first"], new["tail"]) == (0, 1)
    assert shell.trims[0] == ("main", old["number"], 3)


def test_a_producer_that_goes_on_after_a_removal_writes_to_the_new_stream() -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"x"], tracker=1)
    asked(shell, wire.RemoveStream(2, "s"))
    shell.publish(1, "s", [b"y"], tracker=2)
    assert shell.peers[1].last(wire.Confirm).offset == 0
    assert asked(shell, wire.StreamInfo(3, "s"))["number"] == 2


def test_the_ring_of_a_removed_stream_goes_only_when_that_is_durable() -> None:
    shell = Shell()
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "own", {"ring_bytes": 1 << 20}))
    shell.publish(1, "own", [b"x"])
    (ring,) = [name for name in shell.rings if name != "main"]
    shell.auto_sync = False
    assert asked(shell, wire.RemoveStream(2, "own")) != {}
    assert ring in shell.rings
    shell.sync()
    shell.run()
    assert ring not in shell.rings


def test_facts_about_a_stream() -> None:
    shell = Shell()
    shell.hello(1, identity="alice")
    shell.publish(1, "s", [b"x"] * 3)
    shell.subscribe(1, 1, "s", ["topic", "s"])
    facts = asked(shell, wire.StreamInfo(1, "s"))
    assert (facts["first"], facts["tail"], facts["visible"]) == (0, 3, 3)
    assert (facts["subscriptions"], facts["live"], facts["patterns"]) == (1, 1, 1)
    assert facts["created_by"] == "alice"
    assert facts["epochs"] == [[1, 0]]
    assert facts["bytes"] == sum(len(h.data) for h in shell.rings["main"] if h.stamp.stream == 1)


def test_streams_are_listed_in_pages_in_the_order_of_their_names() -> None:
    shell = Shell(page_max=3)
    shell.hello(1)
    for name in ["b", "a.2", "a.1", "c", "a.3", "a.4"]:
        asked(shell, wire.CreateStream(1, name))
    page = asked(shell, wire.ListStreams(2, limit=100))
    assert [one["name"] for one in page["streams"]] == ["a.1", "a.2", "a.3"]
    assert page["more"]
    page = asked(shell, wire.ListStreams(3, after="a.3"))
    assert [one["name"] for one in page["streams"]] == ["a.4", "b", "c"]
    assert not page["more"]
    page = asked(shell, wire.ListStreams(4, prefix="a.", after="a.2"))
    assert [one["name"] for one in page["streams"]] == ["a.3", "a.4"]


# --- positions ----------------------------------------------------------------------------


def test_an_offset_is_found_without_subscribing() -> None:
    shell = Shell()
    shell.hello(1)
    for n in range(3):
        shell.now_ms += 10
        shell.publish(1, "s", [b"x"] * 2, tracker=n + 1)
    found = asked(shell, wire.FindOffset(1, "s", [3, 1_000_020, True]))
    assert (found["offset"], found["first"], found["tail"], found["rewound"]) == (2, 0, 6, False)
    assert asked(shell, wire.FindOffset(1, "s", [2, 99]))["rewound"]
    assert asked(shell, wire.FindOffset(1, "nowhere", [0])) == "unknown_stream"
    assert asked(shell, wire.FindOffset(1, "s", ["?"])) == "bad_start"


def test_a_read_is_planned_by_the_journals_index() -> None:
    shell = Shell(ask=False)
    shell.hello(1)
    for n in range(3):
        shell.publish(1, "s", [b"x"] * 2, tracker=n + 1)
    peer = shell.send(1, wire.PlanRead(7, "s", ["topic", "s"], [2, 1], bytes_max=100))
    (query,) = shell.queries
    assert query.kind == "plan"
    assert (query.arguments["from"], query.arguments["end"]) == (1, 6)
    assert query.arguments["bytes_max"] == 100
    shell.answer_queries()
    shell.run()
    value = peer.last(wire.Result).value
    assert (value["from"], value["to"], value["tail"], value["records"]) == (1, 6, 6, 6)
    assert len(value["splits"]) == 3


def test_a_plan_sees_by_default_only_what_is_durable() -> None:
    shell = Shell(sync=False, ask=False)
    shell.hello(1)
    shell.publish(1, "s", [b"x"], tracker=1)
    shell.sync()
    shell.publish(1, "s", [b"x"], tracker=2)
    shell.send(1, wire.PlanRead(7, "s", ["all"], [0]))
    assert shell.queries[0].arguments["end"] == 1


def test_names_stay_in_order_while_streams_come_and_go() -> None:
    shell = Shell()
    shell.hello(1)
    names: set[str] = set()
    draw = Random(7)
    for number in range(60):
        name = f"n{draw.randrange(20)}"
        if name in names:
            names.remove(name)
            shell.send(1, wire.RemoveStream(number, name))
        else:
            names.add(name)
            shell.send(1, wire.CreateStream(number, name))
        told = asked(shell, wire.ListStreams(1_000 + number))["streams"]
        assert [each["name"] for each in told] == sorted(names)


def test_a_plan_of_nothing_needs_no_index() -> None:
    shell = Shell(ask=False)
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "s"))
    value = asked(shell, wire.PlanRead(7, "s", ["all"], [0]))
    assert (value["from"], value["to"], value["splits"]) == (0, 0, [])


@pytest.mark.parametrize(
    "command", [wire.PlanRead(1, "s", ["all"], [0]), wire.FindOffset(1, "s", [3, 5, True])]
)
def test_what_the_index_cannot_answer_is_refused(command: wire.Command) -> None:
    shell = Shell(ask=False)
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    peer = shell.send(1, command)
    shell.broker.answered(IndexAnswer(shell.queries[0].token, IndexFailure("damaged", "EIO")))
    shell.run()
    assert peer.last(wire.Refused).code == "damaged"


@pytest.mark.parametrize("start", [[4, 2_000_000, True], [3, 1_000_001, True]])
def test_no_record_that_came_while_the_index_was_asked_for_a_time_is_passed_over(
    start: list[Any],
) -> None:
    shell = Shell(ask=False)
    shell.hello(1)
    shell.publish(1, "s", [b"x"] * 2)
    shell.stream("s").last_time_ms = 1_000_001  # so that the index is asked for either time
    peer = shell.send(1, wire.FindOffset(7, "s", start))
    (query,) = shell.queries
    shell.now_ms += 1
    shell.publish(1, "s", [b"of the time"], client_time_ms=2_000_000)
    shell.broker.answered(IndexAnswer(query.token, None))
    shell.run()
    assert peer.last(wire.Result).value["offset"] == 2


def test_unanswered_questions_of_one_link_and_of_all_are_bounded() -> None:
    shell = Shell(ask=False, link_queries_max=5, queries_max=8)
    for link in (1, 2):
        shell.hello(link)
        shell.publish(link, "s", [b"x"])
        for _ in range(10):
            shell.send(link, wire.FindOffset(1, "s", [3, 5, True]))
    assert shell.broker.gauges["queries_under_way"] == 8
    shell.send(2, wire.Subscribe(9, "s", ["all"], [3, 5, True], 1, 1))
    refused = [r for link in (1, 2) for r in shell.peers[link].of(wire.Refused)]
    assert {r.code for r in refused} == {"wait"}
    assert all(r.retry_ms for r in refused)
    assert refused[-1].reference == 9
    while shell.queries:
        shell.answer_queries()
        shell.run()
    assert len(shell.peers[1].of(wire.Result)) == 5


# --- the broker and its links -------------------------------------------------------------


def test_facts_about_the_broker_include_those_of_the_shell() -> None:
    shell = Shell(facts=lambda: {"disk_free": 5})
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    facts = asked(shell, wire.BrokerInfo(1))
    assert (facts["epoch"], facts["links"], facts["streams"], facts["disk_free"]) == (1, 1, 1, 5)
    assert facts["counters"]["records_in"] == 1
    assert facts["rings"]["main"]["visible"] > 0


def test_a_ring_of_a_streams_own_names_the_stream_to_those_who_may_read_it() -> None:
    def permit(identity: str, action: str, name: str) -> bool:
        return action != "read" or identity == "ann"

    shell = Shell(permit=permit)
    for link, identity in ((1, "ann"), (2, "bob")):
        shell.hello(link, identity=identity)
    asked(shell, wire.CreateStream(1, "own", {"ring_bytes": 256 << 20}))
    asked(shell, wire.CreateStream(2, "shares", {}))
    rings = asked(shell, wire.BrokerInfo(3))["rings"]
    assert sorted(facts.get("stream", "") for facts in rings.values()) == ["", "own"]
    assert "stream" not in rings["main"]
    told = asked(shell, wire.BrokerInfo(4), link=2)["rings"]
    assert told.keys() == rings.keys()
    assert not [facts for facts in told.values() if "stream" in facts]


def test_where_the_data_lies_is_told_only_to_administrators() -> None:
    def permit(identity: str, action: str, name: str) -> bool:
        return action != "admin" or identity == "boss"

    shell = Shell(facts=lambda: {"data": "/srv/malamute", "uptime_ms": 5}, permit=permit)
    for link, identity in ((1, "boss"), (2, "guest")):
        shell.hello(link, identity=identity)
    shell.send(1, wire.BrokerInfo(1))
    shell.send(2, wire.BrokerInfo(1))
    told = [shell.peers[link].of(wire.Result)[-1].value for link in (1, 2)]
    assert told[0]["data"] == "/srv/malamute"
    assert "data" not in told[1]
    assert told[1]["uptime_ms"] == 5


def test_links_are_listed_with_what_they_hold() -> None:
    shell = Shell()
    shell.hello(1, identity="alice", software="test")
    shell.subscribe(1, 1, "s")
    shell.hello(2)
    page = asked(shell, wire.ListLinks(1, limit=1))
    assert page["more"]
    (facts,) = page["links"]
    assert (facts["link"], facts["identity"], facts["software"]) == (1, "alice", "test")
    assert (facts["subscriptions"], facts["live"], facts["blocked"]) == (1, 1, False)


def test_a_link_tells_who_is_behind_and_who_waits_for_credit() -> None:
    shell = Shell()
    shell.hello(1)
    shell.hello(2)
    shell.subscribe(2, 1, "s", records=2)
    shell.subscribe(2, 2, "s")
    shell.publish(1, "s", [b"x"] * 2)
    shell.publish(1, "s", [b"x"] * 3)
    (facts,) = asked(shell, wire.ListLinks(1, after=1))["links"]
    assert (facts["subscriptions"], facts["without_credit"], facts["lag"]) == (2, 1, 3)


def test_a_kicked_link_ends_by_name() -> None:
    shell = Shell()
    shell.hello(1)
    victim = shell.hello(2)
    assert asked(shell, wire.Kick(1, 2, "maintenance")) == {}
    assert victim.last(wire.Bye) == wire.Bye("kicked", "maintenance")
    assert victim.closed
    assert asked(shell, wire.Kick(2, 2)) == "unknown_link"


def test_only_administrators_may_list_and_kick() -> None:
    shell = Shell(permit=lambda identity, action, name: not action.startswith("manage_"))
    shell.hello(1)
    assert asked(shell, wire.ListLinks(1)) == "forbidden"
    assert asked(shell, wire.Kick(1, 1)) == "forbidden"
    asked(shell, wire.CreateStream(2, "s"))
    assert asked(shell, wire.RemoveStream(3, "s")) == "forbidden"
    assert asked(shell, wire.EditStream(4, "s", {})) == "forbidden"


# --- retention ----------------------------------------------------------------------------


def test_a_stream_drops_its_oldest_records_beyond_its_bytes() -> None:
    shell = Shell()
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "s", {"max_bytes": 500_000}))
    for n in range(200):
        shell.publish(1, "s", [bytes(10_000)], tracker=n + 1)
        shell.wait(1_000)
        shell.send(1, wire.Pong(0))
    facts = asked(shell, wire.StreamInfo(2, "s"))
    assert 100 < facts["first"] < 200
    assert 350_000 < facts["bytes"] <= 500_000
    peer = shell.subscribe(1, 1, "s")
    assert offsets(peer, 1)[0] == facts["first"]


def test_a_stream_drops_records_beyond_its_age() -> None:
    shell = Shell()
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "s", {"max_age_ms": 10_000}))
    shell.publish(1, "s", [bytes(70_000)], tracker=1)
    shell.wait(6_000)
    shell.send(1, wire.Pong(0))
    shell.publish(1, "s", [b"young"], tracker=2)
    shell.wait(5_000)
    assert asked(shell, wire.StreamInfo(2, "s"))["first"] == 1


def test_what_a_restart_found_is_dropped_by_age_and_bytes_too() -> None:
    shell = Shell()
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "old", {"max_age_ms": 10_000}))
    asked(shell, wire.CreateStream(1, "big", {"max_bytes": 100_000}))
    for n in range(20):
        shell.publish(1, "old", [b"x"], tracker=2 * n + 1)
        shell.publish(1, "big", [bytes(10_000)], tracker=2 * n + 2)
        shell.now_ms += 1_000
    shell.restart()
    shell.hello(1)
    shell.wait(1_000)
    shell.wait(1_000)
    # In between, the index has answered how the recovered bytes and times lie.
    assert asked(shell, wire.StreamInfo(2, "old"))["first"] >= 10
    facts = asked(shell, wire.StreamInfo(2, "big"))
    assert 9 <= facts["first"] <= 13
    assert facts["bytes"] <= 100_000


def test_the_core_wakes_for_retention_only_where_a_stream_is_bounded() -> None:
    shell = Shell(heartbeat_ms=60_000)
    shell.hello(1)
    assert shell.broker.wake_at_ms() == shell.now_ms + 60_000
    asked(shell, wire.CreateStream(1, "s", {"max_bytes": 1}))
    assert (shell.broker.wake_at_ms() or 0) <= shell.now_ms + 1_000


def test_a_subscriber_that_retention_overtook_is_told_of_the_gap() -> None:
    shell = Shell()
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "s", {"max_age_ms": 1_000}))
    peer = shell.subscribe(1, 1, "s", records=1)
    for n in range(5):
        shell.publish(1, "s", [str(n).encode()], tracker=n + 1)
        shell.now_ms += 1
    shell.wait(5_000)
    shell.publish(1, "s", [b"5"], tracker=9)
    shell.send(1, wire.Credit(1, 10, 1 << 50))
    gap = peer.last(wire.Gap)
    assert (gap.from_, gap.to, gap.code) == (1, 5, "retention")
    assert bodies(peer, 1) == [b"0", b"5"]


def test_what_waits_for_the_disk_in_the_ring_of_a_removed_stream_is_answered() -> None:
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "own", {"ring_bytes": 1 << 20}))
    shell.auto_sync = False
    shell.publish(1, "own", [b"x"], tracker=7)
    shell.send(1, wire.RemoveStream(2, "own"))
    own = next(ring for ring in shell.rings if ring.startswith("stream-"))
    shell.synced_to["main"] = shell.ends["main"]
    shell.broker.synced("main", shell.ends["main"], shell.now_ms)
    shell.run()
    peer = shell.peers[1]
    refused = peer.last(wire.Refused)
    assert (refused.command, refused.reference, refused.code) == (10, 7, "stream_removed")
    assert peer.last(wire.Result).request == 2
    assert own not in shell.rings
    assert shell.broker.gauges["unsettled_bytes"] == 0
    assert shell.broker._links.get(1).unconfirmed_bytes == 0  # type: ignore[union-attr]


def test_the_settings_of_all_streams_together_are_bounded() -> None:
    shell = Shell(all_settings_bytes_max=2500)
    peer = shell.hello(1)
    thousand = {"description": "d" * 1000}
    shell.send(1, wire.CreateStream(1, "a", thousand), wire.CreateStream(2, "b", thousand))
    assert [result.request for result in peer.of(wire.Result)] == [1, 2]
    assert shell.send(1, wire.CreateStream(3, "c", thousand)).last(wire.Refused).code == "limit"
    shell.send(1, wire.CreateStream(4, "c", {}))
    shell.send(1, wire.EditStream(5, "c", thousand))
    assert peer.last(wire.Refused).reference == 5
    assert peer.last(wire.Refused).code == "limit"
    shell.send(1, wire.EditStream(6, "a", {"description": ""}))
    shell.restart()
    peer = shell.hello(1)
    shell.send(1, wire.EditStream(8, "c", thousand))
    shell.send(1, wire.EditStream(9, "a", thousand))
    assert peer.last(wire.Refused).reference == 9
    shell.send(1, wire.RemoveStream(10, "b"))
    shell.send(1, wire.EditStream(11, "a", thousand))
    assert peer.last(wire.Result).request == 11
