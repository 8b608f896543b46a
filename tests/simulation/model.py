"""The model: what the log must hold, and what may be seen of it.

Owns a second copy of every ring, kept as plain dictionaries from the appends that the journal
reported, and the promises that were made about it. The rule: the model never asks the code under
test what is right; it compares. Each violation has one code and one sentence, in VIOLATIONS.
Source: docs/design.md (Journal; Promises; Flow control).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation.records import Batch, Sent

VIOLATIONS = {
    "lost": "a confirmed record is gone though its level promised that it survives",
    "lost_seen": "a record that a durable reader had seen is gone",
    "changed": "bytes that were read changed before a slow peer had taken them",
    "ghost": "a record appeared in the log that nobody sent, or that an earlier recovery dropped",
    "reused": "one (stream, epoch, offset) carried two different records",
    "half_bundle": "a part of an atomic bundle survived without the rest",
    "hole": "the log lost a record from its middle, or skipped an offset",
    "order": "records of one producer are not in the order in which it sent them",
    "twice": "an idempotent producer's record is in the log twice",
    "time": "append time went back",
    "wrong_confirm": "a confirm names a position that holds another record, or the wrong level",
    "wrong_duplicate": "a confirm of a duplicate does not point to the original",
    "cover": "a delivery does not begin where the one before it ended",
    "gap_called_hole": "a record that was to be delivered is missing inside a cover",
    "hole_called_gap": "a gap was announced though the records are there",
    "not_selected": "a record was delivered that the subscription does not select",
    "wrong_record": "a delivery shows another record at an offset than the log holds",
    "credit": "more was delivered than the credit allows",
    "early": "a durable reader was shown what is not durable",
    "rewound": "rewound was announced, or left out, against the log's epochs",
    "start": "a subscription begins at another offset than it asked for",
    "unreadable": "bytes were delivered or kept that are not whole, valid batches",
    "removed": "a record was shown after it had been removed",
    "aged": "a record was shown past the age or the number that its stream keeps",
    "too_many": "more was removed than was asked for, or than the stream's bounds take",
    "retention": "the ring dropped history that its size has room for",
    "tables": "the recovered tables are not what the log makes",
    "half_step": "a part of an atomic step was appended without the rest",
    "after_end": "something was handed out after it had left its mailbox, queue or group",
    "two_hands": "something was handed out while another had it",
    "ended_twice": "a request ended twice, or a message left its mailbox twice",
    "attempts": "the count of attempts fell, or skipped",
    "expired": "something was handed out after its expiry, or before it was due",
    "bodies": "the body of something that is there is gone, or another's",
    "refused_kept": "a refused command took effect",
    "checkpoint": "the checkpoint failed without cause, or is ahead of what is durable",
    "unseen": "something was acknowledged that was never shown to a program",
    "late": "what a lost link had in hand came back by the end of its lease only",
    "since": "a cursor was moved though it did not stand where the mover said",
    "limit": "a mailbox took more than its bound",
    "place": "the place of an exclusive group went to another within its holder's window",
    "done_before": "a record counts as done in a group before it was appended",
    "dead": "a request became a dead letter without cause",
    "wrong_reply": "a call got the answer to another, or one that no worker gave",
    "unlawful": "a call ended by an error that is none of those it may end by",
    "key": "a key is another than its newest record says, or a newest record is gone",
    "stale": "a key was changed, or refused, against its revision",
    "rolled_back": "a record was shown of a transaction that was not committed",
    "untold": "who was in a stream or a group that was removed or reset was not told",
    "generation": "a stream that was made again is taken for the one before it",
    "settings": "a setting is another than the edits of it make",
    "half": "a part of a transaction is in its streams without the rest",
    "given_up": "an operator or a client was told wrongly which records were given up",
    "stuck": "after all faults ended something that was owed never came",
    "refusal": "a command was refused that had to be accepted",
    "broken": "the code under test raised an error that nothing of the fault model explains",
}
"""Code -> the violated rule, in words."""

LOST_RECORDS_A_BYTE = 8_192
"""Offsets left out for each byte that may have held records. Source: FORMAT.md, row M6."""


class Violation(Exception):
    """The code under test did what it must never do."""

    def __init__(self, code: str, facts: str) -> None:
        super().__init__(f"{VIOLATIONS[code]}: {facts}")
        self.code = code
        self.facts = facts


@dataclass(slots=True)
class Entry:
    """One record at its place in a log."""

    serial: int
    epoch: int
    append_time_ms: int
    bundle: Bundle


@dataclass(slots=True)
class Bundle:
    """The batches of one append; parts are (stream number, base offset, count)."""

    ring: str
    lsn: int
    end_lsn: int
    epoch: int
    parts: tuple[tuple[int, int, int], ...]
    batch_lsns: tuple[int, ...] = ()
    synced_hint: int = 0
    """The synced LSN in its stamps."""
    promised: str = ""
    """Reason why it must survive a power loss; empty: it need not."""
    damaged: bool = False
    """True: bit rot or a bad sector hit it: it may be missing, by name."""


@dataclass(slots=True)
class Log:
    """One stream as it must be."""

    number: int
    ring: str
    name: str = ""
    entries: dict[int, Entry] = field(default_factory=dict)
    """Offset -> entry; entries that retention dropped stay here, to tell a gap from a hole."""
    tail: int = 0
    first: int = 0
    """The first offset that the journal named last; it never goes back."""
    serials: dict[int, int] = field(default_factory=dict)
    """Serial -> offset of the first time."""
    last_time_ms: int = 0
    epochs: list[tuple[int, int]] = field(default_factory=list)
    """(epoch, first offset), ascending, of the epochs that wrote something that is kept."""
    last_of_producer: dict[int, int] = field(default_factory=dict)
    seen: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, offset) -> serial that was shown or confirmed to a client, for ever."""
    promised_tail: int = 0
    """End of the log that a durable reader was told."""
    synced_tail: int = 0
    """End of what the journal has said that the disk holds."""
    visible_tail: int = 0
    """Part of that which the core knows."""
    memory: bool = False
    """True: nothing of it outlives the process."""


@dataclass(slots=True)
class RingTruth:
    """The bundles of one ring, in order of LSN; those gone by retention stay."""

    name: str
    bundles: list[Bundle] = field(default_factory=list)
    uncertain: list[list[tuple[int, int, list[int]]]] = field(default_factory=list)
    """Bundles of which a crash hides whether they were written: (stream, offset, serials)."""
    failed: bool = False
    """True: a sync failed in this opening: data that was not promised may be dropped by name."""
    synced: int = 0
    """How many of the bundles are synced."""
    told: int = 0
    """How many of the synced bundles the core knows."""


class Named:
    """The offsets that a ring names as damaged, in ranges."""

    def __init__(self, missing: Iterable[tuple[int, int, int]]) -> None:
        self._ranges = list(missing)
        self.left_out: dict[int, tuple[int, int]] = {}
        """Stream -> [from, to): offsets after its last record that no record gets."""

    def leave_out(self, number: int, last: int, following: int) -> None:
        """Note offsets named after the last record of a stream: no damage of a known record."""
        for low, high in [(low, high) for n, low, high in self._ranges if n == number]:
            if high == following and low >= last:
                self._ranges.remove((number, low, high))
                self.left_out[number] = (low, high)

    def __contains__(self, place: tuple[int, int]) -> bool:
        number, offset = place
        return any(n == number and low <= offset < high for n, low, high in self._ranges)

    def covers(self, number: int, offset: int) -> bool:
        """Whether a hole at this offset is named."""
        low, high = self.left_out.get(number, (0, 0))
        return low <= offset < high or (number, offset) in self


class Model:
    """All rings, logs, sends and promises of one run."""

    def __init__(self) -> None:
        self.sent: dict[int, Sent] = {}
        self.idempotent: set[int] = set()
        """Producers whose records may be in the log only once and in order."""
        self.ordered: set[int] = set()
        """Producers that never repeat: the order holds for them, too."""
        self.rings: dict[str, RingTruth] = {}
        self.logs: dict[tuple[str, int], Log] = {}
        self.by_name: dict[str, Log] = {}
        self.begun_high: dict[str, tuple[int, int]] = {}
        """Streams without a record whose offsets begin after damage -> recovery since which this is
        known, and where."""
        self.confirmed = 0
        self.delivered = 0
        self.recoveries = 0

    # --- sends ---------------------------------------------------------------------

    def send(self, record: Sent) -> None:
        """Note that a client is about to send this record."""
        self.sent[record.serial] = record

    def ring(self, name: str) -> RingTruth:
        """Find or make the truth of a ring."""
        found = self.rings.get(name)
        if found is None:
            found = self.rings[name] = RingTruth(name)
        return found

    def log(self, ring: str, number: int) -> Log:
        """Find or make the truth of a stream."""
        found = self.logs.get((ring, number))
        if found is None:
            found = self.logs[ring, number] = Log(number, ring)
        return found

    # --- what the journal says that it did ---------------------------------------------

    def appended(self, ring: str, batches: list[Batch], end_lsn: int) -> None:
        """Enter a bundle that the journal took, and check it against everything before."""
        truth = self.ring(ring)
        head = batches[0]
        bundle = Bundle(
            ring,
            head.lsn,
            end_lsn,
            head.epoch,
            tuple((batch.stream, batch.base_offset, batch.count) for batch in batches),
            tuple(batch.lsn for batch in batches),
            max(batch.synced_lsn for batch in batches),
        )
        if truth.bundles and head.lsn < truth.bundles[-1].end_lsn:
            raise Violation(
                "reused", f"ring {ring} appended at LSN {head.lsn} inside an earlier bundle"
            )
        truth.bundles.append(bundle)
        for batch in batches:
            if batch.control_kind == 0:
                self._enter(ring, batch, bundle)

    def _enter(self, ring: str, batch: Batch, bundle: Bundle) -> None:
        log = self.log(ring, batch.stream)
        if log.tail < 0 or (not log.entries and ring.startswith("memory")):
            log.tail = log.first = batch.base_offset
        elif not log.entries and log.tail == 0 and batch.rows:
            sent = self.sent.get(batch.rows[0].serial)
            if sent is not None:
                log.tail = self.begins_at(ring, sent.stream, batch.base_offset)
        if batch.base_offset != log.tail:
            raise Violation(
                "hole" if batch.base_offset > log.tail else "reused",
                f"stream {log.name or log.number}: a batch was appended at offset "
                f"{batch.base_offset}, the tail is {log.tail}",
            )
        if batch.append_time_ms < log.last_time_ms:
            raise Violation(
                "time",
                f"stream {log.name or log.number}: {batch.append_time_ms} at offset "
                f"{batch.base_offset} after {log.last_time_ms}",
            )
        log.last_time_ms = batch.append_time_ms
        if not log.epochs or log.epochs[-1][0] != batch.epoch:
            if log.epochs and log.epochs[-1][0] > batch.epoch:
                raise Violation(
                    "reused", f"stream {log.name}: epoch {batch.epoch} after {log.epochs[-1]}"
                )
            log.epochs.append((batch.epoch, batch.base_offset))
        for row in batch.rows:
            sent = self.sent.get(row.serial)
            if sent is None or sent.subject != row.subject or sent.length != row.length:
                raise Violation("ghost", f"offset {row.offset} of stream {log.name}: {row}")
            if not log.name:
                log.name = sent.stream
                log.memory = log.ring.startswith("memory")
                self.by_name[sent.stream] = log
            elif log.name != sent.stream:
                raise Violation(
                    "ghost", f"a record sent to {sent.stream} is in {log.name} at {row.offset}"
                )
            self._order(log, sent, row.offset)
            log.entries[row.offset] = Entry(row.serial, batch.epoch, batch.append_time_ms, bundle)
            self.show(log, batch.epoch, row.offset, row.serial)
        log.tail = batch.base_offset + batch.count

    def _order(self, log: Log, sent: Sent, offset: int) -> None:
        known = log.serials.get(sent.serial)
        if known is not None and sent.producer in self.idempotent:
            raise Violation(
                "twice", f"record {sent.serial} is at {known} and at {offset} of {log.name}"
            )
        if sent.producer in self.ordered:
            last = log.last_of_producer.get(sent.producer, -1)
            if sent.serial <= last:
                raise Violation(
                    "order",
                    f"stream {log.name}, producer {sent.producer}: record {sent.serial} at "
                    f"{offset} after {last}",
                )
            log.last_of_producer[sent.producer] = sent.serial
        log.serials.setdefault(sent.serial, offset)

    def uncertain(self, ring: str, parts: list[tuple[int, int, list[int]]]) -> None:
        """Note a bundle whose append a crash hit: it may be there, whole, or not."""
        self.ring(ring).uncertain.append(parts)

    def show(self, log: Log, epoch: int, offset: int, serial: int) -> None:
        """Note a position that a client knows: it may never mean another record."""
        known = log.seen.setdefault((epoch, offset), serial)
        if known != serial:
            raise Violation(
                "reused",
                f"stream {log.name}, epoch {epoch}, offset {offset}: record {known}, "
                f"now record {serial}",
            )

    def synced(self, ring: str, lsn: int) -> None:
        """Note that the journal says that the ring is on disk up to here."""
        truth = self.ring(ring)
        truth.synced = self._advance(truth, truth.synced, lsn, "synced_tail")

    def told(self, ring: str, lsn: int) -> None:
        """Note that the core was told so: later than the disk, when an append had to sync."""
        truth = self.ring(ring)
        truth.told = self._advance(truth, truth.told, lsn, "visible_tail")

    def _advance(self, truth: RingTruth, place: int, lsn: int, tail: str) -> int:
        while place < len(truth.bundles) and truth.bundles[place].end_lsn <= lsn:
            for number, offset, count in truth.bundles[place].parts:
                log = self.log(truth.name, number)
                setattr(log, tail, max(getattr(log, tail), offset + count))
            place += 1
        return place

    def begins_at(self, ring: str, stream: str, told: int) -> int:
        """Return where the offsets of a stream without records begin; told: by the broker.

        At 0, unless damage in the ring may have held records of it: then after all that the damaged
        bytes can have held. That is decided once in a recovery, and never goes back.
        """
        since, known = self.begun_high.get(stream, (0, 0))
        truth = self.rings.get(ring)
        if since == self.recoveries or truth is None:
            return known
        if not any(bundle.damaged for bundle in truth.bundles):
            return known
        most = known + LOST_RECORDS_A_BYTE * truth.bundles[-1].end_lsn
        if not known <= told <= most:
            return known
        self.begun_high[stream] = self.recoveries, told
        return told

    def restarted(self, log: Log) -> None:
        """Note that a stream in memory has lost everything."""
        self.rings.pop(log.ring, None)
        log.entries.clear()
        log.serials.clear()
        log.last_of_producer.clear()
        log.epochs.clear()
        log.tail = -1
        log.first = log.last_time_ms = 0

    # --- promises --------------------------------------------------------------------

    def promise(self, log: Log, offset: int, why: str) -> None:
        """Note that the bundle with this offset must survive a power loss from now on."""
        entry = log.entries.get(offset)
        if entry is None:
            raise Violation("wrong_confirm", f"offset {offset} of {log.name} was never appended")
        if not entry.bundle.promised:
            entry.bundle.promised = why

    def gone(self, log: Log, offset: int) -> bool:
        """Whether a gap over this offset tells the truth."""
        if offset < log.first:
            return True
        entry = log.entries.get(offset)
        return entry is None or entry.bundle.damaged

    def damaged(self, stream: str, serial: int) -> bool:
        """Whether a record lies in damage."""
        log = self.by_name.get(stream)
        entries = () if log is None else log.entries.values()
        return any(entry.serial == serial and entry.bundle.damaged for entry in entries)

    def trimmed(self, log: Log, first: int) -> None:
        """Note that the journal says that its oldest record of the stream is this one."""
        if first < log.first:
            raise Violation(
                "ghost", f"the first offset of {log.name} went back from {log.first} to {first}"
            )
        log.first = first

    # --- recovery ----------------------------------------------------------------------

    def recovered(
        self,
        ring: str,
        kept: dict[int, tuple[int, int, list[Batch]]],
        *,
        power: bool,
        end_lsn: int,
        missing: Iterable[tuple[int, int, int]] = (),
    ) -> None:
        """Compare a ring that was opened after a crash with what it must hold.

        kept: stream number -> (first offset, next offset, its batches). power: the page cache was
        lost. end_lsn: end of the ring, as the ring says. missing: (stream number, from, to) that
        the journal names as damaged.
        """
        self.recoveries += 1
        truth = self.ring(ring)
        named = Named(missing)
        if any(bundle.damaged for bundle in truth.bundles):
            # Damaged parts may have held newer records of any stream: offsets are left out, as one
            # given twice would name two records.
            for number, (_, following, batches) in kept.items():
                last = batches[-1].base_offset + batches[-1].count if batches else 0
                named.leave_out(number, max(last, self.log(ring, number).first), following)
        present: dict[int, dict[int, Batch]] = {
            number: {batch.base_offset: batch for batch in batches}
            for number, (_, _, batches) in kept.items()
        }
        for log in self.logs.values():
            if log.ring == ring and log.number not in kept:
                log.first = 0
        self._adopt_uncertain(truth, kept)
        # Of the change log only the place is compared: clients see its effect.
        truth.bundles = [
            bundle
            for bundle in truth.bundles
            if bundle.lsn < end_lsn or any(number for number, _, _ in bundle.parts)
        ]
        self._check_bundles(truth, kept, present, named, power)
        for number, (first, following, batches) in kept.items():
            log = self.log(ring, number)
            # It may go back: a crash undoes a removal that was not written down yet, and so it
            # undoes the renaming of a segment for its next life.
            log.first = first
            self._check_log(log, first, following, batches, named)
            log.synced_tail = log.visible_tail = log.tail
        for bundle in truth.bundles:
            bundle.promised = bundle.promised or "kept by a recovery"
        truth.synced = truth.told = len(truth.bundles)
        truth.uncertain.clear()
        truth.failed = False

    def _adopt_uncertain(
        self, truth: RingTruth, kept: dict[int, tuple[int, int, list[Batch]]]
    ) -> None:
        for parts in truth.uncertain:
            found: list[Batch] = []
            absent = 0
            tails: dict[int, int] = {}
            for number, offset, serials in parts:
                batches = kept.get(number, (0, 0, []))[2]
                log = self.log(truth.name, number)
                match = [
                    batch
                    for batch in batches
                    if batch.base_offset == offset == tails.get(number, log.tail)
                    and [row.serial for row in batch.rows] == serials
                ]
                if match:
                    found.append(match[0])
                    tails[number] = offset + len(serials)
                else:
                    absent += 1
            if not found:
                continue
            if absent:
                raise Violation(
                    "half_bundle",
                    f"ring {truth.name}: {len(found)} of {len(parts)} batches of a bundle that a "
                    f"crash interrupted: {parts}",
                )
            found.sort(key=lambda batch: batch.lsn)
            last = found[-1]
            self.appended(truth.name, found, last.lsn + last.size)

    def _check_bundles(
        self,
        truth: RingTruth,
        kept: dict[int, tuple[int, int, list[Batch]]],
        present: dict[int, dict[int, Batch]],
        named: Named,
        power: bool,
    ) -> None:
        survivors: list[Bundle] = []
        dropped: list[Bundle] = []
        for bundle in truth.bundles:
            there = 0
            excused = 0
            for number, offset, count in bundle.parts:
                state = kept.get(number)
                if number == 0:
                    excused += 1
                elif offset in present.get(number, {}):
                    there += 1
                elif state is not None and offset < state[0]:
                    excused += 1
                elif state is not None and offset + count <= min(
                    self.log(truth.name, number).first, state[1]
                ):
                    # It was retired or removed before; a crash may have undone a part of that.
                    excused += 1
                elif bundle.damaged or (number, offset) in named:
                    excused += 1
                    if not bundle.damaged:
                        others = any(each.damaged for each in truth.bundles)
                        if bundle.promised or not others or not (power or truth.failed):
                            raise Violation(
                                "hole", f"{number} at {offset} is named damaged, it is not"
                            )
                        # The manifest knows these offsets. Beside damage the journal cannot tell
                        # that a power loss took them in order, and gives them to no other record.
                        bundle.damaged = True
            wanted = len(bundle.parts) - excused
            if wanted and 0 < there < wanted:
                raise Violation(
                    "half_bundle",
                    f"ring {truth.name}: {there} of {wanted} batches of the bundle at LSN "
                    f"{bundle.lsn} are there: {bundle.parts}",
                )
            if wanted and not there:
                dropped.append(bundle)
            else:
                if dropped and there:
                    raise Violation(
                        "hole",
                        f"ring {truth.name}: the bundle at LSN {dropped[0].lsn} is gone, the one "
                        f"at {bundle.lsn} is there",
                    )
                if not dropped or excused:
                    survivors.append(bundle)
        for bundle in dropped:
            if bundle.promised:
                code = "lost_seen" if bundle.promised.startswith("seen") else "lost"
                raise Violation(code, self._tell(bundle) + f" ({bundle.promised})")
            if not power and not truth.failed:
                raise Violation("lost", self._tell(bundle) + " (stored, and only the process died)")
        gone = {id(bundle) for bundle in dropped}
        truth.bundles = [bundle for bundle in truth.bundles if id(bundle) not in gone]
        if dropped:
            self._forget(truth.name, gone)

    def _tell(self, bundle: Bundle) -> str:
        number, offset, count = bundle.parts[0]
        name = self.log(bundle.ring, number).name
        return (
            f"ring {bundle.ring}, epoch {bundle.epoch}, LSN {bundle.lsn}: stream {name} "
            f"[{offset}, {offset + count})"
        )

    def _forget(self, ring: str, gone: set[int]) -> None:
        for log in self.logs.values():
            if log.ring != ring:
                continue
            lost = [offset for offset, entry in log.entries.items() if id(entry.bundle) in gone]
            if not lost:
                continue
            for offset in lost:
                entry = log.entries.pop(offset)
                if log.serials.get(entry.serial) == offset:
                    del log.serials[entry.serial]
            self.cut(log, min(lost))

    def cut(self, log: Log, tail: int) -> None:
        """End the log here: nothing beyond may be seen again."""
        if tail < log.promised_tail:
            raise Violation(
                "lost_seen",
                f"stream {log.name} ends at {tail}, a durable reader was told {log.promised_tail}",
            )
        for offset in range(tail, log.tail):
            entry = log.entries.pop(offset, None)
            if entry is not None and log.serials.get(entry.serial) == offset:
                del log.serials[entry.serial]
        log.tail = tail
        log.epochs = [pair for pair in log.epochs if pair[1] < tail]
        last = log.entries.get(tail - 1)
        log.last_time_ms = last.append_time_ms if last is not None else 0
        self._learn_producers(log)

    def _learn_producers(self, log: Log) -> None:
        """Find how far each producer has come, by the records that can be read."""
        log.last_of_producer = {}
        for entry in log.entries.values():
            if not entry.bundle.damaged:
                producer = self.sent[entry.serial].producer
                log.last_of_producer[producer] = max(
                    entry.serial, log.last_of_producer.get(producer, -1)
                )

    def _check_log(
        self,
        log: Log,
        first: int,
        following: int,
        batches: list[Batch],
        named: Named,
    ) -> None:
        if following < log.tail and following < log.first:
            raise Violation("lost", f"stream {log.name} ends at {following}, before its first")
        expected: int | None = None
        for batch in batches:
            if (
                expected is not None
                and batch.base_offset != expected
                and not all(
                    named.covers(log.number, offset)
                    for offset in range(expected, batch.base_offset)
                )
            ):
                raise Violation(
                    "hole", f"stream {log.name}: {batch.base_offset} follows {expected}"
                )
            expected = batch.base_offset + batch.count
            for row in batch.rows:
                entry = log.entries.get(row.offset)
                if entry is None or entry.serial != row.serial or entry.epoch != batch.epoch:
                    raise Violation(
                        "ghost",
                        f"stream {log.name}, offset {row.offset}: record {row.serial} of epoch "
                        f"{batch.epoch}; the log holds {entry}",
                    )
        for offset, entry in log.entries.items():
            # Its producer cannot be read any more: sent again, it is taken again.
            if entry.bundle.damaged and log.serials.get(entry.serial) == offset:
                del log.serials[entry.serial]
        self._learn_producers(log)
        left_out = named.left_out.get(log.number)
        unknown = left_out is not None and (left_out[0] <= log.tail or left_out[0] == first)
        if unknown and log.tail < following:
            # The newest records of the stream may have had their stamps damaged: nothing tells any
            # more which offsets they had, and none of these is given again.
            log.tail = following
        if following != log.tail:
            raise Violation(
                "ghost" if following > log.tail else "lost",
                f"stream {log.name} says that its next offset is {following}, it is {log.tail}",
            )
