"""Purges by subject: gone for every reader and for replay, kept apart from what came after."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_py.broker.streams.removal import PURGES_MAX
from malamute_py.broker.subscriptions.audience import audience_of
from tests.broker.shell import Shell, offsets
from tests.broker.sliced import Sliced
from tests.broker.streams.places import in_memory, on_disk, restarted
from tests.broker.streams.test_removal import info, synced
from tests.broker.subscriptions.test_matching import attacked, subjects

BOB = ["topic", "bob"]
LEFT = [at for at in range(20) if at % 3]
"""Offsets whose subject is not `bob`."""


def filled(shell: Shell | None = None, **settings: Any) -> Shell:
    """Twenty records in two batches, every third of subject `bob`, the others of `ann`."""
    shell = shell or Shell(**settings)
    shell.hello(1)
    for first in (0, 10):
        subjects = ["ann" if at % 3 else "bob" for at in range(first, first + 10)]
        shell.publish(1, "s", [b"x"] * 10, subject_table=["ann", "bob"],
                      subject_codes=[int(one == "bob") for one in subjects])  # fmt: skip
    return shell


def purge(shell: Shell, pattern: Any = BOB, before: int = 20, tracker: int = 7) -> Any:
    """Purge; returns the CONFIRM, or the code of the REFUSED."""
    peer = shell.send(1, wire.PurgeSubjects("s", pattern, before, tracker))
    answer = peer.commands[-1]
    if isinstance(answer, wire.Refused):
        assert (answer.command, answer.reference) == (71, tracker)
        return answer.code
    assert isinstance(answer, wire.Confirm)
    return answer


def power_lost(shell: Shell) -> None:
    """The power was lost."""
    shell.restart(power_loss=True)
    shell.hello(1)


def from_a_snapshot(shell: Shell) -> None:
    """A segment began after the purge, and the broker was killed."""
    shell.snapshot_now()
    restarted(shell)


PLACES = pytest.mark.parametrize(
    "place", [in_memory, on_disk, restarted, power_lost, from_a_snapshot]
)


@PLACES
def test_purged_records_are_gone_for_every_reader_and_no_gap(place: Any) -> None:
    shell = filled(shared_window_min=2, shared_read_min=2)
    assert purge(shell).level == 3
    place(shell)
    patterns = [["all"], ["all"], BOB, ["topic", "ann"], ["not", ["topic", "ann"]]]
    for number, pattern in enumerate(patterns, 1):
        shell.subscribe(1, number, "s", pattern, [0], gathered=True)
    peer = shell.peers[1]
    assert [offsets(peer, number) for number in range(1, 6)] == [LEFT, LEFT, [], LEFT, []]
    assert not peer.of(wire.Gap)
    shell.publish(1, "s", [b"new"], subject="bob")
    assert [offsets(peer, number)[-1] for number in (1, 2, 3, 5)] == [20] * 4


@PLACES
def test_purged_records_are_gone_for_groups(place: Any) -> None:
    shell = filled()
    purge(shell)
    place(shell)
    peer = shell.send(
        1, wire.JoinGroup(4, "s", "g", ["all"], "shared", [0], 1 << 40, 1 << 40, visibility=0)
    )
    assert offsets(peer, 4) == LEFT
    assert shell.broker.counters["group_records_lost"] == 0


def test_a_matching_record_that_is_published_later_is_delivered_amid_a_batch_too() -> None:
    shell = filled()
    peer = shell.subscribe(1, 1, "s", BOB, [1])
    purge(shell, before=13)
    shell.publish(1, "s", [b"new"], subject="bob")
    assert offsets(peer, 1) == [20]
    assert offsets(shell.subscribe(1, 2, "s", BOB, [0]), 2) == [15, 18, 20]


def test_what_the_journal_was_reading_when_it_was_purged_is_not_shown() -> None:
    for many in (16, 2):
        shell = filled(read=False, shared_window_min=many, shared_read_min=many)
        shell.evict()
        for number in (1, 2):
            shell.subscribe(1, number, "s")
        assert shell.reads
        purge(shell)
        shell.auto_read = True
        shell.run()
        assert [offsets(shell.peers[1], number) for number in (1, 2)] == [LEFT, LEFT]


@pytest.mark.moderate
def test_what_a_live_reader_waits_for_to_be_matched_is_not_shown_when_it_was_purged() -> None:
    shell = Sliced()
    attacked(shell, subjects(60))
    for _ in range(8):
        shell.turn()
    assert audience_of(shell.stream("s")).late
    shell.broker.receive(3, "", [wire.PurgeSubjects("s", ["all"], 61, 9)], [], shell.now_ms)
    while shell.turn():
        pass
    assert shell.peers[3].last(wire.Confirm).tracker == 9
    assert [offsets(shell.peers[1], number) for number in range(17)] == [[]] * 17


def test_a_member_that_gives_a_purged_record_back_does_not_get_it_again() -> None:
    shell = filled()
    peer = shell.send(
        1, wire.JoinGroup(4, "s", "g", ["all"], "shared", [0], 4, 1 << 40, visibility=0)
    )
    assert offsets(peer, 4) == [0, 1, 2, 3]
    purge(shell)
    shell.send(1, wire.AckRecords(4, [(0, 4)], 2, 0, 0), wire.Credit(4, 1 << 40, 1 << 40))
    assert offsets(peer, 4)[4:] == LEFT


def test_nobody_sees_a_purge_before_it_is_durable() -> None:
    shell = filled(sync=False)
    synced(shell)
    shell.send(1, wire.PurgeSubjects("s", BOB, 20, 7))
    assert offsets(shell.subscribe(1, 1, "s"), 1) == list(range(20))
    synced(shell)
    assert offsets(shell.subscribe(1, 2, "s"), 2) == LEFT


def test_the_facts_name_the_purges_until_a_trim_leaves_them_nothing_to_hide() -> None:
    shell = filled()
    purge(shell)
    purge(shell, ["prefix", "a"], 5)
    purge(shell, before=15)
    assert info(shell)["purges"] == [[["prefix", "a"], 5], [["topic", "bob"], 20]]
    (first, *_) = shell.events_of("stream_purged")
    assert first.facts == {"stream": "s", "pattern": BOB, "before": 20, "by": ""}
    assert shell.broker.counters["purges_by_subject"] == 3
    shell.send(1, wire.Trim("s", 20, 8))
    assert info(shell)["purges"] == []
    assert shell.stream("s").row.purges == []


def test_too_many_purges_are_refused_by_name_however_they_come() -> None:
    shell = filled()
    commands = [wire.PurgeSubjects("s", ["topic", f"t{n}"], 20, n) for n in range(1, 20)]
    peer = shell.send(1, *commands)
    refused = [one.reference for one in peer.of(wire.Refused)]
    assert {one.code for one in peer.of(wire.Refused)} == {"limit"}
    assert refused == list(range(PURGES_MAX + 1, 20))
    assert purge(shell, ["topic", "t1"], tracker=30).tracker == 30, "a known pattern needs no room"


@pytest.mark.parametrize(
    ("pattern", "before", "code"),
    [
        (["fields", "all", [["a"]]], 20, "bad_pattern"),
        (["not", ["fields", "any", [["a", "b"]]]], 20, "bad_pattern"),
        (["topic", "a*b"], 20, "bad_pattern"),
        (["regex", "(a{50}){20}"], 20, "bad_pattern"),
        (["or", *[["topic", "x" * 200 + str(n)] for n in range(9)]], 20, "bad_pattern"),
        (["nonsense"], 20, "unknown_pattern_kind"),
        (BOB, 21, "bad_start"),
    ],
)
def test_what_cannot_be_purged_is_refused_by_name(pattern: Any, before: int, code: str) -> None:
    shell = filled()
    assert purge(shell, pattern, before) == code
    assert info(shell)["purges"] == []


def test_a_purge_is_part_of_a_step_or_nothing_of_it_happens() -> None:
    shell = filled()
    part = wire.PurgeSubjects("s", BOB, 20, 0)
    shell.send(1, wire.Atomic(9, 2), part, wire.MoveCursor("s", "c", 21, 0))
    assert shell.peers[1].last(wire.Refused).code == "bad_start"
    assert info(shell)["purges"] == []
    shell.send(1, wire.Atomic(9, 2), part, wire.MoveCursor("s", "c", 20, 0))
    assert info(shell)["purges"] == [[BOB, 20]]


def test_the_latest_record_of_a_purged_subject_is_none() -> None:
    shell = filled()
    purge(shell)
    assert offsets(shell.subscribe(1, 1, "s", ["all"], [6]), 1) == [19]
    shell.publish(1, "s", [b"new"], subject="bob")
    assert offsets(shell.subscribe(1, 2, "s", ["all"], [6]), 2) == [19, 20]
