"""`malamute context ...`: brokers by name.

Owns the words for contexts; contexts.py owns their form and file. The rule: a password is asked
for, or read from a file or a variable, never written on the command line.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from malamute_protocol import DEFAULT_ENDPOINT
from malamute_py.cli import complete, contexts, output
from malamute_py.cli.commands import group
from malamute_py.cli.contexts import Context, Contexts
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.keys import public_key
from malamute_py.cli.output import Cell, Column

app = group("context")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The context.", autocompletion=complete.context_names)
]


@app.command(
    "ls",
    epilog="""\b
Examples:
  malamute context ls""",
)
def ls(as_json: output.Json = False) -> None:
    """List the contexts; the one in use is marked."""
    kept = Contexts.load()
    output.listing(
        [
            Column("current", "", style="green"),
            Column("name", "Context", style="cyan"),
            Column("endpoint", "Endpoint"),
            Column("authentication", "Credential"),
            Column("user", "User"),
            Column("description", "Description"),
        ],
        [
            (
                Cell(name == kept.current, "*" if name == kept.current else ""), name,
                context.endpoint, context.authentication, context.user, context.description,
            )
            for name, context in kept.contexts.items()
        ],
        as_json=as_json,
        empty="no contexts; make one: malamute context add NAME --endpoint tcp://HOST:9797",
    )  # fmt: skip


@app.command(
    "add",
    epilog="""\b
Examples:
  malamute context add local
  malamute context add live --endpoint tcp://live:9797 --user ann
  malamute context add far --server-key far.pub --secret-key-file ann.key

The broker's public key is what `malamute key show FILE` prints beside the broker: a client talks to
that broker and to no other.

Without --password-file or --password-env the password is taken from MALAMUTE_PASSWORD, or
asked for.""",
)
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")],
    endpoint: Annotated[
        str, typer.Option(help="Endpoint of the broker; several with commas are tried in turn.")
    ] = DEFAULT_ENDPOINT,
    user: Annotated[str, typer.Option(help="User name (PLAIN).")] = "",
    password_file: Annotated[
        str, typer.Option(metavar="FILE", help="Its first line is the password.")
    ] = "",
    password_env: Annotated[
        str, typer.Option(metavar="VARIABLE", help="Variable that holds the password.")
    ] = "",
    server_key: Annotated[
        str, typer.Option(metavar="KEY", help="The broker's public key (CURVE).")
    ] = "",
    secret_key_file: Annotated[
        str, typer.Option(metavar="FILE", help="File with this client's secret key (CURVE).")
    ] = "",
    identity: Annotated[
        str, typer.Option(metavar="NAME", help="Identity to connect with, such as web-{n}.")
    ] = "",
    tracing: Annotated[
        bool, typer.Option("--tracing", help="Trace pub, sub, send, inbox, request and work.")
    ] = False,
    description: Annotated[str, typer.Option(metavar="TEXT", help="What it is.")] = "",
    use: Annotated[bool, typer.Option("--use", help="Use it from now on.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace one of that name.")] = False,
    as_json: output.Json = False,
) -> None:
    """Add a context. The first one is in use at once."""
    from malamute_py.client.settings import make_settings

    if server_key:
        server_key = public_key(server_key, "--server-key")
    # A context is used in any directory.
    password_file, secret_key_file = map(_absolute, (password_file, secret_key_file))
    context = Context(
        endpoint=endpoint, user=user, password_env=password_env, password_file=password_file,
        server_key=server_key, secret_key_file=secret_key_file, description=description,
        identity=identity, tracing="yes" if tracing else "",
    )  # fmt: skip
    # Called for its checks: a wrong endpoint or identity is told now and not at the next command.
    make_settings(context.endpoints, {"identity": identity})
    if bool(server_key) != bool(secret_key_file):
        raise CommandFailed("--server-key and --secret-key-file go together", USAGE)
    if server_key and user:
        raise CommandFailed("--user (PLAIN) and --server-key (CURVE) exclude each other", USAGE)
    if (password_file or password_env) and not user:
        raise CommandFailed("a password needs a --user", USAGE)
    with Contexts.changing() as kept:
        if name in kept.contexts and not force:
            raise CommandFailed(f"context {name} exists; replace it with --force")
        in_use = use or not kept.contexts
        kept.contexts[name] = context
        if in_use:
            kept.current = name
    output.done(
        f"added context {name}: {endpoint}{', in use now' if in_use else ''}",
        {"context": name, "current": in_use, **asdict(context)}, as_json=as_json,
    )  # fmt: skip


def _absolute(path: str) -> str:
    """Return a path as it is found from any directory; empty stays empty."""
    return str(Path(path).expanduser().absolute()) if path else ""


@app.command(
    "use",
    epilog="""\b
Examples:
  malamute context use live
  malamute context use -""",
)
def use_(name: Name, as_json: output.Json = False) -> None:
    """Use a context from now on; `-` for none."""
    with Contexts.changing() as kept:
        if name != "-":
            kept.get(name)  # It raises the error where there is none.
        kept.current = "" if name == "-" else name
    text = f"context {name} is in use" if kept.current else "no context is in use"
    output.done(text, {"current": kept.current}, as_json=as_json)


@app.command(
    "rm",
    epilog="""\b
Examples:
  malamute context rm live""",
)
def rm(name: Name, as_json: output.Json = False) -> None:
    """Forget a context."""
    with Contexts.changing() as kept:
        kept.get(name)  # It raises the error where there is none.
        del kept.contexts[name]
        if kept.current == name:
            kept.current = ""
    output.done(f"removed context {name}", {"removed": name}, as_json=as_json)


@app.command(
    "show",
    epilog="""\b
Examples:
  malamute context show
  malamute context show live --json""",
)
def show(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Default: what a command would use now.",
                       autocompletion=complete.context_names),
    ] = None,
    as_json: output.Json = False,
) -> None:  # fmt: skip
    """Show a context, or what a command would use now."""
    context = Contexts.load().get(name) if name else contexts.chosen({})
    facts = {key: value for key, value in asdict(context).items() if value}
    output.facts({**facts, "authentication": context.authentication}, as_json=as_json)
