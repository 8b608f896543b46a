"""Rare rows of a log that another writes: read alone and gathered, as whole batches would be."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import malamute_py as malamute
from malamute_protocol.batch import Batch, Record
from malamute_py.changelog.records import StreamPurged
from malamute_py.journal import RingSettings
from malamute_py.journal import known as known_module
from malamute_py.journal.check import content_fault
from malamute_py.journal.gathering import TAKEN_MAX
from malamute_py.mapped import LogReader, open_reader
from malamute_py.mapped import walk as walk_module
from malamute_py.mapped.segments import MAPS_MAX
from tests.journal.rings import S
from tests.mapped.logs import Log, batches, descriptors
from tests.seeds import seeds

BATCHES = 24
ROWS = 100


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    opened = Log(tmp_path / "data", RingSettings(S, 16 * S, index_interval_bytes=2048))
    yield opened
    opened.close()


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets of the batches of 100 rows whose contents were checked."""
    found: list[int] = []

    def noted(view: Any, begin: int, end: int, stamp: Any) -> str:
        if stamp.count == ROWS:
            found.append(stamp.base_offset)
        return content_fault(view, begin, end, stamp)

    monkeypatch.setattr(walk_module, "content_fault", noted)
    return found


def large(log: Log, stream: int, rare: dict[int, bytes], **options: Any) -> None:
    """Append a batch of 100 rows of 100 B, of which these are rare."""
    bodies = [rare.get(row, b"x" * 100) for row in range(ROWS)]
    subjects = ["rare" if row in rare else "common" for row in range(ROWS)]
    log.put(stream, *bodies, subject=subjects, **options)


def fill(log: Log) -> int:
    """Write a rare row in each of many batches, most of which lie in sealed segments."""
    trades = log.create("trades")
    for number in range(BATCHES):
        large(log, trades, {number: b"%d" % number})
    log.tidy()
    return trades


def seen(record: Record) -> tuple[Any, ...]:
    return (
        record.offset, record.epoch, record.append_time_ms, record.client_time_ms,
        record.subject, dict(record.fields), record.body,
    )  # fmt: skip


@pytest.mark.moderate
def test_rare_rows_are_read_without_their_batches_and_come_together(
    log: Log, reader: LogReader, looked_at: list[int]
) -> None:
    fill(log)
    with reader.read("trades", "rare", copy=True, until="tail", strict=True) as reading:
        found = list(batches(reading))
    assert [record.body for each in found for record in each] == [b"%d" % n for n in range(BATCHES)]
    assert [record.offset for each in found for record in each] == [101 * n for n in range(BATCHES)]
    assert all(type(each) is Batch and each.stamp.derived for each in found)
    assert len(found) == 1
    # The segment that is being written has no index yet.
    assert 0 < len(looked_at) < BATCHES // 3


def test_few_rows_of_many_batches_come_together_without_spots(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    for number in range(10):
        subjects = [f"one.{row}" for row in range(ROWS)]
        log.put(trades, *[b"%d" % number] * ROWS, subject=subjects, client_time_ms=number)
    reading = reader.read("trades", "one.7", copy=True, until="tail")
    (found,) = batches(reading)
    assert found.offsets.tolist() == [100 * number + 7 for number in range(10)]
    assert found.bodies() == [b"%d" % number for number in range(10)]
    found.verify()


@pytest.mark.moderate
def test_a_known_batch_is_read_again_by_the_rows_that_are_wanted(
    log: Log, reader: LogReader, looked_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_module, "KNOWN_FROM", 2048)
    monkeypatch.setattr(known_module, "_BLOCK_BYTES", 256)
    trades = log.create("trades")
    for number in range(BATCHES):
        subjects = [f"one.{row}" for row in range(ROWS)]
        bodies = [b"%d." % number + b"x" * 90] * ROWS
        log.put(trades, *bodies, subject=subjects, client_time_ms=number)
    log.tidy()
    first = outcome(reader, "one.7", copy=True)
    assert [row[0] for row in first] == [100 * number + 7 for number in range(BATCHES)]
    assert len(looked_at) == BATCHES
    looked_at.clear()
    assert outcome(reader, "one.7", copy=True) == first
    assert outcome(reader, "one.8", copy=True, start=250) == outcome(
        reader, "one.8", copy=False, start=250
    )
    window = {"client_time": (3, 9)}
    assert outcome(reader, "one.9", copy=True, **window) == outcome(
        reader, "one.9", copy=False, **window
    )
    # Three readings of copies looked at those batches alone whose segment has no index yet.
    sealed = sum(offset < 1000 for offset in looked_at)
    assert sealed <= 2 * 10, "the readings of views alone"
    # Another file under the name of a mapped segment has its batches read through the mapping.
    with open_reader(log.path) as other:
        outcome(other, "one.7", copy=False)
        path = log.path / "rings" / "main" / "000000000000.seg"
        path.rename(path.with_suffix(".aside"))
        path.write_bytes(path.with_suffix(".aside").read_bytes()[:-1] + b"?")
        assert outcome(other, "one.7", copy=True) == first
        path.with_suffix(".aside").rename(path)
    gc.collect()
    before = descriptors(log.path)
    with open_reader(log.path) as other:
        assert outcome(other, "one.7", copy=True) == first
        assert before < descriptors(log.path) <= before + 2 * MAPS_MAX + 3
    gc.collect()
    assert descriptors(log.path) == before
    # A damaged block has the batch read whole, and told.
    path = log.path / "rings" / "main" / "000000000000.seg"
    data = bytearray(path.read_bytes())
    data[data.index(b"2." + b"x" * 90) + 7 * 92 + 40] ^= 1
    path.write_bytes(data)
    notices: list[malamute.Notice] = []
    reading = reader.read("trades", "one.7", copy=True, until="tail", on_notice=notices.append)
    found = [record.offset for each in batches(reading) for record in each]
    assert found == [100 * number + 7 for number in range(BATCHES) if number != 2]
    assert [(each.from_offset, each.to_offset) for each in notices] == [(200, 300)]  # type: ignore[union-attr]
    # What was purged meanwhile is not taken from what is known.
    log.change(
        StreamPurged(trades, msgspec.msgpack.encode(["topic", "one.8"]), 1000, 0, 2000, "op")
    )
    assert min(row[0] for row in outcome(reader, "one.8", copy=True, start=300)) >= 1000


@pytest.mark.moderate
def test_a_reader_of_views_gets_whole_batches(
    log: Log, reader: LogReader, looked_at: list[int]
) -> None:
    fill(log)
    assert len(list(batches(reader.read("trades", "rare", until="tail")))) == BATCHES
    assert len(looked_at) == BATCHES


@pytest.mark.moderate
def test_a_reader_goes_on_after_each_batch_where_the_last_one_ended(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    trades = log.create("trades")
    for _ in range(6):
        large(log, trades, {3: b"a", 60: b"b"})
        # Many rows of a batch come with it, in between.
        log.put(trades, *[b"many"] * 4, subject="rare")
    log.tidy()
    monkeypatch.setattr("malamute_py.mapped.gathered.ROWS_MAX", 3)
    whole = [seen(each) for each in reader.read("trades", "rare", until="tail").records()]
    assert len(whole) == 36
    reading = reader.read("trades", "rare", copy=True, until="tail", strict=True)
    taken: list[tuple[Any, ...]] = []
    for batch in batches(reading):
        taken += map(seen, batch)
        rest = reader.read("trades", "rare", start=reading.position, copy=True, until="tail")
        assert taken + list(map(seen, rest.records())) == whole
    assert taken == whole


@pytest.mark.moderate
def test_a_reading_that_is_closed_amid_rows_stands_after_what_it_handed_out(
    log: Log, reader: LogReader
) -> None:
    fill(log)
    reading = reader.read("trades", "rare", copy=True, until="tail")
    next(reading._steps, None)
    reading._advance()
    reading.close()
    assert reading.position.next == 0


@pytest.mark.moderate
def test_a_damaged_rare_row_is_a_gap_of_one_record(log: Log, reader: LogReader) -> None:
    fill(log)
    path = log.path / "rings" / "main" / "000000000000.seg"
    data = bytearray(path.read_bytes())
    at = data.index(b"x" * 100 + b"2" + b"x" * 100)
    data[at + 100] ^= 1
    path.write_bytes(data)
    notices: list[malamute.Notice] = []
    reading = reader.read("trades", "rare", copy=True, until="tail", on_notice=notices.append)
    found = list(batches(reading))
    assert [(each.from_offset, each.to_offset) for each in notices] == [(202, 203)]  # type: ignore[union-attr]
    offsets = [each.offsets.tolist() for each in found]
    # What was gathered before the gap was handed out before it.
    assert offsets == [[0, 101], [101 * number for number in range(3, BATCHES)]]


@pytest.mark.moderate
def test_rare_rows_that_were_purged_or_lie_outside_are_not_handed_out(
    log: Log, reader: LogReader
) -> None:
    trades = fill(log)
    log.change(StreamPurged(trades, msgspec.msgpack.encode(["topic", "rare"]), 1000, 0, 2000, "op"))
    reading = reader.read("trades", "rare", start=500, copy=True, end=1500)
    assert [each.offset for each in reading.records()] == [1010, 1111, 1212, 1313, 1414]
    assert reading.position.next == 1500


def outcome(reader: LogReader, pattern: str, *, copy: bool, **request: Any) -> list[Any]:
    reading = reader.read("trades", pattern, copy=copy, strict=True, until="tail", **request)
    return [seen(record) for batch in batches(reading) for record in batch]


@pytest.mark.moderate
@pytest.mark.parametrize("seed", seeds(1, 3))
def test_rows_come_as_whole_batches_would_bring_them(
    log: Log, reader: LogReader, seed: int
) -> None:
    chance = random.Random(seed)
    trades = log.create("trades")
    for number in range(40):
        count = chance.choice((1, 20, TAKEN_MAX * 16, 600))
        rare = chance.choice((0, 0.01, 0.05, 1))
        subjects = [
            chance.choice(("rare", "rare.too")) if chance.random() < rare else "common"
            for _ in range(count)
        ]
        times = [chance.randrange(100) for _ in range(count)]
        options: dict[str, Any] = {}
        if chance.random() < 0.3:
            options["expires_at_ms"] = chance.choice((1, 1 << 50))
        bodies = [b"%d.%d" % (number, row) for row in range(count)]
        log.put(trades, *bodies, subject=subjects, client_time_ms=times, **options)
        if chance.random() < 0.3:
            log.tidy()
    tail = log.next(trades)
    for pattern in ("rare", "rare.#", "*.too", "common"):
        for window in (None, (20, 60)):
            request = {"start": chance.randrange(tail), "client_time": window}
            whole = outcome(reader, pattern, copy=False, **request)
            assert outcome(reader, pattern, copy=True, **request) == whole
