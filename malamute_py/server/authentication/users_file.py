"""The users file: users with their credentials, permissions and quotas, beside the configuration.

Owns its form and how it becomes part of a configuration. The rules: with such a file nothing is
allowed that is not granted, so that a new user begins with nothing; a name stands in the file or
in the configuration, never in both; others may not write the file, nor read it. Source:
deploy/malamute.toml; cli/users_file.py edits it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec

from malamute_protocol.address import name_fault
from malamute_py.config import Config, Grant, Names, faults_of_users, put, typed
from malamute_py.config_check import lines_of
from malamute_py.sections import ConfigError
from malamute_py.server.authentication.credentials import (
    USERS_FILE,
    check_hash,
    check_not_cut_short,
    checked_key,
    plain_users,
    read_guarded,
)
from malamute_py.server.authentication.namespaces import HTTP_USER

SUFFIX: Final = ".toml"
"""End of the name of a users file; any other is a file of lines `name hash`."""
_ANYBODY: Final = "*"


class User(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Credentials of one user."""

    password: str = ""
    """Hash of the password, for mechanism "plain"."""
    public_key: str = ""
    """Public key, for mechanism "curve"."""
    identities: Names = []
    """Templates of identities beside `<user>-{n}`."""


class Users(msgspec.Struct, kw_only=True, frozen=True):
    """Content of a users file."""

    users: dict[str, User] = {}
    permissions: dict[str, Grant] = {}
    quotas: dict[str, dict[str, int]] = {}
    """Quotas by identity, as quotas.identities of the configuration."""


class UsersFileWrong(ConfigError):
    """A users file has faults: the error is the first of them, and `faults` has all."""

    def __init__(self, faults: Sequence[ConfigError]) -> None:
        """faults: at least one."""
        first = faults[0]
        super().__init__(first.name, first.why, first.place)
        self.faults = faults


class _Reading:
    """The reading of one users file: what is right in it, and each fault of the rest."""

    def __init__(self, text: str, path: str) -> None:
        """path: of the file, for messages. Raises ConfigError: the text is no TOML."""
        self._path = path
        try:
            self._table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            # tomllib tells the line in its text only.
            line = re.search(r"\(at line (\d+)", str(error))
            place = f"{path}:{line[1]}" if line else path
            raise ConfigError("", f"not valid TOML: {error}", place) from None
        except RecursionError:
            raise ConfigError("", "not valid TOML: nested too deep", path) from None
        self._text = text
        self.faults: list[ConfigError] = []

    @cached_property
    def _lines(self) -> dict[tuple[str, ...], int]:
        """The line of each table and key."""
        return lines_of(self._text)

    def users(self) -> Users:
        """Return what the file says without the values that are wrong, which become `faults`."""
        for name in self._table:
            if name not in Users.__struct_fields__:
                self.note((name,), f"a users file has {', '.join(Users.__struct_fields__)}")
        users = self._users()
        # Permissions and quotas in the places that they have in a configuration, whose checks they
        # pass here.
        as_config = {
            "permissions": self._table.get("permissions", {}),
            "quotas": {"identities": self._table.get("quotas", {})},
        }
        try:
            # All values at once, as a rule; value by value, which takes ten times as long, only
            # where one is wrong.
            config = typed(as_config)
            for fault in faults_of_users(config):
                raise fault
        except ConfigError:
            config = typed(self._without_faults())
        return Users(users=users, permissions=config.permissions, quotas=config.quotas.identities)

    def _without_faults(self) -> dict[str, Any]:
        """Return the permissions and quotas that are right, found value by value.

        Each value that is wrong becomes a fault with its line.
        """
        permissions: dict[str, Any] = {}
        for name, grant in self._tables("permissions"):
            permissions[name] = {}
            for verb, value in grant.items():
                # `deny` is a table of verbs in the grant: each of its values is taken by itself.
                inner = value if verb == "deny" and isinstance(value, Mapping) else {}
                values: dict[tuple[str, ...], Any] = {
                    (verb, denied): one for denied, one in inner.items()
                }
                for keys, one in (values or {(verb,): value}).items():
                    self._take(permissions, (name, *keys), one, ("permissions",))
        quotas: dict[str, Any] = {}
        for name, own in self._tables("quotas"):
            quotas[name] = {}
            for quota, value in own.items():
                self._take(quotas, (name, quota), value, ("quotas", "identities"))
        return {"permissions": permissions, "quotas": {"identities": quotas}}

    def note(self, keys: tuple[str, ...], why: str) -> None:
        """Note a fault of the value to which these names lead."""
        self.faults.append(self.fault(keys, why))

    def fault(self, keys: tuple[str, ...], why: str) -> ConfigError:
        """Make the fault of a value: its place is its line, or that of the nearest table."""
        above = (keys[:count] for count in range(len(keys), 0, -1))
        line = next((self._lines[each] for each in above if each in self._lines), 0)
        place = f"{self._path}:{line}" if line else self._path
        return ConfigError(".".join(keys), why, place)

    def _tables(self, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield name and table of each entry of `users`, `permissions` or `quotas`; note others."""
        entries = self._table.get(kind, {})
        if not isinstance(entries, Mapping):
            self.note((kind,), f"is a table; write [{kind}.NAME]")
            return
        for name, entry in entries.items():
            if isinstance(entry, Mapping):
                yield name, entry
            else:
                self.note((kind, name), f"is a table; write [{kind}.{name}]")

    def _take(
        self, found: dict[str, Any], keys: tuple[str, ...], value: Any, section: tuple[str, ...]
    ) -> None:
        """Put one value of permissions or quotas into `found` if it is right, else note its fault.

        keys: names that lead to it in the file's table. section: names that lead to this table in
        a configuration: ("permissions",) or ("quotas", "identities").
        """
        # A configuration of this value alone, so that its error is about no other.
        alone: dict[str, Any] = {}
        put(alone, (*section, *keys), value)
        try:
            for fault in faults_of_users(typed(alone)):
                raise fault
        except ConfigError as error:
            self.note((section[0], *keys), error.why)
        else:
            put(found, keys, value)

    def _users(self) -> dict[str, User]:
        """Return the users, read field by field: one that is wrong is left out, and noted."""
        found: dict[str, User] = {}
        holders: dict[str, str] = {}  # public key -> the first user with it
        for name, table in self._tables("users"):
            fault = name_fault(name)
            if fault:
                self.note(("users", name), fault)
                continue
            fields: dict[str, Any] = {}
            for field, value in table.items():
                try:
                    # A user of this field alone, so that its fault is about no other.
                    user = msgspec.convert({field: value}, User)
                    if user.password:
                        check_hash("", user.password)
                    if user.public_key:
                        checked_key("", user.public_key)
                        holder = holders.setdefault(user.public_key, name)
                        if holder != name:
                            why = f"is also the key of {holder}: one key, one identity"
                            raise ConfigError("", why)
                except msgspec.ValidationError as error:
                    self.note(("users", name, field), str(error))
                except ConfigError as error:
                    self.note(("users", name, field), error.why)
                else:
                    fields[field] = value
            found[name] = msgspec.convert(fields, User)
        return found


def parse_users(text: str, path: str) -> Users:
    """Read the text of a users file that a command edits. Raises ConfigError, with its line."""
    reading = _Reading(text, path)
    users = reading.users()
    for fault in reading.faults:
        raise fault
    return users


def read_users(path: str) -> Users:
    """Read a users file, to list it. Raises ConfigError: also where it is not safe from others."""
    return parse_users(_text_of(path), path)


def _text_of(path: str) -> str:
    """Return a users file's text. Raises ConfigError, also where others could read or write it."""
    try:
        # 0o027: the group may read it, and nothing else; others may do nothing.
        return read_guarded(path, USERS_FILE, 0o027, "chmod 600").decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            USERS_FILE, f"there is no {path}; `malamute user add NAME --users {path}` makes it"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(USERS_FILE, f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise ConfigError(USERS_FILE, f"{path} cannot be read: {error.strerror}") from None


def with_users(config: Config) -> Config:
    """Return the configuration with what its users file has, for a start and a reload.

    Raises ConfigError; UsersFileWrong: the file can be read, and has faults.
    """
    merged, faults = examine_users(config)
    if faults:
        raise UsersFileWrong(faults)
    return merged


def examine_users(config: Config) -> tuple[Config, list[ConfigError]]:
    """Return the configuration with what is right in its users file, and each fault of the file.

    For a check that tells all faults at once, and for a start. Raises ConfigError: the file cannot
    be read, is empty, or is no TOML.
    """
    path = config.authentication.users_file
    if path.endswith(SUFFIX):
        text = _text_of(path)
        check_not_cut_short(text, path)
        reading = _Reading(text, path)
        merged = _with_tables(config, reading)
        faults = reading.faults
        # Faults that the configuration has without the file are found elsewhere.
        own = {(fault.key, fault.why) for fault in faults_of_users(config)}
        for fault in faults_of_users(merged):
            # _Reading has checked the file by itself; only its templates of identities are compared
            # with the users of the configuration.
            user = fault.key.removeprefix("authentication.identities.")
            if (fault.key, fault.why) not in own and user != fault.key:
                faults.append(reading.fault(("users", user, "identities"), fault.why))
    elif path and config.authentication.mechanism == "plain":
        merged, faults = _with_lines(config), []  # an older form: lines `name hash`
    else:
        return config, []
    # What is returned has the file's users in it, so that the file is not asked for again.
    authentication = msgspec.structs.replace(merged.authentication, users_file="")
    return msgspec.structs.replace(merged, authentication=authentication), faults


def credential_doubts(config: Config) -> Iterator[ConfigError]:
    """Yield a warning where a credential is asked for and no user has one.

    config: with the users of the users file; the broker's own HTTP side does not count.
    """
    authentication = config.authentication
    if authentication.mechanism == "none":
        return
    users, kind = {
        "plain": (authentication.users, "password"),
        "curve": (authentication.clients, "public key"),
    }[authentication.mechanism]
    if not users.keys() - {HTTP_USER}:
        yield ConfigError(USERS_FILE, f"nobody may connect: no user has a {kind}")


def _with_tables(config: Config, reading: _Reading) -> Config:
    """Return the configuration with what a users file has; a name in both is a fault of the file.

    With such a file an identity without permissions of its own may do nothing.
    """
    file, authentication = reading.users(), config.authentication

    def joined(
        kind: str, own: Mapping[str, Any], more: Mapping[str, Any], *inner: str
    ) -> dict[str, Any]:
        """Return both as one, the configuration's `own` first; note each name that both have.

        kind, inner: the keys before and after that name in the users file, for the fault.
        """
        for name in more:
            if name in own:
                reading.note((kind, name, *inner), "stands in the configuration as well")
        return {**more, **own}

    # For the faults alone. A user of the file then goes, by what it has, into the configuration's
    # tables of passwords, keys and templates.
    joined("users", {**authentication.users, **authentication.clients}, file.users)
    passwords = {name: user.password for name, user in file.users.items() if user.password}
    keys = {name: user.public_key for name, user in file.users.items() if user.public_key}
    templates = {name: user.identities for name, user in file.users.items() if user.identities}
    return msgspec.structs.replace(
        config,
        authentication=msgspec.structs.replace(
            authentication,
            users={**passwords, **authentication.users},
            clients={**keys, **authentication.clients},
            identities=joined("users", authentication.identities, templates, "identities"),
        ),
        permissions={
            _ANYBODY: Grant(),  # whoever is not named may do nothing
            **joined("permissions", config.permissions, file.permissions),
        },
        quotas=msgspec.structs.replace(
            config.quotas, identities=joined("quotas", config.quotas.identities, file.quotas)
        ),
    )


def _with_lines(config: Config) -> Config:
    """Return the configuration with the users of a file of lines `name hash`."""
    authentication = msgspec.structs.replace(
        config.authentication, users=plain_users(config.authentication)
    )
    return msgspec.structs.replace(config, authentication=authentication)
