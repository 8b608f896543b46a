"""Atomic steps, through both shells, against the broker: all or nothing, and exactly once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.errors import BrokerRefused, LocalProtocolError, Timeout
from malamute_py.client.position import FromCursor
from malamute_py.embedded import EmbeddedBroker
from tests.client.shells import FAST, SHELLS, AsyncShell
from tests.waiting import WAIT_MS, WAIT_S


async def bodies(shell: Any, stream: str) -> list[bytes]:
    subscription = shell.client.subscribe(stream, start="earliest", until="tail")
    return [record.body for record in await shell.take(subscription, 1 << 30)]


async def committed(shell: Any, step: Any) -> Any:
    """Leave the step's block as a caller does who raised nothing."""
    if shell.kind == "asyncio":
        await step.__aexit__(None, None, None)
    else:
        await asyncio.to_thread(step.__exit__, None, None, None)
    return step.confirmation


def test_a_step_with_nothing_in_it_is_not_sent_by_a_call_that_does_not_wait() -> None:
    with EmbeddedBroker() as broker, broker.connect_sync() as client:
        assert client.atomic().commit_nowait().result(WAIT_MS) is None
        empty = client.atomic()
        empty.publish_many("s", [])
        assert empty.commit_nowait().result(WAIT_MS) is None
        assert client.publish("s", b"1").offset == 0
        assert client.reconnects == 0


async def test_all_parts_of_a_step_happen_together(shell: Any) -> None:
    step = shell.client.atomic()
    step.publish("one", b"first", subject="a")
    step.publish_many("two", [b"x", b"y"], subject=["k", "l"])
    step.send("desk", b"mail")
    step.request("resize", b"picture")
    step.move_cursor("one", "reader", 1)
    confirmed = await committed(shell, step)
    assert (confirmed.level, confirmed.offset, confirmed.duplicate) == ("synced", 0, False)
    assert await bodies(shell, "one") == [b"first"]
    assert await bodies(shell, "two") == [b"x", b"y"]
    assert (await shell.do("mailbox_info", "desk")).messages == 1
    assert (await shell.do("service_info", "resize")).waiting == 1
    assert (await shell.do("cursor_info", "one", "reader")).next == 1


async def test_nothing_of_a_refused_step_happens(shell: Any) -> None:
    await shell.do("publish", "in", b"x")
    await shell.call(shell.client.cursor("in", "reader").move, 1)
    step = shell.client.atomic()
    step.publish("out", b"never")
    step.send("desk", b"never")
    step.move_cursor("in", "reader", 1)
    with pytest.raises(BrokerRefused) as caught:
        await committed(shell, step)
    assert caught.value.code == "conflict"
    assert await bodies(shell, "out") == []
    with pytest.raises(BrokerRefused, match="unknown_mailbox"):
        await shell.do("mailbox_info", "desk")


async def test_nothing_of_a_step_happens_whose_block_raised(shell: Any) -> None:
    step = shell.client.atomic()
    step.publish("out", b"never")
    if shell.kind == "asyncio":
        await step.__aexit__(ValueError, ValueError("ours"), None)
    else:
        await asyncio.to_thread(step.__exit__, ValueError, ValueError("ours"), None)
    await shell.do("publish", "out", b"later")
    assert await bodies(shell, "out") == [b"later"]


async def test_an_empty_step_is_nothing(shell: Any) -> None:
    assert await committed(shell, shell.client.atomic()) is None


@pytest.mark.moderate
async def test_a_step_with_a_key_is_taken_once_by_whichever_client_of_its_identity(
    shell: Any, broker: EmbeddedBroker
) -> None:
    outcomes = []
    for _ in range(2):
        other = type(shell)()
        await other.connect(broker.endpoint, context=broker.context, identity="desk", **FAST)
        step = other.client.atomic(key=b"order 17")
        step.publish("out", b"order")
        outcomes.append((await committed(other, step)).duplicate)
        await other.do("close")
    assert outcomes == [False, True]
    assert await bodies(shell, "out") == [b"order"]


async def test_a_step_with_a_key_is_refused_to_a_client_without_identity(shell: Any) -> None:
    with pytest.raises(LocalProtocolError, match=r"connect\(identity="):
        shell.client.atomic(key=b"order 17")


async def test_a_step_over_several_rings_is_refused_by_name(shell: Any) -> None:
    await shell.do("create_stream", "quick", memory=True)
    step = shell.client.atomic()
    step.publish("quick", b"x")
    step.publish("out", b"x")
    with pytest.raises(BrokerRefused) as caught:
        await committed(shell, step)
    assert caught.value.code == "cross_ring"
    assert "stream 'quick' is in memory" in caught.value.reason
    assert await bodies(shell, "out") == []


async def test_a_step_that_reaches_a_ring_of_its_own_is_told_of_transactions(shell: Any) -> None:
    await shell.do("create_stream", "invoices", ring_bytes=1 << 20)
    step = shell.client.atomic()
    step.publish("invoices", b"x")
    step.publish("out", b"x")
    with pytest.raises(BrokerRefused, match="a transaction reaches both") as caught:
        await committed(shell, step)
    assert caught.value.code == "cross_ring"


async def test_a_log_and_its_cursor_move_on_in_one_step(shell: Any) -> None:
    """The commit of SPEC.md, section 17: a record, and the cursor after this very record."""
    await shell.do("publish", "commits", b"0")
    for number in (1, 2):
        step = shell.client.atomic()
        step.publish("commits", b"%d" % number)
        step.move_cursor("commits", "log", number + 1, since=number if number > 1 else None)
        await committed(shell, step)
    assert (await shell.do("cursor_info", "commits", "log")).next == 3


async def conflicting(shell: Any, step: Any) -> None:
    """Commit a step that the broker will not take."""
    await shell.do("publish", "in", b"x")
    step.move_cursor("in", "reader", 1)
    await shell.call(shell.client.cursor("in", "reader").move, 1)
    with pytest.raises(BrokerRefused) as caught:
        await committed(shell, step)
    assert caught.value.code == "conflict"


async def test_a_worker_answers_and_keeps_its_audit_in_one_step(shell: Any) -> None:
    asked = asyncio.ensure_future(shell.do("request", "reverse", b"abc", timeout_ms=WAIT_MS))
    worker = shell.client.worker("reverse")
    request = await shell.call(worker.next, WAIT_MS)
    step = shell.client.atomic()
    step.publish("audit", b"reversed " + request.body)
    step.reply(request, request.body[::-1])
    await committed(shell, step)
    assert (await asked).body == b"cba"
    assert await bodies(shell, "audit") == [b"reversed abc"]
    facts = await shell.do("service_info", "reverse")
    assert (facts.waiting, facts.held) == (0, 0)
    await shell.call(worker.close)


async def test_a_request_is_in_hand_after_a_step_that_was_refused(shell: Any) -> None:
    asked = asyncio.ensure_future(shell.do("request", "reverse", b"abc", timeout_ms=WAIT_MS))
    worker = shell.client.worker("reverse")
    request = await shell.call(worker.next, WAIT_MS)
    step = shell.client.atomic()
    step.publish("audit", b"never")
    step.reply(request, b"never")
    await conflicting(shell, step)
    assert await bodies(shell, "audit") == []
    again = shell.client.atomic()
    again.reply(request, b"cba")
    await committed(shell, again)
    assert (await asked).body == b"cba"
    with pytest.raises(BrokerRefused, match="not_held"):
        shell.client.atomic().complete(request)
    await shell.call(worker.close)


@pytest.mark.moderate
async def test_mail_of_a_step_that_found_no_room_comes_again(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shell.do("send", "desk", b"x")
    inbox = shell.client.inbox("desk", ack="manual")
    step = shell.client.atomic()
    step.ack(await shell.call(inbox.next, WAIT_MS))
    with monkeypatch.context() as patched:
        patched.setattr(shell.client._session.window, "bytes_max", 0)
        with pytest.raises(Timeout):
            await shell.call(step.commit, 20)
    assert (await shell.call(inbox.next, WAIT_MS)).body == b"x"
    await shell.call(inbox.close)


async def test_mail_of_a_step_comes_again_whose_caller_is_cancelled_as_the_refusal_comes(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller hears of the cancellation alone."""
    async with broker.connect() as client, client.inbox("desk", ack="manual") as inbox:
        await client.send("desk", b"x")
        step = client.atomic()
        mail = await inbox.next(WAIT_MS)
        assert mail is not None
        step.ack(mail)
        step.move_cursor("nowhere", "cursor", 5)
        committing = asyncio.create_task(step.commit())
        steps = client._session.steps
        refused = steps.refused

        def cancelled(*arguments: Any) -> None:
            committing.cancel()
            refused(*arguments)

        monkeypatch.setattr(steps, "refused", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await committing
        again = await inbox.next(WAIT_MS)
        assert again is not None
        assert (again.number, again.attempts) == (mail.number, 2)


async def test_mail_is_taken_and_what_became_of_it_published_in_one_step(shell: Any) -> None:
    await shell.do("send_many", "desk", [b"%d" % n for n in range(4)])
    inbox = shell.client.inbox("desk", ack="manual")
    first = await shell.call(inbox.next, WAIT_MS)
    refused = shell.client.atomic()
    refused.ack(first)
    await conflicting(shell, refused)
    assert (await shell.do("mailbox_info", "desk")).messages == 4
    rest = await shell.call(inbox.next_batch, WAIT_MS)
    step = shell.client.atomic()
    step.ack(first)
    step.ack(rest)
    step.publish_many("out", [first.body, *rest.bodies()])
    await committed(shell, step)
    assert await bodies(shell, "out") == [b"0", b"1", b"2", b"3"]
    assert (await shell.do("mailbox_info", "desk")).messages == 0
    await shell.call(inbox.close)


async def test_an_outbox_is_the_step_itself(shell: Any) -> None:
    """A service is asked if and only if the order was recorded."""
    step = shell.client.atomic()
    step.publish("orders", b"order 1")
    asked = step.request("billing", b"bill order 1", reply_to="desk")
    await committed(shell, step)
    never = shell.client.atomic()
    never.publish("orders", b"order 2")
    never.request("billing", b"bill order 2", reply_to="desk")
    await conflicting(shell, never)
    worker = shell.client.worker("billing")
    request = await shell.call(worker.next, WAIT_MS)
    assert request.body == b"bill order 1"
    answer = shell.client.atomic()
    answer.reply(request, b"billed")
    await committed(shell, answer)
    inbox = shell.client.inbox("desk")
    mail = await shell.call(inbox.next, WAIT_MS)
    assert (mail.body, mail.about, mail.last) == (b"billed", asked.about, True)
    assert await bodies(shell, "orders") == [b"order 1"]
    assert (await shell.do("service_info", "billing")).waiting == 0
    await shell.call(worker.close)
    await shell.call(inbox.close)


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_two_who_transform_the_same_stream_publish_each_record_once(
    kind: Any, tmp_path: Path, endpoint: str
) -> None:
    """Consume, transform, publish, exactly once: also while the broker is restarted."""
    total = 400

    def start() -> EmbeddedBroker:
        return EmbeddedBroker(tmp_path, listen=[endpoint]).start()

    broker = await asyncio.to_thread(start)
    shells = [kind() for _ in range(2)]
    for shell in shells:
        await shell.connect(endpoint, **FAST)
    progress = asyncio.Event()

    async def transform(shell: Any, step_size: int) -> None:
        at = 0
        while at < total:
            subscription = shell.client.subscribe(
                "in", start=FromCursor("transformer"), until="tail"
            )
            records = await shell.take(subscription, step_size)
            await shell.call(subscription.close)
            if not records:
                return
            at = records[-1].offset + 1
            step = shell.client.atomic()
            step.publish_many("out", [record.body + b"!" for record in records])
            step.move_cursor("in", "transformer", at, since=records[0].offset)
            try:
                await committed(shell, step)
            except BrokerRefused as error:
                if error.code != "conflict":
                    raise
                at = 0  # the other was first: go on from where the cursor stands now
            if at > total // 4:
                progress.set()

    try:
        await shells[0].do("publish_many", "in", [b"%d" % n for n in range(total)])
        async with asyncio.timeout(WAIT_S):
            running = [
                asyncio.ensure_future(transform(shell, size))
                for shell, size in zip(shells, (5, 7), strict=True)
            ]
            await progress.wait()
            await asyncio.to_thread(broker.stop)
            broker = await asyncio.to_thread(start)
            await asyncio.gather(*running)
            assert await bodies(shells[0], "out") == [b"%d!" % n for n in range(total)]
    finally:
        for shell in shells:
            await shell.do("close", flush_ms=0)
        await asyncio.to_thread(broker.stop)


@pytest.mark.moderate
async def test_steps_of_many_tasks_are_each_taken_once_over_a_restart(
    tmp_path: Path, endpoint: str
) -> None:
    def start() -> EmbeddedBroker:
        return EmbeddedBroker(tmp_path, listen=[endpoint]).start()

    broker = await asyncio.to_thread(start)
    shell = AsyncShell()
    await shell.connect(endpoint, **FAST)
    halfway = asyncio.Event()
    done = 0

    async def task(number: int) -> None:
        nonlocal done
        for turn in range(20):
            async with shell.client.atomic() as step:
                step.publish("a", b"%d/%d" % (number, turn), subject=f"t{number}")
                step.publish("b", b"%d/%d" % (number, turn))
                step.send(f"desk-{number % 4}", b"%d/%d" % (number, turn))
            done += 1
            if done > 500:
                halfway.set()

    try:
        async with asyncio.timeout(WAIT_S):
            running = asyncio.gather(*(task(number) for number in range(50)))
            await halfway.wait()
            await asyncio.to_thread(broker.stop)
            broker = await asyncio.to_thread(start)
            await running
        everything = sorted(b"%d/%d" % (n, turn) for n in range(50) for turn in range(20))
        for stream in ("a", "b"):
            found = await bodies(shell, stream)
            assert sorted(found) == everything
            # A task's steps keep their order.
            for number in range(50):
                mine = [body for body in found if body.startswith(b"%d/" % number)]
                assert mine == [b"%d/%d" % (number, turn) for turn in range(20)]
        boxes = [await shell.do("mailbox_info", f"desk-{n}") for n in range(4)]
        assert sum(box.messages for box in boxes) == 1000
    finally:
        await shell.do("close", flush_ms=0)
        await asyncio.to_thread(broker.stop)


@pytest.mark.moderate
def test_steps_of_many_threads_over_one_client_are_each_taken_once(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, tcp=True) as broker, broker.connect_sync(**FAST) as client:

        def stepping(number: int) -> None:
            for turn in range(25):
                with client.atomic() as step:
                    step.publish("a", b"%d/%d" % (number, turn))
                    step.send("desk", b"%d/%d" % (number, turn))
                assert step.confirmation is not None

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(stepping, range(8), timeout=WAIT_S))
        found = [record.body for record in client.subscribe("a", start="earliest", until="tail")]
        assert sorted(found) == sorted(b"%d/%d" % (n, turn) for n in range(8) for turn in range(25))
        assert client.mailbox_info("desk").messages == 200
