"""Contexts: brokers by name, and which one a command talks to.

Owns the file of contexts and the order of precedence: --endpoint, --context, MALAMUTE_ENDPOINT,
MALAMUTE_CONTEXT, the context in use, this machine. The rules: no password is ever written here or
taken from the command line, only where to find it; an endpoint that is given on the line or in the
variable gets no credential of a context. The variables are the client's and are no keys of the
broker's configuration. Source: XDG base directory specification.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from malamute_protocol import DEFAULT_ENDPOINT
from malamute_py.cli.absent import nearest
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.replacing import alone_in, replace_whole

if TYPE_CHECKING:
    from malamute_py.client.settings import Credential

ENDPOINT: Final = "MALAMUTE_ENDPOINT"
CONTEXT: Final = "MALAMUTE_CONTEXT"
USER: Final = "MALAMUTE_USER"
PASSWORD: Final = "MALAMUTE_PASSWORD"
KEY_CHARACTERS: Final = 40
"""Length of a CURVE key as text."""


@dataclass(frozen=True)
class Context:
    """The way to reach one broker."""

    endpoint: str = DEFAULT_ENDPOINT
    """One endpoint, or several with commas, which are tried in turn."""
    user: str = ""
    password_env: str = ""
    """Name of the variable that holds the password."""
    password_file: str = ""
    server_key: str = ""
    """CURVE only: the broker's public key."""
    secret_key_file: str = ""
    """CURVE only: a file with this client's secret key."""
    description: str = ""
    identity: str = ""
    """Identity to connect with; the broker puts a free number in place of `{n}`."""
    tracing: str = ""
    """`yes`: commands that can be traced are."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Return the endpoints one by one. Raises CommandFailed: one is no endpoint."""
        found = tuple(part.strip() for part in self.endpoint.split(",") if part.strip())
        for each in found:
            if "://" not in each:
                scheme = "ipc" if "/" in each else "tcp"
                raise CommandFailed(
                    f"{each!r} is no endpoint; did you mean {scheme}://{each}?", USAGE
                )
        return found

    @property
    def authentication(self) -> str:
        """Return the kind of credential, in a word."""
        return "curve" if self.server_key else "plain" if self.user else "none"

    @property
    def asks(self) -> bool:
        """Whether credential() would ask the person for the password: completion must not."""
        kept = self.password_file or self.password_env or PASSWORD in os.environ
        return self.authentication == "plain" and not kept

    def credential(self) -> Credential:
        """Read the secret from its place, or ask for it at the terminal; return the credential.

        None: the context names no user and no key. Raises CommandFailed: the secret is not there.
        """
        if self.server_key:
            return self._curve()
        if not self.user:
            return None
        from malamute_py.client.settings import Plain

        return Plain(self.user, self._password())

    def _password(self) -> str:
        """Return the password from a file, a variable or the terminal.

        Raises CommandFailed: the file or the named variable is missing, or no person can be asked.
        """
        if self.password_file:
            return _password_in(self.password_file)
        name = self.password_env or PASSWORD
        value = os.environ.get(name)
        if value is not None:
            return value
        if self.password_env:
            raise CommandFailed(f"the variable {name} with the password is not set", USAGE)
        if not sys.stdin.isatty():
            raise CommandFailed(
                f"no password for user {self.user}: set {PASSWORD}, or give the context a"
                " --password-file",
                USAGE,
            )
        from getpass import getpass

        return getpass(f"Password of {self.user}: ")

    def _curve(self) -> Credential:
        """Return the CURVE credential, its secret key read from the file.

        Raises CommandFailed: the file cannot be read, or holds no key.
        """
        import zmq

        from malamute_py.client.settings import Curve

        secret = _read(self.secret_key_file).strip() if self.secret_key_file else ""
        if len(secret) != KEY_CHARACTERS:
            raise CommandFailed(
                f"{self.secret_key_file or 'the context'}: no CURVE secret key of 40 characters;"
                " give the context a --secret-key-file",
                USAGE,
            )
        # The file has the secret key alone: the public one follows from it.
        public = zmq.curve_public(secret.encode()).decode()
        return Curve(server_key=self.server_key, public_key=public, secret_key=secret)


def _password_in(path: str) -> str:
    """Return the password in a file. Raises CommandFailed."""
    from malamute_py.sections import secret_line

    password = secret_line(_read(path).encode()).decode()
    if not password:
        raise CommandFailed(f"{path}: its first line is empty, and should be the password", USAGE)
    return password


def _read(path: str) -> str:
    """Return the text of a file with a password or key. Raises CommandFailed."""
    try:
        return Path(path).expanduser().read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CommandFailed(f"{path}: cannot be read ({reason.lower()})", USAGE) from None


@dataclass
class Contexts:
    """All contexts of the person."""

    current: str = ""
    contexts: dict[str, Context] = field(default_factory=dict)

    @classmethod
    def load(cls) -> Contexts:
        """Read the file; a missing file has no contexts. Raises CommandFailed: it is damaged."""
        path = file()
        try:
            table = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise CommandFailed(f"{path}: cannot be read ({error}); mend or remove it") from None
        known = {each.name for each in fields(Context)}  # A later version may have more.
        try:
            return cls(
                str(table.get("current", "")),
                {
                    str(name): Context(**{k: str(v) for k, v in entry.items() if k in known})
                    for name, entry in table.get("contexts", {}).items()
                },
            )
        except (AttributeError, TypeError):
            raise CommandFailed(f"{path}: is not a file of contexts; mend or remove it") from None

    @classmethod
    @contextlib.contextmanager
    def changing(cls) -> Iterator[Contexts]:
        """Give the body the contexts to change, and replace the file whole at its end.

        Another command that changes them waits. Raises CommandFailed: the file is damaged; OSError.
        """
        path = file().resolve()  # A link stays: the file that it leads to is replaced.
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with alone_in(path.parent):
            found = cls.load()
            yield found
            found._save(path)

    def _save(self, path: Path) -> None:
        """Replace the file whole; the caller has the lock. path: of the file itself."""
        table = {
            "current": self.current,
            "contexts": {
                name: {key: value for key, value in asdict(context).items() if value}
                for name, context in sorted(self.contexts.items())
            },
        }
        replace_whole(path, json.dumps(table, indent=2) + "\n")

    def get(self, name: str) -> Context:
        """Return one context. Raises CommandFailed, with the nearest name."""
        found = self.contexts.get(name)
        if found is None:
            hint = nearest(name, self.contexts, "`malamute context ls` lists them")
            raise CommandFailed(f"there is no context {name!r}; {hint}", USAGE)
        return found


def file() -> Path:
    """Return the path of the file of contexts."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "malamute" / "contexts.json"


def chosen(options: dict[str, Any]) -> Context:
    """Return the broker to talk to, by the order of precedence in this file's docstring.

    options: of the command line, `endpoint` and `context_name`, if given. Raises CommandFailed:
    the context that is named is not there.
    """
    endpoint, name = options.get("endpoint"), options.get("context_name")
    if name:
        context = Contexts.load().get(name)
        if not endpoint:
            return context
        # Both on the command line: the person wants the context's credential at this endpoint.
        return Context(**{**asdict(context), "endpoint": endpoint})
    endpoint = endpoint or os.environ.get(ENDPOINT)
    if endpoint:
        # Without the credential of the context in use, which is meant for another broker.
        return Context(endpoint, user=os.environ.get(USER, ""))
    name = os.environ.get(CONTEXT)
    contexts = Contexts.load()
    if name or contexts.current:
        return contexts.get(name or contexts.current)
    return Context(user=os.environ.get(USER, ""))
