"""Attempts of a group's records, and the dead letters that they become."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.stamp import rows_from_bitmap
from malamute_py.broker.mail import puts
from tests.broker.group_world import (
    MUCH,
    M,
    ack,
    attempts,
    bounded,
    events,
    got,
    info,
    join,
    lose,
    nack,
    publish,
    world,
)  # fmt: skip
from tests.broker.shell import Letter, Shell

INBOX = 7
READERS = itertools.count(100)


def letters(shell: Shell, mailbox: str = "s.g.dead") -> list[Letter]:
    """Read a mailbox, and leave it as it was."""
    link = next(READERS)
    shell.hello(link)
    peer = shell.send(link, wire.OpenInbox(INBOX, mailbox, MUCH, MUCH))
    found = list(peer.mail.get(INBOX, []))
    shell.send(link, wire.Bye())
    return found


@pytest.mark.parametrize("kind", ["shared", "exclusive", "keyed"])
def test_a_record_that_is_given_back_too_often_becomes_a_dead_letter(kind: str) -> None:
    shell = world()
    bounded(shell, 2, kind)
    publish(shell, 4, subject=["a", "b", "a", "c"])
    assert isinstance(nack(shell, 2, (1, 2)), wire.Confirm)
    assert attempts(shell, 2)[-1] == (1, 2)
    nack(shell, 2, (1, 2))
    assert got(shell, 2).count(1) == 2
    ack(shell, 2, (0, 1), (2, 4))
    assert info(shell)["next"] == info(shell)["logged"] == 4
    (letter,) = letters(shell)
    assert letter.body == b"1"
    assert letter.mail.origin == ("s", "g", 2, [1])
    assert (letter.mail.why, letter.mail.sender) == ("returned", "")
    (event,) = events(shell, "record_dead")
    assert event["offset"] == 1
    assert event["mailbox"] == "s.g.dead"
    assert shell.broker.counters["group_records_dead"] == 1
    assert shell.broker.counters["dead_letters"] == 1


def test_attempts_survive_a_restart() -> None:
    shell = world()
    bounded(shell, 2, most=3)
    publish(shell, 3)
    nack(shell, 2, (1, 2))
    shell.restart()
    shell.hello(1)
    join(shell, 3)
    assert attempts(shell, 3) == [(0, 1), (1, 2), (2, 1)]
    lose(shell, 3)
    shell.restart()
    shell.hello(1)
    join(shell, 4)
    assert attempts(shell, 4) == [(0, 2), (1, 3), (2, 2)]
    assert info(shell)["attempts"] == [[1, 2], [2, 1]]
    nack(shell, 4, (1, 2))
    assert [letter.mail.origin for letter in letters(shell)] == [("s", "g", 3, [1])]
    shell.restart()
    shell.hello(1)
    join(shell, 5)
    assert got(shell, 5) == [0, 2]
    assert [letter.mail.origin for letter in letters(shell)] == [("s", "g", 3, [1])]


def test_a_lost_link_is_an_attempt_and_an_orderly_end_is_none() -> None:
    shell = world()
    bounded(shell, 2)
    publish(shell, 3)
    shell.send(2, wire.Unsubscribe(M))
    bounded(shell, 3)
    assert attempts(shell, 3) == [(0, 1), (1, 1), (2, 1)]
    shell.send(3, wire.Bye())
    bounded(shell, 4)
    assert attempts(shell, 4) == [(0, 1), (1, 1), (2, 1)]
    lose(shell, 4)
    bounded(shell, 5)
    assert attempts(shell, 5) == [(0, 2), (1, 2), (2, 2)]
    assert info(shell)["attempts"] == [[1, 3]]


def test_records_of_a_lost_link_become_dead_letters_though_no_member_is_left() -> None:
    shell = world()
    bounded(shell, 2, most=1)
    publish(shell, 3)
    ack(shell, 2, (0, 1))
    lose(shell, 2)
    assert info(shell)["next"] == 3
    found = letters(shell)
    assert [letter.body for letter in found] == [b"1", b"2"]
    assert {letter.mail.why for letter in found} == {"died"}
    assert found[0].mail.origin == ("s", "g", 1, [1, 2])


def test_dead_letters_are_made_of_records_that_are_read_back_from_the_journal() -> None:
    shell = world()
    bounded(shell, 2, most=1)
    for _ in range(4):
        publish(shell, 3)
    shell.evict()
    lose(shell, 2)
    assert [letter.body for letter in letters(shell)] == [b"0", b"1", b"2"] * 4


def test_released_records_count_no_attempt() -> None:
    shell = world()
    bounded(shell, 2, most=1)
    publish(shell, 2)
    assert isinstance(ack(shell, 2, (0, 1), state=6), wire.Confirm)
    assert attempts(shell, 2) == [(0, 1), (1, 1), (0, 1)]
    assert not info(shell)["attempts"]


def test_a_member_gives_a_record_up_at_once_with_its_reason() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 2)
    assert isinstance(ack(shell, 2, (1, 2), state=4, reason="no such flight"), wire.Confirm)
    (letter,) = letters(shell)
    assert letter.mail.why == "failed: no such flight"
    assert letter.mail.origin == ("s", "g", 1, [1])
    assert got(shell, 2) == [0, 1]


def test_a_group_without_a_bound_counts_nothing_and_logs_nothing() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 3)
    before = len(shell.rings["main"])
    nack(shell, 2, (0, 3))
    lose(shell, 2)
    join(shell, 3)
    assert attempts(shell, 3) == [(0, 1), (1, 1), (2, 1)]
    assert not info(shell)["attempts"]
    assert len(shell.rings["main"]) == before


def test_an_exclusive_group_keeps_its_order_when_attempts_differ() -> None:
    shell = world()
    bounded(shell, 2, "exclusive", most=9)
    publish(shell, 5)
    nack(shell, 2, (1, 2))
    nack(shell, 2, (3, 4))
    lose(shell, 2)
    shell.wait(20_000)
    join(shell, 3, "exclusive")
    assert attempts(shell, 3) == [(0, 2), (1, 3), (2, 2), (3, 3), (4, 2)]


def test_a_delayed_record_counts_its_attempt_and_waits() -> None:
    shell = world()
    bounded(shell, 2, most=3)
    publish(shell, 1)
    nack(shell, 2, (0, 1), again_ms=500)
    assert attempts(shell, 2) == [(0, 1)]
    shell.wait(600)
    assert attempts(shell, 2) == [(0, 1), (0, 2)]


def test_an_attempt_that_the_log_refuses_is_tried_again_and_a_nack_is_refused() -> None:
    shell = world()
    bounded(shell, 2)
    publish(shell, 2)
    shell.refuse["main"] = ("disk_full", "no space")
    assert nack(shell, 2, (0, 1)) == "disk_full"
    lose(shell, 2)
    bounded(shell, 3)
    assert got(shell, 3) == []
    shell.refuse.clear()
    shell.wait(1_100)
    assert attempts(shell, 3) == [(0, 2), (1, 2)]


def test_a_full_mailbox_lets_the_record_wait_and_no_member_gets_it() -> None:
    shell = world()
    shell.send(1, wire.EditMailbox(4, "morgue", {"max_messages": 1}))
    bounded(shell, 2, most=1, settings={"dead_letters": "morgue"})
    publish(shell, 3)
    nack(shell, 2, (0, 1))
    nack(shell, 2, (1, 2))
    shell.wait(5_000)
    assert got(shell, 2) == [0, 1, 2]
    (told,) = events(shell, "dead_letter_refused")
    assert told["code"] == "wait"
    assert info(shell)["late"] == 1
    shell.send(1, wire.EditMailbox(4, "morgue", {"max_messages": 5}))
    shell.wait(1_100)
    assert [letter.body for letter in letters(shell, "morgue")] == [b"0", b"1"]
    assert info(shell)["late"] == 0


def test_a_mailbox_in_memory_takes_no_dead_letters_and_the_default_one_does() -> None:
    shell = world()
    shell.send(1, wire.EditMailbox(4, "morgue", {"memory": True}))
    bounded(shell, 2, most=1, settings={"dead_letters": "morgue"})
    publish(shell, 1)
    nack(shell, 2, (0, 1))
    assert [letter.body for letter in letters(shell)] == [b"0"]
    assert events(shell, "record_dead")[0]["mailbox"] == "s.g.dead"


def test_a_mailbox_that_takes_some_of_the_records_takes_those_and_the_others_wait() -> None:
    """All went into the default mailbox, and `dead` did not count one of them."""
    shell = world()
    shell.send(1, wire.EditMailbox(4, "morgue", {"max_messages": 3}))
    bounded(shell, 2, most=1, settings={"dead_letters": "morgue"})
    publish(shell, 6)
    nack(shell, 2, (0, 6))
    assert [letter.body for letter in letters(shell, "morgue")] == [b"0", b"1", b"2"]
    assert (info(shell)["dead"], info(shell)["late"]) == (3, 3)
    assert not letters(shell)
    shell.send(1, wire.EditMailbox(4, "morgue", {"max_messages": 0}))
    shell.wait(3_000)
    assert info(shell)["dead"] == info(shell)["next"] == 6


def test_dead_letters_in_the_default_mailbox_count_although_the_settings_name_another() -> None:
    shell = world()
    shell.send(1, wire.EditMailbox(4, "morgue", {"max_bytes": 1}))
    bounded(shell, 2, most=1, settings={"dead_letters": "morgue"})
    publish(shell, 2)
    nack(shell, 2, (0, 2))
    assert [letter.body for letter in letters(shell)] == [b"0", b"1"]
    assert info(shell)["dead"] == 2


def test_a_step_that_the_log_refuses_leaves_the_record_in_its_group() -> None:
    shell = world()
    shell.send(1, wire.EditMailbox(4, "s.g.dead", {"max_messages": 1}))
    bounded(shell, 2, most=1)
    publish(shell, 2)
    nack(shell, 2, (0, 2))
    assert info(shell)["late"] == 1
    shell.send(1, wire.EditMailbox(4, "s.g.dead", {"max_messages": 0}))
    shell.refuse["main"] = ("disk_full", "no space")
    shell.wait(3_000)
    assert info(shell)["late"] == 1
    shell.refuse.clear()
    shell.wait(3_000)
    assert [letter.body for letter in letters(shell)] == [b"0", b"1"]
    assert info(shell)["next"] == 2
    assert events(shell, "dead_letter_refused")[0]["code"] == "wait"


def test_a_compressed_batch_leaves_a_dead_letter_of_its_row_alone() -> None:
    shell = world()
    bounded(shell, 2, most=1)
    shell.publish(1, "s", [b"%d" % n for n in range(20)], codec=1)
    nack(shell, 2, (7, 8))
    (letter,) = letters(shell)
    assert letter.body == b"7"
    assert letter.mail.origin == ("s", "g", 1, [7])
    assert rows_from_bitmap(letter.mail.rows, 20).nonzero()[0].tolist() == [7]
    shell.restart()
    assert [letter.body for letter in letters(shell)] == [b"7"]


def test_records_of_a_stream_in_memory_become_dead_letters_in_the_log() -> None:
    shell = world()
    shell.send(1, wire.CreateStream(1, "s", {"memory": True}))
    bounded(shell, 2, most=1)
    publish(shell, 2)
    nack(shell, 2, (0, 1))
    assert info(shell)["held"] == 1
    assert [letter.body for letter in letters(shell)] == [b"0"]


def test_headers_and_times_go_with_a_dead_letter_and_its_expiry_does_not() -> None:
    shell = world()
    bounded(shell, 2, most=1)
    shell.publish(
        1, "s", [b"0", b"1"], subject=["a.b", "c"], fields=[{"x": "1"}, {}],
        client_time_ms=[5, 6], expires_at_ms=[shell.now_ms + 1_000, shell.now_ms + 2_000],
    )  # fmt: skip
    nack(shell, 2, (0, 1))
    shell.wait(3_000)
    value = shell.send(1, wire.PeekMail(3, "s.g.dead", body_bytes=9)).last(wire.Result).value
    (seen,) = value["messages"]
    assert (seen["subject"], seen["fields"], seen["body"]) == ("a.b", {"x": "1"}, b"0")
    assert seen["origin"] == {"stream": "s", "group": "g", "epoch": 1, "offset": 0, "attempts": 1}
    assert not seen["expires_at_ms"]


def test_settings_can_be_changed_and_take_effect_at_once() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 2)
    value = shell.send(1, wire.EditGroup(3, "s", "g", {"attempts_max": 5})).last(wire.Result).value
    assert value["settings"]["attempts_max"] == 5
    for _ in range(3):
        nack(shell, 2, (0, 1), again_ms=0)
    nack(shell, 2, (0, 1), again_ms=10_000)
    shell.send(1, wire.EditGroup(3, "s", "g", {"attempts_max": 4}))
    shell.wait(10_000)
    assert [letter.mail.origin for letter in letters(shell)] == [("s", "g", 4, [0])]
    shell.restart()
    shell.hello(1)
    assert info(shell)["settings"]["attempts_max"] == 4


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"attempts_max": -1}, "bad_setting"),
        ({"attempts": 1}, "bad_setting"),
        ({"dead_letters": "~x"}, "bad_setting"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], code: str) -> None:
    shell = world()
    peer = join(shell, 2, settings=settings)
    assert peer.last(wire.Refused).code == code
    join(shell, 3)
    assert shell.send(1, wire.EditGroup(3, "s", "g", settings)).last(wire.Refused).code == code


def test_a_mailbox_that_the_client_may_not_send_to_is_refused() -> None:
    def permit(owner: str, action: str, name: str) -> bool:
        return action not in without

    without = {"send", "dead_letters"}
    shell = world(permit=permit)
    peer = bounded(shell, 2, settings={"dead_letters": "boss"})
    assert peer.last(wire.Refused).code == "forbidden"
    bounded(shell, 3)
    refused = shell.send(1, wire.EditGroup(3, "s", "g", {"dead_letters": "boss"}))
    assert refused.last(wire.Refused).code == "forbidden"
    without = {"send"}
    shell = world(permit=permit)
    peer = bounded(shell, 2, settings={"dead_letters": "boss"})
    assert peer.of(wire.Subscribed), "who manages the mailbox may name it"


def test_unknown_groups_and_streams_cannot_be_edited() -> None:
    shell = world()
    join(shell, 2)
    for stream, group, code in (("t", "g", "unknown_stream"), ("s", "h", "unknown_group")):
        peer = shell.send(1, wire.EditGroup(3, stream, group, {}))
        assert peer.last(wire.Refused).code == code


def test_attempts_are_not_passed_on_to_records_that_take_lost_offsets() -> None:
    shell = world(sync=False)
    shell.send(1, wire.CreateStream(1, "s", {"ring_bytes": 1 << 20}))
    shell.sync()
    shell.run()
    bounded(shell, 2, most=9, visibility=0)
    shell.sync()
    shell.run()
    publish(shell, 2)
    nack(shell, 2, (0, 2), tracker=0)
    shell.synced_to["main"] = shell.rings["main"][-1].end_lsn
    shell.restart(power_loss=True)
    shell.hello(1)
    publish(shell, 2)
    join(shell, 3, visibility=0)
    assert attempts(shell, 3) == [(0, 1), (1, 1)]


# --- requeueing ------------------------------------------------------------------------------


def requeue(shell: Shell, *numbers: int) -> Any:
    """Return the count, or the code of REFUSED."""
    answer: Any = shell.send(1, wire.RequeueGroup(5, "s", "g", list(numbers))).commands[-1]
    return answer.code if isinstance(answer, wire.Refused) else answer.value["count"]


@pytest.mark.parametrize("kind", ["shared", "exclusive", "keyed"])
def test_a_requeued_record_comes_again_with_no_attempts(kind: str) -> None:
    shell = world()
    bounded(shell, 2, kind, most=1)
    publish(shell, 5, subject=["a", "b", "a", "c", "a"])
    nack(shell, 2, (1, 3))
    ack(shell, 2, (0, 1), (3, 5))
    publish(shell, 5_000, subject="a")
    ack(shell, 2, (5, 5_005), tracker=0)
    assert requeue(shell) == 2
    assert not letters(shell)
    assert attempts(shell, 2)[-2:] == [(1, 1), (2, 1)]
    assert info(shell)["next"] == 1
    ack(shell, 2, (1, 2))
    shell.restart()
    shell.hello(1)
    join(shell, 2, kind)
    assert got(shell, 2) == [2]
    ack(shell, 2, (2, 3))
    assert info(shell)["next"] == 5_005
    assert requeue(shell) == "unknown_request"


def test_some_dead_letters_are_requeued_by_their_numbers() -> None:
    shell = world()
    bounded(shell, 2, most=1)
    publish(shell, 3)
    nack(shell, 2, (0, 3))
    found = letters(shell)
    assert requeue(shell, found[1].number, 99_999) == 1
    assert got(shell, 2) == [0, 1, 2, 1]
    nack(shell, 2, (1, 2))
    assert [letter.body for letter in letters(shell)] == [b"0", b"2", b"1"]


def test_a_dead_letter_whose_record_is_gone_stays_where_it_is() -> None:
    shell = world()
    bounded(shell, 2, most=1)
    for _ in range(3):
        publish(shell, 1)
    nack(shell, 2, (0, 1))
    nack(shell, 2, (2, 3))
    stream = shell.stream("s")
    shell.firsts[stream.number] = 2
    shell.broker.trimmed("main", {stream.number: 2})
    shell.run()
    assert requeue(shell) == 1
    assert [letter.mail.origin for letter in letters(shell)] == [("s", "g", 1, [0])]
    assert requeue(shell) == "retention"


def buried(shell: Shell) -> list[list[int]]:
    """Return the offsets of each dead letter's record."""
    return [letter.mail.origin[3] for letter in letters(shell) if letter.mail.origin is not None]


def again(shell: Shell, how: str) -> None:
    """Let the broker go on, or restart it, with a member."""
    if how != "on":
        shell.restart(power_loss=how == "power loss")
        shell.hello(1)
        bounded(shell, 2, most=1)


@pytest.mark.parametrize("how", ["on", "kill", "power loss"])
@pytest.mark.parametrize("options", [{}, {"codec": "zstd"}])
def test_a_dead_letter_whose_record_was_purged_by_subject_stays_where_it_is(
    how: str, options: dict[str, Any]
) -> None:
    shell = world()
    bounded(shell, 2, most=1)
    publish(shell, 3, subject=["a", "b", "a"], level=2, **options)
    publish(shell, 2, subject=["b", "c"], level=2, **options)
    nack(shell, 2, (0, 5))
    purge = wire.PurgeSubjects("s", ["topic", "b"], 4, 9, level=2)
    assert isinstance(shell.send(1, purge).commands[-1], wire.Confirm)
    again(shell, how)
    answer = shell.send(1, wire.RequeueGroup(5, "s", "g", [])).last(wire.Result)
    assert answer.value == {"count": 3, "gone": 2}
    assert got(shell, 2)[-3:] == [0, 2, 4]
    assert buried(shell) == [[1], [3]]
    assert requeue(shell) == "retention"
    again(shell, how)
    assert len(letters(shell)) == 2


def test_a_dead_letter_that_is_read_while_it_is_looked_at_is_not_taken_from_its_reader() -> None:
    shell = world()
    bounded(shell, 2, most=1)
    publish(shell, 2, subject=["a", "b"], level=2)
    nack(shell, 2, (0, 2))
    shell.send(1, wire.PurgeSubjects("s", ["topic", "b"], 2, 9, level=2))
    again(shell, "kill")
    shell.hello(3)
    shell.broker.receive(1, "", [wire.RequeueGroup(5, "s", "g", [])], [], shell.now_ms)
    shell.broker.receive(3, "", [wire.OpenInbox(INBOX, "s.g.dead", MUCH, MUCH)], [], shell.now_ms)
    shell.run()
    assert len(shell.peers[3].mail[INBOX]) == 2
    assert shell.peers[1].last(wire.Refused).code == "retention"
    assert got(shell, 2) == []


@pytest.mark.parametrize("how", ["on", "kill"])
def test_a_dead_letter_whose_record_is_past_its_age_stays_where_it_is(how: str) -> None:
    shell = world()
    shell.send(1, wire.CreateStream(3, "s", {"max_age_ms": 10_000}))
    bounded(shell, 2, most=1)
    publish(shell, 1, level=2)
    nack(shell, 2, (0, 1))
    shell.wait(9_000)
    publish(shell, 1, level=2)
    nack(shell, 2, (1, 2))
    shell.evict()
    shell.wait(1_001)
    again(shell, how)
    answer = shell.send(1, wire.RequeueGroup(5, "s", "g", [])).last(wire.Result)
    assert answer.value == {"count": 1, "gone": 1}
    assert got(shell, 2)[-1] == 1
    assert buried(shell) == [[0]]


@pytest.mark.parametrize("how", ["on", "kill"])
def test_a_dead_letter_whose_record_has_expired_stays_where_it_is(how: str) -> None:
    shell = world()
    bounded(shell, 2, most=1)
    publish(shell, 3, level=2, expires_at_ms=[0, shell.now_ms + 50, shell.now_ms + 5_000])
    nack(shell, 2, (0, 3))
    shell.wait(50)
    again(shell, how)
    answer = shell.send(1, wire.RequeueGroup(5, "s", "g", [])).last(wire.Result)
    assert answer.value == {"count": 2, "gone": 1}
    assert got(shell, 2)[-2:] == [0, 2]
    assert buried(shell) == [[1]]


def test_a_dead_letter_whose_record_a_power_loss_took_back_stays_where_it_is() -> None:
    shell = world()
    shell.send(1, wire.CreateStream(3, "s", {"ring_bytes": 1 << 22}))
    bounded(shell, 2, most=1)
    publish(shell, 1)
    nack(shell, 2, (0, 1))
    ring = shell.stream("s").ring.name
    shell.synced_to["main"], shell.synced_to[ring] = shell.ends["main"], 0
    shell.restart(power_loss=True)
    shell.hello(1)
    publish(shell, 1)
    bounded(shell, 3, most=1)
    assert requeue(shell) == "retention"
    assert [letter.body for letter in letters(shell)] == [b"0"]


def test_dead_letters_after_many_whose_records_are_gone_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(puts, "REVIVED_MAX", 2)
    shell = world()
    bounded(shell, 2, most=1)
    for offset in range(6):
        publish(shell, 1)
        nack(shell, 2, (offset, offset + 1))
    stream = shell.stream("s")
    shell.firsts[stream.number] = 5
    shell.broker.trimmed("main", {stream.number: 5})
    shell.run()
    assert requeue(shell) == 1
    assert [letter.mail.origin for letter in letters(shell)] == [
        ("s", "g", 1, [offset]) for offset in range(5)
    ]
    assert requeue(shell) == "retention"


def test_a_requeue_looks_at_one_portion_a_turn_where_nothing_is_to_be_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(puts, "REVIVED_MAX", 1)
    shell = world()
    bounded(shell, 2, most=1)
    for offset in range(6):
        publish(shell, 1)
        nack(shell, 2, (offset, offset + 1))
    shell.hello(3)
    shell.send(3, wire.OpenInbox(INBOX, "s.g.dead", 6, MUCH))
    looked: list[int] = []
    next_letters = puts.Puts.next_letters

    def look(self: Any, *arguments: Any) -> Any:
        looked.append(0)
        return next_letters(self, *arguments)

    monkeypatch.setattr(puts.Puts, "next_letters", look)
    broker = shell.broker
    broker.receive(1, "", [wire.RequeueGroup(5, "s", "g", [])], [], shell.now_ms)
    assert len(looked) == 1
    broker.tick(shell.now_ms)
    assert len(looked) == 2
    shell.run()
    assert len(looked) == 7
    assert shell.peers[1].last(wire.Refused).code == "unknown_request"


def test_a_requeue_tells_of_records_that_are_gone_although_the_default_mailbox_has_none() -> None:
    shell = world()
    bounded(shell, 2, most=1, settings={"dead_letters": "morgue"})
    publish(shell, 2)
    nack(shell, 2, (0, 2))
    stream = shell.stream("s")
    shell.firsts[stream.number] = 2
    shell.broker.trimmed("main", {stream.number: 2})
    shell.run()
    shell.send(1, wire.Send("s.g.dead", 4), frames=[encode([b"no letter"])])
    assert requeue(shell) == "retention"


def test_dead_letters_of_another_stream_of_the_name_do_not_come_again() -> None:
    shell = world()
    bounded(shell, 2, most=1)
    publish(shell, 1)
    nack(shell, 2, (0, 1))
    shell.send(1, wire.RemoveStream(1, "s"))
    publish(shell, 1)
    bounded(shell, 3, most=1)
    assert requeue(shell) == "unknown_request"
    assert len(letters(shell)) == 1


def test_a_requeue_that_the_log_refuses_changes_nothing() -> None:
    shell = world()
    bounded(shell, 2, most=1)
    publish(shell, 2)
    nack(shell, 2, (0, 1))
    shell.refuse["main"] = ("disk_full", "no space")
    assert requeue(shell) == "disk_full"
    shell.refuse.clear()
    assert len(letters(shell)) == 1
    assert got(shell, 2) == [0, 1]
    assert requeue(shell) == 1


def test_a_requeued_record_that_a_member_has_after_a_reset_does_not_come_twice() -> None:
    shell = world()
    bounded(shell, 2, most=1)
    publish(shell, 3)
    nack(shell, 2, (1, 2))
    ack(shell, 2, (0, 1), (2, 3))
    shell.send(1, wire.ResetGroup(3, "s", "g", [2, 0], True))
    bounded(shell, 3, most=1)
    assert requeue(shell) == 1
    assert got(shell, 3) == [0, 1, 2]
    facts = info(shell)
    assert (facts["waiting"], facts["held"], facts["done"]) == (0, 3, 0)
    ack(shell, 3, (0, 3))
    facts = info(shell)
    assert (facts["next"], facts["waiting"], facts["held"]) == (3, 0, 0)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (wire.ResetGroup(3, "s", "g", [2, 0], True), "in_use"),
        (wire.RemoveGroup(3, "s", "g"), "unknown_group"),
    ],
)
def test_a_requeue_during_which_the_group_is_reset_or_removed_says_which(
    monkeypatch: pytest.MonkeyPatch, command: wire.Command, code: str
) -> None:
    monkeypatch.setattr(puts, "REVIVED_MAX", 1)
    shell = world()
    bounded(shell, 2, most=1)
    publish(shell, 2)
    nack(shell, 2, (0, 1))
    nack(shell, 2, (1, 2))
    shell.send(2, wire.Unsubscribe(M))
    shell.broker.receive(1, "", [wire.RequeueGroup(5, "s", "g", []), command], [], shell.now_ms)
    shell.run()
    refused = shell.peers[1].last(wire.Refused)
    assert (refused.reference, refused.code) == (5, code)
    assert len(letters(shell)) == 1


def test_only_those_who_administer_the_stream_may_requeue() -> None:
    shell = world(permit=lambda owner, action, name: action != "manage_streams")
    join(shell, 2)
    assert requeue(shell) == "forbidden"
    for command in (wire.RequeueGroup(5, "s", "g", []), wire.EditGroup(6, "s", "g", {})):
        refused = shell.send(1, command).last(wire.Refused)
        assert refused.reason == "you may not manage groups of 's'"


@pytest.mark.parametrize("level", [wire.Level.STORED, wire.Level.SYNCED])
def test_a_holder_that_joined_again_gives_back_what_waits_at_any_level_of_confirm(
    level: wire.Level,
) -> None:
    """REFUSED had `unsupported` here, as if the group were in memory."""
    shell = world()
    bounded(shell, 2, "exclusive")
    publish(shell, 3)
    shell.send(
        2,
        wire.Unsubscribe(M),
        wire.JoinGroup(M, "s", "g", ["all"], "exclusive", [], 0, MUCH),
        wire.AckRecords(M, [(0, 2)], 4, level, again_ms=0),
        wire.Credit(M, 10, MUCH),
    )
    assert not shell.peers[2].of(wire.Refused)
    assert shell.peers[2].last(wire.Confirm).level == level
    assert attempts(shell, 2)[-3:] == [(0, 1), (1, 1), (2, 1)]
