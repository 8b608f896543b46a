"""The daemon as a process: signals, sudden death, exit codes, a small disk."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from malamute_protocol.commands import Confirm, Publish, Refused
from malamute_protocol.encode import encode
from malamute_protocol.errors import ConnectionLost
from malamute_py.client.sync.client import connect_sync
from malamute_py.server.server import EXIT_BUG
from tests.server.daemon import PROGRAM, Daemon
from tests.server.peer import RawPeer
from tests.server.zmtp import MORE, Zmtp, frame
from tests.waiting import WAIT_MS, WAIT_S

pytestmark = pytest.mark.system

SMALL = {
    "limits__batch_bytes_max": 1 << 20,
    "limits__record_bytes_max": 1 << 19,
    "journal__segment_bytes": 4 << 20,
    "journal__ring_bytes": 256 << 20,
    "links__heartbeat_ms": 60_000,
}


def bodies(endpoint: str, stream: str = "s") -> list[bytes]:
    with connect_sync(endpoint, timeout_ms=WAIT_MS) as client:
        return [r.body for r in client.subscribe(stream, start="earliest", until="tail")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_daemon_in_order(number: int, tmp_path: Path) -> None:
    with Daemon(tmp_path, **SMALL) as daemon:
        with connect_sync(daemon.endpoint) as client:
            for n in range(10):
                client.publish("s", b"%d" % n)
            daemon.process.send_signal(number)
            assert daemon.process.wait(timeout=WAIT_S) == 0
        assert daemon.wait_for("stopping")["links"] == 1
        assert daemon.wait_for("stopped")["untold_links"] == 0
    with Daemon(tmp_path, **SMALL) as daemon:
        assert daemon.wait_for("recovered")["clean"] is True
        assert bodies(daemon.endpoint) == [b"%d" % n for n in range(10)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_with_the_news_of_listening_is_answered_in_order(number: int) -> None:
    program = """
import signal, sys
from malamute_py.config import load
from malamute_py.server import Server
class Signalled:
    def info(self, event, **facts):
        print(event)
        if event == "listening":
            signal.raise_signal(int(sys.argv[1]))
    debug = warning = error = critical = info
config = load(overrides={"data_directory": "", "listen": "tcp://127.0.0.1:0"})
sys.exit(Server(config, log=Signalled()).run())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(number))],
        check=False, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_daemon_at_once_and_loses_nothing(
    number: int, tmp_path: Path
) -> None:
    program = """
import signal, sys
from malamute_py.config import load
from malamute_py.server import Server
class Impatient:
    def info(self, event, **facts):
        if event == "listening":
            signal.raise_signal(int(sys.argv[1]))
        if event == "stopping":
            print(event, flush=True)
            signal.raise_signal(int(sys.argv[1]))
    debug = warning = error = critical = info
config = load(overrides={"data_directory": sys.argv[2], "listen": "tcp://127.0.0.1:0"})
sys.exit(Server(config, log=Impatient()).run())
"""
    with Daemon(tmp_path, **SMALL) as daemon, connect_sync(daemon.endpoint) as client:
        client.publish("s", b"1")
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(number)), str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (128 + number, "stopping\n"), done.stderr
    with Daemon(tmp_path, **SMALL) as daemon:
        assert bodies(daemon.endpoint) == [b"1"]


def test_everything_confirmed_survives_sigkill_amid_publishing(tmp_path: Path) -> None:
    confirmed: list[bytes] = []
    enough = threading.Event()
    with Daemon(tmp_path, **SMALL) as daemon, connect_sync(daemon.endpoint) as client:

        def kill() -> None:
            if enough.wait(WAIT_S):
                daemon.kill()
            client.abort()

        killer = threading.Thread(target=kill)
        killer.start()
        with contextlib.suppress(ConnectionLost):
            for n in range(1_000_000):
                body = b"%d" % n
                client.publish("s", body)
                confirmed.append(body)
                if n == 100:
                    enough.set()
        killer.join()
    assert len(confirmed) > 100
    with Daemon(tmp_path, **SMALL) as daemon:
        assert daemon.wait_for("recovered")["clean"] is False
        found = bodies(daemon.endpoint)
        assert found[: len(confirmed)] == confirmed
        assert len(found) <= len(confirmed) + 1, "at most the one that was under way"


def test_a_refused_start_has_an_exit_code_and_one_line(tmp_path: Path) -> None:
    with Daemon(tmp_path, **SMALL):
        second = subprocess.run(
            [sys.executable, "-c", PROGRAM, f"data_directory={tmp_path}", "listen=tcp://127.0.0.1:0"],
            check=False, capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
    assert second.returncode == 2
    assert second.stderr.startswith("refused: ")
    assert "Traceback" not in second.stderr
    assert "in use by process" in second.stderr


def test_a_bug_ends_the_daemon_with_a_code_that_has_it_restarted(tmp_path: Path) -> None:
    program = """
import sys, threading, time
from malamute_py.config import load
from malamute_py.server import Server
from malamute_py.telemetry import open_log
class Log:
    def __init__(self):
        self.lines, self._log = 0, open_log("info")
    def info(self, event, **facts):
        self._log.info(event, **facts)
        self.lines += event == "listening"
    def __getattr__(self, level):
        return getattr(self._log, level)
wanted = {"data_directory": sys.argv[1], "listen": "tcp://127.0.0.1:0"}
server = Server(load(overrides=wanted), log=Log())
def break_it():
    while not server.log.lines:
        time.sleep(0.01)
    server._core.take_outgoing = None
threading.Thread(target=break_it, daemon=True).start()
sys.exit(server.run())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == EXIT_BUG
    assert '"event": "failed"' in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)],
        check=False, capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("mounting a small file system needs root")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_a_disk_that_fills_up_refuses_by_name_and_goes_on_when_there_is_space(
    small_disk: Path,
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(6 << 20))
    with Daemon(small_disk / "data", **SMALL) as daemon, RawPeer(daemon.endpoint) as peer:
        content = encode([os.urandom(400_000)])
        stored = 0
        for tracker in range(1, 200):
            peer.send(Publish("s", tracker), frames=(content,))
            answer = peer.next()[0]
            if isinstance(answer, Refused):
                break
            assert isinstance(answer, Confirm)
            stored += 1
        assert isinstance(answer, Refused)
        assert answer.code == "disk_full"
        assert "free space" in daemon.wait_for("append_refused")["reason"]
        assert 10 < stored < 50
        ballast.unlink()
        deadline = time.monotonic() + WAIT_S
        while isinstance(answer, Refused):
            assert time.monotonic() < deadline
            time.sleep(0.1)
            peer.send(Publish("s", 1000), frames=(content,))
            answer = peer.next()[0]
        assert isinstance(answer, Confirm)
        assert answer.offset == stored
        assert len(bodies(daemon.endpoint)) == stored + 1


@pytest.mark.alone
def test_endless_frames_move_the_daemons_memory_little_and_others_not_at_all(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path, **SMALL) as daemon, connect_sync(daemon.endpoint) as client:
        client.publish("s", b"before")
        before = daemon.resident_bytes()
        peak = before
        for size in (0, 1000):
            burst = frame(bytes(size), MORE) * (1 + (1 << 17) // (size + 2))
            with Zmtp(daemon.endpoint) as attacker:
                deadline = time.monotonic() + WAIT_S
                with contextlib.suppress(OSError):
                    while time.monotonic() < deadline:
                        attacker.socket.sendall(burst)
                        peak = max(peak, daemon.resident_bytes())
                assert time.monotonic() < deadline, "it was not cut"
            client.publish("s", b"meanwhile")
        print(f"RSS {before >> 20} MiB, at most {peak >> 20} MiB")
        # Without the guard it is gigabytes within seconds; the speed of the machine decides how
        # much comes between two looks.
        assert peak - before < 320 << 20
        assert bodies(daemon.endpoint) == [b"before", b"meanwhile", b"meanwhile"]
