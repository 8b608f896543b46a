"""Scenario `removal`: records that are trimmed, purged, grow too old, or are one too many.

Owns one seed of it: the faults of the scenario `broker`, a client that trims and purges streams,
and streams with bounds of age and number. The rules: what a confirmed TRIM or PURGE_SUBJECTS
removed is never shown again, whatever crashes; a record beyond a bound is never shown; no more goes
than was asked for. Source: SPEC.md, sections 8 and 13.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

from malamute_protocol import commands as c
from malamute_py.broker.limits import BrokerSettings
from malamute_py.broker.ready import MAIN, Ready, Send
from tests.simulation.broker_run import BrokerRun
from tests.simulation.clients import RETRYABLE, Client, Consumer
from tests.simulation.machine import SEGMENT_BYTES, Machine
from tests.simulation.model import Entry, Log, Model, Violation
from tests.simulation.network import Connection
from tests.simulation.readers import MEMORY_STREAM, Reader, selects

Purge: TypeAlias = tuple[list[Any], int]
"""Pattern, and the offset before which matching records go."""
PURGED: Final[tuple[list[Any], ...]] = (
    ["topic", "a.*"], ["topic", "c"], ["prefix", "a.b"], ["not", ["prefix", "a"]],
)  # fmt: skip


class RemovalModel(Model):
    """Records that were removed, and those that the bounds of streams take."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, int] = {}
        """Stream -> offset before which a client has asked to remove all records."""
        self.removed: dict[str, int] = {}
        """Stream -> the same, confirmed."""
        self.purges_asked: dict[str, list[Purge]] = {}
        self.purged: dict[str, list[Purge]] = {}
        """Stream -> purges that were asked for, and those that were confirmed."""
        self.ages: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        """Stream -> number of records that it keeps."""
        self.tails: dict[str, int] = {}
        """Stream -> end of the log at the last but one time that the core said what it wants: what
        a live reader is given at the last one came after it."""
        self.next_tails: dict[str, int] = {}

    def ask(self, stream: str, before: int) -> None:
        """Note that a client is about to ask for a trim: it may take effect from now on."""
        self.asked[stream] = max(before, self.asked.get(stream, 0))

    def confirm(self, stream: str, before: int) -> None:
        """Note that a trim was confirmed: it holds for ever."""
        self.removed[stream] = max(before, self.removed.get(stream, 0))

    def confirm_purge(self, stream: str, purge: Purge) -> None:
        """Note that a purge was confirmed: it holds for ever."""
        self.purged.setdefault(stream, []).append(purge)

    def takes(self, purges: dict[str, list[Purge]], log: Log, offset: int) -> bool:
        """Whether one of these purges takes a record."""
        entry = log.entries.get(offset)
        return entry is not None and any(
            offset < before and selects(pattern, self.sent[entry.serial])
            for pattern, before in purges.get(log.name, ())
        )

    def started(self) -> None:
        """Note that the broker has started: damage of the log may have taken a trim with it."""
        main = self.rings.get(MAIN)
        if main is not None and any(bundle.damaged for bundle in main.bundles):
            self.removed.clear()
            self.purged.clear()
        # The core begins with what was found, also what a crash hit while it was written.
        self.next_tails = {name: log.tail for name, log in self.by_name.items()}
        for stream, before in self.asked.items():
            log = self.by_name.get(stream)
            tail = 0 if log is None else log.tail
            # A trim that was lost with the records before it takes none of those that come.
            self.asked[stream] = max(min(before, tail), self.removed.get(stream, 0))
        for stream, purges in self.purges_asked.items():
            log = self.by_name.get(stream)
            tail = 0 if log is None else log.tail
            lasting = self.purged.get(stream, [])
            self.purges_asked[stream] = [
                purge if purge in lasting else (purge[0], min(purge[1], tail)) for purge in purges
            ]

    def beyond(self, log: Log, offset: int, now_ms: int, *, surely: bool = False) -> bool:
        """Whether a record is beyond a bound of its stream.

        surely: for a broker that has not heard yet of what was appended last.
        """
        entry = log.entries.get(offset)
        age_ms, count = self.ages.get(log.name, 0), self.counts.get(log.name, 0)
        old = bool(age_ms and entry and entry.append_time_ms < now_ms - age_ms)
        tails = self.tails if surely else self.next_tails
        return old or bool(count and offset < tails.get(log.name, 0) - count)


class RemovalMachine(Machine):
    """The broker's host; what it removes is judged."""

    model: Any
    tails_when_blocked: dict[int, dict[str, int]]
    """Link -> the tails by which its next message is judged: that one was written before the core
    heard that the link takes nothing, and it left when the link took something again."""

    def _do(self, ready: Ready) -> None:
        # What the core sends was decided before it hears of what is appended now.
        self.model.tails = self.model.next_tails
        self.model.next_tails = {name: log.tail for name, log in self.model.by_name.items()}
        super()._do(ready)

    def _send(self, send: Send) -> None:
        tails = self.model.tails
        self.model.tails = self.tails_when_blocked.pop(send.link, tails)
        try:
            super()._send(send)
        finally:
            self.model.tails = tails
        if send.link in self.held:
            self.tails_when_blocked[send.link] = self.model.next_tails

    def _recovered(self) -> None:
        self.tails_when_blocked = {}
        self.model.started()

    def _trim(self, ring: str, stream: int, offset: int) -> None:
        log = self.model.log(ring, stream)
        kept = max(self.model.asked.get(log.name, 0), self.first_of(log))
        for known in range(kept, offset):
            entry = log.entries.get(known)
            # Retention passes over damage.
            whole = entry is not None and not entry.bundle.damaged
            if whole and not self.model.beyond(log, known, self.latest_ms):
                raise Violation("too_many", f"stream {log.name}: everything before {offset} goes")
        super()._trim(ring, stream, offset)


class RemovalReader(Reader):
    """A reader whose stream loses records by right."""

    model: Any
    core_ms: Callable[[], int]
    """Time of the present broker, whose clock may be behind that of an earlier one."""

    def _oldest(self, log: Log, tail: int) -> tuple[int, int]:
        low, _ = super()._oldest(log, tail)
        high = max(low, self.model.asked.get(self.stream, 0))
        while high < log.tail and self.model.beyond(log, high, self.broker_ms()):
            high += 1
        if tail > log.tail and self.model.ages.get(log.name):
            # Damage left nothing of the stream: no record is young enough.
            high = tail
        return max(low, min(self.model.removed.get(self.stream, 0), tail)), min(high, tail)

    def _check_kept(self, log: Log, offset: int, entry: Entry) -> None:
        if offset < self.model.removed.get(self.stream, 0):
            raise self._fail("removed", f"offset {offset}, removed before {self.model.removed}")
        if self.model.takes(self.model.purged, log, offset):
            raise self._fail("removed", f"offset {offset}, purged by {self.model.purged}")
        now_ms = self.core_ms()
        if self.model.beyond(log, offset, now_ms, surely=True):
            raise self._fail("aged", f"offset {offset} of {entry.append_time_ms} at {now_ms}")

    def _is_gone(self, log: Log, offset: int) -> bool:
        return (
            super()._is_gone(log, offset)
            or offset < self.model.asked.get(self.stream, 0)
            or self.model.beyond(log, offset, self.broker_ms())
        )

    def _is_passed_over(self, log: Log, offset: int) -> bool:
        taken: bool = self.model.takes(self.model.purges_asked, log, offset)
        return taken

    def gap(self, command: c.Gap) -> None:
        asked = self.model.asked.get(self.stream, 0)
        if command.code == "purged" and command.to > asked:
            raise self._fail("too_many", f"{command}, but only what is before {asked} was to go")
        super().gap(command)


class Remover(Client):
    """Trims and purges streams at offsets of its own choice."""

    def __init__(self, world: Any, streams: list[str]) -> None:
        super().__init__(world, "remover")
        self.model: RemovalModel = world.model
        self.run: RemovalRun = world
        self.streams = streams
        self.asked: dict[int, Callable[[], None]] = {}
        """Tracker -> what is to be noted when it is confirmed."""
        self.trackers = 0

    def link_up(self, welcome: c.Welcome) -> None:
        self._work(self.connection)

    def link_down(self) -> None:
        self.asked.clear()

    def _work(self, connection: Connection | None) -> None:
        if self.connection is not connection or not self.open or self.world.quiet:
            return
        stream = self.rng.choice(self.streams)
        log = self.model.by_name.get(stream)
        if log is not None and log.tail > log.first and not log.memory:
            before = self.rng.randint(log.first, log.first + (log.tail - log.first + 1) // 2)
            self.trackers += 1
            if self.rng.random() < 0.5:
                self._trim(stream, before)
            else:
                self._purge(stream, self.rng.choice(PURGED), self.rng.randint(before, log.tail))
        delay_us = self.rng.choice((3_000, 20_000, 100_000))
        self.world.after(delay_us, lambda: self._work(connection))

    def _trim(self, stream: str, before: int) -> None:
        self.asked[self.trackers] = partial(self.model.confirm, stream, before)
        self.model.ask(stream, before)
        self.world.note("trim", stream, before)
        self.say(c.Trim(stream, before, self.trackers))

    def _purge(self, stream: str, pattern: list[Any], before: int) -> None:
        purge = pattern, before
        self.asked[self.trackers] = partial(self.model.confirm_purge, stream, purge)
        self.model.purges_asked.setdefault(stream, []).append(purge)
        self.world.note("purge", stream, pattern, before)
        self.say(c.PurgeSubjects(stream, pattern, before, self.trackers))

    def handle(self, command: c.Command, frames: list[bytes]) -> None:
        if isinstance(command, c.Refused) and command.code not in RETRYABLE | {"bad_start"}:
            raise Violation("refusal", f"a removal: {command}")

    def overheard(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None:
        for command in commands:
            if isinstance(command, c.Confirm) and command.tracker in self.asked:
                self.asked[command.tracker]()
                if not self.world.quiet and self.rng.random() < 0.1:
                    self.run.crash_soon()


class RemovalRun(BrokerRun):
    """One seed of the scenario."""

    model: Any

    def _model(self) -> Any:
        return RemovalModel()

    def _machine(self, settings: BrokerSettings) -> Any:
        return RemovalMachine(
            self.clock, self.model, self.trace, self.rng, settings,
            SEGMENT_BYTES * self.rng.choice((3, 4, 8)),
        )  # fmt: skip

    def _cast(self) -> None:
        super()._cast()
        rng = self.rng
        if rng.random() < 0.5:
            self.model.ages["aged"] = rng.choice((30, 200, 1_000))
            self.streams["aged"] = {"max_age_ms": self.model.ages["aged"]}
        if rng.random() < 0.5:
            self.model.counts["few"] = rng.choice((1, 4, 20))
            self.streams["few"] = {"max_records": self.model.counts["few"]}
        if rng.random() < 0.3:
            self.streams["own-aged"] = {"ring_bytes": 1 << 20, "max_age_ms": 100}
            self.model.ages["own-aged"] = 100

    def _begin(self) -> None:
        super()._begin()
        remover = Remover(self, [name for name in self.streams if name != MEMORY_STREAM])
        self.consumers.append(remover)
        remover.start()

    def crash_soon(self) -> None:
        """Crash before or after the journal has noted what it was just told."""
        delay_us = self.rng.choice((1, 500, 5_000))
        self.clock.after(delay_us, lambda: self._crash(power=self.rng.random() < 0.3))

    def _start(self) -> None:
        super()._start()
        if self.machine.running and self.consumers and not self.quiet:
            self._look_at_everything()

    def _look_at_everything(self) -> None:
        """Have a new reader read a stream from its oldest record to its tail."""
        looker = Consumer(
            self, f"c{len(self.consumers)}", self.rng.choice(list(self.streams)), ["all"],
            visibility=0, start=[0], window=(1000, 1 << 20), pace_us=50, until="tail",
        )  # fmt: skip
        self.consumers.append(looker)
        looker.start()

    def reader(self, name: str, stream: str, pattern: list[Any], visibility: int) -> Reader:
        reader = RemovalReader(
            self.model, name, stream, pattern, visibility,
            lambda: self.machine.latest_ms, self.machine.first_of, self.machine.visible_of,
            self.machine.told_first_of,
        )  # fmt: skip
        reader.core_ms = lambda: self.machine.core._shard.now_ms
        return reader
