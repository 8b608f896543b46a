"""The page of commands in the documents, from the command line itself.

Owns how a command is shown. `make docs` calls it; nothing of what it returns is committed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


def commands_page() -> str:
    """Return Markdown: a section for each command, with its arguments and options."""
    from malamute_py.cli.app import app

    command = get_command(app)
    return "\n".join(_sections(command, "malamute"))


def _sections(command: object, path: str) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        if path != "malamute":
            yield f"## {path}\n\n{_text(command.help)}\n"
        for name in command.list_commands(typer.Context(command)):
            found = command.get_command(typer.Context(command), name)
            if found is not None and not found.hidden:
                yield from _sections(found, f"{path} {name}")
    elif isinstance(command, TyperCommand):
        yield _command(command, path)


def _command(command: TyperCommand, path: str) -> str:
    level = "#" * min(1 + len(path.split()) - 1, 3)
    level = "##" if len(path.split()) == 2 else level
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        names = [*parameter.opts, *parameter.secondary_opts]
        shown = ", ".join(f"`{name}`" for name in names)
        if parameter.param_type_name == "argument":
            shown = f"`{(parameter.metavar or parameter.name or '').upper()}`"
        rows.append(f"| {shown} | {_cell(getattr(parameter, 'help', '') or '')} |")
    table = "| | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    return f"{level} {path}\n\n{_text(command.help)}\n\n{table}"


def _text(help_text: str | None) -> str:
    """Return a command's help, its examples as they are typed."""
    paragraphs = inspect.cleandoc((help_text or "").replace("\b", "")).split("\n\n")
    return "\n\n".join(
        f"```text\n{one}\n```"
        if re.search(r"^\s*(malamute|\$) |^ {2,}", one, re.MULTILINE)
        else one
        for one in paragraphs
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
