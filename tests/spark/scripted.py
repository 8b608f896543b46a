"""A client whose broker is a list, and a clock that a test moves: plans without a broker."""

from __future__ import annotations

from typing import Any

from malamute_py.client.facts import ReadPlan, Split
from malamute_py.client.position import AtTime, Position

RECORD_BYTES = 100
APPENDED_MS = 1_000
"""Append time of offset 0; each further record is a millisecond younger."""


class ScriptedClient:
    """One stream: which of its records match, and what of it is still there."""

    def __init__(self, matches: list[bool]) -> None:
        self.matches = matches
        self.first = self.trimmed = 0
        self.uuid = b"\x11" * 16
        self.epoch = 1
        self.epoch_ends: dict[int, int] = {}
        """Epoch that is over -> offset at which it ended."""
        self.looked_max = 1 << 62
        """Offsets that a plan looks at, at most, when it counts matching records."""
        self.plans: list[tuple[int, int | None, int, int]] = []
        """(start, end, records_max, bytes_max) of each plan that was asked for."""
        self.linked = True
        self.opens: list[int | None] = []
        """timeout_ms of each wait for a link."""
        self.failures: list[Exception] = []
        """Errors that the next questions raise."""

    @property
    def tail(self) -> int:
        return len(self.matches)

    def append(self, *matches: bool) -> None:
        self.matches.extend(matches)

    def rewind(self, tail: int) -> None:
        """Lose what lies beyond an offset, as a power loss does."""
        del self.matches[tail:]
        self.epoch_ends[self.epoch] = tail
        self.epoch += 1

    def restart(self) -> None:
        """Begin an epoch, as each start of a broker does."""
        self.epoch_ends[self.epoch] = self.tail
        self.epoch += 1

    def plan_read(
        self,
        stream: str,
        pattern: Any = "#",
        *,
        start: Any = "earliest",
        end: int | None = None,
        records_max: int = 0,
        bytes_max: int = 0,
        split_bytes: int = 0,
        visibility: str = "durable",
        client_time: Any = None,
    ) -> ReadPlan:
        if self.failures:
            raise self.failures.pop(0)
        assert visibility == "durable"
        wanted = self._offset(start)
        epoch = start.epoch if isinstance(start, Position) else self.epoch
        ended = min(self.tail, self.epoch_ends.get(epoch, self.tail))
        rewound = wanted > ended
        begin = ended if rewound else wanted
        stop = self.tail if end is None else min(end, self.tail)
        self.plans.append((wanted, end, records_max, bytes_max))
        splits: list[Split] = []
        position = cut = max(begin, self.first)
        size = total = records = 0
        everything = pattern == ["all"]
        while position < stop:
            if records_max and (records >= records_max or position - cut >= self.looked_max):
                break
            matched = everything or self.matches[position]
            records += matched
            size += RECORD_BYTES * matched
            position += 1
            if split_bytes and size >= split_bytes:
                splits.append(Split(cut, position, size))
                total, cut, size = total + size, position, 0
            if bytes_max and total + size >= bytes_max:
                break
        if position > cut:
            splits.append(Split(cut, position, size))
        return ReadPlan(
            stream=self.uuid,
            epoch=self.epoch,
            first=self.first,
            trimmed=self.trimmed,
            tail=self.tail,
            from_offset=begin,
            to_offset=max(position, begin),
            splits=splits,
            records=records if records_max else max(0, position - max(begin, self.first)),
            bytes=total + size,
            rewound=rewound,
        )

    def _offset(self, start: Any) -> int:
        if start == "earliest":
            return self.first
        if start == "latest":
            return self.tail
        if isinstance(start, AtTime):
            assert isinstance(start.time, int)
            return max(self.first, min(start.time - APPENDED_MS, self.tail))
        assert isinstance(start, Position)
        return start.next

    def opened(self, *, wait: bool = True, timeout_ms: int | None = None) -> None:
        self.opens.append(timeout_ms)
        self.linked = True

    def close(self) -> None:
        self.linked = False


class Clock:
    """A clock that goes on by what is slept."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def read(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
