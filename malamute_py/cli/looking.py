"""All that the broker tells about itself and its things, for the commands that judge or watch it.

Owns the questions. The rules: each kind of thing is asked for once; what this user may not see is
named, so that a missing thing is never taken for a healthy one. The form is that which
malamute_py/health judges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from malamute_protocol.errors import BrokerRefused
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.values import duration_ms
from malamute_py.health.facts import Everything, Facts

if TYPE_CHECKING:
    from malamute_py.client.facts import LinkFacts
    from malamute_py.client.sync.client import SyncClient

T = TypeVar("T")


@dataclass(frozen=True)
class Look:
    """The answers of one look."""

    everything: Everything
    links: list[LinkFacts] = field(default_factory=list)
    unseen: dict[str, str] = field(default_factory=dict)
    """Kind of thing -> why the broker does not show it."""

    @property
    def broker(self) -> dict[str, Any]:
        """Facts about the broker itself."""
        return self.everything.facts.broker

    @property
    def now_ms(self) -> int:
        """The broker's clock."""
        return int(self.broker.get("now_ms", 0))


TOLD_TO: Final = {
    "streams": ("read", "trim", "manage_streams"),
    "cursors": ("read", "trim", "manage_streams"),
    "groups": ("read", "trim", "manage_streams"),
    "mailboxes": ("receive", "purge", "manage_queues"),
    "services": ("request", "work", "manage_queues"),
}
"""Kind -> verbs, of which each lets a user see some of the kind."""
KINDS: Final = ("streams", "mailboxes", "services", "cursors", "groups", "clients")
EVERY_MIN_S: Final = 0.1
"""Least pause between two looks."""
COUNTS: Final = "counts"
"""Kind of what the broker counts over all clients, which it tells no user of a namespace."""


def pause_s(every: str) -> float:
    """Return the pause between two looks that was typed. Raises CommandFailed: it is too short."""
    wanted_s = duration_ms(every) / 1000
    if wanted_s < EVERY_MIN_S:
        raise CommandFailed("--every is at least 100ms", USAGE)
    return wanted_s


def look(
    client: SyncClient, kinds: Container[str] = KINDS, *, limit: int = 0, links_max: int = 0
) -> Look:
    """Ask about the broker, and about its things of these kinds.

    For `check`, `top` and `watch`. limit: things of each kind; 0: all. links_max: links at most; 0:
    as limit. A refusal is noted in Look.unseen. Raises ConnectionLost, Timeout.
    """
    unseen: dict[str, str] = {}

    def allowed(kind: str, ask: Callable[[], list[T]]) -> list[T]:
        """Return a listing that was asked for; note in `unseen` why it may lack something."""
        if kind not in kinds:
            return []
        try:
            found = ask()
        except BrokerRefused as error:
            unseen[kind] = str(error)
            return []
        # The broker leaves out what a user may not see, without a word. A user without any of the
        # verbs gets an empty listing, or that of the own mailbox alone.
        verbs = TOLD_TO.get(kind, ()) if not found or kind == "mailboxes" else ()
        # A broker of an earlier version does not tell what its user may do.
        with contextlib.suppress(BrokerRefused):
            if verbs and not any(map(client.may, verbs)):
                own = " but its own" if kind == "mailboxes" else ""
                unseen[kind] = (
                    f"this user may see no {kind}{own}: it has none of {', '.join(verbs)}"
                )
        return found

    try:
        told = client.broker_info()
        # The broker's shell counts apart from its core.
        counters = {**told.counters, **told.more.get("shell", {})}
        broker = {"software": told.software, "epoch": told.epoch, **told.more,
                  "counters": counters}  # fmt: skip
        if "namespace" in told.more:
            unseen[COUNTS] = "a user of a namespace is told of neither all clients nor the rings"
    except BrokerRefused as error:
        unseen["broker"] = str(error)
        broker = {}
    everything = Everything(
        Facts(broker, unseen.get("broker", "")),
        streams=allowed("streams", lambda: client.list_streams(limit=limit)),
        mailboxes=allowed("mailboxes", lambda: client.list_mailboxes(limit=limit)),
        services=allowed("services", lambda: client.list_services(limit=limit)),
        cursors=allowed("cursors", lambda: client.list_cursors(limit=limit)),
        groups=allowed("groups", lambda: client.list_groups(limit=limit)),
    )
    return Look(
        everything, allowed("clients", lambda: client.list_links(links_max or limit)), unseen
    )
