"""Holdings: which offsets of a group are done, waiting, or in a member's hands.

Owns the accounting of one group before its reader's position, as bitmaps over pages of 4,096
offsets. The rules: an open offset is in exactly one place (waiting, held by one member, late, or
leaving); an offset before `read` that is not open is done; a batch or an acknowledgement costs a
few operations on integers for each page that it touches, whatever the number of its rows. Pages
rather than batches: ten thousand batches of one record take no more memory than one of ten
thousand. Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

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
"""Ranges from which on an array is quicker than a loop."""
FEW_RUNS: Final = 48
"""Runs of done offsets from which on an array is quicker than a loop."""
WHOLE: Final = (1 << PAGE) - 1
LOGGED: Final = 0
LOGGING: Final = 1
UNLOGGED: Final = 2
"""States of a page: the log has its done offsets, will have them soon, or lacks some."""


class Page:
    """Offsets [base, base + PAGE) of a group; bit i stands for offset base + i."""

    __slots__ = (
        "base", "held", "late", "leases", "leaving", "logging", "open", "since", "slots", "waiting",
    )  # fmt: skip

    def __init__(self, base: int) -> None:
        self.base = base
        self.open = 0
        """Offsets that are selected and not done."""
        self.waiting = 0
        """Open offsets that are to be handed out."""
        self.late = 0
        """Open offsets that are to be handed out after a time."""
        self.leaving = 0
        """Open offsets that are done, or wait again, once the log has that."""
        self.held: dict[Any, int] = {}
        """Offsets that each member holds."""
        self.since: dict[Any, int] = {}
        """Time since which each member holds an offset of this page."""
        self.leases: dict[Any, dict[int, int]] = {}
        """Time at which leases of each member end -> their offsets, and some held no more."""
        self.slots: np.ndarray[Any, np.dtype[np.uint16]] | None = None
        """The slot of each offset, in a keyed group."""
        self.logging = LOGGED
        """Whether the log knows what is done: LOGGED, being LOGGED, or UNLOGGED."""


Picked: TypeAlias = "list[tuple[Page, int]]"
"""Offsets, as pages and masks."""


class Holdings:
    """The offsets of one group from `next` on."""

    __slots__ = ("_bases", "held", "late", "leaving", "pages", "read", "waiting")

    def __init__(self, read: int) -> None:
        self.read = read
        """Position of the group's reader."""
        self.pages: list[Page] = []
        """Pages in ascending order; offsets before `read` that are in none are done."""
        self._bases: list[int] = []
        self.waiting = self.held = self.late = self.leaving = 0
        """Number of the offsets in each place."""

    @property
    def open(self) -> int:
        """Number of the offsets before `read` that are not done."""
        return self.waiting + self.held + self.late + self.leaving

    @property
    def low(self) -> int:
        """The least offset that is not done: the group's position."""
        for page in self.pages:
            if page.open:
                return page.base + low_bit(page.open)
        return self.read

    # --- pages ------------------------------------------------------------------------------

    def _page(self, offset: int) -> Page:
        """The page of an offset, made if need be."""
        base = offset - offset % PAGE
        bases = self._bases
        if bases and bases[-1] == base:
            return self.pages[-1]
        place = bisect_right(bases, base)
        if place and bases[place - 1] == base:
            return self.pages[place - 1]
        page = Page(base)
        bases.insert(place, base)
        self.pages.insert(place, page)
        return page

    def _found(self, offset: int) -> Page | None:
        """The page of an offset, if there is one."""
        place = bisect_right(self._bases, offset) - 1
        if place < 0 or offset >= self._bases[place] + PAGE:
            return None
        return self.pages[place]

    def within(self, first: int, end: int) -> Iterator[tuple[Page, int]]:
        """Pages that have offsets of [first, end), each with the mask of these offsets."""
        place = max(0, bisect_right(self._bases, first) - 1)
        pages = self.pages
        while place < len(pages):
            page = pages[place]
            base = page.base
            if base >= end:
                return
            place += 1
            if base + PAGE <= first:
                continue
            mask = WHOLE if end >= base + PAGE else ones(end - base)
            if first > base:
                mask &= ~ones(first - base)
            yield page, mask

    def pieces(self, base: int, bits: int) -> Iterator[tuple[Page, int]]:
        """Cut a mask that begins at an offset into pages."""
        at = base % PAGE
        if bits.bit_length() <= PAGE - at:
            yield self._page(base), bits << at
            return
        page_base = base - at
        bits <<= at
        while bits:
            mask = bits & WHOLE
            if mask:
                yield self._page(page_base), mask
            bits >>= PAGE
            page_base += PAGE

    def tidy(self) -> None:
        """Drop pages without open offsets and without anything to be logged.

        The last page stays while its offsets are read still: what was not selected of it is done.
        A page before `low` has nothing to be logged: the group's position tells that it is done.
        """
        pages = self.pages
        if not any(not page.open for page in pages):
            return
        low = self.low
        self.pages = [
            page for page in pages
            if page.open
            or page.base + PAGE > (low if page.logging else self.read)
        ]  # fmt: skip
        self._bases = [page.base for page in self.pages]

    # --- moving offsets from place to place -----------------------------------------------------

    def take_in(self, base: int, bits: int) -> None:
        """Let offsets wait that were read and selected."""
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
                shift = page.base - base
                found |= some << shift if shift >= 0 else some >> -shift
        return found

    def hand(self, base: int, bits: int, member: Any, now_ms: int) -> None:
        """Put waiting offsets into a member's hands."""
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
        """Return ranges as pages and masks; None unless the member holds every offset of them.

        also_waiting: an offset that waits counts as held, as for a holder that came back.
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
        """Pick many ranges, as members of a keyed group have, without a loop over them."""
        bounds = np.array(ranges, np.int64)
        firsts, ends = bounds[:, 0], bounds[:, 1]
        wanted = int((ends - firsts).sum())
        picked: Picked = []
        for page, _ in self.within(ranges[0][0], ranges[-1][1]):
            here = slice(
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
        return None if wanted else picked

    def unhand(self, page: Page, member: Any, mask: int) -> tuple[int, int]:
        """Take offsets from a member, and from those that wait; returns (its own, the waiting).

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

    def leave(self, page: Page, mask: int) -> None:
        """Put offsets that were taken from a member on their way out."""
        page.leaving |= mask
        self.leaving += mask.bit_count()

    def have_left(self, page: Page, mask: int) -> None:
        """Note that offsets on their way out are done."""
        page.leaving &= ~mask
        page.open &= ~mask
        self.leaving -= mask.bit_count()

    def stay(self, page: Page, mask: int, member: Any, now_ms: int) -> None:
        """Let offsets that were withheld for the log be the member's again; None: let them wait."""
        page.leaving &= ~mask
        count = mask.bit_count()
        self.leaving -= count
        if member is None:
            page.waiting |= mask
            self.waiting += count
            return
        page.since.setdefault(member, now_ms)
        page.held[member] = page.held.get(member, 0) | mask
        self.held += count

    def delay(self, page: Page, mask: int) -> None:
        """Put offsets that were taken from a member among those that wait for a time."""
        page.late |= mask
        self.late += mask.bit_count()

    def due(self, page: Page, mask: int) -> int:
        """Let delayed offsets wait for a member again; returns those that were still delayed."""
        mask &= page.late
        page.late ^= mask
        page.waiting |= mask
        count = mask.bit_count()
        self.late -= count
        self.waiting += count
        return mask

    def wait(self, page: Page, mask: int) -> None:
        """Let offsets that were taken from a member wait again."""
        page.waiting |= mask
        self.waiting += mask.bit_count()

    def release(self, members: set[Any], *, leaving: bool = False) -> Picked:
        """Let all offsets that some members held wait again; returns them, for each page.

        leaving: they are put on their way out, and wait once the log has the end of the attempt.
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
                if leaving:
                    self.leave(page, mask)
                else:
                    self.wait(page, mask)
        return released

    def close(self, page: Page, mask: int) -> None:
        """Close waiting offsets without an acknowledgement: they have expired, or are gone."""
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
        """Let the leases of held offsets end at a time, and not before."""
        entries = page.leases.setdefault(member, {})
        for at_ms, rows in list(entries.items()):
            if rows & ~mask:
                entries[at_ms] = rows & ~mask
            else:
                del entries[at_ms]
        entries[due_ms] = entries.get(due_ms, 0) | mask

    def put_off_leases(self, ms: int) -> None:
        """Let all leases last so much longer."""
        for page in self.pages:
            for member, entries in page.leases.items():
                page.leases[member] = {at_ms + ms: rows for at_ms, rows in entries.items()}

    def next_lease(self) -> int:
        """Time at which the next lease ends; 0: there is none."""
        return min(
            (at_ms for page in self.pages for entries in page.leases.values() for at_ms in entries),
            default=0,
        )

    def leases_over(self, now_ms: int) -> list[tuple[Any, Picked]]:
        """Forget the leases that are over; returns the members that still hold some of them."""
        found: dict[Any, Picked] = {}
        for page in self.pages:
            for member, entries in list(page.leases.items()):
                over = 0
                for at_ms in [at_ms for at_ms in entries if at_ms <= now_ms]:
                    over |= entries.pop(at_ms)
                if not entries:
                    del page.leases[member]
                over &= page.held.get(member, 0)
                if over:
                    found.setdefault(member, []).append((page, over))
        return list(found.items())

    def held_by(self, member: Any) -> Picked:
        """Return all offsets that a member holds."""
        return [(page, page.held[member]) for page in self.pages if member in page.held]

    def since(self, member: Any) -> int:
        """Time since which a member holds its oldest offset; 0: it holds none."""
        for page in self.pages:
            found = page.since.get(member)
            if found is not None:
                return found
        return 0

    def holder(self, offset: int) -> Any:
        """Return the member that holds an offset; None: no member does."""
        for page, mask in self.within(offset, offset + 1):
            for member, held in page.held.items():
                if held & mask:
                    return member
        return None

    # --- what the log is to say ---------------------------------------------------------------

    def ranges(self, picked: Picked, logged: int) -> list[Range]:
        """Ranges by which the log is told that these offsets, and done ones beside them, are done.

        logged: the position that the log has; every offset before `low` may be told as done.
        """
        found: list[Range] = []
        first_page = self.pages[0] if self.pages else None
        for page, mask in picked:
            after = page.open & ~mask
            limit = min(PAGE, self.read - page.base)
            # Each run of set bits begins with one whose lower neighbour is not set.
            if (mask & ~(mask << 1)).bit_count() > FEW_RUNS:
                runs = _closed_runs(after, mask, limit)
            else:
                runs = _few_closed_runs(after, mask, limit)
            for begin, stop in runs:
                start = page.base + begin
                if not begin and page is first_page:
                    start = min(logged, page.base + stop)
                if found and found[-1][1] >= start:
                    found[-1] = found[-1][0], page.base + stop
                else:
                    found.append((start, page.base + stop))
        return found

    def done_ahead(self, page: Page) -> list[Range]:
        """The done offsets of a page, as ranges."""
        limit = min(PAGE, self.read - page.base)
        closed = ones(limit) & ~page.open
        if not closed:
            return []
        return [
            (page.base + first, page.base + end)
            for first, end in _closed_runs(page.open, closed, limit)
        ]


def ranges_of(picked: Picked) -> list[Range]:
    """Return offsets as ranges: exactly these."""
    return [
        (page.base + first, page.base + first + count)
        for page, mask in picked
        for first, count in runs_of(mask)
    ]


def _few_closed_runs(open_rows: int, mask: int, limit: int) -> list[tuple[int, int]]:
    """Return what _closed_runs() does, one run after another: quicker for a mask of few runs."""
    found: list[tuple[int, int]] = []
    at = 0
    while mask:
        # Both masks begin where the last run ended: they get shorter as the loop goes on.
        # The run has the first offset of the mask, and begins after the last open one before it.
        skip = (mask & -mask).bit_length() - 1
        begin = at + (open_rows & ((1 << skip) - 1)).bit_length()
        open_rows >>= skip
        mask >>= skip
        at += skip
        if not open_rows:
            found.append((begin, max(limit, at + mask.bit_length())))
            break
        # It ends at the next open one.
        skip = (open_rows & -open_rows).bit_length() - 1
        open_rows >>= skip
        mask >>= skip
        at += skip
        found.append((begin, at))
    return found


def _closed_runs(open_rows: int, mask: int, limit: int) -> list[tuple[int, int]]:
    """Maximal runs (first, end) of offsets that are not open, without those that miss the mask.

    Offsets count from the page's base, up to `limit`. open_rows, mask: a bit for each offset.
    """
    closed = np.zeros(limit + 2, np.int8)
    closed[1:-1] = ~rows_of_bits(open_rows & ones(limit), limit)
    # With an open offset on either side, edges alternate: a run begins, a run ends.
    edges = np.flatnonzero(np.diff(closed))
    firsts, ends = edges[::2], edges[1::2]
    wanted = np.zeros(limit + 1, np.int32)
    np.cumsum(rows_of_bits(mask & ones(limit), limit), out=wanted[1:])
    # wanted: how many offsets of the mask lie before each: more at a run's end, if it meets some.
    chosen = wanted[ends] > wanted[firsts]
    return list(zip(firsts[chosen].tolist(), ends[chosen].tolist(), strict=True))
