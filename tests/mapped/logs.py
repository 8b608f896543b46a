"""A data directory as a broker writes it, in the test's own process: rings, streams, changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import malamute_py as malamute
from malamute_protocol.batch import Batch
from malamute_protocol.stamp import CHANGE
from malamute_py.changelog.applying import apply
from malamute_py.changelog.records import Change, StreamCreated, StreamRemoved, encode_change
from malamute_py.changelog.settings import StreamSettings
from malamute_py.changelog.snapshots import Snapshot, encode_snapshot
from malamute_py.changelog.tables import Queues, Tables
from malamute_py.journal import Append, Journal, Ring, RingSettings
from malamute_py.journal.layout import control_content
from malamute_py.mapped import Reading
from tests.journal.rings import S, batch

SETTINGS = RingSettings(segment_bytes=S, ring_bytes=8 * S, index_interval_bytes=2048)
SMALL = RingSettings(segment_bytes=S, ring_bytes=4 * S, index_interval_bytes=2048)
LAP = 300
"""Records that go more than once around a ring of SMALL."""
BODY = 1000
"""Bytes of a body that fill() writes: some 60 of them are a segment."""


def descriptors(below: Path) -> int:
    """Number of descriptors that this process has of files below a directory."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(descriptor.readlink()).startswith(str(below))
    return found


class Log:
    """The log of a broker that this test is."""

    def __init__(self, path: Path, settings: RingSettings = SETTINGS) -> None:
        self.path = path
        self.tables = Tables()
        self.change_next = 0
        self._settings = settings
        self.open()

    def open(self) -> None:
        """Open the directory, in a new epoch."""
        self.journal = Journal.open(self.path)
        self.rings: dict[str, Ring] = {}
        self.ring("main")

    def ring(self, name: str) -> Ring:
        if name not in self.rings:
            self.rings[name], _ = self.journal.ring(name, self._settings, self._snapshot)
        return self.rings[name]

    def _snapshot(self) -> list[bytes]:
        return encode_snapshot(Snapshot(self.tables, self.change_next, []))

    def change(self, change: Change) -> None:
        content, crc = control_content([encode_change(change)])
        number = self.change_next
        self.ring("main").append([Append(0, number, 1, 1000, content, crc, None, CHANGE)])
        self.change_next += 1
        apply(self.tables, Queues(), change)

    def create(self, name: str, ring: str = "main", **settings: Any) -> int:
        """Make a stream; returns its number."""
        number = self.tables.next_number
        uuid = number.to_bytes(16, "little")
        self.change(StreamCreated(number, name, uuid, ring, StreamSettings(**settings), "", 1000))
        return number

    def remove(self, number: int) -> None:
        self.change(StreamRemoved(number, 2000))

    def put(self, number: int, *bodies: bytes, time_ms: int = 1000, **options: Any) -> None:
        """Append one batch as a bundle."""
        ring = self.ring(self.tables.streams[number].ring)
        ring.append([batch(ring, number, bodies, time_ms=time_ms, **options)])

    def fill(self, number: int, count: int) -> None:
        """Append so many batches of one record each, whose body is its offset again and again."""
        for _ in range(count):
            self.put(number, body_at(self.next(number)))

    def next(self, number: int) -> int:
        """Offset of the stream's next record."""
        return self.ring(self.tables.streams[number].ring).next_offset(number)

    def tidy(self) -> None:
        """Sync, and let housekeeping do all that it has to do."""
        for ring in self.rings.values():
            ring.sync()
            while ring.prepare_step(1 << 20):
                pass

    def close(self) -> None:
        self.journal.close()


def body_at(offset: int) -> bytes:
    """The body that fill() writes under an offset."""
    return (b"%d," % offset * BODY)[:BODY]


def records(reading: Reading) -> list[tuple[int, bytes]]:
    """(offset, body) of what is there now, of a reading that goes on or ends."""
    return [(record.offset, record.body) for each in batches(reading) for record in each]


def batches(reading: Reading) -> Iterator[Batch]:
    """The batches that are there now."""
    while True:
        try:
            found = reading.next_batch(0)
        except TimeoutError:
            return
        if found is None:
            return
        yield found


def filled(first: int, end: int) -> list[tuple[int, bytes]]:
    """Return what records() gives for the offsets [first, end) that fill() wrote."""
    return [(offset, body_at(offset)) for offset in range(first, end)]


class Noted(list[malamute.Notice]):
    """Notices, and what they say is gone."""

    def gone(self) -> list[tuple[int, int, str]]:
        gaps = [each for each in self if isinstance(each, malamute.GapNotice)]
        return [(gap.from_offset, gap.to_offset, gap.code) for gap in gaps]


def lap(log: Log, number: int) -> None:
    for _ in range(LAP // 20):
        log.fill(number, 20)
        log.tidy()


def flip(log: Log, lsn: int) -> None:
    """Turn a byte of ring main over."""
    number, position = divmod(lsn, S)
    with (log.path / "rings" / "main" / f"{number:012d}.seg").open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
