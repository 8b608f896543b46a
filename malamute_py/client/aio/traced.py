"""The client with spans of OpenTelemetry, and what its calls return, in asyncio.

Owns which calls and which arrivals have spans. The rule: a traced client is made of subclasses,
which connect(tracing=...) chooses, so that a client without tracing has not one call or look-up
more.

Words: a span is what OpenTelemetry is told of one piece of work: its beginning, end and outcome.
Its context, an id, travels in the properties of records, so that those who get them can link their
own spans to it. The place is the stream, mailbox or service that a call names. The payload is its
body, bodies, table or encoded content. spans.py makes the spans. Source: ARCHITECTURE.md, Tracing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
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
from malamute_py.client.aio.client import Client
from malamute_py.client.aio.handlers import within_span
from malamute_py.client.aio.keys import KeyView
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.aio.mail import Inbox
from malamute_py.client.aio.members import Member
from malamute_py.client.aio.publishing import BulkPublisher
from malamute_py.client.aio.steps import AtomicStep
from malamute_py.client.aio.subscription import NO_OFFSET, Subscription
from malamute_py.client.aio.transactions import Transaction
from malamute_py.client.aio.work import Request, Worker
from malamute_py.client.engine.log import LINK_LOG, LOG
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
from malamute_py.client.tracing import Tracing
from malamute_py.client.words import ConfirmAt, OnError

# sync: from malamute_py.client.sync.handlers import HandlerRun
# sync: from malamute_py.client.engine.waits import ANSWER

Verb = TypeVar("Verb", bound=Callable[..., Any])

_PRODUCER: Final = SpanKind.PRODUCER
_CLIENT: Final = SpanKind.CLIENT


def spans_of(link: LoopLink) -> Spans:
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
        self, link: LoopLink, given: list[Any], options: dict[str, Any],
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
    async def call(self: Any, *arguments: Any, **options: Any) -> Any:
        """Call the verb within its span."""
        given = [*arguments]
        with ending(of_call.begin(self._link, given, options)):
            return await verb(self, *given, **options)

    return cast("Verb", call)


def handed_over(operation: str, verb: Verb) -> Verb:
    """Make of a verb that returns at once one with a span, which ends with the confirm."""
    of_call = _Call(operation, verb, _PRODUCER, many=False)

    @wraps(verb)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        """Call the verb; its span is over with the confirm, or at once where it raises."""
        given = [*arguments]
        # sync: spans_of(self._link).end_due()
        span = of_call.begin(self._link, given, options)
        with ended_if_refused(span):
            future = verb(self, *given, **options)
        future.add_done_callback(partial(_confirmed, span))  # asyncio only
        # sync: future.ends(span)
        return future

    return cast("Verb", call)


def _confirmed(span: Span, future: asyncio.Future[Any]) -> None:  # asyncio only
    """End the span of a call of handed_over(), whose future is done."""
    if future.cancelled():
        failed(span, asyncio.CancelledError())
    elif (error := future.exception()) is not None:
        failed(span, error)
    span.end()


# sync: class TracedPending(Pending[Any]):
# sync:     """A value of a call that returned at once, whose span is over when the value comes."""

# sync:     __slots__ = ("_span",)

# sync:     def __init__(self, link: ThreadLink) -> None:
# sync:         super().__init__(link)
# sync:         self._span: Span | None = None

# sync:     def ends(self, span: Span) -> None:
# sync:         """Have a span end with the value, which may be there already."""
# sync:         with self._link.lock:
# sync:             self._span = span
# sync:             if self._done:
# sync:                 self._over(span)

# sync:     def settle(self, outcome: Any) -> None:
# sync:         """Called by the link, under its lock."""
# sync:         super().settle(outcome)
# sync:         if self._span is not None:
# sync:             self._over(self._span)

# sync:     def _over(self, span: Span) -> None:
# sync:         if self._error is not None:
# sync:             failed(span, self._error)
# sync:         # The confirm comes in the thread of the link, which no exporter may hold up.
# sync:         spans_of(self._link).ends_later(span)

# sync:     def result(
# sync:         self, timeout_ms: Wait = "default", what: str = ANSWER, name: str = ""
# sync:     ) -> Any:
# sync:         """Wait for the value, and hand its span over; see Pending.result()."""
# sync:         try:
# sync:             return super().result(timeout_ms, what, name)
# sync:         finally:
# sync:             spans_of(self._link).end_due()


def of_stream(verb: Verb, *, many: bool = False) -> Verb:
    """Make of a call on an object that stands for one stream one that runs within a span.

    The stream is put before the arguments while the span begins, which may change the others.
    """
    of_call = _Call("publish", verb, _PRODUCER, many=many, named=False)

    @wraps(verb)
    async def call(self: Any, *given: Any, **options: Any) -> Any:
        """Call the verb within its span."""
        with_place = [self._stream, *given]
        with ending(of_call.begin(self._link, with_place, options)):
            _, *arguments = with_place
            return await verb(self, *arguments, **options)

    return cast("Verb", call)


class _RunCall:
    """Batches of one call of a BulkPublisher, whose span ends once each has its outcome.

    It is the token of these batches: the link calls settled(), which tells the BulkPublisher, too.
    """

    __slots__ = ("_open", "_run", "_span")

    def __init__(self, run: TracedBulkPublisher, span: Span) -> None:
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
            # sync: # The confirm comes in the thread of the link, which no exporter may hold up.
            # sync: spans_of(self._run._link).ends_later(self._span)
            self._span.end()  # asyncio only


_RUN_CALL: ContextVar[_RunCall] = ContextVar("malamute_run_call")
"""The call of a run that this task or thread is in: _add() has no argument to bring it."""


def of_run(verb: Verb, *, many: bool = False) -> Verb:
    """Make of a call of a BulkPublisher one with a span, until its last batch is confirmed.

    Its batches go through TracedBulkPublisher._add(), which counts them at the call.
    """
    of_call = _Call("publish", verb, _PRODUCER, many=many, named=False)

    @wraps(verb)
    async def call(self: Any, *given: Any, **options: Any) -> Any:
        """Call the verb; its span ends now if it put no batch on its way, else with the last."""
        # sync: spans_of(self._link).end_due()
        with_place = [self._stream, *given]
        batches = _RunCall(self, of_call.begin(self._link, with_place, options))
        outer = _RUN_CALL.set(batches)
        met: BaseException | None = None
        try:
            _, *arguments = with_place
            return await verb(self, *arguments, **options)
        except BaseException as error:
            met = error
            raise
        finally:
            _RUN_CALL.reset(outer)
            if self._link.is_here():  # sync: with self._link.lock:
                batches.ended(1, met)  # the call itself, which counts as one
            # sync: spans_of(self._link).end_due()

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
    async def call(self: Any, *arguments: Any, **options: Any) -> Any:
        """Call the verb within a span of its own."""
        given = [*arguments]
        with ending(self._staging(of_call, given, options)):
            return await verb(self, *given, **options)

    return cast("Verb", call)


class TracedBulkPublisher(BulkPublisher):
    """A run of publishing in which each call has a span, from it to its last batch's confirm."""

    publish_many = of_run(BulkPublisher.publish_many, many=True)
    publish_batch = of_run(BulkPublisher.publish_batch)
    publish_table = of_run(BulkPublisher.publish_table)

    async def _add(
        self,
        content: bytes | bytearray,
        count: int,
        taker: Any = None,
        *,
        typed: bool = False,
    ) -> None:
        """Put a batch on its way, and count it at its call; see BulkPublisher._add().

        The taker of its outcome is always the call, which tells this run, too.
        """
        call = _RUN_CALL.get()
        if self._link.is_here():  # sync: with self._link.lock:
            call.added(count)
        try:
            await super()._add(content, count, call, typed=typed)
        except BaseException:
            if self._link.is_here():  # sync: with self._link.lock:
                call.ended(count)
            raise

    # sync: def wait(self, timeout_ms: Wait = "default") -> None:
    # sync:     """Return once everything is confirmed; see BulkPublisher.wait()."""
    # sync:     try:
    # sync:         super().wait(timeout_ms)
    # sync:     finally:
    # sync:         spans_of(self._link).end_due()


class TracedKeyView(KeyView):
    """The keys of a stream, with a span for each change of one."""

    _change = of_stream(KeyView._change)


class TracedSubscription(Subscription):
    """A subscription in which each batch that is handed over has a span."""

    async def _next(self, timeout_ms: int | None, before: int = NO_OFFSET) -> Batch | None:
        """Return the next batch, which gets a span; see Subscription._next()."""
        batch = await super()._next(timeout_ms, before)
        if batch is not None:
            spans_of(self._link).received(batch, self._reading.request.stream)
        return batch


class TracedMember(Member):
    """A member of a group in which each batch that is handed over has a span."""

    async def _next(self, timeout_ms: int | None) -> HeldBatch | None:
        """Return the next batch, which gets a span; see Member._next()."""
        batch = await super()._next(timeout_ms)
        if batch is not None:
            asked = self._membership.asked
            spans_of(self._link).received(batch, asked.stream, asked.group)
        return batch


class TracedInbox(Inbox):
    """An inbox in which messages that were sent together have a span as they are handed over."""

    def _begin(self, delivered: HandoutBatch, batch: Batch) -> None:
        """Have the messages of a batch at hand, which gets a span; see InboxBase._begin()."""
        super()._begin(delivered, batch)
        place = self._view.mailbox.asked.mailbox or self._link.session.identity
        spans_of(self._link).received(batch, place)


class TracedWorker(Worker):
    """A worker whose handlers run within the spans of their requests."""

    async def run(  # asyncio only
        self, handler: Callable[[Request], Any], *, on_error: OnError = "fail", delay_ms: int = 0
    ) -> None:
        """Run a handler for every request, each within its span; see Worker.run()."""
        handler = within_span(spans_of(self._link).working, handler)
        await super().run(handler, on_error=on_error, delay_ms=delay_ms)

    def working(self, request: Request) -> AbstractContextManager[Span]:
        """Run a block within the span of a request that next() has given."""
        return spans_of(self._link).working(request)

    # sync: def start(
    # sync:     self, handler: Callable[[Request], Any], on_error: OnError, delay_ms: int
    # sync: ) -> HandlerRun:
    # sync:     """Start the threads that run a handler, each request within its span."""
    # sync:     handler = within_span(spans_of(self._link).working, handler)
    # sync:     return super().start(handler, on_error, delay_ms)


class TracedStep(AtomicStep):
    """A step with a span from its making to its end, whose context its records carry."""

    __slots__ = ("_span",)

    def __init__(self, link: LoopLink, confirm: ConfirmAt = "default", key: bytes = b"") -> None:
        """See Client.atomic()."""
        super().__init__(link, confirm, key)
        self._span = spans_of(link).start("atomic", _PRODUCER)

    publish = of_step(AtomicStep.publish)
    publish_many = of_step(AtomicStep.publish_many)
    publish_table = of_step(AtomicStep.publish_table)
    send = of_step(AtomicStep.send)
    request = of_step(AtomicStep.request)

    def publish_batch(self, stream: str, content: bytes, *, typed: bool = False) -> None:
        """Add an encoded content with the span's context; see AtomicStep.publish_batch()."""
        carried = spans_of(self._link).carried_in(content, self._span, self._link.publisher.limits)
        super().publish_batch(stream, carried, typed=typed)

    async def commit(self, timeout_ms: Wait = "default") -> Confirmation | None:
        """Have it taken, and wait for the confirm; see AtomicStep.commit()."""
        with ending(self._committing()):
            return await super().commit(timeout_ms)

    # sync: def commit_nowait(self, timeout_ms: Wait = "default") -> Pending[Confirmation | None]:
    # sync:     """Put it on its way; with a span until its confirm. See AtomicStep.commit()."""
    # sync:     span = self._committing()
    # sync:     with ended_if_refused(span):
    # sync:         pending = cast("TracedPending", super().commit_nowait(timeout_ms))
    # sync:     pending.ends(span)
    # sync:     return pending

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


class TracedTransaction(Transaction):
    """A transaction with a span from its beginning to its end.

    Each call that adds records has a span of its own, whose context they carry: a transaction may
    be about items of many traces. The spans of commit and rollback link to these.
    """

    def __init__(self, link: LoopLink, timeout_ms: int, confirm: ConfirmAt) -> None:
        """See Client.transaction()."""
        super().__init__(link, timeout_ms, confirm)
        self._span: Span = INVALID_SPAN
        self._links: list[Link] = []
        """Spans of the calls that added records, at most LINKS_MAX."""

    async def begin(self, timeout_ms: Wait = "default") -> None:
        """Open it, and wait until the broker has; see Transaction.begin()."""
        with self._ended_if_over():
            await super().begin(timeout_ms)

    async def _begin(self) -> None:
        """Have the broker open it, with a new span; see Transaction._begin()."""
        self._span = spans_of(self._link).start("transaction", _PRODUCER)
        with self._ended_if_over():
            await super()._begin()

    async def commit(self, timeout_ms: Wait = "default") -> Confirmation:
        """Commit it, within a span; see Transaction.commit()."""
        with self._ended_if_over(), self._at_the_end("commit"):
            return await super().commit(timeout_ms)

    async def roll_back(self, timeout_ms: Wait = "default") -> None:
        """End it, within a span unless it is over already; see Transaction.roll_back()."""
        if not (self._opened.open or self._in_doubt):
            return
        with self._ended_if_over(), self._at_the_end("roll back"):
            await super().roll_back(timeout_ms)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit, or roll back after an exception, which is the status of the span."""
        if error is not None:
            failed(self._span, error)
        with self._ended_if_over():
            await super().__aexit__(kind, error, trace)

    publish = staged(Transaction.publish)
    publish_many = staged(Transaction.publish_many, many=True)
    publish_batch = staged(Transaction.publish_batch)
    publish_table = staged(Transaction.publish_table)

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


class TracedClient(Client):
    """A client whose calls and arrivals have spans of OpenTelemetry."""

    _subscription_type = TracedSubscription
    _keys_type = TracedKeyView
    _inbox_type = TracedInbox
    _worker_type = TracedWorker
    _member_type = TracedMember
    _step_type = TracedStep
    _transaction_type = TracedTransaction

    def __init__(self, tracing: Tracing, *settings: Any, **options: Any) -> None:
        """tracing: the user's settings, with the maker of spans. The rest as Client()."""
        super().__init__(*settings, **options)
        session = self._session
        # sync: self._link.pending_type = TracedPending
        # The identity is told by the broker, and may change with a link.
        self._link.spans = tracing.spans.connected(
            self.settings.endpoints, lambda: session.identity
        )
        for log in (LOG, LINK_LOG):
            log.addFilter(TRACE_IDS)  # log lines get the ids of the current span

    publish = traced("publish", Client.publish)
    publish_nowait = handed_over("publish", Client.publish_nowait)
    publish_many = traced("publish", Client.publish_many, many=True)
    publish_batch = traced("publish", Client.publish_batch)
    publish_arrow = traced("publish", Client.publish_arrow)
    publish_table = traced("publish", Client.publish_table)
    send = traced("send", Client.send)
    send_nowait = handed_over("send", Client.send_nowait)
    send_many = traced("send", Client.send_many, many=True)
    request = traced("request", Client.request, _CLIENT)
    submit = traced("submit", Client.submit)

    def publisher(
        self,
        stream: str,
        *,
        confirm: ConfirmAt = "default",
        keep: bool = True,
        timeout_ms: Wait = "default",
    ) -> BulkPublisher:
        """A run of publishing in which each call has a span; see Client.publisher()."""
        return self._publishing_run(stream, confirm, timeout_ms, keep, TracedBulkPublisher)

    # sync: def flush(self, timeout_ms: Wait = "default") -> None:
    # sync:     """Return once nothing is unconfirmed, with spans; see SyncClient.flush()."""
    # sync:     try:
    # sync:         super().flush(timeout_ms)
    # sync:     finally:
    # sync:         spans_of(self._link).end_due()

    # sync: def abort(self) -> None:
    # sync:     """End at once, with the spans of what is unconfirmed; see SyncClient.abort()."""
    # sync:     super().abort()
    # sync:     spans_of(self._link).end_due()

    def requests(self, service: str, body: Any, **options: Any) -> AsyncGenerator[Reply, None]:
        """Ask a service for several replies, within one span; see Client.requests()."""
        spans = spans_of(self._link)
        span = spans.sending("request", _CLIENT, service, body, many=False)
        options["properties"] = spans.carried(options.get("properties"), span)
        # sync: try:
        # sync:     replies = super().requests(service, body, **options)
        # sync: except BaseException:
        # sync:     with ending(span):
        # sync:         raise
        # sync: return self._spanned(span, replies)
        return self._spanned(span, super().requests(service, body, **options))  # asyncio only

    async def _spanned(
        self, span: Span, replies: AsyncGenerator[Reply, None]
    ) -> AsyncGenerator[Reply, None]:
        """Yield the replies of a request; the span ends with the last one."""
        # sync: with ending(span):
        # sync:     yield from replies
        with ending(span):  # asyncio only
            async with aclosing(replies) as answers:
                async for reply in answers:
                    yield reply
