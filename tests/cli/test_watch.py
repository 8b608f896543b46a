"""`malamute watch`: differences of two looks as events, each once."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from malamute_protocol.errors import MalamuteError
from malamute_py import EmbeddedBroker, Plain, connect_sync
from malamute_py.cli.looking import KINDS, Look
from malamute_py.cli.looking import look as look_at
from malamute_py.cli.watch import COUNTERS, happened
from malamute_py.client.facts import LinkFacts, MailboxFacts, ServiceFacts
from malamute_py.health.facts import Everything, Facts
from malamute_py.http.table import COUNTERS as OF_THE_CORE
from malamute_py.http.table import SHELL
from tests.cli.running import Run, as_user, broker_of

NOW_MS = 10_000_000


def look(counters: dict[str, int] | None = None, *, epoch: int = 1, links: tuple[int, ...] = (),
         uptime_ms: int = 0, **things: Any) -> Look:  # fmt: skip
    broker = {"now_ms": NOW_MS, "epoch": epoch, "counters": counters or {}, "uptime_ms": uptime_ms}
    opened = [LinkFacts(link=each, identity=f"c{each}", software="x") for each in links]
    return Look(Everything(Facts(broker), **things), opened)


def words(now: Look, before: Look) -> list[tuple[str, str]]:
    return [(each.kind, each.words) for each in happened(now, before)]


def test_nothing_happened_between_two_equal_looks() -> None:
    assert words(look({"gaps": 3}, links=(1,)), look({"gaps": 3}, links=(1,))) == []


def test_clients_that_came_and_went_are_named() -> None:
    assert words(look(links=(2, 3)), look(links=(1, 2))) == [
        ("unlinked", "c1 (x, link 1)"), ("linked", "c3 (x, link 3)"),
    ]  # fmt: skip


@pytest.mark.moderate
def test_no_client_is_said_to_come_or_go_where_not_all_can_be_seen() -> None:
    assert words(look(links=tuple(range(1, 1001))), look(links=tuple(range(1000)))) == []


def test_growth_of_a_counter_is_an_event_and_dead_letters_say_where() -> None:
    before = look({"gaps": 1, "dead_letters": 4}, services=[ServiceFacts(name="up", dead=4)])
    now = look({"gaps": 3, "dead_letters": 5}, services=[ServiceFacts(name="up", dead=5)])
    assert words(now, before) == [
        ("gap", "gaps told to readers: 2"),
        ("dead", "dead letters: 1 (service up)"),
    ]


def test_a_broker_that_was_started_anew_counts_from_the_beginning() -> None:
    assert words(look({"gaps": 2}, epoch=2), look({"gaps": 90})) == [
        ("started", "the broker was started anew, epoch 2"), ("gap", "gaps told to readers: 2"),
    ]  # fmt: skip


def test_a_start_of_a_broker_in_memory_is_seen_though_its_epoch_is_the_same() -> None:
    assert words(look({"gaps": 2}, uptime_ms=500), look({"gaps": 90}, uptime_ms=9_000)) == [
        ("started", "the broker was started anew, epoch 1"), ("gap", "gaps told to readers: 2"),
    ]  # fmt: skip


def test_a_trouble_is_said_when_it_begins_and_when_it_is_over() -> None:
    stuck = look(mailboxes=[MailboxFacts(name="desk", messages=1, oldest_ms=NOW_MS - 90_000)])
    older = look(mailboxes=[MailboxFacts(name="desk", messages=2, oldest_ms=NOW_MS - 95_000)])
    assert words(stuck, look()) == [
        ("stuck", "mailbox desk: 1 message, the oldest for 1 min 30 s: no reader")
    ]
    assert words(older, stuck) == []
    assert words(look(), older) == [("over", "mailbox desk")]


def test_every_counter_that_is_watched_is_one_of_the_brokers() -> None:
    assert COUNTERS.keys() <= {*OF_THE_CORE, *SHELL, "refused_forbidden"}


def test_a_look_has_the_counters_of_the_core_and_of_the_shell(broker: EmbeddedBroker) -> None:
    with broker.connect_sync() as client:
        counters = look_at(client).broker["counters"]
    assert {"links_opened", "messages_in_total"} <= counters.keys()


@pytest.mark.moderate
def test_events_come_from_a_broker_until_enough_were_said(
    m: Run, broker: EmbeddedBroker, stream: str
) -> None:
    import threading

    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            with broker.connect_sync(identity=stream):
                ended.wait(0.3)

    coming = threading.Thread(target=come_and_go)
    coming.start()
    try:
        told = m("watch", "--every", "100ms", "--count", "2", "--json").ok().json_lines
    finally:
        ended.set()
        coming.join()
    assert len(told) == 2
    assert {each["kind"] for each in told} <= {"linked", "unlinked", "stuck", "slow", "over"}
    assert m("watch", "--every", "1ms").code == 2


@pytest.mark.moderate
def test_who_is_shown_its_own_mailbox_alone_has_that_one_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with broker_of({"ann": {"read": ["open"]}, "root": {"send": ["*"]}}) as guarded:
        as_user(guarded, "root")("send", "ann", "x").ok()
        asked: list[Any] = []

        def look(client: Any, kinds: Any = KINDS, **options: Any) -> Look:
            if asked:
                raise KeyboardInterrupt
            found = look_at(client, kinds, **options)
            if kinds is not KINDS:
                asked.append(kinds)
                assert [each.name for each in found.everything.mailboxes] == ["ann"]
            return found

        monkeypatch.setattr("malamute_py.cli.watch.look", look)
        told = as_user(guarded, "ann")("watch", "--every", "100ms")
    assert asked == [["streams", "mailboxes", "cursors", "groups"]]
    assert "mailboxes: this user may see no mailboxes but its own" in told.err
    assert "services: not watched: this user may see no services" in told.err


@pytest.mark.moderate
def test_refused_credentials_and_commands_are_events_and_those_of_the_watch_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = itertools.count(1)
    with broker_of({"ann": {"read": ["open"]}, "bob": {"read": ["open"]}}) as guarded:

        def pause(_seconds: float) -> None:
            number = next(pauses)
            assert number < 9
            if number == 3:
                credential = Plain("bob", "wrong")
                with pytest.raises(MalamuteError):
                    connect_sync(guarded.tcp_endpoint, credential=credential, timeout_ms=2_000)
                assert as_user(guarded, "bob")("send", "box", "x").code != 0

        monkeypatch.setattr("malamute_py.cli.watch.time", SimpleNamespace(sleep=pause))
        told = as_user(guarded, "ann")("watch", "--count", "2", "--json").ok()
    assert "clients: not watched: forbidden" in told.err
    assert [(each["kind"], each["words"].partition(":")[0]) for each in told.json_lines] == [
        ("refused", "connections turned away by their credentials"),
        ("refused", "commands that permissions forbid"),
    ]
    assert next(pauses) == 4
