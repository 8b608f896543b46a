"""Records that are published and not yet confirmed.

Owns the batches of records on their way and the producer's sequences. The rule: a batch is sent
again with the same bytes until it is confirmed or refused, and gets new sequences only when the
broker said that it does not have it. A batch that is too large for its stream leaves in parts.
Source: SPEC.md, section 8.

Words: a lane has the batches of one stream. A producer, which OPEN_PRODUCER asks the broker for,
has an id, an epoch and for each stream a sequence, the number of its next record there: by these
the broker knows a batch that it gets twice. `idempotent`: the client numbers its batches itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from malamute_protocol.commands import (
    Confirm,
    Level,
    OpenProducer,
    Welcome,
)
from malamute_protocol.errors import BrokerRefused, MalamuteError
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.arguments import one_of
from malamute_py.client.position import Confirmation
from malamute_py.client.session.events import Event
from malamute_py.client.session.lanes import NONE, Lane, Lanes
from malamute_py.client.session.outgoing import RETRY_MS, RETRYABLE, CommandSink, Trackers, Window
from malamute_py.client.session.outgoing_records import (
    UNBOUNDED,
    OutgoingContent,
    OutgoingPut,
    OutgoingRecords,
    OutgoingTable,
    OutgoingUpdate,
    StreamLane,
    restamp,
)
from malamute_py.client.session.rows import ROW_BYTES, OutgoingRow
from malamute_py.client.settings import ClientSettings
from malamute_py.client.words import ConfirmAt

LEVELS: Final[dict[str, int]] = {level.name.lower(): int(level) for level in Level}
"""Confirm level -> its number on the wire; "default" is the stream's own."""
LEVEL_NAMES: Final = {number: name for name, number in LEVELS.items()}
_ASKED_LEVELS: Final = {name: n for name, n in LEVELS.items() if n <= Level.SYNCED}
"""Levels that a caller may ask for; `replicated` is reserved."""

_LOST: Final = frozenset({"unknown_producer", "too_large"})
"""Refusals of OPEN_PRODUCER for a producer that cannot go on: it is forgotten, or has written to so
many streams that no answer has their sequences."""
_PASSING: Final = frozenset({"full", "disk_full", "journal_failed"})
"""Codes that fail what is published now and say nothing of what is published later."""
AHEAD: Final = 2
"""Turns with batches in one millisecond after which single records gather, until a batch is
confirmed or the millisecond is over."""
_COMPANY_BYTES: Final = 1 << 16
"""Bytes that a batch of single records gathers at most where it only waits for others."""


def level_number(confirm: ConfirmAt) -> int:
    """Wire number of the level that a caller asks for; raises LocalProtocolError `bad_setting`."""
    try:
        return _ASKED_LEVELS[confirm]
    except (KeyError, TypeError, ValueError):
        # one_of() raises the error that names the levels.
        one_of("confirm", confirm, tuple(_ASKED_LEVELS))
        raise  # pragma: no cover - the line above does


_NUMBERED_ANEW: Final = frozenset({"out_of_sequence", "unknown_producer"})
"""Codes after which OPEN_PRODUCER is asked again, and the batch sent under another number."""


class Publisher(Lanes[OutgoingRecords]):
    """All streams that a session publishes to, over one producer."""

    lane_type = StreamLane

    def __init__(
        self,
        settings: ClientSettings,
        next_request: Callable[[], int],
        trackers: Trackers,
        window: Window,
        emit: Callable[[Event], None],
        others_wait: Callable[[], bool],
    ) -> None:
        """next_request: numbers for OPEN_PRODUCER, shared with the session's other requests.

        emit: takes the events that settle callers. others_wait: whether the session has something
        to send besides records: then records wait for no company (see _gathers).
        """
        super().__init__(settings, trackers, window, emit)
        self.idempotent = settings.idempotent
        self.streams: dict[Any, StreamLane] = {}
        self.homes.append(self.streams)  # type: ignore[arg-type]  # a dict is invariant
        self._next_request = next_request
        self._others_wait = others_wait
        self._left_ms = -1
        """Time at which batches that are to be confirmed left last."""
        self._turns_that_ms = 0
        """Turns in that millisecond in which some left."""
        self._producer_id = 0
        self._producer_epoch = 0
        self._producer_request = 0
        """Number of the OPEN_PRODUCER under way; 0: none."""
        self._producer_again_ms = -1
        """No OPEN_PRODUCER before this time: the broker put the last one off."""
        self._producer_known = False
        """The producer is open on this link and its sequences are known."""
        self.unpromised_refusals = 0
        """Refused batches of records or mail that were sent with confirm="none"."""
        self.producers_lost = 0
        """Times that the broker had forgotten the producer: retries then may repeat records."""

    # --- what callers do -----------------------------------------------------------

    def add(self, stream: str, level: int, row: OutgoingRow, *, keyed: bool = False) -> None:
        """Gather a caller's record; it leaves with its neighbours of the same stream and level.

        It joins the last batch of the lane, or begins another, where it differs or has no room.
        keyed: the record sets a key: the stream must have keys, and is not created.
        Raises LocalProtocolError `too_large`, or what ended the session: nothing was taken.
        """
        lane = self.streams.get(stream) if type(stream) is str else None
        if lane is None or self.fatal is not None:
            # It checks the name, and raises what ended the session.
            lane = self.lane(self.streams, stream, "stream")
        queue = lane.queue
        last = queue[-1] if queue else None
        size = row.size
        # As Outbox.join() does it for mail, without a call for each record. `sealed`: the batch was
        # encoded, or is a part of a larger one.
        if (
            last is None
            or last.level != level
            or last.sealed
            or last.keyed is not keyed
            or last.packing is not row.packing
            or last.bytes + size > lane.batch_bytes
            or len(last.rows) >= self.records_max
            or size > self.limits.record_bytes_max
        ):
            self.check(row)
            self.begin((OutgoingPut if keyed else OutgoingRecords)(lane, level), row)
        else:
            last.rows.append(row)
            size += ROW_BYTES
            last.bytes += size
            self.window.queued_bytes += size

    def add_update(self, stream: str, level: int, row: OutgoingRow, revision: int) -> None:
        """Queue one record that the broker takes only if its key has this revision.

        Raises LocalProtocolError `too_large`, or what ended the session: nothing was taken.
        """
        lane = self.lane(self.streams, stream, "stream")
        self.check(row)
        self.begin(OutgoingUpdate(lane, level, revision), row)

    def add_content(
        self, stream: str, level: int, content: Any, count: int, token: Any, *, typed: bool = False
    ) -> None:
        """Queue an encoded batch content of `count` records; its outcome goes to `token`.

        typed: the stream must have a declared schema, and is not created.
        Raises LocalProtocolError `too_large`, or what ended the session: nothing was taken.
        """
        lane = self.lane(self.streams, stream, "stream")
        limits = lane.limits
        size = len(content) + STAMP_BYTES
        fits = size <= limits.batch_bytes_max and count <= limits.batch_records_max
        if not fits:
            self.check_content(content, count)  # raises where no stream of the broker takes it
        batch = (OutgoingTable if typed else OutgoingContent)(lane, level)
        batch.content, batch.records = content, count
        batch.tokens = token
        batch.bytes = size
        batch.sealed = True
        if not fits:
            # The broker takes such a batch, and its stream does not: it leaves in parts.
            self._reopen(batch)
        self.queue(batch)

    def expected(self, stream: str, level: int) -> tuple[int, int, int]:
        """(producer id, epoch, sequence) for a caller to encode the stream's next batch with.

        A guess, which saves restamping when the batch leaves: it holds unless something is queued
        in between.
        """
        if level == NONE or not self._producer_id:
            return 0, 0, 0  # such records are not numbered, or no producer is open yet
        lane = self.streams.get(stream)
        if lane is None:
            return self._producer_id, self._producer_epoch, 0
        producer_id, producer_epoch, following = self.stamp_of(lane)
        return producer_id, producer_epoch, following + sum(batch.count for batch in lane.queue)

    def stamp_of(self, lane: StreamLane) -> tuple[int, int, int]:
        """(producer id, epoch, sequence) of the next batch that leaves a lane."""
        return self._producer_id, self._producer_epoch, lane.next_sequence

    def batch_bytes_of(self, stream: str) -> int:
        """Bytes that a batch of a bulk call (publish_many) to a stream is filled to."""
        lane = self.streams.get(stream)
        return self.batch_bytes if lane is None else lane.batch_bytes

    def content_bytes_of(self, stream: str) -> int:
        """Most bytes of a content of several records for a stream, as far as is known."""
        lane = self.streams.get(stream)
        limits = self.limits if lane is None else lane.limits
        return limits.batch_bytes_max - STAMP_BYTES

    # --- limits of single streams -----------------------------------------------------

    def take_sizes(self, stream: str, sizes: Mapping[str, int] | None) -> None:
        """Take the most bytes of a batch of a stream, stamp included, from an answer's facts.

        sizes: of the streams that take less than WELCOME says; None: an older broker does not tell.
        """
        if sizes is not None and self.fatal is None:
            self._take_sizes(self.lane(self.streams, stream, "stream"), sizes)

    def _take_sizes(self, lane: StreamLane, sizes: Mapping[str, int]) -> None:
        """Take the most bytes of a batch of a lane's stream; sizes: as of take_sizes().

        A stream that is not among them takes what WELCOME says.
        """
        lane.told_bytes = max(1, int(sizes.get(lane.place, UNBOUNDED)))
        self._limit(lane)

    def _limit(self, lane: StreamLane) -> None:
        """Set the limits of a stream's batches from what the broker told, or refused as too large.

        most: bytes that a batch has at most, its stamp included.
        """
        most = self.limits.batch_bytes_max
        if lane.told_bytes is not None:
            most = min(most, lane.told_bytes)
        elif lane.refused_bytes <= most:
            # An older broker does not tell the limit, which is below the size that it refused.
            most = max(1, lane.refused_bytes // 2)
        lane.limits = msgspec.structs.replace(self.limits, batch_bytes_max=most)
        # Bodies fill half of it, as of every stream: headers and stamp take the rest.
        lane.batch_bytes = min(self.batch_bytes, max(1, most // 2))
        for batch in lane.queue:
            if batch.bytes > most:
                # -1: _holds() looks at it anew when it is at the head, and divides it then. To read
                # the rows of all such batches now would hold up the caller's loop.
                batch.since_ms = -1

    def _reopen(self, batch: OutgoingRecords) -> bool:
        """Have a batch that is too large leave in parts; False: it cannot, and stays as it is.

        It becomes rows again. The encoder finds these too large when they leave, and Lanes divides
        them until the parts fit.
        """
        if not batch.divisible:
            return False
        try:
            batch.reopen()
        except Exception:  # noqa: BLE001 - a content that cannot be read is the broker's to refuse
            return False
        return True

    # --- the link --------------------------------------------------------------------

    def link_up(self, welcome: Welcome) -> None:
        """Take up a new link, on which everything unconfirmed is sent again, in order."""
        super().link_up(welcome)
        self._producer_again_ms = -1
        for lane in self.streams.values():
            lane.refused_bytes = UNBOUNDED  # the broker may have other limits now
            self._limit(lane)

    def link_down(self) -> None:
        """Put what was under way back to the head of its lane: the link has ended."""
        super().link_down()
        self._producer_known = False  # the next link asks by OPEN_PRODUCER what the broker has
        self._producer_request = 0

    def disown(self, error: MalamuteError) -> None:
        """Fail what may have been taken: the producer stays with the client's former identity.

        Sent again by another producer, it would be written twice. Records that are not numbered by
        the client (not `idempotent`) are sent again as their callers numbered them.
        """
        self._producer_id = self._producer_epoch = 0
        if self.idempotent:
            super().disown(error)

    # --- the producer ----------------------------------------------------------------

    def producer_opened(self, request: int, value: Mapping[str, Any]) -> bool:
        """Take the answer to OPEN_PRODUCER; False: the answer is another request's.

        Batches that the broker does not have yet get the sequences that it expects, and are held to
        what it says of the sizes that single streams take.
        """
        if request != self._producer_request:
            return False
        self._producer_request = 0
        self._producer_known = True
        known = (self._producer_id, self._producer_epoch)
        self._producer_id = int(value["id"])
        self._producer_epoch = int(value["epoch"])
        renamed = known != (self._producer_id, self._producer_epoch)
        expected = value.get("next", {})  # stream -> sequence that the broker expects next
        sizes = value.get("batch_bytes_max")
        for lane in self.streams.values():
            if sizes is not None and lane.place in expected:
                self._take_sizes(lane, sizes)
            # OPEN_PRODUCER is also asked amid a link, after a refusal in one lane: what is under
            # way in others is answered under the sequences that it has.
            if not lane.sent:
                self._renumber(lane, int(expected.get(lane.place, 0)), renamed)
        return True

    def producer_refused(self, request: int, error: BrokerRefused, now_ms: int) -> bool:
        """Take the refusal of OPEN_PRODUCER; False: the refusal is another request's."""
        if request != self._producer_request:
            return False
        self._producer_request = 0
        if error.code in _LOST and self._producer_id:
            # Its records may be in the log under the id that is lost: this is where
            # exactly once becomes at least once, so it is counted. Without an id the next
            # OPEN_PRODUCER asks for a new producer.
            self.producers_lost += 1
            self._producer_id = self._producer_epoch = 0
        elif error.code in RETRYABLE:
            self._producer_again_ms = now_ms + (error.retry_ms or RETRY_MS)
        elif error.code in _PASSING:
            self._fail_queued(error)
        else:
            self.fail_all(error)
        return True

    def _fail_queued(self, error: BrokerRefused) -> None:
        """Fail what waits for a producer: a PUBLISH would be refused by the same code now.

        Later calls ask for the producer anew.
        """
        for lane in self.streams.values():
            failing = [batch for batch in lane.queue if batch.level != NONE]
            self._take_out(lane, failing)
            for batch in failing:
                self._end(batch, error)

    def _renumber(self, lane: StreamLane, following: int, renamed: bool) -> None:
        """Renumber the unconfirmed batches of a lane from the sequence that the broker expects.

        Called when the broker has answered OPEN_PRODUCER. following: that sequence, and from batch
        to batch the next one. renamed: the producer is another one now, or has another epoch. A
        batch with sequence -1 gets one when it leaves.
        """
        number_now = True  # until a batch is met that is encoded anew, maybe in parts
        for batch in lane.queue:
            if batch.sequence < 0:
                # What is to be encoded anew was refused, and so was what had left after it: none
                # of it is in the log, and each batch gets its sequence when it leaves.
                number_now = number_now and not batch.numbered
                continue
            if number_now and batch.sequence + batch.count <= following and not renamed:
                continue  # The broker has it: sent again as it is, it is confirmed, not repeated.
            if batch.bytes > lane.limits.batch_bytes_max and self._reopen(batch):
                number_now = False
                continue
            if not number_now:
                batch.sequence = -1
                continue
            if batch.sequence != following or renamed:
                batch.sequence = following
                batch.content = restamp(
                    batch.content, self._producer_id, self._producer_epoch, following
                )
            following += batch.count
        lane.next_sequence = following

    # --- sending -----------------------------------------------------------------------

    def take(self, now_ms: int, out: CommandSink) -> bool:
        """Send every batch that may leave now; False: the window holds some back.

        Counts the turns of one millisecond in which batches left, for _gathers().
        """
        last_tracker = self._trackers.last
        roomy = super().take(now_ms, out)
        if self._trackers.last != last_tracker:  # something left that is to be confirmed
            self._turns_that_ms = self._turns_that_ms + 1 if now_ms == self._left_ms else 1
            self._left_ms = now_ms
        return roomy

    def _end_pause(self, lane: Lane[OutgoingRecords], now_ms: int) -> bool:
        """End the pause of a lane whose refused batches may be tried again; False: not yet.

        Not while batches that left after the refused one are unanswered: their refusals come, too.
        """
        if lane.sent or not super()._end_pause(lane, now_ms):
            return False
        if self.idempotent:
            # Only the broker knows what it expects after a refusal: ask again.
            self._producer_known = False
        return True

    def _holds(self, batch: OutgoingRecords, now_ms: int, out: CommandSink) -> bool:
        """Whether a batch at the head of its lane waits: for its producer, or to be filled.

        Asks for the producer by OPEN_PRODUCER if that is not done yet. The first time that a batch
        is here (since_ms), one that its stream would refuse as too large becomes rows again.
        """
        if batch.since_ms < 0:
            batch.since_ms = now_ms
            # Not if it has a sequence or was under way when a link ended: the broker may have it,
            # and _renumber() divides it when the broker says that it does not.
            if (
                batch.content
                and batch.bytes > batch.lane.limits.batch_bytes_max
                and batch.sequence < 0
                and not batch.doubtful
            ):
                self._reopen(batch)
        if not self._producer_known and batch.numbered:
            if not self._producer_request and now_ms >= self._producer_again_ms:
                self._producer_request = self._next_request()
                out.put(
                    OpenProducer(self._producer_request, self._producer_id, self._producer_epoch),
                    None,
                )
            return True
        return not batch.sealed and len(batch.lane.queue) == 1 and self._gathers(batch, now_ms)

    def _gathers(self, batch: OutgoingRecords, now_ms: int) -> bool:
        """Whether these records at the head of a lane, alone in it, still wait for further ones.

        They do for `linger_ms`, which a caller may set. After that they do for the rest of a
        millisecond in which two turns have sent batches already (AHEAD), while two are unconfirmed.
        A batch costs producer, broker and consumer about what a hundred records do. Where they come
        one by one and fast, batches of a few would fill queues that batches of some dozens do not.
        Other calls that wait end the waiting, so that none of them overtakes the records. Records
        without a confirm never wait: a caller that awaits each of them would wait for nothing but
        the clock.
        """
        if batch.bytes >= batch.lane.batch_bytes:
            return False
        if now_ms - batch.since_ms < self._settings.linger_ms:
            return True
        return (
            self._turns_that_ms >= AHEAD
            and self._left_ms == now_ms
            and batch.bytes < _COMPANY_BYTES
            and batch.level != NONE
            and self._sent >= AHEAD
            and not self._others_wait()
        )

    # --- answers -----------------------------------------------------------------------

    def refused(self, batch: OutgoingRecords, error: BrokerRefused, now_ms: int) -> None:
        """Send a refused batch again later, or in parts, or fail it, by the code."""
        if not self._take_answered(batch):
            return
        lane, code = batch.lane, error.code
        doubtful = batch.doubtful  # it was under way when a link ended: the broker may have it
        # After another refusal it does not; one that says to wait has not looked for it in the log.
        batch.doubtful = doubtful and code in RETRYABLE
        # Producer and sequence are this client's; else the caller's, who alone can mend them.
        own = self.idempotent
        if code == "fenced" and own:
            # Another session has taken the producer over: nothing of this one is taken any more.
            self._end(batch, error)
            self.fail_all(error)
            return
        pause_ms = 0
        if code in RETRYABLE or (own and code == "unknown_producer"):
            pause_ms = error.retry_ms or RETRY_MS
        if code == "too_large" and batch.count > 1:
            if lane.told_bytes is None:
                lane.refused_bytes = min(lane.refused_bytes, batch.bytes)
                self._limit(lane)
            # A broker with lower limits than before has not looked for the batch in the log.
            unknown = doubtful and batch.bytes > self.limits.batch_bytes_max
            again = batch.parted = not unknown and self._reopen(batch)
        else:
            again = self._comes_again(code, batch)
        if again:
            self._put_back(batch)
        else:
            self._end(batch, error)
        # Even with no pause: what left after the batch is refused, too, and _end_pause() waits for
        # that before the lane goes on, in the order of the calls.
        self._block(lane, now_ms + pause_ms)
        self._active[lane] = None

    def _comes_again(self, code: str, batch: OutgoingRecords) -> bool:
        """Whether a batch that was refused by a code is sent again, rather than failed.

        With `idempotent` the client can give it another sequence. Without, it keeps the producer
        and the sequence of its caller: an `out_of_sequence` passes only if an earlier batch of the
        lane was refused as well, and is sent again before it.
        """
        if code in RETRYABLE:
            return True
        if self.idempotent:
            return code in _NUMBERED_ANEW
        queue = batch.lane.queue
        return code == "out_of_sequence" and bool(queue) and queue[0].serial < batch.serial

    def next_wake(self) -> int | None:
        """Latest time of the next take(), for a pause or a linger; None: no need."""
        wake = super().next_wake()
        if not self._linked:
            return None  # nothing leaves before there is a link
        taken_ms = self._taken_ms
        if self._active and self._producer_again_ms > taken_ms:
            wake = min(self._producer_again_ms, wake or self._producer_again_ms)
        for lane in self._active:
            head = lane.queue[0] if lane.queue else None
            if head is not None and head.since_ms >= 0 and not head.sealed:  # it may be gathering
                # The end of the linger, or of the millisecond in which batches left: _gathers().
                at = max(head.since_ms + self._settings.linger_ms, self._left_ms + 1)
                # A full window or a producer not open yet outlasts a linger: only an answer
                # ends that, and a time gone by would have the shell turn without a pause.
                if at > taken_ms and (wake is None or at < wake):
                    wake = at
        return wake


def confirmation(confirm: Confirm, index: int, count: int) -> Confirmation:
    """Confirmation of `count` records from a batch's record `index` on, by the batch's CONFIRM.

    One without an offset (below 0: `none`, or nothing was appended) names none (-1).
    """
    return Confirmation(
        confirm.offset + index if confirm.offset >= 0 else -1,
        confirm.epoch,
        LEVEL_NAMES.get(confirm.level, str(confirm.level)),
        confirm.append_time_ms,
        count,
        confirm.duplicate,
    )


def confirmations(confirm: Confirm, count: int) -> list[Confirmation]:
    """Confirmations of a batch's first `count` records, one a record, by the batch's CONFIRM."""
    first = confirmation(confirm, 0, 1)
    if count == 1 or first.offset < 0:
        return [first] * count  # without offsets they do not differ
    epoch, level, time_ms, again = first.epoch, first.level, first.append_time_ms, first.duplicate
    return [
        Confirmation(offset, epoch, level, time_ms, 1, again)
        for offset in range(first.offset, first.offset + count)
    ]
