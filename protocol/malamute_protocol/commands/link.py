"""The commands of the link: greeting, signs of life, the end, and the two answers to a request.

Owns the commands 1 to 9. Source: SPEC.md, section 4.
"""

from __future__ import annotations

from typing import Any

from malamute_protocol.commands.command import Command


class Hello(Command, tag=1, frozen=True):
    """Client opens or resumes a link. Must be the link's first command."""

    versions: tuple[int, int]
    """Lowest and highest protocol version that the client speaks."""
    session: bytes
    """16 random bytes, the same over reconnects: a newer link of a session replaces the older."""
    identity: str = ""
    """Identity asked for; the credential must be allowed to have it. With `{n}` a template
    (SPEC.md, section 4.8): the broker puts a number there. Empty: the credential's own, or none."""
    software: str = ""
    heartbeat_ms: int = 0
    """Longest time for which the client promises to be silent; 0: the broker's default."""
    features: int = 0
    number: int = -1
    """With a template as identity: the number that the session had before; -1: none."""


class Welcome(Command, tag=2, frozen=True):
    """Broker accepts a link and states its bounds and settings."""

    version: int
    broker: bytes
    """UUID of the broker's data directory, 16 bytes."""
    epoch: int
    heartbeat_ms: int
    expiry_ms: int
    """Silence after which either side gives the other up."""
    window_bytes: int
    """Unconfirmed bytes that the client may have published."""
    record_bytes_max: int
    batch_bytes_max: int
    batch_records_max: int
    message_commands_max: int
    identity: str = ""
    software: str = ""
    cluster: bytes = b""
    """Cluster UUID, or empty: reserved for scale-out."""
    map_version: int = 0
    """Version of the placement map: reserved for scale-out."""
    features: int = 0
    now_ms: int = 0
    """The broker's clock, so that a client can express expiry in the broker's time."""


class Ping(Command, tag=3, frozen=True):
    """Either side asks the other for a sign of life."""

    token: int = 0


class Pong(Command, tag=4, frozen=True):
    """Answer to PING with its token."""

    token: int = 0


class Bye(Command, tag=5, frozen=True):
    """Either side ends the link in order; nothing follows. The code says why."""

    code: str = "closed"
    reason: str = ""


class Refused(Command, tag=6, frozen=True):
    """The one negative answer: which command, which of them, why, and when to try again."""

    command: int
    """Number of the refused command; 0: the link as a whole."""
    reference: int
    """Tracker, subscription or request of the refused command; 0 when it had none."""
    code: str
    reason: str = ""
    retry_ms: int = 0
    """Time after which to try again; 0: not before something changes."""
    revision: int = -1
    """Revision that the key of an UPDATE_KEY has, where its condition does not hold; else -1."""


class Result(Command, tag=7, frozen=True):
    """Positive answer to a command that carries `request`."""

    request: int
    value: dict[str, Any] = {}
