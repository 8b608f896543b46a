"""The commands of cursors (feature CURSORS): the place of a reader, as the broker keeps it.

Owns the commands 60 to 62 and 67. Source: SPEC.md, section 4.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from malamute_protocol.commands.command import Command
from malamute_protocol.commands.fields import Settings, Start


class MoveCursor(Command, tag=60, frozen=True):
    """Move a named cursor of a stream to `next`; answered by CONFIRM (tracker)."""

    stream: str
    cursor: str
    next: Annotated[int, msgspec.Meta(ge=0)]
    tracker: int
    level: int = 0
    force: bool = False
    """True: the cursor may move back: an operator's reset."""
    uuid: bytes = b""
    """UUID of the stream that `next` is a position of; empty: not checked."""
    epoch: int = 0
    """Epoch in which `next` was the position; 0: not checked."""
    from_: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Position that the cursor must have until now; -1: any before `next`. Not checked when it is
    new."""


class CursorInfo(Command, tag=61, frozen=True):
    """Facts about one cursor, or a page of a stream's when the name is empty or ends in `*`.

    An empty stream asks for the cursors of all streams.
    """

    request: int
    stream: str
    cursor: str = ""
    after: str = ""
    limit: int = 1000


class RemoveCursor(Command, tag=62, frozen=True):
    """Forget a cursor and its pin."""

    request: int
    stream: str
    cursor: str


class EditCursor(Command, tag=67, frozen=True):
    """Create a cursor, or change its settings: whether it pins history, and how much at most."""

    request: int
    stream: str
    cursor: str
    settings: Settings = {}
    start: Start = []
    """Start of a new cursor; empty: earliest."""
    replace: bool = False
    """True: settings that are not named go back to their defaults."""
