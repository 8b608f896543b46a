"""Facts that the kernel has about libzmq's connections, by their descriptors.

Owns how a descriptor of libzmq's is asked. The rule: libzmq may close it at any time and have
another connection under its number a moment later. So it is only asked; a call that changes it goes
to a copy that is closed at once, and only while its inode is the accepted connection's. Source:
tcp(7); unix(7).
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import resource
import socket
import struct
import sys
import termios
from collections.abc import Iterator
from typing import NamedTuple

_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_AT = 128
"""tcpi_bytes_received in struct tcp_info, Linux 4.1 and later."""
_CREDENTIALS = struct.Struct("=iII")
"""struct ucred: process, user, group."""
LOCAL_USER = "local user "
"""Beginning of the address of a local peer, before the number of its user."""


_FILES_KEPT = 256
"""Descriptors that are left to the journal at least."""
_CONNECTIONS_MIN = 16
"""Connections that there may be at one time, however few descriptors there are."""


def kept_files(files: int) -> int:
    """Return how many of so many descriptors are left to the journal and to what comes too much."""
    return max(_FILES_KEPT, files // 8)


def backlog(configured: int, files: int) -> int:
    """Return how many connections may wait in the kernel to be accepted, as configured or fewer.

    They take a descriptor in the end, however many connections there are already: libzmq accepts
    all that wait. So they may be an eighth of those kept for what comes too much. files: the limit
    of open files.
    """
    return min(configured, kept_files(files) // 8)


class Room(NamedTuple):
    """Bounds that leave the broker descriptors of its own."""

    connections: int
    """Connections for which there is room."""
    surplus_from: int
    """Connections beyond which the newest is cut."""
    shut_from: int
    """Lowest free descriptor from which on no peer may connect."""


def room(files: int, own: int, *, local: bool) -> Room:
    """Return how many connections a process has room for that may have so many descriptors.

    own: descriptors that the process has without connections. local: whether local peers may
    connect: these come 26,000 times a second, 260 in a turn of 10 ms, so that half of all
    descriptors are left to them. Over tcp alone, surplus connections are cut before all peers are
    kept out. Where local peers may connect, all peers are kept out first: connections that are cut
    leave free numbers below others that are used, so that the lowest free one tells too little, and
    libzmq ended the process (seen with 700 descriptors).
    """
    kept = kept_files(files)  # left to the journal, and to what comes too much
    # Descriptors are given from the lowest on: peers are kept out from this number on. Over tcp it
    # lies a quarter of `kept` above the bound from which surplus connections are cut.
    shut_from = files - (files // 2 if local else kept // 4 * 3)
    shut_from = max(shut_from, own + 2 * _CONNECTIONS_MIN)
    most = shut_from - own - (0 if local else kept // 4)
    most = max(_CONNECTIONS_MIN, most)
    return Room(connections=most, surplus_from=shut_from if local else most, shut_from=shut_from)


def raise_open_files() -> tuple[int, int]:
    """Raise the limit of open files as far as allowed; returns it before and after."""
    soft, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20  # Linux's fs.nr_open by default, above which no limit can be set
    wanted = most if allowed == resource.RLIM_INFINITY else min(allowed, most)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, allowed))
    return soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def lowest_free() -> int:
    """Return the lowest free descriptor: it tells how many are used. sys.maxsize: none is free."""
    try:
        # The kernel gives the lowest one.
        found = os.eventfd(0, os.EFD_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return sys.maxsize
    os.close(found)
    return found


class Borrowed:
    """A socket object over a descriptor of libzmq's: it is given back, not closed.

    Raises OSError when the descriptor is closed, or is no socket any more.
    """

    __slots__ = ("_socket",)

    def __init__(self, fd: int, family: int = socket.AF_INET) -> None:
        # With the family named, Python asks the kernel nothing and parses no address.
        self._socket = socket.socket(family, socket.SOCK_STREAM, 0, fileno=fd)

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.detach()


@contextlib.contextmanager
def copied(fd: int, inode: int, *, or_itself: bool = False) -> Iterator[socket.socket]:
    """Yield a copy of a connection's descriptor, for a call that changes the connection.

    libzmq may close the connection at any time and accept the next one under the same number (seen:
    14 in 400); what is done to the copy never meets that one. The copy is closed at the end. Raises
    OSError when the connection is gone, or no descriptor is left for a copy. or_itself: yield the
    connection's own descriptor then, which may be the next connection's a moment later: to cut that
    one, or to let it go, does no lasting harm, and an offender must not stay.
    """
    copy = fd
    with contextlib.ExitStack() as stack:
        try:
            copy = os.dup(fd)
        except OSError as error:
            if not or_itself or error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        else:
            stack.callback(os.close, copy)
        # The inode is compared before the descriptor is wrapped: the number may be a file's by now.
        if os.fstat(copy).st_ino != inode:
            raise ConnectionResetError(f"descriptor {fd} is another connection's")
        with Borrowed(copy) as own:
            yield own


def whence(fd: int) -> tuple[int, bool, str]:
    """Return a connection's inode, whether it is TCP, and its peer: an address or a local user.

    Asked when the connection was accepted. Raises OSError where the descriptor is no connection,
    and where libzmq gave it to another one between the questions: the inode, asked before and
    after, tells. The descriptor is not copied for that, as there may be none left.
    """
    inode = os.fstat(fd).st_ino
    with Borrowed(fd) as borrowed:
        domain = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
        if domain == socket.AF_UNIX:
            facts = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, user, _ = _CREDENTIALS.unpack(facts)  # process, user, group
            address = LOCAL_USER + str(user)
    if domain != socket.AF_UNIX:
        with Borrowed(fd, domain) as borrowed:
            name = borrowed.getpeername()
        # The name of a local socket, which another connection may be by now, is no tuple. An
        # address of IPv4 at a socket of IPv6 has the prefix.
        address = str(name[0]).removeprefix("::ffff:") if isinstance(name, tuple) else ""
    if not address or os.fstat(fd).st_ino != inode:
        raise ConnectionResetError(f"descriptor {fd} is another connection's")
    return inode, domain != socket.AF_UNIX, address


def local_port(fd: int) -> int | None:
    """Return the port of this machine that a TCP socket has; None: it is gone, or not TCP's."""
    with contextlib.suppress(OSError):
        with Borrowed(fd) as borrowed:
            domain = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
        if domain in (socket.AF_INET, socket.AF_INET6):
            with Borrowed(fd, domain) as borrowed:  # with the family by which a name is read
                name = borrowed.getsockname()
            if isinstance(name, tuple):  # It may have become a local one since.
                return int(name[1])
    return None


def local_path(fd: int) -> str:
    """Return the file of a local socket; "": it has none, or is none."""
    with contextlib.suppress(OSError):
        with Borrowed(fd) as borrowed:
            domain = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
        if domain == socket.AF_UNIX:
            with Borrowed(fd, domain) as borrowed:
                name = borrowed.getsockname()
            return name if isinstance(name, str) else ""  # A name in no directory is of bytes.
    return ""


def received(fd: int, inode: int) -> int | None:
    """Return the bytes that came in on a TCP connection; None: it is gone."""
    try:
        if os.fstat(fd).st_ino != inode:
            return None
        with Borrowed(fd) as borrowed:
            return _counted(borrowed)
    except OSError:
        return None


def waiting(fd: int, inode: int) -> int | None:
    """Return the bytes of a local connection that libzmq has not read; None: it is gone."""
    unread = array.array("i", [0])
    try:
        if os.fstat(fd).st_ino != inode:
            return None
        fcntl.ioctl(fd, termios.FIONREAD, unread)
    except OSError:
        return None
    return unread[0]


def _counted(borrowed: socket.socket) -> int:
    """Return the bytes that the kernel has counted on a TCP connection; 0 where it counts none."""
    info = borrowed.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 192)
    try:
        return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0])
    except struct.error:
        return 0  # A kernel before 4.1.


def counts_bytes() -> bool:
    """Whether the kernel counts what comes in on a TCP connection: the guard's bounds rest on that.

    Asked at a start. Linux before 4.1 does not, and sandboxes that imitate Linux may not: a byte is
    sent over a connection to ourselves, to see whether it is counted.
    """
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as peer,
        ):
            taken, _ = server.accept()
            with taken:
                peer.sendall(b"?")
                taken.recv(1)
                return _counted(taken) > 0
    except OSError:
        return False
