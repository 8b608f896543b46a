"""The ZAP handler for PLAIN and CURVE, which tells libzmq whom a connection belongs to.

Owns the answers to libzmq's questions, and nothing about permissions. The rule: a peer that is not
in the tables of credentials.py is denied, and the identity comes from the table, never from the
peer. The handler has a thread of its own; passwords are hashed by a few more, because a hash takes
50 ms by intent, in the order of attempts.py. Source: ZeroMQ RFC 27 (ZAP).
"""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq
import zmq.utils.z85

from malamute_py.config import Authentication
from malamute_py.server.authentication.attempts import Answers, Origin, Pauses, Turns
from malamute_py.server.authentication.credentials import (
    PlainTable,
    client_keys,
    plain_users,
    read_server_key,
)
from malamute_py.server.connections.numbering import seed_libzmq
from malamute_py.server.errors import StartError

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"malamute"
"""The ZAP domain that this handler answers for; each guarded socket asks in its name."""

_WAITING_MAX, _ADDRESS_WAITING_MAX, _ORIGIN_WAITING_MAX = 512, 128, 16
"""Attempts that wait for a hash: for users in all, for users of one address, for one name at one
address, whether a user has it or not."""
_STRANGERS_MAX = 4_096
"""Attempts for names that no user has: so many wait for a turn, and as many for their answer.

There may be as many connections that have not sent a message."""
_OK, _LATER, _DENIED = b"200", b"300", b"400"
"""ZAP's status codes; a peer that is told 300 tries again by itself."""


class _Attempt(NamedTuple):
    """A password to check."""

    by_user: Origin
    """Address and user; no user ("") where none has the name given: all such names share it."""
    by_digest: Origin
    """Address and a digest of the name given: for pauses, and the turns of names without a user."""
    password: bytes
    table: PlainTable
    """The users when the attempt began: they may be others when its hash is done."""
    reply: tuple[bytes, ...]
    """The frames that lead the answer back: number of the session, delimiter, number of the
    request."""


class Authenticator:
    """Answers libzmq's questions about new connections, in a thread of its own."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: Authentication,
        clock: Callable[[], int],
        denied: Callable[[str, str, str], None],
        paused: Callable[[str, str, int], None],
        erred: Callable[[Exception], None],
    ) -> None:
        """Read the tables of credentials, bind the handler's socket, and start the threads.

        denied: called with (mechanism, address, why) for each connection that was turned away; why:
        "credential", "paused" (wrong too often) or "busy" (too many wait). paused: called with
        (user, address, milliseconds) when a pause begins. erred: called with an error that no code
        foresaw, for which one attempt was denied. Raises ConfigError for a bad table, StartError
        when the context has a handler already.
        """
        self._settings = settings
        self._clock = clock
        self._denied = denied
        self._paused = paused
        self._erred = erred
        self._plain = PlainTable({})
        self._clients: dict[bytes, str] = {}
        """Public key of CURVE -> user."""
        self._secret = b""
        """The broker's secret key of CURVE."""
        if settings.mechanism == "plain":
            self._plain = PlainTable(plain_users(settings))
        else:
            self._secret = read_server_key(settings.server_key_file)
            self._clients = client_keys(settings)
        seed_libzmq()  # before each ROUTER socket: see numbering.py
        # Answers go in another order than questions come, which a REP socket cannot do.
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        try:
            self._socket.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            self._socket.close(0)
            if error.errno != errno.EADDRINUSE:
                raise
            raise StartError(
                "this zmq.Context has another authentication handler",
                ZAP_ENDPOINT,
                "give the broker a context of its own",
            ) from None
        self._pauses = Pauses()
        self._turns: Turns[_Attempt] = Turns(
            all_max=_WAITING_MAX, address_max=_ADDRESS_WAITING_MAX, origin_max=_ORIGIN_WAITING_MAX,
            strangers_max=_STRANGERS_MAX,
        )  # fmt: skip
        self._hashing = 0
        """Attempts that the threads have and that were not judged."""
        self._took_s = 0.05
        """Seconds that the last hash took."""
        self._work: queue.SimpleQueue[_Attempt | None] = queue.SimpleQueue()
        self._done: deque[tuple[_Attempt, bool]] = deque()
        """Attempts that were hashed, and whether the password is right."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Wakes the handler's thread, as a hash is done or the broker ends."""
        self._stopping = False
        hashers = settings.hash_threads if settings.mechanism == "plain" else 0
        self._unhashed: Answers[_Attempt] = Answers(max(1, hashers), _STRANGERS_MAX)
        """Attempts that get the answer of a wrong password after the time of a hash."""
        self._threads = [
            threading.Thread(target=self._hash, name=f"malamute-hash-{number}", daemon=True)
            for number in range(hashers)
        ]
        self._threads.append(threading.Thread(target=self._run, name="malamute-zap", daemon=True))
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.close()
            raise StartError(
                str(error), "authentication",
                "raise the limit of tasks, ulimit -u or TasksMax, or lower hash_threads",
            ) from None  # fmt: skip

    @property
    def public_key(self) -> bytes:
        """The public key that clients need for CURVE; empty otherwise."""
        return zmq.curve_public(self._secret) if self._secret else b""

    def renew(self, settings: Authentication) -> None:
        """Take other users from a reload; the mechanism stays. Raises ConfigError: none changed."""
        if self._settings.mechanism == "plain":
            # before: where a user's hash is the same, its password goes on needing no new hash.
            self._plain = PlainTable(plain_users(settings), before=self._plain)
        else:
            self._clients = client_keys(settings)

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Have a listener's socket demand the mechanism; called before the socket is bound."""
        if self._settings.mechanism == "plain":
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def close(self) -> None:
        """Stop answering; new connections are denied from here on."""
        self._stopping = True
        for _ in self._threads[:-1]:  # those that hash; the last one is the handler's
            self._work.put(None)
        os.eventfd_write(self._wake, 1)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._socket.close(0)
        os.close(self._wake)

    # --- the handler's thread ----------------------------------------------------------

    def _run(self) -> None:
        """Run the handler's thread: answer questions until it is stopped.

        Other threads hash the passwords, and write to `_wake` when one is done.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(self._unhashed.wait_ms(_monotonic_ms())))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while self._done:
                    self._hashing -= 1
                    attempt, fits = self._done.popleft()
                    self._judged(attempt, fits)
            if self._socket in ready:
                frames = self._socket.recv_multipart()
                try:
                    self._question(frames)
                except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                    self._erred(error)
                    session, delimiter, _version, number, *_ = frames
                    reply = session, delimiter, number
                    self._answer(reply, b"500", "an error of the broker's")
            # Attempts for names that no user has, whose answers are due as if they had been hashed.
            while (unhashed := self._unhashed.take(_monotonic_ms())) is not None:
                self._answer_stranger(unhashed)
            self._take_turns()

    def _take_turns(self) -> None:
        """Hand the attempts whose turns come to the threads that hash, while one of them is free.

        Attempts before them that need no hash have their answers put off for as long as one takes.
        """
        # All threads hash but one, which answers libzmq.
        while self._hashing < len(self._threads) - 1:
            now_ms = self._clock()
            # No hash is needed while the address has a pause for names that no user has.
            free, attempt = self._turns.take(
                lambda attempt, now_ms=now_ms: self._pauses.holds(attempt.by_user, now_ms)  # type: ignore[misc]
            )
            for unhashed in free:
                early = self._unhashed.put(
                    unhashed.by_digest, unhashed, _monotonic_ms(), int(self._took_s * 1_000)
                )
                if early is not None:  # too many answers wait: the first one comes early
                    self._answer_stranger(early)
            if attempt is None:
                return
            if self._pauses.holds(attempt.by_digest, now_ms):
                # A pause of the name has begun while the attempt waited.
                self._pause(attempt)
            else:
                self._hashing += 1
                self._work.put(attempt)

    def _answer_stranger(self, attempt: _Attempt) -> None:
        """Answer an attempt for a name that no user has as if its password had been hashed.

        Hashes of a flood of such names would keep the processors busy; no hash, an answer at once
        or another answer would tell that no user has the name.
        """
        if self._pauses.holds(attempt.by_digest, self._clock()):
            self._pause(attempt)
        else:
            self._judged(attempt, fits=False)

    def _hash(self) -> None:
        """Run one of the threads that hash passwords; the handler's thread judges the outcome."""
        while (attempt := self._work.get()) is not None:
            fits = False
            if not self._stopping:  # else the rest is passed through unhashed
                began_s = time.monotonic()
                try:
                    fits = attempt.table.fits(attempt.by_user.name, attempt.password)
                except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                    self._erred(error)
                # For answers that are to look as if a password had been hashed.
                self._took_s = time.monotonic() - began_s
            self._done.append((attempt, fits))
            os.eventfd_write(self._wake, 1)

    def _question(self, frames: list[bytes]) -> None:
        """Answer libzmq's question about a new connection, or queue its password to be hashed.

        An attempt with a password is filed under two names: the user's, which is "" for all names
        that no user has, and a digest of the name given, which tells those names apart.
        """
        session, delimiter, *request = frames
        if len(request) < 6 or request[0] != b"1.0":
            _, number, *_ = (*request, b"", b"")  # the version, then the request's number, if any
            self._answer((session, delimiter, number), b"500", "bad request")
            return
        # The frames of ZAP: version, number, domain, address, identity, mechanism, credentials.
        _, number, domain, address, _, mechanism, *given = request
        where = address.decode("ascii", "replace")
        reply = session, delimiter, number
        identity = ""
        if domain == ZAP_DOMAIN:
            if mechanism == b"PLAIN" and len(given) == 2:
                name, password = given
                by_user = Origin(where, self._plain.name(name))
                # A digest has a bound, as a name has not. No user's name begins with a NUL.
                digest = hashlib.blake2b(name, digest_size=16).hexdigest()
                by_digest = Origin(where, f"\0{digest}")
                self._try(_Attempt(by_user, by_digest, password, self._plain, reply))
                return
            if mechanism == b"CURVE" and len(given) == 1 and len(given[0]) == 32:
                (public_key,) = given
                identity = self._clients.get(zmq.utils.z85.encode(public_key), "")
        if identity:
            self._answer(reply, _OK, "OK", identity)
        else:
            self._denied(mechanism.decode("ascii", "replace"), where, "credential")
            self._answer(reply, _DENIED, "not one of ours")

    def _try(self, attempt: _Attempt) -> None:
        """Answer an attempt with a password that needs no hash, and have any other wait for one."""
        user, now_ms = attempt.by_user.name, self._clock()
        if user and self._plain.is_remembered(user, attempt.password, now_ms):
            self._answer(attempt.reply, _OK, "OK", user)
        elif self._pauses.holds(attempt.by_digest, now_ms):
            self._pause(attempt)
        else:
            turn = attempt.by_user if user else attempt.by_digest
            # An attempt that does not wait (any longer), as too many do: this one or another.
            surplus = self._turns.put(turn, attempt, known=bool(user))
            if surplus is attempt or (surplus is not None and surplus.by_user.name):
                self._denied("PLAIN", surplus.by_user.address, "busy")
                self._answer(surplus.reply, _LATER, "too many wait, try again")
            elif surplus is not None:
                self._answer_stranger(surplus)

    def _pause(self, attempt: _Attempt) -> None:
        """Deny an attempt for a name that has a pause."""
        self._denied("PLAIN", attempt.by_user.address, "paused")
        # ZAP's 300, so that the peer tries again: it may be the user, with the right password,
        # beside an attacker who guesses.
        self._answer(attempt.reply, _LATER, "wrong too often, wait")

    def _judged(self, attempt: _Attempt, fits: bool) -> None:
        """Answer an attempt by whether its password fits, and count a wrong one for the pauses."""
        by_user, now_ms = attempt.by_user, self._clock()
        if attempt.table is not self._plain:
            self._answer(attempt.reply, _LATER, "the users were read anew, try again")
            return
        if fits:
            self._plain.remember(by_user.name, attempt.password, now_ms)
            self._pauses.succeeded(attempt.by_digest)
            self._answer(attempt.reply, _OK, "OK", by_user.name)
            return
        pause_ms = self._pauses.failed(attempt.by_digest, now_ms)
        if not by_user.name:
            # No user has the name: the wrong attempts for all such names of the address are counted
            # together, too. While the pause for these holds, none of them is hashed.
            pause_ms = self._pauses.failed(by_user, now_ms)
        if pause_ms:
            self._paused(by_user.name, by_user.address, pause_ms)
        self._denied("PLAIN", by_user.address, "credential")
        self._answer(attempt.reply, _DENIED, "not one of ours")

    def _answer(self, reply: tuple[bytes, ...], code: bytes, text: str, identity: str = "") -> None:
        """Send libzmq an answer of ZAP. identity: of the peer, where it is let in."""
        session, delimiter, number = reply
        # Version, number of the request, status, its text, user, metadata.
        frames = [session, delimiter, b"1.0", number, code, text.encode(), identity.encode(), b""]
        self._socket.send_multipart(frames)


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
