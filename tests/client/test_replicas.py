"""Replicas of one program: several clients with the same template of an identity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import malamute_py as malamute
from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused, ConnectionLost
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.events import Confirmed, Published, Settled, Warned
from malamute_py.client.session.rows import OutgoingRow
from malamute_py.client.session.step import Step
from malamute_py.client.settings import SettingError, make_settings
from malamute_py.embedded import EmbeddedBroker
from malamute_py.server.authentication.credentials import hash_password
from tests.client.script import Script
from tests.client.shells import FAST, SHELLS, AsyncShell
from tests.ports import Port
from tests.waiting import WAIT_S

TEMPLATE = "web-{n}"


def hellos(script: Script) -> list[c.Hello]:
    return [command for command, _ in script.heard if isinstance(command, c.Hello)]


def outcomes(script: Script) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for event in script.happened:
        if isinstance(event, Settled):
            found |= dict(event.pairs)
        elif isinstance(event, Confirmed):
            found |= dict.fromkeys(event.tokens, event.outcome)
    return found


def send(script: Script, token: str, mailbox: str = "m") -> None:
    script.session.outbox.send(mailbox, OutgoingRow(token.encode(), len(token), "", token), 0)


@pytest.mark.parametrize("text", ["{n}{n}", "{x}", "web-{n", "-{n}", "w" * 249 + "{n}"])
def test_a_malformed_template_is_refused_before_there_is_a_link(text: str) -> None:
    with pytest.raises(SettingError, match="identity: "):
        make_settings("tcp://one:1", {"identity": text})


def test_a_replica_asks_for_the_number_that_it_had() -> None:
    script = Script(identity=TEMPLATE)
    assert script.session.identity == ""
    script.open(identity="web-3")
    assert script.session.identity == "web-3"
    assert "web-3" in script.session.mailboxes.own
    script.reconnect(identity="web-3")
    assert [(hello.identity, hello.number) for hello in hellos(script)] == [
        (TEMPLATE, -1), (TEMPLATE, 3),
    ]  # fmt: skip


def test_a_plain_identity_asks_for_no_number() -> None:
    script = Script(identity="web-3")
    script.open(identity="web-3")
    script.reconnect(identity="web-3")
    assert {hello.number for hello in hellos(script)} == {-1}


def test_with_another_number_what_may_have_been_taken_fails_and_the_rest_goes_on() -> None:
    script = Script(identity=TEMPLATE)
    script.open(identity="web-0")
    script.publish(b"under way")
    script.step()
    script.open_producer()
    send(script, "sent")
    row = OutgoingRow(b"asked", 5, "", "asked")
    script.session.requests.request("svc", row, 0, timeout_ms=0)
    step = Step()
    step.send("m", b"of a step")
    script.session.steps.add(step, "step")
    script.step()
    script.lose()
    script.publish(b"later")
    send(script, "later", "other")
    script.wait(60_000)
    script.happened.clear()
    script.heard.clear()
    script.open(identity="web-1")
    assert script.session.identity == "web-1"
    assert script.session.mailboxes.own >= {"web-1"}
    assert "web-0" not in script.session.mailboxes.own
    failed = outcomes(script)
    assert set(failed) == {"sent", "asked", "step"}
    for error in failed.values():
        assert isinstance(error, ConnectionLost)
        assert "another client has the identity 'web-0' now" in str(error)
    assert any(isinstance(event, Warned) and event.link for event in script.happened)
    [published] = [event for event in script.happened if isinstance(event, Published)]
    assert isinstance(published.outcome, ConnectionLost)
    kinds = [type(command) for command, _ in script.heard]
    assert not {c.Request, c.Atomic} & set(kinds)
    assert [command.mailbox for command, _ in script.heard if isinstance(command, c.Send)] == [
        "other"
    ]
    assert script.last(c.OpenProducer).id == 0, "the former producer stays the former identity's"
    script.open_producer(8)
    [(_, frames)] = [each for each in script.heard if isinstance(each[0], c.Publish)]
    assert len(frames) == 1


# --- against a broker -----------------------------------------------------------------------


@pytest.fixture
async def broker() -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker(links__replica_grace_ms=60_000) as embedded:
        yield embedded


async def connected(kind: Any, broker: EmbeddedBroker, **options: Any) -> Any:
    made = kind()
    await made.connect(broker.endpoint, context=broker.context, **FAST, **options)
    return made


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_two_replicas_of_a_web_service_ask_at_once_and_all_are_answered(
    kind: Any, broker: EmbeddedBroker
) -> None:
    worker = await connected(AsyncShell, broker)

    async def shout(request: malamute.Request) -> bytes:
        return bytes(request.body).upper()

    worker.client.serve("shout", concurrency=16)(shout)

    working = asyncio.create_task(worker.client.run())
    replicas = [await connected(kind, broker, identity=TEMPLATE) for _ in range(2)]
    assert sorted(replica.client.identity for replica in replicas) == ["web-0", "web-1"]

    async def asks(replica: Any, name: str) -> list[bytes]:
        found = []
        for number in range(20):
            reply = await replica.do("request", "shout", f"{name}{number}".encode())
            found.append(bytes(reply.body))
        return found

    async with asyncio.timeout(WAIT_S):
        answers = await asyncio.gather(
            *(asks(replica, name) for replica, name in zip(replicas, "ab", strict=True))
        )
    assert answers == [[f"{name}{number}".encode() for number in range(20)] for name in "AB"]
    assert [replica.client.reconnects for replica in replicas] == [0, 0]
    for replica in replicas:
        await replica.do("close")
    working.cancel()
    await worker.do("close")


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_replicas_have_their_own_names_again_after_a_restart_of_the_broker(kind: Any) -> None:
    with Port() as port:

        def start() -> EmbeddedBroker:
            return EmbeddedBroker(listen=[port.endpoint]).start()

        broker = await asyncio.to_thread(start)
        replicas = []
        for number in range(3):
            replica = kind()
            await replica.connect(port.endpoint, identity=TEMPLATE, **FAST)
            assert replica.client.identity == f"web-{number}"
            replicas.append(replica)
        await replicas.pop(0).do("close")
        await asyncio.to_thread(broker.stop)
        broker = await asyncio.to_thread(start)
        async with asyncio.timeout(WAIT_S):
            while not all(replica.client.reconnects for replica in replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert [replica.client.identity for replica in replicas] == ["web-1", "web-2"]
        for replica in replicas:
            await replica.do("close")
        await asyncio.to_thread(broker.stop)


@pytest.mark.moderate
async def test_a_user_may_derive_from_its_own_name_only() -> None:
    users = {name: hash_password("secret") for name in ("web", "web-1")}
    settings: dict[str, Any] = {
        "authentication__mechanism": "plain",
        "authentication__users": users,
        "authentication__identities": {"web": ["api.{n}"]},
    }
    async with EmbeddedBroker(tcp=True, **settings) as broker:
        credential = malamute.Plain("web", "secret")
        names = []
        shells = []
        for template in (TEMPLATE, TEMPLATE, "api.{n}"):
            shell = AsyncShell()
            await shell.connect(broker.tcp_endpoint, credential=credential, identity=template)
            names.append(shell.client.identity)
            shells.append(shell)
        assert names == ["web-0", "web-2", "api.0"], "web-1 is a user's own name"
        with pytest.raises(BrokerRefused, match=r"the template 'desk-\{n\}'"):
            await AsyncShell().connect(
                broker.tcp_endpoint, credential=credential, identity="desk-{n}"
            )
        for shell in shells:
            await shell.do("close")
        assert all(shell.client._session.state is LinkState.CLOSED for shell in shells)
