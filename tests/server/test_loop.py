"""The loop and the guard at real sockets: bad peers pay, the others notice nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from malamute_protocol.commands import (
    AnyCommand,
    Bye,
    Ping,
    Publish,
)
from malamute_protocol.framing import encode_message
from malamute_py.broker.ready import AppendBundle
from malamute_py.config import Config, LimitsSection, LinksSection
from malamute_py.server import inbound as inbound_module
from malamute_py.server.errors import ServerFailed
from malamute_py.server.result_queue import Died
from malamute_py.telemetry import Refusals
from tests.server.fakes import LOCAL, Noting, RunningLoop
from tests.server.peer import dealer, ping, received
from tests.server.zmtp import LONG, MORE, Zmtp, frame
from tests.waiting import WAIT_S


def resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_ended(peer: socket.socket, wait_s: float = WAIT_S) -> bool:
    """Whether the other side has ended the connection, with its last messages unread."""
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


@pytest.mark.parametrize("transport", ["tcp", "ipc", "inproc"])
def test_the_core_is_told_once_where_a_link_comes_from(transport: str, tmp_path: Path) -> None:
    endpoint = {
        "tcp": "tcp://127.0.0.1:0", "ipc": f"ipc://{tmp_path}/socket", "inproc": "inproc://broker",
    }[transport]  # fmt: skip
    with RunningLoop(Config(listen=[endpoint])) as running:
        with dealer(running.endpoint, running.context) as peer:
            ping(peer, 1)
            ping(peer, 2)
        addresses = running.core.addresses
        told = [("127.0.0.1" if transport == "tcp" else f"local user {os.geteuid()}")]
        assert [address for _, address in addresses] == (told if transport != "inproc" else [])


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
        running.stop_the_clock()  # An ended link's connection would be cut for lingering, too.
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
        # Without the guard it is gigabytes; the speed of the machine decides how much comes between
        # two looks.
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


@pytest.mark.moderate
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


@pytest.mark.moderate
def test_a_connection_that_says_nothing_is_cut() -> None:
    config = Config(listen=["tcp://127.0.0.1:0"], links=LinksSection(hello_ms=10_000))
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
        assert "no message came" in running.log.of("connection_cut")[0]["reason"]


def test_a_descriptor_is_known_again_when_the_last_connection_under_it_had_spoken() -> None:
    """Until the sockets were empty the next one was not: its bytes counted as unread."""
    noting = Noting()
    loop = noting.running.loop
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*encode_message([Ping(1)]))
        noting.turns_until(lambda: noting.counts[1] == 1)
        found = loop.peers.get(1)
        assert found is not None
        assert found.connection is not None
        connection = found.connection
        loop._inbound.ended.append(connection)
        assert loop._inbound._unsure() == set()
        loop._inbound.ended, connection.spoke = [connection], False
        assert loop._inbound._unsure() == {connection.fd}
        loop._inbound.ended = []
        assert loop._inbound._unsure() == set()
    noting.close()


@pytest.mark.moderate
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


@pytest.mark.moderate
def test_silent_connections_make_room_only_when_they_had_time_to_speak() -> None:
    links = LinksSection(greetings_max=3, address_greetings_max=3, greeting_ms=1_000)
    with RunningLoop(Config(listen=LOCAL.listen, links=links)) as running, ExitStack() as stack:
        running.stop_the_clock()
        silent = [stack.enter_context(Zmtp(running.endpoint)) for _ in range(6)]
        running.until(lambda: len(running.guard.connections) == 6)
        assert not running.log.of("connection_cut"), "a fleet that comes back at once"
        running.leap(1_000)
        stack.enter_context(Zmtp(running.endpoint))
        assert is_ended(silent[0].socket), "the oldest goes"
        assert not is_ended(silent[1].socket, 0.1)
        (event,) = running.until(lambda: running.log.of("connection_cut"))
        assert "silent" in event["reason"]


def test_lost_connections_are_remembered_within_a_bound_under_a_load_that_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbound_module, "_CUT_OFF_MAX", 3)
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
        assert list(loop._inbound.cut_off) == [
            peer.routing_id for peer in peers[2:] if peer is not None
        ]
    noting.close()


def test_a_loop_begins_under_a_clock_before_1970() -> None:
    running = RunningLoop(LOCAL)
    running._stands_at_ms = -57 * 366 * 86_400_000
    with running, dealer(running.endpoint) as peer:
        ping(peer)
    assert running.failure is None


def test_a_clock_that_is_set_forward_is_told_to_the_core_before_all_else() -> None:
    hours_ms = 3 * 3_600_000
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as peer:
        ping(peer)
        assert not [call for call in running.core.calls if call[0] == "skipped"]
        running.stop_the_clock()
        running.leap(hours_ms)
        running.until(lambda: any(call[0] == "skipped" for call in running.core.calls))
        ping(peer)
        [skipped_ms] = [call[1] for call in running.core.calls if call[0] == "skipped"]
        # The turn before may have taken a while itself.
        assert abs(skipped_ms - hours_ms) < 60_000
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
        links=LinksSection(send_messages_max=10, pending_bytes_max=8 << 20),
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


@pytest.mark.moderate
def test_a_blocked_peer_that_reads_again_gets_everything_in_order() -> None:
    config = Config(listen=["tcp://127.0.0.1:0"], links=LinksSection(send_messages_max=2))
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
    assert refusals.begins("main", "disk_full", 1_000)
    assert not refusals.begins("main", "disk_full", 1_000)
    assert not refusals.begins("main", "disk_full", 1_050)
    assert refusals.last(1_080) == {"main": {"code": "disk_full", "ms_ago": 30}}
    assert refusals.counts(1_099) == []
    assert refusals.counts(1_100) == [("main", "disk_full", 2)]
    assert refusals.counts(1_200) == []
    assert refusals.ends("main") == ("disk_full", 0)
    assert refusals.ends("main") is None
    assert refusals.last(1_200) == {}
    assert not refusals._last_ms, "the ring may be gone"


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
        assert not loop._offences
        loop._graces.clear()


def test_offences_are_forgotten_with_the_connection_that_was_cut() -> None:
    """Each client that broke the protocol and was cut left an entry for ever."""
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as peer:
        ping(peer)
        running.stop_the_clock()
        peer.send_multipart([b"\xc1"])
        running.until(lambda: running.loop._offences)
        running.leap(1_000)
        running.until(lambda: running.counters["cut_total"])
        running.until(lambda: not running.loop._offences)
