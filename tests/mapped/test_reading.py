"""Reading a log that another writes: where it begins, what is selected, how it follows."""

from __future__ import annotations

import gc
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

import malamute_py as malamute
from malamute_protocol.errors import BatchError, LocalProtocolError
from malamute_protocol.stamp import CHANGE, message_id
from malamute_py.changelog.applying import apply
from malamute_py.changelog.records import StreamCreated, encode_change
from malamute_py.changelog.settings import StreamSettings
from malamute_py.changelog.tables import Queues
from malamute_py.journal import Append, open_reader
from malamute_py.journal.layout import control_content
from malamute_py.mapped import LogReader, StreamRemoved, UnknownStream
from malamute_py.mapped.walk import LocatedBatch
from tests.journal.rings import S, batch
from tests.mapped.logs import SMALL, Log, Noted, body_at, filled, records


def test_a_batch_that_cannot_be_read_has_no_client_time(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    trades = log.create("trades")
    for number in range(5):
        log.put(trades, body_at(number), time_ms=1000, client_time_ms=5000)
    content = LocatedBatch.content

    def of_damaged(found: LocatedBatch) -> object:
        if found.stamp.base_offset == 0:
            raise BatchError("bad_batch", "damaged")
        return content(found)

    monkeypatch.setattr(LocatedBatch, "content", of_damaged)
    start = malamute.AtClientTime(0)
    assert records(reader.read("trades", start=start, until="tail"))[0][0] == 1


@pytest.mark.moderate
@pytest.mark.parametrize("tidied", [False, True])
def test_all_records_are_read_with_and_without_indexes(
    log: Log, reader: LogReader, tidied: bool
) -> None:
    trades, other = log.create("trades"), log.create("other")
    for _ in range(60):
        log.fill(trades, 2)
        log.fill(other, 1)
    if tidied:
        log.tidy()
    assert records(reader.read("trades", until="tail")) == filled(0, 120)
    assert records(reader.read("other", until="tail")) == filled(0, 60)


def test_a_reading_to_the_tail_walks_no_batches_to_find_it(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    trades, other = log.create("trades"), log.create("other")
    log.fill(trades, 60)
    log.fill(other, 60)
    for count in (60, 62):
        with monkeypatch.context() as patch:
            patch.setattr("malamute_py.mapped.reading.next_offset", None)
            reading = reader.read("trades", start="latest", until="tail")
        assert reading.position.next == count
        log.fill(trades, 2)


@pytest.mark.moderate
@pytest.mark.parametrize("tidied", [False, True])
@pytest.mark.parametrize("start", [0, 1, 59, 60, 61, 119, 120])
def test_reading_begins_at_an_offset_wherever_that_lies(
    log: Log, reader: LogReader, start: int, tidied: bool
) -> None:
    trades = log.create("trades")
    log.fill(trades, 120)
    if tidied:
        log.tidy()
    reading = reader.read("trades", start=start, until="tail", strict=True)
    assert records(reading) == filled(start, 120)
    assert reading.position.next == 120


def test_a_reader_goes_on_at_the_position_of_another(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.fill(trades, 100)
    first = reader.read("trades")
    for _ in range(40):
        first.next_batch(0)
    assert records(reader.read("trades", start=first.position, until="tail")) == filled(40, 100)


def test_reading_begins_amid_a_batch(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.put(trades, b"0", b"1", b"2", b"3")
    assert records(reader.read("trades", start=2, end=3)) == [(2, b"2")]


@pytest.mark.moderate
@pytest.mark.parametrize("tidied", [False, True])
def test_reading_begins_at_a_time(log: Log, reader: LogReader, tidied: bool) -> None:
    trades = log.create("trades")
    for number in range(150):
        log.put(trades, body_at(number), time_ms=1000 + 10 * number, client_time_ms=5000 - number)
    if tidied:
        log.tidy()

    def first(start: object) -> int:
        return records(reader.read("trades", start=start, until="tail"))[0][0]  # type: ignore[arg-type]

    assert first(malamute.AtTime(1500)) == 50
    assert first(malamute.AtTime(1495)) == 50
    assert first(malamute.AtTime(1500, inclusive=False)) == 51
    assert first(datetime.fromtimestamp(1.5, UTC)) == 50
    assert first(malamute.AtClientTime(0)) == 0
    assert first(malamute.AfterMessage(message_id(1500, 50))) == 51
    assert first(malamute.AtMessage(message_id(1500, 50))) == 50
    assert records(reader.read("trades", start=malamute.AtTime(9999), until="tail")) == []
    for wrong in (b"i" * 15, b"\xff" * 16):
        with pytest.raises(LocalProtocolError, match="bad_start"):
            first(malamute.AfterMessage(wrong))


@pytest.mark.moderate
@pytest.mark.parametrize("tidied", [False, True])
def test_only_records_that_match_the_pattern_are_read(
    log: Log, reader: LogReader, tidied: bool
) -> None:
    trades = log.create("trades")
    for number in range(150):
        log.put(trades, body_at(number), b"x", subject=[f"forex.{number % 3}", "stock.x"])
    if tidied:
        log.tidy()
    of_one = [(2 * number, body_at(number)) for number in range(1, 150, 3)]
    assert records(reader.read("trades", "forex.1", until="tail")) == of_one
    assert len(records(reader.read("trades", malamute.prefix("forex."), until="tail"))) == 150
    neither = malamute.not_(malamute.topic("forex.*"))
    assert len(records(reader.read("trades", neither, until="tail"))) == 150
    assert records(reader.read("trades", "bonds.#", until="tail")) == []


@pytest.mark.moderate
def test_only_records_within_client_times_are_read(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    for number in range(150):
        log.put(trades, body_at(number), client_time_ms=number)
    log.tidy()
    assert records(reader.read("trades", client_time=(70, 80), until="tail")) == filled(70, 80)


def test_what_has_expired_or_is_past_its_age_is_not_read(log: Log, reader: LogReader) -> None:
    now = int(datetime.now(UTC).timestamp() * 1000)
    trades, aged = log.create("trades"), log.create("aged", max_age_ms=60_000)
    log.put(trades, b"gone", b"here", expires_at_ms=[1, now + 3_600_000])
    log.put(aged, b"old", time_ms=now - 120_000)
    log.put(aged, b"new", time_ms=now)
    assert records(reader.read("trades", until="tail")) == [(1, b"here")]
    assert records(reader.read("aged", until="tail")) == [(1, b"new")]


@pytest.mark.moderate
def test_a_reading_follows_what_is_written(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    reading = reader.read("trades")
    with pytest.raises(malamute.Timeout):
        reading.next_batch(0)
    seen = []
    for _ in range(100):
        log.fill(trades, 3)
        seen += records(reading)
        log.tidy()
    assert seen == filled(0, 300)


def test_latest_begins_with_what_is_written_next(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.fill(trades, 70)
    reading = reader.read("trades", start="latest")
    log.fill(trades, 2)
    assert records(reading) == filled(70, 72)


def test_a_reading_up_to_the_tail_ends_at_what_was_the_tail(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.fill(trades, 5)
    reading = reader.read("trades", until="tail")
    log.fill(trades, 5)
    assert records(reading) == filled(0, 5)
    assert reading.next_batch() is None


@pytest.mark.moderate
def test_a_stream_of_a_ring_of_its_own_is_read(log: Log, reader: LogReader) -> None:
    own = log.create("own", "s/own", ring_bytes=1 << 20)
    log.fill(own, 70)
    assert records(reader.read("own", until="tail")) == filled(0, 70)
    (entry,) = reader.streams()
    assert (entry.name, entry.ring, entry.settings.ring_bytes) == ("own", "s/own", 1 << 20)


def test_half_a_bundle_is_not_seen(log: Log, reader: LogReader) -> None:
    trades, other = log.create("trades"), log.create("other")
    log.put(trades, b"before")
    reading = reader.read("trades")
    assert records(reading) == [(0, b"before")]
    from tests.journal.rings import batch

    ring = log.ring("main")
    begin = ring.end_lsn
    appended = ring.append([batch(ring, trades, [b"first"]), batch(ring, other, [b"last"])])
    last = log.path / "rings" / "main" / "000000000000.seg"
    data = last.read_bytes()
    # As while pwritev is under way: the second batch's content is not there yet.
    torn = appended.end_lsn - 16
    with last.open("r+b") as file:
        file.seek(torn)
        file.write(bytes(16))
    assert records(reading) == []
    # The writer failed, and wrote another bundle in its place.
    with last.open("r+b") as file:
        file.seek(begin)
        file.write(data[begin : appended.end_lsn])
    assert records(reading) == [(1, b"first")]


def test_the_beginning_of_one_bundle_and_the_whole_of_another_are_no_bundle(
    log: Log, reader: LogReader
) -> None:
    """A failed append leaves its own beginning before the rest of an earlier one."""
    from malamute_protocol.stamp import LAST_OF_BUNDLE, STAMP_BYTES, Stamp
    from tests.journal.rings import batch, content_of

    trades = log.create("trades")
    log.put(trades, b"before")
    ring = log.ring("main")
    reading = reader.read("trades")
    assert records(reading) == [(0, b"before")]
    appended = ring.append([batch(ring, trades, [b"begin"]), batch(ring, trades, [b"end"], base=2)])
    begin = Stamp.unpack(appended.stamps[0])
    content, crc = content_of([b"other"])
    place = begin.lsn + begin.size
    left = begin._replace(
        flags=LAST_OF_BUNDLE, lsn=place, bundle_lsn=place, base_offset=1,
        size=STAMP_BYTES + len(content), content_crc=crc,
    )  # fmt: skip
    with (log.path / "rings/main/000000000000.seg").open("r+b") as file:
        file.seek(place)
        file.write(left.pack() + content)
    assert records(reading) == []


def test_durable_reads_only_what_the_files_say_is_synced(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.fill(trades, 1)
    reading = reader.read("trades", visibility="durable")
    assert records(reading) == []
    log.ring("main").sync()
    log.fill(trades, 1)
    assert records(reading) == filled(0, 1)
    log.ring("main").sync()
    while log.ring("main").prepare_step() or log.ring("main").prepare_step():
        pass
    assert records(reading) == filled(1, 2)


def test_a_stream_may_be_made_while_the_log_is_open(log: Log, reader: LogReader) -> None:
    with pytest.raises(UnknownStream, match="there are: none"):
        reader.read("late")
    log.fill(log.create("late"), 2)
    assert records(reader.read("late", until="tail")) == filled(0, 2)
    with pytest.raises(UnknownStream, match="there are: late"):
        reader.read("lat")


def test_a_stream_that_is_removed_ends_its_readings_by_name(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("malamute_py.mapped.reading._CATALOGUE_S", 0)
    trades = log.create("trades")
    log.fill(trades, 1)
    reading = reader.read("trades")
    assert records(reading) == filled(0, 1)
    log.remove(trades)
    with pytest.raises(StreamRemoved, match="'trades' was removed"):
        reading.next_batch(0)
    assert reading.next_batch(0) is None


@pytest.mark.moderate
def test_a_reading_of_a_ring_that_went_with_its_stream_is_not_rewound(
    log: Log, reader: LogReader
) -> None:
    own = log.create("own", "s/own", ring_bytes=1 << 20)
    log.fill(own, 5)
    reading = reader.read("own", strict=True)
    assert records(reading) == filled(0, 5)
    log.remove(own)
    _drop_ring(log)
    with pytest.raises(StreamRemoved, match="'own' was removed"):
        reading.next_batch(2_000)


@pytest.mark.moderate
def test_records_that_went_with_their_stream_are_no_gap(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("malamute_py.mapped.segments.MAPS_MAX", 1)
    own = log.create("own", "s/own", ring_bytes=1 << 20)
    log.fill(own, 200)
    reading = reader.read("own", until="tail", strict=True)
    first = reading.next_batch(0)
    log.remove(own)
    _drop_ring(log)
    with pytest.raises(StreamRemoved, match="'own' was removed"):
        records(reading)
    assert first is not None
    assert first.base_offset == 0


@pytest.mark.moderate
def test_the_files_of_a_ring_that_went_with_its_stream_are_released(
    log: Log, reader: LogReader
) -> None:
    log.fill(log.create("trades"), 3)
    assert records(reader.read("trades", until="tail")) == filled(0, 3)
    for _ in range(2):
        own = log.create("own", "s/own", ring_bytes=1 << 20)
        log.fill(own, 200)
        assert records(reader.read("own", until="tail")) == filled(0, 200)
        assert _mapped(log, "own")
        log.remove(own)
        _drop_ring(log)
        assert [entry.name for entry in reader.streams()] == ["trades"]
        gc.collect()
        assert not _mapped(log, "own")
        assert _mapped(log, "main")


def _mapped(log: Log, ring: str) -> list[str]:
    """Return the lines about mappings of a ring's files of the log in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(log.path) in line and ring in line]


def _drop_ring(log: Log) -> None:
    """Take away the files of a stream's own ring, as a broker does after the removal."""
    log.rings.pop("s/own").close()
    del log.journal.rings["s/own"]
    log.journal.forget("s/own")
    (directory,) = (each for each in (log.path / "rings").iterdir() if each.name != "main")
    shutil.rmtree(directory)


def test_a_stream_in_memory_is_refused_by_name(log: Log, reader: LogReader) -> None:
    log.create("fleeting", "memory", memory=True)
    with pytest.raises(UnknownStream, match="memory"):
        reader.read("fleeting")


@pytest.mark.parametrize("on_notice", [5, "a"])
def test_a_notice_can_only_go_to_a_function(log: Log, reader: LogReader, on_notice: object) -> None:
    log.create("s")
    with pytest.raises(LocalProtocolError, match="on_notice"):
        reader.read("s", on_notice=on_notice)  # type: ignore[arg-type]


def test_start_points_that_only_a_broker_knows_are_refused(log: Log, reader: LogReader) -> None:
    log.create("trades")
    with pytest.raises(LocalProtocolError, match="cursors"):
        reader.read("trades", start=malamute.FromCursor("mine"))
    with pytest.raises(LocalProtocolError, match="cursors"):
        reader.read("trades", start=malamute.LastPerSubject())


@pytest.mark.moderate
def test_a_broker_that_is_started_anew_is_followed(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.fill(trades, 70)
    reading = reader.read("trades", strict=True)
    assert records(reading) == filled(0, 70)
    for _ in range(3):
        log.close()
        log.open()
        log.fill(trades, 10)
        begin = reading.position.next
        assert records(reading) == filled(begin, begin + 10)


@pytest.mark.moderate
@pytest.mark.parametrize("opened_before", [False, True])
def test_an_end_that_a_recovery_dropped_is_not_read(log: Log, opened_before: bool) -> None:
    """A power loss left a hole, and whole bundles behind it, in the next segment, too."""
    from malamute_py.journal import open_reader
    from tests.journal.rings import HEAD, S

    trades = log.create("trades")
    log.tidy()
    log.fill(trades, 48)
    hole = log.ring("main").end_lsn
    log.fill(trades, 20)
    assert log.ring("main").end_lsn > S + HEAD, "the tail goes on in the next segment"
    log.journal._release()
    with (log.path / "rings/main/000000000000.seg").open("r+b") as file:
        file.seek(hole)
        file.write(bytes(400))
    if not opened_before:
        log.open()
    with open_reader(log.path) as reader:
        reading = reader.read("trades", strict=True)
        assert records(reading) == filled(0, 48)
        if opened_before:
            log.open()
            assert records(reading) == []
        assert log.next(trades) == 48
        for _ in range(20):
            begin = log.next(trades)
            log.fill(trades, 3)
            assert records(reading) == filled(begin, begin + 3)


def test_a_reader_that_saw_what_a_power_loss_took_back_is_rewound(log: Log) -> None:
    trades, notes = log.create("trades"), list[malamute.Notice]()
    log.tidy()
    log.fill(trades, 5)
    kept = log.ring("main").end_lsn
    log.fill(trades, 5)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", on_notice=notes.append)
        assert records(reading) == filled(0, 10)
        log.journal._release()
        with (log.path / "rings/main/000000000000.seg").open("r+b") as file:
            file.seek(kept)
            file.write(bytes(12_000))
        log.open()
        log.fill(trades, 1)
        assert records(reading) == []
        assert notes == [malamute.RewoundNotice(10, 6, log.journal.epoch)]
        log.fill(trades, 3)
        assert records(reading) == filled(6, 9)


@pytest.mark.moderate
def test_the_names_of_streams_are_found_when_many_segments_lie_behind_them(log: Log) -> None:
    trades = log.create("trades")
    log.fill(trades, 400)
    log.tidy()
    log.create("new")
    with open_reader(log.path) as reader:
        assert [entry.name for entry in reader.streams()] == ["new", "trades"]


@pytest.mark.moderate
def test_a_stream_made_across_two_segments_is_found_after_the_ring_has_come_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest segment begins amid the bundle whose first batch made the stream."""
    monkeypatch.setattr("malamute_py.mapped.reading._CATALOGUE_S", 1e9)
    log = Log(tmp_path / "data", SMALL)
    trades, ring = log.create("trades"), log.ring("main")
    log.fill(trades, 1)
    with open_reader(log.path) as reader:
        reading = reader.read("trades")
        while ring.end_lsn < 8 * S or S - ring.end_lsn % S > 3000:
            log.fill(trades, 1)
            log.tidy()
            records(reading)
        number = log.tables.next_number
        change = StreamCreated(number, "new", bytes(16), "main", StreamSettings(), "", 1000)
        content, crc = control_content([encode_change(change)])
        made = Append(0, log.change_next, 1, 1000, content, crc, None, CHANGE)
        ring.append([made, batch(ring, trades, [bytes(1000)] * 3, time_ms=1000)])
        log.change_next += 1
        apply(log.tables, Queues(), change)
        records(reading)
        assert [entry.name for entry in reader.streams()] == ["new", "trades"]
    log.close()


def test_an_id_from_before_the_stream_was_made_is_of_an_earlier_one_of_its_name(
    log: Log, reader: LogReader
) -> None:
    trades, notes = log.create("trades"), Noted()
    log.fill(trades, 10)
    start = malamute.AtMessage(message_id(999, 5))
    found = records(reader.read("trades", start=start, until="tail", on_notice=notes.append))
    assert found == filled(0, 10)
    assert [
        (note.from_offset, note.to_offset, note.epoch)
        for note in notes
        if isinstance(note, malamute.RewoundNotice)
    ] == [(5, 0, log.journal.epoch)]
