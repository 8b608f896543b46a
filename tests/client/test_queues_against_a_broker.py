"""Mail, requests and workers of both shells against the real broker."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import malamute_py as malamute
from malamute_protocol.errors import BrokerRefused, LocalProtocolError, Timeout
from malamute_py.embedded import EmbeddedBroker
from tests.client.shells import FAST, SHELLS, Connect
from tests.ports import Port
from tests.waiting import WAIT_MS, WAIT_S, until_async

pytestmark = pytest.mark.slow

LEASE_MS = 1_200
"""Far above the time for which a loaded machine keeps a thread from a renewal."""
SMALL: dict[str, Any] = {
    "limits__record_bytes_max": 1 << 19,
    "limits__batch_bytes_max": 1 << 20,
    "journal__segment_bytes": 4 << 20,
    "journal__ring_bytes": 64 << 20,
}


def bodies(letters: list[Any]) -> list[bytes]:
    return [letter.body for letter in letters]


async def read_all(shell: Any, inbox: Any, count: int) -> list[bytes]:
    """Read so many messages and acknowledge all of them."""
    found = bodies(await shell.take(inbox, count))
    leave = inbox.__aexit__ if shell.kind == "asyncio" else inbox.__exit__
    await shell.call(leave, None, None, None)
    await shell.do("flush", WAIT_MS)
    return found


async def serve(shell: Any, service: str, handle: Callable[[Any], Any], **options: Any) -> Any:
    """A worker whose handler is plain Python, run until it is closed."""
    worker = shell.client.worker(service, **options)

    async def handler(request: Any) -> Any:
        return handle(request)

    running = asyncio.create_task(
        worker.run(handler) if shell.kind == "asyncio" else asyncio.to_thread(worker.run, handle)
    )
    await shell.call(worker.accepted)

    async def stop() -> None:
        await shell.call(worker.close)
        await running

    return worker, stop


# --- mail ---


async def test_mail_sent_to_an_absent_client_is_delivered_when_it_connects(
    connect: Connect,
) -> None:
    ann = await connect("ann")
    confirmed = await ann.do(
        "send", "bob", b"hello", subject="greeting", fields={"k": "v"}, properties={"p": 1}
    )
    assert confirmed.level == "synced" or confirmed.level == "stored" or confirmed.offset >= 0
    bob = await connect("bob")
    inbox = bob.client.inbox()
    [mail] = await bob.take(inbox, 1)
    assert (mail.body, mail.subject, mail.fields["k"], mail.properties["p"]) == (
        b"hello", "greeting", "v", 1,
    )  # fmt: skip
    assert (mail.sender, mail.attempts, mail.number) == ("ann", 1, confirmed.offset)
    assert mail.about is None


async def test_messages_of_one_sender_come_in_the_order_of_the_calls(connect: Connect) -> None:
    ann = await connect("ann")
    sent = [b"%04d" % n for n in range(2000)]
    waiting = [ann.client.send_nowait("bob", body) for body in sent[:1000]]
    confirmed = [await ann.result(one) for one in waiting]
    assert [one.offset for one in confirmed] == sorted(one.offset for one in confirmed)
    many = await ann.do("send_many", "bob", sent[1000:])
    assert sum(one.count for one in many) == 1000
    bob = await connect("bob")
    assert await read_all(bob, bob.client.inbox(), 2000) == sent
    assert (await bob.do("mailbox_info", "bob")).messages == 0


async def test_a_message_is_acknowledged_when_the_next_is_asked_for(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    await ann.do("send_many", "bob", [b"a", b"b", b"c"])
    inbox = bob.client.inbox()
    assert bodies(await bob.take(inbox, 2)) == [b"a", b"b"]
    await bob.call(inbox.close)  # b was handed over, and no reader asked for more
    inbox = bob.client.inbox()
    found = await bob.take(inbox, 2)
    assert sorted(bodies(found)) == [b"b", b"c"]
    assert max(mail.attempts for mail in found) == 2


async def test_an_inbox_that_nobody_holds_any_more_gives_its_mail_back(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    await ann.do("send_many", "box", [b"a", b"b"])
    if bob.kind == "asyncio":
        async for _mail in bob.client.inbox("box"):
            break
        del _mail
    else:

        def reading() -> None:
            for _mail in bob.client.inbox("box"):
                break

        await asyncio.to_thread(reading)
    for _ in range(3):
        gc.collect()
    other = await connect("carl")
    inbox = other.client.inbox("box")
    # What was dropped is noticed with the client's next turn.
    for _ in range(2):
        await bob.do("broker_info")
    assert sorted(bodies(await other.take(inbox, 2))) == [b"a", b"b"]


async def test_an_inbox_that_nobody_holds_any_more_waits_for_no_collector(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    await ann.do("send_many", "box", [b"a", b"b"])
    collecting = gc.isenabled()
    gc.disable()
    try:
        inbox = bob.client.inbox("box")
        assert bodies(await bob.take(inbox, 1)) == [b"a"]
        given_up = weakref.ref(inbox)
        del inbox
        async with asyncio.timeout(WAIT_S):
            # The thread that read lets go a little after it has handed over what it read.
            while given_up() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0)
    finally:
        if collecting:
            gc.enable()


async def test_manual_acknowledgement_nack_and_a_second_ack(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    await ann.do("send_many", "bob", [b"a", b"b", b"c"])
    inbox = bob.client.inbox(ack="manual")
    first, second, third = await bob.take(inbox, 3)
    assert await bob.call(second.ack)
    assert not await bob.call(second.ack), "it is done already"
    assert await bob.call(first.nack, 1)
    [again] = await bob.take(inbox, 1)
    assert (again.body, again.number) == (b"a", first.number)
    assert again.attempts == 2
    assert await bob.call(again.ack)
    assert await bob.call(third.ack)
    assert (await bob.do("mailbox_info", "bob")).messages == 0


async def test_batches_are_acknowledged_as_a_whole(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    await ann.do("send_many", "bob", [b"%d" % n for n in range(10)])
    inbox = bob.client.inbox(ack="manual")
    [first] = await bob.take(inbox, 1)
    batch = await bob.call(inbox.next_batch)
    assert (len(batch), batch.sender, batch.bodies()[0]) == (9, "ann", b"1")
    assert await bob.call(batch.ack)
    assert (await bob.do("mailbox_info", "bob")).messages == 1
    assert await bob.call(first.ack)


async def test_a_full_mailbox_lets_the_sender_wait_and_loses_nothing(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    await ann.do("edit_mailbox", "small", max_messages=10)
    sent = [b"%03d" % n for n in range(100)]
    waiting = [ann.client.send_nowait("small", body) for body in sent]
    with pytest.raises(
        Timeout, match=r"mailbox 'small' is full: it has \d+ of at most 10 messages"
    ):
        await ann.do("send", "small", b"late", timeout_ms=500)
    inbox = bob.client.inbox("small")
    assert await read_all(bob, inbox, 100) == sent
    for one in waiting:
        await ann.result(one)


async def test_a_message_with_a_key_is_taken_once(connect: Connect) -> None:
    ann = await connect("ann")
    first = await ann.do("send", "bob", b"x", key=b"order 1")
    again = await ann.do("send", "bob", b"x", key=b"order 1")
    assert (again.offset, again.duplicate) == (first.offset, True)
    assert (await ann.do("mailbox_info", "bob")).messages == 1


async def test_readers_share_a_mailbox_and_each_message_goes_to_one(connect: Connect) -> None:
    ann, bob, carl = await connect("ann"), await connect("bob"), await connect("carl")
    readers = [
        (bob, bob.client.inbox("box", credit_records=4)),
        (carl, carl.client.inbox("box", credit_records=4)),
        (carl, carl.client.inbox("box")),
    ]
    for shell, inbox in readers:
        await shell.call(inbox.accepted)
    found: list[bytes] = []

    async def reading(shell: Any, inbox: Any) -> None:
        while (mail := await shell.call(inbox.next)) is not None:
            found.append(mail.body)

    tasks = [asyncio.create_task(reading(shell, inbox)) for shell, inbox in readers]
    sent = [b"%03d" % n for n in range(60)]
    for body in sent:
        await ann.do("send", "box", body, confirm="stored")
    await until_async(lambda: len(found) == 60)
    for shell, inbox in readers:
        await shell.call(inbox.close)
    await asyncio.gather(*tasks)
    assert sorted(found) == sent


async def test_priority_delay_and_expiry(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    now_ms = int(time.time() * 1000)
    await ann.do("send", "bob", b"late", deliver_at_ms=now_ms + 300)
    await ann.do("send", "bob", b"gone", expires_at_ms=now_ms - 1000)
    await ann.do("send", "bob", b"plain")
    await ann.do("send", "bob", b"first", priority=5)
    assert await read_all(bob, bob.client.inbox(), 3) == [b"first", b"plain", b"late"]


async def test_what_cannot_be_is_refused_before_anything_is_sent(connect: Connect) -> None:
    ann = await connect("ann")
    with pytest.raises(LocalProtocolError, match="ack"):
        ann.client.inbox("x", ack="sometimes")
    with pytest.raises(LocalProtocolError, match="concurrency"):
        ann.client.worker("x", concurrency=0)
    with pytest.raises(LocalProtocolError, match="on_error"):
        ann.client.serve("x", on_error="shrug")
    with pytest.raises(LocalProtocolError, match="no handler"):
        await ann.do("run")
    with pytest.raises(BrokerRefused, match="bad_name"):
        await ann.do("send", "no\nname", b"x")


# --- requests ---


async def test_a_request_is_answered(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")

    def handle(request: Any) -> bytes:
        assert (request.service, request.subject, request.sender) == ("svc", "a.b", "ann")
        assert (request.fields["f"], request.properties["p"], request.attempts) == ("1", 2, 1)
        assert request.deadline_ms > 0
        assert not request.cancelled()
        assert len(request.key[0]) == 16
        return bytes(b"re:" + request.body)

    _, stop = await serve(bob, "svc", handle)
    reply = await ann.do(
        "request", "svc", b"q", subject="a.b", fields={"f": "1"}, properties={"p": 2},
        timeout_ms=WAIT_MS,
    )  # fmt: skip
    assert (reply.body, reply.sender, reply.last, reply.why) == (b"re:q", "bob", True, "")
    await stop()


async def test_requests_of_many_callers_are_each_answered_once(connect: Connect) -> None:
    ann, bob = await connect(), await connect("bob")
    _, stop = await serve(bob, "svc", lambda request: b"re:" + request.body, concurrency=8)
    questions = [b"%04d" % n for n in range(300)]
    replies = await asyncio.gather(
        *(ann.do("request", "svc", question, timeout_ms=WAIT_MS) for question in questions)
    )
    assert bodies(replies) == [b"re:" + question for question in questions]
    await stop()
    facts = await ann.do("service_info", "svc")
    assert (facts.waiting, facts.held) == (0, 0)


async def test_several_replies_come_in_order_to_the_last(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    worker = bob.client.worker("svc")
    asking = asyncio.create_task(collect(ann, ann.client.requests("svc", b"", timeout_ms=WAIT_MS)))
    [request] = await bob.take(worker, 1)
    for number in range(5):
        await bob.call(request.reply, b"%d" % number, last=number == 4)
    assert bodies(await asking) == [b"%d" % number for number in range(5)]
    with pytest.raises(LocalProtocolError, match="conflict"):
        await bob.call(request.reply, b"more")
    await bob.call(worker.close)


async def collect(shell: Any, replies: Any) -> list[Any]:
    if shell.kind == "asyncio":
        return [reply async for reply in replies]
    return await asyncio.to_thread(list, replies)


async def test_completion_without_an_answer_ends_the_replies(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    _, stop = await serve(bob, "svc", lambda request: None)
    reply = await ann.do("request", "svc", b"q", timeout_ms=WAIT_MS)
    assert (reply.body, reply.why) == (b"", "completed")
    assert await collect(ann, ann.client.requests("svc", b"q", timeout_ms=WAIT_MS)) == []
    await stop()


async def test_a_handler_that_raises_fails_its_request_and_no_other(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")

    def handle(request: Any) -> bytes:
        if request.body == b"bad":
            raise ValueError("no such airport")
        return b"fine"

    _, stop = await serve(bob, "svc", handle)
    with pytest.raises(malamute.RequestFailed, match="ValueError: no such airport") as failed:
        await ann.do("request", "svc", b"bad", timeout_ms=WAIT_MS)
    assert failed.value.why.startswith("failed")
    assert (await ann.do("request", "svc", b"good", timeout_ms=WAIT_MS)).body == b"fine"
    [dead] = await ann.take(ann.client.inbox("svc.dead"), 1)
    assert dead.body == b"bad"
    assert "no such airport" in dead.why
    await stop()


async def test_a_request_that_is_given_back_goes_to_another_worker(connect: Connect) -> None:
    ann, bob, carl = await connect("ann"), await connect("bob"), await connect("carl")
    first = bob.client.worker("svc")
    await bob.call(first.accepted)
    asking = asyncio.create_task(ann.do("request", "svc", b"q", timeout_ms=WAIT_MS))
    [request] = await bob.take(first, 1)
    second = carl.client.worker("svc")
    await carl.call(second.accepted)
    await bob.call(first.close)
    assert request.cancelled()
    [again] = await carl.take(second, 1)
    assert (again.number, again.attempts) == (request.number, 1)
    await carl.call(again.reply, b"done")
    assert (await asking).body == b"done"


async def test_nobody_answers_in_time(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    with pytest.raises(Timeout):
        await ann.do("request", "svc", b"q", timeout_ms=50)
    worker = bob.client.worker("svc")
    await bob.call(worker.accepted)
    asking = asyncio.create_task(ann.do("request", "svc", b"slow", timeout_ms=1_000))
    request = (await bob.take(worker, 1))[0]
    while request.body != b"slow":
        request = (await bob.take(worker, 1))[0]
    with pytest.raises(Timeout):
        await asking
    await until_async(request.cancelled)
    assert await bob.call(request.reply, b"too late", wait=True) is None
    assert worker.not_held == 1
    # The notice was for the request, not for the reader of the mailbox.
    await ann.do("send", "ann", b"mail")
    assert bodies(await ann.take(ann.client.inbox(), 1)) == [b"mail"]


async def test_a_key_of_ones_own_is_taken_once_and_can_be_cancelled(connect: Connect) -> None:
    ann = await connect("ann")
    first = await ann.do("submit", "svc", b"q", key=b"k")
    again = await ann.do("submit", "svc", b"q", key=b"k")
    assert (again.offset, again.duplicate) == (first.offset, True)
    assert await ann.do("cancel", "svc", b"k") == 1
    assert await ann.do("cancel", "svc", b"k") == 0


async def test_an_identity_that_asks_also_reads_its_mailbox(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    _, stop = await serve(bob, "svc", lambda request: b"re:" + request.body)
    sent = [b"%03d" % n for n in range(50)]
    await bob.do("send_many", "ann", sent)
    # Ordinary mail lies before the replies, and the credit is for less than that.
    inbox = ann.client.inbox(credit_records=8)
    found = []
    for _ in range(50):
        [mail] = await ann.take(inbox, 1)
        found.append(mail.body)
        reply = await ann.do("request", "svc", mail.body, timeout_ms=WAIT_MS)
        assert reply.body == b"re:" + mail.body
    assert found == sent
    await stop()


async def test_mail_that_nobody_reads_is_not_kept_by_who_only_asks(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    _, stop = await serve(bob, "svc", lambda request: b"yes")
    await bob.do("send", "ann", b"mail")
    assert (await ann.do("request", "svc", b"q", timeout_ms=WAIT_MS)).body == b"yes"
    other = await connect("carl")
    assert await read_all(other, other.client.inbox("ann"), 1) == [b"mail"]
    assert (await ann.do("request", "svc", b"q", timeout_ms=WAIT_MS)).body == b"yes"
    await stop()


async def test_replies_to_an_earlier_process_are_mail(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    await ann.do("submit", "svc", b"q", key=b"from before")
    await ann.do("close")
    _, stop = await serve(bob, "svc", lambda request: b"answer")
    later = await connect("ann")
    assert (await later.do("request", "svc", b"now", timeout_ms=WAIT_MS)).body == b"answer"
    [mail] = await later.take(later.client.inbox(), 1)
    assert (mail.body, mail.about, mail.last) == (b"answer", (b"from before", 0), True)
    await stop()


async def test_a_long_handler_keeps_its_request(connect: Connect) -> None:
    ann, bob, carl = await connect("ann"), await connect("bob"), await connect("carl")
    worker = bob.client.worker("svc", lease_ms=LEASE_MS)
    asking = asyncio.create_task(ann.do("request", "svc", b"q", timeout_ms=WAIT_MS))
    [request] = await bob.take(worker, 1)
    other = carl.client.worker("svc", lease_ms=LEASE_MS)
    await carl.call(other.accepted)

    async def held_until_ms() -> int:
        facts = await ann.do("service_info", "svc")
        return max(each.lease_until_ms or 0 for each in facts.workers if each.held)

    over_ms = await held_until_ms() + LEASE_MS
    async with asyncio.timeout(WAIT_S):
        while await held_until_ms() <= over_ms:  # noqa: ASYNC110 - of the broker
            await asyncio.sleep(0.02)
    assert not request.cancelled()
    assert await bob.call(request.reply, b"at last", wait=True) is not None
    assert (await asking).body == b"at last"
    assert worker.not_held == 0


async def test_only_what_can_be_begun_is_taken(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    for n in range(10):
        await ann.do("submit", "svc", b"%d" % n)
    worker = bob.client.worker("svc", concurrency=3)
    requests = await bob.take(worker, 3)
    facts = await ann.do("service_info", "svc")
    assert (facts.held, facts.waiting) == (3, 7)
    assert await bob.call(requests[0].complete, wait=True)
    [another] = await bob.take(worker, 1)
    assert another.body == b"3"
    await bob.call(worker.close)
    facts = await ann.do("service_info", "svc")
    assert (facts.held, facts.waiting + facts.delayed) == (0, 9)


async def test_registered_handlers_run_until_the_client_is_closed(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    if bob.kind == "asyncio":
        client: malamute.Client = bob.client

        @client.serve("svc", concurrency=2)
        async def answer(request: Any) -> bytes:
            return bytes(b"re:" + request.body)

        @client.serve("stream")
        async def several(_request: Any) -> Any:
            for n in range(3):
                yield b"%d" % n

        running = asyncio.create_task(bob.client.run())
    else:
        blocking: malamute.SyncClient = bob.client

        @blocking.serve("svc", concurrency=2)
        def answer_in_a_thread(request: Any) -> bytes:
            return bytes(b"re:" + request.body)

        @blocking.serve("stream")
        def several_of_a_thread(_request: Any) -> Any:
            for n in range(3):
                yield b"%d" % n

        running = asyncio.create_task(asyncio.to_thread(bob.client.run))
    assert (await ann.do("request", "svc", b"q", timeout_ms=WAIT_MS)).body == b"re:q"
    replies = await collect(ann, ann.client.requests("stream", b"", timeout_ms=WAIT_MS))
    assert bodies(replies) == [b"0", b"1", b"2"]
    await bob.do("close")
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(running, return_exceptions=True)


async def test_a_second_client_with_the_identity_ends_the_first(connect: Connect) -> None:
    bob = await connect("bob")
    worker = bob.client.worker("svc")
    await bob.call(worker.accepted)
    other = await connect("bob")
    with pytest.raises(BrokerRefused, match="fenced"):
        await bob.take(worker, 1)
    await other.do("send", "bob", b"x")


# --- ends of handlers, of clients, of readers ---


async def test_what_a_handler_raises_of_another_client_ends_its_request(connect: Connect) -> None:
    ann, bob = await connect("ann"), await connect("bob")

    def handle(request: Any) -> bytes:
        raise malamute.ConnectionLost("of a client that is no business of this one")

    worker, stop = await serve(bob, "svc", handle)
    with pytest.raises(malamute.RequestFailed, match="no business of this one"):
        await ann.do("request", "svc", b"q", timeout_ms=WAIT_MS)
    await until_async(lambda: worker.in_hand == 0)
    await stop()


async def test_a_handler_that_would_exit_ends_its_request_and_not_its_thread(
    broker: EmbeddedBroker,
) -> None:
    async with broker.connect(identity="ann") as ann:
        with broker.connect_sync(identity="bob") as bob:

            def handle(request: Any) -> bytes:
                if request.body == b"exit":
                    raise SystemExit(1)
                return b"fine"

            worker = bob.worker("svc", concurrency=1)
            running = asyncio.create_task(asyncio.to_thread(worker.run, handle))
            for _ in range(3):
                with pytest.raises(malamute.RequestFailed, match="SystemExit"):
                    await ann.request("svc", b"exit", timeout_ms=WAIT_MS)
            assert (await ann.request("svc", b"q", timeout_ms=WAIT_MS)).body == b"fine"
            await asyncio.to_thread(worker.close)
            await running


async def test_a_refused_offer_is_raised_by_run_as_it_is(connect: Connect) -> None:
    bob = await connect("bob")
    worker = bob.client.worker("svc", settings={"nope": 1})
    with pytest.raises(BrokerRefused, match="bad_setting: there is no setting 'nope'"):
        await bob.call(worker.run, bytes)


async def test_what_is_acknowledged_after_the_end_says_so_and_holds_nothing_up(
    connect: Connect,
) -> None:
    ann, bob = await connect("ann"), await connect("bob")
    await ann.do("send", "box", b"1")
    inbox = bob.client.inbox("box", ack="manual")
    [mail] = await bob.take(inbox, 1)
    await bob.call(inbox.close)
    assert await bob.call(mail.ack) is False, "it was given back"

    inbox = bob.client.inbox("box", ack="manual")
    [mail] = await bob.take(inbox, 1)
    await bob.do("abort") if bob.kind == "sync" else bob.client.abort()
    with pytest.raises(malamute.ConnectionLost):
        await bob.call(mail.ack)
    await bob.do("flush", WAIT_MS)


# --- reconnects ---


@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_broker_restarted_amid_everything_loses_nothing_and_repeats_nothing(
    kind: Any, tmp_path: Path
) -> None:
    with Port() as port:

        def start() -> EmbeddedBroker:
            return EmbeddedBroker(tmp_path, listen=[port.endpoint], **SMALL).start()

        broker = await asyncio.to_thread(start)
        ann, bob = kind(), kind()
        await ann.connect(port.endpoint, identity="ann", **FAST)
        await bob.connect(port.endpoint, identity="bob", **FAST)
        handled: list[bytes] = []

        def handle(request: Any) -> bytes:
            handled.append(request.body)
            return bytes(b"re:" + request.body)

        _, stop = await serve(bob, "svc", handle, concurrency=4)
        inbox = bob.client.inbox()
        read: list[bytes] = []

        async def reading() -> None:
            while len(read) < 400:
                mail = await bob.call(inbox.next)
                read.append(mail.body)

        async def sending() -> list[int]:
            return [(await ann.do("send", "bob", b"%04d" % n)).offset for n in range(400)]

        async def asking() -> list[bytes]:
            return [(await ann.do("request", "svc", b"%04d" % n)).body for n in range(400)]

        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(reading()),
            asyncio.create_task(sending()),
            asyncio.create_task(asking()),
        ]
        try:
            async with asyncio.timeout(WAIT_S):
                for number in range(1, 4):
                    # Amid everything, and something of everything is left for afterwards.
                    # Asked again and again: threads fill the lists, too.
                    while min(len(read), len(handled)) < 100 * number:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
                    await asyncio.to_thread(broker.stop)
                    broker = await asyncio.to_thread(start)
                _, numbers, replies = await asyncio.gather(*tasks)
            assert numbers == sorted(set(numbers))
            assert read == [b"%04d" % n for n in range(400)]
            assert replies == [b"re:%04d" % n for n in range(400)]
            assert set(handled) == {b"%04d" % n for n in range(400)}
            await bob.call(
                inbox.__aexit__ if kind.kind == "asyncio" else inbox.__exit__, None, None, None
            )
            await stop()
            await bob.do("flush", WAIT_MS)
            assert (await ann.do("mailbox_info", "bob")).messages == 0
            assert (await ann.do("mailbox_info", "ann")).messages == 0
            facts = await ann.do("service_info", "svc")
            assert (facts.waiting, facts.held) == (0, 0)
        finally:
            for task in tasks:
                task.cancel()
            await ann.do("close", flush_ms=0)
            await bob.do("close", flush_ms=0)
            await asyncio.to_thread(broker.stop)
