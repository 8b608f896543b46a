"""Messages of usual mistakes say what happened, to what, and what to do next."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import malamute_py as malamute
from malamute_py.embedded import EmbeddedBroker
from tests.client.shells import FAST


def test_a_client_that_was_not_awaited_says_how_to_get_one() -> None:
    connecting: Any = malamute.connect("tcp://127.0.0.1:1")
    with pytest.raises(AttributeError, match="no 'publish' until it is awaited: write `client = "):
        connecting.publish("orders", b"1")


@pytest.mark.parametrize("option", ["user", "password", "username"])
def test_an_option_of_other_clients_says_what_to_write_instead(option: str) -> None:
    options: Any = {option: "ann"}
    with pytest.raises(malamute.SettingError, match=rf"{option}: .*Plain\(user, password\)"):
        malamute.connect_sync("tcp://127.0.0.1:1", **options)


@pytest.mark.moderate
def test_an_inproc_endpoint_without_its_context_says_what_is_missing(
    broker: EmbeddedBroker,
) -> None:
    with pytest.raises(malamute.Timeout, match=r"give connect\(context=broker\.context\)"):
        malamute.connect_sync(broker.endpoint, timeout_ms=50)


async def test_a_stream_that_exists_names_the_settings_that_differ(shell: Any) -> None:
    await shell.do("create_stream", "visits", max_records=5, description="a day")
    with pytest.raises(malamute.BrokerRefused, match=r"exists with other settings: max_records$"):
        await shell.do("create_stream", "visits", max_records=6, description="a day")


async def test_a_key_that_names_something_else_is_named(shell: Any) -> None:
    await shell.do("send", "box", b"one", key=b"order 17")
    with pytest.raises(malamute.BrokerRefused, match="key b'order 17' was taken before"):
        await shell.do("send", "box", b"two", key=b"order 17")


async def test_a_group_that_is_not_there_is_named_with_its_stream(shell: Any) -> None:
    await shell.do("create_stream", "visits")
    with pytest.raises(malamute.BrokerRefused, match="stream 'visits' has no group 'readers'"):
        await shell.do("group_info", "visits", "readers")


async def test_a_request_that_failed_names_its_service(broker: EmbeddedBroker) -> None:
    async with broker.connect(**FAST) as client, client.worker("pricing") as worker:
        asked = asyncio.create_task(failure_of(client.request("pricing", b"1", timeout_ms=None)))
        request = await worker.next()
        assert request is not None
        await request.fail("no such product")
        error = await asked
    assert (error.service, error.why) == ("pricing", "failed: no such product")
    assert str(error) == "service 'pricing' did not answer the request: failed: no such product"


async def failure_of(pending: Any) -> malamute.RequestFailed:
    with pytest.raises(malamute.RequestFailed) as caught:
        await pending
    return caught.value


async def test_a_confirmation_without_an_offset_has_an_empty_id(shell: Any) -> None:
    unconfirmed = await shell.do("publish", "visits", b"1", confirm="none")
    assert unconfirmed.id == b""


async def test_a_step_that_came_again_has_an_empty_id(broker: EmbeddedBroker) -> None:
    async with broker.connect(identity="desk", **FAST) as client:
        for _ in range(2):
            async with client.atomic(key=b"order 17") as step:
                step.publish("orders", b"order")
    assert step.confirmation is not None
    assert step.confirmation.duplicate
    assert step.confirmation.id == b""


async def test_subjects_are_given_in_the_same_way_to_clients_steps_and_transactions(
    shell: Any,
) -> None:
    await shell.do("publish_many", "seen", [b"1", b"2"], subjects=["a", "b"])
    step = shell.client.atomic()
    step.publish_many("seen", [b"3", b"4"], subjects=["c", "d"])
    await shell.call(step.commit)
    transaction = shell.client.transaction()
    await shell.call(transaction.begin)
    await shell.call(transaction.publish_many, "seen", [b"5", b"6"], subjects=["e", "f"])
    await shell.call(transaction.commit)
    records = await shell.take(shell.client.subscribe("seen", start="earliest", until="tail"), 9)
    assert [record.subject for record in records] == list("abcdef")


async def test_a_subject_for_all_and_one_for_each_exclude_one_another(shell: Any) -> None:
    step = shell.client.atomic()
    with pytest.raises(malamute.LocalProtocolError, match="give subject or subjects, not both"):
        step.publish_many("seen", [b"1"], subject="a", subjects=["b"])
    with pytest.raises(malamute.LocalProtocolError, match="2 values in subjects for 1 records"):
        step.publish_many("seen", [b"1"], subjects=["a", "b"])


async def test_a_transaction_that_was_not_entered_says_how_to_open_it(shell: Any) -> None:
    transaction = shell.client.transaction()
    with pytest.raises(malamute.LocalProtocolError, match=r"enter its block, or call begin\(\)"):
        await shell.call(transaction.publish, "seen", b"1")
