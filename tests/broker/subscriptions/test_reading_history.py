"""Reads of history: a lone reader reads no more than it can be given; several read together."""

from __future__ import annotations

from malamute_protocol import commands as wire
from malamute_py.broker.subscriptions.portion import PORTION_FRAMES_MAX
from tests.broker.shell import Shell, bodies

RECORD = 1_000
QUANTUM = 16 * RECORD


def behind(records: int = 60) -> Shell:
    """A stream of batches of one record each, all of them out of the hot window."""
    shell = Shell(read=False, quantum_bytes=QUANTUM)
    shell.hello(1)
    for number in range(records):
        shell.publish(1, "s", [bytes([number]) * RECORD], tracker=number + 1)
    shell.evict()
    return shell


def bytes_read(shell: Shell) -> int:
    """Answer reads in turn until none is asked for; returns the bytes of all."""
    total = 0
    while shell.reads:
        read = shell.reads.pop(0)
        answer = shell._read(read)
        total += sum(len(run.data) for run in answer.runs)
        shell.broker.history(answer)
        shell.run()
    return total


def test_a_slow_reader_alone_reads_no_more_than_it_is_given() -> None:
    shell = behind()
    slow = shell.subscribe(1, 1, "s", size=4 * RECORD)
    read = bytes_read(shell)
    for given in range(8, 80, 4):
        shell.send(1, wire.Credit(1, 1 << 40, given * RECORD))
        read += bytes_read(shell)
    assert [body[0] for body in bodies(slow, 1)] == list(range(60))
    assert read < 1.3 * shell.broker.counters["bytes_out"]


def test_one_reads_alone_and_says_so_and_two_read_together() -> None:
    shell = behind()
    shell.subscribe(1, 1, "s")
    shell.subscribe(1, 2, "s")
    first, second = shell.reads
    assert (first.shared, first.alone) == (False, True)
    assert (second.shared, second.alone, second.bytes_max) == (True, False, QUANTUM)
    shell.answer_reads()
    shell.run()
    assert [(read.shared, read.alone) for read in shell.reads] == [(True, False)] * 2


def test_who_comes_to_the_tail_or_leaves_lets_the_other_read_alone() -> None:
    for leave in ("tail", "unsubscribe", "link"):
        shell = behind()
        shell.hello(2)
        shell.subscribe(1, 1, "s", size=4 * RECORD)
        shell.subscribe(2, 1, "s")
        while any(read.shared for read in shell.reads) and leave == "tail":
            bytes_read(shell)
        if leave == "unsubscribe":
            shell.send(2, wire.Unsubscribe(1))
        elif leave == "link":
            shell.send(2, wire.Bye())
        bytes_read(shell)
        shell.send(1, wire.Credit(1, 1 << 40, 8 * RECORD))
        (read,) = shell.reads
        assert (read.shared, read.alone) == (False, True), leave


def test_a_small_credit_bounds_a_read_that_is_shared_too() -> None:
    shell = behind()
    shell.subscribe(1, 1, "s")
    shell.subscribe(1, 2, "s", size=4 * RECORD)
    assert [read.bytes_max for read in shell.reads] == [QUANTUM, 4 * RECORD]
    assert shell.reads[1].shared


def test_a_window_or_a_selection_is_read_for_one_only() -> None:
    shell = behind()
    shell.subscribe(1, 1, "s")
    shell.subscribe(1, 2, "s", ["topic", "a"])
    shell.subscribe(1, 3, "s", client_time=(0, 1 << 50))
    assert [(read.shared, read.alone) for read in shell.reads] == [
        (False, True), (False, False), (False, False),
    ]  # fmt: skip


def test_small_batches_that_are_no_neighbours_go_out_in_deliveries_of_few_frames() -> None:
    shell = Shell(read=False)
    shell.hello(1)
    count = 4 * PORTION_FRAMES_MAX
    for number in range(count):
        shell.publish(1, "s", [b"x"], subject="ab"[number % 2], tracker=number + 1)
    shell.evict()
    reader = shell.subscribe(1, 1, "s", ["topic", "a"])
    shell.answer_reads()
    shell.run()
    assert len(bodies(reader, 1)) == count // 2
    assert max(deliver.frames for deliver in reader.of(wire.Deliver)) <= PORTION_FRAMES_MAX
