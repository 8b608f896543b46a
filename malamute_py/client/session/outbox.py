"""Mail, requests and replies that are not yet confirmed.

Owns the keys and the deadlines of mail, requests and replies on their way. The rule: a batch that
was not answered is sent again under the same key, which was drawn for it at random, so that it is
taken once; parts of one that was refused are named anew. What a place gets in order leaves one
batch after the other: what gathers meanwhile is the next. Source: SPEC.md, sections 4.4, 4.5 and 8.

Words: a lane has the batches of one place: a mailbox, a service or a requester. A row's token is
the object at which its caller waits; None: the caller has given it up, and its batch is thin.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final

from malamute_protocol.commands import Confirm, Send
from malamute_protocol.errors import BrokerRefused, MalamuteError, Timeout
from malamute_py.client.arguments import priority_of
from malamute_py.client.position import Confirmation
from malamute_py.client.session.events import Confirmed, Event, Settled
from malamute_py.client.session.lanes import OVER, QUEUED, Lane, Lanes, OutgoingBatch
from malamute_py.client.session.outgoing import RETRY_MS, RETRYABLE, CommandSink, Trackers, Window
from malamute_py.client.session.publisher import confirmation
from malamute_py.client.session.rows import ROW_BYTES, OutgoingRow, rows_of_content
from malamute_py.client.settings import ClientSettings

KEY_BYTES: Final = 16
_DIVIDED: Final = frozenset({"limit", "too_large", "not_held", "no_workers"})
"""Codes that may be the fault of some rows, or of their number, and not of the others."""
_TOGETHER_MS: Final = 10
"""Rows whose deadlines lie so close share one, the latest of them."""
_SWEEP_MIN: Final = 4096
"""Deadlines beyond which those of settled batches are looked for."""
_UNREAD: Final = OutgoingRow(b"", 0, "", None)
"""Stands for each row of a content that came encoded and was not read back."""


class Tally:
    """Contents that one bulk call sent: the call is over when the last of their rows is settled.

    Only bulk mail (send_many()) makes one.
    """

    __slots__ = ("confirmations", "error", "left", "token")

    def __init__(self, token: Any) -> None:
        """token: gets the list of Confirmations, one a content, or the first failure."""
        self.token = token
        self.left = 0
        """Rows handed in and not settled; the caller adds to it before it hands them in."""
        self.confirmations: list[Confirmation] = []
        self.error: MalamuteError | None = None

    def settled(self, count: int, outcome: Confirm | MalamuteError) -> Event | None:
        """Count rows of one batch of a bulk call as settled, with the outcome of the batch.

        Returns the event that settles the call, with the last of its rows; None: others are open.
        """
        if isinstance(outcome, Confirm):
            self.confirmations.append(confirmation(outcome, 0, count))
        elif self.error is None:
            self.error = outcome
        self.left -= count
        if self.left:
            return None
        self.confirmations.sort(key=lambda one: one.offset)
        return Settled([(self.token, self.error or self.confirmations)])


class KeyedBatch(OutgoingBatch):
    """Rows for a mailbox, a service or a requester, under a key by which they are taken once."""

    __slots__ = ("key", "tally")

    lane: Lane[KeyedBatch]

    def __init__(self, lane: Lane[Any], level: int) -> None:
        super().__init__(lane, level)
        self.key = b""
        self.one_by_one = True  # else the next might be taken where this one is refused
        self.tally: Tally | None = None
        """Count of the bulk call that sent the batch; None: each row has its own caller."""

    @property
    def forgotten(self) -> bool:
        """Whether nothing is to be done when its time is over: its deadline may be dropped."""
        return self.state == OVER

    def part(self, rows: list[Any]) -> OutgoingBatch:
        """Make a batch of some of the rows, in this one's place but under a key of its own.

        The broker takes a key once: with other rows it would be a conflict.
        """
        part = super().part(rows)
        assert isinstance(part, KeyedBatch)
        part.tally = self.tally
        part.sealed = self.tally is not None  # no row of another call may join a tallied batch
        return part

    def encode(self) -> None:
        """Make the content, and draw a key unless the caller gave one, as the batch leaves first.

        Raises whatever a row raises that cannot be encoded.
        """
        super().encode()
        if not self.key:
            self.key = self.lane.owner.new_key()

    def settle(self, outcome: Confirm | MalamuteError) -> None:
        """Give the callers of the rows their outcome, or count it in the tally of a bulk call."""
        emit = self.lane.owner.emit
        if self.tally is not None:
            event = self.tally.settled(self.count, outcome)
            if event is not None:
                emit(event)
        else:
            emit(Confirmed([row.token for row in self.rows], outcome))

    def given_up(self) -> None:
        """Fail the callers of a batch whose time is over, unless it is settled."""
        if self.state == OVER:
            return
        owner = self.lane.owner
        error = Timeout(
            f"what was sent to {self.lane.place!r} was not confirmed within its time; it may be "
            f"taken yet; {owner.standing()}"
        )
        if self.tally is not None:
            # One caller waits for many batches, and the tally counts their outcomes for it.
            event = self.tally.settled(self.count, error)
            self.tally = None
            # Its rows have no callers of their own: all count as given up, so none leaves again
            # after a refusal or on a new link.
            self.thin = True
            if event is not None:
                owner.emit(event)
            return
        owner.emit(Settled([(row.token, error) for row in self.rows if row.token]))
        for row in self.rows:
            row.token = None
        self.thin = True


class OutgoingMail(KeyedBatch):
    """Messages to one mailbox."""

    __slots__ = ("deliver_at_ms", "priority")

    def __init__(self, lane: Lane[Any], level: int, priority: int, deliver_at_ms: int) -> None:
        super().__init__(lane, level)
        self.priority = priority
        self.deliver_at_ms = deliver_at_ms

    def empty_like(self) -> OutgoingMail:
        """Make an empty batch for the same place and terms, which part() fills."""
        return OutgoingMail(self.lane, self.level, self.priority, self.deliver_at_ms)

    def send(self, out: CommandSink, tracker: int) -> None:
        """Hand over SEND, with the key if a CONFIRM is awaited: else it is not sent again."""
        out.put(
            Send(
                self.lane.place,
                tracker,
                self.level,
                self.key if tracker else b"",
                self.deliver_at_ms,
                self.priority,
            ),
            self.content,
        )


class Outbox(Lanes[KeyedBatch]):
    """All mail, requests and replies of a session on their way."""

    def __init__(
        self,
        settings: ClientSettings,
        random: Callable[[int], bytes],
        trackers: Trackers,
        window: Window,
        emit: Callable[[Event], None],
        standing: Callable[[], str],
    ) -> None:
        """random: n -> n random bytes, for keys. emit: takes the events that settle callers.

        standing: says in words whether there is a link, for the error of a caller whose time is
        over.
        """
        super().__init__(settings, trackers, window, emit)
        self.standing = standing
        self.mailboxes: dict[Any, Lane[KeyedBatch]] = {}
        self.homes.append(self.mailboxes)
        self._random = random
        self._deadlines: list[tuple[int, int, KeyedBatch]] = []
        """A heap of (time, number of the entry, batch), where some batches are settled long since.

        By the number no two entries are equal, so that batches are not compared.
        """
        self._entries = 0
        self._sweep_at = _SWEEP_MIN
        """Entries at which those of settled batches are dropped."""
        self._now_ms = 0

    # --- what callers do -----------------------------------------------------------------

    @property
    def is_roomy(self) -> bool:
        """Whether so little is unconfirmed that later confirms hold no caller up."""
        return self.window.unconfirmed_bytes < self.window.bytes_max // 4

    def new_key(self) -> bytes:
        """Return a random key for something that may have to be sent again."""
        return self._random(KEY_BYTES)

    def send(
        self,
        mailbox: str,
        row: OutgoingRow,
        level: int,
        *,
        priority: int = 0,
        deliver_at_ms: int = 0,
        key: bytes = b"",
        until_ms: int = 0,
    ) -> None:
        """Put one message on its way; its token gets the confirm.

        It joins the last batch of the mailbox's lane if that agrees in all but the message itself,
        and has room; else it begins another. until_ms: when its caller gives it up; 0: never. key:
        the caller's own: the message then leaves alone.
        Raises LocalProtocolError `too_large`, or what ended the session.
        """
        if type(priority) is not int or priority:
            priority = priority_of(priority)
        lane = self.mailboxes.get(mailbox) if type(mailbox) is str else None
        if lane is None or self.fatal is not None:
            # It checks the name, and raises what ended the session.
            lane = self.lane(self.mailboxes, mailbox, "mailbox")
        queue = lane.queue
        last = queue[-1] if queue else None
        if (
            last is None
            or key
            or last.level != level
            or type(last) is not OutgoingMail
            or last.priority != priority
            or last.deliver_at_ms != deliver_at_ms
            or not self.join(last, row, until_ms)
        ):
            self.check(row)
            self.start(OutgoingMail(lane, level, priority, deliver_at_ms), row, key, until_ms)

    def send_content(
        self, mailbox: str, content: Any, level: int, tally: Tally, count: int, **options: int
    ) -> None:
        """Put an encoded content of a bulk call on its way; the tally counts its outcome.

        count: messages in the content. options: priority, deliver_at_ms and until_ms, as of send().
        Raises LocalProtocolError `too_large`, or what ended the session: nothing was taken.
        """
        size = self.check_content(content, count)
        priority = priority_of(options.get("priority", 0))
        lane = self.lane(self.mailboxes, mailbox, "mailbox")
        batch = OutgoingMail(lane, level, priority, options.get("deliver_at_ms", 0))
        batch.content = content
        batch.tally = tally
        # Its rows are read back only if the broker wants fewer at a time.
        batch.rows = [_UNREAD] * count
        batch.bytes = size
        batch.key = self.new_key()
        batch.sealed = True
        self.queue(batch)
        self._set_deadline(batch, options.get("until_ms", 0))

    def join(self, batch: KeyedBatch, row: OutgoingRow, until_ms: int) -> bool:
        """Add a row of the same kind to the last batch of its lane; False: it does not fit.

        until_ms: time at which the row's caller gives it up; 0: never. A batch has one such time,
        so it must be about the same.
        """
        size = row.size
        rows = batch.rows
        longer_ms = until_ms - batch.until_ms
        if (
            batch.sealed
            or batch.packing is not row.packing
            or batch.bytes + size > self.batch_bytes
            or len(rows) >= self.records_max
            or (longer_ms and not -_TOGETHER_MS <= longer_ms <= _TOGETHER_MS)
        ):
            return False
        if longer_ms > 0:
            batch.until_ms = until_ms
        rows.append(row)
        size += ROW_BYTES
        batch.bytes += size
        self.window.queued_bytes += size
        return True

    def start(self, batch: KeyedBatch, row: OutgoingRow, key: bytes, until_ms: int) -> None:
        """Put a new batch at the end of its lane, with its first row.

        key: the caller's own, which names this row alone, so that no other joins; empty: one is
        drawn when the batch leaves. until_ms: when the callers give it up; 0: never.
        """
        if key:
            batch.key = key
            batch.sealed = True
        self.begin(batch, row)
        if until_ms:
            self._set_deadline(batch, until_ms)

    def _set_deadline(self, batch: KeyedBatch, until_ms: int) -> None:
        """Have wake() call the batch's given_up() at a time; 0: never."""
        if not until_ms:
            return
        batch.until_ms = until_ms
        self._entries += 1
        deadlines = self._deadlines
        heapq.heappush(deadlines, (until_ms, self._entries, batch))
        if len(deadlines) >= self._sweep_at:
            # Most are settled long before their time: they must not gather until then. At twice
            # of what is left, so that sweeps cost little for each entry.
            deadlines[:] = [
                (at_ms, number, waiting)
                for at_ms, number, waiting in deadlines
                if not waiting.forgotten
            ]
            heapq.heapify(deadlines)
            self._sweep_at = max(_SWEEP_MIN, 2 * len(deadlines))

    def look_again(self, batch: KeyedBatch, after_ms: int) -> None:
        """Have given_up() called once more: `after_ms` after the batch's time, or after now.

        Called by requests that their callers have given up, to forget them if no notice comes.
        """
        self._set_deadline(batch, max(batch.until_ms, self._now_ms) + after_ms)

    def fail_all(self, error: MalamuteError) -> None:
        """Fail everything unconfirmed, and every later call: the session has ended."""
        super().fail_all(error)
        self._deadlines.clear()

    # --- sending -----------------------------------------------------------------------------

    def wake(self, now_ms: int) -> None:
        """Fail the callers of batches whose time is over; withdraw those that have not left."""
        self._now_ms = now_ms
        deadlines = self._deadlines
        while deadlines:
            at_ms, _, batch = deadlines[0]
            if at_ms > now_ms:
                break
            heapq.heappop(deadlines)
            if batch.until_ms > now_ms:
                # A row with a later time joined it since; in a heap an entry cannot be moved.
                self._set_deadline(batch, batch.until_ms)
            else:
                batch.given_up()
                if batch.state == QUEUED:
                    self.withdraw(batch)

    def send_again(self, batch: KeyedBatch) -> None:
        """Send requests once more under their key, which were confirmed and may be gone.

        Called on a new link, as the broker may have lost the requests or their replies.
        """
        home, place = batch.lane.home, batch.lane.place
        batch.lane = home.setdefault(place, batch.lane)  # its lane may have been dropped meanwhile
        batch.doubtful = True
        self._put_back(batch)

    def withdraw(self, batch: KeyedBatch) -> None:
        """Take back a batch that has not left; its callers were told before."""
        batch.state = OVER
        self._take_out(batch.lane, [batch])

    def thin_out(self, batch: KeyedBatch) -> None:
        """Replace a refused batch, which waits to leave again, by one of the rows still awaited.

        A caller has given a row up. The broker has nothing of the batch, so a new key is right.
        """
        kept = self._thinned(batch)
        if kept.count:
            self._put_back(kept)
        self._take_out(batch.lane, [batch])

    # --- answers -----------------------------------------------------------------------------

    def refused(self, batch: KeyedBatch, error: BrokerRefused, now_ms: int) -> None:
        """Send a refused batch again later, or in parts, or fail it, by the code."""
        if not self._take_answered(batch):
            return
        # The broker looks for the key before it refuses: it has nothing of the batch.
        batch.doubtful = False
        lane = batch.lane
        if error.code in RETRYABLE:
            batch = self._thinned(batch)
            if batch.count:
                self._put_back(batch)
                self._block(lane, now_ms + (error.retry_ms or RETRY_MS))
        elif error.code in _DIVIDED and batch.count > 1:
            # Some rows may be at fault alone: in parts the others are taken.
            if batch.rows[0] is _UNREAD:  # it came encoded: only now are its rows needed
                batch.rows = rows_of_content(batch.content)
                batch.packing = batch.rows[0].packing
            self._divide(batch)
        else:
            self._end(batch, error)
        if not lane.queue:
            self._note_empty(lane)

    def answered(self, batch: KeyedBatch) -> None:
        """Settle a batch of requests whose replies have come, or are not awaited any more."""
        lane = batch.lane
        if batch.state == QUEUED:
            self.withdraw(batch)
        elif self._take_answered(batch):
            batch.state = OVER
            if not lane.queue:
                self._note_empty(lane)
        batch.rows = []
        batch.content = b""

    def _thinned(self, batch: KeyedBatch) -> KeyedBatch:
        """Return what is to leave of a refused batch: the rows that a caller still waits for.

        Called before such a batch is put back into its lane. It is the batch itself if no caller
        has given up. Else it is a new one, under a key of its own, and may be without rows.
        """
        if not batch.thin:
            return batch
        kept: Any = batch.part(batch.live_rows())
        batch.replaced([kept])  # Its callers wait for the new batch from now on.
        batch.state = OVER
        if kept.count:
            self._set_deadline(kept, kept.until_ms)
        else:
            kept.state = OVER
        return kept  # type: ignore[no-any-return]

    def _divide(self, batch: KeyedBatch) -> list[Any]:
        """Replace a batch that was not taken by its halves, under new keys and its deadline."""
        parts = super()._divide(batch)
        for part in parts:
            self._set_deadline(part, part.until_ms)
        return parts

    def next_wake(self) -> int | None:
        """Latest time of the next wake() and take(); None: no need."""
        at = super().next_wake()
        if self._deadlines:
            first_ms, *_ = self._deadlines[0]
            return first_ms if at is None else min(first_ms, at)
        return at
