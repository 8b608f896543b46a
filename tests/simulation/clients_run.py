"""Scenario `clients`: the real client library, its asyncio shell and all, over the real broker.

Owns one seed of it: its programs, the message at which each link is cut, the deaths and pauses of
processes, and the quiet end, in which every call that was made must return, and everything that a
link holds must be known to a program or come back. The faults of the broker's host are those of the
scenario `work`. Source: SPEC.md, sections 4, 6 and 8.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from malamute_protocol import commands as c
from malamute_protocol.commands import WorkState
from malamute_py.broker.limits import BrokerSettings
from tests.simulation.faults import plan_crash
from tests.simulation.history import ToldModel
from tests.simulation.machine import SEGMENT_BYTES
from tests.simulation.model import Violation
from tests.simulation.network import Connection, Message
from tests.simulation.process import Cast, Process, anonymous
from tests.simulation.programs import Program
from tests.simulation.sockets import DealerSocket, simulated_transport
from tests.simulation.trace import Trace
from tests.simulation.work_machine import WorkMachine
from tests.simulation.work_run import Preparer, WorkRun

ALL: list[Any] = ["all"]
CUTS = 160
"""Cuts of one story of the scenario `cuts`."""
RENEWS, ANONYMOUS, ANSWERS_IN_STEPS, GROUP_STEPS, GROUPS_LOSE, STORED_REQUESTS, LATE_HELLOS = (
    "handlers renew leases", "programs without an identity ask services",
    "handlers answer in steps", "members acknowledge in steps", "groups and power losses",
    "requests are confirmed as stored", "late hellos",
)  # fmt: skip
GROUP_BOUNDS = "groups have leases and bounds of attempts"
HABITS = frozenset((
    RENEWS, ANONYMOUS, ANSWERS_IN_STEPS, GROUP_STEPS, GROUPS_LOSE, STORED_REQUESTS, LATE_HELLOS,
    GROUP_BOUNDS,
))  # fmt: skip
"""Behaviour of programs, beside the plain use of everything."""


class Stoppable(WorkMachine):
    """The broker's host; its process may be stopped for a while."""

    frozen_until_us = 0

    def _later(self, action: Callable[[], None], delay_us: int) -> None:
        super()._later(lambda: self._thawed(action), delay_us)

    def _thawed(self, action: Callable[[], None]) -> None:
        left_us = self.frozen_until_us - self.clock.now_us
        if left_us > 0:
            super()._later(lambda: self._thawed(action), left_us)
        else:
            action()

    def arrive(self, number: int, message: Message) -> None:
        """Take a message at the broker's socket."""
        left_us = self.frozen_until_us - self.clock.now_us
        if left_us > 0:
            self.clock.after(left_us, lambda: self.arrive(number, message))
        else:
            super().arrive(number, message)


class ClientsRun(WorkRun):
    """One seed of the scenario."""

    model: ToldModel
    habits = HABITS

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.losses = 0
        """Times at which something that was stored may have been lost."""
        self.processes: list[Process] = []
        self.failure: Violation | None = None
        self.inputs = ["s0", "s1"]
        self.outputs = ["s2"]
        self.services: list[str] = []
        self.groups = False
        self.group_bounds: dict[str, int] | None = None
        """Settings of each group; None: they have none, and programs take their records singly."""
        self.subs: dict[tuple[int, int], tuple[str, str, list[Any], str]] = {}
        """(link, subscription) -> (kind, place, pattern, kind of the group)."""
        self.holders: dict[int, str] = {}
        """Link -> name by which the broker knows its holder."""
        self.sessions: dict[int, bytes] = {}
        """Link -> the session of its HELLO."""
        self.cut_share = self.rng.choice((0.0, 0.3, 0.6))
        """Share of connections that have an appointed end."""

    def _model(self) -> Any:
        return ToldModel()

    def _machine(self, settings: BrokerSettings) -> Any:
        rng = self.rng
        settings = BrokerSettings(
            heartbeat_ms=rng.choice((300, 1000)),
            hot_bytes=rng.choice((0, 4_000, 1 << 20)),
            mail_hot_bytes=rng.choice((0, 1 << 20)),
            timers_max=rng.choice((2, 2_000)),
            hand_outs_max=rng.choice((2, 1_000)),
            lease_ms=rng.choice((100, 400)),
            backoff_ms=rng.choice((1, 20)),
            backoff_max_ms=100,
            attempts_max=rng.choice((3, 50, 50)),
            group_window_records=rng.choice((4, 65_536)),
            group_hold_ms=100,
            group_flush_ms=rng.choice((1, 50)),
            retry_ms=rng.choice((1, 20)),
            fan_out_max=Random(f"fan-out {self.seed}").choice((1, 2, 8_192)),
        )
        self.model.state.attempts_max = settings.attempts_max
        return Stoppable(self.clock, self.model, self.trace, rng, settings, SEGMENT_BYTES * 8)

    # --- the run -----------------------------------------------------------------------

    def run(self) -> None:
        """Run the seed. Raises Violation."""
        collecting = gc.isenabled()
        gc.disable()
        logging.disable(logging.CRITICAL)
        try:
            with simulated_transport(self.now_ms, self.rng.randbytes):
                try:
                    self._run()
                finally:
                    for process in self.processes:
                        process.kill()
        finally:
            logging.disable(logging.NOTSET)
            if collecting:
                gc.enable()

    def _run(self) -> None:
        self._start()
        rng = self.rng
        self.boxes = [f"m{number}" for number in range(rng.randint(1, 2))]
        commands: list[Callable[[int], c.Command]] = [
            partial(_create, stream) for stream in (*self.inputs, *self.outputs)
        ]
        preparer = Preparer(self, commands, self._begin)
        preparer.start()
        self._schedule_fault()
        while not self.quiet:
            if not self._on() or self.clock.now_us > 60_000_000:
                raise Violation("stuck", "the faults never ended")
        self._calm()
        self._until_settled([preparer])
        for process in self.processes:
            process.finish()
        self._until("the end of every program", self._open_calls)
        self._finish()

    def _on(self) -> bool:
        more = self.clock.step()
        if self.failure is not None:
            raise self.failure
        return more

    def fail(self, name: str, error: BaseException) -> None:
        """End a program for an error that it should not have seen."""
        if self.failure is not None:
            return
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, Violation):
            self.failure = error
        else:
            self.failure = Violation("broken", f"{name}: {error!r}")
            self.failure.__cause__ = error

    def _begin(self) -> None:
        rng = self.rng
        count = rng.randint(2, 4)
        self.services = [f"w{number}" for number in range(rng.choice((0, 1, 1, 2)))]
        asks: list[list[Cast]] = [[] for _ in range(count)]
        serving: list[list[Cast]] = [[] for _ in range(count)]
        some = range(count)
        for number in rng.sample(some, rng.randint(1, count)):
            asks[number].append(("sends",))
        for box in self.boxes:
            for number in rng.sample(some, rng.randint(1, min(2, count))):
                serving[number].append(("reads", box))
                self.readers[box] = self.readers.get(box, 0) + 1
        for service in self.services:
            for number in rng.sample(some, rng.randint(1, count)):
                serving[number].append((rng.choice(("serves", "works")), service))
        if self.services:
            for number in rng.sample(some, rng.randint(1, count)):
                asks[number].append(("requests",))
        self.groups = rng.random() < 0.7
        if self.groups:
            for number in rng.sample(some, rng.randint(1, count)):
                asks[number].append(("publishes",))
            self._draw_bounds()
            for place in rng.sample(self.inputs, rng.randint(1, 2)):
                if self.model.state.group_attempts:
                    serving[0].append(("reads", f"{place}.g.dead"))
                kind = rng.choice(("shared", "shared", "keyed", "exclusive"))
                for number in rng.sample(some, rng.randint(1, count)):
                    serving[number].append(("joins", place, "g", kind))
        for number in some:
            identity = f"p{number}" if rng.random() < 0.6 else ""
            if ("requests",) in asks[number] and ANONYMOUS not in self.habits:
                identity = f"p{number}"
            if identity and rng.random() < 0.5:
                serving[number].append(("reads", None))
            program = self._kind()
            process = program(self, f"p{number}", identity, asks[number], serving[number])
            self.processes.append(process)
        for process in self.processes:
            process.start()

    def _draw_bounds(self) -> None:
        """Draw the settings of the groups, apart from the other draws of the seed."""
        dice = Random(f"groups {self.seed}")
        if GROUP_BOUNDS not in self.habits or dice.random() < 0.3:
            return
        # The log says when a lease has ended where attempts are counted.
        bounds = dice.choice((
            {}, {"attempts_max": 1}, {"attempts_max": 3}, {"attempts_max": 3, "lease_ms": 100},
            {"attempts_max": 50, "lease_ms": 100}, {"attempts_max": 50, "lease_ms": 300},
        ))  # fmt: skip
        self.model.state.group_attempts = bounds.get("attempts_max", 0)
        self.group_bounds = bounds

    def _kind(self) -> type[Process]:
        """Draw the kind of the next program."""
        return Program

    # --- the network ------------------------------------------------------------------------

    def connect(self, client: Any) -> Connection | None:
        """Make a new connection, with an appointed end now and then."""
        if not self.machine.running:
            return None
        rng = self.rng
        self.numbers += 1
        end = self._end_of(client)
        if (
            not end[0]
            and isinstance(client, DealerSocket)
            and not self.quiet
            and rng.random() < self.cut_share
        ):
            at = 1 + int(rng.expovariate(1 / rng.choice((3, 12, 40))))
            end = [rng.choice(("up", "down")), at, rng.random() < 0.5]

        def meets(way: str, arrive: Callable[[], None]) -> None:
            if end[0] != way:
                arrive()
                return
            end[1] -= 1
            if end[1] > 0:
                arrive()
                return
            end[0] = ""
            if self.quiet:
                arrive()
                return
            if end[2]:
                arrive()
            self.trace.note("cut", client.name, way, end[2])
            self._drop_connection(client, connection)

        connection = Connection(
            self.clock, rng, self.numbers,
            lambda number, message: meets("up", lambda: self.machine.arrive(number, message)),
            lambda message: meets("down", lambda: client.arrive(connection, message)),
            rng.choice((2, 10, 1000)),
        )  # fmt: skip
        connection.up.high_water = rng.choice((3, 64))
        self.connections.append((client, connection))
        self.machine.attach(client, connection)
        return connection

    def _end_of(self, client: Any) -> list[Any]:
        """Return a connection's appointed end: direction, number of the message, and side of it."""
        return ["", 0, False]

    def said(self, process: Process, connection: Connection, commands: list[Any]) -> None:
        """Take a message that the library of a process sends: learn what its numbers mean."""
        link = connection.number
        model = self.model
        for command in commands:
            kind = type(command)
            if kind is c.Hello:
                self.holders[link] = process.identity or anonymous(command.session)
                self.sessions[link] = command.session
            elif kind is c.OpenInbox:
                box = command.mailbox or self.holders[link]
                self.subs[link, command.subscription] = "inbox", box, ALL, ""
            elif kind is c.Offer:
                self.subs[link, command.subscription] = "offer", command.service, ALL, ""
            elif kind is c.JoinGroup:
                place = f"{command.stream}/{command.group}"
                self.subs[link, command.subscription] = "group", place, ALL, command.kind
                if command.kind == "exclusive":
                    model.joins(place, process.identity, self.sessions[link])
            elif kind is c.Unsubscribe:
                model.left((link, command.subscription))
            elif kind is c.AckMail and command.again_ms >= 0:
                _, box, _, _ = self.subs[link, command.subscription]
                for number in _numbers(command.ranges):
                    model.free(("mail", box, number))
                    model.free(("memory", number))
            elif kind is c.AckRecords and command.state != WorkState.RENEWED:
                sub = self.subs.get((link, command.subscription))
                if sub is None:
                    continue  # It is a part of a step that is sent again, whose member has left.
                _, place, _, _ = sub
                if command.again_ms < 0 and not command.state:
                    model.said_done.update((place, number) for number in _numbers(command.ranges))
                else:
                    model.let_go(place, _numbers(command.ranges))

    def overheard(
        self, process: Process, connection: Connection, commands: list[Any], frames: list[bytes]
    ) -> None:
        """Compare a message that the broker hands to the network with the log."""
        used, link, model = 0, connection.number, self.model
        for command in commands:
            owned = frames[used : used + command.content_frames]
            used += command.content_frames
            if isinstance(command, c.Subscribed):
                model.opened((link, command.subscription))
                continue
            if not isinstance(command, c.Mail | c.Work | c.Deliver):
                continue
            _, place, _, group = self.subs[link, command.subscription]
            if isinstance(command, c.Mail):
                single = self.readers.get(place, 0) == 1
                rows = model.mail(link, place, command, owned, self.core_ms(), single)
            elif isinstance(command, c.Work):
                rows = model.work(link, self.holders[link], place, command, owned, _selects_all)
            else:
                if group == "exclusive":
                    model.exclusive(link, place, process.identity, self.sessions[link])
                rows = model.record(link, place, command, owned, group == "keyed", _selects_all)
            self.trace.note(type(command).__name__.lower(), process.name, place, rows)

    # --- faults ------------------------------------------------------------------------

    def _fault(self) -> None:
        if self.steps <= 0:
            self.quiet = True
            return
        self.steps -= 1
        rng, machine = self.rng, self.machine
        draw = rng.random()
        if draw < 0.30:
            self._drop()
        elif draw < 0.36:
            self._stall()
        elif draw < 0.46 and self.processes:
            process = rng.choice(self.processes)
            if not process.dead:
                self.trace.note("fault", "a process dies", process.name)
                process.kill()
                self.clock.after(rng.randint(1_000, 100_000), process.start)
        elif draw < 0.54 and self.processes:
            process = rng.choice(self.processes)
            self.trace.note("fault", "a process stands still", process.name)
            process.freeze(rng.choice((20_000, 300_000, 3_000_000)))
        elif not machine.running:
            pass
        elif draw < 0.66:
            self._crash(power=False)
        elif draw < 0.80:
            self._crash(power=True)
        elif draw < 0.86:
            self.trace.note("plan", plan_crash(machine.disk, rng))
        elif draw < 0.90:
            self.trace.note("fault", "the broker stands still")
            machine.frozen_until_us = self.clock.now_us + rng.choice((20_000, 300_000, 2_000_000))
        elif draw < 0.94:
            before_ms = self.clock.skew_ms
            self.clock.skew_ms += rng.choice((-5_000, -300, 300, 4_000))
            self.trace.note("fault", "the clock jumps", self.clock.skew_ms)
            self.model.state.slack_ms += abs(self.clock.skew_ms - before_ms)
        elif draw < 0.96:
            self._orderly()
        elif draw < 0.98:
            machine.pressure()
        else:
            machine.disk.write_back(rng, rng.random())
        self._schedule_fault()

    def _down(self, *, power: bool) -> None:
        power = power and (GROUPS_LOSE in self.habits or not self.groups)
        if power or any(truth.failed for truth in self.model.rings.values()):
            self.losses += 1
        self.machine.frozen_until_us = 0
        super()._down(power=power)

    # --- the quiet end -----------------------------------------------------------------

    def _until_settled(self, others: list[Any]) -> None:
        self._until("", lambda: self._owed(others))
        self.model.answered()

    def _until(self, what: str, owed: Callable[[], str]) -> None:
        deadline = self.clock.now_us + 30_000_000
        collect_us = self.clock.now_us + 1_000_000
        left = "nothing was looked at"
        while self.clock.now_us < deadline:
            until = self.clock.now_us + 100_000
            while self.clock.now_us < until and self._on():
                pass
            left = owed()
            if not left and self.machine.running:
                return
            if self.clock.now_us > collect_us:
                # A request that its program has dropped comes back once its object is collected.
                gc.collect()
                collect_us += 5_000_000
        words = [what, left or "no broker", self._unknown()]
        raise Violation("stuck", "; ".join(word for word in words if word))

    def _unknown(self) -> str:
        """Return what a link holds although its program knows nothing of it."""
        working = {
            p.holder: p.at_work for p in self.processes if not p.dead and p.client is not None
        }
        unseen = [
            f"request {number} is held by {job.holder}, whose program does not know of it"
            for number, job in self.model.state.jobs.items()
            if job.holder and number not in working.get(job.holder, ())
        ]
        return "; ".join(unseen)

    def _owed(self, others: list[Any]) -> str:
        for process in self.processes:
            if owed := process.owes():
                return owed
        return super()._owed(others)

    def _open_calls(self) -> str:
        return next((left for p in self.processes if (left := p.unfinished())), "")


class CutsRun(ClientsRun):
    """One story of the scenario with no fault but one cut, one message later in each seed.

    A seed is the number of a story and of a cut: CUTS cuts a story, at each message of the first
    link of one program, in either direction, before it arrives and after it.
    """

    def __init__(self, seed: int, *, steps: int = 0, trace: Trace | None = None) -> None:
        story, cut = divmod(seed, CUTS)
        super().__init__(story, steps=steps or 6, trace=trace)
        self.cut_share = 0.0
        self.appointed: list[Any] = [("up", "down")[cut & 1], 1 + (cut >> 2), bool(cut & 2)]

    def _end_of(self, client: Any) -> list[Any]:
        if not self.processes or client.name != self.processes[0].name:
            return super()._end_of(client)
        end, self.appointed = self.appointed, super()._end_of(client)
        return end

    def _fault(self) -> None:
        self.steps -= 1
        self.quiet = self.steps <= 0
        if not self.quiet:
            self._schedule_fault()


def _create(stream: str, number: int) -> c.Command:
    return c.CreateStream(number, stream, {})


def _numbers(ranges: Any) -> list[int]:
    return [number for first, end in ranges for number in range(first, end)]


def _selects_all(_serial: int) -> bool:
    return True
