"""A subscriber as a process of its own: counts its records, in order, and reports the last.

python -m perf.curves.reader ENDPOINT STREAM RECORDS [START]

Prints `ready` when it is subscribed and `done` when it has had so many records; a gap, or a record
out of order, ends it with a message on standard error.
"""

from __future__ import annotations

import asyncio
import sys

from malamute_py.client.aio.client import connect


async def read(endpoint: str, stream: str, records: int, start: str) -> None:
    async with connect(endpoint, timeout_ms=60_000) as client:
        subscription = client.subscribe(stream, start=start, strict=True, create=True)  # type: ignore[arg-type]
        await subscription.accepted()
        print("ready", flush=True)
        seen = 0
        following: int | None = None
        async for batch in subscription.batches():
            if following is not None and batch.base_offset != following:
                raise SystemExit(f"offset {batch.base_offset} follows {following - 1}")
            following = batch.base_offset + len(batch)
            seen += len(batch)
            if seen >= records:
                break
        if seen != records:
            raise SystemExit(f"{seen} records instead of {records}")
        print("done", flush=True)
        await asyncio.to_thread(sys.stdin.readline)


def main() -> None:
    endpoint, stream, records, *start = sys.argv[1:]
    asyncio.run(read(endpoint, stream, int(records), start[0] if start else "latest"))


if __name__ == "__main__":
    main()
