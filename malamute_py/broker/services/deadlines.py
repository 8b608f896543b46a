"""What falls due: leases, deadlines, the ends of pauses, and what the log had refused.

Owns what happens to requests because time has passed. The rules: one turn does a bounded number;
leases of before a restart begin anew when the time is known; what the log refused is decided anew
from what the tables say by then. Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

from malamute_py.broker.context import Shard
from malamute_py.broker.log.steps import Steps, Then
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.services.queue import Lease, Pause, RequestBatch, Service
from malamute_py.broker.services.registry import Registry
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.rows import Rows, merged


class Deadlines:
    """Timers of requests."""

    def __init__(
        self, shard: Shard, steps: Steps, registry: Registry, ends: Ends, returns: Returns
    ) -> None:
        self._shard = shard
        self._steps = steps
        self._registry = registry
        self._ends = ends
        self._returns = returns
        self.recovered: list[Lease] = []
        """In hand when the broker began; their leases begin when the time is known."""

    @property
    def due_ms(self) -> int | None:
        """When the next timer is due."""
        if self.recovered:
            return self._shard.now_ms
        due = self._registry.wheel.due_ms
        if self._ends.unsettled and (due is None or self._ends.settle_at_ms < due):
            due = self._ends.settle_at_ms
        if self._registry.paused_to_ms > self._shard.now_ms and self._registry.runnable:
            due = (
                self._registry.paused_to_ms
                if due is None
                else min(due, self._registry.paused_to_ms)
            )
        return due

    def tick(self) -> None:
        """Do what is due, as far as one step may."""
        shard = self._shard
        now_ms = shard.now_ms
        if self.recovered:
            # The leases of before begin anew: their holders may come back.
            for lease in self.recovered:
                if lease.rows:
                    lease.due_ms = now_ms + lease.lease_ms
                    lease.slot = self._registry.wheel.add(lease.due_ms, lease)
            self.recovered = []
        if self._ends.unsettled and self._ends.settle_at_ms <= now_ms:
            self._settle()
        due = self._registry.wheel.due_ms
        if due is None or due > now_ms:
            return
        leases: dict[tuple[Service, str], list[Rows]] = {}
        over: dict[Service, list[Rows]] = {}
        for thing in self._registry.wheel.take(now_ms, shard.settings.timers_max):
            if type(thing) is Lease:
                if thing.due_ms > now_ms:
                    thing.slot = self._registry.wheel.add(thing.due_ms, thing)
                elif thing.rows:
                    place = thing.batch.service, thing.in_flight.holder
                    leases.setdefault(place, []).append((thing.batch, thing.rows))
            elif type(thing) is RequestBatch:
                thing.slot = -1
                if thing.alive:
                    over.setdefault(thing.service, []).append((thing, thing.alive))
            elif type(thing) is Pause:
                batch = thing.batch
                if batch.pauses is not None:
                    batch.pauses.pop(thing, None)
                rows = thing.rows & batch.delayed
                batch.delayed &= ~rows
                batch.service.delayed -= rows.bit_count()
                rows &= batch.free
                if rows:
                    batch.service.wait(batch, rows, again=True)
                    self._registry.runnable[batch.service] = None
        for service, items in over.items():
            self._expire(service, items)
        for (service, holder), items in leases.items():
            items = [(batch, rows & batch.leased) for batch, rows in items]
            items = [(batch, rows) for batch, rows in items if rows]
            if items:
                self._lease_over(service, holder, items)

    def _lease_over(self, service: Service, holder: str, items: list[Rows]) -> None:
        count = sum(rows.bit_count() for _, rows in items)
        self._shard.counters["leases_expired"] += count
        self._shard.event(
            "lease_expired", "warning", service=service.name, holder=holder, count=count
        )
        self._returns.give_back(service, merged(items), "lease")

    def _expire(self, service: Service, items: list[Rows]) -> None:
        """The deadline of these is over."""
        count = sum(rows.bit_count() for _, rows in items)
        expiring = Then(partial(self._expired, service, count), partial(self._ends.later, items))
        self._steps.take([self._ends.end(service, items, "expired", expiring, notice="expired")])

    def _expired(self, service: Service, count: int, _: int) -> None:
        self._shard.counters["requests_expired"] += count
        self._shard.event("request_expired", "warning", service=service.name, count=count)

    def _settle(self) -> None:
        """Decide again what the log refused."""
        batches = list(islice(self._ends.unsettled, self._shard.settings.timers_max))
        now_ms = self._shard.now_ms
        for batch in batches:
            # The others in the next step: unless these are refused, nothing speaks against it.
            del self._ends.unsettled[batch]
        for batch in batches:
            deadline_ms = batch.row.put.deadline_ms
            if deadline_ms and deadline_ms <= now_ms and batch.alive:
                self._expire(batch.service, [(batch, batch.alive)])
                continue
            lost = batch.alive & ~batch.row.waiting & ~batch.moving & ~batch.leased
            if lost:
                self._returns.give_back(batch.service, [(batch, lost)], "died")
            spent = sum(self._returns.spent(batch, batch.free))
            if spent:
                self._returns.bury_exhausted(batch.service, [(batch, spent)], "died")
        for service in {batch.service for batch in batches}:
            self._registry.runnable[service] = None
