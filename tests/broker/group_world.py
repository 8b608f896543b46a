"""Members of groups over the fake shell: what a test of groups says in one line each."""

from __future__ import annotations

from typing import Any

from malamute_protocol import commands as wire
from malamute_py.changelog.records import GroupDone, decode_change
from malamute_py.journal.layout import control_bodies
from tests.broker.shell import Peer, Shell, offsets

M = 5
"""The number of each member's membership on its link."""
MUCH = 1 << 40


def world(**settings: Any) -> Shell:
    shell = Shell(**settings)
    shell.hello(1)
    return shell


def join(
    shell: Shell, link: int, kind: str = "shared", *, group: str = "g", pattern: Any = None,
    start: Any = (0,), credit: int = MUCH, hello: bool = True, **fields: Any,
) -> Peer:  # fmt: skip
    if hello:
        shell.hello(link)
    return shell.send(
        link,
        wire.JoinGroup(
            M, "s", group, pattern or ["all"], kind, list(start), credit, 1 << 50, **fields
        ),
    )


def publish(shell: Shell, count: int, **options: Any) -> None:
    shell.publish(1, "s", [b"%d" % n for n in range(count)], **options)


def ack(shell: Shell, link: int, *ranges: tuple[int, int], tracker: int = 9, **fields: Any) -> Any:
    """CONFIRM, the code of REFUSED, or None."""
    peer = shell.peers[link]
    before = len(peer.commands)
    shell.send(link, wire.AckRecords(M, list(ranges), tracker, **fields))
    for answer in peer.commands[before:]:
        if isinstance(answer, wire.Confirm):
            return answer
        if isinstance(answer, wire.Refused):
            assert answer.command == 64
            return answer.code
    return None


def nack(shell: Shell, link: int, *ranges: tuple[int, int], **fields: Any) -> Any:
    """Give records back."""
    return ack(shell, link, *ranges, again_ms=fields.pop("again_ms", 0), **fields)


def bounded(shell: Shell, link: int, kind: str = "shared", most: int = 2, **more: Any) -> Any:
    """Let a link join a group whose records have so many attempts."""
    settings = {"attempts_max": most, **more.pop("settings", {})}
    return join(shell, link, kind, settings=settings, **more)


def attempts(shell: Shell, link: int) -> list[tuple[int, int]]:
    """Return (offset, attempts) of each record that a member was delivered."""
    return [
        (int(body), command.attempts)
        for command, bodies in shell.peers[link].told
        if isinstance(command, wire.Deliver)
        for body in bodies
    ]


def got(shell: Shell, link: int) -> list[int]:
    return offsets(shell.peers[link], M)


def info(shell: Shell, group: str = "g") -> dict[str, Any]:
    answer = shell.send(1, wire.GroupInfo(3, "s", group)).commands[-1]
    assert isinstance(answer, wire.Result), answer
    return answer.value


def events(shell: Shell, name: str) -> list[dict[str, Any]]:
    return [event.facts for event in shell.events if event.name == name]


def lose(shell: Shell, link: int) -> None:
    shell.broker.link_lost(link, shell.now_ms)
    shell.run()


def dones(shell: Shell) -> list[GroupDone]:
    """The GroupDone records of the log."""
    return [
        change
        for held in shell.rings["main"]
        if held.control_kind == 6
        for body in control_bodies(held.data[96:])
        if isinstance(change := decode_change(body), GroupDone)
    ]
