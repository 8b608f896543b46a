"""Scenario `work`: mail, services, cursors, groups and steps over everything that may go wrong.

Owns one seed of it: its mailboxes, services, streams and groups, their users, and the quiet end, in
which everything held is acknowledged and everything that waits must find its way. The faults are
those of the scenario `broker` and those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from malamute_protocol import commands as c
from malamute_py.broker.limits import BrokerSettings
from malamute_py.changelog import tables
from tests.simulation.broker_run import BrokerRun
from tests.simulation.clients import LEVEL_STORED, LEVEL_SYNCED, RETRYABLE, Client
from tests.simulation.machine import SEGMENT_BYTES
from tests.simulation.model import Violation
from tests.simulation.records import Sent
from tests.simulation.work_clients import Peer, Thief
from tests.simulation.work_machine import OWN, WorkMachine
from tests.simulation.work_model import WorkModel
from tests.simulation.work_roles import ALL, Roles

PATTERNS: tuple[list[Any], ...] = (ALL, ALL, ["topic", "a.*"], ["prefix", "a"], ["topic", "b"])
KINDS = ("shared", "shared", "keyed", "exclusive")


def _edit(mailbox: str, settings: dict[str, Any], number: int) -> c.Command:
    return c.EditMailbox(number, mailbox, settings)


class Preparer(Client):
    """Creates what needs settings, then lets the others begin."""

    def __init__(
        self, world: Any, commands: list[Callable[[int], c.Command]], then: Callable[[], None]
    ) -> None:
        super().__init__(world, "preparer")
        self.left = commands
        self.then = then

    def link_up(self, welcome: c.Welcome) -> None:
        self._next()

    def _next(self) -> None:
        if self.left and self.open:
            self.say(self.left[0](self.request()))

    def handle(self, command: c.Command, frames: list[bytes]) -> None:
        if isinstance(command, c.Result) and command.request == self._requests and self.left:
            self.left.pop(0)
            if self.left:
                self._next()
            else:
                self.then()
        elif isinstance(command, c.Refused):
            if command.code not in RETRYABLE:
                raise Violation("refusal", f"{command}")
            self.world.after(100_000, self._next)

    def owes(self) -> str:
        return "the making of what there is to be" if self.left else ""


class WorkRun(BrokerRun):
    """One seed of the scenario."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.records: dict[int, Sent] = {}
        """Serial -> record."""
        self.readers: dict[str, int] = {}
        """Mailbox -> how many inboxes it has, over all of the run."""
        self.acts = 0
        self.mistaken = Random(f"mistaken {self.seed}").choice((0.0, 0.0, 0.1))
        """Share of keyed messages and requests that are sent under a key that another one had."""
        self.peers: list[Peer] = []
        self.machine.on_power = lambda: self._down(power=True)

    def _model(self) -> Any:
        return WorkModel()

    def _machine(self, settings: BrokerSettings) -> Any:
        rng = self.rng
        settings = BrokerSettings(
            heartbeat_ms=1000,
            hot_bytes=rng.choice((0, 4_000, 1 << 20)),
            quantum_bytes=rng.choice((500, 100_000)),
            extract_bytes_min=rng.choice((0, 400)),
            mail_hot_bytes=rng.choice((0, 4_000, 1 << 20)),
            mail_read_bytes=rng.choice((1_000, 1 << 20)),
            inbox_read_bytes=rng.choice((1_000, 1 << 20)),
            timers_max=rng.choice((2, 2_000)),
            hand_outs_max=rng.choice((2, 1_000)),
            lease_ms=rng.choice((100, 400)),
            backoff_ms=rng.choice((1, 20)),
            backoff_max_ms=100,
            attempts_max=rng.choice((2, 5, 50)),
            group_window_records=rng.choice((4, 50, 65_536)),
            group_hold_ms=100,
            group_flush_ms=rng.choice((1, 50)),
            retry_ms=rng.choice((1, 20)),
            mailbox_messages_max=rng.choice((20, 10_000_000)),
            service_requests_max=rng.choice((10, 1_000_000)),
        )
        self.model.state.attempts_max = settings.attempts_max
        self.model.state.messages_max = settings.mailbox_messages_max
        # Apart from the other choices, so that a seed is what it was before there was this one.
        self.model.state.keys_max = Random(f"keys {self.seed}").choice((16, 60, tables.KEYS_MAX))
        self.model.state.group_attempts = Random(f"tries {self.seed}").choice((0, 0, 1, 3))
        return WorkMachine(
            self.clock, self.model, self.trace, rng, settings,
            SEGMENT_BYTES * rng.choice((3, 4, 8)),
        )  # fmt: skip

    # --- the run -----------------------------------------------------------------------

    def run(self) -> None:
        """Run the seed. Raises Violation."""
        with patch.object(tables, "KEYS_MAX", self.model.state.keys_max):
            self._run()

    def _run(self) -> None:
        self._start()
        rng = self.rng
        boxes = [f"m{number}" for number in range(rng.randint(1, 3))]
        commands: list[Callable[[int], c.Command]] = []
        for name in boxes:
            settings: dict[str, Any] = {}
            if rng.random() < 0.2:
                settings["ttl_ms"] = rng.choice((30, 300))
            if rng.random() < 0.2:
                settings["max_messages"] = rng.choice((6, 30))
            if settings:
                commands.append(partial(_edit, name, settings))
        if rng.random() < 0.3:
            boxes.append("mem")
            commands.append(partial(_edit, "mem", {"memory": True}))
        commands.append(lambda n: c.CreateStream(n, "s0", {}))
        commands.append(lambda n: c.CreateStream(n, "s1", {}))
        self.own = rng.random() < 0.4
        if self.own:
            commands.append(lambda n: c.CreateStream(n, OWN, {"ring_bytes": 1 << 20}))
        self.boxes = boxes
        preparer = Preparer(self, commands, self._begin)
        preparer.start()
        self._schedule_fault()
        while not self.quiet:
            if not self.clock.step() or self.clock.now_us > 60_000_000:
                raise Violation("stuck", "the faults never ended")
        self._calm()
        self._until_settled([preparer])
        self._finish()

    def _begin(self) -> None:
        rng = self.rng
        count = rng.randint(2, 5)
        cast = [Roles(budget=rng.choice((5, 30, 100))) for _ in range(count)]
        for box in self.boxes:
            for roles in rng.sample(cast, rng.randint(1, min(2, count))):
                roles.inboxes.append(box)
            for roles in rng.sample(cast, rng.randint(1, count)):
                roles.sends.append(box)
        for service in [f"w{number}" for number in range(rng.choice((0, 1, 1, 2)))]:
            workers = rng.sample(cast, rng.randint(1, count))
            for number, roles in enumerate(workers):
                roles.offers.append((service, rng.choice(PATTERNS) if number else ALL))
            for roles in rng.sample(cast, rng.randint(1, count)):
                roles.requests.append(service)
            rng.choice(cast).inboxes.append(f"{service}.dead")
        for number in range(rng.choice((0, 1, 1, 2))):
            stream = OWN if self.own and rng.random() < 0.6 else f"s{rng.randint(0, 1)}"
            place, kind = f"{stream}/g{number}", rng.choice(KINDS)
            pattern = rng.choice(PATTERNS)
            for roles in rng.sample(cast, rng.randint(1, count)):
                roles.groups.append((place, kind, pattern))
            if self.model.state.group_attempts:
                cast[0].inboxes.append(f"{place.replace('/', '.')}.dead")
        if self.own:
            for roles in rng.sample(cast, rng.randint(1, count)):
                roles.publishes.append(OWN)
        for stream in ("s0", "s1"):
            for roles in rng.sample(cast, rng.randint(0, count)):
                roles.publishes.append(stream)
            if rng.random() < 0.6:
                for roles in rng.sample(cast, rng.choice((1, min(2, count)))):
                    roles.cursors.append(f"{stream}/c")
        for number, roles in enumerate(cast):
            identity = f"p{number}" if rng.random() < 0.7 else ""
            if roles.requests or not identity:
                # A requester reads its answers.
                roles.inboxes.append("")
            peer = Peer(
                self, f"p{number}", identity=identity, roles=roles,
                level=rng.choice((0, LEVEL_SYNCED, LEVEL_STORED)),
                pace_us=rng.choice((1_000, 5_000, 30_000)),
            )  # fmt: skip
            self.peers.append(peer)
            for sub in peer.subs:
                if sub.kind == "inbox":
                    box = peer.box_of(sub)
                    self.readers[box] = self.readers.get(box, 0) + 1
        for peer in self.peers:
            peer.start()

    # --- what clients see of the world -------------------------------------------------

    def serial_of(self) -> int:
        """Return a number for a new record."""
        return self._next_serial()

    def act_number(self) -> int:
        """Return a number for a new act."""
        self.acts += 1
        return self.acts

    def core_ms(self) -> int:
        """Return the time that the core has."""
        core = self.machine.core
        return 0 if core is None else int(core._shard.now_ms)

    # --- faults ------------------------------------------------------------------------

    def _fault(self) -> None:
        if self.steps > 0 and self.rng.random() < 0.2 and self.machine.running:
            self.steps -= 1
            draw = self.rng.random()
            if draw < 0.3:
                self._orderly()
            elif draw < 0.7:
                self._theft()
            else:
                self.machine.pressure()
            self._schedule_fault()
            return
        before_ms = self.clock.skew_ms
        super()._fault()
        self.model.state.slack_ms += abs(self.clock.skew_ms - before_ms)

    def _orderly(self) -> None:
        """Stop the broker in order; commands that come then take nothing."""
        power = self.rng.random() < 0.5
        if self.machine.close():
            self.trace.note("orderly stop")
            self._down(power=power)

    def _theft(self) -> None:
        named = [peer for peer in self.peers if peer.identity]
        at_work = [peer for peer in named if any(s.kind == "offer" and s.held for s in peer.subs)]
        names = [peer.identity for peer in at_work or named]
        if names:
            Thief(self, self.rng.choice(names)).start()
            self.trace.note("fault", "a thief")

    def places(self) -> tuple[list[str], list[str], list[str]]:
        """Return mailboxes, services and groups that operators may look at."""
        roles = [peer.roles for peer in self.peers]
        return (
            self.boxes,
            sorted({service for role in roles for service, _ in role.offers}),
            sorted({place for role in roles for place, _, _ in role.groups}),
        )

    def _rot(self) -> None:
        """Do nothing: rot in a change stops the start by name, at which other tests look."""

    def _calm(self) -> None:
        self.machine.calm = True
        super()._calm()

    def _until_settled(self, others: list[Client]) -> None:
        deadline = self.clock.now_us + 30_000_000
        owed = "nothing was looked at"
        while self.clock.now_us < deadline:
            until = self.clock.now_us + 100_000
            while self.clock.now_us < until and self.clock.step():
                pass
            owed = self._owed(others)
            if not owed and self.machine.running:
                self.model.answered()
                return
        raise Violation("stuck", owed or "the broker is not running")

    def _owed(self, others: list[Client]) -> str:
        for client in [*others, *self.peers]:
            if owed := client.owes():
                return owed
        if not self.machine.running:
            return "the broker is not running"
        state = self.model.state
        for (box, number), letter in state.mail.items():
            if self.readers.get(state.boxes[box]):
                return f"message {number} of {state.boxes[box]}: {letter}"
        for number, job in state.jobs.items():
            return f"request {number}: {job}"
        for place, (next, done) in state.groups.items():
            tail = state.tails.get(place[0], 0)
            # Records gone by retention belong to no one; a full log may not have heard of it.
            kept = self.model.first_of(place[0])
            if any(offset not in done for offset in range(max(next, kept), tail)):
                return f"group {place} is at {next} of {tail}, done {sorted(done)[:5]}"
        return ""

    def _finish(self) -> None:
        """End everything once more, and look at what is left."""
        self._down(power=self.rng.random() < 0.7)
        self.machine.start()
