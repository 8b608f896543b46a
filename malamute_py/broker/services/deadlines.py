"""Work that falls due: ends of leases and pauses, deadlines, and actions that the log refused.

Owns what happens to requests because time has passed. The rules: one turn handles a bounded number
of timers; leases from before a restart begin anew when the time is known; an action that the log
refused, or over which an error arose, is decided again by what the tables say then: until that its
batch is unsettled.

Rows of a batch are `alive` until they end or their end is on its way, `free` while they may be
handed out, `leased` while a worker holds them, `moving` while a hand-out or return of them is on
its way into the log, and `aside` when no queue has them. Source: docs/design.md, Queues and the
checkpoint.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

from malamute_py.broker.context import Shard
from malamute_py.broker.log.steps import Steps, Then
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.services.registry import RETRY_MS, Registry
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.rows import BatchRows, merged
from malamute_py.broker.services.service import Lease, Pause, RequestBatch, Service
from malamute_py.changelog.records import WITHDRAWN


class Deadlines:
    """Handles the timers of requests, in a turn of the broker in which some are due."""

    def __init__(
        self, shard: Shard, steps: Steps, registry: Registry, ends: Ends, returns: Returns
    ) -> None:
        self._shard = shard
        self._steps = steps
        self._registry = registry
        self._ends = ends
        self._returns = returns
        self.recovered: list[Lease] = []
        """Leases from before a restart, until the first tick begins them anew."""

    @property
    def due_ms(self) -> int | None:
        """Time at which tick(), or a hand-out after a pause, has something to do; None: no such."""
        registry, ends = self._registry, self._ends
        if self.recovered:
            return self._shard.now_ms
        due = registry.timers.due_ms
        if ends.unsettled and (due is None or ends.settle_at_ms < due):
            due = ends.settle_at_ms
        # Hand-outs pause after the log has refused one.
        paused_to_ms = registry.paused_to_ms
        if paused_to_ms > self._shard.now_ms and registry.runnable:
            due = paused_to_ms if due is None else min(due, paused_to_ms)
        return due

    def tick(self) -> None:
        """Handle timers that are due, as far as one turn may: leases, deadlines and pauses.

        Called in a turn of the broker from due_ms on.
        """
        shard = self._shard
        now_ms = shard.now_ms
        if self.recovered:
            # The holders may come back, so each lease has all of its time again.
            for lease in self.recovered:
                if lease.rows:
                    lease.due_ms = now_ms + lease.lease_ms
                    lease.slot = self._registry.timers.add(lease.due_ms, lease)
            self.recovered = []
        if self._ends.unsettled and self._ends.settle_at_ms <= now_ms:
            self._settle()
        due = self._registry.timers.due_ms
        if due is None or due > now_ms:
            return
        # Leases that are over, by service and holder; batches whose deadline is over, by service.
        leases: dict[tuple[Service, str], list[BatchRows]] = {}
        over: dict[Service, list[BatchRows]] = {}
        for thing in self._registry.timers.take(now_ms, shard.settings.timers_max):
            if type(thing) is Lease:
                if thing.due_ms > now_ms:  # The worker has renewed it since.
                    thing.slot = self._registry.timers.add(thing.due_ms, thing)
                elif thing.rows:
                    worker = thing.batch.service, thing.in_flight.holder
                    leases.setdefault(worker, []).append((thing.batch, thing.rows))
            elif type(thing) is RequestBatch:
                thing.slot = -1
                if thing.alive:
                    over.setdefault(thing.service, []).append((thing, thing.alive))
            elif type(thing) is Pause:
                self._pause_over(thing)
        for service, items in over.items():
            try:
                self._expire(service, items)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                self._erred("ending requests", service, items, error)
        for (service, holder), items in leases.items():
            # To expire requests, above, has taken them from their workers.
            items = [(batch, rows & batch.leased) for batch, rows in items]
            items = [(batch, rows) for batch, rows in items if rows]
            try:
                if items:
                    self._lease_over(service, holder, items)
            except Exception as error:  # noqa: BLE001 - as above
                self._erred("giving requests back", service, items, error)

    def _erred(
        self, doing: str, service: Service, items: list[BatchRows], error: Exception
    ) -> None:
        """Report an error over requests of one service, and have them looked at again later.

        Requests of other services, and other clients, have their turns meanwhile.
        """
        self._shard.erred(doing, error, service=service.name)
        now_ms = self._shard.now_ms
        for batch, _ in items:
            for lease in batch.leases:
                if lease.rows and lease.due_ms <= now_ms:
                    lease.due_ms = now_ms + RETRY_MS
                    lease.slot = self._registry.timers.add(lease.due_ms, lease)
        self._ends.settle_later(items)

    def _pause_over(self, pause: Pause) -> None:
        """Let rows wait in their queue whose pause is over, or the delay that a requester asked."""
        batch = pause.batch
        if batch.pauses is not None:
            batch.pauses.pop(pause, None)
        rows = pause.rows & batch.delayed  # Others have ended during the pause.
        batch.delayed &= ~rows
        batch.service.delayed -= rows.bit_count()
        rows &= batch.free
        for times, some in batch.attempts(rows):
            # After a delay, rows have not been handed out yet: they do not go before others.
            batch.service.wait(batch, some, again=times > 0)
            self._registry.runnable[batch.service] = None

    def put_off_leases(self, ms: int) -> None:
        """Let all leases last longer by a time in which no worker could be heard.

        Called when the broker finds that it stood still. The timers are not moved: tick() finds the
        later time and sets each anew.
        """
        for service in self._registry.by_name.values():
            for batch in service.batches.values():
                for lease in batch.leases:
                    lease.due_ms += ms

    def _lease_over(self, service: Service, holder: str, items: list[BatchRows]) -> None:
        """Give requests of one worker back whose leases are over, and tell the operator."""
        count = sum(rows.bit_count() for _, rows in items)
        self._shard.counters["leases_expired"] += count
        self._shard.event(
            "lease_expired", "warning", service=service.name, holder=holder, count=count
        )
        self._returns.give_back(service, merged(items), "lease")

    def _expire(self, service: Service, items: list[BatchRows]) -> None:
        """End requests whose deadline is over, whether they wait or are held, with a notice."""
        count = sum(rows.bit_count() for _, rows in items)
        expiring = Then(
            partial(self._expired, service, count), partial(self._ends.settle_later, items)
        )
        self._steps.take([self._ends.end(service, items, "expired", expiring, notice="expired")])

    def _expired(self, service: Service, count: int, _: int) -> None:
        """Count and report requests whose expiry the log has."""
        self._shard.counters["requests_expired"] += count
        self._shard.event("request_expired", "warning", service=service.name, count=count)

    def _settle(self) -> None:
        """Expire, give back or bury requests again where that was not done a while ago."""
        batches = list(islice(self._ends.unsettled, self._shard.settings.timers_max))
        now_ms = self._shard.now_ms
        for batch in batches:
            # The rest is done in the next turns, unless the log refuses these, too.
            del self._ends.unsettled[batch]
        for batch in batches:
            try:
                self._decide(batch, now_ms)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                self._erred("deciding on requests", batch.service, [(batch, 0)], error)
        for service in {batch.service for batch in batches}:
            self._registry.runnable[service] = None

    def _decide(self, batch: RequestBatch, now_ms: int) -> None:
        """Do what an unsettled batch needs by what the tables say: expire, give back or bury."""
        deadline_ms = batch.deadline_ms
        if deadline_ms and deadline_ms <= now_ms and batch.alive:
            self._expire(batch.service, [(batch, batch.alive)])
            return
        # Rows that a worker holds by the tables, and no lease has: their offer has ended.
        lost = batch.alive & ~batch.row.waiting & ~batch.moving & ~batch.leased
        if lost:
            self._returns.give_back(batch.service, [(batch, lost)], "died")
        unread = 0
        for lease in batch.leases:
            if lease.unreadable:
                unread |= lease.rows
        if unread:
            items = [(batch, unread)]
            self._returns.give_back(batch.service, items, WITHDRAWN, again_ms=RETRY_MS)
        # Rows that no queue has, as their attempts were used up and they could not be buried.
        aside, batch.aside = batch.aside & batch.free, 0
        spent = self._ends.spent(batch, batch.free)
        if spent:
            self._returns.bury_exhausted(batch.service, [(batch, spent)], "died")
        if kept := aside & ~spent:
            # Their attempts_max was raised meanwhile.
            batch.service.wait(batch, kept, again=True)
