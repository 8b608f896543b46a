"""Tracing of clients by OpenTelemetry, as a user asks for it.

Owns the public face of tracing. The rule: OpenTelemetry is imported when a Tracing is made, not
when this module is. Source: ARCHITECTURE.md, Tracing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from malamute_py.client.settings import SettingError

if TYPE_CHECKING:
    from opentelemetry.context import Context


class Tracing:
    """Tracing of one or more clients: `connect(tracing=Tracing())`, or `connect(tracing=True)`.

    Needs the extra `otel`. Publishing, sending, requests and atomic steps have spans, whose context
    travels in the properties `traceparent` and `tracestate`. So have batches that are handed over,
    and handlers, which run with their request's span as the current one.
    """

    def __init__(self, tracer_provider: Any = None, *, propagator: Any = None) -> None:
        """tracer_provider, propagator: of OpenTelemetry.

        tracer_provider: None: the global one, which is looked up at the first span. propagator:
        None: W3C trace context; opentelemetry.propagate.get_global_textmap() for the program's own,
        which by default has baggage as well. Whatever it writes is kept with each record and shown
        to each reader. Raises ModuleNotFoundError: the extra is not installed.
        """
        try:
            from opentelemetry.trace import get_tracer
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            from malamute_py.extras import missing

            advice = missing(error, "tracing")
            if advice is None:
                raise
            raise ModuleNotFoundError(advice, name=error.name) from error
        from malamute_py.client.spans import Spans

        self.spans = Spans(
            get_tracer("malamute_py", tracer_provider=tracer_provider),
            TraceContextTextMapPropagator() if propagator is None else propagator,
        )
        """Maker of spans, for the clients."""

    def context_of(self, item: Any) -> Context | None:
        """Return the context that came with a record, message, request or batch.

        None: none came, or a batch has several, of records that were published in several traces:
        ask for each record's.
        """
        found = self.spans.contexts_of(item)
        return found[0] if len(found) == 1 else None

    def processing(self, item: Any) -> AbstractContextManager[Any]:
        """Run a block within a span of what the program does about an item, for iterators.

        item: a record, message, request or batch. The span is the current one in the block, and the
        result of `as`. Its parent is the context that came with the item; where a batch has
        several, they are linked. What the block raises is the span's status.
        """
        return self.spans.processing(item)


def tracing_of(value: Any) -> Tracing | None:
    """Read the argument `tracing` of connect(). Raises SettingError: it is of another type."""
    if isinstance(value, Tracing):
        return value
    if type(value) is not bool:
        raise SettingError("tracing", f"is True, False or a Tracing, not {value!r}")
    return Tracing() if value else None
