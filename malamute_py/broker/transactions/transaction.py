"""One transaction at run time.

Owns the states of a transaction, and the batches that it has staged. The rule: a transaction leaves
OPEN once, by the first of commit, rollback and timeout; a change that the log refuses takes it back
to OPEN. Source: ARCHITECTURE.md, Decisions; SPEC.md, section 4.11.

A staged batch lies in the mail stream, aside from its stream, until the transaction is committed. A
ring that refuses batches of a committed transaction puts them off.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from malamute_py.broker.links.link import Link
from malamute_py.broker.log.answers import Answer
from malamute_py.broker.ready import MAIN
from malamute_py.changelog.records import TransactionStaged
from malamute_py.changelog.tables import StagedRow, TransactionRow


class State(enum.Enum):
    """The state of a transaction."""

    OPEN = "open"
    COMMITTING = "committing"
    """The log has been given the commit."""
    COMMITTED = "committed"
    """The log has the commit, and what is staged is being appended to its streams."""
    ENDING = "ending"
    """The log has been given the end."""


class PutOff(msgspec.Struct, gc=False):
    """Why a ring takes nothing of a committed transaction for now."""

    code: str
    reason: str
    since_ms: int
    """Time from which on the ring has refused, without taking anything in between."""


class Transaction:
    """One transaction that is open, or committed and not yet all in its streams."""

    __slots__ = (
        "apart", "bytes", "deadline_ms", "ender", "ending", "given_up", "giving_up", "names",
        "put_off", "records", "row", "staged", "state", "touched_ms", "waiting",
    )  # fmt: skip

    def __init__(self, row: TransactionRow, deadline_ms: int) -> None:
        self.row = row
        self.deadline_ms = deadline_ms
        """Time at which the broker rolls it back, unless it was committed."""
        self.state = State.COMMITTED if row.committed_ms else State.OPEN
        self.staged: dict[int, StagedRow | TransactionStaged] = {}
        """Place, by which the client numbers its batches in STAGE -> batch that is not in its
        stream yet."""
        self.apart: dict[int, str] = {}
        """Place -> ring of a batch whose stream has a ring of its own; mostly empty."""
        self.names: dict[int, str] = {}
        """Number of a stream of its batches -> the stream's name, which outlives the stream."""
        self.ending: list[int] | None = None
        """Numbers of batches in the change that ends it, while that is on its way to the log; None
        before. A batch that gets its number meanwhile adds it."""
        self.put_off: dict[str, PutOff] = {}
        """Ring -> why it takes nothing of it for now; mostly empty."""
        self.ender: Answer | None = None
        """Answer to the operator who gives up what is put off."""
        self.giving_up: set[str] = set()
        """Rings whose batches are given up in the next turn of their lanes."""
        self.given_up: dict[str, int] = {}
        """Stream -> records that were given up."""
        self.bytes = 0
        self.records = 0
        self.touched_ms = row.at_ms
        """Time at which it began, or the newest batch was staged."""
        self.waiting: list[tuple[Link, Any]] = []
        """Links and their commands that wait until all of it is in its streams."""

    @property
    def id(self) -> bytes:
        """The client's name for it."""
        return self.row.id

    @property
    def bases(self) -> list[int]:
        """Numbers of the batches that are not in their streams; -1 of one that has none yet."""
        return [batch.base for batch in self.staged.values()]

    def add(self, batch: StagedRow | TransactionStaged, ring: str = MAIN) -> None:
        """Add a batch that is staged. ring: that of its stream."""
        self.staged[batch.place] = batch
        if ring != MAIN:
            self.apart[batch.place] = ring
        self.bytes += batch.size
        self.records += batch.count
        self.touched_ms = max(self.touched_ms, batch.at_ms)

    def remove(self, batch: StagedRow | TransactionStaged) -> None:
        """Remove a batch that is staged no more: its stream has it, or the log refused it."""
        if self.staged.pop(batch.place, None) is not None:
            self.bytes -= batch.size
            self.records -= batch.count
            self.apart.pop(batch.place, None)

    def rings(self) -> list[str]:
        """Return the rings of the streams that its batches are for: ring main, and others."""
        own = list(dict.fromkeys(self.apart.values()))
        all_apart = len(self.apart) == len(self.staged)
        return own if all_apart else [MAIN, *own]

    def in_order(self, ring: str = MAIN) -> list[StagedRow | TransactionStaged]:
        """Return the batches for a ring in the order that the client numbered them in (place)."""
        staged, apart = self.staged, self.apart
        if not apart:
            return [staged[place] for place in sorted(staged)] if ring == MAIN else []
        return [staged[place] for place in sorted(staged) if apart.get(place, MAIN) == ring]
