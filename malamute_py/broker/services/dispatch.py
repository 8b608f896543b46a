"""Dispatch: which request goes next, and to which worker.

Owns the order of hand-out and the choice of the worker, for one service. The rules:

- Among the requests of one subject, and among all that one pattern takes, those of the highest
  priority go first; of these those that came back, then those with the lower number.
- No priority starves the others: of OVERTAKEN_MAX + 1 turns in a row of a pattern one goes to the
  request that would be first without priorities.
- A request goes to the ready offer that holds the fewest, in turn between equals. One offer gets
  its share of what waits, or what its worker does in PREFETCH_MS if that is more.
- A request that no offer takes is not looked at again until an offer comes that takes it.

Requests of one subject and priority wait in a queue. An entry of a queue names rows of a batch,
which are a bitmap: a batch costs about what a lone request does. The order of an entry is the
number that the heaps sort by; the head of a queue is its entry of the least order. An offer is
ready, and filed, while it has credit; its load is how many requests it holds. Offers of the same
pattern are kept together. An entry is stale if it no longer tells where its queue or rows are; it
is dropped when it comes up. Source: docs/design.md, Queues and the checkpoint; the Malamute
whitepaper on services (References).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Final, Generic, TypeVar

from malamute_protocol.commands import Offer as OfferCommand
from malamute_py.broker.links.link import Link, Owner, Receiver
from malamute_py.broker.structures.bitmaps import lowest
from malamute_py.matcher import Index, compile_pattern

FRESH: Final = 1 << 62
"""Added to the order of requests that were never handed out: they go after all that came back."""
SUBJECTS_KEPT: Final = 1_024
"""Queues of subjects that are kept while they are empty, for the next request of the subject."""
_FEW: Final = 8
"""Entries of one subject that a list holds: taking them from its front is as fast as a deque."""
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


OVERTAKEN_MAX: Final = 32
"""Turns in a row, of one pattern, that go to requests of a higher priority while one that would be
first without priorities waits."""


class Taker(Receiver):
    """An offer, as far as the choice of the worker needs it."""

    __slots__ = ("bucket", "load", "pattern")

    def __init__(self, owner: Owner, link: Link, command: OfferCommand) -> None:
        super().__init__(
            owner, link, command.subscription, command.credit_records, command.credit_bytes
        )
        self.pattern = command.pattern
        self.load = 0
        """Requests that it holds or that are on their way to it."""
        self.bucket = -1
        """The load that it is filed under among the ready offers; -1: it is not ready."""

    def able(self, cost: int) -> int:
        """How many requests it may be given now. cost: bytes of the batch that they are of.

        Credit is exact in records and in bytes, but an offer that holds nothing may be given one
        request that is larger than its credit in bytes: otherwise it would never get that one.
        """
        most = self.left_records
        if most <= 0 or self.ended or self.link.room <= 0:
            return 0
        if self.left_bytes >= cost:
            return most
        return 0 if self.load else 1


Batch = TypeVar("Batch")
"""Requests that were sent together: an entry of a queue names rows of them."""
Worker = TypeVar("Worker", bound=Taker)


class Filed(Generic[Batch, Worker]):
    """Queues of subjects in a heap, by the order of their heads: the first one goes next."""

    __slots__ = ("filed", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[int, str, SubjectQueue[Batch, Worker]]] = []
        """Queues by the order of their heads. Entries may be stale."""
        self.filed: dict[SubjectQueue[Batch, Worker], int] = {}
        """Queue -> the order under which it stands in the heap."""

    def file_queue(self, queue: SubjectQueue[Batch, Worker]) -> None:
        """File a queue under the order of its head, if that is earlier than before."""
        order = queue.order
        known = self.filed.get(queue)
        if known is None or order < known:
            self.filed[queue] = order
            heappush(self.heap, (order, queue.subject, queue))

    def head(self) -> SubjectQueue[Batch, Worker] | None:
        """The queue whose requests go first; None: there is none, or only stale entries were seen.

        One call looks at a bounded number of entries.
        """
        heap, filed = self.heap, self.filed
        for _ in range(SCANNED_AT_ONCE):
            if not heap:
                return None
            order, _, queue = heap[0]
            if filed.get(queue) != order:
                heappop(heap)  # The queue was filed anew under another order.
            elif not queue.rows:
                heappop(heap)  # Nothing waits in the queue any more.
                del filed[queue]
            elif queue.order != order:  # Its head was handed out: it is filed under the next one.
                filed[queue] = queue.order
                heapreplace(heap, (queue.order, queue.subject, queue))
            else:
                return queue
        return None


class Priorities(Generic[Batch, Worker]):
    """Queues of one pattern whose requests have a priority above 0."""

    __slots__ = ("by_priority", "overdue", "overtaken")

    def __init__(self) -> None:
        self.by_priority: dict[int, Filed[Batch, Worker]] = {}
        """Priority -> the queues, the highest first."""
        self.overtaken = 0
        """Turns in a row that went to a higher priority while an older request waited."""
        self.overdue: tuple[SubjectQueue[Batch, Worker], int, int] | None = None
        """Queue that has its turn whatever its priority, with order and rows of the entry that it
        was given the turn for, until some of that entry is handed out."""

    def queues_of(self, priority: int) -> Filed[Batch, Worker]:
        """The queues of a priority, in which one is to be filed or forgotten."""
        found = self.by_priority.get(priority)
        if found is None:
            self.by_priority[priority] = found = Filed()
            self.by_priority = dict(sorted(self.by_priority.items(), reverse=True))
        return found

    @property
    def unfinished(self) -> bool:
        """Whether entries are left after first() has found none: it looks at a bounded number."""
        return any(filed.heap for filed in self.by_priority.values())

    def first(
        self, plain: SubjectQueue[Batch, Worker] | None
    ) -> SubjectQueue[Batch, Worker] | None:
        """Return the queue of the highest priority, or the oldest one after OVERTAKEN_MAX turns.

        The oldest is the one that would be first without priorities. plain: the first queue without
        a priority. None: nothing waits.
        """
        if self.overdue is not None:
            queue, order, rows = self.overdue
            # It keeps its turn as long as its head is the entry that it was given the turn for.
            if queue.rows and queue.head()[:2] == (order, rows):
                return queue
            self.overdue = None
        highest = oldest = None
        for filed in self.by_priority.values():
            one = filed.head()
            if one is not None:
                highest = highest or one
                if oldest is None or one.order < oldest.order:
                    oldest = one
        if highest is None or oldest is None:
            self.overtaken = 0
            return plain
        if plain is not None and plain.order < oldest.order:
            oldest = plain
        if oldest is highest:
            self.overtaken = 0
            return highest
        self.overtaken += 1
        if self.overtaken <= OVERTAKEN_MAX:
            return highest
        self.overtaken = 0
        order, rows, _ = oldest.head()
        self.overdue = oldest, order, rows
        return oldest


class WorkersByPattern(Filed[Batch, Worker]):
    """The offers of one service that have the same pattern, and the queues that it takes.

    Offers that are ready are filed under their load, queues under the order of their heads, and
    apart from others where their requests have a priority.
    """

    __slots__ = ("buckets", "number", "offers", "priorities", "ready")

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        """Number of the pattern in the service's index, or EVERYTHING."""
        self.offers = 0
        self.buckets: dict[int, dict[Worker, None]] = {}
        """Load -> the ready offers of that load, that whose turn it is first."""
        self.ready = 0
        """Number of ready offers."""
        self.priorities: Priorities[Batch, Worker] | None = None
        """Queues with a priority; None: there was none yet."""

    def file(self, offer: Worker) -> None:
        """File an offer that is ready under its load."""
        bucket = self.buckets.get(offer.load)
        if bucket is None:
            bucket = self.buckets[offer.load] = {}
        bucket[offer] = None
        offer.bucket = offer.load
        self.ready += 1

    def unfile(self, offer: Worker) -> None:
        """Remove an offer from those that are ready, if it is one of them."""
        if offer.bucket < 0:
            return
        bucket = self.buckets[offer.bucket]
        del bucket[offer]
        if not bucket:
            del self.buckets[offer.bucket]
        offer.bucket = -1
        self.ready -= 1

    def least(self) -> Worker:
        """The ready offer with the smallest load, in turn between equals; there must be one."""
        buckets = self.buckets
        fewest = min(buckets) if len(buckets) > 1 else next(iter(buckets))
        return next(iter(buckets[fewest]))

    def heap_of(self, queue: SubjectQueue[Batch, Worker]) -> Filed[Batch, Worker]:
        """The heap in which a queue is filed: of its priority, or of those without one."""
        if not queue.priority:
            return self
        if self.priorities is None:
            self.priorities = Priorities()
        return self.priorities.queues_of(queue.priority)

    def first(self) -> SubjectQueue[Batch, Worker] | None:
        """The queue whose turn it is; None: there is none, or only stale entries were seen."""
        if self.priorities is None:
            return self.head()
        return self.priorities.first(self.head())

    @property
    def unfinished(self) -> bool:
        """Whether entries are left after first() has found none: it looks at a bounded number."""
        return bool(self.heap) or (self.priorities is not None and self.priorities.unfinished)


class SubjectQueue(Generic[Batch, Worker]):
    """Requests of one subject and one priority that wait in a service."""

    __slots__ = ("again", "fresh", "priority", "rows", "subject", "takers", "version")

    def __init__(self, subject: str, priority: int = 0) -> None:
        self.subject = subject
        self.priority = priority
        self.fresh: list[tuple[int, int, Batch]] | deque[tuple[int, int, Batch]] = []
        """(base of the batch, rows, batch), ascending; the order of an entry is base + FRESH.
        Entries may name rows that do not wait any more."""
        self.again: list[tuple[int, int, Batch]] = []
        """(order, rows, batch) as a heap: requests that came back, and those that arrive after
        requests of higher numbers, so that `fresh` stays ascending."""
        self.rows = 0
        """Number of rows that the entries name."""
        self.takers: list[WorkersByPattern[Batch, Worker]] = []
        """Offers, by pattern, that take the subject, as they were at `version`."""
        self.version = -1
        """Dispatch.version when `takers` was looked up; -1: never."""

    def __lt__(self, other: SubjectQueue[Batch, Worker]) -> bool:
        return self.subject < other.subject

    def __hash__(self) -> int:
        # A compiled class that defines an order has no hash by default.
        return id(self)

    @property
    def order(self) -> int:
        """Order of the head: what an entry of `again` begins with, or base + FRESH in `fresh`."""
        if self.again and self._heap_first:
            return self.again[0][0]
        return self.fresh[0][0] + FRESH

    @property
    def _heap_first(self) -> bool:
        """Whether the head is an entry of `again`, in which there must be one."""
        fresh = self.fresh
        return not fresh or self.again[0][0] < fresh[0][0] + FRESH

    def head(self) -> tuple[int, int, Batch]:
        """Return the entry that is handed out next, (order or base, rows, batch).

        There must be one.
        """
        return self.again[0] if self.again and self._heap_first else self.fresh[0]

    def append(self, base: int, rows: int, batch: Batch) -> None:
        """Let rows of a batch that were never handed out wait after all others of `fresh`."""
        # An empty deque takes 760 bytes, and many subjects have a single request.
        if len(self.fresh) == _FEW and type(self.fresh) is list:
            self.fresh = deque(self.fresh)
        self.fresh.append((base, rows, batch))

    def replace(self, rows: int) -> None:
        """Keep only these rows of the entry that `head` returns, as others were handed out.

        rows: 0: the entry leaves the queue.
        """
        if self.again and self._heap_first:
            order, before, batch = self.again[0]
            if rows:
                heapreplace(self.again, (order, rows, batch))
            else:
                heappop(self.again)
        else:
            base, before, batch = self.fresh[0]
            if rows:
                self.fresh[0] = (base, rows, batch)
            else:
                del self.fresh[0]
        self.rows += rows.bit_count() - before.bit_count()


class Dispatch(Generic[Batch, Worker]):
    """The queues of one service's subjects, and the offers that take from them.

    A Service is one. HandOuts asks next_queue() for requests and has allot() share them out.
    """

    __slots__ = (
        "by_pattern",
        "by_subject",
        "direct",
        "index",
        "new_patterns",
        "new_subjects",
        "offers",
        "prefetch",
        "prior",
        "turns",
        "version",
    )

    def __init__(self) -> None:
        self.by_subject: dict[str | tuple[int, str], SubjectQueue[Batch, Worker]] = {}
        """Subject, or (priority, subject) -> its queue."""
        self.index = Index(programs_max=PROGRAMS_MAX)
        """The patterns of all offers, but for EVERYTHING, with a number for each."""
        self.by_pattern: dict[int, WorkersByPattern[Batch, Worker]] = {}
        """Number of a pattern -> the offers that have it."""
        self.turns: dict[WorkersByPattern[Batch, Worker], None] = {}
        """Offers by pattern for which something may wait, in turn."""
        self.version = 0
        """Number of changes of `by_pattern`: each makes what queues know of their takers old."""
        self.prefetch = 1
        """Requests that one of its workers does in PREFETCH_MS, by those completed last."""
        self.offers: dict[Worker, WorkersByPattern[Batch, Worker]] = {}
        """Offer -> the offers of the same pattern, with itself."""
        self.direct: dict[Worker, WorkersByPattern[Batch, Worker]] = self.offers
        """Offers that a new batch may go to at once: all, or none while requests with a priority
        wait."""
        self.prior: dict[SubjectQueue[Batch, Worker], None] = {}
        """Queues in which requests with a priority wait."""
        self.new_patterns: deque[
            tuple[WorkersByPattern[Batch, Worker], Iterator[SubjectQueue[Batch, Worker]]]
        ] = deque()
        """New patterns, and the queues that each is still to be compared with."""
        self.new_subjects: OrderedDict[SubjectQueue[Batch, Worker], None] = OrderedDict()
        """Queues in which requests wait and whose takers are still to be found. A plain dict would
        step over each entry taken from its front whenever the first is asked for."""

    # --- offers -----------------------------------------------------------------------------

    def join(self, offer: Worker) -> None:
        """Add an offer, which refile() makes ready once its worker was told.

        Raises PatternError: its pattern is wrong, and nothing was changed.
        """
        pattern = offer.pattern
        if pattern in (["all"], ["topic", "#"]) or compile_pattern(pattern).canonical == ("all",):
            number = EVERYTHING
        else:
            number = self.index.add(pattern)
        workers = self.by_pattern.get(number)
        if workers is None:
            workers = self.by_pattern[number] = WorkersByPattern(number)
            self.version += 1
            if self.by_subject:  # scan() finds out in which of these queues something waits for it.
                self.new_patterns.append((workers, iter(list(self.by_subject.values()))))
        workers.offers += 1
        self.offers[offer] = workers

    def leave(self, offer: Worker) -> None:
        """Remove an offer that has ended, and its pattern if no other offer has it."""
        workers = self.offers.pop(offer, None)
        if workers is None:
            return
        workers.unfile(offer)
        workers.offers -= 1
        if workers.number != EVERYTHING:
            self.index.discard(workers.number)
        if not workers.offers:
            del self.by_pattern[workers.number]
            self.turns.pop(workers, None)
            self.version += 1
            # Queues may still name it among their takers: it must not keep other queues in memory.
            workers.heap.clear()
            workers.filed.clear()
            workers.priorities = None

    def clear(self) -> None:
        """Forget all queues, as the service has gone: stale entries would keep it in memory."""
        self.by_subject.clear()
        self.prior.clear()
        self.direct = self.offers  # As in prior_waits_no_more().
        self.new_subjects.clear()

    def refile(self, offer: Worker) -> bool:
        """Sort an offer in anew whose credit or load has changed; True: it can take a request.

        The caller then puts the service into `runnable`.
        """
        workers = self.offers.get(offer)
        if workers is None:
            return False
        workers.unfile(offer)
        if offer.able(1) <= 0:  # Of 1 byte: the size counts once a batch is chosen.
            return False
        workers.file(offer)
        self.turns[workers] = None
        return True

    def is_slow(self, queue: SubjectQueue[Batch, Worker]) -> bool:
        """Whether finding a queue's takers takes a comparison with regular expressions.

        Callers leave that to scan() or count it as much work, since it may take milliseconds.
        """
        return queue.version != self.version and self.index.slow

    def takers_of(
        self, queue: SubjectQueue[Batch, Worker]
    ) -> list[WorkersByPattern[Batch, Worker]]:
        """Offers, by pattern, that take a queue's subject; matched anew after patterns changed."""
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

    def queue_of(
        self, subject: str, priority: int = 0, *, waits: bool = True
    ) -> SubjectQueue[Batch, Worker]:
        """The queue of a subject, made if there is none.

        waits: False where the caller only asks who takes the subject, or whether something waits:
        a new queue is not kept then if SUBJECTS_KEPT are.
        """
        key = (priority, subject) if priority else subject
        queue = self.by_subject.get(key)
        if queue is None:
            queue = SubjectQueue(subject, priority)
            if waits or len(self.by_subject) < SUBJECTS_KEPT:
                self.by_subject[key] = queue
        return queue

    def prior_waits(self, queue: SubjectQueue[Batch, Worker]) -> None:
        """Note that requests with a priority wait in a queue: no new batch may overtake them."""
        self.prior[queue] = None
        self.direct = {}

    def prior_waits_no_more(self, queue: SubjectQueue[Batch, Worker]) -> None:
        """Note that no request with a priority waits in a queue any more.

        When none waits in any queue, new batches go straight to ready workers again (`direct`).
        """
        self.prior.pop(queue, None)
        if not self.prior:
            self.direct = self.offers

    def push(
        self, workers: WorkersByPattern[Batch, Worker], queue: SubjectQueue[Batch, Worker]
    ) -> None:
        """File a queue in which requests wait with the offers that take it by one pattern."""
        workers.heap_of(queue).file_queue(queue)
        if workers.ready:
            self.turns[workers] = None

    def emptied(self, queue: SubjectQueue[Batch, Worker]) -> None:
        """Forget a queue that has become empty, if there are many queues.

        Others are kept, empty, for the next request of their subject.
        """
        if len(self.by_subject) > SUBJECTS_KEPT:
            # It was filed with the takers of the last look-up; takers_of() might find others.
            for workers in queue.takers:
                workers.heap_of(queue).filed.pop(queue, None)
            priority, subject = queue.priority, queue.subject
            self.by_subject.pop((priority, subject) if priority else subject, None)

    def scan(self, more: Callable[[], bool]) -> None:
        """Compare subjects that are slow to match, and new patterns, as far as one turn may.

        Of new subjects only those wait here that regular expressions are compared with; all others
        were filed when their first request came. A queue that a pattern takes is filed with it, so
        that its requests are handed out; the rest is compared in the next turn. more: whether the
        turn has time left. It is asked after each comparison with regular expressions.
        """
        budget = SCANNED_AT_ONCE
        while self.new_subjects and budget > 0:
            queue, _ = self.new_subjects.popitem(last=False)
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
            # All queues were compared, or the last offer of the pattern has left.
            if other is None or self.by_pattern.get(workers.number) is not workers:
                self.new_patterns.popleft()
                continue
            slow = self.is_slow(other)
            budget -= SLOW_LOOK if slow else 1
            if other.rows and workers in self.takers_of(other):
                self.push(workers, other)
            if slow and not more():
                return

    def next_queue(self) -> SubjectQueue[Batch, Worker] | None:
        """The queue whose turn it is among those that a ready offer takes; None: there is none.

        The first pattern of `turns` keeps its turn until its offers are used up or nothing waits.
        """
        turns = self.turns
        while turns:
            workers = next(iter(turns))
            if workers.ready:
                queue = workers.first()
                if queue is not None:
                    return queue
                if workers.unfinished:
                    # More entries are stale: the next turn goes on.
                    return None
            del turns[workers]
        return None

    # --- the choice of the worker -----------------------------------------------------------

    def allot(
        self, queue: SubjectQueue[Batch, Worker], mask: int, cost: int, waiting: int
    ) -> list[tuple[Worker, int]]:
        """Share rows of a batch out among the ready offers, and take credit for them.

        mask: the rows. cost: bytes that a WORK with some of them takes at most. waiting: number of
        rows that the ready offers have to share, with those of other batches. Returns the shares as
        (offer, rows). Rows that are in no share are left because no offer is ready any more.
        """
        takers = self.takers_of(queue)
        shares: list[tuple[Worker, int]] = []
        left = mask.bit_count()
        while left:
            workers, ready = _least(takers)
            if workers is None:
                break
            offer = workers.least()
            most = offer.able(cost)
            workers.unfile(offer)
            if most <= 0:
                # The offer has no credit for so large a batch. More credit files it again.
                continue
            share = -(-waiting // ready)  # An equal share for each ready offer, rounded up.
            count = min(most, left, max(share, self.prefetch))
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
        """Set `prefetch` by requests that one worker completed: their number and time.

        `prefetch` rises at once, to twice itself at most, and falls by a quarter of the difference:
        a measured time is often too long, by what else the machine did, and never too short.
        """
        # A time of 0 ms is one of less than 1 ms.
        done = count * PREFETCH_MS // max(took_ms, 1)
        if done > self.prefetch:
            self.prefetch = min(done, 2 * self.prefetch, PREFETCH_MAX)
        else:
            self.prefetch -= (self.prefetch - max(done, 1) + 3) // 4  # A quarter, rounded up.

    @property
    def runnable(self) -> bool:
        """Whether a request may be handed out at once, or a comparison is still to be made."""
        return bool(self.new_patterns or self.new_subjects or self.turns)


def _least(
    takers: list[WorkersByPattern[Batch, Worker]],
) -> tuple[WorkersByPattern[Batch, Worker] | None, int]:
    """Return the pattern whose ready offer has the smallest load, and how many offers are ready.

    takers: all patterns that take the subject; the number is of the offers of all of them.
    """
    if len(takers) == 1:
        workers = takers[0]
        return (workers, workers.ready) if workers.ready else (None, 0)
    best: WorkersByPattern[Batch, Worker] | None = None
    fewest = ready = 0
    for workers in takers:
        if workers.ready:
            ready += workers.ready
            least_load = min(workers.buckets)
            if best is None or least_load < fewest:
                best, fewest = workers, least_load
    return best, ready
