"""`malamute user ...`: users of a broker and their credentials, in its users file.

Owns the words for users. The rule: a password is asked for, read from the input or generated, never
an argument; only its hash is written.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malamute_py.cli import output
from malamute_py.cli.commands import group, say
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.keys import PUBLIC_SUFFIX, make_pair, public_key
from malamute_py.cli.output import Column
from malamute_py.cli.users_file import (
    TAKEN_UP,
    ConfigOption,
    Edit,
    UsersOption,
    editing,
    read_config,
)
from malamute_py.cli.users_in_force import Running, grant_text, in_force

if TYPE_CHECKING:
    from malamute_py.client.facts import UserFacts
    from malamute_py.config import NamespaceSection

app = group("user")

_GENERATED_BYTES = 18
"""Random bytes of a generated password: 24 characters."""
_COLUMNS = (
    Column("name", "User", style="cyan"),
    Column("credential", "Credential"),
    Column("identities", "Identities"),
    Column("grant", "Permitted"),
    Column("namespace", "Namespace"),
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The user.")]
Generate = Annotated[
    bool, typer.Option("--generate", help="Generate a password, and print it once.")
]
NewKey = Annotated[
    Path | None,
    typer.Option(
        "--new-key", metavar="FILE", help="Make a key pair (CURVE): the secret key goes to FILE."
    ),
]
PublicKey = Annotated[
    str | None,
    typer.Option(
        "--public-key", metavar="KEY", help="Public key of the user (CURVE), or a file with it."
    ),
]


@app.command(
    "add",
    epilog="""\b
Examples:
  malamute user add ann                          asks for a password
  malamute user add robot --generate
  malamute user add ann --new-key ann.key        with mechanism = "curve"
  malamute user add ann --public-key ann.key.pub

A new user may do nothing: `malamute grant ann read orders`. Without a terminal the password is the
first line of the input.""",
)
def add(
    name: Name,
    generate: Generate = False,
    new_key: NewKey = None,
    given_key: PublicKey = None,
    identity: Annotated[
        list[str] | None,
        typer.Option(metavar="TEMPLATE", help="Identities beside NAME-{n}, as web-{n}."),
    ] = None,
    users: UsersOption = None,
    config: ConfigOption = None,
    as_json: output.Json = False,
) -> None:
    """Add a user with a password or a key."""
    with editing(users, config) as edit:  # Writes the file at its end.
        if edit.find("users", name) is not None:
            raise CommandFailed(
                f"user {name} exists; `malamute user passwd {name}` or `user key {name}` gives"
                " another credential"
            )
        by_key = new_key is not None or given_key is not None
        if not by_key and read_config(users, config).authentication.mechanism == "curve":
            raise CommandFailed(
                'mechanism = "curve": give the user a key, --new-key FILE or --public-key KEY',
                USAGE,
            )
        table = edit.table("users", name)
        told = (
            _give_key(edit, table, new_key, given_key)
            if by_key
            else _give_password(table, generate)
        )
        if identity:
            table["identities"] = identity
        output_told = {"user": name, "file": str(edit.path), **told}
    _say(f"added user {name} to {edit.path}", output_told, as_json)
    # The name alone decides whether it belongs to a namespace.
    _tell_namespace(name, read_config(users, config).namespaces)


@app.command(
    "rm",
    epilog="""\b
Examples:
  malamute user rm ann""",
)
def rm(
    name: Name,
    users: UsersOption = None,
    config: ConfigOption = None,
    as_json: output.Json = False,
) -> None:
    """Remove a user, with permissions and quotas."""
    with editing(users, config) as edit:
        edit.user(name)
        for section in ("users", "permissions", "quotas"):
            edit.remove(section, name)
    _say(f"removed user {name} from {edit.path}", {"removed": name}, as_json)
    for namespace, own in read_config(users, config).namespaces.items():
        if name in own.users:
            say(f"warning: namespaces.{namespace}.users still names {name}: take it out")


@app.command(
    "ls",
    epilog="""\b
Examples:
  malamute user ls
  malamute user ls --users /etc/malamute/users.toml
  malamute user ls --running --context ann

--running asks the broker of the context who its users are and what each may do, which needs the
permission manage_users. It also shows what stands in the configuration itself.""",
)
def ls(
    ctx: typer.Context,
    users: UsersOption = None,
    config: ConfigOption = None,
    running: Running = False,
    as_json: output.Json = False,
) -> None:
    """List the users; in a pipe: name, credential, identities, permitted, namespace."""
    if running:
        _list_running(in_force(ctx, users, config), as_json)
        return
    from malamute_py.server.authentication.namespaces import Namespaces
    from malamute_py.server.authentication.users_file import read_users

    configuration = read_config(users, config)
    file = read_users(configuration.authentication.users_file)
    namespaces = Namespaces(configuration.namespaces)
    output.listing(
        _COLUMNS,
        [
            (
                name,
                _credential(user),
                "" if user is None else ", ".join(user.identities),
                grant if as_json else grant_text(grant),
                "" if (namespace := namespaces.of(name)) is None else namespace.name,
            )
            for name in sorted({*file.users, *file.permissions})
            for user in (file.users.get(name),)
            for grant in (_granted(file.permissions.get(name)),)
        ],
        as_json=as_json,
        empty="no users; `malamute user add NAME` adds one",
    )


def _list_running(found: list[UserFacts], as_json: bool) -> None:
    """List the users of a running broker, with the names that each verb is granted on."""
    output.listing(
        _COLUMNS,
        [
            (
                each.user,
                each.credential,
                ", ".join(each.templates),
                each.grant if as_json else grant_text(each.grant),
                each.namespace,
            )
            for each in found
        ],
        as_json=as_json,
        empty="no users and no permissions: everybody who reaches the broker may do everything",
    )


def _credential(user: Any) -> str:
    """Return how a user logs in: by password, key or both.

    None: permissions are given to a name that the file has no user of.
    """
    if user is None:
        return ""
    ways = (("password", user.password), ("key", user.public_key))
    return " and ".join(word for word, has in ways if has)


def _granted(grant: Any) -> dict[str, Any]:
    """Return the verbs of a grant with their names, and its denials; those without any left out.

    grant: the section of a user's permissions; None: there is none.
    """
    import msgspec

    facts = {} if grant is None else msgspec.to_builtins(grant)
    if facts.get("deny"):
        facts["deny"] = {verb: names for verb, names in facts["deny"].items() if names}
    return {verb: names for verb, names in facts.items() if names}


@app.command(
    "passwd",
    epilog="""\b
Examples:
  malamute user passwd ann
  malamute user passwd ann --generate""",
)
def passwd(
    name: Name,
    generate: Generate = False,
    users: UsersOption = None,
    config: ConfigOption = None,
    as_json: output.Json = False,
) -> None:
    """Give a user another password."""
    if read_config(users, config).authentication.mechanism == "curve":
        raise CommandFailed(
            f'mechanism = "curve" asks for no password: `malamute user key {name} --new-key FILE`'
            " gives another key", USAGE,
        )  # fmt: skip
    with editing(users, config) as edit:
        told = _give_password(edit.user(name), generate)
    _say(f"user {name} has another password", {"user": name, **told}, as_json)


@app.command(
    "key",
    epilog="""\b
Examples:
  malamute user key ann --new-key ann-2.key""",
)
def key(
    name: Name,
    new_key: NewKey = None,
    given_key: PublicKey = None,
    users: UsersOption = None,
    config: ConfigOption = None,
    as_json: output.Json = False,
) -> None:
    """Give a user another key."""
    with editing(users, config) as edit:
        told = _give_key(edit, edit.user(name), new_key, given_key)
    _say(f"user {name} has another key", {"user": name, **told}, as_json)


@app.command(
    "hash",
    epilog="""\b
Examples:
  malamute user hash""",
)
def hash_() -> None:
    """Hash a password for [authentication.users] of a configuration.

    The password is asked for, or read as the first line of the input.
    """
    from malamute_py.server.authentication.credentials import hash_password

    print(hash_password(_password()))


def _password() -> str:
    """Ask for a password, or read it as the first line of standard input.

    Raises CommandFailed: it is empty, or no UTF-8.
    """
    from malamute_py.sections import secret_line

    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        line = secret_line(sys.stdin.buffer.readline())
        password = line.decode(errors="surrogateescape")
    # surrogateescape has put these in the place of bytes that are no UTF-8.
    if any("\udc80" <= sign <= "\udcff" for sign in password):
        raise CommandFailed("the password is not UTF-8, which clients send it as", USAGE)
    if not password:
        raise CommandFailed("the password is empty", USAGE)
    return str(password)


def _give_password(table: Any, generate: bool) -> dict[str, str]:
    """Put the hash of a password into a user's table; return facts to print.

    Those are the password if it was generated, and else nothing.
    """
    from malamute_py.server.authentication.credentials import hash_password

    password = secrets.token_urlsafe(_GENERATED_BYTES) if generate else _password()
    table["password"] = hash_password(password)
    return {"password": password} if generate else {}


def _give_key(
    edit: Edit, table: Any, new_key: Path | None, given_key: str | None
) -> dict[str, str]:
    """Put a public key into a user's table, of a new pair or as given; return facts to print.

    edit: removes the new pair's files when it fails. Raises CommandFailed: both are given, or none.
    """
    if (new_key is None) == (given_key is None):
        raise CommandFailed("give one of --new-key FILE and --public-key KEY", USAGE)
    if new_key is not None:
        path = new_key.expanduser()
        table["public_key"] = make_pair(path)
        edit.made += [path, Path(f"{path}{PUBLIC_SUFFIX}")]
        return {"public_key": table["public_key"], "secret_key_file": str(path.absolute())}
    table["public_key"] = public_key(given_key or "", "--public-key")
    return {"public_key": table["public_key"]}


def _tell_namespace(name: str, sections: Mapping[str, NamespaceSection]) -> None:
    """Say to which namespace a new user belongs, or that it resembles the users of one."""
    from malamute_py.server.authentication.namespaces import Namespaces, like_a_member

    namespaces = Namespaces(sections)
    own = namespaces.of(name)
    if own is not None:
        say(f"user {name} is in the namespace {own.name}")
    elif near := like_a_member(name, namespaces):
        near_namespace, its_pattern = near
        say(
            f"warning: user {name} is in no namespace, so that what it may do counts for the whole "
            f"broker; did you mean {its_pattern}, as users of {near_namespace} are named?"
        )


def _say(text: str, told: dict[str, str], as_json: bool) -> None:
    """Tell what was done; a generated password is printed this once."""
    if "password" in told and not as_json:
        # The password alone is the output, so that a program can keep it.
        print(f"{text}; the password is told this once", file=sys.stderr)
        print(told["password"])
        return
    if "secret_key_file" in told:
        text += f"; the secret key is in {told['secret_key_file']}"
    output.done(f"{text}; {TAKEN_UP}", told, as_json=as_json)
