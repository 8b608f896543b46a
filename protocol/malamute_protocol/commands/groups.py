"""The commands of groups (feature CURSORS): members that share a stream over one cursor.

Owns the commands 63 to 65, 68, 80, 81 and 83. Source: SPEC.md, section 4.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from malamute_protocol.commands.command import Command
from malamute_protocol.commands.fields import (
    Again,
    Numbers,
    Pattern,
    Ranges,
    Reason,
    Settings,
    Start,
    Time,
    check_ranges,
)


class JoinGroup(Command, tag=63, frozen=True):
    """Subscribe as a member of a group over a cursor; answered by SUBSCRIBED.

    Deliveries are DELIVER commands, whose covers are the group's, not the member's.
    """

    subscription: int
    stream: str
    group: str
    pattern: Pattern
    kind: str = "shared"
    """`shared`, `exclusive` or `keyed`: for a new group; an existing one must have this kind."""
    start: Start = []
    """Start of a new group; empty: latest."""
    credit_records: int = 0
    credit_bytes: int = 0
    hold_ms: Time = 0
    """Exclusive groups only: time for a lost holder to return; 0: the broker's default."""
    visibility: Annotated[int, msgspec.Meta(ge=-1, le=1)] = -1
    """0 live, 1 durable: for a new group; an existing one must have this visibility. -1: as the
    group has it, and durable for a new one."""
    seen: tuple[int, int, bytes] | None = None
    """[offset, epoch, stream uuid] after the newest record that this member was delivered, so that
    REWOUND tells what of it was rewound. None: it was delivered none."""
    create: bool = True
    """Create the stream when it does not exist."""
    settings: Settings = {}
    """Settings for a group that does not exist yet."""


class AckRecords(Command, tag=64, frozen=True):
    """Group member: records in these ranges, which it holds, are done, or wanted again.

    state: 0 as again_ms says, 2 renewed (lease), 4 failed (dead letters), 6 released.
    """

    subscription: int
    ranges: Ranges
    tracker: int = 0
    level: int = 0
    again_ms: Again = -1
    """-1: done; otherwise deliver again, to any member, after this time."""
    state: Annotated[int, msgspec.Meta(ge=0, le=6)] = 0
    """Number of a WorkState; 0: `again_ms` says what becomes of the records."""
    reason: Reason = ""
    """With 4: why."""

    def __post_init__(self) -> None:
        """Raise ValueError where the ranges are invalid, which fails the decoding."""
        check_ranges(self.ranges)


class GroupInfo(Command, tag=65, frozen=True):
    """Lag, members and holdings of one group, or of a page when the name is empty or `*`."""

    request: int
    stream: str
    group: str = ""
    after: str = ""
    limit: int = 1000


class RemoveGroup(Command, tag=68, frozen=True):
    """Forget a group that has no members."""

    request: int
    stream: str
    group: str


class EditGroup(Command, tag=80, frozen=True):
    """Change the settings of a group."""

    request: int
    stream: str
    group: str
    settings: Settings
    replace: bool = False
    """True: settings that are not named go back to their defaults."""


class RequeueGroup(Command, tag=81, frozen=True):
    """Operator lets the records of a group's dead letters come again."""

    request: int
    stream: str
    group: str
    numbers: Numbers = []


class ResetGroup(Command, tag=83, frozen=True):
    """Operator has a group stand elsewhere; what was done before counts no longer.

    RESULT: as of GROUP_INFO, and `before`: where it stood.
    """

    request: int
    stream: str
    group: str
    start: Start
    force: bool = False
    """True: members are no hindrance: their memberships end, and they may join again."""
