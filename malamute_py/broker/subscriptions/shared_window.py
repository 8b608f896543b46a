"""Shared windows: many subscriptions of one stream that lag, served in one pass over it.

Owns the way from a window, consecutive batches that a cohort is given in one turn, to the rows of
each subscription. A batch has its distinct headers in a table, and for each row a code: the place
of its header there. Subscriptions with one pattern and position share a selector, which has a
number; a row that a selector takes is a pick, and all picks are kept as numpy arrays. The rules: a
batch is looked at once for all subscriptions, and the rows that one of them selects from all
batches of the window leave as one gathered batch, so that a subscription that lags is sent less,
not more; a subscription that takes a large part of the window, or more than its credit, is left to
a turn of its own; subscriptions that lag most are served first; a batch of many headers is a window
of its own, and is matched in steps before. Source: docs/design.md (Speed; Flow control).
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
PICKS_MAX = 1 << 20
"""Picks of one window: memory is bounded."""
NEW_HEADERS_MAX = 512
"""New headers that a window matches before it takes no further batch."""
SURVEYED_MAX = 1 << 18
"""Pairs of a header and a pattern that one survey finds."""
CHUNK_MEMBERS = 256
"""Subscriptions that are given their rows of a surveyed batch in one turn."""
_ROW_BITS = 32
"""A pick is one number: its row in the lowest bits, above them its selector, so that picks in order
are by selector, then by row."""
_ROW_MASK = (1 << _ROW_BITS) - 1


class Cohort:
    """Subscriptions of one stream that wait for a turn, or a read of history, together."""

    __slots__ = ("durable", "members", "stream")

    def __init__(
        self, stream: Stream, durable: bool, members: list[Subscription] | None = None
    ) -> None:
        """durable: the subscriptions see only what no power loss can take back."""
        self.stream = stream
        self.durable = durable
        self.members = [] if members is None else members


class Survey:
    """The patterns that select each header of one batch of many headers, found in steps (a Job).

    Its result is a list of pairs, a header and a pattern that selects it, as two arrays: `places`
    (of the headers among those of the batch) and `numbers` (of the patterns).
    """

    def __init__(self, stream: Stream, wanted: BitMap, content: Content) -> None:
        """wanted: numbers of the patterns to look for, those of the cohort."""
        self._texts, self._places, self._numbers = array("q"), array("q"), array("q")
        # The steps do not hold this object, so that all is free once no reader waits for it.
        self._steps = self._match_all(
            stream, wanted, content, self._texts, self._places, self._numbers
        )

    def run(self, more: Callable[[], bool]) -> bool:
        """Go on until all is done (True) or `more`, asked after each step, says no."""
        # The generator stands where it was left: the next call goes on there.
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
    def _match_all(
        stream: Stream, wanted: BitMap, content: Content, texts: array[int], found: array[int],
        numbers: array[int],
    ) -> Iterator[None]:  # fmt: skip
        """Match a batch's headers in steps.

        texts: gets the bytes of each header's texts. found, numbers: get the place of a header and
        the number of a pattern of `wanted`, for each pair that matches. A class is all headers that
        the same patterns select.
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
            # Each header of the class with each of its patterns: a a a b b b, and 1 2 3 1 2 3.
            found.frombytes(np.repeat(those, len(mine)).tobytes())
            numbers.frombytes(np.tile(mine, len(those)).tobytes())
            if len(found) > SURVEYED_MAX:
                return
            yield


class Surveyed:
    """Subscriptions that wait for their rows of one batch whose survey is done, in the queue."""

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
        """Take the subscriptions whose turn is next, as many as one turn serves."""
        some = self.members[:CHUNK_MEMBERS]
        del self.members[:CHUNK_MEMBERS]
        return some


class Share(NamedTuple):
    """The records of the window for one selector, and the subscriptions that take them."""

    takers: list[Subscription]
    gathered: Gathered


class Outcome(NamedTuple):
    """Result of sharing a window out: who is given what, and who is served otherwise."""

    shares: list[Share]
    reached: int
    """Offset to which the window goes; a subscription in none of the lists has no rows before."""
    alone: list[Subscription]
    """Subscriptions to be served alone: they take too much of it, or it cannot be gathered."""
    later: list[Subscription]
    """Subscriptions that get nothing now: their link has no room, or others got all there was."""


class SharedWindow:
    """Consecutive batches of a stream, and the subscriptions that take rows of them.

    A selector is a pattern and the position from which it selects. Subscriptions with one selector
    are given the same rows. A turn of a cohort makes a window, fills it and shares it out.
    """

    def __init__(self, stream: Stream, members: list[Subscription]) -> None:
        """members: their positions lie before the window's end."""
        # Room is given in this order: subscriptions that lag most come first.
        members.sort(key=_position)
        self._audience = audience_of(stream)
        self._members = members
        self._gathering = SharedGathering(stream.number)
        self._picks: list[Array] = []
        """The picks of each batch: (selector << _ROW_BITS) + the row, counted over the window."""
        self._held = self._held_in_vain = 0
        """Number of these picks, and about how many of them are of selectors that are too broad."""
        self._texts: list[Array] = []
        """For each row, the bytes of its header's texts, although the texts come once a header."""
        self._selectors: dict[tuple[int, int], int] = {}
        """(number of the pattern, position) -> number of the selector."""
        self._takers: list[list[Subscription]] = []
        """The subscriptions of each selector."""
        self._begins: list[int] = []
        """Offset at which each selector begins."""
        self._taken: Array = np.zeros(0, np.int64)
        """About how many rows each selector takes."""
        self._too_broad: Array = np.zeros(0, np.bool_)
        """Mask of the selectors that take too much, whatever follows: their rows are looked for no
        more, and their subscriptions are served alone."""
        self._selectors_of_pattern: dict[int, list[int]] = {}
        """Number of a pattern -> its selectors that are not too broad."""
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
        """Number of the rows of all batches of the window."""
        return self._gathering.rows

    def fill(
        self, batches: Iterable[tuple[Stamp, Content]], end: int, bytes_max: int, *,
        sliced: bool = False,
    ) -> bool:  # fmt: skip
        """Take batches up to `end` into the window; False: one before `end` is left.

        A batch is left that cannot join the others, that does not end before `end`, or for which
        the window is full. bytes_max: of all batches, about. sliced: a batch of many headers is
        left, too, and the number of new headers is bounded: they are matched in one go here.
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
        """Take one surveyed batch as the whole window, unless it cannot be gathered.

        survey: its pairs of a header and a pattern, which become pairs of a header and a selector.
        """
        if not self._gathering.takes(stamp, content):
            return
        self._open(stamp.base_offset)
        # All selectors in the order of their patterns, and beside each the number of its pattern.
        by_number = sorted(self._selectors_of_pattern.items())
        selectors = np.array([selector for _, found in by_number for selector in found], np.int64)
        numbers = np.repeat([number for number, _ in by_number], [len(f) for _, f in by_number])
        # The selectors of a pair's pattern are `counts` entries of `selectors` from `first` on: so
        # many times the pair is repeated.
        first = np.searchsorted(numbers, survey.numbers)
        counts = np.searchsorted(numbers, survey.numbers, "right") - first
        total = int(counts.sum())
        if survey.too_many or total > PICKS_MAX:
            self._refuse_batch(content.head.count)
            return
        # All these ranges one after the other: 0, 1, 2 ... shifted to where each range begins.
        shifts = np.repeat(first - (np.cumsum(counts) - counts), counts)
        paired = selectors[np.arange(total) + shifts]
        if self._enter(stamp, content, np.repeat(survey.places, counts), paired, survey.texts):
            self.reached = stamp.next_offset

    def _open(self, base: int) -> None:
        """Open the window at its first batch, and number the selectors of the subscriptions.

        base: first offset of the batch.
        """
        self.base = base
        for sub in self._members:
            begin = max(sub.position, base)
            next_number = len(self._takers)
            selector = self._selectors.setdefault((sub.pattern_number, begin), next_number)
            if selector == next_number:  # It is the first subscription with this selector.
                self._takers.append([])
                self._begins.append(begin)
                self._selectors_of_pattern.setdefault(sub.pattern_number, []).append(selector)
                self._last_begin = max(self._last_begin, begin)
            self._takers[selector].append(sub)
        self._taken = np.zeros(len(self._takers), np.int64)
        self._too_broad = np.zeros(len(self._takers), np.bool_)

    def _add(self, stamp: Stamp, content: Content) -> bool:
        """Match a batch's headers and add the batch; False: it has too many picks.

        It is then left to the next window, or, if this window would begin with it, its broadest
        selectors are left to turns of their own.
        """
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
            if len(chosen) > PICKS_MAX:
                return self._refuse_batch(count)
        return self._enter(
            stamp, content, np.array(chosen, np.int64), np.array(selectors, np.int64),
            np.array(texts, np.int64),
        )  # fmt: skip

    def _enter(
        self, stamp: Stamp, content: Content, chosen: Array, selectors: Array, weights: Array
    ) -> bool:
        """Add one batch to the window, with its picks; False: these would be too many.

        chosen, selectors: the place of a header and a selector that takes its rows, for each such
        pair. weights: bytes of each header's texts.
        """
        # `codes` has for each row the place of its header; None: all rows have the same one.
        (_, codes), count = content.headers(), content.head.count
        first_row = self._gathering.rows
        rows_of_header = (
            np.array([count]) if codes is None else np.bincount(codes, minlength=len(weights))
        )
        kept = self._count(stamp.base_offset, rows_of_header[chosen], selectors)
        chosen, selectors = chosen[kept], selectors[kept]
        counts = rows_of_header[chosen]  # Picks of each pair.
        many = int(counts.sum())
        if self._held + many > PICKS_MAX and self._held_in_vain > PICKS_MAX // 2:
            self._drop_rows_in_vain()
        if self._held + many > PICKS_MAX:
            return self._refuse_batch(count)
        self._gathering.add(stamp, content)
        self._texts.append(np.repeat(weights, count) if codes is None else weights[codes])
        if not many:
            return True
        # Rows are sorted by header: each pair takes the `counts` rows from its header's begin on.
        # These ranges are laid one after the other as in take().
        order = np.arange(count) if codes is None else np.argsort(codes, kind="stable")
        begins = np.cumsum(rows_of_header) - rows_of_header
        ends = np.cumsum(counts)
        shifts = np.repeat(begins[chosen] - (ends - counts), counts)
        rows = order[np.arange(len(shifts)) + shifts]
        selector_of = np.repeat(selectors, counts)
        if self._last_begin > stamp.base_offset:
            # Some selectors begin amid the batch or after it.
            wanted = rows + stamp.base_offset >= np.array(self._begins)[selector_of]
            rows, selector_of = rows[wanted], selector_of[wanted]
        self._picks.append((selector_of << _ROW_BITS) + rows + first_row)
        self._held += len(rows)
        return True

    def _count(self, base: int, counts: Array, selectors: Array) -> Array:
        """Count the rows that selectors take of a batch, and see which are too broad by now.

        Called before any row of the batch is looked for. counts, selectors: rows of a header, and a
        selector that takes them, for each such pair. Returns a mask of the pairs whose selectors
        take no more than they may.
        """
        if self._last_begin > base:
            # Of selectors that begin after this batch's first row, only some of its rows count:
            # share_out() counts these exactly.
            counts = np.where(np.array(self._begins)[selectors] <= base, counts, 0)
        before = self._taken
        self._taken = before + np.bincount(selectors, counts, len(before)).astype(np.int64)
        too_broad = self._taken > SELECTOR_ROWS_MAX
        for selector in np.flatnonzero(too_broad & ~self._too_broad).tolist():
            any_taker = self._takers[selector][0]  # All of them have the same pattern.
            self._selectors_of_pattern[any_taker.pattern_number].remove(selector)
            self._held_in_vain += int(before[selector])
        self._too_broad = too_broad
        kept: Array = ~too_broad[selectors]
        return kept

    def _drop_rows_in_vain(self) -> None:
        """Drop the picks of selectors that are too broad, to make room for those of others."""
        picks = np.concatenate(self._picks)
        selectors = picks >> _ROW_BITS
        picks = picks[~self._too_broad[selectors]]
        self._picks, self._held, self._held_in_vain = [picks], len(picks), 0

    def _refuse_batch(self, count: int) -> bool:
        """Leave a batch of `count` rows, since the window is full; False: it was not added.

        If it would be the first one, no window would ever have it: the selectors that take much of
        it are too broad then, all of them where none takes much.
        """
        if not self._gathering.rows:
            broad = self._taken > TAKEN_SHARE * count
            self._too_broad = broad if broad.any() else ~broad
        return False

    def share_out(self, bytes_max: int, selector_bytes_max: int) -> Outcome:
        """Give subscriptions their rows, and say who reads alone and who waits for a later turn.

        Called once the window is filled. The rows of a selector are gathered into one batch, which
        all its subscriptions share. bytes_max: about so many for all selectors; selector_bytes_max:
        at most so many for one.
        """
        later: list[Subscription] = []
        alone: list[Subscription] = []
        for selector in np.flatnonzero(self._too_broad).tolist():
            alone += self._takers[selector]
        if not self._picks:
            return Outcome([], self.reached, alone, later)
        picks = np.concatenate(self._picks)
        picks.sort()  # By selector, then by row.
        selectors, rows = picks >> _ROW_BITS, picks & _ROW_MASK
        counts = np.bincount(selectors, minlength=len(self._takers))  # Rows of each selector.
        counts[self._too_broad] = 0
        weights = (self._gathering.sizes() + np.concatenate(self._texts))[rows] + BYTES_A_ROW
        # Bytes of each selector's rows.
        sizes = np.bincount(selectors, weights, len(self._takers)).astype(np.int64).tolist()
        rows_most = max(1, min(SELECTOR_ROWS_MAX, int(TAKEN_SHARE * self._gathering.rows)))
        room: dict[Link, int] = {}
        """Room of each link that what was given here leaves."""
        kept: list[list[Subscription]] = []
        chosen = np.zeros(len(self._takers), np.bool_)
        for selector, count in enumerate(counts.tolist()):
            if not count:
                continue
            takers = self._takers[selector]
            size = sizes[selector]
            if count > rows_most or size > selector_bytes_max:
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
        if len(kept) < len(counts):  # Rows of the other selectors are left out.
            rows = rows[chosen[selectors]]
        found = self._gathering.gather(rows, counts[chosen].tolist())
        shares = [Share(takers, gathered) for takers, gathered in zip(kept, found, strict=True)]
        return Outcome(shares, self.reached, alone, later)


def hot_batches(batches: Iterable[StampedBatch]) -> Iterable[tuple[Stamp, Content]]:
    """Yield batches of the hot window in the form that a shared window takes."""
    for batch in batches:
        yield Stamp.unpack(batch.stamp, verify=False), batch.content


def stored_batches(runs: Sequence[Any], stop: int) -> Iterable[tuple[Stamp, Content]]:
    """Yield batches of the journal's answer that begin before `stop`, as hot_batches() does."""
    for run in runs:
        data = memoryview(run.data)
        for at, size, base, _ in run.spans:
            if base >= stop:
                return
            stamp = Stamp.unpack(data, at, verify=False)
            yield stamp, Content(data[at + stamp.stamp_bytes : at + size])


def _position(sub: Subscription) -> int:
    """Key by which subscriptions that lag most come first."""
    return sub.position
