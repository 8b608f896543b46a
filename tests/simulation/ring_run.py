"""Scenario `journal`: the real Ring alone over the simulated disk.

Owns a run that appends, syncs, reads, trims, crashes and recovers one ring, with work of other
threads in the middle of slow calls. The rule: after every opening the whole ring is compared with
the model; between them every read is. Source: docs/design.md, Journal.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgpack
from pyroaring import BitMap

from malamute_py.journal.errors import (
    BatchTooLarge,
    DiskFull,
    JournalError,
    JournalFailed,
    JournalFull,
)
from malamute_py.journal.mapping import Mappings
from malamute_py.journal.ring import Ring
from malamute_py.journal.types import Append, History, Recovery, RingSettings
from tests.simulation.clock import START_MS
from tests.simulation.disk import CrashNow, Disk
from tests.simulation.faults import plan_crash, power_mode, rot_something
from tests.simulation.model import Log, Model, Violation
from tests.simulation.records import Batch, Sent, Unreadable, decode_run, encode
from tests.simulation.storage import SimulatedStorage
from tests.simulation.trace import Trace

PRODUCER = 7
SEGMENT_BYTES = 65_536
EDGES = 0x5EC7
"""Salt for the draw of `edges`, apart from other draws, so that older seeds stay as they were."""
EDGE_BYTES = len(encode([Sent(0, PRODUCER, "s1", "a", None, 0, 8)])) + 96
"""A batch of one record of 8 bytes, its stamp included."""
UNREAD_MAX = 4
"""Runs that a slow peer has not taken yet."""


class RingRun:
    """One seed of the scenario."""

    tight_share = 0.15
    edge_share = 0.3

    def __init__(self, seed: int, *, steps: int = 0, trace: Trace | None = None) -> None:
        self.rng = Random(seed)
        self.trace = trace if trace is not None else Trace()
        self.steps = steps or self.rng.randint(40, 140)
        self.disk = Disk()
        self.disk.rng = self.rng
        self.storage = SimulatedStorage(self.disk)
        self.model = Model()
        self.model.idempotent.add(PRODUCER)
        rng = self.rng
        self.settings = RingSettings(
            segment_bytes=SEGMENT_BYTES,
            ring_bytes=SEGMENT_BYTES * rng.choice((3, 4, 6)),
            full="overwrite" if rng.random() < 0.85 else "refuse",
            index_interval_bytes=rng.choice((0, 512, 4096)),
            distinct_headers_max=rng.choice((2, 5, 1000)),
        )
        self.streams = list(range(1, rng.choice((2, 3, 6))))
        self.big = rng.random() < 0.6
        """True: large records, with which the ring laps."""
        self.tight = rng.random() < self.tight_share
        """True: batches of few sizes, so that a new epoch ends where a batch of the old one
        begins."""
        self.edges = self.tight and Random(seed ^ EDGES).random() < self.edge_share
        """True: batches end so that the next stamp lies over the border of two sectors."""
        self.weights = self._weights()
        self.epoch = 0
        self.serial = 0
        self.now_ms = START_MS
        self.ring: Any = None
        self.unread: list[tuple[Any, bytes]] = []
        """Runs that a slow peer has not taken yet, and what they were when they were read."""
        self.power_lost = False
        self.nested = False

    # --- the run ---------------------------------------------------------------------

    def run(self) -> None:
        """Run the seed. Raises Violation."""
        self.open()
        for _ in range(self.steps):
            self.now_ms += self.rng.randint(0, 50)
            if self.rng.random() < 0.03:
                # The journal trusts its caller for the time, and the caller never goes back.
                self.now_ms += 100_000
            self._guarded(self._step)
            self._look_at_unread()
            for number in list(self.ring.streams()):
                self.model.trimmed(self.model.log("", number), self.ring.first_offset(number))
        self.disk.capacity = 1 << 40
        self._crash(power=self.rng.random() < 0.5)

    def _look_at_unread(self) -> None:
        """Check that what was read stays as it is, whatever became of its segment."""
        if any(bytes(data) != was for data, was in self.unread):
            raise Violation("changed", "bytes changed that were read and not sent yet")

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except CrashNow:
            self.trace.note("crash", "planned")
            self._crash(power=self.rng.random() < 0.6)

    def _step(self) -> None:
        choose = self.rng.choices
        choose(list(self.weights), list(self.weights.values()))[0]()

    def _weights(self) -> dict[Callable[[], None], float]:
        tight = self.tight
        return {
            self._append: 62 if tight else 45,
            self._sync: 5 if tight else 17,
            self._prepare: 5 if tight else 10,
            self._read: 4 if tight else 12,
            self._write_back: 3,
            self._trim: 2,
            self._fault: 2,
            self._plan: 3,
            self._die: 8 if tight else 1.5,
            self._lose_power: 8 if tight else 2,
            self._close: 1,
            self.rot: 1.5,
        }

    def _write_back(self) -> None:
        self.disk.write_back(self.rng, self.rng.random())

    def _plan(self) -> None:
        self.trace.note("plan", plan_crash(self.disk, self.rng))

    def _die(self) -> None:
        self._crash(power=False)

    def _lose_power(self) -> None:
        self._crash(power=True)

    def rot(self) -> None:
        """Damage one synced batch before the tail."""
        hit = rot_something(self.disk, self.rng, self.model, "")
        if hit is not None:
            self.trace.note("rot", *hit)
            self.unread.clear()  # It hits the page cache, too, which a mapping shows.

    # --- opening ------------------------------------------------------------------------

    def open(self) -> None:
        """Open the ring, whatever it takes, and compare it with the model."""
        for _ in range(8):
            self.epoch += 1
            try:
                ring, recovery = Ring.open(
                    self.storage,
                    settings=self.settings,
                    epoch=self.epoch,
                    snapshot=self._snapshot,
                    entropy=self.rng.randbytes,
                    mappings=Mappings(part_bytes_min=1),
                )
            except CrashNow:
                self.trace.note("crash", "while opening")
                self._lose(power=self.rng.random() < 0.6)
                continue
            except JournalError as error:
                if self.disk.capacity < 1 << 40 or self.disk.fail_syncs:
                    self.disk.capacity = 1 << 40
                    self.disk.fail_syncs = 0
                    self.trace.note("open failed", type(error).__name__)
                    self._lose(power=False)
                    continue
                raise Violation("broken", f"the ring does not open: {error!r}") from error
            break
        else:
            raise Violation("stuck", "the ring was not opened in 8 attempts")
        self.ring = ring
        self._compare(recovery)
        self.power_lost = False

    def _snapshot(self) -> list[bytes]:
        tails = {log.number: log.tail for log in self.model.logs.values() if log.number}
        return [msgpack.packb(tails)]

    def _compare(self, recovery: Recovery) -> None:
        kept: dict[int, tuple[int, int, list[Batch]]] = {}
        missing: list[tuple[int, int, int]] = []
        for number, facts in self.ring.streams().items():
            batches, gaps = self._read_all(number, facts.first, facts.next)
            kept[number] = (facts.first, facts.next, batches)
            missing += [(number, low, high) for low, high in gaps]
        self.trace.note(
            "opened", self.epoch, recovery.end_lsn, recovery.clean,
            {number: state[:2] for number, state in kept.items()}, recovery.dropped,
        )  # fmt: skip
        self.model.recovered(
            "", kept, power=self.power_lost, end_lsn=recovery.end_lsn, missing=missing
        )
        self._compare_state(recovery)

    def _compare_state(self, recovery: Recovery) -> None:
        """Check that snapshot and later records add up to the tails that were found."""
        if recovery.unreadable_state or any(b.damaged for b in self.model.ring("").bundles):
            return
        tails: dict[int, int] = {}
        if recovery.snapshot:
            tails = msgpack.unpackb(b"".join(recovery.snapshot), strict_map_key=False)
        for produced in recovery.produced:
            if produced.lsn < recovery.snapshot_lsn:
                continue
            if produced.base_offset != tails.get(produced.stream, 0):
                raise Violation("lost", f"the recovered state has {tails}, then comes {produced}")
            tails[produced.stream] = produced.base_offset + produced.count
        for log in self.model.logs.values():
            if log.number and log.tail != tails.get(log.number, 0):
                raise Violation(
                    "lost", f"the recovered state has {tails}, {log.number} ends at {log.tail}"
                )

    def _read_all(
        self, number: int, first: int, end: int
    ) -> tuple[list[Batch], list[tuple[int, int]]]:
        batches: list[Batch] = []
        gaps: list[tuple[int, int]] = []
        position = first
        while position < end:
            history = self.ring.read(number, position, end, 1 << 20)
            batches += self._decode(history)
            gaps += [(gap.from_offset, gap.to_offset) for gap in history.gaps]
            if history.next <= position:
                raise Violation("stuck", f"reading stream {number} stays at {position}")
            position = history.next
        return batches, gaps

    @staticmethod
    def _decode(history: History) -> list[Batch]:
        batches: list[Batch] = []
        for run in history.runs:
            try:
                found = decode_run(run.data)
            except Unreadable as error:
                raise Violation("unreadable", str(error)) from error
            spans = [(batch.size, batch.base_offset, batch.count) for batch in found]
            if [tuple(span[1:]) for span in run.spans] != spans:
                raise Violation("unreadable", f"spans {run.spans} of a run with {spans}")
            batches += found
        return batches

    # --- ending ------------------------------------------------------------------------

    def _lose(self, *, power: bool) -> None:
        self.ring = None
        self.unread.clear()
        if power:
            mode = power_mode(self.rng)
            self.power_lost = True
            self.trace.note("power loss", mode)
            self.disk.power_loss(self.rng, mode)
        else:
            self.trace.note("process death")
            self.disk.crash()

    def _crash(self, *, power: bool) -> None:
        self._lose(power=power)
        if self.rng.random() < 0.2:
            self.trace.note("plan", plan_crash(self.disk, self.rng))
        self.open()

    def _close(self) -> None:
        if self.model.ring("").failed:
            return
        try:
            self.ring.close()
        except JournalFailed as error:
            self.trace.note("close failed", type(error).__name__)
        else:
            self.trace.note("closed")
            for bundle in self.model.ring("").bundles:
                bundle.promised = bundle.promised or "closed in order"
        self._crash(power=self.rng.random() < 0.5)

    # --- steps -------------------------------------------------------------------------

    def _append(self) -> None:
        rng = self.rng
        parts: list[tuple[int, int, list[Sent]]] = []
        tails: dict[int, int] = {}
        single = self.tight or self.nested or rng.random() < 0.6
        for _ in range(1 if single else rng.randint(2, 4)):
            number = rng.choice(self.streams)
            log = self.model.log("", number)
            offset = tails.get(number, log.tail)
            records = [self._record(number) for _ in range(1 if self.tight else rng.randint(1, 5))]
            tails[number] = offset + len(records)
            parts.append((number, offset, records))
        appends = []
        for number, offset, records in parts:
            content = encode(records, producer_id=PRODUCER, producer_epoch=1, sequence=offset)
            appends.append(
                Append(
                    number,
                    offset,
                    len(records),
                    self.now_ms,
                    content,
                    int.from_bytes(content[8:12], "little"),
                )
            )
        failed_syncs = self.disk.failed_syncs
        try:
            result = self.ring.append(appends)
        except CrashNow:
            self.model.uncertain(
                "",
                [
                    (number, offset, [record.serial for record in records])
                    for number, offset, records in parts
                ],
            )
            raise
        except JournalFull:
            self.trace.note("append", "full")
            if self.settings.full != "refuse":
                raise Violation("refusal", "a ring that overwrites is full") from None
            return
        except BatchTooLarge:
            self.trace.note("append", "too large")
            if len(parts) == 1:
                raise Violation("refusal", "a single batch is too large") from None
            return
        except DiskFull:
            self.trace.note("append", "disk full")
            if self.disk.capacity >= 1 << 40 and self.disk.failed_syncs == failed_syncs:
                raise Violation("refusal", "the disk is not full") from None
            return
        except JournalFailed:
            self.trace.note("append", "failed")
            if not self.disk.failed_syncs or self.ring.failure is None:
                raise Violation("refusal", "the ring has not failed") from None
            self.model.ring("").failed = True
            return
        written = [
            decode_run(stamp + bytes(append.content))[0]
            for stamp, append in zip(result.stamps, appends, strict=True)
        ]
        self.model.appended("", written, result.end_lsn)
        self.trace.note("append", result.lsn, result.end_lsn, [part[:2] for part in parts])

    def _record(self, number: int) -> Sent:
        rng = self.rng
        self.serial += 1
        if self.edges:
            # All but the first eight bytes of the next stamp are in the sector after this batch's.
            end_lsn = self.ring.end_lsn
            length = 8 + (504 - end_lsn - EDGE_BYTES) % 512
        elif self.tight:
            length = rng.choice((8, 16))
        else:
            length = rng.choice((8, 30, 600, 6000)) if self.big else rng.randint(8, 80)
        record = Sent(
            self.serial, PRODUCER, f"s{number}",
            "a" if self.edges else rng.choice(("a", "a.b", "c.d", "e")), None, 0, length,
        )  # fmt: skip
        self.model.send(record)
        return record

    def _between(self, what: str) -> None:
        """Let other threads run while a slow call is under way."""
        if self.nested or self.rng.random() < 0.6 or loop_would_wait(self.ring, 32_000):
            return
        self.nested = True
        self.trace.note("meanwhile", what)
        try:
            if self.rng.random() < 0.8 or what == "read":
                self._append()
            else:
                self._read()
        finally:
            self.nested = False

    def _slow(self, action: Any) -> Any:
        self.disk.between = self._between
        try:
            return action()
        finally:
            self.disk.between = None

    def _sync(self) -> None:
        before = self.ring.synced_lsn
        try:
            synced = self._slow(self.ring.sync)
        except JournalFailed:
            self.trace.note("sync", "failed")
            self.model.ring("").failed = True
            return
        self.trace.note("sync", synced)
        if synced < before:
            raise Violation("lost", f"synced went back from {before} to {synced}")
        for bundle in self.model.ring("").bundles:
            if bundle.end_lsn <= synced and not bundle.promised:
                bundle.promised = f"synced up to {synced}"

    def _prepare(self) -> None:
        budget = self.rng.choice((4096, 65_536, 1 << 20))
        for _ in range(self.rng.randint(1, 40)):
            try:
                more = self._slow(lambda: self.ring.prepare_step(budget))
            except (DiskFull, JournalFailed, OSError) as error:
                self.trace.note("prepare", type(error).__name__)
                if isinstance(error, JournalFailed):
                    self.model.ring("").failed = True
                return
            if not more:
                break
        self.trace.note("prepare", budget)

    def _trim(self) -> None:
        log = self._some_log()
        if log is None:
            return
        offset = self.rng.randint(log.first, log.tail)
        self.trace.note("remove before", log.number, offset)
        try:
            self.ring.remove_before(log.number, offset=offset)
        except JournalFailed:
            return
        facts = self.ring.streams()[log.number]
        if facts.first > offset and facts.first > self._first(log, offset):
            raise Violation("lost", f"asked to remove before {offset}, first is {facts.first}")
        self.model.trimmed(log, facts.first)

    def _first(self, log: Log, at_least: int) -> int:
        return max(log.first, at_least)

    def _fault(self) -> None:
        draw = self.rng.random()
        if draw < 0.35:
            self.disk.fail_syncs = 1
            self.trace.note("fault", "the next sync fails")
        elif self.disk.capacity < 1 << 40:
            self.disk.capacity = 1 << 40
            self.trace.note("fault", "space again")
        else:
            self.disk.capacity = self.disk.used() + self.rng.choice((0, 1000, SEGMENT_BYTES))
            self.trace.note("fault", "disk full")

    def _some_log(self) -> Log | None:
        logs = [log for log in self.model.logs.values() if log.number and log.tail]
        return self.rng.choice(logs) if logs else None

    def _read(self) -> None:
        log = self._some_log()
        if log is None:
            return
        low = self.rng.randint(max(0, log.first - 3), log.tail)
        high = self.rng.randint(low, log.tail)
        subject = self.rng.choice(("", "a.b", "c.d"))
        candidates = _candidates(subject) if subject else None
        budget = self.rng.choice((1, 2000, 1 << 20))
        history = self._slow(
            lambda: self.ring.read(log.number, low, high, budget, candidates=candidates)
        )
        facts = self.ring.streams().get(log.number)
        if facts is not None:
            # Except for a stream whose every record a recovery has dropped.
            self.model.trimmed(log, facts.first)
        self.trace.note("read", log.number, low, high, history.next, history.gaps)
        self.unread += [(run.data, bytes(run.data)) for run in history.runs]
        del self.unread[:-UNREAD_MAX]
        self.judge(log, history, low, high, subject)

    def judge(self, log: Log, history: History, low: int, high: int, subject: str) -> None:
        """Compare one read with the model."""
        shown: set[int] = set()
        for batch in self._decode(history):
            if batch.stream != log.number:
                raise Violation("wrong_record", f"a batch of stream {batch.stream} in {log.number}")
            for row in batch.rows:
                entry = log.entries.get(row.offset)
                if entry is None or (entry.serial, entry.epoch) != (row.serial, batch.epoch):
                    raise Violation(
                        "wrong_record", f"stream {log.number}, offset {row.offset}: {row}, {entry}"
                    )
                if row.offset in shown:
                    raise Violation("twice", f"offset {row.offset} twice in one read")
                shown.add(row.offset)
        gaps = set()
        for gap in history.gaps:
            for offset in range(gap.from_offset, gap.to_offset):
                if not self.model.gone(log, offset):
                    raise Violation(
                        "hole_called_gap", f"{gap}, but {offset} is there, first {log.first}"
                    )
                gaps.add(offset)
        if low < high and history.next <= low and self._knows(log, low, high):
            raise Violation("stuck", f"a read of [{low}, {high}) came to {history.next}")
        for offset in range(low, min(history.next, high)):
            if offset in shown or offset in gaps:
                continue
            record = self.model.sent[log.entries[offset].serial]
            if subject and record.subject != subject:
                continue
            raise Violation(
                "gap_called_hole",
                f"stream {log.number}: [{low}, {history.next}) lacks {offset}, first {log.first}",
            )

    def _knows(self, log: Log, low: int, high: int) -> bool:
        """Whether the ring must know of offsets in [low, high).

        The ring has no place for a stream of which a recovery found nothing but damage, until
        something more is appended.
        """
        return log.number in self.ring.streams() or not all(
            self.model.gone(log, offset) for offset in range(low, high)
        )


def loop_would_wait(ring: Any, room: int) -> bool:
    """Whether appending `room` bytes now could need a lock that another thread holds.

    A real loop would wait for it; here no thread could release it.
    """
    space = ring._space
    held = space.preparing.locked() or ring._syncing.locked()
    turns = -(-max(0, room - -ring.end_lsn % SEGMENT_BYTES) // (SEGMENT_BYTES // 2))
    return bool(held and len(space.spares) < turns)


def _candidates(subject: str) -> Any:
    def candidates(index: Any) -> BitMap:
        found = BitMap()
        for keys, entries in index.subjects():
            if subject in keys if index.exact else any(subject.startswith(key) for key in keys):
                found |= entries
        found &= index.subject(subject)
        return found

    return candidates
