"""Holdings: which offsets of a group are done, waiting, or in a member's hands.

Owns the accounting of one group before its reader's position (`read`), as bitmaps over pages of
4,096 offsets. An offset is open from when its record was read and selected until it is done. The
rules: an open offset is in exactly one state: waiting for a member, held by one, late (it waits for
the end of a pause first), or withheld from all members until the log has what becomes of it; an
offset before `read` that is not open is done; a batch or an acknowledgement costs a few operations
on integers for each page that it touches, whatever the number of its rows. Pages rather than
batches: ten thousand batches of one record take no more memory than one of ten thousand.

Bit i of a `mask` is offset i of a page; bit i of `bits` is the offset i after the `base` that is
passed with them, across pages. Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from malamute_py.broker.groups.slots import SlotsOfRows
from malamute_py.broker.structures.bitmaps import (
    bits_of_rows,
    low_bit,
    ones,
    rows_of_bits,
    runs_of,
)
from malamute_py.changelog.records import Range

PAGE: Final = 4_096
PAGE_BYTES: Final = PAGE // 8
FEW_RANGES: Final = 100
"""Ranges in an acknowledgement above which an array is quicker than a loop."""
FEW_RUNS: Final = 48
"""Runs of acknowledged offsets above which an array is quicker than a loop."""
WHOLE: Final = (1 << PAGE) - 1
"""Mask of all offsets of a page."""
LOGGED: Final = 0
LOGGING: Final = 1
UNLOGGED: Final = 2
"""States of a page: the log has its done offsets, will have them soon, or lacks some."""


class Page:
    """Offsets [base, base + PAGE) of a group; bit i stands for offset base + i."""

    __slots__ = (
        "base", "held", "late", "leases", "logging", "open", "since", "slots", "waiting",
        "withheld",
    )  # fmt: skip

    def __init__(self, base: int) -> None:
        self.base = base
        self.open = 0
        """Offsets that are selected and not done."""
        self.waiting = 0
        """Open offsets that are to be handed out."""
        self.late = 0
        """Open offsets that are to be handed out after a time."""
        self.withheld = 0
        """Open offsets that no member gets until the log has that they are done, or wait again."""
        self.held: dict[Any, int] = {}
        """Member -> the offsets that it holds."""
        self.since: dict[Any, int] = {}
        """Member -> the time since which it holds an offset of this page."""
        self.leases: dict[Any, dict[int, int]] = {}
        """Member -> {time at which leases of it end: their offsets}. Offsets that it holds no more
        are left in: leases_over() compares an entry with `held`."""
        self.slots: np.ndarray[Any, np.dtype[np.uint16]] | None = None
        """The slot of each offset, in a keyed group."""
        self.logging = LOGGED
        """Whether the log knows what is done: LOGGED, being LOGGED, or UNLOGGED."""


Picked: TypeAlias = "list[tuple[Page, int]]"
"""Offsets that a command or an event concerns, as pages, each with the mask of its offsets."""


class Holdings:
    """The offsets of one group from `next` on.

    The group calls a method for each change of an offset's state. Where two calls make one change,
    unhand() comes first, and what gives the offsets their next state follows at once.
    """

    __slots__ = ("_bases", "held", "late", "pages", "read", "waiting", "withheld")

    def __init__(self, read: int) -> None:
        self.read = read
        """Position of the group's reader."""
        self.pages: list[Page] = []
        """Pages in ascending order; offsets before `read` that are in none are done."""
        self._bases: list[int] = []
        """First offsets of `pages`, to be searched by bisection."""
        self.waiting = self.held = self.late = self.withheld = 0
        """Number of the offsets in each state."""

    @property
    def open(self) -> int:
        """Number of the offsets before `read` that are not done."""
        return self.waiting + self.held + self.late + self.withheld

    @property
    def low(self) -> int:
        """The least offset that is not done: the group's position."""
        for page in self.pages:
            if page.open:
                return page.base + low_bit(page.open)
        return self.read

    # --- pages ------------------------------------------------------------------------------

    def _page(self, offset: int) -> Page:
        """The page of an offset, made if need be, for an offset that is opened."""
        base = offset - offset % PAGE
        bases = self._bases
        if bases and bases[-1] == base:  # Most offsets are new ones, in the last page.
            return self.pages[-1]
        after = bisect_right(bases, base)  # Index of the first page that begins after `base`.
        if after and bases[after - 1] == base:
            return self.pages[after - 1]
        page = Page(base)
        bases.insert(after, base)
        self.pages.insert(after, page)
        return page

    def _found(self, offset: int) -> Page | None:
        """The page of an offset, if there is one: else the offset is done or not read."""
        index = bisect_right(self._bases, offset) - 1
        if index < 0 or offset >= self._bases[index] + PAGE:
            return None
        return self.pages[index]

    def within(self, first: int, end: int) -> Iterator[tuple[Page, int]]:
        """Yield the pages that exist for [first, end), each with the mask of these offsets."""
        # The last page that begins at `first` or before it; it may end before `first`, too.
        index = max(0, bisect_right(self._bases, first) - 1)
        pages = self.pages
        while index < len(pages):
            page = pages[index]
            base = page.base
            if base >= end:
                return
            index += 1
            if base + PAGE <= first:
                continue
            mask = WHOLE if end >= base + PAGE else ones(end - base)
            if first > base:
                mask &= ~ones(first - base)
            yield page, mask

    def pieces(self, base: int, bits: int) -> Iterator[tuple[Page, int]]:
        """Divide offsets by page: yield each page, made if need be, with the mask of its offsets.

        base: the offset of the lowest bit of `bits`.
        """
        at = base % PAGE
        if bits.bit_length() <= PAGE - at:  # All are in one page, as those of most batches are.
            yield self._page(base), bits << at
            return
        page_base = base - at
        bits <<= at  # The lowest bit is now the first offset of the page.
        while bits:
            mask = bits & WHOLE
            if mask:
                yield self._page(page_base), mask
            bits >>= PAGE
            page_base += PAGE

    def tidy(self) -> None:
        """Drop pages without open offsets and without anything to be logged, to free their memory.

        Called after records are done. The last page stays while its offsets are read still: what
        was not selected of it is done. A page before `low` has nothing to be logged: the group's
        position tells that it is done.
        """
        pages = self.pages
        if not any(not page.open for page in pages):
            return
        low = self.low
        # `logging` is 0 (LOGGED) where the log has all done offsets of the page.
        self.pages = [
            page for page in pages
            if page.open
            or page.base + PAGE > (low if page.logging else self.read)
        ]  # fmt: skip
        self._bases = [page.base for page in self.pages]

    # --- moving offsets from state to state -----------------------------------------------------

    def take_in(self, base: int, bits: int) -> None:
        """Open offsets whose records were read and selected: they wait for a member."""
        for page, mask in self.pieces(base, bits):
            page.open |= mask
            page.waiting |= mask
        self.waiting += bits.bit_count()

    def waiting_in(self, base: int, end: int) -> int:
        """Offsets of [base, end) that wait, as a mask that begins at `base`."""
        found = 0
        for page, mask in self.within(base, end):
            some = page.waiting & mask
            if some:
                shift = page.base - base  # From bits of the page to bits from `base` on.
                found |= some << shift if shift >= 0 else some >> -shift
        return found

    def hand(self, base: int, bits: int, member: Any, now_ms: int) -> None:
        """Put waiting offsets into the hands of a member, which is sent their records."""
        for page, mask in self.pieces(base, bits):
            page.waiting &= ~mask
            before = page.held.get(member, 0)
            if not before:
                page.since[member] = now_ms
            page.held[member] = before | mask
        count = bits.bit_count()
        self.waiting -= count
        self.held += count

    def pick(self, member: Any, ranges: Sequence[Range], also_waiting: bool) -> Picked | None:
        """Return the ranges of an acknowledgement as pages and masks; None: not all are held.

        also_waiting: an offset that waits counts as held by the member, as for a holder that came
        back and whose records have begun to wait in the meantime.
        """
        _, last_end = ranges[-1]
        if last_end > self.read:  # No member was given a record that was not read yet.
            return None
        if len(ranges) > FEW_RANGES:
            return self._pick_many(member, ranges, also_waiting)
        picked: Picked = []
        page: Page | None = None
        mask = base = 0
        for first, end in ranges:
            while first < end:
                if page is None or first >= base + PAGE:
                    if page is not None:
                        picked.append((page, mask))
                    page = self._found(first)
                    if page is None:
                        return None
                    base, mask = page.base, 0
                stop = min(end, base + PAGE)
                mask |= ((1 << (stop - first)) - 1) << (first - base)
                first = stop
        if page is not None:
            picked.append((page, mask))
        for page, mask in picked:
            mine = page.held.get(member, 0)
            if also_waiting:
                mine |= page.waiting
            if mask & ~mine:
                return None
        return picked

    def _pick_many(self, member: Any, ranges: Sequence[Range], also_waiting: bool) -> Picked | None:
        """Do what pick() does for many ranges, as members of a keyed group have, without a loop.

        ranges: ascending.
        """
        bounds = np.array(ranges, np.int64)
        firsts, ends = bounds[:, 0], bounds[:, 1]
        wanted = int((ends - firsts).sum())
        picked: Picked = []
        for page, _ in self.within(int(firsts[0]), int(ends[-1])):
            here = slice(  # Indices of the ranges that have offsets of this page.
                int(ends.searchsorted(page.base, "right")),
                int(firsts.searchsorted(page.base + PAGE, "left")),
            )
            # 1 where a range begins and -1 where one ends: the running sum is 1 within ranges.
            edges = np.bincount(np.maximum(firsts[here] - page.base, 0), minlength=PAGE + 1)
            edges -= np.bincount(np.minimum(ends[here] - page.base, PAGE), minlength=PAGE + 1)
            mask = bits_of_rows(np.cumsum(edges[:PAGE]) > 0)
            if not mask:
                continue
            mine = page.held.get(member, 0)
            if also_waiting:
                mine |= page.waiting
            if mask & ~mine:
                return None
            wanted -= mask.bit_count()
            picked.append((page, mask))
        return None if wanted else picked  # Offsets in no page are done: they are held no more.

    def unhand(self, page: Page, member: Any, mask: int) -> tuple[int, int]:
        """Take offsets out of a member's hands and out of those that wait; they are in no state.

        Returns (those that it held, those that waited); the caller gives each its next state.
        member: None takes those that wait only.
        """
        mine = page.held.get(member, 0)
        held = mine & mask
        if held:
            mine ^= held
            if mine:
                page.held[member] = mine
            else:
                del page.held[member], page.since[member]
            self.held -= held.bit_count()
        waited = page.waiting & mask
        if waited:
            page.waiting ^= waited
            self.waiting -= waited.bit_count()
        return held, waited

    def withhold(self, page: Page, mask: int) -> None:
        """Keep offsets that unhand() took from all members until the log has their next state."""
        page.withheld |= mask
        self.withheld += mask.bit_count()

    def finish(self, page: Page, mask: int) -> None:
        """Note that withheld offsets are done, as the log has that or will be told."""
        page.withheld &= ~mask
        page.open &= ~mask
        self.withheld -= mask.bit_count()

    def restore(self, page: Page, mask: int, member: Any, now_ms: int) -> None:
        """Let a member hold withheld offsets, as before; None: let them wait for any member."""
        page.withheld &= ~mask
        count = mask.bit_count()
        self.withheld -= count
        if member is None:
            page.waiting |= mask
            self.waiting += count
            return
        page.since.setdefault(member, now_ms)
        page.held[member] = page.held.get(member, 0) | mask
        self.held += count

    def delay(self, page: Page, mask: int) -> None:
        """Note that offsets that unhand() took wait for the end of a pause first."""
        page.late |= mask
        self.late += mask.bit_count()

    def due(self, page: Page, mask: int) -> int:
        """Let offsets wait for a member whose pause is over; returns those that were late."""
        mask &= page.late
        page.late ^= mask
        page.waiting |= mask
        count = mask.bit_count()
        self.late -= count
        self.waiting += count
        return mask

    def wait(self, page: Page, mask: int) -> None:
        """Let offsets that unhand() took wait for any member again."""
        page.waiting |= mask
        self.waiting += mask.bit_count()

    def release(self, members: set[Any], *, withheld: bool = False) -> Picked:
        """Take all offsets from members that leave, let them wait again, and return them.

        withheld: no member gets them before the log has that the attempt has ended.
        """
        released: Picked = []
        for page in self.pages:
            mask = 0
            for member in page.held.keys() & members:
                mask |= page.held.pop(member)
                del page.since[member]
            if mask:
                released.append((page, mask))
                self.held -= mask.bit_count()
                if withheld:
                    self.withhold(page, mask)
                else:
                    self.wait(page, mask)
        return released

    def close(self, page: Page, mask: int) -> None:
        """Count waiting offsets as done without an acknowledgement: they expired or are gone."""
        page.waiting &= ~mask
        page.open &= ~mask
        self.waiting -= mask.bit_count()

    def close_waiting(self, first: int, end: int) -> Picked:
        """Close what waits in [first, end), which is gone; returns it."""
        closed: Picked = []
        for page, mask in self.within(first, end):
            some = page.waiting & mask
            if some:
                self.close(page, some)
                closed.append((page, some))
        return closed

    # --- leases -------------------------------------------------------------------------------

    def lease(self, page: Page, member: Any, mask: int, due_ms: int) -> None:
        """Let the leases of held offsets end at `due_ms`, instead of when they would have."""
        entries = page.leases.setdefault(member, {})  # {end of a lease: offsets}
        for at_ms, rows in list(entries.items()):
            if rows & ~mask:
                entries[at_ms] = rows & ~mask
            else:
                del entries[at_ms]
        entries[due_ms] = entries.get(due_ms, 0) | mask

    def put_off_leases(self, ms: int) -> None:
        """Let all leases last so much longer: the broker stood still for that time."""
        for page in self.pages:
            for member, entries in page.leases.items():
                page.leases[member] = {at_ms + ms: rows for at_ms, rows in entries.items()}

    def next_lease(self) -> int:
        """Time at which the next lease ends, for the group's timer; 0: there is none."""
        return min(
            (at_ms for page in self.pages for entries in page.leases.values() for at_ms in entries),
            default=0,
        )

    def leases_over(self, now_ms: int) -> list[tuple[Any, Picked]]:
        """Forget the leases that are over; returns members with those of the offsets they hold."""
        found: dict[Any, Picked] = {}
        for page in self.pages:
            for member, entries in list(page.leases.items()):
                over = 0
                for at_ms in [at_ms for at_ms in entries if at_ms <= now_ms]:
                    over |= entries.pop(at_ms)
                if not entries:
                    del page.leases[member]
                over &= page.held.get(member, 0)  # The others were acknowledged or given back.
                if over:
                    found.setdefault(member, []).append((page, over))
        return list(found.items())

    def held_by(self, member: Any) -> Picked:
        """Return all offsets that a member holds, for a holder of whose leases one has ended."""
        return [(page, page.held[member]) for page in self.pages if member in page.held]

    def since(self, member: Any) -> int:
        """Time since which a member holds its oldest offset, for operators; 0: it holds none."""
        for page in self.pages:
            found = page.since.get(member)
            if found is not None:
                return found
        return 0

    def member_with(self, offset: int) -> Any:
        """Return the member that holds an offset, and so holds a group up; None: no member does."""
        for page, mask in self.within(offset, offset + 1):
            for member, held in page.held.items():
                if held & mask:
                    return member
        return None

    # --- what the log is to say ---------------------------------------------------------------

    def ranges(self, picked: Picked, logged: int) -> list[Range]:
        """Ranges by which the log is told that these offsets, and done ones beside them, are done.

        A range takes in its done neighbours, so that the log has few long ranges. logged: the
        position that the log has; all offsets from it to the first page are done, too.
        """
        found: list[Range] = []
        first_page = self.pages[0] if self.pages else None
        for page, mask in picked:
            open_after = page.open & ~mask
            limit = min(PAGE, self.read - page.base)  # Offsets from `read` on are not read yet.
            # Each run of set bits begins with one whose lower neighbour is not set.
            if (mask & ~(mask << 1)).bit_count() > FEW_RUNS:
                runs = _closed_runs(open_after, mask, limit)
            else:
                runs = _few_closed_runs(open_after, mask, limit)
            for begin, stop in runs:
                start, end = page.base + begin, page.base + stop
                if not begin and page is first_page:
                    start = min(logged, end)
                last_start, last_end = found[-1] if found else (0, -1)
                if last_end >= start:  # The run goes on from the page before.
                    found[-1] = last_start, end
                else:
                    found.append((start, end))
        return found

    def done_ahead(self, page: Page) -> list[Range]:
        """The done offsets of a page before `read`, as ranges that Progress tells the log."""
        limit = min(PAGE, self.read - page.base)
        closed = ones(limit) & ~page.open
        if not closed:
            return []
        return [
            (page.base + first, page.base + end)
            for first, end in _closed_runs(page.open, closed, limit)
        ]


def slots_of(page: Page, mask: int) -> SlotsOfRows:
    """Slots of these offsets of a page in a keyed group, by which Slots counts their changes."""
    assert page.slots is not None
    # An array of booleans, made of the mask, picks them.
    found: SlotsOfRows = page.slots[: mask.bit_length()][rows_of_bits(mask, mask.bit_length())]
    return found


def ranges_of(picked: Picked) -> list[Range]:
    """Return exactly these offsets as ranges, to log an attempt; Holdings.ranges() adds others."""
    return [
        (page.base + first, page.base + first + count)
        for page, mask in picked
        for first, count in runs_of(mask)
    ]


def _few_closed_runs(open_rows: int, mask: int, limit: int) -> list[tuple[int, int]]:
    """Return what _closed_runs() does, one run after another: quicker for a mask of few runs."""
    found: list[tuple[int, int]] = []
    at = 0
    # Both masks are shifted as the loop goes on: their lowest bit is offset `at` of the page.
    while mask:
        # The next run has the first offset of the mask, and begins after the last open one before.
        skip = (mask & -mask).bit_length() - 1
        begin = at + (open_rows & ((1 << skip) - 1)).bit_length()
        open_rows >>= skip
        mask >>= skip
        at += skip
        if not open_rows:  # No open offset ends the run: it goes on to the end of what was read.
            found.append((begin, max(limit, at + mask.bit_length())))
            break
        # The run ends at the next open offset.
        skip = (open_rows & -open_rows).bit_length() - 1
        open_rows >>= skip
        mask >>= skip
        at += skip
        found.append((begin, at))
    return found


def _closed_runs(open_rows: int, mask: int, limit: int) -> list[tuple[int, int]]:
    """Maximal runs (first, end) of offsets that are not open, of those that touch the mask.

    Offsets count from the page's base, up to `limit`. open_rows: offsets that are open. mask:
    offsets that are told to the log.
    """
    closed = np.zeros(limit + 2, np.int8)
    closed[1:-1] = ~rows_of_bits(open_rows & ones(limit), limit)
    # A 0 was added on either side, so that edges alternate: a run begins, a run ends.
    edges = np.flatnonzero(np.diff(closed))
    firsts, ends = edges[::2], edges[1::2]
    # How many offsets of the mask lie before each offset. A run has some of the mask if there are
    # more before its end than before its first offset.
    before = np.zeros(limit + 1, np.int32)
    np.cumsum(rows_of_bits(mask & ones(limit), limit), out=before[1:])
    chosen = before[ends] > before[firsts]
    return list(zip(firsts[chosen].tolist(), ends[chosen].tolist(), strict=True))
