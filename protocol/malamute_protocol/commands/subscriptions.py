"""The commands of subscriptions: what a reader asks for, and what it is told.

Owns the commands 12 to 21 and 86. Members of groups, inboxes and offers have credit, and an end, by
the same commands. Source: SPEC.md, sections 4 and 6.
"""

from __future__ import annotations

from malamute_protocol.commands.command import Command
from malamute_protocol.commands.fields import Pattern, Start, Versions


class Subscribe(Command, tag=12, frozen=True):
    """Start delivery of a stream's records that match a pattern."""

    subscription: int
    """The client's number for the subscription, unique on the link."""
    stream: str
    pattern: Pattern
    start: Start
    credit_records: int = 0
    """Credit: cumulative count of records that may be delivered."""
    credit_bytes: int = 0
    """Credit: cumulative count of payload bytes that may be delivered."""
    visibility: int = 0
    """0 live, 1 durable, 2 committed."""
    end: int = -1
    """Offset before which to stop; -1: never. Position end kinds are in `until`."""
    until: str = ""
    """Empty: stop at `end`. "tail": stop at the next offset of the moment of acceptance."""
    client_time: tuple[int, int] | None = None
    """Range [from, to) in milliseconds: only records with a client time in it are delivered."""
    create: bool = True
    """Create the stream when it does not exist."""
    whole: bool = False
    """True: batches always come verbatim with row bitmaps, never extracted."""
    gathered: bool = False
    """True: derived batches may hold rows of several batches, each with its append time."""


class Subscribed(Command, tag=13, frozen=True):
    """A subscription was accepted, and begins at `next`."""

    subscription: int
    stream: bytes
    """UUID of the stream."""
    epoch: int
    next: int
    """Offset at which delivery begins: the first cover's `from`."""
    first: int
    """Oldest offset that the log still has."""
    tail: int
    """Offset after the newest record."""
    end: int = -1
    lease_ms: int = 0
    """Members of groups only: silence about a record after which another member gets it; 0: none.
    """
    schemas: Versions = []
    """Versions of the stream's declared schema, oldest first: id and Arrow schema message of each;
    empty: the stream has none."""
    begin: int = 0
    """Offset of the first record that the stream ever had: 1 with the setting `keep`."""


class Unsubscribe(Command, tag=14, frozen=True):
    """End a subscription; answered by ENDED."""

    subscription: int


class Ended(Command, tag=15, frozen=True):
    """No more deliveries of this subscription come: it was cancelled or reached its end."""

    subscription: int
    next: int
    code: str = "end"


class Credit(Command, tag=16, frozen=True):
    """Raise a subscription's (or an offer's or inbox's) cumulative credit; never lowers it."""

    subscription: int
    credit_records: int
    credit_bytes: int


class Deliver(Command, tag=17, frozen=True):
    """Records of a stream; owns `frames` content frames. Covers [from, next)."""

    subscription: int
    from_: int
    next: int
    frames: int
    rows: bytes | None = None
    """Bitmap of the delivered rows of the one batch (LSB first); None: all rows of all batches."""
    attempts: int = 1
    """Members of groups that count attempts: those of these records, this hand-out included."""

    @property
    def content_frames(self) -> int:
        """Return how many the command names."""
        return self.frames


class Cover(Command, tag=18, frozen=True):
    """Records in [from, next) were not selected, or are gone by right (expired, aborted)."""

    subscription: int
    from_: int
    next: int


class Gap(Command, tag=19, frozen=True):
    """Offsets [from, to) cannot be delivered, for the reason given."""

    subscription: int
    from_: int
    to: int
    code: str
    reason: str = ""


class Rewound(Command, tag=20, frozen=True):
    """The log ends before the position that was asked for: delivery goes on at `to`."""

    subscription: int
    from_: int
    to: int
    epoch: int


class Mode(Command, tag=21, frozen=True):
    """The subscription is now live (fed from the tail) or on demand (fed from the journal)."""

    subscription: int
    live: bool
    offset: int


class Schema(Command, tag=86, frozen=True):
    """A subscription's stream has a new version of its schema; batches of it may follow."""

    subscription: int
    id: int
    schema: bytes
    """Arrow schema message."""
