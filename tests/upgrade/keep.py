"""`python -m tests.upgrade.keep [COMMIT]`: keep what a commit writes, for later versions to open.

Owns the archives in directories/. The rule: one is added at each release, and none is ever made
anew: what a version wrote is a fact. The packages of the commit run over the libraries that are
installed here, which an old commit may not fit any more.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.house.checkout import ROOT

KEPT = Path(__file__).parent / "directories"
WRITING = Path(__file__).parent / "writing.py"


def keep(commit: str) -> Path:
    """Have a commit write its directories; returns the archive. Raises FileExistsError."""
    name = _git("log", "-1", "--format=%cs-%h", "--abbrev=8", commit).decode().strip()
    archive = KEPT / f"{name}.tar.xz"
    with tempfile.TemporaryDirectory() as folder:
        source, written = Path(folder, "source"), Path(folder, "written")
        written.mkdir()
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as packed:
            packed.extractall(source, filter="data")
        path = os.pathsep.join(str(source / each) for each in ("", "protocol"))
        subprocess.run(
            [sys.executable, str(WRITING), str(written)],
            check=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )
        with tarfile.open(archive, "x:xz") as packed:
            packed.add(written, arcname=".", filter=_plain)
    return archive


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


if __name__ == "__main__":
    for each in sys.argv[1:] or ["HEAD"]:
        print(keep(each))
