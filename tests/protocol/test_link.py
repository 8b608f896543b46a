"""Link states: the table is the truth, and the side that breaks it is named."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as c
from malamute_protocol.address import name_fault
from malamute_protocol.errors import LocalProtocolError, RemoteProtocolError
from malamute_protocol.framing import COMMANDS
from malamute_protocol.link import (
    BROKER_COMMANDS,
    CLIENT_COMMANDS,
    TRANSITIONS,
    Link,
    Side,
    State,
)
from malamute_protocol.version import negotiate

HELLO = c.Hello((1, 1), bytes(16))
WELCOME = c.Welcome(1, bytes(16), 1, 1000, 3000, 1, 1, 1, 1, 1)


def states(*links: Link) -> set[State]:
    return {link.state for link in links}


def test_a_link_is_greeted_then_open_then_closed_on_both_sides() -> None:
    client, broker = Link(Side.CLIENT), Link(Side.BROKER)
    client.sent(HELLO)
    broker.received(HELLO)
    assert states(client, broker) == {State.GREETED}
    broker.sent(WELCOME)
    client.received(WELCOME)
    assert states(client, broker) == {State.OPEN}
    client.sent(c.Bye())
    broker.received(c.Bye())
    assert states(client, broker) == {State.CLOSED}


def test_the_side_that_breaks_the_order_is_blamed() -> None:
    link = Link(Side.BROKER)
    with pytest.raises(RemoteProtocolError, match="Publish from the client on a link that is new"):
        link.received(c.Publish("s", 1))
    with pytest.raises(LocalProtocolError, match="Deliver from the broker on a link that is new"):
        link.sent(c.Deliver(1, 0, 1, 1))


def test_subscribing_may_follow_the_hello_but_publishing_waits_for_the_welcome() -> None:
    client = Link(Side.CLIENT)
    client.sent(HELLO)
    client.sent(c.Subscribe(1, "s", ["all"], [0]))
    with pytest.raises(LocalProtocolError):
        client.sent(c.Publish("s", 1))


def test_a_second_hello_is_out_of_order() -> None:
    broker = Link(Side.BROKER)
    broker.received(HELLO)
    with pytest.raises(RemoteProtocolError):
        broker.received(HELLO)
    broker.sent(WELCOME)
    with pytest.raises(RemoteProtocolError):
        broker.received(HELLO)


def test_what_arrives_after_the_end_is_ignored_and_nothing_is_sent() -> None:
    link = Link(Side.BROKER)
    link.sent(c.Bye())
    link.received(c.Publish("s", 1))
    with pytest.raises(LocalProtocolError):
        link.sent(c.Ping())


def test_every_command_has_a_side_and_none_is_left_out() -> None:
    assert set(CLIENT_COMMANDS) | set(BROKER_COMMANDS) == set(COMMANDS.values())
    assert set(CLIENT_COMMANDS) & set(BROKER_COMMANDS) == {c.Ping, c.Pong, c.Bye}
    for sides in TRANSITIONS.values():
        assert set(sides[Side.CLIENT]) <= set(CLIENT_COMMANDS)
        assert set(sides[Side.BROKER]) <= set(BROKER_COMMANDS)


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 3), (2, 5), 3),
        ((1, 1), (2, 3), None),
        ((4, 5), (1, 3), None),
        ((1, 5), (1, 2), 2),
    ],
)
def test_the_highest_common_version_is_chosen(
    ours: tuple[int, int], theirs: tuple[int, int], version: int | None
) -> None:
    assert negotiate(ours, theirs) == negotiate(theirs, ours) == version


def test_reserved_and_odd_names_are_refused_with_the_reason() -> None:
    for name in ("flights", "a.b-c_d:1@host+x=y", "0", "x" * 255):
        assert name_fault(name) == ""
    for name, reason in (
        ("", "empty"),
        ("x" * 256, "at most 255"),
        ("~tmp", "reserved"),
        ("a{eu}", "reserved"),
        ("a b", "made of"),
        ("a/b", "made of"),
        ("é", "made of"),
        (".a", "starts with"),
        ("a\n", "made of"),
    ):
        assert reason in name_fault(name)
