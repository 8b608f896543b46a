"""Table of failures: what each client is told, what is counted, what the log says.

The six cases are those that the protocol promises an answer for: section 4.8 of SPEC.md says what
happens, deploy/metrics.md by which names an operator sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.service_world import MANY, World

METRICS = Path(__file__).parents[2] / "deploy" / "metrics.md"
LEASE_MS = 1_000
LATER_MS = 200
"""Past a slot of the wheel and the first back-off."""


def world(**settings: Any) -> World:
    """A requester (link 1) with an inbox, and a worker (link 2) with a request in hand."""
    world = World(backoff_ms=100, **settings)
    world.client(1)
    world.worker(2, "ann")
    world.offer(2, lease_ms=LEASE_MS)
    return world


def a_full_mailbox() -> World:
    """SEND waits with a time to try again; nothing is dropped, and what is read makes room."""
    wrong = world()
    shell = wrong.shell
    wrong.ask(1, wire.EditMailbox(9, "box", {"max_messages": 2}))
    content = encode([b"x"], subject="x")
    for tracker in (11, 12, 13, 14):
        shell.send(1, wire.Send("box", tracker), frames=[content])
    for tracker in (11, 12):
        wrong.confirmed(1, tracker)
    for tracker in (13, 14):
        refused = wrong.refused(1, tracker)
        assert (refused.code, refused.retry_ms > 0) == ("wait", True)
    reader = shell.send(1, wire.OpenInbox(50, "box", MANY, MANY))
    assert [letter.body for letter in reader.mail[50]] == [b"x", b"x"]
    shell.send(1, wire.AckMail(50, [(reader.mail[50][0].number, reader.mail[50][0].number + 1)]))
    shell.send(1, wire.Send("box", 15), frames=[content])
    wrong.confirmed(1, 15)
    return wrong


def a_dead_worker() -> World:
    """Requests that the dead worker had in hand go to another at once, with one attempt more."""
    wrong = world()
    wrong.request(1, b"a", b"b", key=b"k")
    wrong.worker(3, "bob")
    wrong.offer(3)
    wrong.drop(2)
    assert [(task.number, task.work.attempts) for task in wrong.work(3)] == [(0, 2), (1, 2)]
    wrong.reply(3, [0, 1])
    assert wrong.replies(1) == [b"re: 0", b"re: 1"]
    assert wrong.queued() == 0
    return wrong


def a_worker_that_never_answers() -> World:
    """A worker's request goes to another when its lease is over; heartbeats do not renew it."""
    wrong = world()
    wrong.request(1, b"a", key=b"k")
    wrong.worker(3, "bob")
    wrong.offer(3)
    wrong.shell.wait(LEASE_MS - 100)
    wrong.shell.send(2, wire.Ping(0))
    assert wrong.work(3) == []
    wrong.shell.wait(100)
    wrong.shell.wait(LATER_MS)
    assert [(task.number, task.work.attempts) for task in wrong.work(3)] == [(0, 2)]
    wrong.reply(3, [0])
    assert wrong.replies(1) == [b"re: 0"]
    assert wrong.queued() == 0
    return wrong


def a_requester_that_vanishes() -> World:
    """The requester's temporary mailbox ends; the reply is dropped, the completion is taken."""
    wrong = world()
    wrong.request(1, b"a", key=b"k")
    wrong.drop(1)
    for _ in range(60):
        wrong.shell.send(2, wire.Ping(0), wire.AckWork(1, [(0, 1)], 2))
        wrong.shell.wait(500)
    wrong.confirmed(2, wrong.reply(2, [0]))
    assert wrong.queued() == 0
    return wrong


def a_reply_to_an_expired_request() -> World:
    """The requester was told `expired`, the worker learns it by `not_held`; no reply arrives."""
    wrong = world()
    wrong.request(1, b"a", key=b"k", timeout_ms=300)
    wrong.shell.wait(300 + LATER_MS)
    assert wrong.queued() == 0
    (notice,) = wrong.mail(1)
    assert (notice.mail.why, notice.mail.last, notice.body) == ("expired", True, b"")
    for _ in range(3):
        assert wrong.refused(2, wrong.reply(2, [0])).code == "not_held"
    assert len(wrong.mail(1)) == 1
    assert wrong.events("request_expired") == [{"service": "s", "count": 1}]
    assert wrong.counter("requests_expired") == 1
    return wrong


def a_second_client_with_the_same_identity() -> World:
    """The older link ends, told why, and what it held goes to another, be it the newer one."""
    wrong = world()
    wrong.request(1, b"a", key=b"k")
    second = wrong.worker(3, "ann")
    first = wrong.shell.peers[2]
    assert (first.last(wire.Bye).code, first.closed, second.closed) == ("fenced", True, False)
    wrong.offer(3)
    assert [(task.number, task.work.attempts) for task in wrong.work(3)] == [(0, 2)]
    wrong.reply(3, [0])
    assert wrong.replies(1) == [b"re: 0"]
    assert wrong.queued() == 0
    return wrong


class Case(NamedTuple):
    """A failure, and the names by which an operator sees it."""

    happens: Callable[[], World]
    counter: str
    counted: int
    event: str
    level: str
    facts: dict[str, Any]
    """Facts that the one event has, at least."""


CASES = [
    Case(
        a_full_mailbox, "mailbox_full", 2,
        "mailbox_full", "warning", {"mailbox": "box", "messages": 2},
    ),
    Case(
        a_dead_worker, "workers_died", 1, "worker_died", "warning",
        {"service": "s", "holder": "ann", "link": 2, "happened": "lost", "count": 2},
    ),
    Case(
        a_worker_that_never_answers, "leases_expired", 1, "lease_expired", "warning",
        {"service": "s", "holder": "ann", "count": 1},
    ),
    Case(
        a_requester_that_vanishes, "replies_undeliverable", 1, "reply_undeliverable", "warning",
        {"count": 1},
    ),
    Case(
        a_reply_to_an_expired_request, "replies_late", 3, "reply_late", "warning",
        {"service": "s", "holder": "ann", "link": 2, "number": 0, "count": 1},
    ),
    Case(
        a_second_client_with_the_same_identity, "links_fenced", 1, "identity_taken", "warning",
        {"identity": "ann", "link": 2, "by": 3},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.happens.__name__ for case in CASES])
def test_what_goes_wrong_is_told_counted_and_logged(case: Case) -> None:
    wrong = case.happens()
    assert wrong.counter(case.counter) == case.counted
    (event,) = [event for event in wrong.shell.events if event.name == case.event]
    assert event.level == case.level
    assert case.facts.items() <= event.facts.items()


@pytest.mark.parametrize("case", CASES, ids=[case.happens.__name__ for case in CASES])
def test_operators_can_read_what_each_name_means(case: Case) -> None:
    text = METRICS.read_text()
    assert f"| `counters.{case.counter}` |" in text
    assert f"| `{case.event}` |" in text


def test_where_nothing_goes_wrong_none_of_these_is_seen() -> None:
    right = world()
    right.request(1, b"a", key=b"k")
    right.reply(2, [0])
    assert right.replies(1) == [b"re: 0"]
    right.shell.send(2, wire.Unsubscribe(1), wire.Bye())
    assert [right.counter(case.counter) for case in CASES] == [0] * len(CASES)
    names = {event.name for event in right.shell.events}
    assert not names & {case.event for case in CASES}
