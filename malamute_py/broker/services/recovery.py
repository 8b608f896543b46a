"""Recovery of services, their requests, and their workers' leases when a broker begins.

Owns how the queues are made from the tables. The rule: a worker still holds the requests that it
held before the restart, until a new lease is over; without an offer they are orphans
(`Service.orphans`). Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from malamute_py.broker.context import Shard
from malamute_py.broker.services.deadlines import Deadlines
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.services.registry import Registry
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.service import STANDING, InFlight, Lease, RequestBatch, Service


class Recovery:
    """Makes the queues from the tables."""

    def __init__(
        self, shard: Shard, registry: Registry, ends: Ends, returns: Returns, deadlines: Deadlines
    ) -> None:
        self._shard = shard
        self._registry = registry
        self._ends = ends
        self._returns = returns
        self._deadlines = deadlines

    def recovered(self) -> None:
        """Take up the services and requests in the tables; to be called once, before all else."""
        queues = self._shard.queues
        by_number: dict[int, Service] = {}
        for row in queues.services.values():
            service = Service(row)
            service.state = STANDING
            self._registry.enter(service)
            by_number[row.number] = service
        for base, request in list(queues.requests.items()):
            found = by_number.get(request.put.service)
            if found is None:
                # The service was removed: no command can name the request any more.
                del queues.requests[base]
                continue
            self._take_up(found, RequestBatch(found, request))

    def _take_up(self, service: Service, batch: RequestBatch) -> None:
        """Add a batch of the tables to its queue.

        Its rows wait, or wait for a pause to end first, or a worker holds them, or they are set
        aside to become dead letters.
        """
        row = batch.row
        put = row.put
        if put.deadline_ms:
            # At most its whole time from now on: the clock may have been ahead when it was put.
            batch.deadline_ms = self._shard.trusted_end(
                put.deadline_ms, put.deadline_ms - put.at_ms
            )
        self._registry.add(service, batch)
        waiting = row.waiting
        for at_ms, rows in row.delayed.items():
            rows &= waiting
            self._returns.delay(batch, rows, self._shard.trusted_end(at_ms, row.pause_ms))
        waiting &= ~batch.delayed
        again = 0  # Rows that were handed out before: they go before the others.
        for times, rows in row.attempts.items():
            if times < self._ends.attempts_max(service):
                again |= rows
            elif rows & waiting:
                # The broker ended before these could become dead letters.
                batch.aside |= rows & waiting  # Deadlines buries them.
                waiting &= ~rows
                self._ends.unsettled[batch] = None
        if waiting & ~again:
            service.wait(batch, waiting & ~again, again=False)
        if waiting & again:
            service.wait(batch, waiting & again, again=True)
        for hold in row.holds:
            in_flight = service.orphans.get(hold.holder)
            if in_flight is None:
                in_flight = service.orphans[hold.holder] = InFlight(hold.holder, offer=None)
            lease_ms = hold.lease_ms or self._shard.settings.lease_ms
            lease = Lease(batch, hold.rows, in_flight, hold.at_ms, lease_ms, hand_out=0)
            in_flight.add(lease)
            service.held += hold.rows.bit_count()
            self._deadlines.recovered.append(lease)
