"""`malamute mailbox ...`: list, show, peek, purge, edit, remove.

Owns the words for messages in mailboxes. The rule: looking never consumes; a command that takes
mail away asks first. Source: SPEC.md, section 4.7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_py.cli import complete, output
from malamute_py.cli.absent import made_or_edited
from malamute_py.cli.agreed import Yes, agreed
from malamute_py.cli.columns import age, creator, figure, moment, sized
from malamute_py.cli.commands import group, say
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.inbox import known
from malamute_py.cli.letters import MailWriter, Peeked
from malamute_py.cli.linking import linked
from malamute_py.cli.output import Cell, Column, kept
from malamute_py.cli.parameters import MemoryOnCreate, Prefix
from malamute_py.cli.progress import watched
from malamute_py.cli.settings import Description, LevelOption, Replace, Settings, shown, wanted
from malamute_py.cli.values import count_text, size_text, time_text

if TYPE_CHECKING:
    from malamute_py.client.facts import MailboxFacts

app = group("mailbox")

Name = Annotated[
    str,
    typer.Argument(metavar="MAILBOX", help="The mailbox.", autocompletion=complete.mailboxes),
]
Names = Annotated[
    list[str],
    typer.Argument(metavar="MAILBOX", help="Which ones.", autocompletion=complete.mailboxes),
]
_BODY_BYTES: Final = 256 << 10
"""Bytes of each body that `peek` asks for."""


@app.command(
    "ls",
    epilog="""\b
Examples:
  malamute mailbox ls
  malamute mailbox ls crew. --json

In a pipe a line has, with tabs between: name, messages, of them in hand, of them
delayed, bytes, time of the oldest that is due in milliseconds (0: none),
readers, and whether it is kept in memory (yes, no). --json names them.""",
)
def ls(
    ctx: typer.Context,
    prefix: Prefix = "",
    as_json: output.Json = False,
) -> None:
    """List the mailboxes."""
    with linked(ctx) as client:
        found = client.list_mailboxes(prefix)
    output.entries(
        [
            Column("name", "Mailbox", style="cyan"),
            figure("messages", "Messages"),
            figure("held", "In hand"),
            figure("delayed", "Delayed"),
            figure("bytes", "Bytes", sized),
            figure("oldest_ms", "Oldest", age),
            figure("readers", "Readers"),
            Column(
                "memory", "Kept", spare=True,
                cell=lambda each: kept(bool(each.settings.get("memory"))),
            ),
        ],
        found,
        as_json=as_json,
        empty=(
            f"no mailbox begins with {prefix}" if prefix else
            "no mailboxes yet; sending makes one: malamute send NAME 'a message'"
        ),
    )  # fmt: skip


@app.command(
    "info",
    epilog="""\b
Examples:
  malamute mailbox info crew.berlin""",
)
def info(ctx: typer.Context, mailbox: Name, as_json: output.Json = False) -> None:
    """Show one mailbox: what lies in it, and its settings."""
    with linked(ctx) as client:
        _show(known(client, mailbox), as_json)


def _show(found: MailboxFacts, as_json: bool) -> None:
    """Print the facts of one mailbox: for `info`, and for `edit` with --json."""
    output.facts(
        {
            "name": Cell(found.name, found.name, "bold cyan"),
            "messages": found.messages,
            "bytes": sized(found.bytes),
            "held": found.held,
            "delayed": found.delayed,
            "oldest_ms": since(found.oldest_ms),
            "readers": found.readers,
            **made(found.created_ms, found.by),
            **beside(found.more, as_json),
            "settings": shown(
                found.settings,
                {
                    "max_messages": "the broker's",
                    "max_bytes": "the broker's",
                    "ttl_ms": "never",
                },
            ),
        },
        as_json=as_json,
    )


def since(at_ms: int) -> Cell:
    """Return a time's cell, with how long ago that was by the broker's clock; 0: there is none."""
    ago = f"{time_text(at_ms)} ({age(at_ms).text} ago)"
    return Cell(at_ms, ago if at_ms else "-", "" if at_ms else "dim")


def made(created_ms: int, by: str) -> dict[str, Any]:
    """Return the facts when and by whom something was made."""
    return {
        "created_ms": moment(created_ms),
        "by": creator(by),
    }


def beside(more: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """Return facts that the client has no field for: all for programs, none for a person.

    more: the facts that a newer broker tells beside those of the client's class.
    """
    return {} if output.on_terminal() and not as_json else more


@app.command(
    "peek",
    epilog="""\b
Examples:
  malamute mailbox peek ann                the 10 oldest messages
  malamute mailbox peek ann --after 4711   those after that number
  malamute mailbox peek lookup.dead        what a service could not do

In a pipe a line is a body; --json has all that is known. They come in the order of their
numbers; delivery looks at priority and delay, too.""",
)
def peek(
    ctx: typer.Context,
    mailbox: Name,
    after: Annotated[
        int, typer.Option(metavar="NUMBER", help="Only numbers above this one.", show_default=False)
    ] = -1,
    count: Annotated[
        int, typer.Option("--count", "-n", metavar="N", min=1, help="At most so many.")
    ] = 10,
    with_fields: Annotated[bool, typer.Option("--fields", help="Show fields too.")] = False,
    bodies_only: Annotated[bool, typer.Option("--bodies-only", help="Only bodies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Show messages and leave them in the mailbox."""
    writer = MailWriter(as_json=as_json, bodies_only=bodies_only, with_fields=with_fields)
    with linked(ctx) as client:
        known(client, mailbox)
        short = 0
        while writer.count < count:
            page = client.peek(
                mailbox, after=after, limit=min(count - writer.count, 1000), body_bytes=_BODY_BYTES
            )
            if not page:
                break
            messages = [Peeked(each) for each in page]
            short += sum(each.cut for each in messages)
            writer.write_all(messages)
            after = page[-1].number
    if short:
        say(f"{count_text(short, 'message')} not shown whole: {size_text(_BODY_BYTES)} of each")
    if not writer.count and output.on_terminal():
        say(f"{mailbox} is empty" if after < 0 else f"{mailbox}: no message after {after}")


@app.command(
    "purge",
    epilog="""\b
Examples:
  malamute mailbox purge crew.berlin
  malamute mailbox purge crew.berlin --yes""",
)
def purge(
    ctx: typer.Context, mailbox: Name, yes: Yes = False, as_json: output.Json = False
) -> None:
    """Empty a mailbox, except for messages that a reader holds."""
    with linked(ctx) as client:
        found = known(client, mailbox)
        free = _free(found)
        if free:
            agreed(f"purge {mailbox} of its {count_text(free, 'message')}", mailbox, yes=yes)
        told = watched(
            f"purging {mailbox}", free,
            lambda: client.purge_mailbox(mailbox),
            lambda: _free(client.mailbox_info(mailbox)),
        )  # fmt: skip
    left = f"; {count_text(told.held)} in a reader's hand stayed" if told.held else ""
    output.done(
        f"purged {mailbox} of {count_text(told.count, 'message')}{left}",
        {"purged": mailbox, "messages": told.count, "held": told.held},
        as_json=as_json,
    )


def _free(found: MailboxFacts) -> int:
    """Return how many messages a purge takes: it leaves what a reader holds."""
    return found.messages - found.held


@app.command(
    "edit",
    epilog="""\b
Examples:
  malamute mailbox edit ann --max-messages 1000 --ttl 7d
  malamute mailbox edit scratch --create --memory""",
)
def edit(
    ctx: typer.Context,
    mailbox: Name,
    max_messages: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Refuse (wait) beyond so many; 0: the broker's."),
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Refuse (wait) beyond so much: 64MiB.")
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Time to live of messages that name no expiry: 7d; 0: they do not expire.",
        ),
    ] = None,
    memory: MemoryOnCreate = False,
    level: LevelOption = None,
    description: Description = None,
    settings: Settings = None,
    replace: Replace = False,
    create: Annotated[
        bool, typer.Option("--create", help="Make the mailbox when there is none.")
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Change settings of a mailbox, or make one; settings that are not named stay."""
    asked = wanted(
        settings, max_messages=max_messages, max_bytes=max_bytes, ttl_ms=ttl,
        memory=memory or None, level=level, description=description,
    )  # fmt: skip
    if not (asked or create or replace):
        raise CommandFailed("nothing to change; name a setting, such as --ttl 7d", USAGE)
    with linked(ctx) as client:
        if not create:
            known(client, mailbox, "--create makes it")
        found, done = made_or_edited(
            lambda: client.mailbox_info(mailbox), "mailbox", mailbox, asked,
            lambda: client.edit_mailbox(mailbox, asked, replace=replace),
            replace=replace,
        )  # fmt: skip
    if as_json:
        _show(found, as_json)
    else:
        output.done(done, {}, as_json=False)


@app.command(
    "rm",
    epilog="""\b
Examples:
  malamute mailbox rm crew.berlin
  malamute mailbox rm crew.berlin crew.rome --yes""",
)
def rm(
    ctx: typer.Context, mailboxes: Names, yes: Yes = False, as_json: output.Json = False
) -> None:
    """Remove mailboxes and all that lies in them."""
    with linked(ctx) as client:
        # All names are looked up first: with a misspelt one, none is removed.
        for name, found in {name: known(client, name) for name in mailboxes}.items():
            what = f"{name} and its {count_text(found.messages, 'message')}"
            agreed(f"remove {what}", name, yes=yes)
            count = watched(
                f"removing {name}", found.messages,
                lambda name=name: client.remove_mailbox(name),  # type: ignore[misc]
                lambda name=name: client.mailbox_info(name).messages,  # type: ignore[misc]
            )  # fmt: skip
            output.done(
                f"removed {name} and {count_text(count, 'message')}",
                {"removed": name, "messages": count},
                as_json=as_json,
            )
