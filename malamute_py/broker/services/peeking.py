"""Peeking: PEEK_REQUESTS, which describes the requests of a service and changes nothing.

Owns the choice of the requests of a page and what is said of each. The rules: requests come in the
order of their numbers; a page is bounded in requests and bytes, and is put together in later turns;
no body is read. Source: SPEC.md, section 4.5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from malamute_protocol.commands import PeekRequests
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.pages import Pages
from malamute_py.broker.services.registry import Registry
from malamute_py.broker.services.service import RequestBatch, Service
from malamute_py.broker.structures.bitmaps import ones, places_of

FEW: Final = 10_000
"""Batches up to which a queue is put in order for each page."""
ORDER_MS: Final = 1_000
"""Time for which the order of a queue is kept for its next page."""

_Place = tuple[int, RequestBatch | None]
"""(number of a request, its batch); None: a page begins after the number, whatever has it."""


class Peeking:
    """The command PEEK_REQUESTS."""

    def __init__(self, shard: Shard, registry: Registry, pages: Pages) -> None:
        self._shard = shard
        self._registry = registry
        self._pages = pages
        self._order: tuple[str, int, list[int]] = "", 0, []
        """Service that was looked at last, when, and the bases of its batches, ascending: to sort
        a million takes 20 ms."""

    def peek(self, link: Link, command: PeekRequests) -> None:
        """Have PEEK_REQUESTS answered with a page of a service's requests, in later turns.

        Raises BrokerRefused: the link may not manage the service, there is none, or too many
        questions of the link wait (`wait`).
        """
        name = command.service
        if not self._shard.settings.permit(link.owner, "manage_queues", name):
            raise BrokerRefused("forbidden", f"you may not manage service '{name}'")
        if name not in self._registry.by_name:
            raise BrokerRefused("unknown_service", f"there is no service '{name}'")
        begin: _Place = command.after, None
        self._pages.begin(
            link, command, "requests", begin, partial(self._places_after, name), _entry
        )

    def _places_after(self, name: str, place: _Place) -> Iterator[_Place]:
        """Yield the requests of a service after a number; none, if the service is gone since."""
        service = self._registry.by_name.get(name)
        if service is None:
            return
        after, _ = place
        bases = self._bases(service)
        # The batch in which the number `after` lies may have rows after it.
        for at in range(max(0, bisect_right(bases, after) - 1), len(bases)):
            base = bases[at]
            batch = service.batches.get(base)
            if batch is None:  # It has left the queue since `bases` was sorted.
                continue
            rows = batch.alive
            if after >= base:  # Only the rows beyond that number.
                rows &= ~ones(min(after + 1 - base, batch.row.put.count))
            for row in places_of(rows) if rows else ():
                yield base + row, batch

    def _bases(self, service: Service) -> list[int]:
        """Bases of the batches of a service, ascending; new ones may be missing for a while."""
        name, at_ms, bases = self._order
        now_ms = self._shard.now_ms
        if name != service.name or now_ms - at_ms >= ORDER_MS or len(service.batches) < FEW:
            bases = sorted(service.batches)
            self._order = service.name, now_ms, bases
        return bases


def _entry(place: _Place) -> dict[str, Any]:
    """Return what an answer shows of one request: its subject, sender, times, state and holder."""
    number, batch = place
    assert batch is not None
    row = number - batch.base
    put, bit = batch.row.put, 1 << row
    subjects = put.subjects
    ((attempts, _),) = batch.attempts(bit)
    entry: dict[str, Any] = {
        "number": number,
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
