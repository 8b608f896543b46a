"""Base classes of all commands.

Owns how many content frames of a message belong to a command. The rule: they follow in the order of
the commands. Source: SPEC.md, sections 3 and 4.
"""

from __future__ import annotations

import msgspec


class Command(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all commands. `frames` content frames follow in the same message, in order."""

    @property
    def content_frames(self) -> int:
        """Return how many content frames of the message belong to this command."""
        return 0


class WithContent(Command, frozen=True):
    """Base of the commands that own one content frame, with the content of a batch."""

    @property
    def content_frames(self) -> int:
        """Return 1: the batch content."""
        return 1
