"""`malamute snapshot` beside a running broker, and a broker that starts from one."""

from __future__ import annotations

from pathlib import Path

import pytest

from malamute_py import EmbeddedBroker
from tests.cli.running import run_cli
from tests.cli.test_journal import SMALL


@pytest.mark.moderate
def test_a_snapshot_of_a_running_broker_is_taken_verified_and_restored(tmp_path: Path) -> None:
    data, snap, new = tmp_path / "data", tmp_path / "snap", tmp_path / "new"
    with EmbeddedBroker(data, **SMALL) as broker, broker.connect_sync() as client:  # type: ignore[arg-type]
        for number in range(30):
            client.publish("orders", b"%d" % number)
        client.create_stream("own", ring_bytes=8 << 20)
        for number in range(20):
            client.publish("own", b"own %d" % number)
        taken = run_cli("snapshot", "take", str(snap), "--data", str(data), "--json").ok().json
        assert taken["findings"] == []
        client.publish("orders", b"later")
    assert run_cli("snapshot", "verify", str(snap), "--json").ok().json["rings"] == taken["rings"]
    run_cli("snapshot", "restore", str(snap), "--data", str(new)).ok()
    with EmbeddedBroker(new, **SMALL) as broker, broker.connect_sync() as client:  # type: ignore[arg-type]
        assert client.stream_info("orders").tail == 30
        records = client.subscribe("own", start="earliest", until="tail")
        assert [record.body for record in records] == [b"own %d" % n for n in range(20)]
        assert client.publish("own", b"next").offset == 20
    run_cli("journal", "verify", str(new)).ok()


@pytest.mark.moderate
def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    data, snap = tmp_path / "data", tmp_path / "snap"
    with EmbeddedBroker(data, **SMALL):  # type: ignore[arg-type]
        run_cli("snapshot", "take", str(snap), "--data", str(data)).ok()
        again = run_cli("snapshot", "take", str(snap), "--data", str(data))
    assert again.code == 1
    assert "is there already; name a new directory" in again.err


def test_a_directory_that_is_not_there_is_named_with_the_option_that_names_another(
    tmp_path: Path,
) -> None:
    outcome = run_cli("snapshot", "take", str(tmp_path / "copy"), "--data", str(tmp_path / "no"))
    assert outcome.code == 1
    assert outcome.err == (
        f"error: {tmp_path / 'no'}: there is no such directory; name the broker's with --data\n"
    )


@pytest.mark.moderate
def test_a_damaged_snapshot_is_told(tmp_path: Path) -> None:
    data, snap = tmp_path / "data", tmp_path / "snap"
    with EmbeddedBroker(data, **SMALL):  # type: ignore[arg-type]
        run_cli("snapshot", "take", str(snap), "--data", str(data)).ok()
    (snap / "data" / "journal").write_bytes(b"")
    verified = run_cli("snapshot", "verify", str(snap), "--json")
    assert verified.code == 1
    assert verified.json["findings"] == ["journal: not as it was written"]
    restored = run_cli("snapshot", "restore", str(snap), "--data", str(tmp_path / "new"))
    assert restored.code == 1
    assert "use another snapshot" in restored.err
