"""What the change log makes: the tables, and the one function that applies a record to them.

Owns the rows and `apply`. The rules: it sees no clock, no randomness and no link, so every replay
and every replica reaches the same tables; it is asked of a record once, in the order of the log;
what it does not find it leaves alone. `Tables` (streams, producers) are small and ride at each
segment's start; `Queues` have a checkpoint of their own, whose maps may load a row when it is asked
for. Source: docs/design.md (Journal; Queues and the checkpoint).
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
    GroupRemoved,
    GroupSet,
    MailAgain,
    MailboxRemoved,
    MailboxSet,
    MailDone,
    MailPut,
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
    StreamRemoved,
    WorkReceived,
    WorkReturned,
    WorkTaken,
    decode_change,
)
from malamute_py.changelog.settings import (
    CursorSettings,
    MailboxSettings,
    ServiceSettings,
    StreamSettings,
)
from malamute_py.changelog.shares import Shares

WITHDRAWN: Final = "withdrawn"
"""Why work comes back that its worker, ending its offer in order, had not begun."""
RELEASED: Final = "released"
"""Why work comes back whose worker stopped before it came to an end."""
KEYS_MAX: Final = 100_000
"""Keys that are remembered; beyond it the identity that has most loses its oldest."""
ANONYMOUS: Final = "~"
"""Owner of all keys of senders without an identity, whose names begin so: they have one share."""


# --- the rows ----------------------------------------------------------------------------


class StreamRow(msgspec.Struct):
    """What is durably known of one stream."""

    number: int
    name: str
    uuid: bytes
    ring: str
    settings: StreamSettings
    by: str
    created_ms: int


class ProducerRow(msgspec.Struct):
    """What is durably known of one producer."""

    id: int
    identity: str
    epoch: int


class Tables(msgspec.Struct):
    """Streams and producers."""

    streams: dict[int, StreamRow] = {}
    producers: dict[int, ProducerRow] = {}
    """In the order of their opening."""
    next_number: int = 1
    """The next stream's number; 0 is the change log itself."""
    names: dict[str, int] = {}


class MailboxRow(msgspec.Struct):
    """One mailbox."""

    number: int
    name: str
    settings: MailboxSettings
    by: str
    created_ms: int


class ServiceRow(msgspec.Struct):
    """One service queue."""

    number: int
    name: str
    settings: ServiceSettings
    by: str
    created_ms: int


class Rare(msgspec.Struct, gc=False):
    """What few messages have."""

    expiries: list[int] = []
    about: list[Run] = []
    last: bool = False
    why: list[tuple[bytes, str]] = []
    """Dead letters and notices: (rows as a bitmap, why), the newest last."""
    request: RequestPut | None = None
    """Dead letters: what it was."""
    again: list[tuple[int, bytes]] = []
    """(time, rows as a bitmap): given back apart from the others, and not before it."""
    tries: list[tuple[int, bytes]] = []
    """(how often, rows as a bitmap): given back so often apart from the others."""
    asked_by: str = ""
    """Replies and notices: who sent the request."""


class MessageRow(msgspec.Struct, gc=False):
    """What one put left in a mailbox; the bodies lie in the mail stream at its number."""

    base: int
    count: int
    size: int
    sender: str
    at_ms: int
    left: int
    """Rows that have not left, as a bitmap."""
    priority: int = 0
    not_before_ms: int = 0
    """0: at once."""
    expires_at_ms: int = 0
    attempts: int = 0
    """Given back by a recipient so often."""
    rare: Rare | None = None
    pause_ms: int = 0
    """The longest pause that a recipient asked for."""

    @property
    def weighs_on(self) -> str:
        """Whose share of mail it takes: its sender's; a reply or a notice takes its requester's."""
        rare = self.rare
        return self.sender if rare is None else rare.asked_by or self.sender


class Hold(msgspec.Struct, gc=False):
    """Requests that one worker was handed together."""

    holder: str
    rows: int
    at_ms: int
    lease_ms: int
    received: int = 0
    """Rows among them that the worker said to have received."""


class RequestRow(msgspec.Struct, gc=False):
    """What is left of one put into a service queue."""

    put: RequestPut
    left: int
    """Rows that have not left: waiting or held, as a bitmap."""
    waiting: int
    holds: list[Hold] = []
    attempts: dict[int, int] = {}
    """How often -> rows that were handed out so often; none for those that never were."""
    delayed: dict[int, int] = {}
    """Time -> rows that wait, and not before it."""
    pause_ms: int = 0
    """The longest pause that was noted for any of the rows."""


class CursorRow(msgspec.Struct):
    """One cursor."""

    stream: int
    name: str
    next: int
    settings: CursorSettings
    moved_ms: int
    by: str = ""
    epoch: int = 0
    """Epoch of the log in which `next` was a position of the stream; 0: not known."""


class GroupRow(msgspec.Struct):
    """One group: everything before `next` is done, and what lies in `done`."""

    stream: int
    name: str
    kind: str
    pattern: bytes
    next: int
    done: list[Range] = []
    """Behind `next`: ascending, apart from one another."""
    moved_ms: int = 0
    by: str = ""
    epoch: int = 0
    """Epoch of the log in which these were positions of the stream; 0: not known."""
    durable: bool = False
    """Its members get only records that no power loss can take back."""


class KeyRow(msgspec.Struct, gc=False):
    """Where a batch of this key went; base -1: it was a step."""

    base: int
    count: int
    at_ms: int


Key: TypeAlias = tuple[str, bytes]
"""(sender, key) of a batch or a step."""


class Remembering(MutableMapping[Key, KeyRow]):
    """Keys of senders, each of whom has a share: what is alike in memory and in a table."""

    _shares: Shares[Key] | None = None

    def remember(self, key: Key, row: KeyRow, most: int) -> None:
        """Remember a key; when there are `most`, the oldest one of an owner is forgotten."""
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
    """Whose share a key is of."""
    sender = key[0]
    return ANONYMOUS if sender.startswith(ANONYMOUS) else sender


class Keys(OrderedDict[Key, KeyRow], Remembering):
    """Keys in memory; an OrderedDict, as a dict walks past all entries that were deleted."""


class Queues(msgspec.Struct):
    """Mailboxes, services, cursors, groups, and the keys that were taken."""

    mailboxes: MutableMapping[int, MailboxRow] = {}
    services: MutableMapping[int, ServiceRow] = {}
    messages: MutableMapping[tuple[int, int], MessageRow] = {}
    """(mailbox, number of its first) -> what a put left there, in the order of the log."""
    requests: MutableMapping[int, RequestRow] = {}
    """Number of its first -> what is left of a put, in the order of the log."""
    cursors: MutableMapping[tuple[int, str], CursorRow] = {}
    groups: MutableMapping[tuple[int, str], GroupRow] = {}
    keys: Remembering = msgspec.field(default_factory=Keys)
    """(sender, key) -> where it went; the oldest first."""
    next_number: int = 1
    """The next mailbox's or service's number."""


# --- applying ------------------------------------------------------------------------------


def apply(tables: Tables, queues: Queues, change: Change) -> None:
    """Let one record of the log take effect."""
    _EFFECTS[type(change)](tables, queues, change)


def replay(tables: Tables, queues: Queues, bodies: Iterable[bytes]) -> None:
    """Apply records of the log in order."""
    for body in bodies:
        apply(tables, queues, decode_change(body))


TABLE_CHANGES: Final = (
    StreamCreated, StreamEdited, StreamRemoved, ProducerOpened, ProducersForgotten,
)  # fmt: skip
"""Records that concern Tables only; all others concern Queues only."""


def mask_of(rows: bytes, left: int) -> int:
    """The rows of a bitmap that are left; an empty one names them all."""
    return int.from_bytes(rows, "little") & left if rows else left


def rows_of(mask: int) -> bytes:
    """A bitmap as records have it."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def _stream_created(tables: Tables, queues: Queues, change: StreamCreated) -> None:
    if change.number < tables.next_number:
        return
    tables.next_number = change.number + 1
    tables.streams[change.number] = StreamRow(
        change.number, change.name, change.uuid, change.ring,
        change.settings, change.by, change.at_ms,
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


def _producer_opened(tables: Tables, queues: Queues, change: ProducerOpened) -> None:
    known = tables.producers.get(change.id)
    if change.fence:
        # Two that are on their way at once get an epoch each.
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
    rare = None
    if put.expiries or put.about or put.last or put.why or put.asked_by:
        why = [(rows_of((1 << put.count) - 1), put.why)] if put.why else []
        rare = Rare(put.expiries, put.about, put.last, why, asked_by=put.asked_by)
    queues.messages[put.mailbox, put.base] = MessageRow(
        put.base, put.count, put.size, put.sender, put.at_ms, (1 << put.count) - 1,
        put.priority, put.deliver_at_ms, put.expires_at_ms, 0, rare,
    )  # fmt: skip
    if put.key:
        _remember(queues, put.sender, put.key, KeyRow(put.base, put.count, put.at_ms))


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
    """Rows by a number, those of a mask moved to another; what is in none counts as 0."""
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
    queues.requests[put.base] = RequestRow(put, every, every)
    if put.key:
        _remember(queues, put.sender, put.key, KeyRow(put.base, put.count, put.at_ms))


def _work_taken(tables: Tables, queues: Queues, change: WorkTaken) -> None:
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
    """One attempt more for these rows."""
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
    """One attempt less for these rows, each of which has one."""
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
    """Take these rows out of their holders' hands."""
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
    """Rows in hand whose holders said that they have them."""
    rows = 0
    for hold in row.holds:
        rows |= hold.received
    return rows


def _work_returned(tables: Tables, queues: Queues, change: WorkReturned) -> None:
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
    """Rows leave their service queue; returns what they left and which they were."""
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
            # Some died before, were put back and die again: the last time is what counts.
            rare.why = [
                (rows_of(rest), why)
                for rows, why in rare.why
                if (rest := int.from_bytes(rows, "little") & ~mask)
            ]
        rare.why.append((rows_of(mask), change.why))
        queues.messages[place] = row


def _set_apart(row: MessageRow, rare: Rare) -> None:
    """What was said of all of a put is said of those that lie there; more are about to come."""
    left = row.left
    rare.again = _each(rare.again, left, row.not_before_ms, 0)
    rare.tries = _each(rare.tries, left, row.attempts, row.attempts)
    row.attempts = row.not_before_ms = 0


def _each(
    kept: list[tuple[int, bytes]], left: int, others: int, more: int
) -> list[tuple[int, bytes]]:
    """Rows by a number, each raised by `more`; the rest of what is left by `others`, if not 0."""
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
    queues.groups[change.stream, change.name] = GroupRow(
        change.stream, change.name, change.kind, change.pattern, change.next, [],
        change.at_ms, change.by, change.epoch, change.durable,
    )  # fmt: skip


def _group_done(tables: Tables, queues: Queues, change: GroupDone) -> None:
    place = change.stream, change.name
    row = queues.groups.get(place)
    if row is None:
        return
    row.next, row.done = with_done(row.next, row.done, change.ranges)
    row.epoch = change.epoch
    queues.groups[place] = row


def with_done(next: int, done: list[Range], ranges: Iterable[Range]) -> tuple[int, list[Range]]:
    """`next` and what is done after it, once `ranges` are done too.

    done: ascending, with gaps between them. What is new is looked up among them: a group whose
    members are many has a thousand, and each acknowledgement brings a few.
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


def _group_removed(tables: Tables, queues: Queues, change: GroupRemoved) -> None:
    queues.groups.pop((change.stream, change.name), None)


def _step_taken(tables: Tables, queues: Queues, change: StepTaken) -> None:
    _remember(queues, change.sender, change.key, KeyRow(-1, 0, change.at_ms))


def _remember(queues: Queues, sender: str, key: bytes, row: KeyRow) -> None:
    queues.keys.remember((sender, key), row, KEYS_MAX)


_EFFECTS: Final[dict[type, Callable[[Tables, Queues, Any], None]]] = {
    StreamCreated: _stream_created,
    StreamEdited: _stream_edited,
    StreamRemoved: _stream_removed,
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
    GroupDone: _group_done,
    GroupRemoved: _group_removed,
    StepTaken: _step_taken,
}
