"""The vectors of messages: every command with every field set, and what a message may have wrong.

Owns these vectors, and the form in which JSON has the values of all vectors. The rule: expected
values are the inputs, never read back by our own reader. Source: SPEC.md, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack

from malamute_protocol import commands as c
from malamute_protocol.commands import Command
from malamute_protocol.framing import COMMANDS, encode_message
from vectors.examples import EXAMPLES, STEP, UUID

Vector = dict[str, Any]


def plain(value: Any) -> Any:
    """Return a value in the form that JSON can have: bytes and large integers become objects."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 53:
        return {"int": str(value)}
    return value


def wire_name(command: type[Command]) -> str:
    """Return a command's name as SPEC.md writes it: OPEN_PRODUCER for OpenProducer."""
    name = command.__name__
    return "".join(f"_{x}" if x.isupper() and i else x for i, x in enumerate(name)).upper()


def shown(command: Command, frames: list[int]) -> Vector:
    """Return a command as the vector shows it. frames: places of its content frames."""
    kind = type(command)
    fields = {name.rstrip("_"): plain(getattr(command, name)) for name in kind.__struct_fields__}
    number = next(n for n, other in COMMANDS.items() if other is kind)
    return {"number": number, "name": wire_name(kind), "fields": fields, "frames": frames}


def messages() -> Iterator[Vector]:
    """List every command with every field set, then the ways in which a message may go wrong."""

    def whole(name: str, commands: list[Command]) -> Vector:
        """Return the vector of a right message of these commands, with made-up content frames."""
        contents: list[bytes] = []
        owners = []
        for command in commands:
            owned = range(len(contents) + 1, len(contents) + 1 + command.content_frames)
            owners.append(list(owned))
            contents += [b"content %d" % place for place in owned]
        return {
            "name": name,
            "frames": [bytes(f).hex() for f in encode_message(commands, contents)],
            "commands": [shown(x, o) for x, o in zip(commands, owners, strict=True)],
        }

    def raw(name: str, parts: list[Any], commands: list[Command]) -> Vector:
        """Return the vector of a right message in bytes that our own encoder would not make."""
        return {
            "name": name,
            "frames": [part.hex() for part in parts],
            "commands": [shown(command, []) for command in commands],
        }

    def wrong(name: str, *parts: Any, error: str = "malformed", **more: Any) -> Vector:
        """Return the vector of a message that a reader has to refuse. parts: its frames."""
        frames = [p if isinstance(p, bytes) else msgpack.packb(p) for p in parts]
        return {"name": name, "frames": [frame.hex() for frame in frames], "error": error, **more}

    assert {type(command) for command in (*EXAMPLES, *STEP)} == set(COMMANDS.values())
    for command in EXAMPLES:
        yield whole(f"{wire_name(type(command))} with every field", [command])
    yield whole(
        "several commands with their frames in order",
        [c.Credit(1, 5, 6), c.Publish("a", 1), c.Deliver(1, 0, 9, 3), c.Ping(), c.Publish("b", 2)],
    )
    yield whole("a deliver of no frames", [c.Deliver(1, 0, 9, 0)])
    yield whole("ATOMIC with every part that it may have, and a command behind it", STEP)
    yield whole(
        "two steps in one message", [c.Atomic(1, 1), STEP[1], c.Atomic(2, 2), STEP[2], STEP[8]]
    )
    yield whole(
        "mail, work and its receipt in one message",
        [c.Mail(2, "a", 1, 1), c.Work(3, "a", "b", 0, 1, 1, 2), c.Mail(2, "a", 1, 2)],
    )
    yield whole(
        "fields at their bounds",
        [
            c.Send("s", 1, 0, b"k" * 128, 1 << 53, -128),
            c.AckWork(1, [(0, 1 << 20)], 1, 0, 0, 1 << 53, "é" * 1024),
            c.AckMail(1, [(n, n + 1) for n in range(10)], again_ms=0),
            c.MoveCursor("s", "c", 0, 1),
        ],
    )
    yield raw(
        "trailing defaults left off",
        [msgpack.packb([[3], [5], [15, 1, 2]])],
        [c.Ping(), c.Bye(), c.Ended(1, 2)],
    )
    yield raw(
        "surplus fields are ignored",
        [msgpack.packb([[3, 1, {"x": [None]}, b"", 2.5]])],
        [c.Ping(1)],
    )
    yield raw(
        "integers, strings and arrays in their longest forms",
        [
            bytes.fromhex(
                "dd00000001 dc0007 cf000000000000000d cf0000000000000001 c600000010"
                "00112233445566778899aabbccddeeff d3000000000000000f cd0001 d200000002 d1fff0"
            )
        ],
        [c.Subscribed(1, bytes.fromhex("00112233445566778899aabbccddeeff"), 15, 1, 2, -16)],
    )
    yield wrong("no frame 0", b"")
    yield wrong("not MessagePack", b"\xc1")
    yield wrong("bytes behind the array", msgpack.packb([[3]]) + b"\x00")
    yield wrong("a cut array", msgpack.packb([[3, 1], [3, 2]])[:-1])
    yield wrong("not an array", {"a": 1})
    yield wrong("no commands", [])
    yield wrong("a command that is no array", [3])
    yield wrong("a command without a number", [[]])
    yield wrong("a command's number as a string", [["3"]])
    yield wrong("an unknown command", [[3, 1], [99, 1]])
    yield wrong("number 0", [[0]])
    yield wrong("a field that is missing", [[16, 1, 2]])
    yield wrong("an integer as float", [[3, 1.0]], lenient=True)
    yield wrong("an integer as boolean", [[3, True]])
    yield wrong("a string as bin", [[14, b"1"]])
    yield wrong("bin as a string", [[1, [1, 1], "0123456789abcdef"]])
    yield wrong("a pair of three", [[1, [1, 1, 1], UUID]])
    yield wrong("a string that is not UTF-8", b"\x91\x92\x05\xa2\xc3\x28", lenient=True)
    yield wrong("an extension type", [[12, 1, "s", [msgpack.ExtType(1, b"x")], [0]]])
    yield wrong("a timestamp", [[12, 1, "s", [msgpack.Timestamp(1)], [0]]])
    yield wrong("a map whose key is no string", [[30, 1, "s", {1: 2}]])
    yield wrong("nesting without end", b"\x91" * 5000)
    deep: Any = ["all"]
    for _ in range(40):
        deep = ["not", deep]
    yield wrong("nesting of 41 in a field", [[12, 1, "s", deep, [0]]])
    yield wrong("a content frame is missing", [[10, "s", 1]])
    yield wrong("a content frame too many", [[3]], b"x")
    yield wrong("frames below zero", [[17, 1, 0, 1, -1]])
    yield wrong("more frames than there are", [[17, 1, 0, 1, 3]], b"a", b"b")
    yield wrong("4097 commands", [[3]] * 4097, error="too_large")
    yield wrong("no ranges", [[43, 1, []]])
    yield wrong("an empty range", [[43, 1, [[1, 2], [5, 5]]]])
    yield wrong("a range that falls", [[53, 1, [[5, 4]], 1]])
    yield wrong("ranges that overlap", [[64, 1, [[1, 5], [4, 6]]]])
    yield wrong("ranges that descend", [[64, 1, [[5, 6], [1, 2]]]])
    yield wrong("a range below 0", [[43, 1, [[-1, 2]]]])
    yield wrong("a range of three", [[43, 1, [[1, 2, 3]]]])
    yield wrong(
        "ranges of more than 1048576 numbers", [[43, 1, [[0, 1 << 19], [1 << 20, 1 << 21]]]]
    )
    yield wrong("a key of 129 bytes", [[40, "s", 1, 0, b"k" * 129]], b"c", error="too_large")
    yield wrong(
        "a reason of 1025 characters",
        [[53, 1, [[1, 2]], 4, 0, 0, 0, "é" * 1025]],
        error="too_large",
    )
    yield wrong("a priority of 128", [[40, "s", 1, 0, b"", 0, 128]], b"c")
    yield wrong("a time below 0", [[40, "s", 1, 0, b"", -1]], b"c")
    yield wrong("a timeout beyond 2^53", [[50, "s", 1, "", (1 << 53) + 1]], b"c")
    yield wrong("a redelivery after -2", [[43, 1, [[1, 2]], 0, 0, -2]])
    yield wrong("a state of work that is none", [[53, 1, [[1, 2]], 7]])
    yield wrong("a cursor below 0", [[60, "s", "c", -1, 1]])
    yield wrong("mail without its frames", [[42, 1, "a", 1, 2]], b"c")
    yield wrong("a reply that is about a string", [[42, 1, "a", 1, 0, None, [["k", 0, 1]]]])
    yield wrong("a step of no parts", [[66, 1, 0]])
    yield wrong("a step whose parts are missing", [[66, 1, 2], [64, 1, [[1, 2]]]])
    yield wrong("a step of what cannot be a part", [[66, 1, 1], [3]])
    yield wrong("a step within a step", [[66, 1, 2], [66, 0, 1], [64, 1, [[1, 2]]]])
    yield wrong("a part with a tracker of its own", [[66, 1, 1], [64, 1, [[1, 2]], 5]])
    yield wrong("a part that only tells of the receipt", [[66, 1, 1], [53, 1, [[1, 2]], 1]])
