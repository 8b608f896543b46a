"""The manual page, made of the command tree.

Owns the roff. The rule: every command and option that help shows stands in it once, in the words of
help; examples keep their lines. Source: man(7).
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from malamute_py.cli.commands import SHARED

_ENVIRONMENT: Final = (
    ("MALAMUTE_ENDPOINT", "Address of the broker, as --endpoint."),
    ("MALAMUTE_CONTEXT", "Name of the context, as --context."),
    ("MALAMUTE_SECTION_KEY", "A setting of `malamute broker`: MALAMUTE_JOURNAL_RING_BYTES."),
    (
        "OTEL_*",
        "OpenTelemetry's own, for --tracing: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, ...",
    ),
    ("TRACEPARENT", "Trace that a command with --tracing continues."),
    ("NO_COLOR", "When it is set, output has no colour."),
)
_FILES: Final = (("~/.config/malamute/", "Contexts of `malamute context`."),)


def man_page() -> str:
    """Return the manual page of the whole command line (--man), in roff (.SH is a section)."""
    from malamute_py.cli.app import app

    root: Any = get_command(app)
    lines = [
        '.TH MALAMUTE 1 "" "malamute-py" "Malamute Manual"',
        ".SH NAME",
        r"malamute \- a message broker for Python and Spark, and its tools",
        ".SH SYNOPSIS",
        r".B malamute",
        r"[\fIOPTIONS\fR] \fICOMMAND\fR [\fIARGUMENTS\fR]",
        ".SH DESCRIPTION",
        *_prose(root.help),
        *_prose(root.epilog),
        ".SH OPTIONS",
        *_options(root, ()),
        ".SH COMMANDS",
        *_commands(root, "malamute"),
        ".SH ENVIRONMENT",
        *_listed(_ENVIRONMENT),
        ".SH FILES",
        *_listed(_FILES),
    ]
    return "\n".join(lines) + "\n"


def _commands(command: Any, path: str) -> Iterator[str]:
    """Yield the lines of the manual page for all commands below one. path: the words up to it.

    Options that each command shares with the root (SHARED) stand once, at the root.
    """
    context = typer.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        if found is None or found.hidden:
            continue
        if isinstance(found, TyperGroup):
            yield from _commands(found, f"{path} {name}")
            continue
        arguments = [each for each in found.params if each.param_type_name == "argument"]
        usage = " ".join([f"{path} {name}", *(_metavar(each) for each in arguments)])
        yield f".SS {_escaped(usage)}"
        yield from _prose(found.help)
        yield from _listed((_metavar(each), each.help) for each in arguments if each.help)
        yield from _options(found, SHARED)
        yield from _prose(found.epilog)


def _metavar(parameter: Any) -> str:
    """Return an argument as a usage line shows it: [NAME] may be left out, NAME... repeated."""
    name = str(parameter.metavar or parameter.name or "").upper()
    if parameter.nargs == -1:
        name += "..."
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _options(command: Any, without: Container[str]) -> Iterator[str]:
    """Yield the lines for the options of a command, but for those named in `without`."""
    context = typer.Context(command)
    for each in command.params:  # Arguments are among them, and are no options.
        hidden = each.param_type_name != "option" or getattr(each, "hidden", False)
        record = None if hidden else each.get_help_record(context)
        if record is not None and each.name != "help" and each.name not in without:
            yield from _listed([record])


def _listed(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines for terms, each with its explanation below."""
    for term, text in entries:
        yield ".TP"
        yield f"\\fB{_escaped(term)}\\fR"
        yield _escaped(" ".join(text.split()))


def _prose(text: str | None) -> Iterator[str]:
    """Yield the paragraphs of a help text; those that begin with a backspace keep their lines."""
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        if not paragraph.strip():
            continue
        kept = paragraph.startswith("\b")
        lines = [line for line in paragraph.replace("\b", "").splitlines() if line.strip()]
        yield ".PP"
        if kept:
            yield ".nf"  # Do not fill lines, until .fi.
            yield from map(_escaped, lines)
            yield ".fi"
        else:
            yield _escaped(" ".join(line.strip() for line in lines))


def _escaped(text: str) -> str:
    r"""Return a line of text whose characters roff takes as they are.

    A line that begins with a dot or a quote would be a request: \& before it has no width.
    """
    found = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{found}" if found.startswith((".", "'")) else found
