"""Small files of an archive made into larger ones, while it is read and written.

Owns which files are taken together, and when those before them are removed from disk. The rules:
the new files take the place of the old ones in one entry of the log, so that a reader has a record
once; an old file stays on disk for those who read it; files of runs that were killed go as well.
Source: ARCHITECTURE.md, The archive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from pyspark.sql import SparkSession

from pyspark_malamute.pipelines.archive_log import (
    ArchivedFile,
    ArchiveError,
    ArchiveLog,
    Entry,
    State,
)
from pyspark_malamute.pipelines.archiving import PARTITIONS, clock_ms, write_files
from pyspark_malamute.pipelines.folder import Folder, FoundFile
from pyspark_malamute.pipelines.reading import opened, rows_of

_TASKS_MAX: int = 200
"""Tasks of a job that writes files, at most."""
_ROUND_FILES: int = 2_000
"""Files that one job takes together, about."""


class Compacted(NamedTuple):
    """Outcome of a compaction."""

    files_before: int
    files: int
    bytes: int
    removed: int
    """Files that were removed from disk."""


def compact(
    spark: SparkSession, path: str, *, target_bytes: int = 128 << 20, keep_ms: int = 24 * 3_600_000
) -> Compacted:
    """Make larger files of an archive's small ones.

    target_bytes: most bytes of the files that become one. keep_ms: how long a file stays on disk
    that the archive no longer has; a reader may take that long.
    Raises ArchiveError: there is no archive, or another compaction is under way.
    """
    folder, state = opened(spark, path)
    log = ArchiveLog(folder, clock_ms)
    before = len(state.files)
    while groups := gathered(state.files.values(), target_bytes):
        state = _compacted(spark, folder, log, state, groups)
    removed = 0
    for file in spare(state, folder.files(), clock_ms() - keep_ms):
        folder.remove(file)
        removed += 1
    log.tidy()
    return Compacted(before, len(state.files), state.bytes, removed)


def gathered(files: Iterable[ArchivedFile], target_bytes: int) -> list[list[ArchivedFile]]:
    """Groups of files that one round makes into one file each; none when all is done.

    A group has files of one partition (a day and a subject's tokens), at least two, and about
    target_bytes at most.
    """
    partitions: dict[str, list[ArchivedFile]] = defaultdict(list)
    for file in files:
        partitions[file.partition].append(file)
    groups: list[list[ArchivedFile]] = []
    for _, found in sorted(partitions.items()):
        size, group = 0, []
        # The smallest first: as many as possible become one.
        for file in sorted(found, key=lambda each: (each.bytes, each.path)):
            size += file.bytes
            if size > target_bytes:
                break
            group.append(file)
        if len(group) > 1:
            groups.append(group)
            if sum(map(len, groups)) >= _ROUND_FILES:  # The rest is for the next round.
                break
    return groups


def spare(state: State, found: Iterable[FoundFile], before_ms: int) -> list[str]:
    """Paths of files on disk that compact() removes: the archive has not had them since a time.

    found: files on disk. A file that the archive never had, as of a run that was killed, counts by
    its own age. before_ms: that time; what was removed or written since is kept.
    """
    return [
        file.path
        for file in found
        if file.path.startswith("batch=")
        and file.path not in state.files
        and state.removed.get(file.path, file.changed_ms) < before_ms
    ]


def _compacted(
    spark: SparkSession,
    folder: Folder,
    log: ArchiveLog,
    state: State,
    groups: list[list[ArchivedFile]],
) -> State:
    """Write each group of files anew as one file, and log that; returns the new state.

    The old files stay on disk, for those who read them. Raises ArchiveError, and leaves the archive
    as it was: rows are missing in the new files, or another compaction has replaced one of the old
    files.
    """
    old = [file.path for group in groups for file in group]
    rows = rows_of(spark, folder, state, old)
    # A partition's rows go to one task, which writes them as one file.
    ordered = rows.repartition(min(len(groups), _TASKS_MAX), *PARTITIONS).sortWithinPartitions(
        *PARTITIONS, "stream", "offset"
    )
    new = write_files(folder, ordered, state.settings, whole=True)
    left = rows_of(spark, folder, state, [file.path for file in new]).count()
    if left != rows.count():
        raise ArchiveError(f"a compaction of {folder.uri} lost rows; the archive is as it was")

    def entry(newest: State | None) -> Entry:
        """Return the entry by which the new files take the place of the old ones."""
        if newest is None or any(path not in newest.files for path in old):
            raise ArchiveError(f"another compaction of {folder.uri} is under way; let it end")
        return log.entry(newest, add=new, remove=old)

    return log.commit(entry)
