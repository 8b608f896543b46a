"""A job queue with retries and dead letters.

Run it beside a broker: `python examples/job_queue.py`. One job in ten can never be done, and one in
ten succeeds at its second attempt.
"""

from __future__ import annotations

import asyncio
import secrets
import sys

import malamute_py as malamute

ENDPOINT = "tcp://127.0.0.1:9797"
JOBS, ATTEMPTS = 50, 3


async def main(endpoint: str) -> dict[str, int]:
    """Submit jobs, work on them, and return how many were done and how many were given up."""
    done: set[int] = set()
    run = secrets.token_hex(4).encode()
    async with malamute.connect(endpoint, identity="scheduler") as client:
        # A service is created with these settings by the program that comes first.
        settings = {"attempts_max": ATTEMPTS, "backoff_ms": 10}
        async with client.worker("jobs", concurrency=8, settings=settings) as worker:
            for number in range(JOBS):
                # The key makes a job that is submitted again the same job.
                job = b"%s %d" % (run, number)
                await client.submit("jobs", job, key=b"job " + job)

            given_up = 0
            while len(done) + given_up < JOBS:
                request = await worker.next()
                assert request is not None, "the worker was closed"
                of_run, _, text = bytes(request.body).partition(b" ")
                if of_run != run:
                    await request.complete(wait=True)  # of a run that was broken off
                    continue
                number = int(text)
                if number % 10 == 3:
                    given_up += request.attempts == ATTEMPTS
                    await request.nack(reason="the printer is on fire", wait=True)
                elif number % 10 == 7 and request.attempts == 1:
                    await request.nack(reason="the printer was off", wait=True)
                else:
                    await request.complete(wait=True)
                    done.add(number)

        for letter in await client.peek("jobs.dead"):
            print(letter.body, letter.why)
    return {"done": len(done), "given up": given_up}


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else ENDPOINT)))
