"""The commands of the protocol: one table of names, numbers, fields and meaning.

Owns the command types and their MessagePack form: each is an array whose first
element is the command's number. The rule: a number or a field, once released,
keeps its meaning; new fields are appended with a default. Source: SPEC.md,
section 4 (the two are compared by tests/protocol/test_spec_agrees_with_code.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Annotated, Any, TypeAlias, Union

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
    TIME_MAX,
)

Start: TypeAlias = list[Any]
"""Position at which a subscription begins, as [kind, ...]; see SPEC.md, section 6."""

Pattern: TypeAlias = list[Any]
"""A pattern in wire form, as [kind, ...]; see SPEC.md, section 7."""


Versions: TypeAlias = list[tuple[int, bytes]]
"""Versions of a declared schema: id and Arrow schema message; see SPEC.md, section 5.9."""


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


class Command(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all commands. `frames` content frames follow in the same message, in order."""

    @property
    def content_frames(self) -> int:
        """Return how many content frames of the message belong to this command."""
        return 0


class WithContent(Command, frozen=True):
    """Base of the commands that own one content frame, with the content of a batch."""

    @property
    def content_frames(self) -> int:
        """Return 1: the batch content."""
        return 1


# --- 1 to 9: the link ------------------------------------------------------------


class Hello(Command, tag=1, frozen=True):
    """Client opens or resumes a link. Must be the link's first command."""

    versions: tuple[int, int]
    """Lowest and highest protocol version that the client speaks."""
    session: bytes
    """16 random bytes, the same over reconnects: a newer link of a session replaces the older."""
    identity: str = ""
    """Identity asked for; the credential must be allowed to have it. With `{n}` a template
    (SPEC.md, section 4.8): the broker puts a number there. Empty: the credential's own, or none."""
    software: str = ""
    heartbeat_ms: int = 0
    """Longest time for which the client promises to be silent; 0: the broker's default."""
    features: int = 0
    number: int = -1
    """With a template as identity: the number that the session had before; -1: none."""


class Welcome(Command, tag=2, frozen=True):
    """Broker accepts a link and states its bounds and settings."""

    version: int
    broker: bytes
    """UUID of the broker's data directory, 16 bytes."""
    epoch: int
    heartbeat_ms: int
    expiry_ms: int
    """Silence after which either side gives the other up."""
    window_bytes: int
    """Unconfirmed bytes that the client may have published."""
    record_bytes_max: int
    batch_bytes_max: int
    batch_records_max: int
    message_commands_max: int
    identity: str = ""
    software: str = ""
    cluster: bytes = b""
    """Cluster UUID, or empty: reserved for scale-out."""
    map_version: int = 0
    """Version of the placement map: reserved for scale-out."""
    features: int = 0
    now_ms: int = 0
    """The broker's clock, so that a client can express expiry in the broker's time."""


class Ping(Command, tag=3, frozen=True):
    """Either side asks the other for a sign of life."""

    token: int = 0


class Pong(Command, tag=4, frozen=True):
    """Answer to PING with its token."""

    token: int = 0


class Bye(Command, tag=5, frozen=True):
    """Either side ends the link in order; nothing follows. The code says why."""

    code: str = "closed"
    reason: str = ""


class Refused(Command, tag=6, frozen=True):
    """The one negative answer: which command, which of them, why, and when to try again."""

    command: int
    """Number of the refused command; 0: the link as a whole."""
    reference: int
    """Tracker, subscription or request of the refused command; 0 when it had none."""
    code: str
    reason: str = ""
    retry_ms: int = 0
    """Time after which to try again; 0: not before something changes."""
    revision: int = -1
    """Revision that the key of an UPDATE_KEY has, where its condition does not hold; else -1."""


class Result(Command, tag=7, frozen=True):
    """Positive answer to a command that carries `request`."""

    request: int
    value: dict[str, Any] = {}


# --- 10 to 29: streams ------------------------------------------------------------


class Publish(WithContent, tag=10, frozen=True):
    """Append one batch to a stream; owns one content frame."""

    stream: str
    tracker: int
    """The producer's number for this batch, ascending on the link; 0 with level none."""
    level: int = 0


class Confirm(Command, tag=11, frozen=True):
    """A published batch reached `level`; position of its first record."""

    tracker: int
    level: int
    epoch: int
    offset: int
    append_time_ms: int
    duplicate: bool = False
    """True: the batch was in the log already; the position is the original's."""


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


class OpenProducer(Command, tag=22, frozen=True):
    """Client gets (id 0) or resumes a producer id, bound to the identity; answered by RESULT.

    RESULT: {"id", "epoch", "next": {stream name: next sequence}}. A resume within one session keeps
    the epoch; `fence` raises it, and older epochs are refused as `fenced`.
    """

    request: int
    id: int = 0
    epoch: int = 0
    fence: bool = False


# --- 30 to 39: streams, administration (each answered by RESULT or REFUSED) --------


class CreateStream(Command, tag=30, frozen=True):
    """Create a stream with settings; the command with equal settings succeeds again."""

    request: int
    stream: str
    settings: dict[str, Any] = {}


class EditStream(Command, tag=31, frozen=True):
    """Change settings of a stream; settings that are not named stay."""

    request: int
    stream: str
    settings: dict[str, Any]
    replace: bool = False
    """True: settings that are not named go back to their defaults."""


class RemoveStream(Command, tag=32, frozen=True):
    """Remove a stream and its records; its number is never used again."""

    request: int
    stream: str


class StreamInfo(Command, tag=33, frozen=True):
    """Facts about one stream: uuid, epoch, first, tail, bytes, settings, subscriptions."""

    request: int
    stream: str


class ListStreams(Command, tag=34, frozen=True):
    """Names and short facts, in name order, starting after `after`."""

    request: int
    prefix: str = ""
    after: str = ""
    limit: int = 1000


class FindOffset(Command, tag=35, frozen=True):
    """Resolve a start position to an offset without subscribing."""

    request: int
    stream: str
    start: Start


class PlanRead(Command, tag=36, frozen=True):
    """Plan a bounded read from the index: an end under caps, and split points.

    RESULT: {"stream" (uuid), "epoch", "first", "trimmed", "tail", "from", "to",
    "splits": [[from, to, bytes], ...], "records", "bytes", "rewound" (bool)}.
    """

    request: int
    stream: str
    pattern: Pattern
    start: Start
    records_max: int = 0
    bytes_max: int = 0
    split_bytes: int = 0
    end: int = -1
    visibility: int = 1
    client_time: tuple[int, int] | None = None


class BrokerInfo(Command, tag=37, frozen=True):
    """Facts about the broker: version, uuid, epoch, rings, links, counters."""

    request: int
    settings: str | None = None
    """Also the settings in force after this one, by name, for administrators only."""


class ListLinks(Command, tag=38, frozen=True):
    """List the links with identity, state, subscriptions and the work they hold, by number."""

    request: int
    limit: int = 1000
    after: int = 0
    """Links with a number above this."""


class Kick(Command, tag=39, frozen=True):
    """End a link by its number; needs the permission manage_clients."""

    request: int
    link: int
    reason: str = ""


# --- 40 to 49: mailboxes (feature MAIL) --------------------------------------------

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


class Send(WithContent, tag=40, frozen=True):
    """Put a batch of messages into a mailbox; owns one content frame.

    Answered by CONFIRM (tracker): its offset is the number of the first message, the others
    follow on. REFUSED `wait` with a retry time when the mailbox is full.
    """

    mailbox: str
    tracker: int
    level: int = 0
    key: Key = b""
    """Name of this batch: when it is sent again with the same key, it is accepted once. Empty:
    none."""
    deliver_at_ms: Time = 0
    priority: Priority = 0


class OpenInbox(Command, tag=41, frozen=True):
    """Read a mailbox under credit; its deliveries carry the subscription number."""

    subscription: int
    mailbox: str
    credit_records: int = 0
    credit_bytes: int = 0
    settings: dict[str, Any] = {}
    """Settings for a mailbox that does not exist yet."""


class Mail(Command, tag=42, frozen=True):
    """Messages of a mailbox; owns `frames` content frames: one batch, stamp and content.

    The number of the message in row i is base_offset + i (or + its offset delta).
    """

    subscription: int
    sender: str
    attempts: int
    frames: int
    rows: bytes | None = None
    """Bitmap of the delivered rows of the batch (LSB first); None: all."""
    about: Runs = []
    """Replies only: the requests that the delivered rows answer, in order, as runs of (key of the
    request's batch, row of the first, how many); empty for other mail."""
    last: bool = False
    """True: each of these replies is the last to its request."""
    why: str = ""
    """Dead letters only: why the request or record came here. Notices only: why there will be no
    answer."""
    origin: tuple[str, str, int, list[int]] | None = None
    """Dead letters of a group only: [stream, group, attempts, offset of each delivered row]."""

    @property
    def content_frames(self) -> int:
        """Return how many the command names."""
        return self.frames


class AckMail(Command, tag=43, frozen=True):
    """Messages were received for good (or, with a delay, are wanted again later)."""

    subscription: int
    ranges: Ranges
    tracker: int = 0
    level: int = 0
    again_ms: Again = -1
    """-1: done; otherwise deliver again after this time."""

    def __post_init__(self) -> None:
        """Raise ValueError: the ranges are none."""
        check_ranges(self.ranges)


class PeekMail(Command, tag=44, frozen=True):
    """Look into a mailbox without consuming; answered by RESULT."""

    request: int
    mailbox: str
    after: int = -1
    limit: int = 100
    body_bytes: int = 0
    """Bytes of each body that are shown at most; 0: none."""


class PurgeMail(Command, tag=45, frozen=True):
    """Empty a mailbox; `confirm` repeats its name."""

    request: int
    mailbox: str
    confirm: str


class MailboxInfo(Command, tag=46, frozen=True):
    """Facts about one mailbox, or a page of them when the name ends in `*`."""

    request: int
    mailbox: str
    after: str = ""
    limit: int = 1000


class EditMailbox(Command, tag=47, frozen=True):
    """Create a mailbox or change its settings."""

    request: int
    mailbox: str
    settings: dict[str, Any]
    replace: bool = False
    """True: settings that are not named go back to their defaults."""


class RemoveMailbox(Command, tag=48, frozen=True):
    """Remove a mailbox with its messages; `confirm` repeats its name."""

    request: int
    mailbox: str
    confirm: str


# --- 50 to 59: services (feature SERVICES) ------------------------------------------


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
    settings: dict[str, Any] = {}
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
        """Raise ValueError: the ranges are none."""
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
    settings: dict[str, Any]
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


# --- 60 to 69: cursors, groups, the atomic step (features CURSORS, ATOMIC) ------------


class MoveCursor(Command, tag=60, frozen=True):
    """Move a named cursor of a stream to `next`; answered by CONFIRM (tracker)."""

    stream: str
    cursor: str
    next: Annotated[int, msgspec.Meta(ge=0)]
    tracker: int
    level: int = 0
    force: bool = False
    """True: the cursor may move back: an operator's reset."""
    uuid: bytes = b""
    """UUID of the stream that `next` is a position of; empty: not checked."""
    epoch: int = 0
    """Epoch in which `next` was the position; 0: not checked."""
    from_: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Position that the cursor must have until now; -1: any before `next`. Not checked when it is
    new."""


class CursorInfo(Command, tag=61, frozen=True):
    """Facts about one cursor, or a page of a stream's when the name is empty or ends in `*`.

    An empty stream asks for the cursors of all streams.
    """

    request: int
    stream: str
    cursor: str = ""
    after: str = ""
    limit: int = 1000


class RemoveCursor(Command, tag=62, frozen=True):
    """Forget a cursor and its pin."""

    request: int
    stream: str
    cursor: str


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
    settings: dict[str, Any] = {}
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
        """Raise ValueError: the ranges are none."""
        check_ranges(self.ranges)


class GroupInfo(Command, tag=65, frozen=True):
    """Lag, members and holdings of one group, or of a page when the name is empty or `*`."""

    request: int
    stream: str
    group: str = ""
    after: str = ""
    limit: int = 1000


class Atomic(Command, tag=66, frozen=True):
    """The next `count` commands of this message are one step: all of them or none.

    One CONFIRM or REFUSED answers the step by its tracker; the parts are not answered.
    """

    tracker: int
    count: Annotated[int, msgspec.Meta(ge=1)]
    level: int = 0
    key: Key = b""
    """Name of the step: when it is sent again with the same key, it is taken once."""


class EditCursor(Command, tag=67, frozen=True):
    """Create a cursor, or change its settings: whether it pins history, and how much at most."""

    request: int
    stream: str
    cursor: str
    settings: dict[str, Any] = {}
    start: Start = []
    """Start of a new cursor; empty: earliest."""
    replace: bool = False
    """True: settings that are not named go back to their defaults."""


class RemoveGroup(Command, tag=68, frozen=True):
    """Forget a group that has no members."""

    request: int
    stream: str
    group: str


class Trim(Command, tag=70, frozen=True):
    """Remove a stream's records before an offset; answered by CONFIRM (tracker)."""

    stream: str
    before: Annotated[int, msgspec.Meta(ge=0)]
    """Offset of the first record that stays."""
    tracker: int
    level: int = 0
    uuid: bytes = b""
    """UUID of the stream that `before` is a position of; empty: not checked."""
    epoch: int = 0
    """Epoch in which `before` was a position; 0: not checked."""


class PurgeSubjects(Command, tag=71, frozen=True):
    """Remove a stream's records of some subjects before an offset; answered by CONFIRM (tracker).

    The pattern is one on subjects: topic, prefix, regex, and what combines these.
    """

    stream: str
    pattern: Pattern
    before: Annotated[int, msgspec.Meta(ge=0)]
    """Offset from which on matching records stay."""
    tracker: int
    level: int = 0
    uuid: bytes = b""
    """UUID of the stream that `before` is a position of; empty: not checked."""
    epoch: int = 0
    """Epoch in which `before` was a position; 0: not checked."""


# --- 74 to 76: keys ---------------------------------------------------------------


class UpdateKey(WithContent, tag=74, frozen=True):
    """Append one record to a stream that keeps the last of each subject, on a condition.

    Owns one content frame, of one record. It takes its turn in the producer's sequence as a PUBLISH
    does.
    """

    stream: str
    tracker: int
    """The producer's number for this batch, ascending on the link; 0 with level none."""
    level: int = 0
    revision: int = 0
    """Offset that the newest record of the subject must have; 0: there must be no such key."""


class GetKey(Command, tag=75, frozen=True):
    """Newest record of one subject, answered once no power loss can take it back."""

    request: int
    stream: str
    subject: str


class ListKeys(Command, tag=76, frozen=True):
    """Keys that match a pattern, and their revisions, in the order of their names.

    RESULT: {"keys": [[subject, revision], ...], "after": name to go on after, "more"}.
    """

    request: int
    stream: str
    pattern: Pattern
    """The pattern; of a kind that asks for nothing but the subject."""
    after: str = ""
    """Keys after this one."""
    limit: int = 1000
    """At most so many entries; 0: as many as the broker allows."""


# --- 80 to 89: groups and services, further -------------------------------------------------


class EditGroup(Command, tag=80, frozen=True):
    """Change the settings of a group."""

    request: int
    stream: str
    group: str
    settings: dict[str, Any]
    replace: bool = False
    """True: settings that are not named go back to their defaults."""


class RequeueGroup(Command, tag=81, frozen=True):
    """Operator lets the records of a group's dead letters come again."""

    request: int
    stream: str
    group: str
    numbers: Numbers = []


class PeekRequests(Command, tag=82, frozen=True):
    """Look at the requests of a service without taking them; answered by RESULT."""

    request: int
    service: str
    after: int = -1
    limit: int = 100


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


# --- 85 to 86: typed streams (feature TYPED) ------------------------------------------


class StreamSchemas(Command, tag=85, frozen=True):
    """Ask for the versions of a stream's declared schema; answered by RESULT.

    RESULT: {"schemas": [[id, Arrow schema message], ...]}, oldest first; empty: it has none.
    """

    request: int
    stream: str


class Schema(Command, tag=86, frozen=True):
    """A subscription's stream has a new version of its schema; batches of it may follow."""

    subscription: int
    id: int
    schema: bytes
    """Arrow schema message."""


# --- 90 to 92, 100: administration of the broker ------------------------------------------


class ReloadConfig(Command, tag=90, frozen=True):
    """Have the broker read its configuration and its users anew; needs manage_users.

    RESULT: {"changes": [[key, outcome, why], ...], "more"}; see SPEC.md, section 4.7.
    """

    request: int


class ListUsers(Command, tag=91, frozen=True):
    """Ask for the users and permissions in force, and who may do something; needs manage_users."""

    request: int
    verb: str = ""
    """Verb of a permission; empty: nothing is asked of each user."""
    name: str = ""
    """Stream, mailbox or service that the verb is about."""
    after: str = ""
    """Users after this one, by name."""
    limit: int = 1000
    """At most so many entries."""


class ListNamespaces(Command, tag=100, frozen=True):
    """Ask for the namespaces and what each holds; a user of one is told of that one alone."""

    request: int
    after: str = ""
    """Namespaces after this one, by name."""
    limit: int = 1000
    """At most so many entries."""


# --- 93 to 99: open transactions (feature TRANSACTIONS) --------------------------------


class BeginTransaction(Command, tag=93, frozen=True):
    """Open a transaction: what is staged in it is appended to streams by its commit, or never."""

    transaction: Key
    """The client's name for it, one space for all clients: 16 random bytes."""
    tracker: int
    timeout_ms: Time = 0
    """Time after which the broker rolls it back; 0: the broker's default."""
    level: int = 0


class Stage(WithContent, tag=94, frozen=True):
    """Put one batch for a stream aside, in an open transaction; owns one content frame."""

    transaction: Key
    stream: str
    place: Time
    """Place of the batch among those of the transaction, whose records come in this order."""
    tracker: int
    level: int = 0


class CommitTransaction(Command, tag=95, frozen=True):
    """Have all that a transaction staged appended to its streams."""

    transaction: Key
    count: Time
    """Batches that were staged: a commit that would lack one is refused."""
    tracker: int
    level: int = 0


class RollBackTransaction(Command, tag=96, frozen=True):
    """End a transaction; what it staged is dropped, and no reader ever sees it."""

    transaction: Key
    tracker: int
    level: int = 0


class ListTransactions(Command, tag=97, frozen=True):
    """List the open transactions, and committed ones that are being appended, oldest first."""

    request: int
    after: Key = b""
    """Transactions after this one; empty: from the first."""
    limit: int = 1000


class EndTransaction(Command, tag=98, frozen=True):
    """Operator rolls an open transaction of any client back, or gives up what is put off of it.

    RESULT: {} after a rollback; else `given_up`: map of stream to records that were given up.
    """

    request: int
    transaction: Key
    give_up: bool = False
    """True: of a committed one, the records that a ring puts off are never appended."""


class AwaitTransaction(Command, tag=99, frozen=True):
    """Wait until all records of a committed transaction are in their streams, durably.

    RESULT: {}; at once where the broker has no such transaction (any more).
    """

    request: int
    transaction: Key


AnyCommand: TypeAlias = Union[  # noqa: UP007 - msgspec reads the union at run time
    Hello, Welcome, Ping, Pong, Bye, Refused, Result,
    Publish, Confirm, Subscribe, Subscribed, Unsubscribe, Ended, Credit, Deliver, Cover, Gap,
    Rewound, Mode, OpenProducer,
    CreateStream, EditStream, RemoveStream, StreamInfo, ListStreams, FindOffset, PlanRead,
    BrokerInfo, ListLinks, Kick,
    Send, OpenInbox, Mail, AckMail, PeekMail, PurgeMail, MailboxInfo, EditMailbox,
    RemoveMailbox,
    Request, Offer, Work, AckWork, Reply, CancelRequest, ServiceInfo, EditService, Requeue,
    RemoveService,
    MoveCursor, CursorInfo, RemoveCursor, JoinGroup, AckRecords, GroupInfo, Atomic,
    EditCursor, RemoveGroup, Trim, PurgeSubjects, EditGroup, RequeueGroup, PeekRequests,
    ResetGroup, UpdateKey, GetKey, ListKeys, StreamSchemas, Schema, ReloadConfig, ListUsers,
    ListNamespaces,
    BeginTransaction, Stage, CommitTransaction, RollBackTransaction, ListTransactions,
    EndTransaction, AwaitTransaction,
]  # fmt: skip

STEP_PARTS: tuple[type[Command], ...] = (
    Publish, Send, Request, Reply, AckMail, AckWork, AckRecords, MoveCursor, Trim, PurgeSubjects,
    BeginTransaction, Stage, CommitTransaction, RollBackTransaction,
)  # fmt: skip
"""Commands that an ATOMIC may announce, each with tracker 0; ACK_WORK only with the states 3 to
5."""
