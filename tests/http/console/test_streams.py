"""The pages of streams: the list, one stream, a look, and the tail."""

from __future__ import annotations

import itertools
import time

import pytest

from malamute_py import SyncClient
from malamute_py.http.console.events import ROWS_MAX
from tests.http.console.browsing import Browser
from tests.waiting import WAIT_S

HOSTILE = '<script>alert("x")</script>&\u202e\x1b[31m\u0007'


@pytest.fixture(scope="module", autouse=True)
def filled(client: SyncClient) -> None:
    for number in range(30):
        client.publish("open.trades", b'{"price": %d}' % number, subject=f"eu.{number % 3}")
    client.publish("closed.trades", b"secret", subject="s")
    client.publish("hostile", HOSTILE.encode(), subject="a", fields={"<i>": HOSTILE})
    client.publish("hostile", b"\xff\xfe\x00", subject=HOSTILE.replace("\x1b", ""))


@pytest.mark.moderate
def test_the_overview_shows_what_is_there(root: Browser) -> None:
    page = root.get()
    assert page.status == 200
    assert "Streams" in page.words
    assert "main" in page.words
    assert "■" in page.text or "● fine" in page.text


@pytest.mark.moderate
def test_the_list_shows_what_the_person_may_see(root: Browser, reader: Browser) -> None:
    assert "closed.trades" in root.get("streams").text
    assert "open.trades" in reader.get("streams").text
    assert "closed.trades" not in reader.get("streams").text
    assert "open.trades" not in root.get("streams", prefix="closed").text


@pytest.mark.moderate
def test_a_stream_shows_its_facts_and_settings(root: Browser) -> None:
    words = root.get("stream", name="open.trades").words
    assert "Records 30" in words
    assert "level synced" in words
    assert "Ring main" in words


@pytest.mark.moderate
def test_what_the_broker_refuses_is_told_in_its_words(reader: Browser, root: Browser) -> None:
    page = reader.get("stream", name="closed.trades")
    assert page.status in (403, 404)
    assert "closed.trades" in page.words
    assert "secret" not in page.text
    page = root.get("stream", name="nothing")
    assert page.status == 404
    assert "there is no stream 'nothing'" in page.words
    assert root.get("stream", name="<b>").status in (404, 409)


def test_rows_of_a_typed_stream_are_shown_by_column(root: Browser, client: SyncClient) -> None:
    pa = pytest.importorskip("pyarrow")
    schema = pa.schema([("carrier", pa.string()), ("delay", pa.int32())])
    rows = [{"carrier": HOSTILE, "delay": 4}, {"carrier": None, "delay": 17}]
    client.create_stream("flights", schema=schema)
    client.publish_table("flights", pa.Table.from_pylist(rows, schema))
    page = root.get("stream", name="flights", place="newest", count=5)
    assert "Fields carrier delay" in page.words
    assert '<td class="body">17</td>' in page.text
    assert "<script>alert" not in page.text
    with root.events("tail", name="flights") as events:
        assert next(events).kind == "begun"
        client.publish_table("flights", pa.Table.from_pylist(rows[1:], schema))
        told = next(each for each in events if each.kind == "records")
    assert told.value["rows"][0]["body"] == "carrier: –, delay: 17"


@pytest.mark.parametrize(
    ("query", "offsets"),
    [
        ({"place": "newest", "count": 3}, [27, 28, 29]),
        ({"place": "at", "at": "7", "count": 2}, [7, 8]),
        ({"place": "at", "at": "earliest", "count": 1}, [0]),
        ({"place": "at", "at": "2026-01-31T10:00", "count": 1}, [0]),
        ({"place": "at", "at": "now", "count": 1}, []),
        ({"place": "newest", "pattern": "eu.1", "count": 2}, [25, 28]),
        ({"place": "subjects"}, [27, 28, 29]),
    ],
)
def test_a_look_shows_records_where_the_person_asked(
    root: Browser, query: dict[str, object], offsets: list[int]
) -> None:
    page = root.get("stream", name="open.trades", **query)
    assert page.status == 200
    for offset in range(30):
        assert (f'<td class="number">{offset}</td>' in page.text) == (offset in offsets), offset


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"place": "at", "at": "soon"}, "is no place in a stream"),
        ({"place": "at", "at": "9" * 40}, "is no place in a stream"),
        ({"place": "newest", "pattern": "regex:("}, "bad_pattern"),
        ({"place": "newest", "count": "0"}, "How many is a number from 1 to 200"),
        ({"place": "newest", "count": "x"}, "How many is a number"),
    ],
)
def test_what_cannot_be_read_is_told(root: Browser, query: dict[str, object], words: str) -> None:
    assert words in root.get("stream", name="open.trades", **query).words


@pytest.mark.moderate
def test_a_ring_of_a_streams_own_has_the_streams_name(root: Browser, client: SyncClient) -> None:
    client.create_stream("ledger", ring_bytes=192 << 20)
    deadline = time.monotonic() + WAIT_S
    while "ledger (own)" not in root.get().words:  # The journal's thread tells of it.
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "ledger (own)" in root.get("settings").words
    assert "Its own ring: " in root.get("stream", name="ledger").words
    assert "Ring main, which streams share: " in root.get("stream", name="open.trades").words
    assert "unread bytes" in root.get("settings").words


def test_text_of_strangers_is_text(root: Browser) -> None:
    page = root.get("stream", name="hostile", place="newest")
    assert "<script>alert" not in page.text
    assert "<i>" not in page.text
    assert "&lt;script&gt;alert" in page.text
    assert "\u202e" not in page.text
    assert "\x1b" not in page.text
    assert "\\u{202e}" in page.text
    assert "ff fe 00" in page.text


def test_a_tail_shows_records_as_they_come(root: Browser, client: SyncClient) -> None:
    with root.events("tail", name="open.trades", pattern="us.*") as events:
        assert next(events).kind == "begun"
        client.publish("open.trades", b"no", subject="eu.1")
        client.publish("open.trades", HOSTILE.encode(), subject="us.1", fields={"k": "v"})
        event = next(events)
        assert event.kind == "records"
        (row,) = event.value["rows"]
        assert (row["subject"], row["fields"]) == ("us.1", {"k": "v"})
        assert "\x1b" not in row["body"]
        assert "\\u{1b}" in row["body"]


def test_a_tail_that_is_refused_says_so(reader: Browser, root: Browser) -> None:
    with reader.events("tail", name="closed.trades") as events:
        event = next(events)
        assert event.kind == "end"
        assert "forbidden" in event.value
    with root.events("tail", name="open.trades", pattern="regex:(") as events:
        assert next(events).kind == "end"


def test_a_tail_passes_over_what_nobody_can_read_and_counts_it(
    root: Browser, client: SyncClient
) -> None:
    with root.events("tail", name="flood") as events:
        assert next(events).kind == "end"  # there is no such stream yet
    client.create_stream("flood")
    with root.events("tail", name="flood") as events:
        first = next(events).value["offset"]
        bulk = 20_000
        client.publish_many("flood", [b"%d" % number for number in range(bulk)])
        shown = skipped = 0
        for event in events:
            if event.kind == "records":
                assert len(event.value["rows"]) <= ROWS_MAX
                shown += len(event.value["rows"])
            skipped += event.value["skipped"]
            if shown + skipped == bulk:
                break
    assert first == 0
    assert 0 < shown < bulk
    assert skipped > 0


@pytest.mark.moderate
def test_rates_are_sent_while_the_page_is_open(root: Browser, client: SyncClient) -> None:
    with root.events("rates") as events:
        for number in itertools.count():
            client.publish("open.trades", b"%d" % number, subject="eu.1")
            event = next(events)
            assert event.kind == "rates"
            if event.value["published"] > 0:
                break


# --- changes ------------------------------------------------------------------------------------


def test_a_record_is_published_with_its_subject_and_fields(
    root: Browser, client: SyncClient
) -> None:
    client.publish("typed.in", b"before")
    fields = {"subject": " a.x ", "body": "two\r\nlines", "fields": "k = v\r\n\r\nb=1=2\r\n"}
    page = root.post("do/publish", {"name": "typed.in", **fields})
    assert "Done: Record published to typed.in at offset 1, " in page.words
    *_, record = client.subscribe("typed.in", start="earliest", until="tail")
    assert (record.subject, record.body) == ("a.x", b"two\nlines")
    assert record.fields == {"k": "v", "b": "1=2"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fields": "no field"}, "a field is a line NAME=VALUE, not “no field”"),
        ({"subject": "a" * 300}, "Not done"),
        ({"name": "not.there"}, "unknown_stream"),
    ],
)
def test_a_record_that_cannot_be_published_is_not(
    root: Browser, client: SyncClient, fields: dict[str, object], words: str
) -> None:
    client.publish("untouched", b"x")
    page = root.post("do/publish", {"name": "untouched", "body": "x", **fields})
    assert words in (page.words if "Not done" in page.words else root.get().words)
    assert client.stream_info("untouched").tail == client.stream_info("untouched").records
    assert "not.there" not in [each.name for each in client.list_streams()]


@pytest.mark.moderate
def test_a_stream_is_made_with_its_settings_and_one_that_is_there_is_left(
    root: Browser, client: SyncClient
) -> None:
    form = {
        "name": "made", "ring_bytes": "16MiB", "max_bytes": "0", "max_age_ms": "7d",
        "max_records": "", "level": "synced", "description": "by hand",
    }  # fmt: skip
    page = root.post("do/create-stream", form)
    assert "Done: Stream made made." in page.words
    assert 'href="/console/stream?name=made"' in page.text
    settings = client.stream_info("made").settings
    assert (settings["ring_bytes"], settings["max_age_ms"]) == (16 << 20, 7 * 86_400_000)
    assert (settings["max_bytes"], settings["description"]) == (0, "by hand")
    again = root.post("do/create-stream", {**form, "max_age_ms": "1d"})
    assert "there is a stream made already: nothing was changed" in again.words
    for wrong, words in (
        ({"name": "other", "ring_bytes": "much"}, "ring_bytes: 'much' is not a size"),
        ({"name": "bad name"}, "bad_name"),
    ):
        assert words in root.post("do/create-stream", {**form, **wrong}).words
    assert "other" not in [each.name for each in client.list_streams()]
    assert client.stream_info("made").settings == settings


@pytest.mark.moderate
def test_settings_of_a_stream_are_changed_where_they_differ(
    root: Browser, client: SyncClient
) -> None:
    client.create_stream("settled", max_records=5, description="old")
    form = {
        "name": "settled", "max_bytes": "64MiB", "max_age_ms": "1h30m", "max_records": "5",
        "level": "stored", "description": "old",
    }  # fmt: skip
    assert 'value="old"' in root.get("stream", name="settled").text
    page = root.post("do/edit-stream", form)
    assert "Done: Settings of settled changed: max_bytes, max_age_ms, level." in page.words
    settings = client.stream_info("settled").settings
    assert (settings["max_bytes"], settings["max_age_ms"]) == (64 << 20, 5_400_000)
    assert (settings["max_records"], settings["level"]) == (5, "stored")
    assert "nothing was changed" in root.post("do/edit-stream", form).words
    for wrong, words in (
        ({"max_bytes": "much"}, "max_bytes: 'much' is not a size"),
        ({"max_age_ms": "1x"}, "is not a duration"),
        ({"max_records": "-1"}, "max_records is a number from 0"),
        ({"level": "gone"}, "bad_setting"),
    ):
        assert words in root.post("do/edit-stream", {**form, **wrong}).words
    assert client.stream_info("settled").settings == settings
