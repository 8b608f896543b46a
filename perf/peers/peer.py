"""The interface of a peer: its columns, and a server for one of them.

A module of this package that gives `PEER` (a `Peer`) takes part. The rule: a server that the suite
starts is its own, on a free port of this machine, with its data and its log in the folder given,
and it is ended with the block that started it, whatever happens; the distribution's own instance is
never touched. A column lists only what it can do, and a program that is not installed is reported,
with what to install.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Protocol

import msgspec
import psutil

ROLES = frozenset(
    {
        "publish",  # And `subscribe`: one to one.
        "subscribe",
        "fan-out",  # `subscribe` with many connections that each get every record.
        "producers",  # Several publishers into one subject.
        "wildcards",  # `publish` over many subjects, `subscribe` to a pattern for each.
        "fill",
        "replay",  # The whole of a filled log.
        "replay-rare",  # One subject of it, chosen by the server.
        "replay-time",  # The part from a time on.
        "request",
        "respond",
        "pace",
        "listen",
        "alone",  # Each publish has a confirm of its own, so that its wait can be measured.
        "queue",  # A durable queue, acknowledged message by message: publish/subscribe with it.
        "steps",  # Atomic steps of four parts.
    }
)
"""Roles that a driver may have; the suite gives a column the works that it can do."""


PASSING_ON = frozenset(
    {
        "publish",
        "subscribe",
        "fan-out",
        "producers",
        "wildcards",
        "request",
        "respond",
        "pace",
        "listen",
    }
)
"""Roles of a driver of a broker that keeps nothing."""
KEEPING = frozenset(
    {
        "publish",
        "subscribe",
        "alone",
        "fan-out",
        "producers",
        "fill",
        "replay",
        "replay-time",
        "pace",
        "listen",
    }
)
"""Roles of a driver of a log; `replay-rare` besides, where it looks for a subject in it."""


class ServerFailed(RuntimeError):
    """A server did not come up; the text holds the end of its log."""


class Column(msgspec.Struct, frozen=True):
    """One competitor: a peer in one of its modes, with one of its clients."""

    peer: str
    mode: str
    client: str
    """`python` or `native`."""
    label: str
    """Name for people: "NATS JetStream, Go client"."""
    persistent: bool
    """True: confirmed records are in a file and outlive the server's death."""
    synced: bool
    """True: confirmed records outlive a loss of power."""
    roles: frozenset[str]
    """A subset of ROLES."""
    command: tuple[str, ...]
    """The driver's argv before its key=value arguments."""
    rates: Mapping[int, int]
    """Records/s to expect one to one by record size; counts of records follow from it."""
    note: str = ""
    """The settings that matter, and the reason for them."""
    window: int = 0
    """Records that its publisher leaves unconfirmed at most; 0: as the client does by itself."""
    server: str = ""
    """Columns of a peer with one name here share a server; empty: the mode's own."""

    @property
    def name(self) -> str:
        """Return `peer-mode-client`, the name in files and results."""
        return f"{self.peer}-{self.mode}-{self.client}"

    def rate(self, size: int) -> int:
        """Return the records/s to expect at a size, from the nearest size that is known."""
        nearest = min(self.rates, key=lambda known: abs(known - size))
        return max(1, self.rates[nearest] * (nearest + 100) // (size + 100))


class Server:
    """A running server, and its cost so far."""

    def __init__(
        self,
        url: str,
        process: subprocess.Popen[bytes],
        folder: Path,
        version: str,
        settings: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        """settings: lines of its configuration, for the report. log: what tail() shows."""
        self.url = url
        self.process = process
        self.folder = folder
        self.version = version
        self.settings = tuple(settings)
        self.log = log

    @property
    def pids(self) -> tuple[int, ...]:
        """Return its process and all that it started."""
        try:
            own = psutil.Process(self.process.pid)
            return (own.pid, *(child.pid for child in own.children(recursive=True)))
        except psutil.NoSuchProcess:
            return ()

    def _processes(self) -> Iterator[psutil.Process]:
        for pid in self.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield psutil.Process(pid)

    def cpu_s(self) -> float:
        """Return processor seconds so far: all threads, I/O threads too, user and system."""
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                # Children that ended are in their parent's account.
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def rss_bytes(self) -> int:
        """Return resident memory, shared file pages included."""
        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def disk_bytes(self, written_since: float = 0.0) -> int:
        """Return the bytes of its files on disk, the log excepted; of those written to since."""
        total = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = Path(folder) / name
                if path == self.log:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    facts = path.stat()
                    if facts.st_mtime >= written_since:
                        total += facts.st_blocks * 512
        return total

    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self) -> str:
        """Return the end of its log."""
        if self.log is None or not self.log.exists():
            return ""
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """Kill all of it (SIGKILL): no goodbye, nothing flushed."""
        end_processes(self.pids, signal.SIGKILL)
        self.process.wait()


class Peer(Protocol):
    """One broker that takes part."""

    name: str

    def missing(self) -> str:
        """Return "" or why the peer is left out: what is not installed, and how to install it."""

    def versions(self) -> dict[str, str]:
        """Return versions of the server and the clients."""

    def absent(self) -> dict[str, str]:
        """Return which of its clients do not take part: why, and what to install."""

    def columns(self) -> Sequence[Column]:
        """Return the columns that can run here; a client that is not installed has no column."""

    def server(self, column: Column, folder: Path) -> AbstractContextManager[Server]:
        """Start a server with its data in `folder` (made if need be; may hold earlier data).

        It is ready for clients when the block begins; columns of one mode may share it. Raises
        ServerFailed.
        """


def without(*clients: tuple[str, bool, str]) -> dict[str, str]:
    """Return those of (client, whether it is there, what to do) that are not there."""
    return {name: f"is not there: {what}" for name, there, what in clients if not there}


def has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def python_driver(peer: str, name: str = "python_driver") -> tuple[str, ...]:
    """Return the command of the driver of a peer's Python client."""
    return (sys.executable, "-m", f"perf.peers.{peer}.{name}")


def native_driver(peer: str) -> Path:
    """Return where the driver of a peer's native client is, once it is built."""
    return Path(__file__).parent / "build" / f"{peer}_driver"


def version_in(pattern: str, *command: str) -> str:
    """Return the version that a server's command prints, as the pattern's group finds it."""
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(pattern, said)
    return found.group(1) if found else "unknown"


def versions_of(**distributions: str) -> dict[str, str]:
    """Return versions of installed Python distributions: `name_to_show=distribution`."""
    found = {}
    for name, distribution in distributions.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name.replace("_", "-")] = importlib.metadata.version(distribution)
    return found


PYTHON_CLIENTS = "make setup, or pip install '.[perf]'"


def to_build(packages: str) -> str:
    """Return what to do for a native client."""
    return f"apt-get install {packages}, then make -C perf/peers"


def free_port() -> int:
    """Return a port of the loopback interface on which no process listens."""
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        return int(finder.getsockname()[1])


def answers(port: int) -> bool:
    """Whether a process listens there: the simplest probe."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def end_processes(pids: Sequence[int], how: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)


_running: dict[int, subprocess.Popen[bytes]] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def running(
    argv: Sequence[str],
    folder: Path,
    ready: Callable[[], bool],
    *,
    url: str,
    version: str,
    settings: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    stop: int = signal.SIGTERM,
    wait_s: float = 60.0,
    end_s: float = 20.0,
) -> Iterator[Server]:
    """Run a server's command in `folder` until the block ends.

    ready: asked every 5 ms until it says yes. stop: the signal for an orderly end; processes that
    are left after end_s are killed. Its own session, so that a Ctrl-C reaches the suite alone,
    which ends it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    with log.open("ab") as out:
        process = _start(argv, folder, out, environment)
    server = Server(url, process, folder, version, settings, log)
    try:
        deadline = time.monotonic() + wait_s
        while not ready():
            if not server.alive():
                raise ServerFailed(
                    f"{argv[0]} ended with {process.returncode} at once:\n{server.tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerFailed(f"{argv[0]} was not ready in {wait_s:.0f} s:\n{server.tail()}")
            time.sleep(0.005)
        yield server
    finally:
        _end(process, server.pids, stop, end_s)


def _start(
    argv: Sequence[str], folder: Path, out: IO[bytes], environment: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, and note it, lest it outlive the suite."""
    process = subprocess.Popen(
        list(argv),
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with _lock:
        _running[process.pid] = process
    return process


def _end(process: subprocess.Popen[bytes], pids: Sequence[int], stop: int, end_s: float) -> None:
    if process.poll() is None:
        process.send_signal(stop)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=end_s)
    # Processes that are left: the server's when it ignored the signal, children that outlived it.
    end_processes([pid for pid in pids if pid != process.pid], signal.SIGKILL)
    if process.poll() is None:
        process.kill()
        process.wait()
    with _lock:
        _running.pop(process.pid, None)


def end_all() -> None:
    """Kill every server that still runs: for the end of the program, whatever its reason."""
    with _lock:
        left = list(_running.values())
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            end_processes([child.pid for child in children], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
