"""A web service whose requests are answered by workers: HTTP in front, a service queue behind.

Run it beside a broker: `python examples/web_service.py`, then
`curl -d 'who is there?' http://127.0.0.1:8000/shout`. Needs malamute-py[http].
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import malamute_py as malamute

ENDPOINT = "tcp://127.0.0.1:9797"


def application(endpoint: str) -> Starlette:
    """Return the application; each process of the web service has one link to the broker."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Several processes may run this: each gets a free number, and keeps it.
        async with malamute.connect(endpoint, identity="web-{n}") as client:
            app.state.client = client
            yield

    async def shout(request: Request) -> Response:
        client: malamute.Client = request.app.state.client
        try:
            reply = await client.request(
                "shout", await request.body(), timeout_ms=2_000, need_workers=True
            )
        except malamute.Timeout:
            return PlainTextResponse("no worker answered in time", 504)
        except malamute.BrokerRefused as error:
            return PlainTextResponse(str(error), 503)
        except malamute.RequestFailed as error:
            return PlainTextResponse(str(error), 500)
        return PlainTextResponse(reply.body)

    return Starlette(routes=[Route("/shout", shout, methods=["POST"])], lifespan=lifespan)


async def worker(endpoint: str) -> None:
    """Answer requests until this task is cancelled; start as many of these as you like."""
    async with malamute.connect(endpoint) as client:

        @client.serve("shout", concurrency=16)
        async def shout(request: malamute.Request) -> bytes:
            return request.body.upper()

        await client.run()


async def main(endpoint: str) -> None:
    """Run a worker and the web server in one process."""
    working = asyncio.create_task(worker(endpoint))
    server = uvicorn.Server(uvicorn.Config(application(endpoint), port=8000))
    await server.serve()
    working.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else ENDPOINT))
