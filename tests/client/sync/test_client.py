"""The client of threads over a real socket, against a broker that does as the test wants."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest

from malamute_protocol.errors import ConnectionLost, Timeout
from malamute_py.client.settings import ClientOptions, make_settings
from malamute_py.client.sync.client import SyncClient, connect_sync
from tests.client.fakes import FakeBroker
from tests.client.shells import FAST
from tests.client.test_shells_against_a_fake import broker
from tests.waiting import WAIT_MS, WAIT_S

__all__ = ["broker"]


@pytest.mark.moderate
def test_threads_share_one_client(broker: FakeBroker) -> None:
    with connect_sync(broker.endpoint, **FAST) as client:
        offsets: list[int] = []

        def work(name: int) -> None:
            offsets.extend(client.publish("s", b"%d-%d" % (name, n)).offset for n in range(50))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(offsets) == list(range(400))
        bodies = [
            record.body
            for record in client.subscribe("s", start="earliest", until="tail", timeout_ms=WAIT_MS)
        ]
        for name in range(8):
            mine = [body for body in bodies if body.startswith(b"%d-" % name)]
            assert mine == [b"%d-%d" % (name, n) for n in range(50)], "order per producer"


@pytest.mark.moderate
def test_a_table_that_was_not_filled_in_time_loses_no_record(broker: FakeBroker) -> None:
    with connect_sync(broker.endpoint, **FAST) as client:
        client.publish_many("s", [b"1", b"2", b"3"])
        with client.subscribe("s", start="earliest", timeout_ms=WAIT_MS) as subscription:
            assert subscription.to_arrow(1).num_rows == 1
            subscription._timeout_ms = 100
            with pytest.raises(Timeout):
                subscription.to_arrow(4)
            position = subscription.position
            assert position is not None
            assert position.next == 1
            client.publish_many("s", [b"4", b"5"])
            subscription._timeout_ms = WAIT_MS
            table = subscription.to_arrow(4)
            assert table.column("body").to_pylist() == [b"2", b"3", b"4", b"5"]


@pytest.mark.moderate
def test_a_blocked_iteration_ends_when_the_subscription_is_closed(broker: FakeBroker) -> None:
    with connect_sync(broker.endpoint, **FAST) as client:
        subscription = client.subscribe("quiet")
        timer = threading.Timer(0.05, subscription.close)
        timer.start()
        assert list(subscription) == []
        timer.join()


def test_an_iteration_with_a_timeout_can_be_gone_on_with(broker: FakeBroker) -> None:
    with connect_sync(broker.endpoint, **FAST) as client:
        subscription = client.subscribe("s", timeout_ms=20)
        with pytest.raises(Timeout):
            next(subscription)
        client.publish("s", b"x")
        subscription = client.subscribe("s", start=0, timeout_ms=WAIT_MS)
        assert next(subscription).body == b"x"


@pytest.mark.moderate
def test_a_forked_child_is_told_and_the_parent_goes_on(broker: FakeBroker) -> None:
    with connect_sync(broker.endpoint, **FAST) as client:
        client.publish("s", b"before")
        context = multiprocessing.get_context("fork")
        found, telling = context.Pipe(duplex=False)

        def child() -> None:
            try:
                client.publish("s", b"in the child")
            except ConnectionLost as error:
                telling.send(str(error))
            client.close()
            with connect_sync(broker.endpoint, **FAST) as own:
                telling.send(own.publish("s", b"its own").offset)

        process = context.Process(target=child)
        process.start()
        assert found.poll(WAIT_S)
        assert "forked" in found.recv()
        assert found.poll(WAIT_S)
        assert found.recv() == 1
        process.join(WAIT_S)
        assert process.exitcode == 0
        assert client.publish("s", b"after").offset == 2


def test_a_listener_that_waits_in_the_clients_own_thread_is_told(broker: FakeBroker) -> None:
    raised: list[Exception] = []
    made, told = threading.Event(), threading.Event()

    def listen(event: Any) -> None:
        # The client's thread may have a link before this test has the client.
        assert made.wait(WAIT_S)
        if told.is_set():
            return
        try:
            client.publish("s", b"x")
        except RuntimeError as error:
            raised.append(error)
        told.set()

    client = SyncClient(
        make_settings(broker.endpoint, ClientOptions(retry_min_ms=10, retry_max_ms=50)),
        on_link=listen,
    )
    made.set()
    with client:
        assert told.wait(WAIT_S)
        assert isinstance(raised[0], RuntimeError)
        assert client.publish("s", b"y").level == "synced"
