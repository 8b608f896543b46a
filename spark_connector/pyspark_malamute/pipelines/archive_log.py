"""The log of an archive: which files belong to it, and up to where of each stream.

Owns the entries in `_log` of an archive's directory and what follows from them. The rules: a file
belongs to the archive from the entry that adds it up to the one that removes it, and to nothing
else; an entry has the number after the newest one, and of two writers of one number one is refused
and looks again; what was archived and the position in the streams stand in the same entry.
Source: ARCHITECTURE.md, The archive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from pyspark_malamute.errors import MalamuteSourceError
from pyspark_malamute.pipelines.folder import FoundFile

FORMAT: Final = 1
_LOG: Final = "_log"
_WHOLE_EVERY: Final = 32
"""Entries after which one has all that is known, so that older ones need not be read."""
_FORGOTTEN_MS: Final = 7 * 24 * 3_600_000
"""Age at which a whole entry leaves out that a file was removed."""


class ArchiveError(MalamuteSourceError):
    """An archive cannot be written or read as was asked for."""


class Settings(msgspec.Struct, frozen=True):
    """Properties of an archive that never change."""

    selection: dict[str, str]
    """Options of the source that say which records, and which columns of them."""
    date_of: str
    """Column whose day is in the path."""
    subject_tokens: int
    """Tokens of the subject that are in the path."""
    schema: str
    """Columns of the files, as Spark writes a schema in JSON."""
    columns: str = ""
    """Option `columns` of the source; empty: it is not given."""
    format: int = FORMAT


class ArchivedFile(msgspec.Struct, frozen=True):
    """A Parquet file."""

    path: str
    """Path from the archive's directory."""
    bytes: int

    @property
    def partition(self) -> str:
        """Directories of the path that tell of day and subject, between batch and file."""
        return "/".join(self.path.split("/")[1:-1])


class Gap(msgspec.Struct, frozen=True):
    """Records that were gone before they were archived."""

    stream: str
    first: int
    end: int
    """Offset after the last of them; 0: the stream itself was removed."""

    def __str__(self) -> str:
        """The gap in words."""
        if not self.end:
            return f"stream '{self.stream}' from offset {self.first} on, which was removed"
        return f"offsets {self.first} to {self.end - 1} of stream '{self.stream}'"


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change of an archive."""

    version: int
    made_ms: int
    settings: Settings | None = None
    add: list[ArchivedFile] = []
    remove: list[str] = []
    position: dict[str, Any] | None = None
    """The source's offset: everything before it is archived. None: as before."""
    gaps: list[Gap] = []
    whole: bool = False
    """Whether the entry has all that older ones say; `removed` belongs to it."""
    removed: dict[str, int] = {}
    """As of State."""


class State(msgspec.Struct):
    """An archive at one version."""

    version: int
    settings: Settings
    files: dict[str, ArchivedFile] = {}
    position: dict[str, Any] = {}
    gaps: list[Gap] = []
    removed: dict[str, int] = {}
    """Path of a file that was removed from the archive and may still be on disk -> when."""

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def reached(self) -> dict[str, int]:
        """Stream -> offset before which everything is archived."""
        streams = self.position.get("streams", {})
        return {name: int(at["offset"]) for name, at in streams.items()}

    @property
    def ends(self) -> dict[str, int]:
        """Stream, also one that was removed -> offset before which all archived records of it lie.

        A replay has what lies before. A stream that was made again has those of the former one as
        well.
        """
        ends = self.reached
        for gap in self.gaps:
            if not gap.end:  # The stream was removed, archived up to here.
                ends[gap.stream] = max(ends.get(gap.stream, 0), gap.first)
        return ends


class ReadableFolder(Protocol):
    """The calls that reading the log makes; class Folder has them."""

    def read(self, name: str) -> bytes: ...  # noqa: D102
    def files(self, below: str = "") -> list[FoundFile]: ...  # noqa: D102


class LogFolder(ReadableFolder, Protocol):
    """The calls that writing the log makes besides; class Folder has them, too."""

    def create(self, name: str, content: bytes) -> bool: ...  # noqa: D102
    def remove(self, name: str) -> None: ...  # noqa: D102


def applied(state: State | None, entry: Entry) -> State:
    """The state after an entry. Raises ArchiveError: the entries do not follow each other.

    state: before the entry; None: there is none, and the entry is the log's first or `whole`. An
    entry that is `whole` begins anew: it has all that the entries before it say.
    """
    if state is None or entry.whole:
        if entry.settings is None:
            raise ArchiveError(f"the archive's log is damaged: entry {entry.version} begins it")
        state = State(entry.version, entry.settings, removed=dict(entry.removed))
    elif entry.version != state.version + 1:
        raise ArchiveError(
            f"the archive's log is damaged: entry {state.version + 1} is missing before "
            f"{entry.version}"
        )
    files = dict(state.files)
    removed = dict(state.removed)
    for path in entry.remove:
        files.pop(path, None)
        removed[path] = entry.made_ms
    files.update({file.path: file for file in entry.add})
    position = state.position if entry.position is None else entry.position
    return State(
        entry.version, state.settings, files, position, [*state.gaps, *entry.gaps], removed
    )


def load_state(folder: ReadableFolder) -> State | None:
    """The archive at its newest version; None: there is none here yet. Raises ArchiveError."""
    entries: list[Entry] = []
    for version in reversed(_versions(folder)):
        entries.append(_read_entry(folder, version))
        if entries[-1].whole:
            break  # it has the state by itself, without the entries before it
    state: State | None = None
    for entry in reversed(entries):
        state = applied(state, entry)
    return state


class ArchiveLog:
    """The log in an archive's directory."""

    def __init__(self, folder: LogFolder, clock_ms: Callable[[], int]) -> None:
        self._folder = folder
        self._clock_ms = clock_ms

    def load(self) -> State | None:
        """The archive at its newest version; None: there is none here yet. Raises ArchiveError."""
        return load_state(self._folder)

    def commit(self, make: Callable[[State | None], Entry]) -> State:
        """Append the entry that make() has for the newest state, and return the state after it.

        make: called again where another writer was first. Raises what make() raises.
        """
        while True:
            state = self.load()
            entry = make(state)
            after = applied(state, entry)
            if state is not None and entry.version % _WHOLE_EVERY == 0:
                entry = self._whole(after)
            # False where another writer has this version: all of it is made anew then.
            if self._folder.create(_entry_name(entry.version), msgspec.json.encode(entry)):
                return after

    def entry(self, state: State | None, **change: Any) -> Entry:
        """Make the entry that follows a state, for commit(); change: fields of Entry."""
        version = 0 if state is None else state.version + 1
        return Entry(version, self._clock_ms(), **change)

    def tidy(self) -> None:
        """Remove entries that no reader needs: those before the last whole one but one.

        For the end of a compaction. A reader that has just listed the entries may still go by the
        whole one before the last.
        """
        # The first entry, 0, follows no state, and is written as it is.
        whole = [each for each in _versions(self._folder) if each and each % _WHOLE_EVERY == 0]
        if len(whole) < 2:
            return
        for version in _versions(self._folder):
            if version < whole[-2]:
                self._folder.remove(_entry_name(version))

    def _whole(self, state: State) -> Entry:
        """Return an entry that repeats all of a state, so that earlier entries need not be read."""
        now_ms = self._clock_ms()
        kept = {path: at for path, at in state.removed.items() if now_ms - at < _FORGOTTEN_MS}
        return Entry(
            state.version,
            now_ms,
            state.settings,
            add=list(state.files.values()),
            position=state.position,
            gaps=state.gaps,
            whole=True,
            removed=kept,
        )


def _versions(folder: ReadableFolder) -> list[int]:
    """Return the versions of which the log has an entry, ascending."""
    names = (file.path.rpartition("/")[2] for file in folder.files(_LOG))
    return sorted(
        int(name.removesuffix(".json"))
        for name in names
        # Neither drafts nor the files that file systems add.
        if name.endswith(".json") and name[0] != "."
    )


def _read_entry(folder: ReadableFolder, version: int) -> Entry:
    """Read one entry of the log. Raises ArchiveError: damaged, or of another format."""
    try:
        entry = msgspec.json.decode(folder.read(_entry_name(version)), type=Entry)
    except msgspec.MsgspecError as error:
        raise ArchiveError(f"the archive's log is damaged: entry {version}: {error}") from error
    if entry.settings is not None and entry.settings.format != FORMAT:
        raise ArchiveError(
            f"the archive has format {entry.settings.format}, and this connector knows "
            f"{FORMAT}: use the connector that wrote it, or a newer one"
        )
    return entry


def _entry_name(version: int) -> str:
    """Return the name of an entry's file; in the order of names, entries follow each other."""
    return f"{_LOG}/{version:012d}.json"
