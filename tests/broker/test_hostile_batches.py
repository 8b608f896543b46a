"""Batches and commands made to harm, as the core meets them: only their sender notices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.content_layout import (
    PROPERTIES_COLUMN,
    PROPERTIES_CONSTANT,
    PROPERTIES_DICTIONARY,
)
from malamute_protocol.encode import encode
from malamute_protocol.stamp import message_id
from tests.broker.post import Post
from tests.broker.shell import Shell, bodies
from tests.protocol.hostile import RESERVED, claim, craft, ints, packed, with_reserved

GARBAGE = {
    "constant": (PROPERTIES_CONSTANT, b"\xc1 no MessagePack"),
    "over the limit": (PROPERTIES_CONSTANT, packed({"k": "v" * 70_000})),
    "dictionary": (PROPERTIES_DICTIONARY, ints([0] * 40) + b"\x91\xc1"),
    "column": (PROPERTIES_COLUMN, ints(range(41)) + b"\xc1" * 40),
}
SUBJECTS = packed(["a", "b"])


def batch(properties: tuple[int, bytes], rows: int = 40) -> bytes:
    """Records of two subjects: b once, a in all others."""
    return craft(
        rows, subjects=SUBJECTS, subjects_count=2, subject_codes=[1] + [0] * (rows - 1),
        properties=properties,
    )  # fmt: skip


@pytest.mark.parametrize("name", GARBAGE)
def test_properties_that_cannot_be_read_end_nobody_wherever_rows_are_cut_out(name: str) -> None:
    post = Post(extract_bytes_min=0)
    post.subscribe(3, 1, "stream", ["topic", "b"])
    post.send(3, wire.JoinGroup(2, "stream", "g", ["topic", "b"], "shared", [0], 9, 1 << 20))
    post.inbox(3, 3, "box", records=1, size=1 << 20)
    post.send(3, wire.Offer(4, "service", ["all"], 1, 1 << 20))
    content = batch(GARBAGE[name])
    for tracker, command in enumerate(
        (wire.Publish("stream", 1), wire.Send("box", 2), wire.Request("service", 3)), 1
    ):
        post.send(1, command, frames=[content])
        refused = [one for one in post.peers[1].of(wire.Refused) if one.reference == tracker]
        assert [one.code for one in refused] == (["too_large"] if "limit" in name else [])
    if "limit" in name:
        return
    # Live, by a group, from a mailbox and from a service: one row each.
    peer = post.peers[3]
    assert bodies(peer, 1) == bodies(peer, 2) == [b"x"]
    assert len(peer.mail[3]) == len(peer.work[4]) == 1
    # Replayed from memory, then from the journal, then after a restart.
    for number in (5, 6):
        post.subscribe(2, number, "stream", ["topic", "b"])
        assert bodies(post.peers[2], number) == [b"x"]
        post.evict()
    post.restart()
    post.subscribe(2, 5, "stream", ["topic", "b"])
    post.inbox(2, 6, "box")
    assert bodies(post.peers[2], 5) == [b"x"]
    assert len(post.peers[2].mail[6]) == 40
    assert not post.events_of("internal_error")


def taking(post: Post) -> dict[str, Sequence[wire.Command]]:
    """Every way by which a client gives the broker two records, each under tracker 9."""
    keep = {"keep": "last-per-subject", "ring_bytes": 1 << 20}
    post.send(1, wire.CreateStream(1, "keys", keep), wire.CreateStream(2, "stream", {}))
    post.send(3, wire.Offer(4, "service", ["all"], 2, 1 << 20))
    post.send(1, wire.Request("service", 3), frames=[encode([b"1", b"2"], subject="s")])
    held = [task.number for task in post.peers[3].work[4]]
    post.send(1, wire.Atomic(4, 1), wire.BeginTransaction(b"load", 0, 0))
    return {
        "PUBLISH, the first of a link": [wire.Publish("stream", 9)],
        "PUBLISH": [wire.Publish("stream", 9)],
        "PUBLISH, keyed": [wire.Publish("keys", 9, 0, True)],
        "UPDATE_KEY": [wire.UpdateKey("keys", 9)],
        "PUBLISH in a step": [wire.Atomic(9, 1), wire.Publish("stream", 0)],
        "STAGE": [wire.Atomic(9, 1), wire.Stage(b"load", "stream", 1, 0)],
        "SEND": [wire.Send("box", 9)],
        "SEND in a step": [wire.Atomic(9, 1), wire.Send("box", 0)],
        "REQUEST": [wire.Request("service", 9)],
        "REPLY": [wire.Reply(4, held, 9, True)],
    }


@RESERVED
def test_a_broker_takes_no_batch_with_reserved_bytes_on_any_way(at: int) -> None:
    post = Post()
    good = encode([b"a", b"b"], subject="s")
    for name, commands in taking(post).items():
        link = 3 if name == "REPLY" else 1
        post.send(link, *commands, frames=[with_reserved(at)])
        answer = post.answer(link, 9)
        assert isinstance(answer, wire.Refused), name
        assert answer.code == "unsupported", name
        assert "reserved" in answer.reason, name
        if name != "UPDATE_KEY":  # Nothing else is wrong; UPDATE_KEY takes one record.
            post.send(link, *commands, frames=[good])
            assert isinstance(post.answer(link, 9), wire.Confirm), name


@RESERVED
def test_batches_with_reserved_bytes_that_an_earlier_broker_took_are_delivered(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = Post()
    ways = taking(post)
    with monkeypatch.context() as earlier:
        earlier.setattr("malamute_protocol.content.check_reserved", lambda *_: None)
        for name in ("PUBLISH", "SEND", "REQUEST"):
            post.send(1, *ways[name], frames=[with_reserved(at)])
    post.restart()
    post.subscribe(2, 5, "stream")
    post.inbox(2, 6, "box")
    post.send(2, wire.Offer(4, "service", ["all"], 9, 1 << 20))
    peer = post.peers[2]
    assert bodies(peer, 5) == [b"a", b"b"]
    assert [letter.body for letter in peer.mail[6]] == [b"a", b"b"]
    assert [task.body for task in peer.work[4]][-2:] == [b"a", b"b"]


@pytest.mark.parametrize("kind", ["live", "shared", "keyed"])
@pytest.mark.parametrize("first", [True, False])
def test_equal_tables_of_batches_with_and_without_codes_are_told_apart(
    kind: str, first: bool
) -> None:
    """Valid both: without codes every record has the first subject, and the others are not used."""
    shell = Shell()
    for link in (1, 2):
        shell.hello(link)
    coded = craft(2, subjects=SUBJECTS, subjects_count=2, subject_codes=[0, 1])
    plain = craft(2, subjects=SUBJECTS, subjects_count=2, body=ints([0, 1, 2]) + b"yy")
    if kind == "live":
        shell.subscribe(2, 1, "s", ["topic", "b"])
        shell.subscribe(2, 2, "s", ["topic", "a"])
    else:
        for number, subject in ((1, "b"), (2, "a")):
            pattern = ["topic", subject]
            shell.send(
                2, wire.JoinGroup(number, "s", f"g{number}", pattern, kind, [0], 99, 1 << 20)
            )
    for content in (coded, plain) if first else (plain, coded):
        shell.send(1, wire.Publish("s", 1), frames=[content])
    assert sorted(bodies(shell.peers[2], 1)) == [b"x"]
    assert sorted(bodies(shell.peers[2], 2)) == [b"x", b"y", b"y"]


def test_a_window_of_batches_takes_one_with_a_table_that_no_codes_use() -> None:
    shell = Shell(shared_window_min=2)
    for link in (1, 2):
        shell.hello(link)
    plain = craft(2, subjects=SUBJECTS, subjects_count=2, field_codes=[-1, -1])
    for _ in range(3):
        shell.send(1, wire.Publish("s", 1), frames=[plain])
    for number in range(4):
        pattern = ["topic", "ab"[number % 2]]
        command = wire.Subscribe(number, "s", pattern, [0], 99, 1 << 20, gathered=True)
        shell.send(2, command)
    assert [len(bodies(shell.peers[2], number)) for number in range(4)] == [6, 0, 6, 0]


@pytest.mark.parametrize("offset", [(1 << 64) - 1, 1 << 63, (1 << 63) - 1])
def test_a_message_id_at_the_end_of_all_numbers_begins_at_the_tail_or_is_refused(
    offset: int,
) -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    shell.subscribe(1, 1, "s", start=[5, message_id(0, offset)])
    if offset >= 1 << 63:
        assert shell.peers[1].last(wire.Refused).code == "bad_start"
        return
    rewound = shell.peers[1].last(wire.Rewound)
    assert (rewound.from_, rewound.to) == (1 << 63, 1)


def test_a_header_table_of_millions_is_refused_by_name() -> None:
    shell = Shell()
    shell.hello(1)
    table = claim(1 << 20) + b"\xa0" * (1 << 20)
    shell.send(1, wire.Publish("s", 1), frames=[craft(subjects=table, subjects_count=1)])
    refused = shell.peers[1].last(wire.Refused)
    assert (refused.code, refused.reference) == ("too_large", 1)
    assert not shell.peers[1].closed
