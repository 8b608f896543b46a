"""Whatever a peer sends, the core raises nothing, answers or ends the link, and stays bounded."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.framing import NUMBERS
from tests.broker.shell import Shell, bodies

NAMES = st.sampled_from(["s", "t", "own", "ram", "", "bad name", "~r"])
EDGES = st.sampled_from(
    [0, 1, 2, 3, 6, 10, -1, -(2**63), 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), EDGES, st.floats(), st.text(max_size=5), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)
PATTERNS = st.one_of(
    st.just(["all"]),
    st.just(["topic", "a.*"]),
    st.just(["fields", "any", [["k"]]]),
    st.lists(ANYTHING, max_size=3),
)
STARTS = st.one_of(
    st.lists(EDGES, max_size=4),
    st.tuples(st.integers(0, 7), EDGES, st.booleans()).map(list),
    st.lists(ANYTHING, max_size=3),
)
SETTINGS = st.dictionaries(
    st.sampled_from(["memory", "ring_bytes", "max_bytes", "max_age_ms", "level", "full", "x"]),
    st.one_of(ANYTHING, st.booleans(), st.sampled_from(["stored", "refuse", 1 << 20])),
    max_size=3,
)
FRAMES = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [
            encode([b"x"] * 3, subject=["a.b", "b", "a.b"]),
            encode([b"x"], subject="a", producer_id=1 << 32 | 1, first_sequence=0),
            encode([b"y"], subject="a", producer_id=1 << 32 | 1, first_sequence=7),
            encode([b"x"], subject="a", expires_at_ms=5, client_time_ms=9),
            encode([b"x"] * 50, subject="b", fields={"k": "v"}, codec="zstd"),
        ]
    ),
)


def _strategy(command: type[wire.Command]) -> st.SearchStrategy[wire.Command]:
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for name, hint in get_type_hints(command).items():
        if name in ("stream", "mailbox", "service"):
            fields[name] = NAMES
        elif name == "pattern":
            fields[name] = PATTERNS
        elif name == "start":
            fields[name] = STARTS
        elif name == "settings":
            fields[name] = SETTINGS
        elif name == "session":
            fields[name] = st.sampled_from([bytes(16), b"1" * 16, b""])
        elif name == "ranges":
            # Others no decoder lets through.
            odd = [(n, n + 1) for n in range(0, 50, 2)]
            far = [(2**64 - 100 + n, 2**64 - 99 + n) for n in range(0, 50, 2)]
            fields[name] = st.sampled_from(
                [[(0, 1)], [(0, 3), (5, 6)], [(1, 2)], [(9, 1 << 19)], [(0, 50)], odd, far]
            )
        elif name in ("group", "cursor"):
            fields[name] = st.sampled_from(["g", "g", "h", "", "g*", "bad name"])
        elif name == "kind":
            fields[name] = st.sampled_from(["shared", "shared", "keyed", "exclusive", "x"])
        elif name in ("numbers", "requests"):
            fields[name] = st.lists(st.integers(0, 4), max_size=3)
        elif name == "key":
            fields[name] = st.sampled_from([b"", b"", b"k", b"l"])
        elif name in ("subscription", "tracker") and NUMBERS[command] >= 40:
            fields[name] = st.integers(0, 3)
        elif name == "until":
            fields[name] = st.sampled_from(["", "tail", "?"])
        elif hint is bool:
            fields[name] = st.booleans()
        elif hint is int:
            fields[name] = EDGES
        elif hint is str:
            fields[name] = st.text(max_size=4)
        elif hint is bytes:
            fields[name] = st.binary(max_size=4)
        elif "tuple[int, int]" in str(hint):
            pair = st.tuples(EDGES, EDGES)
            fields[name] = st.one_of(st.none(), pair) if "None" in str(hint) else pair
        elif "list[int]" in str(hint):
            fields[name] = st.lists(EDGES, max_size=3)
        else:
            fields[name] = st.none()
    return st.builds(command, **fields)


COMMANDS = st.one_of([_strategy(command) for command in get_args(wire.AnyCommand)])
# Commands that lead somewhere, more often.
LIKELY = st.one_of(
    [
        _strategy(command)
        for command in (
            wire.Publish,
            wire.Subscribe,
            wire.Credit,
            wire.Unsubscribe,
            wire.Pong,
            wire.Send,
            wire.OpenInbox,
            wire.AckMail,
            wire.Request,
            wire.Offer,
            wire.AckWork,
            wire.Reply,
            wire.JoinGroup,
            wire.AckRecords,
            wire.MoveCursor,
            wire.Atomic,
        )
    ]
)
MESSAGES = st.tuples(
    st.integers(1, 3),
    st.lists(st.one_of(LIKELY, COMMANDS), max_size=4),
    st.lists(FRAMES, max_size=4),
    st.sampled_from(["", "", "fit"]),
    st.integers(0, 4_000),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(MESSAGES, max_size=25))
def test_nothing_that_peers_send_raises_or_disturbs_others(messages: list[Any]) -> None:
    shell = Shell(heartbeat_ms=2_000)
    shell.hello(9)
    witness = shell.subscribe(9, 1, "witness")
    numbers = {1: 1, 2: 2, 3: 3}
    for place, (who, commands, frames, fit, ms) in enumerate(messages):
        link = numbers[who]
        if shell.peers.get(link) is not None and shell.peers[link].closed:
            # A link that ended comes back under a new number, as with the real shell.
            link = numbers[who] = 100 + place
        if link not in shell.peers or place % 5 == 0:
            shell.hello(link, session=bytes([who]) * 16)
        if shell.peers[link].closed:
            continue
        if fit:
            owned = sum(max(0, min(command.content_frames, 9)) for command in commands)
            frames = ([*frames, b"frame"] * (owned + 1))[:owned]
        shell.send(link, *commands, frames=frames)
        if ms > 3_000:
            shell.send(9, wire.Ping(1))
            shell.wait(ms)
            shell.send(9, wire.Ping(1))
    shell.publish(9, "witness", [b"alive"], tracker=77)
    assert bodies(witness, 1) == [b"alive"]
    assert not witness.closed
