"""The atomic step (feature ATOMIC), and the commands that may be part of one.

Owns the command 66. Source: SPEC.md, section 4.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from malamute_protocol.commands.command import Command
from malamute_protocol.commands.cursors import MoveCursor
from malamute_protocol.commands.fields import Key
from malamute_protocol.commands.groups import AckRecords
from malamute_protocol.commands.mail import AckMail, Send
from malamute_protocol.commands.services import AckWork, Reply, Request
from malamute_protocol.commands.streams import Publish, PurgeSubjects, Trim
from malamute_protocol.commands.transactions import (
    BeginTransaction,
    CommitTransaction,
    RollBackTransaction,
    Stage,
)


class Atomic(Command, tag=66, frozen=True):
    """The next `count` commands of this message are one step: all of them or none.

    One CONFIRM or REFUSED answers the step by its tracker; the parts are not answered.
    """

    tracker: int
    count: Annotated[int, msgspec.Meta(ge=1)]
    level: int = 0
    key: Key = b""
    """Name of the step: when it is sent again with the same key, it is taken once."""


STEP_PARTS: tuple[type[Command], ...] = (
    Publish, Send, Request, Reply, AckMail, AckWork, AckRecords, MoveCursor, Trim, PurgeSubjects,
    BeginTransaction, Stage, CommitTransaction, RollBackTransaction,
)  # fmt: skip
"""Commands that an ATOMIC may announce, each with tracker 0; ACK_WORK only with the states 3 to
5."""
