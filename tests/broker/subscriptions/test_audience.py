"""The audience of a stream: what it remembers of headers while subscriptions come and go."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.header import Header
from malamute_py.broker.subscriptions.audience import audience_of
from tests.broker.shell import Shell


def test_what_a_stream_remembers_of_headers_is_bounded_by_the_patterns_that_match_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("malamute_py.broker.subscriptions.audience.MATCHED_WEIGHT_MAX", 500)
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b""], subject=["w"])
    shell.hello(2)
    for number in range(100):
        shell.subscribe(2, number, "s", ["not", ["topic", f"never.{number}"]], [1], gathered=True)
    audience = audience_of(shell.stream("s"))
    for place in range(40):
        found = audience.match(Header((f"w.{place}",), ()))
        assert len(found.numbers) == 100
        assert sum(len(known.numbers) for known in audience.matched.values()) <= 500
    assert audience.matched
    audience.forget()
    assert audience._matched_weight == 0


def test_what_is_remembered_is_forgotten_when_a_subscription_comes_or_goes() -> None:
    shell = Shell()
    shell.hello(1)
    shell.subscribe(1, 1, "s", ["topic", "w.*"])
    audience = audience_of(shell.stream("s"))
    shell.publish(1, "s", [b""], subject="w.x")
    assert audience._groups
    shell.subscribe(1, 2, "s", ["topic", "w.*"])
    assert not audience._groups
    shell.publish(1, "s", [b""], subject="w.x")
    assert audience._groups
    shell.send(1, wire.Unsubscribe(2))
    assert not audience._groups
    assert [sub.number for sub in audience.subscriptions] == [1]
