"""`malamute pub` and `malamute sub`, as scripts use them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.cli.running import Run


def test_one_record_is_confirmed_with_its_offset(m: Run, stream: str) -> None:
    assert m("pub", stream, "one").ok().rows == [[stream, "0", "synced"]]
    told = m("pub", stream, "two", "--confirm", "stored", "--json").ok().json
    assert (told["stream"], told["offset"], told["level"]) == (stream, 1, "stored")


def test_each_line_of_the_input_is_a_record(m: Run, stream: str) -> None:
    told = m("pub", stream, "-s", "a.b", stdin="one\ntwo\n\nfour").ok()
    assert told.rows == [[stream, "4", "synced"]]
    assert m("sub", stream, "--until-tail").ok().bytes == b"one\ntwo\n\nfour\n"


def test_no_input_publishes_nothing(m: Run, stream: str) -> None:
    assert m("pub", stream, stdin="").ok().rows == [[stream, "0", "none"]]


def test_bodies_of_lines_are_not_changed(m: Run, stream: str) -> None:
    body = bytes(code for code in range(256) if code != 10)
    m("pub", stream, stdin=body + b"\n").ok()
    assert m("sub", stream, "--until-tail").ok().bytes == body + b"\n"
    (record,) = m("sub", stream, "--until-tail", "--json").ok().json_lines
    assert base64.b64decode(record["body_base64"]) == body


def test_options_reach_the_record(m: Run, stream: str) -> None:
    m(
        "pub", stream, "x", "-s", "a.b", "-s", "key2", "-f", "region=eu", "-f", "urgent=",
        "-p", "trace=7", "--client-time", "2013-01-01T00:00:00Z", "--expires", "1d",
        "--codec", "zstd",
    ).ok()  # fmt: skip
    (record,) = m("sub", stream, "--until-tail", "--json").ok().json_lines
    assert record["subject"] == "a.b"
    assert record["keys"] == ["a.b", "key2"]
    assert record["fields"] == {"region": "eu", "urgent": ""}
    assert record["properties"] == {"trace": "7"}
    assert record["client_time"] == "2013-01-01T00:00:00.000Z"
    assert record["expires"] > record["time"]


@pytest.mark.moderate
def test_json_lines_read_back_what_sub_prints(m: Run, stream: str) -> None:
    records = [
        {"body": "a", "subject": "x.y", "fields": {"k": "v"}, "properties": {"n": 1}},
        {"body_base64": base64.b64encode(b"\xff\n").decode(), "keys": ["p", "q"]},
        {"body": {"z": [1, None]}, "client_time": 1_000},
        {"body": "d", "expires": "2999-01-01T00:00:00Z"},
    ]
    text = "\n".join(map(json.dumps, records)) + "\n\n"
    m("pub", stream, "--json-lines", "-s", "default", stdin=text).ok()
    first = m("sub", stream, "--until-tail", "--json").ok()
    assert [each["subject"] for each in first.json_lines] == ["x.y", "p", "default", "default"]
    assert first.json_lines[2]["body"] == '{"z":[1,null]}'
    assert first.json_lines[2]["client_time"] == "1970-01-01T00:00:01.000Z"

    m("pub", f"{stream}-copy", "--json-lines", stdin=first.bytes).ok()
    second = m("sub", f"{stream}-copy", "--until-tail", "--json").ok().json_lines
    for before, after in zip(first.json_lines, second, strict=True):
        assert {**before, "time": "", "id": ""} == {**after, "time": "", "id": ""}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "is not JSON"),
        ("[1]", "is not an object"),
        ('{"boddy": 1}', "did you mean body?"),
        ("{}", "neither body nor body_base64"),
        ('{"body": "", "client_time": "soon"}', "is not a time"),
        ('{"body": "", "subject": 5}', "subject must be text"),
        ('{"body_base64": "="}', "line 2"),
    ],
)
def test_a_bad_json_line_is_named_and_what_came_before_is_published(
    m: Run, stream: str, line: str, says: str
) -> None:
    told = m("pub", stream, "--json-lines", stdin=f'{{"body": "good"}}\n{line}\n{{"body": "no"}}')
    assert told.code == 1
    assert "line 2" in told.err
    assert says in told.err
    assert m("sub", stream, "--until-tail").ok().lines == ["good"]


def test_each_file_is_a_record_under_its_name(m: Run, stream: str, tmp_path: Path) -> None:
    paths = [tmp_path / "one.txt", tmp_path / "two.bin"]
    for path in paths:
        path.write_bytes(path.name.encode() + b"\n\0")
    m("pub", stream, "-s", "docs", "--subject-from-name", "--file", *map(str, paths)).ok()
    records = m("sub", stream, "--until-tail", "--json").ok().json_lines
    assert [(each["subject"], each["body"]) for each in records] == [
        ("docs.one", "one.txt\n\0"),
        ("docs.two", "two.bin\n\0"),
    ]


def test_a_file_keeps_the_further_keys_beside_its_name(m: Run, stream: str, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(b"one")
    m("pub", stream, "-s", "docs", "-s", "eu", "--subject-from-name", "--file", str(path)).ok()
    (record,) = m("sub", stream, "--until-tail", "--json").ok().json_lines
    assert record["keys"] == ["docs.one", "eu"]


def test_a_missing_file_is_named(m: Run, stream: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    told = m("pub", stream, "--file", missing)
    assert told.code == 1
    assert f"{missing}: no such file" in told.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["one", "two"], "in quotes"),
        (["--file"], "name the files"),
        (["--subject-from-name"], "--file"),
        (["x", "--json-lines"], "leave out the body"),
        (["x", "--client-time", "soon"], "is not a time"),
        (["x", "--field", "=v"], "NAME=VALUE"),
        (["x", "--field", "currencyEUR"], "NAME=VALUE; currencyEUR= for an empty value"),
        (["x", "--property", "trace"], "NAME=VALUE; trace= for"),
        (["x", "--expires", "500"], "has no unit"),
        (["x", "--confirm", "maybe"], "maybe"),
        (["x", "--conform", "none"], "--confirm"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    m: Run, stream: str, args: list[str], says: str
) -> None:
    told = m("pub", stream, *args)
    assert told.code == 2
    assert says in told.err
    assert len(told.err.splitlines()) == 1


def test_what_the_broker_refuses_is_said_and_is_code_1_or_2(m: Run) -> None:
    told = m("pub", "no spaces~", "x")
    assert told.code == 2
    assert "bad_name" in told.err


@pytest.mark.moderate
def test_publishing_without_a_confirm_promises_nothing(m: Run, stream: str) -> None:
    assert "nothing was promised" in m("pub", stream, "x", "--confirm", "none").ok().out
    m("pub", stream, "--confirm", "none", stdin="a\nb\n").ok()
    assert m("sub", stream, "--until-tail").ok().lines == ["x", "a", "b"]


def test_what_is_refused_without_a_confirm_ends_with_1(m: Run, stream: str, tmp_path: Path) -> None:
    m("stream", "create", stream, "--set", "ring_bytes=4MiB").ok()
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    told = m("pub", stream, "--confirm", "none", "--file", str(tmp_path / "large"))
    assert told.code == 1
    assert "the broker refused some of it (1 batches)" in told.err


# --- sub ---------------------------------------------------------------------------------


@pytest.mark.moderate
def test_patterns_select(m: Run, stream: str) -> None:
    for subject, region in (("a.b", "eu"), ("a.c", "us"), ("b.c", "eu")):
        m("pub", stream, subject, "-s", subject, "-f", f"region={region}").ok()
    for pattern, expected in (
        ("a.*", ["a.b", "a.c"]),
        ("prefix:b", ["b.c"]),
        ("regex:c$", ["a.c", "b.c"]),
        ("fields:region=eu", ["a.b", "b.c"]),
        ("#", ["a.b", "a.c", "b.c"]),
    ):
        assert m("sub", stream, pattern, "--until-tail").ok().lines == expected


@pytest.mark.moderate
def test_start_points_and_counts(m: Run, stream: str) -> None:
    m("pub", stream, stdin="0\n1\n2\n3\n").ok()
    assert m("sub", stream, "--start", "2", "--count", "1").ok().lines == ["2"]
    assert m("sub", stream, "--start", "earliest", "-n", "2").ok().lines == ["0", "1"]
    assert m("sub", stream, "--start", "now-1h", "-n", "1").ok().lines == ["0"]
    assert m("sub", stream, "--start", "now-1h", "--until-tail").ok().lines == list("0123")
    assert m("sub", stream, "--start", "last", "-n", "1").ok().lines == ["3"]
    assert m("sub", stream, "--start", "1", "--until-tail", "--durable").ok().lines == list("123")


@pytest.mark.moderate
def test_a_start_names_a_record_by_id_offset_or_time_and_may_leave_it_out(
    m: Run, stream: str
) -> None:
    pub = m("pub", stream, "0", "--json").ok().json
    m("pub", stream, stdin="1\n2\n").ok()
    for point, first in (
        (pub["id"], 0), (f"after:{pub['id'].upper()}", 1), ("after:0", 1), ("AFTER: 1", 2),
        (f"@{pub['time']}", 0), ("after:now-1h", 0), ("after:now", 3),
    ):  # fmt: skip
        told = m("sub", stream, "--start", point, "--until-tail").ok().lines
        assert told == [str(number) for number in range(first, 3)], point
    m("stream", "trim", stream, "--before", f"after:{pub['id']}", "--yes").ok()
    assert m("sub", stream, "--until-tail").ok().lines == ["1", "2"]
    m("stream", "trim", stream, "--before", "after:1", "--yes").ok()
    assert m("sub", stream, "--until-tail").ok().lines == ["2"]


def test_fields_are_columns_in_a_pipe(m: Run, stream: str) -> None:
    m("pub", stream, "body", "-s", "s", "-f", "a=1", "-f", "b=2").ok()
    assert m("sub", stream, "--until-tail", "--fields").ok().rows == [["s", "a=1,b=2", "body"]]


@pytest.mark.moderate
def test_nothing_within_the_timeout_is_code_4(m: Run, stream: str) -> None:
    m("stream", "create", stream).ok()
    told = m("sub", stream, "--timeout", "100ms")
    assert told.code == 4
    assert "no record came within 100ms" in told.err


@pytest.mark.moderate
def test_a_misspelt_stream_is_not_made_but_named(m: Run, stream: str) -> None:
    m("stream", "create", stream).ok()
    told = m("sub", f"{stream}x", "--until-tail")
    assert told.code == 1
    assert f"did you mean {stream}?" in told.err
    assert m("stream", "ls", f"{stream}x").ok().lines == []
    m("sub", f"{stream}x", "--until-tail", "--create").ok()
    assert len(m("stream", "ls", f"{stream}x").ok().lines) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--start", "sometime"], "no place to start"),
        (["--start", "after:latest"], "no place to start"),
        (["--start", "ab" * 15], "no place to start"),
        (["a*b"], "bad_pattern"),
        (["regex:("], "bad_pattern"),
        (["--count", "0"], "--count"),
        (["--timeout", "5"], "is not a duration"),
    ],
)
def test_wrong_usage_of_sub_is_code_2(m: Run, stream: str, args: list[str], says: str) -> None:
    m("stream", "create", stream).ok()
    told = m("sub", stream, *args)
    assert told.code == 2
    assert says in told.err


@pytest.mark.moderate
def test_a_misspelt_kind_of_pattern_is_pointed_out(m: Run, stream: str) -> None:
    m("pub", stream, "body", "-s", "regexp:x").ok()
    told = m("sub", stream, "regexp:x", "--until-tail").ok()
    assert (told.lines, "did you mean regex:x?" in told.err) == (["body"], True)
    assert "did you mean fields:a=b?" in m("replay", stream, "field:a=b").ok().err
    told = m("sub", stream, "glob:x", "--until-tail").ok()
    assert "other kinds are prefix, regex, fields, any" in told.err
    for topic in ("a.b", "prefix:x", "a.b:c", "#"):
        assert m("sub", stream, topic, "--until-tail").ok().err == ""


def test_a_start_behind_the_tail_is_said(m: Run, stream: str) -> None:
    m("pub", stream, "x").ok()
    told = m("sub", stream, "--start", "9", "--until-tail").ok()
    assert told.out == ""
    assert "offset 9 is not in the log" in told.err
    assert "going on from 1" in told.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"parts_base64": ["YQ=="]}, "--to-stream"),
        ({"body": "x", "keys": "ab"}, "keys is a list"),
        ({"body": "x", "fields": ["k"]}, "are objects"),
        ({"bodi": "x"}, "did you mean body?"),
    ],
)
def test_a_line_that_cannot_be_published_says_why(
    m: Run, stream: str, line: dict[str, object], says: str
) -> None:
    told = m("pub", stream, "--json-lines", stdin='{"body": "good"}\n' + json.dumps(line))
    assert told.code == 1
    assert "line 2: " in told.err
    assert says in told.err
    assert m("sub", stream, "--until-tail").ok().lines == ["good"]


def test_a_file_that_is_not_there_leaves_nothing_on_standard_output(m: Run, stream: str) -> None:
    told = m("pub", stream, "--file", "/no/such/file")
    assert (told.code, told.out) == (1, "")
    assert "/no/such/file" in told.err


def test_fields_of_json_lines_are_text_as_json_has_it(m: Run, stream: str) -> None:
    fields = {"text": "True", "flag": True, "number": 1.5, "list": [1, None], "none": None}
    m("pub", stream, "--json-lines", stdin=json.dumps({"body": "x", "fields": fields})).ok()
    (told,) = m("sub", stream, "--until-tail", "--json").ok().json_lines
    assert told["fields"] == {
        "text": "True", "flag": "true", "number": "1.5", "list": "[1,null]",
    }  # fmt: skip
