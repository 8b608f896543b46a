"""Judges of what one subscription may be shown: covers, gaps, selection, credit, visibility.

Owns the position of every reader of a run, from its first subscription on and over all its
reconnects. The rule: a message is judged when the broker hands it to the network, against the log
as it is then. Source: docs/design.md, Flow control; SPEC.md, section 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from malamute_protocol import commands as c
from tests.simulation.model import Entry, Log, Model, Violation
from tests.simulation.records import Batch, Sent, Unreadable, decode_run


def topic_matches(pattern: str, subject: str) -> bool:
    """Match a topic: `*` is one part, `#` one or more; a trailing `.*` also matches its parent."""
    wanted = pattern.split(".")
    parts = subject.split(".")
    if len(wanted) > 1 and wanted[-1] == "*" and _parts_match(wanted[:-1], parts):
        return True
    return _parts_match(wanted, parts)


def _parts_match(wanted: list[str], parts: list[str]) -> bool:
    if not wanted:
        return not parts
    if not parts:
        return False
    if wanted[0] == "#":
        return any(_parts_match(wanted[1:], parts[taken:]) for taken in range(1, len(parts) + 1))
    return wanted[0] in ("*", parts[0]) and _parts_match(wanted[1:], parts[1:])


def selects(pattern: list[Any], record: Sent) -> bool:
    """Whether a pattern selects a record: by the definition, not by the matcher."""
    kind, *rest = pattern
    if kind == "all":
        return True
    if kind == "topic":
        return topic_matches(rest[0], record.subject)
    if kind == "prefix":
        return record.subject.startswith(rest[0])
    if kind == "fields":
        have = record.fields or {}
        hits = [have.get(name) in value if value else name in have for name, *value in rest[1]]
        return all(hits) if rest[0] == "all" else any(hits)
    if kind == "and":
        return all(selects(part, record) for part in rest)
    if kind == "or":
        return any(selects(part, record) for part in rest)
    if kind == "not":
        return not selects(rest[0], record)
    raise AssertionError(f"the oracle has no pattern {kind}")


MEMORY_STREAM = "mem"
"""The stream that is in memory only: nothing there can be confirmed as synced."""


class Reader:
    """One reader over all its links; a link's subscription is judged from Subscribed on."""

    def __init__(
        self,
        model: Model,
        name: str,
        stream: str,
        pattern: list[Any],
        visibility: int,
        broker_ms: Callable[[], int],
        first_of: Callable[[Log], int],
        visible_of: Callable[[Log], int],
        told_first_of: Callable[[Log], int],
    ) -> None:
        self.model = model
        self.name = name
        self.stream = stream
        self.pattern = pattern
        self.visibility = visibility
        self.broker_ms = broker_ms
        """The latest time that the broker's clock ever showed: expired records stay expired."""
        self.first_of = first_of
        """The oldest offset that the journal holds right now."""
        self.visible_of = visible_of
        """The offset up to which the journal has truly synced."""
        self.told_first_of = told_first_of
        """The oldest offset that the core was told: housekeeping may have retired more since."""
        self.uuid = b""
        self.position = -1
        """The next offset; -1: nothing was seen yet."""
        self.epoch = 0
        self.start: list[Any] = [0]
        self.end = -1
        self.active = False
        self.credit_records = 0
        self.credit_bytes = 0
        self.used_records = 0
        self.used_bytes = 0
        self.newest_epoch = 0
        self.records = 0
        self.gaps = 0
        self.ended = False

    def _fail(self, code: str, facts: str) -> Violation:
        return Violation(code, f"reader {self.name} of {self.stream}: {facts}")

    @property
    def log(self) -> Log:
        """Return the stream's truth; an empty one before its first record."""
        found = self.model.by_name.get(self.stream)
        if found is None:
            found = Log(0, "", self.stream, memory=self.stream == MEMORY_STREAM)
            _, high = self.model.begun_high.get(self.stream, (0, 0))
            found.tail = found.synced_tail = found.visible_tail = found.promised_tail = high
        return found

    def _tail(self, log: Log) -> int:
        """Return where the part that it may see ends now."""
        return log.visible_tail if self.visibility else log.tail

    # --- a link's subscription begins ------------------------------------------------

    def subscribe(self, start: list[Any], credit_records: int, credit_bytes: int) -> None:
        """Note that the client is about to subscribe."""
        self.start = start
        self.credit_records, self.credit_bytes = credit_records, credit_bytes
        self.used_records = self.used_bytes = 0
        self.active = False

    def grant(self, credit_records: int, credit_bytes: int) -> None:
        """Note that the client has raised its credit."""
        self.credit_records = max(self.credit_records, credit_records)
        self.credit_bytes = max(self.credit_bytes, credit_bytes)

    def subscribed(self, command: c.Subscribed) -> None:
        """Judge where the subscription begins."""
        log = self.log
        if self.uuid and command.stream != self.uuid and not log.memory:
            raise self._fail("start", "the stream has another uuid than before")
        self.uuid = command.stream
        self.active = True
        kind = self.start[0]
        first = self.first_of(log)
        tail = self._tail(log)
        if not log.number and not log.memory:
            tail = self.model.begins_at("main", self.stream, command.tail)
        if command.tail != tail and not log.memory:
            raise self._fail("start", f"told that the tail is {command.tail}, it is {tail}")
        if self._resuming:
            expected, rewound = self._resume(log)
            asked = self.start[1]
            if command.next not in (expected, asked) and not log.memory:
                raise self._fail(
                    "start", f"resumed {self.start} at {command.next}, expected {expected}"
                )
            if rewound:
                # Announced by REWOUND before anything else.
                self.position = asked
            else:
                self.position = command.next
        else:
            # Retention may be ahead of what a durable reader is to see, and of what the core knows:
            # then a GAP follows.
            low, high = {0: self._oldest(log, tail), 1: (tail, tail)}.get(
                kind, (command.next, command.next)
            )
            if kind == 3 and not log.memory:
                self._by_time(log, command.next, first, tail)
            if not low <= command.next <= high and not log.memory:
                raise self._fail("start", f"{self.start} began at {command.next}, not {low}")
            self.position = command.next
        self.epoch = command.epoch
        self.end = command.end

    def _oldest(self, log: Log, tail: int) -> tuple[int, int]:
        """Return the least and the greatest offset at which a start at the oldest may begin."""
        oldest = min(self.told_first_of(log), tail)
        return oldest, oldest

    def _check_kept(self, log: Log, offset: int, entry: Entry) -> None:
        """Judge whether a record that is shown may still be there."""

    def _is_passed_over(self, log: Log, offset: int) -> bool:
        """Whether a cover may pass over a record that is there."""
        return False

    def _is_gone(self, log: Log, offset: int) -> bool:
        """Whether a gap over this offset tells the truth."""
        return self.model.gone(log, offset)

    def _by_time(self, log: Log, begins: int, first: int, tail: int) -> None:
        """Judge a start by append time: the first record at or after (or only after) it."""
        _, time_ms, inclusive = self.start
        late = time_ms if inclusive else time_ms + 1
        found = min(
            (offset for offset, entry in log.entries.items() if entry.append_time_ms >= late),
            default=tail,
        )
        # Retention may have moved on since the journal looked; a durable reader begins at its tail
        # when the records that it asked for are not visible yet.
        found = min(found, tail)
        while begins < found and self._is_gone(log, found - 1):
            found -= 1  # Its time cannot be read: the reader is told of the damage.
        if not found <= begins <= max(found, first):
            raise self._fail(
                "start", f"{self.start} began at {begins}, not {found}; first {first}, tail {tail}"
            )

    @property
    def _resuming(self) -> bool:
        return bool(self.start[0] == 2)

    def _resume(self, log: Log) -> tuple[int, bool]:
        following = self.start[1]
        epoch = self.start[2] if len(self.start) > 2 else 1 << 62
        later = [first for number, first in log.epochs if number > epoch]
        end = min([*later, self._tail(log)])
        if following <= end:
            return following, False
        # Records written anew from there on may be gone by retention: a GAP reports that.
        return end, True

    # --- deliveries --------------------------------------------------------------------

    def rewound(self, command: c.Rewound) -> None:
        """Judge a REWOUND: it must be owed, and lead to the end of what both know."""
        log = self.log
        if not self._resuming:
            raise self._fail("rewound", f"{command} after {self.start}")
        expected, owed = self._resume(log)
        if not owed and not log.memory:
            raise self._fail("rewound", f"{command}, but {log.epochs}, tail {log.tail} held it")
        if (command.from_, command.to) != (self.start[1], expected) and not log.memory:
            raise self._fail("rewound", f"{command}, expected {self.start[1]} to {expected}")
        if self.visibility and not log.memory and len(self.start) > 2:
            raise self._fail("lost_seen", f"a durable reader was rewound: {command}")
        self.position = command.to
        self.start = [2, command.to, command.epoch, self.uuid]

    def _covers(self, from_: int, following: int, what: str) -> None:
        if self._resuming:
            _, owed = self._resume(self.log)
            if owed and not self.log.memory:
                raise self._fail("rewound", f"{what} [{from_}, {following}) came without REWOUND")
            self.start = [0]
        if from_ != self.position:
            raise self._fail(
                "cover", f"{what} [{from_}, {following}) when the position was {self.position}"
            )
        if following < from_:
            raise self._fail("cover", f"{what} [{from_}, {following}) goes back")
        if self.end >= 0 and following > self.end:
            raise self._fail("cover", f"{what} up to {following} beyond the end {self.end}")

    def deliver(self, command: c.Deliver, frames: list[bytes]) -> None:
        """Judge one DELIVER with its frames."""
        self._covers(command.from_, command.next, "a delivery")
        data = b"".join(frames)
        try:
            batches = decode_run(data)
        except Unreadable as error:
            raise self._fail("unreadable", f"{command}: {error}") from error
        if command.rows is not None and len(batches) != 1:
            raise self._fail("unreadable", f"a row bitmap for {len(batches)} batches")
        log = self.log
        shown: set[int] = set()
        last = command.from_ - 1
        for batch in batches:
            self.newest_epoch = max(self.newest_epoch, batch.epoch)
            self._within_credit(batch, command)
            before = len(shown)
            last = self._batch(log, batch, command, shown, last)
            self.used_bytes += batch.size
            self.used_records += len(shown) - before
        self._missing(log, command.from_, command.next, shown)
        self.records += len(shown)
        self.model.delivered += len(shown)
        self._moved(log, command.next)

    def _within_credit(self, batch: Batch, command: c.Deliver) -> None:
        """Check credit: one more batch may begin while both credits are above the delivered."""
        if self.used_records >= self.credit_records or self.used_bytes >= self.credit_bytes:
            raise self._fail(
                "credit",
                f"{self.used_records} of {self.credit_records} records and {self.used_bytes} of "
                f"{self.credit_bytes} bytes were used before the batch at {batch.base_offset} in "
                f"[{command.from_}, {command.next})",
            )

    def _batch(self, log: Log, batch: Batch, command: c.Deliver, shown: set[int], last: int) -> int:
        rows = command.rows
        for index, row in enumerate(batch.rows):
            if rows is not None and not rows[index >> 3] >> (index & 7) & 1:
                continue
            if not command.from_ <= row.offset < command.next:
                if rows is None and not batch.flags & 2:
                    # A whole batch may reach over the edges of its cover.
                    continue
                raise self._fail("cover", f"offset {row.offset} in {command}")
            if row.offset <= last:
                raise self._fail("order", f"offset {row.offset} after {last}")
            last = row.offset
            entry = log.entries.get(row.offset)
            if entry is None or (entry.serial, entry.epoch) != (row.serial, batch.epoch):
                raise self._fail(
                    "wrong_record",
                    f"offset {row.offset}: record {row.serial} of epoch {batch.epoch}; the log "
                    f"holds {entry and (entry.serial, entry.epoch)}",
                )
            if entry.append_time_ms != row.append_time_ms:
                raise self._fail("time", f"offset {row.offset} shows another append time")
            self._check_kept(log, row.offset, entry)
            if not selects(self.pattern, self.model.sent[row.serial]):
                raise self._fail(
                    "not_selected", f"offset {row.offset}: {self.model.sent[row.serial]}"
                )
            self.model.show(log, batch.epoch, row.offset, row.serial)
            shown.add(row.offset)
        return last

    def cover(self, command: c.Cover) -> None:
        """Judge an empty cover."""
        self._covers(command.from_, command.next, "a cover")
        log = self.log
        self._missing(log, command.from_, command.next, set())
        self._moved(log, command.next)

    def gap(self, command: c.Gap) -> None:
        """Judge a GAP: every offset in it must be truly gone."""
        self._covers(command.from_, command.to, "a gap")
        log = self.log
        if log.name:
            self.model.trimmed(log, max(log.first, self.first_of(log)))
        if not log.memory:
            for offset in range(command.from_, command.to):
                if not self._is_gone(log, offset):
                    raise self._fail(
                        "hole_called_gap",
                        f"{command.code} [{command.from_}, {command.to}), but offset {offset} is "
                        f"there; the first is {log.first}",
                    )
        self.gaps += 1
        self._moved(log, command.to)

    def _missing(self, log: Log, from_: int, following: int, shown: set[int]) -> None:
        now_ms = self.broker_ms()
        for offset in range(from_, following):
            if offset in shown:
                continue
            entry = log.entries.get(offset)
            if entry is None:
                raise self._fail(
                    "gap_called_hole",
                    f"offset {offset} lies in the cover [{from_}, {following}), but the log ends "
                    f"at {log.tail}",
                )
            record = self.model.sent[entry.serial]
            if not selects(self.pattern, record):
                continue
            if record.expiry_ms and record.expiry_ms <= now_ms:
                continue
            if self._is_passed_over(log, offset):
                continue
            raise self._fail(
                "gap_called_hole",
                f"offset {offset} (record {entry.serial}, {record.subject}) is missing in the "
                f"cover [{from_}, {following}); the first is {self.first_of(log)}",
            )

    def _moved(self, log: Log, following: int) -> None:
        self.position = following
        if self.visibility and not log.memory:
            if following > self.visible_of(log) and following > log.promised_tail:
                raise self._fail(
                    "early",
                    f"told of {following}, but the disk holds only {self.visible_of(log)} for sure",
                )
            log.promised_tail = max(log.promised_tail, following)
            if following - 1 in log.entries:
                self.model.promise(log, following - 1, f"seen by durable reader {self.name}")

    def end_of(self, command: c.Ended) -> None:
        """Judge an ENDED."""
        # A rewind may lead beyond the end, when retention has taken what was before it.
        if command.code == "end" and self.end >= 0 and command.next != max(self.end, self.position):
            raise self._fail("cover", f"ended at {command.next} instead of {self.end}")
        self.active = False
        self.ended = command.code == "end"
