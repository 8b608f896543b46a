"""Batches that leave for one place after the other, and that the broker confirms or refuses.

Owns what the senders of records, of mail, requests and replies, and of steps have in common: rows
that gather into batches, the window's count of their bytes, what is under way, and what becomes of
both when the link goes. The rules: to one place batches leave in the order of the calls; one that
was not answered is sent again with the same bytes; one that was refused was not taken at all, so it
may be divided and encoded anew. Source: SPEC.md, section 8.

Words: a row is one record, message, request, reply or step; its `token` is the object at which its
caller waits, None when the caller has given it up. A batch is the rows that leave as one content. A
lane has the batches of one place: a stream, a mailbox or a service. A sender (Publisher, Outbox,
Steps) owns its lanes, and settles a batch by giving each caller the CONFIRM or an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar, Final, Generic, TypeVar

from malamute_protocol.commands import Confirm, Level, Welcome
from malamute_protocol.errors import BrokerRefused, LocalProtocolError, MalamuteError
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.arguments import name_of
from malamute_py.client.session.events import Event
from malamute_py.client.session.outgoing import CommandSink, Trackers, Window
from malamute_py.client.session.receiver import Opened
from malamute_py.client.session.rows import ROW_BYTES, OutgoingRow, Packing, content_of, size_of
from malamute_py.client.settings import ClientSettings

QUEUED, SENT, OVER = range(3)
"""States of a batch: waiting to leave, under way, answered or given up."""
NONE: Final = int(Level.NONE)
_PARTS_MAX: Final = 1 << 16
"""Parts of a batch at most, one a row: their serials lie between that of the batch and the next."""


class OutgoingBatch(ABC):
    """Rows that leave as one content, from the first of them until all is settled.

    The base of the batches of records, of mail, requests and replies (KeyedBatch), and of steps.
    """

    __slots__ = (
        "bytes", "content", "counted", "doubtful", "lane", "level", "one_by_one", "packing", "rows",
        "sealed", "serial", "state", "thin", "until_ms",
    )  # fmt: skip

    def __init__(self, lane: Lane[Any], level: int) -> None:
        self.lane = lane
        self.level = level
        self.rows: list[Any] = []
        self.bytes = 0
        """Bytes of the window that the batch takes; an estimate until it is encoded."""
        self.content: Any = b""
        """Empty until the batch leaves for the first time."""
        self.counted = False
        """Whether its bytes are unconfirmed ones of the window."""
        self.doubtful = False
        """Whether the batch was under way when a link was lost: the broker may have taken it."""
        self.one_by_one = False
        """Whether nothing may leave for the same place before this is answered: else the broker
        might refuse this and take what follows. It holds for mail, and for replies that others
        follow."""
        self.packing: Packing | None = None
        """Form of the bodies of all rows: their codec, and whether they are lists of blobs."""
        self.sealed = False
        """Whether no row may join: the batch has a key, a content, or belongs to one bulk call of
        mail, which counts the outcomes of its own rows (outbox.Tally)."""
        self.serial = 0
        """Place in the order of the calls, which the batch keeps when it comes back."""
        self.state = QUEUED
        self.thin = False
        """Whether callers have given up some of its rows."""
        self.until_ms = 0
        """Time at which its callers give it up; 0: never."""

    @property
    def answered_otherwise(self) -> bool:
        """Whether something else than a CONFIRM will show that the broker has it."""
        return False

    @property
    def count(self) -> int:
        """Number of the rows that the batch has now."""
        return len(self.rows)

    def live_rows(self) -> list[Any]:
        """Return the rows whose callers still wait: the others need not be sent (again)."""
        return [row for row in self.rows if row.token is not None]

    @abstractmethod
    def empty_like(self) -> OutgoingBatch:
        """Make an empty batch for the same place and terms, which part() fills."""

    def part(self, rows: list[Any]) -> OutgoingBatch:
        """Make a batch of some of the rows, when this one is split or loses rows.

        It keeps this one's place in the order (`serial`).
        """
        part = self.empty_like()
        part.rows = rows
        part.bytes = size_of(rows)
        part.packing = self.packing
        part.until_ms, part.serial = self.until_ms, self.serial
        return part

    def encode(self) -> None:
        """Make the content, as the batch leaves first. Raises what encoding a row raises."""
        self.content = content_of(self.rows, self.lane.owner.limits)
        self.bytes = len(self.content) + STAMP_BYTES

    @abstractmethod
    def send(self, out: CommandSink, tracker: int) -> None:
        """Hand over the command, with its content."""

    def confirmed(self, confirm: Confirm) -> None:
        """Settle a batch that the broker took."""
        self.lane.owner.confirmed(self, confirm)

    def refused(self, error: BrokerRefused, now_ms: int) -> None:
        """Settle, repeat or divide a batch that the broker refused."""
        self.lane.owner.refused(self, error, now_ms)

    def replaced(self, parts: list[Any]) -> None:  # noqa: B027 - most keep nothing beside rows
        """Take note that `parts` leave instead of this batch, for the callers of its rows."""

    @abstractmethod
    def settle(self, outcome: Confirm | MalamuteError) -> None:
        """Give the callers of the rows their outcome."""


def limits_of(welcome: Welcome) -> Limits:
    """Return the limits that a broker's WELCOME states, for checks before anything is sent."""
    return Limits(
        record_bytes_max=welcome.record_bytes_max,
        batch_bytes_max=welcome.batch_bytes_max,
        batch_records_max=welcome.batch_records_max,
        # The parts of a step leave in one message with ATOMIC, which is one of its commands.
        step_parts_max=min(DEFAULT_LIMITS.step_parts_max, welcome.message_commands_max - 1),
    )


Kind = TypeVar("Kind", bound=OutgoingBatch)


class Lane(Generic[Kind]):
    """The way to one place: what waits for its turn there, and what is under way."""

    lasting: ClassVar[bool] = False
    """Whether the lane stays when nothing is in it."""

    __slots__ = (
        "blocked_until_ms",
        "gate",
        "home",
        "owner",
        "place",
        "queue",
        "sent",
        "waits_for_answer",
    )

    def __init__(self, owner: Any, home: dict[Any, Any], place: Any) -> None:
        """home: where the owner keeps the lane, under `place`."""
        self.owner = owner
        self.home = home
        self.place = place
        self.queue: deque[Kind] = deque()
        self.sent: dict[Kind, None] = {}
        """In the order of their leaving."""
        self.waits_for_answer = False
        """Whether a batch is under way that must be answered before another leaves."""
        self.blocked_until_ms = -1
        """>= 0: a batch was refused, and nothing is sent before this time."""
        self.gate: Opened | None = None
        """Offer that must be active on the link for the lane's commands to be understood."""


class LastingLane(Lane[Kind]):
    """A lane that stays when nothing is in it."""

    lasting: ClassVar[bool] = True

    __slots__ = ()


class Lanes(ABC, Generic[Kind]):
    """All lanes of one sender over the session's window and trackers."""

    lane_type: ClassVar[type[Lane[Any]]] = Lane
    unit: ClassVar[str] = "record"
    """Word for a row in errors."""

    def __init__(
        self,
        settings: ClientSettings,
        trackers: Trackers,
        window: Window,
        emit: Callable[[Event], None],
    ) -> None:
        """emit: takes the events that settle callers."""
        self.emit = emit
        self.window = window
        self.homes: list[dict[Any, Lane[Kind]]] = []
        """Tables in which lanes are kept, one a kind of place."""
        self.limits = DEFAULT_LIMITS
        self.batch_bytes = settings.batch_target(DEFAULT_LIMITS)
        """Bytes that a batch is filled to on this link."""
        self.records_max = DEFAULT_LIMITS.batch_records_max
        self._settings = settings
        self._trackers = trackers
        self._active: Final[dict[Lane[Kind], None]] = {}
        """Lanes in which something waits."""
        self._blocked: Final[dict[Lane[Kind], None]] = {}
        """Active lanes whose pause has not ended, for next_wake()."""
        self.queues: Final = (self._active,)
        """While all of them are empty, take() has nothing to do."""
        self._sent = 0
        """Batches under way whose confirm is awaited."""
        self._serial = 0
        """Serial of the batch that was queued last."""
        self._linked = False
        self.fatal: MalamuteError | None = None
        """Error that ended the session: every call raises it."""
        self._taken_ms = -1
        """Time of the last take(): what was due then waits for something else by now."""

    # --- what callers do -----------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing waits to leave and nothing is unconfirmed."""
        return not self._active and not self._sent

    @property
    def unanswered(self) -> int:
        """Commands that wait to leave, or for their answers."""
        return sum(len(lane.sent) + len(lane.queue) for lane in self._lanes())

    @property
    def waits(self) -> bool:
        """Whether something may leave with the next take().

        Asked of all senders but that of records (Session._others_wait): with something that leaves
        anyway, records go at once, and do not wait for more records to fill their batch.
        """
        return bool(self._active)

    def _lanes(self) -> Iterator[Lane[Kind]]:
        """Yield all lanes; those that are dropped meanwhile do no harm."""
        for home in self.homes:
            yield from list(home.values())

    def lane(self, home: dict[Any, Any], place: Hashable, name: str = "") -> Any:
        """The lane to a place, made when there is none. Raises what ended the session.

        home: the sender's table of lanes to places of one kind. name: the argument that names the
        place, for the error; empty: the place is the sender's own, and is not checked.
        Raises LocalProtocolError: the place is no name.
        """
        if self.fatal is not None:
            raise self.fatal
        try:
            lane = home.get(place)
        except TypeError:  # it cannot be a key of a dictionary: name_of() raises what is wrong
            lane = None
        if lane is None:
            if name:
                name_of(name, place)
            lane = home[place] = self.lane_type(self, home, place)
        return lane

    def check(self, row: OutgoingRow) -> None:
        """Raise LocalProtocolError `too_large` for a row that the broker would not take."""
        size = row.size
        if size > self.limits.record_bytes_max:
            raise LocalProtocolError(
                "too_large",
                f"a record of {size} bytes; the broker takes {self.limits.record_bytes_max}",
            )

    def check_content(self, content: Any, count: int) -> int:
        """Return the bytes that an encoded content takes of the window.

        Raises LocalProtocolError `too_large`: the broker would not take it.
        """
        size = len(content) + STAMP_BYTES
        if size > self.limits.batch_bytes_max:
            raise LocalProtocolError(
                "too_large",
                f"a batch of {len(content)} bytes; the broker takes {self.limits.batch_bytes_max}",
            )
        if count > self.limits.batch_records_max:
            raise LocalProtocolError(
                "too_large",
                f"a batch of {count} records; the broker takes {self.limits.batch_records_max}",
            )
        return size

    def begin(self, batch: Kind, row: OutgoingRow) -> None:
        """Put a new batch at the end of its lane, with its first row."""
        batch.rows.append(row)
        batch.packing = row.packing
        batch.bytes = row.size + ROW_BYTES
        self.queue(batch)

    def queue(self, batch: Kind) -> None:
        """Put a batch at the end of its lane."""
        # By steps of _PARTS_MAX: its parts, if it is divided, get the serials in between.
        self._serial += _PARTS_MAX
        batch.serial = self._serial
        batch.lane.queue.append(batch)
        self._active[batch.lane] = None
        self.window.queued_bytes += batch.bytes

    # --- the link --------------------------------------------------------------------------

    def link_up(self, welcome: Welcome) -> None:
        """Take the limits of a new link, and let lanes leave with the next take().

        What is unconfirmed leaves again, in order: link_down() has put it back.
        """
        self._linked = True
        self.limits = limits_of(welcome)
        self.batch_bytes = self._settings.batch_target(self.limits)
        self.records_max = welcome.batch_records_max

    def link_down(self) -> None:
        """Put what was under way back to the head of its lane: the link has ended."""
        self._linked = False
        for lane in self._lanes():
            under_way = list(lane.sent)
            lane.sent.clear()
            for batch in reversed(under_way):  # the newest first, as each goes to the head
                batch.doubtful = True
                if batch.counted:  # all but those at level NONE
                    self._uncount(batch)
                if batch.thin and not batch.live_rows():
                    batch.state = OVER  # all of its callers have given up: it need not leave again
                    continue
                self._put_back(batch)
            # What the lane waited for was of the old link: an answer, or the end of a pause.
            lane.waits_for_answer = False
            lane.blocked_until_ms = -1
            if not lane.queue:
                self._note_empty(lane)
        self._blocked.clear()

    def disown(self, error: MalamuteError) -> None:
        """Fail what the broker may have taken, when a new link has another identity.

        Sent again under that identity, the broker would not know it again, and take it twice.
        """
        for lane in self._lanes():
            failing = [batch for batch in lane.queue if batch.doubtful]
            self._take_out(lane, failing)
            for batch in failing:
                self._end(batch, error)

    def _take_out(self, lane: Lane[Kind], batches: list[Kind]) -> None:
        """Remove these batches, which wait in a lane; their callers are the caller's concern."""
        left = set(lane.queue).difference(batches)
        kept = [batch for batch in lane.queue if batch in left]
        lane.queue.clear()
        lane.queue.extend(kept)
        self.window.queued_bytes -= sum(batch.bytes for batch in batches)
        if not kept:
            self._note_empty(lane)

    def fail_all(self, error: MalamuteError) -> None:
        """The session ends: everything unconfirmed fails, and so does every later call."""
        self.fatal = error
        for lane in self._lanes():
            self.fail_lane(lane, error)

    def fail_lane(self, lane: Lane[Kind], error: MalamuteError) -> None:
        """Fail all in a lane, whose offer or session has ended: no answer is awaited."""
        for batch in list(lane.sent):
            if batch.counted:
                self._uncount(batch)
            self._end(batch, error)
        for batch in lane.queue:
            self.window.queued_bytes -= batch.bytes
            self._end(batch, error)
        lane.sent.clear()
        lane.queue.clear()
        self._note_empty(lane)

    # --- sending ---------------------------------------------------------------------------

    def wake(self, now_ms: int) -> None:
        """Do what is due by time: nothing here but what take() does."""

    def take(self, now_ms: int, out: CommandSink) -> bool:
        """Send what may leave now, lane by lane, in each turn of the session.

        Returns False when the window holds something back: its bytes are used up, for all senders.
        """
        self._taken_ms = now_ms
        if not self._linked:
            return True
        for lane in list(self._active):
            if lane.gate is not None and not lane.gate.active:
                continue  # the broker would not understand replies before it knows their offer
            if lane.blocked_until_ms >= 0 and not self._end_pause(lane, now_ms):
                continue
            last_tracker = self._trackers.last
            if not self._drain(lane, now_ms, out):
                if self._trackers.last != last_tracker:
                    # Something of the lane was sent under a new tracker, so it had its turn: it
                    # goes last, since one that always has more must not starve the others.
                    self._active[lane] = self._active.pop(lane)
                return False
        return True

    def _end_pause(self, lane: Lane[Kind], now_ms: int) -> bool:
        """End the pause of a lane in which a batch was refused; False: it is not over yet."""
        if lane.blocked_until_ms > now_ms:
            self._blocked[lane] = None  # next_wake() takes the time into account
            return False
        lane.blocked_until_ms = -1
        self._blocked.pop(lane, None)
        return True

    def _drain(self, lane: Lane[Kind], now_ms: int, out: CommandSink) -> bool:
        """Send the batches of one lane, as long as none must wait.

        Returns False when the window has no room: then no other lane may send either.
        """
        queue = lane.queue
        while queue:
            batch = queue[0]
            if self._holds(batch, now_ms, out):
                return True
            if batch.bytes and not self.window.lets_go(batch.bytes):
                return False
            queue.popleft()
            self.window.queued_bytes -= batch.bytes
            if batch.content or self._encode(batch):  # what has left before keeps its bytes
                self._leave(batch, out)
        self._note_empty(lane)
        return True

    def _holds(self, batch: Kind, now_ms: int, out: CommandSink) -> bool:
        """Whether the batch at the head of its lane must wait for something else than room.

        Publisher._holds() has more reasons, for which it needs now_ms and out.
        """
        lane = batch.lane
        return lane.waits_for_answer or bool(lane.sent and batch.one_by_one)

    def _note_empty(self, lane: Lane[Kind]) -> None:
        """Note that nothing waits in a lane, and drop it if nothing is under way there either."""
        self._active.pop(lane, None)
        self._blocked.pop(lane, None)
        # A lane that was dropped may have a successor in its place, which must stay.
        if not lane.sent and not lane.lasting and lane.home.get(lane.place) is lane:
            del lane.home[lane.place]

    def _encode(self, batch: Kind) -> bool:
        """Encode a batch that leaves for the first time; False: it does not leave.

        It does not when all callers gave up, when the encoder refuses its only row, which then
        fails, or when it refuses several together: their halves take the place of the batch.
        """
        if batch.thin:
            batch.rows = batch.live_rows()
            batch.thin = False
            if not batch.rows:
                batch.state = OVER
                return False
        try:
            batch.encode()
        except Exception as error:  # noqa: BLE001 - whatever it is, it fails these rows only
            if batch.count > 1:
                self._divide(batch)
                return False
            if not isinstance(error, MalamuteError):
                reason = f"the {self.unit} cannot be encoded: {error}"
                error = LocalProtocolError("bad_batch", reason)
            self._end(batch, error)
            return False
        batch.sealed = True
        return True

    def _leave(self, batch: Kind, out: CommandSink) -> None:
        """Send one batch; it counts in the window until it is answered.

        One that nothing answers counts until the broker has read it, as the PONG to a PING says
        (window.passes). The next of a lane waits for the answer to one that goes `one_by_one`:
        mail, which would come out of order if this one were refused, and replies that others
        follow.
        """
        level = batch.level
        if level == NONE:
            self.window.passes(batch.bytes)
            if not batch.answered_otherwise:
                # Nothing will tell what became of it: it is over as it leaves, without a tracker
                # (0), and its callers get a CONFIRM that names no offset (-1).
                batch.send(out, 0)
                self._end(batch, Confirm(0, level, 0, -1, 0))
                return
        else:
            batch.counted = True
            self.window.unconfirmed_bytes += batch.bytes
            self._sent += 1
        batch.state = SENT
        lane = batch.lane
        lane.sent[batch] = None
        lane.waits_for_answer = batch.one_by_one
        batch.send(out, self._trackers.give(batch))

    # --- answers ---------------------------------------------------------------------------

    def confirmed(self, batch: Kind, confirm: Confirm, *, keep: bool = False) -> None:
        """Settle a batch that the broker took.

        keep: the rows and the content stay, and no caller is told: the batch waits for replies, and
        may have to be sent again for them.
        """
        if not self._take_answered(batch):
            return
        if keep:
            batch.state = OVER
        else:
            self._end(batch, confirm)
        lane = batch.lane
        if not lane.queue and not lane.lasting:
            self._note_empty(lane)

    @abstractmethod
    def refused(self, batch: Kind, error: BrokerRefused, now_ms: int) -> None:
        """Send a refused batch again later, or in parts, or fail it, by the code."""

    def _take_answered(self, batch: Kind) -> bool:
        """Take an answered batch out of those under way, so that the lane goes on.

        Returns False when the batch was settled without this answer: there is nothing to do.
        """
        if batch.state != SENT:
            return False
        lane = batch.lane
        lane.sent.pop(batch, None)
        lane.waits_for_answer = False
        if batch.counted:
            self._uncount(batch)
        return True

    def _uncount(self, batch: Kind) -> None:
        """Count a batch no longer in the window: it was answered, or its link has ended."""
        batch.counted = False
        self._sent -= 1
        self.window.unconfirmed_bytes -= batch.bytes

    def _put_back(self, batch: Kind) -> None:
        """Put a batch into its lane again, before those that were asked for later."""
        batch.state = QUEUED
        self.window.queued_bytes += batch.bytes
        lane = batch.lane
        queue = lane.queue
        earlier = 0  # batches of the queue whose calls came before
        while earlier < len(queue) and queue[earlier].serial < batch.serial:
            earlier += 1
        queue.insert(earlier, batch)
        self._active[lane] = None

    def _block(self, lane: Lane[Kind], until_ms: int) -> None:
        """Send nothing from a lane before a time: the broker refused a batch of it for now."""
        lane.blocked_until_ms = max(lane.blocked_until_ms, until_ms)

    def _divide(self, batch: Kind) -> list[Any]:
        """Replace a batch by its halves, which leave in its place; returns them.

        The batch was refused, or could not be encoded: the broker has nothing of it. One half, or
        none, is left where callers have given up rows.
        """
        rows = batch.live_rows() if batch.thin else batch.rows
        half = max(1, (len(rows) + 1) // 2)
        parts: list[Any] = []
        for first in range(0, len(rows), half):
            part = batch.part(rows[first : first + half])
            part.serial += first  # after the first half, and before the next batch of the lane
            parts.append(part)
        batch.replaced(parts)
        batch.state = OVER
        for part in reversed(parts):
            self._put_back(part)
        return parts

    def _end(self, batch: Kind, outcome: Confirm | MalamuteError) -> None:
        """Settle a batch for good with a CONFIRM or an error, and drop its bodies."""
        batch.state = OVER
        batch.settle(outcome)
        # An entry in the heap of deadlines may keep the batch for long: not its bodies.
        batch.rows = []
        batch.content = b""

    def next_wake(self) -> int | None:
        """Latest time of the next wake() and take(): the end of the first pause; None: no need."""
        at: int | None = None
        if self._linked:
            for lane in self._blocked:
                wake = lane.blocked_until_ms
                # A pause that was over at the last take() waits for an answer or for room.
                if wake > self._taken_ms and (at is None or wake < at):
                    at = wake
        return at
