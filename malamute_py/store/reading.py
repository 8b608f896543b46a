"""Reading the log for the tables: the changes in order, and where the bodies lie.

Owns the choice of what concerns the queues in ring main. The rules: a change is taken once, in the
order of its offset; damage in the log is passed over only when the offsets after it prove that no
change was in it, or when the operator accepted the loss. A body is a batch of the mail stream, a
place a part of the log with some. Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

from malamute_protocol.stamp import CHANGE, DATA, Stamp
from malamute_py.journal import FollowLost, Wanted
from malamute_py.journal.layout import control_bodies
from malamute_py.store.errors import ChangesLost

CHANGE_STREAM: Final = 0
"""Number of the change log, as broker/ready.py has it."""
MAIL_STREAM: Final = 0xFFFF_FFFE
"""Number of the mail stream, as broker/ready.py has it."""
_PLACE_BYTES: Final = 256 << 10
"""Bytes of the log, about, that one noted place of bodies covers: so many are read again to find a
body in it."""


Following: TypeAlias = Callable[[int, int, Wanted | None], Iterator[tuple[Stamp, memoryview]]]
"""Yields the wanted batches in [from, to): Ring.follow, or a Follower's read."""


class BodySpan:
    """A part of the log that holds bodies."""

    __slots__ = ("base", "lsn", "stop")

    def __init__(self, base: int, lsn: int, stop: int) -> None:
        self.base = base
        """Number of the first body in it."""
        self.lsn = lsn
        self.stop = stop


class Changes:
    """The records of the change log from an offset on."""

    def __init__(
        self,
        follow: Following,
        change_next: int,
        *,
        accept_lost: bool = False,
        relevant: Callable[[int, int], None] | None = None,
    ) -> None:
        """follow: reads the log. change_next: offset of the first change wanted; -1: of the first.

        accept_lost: go on when changes are gone. relevant: is called with the bounds, [from, to)
        in the log, of each batch that concerns the queues: of changes, or of bodies. A start gives
        it, to hold the parts of the log that the tables lack.
        """
        self.next = change_next
        """Offset after the last record that was given out."""
        self.lost = 0
        """How many changes are gone, as far as offsets tell; only counted with accept_lost."""
        self.damages: list[str] = []
        """Damages that were met in the log."""
        self.places: list[BodySpan] = []
        """Places where bodies lie, ascending."""
        self.mail_next = 0
        """Number after the last body that was passed; 0: there was none."""
        self._read_log = follow
        self._accept_lost = accept_lost
        self._relevant = relevant
        self._unproven = ""
        """Damage that may have held changes; "": later changes prove that none did."""

    def read(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, record) of the changes in these ranges of positions, in order.

        Raises ChangesLost, FollowLost (`retention`: the log does not reach so far back), OSError.
        """
        for first, stop in ranges:
            yield from self._range(first, stop)
        if self._unproven and not self._accept_lost:
            raise ChangesLost(f"{self._unproven}, and nothing after it proves that it held none")
        self._unproven = ""

    def _range(self, lsn: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, record) of the changes from position `lsn` to `stop`.

        Notes where bodies of mail lie on the way. Damage is noted and passed over: whether that
        may be, read() decides at the end, and _batch() once a later change shows a hole.
        """
        last: BodySpan | None = None
        relevant, begin = self._relevant, lsn

        def wanted(stamp: Stamp) -> bool:
            """Whether a batch is one of changes; places of mail are noted on the way."""
            nonlocal last
            stream = stamp.stream
            if stream == MAIL_STREAM:
                if stamp.control_kind != DATA:
                    return False
                self.mail_next = stamp.next_offset
                at, end = stamp.lsn, stamp.lsn + stamp.size
                # Bodies near to each other share a place, so that places stay few.
                if last is None or at - last.lsn > _PLACE_BYTES:
                    last = BodySpan(stamp.base_offset, at, end)
                    self.places.append(last)
                else:
                    last.stop = end
                if relevant is not None:
                    relevant(max(stamp.bundle_lsn, begin), end)
                return False
            return stream == CHANGE_STREAM and stamp.control_kind == CHANGE

        while lsn < stop:
            try:
                for stamp, content in self._read_log(lsn, stop, wanted):
                    if relevant is not None:
                        relevant(max(stamp.bundle_lsn, begin), stamp.lsn + stamp.size)
                    yield from self._batch(stamp, content)
                return
            except FollowLost as lost:
                if lost.code == "retention" and not self._accept_lost:
                    raise  # The log begins later, or a file of it is lost.
                self.damages.append(str(lost))
                self._unproven = str(lost)
                lsn, last = lost.to_lsn, None

    def _batch(self, stamp: Stamp, content: memoryview) -> Iterator[tuple[int, bytes]]:
        """Yield the changes of a batch that were not given out yet.

        Raises ChangesLost: offsets before it are missing, and their loss is not accepted.
        """
        base, end = stamp.base_offset, stamp.next_offset
        if self.next < 0:
            self.next = base  # the first change that there is
        if base > self.next:
            # A hole in the offsets: changes between are gone, by the damage if some was met.
            count = base - self.next
            if not self._accept_lost:
                what = self._unproven or f"{count} records of the change log are not there"
                raise ChangesLost(f"{what} (changes {self.next} to {base})")
            self.lost += count
        # The offsets follow on, or the hole is counted: the damage before held nothing more.
        self._unproven = ""
        if end <= self.next:
            return
        for offset, record in enumerate(control_bodies(content), base):
            if offset >= self.next:
                yield offset, record
        self.next = end
