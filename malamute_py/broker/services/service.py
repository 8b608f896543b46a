"""One service at run time: its settings, the requests in its queue, and who holds which.

Owns the batches of requests that have not ended, the leases of their rows, and the offers of
workers. The rule: rows of a batch are bitmaps throughout. A batch names its service and its
leases, a lease its batch and its holder, and a service its batches and offers: they share a file.

A batch is the requests of one REQUEST, numbered from its `base` on; its `row` is what the tables
have of it. A holder is the name under which a worker holds requests. Its InFlight has what it holds
by one offer. After a restart of the broker it still holds its requests, without an offer: they are
orphans until they are answered, or until their leases end. Source: docs/design.md, Queues and the
checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from heapq import heappush
from itertools import islice
from typing import Final

from malamute_protocol.address import NAME_BYTES_MAX
from malamute_protocol.commands import Level
from malamute_protocol.commands import Offer as OfferCommand
from malamute_py.broker.links.link import Link, Owner
from malamute_py.broker.log.bodies import Body
from malamute_py.broker.services.absent import AbsentHolders
from malamute_py.broker.services.dispatch import FRESH, Dispatch, Taker
from malamute_py.changelog.settings import ServiceSettings
from malamute_py.changelog.tables import RequestRow, ServiceRow

DRAFT: Final = 0
"""State of a service that the log does not have yet: a batch of requests, or the change of
Registry.make(), makes it there."""
STANDING: Final = 1
"""State of a service that the log has."""
REMOVING: Final = 2
"""State of a service that is being removed or has gone."""
OLDEST_LOOK: Final = 64
"""Batches that are looked at for the oldest request that waits."""
DEAD: Final = ".dead"
"""Suffix of a service's name that makes the name of its dead-letter mailbox."""


class RequestBatch:
    """One batch of requests in a queue, as far as it has not ended."""

    __slots__ = (
        "aside",
        "base",
        "buried",
        "deadline_ms",
        "delayed",
        "ending",
        "leases",
        "masks",
        "moving",
        "pauses",
        "returning",
        "row",
        "service",
        "slot",
    )

    def __init__(self, service: Service, row: RequestRow) -> None:
        self.service = service
        self.row = row
        self.base = row.put.base
        self.deadline_ms = row.put.deadline_ms
        """Time at which its requests are given up; 0: never. It is sooner than the log has it after
        a start with a clock that was set back."""
        self.masks: dict[str, int] | None = None
        """Subject -> its rows; None: nothing has asked for them yet."""
        self.leases: list[Lease] = []
        """Rows that workers hold, and which worker holds which."""
        self.moving = 0
        """Rows whose hand-out or return is on its way into the log."""
        self.returning = 0
        """Rows of `moving` whose return is on its way."""
        self.ending = 0
        """Rows whose end is on its way into the log."""
        self.aside = 0
        """Rows in no queue: their attempts are used up, but their mailbox took no dead letters."""
        self.delayed = 0
        """Rows that wait for the end of a pause."""
        self.pauses: dict[Pause, None] | None = None
        """Pauses that are not over; None: it never had one."""
        self.slot = -1
        """Where the timer of its deadline is in the wheel; -1: it has none."""
        self.buried = 0
        """Number of the dead-letter mailbox that has rows of it; 0: none has."""

    def __lt__(self, other: RequestBatch) -> bool:
        # Heaps compare batches where two entries name the same base.
        return self.base < other.base

    def __hash__(self) -> int:
        # A compiled class that defines an order has no hash by default.
        return id(self)

    @property
    def free(self) -> int:
        """Rows that may be handed out now: they wait, and nothing of them is being logged."""
        return self.row.waiting & ~(self.moving | self.ending | self.delayed)

    @property
    def unheld(self) -> int:
        """Rows that no worker holds or is about to get, so that an absent holder may end them.

        Rows whose return is on its way into the log are among them.
        """
        return (self.row.waiting & ~self.moving | self.returning) & ~self.ending

    @property
    def alive(self) -> int:
        """Rows that have not ended and are not about to."""
        return self.row.left & ~self.ending

    @property
    def leased(self) -> int:
        """Rows that workers hold by a lease; the tables may have more as held (Ends.unsettled)."""
        rows = 0
        for lease in self.leases:
            rows |= lease.rows
        return rows

    def subjects(self, mask: int) -> list[tuple[str, int]]:
        """Divide rows by subject, in order of each subject's first row: (subject, its rows).

        Each subject has a queue of its own.
        """
        subjects = self.row.put.subjects
        if len(subjects) == 1:  # One subject stands for all rows.
            return [(subjects[0], mask)]
        masks = self.masks
        if masks is None:
            masks = self.masks = {}
            for row, subject in enumerate(subjects):
                masks[subject] = masks.get(subject, 0) | (1 << row)
        return [(subject, rows & mask) for subject, rows in masks.items() if rows & mask]

    def attempts(self, rows: int) -> list[tuple[int, int]]:
        """Divide rows by how often they were handed out, as the tables count it: (times, rows)."""
        attempts = self.row.attempts
        if len(attempts) == 1:  # Most batches: all rows were handed out equally often.
            ((times, some),) = attempts.items()
            if not rows & ~some:
                return [(times, rows)] if rows else []
        found: list[tuple[int, int]] = []
        for times, some in attempts.items():
            hit = some & rows
            if hit:
                found.append((times, hit))
                rows ^= hit
        if rows:  # Rows that were never handed out have no entry.
            found.append((0, rows))
        return found

    @property
    def weight(self) -> int:
        """Queues of subjects that its rows may wait in, at most: the work of putting them back."""
        return 1 if len(self.row.put.subjects) == 1 else self.row.put.count


class Pause:
    """Rows of one batch that may not be handed out again before a time."""

    __slots__ = ("batch", "rows", "slot")

    def __init__(self, batch: RequestBatch, rows: int) -> None:
        self.batch = batch
        self.rows = rows
        self.slot = -1
        """Where its timer is in the wheel."""


class Lease:
    """Rows of one batch that one holder got together, and until when it may hold them."""

    __slots__ = (
        "at_ms",
        "batch",
        "due_ms",
        "hand_out",
        "in_flight",
        "lease_ms",
        "rows",
        "slot",
        "unreadable",
    )

    def __init__(
        self,
        batch: RequestBatch,
        rows: int,
        in_flight: InFlight,
        at_ms: int,
        lease_ms: int,
        hand_out: int,
    ) -> None:
        """rows: of the batch. in_flight: of the holder. at_ms: when it got them.

        hand_out: number of the hand-out since the broker began; 0: one before that. Who has read
        the body of the rows knows by it whether they are still in that hand-out.
        """
        self.hand_out = hand_out
        self.batch = batch
        self.rows = rows
        self.in_flight = in_flight
        self.at_ms = at_ms
        self.lease_ms = lease_ms
        self.due_ms = at_ms + lease_ms
        """When the lease is over, unless the worker renews it."""
        self.slot = -1
        """Where its timer is in the wheel."""
        self.unreadable = False
        """Whether the rows could not be read, so that nothing was sent, and are to go back."""


class InFlight:
    """Requests of one service that one worker holds, by one offer or from before a restart."""

    __slots__ = ("bases", "ended", "holder", "leases", "offer")

    def __init__(self, holder: str, offer: Offer | None) -> None:
        self.holder = holder
        self.offer = offer
        """The offer that the worker got them by; None: it has ended, or was before a restart."""
        self.ended = False
        """Whether the offer has ended."""
        self.leases: dict[int, list[Lease]] = {}
        """Base of a batch -> the leases of its rows."""
        self.bases: list[int] = []
        """Keys of `leases`, ascending."""

    def leave(self) -> None:
        """Forget the offer, which has ended: the two must not keep each other in memory."""
        self.offer = None
        self.ended = True

    def add(self, lease: Lease) -> None:
        """Add a lease to those of its holder and of its batch."""
        batch = lease.batch
        known = self.leases.get(batch.base)
        if known is None:
            self.leases[batch.base] = [lease]
            if not self.bases or batch.base > self.bases[-1]:  # Most batches are newer ones.
                self.bases.append(batch.base)
            else:
                insort(self.bases, batch.base)
        else:
            known.append(lease)
        batch.leases.append(lease)

    def drop(self, lease: Lease) -> None:
        """Remove a lease of which the worker holds nothing any more, from it and its batch."""
        batch = lease.batch
        batch.leases.remove(lease)
        known = self.leases[batch.base]
        known.remove(lease)
        if not known:
            del self.leases[batch.base]
            del self.bases[bisect_left(self.bases, batch.base)]

    def leases_at(self, number: int) -> list[Lease] | None:
        """Leases of the last batch in flight that begins at or before a request's number.

        For commands that name requests by number. None: there is no such batch. The caller checks
        that the number lies in the batch.
        """
        at = bisect_right(self.bases, number) - 1
        return self.leases[self.bases[at]] if at >= 0 else None

    def rows_by_batch(self) -> list[tuple[int, int, int]]:
        """Everything in flight, ascending: (base of a batch, rows in flight, how many it has).

        For AbsentHolders, when the link is lost: the requests wait for any worker then, and this
        one may end them by an answer until another has them.
        """
        found: list[tuple[int, int, int]] = []
        for base in self.bases:
            leases = self.leases[base]
            rows = 0
            for lease in leases:
                rows |= lease.rows
            found.append((base, rows, leases[0].batch.row.put.count))
        return found

    @property
    def rows(self) -> int:
        """Number of requests that the worker holds."""
        return sum(lease.rows.bit_count() for one in self.leases.values() for lease in one)


class PendingWork:
    """Rows that a worker holds and has not been sent: a body is being read back for an offer.

    Rows whose bodies are in memory wait as well if earlier ones of the same offer do.
    """

    __slots__ = ("answered", "batch", "body", "cost", "failed", "hand_out", "rows")

    def __init__(self, batch: RequestBatch, rows: int, cost: int, hand_out: int) -> None:
        """cost: bytes of credit taken for the rows. hand_out: number of their hand-out."""
        self.batch = batch
        self.rows = rows
        self.cost = cost
        self.hand_out = hand_out
        self.body: Body | None = None
        """The batch that was read; None: nothing yet, or it cannot be read."""
        self.answered = False
        """Whether the read has been answered."""
        self.failed = ""
        """Reason why the read failed; empty: the body is lost, if there is none."""


class Offer(Taker):
    """One offer of one link, and the requests that it holds."""

    __slots__ = (
        "begun",
        "in_flight",
        "late",
        "lease_ms",
        "pattern_bytes",
        "pending",
        "service",
    )

    def __init__(self, owner: Owner, link: Link, command: OfferCommand, service: Service) -> None:
        super().__init__(owner, link, command)
        self.service = service
        self.pattern_bytes = 0
        self.in_flight = InFlight(link.holder, self)
        self.begun = 0
        """The next number of the mail stream when the offer was accepted; ENDED names it."""
        self.lease_ms = 0
        """Length of the leases of what it is handed."""
        self.late = False
        """Whether its last reply came too late, which was reported: the next one is not."""
        self.pending: deque[PendingWork] = deque()
        """Requests that it holds and has not been sent yet, in order."""


class Service(Dispatch[RequestBatch, Offer]):
    """One service: its settings, the requests in its queue, and the offers of its workers."""

    __slots__ = (
        "absent",
        "batches",
        "dead",
        "delayed",
        "edited",
        "held",
        "level",
        "making",
        "name",
        "number",
        "orphans",
        "refusing",
        "reserved_rows",
        "reserved_size",
        "row",
        "rows",
        "size",
        "state",
    )

    def __init__(self, row: ServiceRow) -> None:
        super().__init__()
        self.row = row
        self.name = row.name
        self.number = row.number
        self.level = int(Level[row.settings.level.upper()])
        """Level of the confirm of a command that asks for none of its own."""
        self.edited: ServiceSettings | None = None
        """Settings that are on their way into the log: the next edit begins from them."""
        self.state = DRAFT
        self.making = 0
        """Changes of Registry.make() on their way into the log."""
        self.batches: dict[int, RequestBatch] = {}
        """Base -> the batch."""
        self.rows = 0
        """Requests that wait or are held."""
        self.held = 0
        """Requests that workers hold."""
        self.delayed = 0
        """Requests that wait for the end of a pause."""
        self.size = 0
        """Bytes of its batches."""
        self.reserved_rows = 0
        """Requests on their way into the log."""
        self.reserved_size = 0
        """Bytes of the batches of requests on their way into the log."""
        self.orphans: dict[str, InFlight] = {}
        """Holder -> the requests that it held when the broker ended, and still holds: no other
        worker gets them while their leases last."""
        self.absent = AbsentHolders()
        """Holders that lost a link: their requests wait for any worker again, but an answer that
        was on its way may still end them."""
        self.dead = 0
        """Number of dead letters since the broker began."""
        self.refusing = False
        """Whether the mailbox of its dead letters has refused one, and taken none since: the
        operator was told."""

    @property
    def memory(self) -> bool:
        """Whether its requests are kept in memory only."""
        return self.row.settings.memory

    @property
    def resource(self) -> str:
        """Name of the quota that the bytes of its requests count for."""
        return "request_memory_bytes" if self.row.settings.memory else "request_bytes"

    @property
    def dead_letters(self) -> str:
        """Name of the mailbox for requests that could not be done."""
        return self.row.settings.dead_letters or self.default_dead_letters

    @property
    def default_dead_letters(self) -> str:
        """Name of that mailbox where the settings name none."""
        return self.name[: NAME_BYTES_MAX - len(DEAD)] + DEAD

    def oldest_ms(self) -> int:
        """Return when the oldest request was put that may be handed out, for operators; 0: none.

        After OLDEST_LOOK batches whose requests are held or wait for a time, it is when the last of
        those batches was put: the request was put later.
        """
        put = None
        for batch in islice(self.batches.values(), OLDEST_LOOK):
            put = batch.row.put
            if batch.free:
                return put.at_ms
        return put.at_ms if put is not None and self.rows > self.held + self.delayed else 0

    def wait(self, batch: RequestBatch, mask: int, *, again: bool) -> None:
        """Put rows into the queues of their subjects, from which workers are handed them.

        again: they came back, and go before rows that were never handed out. Others take their
        place by number, also where rows of later numbers wait already. `order` is what the queue
        sorts by.
        """
        priority = batch.row.put.priority
        order = batch.base if again else batch.base + FRESH
        for subject, rows in batch.subjects(mask):
            queue = self.queue_of(subject, priority)
            fresh = queue.fresh
            # `fresh` is ascending: after its last base only a later batch may be appended.
            if again or (fresh and fresh[-1][0] >= batch.base):
                heappush(queue.again, (order, rows, batch))
            else:
                queue.append(batch.base, rows, batch)
            queue.rows += rows.bit_count()
            if priority:
                self.prior_waits(queue)
            if self.is_slow(queue):
                # The patterns of workers are compared with this subject in steps, later.
                self.new_subjects[queue] = None
                continue
            for workers in self.takers_of(queue):
                self.push(workers, queue)
