"""Simulated links between clients and the broker, with ZeroMQ's manners.

Owns the messages under way between two ends. The rule is that of one ZeroMQ connection: whole
messages, each at most once, in order, in each direction; or the connection is lost, and with it
everything that had not arrived. Delays vary but never reorder. A direction may stall: the sender is
then refused (EAGAIN) once `high_water` messages are under way, and nothing arrives until the stall
ends. Duplicates never happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TypeAlias

from tests.simulation.clock import Clock

Message: TypeAlias = list[bytes]


class Direction:
    """One way of a link: a queue with delays."""

    def __init__(
        self, clock: Clock, rng: Random, deliver: Callable[[Message], None], high_water: int
    ) -> None:
        self.clock = clock
        self.rng = rng
        self.deliver = deliver
        self.high_water = high_water
        self.under_way: deque[Message] = deque()
        self.stalled = False
        self.open = True
        self.writable: Callable[[], None] | None = None
        """Called once there is room again after a refusal."""
        self._wanted = False
        self._last_us = 0

    def send(self, message: Message) -> bool:
        """Put a message on its way; False: no room, and `writable` will tell (EAGAIN)."""
        if not self.open:
            return True
        if len(self.under_way) >= self.high_water:
            self._wanted = True
            return False
        self.under_way.append(message)
        self._schedule()
        return True

    def wants(self) -> None:
        """Note that a sender was refused, and is to be told when there is room."""
        self._wanted = True

    def stall(self, on: bool) -> None:
        """Stop or resume arriving."""
        self.stalled = on
        if not on:
            for _ in range(len(self.under_way)):
                self._schedule()

    def close(self) -> None:
        """Lose everything that is under way."""
        self.open = False
        self.under_way.clear()

    def _schedule(self) -> None:
        draw = self.rng.random()
        delay = int(20 + draw * 400) if draw < 0.95 else int(draw * 20_000)
        at = max(self.clock.now_us + delay, self._last_us)
        self._last_us = at
        self.clock.after(at - self.clock.now_us, self._arrive)

    def _arrive(self) -> None:
        if not self.open or self.stalled or not self.under_way:
            return
        self.deliver(self.under_way.popleft())
        if self._wanted and len(self.under_way) <= self.high_water // 2:
            self._wanted = False
            if self.writable is not None:
                self.writable()


class Connection:
    """Both directions of one link, numbered as the shell numbers links."""

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        number: int,
        to_broker: Callable[[int, Message], None],
        to_client: Callable[[Message], None],
        high_water: int,
    ) -> None:
        self.number = number
        self.up = Direction(clock, rng, lambda message: to_broker(number, message), 1 << 30)
        self.down = Direction(clock, rng, to_client, high_water)
        self.open = True

    def drop(self) -> None:
        """Lose the connection in both directions; each end learns of it a little later."""
        self.open = False
        self.up.close()
        self.down.close()
