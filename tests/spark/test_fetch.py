"""Tasks: each returns its range of records whole or not at all, whatever the link does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from malamute_protocol.batch import Batch, Content, Stamp, encode
from malamute_protocol.errors import BrokerRefused, ConnectionLost, Timeout
from malamute_py.client.position import Position
from malamute_py.client.session.subscription import GapNotice, Notice, RewoundNotice
from malamute_py.client.sync.client import SyncClient, connect_sync
from pyspark_malamute import links
from pyspark_malamute.columns import Gather
from pyspark_malamute.errors import CheckpointMismatch, DataLoss, SourceUnavailable
from pyspark_malamute.fetch import fetch, fetch_all
from pyspark_malamute.options import SourceOptions, parse_options
from pyspark_malamute.planning import Range, Ranges
from pyspark_malamute.stream_reader import MalamuteStreamReader
from tests.ports import Port
from tests.spark.conftest import serve

STREAM = b"\x11" * 16


def options(**more: str) -> SourceOptions:
    return parse_options({"endpoint": "tcp://127.0.0.1:1", "stream": "s", **more})


def offsets_of(pieces: Iterator[Any]) -> list[int]:
    return list(chain.from_iterable(piece.column("offset").to_pylist() for piece in pieces))


# --- against a link that does what it is told ------------------------------------------------

Event = tuple[int, int] | Notice | Exception
"""Records [from, to) as one batch, a notice, or what a wait raises."""


class ScriptedReading:
    """A subscription whose events are written down; at their end it is at `end`."""

    def __init__(self, start: Position, end: int, events: list[Event], uuid: bytes) -> None:
        self._at = start._replace(stream=uuid)
        self._end = end
        self._events = events
        self._notices: list[Notice] = []
        self.closed = False
        self.waits: list[int | None] = []

    def accepted(self, timeout_ms: int | None = None) -> Position:
        if self._events and isinstance(self._events[0], BrokerRefused):
            raise self._events[0]
        return self._at

    @property
    def position(self) -> Position:
        return self._at

    def next_batch(self, timeout_ms: int | None = None) -> Batch | None:
        self.waits.append(timeout_ms)
        while self._events:
            event = self._events.pop(0)
            if isinstance(event, Exception):
                raise event
            if isinstance(event, GapNotice | RewoundNotice):
                self._notices.append(event)
                self._at = self._at._replace(next=event.to_offset)
            elif isinstance(event, tuple):
                self._at = self._at._replace(next=event[1])
                return batch_of(*event)
        if self._end >= 0:
            self._at = self._at._replace(next=self._end)
        return None

    def notices(self) -> list[Notice]:
        told, self._notices = self._notices, []
        return told

    def __enter__(self) -> ScriptedReading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True


def batch_of(first: int, end: int) -> Batch:
    content = Content(encode([b"x"] * (end - first), subject="s"))
    stamp = Stamp(
        1, 0, 0, 0, 1, first, 5, 1, 0, 96 + len(content.view), len(content), 0,
        content.head.content_crc,
    )  # fmt: skip
    return Batch(stamp, content, None)


class ScriptedLinks:
    """Links that give out these readings, one a subscription, and are counted."""

    def __init__(self, *scripts: Sequence[Event], uuid: bytes = STREAM, ends: bool = True) -> None:
        self._scripts = [list(each) for each in scripts]
        self._uuid = uuid
        self._ends = ends
        self.starts: list[int] = []
        self.credit: list[int] = []
        self.readings: list[ScriptedReading] = []
        self.asked_after: list[int] = []
        """Batches that were handed over before each subscription."""
        self.open_most = 0
        self.dropped = 0
        self.away = False

    def is_away(self, _: SourceOptions, *, reached_broker: bool = False) -> bool:
        return self.away

    def link(self, _: SourceOptions, *, reached_broker: bool = False) -> ScriptedLinks:
        return self

    def drop(self, _: SourceOptions) -> None:
        self.dropped += 1

    def subscribe(self, stream: str, pattern: Any, **asked: Any) -> ScriptedReading:
        assert asked["visibility"] == "durable"
        assert not asked["create"]
        self.starts.append(asked["start"].next)
        self.credit.append(asked["credit_bytes"])
        self.asked_after.append(sum(len(reading.waits) for reading in self.readings))
        end = asked["end"] if self._ends else -1
        reading = ScriptedReading(asked["start"], end, self._scripts.pop(0), self._uuid)
        self.readings.append(reading)
        self.open_most = max(self.open_most, sum(not each.closed for each in self.readings))
        return reading


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[ScriptedLinks], ScriptedLinks]:
    def replace(scripted: ScriptedLinks) -> ScriptedLinks:
        monkeypatch.setattr(links, "link", scripted.link)
        monkeypatch.setattr(links, "drop", scripted.drop)
        monkeypatch.setattr(links, "is_away", scripted.is_away)
        return scripted

    return replace


def part(start: int, end: int) -> Range:
    return Range("s", STREAM.hex(), 1, start, end)


Use = Callable[[ScriptedLinks], ScriptedLinks]


def test_a_range_is_read_whole_and_in_order(use: Use) -> None:
    link = use(ScriptedLinks([(0, 10), (10, 30)]))
    assert offsets_of(fetch(options(), part(0, 30))) == list(range(30))
    assert all(reading.closed for reading in link.readings)
    assert link.dropped == 0


def test_a_silence_is_as_long_as_its_option_says(use: Use) -> None:
    link = use(ScriptedLinks([(0, 30)]))
    offsets_of(fetch(options(fetchTimeoutMs="4321"), part(0, 30)))
    assert set(link.readings[0].waits) == {4321}


def test_after_a_silence_the_question_is_asked_again_behind_what_came(use: Use) -> None:
    link = use(ScriptedLinks([(0, 10), Timeout("no record")], [(10, 30)]))
    assert offsets_of(fetch(options(), part(0, 30))) == list(range(30))
    assert link.starts == [0, 10]
    assert link.dropped == 1


def test_a_lost_link_is_replaced_and_nothing_is_read_twice(use: Use) -> None:
    lost = ConnectionLost("gone")
    link = use(ScriptedLinks([(0, 5), lost], [(5, 9), lost], [(9, 30)]))
    assert offsets_of(fetch(options(fetchRetries="1"), part(0, 30))) == list(range(30))
    assert link.starts == [0, 5, 9]


def test_silence_without_progress_ends_the_task_after_the_retries(use: Use) -> None:
    silence = Timeout("no record")
    link = use(ScriptedLinks([silence], [silence], [silence]))
    with pytest.raises(SourceUnavailable, match="correct option 'endpoint'"):
        offsets_of(fetch(options(fetchRetries="2"), part(0, 30)))
    assert link.starts == [0, 0, 0]


def test_a_broker_that_is_away_is_waited_for_however_often_that_takes(use: Use) -> None:
    silence = Timeout("no record")
    link = use(ScriptedLinks([silence], [silence], [silence], [(0, 30)]))
    link.away = True
    assert offsets_of(fetch(options(fetchRetries="0"), part(0, 30))) == list(range(30))
    link = use(ScriptedLinks([silence], [(0, 30)]))
    link.away = True
    with pytest.raises(SourceUnavailable, match="no record"):
        offsets_of(fetch(options(brokerOutageMs="0"), part(0, 30)))


def test_what_fails_amid_a_batch_is_not_taken_for_a_fault_of_the_link(
    use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(gather: Gather, batch: Batch) -> None:
        gather._bodies.append(None)
        # A module of the user's that pandas imports may raise anything.
        raise ConnectionLost("of another client")

    monkeypatch.setattr(Gather, "add", half)
    link = use(ScriptedLinks([(0, 10), (10, 30)], [(10, 30)]))
    with pytest.raises(SourceUnavailable, match="of another client"):
        offsets_of(fetch(options(), part(0, 30)))
    assert link.starts == [0]


def test_a_refusal_is_told_at_once_and_not_tried_again(use: Use) -> None:
    link = use(ScriptedLinks([BrokerRefused("forbidden", "not yours")]))
    with pytest.raises(SourceUnavailable, match="does not allow this identity to read"):
        offsets_of(fetch(options(), part(0, 30)))
    assert len(link.starts) == 1


def test_a_gap_fails_the_task_or_is_logged_and_skipped(
    use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    script: list[Event] = [(0, 10), GapNotice(10, 20, "damaged", "segment 7"), (20, 30)]
    use(ScriptedLinks([*script]))
    with pytest.raises(DataLoss, match=r"offsets 10 to 19 .* damaged, .*segment 7"):
        offsets_of(fetch(options(), part(0, 30)))
    link = use(ScriptedLinks([*script]))
    with caplog.at_level(logging.WARNING):
        read = offsets_of(fetch(options(failOnDataLoss="false"), part(0, 30)))
    assert read == [*range(10), *range(20, 30)]
    assert "offsets 10 to 19" in caplog.text
    assert link.readings[0].closed


def test_a_trim_amid_a_range_is_logged_and_fails_only_a_task_that_asks_for_it(
    use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    script: list[Event] = [(0, 10), GapNotice(10, 20, "purged", ""), (20, 30)]
    use(ScriptedLinks([*script]))
    with caplog.at_level(logging.WARNING):
        read = offsets_of(fetch(options(), part(0, 30)))
    assert read == [*range(10), *range(20, 30)]
    assert "offsets 10 to 19 were removed by a trim" in caplog.text
    use(ScriptedLinks([*script]))
    with pytest.raises(DataLoss, match=r"offsets 10 to 19 were removed by a trim"):
        offsets_of(fetch(options(failOnDataLoss="all"), part(0, 30)))


def test_a_rewound_stream_ends_the_range_and_gives_no_new_records_for_old_offsets(
    use: Use,
) -> None:
    script: list[Event] = [(0, 10), RewoundNotice(10, 4, 2), (4, 9)]
    use(ScriptedLinks([*script]))
    with pytest.raises(DataLoss, match="now ends at offset 4, before 10"):
        offsets_of(fetch(options(), part(0, 30)))
    use(ScriptedLinks([*script]))
    assert offsets_of(fetch(options(failOnDataLoss="false"), part(0, 30))) == list(range(10))


def test_a_range_that_ends_early_is_an_error_and_not_a_short_result(use: Use) -> None:
    use(ScriptedLinks([(0, 10)], ends=False))
    with pytest.raises(SourceUnavailable, match=r"\[0, 30\) ended at 10 without a word"):
        offsets_of(fetch(options(), part(0, 30)))


def test_a_stream_recreated_after_the_plan_is_not_read(use: Use) -> None:
    use(ScriptedLinks([(0, 30)], uuid=b"\x22" * 16))
    with pytest.raises(CheckpointMismatch, match="was recreated"):
        offsets_of(fetch(options(), part(0, 30)))


# --- several ranges ---------------------------------------------------------------------------


def ranges(*bounds: tuple[int, int], size: int = 100) -> Ranges:
    return Ranges([Range("s", STREAM.hex(), 1, *each, size=size) for each in bounds])


def test_the_next_ranges_are_asked_for_before_the_first_is_worked_off(use: Use) -> None:
    link = use(ScriptedLinks([(0, 5), (5, 10)], [(20, 30)], [(40, 50)]))
    gather = fetch_all(options(), ranges((0, 10), (20, 30), (40, 50)))
    assert offsets_of(gather) == [*range(10), *range(20, 30), *range(40, 50)]
    assert link.starts == [0, 20, 40]
    assert link.asked_after == [0, 0, 0]
    assert all(reading.closed for reading in link.readings)


@pytest.mark.moderate
def test_what_is_asked_for_ahead_is_bounded_by_bytes_and_by_number(use: Use) -> None:
    bounds = [(at, at + 1) for at in range(40)]
    for size, most in ((3 << 20, 2), (100 << 20, 1), (0, 1), (10, 16)):
        link = use(ScriptedLinks(*[[each] for each in bounds]))
        assert offsets_of(fetch_all(options(), ranges(*bounds, size=size))) == list(range(40))
        assert link.open_most == most + 1
        assert sum(link.credit[1 : most + 1]) <= 8 << 20


def test_what_was_asked_for_ahead_is_asked_again_when_the_link_is_lost(use: Use) -> None:
    lost = ConnectionLost("gone")
    link = use(ScriptedLinks([(0, 5), lost], [], [(5, 10)], [(20, 30)]))
    assert offsets_of(fetch_all(options(), ranges((0, 10), (20, 30)))) == [
        *range(10), *range(20, 30),
    ]  # fmt: skip
    assert link.starts == [0, 20, 5, 20]
    assert all(reading.closed for reading in link.readings)


def test_a_task_that_stops_early_closes_what_it_asked_for_ahead(use: Use) -> None:
    link = use(ScriptedLinks([(0, 20_000), (20_000, 40_000)], [(50_000, 50_001)]))
    reading = fetch_all(options(), ranges((0, 40_000), (50_000, 50_001)))
    next(reading)
    assert not link.readings[1].closed
    cast("Any", reading).close()
    assert all(reading.closed for reading in link.readings)


# --- against a broker ------------------------------------------------------------------------


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    with serve(tmp_path / "broker") as server:
        yield server.endpoints[0]


@pytest.fixture
def address() -> Iterator[str]:
    """Endpoint of a broker that will be away for a while."""
    with Port() as port:
        yield port.endpoint


def published(client: SyncClient, count: int) -> Range:
    client.publish_many("s", [b"x" * 1000] * count, subject="a.b")
    plan = client.plan_read("s")
    return Range("s", plan.stream.hex(), plan.epoch, plan.from_offset, plan.to_offset)


@pytest.mark.moderate
def test_tasks_of_a_process_share_a_link_that_is_made_anew_after_it_was_dropped(
    endpoint: str,
) -> None:
    chosen = options(endpoint=endpoint)
    with connect_sync(endpoint) as client:
        whole = published(client, 100)
        assert offsets_of(fetch(chosen, whole)) == list(range(100))
        first = links.link(chosen)
        assert offsets_of(fetch(chosen, whole)) == list(range(100))
        assert links.link(chosen) is first
        links.drop(chosen)
        assert offsets_of(fetch(chosen, whole)) == list(range(100))
        assert links.link(chosen) is not first
        links.drop(chosen)


@pytest.mark.moderate
def test_who_stops_early_leaves_no_subscription_behind_and_the_link_in_order(
    endpoint: str,
) -> None:
    chosen = options(endpoint=endpoint)
    with connect_sync(endpoint) as client:
        whole = published(client, 20_000)
        reading = fetch(chosen, whole)
        next(reading)
        assert client.stream_info("s").subscriptions == 1
        cast("Any", reading).close()
        # The same link, so that the answer comes after the end of the subscription.
        assert links.link(chosen).stream_info("s").subscriptions == 0
        assert offsets_of(fetch(chosen, whole)) == list(range(20_000))
        links.drop(chosen)


@pytest.mark.moderate
def test_records_that_were_in_memory_only_are_told_as_lost_after_a_restart(
    tmp_path: Path, address: str
) -> None:
    server = serve(tmp_path / "broker", address).start()
    reader = MalamuteStreamReader(options(endpoint=address, startingOffsets="earliest"))
    with connect_sync(address) as client:
        client.create_stream("s", memory=True)
        client.publish_many("s", [b"x"] * 100, subject="a")
        begin = reader.initialOffset()
        server.stop()
        with serve(tmp_path / "broker", address):
            client.publish_many("s", [b"x"] * 10, subject="a")
            with pytest.raises(DataLoss, match=r"offsets 0 to .* in memory only"):
                reader.latestOffset(begin, ReadAllAvailable())
            reader.stop()


@pytest.mark.moderate
def test_a_broker_restarted_amid_a_range_costs_no_record_and_repeats_none(
    tmp_path: Path, address: str
) -> None:
    server = serve(tmp_path / "broker", address).start()
    chosen = options(endpoint=address)
    with connect_sync(address) as client:
        whole = published(client, 30_000)
        reading = fetch(chosen, whole)
        first = next(reading).column("offset").to_pylist()
        server.stop()
        with serve(tmp_path / "broker", address):
            assert first + offsets_of(reading) == list(range(30_000))
            links.drop(chosen)
