"""`malamute stream export` and `import`: ranges as files, and records that are there once."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.batch import Batch, Content, Stamp, encode
from malamute_protocol.encode import encode_arrow, encode_lists
from malamute_protocol.limits import DEFAULT_LIMITS
from malamute_protocol.schema import Schemas, schema_id
from malamute_py import EmbeddedBroker
from malamute_py.cli import exporting, importing
from malamute_py.client.session.tables import TableRows
from tests.cli.running import Run, as_user, broker_of, run_cli

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def filled(broker: EmbeddedBroker, stream: str) -> str:
    """Six records that have all that a record may have."""
    with broker.connect_sync() as client:
        for number in range(6):
            client.publish(
                stream, b"\xff%d" % number, subject=["a.even" if number % 2 else "a.odd", "k"],
                fields={"n": str(number)}, client_time_ms=1_700_000_000_000 + number,
                properties={"n": number}, expires_at_ms=4_000_000_000_000,
            )  # fmt: skip
    return stream


def kept(m: Run, stream: str) -> list[Any]:
    """All records of a stream, but for what a copy does not keep."""
    found = m("sub", stream, "--start", "earliest", "--until-tail", "--json").ok().json_lines
    return [{k: v for k, v in each.items() if k not in ("offset", "time", "id")} for each in found]


@pytest.mark.moderate
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_what_was_exported_is_imported_with_all_that_a_copy_keeps_and_once(
    m: Run, filled: str, form: str, tmp_path: Path
) -> None:
    file, to = str(tmp_path / f"range.{form}"), f"{filled}-to"
    told = m("stream", "export", filled, file).ok()
    assert "6 records of 6 in the range" in told.err
    assert m("stream", "import", to, file, "--json").ok().json["added"] == 6
    assert kept(m, to) == kept(m, filled)
    again = m("stream", "import", to, file, "--json").ok().json
    assert (again["added"], again["known"]) == (0, 6)
    assert len(kept(m, to)) == 6


@pytest.mark.moderate
def test_both_forms_of_a_range_are_the_same_records(m: Run, filled: str, tmp_path: Path) -> None:
    lines, table = str(tmp_path / "r.jsonl"), str(tmp_path / "r.parquet")
    for file in (lines, table):
        m("stream", "export", filled, file).ok()
    m("stream", "import", f"{filled}-to", lines).ok()
    assert m("stream", "import", f"{filled}-to", table, "--json").ok().json["known"] == 6


@pytest.mark.moderate
def test_a_range_is_chosen_by_offset_time_and_pattern(m: Run, filled: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"

    def offsets(*options: str) -> list[int]:
        m("stream", "export", filled, str(file), *options).ok()
        return [json.loads(line)["offset"] for line in file.read_text().splitlines()]

    assert offsets("--from", "2", "--to", "4") == [2, 3]
    assert offsets("a.even", "--from", "2") == [3, 5]
    assert offsets(
        "--by", "client", "--from", "2023-11-14T22:13:20.004Z", "--to", "2030-01-01"
    ) == [4, 5]
    assert offsets("--from", "6") == []


@pytest.mark.moderate
def test_records_with_much_beside_their_bodies_are_imported_once(
    m: Run, broker: EmbeddedBroker, stream: str, tmp_path: Path
) -> None:
    with broker.connect_sync() as client:
        kept_beside = [{"note": f"{n:03d}".ljust(60_000, "p")} for n in range(400)]
        client.publish_many(stream, [b"x"] * 400, properties=kept_beside)
    file, to = str(tmp_path / "r.jsonl"), f"{stream}-to"
    m("stream", "export", stream, file).ok()
    assert m("stream", "import", to, file, "--json").ok().json["added"] == 400
    assert kept(m, to) == kept(m, stream)
    assert m("stream", "import", to, file, "--json").ok().json["known"] == 400


@pytest.mark.moderate
def test_a_broker_with_low_limits_is_imported_into(
    m: Run, stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low: dict[str, Any] = {
        "limits.batch_records_max": 100, "limits.batch_bytes_max": 256 << 10,
        "limits.record_bytes_max": 64 << 10,
    }  # fmt: skip
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(json.dumps({"body": f"{n:02000d}"}) for n in range(950)))
    with EmbeddedBroker(tcp=True, **low) as small:
        monkeypatch.setenv("MALAMUTE_ENDPOINT", small.tcp_endpoint)
        assert m("stream", "import", stream, str(file), "--json").ok().json["added"] == 950
        assert m("stream", "import", stream, str(file), "--json").ok().json["known"] == 950


def test_an_import_that_was_cut_off_goes_on_where_it_was(
    m: Run, stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "_ROWS", 10)
    lines = [json.dumps({"body": str(number)}) for number in range(95)]
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join([*lines[:50], "{", *lines[50:]]))
    broken = m("stream", "import", stream, str(file))
    assert broken.code == 1
    assert "line 51" in broken.err
    file.write_text("\n".join(lines))
    told = m("stream", "import", stream, str(file), "--json").ok().json
    assert told["added"] + told["known"] == 95
    assert [each["body"] for each in kept(m, stream)] == list(map(str, range(95)))


def test_another_stream_of_the_name_takes_the_records_anew(
    m: Run, stream: str, tmp_path: Path
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"body": "a"}\n')
    m("stream", "import", stream, str(file)).ok()
    m("stream", "rm", stream, "--yes").ok()
    assert m("stream", "import", stream, str(file), "--json").ok().json["added"] == 1


@pytest.mark.moderate
@pytest.mark.parametrize(
    "grant", [{"write": ["*"]}, {"write_subjects": {"*": ["a.*"]}, "create": ["*"]}]
)
def test_who_may_write_and_not_read_imports_each_record_once(
    grant: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("".join(f'{{"body": "{n}", "subject": "a.x"}}\n' for n in range(5)))
    with broker_of({"ann": grant, "root": {"create": ["*"]}}) as running:
        run = as_user(running, "ann")
        for added in (5, 0):
            assert run("stream", "import", "s", str(file), "--json").ok().json["added"] == added
        rows = str(tmp_path / "rows.parquet")
        pq.write_table(pa.table({"n": [0]}), rows)
        as_user(running, "root")("stream", "create", "typed", "--schema", rows).ok()
        file.write_text('{"row": {"n": 1}, "subject": "a.x"}\n')
        told = run("stream", "import", "typed", str(file), "--no-keys", "--json").ok().json
        assert told["added"] == 1
        assert run("stream", "info", "s").code == 1, "nothing else is told"
        file.write_text('{"body": "0", "subject": "b.x"}\n')
        assert run("stream", "import", "s", str(file)).code == ("write" not in grant)


def test_an_import_without_keys_needs_no_identity(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"body": "a"}\n')
    with EmbeddedBroker(tcp=True, permissions={"*": {"write": ["*"]}}) as running:
        env = {"MALAMUTE_ENDPOINT": running.tcp_endpoint}
        told = run_cli("stream", "import", "s", str(file), "--no-keys", "--json", env=env)
        assert told.ok().json["added"] == 1


@pytest.mark.moderate
def test_a_ring_of_its_own_has_no_keys_and_takes_all_when_told(
    m: Run, stream: str, tmp_path: Path
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"body": "a"}\n')
    m("stream", "create", stream, "--memory").ok()
    refused = m("stream", "import", stream, str(file))
    assert refused.code == 1
    assert "--no-keys" in refused.err
    for _ in range(2):
        m("stream", "import", stream, str(file), "--no-keys").ok()
    assert len(kept(m, stream)) == 2


@pytest.mark.moderate
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_bodies_of_several_parts_come_back_as_such(
    m: Run, broker: EmbeddedBroker, stream: str, form: str, tmp_path: Path
) -> None:
    with broker.connect_sync() as client:
        client.publish_batch(stream, encode_lists([[b"a", b""], [b"c"]], subject="s"))
    file = str(tmp_path / f"r.{form}")
    m("stream", "export", stream, file).ok()
    m("stream", "import", f"{stream}-to", file).ok()
    assert kept(m, f"{stream}-to") == kept(m, stream)


TYPED = pa.schema(
    [
        ("carrier", pa.string()), ("delay", pa.int32()), ("on", pa.date32()),
        ("rate", pa.float64()),
        ("at", pa.timestamp("ms", "UTC")), ("exact", pa.timestamp("ns")), ("raw", pa.binary()),
        ("fare", pa.decimal128(9, 2)), ("took", pa.duration("ms")), ("from", pa.time32("ms")),
        ("stops", pa.list_(pa.struct([("code", pa.string()), ("day", pa.date32())]))),
        ("seats", pa.map_(pa.string(), pa.int64())), ("late", pa.bool_()),
    ]
)  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {
        "carrier": "AA", "delay": 4, "on": date(2013, 7, 5), "rate": float("inf"),
        "at": datetime(2013, 7, 5, 10, 0, 0, 500_000, tzinfo=UTC),
        "exact": pa.scalar(1_373_018_400_000_000_001, pa.timestamp("ns")), "raw": b"\xff\x00",
        "fare": Decimal("12.50"), "took": timedelta(minutes=5, milliseconds=3),
        "from": time(10, 0, 0, 500_000), "stops": [{"code": "HNL", "day": date(2013, 7, 6)}],
        "seats": [("a", 1)], "late": True,
    },
    {"carrier": "B", "rate": 0.1, "stops": []},
]  # fmt: skip


@pytest.mark.moderate
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rows_of_a_typed_stream_come_back_with_all_that_a_copy_keeps(
    m: Run, broker: EmbeddedBroker, stream: str, form: str, tmp_path: Path
) -> None:
    table = pa.Table.from_pylist(ROWS, TYPED)
    headers = {
        "subject": [("a.b", "k"), "c"], "fields": [{"f": "1"}, None], "client_time_ms": [5, None],
        "expires_at_ms": [1 << 42, 0], "properties": [{"p": 1.5, "raw": b"\xff"}, None],
    }  # fmt: skip
    with broker.connect_sync() as client:
        for name in (stream, f"{stream}-to"):
            client.create_stream(name, schema=TYPED)
        message = client.stream_info(stream).settings["schema"]
        schemas = Schemas([(schema_id(message), message)])
        rows = TableRows(table, schemas, headers=lambda first, count: headers)
        for content, _ in rows.contents(1 << 20, DEFAULT_LIMITS):
            client.publish_batch(stream, content)
    file = str(tmp_path / f"r.{form}")
    m("stream", "export", stream, file).ok()
    refused = m("stream", "import", f"{stream}-to", file)
    assert (refused.code, "is typed" in refused.err) == (2, True)
    m("stream", "import", f"{stream}-to", file, "--no-keys").ok()
    first, second = copied = kept(m, f"{stream}-to")
    assert copied == kept(m, stream)
    assert (first["keys"], first["fields"], first["properties"]) == (
        ["a.b", "k"], {"f": "1"}, {"p": 1.5, "raw": {"base64": "/w=="}},
    )  # fmt: skip
    assert ("client_time" in first, "expires" in first) == (True, True)
    assert (second["subject"], "fields" in second) == ("c", False)
    with broker.connect_sync() as client, client.subscribe(
        f"{stream}-to", start="earliest", until="tail"
    ) as records:  # fmt: skip
        came = pa.Table.from_batches([batch.to_arrow() for batch in records.batches()])
    assert came.equals(table)


@pytest.mark.moderate
def test_a_line_that_does_not_fit_the_schema_is_named(
    m: Run, broker: EmbeddedBroker, stream: str, tmp_path: Path
) -> None:
    with broker.connect_sync() as client:
        client.create_stream(stream, schema=TYPED)
    file = tmp_path / "r.jsonl"
    for line, word in (
        ({"row": {"on": "no day"}}, "line 1"), ({"body": "a"}, "line 1: has no row"),
        ({"row": {"other": 1}}, "no column 'other'"), ({"row": {"delay": "x"}}, "schema"),
    ):  # fmt: skip
        file.write_text(json.dumps(line) + "\n")
        told = m("stream", "import", stream, str(file), "--no-keys")
        assert told.code == 1
        assert word in told.err
    plain = m("stream", "import", f"{stream}-plain", str(file))
    assert "--schema" in plain.err


def test_a_file_whose_name_says_no_form_is_refused(m: Run, stream: str, tmp_path: Path) -> None:
    file = tmp_path / "r.csv"
    file.write_text("a")
    assert ".jsonl" in m("stream", "export", stream, str(file)).err
    assert m("stream", "import", stream, str(file)).code == 2
    file = tmp_path / "r.parquet"
    file.write_text("a")
    assert "no Parquet file" in m("stream", "import", stream, str(file)).err


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"body": [b"a", None]}, "no body"),
        ({"body": [1, 2]}, "column body is int64"),
        ({"body": ["a"], "subject": [1]}, "column subject is int64"),
        ({"body": ["a"], "keys": ["k"]}, "column keys is string"),
        ({"body": ["a"], "client_time": [1]}, "column client_time is int64"),
        ({"body": ["a"], "expires": ["tomorrow"]}, "column expires is string"),
        ({"body": ["a"], "fields": ["x"]}, "column fields is string"),
        ({"body": [[b"a", None]]}, "no body"),
        ({"body": [["a"]]}, "column body is list"),
        ({"body": ["a"], "properties": ["x"]}, "column properties is string"),
        ({"body": ["a"], "properties": [b"\x81"]}, "properties of a row"),
        ({"body": ["a"], "properties": [b"\x05"]}, "properties of a row"),
    ],
)
def test_a_parquet_file_with_columns_of_other_types_is_refused_by_name(
    m: Run, stream: str, tmp_path: Path, columns: dict[str, Any], named: str
) -> None:
    from pyarrow import parquet

    parquet.write_table(pa.table(columns), tmp_path / "r.parquet")
    failed = m("stream", "import", stream, str(tmp_path / "r.parquet"))
    assert failed.code == 1
    assert named in failed.err
    assert kept(m, stream) == []


def test_columns_of_any_layout_of_text_and_others_beside_are_imported(
    m: Run, stream: str, tmp_path: Path
) -> None:
    from pyarrow import parquet

    subjects = pa.array(["x", "y"]).dictionary_encode()
    table = {
        "body": pa.array(["a", "b"], pa.large_string()), "subject": subjects, "n": [1, 2],
        "fields": [None, None], "properties": [None, None], "client_time": [None, None],
    }  # fmt: skip
    parquet.write_table(pa.table(table), tmp_path / "r.parquet")
    m("stream", "import", stream, str(tmp_path / "r.parquet")).ok()
    assert [each["subject"] for each in kept(m, stream)] == ["x", "y"]


@pytest.mark.parametrize("keys", [(), ("--no-keys",)])
def test_an_import_that_is_cut_off_says_how_much_is_there_and_what_a_further_run_does(
    m: Run, stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    monkeypatch.setattr(importing, "_ROWS", 10)
    file = tmp_path / "r.jsonl"
    file.write_text("".join(f'{{"body": "{number}"}}\n' for number in range(15)) + "{\n")
    told = m("stream", "import", stream, str(file), *keys)
    assert told.code == 1
    there = len(kept(m, stream))
    assert f"{there} records added for certain" in told.err
    assert ("mend the file, then run it again to go on" in told.err) == (not keys)
    assert "line 16: is not JSON" in told.err
    assert "were taken" not in told.err


def test_an_import_that_is_refused_says_how_much_is_there(
    m: Run, stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "_ROWS", 10)
    file = tmp_path / "r.jsonl"
    lines = [json.dumps({"body": str(number)}) for number in range(20)]
    file.write_text("\n".join([*lines, json.dumps({"parts_base64": ["YQ=="]})]))
    told = m("stream", "import", stream, str(file))
    assert told.code == 1
    assert f"{len(kept(m, stream))} records added for certain" in told.err


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_tables_without_a_schema_are_in_no_file(
    m: Run, broker: EmbeddedBroker, stream: str, form: str, tmp_path: Path
) -> None:
    table = pa.record_batch({"n": [1, 2]})
    with broker.connect_sync() as client:
        content = encode_arrow(table.serialize().to_pybytes(), 2, schema_id=7, subject="s")
        client.publish_batch(stream, content)
    file = tmp_path / f"r.{form}"
    told = m("stream", "export", stream, str(file))
    assert told.code == 1
    assert f"malamute replay {stream} --to-stream" in told.err
    assert not file.exists()


@pytest.mark.moderate
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_properties_that_json_has_no_number_for_and_times_beyond_its_years_come_back(
    m: Run, broker: EmbeddedBroker, stream: str, form: str, tmp_path: Path
) -> None:
    late_ms = 1 << 52
    properties = {"inf": float("inf"), "nan": float("nan"), "half": 0.5, "none": None}
    with broker.connect_sync() as client:
        client.publish(
            stream, b"x", properties=properties, client_time_ms=late_ms, expires_at_ms=late_ms
        )
    file, to = str(tmp_path / f"r.{form}"), f"{stream}-to"
    m("stream", "export", stream, file).ok()
    m("stream", "import", to, file).ok()
    with broker.connect_sync() as client:
        (record,) = client.subscribe(to, start="earliest", until="tail")
    assert repr(dict(record.properties)) == repr(properties)
    assert (record.client_time_ms, record.expires_at_ms) == (late_ms, late_ms)


def test_a_row_group_has_a_bound_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import parquet

    file = tmp_path / "r.parquet"
    for bound, groups in ((1 << 20, 1), (15_000, 3)):
        monkeypatch.setattr(exporting, "_GROUP_BYTES", bound)
        sink = exporting.Parquet(file, b"")
        for number in range(6):
            content = Content(encode([bytes(10_000)]))
            sink.write(
                Batch(
                    Stamp(1, 0, 0, 0, 1, number, 0, 1, 0, 10_000, 1, 0, content.head.content_crc),
                    content,
                )
            )
        sink.finish(None)
        assert parquet.ParquetFile(file).metadata.num_row_groups == groups
