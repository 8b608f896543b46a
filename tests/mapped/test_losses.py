"""Losses that a reader of a running log meets: the ring comes round, damage, files cut off.

The rule that all tests check: a record is right, or its loss has a name.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import malamute_py as malamute
from malamute_protocol.batch import Batch
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.changelog.records import StreamPurged, StreamTrimmed
from malamute_py.journal import FileStorage, JournalCorrupt, RingSettings, open_reader
from malamute_py.journal.directory import expected_of
from malamute_py.journal.layout import RingMeta
from malamute_py.journal.manifest import Manifest
from malamute_py.mapped import LogReader, MappedBatch, Overwritten
from malamute_py.mapped import batch as batch_module
from malamute_py.mapped import reading as reading_module
from malamute_py.mapped.missing import NOTHING, Missing, find_missing
from malamute_py.mapped.segments import MAPS_MAX, SegmentMap
from malamute_py.mapped.segments import Segments as MappedSegments
from malamute_py.mapped.selection import Selection
from tests.journal.rings import HEAD, S
from tests.mapped.logs import SETTINGS, Log, batches, body_at, filled, records

SMALL = RingSettings(segment_bytes=S, ring_bytes=4 * S, index_interval_bytes=2048)
LAP = 300
"""Records that go more than once around a ring of SMALL."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    opened = Log(tmp_path / "data", SMALL)
    yield opened
    opened.close()


class Noted(list[malamute.Notice]):
    """Notices, and what they say is gone."""

    def gone(self) -> list[tuple[int, int, str]]:
        gaps = [each for each in self if isinstance(each, malamute.GapNotice)]
        return [(gap.from_offset, gap.to_offset, gap.code) for gap in gaps]


def lap(log: Log, number: int) -> None:
    for _ in range(LAP // 20):
        log.fill(number, 20)
        log.tidy()


def held(reading: object, log: Log) -> tuple[MappedBatch, int]:
    """The first batch of the reading, as a view, and the number of its stream."""
    batch = reading.next_batch(0)  # type: ignore[attr-defined]
    assert isinstance(batch, MappedBatch)
    return batch, batch.stamp.stream


# --- the ring comes round ---------------------------------------------------------------------


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


# --- what retention removed -------------------------------------------------------------------


def test_what_was_trimmed_is_a_gap_by_retention(log: Log, reader: LogReader) -> None:
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 30)
    log.ring("main").remove_before(trades, offset=12)
    log.tidy()
    assert records(reader.read("trades", until="tail")) == filled(12, 30)
    reading = reader.read("trades", start=5, until="tail", on_notice=notes.append)
    assert records(reading) == filled(12, 30)
    assert notes.gone() == [(5, 12, "retention")]


def test_what_a_client_trimmed_is_named_as_purged_though_the_ring_has_not_noted_it(
    log: Log, reader: LogReader
) -> None:
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 10)
    log.put(trades, b"a", b"b", b"c")
    log.change(StreamTrimmed(trades, 11, 2000, "op"))
    reading = reader.read("trades", start=5, until="tail", on_notice=notes.append)
    assert [(offset, bytes(body)) for offset, body in records(reading)] == [(11, b"b"), (12, b"c")]
    assert notes.gone() == [(5, 11, "purged")]


def test_what_a_client_purged_by_subject_is_not_read_and_what_came_after_it_is(
    log: Log, reader: LogReader
) -> None:
    trades = log.create("trades")
    log.put(trades, b"a", b"b", subject="bob")
    log.put(trades, b"c", subject="ann")
    log.put(trades, b"d", b"e", subject="bob")
    log.change(StreamPurged(trades, msgspec.msgpack.encode(["topic", "bob"]), 4, 0, 2000, "op"))
    found = [(offset, bytes(body)) for offset, body in records(reader.read("trades", until="tail"))]
    assert found == [(2, b"c"), (4, b"e")]
    only = reader.read("trades", "bob", until="tail", copy=True)
    assert [(offset, bytes(body)) for offset, body in records(only)] == [(4, b"e")]


def test_a_reading_that_follows_sees_a_trim_of_what_was_written_meanwhile(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "_CATALOGUE_S", 0)
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 10)
    reading = reader.read("trades", on_notice=notes.append)
    assert records(reading) == filled(0, 10)
    log.fill(trades, 20)
    log.change(StreamTrimmed(trades, 25, 2000, "op"))
    assert records(reading) == filled(25, 30)
    assert notes.gone() == [(10, 25, "purged")]


def test_what_is_trimmed_while_a_reading_follows_is_a_gap(log: Log, reader: LogReader) -> None:
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 10)
    reading = reader.read("trades", on_notice=notes.append)
    assert records(reading) == filled(0, 10)
    log.fill(trades, 20)
    log.ring("main").remove_before(trades, offset=25)
    log.tidy()
    assert records(reading) == filled(25, 30)
    assert notes.gone() == [(10, 25, "retention")]


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
    assert notes == [malamute.RewoundNotice(9, 5, 0)]
    log.fill(trades, 1)
    assert records(reading) == filled(5, 6)


# --- records past their age -------------------------------------------------------------------


NOW_MS = 10_000_000
"""Time of the tests about ages, of which the reader asks this clock."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [NOW_MS]
    monkeypatch.setattr("malamute_py.mapped.reading._now_ms", lambda: now[0])
    return now


def aged(log: Log, count: int) -> int:
    """A stream of records past their age, of which each batch has one, and one young record."""
    number = log.create("aged", max_age_ms=60_000)
    for offset in range(count):
        log.put(number, body_at(offset), time_ms=NOW_MS - 120_000)
    log.put(number, body_at(count), time_ms=NOW_MS)
    return number


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("pattern", ["#", "nothing.like.it"])
def test_records_past_their_age_are_one_gap_to_a_reader_that_asked_for_them(
    log: Log, reader: LogReader, clock: list[int], count: int, pattern: str
) -> None:
    aged(log, count)
    log.tidy()
    notes = Noted()
    reading = reader.read("aged", pattern, start=0, until="tail", on_notice=notes.append)
    assert records(reading) == (filled(count, count + 1) if pattern == "#" else [])
    assert notes.gone() == [(0, count, "retention")]


def test_a_strict_reader_of_records_past_their_age_gets_an_error(
    log: Log, reader: LogReader, clock: list[int]
) -> None:
    aged(log, 3)
    reading = reader.read("aged", start=0, until="tail", strict=True)
    with pytest.raises(malamute.GapError, match="offsets 0 to 2 cannot be read: retention"):
        reading.next_batch(0)
    assert records(reading) == filled(3, 4)


def test_a_reader_from_the_earliest_record_begins_at_the_first_young_one(
    log: Log, reader: LogReader, clock: list[int]
) -> None:
    aged(log, 3)
    reading = reader.read("aged", until="tail", strict=True)
    assert reading.position.next == 3
    assert records(reading) == filled(3, 4)


@pytest.mark.parametrize("tidy", [False, True])
def test_only_the_newest_records_that_the_stream_keeps_are_read(
    log: Log, reader: LogReader, tidy: bool
) -> None:
    number = log.create("few", max_records=3)
    log.put(number, *(body_at(offset) for offset in range(10)))
    log.fill(number, 1)
    if tidy:
        log.tidy()
    assert records(reader.read("few", until="tail", strict=True)) == filled(8, 11)
    notes = Noted()
    assert records(reader.read("few", start=2, until="tail", on_notice=notes.append)) == filled(
        8, 11
    )
    assert notes.gone() == [(2, 8, "retention")]
    assert records(reader.read("few", start=9, until="tail", strict=True)) == filled(9, 11)


def test_a_reader_that_looks_seldom_gets_only_the_newest_records(
    log: Log, reader: LogReader
) -> None:
    number, notes = log.create("few", max_records=3), Noted()
    log.fill(number, 1)
    reading = reader.read("few", on_notice=notes.append)
    assert records(reading) == filled(0, 1)
    for _ in range(2):
        log.fill(number, 70)  # more than a segment
        log.tidy()
        end = log.next(number)
        assert records(reading) == filled(end - 3, end)
    assert notes.gone() == [(1, 68, "retention"), (71, 138, "retention")]


def test_records_that_grow_too_old_while_they_are_read_are_one_gap(
    log: Log, reader: LogReader, clock: list[int]
) -> None:
    number, notes = aged(log, 0), Noted()
    for offset in range(1, 9):
        log.put(number, body_at(offset), time_ms=NOW_MS + (offset > 5))
    reading = reader.read("aged", start=0, until="tail", on_notice=notes.append)
    first = reading.next_batch(0)
    assert first is not None
    assert first.bodies() == [body_at(0)]
    clock[0] += 60_001
    assert records(reading) == filled(6, 9)
    assert notes.gone() == [(1, 6, "retention")]


def test_damage_beside_records_past_their_age_is_told_as_damage(
    log: Log, reader: LogReader, clock: list[int]
) -> None:
    number, notes = aged(log, 3), Noted()
    begin = log.ring("main").end_lsn
    log.put(number, body_at(4), time_ms=NOW_MS)
    log.put(number, body_at(5), time_ms=NOW_MS)
    log.tidy()
    flip(log, begin + 400)
    reading = reader.read("aged", start=0, until="tail", on_notice=notes.append)
    assert records(reading) == [(3, body_at(3)), (5, body_at(5))]
    assert notes.gone() == [(0, 3, "retention"), (4, 5, "damaged")]


# --- damage -----------------------------------------------------------------------------------


def flip(log: Log, lsn: int) -> None:
    """Turn a byte of ring main over."""
    number, position = divmod(lsn, S)
    with (log.path / "rings" / "main" / f"{number:012d}.seg").open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("where", [8, 20, STAMP_BYTES + 40, STAMP_BYTES + 400])
@pytest.mark.parametrize("indexed", [False, True])
def test_bit_rot_is_named_as_damage_and_everything_else_is_read(
    tmp_path: Path, where: int, indexed: bool
) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 10)
    begin = log.ring("main").end_lsn
    log.fill(trades, 100 if indexed else 5)
    log.tidy()
    log.fill(trades, 1)
    assert (log.path / "rings/main/000000000000.idx").exists() == indexed
    flip(log, begin + where)
    total = log.next(trades)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        assert records(reading) == filled(0, 10) + filled(11, total)
    assert notes.gone() == [(10, 11, "damaged")]
    (notice,) = notes
    assert "segment 0 at byte" in str(notice)
    log.close()


def test_damage_at_the_end_of_a_stopped_log_is_named_too(tmp_path: Path) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 10)
    begin = log.ring("main").end_lsn
    log.fill(trades, 3)
    log.close()
    flip(log, begin + 400)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        assert records(reading) == filled(0, 10) + filled(11, 13)
    assert notes.gone() == [(10, 11, "damaged")]


def test_damage_that_only_a_later_batch_proves_is_stepped_over(tmp_path: Path) -> None:
    """The broker was killed: nothing but the stamps behind it says that the place was synced."""
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 10)
    begin = log.ring("main").end_lsn
    log.fill(trades, 3)
    log.ring("main").sync()
    log.fill(trades, 3)
    log.journal._release()
    flip(log, begin + 400)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        assert records(reading) == filled(0, 10) + filled(11, 16)
    assert notes.gone() == [(10, 11, "damaged")]


@pytest.mark.parametrize("pattern", ["#", "wanted", "other"])
def test_damage_that_a_start_left_out_of_the_index_is_named_whatever_is_selected(
    tmp_path: Path, pattern: str
) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 10)
    begin = log.ring("main").end_lsn
    log.fill(trades, 3)
    log.ring("main").sync()
    log.fill(trades, 3)
    log.journal._release()
    flip(log, begin + 400)
    log.open()
    log.put(trades, b"here", subject="wanted")
    log.fill(trades, 100)
    log.tidy()
    with open_reader(log.path) as reader:
        reading = reader.read("trades", pattern, until="tail", on_notice=notes.append)
        found = [offset for offset, _ in records(reading)]
    everything = [*range(10), *range(11, 117)]
    assert found == {"#": everything, "wanted": [16], "other": []}[pattern]
    assert notes.gone() == [(10, 11, "damaged")]
    log.close()


def test_a_torn_end_is_no_damage(tmp_path: Path) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 10)
    begin = log.ring("main").end_lsn
    log.fill(trades, 1)
    log.journal._release()
    flip(log, begin + 400)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        assert records(reading) == filled(0, 10)
    assert notes == []


def test_a_segment_that_is_missing_amid_others_is_damage(tmp_path: Path) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 170)
    log.tidy()
    (log.path / "rings/main/000000000001.seg").unlink()
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        seen = records(reading)
    ((begin, end, code),) = notes.gone()
    assert code == "damaged"
    assert seen == filled(0, begin) + filled(end, 170)
    log.close()


ONE = "segment {} is missing, which the ring's manifest names"
TWO = "segments {} to {} are missing, which the ring's manifest names"


class Segments:
    """The segment files of ring main."""

    def __init__(self, log: Log) -> None:
        self.path = log.path / "rings/main"
        self.used = [self.file(number) for number in range(log.ring("main").end_lsn // S + 1)]

    def file(self, number: int) -> Path:
        return self.path / f"{number:012}.seg"


@pytest.fixture
def closed(tmp_path: Path) -> Log:
    """A log of four segments and a spare."""
    log = Log(tmp_path / "data", SETTINGS)
    number = log.create("trades")
    log.fill(number, 170)
    log.tidy()
    return log


def losses(log: Log, **options: object) -> tuple[list[tuple[int, bytes]], Noted]:
    notes = Noted()
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append, **options)  # type: ignore[arg-type]
        return records(reading), notes


@pytest.mark.parametrize("start", ["earliest", 0, 7])
@pytest.mark.parametrize("stopped", [True, False])
def test_missing_oldest_segments_are_damage_from_the_beginning_on(
    closed: Log, start: int | str, stopped: bool
) -> None:
    segments = Segments(closed)
    if stopped:
        closed.close()
    segments.used[0].unlink()
    seen, notes = losses(closed, start=start)
    ((begin, end, code),) = notes.gone()
    assert (begin, code) == (0 if start == "earliest" else start, "damaged")
    assert 0 < end < 100
    assert seen == filled(end, 170)
    assert ONE.format(0) in str(notes[0])
    closed.close()


def test_missing_newest_segments_are_damage_up_to_where_the_log_was_closed(closed: Log) -> None:
    segments = Segments(closed)
    closed.close()
    for path in segments.used[-2:]:
        path.unlink()
    seen, notes = losses(closed)
    ((begin, end, code),) = notes.gone()
    assert (end, code) == (170, "damaged")
    assert seen == filled(0, begin)
    assert TWO.format(2, 3) in str(notes[0])


def test_a_reading_that_follows_is_told_once_of_missing_newest_segments(closed: Log) -> None:
    segments, notes = Segments(closed), Noted()
    closed.close()
    segments.used[-1].unlink()
    with open_reader(closed.path) as reader:
        reading = reader.read("trades", on_notice=notes.append)
        seen = records(reading)
        assert records(reading) == []
    assert notes.gone() == [(len(seen), 170, "damaged")]


def test_missing_newest_segments_of_which_nothing_is_known_end_the_reading_by_an_error(
    closed: Log,
) -> None:
    segments = Segments(closed)
    closed.journal._release()
    manifest = Manifest(closed.journal.storage.child("manifest"), "main")
    known = manifest.expected
    assert known is not None
    manifest.write(
        known.ring, known.segment_bytes, known.epoch, known.first, known.last, known.end_lsn, None
    )
    segments.used[-1].unlink()
    with open_reader(closed.path) as reader:
        reading = reader.read("trades", until="tail", strict=True)
        seen: list[bytes] = []
        with pytest.raises(JournalCorrupt, match=r"segment 3 is missing.* nothing tells"):
            seen.extend(batch.bodies()[0] for batch in iter(lambda: reading.next_batch(0), None))
        assert seen == [body for _, body in filled(0, len(seen))]
        assert reading.next_batch(0) is None
        whole = reader.read("trades", until="tail", end=len(seen), strict=True)
        assert len(records(whole)) == len(seen)


def test_a_ring_of_which_all_segments_are_missing_is_damage(closed: Log) -> None:
    number = closed.create("own", "own")
    closed.fill(number, 3)
    closed.close()
    notes = Noted()
    for path in (closed.path / "rings/own").glob("*.seg"):
        path.unlink()
    with open_reader(closed.path) as reader:
        assert records(reader.read("own", until="tail", on_notice=notes.append)) == []
    assert notes.gone() == [(0, 3, "damaged")]


def test_a_missing_directory_of_a_ring_is_damage(closed: Log) -> None:
    number = closed.create("own", "own")
    closed.fill(number, 3)
    closed.close()
    shutil.rmtree(closed.path / "rings/own")
    with open_reader(closed.path) as reader, pytest.raises(JournalCorrupt, match="is missing"):
        reader.read("own")


def test_segments_whose_names_were_swapped_are_damage(closed: Log) -> None:
    segments = Segments(closed)
    closed.close()
    for from_, to in (("0", "x"), ("1", "0"), ("x", "1")):
        (segments.path / f"{from_:0>12}.seg").rename(segments.path / f"{to:0>12}.seg")
    seen, notes = losses(closed)
    ((begin, end, code),) = notes.gone()
    assert (begin, code) == (0, "damaged")
    assert seen == filled(end, 170)


def test_an_oldest_segment_that_is_about_to_be_used_again_is_not_missing(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest then names it under its new number, before its file is renamed."""
    number = log.create("trades")
    looks: list[Missing] = []
    rename, ring = FileStorage.rename, log.ring("main")
    directory = FileStorage(log.path, read_only=True)
    meta = RingMeta(ring.uuid, S)

    def look() -> Missing:
        """Compare as a reader does that read the log up to where this segment begins."""
        segments = MappedSegments(directory.child("rings").child("main"), meta)
        expected = expected_of(directory, "main")
        assert expected is not None
        return find_missing(segments, directory, "main", expected.last * S)

    def look_around(self: FileStorage, old: str, new: str) -> None:
        again = old.endswith(".seg") and new.endswith(".seg")
        looks.extend(look() for _ in range(again))
        rename(self, old, new)
        looks.extend(look() for _ in range(again))

    monkeypatch.setattr(FileStorage, "rename", look_around)
    lap(log, number)
    assert len(looks) > 1
    assert all(found is NOTHING for found in looks)


def test_a_manifest_that_changes_during_the_look_is_compared_again(
    closed: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment that only the first reading named may have been removed in between."""
    segments = Segments(closed)
    manifest = Manifest(closed.journal.storage.child("manifest"), "main")
    known = manifest.expected
    assert known is not None
    mapped = MappedSegments.map

    def retire(self: MappedSegments, number: int) -> SegmentMap | None:
        if number == 0 and segments.used[0].exists():
            manifest.write(
                known.ring, known.segment_bytes, known.epoch, 1, known.last, known.end_lsn, None
            )
            segments.used[0].unlink()
        return mapped(self, number)

    with open_reader(closed.path) as reader:
        monkeypatch.setattr(MappedSegments, "map", retire)
        seen = records(reader.read("trades", until="tail", strict=True))
    assert seen == filled(seen[0][0], 170)
    assert seen[0][0] > 0
    closed.close()


def test_a_file_that_was_cut_off_is_damage_and_no_signal(tmp_path: Path) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 170)
    log.tidy()
    os.truncate(log.path / "rings/main/000000000001.seg", HEAD * 5)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        seen = records(reading)
    gone = {offset for begin, end, _ in notes.gone() for offset in range(begin, end)}
    assert {code for _, _, code in notes.gone()} == {"damaged"}
    assert seen == [(n, body_at(n)) for n in range(170) if n not in gone]
    assert 20 < len(gone) < 60
    assert "cut off at 20480 bytes" in str(notes)
    log.close()


def test_a_page_that_the_disk_cannot_read_is_damage_and_no_signal(tmp_path: Path) -> None:
    """The kernel refuses unreadable pages by name, as it does those of a file that was cut off."""
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 110)
    log.tidy()
    path = log.path / "rings/main/000000000001.seg"
    bring = SegmentMap._bring

    def late(self: SegmentMap, piece: int) -> None:
        if self.number == 1:
            os.truncate(path, HEAD * 5)
        bring(self, piece)

    with open_reader(log.path) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentMap, "_bring", late)
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        seen = records(reading)
    gone = {offset for begin, end, _ in notes.gone() for offset in range(begin, end)}
    assert seen == [(n, body_at(n)) for n in range(110) if n not in gone]
    assert 20 < len(gone) < 60
    assert "the disk cannot read byte 20480" in str(notes)
    log.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM])
def test_a_kernel_that_does_not_bring_pages_in_is_done_without(
    log: Log, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(number, os.strerror(number))

    trades = log.create("trades")
    log.fill(trades, 100)
    monkeypatch.setattr("malamute_py.mapped.segments.mmap.mmap", Refusing)
    with open_reader(log.path) as other:
        assert records(other.read("trades", until="tail", strict=True)) == filled(0, 100)


# --- what it holds ------------------------------------------------------------------------------


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

    before, most = len(os.listdir("/proc/self/fd")), 0
    with open_reader(tmp_path / "data") as reader:
        reading = reader.read("trades", until="tail")
        for number, _ in enumerate(reading):
            if number % 50 == 0:
                most = max(most, mapped())
                assert len(os.listdir("/proc/self/fd")) <= before + MAPS_MAX + 3
        assert 0 < most <= MAPS_MAX + 1
        table = reader.read("trades", until="tail").to_arrow()
        assert mapped() > MAPS_MAX + 1
        assert table.num_rows == 900
    assert mapped() > 0
    del table, _, reading
    assert mapped() == 0
    assert len(os.listdir("/proc/self/fd")) == before


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
