"""The HTTP side's process: started, watched, started again, and ended with the broker.

Owns the process and the credential that it is given. The rules: the loop knows nothing of it, and a
thread that sleeps waits for what it prints; it dies with the broker, as its input ends then; its
credential is made anew for each run of the broker, is nowhere on disk, and may look and change
nothing of streams. Source: malamute_py/http/__main__.py, the other end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from malamute_py.config import Config, Grant
from malamute_py.extras import EXTRAS
from malamute_py.sections import ConfigError, HttpSection
from malamute_py.server.authentication.credentials import hash_password
from malamute_py.server.authentication.namespaces import HTTP_USER
from malamute_py.server.checkpointing.process import environment
from malamute_py.server.sockets import Listener
from malamute_py.telemetry import Limiter, Log

USER: Final = HTTP_USER
"""The name by which the broker's own HTTP side authenticates."""
_GRANT: Final = Grant(read=["*"], receive=["*"], request=["*"])
"""Permissions to list streams, mailboxes and services."""
_LINE_BYTES: Final = 2_000
_STOP_S: Final = 3.0
_PAUSE_S, _PAUSE_MAX_S = 1.0, 30.0


class HttpCredential(NamedTuple):
    """Credential of the HTTP process; all empty where the broker asks for none."""

    password: str = ""
    password_hash: str = ""
    public_key: str = ""
    secret_key: str = ""


def admit(
    config: Config, credential: HttpCredential | None = None
) -> tuple[Config, HttpCredential]:
    """Return the configuration with the HTTP side as one more user, and that user's credential.

    So its process links to the broker as any client does. Without http.bind nothing is added.
    credential: the one of this run of the broker, for a reload; None: a new one is made. Raises
    ConfigError: the name is taken, a package is missing, or no endpoint can be reached.
    """
    if not config.http.bind:
        return config, HttpCredential()
    for package in (name for name, extra in EXTRAS.items() if extra == "http"):
        if find_spec(package) is None:
            raise ConfigError(
                "http.bind", f"needs the package {package}: pip install 'malamute-py[http]'"
            )
    if all(endpoint.startswith("inproc://") for endpoint in config.listen):
        raise ConfigError("http.bind", "needs a tcp or ipc endpoint in `listen` to ask the broker")
    authentication = config.authentication
    if USER in authentication.users or USER in authentication.clients:
        raise ConfigError("authentication", f"the name {USER} is the broker's own HTTP side's")
    credential = credential or _new_credential(authentication.mechanism)
    if authentication.mechanism == "plain":
        users = {**authentication.users, USER: credential.password_hash}
        authentication = msgspec.structs.replace(authentication, users=users)
    elif authentication.mechanism == "curve":
        clients = {**authentication.clients, USER: credential.public_key}
        authentication = msgspec.structs.replace(authentication, clients=clients)
    permissions = config.permissions
    # Without any permissions in the configuration everything is allowed.
    if permissions and USER not in permissions:
        permissions = {**permissions, USER: _GRANT}
    changed = msgspec.structs.replace(
        config, authentication=authentication, permissions=permissions
    )
    return changed, credential


def _new_credential(mechanism: str) -> HttpCredential:
    """Make a credential for the HTTP side's process, of the mechanism that the broker asks for."""
    if mechanism == "plain":
        password = secrets.token_urlsafe(32)
        return HttpCredential(password, hash_password(password))
    if mechanism == "curve":
        public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
        return HttpCredential(public_key=public_key, secret_key=secret_key)
    return HttpCredential()


def first_line(
    http: HttpSection, listeners: Sequence[Listener], credential: HttpCredential, server_key: str
) -> bytes:
    """Return the first line of the HTTP process's input: its settings, and how to link to us.

    Its form: malamute_py/http/settings.py. server_key: the broker's public key of CURVE.
    """
    reachable = [each for each in listeners if each.endpoint.transport != "inproc"]
    # A listener that asks for a credential, if there is one, knows the process by its own.
    reachable.sort(key=lambda each: not each.authenticated)
    listener = reachable[0]
    start: dict[str, Any] = {"http": http, "endpoint": _from_here(listener.name)}
    if listener.authenticated and credential.password:
        start |= {"user": USER, "password": credential.password}
    elif listener.authenticated and credential.secret_key:
        start |= {
            "server_key": server_key,
            "public_key": credential.public_key,
            "secret_key": credential.secret_key,
        }
    return msgspec.json.encode(start) + b"\n"


def _from_here(endpoint: str) -> str:
    """Return an endpoint as a process of this machine connects to it.

    A listener at 0.0.0.0 or [::] listens at all addresses, and is no address to connect to.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint
    host, _, port = rest.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return endpoint  # a name of a host or an interface
    if not address.is_unspecified:
        return endpoint
    return f"tcp://127.0.0.1:{port}" if address.version == 4 else f"tcp://[::1]:{port}"


class HttpProcess:
    """The process, and the thread that watches it."""

    def __init__(
        self, first: bytes, log: Log, count: Callable[[str], None], clock: Callable[[], int]
    ) -> None:
        """first: the line of first_line(), for each process that is started. clock: milliseconds.

        count: adds 1 to the counter of a name.
        """
        self._first = first
        self._log = log
        self._count = count
        self._clock = clock
        self._limiter = Limiter()
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="malamute-http", daemon=True)
        self.url = ""
        """URL at which the process serves; empty while it does not."""

    def start(self) -> None:
        """Start the thread, which starts the process."""
        self._thread.start()

    def stop(self) -> None:
        """End process and thread when the broker ends: the end of its input is the process's sign.

        A process that takes longer than _STOP_S is killed.
        """
        self._stopping.set()
        with self._lock:
            child = self._child
        if child is not None:
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
            try:
                child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
        self._thread.join()

    def _run(self) -> None:
        """Run the thread: a process again and again, with longer pauses where it does not start."""
        pause_s = _PAUSE_S
        while not self._stopping.is_set():
            try:
                code, last = self._serve()
            except OSError as error:
                code, last = -1, str(error)
            if self._stopping.is_set():
                return
            # With a URL, it had served.
            pause_s = _PAUSE_S if self.url else min(2 * pause_s, _PAUSE_MAX_S)
            self.url = ""
            self._count("http_ended_total")
            self._log.error("http_ended", code=code, said=last, retry_ms=round(1_000 * pause_s))
            self._stopping.wait(pause_s)

    def _serve(self) -> tuple[int, str]:
        """Run one process to its end; returns its exit code and the last line that it printed.

        The first line that it prints is its URL; all others go to the log.
        """
        with self._lock:  # stop() sees either the child or that none is started any more
            if self._stopping.is_set():
                return 0, ""
            # process_group: a signal that a terminal sends to its group is the broker's to answer.
            self._child = child = subprocess.Popen(
                [sys.executable, "-P", "-m", "malamute_py.http"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=environment(), process_group=0,
            )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        last = ""
        with child.stdout:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(self._first)
                child.stdin.flush()
            while line := child.stdout.readline(_LINE_BYTES):
                last = line.decode("utf-8", "replace").strip()
                if not self.url and last.startswith("http://"):
                    self.url = last
                    self._log.info("http_listening", url=last, pid=child.pid)
                elif self._limiter.allows("http_said", self._clock()):
                    self._log.warning("http_said", text=last)
        code = child.wait()
        with contextlib.suppress(OSError):
            child.stdin.close()
        with self._lock:
            self._child = None
        return code, last
