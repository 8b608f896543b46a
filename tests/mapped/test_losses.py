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

import msgspec
import pytest

import malamute_py as malamute
from malamute_protocol.batch import Batch
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError
from malamute_py.changelog.records import StreamPurged, StreamTrimmed
from malamute_py.journal import RingSettings, open_reader
from malamute_py.mapped import LogReader, MappedBatch, Overwritten
from malamute_py.mapped import batch as batch_module
from malamute_py.mapped import reading as reading_module
from malamute_py.mapped.segments import MAPS_MAX, SegmentMap
from malamute_py.mapped.selection import Selection
from malamute_py.mapped.walk import Found, Lost, Step, Walk
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


def test_the_reason_of_a_loss_lasts_until_a_batch_is_found(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of what the ring took was told as damage, where an index knew only a part of it."""
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 10)
    run = Walk.run

    def torn(walk: Walk, bound: int) -> Iterator[Step]:
        """Lose the first five batches, of which an index knew two, and the ninth for no reason."""
        found = [step for step in run(walk, bound) if isinstance(step, Found)]
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


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("by", ["ring", "trim", "max_records", "all"])
def test_a_reading_from_the_earliest_record_is_told_where_that_is_when_older_ones_are_gone(
    log: Log, reader: LogReader, by: str, strict: bool
) -> None:
    trades, notes = log.create("trades", max_records=18 if by == "max_records" else 0), Noted()
    log.fill(trades, 30)
    if by == "ring":
        log.ring("main").remove_before(trades, offset=12)
    elif by != "max_records":
        log.change(StreamTrimmed(trades, 12 if by == "trim" else 30, 2000, "op"))
    log.tidy()
    begin = 30 if by == "all" else 12
    reading = reader.read("trades", until="tail", strict=strict, on_notice=notes.append)
    assert reading.position.next == begin
    assert records(reading) == filled(begin, 30)
    assert notes == [malamute.BegunNotice(begin)]
    for start in ("latest", begin):
        records(reader.read("trades", start=start, until="tail", on_notice=notes.append))
    assert len(notes) == 1


def test_a_reading_from_the_earliest_record_of_a_whole_stream_is_told_nothing(
    log: Log, reader: LogReader
) -> None:
    trades, notes = log.create("trades"), Noted()
    assert not records(reader.read("trades", until="tail", on_notice=notes.append))
    log.fill(trades, 30)
    assert records(reader.read("trades", until="tail", on_notice=notes.append)) == filled(0, 30)
    assert not notes


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


@pytest.mark.parametrize(
    "start", [malamute.AtTime(0), malamute.AtClientTime(0), malamute.AtClientTime(5003)]
)
def test_a_reading_from_a_time_begins_behind_what_was_trimmed_amid_a_batch(
    log: Log, reader: LogReader, start: malamute.AtTime | malamute.AtClientTime
) -> None:
    trades = log.create("trades")
    times = list(range(5000, 5010))
    log.put(trades, *(b"%d" % number for number in range(10)), client_time_ms=times)
    log.change(StreamTrimmed(trades, 5, 2000, ""))
    reading = reader.read("trades", start=start, until="tail", strict=True)
    assert [offset for offset, _ in records(reading)] == [5, 6, 7, 8, 9]


def test_a_reading_from_a_time_is_told_what_the_stream_s_newest_records_leave_out(
    log: Log, reader: LogReader
) -> None:
    trades, notes = log.create("trades", max_records=4), Noted()
    log.put(trades, *(b"%d" % number for number in range(10)), client_time_ms=list(range(10)))
    log.change(StreamTrimmed(trades, 3, 2000, ""))
    for start in (malamute.AtTime(0), malamute.AtClientTime(0)):
        reading = reader.read("trades", start=start, until="tail", on_notice=notes.append)
        assert [offset for offset, _ in records(reading)] == [6, 7, 8, 9]
    assert notes.gone() == [(3, 6, "retention")] * 2


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
    assert notes == [malamute.RewoundNotice(9, 5, log.journal.epoch)]
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


# --- what it holds ------------------------------------------------------------------------------


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
