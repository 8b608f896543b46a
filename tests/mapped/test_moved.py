"""A reader of the files of a stream with keys: what has moved comes once, and the last of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from malamute_protocol.stamp import Stamp
from malamute_py import AtClientTime, AtTime, EmbeddedBroker, GapNotice, Notice
from malamute_py.changelog.copies import unpack_copy
from malamute_py.client.sync.client import SyncClient
from malamute_py.journal import open_reader
from malamute_py.mapped import LogReader
from malamute_py.mapped.moved import MovedRecords
from malamute_py.mapped.segments import SegmentMap

KEYS = [f"k{number}" for number in range(30)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moved")


@pytest.fixture(scope="module")
def client(path: Path) -> Iterator[SyncClient]:
    """A link to a broker whose stream "s" has come round some times; k0 to k29 have moved."""
    with EmbeddedBroker(path) as broker, broker.connect_sync() as linked:
        linked.create_stream("s", keep="last-per-subject", ring_bytes=1 << 20)
        linked.publish_many("s", [key.encode() for key in KEYS], subjects=KEYS)
        linked.kv("s").put("k7", b"second")
        turn(linked)
        yield linked


def turn(client: SyncClient) -> None:
    """Let the ring come round."""
    end = client.stream_info("s").first + 1_500
    while client.stream_info("s").first < end:
        client.publish_many("s", [b"x" * 900] * 20, subject="busy")


@pytest.fixture
def reader(client: SyncClient, path: Path) -> Iterator[LogReader]:
    with open_reader(path) as opened:
        yield opened


@pytest.mark.moderate
def test_what_has_moved_is_read_once_each_in_order_and_is_no_gap(
    client: SyncClient, reader: LogReader
) -> None:
    notices: list[object] = []
    with reader.read("s", until="tail", on_notice=notices.append) as reading:
        records = list(reading.records())
    offsets = [record.offset for record in records]
    assert offsets == sorted(set(offsets))
    newest = {record.subject: record for record in records}
    assert set(client.kv("s").keys().items()) == {
        (subject, record.offset) for subject, record in newest.items()
    }
    assert newest["k7"].body == b"second"
    assert {newest[key].body for key in KEYS if key != "k7"} == {
        key.encode() for key in KEYS if key != "k7"
    }
    assert not notices


@pytest.mark.moderate
def test_a_pattern_and_a_start_select_among_what_has_moved(
    client: SyncClient, reader: LogReader
) -> None:
    with reader.read("s", "nothing", start="earliest", until="tail") as reading:
        assert not list(reading.records())
    with reader.read("s", "prefix:k2", until="tail") as reading:
        assert [record.offset for record in reading.records()] == [3, *range(21, 31)]
    with reader.read("s", "prefix:k", start=25, end=28) as reading:
        assert [record.offset for record in reading.records()] == [25, 26, 27]
        assert reading.position.next == 28


@pytest.mark.moderate
@pytest.mark.parametrize("start", [AtTime(0), AtClientTime(0)])
def test_a_start_by_a_time_before_all_that_has_not_moved_gives_what_has(
    client: SyncClient, reader: LogReader, start: AtTime | AtClientTime
) -> None:
    with reader.read("s", "prefix:k", start=start, until="tail") as reading:
        offsets = [record.offset for record in reading.records()]
    assert offsets[:30] == [*range(1, 8), *range(9, 32)]


@pytest.mark.slow
def test_a_reader_that_the_ring_overtakes_goes_on_with_what_has_moved(
    client: SyncClient, reader: LogReader
) -> None:
    with reader.read("s", copy=True) as reading:
        first = reading.next_batch(10_000)
        assert first is not None
        client.kv("s").put("late", b"1")
        turn(client)
        revision = client.kv("s").put("end", b"1")
        seen = [record.offset for record in first.records()]
        subjects = {}
        while not seen or seen[-1] < revision:
            batch = reading.next_batch(10_000)
            assert batch is not None
            for record in batch.records():
                seen.append(record.offset)
                subjects[record.subject] = record.body
    assert seen == sorted(set(seen))
    assert subjects["late"] == b"1"


@pytest.mark.slow
def test_a_copy_that_is_overwritten_while_it_is_read_is_looked_for_anew(
    client: SyncClient, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = MovedRecords._find
    found: list[int] = []

    def overtaken(moved: MovedRecords) -> object:
        copies = find(moved)
        found.append(len(copies))
        if len(found) == 1:
            turn(client)
            turn(client)
        return copies

    monkeypatch.setattr(MovedRecords, "_find", overtaken)
    with reader.read("s", "prefix:k", until="tail", copy=True) as reading:
        offsets = [record.offset for record in reading.records()]
    assert len(found) > 1
    assert offsets == [*range(1, 8), *range(9, 32)]


def test_a_copy_that_has_become_any_bytes_while_it_is_read_is_looked_for_anew(
    reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reader.read("s", "prefix:k2", until="tail") as reading:
        offsets = [record.offset for record in reading.records()]
    find = MovedRecords._find
    found: list[object] = []

    def noted(moved: MovedRecords) -> object:
        copies = find(moved)
        found.append(copies)
        return copies

    def overwritten(copy: bytes) -> object:
        if found:
            monkeypatch.setattr("malamute_py.mapped.moved.unpack_copy", unpack_copy)
            copy = b"\xff" * len(copy)
        return unpack_copy(copy)

    monkeypatch.setattr(MovedRecords, "_find", noted)
    monkeypatch.setattr("malamute_py.mapped.moved.unpack_copy", overwritten)
    with reader.read("s", "prefix:k2", until="tail") as reading:
        assert [record.offset for record in reading.records()] == offsets
    assert len(found) > 1


@pytest.mark.slow
def test_a_batch_that_is_overwritten_while_it_waits_gives_what_has_moved(
    client: SyncClient, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits behind the notice of a damage: its newest records are not lost with it."""
    kept = client.kv("s").put("kept", b"1")
    client.kv("s").put("damaged", b"1")
    client.kv("s").put("waits", b"1")
    notices: list[tuple[int, int, str]] = []

    def note(notice: Notice) -> None:
        assert isinstance(notice, GapNotice)
        notices.append((notice.from_offset, notice.to_offset, notice.code))
        turn(client)
        turn(client)

    stamp_at = SegmentMap.stamp

    def damaged(segment: SegmentMap, at: int) -> Stamp | str:
        stamp = stamp_at(segment, at)
        return "damaged" if isinstance(stamp, str) or stamp.base_offset == kept + 1 else stamp

    monkeypatch.setattr(SegmentMap, "stamp", damaged)
    with reader.read("s", start=kept, end=kept + 3, on_notice=note) as reading:
        read = [record.subject for record in reading.records()]
    assert notices == [(kept + 1, kept + 2, "damaged")]
    assert read == ["kept", "waits"]
