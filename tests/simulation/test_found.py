"""Violations that the simulator found, told without it: each as short as possible."""

from __future__ import annotations

from random import Random

import pytest

from malamute_protocol import commands as c
from malamute_protocol.encode import encode as encode_batch
from malamute_py.journal.ring import Ring
from malamute_py.journal.types import Append, History, RingSettings
from malamute_py.matcher import rows_by_subject
from tests.simulation.disk import CrashNow, Disk
from tests.simulation.faults import find_batch
from tests.simulation.model import Model, Violation
from tests.simulation.readers import Reader
from tests.simulation.records import Sent, decode_run, encode
from tests.simulation.ring_run import RingRun
from tests.simulation.storage import SimulatedStorage

SETTINGS = RingSettings(segment_bytes=65_536, ring_bytes=6 * 65_536)


def opened(disk: Disk, epoch: int) -> Ring:
    return Ring.open(
        SimulatedStorage(disk), settings=SETTINGS, epoch=epoch, entropy=Random(1).randbytes
    )[0]


def batch(serial: int, offset: int, length: int, stream: int = 1) -> Append:
    content = encode([Sent(serial, 0, "s", "a", None, 0, length)])
    return Append(
        stream, offset, 1, 1000 + serial, content, int.from_bytes(content[8:12], "little")
    )


def serials(ring: Ring) -> list[int]:
    runs = ring.read(1, 0, ring.next_offset(1), 1 << 20).runs
    return [row.serial for run in runs for found in decode_run(run.data) for row in found.rows]


def test_halves_of_two_epochs_that_begin_at_one_position_are_no_bundle() -> None:
    disk = Disk()
    ring = opened(disk, 1)
    ring.append([batch(1, 0, 10_000)])
    ring.sync()
    while ring.prepare_step():
        pass
    # A bundle over two segments, of which a crash leaves the first half.
    disk.crash_at_write = disk.writes + 2
    with pytest.raises(CrashNow):
        ring.append([batch(2, 1, 30_000), batch(3, 2, 30_000)])
    disk.names["000000000000.seg"].settle_all()
    disk.crash()
    ring = opened(disk, 2)
    assert serials(ring) == [1]
    # The next epoch's first bundle begins there, too; only the second half of it survives.
    ring.append([batch(4, 1, 55_000)])
    disk.names["000000000001.seg"].settle_all()
    disk.power_loss(Random(1), "none")
    ring = opened(disk, 3)
    assert serials(ring) == [1]
    assert ring.next_offset(1) == 1


def test_a_ring_need_not_know_a_stream_of_which_a_recovery_found_nothing_but_damage() -> None:
    disk = Disk()
    ring = opened(disk, 1)
    lsn = ring.append([batch(3, 0, 100, stream=2)]).end_lsn
    ring.append([batch(1, 0, 100)])
    ring.append([batch(2, 1, 100, stream=2)])
    ring.sync()
    # Its stamp says how far the disk was: the damage lies in what was there.
    ring.append([batch(4, 2, 100, stream=2)])
    place = find_batch(disk, "", 1, lsn)
    assert place is not None
    disk.rot(place[0], place[1] + 59, 0)
    disk.crash()
    run = RingRun(0)
    run.ring = ring = opened(disk, 2)
    assert list(ring.streams()) == [2]
    history = ring.read(1, 0, 1, 1 << 20)
    assert [(gap.from_offset, gap.to_offset, gap.code) for gap in history.gaps] == [
        (0, 1, "damaged")
    ]
    assert history.next == 1
    run.judge(run.model.log("", 1), history, 0, 1, "")
    run.judge(run.model.log("", 1), History((), 0), 0, 1, "")
    # A read of a stream that it knows must come further.
    with pytest.raises(Violation, match="came to 0"):
        run.judge(run.model.log("", 2), History((), 0), 0, 1, "")


def test_a_reader_from_the_oldest_record_begins_at_the_oldest_that_the_core_knows() -> None:
    model = Model()
    log = model.by_name["s"] = model.log("main", 1)
    log.name, log.tail = "s", 10
    # Housekeeping has retired up to 5, and the loop was told of 3.
    reader = Reader(
        model, "r", "s", ["all"], 0,
        lambda: 0, first_of=lambda log: 5, visible_of=lambda log: 10, told_first_of=lambda log: 3,
    )  # fmt: skip
    reader.subscribe([0], 10, 1 << 20)
    for begins in (2, 4, 5):
        with pytest.raises(Violation, match=f"began at {begins}, not 3"):
            reader.subscribed(c.Subscribed(1, b"u" * 16, 1, begins, 3, 10, -1))
    reader.subscribed(c.Subscribed(1, b"u" * 16, 1, 3, 3, 10, -1))
    reader.gap(c.Gap(1, 3, 5, "retention", ""))
    assert reader.position == 5


def test_a_read_that_stops_early_names_no_gap_beyond_the_offset_that_it_came_to() -> None:
    disk = Disk()
    ring = opened(disk, 1)
    written = [ring.append([batch(number, number, 1_000)]) for number in range(12)]
    ring.sync()
    # Its stamp says how far the disk was.
    ring.append([batch(12, 12, 1_000)])
    place = find_batch(disk, "", 1, written[7].end_lsn)
    assert place is not None
    disk.rot(place[0], place[1] + 59, 0)
    disk.crash()
    ring = opened(disk, 2)
    at, names = 0, list[tuple[int, int]]()
    seen = set[int]()
    while at < 12:
        # Wanted rows count less than their batches until they are read.
        history = ring.read(1, at, 12, 2_500, rows=rows_by_subject(["all"]))
        assert all(gap.to_offset <= history.next for gap in history.gaps)
        names += [(gap.from_offset, gap.to_offset) for gap in history.gaps]
        seen |= {row.offset for run in history.runs for b in decode_run(run.data) for row in b.rows}
        assert history.next > at
        at = history.next
    assert names == [(8, 9)]
    assert seen == set(range(12)) - {8}


def test_a_damaged_batch_is_not_passed_over_when_a_time_is_looked_for() -> None:
    disk = Disk()
    ring = opened(disk, 1)
    lsn = ring.append([batch(1, 0, 100)]).end_lsn
    ring.append([batch(2, 1, 100)])
    ring.append([batch(3, 2, 100)])
    ring.sync()
    place = find_batch(disk, "", 1, lsn)
    assert place is not None
    disk.rot(place[0], place[1] + 59, 0)
    # The damaged batch may have been appended at any time between those of its neighbours.
    assert [ring.closest_offset(1, 1000 + late) for late in (1, 2, 3, 4)] == [0, 1, 1, 3]
    assert [(gap.from_offset, gap.code) for gap in ring.read(1, 0, 3, 1 << 20).gaps] == [
        (1, "damaged")
    ]


def test_a_damaged_batch_is_not_passed_over_when_a_client_time_is_looked_for() -> None:
    disk = Disk()
    ring = opened(disk, 1)
    lsn = 0
    for number, time_ms in enumerate((500, 700, 600, 900)):
        content = encode_batch([b"x" * 100], subject="a", client_time_ms=[time_ms])
        crc = int.from_bytes(content[8:12], "little")
        done = ring.append([Append(1, number, 1, 1000, content, crc)])
        lsn = done.end_lsn if number == 0 else lsn
    ring.sync()
    place = find_batch(disk, "", 1, lsn)
    assert place is not None
    disk.rot(place[0], place[1] + 59, 0)
    # The damaged batch may have had any of these times.
    assert [ring.closest_client_time(1, time_ms) for time_ms in (500, 600, 800)] == [0, 1, 3]
