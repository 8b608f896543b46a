"""The place where the figures were taken: machine, kernel, disk, versions, commit.

Owns the reading of these facts, and the refusal of a place where syncing costs nothing.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Final

import msgspec
import psutil

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


class InMemory(Exception):
    """A data directory would be in a memory file system."""


class Disk(msgspec.Struct, frozen=True):
    """The disk that a folder lies on."""

    device: str
    file_system: str
    options: str
    write_cache: str
    """The kernel's word on the device's cache: "write back", "write through" or unknown."""
    model: str = ""


class Machine(msgspec.Struct, frozen=True):
    """The machine of one recording."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    kernel: str
    python: str
    disk: Disk
    virtual: str = ""
    """The virtualisation, as far as it tells."""


_WORKS: Final = "perf/suite/works.py"
_TELLING: Final = (
    ":!*.md",
    ":!tests",
    ":!perf/results",
    ":!perf/__main__.py",
    ":!perf/suite/machine.py",
    ":!perf/suite/plots.py",
    ":!perf/suite/report.py",
    ":!perf/suite/results.py",
    ":!perf/suite/targets.py",
    f":!{_WORKS}",
)
"""Files on which no figure depends: those that show figures; and the works, which are compared by
line."""


class Commit(msgspec.Struct, frozen=True):
    """The state of the checkout."""

    commit: str
    date: str
    dirty: bool


def disk_of(folder: Path) -> Disk:
    """Return the disk that a folder lies on. Raises InMemory for a memory file system."""
    mounts = {mount.mountpoint: mount for mount in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    for place in (resolved, *resolved.parents):
        mount = mounts.get(str(place))
        if mount is None:
            continue
        if mount.fstype in MEMORY_FILE_SYSTEMS:
            raise InMemory(f"{folder.name} is in a {mount.fstype}: measure on a disk (--data)")
        cache, model = _device(resolved)
        return Disk(mount.device, mount.fstype, mount.opts, cache, model)
    return Disk("unknown", "unknown", "", "unknown")


def _device(folder: Path) -> tuple[str, str]:
    """Return the write cache and the model of the block device under a folder."""
    number = os.stat(folder).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    # A partition's queue is its disk's.
    for place in (device, device.resolve().parent):
        cache = place / "queue" / "write_cache"
        if cache.exists():
            model = place / "device" / "model"
            return cache.read_text().strip(), model.read_text().strip() if model.exists() else ""
    return "unknown", ""


def machine(folder: Path) -> Machine:
    """Read the facts; `folder` is where the data will be. Raises InMemory."""
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        system=_system(),
        kernel=platform.release(),
        python=platform.python_version(),
        disk=disk_of(folder),
        virtual=_said_by("systemd-detect-virt"),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def same_code(root: Path, one: str, other: str) -> bool:
    """Whether nothing that is measured, or measures, differs between two commits.

    The list of works may have grown: each line that was in it must be as it was.
    """
    diff = ("git", "-C", str(root), "diff")
    try:
        found = subprocess.run(
            (*diff, "--quiet", one, other, "--", ".", *_TELLING),
            capture_output=True, check=False, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    counts = _said_by(*diff, "--numstat", one, other, "--", _WORKS).split()
    return found.returncode == 0 and (not counts or counts[1] == "0")


def _said_by(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def commit_of(root: Path) -> Commit:
    """Return the checkout's commit; without git, or outside of it, an unknown one."""
    at = ("git", "-C", str(root))
    head = _said_by(*at, "rev-parse", "HEAD")
    if not head:
        return Commit("unknown", "", dirty=True)
    # Results that are being written are no change of the measured code.
    changes = _said_by(
        *at, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!perf/results"
    )
    return Commit(head, _said_by(*at, "show", "-s", "--format=%cI", "HEAD"), dirty=bool(changes))
