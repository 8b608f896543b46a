"""A log of one stream: the journal for programs that want just that.

Owns nothing that a ring does not have; it hides streams, batches and threads. The rule:
everything of it fits on one page:

    with Log.open("events") as log:
        offset = log.append(b"one", b"two")        # in the file; 0 is the first offset
        log.sync()                                 # on the disk
        log.read(offset)                           # b"one"
        for offset, record in log.records(log.closest_offset(time_ms)): ...
        log.first_offset, log.next_offset, log.bytes_on_disk()
        log.remove_before(time_ms); log.limit_bytes(1 << 30)

One thread at a time. Source: docs/design.md (Journal; References).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.stamp import Stamp
from malamute_py.journal.directory import Journal
from malamute_py.journal.errors import JournalCorrupt
from malamute_py.journal.ring import Ring
from malamute_py.journal.storage import MemoryStorage, Storage
from malamute_py.journal.types import Append, Gap, Recovery, RingSettings, Run

_RING = "log"
_STREAM = 1
_READ_BYTES = 1 << 20


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Log:
    """An append-only array of records, on disk or in memory; see the module for its use."""

    def __init__(
        self, journal: Journal, ring: Ring, recovery: Recovery, clock: Callable[[], int]
    ) -> None:
        """Use open() or in_memory()."""
        self.recovery = recovery
        """Findings of the opening: dropped tails and damages among them."""
        self.ring = ring
        self._journal = journal
        self._clock = clock
        self._batch: tuple[int, int, list[bytes]] = (0, 0, [])
        """(base offset, next offset, records) of the batch that was read last."""

    @classmethod
    def open(
        cls,
        where: str | Path | Storage,
        settings: RingSettings | None = None,
        clock: Callable[[], int] = _now_ms,
    ) -> Log:
        """Open the log in a directory, made when it is new.

        clock: milliseconds for the append time. Raises what Journal.open() raises.
        """
        journal = Journal.open(where)
        try:
            ring, recovery = journal.ring(_RING, settings)
        except BaseException:
            journal.close()
            raise
        return cls(journal, ring, recovery, clock)

    @classmethod
    def in_memory(
        cls, settings: RingSettings | None = None, clock: Callable[[], int] = _now_ms
    ) -> Log:
        """Open a log in memory; its segments are small unless settings say otherwise."""
        small = RingSettings(segment_bytes=1 << 20, ring_bytes=64 << 20)
        return cls.open(MemoryStorage(), settings or small, clock)

    def append(self, *records: bytes) -> int:
        """Append records as one atomic batch; returns the offset of the first.

        Raises JournalFull, DiskFull, BatchTooLarge: nothing was written.
        """
        offset = self.next_offset
        content = encode(records, subject="")
        crc = Content(content).head.content_crc
        self.ring.append([Append(_STREAM, offset, len(records), self._clock(), content, crc)])
        return offset

    def sync(self) -> None:
        """Make everything appended durable. Raises JournalFailed."""
        self.ring.sync()

    @property
    def first_offset(self) -> int:
        """Offset of the oldest record; next_offset when there is none."""
        return self.ring.first_offset(_STREAM)

    @property
    def next_offset(self) -> int:
        """Offset that the next record will have."""
        return self.ring.next_offset(_STREAM)

    def __len__(self) -> int:
        """How many records there are."""
        return self.next_offset - self.first_offset

    def read(self, offset: int) -> bytes:
        """Return one record. Its batch is kept, so that the next one is mostly there already.

        Raises IndexError outside [first_offset, next_offset), JournalCorrupt for a record
        that is damaged.
        """
        base, after, bodies = self._batch
        if not base <= offset < after or offset < self.first_offset:
            if not self.first_offset <= offset < self.next_offset:
                raise IndexError(
                    f"no record {offset}: the log holds {self.first_offset} to {self.next_offset}"
                )
            history = self.ring.read(_STREAM, offset, offset + 1, bytes_max=1)  # one batch
            _raise_gaps(history.gaps)
            for base, bodies in _bodies(history.runs[0]):
                self._batch = (base, base + len(bodies), bodies)
            base, _, bodies = self._batch
        return bodies[offset - base]

    def records(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, record) from `start`, or the first one kept, up to `end`.

        end: an offset; None: the present end. Records that are given up meanwhile are left out.
        Raises JournalCorrupt at a damaged record, after those before it.
        """
        position = max(start, self.first_offset)
        end = self.next_offset if end is None else min(end, self.next_offset)
        while position < end:
            history = self.ring.read(_STREAM, position, end, _READ_BYTES)
            damaged = [gap for gap in history.gaps if gap.code != "retention"]
            stop = damaged[0].from_offset if damaged else end
            for run in history.runs:
                for base, bodies in _bodies(run):
                    for offset, body in enumerate(bodies, base):
                        if position <= offset < stop:
                            yield offset, body
            _raise_gaps(damaged)
            position = history.next

    def closest_offset(self, time_ms: int) -> int:
        """Offset of the first record appended at the time or later; else next_offset."""
        return self.ring.closest_offset(_STREAM, time_ms)

    def remove_before(self, time_ms: int) -> int:
        """Give up what was appended before the time; returns the first offset left."""
        self.ring.remove_before(_STREAM, time_ms=time_ms)
        self._tidy()
        return self.first_offset

    def limit_bytes(self, bytes_max: int) -> int:
        """Give up the oldest records beyond so many bytes; returns the first offset left."""
        self.ring.limit_bytes(_STREAM, bytes_max)
        self._tidy()
        return self.first_offset

    def bytes_on_disk(self) -> int:
        """Size of all segment files."""
        return self.ring.bytes_on_disk()

    def _tidy(self) -> None:
        """Do what a broker's housekeeping thread does: called after records were given up."""
        while self.ring.prepare_step():
            pass

    def close(self) -> None:
        """Sync and let go of the directory. Raises JournalFailed."""
        self._journal.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raise_gaps(gaps: Sequence[Gap]) -> None:
    """Raise JournalCorrupt for the first of these gaps, if there is one."""
    for gap in gaps:
        raise JournalCorrupt(
            "log", f"records {gap.from_offset} to {gap.to_offset}: {gap.code}, {gap.reason}"
        )


def _bodies(run: Run) -> Iterator[tuple[int, list[bytes]]]:
    """Yield (base offset, bodies) of each batch of a run, whose checksums its read has checked."""
    view = memoryview(run.data)
    for position, size, base, _ in run.spans:
        stamp = Stamp.unpack(view, position, verify=False)
        content = Content(view[position + stamp.stamp_bytes : position + size])
        blob, offsets, _parts = content.bodies()
        bounds = offsets.tolist()
        yield base, [bytes(blob[a:b]) for a, b in pairwise(bounds)]
