"""How long the turns of the loop are, and for how long each takes up messages.

Owns both. The rule: time of a processor counts. A loop that waits for a processor, as other threads
and processes have it, does not work longer by that. Source: ARCHITECTURE.md, "What a peer may
cost".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

_TAKE_LEAST: Final = 16
"""Part of its time that a turn takes up messages for at least; it takes up one message always."""
_TAKE_LEAST_COSTLY: Final = 3
"""This part where commands are costly: most messages only wait then, and small ones are among the
next. They wait for as many turns as it takes to take up those of other peers."""
_COSTLY_NS: Final = 50_000
"""Processor time from which on a command is costly; to publish a record takes 10 to 20 us."""
_CHEAP_NS: Final = 25_000
"""Processor time of a command in a share up to which those that wait are costly no more."""
_COSTLY_TURNS: Final = 64
"""Turns after which messages are taken up as if commands were cheap, which tells if they are."""
_ASIDE_NS: Final = 4_000
"""Processor time at most for a frame or command that was taken up and put aside."""
_ASIDE_PART: Final = 4
"""Part of the time of a turn's shares for which the next turn may put messages aside."""
_LONG_WORK_NS: Final = 1_000_000
"""Processor time from which on the work for readers and queues comes after what peers wait for."""
_LONG_WORK_TURNS: Final = 64
"""Turns for which it does. The work of most turns is short. It comes first then, so that hand-outs,
say, are synced with the requests before them, instead of by a sync of their own."""
_LONG_TURN_US: Final = 100_000
"""Processor time from which on a turn of the loop is logged: all peers have waited for it."""


class Pacing:
    """The time for which a turn takes up messages, by what those of the turns before it cost."""

    def __init__(self, turn_us: int, worked: Callable[[], int]) -> None:
        """turn_us: how long a turn may work. worked: processor time of this thread, in ns."""
        self.turn_ns = turn_us * 1_000
        self.take_ns = self.take_most_ns = self.turn_ns // 2
        """How long the next turn takes up messages: less, when what comes of them takes long."""
        self.aside_ns = self.take_ns
        """How long the next turn takes up messages of many frames, which are only put aside: also
        longer, since all that are not taken up wait for a share of others."""
        self.was_costly = False
        """Whether commands took long lately, each of them and together."""
        self._costly_turns = 0
        """Turns since messages told so."""
        self._aside = 0
        """Count of parts and commands put aside until the last turn."""
        self.work_waits = 0
        """Turns for which work for readers and queues still waits until the rest is done."""
        self.longest_us = 0
        """Processor time of the longest turn so far."""
        self.worked = worked
        self.began_ns = 0
        """Time at which the turn began, by the meter: no time of a processor."""
        self._ended_ns = 0
        """Processor time that the thread had used when the last turn ended."""
        self._notable_ns = sys.maxsize
        """Processor time of the thread beyond which the turn is the longest so far, or a long one;
        the first turn is neither."""
        self._notable_turn_ns = 0

    def note_work(self, began_ns: int, ended_ns: int) -> None:
        """Note when the work for readers and queues in one step of a turn began and ended.

        By the meter, which costs a tenth. Processor time is asked for where that was long: the
        turn's so far, less all that went by before the work.
        """
        if ended_ns - began_ns > _LONG_WORK_NS:
            before_ns = began_ns - self.began_ns
            if self.worked() - self._ended_ns - before_ns > _LONG_WORK_NS:
                self.work_waits = _LONG_WORK_TURNS

    def end(
        self, began_ns: int | None, ended_ns: int | None, commands: int, shared: int = 0,
        aside: int = 0,
    ) -> int:  # fmt: skip
        """Note that a turn ends, and set the time for which the next one takes up messages.

        The work that messages cause (fan-out, hand-outs, appends) is known only when it is done,
        and until then no other messages are taken up: so a turn with much of it has the next one
        take up fewer. The time that taking up itself took does not count: a message of 1,000 frames
        would have the others wait, one of each turn. Shares of commands that waited do not count,
        also those of this turn's messages, nor what is done after them.

        began_ns, ended_ns: processor time at which that work began and ended; None: as the turn
        began or ended. commands: how many caused it. shared: commands of the turn's shares. aside:
        parts and commands of all messages so far that were taken up and put aside. Returns the
        turn's microseconds where it is to be logged, else 0.
        """
        worked_ns = self.worked()
        if self.work_waits:
            self.work_waits -= 1
        if (
            self.take_ns == self.aside_ns == self.take_most_ns and not self.was_costly
            and commands <= 1 and not shared
            and worked_ns < self._notable_ns and worked_ns < self._ended_ns + self.take_most_ns
        ):  # fmt: skip
            # The turn of a lone message, which changes nothing: most turns of an idle broker.
            self._ended_ns, self._aside = worked_ns, aside
            self._notable_ns = worked_ns + self._notable_turn_ns
            return 0
        took_us = 0
        # With what else the turn did after it settled what small messages brought.
        shares_ns = worked_ns - max(ended_ns or 0, self._ended_ns) if shared else 0
        began_ns = self._ended_ns if began_ns is None else began_ns
        caused_ns = (worked_ns if ended_ns is None else ended_ns) - began_ns
        took_long = caused_ns > self.turn_ns - self.take_most_ns
        # What commands cost may be known when they are taken up, or by the work that they cause. Of
        # a lone command, or none, that is all of the turn: the work for readers that lag, too.
        put_aside, self._aside = aside - self._aside, aside
        cost_ns = max(caused_ns, began_ns - self._ended_ns - _ASIDE_NS * put_aside)
        if commands > 1 and cost_ns > max(self.take_most_ns, _COSTLY_NS * commands):
            self.was_costly, self._costly_turns = True, 0
        elif self.was_costly:
            # Those that wait, of which a turn does a share, may be costly still. What else the turn
            # did is among it: so this counts for some turns only.
            self._costly_turns += 1
            self.was_costly = (
                self._costly_turns < _COSTLY_TURNS and 0 < _CHEAP_NS * shared < shares_ns
            )
        # The work took more than its part of a turn: half the time next; else an eighth more.
        if took_long:
            part = _TAKE_LEAST_COSTLY if self.was_costly else _TAKE_LEAST
            self.take_ns = max(self.take_ns // 2, self.take_most_ns // part)
        elif self.take_ns < self.take_most_ns:
            self.take_ns = min(self.take_ns + self.take_ns // 8, self.take_most_ns)
        self.aside_ns = max(self.take_ns, min(shares_ns // _ASIDE_PART, self.turn_ns * 2))
        if worked_ns > self._notable_ns:
            took_us = (worked_ns - self._ended_ns) // 1_000
            self.longest_us = max(self.longest_us, took_us)
            self._notable_turn_ns = 1_000 * min(self.longest_us, _LONG_TURN_US)
        self._ended_ns = worked_ns
        self._notable_ns = worked_ns + self._notable_turn_ns
        return took_us if took_us > _LONG_TURN_US else 0
