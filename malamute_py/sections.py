"""The section of the configuration for the HTTP side, and the error of all sections.

Owns what the HTTP side needs of the configuration, who may read files with secrets, and what is the
secret in one. `malamute http` may run without the broker's packages, beside a broker elsewhere, and
config/sections.py names the bounds of the core. The rule: this module imports nothing of the
broker. Source: deploy/malamute.toml.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from malamute_protocol.errors import MalamuteError

TOKEN_CHARACTERS_MIN: Final = 16
_for_another: ContextVar[bool] = ContextVar("for_another", default=False)


class ConfigError(MalamuteError):
    """A setting is unknown or wrong: `key` and `why` say which and what to write."""

    def __init__(self, key: str, why: str, place: str = "") -> None:
        """key: the dotted name in the configuration, or in the file that `place` names.

        place: FILE or FILE:LINE of another file than the configuration's; `key` begins with it.
        """
        self.name = key
        self.place = place
        self.key = ": ".join(part for part in (place, key) if part)
        self.why = why
        super().__init__(f"{self.key}: {why}" if self.key else why)


def open_to_others(facts: os.stat_result, refused: int) -> int:
    """Return the bits of a file's mode that let others use its secret, of those that are refused.

    A file of root's may be read by its group, as an operator put the program into that group:
    Kubernetes and Docker hand secrets so to a program that is not root, and PostgreSQL takes them.
    """
    # The program is not root, or root judges for one that is not: see judged_for_another().
    for_its_group = os.geteuid() != 0 or (_for_another.get() and facts.st_gid != 0)
    if facts.st_uid == 0 and for_its_group:
        refused &= ~0o040
    return facts.st_mode & refused


def of_another(facts: os.stat_result) -> bool:
    """Whether a file belongs to a user who is neither root nor that of the program.

    Never where root judges for a program of another user (judged_for_another).
    """
    owners = {0, os.geteuid()}
    return facts.st_uid not in owners and not (os.geteuid() == 0 and _for_another.get())


@contextlib.contextmanager
def judged_for_another() -> Iterator[None]:
    """Have root judge files with secrets for a program that runs as another user.

    Root checks the configuration of a broker that systemd runs as a user of its own. The file may
    then belong to that user, or be root's and readable by a group other than root's.
    """
    token = _for_another.set(True)
    try:
        yield
    finally:
        _for_another.reset(token)


class HttpSection(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The HTTP side: metrics, health and the console, served by a process of its own."""

    bind: str = ""
    """HOST:PORT; empty: there is no HTTP side."""
    token_file: str = ""
    """A file with the token that a request has to bring."""
    labels_max: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100
    connections_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 64
    request_ms: Annotated[int, msgspec.Meta(ge=100)] = 10_000
    console: Literal["off", "local", "login", "open"] = "local"
    """People who are shown the console: none; those at this machine; those who log in by name, also
    from other machines; all who reach the address."""
    session_idle_ms: Annotated[int, msgspec.Meta(ge=1_000)] = 30 * 60_000
    session_ms: Annotated[int, msgspec.Meta(ge=1_000)] = 12 * 3_600_000


def parse_bind(text: str) -> tuple[str, int, bool]:
    """Return host and port of the setting http.bind, and whether other machines may reach them.

    Raises ConfigError for a text that is not HOST:PORT.
    """
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (separator and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(
            "http.bind", f"{text!r} is no address; write 127.0.0.1:9798 (port 0: any free one)"
        )
    try:
        public = not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: all but localhost may be reached from elsewhere
        public = host != "localhost"
    return host, int(port), public


def check_http(http: HttpSection) -> None:
    """Raise ConfigError for an address that is none, or that is open to other machines."""
    _, _, public = parse_bind(http.bind) if http.bind else ("", 0, False)
    if public and not http.token_file:
        raise ConfigError(
            "http.bind",
            f"{http.bind} can be reached from other machines: set http.token_file to a file with a "
            "token that requests have to bring, or bind 127.0.0.1",
        )


def serves_console(http: HttpSection) -> bool:
    """Whether the HTTP side has the console; where other machines reach it, only if told so."""
    _, _, public = parse_bind(http.bind)
    return http.console in ("login", "open") or (http.console == "local" and not public)


def secret_line(data: bytes) -> bytes:
    """Return the password or token that a file holds: its first line, without the line's end."""
    return data.partition(b"\n")[0].removesuffix(b"\r")


def read_token(path: str) -> str:
    """Return the token of the HTTP side, from the file that http.token_file names; "": no file.

    Raises ConfigError: others could read the file, or what it holds is too short to be a secret.
    """
    key = "http.token_file"
    if not path:
        return ""
    try:
        # _at_once: to open a FIFO does not wait for a writer.
        with open(Path(path).expanduser(), "rb", opener=_at_once) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(key, f"{path} is no regular file")
            text = secret_line(file.read(4_096)).decode("ascii")
    except OSError as error:
        raise ConfigError(key, f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(key, f"{path} is not plain text") from None
    if open_to_others(facts, 0o077):  # the group included
        mode = stat.S_IMODE(facts.st_mode)
        raise ConfigError(
            key, f"{path} has mode {mode:04o}: others can use it; type: chmod 600 {path}"
        )
    if len(text) < TOKEN_CHARACTERS_MIN or not text.isprintable() or " " in text:
        raise ConfigError(
            key,
            f"{path} does not hold one word of {TOKEN_CHARACTERS_MIN} characters or more; "
            f"type: (umask 077; openssl rand -hex 32 > {path})",
        )
    return text


def _at_once(path: str, flags: int) -> int:
    """Open a file; the open of a FIFO would wait for a writer without O_NONBLOCK."""
    return os.open(path, flags | os.O_NONBLOCK)
