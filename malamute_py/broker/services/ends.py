"""How requests end: answered, cancelled, expired, removed, or as dead letters.

Owns the rows whose end is on its way into the log, and the batches of which an action was refused
by it: they are unsettled, and what is to be done with them is decided again later. `items` are
batches with rows of each. A row is spent when its attempts are used up; to bury it is to make it a
dead letter. Rows of a batch are `alive` until they end or their end is on its way, `free` while
they may be handed out, `leased` while a worker holds them, `moving` while a hand-out or return of
them is on its way into the log, and `aside` when no queue has them. An effect is called when its
part is taken into a step, and when the log has the step (`appended`) or refuses it. The rules:

- A request that was accepted ends once (completed, dead, cancelled, expired or removed) or is
  still there.
- No command ends or hands out a row whose end is on its way.
- After a refusal by the log everything is as it was before, or is tried again.
- A requester that gave its batch a key is told when no answer will come.

Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.log.bodies import Bodies
from malamute_py.broker.log.steps import Effect, Part
from malamute_py.broker.mail.puts import Puts
from malamute_py.broker.services.registry import RETRY_MS, Registry
from malamute_py.broker.services.rows import BatchRows, named
from malamute_py.broker.services.service import Lease, RequestBatch, Service
from malamute_py.broker.structures.bitmaps import runs_of
from malamute_py.changelog.records import Change, RequestDone, Run

Released: TypeAlias = list[tuple[Lease, int]]
"""Rows of leases that were taken from their holders and may have to be given back."""
_NOTICES_MAX: Final = 4_096
"""Requests of one notice. Without a bound, 72,000 requests of one requester that ended at once had
more than a batch may have, which ended the broker, and each one that started again."""


def _portions(runs: Iterable[Run]) -> list[list[Run]]:
    """Return runs of requests as lists of at most _NOTICES_MAX requests each, in order."""
    portions: list[list[Run]] = []
    room = 0
    for key, first, count in runs:
        while count:
            if not room:
                portions.append([])
                room = _NOTICES_MAX
            some = min(count, room)
            portions[-1].append((key, first, some))
            first, count, room = first + some, count - some, room - some
    return portions


class Ends:
    """Requests on their way out.

    What ends requests (a reply, a deadline, an operator) has the part of the step made here.
    """

    def __init__(self, shard: Shard, bodies: Bodies, puts: Puts, registry: Registry) -> None:
        self._shard = shard
        self._bodies = bodies
        self._mailboxes = puts.mailboxes
        self._puts = puts
        self._registry = registry
        self.unsettled: dict[RequestBatch, None] = {}
        """Batches whose next action must be decided again, since the log refused the last one."""
        self.settle_at_ms = 0
        """Time at which the unsettled batches are looked at."""

    def end(
        self, service: Service, items: Sequence[BatchRows], why: str, *effects: Effect,
        notice: str = "", mails: Sequence[Part] = (),
    ) -> Part:  # fmt: skip
        """Return a part of a step by which requests end.

        why: how they end, as the log's RequestDone has it. notice: why no answer will come, which
        the requesters are told; empty: they are told nothing. mails: parts that put mail in the
        same step, as the replies.
        """
        changes: list[Change] = [RequestDone(service.number, named(items), why)]
        part = self._registry.part(
            service, changes, _Ending(self, service, items, why, released=[]), *effects
        )
        told = [*mails, *self.notices(items, notice)] if notice else list(mails)
        return self.with_mail(part, service, told)

    def gone(self, batch: RequestBatch, rows: int) -> None:
        """Take rows out of their batch whose end the tables have, and the batch if none is left.

        Called when the log has their end, or that they are dead letters.
        """
        service = batch.service
        batch.ending &= ~rows
        if batch.delayed:
            service.delayed -= (batch.delayed & rows).bit_count()
            batch.delayed &= ~rows
        count = rows.bit_count()
        service.rows -= count
        self._registry.rows -= count
        if batch.row.left:
            return
        # The last requests of the batch have ended: the queue forgets it.
        size = batch.row.put.size
        service.size -= size
        self._registry.weigh(service, batch.row.put.sender, -size)
        service.batches.pop(batch.base, None)
        if batch.base in service.absent.by_base:
            service.absent.forget(batch.base)
        for pause in batch.pauses or ():
            self._registry.timers.discard(pause.slot, pause)
        batch.pauses = None
        self.unsettled.pop(batch, None)
        if batch.slot >= 0:
            self._registry.timers.discard(batch.slot, batch)
        # Dead letters of the batch still need its bodies: `messages` is by (mailbox, base).
        dead = (batch.buried, batch.base) in self._shard.queues.messages
        self._bodies.drop(batch.base, wanted=dead)

    def bury(
        self, service: Service, items: Sequence[BatchRows], why: str, *effects: Effect
    ) -> Part:
        """Return a part of a step by which requests become dead letters; requesters get a notice.

        They go into the mailbox that the settings name, or else into the service's own. Raises
        BrokerRefused: neither takes them.
        """
        size = sum(batch.row.put.size for batch, _ in items)
        masks = [(batch.base, rows) for batch, rows in items]
        mailbox = service.dead_letters
        try:
            # force: into a full mailbox, too, for the requests were within the service's bounds.
            part = self._puts.bury(
                mailbox, service=service.number, rows=masks, size=size, why=why, force=True
            )
        except BrokerRefused:
            # The mailbox that the settings name cannot take them; one in memory never can.
            mailbox = service.default_dead_letters
            part = self._puts.bury(
                mailbox, service=service.number, rows=masks, size=size, why=why, force=True
            )
        part.effects += [_Dying(self, service, items, why, released=[], mailbox=mailbox), *effects]
        part.level = service.level
        notices = self.notices(items, why)
        if not part.memory:
            # Notices into mailboxes in memory go out once the log has the rest.
            notices = [self._puts.deferred(one) if one.memory else one for one in notices]
        part.also += notices
        return part

    def notices(self, items: Iterable[BatchRows], why: str) -> list[Part]:
        """Return mail to the requesters that gave a key: no answer will come, and why.

        Without a key a notice could not name their requests to them.
        """
        by_requester: dict[tuple[str, str], list[Run]] = {}
        for batch, rows in items:
            change = batch.row.put
            if change.key:
                runs = by_requester.setdefault((change.reply_to, change.sender), [])
                runs += [(change.key, first, count) for first, count in runs_of(rows)]
        parts: list[Part] = []
        for (reply_to, asked_by), runs in by_requester.items():
            for about in _portions(runs):
                part = self._puts.notice(reply_to, asked_by=asked_by, about=about, why=why)
                if part is None:
                    self.report_undeliverable(reply_to, sum(count for _, _, count in about))
                else:
                    parts.append(part)
        return parts

    def report_undeliverable(self, reply_to: str, count: int) -> None:
        """Count and report replies or notices whose mailbox has gone: no requester gets them."""
        self._shard.counters["replies_undeliverable"] += count
        self._shard.event("reply_undeliverable", "warning", mailbox=reply_to, count=count)

    def with_mail(self, part: Part, service: Service, mails: list[Part]) -> Part:
        """Add parts that put mail to a part that ends requests, so that all happen in one step."""
        if not mails:
            return part
        if not service.memory or not all(mail.memory for mail in mails):
            # All of it takes effect once that which is logged is in the log.
            mails = [self._puts.deferred(mail) if mail.memory else mail for mail in mails]
            part.memory = False
        part.also += mails
        return part

    def attempts_max(self, service: Service) -> int:
        """Number of times that a request of a service may be handed out."""
        return service.row.settings.attempts_max or self._shard.settings.attempts_max

    def spent(self, batch: RequestBatch, rows: int) -> int:
        """Return the rows among these whose attempts are used up: they become dead letters."""
        most = self.attempts_max(batch.service)
        return sum(some for times, some in batch.attempts(rows) if times >= most)

    # --- leases ---------------------------------------------------------------------------------

    def let_go(self, batch: RequestBatch, rows: int) -> Released:
        """Take rows from the workers that hold them, before the log is told.

        Returns what was taken of each lease, for undo_let_go() if the log refuses.
        """
        released: Released = []
        for lease in list(batch.leases):
            taken = lease.rows & rows
            if not taken:
                continue
            released.append((lease, taken))
            lease.rows ^= taken
            if not lease.rows:
                lease.in_flight.drop(lease)
                self._registry.timers.discard(lease.slot, lease)
            count = taken.bit_count()
            batch.service.held -= count
            if lease.in_flight.offer is not None:
                self._registry.add_load(lease.in_flight.offer, -count)
        return released

    def undo_let_go(self, released: Released) -> None:
        """Let workers hold the rows again that let_go() took, as the log refused the change."""
        for lease, rows in released:
            batch, offer = lease.batch, lease.in_flight.offer
            if lease.in_flight.ended:
                # The offer has ended meanwhile: the rows are given back to the queue later.
                self.settle_later([(batch, rows)])
                continue
            if not lease.rows:  # let_go() had dropped the lease.
                lease.in_flight.add(lease)
                now_ms = self._shard.now_ms
                # A lease that is over meanwhile is looked at when the log may take its end.
                due_ms = lease.due_ms if lease.due_ms > now_ms else now_ms + RETRY_MS
                lease.slot = self._registry.timers.add(due_ms, lease)
            lease.rows |= rows
            count = rows.bit_count()
            batch.service.held += count
            if offer is not None:
                self._registry.add_load(offer, count)

    def settle_later(self, items: Iterable[BatchRows], *why: Any) -> None:
        """Have Deadlines decide about these rows again in a while: the log refused a decision.

        why: code and reason of the refusal, which make no difference.
        """
        for batch, _ in items:
            self.unsettled[batch] = None
        now_ms = self._shard.now_ms
        if self.settle_at_ms <= now_ms:
            # A time that is still to come stays: else refusal after refusal would put it off.
            self.settle_at_ms = now_ms + RETRY_MS

    def bury_later(self, items: Iterable[BatchRows], *why: Any) -> None:
        """Keep rows whose attempts are used up out of the queue until they can be buried.

        Called as a step with their end was refused; Deadlines tries it again.
        """
        for batch, rows in items:
            batch.aside |= rows
        self.settle_later(items)


class _Ending(Effect):
    """Effect of requests that end: no worker holds or gets them until the log answers."""

    ends: Ends
    service: Service
    items: Sequence[BatchRows]
    why: str
    """Reason, as RequestDone has it."""
    released: Released
    """Rows that taken() took from workers, to be given back where the log refuses."""

    def taken(self, part: Part) -> None:
        """Take the rows from their workers, and from the queue, until the log answers.

        How long workers had the requests that they completed is measured for the service's
        prefetch, the number that a worker is handed at once.
        """
        released = self.released
        for batch, rows in self.items:
            batch.ending |= rows
            released += self.ends.let_go(batch, rows)
        if self.why == "completed" and released:
            now_ms = self.ends._shard.now_ms
            for lease, rows in released:
                self.service.measure(rows.bit_count(), now_ms - lease.at_ms)

    def appended(self, part: Part, end_lsn: int) -> None:
        """Count the requests as gone, and how long the completed ones took."""
        if self.why == "completed":
            shard = self.ends._shard
            for batch, rows in self.items:
                put = batch.row.put
                # From when the request might first be handed out; the clock may have gone back.
                took_ms = shard.now_ms - put.at_ms - put.delay_ms
                if took_ms > 0:
                    shard.request_times.add(1_000_000 * took_ms, rows.bit_count())
                else:
                    shard.request_times.zeros += rows.bit_count()
        for batch, rows in self.items:
            self.ends.gone(batch, rows)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Let the rows wait or be held as before, since the log did not take their end."""
        ends, released = self.ends, self.released
        for batch, rows in self.items:
            batch.ending &= ~rows
            waiting = rows & batch.free
            spent = ends.spent(batch, waiting)
            if spent:
                # No worker gets them any more: they become dead letters when the log takes that.
                ends.bury_later([(batch, spent)])
                waiting ^= spent
            if waiting:
                # Their entries in the queue were dropped if their turn came while they were ending.
                batch.service.wait(batch, waiting, again=True)
                ends._registry.runnable[batch.service] = None
        ends.undo_let_go(released)  # workers hold again what taken() released
        released.clear()
        for batch, rows in self.items:
            # A hand-out that was logged meanwhile passed over these rows, since they were ending:
            # the tables have them as held, but no lease does.
            if rows & batch.row.left & ~batch.row.waiting & ~batch.moving & ~batch.leased:
                ends.settle_later([(batch, rows)])


class _Dying(_Ending):
    """Effect of requests that become dead letters."""

    mailbox: str

    def appended(self, part: Part, end_lsn: int) -> None:
        """Count the dead letters and forget their requests, since the log has taken them."""
        ends, shard, service = self.ends, self.ends._shard, self.service
        box = ends._mailboxes.get(self.mailbox)
        count = 0
        for batch, rows in self.items:
            # First, for gone() keeps a body that dead letters in this mailbox still need.
            batch.buried = 0 if box is None else box.number
            ends.gone(batch, rows)
            count += rows.bit_count()
        service.dead += count
        service.refusing = False  # The next refusal is reported again.
        shard.counters["requests_dead"] += count
        shard.event(
            "request_dead", "warning", service=service.name, count=count, why=self.why,
            mailbox=self.mailbox,
        )  # fmt: skip
