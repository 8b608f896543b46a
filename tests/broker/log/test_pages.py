"""Pages of streams, mailboxes, services, cursors, groups, keys and requests: over several turns.

With a meter, which counts how often it was asked, a turn looks at about as many names as its share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.limits import DEFAULT_LIMITS
from malamute_py.broker.log import pages
from malamute_py.broker.streams import key_commands
from tests.broker.shell import Shell
from tests.broker.sliced import Sliced

ALL, FEW = 1, 2
"""Links of a user who may be told everything, and of one who may be told of names that end in 7."""


class Kind(NamedTuple):
    """How a test makes one kind of thing, and asks for a page of them."""

    make: Callable[[int, str, dict[str, Any]], list[wire.Command]]
    page: Callable[..., wire.Command]
    place: Callable[[dict[str, Any]], str]
    listed: str = "entries"


def of_streams(request: int, after: str = "", limit: int = 1_000) -> wire.Command:
    return wire.ListStreams(request, "x", after, limit)


def of_mailboxes(request: int, after: str = "", limit: int = 1_000) -> wire.Command:
    return wire.MailboxInfo(request, "x*", after, limit)


def of_services(request: int, after: str = "", limit: int = 1_000) -> wire.Command:
    return wire.ServiceInfo(request, "x*", after, limit)


def of_cursors(request: int, after: str = "", limit: int = 1_000) -> wire.Command:
    return wire.CursorInfo(request, "", "c*", after, limit)


def of_groups(request: int, after: str = "", limit: int = 1_000) -> wire.Command:
    return wire.GroupInfo(request, "", "g*", after, limit)


KINDS = {
    "streams": Kind(
        lambda n, name, _: [wire.CreateStream(n, name)],
        of_streams, lambda entry: str(entry["name"]), "streams",
    ),
    "mailboxes": Kind(
        lambda n, name, settings: [wire.EditMailbox(n, name, settings)],
        of_mailboxes, lambda entry: str(entry["name"]),
    ),
    "services": Kind(
        lambda n, name, settings: [wire.EditService(n, name, settings)],
        of_services, lambda entry: str(entry["name"]),
    ),
    "cursors": Kind(
        lambda n, name, settings: [
            wire.CreateStream(n, name), wire.EditCursor(n + 100, name, "c", settings)
        ],
        of_cursors, lambda entry: f"{entry['stream']}/{entry['cursor']}",
    ),
    "groups": Kind(
        lambda n, name, settings: [
            wire.CreateStream(n, name),
            wire.JoinGroup(n, name, "g", ["all"], credit_records=1, settings=settings),
        ],
        of_groups, lambda entry: f"{entry['stream']}/{entry['group']}",
    ),
}  # fmt: skip


class World:
    """Thirty things of a kind, and a link of each user; a turn looks at three names."""

    def __init__(self, kind: str, count: int = 30, **settings: Any) -> None:
        self.kind = KINDS[kind]
        self.erring = ""
        self.looked = 0
        self.shell = Shell(permit=self.permit, **settings)
        self.shell.hello(ALL, identity="all")
        self.shell.hello(FEW, identity="few")
        for number in range(count):
            self.make(number + 1, f"x{number:02}")

    def permit(self, owner: str, action: str, name: str) -> bool:
        if owner == "few" and name:  # Those who ask for all streams are asked about none.
            self.looked += 1
            if name == self.erring:
                raise IndexError("planted")
        return owner == "all" or action == "identity" or name.endswith("7")

    def make(self, number: int, name: str, **settings: Any) -> None:
        for command in self.kind.make(number, name, settings):
            self.shell.send(ALL, command)

    def page(self, link: int, request: int, *place: Any) -> tuple[list[str], bool]:
        """Names (of cursors and groups: the streams) of a page, and whether there are more."""
        value = self.answer(link, self.kind.page(request, *place))
        entries = value[self.kind.listed]
        return [self.kind.place(entry).partition("/")[0] for entry in entries], value["more"]

    def answer(self, link: int, command: wire.Command) -> Any:
        return self.shell.send(link, command).last(wire.Result).value

    def results(self, link: int) -> list[int]:
        return [result.request for result in self.shell.peers[link].of(wire.Result)]

    def turn(self) -> None:
        self.shell._do(self.shell.broker.take_ready())

    def receive(self, link: int, *commands: wire.Command) -> None:
        self.shell.broker.receive(link, "", commands, [], self.shell.now_ms)

    def queries(self, link: int) -> int:
        found = self.shell.broker._links.table[link]
        return found.queries


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(pages, "PIECE_NAMES", 3)
    return World(request.param)


def test_a_page_is_found_in_bounded_pieces_and_tells_of_what_the_caller_may_see(
    world: World,
) -> None:
    """A user who may read few of 100,000 streams had the broker look at all in one turn."""
    before = len(world.shell.readies)
    assert world.page(FEW, 501, "", 2) == (["x07", "x17"], True)
    assert len(world.shell.readies) - before > 6
    last = world.kind.place(world.answer(FEW, world.kind.page(502, "", 2))[world.kind.listed][-1])
    assert world.page(FEW, 503, last, 2) == (["x27"], False)
    # Two further names follow, of which the caller may not be told.
    assert world.page(FEW, 504, "", 3) == (["x07", "x17", "x27"], False)
    assert world.page(ALL, 505, "", 30) == ([f"x{number:02}" for number in range(30)], False)
    assert world.queries(FEW) == 0


def test_many_pages_asked_for_at_once_take_many_turns(world: World) -> None:
    world.looked = 0
    world.receive(FEW, *(world.kind.page(request) for request in range(501, 511)))
    assert world.looked == 0
    world.turn()
    # Three permissions are asked for, of three names.
    assert 0 < world.looked <= 9
    world.shell.run()
    assert set(world.results(FEW)) >= set(range(501, 511))


def test_a_link_that_asks_for_many_pages_does_not_hold_up_another(world: World) -> None:
    world.receive(FEW, *(world.kind.page(request) for request in range(501, 600)))
    world.receive(ALL, world.kind.page(600, "", 1))
    for _ in range(5):
        world.turn()
    assert 600 in world.results(ALL)
    assert 599 not in world.results(FEW)
    world.shell.run()


def test_a_link_has_a_bound_of_pages_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("streams", 10, link_queries_max=2)
    peer = world.shell.send(FEW, *(of_streams(request) for request in (501, 502, 503)))
    assert [refused.code for refused in peer.of(wire.Refused)] == ["wait"]
    assert set(world.results(FEW)) >= {501, 502}
    assert world.page(FEW, 504) == (["x07"], False)


@pytest.mark.moderate
def test_pages_for_a_peer_that_does_not_read_have_a_bound(world: World) -> None:
    """Pages that were asked for in one message were kept for it by the thousand."""
    world.shell.broker.blocked(ALL)
    world.receive(ALL, *(world.kind.page(request) for request in range(501, 801)))
    while world.shell.broker.has_work:
        world.turn()
    link = world.shell.broker._links.table[ALL]
    assert link.results == world.shell.broker._shard.settings.link_results_max == 256
    assert link.queries == 0
    refused = [command for command in link.out if isinstance(command, wire.Refused)]
    assert [command.code for command in refused] == ["wait"] * 44


def test_a_page_of_a_link_that_has_ended_is_dropped(world: World) -> None:
    link = world.shell.broker._links.table[FEW]
    world.receive(FEW, world.kind.page(501))
    world.turn()
    assert link.queries == 1
    world.shell.broker.link_lost(FEW, world.shell.now_ms)
    looked = world.looked
    world.shell.run()
    assert (link.queries, world.looked) == (0, looked)
    assert 501 not in world.results(FEW)
    assert not world.shell.broker.has_work


def test_an_error_in_a_later_piece_of_a_page_ends_the_link_that_asked(world: World) -> None:
    """An error in a page of mailboxes ended the broker."""
    world.shell.planted = True
    world.erring = "x05"
    link = world.shell.broker._links.table[FEW]
    peer = world.shell.send(FEW, world.kind.page(501))
    refused = peer.last(wire.Refused)
    assert (refused.code, refused.reference) == ("internal", 501)
    assert peer.closed
    assert link.queries == 0
    assert world.page(ALL, 502, "", 1) == (["x00"], True)


@pytest.mark.parametrize("kind", ["mailboxes", "services", "cursors", "groups"])
def test_a_page_has_no_more_bytes_than_a_command_may(kind: str) -> None:
    """A client ended its link at a page of 20 services whose descriptions have 60 KB each."""
    world = World(kind, count=0)
    for number in range(20):
        world.make(number + 1, f"x{number:02}", description="d" * 60_000)
    found: list[str] = []
    after, more = "", True
    while more:
        value = world.answer(ALL, world.kind.page(500 + len(found), after))
        assert len(msgspec.msgpack.encode(value)) < DEFAULT_LIMITS.command_frame_bytes_max
        found += map(world.kind.place, value["entries"])
        after, more = found[-1], value["more"]
    assert len(found) == 20


# --- keys and requests, by the time that a turn has for them ----------------------------


class Keys(Sliced):
    """Thirty keys of one stream, and two links; a turn has the time to look at a few of them."""

    COUNT = 30

    def __init__(self, **settings: Any) -> None:
        super().__init__(SHARE, **settings)
        self.hello(ALL)
        self.hello(FEW)
        self.make()

    def make(self) -> None:
        keep = {"keep": "last-per-subject", "ring_bytes": 1 << 20}
        self.send(ALL, wire.CreateStream(1, "s", keep))
        for number in range(self.COUNT):
            content = encode([b"v"], subject=f"k{number:02}")
            self.send(ALL, wire.Publish("s", 100 + number), frames=[content])

    def ask(self, request: int, limit: int = 1_000) -> wire.Command:
        return wire.ListKeys(request, "s", ["all"], "", limit)

    def numbers(self, value: Any) -> list[int]:
        return [int(key[1:]) for key, _ in value["keys"]]

    def receive(self, link: int, *commands: wire.Command) -> None:
        self.broker.receive(link, "", commands, [], self.now_ms)

    def one_turn(self) -> int:
        """One turn of the loop; returns how often the meter was asked in it."""
        before = self.asked()
        self.turn()
        return self.asked() - before

    def results(self, link: int) -> dict[int, Any]:
        """Values of the answers by request, in the order in which they came."""
        return {
            result.request: result.value
            for result in self.peers[link].of(wire.Result) if result.request > 500
        }  # fmt: skip

    def asked_by(self, link: int) -> int:
        found = self.broker._links.table[link]
        return found.queries


class Requests(Keys):
    """Thirty requests of one service, in batches of several."""

    def make(self) -> None:
        for number in range(0, self.COUNT, 6):
            content = encode([b"x"] * 6, subject="x")
            self.send(ALL, wire.Request("s", number + 1), frames=[content])

    def ask(self, request: int, limit: int = 1_000) -> wire.Command:
        return wire.PeekRequests(request, "s", -1, limit)

    def numbers(self, value: Any) -> list[int]:
        assert list(value) == ["requests", "more"]
        return [entry["number"] for entry in value["requests"]]


SHARE = 5
"""Names that a turn has the time for, about."""
LISTS = {"keys": Keys, "requests": Requests}


@pytest.fixture(params=LISTS)
def kind(request: pytest.FixtureRequest) -> type[Keys]:
    return LISTS[request.param]


def test_a_list_is_looked_at_by_the_time_of_a_turn_and_its_answers_come_in_order(
    kind: type[Keys],
) -> None:
    """A message of 64 LIST_KEYS or PEEK_REQUESTS held the loop for 0.3 s and more."""
    lists = kind()
    wanted = range(501, 565)
    lists.receive(ALL, *map(lists.ask, wanted))
    assert not lists.results(ALL)
    assert lists.asked_by(ALL) == len(wanted)
    turns = 0
    while lists.asked_by(ALL):
        assert lists.one_turn() <= 2 * SHARE + 2
        turns += 1
    lists.run()
    assert turns >= len(wanted) * lists.COUNT // (SHARE + 1)
    assert list(lists.results(ALL)) == list(wanted)
    for value in lists.results(ALL).values():
        assert (lists.numbers(value), value["more"]) == (list(range(lists.COUNT)), False)


def test_a_link_that_asks_for_many_lists_does_not_hold_up_another(kind: type[Keys]) -> None:
    lists = kind()
    lists.receive(FEW, *map(lists.ask, range(501, 565)))
    lists.receive(ALL, lists.ask(600, 2))
    for _ in range(4):
        lists.one_turn()
    assert (lists.numbers(lists.results(ALL)[600]), lists.results(FEW)) == ([0, 1], {})


def test_a_link_has_a_bound_of_lists_that_wait(kind: type[Keys]) -> None:
    lists = kind(link_queries_max=2)
    peer = lists.send(ALL, *map(lists.ask, (501, 502, 503)))
    assert [refused.code for refused in peer.of(wire.Refused)] == ["wait"]
    assert list(lists.results(ALL)) == [501, 502]
    assert lists.asked_by(ALL) == 0


def test_a_list_of_a_link_that_has_ended_is_dropped(kind: type[Keys]) -> None:
    lists = kind()
    link = lists.broker._links.table[FEW]
    lists.receive(FEW, lists.ask(501), lists.ask(502))
    lists.one_turn()
    assert link.queries == 2
    lists.broker.link_lost(FEW, lists.now_ms)
    lists.run()
    assert (link.queries, lists.results(FEW), lists.broker.has_work) == (0, {}, False)


def test_an_error_in_a_later_piece_of_a_list_ends_the_link_that_asked(
    kind: type[Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = kind()
    lists.planted = True
    link = lists.broker._links.table[FEW]
    lists.receive(FEW, lists.ask(501), lists.ask(502))
    lists.one_turn()
    with monkeypatch.context() as patch:
        patch.setattr(pages.Entries, "add", lambda *_: 1 // 0)
        lists.one_turn()
    lists.run()
    refused = lists.peers[FEW].last(wire.Refused)
    assert (refused.code, refused.reference) == ("internal", 501)
    assert (lists.peers[FEW].closed, link.queries) == (True, 0)
    lists.send(ALL, lists.ask(503, 1))
    assert lists.numbers(lists.results(ALL)[503]) == [0]


def test_keys_that_change_while_they_are_listed_are_told_as_they_are_then() -> None:
    lists = Keys()
    lists.receive(ALL, lists.ask(501))
    lists.one_turn()
    for key in ("k000", "k25x"):  # The first one comes where the page has looked already.
        content = encode([b"v"], subject=key)
        lists.broker.receive(ALL, "", [wire.Publish("s", 200)], [content], lists.now_ms)
    lists.run()
    names = [key for key, _ in lists.results(ALL)[501]["keys"]]
    assert "k000" not in names
    assert names[24:28] == ["k24", "k25", "k25x", "k26"]


@pytest.mark.parametrize("limit", [0, 1_000])
def test_a_page_of_keys_looks_at_a_bounded_number_over_all_its_turns(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(key_commands, "LOOKED_AT", 12)
    lists = Keys()
    peer = lists.send(ALL, wire.ListKeys(501, "s", ["topic", "*"], "", limit))
    value = peer.last(wire.Result).value
    assert list(value) == ["keys", "after", "more"]
    assert (lists.numbers(value), value["after"], value["more"]) == (list(range(12)), "k11", True)
    value = lists.send(ALL, wire.ListKeys(502, "s", ["all"], "k17")).last(wire.Result).value
    assert (lists.numbers(value), value["after"], value["more"]) == (
        list(range(18, 30)), "k29", False
    )  # fmt: skip
