"""How often the broker is asked, and what becomes of answers that do not come."""

from __future__ import annotations

import asyncio
from typing import Any

from malamute_protocol.errors import BrokerRefused, ConnectionLost
from malamute_py.client.facts import BrokerFacts, NamespaceFacts, StreamFacts
from malamute_py.health.readiness import live
from malamute_py.http.metrics import render
from malamute_py.http.source import LISTED_MAX, SELDOM_S, Labels, Source


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Asked:
    """A client that notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.linked = True
        self.refused: set[str] = set()
        self.error: Exception | None = None
        self.waits: asyncio.Event | None = None
        self.streams = ["a", "b", "c"]

    async def broker_info(self) -> BrokerFacts:
        self.calls.append("broker_info")
        if self.waits is not None:
            await self.waits.wait()
        if self.error is not None:
            raise self.error
        return BrokerFacts(software="fake", counters={"gaps": 1})

    async def stream_info(self, name: str) -> StreamFacts:
        self.calls.append(("stream_info", name))
        if name in self.refused:
            raise BrokerRefused("unknown_stream", name)
        return StreamFacts(name=name, subscriptions=2)

    async def list_streams(self, *, limit: int) -> list[StreamFacts]:
        self.calls.append(("streams", limit))
        return [StreamFacts(name=name) for name in self.streams]

    async def _none(self, *, limit: int) -> list[Any]:
        self.calls.append(limit)
        if "mailboxes" in self.refused:
            raise BrokerRefused("queues_lost", "lost")
        return []

    async def list_namespaces(self, *, limit: int) -> list[NamespaceFacts]:
        self.calls.append("namespaces")
        return [NamespaceFacts(namespace="acme")]

    list_mailboxes = list_services = list_cursors = list_groups = _none


def source(client: Asked, clock: Clock, **given: Any) -> Source:
    asked = Source(2, clock=clock, **given)
    asked.client = client  # type: ignore[assignment]
    return asked


async def test_however_many_ask_within_a_second_the_broker_is_asked_once() -> None:
    client, clock = Asked(), Clock()
    asked = source(client, clock)
    answers = await asyncio.gather(*(asked.everything() for _ in range(50)))
    assert all(each is answers[0] for each in answers)
    clock.now = 0.99
    await asked.everything()
    await asked.facts()
    assert client.calls.count("broker_info") == 1
    clock.now = 2.5
    await asked.everything()
    assert client.calls.count("broker_info") == 2


async def test_one_who_goes_away_takes_the_answer_from_nobody() -> None:
    client, clock = Asked(), Clock()
    client.waits = asyncio.Event()
    asked = source(client, clock)
    gone = asyncio.create_task(asked.facts())
    waits = asyncio.create_task(asked.facts())
    await asyncio.sleep(0)
    gone.cancel()
    client.waits.set()
    assert (await waits).broker["counters"] == {"gaps": 1}
    assert client.calls == ["broker_info"]


async def test_of_each_kind_one_page_is_asked_for_and_details_of_what_has_a_label() -> None:
    client, clock = Asked(), Clock()
    found = await source(client, clock).everything()
    assert client.calls.count(LISTED_MAX) == 4
    assert ("streams", LISTED_MAX) in client.calls
    assert found.stream_details.keys() == {"a", "b"}
    assert [each.namespace for each in found.namespaces] == ["acme"]


async def test_what_is_refused_is_empty_and_the_rest_is_there() -> None:
    client, clock = Asked(), Clock()
    client.refused = {"mailboxes", "a"}
    found = await source(client, clock).everything()
    assert found.facts.broker
    assert len(found.streams) == 3
    assert found.mailboxes == []
    assert found.stream_details.keys() == {"b"}


async def test_a_broker_that_never_answered_is_not_silent_and_one_that_did_is() -> None:
    client, clock = Asked(), Clock()
    asked = source(client, clock, keep_s=0)
    client.linked = False
    clock.now = 100
    facts = await asked.facts()
    assert (facts.broker, facts.silent_s) == ({}, 0)
    assert "not been reached" in facts.reason
    client.linked = True
    assert (await asked.facts()).broker
    client.error = ConnectionLost("gone")
    clock.now = 110
    await asked.facts()
    clock.now = 140
    facts = await asked.facts()
    assert (facts.reason, facts.silent_s) == ("gone", 40)
    client.error = None
    assert (await asked.facts()).broker
    client.error = ConnectionLost("gone again")
    assert (await asked.facts()).silent_s == 0


async def test_one_question_without_an_answer_after_a_long_pause_says_little() -> None:
    client, clock = Asked(), Clock()
    asked = source(client, clock, keep_s=0)
    assert (await asked.facts()).broker
    client.error = ConnectionLost("gone")
    clock.now = 3_600
    assert (await asked.facts()).silent_s == SELDOM_S
    clock.now = 3_620
    assert (await asked.facts()).silent_s == SELDOM_S + 20


async def test_a_broker_that_stops_is_silent_from_its_last_answer_on() -> None:
    client, clock = Asked(), Clock()
    asked = source(client, clock, keep_s=0)
    assert live(await asked.facts()).holds
    client.error = ConnectionLost("gone")
    clock.now = 10
    assert live(await asked.facts()).holds
    clock.now = 29.9
    assert live(await asked.facts()).holds
    clock.now = 30
    assert not live(await asked.facts()).holds


async def test_an_answer_that_does_not_come_is_not_waited_for_for_ever() -> None:
    client, clock = Asked(), Clock()
    client.waits = asyncio.Event()
    found = await source(client, clock, timeout_s=0.01).everything()
    assert not found.facts.broker
    assert "did not answer within 0.01 s" in found.facts.reason


def test_a_label_stays_with_its_name_while_that_is_there() -> None:
    labels = Labels(2)

    def named(kind: str, names: str) -> str:
        return "".join(sorted(name for (name,) in labels.of(kind, [(each,) for each in names])))

    assert named("stream", "bcd") == "bc"
    assert named("stream", "abcd") == "bc"
    assert named("stream", "acd") == "ac"
    assert named("service", "x") == "x"
    assert labels.of("group", [("s", "other"), ("s", "g")]) == {("s", "g")}


async def test_a_stream_keeps_its_label_between_pages_of_metrics() -> None:
    client, clock = Asked(), Clock()
    asked = source(client, clock)
    render(await asked.everything(), asked.labels)
    client.streams = ["0", *client.streams]
    clock.now = 2
    found = await asked.everything()
    assert found.stream_details.keys() == {"a", "b"}
    assert b'malamute_stream_subscriptions{stream="b"} 2.0' in render(found, asked.labels)
