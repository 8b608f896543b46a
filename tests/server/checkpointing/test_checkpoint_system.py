"""The daemon and the process that follows its log: which ends when, and what comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.commands import (
    AckMail,
    BrokerInfo,
    Confirm,
    Mail,
    OpenInbox,
    Publish,
    Refused,
    Result,
    Send,
)
from malamute_protocol.encode import encode
from malamute_py import EmbeddedBroker
from tests.server.daemon import Daemon
from tests.server.peer import RawPeer
from tests.store.logs import bodies_of
from tests.waiting import WAIT_S

pytestmark = pytest.mark.system

SMALL = {
    "limits__batch_bytes_max": 1 << 20,
    "limits__record_bytes_max": 1 << 19,
    "journal__segment_bytes": 2 << 20,
    "journal__ring_bytes": 16 << 20,
    "links__heartbeat_ms": 60_000,
    "checkpoint__interval_ms": 50,
}


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
    return found


def children(pid: int) -> list[int]:
    """Return the processes that follow for this one."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
            continue
        if b"malamute_py.store.follow" in words and str(pid).encode() in words:
            found.append(int(place.name))
    return found


def send(peer: RawPeer, tracker: int, body: bytes, mailbox: str = "box") -> int:
    """Send a message; returns the number that the broker gave it."""
    peer.send(Send(mailbox, tracker), frames=(encode([body]),))
    confirm, _ = peer.get(Confirm)
    return int(confirm.offset)


def lag(peer: RawPeer) -> Any:
    peer.send(BrokerInfo(1))
    result, _ = peer.get(Result)
    return result.value["checkpoint"]["lag_bytes"]


def received(peer: RawPeer, count: int) -> list[bytes]:
    """Read messages of a mailbox, confirmed as they come."""
    peer.send(OpenInbox(7, "box", 1 << 40, 1 << 40))
    found: list[bytes] = []
    while len(found) < count:
        mail, frames = peer.get(Mail)
        assert mail.rows is None
        found += bodies_of(b"".join(frames))
    return found


def test_mail_is_there_after_a_kill_out_of_the_tables_and_out_of_the_log(tmp_path: Path) -> None:
    with Daemon(tmp_path, **SMALL) as daemon, RawPeer(daemon.endpoint) as peer:
        first = send(peer, 1, b"tables 1")
        for number in range(2, 21):
            send(peer, number, b"tables %d" % number)
        until(lambda: lag(peer) == 0)
        for number in range(1, 41):  # The ring goes round: only the tables have their bodies.
            peer.send(Publish("s", number), frames=(encode([b"n" * 500_000]),))
            peer.get(Confirm)
            until(lambda: lag(peer) == 0)
        for number in range(21, 31):
            send(peer, number, b"log %d" % number)
        (follower,) = children(daemon.process.pid)
        daemon.kill()
        until(lambda: not Path(f"/proc/{follower}").exists())
    with Daemon(tmp_path, **SMALL) as daemon, RawPeer(daemon.endpoint) as peer:
        assert daemon.wait_for("queues_recovered")["messages"] == 30
        wanted = [b"tables %d" % n for n in range(1, 21)] + [b"log %d" % n for n in range(21, 31)]
        assert received(peer, 30) == wanted
        peer.send(AckMail(7, [(first, first + 30)], 99))
        peer.get(Confirm)
        assert daemon.terminate() == 0
    with Daemon(tmp_path, **SMALL) as daemon:
        line = daemon.wait_for("queues_recovered")
        assert (line["messages"], line["mailboxes"], line["lag_bytes"]) == (0, 1, 0)


def test_the_process_is_started_again_when_it_dies_and_goes_when_the_broker_goes(
    tmp_path: Path,
) -> None:
    settings = {**SMALL, "checkpoint__retry_ms": 10}
    with Daemon(tmp_path, **settings) as daemon, RawPeer(daemon.endpoint) as peer:
        send(peer, 1, b"one")
        until(lambda: lag(peer) == 0)
        (first,) = children(daemon.process.pid)
        os.kill(first, signal.SIGKILL)
        send(peer, 2, b"two")
        daemon.wait_for("checkpoint_process_restarted")
        until(lambda: lag(peer) == 0)
        (second,) = children(daemon.process.pid)
        assert second != first
        assert daemon.terminate() == 0
        assert not Path(f"/proc/{second}").exists()


def test_ctrl_c_on_a_terminal_ends_both_in_order(tmp_path: Path) -> None:
    with Daemon(tmp_path, **SMALL) as daemon, RawPeer(daemon.endpoint) as peer:
        send(peer, 1, b"one")
        until(lambda: lag(peer) == 0)
        (follower,) = children(daemon.process.pid)
        send(peer, 2, b"two")
        os.kill(follower, signal.SIGINT)  # As a terminal does, to each process of the group.
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(timeout=WAIT_S) == 0
        assert not Path(f"/proc/{follower}").exists()
    with Daemon(tmp_path, **SMALL) as daemon:
        line = daemon.wait_for("queues_recovered")
        assert (line["messages"], line["lag_bytes"]) == (2, 0)


def test_a_broker_in_memory_has_no_process() -> None:
    with Daemon("", **SMALL) as daemon, RawPeer(daemon.endpoint) as peer:
        send(peer, 1, b"one")
        peer.send(BrokerInfo(1))
        result, _ = peer.get(Result)
        assert "checkpoint" not in result.value
        assert not children(daemon.process.pid)


def test_tables_that_were_lost_are_made_anew_and_said(tmp_path: Path) -> None:
    with Daemon(tmp_path, **SMALL) as daemon, RawPeer(daemon.endpoint) as peer:
        send(peer, 1, b"one")
        assert daemon.terminate() == 0
    (tmp_path / "queues.db").unlink()
    with Daemon(tmp_path, **SMALL) as daemon:
        rebuilt = daemon.wait_for("queues_rebuilt")
        assert "queues.db is missing" in rebuilt["reason"]
        assert rebuilt["lost"].startswith("nothing")
        assert daemon.wait_for("queues_recovered")["messages"] == 1


def test_a_ring_full_of_what_no_table_has_lets_mail_wait_and_acknowledgements_pass(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path, **SMALL) as daemon, RawPeer(daemon.endpoint) as peer:
        small = send(peer, 1, b"small")
        until(lambda: lag(peer) == 0)
        (follower,) = children(daemon.process.pid)
        os.kill(follower, signal.SIGSTOP)
        try:
            content = encode([b"m" * 200_000])
            for number in range(2, 200):
                peer.send(Send("box", number), frames=(content,))
                answer, _ = peer.next()
                if isinstance(answer, Refused):
                    break
            else:
                raise AssertionError("the ring took more than it has")
            assert (answer.code, answer.retry_ms > 0) == ("wait", True)
            daemon.wait_for("pressure_begins")
            assert received(peer, 1)[0] == b"small"
            peer.send(AckMail(7, [(small, small + 1)], 1000))
            peer.get(Confirm)
        finally:
            os.kill(follower, signal.SIGCONT)
        daemon.wait_for("pressure_ends")
        send(peer, 1001, b"goes on")


def test_the_checkpoint_is_among_the_metrics(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        facts = broker.server.metrics()["checkpoint"]
    for name in ("lsn", "lag_bytes", "seconds", "failures_total", "restarts_total", "ring_use"):
        assert facts[name] >= 0
    assert facts["failing"] is False
