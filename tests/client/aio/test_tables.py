"""Tables of asyncio: the loop has its turn while one is encoded, and none is added by halves."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

from malamute_py.embedded import EmbeddedBroker

ROWS = 100_000
TABLE = pa.table({"carrier": ["x" * 50] * ROWS, "delay": pa.array(range(ROWS), pa.int32())})


@pytest.mark.moderate
@pytest.mark.parametrize("what", ["transaction", "atomic"])
async def test_the_loop_gets_its_turn_while_a_large_table_is_encoded(what: str) -> None:
    async with EmbeddedBroker() as broker, broker.connect() as client:
        await client.create_stream("s", schema=TABLE.schema)
        async with getattr(client, what)() as within:
            await within.publish_table("s", TABLE.slice(0, 3))
            adding = asyncio.create_task(within.publish_table("s", TABLE))
            for _ in range(3):
                await asyncio.sleep(0)
            assert not adding.done()
            # A call that is cancelled has added nothing.
            adding.cancel()
            await asyncio.wait([adding])
        assert (await client.stream_info("s")).records == 3
