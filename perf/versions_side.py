"""Make calls of one version of the code when told to, for versions.py.

A process of its own, which runs this file by its path over the packages of that version. The rule:
it uses nothing of the repository but the client's public calls, which every version has. It reads
lines `CALL SECONDS`, answers each by a line of JSON, and ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

BODY = b"x" * 140
MANY = [BODY] * 1_000


class Call(NamedTuple):
    """A kind of call: by how many tasks, how many records or messages each, and what it does."""

    tasks: int
    records: int
    what: str
    make: Callable[[Any], Awaitable[Any]]


CALLS = {
    "publish": Call(64, 1, "publish() by 64 tasks", lambda c: c.publish("s", BODY)),
    "publish-lone": Call(1, 1, "one publish() at a time", lambda c: c.publish("s", BODY)),
    "send": Call(64, 1, "send() by 64 tasks", lambda c: c.send("m", BODY)),
    "request": Call(64, 1, "request() by 64 tasks", lambda c: c.request("svc", BODY)),
    "request-lone": Call(1, 1, "one request() at a time", lambda c: c.request("svc", BODY)),
    "bulk": Call(8, len(MANY), "publish_many() by 8 tasks", lambda c: c.publish_many("s", MANY)),
}
"""Bulk comes last: the system still writes its gigabyte to disk while others would be measured."""


async def load(client: Any, call: Call, seconds: float) -> dict[str, float]:
    """Make calls for so long; returns how many, how many a second, and this process's us each."""
    end, done = time.perf_counter() + seconds, 0

    async def work() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await call.make(client)
            done += call.records

    began, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(call.tasks)))
    used = time.process_time() - used
    elapsed = time.perf_counter() - began
    return {"calls": done, "calls_s": done / elapsed, "client_us": used / done * 1e6}


async def serve(endpoint: str) -> None:
    """Connect a client and a worker, and make the calls that are asked for."""
    from malamute_py import connect

    client = await connect(endpoint, identity="caller")
    worker = await connect(endpoint, identity="worker")

    @worker.serve("svc")
    async def answer(request: Any) -> bytes:
        body: bytes = request.body
        return body

    working = asyncio.ensure_future(worker.run())
    await client.request("svc", BODY)
    print(json.dumps({"serves": endpoint}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, seconds = line.split()
        print(json.dumps(await load(client, CALLS[name], float(seconds))), flush=True)
    working.cancel()
    await client.close()
    await worker.close()


def serve_version(code: str, endpoint: str) -> None:
    """Serve with the client of this version. Raises SystemExit: another one would be measured."""
    import malamute_py

    if not Path(malamute_py.__file__).is_relative_to(code):
        raise SystemExit(f"the code of {malamute_py.__file__} would be measured, not of {code}")
    asyncio.run(serve(endpoint))


if __name__ == "__main__":
    serve_version(*sys.argv[1:])
