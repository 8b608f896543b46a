"""The records that drivers send, and the proof that they came: each once, whole and in order.

Record i of producer p is the number p << 48 | i, little-endian in 8 bytes, then `x` up to its
size (12 bytes at the least hold the number). A record that is paced carries the time of its
sending in the next 8. Of a fill with a rare subject, the rare record of block b (`every`
records a block) is at b * every + splitmix64(seed + b) % every. Drivers in other languages make
the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILLER = b"x"
INDEX_BITS = 48
_MASK = np.uint64((1 << INDEX_BITS) - 1)

Numbers = NDArray[np.uint64]


def block_of_bodies(producer: int, size: int, first: int, count: int) -> bytes:
    """Return `count` bodies back to back."""
    rows = np.full((count, size), ord(FILLER), np.uint8)
    numbers = np.arange(first, first + count, dtype="<u8") | np.uint64(producer << INDEX_BITS)
    rows[:, :8] = numbers.view(np.uint8).reshape(count, 8)
    return rows.tobytes()


def bodies(producer: int, size: int, first: int, count: int) -> list[bytes]:
    """Return `count` bodies, each by itself."""
    block = block_of_bodies(producer, size, first, count)
    return [block[place : place + size] for place in range(0, len(block), size)]


def chunks_of_bodies(
    producer: int, size: int, count: int, chunk: int, first: int = 0
) -> Iterator[list[bytes]]:
    """Give all `count` bodies in lists of at most `chunk`."""
    for place in range(first, first + count, chunk):
        yield bodies(producer, size, place, min(chunk, first + count - place))


def timed_body(number: int, sent_ns: int, size: int) -> bytes:
    """Return the body of a paced record; size is 16 at the least."""
    return number.to_bytes(8, "little") + sent_ns.to_bytes(8, "little") + FILLER * (size - 16)


def splitmix64(values: Numbers) -> Numbers:
    """Mix: the finaliser of Steele, Lea and Flood's SplitMix, as Vigna publishes it."""
    with np.errstate(over="ignore"):
        mixed = values + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)), np.uint64)


def rare_places(count: int, every: int, seed: int) -> NDArray[np.int64]:
    """Return the numbers of the rare records among the first `count`, ascending."""
    blocks = np.arange(-(-count // every), dtype=np.uint64)
    inside = splitmix64(blocks + np.uint64(seed)) % np.uint64(every)
    places = (blocks * np.uint64(every) + inside).astype(np.int64)
    return places[places < count]


class NotVerified(SystemExit):
    """What came is not what was sent; the text says how."""


class Check:
    """Checks records as they come, a list or a block at a time.

    count: records of each producer. first: the number of the first one that must come.
    wanted: instead, the numbers that must come, ascending (one producer).
    subjects: of more than one, order is checked within a subject (record i has i % subjects).
    """

    def __init__(
        self,
        size: int,
        count: int,
        *,
        producers: int = 1,
        first: int = 0,
        wanted: NDArray[np.int64] | None = None,
        subjects: int = 1,
    ) -> None:
        self.size = size
        self.count = count if wanted is None else len(wanted)
        self.received = 0
        self._first = first
        self._wanted = wanted
        self._subjects = subjects
        self._seen = np.zeros((producers, self.count), np.bool_)
        self._next = [0] * producers
        self._last = np.full((producers, subjects), -1, np.int64)
        self._duplicates = 0
        self._misordered = 0

    @property
    def done(self) -> bool:
        """Whether as many came as must."""
        return self.received >= self._seen.size

    def take(self, some: Sequence[bytes]) -> None:
        """Check bodies that came in this order."""
        joined = b"".join(some)
        if len(joined) != len(some) * self.size:
            raise NotVerified(f"{len(some)} records have {len(joined)} bytes, not {self.size} each")
        self.take_block(joined)

    def take_block(self, block: Any) -> None:
        """Check bodies back to back; raises NotVerified when one was never sent."""
        flat = np.frombuffer(block, np.uint8)
        if len(flat) % self.size:
            raise NotVerified(f"{len(flat)} bytes are no records of {self.size}")
        rows = flat.reshape(-1, self.size)
        if not len(rows):
            return
        if self.size > 16 and not (rows[:, -1] == ord(FILLER)).all():
            raise NotVerified("a record does not end as it was sent")
        self.take_numbers(np.ascontiguousarray(rows[:, :8]).view("<u8").ravel())

    def take_numbers(self, numbers: Numbers) -> None:
        """Check by the numbers alone, for a driver that has compared the bodies itself."""
        self.received += len(numbers)
        if self._seen.shape[0] == 1:
            self._take_of(0, numbers)
            return
        producers = (numbers >> np.uint64(INDEX_BITS)).astype(np.int64)
        for producer in np.unique(producers):
            if producer >= self._seen.shape[0]:
                raise NotVerified(f"a record of producer {producer}, who does not exist")
            self._take_of(int(producer), numbers[producers == producer] & _MASK)

    def _take_of(self, producer: int, numbers: Numbers) -> None:
        index = numbers.astype(np.int64)
        if self._wanted is None:
            index -= self._first
            if index.min() < 0 or index.max() >= self.count:
                raise NotVerified(f"records {numbers.min()} to {numbers.max()} were never sent")
        else:
            places = np.searchsorted(self._wanted, index)
            if not (self._wanted[np.minimum(places, self.count - 1)] == index).all():
                raise NotVerified("a record came that was not asked for")
            index = places
        seen, begin = self._seen[producer], self._next[producer]
        end = begin + len(index)
        if index[0] == begin and index[-1] == end - 1 and bool((np.diff(index) == 1).all()):
            # The usual case, all in order: behind everything that came before.
            part = seen[begin:end]
            self._duplicates += int(part.sum())
            part[:] = True
            self._next[producer] = end
            subjects = np.arange(self._subjects)
            latest = end - 1 - (end - 1 + self._first - subjects) % self._subjects
            np.maximum(self._last[producer], latest, out=self._last[producer])
            return
        fresh = np.unique(index)
        self._duplicates += len(index) - len(fresh) + int(seen[fresh].sum())
        seen[fresh] = True
        self._misordered += self._out_of_order(self._last[producer], index)
        self._next[producer] = int(index.max()) + 1

    def _out_of_order(self, last: NDArray[np.int64], index: NDArray[np.int64]) -> int:
        """Count records behind a later one of their subject; `last` is brought up to date."""
        subjects = (index + self._first) % self._subjects
        order = np.argsort(subjects, kind="stable")
        of, values = subjects[order], index[order]
        begins = np.flatnonzero(np.r_[True, of[1:] != of[:-1]])
        same = of[1:] == of[:-1]
        late = int((values[1:][same] < values[:-1][same]).sum())
        late += int((values[begins] < last[of[begins]]).sum())
        np.maximum.at(last, of, values)
        return late

    def verdict(self) -> dict[str, int]:
        """Return received, missing, duplicates and misordered: only the first may be above 0."""
        return {
            "received": self.received,
            "missing": int(self._seen.size - self._seen.sum()),
            "duplicates": self._duplicates,
            "misordered": self._misordered,
        }
