"""Restarts: the change log, snapshots, and the function that applies a change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.changelog.applying import apply
from malamute_py.changelog.records import (
    Change,
    ProducerOpened,
    ProducersForgotten,
    StreamCreated,
    StreamEdited,
    StreamRemoved,
    decode_change,
    encode_change,
)
from malamute_py.changelog.settings import StreamSettings
from malamute_py.changelog.snapshots import decode_snapshot, encode_snapshot
from malamute_py.changelog.tables import Queues, Tables
from tests.broker.shell import Shell, bodies

settings = st.builds(StreamSettings, max_bytes=st.integers(0, 5), description=st.text(max_size=3))
numbers = st.integers(1, 6)
changes = st.one_of(
    st.builds(
        StreamCreated, number=numbers, name=st.sampled_from("abc"), uuid=st.just(bytes(16)),
        ring=st.just("main"), settings=settings, by=st.just(""), at_ms=st.just(1),
    ),
    st.builds(StreamEdited, number=numbers, settings=settings, at_ms=st.just(1)),
    st.builds(StreamRemoved, number=numbers, at_ms=st.just(1)),
    st.builds(
        ProducerOpened, id=numbers, identity=st.sampled_from("xy"), epoch=st.integers(0, 3)
    ),
    st.builds(ProducersForgotten, ids=st.lists(numbers, max_size=2)),
)  # fmt: skip


@pytest.mark.slow
@given(st.lists(changes, max_size=30))
def test_a_log_applied_from_its_records_gives_the_same_tables(log: list[Change]) -> None:
    one, two = Tables(), Tables()
    for change in log:
        apply(one, Queues(), change)
        apply(two, Queues(), decode_change(encode_change(change)))
    assert one == two


@pytest.mark.moderate
@given(st.lists(changes, max_size=30))
def test_applying_a_record_twice_changes_nothing(log: list[Change]) -> None:
    one, two = Tables(), Tables()
    for change in log:
        apply(one, Queues(), change)
        apply(two, Queues(), change)
        apply(two, Queues(), change)
    assert one == two


@given(st.lists(changes, max_size=30))
def test_numbers_are_never_used_again_and_names_lead_to_streams(log: list[Change]) -> None:
    tables = Tables()
    seen: set[int] = set()
    for change in log:
        before = set(tables.streams)
        apply(tables, Queues(), change)
        new = set(tables.streams) - before
        assert not new & seen
        seen |= new
        assert all(tables.streams[number].name == name for name, number in tables.names.items())


def test_a_snapshot_in_pieces_is_put_together_again() -> None:
    shell = Shell()
    shell.hello(1)
    for n in range(3):
        shell.send(1, wire.CreateStream(n, f"s{n}", {"description": "x" * 60_000}))
    pieces = shell.broker.snapshot()
    snapshot = decode_snapshot(pieces)
    assert sorted(snapshot.tables.names) == ["s0", "s1", "s2"]
    assert encode_snapshot(snapshot) == pieces


def test_everything_confirmed_is_there_after_a_restart() -> None:
    shell = Shell()
    shell.hello(1)
    for n in range(10):
        shell.publish(1, "s", [str(n).encode()], tracker=n + 1)
    shell.restart(power_loss=True)
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s")
    assert bodies(peer, 1) == [str(n).encode() for n in range(10)]
    shell.publish(1, "s", [b"next"], tracker=1)
    assert peer.last(wire.Confirm).offset == 10
    assert bodies(peer, 1)[-1] == b"next"


def test_a_stream_whose_creation_a_power_loss_took_can_be_created_again() -> None:
    shell = Shell(sync=False)
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    shell.restart(power_loss=True)
    shell.hello(1)
    assert shell.broker.gauges["streams"] == 0
    peer = shell.publish(1, "s", [b"y"])
    shell.sync()
    shell.run()
    assert peer.last(wire.Confirm).offset == 0


def test_rings_of_known_streams_are_opened_again() -> None:
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "own", {"ring_bytes": 1 << 20}))
    shell.publish(1, "own", [b"x"])
    known = dict(shell.ring_settings)
    shell.ring_settings.clear()
    shell.restart()
    assert shell.ring_settings == known
    peer = shell.hello(1)
    shell.subscribe(1, 1, "own")
    assert bodies(peer, 1) == [b"x"]


def test_the_snapshot_of_a_ring_holds_only_what_belongs_there() -> None:
    shell = Shell()
    shell.hello(1)
    for number in range(50):
        shell.send(1, wire.CreateStream(number, f"s{number}", {"description": "d" * 1000}))
    shell.send(1, wire.CreateStream(99, "own", {"ring_bytes": 1 << 20}))
    shell.send(1, wire.OpenProducer(100))
    id = shell.peers[1].last(wire.Result).value["id"]
    for stream in ("s1", "own"):
        shell.publish(1, stream, [b"a", b"b"], producer_id=id)
    own = next(ring for ring in shell.rings if ring.startswith("stream-"))
    assert sum(map(len, shell.broker.snapshot("main"))) > 50_000
    assert sum(map(len, shell.broker.snapshot(own))) < 1000, "an own ring may be small"
    assert shell.broker.snapshot("memory") == []
    shell.snapshot_now()
    shell.restart()
    shell.hello(1)
    for tracker, stream in enumerate(("s1", "own"), 10):
        shell.publish(1, stream, [b"a", b"b"], tracker=tracker, producer_id=id)
        confirm = shell.peers[1].last(wire.Confirm)
        assert (confirm.tracker, confirm.duplicate) == (tracker, True)


def test_numbers_of_messages_are_not_used_again_after_an_unclean_end() -> None:
    shell = Shell(sync=False)
    shell.hello(1)
    shell.send(1, wire.Send("box", 1, 2), frames=[encode([b"lost"], subject="s")])
    number = shell.peers[1].last(wire.Confirm).offset
    shell.unclean = True
    shell.restart(power_loss=True)
    shell.hello(2)
    peer = shell.send(2, wire.Send("box", 1, 2), frames=[encode([b"new"], subject="s")])
    assert peer.last(wire.Confirm).offset > number
