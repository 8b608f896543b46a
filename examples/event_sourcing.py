"""Event sourcing into SQLite: each event is applied once, whenever the program is killed.

Run it beside a broker: `python examples/event_sourcing.py accounts.db [ENDPOINT]`. The table and
the position in the stream are written in one transaction of SQLite, so that they never differ.
The position names its stream: where that was removed and made anew, to go on is an error.
"""

from __future__ import annotations

import sqlite3
import sys

import malamute_py as malamute

ENDPOINT = "tcp://127.0.0.1:9797"
STREAM = "accounts"


def publish(client: malamute.SyncClient, events: list[tuple[str, int]]) -> None:
    """Publish deposits and withdrawals, one event a row."""
    client.publish_many(
        STREAM,
        [b"%d" % amount for _, amount in events],
        subjects=[f"account.{name}" for name, _ in events],
    )


def project(client: malamute.SyncClient, path: str) -> dict[str, int]:
    """Apply what is new to the database, and return all balances."""
    database = sqlite3.connect(path)
    with database:
        database.execute("create table if not exists balances (account primary key, amount int)")
        database.execute("create table if not exists positions (stream primary key, position text)")
    row = database.execute("select position from positions where stream = ?", [STREAM]).fetchone()
    start = malamute.Position.parse(row[0]) if row else 0
    # strict: a gap in the history is an error, for a balance would be wrong without those events.
    events = client.subscribe(STREAM, start=start, until="tail", strict=True)
    for batch in events.batches():
        with database:  # One transaction: the events of the batch and the position after it.
            for record in batch.records():
                database.execute(
                    "insert into balances values (?, ?)"
                    " on conflict (account) do update set amount = amount + excluded.amount",
                    [record.subject.removeprefix("account."), int(record.body)],
                )
            database.execute(
                "insert into positions values (?, ?)"
                " on conflict (stream) do update set position = excluded.position",
                [STREAM, str(events.position)],
            )
    balances = dict(database.execute("select account, amount from balances order by account"))
    database.close()
    return balances


def main(endpoint: str, path: str) -> dict[str, int]:
    """Publish a few events and return the balances."""
    with malamute.connect_sync(endpoint) as client:
        publish(client, [("ada", 100), ("bob", 50), ("ada", -30)])
        return project(client, path)


if __name__ == "__main__":
    path, endpoint, *_ = [*sys.argv[1:], *["accounts.db", ENDPOINT][len(sys.argv) - 1 :]]
    print(main(endpoint, path))
