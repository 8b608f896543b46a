"""Attempts to reach a broker: their pauses, their endpoints, and what the log is told."""

from __future__ import annotations

from malamute_protocol import commands as c
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.events import (
    Connect,
    Unlinked,
    Warned,
)
from tests.client.script import Script
from tests.client.session.conversation import ask_about


def told(script: Script) -> list[str]:
    """Lines for the log since the last call."""
    found = [event.message for event in script.happened if isinstance(event, Warned)]
    script.happened = [event for event in script.happened if not isinstance(event, Warned)]
    return found


def test_pauses_between_attempts_double_up_to_their_bound_and_are_jittered() -> None:
    script = Script(retry_min_ms=100, retry_max_ms=1000)
    pauses = []
    for _ in range(8):
        script.lose()
        lost = script.happened[-1]
        assert isinstance(lost, Unlinked)
        pauses.append(lost.retry_at_ms - script.now_ms)
        script.wait(pauses[-1])
    bounds = [100, 200, 400, 800, 1000, 1000, 1000, 1000]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert len(set(pauses[4:])) > 1, "without jitter all clients come back together"


def test_endpoints_are_tried_in_turn() -> None:
    script = Script(endpoints=("tcp://one:1", "tcp://two:2"))
    for _ in range(2):
        script.lose()
        script.wait(10_000)
    tried = [wanted.endpoint for wanted in script.transport if isinstance(wanted, Connect)]
    assert tried == ["tcp://one:1", "tcp://two:2", "tcp://one:1"]


def test_links_that_do_not_last_are_tried_more_and_more_seldom() -> None:
    script = Script()
    end_ms = script.now_ms + 60_000
    while script.now_ms < end_ms:
        if script.state() is LinkState.CONNECTING:
            script.open()
            script.say(c.Bye("internal", "as the test wants"))
        wake = script.session.next_wake()
        assert wake is not None
        script.wait(max(1, wake - script.now_ms))
    attempts = sum(isinstance(wanted, Connect) for wanted in script.transport)
    assert attempts < 120, "two a second at most, of links that end at once"


def test_a_link_that_lasted_is_sought_again_at_once() -> None:
    script = Script(retry_min_ms=100)
    for _ in range(20):
        script.open()
        script.wait(2_500)
        script.say(c.Pong())
        script.lose()
        wake = script.session.next_wake()
        assert wake is not None
        assert wake - script.now_ms <= 100
        script.wait(100)


def test_the_log_has_a_line_when_the_link_is_lost_and_one_when_it_is_back() -> None:
    script = Script()
    script.open()
    assert told(script) == []
    ask_about(script, "one")
    ask_about(script, "two")
    script.step()
    script.wait(2_500)
    script.say(c.Pong())
    script.lose()
    [lost] = told(script)
    assert "was lost (closed: the cable)" in lost
    assert "commands without an answer: 2" in lost
    for _ in range(3):
        script.wait(10_000)
        script.lose()
    assert told(script) == [], "attempts that fail are not told one by one"
    script.wait(10_000)
    script.open()
    [back] = told(script)
    assert "is back after 40.0 s and 4 attempts; commands that go on: 2" in back


def test_a_broker_that_was_never_there_is_told_once_and_when_it_comes() -> None:
    script = Script()
    for _ in range(5):
        script.lose()
        script.wait(10_000)
    [missing] = told(script)
    assert "no link to a broker yet (closed: the cable)" in missing
    script.open()
    [there] = told(script)
    assert "linked to a broker after 6 attempts" in there
