"""Users in force in a running broker, as it tells them: `user ls` and `who-can` with --running.

Owns the words for what a user may do there. The rule: the broker decides, over what it has taken
up; a users file that was changed since then does not count. Source: SPEC.md, LIST_USERS.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malamute_py.cli.failures import USAGE, CommandFailed

if TYPE_CHECKING:
    from malamute_py.client.facts import UserFacts

Running = Annotated[bool, typer.Option("--running", help="What is in force in a running broker.")]


def in_force(
    ctx: typer.Context,
    users: Path | None,
    config: Path | None,
    verb: str = "",
    name: str = "",
) -> list[UserFacts]:
    """Return the broker's users, and (verb, name) whether each may do that.

    users, config: options of the command that go with files only. Raises CommandFailed: one was
    given.
    """
    from malamute_py.cli.linking import linked

    if users is not None or config is not None:
        raise CommandFailed("--running asks the broker: give no --users and no --config", USAGE)
    with linked(ctx) as client:
        return client.list_users(verb, name)


def grant_text(grant: Mapping[str, Any]) -> str:
    """Return what a user may do as text: each verb with its names, then what is denied.

    grant: names by verb; True: the verb takes none. `deny` and `write_subjects` are tables.
    """
    found: list[str] = []
    for verb, names in grant.items():
        if verb == "deny":
            found += (f"not {denied} {', '.join(those)}" for denied, those in names.items())
        elif verb == "write_subjects":
            found += (
                f"write {stream} under {', '.join(subjects)}" for stream, subjects in names.items()
            )
        else:
            found.append(verb if names is True else f"{verb} {', '.join(names)}")
    return "; ".join(found)
