"""A reader of the files beside a broker whose ring comes round under it, and who is killed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import malamute_py as malamute
from malamute_py.demo.daemon import Daemon
from malamute_py.journal import open_reader
from malamute_py.mapped import MappedBatch, Overwritten
from tests.waiting import WAIT_MS

pytestmark = pytest.mark.system

RING_BYTES = 1 << 20
COUNT = 100
"""Records of a batch, 1 KiB each: ten batches go once around."""
BATCHES = 400


def body_at(offset: int) -> bytes:
    return (b"%d," % offset * 1024)[:1024]


def publish(endpoint: str, first: int, end: int, stopped: threading.Event) -> None:
    """Publish bodies that say their own offsets."""
    with malamute.connect_sync(endpoint) as client:
        for begin in range(first, end, COUNT):
            if stopped.is_set():
                return
            client.publish_many("trades", [body_at(n) for n in range(begin, begin + COUNT)])


def test_a_reader_beside_a_broker_that_laps_its_ring_gets_right_records_or_is_told(
    tmp_path: Path,
) -> None:
    gone: set[int] = set()
    seen: set[int] = set()
    total, stopped = COUNT * BATCHES, threading.Event()

    def note(notice: malamute.Notice) -> None:
        assert isinstance(notice, malamute.GapNotice)
        assert notice.code == "retention"
        gone.update(range(notice.from_offset, notice.to_offset))

    with Daemon(tmp_path) as daemon:
        with malamute.connect_sync(daemon.endpoint) as client:
            client.create_stream("trades", ring_bytes=RING_BYTES)
        writer = threading.Thread(target=publish, args=(daemon.endpoint, 0, total, stopped))
        writer.start()
        try:
            with open_reader(tmp_path / "data") as log:
                reading = log.read("trades", end=total, on_notice=note)
                while True:
                    try:
                        batch = reading.next_batch(WAIT_MS)
                    except Overwritten:
                        continue  # The batch before was overwritten after its check below.
                    if batch is None:
                        break
                    assert isinstance(batch, MappedBatch)
                    offsets = range(batch.base_offset, batch.base_offset + len(batch))
                    slow = offsets[0] % (50 * COUNT) == 0
                    try:
                        columns = batch.to_arrow()
                        while slow and batch.intact() and writer.is_alive():
                            writer.join(0.01)  # until the ring has come round
                        found = columns["offset"].to_pylist(), columns["body"].to_pylist()
                        batch.check()
                    except Overwritten:
                        gone.update(offsets)
                        continue
                    # What was taken before the check was right.
                    assert found == (list(offsets), [body_at(offset) for offset in offsets])
                    assert seen.isdisjoint(offsets)
                    seen.update(offsets)
        finally:
            stopped.set()
            writer.join()
    assert seen | gone == set(range(total))
    assert gone
    assert seen.isdisjoint(gone)


def test_a_reader_goes_on_when_the_broker_is_killed_and_started_again(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        stopped = threading.Event()
        with malamute.connect_sync(daemon.endpoint) as client:
            client.create_stream("trades")
        with open_reader(tmp_path / "data") as log:
            reading, seen = log.read("trades", strict=True), 0
            for life in range(3):
                publish(daemon.endpoint, life * 500, (life + 1) * 500, stopped)
                while seen < (life + 1) * 500:
                    batch = reading.next_batch(WAIT_MS)
                    assert batch is not None
                    for record in batch:
                        assert (record.offset, record.body) == (seen, body_at(seen))
                        seen += 1
                daemon.kill()
                daemon.start()
            with pytest.raises(malamute.Timeout):
                reading.next_batch(0)
