"""Messages that a lost link leaves behind are freed in steps, and counted as read at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from malamute_protocol.commands import Ping
from malamute_py.server.peers import FREED_A_TURN, Peer, Peers
from malamute_py.server.waiting import Arrived, Waiting

MESSAGES, FRAMES = 3_000, 2


class Left:
    """Frame that counts how many of its kind are left."""

    count = 0

    def __init__(self) -> None:
        Left.count += 1

    def __del__(self) -> None:
        Left.count -= 1

    def __len__(self) -> int:
        return 9


class Listening:
    """The part of a listener that a link needs."""

    authenticated = False

    def __init__(self, socket: Any) -> None:
        self.socket = socket


def link(peers: Peers, socket: Any) -> Peer:
    """Return a link whose commands wait, and messages after these."""
    listener: Any = Listening(socket)
    peer = peers.add(listener, zmq.Frame(b"\0abcd"))
    connection: Any = SimpleNamespace(
        delivered=0, frames=0, waiting=0, waiting_frames=0, links={peer.number}
    )
    peer.connection = connection
    peer.queued = Waiting()
    for _ in range(MESSAGES):
        peer.queue(Arrived([Left() for _ in range(FRAMES)], 20, FRAMES + 1))
    return peer


NUMBERED, CHOSEN = b"\0abcd", b"web-1"


@pytest.mark.parametrize(
    ("routing_id", "now_there", "revoked", "same"),
    [
        (NUMBERED, "its own", False, True),
        (NUMBERED, "nobody", False, True),
        (NUMBERED, "another", False, True),
        (NUMBERED, "nobody", True, False),
        (NUMBERED, "another", True, False),
        (CHOSEN, "its own", False, True),
        (CHOSEN, "nobody", False, False),
        (CHOSEN, "another", False, False),
    ],
)
def test_last_messages_of_an_authenticated_connection_that_ended_are_its_links(
    monkeypatch: pytest.MonkeyPatch, socket: Any, routing_id: bytes, now_there: str,
    revoked: bool, same: bool,
) -> None:  # fmt: skip
    """Its BYE was taken for a stranger's, and the link that had said it for lost."""
    monkeypatch.setattr("malamute_py.server.peers._descriptor", lambda _: 7)
    monkeypatch.setattr("malamute_py.server.peers._identity", lambda *_: "ann")
    listener: Any = Listening(socket)
    listener.authenticated = True
    own: Any = SimpleNamespace(revoked=revoked)
    there: Any = {"its own": {7: own}, "nobody": {}, "another": {7: SimpleNamespace()}}[now_there]
    peers = Peers(there)
    peer = peers.add(listener, zmq.Frame(routing_id))
    peer.connection = own
    assert peer.strict
    assert peers.is_same(peer, zmq.Frame(routing_id)) is same
    monkeypatch.setattr("malamute_py.server.peers._identity", lambda *_: "bob")
    assert not peers.is_same(peer, zmq.Frame(routing_id)), "another user has claimed the id"
    monkeypatch.setattr("malamute_py.server.peers._identity", lambda *_: "ann")
    monkeypatch.setattr("malamute_py.server.peers._descriptor", lambda _: 8)
    assert not peers.is_same(peer, zmq.Frame(routing_id)), "another connection has claimed the id"


def free_all(peers: Peers) -> None:
    """Free all that was dropped."""
    while peers.freeing:
        peers.free()


@pytest.fixture
def socket() -> Any:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        yield socket


@pytest.mark.parametrize("lost", [True, False])
def test_messages_that_waited_are_freed_in_steps_and_are_unread_no_more_at_once(
    socket: Any, lost: bool
) -> None:
    peers = Peers({})  # type: ignore[arg-type] # No connection is looked for.
    peer = link(peers, socket)
    first = peer.next_queued()
    assert peer.connection is not None
    assert (peer.connection.delivered, peer.connection.frames) == (20, FRAMES + 1)
    del first
    if lost:
        peers.remove(peer.number)
    else:
        peers.drop_queued(peer)
    assert peer.connection.delivered == 20 * MESSAGES
    assert peer.connection.frames == (FRAMES + 1) * MESSAGES
    assert (peer.queued, peer.queued_bytes, peer.queued_parts) == (None, 0, 0)
    turns = 0
    before = Left.count
    assert before == FRAMES * (MESSAGES - 1)
    while peers.freeing:
        peers.free()
        turns += 1
        assert before - Left.count <= FREED_A_TURN, "a turn frees no more"
        before = Left.count
    assert Left.count == 0
    assert turns >= FRAMES * MESSAGES // FREED_A_TURN


def test_what_a_lost_link_was_to_get_or_had_begun_is_freed_in_steps(socket: Any) -> None:
    peers = Peers({})  # type: ignore[arg-type] # No connection is looked for.
    peer = link(peers, socket)
    peers.drop_queued(peer)
    free_all(peers)
    peer.pending.extend([Left()] for _ in range(MESSAGES))
    peer.commands = [Ping(number) for number in range(MESSAGES)]
    peer.frames = [Left() for _ in range(MESSAGES)]
    peers.remove(peer.number)
    assert Left.count == 2 * MESSAGES
    assert (peer.commands, peer.frames, list(peer.pending)) == ([], [], [])
    peers.free()
    assert Left.count >= 2 * MESSAGES - FREED_A_TURN, "a turn frees no more"
    free_all(peers)
    assert Left.count == 0
