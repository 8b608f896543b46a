"""Whatever is said of cursors and groups, in whatever order: nothing raises or is left over."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.broker.subscriptions.audience import audience_of
from tests.broker.shell import Shell

pytestmark = pytest.mark.slow

EDGES = [0, 1, 2, 3, 7, 50, 4_096, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
STREAMS = ["s", "s", "s", "s", "own", "own", "ram", "ram", "new", ""]
NAMES = ["g", "g", "g", "h", "h", "h", "i", "i", "i", "g*", "", "bad name"]
PATTERNS: list[Any] = [["all"], ["topic", "a.*"], ["not", ["topic", "b"]], ["regex", "("], ["x"]]
STARTS: list[Any] = [
    [], [0], [1], [2, 3], [2, 2**64 - 1], [3, 1], [6], [7, "g"], [7, "g", [0]], [7, "h", [6]], [9],
    ["x"],
]  # fmt: skip
SETTINGS: list[Any] = [
    {}, {"pin": True}, {"pin": True, "pin_bytes_max": 3_000}, {"pin": False}, {"pin": 5}, {"x": 1},
]  # fmt: skip


class Chaos:
    """Three links that say whatever comes to mind."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.shell = Shell(
            hot_bytes=5_000, quantum_bytes=700, group_flush_ms=50, group_window_records=300,
            read=self.dice.random() < 0.5, sync=self.dice.random() < 0.5, expiry_beats=1_000,
        )  # fmt: skip
        self.numbers = 1
        self.links: list[int] = []
        self.shell.hello(1)
        for name, settings in (
            ("s", {}),
            ("own", {"ring_bytes": 1 << 20}),
            ("ram", {"memory": True}),
        ):
            self.shell.send(1, wire.CreateStream(1, name, settings))

    def any(self, choices: list[Any]) -> Any:
        return self.dice.choice(choices)

    def ranges(self, link: int, number: int) -> list[tuple[int, int]]:
        """Offsets that the member was given, as a rule; or any."""
        any = self.any
        given = sorted({offset for offset, _ in self.shell.peers[link].received.get(number, [])})
        if given and self.dice.random() < 0.8:
            some = given[self.dice.randrange(len(given)) :][: any([1, 3, 30, 500])]
            return [(offset, offset + 1) for offset in some]
        if self.dice.random() < 0.1:
            return [(2**64 - 100 + n, 2**64 - 99 + n) for n in range(0, 50, 2)]
        ranges = []
        behind = self.dice.randrange(60)
        for _ in range(any([1, 1, 2, 20])):
            first = behind + any([0, 1, 2, 9])
            behind = first + any([1, 1, 2, 30])
            ranges.append((first, behind))
        return ranges

    def join(self, number: int, stream: str, name: str) -> wire.Command:
        any = self.any
        kind = {"g": "shared", "h": "keyed", "i": "exclusive"}.get(name, "x")
        pattern, start = any(PATTERNS[:1] * 9 + PATTERNS), any(STARTS[1:4] * 9 + STARTS)
        credit = any([5, 50, 2**40, *EDGES[:3]])
        return wire.JoinGroup(
            number, stream, name, pattern, kind, start, credit, any([2**40] * 9 + EDGES),
            any([0, 90, 10**7]), any([-1, -1, 0, 1]),
            any([None, (any(EDGES), any([0, 1, 2, 7, 2**63]), any([b"", bytes(16), b"x"]))]),
        )  # fmt: skip

    def move(self, stream: str, name: str) -> wire.Command:
        any = self.any
        return wire.MoveCursor(
            stream, name, any([5, 20, 60, *EDGES]), any([0, 4]), any([0, 0, 2, 3, 9]),
            any([True, False, False]), any([b""] * 9 + [b"x"]), any([0] * 9 + [1, 2, 2**63]),
            any([-1] * 9 + EDGES),
        )  # fmt: skip

    def command(self, link: int) -> wire.Command:
        any = self.any
        number, stream, name = any([1, 2, 3]), any(STREAMS), any(NAMES)
        page = any(["", "s/g"]), any([1, 9, -1])
        rare: list[wire.Command] = [
            wire.Unsubscribe(number), wire.GroupInfo(1, stream, name, *page),
            wire.RemoveGroup(1, stream, name), wire.CursorInfo(1, stream, name, *page),
            wire.EditCursor(1, stream, name, any(SETTINGS), any(STARTS)),
            wire.RemoveCursor(1, stream, name),
        ]  # fmt: skip
        ack = wire.AckRecords(
            number, self.ranges(link, number), any([0, 4]), any([0] * 9 + [1, 2, 3, 9]),
            any([-1, -1, -1, 0, 70]),
        )  # fmt: skip
        credit = wire.Credit(number, any([60, 300, *EDGES]), any([2**40, *EDGES]))
        join, move = self.join(number, stream, name), self.move(stream, name)
        chosen: wire.Command = any([join, join, ack, ack, ack, ack, move, credit, any(rare)])
        return chosen

    def say(self) -> None:
        if len(self.links) < 3:
            self.numbers += 1
            self.links.append(self.numbers)
            self.shell.hello(self.numbers, session=bytes([self.dice.randrange(30)]) * 16)
            joins = [
                self.join(number, self.any(STREAMS[:8]), self.any(NAMES[:9])) for number in (1, 2)
            ]
            self.shell.send(self.numbers, *joins)
        link = self.any(self.links)
        commands = [self.command(link) for _ in range(self.any([1, 1, 3]))]
        if self.dice.random() < 0.15:
            parts = [
                msgspec.structs.replace(one, tracker=0)
                for one in commands
                if isinstance(one, wire.AckRecords | wire.MoveCursor)
            ]
            if parts:
                commands = [wire.Atomic(8, len(parts)), *parts]
        self.shell.send(link, *commands)

    def publish(self) -> None:
        subjects = self.dice.choices(["a.1", "a.2", "b", "c.d"], k=self.any([1, 5, 70]))
        options: dict[str, Any] = {}
        if self.dice.random() < 0.2:
            options["expires_at_ms"] = self.shell.now_ms + 100
        content = encode([b"body"] * len(subjects), subject=subjects, **options)
        self.shell.send(1, wire.Publish(self.any(STREAMS[:9]), 3, 2), frames=[content])

    def happen(self) -> None:
        shell = self.shell
        match self.any(
            ["say"] * 12
            + ["publish"] * 4
            + ["wait", "end", "read", "sync", "evict", "trim"]
            + ["rare"]
        ):
            case "say":
                self.say()
            case "publish":
                self.publish()
            case "wait":
                shell.wait(self.any([10, 60, 500, 11_000]))
            case "end" if self.links:
                link = self.links.pop(self.dice.randrange(len(self.links)))
                if self.dice.random() < 0.5:
                    shell.broker.link_lost(link, shell.now_ms)
                    shell.run()
                else:
                    shell.send(link, wire.Bye())
            case "read":
                shell.answer_reads()
                shell.run()
            case "sync":
                shell.sync()
                shell.run()
            case "evict":
                shell.evict()
            case "trim":
                stream = shell.broker._catalogue.get("s")
                if stream is not None and stream.next > stream.first:
                    first = self.dice.randrange(stream.first, stream.next) + 1
                    shell.firsts[stream.number] = first
                    shell.broker.trimmed(stream.ring.name, {stream.number: first})
                    shell.run()
            case "rare":
                self.rare()
        self.links = [link for link in self.links if not shell.peers[link].closed]

    def rare(self) -> None:
        shell = self.shell
        what = self.dice.random()
        if what < 0.3:
            shell.send(1, wire.RemoveStream(1, self.any(STREAMS)))
        elif what < 0.6:
            shell.refuse["main"] = ("disk_full", "no space")
            self.say()
            self.say()
            shell.refuse.clear()
        else:
            shell.restart(power_loss=what > 0.8)
            self.links.clear()
            shell.hello(1)

    def end(self) -> None:
        shell = self.shell
        for link in self.links:
            shell.broker.link_lost(link, shell.now_ms)
        shell.auto_read = shell.auto_sync = True
        shell.answer_reads()
        shell.run()
        shell.wait(700_000)
        gauges = shell.broker.gauges
        assert gauges["group_members"] == gauges["group_reads_under_way"] == 0
        assert gauges["group_records_held"] == gauges["unsettled_bytes"] == 0
        assert not shell.broker._groups._groups.coming
        assert not shell.broker._cursors._cursors.coming
        for group in shell.broker._groups._groups:
            assert not any(audience_of(group.stream).wakers)
            assert group.absent_holder is group.holder is None
            holdings = group.holdings
            assert holdings.open == holdings.waiting
            assert holdings.open == sum(page.open.bit_count() for page in holdings.pages)
            assert holdings.waiting == sum(page.waiting.bit_count() for page in holdings.pages)
            assert group.stream.first <= holdings.low
            assert group.row.next <= holdings.low or group.stream.ring.failed
            if group.slots is not None:
                assert int(group.slots.waiting.sum()) == holdings.waiting
                assert not group.slots.held.any()


@pytest.mark.parametrize("seed", range(25))
def test_nothing_that_is_said_of_cursors_and_groups_disturbs_the_broker(seed: int) -> None:
    chaos = Chaos(seed)
    for _ in range(250):
        chaos.happen()
    chaos.end()
