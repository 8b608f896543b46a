"""One group: which of its members gets which records of a batch.

Owns the members of one group, and what each kind of group allows them. The rules by kind: shared: a
record goes to the member with the most free credit, which gets at most its share of what waits, so
that a lone batch is spread and a backlog goes out in whole batches; where there are more members
than it pays to give one record each, a member gets at most what it has shown to be quick with.
Exclusive: records go to the holder once the log has it, and its place is kept for a while when it
is lost. Keyed: a record goes to the member that its slot belongs to by rendezvous hash, and a slot
moves only when its old member holds nothing of it, so that records of one key are in one place, in
order. A slot is one of 1,024 into which first keys hash: memory does not grow with the keys, and a
batch costs by its distinct headers and the members that get rows of it, not by all members.

`bits` are rows of a batch, the lowest bit its first row; a `mask` is offsets of a page of
`holdings`. A record that is withheld goes to no member until the log has what becomes of it.
Source: docs/design.md, Queues and the checkpoint; the hold window is that of LocalMQ
(docs/design.md, References).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Final

import msgspec
import numpy as np

from malamute_py.broker.batches.rows import rows_of_headers, unexpired
from malamute_py.broker.groups.free_members import FreeMembers
from malamute_py.broker.groups.holdings import PAGE, UNLOGGED, Holdings, Picked, slots_of
from malamute_py.broker.groups.member import Member
from malamute_py.broker.groups.selection import GroupSelection
from malamute_py.broker.groups.slots import NOBODY, Slots, SlotsOfRows, rows_by_owner
from malamute_py.broker.log.stream import StampedBatch, Stream
from malamute_py.broker.structures.bitmaps import (
    bits_of_rows,
    low_bit,
    lowest,
    ones,
    rows_of_bits,
)
from malamute_py.changelog.ranges import without_done
from malamute_py.changelog.records import Holder, Range, Tries
from malamute_py.changelog.tables import GroupRow

KINDS: Final = ("shared", "exclusive", "keyed")
DEAD: Final = ".dead"
"""End of the name of a group's dead-letter mailbox."""
NAME_MAX: Final = 255
FAILED: Final = "failed"
"""Beginning of the reason of records that a member gave up: dead letters, whatever their number of
attempts."""
DEALS_AT_ONCE: Final = 256
"""Small deliveries that a keyed group makes in one turn, and of one batch in one go: each takes
some 50 us."""
DEAL_ROWS: Final = 2_048
"""Rows of a batch for which each of its deliveries counts once more: finding the rows of one member
among 60,000 takes 1.6 ms."""


class Group:
    """One group at run time: its members, its reader's position, and its open offsets.

    Groups has members come and go, GroupReader deals batches out, Acknowledgements ends records.
    """

    __slots__ = (
        "_deliveries_before_batch", "_joins", "_slots_of", "_watch", "absent_holder", "by_place",
        "deliveries", "delivery_work", "done_earlier", "durable", "flush_at_ms", "flushing", "free",
        "gone", "holder", "holdings", "idle_reads", "kind", "lease_due_ms", "logging", "lost",
        "may_bury", "members", "moved_ms", "name", "place_logged", "queued", "reading",
        "reading_from", "reads_all", "refusing", "returns_ms", "row", "selection", "slots",
        "stream", "told", "watched", "window",
    )  # fmt: skip

    def __init__(
        self, stream: Stream, row: GroupRow, window: int, watch: Callable[[Group], None]
    ) -> None:
        """row: the group as the log has it. window: `group_window_records` of the configuration.

        watch: looks at the group again when its next lease ends.
        """
        self._watch = watch
        self.lease_due_ms = 0
        """Time at which the leases are looked at; 0: there is none."""
        self.stream = stream
        self.row = row
        self.name = row.name
        self.kind = row.kind
        self.window = window
        """Records that the reader may be ahead of the oldest one that is not done."""
        self.durable = row.durable
        """Whether the members see only what is durable."""
        self.selection = GroupSelection(msgspec.msgpack.decode(row.pattern), row.kind == "keyed")
        self.holdings = Holdings(row.next)
        self.done_earlier: list[Range] = list(row.done)
        """Ranges after `read` that were done in an earlier run of the broker."""
        self.members: list[Member] = []
        """Members in the order of their joining; without the absent holder."""
        self._joins = 0
        """Number of members that have ever joined."""
        self.free = FreeMembers()
        self.holder: Member | None = None
        """The member that is given the records, in an exclusive group."""
        self.absent_holder: Member | Holder | None = None
        """A lost holder of an exclusive group whose place, with what it holds, is kept. A Holder
        was lost before the broker began, and holds nothing."""
        self.returns_ms = 0
        """Time until which the absent holder may return."""
        self.place_logged = False
        """Whether the log has durably who has the place: the holder may be given records."""
        self.logging = False
        """Whether a change of who has the place is on its way into the log."""
        self.told: Member | None = None
        """The member that was told that it is the holder."""
        self.slots = Slots() if row.kind == "keyed" else None
        self.by_place: dict[int, Member] = {}
        """Members of a keyed group by their numbers in the arrays of `slots`."""
        self._slots_of: tuple[int, SlotsOfRows] = (NOBODY, np.empty(0, np.uint16))
        """(base, slot of each row) of the batch that is handed out."""
        self.deliveries = self._deliveries_before_batch = 0
        """Number of all deliveries, and of those before the batch that is handed out."""
        self.delivery_work = 0
        """Work of a keyed group's deliveries, of which each member has one in each batch: 1 for
        each, and 1 more for each DEAL_ROWS rows of its batch."""
        self.moved_ms = 0
        """Time of the last acknowledgement."""
        self.lost = 0
        """Records that were gone before a member got them."""
        self.reading = 0
        """Token of the one read of history that is under way; 0: none."""
        self.reading_from = 0
        """Offset from which that read was asked for."""
        self.reads_all = False
        """Whether the reader takes all batches of the journal: a selective read has failed."""
        self.idle_reads = 0
        """Reads in a row that brought the group no further."""
        self.queued = False
        """Whether it stands in the reader's queue for a turn."""
        self.flushing = False
        """Whether the log is being told of done records that no member waits for."""
        self.flush_at_ms = 0
        """Time at which Progress tells the log next of such records; 0: it has nothing to tell."""
        self.gone = False
        """Whether it was removed, or reset: another object has taken its place then."""
        self.may_bury = False
        """Whether waiting records may have used up their attempts: the next turn looks, and has
        those that have become dead letters."""
        self.refusing = False
        """Whether the mailbox of its dead letters has refused one, and taken none since."""
        self.watched = False
        """Whether a timer watches the group, since its reader waits for an acknowledgement."""

    # --- members ------------------------------------------------------------------------------

    def enter(self, member: Member) -> Picked | None:
        """Take up a member that joins.

        Returns what the absent holder held, which waits again, if it is that holder; else None.
        """
        self.members.append(member)
        self._joins += 1
        member.joined = self._joins
        self.free.file(member)
        if self.kind == "exclusive":
            if self.absent_holder is not None and member.is_again(self.absent_holder):
                return self.hand_over(member)
            if self.absent_holder is None and (self.holder is None or self.holder.aside):
                self.holder = member
        elif self.slots is not None:
            place = 0
            while place in self.by_place:  # The least number that is free: arrays stay short.
                place += 1
            member.place = place
            self.by_place[place] = member
            self.slots.enter(member)
        return None

    def hand_over(self, member: Member) -> Picked:
        """Give the place to the absent holder, back as this member; returns what it had held."""
        released = self._release_absent(self.absent_holder)
        self.absent_holder, self.holder = None, member
        return released

    def leave(self, member: Member, keep_until_ms: int, fault: bool) -> Picked:
        """Remove a member of an exclusive group; returns the records that it held.

        None are returned where the place is kept, with what the member holds. keep_until_ms: until
        then it may come back; 0: it has left for good. fault: the end is an attempt of the records.
        """
        self.members.remove(member)
        self.free.remove(member)
        self.free.trim()
        if member is self.holder:
            # Another membership of the same client goes on in its place.
            self.holder = next((other for other in self.members if other.is_again(member)), None)
            if self.holder is None and keep_until_ms:
                self.absent_holder, self.returns_ms = member, keep_until_ms
                return []
            if self.holder is None:
                self.next_holder()
        return self._release(member, fault and self.counts_attempts)

    def leave_together(self, leaving: list[Member], fault: bool) -> Picked:
        """Remove members of a group that is not exclusive; returns the records that they held.

        A link may end with a thousand memberships: one by one, each would walk over all slots for
        each page of the window. fault: as leave() has it.
        """
        gone = set(leaving)
        self.members = [member for member in self.members if member not in gone]
        for member in leaving:
            self.free.remove(member)
            member.count_returned(member.held)
        self.free.trim()
        withheld = fault and self.counts_attempts
        released = self.holdings.release(gone, withheld=withheld)
        slots = self.slots
        if slots is None:
            return released
        if not withheld:  # Else the slots count them as held until the log has their attempt.
            for page, mask in released:
                slots.back(slots_of(page, mask), settle=False)
        for member in leaving:
            del self.by_place[member.place]
        others = [member for member in self.members if not member.aside]
        slots.leave([member.place for member in leaving], others, gone=True)
        return released

    def give_up_absent_holder(self) -> Picked:
        """Give up the place of the absent holder, who did not come back in time.

        Returns the records that it held.
        """
        released = self._release_absent(self.absent_holder)
        self.absent_holder = None
        self.next_holder()
        return released

    @property
    def place(self) -> Holder | None:
        """The holder of an exclusive group, or the one that its place is kept for, to be logged."""
        one = self.holder or self.absent_holder
        if isinstance(one, Member):
            return Holder(one.identity, one.session, one.hold_ms)
        return one

    def next_holder(self) -> None:
        """Make the member that has waited longest the holder, if there is one not passed over."""
        others = (member for member in self.members if not member.aside)
        # One passed over has the place at least: it is given records once it has acknowledged some.
        self.holder = next(others, self.members[0] if self.members else None)

    def set_aside(self, member: Member) -> None:
        """Pass over a member whose lease has ended: others get its slots, or its place."""
        member.aside = True
        self.free.remove(member)
        if self.slots is not None:
            others = [one for one in self.members if not one.aside]
            self.slots.leave([member.place], others)
        elif member is self.holder:
            others_in_turn = (one for one in self.members if not one.aside)
            self.holder = next(others_in_turn, member)  # Without another, it stays the holder.

    def bring_back(self, member: Member) -> None:
        """Give records again to a member that was passed over, as it has acknowledged some."""
        member.aside = False
        self.free.file(member)
        if self.slots is not None:
            self.slots.enter(member)
        elif self.kind == "exclusive" and (self.holder is None or self.holder.aside):
            self.holder = member

    def _release_absent(self, absent: Member | Holder | None) -> Picked:
        """Let wait again what an absent holder held; a Holder from before the start holds none."""
        return self._release(absent, self.counts_attempts) if isinstance(absent, Member) else []

    def _release(self, member: Member, withheld: bool) -> Picked:
        """Let wait again what a member held, at once or (withheld) when the log has an attempt."""
        member.count_returned(member.held)
        return self.holdings.release({member}, withheld=withheld)

    @property
    def takes(self) -> bool:
        """Whether some member may be given something now: else a read would be in vain."""
        if self.kind == "exclusive":
            return self.place_logged and self.holder is not None and self.holder.able
        return self.free.first() is not None

    # --- what to read next -----------------------------------------------------------------------

    def wanted(self) -> int | None:
        """The offset that the reader is to go to now: of a record to hand out or to bury.

        A record to bury becomes a dead letter, for which no member needs credit. Otherwise the
        least waiting one that a member could take, or else the next one that the group has not
        read. None: there is nothing to do, or no member has credit.
        """
        if self.may_bury:
            dying = self._first_dying()
            if dying is not None:
                return dying
            self.may_bury = False
        reads_on = self.reads_on
        if not (self.holdings.waiting or reads_on) or not self.takes:
            return None
        offset = self._first_to_hand() if self.holdings.waiting else None
        return self.holdings.read if offset is None and reads_on else offset

    @property
    def tail(self) -> int:
        """Offset after the newest record that its members may see."""
        return self.stream.visible_next if self.durable else self.stream.next

    @property
    def reads_on(self) -> bool:
        """Whether the reader may go on: there is more to read, and the window has room."""
        holdings = self.holdings
        read = holdings.read
        if read >= self.tail:
            return False
        # Without open offsets `low` is `read`; asking for it would walk over all pages.
        return not holdings.open or read - holdings.low < self.window

    @property
    def stuck(self) -> bool:
        """Whether the reader waits for an acknowledgement: it is a whole window ahead."""
        holdings = self.holdings
        ahead = holdings.read - holdings.low
        return bool(self.members) and holdings.read < self.tail and ahead >= self.window

    def _first_to_hand(self) -> int | None:
        """Return the least waiting offset that a member could take; None: there is none.

        In a keyed group the owner of its slot must have credit. In others any member that has
        credit takes any record, and wanted() has seen that there is one.
        """
        slots = self.slots
        if slots is None:
            for page in self.holdings.pages:
                if page.waiting:
                    return page.base + low_bit(page.waiting)
            return None
        by_place = self.by_place
        # Members that own a slot of which a record waits, by their numbers.
        owners = np.unique(slots.owner[slots.waiting > 0]).tolist()
        places = [place for place in owners if place != NOBODY and by_place[place].able]
        if not places:
            return None
        owner_able = np.isin(slots.owner, places)  # Of each slot: whether its owner has credit.
        for page in self.holdings.pages:
            if page.waiting:
                waiting = np.flatnonzero(rows_of_bits(page.waiting, page.waiting.bit_length()))
                assert page.slots is not None
                found = waiting[owner_able[page.slots[waiting]]]
                if len(found):
                    return page.base + int(found[0])
        return None

    # --- reading a batch -------------------------------------------------------------------------

    def read_to(self, offset: int) -> None:
        """Move the reader to an offset, and on over what was done in an earlier run after it."""
        while self.done_earlier:
            first, end = self.done_earlier[0]
            if first > offset:
                break
            offset = max(offset, end)
            del self.done_earlier[0]
        self.holdings.read = offset

    def take_in(self, batch: StampedBatch, now_ms: int) -> None:
        """Read a batch for the first time, from the reader's position on: selected rows wait.

        Rows that are not selected, have expired, or were done in an earlier run count as done.
        """
        holdings = self.holdings
        base, end, content = batch.base, batch.next, batch.content
        count = end - base
        # Which distinct headers are selected, and the slot of each.
        chosen, slots = self.selection.of_table(content, base)
        rows = rows_of_headers(content, chosen)
        alive = unexpired(content, now_ms)
        if alive is not None:
            rows = alive if rows is None else rows & alive
        bits = (1 << count) - 1 if rows is None else bits_of_rows(rows)
        if holdings.read > base:  # The reader stands amid the batch: rows before it are done.
            skipped = holdings.read - base
            bits = bits >> skipped << skipped
        for first, stop in self.done_earlier:  # Ranges of an earlier run, ascending.
            if first >= end:
                break
            first, stop = max(first, base), min(stop, end)
            bits &= ~(((1 << (stop - first)) - 1) << (first - base))
        row_slots: Any = None
        if self.slots is not None and bits:
            # The slots come before any change: a content that cannot be read raises. `codes` has
            # the number of each row's header; None: all rows have the first.
            _, codes = content.headers()
            row_slots = np.full(count, slots[0], np.uint16) if codes is None else slots[codes]
        self.read_to(end)
        if not bits:
            return
        holdings.take_in(base, bits)
        if self.slots is None:
            return
        self.slots.take_in(row_slots[rows_of_bits(bits, count)])
        for page, _ in holdings.within(base, end):
            if page.slots is None:
                page.slots = np.zeros(PAGE, np.uint16)
            first, stop = max(base, page.base), min(end, page.base + PAGE)
            page.slots[first - page.base : stop - page.base] = row_slots[first - base : stop - base]

    # --- dividing what waits of a batch ---------------------------------------------------------

    def divided(self, batch: StampedBatch, bits: int) -> Iterator[tuple[Member, int]]:
        """Yield each member with the waiting rows of a batch that it is to be given.

        The caller hands the rows out before it asks for the next member.
        """
        self._deliveries_before_batch = self.deliveries
        if self.slots is not None:
            yield from self._by_slot(batch, bits)
            return
        if self.kind == "exclusive":
            holder = self.holder
            if holder is not None and holder.able:
                yield holder, lowest(bits, holder.left_records)
            return
        free = self.free
        given: list[Member] = []
        while bits and free.count:
            total = self.holdings.waiting + self.tail - self.holdings.read
            # An equal part of what there is for each member, rounded up; and the deliveries if each
            # record, or each member, had one, by which lot() finds what is done soonest.
            share, most_deliveries = -(-total // free.count), min(total, free.count)
            while bits:
                # A member that was taken is filed again, with its new credit, only when all others
                # have had their rows.
                member = free.take()
                if member is None:
                    break
                given.append(member)
                most = min(member.left_records, max(share, member.lot(most_deliveries)))
                rows = lowest(bits, most)
                yield member, rows
                bits ^= rows
            if not given:  # No member has credit left.
                return
            for member in given:
                free.file(member)
            given.clear()

    def _by_slot(self, batch: StampedBatch, bits: int) -> Iterator[tuple[Member, int]]:
        """Yield what divided() does for a keyed group, by the slots of the rows' keys.

        A row whose slot has no member that can take it waits.
        """
        assert self.slots is not None
        began = self.delivery_work
        for place, mine in rows_by_owner(self.slots.owner[self._row_slots(batch)], bits):
            member = self.by_place.get(place)
            if member is not None and member.able:
                yield member, lowest(mine, member.left_records)
                self.free.file(member)  # With the credit that is left.
                if self.delivery_work - began >= DEALS_AT_ONCE:
                    # Rows that still wait come first in the group's next turn.
                    return

    def _row_slots(self, batch: StampedBatch) -> SlotsOfRows:
        """Slot of each row of a batch that was taken in; any number for rows that do not wait.

        The slots come from the pages: thousands of distinct first keys are hashed once.
        """
        base, end = batch.base, batch.next
        known, found = self._slots_of
        if known != base or len(found) != end - base:
            found = np.zeros(end - base, np.uint16)
            for page, _ in self.holdings.within(base, end):
                if page.slots is not None:
                    first, stop = max(base, page.base), min(end, page.base + PAGE)
                    found[first - base : stop - base] = page.slots[
                        first - page.base : stop - page.base
                    ]
            self._slots_of = base, found
        return found

    def hand(self, batch: StampedBatch, member: Member, bits: int, now_ms: int) -> int:
        """Note what divided() gave a member, which the caller sends; returns how many rows."""
        self.holdings.hand(batch.base, bits, member, now_ms)
        if member.lease_ms:
            due_ms = member.lease_end(now_ms)
            for page, mask in self.holdings.pieces(batch.base, bits):
                self.holdings.lease(page, member, mask, due_ms)
            if not self.lease_due_ms or due_ms < self.lease_due_ms:
                self._watch(self)  # This lease ends before the time of the next planned look.
        count = bits.bit_count()
        # The broker's time for all deliveries of the batch, also those before this one, is to be
        # left out of the member's pace (Member.acknowledged).
        member.handed(count, now_ms, self._deliveries_before_batch)
        self.deliveries += 1
        member.served = self.deliveries
        if self.slots is not None:
            self.delivery_work += 1 + (batch.next - batch.base) // DEAL_ROWS
            rows = rows_of_bits(bits, batch.next - batch.base)
            self.slots.hand(self._row_slots(batch)[rows], member.place)
        return count

    @property
    def in_use(self) -> bool:
        """Whether it has members, or keeps a place for one."""
        return bool(self.members) or self.absent_holder is not None

    # --- attempts --------------------------------------------------------------------------------

    @property
    def counts_attempts(self) -> bool:
        """Whether the attempts of its records are counted."""
        return self.row.settings.attempts_max > 0

    @property
    def dead_letters(self) -> str:
        """Name of the mailbox of its dead letters."""
        return self.row.settings.dead_letters or self.default_dead_letters

    @property
    def default_dead_letters(self) -> str:
        """Name of that mailbox where the settings name none: the stream's and the group's name."""
        return f"{self.stream.name}.{self.name}"[: NAME_MAX - len(DEAD)] + DEAD

    def _is_dead(self, entry: Tries) -> bool:
        """Whether a record with these attempts is a dead letter.

        It is when they reach attempts_max, or when a member gave it up, whatever their number.
        """
        _, _, times, why = entry
        return 0 < self.row.settings.attempts_max <= times or why.startswith(FAILED)

    def _first_dying(self) -> int | None:
        """The least waiting offset of a record to be buried as a dead letter; None: no such."""
        for entry in self.row.tries:
            if self._is_dead(entry):
                first, end, _, _ = entry
                rows = self.holdings.waiting_in(first, end)
                if rows:
                    return first + low_bit(rows)
        return None

    def dying_of(self, base: int, bits: int) -> list[tuple[Tries, int]]:
        """Rows that are to become dead letters, by the log's entries of attempts: (entry, rows).

        base: offset of the lowest bit of `bits`.
        """
        return [(entry, rows) for entry, rows in self._tries_of(base, bits) if self._is_dead(entry)]

    def by_attempts(self, base: int, bits: int) -> list[tuple[int, int]]:
        """Divide rows of a batch, in their order, by their attempts so far: (attempts, rows).

        A delivery names one number of attempts, so each pair becomes a delivery of its own.
        """
        found: list[tuple[int, int]] = []
        rest = bits
        for (_, _, attempts, _), rows in self._tries_of(base, bits):
            before = rest & ones(low_bit(rows))  # Rows without an entry had no attempt.
            rest ^= before | rows
            if before:
                found.append((0, before))
            last_attempts, last_rows = found[-1] if found else (-1, 0)
            if last_attempts == attempts:  # Entries with other reasons: one delivery for both.
                found[-1] = attempts, last_rows | rows
            else:
                found.append((attempts, rows))
        if rest:
            found.append((0, rest))
        return found

    def _tries_of(self, base: int, bits: int) -> Iterator[tuple[Tries, int]]:
        """Yield the log's entries of attempts (Tries) that rows of a batch have, each with them."""
        tries = self.row.tries
        end = base + bits.bit_length()
        # Entries are ranges of offsets, ascending: from the first one whose end is after `base`.
        for entry in tries[bisect_right(tries, base, key=itemgetter(1)) :]:
            first, entry_end, _, _ = entry
            if first >= end:
                return
            rows = bits & ones(min(entry_end, end) - base)
            if first > base:
                rows &= ~ones(first - base)
            if rows:
                yield entry, rows

    # --- what is done or comes back --------------------------------------------------------------

    def close(self, base: int, bits: int) -> None:
        """Count waiting rows as done: they have expired, or a newer record has replaced them.

        base: offset of the lowest bit of `bits`.
        """
        for page, mask in self.holdings.pieces(base, bits):
            self.holdings.close(page, mask)
            if self.slots is not None:
                self.slots.closed(slots_of(page, mask))

    def close_between(self, first: int, end: int) -> tuple[int, int]:
        """Count records of [first, end) as done that wait or are unread: the stream lost them.

        Those that members hold stay with them, as their bodies were sent. Returns the offset of
        the first record that is dropped, and how many are.
        """
        holdings = self.holdings
        begins, dropped = end, 0
        for page, mask in holdings.close_waiting(first, end):
            begins = min(begins, page.base + low_bit(mask))
            dropped += mask.bit_count()
            if self.slots is not None:
                self.slots.closed(slots_of(page, mask))
        if first <= holdings.read < end:  # The reader goes past what it has not read.
            begins = min(begins, holdings.read)
            dropped += end - holdings.read
            self.read_to(end)
        return begins, dropped

    def withhold(self, base: int, bits: int) -> Picked:
        """Take waiting rows that are being buried from all members, until back()."""
        picked: Picked = []
        for page, mask in self.holdings.pieces(base, bits):
            self.holdings.unhand(page, member=None, mask=mask)
            self.holdings.withhold(page, mask)
            picked.append((page, mask))
            if self.slots is not None:
                self.slots.withhold(slots_of(page, mask))
        return picked

    def withhold_from(self, member: Member, picked: Picked) -> None:
        """Take rows out of a member's hands, as their leases are over, and withhold them.

        Without attempts to be logged, back() follows at once: no slot has to rest for it.
        """
        for page, mask in picked:
            self.holdings.unhand(page, member, mask)
            self.holdings.withhold(page, mask)
            if self.slots is not None and self.counts_attempts:
                self.slots.hold_back(slots_of(page, mask))

    def back(self, picked: Picked, *, late: bool) -> None:
        """Let withheld rows wait again, as none buries them. late: after a pause (Page.late)."""
        holdings, slots = self.holdings, self.slots
        for page, mask in picked:
            holdings.restore(page, mask, member=None, now_ms=0)
            if late:
                # restore() has let the rows wait, and unhand() takes them out of the queue again.
                holdings.unhand(page, None, mask)
                holdings.delay(page, mask)
            if slots is not None:
                (slots.delay if late else slots.back)(slots_of(page, mask))

    def slots_at(self, offsets: list[int]) -> list[int]:
        """Slots of offsets, for a dead letter to name: [] unless keyed, 0 of one without a page."""
        if self.slots is None:
            return []
        found: list[int] = []
        for offset in offsets:
            page, _ = next(self.holdings.within(offset, offset + 1), (None, 0))
            slots = None if page is None else page.slots
            found.append(0 if slots is None else int(slots[offset % PAGE]))
        return found

    def reopen(self, offset: int, slot: int) -> None:
        """Let a record wait again whose dead letter a client requeued. slot: its slot, if keyed."""
        if offset >= self.holdings.read:
            _, self.done_earlier = without_done(
                self.holdings.read, self.done_earlier, [(offset, offset + 1)]
            )
            return  # The group has not read it yet: reading will find it.
        if any(page.open & mask for page, mask in self.holdings.within(offset, offset + 1)):
            return  # A reset has had the group read the record again, which is open since then.
        self.holdings.take_in(offset, 1)
        if self.slots is None:
            return
        for page, _ in self.holdings.within(offset, offset + 1):
            if page.slots is None:
                page.slots = np.zeros(PAGE, np.uint16)
            page.slots[offset - page.base] = slot
        self._slots_of = NOBODY, np.empty(0, np.uint16)  # It lacks the slot of this record.
        self.slots.take_in(np.array([slot], np.uint16))

    def acknowledged(self, picked: Picked) -> None:
        """Count withheld records as done, since they were acknowledged or buried."""
        for page, mask in picked:
            self.holdings.finish(page, mask)
            if self.slots is not None:
                self.slots.done(slots_of(page, mask))

    @property
    def has_unlogged(self) -> bool:
        """Whether records are done that the log does not have as done: Progress is to tell it."""
        if self.holdings.low > self.row.next:
            return True
        return any(page.logging is UNLOGGED for page in self.holdings.pages)
