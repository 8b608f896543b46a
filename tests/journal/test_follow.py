"""Following a ring by position: everything in the range once, or an error that names the loss."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.content import Content
from malamute_protocol.stamp import (
    CHANGE,
    DATA,
    EPOCH_START,
    LAST_OF_BUNDLE,
    SNAPSHOT,
    STAMP_BYTES,
    Stamp,
)
from malamute_py.journal import (
    FileStorage,
    Follower,
    FollowLost,
    JournalCorrupt,
    JournalFailed,
    JournalFull,
    MemoryStorage,
    Ring,
    RingSettings,
)
from malamute_py.journal.layout import control_bodies, control_content, segment_name
from malamute_py.journal.types import Append
from tests.journal.rings import HEAD, SMALL, Faulty, Place, S, batch, put
from tests.journal.test_retention import FOUR, fill, tidy

Seen = list[tuple[int, int, int, bytes]]
"""(LSN, stream, base offset, content)."""


def change(ring: Ring, *records: bytes, base: int = 0) -> Append:
    content, crc = control_content(records)
    return Append(0, base, len(records), 1000, content, crc, None, CHANGE)


def is_data(stamp: Stamp) -> bool:
    return stamp.control_kind == DATA


def is_change(stamp: Stamp) -> bool:
    return stamp.control_kind == CHANGE


def follow(
    follower: Follower | Ring, begin: int, end: int, wanted: Callable[[Stamp], bool] | None = None
) -> Seen:
    got, lost = follow_on(follower, begin, end, wanted)
    if lost is not None:
        raise lost
    return got


def follow_on(
    follower: Follower | Ring,
    begin: int,
    end: int,
    wanted: Callable[[Stamp], bool] | None = None,
    beside: Callable[[Seen], None] = lambda seen: None,
) -> tuple[Seen, FollowLost | None]:
    """(what was given, what stopped it); `beside` is called amid the read, after each batch."""
    read = follower.follow if isinstance(follower, Ring) else follower.read
    seen: Seen = []
    try:
        for stamp, content in read(begin, end, wanted):
            seen.append((stamp.lsn, stamp.stream, stamp.base_offset, bytes(content)))
            beside(seen)
    except FollowLost as lost:
        return seen, lost
    return seen, None


def loss(
    follower: Follower | Ring, begin: int, end: int, wanted: Callable[[Stamp], bool] | None = None
) -> FollowLost:
    _, lost = follow_on(follower, begin, end, wanted)
    assert lost is not None
    return lost


def written(ring: Ring, bundles: int, size: int = 3000) -> tuple[Seen, list[int]]:
    """Bundles of two batches and a change; returns the data and where the bundles end."""
    seen: Seen = []
    ends = []
    for number in range(bundles):
        body = b"%d:" % number + bytes(number * 37 % size)
        batches = [
            batch(ring, 1, [body]),
            batch(ring, 2, [body, b"second"]),
            change(ring, b"change", base=number),
        ]
        answer = ring.append(batches)
        for stamp, given in zip(answer.stamps, batches, strict=True):
            unpacked = Stamp.unpack(stamp)
            seen.append((unpacked.lsn, given.stream, given.base_offset, bytes(given.content)))
        ends.append(answer.end_lsn)
    return seen, ends


def not_own(stamp: Stamp) -> bool:
    return stamp.control_kind not in (SNAPSHOT, EPOCH_START)


@pytest.mark.parametrize("piece_bytes", [1, 700, 5000, 1 << 20])
def test_everything_is_followed_once_and_in_order_wherever_it_is_cut(
    place: Place, piece_bytes: int
) -> None:
    ring, _ = place.open()
    seen, ends = written(ring, 120)
    assert ring.end_lsn > 5 * S
    follower = Follower(place.storage, piece_bytes=piece_bytes)
    assert follow(follower, 0, ring.end_lsn, not_own) == seen
    assert follower.position == ring.end_lsn
    begin, got = 0, []
    for end in [*ends[::7], ring.end_lsn]:
        got += follow(follower, begin, end, not_own)
        assert follower.position == end
        begin = end
    assert got == seen
    assert follow(ring, 0, ring.end_lsn, not_own) == seen


def test_without_a_wish_the_journals_own_batches_come_too_but_no_padding(place: Place) -> None:
    ring, _ = place.open(snapshot=lambda: [b"state"])
    seen, _ = written(ring, 60)
    everything = follow(ring, 0, ring.end_lsn)
    assert [one for one in everything if one in seen] == seen
    assert len(everything) == len(seen) + 1 + len(ring._space.segments)
    assert follow(ring, ring.end_lsn, ring.end_lsn + 5 * S) == []


def test_only_what_is_wanted_is_given_and_the_rest_is_passed_over(place: Place) -> None:
    ring, _ = place.open()
    seen, ends = written(ring, 60)
    changes = [one for one in seen if one[1] == 0]
    assert follow(ring, 0, ring.end_lsn, is_change) == changes
    assert follow(ring, ends[40], ring.end_lsn, is_change) == changes[41:]
    (record,) = control_bodies(changes[0][3])
    assert record == b"change"
    follower = Follower(place.storage)
    assert follow(follower, 0, ring.end_lsn, lambda stamp: False) == []
    assert follower.position == ring.end_lsn


def test_a_batch_that_ends_beyond_the_range_is_not_given_and_is_where_it_goes_on(
    place: Place,
) -> None:
    ring, _ = place.open()
    first = put(ring, 1, b"first")
    second = put(ring, 1, b"second")
    follower = Follower(place.storage)
    for end in range(second.lsn, second.end_lsn):
        got = follow(follower, 0, end, is_data)
        assert [offset for _, _, offset, _ in got] == [0]
        assert follower.position == first.end_lsn
        got = follow(follower, follower.position, second.end_lsn)
        assert [offset for _, _, offset, _ in got] == [1]


def test_how_far_it_came_is_known_at_each_batch(place: Place) -> None:
    ring, _ = place.open()
    _, ends = written(ring, 40)
    follower = Follower(place.storage)
    whole = []
    for stamp, _ in follower.read(0, ring.end_lsn):
        assert follower.position == stamp.lsn + stamp.size
        if stamp.flags & LAST_OF_BUNDLE:
            whole.append(follower.position)
    assert [end for end in whole if end in ends] == whole


def test_nothing_is_written_and_nothing_locked(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    ring, _ = Ring.open(storage, settings=SMALL, epoch=1)
    seen, _ = written(ring, 60)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    reading = Faulty(FileStorage(tmp_path, read_only=True))
    assert follow(Follower(reading), 0, ring.end_lsn, not_own) == seen
    assert {call for call, _ in reading.calls} == {"read"}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_a_directory_without_a_ring_is_refused_by_name() -> None:
    with pytest.raises(JournalCorrupt, match="no ring"):
        Follower(MemoryStorage())


# --- what is not there ------------------------------------------------------------------


def test_a_range_that_was_retired_is_named_with_where_the_ring_goes_on(place: Place) -> None:
    ring, _ = place.open(FOUR)
    fill(ring, 30)
    lost = loss(ring, 0, ring.end_lsn)
    assert (lost.from_lsn, lost.to_lsn, lost.code) == (0, ring.start_lsn, "retention")
    rest = follow(ring, lost.to_lsn, ring.end_lsn, is_data)
    assert [offset for _, _, offset, _ in rest] == list(range(ring.first_offset(1), 30))
    lost = loss(Follower(place.storage), 8, ring.start_lsn)
    assert (lost.from_lsn, lost.to_lsn) == (8, ring.start_lsn)


@pytest.mark.parametrize("piece_bytes", [1, 30_000, 1 << 20])
@pytest.mark.parametrize("lap_after", range(1, 9))
def test_a_segment_used_again_under_the_read_never_gives_a_wrong_batch(
    place: Place, piece_bytes: int, lap_after: int
) -> None:
    ring, _ = place.open(FOUR)
    numbered(ring, 9)
    end = ring.end_lsn
    follower = Follower(place.storage, piece_bytes=piece_bytes)

    def lap(seen: Seen) -> None:
        if len(seen) == lap_after:
            numbered(ring, 12)

    got, lost = follow_on(follower, 0, end, is_data, lap)
    assert [offset for _, _, offset, _ in got] == list(range(len(got)))
    for _, _, offset, content in got:
        blob, bounds, _ = Content(content).bodies()
        assert bytes(blob[: int(bounds[1])]).startswith(b"%d:" % offset)
    if piece_bytes == 1:
        assert len(got) == lap_after
    if len(got) < 9:
        assert lost is not None
        assert (lost.from_lsn, lost.to_lsn) == (follower.position, end)
        assert lost.code == "retention"
    else:
        assert lost is None  # it had read the last segment before that went


def numbered(ring: Ring, count: int) -> None:
    start = ring.next_offset(1)
    for number in range(start, start + count):
        put(ring, 1, b"%d:" % number + bytes(20_000))


def test_damage_is_named_to_the_next_batch_and_what_lies_before_it_was_given(
    place: Place,
) -> None:
    ring, _ = place.open()
    answers = [put(ring, 1, b"%d" % number + bytes(300)) for number in range(5)]
    bad = answers[2]
    place.flip(bad.lsn + 40)
    follower = Follower(place.storage)
    got, lost = follow_on(follower, 0, ring.end_lsn, is_data)
    assert [offset for _, _, offset, _ in got] == [0, 1]
    assert lost is not None
    assert (lost.from_lsn, lost.to_lsn, lost.code) == (bad.lsn, bad.end_lsn, "damaged")
    assert follower.position == bad.lsn
    rest = follow(follower, lost.to_lsn, ring.end_lsn)
    assert [offset for _, _, offset, _ in rest] == [3, 4]


def test_a_damaged_content_is_met_where_it_is_wanted_and_only_there(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"good")
    bad = put(ring, 2, b"bad" + bytes(500))
    put(ring, 1, b"good")
    place.flip(bad.end_lsn - 100)
    first = follow(ring, 0, ring.end_lsn, lambda stamp: is_data(stamp) and stamp.stream == 1)
    assert [offset for _, _, offset, _ in first] == [0, 1]
    lost = loss(ring, 0, ring.end_lsn)
    assert (lost.from_lsn, lost.to_lsn) == (bad.lsn, bad.end_lsn)


def test_damage_up_to_a_segments_end_goes_on_in_the_next_one(place: Place) -> None:
    ring, _ = place.open()
    seen, _ = written(ring, 60)
    inside = [one for one in seen if S + S // 2 < one[0] < 2 * S]
    place.zero(inside[0][0], 2 * S - inside[0][0])
    lost = loss(ring, 0, ring.end_lsn)
    assert (lost.from_lsn, lost.to_lsn) == (inside[0][0], 2 * S)
    rest = follow(ring, lost.to_lsn, ring.end_lsn, not_own)
    assert rest == [one for one in seen if one[0] > 2 * S]
    lost = loss(ring, inside[0][0], inside[0][0] + 2 * STAMP_BYTES)
    assert lost.to_lsn == inside[0][0] + 2 * STAMP_BYTES


def test_a_page_that_cannot_be_read_costs_the_batches_on_it_and_no_others(place: Place) -> None:
    ring, _ = place.open()
    answers = [put(ring, 1, b"body" * 750) for _ in range(8)]
    bad = answers[3].lsn // 4096 * 4096 + 4096

    class BadPage(Faulty):
        def read(self, file: Any, position: int, size: int) -> bytes:
            if position < bad + 4096 and position + size > bad:
                raise OSError(errno.EIO, "a bad sector")
            return self.inner.read(file, position, size)

    follower = Follower(BadPage(place.storage))
    begin, got = 0, []
    losses = []
    while begin < ring.end_lsn:
        seen, lost = follow_on(follower, begin, ring.end_lsn, is_data)
        got += [offset for _, _, offset, _ in seen]
        if lost is None:
            break
        assert lost.code == "damaged"
        losses.append((lost.from_lsn, lost.to_lsn))
        begin = lost.to_lsn
    touched = [n for n, a in enumerate(answers) if a.lsn < bad + 4096 and a.end_lsn > bad]
    assert sorted(set(range(8)) - set(got)) == touched
    assert losses[0][0] == answers[touched[0]].lsn
    assert losses[-1][1] == answers[touched[-1]].end_lsn


def test_damage_after_a_fault_that_was_gone_at_the_second_look_ends_at_the_next_batch(
    place: Place,
) -> None:
    ring, _ = place.open()
    large = put(ring, 1, b"a" * 9000)
    small = [put(ring, 1, b"b") for _ in range(4)]
    ring.sync()
    place.storage.write(place.storage.open(segment_name(0)), small[0].lsn, [b"\xff" * 16])
    begin = large.end_lsn - Stamp.unpack(large.stamps[0]).size

    class Once(Faulty):
        def read(self, file: Any, position: int, size: int) -> bytes:
            data = bytearray(self.inner.read(file, position, size))
            if position == begin and not self.calls:
                data[1000] ^= 0xFF
                self.calls.append(("read", position))
            return bytes(data)

    seen, lost = follow_on(Follower(Once(place.storage)), begin, ring.end_lsn, is_data)
    assert [offset for _, _, offset, _ in seen] == [0]
    assert lost is not None
    assert (lost.from_lsn, lost.to_lsn) == (small[0].lsn, small[1].lsn)


def test_a_file_put_in_the_place_of_another_is_read_by_the_next_call(tmp_path: Path) -> None:
    storage, marks = Faulty(FileStorage(tmp_path)), MemoryStorage()
    ring, _ = Ring.open(storage, settings=SMALL, epoch=1, marks=marks)
    kept = put(ring, 1, b"kept")
    ring.sync()
    follower = Follower(FileStorage(tmp_path, read_only=True))
    assert len(follow(follower, 0, kept.end_lsn, is_data)) == 1
    put(ring, 1, b"unproven")
    storage.fail["sync"] = OSError(errno.EIO, "broken")
    with pytest.raises(JournalFailed, match="sealed"):
        ring.sync()
    storage.fail.clear()
    ring, recovery = Ring.open(storage, settings=SMALL, epoch=2, marks=marks)
    assert recovery.rewritten
    answer = put(ring, 1, b"new")
    ring.sync()
    got = follow(follower, kept.end_lsn, answer.end_lsn, is_data)
    assert [offset for _, _, offset, _ in got] == [1, 2]


# --- beside the writer --------------------------------------------------------------------


def test_a_recovered_ring_gives_the_changes_since_a_checkpoint(place: Place) -> None:
    ring, _ = place.open()
    seen, ends = written(ring, 80)
    ring.sync()
    ring, recovery = place.open(held=True)
    ring.hold(ends[30])
    assert follow(ring, ends[30], recovery.end_lsn, is_change) == [
        one for one in seen if one[1] == 0 and one[0] >= ends[30]
    ]


@pytest.mark.slow
def test_a_held_ring_is_followed_by_a_thread_while_it_laps(place: Place) -> None:
    """The writer waits for the hold alone; the follower reads only what is synced."""
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=4 * S))
    ring.hold(0)
    bundles = 400
    got: list[bytes] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            follower = Follower(place.storage, piece_bytes=10_000)
            position = 0
            while len(got) < bundles and not done.is_set():
                end = ring.synced_lsn
                for _, content in follower.read(position, end, is_change):
                    got.extend(control_bodies(content))
                assert follower.position == end
                position = end
                ring.hold(position)
                if position == ring.end_lsn:
                    done.wait(0.001)
        except BaseException as error:  # noqa: BLE001  told by the test's own thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    refused = 0
    try:
        for number in range(bundles):
            batches = [batch(ring, 1, [bytes(2000)]), change(ring, b"%d" % number, base=number)]
            for _ in range(30_000):
                try:
                    ring.append(batches)
                    break
                except JournalFull:
                    refused += 1
                    if not thread.is_alive():
                        break
                    done.wait(0.001)
            ring.sync()
            ring.prepare_step()
        thread.join(30)
    finally:
        done.set()
        thread.join()
    assert errors == []
    assert got == [b"%d" % number for number in range(bundles)]
    assert ring.start_lsn > 4 * S


_CHILD = """
import sys
from malamute_protocol.stamp import CHANGE
from malamute_py.journal import FileStorage, Follower
from malamute_py.journal.layout import control_bodies
follower = Follower(FileStorage(sys.argv[1], read_only=True))
for line in sys.stdin:
    records = []
    for stamp, content in follower.read(
        follower.position, int(line), lambda stamp: stamp.control_kind == CHANGE
    ):
        records += control_bodies(content)
    print(follower.position, b",".join(records).decode(), flush=True)
"""


@pytest.mark.moderate
def test_another_process_follows_what_it_is_told_is_synced(tmp_path: Path) -> None:
    ring, _ = Ring.open(FileStorage(tmp_path), settings=FOUR, epoch=1)
    ring.hold(0)
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        bound = threading.Timer(60, child.kill)
        bound.start()
        answers = iter(child.stdout)
        for lap in range(20):
            numbers = range(lap * 5, lap * 5 + 5)
            for number in numbers:
                ring.append(
                    [batch(ring, 1, [bytes(9000)]), change(ring, b"%d" % number, base=number)]
                )
            synced = ring.sync()
            child.stdin.write(f"{synced}\n")
            position, records = next(answers).split()
            assert int(position) == synced
            assert records == ",".join(map(str, numbers))
            ring.hold(synced)
            tidy(ring)
        child.stdin.close()
        child.wait()
        bound.cancel()
    assert ring.start_lsn > 0
    assert child.returncode == 0
    assert segment_name(0) not in FileStorage(tmp_path).names()


def test_following_is_lazy_and_reads_in_pieces(place: Place) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=SMALL, epoch=1)
    written(ring, 60)
    follower = Follower(storage, piece_bytes=16_384)
    storage.calls.clear()
    batches: Iterator[Any] = follower.read(0, ring.end_lsn, is_data)
    next(batches)
    assert [what[1:] for call, what in storage.calls if call == "read"] == [(HEAD, 16_384)]
    for _ in batches:
        pass
    reads = [what for call, what in storage.calls if call == "read"]
    assert len(reads) < 2.2 * ring.end_lsn / 16_384
