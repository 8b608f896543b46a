"""A traced client: its spans, the context that travels, and what a client without tracing pays."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry import baggage, context
from opentelemetry.propagate import get_global_textmap
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_trace_id, get_current_span

import malamute_py as malamute
from malamute_protocol.batch import Content, encode
from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_protocol.limits import DEFAULT_LIMITS, UNBOUNDED
from malamute_py import EmbeddedBroker, Tracing
from malamute_py.client.session.letters import RequestFailed
from tests.client.fakes import FakeBroker
from tests.client.shells import FAST, SHELLS, AsyncShell, SyncShell


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as embedded:
        yield embedded


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


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.kind)
async def traced(request: pytest.FixtureRequest, broker: EmbeddedBroker) -> AsyncIterator[Traced]:
    name = f"{request.node.name}"[:100].translate(str.maketrans("[]", "--"))
    made = Traced(request.param(), name)
    await made.shell.connect(broker.endpoint, context=broker.context, tracing=made.tracing)
    yield made
    await made.shell.do("close", flush_ms=0)


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.kind)
async def lonely(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Traced, FakeBroker]]:
    """A traced client whose broker has gone, and comes back when it is started."""
    fake = FakeBroker()
    made = Traced(request.param(), "lonely")
    await made.shell.connect(fake.endpoint, tracing=made.tracing, **FAST)
    fake.stop()
    yield made, fake
    await made.shell.do("close", flush_ms=0)
    fake.close()


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


async def test_a_publish_is_a_producer_span_whose_context_the_record_carries(
    traced: Traced,
) -> None:
    stream = traced.name
    await traced.shell.do("publish", stream, b"1", subject="a", properties={"x": 1})
    [record] = await traced.shell.take(traced.client.subscribe(stream, start="earliest"), 1)
    published, received = traced.one(f"publish {stream}"), traced.one(f"receive {stream}")
    assert published.kind is SpanKind.PRODUCER
    assert attributes(published) == {
        "system": "malamute",
        "operation.name": "publish",
        "operation.type": "send",
        "destination.name": stream,
    }
    assert published.status.status_code is StatusCode.UNSET
    assert set(record.properties) == {"x", "traceparent"}
    assert received.kind is SpanKind.CONSUMER
    assert attributes(received)["operation.type"] == "receive"
    assert attributes(received)["batch.message_count"] == 1
    assert parent_of(received) == id_of(published)
    found = get_current_span(traced.tracing.context_of(record)).get_span_context()
    assert found.span_id == id_of(published)


async def test_a_context_that_is_forwarded_gives_way_to_the_new_one_as_a_whole(
    traced: Traced,
) -> None:
    old = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "tracestate": "a=b", "x": 1}
    await traced.shell.do("publish", traced.name, b"1", properties=old)
    await traced.shell.do("publish_many", traced.name, [b"2", b"3"], properties=[old, None])
    subscription = traced.client.subscribe(traced.name, start="earliest")
    records = await traced.shell.take(subscription, 3)
    assert [set(record.properties) - {"traceparent"} for record in records] == [{"x"}, {"x"}, set()]
    published = [id_of(span) for span in traced.spans(f"publish {traced.name}")]
    for record, span in zip(records, [published[0], published[1], published[1]], strict=True):
        found = get_current_span(traced.tracing.context_of(record)).get_span_context()
        assert found.span_id == span


async def test_many_records_of_one_call_carry_one_context_between_them(traced: Traced) -> None:
    stream = traced.name
    await traced.shell.do(
        "publish_many", stream, [b"1", b"2", b"3"], properties=[{"n": 1}, None, {}]
    )
    await traced.shell.do("publish_many", stream, bodies=[b"4"] * 100)
    subscription = traced.client.subscribe(stream, start="earliest", until="tail")
    few = await traced.shell.call(subscription.next_batch)
    many = await traced.shell.call(subscription.next_batch)
    published = traced.spans(f"publish {stream}")
    assert [attributes(span)["batch.message_count"] for span in published] == [3, 100]
    assert [record.properties.get("n") for record in few.records()] == [1, None, None]
    maps, codes = many.content.properties()
    assert codes is None
    assert len(maps) == 1
    assert len(traced.tracing.spans.contexts_of(few)) == 1


async def test_properties_of_any_sequence_carry_the_context(traced: Traced) -> None:
    stream = traced.name
    await traced.shell.do("publish_many", stream, [b"1", b"2"], properties=deque([{"n": 1}, None]))
    subscription = traced.client.subscribe(stream, start="earliest", until="tail")
    batch = await traced.shell.call(subscription.next_batch)
    assert [set(record.properties) for record in batch.records()] == [
        {"n", "traceparent"}, {"traceparent"},
    ]  # fmt: skip


async def test_an_encoded_batch_of_a_step_carries_its_context(traced: Traced) -> None:
    stream = traced.name
    step = traced.client.atomic()
    step.publish_batch(stream, encode([b"1", b"2"], properties={"x": 1}))
    await traced.shell.call(step.commit)
    subscription = traced.client.subscribe(stream, start="earliest", until="tail")
    batch = await traced.shell.call(subscription.next_batch)
    found = get_current_span(traced.tracing.context_of(batch)).get_span_context()
    assert found.span_id == id_of(traced.one("atomic"))
    assert set(batch.properties_of(0)) == {"x", "traceparent"}


async def test_an_encoded_batch_carries_one_context_beside_its_own_properties(
    traced: Traced,
) -> None:
    stream = traced.name
    bodies = [b"%d" % n for n in range(8)]
    plain = encode(bodies, subject=[str(n % 3) for n in range(8)], expires_at_ms=1 << 42)
    await traced.shell.do("publish_batch", stream, plain)
    await traced.shell.do("publish_batch", stream, content=encode(bodies, properties={"x": 1}))
    window = traced.client.publisher(stream)
    await traced.shell.call(window.publish_batch, bytearray(plain))
    await traced.shell.call(window.wait)
    subscription = traced.client.subscribe(stream, start="earliest", until="tail")
    batches = [await traced.shell.call(subscription.next_batch) for _ in range(3)]
    published = traced.spans(f"publish {stream}")
    for batch, span, own in zip(batches, published, (set(), {"x"}, set()), strict=True):
        assert [bytes(record.body) for record in batch.records()] == bodies
        maps, codes = batch.content.properties()
        assert (len(maps), codes) == (1, None)
        assert set(batch.properties_of(0)) == {"traceparent", *own}
        found = get_current_span(traced.tracing.context_of(batch)).get_span_context()
        assert found.span_id == id_of(span)


async def test_an_encoded_batch_goes_as_it_is_where_a_context_has_no_place(traced: Traced) -> None:
    stream = traced.name
    own: list[Any] = [{"n": 1}, None, {"n": 2}]
    kept = [
        encode([b"1", b"2", b"3"], properties=own),
        encode([b"1"] * 8, properties=[{"n": n % 2} for n in range(8)]),
        # The most that fits into a map and a batch.
        encode([b"1"], properties={"x": "y" * (DEFAULT_LIMITS.property_bytes_max - 6)}),
    ]
    for content in kept:
        await traced.shell.do("publish_batch", stream, content)
    subscription = traced.client.subscribe(stream, start="earliest", until="tail")
    for content in kept:
        batch = await traced.shell.call(subscription.next_batch)
        sent = Content(content)
        assert bytes(batch.content.property_section()[1]) == bytes(sent.property_section()[1])
        assert traced.tracing.context_of(batch) is None
    with pytest.raises(LocalProtocolError):
        await traced.shell.do("publish_batch", stream, b"no batch")
    with pytest.raises(TypeError):
        await traced.shell.do("publish_batch", stream)
    spans, limits = traced.tracing.spans, DEFAULT_LIMITS
    numbered = encode([b"1"], producer_id=7)
    full = encode([bytes(limits.record_bytes_max)] * 3, limits=UNBOUNDED)
    unchanged: list[Any] = [numbered, full, 5, b""]
    with traced.tracer.start_as_current_span("any") as span:
        for content in unchanged:
            assert spans.carried_in(content, span, limits) is content


async def test_a_publish_that_is_not_waited_for_ends_its_span_with_the_confirm(
    lonely: tuple[Traced, FakeBroker],
) -> None:
    traced, fake = lonely
    exporting = exporters_of(traced)
    confirm = traced.client.publish_nowait("s", b"1")
    with pytest.raises(LocalProtocolError):
        traced.client.publish_nowait("wrong", 5)
    assert [span.name for span in traced.spans()] == ["publish wrong"]
    assert attributes(traced.one("publish wrong"))["error.type"] == "bad_batch"
    before_ns = time.time_ns()
    fake.start()
    await traced.shell.result(confirm)
    span = traced.one("publish s")
    assert span.end_time is not None
    assert span.end_time > before_ns
    assert span.status.status_code is StatusCode.UNSET
    assert "malamute-client" not in exporting


async def test_a_refused_publish_that_is_not_waited_for_has_the_refusal_as_its_status(
    traced: Traced,
) -> None:
    refused = traced.client.publish_nowait(".", b"1")
    with pytest.raises(BrokerRefused) as caught:
        await traced.shell.result(refused)
    span = traced.one("publish .")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == caught.value.code


async def test_a_cancelled_confirm_is_the_status_of_its_span(broker: EmbeddedBroker) -> None:
    made = Traced(AsyncShell(), "cancelled")
    await made.shell.connect(broker.endpoint, context=broker.context, tracing=made.tracing)
    made.client.publish_nowait(made.name, b"1").cancel()
    await made.client.close()
    assert attributes(made.one(f"publish {made.name}"))["error.type"] == "CancelledError"


async def test_spans_of_what_is_not_waited_for_end_without_anyone_asking_for_the_result(
    traced: Traced,
) -> None:
    traced.client.publish_nowait(traced.name, b"1")
    await traced.shell.do("flush")
    assert len(traced.spans(f"publish {traced.name}")) == 1
    traced.client.send_nowait(traced.name, b"1")
    await traced.shell.do("close")
    assert len(traced.spans(f"send {traced.name}")) == 1


def test_the_next_call_of_a_thread_hands_the_span_of_the_last_one_over(
    broker: EmbeddedBroker,
) -> None:
    made = Traced(SyncShell(), "nowait")
    client = broker.connect_sync(tracing=made.tracing)
    first = client.publish_nowait(made.name, b"1")
    while not first.done:
        time.sleep(0.001)
    confirmed_ns = time.time_ns()
    assert not made.spans()
    client.publish_nowait(made.name, b"2")
    [span] = made.spans()
    assert span.end_time is not None
    assert span.end_time <= confirmed_ns, "the time is that of the confirm"
    client.close(flush_ms=0)
    assert len(made.spans()) == 2


def test_a_step_of_threads_that_is_not_waited_for_ends_its_span_with_the_confirm() -> None:
    fake = FakeBroker()
    made = Traced(SyncShell(), "step")
    client = malamute.connect_sync(fake.endpoint, tracing=made.tracing, **FAST)
    fake.stop()
    step = client.atomic()
    step.publish("s", b"1")
    pending = step.commit_nowait()
    assert not made.spans()
    client.close(flush_ms=0)
    with pytest.raises(malamute.ConnectionLost):
        pending.result()
    assert attributes(made.one("atomic"))["error.type"] == "ConnectionLost"
    fake.close()


async def test_a_batch_of_several_contexts_links_them(traced: Traced) -> None:
    stream, client = traced.name, traced.client
    with traced.tracer.start_as_current_span("together"):
        confirms = [client.publish_nowait(stream, b"%d" % n) for n in range(3)]
    for confirm in confirms:
        await traced.shell.result(confirm)
    subscription = client.subscribe(stream, start="earliest", whole=True)
    left = 3
    while left:
        batch = await traced.shell.call(subscription.next_batch)
        left -= len(batch)
        if len(batch) > 1:
            received = traced.spans(f"receive {stream}")[-1]
            assert received.parent is None
            assert len(received.links) == len(batch)
            assert traced.tracing.context_of(batch) is None
            with traced.tracing.processing(batch):
                pass
            processed = traced.one(f"process {stream}")
            assert attributes(processed)["batch.message_count"] == len(batch)
            assert [link.context for link in processed.links] == [
                link.context for link in received.links
            ]
    published = {id_of(span) for span in traced.spans(f"publish {stream}")}
    linked = {
        link.context.span_id for span in traced.spans(f"receive {stream}") for link in span.links
    }
    parents = {parent_of(span) for span in traced.spans(f"receive {stream}")} - {0}
    assert linked | parents == published


async def test_one_trace_leads_through_a_request_its_worker_and_what_that_publishes(
    broker: EmbeddedBroker, traced: Traced
) -> None:
    service, stream = traced.name, traced.name
    seen: list[int] = []
    async with broker.connect(tracing=traced.tracing, identity="worker") as other:

        @other.serve(service)
        async def shout(request: malamute.Request) -> bytes:
            seen.append(get_current_span().get_span_context().span_id)
            await other.publish(stream, request.body)
            await other.send(service, b"done")
            return request.body.upper()

        working = asyncio.create_task(other.run())
        with traced.tracer.start_as_current_span("root") as root:
            reply = await traced.shell.do("request", service, b"who")
        assert reply.body == b"WHO"
        [record] = await traced.shell.take(traced.client.subscribe(stream, start="earliest"), 1)
        [mail] = await traced.shell.take(traced.client.inbox(service), 1)
        with traced.tracing.processing(record), traced.tracing.processing(mail):
            pass
        working.cancel()
    asked, worked = traced.one(f"request {service}"), traced.one(f"work {service}")
    published, sent = traced.one(f"publish {stream}"), traced.one(f"send {service}")
    assert (asked.kind, worked.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
    assert parent_of(asked) == root.get_span_context().span_id
    assert parent_of(worked) == id_of(asked)
    assert seen == [id_of(worked)]
    assert {parent_of(published), parent_of(sent)} == {id_of(worked)}
    assert attributes(published)["client.id"] == "worker"
    for step in ("receive", "process"):
        parents = [parent_of(span) for span in traced.spans(f"{step} {stream}")]
        assert set(parents) == {id_of(published), id_of(sent)}
    assert {span.context.trace_id for span in traced.spans() if span.context} == {
        root.get_span_context().trace_id
    }


async def test_a_refusal_is_the_status_of_its_span_by_its_code(traced: Traced) -> None:
    with pytest.raises(BrokerRefused):
        await traced.shell.do("request", traced.name, b"1", need_workers=True)
    asked = traced.one(f"request {traced.name}")
    assert asked.status.status_code is StatusCode.ERROR
    assert attributes(asked)["error.type"] == "no_workers"


async def test_wrong_arguments_are_refused_as_without_tracing(traced: Traced) -> None:
    for arguments in ((7, b"1"), (traced.name, 1.5), (traced.name,)):
        with pytest.raises((malamute.LocalProtocolError, TypeError)):
            await traced.shell.do("publish", *arguments)
    with pytest.raises(malamute.LocalProtocolError):
        await traced.shell.do("publish", traced.name, b"1", properties="x")
    assert all(span.status.status_code is StatusCode.ERROR for span in traced.spans())
    # One body of several blobs is one record.
    await traced.shell.do("publish", stream=traced.name, body=[b"a", b"b"])
    assert "batch.message_count" not in attributes(traced.spans(f"publish {traced.name}")[-1])


async def test_a_step_has_one_span_whose_context_its_records_carry(traced: Traced) -> None:
    def step() -> Any:
        made = traced.client.atomic()
        made.publish(traced.name, b"1")
        made.publish_many(traced.name, [b"2", b"3"])
        made.send(traced.name, b"4")
        return made

    await traced.shell.call(step().commit)
    step().give_up()
    batch = await traced.shell.call(
        traced.client.subscribe(traced.name, start="earliest").next_batch
    )
    mail = await traced.shell.call(traced.client.inbox(traced.name).next_batch)
    taken, given_up = traced.spans("atomic")
    assert attributes(taken)["batch.message_count"] == 4
    assert "batch.message_count" not in attributes(given_up)
    for item in (batch, mail):
        found = get_current_span(traced.tracing.context_of(item)).get_span_context()
        assert found.span_id == id_of(taken)


async def begun(traced: Traced) -> Any:
    transaction = traced.client.transaction()
    await traced.shell.call(transaction.begin)
    return transaction


async def test_a_transaction_has_a_span_and_its_commit_links_what_was_published(
    traced: Traced,
) -> None:
    transaction = await begun(traced)
    await traced.shell.call(transaction.publish_batch, traced.name, encode([b"1"]))
    with traced.tracer.start_as_current_span("item"):
        await traced.shell.call(transaction.publish_many, traced.name, [b"2", b"3"])
    assert not traced.spans("transaction")
    await traced.shell.call(transaction.commit)
    whole, commit = traced.one("transaction"), traced.one("commit")
    first, second = traced.spans(f"stage {traced.name}")
    assert [parent_of(each) for each in (whole, commit, first, second)] == [
        0, id_of(whole), id_of(whole), id_of(traced.one("item")),
    ]  # fmt: skip
    assert [link.context.span_id for link in commit.links] == [id_of(first), id_of(second)]
    assert attributes(second)["batch.message_count"] == 2
    assert attributes(first)["operation.type"] == "create"
    records = await traced.shell.take(traced.client.subscribe(traced.name, start="earliest"), 3)
    carried = [
        get_current_span(traced.tracing.context_of(each)).get_span_context().span_id
        for each in records
    ]
    assert carried == [id_of(first), id_of(second), id_of(second)]


async def test_a_transaction_that_is_rolled_back_or_refused_ends_its_span(traced: Traced) -> None:
    transaction = await begun(traced)
    await traced.shell.call(transaction.publish, traced.name, b"1")
    await traced.shell.call(transaction.roll_back)
    await traced.shell.call(transaction.roll_back)
    back = traced.one("roll back")
    assert parent_of(back) == id_of(traced.one("transaction"))
    assert "operation.type" not in attributes(back)
    assert back.status.status_code is StatusCode.UNSET
    transaction = await begun(traced)
    await traced.shell.do("end_transaction", transaction.id)
    with pytest.raises(BrokerRefused):
        await traced.shell.call(transaction.commit)
    for span in (traced.one("commit"), traced.spans("transaction")[-1]):
        assert span.status.status_code is StatusCode.ERROR
        assert dict(span.attributes or {})["error.type"] == "transaction_ended"
    with pytest.raises(LocalProtocolError):
        await traced.shell.call(transaction.publish, traced.name, b"1")


async def test_an_exception_in_the_block_of_a_transaction_is_its_status(
    broker: EmbeddedBroker,
) -> None:
    made = Traced(AsyncShell(), "in-a-block")
    await made.shell.connect(broker.endpoint, context=broker.context, tracing=made.tracing)
    client = made.client

    async def publishing(error: type[BaseException]) -> None:
        async with client.transaction() as transaction:
            await transaction.publish(made.name, b"1")
            raise error

    with pytest.raises(ZeroDivisionError):
        await publishing(ZeroDivisionError)
    async with client.transaction() as transaction:
        await transaction.publish(made.name, b"2")
    wrong, right = made.spans("transaction")
    assert dict(wrong.attributes or {})["error.type"] == "ZeroDivisionError"
    assert right.status.status_code is StatusCode.UNSET
    assert parent_of(made.one("roll back")) == id_of(wrong)
    with pytest.raises(asyncio.CancelledError):
        await publishing(asyncio.CancelledError)
    assert len(made.spans("transaction")) == 3
    await client.close()


async def test_a_window_has_a_span_a_call_and_a_group_names_itself(traced: Traced) -> None:
    window = traced.client.publisher(traced.name)
    await traced.shell.call(window.publish_many, bodies=[b"1", b"2"], subject="gate")
    await traced.shell.call(window.wait)
    member = traced.client.group(traced.name, "crew", start="earliest")
    batch = await traced.shell.call(member.next_batch)
    with traced.tracing.processing(next(batch.records())):
        pass
    published, received = traced.one(f"publish {traced.name}"), traced.one(f"receive {traced.name}")
    assert attributes(published)["batch.message_count"] == 2
    assert attributes(received)["consumer.group.name"] == "crew"
    assert parent_of(traced.one(f"process {traced.name}")) == id_of(published)


async def test_a_span_of_a_window_ends_with_the_confirm_of_its_last_batch(
    lonely: tuple[Traced, FakeBroker],
) -> None:
    traced, fake = lonely
    exporting = exporters_of(traced)
    window = traced.client.publisher("s")
    await traced.shell.call(window.publish_many, bodies=[b"x" * 1_000] * 1_000, subject="gate")
    assert not traced.spans()
    before_ns = time.time_ns()
    fake.start()
    await traced.shell.call(window.wait)
    span = traced.one("publish s")
    assert span.end_time is not None
    assert span.end_time > before_ns
    assert span.status.status_code is StatusCode.UNSET
    assert attributes(span)["batch.message_count"] == 1_000
    assert "malamute-client" not in exporting


async def test_a_span_of_a_window_that_fails_has_the_failure_as_its_status(traced: Traced) -> None:
    window = traced.client.publisher(".")
    await traced.shell.call(window.publish_many, bodies=[b"1"], subject="gate")
    with pytest.raises(BrokerRefused) as refused:
        await traced.shell.call(window.wait)
    span = traced.one("publish .")
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == refused.value.code
    with pytest.raises(BrokerRefused):
        await traced.shell.call(window.publish_many, bodies=[b"2"], subject="gate")
    assert [each.status.status_code for each in traced.spans()] == [StatusCode.ERROR] * 2


async def test_a_span_of_a_window_ends_when_its_client_is_closed_before_the_confirm(
    lonely: tuple[Traced, FakeBroker],
) -> None:
    traced, _ = lonely
    window = traced.client.publisher("s")
    await traced.shell.call(window.publish_many, bodies=[b"1"], subject="gate")
    await traced.shell.do("close", flush_ms=0)
    assert attributes(traced.one("publish s"))["error.type"] == "ConnectionLost"


async def test_a_table_and_a_change_of_a_key_carry_their_contexts(traced: Traced) -> None:
    pa = pytest.importorskip("pyarrow")
    schema = pa.schema([pa.field("gate", pa.int32())])
    typed, plain, keyed = (f"{traced.name}.{kind}" for kind in ("typed", "plain", "keyed"))
    await traced.shell.do("create_stream", typed, schema=schema)
    await traced.shell.do("create_stream", keyed, keep="last-per-subject", ring_bytes=192 << 20)
    table = pa.table({"gate": pa.array([1, 2], pa.int32())})
    await traced.shell.do("publish_table", typed, table, properties={"x": 1})
    await traced.shell.do("publish_arrow", plain, pa.table({"body": [b"1", b"2"]}))
    await traced.shell.call(traced.client.kv(keyed).put, "colour", b"red")
    step, transaction = traced.client.atomic(), await begun(traced)
    for within in (step, transaction):
        await traced.shell.call(within.publish_table, typed, table, properties={"x": 1})
        await traced.shell.call(within.commit)
    batches = traced.client.subscribe(typed, start=2)
    for span in (traced.one("atomic"), traced.one(f"stage {typed}")):
        batch = await traced.shell.call(batches.next_batch)
        found = get_current_span(traced.tracing.context_of(batch)).get_span_context()
        assert found.span_id == id_of(span)
        assert "x" in batch.properties_of(0)
    for stream in (typed, plain, keyed):
        subscription = traced.client.subscribe(stream, start="earliest")
        batch = await traced.shell.call(subscription.next_batch)
        found = get_current_span(traced.tracing.context_of(batch)).get_span_context()
        assert found.span_id == id_of(traced.one(f"publish {stream}")), stream
        assert (stream == typed) == ("x" in batch.properties_of(0))


async def test_several_replies_are_one_span_and_a_failed_handler_is_named_in_the_log(
    broker: EmbeddedBroker, traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    async with broker.connect(tracing=traced.tracing) as other:

        @other.serve(traced.name, "count")
        async def count(request: malamute.Request) -> AsyncIterator[bytes]:
            yield b"1"
            yield b"2"

        @other.serve(traced.name, "fail")
        def fail(request: malamute.Request) -> None:
            raise ValueError("no such gate")

        working = asyncio.create_task(other.run())
        replies = traced.client.requests(traced.name, b"", subject="count")
        assert [reply.body for reply in await traced.shell.take(replies, 9)] == [b"1", b"2"]
        at_level = caplog.at_level(logging.WARNING, "malamute.client")
        with at_level, pytest.raises(RequestFailed):
            await traced.shell.do("request", traced.name, b"", subject="fail")
        working.cancel()
    counted, failed = traced.spans(f"request {traced.name}")
    assert counted.status.status_code is StatusCode.UNSET
    assert attributes(failed)["error.type"] == "failed"
    worked, erred = traced.spans(f"work {traced.name}")
    assert parent_of(worked) == id_of(counted)
    assert attributes(erred)["error.type"] == "ValueError"
    [line] = [record for record in caplog.records if "failed" in record.msg]
    assert erred.context is not None
    assert line.__dict__["trace_id"] == format_trace_id(erred.context.trace_id)


async def test_handlers_of_threads_run_within_their_spans(broker: EmbeddedBroker) -> None:
    made = Traced(SyncShell(), "threads")
    seen: list[int] = []

    def note() -> None:
        seen.append(get_current_span().get_span_context().span_id)

    def asked() -> None:
        with broker.connect_sync(tracing=made.tracing) as client:

            @client.serve("threads", "plain")
            def plain(request: malamute.SyncRequest) -> bytes:
                note()
                return b"1"

            @client.serve("threads", "several")
            def several(request: malamute.SyncRequest) -> Iterator[bytes]:
                note()
                yield b"1"
                note()

            with broker.connect_sync() as other:
                first = client.worker("threads", "plain")
                second = client.worker("threads", "several")
                runs = [
                    first.start(plain, "fail", 0),
                    second.start(several, "fail", 0),
                ]
                other.request("threads", b"", subject="plain")
                list(other.requests("threads", b"", subject="several"))
                first.close(drain=True)
                second.close(drain=True)
                for run in runs:
                    run.join()

    await asyncio.to_thread(asked)
    plain, several = made.spans("work threads")
    assert seen == [id_of(plain), id_of(several), id_of(several)]
    assert plain.parent is None


async def test_baggage_travels_only_with_a_propagator_that_has_it(
    broker: EmbeddedBroker, traced: Traced
) -> None:
    async def carried(tracing: Tracing) -> Any:
        async with broker.connect(tracing=tracing) as client:
            await client.send(traced.name, b"1")
            async with client.inbox(traced.name) as inbox:
                mail = await inbox.next()
                assert mail is not None
                return mail, tracing.context_of(mail)

    token = context.attach(baggage.set_baggage("tenant", "north"))
    try:
        without, _ = await carried(traced.tracing)
        propagator = get_global_textmap()
        having, found = await carried(Tracing(traced.provider, propagator=propagator))
    finally:
        context.detach(token)
    assert set(without.properties) == {"traceparent"}
    assert having.properties["baggage"] == "tenant=north"
    assert baggage.get_baggage("tenant", found) == "north"


@pytest.mark.parametrize(
    "written", [7, "", "00-zz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", b"x", None]
)
async def test_a_context_that_cannot_be_read_is_none(
    broker: EmbeddedBroker, traced: Traced, written: Any
) -> None:
    name = f"unreadable.{type(written).__name__}.{traced.shell.kind}"
    async with broker.connect() as other:
        await other.publish(name, b"1", properties={"traceparent": written, "tracestate": 1})
    [record] = await traced.shell.take(traced.client.subscribe(name, start="earliest"), 1)
    assert traced.tracing.context_of(record) is None
    assert traced.one(f"receive {name}").parent is None
    with pytest.raises(TypeError, match="no record, message, request or batch"):
        traced.tracing.context_of("a text")


def test_a_span_names_the_server_where_there_is_one() -> None:
    made = Traced(SyncShell(), "server")
    for endpoints in (("tcp://[::1]:9797",), ("inproc://x",), ("tcp://a:1", "tcp://b:2")):
        made.tracing.spans.connected(endpoints, lambda: "web-1").start(
            "atomic", SpanKind.CLIENT
        ).end()
    first, *others = (dict(span.attributes or {}) for span in made.spans("atomic"))
    assert (first["server.address"], first["server.port"]) == ("::1", 9797)
    assert first["messaging.client.id"] == "web-1"
    assert not [one for one in others if "server.address" in one]


async def test_what_a_tracing_may_be(broker: EmbeddedBroker) -> None:
    with pytest.raises(malamute.SettingError, match=r"tracing: is True, False or a Tracing, not 1"):
        broker.connect(tracing=1)  # type: ignore[arg-type]
    async with broker.connect(tracing=True) as client:  # no SDK is set up: nothing is recorded
        await client.publish("trades", b"1")
        [record] = [r async for r in client.subscribe("trades", start="earliest", until="tail")]
    assert not record.properties
