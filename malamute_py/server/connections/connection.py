"""One accepted connection, and what the guard knows of it.

Owns the facts of one connection: the bytes that came in, those that the loop has read, and the
rest. The rule: bytes that came in and that no whole message explains are unread. Source:
descriptors.py; tcp(7).
"""

from __future__ import annotations

from malamute_py.server.connections.descriptors import received, waiting

SMALL_BYTES = 64 << 10
"""Unread bytes up to this are of no concern: ZMTP's handshake and heartbeats take some."""


class Connection:
    """One accepted connection, by its descriptor."""

    __slots__ = (
        "accepted_ms", "address", "asked_ms", "base", "delivered", "error", "fd", "frame_bytes",
        "frames", "heard_rss", "inode", "is_cut", "is_tcp", "links", "looks", "memory", "monitor",
        "quiet", "revoked", "rise", "rss", "sampled", "sampled_frames", "seen", "spoke", "stretch",
        "stretch_frames", "surplus", "taken_ms", "unread", "user", "waiting", "waiting_frames",
    )  # fmt: skip

    def __init__(
        self, fd: int, inode: int, is_tcp: bool, address: str, now_ms: int, rss: int
    ) -> None:
        """Begin with a connection that was just accepted: nothing of it was read.

        is_tcp: False: over ipc. address: of the peer, as the kernel tells it. rss: resident memory.
        """
        self.fd = fd
        self.inode = inode
        self.is_tcp = is_tcp
        self.address = address
        self.monitor: object = None
        """The monitor that told of the connection, and will tell of its end."""
        self.spoke = False
        """True: a message of the connection was taken up; a new routing id then belongs to another
        connection."""
        self.user = ""
        """The identity of the connection's credential, once it has sent a message."""
        self.surplus = False
        """True: its user had too many connections when it sent its first message."""
        self.accepted_ms = now_ms
        self.delivered = 0
        """Bytes on the wire of the whole messages read from the connection; the loop counts."""
        self.frames = 0
        """Frames of these messages; the loop counts."""
        self.waiting = self.waiting_frames = 0
        """Bytes and frames of messages that were taken up and wait for their turn, which counts as
        unread; the loop counts."""
        self.seen = 0
        """`delivered` at the last look."""
        self.sampled = self.sampled_frames = 0
        """Bytes and frames taken up when the size of its frames was measured last."""
        self.frame_bytes = 0.0
        """Average bytes of the connection's frames on the wire; 0: too few were taken up yet."""
        self.base = 0
        """Bytes received that whole messages explain."""
        self.looks = 0
        """Looks in a row that saw unread bytes of some size."""
        self.unread = 0
        """Bytes that no whole message taken up explains, by the last look."""
        self.taken_ms = 0
        """Only of an ended connection: time at which the loop was last seen to have taken up
        something of it."""
        self.memory = 0
        """Memory that the connection's unread bytes take."""
        self.rise = 0
        """Growth of that memory since the look before."""
        self.quiet = 0
        """Looks in a row that saw nothing unread."""
        self.rss = rss
        """Resident memory when the partial message began."""
        self.heard_rss = rss
        """Only of a local connection: least resident memory since its last whole message."""
        self.asked_ms = 0
        """Only of a local connection: when its peer was asked for a sign of life; 0: it was not."""
        self.stretch = self.stretch_frames = 0
        """Only of a local connection: number of the stretch of checks that found local messages
        waiting, and `frames` at its first look in this stretch."""
        self.is_cut = False
        """True: the guard ended it for what it had unread; what it sent before is dropped."""
        self.revoked = False
        """True: its credential counts no more, and what it still sends is dropped."""
        self.links: set[int] = set()
        self.error: Exception | None = None
        """The unforeseen error of the guard for which the connection was cut."""

    @property
    def share(self) -> str:
        """Name the share that its unread bytes count for: the user's, or the address's."""
        return f"user {self.user}" if self.user else self.address

    def arrived(self) -> int | None:
        """Return the bytes that came in, as the kernel counts them; None: the connection is gone.

        Over ipc it counts only those that libzmq has not read: these and `base` are returned.
        """
        if self.is_tcp:
            return received(self.fd, self.inode)
        unread = waiting(self.fd, self.inode)
        return None if unread is None else self.base + unread

    def unread_now(self) -> int:
        """Return the bytes that no message taken up explains; 0: the connection is gone.

        For the watchdog's thread, between two looks of the guard.
        """
        taken_up = self.delivered - self.seen  # since the last look, so that `base` lacks it
        return max(0, (self.arrived() or 0) - self.base - taken_up)
