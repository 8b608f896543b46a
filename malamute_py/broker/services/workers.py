"""Offers: the workers of services, their credit, and what they say of what they have in hand.

Owns OFFER and its end, the hand-out of what waits, WORK, ACK_WORK and REPLY. The rules: a request
goes to an offer only within its credit and once the log says so; only who has a request in hand may
speak of it, and of several at once all or none; a holder that comes back after a restart of the
broker goes on where it was; whatever a link had in hand when it ended waits again at once. Source:
docs/design.md (Flow control; Queues and the checkpoint); SPEC.md, section 4.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec

from malamute_protocol.commands import AckWork, Ended, Reply, Subscribed, WorkState
from malamute_protocol.commands import Offer as OfferCommand
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError, BrokerRefused
from malamute_protocol.limits import TIME_MAX
from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import Link, Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.steps import Counting, Effect, Part, Steps, Then
from malamute_py.broker.mail.mailboxes import Mailboxes
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.services.hand_outs import HandOuts
from malamute_py.broker.services.queue import Grant, Hands, LeftBehind, Offer, Put, Service
from malamute_py.broker.services.registry import Registry
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.rows import Rows, named
from malamute_py.broker.structures.bitmaps import every, rows_in
from malamute_py.changelog.records import RequestPut, Run, WorkReceived
from malamute_py.changelog.tables import RELEASED, WITHDRAWN

REASON_MAX: Final = 1_000
"""Characters of a worker's reason that are kept."""
NAMED_MAX: Final = 8
"""Requests that a refusal names."""


class Offers:
    """The workers."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        mailboxes: Mailboxes,
        registry: Registry,
        ends: Ends,
        returns: Returns,
        hand_outs: HandOuts,
        answers: Answers,
    ) -> None:
        self._shard = shard
        self._links = links
        self._steps = steps
        self._mailboxes = mailboxes
        self._registry = registry
        self._ends = ends
        self._returns = returns
        self._hand_outs = hand_outs
        self._answers = answers
        self.count = 0
        self.pattern_bytes = 0

    # --- OFFER --------------------------------------------------------------------------------

    def offer(self, link: Link, command: OfferCommand) -> None:
        """A worker is there for the requests that match."""
        try:
            offer = self._prepare_offer(link, command)
        except BrokerRefused as error:
            self._answers.refuse(link, command, error.code, error.reason, error.retry_ms)
            return
        if offer.service.known:
            self._stands(offer, 0)
        else:
            made = Then(partial(self._stands, offer), partial(self._not_made, offer, command))
            self._registry.make(offer.service, made)

    def _stands(self, offer: Offer, _: int) -> None:
        if offer.ended:
            return
        begun = offer.begun = self._steps.mail_next
        self._links.say(
            offer.link, Subscribed(offer.number, b"", self._shard.epoch, begun, begun, begun)
        )
        self.resume(offer)

    def _not_made(self, offer: Offer, command: OfferCommand, *why: Any) -> None:
        if not offer.ended:
            self._drop(offer)
            self._answers.refuse(offer.link, command, *why)

    def _prepare_offer(self, link: Link, command: OfferCommand) -> Offer:
        settings = self._shard.settings
        self._links.check_number(link, command.subscription)
        if self.count >= settings.offers_max:
            raise BrokerRefused("limit", f"at most {settings.offers_max} offers in all")
        if not settings.permit(link.owner, "work", command.service):
            raise BrokerRefused("forbidden", f"you may not work for '{command.service}'")
        size = len(msgspec.msgpack.encode(command.pattern))
        if size > settings.pattern_bytes_max:
            raise BrokerRefused(
                "too_large", f"a pattern of {size} bytes, at most {settings.pattern_bytes_max}"
            )
        if self.pattern_bytes + size > settings.all_patterns_bytes_max:
            raise BrokerRefused(
                "limit", f"patterns of at most {settings.all_patterns_bytes_max} bytes in all"
            )
        quotas = self._shard.quotas
        quotas.check(link.owner, "offers")
        quotas.check(link.owner, "pattern_bytes", size)
        service = self._registry.use(command.service, link.owner, command.settings or None)
        offer = Offer(self, link, command, service)
        try:
            service.join(offer)
        except BrokerRefused:
            self._registry.unused(service)
            raise
        offer.pattern_bytes = size
        offer.lease_ms = self._lease(service, command.lease_ms)
        self.pattern_bytes += size
        self.count += 1
        quotas.add(link.owner, "offers")
        quotas.add(link.owner, "pattern_bytes", size)
        link.receivers[offer.number] = offer
        return offer

    def _lease(self, service: Service, asked_ms: int) -> int:
        settings = self._shard.settings
        lease_ms = asked_ms or service.row.settings.lease_ms or settings.lease_ms
        return max(settings.lease_min_ms, min(lease_ms, settings.lease_max_ms))

    def resume(self, offer: Offer) -> None:
        """Let a worker have its turn: what it may be given changed."""
        if offer.service.known and offer.service.refile(offer):
            self._registry.hungry[offer.service] = None

    # --- ends ---------------------------------------------------------------------------------

    def end(self, offer: Offer, code: str) -> None:
        """End an offer: what its worker has in hand waits again."""
        self._drop(offer)
        self._links.say(offer.link, Ended(offer.number, offer.begun, code))
        self._back(offer, WITHDRAWN, 0)
        self._leave_orphans(offer, WITHDRAWN)

    def link_ended(self, link: Link, offers: list[Offer]) -> None:
        """What a link had in hand waits again."""
        if link.happened == "draining":
            # The broker is about to stop: a worker that comes back later goes on with what it has.
            for offer in offers:
                self._drop(offer)
            return
        why = "fenced" if link.happened == "fenced" else "died"
        lost: dict[Service, int] = {}
        for offer in offers:
            count = offer.hands.rows
            service = offer.service
            self._drop(offer)
            service.leave_behind(offer.hands)
            count += self._leave_orphans(offer, why)
            self._back(offer, why, 0)
            if count:
                lost[service] = lost.get(service, 0) + count
        for service, count in lost.items():
            self._shard.counters["workers_died"] += 1
            self._shard.event(
                "worker_died", "warning", service=service.name, holder=link.holder,
                link=link.number, happened=link.happened, count=count,
            )  # fmt: skip

    def _drop(self, offer: Offer) -> None:
        if offer.ended:
            return
        offer.leave()
        offer.service.leave(offer)
        offer.hands.leave()
        self.count -= 1
        self.pattern_bytes -= offer.pattern_bytes
        self._shard.quotas.add(offer.link.owner, "offers", -1)
        self._shard.quotas.add(offer.link.owner, "pattern_bytes", -offer.pattern_bytes)
        self._registry.unused(offer.service)

    def _back(self, offer: Offer, why: str, again_ms: int | None) -> None:
        """What an offer that has ended had in hand waits again."""
        self._returns.give_up_later(offer.hands, why, again_ms)

    def _leave_orphans(self, offer: Offer, why: str) -> int:
        """What a holder had before a restart waits again once no offer of it is left."""
        service, holder = offer.service, offer.hands.holder
        hands = service.orphans.get(holder)
        if hands is None or any(other.hands.holder == holder for other in service.offers):
            return 0
        del service.orphans[holder]
        count = hands.rows
        if why != WITHDRAWN:
            service.leave_behind(hands)
        self._returns.give_up_later(hands, why, 0)
        return count

    # --- whose it is ----------------------------------------------------------------------------

    def _mine(self, link: Link, number: int) -> Offer:
        offer = link.receivers.get(number)
        if not isinstance(offer, Offer):
            raise BrokerRefused("unknown_subscription", f"no offer {number}")
        return offer

    def _find(
        self, offer: Offer, number: int, left: LeftBehind | None = None
    ) -> tuple[Put | None, int]:
        """The batch that a number lies in, and the rows of it that the holder may speak of.

        left: what it may end, too, although it has it in hand no more.
        """
        put, held = self._in_hand(offer, number)
        if left is not None:
            base, rows = left.of(number)
            behind = offer.service.puts.get(base) if rows else None
            if behind is not None and number < base + behind.row.put.count:
                put = behind
                free = put.left_behind | self._hand_outs.coming_to(offer.hands.holder, put)
                held |= rows & free
        return put, held

    def _in_hand(self, offer: Offer, number: int) -> tuple[Put | None, int]:
        """The batch that a number lies in, and the rows of it that the holder has in hand."""
        hands, holder = offer.hands, offer.hands.holder
        put = _put_of(hands, number)
        if put is None:
            orphans = offer.service.orphans.get(holder)
            put = None if orphans is None else _put_of(orphans, number)
            if put is None:
                return None, 0
        held = 0
        for grant in put.grants:
            of = grant.hands
            # What it had before a restart of the broker it may go on with.
            if of is hands or (of.offer is None and not of.ended and of.holder == holder):
                held |= grant.rows
        return put, held

    def _claim(
        self, offer: Offer, ranges: Iterable[tuple[int, int]], left: LeftBehind | None = None
    ) -> list[Rows]:
        """The rows that ranges of numbers name. Raises BrokerRefused unless all are in hand."""
        claimed: dict[Put, int] = {}
        for first, end in ranges:
            number = first
            while number < end:
                put, held = self._find(offer, number, left)
                if put is None:
                    raise BrokerRefused("not_held", _named([number]))
                last = min(end, put.base + put.row.put.count)
                wanted = every(last - number) << (number - put.base)
                absent = wanted & ~held
                if absent:
                    numbers = [put.base + row for row in islice(rows_in(absent), NAMED_MAX + 1)]
                    raise BrokerRefused("not_held", _named(numbers))
                claimed[put] = claimed.get(put, 0) | wanted
                number = last
        return list(claimed.items())

    def _claim_each(
        self, offer: Offer, numbers: list[int], left: LeftBehind | None = None
    ) -> tuple[list[Rows], list[Run], bool]:
        """The rows that single numbers name: (rows, runs in order, whether one comes twice).

        Raises BrokerRefused unless all are in hand.
        """
        first, count = numbers[0], len(numbers)
        put, held = self._find(offer, first, left)
        if put is not None and (
            count == 1
            or (numbers[-1] - first == count - 1 and numbers == list(range(first, first + count)))
        ):
            row = first - put.base
            wanted = every(count) << row
            if row + count <= put.row.put.count and not wanted & ~held:
                return [(put, wanted)], [(put.row.put.key, row, count)], False
        claimed: dict[Put, int] = {}
        runs: list[Run] = []
        missing: list[int] = []
        twice = False
        for number in numbers:
            if put is None or not 0 <= number - put.base < put.row.put.count:
                put, held = self._find(offer, number, left)
            row = 0 if put is None else number - put.base
            bit = 1 << row
            if put is None or not held & bit:
                missing.append(number)
                continue
            before = claimed.get(put, 0)
            twice = twice or bool(before & bit)
            claimed[put] = before | bit
            key = put.row.put.key
            if runs and runs[-1][0] is key and runs[-1][1] + runs[-1][2] == row:
                runs[-1] = key, runs[-1][1], runs[-1][2] + 1
            else:
                runs.append((key, row, 1))
        if missing:
            raise BrokerRefused("not_held", _named(missing))
        return list(claimed.items()), runs, twice

    def _ending(self, offer: Offer, claim: Callable[..., Any], named: Any) -> Any:
        """What `claim` finds of these numbers; also what a lost link of the holder left behind.

        Raises BrokerRefused `not_held`.
        """
        try:
            return claim(offer, named)
        except BrokerRefused:
            left = offer.service.left_behind.get(offer.hands.holder)
            if left is None:
                raise
            found = claim(offer, named, left)
        self._shard.counters["requests_ended_late"] += 1
        return found

    # --- REPLY --------------------------------------------------------------------------------

    def prepare_reply(self, link: Link, command: Reply, frame: Any, together: bool = False) -> Part:
        """Replies to requests in hand. Raises BrokerRefused: nothing was done.

        together: as a part of a step with others, which is logged whatever the mailbox is.
        """
        offer = self._mine(link, command.subscription)
        service = offer.service
        try:
            content = self._shard.content(frame)
            content.check(self._shard.settings.limits)
        except BatchError as error:
            raise BrokerRefused(error.code, error.reason) from error
        numbers = command.requests
        if len(numbers) != content.head.count:
            raise BrokerRefused(
                "bad_batch", f"{content.head.count} replies to {len(numbers)} requests"
            )
        try:
            items, runs, twice = self._ending(offer, self._claim_each, numbers)
        except BrokerRefused:
            self._too_late(offer, numbers)
            raise
        offer.late = False
        if command.last and twice:
            raise BrokerRefused("bad_batch", "two last replies to one request")
        asked = items[0][0].row.put
        reply_to = asked.reply_to
        if any(put.row.put.reply_to != reply_to for put, _ in items):
            raise BrokerRefused("bad_batch", "the requests have more than one reply_to")
        mail = self._mail(link, asked, content, frame, runs, command.last)
        count = content.head.count
        if not command.last:
            return self._stream(service, items, mail, count, together)
        mails = () if mail is None else (mail,)
        done = self._counting(count, "replies_in", "requests_completed")
        return self._ends.end(service, items, "completed", done, mails=mails)

    def _counting(self, count: int, *names: str) -> Effect:
        return Counting(self._shard.counters, count, names)

    def _too_late(self, offer: Offer, numbers: list[int]) -> None:
        """Replies to what has expired, went to another or was cancelled: said once in a row."""
        self._shard.counters["replies_late"] += len(numbers)
        if not offer.late:
            offer.late = True
            self._shard.event(
                "reply_late", "warning", service=offer.service.name, holder=offer.hands.holder,
                link=offer.link.number, number=numbers[0], count=len(numbers),
            )  # fmt: skip

    def _mail(
        self, link: Link, asked: RequestPut, content: Content, frame: Any, runs: list[Run],
        last: bool,
    ) -> Part | None:  # fmt: skip
        """The put of replies; None when their mailbox is gone."""
        try:
            return self._mailboxes.put(
                asked.reply_to, sender=link.holder, content=content, frame=frame,
                about=runs if any(run[0] for run in runs) else (), last=last,
                asked_by=asked.sender,
            )  # fmt: skip
        except BrokerRefused as error:
            if error.code != "unknown_mailbox":
                raise
            self._ends.undeliverable(asked.reply_to, content.head.count)
            return None

    def _stream(
        self, service: Service, items: list[Rows], mail: Part | None, count: int, together: bool
    ) -> Part:
        """Replies that are not the last: the requests stay in hand, and their leases begin anew."""
        if mail is None:
            mail = Part(level=service.level, memory=not together)
        elif mail.memory and together:
            mail = self._mailboxes.later(mail)
        mail.effects += [self._counting(count, "replies_in"), Then(partial(self._renew, items))]
        return mail

    # --- ACK_WORK -----------------------------------------------------------------------------

    def prepare_ack(self, link: Link, command: AckWork, frame: Any = None) -> Part:
        """What a worker says of requests in hand. Raises BrokerRefused: nothing was done."""
        offer = self._mine(link, command.subscription)
        service = offer.service
        state = command.state
        if state in (WorkState.COMPLETED, WorkState.FAILED):
            items = self._ending(offer, self._claim, command.ranges)
        else:
            items = self._claim(offer, command.ranges)
        if not items:
            raise BrokerRefused("malformed", "an ACK_WORK of nothing")
        reason = command.reason[:REASON_MAX]
        if state == WorkState.RECEIVED:
            change = WorkReceived(service.number, named(items))
            return self._registry.part(service, [change], Then(partial(self._renew, items)))
        if state == WorkState.RENEWED:
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
        if state == WorkState.RELEASED:
            return self._returns.returned(service, items, RELEASED, 0)
        raise BrokerRefused("unsupported", f"no state {state} of work")

    def _renew(self, items: list[Rows], _: int) -> None:
        """The leases of rows in hand begin anew; in the wheel they move when it comes to them."""
        now_ms = self._shard.now_ms
        for put, rows in items:
            for grant in list(put.grants):
                hit = grant.rows & rows
                if not hit:
                    continue
                if hit != grant.rows:
                    # The others' lease goes on as it was.
                    rest = Grant(
                        put, grant.rows ^ hit, grant.hands, grant.at_ms, grant.lease_ms,
                        grant.hand_out,
                    )  # fmt: skip
                    rest.due_ms = grant.due_ms
                    grant.hands.add(rest)
                    rest.slot = self._registry.wheel.add(rest.due_ms, rest)
                    grant.rows = hit
                grant.due_ms = now_ms + grant.lease_ms


def _put_of(hands: Hands, number: int) -> Put | None:
    """The batch in a worker's hands that a number lies in."""
    grants = hands.of(number)
    if grants is None:
        return None
    put = grants[0].put
    return put if number < put.base + put.row.put.count else None


def _named(numbers: list[int]) -> str:
    named = ", ".join(map(str, numbers[:NAMED_MAX]))
    more = " and more" if len(numbers) > NAMED_MAX else ""
    return f"not in this worker's hands (any more): {named}{more}"
