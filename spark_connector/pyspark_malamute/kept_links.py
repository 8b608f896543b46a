"""Links of one process between its tasks: who uses each, and when an unused one is closed.

Owns which links there are, and the thread that closes idle ones. The rules: a link that is in use
is never closed as idle; one thread at a time makes the link of a key, and none waits for another
key; the thread of idle links runs only while a link is idle; the child of a fork begins
without links, since the sockets are its parent's; the end of the process closes them all.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from malamute_protocol.errors import MalamuteError, Timeout
from malamute_py.client.sync.client import SyncClient

Key: TypeAlias = tuple[Any, ...]

IDLE_S: Final = 30.0
"""Time after which an unused link is closed. Spark ends a worker that was idle for a minute
without running any more of its code: by then the broker has been told goodbye."""


class KeptLinks:
    """Links by key, for any thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """clock, sleep: in seconds; the tests have their own."""
        self._clock = clock
        self._sleep = sleep
        self.forget()

    def forget(self) -> None:
        """Begin without links, as in the child of a fork; none is closed."""
        self._lock = threading.Lock()
        self._links: dict[Key, SyncClient] = {}
        self._users: dict[Key, int] = {}
        """Uses of each key that have not ended; its link may still have to be made."""
        self._idle_since_s: dict[Key, float] = {}
        """Times at which the last use of each link ended."""
        self._turns: weakref.WeakValueDictionary[Key, threading.Lock] = (
            weakref.WeakValueDictionary()
        )
        """Locks of the keys whose links are being made, as long as a thread has or awaits them."""
        self._watched = False
        """Whether the thread runs that closes idle links."""

    def get(self, key: Key) -> SyncClient | None:
        """The link of a key; None: it has to be made."""
        return self._links.get(key)

    @contextlib.contextmanager
    def making(self, key: Key, wait_s: float) -> Iterator[None]:
        """Let no other thread make the link of a key while the body runs.

        wait_s: seconds to wait for another thread. Raises Timeout: that one is still making it.
        """
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        if not turn.acquire(timeout=min(max(0.0, wait_s), threading.TIMEOUT_MAX)):
            raise Timeout("another thread of this process is still connecting")
        try:
            yield
        finally:
            turn.release()

    def put(self, key: Key, link: SyncClient) -> None:
        """Keep a link."""
        self._links[key] = link

    def is_used(self, key: Key) -> bool:
        """Whether a use of the link of a key has not ended."""
        return key in self._users

    def drop(self, key: Key, link: SyncClient | None = None) -> None:
        """Close the link of a key, if there is one.

        link: one that is over: another that was made since for the key is others', and stays.
        """
        if link is None or self._links.get(key) is link:
            link = self._links.pop(key, None)
        _close(link)

    def close(self) -> None:
        """Close all links, at the end of the process."""
        while self._links:
            _close(self._links.popitem()[1])

    @contextlib.contextmanager
    def in_use(self, key: Key) -> Iterator[None]:
        """Keep the link of a key from being closed as idle while the body runs."""
        self.acquire(key)
        try:
            yield
        finally:
            self.release(key)

    def acquire(self, key: Key) -> None:
        """Begin a use, which release() ends; until then the link is not closed as idle."""
        with self._lock:
            self._users[key] = self._users.get(key, 0) + 1
            self._idle_since_s.pop(key, None)

    def release(self, key: Key) -> None:
        """Count a use of a link less; a link without any counts as idle from now on."""
        with self._lock:
            self._users[key] -= 1
            if self._users[key]:
                return
            del self._users[key]
            if key in self._links:
                self._idle_since_s[key] = self._clock()
                self._watch()

    def close_idle(self) -> float | None:
        """Close what was idle for IDLE_S; the thread calls it, and sleeps as long as it says.

        Returns the seconds until another link may have been idle for so long; None: none is idle.
        """
        with self._lock:
            now_s = self._clock()
            over = [key for key, since_s in self._idle_since_s.items() if now_s >= since_s + IDLE_S]
            idle = [self._links.pop(key, None) for key in over]
            for key in over:
                del self._idle_since_s[key]
            self._watched = bool(self._idle_since_s)  # False: the thread that calls this ends
            first_s = min(self._idle_since_s.values(), default=None)
        for link in idle:  # Without the lock: a goodbye may take its time.
            _close(link)
        return None if first_s is None else first_s + IDLE_S - now_s

    def _watch(self) -> None:
        """Start the thread that closes idle links, unless it runs; the caller has the lock."""
        if not self._watched:
            self._watched = True
            threading.Thread(target=self._run, name="malamute-idle", daemon=True).start()

    def _run(self) -> None:
        """Close links as they get idle, in a thread, until none is."""
        while (wait_s := self.close_idle()) is not None:
            self._sleep(wait_s)


def _close(link: SyncClient | None) -> None:
    """Close a link, if there is one, whatever its state."""
    if link is not None:
        with contextlib.suppress(MalamuteError):
            link.close()


KEPT: Final = KeptLinks()
"""Links of this process."""

os.register_at_fork(after_in_child=KEPT.forget)
atexit.register(KEPT.close)
