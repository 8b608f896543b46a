"""The guard of connections below the protocol: it looks at them and cuts some.

Owns the looks at the accepted file descriptors of the listeners: when, at which of them, and what
follows from a verdict. A look asks how much came in on one connection, a check of the loop's has
several; a share is all that counts for one user, or for one address without a user. The rules: a
connection with unread bytes is looked at again soon, all of them when memory grows, and the others
in their turn. A descriptor belongs to libzmq, so it is only asked, and shut down by a copy that is
closed at once, and only while its inode is the accepted one. counts.py counts connections,
unread.py judges unread bytes, left_behind.py counts what ended connections left, memory.py gives
memory back. Source: ARCHITECTURE.md, "What a peer may cost"; zmq_socket_monitor(3).

While the loop stands still, nothing of this is judged: watchdog.py holds floods back then.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Callable
from typing import Final

import zmq

from malamute_py.config import Config
from malamute_py.server.connections.connection import Connection
from malamute_py.server.connections.counts import Connections
from malamute_py.server.connections.descriptors import Room, copied, lowest_free, room, whence
from malamute_py.server.connections.left_behind import LeftBehind
from malamute_py.server.connections.listening import ListeningSockets
from malamute_py.server.connections.local import LocalConnections
from malamute_py.server.connections.memory import Memory
from malamute_py.server.connections.unread import UnreadBytes

_ALARM_BYTES = 8 << 20
"""Growth of resident memory since the last look at all connections that brings the next one."""
_ALL_AT_ONCE_BYTES = 32 << 20
"""Growth that brings a look at all connections however lately the last one was. Measured: a peer
that connected just after an alarm sent 270 MiB in 200 ms."""
_ALL_EACH_MS = 200
_SOME_EACH_MS = 500
_SOME = 256
"""Connections looked at in their turn without an alarm: each takes up to 5 us."""
_SOME_OF_ALL = 1_024
"""Connections looked at in one turn of the loop after an alarm: 3,000 held it for 16 ms."""
SUSPECT_MS = 5
"""Time after which to look again at connections with a partial message, or at whether memory has
grown."""
_CALM_MS = 20
"""Time after which to look again while memory does not grow. Measured: a producer of batches of 300
KiB always has a message under way, and looks at its connection every 5 ms took a tenth of the
loop's time."""
_CALM_BYTES = 2 << 20
"""Growth of memory since the last look that ends the calm."""
_KEPT_BYTES = 32 << 20
"""Growth of memory that is not given back once nothing is unread."""
EVENTS_A_TURN: Final = 256
"""Connections that came, went or failed, of which a turn of the loop takes note: each takes up to
14 us, and 3,000 that a peer closes at once took 43 ms."""
_EVENT = struct.Struct("=Hi")
_RESET = struct.pack("=ii", 1, 0)
_MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)


def has_events(monitor: zmq.Socket[bytes]) -> bool:
    """Whether a monitor has more to tell now."""
    return bool(int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class Guard:
    """Watches the connections of all listeners; used by the loop thread only."""

    def __init__(
        self,
        config: Config,
        bounds: Room | None = None,
        *,
        count: Callable[[str], None],
        report: Callable[[str, dict[str, object]], None],
    ) -> None:
        """bounds: numbers of connections that leave the broker descriptors for its own files.

        None: they are reckoned with the descriptors that are open now. count: adds 1 to the counter
        of a name. report: takes an event's name and facts.
        """
        links, limits = config.links, config.limits
        if bounds is None:
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # the limit of open files
            bounds = room(files, lowest_free(), local=False)
        self._count = count
        self._report = report
        self._share_bytes_max = limits.unread_share_bytes_max
        self.connections = Connections(links, min(links.connections_max, bounds.surplus_from))
        self.listening = ListeningSockets(count, report)
        self.memory = Memory(count, report)
        self.left_behind = LeftBehind(
            self.memory, limits.unread_share_bytes_max, limits.unread_bytes_max
        )
        self.local = LocalConnections(self.memory, limits.unread_share_bytes_max)
        self.unread = UnreadBytes(limits, links.hello_ms, self.memory, self.left_behind, self.local)
        self._turn: list[int] = []
        """Descriptors of the connections that are still to be looked at in their turn."""
        self._alarmed = False
        """Memory has grown: all connections are being looked at, some in each check."""
        self._suspects: list[int] = []
        """Descriptors at which the last look saw unread bytes."""
        self._all_at_ms = 0
        """Time before which a small growth of memory brings no look at all connections."""
        self._some_at_ms = 0
        """Time of the next look at some connections in their turn."""
        self._rss_at_all = self._rss_at_check = self.memory.rss
        self._shut_from = bounds.shut_from
        self._now_ms = 0
        """Time of the last check."""
        self._failed: dict[zmq.Socket[bytes], int] = {}
        """Monitor -> the failed handshake that it told of, as libzmq's event, until it tells of the
        connection's end. With the failure libzmq tells no descriptor; the end has it, and is the
        next event of the same monitor. Events of other monitors may be taken in between."""

    def close(self) -> None:
        """Forget all connections as the broker ends, and give renamed local sockets their names."""
        self.connections.clear()
        self.listening.close()
        self.memory.close()

    @property
    def suspects(self) -> bool:
        """Whether some connection is to be looked at again soon."""
        return self._alarmed or bool(self._suspects)

    def facts(self) -> dict[str, int]:
        """Return gauges: connections, silent ones, and the memory of unread bytes."""
        return {
            "connections": len(self.connections),
            "silent_connections": self.connections.silent_count,
            "unread_bytes": sum(each.memory for each in self._suspected()),
        }

    def _suspected(self) -> list[Connection]:
        """Return the connections that are to be looked at again soon."""
        suspects = [self.connections.get(fd) for fd in self._suspects]
        return [each for each in suspects if each is not None]

    # --- who comes and goes --------------------------------------------------------

    def drain(
        self, monitor: zmq.Socket[bytes], now_ms: int, most: int, *, authenticated: bool
    ) -> list[Connection]:
        """Take note of connections that came, went or failed; returns those that ended.

        monitor: the socket by which libzmq tells events of a listener. most: events that are taken.
        authenticated: the listener asks for credentials. Where few descriptors are left, no more
        peers are let in from here on, for connections that come are what takes them; check() lets
        peers in again.
        """
        if self._is_short():
            self.listening.set_full(True)
        ended: list[Connection] = []
        for _ in range(most):
            if not has_events(monitor):
                break
            head, _ = monitor.recv_multipart()
            # value: the descriptor, or with a failure its error.
            event, value = _EVENT.unpack_from(head)
            if event == zmq.EVENT_ACCEPTED:
                old = self.connections.get(value)
                if old is not None:
                    # The descriptor is given again, so that the connection that had it has ended.
                    self._forget(old)
                    ended.append(old)
                self._accepted(value, now_ms, monitor)
            elif event == zmq.EVENT_DISCONNECTED:
                self._count("disconnected_total")
                gone = self.connections.get(value)
                # By now another listener may have a connection under the number, and its monitor
                # may have been asked first.
                if gone is not None and gone.monitor is not monitor:
                    gone = None
                if gone is not None:
                    self._forget(gone)
                    ended.append(gone)
                failure = self._failed.pop(monitor, None)
                if failure is not None:
                    self._turned_away(failure, "unknown" if gone is None else gone.address)
            elif event == zmq.EVENT_LISTENING:
                self.listening.add(value)
            elif event == zmq.EVENT_ACCEPT_FAILED:
                self._count("accept_failed_total")
                self._report(
                    "accept_failed",
                    {"error": os.strerror(value), "do": "raise the limit of open files, ulimit -n"},
                )
            else:
                self._count("handshake_failed_total")
                mismatch = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MISMATCH
                # Without authentication an end amid the handshake turns no peer away.
                if mismatch or (authenticated and event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                    self._failed[monitor] = event
        return ended

    def _turned_away(self, failure: int, address: str) -> None:
        """Count and report a connection that ended before the authentication was asked about it.

        failure: libzmq's event for the failed handshake. address: "unknown" where the connection
        ended before it could be asked for its address.
        """
        if failure == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            # drain() notes such an event only where the peer has another mechanism than ours.
            why = "mechanism"
            self._count("denied_total")
            self._count(f"denied_{why}_total")
            self._report("denied", {"address": address, "why": why})
        else:
            # A probe, a scan or a client that was ended, or a peer with another mechanism whose
            # libzmq was the first to see that: the broker cannot tell which.
            self._count("handshake_abandoned_total")
            self._report("handshake_abandoned", {"address": address})

    def _is_short(self) -> bool:
        """Whether so few descriptors are left that the kernel is told to drop new connections.

        The kernel gives the lowest free one, which so tells how many are used: a connection that
        was cut has its own until libzmq closes it.
        """
        return lowest_free() >= self._shut_from

    def _accepted(self, fd: int, now_ms: int, monitor: zmq.Socket[bytes] | None = None) -> None:
        """Take note of a connection that libzmq accepted, and end one if there are too many now.

        That may be this one, or a silent one. One of an address that is to blame for memory that
        ended connections filled is ended, too.
        """
        self._count("accepted_total")
        self.connections.accepted += 1
        try:
            inode, is_tcp, address = whence(fd)
        except OSError:
            return  # The connection was closed before its event was taken.
        connection = Connection(fd, inode, is_tcp, address, now_ms, self.memory.rss)
        connection.monitor = monitor
        self.connections.add(connection)
        surplus, reason = self.connections.surplus(connection)
        if not reason and address in self.left_behind.to_blame():
            surplus = connection
            reason = "messages of ended connections of its address fill the memory"
        if surplus is not None:
            self._count("connections_refused_total")
            self._end(surplus, reason)

    def _forget(self, connection: Connection) -> None:
        """Take a connection that ended out of the counts; what it left unread is remembered."""
        self.connections.remove(connection)
        if not connection.is_tcp:
            self.local.ended(connection)
        self.left_behind.add(connection)

    # --- the check -----------------------------------------------------------------

    def is_calm(self, now_ms: int) -> bool:
        """Whether the next check may wait: the last one is recent, and memory has not grown since.

        What a suspect sends meanwhile would show in memory, as far as libzmq has read it.
        """
        memory = self.memory
        # What has begun goes on in each check: looks at all, giving memory back, what others left.
        if self._alarmed or memory.has_filled or not self.left_behind.is_empty:
            return False
        if not 0 <= now_ms - self._now_ms < _CALM_MS:
            return False
        return memory.resident() - self._rss_at_check < _CALM_BYTES

    def check(self, now_ms: int, *, drained: bool, local_drained: bool = True) -> list[Connection]:
        """Look at the connections that are due and cut offenders; returns those that ended.

        The loop calls it each `loop.guard_ms`, and sooner while something is suspect. An error that
        no code foresaw costs the connection that was looked at: it ends, with the error. drained:
        the sockets have been read until they had nothing more. local_drained: those of local peers
        have.
        """
        self._now_ms = now_ms
        self._rss_at_check = self.memory.measure()
        self.left_behind.begin(now_ms, drained)
        self.local.begin(waits=not local_drained)
        # First each connection by itself, then all that have unread bytes together.
        ended = self._look(self._due(now_ms), now_ms, drained)
        if drained:
            self.left_behind.clear()  # the loop has taken up what ended connections left
        for connection, verdict in self.unread.too_much(self._suspected()):
            ended.append(connection)
            self._end(connection, verdict)
        self.unread.sum_up(self._suspected())
        # Of local connections the kernel counts no bytes: while messages of theirs wait, the growth
        # of memory tells who sends too much.
        if not local_drained:
            flood = self.local.flood(self.connections.local(), self.unread.total)
            if flood is not None:
                connection, verdict = flood
                ended.append(connection)
                self._end(connection, verdict)
        if self.listening.is_full and not self._is_short():
            self.listening.set_full(False)
        # A cut peer could connect again at once: the kernel drops requests of addresses to blame.
        self.listening.keep_out(self.left_behind.to_blame(), everybody=self.left_behind.fills_all())
        # The C library keeps freed memory. It is given back where it grew by more than this: less
        # is not worth the thread that does it.
        if self._suspects or not drained:
            self.memory.give_back(self._share_bytes_max // 4, now_ms)
        else:
            # With nothing unread, the rest is taken as what honest clients fill.
            self.memory.settle(_KEPT_BYTES, now_ms)
        return ended

    def _due(self, now_ms: int) -> list[int]:
        """Return the descriptors of the connections to be looked at in this check.

        Those are the suspects of the last check, and some others in their turn: more of them, until
        all had their look, after memory has grown (an alarm).
        """
        fds, rss = self._suspects, self.memory.rss
        # Growth is counted from the least since the last alarm.
        self._rss_at_all = min(self._rss_at_all, rss)
        grown = rss - self._rss_at_all
        # During an alarm no other begins, so that the last connections have their look, too.
        if not self._alarmed and (
            grown > _ALL_AT_ONCE_BYTES or (grown > _ALARM_BYTES and now_ms >= self._all_at_ms)
        ):
            self._rss_at_all = rss
            self._all_at_ms = now_ms + _ALL_EACH_MS
            self._turn = self.connections.descriptors()
            self._alarmed = True
        if self._alarmed or now_ms >= self._some_at_ms:
            if not self._turn:
                self._turn = self.connections.descriptors()
            some = _SOME_OF_ALL if self._alarmed else _SOME
            fds = list(dict.fromkeys([*fds, *self._turn[:some]]))  # each once
            del self._turn[:some]
            self._alarmed = self._alarmed and bool(self._turn)
            self._some_at_ms = now_ms + _SOME_EACH_MS
        return fds

    def _look(self, fds: list[int], now_ms: int, drained: bool) -> list[Connection]:
        """Look at each of these connections by itself; returns those that ended.

        Connections with unread bytes become the suspects of the next check.
        """
        self._suspects = []
        ended: list[Connection] = []
        for fd in fds:
            connection = self.connections.get(fd)
            if connection is None:
                continue
            try:
                verdict = self.unread.judge(connection, now_ms, drained)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                connection.error = error
                verdict = "the broker met an error of its own when it looked at it"
            if verdict is None:
                if connection.looks or connection.asked_ms:
                    self._suspects.append(fd)
                continue
            ended.append(connection)
            if verdict:
                self._end(connection, verdict)
            else:  # it is gone already
                self._forget(connection)
        return ended

    # --- the end of a connection -----------------------------------------------------

    def cut(self, connection: Connection, reason: str) -> None:
        """End a connection for a reason of another part of the shell; sent bytes still leave."""
        if self.connections.get(connection.fd) is connection:  # else it has ended already
            self._forget(connection)
            self._shut_down(connection, reason, abort=False)

    def cut_silent(self, reason: str) -> None:
        """End every connection that has sent no message yet."""
        for connection in self.connections.silent():
            self._end(connection, reason)

    def _end(self, connection: Connection, reason: str) -> None:
        """End a connection at once, by a reset, for the guard's own reason."""
        connection.is_cut = True
        self._forget(connection)
        self._shut_down(connection, reason, abort=True)

    def _shut_down(self, connection: Connection, reason: str, *, abort: bool) -> None:
        """Cut a connection by a copy of its descriptor, and report it.

        abort: whether the peer's kernel is told at once, by a reset, and not after what was sent.
        """
        try:
            # or_itself: an offender must not stay because no descriptor is left for a copy.
            with copied(connection.fd, connection.inode, or_itself=True) as own:
                if abort:
                    # Have libzmq's close() reset the connection: a sender whose window is shut
                    # would learn of a mere end a minute later.
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                own.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The peer closed it first.
            return
        self.memory.note_cut()
        self._count("cut_total")
        self._report(
            "connection_cut",
            {
                "peer": connection.share,
                "reason": reason,
                "links": sorted(connection.links),
            },
        )
