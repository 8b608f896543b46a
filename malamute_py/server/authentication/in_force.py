"""Users and permissions in force, as they are told to those who manage users.

Owns the form of that answer. The rules: no hash of a password and no key is told; a question about
a user is decided as the core's own questions are. Source: SPEC.md, section 4.7, LIST_USERS.
"""

from __future__ import annotations

from typing import Any

import msgspec

from malamute_py.config import Config
from malamute_py.server.authentication.name_patterns import fits
from malamute_py.server.authentication.namespaces import Namespaces
from malamute_py.server.authentication.permissions import Permissions

EVERYBODY = "*"
"""Name of the permissions of all who have none of their own."""


class UsersInForce:
    """Answers (verb, name), the `users` of the broker core."""

    def __init__(self, config: Config, permissions: Permissions) -> None:
        """config: with the users file and the broker's own users."""
        self._authentication = config.authentication
        self._grants = config.permissions
        self._permissions = permissions
        self._namespaces = Namespaces(config.namespaces)

    def __call__(self, verb: str, name: str) -> list[dict[str, Any]]:
        """Return all users by name, and whether each may do something.

        verb: as of a grant, on the stream, mailbox or service `name`; empty: it is not asked.
        """
        authentication = self._authentication
        known = {*authentication.users, *authentication.clients, *self._grants}
        return [self._told(user, verb, name) for user in sorted(known)]

    def _told(self, user: str, verb: str, name: str) -> dict[str, Any]:
        """Return what LIST_USERS tells of one user: kind of credential, grant, namespace.

        `own`: whether the grant is the user's own, and not the one of all users. verb: whether the
        user may do that to `name` is told, too; empty: it is not asked.
        """
        authentication = self._authentication
        password, key = user in authentication.users, user in authentication.clients
        found: dict[str, Any] = {
            "user": user,
            "credential": "password" if password else "key" if key else "",
            "templates": authentication.identities.get(user, []),
            "own": user in self._grants,
            "grant": self._grant(user),
            "namespace": self._namespace(user),
        }
        if verb:
            found["may"], found["subjects"] = self._may(user, verb, name)
        return found

    def _namespace(self, user: str) -> str:
        namespace = None if user == EVERYBODY else self._namespaces.of(user)
        return "" if namespace is None else namespace.name

    def _grant(self, user: str) -> dict[str, Any]:
        """Return what a user is granted and denied; everything, if the broker has no grants."""
        grant = self._grants.get(user) or self._grants.get(EVERYBODY)
        if grant is None:
            return {} if self._grants else {"everything": True}
        told = {key: value for key, value in msgspec.to_builtins(grant).items() if value}
        told["deny"] = {verb: names for verb, names in told.get("deny", {}).items() if names}
        return {key: value for key, value in told.items() if value}

    def _may(self, user: str, verb: str, name: str) -> tuple[bool, list[str]]:
        """Return whether a user may do something, and under which subjects alone (none: any)."""
        if self._permissions(user, verb, name):
            return True, []
        if verb != "write" or self._permissions.subjects(user, name) is None:
            return False, []
        grant = self._grants.get(user) or self._grants[EVERYBODY]
        bound = grant.write_subjects.items()
        return True, [each for stream, some in bound if fits(stream, name) for each in some]
