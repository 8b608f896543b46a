"""Administration of services: cancelling, facts, settings, dead letters put back, removal."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_protocol.encode import encode
from malamute_py.broker.mail import puts
from malamute_py.broker.services import administration
from malamute_py.broker.services.service import OLDEST_LOOK
from tests.broker.service_world import MANY, World, letters, pair, poisoned


def test_a_waiting_request_can_be_cancelled_by_its_key() -> None:
    world = pair()
    world.request(1, b"a", b"b", b"c", key=b"k")
    assert world.ask(1, wire.CancelRequest(7, "s", b"k", 1)) == {"count": 1}
    assert world.info(1)["waiting"] == 2
    assert world.ask(1, wire.CancelRequest(8, "s", b"k")) == {"count": 2}
    assert world.queued() == 0
    world.offer(2)
    assert world.work(2) == []
    assert world.counter("requests_cancelled") == 3


def test_a_cancelled_request_in_hand_frees_its_worker_and_the_reply_is_not_held() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k")
    assert world.ask(1, wire.CancelRequest(7, "s", b"k")) == {"count": 1}
    assert world.refused(2, world.reply(2, [0])).code == "not_held"
    assert world.info(1)["held"] == 0
    assert world.mail(1) == [], "who cancels is told by the result"


def test_cancel_in_the_same_message_as_its_request_finds_it() -> None:
    world = pair()
    world.offer(2, credit=0)
    content = encode([b"a"], subject="x")
    peer = world.shell.send(
        1, wire.Request("s", 801, key=b"k"), wire.CancelRequest(7, "s", b"k"), frames=[content]
    )
    assert peer.last(wire.Result).value == {"count": 1}
    assert world.queued() == 0


def test_cancel_while_the_hand_out_is_under_way_keeps_it_from_the_worker() -> None:
    world = pair()
    world.offer(2, credit=0)
    world.request(1, b"a", b"b", key=b"k")
    shell, broker = world.shell, world.shell.broker
    broker.receive(2, "", [wire.Credit(1, 5, MANY)], [], shell.now_ms)
    ready = broker.take_ready()
    broker.receive(1, "", [wire.CancelRequest(7, "s", b"k", 0)], [], shell.now_ms)
    shell._do(ready)
    shell.run()
    assert world.numbers(2) == [1]
    assert world.shell.peers[1].last(wire.Result).value == {"count": 1}
    world.request(1, *[b"x"] * 9)
    assert len(world.numbers(2)) == 5, "what it did not get cost it no credit"


@pytest.mark.parametrize("done", ["completed", "expired", "never"])
def test_what_is_over_cannot_be_cancelled(done: str) -> None:
    world = pair()
    world.offer(2)
    if done != "never":
        world.request(1, b"a", key=b"k", timeout_ms=500)
    if done == "completed":
        world.reply(2, [0])
    world.shell.wait(600)
    world.shell.send(1, wire.CancelRequest(7, "s", b"k"))
    assert world.shell.peers[1].last(wire.Result).value == {"count": 0}


def test_nobody_cancels_for_another() -> None:
    world = pair()
    world.client(3)
    world.request(1, b"a", key=b"k")
    assert world.ask(3, wire.CancelRequest(7, "s", b"k")) == {"count": 0}
    assert world.info(1)["waiting"] == 1


def test_a_cancel_that_the_log_refuses_has_not_happened() -> None:
    world = pair()
    world.request(1, b"a", key=b"k")
    world.shell.refuse["main"] = ("full", "no room")
    world.shell.send(1, wire.CancelRequest(7, "s", b"k"))
    assert world.shell.peers[1].last(wire.Refused).code == "full"
    del world.shell.refuse["main"]
    world.offer(2)
    assert world.numbers(2) == [0]


def test_cancels_that_the_log_refuses_again_and_again_leave_one_request() -> None:
    world = pair()
    world.request(1, b"a", key=b"k")
    world.shell.refuse["main"] = ("full", "no room")
    for request in (7, 8, 9):
        world.shell.send(1, wire.CancelRequest(request, "s", b"k"))
    del world.shell.refuse["main"]
    world.offer(2)
    assert world.numbers(2) == [0]


def test_a_dead_letter_goes_back_into_its_queue_with_its_attempts_forgotten() -> None:
    world = pair()
    poisoned(world, 2)
    assert world.info(1)["dead"] == 1
    assert world.ask(1, wire.Requeue(7, "s")) == {"count": 1}
    assert world.info(1)["dead"] == 0
    world.offer(2)
    assert [(task.body, task.work.attempts) for task in world.work(2)] == [
        (b"poison", 1), (b"bread", 1),
    ]  # fmt: skip
    world.reply(2, [0, 1])
    assert world.queued() == 0
    assert world.replies(1)[-2:] == [b"re: 0", b"re: 1"]


def test_a_dead_letter_is_revived_after_a_restart() -> None:
    world = pair()
    poisoned(world, 2)
    world.shell.restart()
    world.worker(3, "ops")
    assert world.ask(3, wire.Requeue(7, "s", [0])) == {"count": 1}
    world.offer(3)
    assert [task.body for task in world.work(3)] == [b"poison", b"bread"]


def test_all_dead_letters_are_put_back_in_portions() -> None:
    world = pair()
    world.offer(2)
    for _ in range(5):
        world.request(1, *[b"x"] * 3)
    world.ack(2, [(0, 15)], WorkState.FAILED)
    world.shell.send(2, wire.Unsubscribe(1))
    assert world.info(1)["dead"] == 15
    assert world.ask(1, wire.Requeue(7, "s")) == {"count": 15}
    assert world.info(1)["waiting"] == 15
    assert world.counter("requests_requeued") == 15


def test_dead_letters_after_many_that_a_reader_holds_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(puts, "REVIVED_MAX", 2)
    world = pair()
    world.offer(2)
    for _ in range(5):
        world.request(1, b"x")
    world.ack(2, [(0, 5)], WorkState.FAILED)
    world.shell.send(2, wire.Unsubscribe(1))
    world.shell.send(1, wire.OpenInbox(9, "s.dead", 3, 1_000_000))
    assert world.ask(1, wire.Requeue(7, "s")) == {"count": 2}
    assert world.info(1)["waiting"] == 2


@pytest.mark.parametrize("request_first", [False, True])
def test_of_a_batch_in_memory_one_request_may_be_put_back_while_others_stay_dead(
    request_first: bool,
) -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"memory": True}))
    world.offer(2)
    world.request(1, b"a", b"b")
    first, _ = world.numbers(2)
    world.ack(2, [(first, first + 2)], WorkState.FAILED)
    assert world.ask(1, wire.Requeue(8, "s", [first])) == {"count": 1}
    if request_first:
        world.reply(2, [first])
    (letter,) = letters(world, 1)
    assert letter.body == b"b"
    world.shell.send(1, wire.AckMail(50, [(first + 1, first + 2)], 99))
    if not request_first:
        world.shell.send(2, wire.Unsubscribe(1))
        world.offer(2, number=2)
        assert [task.body for task in world.work(2, 2)] == [b"a"]
        world.reply(2, [first], number=2)
    assert world.replies(1) == [b"re: %d" % first]
    (reply,) = world.mail(1)
    world.shell.send(1, wire.AckMail(100, [(reply.number, reply.number + 1)], 98))
    assert world.shell.broker.gauges["mail_memory_bytes"] == 0


def test_a_request_in_hand_can_be_taken_away_and_put_back() -> None:
    world = pair()
    world.offer(2, credit=2)
    world.request(1, b"a", b"b")
    world.worker(3, "bob")
    world.offer(3)
    assert world.ask(1, wire.Requeue(7, "s", [1])) == {"count": 1}
    assert world.numbers(3) == [1]
    assert world.refused(2, world.reply(2, [0, 1])).code == "not_held"
    world.confirmed(2, world.reply(2, [0]))


def test_putting_back_what_is_not_there_is_refused() -> None:
    world = pair()
    world.request(1, b"a")
    world.shell.send(1, wire.Requeue(7, "s", [5]))
    assert world.shell.peers[1].last(wire.Refused).code == "unknown_request"
    world.shell.send(1, wire.Requeue(8, "s"))
    assert world.shell.peers[1].last(wire.Refused).code == "unknown_request"


def test_who_holds_what_since_when_and_how_often_is_visible() -> None:
    world = pair()
    world.offer(2, credit=3, lease_ms=2_000)
    begun = world.shell.now_ms
    world.request(1, *[b"x"] * 5)
    world.ack(2, [(0, 1)], WorkState.RECEIVED)
    info = world.info(1)
    assert (info["waiting"], info["held"], info["delayed"], info["offers"]) == (2, 3, 0, 1)
    assert (info["credit"], info["oldest_ms"], info["attempts"]) == (0, begun, [[0, 2], [1, 3]])
    assert info["workers"] == [
        {
            "holder": "ann", "link": 2, "held": 3, "received": 1, "since_ms": begun,
            "lease_until_ms": begun + 2_000, "attempts": 1,
        }
    ]  # fmt: skip
    gauges = world.shell.broker.gauges
    assert (gauges["requests"], gauges["offers"]) == (5, 1)


def test_the_oldest_request_is_the_first_that_may_be_handed_out() -> None:
    world = pair()
    world.offer(2, credit=2)
    begun = world.shell.now_ms
    world.request(1, b"in hand")
    world.request(1, b"delayed", delay_ms=3_600_000)
    assert world.info(1)["oldest_ms"] == 0
    world.shell.wait(100)
    world.request(1, b"in hand, too")
    world.shell.wait(100)
    world.request(1, b"waits")
    assert world.info(1)["oldest_ms"] == begun + 200
    # Behind many others, the time may be too early, and is never too late.
    for _ in range(OLDEST_LOOK):
        world.shell.wait(1)
        world.request(1, b"delayed", service="t", delay_ms=3_600_000)
    assert world.info(1, "t")["oldest_ms"] == 0
    world.shell.wait(1)
    world.request(1, b"waits", service="t")
    assert world.info(1, "t")["oldest_ms"] == begun + 200 + OLDEST_LOOK


def test_services_are_listed_in_pages_by_name() -> None:
    world = pair()
    for name in ("b", "a.2", "a.1", "a.3"):
        world.request(1, b"x", service=name)
    page = world.ask(1, wire.ServiceInfo(7, "a.*", "", 2))
    assert [entry["name"] for entry in page["entries"]] == ["a.1", "a.2"]
    assert page["more"]
    page = world.ask(1, wire.ServiceInfo(7, "a.*", "a.2", 2))
    assert [entry["name"] for entry in page["entries"]] == ["a.3"]
    assert not page["more"]
    assert len(world.ask(1, wire.ServiceInfo(7, "*"))["entries"]) == 4


def test_settings_are_changed_one_by_one_and_survive_a_restart() -> None:
    world = pair()
    world.request(1, b"a")
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 9}))
    world.ask(1, wire.EditService(7, "s", {"lease_ms": 77_000, "level": "stored"}))
    assert world.confirmed(1, world.request(1, b"b")).level == 2
    world.shell.restart()
    world.worker(3)
    settings = world.info(3)["settings"]
    assert (settings["attempts_max"], settings["lease_ms"]) == (9, 77_000)


@pytest.mark.parametrize("settings", [{"nonsense": 1}, {"attempts_max": -1}, {"memory": True}])
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any]) -> None:
    world = pair()
    world.request(1, b"a")
    world.shell.send(1, wire.EditService(7, "s", settings))
    assert world.shell.peers[1].last(wire.Refused).code == "bad_setting"


def test_a_service_is_removed_with_all_that_waits_and_its_requesters_are_told() -> None:
    world = pair()
    world.request(1, b"a", b"b", key=b"k")
    world.request(1, b"c")
    assert world.ask(1, wire.RemoveService(7, "s", "s")) == {"count": 3}
    assert world.mail(1)[0].mail.why == "removed"
    assert world.queued() == 0
    world.shell.send(1, wire.ServiceInfo(8, "s"))
    assert world.shell.peers[1].last(wire.Refused).code == "unknown_service"
    assert world.events("service_removed")
    world.confirmed(1, world.request(1, b"again"))
    assert world.info(1)["waiting"] == 1
    world.shell.restart()
    world.worker(3)
    assert world.info(3)["waiting"] == 1


def failed(world: World, count: int) -> None:
    """Let a service have so many dead letters and nothing else."""
    world.offer(2)
    for number in range(count):
        world.request(1, b"x", key=b"%d" % number)
    world.ack(2, [(0, count)], WorkState.FAILED)
    world.shell.send(2, wire.Unsubscribe(1))
    assert (world.info(1)["dead"], world.queued()) == (count, 0)


def test_a_service_into_which_dead_letters_are_put_back_is_not_removed() -> None:
    world = pair()
    failed(world, 2)
    peer = world.shell.send(1, wire.Requeue(7, "s"), wire.RemoveService(8, "s", "s"))
    assert peer.last(wire.Refused).code == "wait"
    assert peer.last(wire.Result).value == {"count": 2}
    assert world.info(1)["waiting"] == world.queued() == 2


@pytest.mark.parametrize("removing_first", [False, True])
def test_a_service_that_is_removed_leaves_its_dead_letters_where_they_are(
    removing_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puts, "REVIVED_MAX", 1)
    world = pair()
    failed(world, 3)
    commands = [wire.Requeue(7, "s"), wire.RemoveService(8, "s", "s")]
    if removing_first:
        commands.reverse()
    else:
        # The first portion has only what a reader holds, and nothing is on its way then.
        world.shell.send(1, wire.OpenInbox(9, "s.dead", 1, 1_000_000))
    world.shell.send(1, *commands)
    assert [command.code for command in world.shell.peers[1].of(wire.Refused)] == ["wait"]
    assert world.queued() == 0
    assert world.ask(1, wire.MailboxInfo(10, "s.dead"))["messages"] == 3


def test_a_service_with_workers_or_by_another_name_is_not_removed() -> None:
    world = pair()
    world.offer(2)
    world.shell.send(1, wire.RemoveService(7, "s", "s"))
    assert world.shell.peers[1].last(wire.Refused).code == "in_use"
    world.shell.send(1, wire.RemoveService(8, "s", "t"))
    assert world.shell.peers[1].last(wire.Refused).code == "conflict"


def test_what_is_held_from_before_a_restart_is_removed_with_its_service() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    world.shell.restart()
    world.worker(3)
    assert world.ask(3, wire.RemoveService(7, "s", "s")) == {"count": 1}
    world.shell.wait(60_000)
    assert world.queued() == 0


@pytest.mark.parametrize(
    "command",
    [
        wire.EditService(7, "s", {}),
        wire.Requeue(7, "s"),
        wire.RemoveService(7, "s", "s"),
        wire.ServiceInfo(7, "s"),
        wire.CancelRequest(7, "s", b"k"),
    ],
)
def test_administration_needs_its_permission(command: wire.Command) -> None:
    allowed = {"s": True}

    def permit(identity: str, action: str, name: str) -> bool:
        return action not in ("manage_queues", "request", "work") or allowed["s"]

    world = pair(permit=permit)
    world.request(1, b"a", key=b"k")
    allowed["s"] = False
    peer = world.shell.send(1, command)
    assert peer.last(wire.Refused).code == "forbidden"


def test_a_cancel_behind_the_first_request_of_a_new_service_finds_it() -> None:
    world = pair()
    content = encode([b"a"], subject="x")
    peer = world.shell.send(
        1, wire.Request("s", 801, key=b"k"), wire.CancelRequest(7, "s", b"k"), frames=[content]
    )
    assert peer.last(wire.Result).value == {"count": 1}


def test_what_lies_in_memory_is_removed_a_portion_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "PORTION", 1)
    world = pair()
    world.ask(1, wire.EditService(5, "s", {"memory": True}))
    content = encode([b"x"], subject="x")
    world.shell.send(1, *[wire.Request("s", 0)] * 800, frames=[content] * 800)
    assert world.info(1)["waiting"] == 800
    before = len(world.shell.readies)
    assert world.ask(1, wire.RemoveService(6, "s", "s")) == {"count": 800}
    assert len(world.shell.readies) - before >= 800
    assert world.queued() == 0


@pytest.mark.parametrize("known", [False, True])
def test_edits_of_one_message_add_up(known: bool) -> None:
    world = pair()
    if known:
        world.ask(1, wire.EditService(5, "s", {}))
    world.shell.send(
        1, wire.EditService(6, "s", {"attempts_max": 3}), wire.EditService(7, "s", {"lease_ms": 9}),
    )  # fmt: skip
    world.shell.restart()
    world.client(1)
    settings = world.info(1)["settings"]
    assert (settings["attempts_max"], settings["lease_ms"]) == (3, 9)


def test_an_edit_that_the_log_refuses_is_not_what_the_next_begins_from() -> None:
    world = pair()
    world.ask(1, wire.EditService(5, "s", {}))
    world.shell.refuse["main"] = ("full", "no room")
    world.shell.send(1, wire.EditService(6, "s", {"attempts_max": 3}))
    del world.shell.refuse["main"]
    world.shell.send(1, wire.EditService(7, "s", {"lease_ms": 9}))
    settings = world.info(1)["settings"]
    assert (settings["attempts_max"], settings["lease_ms"]) == (0, 9)


def test_an_edit_behind_a_refused_request_makes_the_service() -> None:
    world = pair()
    world.shell.send(
        1, wire.Request("s", 801, need_workers=True), wire.EditService(5, "s", {"attempts_max": 3}),
        frames=[encode([b"a"], subject="x")],
    )  # fmt: skip
    assert world.shell.peers[1].last(wire.Refused).code == "no_workers"
    assert world.info(1)["settings"]["attempts_max"] == 3
    world.request(1, b"a")
    world.shell.restart()
    world.worker(3)
    assert world.info(3)["settings"]["attempts_max"] == 3
    assert [one["name"] for one in world.ask(3, wire.ServiceInfo(6, "*"))["entries"]] == ["s"]


def test_the_credit_of_a_service_is_what_its_offers_have_left_and_never_below_nothing() -> None:
    world = pair()
    world.offer(2, credit=-(1 << 63))
    world.offer(2, credit=-(1 << 63), number=2)
    world.offer(2, credit=7, number=3)
    assert world.info(1)["credit"] == 7


def test_dead_letters_in_the_default_mailbox_count_although_the_settings_name_another() -> None:
    """The mailbox in memory took none, `dead` was 0, and the command line requeued nothing."""
    world = pair()
    world.ask(1, wire.EditMailbox(6, "morgue", {"memory": True}))
    world.ask(1, wire.EditService(7, "s", {"dead_letters": "morgue", "attempts_max": 1}))
    poisoned(world, 1)
    assert len(letters(world, 1)) == 1
    assert world.info(1)["dead"] == 1
