"""The simulated shell: the real core and the real rings in one thread, under a schedule.

Owns one process of the broker after another: opening, the loop's work, and the work of its sync,
reader and housekeeping threads, each as entries of the schedule and, inside slow disk calls, in the
middle of one another. The rule: the model judges everything that leaves the core before the network
has it. Source: docs/design.md, The core and its shell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from malamute_protocol import commands as c
from malamute_py.broker.broker import Broker
from malamute_py.broker.limits import BrokerSettings
from malamute_py.broker.ready import (
    MAIN,
    Append,
    AppendBundle,
    Appended,
    AppendRefused,
    HistoryRead,
    HistoryRun,
    IndexAnswer,
    IndexFailure,
    IndexQuery,
    ReadFailed,
    ReadRange,
    Ready,
    RecoveredState,
    RingFacts,
    Send,
)
from malamute_py.journal.errors import JournalError, JournalFailed
from malamute_py.journal.ring import Ring
from malamute_py.journal.storage import MemoryStorage
from malamute_py.journal.types import RingSettings
from malamute_py.server.checkpointing.recovered import ring_facts
from malamute_py.server.journaling.queries import answer_query, by_key
from tests.simulation.clients import Client
from tests.simulation.clock import Clock
from tests.simulation.disk import CrashNow, Disk
from tests.simulation.model import Log, Model, Violation
from tests.simulation.network import Connection, Message
from tests.simulation.records import Batch, decode_run
from tests.simulation.ring_run import loop_would_wait
from tests.simulation.storage import SimulatedStorage
from tests.simulation.trace import Trace

SEGMENT_BYTES = 65_536
CHANGE = 6
_DECODER = msgspec.msgpack.Decoder(list[c.AnyCommand])
_ENCODER = msgspec.msgpack.Encoder()


def pack(commands: list[c.Command], frames: list[Any]) -> Message:
    """Pack one ZeroMQ message: real bytes, so that the ends share no object."""
    return [_ENCODER.encode(commands), *map(bytes, frames)]


def unpack(message: Message) -> tuple[list[c.Command], list[bytes]]:
    """Return commands and frames of a message."""
    return list(_DECODER.decode(message[0])), message[1:]


class Machine:
    """The broker's host: its disk outlives its processes."""

    holds = False
    """True: a checkpoint decides what of ring main may go."""

    def __init__(
        self, clock: Clock, model: Model, trace: Trace, rng: Any, settings: BrokerSettings,
        ring_bytes: int,
    ) -> None:  # fmt: skip
        self.clock = clock
        self.model = model
        self.trace = trace
        self.rng = rng
        self.settings = settings
        self.ring_bytes = ring_bytes
        self.disk = Disk()
        self.disk.rng = rng
        self.root = SimulatedStorage(self.disk)
        self.uuid = rng.randbytes(16)
        self.epoch = 0
        self.core: Any = None
        self.rings: dict[str, Any] = {}
        self.unopened: dict[str, str] = {}
        """Rings that could not be opened, and why: of no use until the next start."""
        self.told_firsts: dict[tuple[str, int], int] = {}
        """(ring, stream) -> the oldest offset that the core was told; absent: none, so 0."""
        self.links: dict[int, tuple[Client, Connection]] = {}
        self.held: dict[int, deque[Message]] = {}
        self.generation = 0
        """Number of the process: entries of the schedule that belong to a dead one do nothing."""
        self.running = False
        self.latest_ms = 0
        """The latest time that the broker's clock has shown."""
        self.sync_asked: set[str] = set()
        self.busy: set[str] = set()
        """Threads that are inside a piece of work."""
        self.wake_at_ms: int | None = None
        self.power_lost = False
        self.on_crash: Callable[[], None] = lambda: None
        """Called at a crash: the core's owner decides what it does, and when the machine starts
        again."""
        self.pumps = 0
        self.pumping = False
        self.told = False
        self.room_bytes = 10_000
        """Bytes that the loop may append while another thread is inside a slow call."""
        self.meanwhile = 0.1
        """How often other threads do something inside a slow disk call."""

    # --- one process begins and ends ----------------------------------------------------

    def start(self) -> None:
        """Open the journal, compare it with the model, and serve."""
        self.epoch += 1
        self.trace.note("start", self.epoch)
        facts: dict[str, RingFacts] = {}
        try:
            names = self.root.child("rings").children() or [MAIN]
            for name in names:
                facts[name] = self._open_ring(name, {})
        except JournalError as error:
            if self.disk.capacity < 1 << 40 or self.disk.fail_syncs:
                self.trace.note("start failed", type(error).__name__)
                self.disk.capacity = 1 << 40
                self.disk.fail_syncs = 0
                raise CrashNow from None
            raise Violation("broken", f"the journal does not open: {error!r}") from error
        self.core = Broker(
            self.settings, uuid=self.uuid, epoch=self.epoch,
            state=self._state(facts), random=self.rng.randbytes,
        )  # fmt: skip
        for name, offsets in self.core.unseen.items():
            self.rings[name].go_on(offsets)
        self.told_firsts.clear()
        for name in self.rings:
            self._learn_firsts(name)
        self._recovered()
        self.power_lost = False
        self.running = True
        self.core.tick(self._now())
        self._later(self._housekeeping, 5_000)
        self.pump()

    def _state(self, facts: dict[str, RingFacts]) -> RecoveredState:
        """Return the state that the core starts with."""
        return RecoveredState(facts)

    def _recovered(self) -> None:
        """Called when the core has taken up its state, and done nothing yet."""

    def stop(self, *, power: bool, mode: str = "any") -> None:
        """End the process without a word, or the whole machine."""
        self.running = False
        self.generation += 1
        self.core = None
        self.rings = {}
        self.unopened.clear()
        self.held.clear()
        self.sync_asked.clear()
        self.busy.clear()
        self.wake_at_ms = None
        self.pumping = False
        self.told = False
        for _, connection in list(self.links.values()):
            connection.drop()
        self.links.clear()
        if power:
            self.power_lost = True
            self.trace.note("power loss", mode)
            self.disk.power_loss(self.rng, mode)
        else:
            self.trace.note("process death")
            self.disk.crash()
        for log in self.model.logs.values():
            if log.memory:
                self.model.restarted(log)

    def _open_ring(self, name: str, settings: dict[str, Any]) -> RingFacts:
        memory = bool(settings.get("memory"))
        storage: Any = MemoryStorage(name) if memory else self.root.child("rings").child(name)
        ring_settings = RingSettings(
            segment_bytes=SEGMENT_BYTES,
            # A stream's own ring is far smaller than it may ask for, so that it laps.
            ring_bytes=3 * SEGMENT_BYTES if settings.get("ring_bytes") else self.ring_bytes,
            full=settings.get("full", "overwrite"),
            index_interval_bytes=1024,
        )
        ring, recovery = Ring.open(
            storage, settings=ring_settings, epoch=self.epoch,
            snapshot=self._snapshot, entropy=self.rng.randbytes,
            held=self.holds and name == MAIN,
        )  # fmt: skip
        self.rings[name] = ring
        if not memory:
            self._compare(name, ring, recovery.end_lsn)
        return ring_facts(name, ring, recovery)

    def _snapshot(self) -> list[bytes]:
        result: list[bytes] = self.core.snapshot() if self.core is not None else []
        return result

    def _compare(self, name: str, ring: Any, end_lsn: int) -> None:
        kept: dict[int, tuple[int, int, list[Batch]]] = {}
        missing: list[tuple[int, int, int]] = []
        for number, facts in ring.streams().items():
            if number == 0:
                continue
            batches: list[Batch] = []
            position = facts.first
            while position < facts.next:
                history = ring.read(number, position, facts.next, 1 << 20)
                for run in history.runs:
                    batches += decode_run(run.data)
                missing += [(number, gap.from_offset, gap.to_offset) for gap in history.gaps]
                position = history.next
            kept[number] = (facts.first, facts.next, batches)
        self.trace.note(
            "recovered", name, ring.end_lsn, {number: state[:2] for number, state in kept.items()}
        )
        self.model.recovered(name, kept, power=self.power_lost, end_lsn=end_lsn, missing=missing)

    # --- time ---------------------------------------------------------------------------

    def _now(self) -> int:
        now = self.clock.broker_ms()
        self.latest_ms = max(self.latest_ms, now)
        return now

    def _later(self, action: Callable[[], None], delay_us: int) -> None:
        generation = self.generation

        def act() -> None:
            if self.generation == generation and self.running:
                self.guarded(action)

        self.clock.after(delay_us, act)

    def guarded(self, action: Callable[[], None]) -> None:
        """Run code in the broker's process; a planned crash ends the process."""
        try:
            action()
        except Superseded:
            # The process died inside a nested call: the work under way is over.
            return
        except CrashNow:
            self.trace.note("crash", "planned")
            self.on_crash()

    # --- the loop -----------------------------------------------------------------------

    def arrive(self, number: int, message: Message) -> None:
        """Take a message at the broker's socket."""
        if self.running and number in self.links:
            self.guarded(lambda: self._receive(number, message))

    def _receive(self, number: int, message: Message) -> None:
        commands, frames = unpack(message)
        self.core.receive(number, "", commands, frames, self._now())
        self.pump()

    def tell(self, action: Callable[[Any], None]) -> None:
        """Tell the core something, then do what it wants."""
        if self.running:
            action(self.core)
            self.pump()

    def pump(self) -> None:
        """Do everything that the core wants done now."""
        if self.pumping:
            self.told = True
            return
        self.pumping = True
        self.pumps += 1
        try:
            for step in range(1000):
                # In the order of the real shell.
                works = step or self.pumps % 2  # In every other turn the work waits: it was long.
                ready: Ready = self.core.take_ready() if works else self.core.take_outgoing()
                self._do(ready)
                # As in the real shell: only answers that the core was given meanwhile make it want
                # something that it has not asked for.
                if ready.appends or ready.trims or self.told:
                    self.told = False
                    continue
                at_ms = self.core.wake_at_ms()
                if (step and not ready) or at_ms is None or at_ms > self.clock.broker_ms():
                    self._wake(at_ms)
                    return
            raise Violation("stuck", "the core has something to do for ever")
        finally:
            self.pumping = False

    def _wake(self, at_ms: int | None) -> None:
        if at_ms is None or (self.wake_at_ms is not None and self.wake_at_ms <= at_ms):
            return
        self.wake_at_ms = at_ms
        delay = max(1, at_ms - self.clock.broker_ms())
        self._later(self._tick, delay * 1000)

    def _tick(self) -> None:
        self.wake_at_ms = None
        self.core.tick(self._now())
        self.pump()

    def _do(self, ready: Ready) -> None:
        for name, settings in ready.rings:
            self._change_ring(name, settings)
        refused: dict[str, AppendRefused] = {}
        for together in self._neighbours(ready.appends):
            self._append(together, refused)
        for name in dict.fromkeys(bundle.ring for bundle in ready.appends):
            if name in self.rings:
                self._tell_firsts(name)
                self._ask_sync(name)
        for send in ready.sends:
            self._send(send)
        for read in ready.reads:
            self._later(self._reader(self._reading(read)), self.rng.randint(50, 5_000))
        for query in ready.queries:
            self._later(self._reader(self._asking(query)), self.rng.randint(50, 5_000))
        for number in ready.closes:
            self._close(number)
        for ring, stream, offset in ready.trims:
            self._trim(ring, stream, offset)
        for event in ready.events:
            if event.name in ("internal_error", "batch_quarantined"):
                # The core lives on, which is no reason for a run to pass.
                raise event.facts["error"]
            self.trace.note("event", event.name, sorted(event.facts.items(), key=str))

    def _change_ring(self, name: str, settings: dict[str, Any]) -> None:
        if settings.get("remove"):
            self.rings.pop(name, None)
        elif name not in self.rings:
            try:
                self._open_ring(name, settings)
            except (JournalError, OSError) as error:
                self.unopened[name] = str(error)
                self.trace.note("ring not opened", name, repr(error))
            else:
                self._learn_firsts(name)
                self.trace.note("ring", name)

    def _neighbours(self, bundles: list[AppendBundle]) -> list[list[AppendBundle]]:
        """Return the bundles of one ring that share one write, as in the real shell, or do not."""
        groups: list[list[AppendBundle]] = []
        merge = self.rng.random() < 0.7
        for bundle in bundles:
            if merge and groups and groups[-1][0].ring == bundle.ring:
                groups[-1].append(bundle)
            else:
                groups.append([bundle])
        return groups

    def _append(
        self,
        together: list[AppendBundle],
        refused: dict[str, AppendRefused],
    ) -> None:
        name = together[0].ring
        batches = [batch for bundle in together for batch in bundle.batches]
        error = refused.get(name)
        if error is None and name not in self.rings:
            error = AppendRefused(0, "journal_failed", self.unopened.get(name, "no such ring"))
        if error is None:
            try:
                result = self.rings[name].append(batches)
            except JournalError as caught:
                self.trace.note("append refused", name, repr(caught), len(together))
                if len(together) > 1:
                    # Only one of them may be at fault.
                    self._append(together[:1], refused)
                    self._append(together[1:], refused)
                    return
                error = refused[name] = AppendRefused(
                    0, getattr(caught, "code", "disk_full"), str(caught), 20
                )
            except CrashNow:
                self._uncertain(name, batches)
                raise
        if error is not None:
            for bundle in together:
                self.core.append_refused(AppendRefused(bundle.token, error.code, error.reason, 20))
            return
        self._written(name, batches, result)
        at = 0
        for bundle in together:
            stamps = result.stamps[at : at + len(bundle.batches)]
            at += len(bundle.batches)
            self.core.appended(Appended(bundle.token, stamps, result.end_lsn))

    def _written(self, name: str, batches: list[Append], result: Any) -> None:
        """Note bundles that the ring has taken; the core does not know yet."""
        written = [
            decode_run(stamp + bytes(append.content))[0]
            for stamp, append in zip(result.stamps, batches, strict=True)
        ]
        self.model.appended(name, written, result.end_lsn)
        self.model.synced(name, self.rings[name].synced_lsn)
        self.trace.note("append", name, result.end_lsn, [
            (batch.stream, batch.base_offset, batch.count) for batch in written
        ])  # fmt: skip

    def _uncertain(self, name: str, batches: list[Append]) -> None:
        parts = []
        for append in batches:
            if append.control_kind == 0:
                rows = _rows(bytes(append.content), append.base_offset, append.count)
                parts.append((append.stream, append.base_offset, rows))
        if parts:
            self.model.uncertain(name, parts)

    # --- sending ------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        found = self.links.get(send.link)
        if found is None:
            return
        client, connection = found
        message = pack(list(send.commands), list(send.frames))
        commands, frames = unpack(message)
        if not connection.open:
            # EHOSTUNREACH: the peer is gone.
            self.links.pop(send.link)
            self.held.pop(send.link, None)
            self._later(lambda: self._lost(send.link), 1)
            return
        client.overheard(connection, commands, frames)
        held = self.held.get(send.link)
        if held:
            held.append(message)
        elif not connection.down.send(message):
            self.held[send.link] = deque([message])
            self.trace.note("blocked", client.name)
            self.core.blocked(send.link)

    def _writable(self, number: int) -> None:
        found = self.links.get(number)
        held = self.held.get(number)
        if found is None or held is None:
            return
        while held:
            if not found[1].down.send(held[0]):
                return
            held.popleft()
        del self.held[number]
        self.core.writable(number)
        self.pump()

    def _lost(self, number: int) -> None:
        self.links.pop(number, None)
        self.held.pop(number, None)
        self.core.link_lost(number, self._now())
        self.pump()

    def _close(self, number: int) -> None:
        found = self.links.pop(number, None)
        self.held.pop(number, None)
        if found is not None:
            client, connection = found
            # Messages that were sent before still arrive; the client learns of the end by its BYE
            # or when it hears nothing any more.
            self.clock.after(200_000, lambda: client.lost(connection))

    def attach(self, client: Client, connection: Connection) -> None:
        """Make a connection."""
        number = connection.number
        self.links[number] = (client, connection)
        connection.down.writable = lambda: self._later(lambda: self._writable(number), 50)

    def dropped(self, connection: Connection) -> None:
        """Have the transport notice that a connection is gone."""
        number = connection.number
        if self.running and number in self.links:
            self.guarded(lambda: self._lost(number))

    # --- the other threads --------------------------------------------------------------

    def _between(self, what: str) -> None:
        """Let the rest of the world go on while a thread is inside a slow call."""
        if self.rng.random() >= self.meanwhile or any(
            loop_would_wait(ring, self.room_bytes) for ring in self.rings.values()
        ):
            return
        generation = self.generation
        between, self.disk.between = self.disk.between, None
        self.trace.note("meanwhile", what)
        for _ in range(self.rng.randint(1, 3)):
            self.clock.step()
            if self.generation != generation:
                raise Superseded
        self.disk.between = between

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        """Let a thread do one piece of work; it does only one at a time."""
        if name in self.busy:
            self._later(lambda: self._thread(name, work), 500)
            return
        self.busy.add(name)
        outer, self.disk.between = self.disk.between, self._between
        work()
        self.disk.between = outer
        self.busy.discard(name)

    def sync_delays(self, name: str) -> tuple[int, ...]:
        """Return the delays that a sync of a ring may have."""
        return (50, 400, 4_000, 30_000)

    def _ask_sync(self, name: str) -> None:
        if name not in self.sync_asked:
            self.sync_asked.add(name)
            delay = self.rng.choice(self.sync_delays(name))
            self._later(lambda: self._thread("sync", lambda: self._sync(name)), delay)

    def _reader(self, work: Callable[[], None]) -> Callable[[], None]:
        return lambda: self._thread("reader", work)

    def _sync(self, name: str) -> None:
        self.sync_asked.discard(name)
        ring = self.rings.get(name)
        if ring is None:
            return
        try:
            lsn = ring.sync()
        except JournalFailed as error:
            self.trace.note("sync failed", name)
            self.model.ring(name).failed = True
            self.core.ring_failed(name, error.code, str(error))
        else:
            self.trace.note("synced", name, lsn)
            self.model.synced(name, lsn)
            self.model.told(name, lsn)
            self.core.synced(name, lsn, self._now())
        self.pump()

    def _housekeeping(self) -> None:
        for name, ring in list(self.rings.items()):
            try:
                for _ in range(self.rng.randint(1, 30)):
                    if not ring.prepare_step(self.rng.choice((4096, 65_536))):
                        break
            except (JournalError, OSError) as error:
                self.trace.note("prepare", name, repr(error))
            self._tell_firsts(name)
        self.pump()
        self._later(
            lambda: self._thread("housekeeping", self._housekeeping),
            self.rng.choice((2_000, 10_000, 100_000)),
        )

    def _learn_firsts(self, name: str) -> None:
        """Note what the core is told of a ring that was just opened."""
        for number, facts in self.rings[name].streams().items():
            self._note_first(name, number, facts.first)

    def _note_first(self, ring: str, stream: int, first: int) -> None:
        """Note a first offset that the core is told, which never goes back."""
        self.told_firsts[ring, stream] = max(first, self.told_firsts.get((ring, stream), 0))

    def _tell_firsts(self, name: str) -> None:
        """Tell the core which segments the ring has given up."""
        for event in self.rings[name].take_events():
            if event.name == "segment_retired":
                firsts = event.facts["first_offsets"]
                self.trace.note("retired", name, event.facts["segment"], sorted(firsts.items()))
                for stream, first in firsts.items():
                    self._note_first(name, stream, first)
                self.core.trimmed(name, firsts)

    def _trim(self, ring: str, stream: int, offset: int) -> None:
        if ring not in self.rings:
            return
        try:
            self.rings[ring].remove_before(stream, offset=offset)
        except JournalError as error:
            self.trace.note("trim", ring, error.code)
            return
        first = self.rings[ring].streams()[stream].first
        self.trace.note("trimmed", ring, stream, offset, first)
        self._note_first(ring, stream, first)
        self.core.trimmed(ring, {stream: first})

    def _reading(self, read: ReadRange) -> Callable[[], None]:
        def act() -> None:
            ring = self.rings.get(read.ring)
            answer: HistoryRead | ReadFailed
            try:
                if ring is None:
                    raise JournalError("the ring is gone")
                history = ring.read(
                    read.stream, read.from_offset, read.end_offset, read.bytes_max,
                    candidates=by_key(read.candidates), client_time=read.client_time,
                    matches=read.matches, oldest_ms=read.oldest_ms, pinned=read.pinned,
                    rows=read.rows,
                )  # fmt: skip
            except JournalError as error:
                self.trace.note("read failed", str(error))
                answer = ReadFailed(read.token, error.code, str(error))
            else:
                self.trace.note(
                    "read", read.ring, read.stream, read.from_offset, read.end_offset,
                    history.next, history.gaps,
                )  # fmt: skip
                answer = HistoryRead(
                    read.token,
                    tuple(HistoryRun(run.data, run.spans, run.next) for run in history.runs),
                    history.next,
                    tuple(tuple(gap) for gap in history.gaps),
                )
            self._later(lambda: self.tell(lambda core: core.history(answer)), 100)

        return act

    def _asking(self, query: IndexQuery) -> Callable[[], None]:
        def act() -> None:
            value: Any
            try:
                value = answer_query(self.rings[query.ring], query)
            except JournalError as error:
                value = IndexFailure(error.code, str(error))
            self.trace.note("query", query.kind, query.stream)
            self.tell(lambda core: core.answered(IndexAnswer(query.token, value)))

        return act

    # --- for the judges -----------------------------------------------------------------

    def visible_of(self, log: Log) -> int:
        """Return the offset up to which the journal has said that the disk holds it."""
        ring = self.rings.get(log.ring)
        if ring is not None:
            self.model.synced(log.ring, ring.synced_lsn)
        return log.synced_tail

    def first_of(self, log: Log) -> int:
        """Return the oldest offset that the journal serves now."""
        ring = self.rings.get(log.ring)
        facts = ring.streams().get(log.number) if ring is not None else None
        return facts.first if facts is not None else log.first

    def told_first_of(self, log: Log) -> int:
        """Return the oldest offset that the journal serves, as far as the core was told."""
        return self.told_firsts.get((log.ring, log.number), 0)


class Superseded(BaseException):
    """The process died inside a nested call; the work under way is over."""


def _rows(content: bytes, base: int, count: int) -> list[int]:
    from tests.simulation.records import _decode_content

    crc = int.from_bytes(content[8:12], "little")
    return [row.serial for row in _decode_content(content, base, count, crc)]
