"""First use creates a service, once, with the settings of that moment."""

from __future__ import annotations

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.service_world import MANY, logged, pair


def test_first_use_creates_the_service_and_says_so_once() -> None:
    world = pair()
    world.request(1, b"a")
    world.request(1, b"b")
    assert world.events("service_created") == [{"service": "s", "by": ""}]
    assert world.info(1)["waiting"] == 2
    assert world.shell.broker.gauges["services"] == 1


def test_without_auto_create_a_service_must_have_been_made() -> None:
    world = pair(auto_create=False)
    assert world.refused(1, world.request(1, b"a")).code == "unknown_service"
    world.ask(1, wire.EditService(7, "s", {}))
    world.confirmed(1, world.request(1, b"a"))


def test_settings_that_come_while_the_service_is_being_made_hold() -> None:
    world = pair()
    shell, broker = world.shell, world.shell.broker
    content = encode([b"a"], subject="x")
    edit = wire.EditService(7, "s", {"attempts_max": 9})
    broker.receive(1, "", [wire.Request("s", 801)], [content], shell.now_ms)
    broker.receive(2, "", [edit], [], shell.now_ms)
    broker.receive(1, "", [wire.Request("s", 802)], [content], shell.now_ms)
    shell.run()
    assert world.info(1)["settings"]["attempts_max"] == 9
    shell.restart()
    world.worker(3)
    info = world.info(3)
    assert (info["settings"]["attempts_max"], info["waiting"]) == (9, 2)


def test_the_log_has_a_service_before_it_has_a_request_for_it() -> None:
    world = pair()
    shell, broker = world.shell, world.shell.broker
    content = encode([b"a"], subject="x")
    broker.receive(1, "", [wire.Request("s", 801)], [content], shell.now_ms)
    broker.receive(2, "", [wire.Offer(1, "s", ["all"], 5, MANY)], [], shell.now_ms)
    shell.run()
    names = [name for name in logged(world) if name in ("ServiceSet", "RequestPut")]
    assert names[:2] == ["ServiceSet", "RequestPut"]
    assert world.numbers(2) == [0]


def test_of_batches_of_one_turn_any_that_the_log_takes_creates_the_service() -> None:
    world = pair()
    shell, broker = world.shell, world.shell.broker
    content = encode([b"a"], subject="x")
    requests = [wire.Request("s", tracker) for tracker in (801, 802)]
    broker.receive(1, "", requests, [content, content], shell.now_ms)
    shell.run()
    assert world.events("service_created") == [{"service": "s", "by": ""}]
    assert world.counter("services_created") == 1
    names = [name for name in logged(world) if name in ("ServiceSet", "RequestPut")]
    assert names == ["ServiceSet", "RequestPut"] * 2
    shell.restart()
    world.worker(3)
    assert world.info(3)["waiting"] == 2


def test_a_service_that_a_refused_command_would_have_created_is_not_there() -> None:
    world = pair()
    world.shell.refuse["main"] = ("full", "no room")
    world.refused(1, world.request(1, b"a"))
    assert world.shell.broker.gauges["services"] == 0
    del world.shell.refuse["main"]
    assert world.refused(1, world.request(1, b"a", reply_to="b@d name")).code == "bad_name"
    assert world.shell.broker.gauges["services"] == 0
