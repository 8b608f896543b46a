"""REPLY and ACK_WORK: answers to requests, and what else becomes of them.

Owns how a reply and the end of the request that it answers become one step. The rule: a command
that is refused has changed nothing. Claims finds the requests that a worker names: `items` are
their batches with the rows, `runs` name them to the requester. Source: SPEC.md, section 4.5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, Final

import numpy as np

from malamute_protocol.columns import Array
from malamute_protocol.commands import AckWork, Reply, WorkState
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError, BrokerRefused
from malamute_protocol.extract import copy_rows, extractable
from malamute_protocol.limits import TIME_MAX
from malamute_protocol.stamp import STAMP_BYTES
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
OWNERS_MAX: Final = 64
"""Owners of requests that one REPLY answers, at most: its rows are divided among them."""


class Replies:
    """Makes the parts of steps that replies and acknowledgements of workers become."""

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
        reply_to = first_batch.row.put.reply_to
        if any(batch.row.put.reply_to != reply_to for batch, _ in items):
            raise BrokerRefused("bad_batch", "the requests have more than one reply_to")
        mails = self._mails(link, command, content, frame, items, runs)
        count = content.head.count
        if not command.last:
            return self._further_part(service, items, mails, count, together)
        done = self._counting(count, "replies_in", "requests_completed")
        return self._ends.end(service, items, "completed", done, mails=mails)

    def _mails(
        self, link: Link, command: Reply, content: Content, frame: Any, items: list[BatchRows],
        runs: list[Run],
    ) -> list[Part]:  # fmt: skip
        """Return parts that put replies into their mailbox, one for each owner of requests.

        A part counts on the quota of one requester; none: the mailbox has gone, which is reported.
        items, runs: the requests. Raises BrokerRefused, as for a full mailbox.
        """
        first_batch, _ = items[0]
        asked = first_batch.row.put
        owner_of = self._shard.quotas.owner_of
        owners = (
            1 if len(items) == 1 else len({owner_of(batch.row.put.sender) for batch, _ in items})
        )
        if owners == 1:
            mail = self._mail(link, asked, content, frame, runs, command.last)
            return [] if mail is None else [mail]
        most = OWNERS_MAX if extractable(content) else 1
        if owners > most:
            # Clients send a batch that is `too_large` again in parts.
            raise BrokerRefused(
                "too_large",
                f"replies to {owners} requesters in one batch, at most {most} in one like this",
            )
        copies = [
            (copy_rows(content, rows, expiries=True), some, about)
            for rows, some, about in _by_owner(command.requests, items, owner_of)
        ]
        size = sum(STAMP_BYTES + len(copy) for copy, _, _ in copies)
        try:
            self._puts.check_room(asked.reply_to, content.head.count, size)
        except BrokerRefused as error:
            raise self._shown(error, asked, link) from None
        parts: list[Part] = []
        beside: dict[str, int] = {}
        for copy, some, about in copies:
            mail = self._mail(link, some, Content(copy), copy, about, command.last, beside)
            if mail is not None:
                parts.append(mail)
        return parts

    def _mail(
        self, link: Link, asked: RequestPut, content: Content, frame: Any, runs: list[Run],
        last: bool, beside: dict[str, int] | None = None,
    ) -> Part | None:  # fmt: skip
        """Return a part that puts replies into their mailbox; None: it has gone, which is reported.

        asked: what the log has of the requests, which names the mailbox. runs: which requests the
        replies answer. last: no further reply follows. beside: bytes by namespace of the other
        parts of the REPLY; None: it has no others. Raises BrokerRefused, as for a full mailbox.
        """
        try:
            mail = self._puts.put(
                asked.reply_to, sender=link.holder, content=content, frame=frame,
                # Requests without a key cannot be named to their sender.
                about=runs if any(key for key, _, _ in runs) else (), last=last,
                asked_by=asked.sender,
            )  # fmt: skip
            if beside is not None:
                self._puts.check_beside(mail, beside)
        except BrokerRefused as error:
            if error.code != "unknown_mailbox":
                raise self._shown(error, asked, link) from None
            self._ends.report_undeliverable(asked.reply_to, content.head.count)
            return None
        return mail

    def _shown(self, error: BrokerRefused, asked: RequestPut, link: Link) -> BrokerRefused:
        """Return a refusal by the requester's mailbox or quota as the worker may see it.

        A worker of another namespace is not told the facts of the requester's mailbox.
        """
        quotas = self._shard.quotas
        owner, reason = quotas.owner_of(asked.sender), "the requester's mailbox is full"
        return quotas.shown(error, owner, link.owner, reason)

    def _further_part(
        self,
        service: Service,
        items: list[BatchRows],
        mails: list[Part],
        count: int,
        together: bool,
    ) -> Part:
        """Return a part with replies that others follow; it renews the leases of their requests.

        mails: the parts that put the replies; none: their mailbox has gone, and the worker goes on.
        together: as prepare_reply() has it.
        """
        if together:
            mails = [self._puts.deferred(mail) if mail.memory else mail for mail in mails]
        if mails:
            part, *part.also = mails
        else:
            part = Part(level=service.level, memory=not together)
        part.effects += [self._counting(count, "replies_in"), Then(partial(self._renew, items))]
        return part

    def _too_late(self, offer: Offer, numbers: list[int]) -> None:
        """Count replies to requests that the worker does not hold; report the first in a row.

        Another worker may have done the same work: operators may want a longer lease.
        """
        self._shard.counters["replies_late"] += len(numbers)
        if not offer.late:
            offer.late = True
            self._shard.event(
                "reply_late", "warning", service=offer.service.name, holder=offer.in_flight.holder,
                link=offer.link.number, number=numbers[0], count=len(numbers),
            )  # fmt: skip

    def prepare_ack(self, link: Link, command: AckWork, frame: Any = None) -> Part:
        """Return the part of a step that an ACK_WORK becomes: what a worker says of its requests.

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
        """Renew the leases of rows: each begins again now, as the worker gave a sign of its work.

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


def _by_owner(
    numbers: list[int], items: list[BatchRows], owner_of: Callable[[str], str]
) -> Iterator[tuple[Array, RequestPut, list[Run]]]:
    """Yield (rows as a mask, one put, runs) for each owner of requests that a REPLY answers.

    numbers: of the requests, one a row. items: the requests by batch. put: one that the owner's
    requests came by. runs: as Claims.numbers() has them.
    """
    batches = sorted((batch for batch, _ in items), key=attrgetter("base"))
    bases = [batch.base for batch in batches]
    found: dict[str, tuple[Array, RequestPut, list[Run]]] = {}
    for place, number in enumerate(numbers):
        batch = batches[bisect_right(bases, number) - 1]
        put = batch.row.put
        owner = owner_of(put.sender)
        if owner not in found:
            found[owner] = np.zeros(len(numbers), np.bool_), put, []
        rows, _, runs = found[owner]
        rows[place] = True
        row = number - batch.base
        key, begin, length = runs[-1] if runs else (None, 0, 0)
        # `is`: of the same batch, as in Claims.numbers().
        if key is put.key and begin + length == row:
            runs[-1] = put.key, begin, length + 1
        else:
            runs.append((put.key, row, 1))
    yield from found.values()
