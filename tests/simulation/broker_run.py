"""Scenario `broker`: core, rings and clients over everything that may go wrong.

Owns one seed: its clients, its faults and their times, and the quiet end in which all that is owed
must arrive. The rule: after `quiet` no fault comes any more, so whatever is still missing then is
stuck.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from malamute_protocol import commands as c
from malamute_py.broker.limits import BrokerSettings
from tests.simulation.clients import (
    LEVEL_NONE,
    LEVEL_STORED,
    LEVEL_SYNCED,
    Client,
    Consumer,
    Founder,
    Producer,
)
from tests.simulation.clock import Clock
from tests.simulation.disk import CrashNow
from tests.simulation.faults import plan_crash, power_mode, rot_something
from tests.simulation.machine import SEGMENT_BYTES, Machine, pack
from tests.simulation.model import Log, Model, Violation
from tests.simulation.network import Connection, Message
from tests.simulation.readers import Reader
from tests.simulation.records import Sent
from tests.simulation.trace import Trace

SUBJECTS = ("a", "a.b", "a.b.c", "c.d", "c", "x.y.z")
PATTERNS: tuple[list[Any], ...] = (
    ["all"],
    ["all"],
    ["topic", "a.*"],
    ["topic", "#"],
    ["topic", "a.#"],
    ["prefix", "a"],
    ["topic", "x.y.z"],
    ["fields", "all", [["k", "1"]]],
    ["fields", "any", [["k", "2"], ["m"]]],
    ["or", ["topic", "c"], ["prefix", "x."]],
    ["and", ["prefix", "a"], ["not", ["topic", "a.b"]]],
)
FIELDS: tuple[dict[str, str] | None, ...] = (
    None,
    None,
    {"k": "1"},
    {"k": "2"},
    {"k": "1", "m": ""},
)


class BrokerRun:
    """One seed of the scenario."""

    def __init__(self, seed: int, *, steps: int = 0, trace: Trace | None = None) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.trace = trace if trace is not None else Trace()
        self.clock = Clock()
        self.model = self._model()
        self.quiet = False
        self.steps = steps or self.rng.choice((4, 8, 16))
        """Steps in which faults come."""
        self.numbers = 0
        self.serial = 0
        settings = BrokerSettings(
            heartbeat_ms=1000,
            hot_bytes=self.rng.choice((0, 4_000, 40_000, 1 << 20)),
            quantum_bytes=self.rng.choice((500, 5_000, 100_000)),
            extract_bytes_min=self.rng.choice((0, 400)),
            # A draw of its own: the seeds that found faults still find them.
            fan_out_max=Random(f"fan-out {seed}").choice((1, 2, 8_192)),
        )
        self.machine = self._machine(settings)
        self.machine.on_crash = self._crashed
        self.big = self.rng.random() < 0.4
        if self.big:
            self.machine.room_bytes = 150_000
        self.producers: list[Client] = []
        self.consumers: list[Client] = []
        self.connections: list[tuple[Client, Connection]] = []
        self.streams: dict[str, dict[str, Any]] = {}

    def _model(self) -> Any:
        return Model()

    def _machine(self, settings: BrokerSettings) -> Any:
        return Machine(
            self.clock, self.model, self.trace, self.rng, settings,
            SEGMENT_BYTES * self.rng.choice((3, 4, 8)),
        )  # fmt: skip

    # --- the run ---------------------------------------------------------------------

    def run(self) -> None:
        """Run the seed. Raises Violation."""
        self._cast()
        self._start()
        founder = Founder(self, self.streams, self._begin)
        founder.start()
        self._schedule_fault()
        while not self.quiet:
            if not self.clock.step() or self.clock.now_us > 60_000_000:
                raise Violation("stuck", "the faults never ended")
        self._calm()
        self._until_settled([founder])
        self._finish()

    def _cast(self) -> None:
        rng = self.rng
        for number in range(rng.choice((1, 2, 3))):
            self.streams[f"s{number}"] = {}
        if rng.random() < 0.4:
            self.streams["own"] = {"ring_bytes": 1 << 20}
        if rng.random() < 0.3:
            self.streams["mem"] = {"memory": True}

    def _begin(self) -> None:
        rng = self.rng
        names = list(self.streams)
        for number in range(rng.randint(1, 3)):
            self.producers.append(
                Producer(
                    self,
                    f"p{number}",
                    number,
                    rng.sample(names, rng.randint(1, len(names))),
                    idempotent=rng.random() < 0.75,
                    level=rng.choice((LEVEL_SYNCED, LEVEL_SYNCED, LEVEL_STORED, LEVEL_NONE)),
                    batches=rng.choice((10, 30, 60)),
                    serials=self._next_serial,
                    make=self._make,
                )
            )
        for number in range(rng.randint(1, 4)):
            self._add_consumer(f"c{number}")
        for client in [*self.producers, *self.consumers]:
            client.start()

    def _add_consumer(self, name: str) -> None:
        rng = self.rng
        consumer = Consumer(
            self,
            name,
            rng.choice(list(self.streams)),
            rng.choice(PATTERNS),
            visibility=rng.choice((0, 0, 1)),
            start=self._start_point(),
            window=(rng.choice((1, 5, 1000)), rng.choice((300, 10_000, 1 << 20))),
            pace_us=rng.choice((50, 2_000, 40_000)),
            until="tail" if rng.random() < 0.15 else "",
            whole=rng.random() < 0.3,
        )
        self.consumers.append(consumer)

    def _start_point(self) -> list[Any]:
        rng = self.rng
        time_ms = self.clock.true_ms() - rng.choice((-5, 0, 10, 100, 1_000))
        return rng.choice(
            ([0], [0], [1], [2, 0], [2, rng.randint(0, 30)], [3, time_ms, rng.random() < 0.5])
        )

    def _next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def _make(self, serial: int, producer: int, stream: str) -> Sent:
        rng = self.rng
        expiry = 0
        if rng.random() < 0.1:
            expiry = self.clock.true_ms() + rng.choice((1, 500, 1_000_000))
        return Sent(
            serial,
            producer,
            stream,
            rng.choice(SUBJECTS),
            rng.choice(FIELDS),
            expiry,
            rng.choice((8, 200, 3000, 9000)) if self.big else rng.randint(8, 60),
        )

    # --- faults ------------------------------------------------------------------------

    def _schedule_fault(self) -> None:
        self.clock.after(self.rng.choice((2_000, 20_000, 60_000, 150_000)), self._fault)

    def _fault(self) -> None:
        if self.steps <= 0:
            self.quiet = True
            return
        self.steps -= 1
        rng = self.rng
        draw = rng.random()
        machine = self.machine
        if not machine.running:
            pass
        elif draw < 0.14:
            self._crash(power=False)
        elif draw < 0.32:
            self._crash(power=True)
        elif draw < 0.46:
            self.trace.note("plan", plan_crash(machine.disk, rng))
        elif draw < 0.62:
            self._drop()
        elif draw < 0.72:
            self._stall()
        elif draw < 0.78:
            machine.disk.write_back(rng, rng.random())
        elif draw < 0.82:
            machine.disk.fail_syncs = 1
            self.trace.note("fault", "the next sync fails")
            self.clock.after(400_000, lambda: self._crash(power=rng.random() < 0.3))
        elif draw < 0.87:
            machine.disk.capacity = machine.disk.used() + rng.choice((0, 5_000, SEGMENT_BYTES))
            self.trace.note("fault", "disk full")
            self.clock.after(100_000, self._space)
        elif draw < 0.92:
            self.clock.skew_ms += rng.choice((-5_000, -300, 300, 4_000))
            self.trace.note("fault", "the clock jumps", self.clock.skew_ms)
        elif draw < 0.96:
            self._rot()
        elif self.consumers:
            self._add_consumer(f"c{len(self.consumers)}")
            self.consumers[-1].start()
        self._schedule_fault()

    def _rot(self) -> None:
        ring = self.rng.choice(sorted(self.model.rings) or ["main"])
        hit = rot_something(self.machine.disk, self.rng, self.model, ring)
        if hit is not None:
            self.trace.note("rot", *hit)

    def _space(self) -> None:
        self.machine.disk.capacity = 1 << 40

    def _drop(self) -> None:
        alive = [pair for pair in self.connections if pair[1].open]
        self.connections = alive
        if alive:
            client, connection = self.rng.choice(alive)
            self.trace.note("drop", client.name)
            self._drop_connection(client, connection)

    def _drop_connection(self, client: Client, connection: Connection) -> None:
        connection.drop()
        self.clock.after(self.rng.randint(10, 100_000), lambda: client.lost(connection))
        if self.rng.random() < 0.7:
            delay = self.rng.randint(10, 100_000)
            self.clock.after(delay, lambda: self.machine.dropped(connection))

    def _stall(self) -> None:
        alive = [pair for pair in self.connections if pair[1].open]
        if alive:
            client, connection = self.rng.choice(alive)
            self.trace.note("stall", client.name)
            connection.down.stall(on=True)
            self.clock.after(
                self.rng.choice((10_000, 200_000)), lambda: connection.down.stall(on=False)
            )

    # --- the machine's deaths -----------------------------------------------------------

    def _crash(self, *, power: bool) -> None:
        if self.machine.running:
            self._down(power=power)

    def _crashed(self) -> None:
        self._down(power=self.rng.random() < 0.5)

    def _down(self, *, power: bool) -> None:
        self.machine.stop(power=power, mode=power_mode(self.rng))
        for client, connection in self.connections:
            delay = self.rng.randint(10, 50_000)
            self.clock.after(delay, lambda c=client, k=connection: c.lost(k))  # type: ignore[misc]
        self.connections.clear()
        self.clock.after(self.rng.randint(1_000, 50_000), self._start)

    def _start(self) -> None:
        if self.machine.running:
            return
        if not self.quiet and self.rng.random() < 0.15:
            self.trace.note("plan", plan_crash(self.machine.disk, self.rng))
        try:
            self.machine.start()
        except CrashNow:
            self.trace.note("crash", "while starting")
            self._down(power=self.rng.random() < 0.5)

    # --- what clients see of the world -----------------------------------------------------

    def connect(self, client: Client) -> Connection | None:
        """Make a new connection, unless the broker is away."""
        if not self.machine.running:
            return None
        self.numbers += 1
        connection = Connection(
            self.clock,
            self.rng,
            self.numbers,
            self.machine.arrive,
            lambda message: self._deliver(client, connection, message),
            self.rng.choice((2, 10, 1000)),
        )
        self.connections.append((client, connection))
        self.machine.attach(client, connection)
        return connection

    def _deliver(self, client: Client, connection: Connection, message: Message) -> None:
        client.arrive(connection, message)

    def transmit(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None:
        """Have a client send a message."""
        connection.up.send(pack(commands, frames))

    def send(self, connection: Connection, message: Message) -> None:
        """Have a client send a message that is packed already."""
        connection.up.send(message)

    def now_ms(self) -> int:
        """Return a client's time, which never goes back."""
        return self.clock.true_ms()

    def epoch(self) -> int:
        """Return the newest epoch that there may be."""
        epoch: int = self.machine.epoch
        return epoch

    def after(self, delay_us: int, action: Callable[[], None]) -> None:
        """Schedule an action of a client."""
        self.clock.after(delay_us, action)

    def note(self, kind: str, *facts: object) -> None:
        """Enter an event of a client."""
        self.trace.note(kind, *facts)

    def reader(self, name: str, stream: str, pattern: list[Any], visibility: int) -> Reader:
        """Return a judge for one consumer."""
        return Reader(
            self.model, name, stream, pattern, visibility,
            lambda: self.machine.latest_ms, self.machine.first_of, self.machine.visible_of,
            self.machine.told_first_of,
        )  # fmt: skip

    # --- the quiet end --------------------------------------------------------------------

    def _calm(self) -> None:
        self.trace.note("calm")
        self.machine.disk.crash_at_write = self.machine.disk.crash_at_sync = -1
        self.machine.disk.fail_syncs = 0
        self._space()
        failed = any(truth.failed for truth in self.model.rings.values())
        if (failed or self.machine.unopened) and self.machine.running:
            self._down(power=False)

    def _until_settled(self, others: list[Client]) -> None:
        deadline = self.clock.now_us + 30_000_000
        owed = "nothing was looked at"
        while self.clock.now_us < deadline:
            until = self.clock.now_us + 500_000
            while self.clock.now_us < until and self.clock.step():
                pass
            owed = next(
                (owed for client in [*others, *self.producers, *self.consumers]
                 if (owed := client.owes())),
                "",
            )  # fmt: skip
            if not owed and self.machine.running:
                return
        raise Violation("stuck", owed or "the broker is not running")

    def _finish(self) -> None:
        """End everything once more, and look at what is left."""
        self._down(power=self.rng.random() < 0.7)
        self.machine.start()
        for log in self.model.logs.values():
            self._order(log)

    def _order(self, log: Log) -> None:
        last: dict[int, int] = {}
        for offset in sorted(log.entries):
            entry = log.entries[offset]
            sent = self.model.sent[entry.serial]
            if entry.bundle.damaged or sent.producer not in self.model.ordered:
                continue
            if sent.serial <= last.get(sent.producer, -1):
                raise Violation("order", f"stream {log.name}, offset {offset}: {sent.serial}")
            last[sent.producer] = sent.serial
