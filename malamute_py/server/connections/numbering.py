"""Routing ids that libzmq gives by itself: which ones it gave, and whether a peer claims the next.

Owns what a ROUTER socket hides. libzmq 4.3.5 numbers peers that bring no id of their own one after
the other: a byte 0 and four bytes. A peer may bring any id, and when the next number is taken
libzmq aborts the process (`zmq_assert (ok)` in routing_socket_base_t::add_out_pipe). The rules: no
peer knows where the numbers begin; a message by a number that was not given costs its connection;
while connections come in, a peer of our own asks which number is next, and when one of the numbers
ahead is taken, every connection that has said nothing is cut, the one that claims it among them.
ARCHITECTURE.md, "What a peer may cost", says how much of a chance that leaves.

Sending to a number shows whether it is taken. Honest peers may have been given the first numbers
after the answer meanwhile. So these are left out, and a number counts as claimed only when a second
answer is still below it. The message that is sent is a PONG, which a client may always be sent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from typing import Any, Final

import zmq

from malamute_protocol.commands import Pong
from malamute_protocol.framing import encode_message

_LEFT_OUT: Final = 64
_AHEAD: Final = 256
"""Numbers ahead of the next one that are tried. Measured: 40 connections come between two looks at
most."""
_EACH_MS: Final = 10
_MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
_NOBLOCK: Final = int(zmq.NOBLOCK)
HARMLESS: Final = encode_message([Pong(0)])
"""A message that no peer minds: sending it tells whether the socket knows the peer."""


def seed_libzmq() -> None:
    """Have the next socket begin its numbers where no peer can know.

    libzmq draws the first number from the C library's rand(), which it never seeds.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


class Numbering:
    """The numbers of one ROUTER socket; used by the thread that has the socket."""

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[bytes]) -> None:
        """Learn the first number that libzmq gives at a ROUTER socket, by a peer of our own.

        socket: not yet bound for clients, so that it gets only what is sent here.
        """
        self._context = context
        self._socket = socket
        # The send() of pyzmq's base class, which costs half as much: as in peers.py.
        self._send = super(zmq.Socket, socket).send
        self._token = secrets.token_bytes(16)
        self._name = f"inproc://malamute-{secrets.token_hex(16)}"
        self._asked: zmq.Socket[bytes] | None = None
        """Our own peer, from ask() until its message comes."""
        self._at_ms = 0
        """Time before which no number is asked for."""
        self._taken: list[int] = []
        """Numbers ahead of the last answer to which a message could be sent."""
        self._own = 0
        """How many numbers our own peers took."""
        socket.bind(self._name)
        self.ask(0)
        # The first frame is the id that libzmq gave to our own peer, the second one its token.
        self._first = _number(socket.recv())
        socket.recv()
        self._end_question()

    def ask(self, now_ms: int) -> None:
        """Connect a peer of our own, whose message will come by the next number, as all peers' do.

        The loop calls it when connections came in; the message is recognized by answers() and given
        to is_claimed(). Nothing is done while an answer is awaited or one was asked for lately.
        """
        if self._asked is None and now_ms >= self._at_ms:
            self._at_ms = now_ms + _EACH_MS
            try:
                asked = self._context.socket(zmq.DEALER)
            except zmq.ZMQError as error:
                if error.errno != errno.EMFILE:
                    raise
                # No descriptor is left, so that no peer comes in, either.
                return
            self._own += 1  # our own peer takes a number, too: is_given() counts these
            self._asked = asked
            self._asked.setsockopt(zmq.LINGER, 0)
            self._asked.connect(self._name)
            # No client knows the token, so that no client's message can pass for this one.
            self._asked.send(self._token)

    def answers(self, frames: list[Any]) -> bool:
        """Whether a message that the socket received is the one that ask() had sent."""
        return self._asked is not None and len(frames) == 1 and frames[0] == self._token

    def is_claimed(self, routing_id: bytes) -> bool:
        """Take the message that ask() had sent, and look at the numbers ahead of its own.

        Returns whether a peer claimed a number that libzmq has still to give; the caller then cuts
        every connection that has said nothing yet.
        """
        self._end_question()
        number = _number(routing_id)
        # Found taken the last time, and still ahead of the next number: not given by libzmq since.
        # The mask: numbers begin again at 0 after 2^32.
        claimed = any((each - number) & 0xFFFFFFFF <= _AHEAD for each in self._taken)
        # The first ones may have been given to honest peers since the message was sent.
        first = number + _LEFT_OUT
        self._taken = [each for each in range(first, first + _AHEAD) if self._is_taken(each)]
        if self._taken:
            # A second answer, asked for at once, decides.
            self._at_ms = 0
            self.ask(0)
        return claimed

    def is_given(self, routing_id: bytes, accepted: int) -> bool:
        """Whether a message's routing id is plausible; False: a peer made it up, and is cut.

        accepted: connections that have come so far.
        """
        if routing_id[0] != 0:
            return True  # The peer brought the id, and it cannot be one of libzmq's own.
        # libzmq has given one number to each connection and to each peer of our own.
        distance = (_number(routing_id) - self._first) & 0xFFFFFFFF  # 2^32 is followed by 0
        return len(routing_id) == 5 and distance <= accepted + self._own

    def _is_taken(self, number: int) -> bool:
        """Whether a peer has the routing id that libzmq would give as this number.

        Sending the first frame tells: it fails with EHOSTUNREACH where no peer has the id.
        """
        try:
            self._send(b"\0" + (number & 0xFFFFFFFF).to_bytes(4, "big"), _MORE)
        except zmq.Again:
            return True  # there is such a peer, whose queue is full
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        # The message that was begun has to be completed.
        self._send(HARMLESS[0], _NOBLOCK)
        return True

    def _end_question(self) -> None:
        """Close our own peer, if there is one: its message has come, or is not wanted."""
        if self._asked is not None:
            self._asked.close(0)
            self._asked = None

    def close(self) -> None:
        """Close our own peer."""
        self._end_question()


def _number(routing_id: bytes) -> int:
    """Return the number in a routing id that libzmq gave: behind the byte 0."""
    return int.from_bytes(routing_id[1:], "big")
