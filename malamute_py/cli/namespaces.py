"""`malamute namespace ...`: the namespaces of a broker, and what each holds of its quotas."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from malamute_py.cli import output
from malamute_py.cli.absent import nearest
from malamute_py.cli.commands import group
from malamute_py.cli.failures import CommandFailed
from malamute_py.cli.linking import linked
from malamute_py.cli.output import Cell, Column
from malamute_py.cli.values import count_text, size_text
from malamute_py.client.facts import RATES, NamespaceFacts

app = group("namespace")


@app.command(
    "ls",
    epilog="""\b
Examples:
  malamute namespace ls
  malamute namespace ls --json

In a pipe a line has, with tabs between: name, prefix, patterns of its users, and the
resource nearest to its bound with what is held and the bound (empty: nothing is bounded). --json
has all that is held, and all bounds.""",
)
def ls(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most so many.")] = 1000,
    as_json: output.Json = False,
) -> None:
    """List the namespaces; a user of one sees that one."""
    with linked(ctx) as client:
        found = client.list_namespaces(limit=limit)
    if as_json:
        output.print_json([_as_object(each) for each in found])
        return
    output.listing(
        [
            Column("namespace", "Namespace", style="cyan"),
            Column("prefix", "Prefix"),
            Column("users", "Users"),
            Column("nearest", "Nearest to its bound"),
        ],
        [(each.namespace, each.prefix, ", ".join(each.users), _nearest(each)) for each in found],
        as_json=False,
        empty="no namespaces; [namespaces.NAME] in the broker's configuration makes one",
    )


@app.command(
    "show",
    epilog="""\b
Examples:
  malamute namespace show acme

In a pipe a line has, with tabs between: resource, amount held, bound (0: none). A
rate has a bound, and nothing of it is held. --json has what came in and what was refused, too.""",
)
def show(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The namespace.")],
    as_json: output.Json = False,
) -> None:
    """Show what the users of a namespace hold together, and its bounds."""
    with linked(ctx) as client:
        found = {each.namespace: each for each in client.list_namespaces()}
    if name not in found:
        hint = nearest(name, found, "`malamute namespace ls` lists them")
        raise CommandFailed(f"there is no namespace {name}, or not for this user; {hint}")
    facts = found[name]
    if as_json:
        output.print_json(_as_object(facts))
        return
    output.listing(
        [
            Column("resource", "Resource", style="cyan"),
            Column("held", "Held", right=True),
            Column("quota", "Bound", right=True),
        ],
        [
            (
                resource,
                "" if resource in RATES else _amount(resource, facts.held.get(resource, 0)),
                _amount(resource, facts.quotas.get(resource, 0), none="none"),
            )
            for resource in sorted({*facts.held, *facts.quotas})
        ],
        as_json=False,
        empty=f"namespace {name} holds nothing, and has no bounds",
    )


def _as_object(facts: NamespaceFacts) -> dict[str, Any]:
    """Return the facts of a namespace as --json prints them."""
    return {
        "namespace": facts.namespace, "prefix": facts.prefix, "users": facts.users,
        "held": facts.held, "quotas": facts.quotas, "messages_in": facts.messages_in,
        "bytes_in": facts.bytes_in, "refused": facts.refused,
        "default_stream": facts.default_stream,
        "default_mailbox": facts.default_mailbox, "default_service": facts.default_service,
    }  # fmt: skip


def _nearest(facts: NamespaceFacts) -> str:
    """Return the resource of which the largest share of its bound is held; empty: no bound.

    Rates have a bound, and nothing of them is held.
    """
    bounded = [
        (facts.held.get(resource, 0) / bound, resource)
        for resource, bound in facts.quotas.items()
        if resource not in RATES
    ]
    if not bounded:
        return ""
    _, resource = max(bounded)
    held, bound = (table.get(resource, 0) for table in (facts.held, facts.quotas))
    return f"{resource} {_text(resource, held)} of {_text(resource, bound)}"


def _amount(resource: str, amount: int, none: str = "") -> Cell:
    """Return the cell of an amount. none: text for 0; empty: it is shown as 0."""
    return Cell(amount, _text(resource, amount) if amount or not none else none)


def _text(resource: str, amount: int) -> str:
    return size_text(amount) if "bytes" in resource else count_text(amount)
