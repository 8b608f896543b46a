"""The question to a person before a command does what cannot be undone.

Owns the question. The rules: the name is typed once more, or y, or --yes stands on the line; where
no person can answer, nothing is assumed.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from malamute_py.cli.failures import USAGE, CommandFailed

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def agreed(doing: str, name: str, *, yes: bool) -> None:
    """Raise CommandFailed unless the person agreed. doing: begins with a verb: purge desk (...)."""
    if yes:
        return
    print(_question(doing), file=sys.stderr)
    typed = typer.prompt(f"Type {name} to go on", default="", show_default=False, err=True)
    if typed.strip() != name:
        raise CommandFailed(f"nothing was done: {typed.strip() or 'nothing'!r} is not {name!r}")


def confirmed(doing: str, refused: str, *, yes: bool) -> None:
    """Raise CommandFailed, which says `refused`, unless the person says y. doing: as agreed()."""
    if not yes and not typer.confirm(_question(doing), err=True):
        raise CommandFailed(refused)


def _question(doing: str) -> str:
    """Return what the person is asked. Raises CommandFailed: no person can answer."""
    if not sys.stdin.isatty():
        raise CommandFailed(f"{doing}? say so with --yes", USAGE)
    return f"{doing[0].upper()}{doing[1:]}, for good?"
