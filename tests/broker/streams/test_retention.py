"""Retention: records that a shared ring takes are counted apart from those that bounds take."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode, encode_arrow, encode_lists
from tests.broker.shell import Shell


def filled(**settings: Any) -> Shell:
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "invoices", settings))
    shell.publish(1, "invoices", [b"x" * 5_000] * 4, tracker=1)
    shell.publish(1, "invoices", [b"x" * 5_000] * 4, tracker=2)
    return shell


def test_records_that_other_streams_overwrite_are_counted() -> None:
    shell = filled()
    shell.broker.trimmed("main", {1: 4})
    assert shell.broker.counters["records_overwritten"] == 4
    assert shell.events_of("stream_overwritten") == []


def test_a_stream_that_loses_its_last_record_to_others_is_an_event() -> None:
    shell = filled()
    shell.broker.trimmed("main", {1: 8})
    shell.run()
    (event,) = shell.events_of("stream_overwritten")
    assert event.level == "warning"
    assert event.facts == {"stream": "invoices", "ring": "main", "offset": 8, "records": 8}


def bounded(batch: list[Any], codec: int = 0, **options: Any) -> Shell:
    """Shell of a stream of at most 300 bytes with one batch, half a minute later."""
    shell = Shell(**options)
    shell.hello(1)
    kind = "list" if isinstance(batch[0], list) else "blob"
    shell.send(1, wire.CreateStream(1, "s", {"max_bytes": 300, "body_kind": kind}))
    content = (encode_lists if kind == "list" else encode)(batch, codec=codec, subject="s")
    shell.send(1, wire.Publish("s", 1), frames=[content])
    shell.wait(30_000)
    return shell


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        ([b"x" * 100] * 10, 7),
        ([b"x" * 101] * 10, 8),
        ([b"x" * 5_000, b"x" * 10, b"", b"x" * 290], 1),
        ([b"x" * 10, b"x" * 5_000], 1),
        ([b""] * 10, 0),
        ([[b"x" * 50, b"x" * 50], [], [b"x" * 101]] * 4, 9),
    ],
)
def test_of_a_batch_beyond_the_bytes_of_its_stream_the_newest_records_stay(
    batch: list[Any], first: int
) -> None:
    trims = bounded(batch).trims
    assert [offset for _, _, offset in trims[-1:]] == ([first] if first else [])


@pytest.mark.parametrize("kind", ["compressed", "arrow"])
def test_of_bodies_that_are_not_told_apart_each_record_counts_as_an_equal_share(kind: str) -> None:
    """All of such a newest batch stayed, however much larger than the bound it was."""
    if kind == "arrow":
        shell = Shell()
        shell.hello(1)
        shell.send(1, wire.CreateStream(1, "s", {"max_bytes": 300, "body_kind": "arrow"}))
        body = encode_arrow(bytes(1_000), 10, schema_id=1, subject="s")
        shell.send(1, wire.Publish("s", 1), frames=[body])
        shell.wait(30_000)
    else:
        shell = bounded([Random(seed).randbytes(100) for seed in range(10)], codec=1)
    kept = 300 * 10 // shell.stream("s").hot[-1].size
    assert 0 < kept < 4
    assert [offset for _, _, offset in shell.trims[-1:]] == [10 - kept]


def test_a_batch_that_a_power_loss_may_take_loses_no_record() -> None:
    shell = bounded([b"x" * 100] * 10, sync=False)
    assert shell.trims == []
    shell.sync()
    shell.wait(30_000)
    assert [offset for _, _, offset in shell.trims] == [7]


@pytest.mark.parametrize(
    "settings", [{"max_bytes": 90_000}, {"max_records": 4, "max_age_ms": 1 << 40}]
)
def test_records_that_a_power_loss_may_take_push_none_out(settings: dict[str, int]) -> None:
    shell = Shell(sync=False)
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", settings))
    shell.sync()
    for number in range(8):
        shell.publish(1, "s", [b"x" * 10_000], tracker=number + 1)
    shell.sync()
    shell.wait(2_000)
    trims = list(shell.trims)
    for number in range(8):
        shell.publish(1, "s", [b"x" * 10_000], tracker=number + 1)
    shell.wait(2_000)
    assert shell.stream("s").next == 16
    assert shell.trims == trims
    shell.sync()
    shell.wait(2_000)
    assert shell.trims[-1][2] in (8, 12)


def test_a_batch_beyond_the_bound_stays_until_a_newer_one_is_durable() -> None:
    """The newest batch stays whatever its size, and one that a power loss may take is none."""
    shell = Shell(sync=False)
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", {"max_bytes": 90_000}))
    shell.sync()
    shell.publish(1, "s", [b"x" * 100_000], tracker=1)
    shell.sync()
    shell.publish(1, "s", [b"x" * 10_000], tracker=2)
    shell.wait(2_000)
    assert shell.trims == []
    shell.sync()
    shell.wait(30_000)
    assert [offset for _, _, offset in shell.trims] == [1]


@pytest.mark.parametrize("settings", [{"max_bytes": 300}, {"max_age_ms": 50}])
def test_what_the_bounds_of_the_stream_took_is_not_counted(settings: dict[str, int]) -> None:
    shell = filled(**settings)
    shell.wait(70_000)
    shell.publish(1, "invoices", [b"x" * 5_000], tracker=3)
    shell.wait(70_000)
    assert shell.trims
    assert shell.broker.counters["records_overwritten"] == 0


def recovered(batches: int, max_bytes: int) -> Shell:
    """Shell of a stream within its bound, of batches of 1,000 bytes and a little, started again."""
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", {"max_bytes": max_bytes}))
    for number in range(batches):
        shell.publish(1, "s", [b"x" * 100] * 10, tracker=number + 1)
    shell.restart()
    shell.hello(1)
    return shell


def test_what_was_recovered_goes_only_as_far_as_it_is_beyond_the_bound() -> None:
    shell = recovered(90, max_bytes=130_000)
    for number in range(40):
        shell.publish(1, "s", [b"x" * 100] * 10, tracker=number + 1)
    shell.wait(2_000)
    shell.wait(2_000)
    stream = shell.stream("s")
    size = stream.hot[-1].size
    (*_, (_, _, first)) = shell.trims
    kept = (1_300 - first) // 10 * size
    assert 0.9 * 130_000 < kept <= 130_000


def test_nothing_is_dropped_before_the_index_said_how_the_bytes_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = recovered(20, max_bytes=30_000)
    with monkeypatch.context() as silent:
        silent.setattr(shell, "answer_queries", lambda: None)
        for number in range(20):
            shell.publish(1, "s", [b"x" * 100] * 10, tracker=number + 1)
        for _ in range(3):
            shell.wait(5_000)
        assert len(shell.queries) == 1
        assert shell.trims == []
    shell.wait(5_000)
    shell.wait(5_000)
    ((_, _, first),) = shell.trims
    assert 150 < first < 200
