"""`malamute stream`, `client` and `info`."""

from __future__ import annotations

from pathlib import Path

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.cli import output
from tests.cli.running import Run, as_user, broker_of


@pytest.mark.moderate
def test_a_stream_is_made_shown_edited_and_removed(m: Run, stream: str) -> None:
    m("stream", "create", stream, "--max-age", "7d", "--max-bytes", "1GiB",
      "--description", "all of it", "--set", "level=stored").ok()  # fmt: skip
    settings = m("stream", "info", stream, "--json").ok().json["settings"]
    assert settings["max_age_ms"] == 7 * 86_400_000
    assert settings["max_bytes"] == 1 << 30
    assert (settings["description"], settings["level"]) == ("all of it", "stored")

    m("stream", "edit", stream, "--max-age", "1h").ok()
    edited = m("stream", "info", stream, "--json").ok().json["settings"]
    assert edited == {**settings, "max_age_ms": 3_600_000}
    m("stream", "edit", stream, "--max-records", "100").ok()
    assert m("stream", "info", stream, "--json").ok().json["settings"]["max_records"] == 100

    assert m("stream", "rm", stream, "--yes").ok().code == 0
    assert m("stream", "info", stream).code == 1


def test_memory_and_own_rings_are_settings(m: Run, stream: str) -> None:
    shown = m("stream", "create", stream, "--memory", "--json").ok().json
    assert shown["settings"]["memory"] is True
    shown = m("stream", "create", f"{stream}-ring", "--ring-bytes", "200MiB", "--full", "refuse",
              "--json").ok().json  # fmt: skip
    assert shown["settings"]["ring_bytes"] == 200 << 20
    assert shown["settings"]["full"] == "refuse"


def test_the_list_is_lines_of_columns(m: Run, stream: str) -> None:
    m("pub", stream, stdin="a\nb\n").ok()
    (row,) = m("stream", "ls", stream).ok().rows
    assert row[:4] == [stream, "2", "0", "2"]
    (entry,) = m("stream", "ls", stream, "--json").ok().json
    assert (entry["name"], entry["records"], entry["tail"]) == (stream, 2, 2)
    assert m("stream", "ls", "nothing-begins-so").ok().out == ""


@pytest.mark.moderate
def test_removing_asks_and_without_a_person_refuses(m: Run, stream: str) -> None:
    m("pub", stream, "x").ok()
    told = m("stream", "rm", stream, stdin="")
    assert told.code == 2
    assert f"remove {stream} and its 1 record?" in told.err
    assert "--yes" in told.err
    assert m("stream", "info", stream).code == 0


@pytest.mark.moderate
def test_trimming_removes_the_oldest_records_and_asks_first(m: Run, stream: str) -> None:
    m("pub", stream, stdin="".join(f"{i}\n" for i in range(10))).ok()
    told = m("stream", "trim", stream, "--before", "4", stdin="")
    assert (told.code, f"remove 4 records of {stream} before 4?" in told.err) == (2, True)
    done = m("stream", "trim", stream, "--before", "4", "--yes", "--json").ok().json
    assert done == {"stream": stream, "before": 4, "records": 4}
    info = m("stream", "info", stream, "--json").ok().json
    assert (info["first"], info["trimmed"], info["records"]) == (4, 4, 6)
    assert f"of {stream} before 2" in m("stream", "trim", stream, "--before", "2").ok().out
    beyond = m("stream", "trim", stream, "--before", "11", "--yes")
    assert (beyond.code, "it ends at 10" in beyond.err) == (1, True)
    m("stream", "trim", stream, "--before", "now", "--yes").ok()
    assert m("stream", "info", stream, "--json").ok().json["records"] == 0


@pytest.mark.moderate
def test_purging_removes_records_by_subject_and_asks_first(m: Run, stream: str) -> None:
    for subject in ("bob.a", "ann", "bob.b"):
        m("pub", stream, subject, "-s", subject).ok()
    told = m("stream", "purge", stream, "bob.*", stdin="")
    assert (told.code, "say so with --yes" in told.err) == (2, True)
    done = m("stream", "purge", stream, "bob.*", "--yes", "--json").ok().json
    assert done == {"stream": stream, "pattern": "bob.*", "before": 3}
    m("pub", stream, "new", "-s", "bob.a").ok()
    assert m("replay", stream).ok().lines == ["ann", "new"]
    assert m("stream", "info", stream, "--json").ok().json["purges"] == [[["topic", "bob.*"], 3]]
    refused = m("stream", "purge", stream, "fields:a", "--yes")
    assert (refused.code, "no pattern on fields" in refused.err) == (2, True)


@pytest.mark.moderate
def test_peeking_consumes_nothing_and_shows_the_newest(m: Run, stream: str) -> None:
    m("pub", stream, stdin="".join(f"{i}\n" for i in range(100))).ok()
    m("pub", stream, "rare", "-s", "rare").ok()
    assert m("stream", "peek", stream, "--last", "2").ok().lines == ["99", "rare"]
    assert m("stream", "peek", stream).ok().lines[0] == "91"
    assert m("stream", "peek", stream, "rare").ok().lines == ["rare"]
    assert m("stream", "peek", stream, "--offset", "5", "-n", "2").ok().lines == ["5", "6"]
    assert m("stream", "peek", stream, "--time", "now-1h", "-n", "1").ok().lines == ["0"]
    assert m("stream", "peek", stream, "--json", "--last", "1").ok().json_lines[0]["offset"] == 100
    assert m("stream", "peek", stream, "-n", "1").ok().lines == ["rare"]
    assert m("stream", "peek", stream, "--last", "5", "-n", "2").ok().lines == ["99", "rare"]
    beyond = m("stream", "peek", stream, "--offset", "500").ok()
    assert (beyond.out, "it never came so far" in beyond.err) == ("", True)
    m("stream", "create", f"{stream}-empty").ok()
    assert m("stream", "peek", f"{stream}-empty").ok().out == ""


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["create", "x", "--set", "max_agee=1"], 2, "no setting 'max_agee'; known are memory"),
        (["create", "x", "--set", "max_age=7d"], 2, "no setting 'max_age'; known are memory"),
        (["create", "x", "--set", "memory=4"], 2, "memory is of type bool, not int"),
        (["create", "x", "--set", "schema=x!"], 2, "allowed is a pyarrow schema"),
        (["edit", "x", "--ring-bytes", "1GiB"], 2, "a ring is chosen when a stream is made"),
        (["create", "x", "--max-age", "long"], 2, "is not a duration"),
        (["create", "x", "--max-bytes", "much"], 2, "is not a size"),
        (["create", "x", "--full", "refuse"], 2, "ring_bytes"),
        (["edit", "no-such"], 2, "nothing to change"),
        (["edit", "no-such", "--max-age", "1d"], 1, "malamute stream ls"),
        (["info", "no-such"], 1, "malamute stream ls"),
        (["peek", "no-such", "--offset", "0"], 1, "malamute stream ls"),
        (["rm", "no-such", "--yes"], 1, "malamute stream ls"),
        (["peek", "x", "--last", "1", "--offset", "1"], 2, "exclude each other"),
        (["lss"], 2, "Did you mean 'ls'?"),
        (["show", "orders"], 2, "Did you mean 'info'?"),
        (["delete", "orders"], 2, "Did you mean 'rm'?"),
    ],
)
def test_what_cannot_be_done_is_said(m: Run, args: list[str], code: int, says: str) -> None:
    told = m("stream", *args)
    assert (told.code, len(told.err.splitlines())) == (code, 1)
    assert says in told.err


@pytest.mark.parametrize("args", [("info",), ("peek",), ("edit", "--level", "stored"), ("rm",)])
def test_a_misspelt_stream_is_named_right(m: Run, stream: str, args: tuple[str, ...]) -> None:
    m("stream", "create", stream).ok()
    told = m("stream", args[0], f"{stream}x", *args[1:])
    assert told.code == 1
    assert f"did you mean {stream}?" in told.err


def test_the_subscriptions_of_a_link_are_listed(
    m: Run, stream: str, broker: EmbeddedBroker
) -> None:
    m("stream", "create", stream).ok()
    with broker.connect_sync(software="reader") as client, client.subscribe(stream) as reading:
        reading.accepted()
        rows = m("client", "ls", "--json").ok().json
        assert [row["subscriptions"] for row in rows if row["software"] == "reader"] == [1]


def test_links_are_listed_and_ended(m: Run, broker: EmbeddedBroker) -> None:
    with broker.connect_sync(software="victim") as client:
        rows = m("client", "ls", "--json").ok().json
        (link,) = [row["link"] for row in rows if row["software"] == "victim"]
        m("client", "kick", str(link), "--reason", "test").ok()
        assert link not in [row["link"] for row in m("client", "ls", "--json").ok().json]
        client.abort()
    assert m("client", "kick", "999999").code == 1
    told = m("client", "kick", "desk")
    assert (told.code, "'desk' is not the number of a link" in told.err) == (2, True)


def test_info_tells_about_the_broker(m: Run) -> None:
    m("pub", "known", "1").ok()
    shown = m("info", "--json").ok().json
    assert shown["software"].startswith("malamute-py")
    assert shown["counters"]["links_opened"] >= 1
    assert ["rings.main.memory", "no"] in m("info").ok().rows
    confirms = shown["latency"]["confirm"]
    assert confirms["count"] >= 1
    assert 0 < confirms["p50_within_ms"] <= confirms["p99_within_ms"]


@pytest.mark.moderate
def test_a_stream_takes_the_schema_of_a_file_and_shows_its_columns(
    m: Run, stream: str, tmp_path: Path
) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    table = pa.table({"carrier": ["AA"], "delay": pa.array([1], pa.int32())})
    parquet.write_table(table, tmp_path / "t.parquet")
    feather.write_feather(table.append_column("gate", pa.array(["B"])), tmp_path / "t.feather")
    assert m("stream", "create", stream, "--schema", str(tmp_path / "t.parquet")).code == 0
    assert "carrier: string, delay: int32" in m("stream", "info", stream).out
    assert m("pub", stream, "x").code != 0
    assert m("stream", "edit", stream, "--schema", str(tmp_path / "t.feather")).code == 0
    assert "gate: string" in m("stream", "info", stream).out
    again = m("stream", "edit", stream, "--schema", str(tmp_path / "no.parquet"))
    assert (again.code, "there is no file" in again.err) == (2, True)
    (tmp_path / "words").write_text("words")
    assert "neither" in m("stream", "edit", stream, "--schema", str(tmp_path / "words")).err


@pytest.mark.moderate
def test_an_edit_may_set_all_settings(m: Run, stream: str) -> None:
    m("stream", "create", stream, "--max-age", "1d", "--description", "old").ok()
    m("stream", "edit", stream, "--max-bytes", "1MiB", "--replace").ok()
    settings = m("stream", "info", stream, "--json").ok().json["settings"]
    named = settings["max_age_ms"], settings["description"], settings["max_bytes"]
    assert named == (0, "", 1 << 20)
    for one in (("mailbox", f"{stream}.m"), ("service", f"{stream}.s")):
        made = m(one[0], "edit", one[1], "--create", "--description", "old").ok()
        assert made.out == f"made {one[1]}: description\n"
        m(one[0], "edit", one[1], "--replace").ok()
        assert m(one[0], "info", one[1], "--json").ok().json["settings"]["description"] == ""
    m("cursor", "edit", stream, "c", "--create", "--description", "old").ok()
    for name, said in (("c", "edited {}: as it was"), ("d", "made {}")):
        told = m("cursor", "edit", stream, name, "--create").ok()
        assert told.out == f"{said.format(f'{stream}/{name}')}; it stands at 0\n"
    m("cursor", "edit", stream, "c", "--replace").ok()
    found = m("cursor", "info", stream, "c", "--json").ok().json
    assert found["settings"]["description"] == ""


@pytest.mark.moderate
def test_a_peek_of_history_that_is_denied_says_so_once_in_words() -> None:
    grants = {
        "ann": {"read": ["*"], "deny": {"replay": ["orders"]}},
        "root": {"admin": True, "write": ["*"]},
    }
    with broker_of(grants) as running:
        lines = "".join(f"{number}\n" for number in range(12))
        as_user(running, "root")("pub", "orders", stdin=lines).ok()
        told = as_user(running, "ann")("stream", "peek", "orders").ok()
    assert told.lines == []
    (line,) = told.err.splitlines()
    assert line.startswith("gap: offsets 0 to 11 (12 records) are gone: ")


def test_a_narrow_terminal_shows_the_list_without_broken_lines(
    m: Run, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m("stream", "create", stream).ok()
    monkeypatch.setenv("COLUMNS", "48")
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    told = m("stream", "ls", stream).ok()
    assert max(map(len, told.lines)) <= 48
    assert "not shown for want of room" in told.out + told.err
