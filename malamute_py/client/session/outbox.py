"""What was sent to mailboxes and services, and by workers to those who asked.

Owns the rows that were gathered for one place and the contents on their way. The rule: a
content that was not answered is sent again with the same bytes and the same key, which was
drawn for it at random, so that it is taken once; one that was refused was not taken at all,
so it may be cut, thinned and named anew. What a place gets in order leaves one content after
the other: what gathers meanwhile is the next. Source: SPEC.md, sections 4.4, 4.5 and 8.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final

from malamute_protocol.commands import Confirm, Level, Send, Welcome
from malamute_protocol.errors import (
    BrokerRefused,
    LocalProtocolError,
    MalamuteError,
    Timeout,
)
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.arguments import name_of, priority_of
from malamute_py.client.position import Confirmation
from malamute_py.client.session.events import Confirmed, Event, Settled
from malamute_py.client.session.outgoing import RETRY_MS, RETRYABLE, Put, Trackers, Window
from malamute_py.client.session.publisher import confirmation
from malamute_py.client.session.receiver import Opened
from malamute_py.client.session.rows import ROW_BYTES, Row, content_of, rows_of_content, size_of
from malamute_py.client.settings import ClientSettings

KEY_BYTES: Final = 16
QUEUED, SENT, OVER = 0, 1, 2
"""States of a parcel."""
NONE: Final = int(Level.NONE)
_DIVIDED: Final = frozenset({"limit", "too_large", "not_held", "no_workers"})
"""Codes that may be the fault of some rows, or of their number, and not of the others."""


class Tally:
    """Contents that one call sent: it is over when the last of their rows is."""

    __slots__ = ("confirmations", "error", "left", "token")

    def __init__(self, token: Any) -> None:
        """token: gets the list of Confirmations, one a content, or the first failure."""
        self.token = token
        self.left = 0
        """Rows handed in and not settled; the caller adds to it before it hands them in."""
        self.confirmations: list[Confirmation] = []
        self.error: MalamuteError | None = None

    def settled(self, count: int, outcome: Confirm | MalamuteError) -> Event | None:
        """So many rows have their outcome."""
        if isinstance(outcome, Confirm):
            self.confirmations.append(confirmation(outcome, 0, count))
        elif self.error is None:
            self.error = outcome
        self.left -= count
        if self.left:
            return None
        self.confirmations.sort(key=lambda one: one.offset)
        return Settled([(self.token, self.error or self.confirmations)])


class Parcel:
    """Rows that leave as one content, from the first of them until all is settled."""

    __slots__ = (
        "bytes",
        "content",
        "counted",
        "doubtful",
        "key",
        "lane",
        "level",
        "rows",
        "sealed",
        "serial",
        "state",
        "tally",
        "thin",
        "until_ms",
    )

    def __init__(self, lane: Lane, level: int) -> None:
        self.lane = lane
        self.level = level
        self.rows: list[Row] = []
        """With their tokens; None as token: no caller waits for it any more."""
        self.bytes = 0
        """Bytes of the window that the parcel takes."""
        self.content: Any = b""
        """Empty until it leaves for the first time."""
        self.counted = False
        """Its bytes are unconfirmed ones of the window."""
        self.doubtful = False
        """Whether the parcel was under way when a link was lost: the broker may have taken it."""
        self.key = b""
        self.sealed = False
        """No row may join it: it has a key, a content, or a tally that counts its rows."""
        self.serial = 0
        self.state = QUEUED
        self.until_ms = 0
        """When its callers give it up; 0: never."""
        self.tally: Tally | None = None
        self.thin = False
        """Some of its rows were given up by who waited for them."""

    # Properties, as they are in who inherits: compiled, an attribute here would hide theirs.
    @property
    def answered_otherwise(self) -> bool:
        """No CONFIRM is wanted: something else will show that the broker has it."""
        return False

    def may_be_lost(self, confirm: Confirm) -> bool:
        """Whether it is kept although it was confirmed: it may have to be sent again."""
        return False

    @property
    def one_by_one(self) -> bool:
        """Nothing may leave for the same place before this is answered."""
        return True

    @property
    def forgotten(self) -> bool:
        """Nothing is to be done when its time is over."""
        return self.state == OVER

    def live_rows(self) -> list[Row]:
        """The rows that a caller waits for."""
        return [row for row in self.rows if row.token is not None]

    def part(self) -> Parcel:
        """An empty one that is alike."""
        raise NotImplementedError

    def say(self, out: Put, tracker: int) -> None:
        """Hand over the command, with its content."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.rows)

    def confirmed(self, confirm: Confirm) -> None:
        """Settle a parcel that the broker took."""
        self.lane.outbox.confirmed(self, confirm)

    def refused(self, error: BrokerRefused, now_ms: int) -> None:
        """Settle, repeat or split a parcel that the broker refused."""
        self.lane.outbox.refused(self, error, now_ms)

    def named(self) -> None:
        """Note that the parcel has its content and key, and leaves for the first time."""

    def replaced(self, parts: list[Parcel]) -> None:
        """Go on with the rows in other parcels: this one was not taken and will not leave again."""

    def settle(self, outcome: Confirm | MalamuteError) -> None:
        """Tell those who wait."""
        tell = self.lane.outbox.tell
        if self.tally is not None:
            event = self.tally.settled(self.count, outcome)
            if event is not None:
                tell(event)
        else:
            tell(Confirmed([row.token for row in self.rows], outcome))

    def given_up(self) -> None:
        """Its time is over: those who wait are told."""
        if self.state == OVER:
            return
        error = Timeout(
            f"what was sent to {self.lane.place!r} was not confirmed within its time; it may be "
            f"taken yet; {self.lane.outbox.standing()}"
        )
        if self.tally is not None:
            event = self.tally.settled(self.count, error)
            self.tally = None
            if event is not None:
                self.lane.outbox.tell(event)
            return
        self.lane.outbox.tell(Settled([(row.token, error) for row in self.rows if row.token]))
        for row in self.rows:
            row.token = None
        self.thin = True


class MailParcel(Parcel):
    """Messages to one mailbox."""

    __slots__ = ("deliver_at_ms", "priority")

    def __init__(self, lane: Lane, level: int, priority: int, deliver_at_ms: int) -> None:
        super().__init__(lane, level)
        self.priority = priority
        self.deliver_at_ms = deliver_at_ms

    def part(self) -> Parcel:
        """An empty one that is alike."""
        return MailParcel(self.lane, self.level, self.priority, self.deliver_at_ms)

    def say(self, out: Put, tracker: int) -> None:
        """SEND."""
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


class Lane:
    """The way to one place: what waits for its turn there, and what is under way."""

    __slots__ = ("blocked_until_ms", "gate", "home", "outbox", "place", "queue", "sent", "stopped")

    def __init__(self, outbox: Outbox, home: dict[Any, Lane], place: Any) -> None:
        """home: where the outbox keeps it, under `place`, while it has anything."""
        self.outbox = outbox
        self.home = home
        self.place = place
        self.queue: deque[Parcel] = deque()
        self.sent: dict[Parcel, None] = {}
        """In the order of their leaving."""
        self.stopped = False
        """Under way is one that must be answered before another leaves."""
        self.blocked_until_ms = 0
        """No sending before this time: the broker said `wait`."""
        self.gate: Opened | None = None
        """What must be active on the link for its commands to be understood."""


class Outbox:
    """All lanes of a session."""

    def __init__(
        self,
        settings: ClientSettings,
        random: Callable[[int], bytes],
        trackers: Trackers,
        window: Window,
        tell: Callable[[Event], None],
        standing: Callable[[], str],
    ) -> None:
        """standing: in words, whether there is a link."""
        self.tell = tell
        self.standing = standing
        self.mailboxes: dict[Any, Lane] = {}
        self.homes: list[dict[Any, Lane]] = [self.mailboxes]
        """Where lanes are kept, one a kind of place."""
        self.limits: Limits = DEFAULT_LIMITS
        self._batch_bytes = settings.batch_target(DEFAULT_LIMITS)
        self.unpromised_refusals = 0
        """Refused contents that were sent with confirm="none"."""
        self._settings = settings
        self._random = random
        self._trackers = trackers
        self._window = window
        self._active: Final[dict[Lane, None]] = {}
        self._sent = 0
        self._serial = 0
        self._deadlines: list[tuple[int, int, Parcel]] = []
        """A heap of (time, number of the entry, parcel); some are settled long since."""
        self._entries = 0
        self._sweep_at = _SWEEP_MIN
        self._blocked: Final[dict[Lane, None]] = {}
        self.queues: Final = (self._active, self._blocked)
        """What take() goes by: while all of them are empty, it has nothing to do."""
        self._linked = False
        self._fatal: MalamuteError | None = None
        self._taken_ms = -1
        self._now_ms = 0

    # --- what callers do -----------------------------------------------------------------

    @property
    def is_roomy(self) -> bool:
        """Whether confirms that come a little later hold no caller up."""
        return self._window.unconfirmed_bytes < self._window.bytes_max // 4

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is unconfirmed."""
        return not self._active and not self._sent

    @property
    def unanswered(self) -> int:
        """Commands that wait to leave, or for their answers."""
        return sum(
            len(lane.sent) + len(lane.queue) for home in self.homes for lane in home.values()
        )

    @property
    def waits(self) -> bool:
        """Something may leave with the next take()."""
        return bool(self._active)

    def new_key(self) -> bytes:
        """A name for what may be sent again."""
        return self._random(KEY_BYTES)

    def lane(self, home: dict[Any, Lane], place: Hashable, name: str = "") -> Lane:
        """The lane to a place, made when there is none. Raises what ended the session.

        name: of the argument that names the place. Raises LocalProtocolError: it cannot be a name.
        """
        if self._fatal is not None:
            raise self._fatal
        try:
            lane = home.get(place)
        except TypeError:  # it cannot be a key, so it is no name
            lane = None
        if lane is None:
            if name:
                name_of(name, place)
            lane = home[place] = Lane(self, home, place)
        return lane

    def send(
        self,
        mailbox: str,
        row: Row,
        level: int,
        *,
        priority: int = 0,
        deliver_at_ms: int = 0,
        key: bytes = b"",
        until_ms: int = 0,
    ) -> None:
        """Put one message on its way; its token gets the confirm.

        until_ms: when its caller gives it up; 0: never. key: the caller's own: the message
        then leaves alone. Raises LocalProtocolError `too_large`, or what ended the session.
        """
        if type(priority) is not int or priority:
            priority = priority_of(priority)
        lane = self.mailboxes.get(mailbox) if type(mailbox) is str else None
        if lane is None or self._fatal is not None:
            lane = self.lane(self.mailboxes, mailbox, "mailbox")
        queue = lane.queue
        last = queue[-1] if queue else None
        if (
            last is None
            or key
            or last.level != level
            or type(last) is not MailParcel
            or last.priority != priority
            or last.deliver_at_ms != deliver_at_ms
            or not self.join(last, row, until_ms)
        ):
            self.check(row)
            self.begin(MailParcel(lane, level, priority, deliver_at_ms), row, key, until_ms)

    def send_content(
        self, mailbox: str, content: Any, level: int, tally: Tally, count: int, **options: int
    ) -> None:
        """Put an encoded content of messages on its way.

        Raises LocalProtocolError `too_large`, or what ended the session: nothing was taken.
        """
        if len(content) + STAMP_BYTES > self.limits.batch_bytes_max:
            raise LocalProtocolError(
                "too_large",
                f"a batch of {len(content)} bytes; the broker takes {self.limits.batch_bytes_max}",
            )
        priority = priority_of(options.get("priority", 0))
        lane = self.lane(self.mailboxes, mailbox, "mailbox")
        parcel = MailParcel(lane, level, priority, options.get("deliver_at_ms", 0))
        parcel.content = content
        parcel.tally = tally
        # Its rows are read back only if the broker wants fewer at a time.
        parcel.rows = [_UNREAD] * count
        parcel.bytes = len(content) + STAMP_BYTES
        parcel.sealed = True
        self.queue(parcel, self._random(KEY_BYTES), options.get("until_ms", 0))
        self._window.queued_bytes += parcel.bytes

    def check(self, row: Row) -> None:
        """Raises LocalProtocolError `too_large`."""
        size = len(row.body)
        if size > self.limits.record_bytes_max:
            raise LocalProtocolError(
                "too_large",
                f"a record of {size} bytes; the broker takes {self.limits.record_bytes_max}",
            )

    def join(self, parcel: Parcel, row: Row, until_ms: int) -> bool:
        """Add a row of the same kind to the last parcel of its lane; False: it does not fit."""
        size = len(row.body)
        rows = parcel.rows
        longer_ms = until_ms - parcel.until_ms
        if (
            parcel.sealed
            or parcel.bytes + size > self._batch_bytes
            or len(rows) >= self.limits.batch_records_max
            or not -_TOGETHER_MS <= longer_ms <= _TOGETHER_MS
        ):
            return False
        if longer_ms > 0:
            parcel.until_ms = until_ms
        rows.append(row)
        size += ROW_BYTES
        parcel.bytes += size
        self._window.queued_bytes += size
        return True

    def begin(self, parcel: Parcel, row: Row, key: bytes, until_ms: int) -> None:
        """Put an empty parcel at the end of its lane, with its first row."""
        self.queue(parcel, key, until_ms)
        parcel.sealed = bool(key)
        parcel.rows.append(row)
        parcel.bytes = len(row.body) + ROW_BYTES
        self._window.queued_bytes += parcel.bytes

    def queue(self, parcel: Parcel, key: bytes, until_ms: int) -> None:
        """Put a parcel at the end of its lane."""
        self._serial += 1
        parcel.serial = self._serial
        parcel.key = key
        parcel.lane.queue.append(parcel)
        self._active[parcel.lane] = None
        if until_ms:
            parcel.until_ms = until_ms
            self._give_up_at(parcel)

    def _give_up_at(self, parcel: Parcel) -> None:
        self._entries += 1
        deadlines = self._deadlines
        heapq.heappush(deadlines, (parcel.until_ms, self._entries, parcel))
        if len(deadlines) >= self._sweep_at:
            # Most are settled long before their time: they must not gather until then.
            deadlines[:] = [entry for entry in deadlines if not entry[2].forgotten]
            heapq.heapify(deadlines)
            self._sweep_at = max(_SWEEP_MIN, 2 * len(deadlines))

    def look_again(self, parcel: Parcel, after_ms: int) -> None:
        """Have given_up() called once more, so long after the parcel's time or after now."""
        parcel.until_ms = max(parcel.until_ms, self._now_ms) + after_ms
        self._give_up_at(parcel)

    # --- the link --------------------------------------------------------------------------

    def link_up(self, welcome: Welcome) -> None:
        """A link is open: what is unconfirmed leaves again."""
        self._linked = True
        self.limits = Limits(
            record_bytes_max=welcome.record_bytes_max,
            batch_bytes_max=welcome.batch_bytes_max,
            batch_records_max=welcome.batch_records_max,
        )
        self._batch_bytes = self._settings.batch_target(self.limits)

    def link_down(self) -> None:
        """The link is gone: what was under way goes back to the head of its lane."""
        self._linked = False
        for home in self.homes:
            for lane in list(home.values()):
                under_way = list(lane.sent)
                lane.sent.clear()
                for parcel in reversed(under_way):
                    parcel.doubtful = True
                    self._uncount(parcel)
                    if parcel.thin and not parcel.live_rows():
                        parcel.state = OVER
                        continue
                    self._window.queued_bytes += parcel.bytes
                    self._put_back(parcel)
                lane.stopped = False
                lane.blocked_until_ms = 0
        self._blocked.clear()

    def disown(self, error: MalamuteError) -> None:
        """The client is another sender now: what may have been taken cannot be sent again."""
        for home in self.homes:
            for lane in list(home.values()):
                for parcel in [parcel for parcel in lane.queue if parcel.doubtful]:
                    lane.queue.remove(parcel)
                    self._window.queued_bytes -= parcel.bytes
                    self._end(parcel, error)
                if not lane.queue:
                    self._rest(lane)

    def fail_all(self, error: MalamuteError) -> None:
        """The session ends: everything unconfirmed fails, and so does every later call."""
        self._fatal = error
        for home in self.homes:
            for lane in list(home.values()):
                self.fail_lane(lane, error)
        self._deadlines.clear()

    def fail_lane(self, lane: Lane, error: MalamuteError) -> None:
        """What is in a lane fails; of what is under way the answers are not awaited."""
        for parcel in list(lane.sent):
            self._uncount(parcel)
            self._end(parcel, error)
        for parcel in lane.queue:
            self._window.queued_bytes -= parcel.bytes
            self._end(parcel, error)
        lane.sent.clear()
        lane.queue.clear()
        self._active.pop(lane, None)
        self._blocked.pop(lane, None)
        lane.home.pop(lane.place, None)

    # --- sending -----------------------------------------------------------------------------

    def wake(self, now_ms: int) -> None:
        """Give up what its callers wait for no longer."""
        self._now_ms = now_ms
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now_ms:
            _, _, parcel = heapq.heappop(deadlines)
            if parcel.until_ms > now_ms:
                # Rows joined it since; in a heap a time cannot be moved.
                self._give_up_at(parcel)
            else:
                parcel.given_up()
                if parcel.state == QUEUED:
                    self.withdraw(parcel)

    def send_again(self, parcel: Parcel) -> None:
        """What was confirmed may be gone: it leaves once more under its key."""
        home, place = parcel.lane.home, parcel.lane.place
        parcel.lane = home.setdefault(place, parcel.lane)
        self._window.queued_bytes += parcel.bytes
        self._put_back(parcel)

    def withdraw(self, parcel: Parcel) -> None:
        """Take back a parcel that has not left; those who wait were told."""
        parcel.state = OVER
        parcel.lane.queue.remove(parcel)
        self._window.queued_bytes -= parcel.bytes
        if not parcel.lane.queue:
            self._rest(parcel.lane)

    def take(self, now_ms: int, out: Put) -> bool:
        """Hand over what may leave now; False: the window holds something back."""
        self._taken_ms = now_ms
        if not self._linked:
            return True
        for lane in list(self._active):
            if lane.blocked_until_ms > now_ms or (lane.gate is not None and not lane.gate.active):
                continue
            if lane.blocked_until_ms:
                lane.blocked_until_ms = 0
                self._blocked.pop(lane, None)
            before = self._sent
            if not self._drain(lane, out):
                if self._sent != before:
                    # It had its turn: one that always has more must not starve the others.
                    self._active[lane] = self._active.pop(lane)
                return False
        return True

    def _drain(self, lane: Lane, out: Put) -> bool:
        queue = lane.queue
        while queue and not lane.stopped:
            parcel = queue[0]
            if parcel.one_by_one and lane.sent:
                return True
            promised = parcel.level != NONE or parcel.answered_otherwise
            if not self._window.lets_go(parcel.bytes):
                return False
            queue.popleft()
            self._window.queued_bytes -= parcel.bytes
            if parcel.content or self._encode(parcel):
                self._leave(parcel, promised, out)
        if not queue:
            self._rest(lane)
        return True

    def _rest(self, lane: Lane) -> None:
        """A lane has nothing that waits: it is kept only for what is under way."""
        self._active.pop(lane, None)
        if not lane.sent:
            self._blocked.pop(lane, None)
            lane.home.pop(lane.place, None)

    def _encode(self, parcel: Parcel) -> bool:
        """Make the content; of halves, when a row cannot be encoded or all are too much for one."""
        if parcel.thin:
            parcel.rows = parcel.live_rows()
            parcel.thin = False
            if not parcel.rows:
                parcel.state = OVER
                return False
        try:
            parcel.content = content_of(parcel.rows, self.limits)
        except Exception as error:  # noqa: BLE001 - whatever it is, it fails these rows only
            if parcel.count > 1:
                self._divide(parcel, (parcel.count + 1) // 2)
                return False
            if not isinstance(error, MalamuteError):
                reason = f"the record cannot be encoded: {error}"
                error = LocalProtocolError("bad_batch", reason)
            self._end(parcel, error)
            return False
        parcel.sealed = True
        if not parcel.key:
            parcel.key = self._random(KEY_BYTES)
        parcel.named()
        return True

    def _leave(self, parcel: Parcel, promised: bool, out: Put) -> None:
        if parcel.level == NONE:
            self._window.passes(len(parcel.content) + STAMP_BYTES)
        if not promised:
            parcel.say(out, 0)
            self._end(parcel, Confirm(0, parcel.level, 0, -1, 0))
            return
        parcel.bytes = len(parcel.content) + STAMP_BYTES
        parcel.state = SENT
        if parcel.level != NONE:
            parcel.counted = True
            self._window.unconfirmed_bytes += parcel.bytes
            self._sent += 1
        parcel.lane.sent[parcel] = None
        parcel.lane.stopped = parcel.one_by_one
        parcel.say(out, self._trackers.give(parcel))

    # --- answers -----------------------------------------------------------------------------

    def confirmed(self, parcel: Parcel, confirm: Confirm) -> None:
        """The broker has it."""
        if self._came_back(parcel):
            if parcel.may_be_lost(confirm):
                parcel.state = OVER
            else:
                self._end(parcel, confirm)
            if not parcel.lane.queue:
                self._rest(parcel.lane)

    def refused(self, parcel: Parcel, error: BrokerRefused, now_ms: int) -> None:
        """The broker did not take it: again later, in parts, or never, by the code."""
        if not self._came_back(parcel):
            return
        parcel.doubtful = False
        lane = parcel.lane
        if error.code in RETRYABLE:
            parcel = self._thinned(parcel)
            if parcel.count:
                self._window.queued_bytes += parcel.bytes
                self._put_back(parcel)
                pause_ms = error.retry_ms or RETRY_MS
                lane.blocked_until_ms = max(lane.blocked_until_ms, now_ms + pause_ms)
                self._blocked[lane] = None
        elif error.code in _DIVIDED and parcel.count > 1:
            self._read_back(parcel)
            self._divide(parcel, (parcel.count + 1) // 2)
        else:
            self._end(parcel, error)
        if not lane.queue:
            self._rest(lane)

    def _came_back(self, parcel: Parcel) -> bool:
        if parcel.state != SENT:
            return False
        lane = parcel.lane
        lane.sent.pop(parcel, None)
        lane.stopped = False
        self._uncount(parcel)
        return True

    def _uncount(self, parcel: Parcel) -> None:
        if parcel.counted:
            parcel.counted = False
            self._sent -= 1
            self._window.unconfirmed_bytes -= parcel.bytes

    def answered(self, parcel: Parcel) -> None:
        """What was to show that the broker has it has come, or is not awaited any more."""
        lane = parcel.lane
        if parcel.state == QUEUED:
            self.withdraw(parcel)
        elif self._came_back(parcel):
            parcel.state = OVER
            if not lane.queue:
                self._rest(lane)
        parcel.rows = []
        parcel.content = b""

    def _put_back(self, parcel: Parcel) -> None:
        """Into its lane again, before what was asked for later."""
        parcel.state = QUEUED
        queue = parcel.lane.queue
        place = 0
        while place < len(queue) and queue[place].serial < parcel.serial:
            place += 1
        queue.insert(place, parcel)
        self._active[parcel.lane] = None

    def _thinned(self, parcel: Parcel) -> Parcel:
        """A refused parcel without the rows that no caller waits for any more."""
        if not parcel.thin:
            return parcel
        kept = parcel.part()
        kept.until_ms, kept.serial = parcel.until_ms, parcel.serial
        kept.rows = parcel.live_rows()
        kept.bytes = size_of(kept.rows)
        parcel.replaced([kept])
        parcel.state = OVER
        if kept.until_ms:
            self._give_up_at(kept)
        return kept

    def _read_back(self, parcel: Parcel) -> None:
        """The rows of a content that came encoded."""
        if parcel.rows and parcel.rows[0] is _UNREAD:
            parcel.rows = rows_of_content(parcel.content)

    def _divide(self, parcel: Parcel, size: int) -> None:
        """Replace a parcel that was not taken by parts of so many rows, under new names."""
        parts = []
        rows = parcel.live_rows() if parcel.thin else parcel.rows
        for first in range(0, len(rows), size):
            part = parcel.part()
            part.rows = rows[first : first + size]
            part.until_ms, part.serial, part.tally = parcel.until_ms, parcel.serial, parcel.tally
            part.sealed = part.tally is not None
            part.bytes = size_of(part.rows)
            parts.append(part)
        parcel.replaced(parts)
        parcel.state = OVER
        if not parts:
            return
        self._window.queued_bytes += sum(part.bytes for part in parts)
        parcel.lane.queue.extendleft(reversed(parts))
        self._active[parcel.lane] = None
        if parcel.until_ms:
            for part in parts:
                self._give_up_at(part)

    def _end(self, parcel: Parcel, outcome: Confirm | MalamuteError) -> None:
        parcel.state = OVER
        parcel.settle(outcome)
        # A deadline may keep the parcel for long: not its bodies.
        parcel.rows = []
        parcel.content = b""

    def next_wake(self) -> int | None:
        """When wake() and take() are to be called at the latest; None: no need."""
        at: int | None = self._deadlines[0][0] if self._deadlines else None
        if self._linked and self._blocked:
            for lane in self._blocked:
                wake = lane.blocked_until_ms
                if wake > self._taken_ms and (at is None or wake < at):
                    at = wake
        return at


_SWEEP_MIN: Final = 4096
"""Deadlines beyond which those of settled parcels are looked for."""
_TOGETHER_MS: Final = 10
"""Rows whose deadlines lie so close share one, the latest of them."""
_UNREAD: Final = Row(b"", "", None)
"""Stands for each row of a content that came encoded and was not read back."""
