"""An orderly close writes what spares the next opening a walk, and changes nothing else."""

from __future__ import annotations

import errno
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import pytest

from malamute_protocol.stamp import CHANGE, STAMP_BYTES
from malamute_py.journal import (
    NO_KEYS,
    UNINDEXED_FROM,
    Append,
    FileStorage,
    Journal,
    Recovery,
    Ring,
    RingSettings,
)
from malamute_py.journal.index import LiveIndex
from malamute_py.journal.inspect import verify
from malamute_py.journal.layout import (
    ACTIVE_FILE,
    CLOSED_FILE,
    Active,
    Closed,
    control_content,
    pack_file,
    segment_name,
    unpack_file,
)
from malamute_py.journal.recovery import Scan
from malamute_py.journal.storage import replace_file
from tests.journal.rings import SMALL, Faulty, Place, batch, content_of, everything, file_place, put
from tests.journal.test_retention import tidy

MAIL = UNINDEXED_FROM + 254
LARGE = RingSettings(segment_bytes=4 << 20, ring_bytes=32 << 20, index_interval_bytes=2048)
"""Segments with more index entries than one chunk of the live index holds."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Only files outlast a close."""
    return file_place(tmp_path / "ring")


def bundle(ring: Ring, chance: random.Random, number: int) -> list[Append]:
    batches: list[Append] = []
    nexts: dict[int, int] = {}
    for _ in range(chance.choice([1, 2, 5])):
        stream = chance.choice([1, 2, 3, 70_000, MAIL])
        base = nexts.get(stream, ring.next_offset(stream))
        body = b"%d:" % number + bytes(chance.randrange(300))
        producer = {"producer_id": 9, "producer_epoch": 1, "first_sequence": number}
        options: dict[str, Any] = producer if chance.random() < 0.3 else {}
        if stream == MAIL:
            content, crc = content_of([body], **options)
            batches.append(Append(MAIL, base, 1, 1000 + number, content, crc, NO_KEYS))
        else:
            subject = f"s.{chance.randrange(50)}"
            options["fields"] = {"f": str(number % 7)}
            batches.append(
                batch(
                    ring, stream, [body], base=base, time_ms=1000 + number, subject=subject,
                    **options,
                )
            )  # fmt: skip
        nexts[stream] = base + 1
    if chance.random() < 0.3:
        content, crc = control_content([b"change %d" % number])
        batches.append(Append(0, number, 1, 1000 + number, content, crc, None, CHANGE))
    return batches


def filled(place: Place, settings: RingSettings, bundles: int, seed: int = 1) -> Ring:
    ring, _ = place.open(settings, snapshot=lambda: [b"state"])
    chance = random.Random(seed)
    for number in range(bundles):
        ring.append(bundle(ring, chance, number))
        if number % 50 == 0:
            ring.sync()
            ring.prepare_step()
    return ring


def facts(ring: Ring, recovery: Recovery) -> dict[str, Any]:
    """Everything that a ring tells after an opening, but for the time it took."""
    out: dict[str, Any] = {
        "recovery": recovery,
        "streams": ring.streams(),
        "end": (ring.end_lsn, ring.synced_lsn, ring.start_lsn, ring.last_append_time_ms),
        "records": {stream: everything(ring, stream) for stream in ring.streams()},
        "subjects": {stream: ring.last_per_subject(stream) for stream in ring.streams()},
    }
    for segment in ring._space.segments:
        index = ring._files.index(segment)
        headers = {stream: index.headers(stream) for stream in segment.spans}
        out[segment.name] = (
            index.table() if isinstance(index, LiveIndex) else index.table,
            {stream: sorted(found.subjects(), key=str) for stream, found in headers.items()},
            {stream: found.field("f", "3") for stream, found in headers.items()},
            {stream: found.everything() for stream, found in headers.items()},
            dict(segment.spans),
            (segment.expires_at_ms, segment.last_epoch, segment.last_time_ms, segment.damaged),
        )
    return out


def walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the segments that are walked from now on."""
    numbers: list[int] = []
    walk = Scan._walk

    def noted(self: Scan, segment: Any, at: int) -> bool:
        numbers.append(segment.number)
        return walk(self, segment, at)

    monkeypatch.setattr(Scan, "_walk", noted)
    return numbers


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("settings", "bundles", "seed"),
    [
        *((SMALL, 40 + 60 * seed, seed) for seed in (0, 2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((SMALL, 40 + 60 * seed, seed) for seed in (1, 3, 4, 5)),
                (LARGE, 1500, 7),
            )
        ),
    ],
)
def test_a_ring_opened_without_the_walk_is_the_one_that_the_walk_finds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: RingSettings,
    bundles: int,
    seed: int,
) -> None:
    place = file_place(tmp_path / "ring")
    ring = filled(place, settings, bundles, seed)
    ring.close()
    shutil.copytree(tmp_path / "ring", tmp_path / "twin")
    (tmp_path / "twin" / ACTIVE_FILE).unlink()
    twin_place = file_place(tmp_path / "twin")
    twin_place.epoch = place.epoch
    numbers = walked(monkeypatch)
    ring, recovery = place.open(settings)
    active = ring.end_lsn // settings.segment_bytes
    assert active not in numbers
    twin, twin_recovery = twin_place.open(settings)
    assert active in numbers
    assert recovery.clean
    assert facts(ring, recovery) == facts(twin, twin_recovery)

    # And they go on alike: the open entry grows, known headers are known, segments are sealed.
    for one in (ring, twin):
        chance = random.Random(seed + 100)
        for number in range(bundles, bundles + 200):
            one.append(bundle(one, chance, number))
        one.sync()
        tidy(one)
    assert facts(ring, recovery) == facts(twin, recovery)
    ring, recovery = place.open(settings)
    twin, twin_recovery = twin_place.open(settings)
    assert facts(ring, recovery) == facts(twin, twin_recovery)


@pytest.mark.moderate
@pytest.mark.parametrize("kinds", [["change"], ["data"], ["mail"], ["data", "change", "mail"]])
def test_a_ring_with_few_batches_of_any_kind_is_opened_again_and_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, kinds: list[str]
) -> None:
    numbers = walked(monkeypatch)
    for opening in range(4):
        ring, recovery = place.open()
        assert numbers == []
        assert recovery.clean or opening == 0
        assert [control.base_offset for control in recovery.controls] == [
            number for number in range(opening) if "change" in kinds
        ]
        content, crc = control_content([b"record"])
        batches = []
        if "change" in kinds:
            batches.append(Append(0, opening, 1, 1000, content, crc, None, CHANGE))
        if "data" in kinds:
            batches.append(batch(ring, 1, [b"x"]))
        if "mail" in kinds:
            batches.append(Append(MAIL, opening, 1, 1000, content, crc, NO_KEYS))
        ring.append(batches)
        for stream in (1, MAIL):
            here = {1: "data", MAIL: "mail"}[stream] in kinds
            assert [offset for offset, _ in everything(ring, stream)] == [
                offset for offset in range(opening + 1) if here
            ]
        ring.close()


def test_a_ring_closed_empty_is_opened_again(place: Place) -> None:
    for _ in range(3):
        ring, recovery = place.open()
        ring.close()
    assert recovery.end_lsn == 0
    put(place.open()[0], 1, b"a")


@pytest.mark.moderate
def test_the_tools_find_nothing_wrong_with_a_ring_closed_twice(tmp_path: Path) -> None:
    settings = RingSettings(segment_bytes=1 << 20, ring_bytes=8 << 20)
    for start in (0, 100):
        journal = Journal.open(tmp_path)
        ring, recovery = journal.ring("main", settings)
        assert recovery.unknown == ()
        chance = random.Random(start)
        for number in range(start, start + 100):
            ring.append(bundle(ring, chance, number))
        journal.close()
    assert [finding.kind for finding in verify(tmp_path) if finding.kind != "progress"] == ["ok"]


def test_it_counts_once_and_only_as_long_as_nothing_was_appended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(place, SMALL, 20).close()
    kept = {name: (name_path(place) / name).read_bytes() for name in (ACTIVE_FILE, CLOSED_FILE)}
    ring, _ = place.open()
    assert ACTIVE_FILE not in place.storage.names()
    put(ring, 1, b"behind")
    ring.sync()
    # As if a power loss had brought it back: the mark beside it says that it is over.
    (name_path(place) / ACTIVE_FILE).write_bytes(kept[ACTIVE_FILE])
    numbers = walked(monkeypatch)
    ring, recovery = place.open()
    assert numbers
    assert everything(ring, 1)[-1][1] == b"behind"
    assert recovery.dropped == ()


def name_path(place: Place) -> Path:
    return Path(place.storage.describe())


@pytest.mark.moderate
def test_what_does_not_fit_is_ignored(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = filled(place, SMALL, 20)
    last = put(ring, 1, b"last")
    end = ring.end_lsn
    ring.close()
    path = name_path(place)
    good = {file.name: file.read_bytes() for file in path.iterdir()}
    expected = everything(ring, 1)
    numbers = walked(monkeypatch)

    def reopened() -> tuple[Ring, Recovery]:
        numbers.clear()
        return place.open()

    def restore() -> None:
        for file in path.iterdir():
            file.unlink()
        for name, data in good.items():
            (path / name).write_bytes(data)

    active = good[ACTIVE_FILE]
    for at in range(0, len(active), 61):
        restore()
        (path / ACTIVE_FILE).write_bytes(
            active[:at] + bytes([active[at] ^ 0x10]) + active[at + 1 :]
        )
        ring, recovery = reopened()
        assert (ring.end_lsn, everything(ring, 1)) == (end, expected)
        # The magic, the version and the lengths have no checksum, and do not need one.
        assert numbers or at < 16
    for cut in (0, 10, len(active) - 1):
        restore()
        (path / ACTIVE_FILE).write_bytes(active[:cut])
        ring, _ = reopened()
        assert numbers
        assert everything(ring, 1) == expected

    # The last batch is gone, or its segment: met at the opening, as without the file.
    restore()
    place.flip(last.lsn + STAMP_BYTES + 50)
    ring, recovery = reopened()
    assert numbers
    assert [(damage.from_lsn, damage.to_lsn) for damage in recovery.damages] == [(last.lsn, end)]
    restore()
    (path / segment_name(end // SMALL.segment_bytes)).unlink()
    ring, recovery = reopened()
    assert not recovery.clean

    restore()
    reopened()
    assert numbers == []


@pytest.mark.parametrize("part", ["headers", "table", "order"])
def test_an_index_that_is_whole_and_makes_no_sense_costs_a_walk(
    place: Place, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    ring = filled(place, SMALL, 20)
    expected = everything(ring, 1)
    ring.close()
    active = unpack_file(place.storage.read(place.storage.open(ACTIVE_FILE), 0, 1 << 20), Active)
    stored = unpack_file(active.index, list)
    if part == "headers":
        stored[8] = dict.fromkeys(stored[8], b"no message pack")
    elif part == "table":
        stored[6] = stored[6][64:]
    else:
        stored[6] = stored[6][-64:] + stored[6][:-64]

    active.index = packed(stored)
    replace_file(place.storage, ACTIVE_FILE, pack_file(active))
    numbers = walked(monkeypatch)
    ring, recovery = place.open()
    assert recovery.clean
    assert everything(ring, 1) == expected
    assert numbers


def packed(body: list[Any]) -> bytes:
    """A small file with this body and a good checksum."""
    data = msgspec.msgpack.encode(body)
    head = pack_file(Closed(b"", 0, 0, clean=True))[:8]
    return head + struct.pack("<II", google_crc32c.value(data), len(data)) + data


def test_a_close_that_cannot_write_it_is_a_close_all_the_same(tmp_path: Path) -> None:
    storage = Faulty(FileStorage(tmp_path))
    ring, _ = Ring.open(storage, settings=SMALL, epoch=1)
    put(ring, 1, b"a")
    real = storage.create

    def create(name: str, size: int) -> Any:
        if name.startswith(ACTIVE_FILE):
            raise OSError(errno.ENOSPC, "no room for it")
        return real(name, size)

    storage.create = create  # type: ignore[method-assign]
    ring.close()
    ring, recovery = Ring.open(FileStorage(tmp_path), settings=SMALL, epoch=2)
    assert recovery.clean
    assert everything(ring, 1) == [(0, b"a")]


@pytest.mark.moderate
def test_a_segment_with_damage_is_walked_again_at_each_opening(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    bad = put(ring, 1, b"b")
    put(ring, 1, b"c")
    ring.sync()
    ring.close()
    (name_path(place) / ACTIVE_FILE).unlink()
    place.flip(bad.lsn + 30)
    for _ in range(2):
        numbers = walked(monkeypatch)
        ring, recovery = place.open()
        assert numbers == [0]
        assert [damage.from_lsn for damage in recovery.damages] == [bad.lsn]
        ring.close()
        assert ACTIVE_FILE not in place.storage.names()
