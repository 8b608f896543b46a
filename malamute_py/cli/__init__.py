"""The command `malamute`: a broker, and everything a person does with one from a shell.

Owns the words of the command line. The rules: people get tables and colour on a terminal, programs
get plain lines, JSON and exit codes; an expected failure is one line that says what happened, to
what, and what to do next; modules that a command does not use are not loaded.
"""

from __future__ import annotations

import os
import sys

from malamute_py.extras import missing


def main() -> None:
    """Run the command line of this process, and end with its exit code."""
    _open_what_is_closed()
    try:
        from malamute_py.cli.app import app
    except ModuleNotFoundError as error:
        advice = missing(error, "the command line")
        if advice is None:
            raise
        print(f"error: {advice}", file=sys.stderr)
        sys.exit(1)
    app()


def _open_what_is_closed() -> None:
    """Put the null device in the place of each standard stream that the caller has closed.

    Otherwise the next file or connection has its number, and gets what a library writes there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
