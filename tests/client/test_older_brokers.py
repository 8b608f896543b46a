"""Answers of an older broker, which leave out parts of a question, and what clients do then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from malamute_protocol import commands as c
from malamute_protocol.commands import Command
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.version import Feature
from malamute_py.cli.definitions import Change
from malamute_py.cli.foreseen import refusal
from malamute_py.client.aio.client import connect
from malamute_py.client.sync.client import connect_sync
from malamute_py.http.console.pages import _withheld
from tests.client.fakes import FakeBroker
from tests.client.shells import FAST, SHELLS
from tests.waiting import WAIT_MS

USERS = [{"user": name, "grant": {"read": ["a"]}, "may": False} for name in ("ann", "bob")]


INFO = {"uuid": b"u" * 16, "settings": {"keep": "last-per-subject", "body_kind": "list"}}


class OlderBroker(FakeBroker):
    """A broker that passes over `own` of LIST_USERS, and answers STREAM_SCHEMAS with schemas."""

    users: list[dict[str, Any]]

    def _answer(self, link: bytes, command: Command, contents: Any) -> list[Any]:
        if isinstance(command, c.Hello):
            [(_, told, frames)] = super()._answer(link, command, contents)
            return [(link, structs.replace(told, features=int(Feature.TYPED)), frames)]
        if isinstance(command, c.StreamSchemas):
            return [(link, c.Result(command.request, {"schemas": []}), ())]
        if isinstance(command, c.StreamInfo):
            return [(link, c.Result(command.request, INFO), ())]
        if not isinstance(command, c.ListUsers):
            return super()._answer(link, command, contents)
        if not self.users:
            return [(link, c.Refused(1, command.request, "forbidden", "not you"), ())]
        return [(link, c.Result(command.request, {"users": self.users, "more": False}), ())]


@pytest.fixture(params=[[], USERS[:1], USERS], ids=["forbidden", "one user", "two users"])
async def older(request: pytest.FixtureRequest) -> AsyncIterator[OlderBroker]:
    broker = OlderBroker()
    broker.users = request.param
    yield broker
    broker.close()


@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_what_another_user_may_is_not_taken_for_what_this_user_may(
    kind: Any, older: OlderBroker
) -> None:
    shell = await kind().connect(older.endpoint, **FAST)
    with pytest.raises(BrokerRefused) as caught:
        await shell.do("may", "read", "a")
    assert caught.value.code == ("unsupported" if older.users else "forbidden")
    await shell.do("close")


async def test_a_dry_run_foresees_nothing_that_an_older_broker_does_not_tell(
    older: OlderBroker,
) -> None:
    def asked() -> str:
        there: Any = {"streams": {}}
        with connect_sync(older.endpoint, timeout_ms=WAIT_MS, **FAST) as client:
            return refusal(client, Change("streams", ("s",), "create", {}, {}), there, set())

    assert await asyncio.to_thread(asked) == ""


async def test_the_console_offers_what_an_older_broker_does_not_tell(older: OlderBroker) -> None:
    async with await connect(older.endpoint, timeout_ms=WAIT_MS, **FAST) as client:
        session: Any = SimpleNamespace(client=client)
        needed = {"look": ("replay", "s"), "tail": ("read", "s")}
        assert await _withheld(session, {}, needed) == {}


@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_stream_of_an_older_broker_has_its_uuid_and_its_keys(kind: Any) -> None:
    broker = OlderBroker()
    shell = await kind().connect(broker.endpoint, **FAST)
    try:
        found = await shell.do("stream_versions", "s")
        assert (found.uuid, found.keep) == (b"u" * 16, "last-per-subject")
        assert await shell.call(shell.client.kv("s")._marker_body) == []
    finally:
        await shell.do("close")
        broker.close()
