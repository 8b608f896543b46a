"""NATS: core, and JetStream on files.

JetStream's acknowledgement means that the operating system has the record: the server syncs
every two minutes (2.9), and only from 2.10 on can be told to sync every write; there is no
column for that with a server that is older.
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

NATIVE = native_driver("nats")
PYTHON = python_driver("nats")

PACKAGES = "golang-go golang-github-nats-io-go-nats-dev"

PENDING_NOTE = "max_pending 4 GiB, so that no client is cut off as slow and nothing is dropped"


class Nats:
    name = "nats"

    def missing(self) -> str:
        if shutil.which("nats-server") is None:
            return "nats-server is not installed (Debian: apt-get install nats-server)"
        return ""

    def version(self) -> str:
        """Return the server's version: "2.9.10"."""
        return version_in(r"(\d+(?:\.\d+)+)", "nats-server", "--version")

    def versions(self) -> dict[str, str]:
        return {"nats-server": self.version()} | versions_of(nats_py="nats-py")

    def absent(self) -> dict[str, str]:
        found = without(
            ("nats-*-python", has_module("nats"), PYTHON_CLIENTS),
            ("nats-*-native", NATIVE.exists(), to_build(PACKAGES)),
        )
        if not self._syncs():
            found["nats-jetstream-sync-*"] = (
                f"nats-server {self.version()} cannot sync each write (2.10 and later can, with"
                " sync_interval: always): JetStream's figures here are without fsync"
            )
        return found

    def columns(self) -> Sequence[Column]:
        columns = []
        modes = ["core", "jetstream"]
        if self._syncs():
            modes.append("jetstream-sync")
        clients: list[tuple[str, str, tuple[str, ...]]] = []
        if has_module("nats"):
            clients.append(("python", "Python client", PYTHON))
        if NATIVE.exists():
            clients.append(("native", "Go client", (str(NATIVE),)))
        for client, label, command in clients:
            columns += [self._column(mode, client, label, command) for mode in modes]
        if NATIVE.exists():
            asynchronous = self._column("core", "native", "Go client", (str(NATIVE),))
            columns.append(
                msgspec.structs.replace(
                    asynchronous,
                    mode="core-async",
                    label="NATS core, Go client, asynchronous",
                    roles=frozenset({"request", "respond"}),
                    note=f"each request sent by the call-back of a reply; {asynchronous.note}",
                )
            )
        return columns

    def _syncs(self) -> bool:
        """Whether the server can sync every write."""
        try:
            major, minor, *_ = (int(part) for part in self.version().split("."))
        except (OSError, ValueError):
            return False
        return (major, minor) >= (2, 10)

    def _column(self, mode: str, client: str, label: str, command: tuple[str, ...]) -> Column:
        """Return the column of a mode and a client; command: starts the client's driver."""
        python = client == "python"
        if mode == "core":
            rates = CORE_PYTHON if python else CORE_NATIVE
            note = PENDING_NOTE
        else:
            rates = JETSTREAM_PYTHON if python else JETSTREAM_NATIVE
            note = (
                "file store, async publish with 4,096 acknowledgements out (more are no faster), "
                "push consumer without acks; " + PENDING_NOTE
            )
            if mode == "jetstream":
                note = f"no fsync: an acknowledgement means the system's cache; {note}"
        if python:
            note += "; nats-py in uvloop, its limits on pending records lifted"
        title = {
            "core": "NATS core",
            "jetstream": "NATS JetStream, no fsync",
            "jetstream-sync": "NATS JetStream, synced",
        }[mode]
        return Column(
            peer=self.name,
            server="nats-sync" if mode == "jetstream-sync" else "nats",
            mode=mode,
            client=client,
            label=f"{title}, {label}",
            persistent=mode != "core",
            synced=mode == "jetstream-sync",
            window=4096 if mode != "core" else 0,
            roles=PASSING_ON if mode == "core" else KEEPING | {"replay-rare"},
            command=command,
            rates=rates,
            note=note,
        )

    @contextlib.contextmanager
    def server(self, column: Column, folder: Path) -> Iterator[Server]:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        lines = [
            "host: 127.0.0.1",
            f"port: {port}",
            "max_pending: 4GB",
            'write_deadline: "60s"',
            "max_payload: 8MB",
        ]
        store = ["max_mem: 1GB", "max_file: 1TB"]
        if column.mode == "jetstream-sync":
            store.append("sync_interval: always")
        settings = [*lines[2:], "jetstream on files", *store]
        place = f"store_dir: {folder / 'jetstream'}"
        lines.append("jetstream: { " + ", ".join([place, *store]) + " }")
        config = folder / "nats.conf"
        config.write_text("\n".join(lines) + "\n")
        with running(
            ["nats-server", "-c", str(config)],
            folder,
            lambda: _answers(port),
            url=f"nats://127.0.0.1:{port}",
            version=self.version(),
            settings=settings,
        ) as server:
            yield server


def _answers(port: int) -> bool:
    """Whether it answers a PING: it takes clients after its streams are read."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=1.0) as client,
        client.makefile("rb") as lines,
    ):
        if lines.readline().startswith(b"INFO"):
            client.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
            return lines.readline() == b"PONG\r\n"
    return False


CORE_PYTHON = {12: 330_000, 140: 330_000, 1120: 290_000, 11760: 80_000}
JETSTREAM_PYTHON = {12: 175_000, 140: 170_000, 1120: 135_000, 11760: 40_000}
CORE_NATIVE = {12: 4_700_000, 140: 3_900_000, 1120: 1_200_000, 11760: 150_000}
JETSTREAM_NATIVE = {12: 330_000, 140: 310_000, 1120: 200_000, 11760: 40_000}

PEER = Nats()
