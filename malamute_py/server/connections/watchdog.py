"""A thread that holds floods back while the loop stands still.

Owns what happens while a turn of the loop waits for a disk or a processor. libzmq's own thread goes
on receiving meanwhile, and all bounds of the guard rest on the loop's looks (measured: an append
that waited for 0.7 s let 350 MiB in). So this thread looks instead. Once memory has grown, the
kernel drops what comes by the connections that have much unread, by those that were accepted
meanwhile, and requests for new ones, until the turn has ended. The rule: nothing is cut. The peers'
kernels send again what was dropped, so a peer waits and loses nothing, and connections with little
unread are not touched. Over ipc there are no such filters. Source: ARCHITECTURE.md, "What a peer
may cost".
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading

from malamute_py.server.connections.descriptors import Borrowed, copied, local_port
from malamute_py.server.connections.guard import Guard
from malamute_py.server.connections.socket_filters import hold_back, let_go

_LOOK_S = 0.02
"""Time between two looks: a turn that two of them find has stood still for so long at least. A peer
on the same machine sends 150 MiB in 0.1 s, which is more than the guard leaves uncut."""
_HELD_FROM_BYTES = 1 << 20
"""Connections with less unread than this are not held back."""


class Watchdog:
    """Looks at the loop's turns from a thread of its own."""

    def __init__(self, guard: Guard, grown_bytes: int) -> None:
        """grown_bytes: growth of memory by unread bytes from which on floods are held back."""
        self.turn = 0
        """The number of the turn under way; 0: the loop waits for messages. The loop sets it."""
        self.holds = False
        """True: something is held back, or is about to be: the loop calls release() after its
        turn."""
        self._guard = guard
        self._grown_bytes = grown_bytes
        self._held: dict[int, int] = {}
        """Connections that are held back: inode -> descriptor."""
        self._lock = threading.Lock()
        self.error: Exception | None = None
        """The unforeseen error of a look; the loop reports it and takes it away."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that looks."""
        thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """End the thread; connections that are held back are let go by the next release()."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        """Run the thread: each _LOOK_S it looks whether the same turn is still under way."""
        seen = 0
        while not self._stopping.wait(_LOOK_S):
            turn, before = self.turn, seen
            seen = turn
            if turn and turn == before:  # 0: the loop is between two turns
                try:
                    self.look(turn)
                except Exception as error:  # noqa: BLE001 - contained: the next look is made
                    # holds: the loop calls release(), though nothing may be held, and reports this.
                    self.error, self.holds = error, True

    def look(self, turn: int) -> None:
        """Have the kernel drop what fills the memory, if this turn still lasts and memory grew.

        Called by the watchdog's thread for a turn that lasts longer than _LOOK_S. The loop lets go
        of all of it when the turn ends: release().
        """
        guard = self._guard
        if guard.memory.growth() <= self._grown_bytes:
            return
        with self._lock:
            # `holds` is set before the turn is compared, and the loop ends a turn before it looks
            # at `holds`: so either the loop sees it and releases, or this look sees the new turn.
            held, self.holds = self.holds, True
            if self.turn != turn:
                self.holds = held
                return
            if not held:
                guard.listening.shut()
            known = set()
            for connection in guard.connections.all():
                known.add(connection.inode)
                if connection.is_tcp and connection.unread_now() > _HELD_FROM_BYTES:
                    self._hold(connection.fd, connection.inode)
            # Connections that were accepted during the turn: the guard does not know them yet.
            for fd, inode in _accepted_at(guard.listening.ports):
                if inode not in known:
                    self._hold(fd, inode)

    def _hold(self, fd: int, inode: int) -> None:
        """Have the kernel drop what comes on a connection, until release()."""
        if inode in self._held:
            return
        with contextlib.suppress(OSError), copied(fd, inode) as connection:
            hold_back(connection)
            self._held[inode] = fd

    def release(self) -> int:
        """Let go of what is held back; returns how many connections. The loop calls it."""
        with self._lock:
            count = len(self._held)
            for inode, fd in self._held.items():
                with (
                    contextlib.suppress(OSError),
                    copied(fd, inode, or_itself=True) as connection,
                ):
                    let_go(connection)
            self._held.clear()
            self._guard.listening.open()
            self.holds = False
        return count


def _accepted_at(ports: frozenset[int]) -> list[tuple[int, int]]:
    """Return descriptors and inodes of this process's TCP connections at these local ports."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            facts = os.fstat(fd)
            if stat.S_ISSOCK(facts.st_mode) and not _listens(fd) and local_port(fd) in ports:
                found.append((fd, facts.st_ino))
    return found


def _listens(fd: int) -> bool:
    with Borrowed(fd) as borrowed:
        return bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
