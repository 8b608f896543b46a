"""The shell of the scenario `work`: core and ring main as in `broker`, and the tables that follow.

Owns the checkpoint: the real one, over SQLite in memory. Its commits are durable when they return,
which is what SQLite promises; uncommitted writes are taken back. The rules: its work runs as a
thread of its own, in the middle of which anything else may happen; it may be late, die before or
after its commit, and be found at a start as an older copy of itself. Source: docs/design.md, Queues
and the checkpoint; store/checkpoint.py, server/checkpointing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from malamute_py.broker.ready import (
    CHANGE_STREAM,
    MAIL_STREAM,
    MAIN,
    Append,
    AppendBundle,
    AppendRefused,
    BodiesFound,
    BodiesRead,
    Ready,
    RecoveredState,
    RingFacts,
    Send,
    StreamFacts,
)
from malamute_py.broker.streams.recovery import recover_queues
from malamute_py.config import CheckpointSection
from malamute_py.journal import Follower
from malamute_py.journal.errors import JournalError
from malamute_py.server.checkpointing.checkpoints import Checkpoints, Parts
from malamute_py.server.checkpointing.process import Checkpointed, CheckpointFailed
from malamute_py.server.checkpointing.recovered import QueuesLost, _rest
from malamute_py.store.checkpoint import Checkpoint
from malamute_py.store.database import Position, create, position_of
from malamute_py.store.errors import StoreMoved
from malamute_py.store.follow import Follow
from malamute_py.store.loading import load
from malamute_py.store.opening import LogFacts, _check_position
from malamute_py.store.reading import Changes
from tests.simulation.machine import Machine, Superseded
from tests.simulation.model import Violation
from tests.simulation.work_log import Batch, Bundle, serials_of

COPIES = 4
"""Older states of the tables that are kept, to be found at a start."""
OWN = "own"
"""The one stream that has a ring of its own."""
CONTROLS = frozenset((0, 6))
"""Control kinds of data and changes, which are the core's. The others are the ring's own."""


class Killed(BaseException):
    """The checkpoint's process was killed."""


class SimulatedProcess:
    """The checkpoint's process of a machine, in the place of `CheckpointProcess`."""

    def __init__(self, machine: WorkMachine) -> None:
        self.machine = machine
        self.job: Follow | None = None
        self.deaths = 0
        self.pid = 0

    def ask(self, job: Follow) -> None:
        """Have the tables follow, at some later time."""
        self.job = job
        machine = self.machine
        delay_us = machine.rng.choice((100, 3_000, 20_000, 100_000, 700_000))
        machine._later(lambda: machine._thread("checkpoint", self._work), delay_us)

    def progress(self) -> None:
        """Return nothing to compare: a process of the simulation works or dies, it never hangs."""

    def _work(self) -> None:
        job = self.job
        assert job is not None
        machine, rng = self.machine, self.machine.rng
        draw = rng.random() if not machine.calm else 1.0
        try:
            done = machine.checkpoint_advance(job, kill=draw < machine.kill_share)
        except Killed:
            machine.trace.note("checkpoint", "killed")
            self._answer(CheckpointFailed("died", "it was killed"))
            return
        machine.trace.note("checkpoint", done.lsn, done.changes, done.rows, done.bodies)
        if done.missing or done.damages or done.lost:
            raise Violation("checkpoint", f"{done}")
        if not machine.calm and rng.random() < 0.04:
            machine.trace.note("checkpoint", "power is lost behind its commit")
            machine.on_power()
            raise Superseded
        if draw < machine.kill_share + 0.1:
            machine.trace.note("checkpoint", "killed behind its commit")
            machine.checkpoint = None
            self._answer(CheckpointFailed("died", "it was killed"))
            return
        self._answer(Checkpointed(done, 1, self.deaths))

    def _answer(self, answer: Checkpointed | CheckpointFailed) -> None:
        machine = self.machine
        self.job = None

        def told() -> None:
            machine.checkpoints.take(answer, machine._now())
            machine.pump()

        machine._later(told, machine.rng.choice((50, 500, 30_000)))


class WorkMachine(Machine):
    """The broker's host, with the tables beside the ring."""

    model: Any
    holds = True
    kill_share = 0.15
    """How often the checkpoint's process dies before its commit."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.config = CheckpointSection(
            interval_ms=self.rng.choice((20, 100, 1_000)),
            log_bytes=self.rng.choice((4_096, 65_536, 1 << 20)),
            idle_ms=200, retry_ms=10, retry_max_ms=100,
        )  # fmt: skip
        self.database: sqlite3.Connection | None = None
        self.copies: list[tuple[Position, bytes]] = []
        self.stored: dict[int, bytes] = {}
        """Bodies as the last commit left them: a reader sees these while the tables follow."""
        self.checkpoint: Checkpoint | None = None
        self.checkpoints: Any = None
        self.on_power: Callable[[], None] = lambda: None
        """Called when power is lost."""
        self.calm = False
        """True: no more deaths of the checkpoint."""
        self.ring_uuid = b""
        self.room_bytes = 150_000
        self.model.now_us = lambda: self.clock.now_us
        self.model.now_ms = self._now
        self.model.first_of = self._first_of

    def sync_delays(self, name: str) -> tuple[int, ...]:
        """Return the delays of a sync: a stream's own ring lags after the group that reads it."""
        return super().sync_delays(name) if name == MAIN else (400, 30_000, 300_000, 300_000)

    def _first_of(self, stream: int) -> int:
        ring = next((r for r in self.rings.values() if stream in r.streams()), None)
        return 0 if ring is None else int(ring.first_offset(stream))

    def _change_ring(self, name: str, settings: dict[str, Any]) -> None:
        super()._change_ring(name, settings)
        if not settings.get("remove"):
            self.model.rings_of[OWN] = name

    # --- the tables ----------------------------------------------------------------------

    @property
    def _storage(self) -> Any:
        return self.root.child("rings").child(MAIN)

    def checkpoint_advance(self, job: Follow, *, kill: bool = False) -> Any:
        """Do one advance of the checkpoint's process. Raises Killed."""
        assert self.database is not None
        if self.checkpoint is None:
            self.checkpoint = Checkpoint(self.database, Follower(self._storage).read)
        checkpoint = self.checkpoint

        def die() -> None:
            raise Killed

        def die_amid(departed: list[int]) -> None:
            for each in checkpoint._maps[: self.rng.randint(1, 6)]:
                each.flush()
            die()

        checkpoint.before_commit = lambda: None
        if kill:
            # Everything is written and nothing committed; or the rows are, and no body; or some
            # rows.
            place = self.rng.choice(("before_commit", "_copy_bodies", "_flush"))
            setattr(checkpoint, place, die_amid if place == "_flush" else lambda *_: die())
        try:
            done = checkpoint.advance(job.to_lsn, job.ranges)
        except Killed:
            self.checkpoint = None
            raise
        except Exception as error:
            raise Violation("checkpoint", f"a step to {job.to_lsn} failed: {error!r}") from error
        self._committed()
        return done

    def _committed(self) -> None:
        assert self.database is not None
        self.stored = dict(self.database.execute("SELECT base, batch FROM bodies"))
        self.copies.append((position_of(self.database), self.database.serialize()))
        del self.copies[1:-COPIES]

    def _opened(self, content: bytes) -> None:
        self.database = sqlite3.connect(":memory:", isolation_level=None)
        self.database.deserialize(content)
        self.checkpoint = None
        self.stored = dict(self.database.execute("SELECT base, batch FROM bodies"))

    # --- one process begins and ends --------------------------------------------------------

    def _state(self, facts: dict[str, RingFacts]) -> RecoveredState:
        ring = self.rings[MAIN]
        if self.database is None or self.ring_uuid != ring.uuid:
            # The ring itself was not there yet when the machine died.
            self.ring_uuid = ring.uuid
            self.database = sqlite3.connect(":memory:", isolation_level=None)
            create(self.database, Position(0, 0, 1, self.uuid, ring.uuid))
            self.copies.clear()
            self._committed()
        newest = self.copies[-1][1]
        if not self.calm and self.rng.random() < 0.25:
            position, content = self.rng.choice(self.copies)
            self._opened(content)
            self.trace.note("checkpoint lost", position[:2], ring.start_lsn)
            try:
                queues, changes = self._found(ring, facts)
            except QueuesLost as error:
                gone = [
                    bundle.lsn for bundle in self.model.bundles
                    if position.lsn <= bundle.lsn < ring.start_lsn and bundle.concerns
                ]  # fmt: skip
                if not gone:
                    raise Violation("checkpoint", f"refused without need: {error}") from error
                self.trace.note("start refused", str(error))
            else:
                return self._judged(facts, queues, changes)
        self._opened(newest)
        try:
            queues, changes = self._found(ring, facts)
        except (QueuesLost, StoreMoved) as error:
            raise Violation("checkpoint", f"the broker does not start: {error}") from error
        return self._judged(facts, queues, changes)

    def _judged(
        self, facts: dict[str, RingFacts], queues: Any, changes: list[tuple[int, bytes]]
    ) -> RecoveredState:
        assert self.database is not None
        again = RecoveredState(facts, load(self.database), changes)
        self.model.compare(recover_queues(again))
        self._compare_bodies()
        return RecoveredState(facts, queues, changes, now_ms=self._now())

    def _found(self, ring: Any, facts: dict[str, RingFacts]) -> tuple[Any, list[tuple[int, bytes]]]:
        """Return the tables, and the log after them. As server/recovered.py, find_queues."""
        assert self.database is not None
        position = position_of(self.database)
        log = LogFacts(self.uuid, ring.uuid, ring.start_lsn, ring.end_lsn, True)
        _check_position(position, log, Path("queues.db"), accept_lost=False)
        known = facts[MAIN].streams[CHANGE_STREAM].next
        if position.change_next > known:
            facts[MAIN].streams[CHANGE_STREAM] = StreamFacts(0, position.change_next)
        self.parts = Parts()
        changes = Changes(ring.follow, position.change_next, relevant=self.parts.add)
        queues = load(self.database)
        begin = max(position.lsn, ring.start_lsn)
        rest = list(_rest(changes, begin, ring.end_lsn, facts[MAIN]))
        self.position = position
        return queues, rest

    def _recovered(self) -> None:
        ring = self.rings[MAIN]
        self.checkpoints = Checkpoints(
            Path("nowhere"), ring, self.config, None,  # type: ignore[arg-type]
            parts=self.parts, lsn=self.position.lsn, report=self._reported,
            press=self.core.pressed,
        )  # fmt: skip
        self.checkpoints._process = SimulatedProcess(self)

    def _reported(self, name: str, level: str, facts: dict[str, Any]) -> None:
        if name != "checkpoint_done":
            self.trace.note(name)

    def _compare_bodies(self) -> None:
        numbers = self.model.alive()
        found = self._bodies(tuple(numbers))
        for number in numbers:
            batch = found.get(number)
            if batch is None:
                raise Violation("bodies", f"of batch {number} is nowhere")
            count = self.model.state.batches[number]
            serials = serials_of(batch[96:], number, count)
            if tuple(serials) != self.model.body_at(number):
                raise Violation("bodies", f"of batch {number} are another's")

    def stop(self, *, power: bool, mode: str = "any") -> None:
        process = self.checkpoints._process if self.checkpoints is not None else None
        if process is not None and process.job is not None and "checkpoint" not in self.busy and (
            not power and self.rng.random() < 0.4
        ):  # fmt: skip
            # The process goes on until it sees that its broker is gone.
            self.disk.between = None
            self.disk.crash_at_write = self.disk.crash_at_sync = -1
            self.checkpoint_advance(process.job)
            self.trace.note("checkpoint", "behind its broker's death")
        super().stop(power=power, mode=mode)
        self.checkpoint = None
        self.checkpoints = None
        self.model.held.clear()

    def _compare(self, name: str, ring: Any, end_lsn: int) -> None:
        start = ring.start_lsn
        batches = [
            (stamp.bundle_lsn, stamp.lsn, stamp.epoch,
             Batch(stamp.stream, stamp.base_offset, stamp.count, stamp.control_kind,
                   bytes(content)))
            for stamp, content in ring.follow(start, ring.end_lsn)
            if stamp.control_kind in CONTROLS
        ]  # fmt: skip
        self.trace.note("recovered", name, start, ring.end_lsn, len(batches))
        if name != MAIN:
            self.model.recovered_beside(name, batches, start, end_lsn, power=self.power_lost)
        else:
            self.model.recovered(batches, start, end_lsn, power=self.power_lost)

    # --- the loop ------------------------------------------------------------------------------

    def _written(self, name: str, batches: list[Append], result: Any) -> None:
        mine = [taken(append) for append in batches]
        bundle = Bundle(result.lsn, result.end_lsn, self.epoch, mine)
        self.trace.note(
            "append", result.end_lsn, [(one.stream, one.base, one.count) for one in mine]
        )
        if name != MAIN:
            self.model.appended_beside(name, bundle)
            return
        self.model.appended(bundle)
        if bundle.concerns:
            self.checkpoints.parts.add(result.lsn, result.end_lsn)

    def _append(self, together: list[AppendBundle], refused: dict[str, AppendRefused]) -> None:
        super()._append(together, refused)
        if refused:
            self.model.state.unordered = True

    def _uncertain(self, name: str, batches: list[Append]) -> None:
        unsure = [taken(append) for append in batches]
        if name != MAIN:
            self.model.ring(name).unsure.append(unsure)
        else:
            self.model.uncertain(unsure)

    def pump(self) -> None:
        if not self.pumping and self.checkpoints is not None:
            self.checkpoints.tick(self._now())
        super().pump()

    def _do(self, ready: Ready) -> None:
        self.model.turn_lsn = self.model.end_lsn
        super()._do(ready)
        for wanted in ready.bodies:
            self._later(self._reader(self._reading_bodies(wanted)), self.rng.randint(50, 5_000))
        for name, pin, stream, offset in ready.pins:
            if offset is None:
                self.rings[name].unpin(pin)
            else:
                self.rings[name].pin(pin, stream, offset)
        self.model.judge(self.links)

    def _sync(self, name: str) -> None:
        super()._sync(name)
        if self.checkpoints is not None and name == MAIN:
            self.checkpoints.synced(self.rings[name].synced_lsn)

    def close(self) -> bool:
        """Close the rings with their marks of an orderly end; False: it cannot be done now."""
        if self.disk.crash_at_write >= 0 or self.disk.crash_at_sync >= 0 or self.disk.fail_syncs:
            return False
        if any(ring._syncing.locked() or ring.failure is not None for ring in self.rings.values()):
            return False
        self.disk.between = None
        try:
            for ring in self.rings.values():
                ring.close()
        except JournalError as error:
            # A full disk: it ends without the mark.
            self.trace.note("close failed", type(error).__name__)
        return True

    def pressure(self) -> None:
        """Have the checkpoint rest for a while, whatever it is asked."""
        self.trace.note("fault", "the checkpoint rests")
        self.busy.add("checkpoint")
        self._later(lambda: self.busy.discard("checkpoint"), 600_000)

    def _housekeeping(self) -> None:
        if any(ring._syncing.locked() for ring in self.rings.values()):
            # It may have to sync; another thread would wait, and here none could.
            self._later(lambda: self._thread("housekeeping", self._housekeeping), 1_000)
            return
        super()._housekeeping()

    def _reading_bodies(self, wanted: BodiesRead) -> Any:
        def act() -> None:
            found = self._bodies(wanted.numbers)
            self.trace.note("bodies", len(wanted.numbers), len(found))
            answer = BodiesFound(wanted.token, found)
            self._later(lambda: self.tell(lambda core: core.bodies(answer)), 100)

        return act

    def _bodies(self, numbers: tuple[int, ...]) -> dict[int, Any]:
        """Read bodies from the journal, and then from the tables, as the server's rings do."""
        batches = self.rings[MAIN].read_batches(MAIL_STREAM, numbers)
        found = {n: batch for n, batch in zip(numbers, batches, strict=True) if batch is not None}
        for number in numbers:
            if number not in found and number in self.stored:
                found[number] = self.stored[number]
        return found

    def _send(self, send: Send) -> None:
        super()._send(send)
        if send.link in self.held:
            self.model.blocked.add(send.link)

    def _lost(self, number: int) -> None:
        self.model.freed(number)
        super()._lost(number)

    def _close(self, number: int) -> None:
        self.model.freed(number)
        super()._close(number)


def taken(append: Append) -> Batch:
    """Return a batch as the model keeps it."""
    return Batch(
        append.stream, append.base_offset, append.count, append.control_kind,
        bytes(append.content),
    )  # fmt: skip
