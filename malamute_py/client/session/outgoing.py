"""Trackers, the window and the interface of a session's senders.

Owns the numbers that CONFIRM and REFUSED name, the window over all unconfirmed bytes, and
the interface of the senders. The rule: all senders of a link share its trackers, which
ascend, because a CONFIRM names nothing else; all contents share one window.
A tracker is the number by which a client recognizes the CONFIRM or REFUSED of a command.
Source: SPEC.md, section 8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any, Final, Protocol

from malamute_protocol.commands import Command, Confirm, Welcome
from malamute_protocol.errors import BrokerRefused, MalamuteError

RETRYABLE: Final = frozenset({"wait", "window", "draining"})
"""Codes of refusals that pass: the same again, after a while."""
RETRY_MS: Final = 100
"""Pause after such a refusal when the broker names none."""


class CommandSink(Protocol):
    """Takes what leaves now."""

    def put(self, command: Command, content: Any) -> None:
        """Add a command, and its content frame or None."""

    def put_together(self, commands: list[Command], contents: list[Any]) -> None:
        """Add commands that must share a message, and the content frames that they own."""


class Tracked(Protocol):
    """A thing that waits for the CONFIRM or REFUSED of one command."""

    def confirmed(self, confirm: Confirm) -> None:
        """Take the CONFIRM, which states the level that was reached."""

    def refused(self, error: BrokerRefused, now_ms: int) -> None:
        """Take the REFUSED: nothing was done."""


class Trackers:
    """The numbers given to commands, and what waits for the answer to each."""

    def __init__(self) -> None:
        # Above every subscription number, which is what some refusals name instead.
        self.last = 1 << 20
        self._waiting: dict[int, Tracked] = {}

    def give(self, tracked: Tracked) -> int:
        """Return the tracker for a command that leaves; `tracked` gets its answer, once."""
        self.last += 1
        self._waiting[self.last] = tracked
        return self.last

    def take(self, tracker: int) -> Tracked | None:
        """Return the object that waits for this answer; None: nothing does, or not any more."""
        return self._waiting.pop(tracker, None)

    def clear(self) -> None:
        """Forget all that wait: the link has ended, and no answer on it will come."""
        self._waiting.clear()


class Window:
    """Bytes that were taken from callers and are not confirmed, or not known to have arrived.

    No confirm comes for contents of level `none`: a PING after them tells, by its PONG, that the
    broker has taken them in. Source: SPEC.md, section 8.
    """

    __slots__ = (
        "_marks",
        "bytes_max",
        "passing_bytes",
        "queued_bytes",
        "unconfirmed_bytes",
        "unmarked_bytes",
    )

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.queued_bytes = 0
        self.unconfirmed_bytes = 0
        self.passing_bytes = 0
        """Bytes of contents for which no confirm was asked: sent, and not known to have arrived."""
        self.unmarked_bytes = 0
        """Bytes among them that no PING follows yet."""
        self._marks: deque[tuple[int, int]] = deque()
        """(token of a PING, bytes that left between the PING before and this one), in order."""

    @property
    def left(self) -> int:
        """Bytes that may be taken still; none or less: the window is full."""
        return self.bytes_max - self.queued_bytes - self.unconfirmed_bytes - self.passing_bytes

    def has_room(self) -> bool:
        """Whether more may be taken from callers; else they wait for a confirm."""
        return self.queued_bytes + self.unconfirmed_bytes + self.passing_bytes < self.bytes_max

    def lets_go(self, size: int) -> bool:
        """Whether a content of so many bytes, stamp included, may be sent now.

        One that is larger than the window may, too, when nothing else is under way.
        """
        sent = self.unconfirmed_bytes + self.passing_bytes
        return not sent or sent + size <= self.bytes_max

    def passes(self, size: int) -> None:
        """Count a content that is sent without a confirm."""
        self.passing_bytes += size
        self.unmarked_bytes += size

    def wants_mark(self, *, held_back: bool) -> bool:
        """Whether a PING is to follow what was sent without a confirm.

        It is where something waits for room (held_back), else after a quarter of the window.
        """
        return self.unmarked_bytes > (0 if held_back else self.bytes_max // 4)

    def mark(self, token: int) -> None:
        """Note that a PING of this token follows what was sent; tokens ascend."""
        self._marks.append((token, self.unmarked_bytes))
        self.unmarked_bytes = 0

    def reached(self, token: int) -> None:
        """Take a PONG of this token: the broker has read what was sent before the PING."""
        marks = self._marks
        while marks:
            ping_token, size = marks[0]
            if ping_token > token:
                break
            marks.popleft()
            self.passing_bytes -= size

    def link_down(self) -> None:
        """Count contents without a confirm no more: no PONG tells whether they arrived."""
        self.passing_bytes = self.unmarked_bytes = 0
        self._marks.clear()


class Outgoing(Protocol):
    """A part of the session that gathers what callers want to be sent, and sends it."""

    @property
    def queues(self) -> tuple[Collection[Any], ...]:
        """Collections of which each has something to send, or all are empty.

        The session looks at them in each turn, and calls take() where one has something. A sender
        makes the tuple once, of collections that it fills and empties and never replaces.
        """

    @property
    def idle(self) -> bool:
        """Whether nothing waits to leave and nothing is unconfirmed."""

    @property
    def unanswered(self) -> int:
        """Commands that wait to leave, or for their answers."""

    @property
    def waits(self) -> bool:
        """Whether something may leave with the next take(): for Session._others_wait."""

    def link_up(self, welcome: Welcome) -> None:
        """Take up a new link, on which what is unconfirmed is to be sent again."""

    def link_down(self) -> None:
        """Take note that the link has ended."""

    def fail_all(self, error: MalamuteError) -> None:
        """Fail everything unconfirmed, and every later call: the session has ended."""

    def wake(self, now_ms: int) -> None:
        """Do what is due whether there is a link or not: deadlines."""

    def take(self, now_ms: int, out: CommandSink) -> bool:
        """Send what may leave now; False: the window holds something back."""

    def next_wake(self) -> int | None:
        """Latest time of the next wake() and take(); None: there is no need."""
