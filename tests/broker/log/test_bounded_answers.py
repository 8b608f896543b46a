"""Answers and MAIL of very much: none has more bytes than a command of the broker may."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from malamute_py.broker.groups import administration
from malamute_py.broker.limits import Namespace
from malamute_py.broker.log import pages
from malamute_py.broker.mail.telling import ALWAYS_NAMED, named_rows
from malamute_py.changelog.tables import Rare
from tests.broker import group_world
from tests.broker.post import Post
from tests.broker.service_world import pair
from tests.broker.shell import Shell
from tests.broker.streams import keyed
from tests.broker.transactions.test_transactions import World as Transactions

BYTES_MAX = DEFAULT_LIMITS.command_frame_bytes_max


def size_of(thing: Any) -> int:
    return len(msgspec.msgpack.encode(thing))


def pages_of(
    ask: Callable[[Any], Any], listed: str, name: Callable[[Any], Any], first: Any, more: str
) -> tuple[list[Any], int]:
    """Names of all entries of a list, and how many pages they were; ask: returns a page."""
    names: list[Any] = []
    count, after = 0, first
    while True:
        value = ask(after)
        assert size_of(value) < BYTES_MAX - 100
        assert value[listed] or not value[more]
        names += map(name, value[listed])
        count += 1
        if not value[more]:
            return names, count
        after = names[-1]


@pytest.mark.moderate
def test_a_page_of_links_with_long_names_is_one_that_a_client_takes() -> None:
    shell = Shell()
    for link in range(1, 1_001):
        identity = f"i{link:0254}"
        shell.hello(link, identity=identity, software="\N{GRINNING FACE}" * 300)
    names, count = pages_of(
        lambda after: shell.send(1, wire.ListLinks(5, after=after)).last(wire.Result).value,
        "links", lambda entry: entry["link"], 0, "more",
    )  # fmt: skip
    assert names == list(range(1, 1_001))
    assert count > 1


def test_a_page_of_users_with_long_permissions_is_one_that_a_client_takes() -> None:
    grant = {"read": ["x" * 250] * 80}
    users = [{"user": f"u{n:03}", "grant": grant, "namespace": ""} for n in range(100)]
    post = Post(users=lambda verb, name: users)
    names, count = pages_of(
        lambda after: post.send(1, wire.ListUsers(5, after=after)).last(wire.Result).value,
        "users", lambda entry: entry["user"], "", "more",
    )  # fmt: skip
    assert names == [user["user"] for user in users]
    assert count > 1


def test_a_page_of_namespaces_with_long_defaults_is_one_that_a_client_takes() -> None:
    default = {"description": "d" * 60_000}
    namespaces = tuple(
        Namespace(
            name=f"n{n:02}", prefix=f"n{n:02}.", default_stream=default, default_mailbox=default,
            default_service=default,
        )
        for n in range(20)
    )  # fmt: skip
    post = Post(namespaces=namespaces)
    names, count = pages_of(
        lambda after: post.send(1, wire.ListNamespaces(5, after)).last(wire.Result).value,
        "namespaces", lambda entry: entry["namespace"], "", "more",
    )  # fmt: skip
    assert names == [namespace.name for namespace in namespaces]
    assert count > 1


@pytest.mark.moderate
def test_a_page_of_transactions_of_many_streams_is_one_that_a_client_takes() -> None:
    world = Transactions()
    streams = ["s" * 250 + f"{n:02}" for n in range(16)]
    ids = [b"%03d" % n for n in range(250)]
    for id in ids:
        world.begin(id=id)
        for place, stream in enumerate(streams):
            world.stage(stream, [b"x"], id, place)
    names, count = pages_of(
        lambda after: world.shell.send(1, wire.ListTransactions(5, after=after))
        .last(wire.Result).value,
        "transactions", lambda entry: entry["transaction"], b"", "more",
    )  # fmt: skip
    assert names == ids
    assert count > 1


def test_a_page_of_long_keys_is_one_that_a_client_takes() -> None:
    """A key has 255 bytes at most unless the configuration says otherwise."""
    limits = Limits(subject_bytes_max=20_000)
    world = keyed.World(limits=limits)
    world.segment_bytes = 1 << 20
    world.send(1, wire.CreateStream(5, "long", {**keyed.KEEP, "ring_bytes": 16 << 20}))
    keys = [f"{n:03}" + "k" * 19_000 for n in range(60)]
    for tracker, key in enumerate(keys, 10):
        content = encode([b""], subject=key, limits=limits)
        world.send(1, wire.Publish("long", tracker), frames=[content])
    names, count = pages_of(
        lambda after: keyed.result(world.send(1, wire.ListKeys(5, "long", ["all"], after))),
        "keys", lambda entry: entry[0], "", "more",
    )  # fmt: skip
    assert names == keys
    assert count > 1


def test_a_page_of_long_settings_is_one_that_a_client_takes() -> None:
    settings = [[f"s{n:02}", "x" * 60_000, "default"] for n in range(30)]
    post = Post(in_force=lambda: {"settings": settings})
    names, count = pages_of(
        lambda after: post.send(1, wire.BrokerInfo(5, after)).last(wire.Result).value,
        "settings", lambda entry: entry[0], "", "settings_more",
    )  # fmt: skip
    assert names == [name for name, _, _ in settings]
    assert count > 1


@pytest.mark.parametrize("name", ["g", "g*"])
def test_a_group_tells_of_as_many_members_as_an_answer_has_room_for(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Their count is that of the entries, for metrics and lists: a page's bound is too low."""
    shell = group_world.world()
    for link in range(2, 32):
        group_world.join(shell, link)

    def told() -> tuple[list[int], int]:
        value = shell.send(1, wire.GroupInfo(5, "s", name)).last(wire.Result).value
        (entry,) = value.get("entries", [value])
        return [member["link"] for member in entry["members"]], size_of(value)

    monkeypatch.setattr(pages, "PAGE_BYTES", 2_000)
    links, size = told()
    assert links == list(range(2, 32))
    most = size - 500 + administration.BESIDE_BYTES
    monkeypatch.setattr(administration, "RESULT_BYTES_MAX", most)
    links, size = told()
    assert links == list(range(2, 2 + len(links)))
    assert 20 < len(links) < 30
    assert size < most


def test_an_answer_that_no_client_would_take_is_refused_and_the_link_goes_on() -> None:
    """One user with permissions of a megabyte ended each link on which it was asked for."""
    users = [{"user": "anna", "grant": {"read": ["x" * 250] * 5_000}, "namespace": ""}]
    post = Post(users=lambda verb, name: users)
    refused = post.send(1, wire.ListUsers(5)).last(wire.Refused)
    assert (refused.command, refused.reference, refused.code) == (91, 5, "too_large")
    assert str(BYTES_MAX) in refused.reason
    assert post.send(1, wire.BrokerInfo(6)).last(wire.Result).request == 6


def test_an_answer_that_no_wire_carries_ends_the_link_that_asked() -> None:
    post = Post(users=lambda verb, name: [{"user": "anna", "grant": 1 << 70}])
    post.planted = True
    assert post.send(1, wire.ListUsers(5)).last(wire.Refused).code == "internal"
    assert post.peers[1].closed
    assert post.send(2, wire.BrokerInfo(6)).last(wire.Result).request == 6


@pytest.mark.moderate
def test_mail_that_answers_very_many_requests_is_divided() -> None:
    """A client ended its link at replies to 8,000 requests with keys of 128 bytes, for ever."""
    world = pair()
    world.offer(2, credit=10_000)
    keys = [b"%0128d" % n for n in range(8_000)]
    for key in keys:
        world.request(1, b"x", key=key)
    world.reply(2, range(8_000))
    mails = {id(letter.mail): letter.mail for letter in world.mail(1)}.values()
    assert all(size_of(mail) < BYTES_MAX - 100 for mail in mails)
    assert [key for mail in mails for key, _, _ in mail.about] == keys
    assert len(world.replies(1)) == 8_000


def test_rows_whose_requests_one_mail_can_name_are_the_first_ones() -> None:
    every = (1 << 10_000) - 1
    one_request = Rare(about=[(b"k" * 128, 0, 10_000)])
    assert named_rows(one_request, every, 10_000) == every
    one_request.expiries = [1] * 10_000  # Every other row may expire before the rest is told.
    assert named_rows(one_request, every, 10_000) == (1 << ALWAYS_NAMED) - 1


@pytest.mark.moderate
def test_answers_that_a_peer_does_not_take_have_the_memory_of_their_bytes() -> None:
    """Ten links that listed streams and read slowly had the broker grow by 900 MiB."""
    shell = Shell()
    for link in (1, 2):
        shell.hello(link)
    for at in range(500):
        shell.send(2, wire.CreateStream(at + 1, f"s{at}", {}))
    shell.broker.receive(1, "", [wire.ListStreams(1, limit=500)], [], shell.now_ms)
    shell.run()
    size = size_of(shell.peers[1].last(wire.Result).value)
    shell.broker.blocked(1)
    tracemalloc.start()
    try:
        commands = [wire.ListStreams(at, limit=500) for at in range(2, 22)]
        shell.broker.receive(1, "", commands, [], shell.now_ms)
        for _ in range(40):
            shell._do(shell.broker.take_ready())
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert shell.broker._links.table[1].results == 20
    assert 20 * size < taken < 21 * size + 200_000
