"""Commands in the documents work, and names in the changelog and the unit exist.

The rule: a command in README.md, the CI script or the systemd unit is one that the checkout has.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from typing import get_args

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from malamute_py import AckWhen, ConfirmAt, GroupKind, OnError, ReadVisibility, Until
from malamute_py.events import EVENTS
from tests.house.checkout import ROOT, pyproject

README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, re.MULTILINE))
EXTRAS = set(pyproject()["project"]["optional-dependencies"])


def code_of(markdown: str) -> list[str]:
    """Return the lines of a document's code blocks, fenced or indented, and its inline code."""
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()]
    lines += re.findall(r"^(?: {4}|\t)(.+)$", rest, re.MULTILINE)
    lines += re.findall(r"`([^`\n]+)`", rest)
    return [line.strip().removeprefix("$ ") for line in lines]


COMMANDS = code_of(README)


def test_every_make_target_in_the_readme_exists() -> None:
    named = {line.split()[1] for line in COMMANDS if re.match(r"make [a-z]", line)}
    assert named >= {"run", "test"}
    assert named <= TARGETS


def test_every_extra_in_the_readme_exists() -> None:
    named = {
        extra
        for extras in re.findall(r"malamute-py\[([a-z,]+)\]", README)
        for extra in extras.split(",")
    }
    assert named <= EXTRAS


def test_every_make_target_is_explained_by_make_help() -> None:
    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    internal = {"test-needs"}
    for target in TARGETS - internal:
        assert re.search(rf"make {target}\b", shown), target


def check_command_line(words: list[str]) -> None:
    """Fail unless every subcommand and option of `malamute ...` is one that it has."""
    from malamute_py.cli.app import app

    command = get_command(app)
    for word in words:
        if word in ("|", ">", ">>", "&&", "&", "#", ";", "--"):
            break
        if isinstance(command, TyperGroup) and not word.startswith("-"):
            found = command.get_command(typer.Context(command), word)
            assert found is not None, f"malamute has no {word!r}: {words}"
            command = found
        elif word.startswith("-") and word != "-":
            options = {
                name
                for parameter in command.params
                for name in [*parameter.opts, *parameter.secondary_opts]
            }
            assert word.partition("=")[0] in {*options, "--help"}, f"no option {word}: {words}"


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("malamute ")])
def test_every_malamute_command_in_the_readme_exists(line: str) -> None:
    check_command_line(re.sub(r"'[^']*'|\"[^\"]*\"", "QUOTED", line).split()[1:])


@cache
def names_in(path: str) -> set[str]:
    """Return classes, functions, constants and `Class.method` of a module; nothing of a folder."""
    if not path.endswith(".py"):
        return set()
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {
                f"{node.name}.{one.name}"
                for one in node.body
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {one.id for one in targets if isinstance(one, ast.Name)}
    return found


@pytest.mark.moderate
def test_where_to_change_what_names_what_is_there() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where to change what")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 400
    for row in rows:
        quoted = re.findall(r"`([^`]+)`", row)
        before, names = "", list[str]()
        for word in [*quoted, ""]:
            if word and "/" not in word:
                names += [word] if re.fullmatch(r"[A-Za-z_]+(\.[a-z_]+)?", word) else []
                continue
            assert (ROOT / word).exists(), row
            # A name lies in the file that follows, or ("there") in the one before.
            known = names_in(before) | names_in(word)
            assert known.issuperset(names), f"{names} are not in {before or word}: {row}"
            before, names = word, []


def test_every_module_has_its_place_in_a_room_or_a_row() -> None:
    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = set(re.findall(r"`([^`\n]+)`", architecture.partition("## The life of a record")[0]))
    folders = ("malamute_py", "protocol/malamute_protocol", "spark_connector/pyspark_malamute")
    for path in (each for folder in folders for each in (ROOT / folder).rglob("*.py")):
        if path.stem.startswith("__") or path.parent.name == "sync":
            continue
        named = {path.stem, path.name} & rooms or str(path.relative_to(ROOT)) in architecture
        assert named, f"no room or row of ARCHITECTURE.md names {path.relative_to(ROOT)}"


def test_every_setting_has_a_row_that_says_where_it_is_applied() -> None:
    from malamute_py.config import KEYS

    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Which setting is applied")[2]
    told = {
        name
        for row in table.splitlines()
        if row.startswith("| ")
        for name in re.findall(r"\w+", row.split("|")[1])
    }
    missing = {key for key in KEYS if key.rpartition(".")[2] not in told}
    assert not missing


def test_every_event_has_a_row_that_says_where_it_is_told() -> None:
    rows = re.findall(r"^\| ([a-z_, ]+) \| `", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    known = {name for row in rows for name in row.split(", ")}
    assert {event.name for event in EVENTS} <= known


def test_the_systemd_unit_starts_a_command_that_exists() -> None:
    unit = (ROOT / "deploy" / "malamute.service").read_text()
    (start,) = re.findall(r"^ExecStart=\S*/malamute (.*)$", unit, re.MULTILINE)
    check_command_line(start.split())


def test_ci_runs_the_tests_as_the_readme_tells_a_person_to() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    last = script.read_text().rstrip().splitlines()[-1]
    assert last.startswith("make test")


def test_the_changelog_starts_with_what_is_not_released_yet() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


@pytest.mark.moderate
@pytest.mark.parametrize(
    "command",
    [
        [os.path.join(os.path.dirname(sys.executable), "malamute")],
        [sys.executable, "-m", "malamute_py"],
    ],
)
def test_the_command_line_answers(command: list[str]) -> None:
    result = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "broker" in result.stdout


WORDS = {
    "ack": AckWhen, "confirm": ConfirmAt, "kind": GroupKind, "on_error": OnError,
    "until": Until, "visibility": ReadVisibility,
}  # fmt: skip
"""Types of arguments that take a word, by the argument."""


@pytest.mark.parametrize("argument", WORDS)
def test_the_words_of_arguments_in_documents_are_those_that_calls_take(argument: str) -> None:
    pages = [ROOT / "README.md", ROOT / "spark_connector" / "README.md"]
    pages += (ROOT / "docs").rglob("*.md")
    named = {
        (page.name, word)
        for page in pages
        for word in re.findall(rf'\b{argument}="([^"]*)"', page.read_text())
    }
    assert named
    assert {word for _, word in named} <= set(get_args(WORDS[argument])), named
