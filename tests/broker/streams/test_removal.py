"""Removal: what readers, cursors, groups and a restart see of records that TRIM removed."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from tests.broker.shell import Shell

ALL = ["all"]
EARLIEST = [0]


def filled(count: int = 10, batches: int = 2, **settings: Any) -> Shell:
    """A shell with stream `s` of `count` records a batch, and link 1 that wrote them."""
    shell = Shell(**settings)
    shell.hello(1)
    for batch in range(batches):
        shell.publish(1, "s", [b"%d" % at for at in range(batch * count, (batch + 1) * count)])
    return shell


def trim(shell: Shell, before: int, tracker: int = 7, **fields: Any) -> Any:
    """Trim the stream; returns the CONFIRM, or the code of the REFUSED."""
    peer = shell.send(1, wire.Trim("s", before, tracker, **fields))
    answer = peer.commands[-1]
    if isinstance(answer, wire.Refused):
        assert (answer.command, answer.reference) == (70, tracker)
        return answer.code
    assert isinstance(answer, wire.Confirm)
    return answer


def synced(shell: Shell) -> None:
    shell.sync()
    shell.run()


def read(shell: Shell, link: int, start: list[Any], **fields: Any) -> tuple[list[Any], list[int]]:
    """Read to the tail: the gaps as (from, to, code), and the offsets."""
    peer = shell.hello(link)
    shell.send(link, wire.Subscribe(1, "s", ALL, start, 1000, 1 << 20, until="tail", **fields))
    assert isinstance(peer.commands[-1], wire.Ended)
    gaps = [(gap.from_, gap.to, gap.code) for gap in peer.of(wire.Gap)]
    return gaps, [offset for offset, _ in peer.received[1]]


def info(shell: Shell) -> dict[str, Any]:
    answer: Any = shell.send(1, wire.StreamInfo(3, "s")).commands[-1]
    return dict(answer.value)


def test_records_before_the_offset_are_gone_amid_a_batch_too_and_named_as_purged() -> None:
    shell = filled()
    assert trim(shell, 13).level == 3
    assert shell.trims[-1][2] == 13
    assert read(shell, 2, [2, 5]) == ([(5, 13, "purged")], list(range(13, 20)))
    assert read(shell, 3, EARLIEST) == ([], list(range(13, 20)))
    assert (info(shell)["first"], info(shell)["trimmed"]) == (13, 13)
    assert shell.broker.counters["records_trimmed"] == 13
    (event,) = shell.events_of("stream_trimmed")
    assert event.facts == {"stream": "s", "before": 13, "records": 13, "by": ""}


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_trim_that_was_confirmed_holds_after_a_crash_before_the_journal_has_noted_it(
    power_loss: bool,
) -> None:
    shell = filled()
    trim(shell, 13)
    shell.trims.clear()
    shell.firsts.clear()
    shell.restart(power_loss=power_loss)
    shell.hello(1)
    assert info(shell)["first"] == 13
    assert read(shell, 2, [2, 5]) == ([(5, 13, "purged")], list(range(13, 20)))
    assert [offset for _, _, offset in shell.trims] == [13], "the journal is told once more"


def test_a_snapshot_at_a_segments_start_has_the_trim() -> None:
    shell = filled()
    trim(shell, 13)
    shell.firsts.clear()
    shell.snapshot_now()
    shell.restart()
    shell.hello(1)
    assert read(shell, 2, EARLIEST) == ([], list(range(13, 20)))


def test_nobody_sees_a_trim_before_it_is_durable() -> None:
    shell = filled(sync=False)
    synced(shell)
    peer = shell.send(1, wire.Trim("s", 13, 7))
    assert peer.last(wire.Confirm).tracker == 1
    assert read(shell, 2, EARLIEST)[1] == list(range(20))
    synced(shell)
    assert peer.last(wire.Confirm).tracker == 7
    assert read(shell, 3, EARLIEST)[1] == list(range(13, 20))


@pytest.mark.parametrize("many", [16, 2])
def test_records_that_the_journal_was_reading_when_they_were_removed_are_not_shown(
    many: int,
) -> None:
    shell = filled(read=False, shared_window_min=many, shared_read_min=many)
    shell.evict()
    for number in (1, 2):
        shell.subscribe(1, number, "s")
    assert shell.reads
    trim(shell, 13)
    shell.auto_read = True
    shell.run()
    for number in (1, 2):
        assert [offset for offset, _ in shell.peers[1].received[number]] == list(range(13, 20))
        assert {gap.code for gap in shell.peers[1].of(wire.Gap)} == {"purged"}


def test_a_lower_trim_brings_nothing_back() -> None:
    shell = filled()
    trim(shell, 13)
    trim(shell, 5)
    assert info(shell)["first"] == 13
    shell.restart()
    shell.hello(1)
    assert info(shell)["first"] == 13


def test_a_trim_beyond_the_end_or_of_another_stream_is_refused_by_name() -> None:
    shell = filled()
    assert trim(shell, 21) == "bad_start"
    assert trim(shell, 5, uuid=b"x" * 16) == "conflict"
    assert trim(shell, 5, epoch=1, uuid=shell.stream("s").uuid).tracker == 7
    assert shell.send(1, wire.Trim("none", 0, 8)).last(wire.Refused).code == "unknown_stream"


def test_publishing_is_not_trimming() -> None:
    asked: list[tuple[str, str]] = []

    def permit(identity: str, action: str, name: str) -> bool:
        asked.append((action, name))
        return action != "trim"

    shell = filled(permit=permit)
    assert trim(shell, 5) == "forbidden"
    assert ("trim", "s") in asked
    assert info(shell)["first"] == 0


def test_records_of_another_ring_are_not_trimmed_before_they_are_durable() -> None:
    shell = Shell(sync=False)
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", {"ring_bytes": 1 << 20}))
    synced(shell)
    shell.publish(1, "s", [b"x"] * 4)
    assert trim(shell, 4) == "wait"
    synced(shell)
    shell.send(1, wire.Trim("s", 4, 8))
    synced(shell)
    assert shell.peers[1].last(wire.Confirm).tracker == 8


def test_a_trim_is_part_of_a_step_or_nothing_of_it_happens() -> None:
    shell = filled()
    shell.send(1, wire.Atomic(8, 2), wire.MoveCursor("s", "c", 13, 0), wire.Trim("s", 13, 0))
    assert info(shell)["first"] == 13
    shell.send(
        1, wire.Atomic(9, 2), wire.MoveCursor("s", "c", 5, 0, from_=4), wire.Trim("s", 15, 0)
    )
    assert shell.peers[1].last(wire.Refused).code == "conflict"
    assert info(shell)["first"] == 13


def test_a_cursor_before_the_trim_goes_on_after_it_and_its_pin_does_not_break() -> None:
    shell = filled()
    shell.send(1, wire.EditCursor(4, "s", "c", {"pin": True}, [2, 3]))
    trim(shell, 13)
    cursor: Any = shell.send(1, wire.CursorInfo(5, "s", "c")).commands[-1]
    assert (cursor.value["next"], cursor.value["pinned"]) == (13, True)
    assert list(shell.pins.values()) == [(shell.stream("s").number, 13)]
    assert shell.broker.counters["pins_broken"] == 0
    (event,) = shell.events_of("cursor_clamped")
    assert (event.level, event.facts["code"], event.facts["to"]) == ("info", "purged", 13)


def test_a_member_of_a_group_is_told_and_no_record_counts_as_lost() -> None:
    shell = filled()
    member = shell.hello(2)
    shell.send(2, wire.JoinGroup(4, "s", "g", ALL, "shared", EARLIEST, 5, 1 << 20))
    trim(shell, 13)
    assert [(gap.to, gap.code) for gap in member.of(wire.Gap)] == [(13, "purged")]
    shell.send(2, wire.AckRecords(4, [(0, 5)], 0), wire.Credit(4, 1000, 1 << 20))
    assert [offset for offset, _ in member.received[4]] == [*range(5), *range(13, 20)]
    assert shell.broker.counters["group_records_lost"] == 0


def test_a_stream_in_memory_is_trimmed_too() -> None:
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", {"memory": True}))
    shell.publish(1, "s", [b"x"] * 10)
    base = info(shell)["first"]
    trim(shell, base + 4)
    assert info(shell)["first"] == base + 4
    shell.restart()
    shell.hello(1)
    shell.publish(1, "s", [b"x"] * 3)
    assert len(read(shell, 2, EARLIEST)[1]) == 3
