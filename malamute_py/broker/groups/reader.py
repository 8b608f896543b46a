"""Reading for groups: batches of a stream for each group, and their handing out to members.

Owns the reader of each group, the order of their turns, and the reads of history that are under way
for groups. The rules: one quantum a turn and one read a group, both bounded; a record goes to the
group once as long as no member dies; offsets that are not selected, have expired or are gone count
as done. A record that has become a dead letter is buried: copied into a mailbox, then done; `tries`
is what the log has of attempts. A group takes records (`takes`) while a member has credit, and
reads on (`reads_on`) while its window has room. In a stream with keys, newest records move: they
are copied within the ring, and keep their offsets; the place of a copy is where it lies. Source:
docs/design.md, Queues and the checkpoint.

A group is not a Subscription with the group in the place of its link. A subscription's deliveries
join into covers of one peer and never come back, its credit is one number, and it is either live or
on demand. A group hands one batch to several peers, rows that come back are wanted again from the
middle of what was read, and a keyed group skips rows that wait for a member without credit. So a
group has a small reader of its own over the hot window and ReadRange, woken by the fan-out, and
shares matching, expiry, extraction and the outbox with subscriptions. The reader keeps no bodies: a
record that found no credit is read again, usually from the hot window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final

from malamute_protocol.commands import Gap
from malamute_protocol.content import Content
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.batches.bounds import first_within_bounds
from malamute_py.broker.batches.copies import batches_of_copy
from malamute_py.broker.batches.encoding import PartEncodings
from malamute_py.broker.batches.rows import narrow, unexpired
from malamute_py.broker.context import Shard
from malamute_py.broker.groups.dead_letters import DeadLetters
from malamute_py.broker.groups.group import DEALS_AT_ONCE, Group
from malamute_py.broker.groups.holdings import Picked, slots_of
from malamute_py.broker.groups.member import Member
from malamute_py.broker.groups.progress import Progress
from malamute_py.broker.groups.selection import PreparedHeaders, slot_of
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.newest import Keys
from malamute_py.broker.log.stream import StampedBatch, Stream
from malamute_py.broker.ready import HistoryRead, ReadFailed, ReadRange
from malamute_py.broker.streams.start_positions import may_match
from malamute_py.broker.structures.bitmaps import bits_of_rows
from malamute_py.broker.structures.timers import Timers
from malamute_py.broker.subscriptions.live import Delivery
from malamute_py.broker.subscriptions.matching import MATCHING, Choosing, Matching, is_quick
from malamute_py.broker.subscriptions.turns import IDLE_READS_MAX, Turns

TURN_BATCHES_MAX: Final = 256
"""Batches that one turn looks at, selected or not: some 4 ms when each has one record."""
READ_BYTES_MAX: Final = 256 << 10
"""Bytes of one read of history: some 800 batches of one record each, which take 5 to 15 ms."""
MOVED_AT_ONCE: Final = 64
"""Newest records that have moved of which the copies are read at one time."""
READ_DEALS_MAX: Final = 2 * DEALS_AT_ONCE
"""Small deliveries that a keyed group makes of one read, at most."""
DEAL_BYTES: Final = 32 << 10
"""Weight of a small delivery of a keyed group in a step's budget, however few bytes it has."""
HELD_UP_MS: Final = 30_000
"""Time that a group may stand without reading further before its operator is told."""
EXTRACT_ROW_BYTES: Final = 512
"""Rows of at least this size are extracted whatever their share of a batch: sending a batch once
to each of several members costs more than copying its rows."""


class GroupReader:
    """The readers of all groups of one core.

    The broker calls `serve` in each turn and `history` with answers of the journal; all that may
    give a group something to hand out calls `wake`.
    """

    def __init__(
        self,
        shard: Shard,
        links: Links,
        delivery: Delivery,
        matching: Matching,
        progress: Progress,
        timers: Timers,
        dead_letters: DeadLetters,
    ) -> None:
        self._shard = shard
        self._dead_letters = dead_letters
        self._links = links
        self._delivery = delivery
        self._matching = matching
        self._progress = progress
        self._timers = timers
        self.turns: Final[Turns[Group, Group]] = Turns(shard)
        self._among_moved: dict[int, dict[int, list[int]]] = {}
        """Token of a read of copies of newest records -> {place of a copy: offsets in it}."""

    # --- serving ------------------------------------------------------------------------------

    def wake(self, group: Group) -> None:
        """Queue a group for a turn: something has changed, and it may have rows to hand out."""
        if (
            not group.queued and not group.reading and not group.gone
            and (group.members or group.may_bury)  # Burying needs no member.
        ):  # fmt: skip
            group.queued = True
            self.turns.queue.append(group)

    def back(self, group: Group, picked: Picked, after_ms: int) -> None:
        """Let withheld records wait again, at once or after a time.

        Called once the log has that an attempt of them has ended, or has refused their burial.
        """
        if group.gone:
            return
        group.back(picked, late=after_ms > 0)
        if after_ms > 0:
            self.put_off(group, picked, after_ms)
        # Attempts were counted: records that have some (`tries`) may be dead letters now.
        group.may_bury = bool(group.row.tries)
        # No member waits for records that the stream let go of meanwhile.
        self.drop_gone(group)
        self.wake(group)

    def put_off(self, group: Group, late: Picked, after_ms: int) -> None:
        """Set the timer after which late records, of which no member is given any, wait again."""
        self._timers.set(self._shard.now_ms + after_ms, partial(self._due, group, late))

    def _due(self, group: Group, late: Picked) -> None:
        """Let late records wait again, as their pause is over.

        late: the records that were delayed together; those that are late no more are passed over.
        """
        if group.gone:
            return
        for page, mask in late:
            due = group.holdings.due(page, mask)
            if due and group.slots is not None:
                group.slots.due(slots_of(page, due))
        group.may_bury = bool(group.row.tries)
        self.drop_gone(group)
        self.wake(group)

    def serve(self) -> None:
        """Give turns until all groups are served or the step's budget is used up, one at least.

        Called once in each turn of the broker. A starved group waits for one of the bounded reads
        of history; it goes first when one may begin.
        """
        budget = self._shard.settings.step_bytes
        turns = self.turns
        more = self._shard.share()  # Whether groups have time left in this turn of the broker.
        while budget > 0 and turns.runnable:
            if turns.starved and turns.may_read:
                group = turns.starved.take()
            else:
                group = turns.queue.popleft()
                group.queued = False
            # A group that had its turn as starved may still stand in the queue.
            if not group.gone and not group.reading:
                try:
                    budget -= self._turn(group, more)
                except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                    self._erred(group, error)
            if not more():
                return

    def _erred(self, group: Group, error: Exception) -> None:
        """End the memberships of a group after an error in serving it; members may join again."""
        self._shard.erred("serving a group", error, stream=group.stream.name, group=group.name)
        for member in list(group.members):
            member.owner.end(member, "internal")

    def _turn(self, group: Group, more: Callable[[], bool]) -> int:
        """Hand out one quantum of records of one group, or begin a read of history for it.

        more: whether groups have time left in this turn of the broker. Returns the bytes given, by
        which the budget of all groups is lessened.
        """
        stream = group.stream
        first = stream.first_to_read(self._shard.now_ms)
        holdings = group.holdings
        # A record that a member gave back lies before what was read, and may be out of bounds.
        if holdings.read < first or (stream.bounded and holdings.low < first):
            self._drop_before(group, first)
        quantum = self._shard.settings.quantum_bytes
        given, began = 0, group.delivery_work
        for _ in range(TURN_BATCHES_MAX):
            offset = group.wanted()
            if offset is None:
                # The window is full of records that no member has acknowledged: if that lasts, the
                # operator is told.
                if not group.watched and group.stuck:
                    group.watched = True
                    self._watch(group, group.holdings.low, told=False)
                return given
            if given >= quantum or group.delivery_work - began >= DEALS_AT_ONCE:
                break
            if stream.keys is not None and offset < stream.first:
                # The ring has only newest records of these offsets, which have moved.
                self._read_moved(group, stream.keys, offset)
                return given
            if offset < stream.hot_first:  # It lies no more in memory, only in the journal.
                self._read(group, offset)
                return given
            given += self._hand_out(group, self._hot(stream, offset))
            if group.reading:  # The headers of the batch are matched in slices first.
                return given
            if not more():
                break
        self.wake(group)  # It has more to hand out, in its next turn.
        # Batches that no group selects are work, too, and so are many small deliveries.
        return max(given, quantum, (group.delivery_work - began) * DEAL_BYTES)

    def _watch(self, group: Group, low: int, told: bool) -> None:
        """Look again after HELD_UP_MS at a group whose reader waits for an acknowledgement.

        low: its position. told: the operator was told of this position.
        """
        due_ms = self._shard.now_ms + HELD_UP_MS
        self._timers.set(due_ms, partial(self._look_again, group, low, told))

    def _look_again(self, group: Group, before: int, told: bool) -> None:
        """Tell the operator once which member holds a group up, unless its position has moved.

        before: the position when the look was asked for. told: whether the operator knows. It goes
        on looking until the group reads on.
        """
        if group.gone or not group.stuck:
            group.watched = False
            return
        low = group.holdings.low
        if low == before and not told:
            self._say_held_up(group, low)
        self._watch(group, low, told=low == before)

    def _say_held_up(self, group: Group, low: int) -> None:
        """Tell the operator that a group reads nothing more until its oldest record is done.

        low: the offset of that record.
        """
        holdings, stream = group.holdings, group.stream
        self._shard.counters["groups_held_up"] += 1
        holder = holdings.member_with(low)
        self._shard.event(
            "group_held_up", "warning", stream=stream.name, group=group.name, next=low,
            read=holdings.read, held=holdings.held,
            link=0 if holder is None else holder.link.number,
            identity="" if holder is None else holder.identity,
            since_ms=0 if holder is None else holdings.since(holder),
        )  # fmt: skip

    def _hot(self, stream: Stream, offset: int) -> StampedBatch:
        """Return the batch in memory that has an offset; mostly it is the newest."""
        newest = stream.hot[-1]
        return newest if newest.base <= offset else stream.hot[stream.hot_place(offset)]

    def _hand_out(self, group: Group, batch: StampedBatch) -> int:
        """Take in a batch that the group has not read, and hand out its waiting rows.

        Returns the bytes given. A batch that cannot be handled is passed over with a GAP that names
        its offsets, as damage in the journal is.
        """
        try:
            return self._hand_out_waiting(group, batch)
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._pass_over(group, batch, error)
            return batch.size  # It was work, and counts toward the turn's quantum.

    def _pass_over(self, group: Group, batch: StampedBatch, error: Exception) -> None:
        """Pass over a batch that the group cannot handle, for it would meet the error for ever.

        The batch is quarantined, and the group's members get a GAP.
        """
        reason = self._shard.quarantine(
            group.stream.name, batch.base, batch.next, "serving a group", error, group=group.name
        )
        for member in group.members:
            # Some members had been taken out of their order for this batch.
            group.free.file(member)
        self._gap(group, (batch.base, batch.next, "damaged", reason))

    def _hand_out_waiting(self, group: Group, batch: StampedBatch) -> int:
        """Deliver what waits of a batch to the members; returns the bytes given.

        A batch that the group has not read is read first. Waiting rows that have expired, that
        were purged, or that are dead letters are taken out before the rest is handed out.
        """
        now_ms = self._shard.now_ms
        holdings = group.holdings
        if batch.next > holdings.read:
            if not self._prepared(group, batch):
                return 0
            group.take_in(batch, now_ms)
            if not holdings.open:
                # None of these rows waits, so the group's position has moved past them.
                self._progress.flush_later(group)
        bits = holdings.waiting_in(batch.base, batch.next)
        if not bits:
            return 0
        alive = unexpired(batch.content, now_ms)
        not_purged = group.stream.purges.left(batch.content, batch.base)
        if not_purged is not None:
            alive = narrow(alive, not_purged)
        if alive is not None:
            gone = bits & ~bits_of_rows(alive)
            if gone:
                group.close(batch.base, gone)
                self._progress.flush_later(group)
                bits ^= gone
                if not bits:
                    return 0
        if group.row.tries:
            bits = self._dead_letters.without(group, batch, bits, self.back)
            if not bits:
                return 0
        given = 0
        settings = self._shard.settings
        parts = PartEncodings(
            batch, settings.extract_bytes_min, settings.extract_share, EXTRACT_ROW_BYTES
        )
        # A delivery names one number of attempts for all of its records.
        deliver = self._deliver_by_attempts if group.row.tries else self._deliver
        for member, rows in group.divided(batch, bits):
            given += deliver(group, batch, parts, member, rows)
        return given

    def _prepared(self, group: Group, batch: StampedBatch) -> bool:
        """Whether the group's selection of a batch is known or quick to find.

        False: the selection is found in slices, which may take several turns of the broker, so that
        no other client waits for it; the group has its next turn afterwards.
        """
        content, selection = batch.content, group.selection
        prepared = selection.prepared
        if not self._matching.sliced:  # This core measures no time: it matches all at once.
            return True
        if prepared is not None and prepared.base == batch.base:
            content.share(prepared.table)  # The batch was read again: its table need not be.
            return True
        if is_quick(content):  # It has few headers; a slow pattern takes long for few, too.
            if not selection.slow or selection.knows(content):
                return True
        elif selection.everything and group.slots is None:
            return True
        reading = self._matching.reading(group.stream.uuid, batch.base, content)
        number_of = None if group.slots is None else slot_of
        job = Choosing(selection.predicate, content, number_of, reading)
        if self._matching.run(job):  # The first slice was enough.
            selection.prepared = PreparedHeaders(batch.base, job.chosen, job.numbers, content.table)
            return True
        group.reading = MATCHING  # As with a read of history, the group has no turn until then.

        def matched() -> None:
            """Keep the matched headers of the batch for the group, and give the group a turn."""
            group.reading = 0
            if not group.gone:
                selection.prepared = PreparedHeaders(
                    batch.base, job.chosen, job.numbers, content.table
                )
                self.wake(group)

        def failed(error: Exception) -> None:
            """Pass the batch over, as one that cannot be handled."""
            group.reading = 0
            if not group.gone:
                self._pass_over(group, batch, error)
                self.wake(group)

        self._matching.later(job, matched, lambda: not group.gone, failed)
        return False

    def _deliver_by_attempts(
        self, group: Group, batch: StampedBatch, parts: PartEncodings, member: Member, rows: int
    ) -> int:
        """Put rows into a member's outbox as _deliver() does, a delivery for each attempt count."""
        return sum(
            self._deliver(group, batch, parts, member, some, attempts=earlier + 1)
            for earlier, some in group.by_attempts(batch.base, rows)
        )

    def _deliver(
        self, group: Group, batch: StampedBatch, parts: PartEncodings, member: Member, rows: int,
        attempts: int = 1,
    ) -> int:  # fmt: skip
        """Hand rows of a batch to a member, and put them into its link's outbox; returns the bytes.

        attempts: of the rows, with this delivery.
        """
        # The frames come first: rows would stay in the member's hands if frames() raised.
        frames, bitmap, size = parts.frames(rows)
        count = group.hand(batch, member, rows, self._shard.now_ms)
        # The delivery's cover is this batch alone: other members get what lies before.
        member.covered = batch.base
        self._delivery.put(member, batch.next, frames, bitmap, count, size, attempts)
        self._shard.counters["group_records_out"] += count
        return size

    # --- reads of history -------------------------------------------------------------------------

    def _read(self, group: Group, offset: int) -> None:
        """Have the journal read history for a group, from the offset that it wants first.

        Where all reads that may be under way at one time are taken, the group waits for one.
        """
        stream = group.stream
        if not self.turns.may_read:
            self.turns.starved.add(None, group)
            return
        token = self.turns.begin(group)
        group.reading, group.reading_from = token, offset
        self.turns.reads.append(
            ReadRange(
                stream.ring.name, stream.number, token, offset,
                min(group.tail, stream.hot_first),
                min(self._shard.settings.quantum_bytes, READ_BYTES_MAX),
                # The journal skips batches that cannot have a selected header; None: it skips none.
                None
                if group.selection.everything or group.reads_all
                else partial(may_match, group.selection.pattern),
                oldest_ms=stream.oldest_ms(self._shard.now_ms), pinned=stream.pinned,
            )
        )  # fmt: skip

    def history(self, answer: HistoryRead | ReadFailed) -> bool:
        """Take the journal's answer to a read; False: a subscription asked for it, not a group."""
        group = self.turns.answered(answer.token)
        if group is None:
            return False
        places = self._among_moved.pop(answer.token, None) if self._among_moved else None
        group.reading = 0
        if group.gone:
            return True
        if isinstance(answer, ReadFailed):
            if answer.code == "internal" and not group.reads_all:
                # Reading for a selection looks into batches; reading all of them does not.
                group.reads_all = True
                self.wake(group)
            else:
                self._failed(group, answer)
            return True
        try:
            self._answered(group, answer, places)
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._erred(group, error)
        return True

    def _answered(
        self, group: Group, answer: HistoryRead, places: dict[int, list[int]] | None
    ) -> None:
        """Hand out what the journal read for a group.

        places: of a read of copies, {place of a copy: offsets in it}; None: another read. After
        IDLE_READS_MAX reads that brought the group no further, its members end: it would read the
        same for ever.
        """
        holdings = group.holdings
        before = holdings.read, group.deliveries, holdings.open, holdings.waiting
        offset = group.wanted()
        if offset is not None and (offset >= group.reading_from or group.kind == "shared"):
            # Otherwise an older row came back meanwhile, and goes first where there is an order:
            # the next turn reads from there.
            if places is not None:
                self._hand_out_moved(group, answer, places)
            elif group.stream.keys is None or not answer.gave_up:
                # Where records were gone from a stream with keys, the next turn reads the copies.
                self._hand_out_history(group, answer)
            after = holdings.read, group.deliveries, holdings.open, holdings.waiting
            if after != before:
                group.idle_reads = 0
            elif not group.reading:
                group.idle_reads += 1
        if group.idle_reads >= IDLE_READS_MAX:
            group.idle_reads = 0
            self._shard.event(
                "read_stuck", "error", stream=group.stream.name, group=group.name,
                offset=holdings.low,
            )  # fmt: skip
            for member in list(group.members):
                member.owner.end(member, "internal")
            return
        self.wake(group)

    def _failed(self, group: Group, answer: ReadFailed) -> None:
        """End all members of a group whose stream could not be read, and tell the operator."""
        self._shard.event(
            "read_failed", "error", stream=group.stream.name, group=group.name,
            code=answer.code, reason=answer.reason,
        )  # fmt: skip
        for member in list(group.members):
            member.owner.end(member, answer.code)

    def _hand_out_history(self, group: Group, answer: HistoryRead) -> None:
        """Hand out batches of the journal until the members take no more.

        A run of the answer is a piece of the journal; its spans are the batches in it.
        """
        holdings, stream = group.holdings, group.stream
        if stream.bounded:
            # The journal may still have records that are too old for the stream, or too many.
            kept = first_within_bounds(stream, answer, self._shard.now_ms)
            self._drop_before(group, kept)
        gaps, began = list(answer.gaps), group.delivery_work
        for run in answer.runs:
            data = memoryview(run.data)
            for at, size, base, count in run.spans:
                end = base + count
                while gaps:
                    gap_first, *_ = gaps[0]
                    if gap_first > base:
                        break  # Batches before the gap go first.
                    self._gap(group, gaps.pop(0))
                if end <= holdings.read:  # The group has read it: rows of it may wait again.
                    if not holdings.waiting_in(base, end):
                        continue
                    if not (group.takes or group.may_bury):
                        return
                elif not group.takes or not group.reads_on:
                    return
                if base > holdings.read:
                    # The journal skipped batches that cannot match.
                    group.read_to(base)
                stored = data[at : at + size]
                batch = StampedBatch(
                    stream, bytes(stored[:STAMP_BYTES]), stored[STAMP_BYTES:],
                    Content(stored[STAMP_BYTES:]), base, end, size,
                )  # fmt: skip
                self._hand_out(group, batch)
                if group.reading or group.delivery_work - began >= READ_DEALS_MAX:
                    return
        for gap in gaps:
            self._gap(group, gap)
        if answer.next > holdings.read:
            # What the journal looked at beyond its last batch is not selected.
            group.read_to(min(answer.next, group.tail))
            if not holdings.open:
                self._progress.flush_later(group)

    # --- newest records that have moved ---------------------------------------------------------

    def _read_moved(self, group: Group, keys: Keys, offset: int) -> None:
        """Begin a read of newest records that have moved, or go on after the last of them.

        A stream with keys keeps the newest record of each subject: compaction copies it to the end
        of the ring before its segment is used again. It keeps its offset, and is found by the place
        of its copy. Older records of these subjects count as done, for newer ones replaced them.
        """
        stream = group.stream
        to = min(stream.first, group.tail)
        found = keys.moved_from(offset, to, MOVED_AT_ONCE)  # (offset, place of its copy) of each.
        if not found:
            self._close_replaced(group, offset, to)
            self.wake(group)
        elif not self.turns.may_read:
            self.turns.starved.add(None, group)
        else:
            token = self.turns.begin(group)
            group.reading, group.reading_from = token, offset
            # One copy may have several records, and is read once.
            places: dict[int, list[int]] = {}
            for at, place in found:
                places.setdefault(place, []).append(at)
            self._among_moved[token] = places
            size = min(self._shard.settings.quantum_bytes, READ_BYTES_MAX)
            self.turns.reads.append(
                ReadRange(
                    stream.ring.name, stream.number, token, offset, to, size,
                    places=tuple(places),
                )
            )  # fmt: skip

    def _hand_out_moved(
        self, group: Group, answer: HistoryRead, places: dict[int, list[int]]
    ) -> None:
        """Hand out newest records that have moved, in the order of their offsets.

        places: {place of a copy: offsets in it}, as the read asked for. Offsets between these
        records were replaced by newer ones and count as done.
        """
        keys, began, position = group.stream.keys, group.delivery_work, group.reading_from
        assert keys is not None
        # `next` of each run is the place of its copy; `next` of the answer is how many places the
        # journal has looked at.
        runs = {run.next: run for run in answer.runs}
        for place, offsets in islice(places.items(), answer.next):
            # Where the copies are now, without records that were replaced meanwhile.
            places_now = dict(keys.moved_from(offsets[0], offsets[-1] + 1, len(offsets)))
            run = runs.get(place)
            if run is None and any(places_now.get(offset, place) != place for offset in offsets):
                return  # They have moved once more: the next turn reads them there.
            batches = [] if run is None else batches_of_copy(group.stream, run, offsets)
            for batch in batches:
                self._close_replaced(group, position, batch.base)
                if not (group.takes or group.may_bury) or (
                    batch.next > group.holdings.read and not group.reads_on
                ):
                    return  # No member has credit, or the window is full.
                if not self._take_in_newest(group, keys, batch, offsets):
                    return
                self._hand_out(group, batch)
                if group.reading or group.delivery_work - began >= READ_DEALS_MAX:
                    return
                position = batch.next
            if run is None:  # The journal looked at the place, and the copy cannot be read.
                for offset in offsets:
                    self._close_replaced(group, position, offset)
                    if offset in places_now:
                        reason = "the copy of the record is damaged"
                        self._gap(group, (offset, offset + 1, "damaged", reason))
                    position = offset + 1

    def _take_in_newest(
        self, group: Group, keys: Keys, batch: StampedBatch, offsets: Sequence[int]
    ) -> bool:
        """Read those rows of a copied batch that are newest records; the other rows count as done.

        False: the batch is not read yet, as its headers are matched in slices first. A batch that
        cannot be cut is copied whole: it may have rows that newer records have replaced, and newest
        ones of which there is another copy. offsets: of the newest records in this copy.
        """
        base, next = batch.base, batch.next
        if next > group.holdings.read:
            if not self._prepared(group, batch):
                return False
            group.take_in(batch, self._shard.now_ms)
        newest = {*offsets, *(at for at, _ in keys.moved_from(base, next, next - base))}
        replaced = group.holdings.waiting_in(base, next)  # Less the newest ones.
        for offset in newest:
            if base <= offset < next:
                replaced &= ~(1 << (offset - base))
        if replaced:
            group.close(base, replaced)
            self._progress.flush_later(group)
        return True

    def _close_replaced(self, group: Group, first: int, end: int) -> None:
        """Count records of [first, end) as done that newer ones have replaced."""
        _, dropped = group.close_between(first, end) if first < end else (first, 0)
        if dropped:
            group.holdings.tidy()
            self._progress.flush_later(group)

    # --- what is gone -------------------------------------------------------------------------

    def drop_gone(self, group: Group) -> None:
        """Drop a group's records before the stream's first offset, and tell members of the gap."""
        self._drop_before(group, group.stream.first_to_read(self._shard.now_ms))

    def _drop_before(self, group: Group, first: int) -> None:
        """Count records before `first` as done, since retention removed them; members get a GAP."""
        low = group.holdings.low
        if low < first:
            self._gap(group, (low, first, "retention", ""))

    def _gap(self, group: Group, gap: tuple[int, int, str, str]) -> None:
        """Count offsets as done that the journal cannot give, and tell the members.

        gap: (first, end, code, reason). Offsets that a command removed, a trim, are told apart as
        purged: they are not lost.
        """
        first, end, code, reason = gap
        removed = min(end, group.stream.row.trimmed)
        if code == "retention" and first < removed:
            self._drop_gap(group, (first, removed, "purged", ""))
            first = removed
        if first < end:
            self._drop_gap(group, (first, end, code, reason))

    def _drop_gap(self, group: Group, gap: tuple[int, int, str, str]) -> None:
        """Drop the records of a gap, tell every member, and count them as lost unless purged."""
        first, end, code, reason = gap
        first, count = group.close_between(first, end)
        if not count:
            return
        purged = code == "purged"
        if not purged:
            group.lost += count
            self._shard.counters["group_records_lost"] += count
        self._shard.event(
            "group_gap", "info" if purged else "warning",
            stream=group.stream.name, group=group.name,
            **{"from": first, "to": end}, records=count, code=code,
        )  # fmt: skip
        for member in group.members:
            self._links.say(member.link, Gap(member.number, first, end, code, reason))
        group.holdings.tidy()
        self._progress.flush_later(group)
