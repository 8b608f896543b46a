"""REPLY and ACK_WORK: answers to requests, and what else becomes of them.

Owns how a reply and the end of the request that it answers become one step. The rule: a command
that is refused has changed nothing. Claims finds the requests that a worker names: `items` are
their batches with the rows, `runs` name them to the requester. Source: SPEC.md, section 4.5.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from malamute_protocol.commands import AckWork, Reply, WorkState
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError, BrokerRefused
from malamute_protocol.limits import TIME_MAX
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.steps import Counting, Effect, Part, Then
from malamute_py.broker.mail.puts import Puts
from malamute_py.broker.services.claims import Claims
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.services.registry import Registry
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.rows import BatchRows, named
from malamute_py.broker.services.service import Lease, Offer, Service
from malamute_py.changelog.records import RELEASED, RequestPut, Run, WorkReceived

REASON_MAX: Final = 1_000
"""Characters of a worker's reason that are kept."""


class Replies:
    """Takes replies and acknowledgements of workers."""

    def __init__(
        self,
        shard: Shard,
        puts: Puts,
        registry: Registry,
        ends: Ends,
        returns: Returns,
        claims: Claims,
    ) -> None:
        self._shard = shard
        self._puts = puts
        self._registry = registry
        self._ends = ends
        self._returns = returns
        self._claims = claims

    def prepare_reply(self, link: Link, command: Reply, frame: Any, together: bool = False) -> Part:
        """Return a part of a step with replies to requests that the worker holds.

        The content has a reply for each number of the command. With `last` the requests end;
        otherwise further replies follow. together: it is one of several parts of an ATOMIC, and
        logged whether or not the mailbox is in memory. Raises BrokerRefused: nothing was done.
        """
        offer = self._mine(link, command.subscription)
        service = offer.service
        try:
            content = self._shard.content(frame)
        except BatchError as error:
            raise BrokerRefused(error.code, error.reason) from error
        numbers = command.requests
        if len(numbers) != content.head.count:
            raise BrokerRefused(
                "bad_batch", f"{content.head.count} replies to {len(numbers)} requests"
            )
        try:
            items, runs, twice = self._claims.ending(offer, self._claims.numbers, numbers)
        except BrokerRefused:
            self._too_late(offer, numbers)
            raise
        offer.late = False
        if command.last and twice:
            raise BrokerRefused("bad_batch", "two last replies to one request")
        first_batch, _ = items[0]
        asked = first_batch.row.put
        reply_to = asked.reply_to
        if any(batch.row.put.reply_to != reply_to for batch, _ in items):
            raise BrokerRefused("bad_batch", "the requests have more than one reply_to")
        mail = self._mail(link, asked, content, frame, runs, command.last)
        count = content.head.count
        if not command.last:
            return self._further_part(service, items, mail, count, together)
        mails = () if mail is None else (mail,)
        done = self._counting(count, "replies_in", "requests_completed")
        return self._ends.end(service, items, "completed", done, mails=mails)

    def _mail(
        self, link: Link, asked: RequestPut, content: Content, frame: Any, runs: list[Run],
        last: bool,
    ) -> Part | None:  # fmt: skip
        """Return a part that puts replies into their mailbox; None: it has gone, which is reported.

        asked: what the log has of the requests, which names the mailbox. runs: which requests the
        replies answer. last: no further reply follows. Raises BrokerRefused, as for a full mailbox.
        """
        try:
            return self._puts.put(
                asked.reply_to, sender=link.holder, content=content, frame=frame,
                # Requests without a key cannot be named to their sender.
                about=runs if any(key for key, _, _ in runs) else (), last=last,
                asked_by=asked.sender,
            )  # fmt: skip
        except BrokerRefused as error:
            if error.code != "unknown_mailbox":
                # A worker of another namespace is not told the facts of the requester's mailbox.
                quotas = self._shard.quotas
                owner, reason = quotas.owner_of(asked.sender), "the requester's mailbox is full"
                raise quotas.shown(error, owner, link.owner, reason) from None
            self._ends.report_undeliverable(asked.reply_to, content.head.count)
            return None

    def _further_part(
        self,
        service: Service,
        items: list[BatchRows],
        mail: Part | None,
        count: int,
        together: bool,
    ) -> Part:
        """Return a part with replies that others follow; it renews the leases of their requests.

        mail: the part that puts the replies; None: their mailbox has gone, and the worker goes on.
        together: as prepare_reply() has it.
        """
        if mail is None:
            mail = Part(level=service.level, memory=not together)
        elif mail.memory and together:
            mail = self._puts.deferred(mail)
        mail.effects += [self._counting(count, "replies_in"), Then(partial(self._renew, items))]
        return mail

    def _too_late(self, offer: Offer, numbers: list[int]) -> None:
        """Count replies to requests that the worker does not hold; report the first in a row."""
        self._shard.counters["replies_late"] += len(numbers)
        if not offer.late:
            offer.late = True
            self._shard.event(
                "reply_late", "warning", service=offer.service.name, holder=offer.in_flight.holder,
                link=offer.link.number, number=numbers[0], count=len(numbers),
            )  # fmt: skip

    def prepare_ack(self, link: Link, command: AckWork, frame: Any = None) -> Part:
        """Return a part of a step with what a worker says of requests that it holds.

        `state` of the command says what. Raises BrokerRefused: nothing was done.
        """
        offer = self._mine(link, command.subscription)
        service = offer.service
        state = command.state
        if state in (WorkState.COMPLETED, WorkState.FAILED):
            # A worker may end a request also after the link by which it held the request was lost.
            items = self._claims.ending(offer, self._claims.ranges, command.ranges)
        else:
            items = self._claims.ranges(offer, command.ranges)
        if not items:
            raise BrokerRefused("malformed", "an ACK_WORK of nothing")
        reason = command.reason[:REASON_MAX]
        if state == WorkState.RECEIVED:
            # The log has it, so that after a restart these requests count as tried by the worker.
            change = WorkReceived(service.number, named(items))
            return self._registry.part(service, [change], Then(partial(self._renew, items)))
        if state == WorkState.RENEWED:
            # Leases are times of this run of the broker: the log has none.
            renewing = Then(partial(self._renew, items))
            return Part(effects=[renewing], level=service.level, memory=True)
        if state == WorkState.COMPLETED:
            done = self._counting(sum(rows.bit_count() for _, rows in items), "requests_completed")
            return self._ends.end(service, items, "completed", done, notice="completed")
        if state == WorkState.FAILED:
            return self._ends.bury(service, items, f"failed: {reason}" if reason else "failed")
        if state == WorkState.RETURNED:
            return self._returns.returned(
                service, items, "returned", max(0, min(command.again_ms, TIME_MAX)), reason
            )
        if state == WorkState.RELEASED:  # The worker stops: that was no attempt.
            return self._returns.returned(service, items, RELEASED, again_ms=0)
        raise BrokerRefused("unsupported", f"no state {state} of work")

    def _renew(self, items: list[BatchRows], _: int) -> None:
        """Renew the leases of rows: each begins again now.

        Timers are not moved: Deadlines.tick() finds the later time and sets them anew.
        """
        now_ms = self._shard.now_ms
        for batch, rows in items:
            for lease in list(batch.leases):
                renewed = lease.rows & rows
                if not renewed:
                    continue
                if renewed != lease.rows:
                    # The other rows get a lease of their own, which ends when this one would have.
                    rest = Lease(
                        batch, lease.rows ^ renewed, lease.in_flight, lease.at_ms, lease.lease_ms,
                        lease.hand_out,
                    )  # fmt: skip
                    rest.due_ms = lease.due_ms
                    lease.in_flight.add(rest)
                    rest.slot = self._registry.timers.add(rest.due_ms, rest)
                    lease.rows = renewed
                lease.due_ms = now_ms + lease.lease_ms

    def _mine(self, link: Link, number: int) -> Offer:
        """Return the offer that a link has under a number. Raises BrokerRefused: it has none."""
        offer = link.receivers.get(number)
        if not isinstance(offer, Offer):
            raise BrokerRefused("unknown_subscription", f"no offer {number}")
        return offer

    def _counting(self, count: int, *names: str) -> Effect:
        """Return an effect that adds `count` to counters when its part is in the log."""
        return Counting(self._shard.counters, count, names)
