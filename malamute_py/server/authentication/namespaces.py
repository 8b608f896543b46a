"""Namespaces: which users belong together, and under which prefix.

Owns the namespace of each user, and the checks that need all users. The rules: a user belongs to
one namespace at most; a name under a prefix is no name of a user outside of the namespace, since
that user's own mailbox would lie in it. Source: SPEC.md, section 15.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

from malamute_py.broker.limits import Namespace, Quota
from malamute_py.config import QUOTAS, Config, NamespaceSection
from malamute_py.sections import ConfigError
from malamute_py.server.authentication.name_patterns import compiled, fits

HTTP_USER: Final = "malamute-http"
"""Name of the broker's own HTTP side, which looks at all namespaces."""
_LIKE: Final = 0.75
"""Share of its signs from which on the beginning of a name is like a prefix."""
_DOUBTED_MAX: Final = 20
"""Users of a configuration that are doubted; further ones would say the same."""
_COMPARED_MAX: Final = 20_000
"""Comparisons of a user with a pattern, of one configuration: they take half a second."""


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
    """Return a namespace of the configuration, as the core knows it.

    A section that lists no users has all those whose names begin with its prefix. A quota with an
    unknown name is left out here: faults_of_users() reports it.
    """
    prefix = section.prefix_of(name)
    quotas = {quota: most for quota, most in section.quotas.items() if quota in QUOTAS}
    return Namespace(
        name=name,
        prefix=prefix,
        users=tuple(section.users) or (f"{prefix}*",),
        quota=Quota(**quotas),
        default_stream=section.default_stream,
        default_mailbox=section.default_mailbox,
        default_service=section.default_service,
    )


def check_namespaces(config: Config) -> None:
    """Raise ConfigError for a user in two namespaces, or with a name under another one's prefix.

    Also where a namespace would take in the broker's own HTTP side. For a start, a reload and a
    check of the configuration. config: with the users of the users file.
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
        # The names that the user may have as a client: mailboxes have these names.
        for name in (user, *authentication.identities.get(user, ())):
            for other in _under(name, namespaces.all):
                if other not in home:
                    raise ConfigError(
                        f"namespaces.{other.name}.prefix",
                        f"user {user} is none of its users, and the name {name} lies under "
                        f"{other.prefix!r}: so would the mailbox of that name",
                    )


def doubts(config: Config) -> Iterator[ConfigError]:
    """Yield a warning for each likely mistake in the namespaces; the configuration stays valid.

    A namespace to which no user belongs: its name or its patterns may be misspelt. A user in no
    namespace whose name resembles those of one: such a user may reach the whole broker. A start, a
    reload and a check of the configuration tell them.
    config: with the users of the users file; nothing is said where there are no users at all.
    """
    users = sorted({*config.authentication.users, *config.authentication.clients} - {HTTP_USER})
    if not users or not config.namespaces:
        return
    namespaces = Namespaces(config.namespaces)
    at_home = {namespace.name for user in users if (namespace := namespaces.of(user)) is not None}
    for namespace in namespaces.all:
        if namespace.name not in at_home:
            yield ConfigError(
                f"namespaces.{namespace.name}",
                f"no user's name fits {' or '.join(namespace.users)}",
            )
    homeless = (user for user in users if namespaces.of(user) is None)
    patterns = sum(len(namespace.users) for namespace in namespaces.all)
    # Each user is compared with each pattern: further users are not looked at.
    compared = islice(homeless, 1 + _COMPARED_MAX // patterns)
    doubted = ((user, near) for user in compared if (near := like_a_member(user, namespaces)))
    for user, (name, pattern) in islice(doubted, _DOUBTED_MAX):
        yield ConfigError(
            f"namespaces.{name}.users",
            f"user {user} is in no namespace, so that what it may do counts for the whole broker; "
            f"did you mean {pattern}?",
        )


def like_a_member(user: str, namespaces: Namespaces) -> tuple[str, str] | None:
    """Return a namespace whose users a name resembles, and the pattern of these; None: none.

    For doubts(), and for the command that has just added this user.
    """
    return next(
        (
            (namespace.name, pattern)
            for namespace in namespaces.all
            for pattern in namespace.users
            if _is_like(user, pattern)
        ),
        None,
    )


def _is_like(user: str, pattern: str) -> bool:
    """Whether a user's name resembles those that a pattern such as `acme.*` selects.

    For a user that no pattern selects, and whose name may be misspelt. Other kinds of patterns
    resemble nothing.
    """
    head = pattern.removesuffix("*")  # acme.
    if head == pattern or not head or "*" in head or head[-1].isalnum():
        return False
    word, end = head[:-1], head[-1]  # acme, and the dot
    # As many parts of the name, between its dots, as the pattern has before its star.
    parts = head.count(end)
    own = end.join(user.split(end)[:parts])
    if own.casefold() == word.casefold():
        return True  # Such as ACME.eve, or acme alone.
    if user.count(end) >= parts:
        # Such as acne.eve.
        alike = difflib.SequenceMatcher(None, own, word)
        return alike.real_quick_ratio() >= _LIKE and alike.ratio() >= _LIKE
    rest = user[len(word) :]  # Such as acme-eve.
    return user.casefold().startswith(word.casefold()) and not rest[:1].isalnum()


def _under(name: str, namespaces: Iterable[Namespace]) -> Iterator[Namespace]:
    return (namespace for namespace in namespaces if name.startswith(namespace.prefix))
