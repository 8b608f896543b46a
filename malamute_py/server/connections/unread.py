"""Unread bytes: those that came in on a connection and that the loop has not taken up.

Owns the judgement of one connection and of all together. libzmq bounds one frame and nothing else:
a peer that sends MORE frames for ever grows the broker without a message ever arriving (measured:
591 MiB in 1.6 s), and so does one that sends whole messages faster than the loop takes them, for no
queue of libzmq is bounded here (sockets.py tells why). The kernel counts what came in on each
connection; what is more than the whole messages that the loop has taken is unread: messages that
wait, and the beginning of one. The rules: a connection has a bound, all together have one, and each
address or user has one; beyond it the largest connection of the one that has most is to be cut.
Source: ARCHITECTURE.md, "What a peer may cost"; tcp(7).

How exact it is: over tcp the bytes are exact. Small frames cost 4 to 80 times their bytes and tiny
ones 10 to 50 times, so those count for more where a connection is seen to send them, though never
for more than memory has grown; growth of the resident memory while a partial message arrives counts
as well. Bytes that a connection which has gone left in libzmq's queues count until the loop has
dropped them. Over ipc the kernel counts no bytes: that growth tells, while unread bytes lie in the
socket, and local.py judges the rest. inproc peers are in this process and not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from malamute_py.config import LimitsSection
from malamute_py.server.connections.connection import SMALL_BYTES, Connection
from malamute_py.server.connections.left_behind import LeftBehind
from malamute_py.server.connections.local import LocalConnections
from malamute_py.server.connections.memory import Memory

_AMPLIFICATION = 6
"""Resident growth beyond this many times the partial message is no honest message."""
_QUIET_LOOKS = 8
"""Looks in a row that must see nothing partial before memory is measured anew: over ipc only the
bytes that libzmq has not read yet show, and often there are none."""
_SAMPLE_FRAMES = 256
"""Frames of a connection that are taken up before it is judged by their average size."""
_FIRST_SAMPLE_FRAMES = 64
"""Frames that are enough where there is no average yet and messages wait for their turn: of costly
commands few are taken up."""
_TINY_BYTES = 36
"""Size up to which frames are tiny: libzmq copies them into the message itself. The memory of those
that wait is bounded."""
_SMALL_FRAME_BYTES = 8 << 10
"""Size below which libzmq cuts frames from buffers of this size. Each frame keeps its whole buffer,
however little was read into it at once. Measured: commands of 94 bytes, sent one by one, took 76
times their bytes; batches of two records 4 to 6 times."""
_FRAME_MEMORY_BYTES = 96
"""Memory that libzmq needs for a waiting frame, besides its bytes."""


class UnreadBytes:
    """Judges connections by what they have unread; used by the loop thread only."""

    def __init__(
        self, bounds: LimitsSection, hello_ms: int, memory: Memory, left: LeftBehind,
        local: LocalConnections,
    ) -> None:  # fmt: skip
        """bounds: the section `limits`. hello_ms: how long a connection may send no message.

        memory, left, local: parts of the same guard: growth of memory, what ended connections left,
        and the judgement of connections over ipc.
        """
        self._bounds = bounds
        self._hello_ms = hello_ms
        self._memory = memory
        self._left = left
        self._local = local
        self.total = 0
        """Memory of all unread bytes at the last check."""
        self._frame_bytes: dict[str, float] = {}
        """Share -> average bytes of the frames of those of its connections that have no average of
        their own. 200 connections of one address, of each of which the loop has taken up few
        frames, fill as much memory as one that sends as much."""

    def sum_up(self, suspects: Sequence[Connection]) -> None:
        """Note the memory of all unread bytes, for the next looks; at the end of a check."""
        # Each may count for all of the growth, but together they have caused it only once.
        grown = max(0, self._memory.grown())
        least = sum(each.unread for each in suspects)
        self.total = min(sum(each.memory for each in suspects), least + grown)
        sizes: Counter[str] = Counter()
        frames: Counter[str] = Counter()
        for each in suspects:
            if not each.frame_bytes:
                sizes[each.share] += each.delivered + each.waiting
                frames[each.share] += each.frames + each.waiting_frames
        self._frame_bytes = {
            share: sizes[share] / count
            for share, count in frames.items()
            if count >= _SAMPLE_FRAMES
        }
        # Once they are taken up, this memory is to be given back: so much is worth the thread.
        if self.total > self._bounds.unread_share_bytes_max // 4:
            self._memory.has_filled = True

    def judge(self, connection: Connection, now_ms: int, drained: bool) -> str | None:
        """Return why a connection has to end for its own bytes; "": it is gone; None: it may stay.

        The guard's look at one connection; too_much() judges all together. drained: the sockets
        have been read until they had nothing more.
        """
        bounds = self._bounds
        # First the bytes that came in (`arrived`), and those of them that whole messages explain
        # (`base`): the others are unread.
        arrived = connection.arrived()
        if arrived is None:
            return ""
        said = connection.delivered - connection.seen  # bytes of messages since the last look
        if said:
            # Over ipc the kernel counts only what is unread.
            base = min(arrived, connection.base + said) if connection.is_tcp else 0
            if drained and arrived - base <= SMALL_BYTES:
                # These are ZMTP's own commands; the next message may have begun with them.
                base = arrived
            connection.base = base
            connection.seen = connection.delivered
            if drained:
                # What is unread now is another message than at the looks before.
                connection.looks = 0
                connection.rss = self._memory.rss
        elif connection.seen == 0 and now_ms - connection.accepted_ms > self._hello_ms:
            return "no message came after connecting"
        # How large the frames are tells how much memory unread ones take.
        frames = connection.frames + connection.waiting_frames
        is_first = not connection.frame_bytes and connection.waiting_frames
        enough = _FIRST_SAMPLE_FRAMES if is_first else _SAMPLE_FRAMES
        if frames - connection.sampled_frames >= enough:
            size = connection.delivered + connection.waiting
            sampled = size - connection.sampled, frames - connection.sampled_frames
            connection.frame_bytes = sampled[0] / sampled[1]
            connection.sampled, connection.sampled_frames = size, frames
        if not connection.is_tcp:
            silent = self._local.judge(connection, said > 0, self.total, now_ms, drained)
            if silent is not None:
                return silent
        unread = arrived - connection.base
        # So little is of no concern; a few such looks in a row forget what was noted before.
        if unread <= (SMALL_BYTES if connection.is_tcp else 0):
            connection.unread = connection.memory = connection.rise = 0
            connection.quiet += 1
            if connection.quiet >= _QUIET_LOOKS:
                connection.looks = 0
                connection.rss = self._memory.rss
            return None
        # There is something unread: how much memory it takes, by its frames or by the growth.
        connection.quiet = 0
        connection.looks += 1
        before, unread_before = connection.memory, connection.unread
        connection.unread = unread
        growth = max(0, self._memory.rss - connection.rss)
        # Once the sockets are empty no whole message waits: it is the beginning of one.
        average = connection.frame_bytes or self._frame_bytes.get(connection.share, 0.0)
        connection.memory = unread if drained else _memory_of(unread, average, growth)
        # So much as what came since the last look takes: another average size of frames is no rise.
        connection.rise = max(0, unread - unread_before) * connection.memory // unread
        if connection.looks < 2:
            return None  # The next look judges, when the loop has read once more.
        # Tiny frames fill many times their bytes: the memory that they take counts.
        is_tiny = 0 < connection.frame_bytes <= _TINY_BYTES
        counted = connection.memory if is_tiny else unread
        if connection.is_tcp and counted > bounds.partial_message_bytes_max:
            return f"{unread} unread bytes of a message without end or of too many"
        if not drained:
            return None
        # Nothing waits to be taken up: all that is unread is the beginning of one message.
        greeting_bytes_max = bounds.command_frame_bytes_max + SMALL_BYTES
        if connection.is_tcp and not connection.seen and unread > greeting_bytes_max:
            return f"{unread} bytes before its first message"
        # Unread bytes of other connections explain part of the growth. The rest, beyond what frames
        # of this message may cost, is what a message of many tiny frames fills.
        growth -= max(0, self.total - before)
        cost_of_frames = _AMPLIFICATION * unread if connection.is_tcp else 0
        if growth > bounds.amplified_bytes_max + cost_of_frames:
            return f"memory grew by {growth} bytes during a message of {unread} bytes so far"
        return None

    def too_much(self, suspects: Iterable[Connection]) -> list[tuple[Connection, str]]:
        """Choose whom to cut so that all together, and each user or address, keep to their bounds.

        A share is all that counts for one user, or for one address without a user. The largest
        connection of the largest share goes first: a peer with one large message is not cut for
        what another sends by many connections. Returns each connection to cut, with the reason.
        """
        bounds = self._bounds
        # The guard judges at the second look in a row, when the loop has read once more.
        live = [each for each in suspects if each.looks >= 2]
        most = sum(each.memory + each.rise for each in live)
        least = min(bounds.unread_share_bytes_max, bounds.unread_bytes_max)
        if self._left.is_empty and most <= least:
            return []
        growth = max(0, self._memory.grown())
        # `memory` is what small frames may fill beyond their bytes, up to all of the growth. But
        # together the connections have caused the growth only once: each counts for this part of
        # what it may have filled beyond its bytes.
        raw = sum(each.unread for each in live)
        above = sum(each.memory for each in live) - raw
        part = min(1.0, max(0, growth - raw) / above) if above > 0 else 1.0
        shares: dict[str, list[Connection]] = {}
        sizes: dict[Connection, int] = {}
        sums: Counter[str] = Counter()
        for each in live:
            size = each.unread + int((each.memory - each.unread) * part)
            # Until the next look as much will come as came since the last one.
            size += each.rise * size // max(1, each.memory)
            shares.setdefault(each.share, []).append(each)
            sizes[each] = size
            sums[each.share] += size
        # What ended connections left, and how many they were, by share.
        left, ended = self._left.by_share()
        total = sums.total()
        growth = max(0, growth - total)
        total += _counted(left.total(), growth, bounds.unread_bytes_max, ended.total())
        for share in left.keys() & sums.keys():
            sums[share] += _counted(
                left[share], growth, bounds.unread_share_bytes_max, ended[share]
            )
        # Cut the largest connection of the largest share until every bound is kept.
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


def _counted(left: int, growth: int, bound: int, ended: int) -> int:
    """Return how much of what ended connections left counts against a bound.

    growth: of memory, without what the connections of now explain. A part of the bound is left to
    the connections of now: they may not be to blame, and to cut them would not lower what ended
    ones have left. It is a quarter after one connection ended, and half as much with each other:
    who connects again and again comes to half a bound more, and no further.
    """
    kept_back = bound // 4 >> max(0, ended - 1)  # a quarter, an eighth, and so on
    return min(left, growth, bound - kept_back)


def _memory_of(unread: int, size: float, growth: int) -> int:
    """Return the memory that a connection's unread bytes take, by the average size of its frames.

    size: 0: it is not known. growth: of the resident memory since something of it was unread; it
    takes no more than that.
    """
    if not 0 < size < _SMALL_FRAME_BYTES:
        return unread
    # A tiny frame needs a little beside its bytes; another small one may keep a whole buffer.
    needed = _FRAME_MEMORY_BYTES if size <= _TINY_BYTES else _SMALL_FRAME_BYTES
    factor = 1 + needed / size
    return max(unread, min(int(unread * factor), growth))
