"""`malamute config ...`: check, show and reload a broker's configuration.

Owns the words for problems and origins. The rules: all problems are told at once, each with its
place; a secret is never printed. Source: config_check.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_py.cli import output
from malamute_py.cli.commands import group
from malamute_py.cli.failures import FAILED, USAGE, CommandFailed
from malamute_py.cli.output import Cell, Column
from malamute_py.cli.values import count_text, duration_text, setting_pairs, size_text

if TYPE_CHECKING:
    from malamute_py.client.facts import ReloadedSetting
    from malamute_py.config_check import Problem

app = group("config")

_SHOWN: Final = (
    Column("key", "Key", style="cyan"), Column("value", "Value"), Column("origin", "Origin"),
)  # fmt: skip
_ORIGIN_STYLES: Final = {"default": "dim"}
_OUTCOME_STYLES: Final = {"applied": "green", "refused": "red", "restart": "yellow"}

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting (repeatable), as of `broker`."),
]


@app.command(
    "check",
    epilog="""\b
Examples:
  malamute config check malamute.toml
  malamute config check malamute.toml --set journal.ring_bytes=8GiB --json

Variables (MALAMUTE_JOURNAL_RING_BYTES) count, as for a broker that starts in this shell. Nothing is
changed, and no address is bound. Root may check for a broker of another user: files with secrets
may then be any user's, or root's and for a group to read. `sudo -u USER malamute config check FILE`
judges them as the broker's own user.

Exit codes: 0 good, 2 there are problems.""",
)
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration, a TOML file.")],
    settings: Set = None,
    as_json: output.Json = False,
) -> int:
    """Check a configuration, and tell all its problems at once."""
    from malamute_py.config_check import Problem, examine
    from malamute_py.sections import judged_for_another
    from malamute_py.server.start_faults import start_doubts, start_faults

    examined = examine(file, environment=os.environ, overrides=setting_pairs(settings))
    with judged_for_another():  # Root may judge files that another user's broker will read.
        # Values that cannot be read, and with the values what would make a start fail.
        problems = examined.all_problems(start_faults(examined.config))
        # A doubt lets a broker start, but its operator may not have meant it.
        warnings = [
            Problem(doubt.place or examined.place_of(doubt.name), doubt.name, doubt.why)
            for doubt in start_doubts(examined.config)
        ]
    if as_json:
        told = {"problems": problems, "warnings": warnings}
        lists = {name: [each._asdict() for each in some] for name, some in told.items()}
        output.print_json({"good": not problems, **lists})
    else:
        tell_problems(problems)
        tell_problems(each._replace(why=f"warning: {each.why}") for each in warnings)
        if not problems:
            print(f"{file} is good")
    return USAGE if problems else 0


def tell_problems(problems: Iterable[Problem], *, err: bool = False) -> None:
    """Print each problem as a line `place: key: why`, for a person or an editor that jumps there.

    err: to standard error, for commands that print something else.
    """
    for place, key, why in problems:
        # The place of a variable's value is the variable: its name is not told twice.
        text = ": ".join(part for part in (place, key if key != place else "", why) if part)
        print(text, file=sys.stderr if err else sys.stdout)


@app.command(
    "show",
    epilog="""\b
Examples:
  malamute config show malamute.toml
  malamute config show malamute.toml --changed
  malamute config show --running
  malamute config show --json

--running asks the broker of the context what is in force there, which needs the permission admin,
and tells what its last reload did with a setting.

The origin of a value is a line of the file, a variable, the command line, or the default. In a pipe
a line has, with tabs between: key, value, origin, and with --running the outcome of the reload.

Problems go to standard error. Where the values are right and a start would fail all the same, for
instance because of a users file that cannot be read, the values are shown.

Exit codes: 0 good, 2 there are problems.""",
)
def show(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="The configuration; without it, the defaults."),
    ] = None,
    settings: Set = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only values that are not the default.")
    ] = False,
    running: Annotated[
        bool, typer.Option("--running", help="What is in force in a running broker.")
    ] = False,
    as_json: output.Json = False,
) -> int:
    """Show each value in force, and where it comes from."""
    from malamute_py.config_check import DEFAULT, examine
    from malamute_py.sections import judged_for_another
    from malamute_py.server.start_faults import start_faults

    if running:
        if file is not None or settings:
            raise CommandFailed("--running asks the broker: give no FILE and no --set", USAGE)
        return _show_running(ctx, changed, as_json)
    examined = examine(file, environment=os.environ, overrides=setting_pairs(settings))
    with judged_for_another():  # Root may judge files that another user's broker will read.
        problems = examined.all_problems(start_faults(examined.config))
    tell_problems(problems, err=True)
    if examined.problems:  # A value itself is wrong: there is no configuration to show.
        return USAGE
    output.listing(
        list(_SHOWN),
        [
            (key, _cell(key, value), _origin_cell(origin))
            for key, value, origin in examined.settings
            if not changed or origin != DEFAULT
        ],
        as_json=as_json,
        empty="no value differs from its default",
    )
    return USAGE if problems else 0


def _show_running(ctx: typer.Context, changed: bool, as_json: bool) -> int:
    """Show what is in force in a running broker, and what its last reload did with each setting.

    changed: leave out defaults that no reload touched. Returns the exit code.
    """
    from malamute_py.cli.linking import linked

    with linked(ctx) as client:
        found = client.settings_in_force()
    if not found.settings:
        raise CommandFailed("this broker does not tell its settings: it is an earlier one")
    rows: list[tuple[Any, ...]] = []
    for setting in found.settings:
        key, value, origin = setting
        # A reload that was refused is shown although the value in force is still the default.
        change = found.change_of(key)
        if not changed or not setting.is_default or change is not None:
            rows.append((key, _cell(key, value), _origin_cell(origin), _outcome_cell(change)))
    output.listing(
        [*_SHOWN, Column("reload", "Last reload")],
        rows,
        as_json=as_json,
        empty="no value differs from its default",
    )
    return 0


def _origin_cell(origin: str) -> Cell:
    return Cell(origin, origin, _ORIGIN_STYLES.get(origin, ""))


def _outcome_cell(change: ReloadedSetting | None) -> Cell:
    """Return what a reload did with a setting, and why if it was refused."""
    if change is None:
        return Cell("", "")
    text = f"{change.outcome}: {change.why}" if change.why else change.outcome
    return Cell(text, text, _OUTCOME_STYLES.get(change.outcome, ""))


@app.command(
    "reload",
    epilog="""\b
Examples:
  malamute config reload
  malamute config reload --json

A running broker takes up users, permissions, quotas and the bounds of [links], [streams],
[mailboxes], [services] and [groups]; other settings need a restart. It reads its own files. SIGHUP
does the same where the broker runs without a terminal. In a pipe a line has, with tabs between:
key, outcome, reason.

Exit codes: 0 done, 1 something was refused: its old value stays in force.""",
)
def reload(ctx: typer.Context, as_json: output.Json = False) -> int:
    """Have a running broker read its configuration and users anew."""
    from malamute_py.cli.linking import linked

    with linked(ctx) as client:
        changes = client.reload_config()
    output.listing(
        [
            Column("key", "Key", style="cyan"),
            Column("outcome", "Outcome"),
            Column("why", "Reason"),
        ],
        [
            (key, Cell(outcome, outcome, _OUTCOME_STYLES.get(outcome, "")), why)
            for key, outcome, why in changes
        ],
        as_json=as_json,
        empty="nothing differs from what is in force",
    )
    return FAILED if any(change.outcome == "refused" for change in changes) else 0


def _cell(key: str, value: Any) -> Cell:
    """Return a value of the configuration with its unit, by the name of its key."""
    if isinstance(value, str):
        return Cell(value, value or '""')
    if type(value) is int and "bytes" in key:
        return Cell(value, size_text(value))
    if type(value) is int and key.endswith("_ms"):
        return Cell(value, duration_text(value))
    if type(value) is int:
        return Cell(value, count_text(value))
    return Cell(value, str(value).lower() if isinstance(value, bool) else str(value))
