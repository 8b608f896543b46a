"""A request may ask to be refused by name when no worker is there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused
from malamute_py.embedded import EmbeddedBroker


async def test_a_request_for_which_no_worker_is_there_is_refused_and_not_queued(
    shell: Any, broker: EmbeddedBroker
) -> None:
    async with broker.connect() as other:
        with pytest.raises(BrokerRefused, match=r"no worker offers service 'svc'$"):
            await shell.do("request", "svc", b"", need_workers=True)
        worker = other.worker("svc", "a.*", concurrency=1)
        await worker.accepted()
        for verb in ("request", "submit"):
            with pytest.raises(
                BrokerRefused, match=r"no worker offers service 'svc' for the subject 'b\.x'"
            ):
                await shell.do(verb, "svc", b"", subject="b.x", need_workers=True)
        step = shell.client.atomic()
        step.publish("s", b"not taken either")
        step.request("svc", b"", subject="b.x", need_workers=True)
        with pytest.raises(BrokerRefused, match="no_workers"):
            await shell.call(step.commit)
        assert (await other.service_info("svc")).waiting == 0

        asking = [
            asyncio.ensure_future(
                shell.do("request", "svc", b"%d" % n, subject="a.x", need_workers=True)
            )
            for n in range(2)
        ]
        for _ in range(2):
            # The second waits for credit: a worker that is busy is there.
            request = await worker.next()
            assert request is not None
            await request.reply(bytes(request.body))
        assert [bytes((await one).body) for one in asking] == [b"0", b"1"]
        await worker.close()
        with pytest.raises(BrokerRefused, match="no_workers"):
            await shell.do("request", "svc", b"", subject="a.x", need_workers=True)


async def test_requests_of_one_batch_are_refused_each_for_itself(broker: EmbeddedBroker) -> None:
    async with broker.connect() as client, broker.connect() as other:
        worker = other.worker("svc", "a")
        await worker.accepted()
        # Tasks of one turn leave as one REQUEST.
        asking = [
            asyncio.ensure_future(client.request("svc", b"", subject=subject, need_workers=True))
            for subject in ("a", "b", "a", "c")
        ]
        for _ in range(2):
            request = await worker.next()
            assert request is not None
            await request.reply(b"r")
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        codes = [getattr(outcome, "code", None) for outcome in outcomes]
        assert codes == [None, "no_workers", None, "no_workers"]
        counters = (await client.broker_info()).counters
        assert counters["requests_without_workers"] > 0


async def test_what_was_taken_before_is_no_matter_of_workers_any_more(
    broker: EmbeddedBroker,
) -> None:
    async with broker.connect(identity="ann") as client, broker.connect() as other:
        worker = other.worker("svc")
        await worker.accepted()
        first = await client.submit("svc", b"", key=b"once", need_workers=True)
        await worker.close()
        again = await client.submit("svc", b"", key=b"once", need_workers=True)
        assert again.duplicate
        assert again.offset == first.offset


def test_the_field_may_be_left_off() -> None:
    assert c.Request.__struct_fields__[7:] == ("delay_ms", "priority")
    assert c.Request("svc", 1).need_workers is False
