"""Mosquitto: QoS 0, and QoS 1 with persistence.

Its persistence is a snapshot of the whole every so often and at an orderly end: a confirm at
QoS 1 says that the broker has the message in memory, and outlives neither its sudden death
nor a loss of power.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from perf.peers.peer import (
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

NATIVE = native_driver("mosquitto")
PYTHON = python_driver("mosquitto")

TITLES = {"qos0": "Mosquitto QoS 0", "qos1": "Mosquitto QoS 1"}
NOTES = {
    "qos0": "queues without bound, so that nothing is dropped",
    "qos1": (
        "queues without bound; persistence is a snapshot every 30 minutes, so a confirm means"
        " memory"
    ),
}
CLIENT_NOTES = {
    "python": {
        "qos0": "; gmqtt in uvloop, four times as fast as paho",
        "qos1": (
            "; at most 4,096 publishes unacknowledged; gmqtt in uvloop, four times as fast as paho"
        ),
    },
    "native": {
        "qos0": (
            "; libmosquitto reads each packet with four calls of the kernel (strace), so that small"
            " records are no faster than in Python"
        ),
        "qos1": (
            "; at most 128 publishes unacknowledged: libmosquitto walks through all of them at"
            " each acknowledgement, 4,096 are half as fast"
        ),
    },
}
PYTHON_RATES = {
    "qos0": {12: 195_000, 140: 180_000, 1120: 160_000, 11760: 40_000},
    "qos1": {12: 104_000, 140: 102_000, 1120: 90_000, 11760: 25_000},
}
NATIVE_RATES = {
    "qos0": {12: 250_000, 140: 245_000, 1120: 240_000, 11760: 60_000},
    "qos1": {12: 110_000, 140: 100_000, 1120: 69_000, 11760: 25_000},
}


def _program() -> str | None:
    """Find the program, which Debian puts where only root's PATH looks."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


class Mosquitto:
    name = "mosquitto"

    def missing(self) -> str:
        if _program() is None:
            return "mosquitto is not installed (Debian: apt-get install mosquitto)"
        return ""

    def version(self) -> str:
        # -h tells it and ends with a status that means nothing.
        return version_in(r"version (\d+(?:\.\d+)+)", _program() or "", "-h")

    def versions(self) -> dict[str, str]:
        return {"mosquitto": self.version()} | versions_of(gmqtt="gmqtt")

    def absent(self) -> dict[str, str]:
        return without(
            ("mosquitto-*-python", has_module("gmqtt"), PYTHON_CLIENTS),
            ("mosquitto-*-native", NATIVE.exists(), to_build("gcc libmosquitto-dev")),
        )

    def columns(self) -> Sequence[Column]:
        columns = []
        if has_module("gmqtt"):
            columns += [self._column(mode, "python", PYTHON) for mode in TITLES]
        if NATIVE.exists():
            columns += [self._column(mode, "native", (str(NATIVE),)) for mode in TITLES]
        return columns

    def _column(self, mode: str, client: str, command: tuple[str, ...]) -> Column:
        """Return the column of a mode and a client; command: starts the client's driver."""
        python = client == "python"
        return Column(
            peer=self.name,
            server=self.name,
            mode=mode,
            client=client,
            label=f"{TITLES[mode]}, {'Python' if python else 'C'} client",
            persistent=False,
            synced=False,
            roles=PASSING_ON | {"alone"} if mode == "qos1" else PASSING_ON,
            command=command,
            window=4_096 if mode == "qos1" else 0,
            rates=(PYTHON_RATES if python else NATIVE_RATES)[mode],
            note=NOTES[mode] + CLIENT_NOTES[client][mode],
        )

    @contextlib.contextmanager
    def server(self, column: Column, folder: Path) -> Iterator[Server]:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        settings = [
            "persistence true",
            "max_queued_messages 0",
            "max_inflight_messages 0",
            "set_tcp_nodelay true",
            "sys_interval 0",
        ]
        config = folder / "mosquitto.conf"
        lines = [
            f"listener {port} 127.0.0.1",
            "allow_anonymous true",
            f"persistence_location {folder}/",
            "log_type error",
            "log_type warning",
            *settings,
        ]
        if os.geteuid() == 0:
            # It would change to its own user, who may not write here.
            lines.append("user root")
        config.write_text("\n".join(lines) + "\n")
        with running(
            [_program() or "mosquitto", "-c", str(config)],
            folder,
            lambda: _accepts(port),
            url=f"mqtt://127.0.0.1:{port}",
            version=self.version(),
            settings=settings,
        ) as server:
            yield server


CONNECT = b"\x10\x11\x00\x04MQTT\x04\x02\x00\x3c\x00\x05probe"
"""MQTT 3.1.1, a clean session."""


def _accepts(port: int) -> bool:
    """Whether the server answers a CONNECT with a CONNACK that accepts."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=1.0) as client,
    ):
        client.sendall(CONNECT)
        return client.recv(4) == b"\x20\x02\x00\x00"
    return False


PEER = Mosquitto()
