"""Streams in asyncio: subscribe, read keys, create, edit, look for an offset.

Owns the verbs as awaitables. The rule: a cancelled call leaves the link and all other calls as
they were. link.ask() sends a command, made with the number by which its answer is known, and
returns the fields of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.pattern import Pattern
from malamute_protocol.schema import Schemas
from malamute_protocol.version import Feature
from malamute_py.client.aio.keys import KeyView, completed_facts
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.aio.pages import PagedVerbs
from malamute_py.client.aio.subscription import Subscription
from malamute_py.client.arguments import settings_of, truth
from malamute_py.client.facts import ReadPlan, StreamFacts, StreamVersions, facts
from malamute_py.client.options import StreamOptions
from malamute_py.client.position import StartPoint, start_on_wire
from malamute_py.client.session.calls import Time, make_plan, subscribe_options
from malamute_py.client.session.subscription import CREDIT_BYTES, CREDIT_RECORDS, Notice
from malamute_py.client.session.tables import stream_settings
from malamute_py.client.words import ReadVisibility, Until


class StreamVerbs(PagedVerbs):
    """Verbs for streams, publishing excepted."""

    _subscription_type: type[Subscription]
    _keys_type: type[KeyView]

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
        named, anew = stream_settings(settings_of(settings, more)), truth("replace", replace)
        value = await self._link.ask(lambda number: c.EditStream(number, stream, named, anew))
        return facts(StreamFacts, {"name": stream, **value})

    async def remove_stream(self, stream: str) -> None:
        """Remove a stream and its records. Raises BrokerRefused."""
        await self._link.ask(lambda number: c.RemoveStream(number, stream))

    async def stream_schema(self, stream: str) -> Any:
        """The newest schema of a typed stream, as a pyarrow schema. Raises BrokerRefused."""
        from malamute_protocol.arrow import schema_of

        schemas = await stream_schemas(self._link, stream)
        return schema_of(schemas, schemas.newest)

    async def stream_versions(self, stream: str) -> StreamVersions:
        """Which stream has a name, whether it keeps keys, and the versions of its schema.

        For who may write to it or read it. Raises BrokerRefused: `unknown_stream`; `forbidden` also
        from an older broker, which tells it with STREAM_INFO alone.
        """
        value = await completed_facts(self._link, stream, await _versions(self._link, stream))
        return facts(StreamVersions, {"name": stream, **value})

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


async def _versions(link: LoopLink, stream: str) -> dict[str, Any]:
    """Return the answer to STREAM_SCHEMAS: versions of a stream's schema, and facts for writers.

    The session takes up the stream's bound of a batch. Raises BrokerRefused: `unsupported`: an
    older broker.
    """
    welcome = link.session.welcome
    if welcome is not None and not welcome.features & Feature.TYPED:
        raise BrokerRefused("unsupported", "this broker has no typed streams")
    value: dict[str, Any] = await link.ask(lambda number: c.StreamSchemas(number, stream))
    if link.is_here():  # sync: with link.lock:
        link.publisher.take_sizes(stream, value.pop("batch_bytes_max", None))
    return value


async def stream_schemas(link: LoopLink, stream: str) -> Schemas:
    """The versions of a stream's schema.

    Raises BrokerRefused: `bad_schema`: the stream has none; `unsupported`: an older broker.
    """
    versions = (await _versions(link, stream)).get("schemas")
    if not versions:
        raise BrokerRefused(
            "bad_schema", f"stream '{stream}' has no schema: declare one, or use publish_arrow()"
        )
    return Schemas(versions)
