"""Attempts to reach a broker: when the next one is due, and why there is no link.

Owns the pauses between attempts, the choice of the endpoint, and how both are put in words. The
rule: a pause doubles with each attempt that fails, up to a bound, and its length is partly random.
A link is one connection from HELLO to its end. Source: SPEC.md, section 8.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

from malamute_py.client.settings import ClientSettings

_JITTER: Final = 0.5
"""Part of a pause that is random, so that clients of a restarted broker do not come all at once."""
_SHORT_LIVED: Final = 3
"""Most doublings of the first pause where links open and do not last."""
_PUT_OFF_MS: Final = 2_000
"""Time for which the reason of the last refusal is told after the repeated command was due."""
_STEADY_MS: Final = 2_000
"""A link that lived so long was good: the pause before the next attempt begins small again."""


class LinkState(enum.Enum):
    """State of the link."""

    WAITING = "waiting"
    """Between two attempts."""
    CONNECTING = "connecting"
    """HELLO is under way."""
    LINKED = "linked"
    CLOSED = "closed"
    """For good: by close(), or by what cannot be cured."""


class Attempts:
    """The attempts of one session, over all its links."""

    def __init__(
        self, settings: ClientSettings, random: Callable[[int], bytes], now_ms: int
    ) -> None:
        self.links = 0
        """Links opened so far: one more than the reconnects."""
        self.linked_ms = now_ms
        """When the newest link was opened."""
        self.retry_at_ms = now_ms
        """When the next attempt is due, while there is no link."""
        self._settings = settings
        self._random = random
        self._attempt = 0
        """Which endpoint is tried next."""
        self._failures = 0
        """Attempts that failed, and links that did not last, since one that did."""
        self._failed_since_link = 0
        """Attempts that failed since the link was lost; `_failures` counts short links, too."""
        self._down_since_ms = now_ms
        """While there is no link: since when."""
        self._down_reason = ""
        """While there is no link: why the last attempt failed, or the link was lost."""
        self._put_off_reason = ""
        """Reason for which the broker put off a command the last time."""
        self._put_off_until_ms = now_ms
        """Latest time at which a command that was put off is answered again, as a rule."""

    def next_endpoint(self) -> str:
        """Return the endpoint to try now: the settings' endpoints in turn."""
        endpoint = self._settings.endpoints[self._attempt % len(self._settings.endpoints)]
        self._attempt += 1
        return endpoint

    def failed(
        self, reason: str, now_ms: int, *, was_linked: bool, retry_ms: int, unanswered: int
    ) -> str | None:
        """Note that the link was lost, or an attempt failed; returns a line for the log, if due.

        retry_ms: the shortest pause that the broker asked for. unanswered: number of commands
        without an answer, for that line.
        """
        self._down_reason = reason
        if was_linked:
            self._attempt = 0  # the first endpoint again
            self._down_since_ms = now_ms
            self._failed_since_link = 0
            lasted = now_ms - self.linked_ms >= _STEADY_MS
            # A broker that restarts again and again answers each time: the pause stays short.
            self._failures = 0 if lasted else min(self._failures, _SHORT_LIVED)
        else:
            self._failed_since_link += 1
        # Doubled with each failure; a bound on the shift keeps the number small.
        pause_ms = min(
            self._settings.retry_max_ms, self._settings.retry_min_ms << min(20, self._failures)
        )
        self._failures += 1
        fraction = int.from_bytes(self._random(2), "little") / 65536  # random, in [0, 1)
        pause_ms = max(int(pause_ms * (1 - _JITTER * fraction)), retry_ms)
        self.retry_at_ms = now_ms + pause_ms
        if was_linked:
            return (
                f"the link to the broker was lost ({reason}); "
                f"commands without an answer: {unanswered}; trying again in {pause_ms} ms"
            )
        if self._failed_since_link == 1 and not self.links:
            return f"no link to a broker yet ({reason}); trying again"
        return None

    def succeeded(self, now_ms: int, unanswered: int) -> str | None:
        """Note that a link was opened; returns a line for the log, if it was missed before.

        unanswered: number of commands without an answer, which are sent again, for that line.
        """
        line = None
        if self.links:  # not the first one: it is back
            seconds = (now_ms - self._down_since_ms) / 1000
            line = (
                f"the link to the broker is back after {seconds:.1f} s and "
                f"{self._failed_since_link + 1} attempts; commands that go on: {unanswered}"
            )
        elif self._failed_since_link:
            line = f"linked to a broker after {self._failed_since_link + 1} attempts"
        self.linked_ms = now_ms
        self.links += 1
        return line

    def put_off(self, reason: str, now_ms: int, retry_ms: int) -> None:
        """Note that the broker put off a command (refused it for now), for standing() to tell."""
        self._put_off_reason = reason
        self._put_off_until_ms = now_ms + retry_ms + _PUT_OFF_MS

    def standing(self, state: LinkState, now_ms: int) -> str:
        """Say whether there is a link and the broker takes what is sent, else why not.

        The Timeout of a call ends with these words.
        """
        if state is LinkState.LINKED:
            up = "the link to the broker is up"
            if now_ms > self._put_off_until_ms or not self._put_off_reason:
                return up
            return (
                f"{up}, and the broker lately put off what it was asked for: {self._put_off_reason}"
            )
        if state is LinkState.CLOSED:
            return "the client is closed"
        since = "was lost" if self.links else "has been sought for"
        why = f" ({self._down_reason})" if self._down_reason else ""
        seconds = max(0, now_ms - self._down_since_ms) / 1000
        ago = f"{since} {seconds:.1f} s" + (" ago" if self.links else "")
        return f"there is no link to a broker: it {ago}{why}"
