"""Effects of records about services and the requests in their queues.

Owns what such a record changes in `Queues`. The rules: a row of a request is waiting, or in one
hold, or gone; an attempt counts when a worker takes the request.
Source: docs/design.md (Journal; Queues and the checkpoint).

A batch of requests in a service is one RequestRow, under the number of the first (`base`). A mask
is a set of its rows, its requests: an integer whose lowest bit is the first row. mask_of() makes it
of the bytes in a record: rows that are left, and all of them for empty bytes. A request that failed
too often becomes a message of a mailbox, a dead letter.
apply() calls one of these functions for each record of the log, in the broker and in the process of
the checkpoint, whose maps write only rows that are set in them: a changed row is set again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from malamute_py.changelog.records import (
    RELEASED,
    WITHDRAWN,
    RequestDead,
    RequestDone,
    RequestPut,
    RequestRevived,
    ServiceRemoved,
    ServiceSet,
    WorkReceived,
    WorkReturned,
    WorkTaken,
    mask_of,
    rows_of,
)
from malamute_py.changelog.tables import (
    Effects,
    Hold,
    KeyRow,
    MessageRow,
    Queues,
    Rare,
    RequestRow,
    ServiceRow,
    Tables,
)


def _service_set(tables: Tables, queues: Queues, change: ServiceSet) -> None:
    """Create a service, or change its settings; its creator and time stay."""
    known = queues.services.get(change.number)
    by, since = (change.by, change.at_ms) if known is None else (known.by, known.created_ms)
    queues.services[change.number] = ServiceRow(
        change.number, change.name, change.settings, by, since
    )
    # Mailboxes and services have their numbers from one count.
    queues.next_number = max(queues.next_number, change.number + 1)


def _service_removed(tables: Tables, queues: Queues, change: ServiceRemoved) -> None:
    queues.services.pop(change.number, None)


def _request_put(tables: Tables, queues: Queues, put: RequestPut) -> None:
    """Add a batch of requests that wait, and remember the key it was sent with."""
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
    """Move requests that were handed out from waiting to held, as one hold of a worker."""
    for base, rows in change.rows:
        row = queues.requests.get(base)
        if row is None:
            continue
        mask = mask_of(rows, row.waiting)
        if not mask:  # They have ended meanwhile.
            continue
        row.waiting &= ~mask
        row.holds.append(Hold(change.holder, mask, change.at_ms, change.lease_ms))
        _count(row, mask)
        _undelay(row, mask)
        queues.requests[base] = row


def _count(row: RequestRow, mask: int) -> None:
    """Count one attempt more for the rows of a bitmap, which are handed out.

    `row.attempts` has, for each count, the bitmap of the rows with so many attempts.
    """
    if not row.attempts:
        row.attempts[1] = mask
        return
    counted: dict[int, int] = {}
    seen = 0
    for times, rows in row.attempts.items():
        seen |= rows
        # Rows of the mask go on to the next count, and may join others that are there.
        for number, some in ((times, rows & ~mask), (times + 1, rows & mask)):
            if some:
                counted[number] = counted.get(number, 0) | some
    if mask & ~seen:  # rows that had no attempt before
        counted[1] = counted.get(1, 0) | (mask & ~seen)
    row.attempts = counted


def _uncount(row: RequestRow, mask: int) -> None:
    """Count one attempt less for these rows, each of which has one: their hand-out was none."""
    counted: dict[int, int] = {}
    for times, rows in row.attempts.items():
        for number, some in ((times, rows & ~mask), (times - 1, rows & mask)):
            if some and number:  # Rows without attempts stand nowhere.
                counted[number] = counted.get(number, 0) | some
    row.attempts = counted


def _undelay(row: RequestRow, mask: int) -> None:
    """Forget the times that rows of a bitmap waited for, since they were handed out or are gone."""
    if row.delayed:
        kept = {at_ms: rows & ~mask for at_ms, rows in row.delayed.items()}
        row.delayed = {at_ms: rows for at_ms, rows in kept.items() if rows}


def _release(row: RequestRow, mask: int) -> None:
    """Take these rows out of the hands of their holders: they come back, or have left."""
    kept: list[Hold] = []
    for hold in row.holds:
        hold.rows &= ~mask
        hold.received &= ~mask
        if hold.rows:
            kept.append(hold)
    row.holds = kept


def _work_received(tables: Tables, queues: Queues, change: WorkReceived) -> None:
    """Note that workers confirmed to have received requests: withdrawn, these keep an attempt."""
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
        held = row.left & ~row.waiting
        mask = mask_of(rows, held)
        # The hand-out was counted as an attempt. It was none if the worker never saw the request,
        # or stopped before it finished the request.
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
    """Remove requests from their service queue, and from the hands of their workers.

    Returns the row of the table and the bitmap of the requests removed; None: the row is gone.
    """
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
    """Remove requests that have ended from their service queue."""
    for base, rows in change.rows:
        _leave(queues, base, rows)


def _request_dead(tables: Tables, queues: Queues, change: RequestDead) -> None:
    """Move requests from their service queue into a mailbox, as messages of the same numbers.

    Those of one batch may die at different times: they come into one row of the table.
    """
    for base, rows in change.rows:
        left = _leave(queues, base, rows)
        if left is None:
            continue
        request, mask = left
        if not mask:
            continue
        put, key = request.put, (change.mailbox, base)
        row = queues.messages.get(key)
        if row is None:
            row = MessageRow(
                base, put.count, put.size, put.sender, change.at_ms, left=0, rare=Rare(request=put)
            )
        rare = row.rare
        assert rare is not None, "a request and a message have the same number"
        if row.attempts or row.not_before_ms:
            # A reader gave back those that are there: that does not hold for the new ones.
            _set_apart(row, rare)
        row.left |= mask
        if len(rare.why) >= put.count:
            # A reason for each row and one more: some died before, and die again. The last counts.
            rare.why = [
                (rows_of(rest), why)
                for rows, why in rare.why
                if (rest := int.from_bytes(rows, "little") & ~mask)
            ]
        rare.why.append((rows_of(mask), change.why))
        queues.messages[key] = row


def _set_apart(row: MessageRow, rare: Rare) -> None:
    """Move facts that held for all rows of a put to its present rows, before others join them.

    The facts: when they are delivered again (a row's own time stays), and attempts (added to a
    row's own).
    """
    left = row.left
    rare.again = _with_common(rare.again, left, others=row.not_before_ms, more=0)
    rare.tries = _with_common(rare.tries, left, others=row.attempts, more=row.attempts)
    row.attempts = row.not_before_ms = 0


def _with_common(
    kept: list[tuple[int, bytes]], left: int, others: int, more: int
) -> list[tuple[int, bytes]]:
    """Return the bitmaps of rows by a number, when what holds for all rows is added to them.

    kept: (number, bitmap) of rows that have a number of their own, which is raised by `more`. left:
    the rows that there are. others: the number of those that have none of their own; 0: none.
    """
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
    """Move requests from their dead-letter mailbox back into their service, with no attempts.

    They have no deadline any more: one that has passed would end them at once.
    """
    for base, rows in change.rows:
        key = change.mailbox, base
        message = queues.messages.get(key)
        if message is None or message.rare is None or message.rare.request is None:
            continue  # It is gone, or was never a request.
        mask = mask_of(rows, message.left)
        if not mask:
            continue
        message.left &= ~mask
        if message.left:
            queues.messages[key] = message
        else:
            del queues.messages[key]
        row = queues.requests.get(base)
        if row is None:  # No other request of the batch is left in the service.
            put = msgspec.structs.replace(
                message.rare.request, service=change.service, deadline_ms=0
            )
            row = RequestRow(put, left=0, waiting=0)
        row.left |= mask
        row.waiting |= mask
        row.attempts = {times: some & ~mask for times, some in row.attempts.items() if some & ~mask}
        queues.requests[base] = row


EFFECTS: Final[Effects] = {
    ServiceSet: _service_set,
    ServiceRemoved: _service_removed,
    RequestPut: _request_put,
    WorkTaken: _work_taken,
    WorkReceived: _work_received,
    WorkReturned: _work_returned,
    RequestDone: _request_done,
    RequestDead: _request_dead,
    RequestRevived: _request_revived,
}
