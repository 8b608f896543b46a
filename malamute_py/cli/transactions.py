"""`malamute transaction ...`: open transactions, and their end by an operator."""

from __future__ import annotations

from typing import Annotated

import typer

from malamute_py.cli import output
from malamute_py.cli.agreed import Yes, agreed
from malamute_py.cli.columns import age, figure, left, sized
from malamute_py.cli.commands import group
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.linking import linked
from malamute_py.cli.output import Cell, Column
from malamute_py.client.facts import PutOffFacts

app = group("transaction")


@app.command(
    "ls",
    epilog="""\b
Examples:
  malamute transaction ls
  malamute transaction ls --json

In a pipe a line has, with tabs between: id, identity, state, time of the beginning
and of the newest batch in milliseconds, time at which the broker rolls it back, records, bytes,
streams with commas between, and where its commit is put off: stream, time since then in
milliseconds, and why. --json names them.""",
)
def ls(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most so many.")] = 1000,
    as_json: output.Json = False,
) -> None:
    """List the transactions that are open or being appended, oldest first."""
    with linked(ctx) as client:
        found = client.transactions(limit=limit)
    output.entries(
        [
            Column("transaction", "Transaction", cell=lambda each: each.transaction.hex()),
            Column("identity", "Identity", style="cyan"),
            Column("state", "State"),
            figure("since_ms", "For", age),
            figure("touched_ms", "Idle", age),
            figure("deadline_ms", "Ends in", left),
            Column("records", "Records", right=True),
            figure("bytes", "Bytes", sized),
            Column("streams", "Streams", spare=True, cell=lambda each: ",".join(each.streams)),
            Column("put_off", "Put off", cell=lambda each: _put_off(each.put_off, as_json)),
        ],
        found,
        as_json=as_json,
        empty="no transactions",
    )


def _put_off(found: list[PutOffFacts], as_json: bool) -> Cell:
    """Return the cell of a committed transaction's streams whose ring refuses the records so far.

    For a person and a pipe as text with the reason; as_json: with all facts.
    """
    text = "; ".join(
        f"{each.stream or 'ring main'} for {age(each.since_ms).text}: {each.code}: {each.reason}"
        for each in found
    )
    if as_json:
        names = ("stream", "code", "reason", "since_ms", "records")
        return Cell([{name: getattr(each, name) for name in names} for each in found], text)
    plain = [f"{each.stream} {each.since_ms} {each.code}: {each.reason}" for each in found]
    return Cell(plain, text, "yellow")


@app.command(
    "end",
    epilog="""\b
Examples:
  malamute transaction end 6b1f0c52a94d4e0f8a7be1d26cf08d31
  malamute transaction end 6b1f0c52a94d4e0f8a7be1d26cf08d31 --give-up --yes""",
)
def end(
    ctx: typer.Context,
    transaction: Annotated[
        str, typer.Argument(metavar="ID", help="Id of it, as `transaction ls` shows it.")
    ],
    give_up: Annotated[
        bool,
        typer.Option(
            "--give-up",
            help="Of a committed one, drop the records that a ring puts off, for good.",
        ),
    ] = False,
    yes: Yes = False,
    as_json: output.Json = False,
) -> None:
    """Roll an open transaction back, or give up what is put off of a committed one.

    Its client is told at its next call, and a client that waits for the commit at once.
    """
    try:
        id = bytes.fromhex(transaction)
    except ValueError:
        raise CommandFailed(
            f"'{transaction}' is not the id of a transaction; `malamute transaction ls` shows them",
            USAGE,
        ) from None
    doing = "give up what a ring puts off of" if give_up else "roll back"
    agreed(f"{doing} transaction {transaction}", transaction, yes=yes)
    with linked(ctx) as client:
        given_up = client.end_transaction(id, give_up=give_up)
    told = f"rolled back transaction {transaction}"
    if give_up:
        lost = ", ".join(f"{count} records for {name}" for name, count in given_up.items())
        told = f"gave up {lost or 'nothing'} of transaction {transaction}"
    facts = {"ended": transaction, "given_up": given_up}
    output.done(told, facts, as_json=as_json)
