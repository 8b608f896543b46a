"""Notifications to systemd, received at a socket of the test's own."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from malamute_py.server.supervisor import Supervisor
from tests.server.daemon import Daemon
from tests.waiting import WAIT_S


class Hearing:
    """A supervisor's end of the socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(WAIT_S)

    def next(self) -> str:
        return self.socket.recv(4_096).decode()

    def waiting(self) -> list[str]:
        self.socket.setblocking(False)
        found: list[str] = []
        try:
            while True:
                found.append(self.next())
        except BlockingIOError:
            return found


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "notify")


@pytest.fixture
def hearing(path: str) -> Iterator[Hearing]:
    hearing = Hearing(path)
    yield hearing
    hearing.socket.close()


def test_a_state_is_one_datagram(path: str, hearing: Hearing) -> None:
    Supervisor({"NOTIFY_SOCKET": path}).tell("READY=1\nSTATUS=fine")
    assert hearing.waiting() == ["READY=1\nSTATUS=fine"]


def test_a_socket_of_the_abstract_kind_begins_with_an_at() -> None:
    name = f"malamute-test-{os.getpid()}"
    hearing = Hearing(f"\0{name}")
    Supervisor({"NOTIFY_SOCKET": f"@{name}"}).tell("READY=1")
    assert hearing.waiting() == ["READY=1"]
    hearing.socket.close()


def test_a_loop_that_turns_says_so_twice_in_the_watchdogs_time(path: str, hearing: Hearing) -> None:
    now = 0.0
    supervisor = Supervisor({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "30000000"}, lambda: now)
    for _ in range(61):
        supervisor.alive()
        now += 0.5
    assert hearing.waiting() == ["WATCHDOG=1"] * 3


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "1"},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "1"},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"},
    ],
)
def test_without_a_supervisor_nothing_happens(environment: dict[str, str]) -> None:
    supervisor = Supervisor(environment)
    supervisor.tell("READY=1")
    supervisor.alive()


@pytest.mark.slow
@pytest.mark.system
def test_a_broker_says_when_it_serves_that_it_lives_and_when_it_stops(
    path: str, hearing: Hearing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    monkeypatch.setenv("WATCHDOG_USEC", "1000")
    with Daemon(tmp_path / "data") as daemon:
        assert hearing.next() == f"READY=1\nSTATUS=listens on {daemon.endpoint}"
        assert hearing.next() == hearing.next() == "WATCHDOG=1"
        assert daemon.terminate() == 0
        assert [each for each in hearing.waiting() if each != "WATCHDOG=1"] == [
            "STOPPING=1\nSTATUS=confirms what was taken, and ends"
        ]


def test_a_process_without_a_free_descriptor_goes_on_untold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error was the loop's, and ended the broker."""

    def none_is_free(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socket", none_is_free)
    Supervisor({"NOTIFY_SOCKET": "@nobody"}).tell("WATCHDOG=1")
