"""The four threads of a broker at work on one ring, each on its own methods."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from pyroaring import BitMap

from malamute_protocol.content import Content
from malamute_protocol.stamp import Stamp
from malamute_py.journal import UNINDEXED_FROM, HeaderIndex, Ring, RingSettings
from tests.journal.rings import Place, S, batch, everything, records
from tests.seeds import slow

MAIL = UNINDEXED_FROM + 254


@pytest.mark.moderate
@pytest.mark.parametrize("bundles", [300, *slow([1500])])
def test_loop_sync_reader_and_housekeeping_share_a_ring(place: Place, bundles: int) -> None:
    ring, _ = place.open(
        RingSettings(
            segment_bytes=S,
            ring_bytes=6 * S,
            index_interval_bytes=1024,
            distinct_headers_max=20,
            index_memory_bytes=20_000,
            open_files_max=2,
        )
    )
    done = threading.Event()
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                while not done.is_set():
                    work()
            except BaseException as error:  # noqa: BLE001  told by the test's own thread
                errors.append(error)
                done.set()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def sync() -> None:
        before = ring.synced_lsn
        assert before <= ring.sync() <= ring.end_lsn

    def keep_house() -> None:
        if not ring.prepare_step(16_384):
            done.wait(0.001)

    def read() -> None:
        for stream in (1, 2, MAIL):
            read_once(ring, stream)
        pick(ring)

    threads = [guarded(sync), guarded(keep_house), guarded(read)]
    try:
        for number in range(bundles):
            if done.is_set():
                break
            body = b"%d:" % number + bytes(number % 700)
            subject = f"s.{number % 50}"
            ring.append(
                [
                    batch(ring, 1, [body], subject=subject),
                    batch(ring, 2, [body, body], subject=subject),
                    batch(ring, MAIL, [body, body]),
                ]
            )
    finally:
        done.set()
        for thread in threads:
            thread.join()
    for error in errors:
        raise error

    assert ring.next_offset(1) == bundles
    kept = everything(ring, 1)
    assert [offset for offset, _ in kept] == list(range(ring.first_offset(1), bundles))
    ring.sync()
    ring, recovery = place.open()
    assert recovery.damages == ()
    assert everything(ring, 1) == kept


def read_once(ring: Ring, stream: int) -> None:
    position, end = ring.first_offset(stream), ring.next_offset(stream)
    start = position
    while position < end:
        history = ring.read(stream, position, end, 20_000)
        told = {o for gap in history.gaps for o in range(gap.from_offset, gap.to_offset)}
        assert {gap.code for gap in history.gaps} <= {"retention"}, history.gaps
        got = records(history)
        for offset, body in got:
            number = offset if stream == 1 else offset // 2
            assert body.startswith(b"%d:" % number), (stream, offset)
        told |= {offset for offset, _ in got}
        assert told >= set(range(position, history.next))
        position = history.next
    if start < end:
        history = ring.read(stream, start, end, 1 << 20, one_subject)
        told = {o for gap in history.gaps for o in range(gap.from_offset, gap.to_offset)}
        told |= {offset for offset, _ in records(history)}
        rows = 1 if stream == 1 else 2
        assert told >= {o for o in range(start, history.next) if o // rows % 50 == 7}
        for _, offset in ring.last_per_subject(stream):
            assert offset < ring.next_offset(stream)


def pick(ring: Ring) -> None:
    first, end = ring.first_offset(MAIL), ring.next_offset(MAIL)
    offsets = [first, *range(first + 1, end, 97), end - 1, end] if end > first else []
    found = ring.read_batches(MAIL, offsets)
    for offset, data in zip(offsets, found, strict=True):
        if data is None:
            # Not there yet, or retired meanwhile.
            assert offset >= end or ring.first_offset(MAIL) > offset
        else:
            stamp = Stamp.unpack(data)
            assert stamp.base_offset <= offset < stamp.next_offset
            blob, _, _ = Content(data[stamp.stamp_bytes :]).bodies()
            assert bytes(blob[:20]).startswith(b"%d:" % (offset // 2))


def one_subject(index: HeaderIndex) -> BitMap:
    return index.subject("s.7")
