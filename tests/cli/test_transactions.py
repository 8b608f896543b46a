"""`malamute transaction`."""

from __future__ import annotations

from malamute_py import EmbeddedBroker
from tests.cli.running import Run


def test_open_transactions_are_listed_and_ended(m: Run, broker: EmbeddedBroker) -> None:
    assert m("transaction", "ls", "--json").ok().json == []
    with broker.connect_sync(identity="loader") as client:
        transaction = client.transaction()
        transaction.begin()
        (row,) = m("transaction", "ls").ok().rows
        assert row[:3] == [transaction.id.hex(), "loader", "open"]
        told = m("transaction", "end", transaction.id.hex(), "--json").ok()
        assert told.json == {"ended": transaction.id.hex()}
        assert m("transaction", "ls", "--json").ok().json == []
    failed = m("transaction", "end", transaction.id.hex())
    assert failed.code != 0
    assert "no transaction" in failed.err
    assert m("transaction", "end", "x").code == 2
