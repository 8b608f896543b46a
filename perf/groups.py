"""What sharing a stream costs the broker core by itself: no sockets, no disk, one process.

    python -m perf.groups [--seconds 1] [--json]

A publisher and the members of one group, who acknowledge each delivery as it comes, all
through receive() and take_ready(). Prints microseconds of processor time for each record and
each batch, publish, hand-out and acknowledgement together, beside the same publishes with as
many subscribers of their own and with nobody.
"""

from __future__ import annotations

import argparse
import json
from time import process_time
from typing import Any

import numpy as np

from malamute_protocol import commands as wire
from malamute_protocol.content import Content
from malamute_protocol.encode import encode, encode_fixed
from malamute_protocol.stamp import Stamp, rows_from_bitmap
from malamute_py.broker import Appended
from perf.core import NOW_MS, Bench

WARM_UP = 50
KINDS = ("shared", "exclusive", "keyed")


class GroupBench(Bench):
    """A core, a journal that is an end that moves, and members that answer what they get."""

    def __init__(self, confirmed: bool) -> None:
        super().__init__()
        self.confirmed = confirmed
        self.delivered: list[tuple[int, Any, Any]] = []
        self.tracker = 1 << 20
        self.base = 0
        self.records = 0

    def step(self) -> None:
        broker = self.broker
        while ready := broker.take_ready():
            for bundle in ready.appends:
                stamps = []
                for batch in bundle.batches:
                    self.end += 96 + len(batch.content)
                    stamps.append(
                        Stamp(
                            1, 0, 0, 0, 1, batch.base_offset, NOW_MS, batch.stream, 0,
                            96 + len(batch.content), batch.count, 0, 0,
                        ).pack()
                    )  # fmt: skip
                broker.appended(Appended(bundle.token, tuple(stamps), self.end))
            for send in ready.sends:
                place = 0
                for command in send.commands:
                    if isinstance(command, wire.Deliver):
                        frames = send.frames[place : place + command.frames]
                        self.delivered.append((send.link, command, frames))
                    place += command.content_frames
            if ready.appends:
                broker.synced("main", self.end, NOW_MS)

    def acknowledgements(self) -> list[tuple[int, wire.AckRecords]]:
        """What each member says of what it was delivered: a client's work, not measured."""
        acks = []
        for link, command, frames in self.delivered:
            ranges = ranges_of(command, frames)
            self.records += sum(end - first for first, end in ranges)
            self.tracker += 1
            acks.append((link, wire.AckRecords(1, ranges, self.tracker if self.confirmed else 0)))
        return acks


def ranges_of(command: wire.Deliver, frames: Any) -> list[tuple[int, int]]:
    """The offsets of a delivery, as runs."""
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


def scenario(
    seconds: float, *, kind: str, members: int, records: int, width: int = 100, keys: int = 64,
    bundled: int = 1, confirmed: bool = True,
) -> dict[str, Any]:  # fmt: skip
    bench = GroupBench(confirmed)
    bench.hello(1)
    for n in range(members):
        bench.hello(2 + n)
        if kind == "subscriptions":
            command: Any = wire.Subscribe(1, "s", ["all"], [1], 1 << 60, 1 << 60)
        else:
            command = wire.JoinGroup(1, "s", "g", ["all"], kind, [0], 1 << 60, 1 << 60)
        bench.broker.receive(2 + n, "", [command], [], NOW_MS)
        bench.step()
    if keys == 1:
        content = encode_fixed(bytes(records * width), width, subject="orders.eu.new")
    else:
        content = encode(
            [bytes(width)] * records, subject_table=[f"orders.{n}" for n in range(keys)],
            subject_codes=[n % keys for n in range(records)],
        )  # fmt: skip
    contents = [content] * bundled
    spent = 0.0
    rounds = 0
    while spent < seconds or rounds < 2 * WARM_UP:
        before = process_time()
        bench.publish(contents, 1 + rounds * bundled)
        elapsed = process_time() - before
        acks = bench.acknowledgements() if kind in KINDS else []
        bench.delivered.clear()
        before = process_time()
        for link, ack in acks:
            bench.broker.receive(link, "", [ack], [], NOW_MS)
        bench.step()
        elapsed += process_time() - before
        rounds += 1
        if rounds > WARM_UP:
            spent += elapsed
    batches = (rounds - WARM_UP) * bundled
    if kind in KINDS:
        assert bench.records == rounds * bundled * records, "each record once to the group"
    return {
        "kind": kind,
        "members": members,
        "records": records,
        "keys": keys,
        "a_message": bundled,
        "confirmed": confirmed,
        "us_per_batch": round(spent / batches * 1e6, 1),
        "us_per_record": round(spent / batches / records * 1e6, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="a scenario")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for kind, members in (("nobody", 0), ("subscriptions", 3), ("exclusive", 3), ("shared", 3)):
        rows.append(scenario(options.seconds, kind=kind, members=members, records=1_000, keys=1))
    for more in (
        {"bundled": 10},
        {"confirmed": False},
        {"members": 30},
        {"keys": 64},
        {"kind": "keyed", "keys": 64},
        {"kind": "keyed", "keys": 64, "bundled": 10},
        {"kind": "keyed", "keys": 1_000},
        {"records": 1, "bundled": 100},
    ):
        about: dict[str, Any] = {"kind": "shared", "members": 3, "records": 1_000, "keys": 1}
        rows.append(scenario(options.seconds, **(about | more)))
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    names = list(rows[0])
    print("  ".join(f"{name:>13}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]!s:>13}" for name in names))


if __name__ == "__main__":
    main()
