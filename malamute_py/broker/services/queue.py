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
from malamute_py.broker.structures.bitmaps import lowest
from malamute_py.changelog.settings import ServiceSettings
from malamute_py.changelog.tables import RequestRow, ServiceRow
from malamute_py.matcher import Index, compile_pattern

if TYPE_CHECKING:
    from malamute_py.broker.log.bodies import Body

FRESH: Final = 1 << 62
"""Added to the order of what was never handed out: all that came back goes before it."""
LANES_KEPT: Final = 1_024
"""Lanes that stay although nothing waits in them: the next request needs not make one."""
DEAD: Final = ".dead"
"""Added to a service's name: its dead-letter mailbox, unless another was named."""
EVERYTHING: Final = -1
"""Number of the pattern that takes every subject."""
LOT_MS: Final = 2
"""What a worker does in so little time goes to one: shared out among eight, 64 quick requests
cost three times as much in messages as they cost to do, and come back later."""
LOT_MAX: Final = 64
LEFT_BY_MIN: Final = 2
"""Lost holders that are remembered of each batch, or as many as it has rows if these are more."""
SCANNED_AT_ONCE: Final = 256
"""Lanes that a new pattern is compared with in one step, or that it has outlived."""
SLOW_LOOK: Final = 64
"""A subject that is compared with expressions counts as so many lanes: with one expression it may
take most of a millisecond, with 64 some milliseconds."""

PROGRAMS_MAX: Final = 3_000
"""What regular expressions of all offers of a service may count: a REQUEST of many subjects is
matched in one go. See matcher/expressions.py."""


class Put:
    """What is left of one batch of requests, at run time."""

    __slots__ = (
        "backs",
        "base",
        "buried",
        "delayed",
        "ending",
        "grants",
        "left_by",
        "masks",
        "moving",
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
        self.grants: list[Grant] = []
        """Grants: which holder has which of its rows in hand."""
        self.left_by: list[LeftBehind] | None = None
        """Holders that had rows of it when their link was lost, the newest last, if any did."""
        self.moving = 0
        """Rows whose hand-out or return is on its way into the log."""
        self.returning = 0
        """Rows among them whose return is on its way."""
        self.ending = 0
        """Rows whose end is."""
        self.delayed = 0
        """Rows that wait, but not yet."""
        self.backs: dict[Back, None] | None = None
        """When they may be handed out again, if some have waited."""
        self.slot = -1
        """Slot of its deadline in the wheel."""
        self.buried = 0
        """Number of the dead-letter mailbox that some of it lies in; 0: none does."""

    def __lt__(self, other: Put) -> bool:
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
    def left_behind(self) -> int:
        """Rows that no worker has, nor is about to get: who had them last may end them."""
        return (self.row.waiting & ~self.moving | self.returning) & ~self.ending

    @property
    def alive(self) -> int:
        """Rows that have not left and are not about to."""
        return self.row.left & ~self.ending

    @property
    def granted(self) -> int:
        """Rows that a worker has in hand."""
        rows = 0
        for grant in self.grants:
            rows |= grant.rows
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


class Back:
    """Rows of one batch that wait again from some time on."""

    __slots__ = ("put", "rows", "slot")

    def __init__(self, put: Put, rows: int) -> None:
        self.put = put
        self.rows = rows
        self.slot = -1


class Grant:
    """Rows of one batch that were handed to one holder together."""

    __slots__ = ("at_ms", "due_ms", "hand_out", "hands", "lease_ms", "put", "rows", "slot")

    def __init__(
        self, put: Put, rows: int, hands: Hands, at_ms: int, lease_ms: int, hand_out: int
    ) -> None:
        """hand_out: which one it was, since the broker began; 0: one before."""
        self.hand_out = hand_out
        self.put = put
        self.rows = rows
        self.hands = hands
        self.at_ms = at_ms
        self.lease_ms = lease_ms
        self.due_ms = at_ms + lease_ms
        """When the lease is over, unless the worker is heard of."""
        self.slot = -1


class Hands:
    """What one worker has in hand of one service: by an offer, or from before a restart."""

    __slots__ = ("bases", "ended", "grants", "holder", "offer")

    def __init__(self, holder: str, offer: Offer | None) -> None:
        self.holder = holder
        self.offer = offer
        """None: it has ended, or was before a restart."""
        self.ended = False
        """Its offer has."""
        self.grants: dict[int, list[Grant]] = {}
        self.bases: list[int] = []
        """Numbers of the batches in `grants`, ascending."""

    def leave(self) -> None:
        """The offer has ended; an offer and its hands are not to hold each other from then on."""
        self.offer = None
        self.ended = True

    def add(self, grant: Grant) -> None:
        """The worker has these rows."""
        put = grant.put
        known = self.grants.get(put.base)
        if known is None:
            self.grants[put.base] = [grant]
            if not self.bases or put.base > self.bases[-1]:
                self.bases.append(put.base)
            else:
                insort(self.bases, put.base)
        else:
            known.append(grant)
        put.grants.append(grant)

    def drop(self, grant: Grant) -> None:
        """The worker has nothing more of a grant."""
        put = grant.put
        put.grants.remove(grant)
        known = self.grants[put.base]
        known.remove(grant)
        if not known:
            del self.grants[put.base]
            del self.bases[bisect_left(self.bases, put.base)]

    def of(self, number: int) -> list[Grant] | None:
        """The grants of the batch that a request's number may lie in."""
        at = bisect_right(self.bases, number) - 1
        return self.grants[self.bases[at]] if at >= 0 else None

    @property
    def rows(self) -> int:
        """How many requests these are."""
        return sum(grant.rows.bit_count() for one in self.grants.values() for grant in one)


class LeftBehind:
    """Requests that one holder had in hand of one service when a link of it was lost.

    Each entry goes when its batch has left the queue, so that all of it is bounded by the queue.
    """

    __slots__ = ("bases", "holder", "rows")

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.rows: dict[int, int] = {}
        """Number of a batch's first request -> the rows of it."""
        self.bases: list[int] = []
        """Keys of `rows`, ascending."""

    def add(self, hands: Hands) -> None:
        """The holder had these requests as well."""
        bases, rows = self.bases, self.rows
        ordered = not bases or bases[-1] < hands.bases[0]
        for base in hands.bases:
            for grant in hands.grants[base]:
                if base not in rows:
                    bases.append(base)
                    put = grant.put
                    if put.left_by is None:
                        put.left_by = []
                    put.left_by.append(self)
                rows[base] = rows.get(base, 0) | grant.rows
        if not ordered:
            bases.sort()

    def drop(self, put: Put) -> None:
        """Forget what the holder had of a batch."""
        del self.rows[put.base]
        del self.bases[bisect_left(self.bases, put.base)]
        assert put.left_by is not None, "who is remembered is named by the batch"
        put.left_by.remove(self)

    def of(self, number: int) -> tuple[int, int]:
        """The last batch that begins at or before a number, and the rows that the holder had.

        Without rows: the holder had nothing that begins so early.
        """
        at = bisect_right(self.bases, number) - 1
        base = self.bases[at] if at >= 0 else -1
        return base, self.rows.get(base, 0)


class Parcel:
    """Rows in hand whose bodies are being read back, or that must not overtake such rows."""

    __slots__ = ("answered", "body", "cost", "hand_out", "put", "rows")

    def __init__(self, put: Put, rows: int, cost: int, hand_out: int) -> None:
        """hand_out: the one that gave the worker these rows."""
        self.put = put
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
        "crew",
        "hands",
        "in_hand",
        "late",
        "lease_ms",
        "pattern",
        "pattern_bytes",
        "service",
    )

    def __init__(self, owner: Owner, link: Link, command: OfferCommand, service: Service) -> None:
        super().__init__(
            owner, link, command.subscription, command.credit_records, command.credit_bytes
        )
        self.service = service
        self.pattern = command.pattern
        self.pattern_bytes = 0
        self.crew: Crew | None = None
        self.hands = Hands(link.holder, self)
        self.begun = 0
        """The next number when it was accepted."""
        self.in_hand = 0
        """Requests that it has, or that are on their way to it."""
        self.lease_ms = 0
        self.late = False
        """Its last reply came too late, and that was said."""
        self.coming: deque[Parcel] = deque()
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
        return 0 if self.in_hand else 1


class Crew:
    """The offers of one service that have the same pattern."""

    __slots__ = ("buckets", "filed", "heap", "number", "offers", "ready")

    def __init__(self, number: int) -> None:
        self.number = number
        self.offers = 0
        self.buckets: dict[int, dict[Offer, None]] = {}
        """How many in hand -> the ready offers that have so many, in turn."""
        self.ready = 0
        self.heap: list[tuple[int, str, Lane]] = []
        """Lanes that it takes, by the order of what waits in them; some entries are stale."""
        self.filed: dict[Lane, int] = {}
        """Lane -> the order by which it stands in the heap."""

    def file(self, offer: Offer) -> None:
        """An offer is ready."""
        bucket = self.buckets.get(offer.in_hand)
        if bucket is None:
            bucket = self.buckets[offer.in_hand] = {}
        bucket[offer] = None
        offer.bucket = offer.in_hand
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

    def push(self, lane: Lane) -> None:
        """Something waits in a lane, or something earlier than before."""
        order = lane.order
        known = self.filed.get(lane)
        if known is None or order < known:
            self.filed[lane] = order
            heappush(self.heap, (order, lane.subject, lane))

    def first(self) -> Lane | None:
        """The lane whose turn it is; None too when a step has looked at stale entries enough."""
        heap, filed = self.heap, self.filed
        for _ in range(SCANNED_AT_ONCE):
            if not heap:
                return None
            order, _, lane = heap[0]
            if filed.get(lane) != order:
                heappop(heap)
            elif not lane.rows:
                heappop(heap)
                del filed[lane]
            elif lane.order != order:
                filed[lane] = lane.order
                heapreplace(heap, (lane.order, lane.subject, lane))
            else:
                return lane
        return None


class Lane:
    """Requests of one subject that wait."""

    __slots__ = ("again", "crews", "fresh", "rows", "subject", "version")

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.fresh: deque[tuple[int, int, Put]] = deque()
        """(base, rows, batch), ascending. Rows that wait no more may still be in it."""
        self.again: list[tuple[int, int, Put]] = []
        """(base, rows, batch) of what came back, as a heap."""
        self.rows = 0
        """How many rows the entries name."""
        self.crews: list[Crew] = []
        self.version = -1
        """Version of the service's crews when `crews` was looked up."""

    def __lt__(self, other: Lane) -> bool:
        return self.subject < other.subject

    def __hash__(self) -> int:
        # Compiled, a class with an order has no hash unless it says so.
        return id(self)

    @property
    def order(self) -> int:
        """Order of what is handed out next."""
        return self.again[0][0] if self.again else self.fresh[0][0] + FRESH

    def head(self) -> tuple[int, int, Put]:
        """What is handed out next."""
        return self.again[0] if self.again else self.fresh[0]

    def replace(self, rows: int) -> None:
        """Let only these rows of the head wait on."""
        if self.again:
            base, before, put = self.again[0]
            if rows:
                heapreplace(self.again, (base, rows, put))
            else:
                heappop(self.again)
        else:
            base, before, put = self.fresh[0]
            if rows:
                self.fresh[0] = (base, rows, put)
            else:
                self.fresh.popleft()
        self.rows += rows.bit_count() - before.bit_count()


class Service:
    """One service queue."""

    __slots__ = (
        "coming",
        "crews",
        "dead",
        "delayed",
        "held",
        "index",
        "known",
        "lanes",
        "left_behind",
        "level",
        "lot",
        "making",
        "name",
        "number",
        "offers",
        "orphans",
        "puts",
        "removing",
        "reserved_rows",
        "reserved_size",
        "row",
        "rows",
        "size",
        "turns",
        "under_way",
        "unmatched",
        "unseen",
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
        self.known = False
        """The log has it."""
        self.under_way = False
        """A batch of requests that was handed to the journal makes it."""
        self.making = 0
        """Lone changes that make it and are on their way."""
        self.removing = False
        self.puts: dict[int, Put] = {}
        self.rows = 0
        """Requests in it: waiting or in hand."""
        self.held = 0
        self.delayed = 0
        self.size = 0
        """Bytes of its batches."""
        self.reserved_rows = 0
        """Rows on their way into the log, which count already."""
        self.reserved_size = 0
        self.lanes: dict[str, Lane] = {}
        self.index = Index(programs_max=PROGRAMS_MAX)
        self.crews: dict[int, Crew] = {}
        """By number of the pattern."""
        self.turns: dict[Crew, None] = {}
        """Crews that may have something to be handed out, in turn."""
        self.version = 0
        """Counts the changes of `crews`."""
        self.lot = 1
        """Requests that one of its workers does in LOT_MS, by what came back last."""
        self.offers: dict[Offer, None] = {}
        self.orphans: dict[str, Hands] = {}
        """Holder -> what it had in hand when the broker ended."""
        self.left_behind: dict[str, LeftBehind] = {}
        """Holder -> what it may end as long as no worker has it: a lost link had it in hand."""
        self.unseen: deque[tuple[Crew, Iterator[Lane]]] = deque()
        """New patterns, with the lanes that they are still to be compared with."""
        self.unmatched: dict[Lane, None] = {}
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
        crew = self.crews.get(number)
        if crew is None:
            crew = self.crews[number] = Crew(number)
            self.version += 1
            if self.lanes:
                self.unseen.append((crew, iter(list(self.lanes.values()))))
        crew.offers += 1
        offer.crew = crew
        self.offers[offer] = None

    def leave(self, offer: Offer) -> None:
        """Forget an offer."""
        crew = offer.crew
        if crew is None:
            return
        crew.unfile(offer)
        offer.crew = None
        del self.offers[offer]
        crew.offers -= 1
        if crew.number != EVERYTHING:
            self.index.discard(crew.number)
        if not crew.offers:
            del self.crews[crew.number]
            self.turns.pop(crew, None)
            self.version += 1
            crew.heap.clear()
            crew.filed.clear()

    def end(self) -> None:
        """Let go of lanes: the batches that their stale entries name would hold the service."""
        self.lanes.clear()
        self.unmatched.clear()

    def refile(self, offer: Offer) -> bool:
        """Its credit or what it has in hand changed; True when it is ready."""
        crew = offer.crew
        if crew is None:
            return False
        crew.unfile(offer)
        if offer.able(1) <= 0:
            return False
        crew.file(offer)
        self.turns[crew] = None
        return True

    def is_slow(self, lane: Lane) -> bool:
        """Whether to find a lane's crews may take long: by expressions, and not known yet."""
        return lane.version != self.version and self.index.slow

    def crews_of(self, lane: Lane) -> list[Crew]:
        """The crews that take a lane's subject."""
        if lane.version != self.version:
            crews = self.crews
            found = [crews[EVERYTHING]] if EVERYTHING in crews else []
            if len(crews) > len(found):
                numbers = self.index.match((lane.subject,), ())
                found += [crews[number] for number in numbers]
            lane.crews = found
            lane.version = self.version
        return lane.crews

    # --- what lost links had in hand --------------------------------------------------------

    def leave_behind(self, hands: Hands) -> None:
        """Remember what a holder had when its link was lost: its answer may be on its way."""
        if not hands.grants:
            return
        left = self.left_behind.get(hands.holder)
        if left is None:
            left = self.left_behind[hands.holder] = LeftBehind(hands.holder)
        left.add(hands)
        for base in hands.bases:
            put = self.puts[base]
            left_by = put.left_by
            if left_by is not None and len(left_by) > max(LEFT_BY_MIN, put.row.put.count):
                self._forget_left(left_by[0], put)

    def forget_left(self, put: Put) -> None:
        """A batch has left the queue: the holders that had rows of it have nothing to end."""
        for left in tuple(put.left_by or ()):
            self._forget_left(left, put)

    def _forget_left(self, left: LeftBehind, put: Put) -> None:
        left.drop(put)
        if not left.rows:
            del self.left_behind[left.holder]

    # --- what waits -----------------------------------------------------------------------

    def lane(self, subject: str, *, waits: bool = True) -> Lane:
        """The lane of a subject. waits: something is to wait in it."""
        lane = self.lanes.get(subject)
        if lane is None:
            lane = Lane(subject)
            if waits or len(self.lanes) < LANES_KEPT:
                self.lanes[subject] = lane
        return lane

    def wait(self, put: Put, mask: int, *, again: bool) -> None:
        """Let rows wait. again: they came back, and go before those that did not."""
        for subject, rows in put.subjects(mask):
            lane = self.lane(subject)
            fresh = lane.fresh
            if again or (fresh and fresh[-1][0] >= put.base):
                heappush(lane.again, (put.base, rows, put))
            else:
                fresh.append((put.base, rows, put))
            lane.rows += rows.bit_count()
            if self.is_slow(lane):
                self.unmatched[lane] = None
                continue
            for crew in self.crews_of(lane):
                self.push(crew, lane)

    def push(self, crew: Crew, lane: Lane) -> None:
        """Something waits that a crew takes."""
        crew.push(lane)
        if crew.ready:
            self.turns[crew] = None

    def emptied(self, lane: Lane) -> None:
        """Nothing waits in a lane any more."""
        if len(self.lanes) > LANES_KEPT:
            # Those that it was filed for, if others take its subject since.
            for crew in lane.crews:
                crew.filed.pop(lane, None)
            self.lanes.pop(lane.subject, None)

    def scan(self, more: Callable[[], bool]) -> None:
        """Compare new patterns with the subjects that wait, as far as one step may.

        more: whether the step has time left, which is asked after a comparison with expressions.
        """
        budget = SCANNED_AT_ONCE
        while self.unmatched and budget > 0:
            lane = next(iter(self.unmatched))
            del self.unmatched[lane]
            slow = self.is_slow(lane)
            budget -= SLOW_LOOK if slow else 1
            if lane.rows:
                for crew in self.crews_of(lane):
                    self.push(crew, lane)
            if slow and not more():
                return
        while self.unseen and budget > 0:
            crew, lanes = self.unseen[0]
            other = next(lanes, None)
            if other is None or self.crews.get(crew.number) is not crew:
                self.unseen.popleft()
                continue
            slow = self.is_slow(other)
            budget -= SLOW_LOOK if slow else 1
            if other.rows and crew in self.crews_of(other):
                self.push(crew, other)
            if slow and not more():
                return

    def next_lane(self) -> Lane | None:
        """The lane whose turn it is among those that a ready offer takes."""
        turns = self.turns
        while turns:
            crew = next(iter(turns))
            if crew.ready:
                lane = crew.first()
                if lane is not None:
                    return lane
                if crew.heap:
                    # More that is stale: the next step goes on.
                    return None
            del turns[crew]
        return None

    # --- who gets what ----------------------------------------------------------------------

    def allot(self, lane: Lane, mask: int, cost: int, waiting: int) -> list[tuple[Offer, int]]:
        """Share rows of a batch out among the ready offers; credit is taken.

        cost: bytes that WORK with some of the rows takes at most; what is not spent comes back.
        waiting: how many rows the ready offers have to share. Rows that are in nobody's
        share are left because nobody is ready for them any more.
        """
        crews = self.crews_of(lane)
        shares: list[tuple[Offer, int]] = []
        left = mask.bit_count()
        while left:
            offer, ready = _least(crews)
            if offer is None:
                break
            most = offer.able(cost)
            crew = offer.crew
            assert crew is not None, "who is filed has a crew"
            crew.unfile(offer)
            if most <= 0:
                # Of this size it can take none; it is filed again when that changes.
                continue
            count = min(most, left, max(-(-waiting // ready), self.lot))
            rows = mask if count == left else lowest(mask, count)
            mask ^= rows
            left -= count
            waiting -= count
            offer.left_records -= count
            offer.left_bytes -= cost
            offer.in_hand += count
            shares.append((offer, rows))
            if offer.able(1) > 0:
                crew.file(offer)
        return shares

    def paced(self, count: int, took_ms: int) -> None:
        """So many requests came back done, so long after they were handed out.

        A lot grows at once, to twice itself at most, and shrinks by a quarter of what it is too
        large: a time is often too long by what the machine did beside, and never too short.
        """
        # What took no measured time took less than a millisecond, and no less is known.
        done = count * LOT_MS // max(took_ms, 1)
        if done > self.lot:
            self.lot = min(done, 2 * self.lot, LOT_MAX)
        else:
            self.lot -= (self.lot - max(done, 1) + 3) // 4

    @property
    def hungry(self) -> bool:
        """Whether something may be handed out at once."""
        return bool(self.unseen or self.unmatched or self.turns)


def _least(crews: list[Crew]) -> tuple[Offer | None, int]:
    """The ready offer with the fewest in hand, and how many are ready."""
    if len(crews) == 1:
        crew = crews[0]
        if not crew.ready:
            return None, 0
        buckets = crew.buckets
        least = min(buckets) if len(buckets) > 1 else next(iter(buckets))
        return next(iter(buckets[least])), crew.ready
    best: Crew | None = None
    fewest = ready = 0
    for crew in crews:
        if crew.ready:
            ready += crew.ready
            least = min(crew.buckets)
            if best is None or least < fewest:
                best, fewest = crew, least
    if best is None:
        return None, 0
    return next(iter(best.buckets[fewest])), ready
