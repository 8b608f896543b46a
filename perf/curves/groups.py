"""The cost of a record against the number of members of a group, in the core alone.

A publisher and the members of one group, who acknowledge each delivery as it comes: publish,
hand-out and acknowledgement together, processor time of the core. The same for as many subscribers
that each get every record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from malamute_protocol import commands as wire
from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.stamp import rows_from_bitmap
from malamute_py.broker.ready import Send
from perf.curves.apart import apart
from perf.curves.bare import BareBroker, Clock
from perf.curves.curve import Curve, Gathering, Plan, Say

RECORDS = 1_000
KEYS = 64
ROUNDS = 60
LONE_ROUNDS = 600
WARM_UP = 10
CREDIT = 1 << 60
PUBLISHER = 1 << 40
KINDS = ("shared", "keyed", "exclusive", "subscribers")


class Members:
    """Links of the members, which answer their deliveries."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind = kind
        self.bare = BareBroker(group_members_max=count)
        self.records = 0
        self._delivered: list[tuple[int, wire.Deliver, Any]] = []
        self._tracker = 1 << 20
        self.bare.hello(PUBLISHER)
        for link in range(1, count + 1):
            self.bare.hello(link)
            if kind == "subscribers":
                command: Any = wire.Subscribe(1, "s", ["all"], [1], CREDIT, CREDIT)
            else:
                command = wire.JoinGroup(1, "s", "g", ["all"], kind, [0], CREDIT, CREDIT)
            self.bare.say(link, command)
        self.bare.on_send = self._sent

    def _sent(self, send: Send) -> None:
        place = 0
        for command in send.commands:
            if isinstance(command, wire.Deliver):
                frames = send.frames[place : place + command.frames]
                self._delivered.append((send.link, command, frames))
            place += command.content_frames

    def answers(self) -> list[tuple[int, wire.AckRecords]]:
        """Return the answers of the members to their deliveries: a client's work, not measured."""
        answers = []
        for link, command, frames in self._delivered:
            ranges = ranges_of(command, frames)
            self.records += sum(end - first for first, end in ranges)
            self._tracker += 1
            answers.append((link, wire.AckRecords(1, ranges, self._tracker)))
        self._delivered.clear()
        return answers

    def round(self, content: bytes, records: int, number: int) -> float:
        """Publish, hand out and acknowledge one batch; returns the core's seconds."""
        with Clock() as publishing:
            self.bare.publish(PUBLISHER, "s", [content], number + 1)
        if self.kind == "subscribers":
            self.records += records
            self._delivered.clear()
            return publishing.seconds
        answers = self.answers()
        with Clock() as acknowledging:
            for link, answer in answers:
                self.bare.core.receive(link, "", [answer], [], self.bare.now_ms)
            self.bare.settle()
        return publishing.seconds + acknowledging.seconds


def ranges_of(command: wire.Deliver, frames: Any) -> list[tuple[int, int]]:
    """Return the offsets of a delivery, as runs."""
    if command.rows is not None:
        rows = np.flatnonzero(rows_from_bitmap(command.rows, command.next - command.from_))
    else:
        deltas = Content(frames[1]).offset_deltas
        if deltas is None:
            return [(command.from_, command.next)]
        rows = deltas.astype(np.int64)
    edges = np.flatnonzero(np.diff(rows) != 1) + 1
    firsts = rows[np.concatenate(([0], edges))] + command.from_
    ends = rows[np.concatenate((edges - 1, [len(rows) - 1]))] + command.from_ + 1
    return list(zip(firsts.tolist(), ends.tolist(), strict=True))


def in_core(kind: str, count: int, records: int, runs: int) -> list[float]:
    """Return microseconds for a record with so many members, one a run; records: in a batch."""
    members = Members(kind, count)
    content = encode(
        [bytes(140)] * records, subject_table=[f"orders.{n}" for n in range(min(KEYS, records))],
        subject_codes=[n % KEYS for n in range(records)],
    )  # fmt: skip
    rounds = ROUNDS if records > 1 else LONE_ROUNDS
    for number in range(WARM_UP):
        members.round(content, records, number)
    found = []
    for run in range(runs):
        first = WARM_UP + run * rounds
        numbers = range(first, first + rounds)
        seconds = sum(members.round(content, records, number) for number in numbers)
        found.append(seconds / rounds / records * 1e6)
    done = members.records
    assert done == records * (WARM_UP + runs * rounds), "each record once to the group"
    return found


def measure(points: Sequence[int], runs: int, say: Say) -> Curve:
    """Measure the curve."""
    gathered = Gathering()
    for count in points:
        say(f"{count:,} members, the core alone")
        for kind in KINDS:
            found = apart(in_core, kind, count, RECORDS, runs)
            name = f"{kind} group" if kind != "subscribers" else "as many subscribers"
            gathered.add(f"{name}, in-core, CPU a record", "us", count, found)
            if kind in ("shared", "keyed"):
                found = apart(in_core, kind, count, 1, runs)
                gathered.add(f"{name}, in-core, CPU a lone record", "us", count, found)
    return Curve(
        PLAN.name, PLAN.title, PLAN.axis, gathered.lines(),
        "flat for an exclusive group and a lone record; the others cut each batch into as many"
        " parts as there are members to be given some of it, from a shared group's 32 on as many"
        " as pays when members are as quick as these, and those who get everything each cost a"
        " delivery",
        f"batches of {RECORDS:,} records with {KEYS} subjects; publish, hand-out and"
        " acknowledgement together; members answer within the same millisecond",
    )  # fmt: skip


PLAN = Plan(
    "groups", "Cost of a record against members of a group", "members",
    (1, 10, 100, 1_000), (1, 10), measure,
)  # fmt: skip
