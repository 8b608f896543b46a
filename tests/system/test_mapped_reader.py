"""Readers of the files beside a broker whose rings come round under them, and who is killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import malamute_py as malamute
from malamute_py.demo.daemon import Daemon
from malamute_py.journal import open_reader
from malamute_py.mapped import LogReader, MappedBatch, Overwritten
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


KEYS = 50
RARE = 40
"""One record of so many has the subject that few rows have."""
LAP = 2_000
"""Records of 1 KiB that go nearly twice around a ring."""
TOTAL = 10_000


def subject_at(stream: str, offset: int) -> str:
    if stream == "kept":
        return f"k{offset % KEYS}"
    return "rare" if offset % RARE == 0 else f"often.{offset % 7}"


class Writer(threading.Thread):
    """Publishes bodies and subjects that follow from their offsets."""

    def __init__(self, endpoint: str, stream: str) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.stream = stream
        self.first = 1 if stream == "kept" else 0
        """Offset of the stream's first record: no revision of a key is 0."""
        self.written = self.first
        self.stopped = False

    def run(self) -> None:
        with malamute.connect_sync(self.endpoint) as client:
            while self.written < TOTAL and not self.stopped:
                offsets = range(self.written, min(self.written + 20, TOTAL))
                client.publish_many(
                    self.stream,
                    [body_at(offset) for offset in offsets],
                    subjects=[subject_at(self.stream, offset) for offset in offsets],
                )
                self.written = offsets.stop


class Onlooker:
    """One reading beside the broker, which checks each row and notes what it saw and missed."""

    def __init__(self, log: LogReader, writer: Writer, pattern: str, *, copy: bool) -> None:
        self.writer = writer
        self.pattern = pattern
        self.seen: set[int] = set()
        self.gone: set[int] = set()
        self.overwritten = 0
        """Batches that the ring took after they had been handed out."""
        self.reading = log.read(writer.stream, pattern, copy=copy, end=TOTAL, on_notice=self.note)

    def note(self, notice: malamute.Notice) -> None:
        assert isinstance(notice, malamute.GapNotice)
        assert notice.code == "retention"
        self.gone.update(range(notice.from_offset, notice.to_offset))

    def steps(self) -> Iterator[None]:
        """Read a batch at each step, until the end; now and then hold one while the ring turns."""
        hold_at = 0
        while True:
            try:
                batch = self.reading.next_batch(1)
            except malamute.Timeout:
                yield
                continue
            except Overwritten:
                self.overwritten += 1
                continue  # The batch before was overwritten after its check below.
            if batch is None:
                return
            try:
                table = batch.to_arrow(decode=True)
                if batch.base_offset >= hold_at:
                    hold_at = batch.base_offset + 2 * LAP
                    turned = min(self.writer.written + LAP, TOTAL)
                    while self.writer.written < turned:
                        yield
                columns = table.to_pydict()
                if isinstance(batch, MappedBatch):
                    batch.check()
            except Overwritten as error:
                self.overwritten += 1
                self.gone.update(range(error.from_offset, error.to_offset))
                continue
            stream = self.writer.stream
            for offset, subject, body in zip(
                columns["offset"], columns["subject"], columns["body"], strict=True
            ):
                assert (subject, body) == (subject_at(stream, offset), body_at(offset))
                assert offset not in self.seen, "a record came twice"
                self.seen.add(offset)
            yield

    def check(self) -> None:
        """Check that each record was seen, or is named as gone, or has a newer one of its key."""
        stream = self.writer.stream
        offsets = range(self.writer.first, TOTAL)
        wanted = [at for at in offsets if self.pattern in ("#", subject_at(stream, at))]
        if stream == "kept":
            assert self.seen.issuperset({at % KEYS: at for at in wanted}.values())
        else:
            assert self.seen | self.gone >= set(wanted)
            assert self.seen.isdisjoint(self.gone)
            assert self.gone


def test_no_reader_gets_a_wrong_row_while_several_rings_come_round(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, ExitStack() as stack:
        with malamute.connect_sync(daemon.endpoint) as client:
            client.create_stream("wide", ring_bytes=RING_BYTES)
            client.create_stream("kept", ring_bytes=RING_BYTES, keep="last-per-subject")
        log = stack.enter_context(open_reader(tmp_path / "data"))
        wide, kept = (Writer(daemon.endpoint, stream) for stream in ("wide", "kept"))
        onlookers = [
            Onlooker(log, writer, pattern, copy=copy)
            for writer, pattern in ((wide, "#"), (wide, "rare"), (kept, "#"), (kept, "k7"))
            for copy in (False, True)
        ]
        for writer in (wide, kept):
            stack.callback(writer.join)
            stack.callback(setattr, writer, "stopped", True)
            writer.start()
        running = [each.steps() for each in onlookers]
        while running:
            running = [each for each in running if next(each, running) is None]
            assert all(each.is_alive() or each.written == TOTAL for each in (wide, kept))
    for each in onlookers:
        each.check()
    assert any(each.overwritten for each in onlookers)
