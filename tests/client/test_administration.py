"""Asking about and editing mailboxes, services, cursors and groups, in both shells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from malamute_protocol.commands import ListLinks
from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_protocol.pattern import PatternError
from malamute_protocol.stamp import message_id
from malamute_py.client.aio.client import Client
from malamute_py.client.facts import CursorFacts, GroupFacts, MailboxFacts, place_of
from malamute_py.client.position import AfterMessage, AtTime, FromCursor, Position
from tests.waiting import WAIT_S


@pytest.fixture
def identity() -> str:
    return "op"


async def stepped(shell: Any, *parts: tuple[Any, ...]) -> Any:
    """Return the confirm of one step that is made of these calls."""
    step = shell.client.atomic()
    for verb, *arguments in parts:
        getattr(step, verb)(*arguments)
    return await shell.call(step.commit)


async def refused(shell: Any, code: str, verb: str, *arguments: Any) -> None:
    with pytest.raises(BrokerRefused) as caught:
        await shell.do(verb, *arguments)
    assert caught.value.code == code


async def test_a_mailbox_tells_what_lies_in_it_and_how_it_is_set(shell: Any) -> None:
    made = await shell.do("edit_mailbox", "desk", {"max_messages": 10}, description="front")
    assert isinstance(made, MailboxFacts)
    assert made.settings["max_messages"] == 10
    await stepped(shell, *(("send", "desk", b"body %d" % n) for n in range(3)))
    facts = await shell.do("mailbox_info", "desk")
    assert (facts.name, facts.messages, facts.readers, facts.held) == ("desk", 3, 0, 0)
    assert facts.bytes > 0
    assert facts.oldest_ms > 0
    assert facts.settings["description"] == "front"
    await refused(shell, "bad_setting", "edit_mailbox", "desk", {"max_massages": 1})


async def test_mailboxes_are_listed_by_name_and_page_by_page(shell: Any) -> None:
    for n in range(5):
        await shell.do("edit_mailbox", f"box-{n}")
    await shell.do("edit_mailbox", "other")
    assert [facts.name for facts in await shell.do("list_mailboxes", "box-")] == [
        f"box-{n}" for n in range(5)
    ]
    assert len(await shell.do("list_mailboxes")) == 6


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_listing_ends_where_the_caller_has_enough(shell: Any, limit: int) -> None:
    for n in range(4):
        await shell.do("create_stream", f"s-{n}")
        await shell.do("edit_mailbox", f"box-{n}")
        await shell.do("edit_service", f"work-{n}")
        await shell.call(shell.client.cursor(f"s-{n}", "c").move, 0)
    for name in ("list_streams", "list_mailboxes", "list_services", "list_cursors"):
        some = await shell.do(name, limit=limit)
        assert some == (await shell.do(name))[:limit], name
        assert len(some) == limit


class Pages:
    """A link to a broker that tells three links, in pages of two."""

    def __init__(self, *, earlier: bool = False) -> None:
        """earlier: the broker is of a version that ignores `after`."""
        self.asked: list[tuple[int, int]] = []
        self._earlier = earlier

    async def ask(self, make: Callable[[int], Any]) -> dict[str, Any]:
        command = make(1)
        assert isinstance(command, ListLinks)
        self.asked.append((command.limit, command.after))
        left = [{"link": n} for n in (3, 7, 8) if self._earlier or n > command.after]
        return {"links": left[:2], "more": len(left) > 2}


@pytest.mark.parametrize(
    ("earlier", "limit", "told", "asked"),
    [
        (False, 0, [3, 7, 8], [(1000, 0), (1000, 7)]),
        (False, 3, [3, 7, 8], [(3, 0), (3, 7)]),
        (False, 2, [3, 7], [(2, 0)]),
        (True, 0, [3, 7], [(1000, 0), (1000, 7)]),
    ],
)
async def test_links_are_asked_for_page_by_page_until_there_are_no_more(
    earlier: bool, limit: int, told: list[int], asked: list[tuple[int, int]]
) -> None:
    client = object.__new__(Client)
    pages = client._link = Pages(earlier=earlier)  # type: ignore[assignment]
    assert [each.link for each in await client.list_links(limit)] == told
    assert pages.asked == asked


async def test_peeking_takes_nothing_and_purging_takes_all(shell: Any) -> None:
    step = shell.client.atomic()
    for n in range(3):
        step.send("desk", b"body %d" % n, subject="a.b", fields={"n": str(n)}, priority=n)
    await shell.call(step.commit)
    for _ in range(2):
        seen = await shell.do("peek", "desk", body_bytes=4)
        assert [bytes(message.body) for message in seen] == [b"body"] * 3
    assert [message.number for message in seen] == sorted(message.number for message in seen)
    assert (seen[0].sender, seen[0].subject, seen[0].fields) == ("op", "a.b", {"n": "0"})
    assert [message.bytes for message in seen] == [6, 6, 6]
    assert {message.held for message in seen} == {False}
    later = await shell.do("peek", "desk", after=seen[0].number)
    assert [message.number for message in later] == [message.number for message in seen[1:]]
    purged = await shell.do("purge_mailbox", "desk")
    assert (purged.count, purged.held) == (3, 0)
    assert await shell.do("peek", "desk") == []


async def test_a_mailbox_that_was_removed_is_unknown(shell: Any) -> None:
    await stepped(shell, ("send", "desk", b"x"))
    assert await shell.do("remove_mailbox", "desk") == 1
    for verb in ("mailbox_info", "peek", "remove_mailbox", "purge_mailbox"):
        await refused(shell, "unknown_mailbox", verb, "desk")


@pytest.mark.parametrize(
    "asked",
    [
        ("mailbox_info", "des*"),
        ("service_info", "*"),
        ("group_info", "", "g"),
    ],
)
async def test_what_names_no_single_thing_has_no_facts(shell: Any, asked: tuple[str, ...]) -> None:
    await stepped(shell, ("send", "desk", b"x"))
    with pytest.raises(LocalProtocolError, match="bad_name"):
        await shell.do(*asked)


async def test_a_service_tells_what_waits_and_how_it_is_set(shell: Any) -> None:
    made = await shell.do("edit_service", "resize", attempts_max=3)
    assert made.settings["attempts_max"] == 3
    await stepped(shell, *(("request", "resize", b"picture %d" % n) for n in range(4)))
    facts = await shell.do("service_info", "resize")
    assert (facts.name, facts.waiting, facts.held, facts.offers) == ("resize", 4, 0, 0)
    assert facts.dead_letters == "resize.dead"
    assert facts.workers == []
    assert [facts.name for facts in await shell.do("list_services", "re")] == ["resize"]
    await refused(shell, "unknown_request", "requeue", "resize")
    assert await shell.do("remove_service", "resize") == 4
    await refused(shell, "unknown_service", "service_info", "resize")


async def test_cursors_of_several_streams_are_listed_by_stream_and_name(shell: Any) -> None:
    for stream in ("a", "b"):
        await shell.do("publish_many", stream, [b"x"] * 10)
        for name in ("late", "nightly"):
            await shell.call(shell.client.cursor(stream, name).move, 4)
    found = await shell.do("list_cursors")
    assert [place_of(facts) for facts in found] == ["a/late", "a/nightly", "b/late", "b/nightly"]
    assert {(facts.next, facts.tail, facts.lag) for facts in found} == {(4, 10, 6)}
    assert [place_of(facts) for facts in await shell.do("list_cursors", "b", "n")] == ["b/nightly"]
    assert isinstance(await shell.do("cursor_info", "a", "late"), CursorFacts)
    await refused(shell, "unknown_cursor", "cursor_info", "a", "never")


async def test_groups_are_listed_and_removed_once_nobody_is_in_them(shell: Any) -> None:
    await shell.do("publish_many", "s", [b"x"] * 10)
    member = shell.client.group("s", "readers", start="earliest", kind="keyed")
    await shell.call(member.accepted)
    [facts] = await shell.do("list_groups")
    assert isinstance(facts, GroupFacts)
    assert (facts.stream, facts.group, facts.kind) == ("s", "readers", "keyed")
    assert [each.identity for each in facts.members] == ["op"]
    await refused(shell, "in_use", "remove_group", "s", "readers")
    await shell.call(member.close)
    async with asyncio.timeout(WAIT_S):
        while (await shell.do("group_info", "s", "readers")).members:  # noqa: ASYNC110 - the broker tells no one
            await asyncio.sleep(0)
    await shell.do("remove_group", "s", "readers")
    await refused(shell, "unknown_group", "group_info", "s", "readers")
    assert await shell.do("list_groups", "s") == []


async def test_a_stream_is_trimmed_by_offset_position_time_and_cursor_and_within_a_step(
    shell: Any,
) -> None:
    await shell.do("publish_many", "log", [b"%d" % n for n in range(10)])
    assert await shell.do("trim", "log", 2) == 2
    info = await shell.do("stream_info", "log")
    assert (info.first, info.trimmed) == (2, 2)
    assert await shell.do("trim", "log", Position(info.uuid, info.epoch, 3)) == 3
    await refused(shell, "conflict", "trim", "log", Position(b"x" * 16, info.epoch, 4))
    await refused(shell, "bad_start", "trim", "log", 11)
    assert await shell.do("trim", "log", AtTime(1)) == 3
    await stepped(shell, ("move_cursor", "log", "c", 5), ("trim", "log", 4))
    assert (await shell.do("stream_info", "log")).first == 4
    assert await shell.do("trim", "log", FromCursor("c")) == 5
    with pytest.raises(LocalProtocolError, match="ends before"):
        await shell.do("trim", "log", FromCursor("none", AfterMessage(message_id(1, 99))))
    assert await shell.do("trim", "log", "latest") == 10
    assert (await shell.do("stream_info", "log")).records == 0


async def test_a_broker_reads_its_configuration_anew(shell: Any) -> None:
    assert await shell.do("reload_config") == []


@pytest.mark.moderate
async def test_records_are_purged_by_subject_until_now_and_within_a_step(shell: Any) -> None:
    for subject in ("bob", "ann", "bob", "eve"):
        await shell.do("publish", "log", b"x", subject=subject)
    assert await shell.do("purge", "log", "bob") == 4
    assert (await shell.do("stream_info", "log")).purges == [(["topic", "bob"], 4)]
    await stepped(shell, ("purge", "log", ["prefix", "e"], 4), ("purge", "log", "ann", 1))
    assert len((await shell.do("stream_info", "log")).purges) == 3
    await refused(shell, "bad_pattern", "purge", "log", ["fields", "all", [["a"]]])
    with pytest.raises(PatternError, match="every subject is asked for as '#'"):
        await shell.do("purge", "log", "")
    assert len((await shell.do("stream_info", "log")).purges) == 3
    await shell.do("publish", "log", b"new", subject="bob")
    assert await shell.do("trim", "log", 4) == 4
    assert (await shell.do("stream_info", "log")).purges == []
