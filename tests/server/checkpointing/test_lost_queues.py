"""A broker whose tables are lost: streams are served, and the rest is refused by name."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

import malamute_py as malamute
from malamute_py import EmbeddedBroker
from malamute_py.client.sync.client import SyncClient
from malamute_py.journal.inspect import verify
from malamute_py.journal.storage import FileStorage
from malamute_py.server.errors import StartError
from malamute_py.store.checking import findings, foreign_main
from malamute_py.store.database import DATABASE
from malamute_py.store.mending import CannotMend, mend

SMALL: dict[str, Any] = {
    "journal.segment_bytes": 1 << 20,
    "journal.ring_bytes": 8 << 20,
    "limits.batch_bytes_max": 256 << 10,
    "limits.record_bytes_max": 128 << 10,
}


def fill(directory: Path) -> int:
    """Mail, cursors and groups, and streams that have gone round since; returns the tail."""
    with EmbeddedBroker(directory, **SMALL) as broker, broker.connect_sync() as client:
        client.create_stream("own", ring_bytes=4 << 20)
        client.publish("own", b"own")
        client.send("crew", b"lost")
        client.publish("s", b"first")
        client.cursor("s", "c").move(1)
    with EmbeddedBroker(directory, **SMALL) as broker, broker.connect_sync() as client:
        for _ in range(100):
            last = client.publish("s", b"x" * 100_000)
        return last.offset + 1


@pytest.mark.slow
def test_streams_are_served_and_the_rest_is_refused_as_lost(tmp_path: Path) -> None:
    """The whole broker did not start."""
    tail = fill(tmp_path / "data")
    (tmp_path / "data" / DATABASE).write_bytes(b"")
    with EmbeddedBroker(tmp_path / "data", **SMALL) as broker, broker.connect_sync() as client:
        assert client.stream_info("s").tail == tail
        assert client.publish("s", b"goes on").offset == tail
        with client.subscribe("own", start="earliest", until="tail") as own:
            assert [record.body for record in own] == [b"own"]
        refused: dict[str, Callable[[], object]] = {
            "send": lambda: client.send("crew", b"more"),
            "request": lambda: client.request("work", b"x", timeout_ms=5_000),
            "move": lambda: client.cursor("s", "c").move(2),
            "info": lambda: client.cursor("s", "c").info(),
            "mailboxes": client.list_mailboxes,
            "subscribe": lambda: list(
                client.subscribe("s", start=malamute.FromCursor("c"), until="tail")
            ),
        }
        for name, call in refused.items():
            with pytest.raises(malamute.BrokerRefused) as caught:
                call()
            assert caught.value.code == "queues_lost", name
        with pytest.raises(malamute.BrokerRefused, match="queues_lost"), client.atomic() as step:
            step.publish_many("s", [b"in a step"])
        assert client.publish("s", b"and on").offset == tail + 1
        info = client.broker_info().more
        assert info["checkpoint"]["lost"] is True
        assert "the log begins at position" in info["checkpoint"]["reason"]
        assert any(DATABASE in line for line in info["damage"])
    accept = {**SMALL, "checkpoint.lost_changes": "accept"}
    with EmbeddedBroker(tmp_path / "data", **accept) as broker, broker.connect_sync() as client:
        assert client.stream_info("s").tail == tail + 2
        client.send("crew", b"anew")
    with EmbeddedBroker(tmp_path / "data", **SMALL) as broker, broker.connect_sync() as client:
        with client.inbox("crew") as inbox:
            for mail in inbox:
                assert bytes(mail.body) == b"anew"
                break
        assert client.broker_info().more["checkpoint"]["lost"] is False


@pytest.mark.slow
def test_streams_go_on_when_the_ring_is_full_of_what_was_kept_for_the_queues(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "data")
    (tmp_path / "data" / DATABASE).unlink()
    with EmbeddedBroker(tmp_path / "data", **SMALL) as broker, broker.connect_sync() as client:
        first = client.stream_info("s").first
        for _ in range(200):
            client.publish("s", b"x" * 100_000)
        # The thread that keeps the rings tells the loop when it comes to that.
        until = time.monotonic() + 20
        while client.stream_info("s").first <= first and time.monotonic() < until:
            time.sleep(0.01)
        assert client.stream_info("s").first > first


def bodies(client: SyncClient) -> list[bytes]:
    """Take all mail."""
    with client.inbox("crew") as inbox:
        count = sum(each.messages for each in client.list_mailboxes())
        return [bytes(mail.body) for _, mail in zip(range(count), inbox, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("back", [1, 0])
def test_a_segment_that_is_lost_takes_no_mail_of_others_and_is_accepted_once(
    back: int, tmp_path: Path
) -> None:
    """Mail was refused as lost again at each start after one that had accepted the loss.

    The tables, which had all changes when the broker was closed, were thought to lack as many as
    the lost bytes might have held.
    """
    data = tmp_path / "data"
    roomy = {**SMALL, "journal.ring_bytes": 16 << 20}
    with EmbeddedBroker(data, **roomy) as broker, broker.connect_sync() as client:
        for number in range(20):
            client.send("crew", b"%d" % number)
        for _ in range(60):
            client.publish("s", b"x" * 100_000)
        end_lsn = client.broker_info().more["rings"]["main"]["end_lsn"]
    newest = end_lsn // roomy["journal.segment_bytes"]
    (data / "rings" / "main" / f"{newest - back:012d}.seg").unlink()
    expected = [b"%d" % number for number in range(20)]
    # Nothing tells what the newest segment held after the tables: the operator accepts that once.
    accepted = {**roomy, "checkpoint.lost_changes": "refuse" if back else "accept"}
    for start, settings in enumerate([accepted, roomy, roomy]):
        with EmbeddedBroker(data, **settings) as broker, broker.connect_sync() as client:
            client.send("crew", b"after start %d" % start)
            expected.append(b"after start %d" % start)
            assert bodies(client) == expected
            expected.clear()  # they were taken
            facts = client.broker_info().more
            assert facts["checkpoint"]["lost"] is False
            assert any("missing" in line for line in facts["damage"])


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["exchanged", "of another directory"])
def test_a_ring_main_that_is_another_ring_is_refused_and_named(fate: str, tmp_path: Path) -> None:
    """The broker started without its streams, and confirmed records from offset 0 on."""
    data, rings = tmp_path / "data", tmp_path / "data" / "rings"
    fill(data)
    (own,) = (each for each in rings.iterdir() if each.name != "main")
    kept = tmp_path / "kept"
    (rings / "main").rename(kept)
    if fate == "exchanged":
        own.rename(rings / "main")
        kept.rename(own)
    else:
        fill(tmp_path / "other")
        shutil.copytree(tmp_path / "other" / "rings" / "main", rings / "main")
    with pytest.raises(StartError, match="exchanged"), EmbeddedBroker(data, **SMALL):
        pass
    with pytest.raises(CannotMend, match="exchanged"):
        mend(data, tmp_path / "mended")
    told = [finding for finding in verify(data) if finding.kind == "damaged"]
    assert {finding.ring for finding in told} == (
        {"main", own.name} if fate == "exchanged" else {"main"}
    )
    assert any("exchanged" in finding.message for finding in findings(data))
    # Once the directories are where they were, all is as it was.
    if fate == "exchanged":
        own.rename(kept)
        (rings / "main").rename(own)
    else:
        shutil.rmtree(rings / "main")
    kept.rename(rings / "main")
    with EmbeddedBroker(data, **SMALL) as broker, broker.connect_sync() as client:
        assert {stream.name for stream in client.list_streams()} == {"own", "s"}
        assert bodies(client) == [b"lost"]


def test_a_mark_that_cannot_be_read_refuses_no_start(tmp_path: Path) -> None:
    class Unreadable(FileStorage):
        def open(self, name: str) -> NoReturn:
            raise OSError(errno.EIO, "Input/output error")

    with EmbeddedBroker(tmp_path / "data", **SMALL):
        pass
    assert foreign_main(Unreadable(tmp_path / "data")) == ""
