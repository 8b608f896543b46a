"""Programs of the demonstration that die: a worker and an enricher, each a process of its own.

python -m malamute_py.demo.crew worker ENDPOINT SERVICE

python -m malamute_py.demo.crew enricher ENDPOINT SOURCE TARGET

Owns what they do; the scenes start and kill them. Both print a line when they begin.
"""

from __future__ import annotations

import asyncio
import csv
import json
import sys

from malamute_py.client.aio.client import connect
from malamute_py.client.aio.work import Request
from malamute_py.client.position import FromCursor
from malamute_py.demo.flights import data_file

STEP = 1_000
"""Records that one atomic step enriches."""
PAUSE_S = 0.05
"""Duration of one look-up: long enough for the process to be killed in."""


def names(table: str, key: str) -> dict[str, str]:
    """Read the names of airlines or airports, by their codes.

    table: name of the file in the data package. key: its column with the code.
    """
    with (data_file().parent / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        return {row[key]: row["name"] for row in csv.DictReader(file)}


async def work(endpoint: str, service: str) -> None:
    """Answer each request, {"row", "carrier", "dest"}, with the names of airline and airport."""
    airlines, airports = names("airlines", "carrier"), names("airports", "faa")

    async def look_up(request: Request) -> bytes:
        """Answer a request with the names of a flight's airline and airport, after a pause."""
        asked = json.loads(request.body)
        await asyncio.sleep(PAUSE_S)
        found = {
            "row": asked["row"],
            "airline": airlines.get(asked["carrier"]),
            "airport": airports.get(asked["dest"]),
        }
        return json.dumps(found).encode()

    async with connect(endpoint) as client, client.worker(service, concurrency=32) as worker:
        print("ready", flush=True)
        await worker.run(look_up)


async def enrich(endpoint: str, source: str, target: str) -> None:
    """Publish each departure again with its airline's name, and move the cursor, in one step each.

    Killed and started again, it goes on where its cursor stands, and publishes no departure twice.
    """
    airlines = names("airlines", "carrier")
    async with connect(endpoint) as client:
        cursor = client.cursor(source, "enricher")
        print("ready", flush=True)
        subscription = client.subscribe(source, start=FromCursor("enricher"), until="tail")
        async for batch in subscription.batches():
            records = list(batch.records())
            for first in range(0, len(records), STEP):
                some = records[first : first + STEP]
                bodies = []
                for record in some:
                    departure = json.loads(record.body)
                    departure["airline"] = airlines[record.fields["carrier"]]
                    bodies.append(json.dumps(departure, separators=(",", ":")).encode())
                async with client.atomic() as step:
                    step.publish_many(target, bodies, subject=[record.subject for record in some])
                    step.move_cursor(cursor.stream, cursor.name, some[-1].offset + 1)
    print("done", flush=True)


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    asyncio.run(work(*words) if name == "worker" else enrich(*words))
