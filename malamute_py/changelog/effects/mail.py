"""Effects of records about mailboxes and the messages in them.

Owns what such a record changes in `Queues`. The rules: messages that were put together are one row
until they leave; what held for all of them moves to bitmaps once it holds for some only.
Source: docs/design.md (Journal; Queues and the checkpoint).

A put is the messages of one batch in one mailbox: one MessageRow, under the number of the first
(`base`). A mask is a set of its rows, its messages: an integer whose lowest bit is the first row.
mask_of() makes it of the bytes in a record: rows that are left, and all of them for empty bytes.
apply() calls one of these functions for each record of the log, in the broker and in the process of
the checkpoint, whose maps write only rows that are set in them: a changed row is set again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from malamute_py.changelog.records import (
    MailAgain,
    MailboxRemoved,
    MailboxSet,
    MailDone,
    MailPut,
    mask_of,
    rows_of,
)
from malamute_py.changelog.tables import (
    Effects,
    KeyRow,
    MailboxRow,
    MessageRow,
    Queues,
    Rare,
    Tables,
)


def _mailbox_set(tables: Tables, queues: Queues, change: MailboxSet) -> None:
    """Create a mailbox, or change its settings; its creator and time stay."""
    known = queues.mailboxes.get(change.number)
    by, since = (change.by, change.at_ms) if known is None else (known.by, known.created_ms)
    queues.mailboxes[change.number] = MailboxRow(
        change.number, change.name, change.settings, by, since
    )
    # Mailboxes and services have their numbers from one count.
    queues.next_number = max(queues.next_number, change.number + 1)


def _mailbox_removed(tables: Tables, queues: Queues, change: MailboxRemoved) -> None:
    queues.mailboxes.pop(change.number, None)


def _mail_put(tables: Tables, queues: Queues, put: MailPut) -> None:
    """Enter messages that were put together as one row, and the key that their sender gave."""
    rare = None
    every = (1 << put.count) - 1
    if put.expiries or put.about or put.last or put.why or put.asked_by:
        why = [(rows_of(every), put.why)] if put.why else []
        rare = Rare(
            put.expiries, put.about, put.last, why, asked_by=put.asked_by, origin=put.origin
        )
    queues.messages[put.mailbox, put.base] = MessageRow(
        put.base, put.count, put.size, put.sender, put.at_ms, mask_of(put.rows, every),
        put.priority, put.deliver_at_ms, put.expires_at_ms, attempts=0, rare=rare,
    )  # fmt: skip
    if put.key:
        row = KeyRow(put.base, put.count, put.at_ms, put.mailbox, put.digest)
        queues.remember(put.sender, put.key, row)


def mail_done(tables: Tables, queues: Queues, change: MailDone) -> None:
    """Remove messages from their mailbox; the row of a put goes with its last message.

    Also called for dead letters of a group that are tried again.
    """
    for base, rows in change.rows:
        key = change.mailbox, base
        row = queues.messages.get(key)
        if row is None:
            continue
        left = row.left & ~mask_of(rows, row.left)
        if left:
            row.left = left
            queues.messages[key] = row
        else:
            del queues.messages[key]


def _mail_again(tables: Tables, queues: Queues, change: MailAgain) -> None:
    """Note one attempt more of messages, and when they are delivered again."""
    for base, rows in change.rows:
        key = change.mailbox, base
        row = queues.messages.get(key)
        if row is None:
            continue
        mask = mask_of(rows, row.left)
        row.pause_ms = max(row.pause_ms, change.pause_ms)
        if mask == row.left and (row.rare is None or not row.rare.again):
            # All of them together, as until now: one number holds for all.
            row.attempts += 1
            row.not_before_ms = change.not_before_ms
        elif mask:
            # Some of them: from now on bitmaps say which rows have which time and attempts.
            rare = row.rare = Rare() if row.rare is None else row.rare
            rare.again = _renumbered(rare.again, mask, lambda at_ms: change.not_before_ms)
            rare.tries = _renumbered(rare.tries, mask, lambda times: times + 1)
        queues.messages[key] = row


def _renumbered(
    kept: list[tuple[int, bytes]], mask: int, to: Callable[[int], int]
) -> list[tuple[int, bytes]]:
    """Return `kept` with other numbers for the rows of `mask`: `to` makes each from the old one.

    For times and attempts of messages that came back apart from the others of their put. kept:
    (number, the rows that have it, as bits). Rows without an entry have number 0. mask: rows,
    as bits.
    """
    found: dict[int, int] = {}
    rest = mask  # Rows of the mask that no entry has.
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


EFFECTS: Final[Effects] = {
    MailboxSet: _mailbox_set,
    MailboxRemoved: _mailbox_removed,
    MailPut: _mail_put,
    MailDone: mail_done,
    MailAgain: _mail_again,
}
