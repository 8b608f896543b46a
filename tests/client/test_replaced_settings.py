"""Edits that set all settings: what is not named goes back to its default."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_py.embedded import EmbeddedBroker


@pytest.fixture
async def broker() -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker(
        streams__default={"max_age_ms": 5_000},
        mailboxes__default={"ttl_ms": 7_000},
        services__default={"lease_ms": 9_000},
    ) as embedded:
        yield embedded


async def test_a_stream_goes_back_to_the_defaults_and_keeps_what_no_edit_changes(
    shell: Any,
) -> None:
    made = await shell.do(
        "create_stream", "s", ring_bytes=8 << 20, full="refuse", max_bytes=1 << 20,
        max_age_ms=1_000, body_kind="list", description="old",
    )  # fmt: skip
    edited = await shell.do("edit_stream", "s", max_records=5)
    assert edited.settings == {**made.settings, "max_records": 5}
    replaced = await shell.do("edit_stream", "s", level="stored", replace=True)
    assert replaced.settings == {
        **made.settings, "max_bytes": 0, "max_age_ms": 5_000, "level": "stored", "description": "",
    }  # fmt: skip
    with pytest.raises(BrokerRefused, match="ring_bytes cannot be changed"):
        await shell.do("edit_stream", "s", ring_bytes=16 << 20, replace=True)
    assert (await shell.do("stream_info", "s")).settings == replaced.settings


async def test_queues_groups_and_cursors_are_replaced_the_same_way(shell: Any) -> None:
    await shell.do("create_stream", "s")
    await shell.do("edit_mailbox", "box", memory=True, max_bytes=100, ttl_ms=1)
    mailbox = await shell.do("edit_mailbox", "box", {"max_messages": 3}, replace=True)
    named = {name: value for name, value in mailbox.settings.items() if value not in (0, "")}
    assert named == {"memory": True, "max_messages": 3, "ttl_ms": 7_000, "level": "synced"}

    await shell.do("edit_service", "svc", attempts_max=7, lease_ms=1_000)
    service = await shell.do("edit_service", "svc", replace=True)
    assert (service.settings["attempts_max"], service.settings["lease_ms"]) == (0, 9_000)

    cursor = shell.client.cursor("s", "c")
    await shell.call(cursor.edit, pin=True, description="old")
    facts = await shell.call(cursor.edit, description="new", replace=True)
    assert (facts.settings["pin"], facts.settings["description"]) == (False, "new")

    member = shell.client.group("s", "g", settings={"attempts_max": 3})
    await shell.call(member.accepted)
    group = await shell.do("edit_group", "s", "g", lease_ms=60_000, replace=True)
    assert (group.settings["attempts_max"], group.settings["lease_ms"]) == (0, 60_000)
    await shell.call(member.close)


async def test_replace_is_a_truth_value(shell: Any) -> None:
    with pytest.raises(LocalProtocolError, match="replace"):
        await shell.do("edit_stream", "s", replace="all")


@pytest.mark.parametrize(
    ("age_ms", "words"),
    [
        (1 << 62, r"max_age_ms is a number from 0 to 2\^62 - 1"),
        (-1, r"max_age_ms is a number from 0 to 2\^62 - 1"),
        (1 << 64, r"settings=.*allowed is a mapping by str of what MessagePack has \(.*2"),
    ],
)
async def test_a_number_that_a_setting_cannot_have_is_refused_by_what_it_may_be(
    shell: Any, age_ms: int, words: str
) -> None:
    await shell.do("create_stream", "s")
    with pytest.raises((BrokerRefused, LocalProtocolError), match=words):
        await shell.do("edit_stream", "s", max_age_ms=age_ms)
