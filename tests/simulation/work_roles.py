"""Data of a scripted client: its roles, what it has opened, and the things that it holds.

Owns these as data. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ALL: list[Any] = ["all"]


@dataclass(slots=True)
class Held:
    """A message, request or record that a client holds."""

    number: int
    serial: int
    reply_to: str = ""
    subject: str = ""


@dataclass(slots=True, eq=False)
class Sub:
    """An inbox, an offer or a membership."""

    number: int
    kind: str
    place: str
    """Mailbox, service, or stream/group."""
    pattern: list[Any] = field(default_factory=lambda: ALL)
    group: str = ""
    """Kind of the group."""
    window: int = 10
    lease_ms: int = 0
    open: bool = False
    wanted: bool = True
    """True: to be opened, and kept open."""
    doubtful: bool = False
    """True: some of the held things may be held no more, which the client cannot tell from
    others."""
    got: int = 0
    credit: int = 0
    held: dict[int, Held] = field(default_factory=dict)


@dataclass(slots=True)
class Roles:
    """The roles of one client."""

    inboxes: list[str] = field(default_factory=list)
    offers: list[tuple[str, list[Any]]] = field(default_factory=list)
    groups: list[tuple[str, str, list[Any]]] = field(default_factory=list)
    """(stream/group, kind, pattern)."""
    sends: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    publishes: list[str] = field(default_factory=list)
    cursors: list[str] = field(default_factory=list)
    """stream/cursor; one client moves each."""
    budget: int = 0
    """How many new things it begins."""
