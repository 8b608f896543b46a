"""A broker that errs at one command ends the link: that command fails, and all else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.framing import decode_message, encode_message
from malamute_py.broker.mail.inboxes import Inboxes
from malamute_py.broker.mail.puts import Puts
from malamute_py.broker.services.hand_outs import HandOuts
from malamute_py.broker.services.requests import Requests
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.client.session.attempts import LinkState
from malamute_py.embedded import EmbeddedBroker
from malamute_py.server import inbound
from tests.client.script import Script
from tests.client.session.conversation import ask_about
from tests.client.session.test_suspects import answers, greet
from tests.client.shells import FAST, SHELLS, AsyncShell
from tests.waiting import WAIT_S

BAD = b"poison"


# --- the session alone ----------------------------------------------------------------------


def end_as_internal(script: Script, command: int = 0, reference: int = 0) -> None:
    refused = c.Refused(command, reference, "internal", "as the test wants")
    script.session.receive(
        encode_message([refused, c.Bye("internal", refused.reason)]), script.now_ms
    )
    script.step()


def take_as_a_broker(script: Script, bad: str) -> tuple[list[str], bool]:
    """Read message by message, as a broker that errs at a name and cannot say at which command."""
    done: list[str] = []
    for frames in script.session.take_outgoing(script.now_ms):
        commands = [command for command, _ in decode_message(frames)]
        if any(getattr(command, "stream", "") == bad for command in commands):
            end_as_internal(script)
            return done, False
        for command in commands:
            done.append(getattr(command, "stream", ""))
            if isinstance(command, c.Ping):
                script.session.receive(encode_message([c.Pong(command.token)]), script.now_ms)
    return done, True


@pytest.mark.parametrize("place", range(4))
def test_what_ends_links_without_a_name_is_found_and_never_sent_again(place: int) -> None:
    script = Script()
    script.open()
    names = ["a", "b", "c"]
    names.insert(place, "bad")
    for name in names:
        ask_about(script, name)
    assert take_as_a_broker(script, "bad") == ([], False)
    links = 1
    while True:
        greet(script)
        links += 1
        done, whole = take_as_a_broker(script, "bad")
        if whole:
            break
        assert links < 4, "the command goes on ending links"
    [(token, error)] = answers(script).items()
    assert token == "bad"
    assert isinstance(error, BrokerRefused)
    assert error.code == "internal"
    assert {name for name in done if name} == {"a", "b", "c"}
    assert script.state() is LinkState.LINKED


def test_what_is_open_is_opened_once_more_and_ends_by_name_the_second_time() -> None:
    script = Script()
    script.open()
    bad, good = script.subscribe(), script.subscribe()
    for reading in (bad, good):
        script.accept(reading)
    end_as_internal(script, 16, bad.number)
    assert not bad.ended
    script.wait(60_000)
    again = [command for command in script.open() if isinstance(command, c.Subscribe)]
    assert [command.subscription for command in again] == [bad.number, good.number]
    for reading in (bad, good):
        script.accept(reading)
    end_as_internal(script, 12, bad.number)
    assert not bad.ended, "a minute later it is another error"
    script.wait(10_000)
    script.open()
    end_as_internal(script, 12, bad.number)
    assert isinstance(bad.error, BrokerRefused)
    assert bad.error.code == "internal"
    script.wait(10_000)
    again = [command for command in script.open() if isinstance(command, c.Subscribe)]
    assert [command.subscription for command in again] == [good.number]


def test_an_opening_that_is_refused_so_without_an_end_is_tried_once_more_on_the_link() -> None:
    script = Script(retry_min_ms=100)
    script.open()
    reading = script.subscribe()
    script.say(c.Refused(12, reading.number, "internal", "as the test wants"))
    assert not reading.ended
    assert [type(command) for command in script.wait(100)] == [c.Subscribe]
    script.say(c.Refused(12, reading.number, "internal", "as the test wants"))
    assert reading.ended


def test_a_hello_that_the_broker_errs_at_is_tried_again() -> None:
    script = Script()
    end_as_internal(script)
    assert script.state() is LinkState.WAITING


# --- at a broker with a fault in it ------------------------------------------------------------


@asynccontextmanager
async def running(kind: Any) -> AsyncIterator[Any]:
    """A client of a broker that begins with the faults planted so far."""
    async with EmbeddedBroker() as broker:
        made = kind()
        await made.connect(broker.endpoint, context=broker.context, **FAST)
        yield made
        await made.do("close", flush_ms=0)


def errs(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool]) -> None:
    """Have a function of the broker's raise where no code foresees it."""
    true = getattr(owner, name)

    def planted(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            raise IndexError("planted")
        return true(*arguments, **named)

    monkeypatch.setattr(owner, name, planted)


def holds(*arguments: Any) -> bool:
    frames = [one.bytes if isinstance(one, zmq.Frame) else one for one in arguments]
    return any(isinstance(frame, bytes) and BAD in frame for frame in frames)


def in_a_frame(frames: Any, *_: Any) -> bool:
    return any(BAD in bytes(frame) for frame in frames)


async def failing(call: Any) -> BrokerRefused:
    with pytest.raises(BrokerRefused) as caught:
        async with asyncio.timeout(WAIT_S):
            await call
    assert caught.value.code == "internal"
    return caught.value


async def step(shell: Any, place: str, body: bytes) -> None:
    """A step of one message."""
    if isinstance(shell, AsyncShell):
        async with shell.client.atomic() as parts:
            parts.send(place, body)
        return

    def stepping() -> None:
        with shell.client.atomic() as parts:
            parts.send(place, body)

    await asyncio.to_thread(stepping)


READ, SEND, REQUEST, PUBLISH = (
    (inbound, "decode_message", in_a_frame), (Puts, "prepare_send", holds),
    (Requests, "prepare", holds), (Publishing, "publish", holds),
)  # fmt: skip


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("verb", "where"),
    [("send", READ), ("publish", READ), ("submit", READ), ("atomic", READ), ("send", SEND),
     ("publish", PUBLISH), ("submit", REQUEST), ("atomic", SEND)],
)  # fmt: skip
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_the_call_that_the_broker_errs_at_fails_and_all_others_go_on(
    kind: Any, monkeypatch: pytest.MonkeyPatch, verb: str, where: Any
) -> None:
    errs(monkeypatch, *where)

    async with running(kind) as shell:

        async def call(place: str, body: bytes) -> None:
            if verb == "atomic":
                await step(shell, place, body)
            else:
                await shell.do(verb, place, body)

        reading = shell.client.subscribe("beside", create=True)
        await shell.call(reading.accepted)
        bad = asyncio.create_task(failing(call("bad", BAD)))
        goods = [asyncio.create_task(call(f"good{n}", b"x")) for n in range(5)]
        async with asyncio.timeout(WAIT_S):
            await bad
            await asyncio.gather(*goods)
            await shell.do("publish", "beside", b"x")
            assert [record.body for record in await shell.take(reading, 1)] == [b"x"]
        # Steps that left as one are tried in halves.
        assert 1 <= shell.client.reconnects <= 10


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_message_that_the_broker_cannot_hand_out_ends_its_inbox_by_name(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    errs(monkeypatch, Inboxes, "_give", lambda self, mailbox, *_: mailbox.name == "box")
    async with running(kind) as shell:
        await shell.do("send", "box", b"x")
        reading = shell.client.subscribe("beside", create=True)
        inbox = shell.client.inbox("box")
        error = await failing(shell.take(inbox, 1))
        assert "error of its own" in error.reason
        await shell.do("publish", "beside", b"x")
        async with asyncio.timeout(WAIT_S):
            assert len(await shell.take(reading, 1)) == 1
            await shell.do("send", "box", b"y")
        assert shell.client.reconnects == 2


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_request_that_the_broker_cannot_hand_out_ends_its_workers_by_name(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    errs(monkeypatch, HandOuts, "_serve", lambda self, service, *_: service.name == "bad")
    async with running(kind) as shell:
        # A request that comes while a worker is idle is handed out by another way.
        await shell.do("submit", "bad", b"x")
        worker = shell.client.worker("bad")
        await failing(shell.call(worker.next))
        await shell.do("send", "box", b"y")
        assert shell.client.reconnects == 2
