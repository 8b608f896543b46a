"""The question to a person before a command does what cannot be undone.

Owns the question. The rule: the name is typed once more, or --yes stands on the line; where no
person can answer, nothing is assumed.
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
    if not sys.stdin.isatty():
        raise CommandFailed(f"{doing}? say so with --yes", USAGE)
    print(f"{doing[0].upper()}{doing[1:]}, for good?", file=sys.stderr)
    typed = typer.prompt(f"Type {name} to go on", default="", show_default=False, err=True)
    if typed.strip() != name:
        raise CommandFailed(f"nothing was done: {typed.strip() or 'nothing'!r} is not {name!r}")
