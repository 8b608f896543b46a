"""Hand-outs: requests that wait go to workers that are ready for them.

Owns the hand-outs that are on their way into the log. The rules: a request goes to an offer only
within its credit, and only once the log has the hand-out; a request past its deadline goes to none,
also while the log refuses its end; one turn hands out a bounded number of requests, and the
services take turns. A share is the rows of a batch that one offer is to get. Rows are `moving`
while their hand-out is on its way into the log. An effect is called when its part is taken into a
step, and when the log has the step (`appended`) or refuses it. Source: docs/design.md (Flow
control; Queues and the checkpoint).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import ERRED, Links
from malamute_py.broker.log.steps import Effect, Part, Steps
from malamute_py.broker.services.delivery import OFFER, WorkDelivery
from malamute_py.broker.services.dispatch import SLOW_LOOK
from malamute_py.broker.services.registry import RETRY_MS, Registry
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.rows import BatchRows, named
from malamute_py.broker.services.service import STANDING, Lease, Offer, RequestBatch, Service
from malamute_py.changelog.records import WITHDRAWN, Change, WorkTaken

Share: TypeAlias = tuple[Offer, RequestBatch, int, int]
"""(offer, batch, the rows of it that the offer gets, bytes of credit that were taken for them)."""

_SCAN_PART: Final = 4
"""Part of the time that services have in a turn (1 in so many) for comparing new subjects with
patterns: one comparison with many expressions takes a millisecond, and the requests themselves take
time in the same turn."""


class HandOuts:
    """Requests on their way to workers."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        registry: Registry,
        returns: Returns,
        delivery: WorkDelivery,
    ) -> None:
        self._shard = shard
        self._links = links
        self._steps = steps
        self._registry = registry
        self._returns = returns
        self._delivery = delivery
        self._handing: Final[list[Sequence[Share]]] = []
        """Hand-outs on their way into the log, whose rows handing_to() counts as the worker's."""
        self._count = 0
        """Number of hand-outs since the broker began; it tells leases of the same rows apart."""

    def hand_out(self) -> None:
        """Hand out requests that wait to offers that are ready, as far as one turn may.

        Called in each turn of the broker. `runnable` has the services with something to hand out;
        those that are not reached keep their place for the next turn.
        """
        registry = self._registry
        runnable = registry.runnable
        if not runnable or self._shard.now_ms < registry.paused_to_ms:
            return
        budget = self._shard.settings.hand_outs_max
        more = self._shard.share()  # Whether services have time left in this turn.
        for service in list(runnable):
            if budget <= 0:
                return
            del runnable[service]
            try:
                budget = self._serve(service, budget, more)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                self._erred(service, error)
                continue
            if service.runnable:
                # At the end, so that each service has its turn.
                runnable[service] = None
            if not more():
                return

    def _erred(self, service: Service, error: Exception) -> None:
        """End the links of a service's workers, since an error kept it from being served.

        Each is told why, and may offer again.
        """
        self._shard.erred("handing out", error, service=service.name)
        offers = list(service.offers)
        for offer in offers:
            self._links.refuse(offer.link, OFFER, offer.number, "internal", ERRED)
        for offer in offers:
            self._links.close(offer.link, "failed", "internal", ERRED)

    def _serve(self, service: Service, budget: int, more: Callable[[], bool]) -> int:
        """Hand out requests of one service, and return what is left of the budget.

        budget: entries of queues that are looked at. more: whether the turn has time left.
        """
        if service.state != STANDING:
            return budget  # The log does not have the service yet, or it is being removed.
        if service.new_patterns or service.new_subjects:
            service.scan(self._shard.share(_SCAN_PART))
            budget -= 1
        shares: list[Share] = []
        now_ms = self._shard.now_ms
        while budget > 0:
            queue = service.next_queue()
            if queue is None:
                break
            budget -= SLOW_LOOK if service.is_slow(queue) else 1
            _, rows, batch = queue.head()
            rows &= batch.free  # Others of the entry have ended, or are on their way elsewhere.
            put = batch.row.put
            if batch.deadline_ms and batch.deadline_ms <= now_ms:
                rows = 0  # Deadlines ends them.
            if rows:
                # Rows with different numbers of attempts leave as a WORK each.
                cost = put.size * max(1, len(batch.attempts(rows)))
                for offer, some in service.allot(queue, rows, cost, queue.rows):
                    shares.append((offer, batch, some, cost))
                    rows ^= some
                    # Noted at once, since another entry may name the same rows.
                    batch.moving |= some
            queue.replace(rows)  # What no offer got stays at the head.
            if not queue.rows:
                if queue.priority:
                    service.prior_waits_no_more(queue)
                service.emptied(queue)
            if not more():
                break
        if shares:
            self._hand_out(service, shares)
        return budget

    def _hand_out(self, service: Service, shares: Sequence[Share]) -> None:
        """Log the hand-out of shares; the workers get them once the log has it.

        The rows are moving, and the credit for them is taken, already.
        """
        # Rows of one batch that waited in several queues leave as one WORK.
        together: dict[tuple[Offer, RequestBatch], tuple[int, int]] = {}
        for offer, batch, rows, cost in shares:
            before, spent = together.get((offer, batch), (0, 0))
            together[offer, batch] = before | rows, spent + cost
        shares = [(offer, batch, rows, cost) for (offer, batch), (rows, cost) in together.items()]
        by_offer: dict[Offer, list[BatchRows]] = {}
        for offer, batch, rows, _ in shares:
            by_offer.setdefault(offer, []).append((batch, rows))
        number, now_ms = service.number, self._shard.now_ms
        changes: list[Change] = [
            WorkTaken(number, named(rows), offer.in_flight.holder, now_ms, offer.lease_ms)
            for offer, rows in by_offer.items()
        ]
        self._steps.take([self._registry.part(service, changes, _HandOut(self, service, shares))])

    def handing_to(self, holder: str, batch: RequestBatch) -> int:
        """Rows of a batch whose hand-out to a holder is on its way into the log.

        The holder may end them already, by an answer that was on its way when its link was lost.
        """
        rows = 0
        for shares in self._handing:
            for offer, one, some, _ in shares:
                if one is batch and offer.in_flight.holder == holder:
                    rows |= some
        return rows & ~batch.ending

    def return_credit(self, offer: Offer, count: int, cost: int) -> None:
        """Return the credit that was taken for requests which an offer did not get.

        count: requests. cost: bytes.
        """
        offer.left_records += count
        offer.left_bytes += cost
        self._registry.add_load(offer, -count)

    def lease(self, offer: Offer, batch: RequestBatch, rows: int, cost: int) -> None:
        """Let a worker hold rows whose hand-out the log has, and send them to it.

        cost: bytes of credit that were taken for them.
        """
        alive = rows & batch.alive  # Others have ended while the hand-out was on its way.
        gone = (rows ^ alive).bit_count()
        if gone:
            # While a row is alive, the delivery settles the credit in bytes by what it sends.
            self.return_credit(offer, gone, 0 if alive else cost)
        if not alive:
            return
        if offer.ended:
            # The offer ended before the log had the hand-out: nothing was sent, so that was no
            # attempt.
            self._returns.give_back(batch.service, [(batch, alive)], WITHDRAWN, again_ms=0)
            return
        self._count += 1
        lease = Lease(
            batch, alive, offer.in_flight, self._shard.now_ms, offer.lease_ms, self._count
        )
        offer.in_flight.add(lease)
        lease.slot = self._registry.timers.add(lease.due_ms, lease)
        count = alive.bit_count()
        batch.service.held += count
        self._shard.counters["requests_out"] += count
        self._delivery.deliver(offer, lease, cost)


class _HandOut(Effect):
    """Effect of a hand-out: the workers get the rows once the log has it."""

    hand_outs: HandOuts
    service: Service
    shares: Sequence[Share]

    def taken(self, part: Part) -> None:
        """Enter the shares as on their way; the rows and the credit were taken before."""
        self.hand_outs._handing.append(self.shares)

    def appended(self, part: Part, end_lsn: int) -> None:
        """Give each offer a lease of its rows, and send the requests."""
        self.hand_outs._handing.remove(self.shares)
        for offer, batch, rows, cost in self.shares:
            batch.moving &= ~rows
            self.hand_outs.lease(offer, batch, rows, cost)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Give the offers their credit and the queue its rows back; hand-outs pause for a while."""
        hand_outs, service = self.hand_outs, self.service
        hand_outs._handing.remove(self.shares)
        for offer, batch, rows, cost in self.shares:
            batch.moving &= ~rows
            hand_outs.return_credit(offer, rows.bit_count(), cost)
            if batch.row.waiting & rows:
                # Their entry in the queue is gone.
                service.wait(batch, batch.row.waiting & rows, again=True)
        hand_outs._registry.runnable[service] = None
        hand_outs._registry.paused_to_ms = hand_outs._shard.now_ms + (retry_ms or RETRY_MS)
