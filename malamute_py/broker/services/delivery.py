"""WORK: how requests get to the worker that has them in hand.

Owns the order in which an offer's requests leave. The rules: requests leave in the order in which
they were handed out, also while the bodies of some are read back; credit that was taken for what
is not sent is the worker's again. Source: SPEC.md, section 4.5.
"""

from __future__ import annotations

from typing import Final

from malamute_protocol.commands import Work
from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.bodies import Bodies, Body
from malamute_py.broker.log.steps import Steps
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.services.queue import Lease, Offer, PendingWork, RequestBatch
from malamute_py.broker.services.rows import attempts_of
from malamute_py.broker.structures.bitmaps import ones

OFFER: Final = 51


class WorkDelivery:
    """What workers have in hand, on its way to them."""

    def __init__(
        self, shard: Shard, links: Links, steps: Steps, bodies: Bodies, ends: Ends
    ) -> None:
        self._shard = shard
        self._links = links
        self._steps = steps
        self._bodies = bodies
        self._ends = ends

    def deliver(self, offer: Offer, lease: Lease, cost: int) -> None:
        """Send what an offer has in hand from now on, in the order in which it was handed out."""
        batch, rows = lease.batch, lease.rows
        body = self._bodies.get(batch.base)
        coming = offer.coming
        if body is not None and not coming:
            try:
                self._work(offer, batch, rows, body, cost)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                self._links.fail(offer.link, "WORK", error, OFFER, offer.number)
            return
        work = PendingWork(batch, rows, cost, lease.hand_out)
        coming.append(work)

        def found(body: Body | None) -> None:
            work.body = body
            work.answered = True
            while coming and coming[0].answered:
                self._arrived(offer, coming.popleft())

        self._bodies.want(
            batch.base, batch.row.put.size,
            self._links.contained(offer.link, "WORK", found, OFFER, offer.number),
        )  # fmt: skip

    def _arrived(self, offer: Offer, work: PendingWork) -> None:
        """The bodies of requests in hand were read back."""
        if offer.ended:
            return
        batch, rows = work.batch, 0
        for lease in offer.in_flight.leases.get(batch.base, ()):
            # What came back and was handed out anew is in a later parcel. Attempts do not tell: of
            # what was released, or given back with an offer, both hand-outs are the same attempt.
            if lease.hand_out == work.hand_out:
                rows |= lease.rows
        gone = (work.rows & ~rows).bit_count()
        if rows and work.body is not None:
            self._work(offer, batch, rows, work.body, work.cost)
        else:
            gone = work.rows.bit_count()
            offer.left_bytes += work.cost
            if rows:
                self._lost(batch, rows)
        if gone:
            # Nothing was sent for them, so the credit is the worker's again.
            offer.left_records += gone
            offer.owner.resume(offer)

    def _lost(self, batch: RequestBatch, rows: int) -> None:
        """The bodies of requests cannot be had: they end, and their requesters are told."""
        service = batch.service
        count = rows.bit_count()
        self._shard.counters["requests_lost"] += count
        self._shard.event(
            "request_lost", "error", service=service.name, number=batch.base, count=count
        )
        part = self._ends.end(service, [(batch, rows)], "removed", notice="lost")
        self._steps.take([part])

    def _work(self, offer: Offer, batch: RequestBatch, rows: int, body: Body, cost: int) -> None:
        change = batch.row.put
        settings = self._shard.settings
        link = offer.link
        whole = ones(change.count)
        spent = 0
        # What came back goes first.
        for times, some in sorted(attempts_of(batch, rows), reverse=True):
            bitmap: bytes | None = None
            frames, size = body.frames, body.size
            if some != whole:
                frames, mapped, size = body.rows(
                    some, settings.extract_bytes_min, settings.extract_share
                )
                if mapped:
                    bitmap = some.to_bytes((change.count + 7) // 8, "little")
            self._links.say(
                link,
                Work(
                    offer.number, change.sender, change.reply_to, change.deadline_ms, times,
                    offer.lease_ms, len(frames), bitmap, change.key,
                ),
            )  # fmt: skip
            if not link.open:
                # It ended in this step: frames that no command owns would break its last message.
                return
            link.frames += frames
            spent += size
        link.room -= spent
        link.delivered_bytes += spent
        offer.left_bytes += cost - spent
        self._shard.counters["work_bytes_out"] += spent
        if link.room < link.half:
            self._links.spent(link)
        if offer.bucket < 0:
            offer.owner.resume(offer)
