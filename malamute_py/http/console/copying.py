"""Copies of a range of a stream into another one, beside the pages.

Owns one copy, from its first record to its end. The rules: a copy reads and publishes over the
person's own link, so that both permissions are the person's; its end is settled before the first
record; it ends with the session; what was confirmed is counted apart from what was read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from malamute_protocol.address import name_fault
from malamute_protocol.batch import Batch, Record
from malamute_protocol.encode import encode_arrow, encode_lists
from malamute_protocol.errors import MalamuteError
from malamute_py.client.aio.client import Client
from malamute_py.client.aio.publishing import BulkPublisher
from malamute_py.client.position import StartPoint
from malamute_py.client.readers import copies
from malamute_py.http.console.records import notice_text
from malamute_py.http.console.words import NotUnderstood, visible

_ARROW: Final = 2
_CREDIT_BYTES: Final = 4 << 20
_NOTICES_MAX: Final = 5
_WAIT_MS: Final = 60_000


class Copy:
    """One copy, under way or ended."""

    def __init__(self, stream: str, pattern: str, to: str) -> None:
        """Note what to copy: the records of `stream` that a pattern selects, into the stream `to`.

        start() begins. The page of the stream shows the facts below.
        """
        self.stream = stream
        self.pattern = pattern
        self.to = to
        self.first = self.next = self.end = 0
        """Offsets of the range: where it began, how far it came, and where it ends."""
        self.copied = 0
        """Records that were published."""
        self.confirmed = 0
        """Records that the broker confirmed."""
        self.said: list[str] = []
        self.fault = ""
        self.began = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether it is under way."""
        return self._task is not None and not self._task.done()

    def start(self, client: Client, start: StartPoint, end: int) -> None:
        """Begin to copy, as a task. client: the person's link. end: offset before which it ends."""
        self.end = end
        self._task = asyncio.get_running_loop().create_task(self._run(client, start))

    def cancel(self) -> None:
        """End the copy where it is."""
        if self._task is not None:
            self._task.cancel()

    def then(self, call: Callable[[], None]) -> None:
        """Have a call made when the copy ends; after start()."""
        assert self._task is not None
        self._task.add_done_callback(lambda task: call())

    async def _run(self, client: Client, start: StartPoint) -> None:
        """Copy the range, batch by batch, and keep count for the page; run as a task.

        An error, or the cancelling, becomes `fault`: what was copied stays.
        """
        publisher = client.publisher(self.to, keep=False, timeout_ms=_WAIT_MS)
        try:
            async with client.subscribe(
                self.stream, self.pattern or "#", start=start, end=self.end,
                credit_bytes=_CREDIT_BYTES, on_notice=self._note,
            ) as reading:  # fmt: skip
                self.first = self.next = (await reading.accepted()).next
                while (batch := await reading.next_batch()) is not None:
                    await _publish(publisher, batch)
                    position = reading.position
                    self.next = position.next if position is not None else self.next
                    self.copied, self.confirmed = publisher.published, publisher.confirmed
            await publisher.wait()
            # The records after the last selected one were passed over: the range is done.
            self.next = self.end
        except MalamuteError as error:
            self.fault = str(error)
        except asyncio.CancelledError:
            self.fault = "it was cancelled"
        finally:
            self.copied, self.confirmed = publisher.published, publisher.confirmed

    def _note(self, notice: Any) -> None:
        """Keep a notice to the reader, such as of a gap, as a sentence for the page."""
        text = notice_text(notice)
        if text and len(self.said) < _NOTICES_MAX:
            self.said.append(text)


async def _publish(publisher: BulkPublisher, batch: Batch) -> None:
    """Publish copies of a batch's records: subjects with further keys, bodies, other columns.

    Raises NotUnderstood for a batch that cannot be copied in part.
    """
    records: list[Record] = list(batch.records())
    subjects = [copies.keys(record) for record in records]
    columns = copies.columns(records)  # fields, properties and the like, each for all records
    if batch.content.head.body_kind == _ARROW:
        # The bodies of an Arrow batch are one piece. indices: the rows that were selected.
        if batch.indices is not None:
            raise NotUnderstood(
                "a pattern selects some rows of an Arrow batch, which is copied whole or not at "
                "all: leave out the pattern"
            )
        await publisher.publish_batch(
            encode_arrow(
                bytes(batch.content.bodies().blob), len(records),
                schema_id=batch.content.head.schema_id, subject=subjects, **columns,
            )
        )  # fmt: skip
        return
    # All bodies of a batch are of one kind: blobs, or lists of blobs.
    bodies: list[Any] = [copies.blobs(record) for record in records]
    if isinstance(bodies[0], list):
        await publisher.publish_batch(encode_lists(bodies, subject=subjects, **columns))
    else:
        await publisher.publish_many(bodies, subjects=subjects, **columns)


def check_range(stream: str, to: str) -> None:
    """Raise NotUnderstood for a copy that has no sense."""
    if not to:
        raise NotUnderstood("name the stream to copy into")
    fault = name_fault(to)
    if fault:
        raise NotUnderstood(f"the stream to copy into: {visible(fault)}")
    if to == stream:
        raise NotUnderstood(f"{visible(to)} is the stream itself: name another one")
