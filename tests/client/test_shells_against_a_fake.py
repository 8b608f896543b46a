"""Both shells over a real socket, against a broker that does as the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import encode
from malamute_protocol.errors import BrokerRefused, ConnectionLost, LocalProtocolError, Timeout
from malamute_py.client.session.events import Linked, Unlinked
from malamute_py.client.settings import Plain, SettingError
from tests.client.fakes import FakeBroker
from tests.client.script import STREAM_UUID, stamped
from tests.client.shells import FAST, SHELLS
from tests.server.zmtp import greeting
from tests.waiting import WAIT_MS, WAIT_S


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    fake = FakeBroker()
    yield fake
    fake.close()


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.kind)
async def shell(request: pytest.FixtureRequest, broker: FakeBroker) -> AsyncIterator[Any]:
    made = request.param()
    await made.connect(broker.endpoint, **FAST)
    yield made
    await made.do("close", flush_ms=0)


async def test_a_record_published_is_confirmed_and_read_back(shell: Any) -> None:
    confirmed = await shell.do(
        "publish", "s", b"body", subject="a.b", fields={"x": "1"}, properties={"trace": "t"}
    )
    assert (confirmed.offset, confirmed.level, len(confirmed.id)) == (0, "synced", 16)
    subscription = shell.client.subscribe("s", start="earliest")
    [record] = await shell.take(subscription, 1)
    assert (record.body, record.subject, record.fields["x"]) == (b"body", "a.b", "1")
    assert record.properties == {"trace": "t"}


async def test_calls_made_together_leave_as_one_batch(shell: Any, broker: FakeBroker) -> None:
    made = threading.Event()

    def listen(event: Any) -> None:
        # A thread's turn to send may come amid the calls; kept here, it has none before the last.
        if shell.kind == "sync":
            made.wait(WAIT_S)

    other = type(shell)()
    await other.connect(broker.endpoint, on_link=listen, **FAST)
    pending = [other.client.publish_nowait("s", b"%d" % n) for n in range(100)]
    made.set()
    confirmed = [await other.result(one) for one in pending]
    assert [one.offset for one in confirmed] == list(range(100))
    assert len(broker.streams["s"]) == 1
    await other.do("close")


@pytest.mark.moderate
async def test_many_records_go_as_few_batches_and_come_back_in_order(shell: Any) -> None:
    bodies = [b"%06d" % n for n in range(100_000)]
    confirmed = await shell.do("publish_many", "s", bodies, subject="a")
    assert sum(one.count for one in confirmed) == 100_000
    assert len(confirmed) < 10
    subscription = shell.client.subscribe("s", start="earliest", until="tail")
    found: list[bytes] = []
    while (batch := await shell.call(subscription.next_batch)) is not None:
        found += batch.bodies()
    assert found == bodies


async def test_bulk_columns_belong_to_their_records(shell: Any) -> None:
    await shell.do(
        "publish_many",
        "s",
        [b"a", b"b", b"c"],
        subjects=["x", "y", "x"],
        fields=[{"k": "1"}, None, {"k": "2"}],
        client_time_ms=[10, None, 30],
    )
    records = await shell.take(shell.client.subscribe("s", start="earliest", until="tail"), 9)
    assert [record.subject for record in records] == ["x", "y", "x"]
    assert [dict(record.fields) for record in records] == [{"k": "1"}, {}, {"k": "2"}]
    assert [record.client_time_ms for record in records] == [10, None, 30]


async def test_a_column_of_another_length_is_refused_before_anything_is_sent(
    shell: Any, broker: FakeBroker
) -> None:
    with pytest.raises(LocalProtocolError, match="2 values in client_time_ms for 3 records"):
        await shell.do("publish_many", "s", [b"a", b"b", b"c"], client_time_ms=[1, 2])
    assert "s" not in broker.streams


async def test_arrow_goes_out_and_comes_in(shell: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"body": [b"one", b"two", b"three"], "key": ["a", "b", "a"]})
    confirmed = await shell.do("publish_arrow", "s", table.slice(1), subject="key")
    assert confirmed[0].count == 2
    subscription = shell.client.subscribe("s", start="earliest")
    got = await shell.call(subscription.to_arrow, 1, decode=True)
    assert got.column("body").to_pylist() == [b"two"]
    rest = await shell.call(subscription.next_batch)
    assert [record.body for record in rest] == [b"three"]
    assert [record.subject for record in rest] == ["a"]


async def test_records_left_in_a_batch_are_there_for_the_next_loop_and_for_batches(
    shell: Any,
) -> None:
    await shell.do("publish_many", "s", [b"%d" % n for n in range(10)])
    subscription = shell.client.subscribe("s", start="earliest")
    assert [record.body for record in await shell.take(subscription, 3)] == [b"0", b"1", b"2"]
    assert subscription.position.next == 3
    assert [record.body for record in await shell.take(subscription, 2)] == [b"3", b"4"]
    rest = await shell.call(subscription.next_batch)
    assert [record.offset for record in rest] == [5, 6, 7, 8, 9]
    assert subscription.position.next == 10


async def test_a_wait_that_times_out_loses_nothing(shell: Any) -> None:
    subscription = shell.client.subscribe("s", start="earliest")
    with pytest.raises(Timeout):
        await shell.call(subscription.next_batch, timeout_ms=30)
    await shell.do("publish", "s", b"late")
    batch = await shell.call(subscription.next_batch, timeout_ms=WAIT_MS)
    assert batch.bodies() == [b"late"]


async def test_a_refused_subscription_is_raised_by_its_reader_and_harms_nobody_else(
    shell: Any,
) -> None:
    with pytest.raises(BrokerRefused, match="not yours"):
        await shell.take(shell.client.subscribe("forbidden"), 1)
    assert (await shell.do("publish", "s", b"x")).offset == 0


async def test_a_request_is_answered_typed_or_raised(shell: Any) -> None:
    await shell.do("publish", "s", b"x")
    facts = await shell.do("stream_info", "s")
    assert (facts.name, facts.tail, facts.records, facts.more) == ("s", 1, 1, {"odd": 1})
    with pytest.raises(BrokerRefused, match="unknown_stream"):
        await shell.do("stream_info", "nothing")


@pytest.mark.moderate
async def test_a_broker_that_restarts_is_found_again_and_reading_and_publishing_go_on(
    shell: Any, broker: FakeBroker
) -> None:
    subscription = shell.client.subscribe("s", start="earliest")
    await shell.do("publish", "s", b"before")
    assert [record.body for record in await shell.take(subscription, 1)] == [b"before"]
    await asyncio.to_thread(broker.stop)
    waiting = [asyncio.create_task(shell.do("publish", "s", b"%d" % n)) for n in range(3)]
    await asyncio.sleep(0.05)
    await asyncio.to_thread(broker.start)
    offsets = sorted([(await task).offset for task in waiting])
    assert offsets == [1, 2, 3]
    records = await shell.take(subscription, 3)
    assert [record.offset for record in records] == [1, 2, 3]
    assert shell.client.reconnects >= 1


async def test_what_was_published_and_not_confirmed_before_the_loss_is_there_once(
    shell: Any, broker: FakeBroker
) -> None:
    await shell.do("publish", "s", b"first")
    broker.confirming = False
    waiting = asyncio.create_task(shell.do("publish", "s", b"second"))
    await asyncio.to_thread(broker.wait_for, lambda heard: heard.count(c.Publish) == 2)
    await asyncio.to_thread(broker.stop)
    broker.confirming = True
    await asyncio.to_thread(broker.start)
    assert (await waiting).offset == 1
    assert broker.next("s") == 2


@pytest.mark.moderate
async def test_close_lets_go_of_everybody_who_waits(shell: Any, broker: FakeBroker) -> None:
    await shell.do("publish", "s", b"first")
    broker.confirming = False
    publishing = asyncio.create_task(shell.do("publish", "s", b"x"))
    reading = asyncio.create_task(shell.take(shell.client.subscribe("quiet"), 1))
    await asyncio.sleep(0.1)
    await shell.do("close", flush_ms=0)
    with pytest.raises(ConnectionLost):
        await publishing
    assert await reading == []
    with pytest.raises(ConnectionLost):
        await shell.do("publish", "s", b"y")


@pytest.mark.moderate
async def test_back_pressure_holds_a_publisher_until_room_is_there(
    broker: FakeBroker, shell: Any
) -> None:
    bounded = type(shell)()
    await bounded.connect(broker.endpoint, window_bytes=2000, **FAST)
    await bounded.do("publish", "s", b"first")
    broker.confirming = False
    pending = [bounded.client.publish_nowait("s", b"x" * size) for size in (900, 1900)]
    with pytest.raises(BrokerRefused, match="window"):
        bounded.client.publish_nowait("s", b"x")
    held = asyncio.create_task(bounded.do("publish", "s", b"held"))
    await asyncio.sleep(0.05)
    assert not held.done()
    broker.confirming = True
    await asyncio.to_thread(broker.stop)
    await asyncio.to_thread(broker.start)
    assert (await held).offset == len(pending) + 1
    await bounded.do("close")


async def test_a_failing_listener_does_not_break_the_link(broker: FakeBroker, shell: Any) -> None:
    events: list[Any] = []

    def listener(event: Any) -> None:
        events.append(event)
        raise RuntimeError("of the user's making")

    other = type(shell)()
    await other.connect(broker.endpoint, on_link=listener, **FAST)
    await other.do("publish", "s", b"x")
    await asyncio.to_thread(broker.stop)
    await asyncio.to_thread(broker.start)
    await other.do("publish", "s", b"y")
    await other.do("close")
    assert [type(event) for event in events[:2]] == [Linked, Unlinked]


async def test_a_loop_that_raises_leaves_the_client_usable(shell: Any) -> None:
    await shell.do("publish_many", "s", [b"a", b"b"])
    subscription = shell.client.subscribe("s", start="earliest")

    async def loop() -> None:
        for record in await shell.take(subscription, 1):
            raise ValueError(record.body)

    with pytest.raises(ValueError, match="a"):
        await loop()
    assert [record.body for record in await shell.take(subscription, 1)] == [b"b"]
    assert (await shell.do("publish", "s", b"c")).offset == 2


# --- connecting ---


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_the_first_connect_waits_for_a_broker_that_comes_later(
    kind: Any, broker: FakeBroker
) -> None:
    await asyncio.to_thread(broker.stop)
    shell = kind()
    connecting = asyncio.create_task(shell.connect(broker.endpoint, **FAST))
    await asyncio.sleep(0.1)
    assert not connecting.done()
    await asyncio.to_thread(broker.start)
    await connecting
    await shell.do("close")


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_the_first_connect_fails_at_once_or_in_time_by_choice(
    kind: Any,
) -> None:
    # Bound and not listening: refused, and no other test's broker can take the port meanwhile.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match="nothing answers"):
            await kind().connect(endpoint, wait=False, **FAST)
        # On a slow machine not even the first attempt has been refused by then.
        said = r"no link to .*(nothing answers|no answer).*; `malamute broker` starts"
        with pytest.raises(Timeout, match=said):
            await kind().connect(endpoint, timeout_ms=100, **FAST)


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_broker_that_does_not_answer_a_password_may_pause_its_user(kind: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        for credential, may_pause in ((Plain("ann", "secret"), True), (None, False)):
            with pytest.raises(Timeout, match="no answer") as raised:
                await kind().connect(endpoint, timeout_ms=100, credential=credential)
            assert ("after wrong passwords" in str(raised.value)) is may_pause


@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_refused_hello_is_final(kind: Any, broker: FakeBroker) -> None:
    broker.refusing = "forbidden"
    with pytest.raises(BrokerRefused, match="forbidden"):
        await kind().connect(broker.endpoint, **FAST)


@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_broker_that_asks_for_another_kind_of_credential_is_final(kind: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def ask_for_a_password() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as peer:
                peer.sendall(greeting(b"PLAIN"))
                while peer.recv(4096):
                    pass

        threading.Thread(target=ask_for_a_password, daemon=True).start()
        with pytest.raises(BrokerRefused, match=r"kind of credential than none; give credential="):
            await kind().connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", **FAST)


@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_an_endpoint_that_cannot_be_used_is_named(kind: Any) -> None:
    with pytest.raises(BrokerRefused, match=r"ipc://xxx.* cannot be used"):
        await kind().connect(f"ipc://{'x' * 200}", **FAST)
    with pytest.raises(SettingError, match="http://x"):
        await kind().connect("http://x")
    with pytest.raises(SettingError, match="no_such_option"):
        await kind().connect("tcp://127.0.0.1:1", no_such_option=1)


class LosingBroker(FakeBroker):
    """A broker whose stream has 13 records and, after a power loss, 8; a reader gets 5 before."""

    def _subscribe(self, link: bytes, command: c.Subscribe) -> list[Any]:
        number = command.subscription
        first, to, tail = (0, 5, 13) if self.epoch == 1 else (5, 8, 8)
        content = encode([b"%d" % offset for offset in range(first, to)], subject="k")
        return [
            (link, c.Subscribed(number, STREAM_UUID, self.epoch, first, 0, tail), ()),
            (link, c.Deliver(number, first, to, 2), stamped(content, first)),
        ]


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
@pytest.mark.parametrize("waiting", [False, True], ids=["between calls", "amid a call"])
async def test_a_watch_is_complete_where_a_log_ends_that_lost_records_which_had_not_come(
    kind: Any, waiting: bool
) -> None:
    broker = LosingBroker()
    shell = await kind().connect(broker.endpoint, **FAST)
    try:
        watch = shell.client.kv("s").watch()
        found = [await shell.call(watch.next, WAIT_MS) for _ in range(5)]
        rest = asyncio.ensure_future(shell.call(watch.next, WAIT_MS)) if waiting else None
        await asyncio.sleep(0.05)
        broker.stop()
        broker.start()
        found.append(await (rest or shell.call(watch.next, WAIT_MS)))
        found += [await shell.call(watch.next, WAIT_MS) for _ in range(3)]
        assert [entry and entry.revision for entry in found] == [*range(8), None]
    finally:
        await shell.do("close", flush_ms=0)
        broker.close()
