"""Peeking: PEEK_REQUESTS, which describes the requests of a service and changes nothing.

Owns the choice of the requests of a page and what is said of each. The rules: requests come in the
order of their numbers; a page is bounded in requests and bytes; no body is read. Source: SPEC.md,
section 4.5.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from typing import Any, Final

from malamute_protocol.commands import PeekRequests
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.pages import Entries
from malamute_py.broker.services.registry import Registry
from malamute_py.broker.services.service import RequestBatch, Service
from malamute_py.broker.structures.bitmaps import ones, places_of

FEW: Final = 10_000
"""Batches up to which a queue is put in order for each page."""
ORDER_MS: Final = 1_000
"""Time for which the order of a queue is kept for its next page."""


class Peeking:
    """The command PEEK_REQUESTS."""

    def __init__(self, shard: Shard, registry: Registry, answers: Answers) -> None:
        self._shard = shard
        self._registry = registry
        self._answers = answers
        self._order: tuple[str, int, list[int]] = "", 0, []
        """Service that was looked at last, when, and the bases of its batches, ascending: to sort
        a million takes 20 ms."""

    def peek(self, link: Link, command: PeekRequests) -> None:
        """Answer PEEK_REQUESTS with a page of a service's requests.

        Raises BrokerRefused: the link may not manage the service, or there is none.
        """
        name = command.service
        if not self._shard.settings.permit(link.owner, "manage_queues", name):
            raise BrokerRefused("forbidden", f"you may not manage service '{name}'")
        service = self._registry.by_name.get(name)
        if service is None:
            raise BrokerRefused("unknown_service", f"there is no service '{name}'")
        requests, more = self._page(service, command)
        self._answers.result(link, command, {"requests": requests, "more": more})

    def _page(self, service: Service, command: PeekRequests) -> tuple[list[dict[str, Any]], bool]:
        """Return the entries of requests after the number `after`, and whether more follow."""
        after = command.after
        page: Entries[dict[str, Any]] = Entries(command.limit, self._shard.settings.page_max)
        bases = self._bases(service)
        # The batch in which the number `after` lies may have rows after it.
        for base in islice(bases, max(0, bisect_right(bases, after) - 1), None):
            batch = service.batches.get(base)
            if batch is None:  # It has left the queue since `bases` was sorted.
                continue
            rows = batch.alive
            if after >= base:  # Only the rows beyond that number.
                rows &= ~ones(min(after + 1 - base, batch.row.put.count))
            for row in places_of(rows) if rows else ():
                if not page.add(_entry(batch, row)):
                    return page.found, True
        return page.found, False

    def _bases(self, service: Service) -> list[int]:
        """Bases of the batches of a service, ascending; new ones may be missing for a while."""
        name, at_ms, bases = self._order
        now_ms = self._shard.now_ms
        if name != service.name or now_ms - at_ms >= ORDER_MS or len(service.batches) < FEW:
            bases = sorted(service.batches)
            self._order = service.name, now_ms, bases
        return bases


def _entry(batch: RequestBatch, row: int) -> dict[str, Any]:
    """Return what an answer shows of one request: its subject, sender, times, state and holder."""
    put, bit = batch.row.put, 1 << row
    subjects = put.subjects
    ((attempts, _),) = batch.attempts(bit)
    entry: dict[str, Any] = {
        "number": batch.base + row,
        "subject": subjects[row if len(subjects) > 1 else 0] if subjects else "",
        "sender": put.sender,
        "at_ms": put.at_ms,
        "deadline_ms": batch.deadline_ms,
        "priority": put.priority,
        "attempts": attempts,
        "state": "delayed" if batch.delayed & bit else "waiting",
        "not_before_ms": 0,
        "holder": "",
        "link": 0,
        "since_ms": 0,
        "lease_until_ms": 0,
    }
    if batch.delayed & bit:
        times = (at_ms for at_ms, rows in batch.row.delayed.items() if rows & bit)
        entry["not_before_ms"] = next(times, 0)
    for lease in batch.leases:
        if lease.rows & bit:
            offer = lease.in_flight.offer
            entry.update(
                state="held", holder=lease.in_flight.holder,
                link=0 if offer is None else offer.link.number, since_ms=lease.at_ms,
                lease_until_ms=lease.due_ms,
            )  # fmt: skip
            break
    return entry
