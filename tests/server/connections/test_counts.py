"""How many connections an address or a user may have."""

from __future__ import annotations

from malamute_py.config import LinksSection
from malamute_py.server.connections.connection import Connection
from malamute_py.server.connections.counts import Connections


def test_a_connection_too_many_of_its_user_stays_too_many_however_often_it_speaks() -> None:
    """A second HELLO over it opened the link that the first one was refused."""
    connections = Connections(LinksSection(user_connections_max=1), 10)
    first, second = (Connection(fd, fd, True, "10.0.0.1", 0, 0) for fd in (7, 8))
    for each in (first, second):
        connections.add(each)
    assert connections.note_first_message(first, "ann")
    assert not connections.note_first_message(second, "ann")
    assert not connections.note_first_message(second, "ann")
    assert connections.note_first_message(first, "ann"), "it was there before"
