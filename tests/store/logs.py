"""A ring with changes and bodies as the broker writes them, and a model of the queues."""

from __future__ import annotations

import itertools
import random
import sqlite3
from pathlib import Path
from typing import Any

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.stamp import CHANGE, STAMP_BYTES
from malamute_py.changelog import records as r
from malamute_py.changelog.applying import STREAM_CHANGES, apply
from malamute_py.changelog.records import rows_of
from malamute_py.changelog.settings import (
    CursorSettings,
    GroupSettings,
    MailboxSettings,
    ServiceSettings,
)
from malamute_py.changelog.tables import Queues, Tables
from malamute_py.journal import Append, FileStorage, MemoryStorage, Ring, RingSettings, Storage
from malamute_py.journal.layout import control_content
from malamute_py.store.database import Position, create
from malamute_py.store.reading import CHANGE_STREAM, MAIL_STREAM

SEGMENT = 65_536
SMALL = RingSettings(segment_bytes=SEGMENT, ring_bytes=8 * SEGMENT)
DIRECTORY = b"d" * 16


class LoggedQueues:
    """Queues in memory, and the log that they come from."""

    def __init__(self, storage: Storage | Path | None = None, **ring: Any) -> None:
        if isinstance(storage, Path):
            storage = FileStorage(storage)
        self.storage = MemoryStorage() if storage is None else storage
        settings = RingSettings(**{"segment_bytes": SEGMENT, "ring_bytes": 8 * SEGMENT, **ring})
        self.ring, _ = Ring.open(self.storage, settings=settings, epoch=1, held=True)
        self.queues = Queues()
        self.tables = Tables()
        self.change_next = 0
        self.mail_next = 0
        self.bodies: dict[int, list[bytes]] = {}
        self.time_ms = 1_000

    def connection(self) -> sqlite3.Connection:
        """Make new tables at the beginning of the log, in memory."""
        connection = sqlite3.connect(":memory:", isolation_level=None)
        create(connection, Position(0, 0, 1, DIRECTORY, self.ring.uuid))
        return connection

    def log(self, *changes: Any, bodies: list[list[bytes]] | None = None) -> int:
        """Append one bundle: the changes, puts with the bodies given; returns where it ends.

        bodies: of each put, in order; None: made up.
        """
        self.time_ms += 1
        batches, given = [], iter(bodies or [])
        for change in changes:
            if not isinstance(change, r.MailPut | r.RequestPut | r.TransactionStaged):
                continue
            change.base = self.mail_next
            made = [b"body %d" % (change.base + row) for row in range(change.count)]
            body = next(given, made)
            content = encode(body)
            self.bodies[change.base] = body
            batches.append(Append(
                MAIL_STREAM, change.base, change.count, self.time_ms, content,
                Content(content).head.content_crc, ((), ()),
            ))  # fmt: skip
            self.mail_next += change.count
        if changes:
            content, crc = control_content([r.encode_change(change) for change in changes])
            batches.append(Append(
                CHANGE_STREAM, self.change_next, len(changes), self.time_ms, content, crc, None,
                CHANGE,
            ))  # fmt: skip
            self.change_next += len(changes)
        end: int = self.ring.append(batches).end_lsn
        for change in changes:
            # As the checkpoint sees them: nothing is shared with what was given.
            taken = r.decode_change(r.encode_change(change))
            if not isinstance(taken, STREAM_CHANGES):
                apply(self.tables, self.queues, taken)
        return end

    def noise(self, size: int = 3000) -> int:
        """Append a bundle of another stream."""
        content = encode([b"n" * size])
        batch = Append(
            7, self.ring.next_offset(7), 1, self.time_ms, content,
            Content(content).head.content_crc,
        )  # fmt: skip
        end: int = self.ring.append([batch]).end_lsn
        return end

    def alive(self) -> set[int]:
        """Return numbers of the puts of which rows are left."""
        queues = self.queues
        return {base for _, base in queues.messages} | set(queues.requests) | set(queues.staged)


def bodies_of(batch: bytes) -> list[bytes]:
    """Return the bodies in a batch as the log has it."""
    found = Content(memoryview(batch)[STAMP_BYTES:]).bodies()
    bounds = found.offsets.tolist()
    return [bytes(found.blob[a:b]) for a, b in itertools.pairwise(bounds)]


class RandomChanges:
    """Changes of every kind, drawn so that most of them have an effect."""

    def __init__(self, logged: LoggedQueues, seed: int) -> None:
        self._logged = logged
        self._random = random.Random(seed)
        self._number = 1

    def bundle(self) -> list[Any]:
        """Draw changes for one bundle."""
        return [self._one() for _ in range(self._random.randrange(1, 4))]

    def _rows(self, count: int) -> bytes:
        draw = self._random
        if draw.random() < 0.4:
            return b""
        return rows_of(draw.getrandbits(count) or 1)

    def _some(self, places: Any, count_of: Any, left: bool = False) -> list[r.Rows]:
        draw = self._random
        known = list(places)
        if not known:
            return []
        chosen = draw.sample(known, min(len(known), draw.randrange(1, 4)))
        return [(base, self._rows(count_of(base))) for base in sorted(chosen)]

    def _one(self) -> Any:
        draw, queues = self._random, self._logged.queues
        kinds = [
            "mailbox", "mail", "mail", "mail", "done", "done", "again", "service", "request",
            "request", "taken", "taken", "received", "returned", "completed", "dead", "revived",
            "cursor", "cursor_removed", "group", "group_done", "group_done", "group_removed",
            "group_edited", "group_held", "group_returned", "group_returned", "group_revived",
            "step", "mailbox_removed", "service_removed", "producer", "stream",
            "begun", "staged", "staged", "moved", "committed", "ended",
        ]  # fmt: skip
        return getattr(self, f"_{draw.choice(kinds)}")(draw, queues)

    def _mailbox(self, draw: random.Random, queues: Queues) -> Any:
        number = draw.randrange(1, 6)
        settings = MailboxSettings(max_messages=draw.randrange(3))
        return r.MailboxSet(number, f"box{number}", settings, "me", draw.randrange(99))

    def _mailbox_removed(self, draw: random.Random, queues: Queues) -> Any:
        return r.MailboxRemoved(draw.randrange(1, 40), 1)

    def _mail(self, draw: random.Random, queues: Queues) -> Any:
        count = draw.choice([1, 1, 2, 5, 130])
        put = r.MailPut(draw.randrange(1, 6), -1, count, 100, draw.choice(["a", "b"]), 5)
        if draw.random() < 0.5:
            put.key = b"%d" % draw.randrange(60)
        if draw.random() < 0.3:
            put.about, put.last = [(b"k", 0, count)], True
        if draw.random() < 0.2:
            put.expiries = [draw.randrange(9) for _ in range(count)]
        if draw.random() < 0.2:
            put.why = "expired"
        return put

    def _messages(self, draw: random.Random, queues: Queues) -> tuple[int, list[r.Rows]]:
        box = draw.randrange(1, 6)
        bases = [base for mailbox, base in queues.messages if mailbox == box]
        return box, self._some(bases, lambda base: queues.messages[box, base].count)

    def _done(self, draw: random.Random, queues: Queues) -> Any:
        return r.MailDone(*self._messages(draw, queues))

    def _again(self, draw: random.Random, queues: Queues) -> Any:
        return r.MailAgain(*self._messages(draw, queues), draw.randrange(9))

    def _service(self, draw: random.Random, queues: Queues) -> Any:
        number = draw.randrange(6, 9)
        return r.ServiceSet(number, f"svc{number}", ServiceSettings(attempts_max=2), "me", 4)

    def _service_removed(self, draw: random.Random, queues: Queues) -> Any:
        return r.ServiceRemoved(draw.randrange(6, 40), 1)

    def _request(self, draw: random.Random, queues: Queues) -> Any:
        count = draw.choice([1, 3, 70])
        key = b"r%d" % draw.randrange(60)
        return r.RequestPut(6, -1, count, 200, "c", "c", 5, 900, key, ["s"])

    def _requests(self, queues: Queues) -> list[r.Rows]:
        return self._some(queues.requests, lambda base: queues.requests[base].put.count)

    def _taken(self, draw: random.Random, queues: Queues) -> Any:
        return r.WorkTaken(6, self._requests(queues), draw.choice(["w1", "w2"]), 7, 1000)

    def _received(self, draw: random.Random, queues: Queues) -> Any:
        return r.WorkReceived(6, self._requests(queues))

    def _returned(self, draw: random.Random, queues: Queues) -> Any:
        return r.WorkReturned(6, self._requests(queues), "died", draw.choice([0, 50, 60]))

    def _completed(self, draw: random.Random, queues: Queues) -> Any:
        return r.RequestDone(6, self._requests(queues))

    def _dead(self, draw: random.Random, queues: Queues) -> Any:
        return r.RequestDead(6, self._requests(queues), 5, "attempts", 8)

    def _revived(self, draw: random.Random, queues: Queues) -> Any:
        dead = [
            base for (box, base), row in queues.messages.items()
            if box == 5 and row.rare is not None and row.rare.request is not None
        ]  # fmt: skip
        rows = self._some(dead, lambda base: queues.messages[5, base].count)
        return r.RequestRevived(5, 6, rows, 9)

    def _cursor(self, draw: random.Random, queues: Queues) -> Any:
        settings = CursorSettings() if draw.random() < 0.5 else None
        return r.CursorSet(
            1, f"c{draw.randrange(4)}", draw.randrange(100), 3, settings, epoch=draw.randrange(4)
        )

    def _cursor_removed(self, draw: random.Random, queues: Queues) -> Any:
        return r.CursorRemoved(1, f"c{draw.randrange(4)}")

    def _group(self, draw: random.Random, queues: Queues) -> Any:
        return r.GroupSet(
            1,
            f"g{draw.randrange(2)}",
            "shared",
            b"\xc0",
            draw.randrange(50),
            3,
            epoch=draw.randrange(4),
            durable=draw.random() < 0.5,
        )

    def _group_done(self, draw: random.Random, queues: Queues) -> Any:
        first = draw.randrange(200)
        end = first + draw.randrange(1, 20)
        return r.GroupDone(1, f"g{draw.randrange(2)}", [(first, end)], draw.randrange(4))

    def _group_edited(self, draw: random.Random, queues: Queues) -> Any:
        settings = GroupSettings(attempts_max=draw.randrange(4))
        return r.GroupEdited(1, f"g{draw.randrange(2)}", settings, 4)

    def _group_held(self, draw: random.Random, queues: Queues) -> Any:
        holder = r.Holder(draw.choice(["", "ann"]), draw.randbytes(16), draw.randrange(9))
        return r.GroupHeld(1, f"g{draw.randrange(2)}", draw.choice([holder, None]))

    def _group_returned(self, draw: random.Random, queues: Queues) -> Any:
        first = draw.randrange(200)
        ranges = [(first, first + draw.randrange(1, 20))]
        why = draw.choice(["died", "returned"])
        return r.GroupReturned(1, f"g{draw.randrange(2)}", ranges, why, draw.randrange(4))

    def _group_revived(self, draw: random.Random, queues: Queues) -> Any:
        boxes = [base for box, base in queues.messages if box == 5]
        rows = self._some(boxes, lambda base: queues.messages[5, base].count)
        first = draw.randrange(100)
        return r.GroupRevived(1, f"g{draw.randrange(2)}", 5, rows, [(first, first + 1)], 2)

    def _group_removed(self, draw: random.Random, queues: Queues) -> Any:
        return r.GroupRemoved(1, f"g{draw.randrange(2)}")

    def _step(self, draw: random.Random, queues: Queues) -> Any:
        key = b"%d" % draw.randrange(1000)
        return r.StepTaken(draw.choice(["s", "a", "~1", "~2"]), key, 2, draw.choice([0, 45, 66]))

    def _begun(self, draw: random.Random, queues: Queues) -> Any:
        return r.TransactionBegun(b"t%d" % draw.randrange(4), "a", "a", draw.randrange(9), 60)

    def _staged(self, draw: random.Random, queues: Queues) -> Any:
        id = b"t%d" % draw.randrange(4)
        return r.TransactionStaged(id, draw.randrange(99), 1, -1, draw.choice([1, 3]), 200, 5)

    def _staged_of(self, draw: random.Random, queues: Queues) -> tuple[bytes, list[int]]:
        id = b"t%d" % draw.randrange(4)
        return id, [base for base, row in queues.staged.items() if row.id == id]

    def _moved(self, draw: random.Random, queues: Queues) -> Any:
        id, bases = self._staged_of(draw, queues)
        return r.TransactionMoved(id, bases[: draw.randrange(1, 4)], draw.choice([0, 9]))

    def _committed(self, draw: random.Random, queues: Queues) -> Any:
        return r.TransactionCommitted(b"t%d" % draw.randrange(4), 7)

    def _ended(self, draw: random.Random, queues: Queues) -> Any:
        why = draw.choice(["rolled_back", "committed", "timed_out", "ended", "given_up"])
        return r.TransactionEnded(*self._staged_of(draw, queues), why, 8)

    def _producer(self, draw: random.Random, queues: Queues) -> Any:
        return r.ProducerOpened(draw.randrange(4), "p", 1)

    def _stream(self, draw: random.Random, queues: Queues) -> Any:
        return r.StreamRemoved(draw.randrange(4), 1)
