"""Rows of several batches in one: never a batch that its client would refuse."""

from __future__ import annotations

import random
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.batch import iter_batches
from malamute_protocol.columns import NO_TIME
from malamute_protocol.gather import Gathering, Row
from malamute_protocol.header import Header
from malamute_protocol.limits import Limits
from malamute_py.broker.subscriptions.portion import GATHERED_ROWS_MAX, READ_ROWS_MAX
from tests.broker.shell import Shell

QUANTUM = 64 << 10
FEW = READ_ROWS_MAX + GATHERED_ROWS_MAX


def rare(
    shell: Shell, batches: int, body: bytes = b"r", fields: bool = False, rows: int = 1
) -> None:
    """Batches of 40 records, `rows` of which have the subject `rare`."""
    shell.hello(1)
    for number in range(batches):
        bodies = [b"x" * 400] * (40 - rows) + [body] * rows
        subjects = ["common"] * (40 - rows) + ["rare"] * rows
        options: Any = {"subject": subjects}
        if fields:
            options["fields"] = [{"n": f"{number:04}" * 200}] * 40
        shell.publish(1, "s", bodies, tracker=number + 1, **options)


def given(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, bytes) of each batch that a subscriber to `rare` is given."""
    found: list[tuple[int, int]] = []
    put = shell.broker._delivery.put

    def noted(sub: Any, next: int, frames: Any, *rest: Any) -> None:
        batches = list(iter_batches([bytes(frame) for frame in frames]))
        found.extend((batch.stamp.count, batch.stamp.size) for batch in batches)
        put(sub, next, frames, *rest)

    monkeypatch.setattr(shell.broker._delivery, "put", noted)
    shell.subscribe(1, 1, "s", ["topic", "rare"], gathered=True)
    return found


def shell_of(limits: Limits | None = None, **settings: Any) -> Shell:
    if limits is not None:
        settings["limits"] = limits
    return Shell(quantum_bytes=QUANTUM, extract_bytes_min=1, **settings)


def test_few_rows_of_many_batches_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = shell_of()
    rare(shell, 50)
    assert [rows for rows, _ in given(shell, monkeypatch)] == [50]


@pytest.mark.parametrize(
    "limits",
    [
        Limits(batch_records_max=FEW - 1),
        Limits(headers_max=FEW - 1),
        Limits(record_bytes_max=1 << 20, batch_bytes_max=(1 << 20) + QUANTUM - 1),
    ],
)
def test_nothing_is_gathered_that_might_break_a_small_limit(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = shell_of(limits)
    rare(shell, 5)
    assert [rows for rows, _ in given(shell, monkeypatch)] == [1] * 5


def test_limits_that_just_suffice_are_gathered_under(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = shell_of(
        Limits(
            batch_records_max=FEW, headers_max=FEW, record_bytes_max=1 << 20,
            batch_bytes_max=(1 << 20) + QUANTUM,
        )
    )  # fmt: skip
    rare(shell, 5)
    assert [rows for rows, _ in given(shell, monkeypatch)] == [5]


def test_a_gathered_batch_is_full_before_it_weighs_more_than_a_quantum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = shell_of(step_bytes=1 << 30)
    rare(shell, 9, bytes(QUANTUM * 3 // 8))
    found = given(shell, monkeypatch)
    assert sum(rows for rows, _ in found) == 9
    assert max(rows for rows, _ in found) == 2
    assert all(size <= QUANTUM for _, size in found)


def test_rows_larger_than_a_quantum_do_not_join_what_is_in_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Few of the rows may have nearly all of the bytes: too many with those gathered before.
    shell = shell_of(step_bytes=1 << 30)
    rare(shell, 2, bytes(QUANTUM // 2), rows=8)
    found = given(shell, monkeypatch)
    assert [rows for rows, _ in found] == [8, 8]


@pytest.mark.moderate
def test_the_texts_of_headers_weigh_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = shell_of(step_bytes=1 << 30)
    rare(shell, 200, fields=True)
    found = given(shell, monkeypatch)
    assert sum(rows for rows, _ in found) == 200
    assert max(rows for rows, _ in found) > 50
    assert all(size <= QUANTUM for _, size in found)


@pytest.mark.moderate
def test_what_is_gathered_weighs_no_more_than_it_was_counted_as() -> None:
    rng = random.Random(1)
    for _ in range(500):
        gathering = Gathering(1)
        for offset in range(rng.choice((1, 2, 3, 30))):
            keys = tuple(f"k{rng.randrange(3)}.{n}" for n in range(rng.choice((1, 1, 2, 16))))
            pairs = tuple(
                (f"f{n:02}", "v" * rng.randrange(1, 40)) for n in range(rng.choice((0, 1, 16)))
            )
            header = Header(keys, pairs)
            time_ms = rng.choice((NO_TIME, 5))
            gathering.add([Row(header, offset, 9, time_ms, bytes(rng.randrange(50)))], 1, 0)
        counted = gathering.bytes
        found = gathering.take()
        assert found is not None
        assert len(found.stamp) + len(found.content) <= counted
        assert gathering.bytes == 0


@pytest.mark.moderate
@pytest.mark.parametrize("rows", [40, 36])
def test_no_batch_begins_once_gathered_rows_have_used_the_credit_up(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = shell_of()
    rare(shell, 3)
    # Of one batch all rows go out, and of another too many rows to be gathered.
    shell.publish(1, "s", [b"r"] * 40, subject=["rare"] * rows + ["common"] * (40 - rows))
    found: list[int] = []
    put = shell.broker._delivery.put

    def noted(sub: Any, next: int, frames: Any, *rest: Any) -> None:
        batches = iter_batches([bytes(frame) for frame in frames], limits=shell.settings.limits)
        found.extend(batch.stamp.size for batch in batches)
        put(sub, next, frames, *rest)

    monkeypatch.setattr(shell.broker._delivery, "put", noted)
    both = 0
    for number, credit in enumerate(range(1, 900, 4)):
        found.clear()
        shell.subscribe(1, 1, "s", ["topic", "rare"], size=credit, gathered=True)
        both += len(found) > 1
        assert sum(found[:-1]) < credit, number
        shell.send(1, wire.Unsubscribe(1))
    assert both > 10
