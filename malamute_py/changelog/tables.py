"""The tables that the change log makes, and the one function that applies a record to them.

Owns the rows and `apply`. The rules: `apply` sees no clock, no randomness and no link, so every
replay and every replica reaches the same tables; each record is applied once, in the order of the
log; a record about something that is not there changes nothing. `Tables` (streams, producers) are
small and are written at each segment's start; `Queues` have a checkpoint of their own, whose maps
may load a row when it is asked for. Source: docs/design.md (Journal; Queues and the checkpoint).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias

import msgspec

from malamute_py.changelog.records import (
    Change,
    CursorRemoved,
    CursorSet,
    GroupDone,
    GroupEdited,
    GroupHeld,
    GroupRemoved,
    GroupReturned,
    GroupRevived,
    GroupSet,
    Holder,
    MailAgain,
    MailboxRemoved,
    MailboxSet,
    MailDone,
    MailPut,
    Origin,
    ProducerOpened,
    ProducersForgotten,
    Range,
    RequestDead,
    RequestDone,
    RequestPut,
    RequestRevived,
    Run,
    ServiceRemoved,
    ServiceSet,
    StepTaken,
    StreamCreated,
    StreamEdited,
    StreamPurged,
    StreamRemoved,
    StreamTrimmed,
    TransactionBegun,
    TransactionCommitted,
    TransactionEnded,
    TransactionMoved,
    TransactionStaged,
    Tries,
    WorkReceived,
    WorkReturned,
    WorkTaken,
)
from malamute_py.changelog.settings import (
    CursorSettings,
    GroupSettings,
    MailboxSettings,
    ServiceSettings,
    StreamSettings,
)
from malamute_py.changelog.shares import Shares

WITHDRAWN: Final = "withdrawn"
"""Reason of requests that come back because their worker ended its offer before it began them."""
RELEASED: Final = "released"
"""Reason of requests that come back because their worker stopped before it finished them."""
GENERATIONS_MAX: Final = 1_000
"""Names of removed streams whose generations are remembered one by one: each segment of ring main
begins with them."""
KEYS_MAX: Final = 100_000
"""Keys that are remembered in all; beyond it the identity that has most loses its oldest."""
ANONYMOUS: Final = "~"
"""Owner of the keys of all senders without an identity, whose names begin with this; they share one
share."""


# --- the rows ----------------------------------------------------------------------------


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


class MailboxRow(msgspec.Struct):
    """The durable facts of one mailbox."""

    number: int
    name: str
    settings: MailboxSettings
    by: str
    created_ms: int


class ServiceRow(msgspec.Struct):
    """The durable facts of one service queue."""

    number: int
    name: str
    settings: ServiceSettings
    by: str
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
        """Return whose share of mail it takes: the sender's, or the requester's (reply, notice)."""
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


class CursorRow(msgspec.Struct):
    """The durable facts of one cursor."""

    stream: int
    name: str
    next: int
    settings: CursorSettings
    moved_ms: int
    by: str = ""
    epoch: int = 0
    """Epoch of the log in which `next` was a position of the stream; 0: not known."""


class GroupRow(msgspec.Struct):
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


class TransactionRow(msgspec.Struct, gc=False):
    """The durable facts of one transaction that is open, or committed and not yet appended."""

    id: bytes
    holder: str
    by: str
    at_ms: int
    timeout_ms: int
    committed_ms: int = 0
    """Time of the commit; 0: it is open."""


class StagedRow(msgspec.Struct, gc=False):
    """One batch that a transaction staged; the mail stream has it."""

    base: int
    id: bytes
    place: int
    stream: int
    count: int
    size: int
    at_ms: int


Key: TypeAlias = tuple[str, bytes]
"""Sender and key of a batch or a step."""


class Remembering(MutableMapping[Key, KeyRow]):
    """Keys of senders, each of whom has a share: the common part of memory and a table."""

    _shares: Shares[Key] | None = None

    def remember(self, key: Key, row: KeyRow, most: int) -> None:
        """Remember a key; when there are `most`, one owner's oldest key is forgotten."""
        shares = self._shares
        if shares is None:
            shares = self._shares = Shares()
            for known in self:
                shares.add(owner_of(known), known)
        if shares.total >= most and key not in self:
            self[key] = row
            del self[shares.turn(owner_of(key), key)]
            return
        self[key] = row
        shares.add(owner_of(key), key)


def owner_of(key: Key) -> str:
    """Return the owner in whose share a key counts."""
    sender = key[0]
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
    next_number: int = 1
    """Number of the next mailbox or service."""

    def remember(self, sender: str, key: bytes, row: KeyRow) -> None:
        """Remember the key of a batch, an answer or a step."""
        self.keys.remember((sender, key), row, KEYS_MAX)


# --- applying ------------------------------------------------------------------------------


def apply(tables: Tables, queues: Queues, change: Change) -> None:
    """Let one record of the log take effect."""
    _EFFECTS[type(change)](tables, queues, change)


TABLE_CHANGES: Final = (
    StreamCreated, StreamEdited, StreamRemoved, StreamTrimmed, StreamPurged,
    ProducerOpened, ProducersForgotten,
)  # fmt: skip
"""Records that concern Tables only; all others concern Queues only."""


def mask_of(rows: bytes, left: int) -> int:
    """Return the rows that a bitmap names among those left; an empty bitmap names all of them."""
    return int.from_bytes(rows, "little") & left if rows else left


def rows_of(mask: int) -> bytes:
    """Return a bitmap in the form that records have."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def _stream_created(tables: Tables, queues: Queues, change: StreamCreated) -> None:
    if change.number < tables.next_number:
        return
    tables.next_number = change.number + 1
    tables.streams[change.number] = StreamRow(
        change.number, change.name, change.uuid, change.ring,
        change.settings, change.by, change.at_ms,
        generation=tables.generations.pop(change.name, tables.generations_before) + 1,
    )  # fmt: skip
    tables.names[change.name] = change.number


def _stream_edited(tables: Tables, queues: Queues, change: StreamEdited) -> None:
    row = tables.streams.get(change.number)
    if row is not None:
        row.settings = change.settings


def _stream_removed(tables: Tables, queues: Queues, change: StreamRemoved) -> None:
    row = tables.streams.pop(change.number, None)
    if row is not None and tables.names.get(row.name) == change.number:
        del tables.names[row.name]
        generations = tables.generations
        generations[row.name] = row.generation
        if len(generations) > GENERATIONS_MAX:
            # A stream of a name that is not remembered begins above all of those.
            forgotten = generations.pop(next(iter(generations)))
            tables.generations_before = max(tables.generations_before, forgotten)


def _stream_trimmed(tables: Tables, queues: Queues, change: StreamTrimmed) -> None:
    row = tables.streams.get(change.number)
    if row is not None:
        row.trimmed = max(row.trimmed, change.before)
        row.purges = [mark for mark in row.purges if mark[1] > row.trimmed]


def _stream_purged(tables: Tables, queues: Queues, change: StreamPurged) -> None:
    row = tables.streams.get(change.number)
    if row is not None:
        first = max(change.first, row.trimmed)
        row.purges = with_purge(row.purges, (change.pattern, change.before), first)


def with_purge(marks: Iterable[PurgeMark], mark: PurgeMark, first: int) -> list[PurgeMark]:
    """Return the marks of a stream and one more, without those that hide nothing any more.

    first: the first offset of the stream.
    """
    before = max(each for pattern, each in (*marks, mark) if pattern == mark[0])
    left = [each for each in marks if each[1] > first and each[0] != mark[0]]
    return [*left, (mark[0], before)]


def _producer_opened(tables: Tables, queues: Queues, change: ProducerOpened) -> None:
    known = tables.producers.get(change.id)
    if change.fence:
        # Two openings that are under way at once get an epoch each.
        if known is not None:
            known.epoch += 1
    elif known is None or known.epoch <= change.epoch:
        tables.producers[change.id] = ProducerRow(change.id, change.identity, change.epoch)


def _producers_forgotten(tables: Tables, queues: Queues, change: ProducersForgotten) -> None:
    for producer in change.ids:
        tables.producers.pop(producer, None)


def _mailbox_set(tables: Tables, queues: Queues, change: MailboxSet) -> None:
    known = queues.mailboxes.get(change.number)
    by, since = (change.by, change.at_ms) if known is None else (known.by, known.created_ms)
    queues.mailboxes[change.number] = MailboxRow(
        change.number, change.name, change.settings, by, since
    )
    queues.next_number = max(queues.next_number, change.number + 1)


def _mailbox_removed(tables: Tables, queues: Queues, change: MailboxRemoved) -> None:
    queues.mailboxes.pop(change.number, None)


def _mail_put(tables: Tables, queues: Queues, put: MailPut) -> None:
    """Enter messages that were put together as one row, and their key."""
    rare = None
    every = (1 << put.count) - 1
    if put.expiries or put.about or put.last or put.why or put.asked_by:
        why = [(rows_of(every), put.why)] if put.why else []
        rare = Rare(
            put.expiries, put.about, put.last, why, asked_by=put.asked_by, origin=put.origin
        )
    queues.messages[put.mailbox, put.base] = MessageRow(
        put.base, put.count, put.size, put.sender, put.at_ms, mask_of(put.rows, every),
        put.priority, put.deliver_at_ms, put.expires_at_ms, 0, rare,
    )  # fmt: skip
    if put.key:
        row = KeyRow(put.base, put.count, put.at_ms, put.mailbox, put.digest)
        queues.remember(put.sender, put.key, row)


def _mail_done(tables: Tables, queues: Queues, change: MailDone) -> None:
    for base, rows in change.rows:
        place = change.mailbox, base
        row = queues.messages.get(place)
        if row is None:
            continue
        left = row.left & ~mask_of(rows, row.left)
        if left:
            queues.messages[place] = _with_left(row, left)
        else:
            del queues.messages[place]


def _with_left(row: MessageRow, left: int) -> MessageRow:
    row.left = left
    return row


def _mail_again(tables: Tables, queues: Queues, change: MailAgain) -> None:
    """Note one attempt more of messages, and when they are delivered again."""
    for base, rows in change.rows:
        place = change.mailbox, base
        row = queues.messages.get(place)
        if row is None:
            continue
        mask = mask_of(rows, row.left)
        row.pause_ms = max(row.pause_ms, change.pause_ms)
        if mask == row.left and (row.rare is None or not row.rare.again):
            row.attempts += 1
            row.not_before_ms = change.not_before_ms
        elif mask:
            # Messages that were put together need not have anything else in common.
            rare = row.rare = Rare() if row.rare is None else row.rare
            rare.again = _moved(rare.again, mask, lambda at_ms: change.not_before_ms)
            rare.tries = _moved(rare.tries, mask, lambda times: times + 1)
        queues.messages[place] = row


def _moved(
    kept: list[tuple[int, bytes]], mask: int, to: Callable[[int], int]
) -> list[tuple[int, bytes]]:
    """Move the rows of `mask` among rows by a number; rows without an entry have number 0."""
    found: dict[int, int] = {}
    rest = mask
    for number, rows in kept:
        here = mask_of(rows, mask) if rows else 0
        others = int.from_bytes(rows, "little") & ~mask
        rest &= ~here
        for value, some in ((number, others), (to(number), here)):
            if some:
                found[value] = found.get(value, 0) | some
    if rest:
        found[to(0)] = found.get(to(0), 0) | rest
    return [(number, rows_of(some)) for number, some in found.items()]


def _service_set(tables: Tables, queues: Queues, change: ServiceSet) -> None:
    known = queues.services.get(change.number)
    by, since = (change.by, change.at_ms) if known is None else (known.by, known.created_ms)
    queues.services[change.number] = ServiceRow(
        change.number, change.name, change.settings, by, since
    )
    queues.next_number = max(queues.next_number, change.number + 1)


def _service_removed(tables: Tables, queues: Queues, change: ServiceRemoved) -> None:
    queues.services.pop(change.number, None)


def _request_put(tables: Tables, queues: Queues, put: RequestPut) -> None:
    every = (1 << put.count) - 1
    row = RequestRow(put, every, every)
    if put.delay_ms:
        row.delayed = {put.at_ms + put.delay_ms: every}
        row.pause_ms = put.delay_ms
    queues.requests[put.base] = row
    if put.key:
        known = KeyRow(put.base, put.count, put.at_ms, put.service, put.digest)
        queues.remember(put.sender, put.key, known)


def _work_taken(tables: Tables, queues: Queues, change: WorkTaken) -> None:
    """Move requests from waiting to held, as one hold of a worker."""
    for base, rows in change.rows:
        row = queues.requests.get(base)
        if row is None:
            continue
        mask = mask_of(rows, row.waiting)
        if not mask:
            continue
        row.waiting &= ~mask
        row.holds.append(Hold(change.holder, mask, change.at_ms, change.lease_ms))
        _count(row, mask)
        _undelay(row, mask)
        queues.requests[base] = row


def _count(row: RequestRow, mask: int) -> None:
    """Count one attempt more for these rows."""
    if not row.attempts:
        row.attempts[1] = mask
        return
    counted: dict[int, int] = {}
    seen = 0
    for times, rows in row.attempts.items():
        seen |= rows
        for number, some in ((times, rows & ~mask), (times + 1, rows & mask)):
            if some:
                counted[number] = counted.get(number, 0) | some
    if mask & ~seen:
        counted[1] = counted.get(1, 0) | (mask & ~seen)
    row.attempts = counted


def _uncount(row: RequestRow, mask: int) -> None:
    """Count one attempt less for these rows, each of which has at least one."""
    counted: dict[int, int] = {}
    for times, rows in row.attempts.items():
        for number, some in ((times, rows & ~mask), (times - 1, rows & mask)):
            if some and number:
                counted[number] = counted.get(number, 0) | some
    row.attempts = counted


def _undelay(row: RequestRow, mask: int) -> None:
    if row.delayed:
        kept = {at_ms: rows & ~mask for at_ms, rows in row.delayed.items()}
        row.delayed = {at_ms: rows for at_ms, rows in kept.items() if rows}


def _release(row: RequestRow, mask: int) -> None:
    """Take these rows out of the hands of their holders."""
    kept: list[Hold] = []
    for hold in row.holds:
        hold.rows &= ~mask
        hold.received &= ~mask
        if hold.rows:
            kept.append(hold)
    row.holds = kept


def _work_received(tables: Tables, queues: Queues, change: WorkReceived) -> None:
    for base, rows in change.rows:
        row = queues.requests.get(base)
        if row is not None:
            for hold in row.holds:
                hold.received |= mask_of(rows, hold.rows)
            queues.requests[base] = row


def _received(row: RequestRow) -> int:
    """Return the rows in hand that their holders confirmed to have received."""
    rows = 0
    for hold in row.holds:
        rows |= hold.received
    return rows


def _work_returned(tables: Tables, queues: Queues, change: WorkReturned) -> None:
    """Move requests from held to waiting, with their attempts as the reason has it."""
    for base, rows in change.rows:
        row = queues.requests.get(base)
        if row is None:
            continue
        mask = mask_of(rows, row.left & ~row.waiting)
        if change.why == WITHDRAWN:
            _uncount(row, mask & ~_received(row))
        elif change.why == RELEASED:
            _uncount(row, mask)
        _release(row, mask)
        row.waiting |= mask
        if mask and change.not_before_ms:
            row.pause_ms = max(row.pause_ms, change.pause_ms)
            at_ms = change.not_before_ms
            row.delayed[at_ms] = row.delayed.get(at_ms, 0) | mask
        queues.requests[base] = row


def _leave(queues: Queues, base: int, rows: bytes) -> tuple[RequestRow, int] | None:
    """Remove rows from their service queue; returns the row of the table and the rows removed."""
    row = queues.requests.get(base)
    if row is None:
        return None
    mask = mask_of(rows, row.left)
    row.left &= ~mask
    row.waiting &= ~mask
    if not row.left:
        del queues.requests[base]
        return row, mask
    _release(row, mask)
    _undelay(row, mask)
    queues.requests[base] = row
    return row, mask


def _request_done(tables: Tables, queues: Queues, change: RequestDone) -> None:
    for base, rows in change.rows:
        _leave(queues, base, rows)


def _request_dead(tables: Tables, queues: Queues, change: RequestDead) -> None:
    """Move requests into the row of a dead letter."""
    for base, rows in change.rows:
        left = _leave(queues, base, rows)
        if left is None or not left[1]:
            continue
        put, mask = left[0].put, left[1]
        place = change.mailbox, base
        row = queues.messages.get(place)
        if row is None:
            row = MessageRow(
                base, put.count, put.size, put.sender, change.at_ms, 0, rare=Rare(request=put)
            )
        rare = row.rare
        assert rare is not None, "a request and a message have the same number"
        if row.attempts or row.not_before_ms:
            _set_apart(row, rare)
        row.left |= mask
        if len(rare.why) >= put.count:
            # Some of them died before, were put back and die again: the last time is what counts.
            rare.why = [
                (rows_of(rest), why)
                for rows, why in rare.why
                if (rest := int.from_bytes(rows, "little") & ~mask)
            ]
        rare.why.append((rows_of(mask), change.why))
        queues.messages[place] = row


def _set_apart(row: MessageRow, rare: Rare) -> None:
    """Move facts that held for all rows of a put to its present rows, before others join them."""
    left = row.left
    rare.again = _each(rare.again, left, row.not_before_ms, 0)
    rare.tries = _each(rare.tries, left, row.attempts, row.attempts)
    row.attempts = row.not_before_ms = 0


def _each(
    kept: list[tuple[int, bytes]], left: int, others: int, more: int
) -> list[tuple[int, bytes]]:
    """Return rows by a number, each raised by `more`; rows without one get `others`, if not 0."""
    found = []
    for number, rows in kept:
        here = int.from_bytes(rows, "little") & left
        left &= ~here
        if here:
            found.append((number + more, rows_of(here)))
    if left and others:
        found.append((others, rows_of(left)))
    return found


def _request_revived(tables: Tables, queues: Queues, change: RequestRevived) -> None:
    """Move requests from a dead letter back into their service, with no attempts."""
    for base, rows in change.rows:
        place = change.mailbox, base
        message = queues.messages.get(place)
        if message is None or message.rare is None or message.rare.request is None:
            continue
        mask = mask_of(rows, message.left)
        message.left &= ~mask
        if message.left:
            queues.messages[place] = message
        else:
            del queues.messages[place]
        row = queues.requests.get(base)
        if row is None:
            put = msgspec.structs.replace(
                message.rare.request, service=change.service, deadline_ms=0
            )
            row = RequestRow(put, 0, 0)
        row.left |= mask
        row.waiting |= mask
        row.attempts = {times: some & ~mask for times, some in row.attempts.items() if some & ~mask}
        queues.requests[base] = row


def _cursor_set(tables: Tables, queues: Queues, change: CursorSet) -> None:
    place = change.stream, change.name
    known = queues.cursors.get(place)
    settings = change.settings
    if settings is None:
        settings = CursorSettings() if known is None else known.settings
    queues.cursors[place] = CursorRow(
        change.stream, change.name, change.next, settings, change.at_ms, change.by, change.epoch
    )  # fmt: skip


def _cursor_removed(tables: Tables, queues: Queues, change: CursorRemoved) -> None:
    queues.cursors.pop((change.stream, change.name), None)


def _group_set(tables: Tables, queues: Queues, change: GroupSet) -> None:
    place = change.stream, change.name
    known = queues.groups.get(place)
    queues.groups[place] = GroupRow(
        change.stream, change.name, change.kind, change.pattern, change.next, [],
        change.at_ms, change.by, change.epoch, change.durable, change.settings, change.tries,
        None if known is None else known.holder,
    )  # fmt: skip


def _group_edited(tables: Tables, queues: Queues, change: GroupEdited) -> None:
    place = change.stream, change.name
    row = queues.groups.get(place)
    if row is not None:
        row.settings = change.settings
        queues.groups[place] = row


def _group_held(tables: Tables, queues: Queues, change: GroupHeld) -> None:
    place = change.stream, change.name
    row = queues.groups.get(place)
    if row is not None:
        row.holder = change.holder
        queues.groups[place] = row


def _group_returned(tables: Tables, queues: Queues, change: GroupReturned) -> None:
    place = change.stream, change.name
    row = queues.groups.get(place)
    if row is None:
        return
    row.tries = with_tries(row.tries, change.ranges, change.why)
    row.epoch = change.epoch
    queues.groups[place] = row


def _group_revived(tables: Tables, queues: Queues, change: GroupRevived) -> None:
    _mail_done(tables, queues, MailDone(change.mailbox, change.rows, "revived"))
    place = change.stream, change.name
    row = queues.groups.get(place)
    if row is None:
        return
    row.next, row.done = without_done(row.next, row.done, change.ranges)
    row.epoch = change.epoch
    queues.groups[place] = row


def with_tries(tries: list[Tries], ranges: Iterable[Range], why: str) -> list[Tries]:
    """Return the attempts of records once each record of the ranges has one more."""
    merged = tries[:]
    for first, end in ranges:
        at, stop, kept = _within(merged, first, end)
        found: list[Tries] = []
        place = first
        for begin, until, times, _ in kept:
            if place < begin:
                found.append((place, begin, 1, why))
            found.append((begin, until, times + 1, why))
            place = until
        if place < end:
            found.append((place, end, 1, why))
        _splice(merged, at, stop, first, end, found)
    return merged


def without_tries(tries: list[Tries], ranges: Iterable[Range]) -> list[Tries]:
    """Return the attempts of records that are in none of the ranges."""
    left = tries[:]
    for first, end in ranges:
        at, stop, kept = _within(left, first, end)
        if kept:
            _splice(left, at, stop, first, end, [])
    return left


def _within(tries: list[Tries], first: int, end: int) -> tuple[int, int, list[Tries]]:
    """Return the places [at, stop) of entries that overlap a range, and these cut to the range."""
    at = bisect_left(tries, first, key=_end_of_tries)
    if at < len(tries) and tries[at][1] == first:
        at += 1
    stop = bisect_left(tries, (end,), at)
    return (
        at,
        stop,
        [
            (max(first, begin), min(end, until), times, why)
            for begin, until, times, why in tries[at:stop]
        ],
    )


def _splice(
    tries: list[Tries], at: int, stop: int, first: int, end: int, found: list[Tries]
) -> None:
    """Put entries into the place of those at [at, stop), of which the ends outside of a range stay.

    Neighbours that say the same become one.
    """
    entries = list(found)
    if at < stop:
        begin, _, times, why = tries[at]
        if begin < first:
            entries.insert(0, (begin, first, times, why))
        _, until, times, why = tries[stop - 1]
        if until > end:
            entries.append((end, until, times, why))
    joined: list[Tries] = []
    before = max(0, at - 1)
    for entry in (*tries[before:at], *entries, *tries[stop : stop + 1]):
        last = joined[-1] if joined else None
        if last is not None and last[1] == entry[0] and last[2:] == entry[2:]:
            joined[-1] = last[0], entry[1], entry[2], entry[3]
        else:
            joined.append(entry)
    tries[before : stop + 1] = joined


def _end_of_tries(entry: Tries) -> int:
    return entry[1]


def _group_done(tables: Tables, queues: Queues, change: GroupDone) -> None:
    place = change.stream, change.name
    row = queues.groups.get(place)
    if row is None:
        return
    row.next, row.done = with_done(row.next, row.done, change.ranges)
    if row.tries:
        row.tries = without_tries(row.tries, change.ranges)
    row.epoch = change.epoch
    queues.groups[place] = row


def with_done(next: int, done: list[Range], ranges: Iterable[Range]) -> tuple[int, list[Range]]:
    """Return `next`, and the ranges done after it, once `ranges` are done too.

    done: ascending, with gaps between them. New ranges are looked up among them: a group with many
    members has a thousand, and each acknowledgement brings a few.
    """
    merged = done[:]
    for first, end in ranges:
        if first <= next:
            next = max(next, end)
            continue
        at = bisect_left(merged, (first,))
        if at and merged[at - 1][1] >= first:
            at -= 1
            first, end = merged[at][0], max(end, merged[at][1])
        stop = at
        while stop < len(merged) and merged[stop][0] <= end:
            end = max(end, merged[stop][1])
            stop += 1
        merged[at:stop] = [(first, end)]
    passed = 0
    while passed < len(merged) and merged[passed][0] <= next:
        next = max(next, merged[passed][1])
        passed += 1
    return next, merged[passed:] if passed else merged


def without_done(next: int, done: list[Range], ranges: list[Range]) -> tuple[int, list[Range]]:
    """Return `next`, and the ranges done after it, once `ranges` are no longer done.

    ranges: ascending, without overlap, at least one.
    """
    low = min(next, ranges[0][0])
    left: list[Range] = []
    for begin, until in [(low, next), *done] if low < next else done:
        place = begin
        for first, end in ranges:
            if end <= place:
                continue
            if first >= until:
                break
            if place < first:
                left.append((place, first))
            place = end
        if place < until:
            left.append((place, until))
    return with_done(low, [], left)


def _group_removed(tables: Tables, queues: Queues, change: GroupRemoved) -> None:
    queues.groups.pop((change.stream, change.name), None)


def _step_taken(tables: Tables, queues: Queues, change: StepTaken) -> None:
    row = KeyRow(-1, 0, change.at_ms, -change.command, change.digest)
    queues.remember(change.sender, change.key, row)


def _transaction_begun(tables: Tables, queues: Queues, change: TransactionBegun) -> None:
    queues.transactions[change.id] = TransactionRow(
        change.id, change.holder, change.by, change.at_ms, change.timeout_ms
    )


def _transaction_staged(tables: Tables, queues: Queues, change: TransactionStaged) -> None:
    if change.id in queues.transactions:
        queues.staged[change.base] = StagedRow(
            change.base, change.id, change.place, change.stream, change.count, change.size,
            change.at_ms,
        )  # fmt: skip


def _transaction_committed(tables: Tables, queues: Queues, change: TransactionCommitted) -> None:
    row = queues.transactions.get(change.id)
    if row is not None:
        row.committed_ms = change.at_ms
        queues.transactions[change.id] = row


def _transaction_moved(tables: Tables, queues: Queues, change: TransactionMoved) -> None:
    for base in change.bases:
        queues.staged.pop(base, None)


def _transaction_ended(tables: Tables, queues: Queues, change: TransactionEnded) -> None:
    for base in change.bases:
        queues.staged.pop(base, None)
    queues.transactions.pop(change.id, None)


_EFFECTS: Final[dict[type, Callable[[Tables, Queues, Any], None]]] = {
    StreamCreated: _stream_created,
    StreamEdited: _stream_edited,
    StreamRemoved: _stream_removed,
    StreamTrimmed: _stream_trimmed,
    StreamPurged: _stream_purged,
    ProducerOpened: _producer_opened,
    ProducersForgotten: _producers_forgotten,
    MailboxSet: _mailbox_set,
    MailboxRemoved: _mailbox_removed,
    MailPut: _mail_put,
    MailDone: _mail_done,
    MailAgain: _mail_again,
    ServiceSet: _service_set,
    ServiceRemoved: _service_removed,
    RequestPut: _request_put,
    WorkTaken: _work_taken,
    WorkReceived: _work_received,
    WorkReturned: _work_returned,
    RequestDone: _request_done,
    RequestDead: _request_dead,
    RequestRevived: _request_revived,
    CursorSet: _cursor_set,
    CursorRemoved: _cursor_removed,
    GroupSet: _group_set,
    GroupEdited: _group_edited,
    GroupHeld: _group_held,
    GroupReturned: _group_returned,
    GroupRevived: _group_revived,
    GroupDone: _group_done,
    GroupRemoved: _group_removed,
    StepTaken: _step_taken,
    TransactionBegun: _transaction_begun,
    TransactionStaged: _transaction_staged,
    TransactionCommitted: _transaction_committed,
    TransactionMoved: _transaction_moved,
    TransactionEnded: _transaction_ended,
}
