"""The audience of a stream: which subscriptions and groups take which header.

A header is the subject and fields of a record. Owns the subscriptions of one stream by their
selection, and what is remembered of recent headers. To match a header is to find which patterns
select it; each pattern has a number, which equal ones share. The rules: a header is matched once a
batch and is a look-up when it comes again; subscriptions that select the same headers form a
selection group and share one encoding, by reference; the work for a batch is proportional to its
headers, its selection groups and the subscriptions in them, never to all subscriptions; what is
remembered is bounded, and forgotten when a subscription comes or goes. Source: docs/design.md,
Speed; SPEC.md, section 5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from pyroaring import BitMap

from malamute_protocol.content import Content
from malamute_protocol.gather import weight_of
from malamute_protocol.header import Header, HeaderTable
from malamute_py.broker.log.stream import NEVER, StampedBatch, Stream
from malamute_py.broker.structures.partition import partition
from malamute_py.broker.subscriptions.matching import is_quick
from malamute_py.broker.subscriptions.subscription import Subscription
from malamute_py.matcher import Classing, Index, compile_pattern

MATCHED_HEADERS_MAX = 16_384
"""Headers whose matches a stream remembers, beside the index."""
MATCHED_WEIGHT_MAX = 1 << 19
"""Words that the remembered matches take, about: one for each pattern that matches a header."""
_HEADER_WEIGHT = 8
"""Words that each remembered header takes besides."""
GROUPED_HEADERS_MAX = 8_192
"""Distinct headers of all tables whose selection groups a stream remembers."""
TABLE_HEADERS_MAX = 256
"""Headers of a table from which on its selection groups are not remembered: a larger table is not
likely to come again."""
_NO_PATTERNS: Final = Index()
"""Index of the streams without patterns, which most streams are: one for each would take 9 KB, and
took a quarter of a start with 10,000 streams."""


class Matched(NamedTuple):
    """Facts that a stream remembers of a header."""

    numbers: tuple[int, ...]
    """Numbers of the patterns that match the header."""
    bytes: int
    """Bytes that the header's texts take in a batch."""


class SelectionGroup:
    """Subscriptions that select the same headers of a table."""

    __slots__ = ("durable", "headers", "live")

    def __init__(self, headers: np.ndarray[Any, np.dtype[np.int32]] | None) -> None:
        self.headers: Any = headers
        """Places of the distinct headers; None: all of them."""
        self.live: list[Subscription] = []
        """Subscriptions that see everything at once; some may be on demand for now."""
        self.durable: list[Subscription] = []
        """Subscriptions that see only what is durable."""

    def of(self, durable: bool) -> list[Subscription]:
        """Return those of one visibility."""
        return self.durable if durable else self.live


class LateBatch(msgspec.Struct):
    """A batch that is given in a later turn: it is being matched, or waits for others' turn."""

    batch: StampedBatch
    durable: bool
    """Whether the batch is for readers that see only what is durable."""
    job: Classing | None = None
    """The job that matches its headers; None: it waits for something else."""
    groups: list[SelectionGroup] | None = None
    """Its selection groups that were not given it yet, the last one next; None: not known yet."""
    looked: int = 0
    """How many subscriptions of the last group were looked at."""

    def next_groups(self, most: int) -> tuple[list[SelectionGroup], int]:
        """Take off the next groups of up to so many subscriptions, or parts of groups.

        Returns them with the subscriptions that are to be given something, and how many others
        were looked at. One that has gone live since the batch came has read it on demand before:
        its position lies after it.
        """
        assert self.groups is not None
        found: list[SelectionGroup] = []
        base, left, passed = self.batch.base, most, 0
        while self.groups and left > 0:
            group = self.groups[-1]
            every = group.of(self.durable)
            some = every[self.looked : self.looked + left]
            self.looked += len(some)
            left -= max(1, len(some))
            if self.looked >= len(every):
                self.groups.pop()
                self.looked = 0
            those = SelectionGroup(group.headers)
            wanting = [sub for sub in some if sub.live and sub.position <= base]
            those.of(self.durable).extend(wanting)
            passed += len(some) - len(wanting)
            found.append(those)
        return found, passed


class Audience:
    """The subscriptions of one stream, and the calls that wake the groups that read it.

    Subscriptions enter and leave here; the fan-out asks for the selection groups of each batch.
    """

    __slots__ = (
        "_grouped_headers",
        "_groups",
        "_matched_weight",
        "_numbers",
        "bounded",
        "count",
        "durable",
        "everyone",
        "index",
        "late",
        "late_bases",
        "late_bytes",
        "least_stop",
        "live",
        "matched",
        "wakers",
    )

    def __init__(self) -> None:
        self.count = 0
        """Number of the subscriptions."""
        self.live = 0
        """Number of the subscriptions that take batches as they come."""
        self.durable = 0
        """Number of the subscriptions and groups with members that see only what is durable."""
        self.index = _NO_PATTERNS
        """Patterns of the subscriptions that do not select every header."""
        self.everyone: dict[Subscription, None] = {}
        """Subscriptions whose pattern matches every header: the index is not asked about them."""
        self._numbers: dict[int, dict[Subscription, None]] = {}
        """Subscriptions by the number of their pattern, in the order in which they came. No lists:
        of 10,000 clients that leave together each would be looked for among all the others."""
        self._groups: dict[HeaderTable | tuple[Any, ...], list[SelectionGroup]] = {}
        """Selection groups of a batch by its header table."""
        self._grouped_headers = 0
        """Distinct headers of these tables."""
        self.matched: dict[Header, Matched] = {}
        """Recent headers, with the patterns that match them."""
        self._matched_weight = 0
        """Words that these take, about."""
        self.late: deque[LateBatch] = deque()
        """Batches that live subscriptions get in later turns, in order; usually none."""
        self.late_bases: tuple[deque[int], deque[int]] = (deque(), deque())
        """First offsets of the late batches: for readers that see everything, and for those that
        see only what is durable."""
        self.late_bytes = 0
        """Memory that the late batches take."""
        self.bounded: set[Subscription] = set()
        """Live subscriptions that stop somewhere."""
        self.least_stop = NEVER
        """No live subscription stops before this offset."""
        self.wakers: tuple[list[Callable[[], None]], list[Callable[[], None]]] = ([], [])
        """Calls that each wake a group with members when there is more to read: those of groups
        that read everything, and those of groups that read only what is durable. A stream with pins
        has a call of theirs among the first."""

    @property
    def patterns(self) -> int:
        """How many different patterns the subscriptions have."""
        return len(self.index) + bool(self.everyone)

    @property
    def subscriptions(self) -> list[Subscription]:
        """All subscriptions of the stream, live or not: a new list, as callers may end some.

        For its removal, a change of its schema, and live delivery that falls back to the journal.
        """
        found = list(self.everyone)
        for same in self._numbers.values():
            found += same
        return found

    def late_from(self, durable: bool, tail: int) -> int:
        """Return the offset before which live subscriptions were given everything.

        That is the tail, but while a batch is late, the batch's base.
        A COVER that is sent meanwhile may promise nothing beyond it (Subscription.place). durable:
        of the subscriptions that get only what is durable.
        """
        bases = self.late_bases[durable]
        return bases[0] if bases else tail

    # --- coming and going ----------------------------------------------------------------------

    def add_reader(self, wake: Callable[[], None], durable: bool) -> None:
        """Have `wake` called whenever there is more to read, for a group or for pins of cursors.

        durable: only for what no power loss can take back.
        """
        self.wakers[durable].append(wake)
        self.durable += durable

    def remove_reader(self, wake: Callable[[], None], durable: bool) -> None:
        """Have `wake`, which was added, called no longer."""
        self.wakers[durable].remove(wake)
        self.durable -= durable

    def enter(self, sub: Subscription, pattern: Any) -> None:
        """Enter a subscription under the number of its pattern.

        Raises BrokerRefused: it is not a pattern. What is remembered of recent headers does not
        know a new pattern, and is forgotten.
        """
        # The two usual forms of "everything" are known without being compiled.
        if pattern in (["all"], ["topic", "#"]) or compile_pattern(pattern).canonical == ("all",):
            sub.everything = True
            self.everyone[sub] = None
        else:
            if self.index is _NO_PATTERNS:
                self.index = Index()
            sub.pattern_number = self.index.add(pattern)
            self._numbers.setdefault(sub.pattern_number, {})[sub] = None
        self.count += 1
        self.durable += sub.durable
        self.forget()

    def leave(self, sub: Subscription) -> None:
        """Remove a subscription that ends, and forget what is remembered of recent headers."""
        if sub.live:
            self.live -= 1
        self.bounded.discard(sub)
        self.count -= 1
        self.durable -= sub.durable
        if sub.everything:
            del self.everyone[sub]
        else:
            same = self._numbers[sub.pattern_number]
            del same[sub]
            if not same:
                del self._numbers[sub.pattern_number]
            self.index.discard(sub.pattern_number)
        self.forget()

    def go_live(self, sub: Subscription) -> None:
        """Count a subscription among those that take batches as they come: it is at the tail."""
        sub.live = True
        sub.rows = None  # For history alone.
        self.live += 1
        if sub.stop != NEVER:
            self.bounded.add(sub)
            self.least_stop = min(self.least_stop, sub.stop)

    def go_on_demand(self, sub: Subscription) -> None:
        """Count a subscription among those that take batches as they come no longer: it lags."""
        sub.live = False
        self.live -= 1
        if sub.stop != NEVER:
            self.bounded.discard(sub)  # `least_stop` may be too low then, which only costs a look.

    # --- headers one by one ---------------------------------------------------------------------

    def forget(self) -> None:
        """Forget the matches and selection groups of recent headers.

        The subscriptions change, or there are too many headers.
        """
        self._groups.clear()
        self._grouped_headers = 0
        self._forget_matched()

    def _forget_matched(self) -> None:
        """Forget the matches of recent headers alone, as for headers that are too many."""
        self.matched.clear()
        self._matched_weight = 0

    def match(self, header: Header) -> Matched:
        """Find the patterns that match a header, and remember them in `matched`.

        For windows of many lagging subscriptions. When too much is remembered, all of it is
        forgotten at once, which costs less than an order of age.
        """
        numbers = tuple(self.index.match(header.keys, header.fields))
        weight = len(numbers) + _HEADER_WEIGHT
        if (
            len(self.matched) >= MATCHED_HEADERS_MAX
            or self._matched_weight + weight > MATCHED_WEIGHT_MAX
        ):
            self._forget_matched()
        self._matched_weight += weight
        found = self.matched[header] = Matched(numbers, weight_of(header))
        return found

    def classing(self, content: Content) -> Classing:
        """Return the job that classes a batch's headers: those that the same patterns select.

        Called for a batch that takes long to match. Its result is as that of header_classes().
        """
        return Classing(self.index, lambda: content.headers()[0], content.make_headers())

    # --- the selection groups of a batch --------------------------------------------------------

    def known_groups(self, content: Content) -> list[SelectionGroup] | None:
        """Return the selection groups of a batch by its header table; None: they are not known.

        The first look at each batch that comes. The list is shared, and must not be changed.
        """
        if len(self.everyone) == self.count:
            # No subscription looks at headers, so they need not be looked at here.
            any_table = ()  # In place of a header table.
            found = self._groups.get(any_table)
            if found is None:
                group = SelectionGroup(headers=None)
                _enlist(group, self.everyone)
                found = self._groups[any_table] = [group]
            return found
        if content.head.fieldmaps_count and not is_quick(content):
            return None  # Groups of so large a table are not remembered, and its key costs time.
        key = content.headers_key
        if type(key) is tuple and len(key) > TABLE_HEADERS_MAX:
            return None
        return self._groups.get(key)

    def groups_of_classes(
        self, content: Content, classes: list[tuple[BitMap, list[int]]]
    ) -> list[SelectionGroup]:
        """Return the selection groups of a batch whose headers were just matched.

        They are remembered if the header table may come again. classes: (numbers of patterns,
        places of the headers that exactly these select).
        """
        headers, _ = content.headers()
        found = self._group(len(headers), classes)
        if len(headers) <= TABLE_HEADERS_MAX and is_quick(content):
            if self._grouped_headers + len(headers) > GROUPED_HEADERS_MAX:
                self.forget()
            self._groups[content.headers_key] = found
            self._grouped_headers += len(headers)
        return found

    def groups_of_late(
        self, late: LateBatch, classes: list[tuple[BitMap, list[int]]] | None
    ) -> list[SelectionGroup]:
        """Return the selection groups of a late batch, which the caller may change.

        classes: of the batch's headers; None: the groups are known.
        """
        content = late.batch.content
        if classes is None:
            groups = self.known_groups(content)
            assert groups is not None
            return groups.copy()
        headers, _ = content.headers()
        return self._group(len(headers), classes)

    def _group(self, count: int, classes: list[tuple[BitMap, list[int]]]) -> list[SelectionGroup]:
        """Return the selection groups of a batch: subscriptions that get the same rows, together.

        They need not be live: delivery passes over those that are not. count: number of the batch's
        distinct headers. classes: (numbers of patterns, places of the headers that exactly these
        select).
        """
        groups: list[SelectionGroup] = []
        all_group: SelectionGroup | None = None
        # From "headers by the patterns that select them" to "patterns by the headers they select".
        for numbers, places in partition(classes):
            if len(places) == count:
                group = all_group = SelectionGroup(headers=None)  # It selects every header.
            else:
                group = SelectionGroup(np.array(places, np.int32))
            for number in numbers:
                # A pattern may have gone while the headers were matched, so that none has it.
                _enlist(group, self._numbers.get(number, ()))
            groups.append(group)
        if self.everyone:
            if all_group is None:
                all_group = SelectionGroup(headers=None)
                groups.append(all_group)
            _enlist(all_group, self.everyone)
        return groups


def audience_of(stream: Stream) -> Audience:
    """Return the whole audience of a stream, of which the log room knows AudienceFacts only."""
    audience = stream.audience
    assert isinstance(audience, Audience)
    return audience


def _enlist(group: SelectionGroup, subscriptions: Iterable[Subscription]) -> None:
    """Add subscriptions to a selection group, by their visibility."""
    for subscription in subscriptions:
        (group.durable if subscription.durable else group.live).append(subscription)


def header_classes(index: Index, headers: Sequence[Header]) -> list[tuple[BitMap, list[int]]]:
    """Return the headers of a batch by class: (numbers of patterns, places of the headers).

    A class is all headers that exactly these patterns select. Headers that no pattern selects are
    left out. headers: few; a Classing classes many in steps.
    """
    found: dict[bytes, tuple[BitMap, list[int]]] = {}  # By the set of numbers, as bytes.
    for place, header in enumerate(headers):
        numbers = index.match(header.keys, header.fields)
        if not numbers:
            continue
        value = numbers.serialize()
        known = found.get(value)
        if known is None:
            found[value] = (numbers, [place])
        else:
            _, places = known
            places.append(place)
    return list(found.values())
