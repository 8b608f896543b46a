"""Services: what the rest of the core knows of service queues, and their administration.

Owns the commands that a RESULT answers: cancel, facts, settings, putting back, removal. The rules:
what changes something is answered when it is durable; what is listed is paged; work that may
concern all that lies in a queue is done in portions, one a step. The requests themselves are
requests.py's, the workers offers.py's, the order of hand-out waiting.py's. Source: SPEC.md, section
4.5; docs/design.md (Queues and the checkpoint; Safety).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec

from malamute_protocol.commands import (
    CancelRequest,
    Command,
    EditService,
    Level,
    Offer,
    RemoveService,
    Requeue,
    ServiceInfo,
)
from malamute_protocol.errors import RequestRejected
from malamute_py.broker.answers import Answers
from malamute_py.broker.bodies import Bodies
from malamute_py.broker.links import Link, Links
from malamute_py.broker.mailboxes import Mailboxes
from malamute_py.broker.offers import Offers
from malamute_py.broker.requests import (
    Requests,
    Rows,
    attempts_of,
    dead_letters,
    default_dead_letters,
    merged,
)
from malamute_py.broker.shard import Shard
from malamute_py.broker.steps import Part, Steps
from malamute_py.broker.waiting import Hands, Put, Service, every
from malamute_py.changelog.records import RequestRevived, ServiceRemoved, ServiceSet
from malamute_py.changelog.settings import ServiceSettings, queue_settings
from malamute_py.changelog.tables import ServiceRow, mask_of

PORTION: Final = 256
"""Batches that one step of a removal ends."""
NUMBERS_MAX: Final = 1_000
"""Numbers that one REQUEUE names."""


class Services:
    """The service queues of one core."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        bodies: Bodies,
        mailboxes: Mailboxes,
        answers: Answers,
    ) -> None:
        self._shard = shard
        self._steps = steps
        self._bodies = bodies
        self._mailboxes = mailboxes
        self._answers = answers
        self._requests = Requests(shard, links, steps, bodies, mailboxes)
        self._offers = offers = Offers(
            shard, links, steps, bodies, mailboxes, self._requests, answers
        )
        self._cancels: Final[list[tuple[Link, CancelRequest]]] = []
        """Cancellations of batches that are on their way into the log themselves."""
        self._portions: Final[deque[Callable[[], None]]] = deque()
        """What goes on in the next step: a removal, a putting back."""
        self.queues: Final = (self._cancels, self._portions, *self._requests.queues)
        """While all of them are empty, nothing can be done at once."""
        self.prepare_request = self._requests.prepare
        self.request_again = self._requests.again
        self.prepare_reply = offers.prepare_reply
        self.prepare_ack = offers.prepare_ack
        self.recovered = self._requests.recovered
        self.tick = self._requests.tick

    def handlers(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """The commands that are no steps."""
        return {
            Offer: self._offers.offer,
            CancelRequest: partial(self._answer, self._cancel),
            ServiceInfo: partial(self._answer, self._info),
            EditService: partial(self._answer, self._edit),
            Requeue: partial(self._answer, self._requeue),
            RemoveService: partial(self._answer, self._remove),
        }

    @property
    def due_ms(self) -> int | None:
        """When the next timer is due."""
        return self._requests.due_ms

    @property
    def hungry(self) -> bool:
        """Whether more can be done at once."""
        return bool(self._cancels or self._portions) or self._offers.hungry

    def hand_out(self) -> None:
        """Hand out what waits to who is ready."""
        if self._cancels:
            cancels = self._cancels.copy()
            self._cancels.clear()
            for link, command in cancels:
                self._answer(self._cancel, link, command)
        for _ in range(len(self._portions)):
            self._portions.popleft()()
        self._offers.hand_out()

    @property
    def gauges(self) -> dict[str, int]:
        """How much there is."""
        requests = self._requests
        return {
            "services": len(requests.by_name),
            "requests": requests.rows,
            "request_bytes": requests.size,
            "offers": self._offers.count,
        }

    # --- answering ------------------------------------------------------------------------------

    def _answer(self, handle: Callable[[Link, Any], None], link: Link, command: Any) -> None:
        try:
            handle(link, command)
        except RequestRejected as error:
            self._answers.refuse(link, command, error.code, error.reason, error.retry_ms)

    def _permitted(self, link: Link, action: str, name: str) -> bool:
        return self._shard.settings.permit(link.owner, action, name)

    def _service(self, link: Link, name: str, *actions: str) -> Service:
        """A service that may be touched. Raises RequestRejected."""
        if not any(self._permitted(link, action, name) for action in actions):
            raise RequestRejected("forbidden", f"you may not {actions[0]} service '{name}'")
        service = self._requests.by_name.get(name)
        if service is None or not (
            service.known or service.under_way or service.making or service.reserved_rows
        ):
            raise RequestRejected("unknown_service", f"there is no service '{name}'")
        return service

    # --- CANCEL_REQUEST -------------------------------------------------------------------------

    def _cancel(self, link: Link, command: CancelRequest) -> None:
        service = self._service(link, command.service, "request")
        key = link.holder, command.key
        if self._steps.under_way(key):
            # It will be there in the next step, or will have been refused.
            self._cancels.append((link, command))
            return
        put: Put | None = None
        taken = self._steps.taken(key) if command.key else None
        if taken is not None:
            put = service.puts.get(taken.base)
        rows = 0
        if put is not None:
            rows = put.alive
            if command.row >= 0:
                rows &= 1 << min(command.row, put.row.put.count)
        if put is None or not rows:
            # It has ended, or never came to be: nothing is left to be given up.
            self._answers.result(link, command, {"count": 0})
            return
        count = rows.bit_count()
        answer = self._answers.when_durable(link, command, lambda: {"count": count})

        def cancelled(lsn: int) -> None:
            self._shard.counters["requests_cancelled"] += count
            answer(lsn)

        self._steps.take(
            [
                self._requests.end(
                    service, [(put, rows)], "cancelled", then=cancelled,
                    failed=partial(self._answers.refuse, link, command),
                )
            ]
        )  # fmt: skip

    # --- SERVICE_INFO ---------------------------------------------------------------------------

    def _info(self, link: Link, command: ServiceInfo) -> None:
        name = command.service
        if not name.endswith("*"):
            service = self._service(link, name, "request", "work", "admin")
            self._answers.result(link, command, self._facts(service, whole=True))
            return
        prefix = name[:-1]
        requests = self._requests
        names = requests.names
        at = max(bisect_left(names, prefix), bisect_right(names, command.after))
        limit = max(1, min(command.limit, self._shard.settings.page_max))
        page: list[dict[str, Any]] = []
        more = False
        for one in islice(names, at, None):
            if not one.startswith(prefix):
                break
            if len(page) == limit:
                more = True
                break
            if any(self._permitted(link, action, one) for action in ("request", "work", "admin")):
                page.append(self._facts(requests.by_name[one], whole=False))
        self._answers.result(link, command, {"entries": page, "more": more})

    def _facts(self, service: Service, *, whole: bool) -> dict[str, Any]:
        row = service.row
        page_max = self._shard.settings.page_max
        oldest = next(iter(service.puts.values()), None)
        letters = self._mailboxes.get(dead_letters(service))
        facts: dict[str, Any] = {
            "name": service.name,
            "waiting": service.rows - service.held - service.delayed,
            "held": service.held,
            "delayed": service.delayed,
            "bytes": service.size,
            "oldest_ms": 0 if oldest is None else oldest.row.put.at_ms,
            "offers": len(service.offers),
            # An offer may name any number: the sum must still be one that can be sent.
            "credit": min(
                sum(max(0, offer.left_records) for offer in islice(service.offers, page_max)),
                1 << 53,
            ),
            "dead": 0 if letters is None else letters.messages,
            "dead_letters": dead_letters(service),
            "settings": msgspec.structs.asdict(row.settings),
            "created_ms": row.created_ms,
            "by": row.by,
        }
        if whole:
            facts["attempts"] = self._attempts(service, page_max)
            facts["workers"] = self._workers(service, page_max)
        return facts

    def _attempts(self, service: Service, most: int) -> list[list[int]]:
        """How often -> requests that were handed out so often, of the oldest batches."""
        counted: dict[int, int] = {}
        for put in islice(service.puts.values(), most):
            for times, rows in attempts_of(put, put.row.left):
                counted[times] = counted.get(times, 0) + rows.bit_count()
        return [[times, counted[times]] for times in sorted(counted)]

    def _workers(self, service: Service, most: int) -> list[dict[str, Any]]:
        """Return the workers with what each has in hand, since when and how often."""
        workers = [
            self._worker(offer.hands, offer.link.number, most)
            for offer in islice(service.offers, most)
        ]
        workers += [
            self._worker(hands, 0, most)
            for hands in islice(service.orphans.values(), max(0, most - len(workers)))
            if hands.grants
        ]
        return workers

    def _worker(self, hands: Hands, link: int, most: int) -> dict[str, Any]:
        held = received = attempts = 0
        since_ms = lease_until_ms = 0
        some = (grant for grants in hands.grants.values() for grant in grants)
        for grant in islice(some, most):
            held += grant.rows.bit_count()
            since_ms = min(since_ms or grant.at_ms, grant.at_ms)
            lease_until_ms = min(lease_until_ms or grant.due_ms, grant.due_ms)
            attempts = max(attempts, *(times for times, _ in attempts_of(grant.put, grant.rows)))
            for hold in grant.put.row.holds:
                received += (hold.received & grant.rows).bit_count()
        return {
            "holder": hands.holder, "link": link, "held": held, "received": received,
            "since_ms": since_ms, "lease_until_ms": lease_until_ms, "attempts": attempts,
        }  # fmt: skip

    # --- EDIT_SERVICE ---------------------------------------------------------------------------

    def _edit(self, link: Link, command: EditService) -> None:
        name = command.service
        if not self._permitted(link, "admin", name):
            raise RequestRejected("forbidden", f"you may not admin service '{name}'")
        known = name in self._requests.by_name
        service = self._requests.use(name, link.owner, command.settings)
        answer = self._answers.when_durable(link, command, lambda: self._facts(service, whole=True))
        refused = partial(self._answers.refuse, link, command)
        if not known:
            self._requests.make(service, answer, refused)
            return
        before = service.coming or service.row.settings
        settings = queue_settings(
            ServiceSettings, command.settings, self._shard.settings.settings_bytes_max, before
        )
        if settings.memory != before.memory:
            raise RequestRejected("bad_setting", "memory cannot be changed: requests lie there")
        row = service.row
        changed = ServiceRow(row.number, row.name, settings, row.by, row.created_ms)
        if not service.known:
            # It is being made: whatever makes it does so with these settings.
            service.row = changed

        def arrived() -> None:
            if service.coming is settings:
                service.coming = None

        def edited(lsn: int) -> None:
            arrived()
            service.row = changed
            service.level = int(Level[settings.level.upper()])
            self._requests.made(service)
            answer(lsn)

        def not_taken(code: str, reason: str, retry_ms: int) -> None:
            arrived()
            if service.row is changed:
                service.row = row
            refused(code, reason, retry_ms)

        service.coming = settings
        change = ServiceSet(row.number, row.name, settings, row.by, row.created_ms)
        self._steps.take([Part([change], appended=edited, refused=not_taken)])

    # --- REQUEUE --------------------------------------------------------------------------------

    def _requeue(self, link: Link, command: Requeue) -> None:
        service = self._service(link, command.service, "admin")
        numbers = command.numbers
        if len(numbers) > NUMBERS_MAX:
            raise RequestRejected("too_large", f"at most {NUMBERS_MAX} numbers at once")
        held = self._held(service, set(numbers)) if numbers else []
        count = sum(rows.bit_count() for _, rows in held)

        def done(total: int, lsn: int) -> None:
            if not total:
                self._answers.refuse(
                    link, command, "unknown_request", "no such dead letter or request"
                )
                return
            self._shard.counters["requests_requeued"] += total
            self._answers.when_durable(link, command, lambda: {"count": total})(lsn)

        places = list(dict.fromkeys((dead_letters(service), default_dead_letters(service))))

        def revive(lsn: int) -> None:
            self._revive(service, places, numbers, count, lsn, done, link, command)

        if not held:
            revive(0)
            return
        part = self._requests.returned(service, held, "requeued", 0)
        before_appended, before_refused = part.appended, part.refused

        def appended(lsn: int) -> None:
            if before_appended is not None:
                before_appended(lsn)
            revive(lsn)

        def refused(code: str, reason: str, retry_ms: int) -> None:
            if before_refused is not None:
                before_refused(code, reason, retry_ms)
            self._answers.refuse(link, command, code, reason, retry_ms)

        part.appended, part.refused = appended, refused
        self._steps.take([part])

    def _held(self, service: Service, numbers: set[int]) -> list[Rows]:
        """Return the requests among these numbers that a worker has in hand."""
        hands = [offer.hands for offer in service.offers] + list(service.orphans.values())
        items: list[Rows] = []
        for one in hands:
            if not one.bases:
                continue
            for number in numbers:
                grants = one.of(number)
                for grant in grants or ():
                    bit = 1 << max(0, min(number - grant.put.base, grant.put.row.put.count))
                    if grant.rows & bit:
                        items.append((grant.put, bit))
        return merged(items)

    def _revive(
        self, service: Service, places: list[str], numbers: list[int], count: int, lsn: int,
        done: Callable[[int, int], None], link: Link, command: Requeue,
    ) -> None:  # fmt: skip
        """Put dead letters back into their queue, a portion a step."""
        while places:
            part = self._mailboxes.revive(places[0], service=service.number, numbers=numbers)
            if part is not None:
                break
            places = places[1:]
        else:
            done(count, lsn)
            return
        before, changes = part.appended, part.changes
        kept = {
            base: self._bodies.get(base)
            for change in changes if isinstance(change, RequestRevived)
            for base, _ in change.rows if service.memory
        }  # fmt: skip

        def revived(end_lsn: int) -> None:
            if before is not None:
                before(end_lsn)
            for base, body in kept.items():
                if body is not None:
                    self._bodies.hold(base, bytes(body.stamp), body.frame, body.content)
            total = count + self._revived(service, changes)
            # What was named is done in one step: all of it was looked at.
            rest = places[1:] if numbers else places
            self._portions.append(
                partial(
                    self._revive, service, rest, numbers, total, end_lsn, done, link, command
                )
            )  # fmt: skip

        def refused(code: str, reason: str, retry_ms: int) -> None:
            self._answers.refuse(link, command, code, reason, retry_ms)

        part.appended = revived
        undo = part.refused

        def not_taken(code: str, reason: str, retry_ms: int) -> None:
            if undo is not None:
                undo(code, reason, retry_ms)
            refused(code, reason, retry_ms)

        part.refused = not_taken
        self._steps.take([part])

    def _revived(self, service: Service, changes: list[Any]) -> int:
        """Rows wait in their queue again, as the tables say; returns how many."""
        requests = self._requests
        count = 0
        for change in changes:
            if not isinstance(change, RequestRevived):
                continue
            for base, some in change.rows:
                row = self._shard.queues.requests.get(base)
                if row is None:
                    continue
                rows = mask_of(some, every(row.put.count)) & row.waiting
                put = service.puts.get(base)
                if put is None:
                    put = Put(service, row)
                    requests.add(service, put)
                else:
                    put.row = row
                    service.rows += rows.bit_count()
                    requests.rows += rows.bit_count()
                service.wait(put, rows, again=True)
                count += rows.bit_count()
        requests.hungry[service] = None
        return count

    # --- REMOVE_SERVICE ---------------------------------------------------------------------------

    def _remove(self, link: Link, command: RemoveService) -> None:
        service = self._service(link, command.service, "admin")
        if command.confirm != service.name:
            raise RequestRejected("conflict", "confirm repeats the name of the service")
        if service.removing:
            raise RequestRejected("wait", f"service '{service.name}' is being removed")
        if service.offers:
            raise RequestRejected(
                "in_use", f"service '{service.name}' has {len(service.offers)} offers"
            )
        if service.reserved_rows or not service.known:
            raise RequestRejected("wait", f"requests are on their way to '{service.name}'")
        service.removing = True
        self._remove_some(service, 0, link, command)

    def _remove_some(
        self, service: Service, count: int, link: Link, command: RemoveService
    ) -> None:
        """End a portion of what lies in a service; then the service."""

        def refused(code: str, reason: str, retry_ms: int) -> None:
            service.removing = False
            self._requests.hungry[service] = None
            self._answers.refuse(link, command, code, reason, retry_ms)

        items = [
            (put, put.alive & ~put.moving)
            for put in islice(service.puts.values(), PORTION)
            if put.alive & ~put.moving
        ]
        if items:
            some = sum(rows.bit_count() for _, rows in items)

            def ended(lsn: int) -> None:
                # In a step of its own: what is in memory ends at once.
                self._portions.append(
                    partial(self._remove_some, service, count + some, link, command)
                )

            self._steps.take(
                [
                    self._requests.end(
                        service, items, "removed", notice="removed", then=ended, failed=refused
                    )
                ]
            )
            return
        if service.puts:
            refused("wait", "some of its requests are on their way", 0)
            return
        answer = self._answers.when_durable(link, command, lambda: {"count": count})

        def removed(lsn: int) -> None:
            self._requests.forget(service)
            self._shard.counters["services_removed"] += 1
            self._shard.event("service_removed", service=service.name, by=link.identity)
            answer(lsn)

        change = ServiceRemoved(service.number, self._shard.now_ms)
        self._steps.take([Part([change], appended=removed, refused=refused)])
