"""What the simulator found, told without it: each as short as it could be made."""

from __future__ import annotations

from random import Random

import pytest

from malamute_py.journal.ring import Ring
from malamute_py.journal.types import Append, RingSettings
from tests.simulation.disk import CrashNow, Disk
from tests.simulation.records import Sent, decode_run, encode
from tests.simulation.storage import SimulatedStorage

SETTINGS = RingSettings(segment_bytes=65_536, ring_bytes=6 * 65_536)


def opened(disk: Disk, epoch: int) -> Ring:
    return Ring.open(
        SimulatedStorage(disk), settings=SETTINGS, epoch=epoch, entropy=Random(1).randbytes
    )[0]


def batch(serial: int, offset: int, length: int) -> Append:
    content = encode([Sent(serial, 0, "s", "a", None, 0, length)])
    return Append(1, offset, 1, 1000 + serial, content, int.from_bytes(content[8:12], "little"))


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
    # The next epoch's first bundle begins there too; of it only the second half survives.
    ring.append([batch(4, 1, 55_000)])
    disk.names["000000000001.seg"].settle_all()
    disk.power_loss(Random(1), "none")
    ring = opened(disk, 3)
    assert serials(ring) == [1]
    assert ring.next_offset(1) == 1
