"""`malamute grant`, `revoke` and `who-can`: permissions in a broker's users file.

Owns the words for permissions. The rule: what is asked is answered by the broker's own decision,
over the configuration and the users file together.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_py.cli import complete, output
from malamute_py.cli.absent import nearest
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.output import Column
from malamute_py.cli.users_file import (
    TAKEN_UP,
    ConfigOption,
    Edit,
    UsersOption,
    editing,
    read_config,
)
from malamute_py.cli.users_in_force import Running, in_force

if TYPE_CHECKING:
    from malamute_py.client.facts import UserFacts

EPILOG: Final = """\b
Examples:
  malamute grant ann read orders 'trades.*'
  malamute grant ann write orders --subject 'eu.*'
  malamute grant ann read salaries --deny
  malamute grant ops manage_queues '*'
  malamute grant root admin
  malamute revoke ann read orders
  malamute revoke ann write                   everything that ann may write
  malamute who-can read orders                in a pipe: user, tab, condition
  malamute who-can read orders --running      asks the broker what is in force"""

NAMED: Final = (
    "read", "write", "create", "trim", "send", "receive", "purge", "request", "work",
    "manage_streams", "manage_queues",
)  # fmt: skip
"""Verbs on named streams, mailboxes or services."""
DENIED_ONLY: Final = ("replay",)
"""Verbs that come with another, and can only be denied: replay comes with read."""
WITHOUT_NAMES: Final = ("manage_clients", "manage_users", "admin")
_VERBS: Final = ", ".join((*NAMED, *WITHOUT_NAMES))
_ALL: Final = "*"

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The user; '*': all without a section of their own.")
]
Verb = Annotated[
    str,
    typer.Argument(
        metavar="VERB", help=f"One of {_VERBS}; denied: replay, too.",
        autocompletion=complete.among((*NAMED, *WITHOUT_NAMES, *DENIED_ONLY)),
    ),
]  # fmt: skip
Deny = Annotated[
    bool,
    typer.Option(
        "--deny",
        help="About a denial, which goes before what is allowed; there is none of"
        f" {', '.join(WITHOUT_NAMES)}.",
    ),
]


def _check(verb: str, names: list[str], deny: bool) -> None:
    """Raise CommandFailed unless the verb exists and takes what was given with it.

    names, deny: as of the command line. Called before a users file is read or written.
    """
    if verb in WITHOUT_NAMES:
        if names or deny:
            raise CommandFailed(f"{verb} is granted or not: it has no names and no denial", USAGE)
        return
    if verb in DENIED_ONLY and not deny:
        raise CommandFailed(f"{verb} comes with read; it can be denied: --deny", USAGE)
    if verb not in (*NAMED, *DENIED_ONLY):
        hint = nearest(verb, (*NAMED, *WITHOUT_NAMES), f"there are {_VERBS}; denied: replay, too")
        raise CommandFailed(f"there is no verb {verb!r}; {hint}", USAGE)


def _check_patterns(names: list[str]) -> None:
    """Raise CommandFailed for a pattern that would allow nothing, and deny nothing."""
    from malamute_py.server.authentication.name_patterns import pattern_fault

    for each in names:
        if fault := pattern_fault(each):
            raise CommandFailed(fault, USAGE)


def grant(
    name: Name,
    verb: Verb,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATTERN", help="Names; `*` stands for any characters."),
    ] = None,
    subject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="With write: publish under these subjects only (repeatable)."
        ),
    ] = None,
    deny: Deny = False,
    users: UsersOption = None,
    config: ConfigOption = None,
    as_json: output.Json = False,
) -> None:
    """Allow a user something, or deny it."""
    names = list(names or ())
    _check(verb, names, deny)
    if verb not in WITHOUT_NAMES and not names:
        raise CommandFailed(f"{verb} what? name one, or '*' for all", USAGE)
    if subject and (verb != "write" or deny):
        raise CommandFailed("--subject goes with write", USAGE)
    _check_patterns(names)
    with editing(users, config) as edit:  # Writes the file at its end.
        _check_user(edit, name)
        table = edit.table("permissions", name)
        if verb in WITHOUT_NAMES:
            table[verb] = True
        elif subject:  # Write under these subjects only: a table of subjects by pattern of names.
            bound = edit.table("permissions", name, "write_subjects")
            for each in names:
                bound[each] = _joined(bound.get(each), subject)
        else:
            table = edit.table("permissions", name, "deny") if deny else table
            table[verb] = _joined(table.get(verb), names)
    does = "may not" if deny else "may"
    under = f" under {', '.join(subject)}" if subject else ""
    output.done(
        f"{name} {does} {verb} {', '.join(names)}".rstrip() + f"{under}; {TAKEN_UP}",
        {"user": name, "verb": verb, "names": names, "deny": deny, "subjects": subject or []},
        as_json=as_json,
    )


def revoke(
    name: Name,
    verb: Verb,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATTERN", help="As they were granted; without any, all of them."),
    ] = None,
    deny: Deny = False,
    users: UsersOption = None,
    config: ConfigOption = None,
    as_json: output.Json = False,
) -> None:
    """Take back what was granted or denied."""
    names = list(names or ())
    _check(verb, names, deny)
    with editing(users, config) as edit:
        place = ("permissions", name, "deny") if deny else ("permissions", name)
        held = (edit.find(*place) or {}).get(verb)
        # `write` is granted in two tables: in the list of names, and by subjects under each name.
        bound = edit.find(*place, "write_subjects") if verb == "write" and not deny else None
        gone = _take_back(edit, place, verb, held, names)  # Whether anything was there.
        for each in names or list(bound or ()):
            gone |= edit.remove(*place, "write_subjects", each)
        if not gone:
            what = f"{verb} {', '.join(names)}".rstrip()
            denied = "denied" if deny else "granted"
            raise CommandFailed(f"{what} is not {denied} to {name} in {edit.path}")
    output.done(
        f"took back from {name}: {'deny ' if deny else ''}{verb} {', '.join(names)}".rstrip()
        + f"; {TAKEN_UP}",
        {"user": name, "verb": verb, "names": names, "deny": deny},
        as_json=as_json,
    )


def _take_back(edit: Edit, place: tuple[str, ...], verb: str, held: Any, names: list[str]) -> bool:
    """Remove names from a verb's list, or the verb where none is left; False: nothing was there.

    place: names of the tables that lead to it. held: its value there, None: it has none. names:
    empty: all. A verb without names has True as its value.
    """
    if held is None:
        return False
    left = [each for each in held if each not in names] if names else []
    if names and len(left) == len(held):
        return False
    if left:
        edit.table(*place)[verb] = left
        return True
    return edit.remove(*place, verb)


def _joined(held: Any, names: list[str]) -> list[str]:
    """Return the names that are held and the new ones, each once."""
    return list(dict.fromkeys([*(held or ()), *names]))


def _check_user(edit: Edit, name: str) -> None:
    """Raise CommandFailed for a user that the file does not have; `*` stands for all users."""
    if name != _ALL:
        edit.user(name)


def who_can(
    ctx: typer.Context,
    verb: Verb,
    name: Annotated[
        str,
        typer.Argument(metavar="[NAME]", help="The stream, mailbox or service; of some verbs."),
    ] = "",
    users: UsersOption = None,
    config: ConfigOption = None,
    running: Running = False,
    as_json: output.Json = False,
) -> None:
    """Tell which users may do something."""
    if verb not in DENIED_ONLY:  # `replay` cannot be granted, but it can be asked about.
        _check(verb, [], deny=False)
    if not name and verb not in WITHOUT_NAMES:
        raise CommandFailed(f"{verb} what? name a stream, mailbox or service", USAGE)
    if running:
        rows = [
            (each.user, _condition(each, verb))
            for each in in_force(ctx, users, config, verb, name)
            if each.may
        ]
    else:
        rows = _by_the_files(verb, name, users, config)
    output.listing(
        [Column("user", "User", style="cyan"), Column("condition", "Condition")],
        rows,
        as_json=as_json,
        empty=f"no user may {verb} {name}".rstrip(),
    )


def _condition(user: UserFacts, verb: str) -> str:
    """Return under which condition a user may do it, as a running broker says; empty: none.

    What takes no name, a user of a namespace may do within the namespace only.
    """
    if user.subjects:
        return f"under subjects: {', '.join(user.subjects)}"
    return f"in namespace {user.namespace}" if user.namespace and verb in WITHOUT_NAMES else ""


def _by_the_files(
    verb: str, name: str, users: Path | None, config: Path | None
) -> list[tuple[str, str]]:
    """Return the users who may do it by the configuration and the users file, with the condition.

    The broker's own code decides, over both files as a start would read them.
    """
    from malamute_py.server.authentication.credentials import carriers_of
    from malamute_py.server.authentication.namespaces import Namespaces
    from malamute_py.server.authentication.permissions import Permissions
    from malamute_py.server.authentication.users_file import with_users

    merged = with_users(read_config(users, config))
    namespaces = Namespaces(merged.namespaces)
    permissions = Permissions(merged.permissions, carriers_of(merged.authentication), namespaces)
    authentication = merged.authentication
    known = {*authentication.users, *authentication.clients, *merged.permissions}
    rows = []
    for user in sorted(known):
        if permissions(user, verb, name):
            # A verb with a name says by the name where it holds; one without, by the namespace.
            namespace = namespaces.of(user) if verb in WITHOUT_NAMES else None
            rows.append((user, f"in namespace {namespace.name}" if namespace else ""))
        elif verb == "write" and permissions.subjects(user, name) is not None:
            # A user without a section of its own has that for all.
            bound = merged.permissions.get(user) or merged.permissions[_ALL]
            rows.append((user, f"under subjects: {_subjects(bound.write_subjects, name)}"))
    return rows


def _subjects(bound: dict[str, list[str]], stream: str) -> str:
    """Return the subjects that a grant on this stream is bound to, as text; empty: any."""
    from malamute_py.server.authentication.name_patterns import fits

    found = [each for pattern, subjects in bound.items() if fits(pattern, stream)
             for each in subjects]  # fmt: skip
    return ", ".join(found)
