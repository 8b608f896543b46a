"""Facts about the broker and its things at one time, as clients are given them.

Owns the form in which the HTTP side and the command line hand facts to the judgements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from malamute_py.client.facts import (
    CursorFacts,
    GroupFacts,
    MailboxFacts,
    NamespaceFacts,
    ServiceFacts,
    StreamFacts,
)


@dataclass(frozen=True)
class Facts:
    """The broker's answer to BROKER_INFO, as one map; empty when it did not answer."""

    broker: dict[str, Any]
    reason: str = ""
    """Why the broker did not answer."""
    silent_s: float = 0.0
    """Time since the last answer of the broker, or since SELDOM_S before the first question
    without an answer where that is less; 0 as well while it never answered."""


def ring_title(broker: Mapping[str, Any], name: str) -> str:
    """Return what a person calls a ring: that of one stream by the stream's name."""
    stream = broker.get("rings", {}).get(name, {}).get("stream")
    return f"{stream} (own)" if stream else name


def was_started(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether a broker was started between two answers, so that its counters began anew."""
    if now.get("epoch") != before.get("epoch"):
        return True
    # An epoch tells a start, but a broker in memory begins with the same one each time.
    return bool(now.get("uptime_ms", 0) < before.get("uptime_ms", 0))


def in_use(broker: Mapping[str, Any]) -> dict[str, int]:
    """Return how much there is of what may have a bound, by the names of the bounds.

    For those who show each beside its bound: the metrics and the console.
    """
    used = {**broker.get("gauges", {}), "rings": len(broker.get("disk", {}))}
    return used | {name: broker[name] for name in ("connections", "unread_bytes") if name in broker}


@dataclass(frozen=True)
class Everything:
    """All that the metrics are made of."""

    facts: Facts
    answer_s: float = 0.0
    """How long the broker took to answer all questions."""
    streams: list[StreamFacts] = field(default_factory=list)
    stream_details: dict[str, StreamFacts] = field(default_factory=dict)
    """Details of the streams that have a label of their own."""
    mailboxes: list[MailboxFacts] = field(default_factory=list)
    services: list[ServiceFacts] = field(default_factory=list)
    cursors: list[CursorFacts] = field(default_factory=list)
    groups: list[GroupFacts] = field(default_factory=list)
    namespaces: list[NamespaceFacts] = field(default_factory=list)
