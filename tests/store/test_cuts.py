"""Snapshots amid commits: a transaction is in the copy whole and once, or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.errors import Timeout
from malamute_py import EmbeddedBroker
from malamute_py.broker.ready import MAIN
from malamute_py.broker.transactions.moving import Moving
from malamute_py.client.sync.client import SyncClient
from malamute_py.client.sync.transactions import SyncTransaction
from malamute_py.store import snapshot as snapshots
from malamute_py.store.snapshot import SnapshotFailed
from tests.waiting import WAIT_MS

pytestmark = pytest.mark.slow


def begun(client: SyncClient, body: bytes) -> SyncTransaction:
    """Begin a transaction over ring main and a ring of a stream's own."""
    transaction = client.transaction()
    transaction.begin()
    for stream in ("a", "own", "own"):
        transaction.publish(stream, body)
    return transaction


def loaded(client: SyncClient, body: bytes) -> None:
    """Commit such a transaction."""
    begun(client, body).commit(timeout_ms=WAIT_MS)


def turned(client: SyncClient) -> None:
    """Publish so much that the ring of `own` begins another segment."""
    for _ in range(12):
        client.publish("own", os.urandom(250_000))


def taken(
    monkeypatch: pytest.MonkeyPatch, data: Path, target: Path, amid: Callable[[], None]
) -> Path:
    """Take a snapshot, do something once ring main is copied, and restore it."""
    begin = snapshots._RingCopy.begin
    done: list[str] = []

    def begun(self: Any) -> None:
        if self._name != MAIN and not done:
            done.append(self._name)
            amid()
        begin(self)

    with monkeypatch.context() as patch:
        patch.setattr(snapshots._RingCopy, "begin", begun)
        manifest = snapshots.take(data, target / "snap")
    assert done
    assert manifest.findings == []
    snapshots.restore(target / "snap", target / "new")
    return target / "new"


def found(data: Path, wanted: bytes) -> tuple[int, int, int]:
    """Start from a data directory; count the records of one body in `a` and `own`, and the rest."""
    with EmbeddedBroker(data) as broker, broker.connect_sync() as client:
        while client.transactions():
            pass
        counts, others = [], 0
        for stream in ("a", "own"):
            records = client.stream_info(stream).tail
            reading = client.subscribe(stream, start="earliest", until="tail")
            with reading as subscription:
                bodies = [bytes(record.body) for record in subscription] if records else []
            counts.append(bodies.count(wanted))
            others += len(bodies) - counts[-1]
        return counts[0], counts[1], others


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold committed records back from rings of streams' own while the event is set."""
    event = threading.Event()
    go_on = Moving._go_on

    def later(self: Any, lane: Any) -> None:
        if lane.ring != MAIN and event.is_set():
            self._timers.set(self._shard.now_ms + 10, partial(self._go_on, lane))
        else:
            go_on(self, lane)

    monkeypatch.setattr(Moving, "_go_on", later)
    return event


@pytest.mark.parametrize("turn", [False, True])
def test_a_transaction_that_is_committed_after_ring_main_is_copied_is_not_in_the_snapshot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, turn: bool
) -> None:
    with EmbeddedBroker(tmp_path / "data") as broker, broker.connect_sync() as client:
        client.create_stream("own", ring_bytes=8 << 20)
        loaded(client, b"before")
        client.publish("own", b"confirmed")

        def amid() -> None:
            if turn:
                turned(client)
            loaded(client, b"amid")
            if not turn:
                turned(client)

        new = taken(monkeypatch, tmp_path / "data", tmp_path, amid)
    assert found(new, b"amid") == (0, 0, 1 + 2 + 1 + 12 * turn)
    assert found(new, b"before")[:2] == (1, 2)


@pytest.mark.parametrize("turn", [False, True])
def test_records_that_reach_their_ring_after_ring_main_is_copied_come_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held: threading.Event, turn: bool
) -> None:
    with EmbeddedBroker(tmp_path / "data") as broker, broker.connect_sync() as client:
        client.create_stream("own", ring_bytes=8 << 20)
        client.publish("own", b"confirmed")
        held.set()
        transaction, said = begun(client, b"held"), ""
        # A slow machine may take longer for the commit itself.
        while "is committed" not in said:
            with pytest.raises(Timeout) as ended:
                transaction.commit(timeout_ms=200)
            said = str(ended.value)

        def amid() -> None:
            held.clear()
            while client.transactions():
                pass
            if turn:
                turned(client)

        new = taken(monkeypatch, tmp_path / "data", tmp_path, amid)
    assert found(new, b"held")[:2] == (1, 2)


def test_a_transaction_that_was_committed_before_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with EmbeddedBroker(tmp_path / "data") as broker, broker.connect_sync() as client:
        client.create_stream("own", ring_bytes=8 << 20)
        turned(client)
        loaded(client, b"whole")
        new = taken(monkeypatch, tmp_path / "data", tmp_path, lambda: turned(client))
    assert found(new, b"whole")[:2] == (1, 2)


def test_a_ring_that_goes_round_amid_a_snapshot_fails_it_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with EmbeddedBroker(tmp_path / "data") as broker, broker.connect_sync() as client:
        client.create_stream("own", ring_bytes=8 << 20)
        loaded(client, b"before")

        def amid() -> None:
            for _ in range(4):
                turned(client)
            loaded(client, b"amid")

        with pytest.raises(SnapshotFailed, match="went round while others were copied"):
            taken(monkeypatch, tmp_path / "data", tmp_path, amid)
    assert not (tmp_path / "snap").exists()
