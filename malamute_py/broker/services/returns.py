"""How requests that a worker held get back into their queue, and when they are not tried again.

Owns the pauses between attempts, the number of attempts, and the requests of ended links that are
still to be given back. The rules: requests that come back go before those that were never handed
out; a request whose attempts are used up becomes a dead letter; a return that the log refuses is
tried again. `items` are batches with rows of each. While the log is being told, rows are `moving`
and `returning`, and no worker gets them. An effect is called when its part is taken into a step,
and when the log has the step (`appended`) or refuses it. Source: docs/design.md, Queues and the
checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final

from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.log.steps import Effect, Part, Steps, Then
from malamute_py.broker.services.ends import Ends, Released
from malamute_py.broker.services.registry import Registry
from malamute_py.broker.services.rows import BatchRows, merged, named
from malamute_py.broker.services.service import InFlight, Lease, Pause, RequestBatch, Service
from malamute_py.changelog.records import RELEASED, WITHDRAWN, Change, WorkReturned

_NO_ATTEMPT: Final = frozenset({"requeued", RELEASED, WITHDRAWN})
"""Reasons (`why`) of a return that uses up no attempt."""


class Returns:
    """Requests on their way back into their queues, as a worker, an end or a timer gives them."""

    def __init__(self, shard: Shard, steps: Steps, registry: Registry, ends: Ends) -> None:
        self._shard = shard
        self._steps = steps
        self._registry = registry
        self._ends = ends
        self._leaving: Final[deque[tuple[deque[Lease], str]]] = deque()
        """Leases of ended offers that are given back in portions, oldest first, and why."""

    def returned(
        self, service: Service, items: Sequence[BatchRows], why: str, again_ms: int | None,
        said: str = "",
    ) -> Part:  # fmt: skip
        """Return a part of a step by which rows that are held wait again, or become dead letters.

        why: how the attempt ended. again_ms: pause before they may be handed out; None: the
        service's back-off. said: the worker's reason, which dead letters repeat. Rows with the same
        pause share a change of the log.
        """
        now_ms = self._shard.now_ms
        by_pause: dict[int, list[BatchRows]] = {}
        exhausted: list[BatchRows] = []
        for batch, rows in items:
            for times, some in batch.attempts(rows):
                pause_ms = self._pause(service, times, why, again_ms)
                if times >= self._ends.attempts_max(service) and why not in _NO_ATTEMPT:
                    # They return as well: appended() buries them once the log has this attempt.
                    exhausted.append((batch, some))
                    pause_ms = 0
                by_pause.setdefault(pause_ms, []).append((batch, some))
        changes: list[Change] = [
            WorkReturned(
                service.number, named(some), why, now_ms + pause_ms if pause_ms else 0, pause_ms
            )
            for pause_ms, some in by_pause.items()
        ]
        returning = _Returning(
            self, service, items, why, now_ms, by_pause, exhausted, said, released=[]
        )
        return self._registry.part(service, changes, returning)

    def _pause(self, service: Service, times: int, why: str, again_ms: int | None) -> int:
        """Pause of rows that were handed out `times` times before they may be once more.

        why and again_ms: as returned() has them.
        """
        if again_ms is None:
            return self._backoff(service, times)
        if why == "returned" and not again_ms and times > 1:
            # A lone worker that gives a request back would use up its attempts within a moment.
            return self._backoff(service, times - 1)
        return again_ms

    def _wait_again(self, batch: RequestBatch, rows: int, not_before_ms: int) -> None:
        """Let rows wait in their queue again that the log has back, at once or from a time on."""
        if not_before_ms > self._shard.now_ms:
            self.delay(batch, rows, not_before_ms)
        else:
            batch.service.wait(batch, rows, again=True)
            self._registry.runnable[batch.service] = None

    def delay(self, batch: RequestBatch, rows: int, until_ms: int) -> None:
        """Let rows wait until a time before they may be handed out; Deadlines ends the pause."""
        batch.delayed |= rows
        batch.service.delayed += rows.bit_count()
        if batch.pauses is None:
            batch.pauses = {}
        pause = Pause(batch, rows)
        batch.pauses[pause] = None
        pause.slot = self._registry.timers.add(until_ms, pause)

    def bury_exhausted(
        self, service: Service, items: list[BatchRows], why: str, said: str = ""
    ) -> None:
        """Turn rows whose attempts are used up into dead letters, once the log has the last one.

        why: how the last attempt ended. said: the worker's reason. Where the mailbox or the log
        refuses them, they stay out of the queue and are tried again later.
        """
        items = [(batch, rows) for batch, rows in items if rows]
        if not items:
            return
        most = self._ends.attempts_max(service)
        # A dead letter's reason begins with `died`, `lease` or `returned`: SPEC.md, section 4.8.
        word = {"fenced": "died", RELEASED: "returned", WITHDRAWN: "returned"}.get(why, why)
        reason = f"{word}: handed out {most} times"
        if said:
            reason = f"{reason}, at last: {said}"
        try:
            part = self._ends.bury(
                service, items, reason, Then(failed=partial(self._ends.bury_later, items))
            )
        except BrokerRefused as error:
            if not service.refusing:
                service.refusing = True
                self._shard.event(
                    "dead_letter_refused", "error", service=service.name, code=error.code,
                    reason=error.reason,
                )  # fmt: skip
            self._ends.bury_later(items)
            return
        self._steps.take([part])

    def give_back(
        self, service: Service, items: Sequence[BatchRows], why: str, again_ms: int | None = None
    ) -> None:
        """Let rows wait again whose worker has ended, was fenced or lost its lease.

        why: which of these; fenced: a newer link took the worker's place. again_ms: as returned()
        has it.
        """
        part = self.returned(service, items, why, again_ms)
        part.effects.append(Then(failed=partial(self._ends.settle_later, items)))
        self._steps.take([part])

    def give_back_all(self, in_flight: InFlight, why: str) -> None:
        """Let everything that an ended offer held wait again without a pause.

        A portion is given back in each turn, so that a worker with very many does not hold up
        others.
        """
        leases = deque(lease for one in in_flight.leases.values() for lease in one)
        if leases:
            self._leaving.append((leases, why))
            if len(self._leaving) == 1:  # Else the next turn goes on with the offers before.
                self._give_back_some()

    def _give_back_some(self) -> None:
        """Give back requests of ended offers, as far as one turn may; the next turn goes on.

        The budget, timers_max, counts the queues that rows are put into (RequestBatch.weight).
        """
        budget = self._shard.settings.timers_max
        while self._leaving and budget > 0:
            leases, why = self._leaving[0]
            items: list[BatchRows] = []
            service = leases[0].batch.service
            while leases and budget > 0:
                lease = leases.popleft()
                if lease.rows:  # Else they have been answered, or their lease has ended, meanwhile.
                    items.append((lease.batch, lease.rows))
                    budget -= lease.batch.weight
            if not leases:
                self._leaving.popleft()
            if items:
                self.give_back(service, merged(items), why, again_ms=0)
        if self._leaving:
            self._registry.next_turn.append(self._give_back_some)

    def _backoff(self, service: Service, times: int) -> int:
        """Return the pause before the next attempt, which doubles with each, up to a bound."""
        settings, limits = service.row.settings, self._shard.settings
        most = settings.backoff_max_ms or limits.backoff_max_ms
        first = settings.backoff_ms or limits.backoff_ms
        # 40 doublings are more than any bound; more would make a needlessly large number.
        return int(min(most, first << min(max(times, 1) - 1, 40)))


class _Returning(Effect):
    """Effect of requests that workers give back or lose: they wait again once the log has it."""

    returns: Returns
    service: Service
    items: Sequence[BatchRows]
    why: str
    at_ms: int
    """Time of the return."""
    by_pause: dict[int, list[BatchRows]]
    """Pause in ms -> the rows that have it."""
    exhausted: list[BatchRows]
    """Rows whose attempts are used up."""
    said: str
    """The worker's reason."""
    released: Released
    """Rows that taken() took from workers, to be given back where the log refuses."""

    def taken(self, part: Part) -> None:
        """Take the rows from their workers; no offer gets them until the log answers."""
        for batch, rows in self.items:
            batch.moving |= rows
            batch.returning |= rows
            self.released += self.returns._ends.let_go(batch, rows)

    def _not_moving(self) -> int:
        """Note that the log has answered for the rows; returns how many they are."""
        count = 0
        for batch, rows in self.items:
            batch.moving &= ~rows
            batch.returning &= ~rows
            count += rows.bit_count()
        return count

    def appended(self, part: Part, end_lsn: int) -> None:
        """Let the rows wait again, and bury those whose attempts are used up."""
        returns, exhausted = self.returns, self.exhausted
        returns._shard.counters["requests_returned"] += self._not_moving()
        if self.why in (RELEASED, WITHDRAWN):
            # The tables have taken the attempt back, so they tell whose attempts are used up.
            for batch, rows in self.items:
                used_up = returns._ends.spent(batch, rows & batch.alive)
                exhausted += [(batch, used_up)]
        spent = merged(exhausted)
        spent_rows = dict(spent)
        for pause_ms, some in self.by_pause.items():
            for batch, rows in some:
                rows &= batch.alive & ~spent_rows.get(batch, 0)
                if rows:
                    returns._wait_again(batch, rows, self.at_ms + pause_ms)
        if spent:
            spent = [(batch, rows & batch.alive) for batch, rows in spent]
            returns.bury_exhausted(self.service, spent, self.why, self.said)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Give the rows back to their workers, since the log did not take their return."""
        self._not_moving()
        self.returns._ends.undo_let_go(self.released)
        self.released.clear()
