"""Problems of a configuration that only its files and its endpoints tell.

Owns the list of checks that a start makes beyond those of config/combinations.py. The rule: looking
changes nothing: no file is made, no address is bound. Source: Server._open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from malamute_py.config import Config
from malamute_py.sections import ConfigError, read_token
from malamute_py.server.authentication.credentials import check_credentials
from malamute_py.server.authentication.namespaces import check_namespaces, doubts
from malamute_py.server.authentication.permissions import permission_doubts
from malamute_py.server.authentication.users_file import credential_doubts, examine_users
from malamute_py.server.defaults import check_defaults
from malamute_py.server.sockets import check_public, parse_endpoint


def start_doubts(config: Config) -> Iterator[ConfigError]:
    """Yield what a start with this configuration would take, but warn of; for a check alone."""
    try:
        complete, faults = examine_users(config)
    except ConfigError:
        return  # It is a fault.
    # Without a users file this is a fault (combinations.py); with faults, users are left out of it.
    if config.authentication.users_file and not faults:
        yield from credential_doubts(complete)
    yield from doubts(complete)
    for doubt in permission_doubts(complete.permissions):
        # The place of the doubt: permissions that the configuration itself does not have stand in
        # the users file. A doubt's key is permissions.IDENTITY.VERB, or ...IDENTITY.deny.VERB.
        identity, _, _ = doubt.key.removeprefix("permissions.").rpartition(".")
        here = {identity, identity.removesuffix(".deny")} & config.permissions.keys()
        place = "" if here else config.authentication.users_file
        yield ConfigError(doubt.key, doubt.why, place)


def start_faults(config: Config) -> Iterator[ConfigError]:
    """Yield what a start with this configuration would refuse, for a check without a start."""
    checks: list[Callable[[], object]] = [
        partial(parse_endpoint, endpoint) for endpoint in config.listen
    ]
    checks += [
        partial(_public, config),
        partial(check_defaults, config),
        partial(_token, config),
    ]
    try:
        complete, faults = examine_users(config)
    except ConfigError as error:
        yield error  # Without the users file, the checks of users would find faults that are none.
    else:
        yield from faults
        checks.append(lambda: check_credentials(complete.authentication))
        checks.append(lambda: check_namespaces(complete))
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield error


def _public(config: Config) -> None:
    """Raise ConfigError if a valid endpoint is public, and no credential is asked for."""
    endpoints = []
    for text in config.listen:
        try:
            endpoints.append(parse_endpoint(text))
        except ConfigError:
            continue  # It is reported by itself.
    check_public(endpoints, config)


def _token(config: Config) -> None:
    """Raise ConfigError if the HTTP side's token cannot be read, or is no secret."""
    path = config.http.token_file
    if config.http.bind and path and not Path(path).expanduser().is_file():
        raise ConfigError("http.token_file", f"{path} is no file; write a token into one")
    if config.http.bind:
        read_token(path)
