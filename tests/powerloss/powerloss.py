"""Power losses on real files: `python -m tests.powerloss --runs 20`.

Owns the undoing of writes that were not synced. A library that is preloaded into a real broker, and
into the process of its checkpoint, logs every change of the data directory with the bytes that it
replaces (shim.c). After a SIGKILL any subset of the unsynced sectors gets its old bytes, and of the
names that were made, moved or removed in a directory since it was synced the last ones are undone.
Then the broker starts on the rest, and the clients of `malamute verify-promises` check the history.

Faults that are made: those of tests/journal/power.py, on files that the kernel holds. Not made: new
directories are not taken back; sectors that were synced do not change.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from malamute_py.promises.run import Run, RunFindings

SECTOR: Final = 512
SOURCE: Final = Path(__file__).with_name("shim.c")
_HEAD: Final = struct.Struct("<cHH4Q")
_END: Final = struct.Struct("<Q")
"""Place where the last whole record of the log ends: the log begins with it."""
_END_S: Final = 20.0


class Change(NamedTuple):
    """One record of the library's log."""

    at: int
    kind: str
    """Letter: w written, t cut, a allocated, s synced, c created, r renamed, u removed."""
    path: str
    other: str
    position: int
    length: int
    old_size: int
    old: bytes


class Image:
    """The files of one broker, and the log of their changes."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        """directory: of the broker; its data lie in `data` below. Builds the library with cc."""
        self.root = directory / "data"
        self.root.mkdir(parents=True)
        self._log = directory / "changes.log"
        self._taken = directory / "data.taken"
        self._taken.mkdir()
        self._log.touch()
        self._chance = chance
        self._library = directory / "shim.so"
        self.undone_sectors = 0
        self.undone_names = 0
        build = ["cc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(build, check=True, capture_output=True)

    def program(self, *arguments: str) -> tuple[str, ...]:
        """Return how Python is to be started so that its changes are logged."""
        return (
            "env", f"LD_PRELOAD={self._library}", f"POWERLOSS_ROOT={self.root}",
            f"POWERLOSS_LOG={self._log}", sys.executable, *arguments,
        )  # fmt: skip

    def lose(self) -> None:
        """Lose the power; called when the broker was killed."""
        self._wait_for_the_end()
        changes = list(self._changes())
        self._take_back_names(changes)
        self._take_back_sectors(changes)
        os.truncate(self._log, 0)
        for left in self._taken.iterdir():
            left.unlink()

    def _wait_for_the_end(self) -> None:
        """Wait for the checkpoint's process to end by itself; its last changes are logged, too."""
        ours = [process for process in psutil.process_iter() if self._is_ours(process)]
        _, left = psutil.wait_procs(ours, _END_S)
        for process in left:
            process.kill()
        psutil.wait_procs(left)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("POWERLOSS_LOG") == str(self._log)
        except psutil.Error:
            return False

    def _changes(self) -> Iterator[Change]:
        data = self._log.read_bytes()
        if not data:
            return
        (whole,) = _END.unpack_from(data)
        at = _END.size
        while at < whole:
            kind, first, second, position, length, old_size, old_length = _HEAD.unpack_from(
                data, at
            )
            begin = at + _HEAD.size
            end = begin + first + second + (old_length if kind == b"w" else 0)
            path = data[begin : begin + first].decode()
            other = data[begin + first : begin + first + second].decode()
            old = data[begin + first + second : end]
            yield Change(at, kind.decode(), path, other, position, length, old_size, old)
            at = end

    # --- names --------------------------------------------------------------------------------

    def _take_back_names(self, changes: list[Change]) -> None:
        synced: dict[str, int] = defaultdict(int)
        for change in changes:
            if change.kind == "s":
                folder = change.path.removesuffix("/.").removesuffix(".")
                synced[folder] = max(synced[folder], change.position)
        loose: dict[str, list[Change]] = defaultdict(list)
        for change in changes:
            folder = os.path.dirname(change.path)
            if change.kind in "cru" and change.at >= synced[folder]:
                loose[folder].append(change)
        self._moved: dict[str, str] = {}
        for made in loose.values():
            kept = self._chance.randrange(len(made) + 1)
            for change in reversed(made[kept:]):
                self.undone_names += self._undo_name(change)

    def _undo_name(self, change: Change) -> bool:
        path, kept = self.root / change.path, self._taken / str(change.position)
        if change.kind == "c":
            path.unlink(missing_ok=True)
        elif change.kind == "r":
            new = self.root / change.other
            if not new.exists():
                return False
            new.rename(path)
            self._moved[change.other] = change.path
            if change.position:
                os.link(kept, new)
        elif change.position:
            path.unlink(missing_ok=True)
            os.link(kept, path)
        return True

    # --- sectors ------------------------------------------------------------------------------

    def _take_back_sectors(self, changes: list[Change]) -> None:
        names: dict[str, int] = {}
        """Name -> file, with the names of the time when the changes were made."""
        count = 0
        loose: dict[int, list[Change]] = defaultdict(list)
        for change in changes:
            if change.kind == "r":
                names[change.other] = names.pop(change.path, -1)
                if names[change.other] < 0:
                    count += 1
                    names[change.other] = count
                continue
            if change.kind in "cu" or change.path not in names:
                count += 1
                names[change.path] = count
            file = names[change.path]
            if change.kind == "s":
                loose[file] = [each for each in loose[file] if each.at >= change.position]
            elif change.kind in "wta":
                loose[file].append(change)
        now = {file: path for path, file in names.items()}
        for file, made in loose.items():
            path = self.root / self._moved.get(now.get(file, ""), now.get(file, ""))
            if made and path.is_file():
                self._undo_writes(path, made)

    def _undo_writes(self, path: Path, made: list[Change]) -> None:
        chance = self._chance
        before: dict[int, bytes] = {}
        for change in made:
            if change.kind != "w":
                continue
            end = change.position + change.length
            for sector in range(change.position // SECTOR, -(-end // SECTOR)):
                first = max(sector * SECTOR, change.position)
                last = min((sector + 1) * SECTOR, end)
                at = first - change.position
                # Bytes beyond the file's end were none: zeros, where the file stays long.
                old = change.old[at : at + last - first].ljust(last - first, b"\0")
                if sector not in before:
                    before[sector] = b""
                before[sector] = before[sector] or struct.pack("<Q", first) + old
        keep = chance.choice((0.0, 0.2, 0.5, 0.9, 1.0))
        kept_end = made[0].old_size
        with path.open("r+b") as file:
            for sector, record in before.items():
                if chance.random() < keep:
                    kept_end = max(kept_end, (sector + 1) * SECTOR)
                    continue
                file.seek(struct.unpack_from("<Q", record)[0])
                file.write(record[8:])
                self.undone_sectors += 1
            size = file.seek(0, os.SEEK_END)
            if size > kept_end and chance.random() < 0.5:
                file.truncate(kept_end)


async def run(
    directory: Path, seed: int, losses: int, program: tuple[str, ...] = (), patience_s: float = 90.0
) -> tuple[RunFindings, Image]:
    """Lose the power so many times under one broker and its clients; returns the verdict.

    program: the module and arguments before `broker`, for planted bugs.
    """
    image = Image(directory, random.Random(seed))
    one = Run(
        journal=directory / "journal", seed=seed, disturbances=losses, patience_s=patience_s,
        after_kill=image.lose,
    )  # fmt: skip
    found = await one.embedded(
        directory, image.program(*(program or ("-m", "malamute_py.cli"))), kinds=["kill"]
    )
    return found, image


def reason_to_skip() -> str:
    """Return why it cannot be run here; empty: it can."""
    return "" if shutil.which("cc") else "there is no C compiler: install gcc"


def main() -> int:
    """Run; returns 0: nothing was lost; 1: something was."""
    parser = argparse.ArgumentParser(prog="python -m tests.powerloss", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="how many power losses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=10, help="losses of one broker")
    given = parser.parse_args()
    logging.getLogger("malamute").setLevel(logging.CRITICAL)
    faults: list[str] = []
    done, seed = 0, given.seed
    while done < given.runs and not faults:
        losses = min(given.each, given.runs - done)
        with tempfile.TemporaryDirectory(prefix="malamute-power-") as folder:
            found, image = asyncio.run(run(Path(folder), seed, losses))
        faults = found.faults
        done += losses
        print(json.dumps({
            "losses": done, "seed": seed, "seconds": found.seconds, **found.counts,
            "undone_sectors": image.undone_sectors, "undone_names": image.undone_names,
            "faults": faults,
        }), flush=True)  # fmt: skip
        seed += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
