"""The commands by which a broker is administered: its facts, links, users and namespaces.

Owns the commands 37 to 39, 90 to 92 and 100. Source: SPEC.md, section 4.
"""

from __future__ import annotations

from malamute_protocol.commands.command import Command


class BrokerInfo(Command, tag=37, frozen=True):
    """Facts about the broker: version, uuid, epoch, rings, links, counters."""

    request: int
    settings: str | None = None
    """Also the settings in force after this one, by name, for administrators only."""


class ListLinks(Command, tag=38, frozen=True):
    """List the links with identity, state, subscriptions and the work they hold, by number."""

    request: int
    limit: int = 1000
    after: int = 0
    """Links with a number above this."""


class Kick(Command, tag=39, frozen=True):
    """End a link by its number; needs the permission manage_clients."""

    request: int
    link: int
    reason: str = ""


class ReloadConfig(Command, tag=90, frozen=True):
    """Have the broker read its configuration and its users anew; needs manage_users.

    RESULT: {"changes": [[key, outcome, why], ...], "more"}; see SPEC.md, section 4.7.
    """

    request: int


class ListUsers(Command, tag=91, frozen=True):
    """Ask for the users and permissions in force, and who may do something; needs manage_users.

    With `own` the sender asks about itself alone, which needs no permission.
    """

    request: int
    verb: str = ""
    """Verb of a permission; empty: nothing is asked of each user."""
    name: str = ""
    """Stream, mailbox or service that the verb is about."""
    after: str = ""
    """Users after this one, by name."""
    limit: int = 1000
    """At most so many entries."""
    own: bool = False
    """True: one entry, of the sender's user, with `user` and `may` alone; no name: any name."""


class ListNamespaces(Command, tag=100, frozen=True):
    """Ask for the namespaces and what each holds; a user of one is told of that one alone."""

    request: int
    after: str = ""
    """Namespaces after this one, by name."""
    limit: int = 1000
    """At most so many entries."""
