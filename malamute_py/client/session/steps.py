"""Atomic steps on their way: how they leave, are merged, and are confirmed.

Owns the steps that were merged into one. The rules: steps that wait at the same time leave as one
ATOMIC, the contents of the same place gathered row by row, as long as they may be taken or refused
together; a merged one that was refused was not taken at all and goes again in halves, so that each
step has its own answer in the end; one that was not answered goes again with the same bytes under
the same key, and is taken once. Source: SPEC.md, section 4.8; docs/design.md, Queues and the
checkpoint.

Words: a part leaves as one command. A place is what the rows of a part must agree in, a tuple that
begins with the kind of the part: (PUBLISH, stream) or (MOVE, stream, cursor), for instance. A form
is a place with the packing of the bodies (codec, lists), where it is not the plain one. A holder is
the inbox, offer or membership that lent a step the numbers which it acknowledges.
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
from malamute_py.client.session.acknowledgements import ranges_of_numbers
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

    __slots__ = ("contents", "entries", "key", "moves", "newest", "places", "plain")

    rows: list[Step]

    def __init__(self, lane: Lane[OutgoingSteps], level: int) -> None:
        super().__init__(lane, level)
        self.content: list[Command] = []
        """ATOMIC and its parts, once it is encoded."""
        self.contents: list[bytes] = []
        """Contents of those parts that have one, in their order."""
        self.key = b""
        """Name of the step, under which the broker takes it once."""
        self.places: set[Place] = set()
        """Places of the parts of all steps."""
        self.moves: dict[Place, Move] = {}
        """The newest move of each cursor: the next one must go on from there."""
        self.newest: dict[Place, Place] = {}
        """Place of plain rows -> form of the newest rows there, where they are not plain."""
        self.entries = 0
        """Records and acknowledged numbers."""
        self.plain = False
        """Whether its one part leaves as a command of its own."""

    @property
    def may_be_plain(self) -> bool:
        """Whether this is one move or one acknowledgement, which needs no ATOMIC around it.

        Asked when the broker has refused it as a step, since its stream is in memory. An
        acknowledgement of very many ranges leaves as several commands, which do need ATOMIC.
        """
        parts = self.rows[0].parts
        return (
            not self.plain
            and len(self.rows) == len(parts) == 1
            and len(self.content) == 2  # ATOMIC and the one command
            and all(kind in (MOVE, ACK) for kind, *_ in parts)
        )

    def joins(self, step: Step, parts_max: int, bytes_max: int) -> bool:
        """Whether a step may be merged with these, to be taken or refused together with them.

        It may not if it has a key of its own, would make the batch too large, would change the
        order of its rows, or needs a command that the other steps have no need of.
        """
        if (
            self.sealed
            or step.key
            or self.rows[0].key
            or self.bytes + step.size > bytes_max
            or self.entries + step.count > ROWS_MAX
        ):
            return False
        if not self.places.issuperset(step.parts):
            new_places = step.parts.keys() - self.places
            if len(self.places) + len(new_places) > parts_max:
                return False
        if step.mixed or ((step.newest or self.newest) and self._reorders(step)):
            return False
        for place in step.parts if step.merge_limited else ():
            kind = place[0]
            if kind == MOVE:
                (move,) = step.parts[place]
                before = self.moves.get(place)
                if before is not None and not _follows(move, before):
                    return False
            elif kind == CONTENT:  # it is a batch as it is: no rows can be added
                return False
            elif kind == REQUEST:
                _, _service, _reply_to, _timeout_ms, key, *_ = place
                if key:  # A request with a name of its own is alone in its content.
                    return False
        return True

    def _reorders(self, step: Step) -> bool:
        """Whether rows of a step would leave before rows of another form that were added earlier.

        Rows of the same place and form leave together, as one part: so the newest form of the batch
        at each place must be the step's.
        """
        for plain, (form, _) in step.newest.items():
            newest = self.newest.get(plain, plain if plain in self.places else form)
            if newest != form:
                return True
        # Plain rows of the step, at places where the newest rows of the batch are not plain.
        return any(self.newest.get(place, place) != place for place in step.parts)

    def take_in(self, step: Step) -> None:
        """Merge a step into this batch, which it may join, or begin the batch with it."""
        self.rows.append(step)
        self.places.update(step.parts)
        if step.newest:
            self.newest.update({plain: form for plain, (form, _) in step.newest.items()})
        if step.mixed:  # rows of a further step would join parts before its last one
            self.sealed = True
        if step.merge_limited:
            for place, rows in step.parts.items():
                kind = place[0]
                if kind == MOVE:
                    self.moves[place] = rows[0]  # the next step's must go on from there
                elif kind == CONTENT:
                    self.sealed = True
        self.bytes += step.size
        self.entries += step.count

    def remove(self, step: Step) -> None:
        """Take a step out of a batch that has not left, as its caller withdraws it.

        No other step joins the batch from now on.
        """
        self.rows.remove(step)
        self.bytes -= step.size
        self.entries -= step.count
        # `moves` still has its moves, which meet no condition of a later step.
        self.sealed = True

    def empty_like(self) -> OutgoingSteps:
        """Make an empty batch that no step joins, so that none suffers for a refused one."""
        alike = OutgoingSteps(self.lane, self.level)
        alike.sealed = True
        return alike

    def part(self, rows: list[Step]) -> OutgoingSteps:
        """Make a batch of some of the steps, when this one is split; it keeps its `serial`."""
        part = self.empty_like()
        part.serial = self.serial
        for step in rows:
            step.state = QUEUED
            part.take_in(step)
        return part

    def replaced(self, parts: list[Any]) -> None:
        """End the steps that no caller waits for: they are not in `parts`, which leave instead."""
        for step in self.rows:
            if step.token is None:
                step.end_untaken()

    def put_off(self) -> None:
        """Drop the encoded form of refused steps, which leave again later and are encoded then.

        So a step whose caller withdraws it until then is left out.
        """
        self.content, self.contents = [], []
        self.bytes = sum(step.size for step in self.rows)
        for step in self.rows:
            step.state = QUEUED

    def encode(self) -> None:
        """Make ATOMIC, the commands of its parts and their contents, as the steps leave first.

        Each step notes where its records begin in the first content, the one of which CONFIRM
        tells the offset. Raises what a row that cannot be encoded raises.
        """
        steps = self.lane.owner
        # Rows of the same place are gathered over all steps: they make one part.
        gathered: dict[Place, list[Any]] = {}
        first: Place | None = None
        for step in self.rows:
            step.first = -1
            for place, rows in step.parts.items():
                known = gathered.get(place)
                if first is None:
                    kind = place[0]
                    if kind in _OWNING:
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
            elif kind == TRIM:  # the rows are offsets: the highest does for all
                _, stream, epoch, uuid = place
                commands.append(Trim(stream, max(rows), 0, 0, uuid, epoch))
            elif kind == PURGE:
                _, stream, epoch, uuid, wanted = place
                pattern = list_of(wanted)
                commands.append(PurgeSubjects(stream, pattern, max(rows), 0, 0, uuid, epoch))
            elif kind == ACK:
                _, holder, form = place
                ranges = ranges_of_numbers(rows)
                commands += [
                    holder.ack_command(form, ranges[at : at + RANGES_MAX], 0)
                    for at in range(0, len(ranges), RANGES_MAX)
                ]
            elif kind == CONTENT:  # the rows are contents, encoded before
                _, stream, typed, _ = place
                contents += rows
                commands.append(Publish(stream, 0, typed=typed))
            elif kind == COMMAND:
                commands += rows
            elif kind == STAGE_CONTENT:  # such contents, which a transaction stages
                contents += rows
                *_, typed = place
                commands.append(_stage(place, typed=typed))
            elif kind == STAGE:  # records that a transaction stages
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
            _, command = commands  # the first is ATOMIC, which is left out
            out.put(_alone(command, tracker, self.level), None)
            return
        commands[0] = Atomic(tracker, len(commands) - 1, self.level, self.key)
        out.put_together(commands.copy(), self.contents)

    def settle(self, outcome: Confirm | MalamuteError) -> None:
        """Give the callers their outcome, and tell holders what became of the numbers they lent."""
        told: list[tuple[Any, Any]] = []
        if isinstance(outcome, Confirm):
            for step in self.rows:
                step.state = OVER
                step.settle()
                # The CONFIRM names the offset of the first content alone: steps without rows there
                # are told none.
                is_told_offset = step.first >= 0 and outcome.offset >= 0
                step.confirmation = (
                    confirmation(outcome, step.first, 1) if is_told_offset else _nowhere(outcome)
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
        and move.since in (-1, before.next)  # -1: the cursor may stand anywhere before
    )


def _move(place: Place, moves: list[Move]) -> MoveCursor:
    """Return one MOVE_CURSOR for all moves of a cursor in a step: to where the last one goes.

    The condition is that of the first move: where the cursor stood before.
    """
    _, stream, cursor = place
    last = moves[-1]
    tracker = level = 0  # ATOMIC has those of the step
    return MoveCursor(
        stream, cursor, last.next, tracker, level, last.force, last.uuid, last.epoch, moves[0].since
    )


def _stage(place: Place, *, typed: bool = False) -> Stage:
    """Return the command that stages a batch of a transaction, in its place there."""
    _, stream, transaction, number = place[:4]
    return Stage(transaction, stream, number, 0, typed=typed)


def _alone(part: Command, tracker: int, level: int) -> Command:
    """Return a part of a step as a command of its own, with a tracker and level for it."""
    return msgspec.structs.replace(part, tracker=tracker, level=level)


def _owning(place: Place, rows: list[OutgoingRow], random: Callable[[int], bytes]) -> Command:
    """Return the command that goes with the content of these rows, as a part of a step.

    It has no tracker (0), no level (0) and no key: ATOMIC, which it is a part of, has them. A place
    may end with the packing of the rows and a number, which no command states.
    """
    kind = place[0]
    if kind == PUBLISH:
        return Publish(place[1], 0)  # The stream stands after the kind.
    if kind == SEND:
        _, mailbox, deliver_at_ms, priority, *_ = place
        return Send(mailbox, 0, 0, b"", deliver_at_ms, priority)
    if kind == REQUEST:
        _, service, reply_to, timeout_ms, key, terms, *_ = place
        name = key or random(KEY_BYTES)  # requests have a key also here: replies name them by it
        for number, row in enumerate(rows):
            asked = row.token  # a StepRequest, by which the caller knows the replies
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
    _, holder, last, *_ = place  # REPLY: the token of a row is the request's number
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
        # Steps leave in the order of the calls, so that all have one lane, whatever they are of.
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
        """Raise LocalProtocolError unless a step is open, and small enough to be taken as a whole.

        Its parts leave in one message, and the broker's journal appends them in one write.
        """
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
        """Take back a step whose caller waits no longer, if it has not left."""
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
        """Let steps leave again, within what the broker says that a message may hold.

        Unconfirmed ones are at the heads of their lanes since link_down(). Of parts, a message
        takes as many as fit beside ATOMIC; a step gathers PARTS_MAX at most.
        """
        super().link_up(welcome)
        self._parts_max = min(PARTS_MAX, self.limits.step_parts_max)

    # --- answers ----------------------------------------------------------------------------

    def refused(self, batch: OutgoingSteps, error: BrokerRefused, now_ms: int) -> None:
        """Send refused steps again in halves or later, or fail them, by the code.

        The broker took nothing of them.
        """
        if not self._take_answered(batch):
            return
        doubtful, batch.doubtful = batch.doubtful, False  # it was under way when a link ended
        former_lane = batch.lane
        # A lone step that its caller has given up is not sent again.
        again = error.code in RETRYABLE and (batch.count > 1 or batch.rows[0].token is not None)
        if again:
            # A lane of its own, under a new number: the steps that follow need not wait for it.
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
        for lane in {former_lane, batch.lane}:
            if not lane.queue:
                self._note_empty(lane)

    def _divide(self, batch: OutgoingSteps) -> list[Any]:
        """Replace a merged step that was not taken by two, under keys of their own."""
        batch.thin = True  # steps whose callers have given up are left out
        return super()._divide(batch)


def _nowhere(confirm: Confirm) -> Confirmation:
    """Confirmation of a step of whose records the CONFIRM does not tell the offset (-1)."""
    plain = confirmation(confirm, 0, 0)
    return Confirmation(-1, plain.epoch, plain.level, plain.append_time_ms, 0, plain.duplicate)
