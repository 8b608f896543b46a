"""A membership as a program asks for it: its options, and what is to become of a record.

Owns the options of a membership and the forms in which its records are acknowledged. Source:
SPEC.md, section 4.8.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from malamute_protocol.commands import Pattern, Start, WorkState
from malamute_py.client.arguments import duration, integer, name_of, one_of, reason_of, truth
from malamute_py.client.session.acknowledgements import AckForm
from malamute_py.client.words import GroupKind, GroupVisibility

DONE: Final = AckForm()
AGAIN: Final = AckForm(state=0, again_ms=0)
"""Given back, to be handed out again at once."""
RELEASED: Final = AckForm(int(WorkState.RELEASED))
"""Given back, without counting as an attempt."""
RENEWED: Final = AckForm(int(WorkState.RENEWED))
"""Held on to: the lease begins anew."""
KINDS: Final = ("shared", "exclusive", "keyed")
VISIBILITIES: Final = {"live": 0, "durable": 1}
CREDIT_RECORDS: Final = 8192
CREDIT_BYTES: Final = 8 << 20


def group_visibility(name: GroupVisibility | None) -> int:
    """A visibility as JOIN_GROUP has it. Raises LocalProtocolError `bad_setting`."""
    if name is None:
        return -1  # as the group has it
    one_of("visibility", name, tuple(VISIBILITIES))
    return VISIBILITIES[name]


def failed(reason: str) -> AckForm:
    """Return the form by which records are acknowledged as failed. Raises LocalProtocolError."""
    return AckForm(int(WorkState.FAILED), -1, reason_of(reason))


class GroupOptions(msgspec.Struct, frozen=True):
    """A membership as asked for."""

    stream: str
    group: str
    pattern: Pattern
    kind: GroupKind = "shared"
    start: Start = []
    credit_records: int = CREDIT_RECORDS
    """Records that this member may have in hand: not acknowledged."""
    credit_bytes: int = CREDIT_BYTES
    """Bytes that may wait in this client, not taken by its reader."""
    hold_ms: int = 0
    visibility: int = -1
    """0 live, 1 durable; -1: as the group has it, and durable for a new one."""
    create: bool = False
    """Create the stream when it does not exist."""
    settings: dict[str, Any] = {}
    """Settings for a group that does not exist yet."""

    def check(self) -> GroupOptions:
        """Return the options, checked before a membership is opened with them.

        Raises LocalProtocolError `bad_setting` for what the broker would refuse anyway.
        """
        name_of("stream", self.stream)
        name_of("group", self.group)
        one_of("kind", self.kind, KINDS)
        return msgspec.structs.replace(
            self,
            credit_records=integer("credit_records", self.credit_records, 1),
            credit_bytes=integer("credit_bytes", self.credit_bytes, 1),
            hold_ms=duration("hold_ms", self.hold_ms),
            create=truth("create", self.create),
        )
