"""Clients of the real client library: its sans-IO session over simulated links.

Owns a shell for `Session`, as thin as the real ones, and the judgement of what the session does
with what it gets. The rule: readers.py judges the broker's side on the wire; this module judges
what the library's caller sees: records handed over, notices, confirmations, over reconnects and
over new sessions that go on at a saved position. Source: SPEC.md, sections 6 and 8;
malamute_py/client.
"""

from __future__ import annotations

from typing import Any

import msgspec

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused
from malamute_py.client.position import Position
from malamute_py.client.session.calls import make_row, subscribe_options
from malamute_py.client.session.events import Closed, Connect, Event, Published, Unlinked
from malamute_py.client.session.session import Session
from malamute_py.client.session.subscription import (
    Arrival,
    GapNotice,
    Item,
    RewoundNotice,
    SubscriptionState,
)
from malamute_py.client.settings import ClientSettings
from malamute_py.client.words import Until
from tests.simulation.clients import (
    LEVEL_DEFAULT,
    LEVEL_NONE,
    RETRYABLE,
    Client,
    Make,
    Serials,
    World,
    judge_confirm,
)
from tests.simulation.model import Violation
from tests.simulation.network import Connection, Message
from tests.simulation.readers import MEMORY_STREAM, selects
from tests.simulation.records import SERIAL, Sent, content_serials, encode

_DECODER = msgspec.msgpack.Decoder(list[c.AnyCommand])
_BROKE = "the broker broke the protocol"


class SessionClient(Client):
    """A shell that moves messages, time and events, and nothing else."""

    def __init__(self, world: World, name: str, **settings: Any) -> None:
        super().__init__(world, name)
        self.settings = ClientSettings(
            endpoints=("inproc://simulated",),
            software="simulated",
            retry_min_ms=5,
            retry_max_ms=60,
            attempt_ms=self.rng.choice((50, 300)),
            **settings,
        ).check()
        self.wake_at_ms = -1
        self.begin()

    def begin(self) -> None:
        """Begin a new session, perhaps of a new process."""
        self.peer = Session(self.settings, self.rng.randbytes, self.world.now_ms())

    # --- the shell ----------------------------------------------------------------------

    def start(self) -> None:
        """Let the session go."""
        self.turn()

    def turn(self) -> None:
        """Do the work that is due, in the order of the real shells."""
        peer, now_ms = self.peer, self.world.now_ms()
        peer.wake(now_ms)
        self._send(now_ms)
        wanted = peer.take_transport()
        if wanted is not None:
            self.hang_up()
            if isinstance(wanted, Connect):
                self.connection = self.world.connect(self)
                self.open = self.connection is not None
            self._send(now_ms)
        for event in peer.take_events():
            self._event(event)
        at_ms = peer.next_wake()
        if at_ms is not None and at_ms != self.wake_at_ms:
            self.wake_at_ms = at_ms
            self.world.after(
                max(1, at_ms - now_ms) * 1000, lambda: self._due(at_ms) if at_ms else None
            )

    def _due(self, at_ms: int) -> None:
        if self.wake_at_ms == at_ms:
            self.wake_at_ms = -1
            self.turn()

    def _send(self, now_ms: int) -> None:
        if self.connection is None:
            return
        for message in self.peer.take_outgoing(now_ms):
            frames = [bytes(frame) for frame in message]
            used = 1
            for command in _DECODER.decode(frames[0]):
                owned = command.content_frames
                self.said(command, frames[used : used + owned])
                used += owned
            self.world.send(self.connection, frames)

    def hang_up(self) -> None:
        """Close the socket."""
        connection, self.connection, self.open = self.connection, None, False
        if connection is not None:
            connection.drop()

    def lost(self, connection: Connection) -> None:
        """Note that the transport noticed a lost connection."""
        if connection is self.connection:
            self.hang_up()
            self.peer.lost("closed", "the transport lost it", self.world.now_ms())
            self.turn()

    def arrive(self, connection: Connection, message: Message) -> None:
        """Take a message."""
        if connection is not self.connection:
            return
        self.before(message)
        self.peer.receive(message, self.world.now_ms())
        self.turn()

    def _event(self, event: Event) -> None:
        if isinstance(event, Closed):
            raise Violation("refusal", f"{self.name}: its session is over: {event.error}")
        if isinstance(event, Unlinked):
            self.world.note("unlinked", self.name, event.code)
            if event.reason.startswith(_BROKE):
                raise Violation("broken", f"{self.name}: {event.reason}")
        self.happened(event)

    # --- what the kinds of clients fill in -----------------------------------------------

    def said(self, command: c.Command, frames: list[bytes]) -> None:
        """Note a message that the session sends."""

    def before(self, message: Message) -> None:
        """Note a message that the session is about to get."""

    def happened(self, event: Event) -> None:
        """Note an event of the session."""


class SessionProducer(SessionClient):
    """Publishes single records and encoded batches; every one must have an outcome."""

    def __init__(
        self,
        world: World,
        name: str,
        number: int,
        streams: list[str],
        *,
        level: int,
        batches: int,
        serials: Serials,
        make: Make,
        **settings: Any,
    ) -> None:
        super().__init__(world, name, **settings)
        self.number = number
        self.streams = streams
        self.level = level
        self.left = batches
        self.serials = serials
        self.make = make
        self.waiting: dict[int, Sent] = {}
        """Serial -> record without an outcome."""
        self.sent: dict[int, tuple[str, int, list[Sent]]] = {}
        """Tracker on the present link -> (stream, level, records)."""
        self.told: dict[int, int] = {}
        """Serial -> the offset that a CONFIRM on the wire gave it; -1: not known any more."""
        self.judged: Connection | None = None
        if level == LEVEL_NONE or self.settings.idempotent:
            world.model.ordered.add(number)
        if level != LEVEL_NONE and self.settings.idempotent:
            world.model.idempotent.add(number)

    def start(self) -> None:
        super().start()
        self._work()

    def _work(self) -> None:
        if self.left <= 0 or self.world.quiet:
            return
        publisher = self.peer.publisher
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            if publisher.window.has_room() and self.left > 0:
                self.left -= 1
                self._publish()
        self.turn()
        self.world.after(self.rng.choice((500, 3_000, 20_000)), self._work)

    def _publish(self) -> None:
        publisher = self.peer.publisher
        stream = self.rng.choice(self.streams)
        level = self.level
        if stream == MEMORY_STREAM and level != LEVEL_NONE:
            level = LEVEL_DEFAULT
        records = [
            self.make(self.serials(), self.number, stream) for _ in range(self.rng.randint(1, 5))
        ]
        for record in records:
            self.world.model.send(record)
            self.waiting[record.serial] = record
        if self.rng.random() < 0.3:
            token = tuple(record.serial for record in records)
            publisher.add_content(stream, level, encode(records), len(records), token)
            return
        for record in records:
            expires = record.expiry_ms or None
            row = make_row(
                record.body(), record.subject, record.fields, None, expires, None, record.serial
            )
            publisher.add(stream, level, row)

    # --- judging ---------------------------------------------------------------------------

    def said(self, command: c.Command, frames: list[bytes]) -> None:
        if isinstance(command, c.Hello):
            self.sent.clear()
        elif isinstance(command, c.Publish):
            records = [self.world.model.sent[serial] for serial in content_serials(frames[0])]
            self.world.note(
                "publish", self.name, command.stream, command.tracker, records[0].serial
            )
            if command.tracker:
                self.sent[command.tracker] = (command.stream, command.level, records)

    def overheard(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None:
        if connection is not self.connection:
            return
        for command in commands:
            if isinstance(command, c.Confirm) and command.tracker in self.sent:
                stream, level, records = self.sent[command.tracker]
                judge_confirm(self.world.model, self.name, command, stream, level, records)
                for place, record in enumerate(records):
                    offset = command.offset
                    self.told[record.serial] = offset + place if offset >= 0 else -1

    def happened(self, event: Event) -> None:
        if not isinstance(event, Published):
            return
        serials = event.tokens
        if self.peer.publisher.producers_lost:
            raise Violation("refusal", f"{self.name}: the broker has forgotten its producer")
        for place, serial in enumerate(serials):
            record = self.waiting.pop(serial, None)
            if record is None:
                raise Violation("wrong_confirm", f"{self.name}: {serial} has two outcomes")
            outcome = event.outcome
            if isinstance(outcome, c.Confirm):
                if outcome.tracker == 0:
                    if self.level != LEVEL_NONE:
                        raise Violation("wrong_confirm", f"{self.name}: {serial}: {outcome}")
                    continue
                offset = outcome.offset + place if outcome.offset >= 0 else -1
                if self.told.get(serial) != offset:
                    raise Violation(
                        "wrong_confirm",
                        f"{self.name}: record {serial} is confirmed at {offset}, on the wire at "
                        f"{self.told.get(serial)}",
                    )
            elif isinstance(outcome, BrokerRefused) and outcome.code in RETRYABLE:
                self.world.note("failed", self.name, serial, outcome.code)
            elif (
                isinstance(outcome, BrokerRefused)
                and outcome.code == "damaged"
                and self.world.model.damaged(record.stream, serial)
            ):
                self.world.note("damaged", self.name, serial)
            else:
                raise Violation("refusal", f"{self.name}: record {serial}: {outcome!r}")

    def owes(self) -> str:
        return f"{self.name}: outcomes of {sorted(self.waiting)}" if self.waiting else ""


class SessionConsumer(SessionClient):
    """Takes what a session's subscription hands over, at its own pace."""

    def __init__(
        self,
        world: World,
        name: str,
        stream: str,
        pattern: list[Any],
        *,
        durable: bool,
        start: list[Any],
        window: tuple[int, int],
        pace_us: int,
        until: Until = "",
        whole: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(world, name, **settings)
        self.stream = stream
        self.pattern = pattern
        self.durable = durable
        self.first_start = start
        self.window = window
        self.pace_us = pace_us
        self.until = until
        self.whole = whole
        self.judge = world.reader(name, stream, pattern, int(durable))
        self.end = -1
        self.at = -1
        """Position where the next record handed over may be; -1: not accepted yet."""
        self.received = -1
        """Position where the next cover that reaches the session must begin."""
        self.saved: Position | None = None
        """Position that the process which died before had reached."""
        self.moved = False
        """True: it has gone on from where it began: the first rewind may come from beyond that."""
        self.kept: dict[int, int] = {}
        """Offset -> epoch of everything handed over, less what a rewind took back."""
        self.holes: set[tuple[int, int]] = set()
        """Gaps and rewinds that the broker reported, and that were true then."""
        self.done = False
        self.reading = self._subscribe(None)

    def _subscribe(self, position: Position | None) -> SubscriptionState:
        self.received = -1
        return self.peer.subscribe(
            subscribe_options(
                self.stream,
                self.pattern,
                start=self.first_start if position is None else position,
                visibility="durable" if self.durable else "live",
                end=self.end if self.end >= 0 else None,
                until=self.until if position is None else "",
                client_time=None,
                create=True,
                whole=self.whole,
                credit_records=self.window[0],
                credit_bytes=self.window[1],
            )
        )

    def start(self) -> None:
        super().start()
        self._work()

    def _work(self) -> None:
        if self.done:
            return
        for _ in range(self.rng.choice((1, 1, 3, 50))):
            item = self.reading.take()
            self.peer.consumed(self.reading)
            if item is None:
                break
            self._take(item)
        if not self.reading.inbox:
            self._skipped(self.reading.consumed_next)
            if self.reading.ended:
                self._ended()
        self.turn()
        self.world.after(self.rng.randint(1, self.pace_us) + 20, self._work)

    def _ended(self) -> None:
        error = self.reading.error
        if error is None:
            self.done = True
            if self.at != max(self.reading.end, self.received):
                raise self._fail("cover", f"ended at {self.at} instead of {self.reading.end}")
        elif isinstance(error, BrokerRefused) and error.code in RETRYABLE:
            self.world.note("ended", self.name, error.code)
            self.reading = self._subscribe(self.reading.position or self.saved)
        else:
            raise self._fail("refusal", repr(error))

    def reborn(self) -> None:
        """Have the process die and begin anew at the position that it had saved."""
        if self.done:
            return
        position = self.reading.position
        self.world.note("reborn", self.name, position)
        if position is None:
            # Not accepted yet: the position saved before is still the known one.
            position = self.saved
        else:
            self.end = self.reading.end
            head = self.reading.inbox[0] if self.reading.inbox else None
            if isinstance(head, RewoundNotice) and head.to_offset == position.next != self.at:
                # Its first subscription was rewound: it is at that place, before it is told.
                self._take(head)
            elif head is None or position.next > self.at:
                # Empty covers moved it, before what waits now or with nothing waiting.
                self._skipped(position.next)
            if position.next != self.at:
                raise self._fail("cover", f"its position is {position.next} behind {self.at}")
        self.saved = position
        self.hang_up()
        self.begin()
        self.reading = self._subscribe(position)
        self.turn()

    # --- what it is handed -------------------------------------------------------------------

    def _fail(self, code: str, facts: str) -> Violation:
        return Violation(code, f"session {self.name} of {self.stream}: {facts}")

    def _take(self, item: Item) -> None:
        if isinstance(item, Arrival):
            self._arrival(item)
        elif isinstance(item, GapNotice | RewoundNotice):
            rewound = isinstance(item, RewoundNotice)
            if self.at < item.from_offset and self.at != item.to_offset:
                # Empty covers before it left no item of their own.
                self._skipped(item.from_offset)
            first = not self.moved and item.to_offset == self.at
            if item.from_offset != self.at and not first:
                raise self._fail("cover", f"{item} at {self.at}")
            if (item.from_offset, item.to_offset) not in self.holes:
                raise self._fail("rewound" if rewound else "hole_called_gap", f"{item}")
            self.world.note("notice", self.name, type(item).__name__, item.to_offset)
            self.at = item.to_offset
            self.moved = True
            if rewound:
                self.kept = {place: e for place, e in self.kept.items() if place < self.at}

    def _arrival(self, item: Arrival) -> None:
        log = self.judge.log
        model = self.world.model
        shown: set[int] = set()
        for record in item.batch or ():
            serial = SERIAL.unpack_from(record.body)[0]
            if not self.at <= record.offset < item.next:
                raise self._fail(
                    "order", f"offset {record.offset} in [{self.at}, {item.next}): each once"
                )
            if log.seen.get((record.epoch, record.offset)) != serial:
                raise self._fail("wrong_record", f"offset {record.offset}: record {serial}")
            sent = model.sent[serial]
            if bytes(record.body) != sent.body() or record.subject != sent.subject:
                raise self._fail("wrong_record", f"offset {record.offset}: not as sent: {sent}")
            if not selects(self.pattern, sent):
                raise self._fail("not_selected", f"offset {record.offset}: {sent}")
            if shown and record.offset <= max(shown):
                raise self._fail("order", f"offset {record.offset} after {max(shown)}")
            shown.add(record.offset)
        if item.batch is not None and shown:
            epoch = item.batch.stamp.epoch
            self._continues(epoch)
            self.kept.update(dict.fromkeys(shown, epoch))
        self._moved(item.next, shown)

    def _continues(self, epoch: int) -> None:
        """Check that records handed over are of one log with the next ones, of this epoch."""
        seen = self.judge.log.seen
        for offset, before in self.kept.items():
            for later in range(before + 1, epoch + 1):
                if (later, offset) in seen:
                    raise self._fail(
                        "rewound",
                        f"offset {offset} was handed over as of epoch {before}, was written anew "
                        f"in {later}, and {epoch} comes without a notice",
                    )

    def _skipped(self, following: int) -> None:
        """Move the position by empty covers, which leave no item."""
        if self.at >= 0 and following >= 0 and following != self.at:
            self._moved(following, set())

    def _moved(self, following: int, shown: set[int]) -> None:
        if following < self.at:
            raise self._fail("cover", f"from {self.at} back to {following}")
        log, model = self.judge.log, self.world.model
        now_ms = self.judge.broker_ms()
        for offset in range(self.at, following):
            if offset in shown:
                continue
            there = [
                model.sent[log.seen[epoch, offset]]
                for epoch in range(1, self.world.epoch() + 1)
                if (epoch, offset) in log.seen
            ]
            if not any(
                not selects(self.pattern, sent) or 0 < sent.expiry_ms <= now_ms for sent in there
            ):
                raise self._fail(
                    "gap_called_hole",
                    f"offset {offset} in [{self.at}, {following}) was not handed over: {there}",
                )
        self.at = following
        self.moved = True

    # --- what goes over the wire -------------------------------------------------------------

    def said(self, command: c.Command, frames: list[bytes]) -> None:
        if isinstance(command, c.Subscribe):
            start = list(command.start)
            if self.received >= 0 and start[1] != self.received:
                raise self._fail("start", f"resumes at {start}, has received to {self.received}")
            self.world.note("subscribe", self.name, start)
            self.judge.subscribe(start, command.credit_records, command.credit_bytes)
        elif isinstance(command, c.Credit):
            self.judge.grant(command.credit_records, command.credit_bytes)

    def before(self, message: Message) -> None:
        for command in _DECODER.decode(message[0]):
            if isinstance(command, c.Subscribed):
                if self.at < 0:
                    self.at = command.next
                self.received = command.next
            elif isinstance(command, c.Deliver | c.Cover):
                self.received = command.next
            elif isinstance(command, c.Gap | c.Rewound):
                self.received = command.to

    def overheard(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None:
        if connection is not self.connection:
            return
        judge = self.judge
        used = 0
        for command in commands:
            owned = command.content_frames
            mine = frames[used : used + owned]
            used += owned
            if isinstance(command, c.Subscribed):
                judge.subscribed(command)
            elif isinstance(command, c.Deliver):
                judge.deliver(command, mine)
            elif isinstance(command, c.Cover):
                judge.cover(command)
            elif isinstance(command, c.Gap):
                judge.gap(command)
                self.holes.add((command.from_, command.to))
            elif isinstance(command, c.Rewound):
                judge.rewound(command)
                self.holes.add((command.from_, command.to))
            elif isinstance(command, c.Ended):
                judge.end_of(command)

    def arrive(self, connection: Connection, message: Message) -> None:
        super().arrive(connection, message)
        waits = any(isinstance(item, RewoundNotice) for item in self.reading.inbox)
        if waits and self.at >= 0 and not self.world.quiet and self.rng.random() < 0.3:
            # The worst moment to die: records consumed belong to a tail that is gone.
            self.reborn()

    def owes(self) -> str:
        log = self.judge.log
        end = self.reading.end
        if self.done:
            return ""
        if self.until:
            return f"{self.name}: the end of its read (at {self.at})" if end <= log.tail else ""
        if self.at != log.tail:
            return f"{self.name}: is at {self.at} of {self.stream}, which ends at {log.tail}"
        return ""
