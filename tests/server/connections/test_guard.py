"""The guard at one connection: what it counts as unread, what it cuts, what it gives back."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections import Counter

import pytest
import zmq

from malamute_py.server.connections import descriptors, left_behind
from malamute_py.server.connections.connection import Connection
from malamute_py.server.connections.guard import EVENTS_A_TURN, Guard
from tests.server.connections.watched import LOCAL, Watched


def test_a_turn_takes_note_of_so_many_connections_and_the_next_turn_of_the_others() -> None:
    """3,000 connections that a peer closed at once held the loop for 43 ms."""
    counted: Counter[str] = Counter()
    guard = Guard(LOCAL, count=lambda name: counted.update([name]), report=lambda name, facts: None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.PAIR) as monitor, context.socket(zmq.PAIR) as told:
        monitor.bind("inproc://monitor")
        told.connect("inproc://monitor")
        for _ in range(EVENTS_A_TURN + 3):
            told.send_multipart([struct.pack("=Hi", zmq.EVENT_DISCONNECTED, 1 << 30), b""])
        guard.drain(monitor, 0, EVENTS_A_TURN, authenticated=False)
        assert counted["disconnected_total"] == EVENTS_A_TURN
        guard.drain(monitor, 0, EVENTS_A_TURN, authenticated=False)
        assert counted["disconnected_total"] == EVENTS_A_TURN + 3
    guard.close()


def test_an_end_that_is_told_late_ends_no_connection_of_another_listener() -> None:
    """The broker listens twice: the second listener has the number that the first one closed."""
    guard = Guard(LOCAL, count=lambda name: None, report=lambda name, facts: None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    first, former = socket.socketpair()
    second, latter = socket.socketpair()
    with (
        context,
        context.socket(zmq.PAIR) as one,
        context.socket(zmq.PAIR) as other,
        context.socket(zmq.PAIR) as of_one,
        context.socket(zmq.PAIR) as of_other,
        first, former, second, latter,
    ):  # fmt: skip
        for monitor, told, name in ((one, of_one, "one"), (other, of_other, "other")):
            monitor.bind(f"inproc://{name}")
            told.connect(f"inproc://{name}")
        fd = former.fileno()
        accepted = struct.pack("=Hi", zmq.EVENT_ACCEPTED, fd)
        disconnected = struct.pack("=Hi", zmq.EVENT_DISCONNECTED, fd)
        of_one.send_multipart([accepted, b""])
        assert guard.drain(one, 0, EVENTS_A_TURN, authenticated=False) == []
        ended = guard.connections.get(fd)
        os.dup2(latter.fileno(), fd)
        of_one.send_multipart([disconnected, b""])
        of_other.send_multipart([accepted, b""])
        assert guard.drain(other, 0, EVENTS_A_TURN, authenticated=False) == [ended]
        lives = guard.connections.get(fd)
        assert lives is not ended
        assert guard.drain(one, 0, EVENTS_A_TURN, authenticated=False) == []
        assert guard.connections.get(fd) is lives
        of_other.send_multipart([disconnected, b""])
        assert guard.drain(other, 0, EVENTS_A_TURN, authenticated=False) == [lives]
    guard.close()


def test_a_failed_handshake_is_told_at_the_end_of_its_own_monitors_connection() -> None:
    told: list[tuple[str, dict[str, object]]] = []
    guard = Guard(
        LOCAL, count=lambda name: None, report=lambda name, facts: told.append((name, facts))
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    first, former = socket.socketpair()
    with (
        context,
        context.socket(zmq.PAIR) as one,
        context.socket(zmq.PAIR) as other,
        context.socket(zmq.PAIR) as of_one,
        context.socket(zmq.PAIR) as of_other,
        first, former,
    ):  # fmt: skip
        tells = {one: of_one, other: of_other}
        for monitor, teller in tells.items():
            monitor.bind(f"inproc://{id(teller)}")
            teller.connect(f"inproc://{id(teller)}")

        def tell(monitor: zmq.Socket[bytes], event: int, value: int) -> None:
            tells[monitor].send_multipart([struct.pack("=Hi", event, value), b""])
            guard.drain(monitor, 0, EVENTS_A_TURN, authenticated=monitor is one)

        mismatch = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        fd, nobodys = former.fileno(), 1 << 30
        tell(other, zmq.EVENT_ACCEPTED, fd)
        tell(one, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, mismatch)
        # Between the failure and the end, the other monitor tells of a peer that simply left.
        tell(other, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 0)
        tell(other, zmq.EVENT_DISCONNECTED, nobodys)
        assert told == []
        # The number is another listener's connection's by now: its address is not this one's.
        tell(one, zmq.EVENT_DISCONNECTED, fd)
        assert told.pop() == ("denied", {"address": "unknown", "why": "mechanism"})
        tell(one, zmq.EVENT_DISCONNECTED, nobodys)
        assert told == [], "a failure is told once"
        tell(one, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 0)
        tell(one, zmq.EVENT_DISCONNECTED, nobodys)
        assert told.pop() == ("handshake_abandoned", {"address": "unknown"})
        assert told == []
    guard.close()


def test_a_connection_whose_descriptor_is_a_files_by_now_is_gone() -> None:
    left, right = socket.socketpair()
    guard = Guard(LOCAL, count=lambda name: None, report=lambda name, facts: None)
    with left, right, tempfile.TemporaryFile() as file:
        fd = right.fileno()
        guard._accepted(fd, 0)
        connection = guard.connections.get(fd)
        assert connection is not None
        # libzmq's thread may do this at any moment: the descriptor is closed, and opened as
        # another.
        os.dup2(file.fileno(), fd)
        before = os.listdir("/proc/self/fd")
        guard.cut(connection, "its link ended")
        # What earlier tests left may end meanwhile; the file stays open.
        assert len(os.listdir("/proc/self/fd")) <= len(before)
        assert os.fstat(fd).st_ino == os.fstat(file.fileno()).st_ino
        assert guard.connections.get(fd) is None
        guard._accepted(fd, 0)
        assert guard.connections.get(fd) is None
    guard.close()


@pytest.mark.parametrize("becomes", ["local", "listening", "file"])
def test_a_descriptor_that_becomes_another_while_it_is_asked_about_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    """A TCP connection's number was a local one's at the next question: an IndexError."""
    guard = Guard(LOCAL, count=lambda name: None, report=lambda name, facts: None)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        server.accept()[0] as accepted,
        socket.socket(socket.AF_UNIX) as local,
        tempfile.TemporaryFile() as file,
    ):
        fd, inode = accepted.fileno(), os.fstat(accepted.fileno()).st_ino
        numbers = {"local": local.fileno(), "listening": server.fileno(), "file": file.fileno()}
        began = descriptors.Borrowed.__init__

        def turns(self: descriptors.Borrowed, asked: int, family: int = socket.AF_INET) -> None:
            began(self, asked, family)
            # libzmq's thread closes the connection now, and something else gets its number.
            os.dup2(numbers[becomes], fd)

        monkeypatch.setattr(descriptors.Borrowed, "__init__", turns)
        connection = Connection(fd, inode, True, "127.0.0.1", 0, 0)
        guard._accepted(fd, 0)
        assert guard.connections.get(fd) is None, "the one that was accepted is gone"
        assert connection.arrived() is None
        port = descriptors.local_port(fd)
        assert port == (server.getsockname()[1] if becomes == "listening" else None)
        monkeypatch.undo()
    guard.close()


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


def test_frames_that_were_taken_up_and_wait_tell_the_size_of_those_behind_them() -> None:
    """Few costly commands had had their turn: 229 MiB were counted where 890 were taken."""
    with Watched() as watched:
        for _ in range(2):
            watched.arrives(300 * 130)
            watched.connection.waiting += 300 * 130
            watched.connection.waiting_frames += 300
            watched.look(drained=False)
        watched.arrives(1_000_000)
        watched.grows(200 << 20)
        watched.look(drained=False)
        assert watched.connection.memory == int((1_000_000 + 600 * 130) * (1 + 8_192 / 130))


def test_connections_of_one_share_tell_the_size_of_their_frames_together() -> None:
    """200 of which the loop had taken up few frames took 541 MiB, where 231 were counted."""
    with Watched() as watched:
        other = watched.another()
        for frames in (60, 60, 15, 15):
            for one in (watched, other):
                one.delivers(frames=frames, frame_bytes=130)
                one.arrives(200_000)
            watched.grows(200 << 20)
            watched.look(drained=False)
        assert watched.connection.memory == int(800_000 * (1 + 8_192 / 130))
        other.__exit__()


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


def test_what_cut_connections_left_counts_until_it_is_taken_up_and_given_back() -> None:
    """511 MiB came in, of 256: new messages filled other pages than those that were taken up."""
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
        # The loop drops the messages that it had sent.
        gone.delivered += gone.unread
        assert "its share" in cut_at(most + 1)[0], "memory has not shrunk"
        watched.guard.memory.rss = watched.guard.memory.before + 2 * most
        assert cut_at(2 * most) == [], "it fills what was taken up"
        watched.guard.memory.rss += 2 * most
        assert cut_at(3 * most) == []
        assert "its share" in cut_at(4 * most + 1)[0]
        watched.guard.memory._trimmed_ms = watched.now_ms + 1
        assert cut_at(4 * most) == []
        assert watched.guard.left_behind._connections == []


def leaves(watched: Watched, share: str, size: int) -> Connection:
    """Cut another connection of a guard, of so many unread bytes, and return it."""
    with watched.another() as other:
        other.connection.user = share
        watched.guard.connections._by_user[share] += 1
        other.connection.unread = other.connection.memory = size
        watched.guard.cut(other.connection, "planted")
        return other.connection


def test_what_ended_connections_left_costs_nobody_else_its_connection() -> None:
    """Three shares of such bytes were more than all may have: every other connection was cut."""
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


def test_who_connects_again_and_again_leaves_less_each_time() -> None:
    with Watched() as watched:
        live, share_max = watched.connection, LOCAL.limits.unread_share_bytes_max
        live.user = "one"
        watched.look(drained=False)
        room = []
        for _ in range(5):
            # Its address is not blamed: it has others.
            watched.guard.memory.rss = watched.guard.memory.before
            leaves(watched, "one", share_max)
            watched.guard.memory.rss = watched.guard.memory.before + (2 << 30)
            live.looks, size = 2, share_max
            while size:
                live.memory = live.unread = size
                if not watched.guard.unread.too_much([live]):
                    break
                size //= 2
            room.append(size)
        assert room == [share_max >> by for by in range(2, 7)]
        assert sum(room) < share_max // 2
        live.user = ""


def test_nobody_connects_while_ended_connections_of_many_addresses_fill_the_memory() -> None:
    """200 addresses that came again, each after another, took 1.6 GiB: each had ended once."""
    with Watched() as watched:
        guard, most = watched.guard, LOCAL.limits.unread_bytes_max // 4 * 3

        def is_shut() -> bool:
            return guard.listening._is_shut

        watched.look(drained=False)
        left = [leaves(watched, f"{n}", most // 4) for n in range(4)]
        for each in left:
            each.taken_ms = 1 << 40  # It never counts as left alone.
        watched.grows(most + 1)
        watched.look(drained=False)
        assert not is_shut()
        left[0].memory += 1
        watched.look(drained=False)
        assert is_shut()
        assert watched.counts["newcomers_turned_away_total"] == 1
        watched.grows(most)
        watched.look(drained=False)
        assert not is_shut(), "memory was given back"
        watched.grows(LOCAL.limits.unread_bytes_max + 1)
        for each in left:
            each.memory = 0
        watched.look(drained=False)
        assert is_shut(), "connections that no look saw have left it"
        watched.look()
        assert not is_shut(), "nothing is left in the sockets"


def test_what_an_ended_connection_left_ends_when_nothing_of_it_is_taken_up() -> None:
    """The beginning of a message, which libzmq drops, counted until the sockets were empty."""
    with Watched() as watched:
        watched.look(drained=False)
        ended = leaves(watched, "one", 100 << 20)
        for _ in range(5):
            ended.delivered += 10 << 20
            watched.look(drained=False)
            assert watched.guard.left_behind._connections == [ended], "messages of it are taken up"
        assert ended.unread == 50 << 20
        watched.guard.memory._trimmed_ms = watched.now_ms + 1
        watched.look(drained=False)
        assert watched.guard.left_behind._connections == []


def test_ended_connections_that_count_are_bounded_and_the_largest_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(left_behind, "_LEFT_MAX", 3)
    with Watched() as watched:
        watched.look(drained=False)
        sizes = [n << 20 for n in (3, 1, 5, 2, 4)]
        for size in sizes:
            leaves(watched, "one", size)
        assert watched.guard.left_behind.by_share()[0]["user one"] == sum(sizes)
        assert (
            sorted(each.memory for each in watched.guard.left_behind._connections)
            == sorted(sizes)[2:]
        )


def test_connections_count_the_growth_of_memory_once_and_not_each_for_itself() -> None:
    """Six honest clients with 90 MiB in frames of 4,000 bytes counted as 360 MiB."""
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


def test_who_leaves_much_behind_again_and_again_comes_in_when_it_was_taken_up() -> None:
    """15 s of one peer that sent tiny messages and came again took 1.2 GiB, without a bound."""
    refused = "ended connections"
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
        while guard.left_behind._ended_by_address["127.0.0.1"] < 2:
            assert guard.listening._turned_away == set(), "memory may have grown for another reason"
            assert comes()
            watched.look(drained=False)
        guard.memory.resident = lambda: before + (300 << 20)  # type: ignore[method-assign]
        watched.look(drained=False)
        assert not comes()
        assert refused in watched.cuts[-1]
        watched.look(drained=False)
        assert guard.listening._turned_away == {"127.0.0.1"}
        guard.left_behind._ended_by_address["another"] = 99
        assert comes(), "the other has left more"
        watched.look(drained=False)
        assert guard.listening._turned_away == set(), "no address of IP has that name"
        del guard.left_behind._ended_by_address["another"]
        assert not comes()
        watched.look(drained=False)
        assert guard.listening._turned_away == {"127.0.0.1"}
        watched.look(drained=True)
        assert comes(), "the sockets were empty"
        assert guard.listening._turned_away == set()
