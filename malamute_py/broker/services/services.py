"""Services: the requests in their queues and the workers that do them.

Owns how the parts of this room are put together, and what the broker asks of them. Source: SPEC.md,
section 4.5; docs/design.md (Queues and the checkpoint).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from malamute_protocol.commands import Command, Offer, PeekRequests
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.bodies import Bodies
from malamute_py.broker.log.pages import Pages
from malamute_py.broker.log.steps import Steps
from malamute_py.broker.mail.puts import Puts
from malamute_py.broker.services.administration import ServiceAdmin
from malamute_py.broker.services.claims import Claims
from malamute_py.broker.services.deadlines import Deadlines
from malamute_py.broker.services.delivery import WorkDelivery
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.services.hand_outs import HandOuts
from malamute_py.broker.services.peeking import Peeking
from malamute_py.broker.services.recovery import Recovery
from malamute_py.broker.services.registry import Registry
from malamute_py.broker.services.replies import Replies
from malamute_py.broker.services.requests import Requests
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.workers import Offers


class Services:
    """All services of one core, as the broker calls them: each call goes on to the part for it."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        bodies: Bodies,
        puts: Puts,
        answers: Answers,
        pages: Pages,
    ) -> None:
        self._shard = shard
        self._registry = registry = Registry(shard, steps, puts.mailboxes)
        self._ends = ends = Ends(shard, bodies, puts, registry)
        returns = Returns(shard, steps, registry, ends)
        self._delivery = WorkDelivery(shard, links, steps, bodies, ends, returns)
        self._hand_outs = hand_outs = HandOuts(
            shard, links, steps, registry, returns, self._delivery
        )
        requests = Requests(shard, steps, bodies, puts, registry, returns, hand_outs)
        self._offers = Offers(shard, links, steps, registry, returns, answers)
        claims = Claims(shard, hand_outs)
        replies = Replies(shard, puts, registry, ends, returns, claims)
        self._deadlines = deadlines = Deadlines(shard, steps, registry, ends, returns)
        self._admin = ServiceAdmin(
            shard, steps, bodies, puts, registry, ends, returns, answers, pages
        )
        self._peeking = Peeking(shard, registry, pages)
        recovery = Recovery(shard, registry, ends, returns, deadlines)
        self.queues: Final = registry.queues
        """While all of these are empty, services have nothing to do at once."""
        # What the broker asks of the parts, under the names by which it calls them.
        self.prepare_request = requests.prepare
        self.request_again = requests.again
        self.prepare_reply = replies.prepare_reply
        self.prepare_ack = replies.prepare_ack
        self.recovered = recovery.recovered
        self.tick = deadlines.tick
        self.put_off_leases = deadlines.put_off_leases

    def handlers(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """Methods that handle commands which are no steps, by their class."""
        return {
            Offer: self._offers.offer,
            PeekRequests: self._peeking.peek,
            **self._admin.handlers(),
        }

    @property
    def due_ms(self) -> int | None:
        """When `tick` must be called at the latest; None: no timer is set."""
        return self._deadlines.due_ms

    @property
    def runnable(self) -> bool:
        """Whether `hand_out` has something to do; a hand-out that the log refused has a pause."""
        registry = self._registry
        return bool(registry.next_turn) or (
            bool(registry.runnable) and self._shard.now_ms >= registry.paused_to_ms
        )

    def hand_out(self) -> None:
        """Do what was left to this turn, then hand out requests to workers that are ready.

        Called in each turn of the broker that has such work. What these calls leave to the next
        turn waits for that: the queue's length is taken before.
        """
        next_turn = self._registry.next_turn
        for _ in range(len(next_turn)):
            next_turn.popleft()()
        self._hand_outs.hand_out()

    @property
    def gauges(self) -> dict[str, int]:
        """Gauges of services, by name."""
        registry = self._registry
        return {
            "services": len(registry.by_name),
            "requests": registry.rows,
            "request_bytes": registry.size,
            "offers": self._offers.count,
        }
