# DO NOT EDIT: made from ../aio/publishing.py by `make sync-client` (tools/sync_client.py).
"""Publishing records for threads: one, many, a table, and in runs that are confirmed together.

Owns the verbs as blocking calls. The rule: any thread may call any of them; a wait ends by its
timeout, by the client's close, or by what it waits for, and never harms the link.

Words: the window bounds the bytes that are sent and not confirmed; link.room() waits until it has
room. link.wake_up() has leave what the session was given. A row is one record with what belongs to
it, and with the token by which its outcome finds its caller. A content is an encoded batch. A run
is the batches of one BulkPublisher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from malamute_protocol.commands import Confirm, Level
from malamute_protocol.errors import MalamuteError
from malamute_py.client.arguments import NAMES, name_of
from malamute_py.client.engine.waits import PUBLISHED, WINDOW
from malamute_py.client.position import Confirmation
from malamute_py.client.session.calls import (
    Bodies,
    Body,
    Bulk,
    BulkOptions,
    Fields,
    Properties,
    Time,
    arrow_contents,
    content_count,
    make_row,
)
from malamute_py.client.session.outgoing_records import check_crc
from malamute_py.client.session.publisher import LEVEL_NAMES, Publisher, confirmation, level_number
from malamute_py.client.settings import DEFAULT_WAIT, Wait
from malamute_py.client.sync.link import Pending, SyncVerbs, ThreadLink
from malamute_py.client.sync.tables import Tables
from malamute_py.client.words import ConfirmAt


class SyncPublishVerbs(SyncVerbs):
    """Verbs that publish records."""

    _publisher: Publisher

    def publish(
        self,
        stream: str,
        body: Body,
        *,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        client_time_ms: Time | None = None,
        expires_at_ms: Time | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> Confirmation:
        """Publish one record and wait for its confirm; waits before that while the window is full.

        body: bytes, or a str, which is sent as UTF-8; a list of these is one body of several blobs,
        which readers get as `parts`. codec: "gzip", "snappy", "lz4" or "zstd". subject: also a
        sequence, of the subject and further keys. confirm: "synced", "stored", "none", or
        "default": the stream's own, which is "synced" unless it was set. timeout_ms: None waits
        for ever; by default the client's settings say how long.
        Raises BrokerRefused (not in the log), LocalProtocolError (never sent), Timeout (whether
        it is in the log is unknown; the client goes on sending it, and it is there once) or
        ConnectionLost (the client was closed; it may be in the log).
        """
        # As publish_nowait() does it, without its call for each record.
        link = self._link
        pending: Pending[Confirmation] = Pending(link)
        row = make_row(
            body, subject, fields, client_time_ms, expires_at_ms, properties, pending, codec
        )
        level = level_number(confirm)
        with link.lock:
            if not link.has_room():
                timeout_ms = link.room(timeout_ms, stream)
            self._publisher.add(stream, level, row)
            link.wake_up()
        return pending.result(timeout_ms, PUBLISHED, stream)

    def publish_nowait(
        self,
        stream: str,
        body: Body,
        *,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        client_time_ms: Time | None = None,
        expires_at_ms: Time | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = 0,
    ) -> Pending[Confirmation]:
        """Publish one record without waiting for its confirm: `result()` of what this returns.

        timeout_ms: how long to wait for room in the window; None: until there is some. What was not
        sent when the program ends is lost: flush() or close() before that.
        Raises BrokerRefused `window` when there was none and 0 was to be waited, else Timeout:
        nothing was taken; otherwise as publish().
        """
        link = self._link
        pending: Pending[Confirmation] = link.pending_type(link)
        row = make_row(
            body, subject, fields, client_time_ms, expires_at_ms, properties, pending, codec
        )
        level = level_number(confirm)
        with link.lock:
            if not self._session.window.has_room():
                link.room(timeout_ms, stream)
            self._publisher.add(stream, level, row)
            link.wake_up()
        return pending

    def publish_many(
        self,
        stream: str,
        bodies: Bodies,
        *,
        subject: str = "",
        subjects: Sequence[str | Sequence[str]] | None = None,
        fields: Fields | Sequence[Fields | None] | None = None,
        client_time_ms: int | Sequence[int | None] | None = None,
        expires_at_ms: int | Sequence[int] | None = None,
        properties: Properties | Sequence[Properties | None] | None = None,
        codec: str | None = None,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> list[Confirmation]:
        """Publish many records in as few batches as their sizes allow; wait for all confirms.

        bodies: bytes, or a list of bytes each; to be left as they are until this returns.
        subjects, and any of the others given as a sequence: one a record. Times are in
        milliseconds. Returns one Confirmation a batch, in order, each with its `count`.
        timeout_ms: how long nothing may be confirmed, or the window be full.
        Raises as publish(); batches before the one that failed may be in the log.
        """
        with self._publishing_run(stream, confirm, timeout_ms) as run:
            run.publish_many(
                bodies,
                subject=subject,
                subjects=subjects,
                fields=fields,
                client_time_ms=client_time_ms,
                expires_at_ms=expires_at_ms,
                properties=properties,
                codec=codec,
            )
        return run.confirmations

    def publish_batch(
        self,
        stream: str,
        content: bytes,
        *,
        typed: bool = False,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> Confirmation:
        """Publish one batch content that malamute_protocol.batch encoded.

        typed: the stream must have a declared schema (else `bad_schema`), and is not created where
        there is none (`unknown_stream`).

        The batch goes as it is but for its producer and sequence, unless `idempotent` is off: then
        a refusal of these (`unknown_producer`, `out_of_sequence`) is raised. A batch that is too
        large for its stream leaves in parts; then the first part's Confirmation is returned, whose
        `count` says how many records that part has. Of a table (an Arrow body) it is refused, as
        its rows cannot be told apart without their schema. Raises as publish().
        """
        with self._publishing_run(stream, confirm, timeout_ms) as run:
            run.publish_batch(content, typed=typed)
        return run.confirmations[0]

    def publish_arrow(
        self,
        stream: str,
        table: Any,
        *,
        body: str = "body",
        subject: str = "",
        properties: Properties | None = None,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> list[Confirmation]:
        """Publish a pyarrow table or record batch, without a Python object a row.

        body: the column with the bodies (binary or string). subject: name of a column, or
        one subject for all. properties: of each row. Small chunks of the table that follow each
        other share a batch. Raises as publish().
        """
        with self._publishing_run(stream, confirm, timeout_ms) as run:
            batch_bytes = self._publisher.batch_bytes_of(stream)
            for content in arrow_contents(
                table, body, subject, properties, batch_bytes, self._publisher.limits
            ):
                # Not by publish_batch(), which would check what was encoded here.
                run._add(content, content_count(content))
        return run.confirmations

    def publish_table(
        self,
        stream: str,
        table: Any,
        *,
        subject: str = "",
        client_time: str = "",
        properties: Properties | None = None,
        codec: str | None = None,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> list[Confirmation]:
        """Publish the rows of a table into a typed stream, validated in full before it is sent.

        table: of pyarrow, polars, pandas or DuckDB; it has the columns of the stream's newest
        schema. subject: name of a column, or one subject for all, which is refused where a column
        is called nearly so. client_time: name of a column of timestamps. These two columns need
        not be in the schema. properties: of each row. Returns one Confirmation a batch. Raises
        LocalProtocolError `bad_schema`: the table does not fit; otherwise as publish().
        """
        with self._publishing_run(stream, confirm, timeout_ms) as run:
            run.publish_table(
                table,
                subject=subject,
                client_time=client_time,
                properties=properties,
                codec=codec,
            )
        return run.confirmations

    def publisher(
        self,
        stream: str,
        *,
        confirm: ConfirmAt = "default",
        keep: bool = True,
        timeout_ms: Wait = "default",
    ) -> SyncBulkPublisher:
        """A run of publishing whose confirms are waited for together, at its end.

        keep: collect the Confirmations; False for runs without end, where a count is enough.
        timeout_ms: how long nothing may be confirmed while that is waited for, or the window be
        full; None: for ever.
        """
        return self._publishing_run(stream, confirm, timeout_ms, keep)

    def _publishing_run(
        self,
        stream: str,
        confirm: ConfirmAt,
        timeout_ms: Wait,
        keep: bool = True,
        kind: type[SyncBulkPublisher] | None = None,
    ) -> SyncBulkPublisher:
        """Begin a run, as publisher() and the verbs of many records do.

        kind: its class; None: the plain one. A traced client has another.
        """
        if type(stream) is not str or stream not in NAMES:
            name_of("stream", stream)
        kind = SyncBulkPublisher if kind is None else kind
        return kind(self._link, stream, level_number(confirm), keep, timeout_ms)


class SyncBulkPublisher:
    """Batches published one after the other, confirmed together; a context manager."""

    def __init__(
        self, link: ThreadLink, stream: str, level: int, keep: bool, timeout_ms: Wait
    ) -> None:
        """See SyncClient.publisher()."""
        self._link = link
        self._timeout_ms = timeout_ms
        self._publisher = link.publisher
        self._stream = stream
        self._level = level
        self._keep = keep
        self._open = 0
        """Records without an outcome: a batch may be confirmed in parts."""
        self._tables = Tables(link)
        self._least = int(Level.REPLICATED)
        """Least level that was promised of any record; at first the highest there is."""
        self.confirmations: list[Confirmation] = []
        """One a batch, in order, when they are kept."""
        self.published = 0
        """Records handed in."""
        self.confirmed = 0
        """Records confirmed."""
        self.level = ""
        """Least level that was promised of any of these; empty: none yet."""
        self.error: MalamuteError | None = None
        """The first failure."""

    def publish_many(
        self,
        bodies: Bodies,
        *,
        subject: str = "",
        subjects: Sequence[str | Sequence[str]] | None = None,
        **options: Unpack[BulkOptions],
    ) -> None:
        """Publish many records; returns when the last is in the window, not yet confirmed.

        options: as of SyncClient.publish_many(). Raises the first failure of the run so far.
        """
        bulk = Bulk(
            bodies,
            batch_bytes=self._publisher.batch_bytes_of(self._stream),
            limits=self._publisher.limits,
            subject=None if subjects is not None else subject,
            subjects=subjects,
            options=options,
        )
        link = self._link
        for first, end in bulk.cuts():
            with link.lock:
                # Encoded with the sequence that it will have, as a rule, it need not be restamped.
                producer = self._publisher.expected(self._stream, self._level)
            # Encoded outside the lock: the link's thread goes on sending meanwhile.
            content = bulk.encode(first, end, producer)
            if content is not None:  # else it is too large, and its halves come next
                self._add(content, end - first)

    def publish_batch(self, content: bytes, *, typed: bool = False) -> None:
        """Publish one encoded content; returns when it is in the window.

        typed: as of SyncClient.publish_batch(). Raises LocalProtocolError: it is none, or
        `corrupt`; and the first failure so far.
        """
        count = content_count(content)
        check_crc(content)
        self._add(content, count, typed=typed)

    def publish_table(
        self,
        table: Any,
        *,
        subject: str = "",
        client_time: str = "",
        properties: Properties | None = None,
        codec: str | None = None,
    ) -> None:
        """Publish a table's rows; returns when the last is in the window, not yet confirmed.

        Arguments, and what is raised: as of SyncClient.publish_table().
        """
        for content, count in self._tables.contents(
            self._stream, table, properties,
            subject=subject, client_time=client_time, codec=codec,
        ):  # fmt: skip
            self._add(content, count, typed=True)

    def _add(
        self,
        content: bytes | bytearray,
        count: int,
        taker: Any = None,
        *,
        typed: bool = False,
    ) -> None:
        """Put an encoded batch on its way once the window has room.

        count: its records. taker: has settled() called with its outcome; None: this. typed: the
        batch has rows of a table. Raises what an earlier batch met.
        """
        link = self._link
        with link.lock:
            if not link.has_room():
                link.room(self._timeout_ms, self._stream)
            if self.error is not None:
                raise self.error
            self._publisher.add_content(
                self._stream, self._level, content, count, taker or self, typed=typed
            )
            self._open += count
            self.published += count
            link.wake_up()

    def settled(self, count: int, outcome: Confirm | MalamuteError) -> None:
        """Take the outcome of `count` records of one batch; called by the link, under its lock.

        The first failure is kept for wait() and the next batch; a notice has wait() look again.
        """
        self._open -= count
        if isinstance(outcome, Confirm):
            self.confirmed += count
            self._least = min(self._least, outcome.level)
            self.level = LEVEL_NAMES.get(self._least, str(self._least))
            if self._keep:
                self.confirmations.append(confirmation(outcome, index=0, count=count))
        elif self.error is None:
            self.error = outcome

    def wait(self, timeout_ms: Wait = "default") -> None:
        """Return once everything is confirmed.

        timeout_ms: how long nothing may be confirmed; by default as publisher() was asked.
        Raises the first failure, or Timeout.
        """
        by_default = isinstance(timeout_ms, str) and timeout_ms == DEFAULT_WAIT
        wait = self._timeout_ms if by_default else timeout_ms
        with self._link.lock:
            # The wait begins anew with each confirm.
            while self._open:
                self._changed_from(self._open, wait)
        if self.error is not None:
            raise self.error

    def _changed_from(self, open_now: int, wait: Wait) -> None:
        """Wait until more or fewer records than `open_now` have no outcome. Raises Timeout."""
        self._link.until(lambda: self._open != open_now, wait, WINDOW, self._stream)

    def __enter__(self) -> SyncBulkPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for all confirms, unless the block raised."""
        if kind is None:
            self.wait()
