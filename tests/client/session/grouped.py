"""A session that is a member of one group, as tests drive it."""

from __future__ import annotations

from typing import Any

from malamute_protocol import commands as c
from malamute_protocol.batch import encode
from malamute_protocol.commands import Command
from malamute_py.client.session.acknowledgements import AckForm
from malamute_py.client.session.events import Settled
from malamute_py.client.session.group_options import DONE, GroupOptions
from malamute_py.client.session.held_batches import HeldBatch
from malamute_py.client.session.memberships import Membership
from malamute_py.client.session.subscription import (
    RewoundNotice,
)
from tests.client.script import STREAM_UUID, Script, stamped
from tests.rows import bitmap_of_rows

TIME_MS = 1_700_000_000_000


class Grouped(Script):
    """A session that is a member of one group, and what became of its acknowledgements."""

    def __init__(self, **asked: Any) -> None:
        super().__init__()
        self.open()
        self.member = self.join(**asked)

    def join(self, **asked: Any) -> Membership:
        joining = GroupOptions(**{"stream": "s", "group": "g", "pattern": ["all"], **asked}).check()
        member = self.session.memberships.join(joining)
        self.step()
        self.accept_member(member)
        return member

    def accept_member(self, member: Membership) -> list[Command]:
        return self.say(c.Subscribed(member.number, STREAM_UUID, 1, 0, 0, 100))

    def hand(
        self, count: int, base: int, rows: list[int] | None = None, epoch: int = 1
    ) -> list[Command]:
        frames = stamped(encode([b"%d" % n for n in range(count)], subject="a"), base, epoch=epoch)
        bitmap = None if rows is None else bitmap_of_rows(rows, count)
        deliver = c.Deliver(self.member.number, base, base + count, 2, bitmap)
        return self.say(deliver, frames=frames)

    def take(self) -> HeldBatch:
        item = self.member.take()
        assert isinstance(item, HeldBatch)
        return item

    def ack(self, offsets: list[int], token: str | None = None, again_ms: int = -1) -> list[Any]:
        self.member.ack(offsets, DONE if again_ms < 0 else AckForm(0, again_ms), token)
        return [command for command in self.step() if isinstance(command, c.AckRecords)]

    def confirmed(self, ack: c.AckRecords) -> list[Command]:
        return self.say(c.Confirm(ack.tracker, 3, 1, 0, TIME_MS))

    def settled(self) -> dict[str, Any]:
        found = [
            pair for event in self.happened if isinstance(event, Settled) for pair in event.pairs
        ]
        self.happened = [event for event in self.happened if not isinstance(event, Settled)]
        return dict(found)


def rewound_after(script: Grouped, until: int, uuid: bytes = STREAM_UUID) -> HeldBatch:
    """A member that has records 0 to 3 of epoch 1, and learns that the log ends at `until`."""
    script.hand(4, 0)
    batch = script.take()
    script.reconnect()
    number = script.member.number
    assert script.last(c.JoinGroup).seen == (4, 1, STREAM_UUID)
    script.say(c.Subscribed(number, uuid, 2, 0, 0, until), c.Rewound(number, 4, until, 2))
    assert script.member.take() == RewoundNotice(4, until, 2)
    return batch
