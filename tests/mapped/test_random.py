"""Random writers and readers: a record is right and comes once, or its loss has a name."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

import malamute_py as malamute
from malamute_protocol.errors import BatchError
from malamute_py.journal import RingSettings, open_reader
from malamute_py.mapped import LogReader, Overwritten
from malamute_py.mapped.segments import SegmentMap
from tests.journal.rings import S
from tests.mapped.logs import Log, body_at
from tests.seeds import seeds

SUBJECTS = ("a.b", "a.c", "d.e.f", "g")
PATTERNS = ("#", "a.*", "d.#", "g")


class Follower:
    """One reading, and what it has seen."""

    def __init__(self, reader: LogReader, log: Log, chance: random.Random) -> None:
        self.stream = chance.choice(sorted(log.tables.streams))
        self.pattern = chance.choice(PATTERNS)
        self.seen: dict[int, tuple[str, bytes]] = {}
        self.gone: set[int] = set()
        here = chance.randrange(log.next(self.stream) + 1)
        self.reading = reader.read(
            log.tables.streams[self.stream].name, self.pattern,
            start=chance.choice(("earliest", "latest", here)), on_notice=self.note,
            copy=chance.random() < 0.5,
        )  # fmt: skip
        self.begin = self.reading.position.next

    def note(self, notice: malamute.Notice) -> None:
        if isinstance(notice, malamute.BegunNotice):
            assert notice.offset == self.begin, notice
            return
        # Nothing is damaged here: what is gone the ring took.
        assert isinstance(notice, malamute.GapNotice), notice
        assert notice.code == "retention", notice
        self.gone.update(range(notice.from_offset, notice.to_offset))

    def read(self, most: int, *, views: bool) -> None:
        for _ in range(most):
            try:
                batch = self.reading.next_batch(0)
            except malamute.Timeout:
                return
            except Overwritten as error:
                for offset in range(error.from_offset, error.to_offset):
                    self.seen.pop(offset, None)
                    self.gone.add(offset)
                continue
            assert batch is not None
            rows: Iterable[tuple[int, str, bytes]]
            if views:
                columns = batch.to_arrow(decode=True).to_pydict()
                rows = zip(columns["offset"], columns["subject"], columns["body"], strict=True)
            else:
                rows = ((record.offset, record.subject, record.body) for record in batch)
            for offset, subject, body in rows:
                assert offset not in self.seen, "a record came twice"
                self.seen[offset] = (subject, body)

    def check(self, written: list[tuple[str, bytes]]) -> None:
        """Compare what was seen with what was written."""
        wanted = {
            offset: record
            for offset, record in enumerate(written)
            if offset >= self.begin and selects(self.pattern, record[0])
        }
        assert all(wanted[offset] == record for offset, record in self.seen.items())
        lost = wanted.keys() - self.seen.keys() - self.gone
        assert not lost, f"{sorted(lost)[:5]} are lost without a word"
        assert self.reading.position.next == len(written)


def run(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    settings = RingSettings(
        segment_bytes=S, ring_bytes=chance.choice((3, 4, 8)) * S,
        index_interval_bytes=chance.choice((0, 2048, 16384)),
        distinct_headers_max=chance.choice((2, 16_384)),
    )  # fmt: skip
    log = Log(path, settings)
    rings = ("main", "own")
    streams = [log.create(f"s{n}", rings[chance.random() < 0.3]) for n in range(3)]
    written: dict[int, list[tuple[str, bytes]]] = {stream: [] for stream in streams}
    with open_reader(path) as reader:
        followers: list[Follower] = []
        for _ in range(chance.randrange(20, 120)):
            act = chance.random()
            if act < 0.55:
                stream = chance.choice(streams)
                for _ in range(chance.choice((1, 2, 10, 40))):
                    count, first = chance.choice((1, 1, 3, 20)), log.next(stream)
                    subjects = [chance.choice(SUBJECTS) for _ in range(count)]
                    bodies = [
                        body_at(first + n)[: chance.choice((0, 5, 700))] for n in range(count)
                    ]
                    log.put(stream, *bodies, subject=subjects)
                    written[stream] += list(zip(subjects, bodies, strict=True))
            elif act < 0.7:
                log.tidy()
            elif act < 0.73:
                log.close()
                log.open()
                log.ring("own")
            elif act < 0.8 or not followers:
                followers.append(Follower(reader, log, chance))
            else:
                chance.choice(followers).read(
                    chance.choice((1, 3, 50)), views=chance.random() < 0.5
                )
        for follower in followers:
            follower.read(100_000, views=False)
            follower.check(written[follower.stream])
    log.close()


def selects(pattern: str, subject: str) -> bool:
    return {"#": True, "a.*": subject.startswith("a."), "d.#": subject == "d.e.f"}.get(
        pattern, subject == pattern
    )


@pytest.mark.moderate
@pytest.mark.parametrize("seed", seeds(1, 3))
def test_a_few_random_logs_are_read_right(tmp_path: Path, seed: int) -> None:
    run(tmp_path / "data", seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_random_logs_are_read_right(tmp_path: Path, seed: int) -> None:
    run(tmp_path / "data", seed)


@pytest.mark.moderate
def test_a_reader_that_trusts_its_mapping_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: nothing looks whether a file was given to another segment."""
    monkeypatch.setattr(SegmentMap, "intact", lambda self: True)
    with pytest.raises((AssertionError, BatchError, Overwritten, IndexError)):  # noqa: PT012 - any
        for seed in range(6):
            run(tmp_path / str(seed), seed)
