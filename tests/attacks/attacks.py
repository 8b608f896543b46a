"""The attacks of hostile peers on a broker, each as a function of its own.

Owns the attacks on connections, on bytes, on what one client may take, on passwords and on the
broker's own helpers; those by what a link says are in commands.py. The rules: an attack needs
nothing but a port (and a password where there is one), says in its docstring what it does, in one
sentence, and names the settings that it needs and the memory that the broker's configuration lets
it fill. Source: ARCHITECTURE.md, "What a peer may cost" and "Containment"; docs/robustness.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import psutil
import zmq

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.framing import encode_message
from malamute_py.server.authentication.credentials import hash_password
from tests.attacks import commands  # noqa: F401 - the import fills the table of attacks
from tests.attacks.aim import Aim, Raw, burst
from tests.attacks.attack import ATTACKS, MIB, PASSWORD, attack, hello
from tests.fuzz import live
from tests.fuzz.zmtp import COMMAND, GREETING, LONG, MORE, frame, message, ready

__all__ = ["ATTACKS"]


# --- connections and bytes --------------------------------------------------------------


@attack(20)
def routing_ids(aim: Aim) -> None:
    """Peers that claim the routing ids which libzmq gives next, or another's."""
    while aim.more():
        claimed: list[Raw] = []
        start = aim.chance.getrandbits(32)
        for at in range(100):
            number = (start + at) & 0xFFFFFFFF
            identity = b"\0" + number.to_bytes(4, "big") if at % 4 else b"alice"
            with contextlib.suppress(OSError):
                claimed.append(Raw(aim, GREETING + ready(identity=identity), hello()))
        aim.peer().close()
        for each in claimed:
            each.close()


@attack(1_500, keeps=64 * MIB, settings=("quotas.links_s=200",))
def links_without_end(aim: Aim) -> None:
    """Clients that come without end, each with an identity, an inbox and a request."""
    inbox, request = wire.OpenInbox(1, "", 9, 9), wire.Request("unserved", 1)
    content = encode([b"x"])
    kept: deque[Raw] = deque()
    while aim.more():
        begins = wire.Hello((1, 1), aim.chance.randbytes(16), f"id-{aim.round}")
        data = message(encode_message([begins, inbox])) + message(
            encode_message([request], [content])
        )
        with contextlib.suppress(OSError):
            kept.append(Raw(aim, GREETING + ready(), data))
        if len(kept) > 800:
            kept.popleft().close()
    for each in kept:
        each.close()


@attack(20)
def reset_behind_a_full_queue(aim: Aim) -> None:
    """Many messages and ZMTP's own PING after slow ones, and a reset before they are answered."""
    slow = message(encode_message([wire.Ping(n) for n in range(4_000)])) * 3
    few = burst([wire.Ping(1)]) * 16
    ping = frame(b"\x04PING\x00\x0a", COMMAND)
    while aim.more():
        peer = aim.peer()
        peer.write(slow + (few + ping) * 200, 3_203)
        peer.reset()


@attack(2_000)
def mutated_traffic(aim: Aim) -> None:
    """Messages of the live fuzzer: any command in any state, wrong ZMTP, half messages, resets."""
    source = live.Attack(aim.port, aim.chance.getrandbits(20))
    for step in source.steps(1 << 60):
        if not aim.more():
            break
        with contextlib.suppress(ConnectionError, TimeoutError):
            source.play(step)
    source.end()
    aim.sent += source.messages + source.connections


@attack(40)
def partial_messages(aim: Aim) -> None:
    """60 connections with 47 MiB each of a message that never ends."""
    part = frame(bytes(MIB), MORE)
    kept: list[Raw] = []
    while aim.more():
        if len(kept) < 60:
            with contextlib.suppress(OSError):
                kept.append(Raw(aim, GREETING + ready(), hello()))
        for peer in kept:
            peer.send(part)
            aim.sent += 1
        kept = [peer for peer in kept if peer.open]
    for peer in kept:
        peer.close()


@attack(40)
def endless_frames(aim: Aim) -> None:
    """Frames of one byte that say that more of their message follow, without end."""
    data = frame(b"x", MORE) * 50_000
    kept: list[Raw] = []
    while aim.more():
        if len(kept) < 10:
            with contextlib.suppress(OSError):
                kept.append(Raw(aim, GREETING + ready(), data))
        for peer in kept:
            peer.send(data)
            aim.sent += 1
        kept = [peer for peer in kept if peer.open]
    for peer in kept:
        peer.close()


@attack(200)
def claims_of_4_gib(aim: Aim) -> None:
    """Frames that say that they are 4 GiB and more, before and after the handshake."""
    while aim.more():
        size = aim.chance.choice((1 << 32, (1 << 63) - 1, (1 << 64) - 1, 1 << 25, 1 << 24))
        head = bytes((LONG,)) + struct.pack(">Q", size)
        with contextlib.suppress(OSError):
            if aim.round % 3 == 0:
                peer = Raw(aim, GREETING + bytes((LONG | COMMAND,)) + head[1:])
            else:
                peer = Raw(aim, GREETING + ready(), head)
            peer.send(bytes(1_000))
            peer.close()


@attack(1_500, addresses=True, seconds=8.0, back_s=30.0)
def many_addresses(aim: Aim) -> None:
    """Floods of tiny messages from 200 addresses, of which another comes for each that is cut."""
    data = burst([wire.Ping(1)]) * 40_000
    threads = [threading.Thread(target=_flood, args=(aim, data, 50 * n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _flood(aim: Aim, data: bytes, first: int) -> None:
    """Flood from each of 50 addresses in turn."""
    at = 0
    while aim.more():
        at += 1
        with contextlib.suppress(OSError):
            address = f"127.0.1.{1 + first + at % 50}"
            peer = Raw(aim, GREETING + ready(), hello(), address)
            while peer.send(data) and aim.more():
                aim.sent += 1


# --- what one client may take -----------------------------------------------------------


@attack(10, keeps=192 * MIB, files=8)
def streams(aim: Aim) -> None:
    """One client takes all the streams that it can get."""
    _take(aim, "streams", wire.CreateStream)


@attack(10, keeps=192 * MIB)
def mailboxes(aim: Aim) -> None:
    """One client takes all the mailboxes that it can get."""
    _take(aim, "mailboxes", lambda n, name: wire.EditMailbox(n, name, {}))


@attack(10, keeps=192 * MIB)
def services(aim: Aim) -> None:
    """One client takes all the services that it can get."""
    _take(aim, "services", lambda n, name: wire.EditService(n, name, {}))


@attack(10, keeps=192 * MIB)
def cursors(aim: Aim) -> None:
    """One client takes all the cursors and groups that it can get."""
    _take(
        aim,
        "cursors",
        lambda n, name: (
            wire.EditCursor(n, "canary", name, {}, [0])
            if n % 2
            else wire.MoveCursor("canary", name, 0, n)
        ),
    )


def _take(aim: Aim, kind: str, made: Callable[[int, str], wire.Command]) -> None:
    peer = aim.peer()
    number = 0
    while aim.more():
        peer.say(*[made(n, f"{kind}-{number + n}") for n in range(500)])
        number += 500
        peer.discard()


@attack(10)
def subscriptions(aim: Aim) -> None:
    """Links with 1,000 subscriptions each, with patterns of all kinds, made again and again."""
    while aim.more():
        peer = aim.peer()
        for first in range(0, 1_000, 250):
            peer.say(*[
                wire.Subscribe(n, "subscribed", ["topic", f"{aim.round}.{n}.#"], [1], 9, 9)
                for n in range(first, first + 250)
            ])  # fmt: skip
        peer.discard()
        if aim.round % 2:
            peer.reset()


RINGS: Final = 8
SMALL_SEGMENTS: Final = (
    "journal.segment_bytes=16777216", "limits.batch_bytes_max=4194304",
    "limits.record_bytes_max=4194304",
)  # fmt: skip


@attack(
    3, settings=(f"quotas.rings={RINGS}", *SMALL_SEGMENTS),
    keeps=64 * MIB, files=8 * RINGS,
)  # fmt: skip
def rings(aim: Aim) -> None:
    """One client makes streams with a ring each, and writes to all of them."""
    peer = aim.peer()
    content = encode([b"x" * 1_000] * 100)
    while aim.more():
        for at in range(50):
            name = f"ring-{at}"
            peer.say(
                wire.CreateStream(at, name, {"ring_bytes": 67_108_864}), wire.Publish(name, at),
                frames=[content],
            )  # fmt: skip
        peer.discard()
        time.sleep(0.1)


@attack(
    10,
    settings=("quotas.rings_memory_bytes=134217728", "journal.memory_ring_bytes=134217728",
              *SMALL_SEGMENTS),
    keeps=320 * MIB,
)  # fmt: skip
def memory_streams(aim: Aim) -> None:
    """One client makes streams in memory, with rings of their own and without, and fills them."""
    peer = aim.peer()
    content = encode([b"x" * 1_000] * 1_000)
    made = []
    for at in range(8):
        settings: dict[str, Any] = {"memory": True}
        if at % 2:
            settings["ring_bytes"] = 67_108_864
        peer.say(wire.CreateStream(at, f"memory-{at}", settings))
        answer = peer.take(wire.Command)
        while isinstance(answer, wire.Welcome | wire.Ping):
            answer = peer.take(wire.Command)
        if isinstance(answer, wire.Result):
            made.append(at)
    # Of those with rings of their own the quota refuses some.
    assert 4 < len(made) < 8, f"{len(made)} streams in memory"
    while aim.more():
        for at in made:
            peer.say(wire.Publish(f"memory-{at}", at), frames=[content])
        peer.discard()


@attack(10)
def large_batches(aim: Aim) -> None:
    """One client fills the ring that all streams share, as fast as the disk takes it."""
    peer = aim.peer()
    content = encode([b"x" * 1_000] * 1_000)
    while aim.more():
        for at in range(8):
            peer.say(wire.Publish(f"large-{at}", at), frames=[content])
        peer.discard()


@attack(40)
def unread_answers(aim: Aim) -> None:
    """20 links that ask for pages of 450 KiB of a mailbox again and again, and read nothing."""
    writer = aim.peer()
    writer.say(wire.Send("unread-answers", 1), frames=[encode([b"x" * 450] * 1_000)])
    writer.take(wire.Confirm)
    asks = [wire.PeekMail(n, "unread-answers", -1, 1_000, 450) for n in range(1, 61)]
    peers = [aim.peer() for _ in range(20)]
    while aim.more():
        for peer in peers:
            peer.say(*asks)
        time.sleep(0.3)


# --- passwords --------------------------------------------------------------------------


def _users() -> tuple[str, ...]:
    hashed = hash_password(PASSWORD)
    names = [f"canary-{number}" for number in range(5)] + ["alice"]
    users = ", ".join(f'"{name}" = "{hashed}"' for name in names)
    return ("authentication.mechanism=plain", "authentication.users={" + users + "}")


@attack(10, settings=_users(), password=PASSWORD)
def guessed_passwords(aim: Aim) -> None:
    """200 connections that guess passwords, of a user that exists and of many that do not."""
    with zmq.Context() as context:
        kept: list[zmq.Socket[bytes]] = []
        while aim.more():
            for number in range(20):
                socket = context.socket(zmq.DEALER)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RECONNECT_IVL, 20)
                socket.plain_username = b"alice" if number % 2 else b"nobody%d" % len(kept)
                socket.plain_password = b"guess %d" % aim.chance.getrandbits(40)
                socket.connect(aim.endpoint)
                aim.sent += 1
                kept.append(socket)
            while len(kept) > 200:
                kept.pop(0).close()
            time.sleep(0.1)
        for socket in kept:
            socket.close()


@attack(10, settings=_users(), password=PASSWORD)
def wrong_passwords(aim: Aim) -> None:
    """Wrong passwords for the canary's own users, from the canary's address."""
    with zmq.Context() as context:
        kept: list[zmq.Socket[bytes]] = []
        while aim.more():
            for number in range(5):
                socket = context.socket(zmq.DEALER)
                socket.setsockopt(zmq.LINGER, 0)
                socket.plain_username = b"canary-%d" % number
                socket.plain_password = b"wrong"
                socket.connect(aim.endpoint)
                aim.sent += 1
                kept.append(socket)
            while len(kept) > 60:
                kept.pop(0).close()
            time.sleep(0.05)
        for socket in kept:
            socket.close()


# --- the broker's own helpers -----------------------------------------------------------


@attack(20, settings=("checkpoint.stall_ms=2000", "checkpoint.interval_ms=200"))
def stopped_checkpoint(aim: Aim) -> None:
    """The checkpoint's process is stopped, again and again, while mail goes on."""
    peer = aim.peer()
    content = encode([b"x" * 1_000] * 100)
    broker = psutil.Process(aim.broker)
    while aim.more():
        peer.say(wire.Send("stopped", aim.round), frames=[content])
        peer.discard()
        for child in broker.children():
            with contextlib.suppress(psutil.Error, OSError):
                os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.05)
