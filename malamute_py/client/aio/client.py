"""The asyncio client: connect, publish, subscribe, ask.

Owns the verbs as awaitables. The rule: a cancelled call leaves the link and all
other calls as they were; a record whose publish was cancelled may still be in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Any, Unpack

import zmq

from malamute_protocol import DEFAULT_ENDPOINT
from malamute_protocol import commands as c
from malamute_protocol.commands import Confirm, Level
from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    LocalProtocolError,
    MalamuteError,
    Timeout,
)
from malamute_protocol.pattern import Pattern
from malamute_protocol.schema import Schemas
from malamute_protocol.version import Feature
from malamute_py.client.aio.keys import KeyView
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.aio.mail import Inbox, MailVerbs
from malamute_py.client.aio.opening import Opening  # asyncio only
from malamute_py.client.aio.queues import AtomicStep, Member, QueueVerbs
from malamute_py.client.aio.subscription import Subscription
from malamute_py.client.aio.transactions import Transaction
from malamute_py.client.aio.work import Served, Worker, WorkVerbs
from malamute_py.client.arguments import name_of, settings_of, truth
from malamute_py.client.engine.waits import ACKED, OPENED, PUBLISHED, WINDOW
from malamute_py.client.facts import (
    BrokerFacts,
    LinkFacts,
    NamespaceFacts,
    ReadPlan,
    ReloadedSetting,
    StreamFacts,
    UserFacts,
    facts,
)
from malamute_py.client.options import StreamOptions
from malamute_py.client.position import Confirmation, StartPoint, start_on_wire
from malamute_py.client.session.attempts import LinkState
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
    make_plan,
    make_row,
    subscribe_options,
)
from malamute_py.client.session.events import LinkEvent, Unlinked
from malamute_py.client.session.publisher import LEVEL_NAMES, confirmation, level_number
from malamute_py.client.session.subscription import CREDIT_BYTES, CREDIT_RECORDS, Notice
from malamute_py.client.session.tables import TableRows, stream_settings
from malamute_py.client.settings import (
    DEFAULT_WAIT,
    ClientOptions,
    ClientSettings,
    Wait,
    make_settings,
    no_link,
)
from malamute_py.client.tracing import Tracing, tracing_of
from malamute_py.client.words import ConfirmAt, ReadVisibility, Until

__all__ = ["BulkPublisher", "Client", "Connecting", "Subscription", "connect"]  # asyncio only
# sync: __all__ = ["SyncBulkPublisher", "SyncClient", "SyncSubscription", "connect_sync"]

CONNECT_MS = 10_000
FLUSH_MS = 5_000


class Connecting(Opening["Client"]):  # asyncio only
    """Result of connect(): `client = await connect()` or `async with connect() as client`."""


def connect(
    endpoint: str | Sequence[str] = DEFAULT_ENDPOINT,
    *,
    wait: bool = True,
    timeout_ms: int | None = CONNECT_MS,
    context: zmq.Context[Any] | None = None,
    on_link: Callable[[LinkEvent], None] | None = None,
    tracing: bool | Tracing = False,
    **options: Unpack[ClientOptions],
) -> Connecting:  # sync: ) -> Client:
    """Connect to a broker; await it, or use it with `async with`.

    endpoint: one, or several to be tried in turn. wait: keep trying until timeout_ms is over
    (None: for ever); otherwise the first failure is raised. options: fields of
    ClientSettings, which help(ClientSettings) explains.
    context: a zmq.Context, needed for inproc endpoints. on_link: told each change of the link.
    tracing: spans of OpenTelemetry, True or a Tracing; needs the extra `otel`.
    Raises SettingError at once; Timeout, ConnectionLost or BrokerRefused (a credential or
    version that was refused is final) when awaited.
    """
    settings = make_settings(endpoint, options, timeout_ms)
    make = Client if tracing is False else _traced(tracing)
    # sync: return _opened(make(settings, context=context, on_link=on_link), wait, timeout_ms)

    async def open_client() -> Client:  # asyncio only
        client = make(settings, context=context, on_link=on_link)
        return await _opened(client, wait, timeout_ms)

    return Connecting(open_client)  # asyncio only


def _traced(asked: Any) -> Callable[..., Client]:
    """The maker of clients for a tracing that was asked for. Raises SettingError."""
    tracing = tracing_of(asked)
    if tracing is None:
        return Client
    from malamute_py.client.aio.traced import TracedClient

    return partial(TracedClient, tracing)


async def _opened(client: Client, wait: bool, timeout_ms: int | None) -> Client:
    """Return the client once its link is open; give it up if the wait fails."""
    try:
        await client.opened(wait=wait, timeout_ms=timeout_ms)
    except BaseException:
        client.abort()
        raise
    return client


class Client(MailVerbs, WorkVerbs, QueueVerbs):
    """One session with a broker, in the event loop that made it; use it from that loop only."""

    _subscription_type = Subscription
    _keys_type = KeyView
    _inbox_type = Inbox
    _worker_type = Worker
    _member_type = Member
    _step_type = AtomicStep
    _transaction_type = Transaction

    def __init__(
        self,
        settings: ClientSettings,
        *,
        context: zmq.Context[Any] | None = None,
        on_link: Callable[[LinkEvent], None] | None = None,
    ) -> None:
        """Begins to connect; `connect` is the comfortable way, with the waiting done."""
        self.settings = settings
        self._link = LoopLink(settings, context, on_link)
        self._session = self._link.session
        self._served: list[Served] = []
        self._publisher = self._link.publisher

    # --- life --------------------------------------------------------------------------------

    async def opened(self, *, wait: bool = True, timeout_ms: int | None = CONNECT_MS) -> None:
        """Return once a link is open; see connect() for what is raised."""
        link, session = self._link, self._session
        truth("wait", wait)

        def ready() -> bool:
            failed = not wait and isinstance(link.last, Unlinked)
            return failed or session.state in (LinkState.LINKED, LinkState.CLOSED)

        if True:  # sync: with link.lock:
            try:
                await link.until(ready, link.engine, timeout_ms, OPENED, "a link")
            except Timeout:
                why = link.last.reason if isinstance(link.last, Unlinked) else "no answer"
                raise no_link(self.settings.endpoints, timeout_ms, why) from None
            if session.state is LinkState.CLOSED:
                raise session.error or ConnectionLost("the client is closed")
            if session.state is not LinkState.LINKED and isinstance(link.last, Unlinked):
                raise ConnectionLost(link.last.reason)

    async def flush(self, timeout_ms: Wait = "default") -> None:
        """Return once nothing is unconfirmed. Raises Timeout, or what ended the session."""
        link, session = self._link, self._session
        if True:  # sync: with link.lock:
            link.wake_up()
            await link.until(
                lambda: session.idle or session.state is LinkState.CLOSED,
                session,
                timeout_ms,
                ACKED,
                "everything that was sent",
            )
            if session.error is not None:
                raise session.error

    async def close(
        self, *, drain: bool = False, drain_ms: int | None = None, flush_ms: int = FLUSH_MS
    ) -> None:
        """Wait for what is unconfirmed, at most flush_ms, and end the link; may be repeated.

        What was not confirmed by then fails with ConnectionLost. Requests in hand that are not
        finished go to other workers. drain: workers begin nothing more, and close() waits first
        until they have finished what they have begun, drain_ms at most (None: as long as it
        takes).
        """
        if self._link.loop.is_closed():  # asyncio only
            self.abort()
            return
        self._link.stay()  # asyncio only
        offerings = self._session.offerings
        if drain and self._session.state is not LinkState.CLOSED:
            if True:  # sync: with self._link.lock:
                offerings.drain_all()
                # sync: self._link.notify()
            with contextlib.suppress(MalamuteError):
                await self.flush(drain_ms)
        if True:  # sync: with self._link.lock:
            if flush_ms:
                offerings.close_all()
                # sync: self._link.notify()
        if self._session.state is not LinkState.CLOSED and flush_ms and not self._session.idle:
            # Each publish that is affected raises by itself.
            with contextlib.suppress(MalamuteError):
                await self.flush(flush_ms)
        self.abort()

    def abort(self) -> None:
        """End at once, without waiting for anything."""
        self._link.stop()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception without waiting for what is unconfirmed."""
        await self.close(flush_ms=FLUSH_MS if kind is None else 0)

    @property
    def linked(self) -> bool:
        """A link is open now."""
        return self._session.state is LinkState.LINKED

    @property
    def welcome(self) -> c.Welcome | None:
        """Facts that the broker stated on the newest link; None before the first."""
        return self._session.welcome

    @property
    def identity(self) -> str:
        """The name by which the broker knows this client; "" before the first link, or for none.

        A replica (`identity="web-{n}"`) keeps its number over reconnects. Where it was away so long
        that the broker gave the number to another, it has a new one from then on.
        """
        return self._session.identity

    @property
    def reconnects(self) -> int:
        """Links opened beyond the first."""
        return max(0, self._session.links - 1)

    @property
    def refused_unconfirmed(self) -> int:
        """Batches published with confirm="none" that the broker refused."""
        return self._publisher.unpromised_refusals

    # --- publishing ----------------------------------------------------------------------------

    async def publish(
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
        future: asyncio.Future[Confirmation] = link.loop.create_future()
        row = make_row(
            body, subject, fields, client_time_ms, expires_at_ms, properties, future, codec
        )
        level = level_number(confirm)
        if True:  # sync: with link.lock:
            if not link.has_room():
                timeout_ms = await link.room(row.size, timeout_ms, stream)
            self._publisher.add(stream, level, row)
            link.leave()
        if timeout_ms is DEFAULT_WAIT:  # asyncio only
            # As limit() does it, without its call for each record.
            link.fresh.append((future, -1, PUBLISHED, stream))
            return await future
        return await link.limit(future, timeout_ms, PUBLISHED, stream)

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
        # sync: timeout_ms: Wait = 0,
    ) -> asyncio.Future[Confirmation]:
        """Publish one record without waiting; the future is its confirm.

        What was not sent when the program ends is lost: flush() or close() before that.
        Raises BrokerRefused `window` when too much is unconfirmed: nothing was taken;
        otherwise as publish().
        """
        link = self._link
        future: asyncio.Future[Confirmation] = link.loop.create_future()
        row = make_row(
            body, subject, fields, client_time_ms, expires_at_ms, properties, future, codec
        )
        level = level_number(confirm)
        if True:  # sync: with link.lock:
            if not self._session.window.has_room():
                # sync: link.room(timeout_ms, stream)
                raise BrokerRefused(  # asyncio only
                    "window", "too much is unconfirmed: await some of it first"
                )
            self._publisher.add(stream, level, row)
            link.leave()
        return future

    async def publish_many(
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
        async with self._window(stream, confirm, timeout_ms) as window:
            await window.publish_many(
                bodies,
                subject=subject,
                subjects=subjects,
                fields=fields,
                client_time_ms=client_time_ms,
                expires_at_ms=expires_at_ms,
                properties=properties,
                codec=codec,
            )
        return window.confirmations

    async def publish_batch(
        self,
        stream: str,
        content: bytes,
        *,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> Confirmation:
        """Publish one batch content that malamute_protocol.batch encoded.

        It goes as it is but for its producer and sequence, unless `idempotent` is off: then a
        refusal of these (`unknown_producer`, `out_of_sequence`) is raised. Raises as publish().
        """
        async with self._window(stream, confirm, timeout_ms) as window:
            await window.publish_batch(content)
        return window.confirmations[0]

    async def publish_arrow(
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
        one subject for all. properties: of each row. Raises as publish().
        """
        async with self._window(stream, confirm, timeout_ms) as window:
            for content, _ in arrow_contents(table, body, subject, properties):
                await window.publish_batch(content)
        return window.confirmations

    async def publish_table(
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
        async with self._window(stream, confirm, timeout_ms) as window:
            await window.publish_table(
                table,
                subject=subject,
                client_time=client_time,
                properties=properties,
                codec=codec,
            )
        return window.confirmations

    def publisher(
        self,
        stream: str,
        *,
        confirm: ConfirmAt = "default",
        keep: bool = True,
        timeout_ms: Wait = "default",
    ) -> BulkPublisher:
        """A run of publishing whose confirms are awaited together, at its end.

        keep: collect the Confirmations; False for runs without end, where a count is enough.
        timeout_ms: how long nothing may be confirmed while that is waited for, or the window be
        full; None: for ever.
        """
        return self._window(stream, confirm, timeout_ms, keep)

    def _window(
        self,
        stream: str,
        confirm: ConfirmAt,
        timeout_ms: Wait,
        keep: bool = True,
        kind: type[BulkPublisher] | None = None,
    ) -> BulkPublisher:
        """A run of publishing. kind: of a client that asks for another than the plain one."""
        name_of("stream", stream)
        kind = BulkPublisher if kind is None else kind
        return kind(self._link, stream, level_number(confirm), keep, timeout_ms)

    # --- subscribing ---------------------------------------------------------------------------

    def subscribe(
        self,
        stream: str,
        pattern: str | Pattern = "#",
        *,
        start: StartPoint = "latest",
        visibility: ReadVisibility = "live",
        end: int | None = None,
        until: Until = "",
        client_time: tuple[Time, Time] | None = None,
        create: bool = False,
        whole: bool = False,
        strict: bool = False,
        on_notice: Callable[[Notice], None] | None = None,
        credit_records: int = CREDIT_RECORDS,
        credit_bytes: int = CREDIT_BYTES,
        # sync: timeout_ms: int | None = None,
    ) -> Subscription:
        """Subscribe to the records of a stream that match a pattern.

        pattern: text as on the command line ("forex.*", "prefix:a.", "fields:region=eu"), or what
        topic(), prefix(), regex(), fields(), any_of(), all_of() and not_() make.
        start: "earliest", "latest", an offset, a datetime, a Position, AtTime, AtClientTime,
        AfterMessage, AtMessage or LastPerSubject. visibility: "live", or "durable": only what no
        power loss takes back. end: stop before this offset; until="tail": at what is the tail
        now. client_time: only records with a client time in [from, to). strict: a gap raises
        GapError in the loop; otherwise it is logged, counted and given to on_notice.
        create: make the stream when there is none; by default a name that is no stream's is
        refused `unknown_stream`, with the names that it may be a misspelling of.
        credit: what may wait in this client. Iterate the result, or its batches().
        Raises PatternError or LocalProtocolError; a refusal is raised by the iteration.
        """
        request = subscribe_options(
            stream,
            pattern,
            start=start,
            visibility=visibility,
            end=end,
            until=until,
            client_time=client_time,
            create=create,
            whole=whole,
            credit_records=credit_records,
            credit_bytes=credit_bytes,
        )
        return self._subscription_type(
            self._link,
            request,
            strict=strict,
            on_notice=on_notice,
            # sync: timeout_ms=timeout_ms,
        )

    def kv(self, stream: str) -> KeyView:
        """View a stream that keeps the last record of each subject as keys and their values.

        Such a stream is made by create_stream(name, keep="last-per-subject", ring_bytes=...). This
        asks the broker nothing.
        """
        return self._keys_type(self._link, stream)

    # --- asking --------------------------------------------------------------------------------

    async def create_stream(
        self,
        stream: str,
        settings: Mapping[str, Any] | None = None,
        /,
        **more: Unpack[StreamOptions],
    ) -> StreamFacts:
        """Create a stream; the same again succeeds.

        settings, by name or as a mapping; 0 is no bound: memory=True (in memory only), ring_bytes
        (a ring of its own), full ("overwrite" or "refuse" in that ring), max_bytes, max_age_ms and
        max_records (older records are dropped), body_kind ("blob", "list", "arrow"; else the first
        batch decides), schema (a pyarrow schema: the stream is typed), validate ("schema": a typed
        batch is of the schema; "full": and each of its values fits), level ("synced" or "stored",
        what confirm="default" means), description, keep ("last-per-subject": see kv()). The first
        three and keep cannot be changed later, and a schema only grows; the broker keeps its
        versions as former_schemas.
        Raises BrokerRefused: `stream_exists` with other settings, `bad_setting`, ...
        """
        named = stream_settings(settings_of(settings, more))
        value = await self._link.ask(lambda number: c.CreateStream(number, stream, named))
        return facts(StreamFacts, {"name": stream, **value})

    async def edit_stream(
        self,
        stream: str,
        settings: Mapping[str, Any] | None = None,
        /,
        *,
        replace: bool = False,
        **more: Unpack[StreamOptions],
    ) -> StreamFacts:
        """Change settings of a stream; those not named stay.

        settings: as those of create_stream(). replace: those not named go back to what a new stream
        has; what cannot be changed stays, and so do body_kind and schema. A new schema has the
        columns of the old one, some perhaps wider (int32 to int64, float to double), and nullable
        ones after them; another is refused `bad_schema`. Raises BrokerRefused.
        """
        named, swap = stream_settings(settings_of(settings, more)), truth("replace", replace)
        value = await self._link.ask(lambda number: c.EditStream(number, stream, named, swap))
        return facts(StreamFacts, {"name": stream, **value})

    async def remove_stream(self, stream: str) -> None:
        """Remove a stream and its records. Raises BrokerRefused."""
        await self._link.ask(lambda number: c.RemoveStream(number, stream))

    async def stream_schema(self, stream: str) -> Any:
        """The newest schema of a typed stream, as a pyarrow schema. Raises BrokerRefused."""
        from malamute_protocol.arrow import schema_of

        schemas = await stream_schemas(self._link, stream)
        return schema_of(schemas, schemas.newest)

    async def stream_info(self, stream: str) -> StreamFacts:
        """Facts about one stream. Raises BrokerRefused `unknown_stream`."""
        value = await self._link.ask(lambda number: c.StreamInfo(number, stream))
        return facts(StreamFacts, {"name": stream, **value})

    async def list_streams(self, prefix: str = "", *, limit: int = 0) -> list[StreamFacts]:
        """Short facts about all streams whose name begins with the prefix, in name order.

        limit: at most so many, the first by name; 0: all.
        """
        return await self._pages(
            StreamFacts,
            lambda number, after: c.ListStreams(number, prefix, after),
            limit,
            listed="streams",
        )

    async def find_offset(self, stream: str, start: StartPoint) -> int:
        """The offset that a start point stands for. Raises BrokerRefused."""
        wire = start_on_wire(start)
        value = await self._link.ask(lambda number: c.FindOffset(number, stream, wire))
        return int(value["offset"])

    async def plan_read(
        self,
        stream: str,
        pattern: str | Pattern = "#",
        *,
        start: StartPoint = "earliest",
        end: int | None = None,
        records_max: int = 0,
        bytes_max: int = 0,
        split_bytes: int = 0,
        visibility: ReadVisibility = "durable",
        client_time: tuple[Time, Time] | None = None,
    ) -> ReadPlan:
        """Plan a bounded read from the broker's index: its end and where to split it.

        records_max: counts selected records. Such a plan may end early, with fewer `records` than
        that before the tail: ask again from its `to_offset` for what is left of them.
        """
        make = make_plan(
            stream,
            pattern,
            start=start,
            end=end,
            records_max=records_max,
            bytes_max=bytes_max,
            split_bytes=split_bytes,
            visibility=visibility,
            client_time=client_time,
        )
        return facts(ReadPlan, await self._link.ask(make))

    async def broker_info(self) -> BrokerFacts:
        """Facts about the broker."""
        return facts(BrokerFacts, await self._link.ask(c.BrokerInfo))

    async def list_links(self, limit: int = 1000) -> list[LinkFacts]:
        """The links that the broker has, the oldest first. Raises BrokerRefused `forbidden`.

        limit: at most so many; 0: all.
        """
        return await self._pages(
            LinkFacts,
            lambda number, after: c.ListLinks(number, limit or 1000, after),
            limit,
            listed="links",
            first=0,
        )

    async def kick(self, link: int, reason: str = "") -> None:
        """End a link by its number. Raises BrokerRefused."""
        await self._link.ask(lambda number: c.Kick(number, link, reason))

    async def list_users(self, verb: str = "", name: str = "") -> list[UserFacts]:
        """Ask for the users and permissions in force, by name. Needs the permission manage_users.

        verb, name: what each user is asked about, such as "read" and a stream's name: see `may`.
        Raises BrokerRefused.
        """
        return await self._pages(
            UserFacts,
            lambda number, after: c.ListUsers(number, verb, name, after),
            0,
            listed="users",
        )

    async def list_namespaces(self, *, limit: int = 0) -> list[NamespaceFacts]:
        """Ask for the namespaces by name and what each holds, or for the caller's own alone.

        limit: at most so many; 0: all. Raises BrokerRefused `forbidden`: the caller is in no
        namespace and may not manage users.
        """
        return await self._pages(NamespaceFacts, c.ListNamespaces, limit, listed="namespaces")

    async def reload_config(self) -> list[ReloadedSetting]:
        """Have the broker read its configuration and users anew. Raises BrokerRefused.

        Returns each setting that differs or is wrong, and what became of it.
        """
        value = await self._link.ask(c.ReloadConfig)
        return [ReloadedSetting(*change) for change in value["changes"]]


async def stream_schemas(link: LoopLink, stream: str) -> Schemas:
    """The versions of a stream's schema.

    Raises BrokerRefused: `bad_schema`: the stream has none; `unsupported`: an older broker.
    """
    welcome = link.session.welcome
    if welcome is not None and not welcome.features & Feature.TYPED:
        raise BrokerRefused("unsupported", "this broker has no typed streams")
    value = await link.ask(lambda number: c.StreamSchemas(number, stream))
    versions = value.get("schemas")
    if not versions:
        raise BrokerRefused(
            "bad_schema", f"stream '{stream}' has no schema: declare one, or use publish_arrow()"
        )
    return Schemas(versions)


class BulkPublisher:
    """Batches published one after the other, confirmed together; an async context manager."""

    def __init__(
        self, link: LoopLink, stream: str, level: int, keep: bool, timeout_ms: Wait
    ) -> None:
        """See Client.publisher()."""
        self._link = link
        self._timeout_ms = timeout_ms
        self._publisher = link.publisher
        self._stream = stream
        self._level = level
        self._keep = keep
        self._open = 0
        self._schemas: Schemas | None = None
        """Schemas of the stream, once a table asked for them."""
        self._least = int(Level.REPLICATED)
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

    async def publish_many(
        self,
        bodies: Bodies,
        *,
        subject: str = "",
        subjects: Sequence[str | Sequence[str]] | None = None,
        **options: Unpack[BulkOptions],
    ) -> None:
        """Publish many records; returns when the last is in the window, not yet confirmed.

        options: as of Client.publish_many(). Raises the first failure of the window so far.
        """
        bulk = Bulk(
            bodies,
            batch_bytes=self._link.session.batch_bytes,
            subject=None if subjects is not None else subject,
            subjects=subjects,
            options=options,
        )
        link = self._link
        for first, end in bulk.cuts():
            if not link.has_room():  # asyncio only
                await link.room(link.session.batch_bytes, self._timeout_ms, self._stream)
            if True:  # sync: with link.lock:
                expected = self._publisher.expected(self._stream, self._level)
            # sync: # Encoded outside the lock: the link's thread goes on sending meanwhile.
            await self._add(bulk.encode(first, end, expected), end - first)
            # The link sends this batch while the next one is encoded.
            await asyncio.sleep(0)  # asyncio only

    async def publish_batch(self, content: bytes) -> None:
        """Publish one encoded content; returns when it is in the window."""
        await self._add(content, content_count(content))

    async def publish_table(
        self,
        table: Any,
        *,
        subject: str = "",
        client_time: str = "",
        properties: Properties | None = None,
        codec: str | None = None,
    ) -> None:
        """Publish a table's rows; returns when the last is in the window, not yet confirmed.

        Arguments, and what is raised: as of Client.publish_table().
        """
        known = self._schemas
        if known is None:
            known = self._schemas = await stream_schemas(self._link, self._stream)
            rows = TableRows(table, known, subject=subject, client_time=client_time, codec=codec)
        else:
            try:
                rows = TableRows(
                    table, known, subject=subject, client_time=client_time, codec=codec
                )
            except LocalProtocolError as error:
                if error.code != "bad_schema":
                    raise
                # The schema may have grown since.
                known = self._schemas = await stream_schemas(self._link, self._stream)
                rows = TableRows(
                    table, known, subject=subject, client_time=client_time, codec=codec
                )
        for content, count in rows.contents(
            self._link.session.batch_bytes, self._publisher.limits, properties
        ):
            await self._add(content, count)
            # The link sends this batch while the next one is encoded.
            await asyncio.sleep(0)  # asyncio only

    async def _add(self, content: bytes | bytearray, count: int, taker: Any = None) -> None:
        """Put an encoded batch on its way once the window has room.

        taker: of its outcome; None: this. Raises what an earlier one met.
        """
        link = self._link
        if True:  # sync: with link.lock:
            if not link.has_room():
                await link.room(len(content), self._timeout_ms, self._stream)
            if self.error is not None:
                raise self.error
            self._publisher.add_content(self._stream, self._level, content, count, taker or self)
            self._open += 1
            self.published += count
            link.wake_up()

    def settled(self, count: int, outcome: Confirm | MalamuteError) -> None:
        """Take the outcome of a batch of `count` records; called by the link."""
        self._open -= 1
        if isinstance(outcome, Confirm):
            self.confirmed += count
            self._least = min(self._least, outcome.level)
            self.level = LEVEL_NAMES.get(self._least, str(self._least))
            if self._keep:
                self.confirmations.append(confirmation(outcome, 0, count))
        elif self.error is None:
            self.error = outcome
        self._link.notify(self)  # asyncio only

    async def wait(self, timeout_ms: Wait = "default") -> None:
        """Return once everything is confirmed.

        timeout_ms: how long nothing may be confirmed; by default as the window was asked for.
        Raises the first failure, or Timeout.
        """
        unsaid = isinstance(timeout_ms, str) and timeout_ms == DEFAULT_WAIT
        wait = self._timeout_ms if unsaid else timeout_ms
        if True:  # sync: with self._link.lock:
            while self._open:
                await self._fewer_than(self._open, wait)
        if self.error is not None:
            raise self.error

    async def _fewer_than(self, open_now: int, wait: Wait) -> None:
        """Wait until a batch less is open, or another was added. Raises Timeout."""
        await self._link.until(lambda: self._open != open_now, self, wait, WINDOW, self._stream)

    async def __aenter__(self) -> BulkPublisher:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for all confirms, unless the block raised."""
        if kind is None:
            await self.wait()
