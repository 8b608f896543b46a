"""Live delivery: the hot window, and the fan-out of each batch as it comes.

A live subscription stands at the tail and takes each batch as it comes; one on demand is served in
turns, from the hot window or the journal. Owns the hot window, which is the newest batches of all
streams in memory, from which readers a little behind are served without the journal; and the turn
in which live subscriptions take a batch. The rules: one encoding for each selection group, its
frames shared by reference; a subscription that has no credit or no room for a batch that it selects
goes on demand in that turn, and loses nothing; a live subscription that selects nothing of a batch
costs nothing. A selection group is the subscriptions that select the same headers of a batch. A
late batch is one that live subscriptions get in a later turn, with all batches of its stream after
it: its headers take long to match, or more subscriptions select from it than are looked at in a
turn, so that they get it in parts. Source: docs/design.md (Speed; Flow control).
"""

from __future__ import annotations

import sys
from collections import deque
from functools import partial
from typing import Any, Final

from malamute_protocol.commands import Cover, Deliver, Mode
from malamute_protocol.extract import can_scatter
from malamute_protocol.stamp import append_time_of
from malamute_py.broker.batches.encoding import FEW_ROWS, Encoding, encoding_of, scattered
from malamute_py.broker.batches.rows import Mask, narrow, unexpired, within_client_time
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link, Receiver, cost_of_few
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.stream import NEVER, StampedBatch, Stream
from malamute_py.broker.subscriptions.audience import (
    Audience,
    LateBatch,
    SelectionGroup,
    audience_of,
    header_classes,
)
from malamute_py.broker.subscriptions.matching import Matching, is_quick
from malamute_py.broker.subscriptions.selection import rows_of_group, rows_of_groups, select
from malamute_py.broker.subscriptions.subscription import Subscription
from malamute_py.matcher import Classing

SMALL_TABLE = 32
"""Headers of a batch that are matched in one go where no expression is looked for."""
CAREFUL_BATCHES = 512
"""Batches that a subscription takes one by one after an error, to find the batch that caused it."""
LINK_MOST = 64
"""Live subscriptions that are looked at for each link that gets something, before it is sent."""
QUICKLY = 4
"""As long as they are up to so many times `fan_out_max` together."""
LINK_LEAST = 8
"""Live subscriptions that are looked at for each such link, however many links there are."""
LOOKS = 8
"""Subscriptions that are only looked at for the cost of one that is given something."""
_MANY = 4
"""Selection groups from which on their rows are looked for in one pass."""


class Delivery:
    """Delivery to live subscriptions, and the covers of all subscriptions.

    The broker calls fan_out() for each batch. A cover is the offsets that a command accounts for.
    """

    def __init__(self, shard: Shard, links: Links, matching: Matching) -> None:
        self._shard = shard
        self._times = shard.delivery_times
        self._links = links
        self._hot: deque[StampedBatch] = deque()
        """The hot window: the newest batches of all streams, oldest first."""
        self.hot_bytes = 0
        self.late_bytes = 0
        """Bytes of late batches of all streams."""
        self._late: Final[dict[Audience, None]] = {}
        """Audiences that have late batches."""
        self.given = 0
        """Subscriptions that were given something in this turn, or since the loop last sent; LOOKS
        that were only looked at count as one."""
        self._fan_out_max = shard.settings.fan_out_max
        self._bytes_min = shard.settings.extract_bytes_min
        self._share = shard.settings.extract_share
        self._matching = matching
        self.fallen: Final[deque[Subscription]] = deque()
        """Subscriptions that went on demand although they may be given something: each gets a
        turn."""
        self.waiting: Final[dict[Audience, None]] = {}
        """Audiences whose first late batch was put off as enough was given: they go on in turn."""
        self.queues: Final = (self.fallen, self.waiting)

    # --- the hot window -----------------------------------------------------------------

    def keep(self, batch: StampedBatch) -> None:
        """Put a batch into the hot window, from which readers a little behind are served.

        Such a read needs no journal. The oldest batches of all streams leave when it is full.
        """
        self._hot.append(batch)
        batch.stream.hot.append(batch)
        self.hot_bytes += batch.memory
        while self.hot_bytes > self._shard.settings.hot_bytes and len(self._hot) > 1:
            oldest = self._hot.popleft()
            self.hot_bytes -= oldest.memory
            hot = oldest.stream.hot
            if hot and hot[0] is oldest:  # forget() may have dropped it there.
                hot.popleft()

    def forget(self, stream: Stream, before: int) -> None:
        """Drop batches before an offset from a stream's part of the hot window: they are gone.

        They leave the order of all batches, and the count of bytes, when keep() comes to them.
        """
        hot = stream.hot
        while hot and hot[0].next <= before:
            hot.popleft()

    # --- the fan-out ---------------------------------------------------------------------

    def fan_out(self, batch: StampedBatch, durable: bool) -> None:
        """Give a batch to the live subscriptions of one visibility that select from it.

        Called when the journal has appended the batch, for those that see everything, and again
        (`durable`) when no power loss can take it back, for those that see only that.
        """
        audience = batch.stream.audience
        assert isinstance(audience, Audience)
        if not durable:
            self.keep(batch)
        for wake in audience.wakers[durable]:  # Groups with this visibility read on demand.
            wake()
        if not audience.live or (durable and not audience.durable):
            return
        if audience.late or self.waiting or self._left() <= 0:
            # Subscriptions take batches in order, and streams that were put off come first.
            if not audience.late:
                self.waiting[audience] = None
            self._put_off(audience, LateBatch(batch, durable))
            return
        stream = batch.stream
        if durable and stream.bounded and stream.is_past(batch, self._shard.now_ms):
            # It grew too old before it was durable: on demand the subscriptions are told so.
            self._fall_back(audience, batch, durable)
            return
        try:
            groups = audience.known_groups(batch.content)
            if groups is None:
                self._match(audience, batch, durable)
            else:
                self._give_or_put_off(audience, batch, durable, groups)
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._step_back(audience, batch, durable, error)

    def _step_back(
        self, audience: Audience, batch: StampedBatch, durable: bool, error: Exception
    ) -> None:
        """Let each subscription that was not given a batch take it alone, after an error.

        On demand, batch by batch (`careful`), the error is met again by those subscriptions alone
        for which the batch cannot be handled: they miss it, with a GAP that names it.
        """
        self._shard.erred("fan-out", error, stream=batch.stream.name, offset=batch.base)
        for sub in self._fall_back(audience, batch, durable):
            sub.careful = CAREFUL_BATCHES

    def _fall_back(
        self, audience: Audience, batch: StampedBatch, durable: bool
    ) -> list[Subscription]:
        """Switch live subscriptions that were not given a batch to delivery on demand; return them.

        Those that select nothing of it, and so had nothing to be given, are among them.
        """
        fallen = [
            sub
            for sub in audience.subscriptions
            if sub.live and sub.durable == durable and sub.covered < batch.next
        ]
        for sub in fallen:
            self.fall_behind(sub, batch.base)
            self.fallen.append(sub)
        if batch.next >= audience.least_stop:
            self._end_bounded(audience)
        return fallen

    def _match(self, audience: Audience, batch: StampedBatch, durable: bool) -> None:
        """Find the selection groups of a batch with unknown headers, and give them the batch.

        Headers that may take long to match are classed by a job in slices: a class is all headers
        that the same patterns select. If it is not done in this turn, the batch is late.
        """
        content, index = batch.content, audience.index
        if index.slow or not is_quick(content) or len(content.headers()[0]) > SMALL_TABLE:
            job = audience.classing(content)
            if not self._matching.run(job):
                self._put_off(audience, LateBatch(batch, durable, job))
                self._go_on(audience, job)
                return
            classes = job.classes
        else:
            classes = header_classes(index, content.headers()[0])
        groups = audience.groups_of_classes(content, classes)
        self._give_or_put_off(audience, batch, durable, groups)

    def _give_or_put_off(
        self, audience: Audience, batch: StampedBatch, durable: bool, groups: list[SelectionGroup]
    ) -> None:
        """Give a batch to its selection groups, or put it off: they are too many for a turn."""
        most = self._fan_out_max
        if audience.live > most and sum(len(group.of(durable)) for group in groups) > most:
            self.waiting[audience] = None
            self._put_off(audience, LateBatch(batch, durable, groups=groups.copy()))
            return
        self._fan_out(audience, batch, durable, groups)
        if durable:
            self._note_time(batch)
        else:
            self._times.zeros += 1  # It was appended in this turn.

    def _note_time(self, batch: StampedBatch) -> None:
        """Count how long after its append a batch was delivered."""
        took_ms = self._shard.now_ms - append_time_of(batch.stamp)
        self._times.add(1_000_000 * max(0, took_ms))  # In nanoseconds.

    def _go_on(self, audience: Audience, job: Classing) -> None:
        """Go on in later turns to match the headers of a stream's first late batch."""

        def wanted() -> bool:
            """Whether that batch is still the first late one, and some subscription live."""
            return bool(audience.live and audience.late) and audience.late[0].job is job

        self._matching.later(
            job,
            partial(self._matched, audience, job),
            wanted,
            partial(self._unmatched, audience, job),
        )

    def _unmatched(self, audience: Audience, job: Classing, error: Exception) -> None:
        """Have live subscriptions read the first late batch on demand: an error came of its match.

        On demand, each reads it from memory or the log at its own pace, and is told if it cannot be
        handled. The late batches after it are delivered. Nothing happens where the job's batch is
        the first no more.
        """
        late = audience.late[0] if audience.late else None
        if late is not None and late.job is job:
            self._step_back(audience, late.batch, late.durable, error)
            self._drop_first_late(audience)
            self._give_late(audience)

    def _put_off(self, audience: Audience, late: LateBatch) -> None:
        """Add a late batch to those of its stream; if too much waits, _give_up_late() it."""
        batch = late.batch
        audience.late.append(late)
        audience.late_bases[late.durable].append(batch.base)
        self._late[audience] = None
        self._count_late(audience, batch.memory)
        settings = self._shard.settings
        # One batch alone waits, however large it is.
        if audience.late_bytes > settings.matching_bytes_max and len(audience.late) > 1:
            self._give_up_late(audience)
        if self.late_bytes > settings.hot_bytes:
            # All streams together may put off as much as the hot window holds; then the largest go,
            # until a quarter is free: not each further batch is to come here.
            for largest in sorted(self._late, key=_late_bytes, reverse=True):
                if self.late_bytes <= settings.hot_bytes * 3 // 4:
                    break
                self._give_up_late(largest)

    def _count_late(self, audience: Audience, size: int) -> None:
        """Count bytes of late batches, which are bounded; below 0: of such as are late no more."""
        audience.late_bytes += size
        self.late_bytes += size

    def _give_up_late(self, audience: Audience) -> None:
        """Give up late batches: live subscriptions that wait for them read them on demand.

        Called where too much waits, or some of what waits is gone meanwhile.
        """
        self._shard.counters["matching_overtaken"] += 1
        for sub in audience.subscriptions:
            if sub.live and audience.late_bases[sub.durable]:
                self.fall_behind(sub, sub.place)
                self.fallen.append(sub)
        audience.late.clear()
        for bases in audience.late_bases:
            bases.clear()
        self._count_late(audience, -audience.late_bytes)
        self._late.pop(audience, None)
        self.waiting.pop(audience, None)

    def _matched(self, audience: Audience, job: Classing) -> None:
        """Give the late batch whose headers a job has matched, and the late batches after it.

        Called when the job is done, or was not wanted any more.
        """
        late = audience.late[0] if audience.late else None
        if late is None or late.job is not job:
            return  # The subscriptions did not wait for it any more.
        if self._is_past(late):
            self._give_up_late(audience)
            return
        # Without live subscriptions the matching was given up, and may not be done.
        if audience.live and not self._give_one_late(audience, late, job):
            return
        self._drop_first_late(audience)
        self._give_late(audience)

    def _is_past(self, late: LateBatch) -> bool:
        """Whether records of a late batch may have been purged, or grown too old, meanwhile.

        Delivery on demand leaves these out, and tells of them.
        """
        batch, stream = late.batch, late.batch.stream
        return batch.base < stream.purges.before or stream.is_past(batch, self._shard.now_ms)

    def refill(self) -> None:
        """Let a new turn of the loop give as much as a turn may."""
        self.given = 0

    def finish(self) -> None:
        """Give all that waits, before the broker ends."""
        self._fan_out_max = sys.maxsize
        self.give_waiting()

    def sent(self) -> None:
        """Note that the loop sends what was given: more may be, unless some of it waits."""
        if not self.waiting:
            self.given = 0

    def _left(self) -> int:
        """Return how many live subscriptions may still be looked at; not above 0: the rest waits.

        A message costs about as much as some ten deliveries. So links that have something to be
        sent are given more of them together: LINK_MOST each as long as that is quickly done.
        """
        most, links = self._fan_out_max, len(self._links.dirty)
        return max(most, min(LINK_MOST * links, QUICKLY * most), LINK_LEAST * links) - self.given

    def give_waiting(self) -> None:
        """Go on with the audiences that were put off, up to what may be given in a turn.

        Called in each turn of the broker's loop that has such work.
        """
        while self.waiting and self._left() > 0:
            audience = next(iter(self.waiting))
            del self.waiting[audience]
            if audience.late and audience.late[0].job is None:
                self._give_late(audience)

    def _give_late(self, audience: Audience) -> None:
        """Give late batches in their order, up to one that has to wait, or to be matched."""
        while audience.late:
            late = audience.late[0]
            if self._is_past(late):
                self._give_up_late(audience)
                return
            if audience.live and not self._give_one_late(audience, late, job=None):
                return
            self._drop_first_late(audience)

    def _give_one_late(self, audience: Audience, late: LateBatch, job: Classing | None) -> bool:
        """Give one late batch; False: a job under way has to match it first, or the rest waits.

        job: the job that has matched the headers; None: the batch waited for something else, and
        its groups may be known by now. An error is contained, and counts as given.
        """
        content = late.batch.content
        try:
            if late.groups is None:
                classes = None if job is None else job.classes
                if job is None and audience.known_groups(content) is None:
                    late.job = audience.classing(content)
                    if not self._matching.run(late.job):
                        self._go_on(audience, late.job)
                        return False
                    classes = late.job.classes
                late.groups, late.job = audience.groups_of_late(late, classes), None
            while late.groups:
                left = self._left()
                if left <= 0:
                    self.waiting[audience] = None
                    return False
                some, passed = late.next_groups(left)
                self.given += 1 + passed // LOOKS
                self._fan_out(audience, late.batch, late.durable, some)
            self._note_time(late.batch)
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._step_back(audience, late.batch, late.durable, error)
        return True

    def _drop_first_late(self, audience: Audience) -> None:
        """Remove the first late batch, and end the subscriptions that stop in it."""
        late = audience.late.popleft()
        audience.late_bases[late.durable].popleft()
        self._count_late(audience, -late.batch.memory)
        if not audience.late:
            del self._late[audience]
        if late.batch.next >= audience.least_stop:
            self._end_bounded(audience)

    def _fan_out(
        self, audience: Audience, batch: StampedBatch, durable: bool, groups: list[SelectionGroup]
    ) -> None:
        """Give a batch's rows that have not expired to live subscriptions, by selection group.

        groups: of the batch. Each is given one encoding: the batch as it is, with a bitmap of
        the rows, or the rows as a batch of their own.
        """
        content = batch.content
        alive = unexpired(content, self._shard.now_ms)
        if (
            len(groups) >= _MANY
            and alive is None
            and batch.size >= self._bytes_min
            and can_scatter(content)
        ):
            groups = self._scatter(batch, groups, durable)
        for group in groups:
            subscriptions = group.of(durable)
            if not subscriptions:
                continue
            if group.headers is None and alive is None:
                self._give(batch, mask=None, encoding=None, subscriptions=subscriptions)
                continue
            mask = rows_of_group(content, group)
            if alive is not None:
                mask = narrow(mask, alive)
            encoding = encoding_of(batch, mask, self._bytes_min, self._share)
            if encoding is not None:
                self._give(batch, mask, encoding, subscriptions)
        if batch.next >= audience.least_stop:
            self._end_bounded(audience)

    def _scatter(
        self, batch: StampedBatch, groups: list[SelectionGroup], durable: bool
    ) -> list[SelectionGroup]:
        """Give their rows to the groups that take few of a batch's rows; returns the other groups.

        The rows of all these groups are copied in one pass over the batch, where each group by
        itself would need a mask of the whole batch.
        """
        few: list[tuple[list[Subscription], list[int]]] = []
        others: list[SelectionGroup] = []
        selective = [group for group in groups if group.headers is not None]
        count = batch.next - batch.base
        # Few are up to a 128th of the batch's rows, or FEW_ROWS, and less than the share up to
        # which rows are sent as a batch of their own.
        rows_most = min(max(FEW_ROWS, count >> 7), self._share * count)
        for group, rows in zip(selective, rows_of_groups(batch.content, selective), strict=True):
            subscriptions = group.of(durable)
            if not subscriptions or not rows:
                continue
            if len(rows) < rows_most and all(sub.plain for sub in subscriptions):
                few.append((subscriptions, rows))
            else:
                others.append(group)
        encodings = scattered(batch, [rows for _, rows in few])
        for (subscriptions, _), encoding in zip(few, encodings, strict=True):
            self._give(batch, mask=None, encoding=encoding, subscriptions=subscriptions, few=True)
        others += [group for group in groups if group.headers is None]
        return others

    def _give(
        self,
        batch: StampedBatch,
        mask: Mask | None,
        encoding: Encoding | None,
        subscriptions: list[Subscription],
        *,
        few: bool = False,
    ) -> None:
        """Give one encoding (None: the batch as it is) to the live subscriptions of a group.

        A subscription without credit or room falls behind. mask: the rows of the encoding, for
        subscriptions that thin them out further; None: all, or no subscription does. few: the
        encoding has a few rows, which weigh more than their bytes.
        """
        next = batch.next
        if encoding is None:
            size, count = batch.size, next - batch.base
            frames: tuple[Any, ...] = (batch.stamp, batch.frame)
            rows: bytes | None = None
        else:
            plain = encoding.for_(whole=False)
            size, count, frames, rows = plain.bytes, plain.count, plain.frames, plain.rows
        dirty = self._links.dirty
        windows: dict[tuple[int, int], Encoding | None] = {}
        records = taken = live = 0
        for sub in subscriptions:
            if not sub.live:
                continue
            link = sub.link
            live += 1
            if sub.left_records <= 0 or sub.left_bytes <= 0 or link.room <= 0:
                # A subscription whose client-time window takes no row of the batch stays live.
                if sub.client_time is None or self._window(batch, mask, sub, windows) is not None:
                    self.fall_behind(sub, batch.base)
                continue
            if sub.plain:
                # As put() does, without its calls: this is the way of most deliveries.
                out = link.out
                if not out:
                    dirty.append(link)  # Links that have something to be sent.
                # Two frames: stamp and content.
                out.append(Deliver(sub.number, sub.covered, next, 2, rows))
                link.frames += frames
                sub.covered = next
                sub.left_records -= count
                sub.left_bytes -= size
                cost = size + cost_of_few(link) if few else size
                link.room -= cost
                link.delivered_bytes += cost
                records += count
                taken += 1
                if link.room < link.ask_below:
                    self._links.ask_if_little_room(link)
                continue
            if encoding is None:
                encoding = Encoding(batch, None, count, extracts=False)
            special = self._special(batch, mask, encoding, sub, windows)
            if special is not None:
                self.deliver(sub, min(next, sub.stop), special)
        self.given += live + len(subscriptions) // LOOKS
        counters = self._shard.counters
        counters["records_out"] += records
        counters["bytes_out"] += size * taken
        counters["deliveries"] += taken

    def _special(
        self,
        batch: StampedBatch,
        mask: Mask | None,
        encoding: Encoding,
        sub: Subscription,
        windows: dict[tuple[int, int], Encoding | None],
    ) -> Encoding | None:
        """Return the encoding for a subscription that is not plain; None: it selects no row.

        It has a client-time window or an end, or takes whole batches. mask: rows of its selection
        group. encoding: what the group is given. windows: encodings by client-time window so far.
        """
        if sub.stop < batch.next:
            # select() begins at `position`, which stands still while a subscription is live.
            sub.position = max(sub.covered, batch.base)
            anything, rows = select(sub, batch.content, batch.base, sub.stop, self._shard.now_ms)
            if not anything:
                return None
            special = encoding_of(batch, rows, self._bytes_min, self._share)
            return None if special is None else special.for_(sub.whole)
        if sub.client_time is not None:
            found = self._window(batch, mask, sub, windows)
            return None if found is None else found.for_(sub.whole)
        return encoding.for_(sub.whole)

    def _window(
        self,
        batch: StampedBatch,
        mask: Mask | None,
        sub: Subscription,
        windows: dict[tuple[int, int], Encoding | None],
    ) -> Encoding | None:
        """Return the encoding for a subscription's client-time window; None: no row lies within.

        windows: encodings by window, made once for all subscriptions of the group with the same.
        """
        window = sub.client_time
        assert window is not None
        if window not in windows:
            inside = within_client_time(batch.content, window)
            rows = mask if inside is None else narrow(mask, inside)
            windows[window] = encoding_of(batch, rows, self._bytes_min, self._share)
        return windows[window]

    def deliver(self, sub: Subscription, next: int, encoding: Encoding) -> None:
        """Send one batch's encoding, which covers up to `next`, to a subscription."""
        self.put(sub, next, list(encoding.frames), encoding.rows, encoding.count, encoding.bytes)

    def put(
        self, sub: Receiver, next: int, frames: list[object], rows: bytes | None,
        records: int, size: int, attempts: int = 1,
    ) -> None:  # fmt: skip
        """Send frames as one DELIVER, which covers up to `next`, to a receiver.

        For members of groups, and for all subscriptions but plain live ones, to which _give() sends
        by itself. rows: bitmap of the rows that are meant; None: all. records, size: what is taken
        off its credit. attempts: hand-outs of the records so far, in a group.
        """
        link = sub.link
        self._links.say(link, Deliver(sub.number, sub.covered, next, len(frames), rows, attempts))
        link.frames += frames
        sub.covered = next
        sub.left_records -= records
        sub.left_bytes -= size
        link.room -= size
        link.delivered_bytes += size
        self._links.ask_if_little_room(link)
        counters = self._shard.counters
        counters["records_out"] += records
        counters["bytes_out"] += size
        counters["deliveries"] += 1

    # --- live and on demand --------------------------------------------------------------

    def fall_behind(self, sub: Subscription, position: int) -> None:
        """Have a live subscription read on demand, from `position` on, and tell its client (MODE).

        It does not begin before the offset that the client was told. It has its next turn once
        there is credit or room; where it has both, the caller adds it to `fallen`.
        """
        audience_of(sub.stream).go_on_demand(sub)
        # `position` stands still while it is live: it went live behind batches that are late.
        sub.position = max(position, sub.covered, sub.position)
        self._shard.counters["fell_behind"] += 1
        self._links.say(sub.link, Mode(sub.number, live=False, offset=sub.position))

    def catch_up(self, sub: Subscription) -> None:
        """Make a subscription at the tail live: it takes batches as they come. MODE tells it."""
        audience_of(sub.stream).go_live(sub)
        self._shard.counters["caught_up"] += 1
        self._links.say(sub.link, Mode(sub.number, live=True, offset=sub.position))

    def cover(self, sub: Subscription) -> None:
        """Send COVER to a subscription that has moved without a delivery: it selects nothing there.

        Its client then knows how far it has come, and can store that position.
        """
        position = sub.place
        if sub.covered < position:
            self._links.say(sub.link, Cover(sub.number, sub.covered, position))
            sub.covered = position

    def cover_all(self, link: Link) -> None:
        """Send COVER to every subscription of a link that has moved without a delivery.

        Called with each heartbeat of the link.
        """
        for sub in link.receivers.values():
            if isinstance(sub, Subscription) and sub.started and sub.covered < sub.place:
                self.cover(sub)

    def _end_bounded(self, audience: Audience) -> None:
        """End the live subscriptions that stop at or before the place to which they were served.

        Called when a batch reaches `least_stop`, before which none of them stops.
        """
        ending = [sub for sub in audience.bounded if sub.stop <= sub.place]
        for sub in ending:
            sub.owner.end(sub, "end")
        audience.least_stop = min((sub.stop for sub in audience.bounded), default=NEVER)


def _late_bytes(audience: Audience) -> int:
    """Key by which the streams that put off most come first."""
    return audience.late_bytes
