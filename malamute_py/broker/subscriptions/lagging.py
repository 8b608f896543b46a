"""Lagging subscriptions: their queue, their gaps, and what an error in serving one of them costs.

A subscription that is not live lags: it is served on demand, as its credit allows, in turns of its
own or with others of its stream in a cohort. Credit is the records and bytes that its client lets
come, room the bytes that a link may have unread. Owns what both kinds of turns share. The rules: a
subscription is in the queue once, alone or in a cohort; whatever cannot be delivered is a GAP
before the position passes it; an error costs the subscription a repetition batch by batch, then a
batch, then its link. Source: docs/design.md, Flow control; ARCHITECTURE.md, Containment.
"""

from __future__ import annotations

from typing import Final

from malamute_protocol.commands import Gap
from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.subscriptions.audience import audience_of
from malamute_py.broker.subscriptions.live import CAREFUL_BATCHES, Delivery
from malamute_py.broker.subscriptions.matching import Matching
from malamute_py.broker.subscriptions.portion import GATHERED_ROWS_MAX, READ_ROWS_MAX
from malamute_py.broker.subscriptions.shared_window import Cohort, Surveyed
from malamute_py.broker.subscriptions.subscription import SUBSCRIBE, Subscription
from malamute_py.broker.subscriptions.turns import IDLE_READS_MAX, Turns

TURNS_ALONE = 16
"""Turns after which a subscription that was left out of a shared read may join one again."""


class Lagging:
    """The queue of the subscriptions that are not live: OnDemand gives turns to what is in it."""

    def __init__(self, shard: Shard, links: Links, delivery: Delivery, matching: Matching) -> None:
        self._shard = shard
        self._links = links
        self._delivery = delivery
        self._matching = matching
        self.turns: Final[Turns[Subscription | Cohort | Surveyed, Subscription | Cohort]] = Turns(
            shard, matching.queue
        )
        """The queue: of subscriptions with a turn of their own, cohorts, and subscriptions that
        share a batch which was matched in steps."""
        self.cohorts: Final[dict[tuple[Stream, bool], Cohort]] = {}
        """Cohorts in the queue, by stream and by whether they see only what is durable."""
        self._in_history: dict[Stream, dict[Subscription, None]] = {}
        """Subscriptions of each stream that read everything of its history: several share a
        read."""
        self.more = shard.share()
        """Whether this turn's share of time lasts."""
        settings, limits = shard.settings, shard.settings.limits
        self.may_gather: Final = (
            min(limits.batch_records_max, limits.headers_max) >= READ_ROWS_MAX + GATHERED_ROWS_MAX
            and limits.batch_bytes_max
            >= settings.quantum_bytes + max(limits.record_bytes_max, limits.batch_bytes_max // 4)
        )
        """Whether the limits let clients take a gathered batch: one batch of rows of several, from
        the journal or from memory. A gathered batch has at most READ_ROWS_MAX rows and those of one
        more small batch, each perhaps with its own header. Its bytes are at most those of a turn
        and those of one more record, or a fourth of a batch."""

    def consider(self, sub: Subscription) -> None:
        """Queue a subscription for a turn if it can take something, alone or in a cohort.

        Called whenever something has changed that may make a turn useful: credit, room of the link,
        position, the end of a read. One that is queued, or for which a read is under way, has its
        turn in any case.
        """
        if sub.live or sub.queued or sub.reading or not sub.started:
            return
        # A subscription at its end is told so without credit.
        if sub.able or sub.position >= sub.stop:
            sub.queued = True
            # A cohort leaves out no purged rows, and matches each header in one go, which takes
            # long with expressions: a subscription to which either applies has a turn of its own.
            if (
                sub.turns_alone
                or not self.may_gather
                or not sub.joins
                or sub.position < sub.stream.purges.before
                or (self._matching.sliced and audience_of(sub.stream).index.slow)
            ):
                sub.turns_alone = max(0, sub.turns_alone - 1)
                self.turns.queue.append(sub)
                return
            key = sub.stream, sub.durable
            cohort = self.cohorts.get(key)
            if cohort is None:
                cohort = self.cohorts[key] = Cohort(sub.stream, sub.durable)
                self.turns.queue.append(cohort)
            cohort.members.append(sub)

    def forget(self, sub: Subscription) -> None:
        """Forget a subscription that has ended; the queue drops it when its turn comes."""
        self.turns.starved.discard(sub.link, sub)
        self.leave_history(sub)

    def alone_at_head(self, members: list[Subscription]) -> None:
        """Queue members of a cohort that cannot share its turn at the front, each by itself."""
        for sub in reversed(members):
            sub.queued = True
            self.turns.queue.appendleft(sub)

    def each_alone(self, stream: Stream, members: list[Subscription], error: Exception) -> None:
        """Serve each member of a cohort alone for some turns, after an error in serving them all.

        So the error is met again by that subscription alone that has caused it, if one has.
        """
        self._shard.erred("serving together", error, stream=stream.name)
        for sub in members:
            if sub.started:
                sub.turns_alone = TURNS_ALONE
                sub.queued = False  # Its turn was the cohort's: it is queued anew.
                self._again(sub)

    def erred(self, sub: Subscription, error: Exception) -> None:
        """Serve a subscription again batch by batch, to find the batch that an error came of.

        error: met in its turn. Where it comes again for one batch, that is damaged().
        """
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
        """Queue a subscription to be served from the last offset on that its client was told.

        Its position may be ahead of that by records that were gathered, and dropped with an error.
        """
        if not sub.live:
            sub.position = sub.covered
            self.consider(sub)

    def damaged(self, sub: Subscription, base: int, next: int, error: Exception) -> None:
        """Pass over a batch that cannot be handled for one subscription, which gets a GAP.

        base, next: its offsets. The batch is quarantined: named once in the log of the broker.
        """
        reason = self._shard.quarantine(
            sub.stream.name, base, next, "serving", error, link=sub.link.number,
            identity=sub.link.identity,
        )  # fmt: skip
        sub.careful = 0  # The batch is found.
        sub.position = max(sub.position, base)
        self.gap(sub, next, "damaged", reason)

    def past_what_is_gone(self, sub: Subscription) -> None:
        """Pass over records before the first one that the stream still has, with a GAP.

        Called at the beginning of a subscription's turn.
        """
        stream = sub.stream
        # Retention may be ahead of what is durable: the position of a durable reader stays before
        # that, and records that are still in memory come to it after all.
        first = min(stream.first_at(self._shard.now_ms), sub.stop, sub.tail)
        lost = min(first, stream.lost_before)
        if sub.position < lost:
            self.gap(sub, lost, "lost", "")
        if sub.position < first:
            self.gap(sub, first, "retention", "")

    def gap(self, sub: Subscription, to: int, code: str, reason: str) -> None:
        """Send GAP for the offsets from the position up to `to`, which cannot be delivered.

        code: why. Of what is gone by `retention`, the part that callers removed by TRIM gets a GAP
        of its own, `purged`.
        """
        removed = min(to, sub.stream.row.trimmed)
        if code == "retention" and sub.position < removed:
            self._say_gap(sub, removed, "purged", "")
            if removed == to:
                return
        self._say_gap(sub, to, code, reason)

    def _say_gap(self, sub: Subscription, to: int, code: str, reason: str) -> None:
        """Send COVER for what lies before the gap, then GAP; the subscription goes on after it."""
        self._delivery.cover(sub)
        self._links.say(sub.link, Gap(sub.number, sub.position, to, code, reason))
        self._shard.counters["gaps"] += 1
        sub.position = sub.covered = to

    def enter_history(self, sub: Subscription) -> int:
        """Count a subscription that reads all of its stream's history; returns how many do now.

        Several of a stream share reads: the journal keeps what it has read for the others.
        """
        inside = self._in_history.setdefault(sub.stream, {})
        inside[sub] = None
        return len(inside)

    def leave_history(self, sub: Subscription) -> None:
        """End the count of enter_history(): a subscription has left the history, or has ended."""
        inside = self._in_history.get(sub.stream)
        if inside is not None and sub in inside:
            del inside[sub]
            if not inside:
                del self._in_history[sub.stream]

    def end_if_stuck(self, sub: Subscription, before: int) -> None:
        """End a subscription after several reads in a row that brought it no further.

        Otherwise a fault of the broker would have it read for ever. Called after each read. before:
        its position when the answer came.
        """
        if sub.position > before:
            sub.idle_reads = 0
            return
        sub.idle_reads += 1
        if sub.idle_reads >= IDLE_READS_MAX:
            self._shard.event("read_stuck", "error", stream=sub.stream.name, offset=before)
            sub.owner.end(sub, "internal")
