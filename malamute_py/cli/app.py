"""The command's root: its options and its help.

Owns the options before a command. The rule: modules that `--help` does not need are not loaded
here.
"""

from __future__ import annotations

from typing import Annotated

import typer

from malamute_py.cli.commands import Commands
from malamute_py.cli.linking import CONNECT_TIMEOUT
from malamute_py.cli.options import remember

app = typer.Typer(
    name="malamute",
    cls=Commands,
    no_args_is_help=True,
    # Plain text: rich help doubles the time that --help takes, and wraps examples.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(wanted: bool) -> None:
    """Print the version and end, if --version was given."""
    if wanted:
        from malamute_py.form import form, version

        print(f"malamute {version()} ({form()})")
        raise typer.Exit


def _show_man(wanted: bool) -> None:
    """Print the manual page and end, if --man was given."""
    if wanted:
        from malamute_py.cli.man import man_page

        print(man_page(), end="")
        raise typer.Exit


def _context_names(incomplete: str) -> list[str]:
    """List names of the person's contexts, for completion."""
    from malamute_py.cli import complete

    return complete.context_names(incomplete)


EPILOG = """\b
A first result:
  malamute broker                                     in one terminal
  malamute pub hello 'my first record'                in another
  malamute sub hello --start earliest

Exit codes: 0 done, 1 refused or damaged, 2 wrong usage, 3 no broker, 4 timeout, 130 Ctrl-C."""


@app.callback(epilog=EPILOG)
def root(
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The broker: tcp://HOST:PORT or ipc:///PATH; also MALAMUTE_ENDPOINT.",
            callback=remember,
            expose_value=False,
        ),
    ] = None,
    context_name: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="NAME",
            help="A broker by name: `malamute context`; also MALAMUTE_CONTEXT.",
            callback=remember,
            expose_value=False,
            autocompletion=_context_names,
        ),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Identity to connect with; in web-{n} the broker puts a free number.",
            callback=remember,
            expose_value=False,
        ),
    ] = None,
    connect_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help=f"How long to wait for the broker; default {CONNECT_TIMEOUT}.",
            callback=remember,
            expose_value=False,
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
    man: Annotated[
        bool,
        typer.Option(
            "--man", help="Print the manual page: malamute --man | man -l -", callback=_show_man,
            is_eager=True,
        ),
    ] = False,
) -> None:  # fmt: skip
    """A message broker for Python and Spark: streams that are kept, matched and replayed."""
