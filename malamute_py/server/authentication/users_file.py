"""The users file: users with their credentials, permissions and quotas, beside the configuration.

Owns its form and how it becomes part of a configuration. The rules: with such a file nothing is
allowed that is not granted, so that a new user begins with nothing; a name stands in the file or
in the configuration, never in both; others may not write the file, nor read it. Source:
deploy/malamute.toml; cli/users_file.py edits it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from malamute_protocol.address import name_fault
from malamute_py.config import Config, Grant, Names, faults_of_users, typed
from malamute_py.sections import ConfigError
from malamute_py.server.authentication.credentials import (
    USERS_FILE,
    check_hash,
    checked_key,
    plain_users,
    read_guarded,
)

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


def parse_users(text: str, path: str) -> Users:
    """Read the text of a users file. Raises ConfigError, which names the path."""
    try:
        table = tomllib.loads(text)
        for name in table:
            if name not in Users.__struct_fields__:
                raise ConfigError(name, f"a users file has {', '.join(Users.__struct_fields__)}")
        config = typed(
            {
                "permissions": table.get("permissions", {}),
                "quotas": {"identities": table.get("quotas", {})},
            }
        )
        for fault in faults_of_users(config):
            raise fault
        users = _users(table.get("users", {}))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path, f"not valid TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.key}", error.why) from None
    return Users(users=users, permissions=config.permissions, quotas=config.quotas.identities)


def _users(table: Any) -> dict[str, User]:
    """Return the users of a table. Raises ConfigError with the key that is wrong."""
    if not isinstance(table, Mapping):
        raise ConfigError("users", "is a table; write [users.NAME]")
    found: dict[str, User] = {}
    keys: dict[str, str] = {}
    for name, value in table.items():
        where = f"users.{name}"
        fault = name_fault(name)
        if fault:
            raise ConfigError(where, fault)
        try:
            user = found[name] = msgspec.convert(value, User)
        except msgspec.ValidationError as error:
            raise ConfigError(where, str(error)) from None
        if user.password:
            check_hash(f"{where}.password", user.password)
        if user.public_key:
            checked_key(f"{where}.public_key", user.public_key)
            if keys.setdefault(user.public_key, name) != name:
                raise ConfigError(
                    f"{where}.public_key",
                    f"is also the key of {keys[user.public_key]}: one key, one identity",
                )
    return found


def read_users(path: str) -> Users:
    """Read a users file. Raises ConfigError: also where others could read or write it."""
    try:
        text = read_guarded(path, USERS_FILE, 0o027, "chmod 600").decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            USERS_FILE, f"there is no {path}; `malamute user add NAME --users {path}` makes it"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(USERS_FILE, f"{path} cannot be read: {error}") from None
    return parse_users(text, path)


def with_users(config: Config) -> Config:
    """Return the configuration with what its users file has. Raises ConfigError."""
    path = config.authentication.users_file
    if path.endswith(SUFFIX):
        merged = _with_tables(config, path)
    elif path and config.authentication.mechanism == "plain":
        merged = _with_lines(config)
    else:
        return config
    for fault in faults_of_users(merged):
        raise ConfigError(f"{path}: {fault.key}", fault.why)
    authentication = msgspec.structs.replace(merged.authentication, users_file="")
    return msgspec.structs.replace(merged, authentication=authentication)


def _with_tables(config: Config, path: str) -> Config:
    authentication, file = config.authentication, read_users(path)
    for name in file.users:
        if name in authentication.users or name in authentication.clients:
            raise ConfigError(f"{path}: users.{name}", "stands in the configuration as well")
    permissions = {_ANYBODY: Grant(), **_disjoint(path, config.permissions, file.permissions)}
    templates = {name: user.identities for name, user in file.users.items() if user.identities}
    return msgspec.structs.replace(
        config,
        authentication=msgspec.structs.replace(
            authentication,
            users={
                **authentication.users,
                **{name: user.password for name, user in file.users.items() if user.password},
            },
            clients={
                **authentication.clients,
                **{name: user.public_key for name, user in file.users.items() if user.public_key},
            },
            identities=_disjoint(path, authentication.identities, templates),
        ),
        permissions=permissions,
        quotas=msgspec.structs.replace(
            config.quotas, identities=_disjoint(path, config.quotas.identities, file.quotas)
        ),
    )


def _with_lines(config: Config) -> Config:
    authentication = msgspec.structs.replace(
        config.authentication, users=plain_users(config.authentication)
    )
    return msgspec.structs.replace(config, authentication=authentication)


def _disjoint(path: str, config: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    for name in file:
        if name in config:
            raise ConfigError(f"{path}: {name}", "stands in the configuration as well")
    return {**config, **file}
