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
from malamute_py.broker.services.queue import Back, Grant, Put, Service
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
        self.found: list[Grant] = []
        """In hand when the broker began; their leases begin when the time is known."""

    @property
    def due_ms(self) -> int | None:
        """When the next timer is due."""
        if self.found:
            return self._shard.now_ms
        due = self._registry.wheel.due_ms
        if self._ends.unsettled and (due is None or self._ends.settle_at_ms < due):
            due = self._ends.settle_at_ms
        if self._registry.paused_to_ms > self._shard.now_ms and self._registry.hungry:
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
        if self.found:
            # The leases of before begin anew: their holders may come back.
            for grant in self.found:
                if grant.rows:
                    grant.due_ms = now_ms + grant.lease_ms
                    grant.slot = self._registry.wheel.add(grant.due_ms, grant)
            self.found = []
        if self._ends.unsettled and self._ends.settle_at_ms <= now_ms:
            self._settle()
        due = self._registry.wheel.due_ms
        if due is None or due > now_ms:
            return
        leases: dict[tuple[Service, str], list[Rows]] = {}
        over: dict[Service, list[Rows]] = {}
        for thing in self._registry.wheel.take(now_ms, shard.settings.timers_max):
            if type(thing) is Grant:
                if thing.due_ms > now_ms:
                    thing.slot = self._registry.wheel.add(thing.due_ms, thing)
                elif thing.rows:
                    place = thing.put.service, thing.hands.holder
                    leases.setdefault(place, []).append((thing.put, thing.rows))
            elif type(thing) is Put:
                thing.slot = -1
                if thing.alive:
                    over.setdefault(thing.service, []).append((thing, thing.alive))
            elif type(thing) is Back:
                put = thing.put
                if put.backs is not None:
                    put.backs.pop(thing, None)
                rows = thing.rows & put.delayed
                put.delayed &= ~rows
                put.service.delayed -= rows.bit_count()
                rows &= put.free
                if rows:
                    put.service.wait(put, rows, again=True)
                    self._registry.hungry[put.service] = None
        for service, items in over.items():
            self._expire(service, items)
        for (service, holder), items in leases.items():
            items = [(put, rows & put.granted) for put, rows in items]
            items = [(put, rows) for put, rows in items if rows]
            if items:
                self._lease_over(service, holder, items)

    def _lease_over(self, service: Service, holder: str, items: list[Rows]) -> None:
        count = sum(rows.bit_count() for _, rows in items)
        self._shard.counters["leases_expired"] += count
        self._shard.event(
            "lease_expired", "warning", service=service.name, holder=holder, count=count
        )
        self._returns.give_up(service, merged(items), "lease")

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
        puts = list(islice(self._ends.unsettled, self._shard.settings.timers_max))
        now_ms = self._shard.now_ms
        for put in puts:
            # The others in the next step: unless these are refused, nothing speaks against it.
            del self._ends.unsettled[put]
        for put in puts:
            deadline_ms = put.row.put.deadline_ms
            if deadline_ms and deadline_ms <= now_ms and put.alive:
                self._expire(put.service, [(put, put.alive)])
                continue
            lost = put.alive & ~put.row.waiting & ~put.moving & ~put.granted
            if lost:
                self._returns.give_up(put.service, [(put, lost)], "died")
            spent = sum(self._returns.spent(put, put.free))
            if spent:
                self._returns.bury_exhausted(put.service, [(put, spent)], "died")
        for service in {put.service for put in puts}:
            self._registry.hungry[service] = None
