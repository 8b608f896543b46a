"""Framing: commands and their content frames to and from one ZeroMQ message.

Owns frame 0, the MessagePack array of commands, and the count of frames that follow it.
The rule: a message is understood whole or not at all, and an error names what is wrong
and where. Source: SPEC.md, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, get_args, get_type_hints

import msgspec

from malamute_protocol.commands import (
    STEP_PARTS,
    AckWork,
    AnyCommand,
    Atomic,
    Command,
    Result,
    WorkState,
)
from malamute_protocol.errors import LocalProtocolError, RemoteProtocolError
from malamute_protocol.header import ENCODER, OVER_LENGTH, SHORT_ARRAY, claimed_length
from malamute_protocol.limits import DEFAULT_LIMITS, ELEMENTS_MAX, Limits

COMMANDS: Final[dict[int, type[Command]]] = {
    command.__struct_config__.tag: command for command in get_args(AnyCommand)
}
"""Command type by number."""
NUMBERS: Final[dict[type[Command], int]] = {command: n for n, command in COMMANDS.items()}
"""Number by command type."""

_decoder: Final = msgspec.msgpack.Decoder(list[AnyCommand])
_one_decoders: Final[dict[type[Command], msgspec.msgpack.Decoder[Any]]] = {
    command: msgspec.msgpack.Decoder(command) for command in COMMANDS.values()
}
_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})


def _any_value_fields(command: type[Command]) -> tuple[str, ...]:
    """Return the fields that may hold anything, whose depth and keys no decoder checks.

    Asked once for each command, as this module is loaded.
    """
    hints = get_type_hints(command)
    return tuple(name for name in command.__struct_fields__ if "Any" in str(hints[name]))


_ANY_VALUE_FIELDS: Final[dict[type[Command], tuple[str, ...]]] = {
    command: names for command in COMMANDS.values() if (names := _any_value_fields(command))
}
"""The fields of each command that _any_value_fields() returns, of commands that have some."""


def encode_message(commands: Sequence[Command], frames: Sequence[Any] = ()) -> list[Any]:
    """Return the frames of one message: the commands, then their content frames as they are.

    Raises LocalProtocolError when the commands own another number of frames than given.
    """
    owned = 0
    for command in commands:
        owned += command.content_frames
    if owned != len(frames) or not commands:
        raise LocalProtocolError(
            "malformed", f"{len(commands)} commands own {owned} frames, not {len(frames)}"
        )
    return [ENCODER.encode(commands), *frames]


def check_command(command: Command, limits: Limits = DEFAULT_LIMITS) -> Command:
    """Return the command as a peer that gets it will read it; for a client, before it is queued.

    Raises LocalProtocolError, which names the field: a peer would not understand the command.
    """
    name = type(command).__name__
    try:
        data = ENCODER.encode(command)
    except Exception as error:  # Any error that the value of a field raises.
        fault = f"{name}: {_unencodable(command)}: {error}"
        raise LocalProtocolError("malformed", fault) from error
    if len(data) >= limits.command_frame_bytes_max:  # The array around it takes a byte, too.
        fault = f"{name}: {len(data)} bytes, at most {limits.command_frame_bytes_max - 1}"
        raise LocalProtocolError("too_large", fault)
    try:
        read: Command = _one_decoders[type(command)].decode(data)
        for field in _ANY_VALUE_FIELDS.get(type(command), ()):
            value = getattr(read, field)
            _check_nesting(value, limits.nesting_max, place=0, command=read, name=field)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fault = _name_fields(type(command), error)
        raise LocalProtocolError(_code(fault), f"{name}: {fault}") from error
    except RemoteProtocolError as error:
        raise LocalProtocolError(error.code, error.reason) from error
    return read


def reference_of(command: Command) -> int:
    """Return the number that an answer to a command names: tracker, subscription, request, or 0."""
    for name in ("tracker", "request", "subscription"):
        found: int | None = getattr(command, name, None)
        if found is not None:
            return found
    return 0


def _unencodable(command: Command) -> str:
    """Return name and value of the field of a command that cannot be encoded, for an error."""
    for field in command.__struct_fields__:
        value = getattr(command, field)
        try:
            ENCODER.encode(value)
        except Exception:  # noqa: BLE001 - which field it is, is what is asked
            # `from_` is a field's name where Python has a word of the same name.
            return f"{field.rstrip('_')}={value!r:.60}"
    return "a field"


def decode_message(
    frames: Sequence[Any], limits: Limits = DEFAULT_LIMITS
) -> list[tuple[Command, tuple[Any, ...]]]:
    """Return each command of a message with the content frames that it owns.

    Raises RemoteProtocolError, and nothing else, whatever the frames are: `malformed`, or
    `too_large` for a count or size over its limit.
    """
    if not frames:
        raise RemoteProtocolError("malformed", "a message without frames")
    first = frames[0]
    if len(first) > limits.command_frame_bytes_max:
        raise RemoteProtocolError(
            "too_large",
            f"a command frame of {len(first)} bytes, at most {limits.command_frame_bytes_max}",
        )
    if len(frames) > limits.message_frames_max:
        raise RemoteProtocolError(
            "too_large", f"{len(frames)} frames in a message, at most {limits.message_frames_max}"
        )
    # Before they are parsed: bytes that a peer claims to send must cost no more than it may send.
    # A MessagePack array of up to 15 has its length in its first byte.
    small = first and first[0] & 0xF0 == SHORT_ARRAY
    claimed = first[0] & 0x0F if small else claimed_length(first)
    if claimed > limits.message_commands_max:
        raise RemoteProtocolError(
            "too_large",
            f"{claimed} commands in a message, at most {limits.message_commands_max}",
        )
    try:
        commands = _decoder.decode(first)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = _explain(first, error)
        raise RemoteProtocolError(_code(reason), reason) from error
    if not commands:
        raise RemoteProtocolError("malformed", "a message without commands")
    # The content frames follow frame 0 in the order of the commands that own them.
    result: list[tuple[Command, tuple[Any, ...]]] = []
    position, end = 1, len(frames)
    for place, command in enumerate(commands):
        free = _ANY_VALUE_FIELDS.get(type(command))
        if free is not None:
            for name in free:
                _check_nesting(getattr(command, name), limits.nesting_max, place, command, name)
        if type(command) is Atomic:
            _check_step(commands, place, command)
        owned = command.content_frames
        if owned == 0:
            result.append((command, ()))
            continue
        if owned < 0 or position + owned > end:
            raise RemoteProtocolError(
                "malformed",
                f"command {place} ({type(command).__name__}) owns {owned} content frames, "
                f"{end - position} are left",
            )
        result.append((command, tuple(frames[position : position + owned])))
        position += owned
    if position != end:
        raise RemoteProtocolError("malformed", f"{end - position} content frames without a command")
    return result


def _check_nesting(value: Any, most: int, place: int, command: Command, name: str) -> None:
    """Raise RemoteProtocolError where the value of a command's field nests deeper than `most`.

    place: of the command in its message. name: of the field, which may have any value by its type.
    The walk is level by level, so that no peer chooses how deep this code recurses.
    """
    level: list[Any] = [value]
    elements = 0
    for _ in range(most + 1):
        following: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is list:
                following.extend(item)
            elif kind is dict:
                following.extend(_map_items(item, place, command, name))
            elif kind not in _SCALARS:
                raise RemoteProtocolError(
                    "malformed",
                    f"command {place} ({type(command).__name__}): `{name}` holds an extension type",
                )
        if not following:
            return
        elements += len(following)
        # Only a broker answers with more: a client's commands are small.
        if elements > ELEMENTS_MAX and type(command) is not Result:
            raise RemoteProtocolError(
                "too_large",
                f"command {place} ({type(command).__name__}): `{name}` holds more than "
                f"{ELEMENTS_MAX} elements",
            )
        level = following
    raise RemoteProtocolError(
        "malformed",
        f"command {place} ({type(command).__name__}): `{name}` nests deeper than {most}",
    )


def _check_step(commands: Sequence[Command], place: int, step: Atomic) -> None:
    """Raise RemoteProtocolError unless a step's parts follow it, and each may be a part.

    A part has no tracker, since the step alone is answered. place: of the ATOMIC in its message.
    """
    parts = commands[place + 1 : place + 1 + step.count]
    fault = ""
    if len(parts) < step.count:
        fault = f"{step.count} parts, {len(parts)} commands follow"
    for part in parts:
        if type(part) not in STEP_PARTS:
            fault = f"{type(part).__name__} cannot be a part"
        elif part.tracker:  # type: ignore[attr-defined]  # each of STEP_PARTS has one
            fault = f"{type(part).__name__} with a tracker of its own"
        elif type(part) is AckWork and part.state < WorkState.COMPLETED:
            # A worker's sign of life changes nothing that a step could undo.
            fault = f"ACK_WORK of state {part.state} cannot be a part"
    if fault:
        raise RemoteProtocolError("malformed", f"command {place} (Atomic): {fault}")


def _map_items(value: dict[Any, Any], place: int, command: Command, name: str) -> Iterable[Any]:
    """Return the values of a map. Raises RemoteProtocolError for a key that is no string.

    place: of the command in its message. name: of the field, for the error.
    """
    if not all(type(key) is str for key in value):
        raise RemoteProtocolError(
            "malformed",
            f"command {place} ({type(command).__name__}): a map in `{name}` has a key that is "
            "no string",
        )
    return value.values()


def _code(reason: str) -> str:
    """Return the error's code for what msgspec found: a length over its limit, or the grammar."""
    return "too_large" if OVER_LENGTH in reason else "malformed"


def _explain(frame: Any, error: Exception) -> str:
    """Say what is wrong in a frame 0 that did not decode, by decoding it piece by piece.

    Only errors pay for this look.
    """
    if isinstance(error, RecursionError):
        return "the command frame nests too deep"
    try:
        raw = msgspec.msgpack.decode(frame, type=list[msgspec.Raw])
        for place, data in enumerate(raw):
            try:
                parts = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
                number = msgspec.msgpack.decode(parts[0], type=int)
            except (msgspec.MsgspecError, IndexError):
                return f"command {place} is not an array that starts with a number"
            command = COMMANDS.get(number)
            if command is None:
                return f"command {place} has the unknown number {number}"
            try:
                msgspec.msgpack.decode(data, type=command)
            except msgspec.MsgspecError as reason:
                return f"command {place} ({command.__name__}): {_name_fields(command, reason)}"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as reason:
        return f"frame 0 is not a MessagePack array of commands: {reason}"
    return f"frame 0: {error}"


def _name_fields(command: type[Command], reason: Exception) -> str:
    """Return the text of msgspec's error with fields named, which it counts, `$[0]` the number."""
    text = str(reason)
    for place, name in enumerate(command.__struct_fields__, 1):
        text = text.replace(f"`$[{place}]", f"`{name.rstrip('_')}")
    return text
