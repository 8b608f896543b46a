"""Errors of the journal: each says what happened, to what, and what to do next.

Owns the exception types, and which errors of the system mean damage. The rule: the type decides
what the caller may do next (wait, free space, stop, repair), and unless it says otherwise nothing
was written. Source: docs/design.md (Journal; Safety).
"""

from __future__ import annotations

import errno

from malamute_protocol.errors import MalamuteError


class JournalError(MalamuteError):
    """Base of everything that the journal raises; `code` is the wire's name for it."""

    code = "internal"


class JournalFull(JournalError):
    """The ring has no room and may not overwrite; nothing was written."""

    code = "full"


class DiskFull(JournalError):
    """The disk gave no room for the file (full, or failing); nothing was written."""

    code = "disk_full"


class JournalFailed(JournalError):
    """A write or sync failed: the ring takes nothing more until it is opened again.

    `synced_lsn` is the last position known to be on disk.
    """

    code = "journal_failed"

    def __init__(self, reason: str, synced_lsn: int = 0) -> None:
        """synced_lsn: what lies before it is safe."""
        super().__init__(reason)
        self.synced_lsn = synced_lsn


class JournalLocked(JournalError):
    """Another process has this data directory open."""

    code = "conflict"

    def __init__(self, where: str, what: str) -> None:
        """where: the directory. what: who has it, and what to do."""
        super().__init__(f"{where}: {what}")
        self.what = what


class JournalCorrupt(JournalError):
    """A file that is needed cannot be understood; it was left as it is."""

    code = "damaged"

    def __init__(self, file: str, reason: str, position: int = 0) -> None:
        """file: its name in the storage. position: byte in the file."""
        super().__init__(f"{file} at byte {position}: {reason}")
        self.file = file
        self.position = position


class NewerFormat(JournalError):
    """The files were written by a later version, in a form that this one does not know."""

    code = "version"


class StorageRefused(JournalError):
    """The place cannot keep the journal's promises (a network file system)."""

    code = "bad_setting"


class NotAFile(OSError):
    """Something else stands where a file, or a directory, should be; it was not opened."""

    def __init__(self, path: str, kind: str, wanted: str = "a file") -> None:
        """path: where. kind: what stands there: "a FIFO"."""
        super().__init__(
            errno.EINVAL,
            f"{kind} stands where {wanted} should be: move it away, put back what belongs there",
            path,
        )
        self.kind = kind


class EpochsSpent(JournalError):
    """A directory has no epoch left: numbers in memory, counted from it, would pass 2^63."""

    code = "limit"


class BatchTooLarge(JournalError):
    """The batch or bundle cannot fit the ring's segments; nothing was written."""

    code = "too_large"


class FollowLost(JournalError):
    """A follower cannot read on: positions [from_lsn, to_lsn) are not there, or not any more.

    `code` says why: `retention` (retired before they were read) or `damaged`. From to_lsn
    on there may be more; a reader that can do without the part in between goes on from there.
    """

    code = "damaged"

    def __init__(self, from_lsn: int, to_lsn: int, code: str, reason: str) -> None:
        """from_lsn, to_lsn: what is not there; a reader may go on at to_lsn.

        code: as of the class.
        """
        super().__init__(f"positions {from_lsn} to {to_lsn} cannot be followed: {reason}")
        self.from_lsn = from_lsn
        self.to_lsn = to_lsn
        self.code = code


def is_damage(error: OSError) -> bool:
    """Whether a file could not be read for damage: a bad sector, or something that is no file."""
    return error.errno == errno.EIO or isinstance(error, NotAFile)
