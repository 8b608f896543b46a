"""Spans of a command: where they go, and which trace it continues.

Owns the set-up of OpenTelemetry's SDK for one run of a command. The rules: OpenTelemetry's own
variables decide; nothing is imported for a command that does not trace; standard output is the
command's, so that spans for people go to standard error. Source: OpenTelemetry's specification of
environment variables; malamute_py/client/spans.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from malamute_py.cli.failures import USAGE, CommandFailed

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from malamute_py.client.tracing import Tracing

NEEDS: Final = (
    "tracing needs OpenTelemetry: pip install 'malamute-py[otel]' opentelemetry-sdk"
    " opentelemetry-exporter-otlp-proto-http"
)
PARENT: Final = ("TRACEPARENT", "TRACESTATE")
"""Variables with the trace that a command continues, as OpenTelemetry names them."""
_EXPORTER: Final = "OTEL_TRACES_EXPORTER"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP: Final = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
"""Protocol of OTLP -> the name under which its exporter registers."""
_SERVICE: Final = "service.name"
_UNNAMED: Final = "unknown_service"
"""Beginning of the service's name where no variable says one."""


@contextmanager
def telling() -> Iterator[Tracing]:
    """Make the tracing of a command, within the trace that its environment names.

    All spans have left, or were given up by their exporter, at the end of the block. Raises
    CommandFailed: a package is missing, or a variable names an exporter that is not there.
    """
    try:
        from opentelemetry.context import attach, detach
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from malamute_py.client.tracing import Tracing
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise  # Another module is missing: that is a bug.
        raise CommandFailed(NEEDS, USAGE) from error
    exporters = [_exporter(name) for name in _exporter_names()]
    # The name under which a backend shows the command, unless a variable names it.
    resource = Resource.create()
    if str(resource.attributes.get(_SERVICE, _UNNAMED)).startswith(_UNNAMED):
        resource = resource.merge(Resource({_SERVICE: "malamute command"}))
    provider = TracerProvider(resource=resource)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    # As if the environment had been the headers of a message: spans continue its trace.
    carried = {name.lower(): os.environ[name] for name in PARENT if name in os.environ}
    token = attach(TraceContextTextMapPropagator().extract(carried))
    try:
        yield Tracing(provider)
    finally:
        detach(token)
        provider.shutdown()  # Waits until the exporters have sent what they have.


def variables() -> dict[str, str]:
    """Return the variables by which a command that is run continues the current span's trace."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carried: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carried)
    return {name.upper(): value for name, value in carried.items()}


def failed(span: Span, reason: str) -> None:
    """Give a span the status of a run that failed for a reason."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", "failed")
    span.set_status(StatusCode.ERROR, reason)


def _exporter_names() -> list[str]:
    """Return the names of the exporters that the variables ask for; none: spans go nowhere.

    Raises CommandFailed: OTLP's protocol is unknown.
    """
    listed = os.environ.get(_EXPORTER) or "otlp"
    named = [name.strip() for name in listed.split(",")]
    return [
        _otlp_exporter_name() if name == "otlp" else name
        for name in named
        if name not in ("", "none")
    ]


def _otlp_exporter_name() -> str:
    """Return the name under which the exporter of OTLP's protocol registers.

    Raises CommandFailed: the variable's protocol is unknown.
    """
    variable = next((name for name in _PROTOCOLS if os.environ.get(name)), "")
    protocol = os.environ[variable] if variable else "http/protobuf"
    if protocol not in _OTLP:
        raise CommandFailed(f"{variable} is {protocol!r}; give one of {', '.join(_OTLP)}", USAGE)
    return _OTLP[protocol]


def _exporter(name: str) -> Any:
    """Make the exporter that is registered under a name. Raises CommandFailed: there is none."""
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        return found.load()()
    if name in _OTLP.values():
        package = f"opentelemetry-exporter-{name.replace('_', '-')}"
        raise CommandFailed(
            f"tracing needs the exporter to send spans with: pip install {package}", USAGE
        )
    raise CommandFailed(
        f"{_EXPORTER}: no exporter {name!r} is installed; known are otlp, console and none", USAGE
    )
