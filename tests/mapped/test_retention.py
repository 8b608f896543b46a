"""Records that were trimmed, purged, or grew too old, as a mapped reader is told of them."""

from __future__ import annotations

import msgspec
import pytest

import malamute_py as malamute
from malamute_py.changelog.records import StreamPurged, StreamTrimmed
from malamute_py.mapped import LogReader
from malamute_py.mapped import reading as reading_module
from tests.mapped.logs import (
    Log,
    Noted,
    body_at,
    filled,
    flip,
    records,
)


def test_what_was_trimmed_is_a_gap_by_retention(log: Log, reader: LogReader) -> None:
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 30)
    log.ring("main").remove_before(trades, offset=12)
    log.tidy()
    assert records(reader.read("trades", until="tail")) == filled(12, 30)
    reading = reader.read("trades", start=5, until="tail", on_notice=notes.append)
    assert records(reading) == filled(12, 30)
    assert notes.gone() == [(5, 12, "retention")]


@pytest.mark.moderate
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


@pytest.mark.moderate
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
