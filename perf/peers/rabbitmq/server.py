"""RabbitMQ: classic queues in memory, quorum queues, and streams by their own protocol.

A node of its own: own name, own folder, own ports, own list of plugins and its own epmd, so that
the distribution's node is neither needed nor touched. The distribution's wrapper would change to
the user `rabbitmq`; the script beneath it runs as the user that runs the suite.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from perf.peers.peer import (
    KEEPING,
    PASSING_ON,
    PYTHON_CLIENTS,
    Column,
    Server,
    answers,
    free_port,
    has_module,
    native_driver,
    python_driver,
    running,
    to_build,
    versions_of,
    without,
)

AMQP_NATIVE = native_driver("rabbitmq")
AMQP = python_driver("rabbitmq")
STREAMS = python_driver("rabbitmq", "python_stream_driver")
SCRIPT = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

QUORUM = frozenset({"publish", "subscribe", "alone", "producers", "queue", "pace", "listen"})
TITLES = {
    "classic": "RabbitMQ classic queue, transient",
    "quorum": "RabbitMQ quorum queue",
    "stream": "RabbitMQ stream",
}

NOTES = {
    "classic": "transient messages, no confirms, no acks, no bound of what is sent ahead",
    "quorum": "publisher confirms, 4,096 out; an ack for each 500 deliveries, prefetch 2,000",
    "stream": "4,096 unconfirmed; a confirm means the system's cache: streams are not synced",
}
PYTHON_NOTES = {
    "classic": "; pika in uvloop, up to 2.7 times as fast as aio-pika's aiormq",
    "quorum": "; pika in uvloop, up to 2.7 times as fast as aio-pika's aiormq",
    "stream": (
        "; rstream in uvloop, publish frames of 500 records, its 256 bytes of reading made 1 MiB; "
        "over this protocol the server waits 1 ms at the end of a stream before it looks for "
        "more (rabbitmq-server pull request 14766)"
    ),
}

# Busy waiting off: on a machine of two cores the schedulers would take the clients' time.
ERLANG = "+sbwt none +sbwtdcpu none +sbwtdio none"


class RabbitMQ:
    name = "rabbitmq"

    def missing(self) -> str:
        if not SCRIPT.exists() or shutil.which("epmd") is None:
            return "rabbitmq-server is not installed (Debian: apt-get install rabbitmq-server)"
        return ""

    def version(self) -> str:
        """Return the version of the installed server, from the name of its folder."""
        found = re.search(r"rabbitmq_server-(\d+(\.\d+)+)", str(SCRIPT.resolve()))
        return found.group(1) if found else "unknown"

    def versions(self) -> dict[str, str]:
        found = versions_of(pika="pika", rstream="rstream")
        return {"rabbitmq-server": self.version()} | found

    def absent(self) -> dict[str, str]:
        found = without(
            ("rabbitmq-classic-python, rabbitmq-quorum-python", has_module("pika"), PYTHON_CLIENTS),
            ("rabbitmq-stream-python", has_module("rstream"), PYTHON_CLIENTS),
            ("rabbitmq-*-native", AMQP_NATIVE.exists(), to_build("gcc librabbitmq-dev")),
        )
        found["a native client of RabbitMQ's stream protocol"] = (
            "Debian packages none, and npm's rabbitmq-stream-js-client opens with a command that"
            f" RabbitMQ 3.10 closes the link for (here: {self.version()}); rstream in Python"
            " speaks it, the C client reads streams over AMQP. The vendor's own clients (Java, Go,"
            " Rust, .NET) are in registries that the suite does not use: with them streams would"
            " be faster than they are here"
        )
        return found

    def columns(self) -> Sequence[Column]:
        columns = []
        if has_module("pika"):
            columns += [self._column(mode, "python", AMQP) for mode in ("classic", "quorum")]
        if has_module("rstream"):
            columns.append(self._column("stream", "python", STREAMS))
        if AMQP_NATIVE.exists():
            command = (str(AMQP_NATIVE),)
            columns += [self._column(mode, "native", command) for mode in ("classic", "quorum")]
            columns.append(self._column("stream", "native", command, "C client over AMQP"))
        return columns

    def _column(self, mode: str, client: str, command: tuple[str, ...], label: str = "") -> Column:
        """Return the column of a mode and a client; command: starts the client's driver."""
        label = label or {"python": "Python client", "native": "C client"}[client]
        return Column(
            peer=self.name,
            server=self.name,
            mode=mode,
            client=client,
            label=f"{TITLES[mode]}, {label}",
            persistent=mode != "classic",
            synced=mode == "quorum",
            roles={"classic": PASSING_ON, "quorum": QUORUM, "stream": KEEPING}[mode],
            command=command,
            window=0 if mode == "classic" else 4_096,
            rates=(PYTHON_RATES if client == "python" else NATIVE_RATES)[mode],
            note=NOTES[mode] + (PYTHON_NOTES[mode] if client == "python" else ""),
        )

    @contextlib.contextmanager
    def server(self, column: Column, folder: Path) -> Iterator[Server]:
        folder.mkdir(parents=True, exist_ok=True)
        port, stream_port, dist_port, epmd_port = (free_port() for _ in range(4))
        settings = [
            "vm_memory_high_watermark.relative = 0.8",
            "vm_memory_high_watermark_paging_ratio = 0.99",
            "disk_free_limit.absolute = 100MB",
            "heartbeat = 0",
            "tcp_listen_options.nodelay = true",
            "tcp_listen_options.backlog = 4096",
        ]
        config = folder / "rabbitmq.conf"
        config.write_text(
            "\n".join(
                [
                    f"listeners.tcp.1 = 127.0.0.1:{port}",
                    f"stream.listeners.tcp.1 = 127.0.0.1:{stream_port}",
                    "stream.advertised_host = 127.0.0.1",
                    f"stream.advertised_port = {stream_port}",
                    "log.file.level = warning",
                    "log.console = false",
                    *settings,
                ]
            )
            + "\n"
        )
        plugins = folder / "enabled_plugins"
        plugins.write_text("[rabbitmq_stream].\n")
        # The same name at each start: it names the folder of the data.
        node = "perf@localhost"
        environment = {
            # The cookie that every node wants is made in its home.
            "HOME": str(folder),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            # The Erlang machine takes the place of the script, so that a signal reaches it.
            "RUNNING_UNDER_SYSTEMD": "true",
            "RABBITMQ_CONF_ENV_FILE": str(folder / "no-such-file"),
            "RABBITMQ_CONFIG_FILE": str(config),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_NODENAME": node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(dist_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "rabbitmq.pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ERLANG,
        }
        url = f"amqp://guest:guest@127.0.0.1:{port}/?stream={stream_port}"
        with (
            running(
                ["epmd", "-port", str(epmd_port), "-address", "127.0.0.1"],
                folder / "epmd",
                lambda: answers(epmd_port),
                url="",
                version="",
            ),
            running(
                [str(SCRIPT)],
                folder,
                lambda: answers(stream_port) and self._open(port),
                url=url,
                version=self.version(),
                settings=[*settings, ERLANG],
                environment=environment,
                wait_s=120.0,
            ) as server,
        ):
            yield server

    @staticmethod
    def _open(port: int) -> bool:
        """Whether the server greets clients: it listens before it does."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1.0) as client,
        ):
            client.sendall(b"AMQP\x00\x00\x09\x01")
            return bool(client.recv(8))
        return False


PYTHON_RATES = {
    "classic": {12: 68_000, 140: 60_000, 1120: 58_000, 11760: 20_000},
    "quorum": {12: 50_000, 140: 46_000, 1120: 38_000, 11760: 10_000},
    "stream": {12: 570_000, 140: 560_000, 1120: 280_000, 11760: 40_000},
}
NATIVE_RATES = {
    "classic": {12: 200_000, 140: 180_000, 1120: 170_000, 11760: 30_000},
    "quorum": {12: 87_000, 140: 85_000, 1120: 65_000, 11760: 12_000},
    "stream": {12: 117_000, 140: 117_000, 1120: 79_000, 11760: 20_000},
}

PEER = RabbitMQ()
