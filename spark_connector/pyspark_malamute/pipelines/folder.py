"""A directory in any file system that Spark reaches, as the driver uses it.

Owns the calls of Hadoop's file systems. The rule: a file that is created is there whole or not at
all, and never takes the place of another, so that of two writers of one name one is told.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import SparkSession


class FoundFile(NamedTuple):
    """A file below the directory."""

    path: str
    """Path from the directory."""
    bytes: int
    changed_ms: int


class Folder:
    """A directory, by a path or an URI."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        context: Any = spark.sparkContext
        self._jvm = context._jvm
        self._gateway = context._gateway
        self._conf = context._jsc.hadoopConfiguration()
        given = self._jvm.org.apache.hadoop.fs.Path(path)
        self._files = given.getFileSystem(self._conf)
        self._root = self._files.makeQualified(given)
        self.uri = str(self._root.toString())

    def read(self, name: str) -> bytes:
        """Bytes of a file. Raises FileNotFoundError."""
        place = self._place(name)
        if not self._files.exists(place):
            raise FileNotFoundError(f"{self.uri}/{name}")
        stream = self._files.open(place)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def files(self, below: str = "") -> list[FoundFile]:
        """All files below a directory of this name, however deep; none where there is none."""
        start = self._place(below)
        if not self._files.exists(start):
            return []
        found = []
        cut = len(self._root.toUri().getPath()) + 1
        listed = self._files.listFiles(start, True)
        while listed.hasNext():
            each = listed.next()
            path = each.getPath().toUri().getPath()[cut:]
            found.append(FoundFile(path, each.getLen(), each.getModificationTime()))
        return found

    def create(self, name: str, content: bytes) -> bool:
        """Create a file; False: there is one of this name.

        It is written under another name first, so that it is there whole or not at all.
        """
        draft = self._place(f"{name}.{uuid.uuid4().hex}.draft")
        stream = self._files.create(draft, False)  # False: never over another file
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()
        try:
            return self._give_name(draft, self._place(name))
        finally:
            self._files.delete(draft, False)

    def remove(self, name: str) -> None:
        """Remove a file or a directory with all in it, if it is there."""
        self._files.delete(self._place(name), True)  # True: with all in it

    def _place(self, name: str) -> Any:
        """Return Hadoop's path of a file in the directory; "": of the directory."""
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name) if name else self._root

    def _give_name(self, draft: Any, place: Any) -> bool:
        """Give a draft its name, if no file has it; False: another writer was first."""
        if scheme_of(place) == "file":
            # Hadoop's local file system looks first and renames then: two writers could both win.
            return _link_name(draft.toUri().getPath(), place.toUri().getPath())
        # With no option to overwrite, it fails where the name is taken.
        context = self._jvm.org.apache.hadoop.fs.FileContext
        none = self._gateway.new_array(getattr(self._jvm.org.apache.hadoop.fs, "Options$Rename"), 0)
        try:
            context.getFileContext(place.toUri(), self._conf).rename(draft, place, none)
        except Exception as error:  # py4j's, which the connector does not depend on by itself.
            if "FileAlreadyExistsException" in str(error):
                return False
            raise
        return True


def scheme_of(place: Any) -> str:
    """The kind of file system that a path is in."""
    return str(place.toUri().getScheme())


def _link_name(draft: str, place: str) -> bool:
    """Sync a file of this machine and give it its name as well; False: another file has the name.

    draft, place: paths of the two names; the caller removes the first.
    """
    file = os.open(draft, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    try:
        os.link(draft, place)  # Unlike a rename, a link never takes the place of a file.
    except FileExistsError:
        return False
    with contextlib.suppress(OSError):  # The file system syncs no directories.
        directory = os.open(Path(place).parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    return True
