"""Messages to a peer: the commands of an outbox within what a client takes."""

from __future__ import annotations

import pytest

from malamute_protocol.commands import Command, Deliver, Ping
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from malamute_py.broker.links.messages import halves, message_bounds, split
from malamute_py.broker.ready import Send
from tests.broker.shell import Shell


@pytest.mark.parametrize("most", [10, DEFAULT_LIMITS.message_commands_max, 100_000])
def test_a_client_gets_no_more_commands_in_a_message_than_it_takes(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    shell = Shell(limits=Limits(message_commands_max=most, message_frames_max=most))
    shell.hello(1)
    links, sent = shell.broker._links, []
    link = next(iter(links))
    for token in range(5_000):
        links.say(link, Ping(token))
    sent = [len(send.commands) for send in links.outgoing()[0]]
    assert sum(sent) == 5_000
    assert max(sent) == min(most, DEFAULT_LIMITS.message_commands_max)


def test_frames_stay_with_their_commands_and_a_command_over_the_limit_leaves_alone() -> None:
    commands: list[Command] = [Deliver(number, 0, 1, number) for number in (2, 5, 1, 1)]
    frames = [number for number in (2, 5, 1, 1) for _ in range(number)]
    sends = split(1, commands, frames, 100, 3)
    assert [(send.commands, send.frames) for send in sends] == [
        ([commands[0]], [2, 2]), ([commands[1]], [5] * 5), (commands[2:], [1, 1]),
    ]  # fmt: skip


def test_a_message_is_halved_until_one_command_is_left() -> None:
    commands: list[Command] = [Deliver(number, 0, 1, number) for number in (1, 2, 0)]
    whole = Send(7, commands, ["a", "b", "c"])
    first, second = halves(whole)
    assert first == Send(7, commands[:2], ["a", "b", "c"])
    assert second == Send(7, commands[2:], [])
    assert halves(second) == []
    assert message_bounds(DEFAULT_LIMITS) == (4_096, 4_095)
