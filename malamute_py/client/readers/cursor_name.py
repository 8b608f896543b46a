"""Named cursors, which the broker keeps.

Owns what both shells share of them. The rule: a cursor is moved by a step of its own, whose key
tells a broker that was asked twice: a move that was repeated after a reconnect would otherwise
be refused as one that is not ahead. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from typing import TypeVar

from malamute_protocol.address import name_fault
from malamute_protocol.errors import LocalProtocolError
from malamute_py.client.arguments import name_of
from malamute_py.client.position import Position
from malamute_py.client.session.step import Step

Moving = TypeVar("Moving", bound=Step)


class CursorName:
    """One cursor of one stream, by name."""

    def __init__(self, stream: str, name: str) -> None:
        """Raises LocalProtocolError `bad_name`."""
        for argument, what in (("stream", stream), ("name", name)):
            name_of(argument, what)
            fault = name_fault(what)
            if fault:
                raise LocalProtocolError("bad_name", fault)
        self.stream = stream
        self.name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.stream}/{self.name}>"

    def _moving(
        self, step: Moving, next: int | Position, since: int | None, *, force: bool = False
    ) -> Moving:
        """Return the step, with the cursor's move in it.

        next: where the cursor is to stand. since: where it must stand until now; None: anywhere
        before `next`, or, with force, anywhere at all.
        """
        step.move_cursor(self.stream, self.name, next, since=since, force=force)
        return step
