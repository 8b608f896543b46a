"""Commands that a RESULT or a REFUSED answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused, ConnectionLost
from malamute_py.client.session.events import (
    Answered,
)
from tests.client.script import Script


def test_requests_are_answered_refused_or_sent_again() -> None:
    script = Script()
    script.session.request(lambda number: c.StreamInfo(number, "s"), "info")
    assert script.step() == []
    [asked] = script.open()
    assert isinstance(asked, c.StreamInfo)
    [again] = script.reconnect()
    assert again == asked
    script.say(c.Result(again.request, {"tail": 5}))
    assert script.happened[-1] == Answered("info", {"tail": 5})
    script.session.request(lambda number: c.Kick(number, 9), "kick")
    [kick] = script.step()
    assert isinstance(kick, c.Kick)
    script.say(c.Refused(39, kick.request, "unknown_link", "no 9"))
    answer = script.happened[-1]
    assert isinstance(answer, Answered)
    assert isinstance(answer.outcome, BrokerRefused)
    assert answer.outcome.code == "unknown_link"


@pytest.mark.parametrize(
    "asked",
    [
        c.RemoveStream(0, "s"),
        c.RemoveCursor(0, "s", "c"),
        c.RemoveGroup(0, "s", "g"),
        c.Requeue(0, "svc", []),
        c.RequeueGroup(0, "s", "g", []),
    ],
    ids=lambda asked: type(asked).__name__,
)
def test_a_removal_or_requeue_whose_answer_was_lost_is_not_repeated(asked: Any) -> None:
    script = Script()
    script.open()
    script.session.request(lambda number: msgspec.structs.replace(asked, request=number), "asked")
    script.step()
    assert script.reconnect() == []
    [answer] = [event for event in script.happened if isinstance(event, Answered)]
    assert isinstance(answer.outcome, ConnectionLost)
