"""Records come back in any way, over restarts too: each is done once, or is a dead letter once.

The oracle counts the attempts of each record that have ended: its member wanted it again, or its
link was lost. A delivery says one more than those; a record with as many as the group allows is
never delivered again, and lies in the mailbox once. Of an exclusive group an attempt ends with the
hold window, which a restart may cut off: its attempts are not compared.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_py.matcher import matches
from tests.broker.groups.test_random_group import HOLD_MS, MEMBER, World

pytestmark = pytest.mark.slow

ATTEMPTS_MAX = 2


class Mortal(World):
    """The world of a group whose records have a bound of attempts."""

    def __init__(self, seed: int, kind: str) -> None:
        super().__init__(seed, kind, own_ring=False, power=False)
        self.ended: Counter[int] = Counter()

    def join(self) -> None:
        if len(self.members) >= self.members_most:
            return
        self.links += 1
        link = self.links
        self.shell.hello(link)
        credit = self.dice.choice([0, 5, 1_000])
        self.members[link] = {"seen": 0, "credit": credit, "told": 0}
        join = wire.JoinGroup(
            MEMBER, "s", "g", self.pattern, self.kind, [0], credit, 1 << 40, HOLD_MS,
            settings={"attempts_max": ATTEMPTS_MAX},
        )  # fmt: skip
        self.shell.send(link, join)
        self.look()

    def drop(self, link: int) -> None:
        if link in self.lost:
            held = [offset for offset, held in self.holders.items() if held.link == link]
            self.ended.update(offset for offset in held if not self.holders[offset].tracker)
        super().drop(link)

    def leave(self) -> None:
        before = set(self.members)
        self.lost: set[int] = set()
        link_lost = self.shell.broker.link_lost

        def lose(link: int, now_ms: int) -> int:
            self.lost.add(link)
            return link_lost(link, now_ms)

        self.shell.broker.link_lost = lose  # type: ignore[method-assign]
        super().leave()
        self.shell.broker.link_lost = link_lost  # type: ignore[method-assign]
        assert len(before) - len(self.members) <= 1

    def restart(self) -> None:
        self.lost = set()
        super().restart()

    def acknowledge(self) -> None:
        held = dict(self.holders)
        unsure = set(self.unsure)
        super_look, self.look = self.look, lambda: None  # type: ignore[method-assign]
        super().acknowledge()
        self.look = super_look  # type: ignore[method-assign]
        given_back = held.keys() - self.holders.keys() - (self.unsure - unsure)
        self.ended.update(given_back)
        self.look()

    def given(self, link: int, offset: int) -> None:
        assert self.kind == "exclusive" or self.ended[offset] < ATTEMPTS_MAX, "a dead letter"
        super().given(link, offset)

    def pick_up(self, link: int, member: dict[str, Any]) -> None:
        told = self.shell.peers[link].told[member["told"] :]
        super().pick_up(link, member)
        if self.kind == "exclusive":
            return
        for command, bodies in told:
            if isinstance(command, wire.Deliver):
                for body in bodies:
                    offset = int(body.split()[0])
                    assert command.attempts == self.ended[offset] + 1

    def dead(self) -> list[int]:
        """Return the offsets of the dead letters, as the mailbox has them."""
        self.shell.hello(2)
        inbox = wire.OpenInbox(9, "s.g.dead", 1 << 40, 1 << 40)
        peer = self.shell.send(2, inbox)
        found: list[int] = []
        for command in peer.of(wire.Mail):
            assert command.origin[:3] == ("s", "g", ATTEMPTS_MAX)
            found += command.origin[3]
        assert [int(letter.body.split()[0]) for letter in peer.mail.get(9, [])] == found
        return found

    def check(self) -> None:
        dead = self.dead()
        assert len(dead) == len(set(dead)), "each dead letter is there once"
        assert not self.done.intersection(dead), "it was done"
        used_up = {offset for offset, count in self.ended.items() if count >= ATTEMPTS_MAX}
        if self.kind != "exclusive":
            assert used_up.issuperset(dead)
            assert all(offset in dead for offset in used_up if offset >= self.first)
        wanted = {
            offset for offset, key in enumerate(self.published)
            if matches(self.pattern, (key,), ()) and offset >= self.first
        }  # fmt: skip
        assert not wanted - self.done - self.unsure - self.maybe - set(dead)
        facts = self.facts()
        assert facts["next"] == facts["tail"] == facts["logged"]
        assert facts["held"] == facts["waiting"] == facts["late"] == 0
        assert not facts["attempts"], "records that are done have no attempts"


@pytest.mark.parametrize("kind", ["shared", "exclusive", "keyed"])
@pytest.mark.parametrize("seed", range(8))
def test_every_record_is_done_or_a_dead_letter_once(seed: int, kind: str) -> None:
    world = Mortal(seed, kind)
    world.join()
    world.publish()
    for _ in range(150):
        what = world.dice.choice(
            ["publish"] * 2 + ["join"] * 2 + ["leave", "credit", "credit", "wait", "evict", "read"]
            + ["acknowledge"] * 6
        )  # fmt: skip
        if world.dice.random() < 0.05:
            what = world.dice.choice(["restart", "trim", "refuse"])
        getattr(world, what)()
    world.settle()
    world.check()
