"""Addresses that are turned away: the kernel drops their connection requests, and no others."""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import struct

import pytest

from malamute_py.config import Config
from malamute_py.server.connections.guard import Guard
from malamute_py.server.connections.socket_filters import ADDRESSES_MAX, program, turn_away
from tests.server.fakes import RunningLoop
from tests.waiting import WAIT_S

SYN, ACK = 0x02, 0x10


def takes(code: bytes, source: str, flags: int) -> bool:
    """Whether a filter takes a packet: its instructions, one after the other."""
    address = ipaddress.ip_address(source)
    network = (
        bytes((0x45,)).ljust(12, b"\0") + address.packed
        if address.version == 4
        else bytes((0x60,)).ljust(8, b"\0") + address.packed
    ).ljust(64, b"\0")
    transport = bytes(13) + bytes((flags,)) + bytes(8)
    at = held = 0
    instructions = list(struct.iter_unpack("=HBBI", code))
    while True:
        what, if_true, if_false, number = instructions[at]
        at += 1
        if what in (0x20, 0x30):
            data, place = (network, number - 0xFFF00000) if number >> 31 else (transport, number)
            size = 4 if what == 0x20 else 1
            held = int.from_bytes(data[place : place + size], "big")
        elif what == 0x74:
            held >>= number
        elif what == 0x15:
            at += if_true if held == number else if_false
        elif what == 0x45:
            at += if_true if held & number else if_false
        else:
            assert what == 0x06
            return bool(number)


AWAY = ["10.1.2.3", "2001:db8::7", "127.0.0.2", "2001:db8::8"]


@pytest.mark.parametrize("source", [*AWAY, "10.1.2.4", "2001:db8::9", "2001:db8:1::7", "::1"])
def test_only_connection_requests_of_the_named_addresses_are_dropped(source: str) -> None:
    code = program(AWAY)
    assert takes(code, source, SYN) == (source not in AWAY)
    assert takes(code, source, ACK)


def test_a_filter_of_as_many_addresses_as_there_may_be_jumps_to_the_right_places() -> None:
    away = [f"10.0.0.{n}" for n in range(ADDRESSES_MAX)]
    assert not any(takes(program(away), each, SYN) for each in away)
    assert takes(program(away), "2001:db8::7", SYN)
    assert takes(program([]), "10.0.0.1", SYN)


def asks(peer: socket.socket, address: str, server: socket.socket) -> None:
    """Ask for a connection from an address, without waiting for it."""
    peer.bind((address, 0))
    peer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        peer.connect(server.getsockname())


def next_of(server: socket.socket) -> object:
    """Return the address of the peer that is accepted next."""
    taken, address = server.accept()
    taken.close()
    return address


def is_kept_out(away: socket.socket, address: str, server: socket.socket) -> None:
    """Whether an address asks for a connection and one that asks later is accepted first."""
    asks(away, address, server)
    with socket.create_connection(server.getsockname(), WAIT_S) as other:
        assert next_of(server) == other.getsockname(), "the other asked later, and is first"


def comes_in(away: socket.socket, server: socket.socket) -> None:
    """Whether a peer that was kept out is connected once its kernel has asked again."""
    assert select.select([], [away], [], WAIT_S)[1], "its kernel asks again"
    assert next_of(server) == away.getsockname()


@pytest.mark.moderate
def test_a_peer_that_was_turned_away_comes_in_when_its_address_may() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as away:
        try:
            turn_away(server, ["127.0.0.2"])
        except OSError as error:
            pytest.skip(f"this kernel has no filters of sockets: {error}")
        is_kept_out(away, "127.0.0.2", server)
        turn_away(server, [])
        comes_in(away, server)


@pytest.mark.moderate
def test_the_guard_has_the_listening_sockets_turn_an_address_away_and_back() -> None:
    with RunningLoop(Config(listen=["tcp://127.0.0.1:0"])) as running:
        guard: Guard = running.guard
        running.until(lambda: len(guard.listening._fds) == 1)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as away:
        guard.listening._fds = [server.fileno()]
        guard.left_behind._ended_by_address["127.0.0.2"] = 8
        guard.memory.rss = guard.memory.before + (300 << 20)
        guard.listening.keep_out(guard.left_behind.to_blame())
        assert running.log.of("address_turned_away")[0]["peer"] == "127.0.0.2"
        if running.log.of("filter_refused"):
            pytest.skip("this kernel has no filters of sockets")
        assert running.counters["addresses_turned_away_total"] == 1
        guard.listening.keep_out(guard.left_behind.to_blame())
        assert running.counters["addresses_turned_away_total"] == 1, "it is told of once"
        is_kept_out(away, "127.0.0.2", server)
        guard.left_behind._ended_by_address.clear()
        guard.listening.keep_out(guard.left_behind.to_blame())
        assert guard.listening._turned_away == set()
        comes_in(away, server)


@pytest.mark.moderate
def test_the_kernel_keeps_everybody_out_until_they_may_come_in() -> None:
    with RunningLoop(Config(listen=["tcp://127.0.0.1:0"])) as running:
        guard: Guard = running.guard
        running.until(lambda: len(guard.listening._fds) == 1)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as away:
        guard.listening._fds = [server.fileno()]
        guard.listening.keep_out({"127.0.0.3"}, everybody=True)
        if running.log.of("filter_refused"):
            pytest.skip("this kernel has no filters of sockets")
        assert len(running.log.of("newcomers_turned_away")) == 1
        guard.listening.open()  # The watchdog does so at the end of a long turn.
        asks(away, "127.0.0.2", server)
        assert not select.select([server], [], [], 0.2)[0]
        guard.listening.keep_out(set())
        comes_in(away, server)


def test_no_more_addresses_are_told_of_than_the_kernel_turns_away() -> None:
    with RunningLoop(Config(listen=["tcp://127.0.0.1:0"])) as running:
        guard: Guard = running.guard
        running.until(lambda: len(guard.listening._fds) == 1)
    guard.listening._fds.clear()
    guard.left_behind._ended_by_address.update({f"10.0.0.{n}": 8 for n in range(ADDRESSES_MAX + 8)})
    guard.memory.rss = guard.memory.before + (300 << 20)
    guard.listening.keep_out(guard.left_behind.to_blame())
    assert len(guard.listening._turned_away) == ADDRESSES_MAX
    assert running.counters["addresses_turned_away_total"] == ADDRESSES_MAX


def test_a_kernel_without_filters_is_told_of_once() -> None:
    with RunningLoop(Config(listen=["tcp://127.0.0.1:0"])) as running:
        guard: Guard = running.guard
        running.until(lambda: len(guard.listening._fds) == 1)
    left, right = socket.socketpair()
    left.close()
    guard.listening._fds = [right.detach()]
    socket.close(guard.listening._fds[0])
    guard.left_behind._ended_by_address["127.0.0.2"] = 8
    guard.memory.rss = guard.memory.before + (300 << 20)
    guard.listening.keep_out(guard.left_behind.to_blame())
    guard.left_behind._ended_by_address.clear()
    guard.listening.keep_out(guard.left_behind.to_blame())
    assert len(running.log.of("filter_refused")) == 1
