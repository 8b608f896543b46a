# DO NOT EDIT: made from ../aio/cursors.py by `make sync-client` (tools/sync_client.py).
"""A cursor that the broker keeps, for threads.

Owns the verbs of one cursor as blocking calls. The rule: as in client.py: a timeout or the client's
end interrupts a waiting caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from malamute_protocol import commands as c
from malamute_py.client import options
from malamute_py.client.arguments import settings_of, truth
from malamute_py.client.facts import CursorFacts, facts
from malamute_py.client.position import Confirmation, Position, StartPoint, found_at, start_on_wire
from malamute_py.client.readers.cursor_name import CursorName
from malamute_py.client.sync.link import ThreadLink
from malamute_py.client.sync.steps import SyncAtomicStep


class SyncStreamCursor(CursorName):
    """One cursor that the broker keeps."""

    def __init__(self, link: ThreadLink, stream: str, name: str) -> None:
        """See SyncClient.cursor()."""
        super().__init__(stream, name)
        self._link = link

    def info(self) -> CursorFacts:
        """Ask where the cursor stands. Raises BrokerRefused `unknown_cursor`."""
        value = self._link.ask(lambda number: c.CursorInfo(number, self.stream, self.name))
        return facts(CursorFacts, value)

    def move(self, next: int | Position, *, since: int | None = None) -> Confirmation | None:
        """Have it stand at `next`, which must be ahead of it.

        since: where it stands until now. Raises BrokerRefused `conflict`.
        """
        return self._moving(SyncAtomicStep(self._link), next, since).commit()

    def reset(self, start: StartPoint) -> int:
        """Have it stand at a start point, wherever it stands; returns the offset.

        Raises LocalProtocolError `bad_start`: the stream ends before it, or is another one.
        """
        wire = start_on_wire(start)
        value = self._link.ask(lambda number: c.FindOffset(number, self.stream, wire))
        found = found_at(self.stream, start, value)
        self._moving(SyncAtomicStep(self._link), found, None, force=True).commit()
        return found.next

    def edit(
        self,
        settings: Mapping[str, Any] | None = None,
        /,
        *,
        start: StartPoint = "earliest",
        replace: bool = False,
        **more: Unpack[options.CursorOptions],
    ) -> CursorFacts:
        """Change its settings, or create it where `start` says; settings that are not named stay.

        replace: those not named go back to what a new one has.
        settings, by name or as a mapping: pin=True (what it has not passed is kept),
        pin_bytes_max (how much at most; 0: the broker's bound), description.
        Raises BrokerRefused.
        """
        named, wire = settings_of(settings, more), start_on_wire(start)
        anew = truth("replace", replace)
        value = self._link.ask(
            lambda number: c.EditCursor(number, self.stream, self.name, named, wire, anew)
        )
        return facts(CursorFacts, {"stream": self.stream, "cursor": self.name, **value})

    def remove(self) -> None:
        """Have the broker forget it. Raises BrokerRefused."""
        self._link.ask(lambda number: c.RemoveCursor(number, self.stream, self.name))
