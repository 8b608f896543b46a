"""Snapshots of a whole data directory: taken beside a running broker, verified, restored.

Owns the copy of rings and tables that belong together, without asking the broker for anything. The
rules: a ring is copied up to a position that is proven to be synced, and no further; ring main is
copied at least as far as the tables, and as everything that was there when the copy was asked for;
segments that the ring gave up while it was read are left out, in front only; no transaction is in
the copy in part or comes twice from it (cuts.py); a copy gets its name only when it is whole and
verified; a restored directory begins far above every epoch that the original may have had since.
Source: journal/FORMAT.md, sections 2 to 5; docs/design.md, Queues and
the checkpoint.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Final

import msgspec

from malamute_protocol.stamp import DATA, LAST_OF_BUNDLE, Stamp
from malamute_py.changelog.applying import STREAM_CHANGES, apply
from malamute_py.changelog.records import decode_change
from malamute_py.changelog.tables import Tables
from malamute_py.journal import FileStorage, Follower, FollowLost, JournalLocked
from malamute_py.journal import inspect as journal_inspect
from malamute_py.journal.directory import (
    EPOCH_FILE,
    FAILED,
    IDENTITY_FILE,
    RINGS,
    Epoch,
    check_epoch,
    directory_name,
    is_directory_name,
    read_epoch,
    read_identity,
    ring_names,
)
from malamute_py.journal.errors import EpochsSpent, JournalCorrupt, JournalError
from malamute_py.journal.layout import (
    CLOSED_FILE,
    LOCK_FILE,
    RING_FILE,
    TRIMS_FILE,
    Closed,
    index_name,
    index_number,
    pack_file,
    read_segment_header,
    segment_name,
    segment_number,
)
from malamute_py.journal.marks import read_mark, read_meta
from malamute_py.journal.storage import DIRECTORY_MODE, kind_of, replace_file
from malamute_py.journal.types import SEGMENT_HEADER_BYTES
from malamute_py.store.cuts import Asked, Cut, Decided, decided, shorten
from malamute_py.store.database import (
    DATABASE,
    MARK,
    connect,
    damaged,
    lock,
    position_of,
    sync_directory,
)
from malamute_py.store.errors import ChangesLost, StoreError
from malamute_py.store.files import (
    PIECE_BYTES,
    copy_allocated,
    copy_small,
    regular,
    sum_of,
    sums,
    sync_all,
)
from malamute_py.store.loading import check, load
from malamute_py.store.reading import MAIL_STREAM, Changes

MAIN: Final = "main"
MANIFEST: Final = "snapshot.json"
CONTENT: Final = "data"
"""Directory of the copied files, beside the manifest."""
EPOCH_LEAP: Final = 1 << 13
"""Epochs between a snapshot's and those of what is restored from it. The original may go on, and a
position must never mean two records. The original may be started as often meanwhile, 22 times a day
for a year; and 1,000 snapshots may be restored and taken in a chain before EPOCH_MAX."""
_FORM: Final = 1
_OF_DIRECTORY: Final = frozenset([IDENTITY_FILE, EPOCH_FILE, MARK, DATABASE])
_OF_RING: Final = frozenset([RING_FILE, TRIMS_FILE, CLOSED_FILE])
_TRIES: Final = 5
"""How often a ring is copied anew when it comes round while it is read."""
_SYNC_WAIT_S: Final = 30.0
_LOCK_WAIT_S: Final = 30.0

Progress = Callable[[int, str], None]
"""Callback for progress: (bytes done so far, what is being done)."""


class SnapshotFailed(StoreError):
    """A snapshot could not be taken, verified or restored; nothing is left of the attempt."""

    code = "snapshot"


class Manifest(msgspec.Struct, kw_only=True):
    """The description that a snapshot carries of itself."""

    form: int = _FORM
    taken_ms: int
    directory: str
    """uuid of the data directory."""
    epoch: int
    rings: dict[str, tuple[int, int]]
    """Name of a ring -> (first position, end)."""
    lsn: int
    """Position of the tables; -1: there were none."""
    files: dict[str, tuple[int, int]]
    """Path below the content -> (bytes, CRC32C)."""
    findings: list[str] = []
    """Damage that the original had already."""

    @property
    def bytes(self) -> int:
        """Return the size of all files."""
        return sum(size for size, _ in self.files.values())


class _Lapped(Exception):
    """The ring overwrote what was being copied."""


def _no_progress(_: int, __: str) -> None:
    """Tell the progress to no caller."""


# --- taking ------------------------------------------------------------------------------


def take(
    directory: Path, target: Path, *, progress: Progress = _no_progress, now_ms: int | None = None
) -> Manifest:
    """Copy a data directory, of a running broker or a stopped one, to a new directory.

    For `malamute snapshot take`. The copy has everything that was confirmed as synced before the
    call. Raises SnapshotFailed: no whole copy can be had now; JournalError, StoreError, OSError:
    rings or tables cannot be read.
    """
    source = FileStorage(directory, read_only=True)
    identity = read_identity(source)
    if identity is None:
        raise SnapshotFailed(f"{directory} holds no journal; name a broker's --data")
    with made_whole(target) as made, contextlib.ExitStack() as held:
        try:
            held.callback(source.lock(LOCK_FILE).release)
            # The checkpoint's process of a killed broker may be at its last transaction.
            held.enter_context(lock(directory, _LOCK_WAIT_S))
            running = False
        except JournalLocked:
            running = True
        except FileNotFoundError:
            running = False  # A lock without a file is held by no process.
        copy = _Copy(directory, made / CONTENT, progress, running=running)
        rings, lsn = copy.run()
        manifest = Manifest(
            taken_ms=time.time_ns() // 1_000_000 if now_ms is None else now_ms,
            directory=identity.uuid.hex(),
            epoch=read_epoch(FileStorage(made / CONTENT, read_only=True), identity).epoch,
            rings=rings,
            lsn=lsn,
            files={},
        )
        manifest.findings = list(_findings(made / CONTENT, progress))
        manifest.files = dict(sums(made / CONTENT))
        data = msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"
        (made / MANIFEST).write_bytes(data)
        sync_all(made)
    return manifest


@contextlib.contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """Make a directory that gets its name when the block has gone well; else nothing is left of it.

    Raises SnapshotFailed: the name is that of something already.
    """
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SnapshotFailed(f"{target} is there already; name a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # the rest of an attempt that was killed
    unfinished.mkdir(mode=DIRECTORY_MODE)
    try:
        yield unfinished
        if target.exists():
            target.rmdir()  # it is empty, as was looked above
        unfinished.rename(target)
        sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


class _Copy:
    """One copy of a data directory under way."""

    def __init__(self, directory: Path, target: Path, progress: Progress, *, running: bool) -> None:
        """running: whether a broker has the directory, and may write to it meanwhile."""
        self._directory = directory
        self._target = target
        self._progress = progress
        self._running = running
        self._storage = FileStorage(directory, read_only=True)
        self.done = 0
        """Bytes copied so far."""

    def run(self) -> tuple[dict[str, tuple[int, int]], int]:
        """Copy everything: ring main, the tables, the other rings, in this order.

        So whatever tables and other rings refer to is in the copy of ring main, or is cut off of
        them. Returns the rings' bounds, [first position, end), and the position of the tables.
        """
        self._target.mkdir()
        for name in (IDENTITY_FILE, EPOCH_FILE, MARK):
            copy_small(self._directory / name, self._target / name)
        # Marks of failed syncs. A running broker's rings are copied up to what was synced only.
        failed = self._directory / FAILED
        if failed.is_dir() and not self._running:
            (self._target / FAILED).mkdir()
            for name in filter(is_directory_name, FileStorage(failed, read_only=True).names()):
                copy_small(failed / name, self._target / FAILED / name)
        (self._target / RINGS).mkdir()
        bounds: dict[str, tuple[int, int]] = {}
        lsn = -1
        # Where each ring ends as the snapshot is asked for: all before that will be in the copy.
        asked = {
            name: _RingCopy(self, name, running=True).asked()
            for name in ring_names(self._storage)
            if name != MAIN and self._running
        }
        for name in self._in_order():
            ring = _RingCopy(self, name, running=self._running)
            for tries in range(1, _TRIES + 1):
                try:
                    ring.begin()
                    ring.extend(ring.wait_synced())
                    if name == MAIN:
                        # The tables have come further than the copy meanwhile: it goes on to there.
                        lsn = self._copy_tables()
                        ring.extend(max(ring.wait_synced(), lsn))
                        main = ring
                    elif self._running:
                        # A ring that `asked` lacks was made after the snapshot was asked for. What
                        # ring main says is read once, where it matters.
                        before = asked.get(name, Asked(end=0, trims=None))
                        ring.cut(before, cache(partial(self._decided, main)))
                    break
                except _Lapped:
                    if tries == _TRIES:
                        raise SnapshotFailed(
                            f"the ring {name} went round {tries} times while it was read, or"
                            " segments of it are missing: try again with less load, look at it"
                            " with malamute journal verify, or give it a larger ring_bytes"
                        ) from None
            bounds[name] = ring.finish()
        return bounds, lsn

    def _copy_tables(self) -> int:
        """Copy the tables while they may be written; returns their position, -1 without any."""
        path, to = self._directory / DATABASE, self._target / DATABASE
        to.unlink(missing_ok=True)
        if not path.exists():
            return -1
        try:
            with (
                contextlib.closing(connect(path)) as source,
                contextlib.closing(sqlite3.connect(to, isolation_level=None)) as copy,
            ):
                source.execute("PRAGMA query_only = 1")
                source.backup(copy)
                # The copy has the source's mode, WAL, in which a second file belongs to it. In this
                # mode it is one file alone.
                copy.execute("PRAGMA journal_mode = DELETE")
                return position_of(copy).lsn
        except sqlite3.Error as error:
            raise damaged(error) from error

    def _in_order(self) -> Iterator[str]:
        """Yield ring main, then the other rings, listed anew once the caller has copied ring main.

        So each stream whose creation is in the copy of ring main has its ring in the copy.
        """
        yield from (name for name in ring_names(self._storage) if name == MAIN)
        yield from (name for name in sorted(ring_names(self._storage)) if name != MAIN)

    def _decided(self, main: _RingCopy) -> Decided:
        """Return the facts about transactions that the copies of tables and ring main have.

        No ring's copy is cut where damage hides the facts: verify() reports the damage.
        """
        try:
            return main.decided(self._target / DATABASE)
        except (StoreError, JournalError, sqlite3.Error):
            # Every commit counts as known: each number is below `mail_next`, and none undecided.
            return Decided(frozenset(), frozenset(), mail_next=1 << 64)

    def count(self, size: int, what: str) -> None:
        """Report the progress: `size` bytes more were copied, of `what`."""
        self.done += size
        self._progress(self.done, what)


class _RingCopy:
    """The copy of one ring, in pieces up to positions that are known to be synced."""

    def __init__(self, copy: _Copy, name: str, *, running: bool) -> None:
        """running: whether a broker may write to the ring meanwhile."""
        self._copy = copy
        self._name = name
        self._running = running
        here = f"{RINGS}/{directory_name(name)}"
        self._from = copy._directory / here
        self._to = copy._target / here
        self._storage = FileStorage(self._from, read_only=True)
        meta = read_meta(self._storage)
        if meta is None:
            raise JournalCorrupt(RING_FILE, f"missing in {self._from}")
        self._meta = meta
        self._size = meta.segment_bytes
        self._first = self._at = 0
        """Position at which the copy begins, and up to which it has come."""
        self._epoch = 0
        """Epoch of the last batch that _ends() found."""

    def begin(self) -> None:
        """Begin with the oldest segment; pieces of a try that the ring overtook are thrown away."""
        shutil.rmtree(self._to, ignore_errors=True)
        self._to.mkdir()
        # First offsets are read before the segments: they may not be ahead of what is copied.
        for name in (RING_FILE, TRIMS_FILE):
            copy_small(self._from / name, self._to / name)
        numbers = self._numbers()
        self._first = self._at = numbers[0] * self._size if numbers else 0

    def _numbers(self) -> list[int]:
        """Return the numbers of the ring's segments, spares included.

        A file amid its preparation for another use is left out: its header has another number.
        """
        found = []
        for name in self._storage.names():
            number = segment_number(name)
            if number is not None and self._header_number(name) == number:
                found.append(number)
        return sorted(found)

    def _header_number(self, name: str) -> int | None:
        """Return the number in a segment file's header; None: gone, or not of this ring."""
        try:
            with regular(self._from / name) as file:
                header = read_segment_header(file.read(SEGMENT_HEADER_BYTES))
        except FileNotFoundError:
            return None
        ours = header is not None and header.ring == self._meta.uuid
        return header.number if ours and header is not None else None

    def wait_synced(self) -> int:
        """Wait until the ring is synced to where it ends now, and return up to where it is synced.

        The ring of a stopped broker is copied to its end. Raises SnapshotFailed: not in time.
        """
        end, synced = self._ends()
        if not self._running:
            return end
        deadline = time.monotonic() + _SYNC_WAIT_S
        while synced < end:
            # A later batch says so, or the ring's mark once it is at rest.
            if time.monotonic() > deadline:
                raise SnapshotFailed(
                    f"the ring {self._name} is not synced beyond position {synced}: see the"
                    " broker's log"
                )
            time.sleep(0.05)
            _, synced = self._ends()
        return synced

    def _ends(self) -> tuple[int, int]:
        """Return (end of the last whole bundle, position up to which it says that it is synced)."""
        end = synced = epoch = 0
        last: Stamp | None = None

        def note(stamp: Stamp) -> bool:
            """Remember the stamp that ends the last whole bundle; False: no content is wanted."""
            nonlocal last, epoch
            if stamp.epoch < epoch:
                # A batch of an earlier life: the ring ended before it, and nothing after it counts.
                epoch = 1 << 64
            elif stamp.flags & LAST_OF_BUNDLE:
                last, epoch = stamp, stamp.epoch
            return False

        # From the newest segment back to one with a whole bundle: spares have none.
        for number in reversed(self._numbers()):
            base, epoch = number * self._size, 0
            with contextlib.suppress(FollowLost):
                for _ in Follower(self._storage, self._meta).read(base, base + self._size, note):
                    pass
            if last is not None:
                end, synced, self._epoch = last.lsn + last.size, last.synced_lsn, last.epoch
                break
        closed = read_mark(self._storage, CLOSED_FILE, Closed)
        if closed is not None and closed.ring == self._meta.uuid:
            synced = max(synced, closed.end_lsn)
            end = max(end, closed.end_lsn)
        return end, synced

    def extend(self, to_lsn: int) -> None:
        """Copy on, segment by segment, up to a position, which is the end of a bundle.

        Raises _Lapped: the ring has come round meanwhile.
        """
        while self._at < to_lsn:
            number, begin = divmod(self._at, self._size)
            stop = min(to_lsn - number * self._size, self._size)
            self._piece(number, begin, stop)
            self._at = number * self._size + stop

    def _piece(self, number: int, begin: int, stop: int) -> None:
        """Copy [begin, stop) of a segment. Raises _Lapped: the broker uses its file anew."""
        name = segment_name(number)
        try:
            source = regular(self._from / name)
        except FileNotFoundError:
            raise _Lapped from None
        with source, (self._to / name).open("r+b" if begin else "w+b") as copy:
            # It has a segment's size at once: parts that are not copied read as zeros, and take no
            # room in the snapshot.
            copy.truncate(self._size)
            copy.seek(begin)
            source.seek(begin)
            left = stop - begin
            while left:
                data = source.read(min(left, PIECE_BYTES))
                if not data:
                    raise _Lapped
                copy.write(data)
                left -= len(data)
                self._copy.count(len(data), f"ring {self._name}")
        # A file that is used again has another name by now, and another number inside.
        if self._header_number(name) != number:
            raise _Lapped

    def asked(self) -> Asked:
        """Return where the ring ends now, and its file of first offsets, for cut()."""
        end, _ = self._ends()
        path = self._from / TRIMS_FILE
        with contextlib.suppress(FileNotFoundError), regular(path) as file:
            return Asked(end, file.read())
        return Asked(end, None)

    def decided(self, database: Path) -> Decided:
        """Return the facts about transactions that this copy, of ring main, and the tables have."""
        copy = FileStorage(self._to, read_only=True)
        return decided(database, copy, self._meta, self._first, self._at)

    def cut(self, asked: Asked, main: Callable[[], Decided]) -> None:
        """Take back the end of the copy where it would tear a transaction: see cuts.py.

        asked: the ring when the snapshot was asked for; nothing before its end is taken back.
        main: returns what the copy of ring main says of transactions.
        """
        size = self._size
        # From the segment in which the ring ended when the snapshot was asked for.
        first = max(self._first, (asked.end - 1) // size * size)
        follower = Follower(FileStorage(self._to, read_only=True), self._meta)
        end = Cut(follower, asked.end, main).find(first, self._at)
        if end >= self._at:
            return
        if self._first > asked.end:
            raise SnapshotFailed(
                f"the ring {self._name} went round while others were copied, and has lost all"
                " that it had before: try again with less load, or give it a larger ring_bytes"
            )
        shorten(self._to, size, self._at, end)
        # First offsets may not be ahead of what is left.
        (self._to / TRIMS_FILE).unlink(missing_ok=True)
        if asked.trims is not None:
            (self._to / TRIMS_FILE).write_bytes(asked.trims)
        self._at = end

    def finish(self) -> tuple[int, int]:
        """Write down where the copy ends, as an orderly close does; returns its bounds."""
        # Segments that are copied whole.
        numbers = range(self._first // self._size, self._at // self._size)
        for name in map(index_name, numbers):
            # Unlike a segment, an index that the ring replaced meanwhile does no harm: it says to
            # which segment it belongs, and is not used for another one.
            copy_small(self._from / name, self._to / name)
        mark = Closed(self._meta.uuid, self._at, self._epoch, clean=True)
        if self._at:  # Else nothing was ever written: a start needs no mark.
            replace_file(FileStorage(self._to), CLOSED_FILE, pack_file(mark))
        return self._first, self._at


# --- verifying -----------------------------------------------------------------------------


def verify(snapshot: Path, *, progress: Progress = _no_progress) -> tuple[Manifest, list[str]]:
    """Return a snapshot's manifest, and what is wrong with its files, its rings and its tables.

    For `malamute snapshot verify`, and before each restoring. Raises SnapshotFailed: it is none;
    OSError.
    """
    manifest = _read_manifest(snapshot)
    content = snapshot / CONTENT
    wrong = [fault for name in manifest.files if (fault := _name_fault(content, name))]
    if wrong:
        # Nothing of it is read: the names may lead anywhere.
        return manifest, wrong
    done = 0
    for name, (size, crc) in manifest.files.items():
        try:
            found = sum_of(content / name)
        except FileNotFoundError:
            wrong.append(f"{name}: missing")
        else:
            if found != (size, crc):
                wrong.append(f"{name}: not as it was written")
        done += size
        progress(done, "files")
    if not wrong:
        # What was wrong with the original already is no fault of its snapshot.
        known = set(manifest.findings)
        wrong += [finding for finding in _findings(content, progress) if finding not in known]
    return manifest, wrong


def _name_fault(content: Path, name: str) -> str:
    """Say what is wrong with a manifest's name of a file; "" when nothing is.

    A snapshot may come from anywhere. Its manifest may name files of a data directory below the
    content and no others, and no symbolic link may lead elsewhere.
    """
    if not _may_be_named(name):
        return f"{name!r}: no file of a data directory has this name"
    # The content itself, then each directory on the way to the file.
    path = content
    *directories, _ = name.split("/")
    for directory in ("", *directories):
        path /= directory
        kind = kind_of(path)
        if kind not in ("", "a directory"):
            return f"{path.relative_to(content.parent)}: is {kind} and no directory"
    kind = kind_of(content / name)  # "" for a regular file, and for none: that one is missing
    return f"{name}: is {kind} and no file" if kind else ""


def _may_be_named(name: str) -> bool:
    """Whether a manifest may name this file: only files with such names does take() copy."""
    match name.split("/"):
        case [file]:
            return file in _OF_DIRECTORY
        case [directory, ring]:
            return directory == FAILED and is_directory_name(ring)
        case [directory, ring, file]:
            known = file in _OF_RING
            known = known or segment_number(file) is not None or index_number(file) is not None
            return directory == RINGS and is_directory_name(ring) and known
    return False


def _read_manifest(snapshot: Path) -> Manifest:
    """Read the manifest of a snapshot. Raises SnapshotFailed."""
    try:
        with regular(snapshot / MANIFEST) as file:
            data = file.read()
    except FileNotFoundError:
        raise SnapshotFailed(f"{snapshot} is no snapshot: it has no {MANIFEST}") from None
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise SnapshotFailed(f"{snapshot / MANIFEST} cannot be understood: {error}") from None
    if manifest.form != _FORM:
        raise SnapshotFailed(f"{snapshot} is of form {manifest.form}, this program knows {_FORM}")
    return manifest


def _findings(content: Path, progress: Progress) -> Iterator[str]:
    """Yield what is wrong with a copy: of its rings, then of its tables against its log.

    An index file does not count, since it can be made anew.
    """
    for finding in journal_inspect.verify(content):
        if finding.kind == "progress":
            progress(finding.done, f"verifying ring {finding.ring}")
        elif finding.kind not in ("ok", "index"):
            yield f"ring {finding.ring}: {finding.message}"
    path = content / DATABASE
    if path.exists():
        try:
            yield from _tables_against_log(path, content)
        except sqlite3.Error as error:
            yield f"{DATABASE}: {error}"
        except (StoreError, JournalError) as error:
            yield f"{DATABASE}: {error}"


def _tables_against_log(path: Path, content: Path) -> Iterator[str]:
    """Yield what is wrong where tables and log of a copy do not fit each other.

    The log after the tables is applied to them, as a start does it. Then each body that a row still
    wants must be in the tables or in the log. Raises StoreError, JournalError, sqlite3.Error: one
    of them cannot be read, or they are of different logs.
    """
    main = FileStorage(content / RINGS / directory_name(MAIN), read_only=True)
    meta, closed = read_meta(main), read_mark(main, CLOSED_FILE, Closed)
    numbers = [number for number in map(segment_number, main.names()) if number is not None]
    with contextlib.closing(connect(path, read_only=True)) as connection:
        check(connection, whole=True)
        queues, position = load(connection), position_of(connection)
        # Numbers of all bodies that there are: those in the tables here, those of the log below.
        kept = {base for (base,) in connection.execute("SELECT base FROM bodies")}
    if meta is None or closed is None or not numbers:
        if position.lsn:
            raise ChangesLost(f"the tables are at {position.lsn} of a log that is not there")
        return
    if position.lsn > closed.end_lsn:
        raise ChangesLost(f"the tables are at {position.lsn}, the log ends at {closed.end_lsn}")
    first = min(numbers) * meta.segment_bytes
    follower = Follower(main, meta)
    changes = Changes(follower.read, position.change_next)
    for _, record in changes.read([(max(first, position.lsn), closed.end_lsn)]):
        change = decode_change(record)
        if not isinstance(change, STREAM_CHANGES):  # changes of streams concern no queue
            apply(Tables(), queues, change)

    def note(stamp: Stamp) -> bool:
        """Add the number of each batch of mail in the log to `kept`; False: no content needed."""
        if stamp.stream == MAIL_STREAM and stamp.control_kind == DATA:
            kept.add(stamp.base_offset)
        return False

    with contextlib.suppress(FollowLost):  # The journal's own tool reports this.
        for _ in follower.read(first, closed.end_lsn, note):
            pass
    gone = sorted(
        ({base for _, base in queues.messages} | set(queues.requests) | set(queues.staged)) - kept
    )
    if gone:
        yield f"{DATABASE}: {len(gone)} bodies are nowhere, the first is of message {gone[0]}"


# --- restoring -----------------------------------------------------------------------------


def restore(snapshot: Path, target: Path, *, progress: Progress = _no_progress) -> Manifest:
    """Make a new data directory from a snapshot, which is verified first.

    For `malamute snapshot restore`. Its epoch is far above the original's, which may go on: no
    position means two records. Raises SnapshotFailed: it is damaged, its epochs are spent, or the
    target is there; OSError.
    """
    manifest, wrong = verify(snapshot, progress=progress)
    if wrong:
        raise SnapshotFailed(
            f"{snapshot} is damaged ({'; '.join(wrong[:3])}): use another snapshot"
        )
    try:
        # One epoch is left above it, so that the restored directory can be started at all.
        check_epoch(manifest.epoch + EPOCH_LEAP + 1, f"what is restored from {snapshot}")
    except EpochsSpent as error:
        raise SnapshotFailed(str(error)) from error
    with made_whole(target) as made:
        done = 0
        for name, (size, _) in manifest.files.items():
            to = made / name
            to.parent.mkdir(parents=True, exist_ok=True)
            copy_allocated(snapshot / CONTENT / name, to, size)
            done += size
            progress(done, "restoring")
        storage = FileStorage(made)
        identity = read_identity(storage)
        if identity is None:
            raise SnapshotFailed(f"{snapshot} has no identity of a data directory")
        last = read_epoch(storage, identity)
        raised = Epoch(identity.uuid, last.epoch + EPOCH_LEAP, last.openings)
        replace_file(storage, EPOCH_FILE, pack_file(raised))
        sync_all(made)
    return manifest
