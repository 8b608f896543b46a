"""Serving on demand: subscriptions that lag, in turn, as their credit allows.

Owns the turns of subscriptions that are not live. The rules: one quantum a turn and one read a
subscription, both bounded; many subscriptions of one stream have their turn together, as a cohort
(shared_window.py); a subscription becomes live in the turn in which its position equals the tail;
records that were read and found no credit are dropped and read again, never kept. Source:
docs/design.md, Flow control.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from struct import unpack_from
from typing import Any, Final

import numpy as np
from pyroaring import BitMap

from malamute_protocol.commands import Gap
from malamute_protocol.content import Content
from malamute_protocol.gather import BYTES_A_ROW, gatherable
from malamute_protocol.stamp import STAMP_BYTES, Stamp
from malamute_py.broker.batches.bounds import first_within_bounds
from malamute_py.broker.batches.encoding import encoding_of
from malamute_py.broker.batches.rows import (
    Mask,
    rows_of_headers,
    unexpired,
    within_client_time,
)
from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import Links, cost_of_few
from malamute_py.broker.log.newest import Keys
from malamute_py.broker.log.stream import StampedBatch, Stream
from malamute_py.broker.ready import HistoryRead, HistoryRun, ReadFailed, ReadRange
from malamute_py.broker.streams.start_positions import may_match
from malamute_py.broker.subscriptions.audience import audience_of
from malamute_py.broker.subscriptions.live import CAREFUL_BATCHES, Delivery
from malamute_py.broker.subscriptions.matching import (
    MATCHING,
    Choosing,
    Matching,
    PreparedRows,
    is_quick,
)
from malamute_py.broker.subscriptions.portion import READ_ROWS_MAX, Portion
from malamute_py.broker.subscriptions.selection import headers_chosen, select
from malamute_py.broker.subscriptions.shared_window import (
    NEW_HEADERS_MAX,
    Cohort,
    SharedWindow,
    Survey,
    Surveyed,
    hot_batches,
    stored_batches,
)
from malamute_py.broker.subscriptions.subscription import SUBSCRIBE, Subscription
from malamute_py.broker.subscriptions.turns import IDLE_READS_MAX, Turns
from malamute_py.matcher import compile_pattern, rows_by_subject

EXPIRY_AT = STAMP_BYTES + 56
"""Position of a stored batch's earliest expiry."""
GATHERED_ROWS_MAX = 32
"""Rows of a batch that join those of neighbouring batches; each is taken alone, which is slower
than by column."""
SPARSE_BYTES = 64 << 10
"""Bytes of one read when single records are looked for."""
NEIGHBOURS = 65_536
"""Records from the first position of a cohort within which others join its read of history."""
MOVED_AT_ONCE = 256
"""Newest records that have moved of which the copies are read at one time."""
AHEAD_MAX = 4
"""Batches that are surveyed at one time, of different streams: one may take 40 MiB."""
TURNS_ALONE = 16
"""Turns after which a subscription that was left out of a shared read may join one again."""
TURN_BATCHES_MAX = 512
"""Batches of the hot window that one turn looks at, selected or not."""


class OnDemand:
    """The subscriptions that are not live."""

    def __init__(self, shard: Shard, links: Links, delivery: Delivery, matching: Matching) -> None:
        self._shard = shard
        self._links = links
        self._delivery = delivery
        self._matching = matching
        self.turns: Final[Turns[Subscription | Cohort | Surveyed, Subscription | Cohort]] = Turns(
            shard
        )
        self._cohorts: dict[tuple[Stream, bool], Cohort] = {}
        """Cohorts in the queue, by stream and by whether they see only what is durable."""
        self._ahead: Final[dict[Stream, list[Subscription]]] = {}
        """Streams of which a batch is surveyed for a cohort, each with the subscriptions that wait
        until the cohort has been given its rows."""
        self._in_history: dict[Stream, dict[Subscription, None]] = {}
        """Subscriptions of each stream that read everything of its history: several share a
        read."""
        self._more = shard.share()
        """Whether this turn's share of time lasts."""
        settings, limits = shard.settings, shard.settings.limits
        self._may_gather = (
            min(limits.batch_records_max, limits.headers_max) >= READ_ROWS_MAX + GATHERED_ROWS_MAX
            and limits.batch_bytes_max
            >= settings.quantum_bytes + max(limits.record_bytes_max, limits.batch_bytes_max // 4)
        )
        """Whether the limits let clients take a gathered batch, from the journal or from memory."""

        self._among_moved: dict[int, dict[int, list[int]]] = {}
        """Reads of copies of newest records by their tokens: {place of a copy: offsets}."""

    def consider(self, sub: Subscription) -> None:
        """Queue a subscription for a turn if it can take something: its state has changed."""
        if sub.live or sub.queued or sub.reading or not sub.started:
            return
        # A subscription at its end is told so without credit.
        if sub.able or sub.position >= sub.stop:
            sub.queued = True
            if (
                sub.turns_alone
                or not self._may_gather
                or not sub.joins
                or sub.position < sub.stream.purges.before
                or (self._matching.sliced and audience_of(sub.stream).index.slow)
            ):
                sub.turns_alone = max(0, sub.turns_alone - 1)
                self.turns.queue.append(sub)
                return
            key = sub.stream, sub.durable
            cohort = self._cohorts.get(key)
            if cohort is None:
                cohort = self._cohorts[key] = Cohort(sub.stream, sub.durable)
                self.turns.queue.append(cohort)
            cohort.members.append(sub)

    def forget(self, sub: Subscription) -> None:
        """Forget a subscription that has ended; the queue drops it when its turn comes."""
        self.turns.forget(sub, sub.link)
        self._leave_history(sub)

    def serve(self) -> None:
        """Give turns until all are served or the turn's budget is used up, one at least."""
        budget = self._shard.settings.step_bytes
        turns = self.turns
        self._more = self._shard.share()
        while budget > 0 and turns.runnable:
            # Reads may be used up by this turn: a starved subscription may have ended, or need
            # none.
            starved = turns.starved and turns.may_read
            sub = turns.feed() if starved else turns.queue.popleft()
            if isinstance(sub, Surveyed):
                budget -= self._turn_surveyed(sub)
            elif isinstance(sub, Cohort):
                try:
                    budget -= self._turn_of_cohort(sub)
                except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                    self._each_alone(sub.stream, sub.members, error)
            else:
                sub.queued = False
                if sub.started and not sub.live and (sub.able or sub.position >= sub.stop):
                    try:
                        budget -= self._turn(sub)
                    except Exception as error:  # noqa: BLE001 - as above
                        self._erred(sub, error)
            if not self._more():
                return

    # --- errors -----------------------------------------------------------------------------

    def _each_alone(self, stream: Stream, members: list[Subscription], error: Exception) -> None:
        """Serve each of many subscriptions alone, since an error came of serving them together."""
        self._shard.erred("serving together", error, stream=stream.name)
        for sub in members:
            if sub.started:
                sub.turns_alone = TURNS_ALONE
                sub.queued = False
                self._again(sub)

    def _erred(self, sub: Subscription, error: Exception) -> None:
        """Serve a subscription again batch by batch, to find the batch that an error came of."""
        if sub.careful:
            # No batch caused the error, but the subscription itself: its link bears it.
            self._links.fail(sub.link, "serving", error, SUBSCRIBE, sub.number)
            return
        self._shard.erred(
            "serving", error, stream=sub.stream.name, offset=sub.covered, link=sub.link.number,
            identity=sub.link.identity, subscription=sub.number,
        )  # fmt: skip
        sub.careful = CAREFUL_BATCHES
        self._again(sub)

    def _again(self, sub: Subscription) -> None:
        """Serve a subscription again from its last cover on."""
        if not sub.live:
            sub.position = sub.covered
            self.consider(sub)

    def _damaged(self, sub: Subscription, base: int, next: int, error: Exception) -> None:
        """Pass over a batch that cannot be handled for one subscription, which gets GAP."""
        reason = self._shard.quarantine(
            sub.stream.name, base, next, "serving", error, link=sub.link.number,
            identity=sub.link.identity,
        )  # fmt: skip
        sub.careful = 0
        sub.position = max(sub.position, base)
        self._gap(sub, next, "damaged", reason)

    # --- one turn -------------------------------------------------------------------------

    def _turn(self, sub: Subscription) -> int:
        """Give one quantum, or begin a read; returns the bytes given."""
        stream = sub.stream
        if stream.keys is not None and sub.position < min(stream.first, sub.stop):
            self._turn_among_moved(sub, stream.keys)
            return 0
        if sub.wanted is not None:
            self._to_next_wanted(sub)
        self._past_what_is_gone(sub)
        if sub.position >= sub.stop:
            sub.owner.end(sub, "end")
            return 0
        if sub.position >= sub.tail:
            self._leave_history(sub)
            self._delivery.catch_up(sub)
            return 0
        if sub.position >= stream.hot_first:
            self._leave_history(sub)
            given = self._from_memory(sub)
            self.consider(sub)
            return given
        if not self.turns.may_read:
            sub.queued = True
            self.turns.starve(sub, sub.link)
            return 0
        self._read(sub)
        return 0

    def _past_what_is_gone(self, sub: Subscription) -> None:
        stream = sub.stream
        # Retention may be ahead of what is durable: the position of a durable reader stays before
        # that, and records that are still in memory come to it after all.
        first = min(stream.first_at(self._shard.now_ms), sub.stop, sub.tail)
        lost = min(first, stream.lost_before)
        if sub.position < lost:
            self._gap(sub, lost, "lost", "")
        if sub.position < first:
            self._gap(sub, first, "retention", "")

    # --- newest records that have moved -----------------------------------------------------

    def _turn_among_moved(self, sub: Subscription, keys: Keys) -> None:
        """Begin a read of newest records that have moved, or go on after the last of them.

        Older records of their subjects are covered without a word: newer ones replaced them.
        """
        stream = sub.stream
        to = min(stream.first, sub.stop, sub.tail)
        found = keys.moved_from(sub.position, to, MOVED_AT_ONCE)
        if not found:
            sub.position = to
            self.consider(sub)
        elif not self.turns.may_read:
            sub.queued = True
            self.turns.starve(sub, sub.link)
        else:
            token = sub.reading = self.turns.begin(sub)
            places: dict[int, list[int]] = {}
            for offset, place in found:
                places.setdefault(place, []).append(offset)
            self._among_moved[token] = places
            size = min(self._shard.settings.quantum_bytes, sub.left_bytes, sub.link.room)
            self.turns.reads.append(
                ReadRange(
                    stream.ring.name, stream.number, token, sub.position, to, size,
                    places=tuple(places),
                )
            )  # fmt: skip

    def _deliver_moved(
        self, sub: Subscription, answer: HistoryRead, places: dict[int, list[int]]
    ) -> None:
        """Deliver newest records that have moved, in the order of their offsets.

        places: offsets of the records in a copy, by the place of the copy.
        """
        keys = sub.stream.keys
        assert keys is not None
        runs = {run.next: run for run in answer.runs}
        portion = Portion(self._delivery, sub, self._shard.settings.quantum_bytes)
        for place, offsets in islice(places.items(), answer.next):
            if not portion.open:
                break
            run = runs.get(place)
            if run is not None:
                self._give_moved(sub, portion, run, offsets)
                continue
            portion.flush()
            places_now = dict(keys.moved_from(offsets[0], offsets[-1] + 1, len(offsets)))
            if any(places_now.get(offset, place) != place for offset in offsets):
                return  # They have moved once more: the next turn reads them there.
            for offset in offsets:
                if offset in places_now:
                    sub.position = max(sub.position, offset)
                    self._gap(sub, offset + 1, "damaged", "the copy of the record is damaged")
        portion.flush()

    def _give_moved(
        self, sub: Subscription, portion: Portion, run: HistoryRun, offsets: list[int]
    ) -> None:
        """Deliver those rows of a copy that are newest records and that a subscription selects."""
        data = memoryview(run.data)
        ((_, size, base, count),) = run.spans
        content, next = Content(data[STAMP_BYTES:]), offsets[-1] + 1
        deltas = content.offset_deltas
        at = base + (np.arange(count) if deltas is None else deltas.astype(np.int64))
        mask = np.isin(at, offsets) & (at >= sub.position)
        for narrower in (
            rows_of_headers(content, headers_chosen(sub, content)),
            unexpired(content, self._shard.now_ms),
            None if sub.client_time is None else within_client_time(content, sub.client_time),
        ):
            if narrower is not None:
                mask &= narrower
        batch = StampedBatch(
            sub.stream, bytes(data[:STAMP_BYTES]), data[STAMP_BYTES:], content, base, next, size
        )
        encoding = encoding_of(batch, mask, 0, 2.0)
        if encoding is not None:
            encoding = encoding.for_(False)
            if encoding.rows is None:
                portion.whole(encoding.frames, next, encoding.count, encoding.bytes)
            else:
                portion.part(encoding, next)
        sub.position = next

    # --- many in one turn -----------------------------------------------------------------

    def _turn_of_cohort(self, cohort: Cohort) -> int:
        """Serve a cohort from the hot window, or begin a read for it; returns the bytes given."""
        stream, settings = cohort.stream, self._shard.settings
        key = stream, cohort.durable
        if self._cohorts.get(key) is cohort:
            del self._cohorts[key]
        behind: list[Subscription] = []
        for sub in cohort.members:
            sub.queued = False
            if not sub.started or sub.live or not sub.able:
                continue
            self._past_what_is_gone(sub)
            if sub.position < stream.purges.before:
                self.consider(sub)
            elif sub.position < sub.tail:
                behind.append(sub)
            else:
                self._at_tail(sub, many=len(cohort.members) >= settings.shared_window_min)
        if len(behind) < settings.shared_window_min:
            self._turns_alone(behind)
            return 0
        first, hot_first = behind[0].position, stream.hot_first
        if first >= hot_first:
            members = [sub for sub in behind if sub.position >= hot_first]
            for sub in behind:
                if sub.position < hot_first:
                    self.consider(sub)
            place = stream.hot_place(min(sub.position for sub in members))
            oldest, sliced = stream.hot[place], self._matching.sliced
            if sliced and not is_quick(oldest.content) and gatherable(oldest.content):
                stamp = Stamp.unpack(oldest.stamp, verify=False)
                self._survey(stream, members, stamp, oldest.content)
                return 0
            window = SharedWindow(stream, members)
            batches = islice(stream.hot, place, place + TURN_BATCHES_MAX)
            window.fill(hot_batches(batches), members[0].tail, settings.step_bytes, sliced=sliced)
            given = self._share_out(members, window, window.reached)
            # Looking costs, too, whether a subscription takes something or not; new headers cost
            # most.
            looked = window.new * settings.step_bytes // NEW_HEADERS_MAX
            return max(given, looked, window.rows * BYTES_A_ROW)
        members = []
        low, high = first - NEIGHBOURS, min(first + NEIGHBOURS, hot_first)
        for sub in behind:
            if low <= sub.position < high:
                members.append(sub)
            else:
                self.consider(sub)
        if len(members) < settings.shared_read_min:
            self._turns_alone(members)
        elif not self.turns.may_read:
            self.turns.starve(Cohort(stream, cohort.durable, members), None)
            for sub in members:
                sub.queued = True
        else:
            self._read_for_cohort(Cohort(stream, cohort.durable, members))
        return 0

    def _survey(
        self, stream: Stream, members: list[Subscription], stamp: Stamp, content: Content
    ) -> None:
        """Find in steps which subscriptions take which rows of a batch; then each is given its own.

        If a batch of the stream, or of as many streams as may be, is surveyed already, the
        subscriptions have their turn after that, and what was read for them is read again.
        """
        ahead = self._ahead
        for sub in members:
            sub.reading = MATCHING
        if stream in ahead or len(ahead) >= AHEAD_MAX:
            ahead[stream if stream in ahead else next(iter(ahead))].extend(members)
            return
        ahead[stream] = []
        wanted = BitMap([sub.pattern_number for sub in members])
        self._matching.reading(stream.uuid, stamp.base_offset, content)
        survey = Survey(stream, wanted, content)

        def surveyed() -> None:
            self.turns.queue.append(Surveyed(stream, members, stamp, content, survey))

        def failed(error: Exception) -> None:
            for sub in members:
                sub.reading = 0
            self._each_alone(stream, members, error)
            self._release(stream)

        self._matching.later(survey, surveyed, lambda: any(sub.started for sub in members), failed)

    def _release(self, stream: Stream) -> None:
        """Serve the subscriptions that waited until a surveyed batch was given."""
        for sub in self._ahead.pop(stream):
            sub.reading = 0
            if sub.started:
                self.consider(sub)

    def _turn_surveyed(self, surveyed: Surveyed) -> int:
        """Give some subscriptions their rows of a surveyed batch; returns the bytes given."""
        stream, base = surveyed.stream, surveyed.stamp.base_offset
        members: list[Subscription] = []
        for sub in surveyed.take():
            sub.reading = 0
            if not sub.started or sub.live:
                continue
            kept = max(stream.first_at(self._shard.now_ms), stream.purges.before)
            if sub.able and kept <= base:
                members.append(sub)
            else:
                self.consider(sub)
        try:
            if members:
                window = SharedWindow(stream, members)
                window.take(surveyed.stamp, surveyed.content, surveyed.survey)
                self._share_out(members, window, window.reached, surveyed)
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._each_alone(stream, members, error)
        if surveyed.members:
            self.turns.queue.append(surveyed)
        else:
            self._release(stream)
        # The other subscriptions have their turn later.
        return self._shard.settings.step_bytes

    def _turns_alone(self, members: list[Subscription]) -> None:
        """Give each subscription its own turn, in this order, before those that wait."""
        for sub in reversed(members):
            sub.queued = True
            self.turns.queue.appendleft(sub)

    def _at_tail(self, sub: Subscription, *, many: bool) -> None:
        """Make a reader at the tail live, unless it is one of many whose link has much to read.

        A reader that stays on demand goes on, with what has come by then in one gathered batch,
        when its link has answered the PING that asks how far it has read.
        """
        link = sub.link
        if not many or link.room >= link.ask_below:
            self._delivery.catch_up(sub)

    def _share_out(
        self, members: list[Subscription], window: SharedWindow, reached: int,
        surveyed: Surveyed | None = None,
    ) -> int:  # fmt: skip
        """Give each subscription its selection of a window; reached: how far the window goes.

        surveyed: the window is one surveyed batch, and subscriptions without credit wait there.
        """
        if window.base < 0 and reached <= 0:
            # Not even the first batch of the window can be gathered.
            self._turns_alone(members)
            return 0
        settings = self._shard.settings
        # Rows of headers that differ take some 2 us each.
        most = settings.step_bytes if surveyed is None else settings.quantum_bytes // 2
        found = window.share_out(most, settings.quantum_bytes)
        left = {*found.alone, *found.later}
        given = 0
        links, delivery = self._links, self._delivery
        for takers, gathered in found.shares:
            size = len(gathered.stamp) + len(gathered.content)
            given += size
            frames: list[object] = [gathered.stamp, gathered.content]
            for sub in takers:
                link = sub.link
                delivery.put(sub, reached, frames, None, gathered.count, size)
                cost = cost_of_few(link)
                link.room -= cost
                link.delivered_bytes += cost
                links.ask_if_little_room(link)
        for sub in members:
            if sub in left:
                continue
            sub.position = max(sub.position, reached)
            if sub.position >= sub.tail:
                self._at_tail(sub, many=True)
            else:
                self.consider(sub)
        for sub in found.alone:
            sub.turns_alone = TURNS_ALONE
        self._turns_alone(found.alone)
        for sub in found.later:
            if surveyed is not None and sub.able:
                sub.reading = MATCHING
                surveyed.members.append(sub)
            else:
                self.consider(sub)
        return given

    def _to_next_wanted(self, sub: Subscription) -> None:
        """Skip to the next offset that a last-per-subject start wants."""
        wanted = sub.wanted
        assert wanted is not None
        place = int(wanted.searchsorted(sub.position))
        if place < len(wanted):
            sub.position = int(wanted[place])
        else:
            sub.position = max(sub.position, sub.wanted_to)
            sub.wanted = None

    def _gap(self, sub: Subscription, to: int, code: str, reason: str) -> None:
        """Send GAP for the offsets from the position on that cannot be delivered.

        Retention takes only what callers have left: what they removed is told apart.
        """
        removed = min(to, sub.stream.row.trimmed)
        if code == "retention" and sub.position < removed:
            self._say_gap(sub, removed, "purged", "")
            if removed == to:
                return
        self._say_gap(sub, to, code, reason)

    def _say_gap(self, sub: Subscription, to: int, code: str, reason: str) -> None:
        self._delivery.cover(sub)
        self._links.say(sub.link, Gap(sub.number, sub.position, to, code, reason))
        self._shard.counters["gaps"] += 1
        sub.position = sub.covered = to

    def _from_memory(self, sub: Subscription) -> int:
        """Serve a quantum from the hot window."""
        stream = sub.stream
        end = min(sub.tail, sub.stop)
        quantum = self._shard.settings.quantum_bytes
        now_ms = self._shard.now_ms
        portion = Portion(self._delivery, sub, self._shard.settings.quantum_bytes)
        place = stream.hot_place(sub.position)
        for batch in islice(stream.hot, place, place + TURN_BATCHES_MAX):
            if batch.base >= end or portion.given >= quantum or not portion.open:
                break
            if batch.next <= sub.position:
                continue
            next = min(batch.next, end)
            try:
                if not self._prepared(sub, batch.base, batch.content):
                    break
                anything, mask = select(sub, batch.content, batch.base, end, now_ms)
                if anything and mask is None:
                    count = batch.next - batch.base
                    portion.whole((batch.stamp, batch.frame), next, count, batch.size)
                elif mask is not None and anything:
                    self._give_part(sub, portion, batch, next, mask)
            except Exception as error:
                if not sub.careful:
                    raise
                self._damaged(sub, batch.base, next, error)
            if sub.careful:
                sub.careful -= 1
                portion.flush()
            sub.position = next
            sub.prepared = None
            if sub.wanted is not None:
                self._to_next_wanted(sub)
            if (not sub.everything or next < stream.purges.before) and not self._more():
                break
        portion.flush()
        return portion.given

    # --- reads of history -------------------------------------------------------------------

    def _enter_history(self, sub: Subscription) -> int:
        """Count a subscription that reads all of its stream's history; returns how many do."""
        inside = self._in_history.setdefault(sub.stream, {})
        inside[sub] = None
        return len(inside)

    def _leave_history(self, sub: Subscription) -> None:
        inside = self._in_history.get(sub.stream)
        if inside is not None and sub in inside:
            del inside[sub]
            if not inside:
                del self._in_history[sub.stream]

    def _read(self, sub: Subscription) -> None:
        """Have the journal read for a subscription, as much as its credit and its link take."""
        stream = sub.stream
        end = min(sub.tail, sub.stop, stream.hot_first)
        size = min(self._shard.settings.quantum_bytes, sub.left_bytes)
        plain = sub.everything and sub.client_time is None and sub.wanted is None
        shared = plain and self._enter_history(sub) > 1
        if not shared:
            # A shared read is for all subscriptions that lag, whatever room each link has; a read
            # for one alone would bring and hold more than the subscription can be given.
            size = min(size, sub.link.room)
        if sub.wanted is not None:
            end = min(end, sub.wanted_to)
            size = min(size, SPARSE_BYTES)
        token = sub.reading = self.turns.begin(sub)
        candidates = matches = rows = None
        if not sub.everything and not sub.careful:
            candidates = partial(may_match, sub.pattern)
            purged = sub.position < stream.purges.before
            if sub.gathered and self._may_gather and sub.wanted is None and not purged:
                matches = compile_pattern(sub.pattern).matches
                rows = sub.rows = sub.rows or rows_by_subject(sub.pattern)
        self.turns.reads.append(
            ReadRange(
                stream.ring.name, stream.number, token, sub.position, end, size,
                candidates, None if sub.careful else sub.client_time, matches, shared,
                plain and not shared, stream.oldest_ms(self._shard.now_ms), stream.pinned, rows,
            )
        )  # fmt: skip

    def _read_for_cohort(self, cohort: Cohort) -> None:
        """Begin one read of history for a cohort."""
        stream, members = cohort.stream, cohort.members
        token = self.turns.begin(cohort)
        for sub in members:
            sub.reading = token
        self.turns.reads.append(
            ReadRange(
                stream.ring.name, stream.number, token,
                min(sub.position for sub in members), min(members[0].tail, stream.hot_first),
                self._shard.settings.step_bytes // 2,
                oldest_ms=stream.oldest_ms(self._shard.now_ms), pinned=stream.pinned,
            )
        )  # fmt: skip

    def _answered(self, token: int) -> Subscription | Cohort | None:
        """Return the readers of a read that have not ended; the read is no longer under way."""
        reader = self.turns.answered(token)
        if isinstance(reader, Cohort):
            for sub in reader.members:
                sub.reading = 0
            reader.members = [sub for sub in reader.members if sub.started]
            return reader
        if reader is None:
            return None
        reader.reading = 0
        return reader if reader.started else None

    def failed(self, answer: ReadFailed) -> None:
        """End a subscription whose history cannot be read; subscriptions of a cohort read alone.

        The unreadable place may lie before or after the positions of most of them.
        """
        reader = self._answered(answer.token)
        self._among_moved.pop(answer.token, None)
        if reader is None:
            return
        name = reader.stream.name
        self._shard.event(
            "read_failed", "error", stream=name, code=answer.code, reason=answer.reason
        )
        if isinstance(reader, Cohort):
            for sub in reader.members:
                sub.turns_alone = TURNS_ALONE
                self.consider(sub)
            return
        if answer.code == "internal" and not reader.careful:
            # Reading for a selection looks into batches; reading all of them does not.
            reader.careful = CAREFUL_BATCHES
            self.consider(reader)
            return
        reader.owner.end(reader, answer.code)

    def history(self, answer: HistoryRead) -> None:
        """Deliver the answer of the journal as far as credit allows."""
        sub = self._answered(answer.token)
        places = self._among_moved.pop(answer.token, None) if self._among_moved else None
        if isinstance(sub, Cohort):
            try:
                self._history_of_cohort(sub, answer)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                self._each_alone(sub.stream, sub.members, error)
            return
        if sub is None or sub.live:
            return
        before = sub.position
        if sub.able:
            self._more = self._shard.share()
            try:
                if places is not None:
                    self._deliver_moved(sub, answer, places)
                elif sub.stream.keys is None or not answer.gave_up:
                    self._deliver_history(sub, answer)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                self._erred(sub, error)
                return
            if not sub.reading:
                self._note_progress(sub, before)
        if sub.started:
            self.consider(sub)

    def _note_progress(self, sub: Subscription, before: int) -> None:
        """Count reads that bring a subscription nowhere, and end it after several."""
        if sub.position > before:
            sub.idle_reads = 0
            return
        sub.idle_reads += 1
        if sub.idle_reads >= IDLE_READS_MAX:
            self._shard.event("read_stuck", "error", stream=sub.stream.name, offset=before)
            sub.owner.end(sub, "internal")

    def _history_of_cohort(self, cohort: Cohort, answer: HistoryRead) -> None:
        """Deliver the answer of the journal to a cohort as far as credit and room allow."""
        members = []
        for sub in cohort.members:
            if sub.able and not sub.live:
                members.append(sub)
            else:
                self.consider(sub)
        if not members:
            return
        if any(sub.position < cohort.stream.purges.before for sub in members):
            # Some records were purged while the journal read them: each reads them alone.
            for sub in members:
                self.consider(sub)
            return
        before = [(sub, sub.position) for sub in members]
        end = min(answer.next, members[0].tail)
        lowest = min(sub.position for sub in members)
        gap = next((gap for gap in answer.gaps if gap[1] > lowest), None)
        if cohort.stream.bounded or lowest < cohort.stream.first:
            kept = min(first_within_bounds(cohort.stream, answer, self._shard.now_ms), end)
            if lowest < kept:
                gap = lowest, kept, "retention", ""
        if gap is not None and gap[0] <= lowest:
            # Records after the gap are read again once all subscriptions have got GAP.
            _, to, code, reason = gap
            for sub in members:
                if sub.position < to:
                    self._gap(sub, to, code, reason)
                    sub.idle_reads = 0
                self.consider(sub)
            return
        if gap is not None:
            end = min(end, gap[0])
        # Subscriptions with a position after the end of the answer have their own turn.
        inside = [sub for sub in members if sub.position < end]
        for sub in members:
            if not inside:
                self._note_progress(sub, sub.position)
            if sub.position >= end:
                self.consider(sub)
        if not inside:
            return
        batches = stored_batches(answer.runs, end)
        sliced = self._matching.sliced
        if sliced:
            found = next(iter(batches), None)
            if found is not None and not is_quick(found[1]) and gatherable(found[1]):
                self._survey(cohort.stream, inside, *found)
                return
            batches = stored_batches(answer.runs, end)
        window = SharedWindow(cohort.stream, inside)
        step_bytes = self._shard.settings.step_bytes
        whole = window.fill(batches, end, step_bytes, sliced=sliced)
        self._share_out(inside, window, end if whole else window.reached)
        for sub, position in before:
            if sub.position > position:
                sub.idle_reads = 0
            elif sub.able and not sub.queued and not sub.live:
                self._note_progress(sub, position)

    def _deliver_history(self, sub: Subscription, answer: HistoryRead) -> None:
        """Deliver what the journal read, thinned out where not all of it is wanted."""
        end = min(sub.tail, sub.stop)
        now_ms = self._shard.now_ms
        if sub.stream.bounded or sub.position < sub.stream.first:
            kept = min(first_within_bounds(sub.stream, answer, now_ms), end)
            if sub.position < kept:
                self._gap(sub, kept, "retention", "")
        portion = Portion(self._delivery, sub, self._shard.settings.quantum_bytes)
        gaps = list(answer.gaps)
        # Without a window or wanted offsets only an expiry or a purge can thin a batch out.
        looks = (
            not sub.everything or sub.client_time is not None or sub.wanted is not None
            or sub.position < sub.stream.purges.before
        )  # fmt: skip
        for run in answer.runs:
            if run.next:
                if not self._gathered(sub, portion, run, gaps, end):
                    portion.flush()
                    return
                continue
            data = memoryview(run.data)
            for at, size, base, count in run.spans:
                next = base + count
                if next <= sub.position:
                    continue
                while gaps and gaps[0][0] <= base:
                    self._name_gap(sub, portion, gaps.pop(0))
                if not portion.open or base >= end:
                    portion.flush()
                    return
                (expiry_ms,) = unpack_from("<q", data, at + EXPIRY_AT)
                cut = base < sub.position or next > end
                if not looks and not cut and not 0 < expiry_ms <= now_ms:
                    portion.stored(run.data, at, size, next, count)
                else:
                    try:
                        stored = data[at : at + size]
                        if not self._thinned(sub, portion, run.data, stored, at, base, end):
                            portion.flush()
                            return
                    except Exception as error:
                        if not sub.careful:
                            raise
                        self._damaged(sub, base, min(next, end), error)
                if sub.careful:
                    sub.careful -= 1
                    portion.flush()
                sub.position = max(sub.position, min(next, end))
                if looks and not self._more():
                    # The rest is read again.
                    portion.flush()
                    return
        portion.flush()
        for gap in gaps:
            self._name_gap(sub, portion, gap)
        sub.position = max(sub.position, min(answer.next, end))

    def _gathered(
        self, sub: Subscription, portion: Portion, run: HistoryRun, gaps: list[Any], end: int
    ) -> bool:
        """Deliver rows that the journal gathered; False: there is no credit or room for them."""
        ((at, size, base, count),) = run.spans
        while gaps and gaps[0][0] <= base:
            self._name_gap(sub, portion, gaps.pop(0))
        if not portion.open or max(sub.position, sub.stream.purges.before) > base:
            # Rows that were purged while the journal gathered them are told apart when read again.
            return False
        if run.next > end:
            return False
        portion.stored(run.data, at, size, run.next, count)
        sub.position = run.next
        return True

    def _thinned(
        self, sub: Subscription, portion: Portion, data: Any, stored: memoryview, at: int,
        base: int, end: int,
    ) -> bool:  # fmt: skip
        """Deliver what a subscription selects of one stored batch; False: it is being matched."""
        content = Content(stored[STAMP_BYTES:])
        if not self._prepared(sub, base, content):
            return False
        anything, mask = select(sub, content, base, end, self._shard.now_ms)
        sub.prepared = None
        if not anything:
            return True
        next = base + content.head.count
        if mask is None:
            portion.stored(data, at, len(stored), next, content.head.count)
        else:
            batch = StampedBatch(
                sub.stream, bytes(stored[:STAMP_BYTES]), stored[STAMP_BYTES:], content, base, next,
                len(stored),
            )  # fmt: skip
            self._give_part(sub, portion, batch, min(next, end), mask)
        return True

    def _prepared(self, sub: Subscription, base: int, content: Content) -> bool:
        """Whether a subscription's selection of a batch is known, or quick to find.

        Otherwise the selection is found in slices, and the subscription has its next turn
        afterwards.
        """
        if sub.everything or sub.careful or not self._matching.sliced:
            return True
        if sub.prepared is not None:
            if sub.prepared.base == base:
                content.share(sub.prepared.table)
                return True
            sub.prepared = None
        if not audience_of(sub.stream).index.slow and is_quick(content):
            return True
        reading = self._matching.reading(sub.stream.uuid, base, content)
        job = Choosing(compile_pattern(sub.pattern).matches, content, reading=reading)
        if self._matching.run(job):
            sub.prepared = PreparedRows(base, job.rows, content.table)
            return True
        sub.reading = MATCHING

        def matched() -> None:
            sub.reading = 0
            if sub.started:
                sub.prepared = PreparedRows(base, job.rows, content.table)
                self.consider(sub)

        def failed(error: Exception) -> None:
            sub.reading = 0
            if sub.started:
                self._erred(sub, error)

        self._matching.later(job, matched, lambda: sub.started, failed)
        return False

    def _give_part(
        self, sub: Subscription, portion: Portion, batch: StampedBatch, next: int, mask: Mask
    ) -> None:
        """Deliver some rows of a batch: gathered with those of other batches if they are few."""
        settings = self._shard.settings
        encoding = encoding_of(batch, mask, settings.extract_bytes_min, settings.extract_share)
        assert encoding is not None, "something was selected"
        few = encoding.extracts and encoding.count <= GATHERED_ROWS_MAX and not sub.careful
        if few and sub.gathered and self._may_gather and gatherable(batch.content):
            portion.rows(batch, next, mask)
            return
        encoding = encoding.for_(sub.whole)
        portion.part(encoding, next)

    def _name_gap(
        self, sub: Subscription, portion: Portion, gap: tuple[int, int, str, str]
    ) -> None:
        """Send GAP for a gap that the journal found, after the records before it."""
        first, to, code, reason = gap
        to = min(to, sub.stop)
        if to <= sub.position:
            return
        portion.flush()
        sub.position = max(sub.position, first)
        self._gap(sub, to, code, reason)
