"""A broker whose matching and serving have a share of a turn, by a meter that counts.

Owns the meter: it goes on by one each time that it is asked.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from tests.broker.shell import Shell


class Sliced(Shell):
    """A broker whose matching has a share of a turn."""

    def __init__(self, share: int = 5, **settings: Any) -> None:
        self._asked = count()
        super().__init__(meter=self.asked, matching_share=share, **settings)

    def asked(self) -> int:
        """The meter."""
        return next(self._asked)

    def turn(self) -> bool:
        """One turn of the loop; False: the core wants nothing more at once."""
        ready = self.broker.take_ready()
        self._do(ready)
        self.answer_reads()
        self.sync()
        at_ms = self.broker.wake_at_ms()
        if at_ms is None or at_ms > self.now_ms:
            return bool(ready)
        self.broker.tick(self.now_ms)
        return True
