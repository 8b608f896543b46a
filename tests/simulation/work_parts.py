"""Parts of the acts of a scripted client: contents of new records, and parts of steps.

Owns how a record, a message, a request and a move of a cursor are drawn. The rule: each record has
a serial of its own, by which the model knows it. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

from malamute_protocol import commands as c
from tests.simulation.acts import Wish
from tests.simulation.records import Sent, encode
from tests.simulation.work_roles import Roles

SUBJECTS = ("a", "a.b", "b", "c.d")


class Parts:
    """The parts that one client makes."""

    def __init__(self, world: Any, roles: Roles, level: int) -> None:
        self.world = world
        self.rng = world.rng
        self.model = world.model
        self.roles = roles
        self.level = level
        self.queued: list[tuple[str, bytes]] = []
        """Service and key of requests that may be cancelled."""

    def _record(self, place: str) -> Sent:
        rng = self.rng
        serial = self.world.serial_of()
        expiry = 0
        if rng.random() < 0.1:
            expiry = self.world.now_ms() + rng.choice((1, 200, 1_000_000))
        sent = Sent(
            serial, 0, place, rng.choice(SUBJECTS), None, expiry, rng.choice((8, 60, 400, 3000))
        )
        self.world.records[serial] = sent
        self.model.subjects[serial] = sent.subject
        if expiry:
            self.model.expiring.add(serial)
        return sent

    def content(self, place: str, rows: int = 0) -> tuple[bytes, tuple[int, ...]]:
        records = [self._record(place) for _ in range(rows or self.rng.choice((1, 1, 2, 5)))]
        return encode(records), tuple(record.serial for record in records)

    def mail(self, mailbox: str) -> tuple[tuple[int, int], Wish, bytes]:
        frame, serials = self.content(mailbox)
        at_ms = 0
        if self.rng.random() < 0.15:
            at_ms = self.world.now_ms() + self.rng.choice((1, 50, 400))
        priority = self.rng.choice((0, 0, 0, 5, -5))
        return (at_ms, priority), Wish("send", mailbox, serials), frame

    def request(self, service: str, key: bytes) -> tuple[c.Command, Wish, bytes]:
        frame, serials = self.content(service)
        if key:
            self.queued.append((service, key))
        timeout_ms = self.rng.choice((0, 0, 0, 30, 400))
        # Apart from the other choices, so that a seed is what it was before there were these.
        apart = Random(f"delay {serials} {self.world.seed}")
        delay_ms, priority = apart.choice((0, 0, 0, 0, 20, 300)), apart.choice((0, 0, 0, 1, 9))
        command = c.Request(
            service, 0, "", timeout_ms, self.level, key, delay_ms=delay_ms, priority=priority
        )
        return command, Wish("request", service, serials), frame

    def move(self) -> tuple[c.Command, Wish]:
        place = self.rng.choice(self.roles.cursors)
        stream, _, cursor = place.partition("/")
        at = self.model.place_of(place)
        tail = self.model.state.tails.get(at[0], 0)
        here = self.model.state.cursors.get(at, 0)
        force = self.rng.random() < 0.15
        next = self.rng.randint(0 if force else min(here, tail), tail)
        from_ = -1
        if self.rng.random() < 0.5 and at in self.model.state.cursors:
            # As it is, or as it was a while ago.
            from_ = here if self.rng.random() < 0.7 else self.rng.randint(0, here)
        command = c.MoveCursor(stream, cursor, next, 0, self.level, force, b"", 0, from_)
        return command, Wish("move", place, (), (next,), since=-1 if force else from_)


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as half-open intervals."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = ranges[-1][0], number + 1
        else:
            ranges.append((number, number + 1))
    return ranges
