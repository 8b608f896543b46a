"""Both shells over a traced client, and the spans that have ended."""

from __future__ import annotations

import threading
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from malamute_py import Tracing
from tests.client.shells import AsyncShell, SyncShell


class Traced:
    """A shell over a traced client, and the spans that have ended."""

    def __init__(self, shell: AsyncShell | SyncShell, name: str) -> None:
        self.shell: Any = shell
        self.name = name
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.provider = provider
        self.tracer = provider.get_tracer("test")
        self.tracing = Tracing(provider)

    @property
    def client(self) -> Any:
        return self.shell.client

    def spans(self, name: str = "") -> list[ReadableSpan]:
        return [
            span for span in self.exporter.get_finished_spans() if not name or span.name == name
        ]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.spans(name)
        return span


def exporters_of(traced: Traced) -> set[str]:
    """Names of the threads that export spans from now on."""
    exporting: set[str] = set()
    export = traced.exporter.export

    def noted(spans: Any) -> Any:
        exporting.add(threading.current_thread().name)
        return export(spans)

    traced.exporter.export = noted  # type: ignore[method-assign]
    return exporting


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {key.removeprefix("messaging."): value for key, value in (span.attributes or {}).items()}


def parent_of(span: ReadableSpan) -> int:
    return 0 if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    number: int = span.context.span_id
    return number


async def begun(traced: Traced) -> Any:
    transaction = traced.client.transaction()
    await traced.shell.call(transaction.begin)
    return transaction
