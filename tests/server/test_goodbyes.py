"""The last messages of a client, its goodbye among them, come before its link is told as lost."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import zmq

from malamute_protocol.commands import Ping
from malamute_protocol.framing import encode_message
from malamute_py import Plain
from malamute_py.broker.ready import Send
from malamute_py.client.sync.client import connect_sync
from malamute_py.server.peers import Peer, Unreachable
from malamute_py.telemetry import Limiter
from tests.server.fakes import Noting
from tests.server.test_server import BY_PASSWORD, config, serving, until
from tests.server.zmtp import Zmtp
from tests.waiting import WAIT_S


@pytest.mark.parametrize("told_by", ["monitor", "look"])
def test_an_end_that_is_seen_before_the_last_message_is_told_to_the_core_after_it(
    monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    """A client that said goodbye was told as lost: both came after the poll, the end was seen."""
    noting = Noting()
    loop, [listener] = noting.running.loop, noting.running.listeners
    known: list[int] = []
    """Messages that the core had of the link when it was told of the loss."""

    def lost(link: int, _: int) -> int:
        known.append(noting.counts[link])
        return 0

    monkeypatch.setattr(noting.running.core, "link_lost", lost)
    assert listener.monitor is not None
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*encode_message([Ping(1)]))
        noting.turns_until(lambda: noting.counts[1] == 1)
        [connection] = noting.running.guard.connections.all()
        peer.send(*encode_message([Ping(2)]))
    assert listener.monitor.poll(round(WAIT_S * 1_000)), "the connection has ended"
    noting.running.until(lambda: connection.arrived() is None)
    ready = [(listener.monitor, zmq.POLLIN)] if told_by == "monitor" else []
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_poller", SimpleNamespace(poll=lambda _: ready))
        loop._guard_at_ms = noting.running.guard._some_at_ms = 0
        loop.turn()
    assert noting.running.guard.connections.all() == [], "the end was seen"
    noting.turns_until(lambda: known)
    assert known == [2]
    noting.close()


@pytest.mark.parametrize("seen", [False, True])
def test_a_peer_that_takes_nothing_more_is_told_as_lost_after_what_it_sent_last(
    monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """A reader that said goodbye was told as lost where a delivery to it found it gone.

    seen: the guard has seen the end of its connection.
    """
    noting = Noting()
    loop = noting.running.loop
    known: list[int] = []

    def lost(link: int, _: int) -> int:
        known.append(noting.counts[link])
        return 0

    monkeypatch.setattr(noting.running.core, "link_lost", lost)
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*encode_message([Ping(1)]))
        noting.turns_until(lambda: noting.counts[1] == 1)
        link = loop.peers.get(1)
        assert link is not None
        assert link.connection is not None
        if seen:
            noting.running.guard.cut(link.connection, "it ended")
            loop._inbound.ended.append(link.connection)
        else:
            peer.send(*encode_message([Ping(2)]))

    def put(*_: object) -> bool:
        raise Unreachable

    monkeypatch.setattr(Peer, "put", put)
    loop._send(Send(1, [Ping(3)], ()), 0)
    assert known == [], "its last messages may still come"
    noting.turns_until(lambda: known)
    assert known == [1 if seen else 2]
    loop._send(Send(1, [Ping(4)], ()), 0)
    assert len(known) == 2, "the guard knows of no end that is still to come"
    noting.close()


@pytest.mark.moderate
def test_clients_with_a_credential_that_say_goodbye_are_told_so_whoever_has_their_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next connection had the descriptor: the goodbye was taken for a stranger's."""
    monkeypatch.setattr(Limiter, "allows", lambda *_: True)
    with serving(config(**BY_PASSWORD)) as (_, at, log):

        def come_and_go(times: int) -> None:
            for _ in range(times):
                with connect_sync(at, credential=Plain("ann", "a")) as client:
                    client.publish("s", b"x")

        come_and_go(50)
        until(lambda: len(log.of("link_closed")) >= 50)
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(come_and_go, [10] * 6))
        until(lambda: len(log.of("link_closed")) >= 110)
        ends = Counter((told["happened"], told["code"]) for told in log.of("link_closed"))
        assert ends == {("bye", "closed"): 110}
