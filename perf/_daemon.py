"""The broker as a process of its own for the programs of perf/: on the checkout's disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from malamute_py.demo.daemon import Daemon

OUT = Path(__file__).parent / "out"
"""Folder of data directories: on the disk of the checkout, not in a memory file system."""


@contextmanager
def broker(settings: Sequence[str] = ()) -> Iterator[Daemon]:
    """Start a broker on a fresh directory; end it and remove the directory at the end."""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder, Daemon(Path(folder), settings) as daemon:
        yield daemon
