"""Streams without header index: found by offset and time, at no cost for their headers."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyroaring import BitMap

from malamute_py.journal import (
    NO_KEYS,
    UNINDEXED_FROM,
    Append,
    FileStorage,
    HeaderIndex,
    Journal,
    Ring,
    RingSettings,
)
from malamute_py.journal.inspect import verify
from malamute_py.journal.layout import index_name
from tests.journal.rings import Place, S, batch, content_of, everything, put, records
from tests.journal.test_retention import tidy

MAIL = 4_294_967_294
SETTINGS = RingSettings(segment_bytes=S, ring_bytes=16 * S, index_interval_bytes=4096)


def mail(ring: Ring, body: bytes, base: int | None = None, time_ms: int = 1000) -> Append:
    content, crc = content_of([body], subject=f"unique.{body[:8]!r}", client_time_ms=5)
    offset = ring.next_offset(MAIL) if base is None else base
    return Append(MAIL, offset, 1, time_ms, content, crc, NO_KEYS)


def send(ring: Ring, count: int, size: int = 200) -> None:
    """Mail after mail, a batch of another stream after each bundle."""
    done = 0
    while done < count:
        bundle = min(1 + done % 5, count - done)
        base = ring.next_offset(MAIL)
        ring.append(
            [mail(ring, b"%d:" % (base + n) + bytes(size), base + n) for n in range(bundle)]
            + [batch(ring, 1, [b"between"], subject="indexed")]
        )
        done += bundle


def bodies(ring: Ring) -> list[bytes]:
    return [body.split(b":")[0] for _, body in everything(ring, MAIL)]


@pytest.mark.moderate
def test_mail_among_other_batches_is_read_whole_and_in_order(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    send(ring, 500)
    assert bodies(ring) == [b"%d" % n for n in range(500)]
    assert ring.read(MAIL, 0, 500, 1 << 30).gaps == ()
    middle = ring.read(MAIL, 123, 130, 1 << 30)
    assert [offset for offset, _ in records(middle)] == list(range(123, 130))
    assert len(everything(ring, 1)) == ring.next_offset(1)


@pytest.mark.moderate
def test_it_has_few_entries_and_no_headers(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    send(ring, 500)
    for segment in ring._space.segments:
        index = ring._files.index(segment)
        span = segment.spans[MAIL]
        rows = index.entries(MAIL, span.first, span.next).rows
        # Batches of others lie in between, and still an entry covers 4 KiB of the file.
        assert len(rows) <= S // 4096 + S // 12_000
        assert sum(rows["batches"]) == span.next - span.first
        assert index.headers(MAIL).subjects() == ()
        assert index.headers(1).subjects() == (
            (("indexed",), BitMap(range(index.headers(1).everything().max() + 1))),
        )


@pytest.mark.parametrize("keys", [None, NO_KEYS, (("a",), ())])
def test_whatever_keys_are_given_nothing_is_indexed(place: Place, keys: object) -> None:
    ring, _ = place.open(SETTINGS)
    content, crc = content_of([b"x"])
    ring.append([Append(UNINDEXED_FROM, 0, 1, 1000, content, crc, keys)])
    (segment,) = ring._space.segments
    assert len(ring._files.index(segment).headers(UNINDEXED_FROM)) == 0
    assert everything(ring, UNINDEXED_FROM) == [(0, b"x")]


def test_no_keys_on_an_indexed_stream_counts_as_none_given(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    content, crc = content_of([b"x"], subject="told")
    ring.append([Append(UNINDEXED_FROM - 1, 0, 1, 1000, content, crc, NO_KEYS)])
    (segment,) = ring._space.segments
    headers = ring._files.index(segment).headers(UNINDEXED_FROM - 1)
    assert [keys for keys, _ in headers.subjects()] == [("told",)]


@pytest.mark.moderate
def test_recovery_and_a_rebuilt_index_agree_with_what_was_written(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    send(ring, 500)
    tables = {}
    for segment in ring._space.segments:
        assert segment.live is not None
        tables[segment.number] = segment.live.table()
    facts = ring.facts(MAIL)
    ring.sync()
    if place.storage.persistent:
        tidy(ring)
        assert ring._space.segments[0].live is None
    ring, recovery = place.open(SETTINGS)
    assert recovery.damages == ()
    assert ring.facts(MAIL).next == facts.next
    assert bodies(ring) == [b"%d" % n for n in range(500)]
    for segment in ring._space.segments:
        assert ring._files.index(segment).table == tables[segment.number] or (
            segment.live is not None and segment.live.table() == tables[segment.number]
        )
        # Thrown away and read from the batches.
        assert ring._rebuild_index(segment).table() == tables[segment.number]


@pytest.mark.moderate
def test_a_lost_index_file_is_made_anew(tmp_path: Path) -> None:
    ring, _ = Ring.open(FileStorage(tmp_path), settings=SETTINGS, epoch=1)
    send(ring, 500)
    ring.sync()
    tidy(ring)
    (tmp_path / index_name(1)).unlink()
    ring._files.forget(1)
    assert bodies(ring) == [b"%d" % n for n in range(500)]


@pytest.mark.moderate
def test_the_tools_find_nothing_wrong_with_it(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    settings = RingSettings(segment_bytes=S, ring_bytes=16 * S)
    ring, _ = journal.ring("main", settings)
    send(ring, 500)
    ring.sync()
    tidy(ring)
    journal.close()
    assert [finding.kind for finding in verify(tmp_path) if finding.kind != "progress"] == ["ok"]


def test_damage_among_mail_costs_what_it_hit(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    put(ring, 1, b"begin")
    own = ring.append([mail(ring, b"0:")])
    foreign = put(ring, 1, b"between")
    hit = ring.append([mail(ring, b"1:")])
    ring.append([mail(ring, b"2:")])
    last = put(ring, 1, b"last")
    ring.append([mail(ring, b"3:")])
    assert own.lsn < foreign.lsn
    place.flip(foreign.lsn + 30)
    place.flip(hit.lsn + 30)
    place.flip(last.lsn + 30)
    history = ring.read(MAIL, 0, 4, 1 << 30)
    assert [offset for offset, _ in records(history)] == [0, 2, 3]
    assert [(gap.from_offset, gap.to_offset, gap.code) for gap in history.gaps] == [
        (1, 2, "damaged")
    ]


def test_it_is_found_by_append_time_and_a_search_excludes_nothing(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(40):
        ring.append([mail(ring, b"%d:" % number + bytes(1000), time_ms=1000 + number)])
        put(ring, 1, b"between", time_ms=1000 + number)
    assert ring.closest_offset(MAIL, 1017) == 17
    assert ring.remove_before(MAIL, time_ms=1005) == 5

    def nothing(index: HeaderIndex) -> BitMap:
        return BitMap()

    found = ring.read(MAIL, 0, 40, 1 << 30, nothing)
    assert [offset for offset, _ in records(found)] == list(range(5, 40))
    latest = ring.last_per_subject(MAIL)
    assert [offset for _, offset in latest] == list(range(5, 40))
    assert ring.plan(MAIL, 0, 40, nothing).bytes > 0
    assert ring.limit_bytes(MAIL, 10_000) > 5


def test_its_segments_never_count_as_expired(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(12):
        content, crc = content_of([bytes(20_000)], expires_at_ms=5000)
        ring.append([Append(MAIL, number, 1, 1000, content, crc, NO_KEYS)])
    ring.sync()
    tidy(ring, now_ms=1 << 60)
    assert ring.first_offset(MAIL) == 0
