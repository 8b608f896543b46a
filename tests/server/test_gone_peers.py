"""Messages of peers that have gone by the time at which the loop takes them up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from malamute_protocol.commands import Ping
from malamute_protocol.framing import encode_message
from tests.server.fakes import Noting
from tests.server.zmtp import Zmtp

MANY = list(encode_message([Ping(1 << 40 | number) for number in range(60)]))


@pytest.fixture
def noting() -> Iterator[Noting]:
    noting = Noting()
    yield noting
    noting.close()


@pytest.fixture
def other(noting: Noting) -> Iterator[Zmtp]:
    """A client whose first command the core has had; it is link 1."""
    with Zmtp(noting.running.endpoint) as other:
        other.send(*encode_message([Ping(1)]))
        noting.turns_until(lambda: noting.counts[1] == 1)
        noting.running.await_libzmq()
        noting.running.loop.turn()
        yield other


def test_what_peers_sent_that_came_and_went_is_dropped_after_the_messages_of_others(
    noting: Noting, other: Zmtp
) -> None:
    """All others waited for 16 s for the commands of 12,000 peers, none of which was there."""
    loop = noting.running.loop
    for _ in range(5):
        with Zmtp(noting.running.endpoint) as gone:
            gone.send(*MANY)
    noting.running.await_libzmq()
    other.send(*encode_message([Ping(2)]))
    noting.running.await_libzmq()
    noting.turns_until(lambda: loop._counters["messages_dropped_total"] == 5)
    assert noting.counts == {1: 2}
    assert loop.peers.numbers() == [1]


def test_what_a_peer_sent_that_is_there_is_done_though_its_connection_cannot_be_told(
    noting: Noting, other: Zmtp
) -> None:
    """It has the descriptor of one that came and went without a message."""
    with Zmtp(noting.running.endpoint):
        pass
    noting.running.await_libzmq()
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*MANY)
        noting.running.await_libzmq()
        other.send(*encode_message([Ping(2)]))
        noting.running.await_libzmq()
        noting.calls.clear()
        noting.turns_until(lambda: noting.counts[2] == 60)
        found = noting.running.loop.peers.get(2)
        assert found is not None
        assert found.connection is None
    assert [link for link, _, _ in noting.calls] == [1, 2], "it waited"
