"""Shares of large messages: in what order the messages of several peers are done."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

from malamute_protocol.commands import (
    Atomic,
    Command,
    Deliver,
    Ping,
    Publish,
    Result,
)
from malamute_protocol.encode import encode
from malamute_protocol.framing import decode_message, encode_message
from malamute_py.broker.ready import Send
from malamute_py.server.connections.connection import Connection
from malamute_py.server.journaling.journal_threads import Synced
from tests.server.fakes import LOCAL, Noting, RunningLoop
from tests.server.peer import dealer
from tests.server.zmtp import Zmtp, frame


def test_answers_of_one_turn_are_messages_that_a_client_takes() -> None:
    """Two pages of a listing, asked for at once, were a message for which the client hung up."""
    noting = Noting()
    results = [Result(number, {"page": b"x" * 400_000}) for number in range(5)]
    delivery = Deliver(1, 0, 1, 2)
    with dealer(noting.running.endpoint) as peer:
        peer.send_multipart(encode_message([Ping(1)]))
        noting.turns_until(lambda: noting.calls)
        noting.running.loop._send(Send(1, [*results, delivery], [b"stamp", b"content"]), 0)
        answers: list[Command] = []
        while len(answers) < 6:
            for command, frames in decode_message(peer.recv_multipart()):
                answers.append(command)
                assert frames == ((b"stamp", b"content") if command == delivery else ())
    assert answers == [*results, delivery]
    noting.close()


@pytest.mark.slow
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
        noting.turns_until(lambda: peer.queued is None)
        assert peer.connection is not None
        assert peer.connection.delivered == (len(message) + 1) * count
    noting.close()


@pytest.mark.moderate
def test_what_came_in_small_messages_is_settled_before_shares_of_large_ones() -> None:
    """A confirm waited for the shares before its append, and for those of the next turn after."""
    noting = Noting()
    loop = noting.running.loop
    done: list[object] = []
    settle, receive = loop.settle, noting._receive

    def settled(now_ms: int) -> None:
        done.append("settled")
        settle(now_ms)

    def received(link: int, identity: str, commands: list[Command], *rest: Any) -> None:
        done.append(link)
        receive(link, identity, commands, *rest)

    loop.settle = settled  # type: ignore[method-assign]
    noting.running.core.receive = received  # type: ignore[assignment, method-assign]
    with Zmtp(noting.running.endpoint) as greedy, Zmtp(noting.running.endpoint) as other:
        greedy.send(*encode_message([Ping(number) for number in range(4_000)]))
        noting.turns_until(lambda: noting.calls)
        other.send(*encode_message([Ping(7)]))
        noting.running.await_libzmq()
        noting.turns_until(lambda: noting.counts[2])
        at = done.index(2)
        assert done[at : at + 3] == [2, "settled", 1]
    noting.close()


class Syncing(Noting):
    """A loop whose every settling of what peer 2 sent begins a sync, and what it does in order."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[object] = []
        self.answers = True
        """Whether a sync ends while the loop's time stands; else it does not end."""
        core, loop = self.running.core, self.running.loop
        self._settle = loop.settle
        loop.settle = self._settled  # type: ignore[method-assign]
        core.synced = lambda *_: self.done.append("synced")  # type: ignore[method-assign]

    def _receive(self, link: int, *rest: Any) -> None:
        self.done.append(link)
        super()._receive(link, *rest)

    def _settled(self, now_ms: int) -> None:
        self._settle(now_ms)
        self.done.append("settled")
        if self.done[-2:-1] == [2]:
            self.running.rings.syncs_due += 1
            if self.answers:
                threading.Timer(0.05, self.running.results.put, [Synced("main", 9)]).start()

    def rounds(self, peer: Zmtp, count: int) -> list[list[object]]:
        """Send a message in each of so many turns; return what each did after it took that up."""
        found = []
        for _ in range(count):
            self.done.clear()
            peer.send(*encode_message([Ping(7)]))
            self.running.await_libzmq()
            self.turns_until(lambda: 2 in self.done)
            found.append(self.done[self.done.index(2) + 1 :])
        return found


@pytest.mark.moderate
def test_a_turn_waits_for_the_sync_of_what_came_in_small_messages_before_it_does_shares() -> None:
    """The sync got no processor beside shares of large ones, and its confirm waited for them."""
    noting = Syncing()
    with Zmtp(noting.running.endpoint) as greedy, Zmtp(noting.running.endpoint) as other:
        greedy.send(*encode_message([Ping(number) for number in range(4_000)]))
        noting.turns_until(lambda: noting.calls)
        for did in noting.rounds(other, 3):
            assert did[:4] == ["settled", "synced", "settled", 1]
        assert noting.running.rings.syncs_due == 0
    noting.close()


@pytest.mark.moderate
def test_a_turn_does_not_wait_where_no_commands_waited_before_it() -> None:
    """Clients that publish by 256 tasks had a ninth less beside a client that does by one."""
    noting = Syncing()
    with Zmtp(noting.running.endpoint) as greedy, Zmtp(noting.running.endpoint) as other:
        greedy.send(*encode_message([Ping(1)]))
        noting.turns_until(lambda: noting.calls)
        other.send(*encode_message([Ping(7)]))
        greedy.send(*encode_message([Ping(number) for number in range(4_000)]))
        noting.running.await_libzmq()
        noting.turns_until(lambda: "synced" in noting.done)
        at = noting.done.index(2)
        assert noting.done[at + 1 : at + 3] == ["settled", 1]
    noting.close()


@pytest.mark.moderate
def test_a_turn_that_waited_in_vain_is_the_last_to_wait_until_a_sync_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wait of 2 ms in each turn would be most of the time, with a disk that takes 30."""
    noting = Syncing()
    noting.answers = False
    waits: list[float] = []

    def wait(ms: float) -> bool:
        waits.append(ms)
        noting.running.spend(int(ms * 1_000_000))
        return False

    monkeypatch.setattr(noting.running.results, "wait", wait)
    with Zmtp(noting.running.endpoint) as greedy, Zmtp(noting.running.endpoint) as other:
        greedy.send(*encode_message([Ping(number) for number in range(4_000)]))
        noting.turns_until(lambda: noting.calls)
        for did in noting.rounds(other, 3):
            assert did[:2] == ["settled", 1]
        assert waits == [2]
        noting.running.results.put(Synced("main", 9))
        noting.turns_until(lambda: "synced" in noting.done)
        noting.rounds(other, 1)
        assert waits == [2, 2]
    noting.close()


@pytest.mark.moderate
def test_shares_make_no_turn_take_up_fewer_messages() -> None:
    """A turn took up a message or two beside them, so that six peers waited for each other."""
    noting = Noting()
    running, receive = noting.running, noting._receive

    def received(link: int, *rest: Any) -> None:
        if link == 1:
            running.spend(10_000_000)
        receive(link, *rest)

    running.core.receive = received  # type: ignore[assignment, method-assign]
    with Zmtp(running.endpoint) as greedy, Zmtp(running.endpoint) as other:
        greedy.send(*encode_message([Ping(number) for number in range(4_000)]))
        noting.turns_until(lambda: noting.calls)
        other.socket.sendall(frame(encode_message([Ping(7)])[0]) * 5)
        noting.turns_until(lambda: noting.counts[1] == 4_000)
        pacing = running.loop._pacing
        assert pacing.take_ns == pacing.take_most_ns
        assert noting.counts[2] == 5
    noting.close()


@pytest.mark.moderate
def test_messages_of_costly_commands_wait_for_small_ones_and_have_one_small_share_a_turn() -> None:
    """Ten peers that listed streams by the 64 had a confirm wait for ten turns of 10 ms."""
    noting = Noting()
    running = noting.running
    settle, settled = running.loop.settle, 0

    def costly(now_ms: int) -> None:
        nonlocal settled
        running.spend(100_000 * (noting.counts[1] - settled))
        settled = noting.counts[1]
        settle(now_ms)

    running.loop.settle = costly  # type: ignore[method-assign]
    message = frame(encode_message([Ping(number) for number in range(60)])[0])
    with Zmtp(running.endpoint) as greedy, Zmtp(running.endpoint) as other:
        greedy.socket.sendall(message)
        noting.turns_until(lambda: noting.counts[1])
        assert noting.counts[1] == 60, "at once, as nobody knows yet what they cost"
        for _ in range(3):
            greedy.socket.sendall(message * 2)
            other.socket.sendall(frame(encode_message([Ping(7)] * 4)[0]))
            running.await_libzmq()
            before = noting.counts.copy()
            while noting.counts[2] == before[2]:
                running.loop.turn()
            assert noting.counts[2] == before[2] + 4
            assert noting.counts[1] == before[1] + 16
        noting.turns_until(lambda: noting.counts[1] == 60 * 7)
        noting.turns_until(lambda: not running.loop._inbound.is_tight)
    noting.close()


@pytest.mark.moderate
def test_a_small_message_waits_for_one_share_that_takes_far_too_long() -> None:
    """A confirm waited for two steps of 512 parts: before its record was taken up, and after it."""
    noting = Noting()
    running = noting.running
    done: list[int] = []

    def received(link: int, *rest: Any) -> None:
        done.append(link)
        running.spend(10_000_000 if link == 1 else 0)
        noting._receive(link, *rest)

    running.core.receive = received  # type: ignore[assignment, method-assign]
    with Zmtp(running.endpoint) as greedy, Zmtp(running.endpoint) as other:
        greedy.send(*encode_message([Ping(number) for number in range(4_000)]))
        noting.turns_until(lambda: noting.calls)
        turns: list[list[int]] = []
        for _ in range(6):
            done.clear()
            other.send(*encode_message([Ping(7)]))
            running.await_libzmq()
            running.loop.turn()
            turns.append([*done])
        assert turns == [[2], [2, 1]] * 3
        # Where no small message comes, each turn does a share.
        for _ in range(3):
            done.clear()
            running.loop.turn()
            assert done == [1]
    noting.close()


@pytest.mark.moderate
def test_a_small_message_does_not_wait_for_one_of_each_link() -> None:
    """With 100 links that sent 60 commands a message, a confirm waited for 130 ms."""
    noting = Noting()
    running = noting.running

    def received(link: int, *rest: Any) -> None:
        running.spend(1_200_000 if link > 1 else 0)
        noting._receive(link, *rest)

    running.core.receive = received  # type: ignore[assignment, method-assign]
    pings: list[Command] = [Ping(number) for number in range(60)]
    with ExitStack() as stack:
        other, *crowd = (stack.enter_context(Zmtp(running.endpoint)) for _ in range(21))
        for peer in [other, *crowd]:
            noting.counts.clear()
            peer.send(*encode_message([Ping(7)]))
            noting.turns_until(lambda: noting.counts)
        noting.counts.clear()
        noting.calls.clear()
        for peer in crowd:
            peer.socket.sendall(frame(encode_message(pings)[0]) * 2)
        other.send(*encode_message([Ping(7)]))
        running.await_libzmq()
        noting.turns_until(lambda: noting.counts[1])
        assert noting.counts.total() <= 60 * 5 + 1
        noting.turns_until(lambda: noting.counts.total() == 60 * 40 + 1)
        assert all(noting.of(link) == pings * 2 for link in range(2, 22))
        noting.turns_until(lambda: not running.loop._inbound.is_crowded)
    noting.close()


@pytest.mark.moderate
def test_messages_that_only_wait_take_no_longer_to_be_taken_up_than_a_turn_may() -> None:
    """256 messages of 1,000 frames after one that was done in shares took 264 ms at once."""
    noting = Noting()
    loop = noting.running.loop
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*encode_message([Ping(number) for number in range(4_000)]))
        noting.turns_until(lambda: noting.calls)
        found = loop.peers.get(1)
        assert found is not None
        peer.socket.sendall(frame(encode_message([Ping(7)])[0]) * 200)
        noting.running.await_libzmq()
        loop._pacing.take_ns = loop._pacing.take_most_ns = 50
        noting.running.step_ns = 1
        counters = noting.running.counters
        most = waited = 0
        while noting.counts[1] < 4_200:
            before = counters["messages_in_total"]
            loop.turn()
            waited = max(waited, len(found.queued or ()))
            most = max(most, counters["messages_in_total"] - before)
        assert waited > 20, "they waited"
        assert most <= 50, "each message asks once whether the time is over"
    noting.close()


@pytest.mark.moderate
def test_a_link_that_the_guard_cut_is_lost_before_what_it_sent_is_taken_up() -> None:
    """256 MiB of a flood were copied out of libzmq first, and took as much memory again."""
    noting = Noting()
    loop = noting.running.loop
    lost: list[int] = []

    def note(link: int, now_ms: int) -> int:
        lost.append(link)
        return 0

    noting.running.core.link_lost = note  # type: ignore[method-assign]
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*encode_message([Ping(number) for number in range(4_000)]))
        noting.turns_until(lambda: noting.calls)
        found = loop.peers.get(1)
        assert found is not None
        connection = found.connection
        assert connection is not None
        peer.socket.sendall(frame(encode_message([Ping(7)])[0]) * 200)
        noting.running.await_libzmq()
        loop._pacing.take_ns = loop._pacing.take_most_ns = 50
        noting.running.step_ns = 1
        guard = loop._guard
        check = guard.check

        def cutting(now_ms: int, **rest: bool) -> list[Connection]:
            guard._end(connection, "its share has too many unread bytes")
            return [*check(now_ms, **rest), connection]

        guard.check = cutting  # type: ignore[method-assign]
        loop._guard_at_ms = 0
        loop.turn()
        assert lost == [1]
        assert found.queued, "messages of it waited"
        assert noting.running.counters["messages_in_total"] < 201, "others were not taken up"
        guard.check = check  # type: ignore[method-assign]
    noting.close()


def test_messages_that_waited_when_their_link_ended_are_not_unread() -> None:
    with RunningLoop(LOCAL) as running, Zmtp(running.endpoint) as peer:
        many = frame(encode_message([Ping(number) for number in range(4_000)])[0])
        # They wait for 4,000 commands and a message that costs the link.
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
        assert found in loop._inbound.cut_off.values(), "what comes of it is dropped"
        assert (found.commands, found.frames, found.queued) == ([], [], None)
    noting.close()


@pytest.mark.moderate
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


def test_batches_of_many_new_subjects_are_done_one_by_one_after_what_others_sent() -> None:
    """Six peers sent 3,000 new subjects a batch, 55 KB of them: a confirm waited for a turn each.

    Of 16 such batches in a message, all were done in one turn of 130 ms.
    """
    noting = Noting()
    contents = [
        encode([b""] * 1_500, subject=[f"batch.{at}.subject.{row}" for row in range(1_500)])
        for at in range(4)
    ]
    with Zmtp(noting.running.endpoint) as bulk, Zmtp(noting.running.endpoint) as other:
        for peer in (bulk, other):
            peer.send(*encode_message([Ping(1)]))
            noting.turns_until(lambda: noting.calls)
            noting.running.await_libzmq()
            noting.running.loop.turn()
        noting.turns_until(lambda: len(noting.counts) == 2)
        noting.calls.clear()
        bulk.send(*encode_message([Publish("s", at + 1) for at in range(4)], contents))
        noting.running.await_libzmq()
        other.send(*encode_message([Ping(7)]))
        noting.running.await_libzmq()
        noting.turns_until(lambda: noting.counts[1] == 5)
    assert [(link, len(commands)) for link, commands, _ in noting.calls] == [(2, 1), *[(1, 1)] * 4]
    found = [[bytes(frame) for frame in frames] for link, _, frames in noting.calls if link == 1]
    assert found == [[one] for one in contents]
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


@pytest.mark.moderate
def test_a_malformed_message_behind_others_costs_the_link_after_them() -> None:
    noting = Noting()
    with Zmtp(noting.running.endpoint) as peer:
        peer.send(*encode_message([Ping(number) for number in range(200)]))
        peer.send(b"nonsense")
        noting.turns_until(lambda: ("malformed", 1, "malformed") in noting.running.core.calls)
        assert noting.of(1) == [Ping(number) for number in range(200)]
        noting.turns_until(lambda: not noting.running.loop._inbound.queued)
    noting.close()
