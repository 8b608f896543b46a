"""A single record, message, request, reply or part of a step may have a codec and several blobs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.codec import codec_number
from malamute_protocol.content import Content
from malamute_protocol.content_layout import LIST
from malamute_protocol.errors import LocalProtocolError
from malamute_py.client.session.calls import make_row
from malamute_py.client.session.letters import RequestFailed
from malamute_py.client.session.publisher import level_number
from malamute_py.embedded import EmbeddedBroker
from tests.client.script import Script

GZIP = codec_number("gzip")
PARTS = [b"one" * 100, b"", b"three" * 100]


@pytest.fixture
def identity() -> str:
    return "me"


def packed(head: Any) -> tuple[bool, int]:
    return head.body_kind == LIST, head.codec


@pytest.mark.moderate
async def test_records_published_singly_and_in_bulk_have_lists_and_codecs(shell: Any) -> None:
    await shell.do("publish", "lists", PARTS, codec="gzip")
    await shell.do("publish", "lists", ("text", b"bytes"))
    await shell.do("publish_many", "lists", [PARTS, [b"x"]], codec="gzip")
    records = await shell.take(shell.client.subscribe("lists", start="earliest"), 4)
    assert [record.parts for record in records] == [PARTS, [b"text", b"bytes"], PARTS, [b"x"]]
    heads = [packed(record.batch.content.head) for record in records]
    assert heads == [(True, GZIP), (True, 0), (True, GZIP), (True, GZIP)]
    await shell.do("publish", "blobs", b"x" * 1000, codec="gzip")
    [record] = await shell.take(shell.client.subscribe("blobs", start="earliest"), 1)
    assert record.body == b"x" * 1000
    assert packed(record.batch.content.head) == (False, GZIP)


async def test_a_message_has_a_list_and_a_codec(shell: Any) -> None:
    await shell.do("send", "me", PARTS, codec="gzip")
    await shell.do("send_many", "me", [PARTS, PARTS])
    mails = await shell.take(shell.client.inbox(), 3)
    assert [mail.parts for mail in mails] == [PARTS] * 3
    assert packed(mails[0].batch.content.head) == (True, GZIP)


@pytest.mark.moderate
async def test_a_request_and_its_reply_have_lists_and_codecs(
    shell: Any, broker: EmbeddedBroker
) -> None:
    async with broker.connect() as other:

        async def answer(request: Any) -> None:
            await request.reply([b"re", *request.parts], codec="gzip")

        async with other.worker("svc") as worker:
            await worker.accepted()
            running = asyncio.ensure_future(worker.run(answer))
            reply = await shell.do("request", "svc", PARTS, codec="gzip")
            assert reply.parts == [b"re", *PARTS]
            assert packed(reply.batch.content.head) == (True, GZIP)
            await worker.close()
            await running


@pytest.mark.moderate
async def test_a_handler_returns_what_a_reply_may_be(shell: Any, broker: EmbeddedBroker) -> None:
    replies: dict[bytes, Any] = {b"list": PARTS, b"tuple": ("text", b"x"), b"other": {"a": 1}}

    def answer(request: Any) -> Any:
        return replies[request.body]

    worker = shell.client.worker("svc")
    await shell.call(worker.accepted)
    running = asyncio.ensure_future(shell.call(worker.run, answer))
    async with broker.connect() as other:
        assert (await other.request("svc", b"list")).parts == PARTS
        assert (await other.request("svc", b"tuple")).parts == [b"text", b"x"]
        with pytest.raises(RequestFailed, match="a list of these or None, not dict"):
            await other.request("svc", b"other")
    await shell.call(worker.close)
    await running


async def test_the_parts_of_a_step_have_lists_and_codecs(shell: Any) -> None:
    step = shell.client.atomic()
    step.publish("lists", PARTS, codec="gzip")
    step.publish("lists", [b"plain"])
    step.publish_many("lists", [[b"a"], [b"b", b"c"]])
    step.send("me", b"y" * 1000, codec="gzip")
    await shell.call(step.commit)
    records = await shell.take(shell.client.subscribe("lists", start="earliest"), 4)
    assert [record.parts for record in records] == [PARTS, [b"plain"], [b"a"], [b"b", b"c"]]
    [mail] = await shell.take(shell.client.inbox(), 1)
    assert mail.body == b"y" * 1000
    assert packed(mail.batch.content.head) == (False, GZIP)


def test_records_whose_bodies_lie_differently_in_a_batch_are_not_gathered_together() -> None:
    script = Script()
    script.open()
    level = level_number("synced")
    bodies: list[tuple[Any, str | None]] = [
        (b"a", None), (b"b", "none"), (b"c" * 99, "gzip"), (b"d", "gzip"), ([b"e"], None),
    ]  # fmt: skip
    for body, codec in bodies:
        row = make_row(body, "s", None, None, None, None, body, codec)
        script.session.publisher.add("s", level, row)
    script.step()
    script.open_producer()
    contents = [Content(frames[0]) for cmd, frames in script.heard if type(cmd) is c.Publish]
    assert [content.head.count for content in contents] == [2, 2, 1]
    assert [packed(content.head) for content in contents] == [(False, 0), (False, GZIP), (True, 0)]


async def test_a_codec_that_there_is_not_is_refused_before_anything_is_sent(shell: Any) -> None:
    for verb in ("publish", "send", "request", "submit"):
        with pytest.raises(LocalProtocolError, match="codec='rar': allowed is"):
            await shell.do(verb, "s", b"x", codec="rar")
    with pytest.raises(LocalProtocolError, match="a list of these, not int"):
        await shell.do("publish", "s", [b"x", 7])
