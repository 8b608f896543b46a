"""Files of settings that commands replace whole.

Owns the way in which one is replaced. The rules: a crash leaves the old file or the new one; a
failure leaves nothing beside it; a new file is for its owner only; two commands that read and
replace a file do so one after the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other commands out while the body changes a file of a folder, which is on disk then.

    The lock is the folder's: the file itself is another one after each change. folder: of the file
    itself, not of a link to it. Raises OSError.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_whole(path: Path, text: str) -> None:
    """Replace a file by a rename, after the new one is on disk.

    Owner and group stay; the group may read it at most, and others nothing. path: of the file
    itself, since a link to it would be replaced.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    mode, owner = 0o600, None
    if path.exists():
        facts = path.stat()
        mode, owner = facts.st_mode & 0o640, (facts.st_uid, facts.st_gid)
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w", encoding="utf-8") as out:
            if owner is not None and owner != (os.geteuid(), os.getegid()):
                try:
                    os.fchown(out.fileno(), *owner)
                except PermissionError as error:
                    # A group that the person is not in, and that may not read the file, is let go.
                    if owner[0] != os.geteuid() or mode & 0o040:
                        reason = "you may not give a new file its owner and group"
                        raise PermissionError(error.errno, reason, str(path)) from error
            os.fchmod(out.fileno(), mode)
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
