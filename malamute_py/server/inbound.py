"""Messages of peers on their way in: taken up, decoded, and given to the core in turns.

Owns what has arrived and was not done yet. A connection is noted once the guard has been told of
it; a message whose connection is not noted yet is held, and one whose commands wait for a later
share of a turn is queued. The rules: a turn takes a bounded burst from each socket without waiting;
a message of many commands or frames, or of long commands, and each of its peer after it, waits
until the others of the turn are taken up, and is done in shares; what a cut connection left is
dropped before it is looked at; a message that cannot be decoded costs its link. Source:
ARCHITECTURE.md, "What a peer may cost".
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from malamute_protocol.commands import Atomic, Command
from malamute_protocol.errors import RemoteProtocolError
from malamute_protocol.framing import decode_message
from malamute_protocol.limits import Limits
from malamute_py.config import Config
from malamute_py.server.connections.connection import Connection
from malamute_py.server.connections.guard import EVENTS_A_TURN, Guard, has_events
from malamute_py.server.connections.numbering import Numbering
from malamute_py.server.pacing import Pacing
from malamute_py.server.parts import Core
from malamute_py.server.peers import Peer, Peers
from malamute_py.server.sockets import Listener
from malamute_py.server.waiting import Arrived, Waiting

_KEEP_FRAME_FROM = 8 << 10
"""Size from which on a content frame is kept as it is. Smaller ones are copied: libzmq cuts small
messages from a shared 8 KiB read buffer, so that keeping one would keep all of that."""
_LONG_COMMANDS = 4 << 10
"""Bytes of a message's commands beyond which it is decoded once others are taken up: to decode 500
commands of 24 bytes takes up to a millisecond."""
_SHORT_COMMANDS = 256
"""Bytes of commands beyond which a message is put aside where it is the first one of a peer whose
connection cannot be told, or where others are left in the sockets. libzmq gives each connection its
turn: thousands of peers that came and went, with 60 subscriptions each, had all others wait for
16 s, and 100 that stayed for 130 ms."""
_DROPS = 256
"""Peers that have gone and that a turn drops at most: 3 to 10 us each."""
_FEW_COMMANDS = 4
"""Commands of a message that are done at once, also where commands turned out to be costly."""
_COSTLY_SHARE = 16
"""Commands of the one share that a turn has then: to list 64 times took 8 to 12 ms."""
_LATE_NS = 5_000_000
"""Time beyond that of its shares from which on a turn is late. A step of 512 parts is one share,
and takes 13 ms."""
_DROPPED_MAX = 8_192
"""Messages of cut connections that are dropped at a time: they take memory until they are."""
_CUT_OFF_MAX = 65_536
"""Lost connections whose last messages are looked for, under a load that never ends."""
_NOTES_MAX = 4
"""Times that EVENTS_A_TURN connections are noted for one message. Without a bound, local peers that
connected and closed 12,000 times a second held the loop for 5.4 s: new ones came all the time. A
message whose connection was not noted by then waits for the next turn."""
_LONG_BYTES = 8
"""Bytes that the length of a long frame takes besides, at most: 7 in ZMTP 3. One too many hides an
unread byte; one too few would count as unread for ever."""
_NOBLOCK = int(zmq.NOBLOCK)
_POLLIN = int(zmq.POLLIN)


def _whole(commands: Sequence[Command], most: int) -> int:
    """Return how many of the commands make a share of `most`: a step and its parts stay together.

    It may be more than `most` where the last one is a step.
    """
    count = 0
    while count < most and count < len(commands):
        command = commands[count]
        # An ATOMIC says how many of the commands behind it are its parts.
        count += 1 + command.count if type(command) is Atomic else 1
    return count


class Inbound:
    """The messages of all listeners; used by the loop thread only."""

    def __init__(
        self,
        config: Config,
        *,
        core: Core,
        guard: Guard,
        peers: Peers,
        limits: Limits,
        counters: defaultdict[str, int],
        meter: Callable[[], int],
        report: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """Take parts of the loop. limits: of messages. counters: of the shell, by name.

        meter: nanoseconds from any beginning. report: takes an event's name and facts.
        """
        self._core = core
        self._guard = guard
        self._peers = peers
        self._limits = limits
        self._counters = counters
        self._meter = meter
        self._report = report
        self._burst_messages = config.loop.burst_messages
        self._burst_bytes = config.loop.burst_bytes
        self._burst_commands = config.loop.burst_commands
        self._share_commands = config.loop.share_commands
        self._frames_max = config.limits.message_frames_max
        self.until = sys.maxsize
        """When the turn takes up no more messages, as the meter tells it; once one was put aside,
        it takes up others for `take_ns` more, and for `aside_ns` more what is put aside."""
        self.is_tight = False
        """Whether all but small messages wait, because commands turned out to be costly. A turn
        does so many of them as a small share has, and other peers' small messages come between."""
        self.is_crowded = False
        """Whether a turn left messages in the sockets, as its time was over. Those of more than a
        few commands wait then until the small ones behind them are found. It ends when none waits
        any more."""
        self._ran_out = False
        """Whether this turn leaves messages in the sockets, as its time is over."""
        self.is_late = False
        """Whether the last shares took far longer than they may. The next turn that does small
        messages does no share, so that these wait for one such share at most."""
        self.take_ns = 0
        """How long the turn takes up messages."""
        self.aside_ns = 0
        """How long the turn takes up messages that are only put aside."""
        self.queued: OrderedDict[int, Peer] = OrderedDict()
        """Link -> peer whose commands wait for their turn; the next in turn comes first."""
        self._validating: dict[int, Peer] = {}
        """Link -> peer whose commands wait until a batch among them is validated."""
        self.aside = 0
        """Parts and commands of messages that were taken up and put behind those of others."""
        self.ended: list[Connection] = []
        """Connections that ended and of which the core was not told yet."""
        self._silent: tuple[list[Connection], int, set[int]] = (self.ended, 0, set())
        """(`ended`, how many it had, descriptors of those of them that never spoke)."""
        self.cut_off: OrderedDict[bytes, Peer] = OrderedDict()
        """Routing ids of lost connections, which libzmq gives once. Their messages that were not
        taken up yet are dropped; the loop clears it once none can be left. When there are too many,
        the oldest go first: a message that still comes of one of these makes a link that is silent,
        and ends as such."""
        self.held: dict[Listener, tuple[zmq.Frame, Arrived]] = {}
        """Listener -> first frame and message of a peer whose connection is still to be noted. The
        messages behind it wait, too."""
        self.commands = 0
        """Commands that the core was given since the collector looked at young objects."""

    def begin(self, pacing: Pacing, began_ns: int) -> None:
        """Begin a turn at a time of the meter: how long it takes up messages, and of which kind."""
        self.take_ns, self.aside_ns = pacing.take_ns, pacing.aside_ns
        self.until = began_ns + pacing.take_ns
        self.is_tight = pacing.was_costly
        self.is_crowded = self._ran_out or (self.is_crowded and bool(self.queued))
        self._ran_out = False

    def note_lost(self, peer: Peer) -> None:
        """Drop what still comes of a peer whose connection is lost.

        Its messages are known by the routing id, if libzmq gave that id, for it gives none twice;
        an id that the peer chose may be another peer's by then.
        """
        if peer.numbered:
            self.cut_off[peer.routing_id] = peer
            if len(self.cut_off) > _CUT_OFF_MAX:
                self.cut_off.popitem(last=False)

    def validated(self, link: int) -> None:
        """Let a link's commands have their turns again, as its batch was validated."""
        peer = self._validating.pop(link, None)
        if peer is not None:
            self.queued[link] = peer

    def drain(self, listener: Listener, now_ms: int) -> bool:
        """Take up a burst of a listener's messages; True when the socket has nothing more.

        For each message: its frames are received, its peer is found, its commands are decoded and
        given to the core at once, or in shares later (queued) where they are many. The burst ends
        by its messages, bytes, commands or time. The most frequent code of the broker: what would
        be calls elsewhere stands here.
        """
        if self.held and listener in self.held and not self._admit_held(listener, now_ms):
            return False
        receive = listener.socket.recv
        routes = self._peers.routes(listener)
        polled = [(listener.socket, _POLLIN)]
        core, limits, frames_max = self._core, self._limits, self._frames_max
        poll, again = zmq.zmq_poll, zmq.Again
        frame_bytes, meter = listener.frame_bytes, self._meter
        share = _FEW_COMMANDS if self.is_tight or self.is_crowded else self._share_commands
        long = _SHORT_COMMANDS if self.is_crowded else _LONG_COMMANDS
        taken = worked = 0  # bytes taken up; commands that the core was given
        count = dropped = 0  # messages
        until = until_done = self.until
        large = False
        while count < self._burst_messages:
            # The time also bounds messages that are only put after others: to take up 256 of them,
            # of 1,000 frames each, took 264 ms.
            if count:
                # A lone message is the common end: an exception would cost three times as much.
                if count == 1 and not poll(polled, 0):
                    self._counters["messages_in_total"] += 1
                    self._counters["bytes_in_total"] += taken
                    return True
                if taken >= self._burst_bytes or worked >= self._burst_commands:
                    break
                if meter() >= until:
                    self._ran_out = True
                    break
            try:
                head = receive(_NOBLOCK, False)  # a Frame, not a copy of its bytes
            except again:
                self._counters["messages_in_total"] += count
                self._counters["bytes_in_total"] += taken
                return True
            # The whole message has arrived: libzmq shows the first frame no earlier.
            # The first frame is the peer's routing id. Of the others one too many is kept, so that
            # decoding refuses the message.
            gone, keep = None, frames_max
            peer = routes.get(head.bytes)
            if peer is None:
                gone = self.cut_off.get(head.bytes)
                if gone is not None:
                    keep = -1  # no frame: the message is dropped
            frames: list[Any] = []
            more = head.more
            size = parts = 0
            while more:
                frame = receive(_NOBLOCK, False)
                more = frame.more
                length = len(frame)
                size += length + frame_bytes + (length > 254 and _LONG_BYTES)
                parts += 1
                # The first frame kept has the commands; small ones are copied: _KEEP_FRAME_FROM.
                if len(frames) <= keep:
                    small = length < _KEEP_FRAME_FROM or not frames
                    frames.append(frame.bytes if small else frame)
            if parts > share + 1 and not large:
                # One message of many frames, which may take as long as the turn has for all, takes
                # no time from the messages of others.
                now = meter()
                large, until, until_done = True, now + self.aside_ns, now + self.take_ns
            if gone is not None:
                # The link is lost: its connection's bytes are only counted as taken up.
                gone.delivered(size, parts)
                self._counters["messages_dropped_total"] += 1
                dropped += 1
                if dropped == _DROPPED_MAX or meter() >= until:
                    break
                continue
            taken += size
            count += 1
            try:
                # A new peer, or another one with the same routing id.
                is_new, most = False, long
                if peer is None or (peer.strict and not self._peers.is_same(peer, head)):
                    arrived = Arrived(frames, size, parts)
                    peer = self._admit(listener, head, arrived, peer, now_ms)
                    if peer is None:
                        if listener in self.held:
                            break
                        continue
                    is_new = peer.connection is None and peer.fd >= 0
                    if is_new:
                        most = _SHORT_COMMANDS
                elif peer.connection is None and peer.fd >= 0 and not self._attach(peer, now_ms):
                    continue
                if peer.queued is not None or parts > share + 1 or len(frames[0]) > most:
                    # Commands of an earlier message of the peer wait, and the order stays; or this
                    # one has much to decode, for which the others of the turn do not wait; or it is
                    # the first one of a peer that may have gone.
                    if peer.queued is None:
                        peer.queued, self.queued[peer.number] = Waiting(), peer
                    peer.queue(Arrived(frames, size, parts))
                    self.aside += 1 + parts
                    if is_new:
                        peer.is_new = True
                        if not large:
                            now = meter()
                            large, until, until_done = True, now + self.aside_ns, now + self.take_ns
                    continue
                if peer.connection is not None:
                    peer.connection.delivered += size
                    peer.connection.frames += parts
                messages = decode_message(frames, limits)
            except RemoteProtocolError as error:
                assert peer is not None  # Only decoding raises it.
                self._malformed(peer, error, now_ms)
                continue
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                core.failed(0 if peer is None else peer.number, "receiving", error, now_ms)
                continue
            commands = [command for command, _ in messages]
            if len(commands) > share or (
                size > core.ahead_bytes and any(map(core.takes_long, frames))
            ):
                # They have their turn once all messages of this turn are taken up: a message of few
                # commands does not wait for a message of many, nor for one that takes long.
                peer.queued, peer.commands, peer.frames = Waiting(), commands, frames[1:]
                self.queued[peer.number] = peer
                self.aside += parts + len(commands)
            else:
                core.receive(peer.number, peer.identity, commands, frames[1:], now_ms)
                worked += len(commands)
                self.commands += len(commands)
                until = until_done  # The longer time is for what is put aside.
        self._counters["messages_in_total"] += count
        self._counters["bytes_in_total"] += taken
        return False

    def catch_up(self, now_ms: int, *, small: bool) -> int:
        """Do shares of the commands that wait, peer by peer, as many as the turn has room for.

        Peers may send thousands of commands at once: a turn does no more of them than half of a
        burst, so that other peers' messages come in between. small: whether the turn did small
        messages; after shares that took far too long it does none then. Returns how many it did.
        """
        if small and self.is_late:
            self.is_late = False
            return 0
        queued, before = self.queued, self.commands
        if self.is_crowded:
            # To put messages aside may have taken the whole time of the shares.
            self.until = max(self.until, self._meter() + self.take_ns)
        share = min(_COSTLY_SHARE, self._share_commands) if self.is_tight else self._share_commands
        # A share counts as a command at least: of one that is large, a part may be read in it.
        left, drops = share if self.is_tight else max(share, self._burst_commands // 2), _DROPS
        while queued and left > 0 and drops:
            number, peer = queued.popitem(last=False)  # the peer that waits longest
            if self._peers.get(number) is not peer or self._drop_if_gone(peer):
                drops -= 1
                continue
            done = self.commands
            if self._take_share(peer, share, now_ms):
                queued[number] = peer  # some wait still: behind the other peers
            left -= max(1, self.commands - done)
            if self._meter() >= self.until:
                break
        self.is_late = self._meter() >= self.until + _LATE_NS
        return self.commands - before

    def _drop_if_gone(self, peer: Peer) -> bool:
        """Drop a new peer, with all that it sent, if it is not there any more.

        Thousands may have come and gone, each with many commands, which would be done in vain: the
        core has not had its HELLO yet, and no answer to that would reach it.
        """
        if not peer.is_new:
            return False
        peer.is_new = False
        if peer.is_there():
            return False
        self._counters["messages_dropped_total"] += len(peer.queued or ())
        self.note_lost(peer)
        self._peers.remove(peer.number)
        return True

    def _take_share(self, peer: Peer, left: int, now_ms: int) -> bool:
        """Give the core a share of a peer's commands that wait; True: more wait for its next turn.

        left: commands of the share. False: none waits, or all wait until a batch among them was
        validated (validated()).
        """
        while peer.commands or peer.queued:
            if not left:
                return True
            if not peer.commands and not self._next_message(peer, now_ms):
                break
            count = _whole(peer.commands, left)
            commands = peer.commands[:count]
            # The contents of commands are frames of the message, in order, so many for each.
            owned = sum(command.content_frames for command in commands)
            frames = peer.frames[:owned]
            if any(map(self._core.takes_long, frames)):
                # Such a command is done alone.
                count = _whole(peer.commands, 1)
                commands = peer.commands[:count]
                owned = sum(command.content_frames for command in commands)
                frames = peer.frames[:owned]
                # What takes longest to read (a larger header table, a typed batch) is read before
                # the core receives its command.
                if any(map(self._core.reads_first, frames)) and not self._core.read_ahead(
                    peer.number, commands, frames, now_ms
                ):
                    if not self._core.validating(peer.number):
                        return True  # The rest of a header table is read in the peer's next turn.
                    self._validating[peer.number] = peer
                    return False
            del peer.commands[:count], peer.frames[:owned]
            left = max(0, left - count)
            self._core.receive(peer.number, peer.identity, commands, frames, now_ms)
            self.commands += count
            if self._meter() >= self.until:
                left = 0  # To decode messages may take long, if each has one command.
        self._peers.drop_queued(peer)
        return False

    def _next_message(self, peer: Peer, now_ms: int) -> bool:
        """Decode the peer's next message that waits; False: it is malformed, and its link ends."""
        arrived = peer.next_queued()
        try:
            messages = decode_message(arrived.frames, self._limits)
        except RemoteProtocolError as error:
            self._malformed(peer, error, now_ms)
            return False
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._core.failed(peer.number, "receiving", error, now_ms)
            return False
        peer.commands = [command for command, _ in messages]
        peer.frames = arrived.frames[1:]
        return True

    def _admit(
        self, listener: Listener, head: zmq.Frame, arrived: Arrived, old: Peer | None, now_ms: int
    ) -> Peer | None:
        """Open a link for a peer that is not known by the routing id of its message.

        head: the message's first frame. old: the peer that had the routing id before, if one had.
        Returns None when the peer is refused or the message is no client's, and when the message is
        held for the next turn (`held`), as the guard has not noted its connection yet.
        """
        # The message by which Numbering learns the next routing id that libzmq gives.
        numbering = listener.numbering
        if numbering is not None and numbering.answers(arrived.frames):
            # It is our own peer's, which has no connection that could be noted.
            if numbering.is_claimed(head.bytes):
                self._note(listener, None, now_ms)
                self._counters["claimed_ids_total"] += 1
                self._guard.cut_silent("one of them claims the next routing id")
            return None
        connection = self._peers.connection(head)
        if connection is not None and connection.revoked:
            return None  # its user's credential counts no more
        if not self._note(listener, head, now_ms):
            self.held[listener] = head, arrived
            return None
        if numbering is not None and not self._is_numbered(numbering, head):
            return None
        if old is not None:
            # The peer chose the id, and another connection has chosen it since.
            self._guard.memory.note_freed(self._core.link_lost(old.number, now_ms))
            self._peers.remove(old.number)
        peer = self._peers.add(listener, head)
        return peer if self._attach(peer, now_ms) else None

    def _attach(self, peer: Peer, now_ms: int) -> bool:
        """Find the connection of a link that has none yet, if it can be told by now.

        False: the user has too many connections, and the link has ended.
        """
        if self._peers.attach(peer, self._unsure()):
            if not peer.identity and peer.connection is not None:
                # Without a credential, the address is what the core can tell of the link.
                self._core.came_from(peer.number, peer.connection.address, now_ms)
            return True
        self._counters["connections_refused_total"] += 1
        reason = f"user {peer.identity} has links.user_connections_max connections already"
        self._core.malformed(peer.number, "limit", reason, now_ms)
        return False

    def _admit_held(self, listener: Listener, now_ms: int) -> bool:
        """Admit the peer of the message that the last turn held back; False: it is held still.

        Held is a message whose connection the guard has not noted yet: the message came before the
        monitor's word of the connection. Once admitted, its commands are done in shares, as others
        that wait: catch_up().
        """
        head, arrived = self.held.pop(listener)
        old = self._peers.routes(listener).get(head.bytes)
        try:
            peer = self._admit(listener, head, arrived, old, now_ms)
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._core.failed(0, "receiving", error, now_ms)
            return True
        if peer is not None:
            peer.queued = Waiting()
            peer.queue(arrived)
            self.queued[peer.number] = peer
        return listener not in self.held

    def _note(self, listener: Listener, head: zmq.Frame | None, now_ms: int) -> bool:
        """Have the guard note new connections until it has noted the one of a message.

        libzmq tells of each accepted connection by an event of the listener's monitor, before the
        connection's first message comes, but maybe behind many other events. head: the message's
        first frame; None: note some. False: the connection may be among those that are not noted
        yet; True: it is noted, or has ended since.
        """
        monitor = listener.monitor
        if monitor is None:
            return True
        for _ in range(_NOTES_MAX):
            if (head is not None and self._is_noted(listener, head)) or not has_events(monitor):
                return True
            self.ended += self._guard.drain(
                monitor, now_ms, EVENTS_A_TURN, authenticated=listener.authenticated
            )
        return (head is not None and self._is_noted(listener, head)) or not has_events(monitor)

    def _is_noted(self, listener: Listener, head: zmq.Frame) -> bool:
        """Whether the guard has noted a message's connection: else the message is held.

        An id that libzmq gives is judged by how many connections have come: see is_given(). So it
        counts as noted only once the guard knows of that many.
        """
        numbering, accepted = listener.numbering, self._guard.connections.accepted
        is_given = numbering is None or numbering.is_given(head.bytes, accepted)
        return is_given and self._peers.is_known(head)

    def _is_numbered(self, numbering: Numbering, head: zmq.Frame) -> bool:
        """Whether a message came by an id that its peer may have; False: its connection is cut.

        A peer may choose its id, but not one that libzmq gives by itself to others: Numbering knows
        which those are.
        """
        if numbering.is_given(head.bytes, self._guard.connections.accepted):
            return True
        self._counters["claimed_ids_total"] += 1
        connection = self._peers.connection(head)
        if connection is not None:
            self._guard.cut(connection, "it claims a routing id of libzmq's own")
        return False

    def _unsure(self) -> set[int]:
        """Return descriptors of ended connections that never spoke: see Peers.attach()."""
        ended, count, silent = self._silent
        if ended is not self.ended:  # The core was told of those.
            ended, count, silent = self.ended, 0, set()
        silent.update(connection.fd for connection in ended[count:] if not connection.spoke)
        self._silent = ended, len(ended), silent
        return silent

    def _malformed(self, peer: Peer, error: RemoteProtocolError, now_ms: int) -> None:
        """Have the core end a link whose message could not be decoded, with an event."""
        self._counters["malformed_total"] += 1
        self._report(
            "malformed",
            {"link": peer.number, "identity": peer.identity, "code": error.code,
             "reason": error.reason},
        )  # fmt: skip
        self._core.malformed(peer.number, error.code, error.reason, now_ms)
