"""`malamute spark ...`: the pipelines as a person runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from malamute_py.cli import spark as commands
from malamute_py.client.sync.client import SyncClient
from tests.cli.running import Outcome, run_cli

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]


@pytest.fixture
def m(
    spark: SparkSession, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Runs a command in the session of the tests."""
    monkeypatch.setattr(commands, "_session", lambda *_: contextlib.nullcontext(spark))
    monkeypatch.setenv("MALAMUTE_ENDPOINT", endpoint)
    return lambda *args: run_cli("spark", *args)


def test_a_stream_is_archived_compacted_aggregated_and_replayed_at_the_command_line(
    client: SyncClient, stream: str, tmp_path: Path, m: Callable[..., Outcome]
) -> None:
    path = str(tmp_path / "archive")
    client.publish_many(stream, [b"%d" % n for n in range(200)], subject="a.b",
                        client_time_ms=[n * 1000 for n in range(200)])  # fmt: skip
    cap = ("--option", "maxRecordsPerTrigger=100")
    lines = m("archive", stream, path, "--date-of", "client", *cap).ok().lines
    assert lines[0].startswith("batch 0: 100 records, ")
    assert lines[-1] == f"200 records into {path}"
    told = m("compact", path, "--json").ok().json
    assert (told["files_before"], told["files"]) == (2, 1)

    checkpoint = str(tmp_path / "checkpoint")
    bars = ("--into", f"{stream}-bars", "--checkpoint", checkpoint)
    seen = m("aggregate", stream, *bars, "--json").ok().json_lines
    assert seen[0]["malamute"] == {"records": 200, "without_value": 0, "without_time": 0}
    assert client.stream_info(f"{stream}-bars").tail == 3
    refused = m("aggregate", stream, *bars, "--window", "5 minutes")
    assert (refused.code, "begun with window '1 minute'" in refused.err) == (1, True)

    again = ("--into", f"{stream}-again", "--name", stream)
    assert m("replay", path, *again).ok().lines[-1] == f"200 records replayed into {stream}-again"
    assert client.stream_info(f"{stream}-again").tail == 200


def test_what_the_source_refuses_is_one_line(
    client: SyncClient, stream: str, tmp_path: Path, m: Callable[..., Outcome]
) -> None:
    path = str(tmp_path / "archive")
    client.publish_many(stream, [b"1"] * 10)
    m("archive", stream, path).ok()
    client.publish_many(stream, [b"2"] * 10)
    client.trim(stream, 15)
    told = m("archive", stream, path)
    assert told.code == 1
    assert told.err.startswith("error: malamute source: stream")
    assert "offsets 10 to 14 were removed" in told.err
    assert m("archive", stream, path, "--accept-loss").ok().lines[-1].startswith("5 records")
    wrong = m("archive", stream, path, "--option", "maxOffset=3")
    assert (wrong.code, "option 'maxOffset'" in wrong.err) == (2, True)
    assert m("replay", path, "--into", "x", "--name", "n", "--pace", "fast").code == 2
