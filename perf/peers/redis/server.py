"""Redis: pub/sub without a file, streams on the append-only file.

The file is synced once a second, or before each answer (`stream-sync`).
"""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from perf.peers.peer import (
    KEEPING,
    PASSING_ON,
    PYTHON_CLIENTS,
    Column,
    Server,
    free_port,
    has_module,
    native_driver,
    python_driver,
    running,
    to_build,
    version_in,
    versions_of,
    without,
)

NATIVE = native_driver("redis")
PYTHON = python_driver("redis")

TITLES = {
    "pubsub": "Redis pub/sub",
    "stream": "Redis Streams",
    "stream-sync": "Redis Streams, synced",
}
APPEND = {
    "pubsub": ["appendonly no"],
    "stream": ["appendonly yes", "appendfsync everysec"],
    "stream-sync": ["appendonly yes", "appendfsync always"],
}
NOTES = {
    "pubsub": "CLIENT REPLY OFF while publishing; requests through lists, RPUSH and BLMPOP COUNT",
    "stream": "XADD pipelined, 65,536 unanswered; XREAD BLOCK COUNT 10000",
    "stream-sync": (
        "XADD pipelined, 4,096 unanswered (more are no faster): what a turn of the server reads "
        "shares one fsync; XREAD BLOCK COUNT 10000"
    ),
}
PYTHON_NOTE = (
    "; hiredis-py over a socket, over 3 times as fast as redis-py's pipeline; a call a record and"
    " requests are redis-py's asyncio client, a pipeline of 64 records, a call for each request"
)
PYTHON_RATES = {
    "pubsub": {12: 1_600_000, 140: 1_500_000, 1120: 650_000, 11760: 120_000},
    "stream": {12: 850_000, 140: 750_000, 1120: 390_000, 11760: 70_000},
    "stream-sync": {12: 640_000, 140: 490_000, 1120: 170_000, 11760: 30_000},
}
NATIVE_RATES = {
    "pubsub": {12: 3_200_000, 140: 2_700_000, 1120: 1_400_000, 11760: 200_000},
    "stream": {12: 900_000, 140: 700_000, 1120: 350_000, 11760: 70_000},
    "stream-sync": {12: 650_000, 140: 500_000, 1120: 180_000, 11760: 30_000},
}


class Redis:
    name = "redis"

    def missing(self) -> str:
        if shutil.which("redis-server") is None:
            return "redis-server is not installed (Debian: apt-get install redis-server)"
        return ""

    def version(self) -> str:
        return version_in(r"v=(\d+(?:\.\d+)+)", "redis-server", "--version")

    def versions(self) -> dict[str, str]:
        found = versions_of(redis_py="redis", hiredis_py="hiredis")
        return {"redis-server": self.version()} | found

    def absent(self) -> dict[str, str]:
        return without(
            ("redis-*-python", has_module("hiredis"), PYTHON_CLIENTS),
            ("redis-*-native", NATIVE.exists(), to_build("gcc libhiredis-dev")),
        )

    def columns(self) -> Sequence[Column]:
        columns = []
        if has_module("hiredis"):
            columns += [self._column(mode, "python", "Python client", PYTHON) for mode in TITLES]
            asked = self._column("pubsub", "python", "Python client", PYTHON)
            columns.append(
                msgspec.structs.replace(
                    asked,
                    mode="pubsub-waves",
                    # The same server: only the driver differs.
                    server=asked.mode,
                    label="Redis lists, Python client, in waves",
                    roles=frozenset({"request", "respond"}),
                    note="hiredis-py over a socket: as many requests as there is room for in one"
                    " write, a command each, their replies by one BLMPOP",
                )
            )
        if NATIVE.exists():
            columns += [self._column(mode, "native", "C client", (str(NATIVE),)) for mode in TITLES]
        return columns

    def _column(self, mode: str, client: str, label: str, command: tuple[str, ...]) -> Column:
        """Return the column of a mode and a client; command: starts the client's driver."""
        note = NOTES[mode]
        if client == "python":
            note += PYTHON_NOTE
        return Column(
            peer=self.name,
            mode=mode,
            client=client,
            label=f"{TITLES[mode]}, {label}",
            persistent=mode != "pubsub",
            synced=mode == "stream-sync",
            roles=PASSING_ON if mode == "pubsub" else KEEPING | {"replay-rare"},
            command=command,
            window={"stream": 65_536, "stream-sync": 4_096}.get(mode, 0),
            rates=(PYTHON_RATES if client == "python" else NATIVE_RATES)[mode],
            note=note,
        )

    @contextlib.contextmanager
    def server(self, column: Column, folder: Path) -> Iterator[Server]:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        settings = [
            *APPEND[column.server or column.mode],
            'save ""',
            "auto-aof-rewrite-percentage 0",
            "client-output-buffer-limit normal 0 0 0",
            "client-output-buffer-limit pubsub 0 0 0",
        ]
        config = folder / "redis.conf"
        lines = [
            "bind 127.0.0.1",
            f"port {port}",
            f"dir {folder}",
            "daemonize no",
            "maxclients 20000",
            *settings,
        ]
        config.write_text("\n".join(lines) + "\n")
        with running(
            ["redis-server", str(config)],
            folder,
            lambda: _serves(port),
            url=f"redis://127.0.0.1:{port}",
            version=self.version(),
            settings=settings,
        ) as server:
            yield server


def _serves(port: int) -> bool:
    """Whether the server serves: it answers -LOADING while it reads its file."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=1.0) as client,
    ):
        client.sendall(b"PING\r\n")
        return client.recv(64).startswith(b"+PONG")
    return False


PEER = Redis()
