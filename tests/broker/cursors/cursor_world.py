"""A stream with ten records and two links, of which one moves, edits and looks at a cursor."""

from __future__ import annotations

from typing import Any

from malamute_protocol import commands as wire
from tests.broker.shell import Peer, Shell

ME = 2


def world(**settings: Any) -> Shell:
    shell = Shell(**settings)
    shell.hello(1)
    shell.hello(ME)
    shell.publish(1, "s", [b"x"] * 10)
    return shell


def move(shell: Shell, next: int, tracker: int = 7, **fields: Any) -> Any:
    """Move the cursor; returns the CONFIRM, or the code of the REFUSED."""
    peer = shell.send(ME, wire.MoveCursor("s", "c", next, tracker, **fields))
    answer = peer.commands[-1]
    if isinstance(answer, wire.Refused):
        assert (answer.command, answer.reference) == (60, tracker)
        return answer.code
    assert isinstance(answer, wire.Confirm)
    assert answer.tracker == tracker
    return answer


def info(shell: Shell, cursor: str = "c", stream: str = "s") -> dict[str, Any]:
    peer = shell.send(ME, wire.CursorInfo(3, stream, cursor))
    answer = peer.commands[-1]
    assert isinstance(answer, wire.Result), answer
    return answer.value


def events(shell: Shell, name: str) -> list[dict[str, Any]]:
    return [event.facts for event in shell.events if event.name == name]


def edit(shell: Shell, start: Any = (), **settings: Any) -> Peer:
    return shell.send(ME, wire.EditCursor(4, "s", "c", settings, list(start)))


def trim(shell: Shell, first: int, stream: str = "s") -> None:
    found = shell.stream(stream)
    shell.firsts[found.number] = first
    shell.broker.trimmed(found.ring.name, {found.number: first})
    shell.run()
