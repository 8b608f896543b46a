"""Connections below the protocol: who is connected, and who sends without end.

Owns the accepted file descriptors of the listeners. libzmq bounds one frame and counts
whole messages, so a peer that sends MORE frames for ever grows the broker without a
message ever arriving (measured: 591 MiB in 1.6 s). The kernel counts what came in on each
connection; what came in since the last whole message, while the loop had nothing left to
read, is a partial message, and beyond a bound the connection is shut down. The rule: a
descriptor belongs to libzmq, so it is only asked, and shut down by a copy that is gone at
once, and only while its inode is the accepted one. Source: notes/broker-hardening.md; tcp(7);
zmq_socket_monitor(3).

What holds: over tcp the bytes are exact. Tiny frames cost 20 to 30 times their bytes, so
growth of the resident memory while a partial message arrives counts as well. Over ipc the
kernel counts no bytes: there only that growth, while unread bytes lie in the socket, tells;
a local peer that paces itself is bounded by MAXMSGSIZE a frame alone. inproc is ourselves.
"""

from __future__ import annotations

import array
import fcntl
import os
import resource
import socket
import stat
import struct
import termios
from collections.abc import Callable

import zmq

_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_AT = 128
"""tcpi_bytes_received in struct tcp_info, Linux 4.1 and later."""
_PAGE = resource.getpagesize()
_ALARM_BYTES = 8 << 20
"""Growth of resident memory since all connections were looked at that has it done again."""
_ALL_AT_ONCE_BYTES = 32 << 20
"""Growth that has it done however lately it was. *A peer that connected just after an alarm sent
270 MiB in 200 ms; such looks cost no more than 20 ms for each 32 MiB that memory grows."""
_ALL_EACH_MS = 200
_SOME_EACH_MS = 500
_SOME = 256
"""Connections looked at in their turn: 10,000 take 20 ms, too long without an alarm."""
_AMPLIFICATION = 6
"""Resident growth beyond this many times the partial message is no honest message."""

_SMALL_BYTES = 64 << 10
"""A partial message up to this is nobody's concern: heartbeats come uncounted, for one."""
_QUIET_LOOKS = 8
"""So often nothing partial has to be seen before memory is measured anew: over ipc the
bytes that libzmq has not read yet are all that shows, and often there are none."""
FRAME_BYTES = 64
"""The most that a frame takes on the wire beyond its body: length, flags, CURVE's box."""
SUSPECT_MS = 5
"""How soon to look again at connections with a partial message."""

_EVENT = struct.Struct("=Hi")
_RESET = struct.pack("=ii", 1, 0)


class Connection:
    """One accepted connection, by its descriptor."""

    __slots__ = (
        "accepted_ms", "base", "delivered", "fd", "inode", "is_tcp", "links", "looks", "quiet",
        "rss", "seen",
    )  # fmt: skip

    def __init__(self, fd: int, inode: int, is_tcp: bool, now_ms: int, rss: int) -> None:
        """rss: resident memory at the time."""
        self.fd = fd
        self.inode = inode
        self.is_tcp = is_tcp
        self.accepted_ms = now_ms
        self.delivered = 0
        """Bytes of whole messages read from it, by the most they can have been on the wire;
        the loop counts."""
        self.seen = 0
        """`delivered` at the last look."""
        self.base = 0
        """Bytes received that whole messages explain."""
        self.looks = 0
        """Looks that saw a partial message since the last whole one."""
        self.quiet = 0
        """Looks in a row that saw none."""
        self.rss = rss
        """Resident memory when the partial message began."""
        self.links: set[int] = set()


class Guard:
    """Watches the connections of all listeners; used by the loop thread only."""

    def __init__(
        self,
        *,
        partial_bytes_max: int,
        amplified_bytes_max: int,
        hello_ms: int,
        count: Callable[[str], None],
        report: Callable[[str, dict[str, object]], None],
    ) -> None:
        """count: a name, for the counters. report: an event's name and facts."""
        self._partial_bytes_max = partial_bytes_max
        self._amplified_bytes_max = amplified_bytes_max
        self._hello_ms = hello_ms
        self._count = count
        self._report = report
        self._connections: dict[int, Connection] = {}
        self._turn: list[int] = []
        self._suspects: list[int] = []
        """Descriptors at which the last look saw a partial message."""
        self._all_at_ms = 0
        self._some_at_ms = 0
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self.rss = self._resident()
        self._rss_at_all = self.rss

    def close(self) -> None:
        """Forget everything."""
        self._connections.clear()
        os.close(self._statm)

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def suspects(self) -> bool:
        """Whether some connection is to be looked at again soon."""
        return bool(self._suspects)

    def get(self, fd: int) -> Connection | None:
        """The connection that libzmq has under this descriptor."""
        return self._connections.get(fd)

    # --- monitor events ------------------------------------------------------------

    def drain(self, monitor: zmq.Socket[bytes], now_ms: int) -> list[Connection]:
        """Take the monitor's events; returns the connections that ended."""
        ended: list[Connection] = []
        while int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            head, _ = monitor.recv_multipart()
            event, value = _EVENT.unpack_from(head)
            if event == zmq.EVENT_ACCEPTED:
                old = self._connections.pop(value, None)
                if old is not None:
                    ended.append(old)
                self._accepted(value, now_ms)
            elif event == zmq.EVENT_DISCONNECTED:
                gone = self._connections.pop(value, None)
                if gone is not None:
                    ended.append(gone)
                self._count("disconnected_total")
            elif event == zmq.EVENT_ACCEPT_FAILED:
                self._count("accept_failed_total")
                self._report(
                    "accept_failed",
                    {"error": os.strerror(value), "do": "raise the limit of open files, ulimit -n"},
                )
            else:
                # The descriptor may serve another connection by now; whether this one is
                # gone shows at the next check, by the inode.
                self._count("handshake_failed_total")
        return ended

    def _accepted(self, fd: int, now_ms: int) -> None:
        self._count("accepted_total")
        try:
            facts = os.fstat(fd)
            if not stat.S_ISSOCK(facts.st_mode):
                return
            with _Borrowed(fd) as borrowed:
                is_tcp = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) != socket.AF_UNIX
        except OSError:
            return  # closed before we came to it
        self._connections[fd] = Connection(fd, facts.st_ino, is_tcp, now_ms, self.rss)

    # --- the check -----------------------------------------------------------------

    def check(self, now_ms: int) -> list[Connection]:
        """Look at the connections and shut down offenders; returns those that ended.

        To be called when the sockets have been read until they had nothing more.
        """
        self.rss = self._resident()
        self._rss_at_all = min(self._rss_at_all, self.rss)
        fds = self._suspects
        grown = self.rss - self._rss_at_all
        if grown > _ALL_AT_ONCE_BYTES or (grown > _ALARM_BYTES and now_ms >= self._all_at_ms):
            fds = list(self._connections)
            self._rss_at_all = self.rss
            self._all_at_ms = now_ms + _ALL_EACH_MS
        elif now_ms >= self._some_at_ms:
            if not self._turn:
                self._turn = list(self._connections)
            fds = [*fds, *self._turn[:_SOME]]
            del self._turn[:_SOME]
            self._some_at_ms = now_ms + _SOME_EACH_MS
        self._suspects = []
        connections = self._connections
        ended: list[Connection] = []
        for fd in fds:
            connection = connections.get(fd)
            if connection is None:
                continue
            verdict = self._look(connection, now_ms)
            if verdict is None:
                if connection.looks and fd not in self._suspects:
                    self._suspects.append(fd)
                continue
            del connections[fd]
            ended.append(connection)
            if verdict:
                self._shut_down(connection, verdict, abort=True)
        return ended

    def _look(self, connection: Connection, now_ms: int) -> str | None:
        """None: fine. "": it is gone. Otherwise why it has to end."""
        fd = connection.fd
        try:
            if os.fstat(fd).st_ino != connection.inode:
                return ""
            if connection.is_tcp:
                with _Borrowed(fd) as borrowed:
                    info = borrowed.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 192)
                received = _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0]
            else:
                unread = array.array("i", [0])
                fcntl.ioctl(fd, termios.FIONREAD, unread)
                received = connection.base + unread[0]
        except OSError:
            return ""
        except struct.error:
            received = 0  # a kernel before 4.1 does not count
        if connection.delivered != connection.seen:
            # What the delivered messages cannot explain is the beginning of the next one.
            explained = connection.base + connection.delivered - connection.seen
            connection.base = min(received, explained) if connection.is_tcp else 0
            connection.seen = connection.delivered
            connection.looks = 0
            connection.rss = self.rss
        elif connection.seen == 0 and now_ms - connection.accepted_ms > self._hello_ms:
            return "nothing was said after connecting"
        partial = received - connection.base
        if partial <= (_SMALL_BYTES if connection.is_tcp else 0):
            connection.quiet += 1
            if connection.quiet >= _QUIET_LOOKS:
                connection.looks = 0
                connection.rss = self.rss
            return None
        connection.quiet = 0
        connection.looks += 1
        if connection.looks < 2:
            return None  # judged at the next look, when the loop has read once more
        if connection.is_tcp and partial > self._partial_bytes_max:
            return f"{partial} bytes of a message without end"
        growth = self.rss - connection.rss
        factor = _AMPLIFICATION * partial if connection.is_tcp else 0
        if growth > self._amplified_bytes_max + factor:
            return f"memory grew by {growth} bytes during a message of {partial} bytes so far"
        return None

    def cut(self, connection: Connection, reason: str) -> None:
        """End a connection for a reason that is not the guard's own."""
        if self._connections.get(connection.fd) is connection:
            del self._connections[connection.fd]
            self._shut_down(connection, reason, abort=False)

    def _shut_down(self, connection: Connection, reason: str, *, abort: bool) -> None:
        peer = ""
        try:
            # A copy, so that nobody else's connection is shut down when libzmq closes this one
            # now and accepts the next under the same number (seen: 14 in 400).
            copy = os.dup(connection.fd)
        except OSError:
            return  # it went by itself
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=copy) as own:
            if os.fstat(copy).st_ino != connection.inode:
                return
            try:
                if connection.is_tcp:
                    peer = "{}:{}".format(*own.getpeername()[:2])
                if abort:
                    # Have libzmq's close() reset the connection: a sender whose window is shut
                    # would learn of a mere end a minute later.
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                own.shutdown(socket.SHUT_RDWR)
            except OSError:
                return
        self._count("cut_total")
        self._report(
            "connection_cut",
            {"peer": peer or "ipc", "reason": reason, "links": sorted(connection.links)},
        )

    def _resident(self) -> int:
        return int(os.pread(self._statm, 128, 0).split()[1]) * _PAGE


class _Borrowed:
    """A socket object over somebody else's descriptor: it is given back, not closed."""

    __slots__ = ("_socket",)

    def __init__(self, fd: int) -> None:
        # With the family named, Python asks the kernel nothing; no address is taken apart.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.detach()
