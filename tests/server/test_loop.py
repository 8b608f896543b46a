"""The loop and the guard at real sockets: bad peers pay, the others notice nothing."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import pytest
import zmq

from malamute_protocol.commands import AnyCommand, Atomic, Bye, Command, Ping, Pong, Publish
from malamute_protocol.encode import encode
from malamute_protocol.framing import decode_message, encode_message
from malamute_py.broker.ready import AppendBundle, Event
from malamute_py.config import Config, LimitsSection, Links, LoopSection
from malamute_py.server import loop as loop_module
from malamute_py.server.connections import left_behind, memory
from malamute_py.server.connections.connection import Connection
from malamute_py.server.connections.guard import Guard
from malamute_py.server.errors import ServerFailed
from malamute_py.server.result_queue import Died
from malamute_py.telemetry import Refusals
from tests.server.fakes import RunningLoop
from tests.server.zmtp import LONG, MORE, Zmtp, frame
from tests.waiting import WAIT_MS, WAIT_S

LOCAL = Config(listen=["tcp://127.0.0.1:0"])


@contextmanager
def dealer(
    endpoint: str, context: zmq.Context[zmq.Socket[bytes]] | None = None
) -> Iterator[zmq.Socket[bytes]]:
    own = context or zmq.Context()
    peer = own.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    peer.connect(endpoint)
    try:
        yield peer
    finally:
        peer.close(0)
        if context is None:
            own.term()


def received(peer: zmq.Socket[bytes]) -> tuple[list[AnyCommand], list[bytes]]:
    head, *frames = peer.recv_multipart()
    return msgspec.msgpack.decode(head, type=list[AnyCommand]), frames


def ping(peer: zmq.Socket[bytes], token: int = 1) -> None:
    peer.send_multipart(encode_message([Ping(token)]))
    assert received(peer) == ([Pong(token)], [])


def resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_ended(peer: socket.socket, wait_s: float = WAIT_S) -> bool:
    """Whether the other side has ended the connection, with what it said before unread."""
    peer.settimeout(wait_s)
    try:
        while peer.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def is_refused(peer: socket.socket, burst: bytes, wait_s: float = WAIT_S) -> bool:
    """Whether the other side ends the connection while this is sent for ever."""
    deadline = time.monotonic() + wait_s
    try:
        while time.monotonic() < deadline:
            peer.sendall(burst)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("transport", ["tcp", "ipc", "inproc"])
def test_a_peer_is_answered_over_each_transport(transport: str, tmp_path: Path) -> None:
    endpoint = {
        "tcp": "tcp://127.0.0.1:0", "ipc": f"ipc://{tmp_path}/socket", "inproc": "inproc://broker",
    }[transport]  # fmt: skip
    with RunningLoop(Config(listen=[endpoint])) as running:
        with dealer(running.endpoint, running.context) as peer:
            ping(peer)
        assert running.failure is None


def test_a_small_content_is_kept_as_bytes_and_a_large_one_as_the_frame_it_came_in() -> None:
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as peer:
        for size in (100, 100_000):
            content = os.urandom(size)
            peer.send_multipart(encode_message([Publish("s", 1)], [content]))
            assert received(peer)[1] == [content]
        (_, (small,)), (_, (large,)) = running.core.published
        assert isinstance(small, bytes)
        assert isinstance(large, zmq.Frame)


def test_malformed_messages_cost_the_sender_its_link_and_in_the_end_its_connection() -> None:
    with (
        RunningLoop(LOCAL) as running,
        dealer(running.endpoint) as other,
        Zmtp(running.endpoint) as attacker,
    ):
        running.stop_the_clock()  # an ended link's connection would be cut for lingering, too
        ping(other)
        attacker.send(b"\xc1 not MessagePack")
        flags, body = attacker.receive_frame()
        assert flags == 0
        (bye,) = msgspec.msgpack.decode(body, type=list[AnyCommand])
        assert isinstance(bye, Bye)
        assert bye.code == "malformed"
        with suppress(OSError):
            for _ in range(5):
                attacker.send(b"again")
        assert is_ended(attacker.socket)
        ping(other, 2)
        assert running.counters["malformed_total"] >= 3
        assert running.log.of("malformed")[0]["code"] == "malformed"
        assert running.counters["cut_total"] == 1
        assert running.failure is None


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b""], "malformed"),
        ([b"\x90"], "malformed"),
        ([b"\x91\x92\x03\x00", b"unowned"], "malformed"),
        ([b"\x91\x93\x0a\xa1s\x01"], "malformed"),
        ([b"x" * ((1 << 20) + 1)], "too_large"),
        ([b"\x90"] + [b""] * 5000, "too_large"),
    ],
    ids=["empty", "no commands", "frame too many", "frame too few", "long command", "frames"],
)
def test_a_message_that_breaks_the_grammar_is_named(frames: list[bytes], code: str) -> None:
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as peer:
        peer.send_multipart(frames)
        (bye,), _ = received(peer)
        assert isinstance(bye, Bye)
        assert bye.code == code
        assert running.failure is None


def test_a_frame_that_claims_four_gigabytes_ends_the_connection_and_takes_no_memory() -> None:
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as other:
        ping(other)
        before = resident()
        with Zmtp(running.endpoint) as attacker:
            attacker.socket.sendall(bytes((LONG,)) + (4 << 30).to_bytes(8, "big") + bytes(1 << 16))
            assert is_ended(attacker.socket)
        ping(other, 2)
        assert resident() - before < 16 << 20


@pytest.mark.alone
@pytest.mark.parametrize("size", [0, 1, 100, 100_000])
def test_endless_frames_cost_the_sender_its_connection_and_others_notice_nothing(size: int) -> None:
    small = LimitsSection(
        batch_bytes_max=4 << 20, record_bytes_max=2 << 20,
        partial_message_bytes_max=8 << 20, amplified_bytes_max=16 << 20,
    )  # fmt: skip
    config = Config(listen=["tcp://127.0.0.1:0"], limits=small)
    with RunningLoop(config) as running, dealer(running.endpoint) as other:
        ping(other)
        before = peak = resident()
        burst = frame(bytes(size), MORE) * (1 + (1 << 17) // (size + 2))
        with Zmtp(running.endpoint) as attacker:
            attacker.send(*encode_message([Ping(1)]))
            attacker.receive_frame()
            sent = 0
            deadline = time.monotonic() + WAIT_S
            slowest = 0.0
            attacker.socket.settimeout(0.5)
            try:
                while time.monotonic() < deadline:
                    try:
                        attacker.socket.sendall(burst)
                    except TimeoutError:
                        continue
                    sent += len(burst)
                    if sent % (len(burst) * 16) == 0:
                        started = time.monotonic()
                        ping(other, 3)
                        slowest = max(slowest, time.monotonic() - started)
                        peak = max(peak, resident())
                pytest.fail(f"{sent} bytes of one message were taken")
            except OSError:
                pass
        peak = max(peak, resident())
        print(f"frames of {size} B: cut after {sent >> 20} MiB, RSS +{(peak - before) >> 20} MiB, "
              f"slowest ping of another {slowest * 1000:.0f} ms")  # fmt: skip
        # Unguarded it is gigabytes; how much comes between two looks is the machine's speed.
        assert peak - before < 320 << 20
        ping(other, 4)
        (event,) = running.log.of("connection_cut")
        assert "message" in event["reason"]
        running.until(lambda: any(call[0] == "lost" for call in running.core.calls))


@pytest.mark.alone
def test_endless_frames_over_ipc_cost_the_sender_its_connection(tmp_path: Path) -> None:
    config = Config(
        listen=[f"ipc://{tmp_path}/socket"], limits=LimitsSection(amplified_bytes_max=32 << 20)
    )
    with RunningLoop(config) as running, dealer(running.endpoint) as other:
        ping(other)
        before = resident()
        burst = frame(bytes(100), MORE) * 1000
        with Zmtp(running.endpoint) as attacker:
            assert is_refused(attacker.socket, burst)
        assert resident() - before < 320 << 20
        ping(other, 2)


def test_a_large_honest_message_on_a_slow_connection_arrives() -> None:
    with RunningLoop(LOCAL) as running, Zmtp(running.endpoint) as peer:
        peer.send(*encode_message([Ping(1)]))
        peer.receive_frame()
        content = os.urandom(3 << 20)
        head, body = encode_message([Publish("s", 1)], [content])
        data = frame(head, MORE) + frame(body)
        for start in range(0, len(data), 1 << 18):
            peer.socket.sendall(data[start : start + (1 << 18)])
            time.sleep(0.05)
        peer.receive_frame()
        assert peer.receive_frame()[1] == content


class Noting:
    """Has a loop that no thread drives say what the core is given, call by call."""

    def __init__(self) -> None:
        self.running = RunningLoop(LOCAL)
        self.calls: list[tuple[int, list[Command], list[bytes]]] = []
        self.counts: Counter[int] = Counter()
        self.running.core.receive = self._receive  # type: ignore[method-assign]

    def _receive(
        self, link: int, identity: str, commands: list[Command], frames: list[bytes], now_ms: int
    ) -> None:
        self.calls.append((link, list(commands), list(frames)))
        self.counts[link] += len(commands)

    def of(self, link: int) -> list[Command]:
        return [
            command for number, commands, _ in self.calls if number == link for command in commands
        ]

    def turns_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            self.running.loop.turn()

    def close(self) -> None:
        with self.running:
            pass


def test_a_peer_that_sends_more_than_a_share_is_served_in_turns_with_others() -> None:
    noting = Noting()
    count, each = 50, 4_000
    message = frame(encode_message([Ping(number) for number in range(each)])[0])
    with Zmtp(noting.running.endpoint) as greedy, Zmtp(noting.running.endpoint) as other:
        greedy.socket.sendall(message)
        noting.turns_until(lambda: noting.calls)
        thread = threading.Thread(target=greedy.socket.sendall, args=(message * (count - 1),))
        thread.start()
        other.send(*encode_message([Ping(7)]))
        noting.turns_until(lambda: noting.counts[2])
        assert noting.counts[1] < count * each, "it came between"
        noting.turns_until(lambda: noting.counts[1] == count * each)
        thread.join()
        assert max(len(commands) for _, commands, _ in noting.calls) == 64
        assert noting.of(1) == [Ping(number) for number in range(each)] * count
        peer = noting.running.loop.peers.get(1)
        assert peer is not None
        noting.turns_until(lambda: peer.behind is None)
        assert peer.connection is not None
        assert peer.connection.delivered == (len(message) + 1) * count
    noting.close()


def test_messages_that_only_wait_take_no_longer_to_be_taken_up_than_a_turn_may() -> None:
    """256 messages of 1,000 frames behind one that was done in shares took 264 ms at once."""
    noting = Noting()
    loop = noting.running.loop
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*encode_message([Ping(number) for number in range(4_000)]))
        noting.turns_until(lambda: noting.calls)
        found = loop.peers.get(1)
        assert found is not None
        peer.socket.sendall(frame(encode_message([Ping(7)])[0]) * 200)
        time.sleep(0.1)
        loop._take_ns = loop._take_most_ns = 50
        noting.running.step_ns = 1
        counters = noting.running.counters
        most = waited = 0
        while noting.counts[1] < 4_200:
            before = counters["messages_in_total"]
            loop.turn()
            waited = max(waited, len(found.behind or ()))
            most = max(most, counters["messages_in_total"] - before)
        assert waited > 20, "they waited"
        assert most <= 50, "each message asks once whether the time is over"
    noting.close()


def test_messages_that_waited_when_their_link_ended_are_not_unread() -> None:
    with RunningLoop(LOCAL) as running, Zmtp(running.endpoint) as peer:
        many = frame(encode_message([Ping(number) for number in range(4_000)])[0])
        # They lie behind 4,000 commands and a message that costs the link.
        peer.socket.sendall(many + frame(b"\xc1") + many * 20)
        running.until(lambda: ("malformed", 1, "malformed") in running.core.calls)
        running.until(lambda: len(running.loop.peers) == 0)
        peer.send(*encode_message([Ping(5_000)]))
        running.until(lambda: len(running.loop.peers) == 1)
        again = running.loop.peers.get(2)
        assert again is not None
        assert again.connection is not None
        assert again.connection.delivered >= len(many) * 21
        running.until(lambda: running.guard.facts()["unread_bytes"] == 0)


def test_what_waits_of_a_message_is_dropped_with_its_link_though_the_sockets_are_not_empty() -> (
    None
):
    """10 MB of each such link stayed until nothing more arrived, for up to 65,536 links."""
    noting = Noting()
    loop = noting.running.loop
    message = encode_message([Publish("s", n) for n in range(4_000)], [bytes(300)] * 4_000)
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*message)
        noting.turns_until(lambda: noting.calls)
        found = loop.peers.get(1)
        assert found is not None
        assert found.frames
        loop._gone(found, 0)
        loop._close(1)
        assert found in loop._cut_off.values(), "what comes of it is dropped"
        assert (found.commands, found.frames, found.behind) == ([], [], None)
    noting.close()


def test_contents_go_with_their_commands_when_a_message_is_done_in_shares() -> None:
    noting = Noting()
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(
            *encode_message(
                [Publish("s", number + 1) for number in range(200)],
                [b"%d" % number for number in range(200)],
            )
        )
        peer.send(*encode_message([Publish("s", 201)], [b"200"]))
        noting.turns_until(lambda: noting.counts[1] == 201)
    assert [len(commands) for _, commands, _ in noting.calls][:3] == [64, 64, 64]
    for _, commands, frames in noting.calls:
        assert [b"%d" % (c.tracker - 1) for c in commands if isinstance(c, Publish)] == frames
    noting.close()


@pytest.mark.parametrize("before", [0, 60])
def test_a_step_stays_together_when_a_message_is_done_in_shares(before: int) -> None:
    noting = Noting()
    step = [Atomic(1, 200, 0, b""), *(Publish("s", 0) for _ in range(200))]
    told = [*(Ping(number) for number in range(before)), *step, Ping(99)]
    bodies = [b"%d" % number for number in range(200)]
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*encode_message(told, bodies))
        noting.turns_until(lambda: noting.counts[1] == len(told))
    (shared,) = (call for call in noting.calls if any(type(one) is Atomic for one in call[1]))
    assert shared[1][-201:] == step
    assert shared[2] == bodies
    noting.close()


def test_a_malformed_message_behind_others_costs_the_link_after_them() -> None:
    noting = Noting()
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*encode_message([Ping(number) for number in range(200)]))
        peer.send(b"nonsense")
        noting.turns_until(lambda: ("malformed", 1, "malformed") in noting.running.core.calls)
        assert noting.of(1) == [Ping(number) for number in range(200)]
        noting.turns_until(lambda: not noting.running.loop._behind)
    noting.close()


def test_a_connection_that_says_nothing_is_cut() -> None:
    config = Config(listen=["tcp://127.0.0.1:0"], links=Links(hello_ms=10_000))
    with RunningLoop(config) as running, dealer(running.endpoint) as other:
        running.stop_the_clock()
        ping(other)
        with Zmtp(running.endpoint) as silent:
            running.until(lambda: len(running.guard.connections) == 2)
            running.leap(9_000)
            ping(other, 2)
            assert not is_ended(silent.socket, 0.1)
            running.leap(2_000)
            assert is_ended(silent.socket)
        ping(other, 3)
        assert "nothing was said" in running.log.of("connection_cut")[0]["reason"]


def test_a_connection_whose_descriptor_is_a_files_by_now_is_gone() -> None:
    left, right = socket.socketpair()
    guard = Guard(LOCAL, count=lambda name: None, report=lambda name, facts: None)
    with left, right, tempfile.TemporaryFile() as file:
        fd = right.fileno()
        guard._accepted(fd, 0)
        connection = guard.connections.get(fd)
        assert connection is not None
        # What libzmq's thread does at any moment: closed, and opened as something else.
        os.dup2(file.fileno(), fd)
        before = os.listdir("/proc/self/fd")
        guard.cut(connection, "its link ended")
        assert len(os.listdir("/proc/self/fd")) == len(before)
        assert guard.connections.get(fd) is None
        guard._accepted(fd, 0)
        assert guard.connections.get(fd) is None
    guard.close()


class Watched:
    """One TCP connection that a guard looks at; the test says what the loop has taken from it."""

    def __init__(self, beside: Watched | None = None) -> None:
        self.cuts: list[str] = []
        self.counts = Counter[str]()
        self._beside = beside
        self.guard: Guard = (
            beside.guard
            if beside is not None
            else Guard(LOCAL, count=self._counted, report=self._reported)
        )
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.peer = socket.create_connection(server.getsockname())
            self.accepted, _ = server.accept()
        self.guard._accepted(self.accepted.fileno(), 0)
        connection = self.guard.connections.get(self.accepted.fileno())
        assert connection is not None
        self.connection = connection
        self.now_ms = 0
        self._began = self.guard.memory.rss
        self.grows(0)

    def _counted(self, name: str) -> None:
        self.counts[name] += 1

    def _reported(self, name: str, facts: dict[str, object]) -> None:
        if name == "connection_cut":
            self.cuts.append(str(facts["reason"]))

    def grows(self, size: int) -> None:
        """Resident memory is so much more than in the beginning."""
        self.guard.memory.resident = lambda: self._began + size  # type: ignore[method-assign]

    def another(self) -> Watched:
        """Another connection that the same guard looks at."""
        return Watched(self)

    def arrives(self, size: int) -> None:
        while size:
            some = min(size, 64 << 10)
            self.peer.sendall(bytes(some))
            size -= some
            while some:
                some -= len(self.accepted.recv(some))

    def delivers(self, frames: int, frame_bytes: int) -> None:
        self.arrives(frames * frame_bytes)
        self.connection.delivered += frames * frame_bytes
        self.connection.frames += frames

    def trimmed(self) -> None:
        """Memory is being given back; return when it was."""
        trimming = self.guard.memory._trimming
        assert trimming is not None
        trimming.join()

    def look(self, *, drained: bool = True) -> None:
        self.now_ms += 1_000
        self.guard.check(self.now_ms, drained=drained)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.close()
        self.accepted.close()
        if self._beside is None:
            self.guard.close()


def test_a_large_message_may_begin_behind_a_flood_of_tiny_ones() -> None:
    with Watched() as watched:
        for _ in range(3):
            watched.delivers(frames=300, frame_bytes=10)
            watched.look()
        # Nothing is delivered between these looks: the message takes its time on a slow line.
        for part in range(1, 4):
            watched.arrives(300_000)
            watched.look()
            assert watched.connection.memory == part * 300_000, "no tiny frame of it waits"
        assert watched.guard.facts()["unread_bytes"] == 900_000
        assert watched.cuts == []


@pytest.mark.parametrize(
    ("frame_bytes", "factor"),
    [(6, 17), (10, 10.6), (94, 1 + 8_192 / 94), (130, 1 + 8_192 / 130), (4_096, 3), (9_000, 1)],
)
def test_small_frames_that_wait_count_what_they_need_in_memory(
    frame_bytes: int, factor: float
) -> None:
    """Batches of two records, 130 bytes a frame, took 461 MiB where 48 were counted."""
    with Watched() as watched:
        # The loop takes up fewer frames between two looks than tell their size.
        for _ in range(10):
            watched.delivers(frames=30, frame_bytes=frame_bytes)
            watched.look()
        for _ in range(2):
            watched.arrives(1_000_000)
            watched.grows(200 << 20)
            watched.look(drained=False)
        assert watched.connection.memory == int(2_000_000 * factor)
        assert watched.cuts == []


def test_small_frames_count_for_no_more_than_memory_has_grown() -> None:
    with Watched() as watched:
        watched.delivers(frames=300, frame_bytes=10)
        watched.look()
        watched.grows(5_000_000)
        for _ in range(2):
            watched.arrives(1_000_000)
            watched.look(drained=False)
        assert watched.connection.memory == 5_000_000


def test_a_connection_whose_tiny_frames_fill_the_memory_of_one_connection_is_cut() -> None:
    with Watched() as watched:
        watched.delivers(frames=300, frame_bytes=10)
        watched.look()
        watched.grows(60 << 20)
        for _ in range(2):
            watched.arrives(3_000_000)
            watched.look(drained=False)
        assert len(watched.cuts) == 1, "of 48 MiB that one connection may have"


def test_what_cut_connections_left_counts_until_it_is_taken_up() -> None:
    with Watched() as watched, watched.another() as live:
        gone, bounds = watched.connection, LOCAL.limits
        watched.grows(1 << 30)
        watched.look(drained=False)
        gone.unread = gone.memory = 3 * bounds.unread_share_bytes_max
        watched.guard.cut(gone, "planted")
        most = bounds.unread_share_bytes_max // 4

        def cut_at(memory: int) -> list[str]:
            live.connection.looks, live.connection.memory = 2, memory
            live.connection.unread = memory
            return [why for _, why in watched.guard.unread.too_much([live.connection])]

        assert cut_at(most) == [], "a part is left to who is there"
        assert "its share" in cut_at(most + 1)[0]
        # The loop drops what it had sent.
        gone.delivered += gone.unread - bounds.unread_share_bytes_max // 2
        assert cut_at(2 * most) == []
        assert "its share" in cut_at(2 * most + 1)[0]
        gone.delivered += gone.unread
        watched.look(drained=False)
        assert watched.guard.left._connections == []


def leaves(watched: Watched, share: str, size: int) -> Connection:
    """Cut another connection of a guard, of so many unread bytes, and return it."""
    with watched.another() as other:
        other.connection.user = share
        watched.guard.connections._by_user[share] += 1
        other.connection.unread = other.connection.memory = size
        watched.guard.cut(other.connection, "planted")
        return other.connection


def test_what_ended_connections_left_costs_nobody_else_its_connection() -> None:
    """Three shares of it were more than all may have: every other connection was cut."""
    with Watched() as watched:
        live = watched.connection
        watched.look(drained=False)
        for share in ("one", "two", "three"):
            leaves(watched, share, 250 << 20)
        watched.guard.memory.rss = watched.guard.memory.before + (2 << 30)
        live.looks, live.memory, live.unread = 2, 1 << 20, 1 << 20
        assert watched.guard.unread.too_much([live]) == []
        watched.guard.memory.rss = watched.guard.memory.before
        live.memory = live.unread = 250 << 20
        assert watched.guard.unread.too_much([live]) == [], "memory has not grown: it is not there"
        live.user = "one"
        assert watched.guard.unread.too_much([live]) == [], "nor is it in the same share"
        watched.guard.memory.rss += 2 << 30
        assert watched.guard.unread.too_much([live])
        live.user = ""


def test_what_an_ended_connection_left_ends_when_nothing_of_it_is_taken_up() -> None:
    """The beginning of a message, which libzmq drops, counted until the sockets were empty."""
    with Watched() as watched:
        watched.look(drained=False)
        ended = leaves(watched, "one", 100 << 20)
        for _ in range(5):
            ended.delivered += 10 << 20
            watched.look(drained=False)
            assert watched.guard.left._connections == [ended], "messages of it are taken up"
        assert ended.memory == 50 << 20
        watched.look(drained=False)
        assert watched.guard.left._connections == []


def test_ended_connections_that_count_are_bounded_and_the_largest_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(left_behind, "_LEFT_MAX", 3)
    with Watched() as watched:
        watched.look(drained=False)
        sizes = [n << 20 for n in (3, 1, 5, 2, 4)]
        for size in sizes:
            leaves(watched, "one", size)
        assert watched.guard.left.by_share()["user one"] == sum(sizes)
        assert sorted(each.memory for each in watched.guard.left._connections) == sorted(sizes)[2:]


def test_connections_count_the_growth_of_memory_once_and_not_each_for_itself() -> None:
    """Six honest clients with 90 MiB in frames of 4,000 bytes were taken for 360 MiB."""
    with Watched() as watched:
        sent = [watched.another() for _ in range(6)]
        for other in sent:
            connection = other.connection
            connection.looks, connection.unread = 2, 15 << 20
            connection.memory = 60 << 20
        live = [other.connection for other in sent]
        watched.guard.memory.rss = watched.guard.memory.before + (100 << 20)
        assert watched.guard.unread.too_much(live) == []
        watched.guard.memory.rss = watched.guard.memory.before + (300 << 20)
        ((_, why),) = watched.guard.unread.too_much(live)
        assert f"has {300 << 20} unread bytes" in why
        for other in sent:
            other.__exit__()


def test_a_share_is_full_before_what_comes_until_the_next_look_overflows_it() -> None:
    with Watched() as watched:
        most = LOCAL.limits.unread_share_bytes_max
        connection = watched.connection
        connection.looks, connection.memory, connection.unread = 2, most - 1_000, most - 1_000
        connection.rise = 1_000
        assert watched.guard.unread.too_much([connection]) == []
        connection.rise = 1_001
        assert [each for each, _ in watched.guard.unread.too_much([connection])] == [connection]


def test_a_message_under_way_is_not_blamed_for_what_others_sent() -> None:
    with Watched() as watched, watched.another() as other:
        other.delivers(frames=1, frame_bytes=100)
        watched.look()
        for _ in range(2):
            watched.arrives(200_000)
            other.arrives(23 << 20)
            watched.look(drained=False)
        watched.grows(60 << 20)
        watched.arrives(1)
        watched.look()
        assert watched.cuts == [], "the other has 46 MiB of these 60"
        watched.grows(120 << 20)
        watched.look()
        assert "memory grew" in watched.cuts[0]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often memory was given back, by the argument of malloc_trim()."""
    given = Counter[int]()
    monkeypatch.setattr(memory, "_trim", lambda pad: given.update([pad]))
    return given


def test_memory_of_cut_connections_is_given_back_while_others_go_on(
    given: Counter[int],
) -> None:
    with Watched() as watched:
        watched.look()
        watched.grows(300 << 20)
        watched.look(drained=False)
        assert not given, "no connection was cut"
        watched.guard.cut(watched.connection, "planted")
        watched.look(drained=False)
        watched.trimmed()
        assert given[0] == 1


def test_memory_that_cannot_be_given_back_is_tried_less_and_less_often_until_the_next_cut(
    given: Counter[int],
) -> None:
    with Watched() as watched:
        guard, other = watched.guard, watched.another()
        other.delivers(frames=1, frame_bytes=100)
        watched.look()
        guard.cut(watched.connection, "planted")
        watched.grows(300 << 20)

        def tries(looks: int) -> int:
            before = given[0]
            for _ in range(looks):
                watched.look(drained=False)
                if guard.memory._trimming is not None:
                    guard.memory._trimming.join()
            return given[0] - before

        assert tries(1_000) < 15, "the looks are a second apart"
        guard.cut(other.connection, "planted")
        assert tries(1) == 1
        before = given[0]
        watched.look()
        assert given[0] == before + 1, "what the loop has dropped since is given back once more"
        for _ in range(20):
            watched.look()
        assert not guard.memory.has_filled, "the rest is what honest clients fill"
        assert given[0] < before + 8
        other.__exit__()


def test_memory_of_connections_that_end_by_themselves_is_given_back(
    given: Counter[int],
) -> None:
    """305 MiB stayed: a peer that had sent much more than was taken up went before it was cut."""
    with Watched() as watched:
        guard = watched.guard
        watched.delivers(frames=300, frame_bytes=130)
        watched.look()
        for _ in range(2):
            watched.arrives(8 << 20)
            watched.grows(100 << 20)
            watched.look(drained=False)
        assert watched.cuts == []
        before = given[0]
        guard._forget(watched.connection)
        watched.look()
        watched.trimmed()
        assert given[0] == before + 1


def test_memory_that_is_freed_after_it_was_given_back_is_given_back_as_well(
    given: Counter[int],
) -> None:
    """341 MiB of 425 stayed: the loop had them in hand when the thread began."""
    with Watched() as watched:
        guard = watched.guard
        watched.look()
        guard.cut(watched.connection, "planted")
        for times in (1, 2):
            watched.grows(300 << 20)
            watched.look()
            watched.trimmed()
            assert given[0] == times
        watched.grows(1 << 20)
        watched.look()
        assert not guard.memory.has_filled


def test_a_system_without_room_for_a_thread_costs_a_try_to_give_memory_back_only(
    monkeypatch: pytest.MonkeyPatch, given: Counter[int]
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Watched() as watched:
        watched.look()
        watched.grows(300 << 20)
        watched.guard.cut(watched.connection, "planted")
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            watched.look(drained=False)
            watched.look(drained=True)
        assert watched.counts["trims_failed_total"] == 2
        assert not given
        watched.look(drained=True)
        watched.trimmed()
        assert given[0] == 1


def test_a_descriptor_is_known_again_when_the_last_connection_under_it_had_spoken() -> None:
    """Until the sockets were empty the next one was not: what it sent was counted as unread."""
    noting = Noting()
    loop = noting.running.loop
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*encode_message([Ping(1)]))
        noting.turns_until(lambda: noting.counts[1] == 1)
        found = loop.peers.get(1)
        assert found is not None
        assert found.connection is not None
        loop._ended.append(found.connection)
        assert loop._unsure() == set()
        found.connection.spoke = False
        assert loop._unsure() == {found.connection.fd}
        loop._ended.clear()
    noting.close()


def test_who_leaves_much_behind_again_and_again_comes_in_when_it_was_taken_up() -> None:
    """15 s of one peer that sent tiny messages and came again took 1.2 GiB, without a bound."""
    refused = "left behind"
    with Watched() as watched:
        guard = watched.guard
        before = guard.memory.rss
        watched.look()
        fd = watched.accepted.fileno()

        def comes() -> bool:
            guard._accepted(fd, watched.now_ms)
            found = guard.connections.get(fd)
            if found is not None:
                guard.cut(found, "again")
            return found is not None

        guard.memory.resident = lambda: before + (200 << 20)  # type: ignore[method-assign]
        watched.look(drained=False)
        assert comes(), "no more than its share was left behind"
        guard.memory.resident = lambda: before + (300 << 20)  # type: ignore[method-assign]
        watched.look(drained=False)
        while guard.left._ended_by_address["127.0.0.1"] < 2:
            assert guard.listening._turned_away == set(), "memory may have grown for another reason"
            assert comes()
            watched.look(drained=False)
        guard.memory.resident = lambda: before + (300 << 20)  # type: ignore[method-assign]
        watched.look(drained=False)
        assert not comes()
        assert refused in watched.cuts[-1]
        watched.look(drained=False)
        assert guard.listening._turned_away == {"127.0.0.1"}
        guard.left._ended_by_address["another"] = 99
        assert comes(), "the other has left more"
        watched.look(drained=False)
        assert guard.listening._turned_away == set(), "no address of IP has that name"
        del guard.left._ended_by_address["another"]
        assert not comes()
        watched.look(drained=False)
        assert guard.listening._turned_away == {"127.0.0.1"}
        watched.look(drained=True)
        assert comes(), "the sockets were empty"
        assert guard.listening._turned_away == set()


def test_an_error_in_a_look_at_one_connection_costs_that_connection_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as good:
        ping(good)
        with Zmtp(running.endpoint) as bad:
            bad.send(*encode_message([Ping(1)]))
            bad.receive_frame()
            chosen = running.loop.peers.get(2)
            assert chosen is not None
            plainly = running.guard.unread.judge

            def planted(connection: Any, now_ms: int, drained: bool) -> str | None:
                if connection is chosen.connection:
                    raise ZeroDivisionError("planted")
                return plainly(connection, now_ms, drained)

            monkeypatch.setattr(running.guard.unread, "judge", planted)
            assert is_ended(bad.socket)
            running.until(lambda: ("lost", 2) in running.core.calls)
        ping(good, 2)
        ((link, doing, error),) = running.core.failures
        assert (link, doing) == (2, "guarding")
        assert isinstance(error, ZeroDivisionError)
        assert "error of its own" in running.log.of("connection_cut")[0]["reason"]


def test_silent_connections_make_room_only_when_they_had_time_to_speak() -> None:
    links = Links(greetings_max=3, address_greetings_max=3, greeting_ms=1_000)
    with RunningLoop(Config(listen=LOCAL.listen, links=links)) as running, ExitStack() as stack:
        running.stop_the_clock()
        silent = [stack.enter_context(Zmtp(running.endpoint)) for _ in range(6)]
        running.until(lambda: len(running.guard.connections) == 6)
        assert not running.log.of("connection_cut"), "a fleet that comes back at once"
        running.leap(1_000)
        stack.enter_context(Zmtp(running.endpoint))
        assert is_ended(silent[0].socket), "the oldest goes"
        assert not is_ended(silent[1].socket, 0.1)
        (event,) = running.log.of("connection_cut")
        assert "say nothing" in event["reason"]


def test_lost_connections_are_remembered_within_a_bound_under_a_load_that_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "_CUT_OFF_MAX", 3)
    noting = Noting()
    loop = noting.running.loop
    with ExitStack() as stack:
        for number in range(1, 6):
            stack.enter_context(Zmtp(noting.running.endpoint)).send(*encode_message([Ping(1)]))
            noting.turns_until(lambda: len(noting.counts) == number)  # noqa: B023 - called in here
        peers = [loop.peers.get(number) for number in range(1, 6)]
        for peer in peers:
            assert peer is not None
            loop._gone(peer, 0)
        assert list(loop._cut_off) == [peer.routing_id for peer in peers[2:] if peer is not None]
    noting.close()


def test_a_loop_begins_under_a_clock_before_1970() -> None:
    running = RunningLoop(LOCAL)
    running._stands_at_ms = -57 * 366 * 86_400_000
    with running, dealer(running.endpoint) as peer:
        ping(peer)
    assert running.failure is None


def test_a_lost_connection_is_told_to_the_core_after_what_it_sent_last() -> None:
    with RunningLoop(LOCAL) as running:
        with Zmtp(running.endpoint) as peer:
            peer.send(*encode_message([Publish("s", 1)], [b"last words"]))
        running.until(lambda: ("lost", 1) in running.core.calls)
        assert [frames for _, frames in running.core.published] == [(b"last words",)]
        assert len(running.guard.connections) == 0
        assert len(running.loop.peers) == 0


def test_a_routing_id_chosen_again_on_a_new_connection_is_a_new_link() -> None:
    with RunningLoop(LOCAL) as running:
        for number in (1, 2):
            with Zmtp(running.endpoint, identity=b"alice") as peer:
                peer.send(*encode_message([Publish("s", 1)], [b""]))
                peer.receive_frame()
            # libzmq ignores a second peer of the same id for as long as it has the first.
            lost = ("lost", number)
            running.until(lambda lost=lost: lost in running.core.calls)
        assert [link for link, _ in running.core.published] == [1, 2]


def test_a_peer_that_does_not_read_is_blocked_and_others_are_served() -> None:
    config = Config(
        listen=["tcp://127.0.0.1:0"],
        links=Links(send_messages_max=10, pending_bytes_max=8 << 20),
    )
    with RunningLoop(config) as running, dealer(running.endpoint) as other:
        with Zmtp(running.endpoint) as lazy:
            lazy.send(*encode_message([Ping(1)]))
            lazy.receive_frame()
            message = encode_message([Publish("s", 1)], [bytes(1 << 20)])

            def flood() -> None:
                try:
                    while True:
                        lazy.send(*message)
                except OSError:
                    pass

            thread = threading.Thread(target=flood)
            thread.start()
            running.until(lambda: ("blocked", 1) in running.core.calls)
            ping(other)
            running.until(lambda: ("lost", 1) in running.core.calls)
            thread.join()
        ping(other, 2)
        # Messages that had come before the end may make it a link once more, to the same end.
        assert running.counters["overflowed_total"] >= 1
        assert "does not read" in running.log.of("connection_cut")[0]["reason"]


def test_a_blocked_peer_that_reads_again_gets_everything_in_order() -> None:
    config = Config(listen=["tcp://127.0.0.1:0"], links=Links(send_messages_max=2))
    with RunningLoop(config) as running, Zmtp(running.endpoint) as lazy:
        count = 24
        for number in range(count):
            lazy.send(*encode_message([Publish("s", number + 1)], [bytes(1 << 20)]))
        running.until(lambda: any(call[0] == "blocked" for call in running.core.calls))
        seen: list[int] = []
        while len(seen) < count:
            (command,) = msgspec.msgpack.decode(lazy.receive_frame()[1], type=list[AnyCommand])
            assert isinstance(command, Publish)
            seen.append(command.tracker)
            lazy.receive_frame()
        assert seen == list(range(1, count + 1))
        running.until(lambda: any(call[0] == "writable" for call in running.core.calls))


def test_a_bug_in_a_thread_ends_the_loop_aloud() -> None:
    with RunningLoop(LOCAL) as running:
        running.results.put(Died("reader", ValueError("oops"), "trace"))
        running.until(lambda: running.failure is not None)
    assert isinstance(running.failure, ServerFailed)
    assert "reader" in str(running.failure)
    assert running.log.of("thread_died")


def test_refusals_of_a_full_disk_are_said_once_a_ring_and_then_counted() -> None:
    running = RunningLoop(LOCAL)
    with running:
        pass
    loop, core, rings, log = running.loop, running.core, running.rings, running.log

    def publish(*names: str) -> None:
        core.ready.appends.extend(AppendBundle(name, 1, ()) for name in names)
        loop.settle(1_000)

    rings.refusal = "disk_full"
    publish("main", "main", "main")
    publish("main", "other")
    assert [facts["ring"] for facts in log.of("append_refused")] == ["main", "other"]
    rings.refusal = "journal_failed"
    publish("main", "main")
    assert [facts["code"] for facts in log.of("append_refused")][2:] == ["journal_failed"]
    rings.refusal = ""
    publish("main", "main")
    ended = {"ring": "main", "code": "journal_failed", "count": 1}
    assert log.of("appends_taken_again") == [ended]
    rings.refusal = "disk_full"
    publish("main")
    assert len(log.of("append_refused")) == 4
    assert running.counters["appends_refused_total"] == 8


def test_refusals_that_go_on_are_counted_once_a_period() -> None:
    refusals = Refusals(period_ms=100)
    assert refusals.counts(1_000) == []
    assert refusals.begins("main", "disk_full")
    assert not refusals.begins("main", "disk_full")
    assert not refusals.begins("main", "disk_full")
    assert refusals.counts(1_099) == []
    assert refusals.counts(1_100) == [("main", "disk_full", 2)]
    assert refusals.counts(1_200) == []
    assert refusals.ends("main") == ("disk_full", 0)
    assert refusals.ends("main") is None


# --- errors that no code foresees -----------------------------------------------------------------


def test_an_error_in_decoding_a_message_is_its_peers_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plainly = decode_message

    def planted(frames: Any, limits: Any) -> Any:
        if len(frames) > 1:
            raise IndexError("planted")
        return plainly(frames, limits)

    monkeypatch.setattr(loop_module, "decode_message", planted)
    with (
        RunningLoop(LOCAL) as running,
        dealer(running.endpoint) as bad,
        dealer(running.endpoint) as good,
    ):
        ping(good)
        bad.send_multipart([b"anything", b"else"])
        ping(bad)  # so that what was sent before was looked at
        ping(good)
        ((link, doing, error),) = running.core.failures
        assert (link > 0, doing) == (True, "receiving")
        assert isinstance(error, IndexError)


def test_a_number_that_no_wire_carries_costs_the_link_that_was_to_be_told_it() -> None:
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as peer:
        ping(peer)
        number = running.loop.peers.numbers()[0]
        running.core.send(number, Pong(1 << 64))
        ping(peer)
        ((link, doing, error),) = running.core.failures
        assert (link, doing) == (number, "sending")
        assert isinstance(error, OverflowError)


def test_an_event_with_an_error_says_where_it_arose() -> None:
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as peer:
        try:
            raise IndexError("planted")
        except IndexError as error:
            running.core.ready.events.append(
                Event("internal_error", "error", {"error": error, "link": 7})
            )
        ping(peer)
        running.until(lambda: running.log.of("internal_error"))  # what is sent goes before it
        (facts,) = running.log.of("internal_error")
        assert facts["error"] == "IndexError('planted')"
        assert "test_an_event_with_an_error" in facts["trace"]
        assert facts["link"] == 7


# --- how long a turn takes --------------------------------------------------------------

PACED = Config(listen=LOCAL.listen, loop=LoopSection(turn_us=100))


def turns_of_a_burst(running: RunningLoop, step_ns: int) -> list[int]:
    """Messages of each turn, of 200 that came while the loop was busy with another."""
    released = threading.Event()
    busy = threading.Event()
    receive = running.core.receive

    def held(link: int, identity: str, commands: Any, frames: Any, now_ms: int) -> None:
        busy.set()
        assert released.wait(WAIT_S)
        running.core.receive = receive  # type: ignore[method-assign]
        receive(link, identity, commands, frames, now_ms)

    with Zmtp(running.endpoint) as peer:
        running.core.receive = held  # type: ignore[method-assign]
        peer.send(*encode_message([Ping(1)]))
        assert busy.wait(WAIT_S)
        peer.socket.sendall(frame(encode_message([Ping(2)])[0]) * 200)
        time.sleep(0.1)
        running.core.turns = [0]
        running.step_ns = step_ns
        released.set()
        for _ in range(201):
            peer.receive_frame()
    return [count for count in running.core.turns if count]


def test_a_turn_takes_up_messages_for_half_of_its_time_and_one_always() -> None:
    with RunningLoop(PACED) as running:
        # 50 us, and 10 each time that the meter is asked: once a message.
        paced = turns_of_a_burst(running, 10_000)
        assert max(paced) <= 5
        assert len(paced) >= 40
        assert set(turns_of_a_burst(running, 1_000_000)) == {1}


def test_turns_that_take_long_take_up_less_and_more_again_when_they_do_not() -> None:
    with RunningLoop(PACED) as running:
        settle, cost = running.loop.settle, 200_000

        def costly(now_ms: int) -> None:
            running.spend(cost)
            settle(now_ms)

        running.loop.settle = costly  # type: ignore[method-assign]
        halved = turns_of_a_burst(running, 1_000)
        assert max(halved[8:-1]) == 1, "what follows takes twice as long as a turn may"
        cost = 0
        for _ in range(40):
            with dealer(running.endpoint) as peer:
                ping(peer)
        assert max(turns_of_a_burst(running, 1_000)) > 20


def test_others_have_their_turns_while_a_large_header_table_is_read_in_steps() -> None:
    maps = [{f"n{at}": f"v{number}" for at in range(64)} for number in range(200)]
    frame = encode([b""] * 200, fields=maps)
    with (
        RunningLoop(LOCAL) as running,
        dealer(running.endpoint) as sender,
        dealer(running.endpoint) as other,
    ):
        ping(sender)
        ping(other)
        running.core.unread = 1 << 30
        sender.send_multipart(encode_message([Publish("s", 1), Ping(5)], [frame]))
        for token in range(5):
            ping(other, token)
        assert running.core.published == []
        running.core.unread = 0
        assert received(sender)[1] == [frame]
        assert received(sender)[0] == [Pong(5)]


def test_links_of_several_connections_share_no_offences() -> None:
    """A descriptor that was used again had a neighbour's inode: it was cut for three others."""
    cut: list[str] = []
    with RunningLoop(LOCAL) as running:
        loop, connection = running.loop, SimpleNamespace(inode=7, links=set())
        loop._guard.cut = lambda found, reason: cut.append(reason)  # type: ignore[method-assign, assignment]
        for routing_id in (b"a", b"b", b"c", b"d"):
            peer: Any = SimpleNamespace(routing_id=routing_id)
            loop._goodbye(peer, connection, "malformed", 0)  # type: ignore[arg-type]
        assert cut == []
        for _ in range(2):
            loop._goodbye(peer, connection, "malformed", 0)  # type: ignore[arg-type]
        assert cut == ["it broke the protocol again and again"]
        loop._graces.clear()
