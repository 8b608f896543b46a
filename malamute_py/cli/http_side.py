"""`malamute http`: metrics, health and the console of any broker over HTTP.

Owns its options. The rule: it is a client with the credential of its context, and shows what that
credential may see; a broker starts one of its own by [http] of its configuration.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from malamute_py.cli.contexts import chosen
from malamute_py.cli.options import options

ConsoleFor = Literal["local", "login", "open", "off"]

EPILOG = """\b
Examples:
  malamute http
  malamute http --bind 0.0.0.0:9798 --token-file token --context office

Pages: / for people, who log in as users of the broker; /metrics for
Prometheus; /livez and /readyz as JSON (200 or 503). For metrics the credential
of the context needs read, receive and request of "*" to see everything.
It stops in order on Ctrl-C or SIGTERM, with exit code 0, and at once on a second one."""


def http(
    ctx: typer.Context,
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve; port 0: any free one.")
    ] = "127.0.0.1:9798",
    token_file: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="The token to ask for; needed where other machines reach it."
        ),
    ] = "",
    labels_max: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=1_000, help="Labels of a kind; the rest is `other`."),
    ] = 100,
    console: Annotated[
        ConsoleFor,
        typer.Option(help="Who is shown the console: people at this machine; by name; all; none."),
    ] = "local",
) -> None:
    """Serve metrics, health and the console of a broker over HTTP."""
    from malamute_py.http.serving import serve
    from malamute_py.sections import HttpSection, serves_console

    context = chosen(options(ctx))
    section = HttpSection(bind=bind, token_file=token_file, labels_max=labels_max, console=console)
    serve(
        section,
        context.endpoints,
        context.credential(),
        announce=lambda url: print(
            f"serving {url}/metrics, /livez, /readyz"
            f"{' and the console at /' if serves_console(section) else ''}",
            flush=True,
        ),
    )
