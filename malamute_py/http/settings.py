"""Settings that a broker gives to its HTTP side when it starts it.

Owns the message by which a broker starts its HTTP side, and the reading of the token. The rule: a
secret comes by standard input or from a file that is its owner's alone, never by an argument, which
every user of the machine can read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from malamute_protocol import DEFAULT_ENDPOINT
from malamute_py.client.settings import Credential, Curve, Plain
from malamute_py.sections import ConfigError, HttpSection, open_to_others

TOKEN_CHARACTERS_MIN: Final = 16


class Start(msgspec.Struct, frozen=True):
    """The first line of standard input of a process that a broker starts."""

    http: HttpSection
    endpoint: str = DEFAULT_ENDPOINT
    user: str = ""
    password: str = ""
    server_key: str = ""
    public_key: str = ""
    secret_key: str = ""

    def credential(self) -> Credential:
        """The credential that the broker made for this process."""
        if self.server_key:
            return Curve(self.server_key, self.public_key, self.secret_key)
        return Plain(self.user, self.password) if self.user else None


def read_token(path: str) -> str:
    """The token in a file; empty without a file.

    Raises ConfigError: others could read the file, or what it holds is too short to be a secret.
    """
    key = "http.token_file"
    if not path:
        return ""
    try:
        with open(Path(path).expanduser(), "rb", opener=_at_once) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(key, f"{path} is no regular file")
            text = file.read(4_096).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(key, f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(key, f"{path} is not plain text") from None
    if open_to_others(facts, 0o077):
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
