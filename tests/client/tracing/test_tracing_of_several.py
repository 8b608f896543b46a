"""Spans of steps, transactions, windows, workers and tables of a traced client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry.trace import SpanKind, StatusCode, format_trace_id, get_current_span

import malamute_py as malamute
from malamute_protocol.batch import encode
from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_py import EmbeddedBroker
from malamute_py.client.session.letters import RequestFailed
from tests.client.fakes import FakeBroker
from tests.client.shells import FAST, AsyncShell, SyncShell
from tests.client.tracing.traced_shells import (
    Traced,
    attributes,
    begun,
    exporters_of,
    id_of,
    parent_of,
)


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
