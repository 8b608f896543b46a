"""The embedded broker: the same broker, in a with statement."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.errors import ConnectionLost, MalamuteError
from malamute_py import connect_sync
from malamute_py.client.sync.client import SyncClient
from malamute_py.embedded import EmbeddedBroker
from malamute_py.sections import ConfigError
from tests.seeds import slow
from tests.waiting import WAIT_MS, WAIT_S


async def test_an_async_program_publishes_and_reads_in_memory() -> None:
    async with EmbeddedBroker() as broker, broker.connect() as client:
        for number in range(10):
            await client.publish("s", b"%d" % number, subject="a.b")
        got = [r.body async for r in client.subscribe("s", start="earliest", until="tail")]
        assert got == [b"%d" % number for number in range(10)]


def test_a_plain_program_does_the_same() -> None:
    with EmbeddedBroker() as broker, broker.connect_sync() as client:
        client.publish("s", b"x")
        assert [r.body for r in client.subscribe("s", start="earliest", until="tail")] == [b"x"]


@pytest.mark.moderate
def test_what_is_on_disk_is_there_again(tmp_path: Path) -> None:
    for number in range(3):
        with EmbeddedBroker(tmp_path) as broker, broker.connect_sync() as client:
            client.publish("s", b"%d" % number)
            found = client.subscribe("s", start="earliest", until="tail")
            assert [r.body for r in found] == [b"%d" % n for n in range(number + 1)]


@pytest.mark.moderate
def test_what_is_in_memory_is_gone_and_two_brokers_know_nothing_of_each_other() -> None:
    with EmbeddedBroker() as one, EmbeddedBroker() as other:
        with one.connect_sync() as client:
            client.publish("s", b"x")
        with other.connect_sync() as client:
            assert client.list_streams() == []
    with EmbeddedBroker() as again, again.connect_sync() as client:
        assert client.list_streams() == []


@pytest.mark.moderate
def test_other_processes_connect_by_tcp_when_asked() -> None:
    with EmbeddedBroker(tcp=True) as broker, connect_sync(broker.tcp_endpoint) as client:
        client.publish("s", b"x")
    with EmbeddedBroker() as broker, pytest.raises(ValueError, match="tcp=True"):
        _ = broker.tcp_endpoint


def test_settings_are_those_of_the_configuration_and_a_wrong_one_is_named() -> None:
    broker = EmbeddedBroker(links__heartbeat_ms=1000, streams__auto_create=False)
    assert broker.config.links.heartbeat_ms == 1000
    assert broker.config.streams.auto_create is False
    with pytest.raises(ConfigError, match="did you mean"):
        EmbeddedBroker(links__heartbeat=1000)


async def test_a_client_that_nobody_closed_does_not_keep_the_broker_from_stopping() -> None:
    broker = EmbeddedBroker()
    async with asyncio.timeout(WAIT_S):
        async with broker:
            client = await broker.connect()
            await client.publish("s", b"x")
        client.abort()


@pytest.mark.moderate
def test_a_client_that_sleeps_is_told_when_the_context_ends_with_its_broker() -> None:
    # Its own broker lives on and is silent, so that only the end of the context wakes it.
    with EmbeddedBroker(tcp=True) as other, EmbeddedBroker() as broker:
        options: dict[str, Any] = {"context": broker.context, "heartbeat_ms": 60_000}
        with connect_sync(other.tcp_endpoint, **options) as client:
            subscription = client.subscribe("s", timeout_ms=WAIT_MS, create=True)
            subscription.accepted()
            broker.stop()
            with pytest.raises(ConnectionLost, match="terminated"):
                next(subscription)


@pytest.mark.moderate
@pytest.mark.parametrize("rounds", [4, *slow([20])])
def test_clients_in_the_midst_of_their_work_end_when_the_broker_stops(rounds: int) -> None:
    for _ in range(rounds):
        broker = EmbeddedBroker().start()
        clients = [broker.connect_sync() for _ in range(2)]
        begun = threading.Barrier(5)

        def publish(client: SyncClient, begun: threading.Barrier) -> None:
            begun.wait(WAIT_S)
            with contextlib.suppress(MalamuteError):
                while True:
                    client.publish("s", b"x")

        def read(client: SyncClient, begun: threading.Barrier) -> None:
            begun.wait(WAIT_S)
            with contextlib.suppress(MalamuteError):
                for _ in client.subscribe("s", create=True):
                    pass

        threads = [
            threading.Thread(target=work, args=(client, begun))
            for client in clients
            for work in (publish, read)
        ]
        for thread in threads:
            thread.start()
        begun.wait(WAIT_S)
        broker.stop()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for client in clients:
            client.abort()
