"""One service at run time: requests that wait, in which order, and workers that are ready for them.

Owns the order of hand-out and the choice of the worker. The rules:

- Among the requests of one subject, and among all that one pattern takes, those that came back go
  first, then those with the lower number.
- A request goes to the ready offer that holds the fewest, in turn between equals. One offer gets
  its share of what waits, or what its worker does in PREFETCH_MS if that is more.
- A request that no offer takes is not looked at again until an offer comes that takes it.
- Rows of a batch are bitmaps throughout: a batch costs about what a lone request does.

The classes name each other, so they share a file. Source: docs/design.md, Queues and the
checkpoint; the Malamute whitepaper on services (References).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Final

from malamute_protocol.address import NAME_BYTES_MAX
from malamute_protocol.commands import Level
from malamute_protocol.commands import Offer as OfferCommand
from malamute_py.broker.links.links import Link, Owner, Receiver
from malamute_py.broker.log.bodies import Body
from malamute_py.broker.services.absent import AbsentHolders
from malamute_py.broker.structures.bitmaps import lowest
from malamute_py.changelog.settings import ServiceSettings
from malamute_py.changelog.tables import RequestRow, ServiceRow
from malamute_py.matcher import Index, compile_pattern

DRAFT: Final = 0
"""State of a service that the log does not have: each batch of requests brings what makes it."""
STANDING: Final = 1
"""State of a service that the log has."""
REMOVING: Final = 2
"""State of a service that is being removed or has gone."""
FRESH: Final = 1 << 62
"""Added to the order of requests that were never handed out: they go after all that came back."""
SUBJECTS_KEPT: Final = 1_024
"""Queues of subjects that are kept while they are empty, for the next request of the subject."""
DEAD: Final = ".dead"
"""Suffix of a service's name that makes the name of its dead-letter mailbox."""
EVERYTHING: Final = -1
"""Number of the pattern that takes every subject."""
PREFETCH_MS: Final = 2
"""Time whose work one worker gets at once. Shared out among eight workers, 64 quick requests cost
three times as much in messages as they take to do, and come back later."""
PREFETCH_MAX: Final = 64
"""Requests that one worker gets at once at most, unless its share is larger."""
SCANNED_AT_ONCE: Final = 256
"""Subjects that new patterns are compared with in one turn, or stale entries that are dropped."""
SLOW_LOOK: Final = 64
"""Subjects that a comparison with regular expressions counts for. It may take most of a millisecond
with one expression, and some milliseconds with 64."""
PROGRAMS_MAX: Final = 3_000
"""Size of all regular expressions of a service's offers at most: a REQUEST of many subjects is
matched in one turn. See matcher/expressions.py."""


class RequestBatch:
    """One batch of requests in a queue, as far as it has not ended."""

    __slots__ = (
        "base",
        "buried",
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
        self.delayed = 0
        """Rows that wait for the end of a pause."""
        self.pauses: dict[Pause, None] | None = None
        """Pauses that are not over; None: it never had one."""
        self.slot = -1
        """Slot of its deadline among the timers; -1: it has none."""
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
        """Rows that may be handed out."""
        return self.row.waiting & ~(self.moving | self.ending | self.delayed)

    @property
    def unheld(self) -> int:
        """Rows that no worker holds or is about to get: an absent holder may end them."""
        return (self.row.waiting & ~self.moving | self.returning) & ~self.ending

    @property
    def alive(self) -> int:
        """Rows that have not ended and are not about to."""
        return self.row.left & ~self.ending

    @property
    def leased(self) -> int:
        """Rows that workers hold."""
        rows = 0
        for lease in self.leases:
            rows |= lease.rows
        return rows

    def subjects(self, mask: int) -> list[tuple[str, int]]:
        """Divide rows by subject, in order of each subject's first row."""
        subjects = self.row.put.subjects
        if len(subjects) == 1:
            return [(subjects[0], mask)]
        masks = self.masks
        if masks is None:
            masks = self.masks = {}
            for row, subject in enumerate(subjects):
                masks[subject] = masks.get(subject, 0) | (1 << row)
        return [(subject, rows & mask) for subject, rows in masks.items() if rows & mask]

    def attempts(self, rows: int) -> list[tuple[int, int]]:
        """Divide rows by how often they were handed out: (times, rows)."""
        attempts = self.row.attempts
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

    @property
    def weight(self) -> int:
        """Queues of subjects that its rows may wait in, at most."""
        return 1 if len(self.row.put.subjects) == 1 else self.row.put.count


class Pause:
    """Rows of one batch that may not be handed out again before a time."""

    __slots__ = ("batch", "rows", "slot")

    def __init__(self, batch: RequestBatch, rows: int) -> None:
        self.batch = batch
        self.rows = rows
        self.slot = -1


class Lease:
    """Rows of one batch that one holder got together, and until when it may hold them."""

    __slots__ = ("at_ms", "batch", "due_ms", "hand_out", "in_flight", "lease_ms", "rows", "slot")

    def __init__(
        self,
        batch: RequestBatch,
        rows: int,
        in_flight: InFlight,
        at_ms: int,
        lease_ms: int,
        hand_out: int,
    ) -> None:
        """hand_out: its number since the broker began; 0: a hand-out before that."""
        self.hand_out = hand_out
        self.batch = batch
        self.rows = rows
        self.in_flight = in_flight
        self.at_ms = at_ms
        self.lease_ms = lease_ms
        self.due_ms = at_ms + lease_ms
        """When the lease is over, unless the worker renews it."""
        self.slot = -1


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
        """Add a lease."""
        batch = lease.batch
        known = self.leases.get(batch.base)
        if known is None:
            self.leases[batch.base] = [lease]
            if not self.bases or batch.base > self.bases[-1]:
                self.bases.append(batch.base)
            else:
                insort(self.bases, batch.base)
        else:
            known.append(lease)
        batch.leases.append(lease)

    def drop(self, lease: Lease) -> None:
        """Remove a lease of which the worker holds nothing any more."""
        batch = lease.batch
        batch.leases.remove(lease)
        known = self.leases[batch.base]
        known.remove(lease)
        if not known:
            del self.leases[batch.base]
            del self.bases[bisect_left(self.bases, batch.base)]

    def of(self, number: int) -> list[Lease] | None:
        """Leases of the batch that a request's number may lie in; None: there is no such batch."""
        at = bisect_right(self.bases, number) - 1
        return self.leases[self.bases[at]] if at >= 0 else None

    def had(self) -> list[tuple[int, int, int]]:
        """Everything in flight: (base of a batch, rows in flight, rows of the batch), ascending."""
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

    __slots__ = ("answered", "batch", "body", "cost", "hand_out", "rows")

    def __init__(self, batch: RequestBatch, rows: int, cost: int, hand_out: int) -> None:
        """hand_out: number of the hand-out that gave the worker these rows."""
        self.batch = batch
        self.rows = rows
        self.cost = cost
        self.hand_out = hand_out
        self.body: Body | None = None
        self.answered = False


class Offer(Receiver):
    """One offer of one link, and the requests that it holds."""

    __slots__ = (
        "begun",
        "bucket",
        "in_flight",
        "late",
        "lease_ms",
        "load",
        "pattern",
        "pattern_bytes",
        "pending",
        "service",
        "workers",
    )

    def __init__(self, owner: Owner, link: Link, command: OfferCommand, service: Service) -> None:
        super().__init__(
            owner, link, command.subscription, command.credit_records, command.credit_bytes
        )
        self.service = service
        self.pattern = command.pattern
        self.pattern_bytes = 0
        self.workers: WorkersByPattern | None = None
        """The offers of the same pattern; None: it has not joined the service, or has left it."""
        self.in_flight = InFlight(link.holder, self)
        self.begun = 0
        """The next number of the mail stream when the offer was accepted."""
        self.load = 0
        """Requests that it holds or that are on their way to it."""
        self.lease_ms = 0
        self.late = False
        """Whether its last reply came too late, which the log was told."""
        self.pending: deque[PendingWork] = deque()
        """Requests that it holds and has not been sent yet, in order."""
        self.bucket = -1
        """The load that it is filed under among the ready offers; -1: it is not ready."""

    def able(self, cost: int) -> int:
        """How many requests it may be given now. cost: bytes of the batch that they are of.

        Credit is exact in records and in bytes, but an offer that holds nothing may be given one
        request that is larger than its credit.
        """
        most = self.left_records
        if most <= 0 or self.ended or self.link.room <= 0:
            return 0
        if self.left_bytes >= cost:
            return most
        return 0 if self.load else 1


class WorkersByPattern:
    """The offers of one service that have the same pattern.

    Offers that are ready are filed under their load, queues under the order of their heads.
    """

    __slots__ = ("buckets", "filed", "heap", "number", "offers", "ready")

    def __init__(self, number: int) -> None:
        self.number = number
        """Number of the pattern in the service's index, or EVERYTHING."""
        self.offers = 0
        self.buckets: dict[int, dict[Offer, None]] = {}
        """Load -> the ready offers of that load, in turn."""
        self.ready = 0
        """Number of ready offers."""
        self.heap: list[tuple[int, str, SubjectQueue]] = []
        """Queues that the pattern takes, by the order of their heads. Entries may be stale."""
        self.filed: dict[SubjectQueue, int] = {}
        """Queue -> the order under which it stands in the heap."""

    def file(self, offer: Offer) -> None:
        """File an offer that is ready."""
        bucket = self.buckets.get(offer.load)
        if bucket is None:
            bucket = self.buckets[offer.load] = {}
        bucket[offer] = None
        offer.bucket = offer.load
        self.ready += 1

    def unfile(self, offer: Offer) -> None:
        """Remove an offer from those that are ready, if it is one of them."""
        if offer.bucket < 0:
            return
        bucket = self.buckets[offer.bucket]
        del bucket[offer]
        if not bucket:
            del self.buckets[offer.bucket]
        offer.bucket = -1
        self.ready -= 1

    def push(self, queue: SubjectQueue) -> None:
        """File a queue under the order of its head, if that is earlier than before."""
        order = queue.order
        known = self.filed.get(queue)
        if known is None or order < known:
            self.filed[queue] = order
            heappush(self.heap, (order, queue.subject, queue))

    def first(self) -> SubjectQueue | None:
        """The queue whose requests go first; None: there is none, or only stale entries were seen.

        One call looks at a bounded number of entries.
        """
        heap, filed = self.heap, self.filed
        for _ in range(SCANNED_AT_ONCE):
            if not heap:
                return None
            order, _, queue = heap[0]
            if filed.get(queue) != order:
                heappop(heap)
            elif not queue.rows:
                heappop(heap)
                del filed[queue]
            elif queue.order != order:
                filed[queue] = queue.order
                heapreplace(heap, (queue.order, queue.subject, queue))
            else:
                return queue
        return None


class SubjectQueue:
    """Requests of one subject that wait in a service."""

    __slots__ = ("again", "fresh", "rows", "subject", "takers", "version")

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.fresh: deque[tuple[int, int, RequestBatch]] = deque()
        """(base, rows, batch), ascending. Entries may name rows that do not wait any more."""
        self.again: list[tuple[int, int, RequestBatch]] = []
        """(base, rows, batch) of requests that came back, as a heap."""
        self.rows = 0
        """Number of rows that the entries name."""
        self.takers: list[WorkersByPattern] = []
        """Offers whose pattern takes the subject, as of `version`."""
        self.version = -1
        """The service's version when `takers` was looked up."""

    def __lt__(self, other: SubjectQueue) -> bool:
        return self.subject < other.subject

    def __hash__(self) -> int:
        # A compiled class that defines an order has no hash by default.
        return id(self)

    @property
    def order(self) -> int:
        """Order of the head."""
        return self.again[0][0] if self.again else self.fresh[0][0] + FRESH

    def head(self) -> tuple[int, int, RequestBatch]:
        """Return the entry that is handed out next; there must be one."""
        return self.again[0] if self.again else self.fresh[0]

    def replace(self, rows: int) -> None:
        """Keep only these rows of the entry that `head` returns."""
        if self.again:
            base, before, batch = self.again[0]
            if rows:
                heapreplace(self.again, (base, rows, batch))
            else:
                heappop(self.again)
        else:
            base, before, batch = self.fresh[0]
            if rows:
                self.fresh[0] = (base, rows, batch)
            else:
                self.fresh.popleft()
        self.rows += rows.bit_count() - before.bit_count()


class Service:
    """One service: its settings, the requests in its queue, and the offers of its workers."""

    __slots__ = (
        "absent",
        "batches",
        "by_pattern",
        "by_subject",
        "dead",
        "delayed",
        "edited",
        "held",
        "index",
        "level",
        "making",
        "name",
        "new_patterns",
        "new_subjects",
        "number",
        "offers",
        "orphans",
        "prefetch",
        "reserved_rows",
        "reserved_size",
        "row",
        "rows",
        "size",
        "state",
        "turns",
        "version",
    )

    def __init__(self, row: ServiceRow) -> None:
        self.row = row
        self.name = row.name
        self.number = row.number
        self.level = int(Level[row.settings.level.upper()])
        """The level of a confirm that level 0 of a command stands for."""
        self.edited: ServiceSettings | None = None
        """Settings that are on their way into the log: the next edit begins from them."""
        self.state = DRAFT
        self.making = 0
        """Changes that make it and are on their way by themselves, without requests."""
        self.batches: dict[int, RequestBatch] = {}
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
        self.by_subject: dict[str, SubjectQueue] = {}
        self.index = Index(programs_max=PROGRAMS_MAX)
        self.by_pattern: dict[int, WorkersByPattern] = {}
        """Number of a pattern -> the offers that have it."""
        self.turns: dict[WorkersByPattern, None] = {}
        """Offers by pattern for which something may wait, in turn."""
        self.version = 0
        """Number of changes of `by_pattern`."""
        self.prefetch = 1
        """Requests that one of its workers does in PREFETCH_MS, by those that came back last."""
        self.offers: dict[Offer, None] = {}
        self.orphans: dict[str, InFlight] = {}
        """Holder -> the requests that it held when the broker ended."""
        self.absent = AbsentHolders()
        self.new_patterns: deque[tuple[WorkersByPattern, Iterator[SubjectQueue]]] = deque()
        """New patterns, and the queues that each is still to be compared with."""
        self.new_subjects: dict[SubjectQueue, None] = {}
        """Queues in which requests wait and whose takers are still to be found."""
        self.dead = 0
        """Dead letters since the broker began."""

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

    # --- offers -----------------------------------------------------------------------------

    def join(self, offer: Offer) -> None:
        """Add an offer. Raises PatternError: nothing was changed."""
        pattern = offer.pattern
        if pattern in (["all"], ["topic", "#"]) or compile_pattern(pattern).canonical == ("all",):
            number = EVERYTHING
        else:
            number = self.index.add(pattern)
        workers = self.by_pattern.get(number)
        if workers is None:
            workers = self.by_pattern[number] = WorkersByPattern(number)
            self.version += 1
            if self.by_subject:
                self.new_patterns.append((workers, iter(list(self.by_subject.values()))))
        workers.offers += 1
        offer.workers = workers
        self.offers[offer] = None

    def leave(self, offer: Offer) -> None:
        """Remove an offer."""
        workers = offer.workers
        if workers is None:
            return
        workers.unfile(offer)
        offer.workers = None
        del self.offers[offer]
        workers.offers -= 1
        if workers.number != EVERYTHING:
            self.index.discard(workers.number)
        if not workers.offers:
            del self.by_pattern[workers.number]
            self.turns.pop(workers, None)
            self.version += 1
            workers.heap.clear()
            workers.filed.clear()

    def clear(self) -> None:
        """Forget all queues: the batches in stale entries would keep the service in memory."""
        self.by_subject.clear()
        self.new_subjects.clear()

    def refile(self, offer: Offer) -> bool:
        """File an offer whose credit or load has changed; True: it is ready."""
        workers = offer.workers
        if workers is None:
            return False
        workers.unfile(offer)
        if offer.able(1) <= 0:
            return False
        workers.file(offer)
        self.turns[workers] = None
        return True

    def is_slow(self, queue: SubjectQueue) -> bool:
        """Whether finding a queue's takers takes a comparison with regular expressions."""
        return queue.version != self.version and self.index.slow

    def takers_of(self, queue: SubjectQueue) -> list[WorkersByPattern]:
        """Offers, by pattern, that take a queue's subject."""
        if queue.version != self.version:
            by_pattern = self.by_pattern
            found = [by_pattern[EVERYTHING]] if EVERYTHING in by_pattern else []
            if len(by_pattern) > len(found):
                numbers = self.index.match((queue.subject,), ())
                found += [by_pattern[number] for number in numbers]
            queue.takers = found
            queue.version = self.version
        return queue.takers

    # --- queues of subjects -----------------------------------------------------------------

    def queue_of(self, subject: str, *, waits: bool = True) -> SubjectQueue:
        """The queue of a subject, made if there is none. waits: a request is about to wait in it.

        A queue in which nothing is about to wait is not kept beyond SUBJECTS_KEPT.
        """
        queue = self.by_subject.get(subject)
        if queue is None:
            queue = SubjectQueue(subject)
            if waits or len(self.by_subject) < SUBJECTS_KEPT:
                self.by_subject[subject] = queue
        return queue

    def wait(self, batch: RequestBatch, mask: int, *, again: bool) -> None:
        """Let rows wait. again: they came back, and go before rows that were never handed out."""
        for subject, rows in batch.subjects(mask):
            queue = self.queue_of(subject)
            fresh = queue.fresh
            if again or (fresh and fresh[-1][0] >= batch.base):
                heappush(queue.again, (batch.base, rows, batch))
            else:
                fresh.append((batch.base, rows, batch))
            queue.rows += rows.bit_count()
            if self.is_slow(queue):
                self.new_subjects[queue] = None
                continue
            for workers in self.takers_of(queue):
                self.push(workers, queue)

    def push(self, workers: WorkersByPattern, queue: SubjectQueue) -> None:
        """Note that requests wait in a queue that a pattern takes."""
        workers.push(queue)
        if workers.ready:
            self.turns[workers] = None

    def emptied(self, queue: SubjectQueue) -> None:
        """Forget a queue that has become empty, if there are many."""
        if len(self.by_subject) > SUBJECTS_KEPT:
            # By `takers`, not takers_of(): it is filed where it was looked up last.
            for workers in queue.takers:
                workers.filed.pop(queue, None)
            self.by_subject.pop(queue.subject, None)

    def scan(self, more: Callable[[], bool]) -> None:
        """Compare new subjects and new patterns with each other, as far as one turn may.

        more: whether the turn has time left. It is asked after each comparison with expressions.
        """
        budget = SCANNED_AT_ONCE
        while self.new_subjects and budget > 0:
            queue = next(iter(self.new_subjects))
            del self.new_subjects[queue]
            slow = self.is_slow(queue)
            budget -= SLOW_LOOK if slow else 1
            if queue.rows:
                for workers in self.takers_of(queue):
                    self.push(workers, queue)
            if slow and not more():
                return
        while self.new_patterns and budget > 0:
            workers, queues = self.new_patterns[0]
            other = next(queues, None)
            if other is None or self.by_pattern.get(workers.number) is not workers:
                self.new_patterns.popleft()
                continue
            slow = self.is_slow(other)
            budget -= SLOW_LOOK if slow else 1
            if other.rows and workers in self.takers_of(other):
                self.push(workers, other)
            if slow and not more():
                return

    def next_queue(self) -> SubjectQueue | None:
        """The queue whose turn it is among those that a ready offer takes; None: there is none."""
        turns = self.turns
        while turns:
            workers = next(iter(turns))
            if workers.ready:
                queue = workers.first()
                if queue is not None:
                    return queue
                if workers.heap:
                    # More entries are stale: the next turn goes on.
                    return None
            del turns[workers]
        return None

    # --- the choice of the worker -----------------------------------------------------------

    def allot(
        self, queue: SubjectQueue, mask: int, cost: int, waiting: int
    ) -> list[tuple[Offer, int]]:
        """Share rows of a batch out among the ready offers, and take credit for them.

        cost: bytes that WORK with some of the rows takes at most. waiting: number of rows that
        the ready offers have to share. Returns (offer, rows). Rows that are in no share are left
        because no offer is ready any more.
        """
        takers = self.takers_of(queue)
        shares: list[tuple[Offer, int]] = []
        left = mask.bit_count()
        while left:
            offer, ready = _least(takers)
            if offer is None:
                break
            most = offer.able(cost)
            workers = offer.workers
            assert workers is not None, "an offer that is filed has joined"
            workers.unfile(offer)
            if most <= 0:
                # The offer has no credit for so large a batch. More credit files it again.
                continue
            count = min(most, left, max(-(-waiting // ready), self.prefetch))
            rows = mask if count == left else lowest(mask, count)
            mask ^= rows
            left -= count
            waiting -= count
            offer.left_records -= count
            offer.left_bytes -= cost
            offer.load += count
            shares.append((offer, rows))
            if offer.able(1) > 0:
                workers.file(offer)
        return shares

    def measure(self, count: int, took_ms: int) -> None:
        """Set `prefetch` by requests that were completed: their number, and the time they took.

        It rises at once, to twice itself at most, and falls by a quarter of the difference: a
        measured time is often too long, by what else the machine did, and never too short.
        """
        # A time of 0 ms is one of less than 1 ms.
        done = count * PREFETCH_MS // max(took_ms, 1)
        if done > self.prefetch:
            self.prefetch = min(done, 2 * self.prefetch, PREFETCH_MAX)
        else:
            self.prefetch -= (self.prefetch - max(done, 1) + 3) // 4

    @property
    def runnable(self) -> bool:
        """Whether a request may be handed out at once, or a comparison is still to be made."""
        return bool(self.new_patterns or self.new_subjects or self.turns)


def _least(takers: list[WorkersByPattern]) -> tuple[Offer | None, int]:
    """The ready offer with the smallest load, and the number of ready offers."""
    if len(takers) == 1:
        workers = takers[0]
        if not workers.ready:
            return None, 0
        buckets = workers.buckets
        least = min(buckets) if len(buckets) > 1 else next(iter(buckets))
        return next(iter(buckets[least])), workers.ready
    best: WorkersByPattern | None = None
    fewest = ready = 0
    for workers in takers:
        if workers.ready:
            ready += workers.ready
            least = min(workers.buckets)
            if best is None or least < fewest:
                best, fewest = workers, least
    if best is None:
        return None, 0
    return next(iter(best.buckets[fewest])), ready
