"""Streams at run time: positions, hot window, subscriptions.

Owns the facts about a stream that the core keeps in memory beside the durable tables. The rules:
`next` moves only when the journal has appended; `first` only when it has trimmed; offsets are never
given twice, not even by a stream in memory over a restart. Source: docs/design.md (The core and its
shell; Journal).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from malamute_protocol.commands import Level
from malamute_protocol.content import Content
from malamute_protocol.gather import weight_of
from malamute_protocol.header import Header, HeaderTable
from malamute_py.broker.log.ledger import Ledger
from malamute_py.broker.log.ring import RingState
from malamute_py.broker.ready import StreamFacts
from malamute_py.changelog.settings import StreamSettings
from malamute_py.changelog.tables import StreamRow
from malamute_py.matcher import Classing, Index

if TYPE_CHECKING:
    from malamute_py.broker.subscriptions.selection import Groups
    from malamute_py.broker.subscriptions.subscription import Subscription

NEVER = 1 << 63
"""An end that is never reached."""
BATCH_OVERHEAD = 2_000
"""Bytes, about, that a batch in the hot window takes beside its own."""
HEADER_OVERHEAD = 300
"""Bytes, about, that each distinct subject and field map of such a batch takes besides."""
MATCHED_HEADERS_MAX = 16_384
"""Headers whose matches a stream keeps, beside the index."""
MATCHED_WEIGHT_MAX = 1 << 19
"""Words of memory that these matches take, about: one for each pattern and header."""
_HEADER_WEIGHT = 8
"""Words of memory that a header takes besides."""


class Matched(NamedTuple):
    """The match of one header with the patterns of a stream."""

    numbers: tuple[int, ...]
    """Numbers of the patterns that match the header."""
    bytes: int
    """Bytes of the header's texts in a batch."""


class Batch(msgspec.Struct, eq=False):
    """One appended batch in memory: the stamp, and the very frame that the producer sent."""

    stream: Stream
    stamp: bytes
    frame: Any
    content: Content
    base: int
    next: int
    size: int

    @property
    def memory(self) -> int:
        """Bytes, about, of the batch in memory."""
        head = self.content.head
        headers = head.subjects_count + head.fieldmaps_count
        return self.size + BATCH_OVERHEAD + HEADER_OVERHEAD * headers


class Late(msgspec.Struct, eq=False):
    """A batch whose headers are being matched, or that came after such a batch."""

    batch: Batch
    durable: bool
    """Whether the batch is for readers that see only durable records."""
    job: Classing | None = None


class Stream:
    """One stream at run time."""

    __slots__ = (
        "_index",
        "body_kind",
        "bounded",
        "coming",
        "created_lsn",
        "durable",
        "durable_readers",
        "epochs",
        "everyone",
        "first",
        "grouped_headers",
        "groups",
        "handed",
        "hot",
        "kinds",
        "last_time_ms",
        "late",
        "late_bases",
        "late_bytes",
        "least_stop",
        "ledger",
        "level",
        "live",
        "lost_before",
        "matched",
        "matched_weight",
        "name",
        "next",
        "number",
        "numbers",
        "pinned",
        "readers",
        "removed",
        "ring",
        "row",
        "subscriptions",
        "trim_asked",
        "uuid",
        "visible_next",
    )

    def __init__(self, row: StreamRow, ring: RingState, facts: StreamFacts | None) -> None:
        self.row = row
        self.number = row.number
        self.name = row.name
        self.uuid = row.uuid
        self.ring = ring
        self.created_lsn = 0
        """LSN of its creation in ring main; a ring of its own waits until that is visible."""
        self.first = facts.first if facts else 0
        self.next = facts.next if facts else 0
        self.handed = self.next
        """The next offset after the batches that the journal was handed."""
        self.coming = 0
        """Records of atomic steps that were taken and not appended: a cursor may move to them."""
        self.visible_next = self.next
        """Offset after the newest record that no power loss can take back."""
        self.epochs: list[tuple[int, int]] = [(e, o) for e, o in facts.epochs] if facts else []
        self.last_time_ms = facts.last_time_ms if facts else 0
        self.lost_before = 0
        """Offset before which all records were in memory only and are lost since a restart."""
        self.hot: deque[Batch] = deque()
        self._index: Index | None = None
        self.readers: list[Callable[[], None]] = []
        """Calls that wake groups with members when there are more records."""
        self.durable_readers: list[Callable[[], None]] = []
        """Calls that wake groups whose members get only visible records."""
        self.subscriptions: set[Subscription] = set()
        self.durable = 0
        """Count of subscriptions and groups with members that see only visible records."""
        self.numbers: dict[int, dict[Subscription, None]] = {}
        """Pattern number -> its subscriptions in their order, whether live or not. No lists: when
        10,000 clients leave together, each would be searched among all the others."""
        self.everyone: dict[Subscription, None] = {}
        """Subscriptions whose pattern matches every header: the index is not asked about them."""
        self.groups: dict[HeaderTable | tuple[Any, ...], Groups] = {}
        """Header table of a batch -> its groups of subscriptions; empty after any change."""
        self.grouped_headers = 0
        """Distinct headers of the tables in `groups`."""
        self.matched: dict[Header, Matched] = {}
        """Recent header -> its match; empty after any change."""
        self.matched_weight = 0
        self.live = 0
        """Count of live subscriptions."""
        self.late: deque[Late] = deque()
        """Batches that live subscriptions get next, in order; mostly empty."""
        self.late_bases: tuple[deque[int], deque[int]] = (deque(), deque())
        """First offsets of these batches: for `live` subscriptions, and for `durable` ones."""
        self.late_bytes = 0
        self.bounded: set[Subscription] = set()
        """Live subscriptions that stop somewhere."""
        self.least_stop = NEVER
        """Least offset at which one of these stops."""
        self.removed = False
        self.trim_asked = self.first
        self.pinned = NEVER
        """Offset from which on retention leaves the records alone: a cursor pins them."""
        self.ledger = Ledger(self.first, self.next, facts.bytes if facts else 0)
        self.level = 0
        self.body_kind = -1
        self.kinds = 0
        self.settle(row.settings)

    def settle(self, settings: StreamSettings) -> None:
        """Use these settings from now on."""
        self.level = int(Level[settings.level.upper()])
        self.body_kind = ("blob", "list", "arrow").index(settings.body_kind or "blob")
        if not settings.body_kind:
            self.body_kind = -1

    @property
    def index(self) -> Index:
        """The index of the patterns of its subscriptions, made when it is first asked for.

        Most streams need none. An empty index takes 9 KB; 10,000 of them took a quarter of a start.
        """
        if self._index is None:
            self._index = Index()
        return self._index

    @property
    def patterns(self) -> int:
        """Count of distinct patterns of its subscriptions."""
        return (0 if self._index is None else len(self._index)) + bool(self.everyone)

    @property
    def settings(self) -> StreamSettings:
        """The settings, as the change log has them."""
        return self.row.settings

    @property
    def hot_first(self) -> int:
        """Offset of the oldest record in the hot window; `next` when it is empty."""
        return self.hot[0].base if self.hot else self.next

    def hot_place(self, offset: int) -> int:
        """Return the place in the hot window of the batch that holds an offset, or of the next."""
        return max(0, bisect_right(self.hot, offset, key=_base) - 1)

    def late_from(self, durable: bool, tail: int) -> int:
        """Return the offset before which live subscriptions were given everything."""
        bases = self.late_bases[durable]
        return bases[0] if bases else tail

    def epoch_at(self, offset: int) -> int:
        """Return the epoch in which the record at an offset was written."""
        found = self.epochs[0][0] if self.epochs else 0
        for epoch, first in self.epochs:
            if first > offset:
                break
            found = epoch
        return found

    def epoch_end(self, epoch: int, tail: int) -> int:
        """Return the offset after the last record that was written in an epoch or before it."""
        for later, first in self.epochs:
            if later > epoch:
                return first
        return tail

    def position_end(self, epoch: int) -> int:
        """Return the greatest position of an epoch that is still one. epoch: 0 if it is unknown."""
        return self.epoch_end(epoch, self.next) if epoch else self.next

    def regroup(self) -> None:
        """Forget the groups and matches after the subscriptions changed."""
        self.groups.clear()
        self.grouped_headers = 0
        self._forget_matched()

    def _forget_matched(self) -> None:
        self.matched.clear()
        self.matched_weight = 0

    def matching(self, header: Header) -> Matched:
        """Match a header with the index, and keep the result in `matched`."""
        numbers = tuple(self.index.match(header.keys, header.fields))
        weight = len(numbers) + _HEADER_WEIGHT
        if (
            len(self.matched) >= MATCHED_HEADERS_MAX
            or self.matched_weight + weight > MATCHED_WEIGHT_MAX
        ):
            self._forget_matched()
        self.matched_weight += weight
        found = self.matched[header] = Matched(numbers, weight_of(header))
        return found

    def begin_epoch(self, epoch: int) -> None:
        """Note that records of this epoch begin at `next`; costs nothing the second time."""
        if not self.epochs or self.epochs[-1][0] != epoch:
            self.epochs.append((epoch, self.next))


def _base(batch: Batch) -> int:
    return batch.base
