"""The services of one core by name.

Owns which services there are, how first use creates one, their sums and timers, and what there is
to do at once. The rules: a service exists as soon as a command uses it, and is forgotten in the
next turn if no command needs it; a change that makes its queue runnable puts it into `runnable`. A
service is a draft until the log has it; to make a service is to log its creation. Source:
docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from malamute_protocol.address import name_fault
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.log.steps import Effect, Part, Steps, Then, changing
from malamute_py.broker.mail.mailboxes import Mailboxes
from malamute_py.broker.services.service import (
    DRAFT,
    REMOVING,
    STANDING,
    Lease,
    Offer,
    Pause,
    RequestBatch,
    Service,
)
from malamute_py.broker.structures.timer_wheel import TimerWheel
from malamute_py.changelog.records import Change, ServiceSet
from malamute_py.changelog.settings import ServiceSettings, queue_settings
from malamute_py.changelog.tables import ServiceRow

RETRY_MS: Final = 1_000
"""Pause before a decision that the log refused is made again."""


class Registry:
    """All services of one core: the other parts of this room find, make and count them here."""

    def __init__(self, shard: Shard, steps: Steps, mailboxes: Mailboxes) -> None:
        self._shard = shard
        self._steps = steps
        self._mailboxes = mailboxes
        self.by_name: dict[str, Service] = {}
        self.names: list[str] = []
        """Keys of `by_name`, ascending."""
        self.next_turn: Final[deque[Callable[[], None]]] = deque()
        """Calls that are made in the next turn."""
        self.size = 0
        """Bytes of all batches of requests, and of those on their way into the log."""
        self.rows = 0
        """Requests in all queues."""
        self.timers: TimerWheel[Lease | RequestBatch | Pause] = TimerWheel()
        """Ends of leases and pauses, and deadlines of batches."""
        self.runnable: Final[dict[Service, None]] = {}
        """Services of which requests may be handed out at once."""
        self.queues: Final = (self.next_turn, self.runnable)
        """While both are empty, services have nothing to do at once: the broker looks at them in
        each turn."""
        self.paused_to_ms = 0
        """Time before which nothing is handed out, since the log has refused a hand-out."""

    # --- first use ------------------------------------------------------------------------------

    def use(self, name: str, by: str, settings: dict[str, Any] | None = None) -> Service:
        """The service of a name, created as a draft if there is none. by: the owner that asks.

        settings: those of a service that is created; None: the broker's defaults, where services
        may be created without a word (`auto_create`). Raises BrokerRefused: by the name, the
        permissions, the bounds or the settings, or while the service is being removed.
        """
        found = self.by_name.get(name)
        if found is not None:
            if found.state == REMOVING:
                raise BrokerRefused("wait", f"service '{name}' is being removed")
            return found
        fault = name_fault(name)
        if fault:
            raise BrokerRefused("bad_name", fault)
        limits = self._shard.settings
        if settings is None and not limits.auto_create:
            raise BrokerRefused("unknown_service", f"there is no service '{name}'")
        if not limits.permit(by, "create_service", name):
            raise BrokerRefused("forbidden", f"you may not create service '{name}'")
        self.check_dead_letters(by, settings or {})
        if len(self.by_name) >= limits.services_max:
            reason = f"at most {limits.services_max} services"
            raise self._shard.quotas.limit_told_to(by, "services", reason)
        self._shard.quotas.check(by, "services")
        made = queue_settings(
            ServiceSettings,
            {**limits.default_of("service", name), **(settings or {})},
            limits.settings_bytes_max,
            over=None,
        )
        number = self._mailboxes.number()
        service = Service(ServiceRow(number, name, made, by, self._shard.now_ms))
        self.enter(service)
        self.next_turn.append(partial(self.forget_unused, service))
        return service

    def check_dead_letters(self, owner: str, settings: dict[str, Any]) -> None:
        """Raise BrokerRefused for a mailbox to which an owner may not have dead letters put."""
        mailbox = settings.get("dead_letters")
        if isinstance(mailbox, str) and mailbox:
            permit = self._shard.settings.permit
            if not permit(owner, "dead_letters", mailbox):
                raise BrokerRefused("forbidden", f"you may not send to mailbox '{mailbox}'")

    def enter(self, service: Service) -> None:
        """Add a service, made for a command or recovered, to the table and its owner's quota."""
        self.by_name[service.name] = service
        insort(self.names, service.name)
        self._shard.quotas.add(service.row.by, "services")

    def forget(self, service: Service) -> None:
        """Remove a service that has gone, or was never made, also from its owner's quota."""
        if self.by_name.get(service.name) is service:
            del self.by_name[service.name]
            del self.names[bisect_left(self.names, service.name)]
            self._shard.quotas.add(service.row.by, "services", -1)
        service.state = REMOVING  # Links that keep it in `requesting` see so that it has gone.
        service.clear()
        self.runnable.pop(service, None)

    def creation(self, service: Service) -> Change:
        """Return the change that makes a service, with the settings that it has now."""
        row = service.row
        return ServiceSet(row.number, row.name, row.settings, row.by, row.created_ms)

    def made(self, service: Service) -> None:
        """Note that the log has a service, by whichever change: it is served from now on."""
        self.runnable[service] = None
        if service.state == DRAFT:
            service.state = STANDING
            self._shard.counters["services_created"] += 1
            self._shard.event("service_created", service=service.name, by=service.row.by)

    def forget_unused(self, service: Service) -> None:
        """Forget a service that the log does not have, if no command needs it.

        Called wherever a need ends, as when an offer ends, and in the turn after it was made.
        """
        if service.state == DRAFT and not (
            service.making or service.reserved_rows or service.batches or service.offers
        ):
            self.forget(service)

    def make(self, service: Service, *effects: Effect) -> None:
        """Have the log make a service; it is served once the log has it.

        Batches of requests that are logged before that bring the same change. effects: what else is
        done then, as to answer a command.
        """
        service.making += 1
        making = Then(partial(self._was_made, service), partial(self._was_not_made, service))
        self._steps.propose(self.creation(service), making, *effects)

    def _was_made(self, service: Service, _: int) -> None:
        """Take note that the log has a service that make() asked for."""
        service.making -= 1
        self.made(service)

    def _was_not_made(self, service: Service, *_: Any) -> None:
        """Drop a service whose creation the log refused, unless something else uses it."""
        service.making -= 1
        self.forget_unused(service)

    # --- batches and loads ----------------------------------------------------------------------

    def part(self, service: Service, changes: list[Change], *effects: Effect) -> Part:
        """Return a part of a step that changes a service; one in memory changes without the log."""
        memory = self._shard.queues if service.memory else None
        return changing(changes, effects, memory=memory, level=service.level)

    def weigh(self, service: Service, sender: str, size: int) -> None:
        """Count bytes of a sender's requests: more, or less when `size` is below 0."""
        self.size += size
        self._shard.quotas.weigh(sender, service.resource, size)

    def add(self, service: Service, batch: RequestBatch, *, weighed: bool = False) -> None:
        """Add a batch to the sums of its service, and set the timer of its deadline.

        weighed: its bytes were counted when its REQUEST was taken.
        """
        row = batch.row
        count, size = row.left.bit_count(), row.put.size
        service.batches[batch.base] = batch
        service.rows += count
        service.size += size
        self.rows += count
        if not weighed:
            self.weigh(service, row.put.sender, size)
        if batch.deadline_ms:
            batch.slot = self.timers.add(batch.deadline_ms, batch)

    def add_load(self, offer: Offer, count: int) -> None:
        """Count requests that an offer holds (fewer: `count` below 0), and sort it in anew."""
        offer.load += count
        service = offer.service
        if service.refile(offer):  # It can take a request.
            self.runnable[service] = None
