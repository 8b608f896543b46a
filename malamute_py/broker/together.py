"""Serving together: many subscriptions of one stream that are behind, in one pass over it.

Owns who may be served so, and the way from a window of batches to what each gets of it. The
rules: a batch is looked at once for all of them, and what one of them selects from all the
batches of the window leaves as one gathered batch, so that whoever falls behind is sent less,
not more; who takes a large part of the window, or more than its credit, is left to a turn of
its own; the longest behind are served first. Source: DESIGN.md, sections 2 and 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.gather import BYTES_A_ROW, Gathered, SharedGathering
from malamute_protocol.stamp import Stamp
from malamute_py.broker.links import Link, cost_of_few
from malamute_py.broker.streams import Batch, Stream
from malamute_py.broker.subscriptions import Subscription

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

LANE_ROWS_MAX = 4_096
"""Rows of one gathered batch."""
TAKEN_SHARE = 0.25
"""Who takes more of the window than this gets its batches as they are."""
KEYS_MAX = 1 << 20
"""Rows of one window, each counted for everyone who takes it: what is in hand stays small."""
_PLACE_BITS = 32
_PLACE_MASK = (1 << _PLACE_BITS) - 1


class Company:
    """Subscriptions of one stream that wait for a turn together."""

    __slots__ = ("durable", "members", "stream")

    def __init__(self, stream: Stream, durable: bool) -> None:
        """durable: they see only what no power loss can take back."""
        self.stream = stream
        self.durable = durable
        self.members: list[Subscription] = []


class Party:
    """Those for whom one read of history is under way."""

    __slots__ = ("members", "stream")

    def __init__(self, stream: Stream, members: list[Subscription]) -> None:
        self.stream = stream
        self.members = members


class Share(NamedTuple):
    """What one selection of the window gets, and who takes it."""

    takers: list[Subscription]
    gathered: Gathered


class Outcome(NamedTuple):
    """Of a window that was looked at for many."""

    shares: list[Share]
    reached: int
    """Up to here the window goes; whoever is in none of the lists has nothing before it."""
    alone: list[Subscription]
    """To be served on their own: they take too much of it, or it cannot be gathered."""
    later: list[Subscription]
    """Not served for want of room or because the window had enough for others."""


class Window:
    """Batches of a stream, one behind the other, and who takes what of them."""

    def __init__(self, stream: Stream, members: list[Subscription]) -> None:
        """members: all behind the window's beginning, or amid it."""
        # The longest behind first: room is given in this order.
        members.sort(key=_position)
        self._stream = stream
        self._members = members
        self._gathering = SharedGathering(stream.number)
        self._keys: list[Array] = []
        """Of each batch, which lane takes which row."""
        self._held = self._dead = 0
        """How many these are, and about how many of them are of lanes that are over."""
        self._texts: list[Array] = []
        """Of each row, what the texts of its header take, which in truth come once."""
        self._lanes: dict[tuple[int, int], int] = {}
        self._takers: list[list[Subscription]] = []
        self._froms: list[int] = []
        self._taken: Array = np.zeros(0, np.int64)
        """Rows of each lane, about."""
        self._over: Array = np.zeros(0, np.bool_)
        """Lanes that take too much, whatever follows: their rows are looked for no longer."""
        self._by_number: dict[int, list[int]] = {}
        self._latest = 0
        self.base = -1
        self.reached = 0

    @property
    def rows(self) -> int:
        """Rows of all batches."""
        return self._gathering.rows

    def fill(self, batches: Iterable[tuple[Stamp, Content]], end: int, bytes_max: int) -> bool:
        """Take batches up to `end`; False: one is left, since it cannot join or there is enough."""
        size = 0
        for stamp, content in batches:
            if stamp.base_offset >= end:
                break
            next = stamp.next_offset
            if next > end or size >= bytes_max or not self._gathering.takes(stamp, content):
                return False
            if self.base < 0:
                self._open(stamp.base_offset)
            if not self._add(stamp, content):
                return False
            size += stamp.size
            self.reached = next
        return True

    def _open(self, base: int) -> None:
        """Put together who takes the same from the same place on."""
        self.base = base
        for sub in self._members:
            place = max(sub.position, base)
            lane = self._lanes.setdefault((sub.pattern_number, place), len(self._takers))
            if lane == len(self._takers):
                self._takers.append([])
                self._froms.append(place)
                self._by_number.setdefault(sub.pattern_number, []).append(lane)
                self._latest = max(self._latest, place)
            self._takers[lane].append(sub)
        self._taken = np.zeros(len(self._takers), np.int64)
        self._over = np.zeros(len(self._takers), np.bool_)

    def _add(self, stamp: Stamp, content: Content) -> bool:
        """Take one batch; False: that many take so much of it that it is left."""
        headers, codes = content.headers()
        matched, match, by_number = self._stream.matched, self._stream.matching, self._by_number
        count = content.head.count
        chosen: list[int] = []
        lanes: list[int] = []
        texts: list[int] = []
        for place, header in enumerate(headers):
            known = matched.get(header)
            if known is None:
                known = match(header)
            texts.append(known.bytes)
            for number in known.numbers:
                found = by_number.get(number)
                if found is not None:
                    for lane in found:
                        chosen.append(place)
                        lanes.append(lane)
            if len(chosen) > KEYS_MAX:
                return self._full(count)
        first = self._gathering.rows
        sizes = np.array([count]) if codes is None else np.bincount(codes, minlength=len(headers))
        takes, takers = np.array(chosen, np.int64), np.array(lanes, np.int64)
        kept = self._count(stamp.base_offset, sizes[takes], takers)
        takes, takers = takes[kept], takers[kept]
        counts = sizes[takes]
        many = int(counts.sum())
        if self._held + many > KEYS_MAX and self._dead > KEYS_MAX // 2:
            self._drop()
        if self._held + many > KEYS_MAX:
            return self._full(count)
        self._gathering.add(stamp, content)
        weights = np.array(texts, np.int64)
        self._texts.append(np.repeat(weights, count) if codes is None else weights[codes])
        if not many:
            return True
        order = np.arange(count) if codes is None else np.argsort(codes, kind="stable")
        begins = np.cumsum(sizes) - sizes
        ends = np.cumsum(counts)
        shifts = np.repeat(begins[takes] - (ends - counts), counts)
        rows = order[np.arange(len(shifts)) + shifts]
        lane_of = np.repeat(takers, counts)
        if self._latest > stamp.base_offset:
            wanted = rows + stamp.base_offset >= np.array(self._froms)[lane_of]
            rows, lane_of = rows[wanted], lane_of[wanted]
        self._keys.append((lane_of << _PLACE_BITS) + rows + first)
        self._held += len(rows)
        return True

    def _count(self, base: int, counts: Array, lanes: Array) -> Array:
        """Count what lanes take of a batch, before any row of it is looked for.

        Returns which entries are of lanes that take no more than they may.
        """
        if self._latest > base:
            # Those that begin amid it or behind: share_out() counts what they really take.
            counts = np.where(np.array(self._froms)[lanes] <= base, counts, 0)
        before = self._taken
        self._taken = before + np.bincount(lanes, counts, len(before)).astype(np.int64)
        over = self._taken > LANE_ROWS_MAX
        for lane in np.flatnonzero(over & ~self._over).tolist():
            self._by_number[self._takers[lane][0].pattern_number].remove(lane)
            self._dead += int(before[lane])
        self._over = over
        kept: Array = ~over[lanes]
        return kept

    def _drop(self) -> None:
        """Drop what is in hand of lanes that are over."""
        keys = np.concatenate(self._keys)
        keys = keys[~self._over[keys >> _PLACE_BITS]]
        self._keys, self._held, self._dead = [keys], len(keys), 0

    def _full(self, count: int) -> bool:
        """Take no more; if not even a first batch of `count` rows fits, some have to go."""
        if not self._gathering.rows:
            broad = self._taken > TAKEN_SHARE * count
            self._over = broad if broad.any() else ~broad
        return False

    def share_out(self, bytes_max: int, lane_bytes_max: int) -> Outcome:
        """Who gets what; all together about `bytes_max` now, and nobody more than the other."""
        later: list[Subscription] = []
        alone: list[Subscription] = []
        for lane in np.flatnonzero(self._over).tolist():
            alone += self._takers[lane]
        if not self._keys:
            return Outcome([], self.reached, alone, later)
        keys = np.concatenate(self._keys)
        keys.sort()
        lanes, rows = keys >> _PLACE_BITS, keys & _PLACE_MASK
        counts = np.bincount(lanes, minlength=len(self._takers))
        counts[self._over] = 0
        weights = (self._gathering.sizes() + np.concatenate(self._texts))[rows] + BYTES_A_ROW
        sizes = np.bincount(lanes, weights, len(self._takers)).astype(np.int64).tolist()
        many = max(1, min(LANE_ROWS_MAX, int(TAKEN_SHARE * self._gathering.rows)))
        room: dict[Link, int] = {}
        kept: list[list[Subscription]] = []
        chosen = np.zeros(len(self._takers), np.bool_)
        for lane, count in enumerate(counts.tolist()):
            if not count:
                continue
            takers = self._takers[lane]
            size = sizes[lane]
            if count > many or size > lane_bytes_max:
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
            if able:
                bytes_max -= size
                chosen[lane] = True
                kept.append(able)
        if not kept:
            return Outcome([], self.reached, alone, later)
        if len(kept) < len(counts):
            rows = rows[chosen[lanes]]
        found = self._gathering.gather(rows, counts[chosen].tolist())
        shares = [Share(takers, gathered) for takers, gathered in zip(kept, found, strict=True)]
        return Outcome(shares, self.reached, alone, later)


def hot_batches(batches: Iterable[Batch]) -> Iterable[tuple[Stamp, Content]]:
    """Batches of the hot window as a window takes them."""
    for batch in batches:
        yield Stamp.unpack(batch.stamp, verify=False), batch.content


def stored_batches(runs: Sequence[Any], stop: int) -> Iterable[tuple[Stamp, Content]]:
    """Batches of an answer from the journal that lie before an offset."""
    for run in runs:
        data = memoryview(run.data)
        for at, size, base, _ in run.spans:
            if base >= stop:
                return
            stamp = Stamp.unpack(data, at, verify=False)
            yield stamp, Content(data[at + stamp.stamp_bytes : at + size])


def _position(sub: Subscription) -> int:
    return sub.position
