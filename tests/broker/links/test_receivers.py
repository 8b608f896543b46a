"""Receivers: all kinds share the numbers and the limit of their link."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from malamute_protocol import commands as wire
from tests.broker.post import Post


def use(kind: str, number: int) -> Any:
    """Return the command that opens a receiver of a kind under a number."""
    if kind == "subscription":
        return wire.Subscribe(number, "stream", ["all"], [1], 10, 1000)
    if kind == "inbox":
        return wire.OpenInbox(number, "box", 10, 1000)
    if kind == "offer":
        return wire.Offer(number, "service", ["all"], 10, 1000)
    return wire.JoinGroup(number, "stream", "group", ["all"], "shared", [1], 10, 1000)


KINDS = ("subscription", "inbox", "offer", "membership")


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_a_number_has_one_use_on_a_link(first: str, second: str) -> None:
    post = Post()
    post.send(2, use(first, 5))
    assert len(post.peers[2].of(wire.Subscribed)) == 1
    post.send(2, use(second, 5))
    (refused,) = post.peers[2].of(wire.Refused)
    tag = use(second, 5).__struct_config__.tag
    assert (refused.command, refused.reference, refused.code) == (tag, 5, "subscription_exists")
    assert len(post.peers[2].of(wire.Subscribed)) == 1
    # The receiver with the number goes on; another link may use the number for any kind.
    post.send(3, use(second, 5))
    assert not post.peers[3].of(wire.Refused)
    post.send(2, wire.Unsubscribe(5), use(second, 5))
    assert len(post.peers[2].of(wire.Ended)) == 1
    assert len(post.peers[2].of(wire.Subscribed)) == 2


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_all_kinds_count_together_against_the_limit_of_a_link(first: str, second: str) -> None:
    post = Post(link_subscriptions_max=1)
    post.send(2, use(first, 5), use(second, 6))
    peer = post.peers[2]
    (refused,) = peer.of(wire.Refused)
    tag = use(second, 6).__struct_config__.tag
    assert (refused.command, refused.reference, refused.code) == (tag, 6, "limit")
    assert "at most 1" in refused.reason
    # A receiver that has ended counts no longer, and each link has its own count.
    post.send(2, wire.Unsubscribe(5), use(second, 6))
    assert len(peer.of(wire.Subscribed)) == 2
    post.send(3, use(first, 5))
    assert not post.peers[3].of(wire.Refused)


@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1]])
def test_the_limit_of_a_link_is_the_same_in_any_order(
    kinds: tuple[str, ...],
) -> None:
    post = Post(link_subscriptions_max=4)
    post.send(2, *(use(kind, number) for number, kind in enumerate(kinds, 1)))
    assert not post.peers[2].of(wire.Refused)
    for number, kind in enumerate(kinds, 5):
        post.send(2, use(kind, number))
    assert [refused.code for refused in post.peers[2].of(wire.Refused)] == ["limit"] * 4


@pytest.mark.parametrize(("first", "second"), [*pairwise(KINDS), (KINDS[-1], KINDS[0])])
def test_a_refused_receiver_takes_no_number(first: str, second: str) -> None:
    post = Post(permit=lambda _, action, name: action not in ("read", "receive", "work"))
    post.send(2, use(first, 5), use(second, 5))
    codes = [refused.code for refused in post.peers[2].of(wire.Refused)]
    assert codes == ["forbidden"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_credit_or_an_end_of_an_ended_receiver_is_refused_by_its_number(kind: str) -> None:
    post = Post()
    post.send(2, use(kind, 5), wire.Unsubscribe(5))
    assert post.peers[2].last(wire.Ended).subscription == 5
    post.send(2, wire.Credit(5, 20, 2000), wire.Unsubscribe(5))
    refused = post.peers[2].of(wire.Refused)
    assert [(one.command, one.reference, one.code) for one in refused] == [
        (16, 5, "unknown_subscription"), (14, 5, "unknown_subscription"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_that_ends_leaves_nothing_of_any_kind(kind: str) -> None:
    post = Post()
    post.send(2, *(use(each, number) for number, each in enumerate(KINDS, 1)), use(kind, 5))
    assert len(post.peers[2].of(wire.Subscribed)) == 5
    post.lose(2)
    gauges = post.broker.gauges
    counted = ("subscriptions", "inboxes", "offers", "group_members")
    assert [gauges[name] for name in counted] == [0, 0, 0, 0]
