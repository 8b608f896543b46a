"""The tables that the change log makes.

Owns their rows. `Tables` (streams, producers) are small and are written at each segment's start;
`Queues` have a checkpoint of their own, whose maps may load a row when it is asked for. The rule:
only `apply` changes a table (applying.py); a row that is an array (array_like) is stored as it
stands (store/forms.py), so that fields are appended with a default, and none moves. Source:
docs/design.md (Journal; Queues and the checkpoint).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias

import msgspec

from malamute_py.changelog.records import (
    Holder,
    Origin,
    Range,
    RequestPut,
    Run,
    Tries,
)
from malamute_py.changelog.settings import (
    CursorSettings,
    GroupSettings,
    MailboxSettings,
    ServiceSettings,
    StreamSettings,
)
from malamute_py.changelog.shares import Shares

KEYS_MAX: Final = 100_000
"""Keys that are remembered in all; beyond it the identity that has most loses its oldest."""
ENDS_MAX: Final = 4_096
"""Ends of transactions that are remembered; beyond it the oldest is forgotten."""
ANONYMOUS: Final = "~"
"""Owner of the keys of all senders without an identity, whose names begin with this; they share one
share."""
PurgeMark: TypeAlias = tuple[bytes, int]
"""A pattern, as StreamPurged has it, and the offset before which matching records are purged."""


class StreamRow(msgspec.Struct):
    """The durable facts of one stream."""

    number: int
    name: str
    uuid: bytes
    ring: str
    settings: StreamSettings
    by: str
    """Owner of what is made here, on whose quotas it counts."""
    created_ms: int
    trimmed: int = 0
    """Offset before which all records were removed by callers; 0: none were."""
    purges: list[PurgeMark] = []
    generation: int = 1
    """Rises with each stream that is made under the same name."""


class ProducerRow(msgspec.Struct):
    """The durable facts of one producer."""

    id: int
    identity: str
    epoch: int


class Tables(msgspec.Struct):
    """The tables of streams and producers."""

    streams: dict[int, StreamRow] = {}
    producers: dict[int, ProducerRow] = {}
    """Producers in the order of their opening."""
    next_number: int = 1
    """Number of the next stream; 0 is the change log itself."""
    names: dict[str, int] = {}
    generations: dict[str, int] = {}
    """Name of a removed stream -> its generation, the newest last."""
    generations_before: int = 0
    """The highest generation of the names that are in no table any more."""


class MailboxRow(msgspec.Struct, array_like=True):
    """The durable facts of one mailbox."""

    number: int
    name: str
    settings: MailboxSettings
    by: str
    """Owner of what is made here, on whose quotas it counts."""
    created_ms: int


class ServiceRow(msgspec.Struct, array_like=True):
    """The durable facts of one service queue."""

    number: int
    name: str
    settings: ServiceSettings
    by: str
    """Owner of what is made here, on whose quotas it counts."""
    created_ms: int


class Rare(msgspec.Struct, gc=False):
    """Facts that only few messages have, apart from MessageRow to keep that small."""

    expiries: list[int] = []
    about: list[Run] = []
    last: bool = False
    why: list[tuple[bytes, str]] = []
    """Dead letters and notices only: (rows as a bitmap, why), the newest last."""
    request: RequestPut | None = None
    """Dead letters only: the request that the message was."""
    again: list[tuple[int, bytes]] = []
    """(time, rows as a bitmap) of rows that were given back apart from the others, not to be handed
    out before the time."""
    tries: list[tuple[int, bytes]] = []
    """(attempts, rows as a bitmap) of rows that were given back apart from the others."""
    asked_by: str = ""
    """Replies and notices: the sender of the request; dead letters of a group: its creator."""
    origin: Origin | None = None
    """Dead letters of a group only: the records that they were."""


class MessageRow(msgspec.Struct, gc=False):
    """The messages that one put left in a mailbox; the mail stream has their bodies."""

    base: int
    count: int
    size: int
    sender: str
    at_ms: int
    left: int
    """Bitmap of the rows that have not left the mailbox."""
    priority: int = 0
    not_before_ms: int = 0
    """Time before which the rows are not handed out; 0: at once."""
    expires_at_ms: int = 0
    attempts: int = 0
    """How often a recipient gave the rows back."""
    rare: Rare | None = None
    pause_ms: int = 0
    """The longest pause that a recipient asked for."""

    @property
    def weighs_on(self) -> str:
        """Return on whose quota of mail it counts: the sender's, or the requester's of a reply."""
        rare = self.rare
        return self.sender if rare is None else rare.asked_by or self.sender


class Hold(msgspec.Struct, gc=False):
    """Requests that one worker was handed together."""

    holder: str
    rows: int
    at_ms: int
    lease_ms: int
    received: int = 0
    """Bitmap of the rows that the worker confirmed to have received."""


class RequestRow(msgspec.Struct, gc=False):
    """The requests that one put left in a service queue."""

    put: RequestPut
    left: int
    """Bitmap of the rows that have not left: waiting, or held by a worker."""
    waiting: int
    holds: list[Hold] = []
    attempts: dict[int, int] = {}
    """Attempts -> bitmap of the rows with so many; rows that were never handed out are in none."""
    delayed: dict[int, int] = {}
    """Time -> bitmap of the waiting rows that are not handed out before it."""
    pause_ms: int = 0
    """The longest pause, or delay, that was recorded for any of the rows."""


class CursorRow(msgspec.Struct, array_like=True):
    """The durable facts of one cursor."""

    stream: int
    name: str
    next: int
    settings: CursorSettings
    moved_ms: int
    by: str = ""
    """Owner of what is made here, on whose quotas it counts."""
    epoch: int = 0
    """Epoch of the log in which `next` was a position of the stream; 0: not known."""


class GroupRow(msgspec.Struct, array_like=True):
    """The durable facts of one group: the records before `next`, and those in `done`, are done."""

    stream: int
    name: str
    kind: str
    pattern: bytes
    next: int
    done: list[Range] = []
    """Ranges of offsets after `next`: ascending, with a gap between each two."""
    moved_ms: int = 0
    by: str = ""
    """Owner of what is made here, on whose quotas it counts."""
    epoch: int = 0
    """Epoch of the log in which these were positions of the stream; 0: not known."""
    durable: bool = False
    """True: members of the group get only records that no power loss can take back."""
    settings: GroupSettings = GroupSettings()
    tries: list[Tries] = []
    """Attempts of records that are not done: ascending, without overlap."""
    holder: Holder | None = None
    """Exclusive groups only: the member that has its place; None: no member has."""


class KeyRow(msgspec.Struct, gc=False):
    """The place of a batch that was published under a key; base -1: the key was a step's."""

    base: int
    count: int
    at_ms: int
    use: int = 0
    """Number of the mailbox or service that the batch was put into; of an answer or a step, minus
    the number of its command; 0: not known."""
    digest: int = 0
    """Digest of the contents; 0: there are none, or it is not known."""


class TransactionRow(msgspec.Struct, array_like=True, gc=False):
    """The durable facts of one transaction that is open, or committed and not yet appended."""

    id: bytes
    holder: str
    by: str
    """Owner of what is made here, on whose quotas it counts."""
    at_ms: int
    timeout_ms: int
    committed_ms: int = 0
    """Time of the commit; 0: it is open."""


class StagedRow(msgspec.Struct, array_like=True, gc=False):
    """One batch that a transaction staged; the mail stream has it."""

    base: int
    id: bytes
    place: int
    stream: int
    count: int
    size: int
    at_ms: int


class EndRow(msgspec.Struct, array_like=True, gc=False):
    """How a transaction ended that did not end as its client wanted."""

    id: bytes
    why: str
    """As TransactionEnded has it: timed_out, ended or given_up."""
    at_ms: int


Key: TypeAlias = tuple[str, bytes]
"""Sender and key of a batch or a step."""


class Remembering(MutableMapping[Key, KeyRow]):
    """Keys of senders, each of whom has a share: the common part of memory and a table."""

    _shares: Shares[Key] | None = None

    def remember(self, key: Key, row: KeyRow, most: int) -> None:
        """Remember a key; when there are `most`, one owner's oldest key is forgotten.

        The owner is the one that has most of them: see Shares.
        """
        shares = self._shares
        if shares is None:  # The first call after a start counts the keys that were loaded.
            shares = self._shares = Shares()
            for known in self:
                shares.add(owner_of(known), known)
        if shares.total >= most and key not in self:
            self[key] = row
            del self[shares.swap_in(owner_of(key), key)]
            return
        self[key] = row
        shares.add(owner_of(key), key)


def owner_of(key: Key) -> str:
    """Return the owner in whose share a key counts; clients without an identity share one."""
    sender, _ = key
    return ANONYMOUS if sender.startswith(ANONYMOUS) else sender


class Keys(OrderedDict[Key, KeyRow], Remembering):
    """Keys in memory. An OrderedDict, as a dict walks past all entries that were deleted."""


class Queues(msgspec.Struct):
    """Tables of mailboxes, services, cursors and groups, and of the keys that were taken."""

    mailboxes: MutableMapping[int, MailboxRow] = {}
    services: MutableMapping[int, ServiceRow] = {}
    messages: MutableMapping[tuple[int, int], MessageRow] = {}
    """(mailbox, number of the first message) -> messages that a put left there, in the order of the
    log."""
    requests: MutableMapping[int, RequestRow] = {}
    """Number of the first request -> requests that a put left, in the order of the log."""
    cursors: MutableMapping[tuple[int, str], CursorRow] = {}
    groups: MutableMapping[tuple[int, str], GroupRow] = {}
    keys: Remembering = msgspec.field(default_factory=Keys)
    """(sender, key) -> place of the batch; the oldest first."""
    transactions: MutableMapping[bytes, TransactionRow] = {}
    staged: MutableMapping[int, StagedRow] = {}
    """Number of the first record -> batch that a transaction staged, in the order of the log."""
    ends: MutableMapping[bytes, EndRow] = {}
    """Transaction -> its end, if that was not what its client wanted; the oldest first."""
    next_number: int = 1
    """Number of the next mailbox or service."""

    def remember(self, sender: str, key: bytes, row: KeyRow) -> None:
        """Remember the key of a batch, an answer or a step: sent again, it is taken once."""
        self.keys.remember((sender, key), row, KEYS_MAX)

    def note_end(self, transaction: bytes, why: str, at_ms: int) -> None:
        """Remember that a transaction did not end as its client wanted, to tell it when it asks."""
        self.ends.pop(transaction, None)  # So that it becomes the newest: the oldest is forgotten.
        self.ends[transaction] = EndRow(transaction, why, at_ms)
        if len(self.ends) > ENDS_MAX:
            del self.ends[next(iter(self.ends))]


def with_purge(marks: Iterable[PurgeMark], mark: PurgeMark, first: int) -> list[PurgeMark]:
    """Return the marks of a stream and one more, without those that hide nothing any more.

    A mark takes the records before its offset that its pattern matches; of two marks with the same
    pattern the later one is enough. first: the first offset of the stream.
    """
    added, _ = mark
    before = max(end for pattern, end in (*marks, mark) if pattern == added)
    left = [(pattern, end) for pattern, end in marks if end > first and pattern != added]
    return [*left, (added, before)]


Effects: TypeAlias = dict[type, Callable[[Tables, Queues, Any], None]]
"""Kind of record -> what it changes in the tables."""
