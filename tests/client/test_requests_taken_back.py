"""A request that was confirmed as stored, and that the broker's end may have taken back."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.commands import Level
from malamute_py.client.session.letters import RequestFailed
from malamute_py.client.session.rows import OutgoingRow
from malamute_py.embedded import EmbeddedBroker
from tests.client.script import Script
from tests.client.shells import FAST, SHELLS
from tests.client.test_held_or_given_back import cut, deafen, hear_again
from tests.ports import Port
from tests.waiting import WAIT_S


def ask(script: Script, level: Level, reply_to: str = "", until_ms: int = 0) -> None:
    row = OutgoingRow(b"asked", 5, "", "token")
    script.session.requests.request(
        "svc", row, int(level), reply_to=reply_to, timeout_ms=60_000, until_ms=until_ms
    )


def requests(commands: list[c.Command]) -> list[c.Request]:
    return [command for command in commands if isinstance(command, c.Request)]


def confirm(script: Script, request: c.Request, *, epoch: int, duplicate: bool = False) -> None:
    script.say(c.Confirm(request.tracker, request.level, epoch, 7, 0, duplicate))


@pytest.mark.parametrize(
    ("level", "identity", "reply_to", "again"),
    [
        (Level.STORED, "desk", "", True), (Level.SYNCED, "desk", "", False),
        (Level.STORED, "", "", True), (Level.SYNCED, "", "", True),
        (Level.SYNCED, "", "box", False), (Level.STORED, "desk", "box", True),
    ],
)  # fmt: skip
def test_a_request_is_sent_again_over_a_link_whose_broker_may_not_have_it_or_its_reply(
    level: Level, identity: str, reply_to: str, again: bool
) -> None:
    script = Script(identity=identity)
    script.open(identity=identity)
    ask(script, level, reply_to)
    [request] = requests(script.step())
    confirm(script, request, epoch=1)
    # The epoch that has it goes on; a temporary mailbox may have ended since the link did.
    fleeting = not (identity or reply_to)
    sent = requests(script.reconnect(identity=identity))
    assert [one.key for one in sent] == [request.key] * fleeting
    for one in sent:
        confirm(script, one, epoch=1, duplicate=True)
    sent = requests(script.reconnect(identity=identity, epoch=2))
    assert [one.key for one in sent] == [request.key] * again
    if again:
        confirm(script, sent[0], epoch=2)
        assert len(requests(script.reconnect(identity=identity, epoch=2))) == fleeting
        assert len(requests(script.reconnect(identity=identity, epoch=3))) == 1


def test_nothing_of_a_request_is_kept_once_its_callers_time_is_over() -> None:
    script = Script()
    script.open()
    ask(script, Level.STORED, until_ms=script.now_ms + 500)
    [request] = requests(script.step())
    confirm(script, request, epoch=1)
    [parcel] = script.session.awaited.asked.values()
    assert parcel.content
    script.wait(500)
    assert requests(script.reconnect(epoch=2)) == []
    script.wait(120_000)
    assert not parcel.content
    assert not parcel.rows
    assert not script.session.awaited.asked


SMALL: dict[str, Any] = {
    "limits__record_bytes_max": 1 << 19,
    "limits__batch_bytes_max": 1 << 20,
    "journal__segment_bytes": 4 << 20,
    "journal__ring_bytes": 64 << 20,
}
"""A journal that is quickly copied."""


@pytest.mark.moderate
@pytest.mark.parametrize("identity", ["desk", ""])
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_request_that_a_power_loss_took_back_is_asked_again_and_answered(
    kind: Any, identity: str, tmp_path: Path
) -> None:
    data, before = tmp_path / "data", tmp_path / "before"
    with Port() as port:

        def start() -> EmbeddedBroker:
            return EmbeddedBroker(data, listen=[port.endpoint], **SMALL).start()

        broker = await asyncio.to_thread(start)
        shell = kind()
        await shell.connect(port.endpoint, identity=identity, **FAST)
        await shell.do("publish", "s", b"synced", confirm="synced")
        shutil.copytree(data, before, ignore=shutil.ignore_patterns("lock"))
        waiting = asyncio.create_task(
            shell.do("request", "svc", b"x", confirm="stored", timeout_ms=600_000)
        )
        async with asyncio.timeout(WAIT_S):
            while not any(  # noqa: ASYNC110 - a fact of another thread
                batch.epoch >= 0 for batch in list(shell.client._session.awaited.asked.values())
            ):
                await asyncio.sleep(0.005)
        await asyncio.to_thread(broker.stop)
        # As a power loss leaves it: what was written since the last sync is not there.
        shutil.rmtree(data)
        shutil.copytree(before, data)
        broker = await asyncio.to_thread(start)
        async with broker.connect() as worker_client, asyncio.timeout(WAIT_S):
            request = await worker_client.worker("svc").next()
            assert request is not None
            await request.reply(b"done", wait=True)
            assert bytes((await waiting).body) == b"done"
        await shell.do("close")
        await asyncio.to_thread(broker.stop)


@pytest.mark.moderate
async def test_a_reply_lost_with_its_mailbox_is_told_although_the_request_was_confirmed(
    tmp_path: Path,
) -> None:
    with Port() as port:

        def start() -> EmbeddedBroker:
            return EmbeddedBroker(tmp_path, listen=[port.endpoint]).start()

        broker = await asyncio.to_thread(start)
        shell = SHELLS[0]()
        await shell.connect(port.endpoint, **FAST)
        waiting = asyncio.create_task(
            shell.do("request", "svc", b"x", confirm="synced", timeout_ms=600_000)
        )
        async with broker.connect(identity="worker") as worker_client, asyncio.timeout(WAIT_S):
            request = await worker_client.worker("svc").next()
            assert request is not None
            deafen(shell.client)
            await request.reply(b"never seen", wait=True)
        await asyncio.to_thread(broker.stop)
        hear_again(shell.client)
        cut(shell.client)
        broker = await asyncio.to_thread(start)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(RequestFailed, match="lost"):
                await waiting
        await shell.do("close")
        await asyncio.to_thread(broker.stop)
