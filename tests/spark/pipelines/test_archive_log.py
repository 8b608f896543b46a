"""The log of an archive: what belongs to it at each entry, and two writers at once."""

from __future__ import annotations

from typing import Any

import pytest

from pyspark_malamute.pipelines.archive_log import (
    ArchivedFile,
    ArchiveError,
    ArchiveLog,
    Entry,
    Gap,
    Settings,
    State,
)
from pyspark_malamute.pipelines.compaction import gathered, spare
from pyspark_malamute.pipelines.folder import FoundFile

SETTINGS = Settings({"stream": "s"}, "append_time", 1, "{}")


class Files:
    """A folder in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def read(self, name: str) -> bytes:
        return self.kept[name]

    def files(self, below: str = "") -> list[FoundFile]:
        return [FoundFile(name, len(content), 0) for name, content in self.kept.items()
                if name.startswith(below)]  # fmt: skip

    def create(self, name: str, content: bytes) -> bool:
        return self.kept.setdefault(name, content) is content

    def remove(self, name: str) -> None:
        del self.kept[name]


@pytest.fixture
def log() -> ArchiveLog:
    begun = ArchiveLog(Files(), lambda: 1000)
    begun.commit(lambda state: begun.entry(state, settings=SETTINGS))
    return begun


def file(name: str, size: int = 1) -> ArchivedFile:
    return ArchivedFile(f"batch=1/date=d/subject_tokens=t/{name}", size)


def add(log: ArchiveLog, name: str, **change: Any) -> State:
    return log.commit(lambda state: log.entry(state, add=[file(name)], **change))


def loaded(log: ArchiveLog) -> State:
    state = log.load()
    assert state is not None
    return state


def test_an_archive_has_what_was_added_and_not_removed(log: ArchiveLog) -> None:
    add(log, "a", position={"streams": {"s": {"offset": 5}}})
    add(log, "b", gaps=[Gap("s", 5, 9)])
    log.commit(lambda state: log.entry(state, add=[file("c")], remove=[file("a").path]))
    state = loaded(log)
    assert [*state.files] == [file("b").path, file("c").path]
    assert (state.version, state.reached, state.gaps) == (3, {"s": 5}, [Gap("s", 5, 9)])
    assert state.removed == {file("a").path: 1000}


def test_a_writer_that_was_second_looks_again(log: ArchiveLog) -> None:
    seen: list[int] = []

    def slow(state: State | None) -> Entry:
        assert state is not None
        if not seen:
            add(log, "other")
        seen.append(state.version)
        return log.entry(state, add=[file("mine")])

    assert log.commit(slow).version == 2
    assert seen == [0, 1]
    assert len(loaded(log).files) == 2


def test_old_entries_are_not_needed_behind_a_whole_one(log: ArchiveLog) -> None:
    for number in range(70):
        add(log, str(number))
    before = loaded(log)
    folder: Any = log._folder
    log.tidy()
    assert sorted(folder.kept) == [f"_log/{version:012d}.json" for version in range(32, 71)]
    assert loaded(log) == before
    assert len(before.files) == 70
    folder.remove(f"_log/{66:012d}.json")
    with pytest.raises(ArchiveError, match="entry 66 is missing before 67"):
        log.load()


def test_small_files_of_a_partition_become_one_as_far_as_the_target_goes() -> None:
    files = [file("a", 5), file("b", 3), file("c", 90), file("d", 4)]
    other = ArchivedFile("batch=2/date=e/subject_tokens=t/x", 1)
    [group] = gathered([*files, other], 12)
    assert [each.bytes for each in group] == [3, 4, 5]
    assert gathered([files[2], other], 12) == []


def test_a_file_on_disk_is_spare_when_the_archive_has_had_it_for_long_no_more() -> None:
    state = State(3, SETTINGS, {"batch=1/kept": file("kept")}, removed={"batch=1/late": 900})
    found = [FoundFile(f"batch=1/{name}", 1, 100) for name in ("kept", "late", "orphan")]
    assert spare(state, [*found, FoundFile("_log/x", 1, 0)], 500) == ["batch=1/orphan"]
    assert spare(state, found, 1000) == ["batch=1/late", "batch=1/orphan"]
