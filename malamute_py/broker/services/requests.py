"""The life of a request: from REQUEST to its end, and every change that the log has of it.

Owns the service queues, what of them is on its way into the log, and the timers of leases, back-off
and deadlines. The rules: a request that was accepted ends once, as completed, dead, cancelled,
expired or removed, or is still there; no command ends or hands out a row whose end is on its
way; what the log refused is as it was, or tried again; a requester that named its request is told
when no answer will come. Rows of a batch go together, as bitmaps. Source: docs/design.md, Queues
and the checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias

from malamute_protocol.address import NAME_BYTES_MAX, name_fault
from malamute_protocol.commands import Request
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError, BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import Link, Links
from malamute_py.broker.log.bodies import Bodies
from malamute_py.broker.log.steps import (
    NO_TABLES,
    Effect,
    Part,
    Steps,
    Then,
    changing,
    content_size,
)
from malamute_py.broker.mail.puts import Puts
from malamute_py.broker.services.queue import Back, Grant, Hands, Offer, Put, Service
from malamute_py.broker.structures.bitmaps import every, runs_of
from malamute_py.broker.structures.timer_wheel import Wheel
from malamute_py.changelog.records import (
    Change,
    RequestDone,
    RequestPut,
    Run,
    ServiceSet,
    WorkReturned,
    WorkTaken,
)
from malamute_py.changelog.settings import ServiceSettings, queue_settings
from malamute_py.changelog.tables import (
    RELEASED,
    WITHDRAWN,
    ServiceRow,
    apply,
    rows_of,
)

SLOW_SUBJECTS_MAX: Final = 8
"""Subjects of a batch that are compared with expressions before it is taken."""
REQUESTING_MAX: Final = 1_000
"""Services of a link that need no look-up at a REQUEST."""
TIME_MAX_MS: Final = 1 << 53
"""The longest time that a client can name: SPEC.md, section 11."""
RETRY_MS: Final = 1_000
"""After which what a timer decided and the log refused is decided again."""
_NO_ATTEMPT: Final = frozenset({"requeued", RELEASED, WITHDRAWN})
"""Why rows come back whose attempts are not over with this return."""
DEAD: Final = ".dead"
"""Added to a service's name: its dead-letter mailbox, unless another was named."""

Rows: TypeAlias = tuple[Put, int]
"""Rows of one batch, as a bitmap."""
Share: TypeAlias = tuple[Offer, Put, int, int]
"""Rows of one batch that an offer gets, and the bytes of credit that were taken for them."""
Released: TypeAlias = list[tuple[Grant, int]]
"""What was taken out of whose hands, so that it can be put back."""


class Requests:
    """All service queues, and what happens to what lies in them."""

    def __init__(
        self, shard: Shard, links: Links, steps: Steps, bodies: Bodies, puts: Puts
    ) -> None:
        self._shard = shard
        self._links = links
        self._steps = steps
        self._bodies = bodies
        self._mailboxes = puts.mailboxes
        self._puts = puts
        self.by_name: dict[str, Service] = {}
        self.names: list[str] = []
        """Ascending."""
        self._leaving: Final[deque[tuple[deque[Grant], str, int | None]]] = deque()
        """What ended links had in hand, to be returned in portions: see `give_up_later`."""
        self.drafts: Final[list[Service]] = []
        """Made since the last step."""
        self.size = 0
        """Bytes of all batches of requests, those on their way included."""
        self.rows = 0
        self.wheel: Wheel[Grant | Put | Back] = Wheel()
        self.hungry: Final[dict[Service, None]] = {}
        """Services in which something may be handed out at once."""
        self.queues: Final = (self.drafts, self._leaving, self.hungry)
        """While all of them are empty, nothing can be done at once."""
        self._handing: Final[list[Sequence[Share]]] = []
        """Hand-outs on their way into the log."""
        self._unsettled: dict[Put, None] = {}
        """Puts whose next action must be computed again in this turn."""
        self._settle_at_ms = 0
        self.paused_to_ms = 0
        """Nothing is handed out before: the log has refused a hand-out."""
        self._found: list[Grant] = []
        """In hand when the broker began; their leases begin when the time is known."""
        self._hand_outs = 0
        """Hand-outs since the broker began."""
        self.deliver: Callable[[Offer, Grant, int], None] = _nobody
        """Sends rows to the worker that has them in hand from now on."""

    # --- the services -----------------------------------------------------------------------

    def use(self, name: str, by: str, settings: dict[str, Any] | None = None) -> Service:
        """The service of a name, made if need be. Raises BrokerRefused."""
        found = self.by_name.get(name)
        if found is not None:
            if found.removing:
                raise BrokerRefused("wait", f"service '{name}' is being removed")
            return found
        fault = name_fault(name)
        if fault:
            raise BrokerRefused("bad_name", fault)
        limits = self._shard.settings
        if settings is None and not limits.auto_create:
            raise BrokerRefused("unknown_service", f"there is no service '{name}'")
        if len(self.by_name) >= limits.services_max:
            raise BrokerRefused("limit", f"at most {limits.services_max} services")
        self._shard.quotas.check(by, "services")
        made = queue_settings(
            ServiceSettings,
            {**limits.default_service, **(settings or {})},
            limits.settings_bytes_max,
            None,
        )
        number = self._mailboxes.number()
        service = Service(ServiceRow(number, name, made, by, self._shard.now_ms))
        self._enter(service)
        self.drafts.append(service)
        return service

    def forget_drafts(self) -> None:
        """Services whose first use came to nothing are not there."""
        drafts = self.drafts.copy()
        self.drafts.clear()
        for service in drafts:
            self.unused(service)

    def _enter(self, service: Service) -> None:
        self.by_name[service.name] = service
        insort(self.names, service.name)
        self._shard.quotas.add(service.row.by, "services")

    def forget(self, service: Service) -> None:
        """A service is gone, or never came to be."""
        if self.by_name.get(service.name) is service:
            del self.by_name[service.name]
            del self.names[bisect_left(self.names, service.name)]
            self._shard.quotas.add(service.row.by, "services", -1)
        service.removing = True
        service.end()
        self.hungry.pop(service, None)

    def creation(self, service: Service) -> Change:
        """The change that makes a service."""
        row = service.row
        return ServiceSet(row.number, row.name, row.settings, row.by, row.created_ms)

    def made(self, service: Service) -> None:
        """The log has a service."""
        self.hungry[service] = None
        if not service.known:
            service.known = True
            self._shard.counters["services_created"] += 1
            self._shard.event("service_created", service=service.name, by=service.row.by)

    def unused(self, service: Service) -> None:
        """Forget a service whose making was refused, if no other command makes it."""
        if not (
            service.known
            or service.under_way
            or service.making
            or service.offers
            or service.reserved_rows
            or service.puts
        ):
            self.forget(service)

    def make(self, service: Service, *effects: Effect) -> None:
        """Put the change that makes a service on its way.

        A batch of requests that goes before it makes the service too: with the same change.
        """
        service.making += 1
        making = Then(partial(self._was_made, service), partial(self._was_not_made, service))
        self._steps.propose(self.creation(service), making, *effects)

    def _was_made(self, service: Service, _: int) -> None:
        service.making -= 1
        self.made(service)

    def _was_not_made(self, service: Service, *_: Any) -> None:
        service.making -= 1
        self.unused(service)

    # --- REQUEST ----------------------------------------------------------------------------

    def prepare(self, link: Link, command: Request, frame: Any) -> Part:
        """A batch of requests. Raises BrokerRefused: nothing was done."""
        service = link.requesting.get(command.service)
        if service is None or service.removing:
            service = self._first_request(link, command.service)
        limits = self._shard.settings
        try:
            content = self._shard.content(frame)
            content.check(limits.limits)
        except BatchError as error:
            raise BrokerRefused(error.code, error.reason) from error
        count = content.head.count
        if count > limits.request_rows_max:
            raise BrokerRefused(
                "too_large", f"{count} requests in a batch, at most {limits.request_rows_max}"
            )
        size = content_size(content)
        self._check_room(service, count, size)
        self._shard.quotas.check_sent(link.holder, service.resource, size)
        if not 0 <= command.timeout_ms <= TIME_MAX_MS:
            raise BrokerRefused("malformed", f"a timeout is 0 to {TIME_MAX_MS} ms")
        reply_to = command.reply_to
        if not reply_to:
            reply_to = link.identity or self._mailboxes.temporary(link)
        elif not link.owns(reply_to):
            self._check_reply_to(link, reply_to)
        subjects = _subjects(content, limits.request_subjects_max)
        if command.need_workers:
            self._check_served(service, subjects)
        now_ms = self._shard.now_ms
        timeout_ms = command.timeout_ms or service.row.settings.timeout_ms
        put = RequestPut(
            service.number, -1, count, size, link.holder, reply_to, now_ms,
            now_ms + timeout_ms if timeout_ms else 0, command.key,
            subjects,
        )  # fmt: skip
        return Part(
            [put], content, frame, effects=[_Incoming(self, service, put, {})], level=service.level,
            memory=service.memory,
        )  # fmt: skip

    def _check_served(self, service: Service, subjects: Sequence[str]) -> None:
        slow = 0
        for subject in dict.fromkeys(subjects):
            lane = service.lane(subject, waits=False)
            if service.is_slow(lane):
                slow += 1
                if slow > SLOW_SUBJECTS_MAX:
                    raise BrokerRefused(
                        "too_large", f"service '{service.name}' has workers by regular expressions:"
                        f" {SLOW_SUBJECTS_MAX} subjects that are new to it may need workers at once"
                    )  # fmt: skip
            if not service.crews_of(lane):
                self._shard.counters["requests_without_workers"] += len(subjects)
                what = f" for the subject '{subject}'" if subject else ""
                raise BrokerRefused(
                    "no_workers", f"no worker offers service '{service.name}'{what}"
                )

    def again(self, link: Link, command: Request) -> None:
        """A REQUEST came again by its key: say which of its answers ended with their mailbox."""
        reply_to = command.reply_to
        key = link.holder, command.key
        if (reply_to or link.identity) and not reply_to.startswith("~"):
            return
        taken = None if self._steps.under_way(key) else self._steps.taken(key)
        try:
            name = self._mailboxes.temporary(link)
        except BrokerRefused:
            # Its OPEN_INBOX is refused for the same reason, by name.
            return
        if taken is None or taken.base < 0 or reply_to not in ("", name):
            return
        row = self._shard.queues.requests.get(taken.base)
        gone = every(taken.count) & ~(0 if row is None else row.left)
        if not gone or not self._mailboxes.answers_lost(name, taken.base):
            return
        runs = [(command.key, first, count) for first, count in runs_of(gone)]
        part = self._puts.notice(name, asked_by=link.holder, about=runs, why="lost")
        if part is not None:
            self._shard.counters["answers_lost"] += gone.bit_count()
            self._steps.take([part])

    def _first_request(self, link: Link, name: str) -> Service:
        if not self._shard.settings.permit(link.owner, "request", name):
            raise BrokerRefused("forbidden", f"you may not ask service '{name}'")
        service = self.use(name, link.owner)
        if service.memory and not service.known and not service.making:
            self.make(service)
        if len(link.requesting) >= REQUESTING_MAX:
            link.requesting.clear()
        link.requesting[name] = service
        return service

    def _check_reply_to(self, link: Link, reply_to: str) -> None:
        if reply_to.startswith("~"):
            if reply_to != self._mailboxes.temporary(link):
                raise BrokerRefused("forbidden", f"mailbox '{reply_to}' is another session's")
            return
        fault = name_fault(reply_to)
        if fault:
            raise BrokerRefused("bad_name", f"reply_to: {fault}")
        if not self._shard.settings.permit(link.owner, "send", reply_to):
            raise BrokerRefused("forbidden", f"you may not send to mailbox '{reply_to}'")

    def _check_room(self, service: Service, count: int, size: int) -> None:
        limits, settings = self._shard.settings, service.row.settings
        rows_max = settings.max_requests or limits.service_requests_max
        size_max = settings.max_bytes or limits.service_bytes_max
        if count > rows_max or size > size_max:
            raise BrokerRefused(
                "limit", f"service '{service.name}' holds {rows_max} requests of {size_max} bytes"
            )
        if (
            service.rows + service.reserved_rows + count > rows_max
            or service.size + service.reserved_size + size > size_max
        ):
            self._shard.counters["services_full"] += 1
            raise BrokerRefused(
                "wait",
                f"service '{service.name}' is full: it has {service.rows} of at most {rows_max} "
                f"requests, {service.size} of {size_max} bytes; {count} of {size} bytes are too "
                "much",
                limits.retry_ms,
            )
        if self.size + size > limits.all_requests_bytes_max:
            raise BrokerRefused("wait", "the service queues are full", limits.retry_ms)

    # --- hand-out ---------------------------------------------------------------------------

    def taken_change(self, service: Service, offer: Offer, rows: Iterable[Rows]) -> WorkTaken:
        """The change by which a worker has requests in hand."""
        now_ms = self._shard.now_ms
        return WorkTaken(service.number, named(rows), offer.hands.holder, now_ms, offer.lease_ms)

    def hand_out(self, service: Service, shares: Sequence[Share]) -> None:
        """Put the hand-out of rows on its way; they are moving already."""
        # Rows of one batch in several lanes go together, as one WORK.
        together: dict[tuple[Offer, Put], tuple[int, int]] = {}
        for offer, put, rows, cost in shares:
            before, spent = together.get((offer, put), (0, 0))
            together[offer, put] = before | rows, spent + cost
        shares = [(offer, put, rows, cost) for (offer, put), (rows, cost) in together.items()]
        by_offer: dict[Offer, list[Rows]] = {}
        for offer, put, rows, _ in shares:
            by_offer.setdefault(offer, []).append((put, rows))
        changes: list[Change] = [
            self.taken_change(service, offer, rows) for offer, rows in by_offer.items()
        ]
        self._steps.take([self.part(service, changes, _HandOut(self, service, shares))])

    def coming_to(self, holder: str, put: Put) -> int:
        """Rows of a batch whose hand-out to a holder is on its way into the log."""
        rows = 0
        for shares in self._handing:
            for offer, one, some, _ in shares:
                if one is put and offer.hands.holder == holder:
                    rows |= some
        return rows & ~put.ending

    def give_back(self, offer: Offer, count: int, cost: int) -> None:
        """An offer did not get what it was to get: its credit is whole again."""
        offer.left_records += count
        offer.left_bytes += cost
        self.less_in_hand(offer, count)

    def less_in_hand(self, offer: Offer, count: int) -> None:
        """An offer has fewer requests in hand: it may be ready for others."""
        offer.in_hand -= count
        service = offer.service
        if service.refile(offer):
            self.hungry[service] = None

    def grant(self, offer: Offer, put: Put, rows: int, cost: int) -> None:
        """Rows are in the hands of a worker, as the log says."""
        alive = rows & put.alive
        gone = (rows ^ alive).bit_count()
        if gone:
            self.give_back(offer, gone, 0 if alive else cost)
        if not alive:
            return
        if offer.ended:
            # It ended while this was on its way: nothing was sent, so that was no attempt.
            self.give_up(put.service, [(put, alive)], WITHDRAWN, 0)
            return
        self._hand_outs += 1
        grant = Grant(put, alive, offer.hands, self._shard.now_ms, offer.lease_ms, self._hand_outs)
        offer.hands.add(grant)
        grant.slot = self.wheel.add(grant.due_ms, grant)
        count = alive.bit_count()
        put.service.held += count
        self._shard.counters["requests_out"] += count
        self.deliver(offer, grant, cost)

    def let_go(self, put: Put, rows: int) -> Released:
        """Take these rows out of their holders' hands."""
        released: Released = []
        for grant in list(put.grants):
            hit = grant.rows & rows
            if not hit:
                continue
            released.append((grant, hit))
            grant.rows ^= hit
            if not grant.rows:
                grant.hands.drop(grant)
                self.wheel.discard(grant.slot, grant)
            count = hit.bit_count()
            put.service.held -= count
            if grant.hands.offer is not None:
                self.less_in_hand(grant.hands.offer, count)
        return released

    def take_back(self, released: Released) -> None:
        """What was let go is in the same hands as before."""
        for grant, rows in released:
            put, offer = grant.put, grant.hands.offer
            if grant.hands.ended:
                self._later([(put, rows)])
                continue
            if not grant.rows:
                grant.hands.add(grant)
                now_ms = self._shard.now_ms
                # What is over is decided again when the log may take it, not at once.
                due_ms = grant.due_ms if grant.due_ms > now_ms else now_ms + RETRY_MS
                grant.slot = self.wheel.add(due_ms, grant)
            grant.rows |= rows
            count = rows.bit_count()
            put.service.held += count
            if offer is not None:
                self.less_in_hand(offer, -count)

    # --- changes ----------------------------------------------------------------------------

    def part(self, service: Service, changes: list[Change], *effects: Effect) -> Part:
        """A step's part that changes a service; in memory it takes effect at once."""
        memory = self._shard.queues if service.memory else None
        return changing(changes, effects, memory=memory, level=service.level)

    def apply(self, changes: list[Change]) -> None:
        """Let changes of what is in memory only take effect."""
        for change in changes:
            apply(NO_TABLES, self._shard.queues, change)

    def with_mail(self, part: Part, service: Service, mails: list[Part]) -> Part:
        """Let mail happen in the same step as a change of a service."""
        if not mails:
            return part
        if not service.memory:
            mails = [self._puts.later(mail) if mail.memory else mail for mail in mails]
        elif not all(mail.memory for mail in mails):
            # The change has its effect when the mail is in the log.
            mails = [self._puts.later(mail) if mail.memory else mail for mail in mails]
            part.memory = False
        part.also += mails
        return part

    # --- ends -------------------------------------------------------------------------------

    def end(
        self, service: Service, items: Sequence[Rows], why: str, *effects: Effect,
        notice: str = "", mails: Sequence[Part] = (),
    ) -> Part:  # fmt: skip
        """A step's part by which requests end.

        why: as RequestDone has it. notice: what their requesters are told; empty: nothing.
        """
        changes: list[Change] = [RequestDone(service.number, named(items), why)]
        part = self.part(service, changes, _Ending(self, service, items, why, []), *effects)
        told = [*mails, *self.notices(items, notice)] if notice else list(mails)
        return self.with_mail(part, service, told)

    def gone(self, put: Put, rows: int) -> None:
        """Rows have left their queue, as the tables say."""
        service = put.service
        put.ending &= ~rows
        if put.delayed:
            service.delayed -= (put.delayed & rows).bit_count()
            put.delayed &= ~rows
        count = rows.bit_count()
        service.rows -= count
        self.rows -= count
        if put.row.left:
            return
        size = put.row.put.size
        service.size -= size
        self.weigh(service, put.row.put.sender, -size)
        service.puts.pop(put.base, None)
        if put.left_by:
            service.forget_left(put)
        for back in put.backs or ():
            self.wheel.discard(back.slot, back)
        put.backs = None
        self._unsettled.pop(put, None)
        if put.slot >= 0:
            self.wheel.discard(put.slot, put)
        if (put.buried, put.base) not in self._shard.queues.messages:
            self._bodies.drop(put.base)

    def bury(self, service: Service, items: Sequence[Rows], why: str, *effects: Effect) -> Part:
        """A step's part by which requests become dead letters. Raises BrokerRefused."""
        size = sum(put.row.put.size for put, _ in items)
        masks = [(put.base, rows) for put, rows in items]
        mailbox = dead_letters(service)
        try:
            part = self._puts.bury(
                mailbox, service=service.number, rows=masks, size=size, why=why, force=True
            )
        except BrokerRefused:
            # The mailbox that was named cannot take them: what is logged stays in the log.
            mailbox = default_dead_letters(service)
            part = self._puts.bury(
                mailbox, service=service.number, rows=masks, size=size, why=why, force=True
            )
        part.effects += [_Dying(self, service, items, why, [], mailbox), *effects]
        part.level = service.level
        notices = self.notices(items, why)
        if not part.memory:
            notices = [self._puts.later(one) if one.memory else one for one in notices]
        part.also += notices
        return part

    def notices(self, items: Iterable[Rows], why: str) -> list[Part]:
        """Mail to the requesters that named their requests: there will be no answer, and why."""
        places: dict[tuple[str, str], list[Run]] = {}
        for put, rows in items:
            change = put.row.put
            if change.key:
                runs = places.setdefault((change.reply_to, change.sender), [])
                runs += [(change.key, first, count) for first, count in runs_of(rows)]
        parts: list[Part] = []
        for (reply_to, asked_by), runs in places.items():
            count = sum(run[2] for run in runs)
            part = self._puts.notice(reply_to, asked_by=asked_by, about=runs, why=why)
            if part is None:
                self.undeliverable(reply_to, count)
            else:
                parts.append(part)
        return parts

    def undeliverable(self, reply_to: str, count: int) -> None:
        """The mailbox for replies is gone."""
        self._shard.counters["replies_undeliverable"] += count
        self._shard.event("reply_undeliverable", "warning", mailbox=reply_to, count=count)

    # --- back into the queue ----------------------------------------------------------------

    def returned(
        self, service: Service, items: Sequence[Rows], why: str, again_ms: int | None,
        said: str = "",
    ) -> Part:  # fmt: skip
        """A step's part by which rows in hand wait again; the exhausted become dead letters.

        again_ms: not before so long; None: by the service's back-off. said: the worker's reason,
        which the dead letters of the exhausted repeat.
        """
        now_ms = self._shard.now_ms
        by_pause: dict[int, list[Rows]] = {}
        exhausted: list[Rows] = []
        for put, rows in items:
            for times, some in attempts_of(put, rows):
                pause_ms = self._pause(service, times, why, again_ms)
                if times >= self.attempts_max(service) and why not in _NO_ATTEMPT:
                    exhausted.append((put, some))
                    pause_ms = 0
                by_pause.setdefault(pause_ms, []).append((put, some))
        changes: list[Change] = [
            WorkReturned(
                service.number, named(some), why, now_ms + pause_ms if pause_ms else 0, pause_ms
            )
            for pause_ms, some in by_pause.items()
        ]
        returning = _Returning(self, service, items, why, now_ms, by_pause, exhausted, said, [])
        return self.part(service, changes, returning)

    def _pause(self, service: Service, times: int, why: str, again_ms: int | None) -> int:
        """How long rows that were handed out so often wait before they may be once more."""
        if again_ms is None:
            return self._backoff(service, times)
        if why == "returned" and not again_ms and times > 1:
            # Else a lone worker that gives it back would use up all attempts within a moment.
            return self._backoff(service, times - 1)
        return again_ms

    def _wait_again(self, put: Put, rows: int, not_before_ms: int) -> None:
        if not_before_ms > self._shard.now_ms:
            self._delay(put, rows, not_before_ms)
        else:
            put.service.wait(put, rows, again=True)
            self.hungry[put.service] = None

    def _delay(self, put: Put, rows: int, until_ms: int) -> None:
        put.delayed |= rows
        put.service.delayed += rows.bit_count()
        if put.backs is None:
            put.backs = {}
        back = Back(put, rows)
        put.backs[back] = None
        back.slot = self.wheel.add(until_ms, back)

    def _exhausted(self, service: Service, items: list[Rows], why: str, said: str = "") -> None:
        """Rows that were handed out as often as may be become dead letters."""
        items = [(put, rows) for put, rows in items if rows]
        if not items:
            return
        most = self.attempts_max(service)
        word = {"fenced": "died", RELEASED: "returned", WITHDRAWN: "returned"}.get(why, why)
        reason = f"{word}: handed out {most} times"
        if said:
            reason = f"{reason}, at last: {said}"
        try:
            part = self.bury(service, items, reason, Then(failed=partial(self._later, items)))
        except BrokerRefused as error:
            self._shard.event(
                "dead_letter_refused", "error", service=service.name, code=error.code,
                reason=error.reason,
            )  # fmt: skip
            for put, rows in items:
                self._wait_again(put, rows, self._shard.now_ms + RETRY_MS)
            return
        self._steps.take([part])

    def give_up(
        self, service: Service, items: Sequence[Rows], why: str, again_ms: int | None = None
    ) -> None:
        """Rows in hand wait again: who had them died, went silent or was fenced."""
        part = self.returned(service, items, why, again_ms)
        part.effects.append(Then(failed=partial(self._later, items)))
        self._steps.take([part])

    def give_up_later(self, hands: Hands, why: str, again_ms: int | None) -> None:
        """All that hands hold waits again, a portion a step: it may be very much."""
        grants = deque(grant for one in hands.grants.values() for grant in one)
        if grants:
            self._leaving.append((grants, why, again_ms))
            self.return_some()

    @property
    def leaving(self) -> bool:
        """Whether more is to be returned."""
        return bool(self._leaving)

    def return_some(self) -> None:
        """Return a portion of what ended links had in hand."""
        budget = self._shard.settings.timers_max
        while self._leaving and budget > 0:
            grants, why, again_ms = self._leaving[0]
            items: list[Rows] = []
            service = grants[0].put.service
            while grants and budget > 0:
                grant = grants.popleft()
                if grant.rows:
                    items.append((grant.put, grant.rows))
                    budget -= grant.put.weight
            if not grants:
                self._leaving.popleft()
            if items:
                self.give_up(service, merged(items), why, again_ms)

    def attempts_max(self, service: Service) -> int:
        """How often a request may be handed out."""
        return service.row.settings.attempts_max or self._shard.settings.attempts_max

    def _spent(self, put: Put, rows: int) -> list[int]:
        """Return the rows among these that may not be handed out once more."""
        most = self.attempts_max(put.service)
        return [some for times, some in attempts_of(put, rows) if times >= most]

    def _backoff(self, service: Service, times: int) -> int:
        settings, limits = service.row.settings, self._shard.settings
        most = settings.backoff_max_ms or limits.backoff_max_ms
        first = settings.backoff_ms or limits.backoff_ms
        return int(min(most, first << min(max(times, 1) - 1, 40)))

    # --- timers -----------------------------------------------------------------------------

    @property
    def due_ms(self) -> int | None:
        """When the next timer is due."""
        if self._found:
            return self._shard.now_ms
        due = self.wheel.due_ms
        if self._unsettled and (due is None or self._settle_at_ms < due):
            due = self._settle_at_ms
        if self.paused_to_ms > self._shard.now_ms and self.hungry:
            due = self.paused_to_ms if due is None else min(due, self.paused_to_ms)
        return due

    def _later(self, items: Iterable[Rows], *why: Any) -> None:
        """The log refused what was decided of these: decide again when it may take it."""
        for put, _ in items:
            self._unsettled[put] = None
        now_ms = self._shard.now_ms
        if self._settle_at_ms <= now_ms:
            # Else as was said: one refusal after the other must not put it off for ever.
            self._settle_at_ms = now_ms + RETRY_MS

    def tick(self) -> None:
        """Do what is due, as far as one step may."""
        shard = self._shard
        now_ms = shard.now_ms
        if self._found:
            # The leases of before begin anew: their holders may come back.
            for grant in self._found:
                if grant.rows:
                    grant.due_ms = now_ms + grant.lease_ms
                    grant.slot = self.wheel.add(grant.due_ms, grant)
            self._found = []
        if self._unsettled and self._settle_at_ms <= now_ms:
            self._settle()
        due = self.wheel.due_ms
        if due is None or due > now_ms:
            return
        leases: dict[tuple[Service, str], list[Rows]] = {}
        over: dict[Service, list[Rows]] = {}
        for thing in self.wheel.take(now_ms, shard.settings.timers_max):
            if type(thing) is Grant:
                if thing.due_ms > now_ms:
                    thing.slot = self.wheel.add(thing.due_ms, thing)
                elif thing.rows:
                    place = thing.put.service, thing.hands.holder
                    leases.setdefault(place, []).append((thing.put, thing.rows))
            elif type(thing) is Put:
                thing.slot = -1
                if thing.alive:
                    over.setdefault(thing.service, []).append((thing, thing.alive))
            elif type(thing) is Back:
                put = thing.put
                if put.backs is not None:
                    put.backs.pop(thing, None)
                rows = thing.rows & put.delayed
                put.delayed &= ~rows
                put.service.delayed -= rows.bit_count()
                rows &= put.free
                if rows:
                    put.service.wait(put, rows, again=True)
                    self.hungry[put.service] = None
        for service, items in over.items():
            self._expire(service, items)
        for (service, holder), items in leases.items():
            items = [(put, rows & put.granted) for put, rows in items]
            items = [(put, rows) for put, rows in items if rows]
            if items:
                self._lease_over(service, holder, items)

    def _lease_over(self, service: Service, holder: str, items: list[Rows]) -> None:
        count = sum(rows.bit_count() for _, rows in items)
        self._shard.counters["leases_expired"] += count
        self._shard.event(
            "lease_expired", "warning", service=service.name, holder=holder, count=count
        )
        self.give_up(service, merged(items), "lease")

    def _expire(self, service: Service, items: list[Rows]) -> None:
        """The deadline of these is over."""
        count = sum(rows.bit_count() for _, rows in items)
        expiring = Then(partial(self._expired, service, count), partial(self._later, items))
        self._steps.take([self.end(service, items, "expired", expiring, notice="expired")])

    def _expired(self, service: Service, count: int, _: int) -> None:
        self._shard.counters["requests_expired"] += count
        self._shard.event("request_expired", "warning", service=service.name, count=count)

    def _settle(self) -> None:
        """Decide again what the log refused."""
        puts = list(islice(self._unsettled, self._shard.settings.timers_max))
        now_ms = self._shard.now_ms
        for put in puts:
            # The others in the next step: unless these are refused, nothing speaks against it.
            del self._unsettled[put]
        for put in puts:
            deadline_ms = put.row.put.deadline_ms
            if deadline_ms and deadline_ms <= now_ms and put.alive:
                self._expire(put.service, [(put, put.alive)])
                continue
            lost = put.alive & ~put.row.waiting & ~put.moving & ~put.granted
            if lost:
                self.give_up(put.service, [(put, lost)], "died")
            spent = sum(self._spent(put, put.free))
            if spent:
                self._exhausted(put.service, [(put, spent)], "died")
        for service in {put.service for put in puts}:
            self.hungry[service] = None

    # --- over restarts ------------------------------------------------------------------------

    def recovered(self) -> None:
        """Take up what the tables hold."""
        queues = self._shard.queues
        by_number: dict[int, Service] = {}
        for row in queues.services.values():
            service = Service(row)
            service.known = True
            self._enter(service)
            by_number[row.number] = service
        for base, request in list(queues.requests.items()):
            found = by_number.get(request.put.service)
            if found is None:
                del queues.requests[base]
                continue
            self.take_up(found, Put(found, request))

    def take_up(self, service: Service, put: Put) -> None:
        """A batch is in a queue, as the tables say: its rows wait, or are in a worker's hands."""
        row = put.row
        self.add(service, put)
        waiting = row.waiting
        for at_ms, rows in row.delayed.items():
            rows &= waiting
            self._delay(put, rows, self._shard.resumed(at_ms, row.pause_ms))
        waiting &= ~put.delayed
        again = 0
        for times, rows in row.attempts.items():
            if times < self.attempts_max(service):
                again |= rows
            elif rows & waiting:
                # The broker ended before it could become a dead letter.
                waiting &= ~rows
                self._unsettled[put] = None
        if waiting:
            if waiting & ~again:
                service.wait(put, waiting & ~again, again=False)
            if waiting & again:
                service.wait(put, waiting & again, again=True)
        for hold in row.holds:
            hands = service.orphans.get(hold.holder)
            if hands is None:
                hands = service.orphans[hold.holder] = Hands(hold.holder, None)
            lease_ms = hold.lease_ms or self._shard.settings.lease_ms
            grant = Grant(put, hold.rows, hands, hold.at_ms, lease_ms, 0)
            hands.add(grant)
            service.held += hold.rows.bit_count()
            self._found.append(grant)

    def weigh(self, service: Service, sender: str, size: int) -> None:
        """Count bytes that a sender has more, or less, in all queues and on their way into them."""
        self.size += size
        self._shard.quotas.weigh(sender, service.resource, size)

    def add(self, service: Service, put: Put, *, weighed: bool = False) -> None:
        """Count a batch as one of a queue; weighed: its bytes were counted on their way."""
        row = put.row
        count, size = row.left.bit_count(), row.put.size
        service.puts[put.base] = put
        service.rows += count
        service.size += size
        self.rows += count
        if not weighed:
            self.weigh(service, row.put.sender, size)
        if row.put.deadline_ms:
            put.slot = self.wheel.add(row.put.deadline_ms, put)


class _Incoming(Effect):
    """One REQUEST on its way into the log."""

    requests: Requests
    service: Service
    put: RequestPut
    shares: dict[Offer, tuple[int, int]]
    """Rows of each offer, and the bytes of credit taken for them."""
    makes: bool = False
    """It brings the service into being."""

    def taken(self, part: Part) -> None:
        service, put = self.service, self.put
        service.reserved_rows += put.count
        service.reserved_size += put.size
        self.requests.weigh(service, put.sender, put.size)

    def based(self, part: Part) -> None:
        service, put = self.service, self.put
        base = put.base = part.base
        changes: list[Change] = []
        if not (service.known or service.under_way or service.memory):
            service.under_way = self.makes = True
            changes.append(self.requests.creation(service))
        changes.append(put)
        if service.offers:
            self._share()
            now_ms = self.requests._shard.now_ms
            for offer, (rows, _) in self.shares.items():
                changes.append(
                    WorkTaken(
                        service.number, [(base, rows_of(rows))], offer.hands.holder, now_ms,
                        offer.lease_ms,
                    )
                )  # fmt: skip
        part.changes = changes

    def _share(self) -> None:
        service, put, shares = self.service, self.put, self.shares
        for subject, rows in _by_subject(put.subjects, put.count):
            lane = service.lane(subject, waits=False)
            if lane.rows or service.is_slow(lane):
                # What waits there goes first; what is to be compared with expressions waits.
                continue
            for offer, some in service.allot(lane, rows, put.size, rows.bit_count()):
                before, cost = shares.get(offer, (0, 0))
                shares[offer] = before | some, cost + put.size

    def appended(self, part: Part, end_lsn: int) -> None:
        requests, service, change = self.requests, self.service, self.put
        content = part.content
        assert content is not None
        if service.memory:
            requests.apply(part.changes)
            requests._bodies.hold(change.base, None, part.frame, content)
        else:
            requests._bodies.keep(change.base, part.stamp, part.frame, content)
        if self.makes:
            service.under_way = False
            requests.made(service)
        service.reserved_rows -= change.count
        service.reserved_size -= change.size
        put = Put(service, requests._shard.queues.requests[change.base])
        requests.add(service, put, weighed=True)
        requests._shard.counters["requests_in"] += change.count
        given = 0
        for offer, (rows, cost) in self.shares.items():
            given |= rows
            requests.grant(offer, put, rows, cost)
        rest = every(change.count) & ~given
        if rest:
            service.wait(put, rest, again=False)
            requests.hungry[service] = None

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        requests, service, put = self.requests, self.service, self.put
        service.reserved_rows -= put.count
        service.reserved_size -= put.size
        requests.weigh(service, put.sender, -put.size)
        for offer, (rows, cost) in self.shares.items():
            requests.give_back(offer, rows.bit_count(), cost)
        self.shares = {}
        if self.makes:
            self.makes = service.under_way = False
        requests.unused(service)


class _HandOut(Effect):
    """Rows on their way into the hands of workers."""

    requests: Requests
    service: Service
    shares: Sequence[Share]

    def taken(self, part: Part) -> None:
        self.requests._handing.append(self.shares)

    def appended(self, part: Part, end_lsn: int) -> None:
        self.requests._handing.remove(self.shares)
        for offer, put, rows, cost in self.shares:
            put.moving &= ~rows
            self.requests.grant(offer, put, rows, cost)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        requests, service = self.requests, self.service
        requests._handing.remove(self.shares)
        for offer, put, rows, cost in self.shares:
            put.moving &= ~rows
            requests.give_back(offer, rows.bit_count(), cost)
            if put.row.waiting & rows:
                service.wait(put, put.row.waiting & rows, again=True)
        requests.hungry[service] = None
        requests.paused_to_ms = requests._shard.now_ms + (retry_ms or RETRY_MS)


class _Ending(Effect):
    """Requests on their way out."""

    requests: Requests
    service: Service
    items: Sequence[Rows]
    why: str
    """As RequestDone has it."""
    released: Released

    def taken(self, part: Part) -> None:
        released = self.released
        for put, rows in self.items:
            put.ending |= rows
            released += self.requests.let_go(put, rows)
        if self.why == "completed" and released:
            now_ms = self.requests._shard.now_ms
            for grant, rows in released:
                self.service.paced(rows.bit_count(), now_ms - grant.at_ms)

    def appended(self, part: Part, end_lsn: int) -> None:
        for put, rows in self.items:
            self.requests.gone(put, rows)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        requests, released = self.requests, self.released
        for put, rows in self.items:
            put.ending &= ~rows
            waiting = rows & put.free
            if waiting:
                # What waits may have been passed over meanwhile.
                put.service.wait(put, waiting, again=True)
                requests.hungry[put.service] = None
        requests.take_back(released)
        released.clear()
        for put, rows in self.items:
            # Handed out in the step before, when they were about to end: in no worker's hands.
            if rows & put.row.left & ~put.row.waiting & ~put.moving & ~put.granted:
                requests._later([(put, rows)])


class _Dying(_Ending):
    """Requests on their way into a dead-letter mailbox."""

    mailbox: str

    def appended(self, part: Part, end_lsn: int) -> None:
        requests, shard, service = self.requests, self.requests._shard, self.service
        box = requests._mailboxes.get(self.mailbox)
        count = 0
        for put, rows in self.items:
            put.buried = 0 if box is None else box.number
            requests.gone(put, rows)
            count += rows.bit_count()
        service.dead += count
        shard.counters["requests_dead"] += count
        shard.event(
            "request_dead", "warning", service=service.name, count=count, why=self.why,
            mailbox=self.mailbox,
        )  # fmt: skip


class _Returning(Effect):
    """Requests on their way back from workers into the queue."""

    requests: Requests
    service: Service
    items: Sequence[Rows]
    why: str
    at_ms: int
    by_pause: dict[int, list[Rows]]
    exhausted: list[Rows]
    said: str
    """The worker's reason."""
    released: Released

    def taken(self, part: Part) -> None:
        for put, rows in self.items:
            put.moving |= rows
            put.returning |= rows
            self.released += self.requests.let_go(put, rows)

    def _moved(self) -> int:
        count = 0
        for put, rows in self.items:
            put.moving &= ~rows
            put.returning &= ~rows
            count += rows.bit_count()
        return count

    def appended(self, part: Part, end_lsn: int) -> None:
        requests, exhausted = self.requests, self.exhausted
        requests._shard.counters["requests_returned"] += self._moved()
        if self.why in (RELEASED, WITHDRAWN):
            # The log has taken back what was no attempt.
            for put, rows in self.items:
                exhausted += [(put, some) for some in requests._spent(put, rows & put.alive)]
        spent = merged(exhausted)
        kept = dict(spent)
        for pause_ms, some in self.by_pause.items():
            for put, rows in some:
                rows &= put.alive & ~kept.get(put, 0)
                if rows:
                    requests._wait_again(put, rows, self.at_ms + pause_ms)
        if spent:
            spent = [(put, rows & put.alive) for put, rows in spent]
            requests._exhausted(self.service, spent, self.why, self.said)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        self._moved()
        self.requests.take_back(self.released)
        self.released.clear()


# --- rows -----------------------------------------------------------------------------------


def _nobody(offer: Offer, grant: Grant, cost: int) -> None:
    raise AssertionError("a request was granted before the offers were connected")


def dead_letters(service: Service) -> str:
    """Name of the mailbox for what could not be done."""
    return service.row.settings.dead_letters or default_dead_letters(service)


def default_dead_letters(service: Service) -> str:
    """Return the dead-letter mailbox of a service that names none."""
    return service.name[: NAME_BYTES_MAX - len(DEAD)] + DEAD


def named(items: Iterable[Rows]) -> list[tuple[int, bytes]]:
    """Rows as the records of the log name them."""
    found: list[tuple[int, bytes]] = []
    for put, rows in items:
        assert rows, "an empty bitmap would name all rows that are left"
        found.append((put.base, rows_of(rows)))
    return found


def attempts_of(put: Put, rows: int) -> list[tuple[int, int]]:
    """Rows by how often they were handed out."""
    attempts = put.row.attempts
    if len(attempts) == 1:
        ((times, some),) = attempts.items()
        if not rows & ~some:
            return [(times, rows)] if rows else []
    found: list[tuple[int, int]] = []
    for times, some in attempts.items():
        hit = some & rows
        if hit:
            found.append((times, hit))
            rows ^= hit
    if rows:
        found.append((0, rows))
    return found


def merged(items: Iterable[Rows]) -> list[Rows]:
    """Return the rows with each batch once."""
    by_put: dict[Put, int] = {}
    for put, rows in items:
        by_put[put] = by_put.get(put, 0) | rows
    return list(by_put.items())


def _subjects(content: Content, most: int) -> list[str]:
    """Subjects of the rows: one for all, or one for each. Raises BrokerRefused."""
    headers, codes = content.headers()
    if codes is None:
        return [headers[0].keys[0]]
    subjects = [header.keys[0] for header in headers]
    rows = [subjects[code] for code in codes.tolist()]
    different = len(set(rows))
    if different == 1:
        return rows[:1]
    if different > most:
        raise BrokerRefused(
            "too_large", f"{different} different subjects in a batch of requests, at most {most}"
        )
    return rows


def _by_subject(subjects: Sequence[str], count: int) -> list[tuple[str, int]]:
    if len(subjects) == 1:
        return [(subjects[0], every(count))]
    found: dict[str, int] = {}
    for row, subject in enumerate(subjects):
        found[subject] = found.get(subject, 0) | (1 << row)
    return list(found.items())
