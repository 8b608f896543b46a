"""`malamute transaction`."""

from __future__ import annotations

import contextlib
import os

import pytest

from malamute_py import BrokerRefused, EmbeddedBroker
from malamute_py.client.sync.client import SyncClient
from tests.cli.running import Run


@pytest.mark.moderate
def test_open_transactions_are_listed_and_ended(m: Run, broker: EmbeddedBroker) -> None:
    assert m("transaction", "ls", "--json").ok().json == []
    with broker.connect_sync(identity="loader") as client:
        transaction = client.transaction()
        transaction.begin()
        (row,) = m("transaction", "ls").ok().rows
        assert row[:3] == [transaction.id.hex(), "loader", "open"]
        asked = m("transaction", "end", transaction.id.hex())
        assert asked.code == 2
        assert "say so with --yes" in asked.err
        assert m("transaction", "ls").ok().rows
        told = m("transaction", "end", transaction.id.hex(), "--yes", "--json").ok()
        assert told.json == {"ended": transaction.id.hex(), "given_up": {}}
        assert m("transaction", "ls", "--json").ok().json == []
    failed = m("transaction", "end", transaction.id.hex(), "--yes")
    assert failed.code != 0
    assert "no transaction" in failed.err
    assert m("transaction", "end", "x").code == 2


def put_off(client: SyncClient, own: str, other: str) -> bytes:
    """Commit a record for a stream whose ring is full; returns the transaction's id."""
    client.create_stream(own, ring_bytes=1 << 20, full="refuse")
    with contextlib.suppress(BrokerRefused):
        for _ in range(20):
            client.publish(own, os.urandom(100_000))
    transaction = client.transaction()
    transaction.begin()
    transaction.publish(own, os.urandom(200_000))
    transaction.publish(other, b"z")
    with pytest.raises(BrokerRefused) as refused:
        transaction.commit()
    assert refused.value.code == "put_off"
    return transaction.id


@pytest.mark.moderate
def test_a_commit_that_is_put_off_is_listed_with_since_when_for_which_stream_and_why(
    m: Run, broker: EmbeddedBroker
) -> None:
    with broker.connect_sync(identity="loader") as client:
        id = put_off(client, "own", "other")
        (listed,) = m("transaction", "ls", "--json").ok().json
        (waiting,) = listed["put_off"]
        assert (listed["transaction"], listed["state"]) == (id.hex(), "committed")
        assert (waiting["stream"], waiting["code"], waiting["records"]) == ("own", "full", 1)
        (row,) = m("transaction", "ls").ok().rows
        assert row[-1].startswith(f"own {waiting['since_ms']} full: ")
        client.trim("own", 10)
        while client.transactions():
            pass
        assert client.stream_info("other").records == 1


@pytest.mark.moderate
def test_what_is_put_off_is_given_up_only_where_the_operator_says_so(
    m: Run, broker: EmbeddedBroker
) -> None:
    with broker.connect_sync(identity="loader") as client:
        id = put_off(client, "mine", "yours")
        failed = m("transaction", "end", id.hex(), "--yes")
        assert failed.code != 0
        assert "1 records for stream mine (full: " in failed.err
        assert "--give-up" in failed.err
        told = m("transaction", "end", id.hex(), "--give-up", "--yes", "--json").ok()
        assert told.json == {"ended": id.hex(), "given_up": {"mine": 1}}
        assert client.transactions() == []
        assert client.stream_info("yours").records == 1
        records = client.stream_info("mine").records
        client.trim("mine", 5)
        client.publish("mine", b"after")
        assert client.stream_info("mine").tail == records + 1
