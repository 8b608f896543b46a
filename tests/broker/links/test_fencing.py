"""Fencing: an identity that was asked for by name belongs to the newest session that asks."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.service_world import LATER_MS, World
from tests.broker.shell import Peer, Shell


def hello(shell: Shell, link: int, identity: str, credential: str, session: int = 0) -> Peer:
    """Send the HELLO of a link with a credential that asks for an identity or for none."""
    name = (session or link).to_bytes(16, "big")
    return shell.send(link, wire.Hello((1, 1), name, identity), identity=credential)


def test_a_second_session_with_an_identity_asked_for_ends_the_first() -> None:
    shell = Shell()
    first = hello(shell, 1, "ann", "ann")
    second = hello(shell, 2, "ann", "ann")
    assert first.last(wire.Bye).code == "fenced"
    assert first.closed
    assert not second.closed
    (event,) = [event for event in shell.events if event.name == "identity_taken"]
    assert event.facts == {"identity": "ann", "link": 1, "by": 2}
    assert shell.broker.counters["links_fenced"] == 1


def test_the_work_of_a_fenced_link_goes_to_the_new_one_or_another() -> None:
    world = World()
    world.client(1)
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.worker(3, "ann")
    world.offer(3)
    world.shell.wait(LATER_MS)
    assert [(task.number, task.work.attempts) for task in world.work(3)] == [(0, 2)]
    assert world.events("worker_died")[0]["happened"] == "fenced"
    world.reply(3, [0])
    assert world.replies(1) == [b"re: 0"]


def test_a_reply_of_a_fenced_link_does_nothing() -> None:
    world = World()
    world.client(1)
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.worker(3, "ann")
    broker, shell = world.shell.broker, world.shell
    content = encode([b"ghost"], subject="r")
    broker.receive(2, "", [wire.Reply(1, [0], 5, True)], [content], shell.now_ms)
    shell.run()
    assert world.replies(1) == []
    assert world.queued() == 1


@pytest.mark.parametrize("credential", ["", "ann"])
def test_many_links_may_have_an_identity_that_none_asked_for(credential: str) -> None:
    shell = Shell()
    peers = [hello(shell, link, "", credential) for link in (1, 2, 3)]
    assert not any(peer.closed for peer in peers)
    assert shell.broker.counters["links_fenced"] == 0


def test_a_link_with_its_credentials_identity_is_not_fenced_by_one_that_asks_for_it() -> None:
    shell = Shell()
    quiet = hello(shell, 1, "", "ann")
    named = hello(shell, 2, "ann", "ann")
    later = hello(shell, 3, "", "ann")
    assert not any(peer.closed for peer in (quiet, named, later))


def test_the_same_session_comes_back_without_a_word_about_its_identity() -> None:
    shell = Shell()
    hello(shell, 1, "ann", "ann", session=7)
    again = hello(shell, 2, "ann", "ann", session=7)
    assert shell.peers[1].last(wire.Bye).reason.startswith("another link of this session")
    assert not again.closed
    assert not [event for event in shell.events if event.name == "identity_taken"]
    assert shell.broker.counters["links_fenced"] == 1


def test_an_identity_is_free_again_when_its_link_has_ended() -> None:
    shell = Shell()
    hello(shell, 1, "ann", "ann")
    shell.broker.link_lost(1, shell.now_ms)
    shell.run()
    assert not hello(shell, 2, "ann", "ann").closed
    assert shell.broker.counters["links_fenced"] == 0


def test_an_identity_that_is_refused_fences_no_link() -> None:
    shell = Shell()
    ann = hello(shell, 1, "ann", "ann")
    assert hello(shell, 2, "ann", "bob").last(wire.Bye).code == "forbidden"
    assert not ann.closed


def test_another_identity_fences_no_link() -> None:
    shell = Shell()
    ann = hello(shell, 1, "ann", "ann")
    assert not hello(shell, 2, "bob", "bob").closed
    assert not ann.closed
