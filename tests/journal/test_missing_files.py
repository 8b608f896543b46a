"""Files that are not there: named, and no position or offset is given a second time.

The rows M1 to M7, F10 to F12 of the decision table in FORMAT.md, section 7.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import pytest

from malamute_py.journal import FileStorage, JournalCorrupt, Recovery, Ring, inspect
from malamute_py.journal.directory import EPOCH_FILE, IDENTITY_FILE, MANIFESTS, PLACE_FILE, Journal
from malamute_py.journal.layout import CLOSED_FILE, RING_FILE, index_name, segment_name
from malamute_py.journal.manifest import SLOT_BYTES, Manifest
from malamute_py.journal.storage import read_file
from tests.journal.rings import HEAD, SMALL, S, everything, put, read_all, records


class Directory:
    """A data directory of one ring, opened again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ring_path = path / "rings" / "main"
        self._entropy = count(1)

    def open(self) -> tuple[Ring, Recovery]:
        """Open the directory as after a kill: what was open before is forgotten."""
        self.journal = Journal.open(_Unlocked(self.path), entropy=self._random)
        return self.journal.ring("main", SMALL)

    def _random(self, size: int) -> bytes:
        return next(self._entropy).to_bytes(size, "little")


class _Unlocked(FileStorage):
    """Files without a lock, as a killed process leaves them."""

    def lock(self, name: str) -> _Held:
        return _Held()


class _Held:
    def release(self) -> None:
        pass


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Directory]:
    return Directory(tmp_path / "data")  # type: ignore[return-value]


def fill(ring: Ring, segments: int, stream: int = 1, size: int = 3000) -> None:
    target = ring.end_lsn + segments * S
    while ring.end_lsn < target:
        put(ring, stream, b"x" * size)


def prepare(ring: Ring) -> None:
    while ring.prepare_step():
        pass


def lost(ring: Ring, stream: int) -> list[tuple[int, int]]:
    """The offsets that are named as damaged; every other one is served."""
    history = read_all(ring, stream)
    assert {gap.code for gap in history.gaps} <= {"damaged"}
    named = [(gap.from_offset, gap.to_offset) for gap in history.gaps]
    have = {offset for offset, _ in records(history)}
    ranges = [*named, *((offset, offset + 1) for offset in have)]
    ranges.sort()
    assert ranges[0][0] == ring.first_offset(stream)
    assert ranges[-1][1] == ring.next_offset(stream)
    assert all(one[1] == two[0] for one, two in pairwise(ranges))
    return named


@pytest.mark.moderate
@pytest.mark.parametrize("closed", [True, False])
def test_m1_the_oldest_segment_is_missed(data: Directory, closed: bool) -> None:
    """The journal once took a missing segment for retention: a reader at `earliest` got no gap."""
    ring, _ = data.open()
    fill(ring, 3)
    ring.sync()
    kept = everything(ring, 1)
    if closed:
        data.journal.close()
    (data.ring_path / segment_name(0)).unlink()
    ring, recovery = data.open()
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(0, S)]
    assert "missing" in recovery.damages[0].reason
    assert ring.first_offset(1) == 0
    ((low, high),) = lost(ring, 1)
    assert (low, everything(ring, 1)) == (0, kept[high:])
    ring, recovery = data.open()  # and again, until the ring has gone round
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(0, S)]
    for _ in range(9):
        fill(ring, 1)
        ring.sync()
        prepare(ring)
    ring, recovery = data.open()
    assert recovery.damages == ()
    assert read_all(ring, 1).gaps == ()


@pytest.mark.moderate
def test_what_was_retired_is_not_missed(data: Directory) -> None:
    ring, _ = data.open()
    for _ in range(12):
        fill(ring, 1)
        ring.sync()
        prepare(ring)
        ring, recovery = data.open()
        assert recovery.damages == ()
        assert recovery.skipped == {}
    assert ring.first_offset(1) > 0
    ring.remove_before(1, offset=ring.next_offset(1) - 1)
    prepare(ring)
    ring, recovery = data.open()
    assert recovery.damages == ()


@pytest.mark.moderate
@pytest.mark.parametrize("closed", [True, False])
def test_m2_the_newest_segments_are_missed_and_no_offset_comes_again(
    data: Directory, closed: bool
) -> None:
    """Offsets began again where the last segment that was there had ended."""
    ring, _ = data.open()
    fill(ring, 3)
    prepare(ring)
    for _ in range(3):
        fill(ring, 1)
        prepare(ring)
    ring.sync()
    following, end = ring.next_offset(1), ring.end_lsn
    kept = everything(ring, 1)
    put(ring, 2, b"in the newest segment alone")
    ring.sync()
    newest = ring.end_lsn // S
    if closed:
        data.journal.close()
    else:
        (data.ring_path / CLOSED_FILE).unlink()
    for path in data.ring_path.glob("*.seg"):
        if int(path.stem) >= newest - 1:
            path.unlink()
    ring, recovery = data.open()
    assert [d.from_lsn for d in recovery.damages] == [(newest - 1) * S]
    assert ring.end_lsn >= end
    assert ring.next_offset(1) >= following
    if closed:
        assert ring.next_offset(1) == following
        assert recovery.skipped == {}
        assert ring.next_offset(2) == 1
    ((low, high),) = lost(ring, 1)
    assert (everything(ring, 1), high) == (kept[:low], ring.next_offset(1))
    put(ring, 1, b"goes on")
    put(ring, 2, b"goes on")
    assert everything(ring, 1)[-1] == (high, b"goes on")
    bounds = ring.next_offset(1), ring.next_offset(2)
    assert bounds[1] >= 2 or not closed
    ring, recovery = data.open()
    assert (ring.next_offset(1), ring.next_offset(2)) == bounds, "it leaves out no more"
    assert everything(ring, 1)[-1] == (high, b"goes on")
    assert ring.facts(1).epochs[-1].first_offset == high


def test_a_spare_that_was_never_used_is_not_missed(data: Directory) -> None:
    ring, _ = data.open()
    put(ring, 1, b"a")
    prepare(ring)
    ring.sync()
    (data.ring_path / segment_name(1)).unlink()
    ring, recovery = data.open()
    assert recovery.damages == ()
    assert everything(ring, 1) == [(0, b"a")]
    fill(ring, 1)
    assert lost(ring, 1) == []


@pytest.mark.moderate
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("what", ["the directory", "its segments", "all but the ring file"])
def test_m3_a_ring_that_is_gone_goes_on_behind_all_it_had(
    data: Directory, what: str, closed: bool
) -> None:
    """Offsets of a ring that was gone once began with 0 again, in silence."""
    ring, _ = data.open()
    fill(ring, 12)
    ring.sync()
    uuid, following, end = ring.uuid, ring.next_offset(1), ring.end_lsn
    first = ring.first_offset(1)
    assert first > 0
    if closed:
        data.journal.close()
    if what == "the directory":
        shutil.rmtree(data.ring_path)
    for path in data.ring_path.glob("*"):
        if what == "its segments":
            if path.suffix == ".seg":
                path.unlink()
        elif path.name != RING_FILE:
            path.unlink()
    assert "main" in Journal.open(_Unlocked(data.path)).names()
    ring, recovery = data.open()
    assert recovery.damages
    assert all("missing" in each.reason or "longer" in each.reason for each in recovery.damages)
    assert [each.file for each in recovery.restored] == (
        [RING_FILE] if what == "the directory" else []
    )
    assert recovery.unreadable_state
    assert ring.uuid == uuid
    assert ring.end_lsn >= end
    assert (ring.next_offset(1) == following) if closed else (ring.next_offset(1) > following)
    assert ring.first_offset(1) <= first
    assert lost(ring, 1) == [(ring.first_offset(1), ring.next_offset(1))]
    base = ring.next_offset(1)
    put(ring, 1, b"goes on")
    assert everything(ring, 1) == [(base, b"goes on")]
    ring.sync()
    ring, _ = data.open()
    assert everything(ring, 1) == [(base, b"goes on")]
    assert ring.next_offset(1) == base + 1


@pytest.mark.moderate
@pytest.mark.parametrize("fate", ["missing", "empty", "damaged", "a slot torn", "of another ring"])
def test_m4_a_ring_does_without_its_manifest(data: Directory, fate: str) -> None:
    ring, _ = data.open()
    fill(ring, 2)
    ring.sync()
    kept = everything(ring, 1)
    path = data.path / MANIFESTS / "main"
    if fate == "missing":
        path.unlink()
    elif fate == "empty":
        path.write_bytes(b"")
    elif fate == "damaged":
        path.write_bytes(b"\xff" * 2 * SLOT_BYTES)
    elif fate == "a slot torn":
        whole = bytearray(path.read_bytes())
        whole[SLOT_BYTES + 20] ^= 1
        path.write_bytes(whole)
    else:
        data.journal.ring("other", SMALL)
        shutil.copyfile(data.path / MANIFESTS / "other", path)
        data.journal.forget("other")
        shutil.rmtree(data.path / "rings" / "other")
    ring, recovery = data.open()
    assert recovery.damages == ()
    assert everything(ring, 1) == kept
    assert path.stat().st_size == 2 * SLOT_BYTES
    fill(ring, 1)
    assert Manifest(FileStorage(data.path / MANIFESTS), "main").expected is not None
    assert data.open()[1].damages == ()


@pytest.mark.slow
def test_m5_a_kill_at_any_write_is_no_false_alarm(data: Directory) -> None:
    """Every state of the directory that a kill can leave, with all that the ring's life has."""

    class Stop(Exception):
        pass

    class Killed(_Unlocked):
        left = 0

        def child(self, name: str) -> Killed:
            return Killed(super().child(name)._directory)

        def _count(self) -> None:
            Killed.left -= 1
            if Killed.left < 0:
                raise Stop

    for method in ("create", "write", "rename", "remove", "sync", "sync_directory"):

        def counted(self: Killed, *args: object, _method: str = method) -> object:
            self._count()
            return getattr(FileStorage, _method)(self, *args)

        setattr(Killed, method, counted)

    for at in count():
        shutil.rmtree(data.path, ignore_errors=True)
        Killed.left = 1 << 40
        ring, _ = Journal.open(Killed(data.path)).ring("main", SMALL)
        fill(ring, 7)
        ring.sync()
        prepare(ring)
        Killed.left = at
        try:
            fill(ring, 1)  # begins a segment: the oldest is used again
            ring.sync()
            prepare(ring)
            ring.remove_before(1, offset=ring.next_offset(1) - 40)
            prepare(ring)
            ring.close()
            over = True
        except Stop:
            over = False
        ring, recovery = data.open()
        assert recovery.damages == (), at
        assert recovery.skipped == {}, at
        assert [gap for gap in read_all(ring, 1).gaps if gap.code == "damaged"] == [], at
        if over:
            break
    assert at > 40


def test_m6_damage_at_the_end_leaves_offsets_out_and_says_so(data: Directory) -> None:
    """The offsets of records whose stamps are damaged were given to others."""
    ring, _ = data.open()
    put(ring, 1, b"a")
    put(ring, 2, b"b")
    damaged = put(ring, 1, b"c")
    put(ring, 2, b"d")
    ring.sync()
    put(ring, 2, b"e")  # proves what is before it
    path = data.ring_path / segment_name(0)
    content = bytearray(path.read_bytes())
    content[damaged.lsn + 40] ^= 1
    path.write_bytes(content)
    ring, recovery = data.open()
    assert recovery.skipped == {1: (1, 1 + (damaged.end_lsn - damaged.lsn) * 8192)}
    assert ring.next_offset(2) == 3
    assert lost(ring, 2) == []
    assert lost(ring, 1) == [recovery.skipped[1]]
    base = ring.next_offset(1)
    put(ring, 1, b"goes on")
    ring.sync()
    ring, recovery = data.open()
    assert recovery.skipped == {}
    assert everything(ring, 1) == [(0, b"a"), (base, b"goes on")]


@pytest.mark.moderate
def test_m7_a_copied_directory_says_so_and_has_epochs_of_its_own(tmp_path: Path) -> None:
    original = Directory(tmp_path / "data")
    original.open()
    original.open()
    assert original.journal.moved == ()
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    assert (tmp_path / "copy" / PLACE_FILE).exists()
    copies = []
    for chance in (b"\0\0\0\0", b"\xff\x03\0\0"):
        shutil.rmtree(tmp_path / "copy")
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        copy = Journal.open(tmp_path / "copy", entropy=partial(_first_of, chance))
        assert "inode" in copy.moved
        copies.append(copy.epoch - original.journal.epoch)
        copy.close()
    assert copies == [1, 1024]
    again = Journal.open(tmp_path / "copy")
    assert again.moved == (), "said once"
    again.close()
    (tmp_path / "data").rename(tmp_path / "elsewhere")  # on the same disk it is the same one
    moved = Journal.open(_Unlocked(tmp_path / "elsewhere"))
    assert moved.moved == ()


def _make_unreadable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the disk refuse to read a file, but not one that is put in its place."""
    bad, pread = path.stat().st_ino, os.pread

    def read(fd: int, size: int, position: int) -> bytes:
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, "a bad sector")
        return pread(fd, size, position)

    kept = path.with_name("kept")  # so that no other file gets its number
    os.link(path, kept)
    monkeypatch.setattr(os, "pread", read)


def _first_of(data: bytes, size: int) -> bytes:
    return data[:size]


@pytest.mark.moderate
@pytest.mark.parametrize("by", ["its manifest", "its headers"])
@pytest.mark.parametrize("fate", ["missing", "empty", "damaged", "a bad sector"])
def test_f10_the_ring_file_is_made_anew(
    data: Directory, fate: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one, with a new uuid, was written: no segment belonged to the ring any more."""
    ring, _ = data.open()
    fill(ring, 2)
    ring.sync()
    kept, whole = everything(ring, 1), (data.ring_path / RING_FILE).read_bytes()
    path = data.ring_path / RING_FILE
    if fate == "missing":
        path.unlink()
    elif fate == "a bad sector":
        _make_unreadable(path, monkeypatch)
    else:
        path.write_bytes(b"" if fate == "empty" else whole[:-1] + bytes([whole[-1] ^ 1]))
    if by == "its headers":
        shutil.rmtree(data.path / MANIFESTS)
    assert Journal.open(_Unlocked(data.path)).names() == ["main"]
    ring, recovery = data.open()
    assert [each.file for each in recovery.restored] == [RING_FILE]
    assert ("manifest" if by == "its manifest" else "headers") in recovery.restored[0].reason
    assert recovery.damages == ()
    assert everything(ring, 1) == kept
    assert path.read_bytes() == whole


def test_f10_a_ring_of_which_nothing_tells_is_refused(data: Directory) -> None:
    ring, _ = data.open()
    put(ring, 1, b"a")
    ring.sync()
    shutil.rmtree(data.path / MANIFESTS)
    (data.ring_path / RING_FILE).unlink()
    segment = data.ring_path / segment_name(0)
    segment.write_bytes(b"\xff" * HEAD + segment.read_bytes()[HEAD:])
    with pytest.raises(JournalCorrupt, match="restore this file"):
        data.open()
    assert not (data.ring_path / RING_FILE).exists()


@pytest.mark.parametrize("fate", ["missing", "empty", "damaged", "a bad sector"])
def test_f10_the_identity_is_made_anew_from_the_epoch(
    data: Directory, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, _ = data.open()
    put(ring, 1, b"a")
    ring.sync()
    path = data.path / IDENTITY_FILE
    whole = path.read_bytes()
    if fate == "missing":
        path.unlink()
    elif fate == "a bad sector":
        _make_unreadable(path, monkeypatch)
    else:
        path.write_bytes(b"" if fate == "empty" else whole[:-1] + b"\xff")
    ring, _ = data.open()
    assert [each.file for each in data.journal.restored] == [IDENTITY_FILE]
    assert path.read_bytes() == whole
    assert everything(ring, 1) == [(0, b"a")]


@pytest.mark.moderate
@pytest.mark.parametrize("fate", ["missing", "empty", "damaged", "a bad sector"])
def test_f12_the_epoch_is_above_all_that_were_used(
    data: Directory, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        ring, _ = data.open()
    put(ring, 1, b"a")
    ring.sync()
    data.open()  # which appends nothing
    before = data.journal.epoch
    path = data.path / EPOCH_FILE
    if fate == "missing":
        path.unlink()
    elif fate == "a bad sector":
        _make_unreadable(path, monkeypatch)
    else:
        path.write_bytes(b"" if fate == "empty" else path.read_bytes()[:-1] + b"\xff")
    ring, _ = data.open()
    assert [each.file for each in data.journal.restored] == [EPOCH_FILE]
    assert data.journal.epoch > before
    assert everything(ring, 1) == [(0, b"a")]
    shutil.rmtree(data.path / MANIFESTS)
    path.unlink()
    with pytest.raises(JournalCorrupt, match="give an epoch above"):
        data.open()


@pytest.mark.moderate
def test_f12_the_epoch_is_above_all_that_were_used_where_the_rings_are_gone_too(
    data: Directory,
) -> None:
    for _ in range(3):
        data.open()
    before = data.journal.epoch
    shutil.rmtree(data.path / "rings")
    (data.path / EPOCH_FILE).unlink()
    data.open()
    assert [each.file for each in data.journal.restored] == [EPOCH_FILE]
    assert data.journal.epoch > before


def test_verify_calls_no_ring_good_whose_file_is_to_be_restored(data: Directory) -> None:
    """It told of the file, and that the ring was good."""
    ring, _ = data.open()
    fill(ring, 1)
    ring.sync()
    data.journal.close()
    assert [f.kind for f in inspect.verify(data.path) if f.kind != "progress"] == ["ok"]
    (data.ring_path / RING_FILE).unlink()
    assert [f.kind for f in inspect.verify(data.path) if f.kind != "progress"] == ["restorable"]


@pytest.mark.moderate
def test_verify_and_dump_name_what_is_missing(data: Directory) -> None:
    """Both verify and dump once said that all was well."""
    ring, _ = data.open()
    fill(ring, 4)
    ring.sync()
    data.journal.close()
    whole = {d.lsn for d in inspect.dump(data.path, "main")}
    for number in (0, 2):
        (data.ring_path / segment_name(number)).unlink()
    (data.ring_path / RING_FILE).unlink()
    path = data.ring_path / segment_name(3)
    path.write_bytes(path.read_bytes()[: S // 2])
    before = {path: path.read_bytes() for path in data.path.rglob("*") if path.is_file()}
    kinds = [(f.kind, f.message) for f in inspect.verify(data.path) if f.kind != "progress"]
    assert ("missing", f"positions 0 to {S}: the segment's file is missing") in kinds
    assert ("missing", f"positions {2 * S} to {3 * S}: the segment's file is missing") in kinds
    assert ("restorable", f"{segment_name(3)} was cut off at {S // 2} bytes") in kinds
    assert any(kind == "restorable" and message.startswith("ring: ") for kind, message in kinds)
    dumped = list(inspect.dump(data.path, "main"))
    faults = [(d.lsn, d.lsn + d.size) for d in dumped if d.fault]
    assert (0, S) in faults
    assert (2 * S, 3 * S) in faults
    assert faults[-1][1] == 4 * S
    there = {d.lsn for d in dumped if not d.fault}
    assert there < whole
    assert all(any(low <= lsn < high for low, high in faults) for lsn in whole - there)
    shutil.rmtree(data.ring_path)
    assert [f.kind for f in inspect.verify(data.path) if f.kind != "progress"] == [
        "restorable", "missing"
    ]  # fmt: skip
    assert inspect.stat(data.path).rings[0].damages == 1
    now = {path: path.read_bytes() for path in data.path.rglob("*") if path.is_file()}
    assert now.items() <= before.items(), "nothing was written"


@pytest.mark.moderate
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
def test_f11_the_good_half_of_a_cut_segment_is_served(
    data: Directory, closed: bool, indexed: bool
) -> None:
    """A segment of the wrong size was left alone whole."""
    ring, _ = data.open()
    fill(ring, 3)
    ring.sync()
    kept = dict(everything(ring, 1))
    if indexed:
        prepare(ring)
        assert (data.ring_path / index_name(1)).exists()
    if closed:
        data.journal.close()
    path = data.ring_path / segment_name(1)
    content = path.read_bytes()
    path.write_bytes(content[: S // 2])
    ring, recovery = data.open()
    assert [(each.file, "bytes" in each.reason) for each in recovery.restored] == [
        (segment_name(1), True)
    ]
    damage = recovery.damages[0]
    assert S + S // 2 - 4000 < damage.from_lsn <= S + S // 2 - 1
    assert recovery.damages[-1].to_lsn == 2 * S
    assert recovery.unknown == ()
    assert path.stat().st_size == S
    assert path.read_bytes()[HEAD : damage.from_lsn - S] == content[HEAD : damage.from_lsn - S]
    ((low, high),) = lost(ring, 1)
    assert dict(everything(ring, 1)) == {at: kept[at] for at in kept if not low <= at < high}
    ring, recovery = data.open()
    assert recovery.damages[0].from_lsn == damage.from_lsn, "told at each opening"
    assert recovery.restored == ()


@pytest.mark.moderate
def test_f11_a_cut_of_the_newest_segment_is_damage_and_its_offsets_do_not_come_again(
    data: Directory,
) -> None:
    ring, _ = data.open()
    for _ in range(12):
        put(ring, 1, b"x" * 3000)
    ring.sync()
    following, end = ring.next_offset(1), ring.end_lsn
    for size in (0, 1, 100, HEAD, HEAD + 50, HEAD + 96, 9000, 20_000, end - 1, end, end + 1, S - 1):
        shutil.rmtree(data.path)
        ring, _ = data.open()
        for _ in range(12):
            put(ring, 1, b"x" * 3000)
        ring.sync()
        path = data.ring_path / segment_name(0)
        path.write_bytes(path.read_bytes()[:size])
        (data.ring_path / CLOSED_FILE).unlink()
        ring, recovery = data.open()
        assert max(ring.next_offset(1), recovery.unseen_next) >= following, size
        served = everything(ring, 1)
        assert [at for at, _ in served] == list(range(len(served)))
        assert len(served) >= (min(size, end) - HEAD) // 3400, size
        if size >= end + 96:
            assert recovery.damages == ()
            assert len(served) == 12
        base = ring.next_offset(1) or recovery.unseen_next
        put(ring, 1, b"goes on", base=base)
        ring.sync()
        ring, _ = data.open()
        assert everything(ring, 1) == [*served, (base, b"goes on")]


@pytest.mark.moderate
def test_a_stream_of_which_nothing_is_left_goes_on_where_it_was_told_to_in_later_starts(
    data: Directory,
) -> None:
    ring, _ = data.open()
    for _ in range(4):
        put(ring, 1, b"x" * 3000)
    ring.sync()
    path = data.ring_path / segment_name(0)
    path.write_bytes(path.read_bytes()[:HEAD])
    (data.ring_path / CLOSED_FILE).unlink()
    ring, recovery = data.open()
    following = recovery.unseen_next
    assert following >= 4
    ring.go_on({1: following} | dict.fromkeys(range(1000, 2000), following))
    for _ in range(3):
        put(ring, 2, b"y")
    ring.sync()
    for _ in range(2):
        ring, _ = data.open()
        assert ring.next_offset(1) == following
        assert ring.next_offset(2) == 3
        history = ring.read(1, 0, following, 1 << 20)
        assert [(gap.from_offset, gap.to_offset) for gap in history.gaps] == [(0, following)]


def test_a_cut_spare_is_made_whole(data: Directory) -> None:
    ring, _ = data.open()
    put(ring, 1, b"a")
    prepare(ring)
    ring.sync()
    path = data.ring_path / segment_name(1)
    path.write_bytes(path.read_bytes()[:5000])
    ring, recovery = data.open()
    assert [each.file for each in recovery.restored] == [segment_name(1)]
    assert recovery.damages == ()
    assert path.stat().st_size == S
    fill(ring, 2)
    assert lost(ring, 1) == []


@pytest.mark.moderate
def test_what_is_kept_of_a_ring_does_not_depend_on_its_manifest(data: Directory) -> None:
    ring, _ = data.open()
    fill(ring, 4)
    ring.sync()
    assert read_file(data.journal.storage.child(MANIFESTS), "main") is not None
    shutil.rmtree(data.path / MANIFESTS)
    kept = everything(ring, 1)
    (data.ring_path / segment_name(0)).unlink()
    ring, recovery = data.open()
    assert recovery.damages == (), "without it the oldest one may have been retired"
    assert everything(ring, 1) == kept[-len(everything(ring, 1)) :]
