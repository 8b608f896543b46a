"""`malamute group ...`: list, show, edit, reset, requeue, remove.

Owns the words for groups and for the records that each member holds. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_protocol.errors import BrokerRefused
from malamute_py.cli import complete, output
from malamute_py.cli.absent import absent
from malamute_py.cli.agreed import Yes, agreed
from malamute_py.cli.columns import age, counted, creator, dead, figure, letters_of, read, red
from malamute_py.cli.commands import group as group_of
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.linking import linked
from malamute_py.cli.mailboxes import beside, since
from malamute_py.cli.output import Cell, Column
from malamute_py.cli.parameters import OfStream, PrefixOption, Stream
from malamute_py.cli.progress import watched
from malamute_py.cli.settings import Description, Replace, Settings, shown, wanted
from malamute_py.cli.subscribe import known as known_stream
from malamute_py.cli.subscribe import one_place
from malamute_py.cli.values import count_text, pattern_text

if TYPE_CHECKING:
    from malamute_py.client.facts import GroupFacts
    from malamute_py.client.sync.client import SyncClient

app = group_of("group")

Name = Annotated[
    str, typer.Argument(metavar="GROUP", help="The group.", autocompletion=complete.groups)
]


def known(client: SyncClient, stream: str, group: str) -> GroupFacts:
    """Return facts about a group. Raises CommandFailed, with the nearest name: there is none."""
    known_stream(client, stream)
    return absent(
        lambda: client.group_info(stream, group),
        "group",
        group,
        lambda: [each.group for each in client.list_groups(stream)],
        f"its first member makes it: malamute sub {stream} --group {group}",
        where=f" of {stream}",
    )


@app.command(
    "ls",
    epilog="""\b
Examples:
  malamute group ls
  malamute group ls trades --json

In a pipe a line has, with tabs between: stream, group, kind, members, next offset,
how many records it is behind, records in hand, records that are done ahead of the next offset,
time of its last move in milliseconds, dead letters. --json names them.""",
)
def ls(
    ctx: typer.Context,
    stream: OfStream = "",
    prefix: PrefixOption = "",
    as_json: output.Json = False,
) -> None:  # fmt: skip
    """List the groups of consumers."""
    with linked(ctx) as client:
        if stream:
            known_stream(client, stream)
        found = client.list_groups(stream, prefix)
    output.entries(
        [
            Column("stream", "Stream", style="cyan"),
            Column("group", "Group", style="cyan"),
            Column("kind", "Kind"),
            Column("members", "Members", right=True, cell=lambda each: counted(len(each.members))),
            figure("next", "Next"),
            figure("lag", "Behind"),
            Column(
                "held", "In hand", right=True,
                cell=lambda each: counted(sum(member.held for member in each.members)),
            ),
            figure("done", "Done ahead", spare=True),
            figure("moved_ms", "Moved ago", age, spare=True),
            figure("dead", "Dead", red, spare=True),
        ],
        found,
        as_json=as_json,
        empty=(
            f"{stream} has no groups" if stream else
            "no groups yet; the first member makes one: malamute sub STREAM --group NAME"
        ),
    )  # fmt: skip


@app.command(
    "info",
    epilog="""\b
Examples:
  malamute group info trades crew
  malamute group info trades crew --json | jq .members

In a pipe a line has the name of a fact and the fact, with a tab between; then one
for each member: `member`, its identity, its link, records in hand, since when it is a member and
when its oldest record in hand was delivered, both in milliseconds (0: none). --json names
them.""",
)
def info(ctx: typer.Context, stream: Stream, group: Name, as_json: output.Json = False) -> None:
    """Show one group: how far it is, and what members hold."""
    with linked(ctx) as client:
        found = known(client, stream, group)
    _show(found, as_json)


def _show(found: GroupFacts, as_json: bool) -> None:
    """Print the facts of one group, then its members: for `info`, and `edit` with --json."""
    # `aside` (given nothing, since a lease of it has ended): in the table a colour.
    members = output.objects((*_MEMBERS, Column("aside", "")), found.members)
    facts: dict[str, Any] = {
        "stream": Cell(found.stream, found.stream, "cyan"),
        "group": Cell(found.group, found.group, "bold cyan"),
        "kind": found.kind,
        "pattern": Cell(found.pattern, pattern_text(found.pattern)),
        "next": found.next,
        "tail": found.tail,
        "lag": found.lag,
        "done": Cell(found.done, f"{count_text(found.done)} ahead of the next offset"),
        "moved_ms": since(found.moved_ms),
        "by": creator(found.by),
        "attempts": _attempts(found),
        "dead": dead(found),
        "dead_letters": found.dead_letters,
        # The cell `dead` has these mailboxes for a person.
        **({} if output.on_terminal() and not as_json else {"dead_in": found.dead_in}),
        "settings": shown(found.settings, _ZERO),
        **beside(_named(found.more), as_json),
    }
    if as_json:
        output.facts({**facts, "members": members}, as_json=True)
        return
    output.facts(facts, as_json=False)
    output.entries(
        _MEMBERS,
        found.members,
        as_json=False,
        empty="the group has no members now",
        mark="member",
    )


_MEMBERS: Final = (
    read("identity", "Member", creator, style="cyan"),
    Column("link", "Link", right=True),
    Column(
        "held", "In hand", right=True,
        cell=lambda each: Cell(each.held, count_text(each.held), "red" if each.aside else ""),
    ),
    figure("since_ms", "Member for", age),
    figure("oldest_ms", "Oldest in hand", age),
)  # fmt: skip

_ZERO = {"attempts_max": "not counted", "lease_ms": "none"}
"""Words for a setting that is 0."""


def _attempts(found: GroupFacts) -> Cell:
    """Return how many records have had how many attempts."""
    counts = [f"{count_text(count)} after {times}" for times, count in found.attempts]
    return Cell({str(times): count for times, count in found.attempts}, ", ".join(counts) or "none")


def _named(more: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that have no column, with the visibility by its name."""
    if "visibility" not in more:
        return more
    return {**more, "visibility": "durable" if more["visibility"] else "live"}


@app.command(
    "edit",
    epilog="""\b
Examples:
  malamute group edit orders packers --attempts 5 --lease 1m
  malamute group edit orders packers --dead-letters ops""",
)
def edit(
    ctx: typer.Context,
    stream: Stream,
    group: Name,
    attempts: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0,
            help="Attempts after which a record is a dead letter; 0: it comes again for ever.",
        ),
    ] = None,
    dead_letters: Annotated[
        str | None,
        typer.Option(metavar="MAILBOX", help="Of its dead letters; default: STREAM.GROUP.dead."),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Silence after which others get a member's record."),
    ] = None,
    description: Description = None,
    settings: Settings = None,
    replace: Replace = False,
    as_json: output.Json = False,
) -> None:  # fmt: skip
    """Change settings of a group; settings that are not named stay."""
    asked = wanted(
        settings, attempts_max=attempts, dead_letters=dead_letters, lease_ms=lease,
        description=description,
    )  # fmt: skip
    if not asked and not replace:
        raise CommandFailed("nothing to change; name a setting, such as --attempts 5", USAGE)
    with linked(ctx) as client:
        known(client, stream, group)
        found = client.edit_group(stream, group, asked, replace=replace)
    if as_json:
        _show(found, as_json)
    else:
        output.done(
            f"edited {group} of {stream}: {', '.join(asked) or 'all settings'}", {}, as_json=False
        )


@app.command(
    "reset",
    epilog="""\b
Examples:
  malamute group reset orders packers earliest
  malamute group reset orders packers latest      skip what was not done
  malamute group reset orders packers 4711        an offset
  malamute group reset orders packers now-1h      a time, as 2026-01-31T10:00
  malamute group reset orders packers 0 --force    members lose what they hold

Records from there on come again, whether or not they were done; dead letters stay.""",
)
def reset(
    ctx: typer.Context,
    stream: Stream,
    group: Name,
    point: Annotated[
        str,
        typer.Argument(metavar="POINT", help="earliest, latest, an OFFSET, message ID or TIME."),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="End the memberships of members that are at work.")
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Have a group stand elsewhere, forward or back."""
    start = one_place(point, "a group stands at")
    with linked(ctx) as client:
        known(client, stream, group)
        try:
            found = client.reset_group(stream, group, start, force=force)
        except BrokerRefused as error:
            if error.code == "in_use":  # Members hold records.
                raise CommandFailed(
                    f"{stream}/{group} was not reset: {error.reason}; --force ends its memberships"
                ) from None
            raise
    before = int(found.more.get("before", 0))
    output.done(
        f"{stream}/{group} stands at {found.next:,} (it stood at {before:,})",
        {"stream": stream, "group": group, "next": found.next, "before": before},
        as_json=as_json,
    )


@app.command(
    "requeue",
    epilog="""\b
Examples:
  malamute group requeue orders packers         all dead letters of the group
  malamute group requeue orders packers 17 23   these
  malamute mailbox peek orders.packers.dead     shows their numbers, and why""",
)
def requeue(
    ctx: typer.Context,
    stream: Stream,
    group: Name,
    numbers: Annotated[
        list[int] | None,
        typer.Argument(metavar="NUMBER", help="Their numbers; default: all dead letters.",
                       show_default=False),
    ] = None,
    as_json: output.Json = False,
) -> None:  # fmt: skip
    """Have members get the records of dead letters again, from the stream."""
    with linked(ctx) as client:
        found = known(client, stream, group)
        try:
            # The progress bar follows the number of dead letters, asked for meanwhile.
            count = watched(
                f"requeuing {group}", max(1, len(numbers or ()) or found.dead),
                lambda: client.requeue_group(stream, group, numbers or ()),
                lambda: client.group_info(stream, group).dead,
            )  # fmt: skip
        except BrokerRefused as error:
            if numbers or error.code != "unknown_request":
                raise
            count = 0  # All of none were asked for: nothing to do is no fault.
        # `left`: how many stay dead letters, of the numbers that were given or of all.
        after = found if numbers else client.group_info(stream, group)
        left = len(set(numbers)) - count if numbers else after.dead
    text = f"{count_text(count, 'record')} of {stream} again for {group}"
    if left > 0 and numbers:
        text += (
            f"; {left} of these numbers stay: no dead letters of {group}, or their records are"
            " gone, or a reader holds them"
        )
    elif left > 0:
        text += (
            f"; {count_text(left, 'message')} left in {letters_of(after)}, of others, or whose"
            " records are gone, or which a reader holds"
        )
    elif not count:
        text = f"{group} has no dead letters"
    output.done(
        text, {"stream": stream, "group": group, "requeued": count, "left": left}, as_json=as_json
    )


@app.command(
    "rm",
    epilog="""\b
Examples:
  malamute group rm trades crew""",
)
def rm(
    ctx: typer.Context, stream: Stream, group: Name, yes: Yes = False, as_json: output.Json = False
) -> None:
    """Forget a group without members; the records stay."""
    with linked(ctx) as client:
        found = known(client, stream, group)
        agreed(f"remove group {group} of {stream}, which stands at {found.next:,}", group, yes=yes)
        client.remove_group(stream, group)
    output.done(
        f"removed group {group} of {stream}; it stood at {found.next:,}",
        {"stream": stream, "removed": group, "next": found.next},
        as_json=as_json,
    )
