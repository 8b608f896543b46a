"""REQUEST: which batches are accepted, and which are refused or taken for a retry."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.service_world import INBOX, World, letters, pair


def test_a_request_is_confirmed_with_its_number_at_the_level_asked() -> None:
    world = pair(sync=False)
    stored = world.request(1, b"a", level=2)
    synced = world.request(1, b"b", b"c")
    assert (world.confirmed(1, stored).level, world.confirmed(1, stored).offset) == (2, 0)
    assert world.answers(1, synced) == []
    world.shell.sync()
    world.shell.run()
    assert (world.confirmed(1, synced).level, world.confirmed(1, synced).offset) == (3, 1)


def test_a_retried_request_is_accepted_once() -> None:
    world = pair()
    first = world.confirmed(1, world.request(1, b"a", b"b", key=b"k"))
    again = world.confirmed(1, world.request(1, b"a", b"b", key=b"k"))
    assert (again.duplicate, again.offset) == (True, first.offset)
    assert world.info(1)["waiting"] == 2


def test_a_retry_while_the_original_is_under_way_is_confirmed_when_that_is() -> None:
    world = pair(sync=False)
    shell = world.shell
    content = encode([b"a"], subject="x")
    for tracker in (801, 802):
        shell.broker.receive(1, "", [wire.Request("s", tracker, key=b"k")], [content], shell.now_ms)
    shell.run()
    assert world.answers(1, 801) == world.answers(1, 802) == []
    shell.sync()
    shell.run()
    first, again = world.confirmed(1, 801), world.confirmed(1, 802)
    assert (first.duplicate, again.duplicate) == (False, True)
    assert first.offset == again.offset == 0
    assert world.info(1)["waiting"] == 1


def test_a_retry_after_its_completion_and_after_a_restart_is_still_a_duplicate() -> None:
    world = World()
    world.client(1, "req")
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.reply(2, [0])
    assert world.confirmed(1, world.request(1, b"a", key=b"k")).duplicate
    world.shell.restart()
    world.client(1, "req")
    assert world.confirmed(1, world.request(1, b"a", key=b"k")).duplicate
    assert world.queued() == 0


def test_the_same_key_of_another_sender_is_another_request() -> None:
    world = pair()
    world.client(3)
    world.request(1, b"a", key=b"k")
    assert not world.confirmed(3, world.request(3, b"b", key=b"k")).duplicate
    assert world.info(1)["waiting"] == 2


def test_a_full_queue_answers_wait_and_takes_more_when_there_is_room() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"max_requests": 3}))
    world.request(1, b"a", b"b")
    refused = world.refused(1, world.request(1, b"c", b"d"))
    assert (refused.code, refused.retry_ms, refused.command) == ("wait", 100, 50)
    assert world.refused(1, world.request(1, *[b"x"] * 4)).code == "limit"
    world.confirmed(1, world.request(1, b"c"))
    world.offer(2)
    assert world.refused(1, world.request(1, b"d")).code == "wait", "what is in hand counts"
    world.reply(2, [0])
    world.confirmed(1, world.request(1, b"d"))


def test_a_queue_is_bounded_in_bytes_too() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"max_bytes": 2_000}))
    world.confirmed(1, world.request(1, b"x" * 1_000))
    assert world.refused(1, world.request(1, b"x" * 1_000)).code == "wait"
    assert world.refused(1, world.request(1, b"x" * 3_000)).code == "limit"


def test_requests_of_one_turn_share_the_room_that_is_left() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"max_requests": 1}))
    content = encode([b"a"], subject="x")
    world.shell.send(1, wire.Request("s", 801), wire.Request("s", 802), frames=[content, content])
    world.confirmed(1, 801)
    assert world.refused(1, 802).code == "wait"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"service": "b@d name"}, "bad_name"),
        ({"timeout_ms": -1}, "malformed"),
        ({"timeout_ms": (1 << 64) - 1}, "malformed"),
        ({"reply_to": "no{name}"}, "bad_name"),
        ({"reply_to": "~" + "00" * 16}, "forbidden"),
        ({"level": 9}, "unsupported"),
    ],
)
def test_a_request_that_cannot_be_is_refused_and_leaves_nothing(
    fields: dict[str, Any], code: str
) -> None:
    world = pair()
    assert world.refused(1, world.request(1, b"a", **fields)).code == code
    assert world.shell.broker.gauges["services"] == 0
    assert world.queued() == 0


def test_a_batch_of_too_many_requests_or_subjects_is_refused_by_name() -> None:
    world = pair(request_rows_max=10, request_subjects_max=2)
    assert world.refused(1, world.request(1, *[b"x"] * 11)).code == "too_large"
    refused = world.refused(1, world.request(1, *[b"x"] * 3, subjects=["a", "b", "c"]))
    assert refused.code == "too_large"
    world.confirmed(1, world.request(1, *[b"x"] * 3, subjects=["a", "b", "a"]))


def test_permission_is_asked_by_service_and_by_mailbox() -> None:
    def permit(identity: str, action: str, name: str) -> bool:
        return (action, name) not in {("request", "secret"), ("send", "boss")}

    world = pair(permit=permit)
    assert world.refused(1, world.request(1, b"a", service="secret")).code == "forbidden"
    assert world.refused(1, world.request(1, b"a", reply_to="boss")).code == "forbidden"
    world.confirmed(1, world.request(1, b"a", reply_to="clerk"))


def test_a_request_that_the_log_refuses_may_be_sent_again() -> None:
    world = pair()
    world.shell.refuse["main"] = ("full", "no room")
    assert world.refused(1, world.request(1, b"a", key=b"k")).code == "full"
    assert world.shell.broker.gauges["services"] == 0
    del world.shell.refuse["main"]
    answer = world.confirmed(1, world.request(1, b"a", key=b"k"))
    assert not answer.duplicate
    assert world.events("service_created") == [{"service": "s", "by": ""}]
    gauges = world.shell.broker.gauges
    assert (gauges["requests"], gauges["services"]) == (1, 1)


def test_a_pressed_log_takes_no_request_but_takes_its_end() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    world.shell.broker.pressed(True)
    assert world.refused(1, world.request(1, b"b")).code == "wait"
    world.confirmed(2, world.reply(2, [0]))
    world.shell.broker.pressed(False)
    world.confirmed(1, world.request(1, b"b"))


def test_an_identity_gets_replies_in_its_mailbox_or_where_it_said() -> None:
    world = World()
    world.client(1, "req")
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.request(1, b"b", key=b"l", reply_to="elsewhere")
    assert [task.work.reply_to for task in world.work(2)] == ["req", "elsewhere"]
    assert {task.work.sender for task in world.work(2)} == {"req"}
    world.reply(2, [0])
    world.reply(2, [1])
    assert world.replies(1) == [b"re: 0"]
    assert [letter.body for letter in letters(world, 1, "elsewhere")] == [b"re: 1"]


def test_a_requester_without_identity_has_a_mailbox_that_nobody_can_guess() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k")
    work = world.work(2)[0].work
    assert work.sender == work.reply_to
    assert work.sender.startswith("~")
    assert (1).to_bytes(16, "big").hex() not in work.reply_to
    assert INBOX in world.shell.peers[1].expected or world.mail(1) == []
