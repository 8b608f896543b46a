"""WORK: how requests are sent to the worker that holds them.

Owns the order in which an offer's requests leave. The rules: requests leave in the order in which
they were handed out, also while the bodies of some are read back from the journal; credit that was
taken for a request which is not sent is returned. Source: SPEC.md, section 4.5.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from malamute_protocol.commands import Work
from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.bodies import Bodies, Body
from malamute_py.broker.log.steps import Steps
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.services.registry import RETRY_MS
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.service import Lease, Offer, PendingWork, RequestBatch
from malamute_py.broker.structures.bitmaps import ones
from malamute_py.changelog.records import WITHDRAWN

OFFER: Final = 51
"""Number of the command OFFER, by which a refusal names it."""


class WorkDelivery:
    """Requests on their way to the workers that hold them, up to the outboxes of their links."""

    def __init__(
        self, shard: Shard, links: Links, steps: Steps, bodies: Bodies, ends: Ends,
        returns: Returns,
    ) -> None:  # fmt: skip
        self._shard = shard
        self._links = links
        self._steps = steps
        self._bodies = bodies
        self._ends = ends
        self._returns = returns

    def deliver(self, offer: Offer, lease: Lease, cost: int) -> None:
        """Send the rows of a new lease, or have their bodies read back first.

        Called once the log has the hand-out. Rows wait, too, while earlier work of the same offer
        does. cost: bytes of credit that were taken for them.
        """
        batch, rows = lease.batch, lease.rows
        body = self._bodies.get(batch.base)
        if body is not None and not offer.pending:
            try:
                self._work(offer, batch, rows, body, cost)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                self._links.fail(offer.link, "WORK", error, OFFER, offer.number)
            return
        work = PendingWork(batch, rows, cost, lease.hand_out)
        offer.pending.append(work)
        found = partial(self._found, offer, work)
        self._bodies.want(
            batch.base, batch.row.put.size,
            self._links.contained(offer.link, "WORK", found, OFFER, offer.number),
        )  # fmt: skip

    def _found(self, offer: Offer, work: PendingWork, body: Body | None) -> None:
        """Note the body of pending work, and send the work at the front that has been answered.

        The answer of a read that deliver() asked for. body: None: it cannot be read.
        """
        work.body = body
        work.failed = self._bodies.failed
        work.answered = True
        pending = offer.pending
        while pending and pending[0].answered:
            self._send_pending(offer, pending.popleft())

    def _send_pending(self, offer: Offer, work: PendingWork) -> None:
        """Send the rows of pending work that its worker still holds, and return others' credit.

        Its body was read, or could not be: while that took, rows may have left the worker.
        """
        if offer.ended:
            return
        batch, rows = work.batch, 0
        deadline_ms = batch.deadline_ms
        over = deadline_ms and deadline_ms <= self._shard.now_ms  # Deadlines ends the requests.
        for lease in offer.in_flight.leases.get(batch.base, ()):
            # Rows that came back and were handed out anew wait in later work. The number of
            # attempts does not tell: a request that was released is at the same attempt again.
            if lease.hand_out == work.hand_out:
                rows |= lease.rows
                lease.unreadable = bool(work.failed)
        gone = (work.rows & ~rows).bit_count()
        if rows and work.body is not None and not over:
            self._work(offer, batch, rows, work.body, work.cost)
        else:  # Nothing is sent at all.
            gone = work.rows.bit_count()
            offer.left_bytes += work.cost
            if rows and not over:
                self._unreadable(batch, rows, work.failed)
        if gone:
            # Nothing was sent for these, so their credit is returned.
            offer.left_records += gone
            offer.owner.resume(offer)

    def _unreadable(self, batch: RequestBatch, rows: int, failed: str) -> None:
        """Let requests wait again whose bodies could not be read; end those whose bodies are lost.

        failed: reason why the read failed; empty: the bodies are lost. Nothing was sent, so a read
        that failed is no attempt. Where the log refuses that, Deadlines tries it again: it knows
        the rows by Lease.unreadable.
        """
        if not failed:
            self._lost(batch, rows)
            return
        service = batch.service
        self._shard.counters["request_reads_failed"] += 1
        self._shard.event(
            "request_read_failed", "error", service=service.name, number=batch.base, reason=failed
        )
        self._returns.give_back(service, [(batch, rows)], WITHDRAWN, again_ms=RETRY_MS)

    def _lost(self, batch: RequestBatch, rows: int) -> None:
        """End requests whose bodies are lost, and tell their requesters: no worker can do them."""
        service = batch.service
        count = rows.bit_count()
        self._shard.counters["requests_lost"] += count
        self._shard.event(
            "request_lost", "error", service=service.name, number=batch.base, count=count
        )
        part = self._ends.end(service, [(batch, rows)], "removed", notice="lost")
        self._steps.take([part])

    def _work(self, offer: Offer, batch: RequestBatch, rows: int, body: Body, cost: int) -> None:
        """Put rows of a batch into the outbox of an offer's link, a WORK for each attempt count.

        cost: bytes of credit that were taken for them. What they really took is known here: the
        rest is given back.
        """
        change = batch.row.put
        settings = self._shard.settings
        link = offer.link
        whole = ones(change.count)
        spent = 0
        # Requests that came back go first.
        for times, some in sorted(batch.attempts(rows), reverse=True):
            bitmap: bytes | None = None
            frames, size = body.frames, body.size
            if some != whole:
                frames, mapped, size = body.rows(
                    some, settings.extract_bytes_min, settings.extract_share
                )
                if mapped:  # The frames have other rows, too: a bitmap tells which are meant.
                    bitmap = some.to_bytes((change.count + 7) // 8, "little")
            self._links.say(
                link,
                Work(
                    offer.number, change.sender, change.reply_to, batch.deadline_ms, times,
                    offer.lease_ms, len(frames), bitmap, change.key,
                ),
            )  # fmt: skip
            if not link.open:
                # The link ended in this turn. Frames that no command owns would break its last
                # message.
                return
            link.frames += frames
            spent += size
        link.room -= spent
        link.delivered_bytes += spent
        offer.left_bytes += cost - spent
        self._shard.counters["work_bytes_out"] += spent
        if link.room < link.ask_below:
            self._links.ask_if_little_room(link)
        if offer.bucket < 0:  # It is not filed as ready; the credit that came back may change it.
            offer.owner.resume(offer)
