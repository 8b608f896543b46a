"""Shares: whoever has the most loses its oldest, and nobody loses for another that has more."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.broker import steps
from malamute_py.changelog import tables
from malamute_py.changelog.shares import Shares
from malamute_py.changelog.tables import KeyRow, Keys
from tests.broker.post import Post
from tests.broker.shell import Shell
from tests.broker.test_producers import opened, publish

owners = st.sampled_from("abcd")
kinds = st.sampled_from(["add", "add", "turn", "turn", "drop", "out", "renew"])
acts = st.lists(st.tuples(kinds, owners, st.integers(0, 9)), max_size=120)


def expected(entries: list[tuple[str, int]]) -> tuple[str, int]:
    """The rule in words of lists: who has most, the one with the older oldest; its oldest."""
    counts = Counter(owner for owner, _ in entries)
    most = max(counts.values())
    return next(entry for entry in entries if counts[entry[0]] == most)


@given(acts)
def test_who_is_next_out_follows_from_the_entries_in_their_order(
    todo: list[tuple[str, str, int]],
) -> None:
    shares: Shares[int] = Shares()
    entries: list[tuple[str, int]] = []
    for act, owner, entry in todo:
        one = owner, entry
        if act == "add":
            shares.add(*one)
            entries += [one] if one not in entries else []
        elif act == "turn" and entries and one not in entries:
            entries.append(one)
            out = expected(entries)
            assert shares.turn(*one) == out[1]
            entries.remove(out)
        elif act == "out" and entries:
            out = shares.next_out()
            assert out == expected(entries)
            shares.drop(*out)
            entries.remove(out)
        elif one in entries and act in ("drop", "renew"):
            entries.remove(one)
            if act == "drop":
                shares.drop(*one)
            else:
                shares.renew(*one)
                entries.append(one)
        assert shares.total == len(entries)
        assert shares.count(owner) == sum(known == owner for known, _ in entries)
        assert shares.oldest(owner, 3) == [n for known, n in entries if known == owner][:3]
    again: Shares[int] = Shares()
    for one in entries:
        again.add(*one)
    while entries:
        out = shares.next_out()
        assert out == again.next_out() == expected(entries)
        shares.drop(*out)
        again.drop(*out)
        entries.remove(out)


def test_the_books_of_shares_stay_as_small_as_what_they_count() -> None:
    draw = random.Random(1)
    shares: Shares[int] = Shares()
    for entry in range(20_000):
        shares.add(draw.choice("abcdefgh"), entry)
        if shares.total > 100:
            shares.drop(*shares.next_out())
    assert shares.total == 100
    held = sum(len(equals.heap) for equals in shares._equals.values())
    assert held <= 2 * 8 + 64 * len(shares._equals)


# --- keys ----------------------------------------------------------------------------------------


def test_keys_of_one_sender_never_push_out_those_of_another() -> None:
    """A flood of one sender used to push out everybody's: one global order."""
    keys = Keys()
    for number in range(3):
        keys.remember(("victim", b"%d" % number), KeyRow(number, 1, 0), 10)
    for number in range(1_000):
        keys.remember(("flood", b"%d" % number), KeyRow(number, 1, 0), 10)
    assert [key for key in keys if key[0] == "victim"] == [
        ("victim", b"0"), ("victim", b"1"), ("victim", b"2"),
    ]  # fmt: skip
    assert [key for sender, key in keys if sender == "flood"] == [
        b"%d" % n for n in range(993, 1000)
    ]


def test_senders_without_an_identity_have_one_share() -> None:
    keys = Keys()
    for number in range(5):
        keys.remember(("named", b"%d" % number), KeyRow(number, 1, 0), 10)
    for number in range(1_000):
        keys.remember((f"~{number:032x}", b"k"), KeyRow(number, 1, 0), 10)
    assert sum(sender == "named" for sender, _ in keys) == 5


@pytest.mark.parametrize("memory", [False, True])
def test_a_retry_is_taken_once_whoever_floods_the_broker_meanwhile(
    monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    monkeypatch.setattr(tables, "KEYS_MAX", 40)
    monkeypatch.setattr(steps, "MEMORY_KEYS_MAX", 40)
    post = Post()
    if memory:
        post.send(1, wire.EditMailbox(1, "box", {"memory": True}))
    first = post.mail(1, "box", [b"a"], key=b"mine")
    for number in range(200):
        post.mail(2, "box", [b"x"], key=b"%d" % number)
    again = post.mail(1, "box", [b"a"], key=b"mine")
    assert (again.duplicate, again.offset) == (True, first.offset)
    assert post.mail(2, "box", [b"x"], key=b"199").duplicate
    assert not post.mail(2, "box", [b"x"], key=b"0").duplicate
    if not memory:
        post.restart()
        assert post.mail(1, "box", [b"a"], key=b"mine").duplicate


# --- producers -----------------------------------------------------------------------------------


def crowd(shell: Shell, link: int, count: int) -> None:
    """So many producers of a link, opened many a message."""
    for first in range(0, count, 50):
        shell.send(link, *[wire.OpenProducer(n) for n in range(first, min(first + 50, count))])


def test_producers_of_one_identity_never_push_out_those_of_another() -> None:
    """Everybody's sequences used to be pushed out by whoever opened producers without end."""
    shell = Shell(producers_max=100)
    shell.hello(1, identity="ann")
    shell.hello(2)
    mine = [opened(shell, 1) for _ in range(10)]
    crowd(shell, 2, 1_000)
    assert shell.broker.gauges["producers"] <= 100
    for number, producer in enumerate(mine):
        publish(shell, 1, producer, 0, b"%d" % number, tracker=number + 1)
    assert len(shell.peers[1].of(wire.Confirm)) == 10
    assert {event.facts["identity"] for event in shell.events
            if event.name == "producers_forgotten"} == {""}  # fmt: skip
    assert shell.broker.counters["producers_forgotten"] > 10


def test_a_producer_that_writes_is_not_forgotten_for_those_that_never_did() -> None:
    shell = Shell(producers_max=100)
    peer = shell.hello(1)
    shell.hello(2)
    busy = opened(shell, 1)
    for sequence in range(10):
        publish(shell, 1, busy, sequence, b"x", tracker=sequence + 1)
        crowd(shell, 2, 100)
    assert len(peer.of(wire.Confirm)) == 10
    assert shell.broker.gauges["producers"] <= 100


def test_more_producers_than_room_was_made_for_wait() -> None:
    shell = Shell(producers_max=20)
    peer = shell.hello(1)
    shell.send(1, *[wire.OpenProducer(n) for n in range(1, 61)])
    refused: list[Any] = peer.of(wire.Refused)
    assert {answer.code for answer in refused} == {"wait"}
    assert len(peer.of(wire.Result)) + len(refused) == 60
    assert shell.broker.gauges["producers"] <= 20


def test_places_are_shared_too() -> None:
    shell = Shell(producer_places_max=12)
    shell.hello(1, identity="ann")
    shell.hello(2)
    content = [
        encode([b"x"], subject="s", producer_id=opened(shell, 2)["id"], first_sequence=0)
        for _ in range(3)
    ]
    tracker = 0
    for frame in content:
        for number in range(4):
            tracker += 1
            shell.send(2, wire.Publish(f"s{number}", tracker), frames=[frame])
    assert len(shell.peers[2].of(wire.Confirm)) == 12
    # An identity that has less than an equal share: another one makes room.
    mine = opened(shell, 1)
    publish(shell, 1, mine, 0, b"a", tracker=1)
    assert shell.peers[1].last(wire.Refused).code == "wait"
    publish(shell, 1, mine, 0, b"a", tracker=2)
    assert shell.peers[1].last(wire.Confirm).tracker == 2
    # An identity that has the most makes room itself, and keeps what it writes with.
    shell.peers[2].commands.clear()
    last = encode([b"x"], subject="s", producer_id=opened(shell, 2)["id"], first_sequence=0)
    for attempt in range(20):
        shell.send(2, wire.Publish(f"t{attempt}", 100 + attempt), frames=[last])
    codes = {answer.code for answer in shell.peers[2].of(wire.Refused)}
    assert codes == {"wait", "limit"}
    publish(shell, 1, mine, 1, b"b", tracker=3)
    assert shell.peers[1].last(wire.Confirm).tracker == 3
