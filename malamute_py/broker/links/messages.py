"""Messages: the commands of an outbox, cut to what a peer takes.

Owns the cuts. The rule: commands leave in their order, each with its frames, and a message has no
more commands, frames and bytes of commands than a peer takes. A command alone is not cut, and none
is over a bound: a DELIVER has some hundreds of frames (portion.py), a larger RESULT is refused
(answers.py), and a MAIL names a bounded number of requests (telling.py). Source: SPEC.md, sections
3 and 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from malamute_protocol.commands import Command
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from malamute_py.broker.ready import Send

COMMAND_BYTES_MAX: Final = DEFAULT_LIMITS.command_frame_bytes_max
"""Bytes of a message's frame of commands that a peer takes."""


def message_bounds(limits: Limits) -> tuple[int, int]:
    """Return how many commands, and content frames, a message to a peer has at most.

    limits: the broker's own, for what it is sent. No peer is told that they are higher than the
    protocol's defaults, which peers take.
    """
    commands_max = min(limits.message_commands_max, DEFAULT_LIMITS.message_commands_max)
    frames_max = min(limits.message_frames_max, DEFAULT_LIMITS.message_frames_max)
    return commands_max, frames_max - 1  # The commands have a frame of their own.


def split(
    number: int, commands: Sequence[Command], frames: Sequence[Any], commands_max: int,
    frames_max: int,
) -> list[Send]:  # fmt: skip
    """Cut an outbox into messages within both limits; a command stays with its frames.

    number: of the link. A command that has more frames than the limit makes a message alone.
    """
    sends: list[Send] = []
    # The message at hand begins with command `first` and frame `first_frame`; `frame` is the first
    # one of the command that is looked at.
    first = frame = first_frame = 0
    for place, command in enumerate(commands):
        owned = command.content_frames
        full = place - first >= commands_max or frame + owned - first_frame > frames_max
        if full and place > first:
            sends.append(Send(number, commands[first:place], frames[first_frame:frame]))
            first, first_frame = place, frame
        frame += owned
    sends.append(Send(number, commands[first:], frames[first_frame:]))
    return sends


def halves(send: Send) -> list[Send]:
    """Cut a message into two, since its commands have more bytes than a peer takes.

    Called once they are encoded: RESULTs of some hundred kilobytes may have become one message.
    None is returned for a single command.
    """
    count = len(send.commands)
    if count == 1:
        return []
    return split(send.link, send.commands, send.frames, -(-count // 2), len(send.frames))
