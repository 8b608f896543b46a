"""Effects of records about cursors and groups.

Owns what such a record changes in `Queues`. The rule: a record that is done has no attempts.
Source: docs/design.md (Journal; Queues and the checkpoint).

A group shares the records of a stream among its members; its attempts (`tries`) are counted by
ranges of offsets. `epoch` is that of the log in which these offsets were given: it tells a start
whether a power loss took such records away.
apply() calls one of these functions for each record of the log, in the broker and in the process of
the checkpoint, whose maps write only rows that are set in them: a changed row is set again.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from malamute_py.changelog.effects.mail import mail_done
from malamute_py.changelog.ranges import with_done, with_tries, without_done, without_tries
from malamute_py.changelog.records import (
    CursorRemoved,
    CursorSet,
    GroupDone,
    GroupEdited,
    GroupHeld,
    GroupRemoved,
    GroupReturned,
    GroupRevived,
    GroupSet,
    MailDone,
)
from malamute_py.changelog.settings import CursorSettings
from malamute_py.changelog.tables import CursorRow, Effects, GroupRow, Queues, Tables

_OfGroup: TypeAlias = GroupDone | GroupEdited | GroupHeld | GroupReturned | GroupRevived


def _cursor_set(tables: Tables, queues: Queues, change: CursorSet) -> None:
    """Create or move a cursor; without settings in the change, it keeps those that it has."""
    key = change.stream, change.name
    known = queues.cursors.get(key)
    settings = change.settings
    if settings is None:
        settings = CursorSettings() if known is None else known.settings
    queues.cursors[key] = CursorRow(
        change.stream, change.name, change.next, settings, change.at_ms, change.by, change.epoch
    )  # fmt: skip


def _cursor_removed(tables: Tables, queues: Queues, change: CursorRemoved) -> None:
    queues.cursors.pop((change.stream, change.name), None)


def _group_set(tables: Tables, queues: Queues, change: GroupSet) -> None:
    """Create a group or set it to a new position, with nothing done beyond that.

    The member that has the place of an exclusive group keeps it.
    """
    key = change.stream, change.name
    known = queues.groups.get(key)
    queues.groups[key] = GroupRow(
        change.stream, change.name, change.kind, change.pattern, change.next, [],
        change.at_ms, change.by, change.epoch, change.durable, change.settings, change.tries,
        None if known is None else known.holder,
    )  # fmt: skip


def _row(queues: Queues, change: _OfGroup) -> GroupRow | None:
    """Return the row of a change's group as one that has changed; None: the group is gone."""
    key = change.stream, change.name
    row = queues.groups.get(key)
    if row is not None:
        queues.groups[key] = row  # The checkpoint's map writes rows that were set.
    return row


def _group_edited(tables: Tables, queues: Queues, change: GroupEdited) -> None:
    """Change the settings of a group."""
    row = _row(queues, change)
    if row is not None:
        row.settings = change.settings


def _group_held(tables: Tables, queues: Queues, change: GroupHeld) -> None:
    """Note which member has the place of an exclusive group."""
    row = _row(queues, change)
    if row is not None:
        row.holder = change.holder


def _group_returned(tables: Tables, queues: Queues, change: GroupReturned) -> None:
    """Count an ended attempt of records of a group, with its reason."""
    row = _row(queues, change)
    if row is None:
        return
    row.tries = with_tries(row.tries, change.ranges, change.why)
    row.epoch = change.epoch


def _group_revived(tables: Tables, queues: Queues, change: GroupRevived) -> None:
    """Let records of a group be handed out again, and remove their dead letters."""
    mail_done(tables, queues, MailDone(change.mailbox, change.rows, "revived"))
    row = _row(queues, change)
    if row is None:
        return
    row.next, row.done = without_done(row.next, row.done, change.ranges)
    row.epoch = change.epoch


def _group_done(tables: Tables, queues: Queues, change: GroupDone) -> None:
    """Note records of a group as done; its position moves past those that follow on it."""
    row = _row(queues, change)
    if row is None:
        return
    row.next, row.done = with_done(row.next, row.done, change.ranges)
    if row.tries:
        row.tries = without_tries(row.tries, change.ranges)
    row.epoch = change.epoch


def _group_removed(tables: Tables, queues: Queues, change: GroupRemoved) -> None:
    queues.groups.pop((change.stream, change.name), None)


EFFECTS: Final[Effects] = {
    CursorSet: _cursor_set,
    CursorRemoved: _cursor_removed,
    GroupSet: _group_set,
    GroupEdited: _group_edited,
    GroupHeld: _group_held,
    GroupReturned: _group_returned,
    GroupRevived: _group_revived,
    GroupDone: _group_done,
    GroupRemoved: _group_removed,
}
