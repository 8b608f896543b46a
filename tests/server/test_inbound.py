"""How long a turn takes up messages, by a socket and a meter that the test holds."""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from malamute_protocol.commands import Ping, Publish
from malamute_protocol.framing import decode_message, encode_message
from malamute_protocol.limits import Limits
from malamute_py.config import Config
from malamute_py.server import inbound
from malamute_py.server.connections.guard import EVENTS_A_TURN
from malamute_py.server.inbound import Inbound
from malamute_py.server.waiting import Arrived

_FRAME_NS = 1_000
QUESTION = [b"our own question"]
_TAKE_NS = 50_000


class Taken:
    """A listener whose socket has messages, each frame of which takes a microsecond to take up."""

    frame_bytes = 2
    authenticated = False

    def __init__(self, messages: list[list[Any]]) -> None:
        self.ns = 0
        self.received: list[int] = []
        self._frames = deque(
            SimpleFrame(bytes(frame), at < len(message))
            for message in messages
            for at, frame in enumerate([b"one" if message is SMALL else b"other", *message])
        )
        self.socket = self
        parts: Any = {"core": self, "guard": None, "peers": self}
        self.inbound: Any = Inbound(
            Config(), limits=Limits(), counters=defaultdict(int), meter=lambda: self.ns,
            report=lambda *_: None, **parts,
        )  # fmt: skip
        self.inbound.take_ns = self.inbound.aside_ns = _TAKE_NS
        self._peers = {
            name: SimpleNamespace(
                strict=False,
                connection=None,
                fd=-1,
                queued=None,
                number=number,
                identity="one",
                queue=lambda arrived: None,
            )
            for number, name in enumerate([b"one", b"other"])
        }

    def routes(self, _: object) -> Any:
        return self._peers

    @property
    def ahead_bytes(self) -> int:
        return 1 << 20

    def recv(self, *_: object) -> SimpleFrame:
        if not self._frames:
            raise zmq.Again
        self.ns += _FRAME_NS
        return self._frames.popleft()

    def receive(self, link: int, identity: str, commands: Any, *_: object) -> None:
        self.received.append(len(commands))

    def turn(self) -> int:
        """Return how many messages of few commands a turn does."""
        self.received.clear()
        self.inbound.until = self.ns + _TAKE_NS
        for peer in self._peers.values():
            peer.queued = None
        self.inbound.drain(self, 0)
        return len(self.received)


class SimpleFrame:
    """A frame as pyzmq gives it."""

    def __init__(self, data: bytes, more: bool) -> None:
        self.bytes, self.more = data, more

    def __len__(self) -> int:
        return len(self.bytes)


@pytest.fixture(autouse=True)
def _more_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "zmq_poll", lambda *_: [1])


SMALL = list(encode_message([Ping(1)]))
MANY = list(encode_message([Ping(token) for token in range(2_000)]))
LARGE = list(encode_message([Publish("s", at) for at in range(200)], [b"content"] * 200))


def test_small_messages_are_taken_up_for_a_time() -> None:
    taken = Taken([SMALL] * 100)
    assert [taken.turn() for _ in range(4)] == [25, 25, 25, 25]


@pytest.mark.parametrize("before", [0, 10])
def test_a_message_of_many_frames_takes_no_time_from_those_of_others(before: int) -> None:
    taken = Taken([*[SMALL] * before, LARGE, *[SMALL] * 100])
    # 202 microseconds for it are more than the turn has.
    assert taken.turn() == before + 25


@pytest.mark.parametrize(("large", "small"), [(LARGE, 25), (MANY, 24)])
def test_a_message_with_much_to_decode_is_decoded_after_those_of_others_are_taken_up(
    monkeypatch: pytest.MonkeyPatch, large: list[Any], small: int
) -> None:
    taken = Taken([large, *[SMALL] * 100])

    def decode(frames: Any, limits: Limits) -> Any:
        taken.ns += _TAKE_NS if frames != SMALL else 0
        return decode_message(frames, limits)

    monkeypatch.setattr(inbound, "decode_message", decode)
    assert taken.turn() == small


def test_a_message_of_as_many_commands_as_a_share_has_is_done_at_once() -> None:
    """64 tasks that publish send such messages."""
    share = Config().loop.share_commands
    contents = [b"content"] * share
    taken = Taken([list(encode_message([Publish("s", at) for at in range(share)], contents))])
    taken.turn()
    assert taken.received == [share]


def test_one_message_of_many_frames_is_taken_up_in_a_turn_beside_others() -> None:
    taken = Taken([*[LARGE] * 2, *[SMALL] * 100])
    assert [taken.turn(), taken.turn()] == [0, 25]


@pytest.mark.parametrize(
    ("frames", "claimed", "noted"),
    [
        (QUESTION, False, 0),
        (QUESTION, True, inbound._NOTES_MAX),
        (SMALL, False, inbound._NOTES_MAX),  # It waits, and nobody is cut.
    ],
)
def test_one_message_has_few_connections_noted_however_many_come(
    monkeypatch: pytest.MonkeyPatch, frames: list[Any], claimed: bool, noted: int
) -> None:
    """Peers that connected and closed without end held the loop for 5.4 s."""
    drained: list[int] = []
    cut: list[str] = []

    def drain(monitor: object, now_ms: int, most: int, *, authenticated: bool) -> list[Any]:
        drained.append(most)
        assert len(drained) < 100
        return []

    monkeypatch.setattr(inbound, "has_events", lambda monitor: True)
    guard: Any = SimpleNamespace(
        drain=drain, cut_silent=cut.append, connections=SimpleNamespace(accepted=1)
    )
    peers: Any = SimpleNamespace(connection=lambda head: None, is_known=lambda head: False)
    core: Any = None
    taken = inbound.Inbound(
        Config(), core=core, guard=guard, peers=peers, limits=Limits(),
        counters=defaultdict(int), meter=lambda: 0, report=lambda *_: None,
    )  # fmt: skip
    numbering = SimpleNamespace(
        answers=lambda frames: frames is QUESTION, is_claimed=lambda routing_id: claimed,
        is_given=lambda routing_id, accepted: False,
    )  # fmt: skip
    listener: Any = Taken([])
    listener.numbering, listener.monitor = numbering, object()
    head: Any = SimpleFrame(b"\0\0\0\0\1", True)
    assert taken._admit(listener, head, Arrived(frames, 20, 2), None, 0) is None
    assert bool(taken.held) is (frames is SMALL)
    assert taken._counters["claimed_ids_total"] == claimed
    assert drained == [EVENTS_A_TURN] * noted
    assert bool(cut) is claimed


def test_a_newcomer_is_judged_once_its_connection_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind many connections an honest client counted as one that claims a routing id."""
    waiting = [inbound._NOTES_MAX + 2]
    monkeypatch.setattr(inbound, "has_events", lambda monitor: waiting[0] > 0)
    taken = Taken([SMALL, SMALL])
    newcomer = taken._peers.pop(b"one")
    connections = SimpleNamespace(accepted=0)

    def note(monitor: object, now_ms: int, most: int, *, authenticated: bool) -> list[Any]:
        waiting[0] -= 1
        connections.accepted = 0 if waiting[0] else 1
        return []

    def add(listener: object, head: SimpleFrame) -> Any:
        taken._peers[head.bytes] = newcomer
        return newcomer

    shares: list[bytes] = []
    newcomer.queue = lambda arrived: shares.append(arrived.frames[0])
    newcomer.connection = None
    fakes: dict[str, Any] = {
        "add": add, "attach": lambda peer, unsure: True, "connection": lambda head: None,
        "is_known": lambda head: connections.accepted == 1,
        "monitor": object(),
        "numbering": SimpleNamespace(
            answers=lambda frames: False, is_given=lambda routing_id, accepted: accepted == 1
        ),
    }  # fmt: skip
    for name, fake in fakes.items():
        setattr(taken, name, fake)
    taken.inbound._guard = SimpleNamespace(drain=note, connections=connections)
    taken.inbound.until = _TAKE_NS
    assert not taken.inbound.drain(taken, 0)
    assert list(taken.inbound.held) == [taken]
    assert not taken._peers.get(b"one")
    assert len(taken._frames) == 2, "the message behind it was taken up before it"
    assert taken.inbound.drain(taken, 0)
    assert shares == [SMALL[0]] * 2
    assert not taken.inbound.held
    assert taken.inbound.queued == {newcomer.number: newcomer}
    assert taken.inbound._counters["claimed_ids_total"] == 0


def test_a_link_whose_connection_is_told_late_counts_for_its_user_too() -> None:
    """It was not refused where its user had too many connections."""
    taken = Taken([SMALL])
    peer = taken._peers[b"one"]
    peer.fd = 7
    refused: list[tuple[int, str]] = []
    fakes: dict[str, Any] = {
        "attach": lambda peer, unsure: False,
        "is_known": lambda head: True,
        "malformed": lambda link, code, reason, now_ms: refused.append((link, code)),
    }
    for name, fake in fakes.items():
        setattr(taken, name, fake)
    taken.inbound._guard = SimpleNamespace(connections=SimpleNamespace())
    assert taken.turn() == 0
    assert refused == [(peer.number, "limit")]
    assert taken.inbound._counters["connections_refused_total"] == 1


@pytest.mark.parametrize("numbered", [True, False])
def test_what_an_authenticated_connection_left_is_dropped_where_no_other_may_have_its_id(
    numbered: bool,
) -> None:
    """Each of the messages that it had left made a link, which a later connection paid for."""
    taken = Taken([SMALL] * 3)
    peer = taken._peers.pop(b"one")
    peer.strict, peer.numbered, peer.routing_id = True, numbered, b"one"
    dropped: list[int] = []
    peer.delivered = lambda size, parts: dropped.append(parts)
    admitted: list[bytes] = []
    taken.inbound._admit = lambda listener, head, *_: admitted.append(head.bytes)
    taken.inbound.note_lost(peer)
    taken.turn()
    assert (len(dropped), len(admitted)) == ((3, 0) if numbered else (0, 3))
