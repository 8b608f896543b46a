"""The credential that each identity belongs to.

Owns the users' names and the templates that each may derive identities from: `<user>-{n}`, and what
`authentication.identities` adds. The rules: a user's own name belongs to that user, whatever
templates give; a name that templates of several users give belongs to the first of them in the
configuration. So each name has one owner at most, and a restart finds the same owner. Source:
SPEC.md, section 15.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from malamute_protocol.address import REPLICA, replica_number


class Carriers:
    """The owner of each identity (the core's `carrier`), and the templates that a user may use."""

    def __init__(self, users: Iterable[str], templates: Mapping[str, Sequence[str]]) -> None:
        """users: those that can authenticate; none: there is no authentication.

        templates: user -> the templates that authentication.identities gives it.
        """
        self._users = frozenset(users)
        self._templates = templates

    def __call__(self, identity: str) -> str:
        """Return the user that an identity belongs to, by name or by template; empty: none."""
        if identity in self._users:
            return identity
        for user, templates in self._templates.items():
            if any(replica_number(template, identity) >= 0 for template in templates):
                return user
        # Each user has `<user>-{n}`. replica_number(): n, or -1 where the template does not fit.
        user = identity.rpartition("-")[0]
        own = user in self._users and replica_number(f"{user}-{REPLICA}", identity) >= 0
        return user if own else ""

    def knows(self, credential: str) -> bool:
        """Whether a user has this name: the core's `known`, which refuses others a link.

        Without authentication no credential comes at all.
        """
        return credential in self._users

    def may_use(self, user: str, template: str) -> bool:
        """Whether a user may derive identities from a template."""
        return template == f"{user}-{REPLICA}" or template in self._templates.get(user, ())
