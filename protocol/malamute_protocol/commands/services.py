"""The commands of services (feature SERVICES): requests, offers of workers, and their answers.

Owns the commands 50 to 59 and 82. Source: SPEC.md, section 4.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from malamute_protocol.commands.command import Command, WithContent
from malamute_protocol.commands.fields import (
    Key,
    Numbers,
    Pattern,
    Ranges,
    Reason,
    RequestPriority,
    Settings,
    Time,
    check_ranges,
)


class Request(WithContent, tag=50, frozen=True):
    """Queue a batch of requests to a service; owns one content frame.

    Each record is one request, its subject the record's. Answered by CONFIRM like SEND.
    """

    service: str
    tracker: int
    reply_to: str = ""
    """Mailbox for replies; empty: the identity's mailbox, or the session's temporary one."""
    timeout_ms: Time = 0
    """Time after which the requests are given up, from the end of `delay_ms`; 0: never."""
    level: int = 0
    key: Key = b""
    """Name of this batch and, with the row, of each request of it: when it is sent again with the
    same key, it is accepted once, and replies name it. Empty: replies name no request."""
    need_workers: bool = False
    """True: refuse with `no_workers` when no worker offers the service for one of the subjects
    now."""
    delay_ms: Time = 0
    """Time before which no worker gets the requests, from when they were taken."""
    priority: RequestPriority = 0
    """Requests of a higher one are handed out before those of a lower one."""


class Offer(Command, tag=51, frozen=True):
    """Worker offers a service for subjects that match; credit is its readiness."""

    subscription: int
    service: str
    pattern: Pattern
    credit_records: int = 0
    credit_bytes: int = 0
    lease_ms: Time = 0
    settings: Settings = {}
    """Settings for a service that does not exist yet."""


class Work(Command, tag=52, frozen=True):
    """Requests handed to a worker; owns `frames` content frames: one batch, stamp and content.

    The number of the request in row i is base_offset + i (or + its offset delta).
    """

    subscription: int
    sender: str
    reply_to: str
    deadline_ms: int
    """Time of the broker's clock at which the requests are given up; 0: never."""
    attempts: int
    """Hand-outs of these requests, this one included."""
    lease_ms: int
    """Silence of the worker about the requests after which they go to another worker."""
    frames: int
    rows: bytes | None = None
    """Bitmap of the rows of the batch that are handed out (LSB first); None: all."""
    key: bytes = b""
    """The requester's key: with the row it names a request, so that a worker can tell that it has
    done it already."""

    @property
    def content_frames(self) -> int:
        """Return how many the command names."""
        return self.frames


class AckWork(Command, tag=53, frozen=True):
    """Worker received, renewed, completed, failed, returned or released requests.

    state: 1 received, 2 renewed (lease), 3 completed, 4 failed (dead letter), 5 returned, 6
    released.
    """

    subscription: int
    ranges: Ranges
    state: Annotated[int, msgspec.Meta(ge=1, le=6)]
    tracker: int = 0
    level: int = 0
    again_ms: Time = 0
    reason: Reason = ""
    key: Key = b""
    """Name of this command for its sender: when it is sent again with the same key, it is taken
    once."""

    def __post_init__(self) -> None:
        """Raise ValueError where the ranges are invalid, which fails the decoding."""
        check_ranges(self.ranges)


class Reply(WithContent, tag=54, frozen=True):
    """Worker answers requests that it holds, one record each; owns one content frame.

    All of them have one reply_to. `last` completes them in the same step.
    """

    subscription: int
    requests: Numbers
    """Number of the request that the record in each row answers."""
    tracker: int
    last: bool = False
    level: int = 0
    patient: bool = False
    """True: no caller waits for the CONFIRM, which may come later, with other answers."""
    key: Key = b""
    """Name of this command for its sender: when it is sent again with the same key, it is taken
    once."""


class CancelRequest(Command, tag=55, frozen=True):
    """Requester gives requests up by the key that it used."""

    request: int
    service: str
    key: Key
    row: int = -1
    """Row of the batch; -1: all that are not completed."""


class ServiceInfo(Command, tag=56, frozen=True):
    """Facts about one service, or a page of them when the name ends in `*`."""

    request: int
    service: str
    after: str = ""
    limit: int = 1000


class EditService(Command, tag=57, frozen=True):
    """Create a service queue or change its settings."""

    request: int
    service: str
    settings: Settings
    replace: bool = False
    """True: settings that are not named go back to their defaults."""


class Requeue(Command, tag=58, frozen=True):
    """Operator puts dead letters, or requests that a worker holds, back into the queue."""

    request: int
    service: str
    numbers: Numbers = []


class RemoveService(Command, tag=59, frozen=True):
    """Remove a service queue with its requests; `confirm` repeats its name."""

    request: int
    service: str
    confirm: str


class PeekRequests(Command, tag=82, frozen=True):
    """Look at the requests of a service without taking them; answered by RESULT."""

    request: int
    service: str
    after: int = -1
    limit: int = 100
