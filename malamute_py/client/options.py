"""Settings of what the broker keeps, as keyword arguments that a type checker knows.

Owns the types of `create_stream(...)` and `edit_...(...)`. The rule: they are the settings that the
broker has, and a test compares them; a setting of a newer broker goes in as a mapping. Source:
SPEC.md, section 13.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

Level: TypeAlias = Literal["stored", "synced"]
"""Promise of a confirm that asks for none by name."""


class StreamOptions(TypedDict, total=False):
    """Settings of a stream, as create_stream() and edit_stream() explain them."""

    memory: bool
    ring_bytes: int
    full: Literal["overwrite", "refuse"]
    max_bytes: int
    max_age_ms: int
    max_records: int
    body_kind: Literal["", "blob", "list", "arrow"]
    schema: Any
    """A pyarrow schema, or its message in bytes."""
    validate: Literal["schema", "full"]
    level: Level
    description: str
    keep: Literal["", "last-per-subject"]


class MailboxOptions(TypedDict, total=False):
    """Settings of a mailbox, as edit_mailbox() explains them."""

    memory: bool
    max_messages: int
    max_bytes: int
    ttl_ms: int
    level: Level
    description: str


class ServiceOptions(TypedDict, total=False):
    """Settings of a service, as edit_service() explains them."""

    memory: bool
    max_requests: int
    max_bytes: int
    attempts_max: int
    lease_ms: int
    backoff_ms: int
    backoff_max_ms: int
    timeout_ms: int
    dead_letters: str
    level: Level
    description: str


class CursorOptions(TypedDict, total=False):
    """Settings of a cursor, as its edit() explains them."""

    pin: bool
    pin_bytes_max: int
    description: str


class GroupOptions(TypedDict, total=False):
    """Settings of a group, as edit_group() explains them."""

    attempts_max: int
    dead_letters: str
    lease_ms: int
    description: str
