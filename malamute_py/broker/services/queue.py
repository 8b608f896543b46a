"""A service queue at run time: which requests wait in which order, and who is ready for them.

Owns the order of hand-out and the choice of the worker. The rules: among requests of one subject,
and among all that one pattern takes, those that came back go first, then the older number; a
request goes to the ready offer that has the fewest in hand, in turn between equals, and to one
offer go at most its share of what waits, or what it is known to do in an instant; what no offer
takes waits and is never looked at again until one comes that does. Rows of a batch are bitmaps
throughout: a batch costs about what a lone request does. Source: docs/design.md, Queues and the
checkpoint; the Malamute whitepaper on services (References).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final

from malamute_protocol.address import NAME_BYTES_MAX
from malamute_protocol.commands import Level
from malamute_protocol.commands import Offer as OfferCommand
from malamute_py.broker.links.links import Link, Owner, Receiver
from malamute_py.broker.services.absent import AbsentHolders
from malamute_py.broker.structures.bitmaps import lowest
from malamute_py.changelog.settings import ServiceSettings
from malamute_py.changelog.tables import RequestRow, ServiceRow
from malamute_py.matcher import Index, compile_pattern

if TYPE_CHECKING:
    from malamute_py.broker.log.bodies import Body

DRAFT: Final = 0
"""State of a service that the log does not have: each batch of requests brings what makes it."""
STANDING: Final = 1
"""State of a service that the log has."""
REMOVING: Final = 2
"""State of a service that is being removed or has gone."""
FRESH: Final = 1 << 62
"""Added to the order of what was never handed out: all that came back goes before it."""
SUBJECTS_KEPT: Final = 1_024
"""Lanes that stay although nothing waits in them: the next request needs not make one."""
DEAD: Final = ".dead"
"""Added to a service's name: its dead-letter mailbox, unless another was named."""
EVERYTHING: Final = -1
"""Number of the pattern that takes every subject."""
PREFETCH_MS: Final = 2
"""What a worker does in so little time goes to one: shared out among eight, 64 quick requests
cost three times as much in messages as they cost to do, and come back later."""
PREFETCH_MAX: Final = 64
SCANNED_AT_ONCE: Final = 256
"""Lanes that a new pattern is compared with in one step, or that it has outlived."""
SLOW_LOOK: Final = 64
"""A subject that is compared with expressions counts as so many lanes: with one expression it may
take most of a millisecond, with 64 some milliseconds."""

PROGRAMS_MAX: Final = 3_000
"""What regular expressions of all offers of a service may count: a REQUEST of many subjects is
matched in one go. See matcher/expressions.py."""


class RequestBatch:
    """What is left of one batch of requests, at run time."""

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
        """Subject -> its rows, once they were looked at."""
        self.leases: list[Lease] = []
        """Grants: which holder has which of its rows in hand."""
        self.moving = 0
        """Rows whose hand-out or return is on its way into the log."""
        self.returning = 0
        """Rows among them whose return is on its way."""
        self.ending = 0
        """Rows whose end is."""
        self.delayed = 0
        """Rows that wait, but not yet."""
        self.pauses: dict[Pause, None] | None = None
        """When they may be handed out again, if some have waited."""
        self.slot = -1
        """Slot of its deadline in the wheel."""
        self.buried = 0
        """Number of the dead-letter mailbox that some of it lies in; 0: none does."""

    def __lt__(self, other: RequestBatch) -> bool:
        # Two entries of a heap may name the same rows of the same batch.
        return self.base < other.base

    def __hash__(self) -> int:
        # Compiled, a class with an order has no hash unless it says so.
        return id(self)

    @property
    def free(self) -> int:
        """Rows that may be handed out."""
        return self.row.waiting & ~(self.moving | self.ending | self.delayed)

    @property
    def unheld(self) -> int:
        """Rows that no worker has, nor is about to get: who had them last may end them."""
        return (self.row.waiting & ~self.moving | self.returning) & ~self.ending

    @property
    def alive(self) -> int:
        """Rows that have not left and are not about to."""
        return self.row.left & ~self.ending

    @property
    def leased(self) -> int:
        """Rows that a worker has in hand."""
        rows = 0
        for lease in self.leases:
            rows |= lease.rows
        return rows

    def subjects(self, mask: int) -> list[tuple[str, int]]:
        """The rows of a mask by subject, in order of their first row."""
        subjects = self.row.put.subjects
        if len(subjects) == 1:
            return [(subjects[0], mask)]
        masks = self.masks
        if masks is None:
            masks = self.masks = {}
            for row, subject in enumerate(subjects):
                masks[subject] = masks.get(subject, 0) | (1 << row)
        return [(subject, rows & mask) for subject, rows in masks.items() if rows & mask]

    @property
    def weight(self) -> int:
        """How many places its rows may wait in."""
        return 1 if len(self.row.put.subjects) == 1 else self.row.put.count


class Pause:
    """Rows of one batch that wait again from some time on."""

    __slots__ = ("batch", "rows", "slot")

    def __init__(self, batch: RequestBatch, rows: int) -> None:
        self.batch = batch
        self.rows = rows
        self.slot = -1


class Lease:
    """Rows of one batch that were handed to one holder together."""

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
        """hand_out: which one it was, since the broker began; 0: one before."""
        self.hand_out = hand_out
        self.batch = batch
        self.rows = rows
        self.in_flight = in_flight
        self.at_ms = at_ms
        self.lease_ms = lease_ms
        self.due_ms = at_ms + lease_ms
        """When the lease is over, unless the worker is heard of."""
        self.slot = -1


class InFlight:
    """What one worker has in hand of one service: by an offer, or from before a restart."""

    __slots__ = ("bases", "ended", "holder", "leases", "offer")

    def __init__(self, holder: str, offer: Offer | None) -> None:
        self.holder = holder
        self.offer = offer
        """None: it has ended, or was before a restart."""
        self.ended = False
        """Its offer has."""
        self.leases: dict[int, list[Lease]] = {}
        self.bases: list[int] = []
        """Numbers of the batches in `grants`, ascending."""

    def leave(self) -> None:
        """The offer has ended; an offer and its hands are not to hold each other from then on."""
        self.offer = None
        self.ended = True

    def add(self, lease: Lease) -> None:
        """The worker has these rows."""
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
        """The worker has nothing more of a grant."""
        batch = lease.batch
        batch.leases.remove(lease)
        known = self.leases[batch.base]
        known.remove(lease)
        if not known:
            del self.leases[batch.base]
            del self.bases[bisect_left(self.bases, batch.base)]

    def of(self, number: int) -> list[Lease] | None:
        """The grants of the batch that a request's number may lie in."""
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
        """How many requests these are."""
        return sum(lease.rows.bit_count() for one in self.leases.values() for lease in one)


class PendingWork:
    """Rows in hand whose bodies are being read back, or that must not overtake such rows."""

    __slots__ = ("answered", "batch", "body", "cost", "hand_out", "rows")

    def __init__(self, batch: RequestBatch, rows: int, cost: int, hand_out: int) -> None:
        """hand_out: the one that gave the worker these rows."""
        self.batch = batch
        self.rows = rows
        self.cost = cost
        self.hand_out = hand_out
        self.body: Body | None = None
        self.answered = False


class Offer(Receiver):
    """One offer of one link, and what it has in hand."""

    __slots__ = (
        "begun",
        "bucket",
        "coming",
        "in_flight",
        "late",
        "lease_ms",
        "load",
        "pattern",
        "pattern_bytes",
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
        self.in_flight = InFlight(link.holder, self)
        self.begun = 0
        """The next number when it was accepted."""
        self.load = 0
        """Requests that it has, or that are on their way to it."""
        self.lease_ms = 0
        self.late = False
        """Its last reply came too late, and that was said."""
        self.coming: deque[PendingWork] = deque()
        """What it has in hand and has not been sent yet, in order."""
        self.bucket = -1
        """In hand, as its crew has filed it; -1: it is not ready."""

    def able(self, cost: int) -> int:
        """How many requests it may be given now, of a batch that costs so many bytes.

        Exact in records, and in bytes; one request too large is allowed to an empty hand.
        """
        most = self.left_records
        if most <= 0 or self.ended or self.link.room <= 0:
            return 0
        if self.left_bytes >= cost:
            return most
        return 0 if self.load else 1


class WorkersByPattern:
    """The offers of one service that have the same pattern."""

    __slots__ = ("buckets", "filed", "heap", "number", "offers", "ready")

    def __init__(self, number: int) -> None:
        self.number = number
        self.offers = 0
        self.buckets: dict[int, dict[Offer, None]] = {}
        """How many in hand -> the ready offers that have so many, in turn."""
        self.ready = 0
        self.heap: list[tuple[int, str, SubjectQueue]] = []
        """Lanes that it takes, by the order of what waits in them; some entries are stale."""
        self.filed: dict[SubjectQueue, int] = {}
        """Lane -> the order by which it stands in the heap."""

    def file(self, offer: Offer) -> None:
        """An offer is ready."""
        bucket = self.buckets.get(offer.load)
        if bucket is None:
            bucket = self.buckets[offer.load] = {}
        bucket[offer] = None
        offer.bucket = offer.load
        self.ready += 1

    def unfile(self, offer: Offer) -> None:
        """An offer is not ready any more, or will be filed anew."""
        if offer.bucket < 0:
            return
        bucket = self.buckets[offer.bucket]
        del bucket[offer]
        if not bucket:
            del self.buckets[offer.bucket]
        offer.bucket = -1
        self.ready -= 1

    def push(self, queue: SubjectQueue) -> None:
        """Something waits in a lane, or something earlier than before."""
        order = queue.order
        known = self.filed.get(queue)
        if known is None or order < known:
            self.filed[queue] = order
            heappush(self.heap, (order, queue.subject, queue))

    def first(self) -> SubjectQueue | None:
        """The lane whose turn it is; None too when a step has looked at stale entries enough."""
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
    """Requests of one subject that wait."""

    __slots__ = ("again", "fresh", "rows", "subject", "takers", "version")

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.fresh: deque[tuple[int, int, RequestBatch]] = deque()
        """(base, rows, batch), ascending. Rows that wait no more may still be in it."""
        self.again: list[tuple[int, int, RequestBatch]] = []
        """(base, rows, batch) of what came back, as a heap."""
        self.rows = 0
        """How many rows the entries name."""
        self.takers: list[WorkersByPattern] = []
        self.version = -1
        """Version of the service's takers when `takers` was looked up."""

    def __lt__(self, other: SubjectQueue) -> bool:
        return self.subject < other.subject

    def __hash__(self) -> int:
        # Compiled, a class with an order has no hash unless it says so.
        return id(self)

    @property
    def order(self) -> int:
        """Order of what is handed out next."""
        return self.again[0][0] if self.again else self.fresh[0][0] + FRESH

    def head(self) -> tuple[int, int, RequestBatch]:
        """What is handed out next."""
        return self.again[0] if self.again else self.fresh[0]

    def replace(self, rows: int) -> None:
        """Let only these rows of the head wait on."""
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
    """One service queue."""

    __slots__ = (
        "absent",
        "batches",
        "by_pattern",
        "by_subject",
        "coming",
        "dead",
        "delayed",
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
        """What level 0 stands for."""
        self.coming: ServiceSettings | None = None
        """On their way into the log: the next edit begins from them."""
        self.state = DRAFT
        self.making = 0
        """Changes that make it and are on their way by themselves, without requests."""
        self.batches: dict[int, RequestBatch] = {}
        self.rows = 0
        """Requests in it: waiting or in hand."""
        self.held = 0
        self.delayed = 0
        self.size = 0
        """Bytes of its batches."""
        self.reserved_rows = 0
        """Rows on their way into the log, which count already."""
        self.reserved_size = 0
        self.by_subject: dict[str, SubjectQueue] = {}
        self.index = Index(programs_max=PROGRAMS_MAX)
        self.by_pattern: dict[int, WorkersByPattern] = {}
        """By number of the pattern."""
        self.turns: dict[WorkersByPattern, None] = {}
        """Crews that may have something to be handed out, in turn."""
        self.version = 0
        """Counts the changes of `crews`."""
        self.prefetch = 1
        """Requests that one of its workers does in LOT_MS, by what came back last."""
        self.offers: dict[Offer, None] = {}
        self.orphans: dict[str, InFlight] = {}
        """Holder -> what it had in hand when the broker ended."""
        self.absent = AbsentHolders()
        """Holder -> what it may end as long as no worker has it: a lost link had it in hand."""
        self.new_patterns: deque[tuple[WorkersByPattern, Iterator[SubjectQueue]]] = deque()
        """New patterns, with the lanes that they are still to be compared with."""
        self.new_subjects: dict[SubjectQueue, None] = {}
        """Lanes in which something waits and whose crews are to be found, some in each step."""
        self.dead = 0
        """Dead letters since the start."""

    @property
    def memory(self) -> bool:
        """Its requests are kept in memory only."""
        return self.row.settings.memory

    @property
    def resource(self) -> str:
        """As what its bytes count for who sent them."""
        return "request_memory_bytes" if self.row.settings.memory else "request_bytes"

    @property
    def dead_letters(self) -> str:
        """Name of the mailbox for what could not be done."""
        return self.row.settings.dead_letters or self.default_dead_letters

    @property
    def default_dead_letters(self) -> str:
        """Return the dead-letter mailbox of a service that names none."""
        return self.name[: NAME_BYTES_MAX - len(DEAD)] + DEAD

    # --- who offers -----------------------------------------------------------------------

    def join(self, offer: Offer) -> None:
        """Take up an offer. Raises PatternError: nothing was changed."""
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
        """Forget an offer."""
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

    def end(self) -> None:
        """Let go of lanes: the batches that their stale entries name would hold the service."""
        self.by_subject.clear()
        self.new_subjects.clear()

    def refile(self, offer: Offer) -> bool:
        """Its credit or what it has in hand changed; True when it is ready."""
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
        """Whether to find a lane's crews may take long: by expressions, and not known yet."""
        return queue.version != self.version and self.index.slow

    def takers_of(self, queue: SubjectQueue) -> list[WorkersByPattern]:
        """The crews that take a lane's subject."""
        if queue.version != self.version:
            by_pattern = self.by_pattern
            found = [by_pattern[EVERYTHING]] if EVERYTHING in by_pattern else []
            if len(by_pattern) > len(found):
                numbers = self.index.match((queue.subject,), ())
                found += [by_pattern[number] for number in numbers]
            queue.takers = found
            queue.version = self.version
        return queue.takers

    # --- what waits -----------------------------------------------------------------------

    def queue_of(self, subject: str, *, waits: bool = True) -> SubjectQueue:
        """The lane of a subject. waits: something is to wait in it."""
        queue = self.by_subject.get(subject)
        if queue is None:
            queue = SubjectQueue(subject)
            if waits or len(self.by_subject) < SUBJECTS_KEPT:
                self.by_subject[subject] = queue
        return queue

    def wait(self, batch: RequestBatch, mask: int, *, again: bool) -> None:
        """Let rows wait. again: they came back, and go before those that did not."""
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
        """Something waits that a crew takes."""
        workers.push(queue)
        if workers.ready:
            self.turns[workers] = None

    def emptied(self, queue: SubjectQueue) -> None:
        """Nothing waits in a lane any more."""
        if len(self.by_subject) > SUBJECTS_KEPT:
            # Those that it was filed for, if others take its subject since.
            for workers in queue.takers:
                workers.filed.pop(queue, None)
            self.by_subject.pop(queue.subject, None)

    def scan(self, more: Callable[[], bool]) -> None:
        """Compare new patterns with the subjects that wait, as far as one step may.

        more: whether the step has time left, which is asked after a comparison with expressions.
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
        """The lane whose turn it is among those that a ready offer takes."""
        turns = self.turns
        while turns:
            workers = next(iter(turns))
            if workers.ready:
                queue = workers.first()
                if queue is not None:
                    return queue
                if workers.heap:
                    # More that is stale: the next step goes on.
                    return None
            del turns[workers]
        return None

    # --- who gets what ----------------------------------------------------------------------

    def allot(
        self, queue: SubjectQueue, mask: int, cost: int, waiting: int
    ) -> list[tuple[Offer, int]]:
        """Share rows of a batch out among the ready offers; credit is taken.

        cost: bytes that WORK with some of the rows takes at most; what is not spent comes back.
        waiting: how many rows the ready offers have to share. Rows that are in nobody's
        share are left because nobody is ready for them any more.
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
            assert workers is not None, "who is filed has a crew"
            workers.unfile(offer)
            if most <= 0:
                # Of this size it can take none; it is filed again when that changes.
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
        """So many requests came back done, so long after they were handed out.

        A lot grows at once, to twice itself at most, and shrinks by a quarter of what it is too
        large: a time is often too long by what the machine did beside, and never too short.
        """
        # What took no measured time took less than a millisecond, and no less is known.
        done = count * PREFETCH_MS // max(took_ms, 1)
        if done > self.prefetch:
            self.prefetch = min(done, 2 * self.prefetch, PREFETCH_MAX)
        else:
            self.prefetch -= (self.prefetch - max(done, 1) + 3) // 4

    @property
    def runnable(self) -> bool:
        """Whether something may be handed out at once."""
        return bool(self.new_patterns or self.new_subjects or self.turns)


def _least(takers: list[WorkersByPattern]) -> tuple[Offer | None, int]:
    """The ready offer with the fewest in hand, and how many are ready."""
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
