"""Members come, go, die and acknowledge in any order: each record goes once to the group.

The oracle is a list of what was published and a set of what was acknowledged and confirmed. A
record may come again only when the delivery before it was cut off: its member left or died, it was
wanted again, or the broker was restarted before the acknowledgement was confirmed.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_py.matcher import matches
from tests.broker.shell import Shell

pytestmark = pytest.mark.slow

KEYS = ["a.x", "a.y", "b.x", "c", "d", "e"]
MEMBER = 1
HOLD_MS = 700


class Held:
    """One delivery of one record to one member."""

    def __init__(self, link: int) -> None:
        self.link = link
        self.tracker = 0
        """Tracker of the acknowledgement that is under way; 0: none."""


class World:
    """A publisher on link 1, one group of a stream, members on links of their own."""

    members_most = 4

    def __init__(
        self, seed: int, kind: str, own_ring: bool, power: bool, share_bytes: int = 1 << 40
    ) -> None:
        """share_bytes: bytes that a link may have in flight."""
        self.dice = random.Random(seed)
        self.kind = kind
        self.power = power
        self.pattern: Any = self.dice.choice([["all"], ["not", ["topic", "c"]], ["prefix", "a."]])
        self.shell = Shell(
            sync=not power, read=self.dice.random() < 0.5, hot_bytes=30_000,
            quantum_bytes=self.dice.choice([500, 4_000]), step_bytes=20_000, reads_max=1,
            group_window_records=self.dice.choice([50, 5_000]), extract_bytes_min=600,
            heartbeat_ms=60_000, group_flush_ms=200, share_min_bytes=share_bytes,
            share_max_bytes=share_bytes,
        )  # fmt: skip
        self.published: list[str] = []
        self.expiring: set[int] = set()
        self.first = 0
        self.holders: dict[int, Held] = {}
        """The member that holds each offset."""
        self.done: set[int] = set()
        """Offsets that are acknowledged and confirmed."""
        self.unsure: set[int] = set()
        """Offsets that are acknowledged and not confirmed: only a restart may bring them again."""
        self.maybe: set[int] = set()
        """Offsets that were so before an earlier restart: they may come again."""
        self.members: dict[int, dict[str, Any]] = {}
        self.links = 10
        self.trackers = 0
        self.acks: dict[tuple[int, int], list[int]] = {}
        """Offsets of each acknowledgement, by (link, tracker)."""
        self.last: dict[tuple[int, str], int] = {}
        """For each (link, key) of a keyed group the newest offset that the member was given."""
        self.shell.hello(1)
        settings: dict[str, Any] = {"ring_bytes": 1 << 20} if own_ring else {}
        self.shell.send(1, wire.CreateStream(1, "s", settings))
        self.sync()

    # --- what happens ------------------------------------------------------------------------

    def publish(self) -> None:
        count = self.dice.choice([1, 3, 40, 120])
        subjects = self.dice.choices(KEYS, k=count)
        filler = bytes(self.dice.choice([1, 30]))
        first = len(self.published)
        self.published += subjects
        bodies = [b"%d " % (first + n) + filler for n in range(count)]
        self.shell.publish(1, "s", bodies, subject=subjects)
        self.look()

    def join(self) -> None:
        if len(self.members) >= self.members_most:
            return
        self.links += 1
        link = self.links
        self.shell.hello(link)
        credit = self.dice.choice([0, 5, 1_000])
        self.members[link] = {"seen": 0, "credit": credit, "told": 0}
        self.shell.send(
            link,
            wire.JoinGroup(
                MEMBER, "s", "g", self.pattern, self.kind, [0], credit, 1 << 40, HOLD_MS
            ),
        )  # fmt: skip
        self.look()

    def credit(self) -> None:
        for link, member in self.members.items():
            if self.dice.random() < 0.6:
                member["credit"] += self.dice.choice([1, 20, 500])
                self.shell.send(link, wire.Credit(MEMBER, member["credit"], 1 << 40))
        self.look()

    def leave(self) -> None:
        if not self.members:
            return
        link = self.dice.choice(list(self.members))
        self.look()
        how = self.dice.choice(["unsubscribe", "bye", "lost", "lost"])
        member = self.members.pop(link)
        self.pick_up(link, member)
        if how == "unsubscribe":
            self.shell.send(link, wire.Unsubscribe(MEMBER))
        elif how == "bye":
            self.shell.send(link, wire.Bye())
        else:
            self.shell.broker.link_lost(link, self.shell.now_ms)
            self.shell.run()
        self.drop(link)
        self.look()

    def drop(self, link: int) -> None:
        """Free what a member held; its acknowledgements may have counted or not."""
        for offset, held in list(self.holders.items()):
            if held.link == link:
                if held.tracker:
                    self.unsure.add(offset)
                del self.holders[offset]

    def acknowledge(self) -> None:
        if not self.members:
            return
        link = self.dice.choice(list(self.members))
        mine = sorted(
            offset
            for offset, held in self.holders.items()
            if held.link == link and not held.tracker
        )
        if not mine:
            return
        chosen = self.dice.choice(
            [mine, mine[:1], mine[-1:], self.dice.sample(mine, (len(mine) + 1) // 2)]
        )
        chosen = sorted(chosen)
        again = self.dice.choice([-1, -1, -1, -1, 0, 300])
        confirmed = self.dice.random() < 0.7
        self.trackers += 1
        tracker = self.trackers
        for offset in chosen:
            if again >= 0:
                del self.holders[offset]
            elif confirmed:
                self.holders[offset].tracker = tracker
            else:
                del self.holders[offset]
                self.unsure.add(offset)
        if again < 0 and confirmed:
            self.acks[link, tracker] = chosen
        if again >= 0:
            # Order is not kept for a member that wants records again.
            self.last.clear()
        ranges = [(offset, offset + 1) for offset in chosen]
        if len(chosen) == chosen[-1] - chosen[0] + 1:
            ranges = [(chosen[0], chosen[-1] + 1)]
        self.shell.send(
            link, wire.AckRecords(MEMBER, ranges, tracker if confirmed else 0, again_ms=again)
        )
        refused = self.shell.peers[link].of(wire.Refused)
        assert not any(one.reference == tracker for one in refused)
        self.look()

    def refuse(self) -> None:
        """Acknowledge in vain: the journal does not take the change."""
        held = [offset for offset, held in self.holders.items() if not held.tracker]
        if not held:
            return
        link = self.holders[self.dice.choice(held)].link
        mine = sorted(
            offset for offset in held if self.holders[offset].link == link
        )[: self.dice.randint(1, 9)]  # fmt: skip
        self.shell.refuse["main"] = ("disk_full", "no space")
        self.trackers += 1
        ranges = [(offset, offset + 1) for offset in mine]
        peer = self.shell.send(link, wire.AckRecords(MEMBER, ranges, self.trackers))
        self.shell.refuse.clear()
        refused = peer.last(wire.Refused)
        assert (refused.command, refused.reference) == (64, self.trackers)
        self.look()

    def wait(self) -> None:
        self.shell.wait(self.dice.choice([10, 250, 1_000]))
        self.look()

    def has_read(self) -> None:
        """Let members show that they have read: no PING asks them, and their links have room."""

    def sync(self) -> None:
        self.shell.sync()
        self.shell.run()
        # A durable group hands out records that have become visible.
        self.look()

    def read(self) -> None:
        self.shell.answer_reads()
        self.shell.run()
        self.look()

    def evict(self) -> None:
        self.shell.evict()

    def trim(self) -> None:
        stream = self.shell.stream("s")
        bases = [
            one.base for one in self.shell.rings.get(stream.ring.name, [])
            if one.stamp.stream == stream.number and stream.first < one.base <= stream.next
        ]  # fmt: skip
        if not bases:
            return
        self.first = self.dice.choice(bases[: len(bases) // 2 + 1])
        self.shell.firsts[stream.number] = self.first
        self.shell.broker.trimmed(stream.ring.name, {stream.number: self.first})
        self.shell.run()
        self.look()

    def restart(self) -> None:
        self.look()
        if self.power:
            # A power loss takes back trims as well.
            synced = self.shell.synced_to
            kept = [
                one.next for ring, held in self.shell.rings.items() for one in held
                if one.stamp.stream == 1 and one.end_lsn <= synced.get(ring, 0)
            ]  # fmt: skip
            self.first = min(self.first, max(kept, default=0))
            self.shell.firsts[1] = self.first
        self.shell.restart(power_loss=self.power)
        for link in list(self.members):
            self.drop(link)
        self.members.clear()
        self.acks.clear()
        self.last.clear()
        tail = self.shell.stream("s").next
        del self.published[tail:]
        self.done = {offset for offset in self.done if offset < tail}
        self.maybe = {offset for offset in self.maybe | self.unsure if offset < tail}
        self.unsure.clear()
        self.shell.hello(1)

    # --- what must hold ---------------------------------------------------------------------------

    def look(self) -> None:
        """Take up the commands that members were sent."""
        for link, member in self.members.items():
            self.pick_up(link, member)

    def pick_up(self, link: int, member: dict[str, Any]) -> None:
        peer = self.shell.peers[link]
        received = peer.received.get(MEMBER, [])
        for command in peer.commands[member["told"] :]:
            if isinstance(command, wire.Confirm):
                for offset in self.acks.pop((link, command.tracker), ()):
                    self.done.add(offset)
                    self.unsure.discard(offset)
                    del self.holders[offset]
        member["told"] = len(peer.commands)
        assert len(received) <= member["credit"], "records are exact"
        for offset, body in received[member["seen"] :]:
            assert body.startswith(b"%d " % offset)
            self.given(link, offset)
        member["seen"] = len(received)

    def given(self, link: int, offset: int) -> None:
        key = self.published[offset]
        assert matches(self.pattern, (key,), ()), "it was not selected"
        assert offset not in self.done, "it was acknowledged and confirmed"
        assert offset not in self.unsure, "it was acknowledged, and nothing was restarted"
        assert offset not in self.holders, "somebody holds it"
        self.holders[offset] = Held(link)
        if self.kind == "exclusive":
            assert {held.link for held in self.holders.values()} == {link}
        if self.kind == "keyed":
            others = {
                held.link for other, held in self.holders.items()
                if self.published[other] == key and not held.tracker
            }  # fmt: skip
            assert others == {link}, "a key is in one place"
            assert self.last.get((link, key), -1) < offset, "a key is in order"
            self.last[link, key] = offset

    def settle(self) -> None:
        """Let the run go on until all records have come and nothing moves."""
        self.sync()
        self.shell.auto_read = self.shell.auto_sync = True
        self.read()
        if not self.members:
            self.join()
        for _ in range(400):
            self.shell.wait(800)
            self.has_read()
            self.look()
            for link, member in self.members.items():
                member["credit"] += 1_000
                self.shell.send(link, wire.Credit(MEMBER, member["credit"], 1 << 40))
            self.look()
            for link in self.members:
                mine = sorted(
                    offset for offset, held in self.holders.items()
                    if held.link == link and not held.tracker
                )  # fmt: skip
                if mine:
                    self.trackers += 1
                    self.acks[link, self.trackers] = mine
                    for offset in mine:
                        self.holders[offset].tracker = self.trackers
                    ranges = [(offset, offset + 1) for offset in mine]
                    self.shell.send(link, wire.AckRecords(MEMBER, ranges, self.trackers))
            self.look()
            group = self.facts()
            if group["next"] == group["tail"] and not self.holders:
                break
        self.shell.wait(1_000)
        self.look()

    def facts(self) -> Any:
        facts = self.shell.send(1, wire.GroupInfo(9, "s", "g")).last(wire.Result).value
        # Link 1 reads its answers, for which it has little room where links have a small share.
        self.shell.send(1, wire.Pong(self.shell.broker._links.table[1].probe))
        return facts

    def check(self) -> None:
        facts = self.facts()
        assert facts["next"] == facts["tail"] == facts["logged"] == len(self.published)
        assert facts["held"] == facts["waiting"] == facts["late"] == facts["lag"] == 0
        wanted = {
            offset for offset, key in enumerate(self.published)
            if matches(self.pattern, (key,), ()) and offset >= self.first
        }  # fmt: skip
        missing = wanted - self.done - self.unsure - self.maybe
        assert not missing, "every record is processed"
        assert self.shell.broker.gauges["group_reads_under_way"] == 0


@pytest.mark.parametrize("kind", ["shared", "exclusive", "keyed"])
@pytest.mark.parametrize("seed", range(10))
def test_every_record_goes_once_to_the_group(seed: int, kind: str) -> None:
    power = seed % 2 == 1
    world = World(seed, kind, own_ring=seed % 4 == 3, power=power)
    world.join()
    world.publish()
    for _ in range(150):
        what = world.dice.choice(
            ["publish"] * 3 + ["join"] * 2 + ["leave", "credit", "credit", "wait", "evict", "read"]
            + ["acknowledge"] * 5 + ["sync"] * 2
        )  # fmt: skip
        if world.dice.random() < 0.05:
            what = world.dice.choice(["restart", "trim", "refuse", "refuse"])
        getattr(world, what)()
    world.settle()
    world.check()
