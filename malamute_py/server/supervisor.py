"""Notifications to the supervisor of services: the broker serves, lives, and stops.

Owns the notification protocol of systemd. The rule: without NOTIFY_SOCKET nothing is done, and a
notification that cannot be sent is dropped: a broker serves whether its supervisor listens or not.
The broker's loop itself sends that it lives, so that a broker whose loop stands still is restarted.
Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping


class Supervisor:
    """The supervisor that started this process, if there is one."""

    def __init__(
        self, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """environment: the process's own, where systemd says how it wants to be told.

        Empty: there is no supervisor. clock: seconds.
        """
        address = environment.get("NOTIFY_SOCKET", "")
        # `@` stands for the NUL with which an abstract socket's name begins.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._clock = clock
        self._every_s = 0.0
        self._next_s = 0.0
        # systemd restarts a broker from which it did not hear for WATCHDOG_USEC. The variable may
        # be inherited and meant for another process.
        watchdog_us = environment.get("WATCHDOG_USEC", "")
        own = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if address and own and watchdog_us.isdigit():
            self._every_s = int(watchdog_us) / 2e6  # seconds, and twice as often as has to be

    def tell(self, state: str) -> None:
        """Send systemd a state such as `READY=1`; without a supervisor nothing is done."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending,
        ):
            sending.sendto(state.encode(), socket.MSG_DONTWAIT, self._address)

    def alive(self) -> None:
        """Send that the loop turns, twice within the supervisor's time limit; after each turn."""
        if self._every_s and self._clock() >= self._next_s:
            self._next_s = self._clock() + self._every_s
            self.tell("WATCHDOG=1")
