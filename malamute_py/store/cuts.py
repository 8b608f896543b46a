"""Where the copy of a stream's own ring ends, so that a snapshot tears no transaction.

Owns which batches of transactions a copy may have. A committed transaction's batches are moved into
such a ring one by one, each with a mark: its number in the mail stream, where it was staged, stands
as its producer id (broker/streams/arrivals.py). By its mark a start knows that the ring has a batch
which ring main still calls staged. The rules: such a ring is copied after ring main, and gets no
batch of a transaction whose commit the copy of ring main lacks; a start from the copy must find the
mark of each batch that the copy of ring main still calls staged. What lies after the cut was
appended after the snapshot was asked for. Source: docs/design.md, Queues and the checkpoint;
ARCHITECTURE.md, Decisions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from malamute_protocol.content_layout import HEAD, Head
from malamute_protocol.stamp import DATA, LAST_OF_BUNDLE, SNAPSHOT, Stamp
from malamute_py.changelog.applying import STREAM_CHANGES, apply
from malamute_py.changelog.records import decode_change
from malamute_py.changelog.snapshots import MARK, decode_snapshot
from malamute_py.changelog.tables import Queues, Tables
from malamute_py.journal import FileStorage, Follower, FollowLost
from malamute_py.journal.layout import RingMeta, segment_name
from malamute_py.journal.marks import parse_snapshot
from malamute_py.store.database import connect, position_of
from malamute_py.store.loading import load
from malamute_py.store.reading import MAIL_STREAM, Changes


class Asked(NamedTuple):
    """One ring at the time when the snapshot was asked for."""

    end: int
    trims: bytes | None
    """The file of first offsets; None: there is none."""


class Decided(NamedTuple):
    """Facts about the batches that transactions staged, from the copy of ring main."""

    waiting: frozenset[int]
    """Numbers of those whose transaction is committed: a start appends them."""
    undecided: frozenset[int]
    """Numbers of those whose transaction is open."""
    mail_next: int
    """Number above all that the copy knows."""

    def knows(self, base: int) -> bool:
        """Whether the commit of a batch's transaction is in the copy of ring main."""
        return base in self.waiting or (base < self.mail_next and base not in self.undecided)


def decided(database: Path, main: FileStorage, meta: RingMeta, first: int, end: int) -> Decided:
    """Read what the copies of tables and ring main, in [first, end), say of staged batches.

    As a start does it: the tables, and the changes of the log after them. Raises StoreError,
    JournalError, sqlite3.Error: the copies cannot be read.
    """
    queues, lsn, change_next = Queues(), first, -1
    if database.exists():
        with contextlib.closing(connect(database, read_only=True)) as connection:
            queues, position = load(connection), position_of(connection)
        lsn, change_next = max(first, position.lsn), position.change_next
    follower = Follower(main, meta)
    for _, record in Changes(follower.read, change_next).read([(lsn, end)]):
        change = decode_change(record)
        if not isinstance(change, STREAM_CHANGES):
            apply(Tables(), queues, change)
    committed = {row.id for row in queues.transactions.values() if row.committed_ms}
    waiting = frozenset(row.base for row in queues.staged.values() if row.id in committed)
    undecided = frozenset(queues.staged) - waiting
    return Decided(waiting, undecided, _mail_next(follower, first, end))


def _mail_next(follower: Follower, first: int, end: int) -> int:
    """Return the number above all of the mail stream that a copy of ring main knows.

    Batches of the mail stream say it, and the ring's snapshots of its state (the first batch of
    each segment), also where these batches are gone.
    """
    highest = 0

    def wanted(stamp: Stamp) -> bool:
        """Note the highest number by the stamps of mail; True: a snapshot, to be read."""
        nonlocal highest
        if stamp.stream == MAIL_STREAM and stamp.control_kind == DATA:
            highest = max(highest, stamp.next_offset)
        return stamp.control_kind == SNAPSHOT

    for stamp, content in follower.read(first, end, wanted):
        snapshot = parse_snapshot(stamp.lsn, content)
        row = None if snapshot is None else snapshot.facts.streams.get(MAIL_STREAM)
        if row is not None:
            highest = max(highest, row.next)
    return highest


class Cut:
    """A search for the place at which the copy of one ring has to end."""

    def __init__(self, follower: Follower, asked: int, main: Callable[[], Decided]) -> None:
        """asked: where the ring ended when the snapshot was asked for; no cut lies before.

        main: tells what the copy of ring main says; called where a mark makes it matter.
        """
        self._follower = follower
        self._asked = asked
        self._main = main
        self._bundle = -1
        """Position of the bundle that the batch looked at is of."""
        self._whole = self._end = asked
        """End of the newest whole bundle, and of the newest one before `_bundle`."""
        self._seen: dict[int, int] = {}
        """Number of each marked batch -> position of the batch; -1: a snapshot has the mark."""

    def find(self, first: int, end: int) -> int:
        """Return the position at which the copy ends: `end`, or the end of an earlier bundle.

        first: begin of the segment in which the ring ended when the snapshot was asked for. What
        the ring had then (`_asked`) is always copied. After it, the copy ends before the first
        bundle that would tear a transaction; `_wanted` notes where each bundle ends. Damage ends
        the search: verify() reports it.
        """
        with contextlib.suppress(FollowLost):
            for stamp, content in self._follower.read(first, end, self._wanted):
                tears = self._lacks_commit if stamp.control_kind == DATA else self._forgets
                if tears(stamp, content) and stamp.lsn >= self._asked:
                    return max(self._asked, self._end)
        return end

    def _wanted(self, stamp: Stamp) -> bool:
        """Note where bundles end; True: a batch that may have marks, whose content is read."""
        if stamp.bundle_lsn != self._bundle:  # A bundle begins: the copy may end before it.
            self._bundle, self._end = stamp.bundle_lsn, self._whole
        if stamp.flags & LAST_OF_BUNDLE:
            self._whole = stamp.lsn + stamp.size
        return stamp.control_kind in (DATA, SNAPSHOT)

    def _lacks_commit(self, stamp: Stamp, content: memoryview) -> bool:
        """Whether a batch came by a transaction whose commit the copy of ring main lacks."""
        producer = Head._make(HEAD.unpack_from(content)).producer_id
        if producer < MARK:
            return False  # It has no mark: it came by no transaction.
        self._seen[producer - MARK] = stamp.lsn
        return stamp.lsn >= self._asked and not self._main().knows(producer - MARK)

    def _forgets(self, stamp: Stamp, content: memoryview) -> bool:
        """Whether a start from this state of the ring would append a batch again that it has.

        A segment begins with a snapshot of the ring's state, and a start reads the log from the
        newest one on. So it finds a mark there, or in a later batch. A mark that the state lacks is
        forgotten: ring main said durably that its batch is moved. If the copy of ring main does not
        say so yet, the start would move the batch once more.
        """
        snapshot = parse_snapshot(stamp.lsn, content)
        if snapshot is None:
            return False
        sequences = decode_snapshot(snapshot.bodies).sequences if snapshot.bodies else []
        marks = {one.producer - MARK for one in sequences if one.producer >= MARK}
        as_of = snapshot.facts.as_of_lsn
        # Batches before the state whose marks it lacks.
        gone = {base for base, lsn in self._seen.items() if lsn < as_of} - marks
        for base in gone:
            del self._seen[base]
        self._seen.update(dict.fromkeys(marks, -1))
        return stamp.lsn >= self._asked and bool(gone) and not gone.isdisjoint(self._main().waiting)


def shorten(copy: Path, segment_bytes: int, at: int, end: int) -> None:
    """Take back what a copy of a ring has in [end, at): segments, and the rest of one, as zeros."""
    number, rest = divmod(end, segment_bytes)
    first_after = number + bool(rest)
    after_last = -(-at // segment_bytes)  # rounded up
    for later in range(first_after, after_last):
        (copy / segment_name(later)).unlink(missing_ok=True)
    if rest:
        with (copy / segment_name(number)).open("r+b") as file:
            file.truncate(rest)
            file.truncate(segment_bytes)  # what was cut off reads as zeros
