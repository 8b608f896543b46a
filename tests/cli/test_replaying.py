"""`malamute replay`: ranges, pace, destinations."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.encode import encode_arrow, encode_lists
from malamute_py import EmbeddedBroker
from tests.cli.running import Run

DAY_MS = 86_400_000


@pytest.fixture
def days(m: Run, stream: str) -> str:
    """Ten records, their client times a day apart, out of order in the log."""
    order = [3, 1, 2, 0, 5, 4, 9, 7, 8, 6]
    lines = [
        {"body": f"day{day}", "subject": f"d.{day % 2}", "client_time": day * DAY_MS,
         "fields": {"day": str(day)}, "properties": {"n": day}}
        for day in order
    ]  # fmt: skip
    m("pub", stream, "--json-lines", stdin="\n".join(map(json.dumps, lines))).ok()
    return stream


@pytest.mark.moderate
def test_a_range_of_offsets_is_half_open(m: Run, days: str) -> None:
    told = m("replay", days, "--from", "2", "--to", "4").ok()
    assert told.lines == ["day2", "day0"]
    assert "2 records of 2 in the range (offsets 2 to 3)" in told.err


def test_the_whole_stream_is_the_default_and_ends_at_the_tail(m: Run, days: str) -> None:
    assert len(m("replay", days).ok().lines) == 10
    assert len(m("replay", days, "--to", "1000").ok().lines) == 10
    assert m("replay", days, "--from", "1000").ok().lines == []


def test_client_times_select_whatever_the_order_in_the_log(m: Run, days: str) -> None:
    told = m("replay", days, "--by", "client", "--from", "1970-01-03T00:00Z",
             "--to", "1970-01-06T00:00Z").ok()  # fmt: skip
    assert told.lines == ["day3", "day2", "day4"]


def test_append_times_select(m: Run, days: str) -> None:
    assert len(m("replay", days, "--from", "now-1h", "--to", "now+1h").ok().lines) == 10
    assert m("replay", days, "--from", "now+1h").ok().lines == []
    assert m("replay", days, "--to", "now-1h").ok().lines == []


def test_a_pattern_selects_and_the_counts_tell_both(m: Run, days: str) -> None:
    told = m("replay", days, "d.1").ok()
    assert told.lines == ["day3", "day1", "day5", "day9", "day7"]
    assert "5 records of 10 in the range" in told.err


@pytest.mark.moderate
def test_a_copy_keeps_everything_but_the_place(m: Run, days: str) -> None:
    told = m("replay", days, "d.0", "--to-stream", f"{days}-copy", "--json").ok().json
    assert (told["records"], told["covered"]) == (5, 10)
    before = m("sub", days, "d.0", "--until-tail", "--json").ok().json_lines
    after = m("sub", f"{days}-copy", "--until-tail", "--json").ok().json_lines
    for one, other in zip(before, after, strict=True):
        left_out = {"offset": 0, "time": "", "id": ""}
        assert {**one, **left_out} == {**other, **left_out}


@pytest.mark.moderate
def test_a_file_is_json_lines_or_bodies_by_its_name(m: Run, days: str, tmp_path: Path) -> None:
    bodies, lines = tmp_path / "out.txt", tmp_path / "out.jsonl"
    assert m("replay", days, "--output", str(bodies)).ok().out == ""
    assert bodies.read_text().splitlines()[:2] == ["day3", "day1"]
    m("replay", days, "--output", str(lines)).ok()
    assert json.loads(lines.read_text().splitlines()[0])["fields"] == {"day": "3"}


@pytest.mark.moderate
def test_the_pace_follows_the_times_of_the_records(m: Run, stream: str) -> None:
    lines = [{"body": str(at), "client_time": 1_000_000 + at} for at in (0, 100, 300)]
    m("pub", stream, "--json-lines", stdin="\n".join(map(json.dumps, lines))).ok()
    began = time.monotonic()
    told = m("replay", stream, "--by", "client", "--pace", "real").ok()
    # A lower bound only: how much later it ends depends on the machine.
    assert time.monotonic() - began >= 0.3
    assert told.lines == ["0", "100", "300"]


def test_a_pace_by_client_times_that_no_record_has_is_said_to_be_none(m: Run, stream: str) -> None:
    m("pub", stream, stdin="a\nb\n").ok()
    told = m("replay", stream, "--by", "client", "--pace", "real").ok()
    assert told.lines == ["a", "b"]
    assert "none of them has a client time" in told.err
    assert "client time" not in m("replay", stream, "--by", "client").ok().err


@pytest.mark.parametrize("pace", ["flat", "100000000x"])
def test_what_is_seen_before_an_interrupt_is_counted(
    m: Run, days: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace: str
) -> None:
    file = tmp_path / "out.txt"
    seen: list[int] = []

    def interrupt(writer: Any) -> None:
        writer._out.flush()
        if not seen:
            seen.append(file.read_bytes().count(b"\n"))
            raise KeyboardInterrupt

    monkeypatch.setattr("malamute_py.cli.replay.Writer.flush", interrupt)
    told = m("replay", days, "--by", "client", "--pace", pace, "--output", str(file))
    assert told.code == 130
    assert seen[0] > 0
    noun = "record" if seen[0] == 1 else "records"
    assert f"{seen[0]} {noun} of {seen[0]} in the range (offsets 0 to {seen[0] - 1})" in told.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--pace", "fast"], "write flat, real"),
        (["--pace", "0x"], "write flat, real"),
        (["--from", "yesterday"], "is not a time"),
        (["--from", "5", "--to", "2"], "lies before"),
        (["--to-stream", "x", "--output", "y"], "exclude each other"),
        (["--by", "clock"], "clock"),
    ],
)
def test_wrong_usage_is_code_2(m: Run, days: str, args: list[str], says: str) -> None:
    told = m("replay", days, *args)
    assert told.code == 2
    assert says in told.err


def test_a_stream_is_not_replayed_into_itself(m: Run, days: str) -> None:
    assert m("replay", days, "--to-stream", days).code == 2
    assert m("replay", f"{days}y").code == 1


def test_a_copy_of_lists_keeps_the_parts(m: Run, broker: EmbeddedBroker, stream: str) -> None:
    lists = [[b"a", b"\t"], [], [b"\xff"]]
    with broker.connect_sync() as client:
        client.publish_batch(stream, encode_lists(lists, subject=["s.0", "s.1", "s.2"]))
    copy = f"{stream}-copy"
    assert m("replay", stream, "--to-stream", copy, "--json").ok().json["records"] == 3
    assert m("replay", stream, "s.2", "--pace", "real", "--to-stream", copy).ok().code == 0
    with broker.connect_sync() as client:
        kept = [(r.subject, r.parts) for r in client.subscribe(copy, until="tail", start=0)]
    assert kept == [("s.0", lists[0]), ("s.1", []), ("s.2", lists[2]), ("s.2", lists[2])]


def test_a_copy_of_arrow_batches_is_whole_or_refused(
    m: Run, broker: EmbeddedBroker, stream: str
) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.record_batch({"n": [1, 2, 3]})
    with broker.connect_sync() as client:
        content = encode_arrow(
            table.serialize().to_pybytes(), 3, schema_id=7, subject=["a", "a", "b"],
            client_time_ms=[10, 20, 30],
        )  # fmt: skip
        client.publish_batch(stream, content)
    copy = f"{stream}-copy"
    m("replay", stream, "--to-stream", copy).ok()
    with broker.connect_sync() as client:
        (batch,) = client.subscribe(copy, until="tail", start=0).batches()
    message = pa.py_buffer(batch.content.bodies().blob)
    assert pa.ipc.read_record_batch(message, table.schema) == table
    assert batch.content.head.schema_id == 7
    assert [(r.subject, r.client_time_ms) for r in batch] == [("a", 10), ("a", 20), ("b", 30)]

    for args, says in ((("b",), "without a pattern"), (("--pace", "real"), "leave out --pace")):
        told = m("replay", stream, *args, "--to-stream", copy)
        assert told.code == 2
        assert says in told.err


@pytest.mark.moderate
def test_a_range_that_ends_before_the_time_at_which_it_begins_is_empty(m: Run, days: str) -> None:
    assert m("replay", days, "--from", "now+1h", "--to", "3").ok().lines == []
    assert m("replay", days, "--by", "client", "--from", "now", "--to", "3").ok().lines == []
