"""Checks of what a driver's consumer receives.

Owns the comparison of each record with what is due: its size, and its number. Bodies are collected
and compared by thousands with numpy, so that a check costs a client tens of nanoseconds a record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from perf.peers.driver import (
    BURST,
    NUMBER_MASK,
    PRODUCER_SHIFT,
    Clock,
    DriverFailed,
    Numbers,
    Options,
    begin,
    fail,
    rare_places,
    say,
    word,
)


class Check:
    """Checks every record of one connection: size, gaps, duplicates, order.

    `add` takes one body at a time, `burst` many. Order is checked for each producer and subject: a
    peer that delivers subjects by different ways may mix them. `done` once all that is due has
    come; records that did not come are `missing`.
    """

    def __init__(self, options: Options, expected: Numbers | None = None) -> None:
        """expected: numbers of the records that are due, in order; None: all of all producers."""
        self.size = options.size
        self.count = options.count
        self.producers = options.producers
        self.lanes = options.subjects
        """Subjects of a producer, each with an order of its own."""
        self.total = options.count * options.producers
        self.received = self.duplicates = self.misordered = 0
        self.begun_ns = self.ended_ns = 0
        self._expected = expected
        if expected is not None:
            self.total = len(expected)
        # Producer and subject -> the number that is due next.
        self._due = np.tile(np.arange(self.lanes, dtype=np.int64), self.producers)
        self._seen: npt.NDArray[np.bool_] | None = None
        """For each record whether it came; None: all so far came in order."""
        self._waiting: list[bytes] = []
        self._heard = 0

    def add(self, body: bytes) -> bool:
        """Take one body; True when this was the last that is due."""
        waiting = self._waiting
        if not waiting and not self._heard:
            self.begun_ns = time.monotonic_ns()
        waiting.append(body)
        if len(waiting) >= BURST or self._heard + len(waiting) >= self.total:
            self._look()
        return self._heard >= self.total

    def burst(self, bodies: list[bytes]) -> bool:
        """Take many bodies; True when all that is due has come."""
        if not self._heard and not self._waiting:
            self.begun_ns = time.monotonic_ns()
        self._waiting += bodies
        if len(self._waiting) >= BURST or self._heard + len(self._waiting) >= self.total:
            self._look()
        return self._heard >= self.total

    @property
    def done(self) -> bool:
        return self._heard >= self.total

    @property
    def heard(self) -> int:
        """Return how many records came, duplicates included."""
        return self._heard + len(self._waiting)

    @property
    def missing(self) -> int:
        return self.total - self.received

    def close(self) -> None:
        """Check the bodies that still wait."""
        if self._waiting:
            self._look()

    def _look(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        if set(map(len, waiting)) != {self.size}:
            raise DriverFailed(f"records of {set(map(len, waiting))} bytes, {self.size} were sent")
        self._look_at(np.frombuffer(b"".join(waiting), np.uint8).reshape(-1, self.size))

    def block(self, joined: Any, count: int) -> bool:
        """Take so many bodies back to back in one buffer; True when all that is due has come."""
        if not self._heard:
            self.begun_ns = time.monotonic_ns()
        flat = np.frombuffer(joined, np.uint8)
        if len(flat) != count * self.size:
            raise DriverFailed(f"{len(flat)} bytes are not {count} records of {self.size}")
        if len(flat):
            self._look_at(flat.reshape(-1, self.size))
        return self._heard >= self.total

    def _look_at(self, blob: npt.NDArray[np.uint8]) -> None:
        """Check bodies, a row each."""
        self.ended_ns = time.monotonic_ns()
        self._heard += len(blob)
        # The first eight bytes of each body are its number.
        numbers = np.ascontiguousarray(blob[:, :8]).view("<i8").ravel()
        if self._expected is not None:
            self._look_at_selected(numbers)
        elif self.producers == 1 and self.lanes == 1:
            first = int(self._due[0])
            if not np.array_equal(numbers, np.arange(first, first + len(numbers))):
                self._look_closely(numbers)
            else:
                self._mark(numbers)
                self._due[0] = first + len(numbers)
                self.received += len(numbers)
        else:
            self._look_at_lanes(numbers)

    def _look_at_selected(self, numbers: Numbers) -> None:
        assert self._expected is not None
        due = self._expected[self.received : self.received + len(numbers)]
        if not np.array_equal(numbers, due):
            raise DriverFailed("the records selected are not the ones that were asked for")
        self.received += len(numbers)

    def _look_at_lanes(self, numbers: Numbers) -> None:
        """Sort a burst by producer and subject, its order kept; each must go on where it stood."""
        numbers_of, lanes_of = self._split(numbers)
        order = np.argsort(lanes_of, kind="stable")
        lane, number = lanes_of[order], numbers_of[order]
        # Within a lane each number is due `lanes` after the one before; the first one of this burst
        # as self._due says.
        first = np.ones(len(lane), bool)
        first[1:] = lane[1:] != lane[:-1]
        due = np.empty_like(number)
        due[1:] = number[:-1] + self.lanes
        due[first] = self._due[lane[first]]
        if not np.array_equal(number, due):
            self._look_closely(numbers)
            return
        last = np.ones(len(lane), bool)
        last[:-1] = first[1:]
        self._mark(numbers)
        self._due[lane[last]] = number[last] + self.lanes
        self.received += len(numbers)

    def _split(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        producers, inner = numbers >> PRODUCER_SHIFT, numbers & NUMBER_MASK
        if (producers >= self.producers).any() or (inner >= self.count).any():
            raise DriverFailed("records came that nobody sent in this run")
        return inner, producers * self.lanes + inner % self.lanes

    def _mark(self, numbers: Numbers) -> None:
        if self._seen is not None:
            place = (numbers >> PRODUCER_SHIFT) * self.count + (numbers & NUMBER_MASK)
            self._seen[place] = True

    def _look_closely(self, numbers: Numbers) -> None:
        """Count what is wrong, body by body."""
        if self._seen is None:
            # Until now all came in order: of each lane all that was due before.
            self._seen = np.zeros(self.count * self.producers, bool)
            for lane, due in enumerate(self._due.tolist()):
                at = lane // self.lanes * self.count
                self._seen[at + lane % self.lanes : at + due : self.lanes] = True
        inner, lanes = self._split(numbers)
        for number, lane in zip(inner.tolist(), lanes.tolist(), strict=True):
            place = lane // self.lanes * self.count + number
            if self._seen[place]:
                self.duplicates += 1
                continue
            self._seen[place] = True
            self.received += 1
            if number < self._due[lane]:
                self.misordered += 1
            else:
                self._due[lane] = number + self.lanes


def taking(check: Check) -> Callable[[bytes], object]:
    """Return a library's callback that gives each body to the check."""

    def take(body: bytes) -> None:
        try:
            check.add(body)
        except DriverFailed as error:
            fail(error)

    return take


def checks_of(options: Options) -> list[Check]:
    """Return a check for each connection of a subscriber."""
    return [Check(options) for _ in range(options.subscribers)]


def selected(options: Options) -> Numbers | None:
    """Return what a replay expects besides the whole stream."""
    if options.select == "rare":
        return rare_places(options.count, options.rare, options.seed)
    if options.select == "time":
        return np.arange(options.first, options.count, dtype=np.int64)
    if options.select == "whole":
        return None
    raise DriverFailed(f"nothing can be selected by {options.select!r}")


def say_received(checks: Sequence[Check], clock: Clock, **more: Any) -> None:
    """Report the result of subscribe and replay; more: further facts of the client."""
    for check in checks:
        check.close()
    say(
        begun_ns=min((check.begun_ns for check in checks if check.begun_ns), default=0),
        ended_ns=max(check.ended_ns for check in checks),
        received=sum(check.received for check in checks),
        missing=sum(check.missing for check in checks),
        duplicates=sum(check.duplicates for check in checks),
        misordered=sum(check.misordered for check in checks),
        cpu_s=clock.cpu_s(),
        **more,
    )


async def all_done(checks: Sequence[Check], idle_s: float) -> None:
    """Return when every check is done, or when no record came for so long after one did."""
    heard, since = 0, time.monotonic()
    while not all(check.done for check in checks):
        await asyncio.sleep(0.02)
        now = sum(check.heard for check in checks)
        if now != heard or not now:
            heard, since = now, time.monotonic()
        elif time.monotonic() - since > idle_s:
            return


async def take_all(checks: Sequence[Check], options: Options, client: str) -> None:
    """Begin; then let a library's callbacks take all records that are due, and report them."""
    clock = await begin(client)
    await all_done(checks, options.idle_s)
    say_received(checks, clock)
    await word()


# --- latency --------------------------------------------------------------------------------
