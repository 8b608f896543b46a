"""Many members who come, go and read late, some of them quick: each record once to the group.

The world is that of test_random_group; here links have little room, which comes back when they say
that they have read, and who is quick is dealt to in lots already among a few.
"""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from malamute_py.broker.groups.member import Member
from tests.broker.groups.test_random_group import World

pytestmark = pytest.mark.slow


class Crowd(World):
    """A world of many members."""

    members_most = 25

    def join_some(self) -> None:
        for _ in range(self.dice.choice([1, 1, 10])):
            self.join()

    def has_read(self) -> None:
        """Most members say that they have read what they were asked about."""
        for link in self.members:
            if self.dice.random() < 0.7:
                self.say_read(link)
        self.look()

    def say_read(self, link: int) -> None:
        probe = self.shell.broker._links.table[link].probe
        if probe:
            self.shell.send(link, wire.Pong(probe))

    def busy(self) -> None:
        """A lot is done: that is how members show to be quick."""
        for _ in range(3):
            self.publish()
            self.sync()
            for _ in self.members:
                self.acknowledge()
            self.credit()
            self.has_read()

    def look(self) -> None:
        super().look()
        for group in self.shell.broker._groups._groups:
            entries = {(-left, served, one) for left, served, _, one in group.free._heap}
            for member in group.members:
                if member.able:
                    assert member.filed
                    place = (member.left_records, member.served, member)
                    assert group.kind == "exclusive" or place in entries
            assert group.free.count == sum(member.filed for member in group.members)
            absent = group.absent_holder
            held = sum(member.held for member in group.members)
            held += absent.held if isinstance(absent, Member) else 0
            assert held == group.holdings.held


@pytest.fixture
def lots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lots of more than one; they are dealt from a few members on."""
    lots: list[int] = []
    lot = Member.lot

    def told(member: Member, deals: int) -> int:
        found = lot(member, deals)
        if found > 1:
            lots.append(found)
        return found

    monkeypatch.setattr("malamute_py.broker.groups.member.SPREAD_MIN", 2)
    monkeypatch.setattr("malamute_py.broker.groups.member.DEAL_MS", 50.0)
    monkeypatch.setattr("malamute_py.broker.groups.free_members.STALE_MAX", 3)
    monkeypatch.setattr(Member, "lot", told)
    return lots


@pytest.mark.parametrize("kind", ["shared", "keyed", "exclusive"])
@pytest.mark.parametrize("seed", range(5))
def test_every_record_goes_once_to_a_group_of_many(seed: int, kind: str, lots: list[int]) -> None:
    crowd = Crowd(seed, kind, own_ring=seed == 3, power=seed % 2 == 1, share_bytes=3_000)
    for _ in range(10):
        crowd.join()
    crowd.sync()
    crowd.busy()
    for _ in range(150):
        what = crowd.dice.choice(
            ["publish"] * 3 + ["join_some", "leave", "leave", "credit", "wait", "evict", "read"]
            + ["acknowledge"] * 5 + ["has_read"] * 2 + ["busy", "sync", "sync"]
        )  # fmt: skip
        if crowd.dice.random() < 0.04:
            what = crowd.dice.choice(["restart", "trim", "refuse", "refuse"])
        getattr(crowd, what)()
    crowd.settle()
    crowd.check()
    assert lots or kind != "shared"
