"""Commands and their frames, cut into messages within the broker's limits.

Owns the messages of one turn. The rules: commands leave in the order in which they were put; those
of a step share a message; a command that no message can carry fails by itself. Source: SPEC.md,
section 2.

Words: a message is a list of frames: one of its commands, and one for each content that a command
owns. A unit is what may leave by itself: a command, or ATOMIC with the parts of its step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from malamute_protocol.commands import Atomic, Command
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.framing import check_command, encode_message
from malamute_protocol.limits import DEFAULT_LIMITS

_MESSAGE_BYTES: Final = 1 << 20
"""Size at which a message is closed and the next begun: it bounds what a burst holds back."""
_FRAME_BYTES_MAX: Final = DEFAULT_LIMITS.command_frame_bytes_max
_FRAMES_MAX: Final = DEFAULT_LIMITS.message_frames_max


class OutgoingMessages:
    """Commands and their frames, cut into messages within the broker's limits."""

    def __init__(self) -> None:
        self.commands_max = 1
        """Commands in a message; until a welcome has said how many, HELLO leaves alone."""
        self.unsendable: list[tuple[list[Command], LocalProtocolError]] = []
        """The commands that no message can carry, each with the parts of its step, and why."""
        self._suspect: Callable[[list[Command]], Command] | None = None
        self._commands: list[Command] = []
        """Commands of the message that is being filled."""
        self._frames: list[Any] = []
        """Contents of these commands, with `_bytes` in all."""
        self._bytes = 0
        self._messages: list[list[Any]] = []
        """Frames of each message that is ready."""

    def bound(self, commands_max: int) -> None:
        """Take the bound of commands in a message that WELCOME states.

        The commands take a frame of their own, beside one for the content of each.
        """
        self.commands_max = min(commands_max, _FRAMES_MAX - 1)

    def begin(self, suspect: Callable[[list[Command]], Command] | None) -> None:
        """Begin a turn's messages.

        suspect: None: commands share messages. Else each unit leaves by itself, followed by a
        message of the PING that suspect(unit) returns, whose PONG tells that the broker took it.
        """
        self._suspect = suspect

    def put(self, command: Command, content: Any) -> None:
        """Add a command, and its content frame if it has one."""
        self._commands.append(command)
        if content is not None:
            self._frames.append(content)
            self._bytes += len(content)
        if self._bytes >= _MESSAGE_BYTES or len(self._commands) >= self.commands_max:
            self._cut()

    def put_together(self, commands: list[Command], contents: list[Any]) -> None:
        """Add commands that must share a message, and the content frames that they own."""
        if len(self._commands) + len(commands) > self.commands_max:
            self._cut()
        self._commands += commands
        self._frames += contents
        self._bytes += sum(map(len, contents))
        if self._bytes >= _MESSAGE_BYTES or len(self._commands) >= self.commands_max:
            self._cut()

    def finish(self) -> list[list[Any]]:
        """Take out all messages of the turn, in order, to be sent."""
        if self._commands:
            self._cut()
        messages, self._messages = self._messages, []
        return messages

    def _cut(self) -> None:
        """Encode what was gathered as one message, or as several that keep the limits.

        A unit that no message can carry goes into `unsendable`; the others leave all the same.
        """
        commands, frames = self._commands, self._frames
        if not commands:
            return
        self._commands, self._frames, self._bytes = [], [], 0
        if self._suspect is not None:
            # One of the commands is suspected to end links: each unit is followed by a PING.
            for unit, contents in _units(commands, frames):
                if self._made_one(unit, contents):
                    ping = self._suspect(unit)
                    self._messages.append(encode_message([ping]))
                else:
                    self._fails(unit)
        elif not self._made_one(commands, frames):
            self._make_of_halves(_units(commands, frames))

    def _made_one(self, commands: list[Command], frames: list[Any]) -> bool:
        """Make one message of these; False: it cannot be, or would be too long."""
        try:
            message = encode_message(commands, frames)
        except Exception:  # noqa: BLE001 - which command it is, and why, is found one by one
            return False
        frame_of_commands = message[0]
        if len(frame_of_commands) > _FRAME_BYTES_MAX:
            return False
        self._messages.append(message)
        return True

    def _make_of_halves(self, units: list[tuple[list[Command], list[Any]]]) -> None:
        """Make messages of halves of these units, which did not fit in one together.

        It goes down to single units, which cannot be sent at all.
        """
        if len(units) == 1:
            [(unit, _)] = units
            self._fails(unit)
            return
        for half in (units[: len(units) // 2], units[len(units) // 2 :]):
            commands = [command for unit, _ in half for command in unit]
            if not self._made_one(commands, [frame for _, frames in half for frame in frames]):
                self._make_of_halves(half)

    def _fails(self, commands: list[Command]) -> None:
        """Note commands that no message can carry, with the error for their callers.

        It is what is wrong with one of them, or their length together.
        """
        try:
            for command in commands:
                check_command(command)
            fault = f"{len(commands)} commands that must share a message are too long for one"
            error = LocalProtocolError("too_large", fault)
        except LocalProtocolError as found:
            error = found
        self.unsendable.append((commands, error))


def _units(commands: list[Command], frames: list[Any]) -> list[tuple[list[Command], list[Any]]]:
    """Return commands divided into units (a command, or a step with its parts), with their frames.

    frames: the contents of all commands, in their order.
    """
    found: list[tuple[list[Command], list[Any]]] = []
    next_command = next_frame = 0
    while next_command < len(commands):
        command = commands[next_command]
        count = 1 + (command.count if type(command) is Atomic else 0)  # ATOMIC and its parts
        unit = commands[next_command : next_command + count]
        owned = sum(part.content_frames for part in unit)
        found.append((unit, frames[next_frame : next_frame + owned]))
        next_command += count
        next_frame += owned
    return found
