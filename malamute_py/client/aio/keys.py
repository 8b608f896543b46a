"""The key-value view of a stream in asyncio: get, put, update, delete, keys, watch, history.

Owns these verbs as awaitables. The rule: as in client.py: a cancelled call leaves all others as
they were; a change whose call was cancelled may still be made, and then is made once.

Words: a key is a subject of the stream, its value the newest record, its revision the offset of
that. A deletion is a record, too: a marker without a value.
"""

from __future__ import annotations

import asyncio

# sync: import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.keys import DELETION_FIELD
from malamute_protocol.pattern import Pattern
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.aio.subscription import Subscription
from malamute_py.client.arguments import integer
from malamute_py.client.engine.waits import PUBLISHED
from malamute_py.client.facts import told_to_writers
from malamute_py.client.keys import (
    KeyEntry,
    changed_fields,
    entry_of_answer,
    entry_of_record,
    is_elsewhere,
    key_of,
    pattern_of_key,
    revision_of,
)
from malamute_py.client.position import Confirmation, LastPerSubject, StartPoint
from malamute_py.client.session.calls import (
    Body,
    Fields,
    Properties,
    make_pattern,
    make_row,
    subscribe_options,
)
from malamute_py.client.session.outgoing import RETRY_MS, RETRYABLE
from malamute_py.client.session.publisher import level_number
from malamute_py.client.session.subscription import (
    CREDIT_BYTES,
    CREDIT_RECORDS,
    GapError,
    GapNotice,
    Notice,
)
from malamute_py.client.settings import Wait
from malamute_py.client.words import ConfirmAt, Until

_NO_KEYS: Final = frozenset({"unknown_stream", "unsupported"})
"""Codes that tell that the stream was removed, or made again without keys."""


async def completed_facts(link: LoopLink, stream: str, told: dict[str, Any]) -> dict[str, Any]:
    """Return an answer to STREAM_SCHEMAS with what an older broker tells by STREAM_INFO alone.

    Raises BrokerRefused.
    """
    if "stream" in told:
        return told
    return told | told_to_writers(await link.ask(lambda number: c.StreamInfo(number, stream)))


class KeyView:
    """The keys of one stream that keeps the last record of each subject; see Client.kv()."""

    def __init__(self, link: LoopLink, stream: str) -> None:
        """See Client.kv()."""
        self._link = link
        self._stream = stream
        self._empty: bytes | list[bytes] | None = None
        """Body of a deletion marker; None: the stream is to be asked for."""

    # --- one key ---------------------------------------------------------------------------

    async def get(self, key: str) -> KeyEntry | None:
        """Return the newest value of a key; None: there is no such key.

        No power loss can take back what this returns. Raises BrokerRefused: `unknown_stream`,
        `unsupported` (the stream has no keys), `forbidden`; Timeout; ConnectionLost; GapError: a
        large value cannot be read any more.
        """
        stream, key = self._stream, key_of(key)
        answer = await self._ask(lambda number: c.GetKey(number, stream, key))
        # A value that is too large for the answer is read as records are.
        return await self._newest(key) if is_elsewhere(answer) else entry_of_answer(key, answer)

    async def _newest(self, key: str) -> KeyEntry | None:
        """Read a key's newest record, whose value is too large for an answer; None: it is deleted.

        Raises Timeout; GapError: the record is gone or damaged.
        """
        notices: list[Notice] = []
        subscription = self._subscribe(
            pattern_of_key(key), start=LastPerSubject(), until="tail", on_notice=notices.append
        )
        wait_ms = self._link.engine.settings.call_timeout_ms
        newest: KeyEntry | None = None
        async with subscription:
            while (record := await subscription.next_record(wait_ms)) is not None:
                if record.subject == key:  # a pattern also matches a record's further keys
                    newest = entry_of_record(record)
        for notice in notices:
            if newest is None and isinstance(notice, GapNotice):
                raise GapError(notice)
        return None if newest is None or newest.deleted else newest

    async def put(
        self,
        key: str,
        value: Body,
        *,
        fields: Fields | None = None,
        codec: str | None = None,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> int:
        """Set a key, whatever it was, and return the new revision.

        Arguments and errors as of Client.publish(); also BrokerRefused `full` (newest values fill
        the stream's ring) and `limit` (too many keys). confirm: "none" gives -1 and raises no
        refusal: what is refused is lost, such as a put into a stream that was removed, or that its
        broker has just begun with, and Client.refused_unconfirmed counts it.
        """
        if self._empty is None:
            await self._marker_body()  # else a put would make the stream, without keys
        return await self._change(
            key, value, changed_fields(fields), codec, None, confirm, timeout_ms
        )

    async def update(
        self,
        key: str,
        value: Body,
        *,
        revision: int,
        fields: Fields | None = None,
        codec: str | None = None,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> int:
        """Set a key if its revision is the one given, and return the new revision.

        revision: 0 creates the key: there must be none. A change that is sent again after a lost
        link is made once and succeeds once.
        Raises RevisionConflict, whose `revision` is the key's own (0: there is no such key);
        otherwise as put().
        """
        return await self._change(
            key, value, changed_fields(fields), codec, revision_of(revision), confirm, timeout_ms
        )

    async def delete(
        self,
        key: str,
        *,
        revision: int | None = None,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> int:
        """Delete a key by a marker, and return the marker's offset.

        The marker is kept for the broker's `streams.deleted_keys_ms`. A key that is not there gets
        one, too: deleting twice is deleting once. revision: delete the key only if this is its
        revision; 0 stands for no key, so that another one is refused where there is none. Raises
        as update().
        """
        empty = await self._marker_body()
        wanted = None if revision is None else revision_of(revision)
        fields = {DELETION_FIELD: ""}
        return await self._change(key, empty, fields, None, wanted, confirm, timeout_ms)

    async def _change(
        self,
        key: str,
        value: Body,
        fields: Mapping[str, str] | None,
        codec: str | None,
        revision: int | None,
        confirm: ConfirmAt,
        timeout_ms: Wait,
        properties: Properties | None = None,
    ) -> int:
        """Publish one record, the new value or deletion of a key, and return its offset.

        revision: of the key as the broker must have it, else it refuses; None: whatever it has.
        """
        link = self._link
        future: asyncio.Future[Confirmation] = link.loop.create_future()
        row = make_row(value, key_of(key), fields, None, None, properties, future, codec)
        level = level_number(confirm)
        if link.is_here():  # sync: with link.lock:
            if not link.has_room():
                timeout_ms = await link.room(row.size, timeout_ms, self._stream)
            if revision is None:
                link.publisher.add(self._stream, level, row, keyed=True)
            else:
                link.publisher.add_update(self._stream, level, row, revision)
            link.leave()
        try:
            return (await link.limit(future, timeout_ms, PUBLISHED, self._stream)).offset
        except BrokerRefused as error:
            if error.code in _NO_KEYS:
                self._empty = None  # the next put asks for the stream again
            raise

    async def _marker_body(self) -> bytes | list[bytes]:
        """Return the body of a deletion marker; asks the broker whether the stream has keys, once.

        A first put would otherwise make a stream that keeps no keys. The marker's body is empty: of
        a stream of lists an empty list. Raises BrokerRefused `unsupported`: the stream was made
        without keys.
        """
        if self._empty is None:
            stream = self._stream
            asked = await self._ask(lambda number: c.StreamSchemas(number, stream))
            asked = await completed_facts(self._link, stream, asked)
            if not asked.get("keep"):
                raise BrokerRefused(
                    "unsupported", f"stream '{self._stream}' has no keys: it was made without keep"
                )
            self._empty = [] if asked.get("body_kind") == "list" else b""
        return self._empty

    # --- many keys -------------------------------------------------------------------------

    async def keys(self, pattern: str | Pattern = "#", *, limit: int = 0) -> dict[str, int]:
        """Return the keys that match a pattern, in the order of their names, with their revisions.

        pattern: of a kind that asks for nothing but the subject. limit: at most so many; 0: all.
        """
        integer("limit", limit, 0)
        stream, wire = self._stream, make_pattern(pattern)
        found: dict[str, int] = {}
        after, more = "", True  # the last key of the page before, and whether others follow it
        while more and (not limit or len(found) < limit):
            page = await self._ask(_page(stream, wire, after, max(0, limit - len(found))))
            found.update(page["keys"])
            after, more = page["after"], page["more"]
        return found

    def watch(self, pattern: str | Pattern = "#") -> KeyWatch:
        """Follow the keys that match a pattern: present values first, then each change as it comes.

        Iterate the result: entries, deletions included, in the order of their revisions, and one
        None where the present is complete. No power loss can take back what it gives.
        """
        return KeyWatch(self._subscribe(make_pattern(pattern), start=LastPerSubject()))

    async def history(self, key: str) -> list[KeyEntry]:
        """Return what is left of a key's values and deletions, the oldest first."""
        pattern = pattern_of_key(key_of(key))
        subscription = self._subscribe(
            pattern, start="earliest", until="tail", on_notice=_pass_over
        )
        async with subscription:
            return [
                entry_of_record(record) async for record in subscription if record.subject == key
            ]

    def _subscribe(
        self,
        pattern: Pattern,
        *,
        start: StartPoint,
        until: Until = "",
        on_notice: Callable[[Notice], None] | None = None,
    ) -> Subscription:
        """Subscribe to what no power loss can take back, for get(), watch() and history().

        until="tail": to the end that the stream has now.
        """
        request = subscribe_options(
            self._stream,
            pattern,
            start=start,
            visibility="durable",
            end=None,
            until=until,
            client_time=None,
            create=False,
            whole=False,
            credit_records=CREDIT_RECORDS,
            credit_bytes=CREDIT_BYTES,
        )
        return Subscription(self._link, request, strict=False, on_notice=on_notice)

    async def _ask(self, make: Callable[[int], Any]) -> dict[str, Any]:
        """Ask the broker, and again when it says that it cannot answer just now.

        make: as of link.ask(). The pauses are bounded by the client's call_timeout_ms; then the
        refusal is raised.
        """
        left_ms = self._link.engine.settings.call_timeout_ms
        while True:
            try:
                return await self._link.ask(make)
            except BrokerRefused as error:
                pause_ms = error.retry_ms or RETRY_MS
                if error.code not in RETRYABLE or (left_ms is not None and left_ms < pause_ms):
                    raise
            if left_ms is not None:
                left_ms -= pause_ms
            await asyncio.sleep(pause_ms / 1000)  # sync: time.sleep(pause_ms / 1000)


class KeyWatch:
    """Entries of the keys that match a pattern, as an async iterator; for one task at a time."""

    def __init__(self, subscription: Subscription) -> None:
        """See KeyView.watch()."""
        self._subscription = subscription
        self._tail = -1
        """Offset at which the present values end: the tail when the broker accepted."""
        self._gaps = -1
        """Gaps and rewinds of the subscription when the tail was asked for; -1: it was not."""
        self.complete = False
        """Whether the present values have been given."""

    def __aiter__(self) -> KeyWatch:
        return self

    async def __anext__(self) -> KeyEntry | None:
        return await self.next()

    async def next(self, timeout_ms: int | None = None) -> KeyEntry | None:
        """Return the next entry; None once, where the present is complete.

        Raises Timeout (nothing is lost), the broker's refusal, or StopAsyncIteration at the end.
        """
        subscription = self._subscription
        if not self.complete:
            # The present ends at the tail that the stream had when the broker accepted.
            if self._gaps != subscription.gaps:
                # A log that lost records may never come to the tail that it had before.
                await subscription.accepted(timeout_ms)
                self._gaps = subscription.gaps
                self._tail = subscription.tail
            record = await subscription.next_record(timeout_ms, before=self._tail)
            if record is None and not subscription.ended:
                self.complete = True
                return None
        else:
            record = await subscription.next_record(timeout_ms)
        if record is None:
            raise StopAsyncIteration
        return entry_of_record(record)

    async def close(self) -> None:
        """End the watch, also under a task that waits for it."""
        await self._subscription.close()

    async def __aenter__(self) -> KeyWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _page(stream: str, pattern: Pattern, after: str, limit: int) -> Callable[[int], c.ListKeys]:
    """Return the maker of the question for the keys that follow after a key."""
    return lambda number: c.ListKeys(number, stream, pattern, after, limit)


def _pass_over(notice: Notice) -> None:
    """Take no note of older values that are gone: a history is what is left."""
