"""Losses that a reader of a running log meets: the ring comes round, records grow too old.

The rule that all tests check: a record is right, or its loss has a name.
"""

from __future__ import annotations

import errno
import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import malamute_py as malamute
from malamute_protocol.batch import Batch
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError
from malamute_py.journal import RingSettings, open_reader
from malamute_py.mapped import LogReader, MappedBatch, Overwritten
from malamute_py.mapped import batch as batch_module
from malamute_py.mapped.segments import MAPS_MAX, SegmentMap
from malamute_py.mapped.selection import Selection
from malamute_py.mapped.walk import LocatedBatch, Lost, Step, Walk
from tests.journal.rings import S
from tests.mapped.logs import (
    LAP,
    SMALL,
    Log,
    Noted,
    batches,
    body_at,
    descriptors,
    filled,
    flip,
    lap,
    records,
)

RING = SMALL


def held(reading: object, log: Log) -> tuple[MappedBatch, int]:
    """The first batch of the reading, as a view, and the number of its stream."""
    batch = reading.next_batch(0)  # type: ignore[attr-defined]
    assert isinstance(batch, MappedBatch)
    return batch, batch.stamp.stream


@pytest.mark.moderate
def test_a_reader_that_the_ring_overtakes_is_told_what_it_missed(
    log: Log, reader: LogReader
) -> None:
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 40)
    reading = reader.read("trades", on_notice=notes.append)
    seen = records(reading)
    lap(log, trades)
    seen += records(reading)
    ((begin, end, code),) = notes.gone()
    assert (begin, code) == (40, "retention")
    assert seen == filled(0, 40) + filled(end, 40 + LAP)
    assert end <= log.ring("main").first_offset(trades)


@pytest.mark.moderate
def test_the_reason_of_a_loss_lasts_until_a_batch_is_found(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of what the ring took was told as damage, where an index knew only a part of it."""
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 10)
    run = Walk.run

    def torn(walk: Walk, bound: int) -> Iterator[Step]:
        """Lose the first five batches, of which an index knew two, and the ninth for no reason."""
        found = [step for step in run(walk, bound) if isinstance(step, LocatedBatch)]
        yield Lost("retention", "the ring came round", 2)
        yield from found[5:8] + found[9:]

    monkeypatch.setattr(Walk, "run", torn)
    reading = reader.read("trades", until="tail", on_notice=notes.append)
    assert records(reading) == filled(5, 8) + filled(9, 10)
    assert notes.gone() == [(0, 2, "retention"), (2, 5, "retention"), (8, 9, "damaged")]


@pytest.mark.moderate
def test_a_strict_reader_is_told_of_a_gap_by_an_error_and_loses_nothing_behind_it(
    log: Log, reader: LogReader
) -> None:
    trades = log.create("trades")
    log.fill(trades, 40)
    reading = reader.read("trades", strict=True)
    assert records(reading) == filled(0, 40)
    lap(log, trades)
    with pytest.raises(malamute.GapError, match="cannot be read: retention") as raised:
        reading.next_batch(0)
    notice = raised.value.notice
    assert isinstance(notice, malamute.GapNotice)
    assert reading.position.next == notice.to_offset
    assert records(reading) == filled(notice.to_offset, 40 + LAP)


@pytest.mark.moderate
def test_a_view_that_was_overwritten_is_never_taken_for_good(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.fill(trades, 20)
    reading = reader.read("trades", on_notice=Noted().append)
    batch, _ = held(reading, log)
    assert batch.intact()
    lap(log, trades)
    assert not batch.intact()
    with pytest.raises(Overwritten, match="offsets 0 to 0 were overwritten"):
        batch.check()
    with pytest.raises(Overwritten):
        batch.copy()
    with pytest.raises(Overwritten):
        list(batch.records())
    with pytest.raises(Overwritten):
        batch.to_arrow()
    # The reading goes on behind it.
    assert records(reading)[-1] == filled(LAP + 19, LAP + 20)[0]


@pytest.mark.moderate
def test_the_next_batch_is_not_given_before_the_last_one_was_looked_at_again(
    log: Log, reader: LogReader
) -> None:
    trades = log.create("trades")
    log.fill(trades, 20)
    reading = reader.read("trades", on_notice=Noted().append)
    batch, _ = held(reading, log)
    assert len(batch.content) == 1
    lap(log, trades)
    with pytest.raises(Overwritten, match="offsets 0 to 0"):
        reading.next_batch(0)
    assert records(reading)[-1] == filled(LAP + 19, LAP + 20)[0]


@pytest.mark.moderate
def test_a_copy_stays_what_it_is_when_the_ring_comes_round(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.fill(trades, 20)
    reading = reader.read("trades", on_notice=Noted().append)
    batch, _ = held(reading, log)
    copy = batch.copy()
    lap(log, trades)
    assert copy.bodies() == [body_at(0)]
    assert batch.bodies() == [body_at(0)]
    assert records(reading)


@pytest.mark.moderate
def test_readings_of_copies_hand_out_batches_that_own_their_bytes(
    log: Log, reader: LogReader
) -> None:
    trades = log.create("trades")
    log.fill(trades, 20)
    reading = reader.read("trades", copy=True, on_notice=Noted().append)
    batch = reading.next_batch(0)
    assert type(batch) is Batch
    lap(log, trades)
    assert batch.bodies() == [body_at(0)]
    assert records(reading)


@pytest.mark.moderate
def test_few_rows_of_a_batch_are_copied_without_the_others(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    subjects = [f"one.{row}" for row in range(64)]
    subjects[3] = subjects[40] = "rare"
    bodies = [b"%d" % row for row in range(64)]
    log.put(trades, *bodies, subject=subjects, client_time_ms=list(range(64)))
    log.fill(trades, 20)
    reading = reader.read("trades", "rare", copy=True, on_notice=Noted().append)
    batch = reading.next_batch(0)
    assert batch is not None
    assert (type(batch), batch.stamp.derived) == (Batch, True)
    assert len(batch.content) == 2
    lap(log, trades)
    found = [(each.offset, each.body, each.subject, each.client_time_ms) for each in batch]
    assert found == [(3, b"3", "rare", 3), (40, b"40", "rare", 40)]


COPYING = pytest.mark.parametrize(("name", "rare"), [("rows_of", 1), ("extract", 40)])
"""Function that copies this many rows out of a batch."""


def put_rows(log: Log, stream: int, rare: int) -> None:
    """Append 1,000 records, of which the first are rare."""
    subjects = [*["rare"] * rare, *[f"one.{row}" for row in range(1000 - rare)]]
    log.put(stream, *[b"x"] * 1000, subject=subjects)


@pytest.mark.moderate
@COPYING
def test_rows_that_are_overwritten_while_they_are_copied_are_not_handed_out(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch, name: str, rare: int
) -> None:
    trades, notes = log.create("trades"), Noted()
    put_rows(log, trades, rare)
    log.fill(trades, 20)
    reading = reader.read("trades", "rare", copy=True, until="tail", on_notice=notes.append)

    copying = getattr(batch_module, name)

    def slow(*arguments: Any) -> Any:
        found = copying(*arguments)
        lap(log, trades)
        return found

    monkeypatch.setattr(batch_module, name, slow)
    assert records(reading) == []
    assert notes.gone()


@pytest.mark.moderate
@COPYING
def test_a_batch_whose_rows_cannot_be_copied_out_is_a_gap(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch, name: str, rare: int
) -> None:
    trades, notes = log.create("trades"), Noted()
    put_rows(log, trades, rare)
    log.put(trades, b"next", subject="rare")
    reading = reader.read("trades", "rare", copy=True, until="tail", on_notice=notes.append)

    def damaged(*_: Any) -> Any:
        raise BatchError("bad_batch", "damaged")

    monkeypatch.setattr(batch_module, name, damaged)
    assert records(reading) == [(1000, b"next")]
    assert notes.gone() == [(0, 1000, "damaged")]


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tables keep views of batches as small as those of these tests."""
    monkeypatch.setattr("malamute_protocol.merging._FEW", 0)


@pytest.mark.moderate
@pytest.mark.usefixtures("views")
def test_a_table_of_views_tells_when_it_was_overwritten(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.fill(trades, 20)
    reading = reader.read("trades", until="tail")
    table = reading.to_arrow()
    assert table["body"].to_pylist() == [body_at(offset) for offset in range(20)]
    reading.check()
    lap(log, trades)
    with pytest.raises(Overwritten):
        reading.check()
    # Offsets are its own: what has changed is wrong, and lies nowhere else.
    assert set(map(len, filter(None, table["body"].to_pylist()))) == {1000}


@pytest.mark.moderate
def test_a_batch_that_is_overwritten_while_it_is_selected_is_not_handed_out(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 20)
    reading = reader.read("trades", on_notice=notes.append)
    select = Selection.rows

    def slow(self: Selection, *arguments: object) -> object:
        monkeypatch.setattr(Selection, "rows", select)
        lap(log, trades)
        return select(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Selection, "rows", slow)
    seen = records(reading)
    ((begin, end, code),) = notes.gone()
    assert (begin, code) == (0, "retention")
    assert seen == filled(end, 20 + LAP)


@pytest.mark.moderate
@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_that_is_overwritten_while_it_is_found_unwanted_is_in_the_gap(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Overwritten bytes may look like a batch without a wanted row, or like no batch at all."""
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 20)
    reading = reader.read("trades", on_notice=notes.append)
    select = Selection.rows

    def overtaken(self: Selection, content: Content, base: int, *more: object) -> object:
        if base < 5:
            return select(self, content, base, *more)  # type: ignore[arg-type]
        monkeypatch.setattr(Selection, "rows", select)
        lap(log, trades)
        if fails:
            raise BatchError("bad_batch", "overwritten bytes")
        return False, None

    monkeypatch.setattr(Selection, "rows", overtaken)
    seen = records(reading)
    ((begin, end, code),) = notes.gone()
    assert (begin, code) == (5, "retention")
    assert seen == [*filled(0, 5), *filled(end, 20 + LAP)]


@pytest.mark.moderate
def test_without_the_check_of_the_header_what_was_overwritten_would_pass(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: a reader that trusts its mapping. Copies are right all the same."""
    trades = log.create("trades")
    log.fill(trades, 20)
    batch, _ = held(reader.read("trades"), log)
    columns = batch.to_arrow()
    assert columns["body"].to_pylist() == [body_at(0)]
    lap(log, trades)
    monkeypatch.setattr(SegmentMap, "intact", lambda self: True)
    batch.check()
    assert columns["body"].to_pylist() != [body_at(0)]
    with pytest.raises(Overwritten):
        batch.copy()


@pytest.mark.moderate
def test_a_reader_beside_a_writer_gives_right_records_and_names_all_others(tmp_path: Path) -> None:
    """A writer that goes round and round, at every pace beside the reader's."""
    chance = random.Random(7)
    log = Log(tmp_path / "data", SMALL)
    trades, notes = log.create("trades"), Noted()
    seen: list[tuple[int, bytes]] = []
    with open_reader(log.path) as reader:
        reading = reader.read("trades", on_notice=notes.append)
        for _ in range(60):
            log.fill(trades, chance.choice((1, 5, 30, 90)))
            if chance.random() < 0.8:
                log.tidy()
            for batch in batches(reading):
                seen += [(record.offset, record.body) for record in batch]
                if chance.random() < 0.4:
                    break
        seen += records(reading)
        total = log.next(trades)
    log.close()
    assert all(body == body_at(offset) for offset, body in seen)
    offsets = [offset for offset, _ in seen]
    missed = [offset for begin, end, _ in notes.gone() for offset in range(begin, end)]
    assert sorted(offsets + missed) == list(range(total))
    assert missed


@pytest.mark.moderate
def test_a_reading_up_to_the_tail_that_is_overtaken_ends_with_what_it_missed(
    log: Log, reader: LogReader
) -> None:
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 40)
    reading = reader.read("trades", until="tail", on_notice=notes.append)
    for _ in range(10):
        reading.next_batch(0)
    lap(log, trades)
    with pytest.raises(Overwritten):
        reading.next_batch(0)
    assert records(reading) == []
    assert notes.gone() == [(10, 40, "retention")]
    assert reading.next_batch(0) is None


@pytest.mark.moderate
def test_a_file_that_cannot_be_opened_for_the_moment_is_read_later(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    trades = log.create("trades")
    log.fill(trades, 120)
    reading = reader.read("trades", strict=True)
    seen = [record.body for record in reading.next_batch(0) or ()]
    reading._segments.forget()

    def full(path: object, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def go_on() -> None:
        for batch in batches(reading):
            seen.extend(batch.bodies())

    with monkeypatch.context() as patch:
        patch.setattr("malamute_py.mapped.segments.open_regular", full)
        with pytest.raises(OSError, match="Too many open files"):
            go_on()
    go_on()
    assert seen == [body_at(offset) for offset in range(120)]


@pytest.mark.moderate
def test_a_batch_that_is_overwritten_while_it_waits_behind_a_gap_is_not_handed_out(
    log: Log, reader: LogReader
) -> None:
    trades = log.create("trades")
    log.fill(trades, 3)
    begin = log.ring("main").end_lsn
    log.fill(trades, 7)
    log.tidy()
    log.fill(trades, 1)
    flip(log, begin + 20)
    reading = reader.read("trades", strict=True)
    assert [reading.next_batch(0) is not None for _ in range(3)] == [True] * 3
    with pytest.raises(malamute.GapError, match="offsets 3 to 3 cannot be read: damaged"):
        reading.next_batch(0)
    lap(log, trades)
    with pytest.raises(malamute.GapError, match="retention") as raised:
        reading.next_batch(0)
    notice = raised.value.notice
    assert isinstance(notice, malamute.GapNotice)
    assert (notice.from_offset, notice.to_offset) == (4, 5)


def test_a_position_behind_the_end_is_rewound(log: Log, reader: LogReader) -> None:
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 5)
    reading = reader.read("trades", start=9, on_notice=notes.append)
    assert records(reading) == []
    assert notes == [malamute.RewoundNotice(9, 5, log.journal.epoch)]
    log.fill(trades, 1)
    assert records(reading) == filled(5, 6)


@pytest.mark.moderate
@pytest.mark.usefixtures("views")
def test_descriptors_and_mappings_are_bounded_and_given_back(tmp_path: Path) -> None:
    log = Log(tmp_path / "data", RingSettings(segment_bytes=S, ring_bytes=24 * S))
    trades = log.create("trades")
    log.fill(trades, 900)
    log.tidy()
    log.close()
    del log
    gc.collect()
    gc.freeze()  # each look below is at the objects of this test only

    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text(encoding="utf-8").count(str(tmp_path))

    before, most = descriptors(tmp_path), 0
    with open_reader(tmp_path / "data") as reader:
        reading = reader.read("trades", until="tail")
        for number, _ in enumerate(reading):
            if number % 50 == 0:
                most = max(most, mapped())
                assert descriptors(tmp_path) <= before + MAPS_MAX + 3
        assert 0 < most <= MAPS_MAX + 1
        table = reader.read("trades", until="tail").to_arrow()
        assert mapped() > MAPS_MAX + 1
        assert table.num_rows == 900
    assert mapped() > 0
    del table, _, reading
    assert mapped() == 0
    assert descriptors(tmp_path) == before


@pytest.mark.moderate
def test_nothing_in_the_directory_is_changed_or_locked(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    trades = log.create("trades")
    log.fill(trades, 100)
    log.tidy()
    flags: list[int] = []
    opened = os.open

    def noting(path: object, flag: int, *more: object, **options: object) -> int:
        flags.append(flag)
        return opened(path, flag, *more, **options)  # type: ignore[arg-type]

    before = {path: path.stat() for path in log.path.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", None)
        patch.setattr(os, "open", noting)
        with open_reader(log.path) as reader:
            assert len(records(reader.read("trades", until="tail"))) == 100
    assert flags
    assert not any(flag & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) for flag in flags)
    after = {path: path.stat() for path in log.path.rglob("*")}
    assert {path: facts.st_mtime_ns for path, facts in after.items()} == {
        path: facts.st_mtime_ns for path, facts in before.items()
    }
