"""OFFER: how the offers of workers begin and end.

Owns the number of offers and the size of their patterns. The rule: requests that a link held when
it ended wait again at once. An offer is a worker's word that it takes requests of a service.
Orphans are requests that its holder, the worker, has held since before a restart of the broker; an
absent holder is one whose link was lost. Source: docs/design.md (Flow control; Queues and the
checkpoint); SPEC.md, section 4.5.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from malamute_protocol.commands import Ended, Subscribed
from malamute_protocol.commands import Offer as OfferCommand
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.steps import Steps, Then
from malamute_py.broker.services.registry import Registry
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.service import STANDING, Offer, Service
from malamute_py.changelog.records import WITHDRAWN


class Offers:
    """All offers of one core: OFFER begins one, and its worker, link or service ends it."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        registry: Registry,
        returns: Returns,
        answers: Answers,
    ) -> None:
        self._shard = shard
        self._links = links
        self._steps = steps
        self._registry = registry
        self._returns = returns
        self._answers = answers
        self.count = 0
        """Number of offers."""
        self.pattern_bytes = 0
        """Size of their patterns."""

    # --- OFFER --------------------------------------------------------------------------------

    def offer(self, link: Link, command: OfferCommand) -> None:
        """Take an OFFER up; it is accepted once the log has its service.

        Raises BrokerRefused: by the permissions, the bounds or its pattern.
        """
        offer = self._prepare_offer(link, command)
        if offer.service.state == STANDING:
            self._accepted(offer, 0)  # 0: nothing had to be logged.
        else:
            made = Then(partial(self._accepted, offer), partial(self._not_made, offer, command))
            self._registry.make(offer.service, made)

    def _accepted(self, offer: Offer, _: int) -> None:
        """Tell the worker that its offer is accepted, and serve it: the log has the service."""
        if offer.ended:
            return
        # An offer has no position in a stream: SUBSCRIBED has the next request's number for each.
        begun = offer.begun = self._steps.mail_next
        self._links.say(
            offer.link, Subscribed(offer.number, b"", self._shard.epoch, begun, begun, begun)
        )
        self.resume(offer)

    def _not_made(self, offer: Offer, command: OfferCommand, *why: Any) -> None:
        """Refuse an OFFER, as the log has refused to make its service."""
        if not offer.ended:
            self._drop(offer)
            self._answers.refuse(offer.link, command, *why)

    def _prepare_offer(self, link: Link, command: OfferCommand) -> Offer:
        """Check an OFFER, and add its offer to the service: not ready, so it is given nothing yet.

        Raises BrokerRefused: nothing was done.
        """
        settings = self._shard.settings
        self._links.check_number(link, command.subscription)
        if self.count >= settings.offers_max:
            reason = f"at most {settings.offers_max} offers in all"
            raise self._shard.quotas.limit_told_to(link.owner, "offers", reason)
        if not settings.permit(link.owner, "work", command.service):
            raise BrokerRefused("forbidden", f"you may not work for '{command.service}'")
        size = len(msgspec.msgpack.encode(command.pattern))
        if size > settings.pattern_bytes_max:
            raise BrokerRefused(
                "too_large", f"a pattern of {size} bytes, at most {settings.pattern_bytes_max}"
            )
        if self.pattern_bytes + size > settings.all_patterns_bytes_max:
            reason = f"patterns of at most {settings.all_patterns_bytes_max} bytes in all"
            raise self._shard.quotas.limit_told_to(link.owner, "patterns of offers", reason)
        quotas = self._shard.quotas
        quotas.check_receiver(link.quota_owner, "offers", size)
        service = self._registry.use(command.service, link.owner, command.settings or None)
        offer = Offer(self, link, command, service)
        try:
            service.join(offer)
        except BrokerRefused:
            # The pattern was refused: a service that only this OFFER has called for is forgotten.
            self._registry.forget_unused(service)
            raise
        offer.pattern_bytes = size
        offer.lease_ms = self._lease_ms(service, command.lease_ms)
        self.pattern_bytes += size
        self.count += 1
        quotas.add_receiver(link.quota_owner, "offers", size)
        link.receivers[offer.number] = offer
        return offer

    def _lease_ms(self, service: Service, asked_ms: int) -> int:
        """Return an offer's lease: as asked, else the service's, else the broker's; bounded."""
        settings = self._shard.settings
        lease_ms = asked_ms or service.row.settings.lease_ms or settings.lease_ms
        return max(settings.lease_min_ms, min(lease_ms, settings.lease_max_ms))

    def resume(self, offer: Offer) -> None:
        """Let an offer be given requests: its credit or the room of its link has grown."""
        if offer.service.state == STANDING and offer.service.refile(offer):
            self._registry.runnable[offer.service] = None

    # --- ends ---------------------------------------------------------------------------------

    def end(self, offer: Offer, code: str) -> None:
        """End an offer with an ENDED, as its worker or the broker wants; its requests wait again.

        The hand-outs count as no attempts (WITHDRAWN). With the last offer of its worker, orphans
        wait again, too.
        """
        self._drop(offer)
        self._links.say(offer.link, Ended(offer.number, offer.begun, code))
        self._returns.give_back_all(offer.in_flight, WITHDRAWN)
        self._leave_orphans(offer, WITHDRAWN)

    def link_ended(self, link: Link, offers: list[Offer]) -> None:
        """Forget the offers of an ended link; the requests that they hold wait again.

        Their holder may still answer them, as long as no other worker has them (`absent`). The
        operator is told once for each service.
        """
        if link.happened == "draining":
            # The broker is about to stop: workers that come back later go on with what they hold.
            for offer in offers:
                self._drop(offer)
            return
        # fenced: another link of the same session or identity took over.
        why = "fenced" if link.happened == "fenced" else "died"
        lost: dict[Service, int] = {}
        for offer in offers:
            count = offer.in_flight.rows
            service = offer.service
            self._drop(offer)
            service.absent.remember(offer.in_flight.holder, offer.in_flight.rows_by_batch())
            count += self._leave_orphans(offer, why)
            self._returns.give_back_all(offer.in_flight, why)
            if count:
                lost[service] = lost.get(service, 0) + count
        for service, count in lost.items():
            self._shard.counters["workers_died"] += 1
            self._shard.event(
                "worker_died", "warning", service=service.name, holder=link.holder,
                link=link.number, happened=link.happened, count=count,
            )  # fmt: skip

    def _drop(self, offer: Offer) -> None:
        """Forget an offer, however it ends: it is given nothing more, and no quota counts it."""
        if offer.ended:
            return
        offer.leave()
        offer.service.leave(offer)
        offer.in_flight.leave()
        self.count -= 1
        self.pattern_bytes -= offer.pattern_bytes
        owner = offer.link.quota_owner
        self._shard.quotas.add_receiver(owner, "offers", offer.pattern_bytes, sign=-1)
        self._registry.forget_unused(offer.service)

    def _leave_orphans(self, offer: Offer, why: str) -> int:
        """Let orphans of a holder wait again, if it has no offer of the service left.

        offer: the one that has just ended. why: how. Returns their number.
        """
        service, holder = offer.service, offer.in_flight.holder
        in_flight = service.orphans.get(holder)
        if in_flight is None or any(other.in_flight.holder == holder for other in service.offers):
            return 0
        del service.orphans[holder]
        count = in_flight.rows
        if why != WITHDRAWN:
            service.absent.remember(holder, in_flight.rows_by_batch())
        self._returns.give_back_all(in_flight, why)
        return count
