"""Passwords and keys: the tables of the configuration, and the files with their secrets.

Owns credentials and nothing about permissions. The rules: a password is stored as a hash only, and
a file with secrets that others could read or write is refused by name. Source: RFC 7914 (scrypt);
zmq_curve(7).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping

import zmq
import zmq.utils.z85

from malamute_py.config import Authentication
from malamute_py.sections import ConfigError, of_another, open_to_others
from malamute_py.server.authentication.carriers import Carriers

_LOG2_N, _R, _P = 14, 8, 1
_SCRYPT_MEMORY = 64 << 20
_SERVER_KEY = "authentication.server_key_file"
USERS_FILE = "authentication.users_file"
_REMEMBERED_MS = 3_600_000
"""Time for which a password that was right needs no hash."""


def hash_password(password: str, *, salt: bytes | None = None) -> str:
    """Make the line for a password in the configuration: scrypt with a fresh salt."""
    salt = secrets.token_bytes(16) if salt is None else salt
    digest = _scrypt(password.encode(), salt, _LOG2_N, _R, _P)
    return f"scrypt:{_LOG2_N}:{_R}:{_P}:{_text(salt)}:{_text(digest)}"


def _scrypt(password: bytes, salt: bytes, log2_n: int, r: int, p: int) -> bytes:
    """Hash a password; about 50 ms with the parameters of hash_password()."""
    return hashlib.scrypt(
        password, salt=salt, n=1 << log2_n, r=r, p=p, maxmem=_SCRYPT_MEMORY, dklen=32
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class _Hash:
    """A password as it is stored: a hash and how it was made."""

    __slots__ = ("_digest", "_parameters", "_salt")

    def __init__(self, key: str, text: str) -> None:
        """Read what hash_password() returned. Raises ConfigError for the setting `key`."""
        try:
            # The parameters of scrypt (RFC 7914): cost, block size, parallelization.
            kind, log2_n, r, p, salt, digest = text.split(":")
            self._parameters = (int(log2_n), int(r), int(p))
            self._salt = base64.b64decode(salt, validate=True)
            self._digest = base64.b64decode(digest, validate=True)
            good = kind == "scrypt" and len(self._digest) == 32 and len(self._salt) >= 8
            # Bounds of what a hash may cost: its memory stays within _SCRYPT_MEMORY.
            good = good and 10 <= int(log2_n) <= 15 and 1 <= int(r) <= 8 and 1 <= int(p) <= 4
        except ValueError:
            good = False
        if not good:
            raise ConfigError(
                key,
                "is not a password hash; `malamute user hash` makes one of a password",
            )

    def fits(self, password: bytes) -> bool:
        """Whether this is the password; takes the time of a hash."""
        found = _scrypt(password, self._salt, *self._parameters)
        return hmac.compare_digest(found, self._digest)


def check_hash(key: str, text: str) -> None:
    """Raise ConfigError unless the text is what hash_password() returns."""
    _Hash(key, text)


class PlainTable:
    """Users and their hashed passwords; fits() may be called from any thread."""

    def __init__(
        self,
        users: Mapping[str, str],
        *,
        where: str = "authentication.users",
        before: PlainTable | None = None,
    ) -> None:
        """users: name -> what hash_password() returned. Raises ConfigError for a wrong hash.

        where: the setting that has them. before: the table in force before a reload; a user whose
        hash is the same keeps the remembered password.
        """
        self._texts = dict(users)
        self._users = {name: _Hash(f"{where}.{name}", text) for name, text in users.items()}
        # A fleet that reconnects at once would otherwise wait for 50 ms a client. So passwords that
        # were right lately are remembered, as a digest under a key that is in this memory only.
        self._key = secrets.token_bytes(32)
        self._right: dict[str, tuple[bytes, int]] = {}
        """Name -> digest of the right password, and until when it is remembered."""
        # The password for a name that no user has is compared with this hash, and takes as long.
        if before is None:
            self._decoy = _Hash("", hash_password(secrets.token_hex(8)))
            return
        self._decoy, self._key = before._decoy, before._key
        self._right = {
            name: right
            for name, right in before._right.copy().items()  # other threads add to it
            if users.get(name) == before._texts.get(name)
        }

    def name(self, user: bytes) -> str:
        """Return the name if a user has it; empty: no user has it."""
        name = user.decode("utf-8", "replace")
        return name if name in self._users else ""

    def is_remembered(self, name: str, password: bytes, now_ms: int) -> bool:
        """Whether this password was right for the user within the last hour; needs no hash."""
        mark, until_ms = self._right.get(name, (b"", 0))
        return now_ms < until_ms and hmac.compare_digest(mark, self._mark(name, password))

    def remember(self, name: str, password: bytes, now_ms: int) -> None:
        """Remember that this password is right for the user."""
        self._right[name] = self._mark(name, password), now_ms + _REMEMBERED_MS

    def fits(self, name: str, password: bytes) -> bool:
        """Whether this is the user's password; takes the time of a hash, user or no user."""
        known = self._users.get(name)
        # An unknown name takes as long as a wrong password, so that names cannot be probed.
        return (known or self._decoy).fits(password) and known is not None

    def _mark(self, name: str, password: bytes) -> bytes:
        """Digest a name and a password; the name's length in front tells where it ends."""
        user = name.encode()
        return hmac.digest(self._key, len(user).to_bytes(4, "little") + user + password, "sha256")


def read_guarded(path: str, key: str, refused: int, advice: str) -> bytes:
    """Read a file with secrets; raises ConfigError when others could read or write it.

    key: the setting that names the file. refused: bits of the mode that must not be set. advice:
    the command, without the path, that mends the mode. The file is opened first and its mode asked
    of the descriptor, so that the file that is read is the one that was checked.
    """
    # O_NONBLOCK: to open a FIFO without a writer does not hang the start.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    # Opened without a buffer first, as a buffered file cannot be made of a directory.
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, fd)
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(key, f"{path} is not a regular file; name one")
        exposing = open_to_others(facts, refused)
        if exposing:
            mode = stat.S_IMODE(facts.st_mode)
            does = "write" if exposing & 0o022 else "read"  # 0o022: write, of the group or others
            raise ConfigError(
                key, f"{path} has mode {mode:04o}: others can {does} it; type: {advice} {path}"
            )
        if of_another(facts):
            raise ConfigError(
                key,
                f"{path} belongs to user {facts.st_uid}, who can write it; "
                f"type: chown {os.geteuid()} {path}",
            )
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read()


def read_users_file(path: str) -> dict[str, str]:
    """Return name -> password hash from a users file of lines `name hash`, the older form.

    Empty lines and lines that begin with # are skipped. Raises ConfigError.
    """
    key = USERS_FILE
    try:
        # 0o027: the group may read it, and nothing else; others may do nothing.
        lines = read_guarded(path, key, 0o027, "chmod 640").decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, f"{path} cannot be read: {error}") from None
    check_not_cut_short("".join(lines), path)
    users: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, text = line.strip().partition(" ")
        if not text or name in users:
            raise ConfigError(key, f"{path}, line {number}: write `name hash`, each name once")
        users[name] = text.strip()
    return users


def check_not_cut_short(text: str, path: str) -> None:
    """Raise ConfigError where a users file has nothing at all, not even a comment.

    An editor or a copy that failed leaves such a file, and it would shut everybody out.
    """
    if not text.strip():
        why = f"{path} is empty, as if it was cut short; where no user is meant, write # none in it"
        raise ConfigError(USERS_FILE, why)


def plain_users(settings: Authentication) -> dict[str, str]:
    """Return name -> hash of all users, those of the file included. Raises ConfigError."""
    users = dict(settings.users)
    return read_users_file(settings.users_file) | users if settings.users_file else users


def carriers_of(settings: Authentication) -> Carriers:
    """Make the table of which credential may have which identity, for the core and commands.

    Raises ConfigError.
    """
    if settings.mechanism == "none":
        return Carriers((), {})
    users = settings.clients if settings.mechanism == "curve" else plain_users(settings)
    return Carriers(users, settings.identities)


def read_server_key(path: str) -> bytes:
    """Return the broker's secret CURVE key in Z85; the first start makes its file.

    Raises ConfigError.
    """
    try:
        if path:
            with contextlib.suppress(FileExistsError):
                write_secret_key(path)
        return secret_key_of(path)
    except OSError as error:
        raise ConfigError(_SERVER_KEY, f"{path} cannot be read or made: {error.strerror}") from None


def write_secret_key(path: str) -> None:
    """Make a CURVE key pair; its secret key goes to a new file, for its owner only."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        _, secret = zmq.curve_keypair()
        file.write(secret + b"\n")
        # On the disk before a client is given its public key: another pair would shut it out.
        file.flush()
        os.fsync(file.fileno())


def secret_key_of(path: str) -> bytes:
    """Return the broker's secret CURVE key, of the file with it. Raises ConfigError, OSError."""
    if not path:
        raise ConfigError(
            _SERVER_KEY, 'mechanism = "curve" needs the name of a file for the broker\'s key'
        )
    secret = read_guarded(path, _SERVER_KEY, 0o077, "chmod 600").strip()
    return checked_key(_SERVER_KEY, secret.decode("ascii", "replace"))


def client_keys(settings: Authentication) -> dict[bytes, str]:
    """Return the names of all clients of CURVE, by their public keys. Raises ConfigError."""
    found: dict[bytes, str] = {}
    for name, text in settings.clients.items():
        public = checked_key(f"authentication.clients.{name}", text)
        if public in found:
            raise ConfigError(
                f"authentication.clients.{name}",
                f"is also the key of {found[public]}: one key, one identity",
            )
        found[public] = name
    return found


def check_credentials(settings: Authentication) -> None:
    """Check users and keys as a start does, but make no key. Raises ConfigError.

    Called for a check of the configuration, and by a reload before it takes anything up.
    """
    if settings.mechanism == "plain":
        PlainTable(plain_users(settings))
    elif settings.mechanism == "curve":
        client_keys(settings)
        try:
            secret_key_of(settings.server_key_file)
        except FileNotFoundError:
            pass  # The first start makes it.
        except OSError as error:
            raise ConfigError(
                _SERVER_KEY, f"{settings.server_key_file} cannot be read: {error.strerror}"
            ) from None


def checked_key(key: str, text: str) -> bytes:
    """Return a CURVE key in Z85 as the configuration has it; raises ConfigError."""
    try:
        encoded = text.encode("ascii")
        if len(encoded) != 40 or len(zmq.utils.z85.decode(encoded)) != 32:
            raise ValueError
    except (ValueError, KeyError, UnicodeEncodeError):
        raise ConfigError(key, "is not a CURVE key: 40 characters of Z85") from None
    return encoded
