"""The model of resets: generations of a stream, their groups and cursors, and settings.

Owns what the broker must have after each command: plain lists and dictionaries, kept by the number
that each record has in its body, so that a record which takes the offset of a lost one is another
one. The rule: nothing here uses the tables of the code under test. Source: SPEC.md, sections 4.7
(Generations), 4.8 (Groups, Cursors) and 13 (Settings).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.model import Violation


class Edited(dict[str, Any]):
    """Settings of one thing: what edits have given, over what it is made with."""

    def __init__(self, made: dict[str, Any], given: dict[str, Any] | None = None) -> None:
        """made: what a new one has that names no settings."""
        super().__init__({**made, **(given or {})})
        self.made = made

    def edit(self, given: dict[str, Any], *, replace: bool) -> None:
        """Let an EDIT take effect."""
        if replace:
            self.clear()
            self.update(self.made)
        self.update(given)

    def check(self, what: str, told: dict[str, Any]) -> None:
        """Raise Violation unless the broker tells the same."""
        for name, value in self.items():
            if told[name] != value:
                raise Violation("settings", f"{name} of {what} is {told[name]!r}, not {value!r}")


@dataclass(slots=True)
class GroupState:
    """A group, as the log has it."""

    start: int
    """Offset before which nothing comes."""
    durable: bool
    settings: Edited
    done: set[int] = field(default_factory=set)
    tries: dict[int, int] = field(default_factory=dict)
    """Record -> attempts that have ended."""
    counted: bool = True
    """Attempts were counted from the start, or the reset, on."""

    def reset(self, start: int) -> None:
        """Stand elsewhere: what was done, and each attempt, counts no longer."""
        self.start = start
        self.done.clear()
        self.tries.clear()
        self.counted = bool(self.settings["attempts_max"])


@dataclass(slots=True)
class StreamState:
    """One generation of the stream, as the log has it."""

    uuid: bytes
    generation: int
    settings: Edited
    groups: dict[str, GroupState] = field(default_factory=dict)
    cursors: dict[str, int] = field(default_factory=dict)
    cursor_settings: dict[str, Edited] = field(default_factory=dict)


@dataclass(slots=True)
class State:
    """The state that the changes in the log make."""

    stream: StreamState | None = None
    generation: int = 0
    """The highest one that there was."""
    edited: dict[str, Edited] = field(default_factory=dict)
    """Settings of the mailbox and the service."""


class ResetsModel:
    """The state, what of it survives a power loss, and the records of each generation."""

    def __init__(self, edited: dict[str, Edited]) -> None:
        self.now = State(edited=edited)
        self.kept = deepcopy(self.now)
        """State that survives a power loss."""
        self.logs: dict[bytes, list[int]] = {}
        """UUID -> its records, by offset."""
        self.synced: dict[bytes, int] = {}
        """UUID -> how many of its records survive a power loss."""
        self.ends: dict[bytes, dict[int, int]] = {}
        """UUID -> epoch -> where the stream ended in it, of epochs that are over."""

    # --- the disk -------------------------------------------------------------------------

    def sync_changes(self) -> None:
        """Note that all changes in ring main are on the disk."""
        self.kept = deepcopy(self.now)

    def sync_records(self) -> None:
        """Note that the records of the stream are on the disk."""
        for uuid, log in self.logs.items():
            self.synced[uuid] = len(log)

    def crash(self, epoch: int, *, power: bool) -> None:
        """End an epoch. power: what was not synced is lost."""
        if power:
            self.now = deepcopy(self.kept)
            for uuid, log in self.logs.items():
                del log[self.synced.get(uuid, 0) :]
        stream = self.now.stream
        if stream is not None:
            end = len(self.logs[stream.uuid])
            self.ends.setdefault(stream.uuid, {})[epoch] = end
            left = set(self.logs[stream.uuid])
            for group in stream.groups.values():
                group.start = min(group.start, end)
                group.done &= left
                group.tries = {at: times for at, times in group.tries.items() if at in left}
            for name, next in stream.cursors.items():
                stream.cursors[name] = min(next, end)
        self.sync_changes()
        self.sync_records()

    # --- records --------------------------------------------------------------------------

    @property
    def log(self) -> list[int]:
        """The records of the stream that there is."""
        return [] if self.now.stream is None else self.logs[self.now.stream.uuid]

    def visible(self, group: GroupState) -> list[int]:
        """Return the records that a group's members may be shown."""
        stream = self.now.stream
        assert stream is not None
        end = self.synced.get(stream.uuid, 0) if group.durable else len(self.log)
        return self.log[:end]

    def owed(self, group: GroupState) -> list[int]:
        """Return the records that have to come to a member, in the order of offsets."""
        return [one for one in self.visible(group)[group.start :] if one not in group.done]

    def position(self, group: GroupState) -> int:
        """Return the first offset that is neither done nor passed over."""
        log = self.log
        next = group.start
        while next < len(log) and log[next] in group.done:
            next += 1
        return next

    def rewound(self, uuid: bytes, epoch: int, next: int) -> int | None:
        """Return where a reader of this position is taken back to; None: it goes on there."""
        stream = self.now.stream
        assert stream is not None
        if uuid != stream.uuid:
            return 0
        end = min(self.ends.get(uuid, {}).get(epoch, len(self.log)), len(self.log))
        return end if next > end else None

    # --- promises -------------------------------------------------------------------------

    def delivered(self, name: str, record: int, attempts: int, holder: int | None) -> None:
        """Judge a delivery to a member. holder: who has the record already."""
        stream = self.now.stream
        assert stream is not None
        group = stream.groups[name]
        what = f"record {record} of group {name}"
        if record not in self.log:
            raise Violation("wrong_record", f"{what} is not in generation {stream.generation}")
        if self.log.index(record) < group.start or record in group.done:
            raise Violation("after_end", f"{what}, which begins at {group.start}")
        if record not in self.visible(group):
            raise Violation("early", what)
        if holder is not None:
            raise Violation("two_hands", f"{what}, which link {holder} holds")
        if group.counted and attempts != group.tries.get(record, 0) + 1:
            raise Violation("attempts", f"{what}: {attempts}, after {group.tries.get(record, 0)}")

    def returned(self, group: GroupState, record: int) -> None:
        """Count an attempt that has ended."""
        if group.settings["attempts_max"]:
            group.tries[record] = group.tries.get(record, 0) + 1

    def bury(self, group: GroupState) -> None:
        """Let the records die whose attempts are used up."""
        most = group.settings["attempts_max"]
        for record in self.owed(group):
            if most and group.tries.get(record, 0) >= most:
                group.done.add(record)
                group.tries.pop(record, None)
