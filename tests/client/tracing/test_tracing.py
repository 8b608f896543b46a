"""A traced client: its spans, the context that travels, and what a client without tracing pays."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest
from opentelemetry import baggage, context
from opentelemetry.propagate import get_global_textmap
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

import malamute_py as malamute
from malamute_protocol.batch import Content, encode
from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_protocol.limits import DEFAULT_LIMITS, UNBOUNDED
from malamute_py import EmbeddedBroker, Tracing
from tests.client.fakes import FakeBroker
from tests.client.shells import AsyncShell, SyncShell
from tests.client.tracing.traced_shells import (
    Traced,
    attributes,
    exporters_of,
    id_of,
    parent_of,
)


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


@pytest.mark.moderate
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
