"""The client of asyncio over a real socket, against a broker that does as the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import encode
from malamute_protocol.errors import ConnectionLost, LocalProtocolError, Timeout
from malamute_protocol.framing import encode_message
from malamute_py.client.aio.client import Client, connect
from malamute_py.client.engine.engine import clock_ms
from malamute_py.client.session.events import Unlinked
from malamute_py.embedded import EmbeddedBroker
from tests.client.fakes import FakeBroker
from tests.client.script import stamped
from tests.client.shells import FAST
from tests.client.test_shells_against_a_fake import broker
from tests.waiting import WAIT_S, until_async

__all__ = ["broker"]


async def test_connect_is_a_context_manager_with_and_without_await(broker: FakeBroker) -> None:
    async with connect(broker.endpoint) as client:
        await client.publish("s", b"a")
    async with await connect(broker.endpoint) as client:
        assert (await client.publish("s", b"b")).offset == 1


async def test_a_cancelled_publish_leaves_the_others_alone(broker: FakeBroker) -> None:
    async with connect(broker.endpoint, **FAST) as client:
        tasks = [asyncio.create_task(client.publish("s", b"%d" % n)) for n in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        first, second, third = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(second, asyncio.CancelledError)
        assert not isinstance(first, BaseException)
        assert not isinstance(third, BaseException)
        assert third.offset == 2


async def test_a_cancelled_iteration_loses_no_record(broker: FakeBroker) -> None:
    async with connect(broker.endpoint, **FAST) as client:
        subscription = client.subscribe("s", start="earliest")
        got: list[int] = []

        async def read() -> None:
            async for record in subscription:
                got.append(record.offset)  # noqa: PERF401 - what came before the cancel counts

        for number in range(20):
            task = asyncio.create_task(read())
            await client.publish_many("s", [b"x"] * 7)
            if number % 2:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        while len(got) < 140:
            got.append((await anext(subscription)).offset)
        assert got == list(range(140))


async def test_a_cancelled_table_loses_no_record(broker: FakeBroker) -> None:
    async with connect(broker.endpoint, **FAST) as client:
        await client.publish_many("s", [b"1", b"2"])
        subscription = client.subscribe("s", start="earliest")
        table = asyncio.create_task(subscription.to_arrow(4))
        await until_async(
            lambda: subscription.position is not None and subscription.position[2] == 2
        )
        await client.publish_many("s", [b"3"])
        await until_async(
            lambda: subscription.position is not None and subscription.position[2] == 3
        )
        table.cancel()
        await asyncio.wait([table])
        assert (await subscription.accepted()).next == 0
        await client.publish_many("s", [b"4", b"5"])
        whole = await subscription.to_arrow(4)
        assert whole.column("body").to_pylist() == [b"1", b"2", b"3", b"4"]
        last = await subscription.next_record()
        assert last is not None
        assert last.body == b"5"


@pytest.mark.moderate
async def test_a_wait_for_that_times_out_can_be_repeated(broker: FakeBroker) -> None:
    async with connect(broker.endpoint, **FAST) as client:
        subscription = client.subscribe("s")
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(subscription), 0.02)
        await client.publish("s", b"x")
        assert (await asyncio.wait_for(anext(subscription), WAIT_S)).body == b"x"


async def test_reading_at_full_speed_lets_the_loop_turn(broker: FakeBroker) -> None:
    async with connect(broker.endpoint, **FAST) as client:
        await client.publish_many("s", [b"x"] * 20_000)
        subscription = client.subscribe("s", start="earliest", until="tail")
        await subscription.accepted()
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        assert len([record async for record in subscription]) == 20_000
        task.cancel()
        assert turns > 50


@pytest.mark.moderate
async def test_publishes_of_many_tasks_beyond_the_window_all_wait(broker: FakeBroker) -> None:
    async with connect(broker.endpoint, **FAST, window_bytes=4096, batch_bytes=1024) as client:
        sizes = (1, 12, 900) * 200
        confirmed = await asyncio.gather(
            *(client.publish("s", b"x" * size, subject="a") for size in sizes)
        )
        assert sorted(one.offset for one in confirmed) == list(range(len(sizes)))


async def test_tasks_that_were_confirmed_together_publish_together_again(
    broker: FakeBroker,
) -> None:
    lost = asyncio.Event()

    def listen(event: Any) -> None:
        if isinstance(event, Unlinked):
            lost.set()

    async with connect(broker.endpoint, on_link=listen, **FAST) as client:
        await client.publish("before", b"-")
        broker.stop()
        await asyncio.wait_for(lost.wait(), WAIT_S)

        async def publish(count: int) -> None:
            for _ in range(count):
                await client.publish("s", b"x")

        # What is asked for while there is no broker leaves as one batch.
        tasks = [asyncio.create_task(publish(5)) for _ in range(20)]
        await asyncio.sleep(0)
        broker.start()
        await asyncio.gather(*tasks)
    assert len(broker.streams["s"]) == 5


async def test_a_waiting_iteration_ends_when_another_task_closes_it(broker: FakeBroker) -> None:
    async with connect(broker.endpoint, **FAST) as client:
        subscription = client.subscribe("s", start="earliest")
        await subscription.accepted()
        waiting = asyncio.create_task(subscription.next_batch())
        await asyncio.sleep(0)
        await subscription.close()
        assert await asyncio.wait_for(waiting, WAIT_S) is None
        assert await asyncio.wait_for(subscription.next_batch(), WAIT_S) is None


async def test_a_request_that_comes_with_the_acceptance_wakes_who_waits_for_it(
    broker: FakeBroker,
) -> None:
    async with connect(broker.endpoint, **FAST) as client:
        worker = client.worker("svc")
        accepted = asyncio.create_task(worker.accepted())
        request = asyncio.create_task(worker.next())
        await asyncio.sleep(0)  # both wait, in this order
        number = worker._offering.number
        said = [
            c.Subscribed(number, b"", 1, 0, 0, 0),
            c.Work(number, "ann", "ann", 0, 1, 30_000, 2, None, b"k" * 16),
        ]
        frames = stamped(encode([b"q"], subject="a"), 0)
        client._session.receive(encode_message(said, frames), clock_ms())
        client._link.wake_up()
        async with asyncio.timeout(WAIT_S):
            await accepted
            found = await request
        assert found is not None
        assert found.body == b"q"


@pytest.mark.moderate
@pytest.mark.parametrize("call", ["publish", "send"])
async def test_calls_without_a_confirm_wait_while_the_broker_does_not_read(
    broker: FakeBroker, call: str
) -> None:
    async with connect(broker.endpoint, **FAST, window_bytes=4096, batch_bytes=1024) as client:
        await client.publish("s", b"the producer is open")
        broker.stop()
        calls = [
            getattr(client, call)("s", bytes(600), confirm="none", timeout_ms=400)
            for _ in range(60)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        ended = [one for one in outcomes if isinstance(one, BaseException)]
        assert ended
        assert {type(one) for one in ended} == {Timeout}
        assert not client._link._room, "calls that ended wait for room no more"
        broker.start()
        await client.publish("s", b"there is room again")


async def test_calls_that_wait_for_room_end_with_the_client(broker: FakeBroker) -> None:
    client = await connect(broker.endpoint, **FAST, window_bytes=4096)
    # As contents without a confirm, of which the broker has not said that it read them.
    client._session.window.passes(4096)
    waiting = asyncio.create_task(client.publish("s", b"a", timeout_ms=None))
    await asyncio.sleep(0)
    client.abort()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ConnectionLost):
            await waiting
        with pytest.raises(ConnectionLost):
            await client.publish("s", b"b", timeout_ms=None)


async def test_what_a_bulk_call_waits_for_room_counts_on_its_time(broker: FakeBroker) -> None:
    async with connect(broker.endpoint, **FAST, window_bytes=4096, batch_bytes=1024) as client:
        link, told = client._link, []

        async def room(size: int, wait: Any, name: str) -> Any:
            told.append(wait)
            return wait - 100

        link.room, link.has_room = room, lambda: False  # type: ignore[method-assign]
        sending = asyncio.create_task(client.send_many("box", [bytes(600)] * 6, timeout_ms=1_000))
        await until_async(lambda: len(told) >= 3)
        sending.cancel()
        client.abort()  # the broker of this test takes no mail
        assert told[:3] == [1_000, 900, 800]


@pytest.mark.parametrize("amid", [False, True], ids=["at rest", "amid a step"])
def test_a_client_of_a_closed_event_loop_says_so_and_can_be_closed(amid: bool) -> None:
    with EmbeddedBroker(tcp=True) as broker, broker.connect_sync() as watching:
        loop = asyncio.new_event_loop()

        async def begin() -> tuple[Client, list[asyncio.Task[Any]]]:
            client = await connect(broker.tcp_endpoint)
            waits = (client.subscribe("s", create=True).next_batch(), client.inbox("m").next())
            waiting = [asyncio.create_task(wait) for wait in waits]
            await client.publish("s", b"")
            return client, waiting

        client, waiting = loop.run_until_complete(begin())
        loop.close()
        client._link._scheduled = amid  # Whether the loop ended before a step that it was to do.

        async def go_on() -> None:
            for call in (
                partial(client.publish, "s", b""),
                partial(client.publish_many, "s", [b""]),
                partial(client.send, "m", b""),
                partial(client.request, "v", b""),
                lambda: client.subscribe("s").next_batch(),
                lambda: client.inbox("m").next(),
                client.flush,
                client.list_streams,
            ):
                # Amid a step it is asyncio that names the loop, once a call waits for its future.
                with pytest.raises(
                    (LocalProtocolError, RuntimeError), match=r"another event loop|different loop"
                ):
                    await asyncio.wait_for(call(), WAIT_S)
            await asyncio.wait_for(client.close(), WAIT_S)
            await client.close()

        asyncio.run(go_on())
        assert not client.linked
        asyncio.run(until_async(lambda: len(watching.list_links()) == 1))
        for wait in waiting:
            wait._log_destroy_pending = False  # type: ignore[attr-defined] # the loop is no more


def in_a_loop(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    asyncio.run(call())


async def test_a_call_of_another_thread_is_refused_and_costs_no_other_call() -> None:
    """Two threads in one session ended the client, and all calls that others had on it."""
    async with EmbeddedBroker() as broker, broker.connect(identity="i") as client:
        await client.publish("s", b"")
        await client.send("m", b"")
        await client.submit("v", b"")
        inbox, worker, member = client.inbox("m"), client.worker("v"), client.group("s", "g")
        reading, publisher = client.subscribe("s"), client.publisher("s")
        mail, request = await inbox.next(), await worker.next()
        await client.publish("s", b"")
        held = await member.next_batch()
        assert mail is not None
        assert request is not None
        assert held is not None
        step = client.atomic()
        step.publish("s", b"in a step")
        calls: tuple[Callable[[], Coroutine[Any, Any, Any]], ...] = (
            client.close, client.list_streams, client.flush, step.commit, mail.ack, request.renew,
            worker.next, inbox.next, member.next_batch, reading.next_batch, reading.close,
            partial(client.publish, "s", b""), partial(client.publish_many, "s", [b""]),
            partial(client.send, "m", b""), partial(client.request, "v", b""),
            partial(client.submit, "v", b""), partial(publisher.publish_many, [b""]),
            partial(request.reply, b"", wait=True), partial(member.ack, held),
            client.cursor("s", "c").info, partial(client.cursor("s", "c").move, 1),
            partial(client.kv("s").get, "k"), client.transaction().begin,
        )  # fmt: skip
        for call in calls:
            with pytest.raises(LocalProtocolError, match="another event loop"):
                await asyncio.to_thread(in_a_loop, call)
        for bare in (client.abort, partial(client.publish_nowait, "s", b"")):
            with pytest.raises(LocalProtocolError, match="another event loop"):
                await asyncio.to_thread(bare)
        assert (await client.publish("s", b"")).offset == 2
        assert await request.renew()
        await mail.ack()
