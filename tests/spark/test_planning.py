"""Offsets and tasks of a query, against a broker that is a list."""

from __future__ import annotations

import json
import logging
import pickle
from typing import Any, cast

import pytest
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)

from malamute_protocol.errors import Timeout
from malamute_py.client.sync.client import SyncClient
from pyspark_malamute.errors import CheckpointMismatch, DataLoss, OptionError, SourceUnavailable
from pyspark_malamute.idle import IdleWait
from pyspark_malamute.one_stream import FAR
from pyspark_malamute.options import parse_options
from pyspark_malamute.planning import Range
from pyspark_malamute.stream_reader import MalamuteStreamReader
from tests.spark.scripted import APPENDED_MS, RECORD_BYTES, Clock, ScriptedClient

LEAST = {
    "endpoint": "tcp://127.0.0.1:9797", "stream": "s", "pattern": "a.#",
    "startingOffsets": "earliest", "idleWaitMs": "0",
}  # fmt: skip
ALL = ReadAllAvailable()


def reader_of(client: ScriptedClient, **more: str) -> MalamuteStreamReader:
    given = {**LEAST, **more}
    if "startingTimestamp" in more:
        del given["startingOffsets"]
    reader = MalamuteStreamReader(parse_options(given))
    reader._broker._client = cast("SyncClient", client)
    return reader


def through_json(offset: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(offset))
    return loaded


def offset_of(offsets: dict[str, Any], name: str = "s") -> int:
    offset: int = offsets["streams"][name]["offset"]
    return offset


def step(
    reader: MalamuteStreamReader, start: dict[str, Any], limit: ReadLimit = ALL
) -> dict[str, Any]:
    """One latestOffset, as Spark calls it: all offsets go through JSON."""
    return through_json(reader.latestOffset(through_json(start), limit))


def tasks(
    reader: MalamuteStreamReader, start: dict[str, Any], end: dict[str, Any]
) -> list[tuple[int, int]]:
    found = reader.partitions(through_json(start), through_json(end))
    assert all(isinstance(task, Range) for task in found)
    return [(task.start, task.end) for task in found if isinstance(task, Range)]


@pytest.mark.moderate
def test_a_batch_that_is_run_again_has_the_same_tasks_whatever_was_changed_since() -> None:
    client = ScriptedClient([False] * 5_000 + [True] * 45_000)
    query = reader_of(client, splitBytes="1m", maxRecordsPerTrigger="40000")
    begin = query.initialOffset()
    end = step(query, begin, ReadMaxRows(40_000))
    before = tasks(query, begin, end)
    assert len(before) == 4
    client.append(*[True] * 1000)
    for more in ({}, {"splitBytes": "3m"}, {"minPartitions": "9"}, {"maxRecordsPerPartition": "7"}):
        assert tasks(reader_of(client, **more), begin, end) == before
    # The checkpoint of a connector that did not write them down.
    del end["tasks"]
    assert tasks(reader_of(client, splitBytes="3m"), begin, end) != before


def test_a_batch_that_ends_where_it_begins_has_no_tasks() -> None:
    query = reader_of(ScriptedClient([True] * 20))
    end = step(query, query.initialOffset())
    assert step(query, end) == end
    assert tasks(query, end, end) == []


# --- where a query begins ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "offset"),
    [
        ({"startingOffsets": "earliest"}, 3),
        ({"startingOffsets": "latest"}, 20),
        ({"startingOffsets": "7"}, 7),
        ({"startingTimestamp": str(APPENDED_MS + 9)}, 9),
        (
            {
                "startingTimestamp": str(APPENDED_MS + 500),
                "startingOffsetsByTimestampStrategy": "latest",
            },
            20,
        ),
    ],
)
def test_a_query_begins_where_its_option_says(more: dict[str, str], offset: int) -> None:
    client = ScriptedClient([True] * 20)
    client.first = 3
    begin = reader_of(client, **more).initialOffset()
    assert offset_of(begin) == offset
    assert begin["streams"]["s"]["stream"] == client.uuid.hex()


def test_a_query_that_does_not_say_where_begins_at_the_latest_record_as_kafkas_do() -> None:
    given = {name: value for name, value in LEAST.items() if name != "startingOffsets"}
    reader = MalamuteStreamReader(parse_options(given))
    reader._broker._client = cast("SyncClient", ScriptedClient([True] * 5))
    assert offset_of(reader.initialOffset()) == 5


def test_a_start_that_is_not_there_is_refused_by_the_options_name() -> None:
    client = ScriptedClient([True] * 20)
    with pytest.raises(OptionError, match=r"'startingOffsets': 21 is beyond .* end, 20"):
        reader_of(client, startingOffsets="21").initialOffset()
    with pytest.raises(OptionError, match=r"'startingTimestamp': no record"):
        reader_of(client, startingTimestamp="99999").initialOffset()
    client.first = 5
    with pytest.raises(DataLoss, match="offsets 2 to 4"):
        reader_of(client, startingOffsets="2").initialOffset()
    follower = reader_of(client, startingOffsets="2", failOnDataLoss="false")
    assert offset_of(follower.initialOffset()) == 5


# --- how far a batch reaches ----------------------------------------------------------------


def test_a_batch_reaches_to_the_tail_and_then_nothing_is_new() -> None:
    client = ScriptedClient([True] * 20)
    reader = reader_of(client)
    begin = reader.initialOffset()
    end = step(reader, begin)
    assert offset_of(end) == 20
    assert json.dumps(step(reader, end)) == json.dumps(end)


def test_an_idle_query_keeps_its_offset_over_a_restart_of_the_broker() -> None:
    """Spark compares offsets as text: a new epoch alone must not make a batch."""
    client = ScriptedClient([True] * 20)
    reader = reader_of(client)
    end = step(reader, reader.initialOffset())
    client.epoch = 2
    assert step(reader, end) == end
    client.append(True)
    assert step(reader, end)["streams"]["s"]["epoch"] == 2


def test_records_that_do_not_match_do_not_make_a_batch() -> None:
    client = ScriptedClient([False] * 50)
    reader = reader_of(client)
    begin = reader.initialOffset()
    assert step(reader, begin) == begin
    client.append(*[False] * 5, True)
    end = step(reader, begin)
    assert offset_of(end) == 56
    assert tasks(reader, begin, end) == [(50, 56)]


def test_what_was_seen_not_to_match_is_not_planned_again() -> None:
    client = ScriptedClient([False] * 50)
    reader = reader_of(client)
    begin = reader.initialOffset()
    step(reader, begin)
    step(reader, begin)
    assert [plan[0] for plan in client.plans[1:]] == [0, 50]


def test_records_that_do_not_match_are_passed_over_across_restarts_of_the_broker() -> None:
    """A look in a later epoch than the query's position finds no loss."""
    client = ScriptedClient([False] * 10)
    reader = reader_of(client)
    begin = reader.initialOffset()
    assert step(reader, begin) == begin
    for _ in range(2):
        client.restart()
        client.append(*[False] * 10)
        assert step(reader, begin) == begin
        client.append(*[False] * 10)
        assert step(reader, begin) == begin
    client.append(True)
    end = step(reader, begin)
    assert offset_of(end) == 51
    assert tasks(reader, begin, end) == [(50, 51)]
    assert step(reader, end) == end


def test_a_plan_of_several_questions_reaches_across_restarts_of_the_broker() -> None:
    client = ScriptedClient([False] * 10)
    client.looked_max = 10
    reader = reader_of(client)
    begin = reader.initialOffset()
    client.restart()
    client.append(*[False] * 20, True, True)
    assert offset_of(step(reader, begin, ReadMaxRows(2))) == 32


@pytest.mark.moderate
def test_a_position_advances_past_very_many_records_that_do_not_match() -> None:
    client = ScriptedClient([False] * (FAR + 10))
    reader = reader_of(client)
    begin = reader.initialOffset()
    end = step(reader, begin)
    assert offset_of(end) == FAR + 10
    assert tasks(reader, begin, end) == []


def test_a_position_advances_when_retention_comes_near_it() -> None:
    client = ScriptedClient([False] * 1000)
    client.first = 10
    reader = reader_of(client)
    begin = reader.initialOffset()
    assert offset_of(step(reader, begin)) == 1000


def test_records_trimmed_after_they_were_seen_not_to_match_are_no_loss() -> None:
    client = ScriptedClient([False] * 100)
    reader = reader_of(client)
    begin = reader.initialOffset()
    assert step(reader, begin) == begin
    client.first = 90
    client.append(True)
    end = step(reader, begin)
    assert offset_of(end) == 101
    assert tasks(reader, begin, end) == [(100, 101)]


def test_trimmed_records_are_no_loss_and_those_that_retention_took_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = ScriptedClient([True] * 100)
    reader = reader_of(client)
    begin = reader.initialOffset()
    client.first = client.trimmed = 40
    end = step(reader, begin)
    assert tasks(reader, begin, end) == [(40, 100)]
    assert "offsets 0 to 39 were removed by a trim" in caplog.text
    told = reader.reportLatestOffset()
    assert told is not None
    assert told["recordsLost"] == 0
    with pytest.raises(DataLoss, match="offsets 0 to 39 were removed by a trim"):
        step(reader_of(client, failOnDataLoss="all"), begin)
    client.first = 50
    with pytest.raises(DataLoss, match="offsets 40 to 49 cannot be read any more: retention"):
        step(reader_of(client), begin)


def test_the_caps_of_the_options_bound_a_batch_and_all_available_lifts_them() -> None:
    client = ScriptedClient([True] * 100)
    reader = reader_of(client, maxRecordsPerTrigger="30")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(30)
    begin = reader.initialOffset()
    assert offset_of(step(reader, begin, limit)) == 30
    assert offset_of(step(reader, begin, ReadMaxBytes(20 * RECORD_BYTES))) == 20
    assert offset_of(step(reader, begin, ALL)) == 100
    assert reader_of(client).getDefaultReadLimit() == ReadMaxBytes(1 << 30)
    assert reader_of(client, maxBytesPerTrigger="0").getDefaultReadLimit() == ALL


def test_both_caps_hold_when_both_are_given() -> None:
    client = ScriptedClient([True] * 100)
    reader = reader_of(client, maxRecordsPerTrigger="30", maxBytesPerTrigger="1k")
    assert offset_of(step(reader, reader.initialOffset(), reader.getDefaultReadLimit())) == 11


def test_a_cap_counts_the_records_that_match() -> None:
    client = ScriptedClient(([False] * 99 + [True]) * 50)
    reader = reader_of(client, maxRecordsPerTrigger="10")
    begin = reader.initialOffset()
    end = step(reader, begin, reader.getDefaultReadLimit())
    assert offset_of(end) == 1000
    assert tasks(reader, begin, end) == [(0, 1000)]


def test_a_plan_that_ends_early_is_asked_on_until_the_cap_is_met() -> None:
    client = ScriptedClient(([False] * 99 + [True]) * 50)
    client.looked_max = 250
    reader = reader_of(client, maxRecordsPerTrigger="10", maxBytesPerTrigger="0")
    begin = reader.initialOffset()
    end = step(reader, begin, reader.getDefaultReadLimit())
    assert offset_of(end) == 1000
    assert [plan[0] for plan in client.plans[1:]] == [0, 250, 500, 750]
    assert [plan[2] for plan in client.plans[1:]] == [10, 8, 5, 3]
    assert tasks(reader, begin, end) == [(0, 1000)]


def test_a_cap_does_not_hide_a_match_that_lies_beyond_what_one_plan_looks_through() -> None:
    client = ScriptedClient([False] * 500 + [True] + [False] * 500)
    client.looked_max = 100
    reader = reader_of(client, maxRecordsPerTrigger="1")
    begin = reader.initialOffset()
    end = step(reader, begin, ReadMaxRows(1))
    assert offset_of(end) == 501
    assert tasks(reader, begin, end) == [(500, 501)]


def test_few_records_wait_for_more_until_the_delay_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("pyspark_malamute.stream_reader.monotonic", clock.read)
    client = ScriptedClient([True])
    reader = reader_of(client, minRecordsPerTrigger="10", maxTriggerDelay="5m")
    limit = reader.getDefaultReadLimit()
    first = step(reader, reader.initialOffset(), limit)
    assert offset_of(first) == 1
    client.append(*[False, True] * 9)
    assert step(reader, first, limit) == first
    clock.now_s += 299
    assert step(reader, first, limit) == first
    # trigger(once=True) lifts the bounds.
    assert offset_of(step(reader, first, ALL)) == 19
    clock.now_s += 299
    client.append(True)
    assert offset_of(step(reader, first, limit)) == 20
    client.append(True)
    second = step(reader, first, limit)
    assert step(reader, second, limit) == second
    client.append(True)
    clock.now_s += 301
    assert offset_of(step(reader, second, limit)) == 22


def test_the_least_number_of_records_holds_nothing_back_from_available_now() -> None:
    client = ScriptedClient([True] * 20)
    reader = reader_of(client, minRecordsPerTrigger="15", maxBytesPerTrigger="0")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(15)
    begin = reader.initialOffset()
    assert offset_of(step(reader, begin, limit)) == 20
    client.append(True)
    reader.prepareForTriggerAvailableNow()
    assert offset_of(step(reader, step(reader, begin, limit), limit)) == 21


def test_available_now_ends_at_what_was_there_when_it_began() -> None:
    client = ScriptedClient([True] * 50)
    reader = reader_of(client)
    reader.prepareForTriggerAvailableNow()
    begin = reader.initialOffset()
    client.append(*[True] * 50)
    middle = step(reader, begin, ReadMaxRows(30))
    assert offset_of(middle) == 30
    end = step(reader, middle, ReadMaxRows(30))
    assert offset_of(end) == 50
    assert step(reader, end, ReadMaxRows(30)) == end


@pytest.mark.parametrize("left", [0, 5])
def test_available_now_notices_a_recreated_stream_that_is_shorter(left: int) -> None:
    client = ScriptedClient([True] * 20)
    reader = reader_of(client)
    end = step(reader, reader.initialOffset())
    recreated = ScriptedClient([True] * left)
    recreated.uuid = b"\x22" * 16
    restarted = reader_of(recreated)
    restarted.prepareForTriggerAvailableNow()
    with pytest.raises(CheckpointMismatch, match="was recreated"):
        step(restarted, end)


def test_available_now_notices_a_stream_that_ends_before_the_position(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = ScriptedClient([True] * 20)
    reader = reader_of(client)
    end = step(reader, reader.initialOffset())
    del client.matches[15:]
    client.epoch = 2
    restarted = reader_of(client)
    restarted.prepareForTriggerAvailableNow()
    with pytest.raises(DataLoss, match="now ends at offset 15, before 20"):
        step(restarted, end)
    follower = reader_of(client, failOnDataLoss="false")
    follower.prepareForTriggerAvailableNow()
    with caplog.at_level(logging.WARNING):
        assert offset_of(step(follower, end)) == 15


def test_available_now_notices_a_rewound_stream_that_has_grown_to_the_position() -> None:
    """The epoch tells: offsets 15 to 19 are other records than those that were read."""
    client = ScriptedClient([True] * 20)
    reader = reader_of(client)
    end = step(reader, reader.initialOffset())
    client.rewind(15)
    client.append(*[True] * 5)
    restarted = reader_of(client)
    restarted.prepareForTriggerAvailableNow()
    with pytest.raises(DataLoss, match="now ends at offset 15, before 20"):
        step(restarted, end)


def test_idle_wait_says_whether_a_source_asks_again_before_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(
        "pyspark_malamute.stream_reader.IdleWait",
        lambda wait_ms: IdleWait(wait_ms, clock.read, clock.sleep),
    )
    asked = {}
    for wait_ms in ("0", "100"):
        client = ScriptedClient([True] * 5)
        reader = reader_of(client, idleWaitMs=wait_ms)
        end = step(reader, reader.initialOffset())
        client.plans.clear()
        for _ in range(3):
            assert step(reader, end) == end
        asked[wait_ms] = len(client.plans)
    assert asked["0"] == 3
    assert asked["100"] > 3


def test_sources_of_one_query_do_not_wait_for_each_other() -> None:
    quiet = ScriptedClient([True] * 5)
    reader = reader_of(quiet, idleWaitMs="60000")
    end = step(reader, reader.initialOffset())
    assert step(reader, end) == end
    # Spark begins a batch for which this source had nothing.
    reader.commit(end)
    quiet.plans.clear()
    assert step(reader, end) == end
    assert len(quiet.plans) == 1


# --- what no longer fits ----------------------------------------------------------------------


def test_a_recreated_stream_is_refused_by_name_whatever_fail_on_data_loss_says() -> None:
    client = ScriptedClient([True] * 20)
    reader = reader_of(client, failOnDataLoss="false")
    begin = reader.initialOffset()
    end = step(reader, begin)
    client.uuid = b"\x22" * 16
    with pytest.raises(CheckpointMismatch, match="was recreated"):
        step(reader, end)
    with pytest.raises(CheckpointMismatch, match="was recreated"):
        reader_of(client).partitions(begin, end)


def test_a_changed_pattern_is_refused_before_the_broker_is_asked() -> None:
    client = ScriptedClient([True] * 20)
    begin = reader_of(client).initialOffset()
    asked = len(client.plans)
    with pytest.raises(CheckpointMismatch, match="pattern has changed"):
        step(reader_of(client, pattern="b.#"), begin)
    assert len(client.plans) == asked


def test_a_rewound_stream_is_refused_or_followed_as_fail_on_data_loss_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = ScriptedClient([True] * 20)
    reader = reader_of(client)
    end = step(reader, reader.initialOffset())
    del client.matches[15:]
    client.epoch = 2
    with pytest.raises(DataLoss, match="now ends at offset 15, before 20") as caught:
        step(reader, end)
    assert "failOnDataLoss to false" in str(caught.value)
    follower = reader_of(client, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING):
        followed = step(follower, end)
    assert (offset_of(followed), followed["streams"]["s"]["epoch"]) == (15, 2)
    assert "now ends at offset 15" in caplog.text
    assert tasks(follower, end, followed) == []
    told = follower.reportLatestOffset()
    assert told is not None
    assert told["recordsLost"] == 5
    client.append(True)
    assert offset_of(step(follower, followed)) == 16


def test_records_gone_by_retention_fail_the_query_or_are_logged_and_skipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = ScriptedClient([True] * 20)
    begin = reader_of(client).initialOffset()
    client.first = 8
    with pytest.raises(DataLoss, match=r"offsets 0 to 7 .* retention") as caught:
        step(reader_of(client), begin)
    assert "ring_bytes" in str(caught.value)
    follower = reader_of(client, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING):
        end = step(follower, begin)
    assert "offsets 0 to 7" in caplog.text
    assert tasks(follower, begin, end) == [(8, 20)]
    told = follower.reportLatestOffset()
    assert told is not None
    assert told["recordsLost"] == 8
    step(follower, end)
    told = follower.reportLatestOffset()
    assert told is not None
    assert told["recordsLost"] == 8


# --- a broker that is away ----------------------------------------------------------------------


def test_a_query_waits_for_a_broker_that_is_away_and_goes_on() -> None:
    client = ScriptedClient([True] * 20)
    reader = reader_of(client, brokerOutageMs="120000")
    begin = reader.initialOffset()
    client.failures = [Timeout("no answer")]
    client.linked = False
    end = step(reader, begin)
    assert offset_of(end) == 20
    (waited_ms,) = client.opens
    assert waited_ms is not None
    assert 60_000 < waited_ms <= 120_000


def test_a_broker_that_is_away_ends_the_query_where_no_outage_is_allowed() -> None:
    client = ScriptedClient([True] * 20)
    reader = reader_of(client, brokerOutageMs="0")
    begin = reader.initialOffset()
    client.failures = [Timeout("no answer")]
    client.linked = False
    with pytest.raises(SourceUnavailable, match="Is the broker running there"):
        step(reader, begin)


def test_a_broker_that_is_there_and_does_not_answer_is_not_waited_for() -> None:
    client = ScriptedClient([True] * 20)
    reader = reader_of(client)
    begin = reader.initialOffset()
    client.failures = [Timeout("no answer within 30000 ms")]
    with pytest.raises(SourceUnavailable, match="no answer within 30000 ms"):
        step(reader, begin)
    assert client.opens == []


def test_tasks_know_whether_the_query_has_read_from_the_broker_before() -> None:
    client = ScriptedClient([True] * 20)
    reader = reader_of(client)
    begin = reader.initialOffset()
    end = step(reader, begin)
    (task,) = reader.partitions(begin, end)
    assert isinstance(task, Range)
    assert not task.reached_broker
    reader.commit(end)
    (task,) = reader.partitions(begin, end)
    assert isinstance(task, Range)
    assert task.reached_broker


# --- tasks -----------------------------------------------------------------------------------


def test_a_batch_that_the_checkpoint_knows_of_is_planned_again_after_a_restart() -> None:
    client = ScriptedClient([True] * 40)
    reader = reader_of(client, maxRecordsPerTrigger="20")
    begin = reader.initialOffset()
    end = step(reader, begin, ReadMaxRows(20))
    client.append(*[True] * 10)
    client.epoch = 2
    assert tasks(reader_of(client), begin, end) == tasks(reader, begin, end) == [(0, 20)]


def test_a_checkpoint_of_the_first_version_is_gone_on_with() -> None:
    client = ScriptedClient([True] * 40)
    selection = reader_of(client).initialOffset()["selection"]
    begin, end = (
        {
            "epoch": 1, "offset": offset, "selection": selection, "stream": client.uuid.hex(),
            "version": 1,
        }
        for offset in (10, 20)
    )  # fmt: skip
    reader = reader_of(client)
    assert tasks(reader, begin, end) == [(10, 20)]
    assert offset_of(step(reader, end)) == 40


def test_a_batch_is_planned_once_and_not_again_for_its_tasks() -> None:
    client = ScriptedClient([True] * 40)
    reader = reader_of(client)
    begin = reader.initialOffset()
    end = step(reader, begin)
    asked = len(client.plans)
    assert tasks(reader, begin, end) == [(0, 40)]
    assert len(client.plans) == asked


def test_tasks_whose_rows_are_only_counted_are_larger() -> None:
    client = ScriptedClient([True] * 30_000)
    for columns, count in (("offset", 3), ("", 1)):
        reader = reader_of(client, splitBytes="1m", columns=columns)
        begin = reader.initialOffset()
        assert len(tasks(reader, begin, step(reader, begin))) == count


def test_more_tasks_are_made_where_min_partitions_asks_for_them() -> None:
    client = ScriptedClient([True] * 40)
    reader = reader_of(client, minPartitions="4")
    begin = reader.initialOffset()
    cut = tasks(reader, begin, step(reader, begin))
    assert cut == [(0, 10), (10, 20), (20, 30), (30, 40)]


def test_a_task_reads_about_as_many_bytes_as_its_option_says() -> None:
    client = ScriptedClient([True] * 30_000)
    for size, count in (("1m", 3), ("2m", 2), ("3m", 1)):
        reader = reader_of(client, splitBytes=size)
        begin = reader.initialOffset()
        assert len(tasks(reader, begin, step(reader, begin))) == count


def test_no_task_has_more_selected_records_than_an_option_says() -> None:
    client = ScriptedClient([False, True] * 20 + [False] * 100)
    reader = reader_of(client, maxRecordsPerPartition="8")
    begin = reader.initialOffset()
    cut = tasks(reader, begin, step(reader, begin))
    assert cut == [(0, 16), (16, 32), (32, 140)]
    client.looked_max = 4
    assert tasks(reader, begin, step(reader, begin))[:3] == [(0, 4), (4, 8), (8, 12)]


def test_an_empty_range_has_no_tasks() -> None:
    client = ScriptedClient([True] * 40)
    reader = reader_of(client)
    begin = reader.initialOffset()
    assert tasks(reader, begin, begin) == []


# --- what is told, and what travels -------------------------------------------------------------


def test_progress_shows_lag_and_what_retention_leaves() -> None:
    client = ScriptedClient([True] * 100)
    client.first = 10
    reader = reader_of(client)
    assert reader.reportLatestOffset() is None
    step(reader, reader.initialOffset(), ReadMaxRows(30))
    told = reader.reportLatestOffset()
    assert told is not None
    assert offset_of(told) == 100
    assert told["recordsBehindLatest"] == 60
    assert told["recordsUntilTrimmed"] == 30
    assert list(told) == sorted(told)


def test_no_link_travels_to_the_executors() -> None:
    reader = reader_of(ScriptedClient([True]))
    copy = pickle.loads(pickle.dumps(reader))
    assert not copy._broker.asked
    assert copy._options == reader._options


def test_stopping_lets_go_of_the_link_and_may_be_repeated() -> None:
    reader = reader_of(ScriptedClient([True]))
    reader.stop()
    reader.stop()
    assert not reader._broker.asked
