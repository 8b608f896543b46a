"""Every call that waits ends, by its result or by a named error, whatever becomes of the link."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

import malamute_py as malamute
from malamute_protocol.batch import encode
from malamute_protocol.errors import MalamuteError, Timeout
from malamute_py.client.engine.engine import clock_ms
from malamute_py.embedded import EmbeddedBroker
from tests.client.fakes import FakeBroker
from tests.client.shells import SHELLS, AsyncShell, SyncShell
from tests.waiting import WAIT_S

IN_HAND = 8


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.kind)
def new_shell(request: pytest.FixtureRequest) -> Any:
    return request.param


class Scene:
    """A client that has something of each kind in hand."""

    def __init__(self, shell: AsyncShell | SyncShell) -> None:
        self.shell = shell
        self.client: Any = shell.client

    async def prepare(self, broker: EmbeddedBroker) -> None:
        do, call = self.shell.do, self.shell.call
        async with broker.connect() as other:
            await other.publish_many("s", [b"x"] * 64)
            for n in range(IN_HAND):
                await other.send("box", b"%d" % n)
                await other.submit("svc", b"%d" % n)
        self.inbox = self.client.inbox("box", ack="manual")
        self.mail = [await call(self.inbox.next) for _ in range(2)]
        self.mail_batches = [await call(self.inbox.next_batch) for _ in range(2)]
        self.worker = self.client.worker("svc", concurrency=IN_HAND)
        self.requests = [await call(self.worker.next) for _ in range(IN_HAND)]
        self.member = self.client.group("s", "g", start="earliest", ack="manual")
        self.records = await call(self.member.next_batch)
        self.subscription = self.client.subscribe("s")
        await call(self.subscription.accepted)
        self.cursor = self.client.cursor("s", "c")
        await call(self.cursor.edit)
        self.window = self.client.publisher("s")
        await do("publish", "s", b"the producer is open")

    def cut(self) -> None:
        """The cable is cut, as the transport would notice it."""
        session = self.client._session
        lock = getattr(self.client._link, "lock", None) or contextlib.nullcontext()
        with lock:
            session.lost("closed", "the cable", clock_ms())
            self.client._link.wake_up()

    def calls(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        do, call, client = self.shell.do, self.shell.call, self.client
        first, second = self.mail
        batch, rest = self.mail_batches
        reply, replied, completed, failed, back, received, renewed, stepped = self.requests
        records = iter(self.records)

        async def one_of_many() -> Any:
            replies = client.requests("nobody", b"")
            if self.shell.kind == "asyncio":
                async with contextlib.aclosing(replies):
                    return await anext(replies)
            return await asyncio.to_thread(next, replies)

        async def a_step() -> Any:
            step = client.atomic()
            step.publish("s", b"in a step")
            step.reply(stepped, b"in a step")
            return await call(step.commit)

        async def a_window() -> Any:
            await call(self.window.publish_many, [b"x"] * 3)
            await call(self.window.publish_batch, encode([b"x"]))
            return await call(self.window.wait)

        return {
            "publish": lambda: do("publish", "s", b""),
            "publish_many": lambda: do("publish_many", "s", [b"x"] * 5),
            "publish_batch": lambda: do("publish_batch", "s", encode([b"x"])),
            "window": a_window,
            "flush": lambda: do("flush"),
            "send": lambda: do("send", "m", b""),
            "send_many": lambda: do("send_many", "m", [b"x"] * 5),
            "request": lambda: do("request", "nobody", b""),
            "requests": one_of_many,
            "submit": lambda: do("submit", "nobody", b""),
            "cancel": lambda: do("cancel", "nobody", b"key"),
            "atomic": a_step,
            "create_stream": lambda: do("create_stream", "new"),
            "edit_stream": lambda: do("edit_stream", "s", description="d"),
            "remove_stream": lambda: do("remove_stream", "none"),
            "stream_info": lambda: do("stream_info", "s"),
            "list_streams": lambda: do("list_streams"),
            "find_offset": lambda: do("find_offset", "s", "earliest"),
            "plan_read": lambda: do("plan_read", "s"),
            "broker_info": lambda: do("broker_info"),
            "settings_in_force": lambda: do("settings_in_force"),
            "links": lambda: do("list_links"),
            "kick": lambda: do("kick", 12345),
            "reload_config": lambda: do("reload_config"),
            "list_namespaces": lambda: do("list_namespaces"),
            "mailboxes": lambda: do("list_mailboxes"),
            "mailbox_info": lambda: do("mailbox_info", "box"),
            "peek": lambda: do("peek", "box"),
            "purge_mailbox": lambda: do("purge_mailbox", "m"),
            "edit_mailbox": lambda: do("edit_mailbox", "m2"),
            "remove_mailbox": lambda: do("remove_mailbox", "none"),
            "services": lambda: do("list_services"),
            "service_info": lambda: do("service_info", "svc"),
            "edit_service": lambda: do("edit_service", "svc2"),
            "requeue": lambda: do("requeue", "svc"),
            "remove_service": lambda: do("remove_service", "none"),
            "cursors": lambda: do("list_cursors"),
            "cursor_info": lambda: do("cursor_info", "s", "c"),
            "cursor.move": lambda: call(self.cursor.move, 5),
            "cursor.reset": lambda: call(self.cursor.reset, 7),
            "cursor.edit": lambda: call(self.cursor.edit, description="d"),
            "cursor.remove": lambda: call(client.cursor("s", "none").remove),
            "groups": lambda: do("list_groups"),
            "group_info": lambda: do("group_info", "s", "g"),
            "remove_group": lambda: do("remove_group", "s", "none"),
            "mail.ack": lambda: call(first.ack),
            "mail.nack": lambda: call(second.nack, 10),
            "mail batch.ack": lambda: call(batch.ack),
            "mail batch.nack": lambda: call(rest.nack),
            "request.reply": lambda: call(reply.reply, b""),
            "request.reply, waited for": lambda: call(replied.reply, b"", wait=True),
            "request.complete": lambda: call(completed.complete, wait=True),
            "request.fail": lambda: call(failed.fail, "why", wait=True),
            "request.nack": lambda: call(back.nack, wait=True),
            "request.received": lambda: call(received.received),
            "request.renew": lambda: call(renewed.renew),
            "member.ack": lambda: call(self.member.ack, next(records)),
            "member.nack": lambda: call(self.member.nack, next(records)),
            "inbox.accepted": lambda: call(client.inbox("box2").accepted),
            "worker.accepted": lambda: call(client.worker("svc3").accepted),
            "member.accepted": lambda: call(client.group("s", "g2").accepted),
            "subscription.accepted": lambda: call(client.subscribe("s").accepted),
        }


def waits_at_most(client: Any, timeout_ms: int) -> None:
    """Set the client's time limit from now on; the preparation of a scene may take longer."""
    settings = msgspec.structs.replace(client.settings, call_timeout_ms=timeout_ms)
    client.settings = client._session.settings = client._link.engine.settings = settings


async def outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        async with asyncio.timeout(WAIT_S):
            return await call()
    except MalamuteError as error:
        return error


async def scene(new_shell: Any, broker: EmbeddedBroker, **options: Any) -> Scene:
    shell = new_shell()
    await shell.connect(broker.endpoint, context=broker.context, **options)
    made = Scene(shell)
    await made.prepare(broker)
    return made


@pytest.mark.moderate
async def test_with_the_link_down_each_ends_by_its_timeout_and_says_since_when(
    new_shell: Any, broker: EmbeddedBroker
) -> None:
    options: dict[str, Any] = {"retry_min_ms": 600_000, "retry_max_ms": 600_000}
    made = await scene(new_shell, broker, **options)
    waits_at_most(made.client, 150)
    made.cut()
    calls = made.calls()
    outcomes = await asyncio.gather(*map(outcome, calls.values()))
    found = dict(zip(calls, outcomes, strict=True))
    # What returns at once, as nothing is waited for, or as the inbox says what will become of it.
    assert found.pop("request.reply") is None
    for name in ("mail.ack", "mail.nack", "mail batch.ack", "mail batch.nack"):
        assert found.pop(name) in (False, True), name
    for name in ("member.ack", "member.nack"):
        assert found.pop(name) is False, name
    for name, error in found.items():
        assert isinstance(error, Timeout), (name, error)
        assert "there is no link to a broker: it was lost" in str(error), (name, error)
        assert "the cable" in str(error), name
    await made.shell.do("close", flush_ms=0)


@pytest.mark.moderate
async def test_with_the_link_cut_under_it_each_ends_by_a_result_or_a_named_error(
    new_shell: Any, broker: EmbeddedBroker
) -> None:
    made = await scene(new_shell, broker, retry_min_ms=10, retry_max_ms=50, timeout_ms=20_000)
    calls = made.calls()
    # No worker serves these: they end with the client.
    for name in ("request", "requests"):
        del calls[name]
    tasks = [asyncio.ensure_future(outcome(call)) for call in calls.values()]
    for _ in range(3):
        await asyncio.sleep(0.002)
        made.cut()
    found = dict(zip(calls, await asyncio.gather(*tasks), strict=True))
    for name, error in found.items():
        assert not isinstance(error, Timeout), (name, error)
    for name in ("publish", "publish_many", "publish_batch", "send", "send_many", "submit"):
        assert not isinstance(found[name], MalamuteError), (name, found[name])
    await made.shell.do("close", flush_ms=0)


@pytest.mark.moderate
async def test_what_waits_when_the_client_is_closed_ends_by_name(
    new_shell: Any, broker: EmbeddedBroker
) -> None:
    made = await scene(new_shell, broker, retry_min_ms=600_000, retry_max_ms=600_000)
    made.cut()
    calls = made.calls()
    calls["inbox.next"] = lambda: made.shell.call(made.client.inbox("box3").next)
    calls["worker.next"] = lambda: made.shell.call(made.worker.next)
    calls["subscription.next_batch"] = lambda: made.shell.call(made.subscription.next_batch)
    calls["member.next_batch"] = lambda: made.shell.call(made.member.next_batch)
    # Each of them waits in a thread of its own.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * len(calls)))
    tasks = [asyncio.ensure_future(outcome(call)) for call in calls.values()]
    await asyncio.sleep(0.05)
    closing = asyncio.ensure_future(made.shell.do("close", flush_ms=0))
    for name, ended in zip(calls, await asyncio.gather(*tasks), strict=True):
        assert not isinstance(ended, Timeout), name
    await closing


@pytest.mark.moderate
async def test_a_publish_that_timed_out_is_taken_once_when_the_broker_is_back(
    new_shell: Any,
) -> None:
    fake = FakeBroker()
    shell = new_shell()
    await shell.connect(fake.endpoint, retry_min_ms=10, retry_max_ms=50)
    await shell.do("publish", "s", b"one")
    fake.confirming = False
    with pytest.raises(Timeout, match="whether it is in the log is unknown") as caught:
        await shell.do("publish", "s", b"two", timeout_ms=50)
    assert "under the same sequence" in str(caught.value)
    assert "the link to the broker is up" in str(caught.value)
    fake.stop()
    fake.confirming = True
    fake.start()
    await shell.do("flush", None)
    assert [base for base, _ in fake.streams["s"]] == [0, 1]
    await shell.do("close")
    fake.close()


@pytest.mark.moderate
async def test_none_waits_for_ever_and_a_default_may_be_none(new_shell: Any) -> None:
    fake = FakeBroker()
    shell = new_shell()
    await shell.connect(fake.endpoint, retry_min_ms=10, retry_max_ms=50)
    assert shell.client.settings.call_timeout_ms == 30_000
    fake.confirming = False
    waits_at_most(shell.client, 20)
    waiting = asyncio.ensure_future(shell.do("publish", "s", b"", timeout_ms=None))
    with pytest.raises(Timeout):
        await shell.do("publish", "s", b"")
    assert not waiting.done()
    fake.stop()
    fake.confirming = True
    fake.start()
    assert (await waiting).offset in (0, 1)
    await shell.do("close")
    fake.close()
    with pytest.raises(malamute.SettingError, match="call_timeout_ms"):
        malamute.ClientSettings(call_timeout_ms=0).check()
    assert malamute.ClientSettings(call_timeout_ms=None).check().wait_ms("default") is None
