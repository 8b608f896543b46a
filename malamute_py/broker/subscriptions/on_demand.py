"""Serving on demand: subscriptions that lag, in turn, as their credit allows.

Owns whose turn it is, and the answers of the journal. The rules: a turn gives one quantum, to one
subscription (own_turns.py) or to many of one stream (cohorts.py); the turns of one call share a
budget of bytes and of time. Source: docs/design.md, Flow control.
"""

from __future__ import annotations

from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import Links
from malamute_py.broker.ready import HistoryRead, ReadFailed
from malamute_py.broker.subscriptions.cohorts import Cohorts
from malamute_py.broker.subscriptions.lagging import TURNS_ALONE, Lagging
from malamute_py.broker.subscriptions.live import CAREFUL_BATCHES, Delivery
from malamute_py.broker.subscriptions.matching import Matching
from malamute_py.broker.subscriptions.moved import Moved
from malamute_py.broker.subscriptions.own_turns import OwnTurns
from malamute_py.broker.subscriptions.shared_window import Cohort, Surveyed
from malamute_py.broker.subscriptions.subscription import Subscription


class OnDemand:
    """The subscriptions that are not live.

    The broker calls `serve` in a turn of its loop, and `history` or `failed` with an answer of the
    journal.
    """

    def __init__(
        self, shard: Shard, links: Links, delivery: Delivery, matching: Matching, lagging: Lagging
    ) -> None:
        self._shard = shard
        self._lagging = lagging
        self.turns = lagging.turns
        self._moved = Moved(shard, delivery, lagging)
        self._own_turns = OwnTurns(shard, delivery, matching, lagging, self._moved)
        self._cohorts = Cohorts(shard, links, delivery, matching, lagging)

    def serve(self) -> None:
        """Give turns until all are served or the budget of bytes or time is used up, one at least.

        Called in each turn of the broker's loop that has such work.
        """
        budget = self._shard.settings.step_bytes
        turns = self.turns
        more = self._lagging.more = self._shard.share()
        while budget > 0 and turns.runnable:
            # Those that wait for a read come first, while a read may begin.
            starved = turns.starved and turns.may_read
            sub = turns.starved.take() if starved else turns.queue.popleft()
            if isinstance(sub, Surveyed):
                budget -= self._cohorts.turn_surveyed(sub)
            elif isinstance(sub, Cohort):
                try:
                    budget -= self._cohorts.turn(sub)
                except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                    self._lagging.each_alone(sub.stream, sub.members, error)
            else:
                sub.queued = False
                # It may have ended, or been served otherwise, since it was queued.
                if sub.started and not sub.live and (sub.able or sub.position >= sub.stop):
                    try:
                        budget -= self._own_turns.turn(sub)
                    except Exception as error:  # noqa: BLE001 - as above
                        self._lagging.erred(sub, error)
            if not more():
                return

    def failed(self, answer: ReadFailed) -> None:
        """End a subscription whose history cannot be read, unless it may read otherwise.

        The members of a cohort read alone: the unreadable place may lie before or after the
        positions of most of them. A subscription that read by its selection reads every batch once
        more (`careful`), since the look into a batch may have failed.
        """
        reader = self._answered(answer.token)
        self._moved.reads.pop(answer.token, None)
        if reader is None:
            return
        name = reader.stream.name
        self._shard.event(
            "read_failed", "error", stream=name, code=answer.code, reason=answer.reason
        )
        if isinstance(reader, Cohort):
            for sub in reader.members:
                sub.turns_alone = TURNS_ALONE
                self._lagging.consider(sub)
            return
        if answer.code == "internal" and not reader.careful:
            reader.careful = CAREFUL_BATCHES
            self._lagging.consider(reader)
            return
        reader.owner.end(reader, answer.code)

    def history(self, answer: HistoryRead) -> None:
        """Deliver what the journal has read for a subscription or cohort, as far as credit allows.

        What finds no credit is dropped, and read again later.
        """
        sub = self._answered(answer.token)
        # Where the newest records that were asked for lie; None: no such read.
        places = self._moved.reads.pop(answer.token, None) if self._moved.reads else None
        if isinstance(sub, Cohort):
            try:
                self._cohorts.deliver_history(sub, answer)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                self._lagging.each_alone(sub.stream, sub.members, error)
            return
        if sub is None or sub.live:
            return
        before = sub.position
        if sub.able:
            # What this reader may take of the turn: others wait for their answers, too.
            self._lagging.more = self._shard.share()
            stream = sub.stream
            # In a stream with keys, what compaction gave up during the read is no gap: nothing is
            # delivered now, and the next turn reads the copies.
            moved = stream.keys is not None and (answer.gave_up or sub.position < stream.first)
            try:
                if places is not None:
                    self._moved.deliver(sub, answer, places)
                elif not moved:
                    self._own_turns.deliver_history(sub, answer)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                self._lagging.erred(sub, error)
                return
            if not sub.reading:  # Otherwise its next batch is being matched: it may not move yet.
                self._lagging.end_if_stuck(sub, before)
        if sub.started:
            self._lagging.consider(sub)

    def _answered(self, token: int) -> Subscription | Cohort | None:
        """Note that a read is answered, and return its reader, if it has not ended meanwhile.

        Of a cohort only the members that have not ended are left. None: the reader has ended, or
        the read was not for a subscription.
        """
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
