"""SPEC.md and the code agree: commands, states, errors, limits, layouts, bits."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from malamute_protocol import commands as c
from malamute_protocol import content_layout
from malamute_protocol import stamp as stamp_module
from malamute_protocol.codec import CODECS
from malamute_protocol.commands import Command
from malamute_protocol.errors import CODES
from malamute_protocol.framing import COMMANDS
from malamute_protocol.limits import (
    ELEMENTS_MAX,
    KEY_BYTES_MAX,
    NUMBERS_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    RANGES_MAX,
    REASON_BYTES_MAX,
    REQUEST_PRIORITY_MAX,
    RUNS_MAX,
    SETTINGS_MAX,
    TIME_MAX,
    Limits,
)
from malamute_protocol.link import (
    BROKER_COMMANDS,
    CLIENT_COMMANDS,
    CONTENT_COMMANDS,
    TRANSITIONS,
    Side,
    State,
)
from malamute_protocol.pattern import CRITERIA_MAX, DEPTH_MAX, NODES_MAX, REGEX_BYTES_MAX
from malamute_protocol.version import Feature
from malamute_py.changelog.settings import (
    CursorSettings,
    GroupSettings,
    MailboxSettings,
    ServiceSettings,
    StreamSettings,
)

ROOT = Path(__file__).parents[2]
SPEC = (ROOT / "protocol" / "SPEC.md").read_text()

TYPES = {
    "int": "int",
    "str": "str",
    "bin": "bytes",
    "bool": "bool",
    "map": "dict[str, Any]",
    "array": "list[Any]",
    "[int]": "list[int]",
    "[int, int]": "tuple[int, int]",
    "[[int, int]]": "list[tuple[int, int]]",
    "[[int, bin]]": "list[tuple[int, bytes]]",
    "[[bin, int, int]]": "list[tuple[bytes, int, int]]",
    "bin or nil": "bytes | None",
    "[int, int] or nil": "tuple[int, int] | None",
    "str or nil": "str | None",
    "[int, int, bin] or nil": "tuple[int, int, bytes] | None",
    "[str, str, int, [int]] or nil": "tuple[str, str, int, list[int]] | None",
}
DEFAULTS: dict[str, Any] = {
    '""': "",
    'b""': b"",
    "nil": None,
    "true": True,
    "false": False,
    "{}": {},
    "[]": [],
}


def section(number: str) -> str:
    """Return the text of a section, up to the next heading of its level or above."""
    level = "#" * (number.count(".") + 2)
    dot = "" if "." in number else r"\."
    found = re.search(
        rf"^{level} {re.escape(number)}{dot} .*?(?=^#{{2,{len(level)}}} |\Z)",
        SPEC,
        re.MULTILINE | re.DOTALL,
    )
    assert found, number
    return found.group()


def rows(text: str, header: str) -> list[list[str]]:
    """Return the cells of the table that begins with this header row."""
    lines = text[text.index(header) :].splitlines()[2:]
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip()[1:-1].split("|")])
    return table


def wire_name(command: type[Command]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", command.__name__).upper()


BLOCKS = {
    int(m.group(1)): (m.group(2), m.group(3))
    for m in re.finditer(r"^#### (\d+) (\w+)\n(.*?)(?=^#|\Z)", SPEC, re.MULTILINE | re.DOTALL)
}


def test_the_spec_has_every_command_and_no_other() -> None:
    assert {n: name for n, (name, _) in BLOCKS.items()} == {
        n: wire_name(command) for n, command in COMMANDS.items()
    }


@pytest.mark.parametrize("number", sorted(COMMANDS))
def test_a_command_has_the_fields_types_and_defaults_that_the_spec_says(number: int) -> None:
    command = COMMANDS[number]
    hints = get_type_hints(command)
    table = rows(BLOCKS[number][1], "| Field | Type | Default | Meaning |")
    fields = msgspec.structs.fields(command)
    assert [row[0] for row in table] == [f.name.rstrip("_") for f in fields]
    for (name, kind, default, meaning), field in zip(table, fields, strict=True):
        hint = hints[field.name]
        shown = (
            hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__origin__") else hint
        )
        assert TYPES[kind] == str(shown).replace("typing.", ""), name
        assert meaning
        if not default:
            assert field.required, name
            continue
        text = default.strip("`")
        expected = DEFAULTS.get(text, text.strip("'"))
        actual = field.default
        if actual is msgspec.NODEFAULT:
            actual = field.default_factory() if callable(field.default_factory) else actual
        assert expected == (str(actual) if isinstance(expected, str) and actual != "" else actual)


@pytest.mark.parametrize("number", sorted(COMMANDS))
def test_a_command_comes_from_the_side_that_the_spec_says(number: int) -> None:
    command = COMMANDS[number]
    said = re.search(
        r"^From: (\w+)\. Answer: (.+?)\. Permission: (.+)\.$", BLOCKS[number][1], re.MULTILINE
    )
    assert said
    sides = {"client": {Side.CLIENT}, "broker": {Side.BROKER}, "both": {Side.CLIENT, Side.BROKER}}
    assert sides[said.group(1)] == (
        ({Side.CLIENT} if command in CLIENT_COMMANDS else set())
        | ({Side.BROKER} if command in BROKER_COMMANDS else set())
    )
    for answer in re.findall(r"\b[A-Z_]{4,}\b", said.group(2)):
        assert answer in {wire_name(each) for each in BROKER_COMMANDS}
    if "request" in command.__struct_fields__[:1] and command is not c.Result:
        assert "RESULT" in said.group(2)


def test_the_states_of_the_spec_are_the_transitions_of_the_code() -> None:
    table = rows(section("2"), "| State | Client may send | Broker may send |")
    assert [row[0] for row in table] == [state.value for state in State]
    for name, client, broker in table:
        for side, said in ((Side.CLIENT, client), (Side.BROKER, broker)):
            moves = TRANSITIONS[State(name)][side]
            arrows = dict(re.findall(r"([A-Z]+) -> (\w+)", said))
            assert arrows == {
                wire_name(k): v.value for k, v in moves.items() if v is not State(name)
            }
            if "any of its commands" not in said:
                named = set(re.findall(r"[A-Z]{3,}", said))
                assert named == {wire_name(command) for command in moves}
    every = set(CLIENT_COMMANDS) - {c.Hello}
    assert set(TRANSITIONS[State.OPEN][Side.CLIENT]) == every
    assert set(TRANSITIONS[State.GREETED][Side.CLIENT]) == every - set(CONTENT_COMMANDS)
    assert set(TRANSITIONS[State.OPEN][Side.BROKER]) == set(BROKER_COMMANDS) - {c.Welcome}
    form = r"([A-Z_]+(?:, [A-Z_]+)*)\s+and\s+([A-Z]+)\s+wait for WELCOME"
    waiting = re.search(form, section("2"))
    assert waiting
    names = {*re.findall(r"[A-Z_]+", waiting.group(1)), waiting.group(2)}
    assert names == {wire_name(command) for command in CONTENT_COMMANDS}


def test_the_error_codes_are_those_of_the_code() -> None:
    assert dict(rows(section("9"), "| Code | Meaning |")) == CODES


def test_the_guide_says_of_every_code_what_to_do() -> None:
    guide = (ROOT / "docs/guides/troubleshooting.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", guide, re.MULTILINE)
    told = set(re.findall(r"`(\w+)`", "".join(cells)))
    elsewhere = {"not_leader", "moved"}  # No broker sends them yet: SPEC.md, section 14.
    assert told >= CODES.keys() - elsewhere


def test_every_code_that_the_spec_speaks_of_exists() -> None:
    for code in re.findall(r"(?:REFUSED|BYE|refused|ENDED|code)\s+`(\w+)`", SPEC):
        assert code in CODES


def test_the_limits_are_those_of_the_code() -> None:
    assert {name: int(value) for name, value in rows(section("11"), "| Limit | Default |")} == (
        msgspec.structs.asdict(Limits())
    )
    for number in (CRITERIA_MAX, DEPTH_MAX, NODES_MAX, REGEX_BYTES_MAX):
        assert str(number) in section("7")


@pytest.mark.parametrize(
    ("number", "layout", "names"),
    [
        ("5.1", stamp_module._WHOLE, ("magic", "version", "stamp_bytes", "stamp_crc")),
        ("5.2", content_layout.HEAD, ()),
    ],
)
def test_the_fixed_heads_lie_byte_for_byte_where_the_spec_says(
    number: str, layout: struct.Struct, names: tuple[str, ...]
) -> None:
    sizes = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q", "": "16x"}
    position, letters, fields = 0, "<", []
    for at, kind, name, _ in rows(section(number), "| At | Type | Field | Meaning |"):
        assert int(at) == position, name
        letters += sizes[kind]
        position += struct.calcsize("<" + sizes[kind])
        if name:
            fields.append(name)
    assert letters == layout.format
    if number == "5.1":
        stamp = set(stamp_module.Stamp._fields) | set(names)
        assert set(fields) == stamp
    else:
        assert tuple(fields) == content_layout.Head._fields


def test_flags_kinds_codecs_and_bits_are_those_of_the_code() -> None:
    flags = {int(row[0]) for row in rows(section("5.2"), "| Flag | Meaning |")}
    assert sum(flags) == content_layout.CONTENT_FLAGS
    head = section("5.2")
    assert ", ".join(f"{n} {name}" for n, name in enumerate(CODECS)) in head
    for n, name in enumerate(stamp_module.CONTROL_KINDS):
        assert f"{n} {name}" in section("5.1")
    kinds = [row[0] for row in rows(section("5.5"), "| body_kind |")]
    assert kinds == [f"{n} {name}" for n, name in enumerate(content_layout.BODY_KINDS)]
    bits = {
        int(bit): meaning.partition(":")[0]
        for bit, meaning in rows(section("10"), "| Bit | Feature |")
    }
    assert bits == {feature.value: feature.name for feature in Feature}
    levels = {int(row[0]): row[1].upper() for row in rows(section("8"), "| Level | Name |")}
    assert levels == {level.value: level.name for level in c.Level}
    starts = [int(row[0][1]) for row in rows(section("6"), "| Start |")]
    assert starts == [kind.value for kind in c.StartKind]


@pytest.mark.parametrize(
    ("heading", "settings"),
    [
        ("Setting", StreamSettings),
        ("Mailbox setting", MailboxSettings),
        ("Service setting", ServiceSettings),
        ("Cursor setting", CursorSettings),
        ("Group setting", GroupSettings),
    ],
)
def test_the_settings_are_those_of_the_broker(heading: str, settings: type[msgspec.Struct]) -> None:
    table = rows(section("13"), f"| {heading} | Type | Default | Meaning |")
    types: dict[str, Any] = {"bool": bool, "int": int, "str": str, "bin": bytes}
    types["[bin]"] = tuple[bytes, ...]
    told = [(name, types[kind], default) for name, kind, default, _ in table]
    hints = get_type_hints(settings)
    assert told == [
        (
            field.name,
            hints[field.name],
            {True: "true", False: "false"}[field.default]
            if isinstance(field.default, bool)
            else str(field.default or "")
            if not isinstance(field.default, int)
            else str(field.default),
        )
        for field in msgspec.structs.fields(settings)
    ]


def test_the_bounds_of_single_fields_are_those_of_the_code() -> None:
    told = " ".join(cell for row in rows(section("11"), "| Field | Bound |") for cell in row)
    for number in (
        KEY_BYTES_MAX,
        REASON_BYTES_MAX,
        RANGES_MAX,
        RUNS_MAX,
        NUMBERS_MAX,
        ELEMENTS_MAX,
    ):
        assert re.search(rf"\b{number}\b", told)
    assert f"`settings` {SETTINGS_MAX} entries" in told
    assert f"{PRIORITY_MIN} to {PRIORITY_MAX}; of REQUEST 0 to {REQUEST_PRIORITY_MAX}" in told
    assert f"2^{TIME_MAX.bit_length() - 1}" in told
    assert f"{min(c.WorkState)} to {max(c.WorkState)}" in told


def test_the_spec_names_the_parts_of_a_step_and_the_states_of_work() -> None:
    said = re.search(r"^part is (.+?), has tracker 0", section("4.8"), re.MULTILINE | re.DOTALL)
    assert said
    named = set(re.findall(r"[A-Z]{3,}(?:_[A-Z]+)*", said.group(1)))
    assert named == {wire_name(part) for part in c.STEP_PARTS}
    states = [row[0] for row in rows(section("4.8"), "| ACK_WORK state | Effect |")]
    assert states == [f"{state.value} {state.name.lower()}" for state in c.WorkState]


def test_the_refusals_of_a_step_are_codes() -> None:
    for codes, _ in rows(section("4.8"), "| REFUSED | when |"):
        assert set(codes.split(", ")) <= set(CODES)


def test_every_question_has_its_value_in_the_spec() -> None:
    told = {
        name
        for cells, _ in rows(section("4.7"), "| Answer to | Value |")
        for name in cells.split(", ")
    }
    asking = {
        wire_name(command)
        for command in CLIENT_COMMANDS
        if command.__struct_fields__[:1] == ("request",)
    }
    assert told == asking


def test_the_spec_speaks_only_of_commands_that_exist() -> None:
    known = {wire_name(command) for command in COMMANDS.values()}
    for name in re.findall(r"\b[A-Z]+_[A-Z]+\b", SPEC):
        assert name in known, name
