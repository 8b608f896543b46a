"""Spans of a traced client: names, attributes, parents, links, and the context in properties.

Owns all that a client tells OpenTelemetry. The rule: only Tracing and the traced clients import
this module, so that a client without tracing imports nothing of OpenTelemetry.

Words: a span is what OpenTelemetry is told of one piece of work: its beginning, end and outcome.
Its context is its ids; a propagator writes it into texts and reads it from them. The context of a
call travels in the properties of its records; the span of who gets them has it as its parent, or
links to several. Source: the semantic conventions for messaging spans; ARCHITECTURE.md, Tracing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sized
from contextlib import contextmanager
from time import time_ns
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from opentelemetry.context import Context, attach, detach
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)

from malamute_protocol.batch import Batch, Record
from malamute_protocol.content import Content
from malamute_protocol.encode import with_properties
from malamute_protocol.errors import BatchError, MalamuteError
from malamute_protocol.limits import Limits
from malamute_protocol.properties import parse_properties
from malamute_py.client.engine.log import LOG
from malamute_py.client.session.letters import RequestFailed
from malamute_py.client.session.offering import RequestBase

LINKS_MAX: Final = 128
"""Contexts of one batch that are linked: as many as an SDK keeps of a span by default."""

TYPES: Final = {
    "publish": "send",
    "send": "send",
    "request": "send",
    "submit": "send",
    "atomic": "send",
    "stage": "create",
    "transaction": "send",
    "commit": "send",
    "receive": "receive",
    "process": "process",
    "work": "process",
}
"""Name of an operation -> its type in the semantic conventions; a rollback has none of these."""

_PLACES: WeakKeyDictionary[Batch, str] = WeakKeyDictionary()
"""Batch that a traced reader handed over -> the stream or mailbox that it came from."""
_WORKED: WeakKeyDictionary[RequestBase, SpanContext] = WeakKeyDictionary()
"""Request that a handler was called for -> its span: the log names it after the span has ended."""


class Spans:
    """Maker of the spans of one Tracing; connected() gives the one of a client."""

    def __init__(
        self,
        tracer: Tracer,
        propagator: TextMapPropagator,
        common: Mapping[str, Any] | None = None,
        identity: Callable[[], str] = str,
    ) -> None:
        """tracer: begins spans. propagator: writes their context into texts, and reads it.

        common: attributes of each span. identity: tells the client's; empty: none.
        """
        self._tracer = tracer
        self._propagator = propagator
        self._common: dict[str, Any] = {"messaging.system": "malamute", **(common or {})}
        self._identity = identity
        self._due: deque[tuple[Span, int]] = deque()
        """Spans that are over, and when in ns: those of calls of threads that do not wait."""

    def connected(self, endpoints: tuple[str, ...], identity: Callable[[], str]) -> Spans:
        """Return the maker for a traced client that is being made.

        identity: tells the client's, which the broker may change.
        Its spans have the host and port of the broker where there is one endpoint, by tcp.
        """
        common: dict[str, Any] = {}
        if len(endpoints) == 1:
            kind, _, where = endpoints[0].partition("://")
            host, _, port = where.rpartition(":")
            if kind == "tcp" and port.isdecimal():
                common = {"server.address": host.strip("[]"), "server.port": int(port)}
        return Spans(self._tracer, self._propagator, common, identity)

    def start(
        self,
        operation: str,
        kind: SpanKind,
        place: str = "",
        *,
        count: int = 0,
        context: Context | None = None,
        links: tuple[Link, ...] = (),
        group: str = "",
    ) -> Span:
        """Start a span, with the attributes that the semantic conventions have for its operation.

        place: stream, mailbox or service; empty: not known. count: messages of a batch; 0: the call
        is about one message. context: of the parent; None: the current span's. links: other spans
        that it belongs to.
        """
        attributes: dict[str, Any] = {
            **self._common,
            "messaging.operation.name": operation,
        }
        if operation in TYPES:
            attributes["messaging.operation.type"] = TYPES[operation]
        if identity := self._identity():
            attributes["messaging.client.id"] = identity
        if group:
            attributes["messaging.consumer.group.name"] = group
        if place:
            attributes["messaging.destination.name"] = place
        if count:
            attributes["messaging.batch.message_count"] = count
        name = f"{operation} {place}" if place else operation
        return self._tracer.start_span(name, context, kind, attributes, links)

    def sending(
        self, operation: str, kind: SpanKind, place: Any, payload: Any, *, many: bool,
        context: Context | None = None,
    ) -> Span:  # fmt: skip
        """Start the span of a call that publishes or sends a body, or many of them.

        place, payload: what the caller gave as name and as body or bodies, not checked yet: what is
        no name, and what has no length, the call is about to refuse. many: the call takes several.
        """
        return self.start(
            operation,
            kind,
            place if isinstance(place, str) else "",
            count=len(payload) if many and isinstance(payload, Sized) else 0,
            context=context,
        )

    def carried(self, given: Any, span: Span) -> Any:
        """Return properties with the context of a span; it takes the place of a forwarded one.

        given: the caller's properties: None, one map for all records, or a sequence with one a
        record.
        """
        context: dict[str, str] = {}
        self._propagator.inject(context, set_span_in_context(span))
        if not context:  # the span has no ids: the program has set up no tracing
            return given
        if given is None:
            return context
        if isinstance(given, Mapping):
            return self._renewed(given, context)
        listed = isinstance(given, Collection) and hasattr(given, "__getitem__")
        if listed and not isinstance(given, str | bytes):
            return [context if one is None else self._renewed(one, context) for one in given]
        return given  # The call is about to refuse it.

    def carried_in(self, content: Any, span: Span, limits: Limits) -> Any:
        """Return a caller's encoded content with the context of a span in its properties.

        A content goes as it is whose records have a map each, that has no room for a context, or
        that has a producer: the program may send it again, and its bytes have to be the same then.
        """
        try:
            encoded = Content(content)
            column, stored = encoded.property_section()
            if column is not None or encoded.head.producer_id:
                return content
            given = None if stored is None else parse_properties(bytes(stored))
            carried = self.carried(given, span)
            return content if carried is given else with_properties(encoded, carried, limits)
        except (MalamuteError, TypeError, ValueError):
            return content  # The call is about to refuse it, or it has no room.

    def _renewed(self, given: Any, context: Mapping[str, str]) -> Any:
        """Return properties with the span's context in place of one that the program forwarded.

        given: the caller's properties. context: the span's, as the propagator wrote it.
        """
        if not isinstance(given, Mapping):
            return given  # The call is about to refuse it.
        # A part of the forwarded context without its like in the new one would be of another trace.
        own = {name: value for name, value in given.items() if name not in self._propagator.fields}
        return {**own, **context}

    def ends_later(self, span: Span) -> None:
        """Note that a span is over now; end_due() ends it, in a thread that may wait.

        To end a span is to hand it to the program's exporter, which may take long.
        """
        self._due.append((span, time_ns()))

    def end_due(self) -> None:
        """End the spans that ends_later() noted, each as of then; called by callers' threads."""
        while self._due:
            try:
                span, ended_ns = self._due.popleft()
            except IndexError:  # another thread was faster
                return
            span.end(ended_ns)

    # --- what arrives ------------------------------------------------------------------------

    def contexts_of(self, item: Any) -> list[Context]:
        """Return the distinct contexts that came with a record, message, request or batch.

        Of a batch at most LINKS_MAX. A context that cannot be read is left out.
        """
        distinct: dict[tuple[int, int], Context] = {}
        for properties in _property_maps(item):
            context = self._extracted(properties)
            span = get_current_span(context).get_span_context()  # the sender's
            if span.is_valid:
                distinct.setdefault((span.trace_id, span.span_id), context)
        return list(distinct.values())

    def _extracted(self, properties: Mapping[str, Any]) -> Context:
        """Return the context that the propagator finds in properties; without one an empty one."""
        # Another program wrote them: propagators take texts only.
        texts = {key: value for key, value in properties.items() if isinstance(value, str)}
        return self._propagator.extract(texts, Context())

    def origin_of(self, item: Any) -> tuple[Context | None, tuple[Link, ...]]:
        """Return (context of the parent, links) of a span about what arrived.

        One context that came is the parent; of several none can be, and each is linked.
        """
        contexts = self.contexts_of(item)
        if len(contexts) == 1:
            return contexts[0], ()
        return None, tuple(Link(get_current_span(one).get_span_context()) for one in contexts)

    def received(self, batch: Batch, place: str, group: str = "") -> None:
        """Give a batch that is handed over to the program a span, which ends at once.

        place: stream or mailbox that it came from. group: by which it was read; empty: none.
        """
        try:
            _PLACES[batch] = place  # for processing(), which gets the item alone
            context, links = self.origin_of(batch)
            self.start(
                "receive", SpanKind.CONSUMER, place, count=len(batch), context=context,
                links=links, group=group,
            ).end()  # fmt: skip
        except Exception:  # noqa: BLE001 - raised, it would lose the program these records
            LOG.exception("a span failed; the records are handed over without it")

    @contextmanager
    def processing(self, item: Any) -> Iterator[Span]:
        """Run a block within the span of what the program does about an item."""
        context, links = self.origin_of(item)
        batch = item if isinstance(item, Batch) else getattr(item, "batch", None)
        # A request names its service; of what else came, received() has noted where it came from.
        place = getattr(item, "service", "") or ("" if batch is None else _PLACES.get(batch, ""))
        count = 0 if isinstance(item, Record | RequestBase) else len(item)  # 0: it is one message
        span = self.start(
            "process", SpanKind.CONSUMER, place, count=count, context=context, links=links
        )
        with within(span, context):
            yield span

    @contextmanager
    def working(self, request: Any) -> Iterator[Span]:
        """Run the handler of a request within its span."""
        context, links = self.origin_of(request)
        if context is None:
            # The task or thread of a worker may have begun under a span that is none of this.
            context = Context()
        span = self.start("work", SpanKind.SERVER, request.service, context=context, links=links)
        _WORKED[request] = span.get_span_context()  # for TraceIds
        with within(span, context):
            yield span


@contextmanager
def ending(span: Span) -> Iterator[None]:
    """Run a call whose span ends with it; an error is the span's status."""
    try:
        yield
    except GeneratorExit:
        raise  # a loop over replies was left early, which is no error
    except BaseException as error:
        failed(span, error)
        raise
    finally:
        span.end()


@contextmanager
def ended_if_refused(span: Span) -> Iterator[None]:
    """Run a call whose span outlives it, unless the call raises: that is the span's status."""
    try:
        yield
    except BaseException as error:
        failed(span, error)
        span.end()
        raise


@contextmanager
def within(span: Span, context: Context | None) -> Iterator[None]:
    """Run a block with the span as the current one, and end it; an error is noted in full."""
    token = attach(set_span_in_context(span, context))
    try:
        with ending(span):
            try:
                yield
            except Exception as error:
                span.record_exception(error)
                raise
    finally:
        detach(token)


def failed(span: Span, error: BaseException) -> None:
    """Give a span the status of an error, by the error's code where it has one."""
    code: Any = getattr(error, "code", "")
    if isinstance(error, RequestFailed):
        code, _, _ = error.why.partition(":")  # `code: what the worker said`
    span.set_attribute(
        "error.type", code if isinstance(code, str) and code else type(error).__name__
    )
    span.set_status(Status(StatusCode.ERROR, str(error)))


def _property_maps(item: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the properties of one item, or the distinct maps of a batch's, at most LINKS_MAX.

    Of a batch that cannot be read none come: tracing must not cost the program its records.
    """
    batch = item if isinstance(item, Batch) else getattr(item, "batch", None)
    try:
        if isinstance(item, Record | RequestBase):
            yield item.properties
            return
        if not isinstance(batch, Batch):
            raise TypeError(f"{item!r} is no record, message, request or batch")
        # Encoded maps, and for each row which one it has; no codes: one map for all rows.
        maps, codes = batch.content.properties()
        if codes is not None:
            used = np.unique(codes if batch.indices is None else codes[batch.indices])
            maps = [maps[code] for code in used[used >= 0].tolist()]  # -1: the row has none
        for one in list(dict.fromkeys(maps))[:LINKS_MAX]:
            if one:
                yield parse_properties(one)
    except BatchError:
        return


class TraceIds(logging.Filter):
    """Filter that gives lines of the client's log the ids of their span: `trace_id`, `span_id`.

    The span is the current one, or that of the request which the line is about.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Give a line the ids of its span, if there is one, and let it through."""
        found = get_current_span().get_span_context()
        if not found.is_valid and isinstance(record.args, tuple):
            for argument in record.args:
                if isinstance(argument, RequestBase):
                    found = _WORKED.get(argument, found)
        if found.is_valid:
            record.trace_id = format_trace_id(found.trace_id)
            record.span_id = format_span_id(found.span_id)
        return True


TRACE_IDS: Final = TraceIds()
"""The one filter: a logger takes the same filter once."""
