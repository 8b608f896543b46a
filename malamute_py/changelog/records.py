"""The records of the change log: every durable change, as plain data.

Owns their types and their MessagePack form: arrays that begin with the record's name. The rules: a
record says all that its effect depends on, decisions of timers included, so that `apply`
needs no clock, no randomness and no link; holders are named by identity; numbers are given by
record and never used again; a field, once released, keeps its meaning, and new ones are appended
with a default. Source: docs/design.md (Journal; Queues and the checkpoint).
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from malamute_py.changelog.settings import (
    CursorSettings,
    GroupSettings,
    MailboxSettings,
    ServiceSettings,
    StreamSettings,
)

Rows: TypeAlias = tuple[int, bytes]
"""Messages or requests of one put: the number of the first one, and a bitmap of the rows meant (LSB
first, little-endian). An empty bitmap means all rows that are left."""

Run: TypeAlias = tuple[bytes, int, int]
"""Requests that replies answer: the key of the request's batch, the row of the first, how many."""

Range: TypeAlias = tuple[int, int]
"""Offsets from the first number up to, but without, the second."""

Tries: TypeAlias = tuple[int, int, int, str]
"""Attempts of records: (first offset, offset after the last, attempts, why the last one ended)."""

WITHDRAWN: Final = "withdrawn"
"""Reason of requests that come back because their worker ended its offer before it began them."""
RELEASED: Final = "released"
"""Reason of requests that come back because their worker stopped before it finished them."""


class Origin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The records of a group that became dead letters together."""

    number: int
    """Number of the stream."""
    stream: str
    group: str
    epoch: int
    """Epoch of the log in which the offsets were positions of the stream."""
    attempts: int
    offsets: list[int]
    """Offset of the record in each row of the put."""
    slots: list[int] = []
    """Keyed groups only: the slot of each of these records."""
    at_ms: int = 0
    """When the records were appended; 0: logs of earlier versions do not tell."""
    expiries: list[int] = []
    """When each of these records expires (0: never); empty: none does."""


class Holder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The member that has the place of an exclusive group, and for how long it is kept for it."""

    identity: str
    session: bytes
    """Session of the member's link; it tells one without an identity from others."""
    hold_ms: int
    """Time for which the place is kept when the member's link is lost, or the broker begins."""


# --- streams and producers ------------------------------------------------------------


class StreamCreated(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="stream_created"):
    """A stream exists from here on, in `ring`."""

    number: int
    name: str
    uuid: bytes
    ring: str
    settings: StreamSettings
    by: str
    at_ms: int


class StreamEdited(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="stream_edited"):
    """A stream has these settings from here on; they do not take away its body kind."""

    number: int
    settings: StreamSettings
    at_ms: int


class StreamRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="stream_removed"):
    """A stream and its records are gone; its number stays used."""

    number: int
    at_ms: int


class StreamTrimmed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="stream_trimmed"):
    """A stream's records before an offset are gone for ever."""

    number: int
    before: int
    at_ms: int
    by: str


class StreamPurged(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="stream_purged"):
    """A stream's records before an offset that a pattern on subjects matches are gone for ever."""

    number: int
    pattern: bytes
    """MessagePack of the pattern in canonical wire form."""
    before: int
    first: int
    """First offset of the stream: purges before it have nothing left to hide."""
    at_ms: int
    by: str


class ProducerOpened(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="producer_opened"):
    """A producer id belongs to an identity, and older epochs of it are fenced."""

    id: int
    identity: str
    epoch: int
    """Epoch of the producer. A known id keeps its epoch or takes a higher one; `fence` raises it by
    one."""
    fence: bool = False
    """True: the producer's epoch is one above the epoch that it had before this record."""


class ProducersForgotten(
    msgspec.Struct, frozen=True, array_like=True, gc=False, tag="producers_forgotten"
):
    """Producers are forgotten: the table was full, and these were the longest unused."""

    ids: list[int]


# --- mailboxes ------------------------------------------------------------------------


class MailboxSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="mailbox_set"):
    """A mailbox exists with these settings from here on."""

    number: int
    name: str
    settings: MailboxSettings
    by: str
    at_ms: int


class MailboxRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="mailbox_removed"):
    """A mailbox and what lies in it are gone; its number stays used."""

    number: int
    at_ms: int


class MailPut(msgspec.Struct, array_like=True, gc=False, tag="mail_put"):
    """Messages [base, base + count) lie in a mailbox; the mail stream has their bodies.

    Not frozen: `base` is known when the bundle is handed to the journal.
    """

    mailbox: int
    base: int
    count: int
    size: int
    """Bytes of the batch, stamp included."""
    sender: str
    at_ms: int
    key: bytes = b""
    priority: int = 0
    deliver_at_ms: int = 0
    expires_at_ms: int = 0
    """The earliest expiry of a row; 0: no row expires."""
    expiries: list[int] = []
    """One expiry for each row, when they differ; 0: the row never expires."""
    about: list[Run] = []
    """Replies only: the request that each row answers, in order."""
    last: bool = False
    why: str = ""
    """Notices only: why there will be no answer to the request."""
    asked_by: str = ""
    """Replies and notices: the sender of the request, whose share of mail they take. Dead letters
    of a group: its creator."""
    origin: Origin | None = None
    """Dead letters of a group only: the records that they were."""
    rows: bytes = b""
    """Bitmap of the rows that are messages; empty: all rows."""
    digest: int = 0
    """Digest of the content, by which `key` is compared; 0: there is no key, or an earlier version
    did not record it."""


class MailDone(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="mail_done"):
    """Messages have left a mailbox. why: acknowledged, expired, purged, removed or lost."""

    mailbox: int
    rows: list[Rows]
    why: str = "acknowledged"


class MailAgain(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="mail_again"):
    """A recipient gives messages back until a time; each of them has one attempt more."""

    mailbox: int
    rows: list[Rows]
    not_before_ms: int = 0
    pause_ms: int = 0
    """Length of the pause that ends at not_before_ms; 0: an earlier version did not record it."""


# --- services ----------------------------------------------------------------------------


class ServiceSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="service_set"):
    """A service queue exists with these settings from here on."""

    number: int
    name: str
    settings: ServiceSettings
    by: str
    at_ms: int


class ServiceRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="service_removed"):
    """A service queue and what lies in it are gone; its number stays used."""

    number: int
    at_ms: int


class RequestPut(msgspec.Struct, array_like=True, gc=False, tag="request_put"):
    """Requests [base, base + count) wait in a service queue; the mail stream has their bodies.

    Not frozen: `base` is known when the bundle is handed to the journal.
    """

    service: int
    base: int
    count: int
    size: int
    sender: str
    reply_to: str
    """Name of the mailbox that gets the replies; names of temporary mailboxes begin with `~`."""
    at_ms: int
    deadline_ms: int = 0
    key: bytes = b""
    subjects: list[str] = []
    """Subjects of the requests: one for all rows, or one for each row."""
    delay_ms: int = 0
    """Time from `at_ms` on before which the requests are not handed out."""
    priority: int = 0
    """Requests of a higher one are handed out before those of a lower one."""
    digest: int = 0
    """Digest of the content, by which `key` is compared; 0: there is no key, or an earlier version
    did not record it."""


class WorkTaken(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="work_taken"):
    """Requests were handed to a worker; each of them has one attempt more."""

    service: int
    rows: list[Rows]
    holder: str
    """Identity of the worker, or `~` and its session in hex when it has none."""
    at_ms: int
    lease_ms: int


class WorkReceived(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="work_received"):
    """A worker confirmed that it has received requests."""

    service: int
    rows: list[Rows]


class WorkReturned(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="work_returned"):
    """Requests that a worker held wait in their queue again.

    why: died, lease, returned, fenced, requeued, withdrawn or released. Withdrawn: the worker ended
    its offer in order, and requests that it had not confirmed to have received count no attempt.
    Released: the worker stopped, and none of the requests counts an attempt.
    """

    service: int
    rows: list[Rows]
    why: str
    not_before_ms: int = 0
    pause_ms: int = 0
    """Length of the pause that ends at not_before_ms; 0: an earlier version did not record it."""


class RequestDone(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="request_done"):
    """Requests have left a service queue. why: completed, cancelled, expired or removed."""

    service: int
    rows: list[Rows]
    why: str = "completed"


class RequestDead(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="request_dead"):
    """Requests became messages of a dead-letter mailbox, under the same numbers."""

    service: int
    rows: list[Rows]
    mailbox: int
    why: str
    at_ms: int


class RequestRevived(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="request_revived"):
    """Dead letters wait in their service queue again; their attempts count from 0."""

    mailbox: int
    service: int
    rows: list[Rows]
    at_ms: int


# --- cursors and groups ---------------------------------------------------------------------


class CursorSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="cursor_set"):
    """A cursor stands at `next` from here on. why: created, moved, reset or clamped."""

    stream: int
    name: str
    next: int
    at_ms: int
    settings: CursorSettings | None = None
    """Settings of the cursor; None: they stay as they were."""
    why: str = "moved"
    by: str = ""
    epoch: int = 0
    """Epoch of the log in which `next` was a position of the stream; 0: not known."""


class CursorRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="cursor_removed"):
    """A cursor was removed."""

    stream: int
    name: str


class GroupSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="group_set"):
    """A group stands at `next`, and no record after it is done. why: created, reset or clamped."""

    stream: int
    name: str
    kind: str
    """`shared`, `exclusive` or `keyed`."""
    pattern: bytes
    """MessagePack of the pattern in wire form."""
    next: int
    at_ms: int
    why: str = "created"
    by: str = ""
    epoch: int = 0
    """Epoch of the log in which `next` was a position of the stream; 0: not known."""
    durable: bool = False
    """True: members of the group get only records that no power loss can take back."""
    settings: GroupSettings = GroupSettings()
    tries: list[Tries] = []
    """Attempts of records from `next` on, ascending."""


class GroupEdited(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="group_edited"):
    """A group has these settings from here on."""

    stream: int
    name: str
    settings: GroupSettings
    at_ms: int


class GroupHeld(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="group_held"):
    """The place of an exclusive group is a member's from here on; None: it is no member's."""

    stream: int
    name: str
    holder: Holder | None


class GroupReturned(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="group_returned"):
    """Records that a member held wait in their group again; each of them has one attempt more.

    why: `died` (the member's link was lost), `lease` (the member was silent for too long),
    `returned` (it wanted them again) or `failed` (it gave them up: they become dead letters),
    perhaps with `: ` and the member's words.
    """

    stream: int
    name: str
    ranges: list[Range]
    why: str
    epoch: int
    """Epoch of the log in which these were offsets of the stream."""


class GroupRevived(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="group_revived"):
    """Dead letters have left their mailbox, and their records are to be done again in their group.

    The attempts of these records count from 0.
    """

    stream: int
    name: str
    mailbox: int
    rows: list[Rows]
    ranges: list[Range]
    epoch: int
    """Epoch of the log in which the ranges were offsets of the stream."""


class GroupDone(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="group_done"):
    """Offsets that a group needs no more: acknowledged, not selected, expired or gone."""

    stream: int
    name: str
    ranges: list[Range]
    epoch: int = 0
    """Epoch of the log in which these were offsets of the stream; 0: not known."""


class GroupRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="group_removed"):
    """A group was removed."""

    stream: int
    name: str


# --- steps ---------------------------------------------------------------------------------


class StepTaken(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="step_taken"):
    """An answer or atomic step with this key was taken, in the bundle that this record lies in."""

    sender: str
    key: bytes
    at_ms: int
    command: int = 0
    """Number of the command that the key names: ATOMIC, REPLY or ACK_WORK; 0: an earlier version
    did not record it."""
    digest: int = 0
    """Digest of the contents; 0: there are none, or an earlier version did not record it."""


# --- transactions ---------------------------------------------------------------------------


class TransactionBegun(
    msgspec.Struct, frozen=True, array_like=True, gc=False, tag="transaction_begun"
):
    """A transaction is open from here on."""

    id: bytes
    holder: str
    """Identity of the client, or `~` and its session in hex when it has none."""
    by: str
    at_ms: int
    timeout_ms: int


class TransactionStaged(msgspec.Struct, array_like=True, gc=False, tag="transaction_staged"):
    """A batch for a stream lies aside: the mail stream has it, at `base`.

    Not frozen: `base` is known when the bundle is handed to the journal.
    """

    id: bytes
    place: int
    """Place among the batches of the transaction, whose records come in this order."""
    stream: int
    base: int
    count: int
    size: int
    """Bytes of the batch, stamp included."""
    at_ms: int


class TransactionCommitted(
    msgspec.Struct, frozen=True, array_like=True, gc=False, tag="transaction_committed"
):
    """All that a transaction staged is to be appended to its streams, whatever happens."""

    id: bytes
    at_ms: int


class TransactionMoved(
    msgspec.Struct, frozen=True, array_like=True, gc=False, tag="transaction_moved"
):
    """Staged batches are in their streams, or were given up: they are staged no more.

    Those for ring main lie in the bundle that this record lies in.
    """

    id: bytes
    bases: list[int]
    given_up_ms: int = 0
    """Time at which an operator gave up some of them; 0: none were."""


class TransactionEnded(
    msgspec.Struct, frozen=True, array_like=True, gc=False, tag="transaction_ended"
):
    """A transaction is over. why: committed, rolled_back, timed_out, ended or given_up."""

    id: bytes
    bases: list[int]
    """Batches that were staged until now: in the bundle that this record lies in, if it is
    committed; else dropped."""
    why: str
    at_ms: int


Change: TypeAlias = (
    StreamCreated | StreamEdited | StreamRemoved | StreamTrimmed | StreamPurged | ProducerOpened
    | ProducersForgotten
    | MailboxSet | MailboxRemoved | MailPut | MailDone | MailAgain
    | ServiceSet | ServiceRemoved | RequestPut | WorkTaken | WorkReceived | WorkReturned
    | RequestDone | RequestDead | RequestRevived
    | CursorSet | CursorRemoved
    | GroupSet | GroupEdited | GroupHeld | GroupReturned | GroupRevived | GroupDone | GroupRemoved
    | StepTaken
    | TransactionBegun | TransactionStaged | TransactionCommitted | TransactionMoved
    | TransactionEnded
)  # fmt: skip

_CHANGE: msgspec.msgpack.Decoder[Change] = msgspec.msgpack.Decoder(Change)
_ENCODER = msgspec.msgpack.Encoder()


def encode_change(change: Change) -> bytes:
    """Encode one record of the log: a MessagePack array that begins with the record's name."""
    return _ENCODER.encode(change)


def decode_change(body: bytes) -> Change:
    """Decode one record of the log; raises msgspec.MsgspecError when the bytes are none."""
    return _CHANGE.decode(body)


def mask_of(rows: bytes, left: int) -> int:
    """Return the rows that a bitmap names among those left; an empty bitmap names all of them."""
    return int.from_bytes(rows, "little") & left if rows else left


def rows_of(mask: int) -> bytes:
    """Return a bitmap in the form that records have."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")
