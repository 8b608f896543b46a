"""Links: which are welcomed, refused and ended, and what a bad or slow peer costs others."""

from __future__ import annotations

import msgspec
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.errors import CODES
from malamute_protocol.link import BROKER_COMMANDS, CLIENT_COMMANDS, TRANSITIONS, Side, State
from tests.broker.shell import Shell, bodies


def test_a_hello_is_answered_with_what_holds_on_the_link() -> None:
    shell = Shell(window_bytes=1234)
    welcome = shell.hello(1, heartbeat_ms=200).last(wire.Welcome)
    assert welcome.broker == shell.uuid
    assert welcome.epoch == 1
    assert welcome.window_bytes == 1234
    assert (welcome.heartbeat_ms, welcome.expiry_ms) == (200, 600)
    assert welcome.now_ms == shell.now_ms


@pytest.mark.parametrize(
    ("asked", "given"), [(0, 5_000), (1, 50), (10_000_000, 60_000), (700, 700)]
)
def test_the_heartbeat_asked_for_is_kept_within_bounds(asked: int, given: int) -> None:
    assert Shell().hello(1, heartbeat_ms=asked).last(wire.Welcome).heartbeat_ms == given


@pytest.mark.parametrize("command", [wire.Ping(), wire.Credit(1, 1, 1), wire.BrokerInfo(3)])
def test_anything_before_a_hello_is_refused_and_ends_the_link(command: wire.Command) -> None:
    peer = Shell().send(1, command)
    assert peer.last(wire.Refused).code == "unexpected"
    assert peer.last(wire.Bye).code == "unexpected"
    assert peer.closed


def test_a_publish_before_a_hello_is_refused_and_nothing_is_stored() -> None:
    shell = Shell()
    peer = shell.publish(1, "s", [b"x"])
    assert [type(command) for command in peer.commands] == [wire.Refused, wire.Bye]
    assert peer.closed
    assert not shell.rings


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (wire.Hello((2, 9), b"s" * 16), "version"),
        (wire.Hello((1, 1), b"short"), "malformed"),
    ],
)
def test_a_hello_that_cannot_be_met_is_refused_by_name(hello: wire.Hello, code: str) -> None:
    peer = Shell().send(1, hello)
    assert peer.last(wire.Refused).code == code
    assert peer.last(wire.Bye).code == code
    assert peer.closed


def test_a_credential_does_not_carry_another_identity() -> None:
    shell = Shell()
    shell.broker.receive(1, "alice", [wire.Hello((1, 1), b"s" * 16, "bob")], [], shell.now_ms)
    shell.run()
    assert shell.peers[1].last(wire.Refused).code == "forbidden"
    assert shell.peers[1].closed


def test_an_authenticated_link_has_the_identity_of_its_credential() -> None:
    shell = Shell()
    peer = shell.send(1, wire.Hello((1, 1), b"s" * 16), identity="alice")
    assert peer.last(wire.Welcome).identity == "alice"


VALUES = {
    "start": [0], "numbers": [0], "requests": [0], "ranges": [(0, 1)],
    "settings": {"description": "d"}, "transaction": b"t", "place": 1, "count": 1,
}  # fmt: skip


def any_of(kind: type[wire.Command]) -> wire.Command:
    """Return a command of a type; its fields do not matter."""
    if kind is wire.Atomic:
        return wire.Atomic(2, 0)
    values = {
        str: "s", int: 2, bytes: b"s" * 16, bool: True, tuple[int, int]: (1, 1),
        dict[str, object]: {},
    }  # fmt: skip
    return kind(
        *(
            VALUES.get(field.name) or values.get(field.type, ["all"])
            for field in msgspec.structs.fields(kind)
            if field.required
        )
    )


@pytest.mark.parametrize("state", [State.NEW, State.GREETED, State.OPEN])
@pytest.mark.parametrize("kind", sorted({*CLIENT_COMMANDS, *BROKER_COMMANDS}, key=repr))
def test_a_link_takes_what_the_protocols_table_says_in_each_state(
    kind: type[wire.Command], state: State
) -> None:
    shell = Shell()
    command = any_of(kind)
    frames = [encode([b"x"])] * command.content_frames
    if state is State.OPEN:
        shell.hello(1)
    if state is State.GREETED:
        peer = shell.send(1, wire.Hello((1, 1), b"s" * 16), command, frames=frames)
    else:
        peer = shell.send(1, command, frames=frames)
    wrong = [refused for refused in peer.of(wire.Refused) if refused.code == "unexpected"]
    if kind in TRANSITIONS[state][Side.CLIENT]:
        assert not wrong
        assert peer.closed == (kind is wire.Bye)
    else:
        assert wrong[0].command == kind.__struct_config__.tag
        assert peer.last(wire.Bye).code == "unexpected"
        assert peer.closed
        assert not shell.rings, "nothing took effect"


@pytest.mark.parametrize("count", [-1, 2, 1 << 62])
def test_a_step_of_more_commands_than_its_message_has_is_malformed(count: int) -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.send(
        1, wire.Atomic(1, count), wire.Publish("s", 2), frames=[encode([b"x"])]
    )  # fmt: skip
    assert peer.last(wire.Refused).code == "malformed"
    assert peer.closed
    assert not shell.rings


def test_a_second_hello_on_a_link_ends_it() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.hello(1)
    assert peer.last(wire.Refused).code == "unexpected"
    assert peer.closed


def test_a_command_that_only_a_broker_sends_ends_the_link_of_a_client() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.send(1, wire.Confirm(1, 2, 1, 0, 0))
    assert peer.last(wire.Refused).code == "unexpected"
    assert peer.closed


def test_a_newer_link_of_a_session_replaces_the_older() -> None:
    shell = Shell()
    old = shell.hello(1, session=b"s" * 16)
    shell.subscribe(1, 1, "events")
    new = shell.hello(2, session=b"s" * 16)
    assert old.last(wire.Bye).code == "replaced"
    assert old.closed
    assert new.of(wire.Welcome)
    assert shell.broker.gauges["subscriptions"] == 0
    assert shell.broker.gauges["links"] == 1


def test_a_session_cannot_be_taken_over_by_another_identity() -> None:
    shell = Shell()
    old = shell.hello(1, session=b"s" * 16, identity="alice")
    new = shell.hello(2, session=b"s" * 16, identity="bob")
    assert new.last(wire.Refused).code == "forbidden"
    assert not old.closed


def test_a_silent_link_is_pinged_and_then_ended() -> None:
    shell = Shell(heartbeat_ms=100)
    peer = shell.hello(1)
    shell.wait(100)
    assert peer.of(wire.Ping)
    assert not peer.of(wire.Bye)
    shell.wait(100)
    shell.wait(100)
    assert peer.last(wire.Bye).code == "silent"
    assert peer.closed
    assert shell.broker.gauges["links"] == 0


def test_a_link_that_answers_pings_stays() -> None:
    shell = Shell(heartbeat_ms=100)
    peer = shell.hello(1)
    for _ in range(20):
        shell.wait(100)
        shell.send(1, wire.Pong(0))
    assert not peer.closed


def test_a_connection_that_never_sends_hello_is_ended() -> None:
    shell = Shell(heartbeat_ms=100)
    shell.broker.receive(1, "", [], [], shell.now_ms)
    shell.run()
    shell.wait(300)
    assert shell.peers[1].last(wire.Bye).code == "silent"
    assert shell.peers[1].closed


def test_the_core_says_when_it_wants_to_be_woken() -> None:
    shell = Shell(heartbeat_ms=100)
    assert shell.broker.wake_at_ms() is None
    shell.hello(1)
    assert shell.broker.wake_at_ms() == shell.now_ms + 100


def test_a_ping_is_answered_with_its_token() -> None:
    shell = Shell()
    shell.hello(1)
    assert shell.send(1, wire.Ping(99)).last(wire.Pong).token == 99


def test_a_bye_ends_the_link_and_its_subscriptions() -> None:
    shell = Shell()
    shell.hello(1)
    shell.subscribe(1, 1, "events")
    peer = shell.send(1, wire.Bye())
    assert peer.last(wire.Bye).code == "closed"
    assert peer.closed
    assert shell.broker.gauges["subscriptions"] == 0


def test_nothing_follows_a_bye() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.send(1, wire.Bye(), wire.Ping(1), wire.BrokerInfo(2))
    assert type(peer.commands[-1]) is wire.Bye
    assert not peer.of(wire.Pong)
    assert not peer.of(wire.Result)


@pytest.mark.parametrize("malformed", [False, True])
def test_a_message_after_the_end_of_a_link_in_the_same_turn_opens_no_other(
    malformed: bool,
) -> None:
    shell = Shell()
    shell.hello(1)
    if malformed:
        shell.broker.malformed(1, "malformed", "no MessagePack", shell.now_ms)
    else:
        shell.broker.receive(1, "", [wire.Bye()], [], shell.now_ms)
    hello = wire.Hello((1, 1), b"s" * 16, "", "", 0)
    subscribe = wire.Subscribe(1, "events", ["all"], [0], 10, 1000)
    shell.broker.receive(1, "", [hello, subscribe], [], shell.now_ms)
    shell.broker.malformed(1, "malformed", "no MessagePack", shell.now_ms)
    ready = shell.broker.take_ready()
    (send,) = ready.sends
    assert [type(command) for command in send.commands][-1:] == [wire.Bye]
    assert ready.closes == [1]
    assert shell.broker.gauges["links"] == 0


@pytest.mark.parametrize(
    ("commands", "frames"),
    [
        ([wire.Publish("s", 1)], []),
        ([wire.Ping(1)], [b"extra"]),
        ([wire.Send("m", 1)], []),
        ([wire.Ping(n) for n in range(5000)], []),
    ],
)
def test_a_message_that_breaks_the_grammar_ends_the_link_of_its_sender_and_no_other(
    commands: list[wire.Command], frames: list[bytes]
) -> None:
    shell = Shell()
    shell.hello(1)
    other = shell.hello(2)
    peer = shell.send(1, *commands, frames=frames)
    assert peer.last(wire.Bye).code in ("malformed", "too_large")
    assert peer.closed
    assert not other.closed
    assert shell.broker.counters["malformed"] == 1


def test_bytes_that_the_shell_could_not_decode_cost_the_link() -> None:
    shell = Shell()
    peer = shell.hello(1)
    shell.broker.malformed(1, "malformed", "no array", shell.now_ms)
    shell.run()
    assert peer.last(wire.Refused).code == "malformed"
    assert peer.closed


def test_bytes_from_a_stranger_that_could_not_be_decoded_are_answered_and_forgotten() -> None:
    shell = Shell()
    shell.broker.malformed(9, "malformed", "no array", shell.now_ms)
    shell.run()
    assert shell.peers[9].closed
    assert shell.broker.gauges["links"] == 0


def test_no_part_of_a_refused_atomic_step_is_done() -> None:
    shell = Shell()
    shell.hello(1)
    content = encode([b"x"], subject="s")
    peer = shell.send(
        1,
        wire.Atomic(7, 2),
        wire.Publish("s", 1),
        wire.Publish("s", 2),
        wire.Ping(5),
        frames=[content, content],
    )
    refused = peer.of(wire.Refused)
    assert [(one.command, one.reference, one.code) for one in refused] == [(66, 7, "malformed")]
    assert peer.last(wire.Pong).token == 5
    assert not shell.rings


def test_a_link_beyond_the_limit_is_refused_by_the_name_of_the_limit() -> None:
    shell = Shell(links_max=2)
    shell.hello(1)
    shell.hello(2)
    peer = shell.hello(3)
    assert peer.last(wire.Refused).code == "limit"
    assert peer.closed
    assert shell.broker.gauges["links"] == 2


def test_draining_ends_every_link_by_name() -> None:
    shell = Shell()
    peers = [shell.hello(n) for n in (1, 2)]
    shell.broker.drain(shell.now_ms)
    shell.run()
    assert all(peer.last(wire.Bye).code == "draining" and peer.closed for peer in peers)


def test_every_code_that_the_core_uses_is_in_the_table_of_codes() -> None:
    from pathlib import Path
    from re import findall

    import malamute_py.broker as package

    used: set[str] = set()
    for file in Path(package.__file__).parent.glob("*.py"):
        text = file.read_text()
        used |= set(findall(r"BrokerRefused\(\s*\"([a-z_]+)\"", text))
        used |= set(findall(r"refuse\([^()]*?\"([a-z_]+)\"", text))
    assert used
    assert used <= set(CODES)


# --- peers that do not read ---------------------------------------------------------------


def test_deliveries_to_a_peer_that_does_not_read_are_bounded_by_its_share() -> None:
    shell = Shell(share_min_bytes=100_000, share_max_bytes=100_000)
    shell.hello(1)
    reader = shell.hello(2)
    shell.subscribe(2, 1, "events")
    for tracker in range(1, 101):
        shell.publish(1, "events", [bytes(10_000)], tracker=tracker)
    # The peer was asked how far it has read, but answers nothing.
    assert len(reader.of(wire.Ping)) == 1
    given = sum(len(body) for body in bodies(reader, 1))
    assert 90_000 <= given <= 120_000


def test_a_peer_that_shows_that_it_reads_gets_everything() -> None:
    shell = Shell(share_min_bytes=100_000, share_max_bytes=100_000)
    shell.hello(1)
    reader = shell.hello(2)
    shell.subscribe(2, 1, "events")
    answered = 0
    for tracker in range(1, 101):
        shell.publish(1, "events", [bytes(10_000)], tracker=tracker)
        for ping in reader.of(wire.Ping)[answered:]:
            answered += 1
            shell.send(2, wire.Pong(ping.token))
    while answered < len(reader.of(wire.Ping)):
        shell.send(2, wire.Pong(reader.of(wire.Ping)[answered].token))
        answered += 1
    assert len(bodies(reader, 1)) == 100


def test_a_wrong_token_shows_nothing() -> None:
    shell = Shell(share_min_bytes=50_000, share_max_bytes=50_000)
    shell.hello(1)
    reader = shell.hello(2)
    shell.subscribe(2, 1, "events")
    for tracker in range(1, 21):
        shell.publish(1, "events", [bytes(10_000)], tracker=tracker)
        shell.send(2, wire.Pong(12345))
    assert len(bodies(reader, 1)) < 10


def test_a_blocked_link_gets_no_records_until_it_can_be_written_to() -> None:
    shell = Shell()
    shell.hello(1)
    reader = shell.hello(2)
    shell.subscribe(2, 1, "events")
    shell.publish(1, "events", [b"a"], tracker=1)
    shell.broker.blocked(2)
    for n in range(50):
        shell.publish(1, "events", [b"b"], tracker=2 + n)
    assert bodies(reader, 1) == [b"a"]
    shell.broker.writable(2)
    shell.run()
    assert len(bodies(reader, 1)) == 51


def test_answers_for_a_blocked_link_are_kept_within_a_bound_and_then_it_ends() -> None:
    shell = Shell(outbox_commands_max=100)
    peer = shell.hello(1)
    shell.broker.blocked(1)
    for n in range(200):
        if not peer.closed:
            shell.send(1, wire.Ping(n))
    assert shell.broker.gauges["links"] == 0
    assert peer.last(wire.Bye).code == "limit"
    assert peer.closed
    assert len(peer.of(wire.Pong)) < 3


@pytest.mark.parametrize("identity", ["x" * 256, "a b", "~me", "{tag}"])
def test_an_identity_that_is_no_name_is_refused(identity: str) -> None:
    peer = Shell().send(1, wire.Hello((1, 1), b"s" * 16, identity))
    assert peer.last(wire.Refused).code == "bad_name"
    assert len(peer.last(wire.Refused).reason) <= 300
    assert peer.closed
