"""What is published and not yet confirmed.

Owns the records that were gathered, the batches on their way, the window and the
producer's sequences. The rule: per stream, batches leave in the order of the calls; a
batch is sent again with the same bytes until it is confirmed or refused, and gets new
sequences only when the broker said that it does not have it. Source: SPEC.md, section 8.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import google_crc32c
import numpy as np

from malamute_protocol.commands import (
    Command,
    Confirm,
    Level,
    OpenProducer,
    Publish,
    Refused,
    Welcome,
)
from malamute_protocol.errors import (
    BrokerRefused,
    LocalProtocolError,
    MalamuteError,
)
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.arguments import name_of, one_of
from malamute_py.client.position import Confirmation
from malamute_py.client.session.outgoing import RETRY_MS, RETRYABLE, Put, Trackers, Window
from malamute_py.client.session.rows import ROW_BYTES, Row, content_of
from malamute_py.client.settings import ClientSettings
from malamute_py.client.words import ConfirmAt

LEVELS: Final[dict[str, int]] = {level.name.lower(): int(level) for level in Level}
"""Confirm level -> its number on the wire; "default" is the stream's own."""
LEVEL_NAMES: Final = {number: name for name, number in LEVELS.items()}
NONE: Final = int(Level.NONE)
_ASKED_LEVELS: Final = {name: n for name, n in LEVELS.items() if n <= Level.SYNCED}
"""What a caller may ask for; `replicated` is reserved."""

_PASSING: Final = frozenset({"full", "disk_full", "journal_failed"})
"""Codes that fail what is published now and say nothing of what is published later."""
AHEAD: Final = 2
"""After so many turns in one millisecond single records gather, until a batch is confirmed or the
millisecond is over."""
_COMPANY_BYTES: Final = 1 << 16
"""So many are company enough."""
_PRODUCER = struct.Struct("<QI")
_SEQUENCE = struct.Struct("<Q")
_CRC = struct.Struct("<I")


def level_number(confirm: ConfirmAt) -> int:
    """Wire number of a level's name; raises LocalProtocolError `bad_setting`."""
    try:
        return _ASKED_LEVELS[confirm]
    except (KeyError, TypeError):
        one_of("confirm", confirm, tuple(_ASKED_LEVELS))
        raise  # pragma: no cover - the line above does


def restamp(content: Any, producer_id: int, producer_epoch: int, sequence: int) -> bytearray:
    """A copy of a batch content under another producer or sequence, its CRC renewed."""
    copy = bytearray(content)
    _PRODUCER.pack_into(copy, 24, producer_id, producer_epoch)
    _SEQUENCE.pack_into(copy, 40, sequence)
    # numpy arrays, unlike slices, may be handed to the CRC without a copy.
    _CRC.pack_into(copy, 8, google_crc32c.value(np.frombuffer(copy, np.uint8, offset=12)))
    return copy


def stamped_as(content: Any) -> tuple[int, int, int]:
    """(producer id, producer epoch, first sequence) that a content carries."""
    producer_id, producer_epoch = _PRODUCER.unpack_from(content, 24)
    return producer_id, producer_epoch, _SEQUENCE.unpack_from(content, 40)[0]


_NUMBERED_ANEW: Final = frozenset({"out_of_sequence", "unknown_producer"})
"""Codes after which OPEN_PRODUCER is asked again, and the batch sent under another number."""


class Unconfirmed:
    """One batch, from its encoding until the broker confirmed or refused it."""

    __slots__ = ("content", "count", "level", "sender", "sequence", "single", "tokens", "tracker")

    def __init__(
        self, sender: Sender, content: Any, count: int, level: int, tokens: Any, single: bool
    ) -> None:
        """tokens: the caller's; one a record when `single`, else one for the batch."""
        self.sender = sender
        self.content = content
        self.count = count
        self.level = level
        self.tokens = tokens
        self.single = single
        self.sequence = -1
        self.tracker = 0

    @property
    def size(self) -> int:
        """Bytes that it takes of the window."""
        return len(self.content) + STAMP_BYTES


class Gathering:
    """Single records of one stream and level that will leave as one batch."""

    __slots__ = ("bytes", "level", "rows", "sender", "since_ms")

    def __init__(self, sender: Sender, level: int) -> None:
        self.sender = sender
        self.level = level
        self.rows: list[Row] = []
        self.bytes = 0
        self.since_ms = -1


class Sender:
    """The way to one stream: what waits, what is under way, what came back."""

    __slots__ = ("blocked_until_ms", "inflight", "next_sequence", "queue", "returned", "stream")

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.queue: deque[Gathering | Unconfirmed] = deque()
        self.inflight: dict[int, Unconfirmed] = {}
        self.returned: list[Unconfirmed] = []
        """Refused batches that will be sent again once nothing is under way."""
        self.next_sequence = 0
        self.blocked_until_ms = -1
        """>= 0: no sending before this time and before the sequences are settled."""

    @property
    def held(self) -> bool:
        """True while refused batches keep later ones back."""
        return self.blocked_until_ms >= 0


class Publisher:
    """All senders of a session over one producer and one window."""

    def __init__(
        self,
        settings: ClientSettings,
        next_request: Callable[[], int],
        trackers: Trackers,
        window: Window,
        others_wait: Callable[[], bool],
    ) -> None:
        """next_request: numbers for OPEN_PRODUCER, shared with the session's other requests.

        others_wait: whether the session has something to say that was asked for later.
        """
        self._settings = settings
        self._next_request = next_request
        self._trackers = trackers
        self._others_wait = others_wait
        self.window = window
        self._senders: dict[str, Sender] = {}
        self._active: Final[dict[Sender, None]] = {}
        self.queues: Final = (self._active,)
        """What take() goes by: while all of them are empty, it has nothing to do."""
        self._sent: dict[int, Unconfirmed] = {}
        self._taken_ms = -1
        """When take() was called last: what was due then waits for something else by now."""
        self._left_ms = -1
        """When batches left last that are to be confirmed."""
        self._left = 0
        """Turns in that millisecond with which some left."""
        self._linked = False
        self._fatal: MalamuteError | None = None
        self._producer_id = 0
        self._producer_epoch = 0
        self._producer_request = 0
        """Number of the OPEN_PRODUCER under way; 0: none."""
        self._producer_again_ms = -1
        """No OPEN_PRODUCER before this time: the broker put the last one off."""
        self._settled = False
        """The producer is open on this link and its sequences are known."""
        self.limits = DEFAULT_LIMITS
        self.batch_bytes = settings.batch_target(self.limits)
        """What a batch is filled to on this link."""
        self.unpromised_refusals = 0
        """Refused batches that were published with confirm="none"."""
        self.producers_lost = 0
        """How often the broker had forgotten the producer: retries then may repeat records."""
        self.outcomes: list[tuple[Unconfirmed, Confirm | MalamuteError]] = []

    # --- what callers do -----------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Bytes of the session's window that wait for their turn."""
        return self.window.queued_bytes

    @property
    def unconfirmed_bytes(self) -> int:
        """Bytes of the session's window that are under way."""
        return self.window.unconfirmed_bytes

    @property
    def idle(self) -> bool:
        """True when nothing waits and nothing is unconfirmed."""
        return not self._active and not self._sent

    @property
    def unanswered(self) -> int:
        """Commands that wait to leave, or for their answers."""
        return sum(
            len(sender.inflight) + len(sender.returned) + len(sender.queue)
            for sender in self._senders.values()
        )

    @property
    def waits(self) -> bool:
        """Something may leave with the next take()."""
        return bool(self._active)

    def add(self, stream: str, level: int, row: Row) -> None:
        """Gather one record; it leaves with its neighbours of the same stream and level.

        Raises LocalProtocolError `too_large`, or what ended the session: nothing was taken.
        """
        size = len(row.body)
        limits = self.limits
        if size > limits.record_bytes_max:
            raise LocalProtocolError(
                "too_large",
                f"a record of {size} bytes; the broker takes {limits.record_bytes_max}",
            )
        sender = self._sender(stream)
        queue = sender.queue
        last = queue[-1] if queue else None
        if (
            type(last) is not Gathering
            or last.level != level
            or last.bytes + size > self.batch_bytes
            or len(last.rows) >= limits.batch_records_max
        ):
            last = Gathering(sender, level)
            queue.append(last)
        last.rows.append(row)
        size += ROW_BYTES
        last.bytes += size
        self.window.queued_bytes += size

    def add_content(self, stream: str, level: int, content: Any, count: int, token: Any) -> None:
        """Queue an encoded batch content.

        Raises LocalProtocolError `too_large`, or what ended the session: nothing was taken.
        """
        if len(content) + STAMP_BYTES > self.limits.batch_bytes_max:
            raise LocalProtocolError(
                "too_large",
                f"a batch of {len(content)} bytes; the broker takes {self.limits.batch_bytes_max}",
            )
        if count > self.limits.batch_records_max:
            raise LocalProtocolError(
                "too_large",
                f"a batch of {count} records; the broker takes {self.limits.batch_records_max}",
            )
        sender = self._sender(stream)
        batch = Unconfirmed(sender, content, count, level, token, False)
        sender.queue.append(batch)
        self.window.queued_bytes += batch.size

    def expected(self, stream: str, level: int) -> tuple[int, int, int]:
        """(producer id, epoch, sequence) to encode the stream's next batch with.

        A guess that saves restamping: it holds unless something is queued in between.
        """
        if level == NONE or not self._producer_id:
            return 0, 0, 0
        sender = self._senders.get(stream)
        if sender is None:
            return self._producer_id, self._producer_epoch, 0
        ahead = sum(_count(item) for item in sender.queue)
        return self._producer_id, self._producer_epoch, sender.next_sequence + ahead

    def _sender(self, stream: str) -> Sender:
        if self._fatal is not None:
            raise self._fatal
        try:
            sender = self._senders[stream]
        except (KeyError, TypeError):  # TypeError: it cannot be a key, so it is no name
            name_of("stream", stream)
            sender = self._senders[stream] = Sender(stream)
        self._active[sender] = None
        return sender

    # --- the link --------------------------------------------------------------------

    def link_up(self, welcome: Welcome) -> None:
        """A link is open: everything unconfirmed is to be sent again, in order."""
        self._linked = True
        self._settled = False
        self._producer_request = 0
        self._producer_again_ms = -1
        self.limits = Limits(
            record_bytes_max=welcome.record_bytes_max,
            batch_bytes_max=welcome.batch_bytes_max,
            batch_records_max=welcome.batch_records_max,
        )
        self.batch_bytes = self._settings.batch_target(self.limits)

    def link_down(self) -> None:
        """The link is gone: what was under way goes back to the head of its queue."""
        self._linked = False
        self._settled = False
        self._producer_request = 0
        for sender in self._senders.values():
            again = sorted(
                (*sender.inflight.values(), *sender.returned), key=lambda batch: batch.sequence
            )
            for batch in sender.inflight.values():
                self.window.unconfirmed_bytes -= batch.size
                self.window.queued_bytes += batch.size
            sender.queue.extendleft(reversed(again))
            sender.inflight.clear()
            sender.returned.clear()
            sender.blocked_until_ms = -1
            if sender.queue:
                self._active[sender] = None
        self._sent.clear()

    def disown(self, error: MalamuteError) -> None:
        """The client has another identity now, and its producer stays the former one's.

        What may have been taken cannot be sent again: another producer would write it twice.
        """
        self._producer_id = self._producer_epoch = 0
        for sender in self._senders.values():
            items, sender.queue = sender.queue, deque()
            for item in items:
                if isinstance(item, Unconfirmed) and item.sequence >= 0:
                    self.window.queued_bytes -= item.size
                    self.outcomes.append((item, error))
                else:
                    sender.queue.append(item)

    def fail_all(self, error: MalamuteError) -> None:
        """The session ends: everything unconfirmed fails, and so does every later call."""
        self._fatal = error
        for sender in self._senders.values():
            for batch in sender.inflight.values():
                self.window.unconfirmed_bytes -= batch.size
                self.outcomes.append((batch, error))
            for batch in sender.returned:
                self.window.queued_bytes -= batch.size
                self.outcomes.append((batch, error))
            for item in sender.queue:
                self.window.queued_bytes -= _size(item)
                batch = item if isinstance(item, Unconfirmed) else _unsent(item, item.rows)
                self.outcomes.append((batch, error))
            sender.queue.clear()
            sender.inflight.clear()
            sender.returned.clear()
        self._sent.clear()
        self._active.clear()

    # --- the producer ----------------------------------------------------------------

    def producer_opened(self, request: int, value: Mapping[str, Any]) -> bool:
        """OPEN_PRODUCER was answered; returns False when the request was not ours.

        Batches that the broker does not have yet get the sequences that it expects.
        """
        if request != self._producer_request:
            return False
        self._producer_request = 0
        self._settled = True
        known = (self._producer_id, self._producer_epoch)
        self._producer_id = int(value["id"])
        self._producer_epoch = int(value["epoch"])
        renamed = known != (self._producer_id, self._producer_epoch)
        following = value.get("next", {})
        for sender in self._senders.values():
            if not sender.inflight:
                self._settle(sender, int(following.get(sender.stream, 0)), renamed)
        return True

    def producer_refused(self, request: int, error: BrokerRefused, now_ms: int) -> bool:
        """OPEN_PRODUCER was refused; returns False when the request was not ours."""
        if request != self._producer_request:
            return False
        self._producer_request = 0
        if error.code == "unknown_producer" and self._producer_id:
            # Its records may be in the log under the forgotten id: this is where
            # exactly once becomes at least once, so it is counted.
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
        """What waits for a producer fails, as a PUBLISH would now; later calls ask anew."""
        for sender in self._senders.values():
            for batch in sender.returned:
                self.window.queued_bytes -= batch.size
                self.outcomes.append((batch, error))
            sender.returned.clear()
            kept = [item for item in sender.queue if item.level == NONE]
            for item in sender.queue:
                if item.level != NONE:
                    self.window.queued_bytes -= _size(item)
                    batch = item if isinstance(item, Unconfirmed) else _unsent(item, item.rows)
                    self.outcomes.append((batch, error))
            sender.queue.clear()
            sender.queue.extend(kept)

    def _settle(self, sender: Sender, following: int, renamed: bool) -> None:
        """Give the sender's batches the sequences from `following` on where they differ."""
        sent = [item for item in sender.queue if isinstance(item, Unconfirmed)]
        again = sorted(sender.returned, key=lambda batch: batch.sequence)
        for batch in (*again, *(item for item in sent if item.sequence >= 0)):
            if batch.sequence + batch.count <= following and not renamed:
                continue
            if batch.sequence != following or renamed:
                batch.sequence = following
                batch.content = restamp(
                    batch.content, self._producer_id, self._producer_epoch, following
                )
            following += batch.count
        sender.next_sequence = following
        if again:
            sender.queue.extendleft(reversed(again))
            sender.returned.clear()
            self._active[sender] = None

    # --- sending -----------------------------------------------------------------------

    def wake(self, now_ms: int) -> None:
        """Nothing of it is due but what take() does."""

    def take(self, now_ms: int, out: Put) -> bool:
        """Hand over every batch that may leave now; False: the window holds some back."""
        self._taken_ms = now_ms
        if not self._linked or not self._active:
            return True
        before = self._trackers.last
        roomy = self._take(now_ms, out)
        if self._trackers.last != before:
            self._left = self._left + 1 if now_ms == self._left_ms else 1
            self._left_ms = now_ms
        return roomy

    def _take(self, now_ms: int, out: Put) -> bool:
        for sender in list(self._active):
            if sender.held and not self._release(sender, now_ms):
                continue
            before = self._trackers.last
            if not self._drain(sender, now_ms, out.put):
                if self._trackers.last != before:
                    # It had its turn: a stream that always has more must not starve others.
                    self._active[sender] = self._active.pop(sender)
                return False
        return True

    def _release(self, sender: Sender, now_ms: int) -> bool:
        """End the hold of a sender whose refused batches may be tried again."""
        if sender.inflight or now_ms < sender.blocked_until_ms:
            return False
        if self._settings.idempotent:
            # Only the broker knows what it expects after a refusal: ask again.
            self._settled = False
        else:
            sender.queue.extendleft(reversed(sender.returned))
            sender.returned.clear()
        sender.blocked_until_ms = -1
        return True

    def _drain(self, sender: Sender, now_ms: int, put: Callable[[Command, Any], None]) -> bool:
        """Send from one sender; returns False when the window holds all callers back."""
        queue = sender.queue
        while queue or sender.returned:
            item = sender.returned[0] if sender.returned else queue[0]
            promised = item.level != NONE
            if isinstance(item, Gathering) and item.since_ms < 0:
                item.since_ms = now_ms
            if promised and self._settings.idempotent and not self._settled:
                self._ask_producer(now_ms, put)
                return True
            if not self.window.lets_go(_size(item)):
                return False
            if isinstance(item, Gathering):
                if len(queue) == 1 and self._gathers(item, promised, now_ms):
                    return True
                queue.popleft()
                self.window.queued_bytes -= item.bytes
                for batch in self._encode(item, item.rows, promised):
                    self._send(batch, promised, put)
            else:
                queue.popleft()
                self.window.queued_bytes -= item.size
                if promised and self._settings.idempotent and item.sequence < 0:
                    self._number(item)
                self._send(item, promised, put)
        del self._active[sender]
        return True

    def _gathers(self, item: Gathering, promised: bool, now_ms: int) -> bool:
        """Whether these records still wait for company.

        A batch costs producer, broker and consumer about what a hundred records do. Where they come
        one by one and fast, batches of a few would fill queues that batches of some dozens do not.
        Nothing that was asked for later overtakes them. Records without a confirm never wait: a
        caller that awaits each of them would wait for nothing but the clock.
        """
        if item.bytes >= self.batch_bytes:
            return False
        if now_ms - item.since_ms < self._settings.linger_ms:
            return True
        return (
            self._left >= AHEAD
            and self._left_ms == now_ms
            and item.bytes < _COMPANY_BYTES
            and promised
            and len(self._sent) >= AHEAD
            and not self._others_wait()
        )

    def _ask_producer(self, now_ms: int, put: Callable[[Command, Any], None]) -> None:
        if not self._producer_request and now_ms >= self._producer_again_ms:
            self._producer_request = self._next_request()
            put(OpenProducer(self._producer_request, self._producer_id, self._producer_epoch), None)

    def _number(self, batch: Unconfirmed) -> None:
        """Give a content that was encoded elsewhere its place in the sequence."""
        sender = batch.sender
        wanted = (self._producer_id, self._producer_epoch, sender.next_sequence)
        if stamped_as(batch.content) != wanted:
            batch.content = restamp(batch.content, *wanted)
        batch.sequence = sender.next_sequence
        sender.next_sequence += batch.count

    def _encode(self, gathering: Gathering, rows: list[Row], promised: bool) -> list[Unconfirmed]:
        """One batch of these rows; of halves, when one is bad or all are too much for a batch."""
        try:
            return [self._encode_rows(gathering, rows, promised)]
        except Exception as error:  # noqa: BLE001 - whatever it is, it fails these records only
            if len(rows) == 1:
                refused = (
                    error
                    if isinstance(error, MalamuteError)
                    else LocalProtocolError("bad_batch", f"the record cannot be encoded: {error}")
                )
                self.outcomes.append((_unsent(gathering, rows), refused))
                return []
        half = len(rows) // 2
        return [
            *self._encode(gathering, rows[:half], promised),
            *self._encode(gathering, rows[half:], promised),
        ]

    def _encode_rows(self, gathering: Gathering, rows: list[Row], promised: bool) -> Unconfirmed:
        sender = gathering.sender
        numbered = promised and self._settings.idempotent
        producer = (self._producer_id, self._producer_epoch, sender.next_sequence)
        content = content_of(rows, self.limits, producer if numbered else (0, 0, 0))
        batch = _unsent(gathering, rows)
        batch.content = content
        if numbered:
            batch.sequence = sender.next_sequence
            sender.next_sequence += len(rows)
        return batch

    def _send(
        self, batch: Unconfirmed, promised: bool, put: Callable[[Command, Any], None]
    ) -> None:
        stream = batch.sender.stream
        if not promised:
            self.window.passes(batch.size)
            put(Publish(stream, 0, batch.level), batch.content)
            self.outcomes.append((batch, Confirm(0, batch.level, 0, -1, 0)))
            return
        batch.tracker = self._trackers.next()
        self._sent[batch.tracker] = batch
        batch.sender.inflight[batch.tracker] = batch
        self.window.unconfirmed_bytes += batch.size
        put(Publish(stream, batch.tracker, batch.level), batch.content)

    # --- answers -----------------------------------------------------------------------

    def confirmed(self, confirm: Confirm) -> None:
        """The broker has a batch; a tracker that is not ours is left alone."""
        batch = self._forget(confirm.tracker)
        if batch is not None:
            self.outcomes.append((batch, confirm))

    def refused(self, refused: Refused, now_ms: int) -> None:
        """The broker did not take a batch: try again later, or fail it, by the code."""
        if refused.reference == 0:
            self.unpromised_refusals += 1
            return
        batch = self._forget(refused.reference)
        if batch is None:
            return
        sender = batch.sender
        error = BrokerRefused(refused.code, refused.reason, refused.retry_ms)
        # Producer and sequence are this client's; else the caller's, who alone can mend them.
        own = self._settings.idempotent
        if refused.code == "fenced" and own:
            self.outcomes.append((batch, error))
            self.fail_all(error)
            return
        pause_ms = 0
        if refused.code in RETRYABLE or (own and refused.code == "unknown_producer"):
            pause_ms = refused.retry_ms or RETRY_MS
        if self._comes_again(refused.code, sender):
            sender.returned.append(batch)
            self.window.queued_bytes += batch.size
        else:
            self.outcomes.append((batch, error))
        sender.blocked_until_ms = max(sender.blocked_until_ms, now_ms + pause_ms)
        self._active[sender] = None

    def _comes_again(self, code: str, sender: Sender) -> bool:
        """Whether a batch that was refused by a code is sent again.

        Without `idempotent` a batch keeps the producer and the sequence that its caller gave it:
        only what is to be sent again before it can make its sequence the next.
        """
        if code in RETRYABLE:
            return True
        if self._settings.idempotent:
            return code in _NUMBERED_ANEW
        return code == "out_of_sequence" and bool(sender.returned)

    def _forget(self, tracker: int) -> Unconfirmed | None:
        batch = self._sent.pop(tracker, None)
        if batch is not None:
            batch.sender.inflight.pop(tracker, None)
            self.window.unconfirmed_bytes -= batch.size
        return batch

    def next_wake(self) -> int | None:
        """When take() is to be called at the latest, for a pause or a linger; None: no need."""
        wake: int | None = None
        if not self._linked:
            return None
        if self._active and self._producer_again_ms > self._taken_ms:
            wake = self._producer_again_ms
        for sender in self._active:
            head = sender.queue[0] if sender.queue else None
            if sender.held:
                at = None if sender.inflight else sender.blocked_until_ms
            elif isinstance(head, Gathering) and head.since_ms >= 0:
                at = max(head.since_ms + self._settings.linger_ms, self._left_ms + 1)
            else:
                at = None
            # A full window or a producer not open yet outlasts a linger: only an answer
            # ends that, and a time gone by would have the shell turn without a pause.
            if at is not None and at > self._taken_ms and (wake is None or at < wake):
                wake = at
        return wake


def _unsent(gathering: Gathering, rows: list[Row]) -> Unconfirmed:
    """The rows as a batch without content: it carries their tokens."""
    tokens = [row.token for row in rows]
    return Unconfirmed(gathering.sender, b"", len(rows), gathering.level, tokens, True)


def _count(item: Gathering | Unconfirmed) -> int:
    return len(item.rows) if isinstance(item, Gathering) else item.count


def _size(item: Gathering | Unconfirmed) -> int:
    return item.bytes if isinstance(item, Gathering) else item.size


def confirmation(confirm: Confirm, index: int, count: int) -> Confirmation:
    """What a CONFIRM says of `count` records from the batch's record `index` on."""
    return Confirmation(
        confirm.offset + index if confirm.offset >= 0 else -1,
        confirm.epoch,
        LEVEL_NAMES.get(confirm.level, str(confirm.level)),
        confirm.append_time_ms,
        count,
        confirm.duplicate,
    )


def confirmations(confirm: Confirm, count: int) -> list[Confirmation]:
    """What a CONFIRM says of each of the batch's first `count` records."""
    first = confirmation(confirm, 0, 1)
    if count == 1 or first.offset < 0:
        return [first] * count
    epoch, level, time_ms, again = first.epoch, first.level, first.append_time_ms, first.duplicate
    return [
        Confirmation(offset, epoch, level, time_ms, 1, again)
        for offset in range(first.offset, first.offset + count)
    ]
