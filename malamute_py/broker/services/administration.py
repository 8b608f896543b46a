"""Administration of services: CANCEL_REQUEST, SERVICE_INFO, EDIT_SERVICE, REQUEUE, REMOVE_SERVICE.

Owns the commands about services that a RESULT answers. The rules: a change is answered when it is
durable; lists are paged; work that may concern a whole queue is done in portions, one a turn.
Source: SPEC.md, section 4.5; docs/design.md (Queues and the checkpoint; Safety).
"""

from __future__ import annotations

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
    RemoveService,
    Requeue,
    ServiceInfo,
)
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.answers import Answer, Answers
from malamute_py.broker.log.bodies import Bodies, Body
from malamute_py.broker.log.pages import Pages
from malamute_py.broker.log.steps import Counting, Steps, Then
from malamute_py.broker.mail.puts import LetterSearch, Puts
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.services.registry import Registry
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.rows import BatchRows, merged
from malamute_py.broker.services.service import (
    DRAFT,
    REMOVING,
    STANDING,
    InFlight,
    RequestBatch,
    Service,
)
from malamute_py.broker.structures.bitmaps import ones
from malamute_py.broker.structures.sorted_values import names_after
from malamute_py.changelog.records import RequestRevived, ServiceRemoved, ServiceSet, mask_of
from malamute_py.changelog.settings import ServiceSettings, queue_settings
from malamute_py.changelog.tables import ServiceRow

PORTION: Final = 256
"""Batches that a removal ends in one turn."""
NUMBERS_MAX: Final = 1_000
"""Numbers that one REQUEUE names at most."""
TOLD_TO: Final = ("request", "work", "manage_queues")
"""Permissions of which each gives the facts of a service."""


class ServiceAdmin:
    """Handlers of the commands about services; some go on in further turns, by portions."""

    def __init__(
        self,
        shard: Shard,
        steps: Steps,
        bodies: Bodies,
        puts: Puts,
        registry: Registry,
        ends: Ends,
        returns: Returns,
        answers: Answers,
        pages: Pages,
    ) -> None:
        self._shard = shard
        self._steps = steps
        self._bodies = bodies
        self._mailboxes = puts.mailboxes
        self._puts = puts
        self._registry = registry
        self._ends = ends
        self._returns = returns
        self._answers = answers
        self._pages = pages

    def handlers(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """Methods that handle commands, by the class of the command, for the broker."""
        return {
            CancelRequest: self._cancel,
            ServiceInfo: self._info,
            EditService: self._edit,
            Requeue: self._requeue,
            RemoveService: self._remove,
        }

    def _permitted(self, link: Link, action: str, name: str) -> bool:
        """Whether a link's owner has a permission (action) for a service of this name."""
        return self._shard.settings.permit(link.owner, action, name)

    def _service(self, link: Link, name: str, *actions: str) -> Service:
        """Return the service that a command names.

        actions: permissions of which the link needs one; a refusal names the first. Raises
        BrokerRefused: it has none, or there is no such service.
        """
        if not any(self._permitted(link, action, name) for action in actions):
            raise BrokerRefused(
                "forbidden", f"you may not {actions[0].partition('_')[0]} service '{name}'"
            )
        service = self._registry.by_name.get(name)
        # A draft that nothing makes is forgotten in the next turn: for others it is not there.
        if service is None or not (
            service.state != DRAFT or service.making or service.reserved_rows
        ):
            raise BrokerRefused("unknown_service", f"there is no service '{name}'")
        return service

    # --- CANCEL_REQUEST -------------------------------------------------------------------------

    def _cancel_again(self, link: Link, command: CancelRequest) -> None:
        """Take a CANCEL_REQUEST up again, of which the batch was on its way into the log."""
        try:
            self._cancel(link, command)
        except BrokerRefused as error:
            self._answers.refuse_with(link, command, error)

    def _cancel(self, link: Link, command: CancelRequest) -> None:
        """Withdraw the requests, or the one row, that a sender's key names, and answer how many.

        The handler of CANCEL_REQUEST. Workers that hold some of them are not told: their answers
        come too late.
        """
        service = self._service(link, command.service, "request")
        key = link.holder, command.key
        if self._steps.under_way(key):
            # By the next turn the log has the batch or has refused it.
            self._registry.next_turn.append(partial(self._cancel_again, link, command))
            return
        batch: RequestBatch | None = None
        # The numbers that the requests got when the REQUEST with this key was taken.
        taken = self._steps.row_of(key) if command.key else None
        if taken is not None:
            batch = service.batches.get(taken.base)
        rows = 0
        if batch is not None:
            rows = batch.alive
            if command.row >= 0:
                # A row beyond the batch becomes the bit after its last row, which is never set.
                rows &= 1 << min(command.row, batch.row.put.count)
        if batch is None or not rows:
            # The requests have ended, or there never were any.
            self._answers.result(link, command, {"count": 0})
            return
        count = rows.bit_count()
        counting = Counting(self._shard.counters, count, ("requests_cancelled",))
        answer = Answer(self._answers, link, command, partial(dict, count=count))
        self._steps.take([self._ends.end(service, [(batch, rows)], "cancelled", counting, answer)])

    # --- SERVICE_INFO ---------------------------------------------------------------------------

    def _info(self, link: Link, command: ServiceInfo) -> None:
        """Answer with the facts of one service, or, for `PREFIX*`, with a page of short facts."""
        name = command.service
        if not name.endswith("*"):
            service = self._service(link, name, *TOLD_TO)
            self._answers.result(link, command, self._facts(service, whole=True))
            return
        self._pages.begin(
            link, command, "entries", command.after,
            partial(names_after, self._registry.names, name[:-1]), partial(self._listed, link),
        )  # fmt: skip

    def _listed(self, link: Link, name: str) -> dict[str, Any] | None:
        """Return what a page of SERVICE_INFO tells a link of a service; None: nothing."""
        if not any(self._permitted(link, action, name) for action in TOLD_TO):
            return None
        return self._facts(self._registry.by_name[name], whole=False)

    def _facts(self, service: Service, *, whole: bool) -> dict[str, Any]:
        """Return a service's facts for an answer, as SPEC.md has their names.

        whole: with its attempts and workers. Sums over offers look at `page_max` of them.
        """
        row = service.row
        page_max = self._shard.settings.page_max
        facts: dict[str, Any] = {
            "name": service.name,
            "waiting": service.rows - service.held - service.delayed,
            "held": service.held,
            "delayed": service.delayed,
            "bytes": service.size,
            "oldest_ms": service.oldest_ms(),
            "offers": len(service.offers),
            # An offer may name any credit: the sum must still be one that can be sent.
            "credit": min(
                sum(max(0, offer.left_records) for offer in islice(service.offers, page_max)),
                1 << 53,
            ),
            **self._mailboxes.letters_in(service.dead_letters, service.default_dead_letters),
            "settings": msgspec.structs.asdict(row.settings),
            "created_ms": row.created_ms,
            "by": row.by,
        }
        if whole:
            facts["attempts"] = self._attempts(service, page_max)
            facts["workers"] = self._workers(service, page_max)
        return facts

    def _attempts(self, service: Service, most: int) -> list[list[int]]:
        """Count requests of the `most` oldest batches by hand-outs: [times, number of requests]."""
        counted: dict[int, int] = {}
        for batch in islice(service.batches.values(), most):
            for times, rows in batch.attempts(batch.row.left):
                counted[times] = counted.get(times, 0) + rows.bit_count()
        return [[times, counted[times]] for times in sorted(counted)]

    def _workers(self, service: Service, most: int) -> list[dict[str, Any]]:
        """Facts of the workers: what each holds, since when, and at which attempt.

        First those with an offer, then holders from before a restart, which have no link. most:
        workers that are named, and leases of each that are looked at.
        """
        workers = [
            self._worker(offer.in_flight, offer.link.number, most)
            for offer in islice(service.offers, most)
        ]
        workers += [
            self._worker(in_flight, 0, most)
            for in_flight in islice(service.orphans.values(), max(0, most - len(workers)))
            if in_flight.leases
        ]
        return workers

    def _worker(self, in_flight: InFlight, link: int, most: int) -> dict[str, Any]:
        """Return the facts of one holder for SERVICE_INFO. most: leases that are looked at.

        link: number of its link; 0: it has none. `received`: requests that it said it has got;
        `since_ms`, `lease_until_ms`: the earliest of all leases; `attempts`: the most of any.
        """
        held = received = attempts = 0
        since_ms = lease_until_ms = 0
        some = (lease for leases in in_flight.leases.values() for lease in leases)
        for lease in islice(some, most):
            held += lease.rows.bit_count()
            since_ms = min(since_ms or lease.at_ms, lease.at_ms)
            lease_until_ms = min(lease_until_ms or lease.due_ms, lease.due_ms)
            attempts = max(attempts, *(times for times, _ in lease.batch.attempts(lease.rows)))
            for hold in lease.batch.row.holds:
                received += (hold.received & lease.rows).bit_count()
        return {
            "holder": in_flight.holder, "link": link, "held": held, "received": received,
            "since_ms": since_ms, "lease_until_ms": lease_until_ms, "attempts": attempts,
        }  # fmt: skip

    # --- EDIT_SERVICE ---------------------------------------------------------------------------

    def _edit(self, link: Link, command: EditService) -> None:
        """Change a service's settings, or create it with them; the answer follows once logged.

        Settings that the command does not name stay, or become the defaults again (`replace`).
        """
        name = command.service
        if not self._permitted(link, "manage_queues", name):
            raise BrokerRefused("forbidden", f"you may not manage service '{name}'")
        self._registry.check_dead_letters(link.owner, command.settings)
        known = name in self._registry.by_name
        service = self._registry.use(name, link.owner, command.settings)
        facts = partial(self._facts, service, whole=True)
        answer = Answer(self._answers, link, command, facts)
        if not known:
            self._registry.make(service, answer)
            return
        # An edit on its way into the log is part of what this one changes.
        before = service.edited or service.row.settings
        limits = self._shard.settings
        settings = queue_settings(
            ServiceSettings, command.settings, limits.settings_bytes_max, before,
            limits.default_of("service", name) if command.replace else None,
        )  # fmt: skip
        if settings.memory != before.memory:
            raise BrokerRefused("bad_setting", "memory cannot be changed: requests lie there")
        row = service.row
        changed = ServiceRow(row.number, row.name, settings, row.by, row.created_ms)
        service.edited = settings
        failed = partial(self._not_edited, service, row, changed)
        editing = Then(partial(self._edited, service, changed), failed)
        if service.state == DRAFT:
            # The change that makes it is still to be encoded, and will have these settings.
            service.row = changed
            self._registry.make(service, editing, answer)
            return
        change = ServiceSet(row.number, row.name, settings, row.by, row.created_ms)
        self._steps.propose(change, editing, answer)

    def _edited(self, service: Service, row: ServiceRow, _: int) -> None:
        """Put settings into force that the log has, for an EDIT_SERVICE."""
        if service.edited is row.settings:  # Else a later edit is on its way, over these.
            service.edited = None
        service.row = row
        service.level = int(Level[row.settings.level.upper()])
        self._registry.made(service)

    def _not_edited(self, service: Service, row: ServiceRow, wanted: ServiceRow, *_: Any) -> None:
        """Go back to the row before, since the log refused the wanted settings."""
        if service.edited is wanted.settings:
            service.edited = None
        if service.row is wanted:  # A draft had them at once.
            service.row = row

    # --- REQUEUE --------------------------------------------------------------------------------

    def _requeue(self, link: Link, command: Requeue) -> None:
        """Let held requests and dead letters wait again; the answer has their number.

        numbers of the command: which; none: all dead letters. The held ones go first; then dead
        letters are looked for portion by portion.
        """
        service = self._service(link, command.service, "manage_queues")
        numbers = command.numbers
        if len(numbers) > NUMBERS_MAX:
            raise BrokerRefused("too_large", f"at most {NUMBERS_MAX} numbers at once")
        if service.state == REMOVING:
            raise BrokerRefused("wait", f"service '{service.name}' is being removed")
        held = self._held(service, set(numbers)) if numbers else []
        count = sum(rows.bit_count() for _, rows in held)
        mailboxes = list(dict.fromkeys((service.dead_letters, service.default_dead_letters)))
        answer = Answer(self._answers, link, command)
        job = _Requeue(service, LetterSearch(mailboxes, numbers), count, answer)
        if not held:
            self._revive(job, lsn=0)
            return
        part = self._returns.returned(service, held, "requeued", again_ms=0)
        part.effects.append(Then(partial(self._revive, job), answer.refuse))
        self._steps.take([part])

    def _held(self, service: Service, numbers: set[int]) -> list[BatchRows]:
        """Return which of these numbers workers hold, also from before a restart: for REQUEUE."""
        in_flight = [offer.in_flight for offer in service.offers] + list(service.orphans.values())
        items: list[BatchRows] = []
        for one in in_flight:
            if not one.bases:
                continue
            for number in numbers:
                leases = one.leases_at(number)
                for lease in leases or ():
                    # A number beyond the batch becomes the bit after its last row, never set.
                    bit = 1 << max(0, min(number - lease.batch.base, lease.batch.row.put.count))
                    if lease.rows & bit:
                        items.append((lease.batch, bit))
        return merged(items)

    def _revive(self, job: _Requeue, lsn: int) -> None:
        """Put the next portion of dead letters back into their queue, or answer when all are.

        lsn: end in the log of what was done before, which is durable before the answer is sent.
        """
        service = job.service
        number = service.number
        if service.state == REMOVING:
            job.answer.refuse("wait", f"service '{service.name}' is being removed")
            return
        found = self._puts.next_letters(
            job.search, lambda rare: rare.request is not None and rare.request.service == number
        )
        if found is None:
            self._requeued(job, lsn)
            return
        mailbox, rows = found
        if not rows:  # None in this portion: later ones may have some.
            self._registry.next_turn.append(partial(self._revive, job, lsn))
            return
        part = self._puts.revive(mailbox, rows, number)
        # A service in memory holds the bodies of its requests itself: see _go_on().
        kept = {
            base: self._bodies.get(base)
            for change in part.changes if isinstance(change, RequestRevived)
            for base, _ in change.rows if service.memory
        }  # fmt: skip
        changes = part.changes
        # Requests on their way keep the service from being removed.
        job.coming = sum(mask.bit_count() for _, mask, _ in rows)
        service.reserved_rows += job.coming
        done = partial(self._go_on, job, kept, changes)
        part.effects.append(Then(done, partial(self._not_revived, job)))
        self._steps.take([part])

    def _not_revived(self, job: _Requeue, *why: Any) -> None:
        """Answer a REQUEUE of which the log has refused a portion; those before it are done."""
        job.service.reserved_rows -= job.coming
        job.answer.refuse(*why)

    def _requeued(self, job: _Requeue, lsn: int) -> None:
        """Answer a REQUEUE once all its portions are in the log; lsn: end of the last one."""
        count, answer = job.count, job.answer
        if not count:
            why = "no such dead letter or request"
            answer.refuse("unknown_request", why)
            return
        self._shard.counters["requests_requeued"] += count
        answer.value = partial(dict, count=count)
        answer.after(lsn)

    def _go_on(
        self, job: _Requeue, kept: dict[int, Body | None], changes: list[Any], lsn: int
    ) -> None:
        """Let the requests of a portion wait that the log has; the next turn does the next portion.

        kept: bodies to hold in memory, by batch, for a service in memory. changes: of the portion.
        lsn: its end in the log.
        """
        for base, body in kept.items():
            # A batch that is in the queue is one owner of its body already.
            if body is not None and base not in job.service.batches:
                self._bodies.hold(base, bytes(body.stamp), body.frame, body.content)
        job.service.reserved_rows -= job.coming
        job.count += self._revived(job.service, changes)
        self._registry.next_turn.append(partial(self._revive, job, lsn))

    def _revived(self, service: Service, changes: list[Any]) -> int:
        """Let requests wait again that the tables have in the queue, and return their number.

        changes: those that put them back. Their batch may have left the queue, and is added again.
        """
        registry = self._registry
        count = 0
        for change in changes:
            if not isinstance(change, RequestRevived):
                continue
            for base, named_rows in change.rows:
                row = self._shard.queues.requests.get(base)
                if row is None:
                    continue
                rows = mask_of(named_rows, ones(row.put.count)) & row.waiting
                batch = service.batches.get(base)
                if batch is None:
                    batch = RequestBatch(service, row)
                    registry.add(service, batch)
                else:
                    batch.row = row
                    service.rows += rows.bit_count()
                    registry.rows += rows.bit_count()
                service.wait(batch, rows, again=True)
                count += rows.bit_count()
        registry.runnable[service] = None
        return count

    # --- REMOVE_SERVICE ---------------------------------------------------------------------------

    def _remove(self, link: Link, command: RemoveService) -> None:
        """Begin to remove a service without offers, with the requests that wait in it.

        Its name has to be repeated in `confirm`. The answer follows when all is durable.
        """
        service = self._service(link, command.service, "manage_queues")
        if command.confirm != service.name:
            raise BrokerRefused("conflict", "confirm repeats the name of the service")
        if service.state == REMOVING:
            raise BrokerRefused("wait", f"service '{service.name}' is being removed")
        if service.offers:
            raise BrokerRefused(
                "in_use", f"service '{service.name}' has {len(service.offers)} offers"
            )
        if service.reserved_rows or service.state == DRAFT:
            raise BrokerRefused("wait", f"requests are on their way to '{service.name}'")
        service.state = REMOVING
        self._remove_some(service, count=0, answer=Answer(self._answers, link, command))

    def _not_removed(self, service: Service, answer: Answer, *why: Any) -> None:
        """Let a service go on with the requests that are left, and refuse the REMOVE_SERVICE."""
        service.state = STANDING
        self._registry.runnable[service] = None
        answer.refuse(*why)

    def _removed_some(self, service: Service, count: int, answer: Answer, _: int) -> None:
        """Go on with the next portion, as the log has this one."""
        # In another turn, since requests in memory end at once: all of them would in this one.
        self._registry.next_turn.append(partial(self._remove_some, service, count, answer))

    def _removed(self, service: Service, count: int, answer: Answer, lsn: int) -> None:
        """Forget a service whose removal is in the log, and answer the REMOVE_SERVICE."""
        self._registry.forget(service)
        self._shard.counters["services_removed"] += 1
        self._shard.event("service_removed", service=service.name, by=answer.link.identity)
        answer.value = partial(dict, count=count)
        answer.after(lsn)

    def _remove_some(self, service: Service, count: int, answer: Answer) -> None:
        """End a portion of the requests of a service, or the service when none is left.

        count: requests that were ended before. Requesters that gave a key get a notice.
        """
        refused = partial(self._not_removed, service, answer)
        # Rows whose return is on its way into the log have to wait for that.
        items = [
            (batch, batch.alive & ~batch.moving)
            for batch in islice(service.batches.values(), PORTION)
            if batch.alive & ~batch.moving
        ]
        if items:
            count += sum(rows.bit_count() for _, rows in items)
            removing = Then(partial(self._removed_some, service, count, answer), refused)
            self._steps.take(
                [self._ends.end(service, items, "removed", removing, notice="removed")]
            )
        elif service.batches:
            refused("wait", "some of its requests are on their way", 0)
        else:
            change = ServiceRemoved(service.number, self._shard.now_ms)
            removing = Then(partial(self._removed, service, count, answer), refused)
            self._steps.propose(change, removing)


class _Requeue(msgspec.Struct):
    """One REQUEUE that is being done."""

    service: Service
    search: LetterSearch
    count: int
    """Requests that wait again, or are about to."""
    answer: Answer
    coming: int = 0
    """Requests of the portion that is on its way into the log."""
