"""Connections below the protocol: who is connected, how many, and how much each has unread.

Owns the accepted file descriptors of the listeners. libzmq bounds one frame and nothing else: a
peer that sends MORE frames for ever grows the broker without a message ever arriving (measured:
591 MiB in 1.6 s), and so does one that sends whole messages faster than the loop takes them, for
no queue of libzmq is bounded here (sockets.py tells why). The kernel counts what came in on each
connection; what is more than the whole messages that the loop has taken is unread: messages that
wait, and the beginning of one. The rules: a connection has a bound, all together have one, and
each address or user has one; beyond it the largest connection of the one that has most is cut. A
descriptor belongs to libzmq, so it is only asked, and shut down by a copy that is gone at once,
and only while its inode is the accepted one. Source: ARCHITECTURE.md, "What a peer may cost";
tcp(7); zmq_socket_monitor(3).

While the loop stands still, nothing of this is judged: watchdog.py holds floods back then.

What holds: over tcp the bytes are exact. Small frames cost 4 to 80 times their bytes and tiny ones
10 to 50 times, so those count for more where a connection is seen to send them, though never for
more than memory has grown; growth of the resident memory while a partial message arrives counts as
well.
What a connection that has gone left in libzmq's queues counts until the loop has dropped it. Over
ipc the kernel counts no bytes: there only that growth, while unread bytes lie in the socket, tells;
a local peer that paces itself is bounded by MAXMSGSIZE a frame alone. inproc is ourselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import os
import resource
import socket
import stat
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Self

import msgspec
import zmq

from malamute_py.config import Config
from malamute_py.server.connections.descriptors import (
    Borrowed,
    copied,
    local_port,
    received,
    waiting,
    whence,
)
from malamute_py.server.connections.doors import ADDRESSES_MAX, shut, turn_away

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
"""Unread bytes up to this are of no concern: ZMTP's handshake and heartbeats, for one."""
_QUIET_LOOKS = 8
"""Looks in a row that must see nothing partial before memory is measured anew: over ipc only the
bytes that libzmq has not read yet show, and often there are none."""
_SAMPLE_FRAMES = 256
"""So many frames of a connection are taken up before it is judged by their average size."""
_TINY_BYTES = 36
"""A connection's frames are tiny up to this: libzmq copies them into the message itself. What waits
of them is bounded by its memory."""
_SMALL_FRAME_BYTES = 8 << 10
"""libzmq cuts smaller frames from buffers of this size. Each frame keeps its whole buffer, however
little was read into it at once. *Commands of 94 bytes, sent one by one, took 76 times their bytes;
batches of two records 4 to 6 times."""
_FRAME_MEMORY_BYTES = 96
"""What libzmq needs for a frame that waits, besides its bytes."""
SUSPECT_MS = 5
"""How soon to look again at connections with a partial message, or at whether memory has grown."""
_CALM_MS = 20
"""How soon to look again while memory does not grow. *Who publishes 300 KiB a batch always has a
message under way: to look at such connections every 5 ms took a tenth of the loop's time."""
_CALM_BYTES = 2 << 20
"""Growth of memory since the last look that ends the calm."""

_LEFT_MS = 1_000
"""An ended connection of which the loop takes up nothing for so long has left nothing: each one's
messages have their turn within that time, and libzmq drops the beginning of a message by itself."""
_LEFT_MAX = 512
"""Ended connections whose memory is counted, the largest: each check looks at all of them."""
_ENDED_LEAST = 2
"""Connections of an address that must have ended before it is blamed for what memory holds: honest
clients lose one too. *With 8, tiny messages of one address took 398 MiB; with 3, partial messages
took 381."""

_KEPT_BYTES = 32 << 20
_TRIM_EACH_MS = 250
_TRIM_LAST_MS = 8_000
"""How soon memory is given back again, at first and at last: the time doubles with each try until
the next cut, for what honest clients fill cannot be given back."""
_TRIM_FAILED = "raise the limit of tasks, ulimit -u or TasksMax, or give the broker more memory"
_trim = getattr(ctypes.CDLL(None), "malloc_trim", int)
"""glibc's; other C libraries give memory back by themselves."""
_EVENT = struct.Struct("=Hi")
_RESET = struct.pack("=ii", 1, 0)


class Bounds(msgspec.Struct, frozen=True):
    """What connections may have; the configuration's names."""

    partial_bytes_max: int
    amplified_bytes_max: int
    unread_bytes_max: int
    unread_share_bytes_max: int
    greeting_bytes_max: int
    hello_ms: int
    connections_max: int
    address_connections_max: int
    user_connections_max: int
    greetings_max: int
    address_greetings_max: int
    greeting_ms: int

    @classmethod
    def of(cls, config: Config, files_max: int | None = None) -> Self:
        """files_max: descriptors that connections may take; None: as many as they like."""
        links, limits = config.links, config.limits
        most = links.connections_max
        return cls(
            partial_bytes_max=limits.partial_message_bytes_max,
            amplified_bytes_max=limits.amplified_bytes_max,
            unread_bytes_max=limits.unread_bytes_max,
            unread_share_bytes_max=limits.unread_share_bytes_max,
            greeting_bytes_max=limits.command_frame_bytes_max + _SMALL_BYTES,
            hello_ms=links.hello_ms,
            connections_max=most if files_max is None else min(most, files_max),
            address_connections_max=links.address_connections_max,
            user_connections_max=links.user_connections_max,
            greetings_max=links.greetings_max,
            address_greetings_max=links.address_greetings_max,
            greeting_ms=links.greeting_ms,
        )


class Connection:
    """One accepted connection, by its descriptor."""

    __slots__ = (
        "accepted_ms", "address", "base", "delivered", "error", "fd", "frame_bytes", "frames",
        "inode", "is_tcp", "links", "looks", "memory", "quiet", "rise", "rss", "sampled",
        "sampled_frames", "seen", "spoke", "taken_ms", "unread", "user",
    )  # fmt: skip

    def __init__(
        self, fd: int, inode: int, is_tcp: bool, address: str, now_ms: int, rss: int
    ) -> None:
        """address: whom it comes from, as far as the kernel tells. rss: resident memory."""
        self.fd = fd
        self.inode = inode
        self.is_tcp = is_tcp
        self.address = address
        self.spoke = False
        """A message of it has been taken up: what comes by a new routing id is another's."""
        self.user = ""
        """The identity of its credential, once it has sent a message."""
        self.accepted_ms = now_ms
        self.delivered = 0
        """Bytes on the wire of the whole messages read from it; the loop counts."""
        self.frames = 0
        """Frames of these messages; the loop counts."""
        self.seen = 0
        """`delivered` at the last look."""
        self.sampled = self.sampled_frames = 0
        """`delivered` and `frames` when the size of its frames was measured last."""
        self.frame_bytes = 0.0
        """Average bytes of its frames on the wire; 0: too few were taken up yet."""
        self.base = 0
        """Bytes received that whole messages explain."""
        self.looks = 0
        """Looks in a row that saw unread bytes of some size."""
        self.unread = 0
        """Bytes that no whole message taken up explains, by the last look."""
        self.taken_ms = 0
        """Once it has ended: when the loop was last seen to have taken up something of it."""
        self.memory = 0
        """What these take in memory."""
        self.rise = 0
        """How much more of it there was than at the look before."""
        self.quiet = 0
        """Looks in a row that saw nothing unread."""
        self.rss = rss
        """Resident memory when the partial message began."""
        self.links: set[int] = set()
        self.error: Exception | None = None
        """What an unforeseen error of the guard was that this connection was cut for."""

    @property
    def share(self) -> str:
        """Whose share of the memory for unread bytes it takes: the user's or the address's."""
        return f"user {self.user}" if self.user else self.address


class Guard:
    """Watches the connections of all listeners; used by the loop thread only."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        count: Callable[[str], None],
        report: Callable[[str, dict[str, object]], None],
    ) -> None:
        """count: a name, for the counters. report: an event's name and facts."""
        self._bounds = bounds
        self._count = count
        self._report = report
        self._connections: dict[int, Connection] = {}
        self._by_address: Counter[str] = Counter()
        self._by_user: Counter[str] = Counter()
        self._silent: dict[int, Connection] = {}
        """Connections that have sent no message yet, by descriptor, the oldest first."""
        self._silent_by_address: Counter[str] = Counter()
        self.accepted = 0
        """Connections that have come so far."""
        self._turn: list[int] = []
        self._suspects: list[int] = []
        """Descriptors at which the last look saw unread bytes."""
        self._all_at_ms = 0
        self._some_at_ms = 0
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self.rss = self._resident()
        self._rss_at_all = self.rss
        self._rss_before = self.rss
        """Resident memory when nothing was unread last."""
        self._has_filled = False
        """Since memory was given back, unread bytes have filled it, or were left in the queues."""
        self._ended_by_address: Counter[str] = Counter()
        """Connections that ended since the sockets were empty: what they sent may be there."""
        self._left: list[Connection] = []
        """Connections among them that had much unread at the last look, while it fills memory."""
        self._now_ms = 0
        """When the last check was."""
        self._drained = False
        """At the last check the sockets were empty: no whole message waited."""
        self._unread = 0
        """Memory of all unread bytes at the last check."""
        self._rss_at_check = self.rss
        self._trimmed_ms = 0
        """When giving memory back was tried last."""
        self._trim_each_ms = _TRIM_EACH_MS
        self._trimming: threading.Thread | None = None
        self._listening: list[int] = []
        """Descriptors of the listening sockets."""
        self.ports: frozenset[int] = frozenset()
        """Where these listen over tcp."""
        self._turned_away: set[str] = set()
        """Addresses whose connection requests the kernel drops."""

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

    def facts(self) -> dict[str, int]:
        """Gauges: connections, those that have said nothing, and the memory of unread bytes."""
        suspects = [self._connections.get(fd) for fd in self._suspects]
        return {
            "connections": len(self._connections),
            "silent_connections": len(self._silent),
            "unread_bytes": sum(each.memory for each in suspects if each is not None),
        }

    # --- who comes and goes --------------------------------------------------------

    def drain(self, monitor: zmq.Socket[bytes], now_ms: int) -> list[Connection]:
        """Take the monitor's events; returns the connections that ended."""
        ended: list[Connection] = []
        while int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            head, _ = monitor.recv_multipart()
            event, value = _EVENT.unpack_from(head)
            if event == zmq.EVENT_ACCEPTED:
                old = self._connections.get(value)
                if old is not None:
                    self._forget(old)
                    ended.append(old)
                self._accepted(value, now_ms)
            elif event == zmq.EVENT_DISCONNECTED:
                gone = self._connections.get(value)
                if gone is not None:
                    self._forget(gone)
                    ended.append(gone)
                self._count("disconnected_total")
            elif event == zmq.EVENT_LISTENING:
                self._listening.append(value)
                port = local_port(value)
                if port is not None:
                    self.ports |= {port}
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
        self.accepted += 1
        try:
            facts = os.fstat(fd)
            if not stat.S_ISSOCK(facts.st_mode):
                return
            is_tcp, address = whence(fd)
        except OSError:
            return  # closed before we came to it
        connection = Connection(fd, facts.st_ino, is_tcp, address, now_ms, self.rss)
        self._connections[fd] = self._silent[fd] = connection
        self._by_address[address] += 1
        self._silent_by_address[address] += 1
        self._thin_out(connection)

    def _thin_out(self, newest: Connection) -> None:
        """Cut one connection if there are too many now."""
        bounds, address = self._bounds, newest.address
        if len(self._connections) > bounds.connections_max:
            self._surplus(newest, f"there are {bounds.connections_max} connections already")
        elif self._by_address[address] > bounds.address_connections_max:
            most = bounds.address_connections_max
            self._surplus(newest, f"its address has {most} connections already")
        elif self._silent_by_address[address] > bounds.address_greetings_max:
            self._make_room(address, newest.accepted_ms, "too many of its address say nothing")
        elif len(self._silent) > bounds.greetings_max:
            (most_of, _), *_ = self._silent_by_address.most_common(1)
            self._make_room(most_of, newest.accepted_ms, "too many say nothing")
        elif self._has_left_much(address):
            self._surplus(newest, "what connections of its address left behind fills the memory")

    def _has_left_much(self, address: str) -> bool:
        """Whether messages of ended connections fill the memory, and most of them came from there.

        libzmq keeps what it has read of a connection until it is taken up, also when the connection
        has gone: no look sees it, and who connects again and again would have no bound.
        """
        return address in self._to_blame()

    def _to_blame(self) -> set[str]:
        """Addresses whose connections ended most often since nothing was unread, if memory grew."""
        ended = self._ended_by_address
        if not ended or not self._has_grown:
            return set()
        most = max(ended.values())
        if most < _ENDED_LEAST:
            return set()
        return {address for address, count in ended.items() if count == most}

    @property
    def _has_grown(self) -> bool:
        """Whether memory has grown by more than a share since nothing was unread."""
        return self.rss - self._rss_before > self._bounds.unread_share_bytes_max

    def _make_room(self, address: str, now_ms: int, reason: str) -> None:
        """Cut the connection of an address that has been silent longest, unless it just came."""
        oldest = next(each for each in self._silent.values() if each.address == address)
        if now_ms - oldest.accepted_ms >= self._bounds.greeting_ms:
            self._surplus(oldest, reason)

    def _surplus(self, connection: Connection, reason: str) -> None:
        self._count("connections_refused_total")
        self._forget(connection)
        self._shut_down(connection, reason, abort=True)

    def spoke(self, connection: Connection, user: str) -> bool:
        """Note a connection's first message; False: its user has too many connections.

        user: the identity of its credential; empty: it has none.
        """
        connection.spoke = True
        if self._silent.pop(connection.fd, None) is None:
            return True
        _less(self._silent_by_address, connection.address)
        connection.user = user
        if not user:
            return True
        self._by_user[user] += 1
        return self._by_user[user] <= self._bounds.user_connections_max

    def _forget(self, connection: Connection) -> None:
        del self._connections[connection.fd]
        self._ended_by_address[connection.address] += 1
        if connection.memory > _SMALL_BYTES and not self._drained:
            connection.taken_ms = self._now_ms
            self._left.append(connection)
            self._has_filled = True
        _less(self._by_address, connection.address)
        if self._silent.pop(connection.fd, None) is not None:
            _less(self._silent_by_address, connection.address)
        if connection.user:
            _less(self._by_user, connection.user)

    # --- the check -----------------------------------------------------------------

    def is_calm(self, now_ms: int) -> bool:
        """Whether the next check may wait: the last one was lately, and memory has not grown since.

        A message under way whose memory grows is seen by that; over tcp the kernel keeps the rest.
        """
        if not 0 <= now_ms - self._now_ms < _CALM_MS or self._has_filled or self._left:
            return False
        return self._resident() - self._rss_at_check < _CALM_BYTES

    def check(self, now_ms: int, *, drained: bool) -> list[Connection]:
        """Look at the connections and shut down offenders; returns those that ended.

        An error that no code foresaw costs the connection that was looked at: it ends, with the
        error. drained: the sockets have been read until they had nothing more.
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
            fds = list(dict.fromkeys([*fds, *self._turn[:_SOME]]))
            del self._turn[:_SOME]
            self._some_at_ms = now_ms + _SOME_EACH_MS
        self._suspects = []
        self._drained = drained
        self._now_ms = now_ms
        self._rss_at_check = self.rss
        connections = self._connections
        ended: list[Connection] = []
        for fd in fds:
            connection = connections.get(fd)
            if connection is None:
                continue
            try:
                verdict = self._look(connection, now_ms, drained)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                connection.error = error
                verdict = "the broker met an error of its own when it looked at it"
            if verdict is None:
                if connection.looks:
                    self._suspects.append(fd)
                continue
            ended.append(connection)
            self._forget(connection)
            if verdict:
                self._shut_down(connection, verdict, abort=True)
        if drained:
            self._ended_by_address.clear()
            self._left.clear()
        for connection, verdict in self._too_much(connections[fd] for fd in self._suspects):
            ended.append(connection)
            self._forget(connection)
            self._shut_down(connection, verdict, abort=True)
        self._unread = sum(connections[fd].memory for fd in self._suspects if fd in connections)
        if self._unread > self._bounds.unread_share_bytes_max // 4:
            self._has_filled = True
        self._turn_away()
        if self._suspects or not drained:
            self._give_back(self._bounds.unread_share_bytes_max // 4, now_ms)
        elif self._give_back(_KEPT_BYTES, now_ms) or self._trim_each_ms > _TRIM_LAST_MS:
            self._has_filled = False
            self._trim_each_ms = _TRIM_EACH_MS
            self._rss_before = self.rss
        return ended

    def _give_back(self, grown: int, now_ms: int) -> bool:
        """Return what unread bytes took to the system, if memory has grown by more than this.

        glibc would keep it for the next ones. To return hundreds of MiB takes 20 to 40 ms, so a
        thread does it. The loop goes on meanwhile, but where it allocates memory it waits for the
        arena that malloc_trim() has locked: 6 to 33 ms. Returns True when nothing is to be given
        back any more: what the loop had in hand still when a thread began is freed after it.
        """
        if not self._has_filled or self.rss <= self._rss_before + grown:
            return True
        if self._is_trimming or now_ms - self._trimmed_ms < self._trim_each_ms:
            return False
        self._trimmed_ms = now_ms
        self._trim_each_ms *= 2
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

    @property
    def _is_trimming(self) -> bool:
        return self._trimming is not None and self._trimming.is_alive()

    def _turn_away(self) -> None:
        """Have the kernel keep out the addresses that have left too much behind, and no others."""
        blamed = self._to_blame()
        if not blamed and not self._turned_away:
            return
        named = sorted(each for each in blamed if "." in each or ":" in each)
        away = set(named[:ADDRESSES_MAX])
        if away == self._turned_away:
            return
        for address in away - self._turned_away:
            self._count("addresses_turned_away_total")
            self._report("address_turned_away", {"peer": address})
        self._turned_away = away
        self.open_doors()

    def open_doors(self) -> None:
        """Have the listening sockets take all peers but those that are turned away."""
        for fd in list(self._listening):
            try:
                with Borrowed(fd) as listening:
                    turn_away(listening, self._turned_away)
            except OSError as error:
                # Its connections are cut when they were accepted, as far as the loop is in time.
                self._listening.remove(fd)
                self._report("filter_refused", {"error": str(error)})

    # --- for the watchdog's thread ------------------------------------------------------------

    def shut_doors(self) -> None:
        """Have the listening sockets take no connections until open_doors(). From any thread."""
        for fd in list(self._listening):
            with contextlib.suppress(OSError), Borrowed(fd) as listening:
                shut(listening)

    def growth(self) -> int:
        """Bytes that memory has grown by since nothing was unread. From any thread."""
        return self._resident() - self._rss_before

    def connections(self) -> list[Connection]:
        """The connections that are known. From any thread."""
        return list(self._connections.values())

    @staticmethod
    def unread(connection: Connection) -> int:
        """Bytes that no message taken up so far explains; 0: it is gone. From any thread."""
        said = connection.delivered - connection.seen
        return max(0, (_arrived(connection) or 0) - connection.base - said)

    # --- one connection, and all together ----------------------------------------------------

    def _look(self, connection: Connection, now_ms: int, drained: bool) -> str | None:
        """None: fine. "": it is gone. Otherwise why it has to end."""
        bounds = self._bounds
        arrived = _arrived(connection)
        if arrived is None:
            return ""
        said = connection.delivered - connection.seen
        if said:
            # What the delivered messages cannot explain is unread.
            base = min(arrived, connection.base + said) if connection.is_tcp else 0
            if drained and arrived - base <= _SMALL_BYTES:
                base = arrived  # ZMTP's own commands; the next message may have begun with it
            connection.base = base
            connection.seen = connection.delivered
            frames = connection.frames - connection.sampled_frames
            if frames >= _SAMPLE_FRAMES:
                connection.frame_bytes = (connection.delivered - connection.sampled) / frames
                connection.sampled = connection.delivered
                connection.sampled_frames = connection.frames
            if drained:
                connection.looks = 0
                connection.rss = self.rss
        elif connection.seen == 0 and now_ms - connection.accepted_ms > bounds.hello_ms:
            return "nothing was said after connecting"
        unread = arrived - connection.base
        if unread <= (_SMALL_BYTES if connection.is_tcp else 0):
            connection.unread = connection.memory = connection.rise = 0
            connection.quiet += 1
            if connection.quiet >= _QUIET_LOOKS:
                connection.looks = 0
                connection.rss = self.rss
            return None
        connection.quiet = 0
        connection.looks += 1
        before = connection.memory
        connection.unread = unread
        growth = max(0, self.rss - connection.rss)
        # Once the sockets are empty no whole message waits: it is the beginning of one.
        connection.memory = unread if drained else _memory_of(connection, growth)
        connection.rise = max(0, connection.memory - before)
        if connection.looks < 2:
            return None  # judged at the next look, when the loop has read once more
        is_tiny = 0 < connection.frame_bytes <= _TINY_BYTES
        waits = connection.memory if is_tiny else unread
        if connection.is_tcp and waits > bounds.partial_bytes_max:
            return f"{unread} unread bytes of a message without end or of too many"
        if not drained:
            return None
        if connection.is_tcp and not connection.seen and unread > bounds.greeting_bytes_max:
            return f"{unread} bytes before its first message"
        growth -= max(0, self._unread - before)  # what the others' bytes explain
        factor = _AMPLIFICATION * unread if connection.is_tcp else 0
        if growth > bounds.amplified_bytes_max + factor:
            return f"memory grew by {growth} bytes during a message of {unread} bytes so far"
        return None

    def _too_much(self, suspects: Iterable[Connection]) -> list[tuple[Connection, str]]:
        """Whom to cut so that all together, and each user or address, keep to their bounds.

        The largest connection of the share that has most goes first: a peer with one large message
        is not cut for what another sends by many connections.
        """
        bounds = self._bounds
        live = [each for each in suspects if each.looks >= 2]
        most = sum(each.memory + each.rise for each in live)
        if not self._left and most <= min(bounds.unread_share_bytes_max, bounds.unread_bytes_max):
            return []
        growth = max(0, self.rss - self._rss_before)
        # Each may have caused all of the growth, but together they have caused it only once.
        raw = sum(each.unread for each in live)
        above = sum(each.memory for each in live) - raw
        part = min(1.0, max(0, growth - raw) / above) if above > 0 else 1.0
        shares: dict[str, list[Connection]] = {}
        sizes: dict[Connection, int] = {}
        sums: Counter[str] = Counter()
        for each in live:
            size = each.unread + int((each.memory - each.unread) * part)
            # As much again as came since the last look will have come until the next one.
            size += each.rise * size // max(1, each.memory)
            shares.setdefault(each.share, []).append(each)
            sizes[each] = size
            sums[each.share] += size
        left = self._left_behind()
        # A part of each bound is left to who is connected now: it may not be to blame, and to cut
        # it would not lower what others have left.
        total = sums.total()
        total += min(left.total(), growth, bounds.unread_bytes_max // 4 * 3)
        for share in left.keys() & sums.keys():
            sums[share] += min(left[share], growth, bounds.unread_share_bytes_max // 4 * 3)
        chosen: list[tuple[Connection, str]] = []
        while sums:
            share = max(sums, key=sums.__getitem__)
            if sums[share] > bounds.unread_share_bytes_max:
                why = f"its share, {share}, has {sums[share]} unread bytes"
            elif total > bounds.unread_bytes_max:
                why = f"all connections have {total} unread bytes, and {share} most of them"
            else:
                break
            own = shares[share]
            largest = max(own, key=lambda each: each.memory)
            own.remove(largest)
            sums[share] -= sizes[largest]
            total -= sizes[largest]
            if not own:
                del sums[share]
            chosen.append((largest, why))
        return chosen

    def _left_behind(self) -> Counter[str]:
        """Memory that ended connections still fill in libzmq's queues, by share."""
        kept: list[Connection] = []
        shares: Counter[str] = Counter()
        for gone in self._left:
            taken = gone.delivered - gone.seen
            if taken:
                rest = max(0, gone.unread - taken)
                gone.memory = gone.memory * rest // gone.unread
                gone.unread, gone.seen, gone.taken_ms = rest, gone.delivered, self._now_ms
            if gone.memory > _SMALL_BYTES and self._now_ms - gone.taken_ms < _LEFT_MS:
                kept.append(gone)
                shares[gone.share] += gone.memory
        if len(kept) > _LEFT_MAX:
            kept = heapq.nlargest(_LEFT_MAX, kept, key=lambda gone: gone.memory)
        self._left = kept
        return shares

    def cut(self, connection: Connection, reason: str) -> None:
        """End a connection for a reason that is not the guard's own."""
        if self._connections.get(connection.fd) is connection:
            self._forget(connection)
            self._shut_down(connection, reason, abort=False)

    def cut_silent(self, reason: str) -> None:
        """End every connection that has sent no message yet."""
        for connection in list(self._silent.values()):
            self._forget(connection)
            self._shut_down(connection, reason, abort=True)

    def _shut_down(self, connection: Connection, reason: str, *, abort: bool) -> None:
        try:
            with copied(connection.fd, connection.inode) as own:
                if abort:
                    # Have libzmq's close() reset the connection: a sender whose window is shut
                    # would learn of a mere end a minute later.
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                own.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It went by itself, the peer was quicker, or there is no descriptor left: then the
            # next look tries again.
            return
        self._has_filled = True
        self._trim_each_ms = _TRIM_EACH_MS
        self._count("cut_total")
        self._report(
            "connection_cut",
            {
                "peer": connection.share,
                "reason": reason,
                "links": sorted(connection.links),
            },
        )

    def _resident(self) -> int:
        """Bytes of resident memory that map no file: a ring that fills is no growth."""
        _, resident, mapped, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(mapped)) * _PAGE


def _arrived(connection: Connection) -> int | None:
    """Bytes that came in on a connection; over ipc, those unread with what explains the others."""
    if connection.is_tcp:
        return received(connection.fd, connection.inode)
    unread = waiting(connection.fd, connection.inode)
    return None if unread is None else connection.base + unread


def _memory_of(connection: Connection, growth: int) -> int:
    """What the unread bytes of a connection take in memory, by the size of its frames.

    growth: of the resident memory since something of it was unread; it takes no more than that.
    """
    unread, size = connection.unread, connection.frame_bytes
    if not 0 < size < _SMALL_FRAME_BYTES:
        return unread
    needed = _FRAME_MEMORY_BYTES if size <= _TINY_BYTES else _SMALL_FRAME_BYTES
    factor = 1 + needed / size
    return max(unread, min(int(unread * factor), growth))


def _less(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
