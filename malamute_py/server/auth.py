"""Who a connection is: a ZAP handler for PLAIN and CURVE, and the files with their secrets.

Owns credentials and nothing about permissions. The rule: whoever is not in the tables is
denied, and the identity comes from the table, never from the peer. The handler has a
thread of its own, because hashing a password takes 50 ms by intent. Source: DESIGN.md,
section 11; ZeroMQ RFC 27 (ZAP).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq
import zmq.utils.z85

from malamute_py.config import Authentication, ConfigError
from malamute_py.server.errors import StartError
from malamute_py.server.numbering import seed_libzmq
from malamute_py.server.sockets import ZAP_DOMAIN

ZAP_ENDPOINT = "inproc://zeromq.zap.01"

_LOG2_N, _R, _P = 14, 8, 1
_SCRYPT_MEMORY = 64 << 20
_CACHE_MAX = 10_000
_FAILURES_MAX = 20
"""Wrong passwords from one address in FAILURE_PERIOD_MS before it is denied unhashed."""
_FAILURE_PERIOD_MS = 10_000


def hash_password(password: str, *, salt: bytes | None = None) -> str:
    """The line to put into the configuration for a password: scrypt with a fresh salt."""
    salt = secrets.token_bytes(16) if salt is None else salt
    digest = _scrypt(password.encode(), salt, _LOG2_N, _R, _P)
    return f"scrypt:{_LOG2_N}:{_R}:{_P}:{_text(salt)}:{_text(digest)}"


def _scrypt(password: bytes, salt: bytes, log2_n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(
        password, salt=salt, n=1 << log2_n, r=r, p=p, maxmem=_SCRYPT_MEMORY, dklen=32
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class _Hash:
    """A password as stored."""

    __slots__ = ("_digest", "_parameters", "_salt")

    def __init__(self, key: str, text: str) -> None:
        try:
            kind, log2_n, r, p, salt, digest = text.split(":")
            self._parameters = (int(log2_n), int(r), int(p))
            self._salt = base64.b64decode(salt, validate=True)
            self._digest = base64.b64decode(digest, validate=True)
            good = kind == "scrypt" and len(self._digest) == 32 and len(self._salt) >= 8
            good = good and 10 <= self._parameters[0] <= 15
            good = good and 1 <= self._parameters[1] <= 8 and 1 <= self._parameters[2] <= 4
        except ValueError:
            good = False
        if not good:
            raise ConfigError(
                key,
                "is not a password hash; make one with: python -c "
                "'from malamute_py.server.auth import hash_password as h; "
                "import getpass; print(h(getpass.getpass()))'",
            )

    def fits(self, password: bytes) -> bool:
        """Whether this is the password; takes its time."""
        found = _scrypt(password, self._salt, *self._parameters)
        return hmac.compare_digest(found, self._digest)


class PlainTable:
    """Users and their hashed passwords."""

    def __init__(self, users: Mapping[str, str], *, where: str = "authentication.users") -> None:
        """users: name -> what hash_password() returned. Raises ConfigError."""
        self._users = {name: _Hash(f"{where}.{name}", text) for name, text in users.items()}
        # A fleet that reconnects at once would otherwise wait for 50 ms a client, so what was
        # right once is remembered, under a key that nobody else has.
        self._key = secrets.token_bytes(32)
        self._seen: set[bytes] = set()
        self._failures: dict[str, int] = {}
        self._failures_since_ms = 0
        self._nobody = _Hash("", hash_password(secrets.token_hex(8)))

    def identity(self, user: bytes, password: bytes, address: str, now_ms: int) -> str:
        """The user's name, or "" when it is not one of ours with that password."""
        name = user.decode("utf-8", "replace")
        mark = hmac.digest(self._key, len(user).to_bytes(4, "little") + user + password, "sha256")
        if mark in self._seen:
            return name
        if now_ms - self._failures_since_ms >= _FAILURE_PERIOD_MS:
            self._failures_since_ms = now_ms
            self._failures.clear()
        if self._failures.get(address, 0) >= _FAILURES_MAX:
            return ""
        # An unknown name takes as long as a wrong password, so that names cannot be probed.
        known = self._users.get(name)
        if (known or self._nobody).fits(password) and known is not None:
            if len(self._seen) >= _CACHE_MAX:
                self._seen.clear()
            self._seen.add(mark)
            return name
        self._failures[address] = self._failures.get(address, 0) + 1
        return ""


def read_users_file(path: str) -> dict[str, str]:
    """Lines of `name hash`; empty lines and lines that begin with # are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("authentication.users_file", f"{path} cannot be read: {error}") from None
    users: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, text = line.strip().partition(" ")
        if not text or name in users:
            raise ConfigError(
                "authentication.users_file",
                f"{path}, line {number}: write `name hash`, each name once",
            )
        users[name] = text.strip()
    return users


def read_server_key(path: str) -> bytes:
    """The broker's secret CURVE key in Z85; made, readable by its owner only, if there is none."""
    key = "authentication.server_key_file"
    if not path:
        raise ConfigError(key, 'mechanism = "curve" needs the name of a file for the broker\'s key')
    try:
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(zmq.curve_keypair()[1] + b"\n")
                file.flush()
                os.fsync(file.fileno())
        if os.stat(path).st_mode & 0o077:
            raise ConfigError(key, f"{path} can be read by others; type: chmod 600 {path}")
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(key, f"{path} cannot be read or made: {error.strerror}") from None
    return _checked_key(key, secret.decode("ascii", "replace"))


def _checked_key(key: str, text: str) -> bytes:
    try:
        encoded = text.encode("ascii")
        if len(encoded) != 40 or len(zmq.utils.z85.decode(encoded)) != 32:
            raise ValueError
    except (ValueError, KeyError, UnicodeEncodeError):
        raise ConfigError(key, "is not a CURVE key: 40 characters of Z85") from None
    return encoded


class Authenticator:
    """Answers libzmq's questions about new connections, in a thread of its own."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: Authentication,
        clock: Callable[[], int],
        denied: Callable[[str, str], None],
    ) -> None:
        """denied: called with (mechanism, address) for each connection that was turned away.

        Raises ConfigError for a bad table, StartError when the context has a handler already.
        """
        self._settings = settings
        self._clock = clock
        self._denied = denied
        self._plain = PlainTable({})
        self._clients: dict[bytes, str] = {}
        self._secret = b""
        if settings.mechanism == "plain":
            users = dict(settings.users)
            if settings.users_file:
                users = read_users_file(settings.users_file) | users
            self._plain = PlainTable(users)
        else:
            self._secret = read_server_key(settings.server_key_file)
            for name, text in settings.clients.items():
                public = _checked_key(f"authentication.clients.{name}", text)
                if public in self._clients:
                    raise ConfigError(
                        f"authentication.clients.{name}",
                        f"is also the key of {self._clients[public]}: one key, one identity",
                    )
                self._clients[public] = name
        seed_libzmq()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
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
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="malamute-zap", daemon=True)
        self._thread.start()

    @property
    def public_key(self) -> bytes:
        """What clients need for CURVE; empty otherwise."""
        return zmq.curve_public(self._secret) if self._secret else b""

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Make the socket demand the mechanism; before it is bound."""
        if self._settings.mechanism == "plain":
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def close(self) -> None:
        """Stop answering; new connections are denied from here on."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop in ready:
                self._socket.close(0)
                return
            self._socket.send_multipart(self._answer(self._socket.recv_multipart()))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        if len(request) < 6 or request[0] != b"1.0":
            return [b"1.0", (request + [b""] * 2)[1], b"500", b"bad request", b"", b""]
        _, number, domain, address, _, mechanism, *given = request
        where = address.decode("ascii", "replace")
        identity = ""
        if domain == ZAP_DOMAIN:
            if mechanism == b"PLAIN" and len(given) == 2:
                identity = self._plain.identity(given[0], given[1], where, self._clock())
            elif mechanism == b"CURVE" and len(given) == 1 and len(given[0]) == 32:
                identity = self._clients.get(zmq.utils.z85.encode(given[0]), "")
        if identity:
            return [b"1.0", number, b"200", b"OK", identity.encode(), b""]
        self._denied(mechanism.decode("ascii", "replace"), where)
        return [b"1.0", number, b"400", b"not one of ours", b"", b""]
