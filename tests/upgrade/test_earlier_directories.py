"""Data directories that earlier commits wrote are opened, served and written on.

The rule: what a client of the version that wrote a directory saw of it, a client of today sees as
well, of a directory that was closed in order and of one whose broker was killed. keep.py adds one.
"""

from __future__ import annotations

import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest

from malamute_py.server import StartError
from tests.upgrade.keep import KEPT
from tests.upgrade.writing import open_broker, seen

pytestmark = pytest.mark.slow
ARCHIVES = sorted(KEPT.glob("*.tar.xz"))


def as_kept(facts: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(json.dumps(facts))
    return kept


def test_directories_are_kept() -> None:
    assert len(ARCHIVES) >= 5


@pytest.mark.parametrize("end", ["stopped", "killed"])
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def test_an_earlier_directory_is_served_whole_and_written_on(
    archive: Path, end: str, tmp_path: Path
) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    directory = tmp_path / end
    written = json.loads((tmp_path / "seen.json").read_text())
    with open_broker(directory) as broker, broker.connect_sync() as client:
        assert as_kept(seen(client)) == written
        assert not client.broker_info().more["damage"]
        tail = written["streams"]["trades"]["tail"]
        assert client.publish("trades", b"after", subject="forex.eur").offset == tail
        with client.worker("tax") as worker:
            for _ in range(written["services"]["tax"][0]):
                request = worker.next(timeout_ms=10_000)
                assert request is not None
                assert request.reply(b"at last", wait=True)
        with client.inbox("crew.berlin") as inbox:
            mail = inbox.next(timeout_ms=10_000)
            assert mail is not None
            assert mail.ack()
    with open_broker(directory) as broker, broker.connect_sync() as client:
        found = as_kept(seen(client))
    assert len(found["streams"]["trades"]["records"]) == tail + 1
    assert found["services"]["tax"] == [0, 0]
    left = len(written["mailboxes"]["crew.berlin"]) - 1
    assert len(found["mailboxes"]["crew.berlin"]) == left
    for part in ("cursors", "groups", "keys"):
        assert found[part] == written[part]


def test_a_directory_of_a_later_version_is_refused_by_name_and_left_as_it_is(
    tmp_path: Path,
) -> None:
    with tarfile.open(ARCHIVES[-1]) as packed:
        packed.extractall(tmp_path, filter="data")
    directory = tmp_path / "stopped"
    with (directory / "journal").open("r+b") as file:
        file.seek(4)
        file.write(struct.pack("<H", 2))
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(StartError, match="journal has version 2, and this program knows 1"):
        open_broker(directory).__enter__()
    after = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    after.pop(directory / "lock")
    before.pop(directory / "lock")
    assert after == before
