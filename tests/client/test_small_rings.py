"""Both shells publish to streams with small rings, which take smaller batches than WELCOME says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from malamute_protocol.batch import encode
from malamute_protocol.errors import BrokerRefused
from malamute_py import EmbeddedBroker, Tracing
from tests.client.shells import FAST, SHELLS, Connect
from tests.waiting import WAIT_S, until_async

RING: dict[str, Any] = {"ring_bytes": 4 << 20}
KEYS: dict[str, Any] = {**RING, "keep": "last-per-subject"}
"""A batch of such a stream has at most 128 KiB."""
COUNT = 1_000
KEPT = [f"k{number}" for number in range(COUNT)]
BODIES = [b"%04d" % number + bytes(600) for number in range(COUNT)]
"""Records of 600 KB together."""


async def history(shell: Any, stream: str = "s") -> list[tuple[int, str, bytes]]:
    subscription = shell.client.subscribe(stream, start="earliest", until="tail")
    records = await shell.take(subscription, 1 << 30)
    return [(record.offset, record.subject, bytes(record.body)) for record in records]


def too_large(shell: Any) -> list[int]:
    """Bytes of all batches that are refused as too large, from now on."""
    publisher, sizes = shell.client._publisher, []
    refused = publisher.refused

    def noted(batch: Any, error: BrokerRefused, now_ms: int) -> None:
        if error.code == "too_large":
            sizes.append(batch.bytes)
        refused(batch, error, now_ms)

    publisher.refused = noted
    return sizes


async def many(shell: Any) -> Any:
    return await shell.do("publish_many", "s", BODIES, subjects=KEPT)


async def content(shell: Any) -> list[Any]:
    return [await shell.do("publish_batch", "s", encode(BODIES, subject=KEPT))]


async def arrow(shell: Any) -> Any:
    table = pa.table({"body": BODIES, "key": KEPT})
    return await shell.do("publish_arrow", "s", table, subject="key")


async def run(shell: Any) -> Any:
    """A run of one record after the other, and of a batch."""
    if shell.kind == "sync":

        def publish() -> Any:
            with shell.client.publisher("s") as window:
                window.publish_many(BODIES[:300], subjects=KEPT[:300])
                window.publish_batch(encode(BODIES[300:], subject=KEPT[300:]))
            return window.confirmations

        return await asyncio.to_thread(publish)
    async with shell.client.publisher("s") as window:
        await window.publish_many(BODIES[:300], subjects=KEPT[:300])
        await window.publish_batch(encode(BODIES[300:], subject=KEPT[300:]))
    return window.confirmations


async def lone(shell: Any) -> list[Any]:
    """Calls that are under way together, and so share batches."""
    pending = [
        shell.client.publish_nowait("s", body, subject=key)
        for body, key in zip(BODIES, KEPT, strict=True)
    ]
    return [await shell.result(one) for one in pending]


@pytest.mark.moderate
@pytest.mark.parametrize("idempotent", [True, False], ids=["exactly-once", "at-least-once"])
@pytest.mark.parametrize("way", [many, content, arrow, run, lone], ids=lambda way: way.__name__)
async def test_every_way_to_publish_fits_its_batches_to_a_small_ring(
    connect: Connect, way: Any, idempotent: bool
) -> None:
    shell = await connect(idempotent=idempotent)
    await shell.do("create_stream", "s", **KEYS)
    refused = too_large(shell)
    confirmed = await way(shell)
    # The thread of the sync client takes calls up while they come: its batches may all fit.
    least = 0 if way is lone and shell.kind == "sync" else 1
    assert least <= len(refused), refused
    assert len(refused) <= 1 or not idempotent, refused
    found = await history(shell)
    if idempotent:
        assert [record[1:] for record in found] == list(zip(KEPT, BODIES, strict=True))
    else:
        # What was under way behind the refused batch is in the log before its parts.
        assert sorted(record[1:] for record in found) == sorted(zip(KEPT, BODIES, strict=True))
    if way is content:
        [first] = confirmed
        assert 1 < first.count < COUNT
        return
    assert sum(one.count for one in confirmed) == COUNT
    assert min(one.offset for one in confirmed) == 1
    if way is lone:
        for one, body in zip(confirmed, BODIES, strict=True):
            assert found[one.offset - 1][2] == body, "each caller got the place of its own record"
    refused.clear()
    await way(shell)
    assert not refused, "the limit is known now"


@pytest.mark.moderate
async def test_a_reader_of_keys_needs_no_batches_of_the_right_size_from_many_clients(
    connect: Connect,
) -> None:
    first, second = await connect(), await connect()
    await first.do("create_stream", "s", **KEYS)
    await asyncio.gather(*(way(shell) for shell in (first, second) for way in (many, lone)))
    found = await history(first)
    newest = {subject: body for _, subject, body in found}
    assert newest == dict(zip(KEPT, BODIES, strict=True))


async def test_only_the_caller_of_a_record_that_fits_in_no_batch_is_refused(
    connect: Connect,
) -> None:
    shell = await connect()
    await shell.do("create_stream", "s", **KEYS)
    bodies = [b"a" * 60_000, b"x" * 200_000, b"b" * 60_000, b"c" * 60_000]
    pending = [shell.client.publish_nowait("s", body, subject=chr(body[0])) for body in bodies]
    outcomes = []
    for one in pending:
        try:
            outcomes.append((await shell.result(one)).offset)
        except BrokerRefused as error:
            outcomes.append(error.code)
    assert outcomes == [1, "too_large", 2, 3]


@pytest.mark.moderate
async def test_a_small_ring_without_keys_takes_batches_of_a_third_of_it(connect: Connect) -> None:
    shell = await connect(batch_bytes=4 << 20)
    bodies = [b"%04d" % number + bytes(2_000) for number in range(1_000)]
    refused = too_large(shell)
    # On a busy machine the rows may come to the session in parts, of which all fit.
    for stream in "stuvw":
        await shell.do("create_stream", stream, **RING)
        confirmed = await shell.do("publish_many", stream, bodies)
        assert len(confirmed) > 1
        assert [body for *_, body in await history(shell, stream)] == bodies
        if refused:
            break
    assert len(refused) == 1
    refused.clear()
    await shell.do("publish_many", stream, bodies)
    assert not refused


async def test_a_table_is_cut_to_what_a_small_ring_takes_before_it_is_sent(
    connect: Connect,
) -> None:
    shell = await connect(batch_bytes=4 << 20)
    # Rows of very different sizes: the mean says little of what some of them take together.
    texts = ["x" * 10] * 500 + [f"{number:05000d}" for number in range(400)]
    table = pa.table({"text": texts})
    await shell.do("create_stream", "s", **RING, schema=table.schema)
    refused = too_large(shell)
    confirmed = await shell.do("publish_table", "s", table)
    assert not refused
    assert sum(one.count for one in confirmed) == 900
    reading = shell.client.subscribe("s", start="earliest", until="tail")
    assert await shell.call(reading.to_arrow) == table


@pytest.mark.moderate
async def test_a_batch_behind_one_that_no_segment_holds_is_taken(connect: Connect) -> None:
    large, small = await connect(batch_bytes=4 << 20), await connect()
    await large.do("create_stream", "s", **RING)
    body = bytes(2_000)
    pending = [large.client.publish_nowait("s", body) for _ in range(900)]
    behind = [small.client.publish_nowait("s", b"small") for _ in range(20)]
    for one in pending:
        await large.result(one)
    for one in behind:
        await small.result(one)
    assert len(await history(small)) == 920


@pytest.mark.moderate
async def test_the_span_of_a_call_ends_once_with_the_last_part_of_its_batch(
    connect: Connect,
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    shell = await connect(tracing=Tracing(provider))
    await shell.do("create_stream", "s", **KEYS)
    exporter.clear()
    window = shell.client.publisher("s")
    await shell.call(window.publish_batch, encode(BODIES, subject=KEPT))
    await shell.call(window.wait)
    assert window.confirmed == window.published == COUNT
    assert [span.name for span in exporter.get_finished_spans()] == ["publish s"]
    assert len(window.confirmations) > 1


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_broker_restarted_amid_batches_that_are_divided_has_each_record_once_in_order(
    kind: Any, tmp_path: Path, endpoint: str
) -> None:
    def start() -> EmbeddedBroker:
        return EmbeddedBroker(tmp_path, listen=[endpoint]).start()

    broker = await asyncio.to_thread(start)
    shell = kind()
    await shell.connect(endpoint, **FAST)
    await shell.do("create_stream", "s", **KEYS)
    keys = [f"k{number:04d}" for number in range(2_000)]
    confirmed: list[Any] = []

    async def publishing() -> None:
        for first in range(0, len(keys), 500):
            some = keys[first : first + 500]
            bodies = [key.encode() + bytes(400) for key in some]
            confirmed.extend(await shell.do("publish_many", "s", bodies, subjects=some))

    writing = asyncio.create_task(publishing())
    try:
        for number in range(3):
            await until_async(lambda: len(confirmed) > 2 * number or writing.done())  # noqa: B023
            await asyncio.to_thread(broker.stop)
            broker = await asyncio.to_thread(start)
        await asyncio.wait_for(writing, WAIT_S)
        assert shell.client.reconnects >= 1
        found = await history(shell)
        assert [key for _, key, _ in found] == keys
        assert [offset for offset, *_ in found] == list(range(1, len(keys) + 1))
        assert sum(one.count for one in confirmed) == len(keys)
        assert len(confirmed) > 8
    finally:
        await shell.do("close", flush_ms=0)
        await asyncio.to_thread(broker.stop)
