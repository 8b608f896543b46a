"""A broker's shell without its sockets and its core: journal, rings, tables, checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.stamp import CHANGE
from malamute_py.broker.ready import (
    CHANGE_STREAM,
    MAIL_STREAM,
    MAIN,
    Append,
    AppendBundle,
    Appended,
    AppendRefused,
    BodiesFound,
    BodiesRead,
)
from malamute_py.changelog import records as r
from malamute_py.changelog.applying import apply
from malamute_py.changelog.tables import Queues, Tables
from malamute_py.config import CheckpointSection, JournalSection
from malamute_py.journal.directory import Journal
from malamute_py.journal.layout import control_content
from malamute_py.server.checkpointing.checkpoints import Checkpoints
from malamute_py.server.checkpointing.process import Checkpointed, CheckpointFailed
from malamute_py.server.checkpointing.recovered import QueuesFound, find_queues, ring_facts
from malamute_py.server.journaling.rings import Rings, ring_settings
from malamute_py.server.result_queue import ResultQueue
from malamute_py.store.bodies import StoredBodies
from malamute_py.store.database import DATABASE, connect
from malamute_py.store.loading import load
from tests.waiting import WAIT_S

SMALL = JournalSection(segment_bytes=1 << 20, ring_bytes=8 << 20)


class Shell:
    """Journal, rings and checkpoint as a server has them, over a clock that a test moves."""

    def __init__(self, directory: Path, config: JournalSection = SMALL, **checkpoint: Any) -> None:
        self.closed = False
        self.directory = directory
        self.config = CheckpointSection(**checkpoint)
        self.journal = Journal.open(directory)
        self.results = ResultQueue()
        settings = ring_settings(config, {"full": config.full}, 16 << 10)
        ring, recovery = self.journal.ring(MAIN, settings, held=True)
        self.ring = ring
        try:
            facts = ring_facts(MAIN, ring, recovery)
            self.found: QueuesFound = find_queues(
                directory, self.journal.uuid, ring, facts, self.config
            )
            self.queues = self.found.queues
            for _, record in self.found.changes:
                self._apply(r.decode_change(record))
        except BaseException:
            self.journal.close()
            self.results.close()
            raise
        self.change_next = facts.streams[CHANGE_STREAM].next
        self.mail_next = ring.next_offset(MAIL_STREAM)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.pressed: list[bool] = []
        self.checkpoints = Checkpoints(
            directory, ring, self.config, self.results,
            parts=self.found.parts, lsn=self.found.position.lsn,
            report=lambda name, level, facts: self.events.append((name, facts)),
            press=self.pressed.append,
        )  # fmt: skip
        self.stored = StoredBodies(directory / DATABASE)
        self.rings = Rings(
            self.journal, config, self.results, 16 << 10, snapshot=lambda ring: (),
            noted=self.checkpoints.parts.add, relieve=self.checkpoints.relieve, bodies=self.stored,
        )  # fmt: skip
        self.now_ms = 0
        self.rings.start()

    def _apply(self, change: Any) -> None:
        if not isinstance(change, r.StreamCreated | r.ProducerOpened):
            apply(Tables(), self.queues, change)

    def log(self, *changes: Any, body: bytes = b"body") -> None:
        """Append one bundle, and sync."""
        batches = []
        for change in changes:
            if isinstance(change, r.MailPut | r.RequestPut):
                change.base = self.mail_next
                content = encode([body] * change.count)
                batches.append(self._batch(MAIL_STREAM, change.base, change.count, content))
                self.mail_next += change.count
        content, _ = control_content([r.encode_change(change) for change in changes])
        base, count = self.change_next, len(changes)
        batches.append(self._batch(CHANGE_STREAM, base, count, content, CHANGE))
        self.append(batches)
        self.change_next += count
        for change in changes:
            self._apply(r.decode_change(r.encode_change(change)))

    @staticmethod
    def _batch(stream: int, base: int, count: int, content: bytes, kind: int = 0) -> Append:
        crc = Content(content).head.content_crc
        keys = ((), ()) if stream == MAIL_STREAM else None
        return Append(stream, base, count, 1, content, crc, keys, kind)

    def try_append(self, batches: list[Append]) -> Appended | AppendRefused:
        """Append a bundle that is not synced, and perhaps not taken."""
        (answer,) = self.rings.append([AppendBundle(MAIN, 1, tuple(batches))])
        return answer

    def append(self, batches: list[Append]) -> None:
        answer = self.try_append(batches)
        assert isinstance(answer, Appended), answer
        self.ring.sync()
        self.checkpoints.synced(self.ring.synced_lsn)

    def noise(self, size: int) -> None:
        """Append a batch of a stream."""
        self.append([self.noise_batch(size)])

    def noise_batch(self, size: int) -> Append:
        """Return the next batch of a stream."""
        return self._batch(7, self.ring.next_offset(7), 1, encode([b"n" * size]))

    def tick(self, ms: int = 0) -> None:
        self.now_ms += ms
        self.checkpoints.tick(self.now_ms)

    def answer(self) -> Checkpointed | CheckpointFailed:
        """Wait for an answer of the process, and do the loop's part of it."""
        answer: Checkpointed | CheckpointFailed = self.wait(
            Checkpointed | CheckpointFailed, self.checkpoints.take
        )
        return answer

    def wait(self, kind: Any, take: Callable[..., Any] | None = None) -> Any:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for result in self.results.take():
                if isinstance(result, kind):
                    if take is not None:
                        take(result, self.now_ms)
                    return result
            time.sleep(0.005)
        raise AssertionError("no answer")

    def checkpoint(self) -> Checkpointed | CheckpointFailed:
        """Make one whole checkpoint."""
        self.tick()
        self.tick(self.config.interval_ms)
        return self.answer()

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def bodies(self, *numbers: int) -> BodiesFound:
        self.rings.read_bodies(BodiesRead(9, numbers))
        found: BodiesFound = self.wait(BodiesFound)
        return found

    def close(self) -> None:
        """Stop in order."""
        self.checkpoints.stop()
        self.abandon()

    def abandon(self) -> None:
        """End as a broker that is killed, as far as that is possible in one process."""
        if self.closed:
            return
        self.closed = True
        self.checkpoints._process.stop(time.monotonic() + WAIT_S)
        self.rings.stop_threads()
        with contextlib.suppress(OSError):
            self.stored.close()
            self.journal.close()
        self.results.close()


def stored(shell: Shell) -> Queues:
    connection = connect(shell.directory / DATABASE, read_only=True)
    try:
        return load(connection)
    finally:
        connection.close()


def put(count: int = 1) -> r.MailPut:
    return r.MailPut(1, -1, count, 100, "a", 1)
