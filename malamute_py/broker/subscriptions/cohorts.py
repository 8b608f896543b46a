"""Cohorts: many lagging subscriptions of one stream have a turn, or a read of history, together.

Owns the turns of cohorts. The rules: what a cohort takes is looked for once for all of its members,
in a shared window (shared_window.py); a batch that takes long to match is surveyed in steps: which
of their patterns select each header is found in later turns, while those that come to it wait; a
member that cannot go along has a turn of its own. Source: docs/design.md, Flow control.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from pyroaring import BitMap

from malamute_protocol.content import Content
from malamute_protocol.gather import BYTES_A_ROW, gatherable
from malamute_protocol.stamp import Stamp
from malamute_py.broker.batches.bounds import first_within_bounds
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import cost_of_few
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import HistoryRead, ReadRange
from malamute_py.broker.subscriptions.lagging import TURNS_ALONE, Lagging
from malamute_py.broker.subscriptions.live import Delivery
from malamute_py.broker.subscriptions.matching import MATCHING, Matching, is_quick
from malamute_py.broker.subscriptions.portion import TURN_BATCHES_MAX
from malamute_py.broker.subscriptions.shared_window import (
    NEW_HEADERS_MAX,
    Cohort,
    SharedWindow,
    Survey,
    Surveyed,
    hot_batches,
    stored_batches,
)
from malamute_py.broker.subscriptions.subscription import Subscription

NEIGHBOURS = 65_536
"""Records from the first position of a cohort within which others join its read of history."""
AHEAD_MAX = 4
"""Batches that are surveyed at one time, of different streams: one may take 40 MiB."""


class Cohorts:
    """The turns of subscriptions that are served together, as OnDemand gives them."""

    def __init__(
        self, shard: Shard, links: Links, delivery: Delivery, matching: Matching, lagging: Lagging
    ) -> None:
        self._shard = shard
        self._links = links
        self._delivery = delivery
        self._matching = matching
        self._lagging = lagging
        self._ahead: Final[dict[Stream, list[Subscription]]] = {}
        """Streams of which a batch is surveyed for a cohort, each with the subscriptions that wait
        until the cohort has been given its rows."""

    def turn(self, cohort: Cohort) -> int:
        """Serve a cohort from the hot window, or begin a read of history for it.

        Members that are too few to share, or that stand too far from the first one, get other
        turns. Returns the bytes given, or what the turn costs of the budget, if that is more.
        """
        stream, settings = cohort.stream, self._shard.settings
        key = stream, cohort.durable
        if self._lagging.cohorts.get(key) is cohort:
            # Subscriptions that lag from now on form the next cohort.
            del self._lagging.cohorts[key]
        behind: list[Subscription] = []
        for sub in cohort.members:
            sub.queued = False
            if not sub.started or sub.live or not sub.able:
                continue
            self._lagging.past_what_is_gone(sub)
            if sub.position < stream.purges.before:
                self._lagging.consider(sub)
            elif sub.position < sub.tail:
                behind.append(sub)
            else:
                self._at_tail(sub, one_of_many=len(cohort.members) >= settings.shared_window_min)
        if len(behind) < settings.shared_window_min:
            self._lagging.alone_at_head(behind)  # So few are served with less work one by one.
            return 0
        # One member decides where the cohort reads, from memory or the journal.
        if behind[0].position >= stream.hot_first:
            return self._from_memory(stream, behind)
        self._from_history(cohort, behind)
        return 0

    def _from_memory(self, stream: Stream, behind: list[Subscription]) -> int:
        """Serve those members of a cohort from the hot window whose position lies in it.

        Returns the bytes given, or what the look costs of the budget, if that is more.
        """
        settings, hot_first = self._shard.settings, stream.hot_first
        members = [sub for sub in behind if sub.position >= hot_first]
        for sub in behind:
            if sub.position < hot_first:
                self._lagging.consider(sub)
        place = stream.hot_place(min(sub.position for sub in members))
        oldest, sliced = stream.hot[place], self._matching.sliced
        # A first batch of many headers is surveyed, and is a window by itself.
        if sliced and not is_quick(oldest.content) and gatherable(oldest.content):
            stamp = Stamp.unpack(oldest.stamp, verify=False)
            self._survey(stream, members, stamp, oldest.content)
            return 0
        window = SharedWindow(stream, members)
        batches = islice(stream.hot, place, place + TURN_BATCHES_MAX)
        tail = members[0].tail  # All members have the same.
        window.fill(hot_batches(batches), tail, settings.step_bytes, sliced=sliced)
        given = self._share_out(members, window, window.reached)
        # Looking costs, too, whether a subscription takes something or not; new headers cost most.
        looked = window.new * settings.step_bytes // NEW_HEADERS_MAX
        return max(given, looked, window.rows * BYTES_A_ROW)

    def _from_history(self, cohort: Cohort, behind: list[Subscription]) -> None:
        """Begin a read of history for those members of a cohort that stand near the first one."""
        stream, first = cohort.stream, behind[0].position
        members = []
        low, high = first - NEIGHBOURS, min(first + NEIGHBOURS, stream.hot_first)
        for sub in behind:
            if low <= sub.position < high:
                members.append(sub)
            else:
                self._lagging.consider(sub)
        if len(members) < self._shard.settings.shared_read_min:
            self._lagging.alone_at_head(members)
        elif not self._lagging.turns.may_read:
            # As many reads are under way as may be: their turn comes when one has ended.
            self._lagging.turns.starved.add(None, Cohort(stream, cohort.durable, members))
            for sub in members:
                sub.queued = True
        else:
            self._read(Cohort(stream, cohort.durable, members))

    def _survey(
        self, stream: Stream, members: list[Subscription], stamp: Stamp, content: Content
    ) -> None:
        """Match a batch for many subscriptions in steps; then each is given its rows.

        Called where a cohort comes to a batch of many headers. If one of the stream is surveyed
        already, or ones of as many streams as may be, the subscriptions have their turn after that,
        and what was read for them is read again.
        """
        ahead = self._ahead
        for sub in members:
            sub.reading = MATCHING
        if stream in ahead or len(ahead) >= AHEAD_MAX:
            waits_for = stream if stream in ahead else next(iter(ahead))  # The oldest survey.
            ahead[waits_for].extend(members)
            return
        ahead[stream] = []
        wanted = BitMap([sub.pattern_number for sub in members])
        # Others may be reading the same header table: the content joins them.
        self._matching.reading(stream.uuid, stamp.base_offset, content)
        survey = Survey(stream, wanted, content)

        def surveyed() -> None:
            """Queue the subscriptions for their rows, which turn_surveyed() gives them."""
            self._lagging.turns.queue.append(Surveyed(stream, members, stamp, content, survey))

        def failed(error: Exception) -> None:
            """Serve each subscription alone, after an error in matching."""
            for sub in members:
                sub.reading = 0
            self._lagging.each_alone(stream, members, error)
            self._release(stream)

        self._matching.later(survey, surveyed, lambda: any(sub.started for sub in members), failed)

    def _release(self, stream: Stream) -> None:
        """Serve the subscriptions that waited for the end of a survey: all its rows were given."""
        for sub in self._ahead.pop(stream):
            sub.reading = 0
            if sub.started:
                self._lagging.consider(sub)

    def turn_surveyed(self, surveyed: Surveyed) -> int:
        """Give the next CHUNK_MEMBERS subscriptions their rows of a surveyed batch.

        The turn of a batch whose headers were matched for many subscriptions; the rest of these
        have it later. One that cannot take the batch any more, or for which some of its records
        are gone meanwhile, is considered anew. Returns what the turn costs of the budget.
        """
        stream, base = surveyed.stream, surveyed.stamp.base_offset
        members: list[Subscription] = []
        for sub in surveyed.take():
            sub.reading = 0
            if not sub.started or sub.live:
                continue
            all_kept_from = max(stream.first_at(self._shard.now_ms), stream.purges.before)
            if sub.able and all_kept_from <= base:
                members.append(sub)
            else:
                self._lagging.consider(sub)
        try:
            if members:
                window = SharedWindow(stream, members)
                window.take(surveyed.stamp, surveyed.content, surveyed.survey)
                self._share_out(members, window, window.reached, surveyed)
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._lagging.each_alone(stream, members, error)
        if surveyed.members:
            self._lagging.turns.queue.append(surveyed)
        else:
            self._release(stream)  # All have their rows.
        # This counts as the whole budget of one call, so that other work comes between two chunks.
        return self._shard.settings.step_bytes

    def _at_tail(self, sub: Subscription, *, one_of_many: bool) -> None:
        """Make a reader at the tail live, unless it is one of many whose link has much to read.

        A reader that stays on demand goes on, with what has come by then in one gathered batch,
        when its link has answered the PING that asks how far it has read.
        """
        link = sub.link
        if not one_of_many or link.room >= link.ask_below:
            self._delivery.catch_up(sub)

    def _share_out(
        self, members: list[Subscription], window: SharedWindow, reached: int,
        surveyed: Surveyed | None = None,
    ) -> int:  # fmt: skip
        """Give each subscription its selection of a window; returns the bytes given.

        reached: offset up to which the window goes, and each position with it, whether something
        was selected or not. surveyed: the window is this surveyed batch, for which subscriptions
        that get nothing now wait again; None: it is not.
        """
        if window.base < 0 and reached <= 0:
            # Not even the first batch of the window can be gathered.
            self._lagging.alone_at_head(members)
            return 0
        settings = self._shard.settings
        # Rows of headers that differ, as in a surveyed batch, take some 2 us each: fewer are given.
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
                delivery.put(sub, reached, frames, rows=None, records=gathered.count, size=size)
                # put() has taken the bytes off the room: a delivery of few rows costs more.
                cost = cost_of_few(link)
                link.room -= cost
                link.delivered_bytes += cost
                links.ask_if_little_room(link)
        for sub in members:
            if sub in left:  # Its position stays: it is queued below.
                continue
            sub.position = max(sub.position, reached)
            if sub.position >= sub.tail:
                self._at_tail(sub, one_of_many=True)
            else:
                self._lagging.consider(sub)
        for sub in found.alone:  # It takes too much for a window, and mostly will again.
            sub.turns_alone = TURNS_ALONE
        self._lagging.alone_at_head(found.alone)
        for sub in found.later:  # Its link has no room left, or the window has given `most`.
            if surveyed is not None and sub.able:
                sub.reading = MATCHING  # It waits for the surveyed batch's next turn.
                surveyed.members.append(sub)
            else:
                self._lagging.consider(sub)
        return given

    def _read(self, cohort: Cohort) -> None:
        """Begin one read of history for a cohort, from its lowest position on, of all batches.

        deliver_history() is given the answer.
        """
        stream, members = cohort.stream, cohort.members
        tail = members[0].tail  # All members have the same.
        token = self._lagging.turns.begin(cohort)
        for sub in members:
            sub.reading = token
        self._lagging.turns.reads.append(
            ReadRange(
                stream.ring.name, stream.number, token,
                min(sub.position for sub in members), min(tail, stream.hot_first),
                self._shard.settings.step_bytes // 2,
                oldest_ms=stream.oldest_ms(self._shard.now_ms), pinned=stream.pinned,
            )
        )  # fmt: skip

    def deliver_history(self, cohort: Cohort, answer: HistoryRead) -> None:
        """Deliver the journal's answer to a read for a cohort, as far as credit and room allow.

        A gap that the first members stand before is told first, and everything after it is read
        again; else the batches up to the next gap are shared out as a window, or surveyed.
        """
        members = []
        for sub in cohort.members:
            if sub.able and not sub.live:
                members.append(sub)
            else:
                self._lagging.consider(sub)
        if not members:
            return
        if any(sub.position < cohort.stream.purges.before for sub in members):
            # Some records were purged while the journal read them: each reads them alone.
            for sub in members:
                self._lagging.consider(sub)
            return
        positions_before = [(sub, sub.position) for sub in members]
        tail = members[0].tail  # All members have the same.
        end = min(answer.next, tail)
        lowest = min(sub.position for sub in members)
        gap = self._gap_ahead(cohort.stream, answer, lowest, end)
        if gap is not None:
            begin, to, code, reason = gap
            if begin <= lowest:
                # Records after the gap are read again once all subscriptions have got GAP.
                for sub in members:
                    if sub.position < to:
                        self._lagging.gap(sub, to, code, reason)
                        sub.idle_reads = 0
                    self._lagging.consider(sub)
                return
            end = min(end, begin)
        # Subscriptions with a position after the end of the answer have their own turn.
        inside = [sub for sub in members if sub.position < end]
        for sub in members:
            if not inside:
                # The read has brought no member on, which counts as an idle read of each.
                self._lagging.end_if_stuck(sub, sub.position)
            if sub.position >= end:
                self._lagging.consider(sub)
        if not inside:
            return
        batches = stored_batches(answer.runs, end)
        sliced = self._matching.sliced
        if sliced:
            found = next(iter(batches), None)
            if found is not None:
                stamp, content = found
                if not is_quick(content) and gatherable(content):
                    self._survey(cohort.stream, inside, stamp, content)
                    return
            # The look at the first batch has taken it out of the iterator.
            batches = stored_batches(answer.runs, end)
        window = SharedWindow(cohort.stream, inside)
        step_bytes = self._shard.settings.step_bytes
        whole = window.fill(batches, end, step_bytes, sliced=sliced)
        self._share_out(inside, window, end if whole else window.reached)
        for sub, position in positions_before:
            if sub.position > position:
                sub.idle_reads = 0
            elif sub.able and not sub.queued and not sub.live:
                self._lagging.end_if_stuck(sub, position)

    def _gap_ahead(
        self, stream: Stream, answer: HistoryRead, lowest: int, end: int
    ) -> tuple[int, int, str, str] | None:
        """Return (from, to, code, reason) of the first gap that a member has still before it.

        lowest: the lowest position of the members. end: where the read ends for them. Records
        beyond the stream's bounds of age or number are a gap by `retention`, and the first one.
        """
        if stream.bounded or lowest < stream.first:
            kept = min(first_within_bounds(stream, answer, self._shard.now_ms), end)
            if lowest < kept:
                return lowest, kept, "retention", ""
        for begin, to, code, reason in answer.gaps:
            if to > lowest:
                return begin, to, code, reason
        return None
