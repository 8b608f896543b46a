"""Listening sockets of this process, and the addresses that they turn away.

Owns the descriptors of libzmq's listening sockets and what the kernel drops for them. The rule: the
connection requests of an address that is turned away are dropped, and no other address is touched
unless everybody is kept out; where the kernel refuses a filter, connections are cut once they were
accepted. Local sockets have no filters: while local peers are kept out, the file of the socket has
another name, so that no peer finds it; clients try again. Source: socket_filters.py;
ARCHITECTURE.md, "What a peer may cost".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from malamute_py.server.connections.descriptors import (
    LOCAL_USER,
    Borrowed,
    local_path,
    local_port,
)
from malamute_py.server.connections.socket_filters import ADDRESSES_MAX, shut, turn_away

ASIDE = ".shut"
"""Suffix of a local socket's file while local peers are kept out."""


class ListeningSockets:
    """The listening sockets of all listeners."""

    def __init__(
        self, count: Callable[[str], None], report: Callable[[str, dict[str, object]], None]
    ) -> None:
        """count: adds 1 to the counter of a name. report: takes an event's name and facts."""
        self._count = count
        self._report = report
        self._fds: list[int] = []
        """Descriptors of libzmq's sockets that listen over tcp."""
        self.ports: frozenset[int] = frozenset()
        """Their ports."""
        self._paths: list[str] = []
        """Files of the sockets that listen for local peers."""
        self._local_away = False
        """True: local peers are kept out, for what connections of a local user left in memory."""
        self._turned_away: set[str] = set()
        """Addresses whose connection requests the kernel drops."""
        self.is_full = False
        """True: all new peers are kept out, as few descriptors are left."""
        self._is_shut = False
        """True: all new peers are kept out, for what ended connections left in memory."""

    def add(self, fd: int) -> None:
        """Note a socket that libzmq listens with, of which a monitor told."""
        path = local_path(fd)
        if path:
            self._paths.append(path)
            return
        self._fds.append(fd)
        port = local_port(fd)
        if port is not None:
            self.ports |= {port}

    def close(self) -> None:
        """Give the files of local sockets their names back, which libzmq leaves when it ends."""
        self._hide(hidden=False)

    def keep_out(self, blamed: set[str], *, everybody: bool = False) -> None:
        """Keep out new peers of the blamed addresses, or all new peers; let all others in again.

        Called in each check of the guard; it changes something only where the blamed are others
        than before. Where a local user is among them, all local peers are kept out.
        """
        # Nothing to do, as a rule.
        if not (blamed or everybody or self._turned_away or self._is_shut or self._local_away):
            return
        # Of the blamed, only IP addresses have a dot or a colon; the others are local users.
        named = sorted(each for each in blamed if "." in each or ":" in each)
        away = set(named[:ADDRESSES_MAX])
        local = bool(self._paths) and any(each.startswith(LOCAL_USER) for each in blamed)
        if (away, everybody, local) == (self._turned_away, self._is_shut, self._local_away):
            return
        if everybody and not self._is_shut:
            self._count("newcomers_turned_away_total")
            self._report("newcomers_turned_away", {})
        self._is_shut = everybody
        for address in away - self._turned_away:
            self._count("addresses_turned_away_total")
            self._report("address_turned_away", {"peer": address})
        self._turned_away = away
        if local and not self._local_away:
            self._count("addresses_turned_away_total")
            self._report("address_turned_away", {"peer": "local users"})
        self._local_away = local
        self.open()

    def set_full(self, is_full: bool) -> None:
        """Keep out all new peers while few descriptors are left, and let them in again.

        libzmq ends the process where it finds no descriptor for a local connection, and the journal
        needs some.
        """
        if is_full != self.is_full:
            if is_full:
                self._report("descriptors_short", {})
            self.is_full = is_full
            self.open()  # which shuts them while is_full

    def open(self) -> None:
        """Tell the kernel who may connect from now on: all peers but those that are kept out."""
        if self._is_shut or self.is_full:
            self.shut()
            return
        self._hide(hidden=self._local_away)  # of local sockets the file is renamed
        for fd in list(self._fds):
            try:
                with Borrowed(fd) as listening:
                    turn_away(listening, self._turned_away)
            except OSError as error:
                # No filter: the guard cuts the blamed peers' connections once they were accepted.
                self._fds.remove(fd)
                self._report("filter_refused", {"error": str(error)})

    def shut(self) -> None:
        """Have the sockets take no connections until open(). From any thread."""
        for fd in list(self._fds):
            with contextlib.suppress(OSError), Borrowed(fd) as listening:
                shut(listening)
        self._hide(hidden=True)

    def _hide(self, *, hidden: bool) -> None:
        """Rename the files of local sockets, so that no peer finds them, or give them back.

        From any thread.
        """
        for path in self._paths:
            aside = path + ASIDE
            # Nothing is put over a file that has the name by now.
            with contextlib.suppress(OSError):
                if hidden:
                    os.rename(path, aside)
                elif not os.path.lexists(path):
                    os.rename(aside, path)
