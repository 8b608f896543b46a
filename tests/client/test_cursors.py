"""Cursors that the broker keeps, through both shells."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_py.client.position import AtTime, FromCursor, Position, start_on_wire


@pytest.fixture(autouse=True)
async def ten_records(shell: Any) -> None:
    await shell.do("publish_many", "s", [b"%d" % n for n in range(10)], subject="a")


async def conflicts(shell: Any, method: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(BrokerRefused) as caught:
        await shell.call(method, *arguments, **options)
    return caught.value.code


async def test_a_cursor_moves_forward_only(shell: Any) -> None:
    cursor = shell.client.cursor("s", "nightly")
    assert (await shell.call(cursor.move, 4)).level == "synced"
    facts = await shell.call(cursor.info)
    assert (facts.stream, facts.cursor, facts.next, facts.lag) == ("s", "nightly", 4, 6)
    assert await conflicts(shell, cursor.move, 4) == "conflict"
    assert await conflicts(shell, cursor.move, 3) == "conflict"
    assert await conflicts(shell, cursor.move, 11) == "bad_start"
    await shell.call(cursor.move, 10)
    assert (await shell.call(cursor.info)).lag == 0


async def test_two_that_read_from_the_same_place_cannot_both_move_it(shell: Any) -> None:
    mine, theirs = (shell.client.cursor("s", "shared") for _ in range(2))
    await shell.call(mine.move, 2, since=0)
    await shell.call(mine.move, 5, since=2)
    assert await conflicts(shell, theirs.move, 7, since=2) == "conflict"
    await shell.call(theirs.move, 7, since=5)
    assert (await shell.call(mine.info)).next == 7


async def test_an_operator_resets_a_cursor_by_offset_and_by_time(shell: Any) -> None:
    cursor = shell.client.cursor("s", "nightly")
    await shell.call(cursor.move, 8)
    assert await shell.call(cursor.reset, 3) == 3
    assert await shell.call(cursor.reset, "latest") == 10
    assert await shell.call(cursor.reset, AtTime(0)) == 0
    assert (await shell.call(cursor.info)).next == 0


async def test_a_cursor_is_not_reset_to_a_place_that_its_stream_does_not_have(shell: Any) -> None:
    cursor = shell.client.cursor("s", "nightly")
    await shell.call(cursor.move, 8)
    for place in (11, Position(b"another stream..", 1, 3)):
        with pytest.raises(LocalProtocolError, match="ends before"):
            await shell.call(cursor.reset, place)
    assert (await shell.call(cursor.info)).next == 8


async def test_a_subscription_starts_where_a_cursor_stands(shell: Any) -> None:
    cursor = shell.client.cursor("s", "nightly")

    async def read(start: Any) -> list[int]:
        subscription = shell.client.subscribe("s", start=start, until="tail")
        return [record.offset for record in await shell.take(subscription, 99)]

    assert await read(FromCursor("nightly")) == list(range(10))
    assert await read(FromCursor("nightly", 7)) == [7, 8, 9]
    await shell.call(cursor.move, 6)
    assert await read(FromCursor("nightly")) == [6, 7, 8, 9]
    with pytest.raises(BrokerRefused) as caught:
        await read(FromCursor("never", None))
    assert caught.value.code == "unknown_cursor"


@pytest.mark.moderate
async def test_a_subscriptions_position_is_where_a_cursor_may_go(shell: Any) -> None:
    subscription = shell.client.subscribe("s", start="earliest")
    await shell.take(subscription, 3)
    cursor = shell.client.cursor("s", "nightly")
    await shell.call(cursor.move, subscription.position)
    assert (await shell.call(cursor.info)).next == 3
    another = subscription.position._replace(stream=b"x" * 16, next=5)
    assert await conflicts(shell, cursor.move, another) == "conflict"


@pytest.mark.moderate
async def test_a_cursor_is_edited_before_it_was_ever_moved_and_removed(shell: Any) -> None:
    cursor = shell.client.cursor("s", "keeper")
    facts = await shell.call(cursor.edit, {"pin": True}, start=5, description="nightly load")
    assert (facts.next, facts.pinned) == (5, True)
    assert facts.settings["description"] == "nightly load"
    facts = await shell.call(cursor.edit, pin=False)
    assert (facts.next, facts.pinned) == (5, False)
    await shell.call(cursor.remove)
    assert await conflicts(shell, cursor.info) == "unknown_cursor"


async def test_a_cursor_of_a_stream_in_memory_is_moved_too(shell: Any) -> None:
    await shell.do("create_stream", "quick", memory=True)
    await shell.do("publish_many", "quick", [b"x"] * 5)
    cursor = shell.client.cursor("quick", "reader")
    assert (await shell.call(cursor.move, 3)).level == "none"
    assert (await shell.call(cursor.info)).next == 3


def test_a_start_at_a_cursor_names_another_start() -> None:
    assert start_on_wire(FromCursor("c")) == [7, "c", [0]]
    assert start_on_wire(FromCursor("c", "latest")) == [7, "c", [1]]
    assert start_on_wire(FromCursor("c", None)) == [7, "c"]
