"""A cursor that the broker keeps, in asyncio.

Owns the verbs of one cursor as awaitables. The rule: as in client.py: a cancelled call leaves all
others as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from malamute_protocol import commands as c
from malamute_py.client import options
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.aio.steps import AtomicStep
from malamute_py.client.arguments import settings_of, truth
from malamute_py.client.facts import CursorFacts, facts
from malamute_py.client.position import Confirmation, Position, StartPoint, found_at, start_on_wire
from malamute_py.client.readers.cursor_name import CursorName


class StreamCursor(CursorName):
    """One cursor that the broker keeps."""

    def __init__(self, link: LoopLink, stream: str, name: str) -> None:
        """See Client.cursor()."""
        super().__init__(stream, name)
        self._link = link

    async def info(self) -> CursorFacts:
        """Ask where the cursor stands. Raises BrokerRefused `unknown_cursor`."""
        value = await self._link.ask(lambda number: c.CursorInfo(number, self.stream, self.name))
        return facts(CursorFacts, value)

    async def move(self, next: int | Position, *, since: int | None = None) -> Confirmation | None:
        """Have it stand at `next`, which must be ahead of it.

        since: where it stands until now. Raises BrokerRefused `conflict`.
        """
        return await self._moving(AtomicStep(self._link), next, since).commit()

    async def reset(self, start: StartPoint) -> int:
        """Have it stand at a start point, wherever it stands; returns the offset.

        Raises LocalProtocolError `bad_start`: the stream ends before it, or is another one.
        """
        wire = start_on_wire(start)
        value = await self._link.ask(lambda number: c.FindOffset(number, self.stream, wire))
        found = found_at(self.stream, start, value)
        await self._moving(AtomicStep(self._link), found, None, force=True).commit()
        return found.next

    async def edit(
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
        value = await self._link.ask(
            lambda number: c.EditCursor(number, self.stream, self.name, named, wire, anew)
        )
        return facts(CursorFacts, {"stream": self.stream, "cursor": self.name, **value})

    async def remove(self) -> None:
        """Have the broker forget it. Raises BrokerRefused."""
        await self._link.ask(lambda number: c.RemoveCursor(number, self.stream, self.name))
