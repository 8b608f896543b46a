"""Quotas: what one identity may have, what is left to others, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import msgspec
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.broker.context import QUESTIONS_AT_ONCE
from malamute_py.broker.limits import Namespace, Quota
from malamute_py.broker.quotas import LINE_MS, Bucket, Quotas
from malamute_py.broker.ready import IndexAnswer
from tests.broker.post import Post

ALL = ["all"]


def post(quota: Quota, **settings: Any) -> Post:
    """A broker where anna (1) has a quota; bert (2) and carla (3) have none."""
    return Post(quota=lambda name: quota if name == "anna" else Quota(), **settings)


def refused(box: Post, link: int) -> list[wire.Refused]:
    return box.peers[link].of(wire.Refused)


def stream(at: int, **settings: Any) -> wire.Command:
    return wire.CreateStream(1_000 + at, f"s{at}", settings)


MAKES: dict[str, Callable[[int], tuple[list[wire.Command], list[Any]]]] = {
    "streams": lambda at: ([stream(at)], []),
    "rings": lambda at: ([stream(at, ring_bytes=1 << 20)], []),
    "mailboxes": lambda at: ([wire.Send(f"m{at}", at)], [encode([b"x"])]),
    "services": lambda at: ([wire.Request(f"v{at}", at)], [encode([b"x"], subject="s")]),
    "cursors": lambda at: ([wire.MoveCursor("shared", f"c{at}", 1, at)], []),
    "groups": lambda at: ([wire.JoinGroup(at, "shared", f"g{at}", ALL)], []),
    "subscriptions": lambda at: ([wire.Subscribe(at, "shared", ALL, [0])], []),
    "offers": lambda at: ([wire.Offer(at, "shared", ALL)], []),
    "transactions": lambda at: ([wire.BeginTransaction(b"%d" % at, at)], []),
}
"""Resource -> commands and frames that make one more of it; at: a number of its own."""


@pytest.mark.parametrize("resource", MAKES)
def test_a_quota_that_is_reached_is_refused_by_name_and_leaves_the_rest_to_others(
    resource: str,
) -> None:
    box = post(Quota(**{resource: 3}))
    box.publish(3, "shared", [b"a", b"b"])
    for link in (1, 2):
        for at in range(10, 18):
            commands, frames = MAKES[resource](100 * link + at)
            box.send(link, *commands, frames=frames)
    answers = refused(box, 1)
    assert [answer.code for answer in answers] == ["limit"] * 5
    assert f"quotas.{resource} is 3" in answers[0].reason
    assert "'anna' has 3" in answers[0].reason
    assert not refused(box, 2), "bert has no quota, and takes nothing of anna's"
    assert box.broker.counters[f"quota_{resource}"] == 5
    said = [event.facts for event in box.events if event.name == "quota_reached"]
    assert said == [{"identity": "anna", "resource": resource, "bound": 3}]


def test_a_mailbox_that_a_refused_send_would_have_made_counts_for_no_other_user() -> None:
    box = post(Quota(mailboxes=1), mailbox_messages_max=1)
    run, box.run = box.run, lambda: None  # type: ignore[method-assign]
    box.send(2, wire.Send("other", 1), frames=[encode([b"x", b"y"])])
    box.run = run  # type: ignore[method-assign]
    box.send(1, wire.Send("own", 1), frames=[encode([b"x"])])
    assert [answer.code for answer in refused(box, 2)] == ["limit"]
    assert not refused(box, 1)


@pytest.mark.parametrize(
    "resource", ["streams", "rings", "mailboxes", "services", "cursors", "transactions"]
)
def test_what_outlives_a_link_counts_for_its_creator_after_a_restart(resource: str) -> None:
    box = post(Quota(**{resource: 3}))
    box.publish(3, "shared", [b"a", b"b"])
    for at in range(3):
        commands, frames = MAKES[resource](10 + at)
        box.send(1, *commands, frames=frames)
    assert not refused(box, 1)
    box.restart()
    commands, frames = MAKES[resource](20)
    box.send(1, *commands, frames=frames)
    assert [answer.code for answer in refused(box, 1)] == ["limit"]


REMOVES: dict[str, Callable[[int], wire.Command]] = {
    "streams": lambda at: wire.RemoveStream(at, f"s{at}"),
    "rings": lambda at: wire.RemoveStream(at, f"s{at}"),
    "mailboxes": lambda at: wire.RemoveMailbox(at, f"m{at}", f"m{at}"),
    "services": lambda at: wire.RemoveService(at, f"v{at}", f"v{at}"),
    "cursors": lambda at: wire.RemoveCursor(at, "shared", f"c{at}"),
    "groups": lambda at: wire.RemoveGroup(at, "shared", f"g{at}"),
    "subscriptions": wire.Unsubscribe,
    "offers": wire.Unsubscribe,
    "transactions": lambda at: wire.RollBackTransaction(b"%d" % at, at),
}


@pytest.mark.parametrize("resource", MAKES)
def test_what_was_given_back_can_be_had_again(resource: str) -> None:
    box = post(Quota(**{resource: 2}))
    box.publish(3, "shared", [b"a", b"b"])
    for at in range(10, 40):
        commands, frames = MAKES[resource](at)
        box.send(1, *commands, frames=frames)
        if resource == "groups":
            box.send(1, wire.Unsubscribe(at))
        box.send(1, REMOVES[resource](at))
        box.run()
    assert not [r for r in refused(box, 1) if r.code == "limit"]
    assert not box.broker._shard.quotas.of("anna").held[resource]


@pytest.mark.parametrize("resource", ["subscriptions", "groups", "offers"])
def test_patterns_of_all_receivers_count_on_one_quota(resource: str) -> None:
    size = len(msgspec.msgpack.encode(ALL))
    box = post(Quota(pattern_bytes=3 * size + 1))
    box.publish(3, "shared", [b"a"])
    for at in range(10, 14):
        commands, _ = MAKES[resource](at)
        box.send(1, *commands)
    (answer,) = refused(box, 1)
    assert (answer.code, answer.reference) == ("limit", 13)
    assert f"quotas.pattern_bytes is {3 * size + 1}" in answer.reason
    assert box.broker._shard.quotas.of("anna").held["pattern_bytes"] == 3 * size
    box.send(1, wire.Unsubscribe(10), *commands)
    assert len(refused(box, 1)) == 1


def test_what_ends_with_a_link_is_given_back_with_it() -> None:
    box = post(Quota(subscriptions=3, offers=2, pattern_bytes=1_000, links=1))
    box.publish(3, "shared", [b"a"])
    for _ in range(5):
        for at, resource in enumerate(("subscriptions", "offers", "groups"), 10):
            commands, frames = MAKES[resource](at)
            box.send(1, *commands, frames=frames)
        box.send(1, wire.OpenInbox(20, ""))
        assert not refused(box, 1)
        held = box.broker._shard.quotas.of("anna").held
        assert (held["subscriptions"], held["offers"], held["links"]) == (3, 1, 1)
        box.broker.link_lost(1, box.now_ms)
        box.run()
        assert (held["subscriptions"], held["offers"], held["links"]) == (0, 0, 0)
        assert held["pattern_bytes"] == 0
        box.peers.pop(1)
        box.hello(1, identity="anna")


def test_links_of_one_identity_are_bounded_and_the_newest_session_still_takes_its_name() -> None:
    box = post(Quota(links=1))
    box.hello(9, identity="anna", session=b"9" * 16)
    assert box.peers[9].of(wire.Welcome), "it takes the place of the one that is counted"
    box.broker.receive(10, "anna", [wire.Hello((1, 1), b"a" * 16)], [], box.now_ms)
    box.run()
    assert box.peers[10].last(wire.Refused).code == "limit"


def test_bytes_in_mailboxes_wait_until_somebody_acknowledges_them() -> None:
    box = post(Quota(mail_bytes=2_500))
    box.inbox(2)
    for _ in range(3):
        box.mail(1, "bert", [b"x" * 700])
    answer = box.mail(1, "bert", [b"x" * 700])
    assert (answer.code, answer.retry_ms) == ("wait", 100)
    assert box.mail(3, "bert", [b"x" * 700]).offset >= 0
    first = box.peers[2].mail[7][0].number
    box.ack(2, (first, first + 1))
    assert isinstance(box.mail(1, "bert", [b"x" * 700]), wire.Confirm)
    assert box.mail(1, "bert", [b"x" * 5_000]).code == "limit"
    box.restart()
    assert box.mail(1, "bert", [b"x" * 700]).code == "wait", "the log says whose they are"


@pytest.mark.parametrize("memory", [False, True])
def test_bytes_of_requests_wait_until_a_worker_has_done_them(memory: bool) -> None:
    resource = "request_memory_bytes" if memory else "request_bytes"
    box = post(Quota(**{resource: 3_000}))
    box.send(3, wire.Offer(1, "v", ["topic", "never"], settings={"memory": memory}))
    held = box.broker._shard.quotas.of("anna").held

    def ask(link: int, tracker: int, size: int = 700) -> Any:
        frame = encode([b"x" * size], subject="s")
        box.send(link, wire.Request("v", tracker), frames=[frame])
        return box.answer(link, tracker)

    for tracker in range(1, 4):
        assert isinstance(ask(1, tracker), wire.Confirm)
    answer = ask(1, 4)
    assert (answer.code, answer.retry_ms) == ("wait", 100)
    assert f"quotas.{resource} is 3000" in answer.reason
    assert ask(1, 5, 5_000).code == "limit", "more than all of it, which never passes"
    assert isinstance(ask(2, 6), wire.Confirm), "the quota is anna's"
    full = held[resource]
    assert box.broker.counters[f"quota_{resource}"] == 2
    if not memory:
        box.restart()
        held = box.broker._shard.quotas.of("anna").held
        assert held[resource] == full, "the log says whose they are"
        assert ask(1, 7).code == "wait"
    worker = box.send(3, wire.Offer(2, "v", ALL, 1, 1 << 20))
    assert ask(1, 8).code == "wait", "what is in hand counts as well"
    first = worker.work[2][0].number
    box.send(3, wire.AckWork(2, [(first, first + 1)], 3, 9, 1))
    assert isinstance(ask(1, 10), wire.Confirm)
    assert held[resource] == full


def test_a_refused_request_gives_its_bytes_back() -> None:
    box = post(Quota(request_bytes=2_500))
    held = box.broker._shard.quotas.of("anna").held
    box.refuse["main"] = ("full", "no room")
    box.send(1, wire.Request("v", 1), frames=[encode([b"x" * 700], subject="s")])
    assert held["request_bytes"] == 0


TRACKERS = count(5_000)


def ask(box: Post, requester: int, reply_to: str = "", service: str = "web") -> Any:
    """Anna (1), who offers, answers one request; the answer to her REPLY."""
    tracker = next(TRACKERS)
    question = encode([b"q"], subject="s")
    box.send(requester, wire.Request(service, 1, reply_to, key=b"%d" % tracker), frames=[question])
    number = box.peers[1].work[9][-1].number
    reply = wire.Reply(9, [number], tracker, True)
    box.send(1, reply, frames=[encode([b"r" * 8_000], subject="s")])
    return box.answer(1, tracker)


@pytest.mark.parametrize("identity", ["", "eve"])
def test_replies_that_a_requester_does_not_read_take_its_share_and_not_the_workers(
    identity: str,
) -> None:
    quota = Quota(mail_memory_bytes=30_000, mail_bytes=30_000)
    box = Post(quota=lambda name: quota)
    box.send(1, wire.Offer(9, "web", ALL, 1 << 30, 1 << 40))
    for link in range(20, 24):
        box.hello(link, identity=identity, session=bytes([link]) * 16)
        for _ in range(9):
            last = ask(box, link)
        assert last.code == "wait"
        name = f"identity '{identity}'" if identity else "the clients without an identity"
        assert last.reason.startswith(name)
    assert isinstance(ask(box, 3), wire.Confirm), "carla is answered"
    assert isinstance(box.mail(1, "bert", [b"x" * 8_000]), wire.Confirm), "anna may send"
    if identity:
        box.restart()
        box.send(1, wire.Offer(9, "web", ALL, 1 << 30, 1 << 40))
        box.hello(20, identity=identity)
        assert ask(box, 20).code == "wait", "the log says whose they are"
        assert isinstance(ask(box, 3), wire.Confirm)


def test_notices_and_mailboxes_that_replies_make_count_for_the_requester() -> None:
    box = Post()
    box.send(1, wire.Offer(9, "web", ALL, 1 << 30, 1 << 40))
    for number in range(3):
        assert isinstance(ask(box, 2, reply_to=f"m{number}"), wire.Confirm)
    box.send(2, wire.Request("web", 1, key=b"k"), frames=[encode([b"q"], subject="s")])
    number = box.peers[1].work[9][-1].number
    box.send(1, wire.AckWork(9, [(number, number + 1)], wire.WorkState.COMPLETED, 77))

    def held(name: str) -> tuple[int, int]:
        usage = box.broker._shard.quotas.of(name).held
        return usage["mailboxes"], usage["mail_bytes"]

    for _ in range(2):
        assert held("") == held("anna") == (0, 0)
        mailboxes, size = held("bert")
        assert mailboxes == 4, "its own, for the notice, and those that it named"
        assert size == sum(box.info(name)["bytes"] for name in ("bert", "m0", "m1", "m2"))
        box.restart()


@pytest.mark.parametrize("together", [False, True])
def test_bytes_of_mail_hold_within_one_message_too(together: bool) -> None:
    box = post(Quota(mail_bytes=10_000))
    held = box.broker._shard.quotas.of("anna").held
    mails = [wire.Send("bert", 0 if together else 1 + at) for at in range(400)]
    frames = [encode([b"x" * 700], subject="s")] * 400
    if together:
        box.send(1, wire.Atomic(1, 400), *mails, frames=frames)
        assert box.answer(1, 1).code == "wait"
        assert held["mail_bytes"] == 0
        return
    box.send(1, *mails, frames=frames)
    assert len(refused(box, 1)) > 380
    assert 9_000 < held["mail_bytes"] <= 10_000
    assert held["mail_bytes"] == box.info("bert")["bytes"]


def test_mail_that_the_log_refuses_gives_its_bytes_back() -> None:
    box = post(Quota(mail_bytes=10_000))
    box.refuse["main"] = ("full", "no room")
    assert box.mail(1, "bert", [b"x" * 700]).code == "full"
    assert box.broker._shard.quotas.of("anna").held["mail_bytes"] == 0


def test_settings_of_one_identitys_streams_leave_room_for_those_of_others() -> None:
    box = post(Quota(settings_bytes=20_000), all_settings_bytes_max=40_000)
    long = {"description": "d" * 4_000}
    # In one message: what is on its way into the log counts.
    box.send(1, *[stream(at, **long) for at in range(10)])
    held = box.broker._shard.quotas.of("anna").held
    assert len(refused(box, 1)) == 6
    assert "quotas.settings_bytes is 20000" in refused(box, 1)[0].reason
    size = held["settings_bytes"]
    assert 16_000 < size <= 20_000
    box.send(2, *[stream(at, **long) for at in range(20, 25)])
    assert not refused(box, 2)
    box.send(2, *[stream(at, **long) for at in range(25, 35)])
    assert "streams.all_settings_bytes_max is 40000" in refused(box, 2)[-1].reason
    box.restart()
    held = box.broker._shard.quotas.of("anna").held
    assert held["settings_bytes"] == size, "the log says whose they are"
    # An edit of it by another is its creator's.
    box.send(2, wire.EditStream(1, "s0", {"description": "d" * 9_000}))
    assert "identity 'anna'" in refused(box, 2)[0].reason
    box.send(1, wire.EditStream(2, "s0", {"description": ""}))
    assert held["settings_bytes"] < size - 3_900
    box.refuse["main"] = ("full", "no room")
    before = held["settings_bytes"]
    box.send(1, stream(40, **long), wire.EditStream(3, "s0", {"description": "d" * 900}))
    assert [answer.code for answer in refused(box, 1)[-2:]] == ["full", "full"]
    assert held["settings_bytes"] == before
    box.refuse.clear()
    for at in range(4):
        box.send(1, wire.RemoveStream(50 + at, f"s{at}"))
    assert held["settings_bytes"] == 0


def test_rings_in_memory_and_on_disk_are_bounded_over_all_clients() -> None:
    box = Post(rings_max=3, rings_bytes_max=4 << 20, rings_memory_bytes_max=2 << 20)
    for link, at, settings in (
        (1, 1, {"ring_bytes": 3 << 20}),
        (2, 2, {"ring_bytes": 2 << 20}),
        (2, 3, {"ring_bytes": 2 << 20, "memory": True}),
        (3, 4, {"ring_bytes": 1 << 20, "memory": True}),
        (3, 5, {"ring_bytes": 1 << 20}),
        (1, 6, {"ring_bytes": 1 << 20}),
    ):
        box.send(link, stream(at, **settings))
    keys = [r.reason.partition(" ")[0] for link in (1, 2, 3) for r in refused(box, link)]
    assert keys == [
        "streams.rings_max", "streams.rings_bytes_max", "streams.rings_memory_bytes_max",
    ]  # fmt: skip
    box.send(1, wire.RemoveStream(1, "s1"))
    box.run()
    box.send(2, stream(7, ring_bytes=2 << 20))
    assert len(refused(box, 2)) == 1


def publishes(box: Post, link: int, bodies: int, tracker: int) -> str:
    """One publish of records of 1,000 bytes: `confirmed`, or the code of the refusal."""
    frame = encode([b"x" * 1_000] * bodies, subject="s")
    box.send(link, wire.Publish("s", tracker), frames=[frame])
    answer = box.answer(link, tracker)
    return answer.code if isinstance(answer, wire.Refused) else "confirmed"


def test_a_rate_lets_a_second_through_at_once_and_says_when_more_may_come() -> None:
    box = post(Quota(messages_s=100))
    assert publishes(box, 1, 60, 1) == "confirmed"
    assert publishes(box, 1, 60, 2) == "confirmed", "a batch may go into debt"
    assert publishes(box, 1, 1, 3) == "wait"
    retry_ms = box.peers[1].last(wire.Refused).retry_ms
    assert 200 <= retry_ms <= 202
    assert publishes(box, 2, 1_000, 1) == "confirmed"
    box.wait(retry_ms - 2)
    assert publishes(box, 1, 1, 4) == "wait"
    box.wait(2)
    assert publishes(box, 1, 1, 5) == "confirmed"
    assert box.mail(1, "bert", [b"x"] * 50).code == "wait", "mail is metered with it"
    assert box.broker.counters["quota_rate"] == 3


@pytest.mark.parametrize(
    ("quota", "rate"),
    [
        (Quota(publish_bytes_s=1 << 30, messages_s=50), "messages_s"),
        (Quota(publish_bytes_s=1_000, messages_s=1_000), "publish_bytes_s"),
    ],
)
def test_the_rate_that_was_exceeded_is_named(quota: Quota, rate: str) -> None:
    """The event named the rate of bytes, whichever of two was exceeded."""
    box = post(quota)
    assert publishes(box, 1, 60, 1) == "confirmed"
    assert publishes(box, 1, 1, 2) == "wait"
    bound = getattr(quota, rate)
    assert f"sends more than quotas.{rate} ({bound})" in box.peers[1].last(wire.Refused).reason
    said = [event.facts for event in box.events if event.name == "quota_reached"]
    assert said == [{"identity": "anna", "resource": "rate", "bound": bound}]


@pytest.mark.moderate
def test_a_rate_of_bytes_holds_over_time_whatever_the_batches() -> None:
    box = post(Quota(publish_bytes_s=100_000))
    taken = tracker = 0
    for _ in range(200):
        for size in (1, 40, 3, 90):
            tracker += 1
            if publishes(box, 1, size, tracker) == "confirmed":
                taken += size * 1_000
        box.wait(50)
    # Ten seconds, what the first brought along, and the debt of the last batch.
    assert 9 * 100_000 <= taken <= 11 * 100_000 + 90_000


def step(box: Post, tracker: int, parts: Iterable[tuple[wire.Command, int]]) -> Any:
    """Anna's step of commands with so many bodies each; its answer."""
    commands = [command for command, _ in parts]
    frames = [encode([b"x"] * bodies, subject="s") for _, bodies in parts]
    box.send(1, wire.Atomic(tracker, len(commands)), *commands, frames=frames)
    return box.answer(1, tracker)


def test_a_step_is_taken_under_a_rate_like_a_lone_batch_of_the_same_size() -> None:
    box = post(Quota(messages_s=50))
    mails = [(wire.Send("bert", 0), 1)] * 120
    assert isinstance(step(box, 1, mails), wire.Confirm)
    answer = step(box, 2, [(wire.Publish("s", 0), 60), (wire.Request("v", 0), 60)])
    assert answer.code == "wait"
    assert 1_400 <= answer.retry_ms <= 1_402, "a debt of 70"
    box.wait(answer.retry_ms)
    answer = step(box, 3, [(wire.Publish("s", 0), 60), (wire.Request("v", 0), 60)])
    assert isinstance(answer, wire.Confirm)
    assert box.broker.counters["quota_rate"] == 1


def test_what_is_refused_for_another_reason_spends_nothing() -> None:
    box = post(Quota(messages_s=50, subscriptions=1))
    for tracker in range(1, 20):
        parts = [(wire.Send("bert", 0), 40), (wire.MoveCursor("absent", "c", 1, 0), 0)]
        commands = [command for command, _ in parts]
        box.send(1, wire.Atomic(tracker, 2), *commands, frames=[encode([b"x"] * 40)])
        assert box.answer(1, tracker).code == "unknown_stream"
        assert box.mail(1, "bert", [b"x"] * 40, level=9).code == "unsupported"
    assert isinstance(box.mail(1, "bert", [b"x"] * 50), wire.Confirm)
    assert isinstance(box.mail(1, "bert", [b"x"]), wire.Refused)


def test_a_clock_that_stands_still_or_jumps_lends_no_more_than_a_second() -> None:
    bucket = Bucket(10, 1_000)
    bucket.spend(25)
    assert bucket.wait_ms(1_000) == 1_501
    assert bucket.wait_ms(500) == 1_501
    assert bucket.wait_ms(1 << 50) == 0
    bucket.spend(10)
    assert bucket.wait_ms(1 << 50) > 0


def test_questions_of_one_link_wait_behind_one_another_and_not_before_those_of_another() -> None:
    box = Post(ask=False)
    box.publish(1, "s", [b"x"])
    for at in range(200):
        box.send(1, wire.FindOffset(at, "s", [3, 5, True]))
    box.send(2, wire.FindOffset(7, "s", [3, 5, True]))
    answered = 0
    while not box.peers[2].of(wire.Result):
        query = box.queries.pop(0)
        box.broker.answered(IndexAnswer(query.token, 0))
        box.run()
        answered += 1
        assert len(box.queries) <= QUESTIONS_AT_ONCE
    assert answered <= QUESTIONS_AT_ONCE + 2
    assert len(box.peers[1].of(wire.Result)) < answered


def test_questions_of_one_identity_are_bounded() -> None:
    box = post(Quota(questions=5), ask=False)
    box.publish(2, "s", [b"x"])
    for at in range(9):
        box.send(1, wire.FindOffset(at, "s", [3, 5, True]))
    assert [answer.code for answer in refused(box, 1)] == ["wait"] * 4
    while box.queries:
        box.answer_queries()
        box.run()
    assert len(box.peers[1].of(wire.Result)) == 5
    assert not box.broker._shard.quotas.of("anna").held["questions"]


def test_a_quota_that_was_reached_is_said_again_once_it_was_eased() -> None:
    box = post(Quota(subscriptions=10))
    box.publish(3, "shared", [b"a"])

    def subscribe(numbers: Iterable[int]) -> None:
        for number in numbers:
            box.send(1, wire.Subscribe(number, "shared", ALL, [0]))

    def said() -> int:
        return sum(event.name == "quota_reached" for event in box.events)

    subscribe(range(20))
    assert said() == 1
    box.send(1, wire.Unsubscribe(0))
    box.send(1, wire.Unsubscribe(1))
    subscribe(range(20, 30))
    assert said() == 2


@pytest.mark.moderate
def test_owners_who_hold_nothing_are_forgotten() -> None:
    box = Post()
    quotas: Quotas = box.broker._shard.quotas
    for at in range(10_000):
        quotas.check(f"passer-by-{at}", "streams")
    quotas.add("holder", "streams")
    assert len(quotas._owners) <= 1_100
    for at in range(10_000):
        quotas.check(f"passer-by-{at}", "streams")
    assert quotas.of("holder").held["streams"] == 1


def test_reads_of_history_go_by_turns_of_links() -> None:
    box = Post(read=False, reads_max=2)
    for at in range(30):
        box.publish(3, "s", [b"x" * 500], subject=f"a.{at}")
    box.evict()
    for number in range(50):
        box.subscribe(1, number, "s", ["topic", f"a.{number}"], [0])
    box.subscribe(2, 1, "s", ["topic", "a.29"], [0])
    answered = 0
    while not box.peers[2].received.get(1):
        box.answer_reads()
        box.run()
        answered += 1
    assert answered <= 4, "two reads at a time: it would be the 26th"


def test_expressions_of_one_service_s_offers_are_bounded() -> None:
    box = Post()
    box.send(1, wire.Request("v", 1), frames=[encode([b"x"], subject="s")])
    for at in range(30):
        box.send(2, wire.Offer(at, "v", ["regex", f"[ab]{{100}}c{at}"]))
    codes = [answer.code for answer in refused(box, 2)]
    assert set(codes) == {"limit"}
    assert 20 < len(codes) < 30


@pytest.mark.parametrize("resource", MAKES)
def test_a_quota_holds_within_one_message_too(resource: str) -> None:
    box = post(Quota(**{resource: 3}))
    box.publish(3, "shared", [b"a", b"b"])
    commands: list[wire.Command] = []
    frames: list[Any] = []
    for at in range(10, 30):
        made, owned = MAKES[resource](at)
        commands += made
        frames += owned
    box.send(1, *commands, frames=frames)
    assert [answer.code for answer in refused(box, 1)] == ["limit"] * 17
    assert box.broker._shard.quotas.of("anna").held[resource] == 3


NAMELESS_ENDS = ("subscriptions", "offers")


@pytest.mark.parametrize("resource", NAMELESS_ENDS)
def test_an_address_cannot_use_up_what_ends_with_a_link_of_others_without_identity(
    resource: str,
) -> None:
    box = nameless(Quota(**{resource: 3}))
    box.publish(1, "shared", [b"a"])
    for link in (10, 11, 20):
        for at in range(10, 14):
            commands, frames = MAKES[resource](100 * link + at)
            box.send(link, *commands, frames=frames)
    assert [len(refused(box, link)) for link in (10, 11, 20)] == [1, 4, 1]
    assert "the clients without an identity at 10.0.0.1 has 3" in refused(box, 11)[0].reason
    box.lose(10)
    commands, frames = MAKES[resource](5)
    box.send(11, *commands, frames=frames)
    assert len(refused(box, 11)) == 4, "what ended with the link can be had again"


def test_links_without_identity_are_counted_by_their_address() -> None:
    box = nameless(Quota(links=2))
    box.broker.came_from(12, "10.0.0.1", box.now_ms)
    box.hello(12)
    assert "10.0.0.1 has 2" in refused(box, 12)[0].reason
    box.lose(10)
    box.broker.came_from(13, "10.0.0.1", box.now_ms)
    box.hello(13)
    assert not refused(box, 13)


def test_a_rate_of_links_without_identity_is_that_of_their_address() -> None:
    box = nameless(Quota(messages_s=2))
    for link in (10, 11, 20):
        box.publish(link, "shared", [b"a"] * 3)
        box.publish(link, "shared", [b"b"])
    assert [[one.code for one in refused(box, link)] for link in (10, 11, 20)] == [
        ["wait"], ["wait", "wait"], ["wait"],
    ]  # fmt: skip


def opened(box: Post, first: int, count: int, address: str) -> list[int]:
    """Open links from an address, each with an identity of its own; return their retry times."""
    waits = []
    for link in range(first, first + count):
        box.broker.came_from(link, address, box.now_ms)
        box.hello(link, identity=f"id-{link}")
        waits.append(sum(one.retry_ms for one in refused(box, link)))
    return waits


def test_links_that_an_address_opens_too_fast_wait_one_behind_the_other() -> None:
    box = Post(quota=lambda name: Quota(links_s=10))
    assert opened(box, 10, 10, "10.0.0.1") == [0] * 10
    assert opened(box, 20, 3, "10.0.0.1") == [100, 200, 300], "names of their own are no help"
    assert [one.code for one in refused(box, 20)] == ["wait"]
    assert refused(box, 20)[0].reason == (
        "more links a second come from address 10.0.0.1 than quotas.links_s (10)"
    )
    assert opened(box, 30, 10, "10.0.0.2") == [0] * 10, "another address has its own line"
    box.wait(100)
    assert opened(box, 40, 2, "10.0.0.1") == [0, 300]
    assert box.broker._shard.counters["quota_links_s"] == 4


def test_no_link_is_told_to_wait_for_longer_than_some_seconds() -> None:
    box = Post(quota=lambda name: Quota(links_s=10))
    waits = opened(box, 10, 200, "10.0.0.1")
    assert max(waits) == LINE_MS
    assert waits[10 + LINE_MS // 100] == 1, "the next ones come among those that were told before"


def test_links_of_a_user_wait_in_a_line_of_their_own_and_in_that_of_the_namespace() -> None:
    acme = Namespace(name="acme", prefix="acme.", quota=Quota(links_s=3))
    box = Post(
        quota=lambda name: Quota(links_s=2) if name else Quota(),
        namespaces=(acme,),
        namespace_of=lambda owner: acme if owner[:4] == "acme" else None,
    )
    waits: dict[str, list[int]] = {}
    for link, user in enumerate(["acme.a", "acme.a", "acme.a", "acme.b", "acme.b", "other"], 10):
        box.send(link, wire.Hello((1, 1), link.to_bytes(16, "big")), identity=user)
        waits.setdefault(user, []).extend(one.retry_ms for one in refused(box, link))
    assert waits == {"acme.a": [500], "acme.b": [334], "other": []}


def test_what_the_log_has_of_links_without_identity_is_one_owners() -> None:
    box = nameless(Quota(mailboxes=3))
    for link in (10, 20):
        for at in range(10, 12):
            commands, frames = MAKES["mailboxes"](100 * link + at)
            box.send(link, *commands, frames=frames)
    assert [len(refused(box, link)) for link in (10, 20)] == [0, 1]


def test_an_identity_counts_as_itself_wherever_it_comes_from() -> None:
    box = nameless(Quota(subscriptions=1))
    box.broker.came_from(30, "10.0.0.1", box.now_ms)
    box.hello(30, identity="anna")
    box.publish(1, "shared", [b"a"])
    for at in range(2):
        box.send(30, wire.Subscribe(at + 1, "shared", ALL, [0]))
        box.send(10, wire.Subscribe(at + 1, "shared", ALL, [0]))
    assert not refused(box, 30)
    assert len(refused(box, 10)) == 1


def nameless(quota: Quota) -> Post:
    """A broker whose links 10 and 11 come from one address and 20 from another, without identity.

    They have a quota, which those with an identity have not.
    """
    box = Post(quota=lambda name: Quota() if name else quota)
    for link, address in ((10, "10.0.0.1"), (11, "10.0.0.1"), (20, "10.0.0.2")):
        box.broker.came_from(link, address, box.now_ms)
        box.hello(link)
    return box
