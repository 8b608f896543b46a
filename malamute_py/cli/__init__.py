"""The command `malamute`: a broker, and everything a person does with one from a shell.

Owns the words of the command line. The rules: people get tables and colour on a terminal,
programs get plain lines, JSON and exit codes; an expected failure is one line that says
what happened, to what, and what to do next; what a command does not use is not loaded.
"""

from malamute_py.cli.app import app, main

__all__ = ["app", "main"]
