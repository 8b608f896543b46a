"""Scripted clients: they send commands, keep to the protocol, and retry as it allows.

Owns the behaviour of the simulated producers and consumers. The rule: a client knows only what came
to it over its link; a promise to it is entered into the model when the broker hands it to the
network (`overheard`). Source: SPEC.md, sections 3, 6 and 8.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Protocol, TypeAlias

import msgspec

from malamute_protocol import commands as c
from tests.simulation.model import Log, Model, Violation
from tests.simulation.network import Connection, Message
from tests.simulation.readers import MEMORY_STREAM, Reader
from tests.simulation.records import Sent, encode

LEVEL_DEFAULT, LEVEL_NONE, LEVEL_STORED, LEVEL_SYNCED = 0, 1, 2, 3
CREDIT = 16
RETRYABLE = frozenset({"wait", "window", "draining", "full", "disk_full", "journal_failed"})


class World(Protocol):
    """The simulation as a client sees it."""

    model: Model
    rng: Random
    quiet: bool
    """True: no new work any more, only the end of work under way."""

    def connect(self, client: Client) -> Connection | None: ...
    def transmit(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None: ...
    def after(self, delay_us: int, action: Callable[[], None]) -> None: ...
    def send(self, connection: Connection, message: Message) -> None: ...
    def now_ms(self) -> int: ...
    def epoch(self) -> int: ...
    def note(self, kind: str, *facts: object) -> None: ...
    def reader(self, name: str, stream: str, pattern: list[Any], visibility: int) -> Reader: ...


Serials: TypeAlias = Callable[[], int]
Make: TypeAlias = Callable[[int, int, str], Sent]
_DECODER = msgspec.msgpack.Decoder(list[c.AnyCommand])


class Client:
    """One peer: connects, says hello, keeps alive, connects again."""

    identity = ""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.rng = world.rng
        self.name = name
        self.session = world.rng.randbytes(16)
        self.connection: Connection | None = None
        self.open = False
        self.heartbeat_ms = 1000
        self._requests = 0
        self.reconnects = -1

    def start(self) -> None:
        """Connect now, and again whenever the link is lost."""
        self._connect()

    def _connect(self) -> None:
        if self.connection is not None:
            return
        connection = self.world.connect(self)
        if connection is None:
            self.world.after(self.rng.randint(5_000, 60_000), self._connect)
            return
        self.connection = connection
        self.reconnects += 1
        self.say(c.Hello((1, 1), self.session, self.identity, "simulated", 0))
        self.world.after(3_000_000, lambda: self._give_up(connection))

    def _give_up(self, connection: Connection) -> None:
        if self.connection is connection and not self.open:
            self.lost(connection)

    def lost(self, connection: Connection) -> None:
        """Note that the link is gone: connect again in a while."""
        if self.connection is not connection:
            return
        connection.drop()
        self.connection = None
        self.open = False
        self.link_down()
        self.world.after(self.rng.randint(1_000, 50_000), self._connect)

    def say(self, command: c.Command, *frames: bytes) -> None:
        """Send one command."""
        if self.connection is not None:
            self.world.transmit(self.connection, [command], list(frames))

    def request(self) -> int:
        """Return a number for the next request."""
        self._requests += 1
        return self._requests

    def arrive(self, connection: Connection, message: Message) -> None:
        """Take one message."""
        self.receive(connection, list(_DECODER.decode(message[0])), message[1:])

    def receive(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None:
        """Take one message."""
        if connection is not self.connection:
            return
        used = 0
        for command in commands:
            owned = command.content_frames
            self._command(connection, command, frames[used : used + owned])
            used += owned

    def _command(self, connection: Connection, command: c.Command, frames: list[bytes]) -> None:
        if isinstance(command, c.Welcome):
            self.open = True
            self.heartbeat_ms = command.heartbeat_ms
            self._beat(connection)
            self.link_up(command)
        elif isinstance(command, c.Ping):
            self.say(c.Pong(command.token))
        elif isinstance(command, c.Bye):
            self.world.note("bye", self.name, command.code)
            self.lost(connection)
        elif isinstance(command, c.Refused) and command.command in (0, 1):
            self.world.note("refused", self.name, command.code, command.reason)
        elif not isinstance(command, c.Pong):
            self.handle(command, frames)

    def _beat(self, connection: Connection) -> None:
        if self.connection is connection and self.open:
            self.say(c.Ping(1))
            self.world.after(self.heartbeat_ms * 700, lambda: self._beat(connection))

    # --- what the kinds of clients fill in ------------------------------------------------

    def link_up(self, welcome: c.Welcome) -> None:
        """Note that the link is open."""

    def link_down(self) -> None:
        """Note that the link is gone."""

    def handle(self, command: c.Command, frames: list[bytes]) -> None:
        """Take any command but the link's own."""

    def overheard(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None:
        """Judge a message that the broker hands to the network."""

    def owes(self) -> str:
        """Say in words what is still to come; empty when nothing is."""
        return ""


class Founder(Client):
    """Creates the streams with their settings, then lets the others begin."""

    def __init__(
        self, world: World, streams: dict[str, dict[str, Any]], then: Callable[[], None]
    ) -> None:
        super().__init__(world, "founder")
        self.streams = streams
        self.left = list(streams)
        self.then = then

    def link_up(self, welcome: c.Welcome) -> None:
        self._next()

    def _next(self) -> None:
        if self.left:
            name = self.left[0]
            self.say(c.CreateStream(self.request(), name, self.streams[name]))

    def handle(self, command: c.Command, frames: list[bytes]) -> None:
        if isinstance(command, c.Result) and command.request == self._requests and self.left:
            self.world.note("created", self.left.pop(0))
            if self.left:
                self._next()
            else:
                self.then()
        elif isinstance(command, c.Refused):
            self.world.note("create refused", command.code, command.reason)
            if command.code not in RETRYABLE:
                raise Violation("refusal", f"CREATE_STREAM {self.left[:1]}: {command}")
            self.world.after(100_000, self._next)

    def owes(self) -> str:
        return f"creation of {self.left}" if self.left else ""


class Outgoing:
    """One batch on its way."""

    __slots__ = ("content", "level", "records", "sequence", "stream", "tracker")

    def __init__(self, stream: str, records: list[Sent], level: int, sequence: int) -> None:
        self.stream = stream
        self.records = records
        self.level = level
        self.sequence = sequence
        self.tracker = 0
        self.content = b""


class Producer(Client):
    """Publishes to some streams; idempotent ones repeat until confirmed."""

    def __init__(
        self,
        world: World,
        name: str,
        number: int,
        streams: list[str],
        *,
        idempotent: bool,
        level: int,
        batches: int,
        serials: Callable[[], int],
        make: Callable[[int, int, str], Sent],
    ) -> None:
        super().__init__(world, name)
        self.number = number
        self.streams = streams
        self.idempotent = idempotent
        self.level = level
        self.left = batches
        self.serials = serials
        self.make = make
        self.unconfirmed: dict[str, list[Outgoing]] = {stream: [] for stream in streams}
        self.sent: dict[int, Outgoing] = {}
        """Tracker on the present link -> batch."""
        self.next_sequence = dict.fromkeys(streams, 0)
        self.trackers = 0
        self.producer_id = 0
        self.producer_epoch = 0
        self.settled = False
        self.opening = 0
        self.confirmed = 0
        if idempotent:
            world.model.idempotent.add(number)
        world.model.ordered.add(number)

    # --- the link -------------------------------------------------------------------

    def link_up(self, welcome: c.Welcome) -> None:
        if self.idempotent:
            self._open_producer()
        else:
            self.settled = True
        self._work()

    def link_down(self) -> None:
        self.settled = False
        self.sent.clear()
        if not self.idempotent:
            # It is not known whether they arrived, and repeating them could repeat records.
            for batches in self.unconfirmed.values():
                batches.clear()

    def _open_producer(self) -> None:
        self.settled = False
        self.opening = self.request()
        self.say(c.OpenProducer(self.opening, self.producer_id, self.producer_epoch))

    def handle(self, command: c.Command, frames: list[bytes]) -> None:
        if isinstance(command, c.Result):
            if command.request == self.opening:
                self._opened(command.value)
        elif isinstance(command, c.Confirm):
            batch = self.sent.pop(command.tracker, None)
            if batch is not None and batch in self.unconfirmed[batch.stream]:
                self.unconfirmed[batch.stream].remove(batch)
                self.confirmed += len(batch.records)
        elif isinstance(command, c.Refused):
            self._refused(command)

    def _opened(self, value: dict[str, Any]) -> None:
        renamed = (value["id"], value["epoch"]) != (self.producer_id, self.producer_epoch)
        if renamed and self.producer_id:
            raise Violation("refusal", f"{self.name}: the broker renamed its producer to {value}")
        self.producer_id, self.producer_epoch = value["id"], value["epoch"]
        self.settled = True
        self.sent.clear()
        for stream, batches in self.unconfirmed.items():
            expected = value["next"].get(stream, 0)
            first = batches[0].sequence if batches else self.next_sequence[stream]
            if expected < first:
                # Records that were confirmed as stored are gone with a power loss: the next records
                # take their sequences.
                self.next_sequence[stream] = expected
                for batch in batches:
                    batch.content = b""
                    batch.sequence = self.next_sequence[stream]
                    self.next_sequence[stream] += len(batch.records)
            for batch in batches:
                self._publish(batch)

    def _refused(self, command: c.Refused) -> None:
        self.world.note("refused", self.name, command.command, command.code)
        if command.command == 22:
            if command.code not in RETRYABLE:
                raise Violation("refusal", f"{self.name}: OPEN_PRODUCER: {command}")
            self.world.after(100_000, lambda: self._again(self.connection))
            return
        batch = self.sent.pop(command.reference, None)
        if batch is None:
            return
        if command.code == "damaged" and all(
            self.world.model.damaged(batch.stream, record.serial) for record in batch.records
        ):
            # Its fate is known: no record of it can be read.
            if batch in self.unconfirmed[batch.stream]:
                self.unconfirmed[batch.stream].remove(batch)
        elif command.code not in RETRYABLE | {"out_of_sequence"}:
            raise Violation("refusal", f"{self.name}: PUBLISH to {batch.stream}: {command}")
        if self.idempotent:
            if self.settled:
                self.settled = False
                self.world.after(50_000, lambda: self._again(self.connection))
        elif batch in self.unconfirmed[batch.stream]:
            self.unconfirmed[batch.stream].remove(batch)

    def _again(self, connection: Connection | None) -> None:
        if self.open and connection is self.connection and not self.settled:
            self._open_producer()

    # --- publishing -------------------------------------------------------------------

    def _work(self) -> None:
        if not self.open:
            return
        connection = self.connection
        if self.settled and self.left > 0 and not self.world.quiet:
            waiting = sum(map(len, self.unconfirmed.values()))
            if waiting < 12:
                for _ in range(self.rng.choice((1, 1, 2, 4))):
                    self._make()
        if self.left > 0 and not self.world.quiet:
            self.world.after(
                self.rng.choice((500, 3_000, 20_000)),
                lambda: self._work() if self.connection is connection else None,
            )

    def _make(self) -> None:
        if self.left <= 0:
            return
        self.left -= 1
        stream = self.rng.choice(self.streams)
        records = [
            self.make(self.serials(), self.number, stream) for _ in range(self.rng.randint(1, 5))
        ]
        for record in records:
            self.world.model.send(record)
        level = LEVEL_DEFAULT if stream == MEMORY_STREAM else self.level
        batch = Outgoing(stream, records, level, self.next_sequence[stream])
        self.next_sequence[stream] += len(records)
        if self.level != LEVEL_NONE:
            self.unconfirmed[stream].append(batch)
        self._publish(batch)

    def _publish(self, batch: Outgoing) -> None:
        if not batch.content:
            producer = (self.producer_id, self.producer_epoch) if self.idempotent else (0, 0)
            batch.content = encode(
                batch.records,
                producer_id=producer[0],
                producer_epoch=producer[1],
                sequence=batch.sequence if self.idempotent else 0,
            )
        tracker = 0
        if batch.level != LEVEL_NONE:
            self.trackers += 1
            tracker = batch.tracker = self.trackers
            self.sent[tracker] = batch
        self.world.note("publish", self.name, batch.stream, tracker, batch.records[0].serial)
        commands: list[c.Command] = [c.Publish(batch.stream, tracker, batch.level)]
        repeats = self.idempotent and self.session[0] < 64
        if tracker and repeats and self.rng.random() < 0.3 and self.connection is not None:
            # Again at once, as after an answer that was lost.
            self.trackers += 1
            self.sent[self.trackers] = batch
            commands.append(c.Publish(batch.stream, self.trackers, batch.level))
            self.world.transmit(self.connection, commands, [batch.content] * 2)
            return
        self.say(commands[0], batch.content)

    # --- judging -----------------------------------------------------------------------

    def overheard(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None:
        if connection is not self.connection:
            return
        for command in commands:
            if isinstance(command, c.Confirm):
                batch = self.sent.get(command.tracker)
                if batch is not None:
                    judge_confirm(
                        self.world.model,
                        self.name,
                        command,
                        batch.stream,
                        batch.level,
                        batch.records,
                    )

    def owes(self) -> str:
        waiting = [batch.records[0].serial for rest in self.unconfirmed.values() for batch in rest]
        return f"{self.name}: confirms of the batches from records {waiting}" if waiting else ""


def judge_confirm(
    model: Model, name: str, command: c.Confirm, stream: str, level: int, records: list[Sent]
) -> None:
    """Judge a CONFIRM for these records, and enter what it promises."""
    log = model.by_name.get(stream)
    wrong = "wrong_duplicate" if command.duplicate else "wrong_confirm"
    if log is None:
        raise Violation(wrong, f"{command}: nothing was ever appended to {stream}")
    if command.level < level:
        raise Violation(wrong, f"{command} for a batch that asked for level {level}")
    first = command.offset
    if command.duplicate and first < 0:
        # The broker no longer knows where the original is: it is there all the same.
        first = log.serials.get(records[0].serial, -1)
    for place, record in enumerate(records):
        offset = first + place
        entry = log.entries.get(offset)
        if (
            entry is None
            or entry.serial != record.serial
            or (entry.epoch != command.epoch and command.offset >= 0)
        ):
            raise Violation(
                wrong,
                f"{name}: {command} for record {record.serial} of {stream}; "
                f"offset {offset} holds {entry and (entry.serial, entry.epoch)}, the record "
                f"is at {log.serials.get(record.serial)}",
            )
        if place == 0 and command.offset >= 0 and entry.append_time_ms != command.append_time_ms:
            raise Violation(wrong, f"{command}: appended at {entry.append_time_ms}")
        model.show(log, entry.epoch, offset, record.serial)
        if command.level >= LEVEL_SYNCED and not log.memory:
            model.promise(log, offset, f"confirmed as synced to {name}")
    model.confirmed += len(records)


class Consumer(Client):
    """Reads one stream, with a credit window and a pace, over any number of links."""

    def __init__(
        self,
        world: World,
        name: str,
        stream: str,
        pattern: list[Any],
        *,
        visibility: int,
        start: list[Any],
        window: tuple[int, int],
        pace_us: int,
        until: str = "",
        whole: bool = False,
    ) -> None:
        super().__init__(world, name)
        self.stream = stream
        self.pattern = pattern
        self.visibility = visibility
        self.begin = start
        self.window = window
        self.pace_us = pace_us
        self.until = until
        self.whole = whole
        self.judge = world.reader(name, stream, pattern, visibility)
        self.number = 0
        self.uuid = b""
        self.epoch = 0
        self.position = -1
        self.end = -1
        self.done = False
        self.consumed = (0, 0)
        self.records = 0

    def link_up(self, welcome: c.Welcome) -> None:
        if self.done:
            return
        self.number += 1
        self.consumed = (0, 0)
        resumed = self.position >= 0
        start = [2, self.position, self.epoch, self.uuid] if resumed else self.begin
        self.judge.subscribe(start, *self.window)
        self.world.note("subscribe", self.name, start)
        self.say(
            c.Subscribe(
                self.number,
                self.stream,
                self.pattern,
                start,
                *self.window,
                self.visibility,
                self.end,
                "" if resumed else self.until,
                whole=self.whole,
            )
        )

    def handle(self, command: c.Command, frames: list[bytes]) -> None:
        if isinstance(command, c.Subscribed):
            self.uuid, self.epoch = command.stream, command.epoch
            self.end = command.end
            self.position = command.next
        elif isinstance(command, c.Deliver):
            self.position = command.next
            size = sum(map(len, frames))
            count, epoch = self.judged.pop(0)
            self.epoch = max(self.epoch, epoch)
            self.records += count
            connection = self.connection
            self.world.after(
                self.rng.randint(1, self.pace_us),
                lambda: self._consume(connection, count, size),
            )
        elif isinstance(command, c.Cover):
            self.position = command.next
        elif isinstance(command, c.Gap):
            self.position = command.to
        elif isinstance(command, c.Rewound):
            self.position, self.epoch = command.to, command.epoch
        elif isinstance(command, c.Ended):
            self.world.note("ended", self.name, command.next, command.code)
            if command.code == "internal":
                raise Violation("broken", f"{self.name}: {command}")
            if command.code == "end":
                self.done = True
            else:
                connection = self.connection
                if connection is not None:
                    self.lost(connection)
        elif isinstance(command, c.Refused):
            self.world.note("refused", self.name, command.command, command.code, command.reason)
            if command.command == CREDIT and command.code == "unknown_subscription":
                return
            if command.code not in RETRYABLE:
                raise Violation("refusal", f"{self.name}: {command}")
            if self.connection is not None:
                self.lost(self.connection)

    def _consume(self, connection: Connection | None, records: int, size: int) -> None:
        if connection is not self.connection or not self.open:
            return
        self.consumed = (self.consumed[0] + records, self.consumed[1] + size)
        credit = (self.consumed[0] + self.window[0], self.consumed[1] + self.window[1])
        self.judge.grant(*credit)
        self.say(c.Credit(self.number, *credit))

    # --- judging -----------------------------------------------------------------------

    judged: list[tuple[int, int]]
    """(records, newest epoch) of the deliveries that are under way on this link."""

    def link_down(self) -> None:
        self.judge.active = False

    def overheard(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None:
        if connection is not self.connection:
            return
        used = 0
        for command in commands:
            owned = command.content_frames
            mine = frames[used : used + owned]
            used += owned
            self._judge(command, mine)

    def _judge(self, command: c.Command, frames: list[bytes]) -> None:
        judge = self.judge
        if isinstance(command, c.Subscribed):
            self.judged = []
            judge.subscribed(command)
        elif isinstance(command, c.Deliver):
            before = judge.records
            judge.deliver(command, frames)
            self.judged.append((judge.records - before, judge.newest_epoch))
        elif isinstance(command, c.Cover):
            judge.cover(command)
        elif isinstance(command, c.Gap):
            judge.gap(command)
        elif isinstance(command, c.Rewound):
            judge.rewound(command)
        elif isinstance(command, c.Ended):
            judge.end_of(command)

    def owes(self) -> str:
        log: Log = self.judge.log
        if self.done:
            return ""
        if (self.until or self.end >= 0) and self.end <= log.tail:
            return f"{self.name}: the end of its bounded read (at {self.position})"
        if log.memory and not log.entries:
            return ""
        if self.position != log.tail:
            return f"{self.name}: is at {self.position} of {self.stream}, which ends at {log.tail}"
        return ""
