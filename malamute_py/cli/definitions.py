"""`malamute export` and `import`: what there is and how it is set, without what lies in it.

Owns the file's form and the comparison with a broker. The rules: an import makes and changes, and
never removes; the same import again does nothing; what is refused is named, and the rest is
done. A group comes into being with its first member only, because a member is given records: an
import sets groups that are there and names those that are not.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_py.cli import output
from malamute_py.cli.commands import say
from malamute_py.cli.failures import FAILED, USAGE, CommandFailed
from malamute_py.cli.foreseen import may_be_there, refusal
from malamute_py.cli.linking import linked
from malamute_py.cli.output import Cell, Column
from malamute_py.cli.parameters import PrefixOption
from malamute_py.cli.progress import Progress
from malamute_py.cli.settings import wanted
from malamute_py.cli.users_file import editing

if TYPE_CHECKING:
    from malamute_py.client.sync.client import SyncClient

EPILOG: Final = """\b
Examples:
  malamute export > definitions.json
  malamute export --prefix trades --toml > definitions.toml
  malamute import definitions.json --dry-run --context test
  malamute import definitions.json --context test
  malamute export | malamute import - --context test
  umask 077; malamute export --users users.toml > all.json
  malamute import all.json --context test --users test/users.toml

\b
The file is JSON, or TOML by the ending .toml:
  [streams.trades]
  max_age_ms = "7d"
  [cursors.trades.etl]
  pin = true

It has streams, mailboxes, services, cursors and groups with their settings: no records, messages,
requests or positions. With --users it also has what a users file has: users with the hashes of
their passwords or their public keys, permissions and quotas. Nobody else should read it then. An
import writes these into the users file that it is given, and nowhere without --users; `malamute
config reload` has a broker take them up. Settings that the file does not name stay as they are; a
new cursor stands at the earliest record. Nothing is removed.

--dry-run names what the import would be refused, as far as it can be asked: settings, names and
permissions, not bounds such as quotas. A stream that may be there without your being told of it is
named on standard error. It ends with 1 then, as the import does."""

_KINDS: Final = ("streams", "mailboxes", "services", "cursors", "groups")
_OF_STREAM: Final = ("cursors", "groups")
_OF_USERS: Final = ("users", "permissions", "quotas")
"""Tables of a users file."""
_HIDDEN: Final = "(hash)"
"""Shown in the place of a password's hash."""
_SETTLED: Final = ("body_kind", "schema")
"""Settings of a stream that are empty until they are declared or its first batch settles them."""
_THE_BROKERS: Final = "former_schemas"
"""Setting that the broker keeps itself, and takes from no client."""

UsersFile = Annotated[
    Path | None,
    typer.Option(
        "--users", metavar="FILE", help="Also users, permissions and quotas, of this users file."
    ),
]
Name = tuple[str, ...]
"""Name of a thing; of a cursor or group its stream's name before it."""
Definitions = dict[str, dict[Name, dict[str, Any]]]
"""Settings by kind and name."""


class Change(NamedTuple):
    """One difference between a file and a broker, and how an import ends it."""

    kind: str
    name: Name
    action: str
    """`create`, `edit`, or `missing`: a group that has to wait for its first member."""
    settings: dict[str, Any]
    """Settings that differ, or all that are named for a new thing."""
    before: dict[str, Any]
    """Values of these settings until now."""


def export(
    ctx: typer.Context,
    prefix: PrefixOption = "",
    as_toml: Annotated[bool, typer.Option("--toml", help="Print TOML instead of JSON.")] = False,
    users: UsersFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as without it.")] = False,
) -> None:
    """Print definitions: streams, mailboxes, services, cursors and groups with their settings."""
    if as_toml and as_json:
        raise CommandFailed("--toml and --json exclude each other", USAGE)
    of_file = {} if users is None else _in_file(users)
    with linked(ctx) as client:
        found = {**_there(client, prefix), **of_file}
    if as_toml:
        print(_as_toml(_written(found)), end="")
    else:
        output.print_json(_written(found))


def import_(
    ctx: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="What export printed; `-` for standard input.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what differs, and what would be refused.")
    ] = False,
    users: UsersFile = None,
    as_json: output.Json = False,
) -> int:
    """Make and set what a file defines; nothing is removed."""
    asked = _read(source)
    refused: dict[int, str] = {}  # Place in `changes` -> why.
    # Users, permissions and quotas are compared with the users file, all else with the broker.
    of_file = {} if users is None or not users.exists() else _in_file(users)
    if users is None and (left := sum(len(asked.pop(kind, ())) for kind in _OF_USERS)):
        say(f"{left} entries of a users file are left alone; --users FILE puts them into a file")
    with linked(ctx) as client:
        there = {**_there(client, ""), **of_file}
        changes = list(differences(asked, there))
        of_users = [change for change in changes if change.kind in _OF_USERS]
        if users is not None and of_users:
            _into_file(users, of_users, dry_run)
        coming: set[str] = set()  # Streams that a dry run would make: their cursors may follow.
        unknown: list[str] = []  # Streams that may be there already, unseen by this user.
        for at, change in enumerate(changes):
            if change.action == "missing" or change.kind in _OF_USERS:
                continue  # A group waits for its first member; users were written above.
            if dry_run:
                if why := refusal(client, change, there, coming):
                    refused[at] = why
                elif change.kind == "streams":
                    coming |= {*change.name}
                    unknown += change.name if may_be_there(client, change) else ()
                continue
            try:
                _make_or_edit(client, change)
            except (BrokerRefused, LocalProtocolError) as error:
                refused[at] = str(error)
    _tell(changes, refused, dry_run, as_json)
    if unknown:
        say(
            f"not foreseen: whether there are streams {', '.join(unknown)} already, of which you"
            " are not told; one with other settings is refused (stream_exists)"
        )
    return FAILED if refused else 0


def differences(asked: Definitions, there: Definitions) -> Iterable[Change]:
    """Yield what has to change so that all that is asked for is there.

    In the order of _KINDS: streams come before their cursors and groups. What is there and not
    asked for stays.
    """
    for kind in (*_KINDS, *_OF_USERS):
        for name, settings in asked.get(kind, {}).items():
            known = there.get(kind, {}).get(name)
            if known is None:
                # Its first member makes a group, not an import.
                action = "missing" if kind == "groups" else "create"
                yield Change(kind, name, action, settings, {})
                continue
            merged = {key: _over(known.get(key), value) for key, value in settings.items()}
            differs = {
                key: value
                for key, value in merged.items()
                if key not in known or known[key] != value
            }
            if differs:
                before = {key: known.get(key) for key in differs}
                yield Change(kind, name, "edit", differs, before)


def _over(known: Any, value: Any) -> Any:
    """Return what an import sets for a known value; of a table, as `deny`, the rest stays."""
    both = isinstance(known, Mapping) and isinstance(value, Mapping)
    return {**known, **value} if both else value


def _tell(changes: list[Change], refused: dict[int, str], dry_run: bool, as_json: bool) -> None:
    """Print the changes that an import made, or (dry_run) would make.

    refused: place in `changes` -> why the broker refused it, or would.
    """
    output.listing(
        [
            Column("kind", "Kind"),
            Column("name", "Name", style="cyan"),
            Column("action", "Would" if dry_run else "Did"),
            Column("settings", "Settings"),
            Column("refused", "Refused", style="red"),
        ],
        [
            (
                each.kind,
                "/".join(each.name),
                Cell(each.action, "wait for its first member")
                if each.action == "missing" else each.action,
                Cell(_unhashed(each.settings) if as_json else _shown(each), _shown(each)),
                refused.get(at, ""),
            )
            for at, each in enumerate(changes)
        ],
        as_json=as_json,
        empty="nothing differs",
    )  # fmt: skip
    waiting = sum(each.action == "missing" for each in changes)
    if waiting and not as_json:
        say(f"{waiting} groups are made by their first members; import again when they are there")


def _unhashed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the hash of a password, which terminals and logs need not have."""
    return {key: _HIDDEN if key == "password" else value for key, value in settings.items()}


def _shown(change: Change) -> str:
    """Return the settings of a change as text: from and to, where something is edited."""

    def text(key: str, value: Any) -> str:
        """Write a value; a schema's hexadecimal digits tell a person nothing but length."""
        if key == "schema":
            return f"{len(value or '') // 2} bytes"
        if key == "password":
            return _HIDDEN
        return json.dumps(value, ensure_ascii=False)

    if change.action != "edit":
        given = change.settings.items()
        return ", ".join(f"{key}={text(key, value)}" for key, value in given if value)
    return ", ".join(
        f"{key}: {text(key, change.before[key])} to {text(key, value)}"
        for key, value in change.settings.items()
    )


# --- at the broker -----------------------------------------------------------------------------


def _there(client: SyncClient, prefix: str) -> Definitions:
    """Return what the broker has under a prefix, as far as this user may see it.

    The listings have no settings: each thing is asked for them.
    """
    streams = client.list_streams(prefix)
    # A temporary mailbox ends with its client, and is no definition.
    mailboxes = [each for each in client.list_mailboxes(prefix) if not each.more.get("temporary")]
    services = client.list_services(prefix)
    cursors = [each for each in client.list_cursors() if each.stream.startswith(prefix)]
    groups = [each for each in client.list_groups() if each.stream.startswith(prefix)]
    total = len(streams) + len(mailboxes) + len(services) + len(cursors) + len(groups)
    found: Definitions = {kind: {} for kind in _KINDS}
    with Progress("reading definitions", total=total) as progress:

        def note(kind: str, name: Name, ask: Callable[..., Any]) -> None:
            """Keep the settings of one thing, unless it was removed since it was listed."""
            try:
                found[kind][name] = _kept(ask(*name).settings)
            except BrokerRefused as error:
                if not error.code.startswith("unknown_"):
                    raise
            progress.update(sum(map(len, found.values())))

        for stream in streams:
            note("streams", (stream.name,), client.stream_info)
        for box in mailboxes:
            note("mailboxes", (box.name,), client.mailbox_info)
        for service in services:
            note("services", (service.name,), client.service_info)
        for cursor in cursors:
            note("cursors", (cursor.stream, cursor.cursor), client.cursor_info)
        for group in groups:
            note("groups", (group.stream, group.group), client.group_info)
    return found


def _kept(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one thing as the file has them.

    Left out are those that the broker keeps itself, and body_kind and schema while they are empty:
    a stream's first batch settles them then. A schema is written as hexadecimal text.
    """
    kept = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in settings.items()
        if name != _THE_BROKERS
    }
    return {name: value for name, value in kept.items() if value or name not in _SETTLED}


def _make_or_edit(client: SyncClient, change: Change) -> None:
    """Create or edit one thing at the broker. Raises BrokerRefused, LocalProtocolError.

    But for streams, the broker makes with `edit` what is not there.
    """
    settings = dict(change.settings)
    if change.kind == "streams" and "schema" in settings:
        settings["schema"] = bytes.fromhex(settings["schema"])
    match change.kind, change.name:
        case "streams", (stream,) if change.action == "create":
            client.create_stream(stream, settings)
        case "streams", (stream,):
            client.edit_stream(stream, settings)
        case "mailboxes", (mailbox,):
            client.edit_mailbox(mailbox, settings)
        case "services", (service,):
            client.edit_service(service, settings)
        case "cursors", (stream, cursor):
            client.cursor(stream, cursor).edit(settings)
        case "groups", (stream, group):
            client.edit_group(stream, group, settings)


# --- the users file ----------------------------------------------------------------------------


def _in_file(path: Path) -> Definitions:
    """Return the tables of a users file: users, permissions and quotas, by name.

    Raises ConfigError: a broker would refuse the file; OSError; CommandFailed: it is not UTF-8.
    """
    from malamute_py.server.authentication.users_file import parse_users

    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{path}: not UTF-8: {error}", USAGE) from None
    parse_users(text, str(path))  # Called for its checks.
    told = tomllib.loads(text)
    return {
        kind: {(name,): value for name, value in told.get(kind, {}).items()} for kind in _OF_USERS
    }


def _into_file(path: Path, changes: list[Change], dry_run: bool) -> None:
    """Write changes into a users file: all of them, or none where a broker would refuse one.

    dry_run: check them only, and write nothing.
    """
    with editing(path, None, dry_run=dry_run) as edit:
        for change in changes:
            table = edit.table(change.kind, *change.name)
            for key, value in change.settings.items():
                if isinstance(value, Mapping):
                    edit.table(change.kind, *change.name, key).update(value)
                else:
                    table[key] = value
    if not dry_run:
        say(f"wrote {path}; `malamute config reload` has a running broker take it up")


# --- the file ----------------------------------------------------------------------------------


def _written(found: Definitions) -> dict[str, Any]:
    """Return definitions as the file has them: cursors and groups nested below their streams."""
    written: dict[str, Any] = {}
    for kind in found:
        written[kind] = {}
        for name, settings in sorted(found[kind].items()):
            into = written[kind]
            for part in name[:-1]:  # The stream's name, if there is one.
                into = into.setdefault(part, {})
            into[name[-1]] = settings
    return written


def _as_toml(table: Mapping[str, Any], path: Name = ()) -> str:
    """Return nested maps as TOML. path: names of the tables around this one.

    A table's own values come first, since TOML takes each line for the last header's table. An
    empty table is written, as it names a thing without settings; an empty kind is not.
    """
    values = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"[{'.'.join(map(_toml_name, path))}]"] if path and (values or not table) else []
    lines += [f"{_toml_name(name)} = {_toml_value(value)}" for name, value in values.items()]
    inner = [
        _as_toml(value, (*path, name))
        for name, value in table.items()
        if isinstance(value, Mapping) and (value or path)
    ]
    return "\n".join(part for part in ("".join(f"{line}\n" for line in lines), *inner) if part)


def _toml_name(text: str) -> str:
    bare = text and all(each.isascii() and (each.isalnum() or each in "_-") for each in text)
    return text if bare else _toml_value(text)


def _toml_value(value: Any) -> str:
    # A JSON text is a basic string of TOML, but for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parsed(text: str, either: bool) -> Any:
    """Read JSON. Raises ValueError.

    either: what is no JSON may be TOML, as standard input has no name whose ending says the form.
    """
    try:
        return json.loads(text)
    except ValueError:
        if either:  # Where both fail, the error of JSON is raised.
            with contextlib.suppress(ValueError):
                return tomllib.loads(text)
        raise


def _read(source: str) -> Definitions:
    """Read a file of definitions, or (`-`) standard input.

    Raises CommandFailed: its form is wrong; OSError: it cannot be read.
    """
    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    try:
        text = data.decode()
        if source.endswith(".toml"):
            told = tomllib.loads(text)
        else:
            told = _parsed(text, either=source == "-")
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{source}: not UTF-8: {error}", USAGE) from None
    except RecursionError:
        raise CommandFailed(f"{source}: nested too deep to be definitions", USAGE) from None
    except ValueError as error:
        raise CommandFailed(f"{source}: {error}", USAGE) from None
    kinds = (*_KINDS, *_OF_USERS)
    unknown = sorted(set(_map(told, source, "it")) - set(kinds))
    if unknown:
        raise CommandFailed(
            f"{source}: there is no kind {unknown[0]!r}; there are {', '.join(kinds)}", USAGE
        )
    found: Definitions = {}
    for kind in kinds:
        entries = found[kind] = {}
        for name, value in _map(told.get(kind, {}), source, kind).items():
            # Names are tuples: of a cursor or group, the stream's name is the first part.
            if kind in _OF_USERS:  # Their values have no units to read.
                entries[name,] = dict(_map(value, source, f"{kind}.{name}"))
                if None in entries[name,].values():
                    raise CommandFailed(f"{source}: {kind}.{name} has a null", USAGE)
                continue
            if kind not in _OF_STREAM:
                entries[name,] = _settings(value, source, f"{kind}.{name}")
                continue
            for inner, settings in _map(value, source, f"{kind}.{name}").items():
                entries[name, inner] = _settings(settings, source, f"{kind}.{name}.{inner}")
    return found


def _settings(value: Any, source: str, what: str) -> dict[str, Any]:
    """Return the settings of one thing, with sizes and times that had units as numbers.

    what: names the thing, for CommandFailed, which a wrong value raises.
    """
    given = _map(value, source, what)
    if None in given.values():
        raise CommandFailed(f"{source}: {what} has a null", USAGE)
    try:
        # wanted() would take a schema whose hexadecimal digits are all decimal for a number.
        read = {
            name: value if name == "schema" else wanted(None, **{name: value})[name]
            for name, value in given.items()
        }
        bytes.fromhex(read.get("schema", ""))  # Called for its check.
    except (CommandFailed, ValueError, TypeError) as error:
        raise CommandFailed(f"{source}: {what}: {error}", USAGE) from None
    return read


def _map(value: Any, source: str, what: str) -> Mapping[str, Any]:
    """Return a value that has to be a map. Raises CommandFailed, which names `what`: it is none."""
    if not isinstance(value, dict):
        raise CommandFailed(f"{source}: {what} is no map of names", USAGE)
    return value
