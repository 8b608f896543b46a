# DO NOT EDIT: made from ../aio/traced.py by `make sync-client` (tools/sync_client.py).
"""The client with spans of OpenTelemetry, and what its calls return, for threads.

Owns which calls and which arrivals have spans. The rule: a traced client is made of subclasses,
which connect_sync(tracing=...) chooses, so that a client without tracing has not one call or
look-up more.

Words: a span is what OpenTelemetry is told of one piece of work: its beginning, end and outcome.
Its context, an id, travels in the properties of records, so that those who get them can link their
own spans to it. The place is the stream, mailbox or service that a call names. The payload is its
body, bodies, table or encoded content. spans.py makes the spans. Source: ARCHITECTURE.md, Tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from types import TracebackType
from typing import Any, Final, TypeVar, cast

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    Span,
    SpanKind,
    get_current_span,
    set_span_in_context,
)

from malamute_protocol.batch import Batch
from malamute_protocol.commands import Confirm
from malamute_protocol.errors import MalamuteError
from malamute_py.client.engine.log import LINK_LOG, LOG
from malamute_py.client.engine.waits import ANSWER
from malamute_py.client.position import Confirmation
from malamute_py.client.session.held_batches import HeldBatch
from malamute_py.client.session.letters import HandoutBatch, Reply
from malamute_py.client.settings import Wait
from malamute_py.client.spans import (
    LINKS_MAX,
    TRACE_IDS,
    Spans,
    ended_if_refused,
    ending,
    failed,
)
from malamute_py.client.sync.client import SyncClient
from malamute_py.client.sync.handlers import HandlerRun, within_span
from malamute_py.client.sync.keys import SyncKeyView
from malamute_py.client.sync.link import Pending, ThreadLink
from malamute_py.client.sync.mail import SyncInbox
from malamute_py.client.sync.members import SyncMember
from malamute_py.client.sync.publishing import SyncBulkPublisher
from malamute_py.client.sync.steps import SyncAtomicStep
from malamute_py.client.sync.subscription import NO_OFFSET, SyncSubscription
from malamute_py.client.sync.transactions import SyncTransaction
from malamute_py.client.sync.work import SyncRequest, SyncWorker
from malamute_py.client.tracing import Tracing
from malamute_py.client.words import ConfirmAt, OnError

Verb = TypeVar("Verb", bound=Callable[..., Any])

_PRODUCER: Final = SpanKind.PRODUCER
_CLIENT: Final = SpanKind.CLIENT


def spans_of(link: ThreadLink) -> Spans:
    """The maker of spans of a traced client."""
    assert link.spans is not None
    return link.spans


class _Call:
    """Facts about a verb whose calls have spans."""

    def __init__(
        self, operation: str, verb: Any, kind: SpanKind, *, many: bool, named: bool = True
    ) -> None:
        """operation: the span's name. verb: the method of the client that the span is around.

        many: it takes several bodies at once. named: its first argument names the place; otherwise
        its object stands for one stream.
        """
        self._operation = operation
        self._kind = kind
        self._many = many
        _, *names = signature(verb).parameters
        self._place_and_payload = names[:2] if named else ["", *names[:1]]
        """Names of the arguments with the place and with the payload; "": it has none."""
        self._takes_properties = not {"properties", "options"}.isdisjoint(names)
        """Whether the context can be given as a property; `options` may have it as others have."""
        self._takes_content = "content" in names
        """Whether an encoded batch is given, which the context must be put into."""

    def begin(
        self, link: ThreadLink, given: list[Any], options: dict[str, Any],
        context: Context | None = None,
    ) -> Span:  # fmt: skip
        """Start the span of a call, and put its context into the call's arguments.

        given: its positional arguments without self. options: those by name. context: of the span's
        parent; None: the current one.
        """
        spans = spans_of(link)
        # The caller may have given each of them by position or by name.
        place, payload = (
            given[i] if i < len(given) else options.get(name)
            for i, name in enumerate(self._place_and_payload)
        )
        span = spans.sending(
            self._operation, self._kind, place, payload, many=self._many, context=context
        )
        if self._takes_properties:
            options["properties"] = spans.carried(options.get("properties"), span)
        elif self._takes_content:
            carried = spans.carried_in(payload, span, link.publisher.limits)
            if len(given) > 1:
                given[1] = carried  # the content comes after the place
            elif "content" in options:
                options["content"] = carried
        return span


def traced(operation: str, verb: Verb, kind: SpanKind = _PRODUCER, *, many: bool = False) -> Verb:
    """Make of a verb one that runs within a span, whose context travels in the properties.

    many: the verb takes several bodies. One that takes no properties has a span all the same.
    """
    of_call = _Call(operation, verb, kind, many=many)

    @wraps(verb)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        """Call the verb within its span."""
        given = [*arguments]
        with ending(of_call.begin(self._link, given, options)):
            return verb(self, *given, **options)

    return cast("Verb", call)


def handed_over(operation: str, verb: Verb) -> Verb:
    """Make of a verb that returns at once one with a span, which ends as it returns."""
    of_call = _Call(operation, verb, _PRODUCER, many=False)

    @wraps(verb)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        """Call the verb; its span is over with the confirm, or at once where it raises."""
        given = [*arguments]
        spans_of(self._link).end_due()
        span = of_call.begin(self._link, given, options)
        with ended_if_refused(span):
            pending = verb(self, *given, **options)
        pending.ends(span)
        return pending

    return cast("Verb", call)


class TracedPending(Pending[Any]):
    """A value of a call that returned at once, whose span is over when the value comes."""

    __slots__ = ("_span",)

    def __init__(self, link: ThreadLink) -> None:
        super().__init__(link)
        self._span: Span | None = None

    def ends(self, span: Span) -> None:
        """Have a span end with the value, which may be there already."""
        with self._link.lock:
            self._span = span
            if self._done:
                self._over(span)

    def settle(self, outcome: Any) -> None:
        """Called by the link, under its lock."""
        super().settle(outcome)
        if self._span is not None:
            self._over(self._span)

    def _over(self, span: Span) -> None:
        if self._error is not None:
            failed(span, self._error)
        # The confirm comes in the thread of the link, which no exporter may hold up.
        spans_of(self._link).ends_later(span)

    def result(self, timeout_ms: Wait = "default", what: str = ANSWER, name: str = "") -> Any:
        """Wait for the value, and hand its span over; see Pending.result()."""
        try:
            return super().result(timeout_ms, what, name)
        finally:
            spans_of(self._link).end_due()


def of_stream(verb: Verb, *, many: bool = False) -> Verb:
    """Make of a call on an object that stands for one stream one that runs within a span.

    The stream is put before the arguments while the span begins, which may change the others.
    """
    of_call = _Call("publish", verb, _PRODUCER, many=many, named=False)

    @wraps(verb)
    def call(self: Any, *given: Any, **options: Any) -> Any:
        """Call the verb within its span."""
        with_place = [self._stream, *given]
        with ending(of_call.begin(self._link, with_place, options)):
            _, *arguments = with_place
            return verb(self, *arguments, **options)

    return cast("Verb", call)


class _RunCall:
    """Batches of one call of a BulkPublisher, whose span ends once each has its outcome.

    It is the token of these batches: the link calls settled(), which tells the BulkPublisher, too.
    """

    __slots__ = ("_open", "_run", "_span")

    def __init__(self, run: SyncTracedBulkPublisher, span: Span) -> None:
        """run: which the call is of. span: of the call."""
        self._run = run
        self._span = span
        self._open = 1
        """Records without an outcome, and 1 more until the call returns."""

    def added(self, count: int) -> None:
        """Count records, before they are in the window; for threads under the link's lock."""
        self._open += count

    def settled(self, count: int, outcome: Confirm | MalamuteError) -> None:
        """Take the outcome of `count` records of one batch; called by the link."""
        self._run.settled(count, outcome)
        self.ended(count, None if isinstance(outcome, Confirm) else outcome)

    def ended(self, count: int, error: BaseException | None = None) -> None:
        """Count off records, or the call as one, and note what they met; locking as for added()."""
        if error is not None:
            failed(self._span, error)
        self._open -= count
        if not self._open:
            # The confirm comes in the thread of the link, which no exporter may hold up.
            spans_of(self._run._link).ends_later(self._span)


_RUN_CALL: ContextVar[_RunCall] = ContextVar("malamute_run_call")
"""The call of a run that this task or thread is in: _add() has no argument to bring it."""


def of_run(verb: Verb, *, many: bool = False) -> Verb:
    """Make of a call of a BulkPublisher one with a span, until its last batch is confirmed.

    Its batches go through SyncTracedBulkPublisher._add(), which counts them at the call.
    """
    of_call = _Call("publish", verb, _PRODUCER, many=many, named=False)

    @wraps(verb)
    def call(self: Any, *given: Any, **options: Any) -> Any:
        """Call the verb; its span ends now if it put no batch on its way, else with the last."""
        spans_of(self._link).end_due()
        with_place = [self._stream, *given]
        batches = _RunCall(self, of_call.begin(self._link, with_place, options))
        outer = _RUN_CALL.set(batches)
        met: BaseException | None = None
        try:
            _, *arguments = with_place
            return verb(self, *arguments, **options)
        except BaseException as error:
            met = error
            raise
        finally:
            _RUN_CALL.reset(outer)
            with self._link.lock:
                batches.ended(1, met)  # the call itself, which counts as one
            spans_of(self._link).end_due()

    return cast("Verb", call)


def of_step(verb: Verb) -> Verb:
    """Make of a verb of a step one whose records carry the context of the step's span."""

    @wraps(verb)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        options["properties"] = spans_of(self._link).carried(options.get("properties"), self._span)
        return verb(self, *arguments, **options)

    return cast("Verb", call)


def staged(verb: Verb, *, many: bool = False) -> Verb:
    """Make of a verb of a transaction one with a span, to which the commit's span links."""
    of_call = _Call("stage", verb, _PRODUCER, many=many)

    @wraps(verb)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        """Call the verb within a span of its own."""
        given = [*arguments]
        with ending(self._staging(of_call, given, options)):
            return verb(self, *given, **options)

    return cast("Verb", call)


class SyncTracedBulkPublisher(SyncBulkPublisher):
    """A run of publishing in which each call has a span, from it to its last batch's confirm."""

    publish_many = of_run(SyncBulkPublisher.publish_many, many=True)
    publish_batch = of_run(SyncBulkPublisher.publish_batch)
    publish_table = of_run(SyncBulkPublisher.publish_table)

    def _add(
        self,
        content: bytes | bytearray,
        count: int,
        taker: Any = None,
        *,
        typed: bool = False,
    ) -> None:
        """Put a batch on its way, and count it at its call; see SyncBulkPublisher._add().

        The taker of its outcome is always the call, which tells this run, too.
        """
        call = _RUN_CALL.get()
        with self._link.lock:
            call.added(count)
        try:
            super()._add(content, count, call, typed=typed)
        except BaseException:
            with self._link.lock:
                call.ended(count)
            raise

    def wait(self, timeout_ms: Wait = "default") -> None:
        """Return once everything is confirmed; see SyncBulkPublisher.wait()."""
        try:
            super().wait(timeout_ms)
        finally:
            spans_of(self._link).end_due()


class SyncTracedKeyView(SyncKeyView):
    """The keys of a stream, with a span for each change of one."""

    _change = of_stream(SyncKeyView._change)


class SyncTracedSubscription(SyncSubscription):
    """A subscription in which each batch that is handed over has a span."""

    def _next(self, timeout_ms: int | None, before: int = NO_OFFSET) -> Batch | None:
        """Return the next batch, which gets a span; see SyncSubscription._next()."""
        batch = super()._next(timeout_ms, before)
        if batch is not None:
            spans_of(self._link).received(batch, self._reading.request.stream)
        return batch


class SyncTracedMember(SyncMember):
    """A member of a group in which each batch that is handed over has a span."""

    def _next(self, timeout_ms: int | None) -> HeldBatch | None:
        """Return the next batch, which gets a span; see SyncMember._next()."""
        batch = super()._next(timeout_ms)
        if batch is not None:
            asked = self._membership.asked
            spans_of(self._link).received(batch, asked.stream, asked.group)
        return batch


class SyncTracedInbox(SyncInbox):
    """An inbox in which messages that were sent together have a span as they are handed over."""

    def _begin(self, delivered: HandoutBatch, batch: Batch) -> None:
        """Have the messages of a batch at hand, which gets a span; see InboxBase._begin()."""
        super()._begin(delivered, batch)
        place = self._view.mailbox.asked.mailbox or self._link.session.identity
        spans_of(self._link).received(batch, place)


class SyncTracedWorker(SyncWorker):
    """A worker whose handlers run within the spans of their requests."""

    def working(self, request: SyncRequest) -> AbstractContextManager[Span]:
        """Run a block within the span of a request that next() has given."""
        return spans_of(self._link).working(request)

    def start(
        self, handler: Callable[[SyncRequest], Any], on_error: OnError, delay_ms: int
    ) -> HandlerRun:
        """Start the threads that run a handler, each request within its span."""
        handler = within_span(spans_of(self._link).working, handler)
        return super().start(handler, on_error, delay_ms)


class SyncTracedStep(SyncAtomicStep):
    """A step with a span from its making to its end, whose context its records carry."""

    __slots__ = ("_span",)

    def __init__(self, link: ThreadLink, confirm: ConfirmAt = "default", key: bytes = b"") -> None:
        """See SyncClient.atomic()."""
        super().__init__(link, confirm, key)
        self._span = spans_of(link).start("atomic", _PRODUCER)

    publish = of_step(SyncAtomicStep.publish)
    publish_many = of_step(SyncAtomicStep.publish_many)
    publish_table = of_step(SyncAtomicStep.publish_table)
    send = of_step(SyncAtomicStep.send)
    request = of_step(SyncAtomicStep.request)

    def publish_batch(self, stream: str, content: bytes, *, typed: bool = False) -> None:
        """Add an encoded content with the span's context; see SyncAtomicStep.publish_batch()."""
        carried = spans_of(self._link).carried_in(content, self._span, self._link.publisher.limits)
        super().publish_batch(stream, carried, typed=typed)

    def commit(self, timeout_ms: Wait = "default") -> Confirmation | None:
        """Have it taken, and wait for the confirm; see SyncAtomicStep.commit()."""
        with ending(self._committing()):
            return super().commit(timeout_ms)

    def commit_nowait(self, timeout_ms: Wait = "default") -> Pending[Confirmation | None]:
        """Put it on its way; with a span until its confirm. See SyncAtomicStep.commit()."""
        span = self._committing()
        with ended_if_refused(span):
            pending = cast("TracedPending", super().commit_nowait(timeout_ms))
        pending.ends(span)
        return pending

    def _committing(self) -> Span:
        """Take the span, which the commit ends, whatever gives the step up meanwhile."""
        span, self._span = self._span, INVALID_SPAN
        if self.count:
            span.set_attribute("messaging.batch.message_count", self.count)
        return span

    def give_up(self) -> None:
        """Give the step up, of which nothing happens, and end its span."""
        super().give_up()
        self._span.end()
        self._span = INVALID_SPAN


class SyncTracedTransaction(SyncTransaction):
    """A transaction with a span from its beginning to its end.

    Each call that adds records has a span of its own, whose context they carry: a transaction may
    be about items of many traces. The spans of commit and rollback link to these.
    """

    def __init__(self, link: ThreadLink, timeout_ms: int, confirm: ConfirmAt) -> None:
        """See SyncClient.transaction()."""
        super().__init__(link, timeout_ms, confirm)
        self._span: Span = INVALID_SPAN
        self._links: list[Link] = []
        """Spans of the calls that added records, at most LINKS_MAX."""

    def begin(self, timeout_ms: Wait = "default") -> None:
        """Open it, and wait until the broker has; see SyncTransaction.begin()."""
        with self._ended_if_over():
            super().begin(timeout_ms)

    def _begin(self) -> None:
        """Have the broker open it, with a new span; see SyncTransaction._begin()."""
        self._span = spans_of(self._link).start("transaction", _PRODUCER)
        with self._ended_if_over():
            super()._begin()

    def commit(self, timeout_ms: Wait = "default") -> Confirmation:
        """Commit it, within a span; see SyncTransaction.commit()."""
        with self._ended_if_over(), self._at_the_end("commit"):
            return super().commit(timeout_ms)

    def roll_back(self, timeout_ms: Wait = "default") -> None:
        """End it, within a span unless it is over already; see SyncTransaction.roll_back()."""
        if not (self._opened.open or self._in_doubt):
            return
        with self._ended_if_over(), self._at_the_end("roll back"):
            super().roll_back(timeout_ms)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit, or roll back after an exception, which is the status of the span."""
        if error is not None:
            failed(self._span, error)
        with self._ended_if_over():
            super().__exit__(kind, error, trace)

    publish = staged(SyncTransaction.publish)
    publish_many = staged(SyncTransaction.publish_many, many=True)
    publish_batch = staged(SyncTransaction.publish_batch)
    publish_table = staged(SyncTransaction.publish_table)

    def _staging(self, of_call: _Call, given: list[Any], options: dict[str, Any]) -> Span:
        """Start the span of a call that adds records; its parent: the current, else self._span."""
        current = get_current_span().get_span_context()
        context = None if current.is_valid else set_span_in_context(self._span)
        span = of_call.begin(self._link, given, options, context)
        if len(self._links) < LINKS_MAX:
            self._links.append(Link(span.get_span_context()))
        return span

    def _at_the_end(self, operation: str) -> AbstractContextManager[None]:
        """Run a call that ends the transaction within a span."""
        span = spans_of(self._link).start(
            operation, _CLIENT, context=set_span_in_context(self._span), links=tuple(self._links)
        )
        return ending(span)

    @contextmanager
    def _ended_if_over(self) -> Iterator[None]:
        """Run a call after which the span ends where the transaction is over."""
        try:
            yield
        except BaseException as error:
            failed(self._span, error)
            raise
        finally:
            if not self._opened.open:
                self._span.end()
                self._span = INVALID_SPAN


class SyncTracedClient(SyncClient):
    """A client whose calls and arrivals have spans of OpenTelemetry."""

    _subscription_type = SyncTracedSubscription
    _keys_type = SyncTracedKeyView
    _inbox_type = SyncTracedInbox
    _worker_type = SyncTracedWorker
    _member_type = SyncTracedMember
    _step_type = SyncTracedStep
    _transaction_type = SyncTracedTransaction

    def __init__(self, tracing: Tracing, *settings: Any, **options: Any) -> None:
        """tracing: the user's settings, with the maker of spans. The rest as Client()."""
        super().__init__(*settings, **options)
        session = self._session
        self._link.pending_type = TracedPending
        # The identity is told by the broker, and may change with a link.
        self._link.spans = tracing.spans.connected(
            self.settings.endpoints, lambda: session.identity
        )
        for log in (LOG, LINK_LOG):
            log.addFilter(TRACE_IDS)  # log lines get the ids of the current span

    publish = traced("publish", SyncClient.publish)
    publish_nowait = handed_over("publish", SyncClient.publish_nowait)
    publish_many = traced("publish", SyncClient.publish_many, many=True)
    publish_batch = traced("publish", SyncClient.publish_batch)
    publish_arrow = traced("publish", SyncClient.publish_arrow)
    publish_table = traced("publish", SyncClient.publish_table)
    send = traced("send", SyncClient.send)
    send_nowait = handed_over("send", SyncClient.send_nowait)
    send_many = traced("send", SyncClient.send_many, many=True)
    request = traced("request", SyncClient.request, _CLIENT)
    submit = traced("submit", SyncClient.submit)

    def publisher(
        self,
        stream: str,
        *,
        confirm: ConfirmAt = "default",
        keep: bool = True,
        timeout_ms: Wait = "default",
    ) -> SyncBulkPublisher:
        """A run of publishing in which each call has a span; see SyncClient.publisher()."""
        return self._publishing_run(stream, confirm, timeout_ms, keep, SyncTracedBulkPublisher)

    def flush(self, timeout_ms: Wait = "default") -> None:
        """Return once nothing is unconfirmed, with spans; see SyncClient.flush()."""
        try:
            super().flush(timeout_ms)
        finally:
            spans_of(self._link).end_due()

    def abort(self) -> None:
        """End at once, with the spans of what is unconfirmed; see SyncClient.abort()."""
        super().abort()
        spans_of(self._link).end_due()

    def requests(self, service: str, body: Any, **options: Any) -> Generator[Reply, None, None]:
        """Ask a service for several replies, within one span; see SyncClient.requests()."""
        spans = spans_of(self._link)
        span = spans.sending("request", _CLIENT, service, body, many=False)
        options["properties"] = spans.carried(options.get("properties"), span)
        try:
            replies = super().requests(service, body, **options)
        except BaseException:
            with ending(span):
                raise
        return self._spanned(span, replies)

    def _spanned(
        self, span: Span, replies: Generator[Reply, None, None]
    ) -> Generator[Reply, None, None]:
        """Yield the replies of a request; the span ends with the last one."""
        with ending(span):
            yield from replies
