"""Resident memory of the process, and giving back what unread bytes took of it.

Owns how far memory has grown since nothing was unread, and the thread that returns it to the
system. glibc keeps what unread bytes took, whether their connections were cut or went by
themselves. The rule: memory is given back again and again but less and less often, until it is
what it was or the rest proves to be what honest clients fill. Source: ARCHITECTURE.md, "What a peer
may cost"; malloc_trim(3); proc(5), statm.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from collections.abc import Callable

_PAGE = resource.getpagesize()
_TRIM_EACH_MS = 250
_TRIM_LAST_MS = 8_000
"""Times after which memory is given back again, the first and the longest: the time doubles with
each try until the next cut, for what honest clients fill cannot be given back."""
_FRUITFUL_BYTES = 8 << 20
"""Memory that a try gives back at least to be fruitful: the next one then comes soon."""
_FRUITFUL_MS = 1_000
"""Time after which memory is given back again where the last try was fruitful: the loop drops
what ended connections left at 35 MiB a second, and each try finds more. Measured: with the doubled
times, 2.5 of 3 GiB were still there after 30 s, and 477 MiB stayed for good."""
_FREED_BYTES = 64 << 20
"""Sent bytes that lost peers may have left unread, from which on memory is given back."""
_TRIM_FAILED = "raise the limit of tasks, ulimit -u or TasksMax, or give the broker more memory"
_trim = getattr(ctypes.CDLL(None), "malloc_trim", int)
"""malloc_trim of glibc; other C libraries give memory back by themselves."""


class Memory:
    """Resident memory of this process; changed by the loop thread only."""

    def __init__(
        self, count: Callable[[str], None], report: Callable[[str, dict[str, object]], None]
    ) -> None:
        """count: adds 1 to the counter of a name. report: takes an event's name and facts."""
        self._count = count
        self._report = report
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self.rss = self.resident()
        """Resident memory when it was measured last."""
        self.before = self.rss
        """Resident memory when nothing was unread last."""
        self.has_filled = False
        """True: since memory was given back, unread bytes have filled it, or were left in the
        queues."""
        self._freed = 0
        """Sent bytes that lost peers may have left unread since memory was given back."""
        self._trimmed_ms = 0
        """Time at which giving memory back (a trim) was tried last."""
        self._trim_each_ms = _TRIM_EACH_MS
        self._rss_at_trim = 0
        """Resident memory at that time."""
        self._trimmed_empty = False
        """True: giving back was tried since the sockets are empty and nothing is unread."""
        self._trimming: threading.Thread | None = None

    def close(self) -> None:
        """Close the file that memory is read from."""
        os.close(self._statm)

    def resident(self) -> int:
        """Return bytes of resident memory that map no file: a ring that fills is no growth."""
        _, resident, mapped, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(mapped)) * _PAGE

    def measure(self) -> int:
        """Measure the resident memory and keep it as `rss`."""
        self.rss = self.resident()
        return self.rss

    def growth(self) -> int:
        """Return by how much memory has grown since nothing was unread. From any thread."""
        return self.resident() - self.before

    def grown(self) -> int:
        """Return by how much memory had grown since nothing was unread at the last measurement."""
        return self.rss - self.before

    def note_cut(self) -> None:
        """Note that a connection was cut: what it had unread is about to be freed."""
        self.has_filled = True
        self._trim_each_ms = _TRIM_EACH_MS

    def note_freed(self, size: int) -> None:
        """Note that a peer was lost, and how many bytes it was sent and may not have read.

        libzmq is about to free them, and glibc would keep them. Nothing that came in was unread
        meanwhile, so that they are a part of `before`.
        """
        self._freed += size
        if size and self._freed >= _FREED_BYTES:
            self.has_filled = True
            self.before = min(self.before, self.rss - self._freed)

    def give_back(self, grown: int, now_ms: int) -> bool:
        """Return what unread bytes took to the system, if memory has grown by more than `grown`.

        Called while something is unread: see settle(). glibc would keep it for the next ones. To
        return hundreds of MiB takes 20 to 40 ms, so a thread does it. The loop goes on meanwhile,
        but where it allocates memory it waits for the arena that malloc_trim() has locked: 6 to 33
        ms. False: it has to be called again, as bytes that the loop still held when a thread began
        are freed after it.
        """
        self._trimmed_empty = False
        return self._give_back(grown, now_ms, self._trim_each_ms)

    def _give_back(self, grown: int, now_ms: int, each_ms: int) -> bool:
        """Have a thread give memory back, unless that was tried less than each_ms ago.

        grown: growth of memory that is not worth a try. True: nothing is to be given back any more.
        """
        if not self.has_filled or self.grown() <= grown:
            return True
        if self._is_trimming or now_ms - self._trimmed_ms < each_ms:
            return False
        self._trimmed_ms = now_ms
        self._trim_each_ms *= 2
        # The last try gave much back, so that the next one comes soon.
        if self._rss_at_trim - self.rss >= _FRUITFUL_BYTES:
            self._trim_each_ms = min(self._trim_each_ms, _FRUITFUL_MS)
        self._rss_at_trim = self.rss
        trimming = threading.Thread(target=_trim, args=(0,), name="trim", daemon=True)
        try:
            trimming.start()
        except (RuntimeError, MemoryError) as error:
            # The system has no room for a thread, most likely for lack of this very memory.
            self._count("trims_failed_total")
            self._report("trim_failed", {"error": str(error), "do": _TRIM_FAILED})
            return False
        self._trimming = trimming
        return False

    def settle(self, grown: int, now_ms: int) -> None:
        """Give memory back while nothing is unread, and take the rest as what honest clients fill.

        Called in each check of the guard that found nothing unread. The memory is given back once
        at least, however often that was tried before: only now has the loop dropped all messages of
        cut connections. grown: growth that is not worth a thread.
        """
        each_ms = self._trim_each_ms if self._trimmed_empty else _TRIM_EACH_MS
        before_ms = self._trimmed_ms
        is_done = self._give_back(grown, now_ms, each_ms)
        if self._trimmed_ms != before_ms:  # it was tried just now
            self._trimmed_empty = True
        # Tried again and again, the last time with nothing unread: what is left is honestly filled.
        in_vain = self._trim_each_ms > _TRIM_LAST_MS and self._trimmed_empty
        if is_done or (in_vain and not self._is_trimming):
            # From here on growth is counted anew.
            if self.has_filled:
                self._freed = 0
            self.has_filled = False
            self._trim_each_ms = _TRIM_EACH_MS
            self.before = self.rss

    def given_back_since(self, ms: int) -> bool:
        """Whether memory was given back after a time, or none is to be given back."""
        return not self.has_filled or (self._trimmed_ms > ms and not self._is_trimming)

    @property
    def _is_trimming(self) -> bool:
        return self._trimming is not None and self._trimming.is_alive()
