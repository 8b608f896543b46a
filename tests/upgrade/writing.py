"""A data directory of everything that a broker keeps, and what a client sees of it.

Owns the content of the directories that earlier versions wrote. The rule: this file runs over the
packages of any commit (writing.py of today, everything else of that commit), so it uses only calls
that all of them have, and asks for the rest. `write` leaves `stopped`, a directory closed in order,
and `killed`, a copy of it while the broker ran; `seen` is what must be the same ever after.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "limits.batch_bytes_max": 1 << 17,
    "limits.record_bytes_max": 1 << 16,
    "journal.segment_bytes": 1 << 18,
    "journal.ring_bytes": 1 << 20,
    "streams.retry_ms": 10,
}
"""Settings of a broker whose rings are small enough to be kept by the dozen."""
TRADES = 120
TYPED = "departures"


def open_broker(directory: Path) -> Any:
    """An EmbeddedBroker over the directory, not started yet."""
    from malamute_py import EmbeddedBroker

    return EmbeddedBroker(directory, tcp=True, **SMALL)


def fill(client: Any) -> None:
    """Put in everything that this version keeps."""
    subjects = [f"forex.{('eur', 'gbp', 'usd')[n % 3]}" for n in range(TRADES)]
    bodies = [b'{"price": %d}' % n for n in range(TRADES)]
    fields = [{"currency": subject[-3:].upper()} for subject in subjects]
    client.publish_many("trades", bodies[:50], subjects=subjects[:50], fields=fields[:50])
    client.publish_many("trades", bodies[50:100], subjects=subjects[50:100], codec="gzip")
    for n in range(100, TRADES):
        client.publish("trades", bodies[n], subject=subjects[n], client_time_ms=1_000 + n)
    client.create_stream("own", ring_bytes=1 << 20, max_age_ms=0, description="a ring of its own")
    client.publish_many("own", [b"own %d" % n for n in range(10)], subject="own")
    _fill_keys(client)
    _fill_typed(client)
    _remove(client)
    for n in range(4):
        client.send("crew.berlin", b"gate %d" % n, subject="gate", fields={"n": str(n)}, priority=n)
    with client.inbox("crew.berlin") as inbox:
        first = inbox.next(timeout_ms=5_000)
        assert first is not None
        assert first.ack()
    client.send("crew.paris", b"late", deliver_at_ms=4_000_000_000_000)
    for n in range(5):
        client.submit("tax", b"year %d" % n, subject="tax.income", key=b"key %d" % n)
    with client.worker("tax", concurrency=1) as worker:
        request = worker.next(timeout_ms=5_000)
        assert request is not None
        request.reply(b"done")
        request.received()
    client.cursor("trades", "etl").reset(40)
    options: dict[str, Any] = {"start": "earliest", "ack": "manual", "credit_records": 30}
    with client.group("trades", "crew", **options) as member:
        held = member.next_batch(timeout_ms=5_000)
        assert held is not None
        assert member.ack(held)
    with client.atomic() as step:
        step.publish("trades", b"atomic", subject="forex.chf")
        step.send("auditors", b"audited", subject="audit")
        step.move_cursor("trades", "auditor", 7)


def _fill_keys(client: Any) -> None:
    if hasattr(client, "kv"):
        client.create_stream("settings", keep="last-per-subject", ring_bytes=1 << 20)
        kv = client.kv("settings")
        for n in range(6):
            kv.put(f"key.{n % 3}", b"value %d" % n)
        kv.delete("key.0")


def _fill_typed(client: Any) -> None:
    if not hasattr(client, "publish_table"):
        return
    import pyarrow as pa

    columns: list[Any] = [pa.field("carrier", pa.string(), nullable=False), ("delay", pa.int32())]
    schema = pa.schema(columns)
    client.create_stream(TYPED, schema=schema)
    rows: list[Any] = [{"carrier": "AA", "delay": 4}, {"carrier": "UA"}, {"carrier": "AA"}]
    client.publish_table(TYPED, pa.Table.from_pylist(rows, schema=schema), subject="carrier")


def _remove(client: Any) -> None:
    if hasattr(client, "trim"):
        client.publish_many("trimmed", [b"%d" % n for n in range(6)])
        client.trim("trimmed", 4)
        client.create_stream("bounded", max_records=3)
        client.publish_many("bounded", [b"a", b"b", b"c", b"d", b"e"])
    if hasattr(client, "purge"):
        subjects = ["keep", "drop", "keep", "drop"]
        client.publish_many("purged", [b"0", b"1", b"2", b"3"], subjects=subjects)
        client.purge("purged", "drop")


def seen(client: Any) -> dict[str, Any]:
    """Facts that a client of any version sees of everything that is kept."""
    streams = {}
    for stream in client.list_streams():
        streams[stream.name] = {
            "first": stream.first,
            "tail": stream.tail,
            "records": _records(client, stream.name),
        }
    mailboxes, services, cursors, groups = (
        # Former versions call list_mailboxes() `mailboxes`, and so on.
        (getattr(client, f"list_{kind}", None) or getattr(client, kind))()
        for kind in ("mailboxes", "services", "cursors", "groups")
    )
    return {
        "streams": streams,
        "mailboxes": {
            box.name: [
                [m.number, m.subject, dict(m.fields), m.priority, m.not_before_ms, _digest(m.body)]
                for m in client.peek(box.name)
            ]
            for box in mailboxes
        },
        "services": {each.name: [each.waiting + each.delayed, each.held] for each in services},
        "cursors": {f"{each.stream}/{each.cursor}": each.next for each in cursors},
        "groups": {f"{each.stream}/{each.group}": [each.kind, each.next] for each in groups},
        "keys": _keys(client, streams),
    }


def _records(client: Any, stream: str) -> list[Any]:
    found = client.subscribe(stream, start="earliest", until="tail", timeout_ms=5_000)
    if stream == TYPED:
        return [row for batch in found.batches() for row in batch.to_arrow().to_pylist()]
    return [[r.offset, str(r.subject), dict(r.fields or {}), _digest(r.body)] for r in found]


def _keys(client: Any, streams: dict[str, Any]) -> dict[str, str]:
    if "settings" not in streams:
        return {}
    kv = client.kv("settings")
    return {key: _digest(kv.get(key).value) for key in sorted(kv.keys())}


def _digest(body: Any) -> str:
    return hashlib.sha256(bytes(body)).hexdigest()[:16]


def write(place: Path) -> None:
    """Write the directories, and what is seen of them, into a place."""
    stopped = place / "stopped"
    with open_broker(stopped) as broker, broker.connect_sync(identity="writer") as client:
        fill(client)
        shutil.copytree(stopped, place / "killed", ignore=shutil.ignore_patterns("*lock"))
    with open_broker(stopped) as broker, broker.connect_sync(identity="reader") as client:
        facts = seen(client)
    (place / "seen.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
