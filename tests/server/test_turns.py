"""How long a turn of the loop takes, and what goes first in it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from malamute_protocol.commands import Ping, Pong, Publish
from malamute_protocol.encode import encode
from malamute_protocol.framing import encode_message
from malamute_py.broker.ready import (
    AppendBundle,
    Appended,
    AppendRefused,
    BatchChecked,
    Ready,
)
from malamute_py.config import Config, LoopSection
from malamute_py.server.inbound import Inbound
from malamute_py.server.sockets import Listener
from tests.server.fakes import LOCAL, RunningLoop
from tests.server.peer import dealer, ping, received
from tests.server.zmtp import Zmtp, frame
from tests.waiting import WAIT_S

PACED = Config(listen=LOCAL.listen, loop=LoopSection(turn_us=100))


def turns_of_a_burst(running: RunningLoop, step_ns: int) -> list[int]:
    """Return how many messages each turn takes, of 200 that came while the loop was busy."""
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
        running.await_libzmq()
        running.core.turns = [0]
        running.step_ns = step_ns
        released.set()
        for _ in range(201):
            peer.receive_frame()
    return [count for count in running.core.turns if count]


def test_long_work_comes_after_what_peers_wait_for_and_short_work_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as peer:
        core = running.core
        take, spent_ns, takes = core.take_outgoing, 0, list[str]()

        def take_outgoing() -> Ready:
            takes.append("outgoing")
            return take()

        def take_ready() -> Ready:
            takes.append("work")
            running.spend(spent_ns)
            return take()

        def first_of_a_turn() -> str:
            takes.clear()
            ping(peer)
            running.until(lambda: bool(takes))
            return takes[0]

        monkeypatch.setattr(core, "has_work", True)
        monkeypatch.setattr(core, "take_outgoing", take_outgoing)
        monkeypatch.setattr(core, "take_ready", take_ready)
        assert [first_of_a_turn() for _ in range(3)] == ["work"] * 3
        spent_ns = 2_000_000  # 2 ms
        assert first_of_a_turn() == "work"
        spent_ns = 0
        assert [first_of_a_turn() for _ in range(20)] == ["outgoing"] * 20
        running.until(lambda: first_of_a_turn() == "work")


@pytest.mark.moderate
def test_a_turn_takes_up_messages_for_half_of_its_time_and_one_always() -> None:
    with RunningLoop(PACED) as running:
        # 50 us, and 10 each time that the meter is asked: once a message.
        paced = turns_of_a_burst(running, 10_000)
        assert max(paced) <= 5
        assert len(paced) >= 40
    # A loop of its own: messages of the connection that has gone would be looked for.
    with RunningLoop(PACED) as running:
        assert set(turns_of_a_burst(running, 1_000_000)) == {1}


@pytest.mark.moderate
def test_turns_that_take_long_take_up_less_and_more_again_when_they_do_not() -> None:
    with RunningLoop(PACED) as running:
        settle, cost = running.loop.settle, 200_000

        def costly(now_ms: int) -> None:
            running.spend(cost)
            settle(now_ms)

        running.loop.settle = costly  # type: ignore[method-assign]
        halved = turns_of_a_burst(running, 1_000)
        # A sixteenth of 50 us, and 1 us each time that the meter is asked: once a message.
        assert max(halved[8:-1]) <= 4, "what follows takes twice as long as a turn may"
        cost = 0
        for _ in range(40):
            with dealer(running.endpoint) as peer:
                ping(peer)
        assert max(turns_of_a_burst(running, 1_000)) > 20


@pytest.mark.moderate
def test_a_message_that_takes_long_to_be_taken_up_makes_no_turn_take_up_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RunningLoop(PACED) as running:
        drain = Inbound.drain

        def slow(inbound: Inbound, listener: Listener, now_ms: int) -> bool:
            drained = drain(inbound, listener, now_ms)
            running.spend(200_000)
            return drained

        monkeypatch.setattr(Inbound, "drain", slow)
        for _ in range(40):
            with dealer(running.endpoint) as peer:
                ping(peer)
        assert max(turns_of_a_burst(running, 1_000)) > 20


def with_large_table() -> bytes:
    maps = [{f"n{at}": f"v{number}" for at in range(64)} for number in range(200)]
    return encode([b""] * 200, fields=maps)


@pytest.mark.parametrize("has_work", [False, True])
def test_the_disk_begins_before_the_work_of_a_turn_and_without_work_at_its_end(
    has_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as peer:
        core, rings = running.core, running.rings
        done: list[str] = []
        append, take = rings.append, core.take_outgoing

        def take_outgoing() -> Ready:
            done.append("outgoing")
            return take()

        def take_ready() -> Ready:
            done.append("work")
            return take()

        def begin(bundles: list[AppendBundle]) -> list[Appended | AppendRefused]:
            done.clear()
            return append(bundles)

        monkeypatch.setattr(core, "has_work", has_work)
        monkeypatch.setattr(core, "take_outgoing", take_outgoing)
        monkeypatch.setattr(core, "take_ready", take_ready)
        monkeypatch.setattr(rings, "append", begin)
        monkeypatch.setattr(rings, "sync", lambda *_: done.append("sync"))
        core.ready.appends.append(AppendBundle("main", 1, ()))
        ping(peer)
        running.until(lambda: done.count("sync") > has_work)
        expected = ["sync", "work", "sync"] if has_work else ["outgoing", "sync"]
        assert done[: len(expected)] == expected


@pytest.mark.moderate
def test_others_have_their_turns_while_a_large_header_table_is_read_in_steps() -> None:
    frame = with_large_table()
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


def asked_at(calls: list[tuple[Any, ...]]) -> int:
    return next(at for at, call in enumerate(calls) if call[0] == "read ahead")


def test_a_message_whose_batch_is_validated_holds_up_its_link_alone() -> None:
    frame = with_large_table()
    with (
        RunningLoop(LOCAL) as running,
        dealer(running.endpoint) as sender,
        dealer(running.endpoint) as other,
    ):
        ping(sender)
        ping(other)
        core = running.core
        core.unread, core.waits = 1, True
        sender.send_multipart(encode_message([Publish("s", 1)], [frame]))
        sender.send_multipart(encode_message([Ping(5)]))
        asked = 0
        for token in range(5):
            ping(other, token)
            asked = sum(call[0] == "read ahead" for call in core.calls)
        assert core.published == []
        assert asked == 1, "the loop asks again and again"
        running.results.put(BatchChecked(core.calls[asked_at(core.calls)][1]))
        assert received(sender)[1] == [frame]
        assert received(sender)[0] == [Pong(5)]
