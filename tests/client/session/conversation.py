"""Exchanges between a session and a broker of a script, about mail, requests and work."""

from __future__ import annotations

from typing import Any

from malamute_protocol import commands as c
from malamute_protocol.batch import Content
from malamute_py.client.session.calls import make_row
from malamute_py.client.session.events import Confirmed, Settled, Warned
from malamute_py.client.session.warnings import GATHER_MS
from tests.client.script import Script, bodies_of


def opened(**options: Any) -> Script:
    script = Script(**options)
    script.open()
    return script


def of(commands: list[c.Command], kind: type[Any]) -> list[Any]:
    return [command for command in commands if type(command) is kind]


def outcomes(script: Script) -> dict[Any, Any]:
    """Outcome by token, of all that was settled since the last call."""
    found: dict[Any, Any] = {}
    for event in script.happened:
        if isinstance(event, Confirmed):
            found |= dict.fromkeys(event.tokens, event.outcome)
        elif isinstance(event, Settled):
            found |= dict(event.pairs)
    script.happened.clear()
    return found


def row(body: bytes, token: Any = None) -> Any:
    return make_row(body, "a", None, None, None, None, token or body)


def sent_bodies(script: Script, kind: type[Any]) -> list[list[bytes]]:
    return [
        bodies_of(Content(frames[0])) for command, frames in script.heard if type(command) is kind
    ]


def warnings(script: Script) -> list[str]:
    """Lines for the log since the last call, once the time of gathering is over."""
    script.wait(0)
    script.wait(GATHER_MS)
    found = [event.message for event in script.happened if isinstance(event, Warned)]
    script.happened = [event for event in script.happened if not isinstance(event, Warned)]
    return found


def accept(script: Script, kind: type[Any] = c.OpenInbox) -> list[c.Command]:
    return script.say(c.Subscribed(script.last(kind).subscription, b"", 1, 0, 0, 0))


def confirm(script: Script, command: Any, offset: int = 0) -> list[c.Command]:
    return script.say(c.Confirm(command.tracker, 3, 1, offset, 1))


def ask_about(script: Script, token: str, command: type[Any] = c.StreamInfo, **more: Any) -> None:
    script.session.request(lambda number: command(number, token, **more), token)
