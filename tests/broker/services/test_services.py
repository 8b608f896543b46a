"""Service queues: what is accepted, how each request ends, and what an operator can do."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_protocol.encode import encode
from malamute_py.broker.services import administration
from malamute_py.changelog.records import decode_change
from malamute_py.journal.layout import control_bodies
from tests.broker.service_world import INBOX, MANY, World
from tests.broker.services.test_workers import LATER_MS, pair


def letters(world: World, link: int, mailbox: str = "s.dead", number: int = 50) -> list[Any]:
    """What lies in a dead-letter mailbox."""
    if number not in world.shell.peers[link].mail:
        world.shell.send(link, wire.OpenInbox(number, mailbox, MANY, MANY))
    return world.shell.peers[link].mail.get(number, [])


# --- what is accepted ---------------------------------------------------------------------------


def test_a_request_is_confirmed_with_its_number_at_the_level_asked() -> None:
    world = pair(sync=False)
    stored = world.request(1, b"a", level=2)
    synced = world.request(1, b"b", b"c")
    assert (world.confirmed(1, stored).level, world.confirmed(1, stored).offset) == (2, 0)
    assert world.answers(1, synced) == []
    world.shell.sync()
    world.shell.run()
    assert (world.confirmed(1, synced).level, world.confirmed(1, synced).offset) == (3, 1)


def test_first_use_creates_the_service_and_says_so_once() -> None:
    world = pair()
    world.request(1, b"a")
    world.request(1, b"b")
    assert world.events("service_created") == [{"service": "s", "by": ""}]
    assert world.info(1)["waiting"] == 2
    assert world.shell.broker.gauges["services"] == 1


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


def test_without_auto_create_a_service_must_have_been_made() -> None:
    world = pair(auto_create=False)
    assert world.refused(1, world.request(1, b"a")).code == "unknown_service"
    world.ask(1, wire.EditService(7, "s", {}))
    world.confirmed(1, world.request(1, b"a"))


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


# --- deadlines ------------------------------------------------------------------------------------


def test_a_waiting_request_expires_at_its_deadline_and_its_requester_is_told() -> None:
    world = pair()
    world.request(1, b"a", b"b", key=b"k", timeout_ms=1_000)
    world.shell.wait(990)
    assert world.mail(1) == []
    world.shell.wait(20)
    notice = world.mail(1)[0].mail
    assert (notice.why, notice.last, notice.about) == ("expired", True, [(b"k", 0, 2)])
    assert world.replies(1) == [b"", b""]
    assert world.queued() == 0
    assert world.events("request_expired") == [{"service": "s", "count": 2}]
    assert world.counter("requests_expired") == 2
    world.offer(2)
    assert world.work(2) == []


def test_a_request_in_hand_expires_too_and_a_late_reply_is_not_held() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k", timeout_ms=1_000)
    assert world.work(2)[0].work.deadline_ms == world.shell.now_ms + 1_000
    world.shell.wait(1_010)
    assert world.refused(2, world.reply(2, [0])).code == "not_held"
    assert world.replies(1) == [b""]
    assert world.info(1)["held"] == 0


def test_a_reply_in_the_turn_of_the_deadline_wins() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k", timeout_ms=1_000)
    shell, broker = world.shell, world.shell.broker
    shell.now_ms += 1_010
    content = encode([b"yes"], subject="r")
    broker.receive(2, "", [wire.Reply(1, [0], 77, True)], [content], shell.now_ms)
    broker.tick(shell.now_ms)
    shell.run()
    assert world.replies(1) == [b"yes"]
    assert world.counter("requests_expired") == 0


def test_a_request_without_a_key_expires_in_silence() -> None:
    world = pair()
    world.request(1, b"a", timeout_ms=500)
    world.shell.wait(510)
    assert world.mail(1) == []
    assert world.queued() == 0


def test_the_services_own_timeout_holds_for_those_who_name_none() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"timeout_ms": 500}))
    world.request(1, b"a", key=b"k")
    world.shell.wait(510)
    assert world.mail(1)[0].mail.why == "expired"


def test_a_deadline_that_passed_while_the_broker_was_down_is_kept() -> None:
    world = World()
    world.client(1, "req")
    world.request(1, b"a", key=b"k", timeout_ms=500)
    world.shell.now_ms += 10_000
    world.shell.restart()
    world.client(1, "req")
    world.shell.wait(10)
    assert world.mail(1)[0].mail.why == "expired"


def test_an_expiry_that_the_log_refuses_is_tried_again() -> None:
    world = pair()
    world.request(1, b"a", key=b"k", timeout_ms=500)
    world.shell.refuse["main"] = ("full", "no room")
    world.shell.wait(510)
    assert world.queued() == 1
    del world.shell.refuse["main"]
    world.shell.wait(1_100)
    assert world.queued() == 0
    assert len(world.mail(1)) == 1


def test_many_deadlines_at_once_are_met_in_bounded_steps() -> None:
    world = pair(timers_max=10)
    for n in range(55):
        world.request(1, b"x", key=b"%d" % n, timeout_ms=500)
    world.shell.wait(510)
    assert world.queued() == 0
    assert len(world.mail(1)) == 55


# --- cancel ---------------------------------------------------------------------------------------


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


# --- dead letters ---------------------------------------------------------------------------------


def poisoned(world: World, attempts: int) -> None:
    """A request kills its worker so often."""
    world.ask(1, wire.EditService(7, "s", {"attempts_max": attempts, "backoff_ms": 10}))
    world.request(1, b"poison", b"bread", key=b"k", subjects=["bad", "good"])
    for link in range(10, 10 + attempts):
        world.worker(link, f"w{link}")
        world.offer(link, pattern=["topic", "bad"])
        world.drop(link)
        world.shell.wait(LATER_MS)


def test_a_request_that_kills_its_workers_becomes_a_dead_letter_with_the_reason() -> None:
    world = pair()
    poisoned(world, 3)
    (letter,) = letters(world, 1)
    assert letter.body == b"poison"
    assert letter.mail.why == "died: handed out 3 times"
    assert world.mail(1)[0].mail.about == [(b"k", 0, 1)]
    assert world.mail(1)[0].mail.why == letter.mail.why
    assert world.info(1)["waiting"] == 1, "the other of its batch waits on"
    assert world.events("request_dead")[0]["count"] == 1
    assert world.counter("requests_dead") == 1


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


def test_dead_letters_go_where_the_settings_say() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"dead_letters": "grave"}))
    world.offer(2)
    world.request(1, b"a")
    world.ack(2, [(0, 1)], WorkState.FAILED)
    assert [letter.body for letter in letters(world, 1, "grave")] == [b"a"]
    assert world.info(1)["dead_letters"] == "grave"


def test_a_voluntary_return_counts_too() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 2}))
    world.offer(2)
    world.request(1, b"a")
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    assert letters(world, 1)[0].mail.why == "returned: handed out 2 times"


def test_a_dead_letter_that_the_log_refuses_is_kept_and_tried_again() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 1}))
    world.offer(2)
    world.request(1, b"a")
    world.shell.refuse["main"] = ("full", "no room")
    world.drop(2)
    del world.shell.refuse["main"]
    world.shell.wait(1_100)
    world.shell.wait(1_100)
    assert [letter.body for letter in letters(world, 1)] == [b"a"]
    assert world.queued() == 0


def test_what_was_to_become_a_dead_letter_when_the_broker_died_becomes_one_after() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 1}))
    world.offer(2)
    world.request(1, b"a")
    shell, broker = world.shell, world.shell.broker
    broker.link_lost(2, shell.now_ms)
    shell._do(broker.take_ready())
    assert "RequestDead" not in logged(world)
    shell.restart()
    world.worker(3)
    world.offer(3)
    assert world.work(3) == []
    shell.wait(1_100)
    assert [letter.body for letter in letters(world, 3)] == [b"a"]


def test_the_pause_doubles_with_each_attempt_up_to_its_bound() -> None:
    world = pair()
    world.ask(1, wire.EditService(7, "s", {
        "attempts_max": 9, "backoff_ms": 100, "backoff_max_ms": 300,
    }))  # fmt: skip
    world.request(1, b"a")
    pauses = []
    for link in range(10, 15):
        world.worker(link)
        world.offer(link, credit=1, lease_ms=100)
        assert world.numbers(link) == [0]
        world.shell.wait(110)
        waited = 0
        while world.info(1)["delayed"]:
            world.shell.wait(10)
            waited += 10
        pauses.append(waited)
    assert [round(pause, -2) for pause in pauses] == [100, 200, 300, 300, 300]


@pytest.mark.parametrize("starts", [1, 2])
def test_a_pause_that_was_noted_while_the_clock_was_a_day_ahead_is_no_day_longer(
    starts: int,
) -> None:
    """Leases end at once when the clock leaps; the broker dies, and the clock is right again."""
    world, day_ms = pair(), 86_400_000
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 9, "backoff_ms": 2_000}))
    world.request(1, b"a")
    world.offer(2, credit=1, lease_ms=1_000)
    assert world.numbers(2) == [0]
    world.shell.wait(day_ms)
    world.shell.now_ms -= day_ms
    # Times in the log never fall: behind the first start they tell of no clock any more.
    for _ in range(starts):
        world.shell.restart()
    world.worker(10)
    world.offer(10, credit=1, lease_ms=1_000)
    assert world.numbers(10) == [], "the pause goes on"
    world.shell.wait(2_100)
    assert world.numbers(10) == [0]


# --- administration -------------------------------------------------------------------------------


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
        return action not in ("admin", "request", "work") or allowed["s"]

    world = pair(permit=permit)
    world.request(1, b"a", key=b"k")
    allowed["s"] = False
    peer = world.shell.send(1, command)
    assert peer.last(wire.Refused).code == "forbidden"


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


def logged(world: World) -> list[str]:
    """Names of the changes in the log, in order."""
    return [
        type(decode_change(body)).__name__
        for held in world.shell.rings["main"]
        if held.control_kind
        for body in control_bodies(held.data[96:])
    ]


def test_a_cancel_behind_the_first_request_of_a_new_service_finds_it() -> None:
    world = pair()
    content = encode([b"a"], subject="x")
    peer = world.shell.send(
        1, wire.Request("s", 801, key=b"k"), wire.CancelRequest(7, "s", b"k"), frames=[content]
    )
    assert peer.last(wire.Result).value == {"count": 1}


# --- in memory ------------------------------------------------------------------------------------


def in_memory(**settings: Any) -> World:
    world = pair(**settings)
    world.ask(1, wire.EditService(7, "s", {"memory": True, "attempts_max": 2, "backoff_ms": 10}))
    return world


def test_requests_in_memory_are_confirmed_as_none_and_never_logged() -> None:
    world = in_memory()
    batches = len(world.shell.rings["main"])
    world.offer(2)
    tracker = world.request(1, b"a", b"b", key=b"k")
    answer = world.confirmed(1, tracker)
    assert (answer.level, answer.offset) == (1, world.shell.epoch << 40)
    first = answer.offset
    world.reply(2, [first, first + 1])
    assert len(world.replies(1)) == 2
    assert len(world.shell.rings["main"]) == batches
    assert world.queued() == 0
    assert world.shell.broker.gauges["mail_memory_bytes"] > 0, "the replies wait for their ACK"


def test_requests_in_memory_are_gone_after_a_restart_and_their_service_is_not() -> None:
    world = in_memory()
    world.request(1, b"a")
    world.shell.restart()
    world.client(1)
    info = world.info(1)
    assert (info["waiting"], info["settings"]["memory"]) == (0, True)
    tracker = world.request(1, b"b")
    assert world.confirmed(1, tracker).offset == world.shell.epoch << 40


def test_a_level_that_memory_cannot_keep_is_refused() -> None:
    world = in_memory()
    assert world.refused(1, world.request(1, b"a", level=3)).code == "unsupported"
    assert world.queued() == 0


def test_the_life_of_a_request_in_memory_is_the_same() -> None:
    world = in_memory()
    world.offer(2, lease_ms=500)
    world.request(1, b"a", key=b"k", timeout_ms=60_000)
    world.shell.wait(510)
    world.shell.wait(50)
    assert [task.work.attempts for task in world.work(2)] == [1, 2]
    world.shell.wait(510)
    world.shell.wait(50)
    assert world.mail(1)[0].mail.why == "lease: handed out 2 times"
    assert [letter.body for letter in letters(world, 1)] == [b"a"]
    world.request(1, b"b", key=b"l", timeout_ms=100)
    world.shell.wait(110)
    assert world.mail(1)[-1].mail.why == "expired"
    world.request(1, b"c", key=b"m")
    assert world.ask(1, wire.CancelRequest(7, "s", b"m")) == {"count": 1}
    assert world.queued() == 0


def test_replies_of_a_service_in_memory_to_a_mailbox_in_the_log_are_logged() -> None:
    world = World()
    world.client(1, "req")
    world.worker(2, "ann")
    world.ask(1, wire.EditService(7, "s", {"memory": True}))
    world.offer(2)
    number = world.confirmed(1, world.request(1, b"a", key=b"k")).offset
    answer = world.confirmed(2, world.reply(2, [number], level=3))
    assert answer.level == 3
    assert world.replies(1) == [b"re: %d" % number]
    assert world.queued() == 0


# --- in steps -------------------------------------------------------------------------------------


def test_a_step_replies_audits_and_completes_together() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.shell.send(
        2,
        wire.Atomic(900, 3),
        wire.Publish("audit", 0),
        wire.Reply(1, [0], 0, False),
        wire.AckWork(1, [(0, 1)], WorkState.COMPLETED),
        frames=[encode([b"seen"], subject="x"), encode([b"yes"], subject="r")],
    )
    world.confirmed(2, 900)
    assert world.replies(1) == [b"yes", b""]
    assert world.queued() == 0


def test_a_step_that_is_refused_leaves_the_request_in_hand() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.shell.send(
        2,
        wire.Atomic(900, 2),
        wire.Reply(1, [0], 0, True),
        wire.AckWork(1, [(0, 1)], WorkState.COMPLETED),
        frames=[encode([b"yes"], subject="r")],
    )
    assert world.refused(2, 900).code == "not_held"
    assert world.replies(1) == []
    assert world.info(1)["held"] == 1
    world.confirmed(2, world.reply(2, [0]))
    assert world.replies(1) == [b"re: 0"]


def test_a_request_in_a_step_is_handed_out_when_the_step_is_in_the_log() -> None:
    world = pair()
    world.offer(2)
    world.shell.send(
        1,
        wire.Atomic(900, 2),
        wire.Request("s", 0, key=b"k"),
        wire.Request("s", 0, key=b"l"),
        frames=[encode([b"a"], subject="x"), encode([b"b"], subject="x")],
    )
    world.confirmed(1, 900)
    assert [task.body for task in world.work(2)] == [b"a", b"b"]


# --- the requester ------------------------------------------------------------------------------


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
