"""Market data: many subscribers, each with its own selection, and late ones that begin complete.

Run it beside a broker: `python examples/market_data.py`.
"""

from __future__ import annotations

import asyncio
import random
import sys

import malamute_py as malamute

ENDPOINT = "tcp://127.0.0.1:9797"
STREAM = "quotes"
PAIRS = ["eur.usd", "eur.gbp", "usd.jpy", "gbp.usd"]
QUOTES = 10_000


async def publish(client: malamute.Client) -> None:
    """Publish quotes, as fast as the broker confirms them."""
    chance = random.Random(1)
    async with client.publisher(STREAM) as publisher:
        for _ in range(0, QUOTES, 100):
            pairs = chance.choices(PAIRS, k=100)
            await publisher.publish_many(
                [b"%.5f" % chance.uniform(0.9, 1.1) for _ in pairs],
                subjects=[f"forex.{pair}" for pair in pairs],
            )


async def count(client: malamute.Client, pattern: str) -> tuple[str, int]:
    """Count what one subscriber gets."""
    found = 0
    async for batch in client.subscribe(STREAM, pattern, start="earliest", until="tail").batches():
        found += len(batch)
    return pattern, found


async def newest(client: malamute.Client) -> dict[str, float]:
    """Return the newest quote of each pair: where a late subscriber begins."""
    quotes = {}
    start = malamute.LastPerSubject()
    async for record in client.subscribe(STREAM, start=start, until="tail"):
        quotes[record.subject] = float(record.body)
    return quotes


async def main(endpoint: str) -> dict[str, int]:
    """Publish, and return how many quotes each selection had."""
    async with malamute.connect(endpoint) as client:
        await publish(client)
        patterns = ["forex.#", "forex.eur.*", "forex.*.usd", "regex:forex\\.(usd|gbp)\\..*"]
        counts = await asyncio.gather(*[count(client, pattern) for pattern in patterns])
        print(await newest(client))
    return dict(counts)


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else ENDPOINT)))
