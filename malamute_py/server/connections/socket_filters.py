"""Socket filters: what the kernel drops before libzmq receives it.

Owns the filters of listening sockets and of connections. libzmq accepts each peer that connects,
and what the peer sends right after its handshake is in libzmq's memory before the loop can cut the
connection. So an address that has filled the memory is kept out earlier: its SYN is dropped, and
its kernel tries again a second later. A connection that is held back loses nothing either: its
peer's kernel sends again what was dropped, later each time. Source: ARCHITECTURE.md, "What a peer
may cost"; socket(7), SO_ATTACH_FILTER; the documentation of Linux, networking/filter.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Iterable

ADDRESSES_MAX = 32
"""Addresses that a filter may name, so that its jumps stay short."""

_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_LOAD_WORD, _LOAD_BYTE, _SHIFT_RIGHT, _IF_EQUAL, _IF_SET, _RETURN = (
    0x20, 0x30, 0x74, 0x15, 0x45, 0x06,
)  # fmt: skip
_INSTRUCTION = struct.Struct("=HBBI")
"""struct sock_filter: code, jump if true, jump if false, number."""
_PROGRAM = struct.Struct("@HP")
"""struct sock_fprog: how many instructions, and where they are."""
_NETWORK = 0xFFF00000
"""SKF_NET_OFF: where the header of IP begins; the filter sees the packet from TCP's on."""
_FLAGS_AT, _SYN = 13, 0x02
_SOURCE_AT, _SOURCE6_AT = 12, 8
_TAKE, _DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)


def program(addresses: Iterable[str]) -> bytes:
    """Make a filter for a listening socket: it drops connection requests from these addresses only.

    A filter is a list of instructions of classic BPF, which the kernel runs for each packet, each
    (code, jump if true, jump if false, number). The jumps of a test (_IF_...) say how many
    instructions to pass over; an address is compared in words of 4 bytes.
    """
    found = [ipaddress.ip_address(address) for address in addresses]
    four = [(_LOAD_WORD, 0, 0, _NETWORK + _SOURCE_AT)]  # for packets of IPv4
    six = []  # for packets of IPv6
    for address in found:
        words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
        if len(words) == 1:
            # Another address: pass over the _DROP.
            four += [(_IF_EQUAL, 0, 1, words[0]), _DROP]
            continue
        # A word that differs leads behind the _DROP of this address: two instructions for each of
        # the words that follow, and the _DROP.
        for at, word in enumerate(words):
            six += [
                (_LOAD_WORD, 0, 0, _NETWORK + _SOURCE6_AT + 4 * at),
                (_IF_EQUAL, 0, 2 * (3 - at) + 1, word),
            ]
        six.append(_DROP)
    four.append(_TAKE)
    six.append(_TAKE)
    head = [
        # A packet without the flag SYN is no connection request, and is taken.
        (_LOAD_BYTE, 0, 0, _FLAGS_AT), (_IF_SET, 1, 0, _SYN), _TAKE,
        # The version of IP, in the upper half of its first byte, decides where the source address
        # stands; one that is not 4 leads behind the instructions for IPv4.
        (_LOAD_BYTE, 0, 0, _NETWORK), (_SHIFT_RIGHT, 0, 0, 4), (_IF_EQUAL, 0, len(four), 4),
    ]  # fmt: skip
    return b"".join(_INSTRUCTION.pack(*each) for each in (*head, *four, *six))


def shut(listening: socket.socket) -> None:
    """Have the kernel drop all connection requests to a socket; turn_away() lets them in again.

    Connections that were accepted have the filter of their listening socket, so that only packets
    with the flag SYN may be dropped here. Raises OSError where the kernel has no such filters.
    """
    # A packet with the flag SYN gets to _DROP; any other one passes over it.
    no_request = [(_LOAD_BYTE, 0, 0, _FLAGS_AT), (_IF_SET, 0, 1, _SYN), _DROP, _TAKE]
    _attach(listening, b"".join(_INSTRUCTION.pack(*each) for each in no_request))


def hold_back(connection: socket.socket) -> None:
    """Have the kernel drop all that a connection's peer sends, until let_go().

    Nothing is lost: the peer's kernel sends again what is not acknowledged. Raises
    OSError where the kernel has no such filters.
    """
    # A filter of one instruction, which drops whatever comes.
    _attach(connection, _INSTRUCTION.pack(*_DROP))


def let_go(held: socket.socket) -> None:
    """Have a socket take again what its peers send. Raises OSError: it has no filter."""
    held.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def turn_away(listening: socket.socket, addresses: Iterable[str]) -> None:
    """Have the kernel drop connection requests to a socket from these addresses, and no others.

    Takes the place of the filter that the socket had. Raises OSError where the kernel has no such
    filters.
    """
    named = sorted(addresses)[:ADDRESSES_MAX]
    if named:
        _attach(listening, program(named))
        return
    # A socket has no filter to give up where only local peers were kept out.
    with contextlib.suppress(FileNotFoundError):
        let_go(listening)


def _attach(to: socket.socket, code: bytes) -> None:
    """Give a socket a filter, in place of the one that it has; the kernel copies the code."""
    kept = ctypes.create_string_buffer(code, len(code))
    described = _PROGRAM.pack(len(code) // _INSTRUCTION.size, ctypes.addressof(kept))
    to.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)
