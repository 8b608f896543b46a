"""Commands that the broker may have ended a link for.

Owns the search for the one that did. The rule: on a link where commands shared messages it is
unknown; on the next link each leaves by itself with a PING after it, and the first one whose PING
has no answer is the one. Source: SPEC.md, section 8.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from malamute_protocol.commands import Command, Ping

BLAMED: Final = frozenset({"malformed", "too_large", "internal"})
"""Codes by which a broker ends a link for what one of the client's commands was."""
_CLEARED_MS: Final = 60_000
"""Time that a link must last on which each command leaves by itself, before commands share messages
again."""


class Suspects:
    """Commands that left one by one, and the PINGs after them."""

    def __init__(self) -> None:
        self.suspicious = False
        """The broker ended a link for a command that it did not name: each leaves by itself."""
        self.named = False
        """The broker said which command it met an error with: no other is suspected."""
        self._left: deque[tuple[int, list[Command]]] = deque()
        """Commands that left by themselves, each with the token of the PING after it."""
        self._probe = 0
        """Token of the newest PING."""

    def probe(self) -> int:
        """Return a token for a PING, higher than all before, so that its PONG clears those, too."""
        self._probe += 1
        return self._probe

    def suspect(self, commands: list[Command]) -> Command:
        """Note commands that leave by themselves; returns the PING to follow, which clears them."""
        probe = self.probe()
        self._left.append((probe, commands))
        return Ping(probe)

    def cleared(self, token: int) -> None:
        """Clear the commands of suspicion that left before the PING of this PONG."""
        while self._left:
            ping_token, _ = self._left[0]
            if ping_token > token:
                break
            self._left.popleft()

    def wake(self, linked_for_ms: int) -> None:
        """Let commands share messages again once the link has lasted."""
        if self.suspicious and linked_for_ms >= _CLEARED_MS:
            # What the broker ended a link for was given up, or has not come again. Commands that no
            # PONG has cleared yet are still suspected.
            self.suspicious = bool(self._left)

    def link_down(self) -> None:
        """Take note that the link has ended, and with it what left on it."""
        self.named = False
        self._left.clear()

    def find(self) -> list[Command] | None:
        """Return the command for which the broker ended the link, with the parts of its step.

        Called when a BYE or a refusal has ended the link by a code of BLAMED. None: the broker has
        named it, and its caller knows; or it is unknown, and each leaves by itself from now on.
        """
        if self.named:
            return None
        if not self._left:
            self.suspicious = True
            return None
        # PONGs have cleared those before: the first that is left is the one.
        _, commands = self._left.popleft()
        self.suspicious = False
        return commands
