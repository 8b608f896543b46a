"""Opening a running broker's log for reading.

Owns the way from a path to a reader. The rules: nothing is written, nothing is locked, and the
broker is not asked; a path that is no data directory, or one that a later version wrote, is
refused by name. Source: FORMAT.md, sections 1 and 8.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from malamute_protocol.pattern import Pattern
from malamute_py.client.arguments import callback_of, integer, one_of, truth
from malamute_py.client.position import StartPoint, milliseconds, start_on_wire
from malamute_py.client.session.calls import make_pattern
from malamute_py.client.words import ReadVisibility, Until
from malamute_py.journal.directory import (
    EPOCH_FILE,
    IDENTITY_FILE,
    RINGS,
    check_version,
    directory_name,
    expected_of,
    is_ring,
)
from malamute_py.journal.errors import JournalCorrupt
from malamute_py.journal.layout import RING_FILE
from malamute_py.journal.marks import read_meta
from malamute_py.journal.storage import FileStorage
from malamute_py.mapped.errors import NoJournal, UnknownStream
from malamute_py.mapped.missing import find_missing
from malamute_py.mapped.reading import POLL_S, Reading
from malamute_py.mapped.request import ReadingNotice, Request
from malamute_py.mapped.segments import Segments
from malamute_py.mapped.streams import Catalogue, StreamEntry
from malamute_py.mapped.tail import RingTail

_MAIN = "main"
"""The ring of the change log."""
_BEGIN_S: Final = 5.0
"""How long a reading waits for the ring of a stream that was just created: a thread of the broker
begins rings one after the other, and create_stream() does not wait for it."""


class LogReader:
    """The log of one broker, running or stopped. Made by open_reader(); one thread at a time."""

    def __init__(self, directory: FileStorage) -> None:
        """directory: the data directory. Callers use open_reader(), which checks it."""
        self._directory = directory
        self._rings: dict[str, tuple[Segments, RingTail]] = {}
        self._catalogue = Catalogue(*self._ring(_MAIN))
        self._catalogue.refresh()

    def streams(self) -> list[StreamEntry]:
        """Return all streams, by name, as of now. Raises OSError."""
        self._catalogue.refresh()
        self._forget_rings()
        return self._catalogue.entries()

    def read(
        self,
        stream: str,
        pattern: str | Pattern = "#",
        *,
        start: StartPoint = "earliest",
        visibility: ReadVisibility = "live",
        end: int | None = None,
        until: Until = "",
        client_time: tuple[datetime | int, datetime | int] | None = None,
        copy: bool = False,
        strict: bool = False,
        on_notice: Callable[[ReadingNotice], None] | None = None,
    ) -> Reading:
        """Read the batches of a stream whose records match a pattern; iterate the result.

        pattern, start, visibility, end, until, client_time, strict, on_notice: as of
        Client.subscribe(). start knows neither FromCursor nor LastPerSubject. Without `end` and
        until="tail" the reading follows what is written, which it looks for each 2 ms; "durable"
        follows what the files say is synced: by the next batch, or once the ring rests.
        Trims and purges hold from when the reading looks: at its beginning, and each 0.25 s at the
        end of the log. Records past the stream's age, or before its newest max_records when the
        reading looks, are a gap, even if a cursor pins them: only the broker knows the pins.
        copy: batches own their bytes. By default most are views of the broker's files: right when
        they are handed out, until the ring comes round; that is checked when the next one is asked
        for, by MappedBatch.check(), and for tables by Reading.check(). A Batch that is no
        MappedBatch owns its bytes, and has no check().
        A stream that was just created may have no files yet: read() waits up to 5 s for them.
        Raises UnknownStream, PatternError, LocalProtocolError, GapError when strict, OSError;
        NoJournal: the broker has not begun the stream's ring; JournalCorrupt: the ring is missing.
        """
        one_of("visibility", visibility, ("live", "durable", "committed"))
        one_of("until", until, ("", "tail"))
        callback_of("on_notice", on_notice)
        request = Request(
            make_pattern(pattern),
            start_on_wire(start),
            visibility,
            None if end is None else integer("end", end, 0),
            until,
            _times(client_time),
            truth("copy", copy),
            truth("strict", strict),
            on_notice,
        )
        entry = self._entry(stream)
        segments, tail = self._ring(entry.ring, _BEGIN_S)
        missing = partial(find_missing, segments, self._directory, entry.ring)
        return Reading(entry, segments, tail, self._catalogue, missing, request)

    def close(self) -> None:
        """Release the files; a mapping goes with the last batch in it that the caller holds."""
        for segments, _ in self._rings.values():
            segments.forget()
        self._rings.clear()

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _entry(self, name: str) -> StreamEntry:
        """Return a stream by its name, as of now. Raises UnknownStream, also if it has no files."""
        self._catalogue.refresh()
        self._forget_rings()
        entry = self._catalogue.find(name)
        if entry is None:
            raise UnknownStream(
                f"there is no stream '{name}' in {self._directory.describe()}; there are:"
                f" {', '.join(each.name for each in self._catalogue.entries()) or 'none'}"
            )
        if entry.settings.memory:
            raise UnknownStream(
                f"the stream '{name}' is kept in the broker's memory: read it with a client"
            )
        return entry

    def _forget_rings(self) -> None:
        """Release the files of rings whose streams were removed: they still take room on disk."""
        for name in self._rings.keys() - self._catalogue.rings() - {_MAIN}:
            self._rings.pop(name)[0].forget()

    def _ring(self, name: str, wait_s: float = 0.0) -> tuple[Segments, RingTail]:
        """Return a ring's segments and tail, opened once.

        wait_s: for how long to wait for a ring that is not begun. Raises NoJournal: it still is
        not; NewerFormat, JournalCorrupt: its file `ring` cannot be used.
        """
        found = self._rings.get(name)
        if found is not None:
            return found
        until = time.monotonic() + wait_s
        while (storage := self._ring_directory(name)) is None:
            if time.monotonic() >= until:
                raise NoJournal(
                    f"{self._directory.describe()} has no ring {name}: no broker has begun it yet,"
                    " or its stream was just removed"
                )
            time.sleep(POLL_S)
        check_version(storage, RING_FILE)
        meta = read_meta(storage)
        if meta is None:
            raise JournalCorrupt(RING_FILE, f"there is no ring in {storage.describe()}")
        segments = Segments(storage, meta)
        found = self._rings[name] = segments, RingTail(segments, self._directory)
        return found

    def _ring_directory(self, name: str) -> FileStorage | None:
        """Return a ring's directory; None while the broker has written no file of the ring.

        Raises JournalCorrupt: the ring's manifest is there, and its directory is not.
        """
        try:
            storage = self._directory.child(RINGS).child(directory_name(name))
        except FileNotFoundError as error:
            if expected_of(self._directory, name) is not None:
                raise JournalCorrupt(
                    f"ring {name}", "its directory is missing, and it has a manifest"
                ) from error
            return None
        if is_ring(storage) or expected_of(self._directory, name) is not None:
            return storage
        return None


def open_reader(path: str | Path) -> LogReader:
    """Open the data directory of a broker on this machine for reading, while the broker runs.

    path: what `malamute broker --data` names. The caller needs the right to read its files, which
    are their owner's alone unless their modes were changed.
    Raises NoJournal: there is no log; NewerFormat; JournalCorrupt; StorageRefused: the directory
    lies on a network file system; PermissionError, OSError.
    """
    try:
        directory = FileStorage(path, read_only=True)
        names = [*directory.names(), *directory.children()]
        if not {IDENTITY_FILE, EPOCH_FILE} & set(names) or RINGS not in names:
            raise NoJournal(
                f"{path} holds no broker's log: name the directory of `malamute broker --data`"
            )
        check_version(directory, IDENTITY_FILE)
        return LogReader(directory)
    except PermissionError as error:
        raise PermissionError(
            error.errno,
            "a broker's log can be read by the user that the broker runs as, and by no other"
            " unless the modes of its files were changed",
            error.filename or str(path),
        ) from error


def _times(client_time: Sequence[datetime | int] | None) -> tuple[int, int] | None:
    """Return the window of client times that a caller gave, in milliseconds; None: it gave none."""
    if client_time is None:
        return None
    first, end = client_time
    return milliseconds(first), milliseconds(end)
