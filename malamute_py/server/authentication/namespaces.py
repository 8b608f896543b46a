"""Namespaces: which users belong together, and under which prefix.

Owns the namespace of each user, and the checks that need all users. The rules: a user belongs to
one namespace at most; a name under a prefix is no name of a user outside of the namespace, since
that user's own mailbox would lie in it. Source: SPEC.md, section 15.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from malamute_py.broker.limits import Namespace, Quota
from malamute_py.config import QUOTAS, Config, NamespaceSection
from malamute_py.sections import ConfigError
from malamute_py.server.authentication.name_patterns import compiled, fits

HTTP_USER: Final = "malamute-http"
"""Name of the broker's own HTTP side, which looks at all namespaces."""


class Namespaces:
    """All namespaces, and the one of each user."""

    def __init__(self, sections: Mapping[str, NamespaceSection]) -> None:
        """sections: by the name of the namespace."""
        self.all: Final = tuple(_namespace(name, section) for name, section in sections.items())
        self._members = [(compiled(namespace.users), namespace) for namespace in self.all]

    def of(self, owner: str) -> Namespace | None:
        """Return the namespace of a user; None: the user is in none."""
        for users, namespace in self._members:
            if users.fullmatch(owner):
                return namespace
        return None


def _namespace(name: str, section: NamespaceSection) -> Namespace:
    """Return a namespace of the configuration; without users it has those of its prefix.

    A quota that there is not is left out: faults_of_users() finds it.
    """
    prefix = section.prefix_of(name)
    return Namespace(
        name=name,
        prefix=prefix,
        users=tuple(section.users) or (f"{prefix}*",),
        quota=Quota(**{name: most for name, most in section.quotas.items() if name in QUOTAS}),
        default_stream=section.default_stream,
        default_mailbox=section.default_mailbox,
        default_service=section.default_service,
    )


def check_namespaces(config: Config) -> None:
    """Raise ConfigError for a user in two namespaces, or under a prefix that is not the user's.

    config: with all users.
    """
    if not config.namespaces:
        return
    namespaces = Namespaces(config.namespaces)
    authentication = config.authentication
    for namespace in namespaces.all:
        if any(fits(pattern, HTTP_USER) for pattern in namespace.users):
            raise ConfigError(
                f"namespaces.{namespace.name}.users",
                f"fits {HTTP_USER}, the broker's own HTTP side; name the users more closely",
            )
    for user in {*authentication.users, *authentication.clients}:
        home = [
            namespace
            for namespace in namespaces.all
            if any(fits(pattern, user) for pattern in namespace.users)
        ]
        if len(home) > 1:
            raise ConfigError(
                f"namespaces.{home[1].name}.users",
                f"user {user} belongs to {home[0].name} already: one namespace a user",
            )
        for name in (user, *authentication.identities.get(user, ())):
            for other in _under(name, namespaces.all):
                if other not in home:
                    raise ConfigError(
                        f"namespaces.{other.name}.prefix",
                        f"user {user} is none of its users, and the name {name} lies under "
                        f"{other.prefix!r}: so would the mailbox of that name",
                    )


def empty_namespaces(config: Config) -> Iterator[ConfigError]:
    """Yield each namespace that no user belongs to, and the user who was likely meant.

    Its name or its patterns may be misspelt: then those who were meant reach the whole broker.
    config: with all users; without any nothing is known.
    """
    users = {*config.authentication.users, *config.authentication.clients}
    namespaces = Namespaces(config.namespaces)
    homeless = [user for user in users if namespaces.of(user) is None]
    for namespace in namespaces.all if users else ():
        if any(fits(pattern, user) for pattern in namespace.users for user in users):
            continue
        near = [
            user
            for pattern in namespace.users
            for user in difflib.get_close_matches(pattern, homeless, n=1)
        ]
        yield ConfigError(
            f"namespaces.{namespace.name}",
            f"no user's name fits {' or '.join(namespace.users)}"
            + (f": {near[0]} is in no namespace, and reaches the whole broker" if near else ""),
        )


def _under(name: str, namespaces: Iterable[Namespace]) -> Iterator[Namespace]:
    return (namespace for namespace in namespaces if name.startswith(namespace.prefix))
