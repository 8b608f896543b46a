"""Atomic steps on their way: how they leave, are merged, and are confirmed.

Owns the steps that were merged into one. The rules: steps that wait at the same time leave as one
ATOMIC, the contents of the same place gathered row by row, as long as they may be taken or refused
together; a merged one that was refused was not taken at all and goes again in halves, so that each
step has its own answer in the end; one that was not answered goes again with the same bytes under
the same key, and is taken once. Source: SPEC.md, section 4.8; docs/design.md, Queues and the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from malamute_protocol.commands import (
    Atomic,
    Command,
    Confirm,
    MoveCursor,
    Publish,
    PurgeSubjects,
    Reply,
    Request,
    Send,
    Stage,
    Trim,
    Welcome,
)
from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    LocalProtocolError,
    MalamuteError,
)
from malamute_protocol.limits import RANGES_MAX
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.position import Confirmation
from malamute_py.client.session.acknowledgements import merged
from malamute_py.client.session.events import Event, Settled
from malamute_py.client.session.lanes import (
    OVER,
    QUEUED,
    SENT,
    Lane,
    Lanes,
    LastingLane,
    OutgoingBatch,
)
from malamute_py.client.session.outgoing import RETRY_MS, RETRYABLE, CommandSink, Trackers, Window
from malamute_py.client.session.publisher import confirmation
from malamute_py.client.session.rows import OutgoingRow, content_of
from malamute_py.client.session.step import (
    ACK,
    COMMAND,
    CONTENT,
    MOVE,
    OPEN,
    PUBLISH,
    PURGE,
    REPLY,
    REQUEST,
    SEND,
    STAGE,
    STAGE_CONTENT,
    TRIM,
    Move,
    Place,
    Step,
    list_of,
)
from malamute_py.client.settings import ClientSettings

KEY_BYTES: Final = 16
PARTS_MAX: Final = 256
"""Parts of a merged step; a single one may have as many as a message takes."""
ROWS_MAX: Final = 4096
"""Records and acknowledged numbers of a merged step: what any broker takes as one REQUEST."""

_DONE_BEFORE: Final = frozenset({"conflict", "not_held"})
"""Refusals of a move and of an acknowledgement that have been done already."""
_OWNING: Final = (PUBLISH, SEND, REQUEST, REPLY, CONTENT)
"""Kinds of parts that have a content."""


class OutgoingSteps(OutgoingBatch):
    """Steps that leave as one ATOMIC, from the first of them until it is answered."""

    __slots__ = ("contents", "key", "moves", "numbers", "places", "plain", "turns")

    rows: list[Step]

    def __init__(self, lane: Lane[OutgoingSteps], level: int) -> None:
        super().__init__(lane, level)
        self.content: list[Command] = []
        """ATOMIC and its parts, once it is encoded."""
        self.contents: list[bytes] = []
        self.key = b""
        self.places: set[Place] = set()
        self.moves: dict[Place, Move] = {}
        self.turns: dict[Place, Place] = {}
        """Place of plain rows -> form of the newest rows there, where they are not plain."""
        self.numbers = 0
        """Records and acknowledged numbers."""
        self.plain = False
        """Whether its one part leaves as a command of its own."""

    @property
    def may_be_plain(self) -> bool:
        """Whether this is one move or one acknowledgement, which needs no ATOMIC around it.

        An acknowledgement of very many ranges leaves as several commands, and is none.
        """
        parts = self.rows[0].parts
        return (
            not self.plain
            and len(self.rows) == len(parts) == 1
            and len(self.content) == 1 + len(parts)
            and all(place[0] in (MOVE, ACK) for place in parts)
        )

    def joins(self, step: Step, parts_max: int, bytes_max: int) -> bool:
        """Whether a step may be merged with these, to be taken or refused together with them."""
        if (
            self.sealed
            or step.key
            or self.rows[0].key
            or self.bytes + step.size > bytes_max
            or self.numbers + step.count > ROWS_MAX
        ):
            return False
        if not self.places.issuperset(step.parts):
            fresh = step.parts.keys() - self.places
            if len(self.places) + len(fresh) > parts_max:
                return False
        if step.mixed or ((step.turns or self.turns) and self._turns_over(step)):
            return False
        for place in step.parts if step.merge_limited else ():
            kind = place[0]
            if kind == MOVE:
                (move,) = step.parts[place]
                before = self.moves.get(place)
                if before is not None and not _follows(move, before):
                    return False
            elif kind == CONTENT:
                return False
            elif kind == REQUEST:
                _, _service, _reply_to, _timeout_ms, key, *_ = place
                if key:  # A request with a name of its own is alone in its content.
                    return False
        return True

    def _turns_over(self, step: Step) -> bool:
        """Whether rows of a step would leave before rows of another form that were added earlier.

        Rows of the same place and form leave together, as one part.
        """
        for base, (form, _) in step.turns.items():
            known = self.turns.get(base, base if base in self.places else form)
            if known != form:
                return True
        return any(self.turns.get(place, place) != place for place in step.parts)

    def take_in(self, step: Step) -> None:
        """Merge a further step into this batch."""
        self.rows.append(step)
        self.places.update(step.parts)
        if step.turns:
            self.turns.update({base: form for base, (form, _) in step.turns.items()})
        if step.mixed:
            self.sealed = True
        if step.merge_limited:
            for place, rows in step.parts.items():
                if place[0] == MOVE:
                    self.moves[place] = rows[0]
                elif place[0] == CONTENT:
                    self.sealed = True
        self.bytes += step.size
        self.numbers += step.count

    def remove(self, step: Step) -> None:
        """Take a step out of a batch that has not left, and that no other joins from now on."""
        self.rows.remove(step)
        self.bytes -= step.size
        self.numbers -= step.count
        # `moves` still has its moves, which meet no condition of a later step.
        self.sealed = True

    def empty_like(self) -> OutgoingSteps:
        """Make an empty batch that no step joins, so that none suffers for a refused one."""
        alike = OutgoingSteps(self.lane, self.level)
        alike.sealed = True
        return alike

    def part(self, rows: list[Step]) -> OutgoingSteps:
        """Make a batch of some of the steps, which takes this one's turn."""
        part = self.empty_like()
        part.serial = self.serial
        for step in rows:
            step.state = QUEUED
            part.take_in(step)
        return part

    def replaced(self, parts: list[Any]) -> None:
        """Go on with the steps in other batches; those that no caller waits for are dropped."""
        for step in self.rows:
            if step.token is None:
                step.end_untaken()

    def put_off(self) -> None:
        """Drop the encoded form, so that a caller which withdraws now is left out of the next."""
        self.content, self.contents = [], []
        self.bytes = sum(step.size for step in self.rows)
        for step in self.rows:
            step.state = QUEUED

    def encode(self) -> None:
        """Make the parts. Raises what a row that cannot be encoded raises.

        Each step notes where its records begin in the first content, the one of which CONFIRM
        tells the offset.
        """
        steps = self.lane.owner
        gathered: dict[Place, list[Any]] = {}
        first: Place | None = None
        for step in self.rows:
            step.first = -1
            for place, rows in step.parts.items():
                known = gathered.get(place)
                if first is None and place[0] in _OWNING:
                    first = place
                if place == first:
                    step.first = 0 if known is None else len(known)
                if known is None:
                    # The step keeps its own rows: what is refused is divided into its steps again.
                    gathered[place] = rows.copy()
                else:
                    known += rows
        # A part has no tracker and no level of its own (0): ATOMIC has those of the step.
        commands: list[Command] = []
        contents: list[bytes] = []
        for place, rows in gathered.items():
            kind = place[0]
            if kind == MOVE:
                commands.append(_move(place, rows))
            elif kind == TRIM:
                _, stream, epoch, uuid = place
                commands.append(Trim(stream, max(rows), 0, 0, uuid, epoch))
            elif kind == PURGE:
                _, stream, epoch, uuid, wanted = place
                pattern = list_of(wanted)
                commands.append(PurgeSubjects(stream, pattern, max(rows), 0, 0, uuid, epoch))
            elif kind == ACK:
                _, holder, form = place
                ranges = merged([(number, number + 1) for number in rows])
                commands += [
                    holder.ack_command(form, ranges[at : at + RANGES_MAX], 0)
                    for at in range(0, len(ranges), RANGES_MAX)
                ]
            elif kind == CONTENT:
                _, stream, typed, _ = place
                contents += rows
                commands.append(Publish(stream, 0, typed=typed))
            elif kind == COMMAND:
                commands += rows
            elif kind == STAGE_CONTENT:
                contents += rows
                commands.append(_stage(place, typed=place[4]))
            elif kind == STAGE:
                contents.append(content_of(rows, steps.limits))
                commands.append(_stage(place))
            else:
                contents.append(content_of(rows, steps.limits))
                commands.append(_owning(place, rows, steps.random))
        self.key = self.rows[0].key or steps.random(KEY_BYTES)
        self.content = [Atomic(0, len(commands), self.level, self.key), *commands]
        self.contents = contents
        self.bytes = sum(map(len, contents)) + STAMP_BYTES * len(contents)

    def send(self, out: CommandSink, tracker: int) -> None:
        """Hand over ATOMIC with its parts, or the one part that needs no step."""
        for step in self.rows:
            step.state = SENT
        commands = self.content
        if self.plain:
            out.put(_alone(commands[1], tracker, self.level), None)
            return
        commands[0] = Atomic(tracker, len(commands) - 1, self.level, self.key)
        out.put_together(commands.copy(), self.contents)

    def settle(self, outcome: Confirm | MalamuteError) -> None:
        """Give the callers their outcome, and the holders what became of the numbers they gave."""
        told: list[tuple[Any, Any]] = []
        if isinstance(outcome, Confirm):
            for step in self.rows:
                step.state = OVER
                step.settle()
                known = step.first >= 0 and outcome.offset >= 0
                step.confirmation = (
                    confirmation(outcome, step.first, 1) if known else _nowhere(outcome)
                )
                if step.token is not None:
                    told.append((step.token, step.confirmation))
        else:
            for step in self.rows:
                step.end_untaken(outcome)
                if step.token is not None:
                    told.append((step.token, outcome))
        self.lane.owner.emit(Settled(told))


def _follows(move: Move, before: Move) -> bool:
    """Whether a move begins where another one ends, so that one command does for both."""
    return (
        not (move.force or before.force)
        and (move.uuid, move.epoch) == (before.uuid, before.epoch)
        and move.next > before.next
        and move.since in (-1, before.next)
    )


def _move(place: Place, moves: list[Move]) -> MoveCursor:
    """Return one MOVE_CURSOR for all moves of a cursor in a step: the last place counts.

    The condition is that of the first move: where the cursor stood before.
    """
    _, stream, cursor = place
    last = moves[-1]
    return MoveCursor(
        stream, cursor, last.next, 0, 0, last.force, last.uuid, last.epoch, moves[0].since
    )


def _stage(place: Place, *, typed: bool = False) -> Stage:
    _, stream, transaction, number = place[:4]
    return Stage(transaction, stream, number, 0, typed=typed)


def _alone(part: Command, tracker: int, level: int) -> Command:
    """Return a part of a step as a command of its own, with its tracker and level."""
    return msgspec.structs.replace(part, tracker=tracker, level=level)


def _owning(place: Place, rows: list[OutgoingRow], random: Callable[[int], bytes]) -> Command:
    """Return the command that owns the content of these rows.

    It has no tracker and no level: ATOMIC, which it is a part of, has them.
    """
    kind = place[0]
    if kind == PUBLISH:
        return Publish(place[1], 0)
    if kind == SEND:
        _, mailbox, deliver_at_ms, priority = place[:4]
        return Send(mailbox, 0, 0, b"", deliver_at_ms, priority)
    if kind == REQUEST:
        _, service, reply_to, timeout_ms, key, terms = place[:6]
        name = key or random(KEY_BYTES)
        for number, row in enumerate(rows):
            asked = row.token
            asked.key, asked.row = name, number
        return Request(
            service,
            0,
            reply_to,
            timeout_ms,
            0,
            name,
            terms.need_workers,
            terms.delay_ms,
            terms.priority,
        )
    _, holder, last, _ = place[:4]
    return Reply(holder.number, [row.token for row in rows], 0, last)


class Steps(Lanes[OutgoingSteps]):
    """All steps of a session."""

    unit = "step"

    def __init__(
        self,
        settings: ClientSettings,
        random: Callable[[int], bytes],
        trackers: Trackers,
        window: Window,
        emit: Callable[[Event], None],
    ) -> None:
        """random: n -> n random bytes, for keys."""
        super().__init__(settings, trackers, window, emit)
        self.random = random
        main: dict[Any, Lane[OutgoingSteps]] = {}
        self._main: Lane[OutgoingSteps] = LastingLane(self, main, "")
        main[""] = self._main
        self._put_off: dict[Any, Lane[OutgoingSteps]] = {}
        """Lanes of steps that the broker refused for a while: the others go on meanwhile."""
        self.homes += [main, self._put_off]
        self._parts_max = PARTS_MAX

    # --- what callers do --------------------------------------------------------------------

    def add(self, step: Step, token: Any) -> None:
        """Put a step on its way; the token gets its Confirmation, or why it was not taken.

        Raises LocalProtocolError `too_large`, or what ended the session: nothing was taken,
        and what the step acknowledged is the caller's again.
        """
        try:
            self._check(step)
        except MalamuteError:
            step.give_up()
            raise
        step.token = token
        step.state = QUEUED
        queue = self._main.queue
        last = queue[-1] if queue else None
        if (
            last is None
            or last.level != step.level
            or not last.joins(step, self._parts_max, self.batch_bytes)
        ):
            last = OutgoingSteps(self._main, step.level)
            self.queue(last)
        last.take_in(step)
        self.window.queued_bytes += step.size

    def _check(self, step: Step) -> None:
        """Raise LocalProtocolError unless a step is open and fits in one message and bundle."""
        if step.state != OPEN:
            step.check_open()
        if self.fatal is not None:
            raise self.fatal
        limits = self.limits
        if len(step.parts) > limits.step_parts_max:
            raise LocalProtocolError(
                "too_large",
                f"a step of {len(step.parts)} parts, at most {limits.step_parts_max}",
            )
        if step.size > limits.batch_bytes_max or step.count > limits.batch_records_max:
            raise LocalProtocolError(
                "too_large", f"a step of {step.size} bytes and {step.count} records or numbers"
            )

    def withdraw(self, step: Step) -> None:
        """Take back a step that no caller waits for, if it has not left."""
        step.token = None
        if step.state == OVER:
            step.give_back_untold()
        if step.state != QUEUED:
            return
        for lane in self._lanes():
            for batch in lane.queue:
                # One that has left before may have been taken: the answer to it decides.
                if step in batch.rows and not batch.content:
                    batch.remove(step)
                    self.window.queued_bytes -= step.size
                    step.end_untaken()
                    if not batch.rows:
                        self._take_out(lane, [batch])
                    return

    # --- the link ---------------------------------------------------------------------------

    def link_up(self, welcome: Welcome) -> None:
        """Send unconfirmed steps again, now that the broker has said what a message may hold.

        Of parts, a message takes as many as fit beside ATOMIC; a step gathers PARTS_MAX at most.
        """
        super().link_up(welcome)
        self._parts_max = min(PARTS_MAX, self.limits.step_parts_max)

    # --- answers ----------------------------------------------------------------------------

    def refused(self, batch: OutgoingSteps, error: BrokerRefused, now_ms: int) -> None:
        """Send refused steps again in halves or later, or fail them, by the code.

        The broker took nothing of them.
        """
        if not self._came_back(batch):
            return
        doubtful, batch.doubtful = batch.doubtful, False
        before = batch.lane
        # A lone step that its caller has given up is not sent again.
        again = error.code in RETRYABLE and (batch.count > 1 or batch.rows[0].token is not None)
        if again:
            # A lane of its own: the steps that follow need not wait for it.
            self._serial += 1
            batch.lane = self.lane(self._put_off, self._serial)
            self._block(batch.lane, now_ms + (error.retry_ms or RETRY_MS))
        if error.code == "cross_ring" and batch.may_be_plain:
            # A cursor or group of a stream in memory is in no log, and so in no step.
            batch.plain = True
            self._put_back(batch)
        elif batch.count > 1:
            # One of the steps may be at fault: in halves the others are taken.
            self._divide(batch)
        elif again:
            batch.put_off()
            self._put_back(batch)
        elif batch.plain and doubtful and error.code in _DONE_BEFORE:
            # Without a key the broker cannot tell it from what it did before the link was lost.
            self._end(batch, ConnectionLost(f"it may have been done before: {error}"))
        else:
            self._end(batch, error)
        for lane in {before, batch.lane}:
            if not lane.queue:
                self._rest(lane)

    def _divide(self, batch: OutgoingSteps) -> list[Any]:
        """Replace a merged step that was not taken by two, under keys of their own."""
        batch.thin = True
        return super()._divide(batch)


def _nowhere(confirm: Confirm) -> Confirmation:
    """A step without a place of its own that the confirm would name."""
    plain = confirmation(confirm, 0, 0)
    return Confirmation(-1, plain.epoch, plain.level, plain.append_time_ms, 0, plain.duplicate)
