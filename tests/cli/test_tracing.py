"""`--tracing`: which spans a command tells OpenTelemetry, where they go, and what is missing."""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from malamute_py.cli import tracing
from tests.cli.running import Outcome, Run
from tests.cli.test_work import python
from tests.house.test_extras import run_without

TRACE, SPAN = "0" * 31 + "a", "0" * 15 + "b"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture(autouse=True)
def to_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have spans printed, which needs no package beside the SDK."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")


def spans(told: Outcome) -> list[Any]:
    """Return the spans that a command wrote to standard error."""
    found, decoder, text = [], json.JSONDecoder(), told.ok().err
    while (begin := text.find("{")) >= 0:
        span, end = decoder.raw_decode(text, begin)
        found.append(span)
        text = text[end:]
    return found


@pytest.mark.moderate
def test_a_published_record_continues_the_trace_of_the_environment_and_leads_to_its_reader(
    m: Run, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", PARENT)
    [published] = spans(m("pub", stream, "1", "--tracing"))
    assert published["name"] == f"publish {stream}"
    assert (published["context"]["trace_id"][2:], published["parent_id"][2:]) == (TRACE, SPAN)
    assert published["resource"]["attributes"]["service.name"] == "malamute command"
    monkeypatch.delenv("TRACEPARENT")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "tail")
    told = m("sub", stream, "--until-tail", "--bodies-only", "--tracing")
    [received] = spans(told)
    assert told.lines == ["1"], "spans leave the output as it is"
    assert received["parent_id"] == published["context"]["span_id"]
    assert received["resource"]["attributes"]["service.name"] == "tail"
    assert received["kind"] == "SpanKind.CONSUMER"


@pytest.mark.moderate
def test_a_request_its_run_and_what_the_run_publishes_are_one_trace(m: Run, stream: str) -> None:
    told = m("request", stream, "x", "--reply-to", f"{stream}.answers", "--tracing")
    [asked] = spans(told)
    m("request", stream, "y", "--reply-to", f"{stream}.answers", "--tracing").ok()
    code = "import os, sys; print(os.environ['TRACEPARENT']); sys.exit(sys.stdin.read() == 'y')"
    done, failed = spans(m("work", stream, "-n", "2", "--tracing", "--", *python(code)))
    assert (done["name"], failed["name"]) == (f"work {stream}",) * 2
    assert done["parent_id"] == asked["context"]["span_id"]
    assert (done["status"]["status_code"], failed["status"]["status_code"]) == ("UNSET", "ERROR")
    read = m("inbox", f"{stream}.answers", "-n", "1", "--bodies-only", "--tracing")
    assert read.lines[0].split("-")[1:3] == [
        done["context"]["trace_id"][2:], done["context"]["span_id"][2:],
    ]  # fmt: skip
    assert [span["name"] for span in spans(read)] == [f"receive {stream}.answers"]
    [sent] = spans(m("send", stream, "z", "--tracing"))
    assert sent["name"] == f"send {stream}"


def test_a_context_says_whether_its_commands_are_traced(
    m: Run, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = os.environ["MALAMUTE_ENDPOINT"]
    monkeypatch.delenv("MALAMUTE_ENDPOINT")
    m("context", "add", "traced", "--endpoint", endpoint, "--tracing").ok()
    assert ["tracing", "yes"] in m("context", "show").ok().rows
    assert len(spans(m("pub", stream, "1"))) == 1
    assert spans(m("pub", stream, "1", "--no-tracing")) == []
    assert spans(m("stream", "ls")) == []


class Kept(SpanExporter):
    """An exporter that keeps the names of spans, and whether it was told to end."""

    names: ClassVar[list[str]] = []
    ended = 0

    def export(self, spans: Any) -> SpanExportResult:
        Kept.names += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        Kept.ended += 1


class Installed:
    """An entry point of an exporter."""

    def load(self) -> type[SpanExporter]:
        return Kept


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of exporters that are looked for; each is installed."""
    asked: list[str] = []

    def found(group: str, name: str) -> list[Installed]:
        assert group == "opentelemetry_traces_exporter"
        asked.append(name)
        return [Installed()]

    monkeypatch.setattr(tracing, "entry_points", found)
    Kept.names, Kept.ended = [], 0
    return asked


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
         ["otlp_proto_grpc"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
          "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "other, otlp"}, ["other", "otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "none"}, []),
    ],
)  # fmt: skip
def test_opentelemetrys_variables_choose_the_exporter(
    m: Run, stream: str, installed: list[str], monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str], wanted: list[str],
) -> None:  # fmt: skip
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    m("pub", stream, "1", "--tracing").ok()
    assert installed == wanted
    assert Kept.names == [f"publish {stream}"] * len(wanted)
    assert Kept.ended == len(wanted), "all spans have left when the command ends"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "pip install opentelemetry-exporter-otlp-proto-http"),
        ({"OTEL_TRACES_EXPORTER": "jaegr"}, "OTEL_TRACES_EXPORTER: no exporter 'jaegr'"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "x"},
         "OTEL_EXPORTER_OTLP_PROTOCOL is 'x'; give one of http/protobuf, grpc"),
    ],
)  # fmt: skip
def test_an_exporter_that_is_missing_is_named(
    m: Run, stream: str, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    monkeypatch.setattr(tracing, "entry_points", lambda group, name: [])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = m("pub", stream, "1", "--tracing")
    assert told.code == 2
    assert says in told.err


@pytest.mark.moderate
def test_tracing_without_opentelemetry_says_what_to_install() -> None:
    ended = run_without(
        ["opentelemetry"],
        "from malamute_py.cli.app import app\nsys.argv = ['malamute', 'pub', 's', '1',"
        " '--tracing']\napp()",
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: tracing needs OpenTelemetry: pip install 'malamute-py[otel]' opentelemetry-sdk"
        " opentelemetry-exporter-otlp-proto-http\n"
    )
