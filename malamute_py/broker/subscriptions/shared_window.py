"""Shared windows: many subscriptions of one stream that lag, served in one pass over it.

Owns the way from a window of batches to the rows of each subscription. The rules: a batch is looked
at once for all subscriptions, and the rows that one of them selects from all batches of the window
leave as one gathered batch, so that a subscription that lags is sent less, not more; a subscription
that takes a large part of the window, or more than its credit, is left to a turn of its own;
subscriptions that lag most are served first; a batch of many headers is a window of its own, and is
matched in steps before. Source: docs/design.md (Speed; Flow control).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from pyroaring import BitMap

from malamute_protocol.content import Content
from malamute_protocol.gather import BYTES_A_ROW, Gathered, SharedGathering, weight_of
from malamute_protocol.header import STEP_ENTRIES
from malamute_protocol.stamp import Stamp
from malamute_py.broker.links.link import Link, cost_of_few
from malamute_py.broker.log.stream import StampedBatch, Stream
from malamute_py.broker.subscriptions.audience import audience_of
from malamute_py.broker.subscriptions.matching import is_quick
from malamute_py.broker.subscriptions.subscription import Subscription

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

SELECTOR_ROWS_MAX = 4_096
"""Rows of one gathered batch."""
TAKEN_SHARE = 0.25
"""Share of the window's rows beyond which a subscription gets its batches as they are."""
KEYS_MAX = 1 << 20
"""Rows of one window, each counted for every subscription that takes it: memory is bounded."""
NEW_HEADERS_MAX = 512
"""New headers that a window matches before it takes no further batch."""
SURVEYED_MAX = 1 << 18
"""Pairs of a header and a pattern that one survey finds."""
CHUNK_MEMBERS = 256
"""Subscriptions that are given their rows of a surveyed batch in one turn."""
_PLACE_BITS = 32
_PLACE_MASK = (1 << _PLACE_BITS) - 1


class Cohort:
    """Subscriptions of one stream that have a turn, or a read of history, together."""

    __slots__ = ("durable", "members", "stream")

    def __init__(
        self, stream: Stream, durable: bool, members: list[Subscription] | None = None
    ) -> None:
        """durable: the subscriptions see only what no power loss can take back."""
        self.stream = stream
        self.durable = durable
        self.members = [] if members is None else members


class Survey:
    """The patterns that select each header of one batch, found in steps."""

    def __init__(self, stream: Stream, wanted: BitMap, content: Content) -> None:
        """wanted: numbers of the patterns to look for."""
        self._texts, self._places, self._numbers = array("q"), array("q"), array("q")
        # The steps do not hold this object, so that all is free once no reader waits for it.
        self._steps = self._all(stream, wanted, content, self._texts, self._places, self._numbers)

    def run(self, more: Callable[[], bool]) -> bool:
        """Go on until all is done (True) or `more`, asked after each step, says no."""
        return all(more() for _ in self._steps)

    @property
    def too_many(self) -> bool:
        """Whether there are more than SURVEYED_MAX pairs: subscriptions are to be served alone."""
        return len(self._places) > SURVEYED_MAX

    @property
    def texts(self) -> Array:
        """The bytes of each header's texts."""
        return np.frombuffer(self._texts, np.int64)

    @property
    def places(self) -> Array:
        """Places of headers, each as often as a pattern selects it."""
        return np.frombuffer(self._places, np.int64)

    @property
    def numbers(self) -> Array:
        """The number of the pattern that selects each of `places`."""
        return np.frombuffer(self._numbers, np.int64)

    @staticmethod
    def _all(
        stream: Stream, wanted: BitMap, content: Content, texts: array[int], found: array[int],
        numbers: array[int],
    ) -> Iterator[None]:  # fmt: skip
        """Match a batch's headers in steps.

        texts: gets the bytes of each header's texts. found, numbers: get the place of a header and
        the number of a pattern of `wanted`, for each pair that matches.
        """
        classing = audience_of(stream).classing(content)
        yield from classing.steps
        headers, _ = content.headers()
        for first in range(0, len(headers), STEP_ENTRIES):
            texts.extend(map(weight_of, headers[first : first + STEP_ENTRIES]))
            yield
        for bits, places in classing.classes:
            mine = np.array((bits & wanted).to_array(), np.int64)
            # Pairs beyond SURVEYED_MAX are found only so far that `too_many` shows it.
            those = np.array(places[: SURVEYED_MAX // max(1, len(mine)) + 1], np.int64)
            found.frombytes(np.repeat(those, len(mine)).tobytes())
            numbers.frombytes(np.tile(mine, len(those)).tobytes())
            if len(found) > SURVEYED_MAX:
                return
            yield


class Surveyed:
    """Subscriptions that wait for their rows of one surveyed batch."""

    __slots__ = ("content", "members", "stamp", "stream", "survey")

    def __init__(
        self, stream: Stream, members: list[Subscription], stamp: Stamp, content: Content,
        survey: Survey,
    ) -> None:  # fmt: skip
        self.stream = stream
        self.members = members
        self.stamp = stamp
        self.content = content
        self.survey = survey

    def take(self) -> list[Subscription]:
        """Take the subscriptions whose turn is next."""
        some = self.members[:CHUNK_MEMBERS]
        del self.members[:CHUNK_MEMBERS]
        return some


class Share(NamedTuple):
    """The records of the window for one selection, and the subscriptions that take them."""

    takers: list[Subscription]
    gathered: Gathered


class Outcome(NamedTuple):
    """Result of sharing a window out."""

    shares: list[Share]
    reached: int
    """Offset to which the window goes; a subscription in no list has no rows before that."""
    alone: list[Subscription]
    """Subscriptions to be served alone: they take too much of it, or it cannot be gathered."""
    later: list[Subscription]
    """Subscriptions that get nothing now: their link has no room, or others got all there was."""


class SharedWindow:
    """Consecutive batches of a stream, and the subscriptions that take rows of them.

    A selector is a pattern and the position from which it selects. Subscriptions with one selector
    are given the same rows.
    """

    def __init__(self, stream: Stream, members: list[Subscription]) -> None:
        """members: their positions lie before the window's end."""
        # Room is given in this order: subscriptions that lag most come first.
        members.sort(key=_position)
        self._audience = audience_of(stream)
        self._members = members
        self._gathering = SharedGathering(stream.number)
        self._keys: list[Array] = []
        """For each batch, the rows of each selector, each (selector << _PLACE_BITS) + the row."""
        self._held = self._dead = 0
        """Number of these rows, and about how many of them are of selectors that are over."""
        self._texts: list[Array] = []
        """For each row, the bytes of its header's texts, although the texts come once a header."""
        self._selectors: dict[tuple[int, int], int] = {}
        """Selectors by the number of their pattern and their position."""
        self._takers: list[list[Subscription]] = []
        """The subscriptions with each selector."""
        self._begins: list[int] = []
        """Offset at which each selector begins."""
        self._taken: Array = np.zeros(0, np.int64)
        """About how many rows each selector takes."""
        self._over: Array = np.zeros(0, np.bool_)
        """Selectors that take too much, whatever follows: their rows are looked for no more."""
        self._selectors_of_pattern: dict[int, list[int]] = {}
        self._last_begin = 0
        """The highest offset at which a selector begins."""
        self.new = 0
        """New headers that were matched."""
        self.base = -1
        """Offset of the first row; -1: there is none yet."""
        self.reached = 0
        """Offset before which the window ends."""

    @property
    def rows(self) -> int:
        """Rows of all batches."""
        return self._gathering.rows

    def fill(
        self, batches: Iterable[tuple[Stamp, Content]], end: int, bytes_max: int, *,
        sliced: bool = False,
    ) -> bool:  # fmt: skip
        """Take batches up to `end`; False: one is left, since it cannot join or there is enough.

        sliced: the number of headers that are matched in one go is bounded.
        """
        size = 0
        for stamp, content in batches:
            if stamp.base_offset >= end:
                break
            next = stamp.next_offset
            if next > end or size >= bytes_max or not self._gathering.takes(stamp, content):
                return False
            if sliced and (self.new >= NEW_HEADERS_MAX or not is_quick(content)):
                return False
            if self.base < 0:
                self._open(stamp.base_offset)
            if not self._add(stamp, content):
                return False
            size += stamp.size
            self.reached = next
        return True

    def take(self, stamp: Stamp, content: Content, survey: Survey) -> None:
        """Take one surveyed batch as the whole window, unless it cannot be gathered."""
        if not self._gathering.takes(stamp, content):
            return
        self._open(stamp.base_offset)
        # Each match, of a header by a pattern, is repeated for each selector with that pattern.
        by_number = sorted(self._selectors_of_pattern.items())
        selectors = np.array([selector for _, found in by_number for selector in found], np.int64)
        numbers = np.repeat([number for number, _ in by_number], [len(f) for _, f in by_number])
        # The selectors of a match's pattern are `counts` entries of `selectors` from `first` on.
        first = np.searchsorted(numbers, survey.numbers)
        counts = np.searchsorted(numbers, survey.numbers, "right") - first
        total = int(counts.sum())
        if survey.too_many or total > KEYS_MAX:
            self._stop(content.head.count)
            return
        # All these ranges one after the other: 0, 1, 2 ... shifted to where each range begins.
        shifts = np.repeat(first - (np.cumsum(counts) - counts), counts)
        takers = selectors[np.arange(total) + shifts]
        if self._enter(stamp, content, np.repeat(survey.places, counts), takers, survey.texts):
            self.reached = stamp.next_offset

    def _open(self, base: int) -> None:
        """Number the selectors of the subscriptions."""
        self.base = base
        for sub in self._members:
            place = max(sub.position, base)
            selector = self._selectors.setdefault((sub.pattern_number, place), len(self._takers))
            if selector == len(self._takers):
                self._takers.append([])
                self._begins.append(place)
                self._selectors_of_pattern.setdefault(sub.pattern_number, []).append(selector)
                self._last_begin = max(self._last_begin, place)
            self._takers[selector].append(sub)
        self._taken = np.zeros(len(self._takers), np.int64)
        self._over = np.zeros(len(self._takers), np.bool_)

    def _add(self, stamp: Stamp, content: Content) -> bool:
        """Take one batch; False: it is left, since all selectors together take too many rows."""
        headers, _ = content.headers()
        matched, match, by_number = (
            self._audience.matched,
            self._audience.match,
            self._selectors_of_pattern,
        )
        count = content.head.count
        chosen: list[int] = []
        selectors: list[int] = []
        texts: list[int] = []
        for place, header in enumerate(headers):
            known = matched.get(header)
            if known is None:
                known = match(header)
                self.new += 1
            texts.append(known.bytes)
            for number in known.numbers:
                found = by_number.get(number)
                if found is not None:
                    for selector in found:
                        chosen.append(place)
                        selectors.append(selector)
            if len(chosen) > KEYS_MAX:
                return self._stop(count)
        takes, takers = np.array(chosen, np.int64), np.array(selectors, np.int64)
        return self._enter(stamp, content, takes, takers, np.array(texts, np.int64))

    def _enter(
        self, stamp: Stamp, content: Content, takes: Array, takers: Array, weights: Array
    ) -> bool:
        """Take one batch; False: its rows are too many.

        takes, takers: a header and a selector that takes its rows, for each such pair. weights:
        bytes of each header's texts.
        """
        (_, codes), count = content.headers(), content.head.count
        first = self._gathering.rows
        sizes = np.array([count]) if codes is None else np.bincount(codes, minlength=len(weights))
        kept = self._count(stamp.base_offset, sizes[takes], takers)
        takes, takers = takes[kept], takers[kept]
        counts = sizes[takes]
        many = int(counts.sum())
        if self._held + many > KEYS_MAX and self._dead > KEYS_MAX // 2:
            self._drop_rows_of_over()
        if self._held + many > KEYS_MAX:
            return self._stop(count)
        self._gathering.add(stamp, content)
        self._texts.append(np.repeat(weights, count) if codes is None else weights[codes])
        if not many:
            return True
        # Rows are sorted by header: each pair takes the `counts` rows from its header's begin on.
        # These ranges are laid one after the other as in take().
        order = np.arange(count) if codes is None else np.argsort(codes, kind="stable")
        begins = np.cumsum(sizes) - sizes
        ends = np.cumsum(counts)
        shifts = np.repeat(begins[takes] - (ends - counts), counts)
        rows = order[np.arange(len(shifts)) + shifts]
        selector_of = np.repeat(takers, counts)
        if self._last_begin > stamp.base_offset:
            wanted = rows + stamp.base_offset >= np.array(self._begins)[selector_of]
            rows, selector_of = rows[wanted], selector_of[wanted]
        self._keys.append((selector_of << _PLACE_BITS) + rows + first)
        self._held += len(rows)
        return True

    def _count(self, base: int, counts: Array, selectors: Array) -> Array:
        """Count the rows that selectors take of a batch, before any row of it is looked for.

        Returns a mask of the entries whose selectors take no more than they may.
        """
        if self._last_begin > base:
            # Selectors that begin after this batch's first row are counted exactly in share_out().
            counts = np.where(np.array(self._begins)[selectors] <= base, counts, 0)
        before = self._taken
        self._taken = before + np.bincount(selectors, counts, len(before)).astype(np.int64)
        over = self._taken > SELECTOR_ROWS_MAX
        for selector in np.flatnonzero(over & ~self._over).tolist():
            self._selectors_of_pattern[self._takers[selector][0].pattern_number].remove(selector)
            self._dead += int(before[selector])
        self._over = over
        kept: Array = ~over[selectors]
        return kept

    def _drop_rows_of_over(self) -> None:
        """Drop the rows of selectors that take too much of the window."""
        keys = np.concatenate(self._keys)
        keys = keys[~self._over[keys >> _PLACE_BITS]]
        self._keys, self._held, self._dead = [keys], len(keys), 0

    def _stop(self, count: int) -> bool:
        """Take no more; if not even a first batch of `count` rows fits, some selectors are over."""
        if not self._gathering.rows:
            broad = self._taken > TAKEN_SHARE * count
            self._over = broad if broad.any() else ~broad
        return False

    def share_out(self, bytes_max: int, selector_bytes_max: int) -> Outcome:
        """Give subscriptions their rows, and say who reads alone and who waits for a later turn.

        bytes_max: about so many for all selectors; selector_bytes_max: at most so many for one.
        """
        later: list[Subscription] = []
        alone: list[Subscription] = []
        for selector in np.flatnonzero(self._over).tolist():
            alone += self._takers[selector]
        if not self._keys:
            return Outcome([], self.reached, alone, later)
        keys = np.concatenate(self._keys)
        keys.sort()  # By selector, then by row.
        selectors, rows = keys >> _PLACE_BITS, keys & _PLACE_MASK
        counts = np.bincount(selectors, minlength=len(self._takers))
        counts[self._over] = 0
        weights = (self._gathering.sizes() + np.concatenate(self._texts))[rows] + BYTES_A_ROW
        sizes = np.bincount(selectors, weights, len(self._takers)).astype(np.int64).tolist()
        many = max(1, min(SELECTOR_ROWS_MAX, int(TAKEN_SHARE * self._gathering.rows)))
        room: dict[Link, int] = {}
        kept: list[list[Subscription]] = []
        chosen = np.zeros(len(self._takers), np.bool_)
        for selector, count in enumerate(counts.tolist()):
            if not count:
                continue
            takers = self._takers[selector]
            size = sizes[selector]
            if count > many or size > selector_bytes_max:
                alone += takers
                continue
            able: list[Subscription] = []
            for sub in takers:
                link = sub.link
                left = room.get(link)
                if left is None:
                    left = room[link] = link.room
                if count > sub.left_records or size > sub.left_bytes:
                    alone.append(sub)
                elif left <= 0 or bytes_max <= 0:
                    later.append(sub)
                else:
                    able.append(sub)
                    room[link] = left - size - cost_of_few(link)
            if able:  # The bytes count once, since all takers share one encoding.
                bytes_max -= size
                chosen[selector] = True
                kept.append(able)
        if not kept:
            return Outcome([], self.reached, alone, later)
        if len(kept) < len(counts):
            rows = rows[chosen[selectors]]
        found = self._gathering.gather(rows, counts[chosen].tolist())
        shares = [Share(takers, gathered) for takers, gathered in zip(kept, found, strict=True)]
        return Outcome(shares, self.reached, alone, later)


def hot_batches(batches: Iterable[StampedBatch]) -> Iterable[tuple[Stamp, Content]]:
    """Batches of the hot window in the form that a shared window takes."""
    for batch in batches:
        yield Stamp.unpack(batch.stamp, verify=False), batch.content


def stored_batches(runs: Sequence[Any], stop: int) -> Iterable[tuple[Stamp, Content]]:
    """Batches of the journal's answer that lie before an offset, in the same form."""
    for run in runs:
        data = memoryview(run.data)
        for at, size, base, _ in run.spans:
            if base >= stop:
                return
            stamp = Stamp.unpack(data, at, verify=False)
            yield stamp, Content(data[at + stamp.stamp_bytes : at + size])


def _position(sub: Subscription) -> int:
    return sub.position
