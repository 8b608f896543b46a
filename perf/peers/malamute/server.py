"""Our own broker: one server, journal on disk; a column for each level of confirm."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import malamute_py as malamute
from malamute_py.form import PLAIN, another_than_asked, form
from perf.peers.peer import (
    ROLES,
    Column,
    Peer,
    Server,
    ServerFailed,
    answers,
    free_port,
    running,
)

DRIVER = (sys.executable, "-m", "perf.peers.malamute.python_driver")
RATES = {12: 13_000_000, 140: 4_000_000, 1120: 700_000, 2940: 290_000, 11760: 75_000}
NOTE = (
    "the broker with its defaults (ring of 4 GiB, segments of 64 MiB), the asyncio client with its"
    " defaults for credit and bounds, in uvloop as the peers' Python clients are; batches of"
    " 2 MiB, that default too; workers with concurrency 256 (default 16)"
)
LEVELS = {
    "none": "promises nothing, is journaled all the same",
    "stored": "in the journal's file",
    "synced": "fdatasync covered it",
}


class Malamute:
    """The broker of this checkout."""

    name = "malamute"

    def missing(self) -> str:
        return ""

    def versions(self) -> dict[str, str]:
        names = ("malamute-py", "pyzmq", "msgspec", "numpy")
        return {name: importlib.metadata.version(name) for name in names} | {
            "libzmq": _libzmq(),
            "python": sys.version.split()[0],
            "modules": form(),
        }

    def absent(self) -> dict[str, str]:
        return {}

    def columns(self) -> Sequence[Column]:
        return [
            Column(
                peer=self.name,
                mode=level,
                client="python",
                label=f"malamute, {level}",
                persistent=level != "none",
                synced=level == "synced",
                roles=ROLES,
                command=(*DRIVER, f"confirm={level}"),
                rates=RATES,
                note=f"a confirm says: {promise}; {NOTE}",
                server="broker",
            )
            for level, promise in LEVELS.items()
        ]

    @contextmanager
    def server(self, column: Column, folder: Path) -> Iterator[Server]:
        port = free_port()
        url = f"tcp://127.0.0.1:{port}"
        command = [
            *(sys.executable, "-m", "malamute_py.cli", "broker"),
            *("--listen", url, "--data", str(folder / "data")),
        ]
        version = importlib.metadata.version("malamute-py")
        with running(
            command,
            folder,
            lambda: answers(port) and _tells(url),
            url=url,
            version=version,
            settings=("defaults",),
        ) as server:
            # A broker that runs in another form than it was asked for would give another figure.
            runs = _form_of(server.process.pid)
            if wrong := another_than_asked(runs):
                raise ServerFailed(f"the broker: {wrong}")
            server.version += f", {runs}"
            yield server


def _tells(url: str) -> bool:
    """Whether a client is let in and its first request answered."""
    with contextlib.suppress(malamute.MalamuteError), malamute.connect_sync(url) as client:
        return bool(client.broker_info())
    return False


def _form_of(pid: int) -> str:
    """Return the form of the process, by what it has loaded and not by what is on the disk."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return "compiled" if "_compiled__mypyc" in maps else PLAIN


def _libzmq() -> str:
    import zmq

    return zmq.zmq_version()


PEER: Peer = Malamute()
