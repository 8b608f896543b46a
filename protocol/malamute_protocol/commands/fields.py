"""The fields of commands: what their types may hold, and the numbers that stand for words.

Owns the bounds of a field that msgspec checks as a command is decoded. The rule: a number, once
released, keeps its meaning. Source: SPEC.md, sections 4, 6 and 8.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Annotated, Any, TypeAlias

import msgspec

from malamute_protocol.limits import (
    KEY_BYTES_MAX,
    NUMBERS_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    RANGES_MAX,
    REASON_BYTES_MAX,
    REQUEST_PRIORITY_MAX,
    RUNS_MAX,
    SETTINGS_MAX,
    TIME_MAX,
)

Start: TypeAlias = list[Any]
"""Position at which a subscription begins, as [kind, ...]; see SPEC.md, section 6."""

Pattern: TypeAlias = list[Any]
"""A pattern in wire form, as [kind, ...]; see SPEC.md, section 7."""


Settings: TypeAlias = Annotated[dict[str, Any], msgspec.Meta(max_length=SETTINGS_MAX)]
"""Settings of a stream, mailbox, service, cursor or group, by name."""

Versions: TypeAlias = list[tuple[int, bytes]]
"""Versions of a declared schema: id and Arrow schema message; see SPEC.md, section 5.9."""

Ranges: TypeAlias = Annotated[list[tuple[int, int]], msgspec.Meta(max_length=RANGES_MAX)]
"""Numbers or offsets as half-open intervals [from, to): at least one, none empty, ascending,
without overlap, at most NUMBERS_MAX numbers in all."""
Numbers: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=RUNS_MAX)]
Runs: TypeAlias = Annotated[list[tuple[bytes, int, int]], msgspec.Meta(max_length=RUNS_MAX)]
"""Requests as (key of the batch, row of the first, how many)."""
Key: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES_MAX)]
"""The sender's name for a batch or a step, one space for all that it sends; empty: none."""
Reason: TypeAlias = Annotated[str, msgspec.Meta(max_length=REASON_BYTES_MAX)]
Time: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=TIME_MAX)]
"""A time or a duration in milliseconds that a client names."""
Again: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=TIME_MAX)]
"""-1: done; otherwise wanted again after so many milliseconds."""
Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)]
RequestPriority: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=REQUEST_PRIORITY_MAX)]


class Level(enum.IntEnum):
    """Promise of a confirm; see SPEC.md, section 8."""

    DEFAULT = 0
    """On the wire only: the stream's own default, `synced` unless it was set."""
    NONE = 1
    STORED = 2
    SYNCED = 3
    REPLICATED = 4
    """Reserved."""


class Visibility(enum.IntEnum):
    """The moment from which on a subscription may read a record."""

    LIVE = 0
    """All records that were appended."""
    DURABLE = 1
    """Records that no power loss can take back."""
    COMMITTED = 2
    """Records of no open transaction that no power loss can take back."""


class StartKind(enum.IntEnum):
    """First element of a start position."""

    EARLIEST = 0
    LATEST = 1
    OFFSET = 2
    """[2, offset, epoch?, stream uuid?]."""
    TIME = 3
    """[3, time_ms, inclusive?] by append time."""
    CLIENT_TIME = 4
    """[4, time_ms, inclusive?] by client time."""
    AFTER_ID = 5
    """[5, message id of 16 bytes, inclusive?]: the record after it, or (inclusive) it."""
    LAST_PER_SUBJECT = 6
    """[6]: the latest record of each subject, then live."""
    CURSOR = 7
    """[7, cursor name, start?]: where the cursor is, or the other start when there is none."""


class WorkState(enum.IntEnum):
    """A worker's report about requests that it holds; see ACK_WORK."""

    RECEIVED = 1
    """The worker has the requests; their lease begins anew."""
    RENEWED = 2
    """The worker is still at it: the lease begins anew."""
    COMPLETED = 3
    FAILED = 4
    """The requests go to the dead-letter mailbox, with the reason."""
    RETURNED = 5
    """The requests go back into the queue, for any worker."""
    RELEASED = 6
    """The requests go back into the queue at once, for any worker; the hand-out counts as no
    attempt."""


def check_ranges(ranges: Iterable[tuple[int, int]]) -> None:
    """Raise ValueError unless these are Ranges, so that no caller walks through invalid ones."""
    last_end, numbers = 0, 0
    for first, end in ranges:
        if first < last_end or end <= first:
            raise ValueError("ranges ascend, do not overlap, and none is empty")
        last_end = end
        numbers += end - first
    if not numbers:
        raise ValueError("at least one range")
    if numbers > NUMBERS_MAX:
        raise ValueError(f"ranges of {numbers} numbers, at most {NUMBERS_MAX}")
