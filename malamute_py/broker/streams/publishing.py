"""Publishing: from a PUBLISH to a bundle for the journal, and the effects of its answer.

A waiter is a sender that is to be answered, once its batch has reached the level that it asked for:
`stored` in the log, or `synced` there, when its ring is visible (on stable storage) beyond the
batch. An LSN is a position in a ring. Owns the batches that were taken from producers and have not
been appended. The rules: base offsets are given when bundles are handed to the shell, and every
bundle is answered before more are handed over, so a refusal never leaves a hole; each publish is a
bundle of its own; the bundles of one ring stand together, in their order; all links that wait for a
refused batch are told. Source: docs/design.md (The core and its shell; Promises).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Any

from malamute_protocol.commands import Publish, Stage, UpdateKey
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError, BrokerRefused, RevisionConflict
from malamute_protocol.framing import NUMBERS
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.confirms import DEFAULT, LEVEL_NAMES, NONE, STORED, SYNCED, Confirms
from malamute_py.broker.log.ring import RingState, Settlement, Unsettled, Waiter
from malamute_py.broker.log.steps import Effect, Part, Steps, Then
from malamute_py.broker.log.stream import StampedBatch, Stream
from malamute_py.broker.ready import MAIN, Append, AppendBundle, Appended, AppendRefused
from malamute_py.broker.streams.arrivals import Arrival, check_ring
from malamute_py.broker.streams.bound_keys import foreign_key, not_under
from malamute_py.broker.streams.conditions import UNCONDITIONAL, Conditions, check_staged
from malamute_py.broker.streams.producers import (
    FORGOTTEN,
    Pending,
    Producer,
    Producers,
    ProducerStream,
)
from malamute_py.broker.streams.step_parts import Coming, Settling, unsettle
from malamute_py.broker.streams.validation import Validation, check_needed
from malamute_py.changelog.records import ProducersForgotten

TIME_AT = 56
"""Byte position of the append time in a stamp."""
_TIME = Struct("<q")


class Publishing:
    """The way of published batches into the journal."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        confirms: Confirms,
        producers: Producers,
        rings: dict[str, RingState],
        steps: Steps,
        conditions: Conditions,
        validation: Validation,
        fan_out: Callable[[StampedBatch, bool], None],
    ) -> None:
        self._shard = shard
        self._steps = steps
        self._links = links
        self._confirms = confirms
        self._producers = producers
        self._rings = rings
        self._main = rings[MAIN]
        self._conditions = conditions
        self._validation = validation
        self._fan_out = fan_out
        self.queue: list[Pending] = []
        """Publishes that were taken and wait for the next hand-over to the journal, in order."""
        self._handed: dict[int, Pending] = {}
        """Token of a bundle that the journal has not answered -> its publish."""
        self.spared: set[str] = set()
        """Rings that have refused a batch of the broker's own (of a transaction, or copies) in this
        turn: publishes handed over after it are not refused with it."""
        self._again = 0
        """Such publishes, which stand at the head of the queue again."""
        self.forgetting = 0
        """Producers that are forgotten by a change on its way into the log."""
        self.unsettled_bytes = 0
        """Bytes that are queued, handed to the journal, or appended and not yet visible."""

    # --- taking -------------------------------------------------------------------------

    def publish(self, link: Link, command: Publish | UpdateKey, stream: Stream, frame: Any) -> None:
        """Take one batch of a client for the next hand-over to the journal, or refuse it.

        Called for each PUBLISH and UPDATE_KEY of a link that may write to the stream. The checks
        that reserve something (sequence, keys) come last: a refused batch leaves no trace.
        """
        shard = self._shard
        try:
            content = shard.content(frame)
        except BatchError as error:
            self.refuse(link, command, error.code, error.reason)
            return
        head = content.head
        if head.body_kind != stream.body_kind:
            refused = self._validation.misfit(stream, head, frame)
            if refused is not None:
                self.refuse(link, command, *refused)
                return
        ring = stream.ring
        level = command.level or stream.level
        tracker = command.tracker
        if level != SYNCED or ring.memory:  # Each ring on disk can confirm `synced`.
            if level == NONE:
                tracker = 0  # No confirm is sent.
            elif not self._level_allowed(link, command, ring, level):
                return
        if ring.failed is not None:
            self.refuse(link, command, *ring.failed)
            return
        if ring is self._main:
            if self._steps.pressed:
                self.refuse(link, command, "wait", "the log waits for its checkpoint")
                return
        elif stream.created_lsn > self._main.visible:
            # Its own ring is synced apart: no record may be durable there before the stream is.
            self.refuse(link, command, "wait", "the stream is being created")
            return
        size = STAMP_BYTES + head.content_bytes
        # A batch larger than the window is taken where it is the only one without a confirm.
        if tracker and link.unconfirmed_bytes and link.unconfirmed_bytes + size > link.window_bytes:
            self.refuse(link, command, "window", link.overrun(shard.settings.window_bytes))
            return
        if self.unsettled_bytes + size > shard.settings.unsynced_bytes_max:
            self.refuse(link, command, "wait", "too much waits for the disk")
            return
        usage = link.usage
        counted = usage.counted  # For a namespace, or for a rate that bounds it (metered).
        if counted and usage.metered:
            try:
                shard.quotas.check_rate(usage)
            except BrokerRefused as slower:
                self.refuse(link, command, slower.code, slower.reason, slower.retry_ms)
                return
        if tracker:
            waiter = Waiter(link, tracker, level, size)
        else:
            # A publish of level none is answered by a refusal only; the window does not count it.
            waiter = Waiter(link, command.tracker, NONE, 0)
        pending = Pending(ring, frame, content, size, stream, waiter)
        if head.producer_id and not self._in_sequence(link, command, stream, pending):
            return
        if stream.keys is not None and not self._admitted(link, command, stream, pending):
            return
        if stream.body_kind < 0:
            self.settle_kind(stream, head.body_kind)
        if counted:
            usage.spend(head.count, size)
        if tracker:
            link.unconfirmed_bytes += size
        self.unsettled_bytes += size
        self.queue.append(pending)

    def _admitted(
        self, link: Link, command: Publish | UpdateKey, stream: Stream, pending: Pending
    ) -> bool:
        """Take a batch into a stream with keys, or refuse it; False: it is refused.

        The batch is no retry: _in_sequence() has seen it.
        """
        revision = command.revision if isinstance(command, UpdateKey) else UNCONDITIONAL
        try:
            self._conditions.admit(stream, pending.content, pending.size, revision)
        except BrokerRefused as error:
            if pending.place is not None:
                # The sequence is free again: the producer's next batch has it.
                pending.place.refused(pending.sequence)
            present = error.revision if isinstance(error, RevisionConflict) else -1
            self.refuse(link, command, error.code, error.reason, error.retry_ms, present)
            return False
        if pending.waiter is not None:
            pending.waiter.command = NUMBERS[type(command)]
        return True

    def publish_bound(
        self, link: Link, command: Publish | UpdateKey, stream: Stream, frame: Any,
        bound: Callable[[str], bool],
    ) -> None:  # fmt: skip
        """Publish a batch of a link that may write to the stream under some keys only.

        bound: whether it may under a key.
        """
        try:
            content = self._shard.content(frame)
            foreign = foreign_key(content, bound)
        except (BatchError, BrokerRefused) as error:
            self.refuse(link, command, error.code, error.reason)
            return
        if foreign is None:
            self.publish(link, command, stream, frame)
        else:
            self.refuse(link, command, "forbidden", not_under(stream.name, foreign))

    def refuse(
        self, link: Link, command: Publish | UpdateKey, code: str, reason: str, retry_ms: int = 0,
        revision: int = -1,
    ) -> None:  # fmt: skip
        """Refuse a PUBLISH or UPDATE_KEY; one without a tracker is counted: nothing confirms it.

        revision: that which an UPDATE_KEY found in place of the expected one; -1: that is not why.
        """
        if not command.tracker:
            self._shard.counters["publishes_dropped"] += 1
        number = NUMBERS[type(command)]
        self._links.refuse(link, number, command.tracker, code, reason, retry_ms, revision)

    def _level_allowed(
        self, link: Link, command: Publish | UpdateKey, ring: RingState, level: int
    ) -> bool:
        """Whether a publish may ask for a confirm level; if not, it is refused.

        A ring in memory confirms nothing but `none`: a level that the producer names, and did not
        leave to the stream, is refused there when it is to be confirmed.
        """
        known = level in (STORED, SYNCED)
        if known and not (ring.memory and command.level != DEFAULT and command.tracker):
            return True
        name = LEVEL_NAMES.get(level, str(level))
        if known:
            reason = f"stream '{command.stream}' is in memory only and cannot confirm '{name}'"
        else:
            reason = f"this broker has no confirm level '{name}'"
        self.refuse(link, command, "unsupported", reason)
        return False

    def settle_kind(self, stream: Stream, kind: int) -> None:
        """Fix the body kind of a stream by its first batch, just taken, and put it into the log."""
        stream.body_kind = kind
        # The change goes before the batch: no record may be in the log before its stream's body
        # kind.
        settling = partial(stream.settling, kind, self._shard.now_ms)
        self._steps.propose_first(settling, Then(failed=partial(unsettle, stream)))

    def _in_sequence(
        self, link: Link, command: Publish | UpdateKey, stream: Stream, pending: Pending
    ) -> bool:
        """Whether a batch of a producer is its next one in a stream, and reserve its sequence then.

        Called for batches that bear a producer id. False: the batch is answered here, confirmed as
        a duplicate (perhaps later, with its original) or refused.
        """
        head = pending.content.head
        producer = self._producers.get(head.producer_id)
        if producer is None or producer.identity != link.identity:
            self.refuse(
                link, command, "unknown_producer",
                f"there is no producer {head.producer_id} of this identity: open one",
            )  # fmt: skip
            return False
        if head.producer_epoch != producer.epoch:
            code = "fenced" if head.producer_epoch < producer.epoch else "unknown_producer"
            self.refuse(
                link, command, code,
                f"epoch {head.producer_epoch} of the producer, which is at {producer.epoch}",
            )  # fmt: skip
            return False
        if stream.number not in producer.streams:
            # The producer needs a place in one more stream, and places are bounded.
            settings = self._shard.settings
            full = self._producers.places >= settings.producer_places_max
            if full and (
                self.forgetting or self.forget_producers(self._producers.crowded_out(producer))
            ):
                self.refuse(link, command, "wait", "producers that were long unused make room")
                return False
            if full or len(producer.streams) >= settings.producer_streams_max:
                self.refuse(
                    link, command, "limit",
                    f"this producer writes to {len(producer.streams)} streams already; "
                    "streams.producer_streams_max is the limit: use a second client",
                )  # fmt: skip
                return False
        place = self._producers.enter(producer, stream.number)
        first = head.first_sequence
        if first == place.next_taken:
            producer.used = True
            place.next_taken = first + head.count
            place.under_way[first] = pending
            pending.place, pending.sequence = place, first
            return True
        if first > place.next_taken or first + head.count > place.next_taken:
            self.refuse(
                link, command, "out_of_sequence",
                f"sequence {first} to {first + head.count}, the next is {place.next_taken}",
            )  # fmt: skip
            return False
        fault = place.fault(first, head.content_crc)
        if fault:
            self._refuse_repeated(link, command, stream, producer, first, fault)
        else:
            self._duplicate(link, command, stream, place, pending)
        return False

    def _refuse_repeated(
        self, link: Link, command: Publish | UpdateKey, stream: Stream, producer: Producer,
        sequence: int, fault: str,
    ) -> None:  # fmt: skip
        """Refuse a batch that has the sequence of another one which was taken before.

        fault: `damaged`: that one is lost; `conflict`: it had another content. The operator is told
        of each fault of a producer once.
        """
        gone = fault == "damaged"
        self._shard.counters["publishes_damaged" if gone else "publishes_conflicting"] += 1
        if fault not in producer.faults:
            producer.faults += (fault,)
            self._shard.event(
                "publish_damaged" if gone else "publish_conflicting", "warning",
                stream=stream.name, producer=producer.id, identity=producer.identity,
                sequence=sequence,
            )  # fmt: skip
        words = (
            "was in the log and cannot be read any more: publish its records again, as new ones"
            if gone
            else "is in the log with another content"
        )
        self.refuse(link, command, fault, f"sequence {sequence} of the producer {words}")

    def forget_producers(self, ids: list[int]) -> bool:
        """Have the log forget producers of one identity, to make room; False: there are none."""
        if not ids:
            return False
        known = self._producers.get(ids[0])
        identity = "" if known is None else known.identity
        self.forgetting = len(ids)
        self._shard.counters["producers_forgotten"] += len(ids)
        self._shard.event("producers_forgotten", "warning", identity=identity, count=len(ids))
        self._steps.propose(ProducersForgotten(ids), Then(self._forgotten, self._forgotten))
        return True

    def _forgotten(self, *_: Any) -> None:
        """Let the next producers be forgotten: the log has forgotten some, or refused to."""
        self.forgetting = 0

    def _duplicate(
        self, link: Link, command: Publish | UpdateKey, stream: Stream, place: ProducerStream,
        again: Pending,
    ) -> None:  # fmt: skip
        """Confirm a batch that came again, once its original is in the log at the level asked for.

        place: its producer's in the stream. again: the batch that came again; it is not appended.
        """
        self._shard.counters["publishes_duplicate"] += 1
        waiter = again.waiter
        if waiter is None:
            return
        waiter.duplicate, waiter.command = True, NUMBERS[type(command)]
        link.unconfirmed_bytes += waiter.size  # The confirm takes them off again.
        sequence = again.content.head.first_sequence
        original = place.under_way.get(sequence)
        if original is not None:
            # The original's answer from the journal answers this one, too.
            if original.followers is None:
                original.followers = []
            original.followers.append(waiter)
            return
        found = place.original(sequence)
        waiter.offset, waiter.append_time_ms = found
        # Offset -1 of a forgotten position lies in no epoch: the present one says whose log it is.
        waiter.epoch = self._shard.epoch if found is FORGOTTEN else stream.epoch_at(found.offset)
        # The original's end LSN is not remembered: the ring's end covers it.
        self._confirms.settle_by(stream.ring, waiter, stream.ring.end_lsn)

    def prepare(
        self, link: Link, command: Publish | Stage, frame: Any, stream: Stream | None
    ) -> Part:
        """Check a batch that a step is to publish, or a transaction to stage, and return its part.

        stream: that of the command; None: there is none. Raises BrokerRefused: nothing was done.
        """
        name = command.stream
        bound = None  # Whether a writer that is bound to subjects may publish under one.
        if not self._shard.settings.permit(link.owner, "write", name):
            bound = self._shard.settings.subjects(link.owner, name)
            if bound is None:
                raise BrokerRefused("forbidden", f"you may not write to stream '{name}'")
        if stream is None or stream.removed:
            raise BrokerRefused("unknown_stream", f"there is no stream '{name}'")
        check_needed(command, stream)  # A declared schema, or keys.
        try:
            content = self._shard.content(frame)
        except BatchError as error:
            raise BrokerRefused(error.code, error.reason) from error
        foreign = None if bound is None else foreign_key(content, bound)
        if foreign is not None:
            raise BrokerRefused("forbidden", not_under(name, foreign))
        head = content.head
        if stream.ring is not self._main:
            # A step is written to ring main alone; a transaction moves what it staged further.
            self._check_other_ring(command, stream, content)
        if head.producer_id:  # The step's key tells a repetition; a sequence would tell it twice.
            raise BrokerRefused("unsupported", "the step has a key: its batches have no producer")
        if head.body_kind != stream.body_kind:
            refused = self._validation.misfit(stream, head, frame)
            if refused is not None:
                raise BrokerRefused(*refused)
        return self.later_part(stream, content, frame)

    def _check_other_ring(self, command: Publish | Stage, stream: Stream, content: Content) -> None:
        """Raise BrokerRefused unless a batch may be staged for a stream outside of ring main.

        None may for a stream in memory, nor by a PUBLISH of a step, which is in ring main alone.
        """
        check_ring(stream, staged=not isinstance(command, Publish))
        if stream.ring.failed is not None:
            raise BrokerRefused(*stream.ring.failed)
        check_staged(stream, content, self._shard.settings.keys_max)

    def append_staged(
        self, stream: Stream, content: Content, frame: Any, place: ProducerStream
    ) -> None:
        """Take a batch that a committed transaction moves into a stream with a ring of its own.

        place: an Arrival, which is told once the ring has the batch, or has refused it. Raises
        BrokerRefused: nothing was taken.
        """
        ring, waiting = stream.ring, self.unsettled_bytes
        if ring.failed is not None:
            raise BrokerRefused(*ring.failed)
        size = STAMP_BYTES + content.head.content_bytes
        if waiting and waiting + size > self._shard.settings.unsynced_bytes_max:
            raise BrokerRefused("wait", "too much waits for the disk")
        if stream.keys is not None:
            self._conditions.admit(stream, content, size, UNCONDITIONAL, staged=True)
        self.unsettled_bytes += size
        self.queue.append(Pending(ring, frame, content, size, stream, place=place))

    def later_part(self, stream: Stream, content: Content, frame: Any) -> Part:
        """Return the part of a step that appends a checked batch, of the step or a transaction."""
        coming = Coming(self.part_appended, stream, content.head.count)
        effects = [*self.settling(stream, content), coming]
        return Part(content=content, frame=frame, stream=stream, effects=effects)

    def settling(self, stream: Stream, content: Content) -> list[Effect]:
        """Return the effect by which a stream's first batch settles its body kind, if it does."""
        kind = content.head.body_kind
        return [] if stream.body_kind >= 0 else [Settling(self.settle_kind, stream, kind)]

    def part_appended(self, part: Part, end_lsn: int) -> None:
        """Let a batch of an atomic step take effect: the journal has it, as part of the step."""
        stream, content = part.stream, part.content
        assert stream is not None
        assert content is not None
        size = STAMP_BYTES + content.head.content_bytes
        self.unsettled_bytes += size  # _stored() or visible() takes them off.
        pending = Pending(stream.ring, part.frame, content, size, stream, base=part.base)
        self._stored(pending, stream, stream.ring, part.stamp, end_lsn)

    # --- handing over -------------------------------------------------------------------

    def take(self) -> list[AppendBundle]:
        """Return the publishes taken in this turn as bundles for the journal, with their offsets.

        Each bundle must be answered before the next take: offsets count on what was appended.
        """
        queue = self.queue
        if not queue:
            return []
        assert not self._handed, "take_ready() before every bundle of the last one was answered"
        self.queue = []
        # What the last answers noted, in refused(), on behalf of the queue that is taken now.
        self.spared.clear()
        self._again = 0
        # Bundles of one ring stand together, so that the shell can write them in one call.
        if len(queue) > 1 and any(pending.ring is not queue[0].ring for pending in queue):
            queue.sort(key=_ring_name)
        now_ms = self._shard.now_ms
        handed = self._handed
        token = self._shard.token
        bundles: list[AppendBundle] = []
        for pending in queue:
            content = pending.content
            head = content.head
            stream = pending.stream
            base = stream.handed
            stream.handed = base + head.count
            time_ms = stream.last_time_ms  # Append times never go back, unlike clocks.
            if time_ms < now_ms:
                time_ms = now_ms
            pending.base = base
            pending.time_ms = time_ms
            number_of_bundle = token()
            handed[number_of_bundle] = pending
            append = Append(
                stream.number, base, head.count, time_ms, pending.frame, head.content_crc,
                content.table,
            )  # fmt: skip
            bundles.append(AppendBundle(pending.ring.name, number_of_bundle, (append,)))
        return bundles

    def appended(self, answer: Appended) -> None:
        """Let a publish take effect: the journal has its bundle."""
        pending = self._handed.pop(answer.token)
        ring = pending.ring
        end_lsn = answer.end_lsn
        ring.end_lsn = end_lsn
        if ring.memory:
            ring.visible = end_lsn  # No sync follows.
        # The bundle has one batch, and so one stamp.
        self._stored(pending, pending.stream, ring, answer.stamps[0], end_lsn)

    def _stored(
        self, pending: Pending, stream: Stream, ring: RingState, stamp: bytes, end_lsn: int
    ) -> None:
        """Enter a batch that the journal has appended into its stream, and hand it to live readers.

        Producers that asked for level `stored` are confirmed. Those that asked for `synced`, and
        readers of what is durable, wait for visible(), unless the batch is durable already.
        end_lsn: where the batch ends in its ring.
        """
        base, count = pending.base, pending.content.head.count
        # The journal never lets append time go back, over all streams of the ring.
        time_ms: int = _TIME.unpack_from(stamp, TIME_AT)[0]
        pending.time_ms = time_ms
        assert base == stream.next, "the journal took a bundle out of order"
        shard = self._shard
        stream.begin_epoch(shard.epoch)
        stream.last_time_ms = time_ms
        if stream.keys is not None:
            self._conditions.appended(stream, time_ms)
        next = base + count
        batch = StampedBatch(
            stream, stamp, pending.frame, pending.content, base, next, pending.size
        )
        stream.next = next
        stream.ledger.add(next, pending.size, time_ms)
        counters = shard.counters
        counters["batches_in"] += 1
        counters["records_in"] += count
        counters["bytes_in"] += pending.size
        place = pending.place
        if place is not None:
            place.appended(
                pending.sequence, count, base, time_ms, pending.content.head.content_crc,
                shard.settings.producer_batches_max,
            )  # fmt: skip
        waiter = pending.waiter
        waiters: tuple[Waiter, ...] = ()
        if pending.followers is not None or ring.memory:
            waiters = self._confirm_stored(pending, ring)
        elif waiter is not None:  # The usual case, without the call.
            waiter.epoch, waiter.offset, waiter.append_time_ms = shard.epoch, base, time_ms
            if waiter.level <= STORED:
                self._confirms.confirm(waiter, STORED)
            else:
                waiters = (waiter,)
        if ring.memory or ring.visible >= end_lsn:
            stream.visible_next = next
            self.unsettled_bytes -= pending.size
            for durable in (False, True):  # First to readers of all, then to those of the durable.
                self._fan_out(batch, durable)
            for waiter in waiters:
                self._confirms.confirm(waiter, SYNCED)
            return
        ring.unsettled.append(Unsettled(end_lsn, pending.size, batch, waiters))
        if waiters or stream.audience.durable:
            ring.awaited = end_lsn  # The shell syncs the ring at once, not with what follows.
        self._fan_out(batch, False)  # Readers that want what is durable get it in visible().

    def _confirm_stored(self, pending: Pending, ring: RingState) -> tuple[Waiter, ...]:
        """Confirm all senders of an appended batch that asked for `stored`; return the others.

        In memory nothing more than an append will come: all are confirmed, with level `none`.
        """
        later: list[Waiter] = []
        waiters = [] if pending.waiter is None else [pending.waiter]
        if pending.followers is not None:
            waiters += pending.followers
        for waiter in waiters:
            waiter.epoch, waiter.offset = self._shard.epoch, pending.base
            waiter.append_time_ms = pending.time_ms
            if ring.memory:
                self._confirms.confirm(waiter, NONE)
            elif waiter.level <= STORED:
                self._confirms.confirm(waiter, STORED)
            else:
                later.append(waiter)
        return tuple(later)

    # --- refused ------------------------------------------------------------------------

    def refused(self, answer: AppendRefused) -> None:
        """Refuse a publish whose bundle the journal did not take, and what was queued after it.

        Offsets and sequences of later bundles of the ring count on it, and the journal refuses
        those that it was handed. It is otherwise where the first refused batch was the broker's
        own, of a transaction or of copies: publishes after it are handed over again. Those to a
        stream with keys are refused `wait`, since their conditions counted on it.
        """
        pending = self._handed.pop(answer.token)
        ring, staged = pending.ring, type(pending.place) is Arrival
        code, reason, retry_ms = answer.code, answer.reason, answer.retry_ms
        if not staged and ring.name in self.spared:
            if pending.stream.keys is None:
                self.queue.insert(self._again, pending)  # Behind those before it, in their order.
                self._again += 1
                return
            code, reason, retry_ms = "wait", "a batch of the broker's own before it was refused", 0
        self._shard.counters["appends_refused"] += 1
        self._drop(pending, code, reason, retry_ms)
        if staged:
            self.spared.add(ring.name)
        spared = ring.name in self.spared
        if code == "too_large":
            # The size of one batch says nothing of those after it, which come again.
            code, reason, retry_ms = "wait", f"a batch before it was refused: {reason}", 1
        kept: list[Pending] = []
        for queued in self.queue:  # Batches of the next hand-over.
            by_itself = spared and queued.stream.keys is None and type(queued.place) is not Arrival
            if queued.ring is ring and not by_itself:
                self._drop(queued, code, reason, retry_ms)
            else:
                kept.append(queued)
        self.queue[:] = kept

    def _drop(self, pending: Pending, code: str, reason: str, retry_ms: int) -> None:
        """Take back what a batch reserved that the journal has refused, and tell its senders."""
        self.unsettled_bytes -= pending.size
        stream = pending.stream
        stream.handed = stream.next  # Nothing that was handed over after it is appended, either.
        if stream.keys is not None:
            stream.keys.dropped(stream.next)
        if pending.place is not None:
            pending.place.refused(pending.sequence, code, reason)
        if pending.waiter is not None:
            self._confirms.refuse(pending.waiter, code, reason, retry_ms)
        for waiter in pending.followers or ():
            self._confirms.refuse(waiter, code, reason, retry_ms)

    def ring_failed(self, ring: RingState, code: str, reason: str) -> None:
        """Fail a ring that cannot be written, or whose stream is removed: what waits is refused."""
        ring.failed = (code, reason)
        kept = [queued for queued in self.queue if queued.ring is not ring]
        dropped = [queued for queued in self.queue if queued.ring is ring]
        self.queue[:] = kept
        for pending in dropped:
            self._drop(pending, code, reason, retry_ms=0)
        for settled in ring.unsettled:
            self.unsettled_bytes -= settled.bytes
            for waiter in settled.waiters:
                self._confirms.refuse(waiter, code, f"{reason}; it may be in the log or not")
            if settled.call is not None:
                settled.call((code, reason))
        ring.unsettled.clear()

    def when_visible(self, ring: RingState, lsn: int, call: Settlement) -> None:
        """Make a call with None when the ring is visible up to `lsn`, or with why it never is.

        The ring is synced for it.
        """
        if ring.failed is not None:
            call(ring.failed)
        elif ring.visible >= lsn:
            call(None)
        else:
            ring.unsettled.append(Unsettled(lsn, bytes=0, call=call))
            ring.awaited = max(ring.awaited, lsn)

    # --- durable ------------------------------------------------------------------------

    def visible(self, ring: RingState, lsn: int) -> None:
        """Confirm and deliver all that waited for a ring to be durable up to an LSN.

        Called when the journal has synced the ring.
        """
        if lsn <= ring.visible:
            return
        ring.visible = lsn
        unsettled = ring.unsettled
        confirm = self._confirms.confirm
        while unsettled and unsettled[0].end_lsn <= lsn:
            settled = unsettled.popleft()
            self.unsettled_bytes -= settled.bytes
            for waiter in settled.waiters:
                confirm(waiter, SYNCED)
            batch = settled.batch
            if batch is not None:
                stream = batch.stream
                stream.visible_next = batch.next
                if stream.audience.durable:
                    durable = True
                    self._fan_out(batch, durable)
            if settled.call is not None:
                settled.call(None)


def _ring_name(pending: Pending) -> str:
    """Key by which the bundles of one ring come together, in their order."""
    return pending.ring.name
